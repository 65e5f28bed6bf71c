"""Finds what a GPU needs: CuPy, a driver, a device, NVRTC and its headers. Errors say how to get what is missing."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from gradengine.errors import DeviceUnavailable

_INSTALL = "pip install 'gradengine[cuda12]' or 'gradengine[cuda13]', as nvidia-smi's CUDA version says"
_OLDEST_CUPY = 14  # bf16, Stream.from_external and C++17 come with it
_LARGE_ARGUMENTS, _LARGE_ARGUMENTS_DRIVER = (12, 1), 12010
_OLDEST_CAPABILITY = 70  # arguments taken by reference (__grid_constant__)


def device_ordinal(device: object) -> int | None:
    """The number of a CUDA device by its name; None for any other name."""
    if not isinstance(device, str):
        return None
    name, colon, ordinal = device.partition(":")
    if name != "cuda" or (colon and not ordinal.isdecimal()) or len(ordinal) > 9:
        return None
    return int(ordinal or 0)


def load_cupy(ordinal: int) -> ModuleType:
    """Return CuPy if the device can be used; otherwise raise `DeviceUnavailable`, which says what is missing."""
    try:
        cupy = importlib.import_module("cupy")  # by name: the core imports no framework, and CuPy only when asked for
    except ImportError as fault:
        raise DeviceUnavailable(f"device 'cuda:{ordinal}' needs CuPy ({fault})", do=_INSTALL) from None
    version = str(cupy.__version__)
    if int(version.partition(".")[0]) < _OLDEST_CUPY:
        raise DeviceUnavailable("CuPy is too old", got=version, expected=f">= {_OLDEST_CUPY}", do=_INSTALL)
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as fault:  # noqa: BLE001  (CuPy's error class can be named only where its libraries load)
        raise DeviceUnavailable(
            f"CuPy finds no GPU ({fault})",
            do="check that nvidia-smi works here: a driver for CUDA >= 12 is needed; or use device='cpu'",
        ) from None
    if ordinal >= count:
        raise DeviceUnavailable(
            f"there is no device 'cuda:{ordinal}'",
            got=f"{count} devices",
            do="count from 0, and check CUDA_VISIBLE_DEVICES",
        )
    capability = int(cupy.cuda.Device(ordinal).compute_capability)
    if capability < _OLDEST_CAPABILITY:
        raise DeviceUnavailable(
            f"device 'cuda:{ordinal}' is too old",
            got=f"compute capability {capability / 10}",
            expected=f"{_OLDEST_CAPABILITY / 10} or more",
        )
    return cupy


def source(name: str) -> str:
    """The CUDA source of a kernel, with our headers in place of their include lines.

    The text is whole because CuPy's cache of compiled kernels is keyed by it, and would not see a change in a header.
    """
    text = _read(f"{name}.cu")
    for header in ("common.cuh", "arithmetic.cuh"):
        text = text.replace(f'#include "{header}"', _read(header))
    return text


def arithmetic() -> str:
    """The arithmetic of the kernels in a separate namespace, for generated code."""
    return f"namespace gradengine {{\n{_read('arithmetic.cuh')}\n}}"


def _read(name: str) -> str:
    """The text of a file beside this one, also where the package is in a zip file, as zipapp makes it."""
    # Imported here, for it takes 30 ms, a fifth of what the package may take.
    resources = importlib.import_module("importlib.resources")
    return str(resources.files(__package__).joinpath(name).read_text())


def takes_large_arguments(xp: Any) -> bool:
    """Whether a launch may carry 32 KB of arguments: NVRTC and the driver must both be of CUDA 12.1 or later."""
    try:
        nvrtc = tuple(xp.cuda.nvrtc.getVersion())
    except (RuntimeError, ImportError, OSError):  # NVRTC is missing: `compiled` says so, and how to get it
        return False
    return nvrtc >= _LARGE_ARGUMENTS and int(xp.cuda.runtime.driverGetVersion()) >= _LARGE_ARGUMENTS_DRIVER


def compiled(xp: Any, name: str, *, large_arguments: bool = True) -> Any:
    """The module of one .cu file, compiled for the current device (from CuPy's cache after the first time).

    Args:
        xp: CuPy.
        name: The file's name.
        large_arguments: Whether to include the kernels that take 32 KB of arguments.

    Raises:
        DeviceUnavailable: NVRTC or its headers are missing.
    """
    options = ("--std=c++17", *([] if large_arguments else ["-DSMALL_ARGUMENTS_ONLY"]))
    module = xp.RawModule(code=source(name), options=options)
    try:
        module.compile()
    except (RuntimeError, ImportError, OSError) as fault:
        if type(fault).__name__ == "CompileException":
            raise
        raise DeviceUnavailable(
            f"the kernels cannot be compiled ({fault})",
            expected="NVRTC and CUDA's headers",
            do="pip install 'cuda-toolkit[nvrtc,cudart]==12.*' (or 13.*, as the driver's CUDA version says)",
        ) from None
    return module
