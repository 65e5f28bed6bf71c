"""Work on several streams and in several threads: it is ordered by events, or refused, never left to chance."""

import contextlib
import gc
import math
import threading
from types import SimpleNamespace

import cuda_emulator
import numpy as np
import pytest
from backends import on_the_stand_in
from devices import churned, named_cuda, on_host, put_all, raw, synchronize
from emulated_torch import copy_on
from folds import arena_of_sums, finalise, hand_back, measure
from ranks import on_ranks

from gradengine import (
    BlockGradientSet,
    FusedClipState,
    GradientEngine,
    GradientLayout,
    NonFiniteGradient,
    clip_by_global_norm,
    clip_gradients_fused,
)
from gradengine.accumulate.gpu import GpuGradientAccumulator
from gradengine.errors import BufferRefused, CallerError, OutOfDeviceMemory
from gradengine.kernels import ClipPlan, launch
from gradengine.kernels.events import Kept
from gradengine.kernels.launch import Entry, chunk_for
from gradengine.kernels.streams import StreamOrder

LAYOUT = GradientLayout.of({"layers.0.w": (5000,), "head": (7,)})


def ones(value=1.0):
    return [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots]


def new_engine(device, **options):
    return GradientEngine(LAYOUT, device.kernels, max_norm=None, **options)


def stream_of(device):
    return device.xp.cuda.Stream(non_blocking=True)


class TestStreams:
    def test_an_add_on_one_and_a_step_on_another(self, device):
        engine, gradients = new_engine(device), put_all(device, ones())
        synchronize(device)
        with stream_of(device):
            engine.add(gradients)
        with stream_of(device):
            engine.add(gradients)
        result = engine.step()
        assert float(result.norm) == pytest.approx(np.sqrt(5007))
        assert (on_host(result.gradients["head"]) == 1).all()

    def test_a_replay_is_behind_what_was_done_before(self, device):
        engine, gradients, others = new_engine(device), put_all(device, ones()), put_all(device, ones(5))
        synchronize(device)
        with engine.capture() as graph:
            engine.add(gradients)
            engine.step()
        with stream_of(device):
            engine.add(others)
            engine.step()
        assert float(graph.replay().norm) == pytest.approx(np.sqrt(5007))

    def test_a_clip_state_may_be_dropped_whatever_stream_it_worked_on(self, device):
        gradients, stream = put_all(device, ones(4)), stream_of(device)
        state = FusedClipState([5000, 7], device.kernels)
        synchronize(device)
        clip_gradients_fused(gradients, 1.0, state, stream=stream)
        norm = state.norm
        del state
        gc.collect()
        churned(device)
        stream.synchronize()
        assert float(norm) == pytest.approx(4 * np.sqrt(5007))
        assert on_host(gradients[1]) == pytest.approx(1 / np.sqrt(5007))

    def test_a_producer_that_names_its_stream_is_waited_for(self, device):
        xp, stream = device.xp, stream_of(device)
        array, values = xp.zeros(7, np.float32), xp.asarray(np.full(7, 3, np.float32))
        synchronize(device)
        runtime = xp.cuda.runtime
        runtime.memcpyAsync(array.data.ptr, values.data.ptr, 28, runtime.memcpyDeviceToDevice, stream.ptr)
        interface = {**array.__cuda_array_interface__, "version": 3, "stream": stream.ptr}
        engine = GradientEngine(GradientLayout.of([(7,)]), device.kernels, max_norm=None)
        engine.add([SimpleNamespace(__cuda_array_interface__=interface)])
        assert (on_host(engine.step().gradients["0"]) == 3).all()

    def test_an_interface_with_gaps_within_elements_is_refused(self, device):
        array = device.xp.zeros(8, np.float32)
        interface = {**array.__cuda_array_interface__, "shape": (4,), "strides": (6,), "stream": None}
        with pytest.raises(BufferRefused, match="not contiguous"):
            device.kernels.device.view(SimpleNamespace(__cuda_array_interface__=interface), "w")

    def test_the_device_that_was_current_is_so_again(self, device):
        runtime = device.kernels.xp.cuda.runtime
        before = runtime.getDevice()
        with device.kernels.device.on(stream_on(device)):
            assert runtime.getDevice() == device.kernels.ordinal
        assert runtime.getDevice() == before


class Sides:
    """Two streams that nothing orders but events; what the one asked first does not wait for comes too early."""

    def __init__(self, device, first):
        self.a, self.b = stream_of(device), stream_of(device)
        self._first = first
        synchronize(device)

    def finish(self):
        for stream in (self.a, self.b) if self._first == "a" else (self.b, self.a):
            stream.synchronize()


@pytest.fixture(params=["a", "b"])
def sides(request, device):
    return Sides(device, request.param)


