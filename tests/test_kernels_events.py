"""Asking the driver harms nobody: no capture is voided, no error is taken for "not yet", no memory piles up."""

import gc
import itertools
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from devices import put_all, synchronize
from ranks import on_ranks

from gradengine import FusedClipState, GradientEngine, GradientLayout, clip_by_global_norm, clip_gradients_fused
from gradengine.errors import DeviceFailed

LAYOUT = GradientLayout.of({"layers.0.w": (5000,), "head": (7,)})


@pytest.fixture
def gradients(device):
    return put_all(device, [np.ones(slot.shape, np.float32) for slot in LAYOUT.slots])


@pytest.fixture
def engine(device, gradients):
    return new_engine(device, gradients)


def new_engine(device, gradients):
    """After a few steps, so that nothing more is allocated or compiled."""
    made = GradientEngine(LAYOUT, device.kernels, max_norm=1.0)
    for _ in range(3):
        step(made, gradients)
    synchronize(device)
    return made


def step(engine, gradients):
    engine.add(gradients)
    return engine.step()


def capturing_globally(device):
    """A stream of somebody's, which captures as torch's do by default."""
    stream = device.xp.cuda.Stream(non_blocking=True)
    stream.begin_capture(device.xp.cuda.runtime.streamCaptureModeGlobal)
    return stream


@pytest.fixture
def pinned_by_the_driver(monkeypatch):
    """More than a kilobyte is; else a megabyte."""
    monkeypatch.setattr("gradengine.kernels.cuda_runtime._POOLED", 1000)


def raised(call):
    """The `DeviceFailed` of a call; None if it raises nothing."""
    try:
        call()
    except DeviceFailed as error:
        return error
    return None


class Ready:
    """What the calls beside a capture are made with; all of it exists before the capture begins."""

    def __init__(self, device):
        self.device = device
        self.gradients, self.out = self.arrays(LAYOUT), self.arrays(LAYOUT)
        self.engine, self.other = (new_engine(device, self.gradients) for _ in range(2))
        self.result, self.state = step(self.engine, self.gradients), self.engine.state_dict()
        self.graph = captured(self.engine, self.gradients)
        self.clip = FusedClipState([slot.size for slot in LAYOUT.slots], device.kernels)

    def arrays(self, layout):
        return put_all(self.device, [np.ones(slot.shape, np.float32) for slot in layout.slots])

    def of_other_sizes(self, sizes, **options):
        """An engine of tensors of these sizes, and four micro-batches; no step was made."""
        layout = GradientLayout.of([(size,) for size in sizes])
        return GradientEngine(layout, self.device.kernels, **options), [self.arrays(layout) for _ in range(4)]


def captured(engine, gradients):
    with engine.capture() as graph:
        step(engine, gradients)
    return graph


def by_component(engine, gradients):
    with engine.micro_batch() as micro_batch:
        micro_batch.add("head", gradients[1])
    engine.step()


def with_another(call, *sizes, **options):
    """A call with an engine of other sizes and its micro-batches, which are made before the capture."""

    def ready(on):
        made = on.of_other_sizes(sizes, **options)
        return lambda: call(*made)

    return ready


def held(engine, micro_batches):
    """Two steps of 6,000 addresses, more than travel with a launch."""
    for _ in range(2):
        for gradients in micro_batches:
            engine.add(gradients)
        engine.step()


def loaded(engine, micro_batches):
    """A large window through pinned memory, which the add behind it drops."""
    engine.add(micro_batches[0])
    saved = engine.state_dict()
    engine.discard()
    engine.load_state_dict(saved)
    engine.check()
    engine.add(micro_batches[1])


def clipped_in_a_new_thread(on):
    with ThreadPoolExecutor(1) as fresh:
        return [fresh.submit(clip_by_global_norm, on.gradients, 1.0).result() for _ in range(2)]


