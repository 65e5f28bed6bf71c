"""Work on several streams and in several threads: it is ordered by events, or refused, never left to chance."""

import contextlib
import functools
import gc
import math
import threading
from types import SimpleNamespace

import cuda_emulator
import numpy as np
import pytest
from devices import churned, named_cuda, on_host, put_all, raw, synchronize
from emulated_torch import copy_on
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
from gradengine.errors import CallerError
from gradengine.kernels import launch
from gradengine.kernels.launch import chunk_for, entries_of
from gradengine.kernels.streams import StreamOrder

LAYOUT = GradientLayout.of({"layers.0.w": (5000,), "head": (7,)})
NORM = math.sqrt(5007)  # of ones


def ones(value=1.0):
    return [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots]


def given(device, *values):
    """Gradients of this value, or a set for each of these; they are there when this returns."""
    sets = [put_all(device, ones(value)) for value in values]
    synchronize(device)
    return sets if len(sets) > 1 else sets[0]


def new_engine(device, **options):
    return GradientEngine(LAYOUT, device.kernels, max_norm=None, **options)


def all_are(arrays, value):
    return all((on_host(array) == value).all() for array in arrays)


def copy_all(device, stream, targets, sources):
    """As somebody else's own work on a stream."""
    for target, source in zip(targets, sources, strict=True):
        copy_on(device.xp, stream, target, source)


def stream_of(device):
    """A stream of the device that is current, to others than the kernels' that of theirs."""
    return device.xp.cuda.Stream(non_blocking=True)


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


@contextlib.contextmanager
def taken_by_others(device, *streams):
    """Behind it memory that was freed in it is taken by others and full of NaN, whichever stream it came from."""
    xp, place = device.kernels.xp, device.kernels.device
    yield
    gc.collect()
    for stream in (*streams, None, place._uploads):
        with place.on(stream), place.active():
            current = xp.cuda.get_current_stream()
            others = [xp.empty(size, np.uint8) for size in (512, 1024, 4096, 20480, 20992, 65536) for _ in range(4)]
            for other in others:
                xp.cuda.runtime.memsetAsync(other.data.ptr, 0xFF, other.nbytes, current.ptr)
            current.synchronize()  # as early as can be


class TestCurrent:
    def test_a_replay_is_behind_what_was_done_before(self, device):
        engine, (gradients, others) = new_engine(device), given(device, 1, 5)
        with engine.capture() as graph:
            engine.add(gradients)
            engine.step()
        with stream_of(device):
            engine.add(others)
            engine.step()
        assert float(graph.replay().norm) == pytest.approx(NORM)

    def test_the_device_that_was_current_is_so_again(self, device):
        runtime = device.kernels.xp.cuda.runtime
        before = runtime.getDevice()
        with device.kernels.device.on(stream_on(device)):
            assert runtime.getDevice() == device.kernels.ordinal
        assert runtime.getDevice() == before

    def test_a_lender_on_the_default_stream_is_waited_for_though_another_device_is_current(self, device, lazy):
        """Its handle is that of another device's default stream, which may be the current one there."""
        engine, mine, (lent, values) = new_engine(device), stream_on(device), given(device, 0, 5)
        default = device.xp.cuda.Stream.null
        with device.kernels.device.active():
            mine.__enter__()
        try:
            copy_all(device, default, lent, values)
            engine.add([raw(device.kernels.device.view(array, "w"), stream=default.ptr) for array in lent])
            assert all_are(engine.step().gradients.values(), 5)
        finally:
            mine.__exit__()


