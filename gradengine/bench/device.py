"""The devices: each places arrays, times work on them, measures memory, and knows what torch is there."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import RawBuffer
from gradengine.bench.case import Case, Missing
from gradengine.kernels import CudaKernels, Kernels, kernels_for
from gradengine.kernels.cuda import cuda_kernels
from gradengine.kernels.host import available_cpus

__all__ = [
    "Array",
    "Device",
    "Gpu",
    "Host",
    "Replay",
    "Sample",
    "Tensor",
    "gpu_of",
    "open_gpu",
    "open_host",
    "peak_growth",
]

Array: TypeAlias = Any  # NumPy's or CuPy's
Tensor: TypeAlias = Any

Result = TypeVar("Result")

_ODD_SHIFTS = (1, 3, 5, 7)
_REST_SECONDS = 0.03  # OpenMP's threads spin on for milliseconds after PyTorch is done, on the next variant's CPUs
_CHUNK = 262144  # elements: the kernels' own, few enough pieces that threads seldom meet at the GIL
_COPIED = (1 << 22, 1 << 25)  # elements: beyond a core's caches; 128 MB, four times the largest L3 of a core complex
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class Sample(NamedTuple):
    """One run in seconds; on the host all three are the same."""

    device: float  # between two events on the stream, queued behind other work: what the GPU takes
    wall: float  # from an idle device, by the host's clock, until all is done
    host: float  # until the call comes back: what the training loop's thread pays


@dataclass(frozen=True, kw_only=True)
class Device(ABC):
    """Where the gradients of a benchmark lie."""

    is_gpu: ClassVar[bool]

    xp: Any  # NumPy or CuPy
    kernels: Kernels
    torch_module: Any  # None where it is missing or does not know the device
    torch_device: str
    tensor: Callable[[Array], Tensor]  # over the same memory; bfloat16 comes as its bits
    by_hand: Callable[[Array], Any]  # as a person who writes NumPy's names has it
    copied: int  # fp32 elements of the arrays by which the memory's bandwidth is measured
    clock: Callable[[], float] = time.perf_counter
    warm_up: int = 1  # rounds whose samples are dropped: pages are touched, threads started, clocks rise

    @property
    def torch(self) -> Any:
        """PyTorch.

        Raises:
            Missing: It is not there, or does not know the device.
        """
        if self.torch_module is None:
            raise Missing("torch not installed, or without CUDA" if self.is_gpu else "torch not installed")
        return self.torch_module

    def tensors(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The same memory for torch; raises as `torch`."""
        return [self.tensor(array) for array in arrays] if self.torch else []

    def empty(self, shapes: Sequence[tuple[int, ...]], dtype: npt.DTypeLike, *, odd: bool = False) -> list[Array]:
        """Arrays of undefined contents, each in memory of its own; `odd` ones 1, 3, 5 or 7 elements off its start."""
        shifts = [_ODD_SHIFTS[number % len(_ODD_SHIFTS)] if odd else 0 for number in range(len(shapes))]
        return [
            self.xp.empty(shift + int(np.prod(shape)), dtype)[shift:].reshape(shape)
            for shift, shape in zip(shifts, shapes, strict=True)
        ]

    def placed(self, values: Sequence[npt.NDArray[Any]], *, odd: bool = False) -> list[Array]:
        """The same values on the device, as `empty` places them."""
        arrays = self.empty([value.shape for value in values], values[0].dtype, odd=odd)
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
        """What an array or tensor holds, on the host."""
        if isinstance(array, np.ndarray):
            return array
        found: npt.NDArray[Any] = array.get() if hasattr(array, "get") else array.cpu().numpy()
        return found

    def raw(self, array: Array, dtype: str = "bfloat16") -> RawBuffer:
        """The memory of an array, as ours takes what has no dtype in the array's library."""
        address = array.data.ptr if self.is_gpu else array.ctypes.data
        return RawBuffer(int(address), int(array.size), dtype, self.kernels.device.name, owner=array)

    @abstractmethod
    def sample(self, case: Case) -> Sample:
        """Prepare a case, run it, and take its times."""

    @abstractmethod
    def spread(self, work: Callable[[slice], object], size: int) -> None:
        """Do elementwise work on slices of arrays of that size, with all that the device has."""

    @abstractmethod
    def peak_growth(self, work: Callable[[], Result]) -> tuple[Result, int | None]:
        """What `work` gives back, and by how many bytes the memory grew at the peak; None where it is not measured."""


