"""Flattening of nested containers, a torch module or a list of its parameters into named components.

A component's name is its path, joined by dots. torch is used if the program has loaded it, and never imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from gradengine.arguments import said
from gradengine.arrays.dtypes import DTYPES, dtype_name, unsupported_dtype
from gradengine.arrays.frameworks import refuse_distributed
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch
from gradengine.layout.slots import Order, Slot

_DIMENSION = (int, np.generic)  # NumPy's numbers also have a `shape`


def named_components(given: Any) -> list[tuple[str, Any]]:
    """Return pairs of a component's name and its array or shape, from the argument of `GradientLayout.of`.

    Raises `LayoutMismatch` for anything else, `BufferRefused` for unsupported gradients.

    >>> named_components({"encoder": [{"w": (2, 3)}, {"w": (3,)}], "head": (5,)})
    [('encoder.0.w', (2, 3)), ('encoder.1.w', (3,)), ('head', (5,))]
    """
    if hasattr(given, "named_parameters"):
        return list(shapes_in_memory(given).items())
    if isinstance(given, (str, bytes)) or hasattr(given, "shape") or not isinstance(given, Iterable):
        raise LayoutMismatch(
            "a layout is made of several arrays or shapes",
            got=type(given).__name__,
            expected="a mapping by name, a sequence, or a torch.nn.Module",
            do="pass one array as [array]",
        )
    return list(_leaves(given, ""))


def is_nested(value: object) -> bool:
    """Return whether this is a container of components, a mapping or a list that holds more than dimensions.

    >>> is_nested({}), is_nested([np.zeros(2)]), is_nested((2, 3))
    (True, True, False)
    """
    if not isinstance(value, (list, tuple)):
        return isinstance(value, Mapping)
    items = [item for item in value if not isinstance(item, _DIMENSION)]
    return any(item is None or isinstance(item, (list, tuple, Mapping)) or hasattr(item, "shape") for item in items)


def shapes_in_memory(module: Any) -> dict[str, Slot]:
    """Return the shapes of the trainable parameters, all checked, with their dimensions in memory order.

    Raises `LayoutMismatch` if nothing is trainable.
    """
    parameters = trainable(module)
    if not parameters:
        raise LayoutMismatch(
            "a layout needs at least one component, and nothing here requires a gradient",
            got=f"0 of {sum(1 for _ in _named_parameters(module))} parameters",
            expected="a parameter with requires_grad=True",
            do="call .requires_grad_(True) on the parameters to train, then make the layout",
        )
    for name, parameter in parameters.items():
        refuse_unsupported(name, parameter)
    orders = {name: memory_order(parameter) for name, parameter in parameters.items()}
    return {
        name: Slot(name, tuple(parameter.shape[d] for d in orders[name] or range(parameter.ndim)), order=orders[name])
        for name, parameter in parameters.items()
    }


def refuse_unsupported(name: str, array: Any) -> None:
    """Raise `BufferRefused` for an array or parameter whose gradients have an unsupported dtype, are sparse or DTensor.

    For a torch parameter the dtype of its gradients is `grad_dtype`, which may differ from its dtype.
    """
    refuse_distributed(name, array)
    torch: Any = sys.modules.get("torch")
    is_tensor = isinstance(array, getattr(torch, "Tensor", ()))
    if is_tensor and array.layout is not torch.strided:
        raise BufferRefused(f"component '{name}' is sparse", got=str(array.layout), do="make it dense")
    dtype = getattr(array, "grad_dtype", array.dtype) if hasattr(array, "dtype") else None  # None allows any dtype
    if dtype is not None and dtype_name(dtype) not in DTYPES:
        raise unsupported_dtype(name, dtype)


def trainable(module: Any) -> dict[str, Any]:
    """Return the trainable parameters of a torch module by name, tied ones once, or those of a list by position.

    Raises `CallerError` for other types, `LayoutMismatch` if a lazy parameter has no shape yet.
    """
    parameters = {name: p for name, p in _named_parameters(module) if p.requires_grad}
    for name, parameter in parameters.items():
        if sys.modules["torch"].nn.parameter.is_lazy(parameter):
            what, got = f"parameter '{name}' has no shape yet", type(parameter).__name__
            raise LayoutMismatch(what, got=got, do="call the module once to make its lazy parameters")
    return parameters


def memory_order(tensor: Any) -> Order | None:
    """Return the permutation that makes a torch tensor contiguous, or None if it is contiguous or has gaps."""
    if tensor.layout is not sys.modules["torch"].strided or tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def _named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    torch, is_module = sys.modules.get("torch"), hasattr(module, "named_parameters")
    if is_module:
        pairs, kind = module.named_parameters(), getattr(torch, "Tensor", ())
    else:  # items of other collections are rejected in the loop below
        is_list = isinstance(module, Iterable) and not hasattr(module, "shape")
        pairs = enumerate(module if is_list else [None])
        kind = getattr(getattr(torch, "nn", None), "Parameter", ())
    for name, parameter in pairs:
        if not isinstance(parameter, kind):
            expected = "torch.nn.Module, or a list of its parameters"
            do = "pass dict(module.named_parameters()) to GradientLayout.of" if is_module else None
            raise CallerError("not a torch module", got=type(module).__name__, expected=expected, do=do)
        yield str(name), parameter


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    pairs: Iterable[tuple[Any, Any]] = (
        value.items() if isinstance(value, Mapping) else ((str(i), item) for i, item in enumerate(value))
    )
    for key, item in pairs:
        if not isinstance(key, str):
            raise LayoutMismatch("a component's name is not text", got=said(key), expected="a string")
        if is_nested(item):
            yield from _leaves(item, f"{path}{key}.")
        else:
            yield f"{path}{key}", item
