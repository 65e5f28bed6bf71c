"""The accumulator: windows of micro-batches, bit for bit, and a state that a failing call does not touch."""

import dataclasses
import functools
import math
import mmap
import tracemalloc
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import strategies as draw
from backends import DEVICE_BACKENDS, available, host_backend, runnable
from devices import all_on_host, assign, nothing_is_launched, on_host, put_all, raw
from folds import totals_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from operations import growth
from producers import Producer

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.block import BlockGradientSet
from gradengine.accumulate.state import State
from gradengine.arrays.buffer import Buffer, RawBuffer
from gradengine.errors import BufferRefused, CallerError, GradientError, LayoutMismatch, WindowError
from gradengine.kernels import CHUNK, Kernels
from gradengine.kernels.host import HostKernels
from gradengine.layout import BLOCK_COMPONENTS, GradientLayout

SMALL = GradientLayout.transformer(2, 8, 4, 12, 16)
ODD = GradientLayout.of(
    {"layers.0.w": (3, 5), "layers.0.b": (5,), "layers.1.w": (33,), "layers.1.empty": (0,), "head": (7, 1), "t": ()}
)
NAN, INF = math.nan, math.inf
HOST, HOST_WITH_THREADS = host_backend(1), host_backend(3)


@Kernels.register
class PoisonedKernels:
    """Kernels on a device whose fresh memory is full of NaN, as fresh memory may be."""

    def __init__(self, kernels):
        self._kernels, self.device = kernels, PoisonedDevice(kernels)

    def __getattr__(self, name):
        return getattr(self._kernels, name)


class PoisonedDevice:
    def __init__(self, kernels):
        self._kernels = kernels

    def __getattr__(self, name):
        return getattr(self._kernels.device, name)

    def allocate(self, size, **options):
        buffer = self._kernels.device.allocate(size, **options)
        if buffer.device == "cpu":
            buffer.data.fill(NAN)
        else:
            cuda = self._kernels.xp.cuda
            with cuda.Device(self._kernels.ordinal):
                cuda.runtime.memsetAsync(buffer.pointer, 0xFF, buffer.nbytes, cuda.get_current_stream().ptr)
        return buffer


def new(layout=ODD, hold=1, backend=HOST):
    return PerBlockGradientAccumulator(layout, PoisonedKernels(backend.kernels), hold=hold)


def state(accumulator, backend=HOST):
    """All there is to the state, bit for bit; reading it changes nothing."""
    partials = accumulator.arena.partials
    sums = (on_host(partials.values).tobytes(), on_host(getattr(partials, "non_finite", ())).tobytes())
    return backend.get(accumulator.memory).tobytes(), sums, frozen(accumulator._window), accumulator.state.now


def frozen(value):
    """What may be compared later: objects taken apart, arrays by their bytes, memory by its address."""
    if isinstance(value, Buffer):
        return value.pointer, value.size, value.dtype
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    if isinstance(value, (set, int, float, str, np.generic, type(None))):
        return repr(value)
    if isinstance(value, dict):
        return [(repr(key), frozen(item)) for key, item in value.items()]
    if type(value).__module__.startswith("gradengine"):
        names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else vars(value)
        kept = [name for name in names if not isinstance(getattr(type(value), name, None), functools.cached_property)]
        return [(name, frozen(getattr(value, name))) for name in kept]
    return id(value)


def closed(accumulator):
    accumulator.close()
    return all_on_host(accumulator.views())


def expected_window(layout, micro_batches, weights):
    flat = [draw.folded(None, gs, weights, True) for gs in zip(*micro_batches, strict=True)]
    return {slot.name: f.reshape(slot.shape) for slot, f in zip(layout.slots, flat, strict=True)}


def assert_window(got, expected):
    assert list(got) == list(expected)
    for name in expected:
        draw.assert_same_bits(got[name], expected[name])


def assert_padding_is_zero(accumulator, backend=HOST):
    covered = np.zeros(accumulator.layout.arena_size, bool)
    for slot in accumulator.layout.slots:
        covered[slot.offset : slot.stop] = True
    assert (draw.storage_bits(backend.get(accumulator.memory))[~covered] == 0).all()


