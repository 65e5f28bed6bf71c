"""CUDA graphs: work is recorded on a stream of its own, and replayed by one launch.

The addresses of gradients and destinations are in the graph, as arguments of its launches.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any, final

from gradengine.errors import CallerError
from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.device import Graph
from gradengine.kernels.streams import CurrentStream


@final
class CudaGraph(Graph):
    """A CUDA graph; while it is recorded, its stream is the current one."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self.kept = []
        self.graph: Any = None  # once the recording is over
        self._launched: Any = None  # an event behind the last run
        self._stream: Any = None
        self._on: CurrentStream | None = None
        self._has_begun = False

    def replay(self) -> None:
        """See `Graph.replay`; memory that the graph reads is kept alive until the run is over."""
        runtime = self._runtime
        with runtime.active():
            self.graph.launch()
            runtime.current_stream().record(self._launched)

    def __enter__(self) -> CudaGraph:
        if self._runtime.recorded is not None:
            raise CallerError(
                "another window is being captured on this device", do="capture one window at a time, in one thread"
            )
        try:
            self._runtime.recorded = self
            self._begin()
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
        try:
            self.graph = self._runtime.relaxed(self._stream.end_capture)
        except BaseException:
            self._abandon()
            raise
        self._close()
        self._launched = self._runtime.event()
        memory = self.kept, self.graph  # it outlives the last run
        weakref.finalize(self, self._runtime.kept.until, (self._launched,), memory).atexit = False

    def _begin(self) -> None:
        runtime = self._runtime
        with runtime.active():
            self._stream = runtime.xp.cuda.Stream(non_blocking=True)
        self._on = CurrentStream(runtime, self._stream)
        self._on.__enter__()
        self._has_begun = True  # ended in vain where it has not
        runtime.events.asked(self._stream.begin_capture)

    def _abandon(self) -> None:
        try:
            if self._has_begun:
                with suppress(Exception):  # it may say that the capture is void; why it is, the caller is told
                    self._runtime.relaxed(self._stream.end_capture)
                self._has_begun = False  # not where an interrupt came before: it is ended when this is called again
        finally:
            self._close()

    def _close(self) -> None:
        if self._on is not None:
            self._on.__exit__()
        if self._runtime.recorded is self:
            self._runtime.recorded = None
