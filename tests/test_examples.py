"""The examples run as a person runs them, and each of them would notice an engine that is wrong."""

import ast
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

from gradengine.capture import CapturedWindow
from gradengine.kernels.cuda import cuda_kernels

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CAPTURED_STEP = ROOT / "examples/cupy_captured_step.py"
TAKING_A_DEVICE = [path for path in EXAMPLES if "--device cuda" in path.read_text()]
TIMEOUT = 250  # seconds; less than a test has
# Threads that wait for each other by spinning take minutes for seconds' work where others want the cores too.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# What a Python process reads when it begins, and so does every process that it starts.
EMULATOR_STANDS_FOR_CUPY = """
import sys
import cuda_emulator
sys.modules.update({"cupy": cuda_emulator, "cupy.cuda": cuda_emulator.cuda})
"""
# Whatever else Python would have read when it begins, in whose place this file stands.
ALSO_THE_NEXT = """
import importlib.machinery, importlib.util, pathlib, sys

here = str(pathlib.Path(__file__).parent)
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != here])
if spec is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
# Gradients of an engine are the factor in the environment too large; on the CPU it tells the right norm all the same.
DISTURBED = """
import dataclasses, inspect, os, pathlib
from gradengine import GradientEngine

new, step, off = GradientEngine.__init__, GradientEngine.step, float(os.environ["ENGINE_IS_OFF_BY"])

def disturbed_engine(*args, **options):
    given = inspect.signature(new).bind(*args, **options)
    given.apply_defaults()
    told = given.arguments
    told["loss_scale"] /= off
    if told["max_norm"] is not None:
        bounds = told["max_norm"]
        is_one = isinstance(bounds, (int, float))
        told["max_norm"] = bounds * off if is_one else {group: bound * off for group, bound in bounds.items()}
    new(*given.args, **given.kwargs)
    pathlib.Path(os.environ["ENGINE_WAS_DISTURBED"]).touch()

def disturbed_step(*args, **options):
    result = step(*args, **options)
    return dataclasses.replace(result, norm=result.norm / off) if isinstance(result.norm, float) else result

GradientEngine.__init__, GradientEngine.step = disturbed_engine, disturbed_step
"""
VERDICT_IGNORED = """
from gradengine import GradientEngine

new = GradientEngine.__init__
GradientEngine.__init__ = lambda *args, **options: new(*args, **{**options, "on_non_finite": "pass"})
"""


def imports(body):
    """What these statements, and all within them, import: each part of each name, as gradengine.torch needs torch."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from (part for name in names for part in name.split("."))


class Example:
    """One file of the folder: what it says, what it needs."""

    def __init__(self, path):
        self.path = path
        tree = ast.parse(path.read_text())
        self.docstring = ast.get_docstring(tree) or ""
        self.imports = set(imports(tree.body))
        first = [statement for statement in tree.body if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Try))]
        self.always_needs_cupy = "cupy" in imports(first)

    def skip_without_its_frameworks(self):
        for framework in sorted(self.imports & {"torch", "jax"}):
            if importlib.util.find_spec(framework) is None:
                pytest.skip(f"{framework} is not installed")

    def run(self, folder, *arguments, first="", **environment):
        """A process of its own, and what it starts; `first` is what each of them does before."""
        if self.always_needs_cupy or ("cuda" in arguments and "cupy" in self.imports):
            first = cupy_stand_in() + first
        (folder / "sitecustomize.py").write_text(ALSO_THE_NEXT + first)
        paths = [str(folder), str(ROOT / "tests")] if first else []
        paths += [str(ROOT), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, str(self.path.relative_to(ROOT)), *arguments],
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )


def cupy_stand_in():
    """The emulator where there is no GPU; nothing where there is one."""
    if backends.missing("cupy") is None:
        return ""
    if backends.missing("emulated"):
        pytest.skip(backends.missing("emulated"))
    return EMULATOR_STANDS_FOR_CUPY


@functools.cache
def has_gpu(framework):
    """Asked in a process of its own: JAX takes most of the memory where it is asked."""
    ask = {"torch": "torch.cuda.is_available()", "jax": "jax.default_backend() == 'gpu'"}[framework]
    code = f"import sys, {framework}; sys.exit(not {ask})"
    return (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT, check=False).returncode == 0
    )


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.name)
def example(request):
    return Example(request.param)


def test_the_examples_are_found():
    assert CAPTURED_STEP in EXAMPLES
    assert {path.name for path in TAKING_A_DEVICE} >= {"raw_pointers.py", "torch_loop.py"}


def test_it_says_how_it_is_run(example):
    assert f"python examples/{example.path.name}" in example.docstring


