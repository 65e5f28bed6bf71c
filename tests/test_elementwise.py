"""Single-buffer operations: the same bits on every device, as arrays and as pointers, and what they refuse."""

import itertools

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import named_cuda, nothing_is_launched, on_host, raw
from hypothesis import given, settings
from hypothesis import strategies as st

from gradengine import RawBuffer, elementwise
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch

ALL_16_BITS = np.arange(2**16, dtype=np.uint16)
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
        return np.concatenate([SPECIAL, draw.random_array(0, 999), draw.random_array(1, 99, magnitude=1e-41)])
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
        source, total = special(dtype), draw.random_array(7, special(dtype).size)
        to, got = placed(total)
        elementwise.add(to, placed(source)[0], weight)
        with np.errstate(all="ignore"):
            wanted = draw.folded(total, [source], [weight], False)
        draw.assert_same_values(got(), wanted)

    def test_subnormals_are_kept(self, on, placed):
        tiny = np.array([1e-42, -1e-45, 2.0**-126, 2.0**-127], np.float32)
        for weight in (1.0, 0.5):
            to, got = placed(tiny)
            elementwise.add(to, placed(-tiny)[0], weight)
            draw.assert_same_bits(got(), draw.folded(tiny, [-tiny], [weight], False))

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

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_a_short_target_does_not_accumulate(self, on, placed, dtype):
        to, source = placed(np.ones(3, draw.DTYPES[dtype]))[0], placed(np.ones(3, np.float32))[0]
        message = f"'target' accumulates and must be fp32: got {dtype}, expected float32"
        with nothing_is_launched(on), pytest.raises(BufferRefused, match=message):
            elementwise.add(to, source)


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
        values = special(dtype) if dtype != "float32" else np.concatenate([SPECIAL, FP32_NANS.view(np.float32)])
        to, got = placed(values)
        with nothing_is_launched(on):
            elementwise.scale(to, factor)
        draw.assert_same_bits(got(), values)


class TestFill:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("value", [0.0, -0.0, 3.0, 1e-42, 0.1, 65520.0, -np.inf, np.nan])
    def test_every_element_is_the_rounded_value(self, on, placed, dtype, value):
        to, got = placed(np.full(33, 9, draw.DTYPES[dtype]))
        elementwise.fill(to, value)
        draw.assert_same_values(got(), draw.scaled(np.full(33, value, np.float32), 1, dtype))


class TestCast:
    @pytest.mark.parametrize(("source", "destination"), PAIRS)
    def test_between_all_dtypes(self, on, placed, source, destination):
        values = special(source)
        to, got = placed(np.full(values.size, 9, draw.DTYPES[destination]))
        elementwise.cast(placed(values)[0], to)
        draw.assert_same_values(got(), draw.scaled(values, 1, destination))

    @pytest.mark.parametrize(("source", "destination"), PAIRS)
    def test_a_signalling_nan_stays_nan(self, on, placed, source, destination):
        """Cut to its upper bits, or carried over by rounding, it would be an infinity, a zero or a number."""
        nan = {"float32": FP32_NANS, "float16": FP16_NANS, "bfloat16": BF16_NANS}[source].view(draw.DTYPES[source])
        numbers = np.arange(nan.size).astype(draw.DTYPES[source])
        values = np.stack([nan, numbers], axis=1).reshape(-1)
        to, got = placed(np.full(values.size, 9, draw.DTYPES[destination]))
        elementwise.cast(placed(values)[0], to)
        found = got().view(draw.DTYPES[destination])
        assert np.isnan(found[::2].astype(np.float32)).all()
        assert destination != "bfloat16" or set(draw.storage_bits(found[::2])) == {0x7FC0}
        draw.assert_same_bits(found[1::2], draw.scaled(numbers, 1, destination))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_onto_itself_changes_nothing(self, on, placed, dtype):
        to, got = placed(special(dtype))
        elementwise.cast(to, to)
        draw.assert_same_values(got(), special(dtype))


