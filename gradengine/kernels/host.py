"""The kernels in NumPy: chunk by chunk through the cache, a few threads, and the definition the GPU is held to.

NumPy releases the GIL inside each of these calls, so plain threads reach the memory's bandwidth. A chunk's result
depends on the chunk alone, so the number of threads and their order change no bit.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt

from gradengine.arguments import said, whole_number
from gradengine.arrays.buffer import Array, Buffer
from gradengine.arrays.host import host_buffer
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import CallerError, OutOfDeviceMemory
from gradengine.kernels.decision import ClipPlan, Decision, Float64, Scalar, decide, sum_in_order
from gradengine.kernels.interface import CHUNK, Chunk, Kernels, Recorded, SquaredSums, chunks_of
from gradengine.kernels.operands import Batch, Contribution, Fold, SlotSet
from gradengine.kernels.staging import NoStaging
from gradengine.kernels.status import StepStatus
from gradengine.threads import start_thread

__all__ = ["HostKernels", "squared_sum"]

Task = TypeVar("Task")

_ELEMENTS_A_THREAD = 262144  # less work than this is done before another thread has woken up and got the GIL
_ROW = 512  # elements whose squares are summed in fp32; with 16 lanes or more that is <= 32 roundings, 1e-6 of the norm
_SAFE_MEAN_SQUARE = 2.0**-100  # below this mean square, fp32 squares (>= 2**-126) may have lost what fp64 keeps
_BF16_NAN = np.uint16(0x7FC0)
_IN_ORDER: AbstractContextManager[None] = nullcontext()


@final
class HostKernels(Kernels):
    """NumPy on the CPU.

    Args:
        threads: Threads to work with, the caller's included; by default one for each CPU this process may use.

    Raises:
        CallerError: `threads` is less than one.

    Example:
        >>> kernels = HostKernels()
        >>> target = kernels.allocate(3)
        >>> source = kernels.view(np.array([1, 2, 2], np.float32), "w")
        >>> sums = SquaredSums([3])
        >>> kernels.accumulate([target], [Fold(0, True, (source,), (np.float32(1),))], sums)
        >>> decide(kernels.totals(sums), ClipPlan((0,), (math.inf,)), divisor=1.0).norm
        3.0
    """

    device = "cpu"
    measures_in_passing = False  # a pass over what the cache has lost costs as much as a pass of its own

    def __init__(self, threads: int | None = None) -> None:
        self.threads = available_cpus() if threads is None else whole_number("threads", threads, 1)

    def on(self, stream: object) -> AbstractContextManager[object]:
        """See `Kernels.on`: the CPU has no streams."""
        if stream is not None:
            raise CallerError("the CPU has no streams", got=said(stream), expected="stream=None")
        return nullcontext()

    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """See `Kernels.views`; host memory only."""
        return [host_buffer(source, component) for source, component in zip(sources, components, strict=True)]

    def wait_for(self, producers: Iterable[ProducerStream]) -> None:
        """See `Kernels.wait_for`: the host does one thing after the other."""

    def hand_over(self, producers: Iterable[ProducerStream]) -> None:
        """See `Kernels.hand_over`: the host is done."""

    def allocate(self, size: int) -> Buffer:
        """See `Kernels.allocate`; the pages are touched when first written."""
        try:
            memory = np.empty(4 * size + 128, np.uint8)
        except (MemoryError, ValueError):  # NumPy's word for more than an address can say
            raise OutOfDeviceMemory("the CPU has not the memory", got=f"{4 * size} bytes asked for") from None
        start = -memory.ctypes.data % 128
        data = memory[start : start + 4 * size].view(np.float32)
        return Buffer(data.ctypes.data, size, "float32", (size,), True, memory, data=data)

    def refuse_to_exceed(self, nbytes: int, what: str) -> None:
        """See `Kernels.refuse_to_exceed`: the operating system decides when pages are touched."""

    def array(self, buffer: Buffer, shape: tuple[int, ...]) -> Array:
        """See `Kernels.array`; a NumPy view."""
        view: Array = buffer.data.reshape(shape)
        return view

    def squared_sums(self, sizes: Sequence[int], memory: Buffer | None = None) -> SquaredSums:
        """See `Kernels.squared_sums`."""
        return SquaredSums(sizes)

    def prepare(
        self, targets: Sequence[Buffer], sums: SquaredSums, places: Sequence[SlotSet], plan: ClipPlan | None = None
    ) -> None:
        """See `Kernels.prepare`: the host needs nothing."""

    def in_order(self, sums: SquaredSums) -> AbstractContextManager[None]:
        """See `Kernels.in_order`: the host does one thing after the other."""
        return _IN_ORDER

    def follow(self, sums: SquaredSums) -> None:
        """See `Kernels.follow`: what was done is done."""

    def is_capturing(self) -> bool:
        """See `Kernels.is_capturing`: never."""
        return False

    def contribution(self, places: SlotSet, views: Sequence[Buffer | None]) -> Contribution:
        """See `Kernels.contribution`."""
        pointers = [view.pointer if view is not None and view.size else 0 for view in views]
        return Contribution(places, views, np.array(pointers, np.uint64), views=views)

    def accumulate_batch(self, targets: Sequence[Buffer], batch: Batch, sums: SquaredSums | None = None) -> None:
        """See `Kernels.accumulate_batch`."""
        self.accumulate(targets, batch.folds(), sums)

    def accumulate(self, targets: Sequence[Buffer], folds: Sequence[Fold], sums: SquaredSums | None = None) -> None:
        """See `Kernels.accumulate`."""

        def fold_chunk(task: tuple[Fold, int, int, int]) -> None:
            fold, index, start, stop = task
            target = targets[fold.position].data[start:stop]
            _fold(target, [s.data[start:stop] for s in fold.sources], fold)
            if sums is not None:
                sums.values[index] = squared_sum(target)

        places = [(fold, targets[fold.position].size, sums.first[fold.position] if sums else 0) for fold in folds]
        tasks = [(fold, *chunk) for fold, size, first in places for chunk in chunks_of(size, first)]
        self._run(fold_chunk, tasks, sum(size for _, size, _ in places))

    def measure(self, buffers: Sequence[Buffer], sums: SquaredSums, chunks: Sequence[Chunk]) -> None:
        """See `Kernels.measure`."""

        def measure_chunk(chunk: Chunk) -> None:
            position, index, start, stop = chunk
            buffer = buffers[position]
            sums.values[index] = squared_sum(_widened(buffer.data[start:stop], buffer.dtype))

        self._run(measure_chunk, chunks, sum(stop - start for _, _, start, stop in chunks))

    def measure_all(self, buffers: Sequence[Buffer], sums: SquaredSums, positions: Sequence[int] | None = None) -> None:
        """See `Kernels.measure_all`."""
        self.measure(buffers, sums, sums.all_chunks(range(len(buffers)) if positions is None else positions))

    def totals(self, sums: SquaredSums) -> Float64:
        """See `Kernels.totals`."""
        spans = zip(sums.first, sums.counts, strict=True)
        return np.array([sum_in_order(sums.values[first : first + count]) for first, count in spans], np.float64)

    def finalise(
        self,
        targets: Sequence[Buffer] | None,
        sums: SquaredSums,
        plan: ClipPlan,
        divisor: float,
        *,
        zero_if_bad: bool,
        step: int = 0,
    ) -> Decision:
        """See `Kernels.finalise`."""
        return decide(self.totals(sums), plan, divisor, zero_if_bad=zero_if_bad)

    def hand_back(
        self,
        sources: Sequence[Buffer],
        decision: Decision,
        groups: Sequence[int],
        destinations: Sequence[Buffer],
    ) -> None:
        """See `Kernels.hand_back`."""
        if decision.skipped:
            self.fill_zero(destinations)
        else:
            self._scale_each(sources, [decision.factors[group] for group in groups], destinations)

    def scale(self, sources: Sequence[Buffer], factor: np.float32, destinations: Sequence[Buffer]) -> None:
        """See `Kernels.scale`."""
        self._scale_each(sources, [factor] * len(sources), destinations)

    def _scale_each(
        self, sources: Sequence[Buffer], factors: Sequence[np.float32], destinations: Sequence[Buffer]
    ) -> None:
        def scale_chunk(task: tuple[int, int, int]) -> None:
            position, start, stop = task
            source, destination = sources[position], destinations[position]
            values = _widened(source.data[start:stop], source.dtype)
            _scale(values, factors[position], destination.data[start:stop], destination.dtype)

        moving = [p for p in range(len(sources)) if factors[p] != 1 or sources[p].pointer != destinations[p].pointer]
        tasks = [(p, start, stop) for p in moving for _, start, stop in chunks_of(sources[p].size)]
        self._run(scale_chunk, tasks, sum(sources[p].size for p in moving))

    def telemetry(self, sums: SquaredSums, plan: ClipPlan) -> None:
        """See `Kernels.telemetry`: the host knows at once."""

    def copied(self, number: Scalar, sums: SquaredSums) -> Scalar:
        """See `Kernels.copied`: numbers are nobody's memory."""
        return number

    def read_verdict(self, decision: Decision) -> StepStatus:
        """See `Kernels.read_verdict`: the host's decisions are read as they are."""
        raise CallerError("the CPU's decision is known; there is no verdict to read")

    def staging(self, arena: Buffer) -> NoStaging:
        """See `Kernels.staging`: the arena itself."""
        return NoStaging(arena)

    def recording(self) -> AbstractContextManager[Recorded]:
        """See `Kernels.recording`."""
        raise CallerError("the CPU has no graphs to record", got="device 'cpu'", expected="a CUDA device")

    def replay(self, recorded: Recorded) -> None:
        """See `Kernels.replay`."""
        raise CallerError("the CPU has no graphs to replay", got="device 'cpu'", expected="a CUDA device")

    def fill_zero(self, buffers: Sequence[Buffer]) -> None:
        """See `Kernels.fill_zero`."""
        self._run(lambda buffer: buffer.data.fill(0), buffers, sum(buffer.size for buffer in buffers))

    def zero_sums(self, sums: SquaredSums, positions: Sequence[int]) -> None:
        """See `Kernels.zero_sums`."""
        for position in positions:
            first = sums.first[position]
            sums.values[first : first + sums.counts[position]] = 0

    def first_non_finite(self, buffer: Buffer) -> tuple[int, float] | None:
        """See `Kernels.first_non_finite`."""
        for start in range(0, buffer.size, CHUNK):
            found = first_non_finite(_widened(buffer.data[start : start + CHUNK], buffer.dtype))
            if found is not None:
                return start + found[0], found[1]
        return None

    def _run(self, work: Callable[[Task], None], tasks: Sequence[Task], elements: int) -> None:
        """Do `work` on each task; the threads take the next one from a common list, the caller among them.

        However it ends, no thread works on these tasks any more when it has ended.
        """
        helpers = min(self.threads, len(tasks), 1 + elements // _ELEMENTS_A_THREAD) - 1
        shared = _SharedWork(work, tasks)
        if helpers < 1:
            shared.drain()
            return
        try:
            try:
                pool = _pool(self.threads)
                for _ in range(helpers):
                    pool.put(shared.help)
                shared.drain()
            finally:
                shared.end()
        finally:
            shared.end()  # the first one may be what Ctrl-C interrupted
        shared.raise_fault()


class _SharedWork(Generic[Task]):
    """Tasks that a caller and helper threads take one by one; the caller's interrupts leave nothing locked.

    No lock but a helper's own: an interrupt between acquiring one and the `with` that releases it would stop the
    others for ever. A deque's operations are atomic.
    """

    def __init__(self, work: Callable[[Task], None], tasks: Iterable[Task]) -> None:
        self._work, self._tasks = work, deque(tasks)
        self._helpers: list[_Helper] = []
        self._faults: list[BaseException] = []

    def drain(self) -> None:
        """Take tasks until there are none."""
        # Overflow and NaN are found by the squared sums and reported by name; NumPy's warnings name nothing.
        with np.errstate(all="ignore"):
            while True:
                try:
                    task = self._tasks.popleft()
                except IndexError:
                    return
                self._work(task)

    def help(self) -> None:
        """Drain, in a helper thread."""
        helper = _Helper()
        # Before the first task is taken: who empties the list and then waits for all helpers misses none.
        self._helpers.append(helper)
        try:
            self.drain()
        except BaseException as fault:  # noqa: BLE001  (the caller raises it)
            self._faults.append(fault)
            self._tasks.clear()
        finally:
            helper.finish()

    def end(self) -> None:
        """Return when nobody works any more, interrupted or not; helpers that never began are not waited for."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._tasks.clear()
                for helper in tuple(self._helpers):
                    helper.wait()
                break
            except BaseException as fault:  # noqa: BLE001  (raised when the chunk under way, 0.1 ms of work, is done)
                interrupt = fault
        if interrupt is not None:
            raise interrupt

    def raise_fault(self) -> None:
        """Raise what a helper ended with."""
        if self._faults:
            raise self._faults[0]


class _Helper:
    """One helper thread's part in the shared work."""

    def __init__(self) -> None:
        self._is_done = False
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self) -> None:
        """Say that it is done."""
        self._is_done = True
        self._done.release()

    def wait(self) -> None:
        """Return when it is done; to be called again where it was interrupted."""
        while not self._is_done:
            self._done.acquire()


