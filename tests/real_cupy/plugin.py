"""A pytest plugin: it selects the tests of a GPU, and a fault of a kernel or copy fails its test.

REAL_CUPY_ORDER (lazy, eager, random), REAL_CUPY_SEED, REAL_CUPY_DEVICES and REAL_CUPY_GUARD=1 say how the driver
behaves (see `loaded`); REAL_CUPY_STREAM=own gives each test a current stream on each device, not the default one. Every
GPU test runs in all of these.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from typing import Any

import cupy  # type: ignore[import-not-found]  # here, since some tests replace the module
import pytest

STREAM = "REAL_CUPY_STREAM"
_FIXTURES = {"backend", "device", "emulated"}


def pytest_configure(config: pytest.Config) -> None:
    assert cupy.cuda.is_available()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not _is_run(item)])
    items[:] = filter(_is_run, items)


def _is_run(item: Any) -> bool:
    values = getattr(item, "callspec", None)
    names = {values.params[name] for name in _FIXTURES & set(values.params)} if values else set()
    return all(str(name).startswith("cupy") for name in names) if names else "cupy" in item.nodeid


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The current streams are those of a user who has some, while the test runs."""
    with _own_streams() if os.environ.get(STREAM) == "own" else contextlib.nullcontext():
        return (yield)


@contextlib.contextmanager
def _own_streams() -> Iterator[None]:
    with contextlib.ExitStack() as streams:
        for ordinal in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(ordinal):
                stream = cupy.cuda.Stream(non_blocking=True)
                stream.wait_event(cupy.cuda.Stream.null.record())  # fixtures put arrays there
                streams.enter_context(stream)
        yield


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
