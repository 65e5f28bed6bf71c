"""The devices of a benchmark, which place arrays and time work on them."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import RawBuffer
from gradengine.kernels import Kernels, kernels_for
from gradengine.kernels.cuda import cuda_kernels
from gradengine.kernels.host_threads import available_cpus

Array: TypeAlias = Any  # an array of NumPy or CuPy
Tensor: TypeAlias = Any

Result = TypeVar("Result")

# PyTorch's OpenMP threads spin for milliseconds after its work is done, on the CPUs that the next variant uses.
_REST_SECONDS = 0.03
# All CPUs work after the rest, as in backward. A sleeping CPU takes longer to wake than a small step takes.
_WORK_SECONDS = 0.02
_WORKED_ON = 1 << 22  # elements for each CPU, more than its caches hold
# Fewest and most elements of a copied array: more than a core's caches, and 128 MB, four times the largest L3.
_COPIED = (1 << 22, 1 << 25)


def on_all_cpus(work: Callable[[int], Result], numbers: Iterable[int]) -> list[Result]:
    """Return the results of `work` for these numbers, in order, computed on all CPUs. Calls cannot be nested."""
    return list(_pool().map(work, numbers))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cpus())


class Missing(Exception):
    """A variant needs something that this machine does not have. The report lists the variant as absent."""


@dataclass(frozen=True)
class Case:
    """Work that is timed."""

    run: Callable[[], object]  # the work, once, and the only timed call
    error: Callable[[], float]  # after a run, the largest relative difference of its result from fp64's
    prepare: Callable[[], object] = lambda: None  # untimed call before each run, restores the values that a run changes


class Sample(NamedTuple):
    """The times of one run in seconds. On the host all three are equal."""

    device: float  # time on the GPU, between two events on the stream, queued after other work
    wall: float  # time by the host's clock, from an idle device until all work is done
    host: float  # time until the call returns, which blocks the thread of the training loop


@dataclass(kw_only=True, eq=False)
class Device(ABC):
    """The device that holds a benchmark's gradients."""

    is_gpu: ClassVar[bool]
    torch_device: ClassVar[str]

    xp: Any  # NumPy or CuPy
    kernels: Kernels
    torch_module: Any  # None if torch is not installed or does not support the device
    copied: int  # fp32 elements of the arrays that are copied to measure the memory bandwidth
    clock: Callable[[], float] = time.perf_counter
    warm_up: int = 1  # dropped rounds, in which pages are touched, threads start and clock rates rise
    shifts: Sequence[int] = (0,)  # offsets of arrays from the start of their memory, in elements, used in turn

    @property
    def torch(self) -> Any:
        """The module torch. Raises `Missing` if torch is not installed or does not support the device."""
        if self.torch_module is None:
            raise Missing("torch not installed, or without CUDA" if self.is_gpu else "torch not installed")
        return self.torch_module

    def tensor(self, array: Array) -> Tensor:
        """Return the same memory as a torch tensor. Raises `Missing` as `torch` does."""
        if array.dtype == np.float32:
            return self.torch.as_tensor(array, device=self.torch_device)
        # Every torch has int16, which carries the bits of bf16.
        return self.torch.as_tensor(array.view(np.int16), device=self.torch_device).view(self.torch.bfloat16)

    def by_hand(self, array: Array) -> Any:
        """Return the same memory as the array that code by hand would use."""
        return array

    def empty(self, shapes: Sequence[tuple[int, ...]], dtype: npt.DTypeLike) -> list[Array]:
        """Return arrays with undefined contents, each in separate memory, at the offsets of `shifts`."""
        shifted = zip(itertools.cycle(self.shifts), shapes, strict=False)
        return [self.xp.empty(shift + int(np.prod(shape)), dtype)[shift:].reshape(shape) for shift, shape in shifted]

    def placed(self, values: Sequence[npt.NDArray[Any]]) -> list[Array]:
        """Return the same values on the device, as `empty` places them."""
        arrays = self.empty([value.shape for value in values], values[0].dtype)
        self.copy(arrays, (self.xp.asarray(value) for value in values))
        return arrays

    def copy(self, arrays: Sequence[Array], originals: Iterable[Array]) -> None:
        """Copy the values of `originals` to `arrays`, one by one."""
        for array, original in zip(arrays, originals, strict=True):
            array[...] = original

    def poison(self, arrays: Sequence[Array]) -> None:
        """Make every float NaN, so that the check of a case finds elements that it does not write."""
        for array in arrays:
            array.fill(np.nan if array.dtype == np.float32 else np.uint16(0xFFFF))

    def read(self, array: Array | Tensor) -> npt.NDArray[Any]:
        """Return the values of an array or tensor on the host."""
        if isinstance(array, np.ndarray):
            return array
        found: npt.NDArray[Any] = array.get() if hasattr(array, "get") else array.cpu().numpy()
        return found

    def raw(self, array: Array, dtype: str = "bfloat16") -> RawBuffer:
        """Return the memory of an array as a `RawBuffer`, for dtypes that the array's library does not have."""
        address = array.data.ptr if self.is_gpu else array.ctypes.data
        return RawBuffer(int(address), int(array.size), dtype, self.kernels.device.name, owner=array)

    @abstractmethod
    def sample(self, case: Case) -> Sample:
        """Prepare a case, run it, and return its times."""


