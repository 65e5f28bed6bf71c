"""`gradengine doctor`: installed packages, usable devices, and how to install what is missing."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from typing import Any

import typer

from gradengine import __version__
from gradengine.errors import DeviceUnavailable
from gradengine.kernels.host_threads import available_cpus
from gradengine.kernels.toolchain import compiled, load_cupy

_PACKAGES = (  # alternative distributions, and what is missing without any of them
    (("numpy",), "needed"),
    (("msgpack",), "needed"),
    (("typer",), "needed by this command"),
    (("rich",), "needed by this command"),
    (("matplotlib",), "no plots: pip install 'gradengine[plot]'"),
    (("cupy-cuda12x", "cupy-cuda13x", "cupy"), "no device='cuda'"),
    (("torch",), "needed for nothing but its own tensors"),
    (("jax",), "needed for nothing but its own arrays"),
)


def doctor() -> None:
    """Show installed packages, usable devices, and how to install what is missing."""
    typer.echo(f"gradengine {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for rows in (packages(), devices()):
        typer.echo()
        for name, what, more in rows:
            typer.echo(f"{name:<13} {what:<13} {more}".rstrip())


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
