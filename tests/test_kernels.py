"""What every device must do, bit for bit, against NumPy written down step by step."""

import itertools
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import strategies as draw
from hypothesis import given
from hypothesis import strategies as st

from gradengine.errors import CallerError
from gradengine.kernels import CHUNK, ClipPlan, Fold, SquaredSums, kernels_for
from gradengine.kernels.host import HostKernels, clip_scale, squared_sum

ALL_16_BITS = np.arange(2**16, dtype=np.uint16)
NAN, INF = math.nan, math.inf


def accumulated(backend, target, sources, weights, overwrite, sums=None):
    """K1 on one target, which keeps its values; the target afterwards."""
    buffer = backend.buffer(target)
    views = tuple(backend.kernels.view(backend.put(source), "w") for source in sources)
    fold = Fold(0, overwrite, views, tuple(np.float32(weight) for weight in weights))
    backend.kernels.accumulate([buffer], [fold], sums)
    return backend.get(buffer)


def measured(backend, *arrays):
    """The squared sum of each array, by a pass of its own."""
    buffers, sums = [backend.buffer(a) for a in arrays], SquaredSums([a.size for a in arrays])
    chunks = [(p, *chunk) for p in range(len(arrays)) for chunk in sums.chunks(p)]
    backend.kernels.measure(buffers, sums, chunks)
    return backend.kernels.totals(sums)


def handed_back(backend, source, factor, dtype):
    """K3 from one array to another of that dtype."""
    destination = backend.buffer(np.full(source.size, 7, draw.DTYPES[dtype]))
    backend.kernels.hand_back([backend.buffer(source)], [np.float32(factor)], [destination])
    return backend.get(destination).view(draw.DTYPES[dtype])


