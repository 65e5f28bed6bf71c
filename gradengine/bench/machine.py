"""Where a figure was taken: a number without its machine and versions cannot be compared with another."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy as np

import gradengine
from gradengine.bench.torch_peers import torch_version
from gradengine.kernels.host import available_cpus

__all__ = ["commit_of", "load", "machine", "versions"]


def machine() -> dict[str, object]:
    """CPU model, cores this process may use, bytes of memory, and system.

    >>> sorted(machine())
    ['cores', 'cpu', 'memory_bytes', 'system']
    """
    return {
        "cpu": _cpu_model(),
        "cores": available_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def load() -> float | None:
    """Programs that wanted a core over the last minute: near the number of cores, figures are a busy machine's."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str | None]:
    """Versions of all that takes part; None where it is not there.

    >>> sorted(versions())
    ['commit', 'gradengine', 'numpy', 'python', 'torch']
    """
    return {
        "gradengine": gradengine.__version__,
        "commit": commit_of(Path(__file__).parent),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit_of(folder: Path) -> str | None:
    """The commit of the checkout that a folder lies in, None if it lies in none.

    "-dirty" where something else than recorded results was changed: they change while a run writes them.
    """
    git = ["git", "-C", str(folder)]
    changes = [*git, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results"]
    try:
        commit, changed = (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            for command in ([*git, "rev-parse", "HEAD"], changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changed else commit
