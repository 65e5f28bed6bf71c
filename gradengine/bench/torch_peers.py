"""The same work by PyTorch's own means; PyTorch is imported when a peer is built, and may be missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.bench.case import Absent

__all__ = ["TorchGradients", "as_tensors", "torch_version", "warm_up", "without_torch"]


def without_torch(*variants: str) -> list[Absent]:
    """A line for each variant where PyTorch is missing; empty where it is there."""
    if importlib.util.find_spec("torch") is not None:
        return []
    return [Absent(variant, "torch not installed") for variant in variants]


def torch_version() -> str | None:
    """PyTorch's version, or None."""
    return None if without_torch("") else str(_torch().__version__)


def warm_up() -> None:
    """Do each operation once, so that PyTorch's own start (libraries, threads) counts as nobody's memory."""
    gradients = [np.ones(1 << 16, np.float32)]
    totals = TorchGradients.empty_like(gradients)
    totals.zero()
    totals.add(as_tensors(gradients))
    totals.divide(2.0)
    totals.clip(1.0)


def as_tensors(gradients: Sequence[npt.NDArray[Any]]) -> list[Any]:
    """Tensors over the same memory; bfloat16 comes as its bits."""
    torch = _torch()
    return [
        torch.from_numpy(gradient)
        if gradient.dtype == np.float32
        else torch.from_numpy(gradient.view(np.int16)).view(torch.bfloat16)
        for gradient in gradients
    ]


@final
class TorchGradients:
    """Gradients as an optimizer of PyTorch finds them: the `.grad` of parameters.

    Args:
        gradients: fp32 tensors, owned by the caller.

    Attributes:
        gradients: The same tensors.
    """

    def __init__(self, gradients: Sequence[Any]) -> None:
        self._torch = _torch()
        self.gradients = list(gradients)
        self._parameters = [self._parameter(gradient) for gradient in self.gradients]

    @staticmethod
    def empty_like(gradients: Sequence[npt.NDArray[Any]]) -> TorchGradients:
        """fp32 accumulators of these shapes, their contents undefined."""
        torch = _torch()
        return TorchGradients([torch.empty(gradient.shape, dtype=torch.float32) for gradient in gradients])

    def zero(self) -> None:
        """`torch._foreach_zero_`."""
        self._torch._foreach_zero_(self.gradients)

    def add(self, gradients: Sequence[Any]) -> None:
        """`torch._foreach_add_` of fp32 tensors; `add_` one by one of others, for which foreach has no fast path."""
        if gradients[0].dtype == self._torch.float32:
            self._torch._foreach_add_(self.gradients, gradients)
            return
        for total, gradient in zip(self.gradients, gradients, strict=True):
            total.add_(gradient)

    def divide(self, divisor: float) -> None:
        """`torch._foreach_mul_` by the inverse."""
        self._torch._foreach_mul_(self.gradients, 1.0 / divisor)

    def clip(self, max_norm: float, *, error_if_nonfinite: bool = True) -> None:
        """`torch.nn.utils.clip_grad_norm_`, with its check for NaN and Inf, for which a GPU is waited for."""
        clip = self._torch.nn.utils.clip_grad_norm_
        clip(self._parameters, max_norm, error_if_nonfinite=error_if_nonfinite, foreach=True)

    def arrays(self) -> list[npt.NDArray[np.float32]]:
        """The gradients as NumPy arrays over the same memory."""
        return [gradient.numpy() for gradient in self.gradients]

    def _parameter(self, gradient: Any) -> Any:
        # The weights are no part of the step: an expanded scalar has their shape and takes no memory.
        weight = self._torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
        parameter = self._torch.nn.Parameter(weight)
        parameter.grad = gradient
        return parameter


def _torch() -> Any:
    return importlib.import_module("torch")