class TestRefused:
    def calls(self, to, of):
        yield lambda: elementwise.add(to, of)
        yield lambda: elementwise.cast(of, to)

    def test_other_sizes(self, on, placed):
        (to, got), (of, _) = placed(np.ones(3, np.float32)), placed(np.ones(4, np.float32))
        for call in self.calls(to, of):
            with nothing_is_launched(on), pytest.raises(LayoutMismatch, match="differ in size: got 4, expected 3"):
                call()
        assert (got() == 1).all()

    def test_memory_that_overlaps(self, on):
        array = on.put(np.ones(8, np.float32))
        for to, of in ((array[:4], array[1:5]), (array[4:], array[3:7])):
            for call in self.calls(to, of):
                with nothing_is_launched(on), pytest.raises(BufferRefused, match="overlap in memory"):
                    call()
        buffer = on.kernels.device.view(array, "array")
        as_half = raw(buffer, dtype="float16")
        with nothing_is_launched(on), pytest.raises(BufferRefused, match="overlap in memory"):
            elementwise.cast(raw(buffer), as_half)
        assert (on_host(array) == 1).all()

    def test_read_only_targets(self, on):
        target = raw(on.buffer(np.ones(3, np.float32)), writable=False)
        source = on.put(np.ones(3, np.float32))
        for call in (
            *self.calls(target, source),
            lambda: elementwise.scale(target, 2.0),
            lambda: elementwise.fill(target, 2.0),
        ):
            with nothing_is_launched(on), pytest.raises(BufferRefused, match="is read-only"):
                call()

    @pytest.mark.parametrize("dtype", [np.float64, np.int32])
    def test_other_dtypes(self, on, dtype):
        good, bad = on.put(np.ones(3, np.float32)), on.put(np.ones(3, dtype))
        for call in (
            *self.calls(good, bad),
            *self.calls(bad, good),
            lambda: elementwise.scale(bad, 2.0),
            lambda: elementwise.fill(bad, 2.0),
        ):
            with nothing_is_launched(on), pytest.raises(BufferRefused, match=f"got {np.dtype(dtype).name}"):
                call()

    def test_memory_elsewhere(self, device):
        there, here = device.put(np.ones(3, np.float32)), np.ones(3, np.float32)
        with named_cuda(device):
            for to, of in ((there, here), (here, there)):
                for call in self.calls(to, of):
                    with (
                        nothing_is_launched(device),
                        pytest.raises(BufferRefused, match=r"another device|is not an array"),
                    ):
                        call()

    def test_what_is_no_array(self):
        for call in (lambda: elementwise.scale([1.0], 2.0), lambda: elementwise.fill(None, 2.0)):
            with pytest.raises(BufferRefused, match="is not an array"):
                call()

    def test_streams_on_the_cpu(self):
        array = np.ones(3, np.float32)
        with pytest.raises(CallerError, match="the CPU has no streams"):
            elementwise.fill(array, 2.0, stream=7)

    def test_a_pointer_to_nowhere(self):
        with pytest.raises(BufferRefused, match="is not at a valid address"):
            elementwise.fill(RawBuffer(0, 3, "float32"), 1.0)


OPERATIONS = {
    "add": elementwise.add,
    "scale": lambda to, _, **where: elementwise.scale(to, 3.0, **where),
    "fill": lambda to, _, **where: elementwise.fill(to, 3.0, **where),
    "cast": lambda to, of, **where: elementwise.cast(of, to, **where),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", draw.DTYPES)
def test_of_nothing(on, placed, operation, dtype):
    nothing = np.zeros(0, draw.DTYPES["float32" if operation == "add" else dtype])
    to, got = placed(nothing)
    OPERATIONS[operation](to, placed(np.zeros(0, draw.DTYPES[dtype]))[0])
    assert got().size == 0


class TestOnADevice:
    def test_one_launch_each_and_no_wait(self, emulated):
        kernels = emulated.kernels
        array, other = (emulated.put(np.ones(9, np.float32)) for _ in range(2))
        with cuda_emulator.recorded() as record:
            elementwise.add(array, other, 2.0, device=kernels)
            elementwise.scale(array, 0.5, device=kernels)
            elementwise.cast(array, other, device=kernels)
            elementwise.fill(array, 7.0, device=kernels)
        assert record.operations == [f"gradengine_{name}" for name in ("add", "scale", "cast", "fill")]
        assert (record.waits, record.allocations) == ([], [])
        assert on_host(other).tolist() == [1.5] * 9
        assert on_host(array).tolist() == [7.0] * 9

    def test_on_a_stream_of_ones_own(self, device):
        xp = device.xp
        array = device.put(np.ones(9, np.float32))
        xp.cuda.runtime.deviceSynchronize()
        stream = xp.cuda.Stream(non_blocking=True)
        for given_as in (stream, stream.ptr):
            elementwise.scale(array, 3.0, device=device.kernels, stream=given_as)
        stream.synchronize()
        assert on_host(array).tolist() == [9.0] * 9

    @pytest.mark.usefixtures("lazy")
    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_work_goes_to_that_stream_and_no_other(self, emulated, operation):
        xp = emulated.xp
        array, other = (emulated.put(np.ones(9, np.float32)) for _ in range(2))
        xp.cuda.runtime.deviceSynchronize()
        stream = xp.cuda.Stream(non_blocking=True)
        OPERATIONS[operation](array, other, device=emulated.kernels, stream=stream)
        assert xp.cuda.get_current_stream().done
        assert not stream.done
        stream.synchronize()