class Sides:
    """Two streams that nothing orders but events; what the one asked first does not wait for comes too early."""

    def __init__(self, device, first):
        self.a, self.b = stream_of(device), stream_of(device)
        self._first = first
        synchronize(device)

    def run(self, first, other, then=lambda: None):
        """Calls on one, on the other and on the first again, and all their work in the order that was asked for."""
        for stream, call in ((self.a, first), (self.b, other), (self.a, then)):
            with stream:
                call()
        self.finish()

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
        batches = [given(device, 2.0 * turn, 5.0 * turn) for turn in (1, 2)]

        def one(exchange):
            engine = new_engine(device, exchange=exchange, average=average)
            sides, seen = Sides(device, "b"), []
            for batch in batches:
                with sides.a:
                    engine.add(batch[exchange.rank], weight=1 + exchange.rank)
                with sides.b:
                    result = engine.step()
                    values = [on_host(array) for array in result.gradients.values()]
                    seen.append([*map(np.min, values), *map(np.max, values), float(result.norm) / NORM])
            return np.array(seen)

        for seen in on_ranks(one, 2):
            np.testing.assert_allclose(seen, [[wanted] * 5, [2 * wanted] * 5], rtol=1e-6)

    def test_a_step_with_other_workers_into_destinations(self, device):
        """The next window's add must not come before the sum has been read."""
        first, then, *outs = given(device, 2.0, 7.0, 0, 0)

        def one(exchange):
            engine, out = new_engine(device, exchange=exchange), outs[exchange.rank]
            Sides(device, "a").run(lambda: engine.add(first), lambda: engine.step(out=out), lambda: engine.add(then))
            return all_are(out, 2)

        assert on_ranks(one, 2) == [True] * 2

    @pytest.mark.usefixtures("lazy")
    def test_a_clip_has_its_own_factor_though_the_next_one_is_on_another_stream(self, device, sides):
        """Both have one state, whose factor the later one writes."""
        state, clipped = FusedClipState([5000, 7], device.kernels), given(device, 2, 8)
        for gradients, stream in zip(clipped, (sides.a, sides.b), strict=True):
            clip_gradients_fused(gradients, 1.0, state, stream=stream)
        sides.finish()
        for array in (*clipped[0], *clipped[1]):
            assert on_host(array) == pytest.approx(1 / NORM, rel=1e-6)

    @pytest.mark.usefixtures("lazy")
    def test_the_norm_of_a_clip_though_the_next_one_is_on_another_stream(self, device, sides):
        """It is a copy, made before the next clip of the same arrays writes its own."""
        gradients, norms = given(device, 2), []
        with named_cuda(device):
            clip_by_global_norm(gradients, 1e9)
            synchronize(device)
            for stream in (sides.a, sides.b):
                with device.kernels.device.on(stream):
                    norms.append(clip_by_global_norm(gradients, 1.0))
        sides.finish()
        assert [float(norm) for norm in norms] == pytest.approx([2 * NORM, 1])

    def test_a_step_and_zeros_for_what_did_not_come(self, device, sides):
        engine, gradients = new_engine(device), given(device, 3)
        with sides.a:
            churned(device)  # so much to do that no look at a verdict comes to the end of it
            engine.add(gradients)
            engine.step()
            engine.add([None, gradients[1]])
        with sides.b:
            result = engine.step()
            sides.finish()
            assert not on_host(result.gradients["layers.0.w"]).any()
            assert float(result.norm) == pytest.approx(3 * math.sqrt(7))

    @pytest.mark.parametrize(
        ("change", "copied", "summed"),
        [
            (lambda sums, to: sums.copy_block_to(0, to[:1]), [6, 0], 11),
            (lambda sums, to: sums.copy_non_block_to("head", to[1]), [0, 6], 11),
            (lambda sums, to: sums.average(), [0, 0], 8),
        ],
        ids=["copy_block_to", "copy_non_block_to", "average"],
    )
    def test_what_is_done_with_the_sums(self, device, sides, change, copied, summed):
        sums, (places, first, then) = GpuGradientAccumulator(LAYOUT, device.kernels), given(device, 0, 3, 5)
        sides.run(lambda: sums.add(first, weight=2), lambda: change(sums, places), lambda: sums.add(then))
        assert [set(on_host(place).tolist()) for place in places] == [{value} for value in copied]
        assert all_are(sums.views().values(), summed)

    def test_a_copy_of_a_component_that_did_not_come(self, device, sides):
        sums, (gradients, places) = GpuGradientAccumulator(LAYOUT, device.kernels), given(device, 1, 5)
        sides.run(
            lambda: (sums.add(gradients), sums.zero_all(), sums.add_block(0, gradients[:1])),
            lambda: sums.copy_non_block_to("head", places[1]),
        )
        assert not on_host(places[1]).any()

    @pytest.mark.parametrize("is_its_own", [False, True])
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
    def test_what_is_done_to_a_block(self, device, sides, change, wanted, is_its_own):
        layout = GradientLayout.of({"layers.0.w": (5024,)})
        array, other = (device.put(np.full(5024, value, np.float32)) for value in (3, 2))
        sums = GpuGradientAccumulator(layout, device.kernels)
        block = BlockGradientSet(layout.blocks[0], device.kernels) if is_its_own else sums.block(0)
        add = block.accumulate if is_its_own else sums.add
        synchronize(device)
        sides.run(lambda: add([array]), lambda: change(block, other), lambda: add([array]))
        assert (on_host(block.flatten()) == wanted).all()


