"""Asking the driver harms nobody: no capture is voided, no error is taken for "not yet", no memory piles up."""

import gc
import threading
import weakref

import numpy as np
import pytest
from devices import put_all, synchronize

from gradengine import GradientEngine, GradientLayout
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


class TestACaptureOfSomebodyElse:
    """In global mode whoever asks whether an event is done voids it, in whatever thread."""

    def test_is_not_voided_by_a_step_in_another_thread(self, device, engine, gradients):
        step(engine, gradients)
        device.kernels.device.kept.until([device.kernels.device.record()], "asked about by each add")
        verdicts = []

        def other():
            step(engine, gradients)
            verdicts.append(engine.latest_verdict)

        stream, thread = capturing_globally(device), threading.Thread(target=other)
        thread.start()
        thread.join(60)
        stream.end_capture()  # an error where it is void
        assert len(verdicts) == 1

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

    def test_waiting_for_what_is_kept_voids_none(self, device):
        kept = device.kernels.device.kept
        kept.until([device.kernels.device.record()], "memory")
        stream = capturing_globally(device)
        kept.wait()
        stream.end_capture()
        assert not kept

    def test_the_thread_is_as_it_was_afterwards(self, device):
        """Its next question voids one again, where that is its own."""
        asked, event = device.kernels.device.events, device.kernels.device.record()
        asked.wait(event)
        assert asked.is_done(event)
        stream = capturing_globally(device)
        assert not event.done
        with pytest.raises(device.xp.cuda.runtime.CUDARuntimeError, match="Invalidated"):
            stream.end_capture()


class TestADeviceThatFailed:
    """After an illegal address, whoever's, the driver answers each question with that error: no work is ever done."""

    MESSAGE = "work on the GPU ended in an error.*: got cudaErrorIllegalAddress.*; start this process again"

    @pytest.fixture
    def failed(self, device, engine, gradients, monkeypatch):
        step(engine, gradients)
        monkeypatch.setattr(device.kernels.xp.cuda.runtime, "eventQuery", lambda _: 700)
        return engine

    @pytest.mark.parametrize("call", ["latest_verdict", "add"])
    def test_is_told_by_the_next_that_asks(self, failed, gradients, call):
        with pytest.raises(DeviceFailed, match=self.MESSAGE):
            failed.latest_verdict if call == "latest_verdict" else step(failed, gradients)

    def test_memory_that_it_may_still_use_is_kept(self, device, failed):
        kept = device.kernels.device.kept
        kept.wait()
        kept.until([device.kernels.device.record()], "memory")
        with pytest.raises(DeviceFailed, match=self.MESSAGE):
            kept.let_go()
        assert len(kept) == 1
        kept.wait()

    def test_copies_that_were_begun_are_not_forgotten(self, device, failed):
        memory = device.kernels.device.allocate(8)
        parts = device.kernels.device.in_parts(memory)
        (row,) = parts.rows(1, 8)
        parts.note("now")
        parts.copy("name", row, 0, is_to_arena=True, behind="now")
        with pytest.raises(DeviceFailed, match=self.MESSAGE):
            parts.poll()
        assert parts.poll(waits=True) == ["name"]