class TestAdd:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("weights", [[1], [1, 1, 1], [0.3, 1, 7.5], [3]])
    @pytest.mark.parametrize("layout", [SMALL, ODD], ids=["transformer", "odd"])
    def test_a_window_is_the_contracts_sum(self, backend, layout, dtype, weights):
        batches = [draw.random_gradients(seed, layout.slots, dtype) for seed in range(len(weights))]
        accumulator = new(layout, backend=backend)
        for gradients, weight in zip(batches, weights, strict=True):
            accumulator.add(put_all(backend, gradients), weight)
        assert accumulator.accumulated_count == len(weights)
        assert accumulator.total_weight == pytest.approx(sum(weights), rel=1e-6)
        assert_window(closed(accumulator), expected_window(layout, batches, weights))
        assert_padding_is_zero(accumulator, backend)

    def test_every_window_overwrites(self, backend):
        accumulator = new(backend=backend)
        for seed in range(3):
            batch = draw.random_gradients(seed, ODD.slots)
            accumulator.add(put_all(backend, batch))
            assert_window(closed(accumulator), expected_window(ODD, [batch], [1]))
            accumulator.zero_all()
            assert accumulator.accumulated_count == 0

    def test_the_same_arrays_may_come_with_other_values(self, backend):
        """As a training loop brings them: the same objects in each micro-batch and window."""
        accumulator = new(backend=backend)
        arrays = put_all(backend, draw.random_gradients(0, ODD.slots))
        for window in range(3):
            batches = [draw.random_gradients(10 * window + seed, ODD.slots) for seed in range(2)]
            for batch in batches:
                for array, values in zip(arrays, batch, strict=True):
                    assign(array, backend.put(values))
                accumulator.add(arrays)
            assert_window(closed(accumulator), expected_window(ODD, batches, [1, 1]))
            accumulator.zero_all()

    def test_fresh_arrays_in_each_micro_batch(self, backend):
        """As backward() brings them after `.grad = None`: new objects, at addresses that were others' before."""
        accumulator = new(backend=backend)
        for window in range(4):
            batches = [draw.random_gradients(10 * window + seed, ODD.slots) for seed in range(3)]
            for batch in batches:
                accumulator.add(put_all(backend, batch))
            assert_window(closed(accumulator), expected_window(ODD, batches, [1] * 3))
            accumulator.zero_all()

    def test_the_same_memory_in_another_dtype(self, backend):
        """What was known of an address holds for the array that had it, not for the next one there."""
        accumulator, layout = new(GradientLayout.of([(6,)]), backend=backend), GradientLayout.of([(6,)])
        for dtype in ("float32", "float16", "bfloat16", "float32"):
            batch = draw.random_gradients(0, layout.slots, dtype)
            accumulator.add(put_all(backend, batch))
            assert_window(closed(accumulator), expected_window(layout, [batch], [1]))
            accumulator.zero_all()

    def test_the_first_micro_batch_keeps_signed_zeros(self, backend):
        accumulator = new(GradientLayout.of([(2,)]), backend=backend)
        assert accumulator.has_non_finite() is False  # a look before the window is none of its additions
        accumulator.add([backend.put(np.array([-0.0, 0.0], np.float32))])
        draw.assert_same_bits(closed(accumulator)["0"], np.array([-0.0, 0.0], np.float32))

    def test_in_bfloat16_256_and_1_make_257(self, backend):
        accumulator = new(GradientLayout.of([(3,)]), backend=backend)
        for value in (256, 1):
            accumulator.add([backend.put(np.full(3, value, ml_dtypes.bfloat16))])
        assert closed(accumulator)["0"].tolist() == [257] * 3
        assert np.full(3, 256, ml_dtypes.bfloat16)[0] + ml_dtypes.bfloat16(1) == 256  # what bf16 itself would say

    def test_in_float16_sums_pass_its_largest_number(self, backend):
        accumulator = new(GradientLayout.of([(3,)]), backend=backend)
        for _ in range(4):
            accumulator.add([backend.put(np.full(3, 60000, np.float16))])
        assert closed(accumulator)["0"].tolist() == [240000] * 3

    def test_gradients_are_only_read(self):
        batch = draw.random_gradients(0, ODD.slots)
        for gradient in batch:
            gradient.flags.writeable = False
        accumulator = new()
        accumulator.add(batch, 2.0)
        accumulator.add(batch, 2.0)
        assert_window(closed(accumulator), expected_window(ODD, [batch, batch], [2, 2]))

    def test_flat_gradients_raw_buffers_and_mappings(self, backend):
        batch = draw.random_gradients(0, ODD.slots)
        arrays = put_all(backend, batch)
        flat = [array.reshape(-1) for array in arrays]
        pointers = [raw(backend.kernels.device.view(array, "gradient")) for array in flat]
        named = {slot.name: array for slot, array in reversed(list(zip(ODD.slots, arrays, strict=True)))}
        for gradients in (flat, pointers, named, tuple(arrays)):
            accumulator = new(backend=backend)
            accumulator.add(gradients)
            assert_window(closed(accumulator), expected_window(ODD, [batch], [1]))

    @pytest.mark.parametrize("hold", [1, 3])
    def test_none_is_no_gradient(self, backend, hold):
        first, second = (draw.random_gradients(seed, ODD.slots) for seed in range(2))
        accumulator = new(hold=hold, backend=backend)
        accumulator.add(put_all(backend, [None, first[1], *[None] * 4]), 2.0)
        accumulator.add(put_all(backend, [second[0], None, *[None] * 4]), 3.0)
        got = closed(accumulator)
        draw.assert_same_bits(got["layers.0.w"], np.float32(3) * second[0])
        draw.assert_same_bits(got["layers.0.b"], np.float32(2) * first[1])
        for name in ("layers.1.w", "head", "t"):
            assert (draw.storage_bits(got[name]) == 0).all()
        assert accumulator.accumulated_count == 2

    def test_a_micro_batch_of_none_alone_is_refused_as_a_whole_and_counts_in_parts(self, backend):
        """One block may have no gradient; that no component has one is a `zero_grad()` too early."""
        accumulator, batch = new(backend=backend), draw.random_gradients(0, ODD.slots)
        accumulator.add(put_all(backend, batch), 2.0)
        with nothing_is_launched(backend), pytest.raises(WindowError, match="no component has a gradient"):
            accumulator.add([None] * len(batch), 3.0)
        assert (accumulator.accumulated_count, accumulator.total_weight) == (1, 2.0)
        for span in ODD.spans:
            if span.slots[0].block is None:
                accumulator.add_non_block(span.slots[0].name, None, 3.0)
            else:
                accumulator.add_block(span.slots[0].block, [None] * len(span.slots), 3.0)
        assert (accumulator.accumulated_count, accumulator.total_weight) == (2, 5.0)
        assert_window(closed(accumulator), expected_window(ODD, [batch], [2]))

    def test_tied_components_may_share_a_gradient(self, backend):
        layout = GradientLayout.of({"head": (4,), "embedding": (4,)})
        values = draw.random_array(0, 4)
        shared = backend.put(values)
        for hold in (1, 3):
            accumulator = new(layout, hold, backend)
            accumulator.add([shared, shared])
            assert_window(closed(accumulator), {"head": values, "embedding": values})

    @pytest.mark.parametrize("hold", [1, 5])
    def test_squared_sums_are_taken_where_asked(self, backend, hold):
        batches = [put_all(backend, draw.random_gradients(seed, SMALL.slots, "bfloat16")) for seed in range(3)]
        measured, rest = new(SMALL, hold, backend), new(SMALL, 1, backend)
        for i, batch in enumerate(batches):
            measured.add(batch, measure=i == 2)
            rest.add(batch)
        for accumulator in (measured, rest):
            accumulator.close()
        with nothing_is_launched(backend):
            measured.measure_rest()
        rest.measure_rest()
        draw.assert_same_bits(on_host(measured.arena.partials.values), on_host(rest.arena.partials.values))
        draw.assert_same_bits(backend.get(measured.memory), backend.get(rest.memory))


class TestHold:
    @settings(max_examples=40)
    @given(
        hold=st.integers(1, 5),
        parts=st.lists(st.tuples(draw.dtypes, draw.weights, st.booleans()), min_size=1, max_size=7),
        seed=draw.seeds,
    )
    def test_changes_no_bit_on_any_device(self, backend, hold, parts, seed):
        """Any number of micro-batches, of any dtypes and weights, with components missing here and there."""
        plain, holding = new(ODD, 1), new(ODD, hold, HOST_WITH_THREADS if backend.is_host else backend)
        for i, (dtype, weight, gap) in enumerate(parts):
            batch = draw.random_gradients(seed + i, ODD.slots, dtype)
            if gap:
                batch[i % len(batch)] = None
            plain.add(batch, weight)
            holding.add(put_all(backend, batch), weight)
        for accumulator in (plain, holding):
            accumulator.close()
        draw.assert_same_bits(backend.get(holding.memory), plain.memory.data)
        assert holding.total_weight == plain.total_weight

    def test_is_by_reference_until_the_fold(self, backend):
        accumulator, batch = new(hold=2, backend=backend), put_all(backend, draw.random_gradients(0, ODD.slots))
        accumulator.add(batch)
        assign(batch[0], 5)
        assert (closed(accumulator)["layers.0.w"] == 5).all()

    def test_memory_stays_alive_until_the_fold(self, backend):
        accumulator = new(GradientLayout.of([(100_000,)]), hold=3, backend=backend)
        for value in (1, 2):
            accumulator.add([backend.put(np.full(100_000, value, np.float32))])
        others = [backend.put(np.full(100_000, 9, np.float32)) for _ in range(4)]
        assert (closed(accumulator)["0"] == 3).all()
        assert len(others) == 4

    def test_the_same_address_twice_is_refused_by_name(self, backend):
        accumulator, batch = new(hold=3, backend=backend), put_all(backend, draw.random_gradients(0, ODD.slots))
        accumulator.add(batch)
        before = state(accumulator, backend)
        first, last = (put_all(backend, draw.random_gradients(seed, ODD.slots)) for seed in (1, 2))
        message = r"'layers.1.w' is held already at the same address: got address 0x\w+ twice in one fold.*None"
        with nothing_is_launched(backend), pytest.raises(BufferRefused, match=message):
            accumulator.add([*first[:2], batch[2], *last[3:]])
        assert state(accumulator, backend) == before

    def test_so_it_is_in_another_dtype(self, backend):
        """What is held would be read when the buffer has the next micro-batch's bits."""
        accumulator = new(GradientLayout.of([(2,)]), hold=2, backend=backend)
        buffer = backend.buffer(np.ones(2, np.float32))
        accumulator.add([raw(buffer)])
        with pytest.raises(BufferRefused, match=rf"'0' is held already .* got address {buffer.pointer:#x} twice"):
            accumulator.add([raw(buffer, dtype="float16")])
        accumulator.zero_all()
        accumulator.add([raw(buffer, dtype="float16")])
        with pytest.raises(BufferRefused, match="'0' is held already"):
            accumulator.add([raw(buffer)])

    @pytest.mark.parametrize(
        "fold",
        [
            lambda accumulator, gradient: accumulator.add_block(0, [gradient]),
            lambda accumulator, _: accumulator.has_non_finite(),
            lambda accumulator, _: accumulator.block(0),
            lambda accumulator, _: accumulator.close(),
        ],
        ids=["a part that came apart", "has_non_finite", "block", "close"],
    )
    def test_memory_that_is_gone_is_not_read_whatever_call_folds_it(self, backend, fold):
        accumulator = new(GradientLayout.of({"layers.0.w": (2,), "head": (2,)}), hold=3, backend=backend)
        owner, gradient = mmap.mmap(-1, 4096), backend.buffer(np.ones(2, np.float32))
        head, other = put_all(backend, [np.ones(2, np.float32)] * 2)
        accumulator.add([raw(gradient, owner=owner), head])
        owner.close()
        with (
            nothing_is_launched(backend),
            pytest.raises(BufferRefused, match=r"'layers\.0\.w' was given other memory, or freed, while it was held"),
        ):
            fold(accumulator, other)

    def test_buffers_may_come_again_after_as_many_micro_batches_though_one_had_no_gradient(self, backend):
        accumulator = new(GradientLayout.of([(2,), (1,)]), hold=3, backend=backend)
        buffers = [backend.put(np.full(2, value, np.float32)) for value in (1, 2, 4)]
        others = [backend.put(np.ones(1, np.float32)) for _ in range(4)]
        for gradient, other in zip((buffers[0], None, buffers[2], buffers[0]), others, strict=True):
            accumulator.add([gradient, other])
        assert closed(accumulator)["0"].tolist() == [6, 6]

    def test_the_same_address_may_come_again_after_its_fold(self, backend):
        accumulator = new(hold=2, backend=backend)
        batches = [draw.random_gradients(seed, ODD.slots) for seed in range(2)]
        arrays = [put_all(backend, batch) for batch in batches]
        for gradients in arrays * 2:
            accumulator.add(gradients)
        assert_window(closed(accumulator), expected_window(ODD, batches * 2, [1] * 4))

    def test_a_shared_address_stays_refused_until_those_who_hold_it_are_folded(self, backend):
        accumulator = new(GradientLayout.of({"layers.0.w": (2,), "head": (2,)}), hold=3, backend=backend)
        shared = backend.put(np.ones(2, np.float32))
        accumulator.add([shared, shared])
        with pytest.raises(BufferRefused, match="'head' is held already at the same address"):
            accumulator.add_non_block("head", shared)
        accumulator.block(0)  # folds what came with the block, too
        accumulator.add_non_block("head", shared)

    def test_parts_after_a_whole_micro_batch_fold_it_first(self, backend):
        layout = GradientLayout.of({"layers.0.w": (2,), "head": (2,)})
        accumulator = new(layout, hold=4, backend=backend)
        batches = [draw.random_gradients(seed, layout.slots) for seed in range(3)]
        arrays = [put_all(backend, batch) for batch in batches]
        accumulator.add(arrays[0])
        accumulator.add_non_block("head", arrays[1][1])
        accumulator.add_block(0, arrays[1][:1])
        accumulator.add(arrays[2])
        assert_window(closed(accumulator), expected_window(layout, batches, [1] * 3))

    def test_dropping_the_window_drops_what_is_held(self, backend):
        accumulator, batch = new(hold=3, backend=backend), draw.random_gradients(0, ODD.slots)
        arrays = put_all(backend, batch)
        accumulator.add(arrays)
        accumulator.zero_all()
        accumulator.add(arrays)
        assert_window(closed(accumulator), expected_window(ODD, [batch], [1]))

    def test_is_of_any_kind_of_integer(self):
        assert type(new(hold=np.int64(2)).hold) is int

    @pytest.mark.parametrize("hold", [0, -1, 1.5, NAN, "2", None, True])
    def test_is_a_count(self, hold):
        with pytest.raises(CallerError, match=r"hold is (out|not) .*: got .*, expected a whole number >= 1"):
            new(hold=hold)