class TestAccumulate:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("size", draw.SIZES)
    def test_every_size(self, backend, dtype, size):
        target, source = draw.random_array(1, size), draw.random_array(2, size, dtype)
        for weight, overwrite in itertools.product((1, 0.3), (True, False)):
            got = accumulated(backend, target, [source], [weight], overwrite)
            draw.assert_same_bits(got, draw.folded(target, [source], [weight], overwrite))

    @given(
        size=st.sampled_from(draw.SMALL_SIZES),
        sources=st.lists(st.tuples(draw.dtypes, draw.weights), min_size=1, max_size=4),
        overwrite=st.booleans(),
        seed=draw.seeds,
    )
    def test_folds_of_up_to_four(self, backend, size, sources, overwrite, seed):
        target = draw.random_array(seed, size)
        arrays = [draw.random_array([seed, i], size, dtype) for i, (dtype, _) in enumerate(sources)]
        weights = [weight for _, weight in sources]
        got = accumulated(backend, target, arrays, weights, overwrite)
        draw.assert_same_bits(got, draw.folded(target, arrays, weights, overwrite))

    def test_a_long_fold_across_chunks(self, backend):
        target, weights = draw.random_array(0, 2 * CHUNK + 77), [1, 0.7, 3, 1, 2**-12]
        sources = [draw.random_array(i, target.size, d) for i, d in enumerate((*draw.DTYPES, "bfloat16", "float16"))]
        got = accumulated(backend, target, sources, weights, False)
        draw.assert_same_bits(got, draw.folded(target, sources, weights, False))

    def test_each_product_is_rounded_before_it_is_added(self, backend):
        """(1 + 2**-12)**2 = 1 + 2**-11 + 2**-24: a fused multiply-add keeps the last term, two roundings lose it."""
        value = np.full(64, 1 + 2.0**-12, np.float32)
        got = accumulated(backend, np.full(64, -1, np.float32), [value], [1 + 2.0**-12], False)
        assert (got == np.float32(2.0**-11)).all()

    def test_bfloat16_is_widened_exactly(self, backend):
        got = accumulated(backend, np.zeros(2**16, np.float32), [ALL_16_BITS.view(draw.DTYPES["bfloat16"])], [1], True)
        draw.assert_same_bits(got, (ALL_16_BITS.astype(np.uint32) << 16).view(np.float32))

    def test_float16_is_widened_exactly(self, backend):
        bits = ALL_16_BITS.astype(np.int64)
        sign, exponent, fraction = np.where(bits >> 15, -1.0, 1.0), bits >> 10 & 31, bits & 1023
        value = np.where(exponent == 0, np.ldexp(fraction, -24), np.ldexp(1024.0 + fraction, exponent - 25)) * sign
        value[(exponent == 31) & (fraction == 0)] = INF
        value[(exponent == 31) & (fraction == 0) & (sign < 0)] = -INF
        nan = (exponent == 31) & (fraction != 0)
        got = accumulated(backend, np.zeros(2**16, np.float32), [ALL_16_BITS.view(np.float16)], [1], True)
        assert np.isnan(got[nan]).all()
        draw.assert_same_bits(got[~nan], value[~nan].astype(np.float32))

    def test_subnormals_and_signed_zeros_are_kept(self, backend):
        tiny = np.array([1e-45, -1e-45, 1e-40, -0.0, 0.0, 1.1754944e-38], np.float32)
        draw.assert_same_bits(accumulated(backend, np.ones_like(tiny), [tiny], [1], True), tiny)
        draw.assert_same_bits(accumulated(backend, tiny, [tiny], [1], False), tiny + tiny)
        halved = accumulated(backend, np.ones_like(tiny), [tiny], [0.5], True)
        draw.assert_same_bits(halved, tiny * np.float32(0.5))

    def test_overwriting_does_not_read(self, backend):
        source = draw.random_array(0, CHUNK + 3)
        draw.assert_same_bits(accumulated(backend, np.full_like(source, NAN), [source], [1], True), source)

    def test_overflow_and_nan_arrive_without_a_warning(self, backend):
        target = np.array([3e38, 1, -INF], np.float32)
        source = np.array([3e38, NAN, INF], np.float32)
        got = accumulated(backend, target, [source], [1], False)
        assert got[0] == INF
        assert np.isnan(got[1:]).all()

    def test_many_targets_and_only_those_folded(self, backend):
        sizes = [0, 3, CHUNK + 1, 33, 0]
        targets = [draw.random_array([0, i], size) for i, size in enumerate(sizes)]
        sources = [draw.random_array([1, i], size, "bfloat16") for i, size in enumerate(sizes)]
        buffers = [backend.buffer(target) for target in targets]
        views = [backend.kernels.view(backend.put(source), "w") for source in sources]
        chosen = (4, 2, 0, 1)
        backend.kernels.accumulate(buffers, [Fold(p, False, (views[p],), (np.float32(2),)) for p in chosen])
        for p, (buffer, target, source) in enumerate(zip(buffers, targets, sources, strict=True)):
            expected = draw.folded(target, [source], [2], False) if p in chosen else target
            draw.assert_same_bits(backend.get(buffer), expected)

    def test_memory_that_is_not_aligned_to_its_elements(self):
        """NumPy gives such arrays out (a record's field, a file's middle); raw pointers of that kind are refused."""
        values = draw.random_array(0, 2 * draw.ROW + 1)
        memory = np.zeros(values.nbytes + 1, np.uint8)
        odd = memory[1:].view(np.float32)
        odd[:] = values
        kernels, sums = HostKernels(1), SquaredSums([values.size])
        target, view = kernels.allocate(values.size), kernels.view(odd, "w")
        kernels.accumulate([target], [Fold(0, True, (view,), (np.float32(1),))], sums)
        draw.assert_same_bits(target.data, values)
        kernels.hand_back([target], [np.float32(0.5)], [view])
        draw.assert_same_bits(odd.copy(), values * np.float32(0.5))


