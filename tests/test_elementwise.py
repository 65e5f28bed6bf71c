"""Single-buffer operations: the same bits on every device, as arrays and as pointers, and what they refuse."""

import itertools

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import named_cuda, nothing_is_launched, on_host, raw, synchronize
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import ALL_16_BITS

from gradengine import elementwise
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.5, 1e-45, -1e-42, 2.0**-126, 3e38, np.inf, -np.inf, np.nan, 65504, 65520, 2**-24, 2**-25, 257],
    np.float32,
)
# Quiet and signalling, of both signs; in fp32 also those whose upper 10 or 13 bits of payload are zeros or ones.
FP32_NANS = np.array(
    [sign | 0x7F800000 | payload for sign in (0, 1 << 31) for payload in
     (1, 0xFFF, 0x1000, 0x1FFF, 0x2000, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7FFFFF)],
    np.uint32,
)  # fmt: skip
FP16_NANS = np.array([sign | 0x7C00 | payload for sign in (0, 1 << 15) for payload in range(1, 1024)], np.uint16)
BF16_NANS = np.array([sign | 0x7F80 | payload for sign in (0, 1 << 15) for payload in range(1, 128)], np.uint16)
PAIRS = list(itertools.product(draw.DTYPES, draw.DTYPES))


def special(dtype):
    """Every bit pattern of a short dtype; of fp32 the limits and some at random."""
    if dtype == "float32":
        tiny = draw.random_array(1, 99, magnitude=1e-41)
        return np.concatenate([SPECIAL, draw.random_array(0, 999), tiny, FP32_NANS.view(np.float32)])
    return ALL_16_BITS.view(draw.DTYPES[dtype])


def as_array(backend, values):
    array = backend.put(values.copy())
    return array, lambda: on_host(array)


def as_pointer(backend, values):
    """At an odd element, with others on both sides."""
    sevens = np.full(3, 7, values.dtype)
    whole, (_, buffer, _) = backend.buffers_in_one([sevens, values, sevens])

    def got():
        elements = backend.get(whole).view(values.dtype)
        assert (elements[:3] == 7).all()
        assert (elements[-3:] == 7).all()
        return elements[3:-3]

    return raw(buffer), got


@pytest.fixture(params=[as_array, as_pointer])
def placed(request, backend):
    """Puts values on the device, and says how they come back."""
    return lambda values: request.param(backend, values)


@pytest.fixture
def on(backend):
    """What names the device: operations ask a pointer or an array where it lies."""
    with named_cuda(backend):
        yield backend


class TestAdd:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("weight", [1.0, 0.3, -2.0, 2.0**-20, 0.0])
    def test_the_product_is_rounded_and_then_the_sum(self, on, placed, dtype, weight):
        source = special(dtype)
        for total in (draw.random_array(7, source.size), draw.random_array(8, source.size, magnitude=1e-42)):
            to, got = placed(total)
            elementwise.add(to, placed(source)[0], weight)
            with np.errstate(all="ignore"):
                draw.assert_same_values(got(), draw.folded(total, [source], [weight], False))

    def test_to_itself_doubles(self, on, placed):
        to, got = placed(SPECIAL[:6])
        elementwise.add(to, to)
        draw.assert_same_bits(got(), 2 * SPECIAL[:6])

    @settings(max_examples=25)
    @given(size=st.integers(0, 70), dtype=draw.dtypes, weight=draw.weights, seed=draw.seeds)
    def test_for_any_size_and_weight(self, backend, size, dtype, weight, seed):
        total, source = draw.random_array([seed, 0], size), draw.random_array([seed, 1], size, dtype)
        to, got = as_array(backend, total)
        elementwise.add(to, as_pointer(backend, source)[0], weight, device=backend.kernels)
        draw.assert_same_bits(got(), draw.folded(total, [source], [np.float32(weight)], False))


class TestScale:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("factor", [0.0, 0.3, -1.0, 2.0**-30, 1e30])
    def test_is_rounded_to_fp32_and_then_to_the_dtype(self, on, placed, dtype, factor):
        to, got = placed(special(dtype))
        elementwise.scale(to, factor)
        draw.assert_same_values(got(), draw.scaled(special(dtype), factor, dtype))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("factor", [1.0, 1 + 1e-9, 1 - 1e-9])
    def test_by_what_is_1_in_fp32_writes_nothing(self, on, placed, dtype, factor):
        to, got = placed(special(dtype))
        with nothing_is_launched(on):
            elementwise.scale(to, factor)
        draw.assert_same_bits(got(), special(dtype))


@pytest.mark.parametrize("dtype", draw.DTYPES)
@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, 1e-42, 0.1, 65520.0, -np.inf, np.nan])
def test_every_element_is_filled_with_the_rounded_value(on, placed, dtype, value):
    to, got = placed(np.full(33, 9, draw.DTYPES[dtype]))
    elementwise.fill(to, value)
    draw.assert_same_values(got(), draw.scaled(np.full(33, value, np.float32), 1, dtype))


