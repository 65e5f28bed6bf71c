"""The machine and the versions of a report, without which its figures cannot be compared with others."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import gradengine
from gradengine.kernels.host_threads import available_cpus


def machine(xp: Any = np) -> dict[str, object]:
    """Return CPU model, cores for this process, bytes of memory and system. With CuPy as `xp`, add its first GPU."""
    host = {
        "cpu": _cpu_model(),
        "cores": available_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    return host if xp is np else {**host, **_gpu(xp.cuda.runtime)}


def versions(xp: Any = np) -> dict[str, str | None]:
    """Return the versions of all packages that take part, None for a missing one. `xp` is NumPy, or CuPy on a GPU."""
    own = {"gradengine": gradengine.__version__, "commit": commit_of(Path(__file__).parent)}
    host = {**own, "python": platform.python_version(), "numpy": np.__version__, "torch": _version("torch")}
    if xp is np:
        return host
    return {**host, "cupy": xp.__version__, "triton": _version("triton"), "ml_dtypes": _version("ml_dtypes")}


def load() -> float | None:
    """Return the mean number of programs that wanted a core in the last minute, or None on a system without it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def commit_of(folder: Path) -> str | None:
    """Return the commit of the checkout that contains a folder, or None.

    The commit ends in "-dirty" if files were changed. Recorded results do not count, since a run writes them.
    """
    git = ("git", "-C", str(folder))
    commit = _said(*git, "rev-parse", "HEAD")
    others = ("--", ":/", ":(top,exclude)measured/results")
    return f"{commit}-dirty" if commit and _said(*git, "status", "--porcelain", "-uno", *others) else commit


def _said(*command: str) -> str | None:
    """Return the first line that a program prints, or None if the program is missing, fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.strip().splitlines()), None)


def _gpu(runtime: Any) -> dict[str, object]:
    properties = runtime.getDeviceProperties(0)
    name = properties["name"]
    return {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "gpu_memory_bytes": int(properties["totalGlobalMem"]),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "l2_bytes": int(properties["l2CacheSize"]),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "driver_cuda": _dotted(runtime.driverGetVersion()),
        "runtime_cuda": _dotted(runtime.runtimeGetVersion()),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _dotted(version: int) -> str:
    """Return CUDA's version number in dotted form. 13020 is 13.2."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