class TestTwoStreams:
    """Adds on one, and on another what is done to the sums: behind the adds before and before the adds after."""

    @pytest.mark.parametrize(("average", "wanted"), [("weighted", 4.0), ("per_worker", 3.5)])
    def test_a_step_with_other_workers(self, device, average, wanted):
        """Twice, so that the second window's add must not come before the first one's hand-back."""
        batches = [[put_all(device, ones(value * turn)) for value in (2.0, 5.0)] for turn in (1.0, 2.0)]
        synchronize(device)

        def one(exchange):
            engine = new_engine(device, exchange=exchange, average=average)
            sides, seen = Sides(device, "b"), []
            for batch in batches:
                with sides.a:
                    engine.add(batch[exchange.rank], weight=1 + exchange.rank)
                with sides.b:
                    result = engine.step()
                    seen += [(on_host(array).min(), on_host(array).max()) for array in result.gradients.values()]
                    seen.append(float(result.norm))
            return seen

        norm = pytest.approx(wanted * np.sqrt(5007))
        twice = [(wanted, wanted)] * 2 + [norm] + [(2 * wanted, 2 * wanted)] * 2 + [2 * norm.expected]
        assert on_ranks(one, 2) == [[*twice[:5], pytest.approx(twice[5])]] * 2

    @pytest.mark.usefixtures("lazy")
    def test_a_clip_has_its_own_factor_though_the_next_one_is_on_another_stream(self, device, sides):
        """Both have one state, whose factor the later one writes."""
        state, first, second = (
            FusedClipState([5000, 7], device.kernels),
            put_all(device, ones(2)),
            put_all(device, ones(8)),
        )
        synchronize(device)
        clip_gradients_fused(first, 1.0, state, stream=sides.a)
        clip_gradients_fused(second, 1.0, state, stream=sides.b)
        sides.finish()
        for array in (*first, *second):
            assert on_host(array) == pytest.approx(1 / np.sqrt(5007), rel=1e-6)

    def test_a_step_with_other_workers_into_destinations(self, device):
        """The next window's add must not come before the sum has been read."""
        batches = [put_all(device, ones(value)) for value in (2.0, 7.0)]
        outs = [put_all(device, ones(0)) for _ in range(2)]
        synchronize(device)

        def one(exchange):
            engine, sides, out = new_engine(device, exchange=exchange), Sides(device, "a"), outs[exchange.rank]
            with sides.a:
                engine.add(batches[0])
            with sides.b:
                engine.step(out=out)
            with sides.a:
                engine.add(batches[1])
            sides.finish()
            return [(on_host(array).min(), on_host(array).max()) for array in out]

        assert on_ranks(one, 2) == [[(2.0, 2.0)] * 2] * 2

    @pytest.mark.usefixtures("lazy")
    def test_the_norm_of_a_clip_though_the_next_one_is_on_another_stream(self, device, sides):
        """It is a copy, made before the next clip of the same arrays writes its own."""
        gradients = put_all(device, ones(2))
        with named_cuda(device):
            clip_by_global_norm(gradients, 1e9)
            synchronize(device)
            norms = []
            for stream in (sides.a, sides.b):
                with device.kernels.device.on(stream):
                    norms.append(clip_by_global_norm(gradients, 1.0))
        sides.finish()
        assert [float(norm) for norm in norms] == pytest.approx([2 * np.sqrt(5007), 1])

    def test_zeros_for_what_did_not_come_and_their_norm(self, device, sides):
        engine, gradients = new_engine(device), put_all(device, ones(3))
        synchronize(device)
        with sides.a:
            churned(device)  # so much to do that no look at a verdict comes to the end of it
            engine.add(gradients)
            engine.step()
            engine.add([None, gradients[1]])
        with sides.b:
            result = engine.step()
            sides.finish()
            assert not on_host(result.gradients["layers.0.w"]).any()
            assert float(result.norm) == pytest.approx(3 * np.sqrt(7))

    def test_a_copy_of_a_block(self, device, sides):
        accumulator = GpuGradientAccumulator(LAYOUT, device.kernels)
        gradients, others, workspace = (put_all(device, ones(value)) for value in (1, 8, 0))
        synchronize(device)
        with sides.a:
            accumulator.add(gradients)
        with sides.b:
            accumulator.copy_block_to(0, workspace[:1])
        with sides.a:
            accumulator.add(others)
        sides.finish()
        assert (on_host(workspace[0]) == 1).all()
        assert (on_host(accumulator.views()["layers.0.w"]) == 9).all()

    def test_a_copy_of_a_component_that_did_not_come(self, device, sides):
        accumulator = GpuGradientAccumulator(LAYOUT, device.kernels)
        gradients, head = put_all(device, ones()), put_all(device, ones(5))[1]
        synchronize(device)
        with sides.a:
            accumulator.add(gradients)
            accumulator.zero_all()
            accumulator.add_block(0, gradients[:1])
        with sides.b:
            accumulator.copy_non_block_to("head", head)
        sides.finish()
        assert not on_host(head).any()

    def test_the_mean(self, device, sides):
        accumulator, gradients = GpuGradientAccumulator(LAYOUT, device.kernels), put_all(device, ones(6))
        synchronize(device)
        with sides.a:
            accumulator.add(gradients, weight=1)
            accumulator.add(gradients, weight=3)
        with sides.b:
            accumulator.average()
        with sides.a:
            accumulator.add(gradients)
        sides.finish()
        assert all((on_host(array) == 12).all() for array in accumulator.views().values())

    @pytest.mark.parametrize("whose", ["the accumulator's", "its own"])
    @pytest.mark.parametrize(
        ("change", "wanted"),
        [
            (lambda block, array: block.accumulate([array]), 3 + 2 + 3),
            (lambda block, array: block.scale(2), 3 / 2 + 3),
            (lambda block, array: block.zero(), 3),
            (lambda block, array: block.from_flat(array), 2 + 3),
        ],
        ids=["accumulate", "scale", "zero", "from_flat"],
    )
    def test_what_is_done_to_a_block(self, device, sides, change, wanted, whose):
        layout = GradientLayout.of({"layers.0.w": (5024,)})
        accumulator, block = GpuGradientAccumulator(layout, device.kernels), None
        given, other = (device.put(np.full(5024, value, np.float32)) for value in (3, 2))
        synchronize(device)
        with sides.a:
            if whose == "its own":
                block = BlockGradientSet(layout.blocks[0], device.kernels)
                block.accumulate([given])
            else:
                accumulator.add([given])
                block = accumulator.block(0)
        with sides.b:
            change(block, other)
        with sides.a:
            block.accumulate([given]) if whose == "its own" else accumulator.add([given])
        sides.finish()
        assert (on_host(block.flatten()) == wanted).all()

    @pytest.mark.parametrize("asked", ["the accumulator", "a block"])
    @pytest.mark.parametrize("values", [(np.nan, 1.0), (1.0, np.nan)])
    def test_whether_it_is_finite(self, device, sides, values, asked):
        accumulator = GpuGradientAccumulator(LAYOUT, device.kernels)
        before, now = (put_all(device, ones(value)) for value in values)
        accumulator.add(before)
        accumulator.zero_all()
        synchronize(device)
        with sides.a:
            accumulator.add(now)
            block = accumulator.block(0)
        with sides.b:
            assert (accumulator if asked == "the accumulator" else block).has_non_finite() == np.isnan(values[1])

    def test_an_accumulator_may_be_dropped(self, device):
        """The memory goes back to the stream that it came from, behind the work of the others."""
        gradients, workspace = put_all(device, ones(3)), put_all(device, ones(0))
        synchronize(device)
        accumulator, sides = GpuGradientAccumulator(LAYOUT, device.kernels), Sides(device, "b")
        with sides.b:
            accumulator.add(gradients)
            accumulator.copy_block_to(0, workspace[:1])
        del accumulator
        gc.collect()
        churned(device)
        device.xp.cuda.Stream.null.synchronize()
        synchronize(device)
        assert (on_host(workspace[0]) == 3).all()


