"""Ranges of a profiler around the engine's calls, if GRADENGINE_NVTX=1 is set when gradengine is imported."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


def in_range(method: _Method) -> _Method:
    """Make each call of this method a range in a profiler if GRADENGINE_NVTX=1. Otherwise return it unchanged.

    The first call raises `ImportError` if CuPy, which contains NVTX, does not load.
    """
    if os.environ.get("GRADENGINE_NVTX") != "1":
        return method

    @functools.wraps(method)
    def called(*given: Any, **named: Any) -> Any:
        profiler = importlib.import_module("cupyx.profiler")
        with profiler.time_range(f"gradengine.{method.__name__}"):
            return method(*given, **named)

    return cast("_Method", called)
