"""GRADENGINE_NVTX: ranges around add, step and replay; CuPy is not asked where it is not set."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest

from gradengine.engine.ranges import in_range


class Call:
    """An object with a method that raises what it is given."""

    def add(self, fault=None):
        if fault is not None:
            raise fault
        return "added"


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
    with pytest.raises(ZeroDivisionError):
        in_range(Call.add)(Call(), ZeroDivisionError())
    assert seen == ["gradengine.add", "end"]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_marked_where_it_is_not_set(seen, monkeypatch, value):
    monkeypatch.delenv("GRADENGINE_NVTX", raising=False)
    if value is not None:
        monkeypatch.setenv("GRADENGINE_NVTX", value)
    assert in_range(Call.add) is Call.add
    assert seen == []


def test_it_needs_cupy(monkeypatch):
    monkeypatch.setenv("GRADENGINE_NVTX", "1")
    monkeypatch.setitem(sys.modules, "cupyx.profiler", None)
    add = in_range(Call.add)
    with pytest.raises(ImportError, match="cupyx"):
        add(Call())