def stream_on(device):
    """A stream of the device that the kernels are on, whichever is the current one."""
    with device.kernels.device.active():
        return stream_of(device)


@contextlib.contextmanager
def current_there(device, stream):
    """A stream is the current one of its device, whichever device is the current one."""
    with device.kernels.device.active():
        before = device.kernels.xp.cuda.get_current_stream()
        stream.use()
    try:
        yield
    finally:
        with device.kernels.device.active():
            before.use()


class TestALenderOnTheDefaultStream:
    """Its handle is that of another device's default stream, which may be the current one there."""

    def test_is_waited_for_though_another_device_is_current(self, device, lazy):
        engine, mine = new_engine(device), stream_on(device)
        lent, values = put_all(device, ones(0)), put_all(device, ones(5))
        synchronize(device)
        default = device.xp.cuda.Stream.null
        with device.kernels.device.active():
            mine.__enter__()
        try:
            for target, source in zip(lent, values, strict=True):
                copy_on(device.xp, default, target, source)
            engine.add([raw(device.kernels.device.view(array, "w"), stream=default.ptr) for array in lent])
            assert all((on_host(array) == 5).all() for array in engine.step().gradients.values())
        finally:
            mine.__exit__()


class TestALenderOnAStreamOfItsOwn:
    """Our work waits for what it has queued, and what it queues next waits for ours."""

    @pytest.fixture
    def lender(self, device):
        """Gradients of 3 by their addresses, `become` another value on the lender's stream."""
        stream, lent = stream_of(device), put_all(device, ones(3))
        values = {value: put_all(device, ones(value)) for value in (8, 9)}
        synchronize(device)

        def become(value):
            for target, source in zip(lent, values[value], strict=True):
                copy_on(device.xp, stream, target, source)

        pointers = [raw(device.kernels.device.view(array, "w"), stream=stream.ptr) for array in lent]
        return SimpleNamespace(pointers=pointers, become=become, stream=stream, arrays=lent)

    @pytest.mark.parametrize("hold", [1, 2])
    def test_reads_the_mean_right_after_the_step_and_not_the_sum(self, device, lender, hold):
        engine, seen = new_engine(device, hold=hold), put_all(device, ones(0))
        synchronize(device)
        with stream_of(device):
            engine.add(lender.pointers, weight=2)
            result = engine.step()
        for target, source in zip(seen, result.gradients.values(), strict=True):
            copy_on(device.xp, lender.stream, target, source)
        lender.stream.synchronize()
        assert all((on_host(array) == 3).all() for array in seen)

    def test_is_waited_for_by_a_replay_and_waits_for_its_result(self, device, lender):
        engine, mine, seen = new_engine(device), stream_of(device), put_all(device, ones(0))
        synchronize(device)
        with mine:
            with engine.capture() as graph:
                engine.add(lender.pointers, weight=2)
                engine.step()
            lender.become(8)
            gradients = graph.replay().gradients
            for target, source in zip(seen, gradients.values(), strict=True):
                copy_on(device.xp, lender.stream, target, source)
            lender.stream.synchronize()
            assert all((on_host(array) == 8).all() for array in (*seen, *gradients.values()))
            lender.become(9)
            gradients = graph.replay().gradients
            mine.synchronize()
            assert all((on_host(array) == 9).all() for array in gradients.values())

    @pytest.mark.parametrize("captured", [False, True])
    def test_has_its_destinations_written_behind_its_own_work(self, device, lender, captured):
        engine, mine, given = new_engine(device), stream_of(device), put_all(device, ones(2))
        synchronize(device)
        with mine, engine.capture() if captured else contextlib.nullcontext() as graph:
            lender.become(8)
            engine.add(given)
            engine.step(out=lender.pointers)
        with mine:
            if captured:
                lender.become(9)
                graph.replay()
            mine.synchronize()
        lender.stream.synchronize()
        assert all((on_host(array) == 2).all() for array in lender.arrays)

    def test_reads_its_destinations_behind_a_replay(self, device, lender):
        engine, mine, (given, seen) = new_engine(device), stream_of(device), (put_all(device, ones(v)) for v in (2, 0))
        synchronize(device)
        with mine:
            with engine.capture() as graph:
                engine.add(given)
                engine.step(out=lender.pointers)
            graph.replay()
        for target, source in zip(seen, lender.arrays, strict=True):
            copy_on(device.xp, lender.stream, target, source)
        lender.stream.synchronize()
        assert all((on_host(array) == 2).all() for array in seen)

    def test_is_waited_for_when_the_same_gradients_come_again(self, device, lender):
        engine, mine = new_engine(device), stream_of(device)
        with mine:
            for value in (8, 9):
                lender.become(value)
                engine.add(lender.pointers)
                assert all((on_host(array) == value).all() for array in engine.accumulator.views().values())
                engine.step()

    def test_does_not_write_over_a_gradient_that_is_still_to_be_added(self, device, lender):
        engine, mine = new_engine(device), stream_of(device)
        with mine:
            engine.add(lender.pointers)
            lender.become(9)
            lender.stream.synchronize()
            result = engine.step()
            assert all((on_host(array) == 3).all() for array in result.gradients.values())

    def test_writes_what_is_folded_while_its_gradients_are_held(self, device, lender):
        engine, mine, own = new_engine(device, hold=2), stream_of(device), put_all(device, ones(2))
        synchronize(device)
        with mine:
            engine.add(lender.pointers)
            lender.become(8)
            engine.add(own)
            mine.synchronize()
            assert all((on_host(array) == 5).all() for array in engine.step().gradients.values())


