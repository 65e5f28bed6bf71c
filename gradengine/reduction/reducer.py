"""Sends the complete spans of an accumulator, receives their sums, and makes all ranks agree on a step's stats.

The exchange works in CPU memory. On the CPU this is the arena itself. A GPU's arena is copied to the CPU and back a few
shares at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, cast, final

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.state import Call, Event, Facts, State
from gradengine.accumulate.window import ordered_sum
from gradengine.errors import CallerError, DeviceFailed, GradientError, NonFiniteGradient, WindowError
from gradengine.exchange.addresses import MPI_URL
from gradengine.exchange.exchange import Exchange, Sums
from gradengine.exchange.gather import gathered, packed
from gradengine.exchange.launchers import warn_of_other_ranks
from gradengine.kernels import ClipPlan, Float64, Kept
from gradengine.kernels.arena import PartialSums
from gradengine.kernels.kept import Drops
from gradengine.layout.slots import Span
from gradengine.reduction.device_sums import DeviceSums
from gradengine.reduction.stats import RUNNING_NORM, Finding, Scale, StepStats, TensorParallelGroup, agree

Worker: TypeAlias = tuple[int, int]  # a rank, and the number of ranks in its group
Place: TypeAlias = tuple[int, State, int]  # a step's number and state, and the number of writes to its memory

_NO_TOTALS: Float64 = np.empty(0)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def whole(method: _Method) -> _Method:
    """Make an interrupted call of this method mark the step as broken and close the exchanges, so that no rank waits.

    The same happens if the device fails during a call. It also happens if a call has changed something and ends with
    the exception of another library or a signal handler. After other errors the state is the same as before the call.
    The method's object has a `_reducer`.
    """

    @functools.wraps(method)
    def called(self: Any, /, *given: Any, **named: Any) -> Any:
        reducer, state = self._reducer, self._reducer.accumulator.state
        before = reducer.step, state.now, state.changes
        try:
            return method(self, *given, **named)
        except BaseException as fault:
            reducer.break_off_after(fault, before)
            raise

    return cast("_Method", called)


@final
class Reducer:
    """The sum over the ranks of one accumulator's windows.

    Attributes:
        accumulator: The accumulator.
        workers: The exchange over the ranks with the same part of a model, or None.
        parts: The group of the ranks with the model's other parts.
        step: The number of the open step, counted from 0.
        sums: The sums over the ranks in the open step, after they have arrived. None without other ranks.
        agreed: The final stats of the open step, which all ranks have. Always None for a lone rank.
        is_only_worker: Whether no other rank has the same part of the model.
        stop_request: The newest request to stop, as a new object. A signal handler may set it at any time.
    """

    def __init__(
        self,
        accumulator: PerBlockGradientAccumulator,
        *,
        average: str,
        settings: Mapping[str, str],
        plan: ClipPlan,
        bounds: Kept,
    ) -> None:
        self.accumulator, self._average, self._settings = accumulator, average, settings
        self.parts, self._plan, self._bounds = TensorParallelGroup(accumulator), plan, bounds
        self.workers: Exchange | None = None
        self.step, self.is_only_worker = 0, True
        self.on_device: DeviceSums | None = None  # set if the ranks sum on their GPUs
        self._layout, self._kernels, self._state = accumulator.layout, accumulator.kernels, accumulator.state
        self._is_on_host = self._kernels.device.name == "cpu"
        partials = accumulator.arena.partials
        # The places of the CPU's squared sums of chunks. A device uses different chunks.
        self._host_partials = partials if self._is_on_host else PartialSums(partials.sizes, partials.order)
        self.agreed: StepStats | None = None
        self.sums: Sums | None = None
        self._means: set[int | str] = set()  # spans that hold this rank's mean instead of its sum
        self._loaded_from: Worker | None = None  # the rank whose window was loaded, while the window is open
        # Only the handler writes `stop_request`, and only the step writes the others. So no request in a step is lost.
        self.stop_request: object = None
        self._read_request: object = None  # the request that was read in the open step
        self._reported: tuple[int, object] = (-1, None)  # this rank's last request in a result, after its step

    @property
    def is_alone(self) -> bool:
        """Whether there is no rank to agree with, because no other rank has this or a different part of the model."""
        return self.is_only_worker and self.parts.is_alone

    @property
    def waits(self) -> bool:
        """Whether a step waits on the host for other ranks."""
        return not self.is_alone and self.on_device is None

    @property
    def worker(self) -> Worker:
        """The number of this rank and the number of ranks, (0, 1) without an exchange."""
        return (0, 1) if self.workers is None else (self.workers.rank, self.workers.world_size)

    @cached_property
    def _in_parts(self) -> Any:
        """The arena, or on a GPU the object that copies its shares. Cached, because it keeps an exchange's rows."""
        return self._kernels.device.in_parts(self.accumulator.memory)

    def connect(self, exchange: Exchange | None, tp_exchange: Exchange | None) -> None:
        """Join groups, which replace those of earlier exchanges. The step begins again in them."""
        if exchange is not None:
            if self.on_device is not None and self.on_device.started:
                what = f"step {self.step} is half summed on GPUs, and cannot be resumed"
                raise WindowError(what, do="discard() it on every rank")
            refuse_other_worker(self._loaded_from, (exchange.rank, exchange.world_size))
        self._state.enter(Call.RECONNECT)
        self.agreed = None
        if tp_exchange is not None:
            self.parts.join(tp_exchange, self.step, self._settings)
        if exchange is not None:
            self._join(exchange)

    def _join(self, exchange: Exchange) -> None:
        self._leave_device()
        parts = "none" if self.parts.exchange is None else f"{self.parts.exchange.world_size} ranks"
        settings = {**self._settings, "tensor-parallel group": parts}
        # A rank's mean needs the weight that was not dropped, which only its GPU has.
        needs_weight = self._average == "per_worker" and self.accumulator.drops is not None
        by_calls = not self._is_on_host and self._layout.tp_size == 1 and not needs_weight
        with self.accumulator.arena.in_order():
            exchange.bind(
                self._layout, self._in_parts,
                step=self.step, settings=settings, replaces=self.workers, sums_by_calls=by_calls,
            )  # fmt: skip
        self.workers, self.is_only_worker, self.sums = exchange, exchange.world_size == 1, None
        if exchange.device_calls is not None and not self.is_only_worker:
            try:
                self.on_device = DeviceSums(exchange, exchange.device_calls, self.accumulator, self._plan, self._bounds)
            except BaseException:
                exchange.close()  # other ranks wait for this one
                raise

    def start(self, spans: Iterable[Span], *, in_background: bool = True) -> None:
        """Start spans that are complete on this rank. They are sent from now on, or in `agree`."""
        if self.workers is None or self.is_only_worker:
            return
        started = (self.on_device or self.workers).started
        new = [span for span in spans if span.key not in started]
        for span in new:
            self.accumulator.close_span(span)
            if self._average == "per_worker":
                self._to_mean(span)
        if new and self.on_device is not None:
            with self.accumulator.changing(self._state.ask(Event.SEND)):
                self.on_device.start(new)
        elif new:
            with self.accumulator.arena.in_order():
                self._state.enter(Event.SEND)
                self.workers.start(*new, in_background=in_background)

    def all_gather_object(self, what: str, facts: object) -> list[Any]:
        """Return every rank's facts in rank order (see `Exchange.tell`)."""
        if self.workers is None:
            return gathered([packed(what, facts)])
        told = self.workers.tell(what, facts)
        if packed(what, told[self.workers.rank]) != packed(what, facts):  # bytes, because NaN differs from itself
            do = "pass a different text to each call in a step"
            raise CallerError(f"'{what}' was already gathered in step {self.step} with different values", do=do)
        return told

    def agree(self, scale: Scale, norms: str | None = None) -> StepStats:
        """Sum the arena over all ranks, and return the step's stats, which are the same on all ranks.

        If the ranks sum on their GPUs, the sums are only queued, and only the device has the totals.

        Args:
            scale: The loss scale, and the finite steps that a dynamic one has seen. The same on all ranks.
            norms: The running norm of a spike policy as text, the same on all ranks. None without a policy.

        Raises:
            WindowError: No rank had a micro-batch. All ranks continue with the next step.
        """
        is_alone, accumulator = self.is_only_worker and self.parts.is_alone, self.accumulator
        if self._loaded_from is not None:
            refuse_other_worker(self._loaded_from, self.worker)
        if self.agreed is not None:
            return self.agreed  # the ranks have already agreed on this step
        if not self._is_on_host:
            # This comes first because it refuses a stream that records a graph.
            self._kernels.device.wait_for(accumulator.producers)
        if self.workers is None and is_alone:
            warn_of_other_ranks()
        accumulator.close(measure=self.is_only_worker or accumulator.keeps_first)
        if is_alone:
            accumulator.measure_rest()
            drops = None if self._is_on_host else accumulator.drops
            stats = self._stats(_NO_TOTALS) if drops is None else self._stats_on_device(drops)
        elif self.on_device is not None:
            stats = self._agree_on_device(self.on_device, scale)
        else:
            stats = self._agree_on_host(scale, norms)
        self._state.enter(Event.AGREE)
        if self.on_device is None and not stats.micro_batches:
            self.begin(self.step + 1)  # all ranks do the same
            got = f"0 micro-batches on each of {self.worker[1]} ranks"
            do = "add() gradients before each step(); all ranks continue with the next step"
            raise WindowError("step without a micro-batch on any rank", got=got, expected="at least 1", do=do)
        self.agreed = None if is_alone else stats
        return stats

    def asks_to_stop(self) -> bool:
        """Return whether this rank requests that all ranks stop after the open step. A recorded step never does."""
        self._read_request = self.stop_request
        return self._read_request is not self._reported[1] and self._state.now is not State.RECORDED

    def divisor(self, stats: StepStats) -> float:
        """Return the number by which the sum over all ranks is divided. 1 if only the device has it."""
        if self.on_device is not None:
            return 1.0
        if self._average == "prescaled":
            return self.worker[1]
        if stats.on_device is not None:
            return 1.0
        return stats.workers if self._average == "per_worker" and not self.is_only_worker else stats.weight

    def find_non_finite(self, bad: Sequence[int]) -> NonFiniteGradient:
        """Return the error for NaN or Inf in the components at these positions, with the rank that contributed it."""
        found = self.parts.first_found(self._first_found(bad), self.step)
        (position, index, value, rank), tp_rank = found or ((bad[0], 0, math.nan, None), None)
        name = self._layout.slots[position].name
        return NonFiniteGradient(name, index, value, step=self.step, rank=rank, tp_rank=tp_rank)

    def fail(self) -> None:
        """Keep the window after an exchange failed. It takes no more gradients, and the step can be run again."""
        self._state.enter(Event.FAIL)
        self.agreed = None

    def discard(self, *, is_queued: bool) -> None:
        """Drop the window. If part of it was already sent, the exchanges are closed, because it cannot be taken back.

        The number of a step that all ranks agreed on is not used again, because the other ranks have made or dropped
        that step. It is not used again either if `is_queued`, because the device may still report the step's verdict.
        That verdict would be taken for the next step's.
        """
        now, self._state.now = self._state.now, State.BROKEN  # `begin` ends this state
        if now in {State.SENDING, State.FAILED, State.BROKEN}:
            self._leave()
        self.begin(self.step + (now is State.AGREED or is_queued))

    def break_off_after(self, fault: BaseException, before: Place) -> None:
        """Break off the step at whose place `before` a call began, if the call was interrupted or lost the device."""
        now, is_ours = (self.step, self._state.now, self._state.changes), isinstance(fault, GradientError)
        is_broken = self._state.now is State.BROKEN and not is_ours
        # A signal handler may raise its exception after the last line that changed something.
        is_late = now != before and not is_ours and not isinstance(fault, MemoryError)
        if is_broken or is_late or isinstance(fault, DeviceFailed) or not isinstance(fault, Exception):
            self.break_off(before[0])

    def break_off(self, step: int) -> None:
        """Mark the step of this number as broken after an interrupt, and close the exchanges, so that no rank waits.

        The step counts as not made, even if only its result was missing. Ranks that have made it are one step ahead.
        """
        self._state.now, self.step = State.BROKEN, step
        if self._reported[0] == step:  # the result was never returned
            self._reported = (-1, None)
        self._leave()

    def facts(self) -> Facts:
        """Return the values for the texts of refusals."""
        is_over_mpi = self.workers is not None and self.workers.url == MPI_URL
        return {
            "step": f"step {self.step}",
            "after_loss": "" if self.is_alone or is_over_mpi else " (after reconnect() if the exchange was lost)",
            "count": self.accumulator.accumulated_count,
            "or_nothing": "" if self.is_alone else ", or add(None, weight=0) if this rank has none",
        }

    def refuse_other_group(self, sums: object) -> None:
        """Raise `CallerError` if a step waits for other ranks, or the window was captured with a different group."""
        if self.waits:
            raise CallerError("a step with an exchange waits for other ranks and cannot be captured or replayed")
        if sums is not self.on_device:
            raise CallerError("the window was captured with a different exchange", do="capture it again")

    def begin(self, step: int, whose: Worker | None = None, *, is_made: bool = False) -> None:
        """Begin the step of this number with an empty window. `whose` is the rank whose window is loaded next.

        If `is_made`, the step before was made, and its result reports the request to stop that it has read.
        """
        for exchange in (self.workers, self.parts.exchange):
            if exchange is not None:
                exchange.begin(step)
        if self.on_device is not None:
            self.on_device.restart()
        self._means, self.agreed, self.sums, self._loaded_from = set(), None, None, whose
        self.accumulator.drop_window()
        self.step = step
        if is_made and self._read_request is not self._reported[1]:
            self._reported = step - 1, self._read_request
        self._state.now = State.EMPTY  # last, so that an interrupt leaves the earlier state or BROKEN

    # ---- inside ----

    def _agree_on_host(self, scale: Scale, norms: str | None) -> StepStats:
        shown_scale = f"{scale[0]!r} for {scale[1]} steps" if scale[1] else repr(scale[0])
        terms = {"loss_scale": shown_scale, "max_norm": self._settings["max_norm"]}
        if norms is not None:
            terms[RUNNING_NORM] = norms
        if self.is_only_worker or self.workers is None:
            self.accumulator.measure_rest()
            self._state.enter(Event.SEND)
            return self.parts.agree(self._stats(self._kernels.totals(self.accumulator.arena)), self.step, terms)
        self.start(self._layout.spans, in_background=False)
        self.sums = self.workers.wait()
        self._state.enter(Event.SEND)
        # The exchange has measured the sums with one result for all devices. A device would round in a different order.
        totals = self._host_partials.totals_of(self.sums.squares)
        mine = self.parts.agree(self._stats(totals, self.accumulator.own_square()), self.step, terms)
        return agree(self.workers, mine, self.step, terms)

    def _agree_on_device(self, sums: DeviceSums, scale: Scale) -> StepStats:
        accumulator = self.accumulator
        self.start(self._layout.spans)
        count, weight = accumulator.accumulated_count, ordered_sum(accumulator.weights)
        part = {"prescaled": 1.0, "per_worker": float(count > 0)}.get(self._average, weight)
        mine = StepStats(weight, count, _NO_TOTALS, accumulator.unused, stop=self.asks_to_stop())
        with accumulator.changing():
            by_weight = self._average == "weighted"
            sums.finish((part, weight, count), self.step, scale[0], stop=mine.stop, by_weight=by_weight)
        accumulator.forget_measured()
        accumulator.measure_rest()
        divisor, weight, batches, stop, dropped = sums.totals()
        told = {"weight": weight, "micro_batches": batches, "stop": stop}
        if accumulator.drops is not None:
            told |= {"dropped": dropped, "counted": weight}
        return replace(mine, **told, on_device=divisor, ask_device=sums.unused)

    def _leave(self) -> None:
        self._leave_device()
        for exchange in (self.workers, self.parts.exchange):
            if exchange is not None:
                exchange.close()

    def _leave_device(self) -> None:
        if self.on_device is not None:
            self.on_device.leave()
            self.on_device = None

    def _first_found(self, suspects: Sequence[int]) -> Finding | None:
        for rank, index, value in () if self.sums is None else self.sums.bad:
            for position, slot in enumerate(self._layout.slots):
                if slot.offset <= index < slot.stop:  # padding is no gradient
                    return position, index - slot.offset, value, rank
        for position in suspects:
            with self.accumulator.arena.in_order():
                found = self._kernels.first_non_finite(self.accumulator.arena.targets[position])
            if found is not None:
                return position, *found, None
        return None

    def _stats(self, totals: Float64, square: float | None = None) -> StepStats:
        accumulator, stop = self.accumulator, self.asks_to_stop()
        weight, count = accumulator.total_weight, accumulator.accumulated_count
        dropped = 0 if accumulator.drops is None else accumulator.dropped
        return StepStats(weight, count, totals, accumulator.unused, stop=stop, dropped=dropped, square=square)

    def _stats_on_device(self, drops: Drops) -> StepStats:
        """Return the stats of a lone engine on a GPU. Only the GPU has the weight of the micro-batches that count."""
        accumulator = self.accumulator
        weight, count, stop = drops.kept.field("weight"), accumulator.accumulated_count, self.asks_to_stop()
        divisor = None if self._average == "prescaled" else weight
        stats = StepStats(weight, count, _NO_TOTALS, accumulator.unused, stop=stop, on_device=divisor)
        return replace(stats, dropped=drops.kept.field("dropped"), counted=weight)

    def _to_mean(self, span: Span) -> None:
        """Turn the span's sum into this rank's mean, at most once in a step."""
        accumulator = self.accumulator
        if span.key in self._means or not accumulator.total_weight:
            return
        factor, targets = accumulator.mean_factor, [accumulator.target_of(slot) for slot in span.slots]
        with accumulator.changing():
            if factor != 1:
                self._kernels.scale(targets, factor, targets)
            self._means.add(span.key)


def refuse_other_worker(whose: Worker | None, here: Worker) -> None:
    """Raise `WindowError` if this is not the rank that saved the window."""
    if whose is not None and whose != here:
        what = "the state was saved in mid-window by rank {} of {}, and this is rank {} of {}".format(*whose, *here)
        raise WindowError(what, do="load on each rank the state that it saved")