def signals(size):
    """Values of every kind that a sum of squares may stumble over."""
    rng = np.random.default_rng(size)
    normal = rng.standard_normal(size, np.float32)
    powers = (10 ** rng.uniform(-38, 38, size)).astype(np.float32)
    lonely = np.full(size, 1e-30, np.float32)
    lonely[size // 2 :][:1] = 1e30
    return {
        "random": normal,
        "constant": np.full(size, 0.1, np.float32),
        "huge": np.float32(1e30) * normal,
        "largest": np.full(size, 3.4e38, np.float32),
        "tiny": np.float32(1e-30) * normal,
        "subnormal": np.float32(1e-40) * normal,
        "edge": np.float32(2.0**-63) * normal,  # squares about fp32's smallest normal number
        "mixed": powers,
        "lonely": lonely,
        "zero": np.zeros(size, np.float32),
    }


class TestSquaredSums:
    @pytest.mark.parametrize("size", draw.SIZES)
    def test_within_one_millionth(self, backend, size):
        for kind, values in signals(size).items():
            exact = float(np.sum(np.square(values.astype(np.longdouble))))
            sums = SquaredSums([size])
            accumulated(backend, np.zeros(size, np.float32), [values], [1], True, sums)
            for total in (backend.kernels.totals(sums)[0], measured(backend, values)[0]):
                assert total == pytest.approx(exact, rel=1e-6, abs=0), kind

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("magnitude", [1e-7, 1.0, 3e4])
    def test_of_short_floats(self, backend, dtype, magnitude):
        values = draw.random_array(0, CHUNK + 513, dtype, magnitude).clip(-60000, 60000)
        exact = draw.exact_norm([values.astype(np.float32)]) ** 2
        assert measured(backend, values)[0] == pytest.approx(exact, rel=1e-6, abs=0)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_one_bad_element_anywhere_shows(self, backend, bad, dtype):
        size = 2 * CHUNK + draw.ROW + 3
        clean = np.zeros(size, draw.DTYPES[dtype])
        arrays = []
        for index in (0, 1, draw.ROW - 1, draw.ROW, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + draw.ROW, size - 1):
            arrays.append(clean.copy())
            arrays[-1][index] = bad
        totals = measured(backend, *arrays, clean)
        assert not np.isfinite(totals[:-1]).any()
        assert totals[-1] == 0

    @pytest.mark.parametrize("size", [1, draw.ROW, draw.ROW + 1, 5 * draw.ROW])
    def test_every_position_of_a_bad_element_shows(self, size):
        values = np.ones(size, np.float32)
        for index, bad in itertools.product(range(size), (NAN, -INF)):
            values[index] = bad
            assert not math.isfinite(squared_sum(values)), index
            values[index] = 1

    def test_measured_in_the_fold_is_measured_apart(self, backend):
        target, source = draw.random_array(0, CHUNK + 700), draw.random_array(1, CHUNK + 700, "bfloat16")
        sums = SquaredSums([target.size])
        folded = accumulated(backend, target, [source], [0.7], False, sums)
        draw.assert_same_bits(backend.kernels.totals(sums), measured(backend, folded))

    def test_only_the_chunks_asked_for(self, backend):
        sums = SquaredSums([2 * CHUNK + 1, 5])
        buffers = [backend.buffer(np.ones(size, np.float32)) for size in sums.sizes]
        backend.kernels.measure(buffers, sums, [(0, *sums.chunks(0)[2])])
        assert sums.values[2] == 1
        assert np.isnan(np.delete(sums.values, 2)).all()  # unmeasured is not finite
        assert np.isnan(backend.kernels.totals(sums)).all()

    @given(st.lists(st.sampled_from([0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]), max_size=5))
    def test_chunks_partition_each_target(self, sizes):
        sums = SquaredSums(sizes)
        chunks = [sums.chunks(p) for p in range(len(sizes))]
        assert [index for target in chunks for index, _, _ in target] == list(range(sums.values.size))
        for size, target in zip(sizes, chunks, strict=True):
            limits = [0, *(stop for _, _, stop in target)]
            assert [start for _, start, _ in target] == limits[:-1]
            assert limits[-1] == size
            assert all(0 < stop - start <= CHUNK for _, start, stop in target)

    @given(
        st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]),
        st.lists(st.integers(-2, 3 * CHUNK + 2), max_size=5),
    )
    def test_chunks_completed_piece_by_piece_are_all_chunks(self, size, cuts):
        sums = SquaredSums([7, size])
        limits = [0, *sorted(min(max(cut, 0), size) for cut in cuts), size]
        pieces = [sums.completed(1, start, stop) for start, stop in itertools.pairwise(limits) if start < stop]
        assert [chunk for piece in pieces for chunk in piece] == [(1, *chunk) for chunk in sums.chunks(1)]

    def test_of_no_targets(self, backend):
        assert backend.kernels.totals(SquaredSums([])).tolist() == []
        assert backend.kernels.totals(SquaredSums([0, 0])).tolist() == [0, 0]


