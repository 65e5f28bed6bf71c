"""A search for CuPy, a driver, a device, NVRTC and its headers. Errors name what to install."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from gradengine.errors import DeviceUnavailable

_INSTALL = "pip install 'gradengine[cuda12]' or 'gradengine[cuda13]', to match the CUDA version of nvidia-smi"
_OLDEST_CUPY = 14  # first version with bf16, Stream.from_external and C++17
_LARGE_ARGUMENTS, _LARGE_ARGUMENTS_DRIVER = (12, 1), 12010
_OLDEST_CAPABILITY = 70  # first compute capability, times 10, with arguments by reference (__grid_constant__)


def device_ordinal(device: object) -> int | None:
    """Return the number of a CUDA device by its name, or None for any other name."""
    if not isinstance(device, str):
        return None
    name, colon, ordinal = device.partition(":")
    if name != "cuda" or (colon and not ordinal.isdecimal()) or len(ordinal) > 9:
        return None
    return int(ordinal or 0)


def load_cupy(ordinal: int) -> ModuleType:
    """Return CuPy if the device can be used, otherwise raise `DeviceUnavailable` with what is missing."""
    try:
        cupy = importlib.import_module("cupy")  # The core imports CuPy only when a GPU is used.
    except ImportError as fault:
        raise DeviceUnavailable(f"device 'cuda:{ordinal}' needs CuPy ({fault})", do=_INSTALL) from None
    version = str(cupy.__version__)
    if int(version.partition(".")[0]) < _OLDEST_CUPY:
        raise DeviceUnavailable("CuPy is too old", got=version, expected=f">= {_OLDEST_CUPY}", do=_INSTALL)
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as fault:  # noqa: BLE001  (CuPy's error class exists only if its libraries load)
        raise DeviceUnavailable(
            f"CuPy finds no GPU ({fault})",
            do="check that nvidia-smi works (a driver for CUDA >= 12 is needed), or use device='cpu'",
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
    """Return the CUDA source of a kernel, with gradengine's headers in place of their include lines.

    CuPy's cache of compiled kernels is keyed by the text alone, and would not see a change in a header.
    """
    text = _read(f"{name}.cu")
    for header in ("common.cuh", "arithmetic.cuh"):
        text = text.replace(f'#include "{header}"', _read(header))
    return text


def arithmetic() -> str:
    """Return the arithmetic of the kernels in a separate namespace, for generated code."""
    return f"namespace gradengine {{\n{_read('arithmetic.cuh')}\n}}"


def _read(name: str) -> str:
    """Return the text of a file in this folder, also if the package is in a zip file (zipapp)."""
    # This import takes 30 ms, a fifth of the limit for the whole package.
    resources = importlib.import_module("importlib.resources")
    return str(resources.files(__package__).joinpath(name).read_text())


def takes_large_arguments(xp: Any) -> bool:
    """Return whether a launch may have 32 KB of arguments. NVRTC and driver must both be of CUDA 12.1 or later."""
    try:
        nvrtc = tuple(xp.cuda.nvrtc.getVersion())
    except (RuntimeError, ImportError, OSError):  # NVRTC is missing, which `compiled` reports.
        return False
    return nvrtc >= _LARGE_ARGUMENTS and int(xp.cuda.runtime.driverGetVersion()) >= _LARGE_ARGUMENTS_DRIVER


def compiled(xp: Any, name: str, *, large_arguments: bool = True) -> Any:
    """Return the module of one .cu file, compiled for the current device (from CuPy's cache after the first time).

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
            do="pip install 'cuda-toolkit[nvrtc,cudart]==12.*' (or 13.*, to match the driver's CUDA version)",
        ) from None
    return module
