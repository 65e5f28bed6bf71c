"""`main_grad`: each parameter's part of the arena, for layers whose GEMM adds the weight's gradient there itself.

The contract is that of Megatron-LM and TransformerEngine (`gradient_accumulation_fusion`, `fuse_wgrad_accumulation`).
Such a layer adds to `weight.main_grad` in backward, sets `weight.grad_added_to_main_grad`, and returns a gradient that
holds nothing. If the weight has `zero_out_wgrad`, that gradient is 0 plus what other uses of the weight gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from gradengine.errors import CallerError
from gradengine.torch.gradients import view_for


@final
class MainGrads:
    """The attributes of parameters that such layers look for; `remove()` deletes them."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], arena: Mapping[str, Any]) -> None:
        self._parameters: dict[str, Any] = dict(parameters)
        for name, parameter in parameters.items():
            if hasattr(parameter, "main_grad"):
                do = "attach without main_grad=True, or delete the attribute"
                raise CallerError(f"parameter '{name}' has a main_grad already, of another owner", do=do)
        for name, parameter in self._parameters.items():
            parameter.main_grad = view_for(parameter, name, arena)
            parameter.grad_added_to_main_grad = False

    def take_stray(self) -> str | None:
        """The first parameter to which a layer has added since its hook last looked; none is marked afterwards."""
        stray = [name for name, parameter in self._parameters.items() if takes_added(parameter)]
        return stray[0] if stray else None

    def remove(self) -> None:
        """Delete the attributes."""
        for parameter in self._parameters.values():
            vars(parameter).pop("main_grad", None)
            vars(parameter).pop("grad_added_to_main_grad", None)


def takes_added(parameter: Any) -> bool:
    """Whether the parameter's layer has added to its `main_grad` since this was asked last."""
    is_added, parameter.grad_added_to_main_grad = bool(parameter.grad_added_to_main_grad), False
    return is_added