def interleaved(array):
    return np.stack([array, array], -1)[..., 0]


# Arrays of the same values, whose elements do not lie in C order.
STRIDED = {
    "Fortran order": np.asfortranarray,
    "a transpose": lambda array: np.ascontiguousarray(array.T).T,
    "negative strides": lambda array: np.ascontiguousarray(np.flip(array))[(slice(None, None, -1),) * array.ndim],
    "every second": interleaved,
    "broadcast": lambda array: np.broadcast_to(array[:1], array.shape),
    "overlapping itself": lambda array: np.lib.stride_tricks.as_strided(array, strides=(array.itemsize,) * array.ndim),
}
WAYS = {
    "numpy": lambda array: array,
    "a DLPack producer": Producer,
    "torch": lambda array: pytest.importorskip("torch").from_dlpack(Producer(array)),
}


def sums(accumulator):
    accumulator.close(measure=True)
    return accumulator.memory.data.tobytes(), accumulator.kernels.totals(accumulator.arena).tobytes()


@pytest.mark.parametrize("hold", [1, 3])
class TestStrided:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize(
        ("strided", "way"),
        [
            pytest.param(strided, way, id=f"{name}-{by}")
            for name, strided in STRIDED.items()
            for by, way in WAYS.items()
            if (name, by) != ("negative strides", "torch")  # which has none
        ],
    )
    def test_copies_have_the_bits_of_contiguous_gradients(self, strided, way, dtype, hold):
        layout = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (4, 2, 3), "flat": (7,), "head": (6, 1)})
        copying, other = (PerBlockGradientAccumulator(layout, hold=hold, copy_strided=on) for on in (True, False))
        for seed in range(4):
            arrays = [strided(array) for array in draw.random_gradients(seed, layout.slots, dtype)]
            assert any(not array.flags.c_contiguous for array in arrays)
            other.add([array.copy() for array in arrays], seed + 1)
            if seed % 2:
                copying.add([way(array) for array in arrays], seed + 1)
            else:
                for block in (0, 1):
                    copying.add_block(block, [way(arrays[block])], seed + 1)
                copying.add_non_block("flat", way(arrays[2]), seed + 1)
                copying.add_non_block("head", way(arrays[3]), seed + 1)
        assert sums(copying) == sums(other)

    def test_a_copy_is_of_the_values_at_its_add_and_one_array_may_come_again(self, hold):
        accumulator = PerBlockGradientAccumulator(GradientLayout.of([(2, 3)]), hold=hold, copy_strided=True)
        array = np.ones((3, 2), np.float32)
        for value in (1, 2, 4):
            array[:] = value
            accumulator.add([array.T])
        array[:] = 100
        accumulator.close()
        assert accumulator.views()["0"].tolist() == [[7] * 3] * 2

    def test_contiguous_gradients_are_still_read_where_they_are(self, hold):
        accumulator = PerBlockGradientAccumulator(GradientLayout.of([(2, 3), (2, 2)]), hold=hold, copy_strided=True)
        first, second = np.ones((2, 3), np.float32), np.ones((2, 2), np.float32)
        accumulator.add([first, second.T])
        if hold > 1:
            first[:] = 5
            with pytest.raises(BufferRefused, match="component '0' is held already at the same address"):
                accumulator.add([first, second.T])
        accumulator.close()
        assert accumulator.views()["0"].tolist() == [[5 if hold > 1 else 1] * 3] * 2

    @pytest.mark.parametrize(
        ("array", "kind", "message"),
        [
            (lambda a: a.T.copy().T.astype(np.float64, order="K"), BufferRefused, "unsupported dtype: got float64"),
            (lambda a: np.ma.masked_less(np.asfortranarray(a), 0), BufferRefused, "is a masked array"),
            (np.transpose, LayoutMismatch, r"another shape: got \(3, 2\), 6 elements, expected \(2, 3\)"),
            (lambda a: Producer(a.T), LayoutMismatch, r"another shape: got \(3, 2\), 6 elements, expected \(2, 3\)"),
            (lambda a: np.broadcast_to(a[0, 0], (1 << 40, 3)), LayoutMismatch, "another shape: got .1099511627776, 3"),
            (
                lambda a: Producer(np.asfortranarray(a), data=0),
                BufferRefused,
                "component 'w' is not at a valid address: got pointer 0x0",
            ),
            (lambda a: Producer(np.asfortranarray(a), bits=64), BufferRefused, "unsupported dtype: got float64"),
            (lambda a: Producer(np.asfortranarray(a), device=(2, 0)), BufferRefused, "on another device: got cuda:0"),
            (lambda a: 3.0, BufferRefused, "'w' is not an array: got float"),
        ],
    )
    def test_what_would_be_refused_anyway_changes_nothing(self, array, kind, message, hold):
        accumulator = PerBlockGradientAccumulator(GradientLayout.of({"w": (2, 3)}), hold=hold, copy_strided=True)
        with pytest.raises(kind, match=message):
            accumulator.add([array(np.ones((2, 3), np.float32))])
        assert accumulator.accumulated_count == 0

    def test_torchs_parameters_are_refused_as_ever(self, hold):
        torch = pytest.importorskip("torch")
        layout = GradientLayout.of({"w": (2, 3)})
        accumulator = PerBlockGradientAccumulator(layout, hold=hold, copy_strided=True)
        with pytest.raises(BufferRefused, match="requires grad: it is a parameter"):
            accumulator.add([torch.nn.Parameter(torch.ones(3, 2).t())])

    def test_without_it_they_are_refused(self, hold):
        with pytest.raises(BufferRefused, match="'0' is not contiguous"):
            PerBlockGradientAccumulator(GradientLayout.of([(2, 3)]), hold=hold).add([np.ones((3, 2), np.float32).T])


