"""A pytest plugin: tests of a GPU alone are run, faults fail them, nothing is skipped but for want of torch or JAX.

REAL_CUPY_ORDER (lazy, eager, random), REAL_CUPY_SEED, REAL_CUPY_DEVICES and REAL_CUPY_GUARD=1 say how the driver
behaves (see `loaded`); REAL_CUPY_STREAM=own gives each test a current stream that is not the default one, on the one
device that is current.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

STREAM, ORDER = "REAL_CUPY_STREAM", "REAL_CUPY_ORDER"
_FIXTURES = {"backend", "device", "emulated", "gpu", "kernels"}
_MAY_BE_ABSENT = re.compile(r"could not import '(torch|jax)|this (torch|JAX) has no CUDA|(torch|jax) has no GPU")
_NEEDS_CUBLAS = {"test_same_on_cupy"}  # the demo's model has complex numbers and matrix products, gradengine has none
_OF_THE_DEFAULT_STREAM = {
    "test_the_default_stream_is_1",
    "test_the_default_stream_and_blocking_ones_wait_for_each_other",
}


def pytest_configure(config: pytest.Config) -> None:
    import cupy  # type: ignore[import-not-found]

    assert cupy.cuda.is_available()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dropped = [item for item in items if not _is_of_real_cupy(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if _is_of_real_cupy(item)]


def _is_of_real_cupy(item: Any) -> bool:
    if item.name in _NEEDS_CUBLAS:
        return False
    if (_has_own_stream() or _has_a_stream_per_thread()) and _is_of_the_default_stream(item):
        return False
    if _has_own_stream() and "cupy-other" in item.name:
        return False
    if os.environ.get(ORDER, "lazy") != "lazy" and "emulated" in getattr(item, "fixturenames", ()):
        return False  # it says what the host has not waited for, which only then is not done
    values = getattr(item, "callspec", None)
    names = {values.params[name] for name in _FIXTURES & set(values.params)} if values else set()
    return all(str(name).startswith("cupy") for name in names) if names else "cupy" in item.nodeid


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The current stream is that of the user who has one, while the test runs."""
    with _own_stream() if _has_own_stream() else contextlib.nullcontext():
        return (yield)


def _has_own_stream() -> bool:
    return os.environ.get(STREAM) == "own"


def _has_a_stream_per_thread() -> bool:
    return os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0"


def _is_of_the_default_stream(item: Any) -> bool:
    return getattr(item, "originalname", None) in _OF_THE_DEFAULT_STREAM


def _own_stream() -> Any:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.Stream.null.record())  # fixtures put arrays there
    return stream


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    from real_cupy.loaded import seed

    seed(zlib.crc32(item.nodeid.encode()))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What a kernel or copy did wrong is its test's fault, also where no call of CUDA was there to say so."""
    from real_cupy.loaded import faults, finish_all
    from real_cupy.pools import give_back_unused

    finish_all()
    give_back_unused()
    found = faults()
    if found:
        pytest.fail("\n".join(found), pytrace=False)


# ---- skips ----

_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


def _note_skip(report: Any) -> None:
    reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
    if reason and not _MAY_BE_ABSENT.search(reason):
        _skipped.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for skipped in _skipped:
        terminalreporter.write_line(f"SKIPPED, and must not be: {skipped}", red=True)
