"""Functions that pass a module's gradients to an engine and back, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import torch
from torch.utils.dlpack import from_dlpack

from gradengine.accumulate.gradients import NamedArrays, and_more
from gradengine.arguments import refuse_other_kind, truth_value
from gradengine.arrays.device import device_of
from gradengine.arrays.frameworks import TAKEN
from gradengine.engine.result import StepResult
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch
from gradengine.layout import GradientLayout
from gradengine.layout.components import memory_order, shapes_in_memory, trainable
from gradengine.layout.slots import refuse_other_order

Parameters: TypeAlias = "torch.nn.Module | Iterable[torch.nn.Parameter]"


def layout_of(module: Parameters) -> GradientLayout:
    """Return the layout of a module's trainable parameters, in the order of `named_parameters()`.

    Tied parameters appear once. For a module the layout is `GradientLayout.of(module)`. Every function here also takes
    a list of parameters instead of a module, and then names each by its position.

    A dense parameter that is not contiguous (channels_last, transposed) has its dimensions in memory order. Its
    gradient is accumulated, exchanged and returned in that order. The order is part of the layout, so that a model in
    a different memory format has a different layout. `tensors_of` permutes the dimensions back.

    Raises:
        CallerError: `module` is not a module.
        LayoutMismatch: No parameter is trainable, or a lazy parameter has no shape yet.
        BufferRefused: A parameter's gradients are not supported (float64, complex, sparse, DTensor). A parameter on the
            "meta" device has a layout, but its gradients cannot be added.

    Example::

        engine = GradientEngine(layout_of(model), max_norm=1.0)
    """
    return GradientLayout.of(shapes_in_memory(module))


def gradients_of(module: Parameters, *, allocate: bool = False) -> dict[str, torch.Tensor | None]:
    """Return a module's gradients by name, without a copy, for `engine.add` or for `engine.step(out=...)`.

    Args:
        module: The module, whose trainable parameters are used.
        allocate: Set a missing `.grad` to zeros of the parameter's `grad_dtype`. Destinations need this, because
            `engine.step(out=...)` skips a None even if other micro-batches of the window used the parameter. A
            parameter that no micro-batch used then has zeros, so that AdamW decays it unless you call `drop_unused`.

    Returns:
        Name -> `.grad` of each trainable parameter, in the order and shape of `layout_of`. The value is the tensor
        itself if the parameter is contiguous, and otherwise a view. It is None, which `engine.add` counts as zero, if
        there is no gradient.

    Raises:
        BufferRefused: A gradient was returned before and not cleared since, so that backward added to it. On a GPU this
            check waits for the device if it must check whether the gradient is zero.

    Example::

        for tokens, batch in micro_batches:
            model.zero_grad()
            loss_of(model, batch).backward()
            engine.add(gradients_of(model), weight=tokens)
        engine.step(out=gradients_of(model, allocate=True))
        optimizer.step()
    """
    parameters, allocate = trainable(module), truth_value("allocate", allocate)
    for parameter in parameters.values():
        if allocate and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype_of(parameter))
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    _refuse_uncleared(gradients)
    found = {name: memory_order(parameter) for name, parameter in parameters.items() if not parameter.is_contiguous()}
    orders = {name: order for name, order in found.items() if order is not None}
    for name, order in orders.items():
        gradient = gradients[name]
        gradients[name] = None if gradient is None else gradient.permute(order)
    return NamedArrays(gradients, orders)


def tensors_of(module: Parameters, gradients: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a step's gradients, without a copy, as tensors with the parameters' shapes and strides.

    Args:
        module: The module that the engine's layout was made from, by `layout_of`. Its parameters may have any dtype.
        gradients: `result.gradients`, or a deferred step's `result.sums`. They are valid until the next `engine.add`.

    Returns:
        Name -> tensor for each trainable parameter. Each is a float32 view on the gradients' device.

    Raises:
        LayoutMismatch: The gradients do not fit this module's layout, or the module's memory format has changed.

    Example::

        for name, gradient in tensors_of(model, engine.step().gradients).items():
            masters[name].grad = gradient  # fp32 master weights of a bf16 model
    """
    refuse_other_kind("gradients", gradients, Mapping, do="pass result.gradients")
    return {name: view_for(parameter, name, gradients) for name, parameter in trainable(module).items()}


def give_gradients(module: Parameters, result: StepResult, *, zero_unused: bool = False) -> None:
    """Set each trainable parameter's `.grad` to a view of a step's result, without a copy.

    The parameters are fp32, or in torch >= 2.10 of any dtype with a `grad_dtype` of float32 or None. The views are
    valid until the next `engine.add`. Call `module.zero_grad()` before the next backward, because backward would add to
    the engine's memory. A parameter that no micro-batch of any rank used gets None, as in torch, so that AdamW does
    not decay it. After an error no `.grad` was set.

    Args:
        module: The module that the engine's layout was made from, by `layout_of`.
        result: The result of `engine.step()`. For a deferred result use `step_fused`.
        zero_unused: Give unused parameters zeros, for an optimizer that should decay them or needs every gradient.

    Raises:
        BufferRefused: A parameter accepts no fp32 gradient, or is on a different device.
        LayoutMismatch: The result does not fit this module's layout.
        CallerError: The engine has been called since, or the step was deferred.

    Example::

        give_gradients(model, engine.step())
        optimizer.step()
        model.zero_grad()
    """
    refuse_stale(result)
    give(module, result.gradients, frozenset() if truth_value("zero_unused", zero_unused) else result.unused)


