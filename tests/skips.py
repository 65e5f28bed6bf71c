"""A pytest plugin: a test that is skipped for a reason that is not in this list makes the run fail.

The list holds for each stage of CI. In `make test-device`, which runs the tests of a GPU, the lack of one is no reason.
GRADENGINE_REQUIRE names what must be installed ("torch jax g++"): if it is missing nothing is run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from typing import Any

import pytest

REQUIRE = "GRADENGINE_REQUIRE"
PROGRAMS = {"g++", "openssl"}  # the other names are modules

_PACKAGE = (
    r"(torch|jax|optax|flax|safetensors|accelerate|transformers|peft|lightning|typer|rich|matplotlib|openssl|node|"
    r"@node-rs/xxhash|yaml)"
)
NOT_INSTALLED = rf"could not import '{_PACKAGE}\b|(\S+ needs )?{_PACKAGE}(, which)? is not installed$|torch < 2\.10$"
NO_GPU = r"CuPy is not installed|no GPU|fewer than 1 GPUs"
ONE_GPU = r"fewer than \d+ GPUs"
NO_GPU_IN_FRAMEWORK = r"this (torch|JAX) has no CUDA|(torch|jax) has no GPU"
ASKED_FOR = r"set TEST_(PACKAGE|MPI)=1|CuPy is installed|has a GPU"  # other targets and machines
OLD = r"NumPy 2\.0 exports none|older versions release the lock"
SYSTEM = (
    r"no IPv6 here|children are counted in /proc|there is no /dev/full|this system keeps no peak|"
    r"no (fork|affinity|memfd|Unix sockets without a path) on this platform|signals of POSIX"
)


def allowed(reason: str, *, gpus: int) -> bool:
    """Return whether a test may be skipped for this where so many GPUs must be; the stand-in has two.

    >>> allowed("could not import 'torch': No module named 'torch'", gpus=0)
    True
    >>> allowed("no GPU", gpus=0), allowed("no GPU", gpus=1), allowed("too slow today", gpus=0)
    (True, False, False)
    >>> allowed("fewer than 2 GPUs", gpus=1), allowed("fewer than 2 GPUs", gpus=2)
    (True, False)
    """
    lacking = [*([NO_GPU] if gpus < 1 else []), *([ONE_GPU] if gpus < 2 else [])]
    reasons = [NOT_INSTALLED, NO_GPU_IN_FRAMEWORK, ASKED_FOR, OLD, SYSTEM, *lacking]
    return any(re.match(each, reason) for each in reasons)


def missing() -> list[str]:
    """What must be here and is not."""
    required = os.environ.get(REQUIRE, "").split()
    return [name for name in required if not (shutil.which if name in PROGRAMS else importlib.util.find_spec)(name)]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to begin without what must be here."""
    absent = missing()
    if absent:
        raise pytest.UsageError(f"not installed: {' '.join(absent)}. Install them, or unset {REQUIRE}.")


_refused: list[str] = []


def pytest_runtest_logreport(report: Any) -> None:
    """Keep what must not be skipped."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return
    reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    gpus = 2 if "real_cupy.importing" in sys.modules else int(os.environ.get("GRADENGINE_REQUIRE_GPU") == "1")
    if not allowed(reason, gpus=gpus):
        _refused.append(f"{report.nodeid}: {reason}")


pytest_collectreport = pytest_runtest_logreport


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run with such a skip has failed."""
    if _refused and exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which, and what to do; and what a warning that failed a test asks for."""
    for skipped in _refused:
        terminalreporter.write_line(f"SKIPPED, and must not be: {skipped}", red=True)
    if _refused:
        terminalreporter.write_line("Install what is missing, or give the reason a line in tests/skips.py.", red=True)
    failures = [str(report.longrepr) for report in terminalreporter.stats.get("failed", [])]
    if any(re.search(r"^E +\S*Warning: ", text, re.MULTILINE) for text in failures):
        terminalreporter.write_line(
            "A warning is an error: mend what warns, or allow it by name in pyproject.toml, filterwarnings.", red=True
        )