@pytest.mark.parametrize("name", runnable(DEVICE_BACKENDS))
def test_a_gpus_strided_gradients_are_not_copied(name):
    with pytest.raises(CallerError, match=r"copy_strided .*: got device 'cuda.*contiguous gradients on a GPU"):
        PerBlockGradientAccumulator(ODD, available(name).kernels, copy_strided=True)


class TestByBlock:
    @pytest.mark.parametrize("hold", [1, 2])
    def test_parts_in_backward_order_make_the_whole(self, backend, hold):
        batches, weights = [draw.random_gradients(seed, SMALL.slots) for seed in range(3)], [1, 2, 0.5]
        accumulator = new(SMALL, hold, backend)
        for batch, weight in zip(batches, weights, strict=True):
            named = put_all(backend, {slot.name: g for slot, g in zip(SMALL.slots, batch, strict=True)})
            accumulator.add_non_block("lm_head", named["lm_head"], weight)
            accumulator.add_non_block(1, named["final_norm"], weight)
            for index in (1, 0):
                short = {name: named[f"blocks.{index}.{name}"] for name in BLOCK_COMPONENTS}
                accumulator.add_block(index, short if index else list(short.values()), weight)
            accumulator.add_non_block(2, named["embedding"], weight)
        assert accumulator.accumulated_count == 3
        assert accumulator.total_weight == 3.5
        assert_window(closed(accumulator), expected_window(SMALL, batches, weights))

    @pytest.mark.parametrize("wholes", [0, 3])
    def test_a_block_costs_the_same_however_many_there_are(self, wholes):
        """Four micro-batches held, the last of them, or all, block by block: nothing that other blocks hold is read."""

        def work_of(blocks):
            layout = GradientLayout.of({f"layers.{i}.{name}": (1,) for i in range(blocks) for name in "ab"})
            accumulator = PerBlockGradientAccumulator(layout, hold=4)
            gradients = [[[np.ones(1, np.float32) for _ in "ab"] for _ in range(blocks)] for _ in range(4)]

            def window():
                for parts in gradients[:wholes]:
                    accumulator.add([gradient for part in parts for gradient in part])
                for parts in gradients[wholes:]:
                    for index, part in enumerate(parts):
                        accumulator.add_block(index, part)
                accumulator.zero_all()

            return window

        assert growth(work_of, 30) < 2.2

    @pytest.mark.parametrize("hold", [2, 3, 9])
    def test_parts_and_wholes_may_take_turns(self, backend, hold):
        """Some micro-batches whole, others by parts, each held in a set of its own."""
        batches = [draw.random_gradients(seed, SMALL.slots) for seed in range(5)]
        accumulator = new(SMALL, hold, backend)
        for i, batch in enumerate(batches):
            named = put_all(backend, {slot.name: g for slot, g in zip(SMALL.slots, batch, strict=True)})
            if i % 2:
                accumulator.add(named)
                continue
            for block in reversed(SMALL.blocks):
                accumulator.add_block(block.index, [named[slot.name] for slot in block.slots])
            for name in ("lm_head", "final_norm", "embedding"):
                accumulator.add_non_block(name, named[name])
        assert_window(closed(accumulator), expected_window(SMALL, batches, [1] * 5))

    def test_what_left_in_a_window_that_was_dropped_takes_more_in_the_next(self, backend):
        layout = GradientLayout.of({"layers.0.w": (2,), "head": (2,)})
        accumulator, gradient = new(layout, backend=backend), backend.put(np.ones(2, np.float32))
        accumulator.add_block(0, [gradient])
        accumulator.close_span(layout.block(0))
        with pytest.raises(WindowError, match="block 0 was sent"):
            accumulator.add_block(0, [gradient])
        accumulator.zero_all()
        accumulator.add_block(0, [gradient])
        accumulator.add_non_block("head", gradient)
        assert closed(accumulator)["layers.0.w"].tolist() == [1, 1]

    def test_where_the_exchange_failed_that_is_said_first(self):
        layout = GradientLayout.of({"layers.0.w": (2,), "head": (2,)})
        accumulator, gradient = new(layout), np.ones(2, np.float32)
        accumulator.add_block(0, [gradient])
        accumulator.close_span(layout.block(0))
        accumulator.state.now = State.FAILED
        with pytest.raises(WindowError, match="failed, and its window is kept"):
            accumulator.add_block(0, [gradient])

    def test_by_full_names(self, backend):
        batch, accumulator = draw.random_gradients(0, ODD.blocks[0].slots), new(backend=backend)
        named = {slot.name: g for slot, g in zip(ODD.blocks[0].slots, batch, strict=True)}
        accumulator.add_block(0, put_all(backend, named))
        draw.assert_same_bits(on_host(accumulator.block(0).components["w"]), batch[0])

    def test_a_micro_batch_has_one_weight(self):
        accumulator = new(SMALL)
        accumulator.add_block(1, draw.random_gradients(0, SMALL.blocks[1].slots), 2.0)
        before = state(accumulator)
        message = "block 0 of micro-batch 0 has another weight than its other parts: got 3.0, expected 2.0"
        with pytest.raises(WindowError, match=message):
            accumulator.add_block(0, draw.random_gradients(1, SMALL.blocks[0].slots), 3.0)
        assert state(accumulator) == before
        accumulator.add_block(1, draw.random_gradients(2, SMALL.blocks[1].slots), 3.0)  # the next micro-batch begins
        assert accumulator.accumulated_count == 2

    def test_a_window_with_a_part_missing_is_not_closed(self, backend):
        accumulator = new(SMALL, hold=2, backend=backend)
        for seed, index in enumerate((0, 1, 1)):
            accumulator.add_block(index, put_all(backend, draw.random_gradients(seed, SMALL.blocks[index].slots)), 0.5)
        before = state(accumulator, backend)
        message = r"component 'blocks.0.w_q' \(and 11 more\) lacks part of the window: got 1 micro-batches, expected 2"
        for call in (accumulator.close, accumulator.average):  # also where the weights happen to make 1
            with pytest.raises(WindowError, match=message):
                call()
            assert state(accumulator, backend) == before

    def test_a_window_without_a_micro_batch_is_not_closed(self):
        with pytest.raises(WindowError, match="step without a micro-batch: got 0 micro-batches, expected at least 1"):
            new().close()

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (3, "unknown non-block id: got 3, expected a name, or 0, 1 or 2"),
            (-1, "unknown non-block id: got -1"),
            ("lm_tail", "unknown component: got 'lm_tail'"),
            ("blocks.1.w_q", "component 'blocks.1.w_q' is in block 1; use add_block"),
            (1.5, "unknown non-block id: got 1.5"),
            (None, "unknown non-block id: got None"),
        ],
    )
    def test_unknown_non_block_components(self, name, message):
        accumulator = new(SMALL)
        before = state(accumulator)
        with pytest.raises(LayoutMismatch, match=message):
            accumulator.add_non_block(name, np.ones(1, np.float32))
        assert state(accumulator) == before

    def test_an_id_whose_component_the_layout_lacks(self):
        accumulator = new(GradientLayout.transformer(1, 4, 2, 4, 8, embedding=False))
        with pytest.raises(LayoutMismatch, match="unknown component: got 'embedding'"):
            accumulator.add_non_block(2, np.ones((8, 4), np.float32))

    @pytest.mark.parametrize("index", [-1, 2, "0", None, 0.0])
    def test_unknown_blocks(self, index):
        for call in (new().block, lambda i: new().add_block(i, [])):
            with pytest.raises(LayoutMismatch, match="unknown block: got"):
                call(index)

    def test_counts(self):
        assert (new(SMALL).num_blocks, new(ODD).num_blocks, new(GradientLayout.of([(1,)])).num_blocks) == (2, 2, 0)
        accumulator = new(SMALL)
        assert (accumulator.accumulated_count, accumulator.total_weight) == (0, 0.0)
        accumulator.add_block(0, draw.random_gradients(0, SMALL.blocks[0].slots))
        assert accumulator.accumulated_count == 1  # one that is still being added counts


