"""The accumulator of every device, which adds the micro-batches of one window at a time to one arena.

The window's first contribution to a component overwrites it, so that no pass zeroes the arena. With `hold=n` up to n
micro-batches are kept by reference and folded in one pass. The additions, their order and the bits stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt

from gradengine.accumulate.block import BlockGradientSet
from gradengine.accumulate.destinations import KnownDestinations
from gradengine.accumulate.gradients import Gradients, NamedArrays, in_slot_order
from gradengine.accumulate.groups import Groups
from gradengine.accumulate.intake import Intake
from gradengine.accumulate.state import Call, Changing, State, StepState
from gradengine.accumulate.window import (
    FirstFold,
    Flags,
    SavedWindow,
    Window,
    checked_weight,
    no_part_may_be_dropped,
    nothing_came,
    ordered_sum,
)
from gradengine.arguments import truth_value, whole_number
from gradengine.arrays.buffer import Buffer
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import CallerError, WindowError, not_copied
from gradengine.kernels import Contribution, FoldPass, Kernels, kernels_for
from gradengine.kernels.decision import refuse_bad_divisor
from gradengine.layout import GradientLayout, Slot, Span, refuse_no_layout


class PerBlockGradientAccumulator:
    """One fp32 arena for a layout, and the open window of micro-batches that are added to it.

    Every call checks its arguments before it changes anything, so that an error leaves the state as it was. On a GPU
    `add` and similar calls queue their work on the current stream and return.

    Args:
        layout: Names, shapes and order of the components.
        kernels: The device's kernels; NumPy on the CPU by default.
        hold: Micro-batches kept by reference and added in one pass. Until then arrays must keep values and memory.
        is_shared: Put the arena into memory that other processes of this host can map. Without effect on a GPU.
        drops: Leave out each micro-batch that is not finite. A micro-batch must then be added as a whole.

    Raises:
        CallerError: `hold` is not a whole number >= 1, or more than 1 with `drops`.

    Attributes:
        layout: Names, shapes and order of the components.
        kernels: The device's kernels.
        hold: Micro-batches kept by reference and added in one pass.
        arena: The components' sums in layout order, and their squared sums as far as they were measured.
        memory: The arena as one flat buffer, padding included.
        destinations: The checked arrays of callers that steps have written to.
        state: The step's state.
        drops: The weight and number of micro-batches that were not dropped, kept by the kernels; None without `drops`.
        keeps_first: Whether the squared sums of the window's first fold are kept for the gradient noise.

    Example:
        >>> accumulator = PerBlockGradientAccumulator(GradientLayout.of({"layers.0.w": (2,), "head": (1,)}))
        >>> accumulator.add_block(0, [np.array([1, 2], np.float32)])
        >>> accumulator.add_block(0, [np.array([3, 4], np.float32)])
        >>> accumulator.block(0).flatten()[:2]
        array([4., 6.], dtype=float32)
    """

    __reduce_ex__ = not_copied("build a new one with the same layout")

    def __init__(
        self,
        layout: GradientLayout,
        kernels: Kernels | None = None,
        *,
        hold: int = 1,
        is_shared: bool = False,
        drops: bool = False,
    ) -> None:
        refuse_no_layout(layout)
        self.layout, self.hold = layout, whole_number("hold", hold, 1)
        if drops and self.hold > 1:
            what = "a micro-batch that may be dropped cannot be held"
            raise CallerError(what, got=f"hold={hold}", expected="hold=1")
        self.kernels = kernels = kernels_for("cpu" if kernels is None else kernels)
        self.memory = memory = kernels.device.allocate(layout.arena_size, is_shared=is_shared)
        self.arena = kernels.arena([memory.part(slot.offset, slot.stop) for slot in layout.slots], memory)
        with self.arena.in_order():
            kernels.fill_zero([memory.part(*gap) for gap in layout.padding])
        self._window = Window(len(layout.slots))
        self.drops = kernels.drops(self.arena) if drops else None
        self.state = StepState(kernels.device)
        self.keeps_first = False
        self._intake = Intake(kernels.device, memory)
        self.destinations = KnownDestinations(layout.slots, kernels.device, memory)
        # Each step measures these components again, because callers may write to them through views.
        self._exposed = np.zeros(len(layout.slots), np.bool_)
        self._all = Span.of(layout.slots, "the layout")
        self._left: set[Span] = set()  # spans of the window that are being sent to other ranks
        kernels.prepare(self.arena, [self._all, *layout.spans])

    @property
    def num_blocks(self) -> int:
        """The number of transformer blocks of the layout."""
        return len(self.layout.blocks)

    @property
    def accumulated_count(self) -> int:
        """The number of the window's micro-batches, including one that is still being added block by block."""
        return len(self._window.weights)

    @property
    def window(self) -> object:
        """The open window. Each step or drop of the window replaces the object."""
        return self._window

    @property
    def is_even(self) -> bool:
        """Whether every component has the same number of micro-batches."""
        return self._window.is_even

    @property
    def unused(self) -> npt.NDArray[np.bool_]:
        """Flags by position, set for components without a gradient in the window or a view that a caller may write."""
        return ~(self._window.used | self._exposed)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each micro-batch of the window, in order."""
        return tuple(map(float, self._window.weights))

    @property
    def total_weight(self) -> float:
        """The fp64 sum, in order, of the weights of micro-batches that were not dropped. `drops` on a GPU waits."""
        if self.drops is not None and self._window.weights:
            return float(self.drops.kept.read()[0])
        return ordered_sum(map(float, self._window.weights))

    @property
    def dropped(self) -> int:
        """The number of the window's micro-batches that were dropped. With `drops` on a GPU this waits."""
        return int(self.drops.kept.read()[1]) if self.drops is not None and self._window.weights else 0

    @property
    def first(self) -> FirstFold | None:
        """The window's first fold, if its squared sums were kept and more micro-batches followed."""
        first = self._window.first
        return first if first is not None and first.weight < self.total_weight else None

    @property
    def mean_factor(self) -> np.float32:
        """The factor fp32(1 / total weight) of the window's mean. Raises `WindowError` for a weight above 2**126."""
        weight = self.total_weight
        refuse_bad_divisor(weight, "the window's weight")
        factor: np.float32 = np.float32(1 / weight)
        return factor

    @property
    def producers(self) -> AbstractSet[ProducerStream]:
        """The streams on which the window's gradients are produced."""
        return self._window.producers

    def add(self, gradients: Gradients, weight: SupportsFloat = 1.0, *, measure: bool = False) -> None:
        """Add a whole micro-batch.

        Args:
            gradients: Mapping name -> gradient, or a sequence in layout order; fp32, fp16 or bf16. None stands for a
                component without a gradient in this micro-batch.
            weight: Weight of the micro-batch, such as 1 or its number of tokens. Converted to fp32.
            measure: Whether the same pass measures the squared sums of the norm, as for the last micro-batch.

        Raises:
            LayoutMismatch: A component is missing, unknown or has the wrong shape.
            BufferRefused: A gradient's dtype, device, strides or memory is not supported.
            WindowError: The weight is not a finite number above 0, or all gradients are None.

        Example:
            >>> accumulator = PerBlockGradientAccumulator(GradientLayout.of([(2,)]))
            >>> accumulator.add([np.array([1, 2], np.float32)], weight=2.0)
            >>> accumulator.accumulated_count, accumulator.total_weight
            (1, 2.0)
        """
        self._add(Call.ADD, self._all, gradients, weight, measure)

    def add_nothing(self) -> None:
        """Note that this rank has no micro-batch. Its window can stay empty, with weight 0 in the ranks' sum."""
        self.state.enter(Call.ADD_NOTHING)

    def add_block(
        self, index: int, gradients: Gradients, weight: SupportsFloat = 1.0, *, measure: bool = False
    ) -> None:
        """Add one block's part of a micro-batch as a sequence in the block's order or a mapping by component name.

        Raises:
            LayoutMismatch: No such block, or a component is missing, unknown or has the wrong shape.
            BufferRefused: A gradient's dtype, device, strides or memory is not supported.
            WindowError: The weight is invalid, or differs from that of this micro-batch's other blocks.
        """
        block = self.layout.block(index)
        self._add_part(block, gradients, weight, measure, f"{block.name}.")

    def add_non_block(
        self, name: str | int, gradient: object, weight: SupportsFloat = 1.0, *, measure: bool = False
    ) -> None:
        """Add one component outside the blocks, by name or by id (0 `lm_head`, 1 `final_norm`, 2 `embedding`).

        Raises:
            LayoutMismatch: No such component outside the blocks, or a wrong shape.
            BufferRefused: The gradient's dtype, device, strides or memory is not supported.
            WindowError: The weight is invalid, or differs from that of this micro-batch's other parts.
        """
        self._add_part(self.layout.non_block_span(name), [gradient], weight, measure)

    def begin_micro_batch(self, weight: SupportsFloat, first: Mapping[str, object]) -> None:
        """Begin a micro-batch that is added component by component. Check `first` here without adding it.

        The micro-batch counts from now on. It ends at `end_micro_batch()`.

        Raises:
            LayoutMismatch, BufferRefused: `add_components` would refuse the first gradient.
            WindowError: The weight is invalid, or a component has fewer micro-batches than the others.
        """
        if self.drops is not None:
            raise no_part_may_be_dropped()
        added, scalar = self.state.ask(Call.BEGIN), checked_weight(weight)
        self._window.refuse_lagging(self.layout.slots)
        for name, gradient in first.items():
            self._intake.check(self.layout.slot(name), gradient)
        # The state is set first, so that after an interrupt no call continues with a window that is half begun.
        self.state.now = added
        self._window.begin(scalar)

    def add_components(
        self, span: Span, gradients: Sequence[object], weight: SupportsFloat = 1.0, *, measure: bool = False
    ) -> None:
        """Add a gradient, or None, for each component of a span, within a micro-batch that has begun.

        The gradients of a component that is added again are summed in order. The span is one of `groups` or `alone`.

        Raises:
            LayoutMismatch: A gradient has the wrong shape.
            BufferRefused: A gradient's dtype, device, strides or memory is not supported.
            WindowError: The weight differs from the micro-batch's, or a component was already sent to other ranks.
        """
        for slot, gradient in zip(span.slots, gradients, strict=True) if self._left else ():
            if gradient is not None:
                self._refuse_on_its_way(slot.name)
        self._add(Call.COMPONENT, span, gradients, weight, measure)

    def note_added(self, name: str) -> None:
        """Note that a component's own layer has added to its memory. Raise as `add_components` does."""
        self._refuse_on_its_way(name)
        self.state.ask(Call.COMPONENT)
        self._window.note_added(self.layout.slot(name).position, name)

    def end_micro_batch(self) -> None:
        """End a micro-batch that is added component by component. Components that were not added had no gradient."""
        now = self.state.ask(Call.COMPONENT)
        self._window.end()
        self.state.now = State.OPEN if now is State.COMING else now
        if self.keeps_first:
            self._keep_first()

    def block(self, index: int) -> BlockGradientSet:
        """Return block `index` as views of the arena, after held micro-batches are folded. Zeros if nothing was added.

        It can be kept. Writes to it count in the window that is open then. Each later step measures its norm in a
        separate pass, and none of its components is `unused`.

        Raises:
            LayoutMismatch: No such block.
            WindowError: Raised by a later write to the block while it is sent, or in a state that does not allow it.
        """
        block = self.layout.block(index)
        self._view(block)
        return BlockGradientSet(block, self.kernels, self.arena, block, partial(self._writing, block))

    def average(self) -> None:
        """Divide by the window's weight, in place. The mean then counts as one micro-batch of weight 1.

        Raises:
            WindowError: A component has fewer micro-batches than the others, the window's weight is above 2**126, or a
                call was interrupted while it wrote.
        """
        # A window that takes no more gradients cannot be divided, because other ranks have its sum.
        self.state.ask(Call.ADD)
        if self._window.weights in ([], [1]):
            return
        factor = self.mean_factor
        self.close()
        with self.changing():
            self.kernels.scale(self.arena.targets, factor, self.arena.targets)
            self._window.become_one()
            if self.drops is not None:
                self.drops.kept.write(1.0, 0, 0.0, 0, 0)

    def zero_all(self) -> None:
        """Drop the window and the gradients held for it. The next micro-batch overwrites the memory."""
        now = self.state.ask(Call.ZERO_ALL)
        self.drop_window()
        self.state.now = now

    def drop_window(self) -> None:
        """Forget the window in any state. The caller sets the state afterwards."""
        self._left.clear()
        self._window = Window(len(self.layout.slots))

    def has_non_finite(self) -> bool:
        """Whether any component holds NaN or Inf."""
        self.state.ask(Call.VIEW)
        self._fold_held()
        # Read all sums again, because views from block() may have been written to since they were measured.
        filled = np.flatnonzero(self._window.filled).tolist()
        self.kernels.measure(self.arena, filled)
        return not np.isfinite(self.kernels.totals(self.arena)[filled]).all()

    def close(self, *, measure: bool = False) -> None:
        """Fold all held micro-batches. The arena then holds the window's weighted sum.

        An empty window's sum is -0.0, because adding 0.0 to another rank's sum could change a bit. Components that
        were written through a block, or hold a sum over ranks, keep their values.

        Raises:
            WindowError: The window is empty, or incomplete. Nothing is folded then.
        """
        asked, window = self.state.ask(Call.STEP), self._window
        if not window.weights:
            empty = ~window.filled
            if empty.any():
                targets = [self.arena.targets[position] for position in np.flatnonzero(empty).tolist()]
                with self.changing():
                    self._zero(self._all, empty)
                    self.kernels.scale(targets, np.float32(-1), targets)
            return
        self._window.refuse_lagging(self.layout.slots)
        self._flush(self._all, asked, measure=measure)

    def changing(self, over: State | None = None) -> AbstractContextManager[None]:
        """Return a context in which arena memory is written and the step is BROKEN. After an error it stays BROKEN.

        Work queued in it is ordered after all earlier work on the memory, on any stream. `over` is the state
        afterwards, by default the one before.
        """
        return Changing(self.state, over or self.state.ask(Call.VIEW), self.arena.in_order())

    def close_span(self, span: Span) -> None:
        """Fold the held gradients of a span, so that its sum can be sent. The window adds no more to the span."""
        self._flush(span)
        self._left.add(span)

    def count_of(self, span: Span) -> int:
        """Return the most micro-batches of the window that a component of the span has."""
        return int(self._window.counts[span.places].max())

    def measure_rest(self) -> None:
        """Measure the squared sums that no fold has measured, in one read of those components."""
        rest = self._exposed | ~self._window.measured
        if rest.any():
            self.kernels.measure(self.arena, None if rest.all() else np.flatnonzero(rest).tolist())
            self._window.measured[:] = True

    def forget_measured(self) -> None:
        """Have the next step measure every squared sum again, because the arena may have been written to."""
        self._window.measured[:] = False

    def keep_first_folds(self) -> None:
        """Measure the first fold of each window from now on, and keep its squared sums until the next window's."""
        self.keeps_first = True
        self.kernels.keep_sums(self.arena)  # This call allocates the memory.

    def square_of(self, first: FirstFold) -> float:
        """Return the squared norm of a first fold's sum. On a GPU this waits."""
        return float(self.kernels.totals(self.arena, first.kept)[first.filled].sum())

    def own_square(self) -> float | None:
        """Return the squared norm of the closed window's sum if folds measured all of it. On a GPU this waits."""
        if not self.keeps_first or self._exposed.any() or not self._window.measured.all():
            return None
        return float(self.kernels.totals(self.arena).sum())

    def flush(self, span: Span | None = None) -> None:
        """Fold the held gradients of a span, or all, so that they can be read. Zero components without a sum."""
        self._flush(span or self._all)

    def target_of(self, slot: Slot) -> Buffer:
        """Return a slot's part of the arena."""
        return self.arena.targets[slot.position]

    def views(self) -> Mapping[str, Any]:
        """Return name -> view of the component in the arena, in its shape, as the device's kind of array.

        Held micro-batches are folded. A component to which nothing was added shows old values. Callers may write to the
        arrays, so each later step measures its norm in a separate pass, and no component is `unused`. For the gradients
        of a step use `result.gradients`.

        Raises:
            WindowError: Part of the window is being sent to the other ranks.
        """
        self.state.ask(Call.VIEW)
        # The window that a failed exchange has kept can be viewed. While it is sent, writes would be lost.
        if self._left and self.state.now is State.SENDING:
            raise self._on_its_way("the window")
        self._fold_held()
        self._exposed[:] = True
        return self.arrays()

    def arrays(self) -> Mapping[str, Any]:
        """Return the arrays of `views` for a step's result. Writes after the next `add` are not measured again."""
        self.arena.follow()
        return self.by_name

    @property
    def by_name(self) -> Mapping[str, Any]:
        """The mapping of `arrays`, for a caller that makes the current stream wait later."""
        return NamedArrays(self._views, self.layout.orders)

    @cached_property
    def _views(self) -> Mapping[str, Any]:
        pairs = zip(self.layout.slots, self.arena.targets, strict=True)
        return {slot.name: self.kernels.device.array(target, slot.shape) for slot, target in pairs}

    @cached_property
    def alone(self) -> Mapping[str, Span]:
        """Component name -> span of this component only."""
        own = {s.slots[0].name: s for s in self.layout.spans if len(s.slots) == 1}
        spans = {s.name: own.get(s.name) or Span.of([s], f"component '{s.name}'") for s in self.layout.slots}
        self.kernels.prepare(self.arena, [*spans.values()])
        return spans

    @cached_property
    def groups(self) -> Groups:
        """The groups in which components are added when backward makes their gradients one by one."""
        groups = Groups(self.layout)
        self.kernels.prepare(self.arena, [group.span for group in groups.all])
        return groups

    # ---- saved and loaded ----

    def saved(self) -> SavedWindow:
        """Return the window after folding held micro-batches. On a GPU this waits only for a copy of the arena."""
        self._fold_held()
        window, sums = self._window, np.empty(0, np.float32)
        if window.filled.any():
            sums = self.arena.read(self.kernels.device.array(self.memory, (self.memory.size,)))
            for position in np.flatnonzero(~window.filled).tolist():
                slot = self.layout.slots[position]
                sums[slot.offset : slot.stop] = 0  # values of an earlier window
        says_nothing, weights = self.state.now is State.NOTHING, np.array(self.weights, np.float32)
        counts, used = window.counts.astype(np.int64), window.used | self._exposed
        counted = self.total_weight, self.dropped
        return SavedWindow(says_nothing, weights, counts, used, window.filled.copy(), sums, *counted)

    def load(self, saved: SavedWindow) -> None:
        """Replace the empty window by a saved one."""
        state = State.NOTHING if saved.says_nothing else State.OPEN if saved.weights.size else State.EMPTY
        with self.changing(state):
            for position in np.flatnonzero(saved.filled).tolist():
                slot = self.layout.slots[position]
                self.kernels.device.write(self.arena.targets[position], saved.sums[slot.offset : slot.stop])
            self._window = Window.of(saved)
        if self.drops is not None:
            self.drops.kept.write(saved.counted_weight, saved.dropped, 0.0, 0, 0)
            self.measure_rest()  # The fold of a dropped micro-batch measures nothing.

    # ---- inside ----

    def _fold_held(self) -> None:
        """Fold all held micro-batches."""
        if self._window.held_with(self._all):
            self._before_fold(self._all)
            with self.changing():
                self._fold(self._window.held_passes(self._all), measure=False)

    def _add_part(
        self, span: Span, gradients: Gradients, weight: SupportsFloat, measure: bool, prefix: str = ""
    ) -> None:
        if span in self._left:
            self.state.ask(Call.ADD_PART)  # A failed exchange is reported first.
            raise self._on_its_way(span.called)
        self._add(Call.ADD_PART, span, gradients, weight, measure, prefix)

    def _refuse_on_its_way(self, name: str) -> None:
        span = self.layout.span_of(name)
        if span in self._left:
            self.state.ask(Call.COMPONENT)
            raise self._on_its_way(span.called, do="use micro_batch(last=False) if a component is added more than once")

    def _on_its_way(self, what: str, do: str | None = None) -> WindowError:
        return WindowError(
            f"{what} was sent to the other ranks already",
            got=f"a contribution after the last of {self.accumulated_count} micro-batches",
            expected="step()",
            do=do,
        )

    def _view(self, span: Span) -> None:
        """Fold the held gradients of these slots, for reads and writes. Later steps measure the slots again."""
        self._flush(span)
        self._exposed[span.places] = True

    def _writing(self, block: Span) -> AbstractContextManager[None]:
        """Return a context in which a caller writes to its views of a block."""
        if block in self._left:
            raise self._on_its_way(block.called)
        self._view(block)
        return self.changing()

    def _add(
        self,
        call: Call,
        span: Span,
        gradients: Gradients,
        weight: SupportsFloat,
        measure: bool,
        prefix: str = "",
    ) -> None:
        if self.drops is not None and call is not Call.ADD:
            raise no_part_may_be_dropped()
        added, scalar, measure = self.state.ask(call), checked_weight(weight), truth_value("measure", measure)
        sources = in_slot_order(span.slots, gradients, span.called, prefix)
        if call is Call.ADD and sources[0] is None and all(source is None for source in sources):
            raise nothing_came(len(sources))
        contribution = self._intake.contribution(span, sources)
        self._window.refuse_other_weight(span, scalar)
        if self.hold > 1:
            self._hold(contribution, scalar, added, measure=measure)
            return
        self.state.write()
        dropped, is_first = False, not self._window.weights
        if self.drops is not None:
            dropped = self.kernels.judge(self.arena, contribution, scalar, self.drops, is_first=is_first)
        self._window.count(contribution, scalar, is_coming=added is State.COMING)
        is_empty = ~self._window.filled[span.where]
        self._fold([FoldPass(span, is_empty, [contribution], [scalar], dropped)], measure=measure)
        self.state.now = added

    def _hold(self, contribution: Contribution, weight: np.float32, added: State, *, measure: bool) -> None:
        window, span = self._window, contribution.slots
        window.refuse_aliases(contribution, self.layout.slots)
        contribution.hold()
        is_full = measure or window.depth(span) + 1 >= self.hold
        is_apart = window.held_with(span) not in ([], [span])  # earlier ones are held in different parts
        if is_full or is_apart:
            self._before_fold(span)
        self.state.write()
        if is_apart:
            self._fold(window.held_passes(span), measure=False)
        window.count(contribution, weight, is_coming=added is State.COMING)
        window.hold(contribution, weight)
        if is_full:
            self._fold(window.held_passes(span), measure=measure)
        self.state.now = added

    def _flush(self, span: Span, over: State | None = None, *, measure: bool = False) -> None:
        """Fold held gradients and zero slots without a sum, for a view or a call that ends in the state `over`."""
        over = over or self.state.ask(Call.VIEW)
        if self._window.filled[span.places].all() and not self._window.held_with(span):
            return
        self._before_fold(span)
        with self.changing(over):
            self._fold(self._window.held_passes(span), measure=measure)
            empty = ~self._window.filled[span.places]
            if empty.any():
                self._zero(span, empty)

    def _zero(self, span: Span, chosen: Flags) -> None:
        self.kernels.zero(self.arena, span, chosen)
        positions = span.places[chosen]
        self._window.filled[positions] = self._window.measured[positions] = True

    def _before_fold(self, span: Span) -> None:
        """Wait for the producers of held gradients first, because an error in a fold leaves the window half written."""
        if self._window.held_with(span):
            self.kernels.device.wait_for(self._window.producers)

    def _fold(self, passes: Iterable[FoldPass], *, measure: bool) -> None:
        measure = measure or self.kernels.measures_in_passing
        measure = measure or (self.keeps_first and self._window.is_in_first_fold(self.hold))
        for fold in passes:
            self.kernels.accumulate(self.arena, fold, measure=measure)
            self._window.folded(fold, measured=measure and fold.dropped is not True)
        if self.keeps_first:
            self._keep_first()

    def _keep_first(self) -> None:
        """Keep the squared sums of the window's first fold once it is whole, if the fold measured them."""
        window = self._window
        if window.is_in_first_fold(self.hold) and window.is_measured:
            kept = self.kernels.keep_sums(self.arena)
            window.first = FirstFold(self.total_weight, window.filled.copy(), kept)
