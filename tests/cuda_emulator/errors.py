"""What can go wrong: CUDA's own errors, out of memory, and what the emulator finds in a kernel."""

from __future__ import annotations

_STATUS = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
    904: ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    905: ("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
    906: ("cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing stream"),
    907: ("cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"),
}


class CUDARuntimeError(RuntimeError):
    """What a call of CUDA's runtime answers when it fails; `status` is CUDA's number."""

    def __init__(self, status: int) -> None:
        self.status = status
        name, text = _STATUS[status]
        super().__init__(f"{name}: {text}")


class OutOfMemoryError(MemoryError):
    """The pool's limit or the device's memory does not hold what was asked for; CuPy's message."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        limited = f", limit set to: {limit:,} bytes" if limit else ""
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{limited}).")


class EmulatorError(RuntimeError):
    """A kernel or copy did what no GPU promises to bear: a race, an access out of bounds, a wrong argument..."""


class CompileException(Exception):
    """The compiler refused a kernel's source; the message is its own."""
