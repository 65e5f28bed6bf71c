"""The kernels on a GPU, through CuPy. Each method finds its table and launches. `totals` waits for the device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer
from gradengine.arrays.streams import ProducerStream
from gradengine.kernels.arena import Arena, PartialSums
from gradengine.kernels.cuda_device import CudaDevice
from gradengine.kernels.decision import ClipPlan, Decision, Float64, Scalar
from gradengine.kernels.interface import Kernels
from gradengine.kernels.kept import BOUNDS_AT, DeviceKept, Drops, Kept
from gradengine.kernels.launch import FINALISE_THREADS, THREADS, Launches, Table, chunk_for, entries_of
from gradengine.kernels.loss_scale import LossScale
from gradengine.kernels.operands import OVERWRITE, Contribution, Destinations, FoldPass, producers_of, tagged
from gradengine.kernels.spikes import Spikes
from gradengine.kernels.status import DeviceDecision, StatusReadback, device_decision
from gradengine.kernels.streams import StreamOrder
from gradengine.kernels.toolchain import load_cupy
from gradengine.layout.slots import Span

_NULL = np.uint64(0)  # a null pointer of 8 bytes
_SOURCES = 4  # most micro-batches that one launch of K1 folds

# The operands of one launch of K3: table of sources, destinations' tagged addresses, destinations and their producers.
_HandBack: TypeAlias = tuple[Table, npt.NDArray[np.uint64], Sequence[Buffer], AbstractSet[ProducerStream]]


@final
class CudaKernels(Kernels):
    """The kernels of one GPU.

    Work is queued on the current CuPy stream of the calling thread. The first use on a machine compiles the kernels,
    which takes a core four to five seconds. Later uses load them from CuPy's cache. Raises `DeviceUnavailable` if NVRTC
    or its headers are missing.
    """

    device: CudaDevice
    measures_in_passing = True  # The memory is the bottleneck, so the sums cost no time.

    def __init__(self, xp: Any, ordinal: int = 0) -> None:
        self.xp, self.ordinal, self.device = xp, ordinal, CudaDevice(xp, ordinal)
        self._launches = Launches(self.device)

    def partial_sums(self, sizes: Sequence[int], memory: Buffer | None = None) -> PartialSums:
        order = self.device.order(memory)
        partials = PartialSums(sizes, order, chunk_for(sum(sizes)))
        partials.non_finite = self.device.upload(np.zeros(partials.values.size, np.uint32))
        partials.values = self.device.upload(partials.values)
        order.keep(partials.values, partials.non_finite, partials.prepared)
        weakref.finalize(partials, order.end).atexit = False
        return partials

    def prepare(self, arena: Arena, spans: Sequence[Span], plan: ClipPlan | None = None) -> None:
        """See `Kernels.prepare`. Makes the tables of K1, and with a plan those of K2 and K3."""
        for span in spans:
            self._table_of(arena, span)
        if plan is not None:
            self.decision(arena, plan)
            self._table_of_all(arena)
            self._hand_back_to(arena, plan, arena.in_place)

    def accumulate(self, arena: Arena, fold: FoldPass, *, measure: bool = False) -> None:
        """See `Kernels.accumulate`. One launch folds up to four micro-batches of any dtypes.

        A micro-batch that may be dropped takes two launches, since only the device has the decision.
        """
        columns = 1 if len(fold.contributions) == 1 else _SOURCES
        table = self._table_of(arena, fold.slots)
        partials = _partials(arena) if measure else (_NULL, _NULL)
        dropped = fold.dropped if isinstance(fold.dropped, self.xp.ndarray) else None
        arguments = (np.uint32(table.entries), np.int64(table.chunk), *partials)
        rows = fold.addresses(columns)
        for first, addresses in zip(range(0, len(fold.contributions), columns), rows, strict=True):
            weights = list(fold.weights[first : first + columns])
            weights += [np.float32(1)] * (columns - len(weights))
            with arena.in_order():
                self._launches.over(table, f"accumulate_{columns}", arguments, addresses, weights, dropped=dropped)
        for contribution in fold.contributions:
            if contribution.producers:
                self.device.give_back(contribution.producers, contribution.views, contribution.sources)
        if self.device.recorded is not None:
            self.device.recorded.kept += fold.contributions

    def judge(
        self, arena: Arena, contribution: Contribution, weight: np.float32, drops: Drops, *, is_first: bool
    ) -> Any:
        """See `Kernels.judge`. Makes two launches. Returns the counts' memory, which later micro-batches overwrite."""
        assert isinstance(drops.kept, DeviceKept)  # noqa: S101  (made by `kept`)
        table, counts = self._table_of_all(arena), drops.sums.non_finite
        arguments = (np.uint32(counts.size), np.float32(weight), np.uint32(is_first), drops.kept.memory)
        with arena.in_order():
            squares = (np.int64(table.chunk), drops.sums.values, counts)
            self._launches.over(table, "measure", squares, contribution.addresses)
            self._launches.run("judge", 1, THREADS, (counts, *arguments))
        return drops.kept.memory

    def measure(self, arena: Arena, positions: Sequence[int] | None = None) -> None:
        """See `Kernels.measure`. Makes one launch."""
        table = self._table_of_all(arena) if positions is None else self._table_to_measure(arena, positions)
        chosen = arena.targets if positions is None else [arena.targets[p] for p in positions]
        where = np.array([tagged(buffer) for buffer in chosen], np.uint64)
        with arena.in_order():
            self._launches.over(table, "measure", (np.int64(table.chunk), *_partials(arena)), where)

    def totals(self, arena: Arena, kept: Any = None) -> Float64:
        """See `Kernels.totals`. Waits for the device."""
        return arena.partials.totals_of(arena.partials.order.read(arena.partials.values if kept is None else kept))

    def keep_sums(self, arena: Arena) -> Any:
        """See `Kernels.keep_sums`. The first call allocates the memory."""
        partials = arena.partials
        if "kept" not in partials.prepared:
            partials.prepared["kept"] = self.device.upload(np.zeros(partials.values.size))
            _order_of(arena).keep()  # `prepared` is kept already, and its new memory belongs to the current stream.
        with arena.in_order():
            self.device.copy_within(partials.prepared["kept"], partials.values)
        return partials.prepared["kept"]

    def zero(self, arena: Arena, slots: Span, chosen: npt.NDArray[np.bool_]) -> None:
        """See `Kernels.zero`. Makes one launch of K1 without a source."""
        table = self._table_of(arena, slots)
        arguments = (np.uint32(table.entries), np.int64(table.chunk), *_partials(arena))
        with arena.in_order():
            self._launches.over(table, "accumulate_1", arguments, chosen * np.uint64(OVERWRITE), [np.float32(1)])

    def finalise(
        self,
        arena: Arena,
        plan: ClipPlan,
        divisor: float,
        *,
        zero_if_bad: bool,
        step: int = 0,
        weight: Scalar = None,
        counted: Scalar = None,
        loss_scale: LossScale | None = None,
        bounds: Kept | None = None,
        spikes: Spikes | None = None,
    ) -> DeviceDecision:
        """See `Kernels.finalise`. Makes one launch of one thread block. Each call overwrites the decision's arrays."""
        decision, table = self.decision(arena, plan), self._table_of_all(arena)
        arguments = (
            table.targets,
            np.uint32(table.entries),
            np.uint32(table.chunk.bit_length() - 1),
            *_partials(arena),
            *decision.segments,
            self._bounds(plan, bounds),
            np.float64(plan.max_norms[0]),
            np.float64(divisor),
            _NULL if weight is None else weight,
            _NULL if counted is None else counted,
            *_scaling(loss_scale),
            *_spikes(spikes),
            np.uint32(zero_if_bad),
            np.uint64(step),
            *decision.written,
        )
        with arena.in_order():
            self._launches.run("finalise", 1, FINALISE_THREADS, arguments)
        return decision

    def decision(self, arena: Arena, plan: ClipPlan) -> DeviceDecision:
        """Return the decision that K2 writes for this arena and this plan. The first call allocates its memory."""
        key = plan.groups, plan.blocks  # The bounds are arguments of each launch.
        prepared, order = arena.partials.prepared, _order_of(arena)
        if key not in prepared:
            prepared[key] = device_decision(self.device.upload, plan, len(arena.targets), order)
            order.keep()  # `prepared` is kept already, and its new memory belongs to the current stream.
        decision: DeviceDecision = prepared[key]
        return decision

    def hand_back(
        self, arena: Arena, decision: Decision, plan: ClipPlan, destinations: Destinations | None = None
    ) -> None:
        """See `Kernels.hand_back`. Makes one launch."""
        there = arena.in_place if destinations is None else destinations
        if isinstance(decision, DeviceDecision):
            factors = decision.all_factors, decision.skipped, np.float32(1)
        elif decision.skipped:
            self.fill_zero(list(there.values()))
            return
        elif len(decision.factors) == 1:
            factors = _NULL, _NULL, decision.factor
        else:
            factors = self.device.sent(np.array(decision.factors, np.float32)), _NULL, np.float32(1)
        work = self._hand_back_to(arena, plan, there)
        with arena.in_order():
            self._hand_back(work, factors)

    def scale(self, sources: Sequence[Buffer], factor: np.float32, destinations: Sequence[Buffer]) -> None:
        """See `Kernels.scale`. Makes one launch."""
        pairs = [(s, d) for s, d in zip(sources, destinations, strict=True) if factor != 1 or s.pointer != d.pointer]
        moving, there = [source for source, _ in pairs], [destination for _, destination in pairs]
        self._hand_back(self._hand_back_of(moving, there, [0] * len(pairs)), (_NULL, _NULL, np.float32(factor)))

    def fill_zero(self, buffers: Sequence[Buffer]) -> None:
        """See `Kernels.fill_zero`. In each dtype the number zero has only zero bits."""
        for buffer in buffers:
            self.device.clear(buffer.pointer, buffer.nbytes)

    def first_non_finite(self, buffer: Buffer) -> tuple[int, float] | None:
        """See `Kernels.first_non_finite`. Waits for the device."""
        arena = self.arena([buffer], buffer)
        self.measure(arena)
        status = self.finalise(arena, ClipPlan((0,), (np.inf,)), 1.0, zero_if_bad=False).read()
        return (status.bad_index, status.bad_value) if status.is_bad else None

    def kept(self, arena: Arena, dtype: np.dtype[Any], *values: Any) -> DeviceKept:
        return DeviceKept(self.device, _order_of(arena), dtype, *values)

    def status_readback(self, arena: Arena, plan: ClipPlan) -> StatusReadback:
        return StatusReadback(self.device, self.decision(arena, plan))

    def tally(self, told: Any, workers: int, sums: Any) -> None:
        """Add up the facts that the ranks exchanged about a step, in one launch of one thread. See tally.cu.

        Args:
            told: A row of 8-byte words for each rank, in rank order.
            workers: The number of ranks.
            sums: Five fp64 numbers to be written. They are the divisor of a sum or NaN, the weight, the
                micro-batches, whether to stop (1.0 or 0.0), and the dropped micro-batches.
        """
        self._launches.run("tally", 1, 1, (told, np.uint32(workers), np.uint32(told.size // workers), sums))

    def _bounds(self, plan: ClipPlan, bounds: Kept | None) -> Any:
        """Return the groups' bounds as K2 takes them. A single bound is an argument of the launch."""
        if isinstance(bounds, DeviceKept):
            return bounds.memory[BOUNDS_AT:]
        return _NULL if len(plan.max_norms) == 1 else self.device.sent(np.array(plan.max_norms))

    # ---- tables ----

    def _table_of(self, arena: Arena, slots: Span) -> Table:
        """Return K1's table for these targets."""
        table: Table | None = arena.prepared.get(slots)
        if table is None:
            targets = [arena.targets[position] for position in slots.positions]
            first = [arena.partials.first[position] for position in slots.positions]
            entries = entries_of(list(map(tagged, targets)), [target.size for target in targets], first)
            table = arena.prepared[slots] = self._launches.table(entries, arena.partials.chunk)
        return table

    def _table_to_measure(self, arena: Arena, positions: Sequence[int]) -> Table:
        partials = arena.partials
        sizes, first = [partials.sizes[p] for p in positions], [partials.first[p] for p in positions]
        return self._launches.table(entries_of(0, sizes, first), partials.chunk)

    def _table_of_all(self, arena: Arena) -> Table:
        """Return the table of all targets. It has no addresses if K2 must not search the targets for NaN and Inf."""
        if arena.memory is not None:
            return self._table_of(arena, arena.whole)
        prepared = arena.partials.prepared
        if "all" not in prepared:
            prepared["all"] = self._table_to_measure(arena, range(len(arena.targets)))
        table: Table = prepared["all"]
        return table

    def _hand_back_of(
        self, sources: Sequence[Buffer], destinations: Sequence[Buffer], groups: Sequence[int]
    ) -> _HandBack:
        wanted = [
            (tagged(s), tagged(d), s.size, g) for s, d, g in zip(sources, destinations, groups, strict=True) if s.size
        ]
        # If a source is its destination, only the launch has the address.
        addresses = [source if source != there else 0 for source, there, *_ in wanted]
        sizes = [size for _, _, size, _ in wanted]
        entries = entries_of(addresses, sizes, groups=[group for *_, group in wanted])
        where = np.array([there for _, there, *_ in wanted], np.uint64)
        return self._launches.table(entries, chunk_for(sum(sizes))), where, destinations, producers_of(destinations)

    def _hand_back_to(self, arena: Arena, plan: ClipPlan, destinations: Destinations) -> _HandBack:
        """Return K3's launch to these destinations. It is made once for destinations that are used again."""
        made_for = arena.targets, plan.groups
        if destinations.work is None or destinations.work[0] != made_for:
            sources = [arena.targets[position] for position in destinations]
            groups = [plan.groups[position] for position in destinations]
            destinations.work = made_for, self._hand_back_of(sources, list(destinations.values()), groups)
        remembered: _HandBack = destinations.work[1]
        return remembered

    def _hand_back(self, work: _HandBack, factors: tuple[Any, ...]) -> None:
        table, where, destinations, producers = work
        self._launches.over(table, "hand_back", (np.int64(table.chunk), *factors), where)
        if producers:
            self.device.give_back(producers, destinations)


@functools.cache
def cuda_kernels(ordinal: int) -> CudaKernels:
    """Return the kernels of one device, compiled once. Raises `DeviceUnavailable` with what is missing."""
    return CudaKernels(load_cupy(ordinal), ordinal)


def _scaling(loss_scale: LossScale | None) -> tuple[Any, ...]:
    """Return a dynamic loss scale and its rule as K2 takes them."""
    if loss_scale is None or not isinstance(loss_scale.kept, DeviceKept):
        return _NULL, np.float64(1), np.float64(1), np.uint32(0)
    rule = loss_scale.rule
    return (
        loss_scale.kept.memory,
        *map(np.float64, (rule.growth_factor, rule.backoff_factor)),
        np.uint32(rule.growth_interval),
    )


def _spikes(spikes: Spikes | None) -> tuple[Any, ...]:
    """Return the norms so far and the policy for spikes as K2 takes them. A bound of None becomes infinity."""
    if spikes is None or not isinstance(spikes.kept, DeviceKept):
        return _NULL, *[np.float64(1)] * 3, *[np.uint32(0)] * 2
    policy = spikes.policy
    bounds = [np.float64(np.inf if bound is None else bound) for bound in (policy.z_score, policy.threshold)]
    skips = np.uint32(policy.action == "skip")
    return spikes.kept.memory, *bounds, np.float64(policy.decay), np.uint32(policy.warm_up), skips


def _order_of(arena: Arena) -> StreamOrder:
    assert isinstance(arena.partials.order, StreamOrder)  # noqa: S101  (made by partial_sums above)
    return arena.partials.order


def _partials(arena: Arena) -> tuple[Any, Any]:
    return arena.partials.values, arena.partials.non_finite