def read_there(array):
    """As CuPy reads behind the current stream of the array's own device."""
    with array.device:
        return float(array)


@contextlib.contextmanager
def taken_by_others(device):
    """Behind it memory that was freed in it is taken by others and full of NaN, whichever stream it came from."""
    xp, place = device.kernels.xp, device.kernels.device
    yield
    gc.collect()
    for stream in (None, place._uploads):
        with device.kernels.device.on(stream), device.kernels.device.active():
            current = xp.cuda.get_current_stream()
            others = [xp.empty(size, np.uint8) for size in (512, 1024, 4096, 20480, 20992, 65536) for _ in range(4)]
            for other in others:
                xp.cuda.runtime.memsetAsync(other.data.ptr, 0xFF, other.nbytes, current.ptr)
            current.synchronize()  # as early as can be


def is_told(engine, raises):
    try:
        raises()
    except NonFiniteGradient as found:
        return found.step == engine.current_step - 1
    return False


# How a user learns that the last step's gradient was not finite.
LOOKS = {
    "check": lambda engine, result: is_told(engine, result.check),
    "non_finite": lambda _, result: result.non_finite is not None,
    "engine.check": lambda engine, _: is_told(engine, engine.check),
    "norm": lambda _, result: not math.isfinite(float(result.norm)),
    "norm on its device": lambda _, result: not math.isfinite(read_there(result.norm)),
    "skipped": lambda _, result: bool(result.skipped),
    "gradients": lambda _, result: not result.gradients["head"].get().any(),
    "component_norms": lambda _, result: not np.isfinite(result.component_norms.get()).all(),
    "group_norms": lambda _, result: not math.isfinite(float(result.group_norms["all"])),
    "views": lambda engine, _: not engine.accumulator.views()["head"].get().any(),
}


