"""GRADENGINE_LOG: a line for each public call; GRADENGINE_NVTX: ranges; nothing at all where they are not set."""

import logging
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from ranks import on_ranks

import gradengine
from gradengine.engine.calls import RANGES, RANGES_VARIABLE, VARIABLE, log_calls, logged, mark_calls
from gradengine.engine.capture import CapturedWindow
from gradengine.errors import CallerError, DeviceUnavailable, WindowError

LOOP = """import numpy as np, gradengine
with gradengine.connect("tcp://127.0.0.1:0", 0, 1, token="hush hush hush hush") as exchange:
    engine = gradengine.GradientEngine(gradengine.GradientLayout.of({"w": (2, 3), "b": (4,)}), exchange=exchange)
    engine.add({"w": np.ones((2, 3), np.float32), "b": None}, weight=2.0)
    with engine.micro_batch() as micro_batch:
        micro_batch.add("b", np.ones(4, np.float16))
    engine.step()
"""


@pytest.mark.parametrize("level", ["1", "3"])
def test_each_public_call_has_a_line_with_shapes_at_level_3_and_no_secrets(level):
    environment = {**os.environ, VARIABLE: level}
    run = partial(subprocess.run, capture_output=True, text=True, timeout=120, check=True)
    done = run([sys.executable, "-c", LOOP], env=environment)
    lines = [re.sub(r"^.* gradengine: (.*) took \d+\.\d{3} ms", r"\1", line) for line in done.stderr.splitlines()]
    connected, added = "'tcp://127.0.0.1:0', 0, 1, token=...", "{w: float32[2, 3], b: None}, weight=2.0"
    assert (f"connect({connected})" in lines) == ("MicroBatch.add('b', float16[4])" in done.stderr) == (level == "3")
    assert f"rank 0, step 0: GradientEngine.add({added if level == '3' else '...'})" in lines
    assert any(line.startswith("rank 0: Exchange.close(") for line in lines)
    assert (done.stdout, "hush" in done.stderr) == ("", False)


def test_what_a_call_raises_is_said_and_raised(caplog):
    caplog.set_level(logging.INFO, "gradengine.engine.calls")
    with pytest.raises(ZeroDivisionError):
        logged(lambda value: 1 / 0, 3)([np.ones(1), None, object()])
    assert re.search(r"\(\[float64\[1\], None, object\]\) took .*, raised ZeroDivisionError", caplog.messages[0])


@pytest.fixture
def ranges(monkeypatch):
    """What was pushed and popped by calls of this test, as a CuPy of its own sees it."""
    seen = []
    for calls in RANGES.values():
        for kind, name in calls:
            monkeypatch.setattr(kind, name, vars(kind)[name])  # put back at the end
    cuda = ModuleType("cupy.cuda")
    cuda.nvtx = SimpleNamespace(RangePush=seen.append, RangePop=lambda: seen.append("end"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    return seen


LAYOUT = gradengine.GradientLayout.of({"layers.0.w": (2,), "b": (4,)})


def test_adds_steps_waits_and_replays_have_ranges_that_end_also_where_they_raise(ranges):
    def work(exchange):
        engine = gradengine.GradientEngine(LAYOUT, exchange=exchange)
        with pytest.raises(WindowError):
            engine.step()
        engine.add([np.ones(2, np.float32), None])
        engine.step()
        engine.add_block(0, {"w": np.ones(2, np.float32)})
        engine.add_non_block("b", np.ones(4, np.float32))
        with engine.micro_batch() as micro_batch:
            micro_batch.add("b", np.ones(4, np.float32))

    mark_calls({RANGES_VARIABLE: "1"})
    on_ranks(work, 2)
    with pytest.raises(WindowError):
        CapturedWindow(print, print).replay()
    counts = {"add": 8, "step": 4, "exchange": 2, "replay": 1}
    assert Counter(ranges) == {"end": 15, **{f"gradengine.{name}": count for name, count in counts.items()}}


def calls_of_ranges():
    return [vars(kind)[name] for calls in RANGES.values() for kind, name in calls]


@pytest.mark.parametrize("environment", [{}, *({VARIABLE: off, RANGES_VARIABLE: off} for off in ("", "0"))])
def test_nothing_is_wrapped_where_it_is_not_set(ranges, environment):
    names, before = {"connect": gradengine.connect}, calls_of_ranges()
    log_calls(names, environment)
    mark_calls(environment)
    assert names == {"connect": gradengine.connect}
    assert calls_of_ranges() == before


def test_other_values_are_refused_and_ranges_without_cupy(monkeypatch):
    for value in ("2", "-1", " 1"):
        with pytest.raises(CallerError, match=VARIABLE):
            log_calls({}, {VARIABLE: value})
        with pytest.raises(CallerError, match=RANGES_VARIABLE):
            mark_calls({RANGES_VARIABLE: value})
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(DeviceUnavailable):
        mark_calls({RANGES_VARIABLE: "1"})
