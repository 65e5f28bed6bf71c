"""Ranges of a profiler around the engine's calls, if GRADENGINE_NVTX=1 is set when gradengine is imported."""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext

from gradengine.errors import DeviceUnavailable


def nvtx_range(name: str) -> AbstractContextManager[object]:
    """Return a context that is a range of this name in a profiler, or one that does nothing.

    Raises:
        DeviceUnavailable: GRADENGINE_NVTX=1 is set, and CuPy, which has NVTX, does not load.
    """
    if os.environ.get("GRADENGINE_NVTX") != "1":
        return nullcontext()
    try:
        profiler = importlib.import_module("cupyx.profiler")
    except ImportError as fault:
        what = f"GRADENGINE_NVTX=1 needs CuPy ({fault})"
        raise DeviceUnavailable(what, do="pip install 'gradengine[cuda12]', or unset it") from None
    context: AbstractContextManager[object] = profiler.time_range(name)
    return context