class TestWhoeverLooks:
    """A NaN is neither missed nor invented, whatever stream, device or thread is current when somebody looks."""

    @pytest.fixture(params=["the default stream", "a stream", "a thread", "the device's own stream"])
    def elsewhere(self, request, device):
        def look(what):
            if request.param == "a thread":
                return on_ranks(lambda _: what(), 1)[0]
            with contextlib.ExitStack() as current:
                if request.param == "a stream":
                    current.enter_context(stream_of(device))
                if request.param == "the device's own stream":
                    current.enter_context(current_there(device, stream_on(device)))
                return what()

        return look

    @pytest.mark.parametrize("what", LOOKS)
    @pytest.mark.parametrize("is_bad", [True, False], ids=["missed", "invented"])
    def test_at_a_step(self, device, elsewhere, what, is_bad):
        engine = new_engine(device)
        good, bad = put_all(device, ones()), put_all(device, ones(math.nan))
        engine.add(good if is_bad else bad)
        engine.step()
        with contextlib.suppress(NonFiniteGradient):
            engine.check()
        synchronize(device)
        with device.kernels.device.on(stream_on(device)):
            engine.add(bad if is_bad else good)
            result = engine.step()
        assert elsewhere(lambda: LOOKS[what](engine, result)) is is_bad

    @pytest.mark.parametrize("what", ["check", "norm", "gradients"])
    def test_at_a_replay(self, device, elsewhere, what):
        engine, gradients = new_engine(device), put_all(device, ones())
        with engine.capture() as graph:
            engine.add(gradients)
            engine.step()
        graph.replay()
        bad, stream = put_all(device, ones(math.nan)), stream_on(device)
        synchronize(device)
        with device.kernels.device.on(stream):
            for to, of in zip(gradients, bad, strict=True):
                copy_on(device.xp, stream, to, of)
            result = graph.replay()
        assert elsewhere(lambda: LOOKS[what](engine, result))

    @pytest.mark.parametrize("number", ["norm", "scale"])
    def test_at_a_clip_state(self, device, elsewhere, number):
        state, gradients = FusedClipState([5000, 7], device.kernels), put_all(device, ones(2))
        clip_gradients_fused(put_all(device, ones()), 1.0, state)
        synchronize(device)
        clip_gradients_fused(gradients, 1.0, state, stream=stream_on(device))
        norm = 2 * math.sqrt(5007)
        wanted = pytest.approx(norm if number == "norm" else 1 / norm)
        assert elsewhere(lambda: float(getattr(state, number))) == wanted

    def test_at_the_norm_of_a_clip_while_another_device_is_current(self, device):
        gradients = put_all(device, ones(2))
        with named_cuda(device):
            clip_by_global_norm(put_all(device, ones()), 1.0)
        synchronize(device)
        with named_cuda(device), stream_of(device):
            norm = clip_by_global_norm(gradients, 1.0)
            assert norm.device.id == device.kernels.ordinal
            assert float(norm) == pytest.approx(2 * math.sqrt(5007))

    @pytest.mark.usefixtures("lazy")
    def test_at_the_norm_of_a_clip_on_its_devices_own_stream(self, device):
        gradients = put_all(device, ones(2))
        with named_cuda(device):
            clip_by_global_norm(put_all(device, ones()), 1.0)
        synchronize(device)
        with named_cuda(device), current_there(device, stream_on(device)):
            assert float(clip_by_global_norm(gradients, 1.0)) == pytest.approx(2 * math.sqrt(5007))

    @pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
    def test_at_an_accumulator(self, device, elsewhere, values):
        accumulator = GpuGradientAccumulator(LAYOUT, device.kernels)
        accumulator.add(put_all(device, ones(values[0])))
        accumulator.has_non_finite()
        accumulator.zero_all()
        now = put_all(device, ones(values[1]))
        synchronize(device)
        with device.kernels.device.on(stream_on(device)):
            accumulator.add(now)
        assert elsewhere(accumulator.has_non_finite) is math.isnan(values[1])

    @pytest.mark.parametrize("what", ["flatten", "components"])
    def test_at_a_block(self, device, elsewhere, what):
        accumulator, gradients = GpuGradientAccumulator(LAYOUT, device.kernels), put_all(device, ones(3))
        synchronize(device)
        with device.kernels.device.on(stream_on(device)):
            accumulator.add(gradients)
            block = accumulator.block(0)

        def look():
            return (block.flatten() if what == "flatten" else block.components["w"]).get()

        assert (elsewhere(look)[:5000] == 3).all()

    def test_late_while_the_next_step_is_on_another_stream(self, device):
        """The verdict that is sent to the host is that of its step: the next one may not write it before."""
        engine, readback = new_engine(device, on_non_finite="skip"), []
        good, bad = put_all(device, ones()), put_all(device, ones(math.nan))
        first, second = stream_on(device), stream_on(device)
        synchronize(device)
        with device.kernels.device.on(first):
            engine.add(bad)
            engine.step()
        with device.kernels.device.on(second), pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._late._readback, "send", lambda: readback.append("not sent"))
            engine.add(good)
            engine.step()
        second.synchronize()
        first.synchronize()
        assert readback
        assert engine.latest_verdict.is_bad


