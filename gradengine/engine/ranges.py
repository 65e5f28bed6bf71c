"""Ranges of a profiler around the engine's calls, if GRADENGINE_NVTX=1 is set when gradengine is imported."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from gradengine.errors import DeviceUnavailable

_Method = TypeVar("_Method", bound=Callable[..., Any])


def in_range(method: _Method) -> _Method:
    """Make each call of this method a range in a profiler if GRADENGINE_NVTX=1; otherwise return it as it is.

    The first call raises `DeviceUnavailable` if CuPy, which has NVTX, does not load.
    """
    if os.environ.get("GRADENGINE_NVTX") != "1":
        return method

    @functools.wraps(method)
    def called(*given: Any, **named: Any) -> Any:
        try:
            profiler = importlib.import_module("cupyx.profiler")
        except ImportError as fault:
            do = "pip install 'gradengine[cuda13]', or unset it"
            raise DeviceUnavailable(f"GRADENGINE_NVTX=1 needs CuPy ({fault})", do=do) from None
        with profiler.time_range(f"gradengine.{method.__name__}"):
            return method(*given, **named)

    return cast("_Method", called)
