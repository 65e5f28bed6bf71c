"""Which of the driver's calls another thread's graph capture allows: the question `rules-of-capture` of gpu_settle.py.

CUDA's text calls some functions unsafe during a capture and names one of them. Ours makes each of those below while
somebody may record a graph, and tests/real_cupy/driver/capture.cpp has to answer as the driver does.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from gradengine.kernels.events import Events

SIZE = 4096  # bytes
CODE = 'extern "C" __global__ void {}(float* x) {{ x[0] = 1; }}'
FINE, VOID = "fine", "voids the capture"
MODES = "default", "relaxed"


class Broken(Exception):
    """The probe itself does not work, so that its answers mean nothing."""


class Probe(NamedTuple):
    """A call of the driver.

    Attributes:
        make: Prepares it before the capture begins, given CuPy and a name that no probe has; the call itself.
        is_blocking: Whether the stream that is captured is one for which the default stream waits.
    """

    make: Callable[[Any, str], Callable[[], object]]
    is_blocking: bool = False


def _of_a_stream(call: Callable[[Any, Any, Any], object]) -> Probe:
    """A call on a stream that is not captured, given an event that is done."""

    def make(xp: Any, _: str) -> Callable[[], object]:
        stream = xp.cuda.Stream(non_blocking=True)
        event = stream.record()
        event.synchronize()
        return lambda: call(xp.cuda.runtime, stream, event)

    return Probe(make)


def _query(runtime: Any, _: Any, event: Any) -> None:
    if status := runtime.eventQuery(event.ptr):  # CuPy raises nothing here
        raise runtime.CUDARuntimeError(status)


def _of_memory(allocate: Callable[[Any], int], free: Callable[[Any, int], object]) -> Probe:
    def make(xp: Any, _: str) -> Callable[[], object]:
        pointer = allocate(xp.cuda.runtime)
        return lambda: free(xp.cuda.runtime, pointer)

    return Probe(make)


def _copy(*, is_pinned: bool, to_host: bool) -> Probe:
    def make(xp: Any, _: str) -> Callable[[], object]:
        runtime, stream, there = xp.cuda.runtime, xp.cuda.Stream(non_blocking=True), xp.zeros(SIZE, np.uint8)
        here = np.frombuffer(xp.cuda.alloc_pinned_memory(SIZE), np.uint8, SIZE) if is_pinned else np.zeros(SIZE, "u1")
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        ends = (here.ctypes.data, there.data.ptr) if to_host else (there.data.ptr, here.ctypes.data)

        def copy() -> object:
            runtime.memcpyAsync(*ends, SIZE, kind, stream.ptr)
            return here, there

        return copy

    return Probe(make)


def _graph(call: Callable[[Any, int, Any], object]) -> Probe:
    def make(xp: Any, _: str) -> Callable[[], object]:
        runtime, stream, array = xp.cuda.runtime, xp.cuda.Stream(non_blocking=True), xp.zeros(SIZE, np.uint8)
        stream.begin_capture(runtime.streamCaptureModeRelaxed)
        runtime.memsetAsync(array.data.ptr, 1, SIZE, stream.ptr)
        recorded = runtime.streamEndCapture(stream.ptr)
        graph = runtime.graphInstantiate(recorded)
        return lambda: (call(runtime, graph, stream), array)

    return Probe(make)


def _recorded(xp: Any, _: str) -> Callable[[], object]:
    """A graph that is recorded; the call makes it ready to run, as CuPy does at the end of a capture."""
    runtime, stream, array = xp.cuda.runtime, xp.cuda.Stream(non_blocking=True), xp.zeros(SIZE, np.uint8)
    stream.begin_capture(runtime.streamCaptureModeRelaxed)
    runtime.memsetAsync(array.data.ptr, 1, SIZE, stream.ptr)
    graph = runtime.streamEndCapture(stream.ptr)
    return lambda: (runtime.graphInstantiate(graph), array)


def _load(xp: Any, name: str) -> Callable[[], object]:
    return lambda: xp.RawModule(code=CODE.format(name)).compile()


def _launch(*, is_first: bool) -> Probe:
    def make(xp: Any, name: str) -> Callable[[], object]:
        stream, array = xp.cuda.Stream(non_blocking=True), xp.zeros(1, np.float32)
        kernel = xp.RawModule(code=CODE.format(name)).get_function(name)

        def launch() -> None:
            with stream:
                kernel((1,), (1,), (array,))

        if not is_first:
            launch()
        return launch

    return Probe(make)


def _default_stream(xp: Any, _: str) -> Callable[[], object]:
    return lambda: xp.cuda.runtime.streamIsCapturing(0)


def _new_stream(xp: Any, _: str) -> Callable[[], object]:
    return lambda: xp.cuda.runtime.streamCreateWithFlags(xp.cuda.runtime.streamNonBlocking)


def _old_stream(xp: Any, _: str) -> Callable[[], object]:
    handle = xp.cuda.runtime.streamCreateWithFlags(xp.cuda.runtime.streamNonBlocking)
    return lambda: xp.cuda.runtime.streamDestroy(handle)


PORTABLE = 1  # cudaHostAllocPortable
PROBES = {
    "eventRecord": _of_a_stream(lambda runtime, stream, event: runtime.eventRecord(event.ptr, stream.ptr)),
    "eventQuery": _of_a_stream(_query),
    "eventSynchronize": _of_a_stream(lambda runtime, _, event: runtime.eventSynchronize(event.ptr)),
    "streamWaitEvent": _of_a_stream(lambda runtime, stream, event: runtime.streamWaitEvent(stream.ptr, event.ptr)),
    "streamSynchronize": _of_a_stream(lambda runtime, stream, _: runtime.streamSynchronize(stream.ptr)),
    "streamCreate": Probe(_new_stream),
    "streamDestroy": Probe(_old_stream),
    "isCapturing of another stream": _of_a_stream(lambda runtime, stream, _: runtime.streamIsCapturing(stream.ptr)),
    "isCapturing of the default stream": Probe(_default_stream),
    "isCapturing of it beside a blocking one": Probe(_default_stream, is_blocking=True),
    "malloc": _of_memory(lambda _: 0, lambda runtime, _: runtime.malloc(SIZE)),
    "free": _of_memory(lambda runtime: runtime.malloc(SIZE), lambda runtime, pointer: runtime.free(pointer)),
    "hostAlloc": _of_memory(lambda _: 0, lambda runtime, _: runtime.hostAlloc(SIZE, PORTABLE)),
    "freeHost": _of_memory(
        lambda runtime: runtime.hostAlloc(SIZE, PORTABLE), lambda runtime, pointer: runtime.freeHost(pointer)
    ),
    "pointerGetAttributes": _of_memory(
        lambda runtime: runtime.malloc(SIZE), lambda runtime, pointer: runtime.pointerGetAttributes(pointer)
    ),
    "memGetInfo": _of_memory(lambda _: 0, lambda runtime, _: runtime.memGetInfo()),
    "memcpyAsync to the device, pageable": _copy(is_pinned=False, to_host=False),
    "memcpyAsync to the device, pinned": _copy(is_pinned=True, to_host=False),
    "memcpyAsync to the host, pageable": _copy(is_pinned=False, to_host=True),
    "memcpyAsync to the host, pinned": _copy(is_pinned=True, to_host=True),
    "module load": Probe(_load),
    "first launch": _launch(is_first=True),
    "later launch": _launch(is_first=False),
    "graphInstantiate": Probe(_recorded),
    "graphLaunch": _graph(lambda runtime, graph, stream: runtime.graphLaunch(graph, stream.ptr)),
    "graphExecDestroy": _graph(lambda runtime, graph, _: runtime.graphExecDestroy(graph)),
}


@contextmanager
def recorded(xp: Any, *, is_blocking: bool = False) -> Iterator[tuple[Any, list[str]]]:
    """A graph of this thread's, in the mode in which torch records: its stream; and why it is void at the end."""
    stream, scratch, why = xp.cuda.Stream(non_blocking=not is_blocking), xp.zeros(SIZE, np.uint8), []
    xp.cuda.runtime.deviceSynchronize()
    stream.begin_capture(xp.cuda.runtime.streamCaptureModeGlobal)
    try:
        xp.cuda.runtime.memsetAsync(scratch.data.ptr, 1, SIZE, stream.ptr)
        yield stream, why
    finally:
        try:
            stream.end_capture()
        except xp.cuda.runtime.CUDARuntimeError as fault:
            why.append(_name(fault))