def is_told(engine, raises):
    try:
        raises()
    except NonFiniteGradient as found:
        return found.step == engine.current_step - 1
    return False


def read_there(array):
    """As CuPy reads behind the current stream of the array's own device."""
    with array.device:
        return float(array)


# How a user learns that the last step's gradient was not finite.
LOOKS = {
    "check": lambda engine, result: is_told(engine, result.check),
    "norm": lambda _, result: not math.isfinite(float(result.norm)),
    "gradients": lambda _, result: not result.gradients["head"].get().any(),
    "non_finite": lambda _, result: result.non_finite is not None,
    "engine.check": lambda engine, _: is_told(engine, engine.check),
    "norm on its device": lambda _, result: not math.isfinite(read_there(result.norm)),
    "skipped": lambda _, result: bool(result.skipped),
    "component_norms": lambda _, result: not np.isfinite(result.component_norms.get()).all(),
    "group_norms": lambda _, result: not math.isfinite(float(result.group_norms["all"])),
    "views": lambda engine, _: not engine.accumulator.views()["head"].get().any(),
}


REPLAY_LOOKS = [(look, True) for look in ("check", "norm", "gradients")]


class TestALenderOnAStreamOfItsOwn:
    """Our work waits for what the lender has queued, and what the lender queues next waits for ours."""

    @pytest.fixture
    def lender(self, device):
        """Gradients of 3 by their addresses; `become` and `copied_to` queue work on the lender's stream."""
        stream, (lent, *others) = stream_of(device), given(device, 3, 8, 9)
        values = dict(zip((8, 9), others, strict=True))
        return SimpleNamespace(
            pointers=[raw(device.kernels.device.view(array, "w"), stream=stream.ptr) for array in lent],
            arrays=lent,
            stream=stream,
            become=lambda value: copy_all(device, stream, lent, values[value]),
            copied_to=lambda targets, sources=lent: copy_all(device, stream, targets, sources),
        )

    @pytest.mark.parametrize("hold", [1, 2])
    def test_reads_the_mean_after_the_step_and_not_the_sum(self, device, lender, hold):
        engine, seen = new_engine(device, hold=hold), given(device, 0)
        with stream_of(device):
            engine.add(lender.pointers, weight=2)
            result = engine.step()
        lender.copied_to(seen, result.gradients.values())
        lender.stream.synchronize()
        assert all_are(seen, 3)

    def test_is_waited_for_by_a_replay_and_waits_for_its_result(self, device, lender):
        engine, mine, seen = new_engine(device), stream_of(device), given(device, 0)
        with mine:
            with engine.capture() as graph:
                engine.add(lender.pointers, weight=2)
                engine.step()
            lender.become(8)
            gradients = graph.replay().gradients.values()
            lender.copied_to(seen, gradients)
            lender.stream.synchronize()
            assert all_are([*seen, *gradients], 8)
            lender.become(9)
            gradients = graph.replay().gradients.values()
            mine.synchronize()
            assert all_are(gradients, 9)

    @pytest.mark.parametrize("is_waited_for_first", [False, True])
    @pytest.mark.parametrize("is_captured", [False, True])
    def test_has_its_destinations_written_after_its_own_work_and_reads_them_after_ours(
        self, device, lender, is_captured, is_waited_for_first
    ):
        engine, mine, (gradients, seen) = new_engine(device), stream_of(device), given(device, 2, 0)
        with mine, engine.capture() if is_captured else contextlib.nullcontext() as graph:
            lender.become(8)
            engine.add(gradients)
            engine.step(out=lender.pointers)
        with mine:
            if is_captured:
                lender.become(9)
                graph.replay()
        if is_waited_for_first:
            lender.copied_to(seen)
            lender.stream.synchronize()
            assert all_are(seen, 2)
        mine.synchronize()
        lender.stream.synchronize()
        assert all_are(lender.arrays, 2)


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

    @pytest.mark.parametrize(("what", "is_replay"), [*((look, False) for look in LOOKS), *REPLAY_LOOKS])
    @pytest.mark.parametrize("is_bad", [True, False], ids=["missed", "invented"])
    def test_at_a_step(self, device, elsewhere, what, is_bad, is_replay):
        engine, (gradients, others) = new_engine(device), given(device, *((1, math.nan) if is_bad else (math.nan, 1)))
        with engine.capture() if is_replay else contextlib.nullcontext() as graph:
            engine.add(gradients)
            engine.step()
        if is_replay:
            graph.replay()
        with contextlib.suppress(NonFiniteGradient):
            engine.check()
        synchronize(device)
        stream = stream_on(device)
        with device.kernels.device.on(stream):
            copy_all(device, stream, gradients, others)
            result = graph.replay() if is_replay else (engine.add(gradients), engine.step())[1]
        assert elsewhere(lambda: LOOKS[what](engine, result)) is is_bad

    def test_at_a_clip_state(self, device, elsewhere):
        state, (before, gradients) = FusedClipState([5000, 7], device.kernels), given(device, 1, 2)
        clip_gradients_fused(before, 1.0, state)
        synchronize(device)
        clip_gradients_fused(gradients, 1.0, state, stream=stream_on(device))
        assert elsewhere(lambda: [float(state.norm), float(state.scale)]) == pytest.approx([2 * NORM, 0.5 / NORM])

    @pytest.mark.usefixtures("lazy")
    @pytest.mark.parametrize("current", [stream_of, lambda device: current_there(device, stream_on(device))])
    def test_at_the_norm_of_a_clip_while_another_stream_or_device_is_current(self, device, current):
        before, gradients = given(device, 1, 2)
        with named_cuda(device):
            clip_by_global_norm(before, 1.0)
        synchronize(device)
        with named_cuda(device), current(device):
            norm = clip_by_global_norm(gradients, 1.0)
            assert norm.device.id == device.kernels.ordinal
            assert float(norm) == pytest.approx(2 * NORM)

    @pytest.mark.parametrize("is_block", [False, True])
    @pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
    def test_at_an_accumulator_or_a_block(self, device, elsewhere, values, is_block):
        sums, (before, now) = GpuGradientAccumulator(LAYOUT, device.kernels), given(device, *values)
        sums.add(before)
        sums.has_non_finite()
        sums.zero_all()
        synchronize(device)
        with device.kernels.device.on(stream_on(device)):
            sums.add(now)
            block = sums.block(0)
        assert elsewhere((block if is_block else sums).has_non_finite) is math.isnan(values[1])

    @pytest.mark.parametrize("look", [lambda block: block.flatten(), lambda block: block.components["w"]])
    def test_at_the_memory_of_a_block(self, device, elsewhere, look):
        sums, gradients = GpuGradientAccumulator(LAYOUT, device.kernels), given(device, 3)
        with device.kernels.device.on(stream_on(device)):
            sums.add(gradients)
            block = sums.block(0)
        assert (elsewhere(lambda: look(block).get())[:5000] == 3).all()

    def test_late_while_the_next_step_is_on_another_stream(self, device):
        """The verdict that is sent to the host is that of its step: the next one may not write it before."""
        engine, readback = new_engine(device, on_non_finite="skip"), []
        good, bad = given(device, 1, math.nan)
        first, second = stream_on(device), stream_on(device)
        with device.kernels.device.on(first):
            engine.add(bad)
            engine.step()
        with device.kernels.device.on(second), pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._late, "send", lambda: readback.append("not sent"))
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
        """Not one that was made on it, either; which leaves nothing behind."""
        engines, gradients = [], given(device, 3)
        work(lambda: engines.append(new_engine(device)))
        for _ in range(3):
            work(lambda: (engines[0].add(gradients), engines[0].step()))
            if waits:
                synchronize(device)
        engines[0].add(gradients)
        result = engines[0].step()
        assert float(result.norm) == pytest.approx(3 * NORM)
        assert (on_host(result.gradients["head"]) == 3).all()
        del result
        engines.clear()
        gc.collect()
        synchronize(device)
        device.kernels.device.allocate(1)
        assert not device.kernels.device.kept

    def test_another_that_has_its_handle_waits_all_the_same(self):
        """As one of CuPy's own is known by its object, not by its handle."""
        device = StubDevice()
        order, first, second = StreamOrder(device), StubStream(7), StubStream(7)
        for stream, waits in ((first, 1), (first, 1), (second, 1), (first, 2)):
            device.stream = stream
            with order.use():
                assert len(stream.waited) == waits


