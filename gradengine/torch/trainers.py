"""Checks of the HF Trainer and Lightning callbacks that only the engine divides, clips and sums over ranks."""

from __future__ import annotations

import math

import torch

from gradengine.engine import GradientEngine
from gradengine.errors import CallerError


def refuse_doing_twice(engine: GradientEngine, option: str, bound: float | None) -> None:
    """Raise `CallerError` if a trainer and the engine would both divide, or both clip, the gradients.

    Args:
        engine: The engine.
        option: The name of the trainer's option that sets its bound of the norm.
        bound: The trainer's bound.
    """
    if engine.average != "prescaled":
        what = "the trainer divides the loss by a step's micro-batches or tokens, and the engine would divide it again"
        raise CallerError(what, got=f"average={engine.average!r}", do='build the engine with average="prescaled"')
    if bound and bound < math.inf:
        what = f"the engine clips, and the trainer would clip again by its {option}"
        raise CallerError(what, got=bound, expected=0, do="pass the bound to the engine as max_norm")


def leave_sum_to(engine: GradientEngine, module: torch.nn.Module, world_size: int) -> None:
    """Switch off the all-reduce of a trainer's DistributedDataParallel, because the engine's exchange does it.

    Raises:
        CallerError: The engine's world size is not `world_size`, or the trainer does not use DistributedDataParallel.
    """
    if world_size == 1:
        return
    if engine.world_size != world_size:
        what, got = "the trainer's ranks are not the engine's", f"world size {engine.world_size}"
        do = "start with torchrun, and build the engine with exchange=connect()"
        raise CallerError(what, got=got, expected=world_size, do=do)
    parallel = [each for each in module.modules() if isinstance(each, torch.nn.parallel.DistributedDataParallel)]
    if not parallel:
        what = "the trainer sums over ranks itself, without DistributedDataParallel"
        raise CallerError(what, got=type(module).__name__)
    for each in parallel:
        each.require_backward_grad_sync = False  # has the effect of no_sync()
