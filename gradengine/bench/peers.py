"""The step without gradengine, by hand (tensor by tensor in NumPy or CuPy) or by PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np

from gradengine.bench.device import Array, Case, Device, Tensor
from gradengine.bench.harness import Variant
from gradengine.bench.workload import Workload, widened


@final
class ByHand:
    """Gradients or their sums as NumPy or CuPy arrays, with one call for each array. bfloat16 is passed as its bits."""

    def __init__(self, gradients: Sequence[Array]) -> None:
        self.gradients = gradients

    @staticmethod
    def over(device: Device, arrays: Sequence[Array]) -> ByHand:
        """Return a peer over the memory of a device's arrays."""
        return ByHand([device.by_hand(array) for array in arrays])

    @staticmethod
    def sums_for(workload: Workload) -> ByHand:
        """Return fp32 sums of the workload's shapes, undefined before the window begins."""
        return ByHand.over(workload.device, workload.device.empty(workload.shapes, np.float32))

    def zero(self) -> None:
        """Set the sums to zero."""
        for total in self.gradients:
            total[...] = 0

    def add(self, gradients: Sequence[Array]) -> None:
        """Add a micro-batch to the sums."""
        for total, gradient in zip(self.gradients, gradients, strict=True):
            np.add(total, widened(gradient), out=total)

    def scale(self, factor: float) -> None:
        """Multiply in place."""
        for gradient in self.gradients:
            np.multiply(gradient, np.float32(factor), out=gradient)

    def norm(self) -> float:
        """Return the global norm, computed from the norm of each tensor."""
        return math.sqrt(sum(float(np.linalg.norm(gradient)) ** 2 for gradient in self.gradients))

    def clip(self, max_norm: float, divisor: float = 1.0) -> None:
        """Divide and clip in one multiplication. bfloat16 is widened, clipped and rounded back to its bits.

        Raises:
            FloatingPointError: The norm is not finite.

        Example:
            >>> gradient, bits = np.array([6, 8], np.float32), np.array([0x40C0, 0x4100], np.uint16)  # both 6 and 8
            >>> ByHand([gradient]).clip(max_norm=1.0, divisor=2.0)
            >>> ByHand([bits]).clip(max_norm=5.0)
            >>> gradient, [hex(word) for word in bits]
            (array([0.6, 0.8], dtype=float32), ['0x4040', '0x4080'])
        """
        wide = ByHand([widened(gradient) for gradient in self.gradients])
        norm = wide.norm() / divisor
        if not math.isfinite(norm):
            raise FloatingPointError("the gradient is not finite")
        wide.scale(min(1.0, max_norm / norm) / divisor)
        for gradient, values in zip(self.gradients, wide.gradients, strict=True):
            if values is not gradient:
                gradient[...] = _bfloat16_bits(values)


def _bfloat16_bits(values: Any) -> Any:
    """Return the bits of the nearest bfloat16, ties to even. NaN is not supported."""
    bits = values.view(np.uint32)
    return (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16


@final
class Torch:
    """Gradients in the `.grad` of parameters, as torch's optimizers read them. Raises `Missing` without torch."""

    def __init__(self, device: Device, gradients: Sequence[Tensor]) -> None:
        self._torch, self._device, self.gradients = device.torch, device, list(gradients)
        self._parameters = [self._parameter(gradient) for gradient in self.gradients]

    @staticmethod
    def over(device: Device, arrays: Sequence[Array]) -> Torch:
        """Return a peer over the memory of a device's arrays."""
        return Torch(device, [device.tensor(array) for array in arrays])

    @staticmethod
    def sums_for(workload: Workload) -> Torch:
        """Return fp32 sums of the workload's shapes, filled with NaN so that the check finds unwritten elements."""
        device = workload.device
        facts = {"dtype": device.torch.float32, "device": device.torch_device}
        return Torch(device, [device.torch.full(shape, math.nan, **facts) for shape in workload.shapes])

    def zero(self) -> None:
        """Call `torch._foreach_zero_`."""
        self._torch._foreach_zero_(self.gradients)

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Call `torch._foreach_add_`, or `add_` one by one for bfloat16 on a CPU, which has no fast foreach path."""
        if self._device.is_gpu or gradients[0].dtype == self._torch.float32:
            self._torch._foreach_add_(self.gradients, gradients)
            return
        for total, gradient in zip(self.gradients, gradients, strict=True):
            total.add_(gradient)

    def scale(self, factor: float) -> None:
        """Call `torch._foreach_mul_`."""
        self._torch._foreach_mul_(self.gradients, factor)

    def norm(self) -> Any:
        """Return `torch.nn.utils.get_total_norm`, in the gradients' dtype."""
        return self._torch.nn.utils.get_total_norm(self.gradients, foreach=True)

    def clip(self, max_norm: float, divisor: float = 1.0) -> None:
        """Call `torch._foreach_mul_` with 1 / `divisor`, unless the divisor is 1, then `clip_grad_norm_`.

        On a CPU it raises for NaN and Inf, as gradengine does. On a GPU such a check would wait for the device.
        """
        if divisor != 1:
            self.scale(1.0 / divisor)
        clip, raises = self._torch.nn.utils.clip_grad_norm_, not self._device.is_gpu
        clip(self._parameters, max_norm, error_if_nonfinite=raises, foreach=True)

    def _parameter(self, gradient: Tensor) -> Any:
        # The step does not read the weights. An expanded scalar has their shape and takes no memory.
        weight = self._torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
        parameter = self._torch.nn.Parameter(weight)
        parameter.grad = gradient
        return parameter


Peer: TypeAlias = ByHand | Torch


def torch_name(workload: Workload) -> str:
    """Return the name of `Torch` in tables when it adds these gradients, which `Torch.add` describes."""
    return "torch foreach" if workload.device.is_gpu or workload.dtype == "float32" else "torch add_"


def peers(
    workload: Workload, nbytes: int, build: Callable[[type[Peer]], Case], torch: str = "torch foreach"
) -> list[Variant]:
    """Return the variants by hand and by torch, which move the same number of bytes."""
    by_hand = "cupy by hand" if workload.device.is_gpu else "numpy by hand"
    return [Variant(name, nbytes, partial(build, kind)) for name, kind in ((by_hand, ByHand), (torch, Torch))]


def adding(workload: Workload, kind: type[Peer]) -> tuple[Peer, list[Callable[[], object]]]:
    """Return sums, the call that zeroes them, and a call for each micro-batch that adds it."""
    peer = kind.sums_for(workload)
    batches = [kind.over(workload.device, batch).gradients for batch in workload.batches]
    return peer, [peer.zero, *(partial(peer.add, batch) for batch in batches)]