def end(on):
    """Drop a graph whose replays are over: the next call that frees memory frees the graph."""
    del on.graph
    gc.collect()


def exchanged(on):
    """Two ranks, whose spans go through pinned memory."""
    layout = GradientLayout.of([(300,)])
    gradients = on.arrays(layout)

    def one(exchange):
        return step(GradientEngine(layout, on.device.kernels, exchange=exchange), gradients).micro_batches

    return lambda: on_ranks(one, 2) == [2, 2] or pytest.fail("a rank failed")


#: Calls of ours by name: what makes each ready, with a `Ready`, and returns it.
CALLS = {
    "add, step": lambda on: lambda: [step(on.engine, on.gradients) for _ in range(2)],
    "add_block": lambda on: lambda: on.engine.add_block(0, on.gradients[:1]),
    "add_non_block": lambda on: lambda: on.engine.add_non_block("head", on.gradients[1]),
    "micro_batch": lambda on: lambda: by_component(on.engine, on.gradients),
    "step(out)": lambda on: lambda: (on.engine.add(on.gradients), on.engine.step(on.out)),
    "deferred": lambda on: lambda: (on.engine.add(on.gradients), on.engine.step(deferred=True).factor),
    "verdict": lambda on: lambda: on.engine.latest_verdict,
    "result.check": lambda on: on.result.check,
    "engine.check": lambda on: on.engine.check,
    "non_finite": lambda on: lambda: on.result.non_finite,
    "has_non_finite": lambda on: on.engine.accumulator.has_non_finite,
    "result": lambda on: lambda: (on.result.gradients, on.result.norm, on.result.metrics(blocks=True)),
    "state_dict": lambda on: lambda: (on.engine.add(on.gradients), on.engine.state_dict()),
    "load_state_dict": lambda on: lambda: on.other.load_state_dict(on.state),
    "discard": lambda on: lambda: (on.engine.add(on.gradients), on.engine.discard()),
    "capture": lambda on: lambda: captured(on.engine, on.gradients),
    "replay": lambda on: lambda: [on.graph.replay() for _ in range(2)],
    "clip": lambda on: lambda: clip_gradients_fused(on.gradients, 1.0, on.clip),
    "clip_by_global_norm": lambda on: lambda: clip_by_global_norm(on.gradients, 1.0),
    "clip in a new thread": lambda on: lambda: clipped_in_a_new_thread(on),
    "addresses by memory": with_another(held, *[8] * 1500, hold=4),
    "large pinned memory": with_another(loaded, 300),
    "exchange": exchanged,
    "another engine": lambda on: lambda: GradientEngine(LAYOUT, on.device.kernels),
    "the end of a graph": lambda on: lambda: (end(on), [step(on.engine, on.gradients) for _ in range(2)]),
    "drop": lambda on: lambda: (on.__dict__.clear(), gc.collect()),
}


class TestACaptureOfSomebodyElse:
    """In global mode whoever asks whether an event is done voids it, in whatever thread."""

    @pytest.mark.usefixtures("pinned_by_the_driver")
    @pytest.mark.parametrize("call", CALLS)
    def test_is_not_voided_by_a_call_in_another_thread(self, device, call):
        ready = CALLS[call](Ready(device))
        device.kernels.device.kept.until([device.kernels.device.record()], "asked about by each add")
        with ThreadPoolExecutor(1) as other:
            stream = other.submit(capturing_globally, device).result()
            ready()
            other.submit(stream.end_capture).result()  # an error where it is void

    def test_is_not_voided_by_a_collection_amid_it(self, device, gradients, monkeypatch):
        """Of an engine that was used on another stream than its memory came from, with a graph: nobody is asked."""
        kept, asked, engine = device.kernels.device.kept, [], new_engine(device, gradients)
        with device.xp.cuda.Stream(non_blocking=True):
            step(engine, gradients)
            with engine.capture() as graph:
                step(engine, gradients)
            graph.replay()
        synchronize(device)
        kept.wait()
        cycle = [engine, graph]
        cycle.append(cycle)
        alive = weakref.ref(engine)
        stream = capturing_globally(device)
        monkeypatch.setattr(device.kernels.device.events, "is_done", asked.append)
        del engine, graph, cycle
        gc.collect()
        stream.end_capture()
        assert (alive(), asked) == (None, [])
        assert len(kept) > 2  # sums, graph and statuses, until the next call asks

    def test_the_thread_is_as_it_was_afterwards(self, device):
        """Its next question voids one again, where that is its own."""
        asked, event = device.kernels.device.events, device.kernels.device.record()
        asked.wait(event)
        assert asked.is_done(event)
        stream = capturing_globally(device)
        assert not event.done
        with pytest.raises(device.xp.cuda.runtime.CUDARuntimeError, match="Invalidated"):
            stream.end_capture()