class TestDecide:
    def test_one_group(self, backend):
        decision = backend.kernels.decide(np.array([9.0, 16.0]), ClipPlan((0, 0), (1.0,)), divisor=2.0)
        assert decision.norm == 2.5
        assert decision.group_norms == (2.5,)
        assert decision.scales == (0.4,)
        assert decision.factors == (np.float32(0.2),)
        assert decision.bad == ()

    def test_each_group_has_its_own(self, backend):
        plan = ClipPlan((0, 1, 0, 2), (1.0, 100.0, INF))
        decision = backend.kernels.decide(np.array([9.0, 4.0, 16.0, 1e30]), plan, divisor=1.0)
        assert decision.group_norms == (5.0, 2.0, 1e15)
        assert decision.scales == (0.2, 1.0, 1.0)
        assert decision.norm == pytest.approx(1e15, rel=1e-15)
        assert decision.factors == (np.float32(0.2), 1, 1)

    def test_the_factor_is_rounded_once(self, backend):
        norm, bound, divisor = 3.0, 0.7, 7.0
        decision = backend.kernels.decide(np.array([(norm * divisor) ** 2]), ClipPlan((0,), (bound,)), divisor)
        assert decision.factors[0].dtype == np.float32
        assert decision.factors[0] == np.float32(bound / norm / divisor)

    @pytest.mark.parametrize("bad", [NAN, INF])
    def test_the_bad_are_named_and_nothing_is_clipped_by_them(self, backend, bad):
        decision = backend.kernels.decide(np.array([1.0, bad, 4.0, bad]), ClipPlan((0, 1, 0, 1), (1.0, 1.0)), 1.0)
        assert decision.bad == (1, 3)
        assert not math.isfinite(decision.norm)
        assert decision.scales == (1 / math.sqrt(5), 1.0)

    def test_no_overflow_below_the_largest_number(self, backend):
        decision = backend.kernels.decide(np.full(1000, (3e38) ** 2 * 1e6), ClipPlan((0,) * 1000, (1.0,)), 1.0)
        assert decision.bad == ()
        assert decision.norm == pytest.approx(3e38 * math.sqrt(1e9))

    def test_nothing_has_norm_zero(self, backend):
        decision = backend.kernels.decide(np.array([]), ClipPlan((), (1.0,)), 1.0)
        assert (decision.norm, decision.scales) == (0.0, (1.0,))

    @pytest.mark.parametrize(
        ("norm", "bound", "scale"),
        [
            (0.0, 1.0, 1.0),
            (0.0, 0.0, 1.0),
            (5.0, 0.0, 0.0),
            (5.0, INF, 1.0),
            (5.0, 5.0, 1.0),
            (math.nextafter(5.0, 6.0), 5.0, 5.0 / math.nextafter(5.0, 6.0)),
            (1e-300, 1e-301, 0.1),
            (NAN, 1.0, 1.0),
            (INF, 1.0, 1.0),
            (NAN, 0.0, 1.0),
        ],
    )
    def test_scale(self, norm, bound, scale):
        assert clip_scale(norm, bound) == scale

    @given(st.floats(0, 1e300), st.floats(1e-290, 1e300))
    def test_a_scale_is_at_most_one_and_reaches_the_bound(self, norm, bound):
        scale = clip_scale(norm, bound)
        assert 0 <= scale <= 1
        assert norm * scale <= bound * (1 + 1e-15) or norm * scale == norm == 0
        assert (scale == 1) or norm > bound


