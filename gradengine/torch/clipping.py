"""`clip_grad_norm_` with torch's signature, and a norm that is right in every dtype."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping

import torch

from gradengine.arguments import iterated, said, truth_value
from gradengine.clip import checked_max_norm, clip_by_global_norm
from gradengine.errors import BufferRefused, CallerError, NonFiniteGradient
from gradengine.kernels import kernels_for
from gradengine.torch.gradients import as_tensor, in_memory_order


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,  # noqa: ARG001  (torch's signature)
) -> torch.Tensor:
    """Scale the parameters' gradients in place so that their global norm is at most `max_norm`.

    Replaces `torch.nn.utils.clip_grad_norm_`, with these differences:

    - The norm is computed in fp64 if fp32 would lose precision, and returned as float32. torch's norm has the
      gradients' dtype. A norm too large for float32 is returned as Inf, and clipped by its true value.
    - The scale is min(1, max_norm / norm), without torch's epsilon of 1e-6. Each element is multiplied once in fp32
      and rounded once. Nothing is written if the norm is within the bound.
    - A norm that is NaN or Inf scales nothing. torch would multiply every gradient by NaN or 0.
    - A `max_norm` that is 0, negative or NaN and a norm other than the second raise an error, as do float64 and complex
      gradients, gradients on several devices, and a parameter that is listed twice, which torch would scale twice.

    Args:
        parameters: A tensor, or any iterable of tensors. Those without `.grad` are skipped. Gradients are fp32, fp16 or
            bf16, also mixed, on one device, dense in any order of their dimensions (channels_last, transposed).
        max_norm: The bound, above 0. None clips nothing. torch accepts 0, and makes each gradient zero.
        norm_type: 2, the only supported norm.
        error_if_nonfinite: Raise if the norm is NaN or Inf. On a GPU this waits for the device, as in torch.
        foreach: Ignored, because all gradients are always clipped together.

    Returns:
        The norm before clipping, a 0-d float32 tensor on the gradients' device, or 0 on the CPU without gradients. On a
        GPU the host does not wait, except in the first call with gradients of these sizes.

    Raises:
        BufferRefused: A gradient has gaps in memory, is sparse, has the wrong dtype, device or tensor class, or shares
            memory with another. The message names its position, such as "parameters[3].grad".
        CallerError: `max_norm`, `norm_type` or `parameters` is not as above.
        DeviceUnavailable: The device is a GPU, and software that it needs is missing.
        NonFiniteGradient: The norm is NaN or Inf, with `error_if_nonfinite`. The message names the first gradient,
            index and value. It is also a RuntimeError, the class that torch raises. Nothing has been written.

    Example::

        loss.backward()
        norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    """
    if str(norm_type) not in {"2", "2.0"}:
        do = "use torch.nn.utils.clip_grad_norm_ for it"
        raise CallerError("norm_type is not supported", got=said(norm_type), expected="2", do=do)
    bound, must_be_finite = checked_max_norm(max_norm), truth_value("error_if_nonfinite", error_if_nonfinite)
    gradients = _gradients_by_position(parameters)
    if not gradients:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    norm = _clip(gradients, bound)
    if must_be_finite and not torch.isfinite(norm):
        raise _first_non_finite(gradients)
    return norm.to(torch.float32)


def _gradients_by_position(parameters: object) -> dict[str, torch.Tensor]:
    given = [parameters] if isinstance(parameters, torch.Tensor) else iterated("parameters", parameters)
    gradients, position = {}, -1
    for position, parameter in enumerate(given):
        if not isinstance(parameter, torch.Tensor):
            got, do = type(parameter).__name__, "pass module.parameters()"
            raise CallerError(f"parameters[{position}] is not a tensor", got=got, do=do)
        gradient = parameter.grad
        if gradient is not None:
            gradients[f"parameters[{position}].grad"] = gradient
    if position < 0 and isinstance(parameters, Generator):
        warnings.warn("parameters is an exhausted generator, and nothing is clipped", stacklevel=3)
    return gradients


def _clip(gradients: Mapping[str, torch.Tensor], bound: float) -> torch.Tensor:
    """Clip the gradients, and return their norm in fp64 on their device."""
    device = next(iter(gradients.values())).device
    views = {name: _plain(gradient, name) for name, gradient in gradients.items()}
    # On torch's current stream the kernels run between torch's work before and after, without events.
    with kernels_for(str(device)).device.on(torch.cuda.current_stream(device) if device.type == "cuda" else None):
        return as_tensor(clip_by_global_norm(views, bound))


def _plain(gradient: torch.Tensor, name: str) -> torch.Tensor:
    """Return the gradient without its graph and with its dimensions in memory order."""
    plain = gradient.detach() if gradient.requires_grad else gradient
    if type(plain) is not torch.Tensor:
        what = f"component '{name}' is a tensor subclass, whose memory may not hold its values"
        do = "use torch.nn.utils.clip_grad_norm_ for it"
        raise BufferRefused(what, got=type(plain).__name__, expected="torch.Tensor", do=do)
    return in_memory_order(plain, plain)


def _first_non_finite(gradients: Mapping[str, torch.Tensor]) -> NonFiniteGradient:
    """Return the error that names the first element that is not finite."""
    bad = {name: ~torch.isfinite(gradient).flatten() for name, gradient in gradients.items()}
    name = next(name for name, elements in bad.items() if elements.any())
    index = int(bad[name].nonzero()[0])
    error = NonFiniteGradient(name, index, float(gradients[name].flatten()[index]), step=0)
    error.what = f"the gradients' norm is not finite: '{name}' at index {index}"
    error.do = "skip this step, or pass error_if_nonfinite=False"
    return error
