"""GRADENGINE_LOG: a line for each public call; GRADENGINE_NVTX: ranges; nothing at all where they are not set."""

import logging
import os
import re
import subprocess
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import cuda_emulator
import numpy as np
import pytest
from ranks import on_ranks

import gradengine
from gradengine.calls import RANGES, RANGES_VARIABLE, VARIABLE, log_calls, logged, mark_calls
from gradengine.errors import CallerError, DeviceUnavailable, WindowError
from gradengine.kernels import CudaKernels

LOOP = """
import numpy as np
import gradengine

with gradengine.connect("tcp://127.0.0.1:0", 0, 1, token="hush hush hush hush") as exchange:
    engine = gradengine.GradientEngine(gradengine.GradientLayout.of({"w": (2, 3), "b": (4,)}), exchange=exchange)
    engine.add({"w": np.ones((2, 3), np.float32), "b": None}, weight=2.0)
    engine.step()
"""


HOOKS = """
import torch
from gradengine import GradientEngine, torch as ge

model = torch.nn.Linear(3, 2)
attached = ge.attach(model, GradientEngine(ge.layout_of(model)))
model(torch.ones(1, 3)).sum().backward()
attached.step()
"""


def lines_of(level, program=LOOP):
    environment = {**os.environ, VARIABLE: level}
    loop = [sys.executable, "-c", program]
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
    assert "hush hush hush hush" not in "".join(lines)


def test_hooks_of_torch_are_among_them():
    pytest.importorskip("torch")
    lines = lines_of("3", HOOKS)
    assert "attach(Linear, GradientEngine)" in lines
    assert [line for line in lines if "MicroBatch.add('weight', torch.float32[2, 3])" in line] != []
    assert lines[-1] == "Attached.step()"


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


# ---- ranges ----


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


def test_adds_and_steps_have_ranges(ranges):
    mark_calls({RANGES_VARIABLE: "1"})
    engine = gradengine.GradientEngine(LAYOUT)
    engine.add([np.ones(2, np.float32), None])
    engine.step()
    engine.add_block(0, {"w": np.ones(2, np.float32)})
    engine.add_non_block("b", np.ones(4, np.float32))
    assert ranges == ["gradengine.add", "end", "gradengine.step", "end", *2 * ["gradengine.add", "end"]]


def test_what_a_step_waits_for_has_a_range_of_its_own(ranges):
    def step(exchange):
        engine = gradengine.GradientEngine(LAYOUT, exchange=exchange)
        engine.add([np.ones(2, np.float32), None])
        engine.step()

    mark_calls({RANGES_VARIABLE: "1"})
    assert on_ranks(step, 2) == [None, None]
    assert Counter(ranges) == {"gradengine.add": 2, "gradengine.step": 2, "gradengine.exchange": 2, "end": 6}


def test_components_of_a_micro_batch_have_ranges(ranges):
    mark_calls({RANGES_VARIABLE: "1"})
    with gradengine.GradientEngine(gradengine.GradientLayout.of({"w": (2,)})).micro_batch() as micro_batch:
        micro_batch.add("w", np.ones(2, np.float32))
    assert ranges == ["gradengine.add", "end"]


def test_a_replay_has_a_range(ranges):
    if cuda_emulator.compiler() is None:
        pytest.skip("g++ is not installed")
    mark_calls({RANGES_VARIABLE: "1"})
    kernels = CudaKernels(cuda_emulator)
    engine = gradengine.GradientEngine(gradengine.GradientLayout.of({"w": (2,)}), kernels)
    gradients = [cuda_emulator.asarray(np.ones(2, np.float32))]
    with engine.capture() as graph:
        engine.add(gradients)
        engine.step()
    del ranges[:]
    graph.replay()
    assert ranges == ["gradengine.replay", "end"]


def test_a_range_ends_where_the_call_raises(ranges):
    mark_calls({RANGES_VARIABLE: "1"})
    with pytest.raises(WindowError):
        gradengine.GradientEngine(gradengine.GradientLayout.of({"w": (2,)})).step()
    assert ranges == ["gradengine.step", "end"]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_no_call_has_a_range_where_it_is_not_set(ranges, value):
    mark_calls({} if value is None else {RANGES_VARIABLE: value})
    assert not any(hasattr(vars(kind)[name], "__wrapped__") for calls in RANGES.values() for kind, name in calls)


@pytest.mark.parametrize("value", ["2", "yes", " 1"])
def test_another_value_is_refused(value):
    with pytest.raises(CallerError, match=r"GRADENGINE_NVTX has no such value: got '.*', expected 1 for ranges"):
        mark_calls({RANGES_VARIABLE: value})


def test_without_cupy_it_is_said_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(DeviceUnavailable, match=r"GRADENGINE_NVTX=1 needs CuPy .*, or unset it"):
        mark_calls({RANGES_VARIABLE: "1"})