#: Calls that no error of the device ends, or whose engine is another one.
OTHERS = {"drop", "the end of a graph", "exchange", "addresses by memory"}


class TestADeviceThatFailed:
    """After an error, whoever's, the driver answers each call with it, and each call of ours with `DeviceFailed`."""

    MESSAGE = "work on the GPU ended in an error.*: got cudaErrorIllegalAddress.*; start this process again"

    @pytest.mark.usefixtures("pinned_by_the_driver")
    @pytest.mark.parametrize("call", sorted(CALLS.keys() - OTHERS))
    def test_is_told_by_each_call_wherever_the_driver_says_so(self, emulated, call):
        """By whichever of the call's questions it is: a launch, a copy, a wait, the place of a stream."""
        from real_cupy.loaded import lost

        on = Ready(emulated)
        for after in itertools.count():
            ready = CALLS[call](on)
            with lost(0, 700, after) as is_told:
                error = raised(ready)
                if error is None:
                    assert not is_told()
                    break
                assert re.search(self.MESSAGE, str(error))
                self.assert_told_again(on)
            on.engine.discard(), on.other.discard()
        assert after

    def assert_told_again(self, on):
        """By whatever is called next; no call is said to have been interrupted, and nothing is dropped."""
        engine = on.engine
        calls = [engine.discard, engine.check, engine.step, on.graph.replay, engine.state_dict, on.result.check]
        others = [lambda: engine.add(on.gradients), lambda: engine.latest_verdict, engine.accumulator.zero_all]
        assert [call for call in (*calls, *others) if raised(call) is None] == []

    def test_whatever_it_failed_by(self, emulated):
        from real_cupy.loaded import lost

        clip, gradients = FusedClipState([1], emulated.kernels), [emulated.put(np.ones(1, np.float32))]
        for status in (214, 220, 226, 700, 702, 710, *range(714, 720), 400, 901):
            error = DeviceFailed if status not in {400, 901} else emulated.xp.cuda.runtime.CUDARuntimeError
            with lost(0, status), pytest.raises(error):
                clip_gradients_fused(gradients, 1.0, clip)

    def test_memory_that_it_may_still_use_is_kept(self, emulated):
        from real_cupy.loaded import lost

        kept = emulated.kernels.device.kept
        kept.wait()
        kept.until([emulated.kernels.device.record()], "memory")
        with lost(0, 700), pytest.raises(DeviceFailed, match=self.MESSAGE):
            kept.let_go()
        assert len(kept) == 1
        kept.wait()

    def test_copies_that_were_begun_are_not_forgotten(self, emulated):
        from real_cupy.loaded import lost

        memory = emulated.kernels.device.allocate(8)
        parts = emulated.kernels.device.in_parts(memory)
        (row,) = parts.rows(1, 8)
        parts.note("now")
        parts.copy("name", row, 0, is_to_arena=True, behind="now")
        with lost(0, 700), pytest.raises(DeviceFailed, match=self.MESSAGE):
            parts.poll()
        assert parts.poll(waits=True) == ["name"]