def bad_gradients(slots, backend=HOST):
    """Each way to pass wrong gradients for slots, with what its error names."""
    good = put_all(backend, draw.random_gradients(99, slots))
    last, size = slots[-1].name, slots[-1].size

    def ending_in(array):
        return [*good[:-1], backend.put(array)]

    yield good[:-1], f"got {len(good) - 1}, expected {len(good)}"
    yield [*good, good[0]], f"got {len(good) + 1}, expected {len(good)}"
    yield ending_in(np.ones(size + 1, np.float32)), f"'{last}' has another shape: got .*{size + 1} elements, expected"
    yield ending_in(np.ones(slots[-1].shape)), f"'{last}' has an unsupported dtype: got float64, expected"
    yield [*good[:-1], on_host(good[-1]).tolist()], f"'{last}' is not an array.*: got (list|float), expected"
    yield dict.fromkeys((slot.name for slot in slots[1:]), good[0]), f"lack component '.*{slots[0].name[-1]}'"
    yield "abc", "neither a mapping nor a sequence"
    if size > 1:
        strided = backend.put(np.ones((*slots[-1].shape, 2), np.float32))[..., 0]
        yield [*good[:-1], strided], f"'{last}' is not contiguous: got .*, expected strides"
    if size:
        elsewhere = "cuda:0" if backend.is_host else "cpu"
        message = f"'{last}' is on another device: got {elsewhere}"
        yield [*good[:-1], RawBuffer(64, size, "float32", elsewhere)], message


class TestAtomicity:
    @pytest.mark.parametrize("hold", [1, 3])
    @pytest.mark.parametrize("measure", [True, False])
    def test_bad_gradients_change_nothing(self, backend, hold, measure):
        accumulator = new(SMALL, hold, backend)
        for seed in range(2):
            accumulator.add(put_all(backend, draw.random_gradients(seed, SMALL.slots)), 2.0)
        before = state(accumulator, backend)
        for call, slots in (
            (accumulator.add, SMALL.slots),
            (lambda g, **options: accumulator.add_block(1, g, **options), SMALL.blocks[1].slots),
        ):
            for gradients, message in bad_gradients(slots, backend):
                with nothing_is_launched(backend), pytest.raises((LayoutMismatch, BufferRefused), match=message):
                    call(gradients, measure=measure)
                assert state(accumulator, backend) == before

    @pytest.mark.parametrize("weight", [0, -1, NAN, INF, 1e-60, "x", None])
    def test_bad_weights_change_nothing(self, backend, weight):
        accumulator = new(SMALL, backend=backend)
        accumulator.add(put_all(backend, draw.random_gradients(0, SMALL.slots)))
        before, good = state(accumulator, backend), put_all(backend, draw.random_gradients(1, SMALL.slots))
        for call in (
            lambda: accumulator.add(good, weight),
            lambda: accumulator.add_block(0, good[:9], weight),
            lambda: accumulator.add_non_block(0, good[-3], weight),
        ):
            with (
                nothing_is_launched(backend),
                pytest.raises(WindowError, match=r"weight is (out|not) .*: got .*, exp"),
            ):
                call()
            assert state(accumulator, backend) == before

    @pytest.mark.parametrize("shift", [0, -1, 1])
    def test_its_own_arena_is_refused(self, backend, shift):
        accumulator = new(SMALL, backend=backend)
        accumulator.add(put_all(backend, draw.random_gradients(0, SMALL.slots)))
        before, slot = state(accumulator, backend), SMALL.slots[1]
        own = raw(
            accumulator.arena.targets[1].part(0, slot.size), pointer=accumulator.arena.targets[1].pointer + 4 * shift
        )
        for source in (own, *([accumulator.views()[slot.name]] if shift == 0 else [])):
            gradients = put_all(backend, draw.random_gradients(1, SMALL.slots))
            gradients[1] = source
            message = r"'blocks.0.w_k' is in this accumulator's own arena: got address 0x"
            with nothing_is_launched(backend), pytest.raises(BufferRefused, match=message):
                accumulator.add(gradients)
            assert state(accumulator, backend) == before

    def test_an_empty_view_of_its_own_arena_is_nothing(self):
        accumulator = new(GradientLayout.of({"empty": (0,), "w": (2,)}))
        accumulator.add([accumulator.memory.data[:0], np.ones(2, np.float32)])
        assert accumulator.accumulated_count == 1


