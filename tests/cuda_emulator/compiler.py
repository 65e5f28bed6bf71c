"""g++: whether there is one, and shared libraries built once for each source, flags and compiler."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .errors import CompileException

CPP = Path(__file__).parent / "cpp"


@functools.cache
def compiler() -> str | None:
    """Path of g++, or None where there is none, or no Linux (whose threads' storage and signals we use)."""
    return shutil.which("g++") if sys.platform == "linux" else None


def cache_folder() -> Path:
    """Where libraries are kept from run to run."""
    own = os.environ.get("CUDA_EMULATOR_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuda_emulator"


def run_compiler(arguments: Sequence[str], source: str | None = None) -> str:
    """What the compiler writes to its standard output; its complaint is raised."""
    command = compiler()
    if command is None:
        raise CompileException("g++ is not installed")
    done = subprocess.run(
        [command, *arguments], input=source, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise CompileException(f"{' '.join([command, *arguments])}\n{done.stderr}")
    return done.stdout


def library(source: str, flags: Sequence[str], linked: Sequence[str] = ()) -> Path:
    """A shared library of a C++ file; built where no process has built it before.

    Args:
        source: Text of the file.
        flags: For compiling it; a sanitizer among them is not linked.
        linked: Libraries to link it with.
    """
    key = _key(source, flags, linked)
    built = cache_folder() / f"{key}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            compiled, new = f"{folder}/new.o", Path(folder) / "new.so"
            run_compiler(["-x", "c++", "-fPIC", f"-I{CPP}", *flags, "-c", "-o", compiled, "-"], source)
            run_compiler(["-shared", "-Wl,-Bsymbolic", "-o", str(new), compiled, *linked])
            new.replace(built)  # another process may have put its own there; they are the same
    return built


def _key(source: str, flags: Sequence[str], linked: Sequence[str]) -> str:
    digest = hashlib.sha256(repr((_version(), tuple(flags), tuple(linked), source)).encode())
    for path in sorted(CPP.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


@functools.cache
def _version() -> str:
    return run_compiler(["-dumpfullversion", "-dumpmachine"])