def squared_sum(values: npt.NDArray[np.float32]) -> float:
    """The sum of squares of fp32 values, within 1e-6 relative for any magnitudes; NaN or Inf where one is in them.

    Rows of 512 squares are summed in fp32 by BLAS, rows in fp64; where a square overflows or all are tiny, the sum is
    taken again in fp64, where neither can happen (3e38 squared is 1e77). Zeros alone, which most of an embedding's
    gradient may be, are found in a fifth of that time.

    Example:
        >>> squared_sum(np.full(3, 1e30, np.float32)) / 3e60
        1.0000000...
    """
    whole = values.size - values.size % _ROW
    rows = values[:whole].reshape(-1, _ROW)
    tail = values[whole:]
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.add.reduce(np.vecdot(rows, rows), dtype=np.float64)) + float(np.vecdot(tail, tail))
    if _SAFE_MEAN_SQUARE * values.size <= total < math.inf:
        return total
    if total == 0 and values.max() == 0 == values.min():
        return 0.0
    wide = values.astype(np.float64)
    return float(np.add.reduce(np.multiply(wide, wide, out=wide)))


def first_non_finite(values: npt.NDArray[np.float32]) -> tuple[int, float] | None:
    """Index and value of the first NaN or Inf, or None.

    >>> first_non_finite(np.array([1, np.inf, np.nan], np.float32))
    (1, inf)
    """
    finite = np.isfinite(values)
    if finite.all():
        return None
    index = int(finite.argmin())
    return index, float(values[index])