class TestAStreamThatIsGone:
    """A handle need live only until the step is over; later another stream may have it."""

    @pytest.fixture
    def work(self, device):
        """Runs something on a stream that is destroyed at once, by its handle."""

        def run(what):
            stream = stream_on(device)
            with device.kernels.device.on(stream.ptr):
                what()
            del stream
            gc.collect()

        return run

    @pytest.mark.parametrize("waits", [True, False])
    def test_harms_no_engine(self, device, work, waits):
        engine, gradients = new_engine(device), put_all(device, ones(3))
        synchronize(device)
        for _ in range(3):
            work(lambda: (engine.add(gradients), engine.step()))
            if waits:
                synchronize(device)
        engine.add(gradients)
        result = engine.step()
        assert float(result.norm) == pytest.approx(3 * math.sqrt(5007))
        assert (on_host(result.gradients["head"]) == 3).all()

    def test_harms_none_that_was_made_on_it(self, device, work):
        engines, gradients = [], put_all(device, ones(3))
        synchronize(device)
        work(lambda: engines.append(new_engine(device)))
        engines[0].add(gradients)
        result = engines[0].step()
        assert (on_host(result.gradients["head"]) == 3).all()
        del result
        engines.clear()
        gc.collect()
        synchronize(device)
        device.kernels.device.allocate(1)
        assert not device.kernels.device.kept

    def test_keeps_what_its_work_uses(self, device, work):
        """Memory that came from the default stream, dropped while the work of one that is gone still runs."""
        workspace, gradients = put_all(device, ones(0)), put_all(device, ones(3))
        accumulators = [GpuGradientAccumulator(LAYOUT, device.kernels)]
        accumulators[0].add(gradients)
        synchronize(device)
        work(lambda: accumulators[0].copy_block_to(0, workspace[:1]))
        with taken_by_others(device):
            accumulators.clear()
        synchronize(device)
        assert (on_host(workspace[0]) == 3).all()

    def test_another_that_has_its_handle_waits_all_the_same(self):
        """As one of CuPy's own is known by its object, not by its handle."""
        device = StubDevice()
        order, first, second = StreamOrder(device), StubStream(7), StubStream(7)
        for stream, waits in ((first, 1), (first, 1), (second, 1), (first, 2)):
            device.stream = stream
            with order.use():
                assert len(stream.waited) == waits

    @pytest.mark.parametrize("then", ["use", "follow", "read"])
    def test_what_an_interrupted_use_has_queued_is_waited_for(self, then):
        device = StubDevice()
        order, first, second = StreamOrder(device), StubStream(7), StubStream(8)
        device.stream = first
        order.use().__enter__()  # and never left
        device.stream, events = second, list(first.recorded)
        if then == "use":
            order.use().__enter__()
        else:
            order.follow() if then == "follow" else order.read(None)
        assert (events, len(first.recorded)) == ([], 1)
        assert [*second.waited, *device.read_behind] == first.recorded

    def test_per_thread_default_streams_are_each_threads_own(self):
        device = StubDevice()
        device.stream = StubStream(2)
        order = StreamOrder(device)
        for turn in range(3):
            with order.use():
                assert len(device.stream.waited) == turn + 1
        order.follow()
        assert len(device.stream.waited) == 4

    @pytest.mark.parametrize(("handle", "is_kept"), [(2, True), (7, False)])
    def test_memory_of_a_per_thread_default_stream_is_kept_until_the_work_is_done(self, handle, is_kept):
        """The last work may be another thread's, behind which the stream that the memory goes back to is not."""
        device = StubDevice()
        device.stream = StubStream(handle)
        order = StreamOrder(device, "memory")
        with order.use():
            pass
        order.end()
        assert len(device.kept) == is_kept


class StubStream:
    """A stream that notes what it is asked."""

    def __init__(self, ptr):
        self.ptr, self.waited, self.recorded = ptr, [], []

    def is_capturing(self):
        return False

    def record(self, event):
        self.recorded.append(event)
        return event

    def wait_event(self, event):
        self.waited.append(event)


class StubDevice:
    """A device whose current stream the test says."""

    def __init__(self):
        self.stream, self.kept, self.read_behind = StubStream(0), Kept(None), []

    def current_stream(self):
        return self.stream

    def readers(self):
        return [self.stream]

    def read(self, _, behind):
        self.read_behind.append(behind)

    def event(self):
        return SimpleNamespace(done=False)

    def is_capturing(self):
        return False

    def active(self):
        return contextlib.nullcontext()


