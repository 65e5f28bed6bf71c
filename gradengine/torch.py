"""torch interface: `clip_grad_norm_` with torch's signature, and a module's gradients into and out of an engine.

The only file that imports torch, and not imported by any other: `from gradengine.torch import ...`. On a GPU the
engine's work waits for torch's current stream, and that stream for the engine's.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from gradengine.accumulate.gradients import and_more
from gradengine.arguments import as_float, as_text, has, refuse_other_kind, said, truth_value
from gradengine.arrays.device import device_of
from gradengine.clip import checked_max_norm, clip_by_global_norm
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch, NonFiniteGradient
from gradengine.kernels import kernels_for
from gradengine.layout import GradientLayout
from gradengine.layout.components import memory_order, shapes_in_memory, trainable
from gradengine.result import StepResult

Parameters: TypeAlias = torch.nn.Module | Iterable[torch.nn.Parameter]

__all__ = ["clip_grad_norm_", "drop_unused", "give_gradients", "gradients_of", "layout_of", "step_fused", "tensors_of"]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,  # noqa: ARG001  (torch's signature)
) -> torch.Tensor:
    """Scale the parameters' gradients in place so that their global norm is at most `max_norm`.

    A replacement of `torch.nn.utils.clip_grad_norm_` with these differences:

    - The norm is computed in fp64 where fp32 would lose precision, and returned as float32; torch's has the gradients'
      dtype. A norm too large for float32 is returned as Inf, and clipped by its true value.
    - The scale is min(1, max_norm / norm), without torch's epsilon of 1e-6. Each element is multiplied once in fp32
      and rounded once. Nothing is written if the norm is within the bound.
    - A norm that is NaN or Inf scales nothing, where torch would multiply every gradient by NaN or 0.
    - A `max_norm` that is 0, negative or NaN, a norm other than the second, a parameter that is listed twice (torch
      would count and scale its gradient twice), float64 and complex gradients, and gradients on several devices are
      refused.

    Args:
        parameters: A tensor, or any iterable of them; those without `.grad` are skipped. Gradients are fp32, fp16 or
            bf16, also mixed, on one device, dense in any order of their dimensions (channels_last, transposed).
        max_norm: The bound, above 0; None clips nothing. torch takes 0, and makes each gradient zero.
        norm_type: 2, the only one.
        error_if_nonfinite: Raise where the norm is NaN or Inf. On a GPU a wait for the device, as torch's is.
        foreach: Ignored: all gradients are always clipped together.

    Returns:
        The norm before clipping, a 0-d float32 tensor on the gradients' device; 0 on the CPU if there are none. On a
        GPU the host does not wait, except in the first call with gradients of these sizes.

    Raises:
        BufferRefused: A gradient has gaps in memory, is sparse, of another dtype, device or tensor class, or shares
            memory with another; it is named by its position: "parameters[3].grad".
        CallerError: `max_norm`, `norm_type` or `parameters` is not as above.
        DeviceUnavailable: The device is a GPU, and what it needs is missing.
        NonFiniteGradient: NaN or Inf, with `error_if_nonfinite`: names the first gradient, index and value. A
            RuntimeError too, which is what torch raises. Nothing has been written.

    Example::

        loss.backward()
        norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    """
    if as_text(norm_type) not in {"2", "2.0"} and as_float(norm_type) != 2:
        do = "use torch.nn.utils.clip_grad_norm_ for it"
        raise CallerError("norm_type is not supported", got=said(norm_type), expected="2", do=do)
    bound, must_be_finite = checked_max_norm(max_norm), truth_value("error_if_nonfinite", error_if_nonfinite)
    gradients = _gradients_by_position(parameters)
    if not gradients:
        return torch.tensor(0.0)
    norm = _clip(gradients, bound)
    if must_be_finite and not torch.isfinite(norm):
        raise _first_non_finite(gradients)
    return norm.to(torch.float32)


def layout_of(module: Parameters) -> GradientLayout:
    """The layout of a module's trainable parameters, in the order of `named_parameters()`; tied ones come once.

    For a module it is `GradientLayout.of(module)`. Instead of a module every function here takes a list of parameters,
    which are named by their position.

    The dimensions of a dense parameter that is not contiguous (channels_last, transposed) are in memory order: so it is
    accumulated, exchanged and handed back, which does not show where a transposed weight is square. `tensors_of`
    permutes it back.

    Raises:
        CallerError: It is not a module.
        LayoutMismatch: Nothing in it is trainable, or a lazy parameter has no shape yet.
        BufferRefused: A parameter's gradients are not supported: float64, complex, sparse, a DTensor. One on the "meta"
            device has a layout, but no gradients that could be added.

    Example::

        engine = GradientEngine(layout_of(model), max_norm=1.0)
    """
    return GradientLayout.of(shapes_in_memory(module))


def gradients_of(module: Parameters, *, allocate: bool = False) -> dict[str, torch.Tensor | None]:
    """A module's gradients by name, as `engine.add` takes them and `engine.step(out=...)` writes them; no copy.

    Args:
        module: The module, of which the trainable parameters are used.
        allocate: Give a parameter without `.grad` one of zeros, of its `grad_dtype`. Destinations need it:
            `engine.step(out=...)` skips a None, though other micro-batches of the window may have used the parameter.
            One unused in the whole window has zeros then, which AdamW decays: `drop_unused` removes them.

    Returns:
        Name -> `.grad` of each trainable parameter, in `layout_of`'s order and shape: the tensor itself where the
        parameter is contiguous, else a view; None where there is none, which `engine.add` counts as zero.

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
            # Older torch has no grad_dtype; None means any.
            parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        gradient = gradients[name]
        if gradient is not None and not parameter.is_contiguous():
            gradients[name] = _in_memory_order(gradient, parameter)
    return gradients


