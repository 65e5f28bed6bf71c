"""Checks shared by the HF Trainer and Lightning callbacks: only one of the two divides, clips and sums over ranks."""

from __future__ import annotations

import math

import torch

from gradengine.engine import GradientEngine
from gradengine.errors import CallerError


def refuse_doing_twice(engine: GradientEngine, option: str, bound: float | None) -> None:
    """Raise `CallerError` if a trainer has divided gradients that the engine divides, or would clip those it clipped.

    Args:
        engine: The engine.
        option: The trainer's option that has its own bound of the norm.
        bound: That bound.
    """
    if engine.average != "prescaled":
        what = "the trainer divides the loss by the micro-batches or tokens of a step, and the engine would do so again"
        raise CallerError(what, got=f"average={engine.average!r}", do='build the engine with average="prescaled"')
    if bound and bound < math.inf:
        what = f"the engine clips, and the trainer would clip again by its {option}"
        raise CallerError(what, got=bound, expected=0, do="give the bound to the engine, as its max_norm")


def leave_sum_to(engine: GradientEngine, module: torch.nn.Module, world_size: int) -> None:
    """Switch off the sum of a trainer's DistributedDataParallel, which the engine's exchange makes instead.

    Raises:
        CallerError: The engine does not have these ranks, or the trainer does not use DistributedDataParallel.
    """
    if world_size == 1:
        return
    if engine.world_size != world_size:
        what, got = "the trainer's ranks are not the engine's", f"world size {engine.world_size}"
        do = "start by torchrun, and build the engine with exchange=connect()"
        raise CallerError(what, got=got, expected=world_size, do=do)
    parallel = [each for each in module.modules() if isinstance(each, torch.nn.parallel.DistributedDataParallel)]
    if not parallel:
        what = "the trainer sums over ranks itself, by something other than DistributedDataParallel"
        raise CallerError(what, got=type(module).__name__)
    for each in parallel:
        each.require_backward_grad_sync = False  # as within its no_sync()