def available_cpus() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fold(target: npt.NDArray[np.float32], sources: Sequence[Array], fold: Fold) -> None:
    terms = [(s, buffer.dtype, w) for s, buffer, w in zip(sources, fold.sources, fold.weights, strict=True)]
    total = target
    if fold.overwrite:
        source, dtype, weight = terms.pop(0)
        if terms and dtype == "float32" and weight == 1:
            total = source  # the first addition reads it where it lies: one pass less through the cache
        else:
            _assign(target, source, dtype, weight)
    for source, dtype, weight in terms:
        np.add(total, _weighted(source, dtype, weight), out=target)
        total = target


def _assign(target: npt.NDArray[np.float32], source: Array, dtype: str, weight: np.float32) -> None:
    if dtype == "bfloat16":
        bits = target.view(np.uint32)
        np.copyto(bits, source)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(target, source)
    if weight != 1:
        np.multiply(target, weight, out=target)


def _weighted(source: Array, dtype: str, weight: np.float32) -> npt.NDArray[np.float32]:
    values = _widened(source, dtype)
    if weight == 1:
        return values
    return np.multiply(values, weight, out=_scratch.floats(values.size))


def _widened(source: Array, dtype: str) -> npt.NDArray[np.float32]:
    """The values in fp32, exactly: the source itself, or this thread's scratch (good until its next use)."""
    if dtype == "float32":
        return source
    wide = _scratch.floats(source.size)
    _assign(wide, source, dtype, np.float32(1))
    return wide