def interesting_floats():
    """Each sign, exponent and upper fraction of fp32, with lower bits that lie on, beside and between ties."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((ALL_16_BITS.astype(np.uint32) << 16)[:, None] + low).reshape(-1).view(np.float32)


class TestHandBack:
    @pytest.mark.parametrize("source", draw.DTYPES)
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_one_multiplication_and_one_rounding(self, backend, source, dtype):
        for size, factor in itertools.product((0, 1, 513, CHUNK + 1), (1, 0.3, 2.0**-20)):
            values = draw.random_array(size, size, source)
            got = handed_back(backend, values, factor, dtype)
            draw.assert_same_bits(got, (values.astype(np.float32) * np.float32(factor)).astype(draw.DTYPES[dtype]))

    @pytest.mark.parametrize("factor", [1, 0.75])
    def test_bfloat16_rounds_to_nearest_even(self, backend, factor):
        with np.errstate(all="ignore"):
            values = interesting_floats()
            expected = (values * np.float32(factor)).astype(draw.DTYPES["bfloat16"])
        got, nan = handed_back(backend, values, factor, "bfloat16"), np.isnan(values)
        draw.assert_same_bits(got[~nan], expected[~nan])
        assert np.isnan(got[nan].astype(np.float32)).all()

    def test_float16_rounds_to_nearest_even_and_overflows_to_infinity(self, backend):
        values = np.array([65504, 65519.996, 65520, -65520, 1e30, 2049, 2051, 6e-8, 2.9e-8, 3e-8, -0.0], np.float32)
        expected = [65504, 65504, INF, -INF, INF, 2048, 2052, 6e-8, 0, 6e-8, -0.0]
        got = handed_back(backend, values, 1, "float16")
        draw.assert_same_bits(got, np.array(expected, np.float16))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("factor", [1, 0.5, 0])
    def test_nan_stays_nan(self, backend, dtype, factor):
        quiet_and_signalling = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)
        assert np.isnan(handed_back(backend, quiet_and_signalling, factor, dtype).astype(np.float32)).all()

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_factor_one_in_place_writes_nothing(self, backend, dtype):
        """A signalling NaN does not survive a multiplication, so its bits show whether there was one."""
        bits = {"float32": 0x7F800001, "float16": 0x7C01, "bfloat16": 0xFF81}[dtype]
        values = np.full(CHUNK + 5, bits, f"u{draw.DTYPES[dtype].itemsize}").view(draw.DTYPES[dtype])
        buffer = backend.buffer(values)
        backend.kernels.hand_back([buffer], [np.float32(1)], [buffer])
        draw.assert_same_bits(backend.get(buffer), values)
        backend.kernels.hand_back([buffer], [np.float32(0.5)], [buffer])
        assert (draw.storage_bits(backend.get(buffer)) != bits).all()

    def test_factor_one_in_place_may_be_read_only(self, kernels):
        array = np.ones(5, np.float32)
        array.flags.writeable = False
        buffer = kernels.view(array, "w")
        kernels.hand_back([buffer], [np.float32(1)], [buffer])

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_in_place(self, backend, dtype):
        values = draw.random_array(0, CHUNK + 77, dtype)
        buffer = backend.buffer(values)
        backend.kernels.hand_back([buffer], [np.float32(0.3)], [buffer])
        expected = (values.astype(np.float32) * np.float32(0.3)).astype(values.dtype)
        draw.assert_same_bits(backend.get(buffer), expected)

    def test_each_buffer_has_its_own_factor(self, backend):
        values = [draw.random_array(i, size) for i, size in enumerate((5, 0, CHUNK + 2, 3))]
        buffers, factors = [backend.buffer(v) for v in values], [np.float32(f) for f in (2, 3, 1, 0.5)]
        backend.kernels.hand_back(buffers, factors, buffers)
        for buffer, value, factor in zip(buffers, values, factors, strict=True):
            draw.assert_same_bits(backend.get(buffer), value * factor)


class TestFirstNonFinite:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("index", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4])
    def test_index_and_value(self, backend, dtype, index):
        values = np.ones(2 * CHUNK + 5, draw.DTYPES[dtype])
        values[index:] = NAN
        values[index] = -INF
        assert backend.kernels.first_non_finite(backend.buffer(values)) == (index, -INF)

    @pytest.mark.parametrize("values", [[], [1.0], [3e38, -3e38], [1e-45]])
    def test_none(self, backend, values):
        assert backend.kernels.first_non_finite(backend.buffer(np.array(values, np.float32))) is None

    def test_nan_is_found(self, backend):
        index, value = backend.kernels.first_non_finite(backend.buffer(np.array([1, NAN, INF], np.float32)))
        assert index == 1
        assert math.isnan(value)


class TestMemory:
    @pytest.mark.parametrize("size", [0, 1, 31, 513, CHUNK + 1])
    def test_allocations_are_aligned(self, kernels, size):
        buffers = [kernels.allocate(size) for _ in range(5)]
        for buffer in buffers:
            assert (buffer.size, buffer.nbytes, buffer.shape) == (size, 4 * size, (size,))
            assert (buffer.dtype, buffer.writable) == ("float32", True)
            assert size == 0 or buffer.pointer % 128 == 0

    def test_zero_is_written_everywhere_and_nowhere_else(self, backend):
        buffers = [backend.buffer(np.full(size, NAN, np.float32)) for size in (0, 3, CHUNK + 1, 5)]
        backend.kernels.fill_zero(buffers[:3])
        assert all((draw.storage_bits(backend.get(buffer)) == 0).all() for buffer in buffers[:3])
        assert np.isnan(backend.get(buffers[3])).all()

    def test_nothing_to_do(self, kernels):
        kernels.fill_zero([])
        kernels.accumulate([], [])
        kernels.hand_back([], [], [])
        kernels.measure([], SquaredSums([]), [])


def everything(kernels):
    """The bits of a fold, its squared sums and its hand back, over several chunks and dtypes."""
    sizes = [3 * CHUNK + 5, 700, 0, CHUNK]
    targets, sums = [kernels.allocate(size) for size in sizes], SquaredSums(sizes)
    folds = []
    for p, size in enumerate(sizes):
        views = tuple(kernels.view(draw.random_array([p, i], size, d), "w") for i, d in enumerate(draw.DTYPES))
        folds.append(Fold(p, True, views, (np.float32(1), np.float32(0.3), np.float32(5))))
    kernels.accumulate(targets, folds, sums)
    decision = kernels.decide(kernels.totals(sums), ClipPlan((0,) * 4, (1.0,)), 6.3)
    kernels.hand_back(targets, [decision.factors[0]] * 4, targets)
    return sums.values.tobytes() + b"".join(target.data.tobytes() for target in targets)


class TestThreads:
    def test_their_number_changes_no_bit(self):
        expected = everything(HostKernels(1))
        for threads in (2, 3, 3, 8):
            assert everything(HostKernels(threads)) == expected

    def test_callers_in_several_threads_do_not_disturb_each_other(self):
        kernels, outcomes, gate = HostKernels(3), [None] * 4, threading.Barrier(4)
        expected = everything(HostKernels(1))

        def work(i):
            gate.wait(20)
            outcomes[i] = all(everything(kernels) == expected for _ in range(3))

        workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert outcomes == [True] * 4

    @pytest.mark.parametrize("threads", [1, 3])
    def test_a_fault_in_any_thread_reaches_the_caller(self, threads):
        """Whatever goes wrong in a chunk must not be lost with the thread it happened in."""
        kernels = HostKernels(threads)
        read_only = kernels.view(np.broadcast_to(np.float32(1), (1,)), "w")
        for position in range(5):
            targets = [kernels.allocate(1) for _ in range(5)]
            targets[position] = read_only
            with pytest.raises(ValueError, match="read-only"):
                kernels.fill_zero(targets)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
    def test_a_forked_child_has_threads_of_its_own(self):
        program = """
import os, signal, sys, warnings
import numpy as np
from gradengine.kernels import CHUNK
from gradengine.kernels.host import HostKernels
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+ warns of any fork beside threads
kernels = HostKernels(3)
targets = [kernels.allocate(CHUNK) for _ in range(6)]
kernels.fill_zero(targets)
child = os.fork()
if child == 0:
    signal.alarm(20)  # a child that waits for threads it does not have ends here
    buffers = [kernels.view(np.ones(CHUNK, np.float32), "w") for _ in range(6)]
    kernels.hand_back(buffers, [np.float32(2)] * 6, targets)
    os._exit(0 if all((target.data == 2).all() for target in targets) else 1)
kernels.fill_zero(targets)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0

    @pytest.mark.parametrize("threads", [0, -1])
    def test_too_few(self, threads):
        with pytest.raises(CallerError, match=f"too few threads: got {threads}, expected at least 1"):
            HostKernels(threads)

    @pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this platform")
    def test_by_default_one_for_each_cpu(self):
        assert kernels_for("cpu").threads == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("device", ["gpu", "CPU", "", None, 0])
def test_unknown_devices(device):
    with pytest.raises(CallerError, match="no kernels for the device"):
        kernels_for(device)