class StubStream:
    """A stream that notes what it is asked."""

    def __init__(self, ptr):
        self.ptr, self.waited = ptr, []

    def record(self, event):
        return event

    def wait_event(self, event):
        self.waited.append(event)


class StubDevice:
    """A device whose current stream the test says."""

    def __init__(self):
        self.stream, self.active, self.event = StubStream(0), contextlib.nullcontext, object

    def captures(self, _):
        return False

    def current_stream(self):
        return self.stream


def test_a_threads_own_default_stream_is_refused(device):
    """Its one handle is another stream in each thread. The window goes on afterwards."""
    engine, gradients = new_engine(device), given(device, 1)
    engine.add(gradients)
    with device.kernels.device.active(), device.kernels.xp.cuda.Stream.ptds:
        for call in (lambda: engine.add(gradients), engine.step, lambda: new_engine(device)):
            with pytest.raises(CallerError, match="CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"):
                call()
    assert float(engine.step().norm) == pytest.approx(NORM)


def an_engine(device, out, gradients):
    engine = new_engine(device)
    engine.add(gradients)
    return lambda: engine.step(out=out)


def an_accumulator(device, out, gradients):
    sums = GpuGradientAccumulator(LAYOUT, device.kernels)
    sums.add(gradients)
    return lambda: (sums.copy_block_to(0, out[:1]), sums.copy_non_block_to("head", out[1]))


