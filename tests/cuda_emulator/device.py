"""CuPy's Device."""

from __future__ import annotations

from typing import Any

from . import runtime


class Device:
    """A device; as a context manager it is the current one."""

    def __init__(self, device: int | None = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Device:  # noqa: PYI034  (typing.Self is of Python 3.11)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def use(self) -> None:
        """Make it current."""
        runtime.setDevice(self.id)

    def synchronize(self) -> None:
        """Wait for all its streams."""
        with self:
            runtime.deviceSynchronize()

    @property
    def compute_capability(self) -> str:
        properties = runtime.getDeviceProperties(self.id)
        return f"{properties['major']}{properties['minor']}"

    @property
    def mem_info(self) -> tuple[int, int]:
        """Bytes that are free, and all."""
        return runtime.memGetInfo()

    @property
    def attributes(self) -> dict[str, Any]:
        """A few, by CuPy's names."""
        properties = runtime.getDeviceProperties(self.id)
        return {
            "MultiProcessorCount": properties["multiProcessorCount"],
            "MaxThreadsPerBlock": properties["maxThreadsPerBlock"],
        }