def tensors_of(module: Parameters, gradients: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A step's gradients as tensors with the parameters' own shapes and strides; no copy.

    Args:
        module: The module of the engine's layout, by `layout_of`; its parameters may have any dtype.
        gradients: `result.gradients`, or a deferred step's `result.sums`; good until the next `engine.add`.

    Returns:
        Name -> tensor for each trainable parameter: a view with the gradients' dtype (float32) and on their device.

    Raises:
        LayoutMismatch: They do not belong to this module's layout.

    Example::

        for name, gradient in tensors_of(model, engine.step().gradients).items():
            masters[name].grad = gradient  # fp32 master weights of a bf16 model
    """
    return {name: _view_for(parameter, name, gradients) for name, parameter in trainable(module).items()}


def give_gradients(module: Parameters, result: StepResult, *, zero_unused: bool = False) -> None:
    """Make each trainable parameter's `.grad` a view of a step's result; no copy.

    For fp32 parameters, and in torch >= 2.10 for others whose `grad_dtype` is float32 or None. Good until the next
    `engine.add`. Call `module.zero_grad()` before the next backward, which would add to the engine's memory. Parameters
    that no micro-batch of any worker used are left without a gradient, as torch leaves them, so that AdamW does not
    decay them. Where it raises nothing was set.

    Args:
        module: The module of the engine's layout, by `layout_of`.
        result: From `engine.step()`. A deferred one is for `step_fused`.
        zero_unused: Give unused parameters zeros, for an optimizer that should decay them or needs every gradient.

    Raises:
        BufferRefused: A parameter takes no fp32, or lies on another device.
        LayoutMismatch: The result is not of this module's layout.
        CallerError: The engine has been called since, or the step was deferred: it left a sum.

    Example::

        give_gradients(model, engine.step())
        optimizer.step()
        model.zero_grad()
    """
    _refuse_stale(result)
    _give(module, result.gradients, frozenset() if truth_value("zero_unused", zero_unused) else result.unused)


def drop_unused(module: Parameters, result: StepResult) -> None:
    """Set `.grad` to None where no micro-batch of any worker used the parameter, as torch leaves it.

    For gradients that a step wrote into `.grad`, zeros where unused; `give_gradients` does this by itself. Where it
    raises nothing was dropped.

    Args:
        module: The module of the engine's layout, by `layout_of`.
        result: From `engine.step(out=gradients_of(module, allocate=True))`.

    Raises:
        LayoutMismatch: The result is not of this module's layout.
        CallerError: The engine has been called since: what was unused may have a gradient by now.

    Example::

        drop_unused(model, engine.step(out=gradients_of(model, allocate=True)))
        optimizer.step()
    """
    _refuse_stale(result)
    parameters = trainable(module)
    unknown = sorted(result.unused - parameters.keys())
    if unknown:
        what = f"component '{unknown[0]}'{and_more(unknown)} is not a parameter of this module"
        raise LayoutMismatch(what, do="pass the module of the engine's layout")
    for name in result.unused:
        parameters[name].grad = None


def step_fused(optimizer: torch.optim.Optimizer, result: StepResult, module: Parameters) -> None:
    """Step an optimizer that was built with `fused=True` on a deferred result: it averages, clips and skips by itself.

    Each parameter's `.grad` becomes a view of the result's sum; those that no micro-batch used have none. torch divides
    it by `result.inverse_factor` as it reads it, writes the quotient back, and changes neither parameters nor state if
    `result.skipped` is set. On a GPU it reads both from the engine's memory, and the host does not wait, except for the
    first step that is not skipped of an SGD with momentum and dampening. Call `module.zero_grad()` before the next
    backward. Where it raises nothing was done.

    Args:
        optimizer: torch's Adam, AdamW, SGD or Adagrad, built with `fused=True`.
        result: From `engine.step(deferred=True)`.
        module: The module of the engine's layout, by `layout_of`; the optimizer's parameters are its own.

    Raises:
        BufferRefused: A parameter takes no fp32 or lies on another device, or the optimizer has one with a gradient
            that is not the module's.
        LayoutMismatch: The result is not of this module's layout.
        CallerError: The optimizer is not fused, or none of its parameters is the module's, or the result is not
            deferred, or the engine has been called since.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ...
        step_fused(optimizer, engine.step(deferred=True), model)
        model.zero_grad()
    """
    _refuse_not_fused(optimizer)
    _refuse_stale(result)
    before = {parameter: parameter.grad for parameter in trainable(module).values()}
    _give(module, result.sums, result.unused)
    try:
        _refuse_other_gradients(optimizer, result, before)
        _step_scaled(optimizer, result)
    except BaseException:
        for parameter, gradient in before.items():  # a sum that is left would be the next optimizer's gradient
            parameter.grad = gradient
        raise


class _NonFiniteNorm(NonFiniteGradient, RuntimeError):
    """Raised outside of any step or window; a RuntimeError too, since that is what code written for torch catches."""

    def __init__(self, component: str, index: int, value: float, **place: Any) -> None:
        super().__init__(component, index, value, **{"step": 0, **place})
        self.what = f"the gradients' norm is not finite: '{component}' at index {index}"
        self.do = "nothing was clipped; leave out this step, or pass error_if_nonfinite=False"


# ---- clipping ----


def _gradients_by_position(parameters: object) -> dict[str, torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        given: Iterable[object] = [parameters]
    elif isinstance(parameters, Iterable) and not hasattr(parameters, "shape"):  # a shape: another framework's array
        given = parameters
    else:
        raise _not_parameters("parameters is neither a tensor nor an iterable of tensors", parameters)
    gradients, position = {}, -1
    for position, parameter in enumerate(given):
        if not isinstance(parameter, torch.Tensor):
            raise _not_parameters(f"parameters[{position}] is not a tensor", parameter)
        gradient = parameter.grad
        if gradient is not None:
            gradients[f"parameters[{position}].grad"] = gradient
    if position < 0 and isinstance(parameters, Generator):
        warnings.warn("parameters is a generator with nothing left in it: nothing is clipped", stacklevel=3)
    return gradients


def _not_parameters(what: str, given: object) -> CallerError:
    return CallerError(what, got=type(given).__name__, do="pass module.parameters()")


def _clip(gradients: Mapping[str, torch.Tensor], bound: float) -> torch.Tensor:
    """Clip the gradients; the norm in fp64, on their device."""
    device = next(iter(gradients.values())).device
    views = {
        name: g
        if type(g) is torch.Tensor and not g.requires_grad and g.layout is torch.strided and g.is_contiguous()
        else _plain(g, name)
        for name, g in gradients.items()
    }
    # On torch's current stream the kernels run between torch's work before and after, without events.
    with kernels_for(str(device)).device.on(torch.cuda.current_stream(device) if device.type == "cuda" else None):
        return _as_tensor(clip_by_global_norm(views, bound))


def _plain(gradient: torch.Tensor, name: str) -> torch.Tensor:
    """The detached gradient, its dimensions in memory order."""
    plain = gradient.detach()
    if type(plain) is not torch.Tensor:
        what = f"component '{name}' is a tensor subclass, whose memory may not hold its values"
        do = "use torch.nn.utils.clip_grad_norm_ for it"
        raise BufferRefused(what, got=type(plain).__name__, expected="torch.Tensor", do=do)
    return _in_memory_order(plain, plain)


def _first_non_finite(gradients: Mapping[str, torch.Tensor]) -> NonFiniteGradient:
    for name, gradient in gradients.items():
        found = torch.isfinite(gradient).logical_not().flatten().nonzero()
        if len(found):
            index = int(found[0])
            return _NonFiniteNorm(name, index, float(gradient.flatten()[index]))
    raise AssertionError("a norm that is not finite has a gradient that is not")


# ---- memory ----


def _in_memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor with its dimensions permuted to the memory order of `like`."""
    order = memory_order(like)
    return tensor if order is None else tensor.permute(order)


def _view_for(parameter: torch.nn.Parameter, name: str, gradients: Mapping[str, Any]) -> torch.Tensor:
    """The gradient of that name with the parameter's shape and strides."""
    refuse_other_kind("gradients", gradients, Mapping, do="pass result.gradients")
    ordered = _in_memory_order(parameter, parameter)
    view = from_dlpack(gradients[name]) if name in gradients else None
    if view is None or view.shape != ordered.shape:
        raise LayoutMismatch(
            f"the result has no gradient for parameter '{name}'",
            got="none" if view is None else tuple(view.shape),
            expected=f"shape {tuple(ordered.shape)}",
            do="build the engine with layout_of(module), and step it without out=",
        )
    order = memory_order(parameter)
    return view if order is None else view.permute([order.index(d) for d in range(view.ndim)])


def _give(module: Parameters, gradients: Mapping[str, Any], unused: AbstractSet[str]) -> None:
    parameters, views = trainable(module), tensors_of(module, gradients)
    for name, view in views.items():
        _refuse_as_gradient(view, parameters[name], name)
    for name, parameter in parameters.items():
        parameter.grad = None if name in unused else views[name]


def _refuse_as_gradient(view: torch.Tensor, parameter: torch.nn.Parameter, name: str) -> None:
    taken = getattr(parameter, "grad_dtype", parameter.dtype)  # None: any
    if taken not in (None, view.dtype):
        do = "use engine.step(out=gradients_of(module, allocate=True)), which rounds to the parameter's dtype"
        raise BufferRefused(
            f"parameter '{name}' takes gradients of another dtype", got=view.dtype, expected=taken, do=do
        )
    if view.device != parameter.device:
        what = f"parameter '{name}' is on another device than the engine"
        raise BufferRefused(what, got=parameter.device, expected=view.device)


def _as_tensor(number: Any) -> torch.Tensor:
    """A scalar of a result as a 0-d tensor, on a GPU without a copy or a wait."""
    if device_of(number) == "cpu":
        return torch.tensor(float(number), dtype=torch.float64)
    return from_dlpack(number)


# ---- optimizers ----


def _refuse_stale(result: StepResult) -> None:
    refuse_other_kind("result", result, StepResult, do="pass what engine.step() returned")
    if not result.is_current:
        raise CallerError(
            f"the result of step {result.step} is out of date",
            got="an add or a step of the engine since",
            do="use each result before the engine is called again",
        )


def _refuse_not_fused(optimizer: Any) -> None:
    takes_both = has(optimizer, "_step_supports_amp_scaling") and optimizer._step_supports_amp_scaling
    # A loaded state dict brings its own `fused` with it.
    if not (takes_both and all(group.get("fused", True) for group in optimizer.param_groups)):
        raise CallerError(
            "the optimizer cannot scale and skip by itself",
            got=f"{type(optimizer).__name__} that is not fused",
            expected="one of torch's fused optimizers",
            do="build it with fused=True, or use engine.step() without deferred, and optimizer.step()",
        )


def _refuse_other_gradients(
    optimizer: torch.optim.Optimizer, result: StepResult, own: Mapping[torch.nn.Parameter, Any]
) -> None:
    """Raise `BufferRefused` for gradients outside of the arena, which would be divided like the window's sum."""
    start, stop = _extent(result.sums.values())
    parameters = {(g, i): p for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])}
    for (group, index), parameter in parameters.items():
        if parameter.grad is not None and not _is_within(parameter.grad, start, stop):
            raise BufferRefused(
                f"param_groups[{group}]['params'][{index}] has a gradient that is not this result's",
                got=f"shape {tuple(parameter.shape)}",
                do="build the optimizer of this module's parameters; set the .grad of others to None",
            )
    if own.keys().isdisjoint(parameters.values()):
        raise CallerError("none of the optimizer's parameters is the module's", do="pass the module that it trains")


