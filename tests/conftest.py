"""Fixtures of all tests."""

import gc
import importlib
import importlib.util
import os
import time
import zlib
from collections.abc import Iterator

import cuda_emulator
import pytest
from backends import BACKENDS, DEVICE_BACKENDS, IS_EMULATED_CUPY, ORDERS, RECORDED, Backend, available, runnable
from hypothesis import HealthCheck, settings
from transports import package_threads

from gradengine.kernels import Kernels

# Shared machines stall; a stall is no bug.
settings.register_profile("gradengine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("gradengine")


REQUIRE_FRAMEWORKS = "GRADENGINE_REQUIRE_FRAMEWORKS"  # set to 1 by `make test-interop`: a missing one is no skip then


# Every kernel for every architecture: `make compile-check` asks for them, and whoever names the file.
collect_ignore = [] if "COMPILE_CHECK" in os.environ else ["test_kernels_compile.py"]
collect_ignore += [] if IS_EMULATED_CUPY else ["test_real_cupy.py"]
collect_ignore += [] if importlib.util.find_spec("torch") else ["ddp_process.py"]  # a program, read for its doctests
collect_ignore_glob = ["real_cupy/*"]  # no tests, and some of it loads in the environments of `make real-cupy` alone


def pytest_collection_finish() -> None:
    """Whatever is there by now stays: a test's `gc.collect` need not look at all of torch and JAX for half a second."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    if IS_EMULATED_CUPY:
        config.pluginmanager.register(importlib.import_module("real_cupy.plugin"))
    config.addinivalue_line(
        "markers", "not_on_real_cupy(needs): a GPU test that tests/real_cupy cannot run, for want of that"
    )
    missing = [name for name in ("torch", "jax") if importlib.util.find_spec(name) is None]
    if missing and os.environ.get(REQUIRE_FRAMEWORKS) == "1":
        raise pytest.UsageError(f"{' and '.join(missing)} not installed, and {REQUIRE_FRAMEWORKS}=1")


@pytest.fixture(scope="session", params=runnable(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return available(request.param)


@pytest.fixture(scope="session", params=runnable(DEVICE_BACKENDS) or DEVICE_BACKENDS[:1])
def device(request: pytest.FixtureRequest) -> Backend:
    """The backends where the host must wait to know anything."""
    return available(request.param)


@pytest.fixture(scope="session", params=RECORDED)
def emulated(request: pytest.FixtureRequest) -> Backend:
    """A device whose kernels are emulated, and all that it is asked for recorded: CuPy's stand-in, or CuPy itself."""
    return available(request.param)


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is done when it is waited for, whatever order the run has: the test says what the host sees before."""
    if IS_EMULATED_CUPY:
        from real_cupy.loaded import ORDER, seed

        monkeypatch.setenv(ORDER, "lazy")
        seed(0)


@pytest.fixture(scope="session")
def kernels(backend: Backend) -> Kernels:
    return backend.kernels


@pytest.fixture(autouse=True)
def _order_of_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test has its own order of emulated threads and blocks, the same in each run; its faults are its own."""
    order = ORDERS[zlib.crc32(request.node.nodeid.encode()) % len(ORDERS)]
    with cuda_emulator.options(**order):
        yield
        if {"backend", "device", "emulated"} & set(request.fixturenames):
            cuda_emulator.cuda.runtime.deviceSynchronize()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """A closed exchange leaves no thread behind, whatever the test did to it."""
    yield
    deadline = time.monotonic() + 2.0
    while package_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not package_threads()