def a_clip_state(device, out, _):
    state = FusedClipState([5000, 7], device.kernels)
    return lambda: clip_gradients_fused(out, 1.0, state)


class TestDropped:
    """Nothing is freed while work may still use it: on a stream that is not the one the memory came from."""

    @pytest.mark.parametrize("is_gone", [False, True], ids=["a stream", "a stream that is gone"])
    @pytest.mark.parametrize("make", [an_engine, an_accumulator, a_clip_state])
    def test_what_worked_on_another_stream(self, device, make, is_gone):
        out, gradients = given(device, 3, 4)
        work, stream = make(device, out, gradients), stream_on(device)
        synchronize(device)
        with device.kernels.device.on(stream.ptr if is_gone else stream):
            work()
        if is_gone:
            del stream
        with taken_by_others(device):
            del work
        synchronize(device)
        for array in out:
            assert on_host(array) == pytest.approx(1 / NORM if make is a_clip_state else 4, rel=1e-6)

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
        (first, last), stream = given(device, 4, 2), stream_on(device)
        state = FusedClipState([5000, 7], device.kernels)
        synchronize(device)
        clip_gradients_fused(first, 1.0, state, stream=stream)
        clip_gradients_fused(last, 1.0, state)
        with taken_by_others(device, stream):
            del state
        synchronize(device)
        for array in (*first, *last):
            assert on_host(array) == pytest.approx(1 / NORM, rel=1e-6)

    @pytest.mark.usefixtures("lazy")
    @pytest.mark.parametrize("is_read_elsewhere", [False, True])
    def test_a_table(self, device, monkeypatch, is_read_elsewhere):
        """Destinations that move make a table each; those that are forgotten may still be read, by another stream."""
        kernels, stream = device.kernels, stream_on(device)
        monkeypatch.setattr(kernels._launches, "_table_of", functools.lru_cache(1)(kernels._launches._made))
        sources = [device.buffer(np.full(3000 + number, 8, np.float32)) for number in range(12)]
        synchronize(device)
        makes, reads = (None, stream) if is_read_elsewhere else (stream, None)
        for source in sources:
            with kernels.device.on(makes):
                kernels._launches.table(entries_of(0, [source.size]), chunk_for(source.size))
            with kernels.device.on(reads):
                kernels.scale([source], np.float32(0.5), [source])
            with taken_by_others(device, *([] if is_read_elsewhere else [stream])), kernels.device.on(makes):
                kernels._launches.table(entries_of(0, [1]), 2048)
        synchronize(device)
        assert all((device.get(source).view(np.float32) == 4).all() for source in sources)


