"""Fixtures of all tests: the backends, each behind the same few lines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from transports import package_threads

from gradengine.buffer import Buffer
from gradengine.kernels import Kernels
from gradengine.kernels.host import HostKernels

settings.register_profile("gradengine", deadline=None, print_blob=True)  # shared machines stall; a stall is no bug
settings.load_profile("gradengine")


@dataclass(frozen=True)
class Backend:
    """Kernels, and how a NumPy array gets to their device and back."""

    kernels: Kernels
    put: Callable[[np.ndarray], object]
    get: Callable[[Buffer], np.ndarray]

    def buffer(self, array: np.ndarray) -> Buffer:
        """A writable buffer on the device with the array's values; the array itself stays as it is."""
        return self.kernels.writable_view(self.put(array.copy()), "buffer")


BACKENDS = {
    f"host-{threads}": Backend(HostKernels(threads), lambda array: array, lambda buffer: buffer.data.copy())
    for threads in (1, 3)
}


@pytest.fixture(scope="session", params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture(scope="session")
def kernels(backend: Backend) -> Kernels:
    return backend.kernels


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """A closed exchange leaves no thread behind, whatever the test did to it."""
    yield
    for thread in package_threads():
        thread.join(2.0)
    assert not package_threads()
