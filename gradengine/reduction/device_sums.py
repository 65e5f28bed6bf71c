"""Sums a step over ranks on their GPUs with calls of a process group. All work is queued and the host does not wait.

The owner of a share sums it in rank order, beginning with rank 0's value, with kernel K1. A round has at most one share
of each owner. One call sends each owner the parts of its share, and a second call sends the sum to all ranks. The calls
run on a separate stream as their spans complete, while backward continues. Events order a step's other work. One more
call sends each rank's facts, which are a few numbers and the flags of components without a gradient. The device adds
the facts up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.errors import PeerLost
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.shares import ReadyShares, Share, rounds_of, shares_of
from gradengine.exchange.torch_group import DeviceCalls
from gradengine.kernels import ClipPlan, Contribution, CudaKernels, FoldPass
from gradengine.kernels.decision import Scalar
from gradengine.kernels.kept import BOUNDS_AT, DeviceKept, Kept
from gradengine.layout.slots import ALIGNMENT, Span
from gradengine.reduction.stats import Flags

_HEADER = 8  # words of `Told` in tally.cu
_WEIGHT, _COUNT, _STEP, _BOUNDS, _STOP, _DROPPED = 1, 2, 3, 5, 6, 7  # positions of some of these words


class _Round(NamedTuple):
    """One call in each direction, with a torch tensor for each rank, and the sum between the calls."""

    parts: Sequence[Any]
    rows: Sequence[Any]
    fold: FoldPass | None  # None if this rank owns no share of it
    own: Sequence[Any]
    sums: Sequence[Any]


@final
class DeviceSums:
    """One rank's side of the sums, for one group and one arena on a GPU.

    Args:
        exchange: An exchange of engines that all sum on their GPUs.
        calls: The exchange's calls.
        accumulator: The gradients to sum, on a GPU.
        plan: The clip plan of the step's decision.
        bounds: The plan's bounds on the GPU. The ranks compare their digest.

    Raises:
        OutOfDeviceMemory: The device has too little memory left.
        PeerLost: A call of the group failed.
    """

    def __init__(
        self,
        exchange: Exchange,
        calls: DeviceCalls,
        accumulator: PerBlockGradientAccumulator,
        plan: ClipPlan,
        bounds: Kept,
    ) -> None:
        assert isinstance(accumulator.kernels, CudaKernels)  # noqa: S101  (made for a GPU only)
        assert isinstance(bounds, DeviceKept)  # noqa: S101
        self._digest = bounds.memory[:BOUNDS_AT]
        self._accumulator, self._kernels, self._calls = accumulator, accumulator.kernels, calls
        self._device = device = accumulator.kernels.device
        self._rank, self._ranks = exchange.rank, exchange.world_size
        self._verdict = self._kernels.decision(accumulator.arena, plan)
        shares = shares_of(accumulator.layout, self._ranks, self._ranks * exchange.bucket_bytes)
        self._ready = ReadyShares(accumulator.layout, shares)
        self.started = self._ready.started  # keys of the spans that were started in this step
        with device.active():
            self._stream = device.xp.cuda.Stream(non_blocking=True)
        with device.on(self._stream):
            self._make_rounds(shares)
            self._make_told()
        self._behind: Any = None  # an event after calls for which the arena's other work does not wait yet
        self._failure: PeerLost | None = None
        self._asks = False  # the value in `_asked`, which replays read
        self._queue(self._gather)  # NCCL starts with its first call, which must not be in a step or a capture
        self._is_under_way = False  # whether some of this step's calls were made, but not all

    def start(self, spans: Sequence[Span]) -> None:
        """Start to sum spans that are complete on this rank. Call this within the arena's order.

        `finish` raises the error of a call that fails.
        """
        ready = [share for span in spans for share in self._ready.complete(span) if share.number in self._rounds]
        if not ready or self._failure is not None:
            return
        try:
            self._queue(lambda: self._sum([self._rounds[share.number] for share in ready]))
        except PeerLost as fault:
            self._failure = fault

    def finish(self, facts: Sequence[float], step: int, scale: float, *, stop: bool, by_weight: bool) -> None:
        """Order later work after the sums of all spans and after the exchange of the ranks' facts.

        All spans must have been started. Call this within the arena's order.

        Args:
            facts: This rank's part of the sum's divisor, its weight, and its number of micro-batches.
            step: The step's number, the same on all ranks.
            scale: The loss scale, the same on all ranks. 1 if only the device has it.
            stop: Whether this rank requests that all ranks stop after the step.
            by_weight: Whether this rank's part of the divisor is its weight.

        Raises:
            PeerLost: A call of this step failed. The arena holds neither a sum nor this rank's own gradients.
        """
        if self._failure is not None:
            raise self._failure
        self._words[: len(facts)].view(np.float64)[:] = facts
        self._words[_STEP] = step
        self._words[_STEP + 1 : _STEP + 2].view(np.float64)[:] = scale
        self._words[_STOP] = stop
        self._words[_DROPPED] = 0
        self._flags[:] = self._accumulator.unused
        self._queue(partial(self._tell, by_weight=by_weight))
        self._is_under_way = False
        self._order()

    def totals(self) -> list[Scalar]:
        """Return the divisor, weight, micro-batches, stop request and drops of all ranks together, as device scalars.

        The divisor is NaN if the ranks are not in the same step, or no rank has a micro-batch.
        """
        return [self._sums[i : i + 1].reshape(()) for i in range(5)]

    def ask_to_stop(self, asks: bool) -> None:
        """Queue this rank's request to stop for the replay that is queued next. Call this within the arena's order."""
        if asks is not self._asks:
            self._device.copied_into(self._asked, np.array([asks], np.int64))
            self._asks = asks

    def unused(self) -> Flags:
        """Wait for the step that was queued last, and return flags of its components without a gradient on any rank."""
        told = self._accumulator.arena.partials.order.read(self._told)
        flags = told[:, _HEADER:].view(np.uint8)[:, : self._accumulator.unused.size] != 0
        unused: Flags = np.logical_and.reduce(flags)
        return unused

    def restart(self) -> None:
        """Begin this step again or the next one, and order later work on the arena after all calls."""
        self._ready.restart()
        if self._behind is not None:
            with self._accumulator.arena.in_order():
                self._order()

    def leave(self) -> None:
        """Leave the group. Refuse it from now on if other ranks may wait in a call that this rank did not make."""
        self.restart()
        if self._is_under_way:
            self._calls.leave_uneven()

    # ---- inside ----

    def _make_rounds(self, shares: Sequence[Share]) -> None:
        """Allocate memory for the received parts, and prepare all rounds."""
        device, memory, rank = self._device, self._accumulator.memory, self._rank
        mine = [share for share in shares if share.owner == rank]
        width = -(-max([share.size for share in mine], default=0) // ALIGNMENT) * ALIGNMENT
        self._parts = device.allocate(self._ranks * width)
        self._owned = self._kernels.arena([memory.part(share.start, share.stop) for share in mine])
        spans = {share.number: Span.at([position]) for position, share in enumerate(mine)}
        self._kernels.prepare(self._owned, [*spans.values()])
        buffers = memory, self._parts, device.allocate(1 + self._ranks)
        arena, parts, spare = (self._calls.tensor(device.array(each, (each.size,))) for each in buffers)
        # If there is nothing to move, one unused element is moved, because versions of NCCL treat empty tensors
        # differently.
        ranks, starts = range(self._ranks), [r * width for r in range(self._ranks)]
        nothing, nowhere = spare[:1], [spare[1 + r : 2 + r] for r in ranks]
        self._rounds: dict[int, _Round] = {}  # keyed by the number of the first share
        for group in rounds_of(shares):
            theirs = {share.owner: arena[share.start : share.stop] for share in group}
            own = next((share for share in group if share.owner == rank), None)
            rows = nowhere if own is None else [parts[start : start + own.size] for start in starts]
            fold = None if own is None else self._fold(spans[own.number], starts, own.size)
            sent = [nothing if r == rank else theirs.get(rank, nothing) for r in ranks]
            sums = [nowhere[r] if r == rank else theirs.get(r, nowhere[r]) for r in ranks]
            number = group[0].number
            self._rounds[number] = _Round([theirs.get(r, nothing) for r in ranks], rows, fold, sent, sums)

    def _fold(self, slots: Span, starts: Sequence[int], size: int) -> FoldPass:
        rows = [Contribution.of(slots, [self._parts.part(start, start + size)]) for start in starts]
        return FoldPass(slots, np.ones(1, np.bool_), rows, [np.float32(1)] * len(rows))

    def _make_told(self) -> None:
        """Allocate this rank's row of facts, and memory for all ranks' rows."""
        flags = self._accumulator.unused.size
        self._words = np.zeros(_HEADER + -(-flags // 8), np.int64)
        self._flags = self._words[_HEADER:].view(np.uint8)[:flags]
        upload = self._device.upload
        self._mine, self._told = upload(self._words), upload(np.zeros((self._ranks, self._words.size), np.int64))
        self._sums, self._asked = upload(np.zeros(5)), upload(np.zeros(1, np.int64))
        # They are used on the engine's streams too.
        self._verdict.order.keep(self._told, self._sums, self._asked)
        mine, told = self._calls.tensor(self._mine), self._calls.tensor(self._told)
        self._tells, self._told_by = [mine] * self._ranks, [told[r] for r in range(self._ranks)]

    def _queue(self, work: Callable[[], object]) -> None:
        """Queue work on a separate stream, after the current stream's work. A capture uses the current stream."""
        device = self._device
        is_capturing, before = device.is_capturing(), device.record()
        self._is_under_way = not is_capturing  # `finish` resets it
        with device.on(None if is_capturing else self._stream):
            stream = device.current_stream()
            if not is_capturing:
                stream.wait_event(before)
            self._current = self._calls.stream(stream.ptr, device.ordinal)
            work()
            # The queued work still needs these if the engine or the recorded graph is dropped.
            device.drop(self, self._accumulator.memory)
            self._behind = None if is_capturing else device.record()

    def _sum(self, rounds: Sequence[_Round]) -> None:
        for one in rounds:
            self._calls.all_to_all(one.rows, one.parts, self._current)
            if one.fold is not None:
                self._kernels.accumulate(self._owned, one.fold)
            self._calls.all_to_all(one.sums, one.own, self._current)

    def _tell(self, *, by_weight: bool) -> None:
        device = self._device
        device.copied_into(self._mine, self._words)
        if device.is_capturing():  # each replay has its own step number and request to stop, which the device holds
            device.copy_within(self._mine[_STEP : _STEP + 1], self._verdict.field("step"))
            device.copy_within(self._mine[_STOP : _STOP + 1], self._asked)
        device.copy_within(self._mine[_BOUNDS : _BOUNDS + 1], self._digest)
        drops = self._accumulator.drops
        if drops is not None and isinstance(drops.kept, DeviceKept) and self._words[_COUNT : _COUNT + 1].any():
            self._tell_drops(drops.kept.memory, by_weight=by_weight)
        self._gather()
        self._kernels.tally(self._told, self._ranks, self._sums)

    def _tell_drops(self, record: Any, *, by_weight: bool) -> None:
        """Replace this rank's weight by the weight of the micro-batches that count, which only the device has."""
        copy, mine = self._device.copy_within, self._mine
        for word in (0, _WEIGHT) if by_weight else (_WEIGHT,):
            copy(mine[word : word + 1], record[:8])
        copy(mine[_DROPPED : _DROPPED + 1], record[8:16])

    def _gather(self) -> None:
        self._calls.all_to_all(self._told_by, self._tells, self._current)

    def _order(self) -> None:
        """Make the current stream wait for the calls, in the arena's order."""
        if self._behind is not None:
            with self._device.active():
                self._device.current_stream().wait_event(self._behind)
            self._behind = None
