"""What a machine has of what `make gpu-check` needs, and what it lacks, with the line that installs it.

Frameworks are asked in processes of their own, all at once: JAX takes memory where it is asked, and one that hangs or
dies is a framework that is not there. Each is imported for that, so that no stage waits for a cold disk.
"""

import ctypes
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 240.0  # seconds that a framework has to answer: torch from a cold disk takes a minute or two

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
GPU, SECOND, TORCH, JAX = "a GPU for CuPy", "a second GPU", "a GPU for torch", "a GPU for JAX"
NEEDED = ("numpy", "msgpack", "xxhash", "cupy")
ESSENTIAL = (*NEEDED, GPU)

# Which packages a question needs; it is not asked without them.
ASKED_OF = {GPU: NEEDED, SECOND: NEEDED, TORCH: ("torch",), JAX: ("jax",)}

# Each prints one line of JSON: the GPU's name and bytes of memory; or ends with why there is none.
CUPY_QUESTION = """
from gradengine.kernels.toolchain import load_cupy
properties = load_cupy({ordinal}).cuda.runtime.getDeviceProperties({ordinal})
name, memory = properties["name"], properties["totalGlobalMem"]
print(json.dumps([name.decode() if isinstance(name, bytes) else name, int(memory)]))
"""
QUESTIONS = {
    GPU: CUPY_QUESTION.format(ordinal=0),
    SECOND: CUPY_QUESTION.format(ordinal=1),
    TORCH: """
import torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no GPU")
print(json.dumps([torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory]))
""",
    JAX: """
import jax
if jax.default_backend() != "gpu":
    sys.exit(f"JAX {jax.__version__} finds no GPU")
print(json.dumps([jax.devices()[0].device_kind, 0]))
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
        gpu: The GPU's name.
        gpu_memory: Its bytes.
        cuda: The newest CUDA that the driver knows and CuPy has a package for.
    """

    missing: Mapping[str, str]
    gpu: str = "no GPU"
    gpu_memory: int = 0
    cuda: int = 12

    @property
    def refusal(self) -> list[str]:
        """Without these nothing runs: a line for each."""
        return [f"{name}: {self.missing[name]}" for name in ESSENTIAL if name in self.missing]

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


def preflight() -> Preflight:
    """Look for everything, and import what takes long."""
    missing = {name: "not installed" for name in PACKAGES if importlib.util.find_spec(name) is None}
    missing |= {name: "not on the PATH" for name in PROGRAMS if shutil.which(name) is None}
    print(f"preflight: imports what is here, for at most {LIMIT:.0f} s", flush=True)
    end, asked = time.monotonic() + LIMIT, {}
    for name, question in QUESTIONS.items():  # all begin before the first is waited for
        absent = [package for package in ASKED_OF[name] if package in missing]
        if absent:
            missing[name] = f"{' and '.join(absent)} not installed"
        else:
            asked[name] = _asked(question)
    answers = {name: _answer(process, end) for name, process in asked.items()}
    missing |= {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    name, memory = ("no GPU", 0) if GPU in missing else answers[GPU]
    return Preflight(missing, name, memory, newest_cuda())


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
        [sys.executable, "-c", "import json, sys\n" + question],
        env={**os.environ, "PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _answer(process: subprocess.Popen[str], end: float) -> tuple[str, int] | str:
    """The GPU's name and memory, or why there is none: the last line of what was said."""
    try:
        said, complaint = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"no answer within {LIMIT:.0f} s"
    if process.returncode == 0:
        name, memory = json.loads(said.splitlines()[-1])
        return name, memory
    return (complaint.strip().splitlines() or [f"exit status {process.returncode}"])[-1][:300]