class AnyCalls(RuleBasedStateMachine):
    """Good and bad calls in any order against the contract in plain NumPy."""

    backend = HOST

    @initialize(hold=st.integers(1, 3), data=st.data())
    def begin(self, hold, data):
        self.layout = data.draw(st.one_of(st.just(ODD), draw.uneven_layouts(self.backend.chunk)))
        self.accumulator = new(self.layout, hold, self.backend)
        self.forget()
        self.seed = 0

    def forget(self):
        self.values = dict.fromkeys((slot.name for slot in self.layout.slots), None)
        self.counts = dict.fromkeys(self.values, 0)
        self.weights = []

    def take(self, slots, gradients, weight):
        """What the call must do, or False where it must be refused."""
        for slot in slots:
            count = self.counts[slot.name]
            if count < len(self.weights) and self.weights[count] != np.float32(weight):
                return False
        if any(self.counts[slot.name] == len(self.weights) for slot in slots):
            self.weights.append(np.float32(weight))
        for slot, gradient in zip(slots, gradients, strict=True):
            self.counts[slot.name] += 1
            if gradient is not None:
                held = self.values[slot.name]
                self.values[slot.name] = draw.folded(held, [gradient], [weight], held is None)
        return True

    def gradients(self, slots, dtype, gap):
        self.seed += 1
        batch = draw.random_gradients(self.seed, slots, dtype)
        return [None if gap and i % 2 else gradient for i, gradient in enumerate(batch)]

    def state(self):
        return state(self.accumulator, self.backend)

    def put(self, gradients):
        return put_all(self.backend, gradients)

    def call(self, fits, call, *arguments):
        if fits:
            call(*arguments)
        else:
            self.refused(call, *arguments)

    def refused(self, call, *arguments):
        before = self.state()
        with nothing_is_launched(self.backend), pytest.raises(GradientError):
            call(*arguments)
        assert self.state() == before

    @rule(dtype=draw.dtypes, weight=st.sampled_from([1.0, 0.3]), gap=st.booleans(), measure=st.booleans())
    def add(self, dtype, weight, gap, measure):
        batch = self.gradients(self.layout.slots, dtype, gap)
        add = functools.partial(self.accumulator.add, measure=measure)
        self.call(self.take(self.layout.slots, batch, weight), add, self.put(batch), weight)

    @precondition(lambda self: self.layout.blocks)
    @rule(data=st.data(), dtype=draw.dtypes, weight=st.sampled_from([1.0, 0.3]))
    def add_block(self, data, dtype, weight):
        index, slots = self.some_block(data)
        batch = self.gradients(slots, dtype, False)
        self.call(self.take(slots, batch, weight), self.accumulator.add_block, index, self.put(batch), weight)

    @precondition(lambda self: any(slot.block is None for slot in self.layout.slots))
    @rule(data=st.data(), weight=st.sampled_from([1.0, 0.3]))
    def add_non_block(self, data, weight):
        slot = data.draw(st.sampled_from([slot for slot in self.layout.slots if slot.block is None]))
        (gradient,) = self.gradients([slot], "float32", False)
        (array,) = self.put([gradient])
        self.call(self.take([slot], [gradient], weight), self.accumulator.add_non_block, slot.name, array, weight)

    @precondition(lambda self: self.layout is ODD)
    @rule(case=st.sampled_from(range(9)), measure=st.booleans())
    def add_what_is_wrong(self, case, measure):
        bad = list(bad_gradients(self.layout.slots, self.backend))
        self.refused(self.accumulator.add, bad[case % len(bad)][0])
        bad = list(bad_gradients(self.layout.blocks[0].slots, self.backend))
        self.refused(self.accumulator.add_block, 0, bad[case % len(bad)][0])

    @rule(weight=draw.bad_weights)
    def add_with_a_bad_weight(self, weight):
        self.refused(self.accumulator.add, self.put(draw.random_gradients(0, self.layout.slots)), weight)

    @rule()
    def average(self):
        if self.weights in ([], [1]):
            before = self.state()
            self.accumulator.average()
            assert self.state() == before
        elif set(self.counts.values()) == {len(self.weights)}:
            self.accumulator.average()
            factor = np.float32(1 / sum(map(float, self.weights)))
            for slot in self.layout.slots:
                value = self.values[slot.name]
                self.values[slot.name] = np.zeros(slot.size, np.float32) if value is None else value * factor
            self.counts, self.weights = dict.fromkeys(self.counts, 1), [np.float32(1)]
        else:
            self.refused(self.accumulator.average)

    @rule()
    def drop(self):
        self.accumulator.zero_all()
        self.forget()

    def some_block(self, data):
        block = data.draw(st.sampled_from(self.layout.blocks))
        return block.index, block.slots

    def opened(self, data):
        """A block as it stands, its slots, and that it holds what it must."""
        index, slots = self.some_block(data)
        block = self.accumulator.block(index)
        for slot in slots:
            if self.values[slot.name] is None:
                self.values[slot.name] = np.zeros(slot.size, np.float32)
        self.assert_block(block, slots)
        return block, slots

    def assert_block(self, block, slots):
        components = all_on_host(block.components)
        assert list(components) == [slot.name.rpartition(".")[2] for slot in slots]
        flat = np.zeros(slots[-1].offset - slots[0].offset + -(-slots[-1].size // 32) * 32, np.float32)
        for slot, got in zip(slots, components.values(), strict=True):
            assert got.shape == slot.shape
            draw.assert_same_bits(got, self.values[slot.name])
            flat[slot.offset - slots[0].offset :][: slot.size] = self.values[slot.name]
        draw.assert_same_bits(on_host(block.flatten()), flat)
        assert block.has_non_finite() is False

    @precondition(lambda self: self.layout.blocks)
    @rule(data=st.data(), dtype=draw.dtypes, gap=st.booleans())
    def accumulate_into_a_block(self, data, dtype, gap):
        block, slots = self.opened(data)
        batch = self.gradients(slots, dtype, gap)
        block.accumulate(self.put(batch))
        for slot, gradient in zip(slots, batch, strict=True):
            if gradient is not None:
                self.values[slot.name] = draw.folded(self.values[slot.name], [gradient], [1], False)
        self.assert_block(block, slots)

    @precondition(lambda self: self.layout.blocks)
    @rule(data=st.data(), dtype=draw.dtypes)
    def replace_a_block(self, data, dtype):
        block, slots = self.opened(data)
        self.seed += 1
        flat = draw.random_array(self.seed, block.flatten().size, dtype)
        block.from_flat(self.backend.put(flat.copy()))
        for slot in slots:
            start = slot.offset - slots[0].offset
            self.values[slot.name] = flat[start : start + slot.size].astype(np.float32)
        self.assert_block(block, slots)

    @precondition(lambda self: self.layout.blocks)
    @rule(data=st.data(), divisor=st.sampled_from([None, 3.0, -0.5]))
    def scale_or_zero_a_block(self, data, divisor):
        block, slots = self.opened(data)
        if divisor is None:
            block.zero()
        else:
            block.scale(divisor)
        for slot in slots:
            value = self.values[slot.name]
            self.values[slot.name] = np.zeros_like(value) if divisor is None else value * np.float32(1 / divisor)
        self.assert_block(block, slots)

    @precondition(lambda self: self.accumulator.hold == 1 and any(value is not None for value in self.values.values()))
    @rule(data=st.data())
    def write_through_a_view(self, data):
        slot = self.layout.slot(data.draw(st.sampled_from([n for n, v in self.values.items() if v is not None])))
        (value,) = self.gradients([slot], "float32", False)
        assign(self.accumulator.views()[slot.name], self.backend.put(value.copy()))
        self.values[slot.name] = value.reshape(-1)

    @rule()
    def look_for_what_is_not_finite(self):
        assert self.accumulator.has_non_finite() is False

    @precondition(lambda self: self.weights and set(self.counts.values()) == {len(self.weights)})
    @rule(measure=st.booleans())
    def close(self, measure):
        self.accumulator.close(measure=measure)
        self.accumulator.measure_rest()
        squares = totals_of(self.accumulator.kernels, self.accumulator.arena.partials)
        for slot, square in zip(self.layout.slots, squares, strict=True):
            if self.values[slot.name] is None:
                self.values[slot.name] = np.zeros(slot.size, np.float32)
            draw.assert_same_bits(on_host(self.accumulator.views()[slot.name]), self.values[slot.name])
            exact = np.sum(np.square(self.values[slot.name].astype(np.float64)))
            assert square == pytest.approx(exact, rel=1e-6)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "accumulator"):
            assert self.accumulator.accumulated_count == len(self.weights)
            assert_padding_is_zero(self.accumulator, self.backend)


AnyCalls.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestAnyCalls = AnyCalls.TestCase


@pytest.mark.parametrize("name", runnable(DEVICE_BACKENDS))
def test_any_calls_on_a_device(name):
    on_device = type("AnyCallsOnADevice", (AnyCalls,), {"backend": available(name)})
    run_state_machine_as_test(on_device, settings=settings(max_examples=12, stateful_step_count=15, deadline=None))


class TestAverage:
    def test_is_one_multiplication_by_the_rounded_reciprocal(self, backend):
        batches, weights = [draw.random_gradients(seed, ODD.slots) for seed in range(3)], [1, 2.5, 0.1]
        accumulator = new(hold=2, backend=backend)
        for batch, weight in zip(batches, weights, strict=True):
            accumulator.add(put_all(backend, batch), weight)
        factor = np.float32(1 / sum(float(np.float32(weight)) for weight in weights))
        accumulator.average()
        expected = {name: value * factor for name, value in expected_window(ODD, batches, weights).items()}
        assert_window(closed(accumulator), expected)
        assert (accumulator.accumulated_count, accumulator.total_weight) == (1, 1.0)
        assert_padding_is_zero(accumulator, backend)

    @pytest.mark.parametrize("count", [0, 1])
    @pytest.mark.parametrize("hold", [1, 2])
    def test_of_at_most_one_changes_nothing(self, backend, count, hold):
        accumulator = new(hold=hold, backend=backend)
        for seed in range(count):
            accumulator.add(put_all(backend, draw.random_gradients(seed, ODD.slots)))
        before = state(accumulator, backend)
        accumulator.average()
        assert state(accumulator, backend) == before

    def test_twice_is_once(self, backend):
        accumulator = new(backend=backend)
        for seed in range(3):
            accumulator.add(put_all(backend, draw.random_gradients(seed, ODD.slots)))
        accumulator.average()
        before = state(accumulator, backend)
        accumulator.average()
        assert state(accumulator, backend) == before

    def test_of_weights_that_make_one_counts_as_one(self, backend):
        accumulator = new(backend=backend)
        batches = [draw.random_gradients(seed, ODD.slots) for seed in range(2)]
        for batch, weight in zip(batches, (0.25, 0.75), strict=True):
            accumulator.add(put_all(backend, batch), weight)
        accumulator.average()
        assert accumulator.accumulated_count == 1
        assert_window(closed(accumulator), expected_window(ODD, batches, [0.25, 0.75]))

    def test_a_single_weighted_micro_batch_is_its_own_mean(self, backend):
        accumulator, batch = new(backend=backend), draw.random_gradients(0, ODD.slots)
        accumulator.add(put_all(backend, batch), 4.0)
        accumulator.average()
        assert_window(closed(accumulator), expected_window(ODD, [batch], [1]))

    def test_more_may_be_added_to_a_mean(self, backend):
        accumulator = new(GradientLayout.of([(2,)]), backend=backend)
        for value in (1, 3):
            accumulator.add([backend.put(np.full(2, value, np.float32))])
        accumulator.average()
        accumulator.add([backend.put(np.full(2, 4, np.float32))])
        assert closed(accumulator)["0"].tolist() == [6, 6]
        assert accumulator.accumulated_count == 2


class TestNonFinite:
    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("hold", [1, 2])
    def test_is_found_in_any_component(self, backend, bad, hold):
        for i, slot in enumerate(ODD.slots):
            if not slot.size:
                continue
            accumulator, batch = new(hold=hold, backend=backend), draw.random_gradients(0, ODD.slots)
            batch[i].reshape(-1)[-1] = bad
            accumulator.add(put_all(backend, batch))
            assert accumulator.has_non_finite() is True
            accumulator.zero_all()
            assert accumulator.has_non_finite() is False

    def test_in_a_part_of_a_window(self, backend):
        accumulator = new(SMALL, backend=backend)
        accumulator.add_non_block("final_norm", backend.put(np.ones(8, np.float32)))
        assert accumulator.has_non_finite() is False  # what did not come is fresh memory, and not looked at
        accumulator.add_non_block("lm_head", backend.put(np.full((16, 8), NAN, np.float32)))
        assert accumulator.has_non_finite() is True

    def test_an_overflow_of_the_sum_is_found(self, backend):
        accumulator = new(GradientLayout.of([(2,)]), backend=backend)
        for _ in range(2):
            assert accumulator.has_non_finite() is False
            accumulator.add([backend.put(np.full(2, 3e38, np.float32))])
        assert accumulator.has_non_finite() is True

    def test_what_is_written_through_a_view_is_seen(self, backend):
        accumulator = new(backend=backend)
        accumulator.add(put_all(backend, draw.random_gradients(0, ODD.slots)), measure=True)
        block = accumulator.block(1)
        assert accumulator.has_non_finite() is False
        assign(block.components["w"], NAN, 3)
        assert accumulator.has_non_finite() is True


class TestBlock:
    BLOCK = SMALL.blocks[1]

    def filled(self, backend=HOST):
        block = BlockGradientSet(self.BLOCK, backend.kernels)
        gradients = draw.random_gradients(5, self.BLOCK.slots)
        block.accumulate(put_all(backend, gradients))
        return block, gradients

    def test_components_in_order_and_shape(self, backend):
        block, gradients = self.filled(backend)
        assert tuple(block.components) == BLOCK_COMPONENTS
        assert block.component_sizes == (64, 32, 32, 64, 96, 96, 96, 8, 8)
        for slot, gradient, got in zip(self.BLOCK.slots, gradients, block.components.values(), strict=True):
            assert got.shape == slot.shape
            draw.assert_same_bits(on_host(got), gradient)

    def test_begins_at_zero(self, backend):
        with_garbage = BlockGradientSet(self.BLOCK, PoisonedKernels(backend.kernels))
        assert (draw.storage_bits(on_host(with_garbage.flatten())) == 0).all()

    def test_flat_and_components_are_the_same_memory(self, backend):
        block, _ = self.filled(backend)
        flat = block.flatten()
        assign(flat, backend.put(np.arange(flat.size, dtype=np.float32)))
        for slot in self.BLOCK.slots:
            start = slot.offset - self.BLOCK.start
            assert on_host(block.components[slot.name.split(".")[-1]]).reshape(-1)[0] == start
        views = [backend.kernels.device.view(array, "flat") for array in (flat, block.flatten())]
        assert views[0].pointer == views[1].pointer

    def test_the_components_cannot_be_replaced(self):
        block, _ = self.filled()
        with pytest.raises(TypeError):
            block.components["w_q"] = np.zeros((8, 8), np.float32)

    def test_a_block_of_an_accumulator_is_its_memory(self, backend):
        accumulator = new(SMALL, hold=2, backend=backend)
        accumulator.add(put_all(backend, draw.random_gradients(0, SMALL.slots)))
        block = accumulator.block(1)
        view = backend.kernels.device.view(block.flatten(), "flat")
        assert view.pointer == accumulator.memory.pointer + 4 * self.BLOCK.start
        block.scale(2)
        assign(block.components["gate"], 3)
        assert (closed(accumulator)["blocks.1.gate"] == 3).all()

    def test_a_block_handed_out_is_measured_again(self, backend):
        accumulator = new(SMALL, backend=backend)
        accumulator.add(put_all(backend, draw.random_gradients(0, SMALL.slots)), measure=True)
        assign(accumulator.block(1).components["gate"], 3)
        accumulator.measure_rest()
        position = [slot.name for slot in SMALL.slots].index("blocks.1.gate")
        assert totals_of(accumulator.kernels, accumulator.arena.partials)[position] == 9 * 8 * 12

    def test_a_block_before_its_first_micro_batch_is_zero_and_takes_what_is_written(self, backend):
        accumulator = new(SMALL, backend=backend)
        assert (draw.storage_bits(on_host(accumulator.block(0).flatten())) == 0).all()
        assign(accumulator.block(0).components["up"], 2)
        batch = draw.random_gradients(0, SMALL.slots)
        accumulator.add(put_all(backend, batch))
        draw.assert_same_bits(closed(accumulator)["blocks.0.up"], np.float32(2) + batch[5])

    def test_from_flat_of_flatten_is_the_same_block(self, backend):
        block, _ = self.filled(backend)
        wanted = on_host(block.flatten())
        copied = BlockGradientSet(self.BLOCK, backend.kernels)
        with backend.active():  # to copy by CuPy's own means wants that
            copied.from_flat(block.flatten().copy())
        draw.assert_same_bits(on_host(copied.flatten()), wanted)
        block.from_flat(block.flatten())  # from itself to itself
        draw.assert_same_bits(on_host(block.flatten()), wanted)

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_from_flat_takes_any_dtype_and_leaves_padding_zero(self, backend, dtype):
        block = BlockGradientSet(self.BLOCK, backend.kernels)
        block.from_flat(backend.put(np.full(block.flatten().size, 2.5, draw.DTYPES[dtype])))
        assert all((component == 2.5).all() for component in all_on_host(block.components).values())
        assert np.count_nonzero(on_host(block.flatten())) == sum(block.component_sizes)

    @pytest.mark.parametrize("change", [-1, 1])
    def test_from_flat_of_another_length(self, backend, change):
        block, _ = self.filled(backend)
        before, size = on_host(block.flatten()).tobytes(), block.flatten().size
        message = f"flat gradient of block 1 has another length: got {size + change} elements, expected {size} elements"
        flat = backend.put(np.ones(size + change, np.float32))
        with nothing_is_launched(backend), pytest.raises(LayoutMismatch, match=message):
            block.from_flat(flat)
        assert on_host(block.flatten()).tobytes() == before

    def test_accumulate_adds(self, backend):
        block, gradients = self.filled(backend)
        more = draw.random_gradients(6, self.BLOCK.slots, "bfloat16")
        block.accumulate(put_all(backend, dict(zip(BLOCK_COMPONENTS, more, strict=True))))
        for got, a, b in zip(block.components.values(), gradients, more, strict=True):
            draw.assert_same_bits(on_host(got), a + b.astype(np.float32))

    def test_accumulate_of_none_adds_nothing(self, backend):
        block, gradients = self.filled(backend)
        block.accumulate([None] * 8 + [backend.put(np.ones(8, np.float32))])
        got = list(all_on_host(block.components).values())
        draw.assert_same_bits(got[0], gradients[0])
        draw.assert_same_bits(got[8], gradients[8] + np.float32(1))

    def test_accumulate_of_itself_doubles(self, backend):
        block, gradients = self.filled(backend)
        block.accumulate(block.components)
        draw.assert_same_bits(on_host(block.components["down"]), 2 * gradients[6])

    def test_memory_of_its_own_elsewhere_is_refused(self, backend):
        block, _ = self.filled(backend)
        before = on_host(block.flatten()).tobytes()
        swapped = {**block.components, "gate": block.components["up"], "up": block.components["gate"]}
        message = r"'blocks.1.gate' is in another place of this block's own memory: got address"
        with nothing_is_launched(backend), pytest.raises(BufferRefused, match=message):
            block.accumulate(swapped)
        assert on_host(block.flatten()).tobytes() == before

    def test_wrong_gradients_name_component_got_and_expected_and_change_nothing(self, backend):
        block, _ = self.filled(backend)
        before = on_host(block.flatten()).tobytes()
        for gradients, message in bad_gradients(self.BLOCK.slots, backend):
            with nothing_is_launched(backend), pytest.raises((LayoutMismatch, BufferRefused), match=message):
                block.accumulate(gradients)
            assert on_host(block.flatten()).tobytes() == before

    @pytest.mark.parametrize("divisor", [1, 3, -2.0, 0.1, 1e30, np.float32(7)])
    def test_scale_is_one_multiplication(self, backend, divisor):
        block, gradients = self.filled(backend)
        block.scale(divisor)
        for got, gradient in zip(block.components.values(), gradients, strict=True):
            draw.assert_same_bits(on_host(got), gradient * np.float32(1 / float(divisor)))
        assert np.count_nonzero(on_host(block.flatten())) <= sum(block.component_sizes)

    @pytest.mark.parametrize("divisor", [0, 0.0, -0.0, NAN, INF, -INF, 1e-40, 5e-324, 1e39, -1e300])
    def test_divisors_that_make_no_number_are_refused(self, backend, divisor):
        block, _ = self.filled(backend)
        message = r"a divisor is (out|not) .*: got .*, expected a finite number"
        with nothing_is_launched(backend), pytest.raises(CallerError, match=message):
            block.scale(divisor)

    def test_zero(self, backend):
        block, _ = self.filled(backend)
        block.zero()
        assert (draw.storage_bits(on_host(block.flatten())) == 0).all()

    @pytest.mark.parametrize("bad", [NAN, INF])
    def test_has_non_finite(self, backend, bad):
        block, gradients = self.filled(backend)
        for component, values in zip(block.components.values(), gradients, strict=True):
            assert block.has_non_finite() is False
            assign(component, bad, (..., -1))
            assert block.has_non_finite() is True
            assign(component, backend.put(values))

    def test_lora_blocks(self):
        layout = GradientLayout.lora(2, 8, 4, 2)
        block = BlockGradientSet(layout.blocks[1])
        assert tuple(block.components) == (
            *("lora_a_q", "lora_b_q", "lora_a_v", "lora_b_v"),
            *("input_norm", "post_attn_norm"),
        )


class TestMemory:
    LAYOUT = GradientLayout.transformer(3, 256, 64, 1024, 2048)

    @pytest.mark.parametrize(("dtype", "hold"), [("float32", 1), ("bfloat16", 1), ("float16", 2)])
    def test_a_step_takes_next_to_nothing_beside_the_arena(self, dtype, hold):
        kernels = HostKernels(2)
        accumulator = PerBlockGradientAccumulator(self.LAYOUT, kernels, hold=hold)
        assert accumulator.memory.nbytes == self.LAYOUT.nbytes > 12e6
        batches = [draw.random_gradients(seed, self.LAYOUT.slots, dtype) for seed in range(2)]

        def step():
            for batch in batches:
                accumulator.add(batch, 0.3, measure=batch is batches[-1])
            accumulator.has_non_finite()
            accumulator.average()
            accumulator.block(0).accumulate(batches[0][:9])
            accumulator.close()
            accumulator.zero_all()

        for _ in range(3):
            step()
        tracemalloc.start()
        step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        scratch = 2 * 4 * CHUNK  # a thread takes its own at its first chunk, which may be in any of the steps
        assert peak < 0.05 * accumulator.memory.nbytes + scratch

    def test_the_arena_is_the_only_memory(self):
        tracemalloc.start()
        accumulator = PerBlockGradientAccumulator(self.LAYOUT, HostKernels(1))
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert accumulator.memory.nbytes <= taken < 1.02 * accumulator.memory.nbytes

    def test_views_are_views(self):
        accumulator = new()
        accumulator.add(draw.random_gradients(0, ODD.slots))
        for slot, view in zip(ODD.slots, accumulator.views().values(), strict=True):
            assert view.shape == slot.shape
            assert not view.size or np.shares_memory(view, accumulator.memory.data)


def test_torch_gradients_as_backward_leaves_them():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    parameters = dict(model.named_parameters())
    accumulator = new(GradientLayout.of(parameters), hold=2)
    inputs = torch.randn(3, 8, 5)
    for batch in inputs:
        model.zero_grad(set_to_none=True)
        model(batch).square().sum().backward()
        accumulator.add({name: p.grad for name, p in parameters.items()})
    accumulator.average()
    model.zero_grad()
    (model(inputs).square().sum() / 3).backward()
    for name, parameter in parameters.items():
        np.testing.assert_allclose(accumulator.views()[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_anything_with_a_mapping_of_gradients():
    """Frameworks' containers are only asked for names and items."""
    workspace = SimpleNamespace(w=np.ones(2, np.float32))
    accumulator = new(GradientLayout.of({"w": (2,)}))
    accumulator.add(vars(workspace))
    assert closed(accumulator)["w"].tolist() == [1, 1]


class TestHeldPointers:
    """A pointer is vouched for at the add; that it still is, its owner is asked before the memory is read."""

    @pytest.mark.parametrize("is_known", [True, False])
    @pytest.mark.parametrize("kind", ["map", "weak"])
    def test_an_owner_that_goes_while_they_are_held(self, backend, kind, is_known):
        class Owner:
            closed = False

        array, owner = backend.put(np.ones(3, np.float32)), Owner()
        view = backend.kernels.device.view(array, "w")
        pointer = raw(view, owner=owner if kind == "map" else weakref.ref(owner))
        accumulator = PerBlockGradientAccumulator(GradientLayout.of([(3,)]), backend.kernels, hold=2)
        if is_known:
            accumulator.add([pointer])
            accumulator.close()
            accumulator.zero_all()
        accumulator.add([pointer])
        owner.closed = True
        if kind == "weak":
            del owner
        for call in (lambda: accumulator.add([backend.put(np.ones(3, np.float32))]), accumulator.close):
            with pytest.raises(BufferRefused, match="'0' was given other memory, or freed, while it was held"):
                call()
        accumulator.zero_all()
        accumulator.add([array])
        accumulator.close()
        assert backend.get(accumulator.memory)[:3].tolist() == [1, 1, 1]


def test_a_held_gradient_is_read_no_later_than_the_nth_add_whatever_others_gave():
    """Also where the last of them gave none for its component: its buffer may be written anew from then on."""
    accumulator, early = new(GradientLayout.of({"a": (2,), "layers.0.b": (2,)}), hold=2), np.ones(2, np.float32)
    accumulator.add([np.ones(2, np.float32), early])
    accumulator.add([np.ones(2, np.float32), None])
    early[:] = 100
    accumulator.add([np.ones(2, np.float32)] * 2)
    accumulator.close()
    assert accumulator.views()["layers.0.b"].tolist() == [2, 2]


def test_a_part_that_gives_nothing_counts_among_what_is_held():
    accumulator, early = new(GradientLayout.of({"layers.0.b": (2,), "head": (2,)}), hold=2), np.ones(2, np.float32)
    accumulator.add_block(0, [early])
    accumulator.add_block(0, [None])
    early[:] = 100
    accumulator.add_block(0, [np.ones(2, np.float32)])
    assert accumulator.block(0).flatten()[:2].tolist() == [2, 2]