@final
class Host(Device):
    """The CPUs of this machine. A call returns when its work is done."""

    is_gpu, torch_device = False, "cpu"
    rest, work = _REST_SECONDS, _WORK_SECONDS  # seconds before each sample

    def sample(self, case: Case) -> Sample:
        """Rest, let all CPUs work on other memory, then run the case once, as after a backward pass.

        The other work takes the case's data out of the caches and wakes all CPUs.
        """
        time.sleep(self.rest)
        case.prepare()
        self._occupy_cpus()
        began = self.clock()
        case.run()
        return Sample(*[self.clock() - began] * 3)

    def _occupy_cpus(self) -> None:
        end = time.perf_counter() + self.work

        def add_until_then(cpu: int) -> None:
            while time.perf_counter() < end:
                np.add(self._other_memory[cpu], 1, out=self._other_memory[cpu])

        on_all_cpus(add_until_then, range(available_cpus()))

    @cached_property
    def _other_memory(self) -> Array:
        return np.zeros((available_cpus(), _WORKED_ON), np.float32)


@final
@dataclass(kw_only=True, eq=False)
class Gpu(Device):
    """A GPU. A call returns when its work is queued."""

    is_gpu, torch_device = True, "cuda"

    scratch: int = 1 << 30  # fp32 elements that are read before each run
    copied: int = 1 << 29
    warm_up: int = 3

    def recorded(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return a function that launches a CUDA graph of torch calls, after torch's documented warm-up."""
        cuda = self.torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(2):
                run()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            run()
        return launching(graph.replay, run)

    def sample(self, case: Case) -> Sample:
        """Run the case twice, after other work timed by events, then from an idle GPU timed by the host's clock.

        Each run follows a read of the scratch memory. The read removes the case's data from the L2 and leaves no data
        to write back. The read takes a millisecond, in which the host queues the case. The GPU then waits for no launch
        of a call that returns in time.
        """
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        case.prepare()
        self._read_scratch()
        start.record()
        began = self.clock()
        case.run()
        host = self.clock() - began
        stop.record()
        stop.synchronize()
        case.prepare()
        self._read_scratch()
        self.wait()
        began = self.clock()
        case.run()
        self.wait()
        wall = self.clock() - began
        return Sample(1e-3 * self.xp.cuda.get_elapsed_time(start, stop), wall, host)

    def wait(self) -> None:
        """Wait until all queued work is done."""
        self.xp.cuda.runtime.deviceSynchronize()

    @cached_property
    def _read_scratch(self) -> Callable[[], None]:
        scratch = self.kernels.device.allocate(self.scratch)
        self.kernels.fill_zero([scratch])
        arena = self.kernels.arena([scratch])
        return lambda: self.kernels.measure(arena)


def launching(launch: Callable[[], object], recorded: Callable[[], object]) -> Callable[[], object]:
    """Return a function that launches the graph of a recorded call, and keeps alive the memory that the graph uses."""

    def replay() -> object:
        launch()
        return recorded

    return replay


def open_host(elements: int) -> Host:
    """Return this machine's CPUs, for gradients of that many elements, with PyTorch if it is installed."""
    copied = int(np.clip(elements, *_COPIED))
    return Host(xp=np, kernels=kernels_for("cpu"), torch_module=_torch(), copied=copied)


def open_gpu() -> Gpu:
    """Return the first GPU, with PyTorch if that supports CUDA. Raises `DeviceUnavailable` if there is none."""
    torch, kernels = _torch(), cuda_kernels(0)
    has_cuda = torch is not None and torch.cuda.is_available()
    return Gpu(xp=kernels.xp, kernels=kernels, torch_module=torch if has_cuda else None)


def _torch() -> Any:
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None
