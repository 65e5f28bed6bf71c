"""What a device can do to gradients, as one interface: K1 accumulate, K2 finalise, K3 hand back.

The accumulator, the clip and the engine are written once over `Kernels`; `host.py` fulfils it in NumPy, `cuda.py` in
CUDA. All lists are parallel: position i in one is position i in every other.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gradengine.arrays.buffer import Buffer, refuse_read_only
from gradengine.arrays.streams import ProducerStream
from gradengine.kernels.decision import ClipPlan, Decision, Float64, Scalar
from gradengine.kernels.operands import Batch, Contribution, Fold, SlotSet
from gradengine.kernels.staging import StagingBuffer
from gradengine.kernels.status import StatusReadback, StepStatus

__all__ = ["CHUNK", "Chunk", "Kernels", "Recorded", "SquaredSums"]

Chunk: TypeAlias = tuple[int, int, int, int]  # position of a buffer, index of its partial, start, stop

CHUNK = 262144  # elements, 1 MB of fp32: at half of it threads that meet at the GIL cost up to 10 % of a step


def chunks_of(size: int, first: int = 0, chunk: int = CHUNK) -> list[tuple[int, int, int]]:
    """(index counted from `first`, start, stop) of each chunk of `size` elements.

    >>> chunks_of(CHUNK + 1, 7)
    [(7, 0, 262144), (8, 262144, 262145)]
    """
    return [(first + k, start, min(size, start + chunk)) for k, start in enumerate(range(0, size, chunk))]


class SquaredSums:
    """The squared sum of each chunk of each target, at fixed places: the norm's partials, allocated once.

    Args:
        sizes: Elements of each target.
        chunk: Elements of a chunk: the unit that one thread, or one thread block, sums at a time.

    Example:
        >>> sums = SquaredSums([CHUNK + 1, 0, 3])
        >>> list(sums.chunks(0)), list(sums.chunks(2))
        ([(0, 0, 262144), (1, 262144, 262145)], [(2, 0, 3)])
    """

    def __init__(self, sizes: Sequence[int], chunk: int = CHUNK) -> None:
        self.sizes, self.chunk = tuple(sizes), chunk
        self.counts = [-(-size // chunk) for size in sizes]
        self.first = list(itertools.accumulate(self.counts, initial=0))[:-1]
        # NaN until measured: a chunk that nobody measured can never pass.
        self.values: Any = np.full(sum(self.counts), np.nan)

    def chunks(self, position: int) -> list[tuple[int, int, int]]:
        """Of one target: (index into `values`, start, stop) of each chunk, in elements."""
        return chunks_of(self.sizes[position], self.first[position], self.chunk)

    def all_chunks(self, positions: Sequence[int]) -> list[Chunk]:
        """Every chunk of these targets."""
        return [(position, *chunk) for position in positions for chunk in self.chunks(position)]

    def completed(self, position: int, start: int, stop: int) -> list[Chunk]:
        """The chunks of one target whose last element lies in start..stop - 1 of it.

        >>> SquaredSums([10, CHUNK + 5]).completed(1, 7, CHUNK + 5)
        [(1, 1, 0, 262144), (1, 2, 262144, 262149)]
        """
        first = max(start, 0) // self.chunk
        last = self.counts[position] if stop >= self.sizes[position] else max(stop, 0) // self.chunk
        size, index = self.sizes[position], self.first[position]
        return [
            (position, index + k, k * self.chunk, min(size, (k + 1) * self.chunk))
            for k in range(first, max(first, last))
        ]


@dataclass
class Recorded:
    """Work that was recorded instead of done.

    Attributes:
        graph: The CUDA graph, once the recording is over; `launch()` runs it on the current stream.
        kept: Memory that the graph reads or writes: it outlives the last run, also where this is dropped before.
        launched: An event behind the last run.
    """

    graph: Any = None
    kept: list[Any] = field(default_factory=list)
    launched: Any = None


class Kernels(ABC):
    """The operations of one device. Every method is deterministic: same input, same bits, whatever the thread order.

    Attributes:
        device: "cpu", "cuda:0", ...
        measures_in_passing: Whether K1's squared sums cost nothing, so that every fold takes them.
    """

    device: str
    measures_in_passing: bool

    @abstractmethod
    def on(self, stream: object) -> AbstractContextManager[object]:
        """Within it, work is queued on that stream; None is the current one. Raises `CallerError` without streams."""

    @abstractmethod
    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """Flat views of arrays on this device; what is queued next comes behind their producers' work.

        Raises:
            BufferRefused: One cannot be taken as it lies.
        """

    @abstractmethod
    def wait_for(self, producers: Iterable[ProducerStream]) -> None:
        """Have what is queued next come behind what these producers' streams have to do now."""

    @abstractmethod
    def hand_over(self, producers: Iterable[ProducerStream]) -> None:
        """Have these producers' streams wait for all that was queued: a step's results are theirs to read."""

    def view(self, source: object, component: str) -> Buffer:
        """A flat view of one array, as `views`; raises `BufferRefused`."""
        return self.views([source], [component])[0]

    def writable_views(self, destinations: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """Flat views of memory that will be written; raises `BufferRefused`."""
        views = self.views(destinations, components)
        for view, destination, component in zip(views, destinations, components, strict=True):
            refuse_read_only(view, destination, component)
        return views

    def writable_view(self, destination: object, component: str) -> Buffer:
        """A flat view of memory that will be written; raises `BufferRefused`."""
        return self.writable_views([destination], [component])[0]

    @abstractmethod
    def allocate(self, size: int) -> Buffer:
        """An fp32 buffer of `size` elements, 128-byte aligned, its contents undefined; raises `OutOfDeviceMemory`."""

    @abstractmethod
    def refuse_to_exceed(self, nbytes: int, what: str) -> None:
        """Raise `OutOfDeviceMemory` where a GPU has not so many bytes left; before anything is taken."""

    @abstractmethod
    def array(self, buffer: Buffer, shape: tuple[int, ...]) -> Any:
        """One of our fp32 buffers as the device's own kind of array (NumPy, CuPy), in that shape; no copy."""

    @abstractmethod
    def squared_sums(self, sizes: Sequence[int], memory: Buffer | None = None) -> SquaredSums:
        """Room for the squared sums of targets of these sizes, and the order of work on them over a GPU's streams.

        Args:
            sizes: Elements of each.
            memory: Where they lie, if it is ours: it stays alive until that work is done, whoever drops it before.
        """

    @abstractmethod
    def prepare(
        self, targets: Sequence[Buffer], sums: SquaredSums, places: Sequence[SlotSet], plan: ClipPlan | None = None
    ) -> None:
        """Make now what later calls need for these targets, so that none of them allocates."""

    @abstractmethod
    def in_order(self, sums: SquaredSums) -> AbstractContextManager[None]:
        """What is queued in it is ordered behind what was done with these sums, and before what will be; on any stream.

        Whatever reads or writes the sums or their targets belongs in one; the methods that are given sums do so.
        """

    @abstractmethod
    def follow(self, sums: SquaredSums) -> None:
        """Have whoever reads next come behind what was done with these sums, whatever stream and device are current."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of working."""

    @abstractmethod
    def contribution(self, places: SlotSet, views: Sequence[Buffer | None]) -> Contribution:
        """Views of a micro-batch's gradients for these targets, as `accumulate_batch` takes them."""

    @abstractmethod
    def accumulate_batch(self, targets: Sequence[Buffer], batch: Batch, sums: SquaredSums | None = None) -> None:
        """K1 for micro-batches that came together: as `accumulate` of `batch.folds()`, at less cost a component."""

    @abstractmethod
    def accumulate(self, targets: Sequence[Buffer], folds: Sequence[Fold], sums: SquaredSums | None = None) -> None:
        """K1: fold gradients into fp32 targets; with `sums`, measure what was folded in the same pass."""

    @abstractmethod
    def measure(self, buffers: Sequence[Buffer], sums: SquaredSums, chunks: Sequence[Chunk]) -> None:
        """Squared sums of at least these chunks of buffers that are already complete."""

    @abstractmethod
    def measure_all(self, buffers: Sequence[Buffer], sums: SquaredSums, positions: Sequence[int] | None = None) -> None:
        """Squared sums of whole buffers: of all, or of those at these positions."""

    @abstractmethod
    def totals(self, sums: SquaredSums) -> Float64:
        """Each target's squared sum, chunks added in order, on the host: on a GPU this waits for it."""

    @abstractmethod
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
        """K2: norms, scales and factors from the squared sums, and who is not finite.

        Args:
            targets: What was measured, where it may be looked into for the first element that is not finite.
            sums: Its squared sums.
            plan: Which targets share a norm.
            divisor: What makes the sum the average.
            zero_if_bad: Zeros are to be handed back where anything is not finite.
            step: Which step the verdict is of, from 1 on; 0 is the one after the last.
        """

    @abstractmethod
    def hand_back(
        self,
        sources: Sequence[Buffer],
        decision: Decision,
        groups: Sequence[int],
        destinations: Sequence[Buffer],
    ) -> None:
        """K3: destination = source x its group's factor, or zeros where the decision says skip. See `scale`."""

    @abstractmethod
    def scale(self, sources: Sequence[Buffer], factor: np.float32, destinations: Sequence[Buffer]) -> None:
        """Destination = source x factor, one fp32 multiplication, then one rounding to the destination's dtype.

        A destination that is its source and has factor 1 is not touched.
        """

    @abstractmethod
    def telemetry(self, sums: SquaredSums, plan: ClipPlan) -> StatusReadback | None:
        """The late word of what K2 finds with these sums and this plan; None where it is known at once."""

    @abstractmethod
    def copied(self, number: Scalar, sums: SquaredSums) -> Scalar:
        """One of a decision's numbers from these sums, in memory of its own where the next decision would write it."""

    @abstractmethod
    def read_verdict(self, decision: Decision) -> StepStatus:
        """What K2 found, on the host; waits for the device."""

    @abstractmethod
    def staging(self, arena: Buffer) -> StagingBuffer:
        """Host memory through which an arena's spans travel to other workers."""

    @abstractmethod
    def recording(self) -> AbstractContextManager[Recorded]:
        """Within it, work is recorded and not done; raises `CallerError` on the CPU."""

    @abstractmethod
    def replay(self, recorded: Recorded) -> None:
        """Queue recorded work on the current stream."""

    @abstractmethod
    def fill_zero(self, buffers: Sequence[Buffer]) -> None:
        """Write zeros."""

    @abstractmethod
    def zero_sums(self, sums: SquaredSums, positions: Sequence[int]) -> None:
        """Record that these targets are zero."""

    @abstractmethod
    def first_non_finite(self, buffer: Buffer) -> tuple[int, float] | None:
        """Index and value of the first NaN or Inf, or None; on a GPU this waits for it."""
