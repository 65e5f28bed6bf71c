"""CUDA graphs, recorded on a separate stream and replayed by one launch.

The addresses of gradients and destinations are in the graph, as arguments of its launches.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, final

from gradengine.errors import CallerError
from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.device import Graph


@final
class CudaGraph(Graph):
    """A CUDA graph. While it is recorded, its stream is the current one."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime, self.kept = runtime, []
        self.graph: Any = None  # the graph after the recording
        self._launched = runtime.event()  # the event after the last run
        self._recording = ExitStack()

    def replay(self) -> None:
        """See `Graph.replay`. Memory that the graph reads is kept alive until the run is over."""
        runtime = self._runtime
        with runtime.active():
            self.graph.launch()
            runtime.current_stream().record(self._launched)

    def __enter__(self) -> CudaGraph:
        runtime, recording = self._runtime, self._recording
        if runtime.recorded is not None:
            raise CallerError(
                "another window is being captured on this device", do="capture one window at a time, in one thread"
            )
        try:
            recording.callback(setattr, runtime, "recorded", None)
            runtime.recorded = self
            recording.enter_context(runtime.active())
            stream = recording.enter_context(runtime.xp.cuda.Stream(non_blocking=True))
            recording.callback(self._end, stream)
            with runtime.events:
                stream.begin_capture()
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        self._recording.close()
        memory = self.kept, self.graph  # it outlives the last run
        weakref.finalize(self, self._runtime.kept.until, (self._launched,), memory).atexit = False

    def _end(self, stream: Any) -> None:
        self.graph = self._runtime.relaxed(stream.end_capture)

    def _abandon(self) -> None:
        with suppress(Exception):  # The capture may be void or not begun. The caller gets the first error.
            self._recording.close()
