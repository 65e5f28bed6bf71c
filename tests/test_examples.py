"""The examples run as a person runs them, and each of them would notice an engine that is wrong."""

import functools
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import backends
import cuda_emulator
import pytest

from gradengine.engine.capture import CapturedWindow

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CAPTURED_STEP = ROOT / "examples/cupy_captured_step.py"
TAKING_A_DEVICE = [path for path in EXAMPLES if "--device cuda" in path.read_text()]
TIMEOUT = 250  # seconds; less than a test has
# Threads that wait for each other by spinning take minutes for seconds' work where others want the cores too.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# Gradients of an engine are the factor in the environment too large; on the CPU it tells the right norm all the same.
DISTURBED = """
import inspect, os, pathlib
from gradengine import GradientEngine
from gradengine.engine.result import StepResult

new, norm, off = GradientEngine.__init__, StepResult.norm.fget, float(os.environ["ENGINE_IS_OFF_BY"])

def disturbed_engine(*args, **options):
    given = inspect.signature(new).bind(*args, **options)
    given.apply_defaults()
    told = given.arguments
    told["loss_scale"] /= off
    if told["max_norm"] is not None:
        told["max_norm"] *= off
    new(*given.args, **given.kwargs)
    pathlib.Path(os.environ["ENGINE_WAS_DISTURBED"]).touch()

def disturbed_norm(result):
    return norm(result) / off if isinstance(norm(result), float) else norm(result)

GradientEngine.__init__, StepResult.norm = disturbed_engine, property(disturbed_norm)
"""
VERDICT_IGNORED = """
from gradengine import GradientEngine

new = GradientEngine.__init__
GradientEngine.__init__ = lambda *args, **options: new(*args, **{**options, "on_non_finite": "propagate"})
"""


def skip_without_frameworks(path, on_gpu=False):
    """Where it imports them, or what is for them: gradengine.torch needs torch."""
    imported = re.findall(r"^ *(?:import|from) .*?\b(torch|jax)\b", path.read_text(), re.MULTILINE)
    for framework in sorted(set(imported)):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
        if on_gpu and not has_gpu(framework):
            pytest.skip(f"{framework} has no GPU")
    if on_gpu or path == CAPTURED_STEP:
        backends.available("cupy")


def run(path, folder, *arguments, first="", **environment):
    """A process of its own, and what it starts; `first` is what each of them does before."""
    (folder / "sitecustomize.py").write_text(first)
    paths = [*([str(folder)] if first else []), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@functools.cache
def has_gpu(framework):
    """Asked in a process of its own: JAX takes most of the memory where it is asked."""
    ask = {"torch": "torch.cuda.is_available()", "jax": "jax.default_backend() == 'gpu'"}[framework]
    return not subprocess.call([sys.executable, "-c", f"import sys, {framework}; sys.exit(not {ask})"], timeout=TIMEOUT)


every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)


@every_example
def test_it_runs_and_its_check_holds(example, tmp_path):
    skip_without_frameworks(example)
    done = run(example, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()  # says what came of it


@pytest.mark.parametrize("example", TAKING_A_DEVICE, ids=lambda path: f"cupy-{path.name}")
def test_it_runs_on_a_gpu(example, tmp_path):
    skip_without_frameworks(example, on_gpu=True)
    done = run(example, tmp_path, "--device", "cuda", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert done.returncode == 0, done.stdout + done.stderr


@every_example
@pytest.mark.parametrize("off", [1.01, 0.99])
def test_its_check_notices_gradients_that_are_one_percent_off(example, tmp_path, off):
    skip_without_frameworks(example)
    mark = tmp_path / "disturbed"
    done = run(example, tmp_path, first=DISTURBED, ENGINE_IS_OFF_BY=str(off), ENGINE_WAS_DISTURBED=str(mark))
    assert mark.exists(), "it has made no engine: " + done.stderr
    assert done.returncode != 0, done.stdout
    # It must be the example's own check, and not a call that fails.
    assert "Traceback" not in done.stderr or "\nAssertionError" in done.stderr


def test_without_cupy_the_captured_step_says_what_is_missing_and_how_to_get_it(tmp_path):
    done = run(CAPTURED_STEP, tmp_path, first="import sys\nsys.modules['cupy'] = None\n")
    assert done.returncode == 1
    assert "needs CuPy and a GPU: pip install 'gradengine[cuda12]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_captured_step_on_cupy_notices_a_bad_step_that_is_not_skipped(tmp_path):
    backends.available("cupy")
    done = run(CAPTURED_STEP, tmp_path, first=VERDICT_IGNORED)
    assert done.returncode == 1
    assert "step 5: weights" in done.stderr


def test_the_captured_step_s_loop_waits_for_nothing(emulated, monkeypatch):
    """From replay to replay; building an engine and dropping it are another matter."""
    names, replay, waits = runpy.run_path(str(CAPTURED_STEP)), CapturedWindow.replay, []
    shape = [names[of] for of in ("STEPS", "MICRO_BATCHES", "EXAMPLES", "FEATURES")]
    inputs, targets = (emulated.kernels.xp.zeros(shape, "float32") for _ in range(2))

    def counted_replay(graph):
        waits.append(len(record.waits))
        return replay(graph)

    monkeypatch.setattr(CapturedWindow, "replay", counted_replay)
    with cuda_emulator.recorded() as record:
        names["train"](inputs, targets)
    assert record.graphs == len(waits) == names["STEPS"]
    assert len(set(waits)) == 1
