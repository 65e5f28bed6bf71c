"""GRADENGINE_LOG: a line for each public call, and nothing at all where it is not set."""

import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import gradengine
from gradengine.calls import VARIABLE, log_calls, logged
from gradengine.errors import CallerError

LOOP = """
import numpy as np
import gradengine

with gradengine.connect("tcp://127.0.0.1:0", 0, 1, token="hush") as exchange:
    engine = gradengine.GradientEngine(gradengine.GradientLayout.of({"w": (2, 3), "b": (4,)}), exchange=exchange)
    engine.add({"w": np.ones((2, 3), np.float32), "b": None}, weight=2.0)
    engine.step()
"""


def lines_of(level):
    environment = {**os.environ, VARIABLE: level}
    loop = [sys.executable, "-c", LOOP]
    done = subprocess.run(loop, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""
    return [re.sub(r"^.* gradengine: (.*) took \d+\.\d{3} ms", r"\1", line) for line in done.stderr.splitlines()]


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "gradengine.calls")
    return lambda: [re.sub(r"\d+\.\d{3} ms", "1 ms", record.getMessage()) for record in caplog.records]


def test_calls_and_times_at_level_1():
    assert lines_of("1")[-3:] == [
        "rank 0, step 0: GradientEngine.add(...)",
        "rank 0, step 1: GradientEngine.step(...)",
        "rank 0: Exchange.close(...)",
    ]


def test_shapes_too_at_level_3_and_no_secrets():
    lines = lines_of("3")
    assert "connect('tcp://127.0.0.1:0', 0, 1, token=...)" in lines
    assert "rank 0, step 0: GradientEngine.add({w: float32[2, 3], b: None}, weight=2.0)" in lines
    assert "hush" not in "".join(lines)


@pytest.mark.parametrize("level", [None, "", "0"])
def test_nothing_is_wrapped_where_it_is_not_set(level):
    names = {"connect": gradengine.connect}
    log_calls(names, {} if level is None else {VARIABLE: level})
    assert names == {"connect": gradengine.connect}
    assert not hasattr(gradengine.GradientEngine.add, "__wrapped__")


@pytest.mark.parametrize("level", ["2", "yes", "-1", "1 "])
def test_another_level_is_refused(level):
    with pytest.raises(CallerError, match=r"GRADENGINE_LOG has no such level: got '.*', expected 1 for calls"):
        log_calls({}, {VARIABLE: level})


def test_what_a_call_raises_is_said_and_raised(lines):
    def call():
        raise CallerError("it is too late")

    with pytest.raises(CallerError):
        logged(call, 1)()
    (line,) = lines()
    assert line.endswith("call(...) took 1 ms, raised CallerError: it is too late")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.ones((2, 3), np.float16), "float16[2, 3]"),
        ([np.ones(1), None, {"w": np.ones(())}], "[float64[1], None, {w: float64[]}]"),
        ("text", "'text'"),
        (object(), "object"),
    ],
)
def test_arrays_are_shown_by_dtype_and_shape(lines, value, shown):
    def call(value):
        return value

    assert logged(call, 3)(value) is value
    assert lines()[0].endswith(f"call({shown}) took 1 ms")
