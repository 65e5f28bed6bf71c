"""The GPU as the benchmarks use it, and what they are timed with; tests give them an emulator and torch on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer, RawBuffer
from gradengine.bench.case import Case
from gradengine.kernels import CudaKernels
from gradengine.kernels.cuda import cuda_kernels

__all__ = ["NO_TORCH", "Gpu", "Lent", "Missing", "Replay", "Sample", "Stopwatch", "gpu_of", "open_gpu", "raw"]

Array = Any  # CuPy's, or what a test has instead of it
Tensor = Any

NO_TORCH = "torch not installed, or without CUDA"

_BATCH_STRIDE = 64  # elements: 128 bytes of bf16, 256 of fp32
_ODD_SHIFTS = (1, 3, 5, 7)


class Missing(Exception):
    """What a variant needs is not there; it keeps its line in the table."""


@dataclass(frozen=True)
class Gpu:
    """What the cases ask of the machine.

    Attributes:
        xp: CuPy.
        kernels: Ours, on the device.
        torch: PyTorch, or None.
        torch_device: Where its tensors are made: "cuda".
        tensor: An array as a tensor over the same memory.
        torch_tensor: An array as ours gets it from torch: recognised, and asked where it lies.
        by_hand: An array as a person who writes NumPy's names has it: CuPy's own.
        elapsed_ms: Milliseconds between two events.
        recorded: What torch's work is as a CUDA graph: gives back what launches it.
        compiled: `torch.compile`.
        scratch: Elements of fp32 that are read between samples, to empty the L2 and to give the host a head start.
        copied: Elements of fp32 that the yardsticks copy.
    """

    xp: Any
    kernels: CudaKernels
    torch: Any
    torch_device: str
    tensor: Callable[[Array], Tensor]
    torch_tensor: Callable[[Array], object]
    by_hand: Callable[[Array], Any]
    elapsed_ms: Callable[[Any, Any], float]
    recorded: Callable[[Callable[[], object]], Callable[[], object]]
    compiled: Callable[[Callable[..., object]], Callable[..., object]]
    scratch: int = 1 << 30
    copied: int = 1 << 29

    def wait(self) -> None:
        """Until all that was queued is done."""
        self.xp.cuda.runtime.deviceSynchronize()

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy within the device, on the current stream."""
        runtime, stream = self.xp.cuda.runtime, self.xp.cuda.get_current_stream()
        runtime.memcpyAsync(destination, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    def poison(self, buffers: Sequence[Buffer]) -> None:
        """Make every float NaN: what a case does not write shows in its check."""
        runtime, stream = self.xp.cuda.runtime, self.xp.cuda.get_current_stream()
        for buffer in buffers:
            runtime.memsetAsync(buffer.pointer, 0xFF, buffer.nbytes, stream.ptr)

    def empty(self, shapes: Sequence[tuple[int, ...]], dtype: npt.DTypeLike, *, odd: bool) -> list[Array]:
        """Arrays in one allocation, each at a 128-byte boundary, or off it by 1, 3, 5 or 7 elements.

        Args:
            shapes: Of each.
            dtype: As it is stored; bf16 is its bits.
            odd: Off the boundary.
        """
        starts, end = [], 0
        for number, shape in enumerate(shapes):
            starts.append(end + (_ODD_SHIFTS[number % 4] if odd else 0))
            end = -(-(starts[-1] + int(np.prod(shape))) // _BATCH_STRIDE) * _BATCH_STRIDE
        memory = self.xp.empty(end, dtype)
        return [
            memory[start : start + int(np.prod(shape))].reshape(shape)
            for start, shape in zip(starts, shapes, strict=True)
        ]

    def placed(self, values: Sequence[npt.NDArray[Any]], *, odd: bool = False) -> list[Array]:
        """The same values on the device, as `empty` places them."""
        arrays = self.empty([value.shape for value in values], values[0].dtype, odd=odd)
        for array, value in zip(arrays, values, strict=True):
            array.set(value)
        return arrays

    def tensors(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The same memory for torch.

        Raises:
            Missing: There is no torch, or it sees no GPU.
        """
        if self.torch is None:
            raise Missing(NO_TORCH)
        return [self.tensor(array) for array in arrays]


@final
class Lent:
    """An array of which DLPack alone is to be seen: what ours gets of a framework that it does not know.

    Args:
        array: Any that has DLPack.
    """

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **arguments: Any) -> object:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


def raw(array: Array, *, dtype: str = "bfloat16") -> RawBuffer:
    """The memory of an array whose dtype has no name in CuPy, as ours takes it."""
    return RawBuffer(int(array.data.ptr), int(array.size), dtype, "cuda:0", owner=array)


@dataclass(frozen=True)
class Replay:
    """What launches a graph, and what must stay alive because the graph has its addresses.

    Attributes:
        launch: Launches it.
        kept: Whatever it reads and writes.
    """

    launch: Callable[[], object]
    kept: object

    def __call__(self) -> None:
        """Launch it."""
        self.launch()


class Sample(NamedTuple):
    """One run in seconds.

    Attributes:
        device: Between two events on the stream, queued behind other work: what the GPU takes.
        wall: From an idle GPU, by the host's clock, until all is done.
        host: Until the call comes back: what the training loop's thread pays.
    """

    device: float
    wall: float
    host: float


@final
class Stopwatch:
    """Times a case twice: behind other work, by events; then from an idle GPU, by the host's clock.

    Before each the scratch memory is read: the L2 holds none of the case's data afterwards and nothing that is still to
    be written back, and the host has a millisecond to queue the case, so that the GPU waits for no launch of a call
    that returns in time.

    Args:
        gpu: The device.
        clock: The host's, in seconds.
    """

    def __init__(self, gpu: Gpu, clock: Callable[[], float] = time.perf_counter) -> None:
        self._gpu, self._clock = gpu, clock
        self._scratch = gpu.kernels.allocate(gpu.scratch)
        gpu.kernels.fill_zero([self._scratch])
        self._sums = gpu.kernels.squared_sums([gpu.scratch])
        self._chunk = self._sums.all_chunks([0])[:1]  # the kernel takes whole buffers
        self._start, self._stop = gpu.xp.cuda.Event(), gpu.xp.cuda.Event()

    def __call__(self, case: Case) -> Sample:
        """One sample."""
        device, host = self._by_events(case)
        return Sample(device, self._by_clock(case), host)

    def _by_events(self, case: Case) -> tuple[float, float]:
        case.prepare()
        self._read_scratch()
        self._start.record()
        began = self._clock()
        case.run()
        host = self._clock() - began
        self._stop.record()
        self._stop.synchronize()
        return 1e-3 * self._gpu.elapsed_ms(self._start, self._stop), host

    def _by_clock(self, case: Case) -> float:
        case.prepare()
        self._read_scratch()
        self._gpu.wait()
        began = self._clock()
        case.run()
        self._gpu.wait()
        return self._clock() - began

    def _read_scratch(self) -> None:
        self._gpu.kernels.measure([self._scratch], self._sums, self._chunk)


def open_gpu() -> Gpu:
    """The first GPU.

    Raises:
        DeviceUnavailable: It, CuPy, or what CuPy needs is missing.
    """
    torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
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
        torch=torch,
        torch_device="cuda",
        tensor=tensor,
        torch_tensor=tensor,
        by_hand=lambda array: array,
        elapsed_ms=kernels.xp.cuda.get_elapsed_time,
        recorded=lambda run: _recorded(torch, run),
        compiled=lambda function: torch.compile(function, fullgraph=True, dynamic=False),
    )


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
