"""The devices: each places arrays, times work on them, and has its torch."""

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

Array: TypeAlias = Any  # NumPy's or CuPy's
Tensor: TypeAlias = Any

Result = TypeVar("Result")

_REST_SECONDS = 0.03  # OpenMP's threads spin on for milliseconds after PyTorch is done, on the next variant's CPUs
_WORK_SECONDS = 0.02  # thereafter, as in backward: a CPU that sleeps takes longer to wake than a small step takes
_WORKED_ON = 1 << 22  # elements for each CPU: beyond its caches
_COPIED = (1 << 22, 1 << 25)  # elements: beyond a core's caches; 128 MB, four times the largest L3 of a core complex


def on_all_cpus(work: Callable[[int], Result], numbers: Iterable[int]) -> list[Result]:
    """The results of `work` for these numbers, in order, on all CPUs; `work` must not call this itself."""
    return list(_pool().map(work, numbers))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cpus())


class Missing(Exception):
    """A variant needs something that is missing here; it keeps its line in the table."""


@dataclass(frozen=True)
class Case:
    """Work that is timed."""

    run: Callable[[], object]  # does it once; this alone is timed
    error: Callable[[], float]  # after a run, the largest relative difference of its result from fp64's
    prepare: Callable[[], object] = lambda: None  # puts back what a run changes; before each run, untimed


class Sample(NamedTuple):
    """One run in seconds; on the host all three are the same."""

    device: float  # between two events on the stream, queued behind other work: what the GPU takes
    wall: float  # from an idle device, by the host's clock, until all is done
    host: float  # until the call comes back: what the training loop's thread pays


@dataclass(kw_only=True, eq=False)
class Device(ABC):
    """The device that holds a benchmark's gradients."""

    is_gpu: ClassVar[bool]
    torch_device: ClassVar[str]

    xp: Any  # NumPy or CuPy
    kernels: Kernels
    torch_module: Any  # None where it is missing or does not know the device
    copied: int  # fp32 elements of the arrays by which the memory's bandwidth is measured
    clock: Callable[[], float] = time.perf_counter
    warm_up: int = 1  # rounds whose samples are dropped: pages are touched, threads started, clocks rise
    shifts: Sequence[int] = (0,)  # how many elements off its memory's start an array lies; arrays take them in turn

    @property
    def torch(self) -> Any:
        """PyTorch; raises `Missing` if it is not installed, or does not support the device."""
        if self.torch_module is None:
            raise Missing("torch not installed, or without CUDA" if self.is_gpu else "torch not installed")
        return self.torch_module

    def tensor(self, array: Array) -> Tensor:
        """The same memory as a torch tensor; bf16 as its bits in int16, which every torch has. Raises as `torch`."""
        if array.dtype == np.float32:
            return self.torch.as_tensor(array, device=self.torch_device)
        return self.torch.as_tensor(array.view(np.int16), device=self.torch_device).view(self.torch.bfloat16)

    def by_hand(self, array: Array) -> Any:
        """The same memory as the array that code written by hand would use."""
        return array

    def empty(self, shapes: Sequence[tuple[int, ...]], dtype: npt.DTypeLike) -> list[Array]:
        """Return arrays of undefined contents, each in memory of its own, which `shifts` leaves out the start of."""
        shifted = zip(itertools.cycle(self.shifts), shapes, strict=False)
        return [self.xp.empty(shift + int(np.prod(shape)), dtype)[shift:].reshape(shape) for shift, shape in shifted]

    def placed(self, values: Sequence[npt.NDArray[Any]]) -> list[Array]:
        """Return the same values on the device, as `empty` places them."""
        arrays = self.empty([value.shape for value in values], values[0].dtype)
        self.copy(arrays, (self.xp.asarray(value) for value in values))
        return arrays

    def copy(self, arrays: Sequence[Array], originals: Iterable[Array]) -> None:
        """Give arrays the values of others, one by one."""
        for array, original in zip(arrays, originals, strict=True):
            array[...] = original

    def poison(self, arrays: Sequence[Array]) -> None:
        """Make every float NaN: what a case does not write shows in its check."""
        for array in arrays:
            array.fill(np.nan if array.dtype == np.float32 else np.uint16(0xFFFF))

    def read(self, array: Array | Tensor) -> npt.NDArray[Any]:
        """The values of an array or tensor, on the host."""
        if isinstance(array, np.ndarray):
            return array
        found: npt.NDArray[Any] = array.get() if hasattr(array, "get") else array.cpu().numpy()
        return found

    def raw(self, array: Array, dtype: str = "bfloat16") -> RawBuffer:
        """The memory of an array as a `RawBuffer`, for dtypes that the array's library does not have."""
        address = array.data.ptr if self.is_gpu else array.ctypes.data
        return RawBuffer(int(address), int(array.size), dtype, self.kernels.device.name, owner=array)

    @abstractmethod
    def sample(self, case: Case) -> Sample:
        """Prepare a case, run it, and take its times."""


@final
class Host(Device):
    """The CPUs of this machine: a call returns when all is done."""

    is_gpu, torch_device = False, "cpu"
    rest, work = _REST_SECONDS, _WORK_SECONDS  # before each sample; all CPUs work behind the rest

    def sample(self, case: Case) -> Sample:
        """Rest, let all CPUs work on other memory, then run the case once: as after a backward pass.

        The case's data are no longer in the caches then, and no CPU sleeps.
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
    """A GPU: a call returns when its work is queued."""

    is_gpu, torch_device = True, "cuda"

    scratch: int = 1 << 30  # fp32 elements that are read before each run
    copied: int = 1 << 29
    warm_up: int = 3

    def recorded(self, run: Callable[[], object]) -> Callable[[], object]:
        """A function that launches a CUDA graph of torch's work, warmed up on its own stream as torch documents it."""
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
        """Run the case twice: after other work, timed by events; then from an idle GPU, timed by the host's clock.

        Before each the scratch memory is read: the L2 holds none of the case's data afterwards and nothing that is
        still to be written back, and the host has a millisecond to queue the case, so that the GPU waits for no launch
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
    """A function that launches a graph of a recorded call, and keeps the call's memory: a graph has only addresses."""

    def replay() -> object:
        launch()
        return recorded

    return replay


def open_host(elements: int) -> Host:
    """This machine, for gradients of that many elements, with PyTorch if it is installed."""
    copied = int(np.clip(elements, *_COPIED))
    return Host(xp=np, kernels=kernels_for("cpu"), torch_module=_torch(), copied=copied)


def open_gpu() -> Gpu:
    """The first GPU, with PyTorch if that supports it; raises `DeviceUnavailable` if anything it needs is missing."""
    torch, kernels = _torch(), cuda_kernels(0)
    has_cuda = torch is not None and torch.cuda.is_available()
    return Gpu(xp=kernels.xp, kernels=kernels, torch_module=torch if has_cuda else None)


def _torch() -> Any:
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None
