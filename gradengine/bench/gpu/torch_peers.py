"""The same work on the GPU by PyTorch's own means: foreach, `torch.compile`, and a CUDA graph of foreach."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.bench.gpu.device import NO_TORCH, Gpu, Missing, Tensor
from gradengine.bench.torch_peers import TorchGradients

__all__ = ["CompiledStep", "arrays_of", "empty_totals", "foreach_add", "limited", "torch_of"]


def torch_of(gpu: Gpu) -> Any:
    """PyTorch.

    Raises:
        Missing: It is not there, or sees no GPU.
    """
    if gpu.torch is None:
        raise Missing(NO_TORCH)
    return gpu.torch


def empty_totals(gpu: Gpu, shapes: Sequence[tuple[int, ...]]) -> TorchGradients:
    """fp32 accumulators of these shapes on the device; NaN, so that what is not written shows."""
    torch = torch_of(gpu)
    return TorchGradients(
        [torch.full(shape, float("nan"), dtype=torch.float32, device=gpu.torch_device) for shape in shapes]
    )


def foreach_add(gpu: Gpu, totals: TorchGradients, gradients: Sequence[Tensor]) -> None:
    """`torch._foreach_add_`; of bf16 into fp32 it is a launch for each tensor, made in C++."""
    gpu.torch._foreach_add_(totals.gradients, gradients)


def arrays_of(tensors: Sequence[Tensor]) -> list[npt.NDArray[np.float32]]:
    """Copies on the host."""
    return [tensor.cpu().numpy() for tensor in tensors]


@final
class CompiledStep:
    """The step as functions over lists of tensors, through `torch.compile`.

    Args:
        gpu: The device.
        shapes: Of the gradients.
        bound: Of the norm of the sum.

    Attributes:
        totals: The accumulators, which hold the clipped sum afterwards.
    """

    def __init__(self, gpu: Gpu, shapes: Sequence[tuple[int, ...]], bound: float) -> None:
        torch = torch_of(gpu)

        def add(totals: list[Tensor], gradients: list[Tensor]) -> None:
            torch._foreach_add_(totals, gradients)

        def begin(totals: list[Tensor], gradients: list[Tensor]) -> None:
            torch._foreach_zero_(totals)
            torch._foreach_add_(totals, gradients)

        def clip(totals: list[Tensor]) -> None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(totals)))
            torch._foreach_mul_(totals, torch.clamp(bound / (norm + 1e-6), max=1.0))

        def window(totals: list[Tensor], micro_batches: list[list[Tensor]]) -> None:
            torch._foreach_zero_(totals)
            for gradients in micro_batches:
                torch._foreach_add_(totals, gradients)
            clip(totals)

        self.totals = empty_totals(gpu, shapes).gradients
        self._add, self._begin, self._clip = gpu.compiled(add), gpu.compiled(begin), gpu.compiled(clip)
        self._window = gpu.compiled(window)

    def by_micro_batch(self, micro_batches: Sequence[list[Tensor]]) -> None:
        """A call for each micro-batch, as backward makes them, and one for the clip."""
        self._begin(self.totals, micro_batches[0])
        for gradients in micro_batches[1:]:
            self._add(self.totals, gradients)
        self._clip(self.totals)

    def whole(self, micro_batches: Sequence[list[Tensor]]) -> None:
        """One call, for whoever keeps all micro-batches until the end."""
        self._window(self.totals, list(micro_batches))


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """An alarm for what may take for ever, such as a compiler; in the main thread only.

    Raises:
        TimeoutError: The time is up (or what that became on its way through the compiler).
    """

    def ring(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds:g} s")

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)
