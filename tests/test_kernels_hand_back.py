"""K3 and the other kernels that write or search memory: one multiplication, one rounding, and no neighbour touched."""

import itertools
import math

import numpy as np
import pytest
import strategies as draw
from backends import available
from devices import nothing_is_launched
from folds import accumulate, finalise, hand_back, measure, totals_of, zero_sums
from kernel_calls import (
    ALL_16_BITS,
    OFFSETS,
    fold_of,
    measured,
    numbers,
    scaled,
    size_of,
    sums_of,
)

from gradengine.errors import CallerError
from gradengine.kernels import CHUNK, ClipPlan, Decision, decide, kernels_for
from gradengine.kernels.host import HostKernels

NAN, INF = math.nan, math.inf


def interesting_floats():
    """Each sign, exponent and upper fraction of fp32, with lower bits that lie on, beside and between ties."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((ALL_16_BITS.astype(np.uint32) << 16)[:, None] + low).reshape(-1).view(np.float32)


def float16_floats():
    """fp32 on and beside every fp16 number and every tie between two, and beyond both ends."""
    numbers = ALL_16_BITS[:0x7C01].view(np.float16).astype(np.float32)
    ties = (numbers[1:-1] + numbers[:-2]) / 2
    places = np.concatenate([numbers[:-1], ties, np.array([65519.996, 65520, 1e30, 1e-8, 2.0**-25, 3e-8], np.float32)])
    beside = [places, np.nextafter(places, np.float32(INF)), np.nextafter(places, np.float32(-INF))]
    return np.concatenate([sign * values for values in beside for sign in (np.float32(1), np.float32(-1))])


def signalling(dtype, size):
    """NaNs that no multiplication leaves as they are, so that their bits show whether there was one."""
    bits = {"float32": 0x7F800001, "float16": 0x7C01, "bfloat16": 0xFF81}[dtype]
    return np.full(size, bits, f"u{draw.DTYPES[dtype].itemsize}").view(draw.DTYPES[dtype])


class TestScale:
    @pytest.mark.parametrize("source", draw.DTYPES)
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_one_multiplication_and_one_rounding(self, backend, source, dtype):
        """Of every size, from every offset to every offset."""
        limits = [*draw.LIMITS, *(2 * draw.LIMITS[: len(draw.SMALL_SIZES)])]
        factors = itertools.cycle((1, 0.3, 2.0**-20))
        for offsets, limit, factor in zip(itertools.product(OFFSETS, OFFSETS), limits, factors, strict=False):
            values = draw.random_array(3, size_of(backend, limit), source)
            got = scaled(backend, values, factor, dtype, offsets)
            draw.assert_same_bits(got, draw.scaled(values, factor, dtype))

    @pytest.mark.parametrize("factor", [1, 0.3, 0.5, 2.0**20, 1e-40, 0, NAN])
    def test_many_of_bf16_are_each_as_it_is_alone(self, factor):
        """The host joins small ones, and rounds many in less time where a factor leads to no ties; NaN is apart."""
        kernels, dtype = HostKernels(2), draw.DTYPES["bfloat16"]
        numbers = ALL_16_BITS[~np.isnan(ALL_16_BITS.view(dtype).astype(np.float32))]
        parts = [*np.split(numbers[:-1], [0, 1, 4, 999]), ALL_16_BITS, np.tile(numbers, 8)[1:], numbers[-1:]]
        products = [np.full_like(part, 7) for part in parts]
        sources = [kernels.device.view(part.view(dtype), "source") for part in parts]
        places = [kernels.device.writable_view(product.view(dtype), "place") for product in products]
        for chosen in (*((i,) for i in range(8)), range(8)):
            kernels.scale([sources[i] for i in chosen], np.float32(factor), [places[i] for i in chosen])
            for i in chosen:
                draw.assert_same_values(products[i].view(dtype), draw.scaled(parts[i].view(dtype), factor, "bfloat16"))
                products[i][:] = 7

    def test_each_of_bf16_by_its_own_groups_factor(self):
        values = [np.full(size, 3, draw.DTYPES["bfloat16"]) for size in (5, 2, 4)]
        arena = HostKernels(1).arena([HostKernels.device.view(array, "w") for array in values])
        plan = ClipPlan((0, 1, 0), (1.0, math.inf))
        HostKernels(1).hand_back(arena, decide(np.array([4.0, 9.0, 0.0]), plan, 1.0), plan)
        assert [array.tolist() for array in values] == [[1.5] * 5, [3] * 2, [1.5] * 4]

    @pytest.mark.parametrize(("dtype", "values"), [("bfloat16", interesting_floats), ("float16", float16_floats)])
    @pytest.mark.parametrize("factor", [1, 0.5, 0.75])
    def test_rounds_to_nearest_even_and_overflows_to_infinity(self, backend, dtype, values, factor):
        got = scaled(backend, values(), factor, dtype)
        draw.assert_same_values(got, draw.scaled(values(), factor, dtype))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("factor", [1, 0.5, 0.3, 1e-3, 1e-40, 0])
    def test_subnormals_and_nan_are_kept(self, backend, dtype, factor):
        """What comes in, the product and what goes out may each be subnormal; none is flushed to zero."""
        tiny = np.tile(np.array([1e-45, -3e-40, 1.2e-38, 2.4e-38, 3e-5, 6e-8, -0.0], np.float32), 5)
        nan = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)
        for values in (tiny, np.concatenate([tiny, np.tile(nan, 9)])):
            draw.assert_same_values(scaled(backend, values, factor, dtype), draw.scaled(values, factor, dtype))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_factor_one_in_place_writes_nothing(self, backend, dtype):
        values = signalling(dtype, backend.chunk + 5)
        buffer = backend.buffer(values)
        backend.kernels.scale([buffer], np.float32(1), [buffer])
        draw.assert_same_bits(backend.get(buffer), values)
        backend.kernels.scale([buffer], np.float32(0.5), [buffer])
        assert (draw.storage_bits(backend.get(buffer)) != draw.storage_bits(values)).all()

    def test_factor_one_in_place_may_be_read_only(self):
        kernels, array = HostKernels(1), np.ones(5, np.float32)
        array.flags.writeable = False
        buffer = kernels.device.view(array, "w")
        kernels.scale([buffer], np.float32(1), [buffer])

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("offset", OFFSETS)
    def test_in_place_with_neighbours(self, backend, dtype, offset):
        """Tensors that touch, as in a framework's flat buffer: each thread block keeps to its own."""
        sizes = (1, 30, backend.chunk + 77, 15, 2, 23, 64)
        arrays = [draw.random_array(i, size, dtype) for i, size in enumerate(sizes)]
        whole, parts = backend.buffers_in_one(arrays, offset)
        chosen = [0, 1, 2, 4, 6]
        backend.kernels.scale([parts[i] for i in chosen], np.float32(0.3), [parts[i] for i in chosen])
        arrays = [draw.scaled(array, 0.3, dtype) if i in chosen else array for i, array in enumerate(arrays)]
        draw.assert_same_bits(backend.get(whole)[offset:], np.concatenate(arrays))