def _extent(arrays: Iterable[Any]) -> tuple[int, int]:
    """The address range of NumPy or CuPy arrays, by their own attributes: from_dlpack takes 10 us each."""
    places = [(a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr, a.nbytes) for a in arrays if a.size]
    return min((first for first, _ in places), default=0), max((first + size for first, size in places), default=0)


def _is_within(tensor: torch.Tensor, start: int, stop: int) -> bool:
    is_dense = tensor.layout is torch.strided
    return is_dense and (not tensor.numel() or start <= tensor.data_ptr() <= stop - tensor.nbytes)


def _step_scaled(optimizer: torch.optim.Optimizer, result: StepResult) -> None:
    without_momentum = _without_momentum(optimizer)
    scaled: Any = optimizer  # torch reads these two attributes without declaring them
    scaled.grad_scale = _as_tensor(result.inverse_factor).to(torch.float32)
    scaled.found_inf = found_inf = _as_tensor(result.skipped).to(torch.float32)
    try:
        optimizer.step()
    finally:
        del scaled.grad_scale, scaled.found_inf
    for parameter, dampening in without_momentum:
        if not dampening:  # 0 x momentum + gradient is what a first step stores
            optimizer.state[parameter]["momentum_buffer"].masked_fill_(found_inf > 0, 0)
        elif found_inf > 0:  # so that the next step is the first, which takes the gradient undampened; waits on a GPU
            del optimizer.state[parameter]["momentum_buffer"]


def _without_momentum(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, float]]:
    """Parameters for which SGD's next step allocates a momentum buffer, which a skipped one leaves uninitialised."""
    return [
        (parameter, group["dampening"])
        for group in optimizer.param_groups
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"]
        for parameter in group["params"]
        if parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
    ]
