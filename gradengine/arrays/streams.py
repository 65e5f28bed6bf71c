"""CUDA streams that a GPU's arrays are produced on, known by handle or unknown.

The engine's stream waits for a known stream before it reads, and the known stream waits for the engine's afterwards
(`kernels/cuda_device.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from gradengine.arguments import MOST, as_index, said
from gradengine.errors import CallerError


@dataclass(frozen=True)
class ProducerStream:
    """The stream on which the producer of an array works. Equal instances mean the same stream.

    This class itself stands for an unknown stream, such as that of a DLPack producer. The producer has ordered its work
    before the engine's work in the export.
    """

    def stream(self) -> int | None:
        """Return the stream's handle now, or None if unknown. The array is then kept alive until the work is done."""
        return None


@final
@dataclass(frozen=True)
class NamedStream(ProducerStream):
    """A stream given by its handle. 0 and 1 both mean the default stream."""

    handle: int

    def __post_init__(self) -> None:
        handle = stream_handle(self.handle)
        object.__setattr__(self, "handle", 0 if handle == 1 else handle)

    def stream(self) -> int:
        return self.handle


def stream_handle(stream: Any) -> int:
    """Return the handle of a CuPy or torch stream, of an object with `__cuda_stream__`, or the handle itself."""
    protocol = getattr(stream, "__cuda_stream__", None)
    handle = as_index(protocol()[1] if callable(protocol) else getattr(stream, "cuda_stream", stream))
    if handle is None or not 0 <= handle <= MOST:
        raise CallerError(
            "not a CUDA stream",
            got=said(stream),
            expected="a CuPy or torch stream, an object with __cuda_stream__, or a handle >= 0",
        )
    return handle