class TestHandBack:
    GROUPS = (0, 1, 0, 2, 1)
    PLAN = ClipPlan(GROUPS, (1.0, 1e9, 0.5))

    @pytest.fixture
    def arrays(self, backend):
        return [draw.random_array([5, i], size) for i, size in enumerate((5, 0, backend.chunk + 2, 33, 70))]

    @staticmethod
    def decided(backend, arrays, plan, divisor, *, zero_if_bad=True, offset=0):
        buffers = [backend.buffer_at(array, offset) for array in arrays]
        sums = sums_of(backend, buffers)
        return buffers, finalise(backend.kernels, buffers, sums, plan, divisor, zero_if_bad=zero_if_bad)

    @staticmethod
    def assert_scaled(backend, buffers, arrays, factors, dtype="float32"):
        for buffer, array, factor in zip(buffers, arrays, factors, strict=True):
            draw.assert_same_bits(backend.get(buffer), draw.scaled(array, factor, dtype))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_each_group_has_its_own_factor(self, backend, arrays, dtype):
        buffers, decision = self.decided(backend, arrays, self.PLAN, 3.0)
        of_group = numbers(decision.factors)
        assert len(set(of_group)) == 3
        factors = [of_group[group] for group in self.GROUPS]
        there = [backend.buffer_at(np.full(array.size, 7, draw.DTYPES[dtype]), 3) for array in arrays]
        hand_back(backend.kernels, buffers, decision, self.GROUPS, there)
        self.assert_scaled(backend, there, arrays, factors, dtype)
        hand_back(backend.kernels, buffers, decision, self.GROUPS, buffers)
        self.assert_scaled(backend, buffers, arrays, factors)

    def test_groups_of_many_of_16_bits_have_their_own_factors(self):
        backend, groups = available("host"), (0, 1) * 8
        arrays = [draw.random_array([5, i], 40, "bfloat16") for i in range(16)]
        buffers, decision = self.decided(backend, arrays, ClipPlan(groups, (1.0, 0.5)), 3.0)
        hand_back(backend.kernels, buffers, decision, groups, buffers)
        self.assert_scaled(backend, buffers, arrays, [decision.factors[group] for group in groups], "bfloat16")

    def test_only_those_asked_for(self, backend, arrays):
        buffers, decision = self.decided(backend, arrays, self.PLAN, 3.0)
        hand_back(backend.kernels, [buffers[3], buffers[0]], decision, [2, 0], [buffers[3], buffers[0]])
        factors = numbers(decision.factors)
        self.assert_scaled(backend, buffers, arrays, [factors[0], 1, 1, factors[2], 1])

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_a_skipped_step_hands_back_zeros(self, backend, dtype):
        """Also where the factor is 1 and the destination is the source: NaN times anything is NaN."""
        arrays = [np.ones(33, draw.DTYPES[dtype]), np.full(backend.chunk + 5, NAN, draw.DTYPES[dtype])]
        buffers, decision = self.decided(backend, arrays, ClipPlan((0, 0), (INF,)), 1.0, offset=3)
        there = [backend.buffer_at(np.full(array.size, NAN, np.float16), 5) for array in arrays]
        hand_back(backend.kernels, buffers, decision, [0, 0], there)
        hand_back(backend.kernels, buffers, decision, [0, 0], buffers)
        for buffer in (*there, *buffers):
            assert (draw.storage_bits(backend.get(buffer)) == 0).all()

    def test_a_bad_step_that_is_not_skipped_hands_on_what_came(self, backend):
        arrays, plan = [np.array([1, NAN, -INF], np.float32), np.full(40, 8, np.float32)], ClipPlan((0, 0), (1.0,))
        buffers, decision = self.decided(backend, arrays, plan, 4.0, zero_if_bad=False)
        hand_back(backend.kernels, buffers, decision, plan.groups, buffers)
        for buffer, array in zip(buffers, arrays, strict=True):
            draw.assert_same_values(backend.get(buffer), draw.scaled(array, 0.25, "float32"))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_factor_one_in_place_writes_nothing(self, backend, dtype):
        values = signalling(dtype, backend.chunk + 5)
        buffers, decision = self.decided(backend, [values], ClipPlan((0,), (1.0,)), 1.0, zero_if_bad=False, offset=1)
        hand_back(backend.kernels, buffers, decision, [0], buffers)
        draw.assert_same_bits(backend.get(buffers[0]), values)

    def test_a_decision_that_the_host_took(self, backend, arrays):
        buffers = [backend.buffer(array) for array in arrays]
        decision = decide(measured(backend, *arrays), self.PLAN, 3.0)
        hand_back(backend.kernels, buffers, decision, self.GROUPS, buffers)
        self.assert_scaled(backend, buffers, arrays, [decision.factors[group] for group in self.GROUPS])
        skipping = Decision(NAN, (), (), (), (), (), NAN, skipped=True, bad=(0,))
        hand_back(backend.kernels, buffers, skipping, self.GROUPS, buffers)
        assert all((draw.storage_bits(backend.get(buffer)) == 0).all() for buffer in buffers)