def _name(fault: Exception) -> str:
    return str(fault).partition(":")[0]


def found(xp: Any, probe: Probe, mode: str, name: str) -> str:
    """What becomes of a call, and of the graph that another thread records meanwhile."""
    call, events, refused, broken = probe.make(xp, name), Events(xp, xp.cuda.Device().id), [], []
    is_ready, is_recorded = threading.Event(), threading.Event()

    def be_another_thread() -> None:
        try:
            xp.cuda.runtime.free(0)  # the thread's context is there before the capture begins
            is_ready.set()
            is_recorded.wait()
            events.relaxed(call) if mode == "relaxed" else call()
        except (xp.cuda.runtime.CUDARuntimeError, xp.cuda.driver.CUDADriverError) as fault:
            refused.append(f"refused ({_name(fault)})")
        except Exception as fault:  # noqa: BLE001  (no answer of the driver's: told by the thread that asks)
            broken.append(fault)
        finally:
            is_ready.set()

    thread = threading.Thread(target=be_another_thread, daemon=True)
    thread.start()
    is_ready.wait()
    with recorded(xp, is_blocking=probe.is_blocking) as (_, why):
        is_recorded.set()
        thread.join()
    xp.cuda.runtime.deviceSynchronize()  # what the call has queued reads memory that goes with it
    if broken:
        raise Broken(f"{name}: {type(broken[0]).__name__}: {broken[0]}") from broken[0]
    return ", ".join([*refused, *([VOID] if why else [])]) or FINE


def refuse_blind_probe(xp: Any) -> None:
    """Raise `Broken` unless a graph beside no call is whole, and one whose own stream is waited for is void."""
    with recorded(xp) as (_, why):
        pass
    if why:
        raise Broken(f"a graph is void though nobody made a call: {why[0]}")
    with recorded(xp) as (stream, why), suppress(xp.cuda.runtime.CUDARuntimeError):
        xp.cuda.runtime.streamSynchronize(stream.ptr)
    if not why:
        raise Broken("a graph is whole though its own stream was waited for")


def table(xp: Any) -> dict[str, dict[str, str]]:
    """What becomes of each call in each mode of the thread that makes it."""
    refuse_blind_probe(xp)
    return {
        name: {mode: found(xp, probe, mode, f"rule_{number}_{mode}") for mode in MODES}
        for number, (name, probe) in enumerate(PROBES.items())
    }


def lines(answers: dict[str, dict[str, str]]) -> list[str]:
    """A line for each call.

    >>> lines({"malloc": {"default": "refused (cudaError), voids the capture", "relaxed": "fine"}})
    ['malloc: refused (cudaError), voids the capture; relaxed: fine']
    >>> lines({"free": {"default": "fine", "relaxed": "fine"}})
    ['free: fine']
    """
    return [
        f"{name}: {modes['default']}" + ("" if set(modes.values()) == {FINE} else f"; relaxed: {modes['relaxed']}")
        for name, modes in answers.items()
    ]