def test_threads_with_their_own_default_streams(device):
    """cudaStreamPerThread: one handle, and another stream in each thread."""
    xp, engine = device.xp, new_engine(device)
    gradients = put_all(device, ones(2))
    synchronize(device)

    def on_default_of_thread(what):
        with device.kernels.device.active(), xp.cuda.Stream.ptds:
            return what()

    on_ranks(lambda _: on_default_of_thread(lambda: engine.add(gradients)), 1)
    result = on_default_of_thread(engine.step)
    on_ranks(lambda _: on_default_of_thread(lambda: engine.add(gradients)), 1)
    assert on_default_of_thread(lambda: float(engine.step().norm)) == pytest.approx(2 * math.sqrt(5007))
    assert result.non_finite is None


class TestDropped:
    """Nothing is freed while work may still use it: on a stream that is not the one the memory came from."""

    def test_an_engine(self, device):
        engine, out, gradients = new_engine(device), put_all(device, ones(0)), put_all(device, ones(3))
        engine.add(gradients)
        synchronize(device)
        with device.kernels.device.on(stream_on(device)):
            engine.step(out=out)
        with taken_by_others(device):
            del engine
        synchronize(device)
        assert all((on_host(array) == 3).all() for array in out)

    def test_an_engine_may_be_replaced_where_there_is_room_for_one(self, device):
        """The memory of the first is waited for."""
        kernels, layout = device.kernels, GradientLayout.of([(1 << 20,)])
        pool = kernels.xp.get_default_memory_pool()
        gradient = device.put(np.ones(1 << 20, np.float32))
        engine = GradientEngine(layout, kernels, max_norm=None)
        synchronize(device)
        kernels.device.kept.wait()
        pool.free_all_blocks()
        with kernels.device.active():
            pool.set_limit(size=pool.total_bytes() + (1 << 20))
        try:
            with kernels.device.on(stream_on(device)):
                engine.add([gradient])
                engine.step()
            del engine
            engine = GradientEngine(layout, kernels, max_norm=None)
            engine.add([gradient])
            assert float(engine.step().norm) == 1024
        finally:
            with kernels.device.active():
                pool.set_limit(size=0)

    @pytest.mark.usefixtures("lazy")
    def test_a_clip_state_whose_memory_came_from_several_streams(self, device):
        """Its norms' from the stream of the first clip: others get it there when the last clip, elsewhere, is done."""
        first, last, stream = put_all(device, ones(4)), put_all(device, ones(2)), stream_on(device)
        state = FusedClipState([5000, 7], device.kernels)
        synchronize(device)
        clip_gradients_fused(first, 1.0, state, stream=stream)
        clip_gradients_fused(last, 1.0, state)
        del state
        gc.collect()
        with device.active(), stream:
            churned(device)
            stream.synchronize()
        synchronize(device)
        for array in (*first, *last):
            assert on_host(array) == pytest.approx(1 / np.sqrt(5007), rel=1e-6)

    def test_a_plan(self, device):
        """More plans than are remembered, each of which the last stream's work still reads."""
        kernels = device.kernels
        state, stream = kernels.partial_sums([4]), stream_on(device)
        buffers = [device.buffer(np.full(4, 8, np.float32)) for _ in range(20)]
        synchronize(device)
        plans = [ClipPlan((0,), (1.0, float(number))) for number in range(20)]
        for plan, buffer in zip(plans, buffers, strict=True):
            with taken_by_others(device):
                kernels.decision(arena_of_sums(state), plan)
            with kernels.device.on(stream):
                measure(kernels, [buffer], state)
                decision = finalise(kernels, None, state, plan, 1.0, zero_if_bad=False)
                hand_back(kernels, [buffer], decision, [0], [buffer])
        synchronize(device)
        assert all((device.get(buffer).view(np.float32) == 0.5).all() for buffer in buffers)

    def test_a_table(self, device, monkeypatch):
        """Destinations that move make a table each; those that are forgotten may still be read."""
        monkeypatch.setattr(launch, "_TABLES", 1)
        kernels, stream = device.kernels, stream_on(device)
        sources = [device.buffer(np.full(3000 + number, 8, np.float32)) for number in range(12)]
        synchronize(device)
        for source in sources:
            kernels._launches.table([Entry(0, source.size, 0, 0)], chunk_for(source.size))
            with kernels.device.on(stream):
                kernels.scale([source], np.float32(0.5), [source])
            with taken_by_others(device):
                kernels._launches.table([Entry(0, 1, 0, 0)], 2048)
        synchronize(device)
        assert all((device.get(source).view(np.float32) == 4).all() for source in sources)

    @pytest.mark.usefixtures("lazy")
    def test_a_table_of_another_stream_than_the_one_that_reads_it(self, device, monkeypatch):
        monkeypatch.setattr(launch, "_TABLES", 1)
        kernels, stream = device.kernels, stream_on(device)
        sources = [device.buffer(np.full(3000 + number, 8, np.float32)) for number in range(12)]
        synchronize(device)
        for source in sources:
            with kernels.device.on(stream):
                kernels._launches.table([Entry(0, source.size, 0, 0)], chunk_for(source.size))
            kernels.scale([source], np.float32(0.5), [source])
            with kernels.device.on(stream):
                kernels._launches.table([Entry(0, 1, 0, 0)], 2048)
                gc.collect()
                churned(device)
                stream.synchronize()
        synchronize(device)
        assert all((device.get(source).view(np.float32) == 4).all() for source in sources)


