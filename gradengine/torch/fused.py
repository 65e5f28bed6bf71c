"""Deferred steps, in which a fused torch optimizer averages, clips and skips."""

from __future__ import annotations

from typing import Any

import torch

from gradengine.engine.result import StepResult
from gradengine.errors import BufferRefused, CallerError
from gradengine.layout.components import trainable
from gradengine.torch.gradients import Parameters, as_tensor, give, refuse_stale


def step_fused(optimizer: torch.optim.Optimizer, result: StepResult, module: Parameters) -> None:
    """Step an optimizer that was built with `fused=True` and that itself averages, clips and skips a deferred result.

    Each parameter's `.grad` becomes a view of the result's sum, or None if no micro-batch used the parameter. torch
    divides the sum by `result.inverse_factor` when it reads the sum, and writes the quotient back. If `result.skipped`
    is set, neither parameters nor state change. On a GPU torch reads both numbers from the engine's memory, and the
    host does not wait, except in the first step of an SGD with momentum. Call `module.zero_grad()` before the next
    backward. After an error no parameter has changed.

    Args:
        optimizer: torch's Adam, AdamW, SGD or Adagrad, built with `fused=True`.
        result: The result of `engine.step(deferred=True)`.
        module: The module that the engine's layout was made from, by `layout_of`, and that the optimizer trains.

    Raises:
        BufferRefused: A parameter accepts no fp32 gradient or is on a different device, or the optimizer has a
            parameter with a gradient that is not in the module.
        LayoutMismatch: The result does not fit this module's layout.
        CallerError: The optimizer is not fused, accepts no scale in this version of torch, or has no parameter of the
            module. Or the result is not deferred, or the engine has been called since.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ...
        step_fused(optimizer, engine.step(deferred=True), model)
        model.zero_grad()
    """
    _refuse_not_fused(optimizer)
    refuse_stale(result)
    own = set(trainable(module).values())
    _refuse_other_gradients(optimizer, own)
    give(module, result.sums, result.unused)
    try:
        _step_scaled(optimizer, result)
    except BaseException:
        for parameter in own:  # otherwise the next optimizer would take the sum for a gradient
            parameter.grad = None
        raise


def _refuse_not_fused(optimizer: Any) -> None:
    takes_both = hasattr(optimizer, "_step_supports_amp_scaling") and optimizer._step_supports_amp_scaling
    # `fused` is read from each group, because loading a state dict replaces it there.
    if takes_both and all(group.get("fused", True) for group in optimizer.param_groups):
        return
    raise CallerError(  # Adagrad accepts a scale only in newer versions of torch
        "the optimizer cannot scale and skip by itself",
        got=type(optimizer).__name__,
        expected="Adam, AdamW, SGD or Adagrad with fused=True, and a version of torch in which it accepts a scale",
        do="use engine.step() without deferred, and optimizer.step()",
    )


def _refuse_other_gradients(optimizer: torch.optim.Optimizer, own: set[torch.nn.Parameter]) -> None:
    """Raise `BufferRefused` for gradients outside the module, which the optimizer would divide like the sum."""
    parameters = {(g, i): p for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])}
    for (group, index), parameter in parameters.items():
        if parameter.grad is not None and parameter not in own:
            raise BufferRefused(
                f"param_groups[{group}]['params'][{index}] has a gradient that is not this result's",
                got=f"shape {tuple(parameter.shape)}",
                do="build the optimizer of this module's parameters; set the .grad of others to None",
            )
    if own.isdisjoint(parameters.values()):
        raise CallerError("none of the optimizer's parameters is the module's", do="pass the module that it trains")


def _step_scaled(optimizer: torch.optim.Optimizer, result: StepResult) -> None:
    if _allocates_momentum(optimizer) and float(result.skipped) > 0:
        return  # torch would leave the new momentum uninitialised in a skipped step
    scaled: Any = optimizer  # torch reads these two attributes without declaring them
    scaled.grad_scale = as_tensor(result.inverse_factor).to(torch.float32)
    scaled.found_inf = as_tensor(result.skipped).to(torch.float32)
    try:
        optimizer.step()
    finally:
        del scaled.grad_scale, scaled.found_inf


def _allocates_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next step is an SGD's first step with momentum for any of its parameters."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and parameter.grad is not None and not optimizer.state.get(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
