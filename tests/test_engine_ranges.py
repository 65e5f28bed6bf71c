"""GRADENGINE_NVTX: ranges around add, step and replay; CuPy is not asked where it is not set."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest

from gradengine.engine.ranges import nvtx_range
from gradengine.errors import DeviceUnavailable


@pytest.fixture
def seen(monkeypatch):
    """The names of the ranges that CuPy's stand-in was asked for, and "end" for each that ended."""
    seen, profiler = [], ModuleType("cupyx.profiler")

    @contextmanager
    def time_range(name):
        seen.append(name)
        try:
            yield
        finally:
            seen.append("end")

    profiler.time_range = time_range
    monkeypatch.setitem(sys.modules, "cupyx", ModuleType("cupyx"))
    monkeypatch.setitem(sys.modules, "cupyx.profiler", profiler)
    return seen


def test_a_range_ends_also_where_its_call_raises(seen, monkeypatch):
    monkeypatch.setenv("GRADENGINE_NVTX", "1")
    with pytest.raises(ZeroDivisionError), nvtx_range("gradengine.add"):
        _ = 1 / 0
    assert seen == ["gradengine.add", "end"]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_marked_where_it_is_not_set(seen, monkeypatch, value):
    monkeypatch.delenv("GRADENGINE_NVTX", raising=False)
    if value is not None:
        monkeypatch.setenv("GRADENGINE_NVTX", value)
    context = nvtx_range("gradengine.add")
    for _ in range(2):
        with context:
            pass
    assert seen == []


def test_it_needs_cupy(monkeypatch):
    monkeypatch.setenv("GRADENGINE_NVTX", "1")
    monkeypatch.setitem(sys.modules, "cupyx.profiler", None)
    with pytest.raises(DeviceUnavailable, match="GRADENGINE_NVTX=1 needs CuPy"):
        nvtx_range("gradengine.add")
