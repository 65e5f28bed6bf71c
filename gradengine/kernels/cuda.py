"""The kernels on a GPU, through CuPy: each method checks, finds its table and launches. Nothing here waits."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer, RawBuffer
from gradengine.arrays.device import device_buffer, exporting_stream
from gradengine.arrays.streams import ProducerStream
from gradengine.kernels.decision import ClipPlan, Decision, Float64, Scalar, sum_in_order
from gradengine.kernels.device import CudaDevice, StreamOrder
from gradengine.kernels.interface import Chunk, Kernels, Recorded, SquaredSums
from gradengine.kernels.launches import Launches
from gradengine.kernels.operands import Batch, Contribution, Fold, SlotSet, producers_of
from gradengine.kernels.staging import PinnedStaging
from gradengine.kernels.status import DecisionMemory, DeviceDecision, StatusReadback, StepStatus
from gradengine.kernels.streams import ForeignStreams
from gradengine.kernels.tables import OVERWRITE, DeviceSums, Entry, Table, as_batches, chunk_for, handed_back, tagged
from gradengine.kernels.toolchain import load_cupy

__all__ = ["CudaKernels", "cuda_kernels"]

_NULL = np.uint64(0)  # a pointer to nothing, as wide as one
_DECISIONS = 8  # plans of one set of sums that are remembered
_SOURCES = 4  # micro-batches that one pass of K1 folds; more are folded four at a time


@final
class CudaKernels(Kernels):
    """CuPy on one device.

    Work is queued on the current CuPy stream of the calling thread; see `on`. The first one on a machine compiles the
    kernels (about a second); afterwards they come from CuPy's cache.

    Args:
        xp: CuPy, or what has its surface.
        ordinal: Which device.

    Raises:
        DeviceUnavailable: NVRTC or its headers are missing.
    """

    measures_in_passing = True  # the sums are made while the memory is the bottleneck

    def __init__(self, xp: Any, ordinal: int = 0) -> None:
        self.xp, self.ordinal, self.device = xp, ordinal, f"cuda:{ordinal}"
        self._place = CudaDevice(xp, ordinal)
        self._launches = Launches(self._place)
        self._foreign_streams = ForeignStreams(self._place)

    def on(self, stream: object) -> AbstractContextManager[object]:
        """See `Kernels.on`; a CuPy stream, an object with `__cuda_stream__` or `cuda_stream` (torch), or a handle."""
        return self._place.on(stream)

    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """See `Kernels.views`; memory of this device only."""
        with self._place.active():  # DLPack exports from the current device only, and CuPy names its current stream
            stream, kind = self._place.stream_for_producers(), self.xp.ndarray
            named = list(zip(sources, components, strict=True))
            views = [device_buffer(source, component, self.device, kind, stream) for source, component in named]
            behind = set(producers_of(views))
            for (source, component), view in zip(named, views, strict=True):
                if isinstance(source, RawBuffer) or not hasattr(source, "__dlpack__"):
                    self._place.refuse_foreign(view, component)  # nothing but an address says where it lies
                    named_stream = exporting_stream(source, component)
                    behind |= {named_stream} if named_stream else set()
        self.wait_for(behind)
        return views

    def wait_for(self, producers: Iterable[ProducerStream]) -> None:
        """See `Kernels.wait_for`; by events."""
        self._foreign_streams.wait_for(producers)

    def hand_over(self, producers: Iterable[ProducerStream]) -> None:
        """See `Kernels.hand_over`; by events."""
        self._foreign_streams.give_back(producers)

    def give_back(self, *views: Buffer) -> None:
        """What was queued so far is our last use of these."""
        self._foreign_streams.give_back(producers_of(views), views)

    def allocate(self, size: int) -> Buffer:
        """See `Kernels.allocate`; from CuPy's pool."""
        return self._place.allocate(size)

    def refuse_to_exceed(self, nbytes: int, what: str) -> None:
        """See `Kernels.refuse_to_exceed`; what CuPy's pool holds unused counts as free."""
        self._place.refuse_to_exceed(nbytes, what)

    def array(self, buffer: Buffer, shape: tuple[int, ...]) -> Any:
        """See `Kernels.array`; a CuPy array."""
        return self._place.array(buffer, shape, np.float32)

    def active(self) -> AbstractContextManager[object]:
        """Within it, this is CuPy's current device."""
        return self._place.active()

    def storage_array(self, buffer: Buffer) -> Any:
        """Any buffer as a flat CuPy array of its bits: fp32 as it is, the short dtypes as uint16; no copy."""
        return self._place.array(buffer, (buffer.size,), np.float32 if buffer.dtype == "float32" else np.uint16)

    def squared_sums(self, sizes: Sequence[int], memory: Buffer | None = None) -> DeviceSums:
        """See `Kernels.squared_sums`."""
        order = StreamOrder(self._place, memory.owner if memory else None)
        sums = DeviceSums(sizes, self._place.upload, order)
        weakref.finalize(sums, order.end).atexit = False
        return sums

    def contribution(self, places: SlotSet, views: Sequence[Buffer | None]) -> Contribution:
        """See `Kernels.contribution`."""
        addresses = [tagged(view) if view is not None and view.size else 0 for view in views]
        return Contribution(places, views, np.array(addresses, np.uint64), producers_of(views))

    def accumulate_batch(self, targets: Sequence[Buffer], batch: Batch, sums: SquaredSums | None = None) -> None:
        """See `Kernels.accumulate_batch`; one launch for four micro-batches, whatever their dtypes are."""
        columns = 1 if len(batch.contributions) == 1 else _SOURCES
        table = self._table_of(targets, batch.places, sums)
        is_empty = batch.overwrite.copy()
        for first in range(0, len(batch.contributions), _SOURCES):
            addresses = np.zeros((columns, table.entries), np.uint64)
            for row, contribution in zip(addresses, batch.contributions[first:], strict=False):
                row[:] = contribution.addresses
            gets_none = ~addresses.any(axis=0)
            addresses[0] |= is_empty * np.uint64(OVERWRITE)
            is_empty &= gets_none  # a target's first gradient need not be among the first four
            weights = list(batch.weights[first : first + _SOURCES])
            weights += [np.float32(1)] * (columns - len(weights))
            with self.in_order(sums):
                self._accumulate(table, addresses, weights, sums)
        for contribution in batch.contributions:
            if contribution.producers:
                self._foreign_streams.give_back(contribution.producers, contribution.held)

    def accumulate(self, targets: Sequence[Buffer], folds: Sequence[Fold], sums: SquaredSums | None = None) -> None:
        """See `Kernels.accumulate`; one launch for four micro-batches, whatever their dtypes are."""
        for batch in as_batches([fold for fold in folds if targets[fold.position].size]):
            self.accumulate_batch(targets, batch, sums)

    def measure(self, buffers: Sequence[Buffer], sums: SquaredSums, chunks: Sequence[Chunk]) -> None:
        """See `Kernels.measure`; one launch, whole buffers."""
        self.measure_all(buffers, sums, sorted({position for position, *_ in chunks}))

    def measure_all(self, buffers: Sequence[Buffer], sums: SquaredSums, positions: Sequence[int] | None = None) -> None:
        """See `Kernels.measure_all`; one launch."""
        chosen = buffers if positions is None else [buffers[p] for p in positions]
        table = self._table_to_measure(sums, positions)
        where = np.array([tagged(buffer) for buffer in chosen], np.uint64)
        with self.in_order(sums):
            self._launches.over(table, "measure", (np.int64(table.chunk), *_partials(sums)), where)

    def totals(self, sums: SquaredSums) -> Float64:
        """See `Kernels.totals`; waits for the device."""
        values = _of_device(sums).order.read(sums.values)
        spans = zip(sums.first, sums.counts, strict=True)
        return np.array([sum_in_order(values[first : first + count]) for first, count in spans], np.float64)

    def finalise(
        self,
        targets: Sequence[Buffer] | None,
        sums: SquaredSums,
        plan: ClipPlan,
        divisor: float,
        *,
        zero_if_bad: bool,
        step: int = 0,
    ) -> DeviceDecision:
        """See `Kernels.finalise`; one launch of one thread block. The decision's arrays are written by each call."""
        decision = self.decision(sums, plan)
        memory = decision.memory
        if memory.of_all is None or memory.of_all[0] is not targets:
            memory.of_all = targets, self._table_of_all(targets, sums)
        table = memory.of_all[1]
        arguments = (
            table.targets,
            np.uint32(table.entries),
            np.uint32(table.chunk.bit_length() - 1),
            *_partials(sums),
            memory.segment_start,
            memory.segment_member,
            np.uint32(memory.segments),
            np.uint32(memory.groups),
            memory.max_norms,
            np.float64(plan.max_norms[0]),
            np.float64(divisor),
            np.uint32(zero_if_bad),
            np.uint64(step),
            memory.totals,
            memory.counts,
            memory.component_norms,
            memory.norms,
            memory.scales,
            memory.factors,
            memory.record,
        )
        with self.in_order(sums):
            self._launches.finalise(arguments)
        return decision

    def decision(self, sums: SquaredSums, plan: ClipPlan) -> DeviceDecision:
        """Where K2 writes for these sums and this plan; made at the first call."""
        # A single bound travels with each launch, so that a schedule of it needs no memory of its own.
        key = plan if len(plan.max_norms) > 1 else (plan.groups, plan.blocks)
        known, order = _of_device(sums).decisions, _of_device(sums).order
        if key not in known:
            while len(known) >= _DECISIONS:
                with order.use():
                    self._place.drop(known.pop(next(iter(known))))
            known[key] = DecisionMemory(self._place.upload, plan, len(sums.sizes), order).decision()
        decision: DeviceDecision = known[key]
        return decision

    def telemetry(self, sums: SquaredSums, plan: ClipPlan) -> StatusReadback:
        """See `Kernels.telemetry`."""
        return StatusReadback(self._place, self.decision(sums, plan).memory)

    def copied(self, number: Scalar, sums: SquaredSums) -> Scalar:
        """See `Kernels.copied`; one copy on the device, to be read on the streams that are current now."""
        with self.in_order(sums):
            copy = self._place.copied(number)
        self.follow(sums)
        return copy

    def read_verdict(self, decision: Decision) -> StepStatus:
        """See `Kernels.read_verdict`; waits for the device."""
        assert isinstance(decision, DeviceDecision)  # noqa: S101  (made by finalise above)
        return decision.memory.read()

    def staging(self, arena: Buffer) -> PinnedStaging:
        """See `Kernels.staging`; in pinned memory."""
        return PinnedStaging(self.xp, arena, self._place.pinned(arena.size, np.float32))

    def recording(self) -> AbstractContextManager[Recorded]:
        """See `Kernels.recording`; on a stream of its own, ordered behind the current one."""
        return self._place.recording()

    def replay(self, recorded: Recorded) -> None:
        """See `Kernels.replay`; one launch."""
        self._place.launch(recorded)

    def hand_back(
        self,
        sources: Sequence[Buffer],
        decision: Decision,
        groups: Sequence[int],
        destinations: Sequence[Buffer],
    ) -> None:
        """See `Kernels.hand_back`; one launch. A decision that the host took is applied factor by factor."""
        if isinstance(decision, DeviceDecision):
            memory = decision.memory
            work = self._remembered_hand_back_of(sources, destinations, groups, memory)
            with memory.order.use():
                self._hand_back(work, (memory.factors, memory.field("skipped"), np.float32(1)))
        elif decision.skipped:
            self.fill_zero(destinations)
        else:
            alike: dict[np.float32, list[int]] = {}
            for i, group in enumerate(groups):
                alike.setdefault(decision.factors[group], []).append(i)
            for factor, chosen in alike.items():
                self.scale([sources[i] for i in chosen], factor, [destinations[i] for i in chosen])

    def scale(self, sources: Sequence[Buffer], factor: np.float32, destinations: Sequence[Buffer]) -> None:
        """See `Kernels.scale`; one launch."""
        pairs = [(s, d) for s, d in zip(sources, destinations, strict=True) if factor != 1 or s.pointer != d.pointer]
        moving, there = [source for source, _ in pairs], [destination for _, destination in pairs]
        self._hand_back(self._hand_back_of(moving, there, [0] * len(pairs)), (_NULL, _NULL, np.float32(factor)))

    def fill_zero(self, buffers: Sequence[Buffer]) -> None:
        """See `Kernels.fill_zero`; all bits 0 are the zero of each dtype."""
        for buffer in buffers:
            self._place.clear(buffer.pointer, buffer.nbytes)

    def zero_sums(self, sums: SquaredSums, positions: Sequence[int]) -> None:
        """See `Kernels.zero_sums`."""
        with self.in_order(sums):
            for position, memory in itertools.product(positions, _partials(sums)):
                itemsize = memory.dtype.itemsize
                start = int(memory.data.ptr) + sums.first[position] * itemsize
                self._place.clear(start, sums.counts[position] * itemsize)

    def first_non_finite(self, buffer: Buffer) -> tuple[int, float] | None:
        """See `Kernels.first_non_finite`; waits for the device."""
        sums = self.squared_sums([buffer.size])
        self.measure([buffer], sums, sums.all_chunks([0]))
        plan = ClipPlan((0,), (np.inf,))
        verdict = self.finalise([buffer], sums, plan, 1.0, zero_if_bad=False).memory.read()
        return (verdict.bad_index, verdict.bad_value) if verdict.is_bad else None

    def in_order(self, sums: SquaredSums | None) -> AbstractContextManager[None]:
        """See `Kernels.in_order`; by an event, never by a wait of the host."""
        return sums.order.use() if isinstance(sums, DeviceSums) else nullcontext()

    def follow(self, sums: SquaredSums) -> None:
        """See `Kernels.follow`; by an event, never by a wait of the host."""
        _of_device(sums).order.follow()

    def prepare(
        self, targets: Sequence[Buffer], sums: SquaredSums, places: Sequence[SlotSet], plan: ClipPlan | None = None
    ) -> None:
        """See `Kernels.prepare`: the tables of K1; with a plan those of K2 and K3."""
        for chosen in places:
            self._table_of(targets, chosen, sums)
        if plan is not None:
            memory = self.decision(sums, plan).memory
            memory.of_all = targets, self._table_of_all(targets, sums)
            self._remembered_hand_back_of(targets, targets, plan.groups, memory)

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of working."""
        return self._place.is_capturing()

    # ---- launches ----

    def _accumulate(
        self,
        table: Table,
        addresses: npt.NDArray[np.uint64],
        weights: Sequence[np.float32],
        sums: SquaredSums | None,
    ) -> None:
        partials = (_NULL, _NULL) if sums is None else _partials(sums)
        arguments = (np.uint32(table.entries), np.int64(table.chunk), *partials)
        self._launches.over(table, f"accumulate_{len(weights)}", arguments, addresses.reshape(-1), weights)

    def _table_of(self, targets: Sequence[Buffer], places: SlotSet, sums: SquaredSums | None) -> Table:
        """K1's table for these targets."""
        if not isinstance(sums, DeviceSums):
            return self._make_table(targets, places, None)
        if places not in sums.tables:
            sums.tables[places] = self._make_table(targets, places, sums)
        return sums.tables[places]

    def _make_table(self, targets: Sequence[Buffer], places: SlotSet, sums: DeviceSums | None) -> Table:
        first = sums.first if sums else [0] * len(targets)
        entries = [Entry(targets[p].pointer, targets[p].size, first[p]) for p in places.positions]
        return self._launches.table(entries, sums.chunk if sums else chunk_for(sum(e.size for e in entries)))

    def _table_to_measure(self, sums: SquaredSums, positions: Sequence[int] | None) -> Table:
        mine = _of_device(sums)
        if positions is None and mine.of_all is not None:
            return mine.of_all
        chosen = range(len(sums.sizes)) if positions is None else positions
        table = self._launches.table([Entry(0, sums.sizes[p], sums.first[p]) for p in chosen], sums.chunk)
        if positions is None:
            mine.of_all = table
        return table

    def _table_of_all(self, targets: Sequence[Buffer] | None, sums: SquaredSums) -> Table:
        addresses = [0] * len(sums.sizes) if targets is None else [tagged(target) for target in targets]
        entries = [Entry(a, s, f) for a, s, f in zip(addresses, sums.sizes, sums.first, strict=True)]
        return self._launches.table(entries, sums.chunk)

    def _hand_back_of(
        self, sources: Sequence[Buffer], destinations: Sequence[Buffer], groups: Sequence[int]
    ) -> _HandBack:
        wanted = [i for i, source in enumerate(sources) if source.size]
        entries = [handed_back(sources[i], destinations[i], groups[i]) for i in wanted]
        table = self._launches.table(entries, chunk_for(sum(entry.size for entry in entries)))
        return _HandBack(table, np.array([tagged(destinations[i]) for i in wanted], np.uint64), destinations)

    def _remembered_hand_back_of(
        self, sources: Sequence[Buffer], destinations: Sequence[Buffer], groups: Sequence[int], memory: DecisionMemory
    ) -> _HandBack:
        """The same, made once for an accumulator that scales its own targets: these are one tuple at each step."""
        if not (sources is destinations and isinstance(sources, tuple)):
            return self._hand_back_of(sources, destinations, groups)
        if memory.in_place is None or memory.in_place[0] is not sources:
            memory.in_place = sources, self._hand_back_of(sources, destinations, groups)
        remembered: _HandBack = memory.in_place[1]
        return remembered

    def _hand_back(self, work: _HandBack, factors: tuple[Any, ...]) -> None:
        self._launches.over(work.table, "hand_back", (np.int64(work.table.chunk), *factors), work.where)
        if work.producers:
            self._foreign_streams.give_back(work.producers, work.destinations)


class _HandBack:
    """What one launch of K3 works on.

    Args:
        table: Sources and sizes.
        where: The destinations' addresses, as the kernel reads them.
        destinations: The destinations.
    """

    def __init__(self, table: Table, where: npt.NDArray[np.uint64], destinations: Sequence[Buffer]) -> None:
        self.table, self.where, self.destinations = table, where, destinations
        self.producers = producers_of(destinations)


@functools.cache
def cuda_kernels(ordinal: int) -> CudaKernels:
    """The kernels of one device, compiled once.

    Raises:
        DeviceUnavailable: CuPy, the driver, the device or NVRTC is missing; the error says which.
    """
    return CudaKernels(load_cupy(ordinal), ordinal)


def _of_device(sums: SquaredSums) -> DeviceSums:
    assert isinstance(sums, DeviceSums)  # noqa: S101  (made by squared_sums above)
    return sums


def _partials(sums: SquaredSums) -> tuple[Any, Any]:
    return sums.values, _of_device(sums).non_finite
