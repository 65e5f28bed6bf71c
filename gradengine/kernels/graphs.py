"""CUDA graphs: work is recorded on a stream of its own, and replayed by one launch."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, final

from gradengine.errors import CallerError
from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.device import Graphs, Recorded
from gradengine.kernels.streams import CurrentStream


@final
class CudaGraphs(Graphs):
    """Graph capture on a GPU; one at a time."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime

    def recording(self) -> AbstractContextManager[Recorded]:
        """See `Graphs.recording`; on a stream of its own, ordered behind the current one."""
        return _Recording(self._runtime)

    def replay(self, recorded: Recorded) -> None:
        """See `Graphs.replay`; what the graph reads stays alive until that is done."""
        runtime = self._runtime
        with runtime.active():
            recorded.graph.launch()
            if runtime.is_capturing():
                runtime.keep(recorded)
            else:
                runtime.current_stream().record(recorded.launched)


@final
class _Recording(AbstractContextManager[Recorded]):
    """Work that is recorded, on a stream that is the current one meanwhile."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime, self._recorded = runtime, Recorded()
        self._stream: Any = None
        self._on: CurrentStream | None = None
        self._has_begun = False

    def __enter__(self) -> Recorded:
        if self._runtime.recorded is not None:
            raise CallerError(
                "another window is being captured on this device", do="one at a time, in one thread; capture it then"
            )
        try:
            self._runtime.recorded = self._recorded
            self._begin()
        except BaseException:
            self._abandon()
            raise
        return self._recorded

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            self._recorded.graph = self._stream.end_capture()
        except BaseException:
            self._abandon()
            raise
        self._close()
        recorded, runtime = self._recorded, self._runtime
        recorded.launched = runtime.event()
        memory = recorded.kept, recorded.graph  # it outlives the last run
        weakref.finalize(recorded, runtime.kept.dropped, (recorded.launched,), memory).atexit = False

    def _begin(self) -> None:
        runtime = self._runtime
        with runtime.active():
            self._stream = runtime.xp.cuda.Stream(non_blocking=True)
            self._stream.wait_event(runtime.current_stream().record())
        self._on = CurrentStream(runtime, self._stream)
        self._on.__enter__()
        self._has_begun = True  # ended in vain where it has not
        self._stream.begin_capture()

    def _abandon(self) -> None:
        try:
            if self._has_begun:
                with suppress(Exception):  # it may say that the capture is void; why it is, the caller is told
                    self._stream.end_capture()
                self._has_begun = False  # not where an interrupt came before: it is ended when this is called again
        finally:
            self._close()

    def _close(self) -> None:
        if self._on is not None:
            self._on.__exit__()
        if self._runtime.recorded is self._recorded:
            self._runtime.recorded = None