@final
@dataclass(frozen=True, kw_only=True)
class Host(Device):
    """The CPUs of this machine: a call comes back when all is done."""

    is_gpu = False

    rest: float = _REST_SECONDS  # before each sample

    def sample(self, case: Case) -> Sample:
        """Rest, then run the case once: its data are no longer in the caches, as after a backward pass."""
        time.sleep(self.rest)
        case.prepare()
        began = self.clock()
        case.run()
        return Sample(*[self.clock() - began] * 3)

    def spread(self, work: Callable[[slice], object], size: int) -> None:
        """Each CPU has a share of the elements, chunk by chunk."""
        cpus = available_cpus()
        edges = [size * i // cpus for i in range(cpus + 1)]

        def share(i: int) -> None:
            for start in range(edges[i], edges[i + 1], _CHUNK):
                work(slice(start, min(edges[i + 1], start + _CHUNK)))

        for _ in self._pool.map(share, range(cpus)):
            pass

    def peak_growth(self, work: Callable[[], Result]) -> tuple[Result, int | None]:
        """Of this process, as Linux counts it."""
        return peak_growth(work)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(available_cpus())


@final
@dataclass(frozen=True, kw_only=True)
class Gpu(Device):
    """A GPU: a call comes back when its work is queued."""

    is_gpu = True

    torch_tensor: Callable[[Array], object]  # as ours gets it from torch: recognised, and asked where it lies
    elapsed_ms: Callable[[Any, Any], float]  # between two events
    recorded: Callable[[Callable[[], object]], Callable[[], object]]  # torch's work -> what launches its CUDA graph
    compiled: Callable[[Callable[..., object]], Callable[..., object]]  # torch.compile
    scratch: int = 1 << 30  # fp32 elements that are read before each run
    copied: int = 1 << 29
    warm_up: int = 3

    def sample(self, case: Case) -> Sample:
        """Run the case twice: behind other work, timed by events; then from an idle GPU, timed by the host's clock.

        Before each the scratch memory is read: the L2 holds none of the case's data afterwards and nothing that is
        still to be written back, and the host has a millisecond to queue the case, so that the GPU waits for no launch
        of a call that returns in time.
        """
        device, host = self._by_events(case)
        return Sample(device, self._by_clock(case), host)

    def spread(self, work: Callable[[slice], object], size: int) -> None:
        """All in one."""
        work(slice(size))

    def peak_growth(self, work: Callable[[], Result]) -> tuple[Result, int | None]:
        """Not measured: CuPy's pool keeps no peak."""
        return work(), None

    def wait(self) -> None:
        """Until all that was queued is done."""
        self.xp.cuda.runtime.deviceSynchronize()

    def _by_events(self, case: Case) -> tuple[float, float]:
        start, stop = self._events
        case.prepare()
        self._read_scratch()
        start.record()
        began = self.clock()
        case.run()
        host = self.clock() - began
        stop.record()
        stop.synchronize()
        return 1e-3 * self.elapsed_ms(start, stop), host

    def _by_clock(self, case: Case) -> float:
        case.prepare()
        self._read_scratch()
        self.wait()
        began = self.clock()
        case.run()
        self.wait()
        return self.clock() - began

    @cached_property
    def _events(self) -> tuple[Any, Any]:
        return self.xp.cuda.Event(), self.xp.cuda.Event()

    @cached_property
    def _read_scratch(self) -> Callable[[], None]:
        scratch = self.kernels.device.allocate(self.scratch)
        self.kernels.fill_zero([scratch])
        arena = self.kernels.arena([scratch])
        return lambda: self.kernels.measure(arena)


@dataclass(frozen=True)
class Replay:
    """What launches a graph."""

    launch: Callable[[], object]
    kept: object  # whatever the graph reads and writes: it has only their addresses

    def __call__(self) -> None:
        """Launch it."""
        self.launch()


def open_host(elements: int) -> Host:
    """This machine, for gradients of that many elements, with PyTorch if it is installed."""
    torch = _torch()

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        if array.dtype == np.float32:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)

    return Host(
        xp=np,
        kernels=kernels_for("cpu"),
        torch_module=torch,
        torch_device="cpu",
        tensor=tensor,
        by_hand=lambda array: array,
        copied=int(np.clip(elements, *_COPIED)),
    )


def open_gpu() -> Gpu:
    """The first GPU, with PyTorch if it knows that.

    Raises:
        DeviceUnavailable: It, CuPy, or what CuPy needs is missing.
    """
    torch = _torch()
    return gpu_of(cuda_kernels(0), torch if torch is not None and torch.cuda.is_available() else None)


def gpu_of(kernels: CudaKernels, torch: Any) -> Gpu:
    """The GPU of these kernels, and PyTorch on the same one."""

    def tensor(array: Array) -> Tensor:
        """Through the CUDA array interface; bf16 comes as int16, which every torch has, and is looked at anew."""
        if array.dtype == np.float32:
            return torch.as_tensor(array, device="cuda")
        return torch.as_tensor(array.view(np.int16), device="cuda").view(torch.bfloat16)

    return Gpu(
        xp=kernels.xp,
        kernels=kernels,
        torch_module=torch,
        torch_device="cuda",
        tensor=tensor,
        by_hand=lambda array: array,
        torch_tensor=tensor,
        elapsed_ms=kernels.xp.cuda.get_elapsed_time,
        recorded=lambda run: _recorded(torch, run),
        compiled=lambda function: torch.compile(function, fullgraph=True, dynamic=False),
    )


def peak_growth(work: Callable[[], Result]) -> tuple[Result, int | None]:
    """What `work` gives back, and by how many bytes this process's memory grew at the peak, as Linux counts it.

    Memory counts when it is touched; None where the system keeps no peak that can be reset.

    Example:
        >>> memory, grown = peak_growth(lambda: b"x" * (1 << 25))
        >>> grown is None or grown > 1 << 24
        True
    """
    # What the allocator kept from earlier work would be used again, and not be seen as growth.
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        before = _resident("VmRSS")
    except OSError:
        return work(), None
    result = work()
    return result, max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _torch() -> Any:
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def _recorded(torch: Any, run: Callable[[], object]) -> Callable[[], object]:
    """As torch's documentation has it: warmed up on a stream of its own, then captured, then replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return Replay(graph.replay, kept=run)