def _scale(values: npt.NDArray[np.float32], factor: np.float32, destination: Array, dtype: str) -> None:
    if dtype == "float32":
        np.multiply(values, factor, out=destination)
        return
    product = np.multiply(values, factor, out=_scratch.floats(values.size))
    if dtype == "float16":
        np.copyto(destination, product, casting="same_kind")
    else:
        _round_to_bfloat16(product, destination)


def _round_to_bfloat16(values: npt.NDArray[np.float32], destination: npt.NDArray[np.uint16]) -> None:
    """Round to nearest, ties to even, on the bits: add half an ulp less one, plus the bit that decides a tie."""
    nan = np.isnan(values) if np.isnan(values.max()) else None
    bits, half_ulp = values.view(np.uint32), _scratch.words(values.size)
    np.bitwise_and(np.right_shift(bits, 16, out=half_ulp), 1, out=half_ulp)
    np.add(half_ulp, 0x7FFF, out=half_ulp)
    np.add(bits, half_ulp, out=bits)
    np.copyto(destination, np.right_shift(bits, 16, out=bits), casting="unsafe")
    if nan is not None:
        destination[nan] = _BF16_NAN


class _Scratch(threading.local):
    """Two chunks for each thread, so that no pass allocates: a fresh megabyte costs 350 us of page faults."""

    def __init__(self) -> None:
        self._floats, self._words = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.uint32)

    def floats(self, size: int) -> npt.NDArray[np.float32]:
        return self._floats[:size]

    def words(self, size: int) -> npt.NDArray[np.uint32]:
        return self._words[:size]


_scratch = _Scratch()
_Calls: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
_pools: dict[int, _Calls] = {}


def _pool(threads: int) -> _Calls:
    """Where calls are put for so many threads of this process to make, one less than asked for: the caller works too.

    Not an executor, and without a lock: an interrupt of the caller can leave those of futures held.
    """
    if threads not in _pools:
        calls: _Calls = queue.SimpleQueue()
        for number in range(threads - 1):
            name = f"gradengine-host-{threads}-{number}"
            start_thread(threading.Thread(target=_serve, args=(calls,), name=name, daemon=True))
        if _pools.setdefault(threads, calls) is not calls:  # another thread was quicker
            for _ in range(threads - 1):
                calls.put(None)
    return _pools[threads]


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the caller's arrays


if hasattr(os, "register_at_fork"):
    # A forked child has the queues but not their threads; it starts with none, or its first step would wait for them.
    os.register_at_fork(after_in_child=_pools.clear)
