"""The computations on a device, in NumPy and in CUDA.

K1 (`accumulate`) adds gradients to fp32 targets. K2 (`finalise`) makes norms, clip scale and the decision to skip
(`decision.py`). K3 (`hand_back`) writes sum x factor in the destination's dtype.

The input is `Buffer`s of `arrays`, and an `Arena` with targets, partial squared sums and stream order. The output is
sums in the arena, a `Decision`, and written destinations. `interface.py` is `Kernels`, `device.py` is `Device` (memory,
streams, graphs). `host*.py` are for the CPU, `cuda*.py` and `*.cu` for a GPU. A new kind of device needs a `Device`, a
`Kernels`, a line in `kernels_for` below, and its arrays in `arrays/device.py`. The folder imports `arrays` and
`layout.slots`.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

from gradengine.arguments import said
from gradengine.arrays.frameworks import TorchDevice, device_name
from gradengine.errors import CallerError
from gradengine.kernels.arena import CHUNK, Arena
from gradengine.kernels.cuda import CudaKernels, cuda_kernels
from gradengine.kernels.decision import ClipPlan, Decision, Float64, decide, refuse_bad_divisor
from gradengine.kernels.device import Device, Graph
from gradengine.kernels.host import HostKernels
from gradengine.kernels.interface import Kernels
from gradengine.kernels.kept import Kept
from gradengine.kernels.operands import Contribution, Destinations, FoldPass, producers_of
from gradengine.kernels.status import StepStatus
from gradengine.kernels.toolchain import device_ordinal

__all__ = [
    "CHUNK",
    "Arena",
    "ClipPlan",
    "Contribution",
    "CudaKernels",
    "Decision",
    "Destinations",
    "Device",
    "DeviceLike",
    "Float64",
    "FoldPass",
    "Graph",
    "HostKernels",
    "Kept",
    "Kernels",
    "StepStatus",
    "decide",
    "kernels_for",
    "producers_of",
    "refuse_bad_divisor",
]


_host_kernels = functools.cache(HostKernels)
DeviceLike: TypeAlias = str | TorchDevice | Kernels


def kernels_for(device: DeviceLike) -> Kernels:
    """Return the kernels of a device by name.

    Args:
        device: "cpu", "cuda" (the first GPU) or "cuda:1", or a torch.device. Kernels are returned unchanged.

    Raises:
        CallerError: The name is not the name of a device.
        DeviceUnavailable: Something that the device needs is missing. The error names what to install.

    Example:
        >>> type(kernels_for("cpu")).__name__
        'HostKernels'
    """
    if isinstance(device, Kernels):
        return device
    name = device_name(device)
    if isinstance(name, str) and name == "cpu":
        return _host_kernels()
    ordinal = device_ordinal(name)
    if ordinal is None:
        raise CallerError(
            "there are no kernels for the device", got=said(name), expected="'cpu', 'cuda' or 'cuda:<number>'"
        )
    return cuda_kernels(ordinal)
