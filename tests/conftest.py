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
from backends import DEVICE_BACKENDS, IS_EMULATED_CUPY, ORDERS, REQUIRE_GPU, Backend, available, runnable
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from slow import is_slow
from transports import SOON, package_threads

from gradengine.kernels import Kernels

# The same examples in each run: drawn from the test's own source alone. Hypothesis would take one in twenty from the
# numbers and texts of all loaded files of ours, and a new constant elsewhere would change tests. `make properties` is
# for new ones. Shared machines stall; a stall is no bug.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True, "database": None}
settings.register_profile("gradengine", derandomize=True, max_examples=50, **COMMON)
settings.register_profile("random", derandomize=False, max_examples=1000, **COMMON)
settings.load_profile("random" if os.environ.get("GRADENGINE_PROPERTIES") == "random" else "gradengine")
_NONE_OF_OURS = type(providers._local_constants)()  # private: the constraints hold the version
providers._get_local_constants = lambda: _NONE_OF_OURS

# What tools look at to colour or fold what they print, and launchers set: tests set what they need themselves.
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS"):
    os.environ.pop(name, None)


# Every kernel for every architecture: `make compile-check` asks for them, and whoever names the file.
collect_ignore = [] if "COMPILE_CHECK" in os.environ else ["test_kernels_compile.py"]
collect_ignore += [] if IS_EMULATED_CUPY else ["test_real_cupy.py"]
# Programs, read for their doctests.
collect_ignore += [] if importlib.util.find_spec("torch") else ["ddp_process.py", "trainers_process.py"]
collect_ignore_glob = ["real_cupy/*"]  # no tests, and some of it loads in the environments of `make test-device` alone


def pytest_collection_finish() -> None:
    """Whatever is there by now stays: a test's `gc.collect` need not look at all of torch and JAX for half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze what a file's tests leave, at its last test: no later collection looks at it again."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """End a worker whose GPU is lost, since no later test can pass in it: pytest-xdist starts a fresh one."""
    result = yield
    if os.environ.get(REQUIRE_GPU) == "1" and "PYTEST_XDIST_WORKER" in os.environ and not IS_EMULATED_CUPY:
        try:
            importlib.import_module("cupy").cuda.runtime.deviceSynchronize()
        except Exception:
            os._exit(1)
    return result


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """No name of 134 MB: a long text or message is named by its length."""
    return f"{argname}-of-{len(val)}" if isinstance(val, str | bytes) and len(val) > 100 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of a device where there is none: a GPU and `make test-device` run them."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
    config.hook.pytest_deselected(items=[item for item in items if not _has_its_device(item)])
    items[:] = filter(_has_its_device, items)


def _has_its_device(item: pytest.Item) -> bool:
    names = set(getattr(item, "fixturenames", ()))
    values = getattr(item, "callspec", None)
    if values and values.params.get("device", "cupy") not in DEVICE_BACKENDS:
        got = values.params["device"]
        raise pytest.UsageError(f"{item.nodeid}: device is a fixture, got {got!r}: give the argument another name")
    if "emulated" in names and not IS_EMULATED_CUPY:
        return False
    if "device" in names and not runnable(DEVICE_BACKENDS):
        return False
    backend = values.params.get("backend", "host") if values else "host"
    return backend not in DEVICE_BACKENDS or bool(runnable([backend]))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long and repeats what others show: see tests/slow.py")
    if IS_EMULATED_CUPY:
        config.pluginmanager.register(importlib.import_module("real_cupy.plugin"))


@pytest.fixture(scope="session", params=runnable(["host", *DEVICE_BACKENDS]))
def backend(request: pytest.FixtureRequest) -> Backend:
    """The host and each device that is here: for a test whose answer the backend can change."""
    return available(request.param)


@pytest.fixture(scope="session", params=runnable(DEVICE_BACKENDS) or DEVICE_BACKENDS[:1])
def device(request: pytest.FixtureRequest) -> Backend:
    """The backends where the host must wait to know anything."""
    return available(request.param)


@pytest.fixture(scope="session", params=["cupy"])
def emulated(request: pytest.FixtureRequest) -> Backend:
    """CuPy over the driver of `tests/real_cupy`, which records all that it is asked for."""
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
    order = ORDERS[zlib.crc32(request.node.nodeid.encode()) % len(ORDERS)] if IS_EMULATED_CUPY else {}
    with cuda_emulator.options(**order):
        yield


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """A closed exchange leaves no thread behind, whatever the test did to it."""
    yield
    deadline = time.monotonic() + SOON
    while package_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not package_threads()