class TestCast:
    @pytest.mark.parametrize(("source", "destination"), PAIRS)
    def test_between_all_dtypes(self, on, placed, source, destination):
        """Of a signalling NaN, too, cut to its upper bits, or carried over by rounding: it would be a number."""
        nan = {"float32": FP32_NANS, "float16": FP16_NANS, "bfloat16": BF16_NANS}[source].view(draw.DTYPES[source])
        beside = np.stack([nan, np.arange(nan.size).astype(nan.dtype)], axis=1).reshape(-1)
        for values in (special(source), beside):
            to, got = placed(np.full(values.size, 9, draw.DTYPES[destination]))
            elementwise.cast(placed(values)[0], to)
            draw.assert_same_values(got(), draw.scaled(values, 1, destination))
        assert destination != "bfloat16" or set(draw.storage_bits(got()[::2])) == {0x7FC0}

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_onto_itself_changes_nothing(self, on, placed, dtype):
        to, got = placed(special(dtype))
        elementwise.cast(to, to)
        draw.assert_same_values(got(), special(dtype))


# Each operation on a target and a source.
OPERATIONS = {
    "add": elementwise.add,
    "cast": lambda to, of, **where: elementwise.cast(of, to, **where),
    "scale": lambda to, _, **where: elementwise.scale(to, 3.0, **where),
    "fill": lambda to, _, **where: elementwise.fill(to, 3.0, **where),
}
PAIRWISE = ("add", "cast")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", draw.DTYPES)
def test_of_nothing(on, placed, operation, dtype):
    to, got = placed(np.zeros(0, draw.DTYPES["float32" if operation == "add" else dtype]))
    OPERATIONS[operation](to, placed(np.zeros(0, draw.DTYPES[dtype]))[0])
    assert got().size == 0


class TestRefused:
    """Before any launch, and with nothing written."""

    @staticmethod
    def assert_refused(on, error, word, to, of, operations=OPERATIONS):
        for name in operations:
            with nothing_is_launched(on), pytest.raises(error, match=word):
                OPERATIONS[name](to, of)

    def test_other_sizes(self, on, placed):
        (to, got), (of, _) = placed(np.ones(3, np.float32)), placed(np.ones(4, np.float32))
        self.assert_refused(on, LayoutMismatch, "differ in size: got 4, expected 3", to, of, PAIRWISE)
        assert (got() == 1).all()

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_a_short_target_of_a_sum(self, on, placed, dtype):
        to, of = placed(np.ones(3, draw.DTYPES[dtype]))[0], placed(np.ones(3, np.float32))[0]
        self.assert_refused(on, BufferRefused, f"must be fp32: got {dtype}", to, of, ["add"])

    def test_memory_that_overlaps(self, on):
        array = on.put(np.ones(8, np.float32))
        for to, of in ((array[:4], array[1:5]), (array[4:], array[3:7])):
            self.assert_refused(on, BufferRefused, "overlap in memory", to, of, PAIRWISE)
        buffer = on.kernels.device.view(array, "array")
        as_half = raw(buffer, dtype="float16")
        self.assert_refused(on, BufferRefused, "overlap in memory", as_half, raw(buffer), ["cast"])
        assert (on_host(array) == 1).all()

    def test_read_only_targets(self, on):
        to, of = raw(on.buffer(np.ones(3, np.float32)), writable=False), on.put(np.ones(3, np.float32))
        self.assert_refused(on, BufferRefused, "is read-only", to, of)

    @pytest.mark.parametrize("dtype", [np.float64, np.int32])
    def test_other_dtypes(self, on, dtype):
        good, bad = on.put(np.ones(3, np.float32)), on.put(np.ones(3, dtype))
        self.assert_refused(on, BufferRefused, f"got {np.dtype(dtype).name}", bad, good)
        self.assert_refused(on, BufferRefused, f"got {np.dtype(dtype).name}", good, bad, PAIRWISE)

    def test_memory_elsewhere(self, device):
        there, here = device.put(np.ones(3, np.float32)), np.ones(3, np.float32)
        with named_cuda(device):
            for to, of in ((there, here), (here, there)):
                self.assert_refused(device, BufferRefused, "wrong device|is not an array", to, of, PAIRWISE)

    @pytest.mark.parametrize("number", ["x", None, [1.0]])
    def test_what_is_no_number(self, number):
        array = np.ones(3, np.float32)
        for call in (lambda: elementwise.add(array, array, number), lambda: elementwise.scale(array, number)):
            with pytest.raises(CallerError, match="is not a number"):
                call()
        with pytest.raises(CallerError, match="is not a number"):
            elementwise.fill(array, number)

    def test_what_is_no_array_no_stream_or_nowhere(self):
        for call in (lambda: elementwise.scale([1.0], 2.0), lambda: elementwise.fill(None, 2.0)):
            with pytest.raises(BufferRefused, match="is not an array"):
                call()
        with pytest.raises(CallerError, match="the CPU has no streams"):
            elementwise.fill(np.ones(3, np.float32), 2.0, stream=7)


class TestOnADevice:
    def test_one_launch_each_and_no_wait(self, emulated):
        array, other = (emulated.put(np.ones(9, np.float32)) for _ in range(2))
        with cuda_emulator.recorded() as record:
            for operation in OPERATIONS.values():
                operation(array, other, device=emulated.kernels)
        assert record.operations == [f"gradengine_{name}" for name in OPERATIONS]
        assert (record.waits, record.allocations) == ([], [])

    @pytest.mark.usefixtures("lazy")
    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_work_goes_to_that_stream_and_no_other(self, emulated, operation):
        array, other = (emulated.put(np.ones(9, np.float32)) for _ in range(2))
        synchronize(emulated)
        stream = emulated.xp.cuda.Stream(non_blocking=True)
        OPERATIONS[operation](array, other, device=emulated.kernels, stream=stream)
        assert emulated.xp.cuda.get_current_stream().done
        assert not stream.done
        stream.synchronize()
