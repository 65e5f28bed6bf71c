"""The whole step: micro-batches in, one averaged, checked, clipped gradient out, the same on every worker."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, final

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.agreement import Tally, agree
from gradengine.buffer import Buffer, overlapping
from gradengine.clip import Groups, MaxNorm, clip_plan
from gradengine.errors import BufferRefused, CallerError, ExchangeError, NonFiniteGradient, WindowError
from gradengine.exchange.interface import Exchange, Progress
from gradengine.gradients import Gradients, in_slot_order, refuse_other_shape
from gradengine.kernels import Decision, kernels_for
from gradengine.layout import GradientLayout, Span
from gradengine.result import StepResult

__all__ = ["GradientEngine"]


@final
class GradientEngine:
    """Accumulates micro-batches in fp32, sums them over workers, checks, clips, averages and hands back.

    Every call checks what it was given before it changes anything. A step that failed can be run again: `step()` once
    more, after `reconnect` where the exchange is lost; or the window is dropped by `discard()`.

    Args:
        layout: Where each component lies.
        device: "cpu" in this version.
        max_norm: Bound of the global norm, or one by group name; None clips nothing.
        exchange: The sum over workers; None for one worker.
        on_non_finite: "raise" a `NonFiniteGradient`; "skip" the step on all workers; or "pass" it on unclipped.
        micro_batches: Micro-batches of a window, if known: the last one takes the norm in the same pass, and its spans
            leave for the other workers at once.
        hold: Micro-batches kept by reference and folded in one pass; their buffers must stay unchanged until then.
        groups: Components that share a norm: None (global), "block", "component", or a mapping or function by slot.
        average: "weighted" is the mean over all micro-batches by weight; "per_worker" the mean of the workers' means.
        loss_scale: What the loss was multiplied by; undone in the same multiplication.

    Raises:
        CallerError: An argument is out of range.
        HandshakeRefused, PeerLost: The workers do not come together.

    Example:
        >>> engine = GradientEngine(GradientLayout.of({"w": (2,)}), max_norm=1.0)
        >>> engine.add({"w": np.array([6, 0], np.float32)})
        >>> engine.add({"w": np.array([0, 8], np.float32)})
        >>> result = engine.step()
        >>> result.norm, result.scale, result.gradients["w"]
        (5.0, 0.2, array([0.6, 0.8], dtype=float32))
    """

    def __init__(
        self,
        layout: GradientLayout,
        device: str = "cpu",
        max_norm: MaxNorm = 1.0,
        exchange: Exchange | None = None,
        on_non_finite: Literal["raise", "skip", "pass"] = "raise",
        micro_batches: int | None = None,
        *,
        hold: int = 1,
        groups: Groups = None,
        average: Literal["weighted", "per_worker"] = "weighted",
        loss_scale: float = 1.0,
    ) -> None:
        _refuse_unknown("on_non_finite", on_non_finite, ("raise", "skip", "pass"))
        _refuse_unknown("average", average, ("weighted", "per_worker"))
        if micro_batches is not None and not (isinstance(micro_batches, int) and micro_batches >= 1):
            raise CallerError("micro_batches is out of range", got=micro_batches, expected="at least 1, or None")
        if not (isinstance(loss_scale, (int, float)) and 2.0**-64 <= loss_scale <= 2.0**64):
            raise CallerError("loss_scale is out of range", got=loss_scale, expected="2**-64..2**64")
        self.layout, self.micro_batches, self.loss_scale = layout, micro_batches, loss_scale
        self._on_non_finite, self._average = on_non_finite, average
        self._plan, self._group_names = clip_plan(layout.slots, max_norm, groups)
        self.accumulator = PerBlockGradientAccumulator(layout, kernels_for(device), hold=hold)
        self._kernels = self.accumulator.kernels
        self._progress = Progress()
        self._started: set[int | str] = set()
        self._landed: dict[int | str, int] = {}
        self._failed = self._summed = False
        self._agreed: Tally | None = None
        self._settings = {
            "max_norm": repr(self._plan.max_norms),
            "groups": hashlib.sha256(repr(self._plan.groups).encode()).hexdigest()[:12],
            "average": average,
            "on_non_finite": on_non_finite,
            "loss_scale": repr(float(loss_scale)),
        }
        self.exchange: Exchange | None = None
        if exchange is not None:
            self.reconnect(exchange)

    @property
    def current_step(self) -> int:
        """The number of the step whose window is open, counted from 0."""
        return self._progress.step

    @property
    def rank(self) -> int:
        """This worker's rank; 0 without an exchange."""
        return self.exchange.rank if self.exchange else 0

    @property
    def world_size(self) -> int:
        """Workers in the group; 1 without an exchange."""
        return self.exchange.world_size if self.exchange else 1

    def add(self, gradients: Gradients, weight: float = 1.0) -> None:
        """Add a micro-batch.

        Args:
            gradients: Mapping name -> gradient or a sequence in layout order, of any framework, fp32, fp16 or bf16, on
                the engine's device. None stands for a component without a gradient.
            weight: What it counts in the average: 1, or its tokens.

        Raises:
            LayoutMismatch: A component is missing, unknown or misshapen.
            BufferRefused: A gradient cannot be taken as it lies.
            WindowError: A bad weight, a window that is full, or a step before this one that failed.
        """
        self._refuse_add()
        last = self.accumulator.accumulated_count + 1 == self.micro_batches
        self.accumulator.add(gradients, weight, measure=last and self.world_size == 1)
        if last and self.accumulator.is_even:
            self._start(self.layout.spans)

    def add_block(self, index: int, gradients: Gradients, weight: float = 1.0, *, last: bool = False) -> None:
        """Add one block's part of a micro-batch, as backward finishes it.

        Args:
            index: The block.
            gradients: A sequence in the block's order, or a mapping by component name.
            weight: The micro-batch's weight, the same for all its parts.
            last: This is the window's last contribution to the block, so it may leave for the other workers now.

        Raises:
            LayoutMismatch, BufferRefused, WindowError: As `add`.
        """
        self._refuse_add(index)
        self.accumulator.add_block(index, gradients, weight, measure=last and self.world_size == 1)
        if last:
            self._start((self.layout.blocks[index],))

    def add_non_block(self, name: str | int, gradient: object, weight: float = 1.0, *, last: bool = False) -> None:
        """Add one component outside the blocks, by name or id, as `add_block` does a block.

        Raises:
            LayoutMismatch, BufferRefused, WindowError: As `add`.
        """
        self._refuse_add(name)
        self.accumulator.add_non_block(name, gradient, weight, measure=last and self.world_size == 1)
        if last:
            slot = self.accumulator.non_block_slot(name)
            self._start(span for span in self.layout.spans if span.key == slot.name)

    def step(self, out: Gradients | None = None) -> StepResult:
        """Close the window: sum over workers, check, clip, average and hand back.

        Args:
            out: Destinations, mapping or sequence as for `add`, written in their dtype; None for a component that is
                not wanted. By default the gradients are handed back in the arena.

        Returns:
            The result; a later `add` overwrites its gradients.

        Raises:
            WindowError: There is no micro-batch, or some component lacks part of the window.
            BufferRefused, LayoutMismatch: A destination cannot be written; nothing has been done then.
            NonFiniteGradient: NaN or Inf, with on_non_finite="raise"; the window is kept.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed; the window is kept.
        """
        destinations = self._destinations(out)
        tally = self._agreed = self._agree()
        decision = self._kernels.decide(tally.totals, self._plan, self.loss_scale * self._divisor(tally))
        non_finite = self._find_non_finite(decision)
        if non_finite is not None and self._on_non_finite == "raise":
            self._failed = True
            self.accumulator.forget_measured()  # one worker may mend its arena and run the step again
            raise non_finite
        skipped = non_finite is not None and self._on_non_finite == "skip"
        with self.accumulator.changing():
            self._hand_back(decision, destinations, skipped)
        result = self._result(tally, decision, skipped, non_finite, self._handed_back(out))
        self._next_window()
        return result

    def discard(self) -> None:
        """Drop the window, also one whose step failed.

        With an exchange, call it on every rank. Where parts of the window are on their way already, the exchange cannot
        take them back and is closed: go on with `reconnect`.
        """
        if self._agreed is not None:
            self._next_window()
            return
        if self._started and self.exchange is not None:
            self.exchange.close()
        self._progress.restart()
        self._clear_window()

    def reconnect(self, exchange: Exchange) -> None:
        """Go on with another exchange of the same ranks, after one that failed; then call `step()` again.

        Close the old exchange first, on rank 0 above all: its coordinator still has the address. Only what was not yet
        summed travels, and the result is the bytes of an undisturbed run.

        Raises:
            HandshakeRefused, PeerLost: The workers do not come together, or stand at different steps.
        """
        exchange.bind(self.layout, self.accumulator.arena.data, self._progress, self._take_landed)
        self.exchange, self._summed = exchange, False
        for span in [span for span in self.layout.spans if span.key in self._started]:
            exchange.start(span)

    # ---- the way in ----

    def _refuse_add(self, key: int | str | None = None) -> None:
        if self._failed:
            raise WindowError(
                f"step {self.current_step} failed, and its window is kept",
                do="run step() again (after reconnect() where the exchange was lost), or discard() it",
            )
        if self._started and (key is None or key in self._started):
            raise WindowError(
                "the window is complete and on its way to the other workers"
                if key is None
                else f"{key!r} is on its way",
                got=f"a contribution after the last of {self.accumulator.accumulated_count} micro-batches",
                expected="step()",
            )
        if self.micro_batches is not None and key is None and self.accumulator.accumulated_count >= self.micro_batches:
            raise WindowError(
                "the window is full",
                got=f"micro-batch {self.accumulator.accumulated_count + 1}",
                expected=f"step() after {self.micro_batches} micro-batches",
            )

    def _start(self, spans: Iterable[Span]) -> None:
        """The spans hold all that this worker contributes: they may leave."""
        if self.exchange is None or self.world_size == 1:
            return
        for span in spans:
            if span.key not in self._started:
                self.accumulator.settle_span(span)
                with self.accumulator.changing():
                    self._to_mean_of_worker(span)
                self._started.add(span.key)
                self.exchange.start(span)

    def _to_mean_of_worker(self, span: Span) -> None:
        if self._average == "per_worker" and self.accumulator.total_weight != 1:
            targets = self.accumulator.targets_of(span)
            factor = np.float32(1 / self.accumulator.total_weight)
            self._kernels.hand_back(targets, [factor] * len(targets), targets)

    def _divisor(self, tally: Tally) -> float:
        """What makes the sum the average: with one worker its own mean is the mean over all."""
        return self.world_size if self._average == "per_worker" and self.world_size > 1 else tally.weight

    # ---- the exchange ----

    def _agree(self) -> Tally:
        """Local sums become sums over all workers, and all workers know the same facts about them."""
        if self._agreed is not None and self.world_size > 1:
            return self._agreed  # the step was run to its verdict before; there is nothing left to exchange
        self.accumulator.close(measure=self.world_size == 1)
        if self.exchange is None or self.world_size == 1:
            self.accumulator.measure_rest()
            return self._tally()
        try:
            self._start(self.layout.spans)
            if not self._summed:
                self._progress.bad = list(self.exchange.wait())
                self._summed = True
            self._measure_landed()
            return agree(self.exchange, self._tally())
        except ExchangeError:
            self._failed = True
            raise

    def _tally(self) -> Tally:
        accumulator = self.accumulator
        totals = self._kernels.totals(accumulator.sums)
        return Tally(accumulator.total_weight, accumulator.accumulated_count, totals, self._settings)

    def _take_landed(self, span: Span, upto: int) -> None:
        """Measure the chunks that a sum completed, while they are in the cache of the thread that received it."""
        first = self._landed.get(span.key, span.start)
        self._landed[span.key] = upto
        self._measure(span, first, upto)

    def _measure_landed(self) -> None:
        for span in self.layout.spans:
            self._take_landed(span, span.stop)

    def _measure(self, span: Span, first: int, upto: int) -> None:
        sums = self.accumulator.sums
        chunks = [
            chunk
            for position, slot in self.accumulator.slots_of(span)
            if slot.offset < upto and first < slot.stop
            for chunk in sums.completed(position, first - slot.offset, upto - slot.offset)
        ]
        self._kernels.measure(self.accumulator.targets, sums, chunks)

    # ---- the way out ----

    def _destinations(self, out: Gradients | None) -> dict[int, Buffer]:
        """Where each target is handed back to, by position: the arena itself, or the caller's memory."""
        targets = self.accumulator.targets
        if out is None:
            return dict(enumerate(targets))
        slots = self.layout.slots
        found = {}
        for position, (slot, array) in enumerate(zip(slots, in_slot_order(slots, out, "out"), strict=True)):
            if array is not None:
                found[position] = self._kernels.writable_view(array, slot.name)
                refuse_other_shape(found[position], slot)
        pair = overlapping([*found.values(), self.accumulator.arena])
        if pair is not None:
            names = [*(slots[position].name for position in found), "the engine's arena"]
            raise BufferRefused(f"destinations '{names[pair[0]]}' and '{names[pair[1]]}' overlap in memory")
        return found

    def _find_non_finite(self, decision: Decision) -> NonFiniteGradient | None:
        if not decision.bad:
            return None
        for bad in self._progress.bad:
            for slot in self.layout.slots:
                if slot.offset <= bad.index < slot.stop:  # else it lies in padding, which is nobody's gradient
                    index = bad.index - slot.offset
                    return NonFiniteGradient(slot.name, index, bad.value, step=self.current_step, rank=bad.rank)
        position = decision.bad[0]
        slot, target = self.layout.slots[position], self.accumulator.targets[position]
        index, value = self._kernels.first_non_finite(target) or (0, math.nan)
        return NonFiniteGradient(slot.name, index, value, step=self.current_step)

    def _hand_back(self, decision: Decision, destinations: dict[int, Buffer], skipped: bool) -> None:
        targets = self.accumulator.targets
        if skipped:
            self._kernels.fill_zero([*targets, *destinations.values()])
            return
        sources = [targets[position] for position in destinations]
        factors = [decision.factors[self._plan.groups[position]] for position in destinations]
        self._kernels.hand_back(sources, factors, list(destinations.values()))

    def _handed_back(self, out: Gradients | None) -> Mapping[str, Any]:
        if out is None:
            return self.accumulator.views()
        slots = self.layout.slots
        arrays = zip(slots, in_slot_order(slots, out, "out"), strict=True)
        return {slot.name: array for slot, array in arrays if array is not None}

    def _result(
        self,
        tally: Tally,
        decision: Decision,
        skipped: bool,
        non_finite: NonFiniteGradient | None,
        gradients: Mapping[str, Any],
    ) -> StepResult:
        return StepResult(
            gradients=gradients,
            norm=decision.norm,
            scale=min(decision.scales),
            weight=tally.weight,
            micro_batches=tally.micro_batches,
            skipped=skipped,
            group_norms=dict(zip(self._group_names, decision.group_norms, strict=True)),
            group_scales=dict(zip(self._group_names, decision.scales, strict=True)),
            non_finite=non_finite,
            step=self.current_step,
        )

    def _next_window(self) -> None:
        self._progress.next_step()
        self._clear_window()

    def _clear_window(self) -> None:
        self.accumulator.zero_all()
        self._started, self._landed = set(), {}
        self._failed = self._summed = False
        self._agreed = None


def _refuse_unknown(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise CallerError(f"unknown {name}", got=repr(value), expected=f"one of {', '.join(map(repr, known))}")
