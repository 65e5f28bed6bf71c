"""The backends: kernels, each with the few lines that bring NumPy arrays to their device and back."""

import contextlib
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from elsewhere import Elsewhere

from gradengine.arrays.buffer import Buffer
from gradengine.arrays.dtypes import DTYPES
from gradengine.kernels import CHUNK, CudaKernels, Kernels
from gradengine.kernels.host import HostKernels
from gradengine.kernels.launch import chunk_for
from gradengine.kernels.toolchain import load_cupy

REQUIRE_GPU = "GRADENGINE_REQUIRE_GPU"  # set to 1 where there is a GPU: a test that finds none fails there


@dataclass(frozen=True)
class Backend:
    """Kernels, and how a NumPy array gets to their device and back.

    Attributes:
        kernels: The kernels.
        put: An array's copy on the device, as the device's own kind of array.
        get: A buffer's elements on the host, as they are stored; waits for the device.
        chunk: Elements that one thread, or one thread block, works on: sizes have their limits about it.
    """

    kernels: Kernels
    put: Callable[[np.ndarray], object]
    get: Callable[[Buffer], np.ndarray]
    chunk: int

    @property
    def xp(self) -> Any:
        """CuPy, or what has its surface, for arrays and streams on the device, also where another one is current."""
        names, device = self.kernels.xp, self.kernels.xp.cuda.Device(self.kernels.ordinal)
        return Elsewhere(names, device) if device.id != names.cuda.runtime.getDevice() else names

    def active(self) -> AbstractContextManager[object]:
        """Within it, the device is the current one."""
        return contextlib.nullcontext() if self.is_host else self.kernels.xp.cuda.Device(self.kernels.ordinal)

    @property
    def is_host(self) -> bool:
        """Whether there is no device to wait for."""
        return self.kernels.device.name == "cpu"

    def buffer(self, array: np.ndarray) -> Buffer:
        """A writable buffer on the device with the array's values; the array itself stays as it is."""
        return self.kernels.device.writable_view(self.put(array.copy()), "buffer")

    def buffers_in_one(self, arrays: list[np.ndarray], offset: int = 0) -> tuple[Buffer, list[Buffer]]:
        """Arrays of one dtype one after the other in one piece of memory, from `offset` on; the whole, and each.

        What comes before them is NaN, what comes after the last is no memory at all.
        """
        before = np.full(offset, np.nan, np.float32).astype(arrays[0].dtype)
        whole = self.buffer(np.concatenate([before, *arrays]))
        ends = np.cumsum([offset, *(array.size for array in arrays)]).tolist()
        return whole, [whole.part(start, stop) for start, stop in itertools.pairwise(ends)]

    def buffer_at(self, array: np.ndarray, offset: int) -> Buffer:
        """A writable buffer that begins `offset` elements behind an aligned address."""
        return self.buffers_in_one([array], offset)[1][0]


def host_backend(threads: int) -> Backend:
    return Backend(HostKernels(threads), lambda array: array, lambda buffer: buffer.data.copy(), CHUNK)


def device_backend(kernels: CudaKernels) -> Backend:
    """The backend of CuPy, or of what has its surface."""
    xp = kernels.xp

    def put(array: np.ndarray) -> object:
        with xp.cuda.Device(kernels.ordinal):
            return xp.asarray(array)

    def get(buffer: Buffer) -> np.ndarray:
        elements = np.empty(buffer.size, DTYPES[buffer.dtype].storage)
        if buffer.size:
            runtime = xp.cuda.runtime
            with xp.cuda.Device(kernels.ordinal):
                runtime.deviceSynchronize()
                runtime.memcpy(elements.ctypes.data, buffer.pointer, buffer.nbytes, runtime.memcpyDeviceToHost)
        return elements

    return Backend(kernels, put, get, chunk_for(0))


def cupy_backend(ordinal: int) -> Backend:
    return device_backend(CudaKernels(load_cupy(ordinal), ordinal))


# Made when a test first asks for one: the kernels are compiled then.
BACKENDS = {
    "host": functools.cache(lambda: host_backend(1)),
    "host-3": functools.cache(lambda: host_backend(3)),
    "cupy": functools.cache(lambda: cupy_backend(0)),
    "cupy-other": functools.cache(lambda: cupy_backend(1)),  # while cuda:0 is the current device
}
DEVICE_BACKENDS = ("cupy", "cupy-other")
IS_EMULATED_CUPY = "real_cupy.importing" in sys.modules  # see tests/real_cupy

# For a test whose answer may depend on how many threads the host's kernels split their work among.
on_threads_too = pytest.mark.parametrize("backend", ["host", "host-3", *DEVICE_BACKENDS], indirect=True)


@functools.cache
def missing(name: str) -> str | None:
    """What a backend needs and this machine lacks, or None."""
    if name == "cupy":
        return _missing_gpus(1)
    if name == "cupy-other":
        return _missing_gpus(2)
    return None


def _missing_gpus(wanted: int) -> str | None:
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return "CuPy is not installed"
    if not cupy.cuda.is_available():
        return "no GPU"
    return None if cupy.cuda.runtime.getDeviceCount() >= wanted else f"fewer than {wanted} GPUs"


def runnable(names: Iterable[str]) -> list[str]:
    """The backends that tests run on here."""
    return [name for name in names if missing(name) is None or _is_required(name)]


def available(name: str) -> Backend:
    """A backend; what is missing skips the test, or fails it where there must be a GPU."""
    reason = missing(name)
    if reason and _is_required(name):
        pytest.fail(f"{reason}, and {REQUIRE_GPU}=1")
    if reason:
        pytest.skip(reason)
    return BACKENDS[name]()


def _is_required(name: str) -> bool:
    return name == "cupy" and os.environ.get(REQUIRE_GPU) == "1"


# Of emulated threads and blocks.
ORDERS = [{"order": "forward"}, {"order": "reverse"}, *({"order": "random", "seed": seed} for seed in (1, 2))]
