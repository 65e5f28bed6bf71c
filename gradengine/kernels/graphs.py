"""CUDA graphs: work is recorded on a stream of its own, and replayed by one launch.

The addresses of gradients and destinations are in device memory, so that other arrays cost one small copy (8 KB for
four micro-batches of 218 components), and no new recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from gradengine.errors import CallerError
from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.device import Graph
from gradengine.kernels.operands import Contribution, Destinations, FoldPass, addresses_of
from gradengine.kernels.streams import CurrentStream

_BLOCK = 8192  # addresses, 64 KB: four micro-batches of 1,600 components, and where they are handed back to


class _Place(NamedTuple):
    """One launch's addresses."""

    there: Any  # on the device
    here: npt.NDArray[np.uint64]  # as the host will send them


class _Block:
    """Addresses on the device that one copy brings there."""

    def __init__(self, there: Any, here: npt.NDArray[np.uint64]) -> None:
        self.there, self.here, self.used = there, here, 0

    @property
    def room(self) -> int:
        """How many more it takes."""
        return self.here.size - self.used


@final
class CudaGraph(Graph):
    """A CUDA graph; while it is recorded, its stream is the current one."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self.kept, self.lent = [], []
        self._blocks: list[_Block] = []
        self._folds: list[tuple[FoldPass, int, list[_Place]]] = []  # and in how many rows each launch has its addresses
        self._destinations: _Place | None = None
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

    def repoint(
        self, contributions: Sequence[Contribution], destinations: Destinations | None, lent: Sequence[Any]
    ) -> None:
        """See `Graph.repoint`; what was lent before is kept until earlier replays are done."""
        before, rest = list(self.lent), iter(contributions)
        self.lent += [*contributions, *lent]  # before the copy: wherever this is interrupted, what is read is alive
        folds = [
            (replace(fold, contributions=list(islice(rest, len(fold.contributions)))), columns, places)
            for fold, columns, places in self._folds
        ]
        for fold, columns, places in folds:
            for place, addresses in zip(places, fold.addresses(columns), strict=True):
                place.here[:] = addresses
        if destinations is not None and self._destinations is not None:
            self._destinations.here[:] = addresses_of(destinations)
        for block in self._blocks:
            self._runtime.copied_into(block.there[: block.used], block.here[: block.used])
        before_folds, self._folds = self._folds, folds
        del self.lent[: len(before)]
        self._runtime.drop(before, before_folds)

    def addresses_of(self, fold: FoldPass, columns: int) -> Iterator[Any]:
        """See `Graph.addresses_of`."""
        places = [self._place(addresses) for addresses in fold.addresses(columns)]
        self._folds.append((fold, columns, places))
        self.lent += fold.contributions
        return iter([place.there for place in places])

    def addresses_to(self, destinations: npt.NDArray[np.uint64]) -> Any:
        """See `Graph.addresses_to`."""
        self._destinations = self._place(destinations)
        return self._destinations.there

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
        for block in self._blocks:
            self._runtime.fill(block.there, block.here)
        self._launched = self._runtime.event()
        memory = self.kept, self.lent, self.graph  # it outlives the last run
        weakref.finalize(self, self._runtime.kept.until, (self._launched,), memory).atexit = False

    def _place(self, addresses: npt.NDArray[np.uint64]) -> _Place:
        """Room for addresses, in the last block or in a new one."""
        if not self._blocks or self._blocks[-1].room < addresses.size:
            here = np.zeros(max(_BLOCK, addresses.size), np.uint64)
            self._blocks.append(_Block(self._runtime.upload(here), here))
        block = self._blocks[-1]
        part = slice(block.used, block.used + addresses.size)
        block.used = part.stop
        place = _Place(block.there[part], block.here[part])
        place.here[:] = addresses
        return place

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