class TestCapture:
    def test_work_on_another_stream_is_refused(self, device):
        engine, gradients = new_engine(device), given(device, 1)
        with engine.capture() as graph:
            with stream_of(device), pytest.raises(CallerError, match="captured stream"):
                engine.add(gradients)
            engine.add(gradients)
            engine.step()
        assert float(graph.replay().norm) == pytest.approx(NORM)

    def test_another_engine_and_a_replay_are_refused_and_go_on_afterwards(self, device):
        """What would tell the host of its step was an event of the other graph, which is never done."""
        captured, other, gradients = new_engine(device), new_engine(device), given(device, 1)
        with other.capture() as graph:
            other.add(gradients)
            other.step()
        with captured.capture():
            for refused in (lambda: other.add(gradients), graph.replay, lambda: other.capture().__enter__()):
                with pytest.raises(CallerError, match="did not begin"):
                    refused()
            captured.add(gradients)
            captured.step()
        assert graph.replay().step == 0
        other.check()
        other.add(gradients)
        assert float(other.step().norm) == pytest.approx(NORM)

    def test_a_deferred_step_leaves_one_factor(self):
        engine = GradientEngine(LAYOUT, max_norm=None, groups="component")
        engine.add(ones())
        with pytest.raises(CallerError, match="one factor"):
            engine.step(deferred=True)
        engine.step()


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_verdict_is_of_the_step_that_the_engine_counts(device):
    """Also behind a step that was interrupted after K2."""
    engine, (good, bad) = new_engine(device), given(device, 1, np.nan)
    engine.add(good)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(device.kernels), "hand_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.discard()
    engine.add(bad)
    result = engine.step()
    with pytest.raises(NonFiniteGradient) as caught:
        result.check()
    assert caught.value.step == result.step


def test_a_component_without_a_gradient_in_a_later_micro_batch_costs_no_pass(emulated):
    engine, gradients = new_engine(emulated), given(emulated, 1)
    for _ in range(2):
        with cuda_emulator.recorded() as record:
            engine.add(gradients)
            engine.add([None, gradients[1]])
            result = engine.step()
    assert record.launches == ["accumulate_1_small"] * 2 + ["finalise", "hand_back_small"]
    assert float(result.norm) == pytest.approx(np.sqrt(5000 / 4 + 7))


@pytest.mark.parametrize("components", [50, 490])
def test_engines_in_two_threads_do_not_disturb_each_other(emulated, components, monkeypatch):
    """With more addresses than a launch carries they share the memory that these are copied to."""
    monkeypatch.setitem(launch.CAPACITIES, "large", 480)
    layout, start = GradientLayout.of([(3,)] * components), threading.Barrier(2)

    def work(exchange):
        engine = GradientEngine(layout, emulated.kernels, max_norm=None)
        gradient = emulated.put(np.full(3, 1 + exchange.rank, np.float32))
        start.wait(200)
        engine.add([gradient] * components)
        return all_are(list(engine.step().gradients.values())[:: components // 5], 1 + exchange.rank)

    assert on_ranks(work, 2) == [True] * 2
