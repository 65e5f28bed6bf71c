"""The attribute `main_grad`, a parameter's part of the arena to which a layer's GEMM adds the weight's gradient.

The contract is that of Megatron-LM and TransformerEngine (`gradient_accumulation_fusion`, `fuse_wgrad_accumulation`).
Such a layer adds to `weight.main_grad` in backward, sets `weight.grad_added_to_main_grad`, and returns a gradient to
be ignored. If the weight has `zero_out_wgrad`, that gradient is 0 plus the contributions of the weight's other uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from gradengine.errors import CallerError
from gradengine.torch.gradients import view_for


@final
class MainGrads:
    """The attributes that such layers expect on parameters, until `remove()` deletes them."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], arena: Mapping[str, Any]) -> None:
        self._parameters: dict[str, Any] = dict(parameters)
        for name, parameter in parameters.items():
            if hasattr(parameter, "main_grad"):
                do = "attach without main_grad=True, or delete the attribute"
                raise CallerError(f"parameter '{name}' has a main_grad already", do=do)
        for name, parameter in self._parameters.items():
            parameter.main_grad = view_for(parameter, name, arena)
            parameter.grad_added_to_main_grad = False

    def take_stray(self) -> str | None:
        """Return the first parameter that a layer added to since its hook last checked, and clear all marks."""
        stray = [name for name, parameter in self._parameters.items() if takes_added(parameter)]
        return stray[0] if stray else None

    def remove(self) -> None:
        """Delete the attributes."""
        for parameter in self._parameters.values():
            vars(parameter).pop("main_grad", None)
            vars(parameter).pop("grad_added_to_main_grad", None)


def takes_added(parameter: Any) -> bool:
    """Return whether the parameter's layer has added to its `main_grad` since the last call, and clear the mark."""
    is_added, parameter.grad_added_to_main_grad = bool(parameter.grad_added_to_main_grad), False
    return is_added