class TestCapture:
    def test_work_on_another_stream_is_refused(self, device):
        engine, gradients = new_engine(device), put_all(device, ones())
        with engine.capture() as graph:
            with stream_of(device), pytest.raises(CallerError, match="not the one that is captured"):
                engine.add(gradients)
            engine.add(gradients)
            engine.step()
        assert float(graph.replay().norm) == pytest.approx(np.sqrt(5007))

    def test_another_engine_is_refused_and_goes_on_afterwards(self, device):
        captured, other, gradients = new_engine(device), new_engine(device), put_all(device, ones())
        with captured.capture():
            with pytest.raises(CallerError, match="did not begin"):
                other.add(gradients)
            with pytest.raises(CallerError, match="a graph that this engine did not begin"), other.capture():
                pass
            captured.add(gradients)
            captured.step()
        other.add(gradients)
        assert float(other.step().norm) == pytest.approx(np.sqrt(5007))

    def test_a_replay_into_another_engines_graph_is_refused_and_goes_on_afterwards(self, device):
        """What would tell the host of its step was an event of that graph, which is never done."""
        engine, other, gradients = new_engine(device), new_engine(device), put_all(device, ones())
        with engine.capture() as graph:
            engine.add(gradients)
            engine.step()
        with other.capture():
            with pytest.raises(CallerError, match="did not begin"):
                graph.replay()
            other.add(gradients)
            other.step()
        assert graph.replay().step == 0
        engine.check()

    def test_repointing_keeps_the_destinations(self, device):
        engine, out, gradients = new_engine(device), put_all(device, ones(0)), put_all(device, ones())
        with engine.capture() as graph:
            engine.add(gradients)
            engine.step(out=out)
        graph.repoint([put_all(device, ones(6))])
        graph.replay()
        assert (on_host(out[1]) == 6).all()

    def test_a_deferred_step_leaves_one_factor(self, device):
        engine = new_engine(device, groups="component")
        engine.add(put_all(device, ones()))
        with pytest.raises(CallerError, match="leaves one factor"):
            engine.step(deferred=True)
        engine.step()


class TestSteps:
    def test_a_verdict_is_of_the_step_that_the_engine_counts(self, device):
        """Also behind a step that was interrupted after K2."""
        engine = new_engine(device)
        engine.add(put_all(device, ones()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(device.kernels), "hand_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        engine.discard()
        engine.add(put_all(device, ones(np.nan)))
        result = engine.step()
        with pytest.raises(NonFiniteGradient) as caught:
            result.check()
        assert caught.value.step == result.step

    def test_a_component_without_a_gradient_in_a_later_micro_batch_costs_no_pass(self, emulated):
        engine, gradients = new_engine(emulated), put_all(emulated, ones())
        for _ in range(2):
            with cuda_emulator.recorded() as record:
                engine.add(gradients)
                engine.add([None, gradients[1]])
                result = engine.step()
        assert record.launches == ["accumulate_1_small"] * 2 + ["finalise", "hand_back_small"]
        assert float(result.norm) == pytest.approx(np.sqrt(5000 / 4 + 7))

    @on_the_stand_in
    def test_memory_that_runs_out_later_stops_no_window(self, emulated):
        """All that a window and its step need is there before the first of them."""
        engine, gradients = new_engine(emulated), put_all(emulated, ones())
        pool = emulated.xp.get_default_memory_pool()
        pool.free_all_blocks()
        pool.set_limit(size=pool.used_bytes())
        try:
            with pytest.raises(OutOfDeviceMemory, match="expected"):
                emulated.kernels.partial_sums([10**6])
            engine.add(gradients)
            engine.add_block(0, gradients[:1])
            engine.add_non_block("head", gradients[1])
            assert float(engine.step().norm) == pytest.approx(np.sqrt(5007))
        finally:
            pool.set_limit(0)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("components", [50, 4100])
def test_engines_in_two_threads_do_not_disturb_each_other(emulated, components):
    """With more addresses than a launch carries they share the memory that these are copied to."""
    layout = GradientLayout.of([(3,)] * components)
    outcomes, start = {}, threading.Barrier(2)

    def work(value):
        engine = GradientEngine(layout, emulated.kernels, max_norm=None)
        gradient = emulated.put(np.full(3, value, np.float32))
        start.wait(200)
        engine.add([gradient] * components)
        outcomes[value] = [array.get()[0] for array in list(engine.step().gradients.values())[:: components // 5]]

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert outcomes == {value: [value] * len(outcomes[value]) for value in (1, 2)}
