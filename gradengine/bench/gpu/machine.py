"""Which GPU, which driver, which CUDA: `python -m gradengine.bench.gpu.machine [file]`."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradengine.bench.machine import machine, versions

__all__ = ["gpu_machine", "gpu_versions"]

_PACKAGES = ("cupy", "triton", "ml_dtypes")


def gpu_machine(xp: Any) -> dict[str, object]:
    """The host, and the GPU's name, memory, multiprocessors, L2, driver and CUDA.

    Args:
        xp: CuPy.
    """
    runtime = xp.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    name = properties["name"]
    return {
        **machine(),
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "gpu_memory_bytes": int(properties["totalGlobalMem"]),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "l2_bytes": int(properties["l2CacheSize"]),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": _driver(),
        "driver_cuda": _dotted(runtime.driverGetVersion()),
        "runtime_cuda": _dotted(runtime.runtimeGetVersion()),
    }


def gpu_versions(xp: Any) -> dict[str, str | None]:
    """Versions of all that takes part; None where it is not there."""
    found = {name: _version(name) for name in _PACKAGES}
    return {**versions(), **found, "cupy": getattr(xp, "__version__", found["cupy"])}


def _driver() -> str | None:
    """The driver's own version, as nvidia-smi says it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return (shown.splitlines() or [None])[0]  # type: ignore[list-item]


def _dotted(version: int) -> str:
    """CUDA's number as it is written.

    >>> _dotted(13020)
    '13.2'
    """
    return f"{version // 1000}.{version % 1000 // 10}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str]) -> None:
    """Print both as JSON, and write them to the file that is named."""
    xp = importlib.import_module("cupy")
    text = json.dumps({"machine": gpu_machine(xp), "versions": gpu_versions(xp)}, indent=1)
    print(text)
    for path in arguments:
        Path(path).write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
