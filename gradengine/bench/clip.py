"""`bench clip`: gradients are clipped in place by their global norm.

Bytes counted, of A the gradients in their dtype, for every variant alike: read A for the norm, read
and write A to scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradengine.bench import by_hand
from gradengine.bench.case import Absent, Case
from gradengine.bench.torch_peers import TorchGradients, as_tensors, without_torch
from gradengine.bench.workload import Workload, as_taken, widened
from gradengine.clip import FusedClipState, clip_gradients_fused

__all__ = ["clip_cases"]


def clip_cases(workload: Workload) -> list[Case | Absent]:
    """Ours, NumPy by hand, and torch, on the same memory, which is put back before each run.

    Args:
        workload: One micro-batch.
    """
    originals = workload.micro_batches[0]
    gradients = [np.empty_like(original) for original in originals]
    state = FusedClipState([gradient.size for gradient in gradients])
    bound = workload.max_norm

    def put_back() -> None:
        for gradient, original in zip(gradients, originals, strict=True):
            np.copyto(gradient, original)

    def case(variant: str, run: Callable[[], object], *, ours: bool = False) -> Case:
        return Case(
            "clip",
            variant,
            3 * workload.gradient_bytes,
            run,
            error=lambda: workload.error_of_step([widened(gradient) for gradient in gradients]),
            prepare=put_back,
            ours=ours,
        )

    taken = [as_taken(gradient) for gradient in gradients]
    cases: list[Case | Absent] = [
        case("ours", lambda: clip_gradients_fused(taken, bound, state), ours=True),
        case("numpy by hand", lambda: by_hand.clip_in_place(gradients, bound)),
    ]
    absent = without_torch("torch foreach")
    if absent:
        return [*cases, *absent]
    tensors = TorchGradients(as_tensors(gradients))
    return [*cases, case("torch foreach", lambda: tensors.clip(bound))]
