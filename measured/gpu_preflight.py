"""What a machine has of what `make gpu-check` needs, and what it lacks, with the line that installs it.

Frameworks are asked in processes of their own, all at once: JAX takes memory where it is asked, and one that hangs or
dies is a framework that is not there. Each is imported for that, so that no stage waits for a cold disk.
"""

import ctypes
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 240.0  # seconds that the frameworks have to answer: torch from a cold disk takes a minute or two

# Each by the name that it is imported by, and what pip installs; {cuda} is the newest CUDA that the driver knows.
PACKAGES = {
    "numpy": ("numpy>=2.0",),
    "msgpack": ("msgpack>=1.2.1",),
    "xxhash": ("xxhash>=4.0",),
    "cupy": ("cupy-cuda{cuda}x>=14", "cuda-toolkit[nvrtc,cudart]=={cuda}.*"),
    "pytest": ("pytest>=8.2",),
    "xdist": ("pytest-xdist>=3.6",),
    "hypothesis": ("hypothesis>=6.150",),
    "ml_dtypes": ("ml_dtypes>=0.5",),
    "torch": ("torch",),
    "jax": ("jax[cuda{cuda}]",),
}
PROGRAMS = ("nvidia-smi", "compute-sanitizer", "g++")
SECOND, TORCH, JAX = "a second GPU", "a GPU for torch", "a GPU for JAX"
NEEDED = ("numpy", "msgpack", "xxhash", "cupy")

# Which packages a question needs; it is not asked without them.
ASKED_OF = {SECOND: NEEDED, TORCH: ("torch",), JAX: ("jax",)}

# Each ends with why there is none.
QUESTIONS = {
    SECOND: """
from gradengine.kernels.toolchain import load_cupy
load_cupy(1)
""",
    TORCH: """
import torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no GPU")
torch.ones(1, device="cuda")
""",
    JAX: """
import jax
if jax.default_backend() != "gpu":
    sys.exit(f"JAX {jax.__version__} finds no GPU")
""",
}

# What tests say when they are skipped for want of each: these skips are no failure where it is missing, all others are.
SKIPS = {
    SECOND: (r"fewer than 2 GPUs",),
    "g++": (r"g\+\+ is not installed",),
    "torch": (r"torch is not installed", r"could not import 'torch'"),
    "jax": (r"jax is not installed", r"could not import 'jax'"),
    TORCH: (r"this torch has no CUDA", r"torch has no GPU"),
    JAX: (r"this JAX has no CUDA", r"jax has no GPU"),
}


@dataclass(frozen=True)
class Preflight:
    """What was found.

    Attributes:
        missing: What is not there, by name, and why.
        gpu_memory: The first GPU's bytes; 0 where nobody has asked it.
        cuda: The newest CUDA that the driver knows and CuPy has a package for.
    """

    missing: Mapping[str, str]
    gpu_memory: int = 0
    cuda: int = 12

    @property
    def refusal(self) -> list[str]:
        """Without these nothing runs: a line for each."""
        return [f"{name}: {self.missing[name]}" for name in NEEDED if name in self.missing]

    @property
    def install(self) -> str:
        """The one line that installs all missing packages, or nothing."""
        lines = [each for name, needed in PACKAGES.items() if name in self.missing for each in needed]
        wanted = [each.format(cuda=self.cuda) for each in lines]
        return f"{sys.executable} -m pip install {shlex.join(wanted)}" if wanted else ""

    def lacks(self, needs: Iterable[str]) -> str:
        """Which of these are missing and why, or nothing."""
        return "; ".join(f"{name}: {self.missing[name]}" for name in needs if name in self.missing)

    def expects(self, skip: str) -> bool:
        """Whether a test is rightly skipped with this message."""
        patterns = (pattern for name, patterns in SKIPS.items() if name in self.missing for pattern in patterns)
        return any(re.search(pattern, skip) for pattern in patterns)


@contextmanager
def preflight() -> Iterator[tuple[Preflight, Callable[[float], Preflight]]]:
    """Look for everything, and import what takes long meanwhile.

    Yields:
        What is known at once: packages and programs; and a call that waits for the rest, so many seconds at most.
    """
    missing = {name: "not installed" for name in PACKAGES if importlib.util.find_spec(name) is None}
    missing |= {name: "not on the PATH" for name in PROGRAMS if shutil.which(name) is None}
    known, asked = Preflight(missing, cuda=newest_cuda()), {}
    try:
        for name, question in QUESTIONS.items():
            absent = [package for package in ASKED_OF[name] if package in missing]
            if absent:
                missing[name] = f"{' and '.join(absent)} not installed"
            else:
                asked[name] = _asked(question)
        yield known, partial(_answered, known, asked)
    finally:
        for process in asked.values():
            process.kill()
            process.communicate()


def _answered(known: Preflight, asked: Mapping[str, subprocess.Popen[str]], limit: float) -> Preflight:
    end = time.monotonic() + limit
    answers = {name: _answer(process, end) for name, process in asked.items()}
    return replace(known, missing={**known.missing, **{name: why for name, why in answers.items() if why}})


def newest_cuda() -> int:
    """CUDA's major version as the driver has it, of those that CuPy has a package for; 12 where there is no driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 12
    return min(13, max(12, version.value // 1000))


def _asked(question: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(  # noqa: S603  (the questions stand above)
        [sys.executable, "-c", "import sys\n" + question],
        env={**os.environ, "PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _answer(process: subprocess.Popen[str], end: float) -> str:
    """Why there is none, the last line of what was said; nothing where it is there."""
    try:
        _, complaint = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return "no answer in time"
    if process.returncode == 0:
        return ""
    return (complaint.strip().splitlines() or [f"exit status {process.returncode}"])[-1][:300]
