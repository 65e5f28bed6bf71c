"""Event ordering between our stream and the producers' of borrowed memory; the host never waits.

A producer whose stream is known is told on that stream when our work is done, and may free its memory at any time: who
gets it next on that stream comes behind us. Of one whose stream nobody knows the memory is kept until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from gradengine.arrays.streams import ProducerStream
from gradengine.errors import CallerError
from gradengine.kernels.device import CudaDevice

__all__ = ["ForeignStreams"]


@final
class ForeignStreams:
    """What is lent to one device's kernels.

    Args:
        device: The device, whose current stream reads and writes what is lent.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def wait_for(self, producers: Iterable[ProducerStream]) -> None:
        """Have the current stream wait for the producers' own. A graph that is recorded is ordered when it runs."""
        self._device.let_go()
        handles = self._others(producer.stream() for producer in producers)
        self._refuse_recording(handles)
        for handle in handles:
            self._device.wait_for(handle)

    def give_back(self, producers: Iterable[ProducerStream], lent: object = None) -> None:
        """Have the producers' streams wait for what was queued so far; without one, keep what is `lent` until then."""
        self._device.let_go()
        streams = [producer.stream() for producer in producers]
        handles, is_kept = self._others(streams), lent is not None and None in streams
        if not (handles or is_kept) or self._device.is_capturing():
            return
        self._refuse_recording(handles)  # to wait would void the graph that is recorded there
        done = self._device.record()
        for handle in handles:
            self._device.let_wait(handle, done)
        if is_kept:
            self._device.kept.until((done,), lent)

    def _refuse_recording(self, handles: Iterable[int]) -> None:
        for handle in handles:
            if self._device.records(handle):
                raise CallerError(
                    "the framework that lends gradients records a graph on its stream",
                    got=f"stream {handle:#x}",
                    do="call the engine outside of that capture; engine.capture() records a graph of its own",
                )

    def _others(self, streams: Iterable[int | None]) -> set[int]:
        """Those that are not the current one; none where that records a graph."""
        handles = {handle for handle in streams if handle is not None} - {self._device.current_stream().ptr}
        return set() if not handles or self._device.is_capturing() else handles