class TestFirstNonFinite:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("limit", [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (2, 4)])
    def test_index_and_value(self, backend, dtype, limit):
        index = size_of(backend, limit)
        for first, then in ((-INF, NAN), (NAN, INF)):
            values = np.ones(2 * backend.chunk + 5, draw.DTYPES[dtype])
            values[index:] = then
            values[index] = first
            found = backend.kernels.first_non_finite(backend.buffer_at(values, 1))
            np.testing.assert_array_equal(found, (index, first))

    @pytest.mark.parametrize("values", [[], [1.0], [3e38, -3e38], [1e-45]])
    def test_none(self, backend, values):
        assert backend.kernels.first_non_finite(backend.buffer(np.array(values, np.float32))) is None


class TestMemory:
    @pytest.mark.parametrize("size", [0, 1, 31, 513, CHUNK + 1])
    def test_allocations_are_aligned(self, kernels, size):
        buffers = [kernels.device.allocate(size) for _ in range(5)]
        for buffer in buffers:
            assert (buffer.size, buffer.nbytes, buffer.shape) == (size, 4 * size, (size,))
            assert (buffer.dtype, buffer.writable, buffer.device) == ("float32", True, kernels.device.name)
            assert size == 0 or buffer.pointer % 128 == 0

    def test_zero_is_written_everywhere_and_nowhere_else(self, backend):
        sizes = (0, 3, backend.chunk + 1, 5)
        buffers = [backend.buffer(np.full(size, NAN, np.float32)) for size in sizes]
        _, (odd, beside) = backend.buffers_in_one([np.full(size, NAN, np.float16) for size in (7, 9)], 3)
        backend.kernels.fill_zero([*buffers[:3], odd])
        assert all((draw.storage_bits(backend.get(buffer)) == 0).all() for buffer in (*buffers[:3], odd))
        assert np.isnan(backend.get(buffers[3])).all()
        assert np.isnan(backend.get(beside).view(np.float16)).all()

    @pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1)])
    def test_a_buffer_as_an_array(self, backend, shape):
        buffer = backend.buffer(np.arange(6, dtype=np.float32))
        array = backend.kernels.device.array(buffer, shape)
        assert array.shape == shape
        assert backend.kernels.device.view(array, "w").pointer == buffer.pointer

    def test_nothing_is_launched_for_nothing(self, backend):
        kernels, one = backend.kernels, backend.buffer(np.ones(1, np.float32))
        sums, of_one, empty = kernels.partial_sums([]), kernels.partial_sums([0]), kernels.device.allocate(0)
        decision = finalise(kernels, [empty], of_one, ClipPlan((0,), (1.0,)), 1.0, zero_if_bad=False)
        with nothing_is_launched(backend):
            for buffers in ([], [empty]):
                kernels.fill_zero(buffers)
                hand_back(kernels, buffers, decision, [0] * len(buffers), buffers)
                kernels.scale(buffers, np.float32(2), buffers)
            kernels.scale([one], np.float32(1), [one])
            accumulate(kernels, [], [], sums)
            accumulate(kernels, [empty], [fold_of(0, True, [empty], [1])], of_one)
            measure(kernels, [], sums, [])
            measure(kernels, [empty], of_one, [0])
            zero_sums(kernels, of_one, [0])
        assert totals_of(kernels, sums).tolist() == []
        assert totals_of(kernels, kernels.partial_sums([0, 0])).tolist() == [0, 0]


@pytest.mark.parametrize("asked", ["gpu", "CPU", "", None, 0])
def test_unknown_devices(asked):
    with pytest.raises(CallerError, match="no kernels for the device"):
        kernels_for(asked)
