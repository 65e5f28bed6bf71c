"""What CuPy does, and its stand-in for tests does alike: run on the stand-in, and in `make real-cupy` on CuPy."""

import contextlib
import threading

import numpy as np
import pytest
from devices import on_host, synchronize

from gradengine.kernels.events import Events


def capturing(device):
    stream = device.xp.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    return stream


def test_asking_whether_a_capturing_stream_is_done_is_answered_and_voids_the_capture(device):
    stream = capturing(device)
    assert stream.done is False
    with pytest.raises(device.xp.cuda.runtime.CUDARuntimeError, match="StreamCaptureInvalidated"):
        stream.end_capture()


def test_asking_whether_a_captured_event_is_done_likewise(device):
    stream = capturing(device)
    event = stream.record()
    assert event.done is False
    with pytest.raises(device.xp.cuda.runtime.CUDARuntimeError, match="StreamCaptureInvalidated"):
        stream.end_capture()


@pytest.mark.parametrize("call", ["eventQuery", "eventSynchronize"])
@pytest.mark.parametrize(
    ("mode", "thread", "is_void"),
    [
        ("Global", "another", True),
        ("Global", "own", True),
        ("ThreadLocal", "another", False),
        ("ThreadLocal", "own", True),
        ("Relaxed", "own", False),
        ("Global", "another, relaxed", False),
        ("Global", "own, relaxed", False),
    ],
)
def test_asking_for_an_event_voids_a_capture_by_its_mode_and_the_threads(device, call, mode, thread, is_void):
    """Whatever it is of: the driver only knows that who asks might wait."""
    runtime, event, answers = device.xp.cuda.runtime, device.kernels.device.record(), []
    stream, events = device.xp.cuda.Stream(non_blocking=True), Events(device.kernels.xp)
    synchronize(device)

    def ask():
        try:
            answers.append(getattr(runtime, call)(event.ptr) or 0)
        except runtime.CUDARuntimeError as refused:
            answers.append(refused.status)

    stream.begin_capture(getattr(runtime, f"streamCaptureMode{mode}"))
    how = (events.relaxed, (ask,)) if "relaxed" in thread else (ask, ())
    if thread.startswith("own"):
        how[0](*how[1])
    else:
        asking = threading.Thread(target=how[0], args=how[1])
        asking.start()
        asking.join(60)
    with pytest.raises(runtime.CUDARuntimeError, match="Invalidated") if is_void else contextlib.nullcontext():
        stream.end_capture()
    assert len(answers) == 1
    assert (900 in answers) == is_void


def test_waiting_for_a_capturing_stream_is_refused_and_voids_the_capture(device):
    stream = capturing(device)
    with pytest.raises(device.xp.cuda.runtime.CUDARuntimeError, match="StreamCaptureUnsupported"):
        stream.synchronize()
    with pytest.raises(device.xp.cuda.runtime.CUDARuntimeError, match="StreamCaptureInvalidated"):
        stream.end_capture()


@pytest.mark.parametrize(("values", "error"), [(np.ones(7, np.float64), TypeError), (np.ones(8, "f4"), ValueError)])
def test_an_array_is_set_from_one_like_it_alone(device, values, error):
    array = device.put(np.ones(7, np.float32))
    with pytest.raises(error):
        array.set(values)
    assert (on_host(array) == 1).all()


def test_fresh_memory_of_the_device_is_known_to_the_driver_to_its_last_byte(device):
    runtime, array = device.xp.cuda.runtime, device.put(np.ones(7, np.float32))
    found = runtime.pointerGetAttributes(array.data.ptr + array.nbytes - 1)
    assert (found.type, found.device) == (runtime.memoryTypeDevice, device.kernels.ordinal)


def test_a_stream_that_is_gone_takes_nothing(device):
    xp, array = device.xp, device.put(np.ones(7, np.float32))
    handle = xp.cuda.Stream(non_blocking=True).ptr
    synchronize(device)
    with pytest.raises(xp.cuda.runtime.CUDARuntimeError, match="InvalidResourceHandle"):
        xp.cuda.runtime.memsetAsync(array.data.ptr, 0, array.nbytes, handle)


def test_a_stream_in_use_is_current_until_the_next_with_ends(device):
    """So a `with` around it, in place of `use`, is what keeps a stream current while others come and go."""
    with device.active():
        cuda = device.xp.cuda
        before, outer, used, inner = cuda.get_current_stream(), cuda.Stream(), cuda.Stream(), cuda.Stream()
        with outer:
            used.use()
            assert cuda.get_current_stream().ptr == used.ptr
            with inner:
                assert cuda.get_current_stream().ptr == inner.ptr
            assert cuda.get_current_stream().ptr == outer.ptr
        assert cuda.get_current_stream().ptr == before.ptr