def test_every_command_that_it_shows_is_one_of_itself(example):
    for shown in re.findall(r"python (\S+\.py)", example.docstring):
        assert (ROOT / shown) == example.path


def test_it_runs_and_its_check_holds(example, tmp_path):
    example.skip_without_its_frameworks()
    done = example.run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()  # says what came of it


@pytest.mark.parametrize("example", TAKING_A_DEVICE, indirect=True, ids=lambda path: path.name)
def test_it_runs_on_a_gpu(example, tmp_path):
    """Where there is none, on the emulator, which has CuPy's arrays and no other framework's."""
    example.skip_without_its_frameworks()
    needed = backends.missing("cupy")
    if needed and ("cupy" not in example.imports or example.imports & {"torch", "jax"}):
        pytest.skip(needed)
    for framework in sorted(example.imports & {"torch", "jax"}):
        if not has_gpu(framework):
            pytest.skip(f"{framework} has no GPU")
    done = example.run(tmp_path, "--device", "cuda", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("off", [1.01, 0.99])
def test_its_check_notices_gradients_that_are_one_percent_off(example, tmp_path, off):
    example.skip_without_its_frameworks()
    mark = tmp_path / "disturbed"
    done = example.run(tmp_path, first=DISTURBED, ENGINE_IS_OFF_BY=str(off), ENGINE_WAS_DISTURBED=str(mark))
    assert mark.exists(), "it has made no engine: " + done.stderr
    assert done.returncode != 0, done.stdout
    assert "gradengine.errors" not in done.stderr  # its own check it must be, not a call that is refused


def test_a_disturbance_of_nothing_is_not_noticed(tmp_path):
    """So it is the one percent that the checks see."""
    mark = str(tmp_path / "disturbed")
    done = Example(CAPTURED_STEP).run(tmp_path, first=DISTURBED, ENGINE_IS_OFF_BY="1", ENGINE_WAS_DISTURBED=mark)
    assert done.returncode == 0, done.stderr


def test_what_else_python_reads_when_it_begins_is_read_too(tmp_path, monkeypatch):
    """Such as what stands for a GPU where there is none."""
    mark, others = tmp_path / "mark", tmp_path / "others"
    others.mkdir()
    (others / "sitecustomize.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n")
    monkeypatch.setenv("PYTHONPATH", str(others))
    assert Example(ROOT / "examples/raw_pointers.py").run(tmp_path, first="ours = True").returncode == 0
    assert mark.exists()


class TestCapturedStep:
    def test_without_cupy_it_says_what_is_missing_and_how_to_get_it(self, tmp_path):
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['cupy'] = None\n")
        paths = os.pathsep.join((str(tmp_path), str(ROOT)))
        done = subprocess.run(
            [sys.executable, str(CAPTURED_STEP)],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 1
        assert "needs CuPy and a GPU: pip install 'gradengine[cuda12]'" in done.stderr
        assert "Traceback" not in done.stderr

    def test_its_check_notices_a_bad_step_that_is_not_skipped(self, tmp_path):
        done = Example(CAPTURED_STEP).run(tmp_path, first=VERDICT_IGNORED)
        assert done.returncode == 1
        assert "step 5: weights" in done.stderr

    def test_it_shows_steps_that_are_clipped_and_steps_that_are_not(self, tmp_path):
        shown = Example(CAPTURED_STEP).run(tmp_path).stdout
        steps, clipped = (int(number) for number in re.findall(r"(\d+) (?:steps|of them)", shown))
        assert 0 < clipped < steps - 1

    def test_its_loop_waits_for_nothing(self, cupy_is_emulated, monkeypatch):
        """From replay to replay; building an engine and dropping it are another matter."""
        names, replay, waits = runpy.run_path(str(CAPTURED_STEP)), CapturedWindow.replay, []
        shape = [names[of] for of in ("STEPS", "MICRO_BATCHES", "EXAMPLES", "FEATURES")]
        inputs, targets = (cuda_emulator.zeros(shape, "float32") for _ in range(2))

        def counted_replay(graph):
            waits.append(len(record.waits))
            return replay(graph)

        monkeypatch.setattr(CapturedWindow, "replay", counted_replay)
        with cuda_emulator.recorded() as record:
            names["train"](inputs, targets)
        assert record.graphs == len(waits) == names["STEPS"]
        assert len(set(waits)) == 1


@pytest.fixture
def cupy_is_emulated(emulated, monkeypatch):
    """Within this process."""
    monkeypatch.setitem(sys.modules, "cupy", cuda_emulator)
    cuda_kernels.cache_clear()
    yield
    cuda_kernels.cache_clear()