def drop_unused(module: Parameters, result: StepResult) -> None:
    """Set `.grad` to None for each parameter that no micro-batch of any rank used, as in torch.

    A step that writes into `.grad` leaves zeros for such a parameter. `give_gradients` needs no `drop_unused`. After an
    error no `.grad` was changed.

    Args:
        module: The module that the engine's layout was made from, by `layout_of`.
        result: The result of `engine.step(out=gradients_of(module, allocate=True))`.

    Raises:
        LayoutMismatch: The result does not fit this module's layout.
        CallerError: The engine has been called since, so that an unused parameter may have a gradient now.

    Example::

        drop_unused(model, engine.step(out=gradients_of(model, allocate=True)))
        optimizer.step()
    """
    refuse_stale(result)
    parameters = trainable(module)
    unknown = sorted(result.unused - parameters.keys())
    if unknown:
        what = f"component '{unknown[0]}'{and_more(unknown)} is not a parameter of this module"
        raise LayoutMismatch(what, do="pass the module of the engine's layout")
    for name in result.unused:
        parameters[name].grad = None


def _refuse_uncleared(gradients: Mapping[str, torch.Tensor | None]) -> None:
    """Raise `BufferRefused` for a gradient that was not cleared since the last call, and otherwise note its version.

    Backward adds to an existing `.grad` by one in-place change, and clearing it in place is a second one. So if any
    gradient changed twice, all were cleared. If none did, a gradient that changed once was not cleared, unless it is
    zero. In that case it was cleared and no backward reached it.
    """
    counted = {name: g for name, g in gradients.items() if g is not None and not g.is_inference()}
    changes = {name: g._version - getattr(g, TAKEN, g._version) for name, g in counted.items()}
    if max(changes.values(), default=0) == 1:
        for name, count in changes.items():
            if count == 1 and not _fills_flat_buffer(counted[name]) and counted[name].any():
                what = f"parameter '{name}' was not cleared since an earlier micro-batch, and backward added to it"
                do = "discard() the window, and call zero_grad() before each backward"
                raise BufferRefused(what, do=do)
    for gradient in counted.values():
        setattr(gradient, TAKEN, gradient._version)


def _fills_flat_buffer(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is a view of a whole flat tensor, as is a DDP bucket of one parameter."""
    base = gradient._base
    return base is not None and base.ndim == 1 and base.numel() == gradient.numel()


# ---- for the other files ----


def in_memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its dimensions permuted to the memory order of `like`."""
    order = memory_order(like)
    return tensor if order is None else tensor.permute(order)


def grad_dtype_of(parameter: torch.nn.Parameter) -> torch.dtype | None:
    """Return the dtype that a parameter's gradient must have, or None for any."""
    found: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)  # older torch has no grad_dtype
    return found


def view_for(parameter: torch.nn.Parameter, name: str, gradients: Mapping[str, Any]) -> torch.Tensor:
    """Return the gradient of that name with the parameter's shape and strides."""
    order = memory_order(parameter)
    ordered = parameter if order is None else parameter.permute(order)
    view = from_dlpack(gradients[name]) if name in gradients else None
    if view is None or view.shape != ordered.shape:
        raise LayoutMismatch(
            f"the result has no gradient for parameter '{name}'",
            got="none" if view is None else tuple(view.shape),
            expected=f"shape {tuple(ordered.shape)}",
            do="build the engine with layout_of(module), and step it without out=",
        )
    if isinstance(gradients, NamedArrays):
        refuse_other_order(name, order, gradients.orders.get(name))
    return view if order is None else view.permute([order.index(d) for d in range(view.ndim)])


def give(module: Parameters, gradients: Mapping[str, Any], unused: AbstractSet[str]) -> None:
    """Set each parameter's `.grad` to a view of its gradient, or to None if unused. After an error none is set."""
    parameters, views = trainable(module), tensors_of(module, gradients)
    for name, view in views.items():
        parameter, do = parameters[name], "use engine.step(out=gradients_of(module, allocate=True)), which rounds"
        if (taken := grad_dtype_of(parameter)) not in (None, view.dtype):
            what = f"the gradient of parameter '{name}' has the wrong dtype"
            raise BufferRefused(what, got=view.dtype, expected=taken, do=do)
        if view.device != parameter.device:
            what = f"parameter '{name}' is not on the engine's device"
            raise BufferRefused(what, got=parameter.device, expected=view.device)
    for name, parameter in parameters.items():
        parameter.grad = None if name in unused else views[name]


def as_tensor(number: Any) -> torch.Tensor:
    """Return a scalar of a result as a 0-d tensor, on a GPU without a copy or a wait."""
    if device_of(number) == "cpu":
        return torch.tensor(float(number), dtype=torch.float64, device="cpu")
    return from_dlpack(number)


def refuse_stale(result: StepResult) -> None:
    """Raise `CallerError` if the engine has been called since the step."""
    refuse_other_kind("result", result, StepResult, do="pass what engine.step() returned")
    if not result.is_current:
        what = f"the result of step {result.step} is out of date, because the engine was called after that step"
        raise CallerError(what, do="use each result before the engine is called again")
