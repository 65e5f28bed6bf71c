"""What may be called now: a window that has room, a step that has not failed, a stream that is the captured one."""

from __future__ import annotations

from typing import final

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.state import Call, State
from gradengine.arguments import as_float, said
from gradengine.capture import CapturedWindow
from gradengine.deferred import DeferredErrors
from gradengine.errors import CallerError, WindowError
from gradengine.layout.slots import Span
from gradengine.reduction.reducer import Reducer
from gradengine.result import StepResult
from gradengine.settings import Settings

__all__ = ["Admission"]


@final
class Admission:
    """Who asks an engine's parts whether a call fits their state; nothing is changed here.

    Args:
        settings: The engine's settings.
        accumulator: The window of micro-batches.
        reducer: The engine's side of the exchange.
        late: Verdicts of a GPU's earlier steps.
    """

    def __init__(
        self, settings: Settings, accumulator: PerBlockGradientAccumulator, reducer: Reducer, late: DeferredErrors
    ) -> None:
        self._settings, self._accumulator, self._reducer, self._late = settings, accumulator, reducer, late

    def of_call(self, captured: CapturedWindow | None) -> None:
        """What may come before any add or step: a capture that has its window, or the error of an earlier step."""
        if self._accumulator.kernels.is_capturing() != (captured is not None):
            raise CallerError(
                "the current stream records a graph that this engine knows nothing of"
                if captured is None
                else "the current stream is not the one that is captured",
                do="use this engine's own capture(), on the stream that is current in its `with`; discard() where an "
                "interrupt left that",
            )
        if captured is not None:
            captured.refuse_more()
        else:
            self.raise_late()

    def of_add(self, captured: CapturedWindow | None, span: Span | None = None) -> None:
        """A contribution: of a span, or a whole micro-batch."""
        self.of_call(captured)
        self._refuse_closing()
        if self._reducer.failed:
            raise WindowError(
                f"step {self._reducer.step} failed, and its window is kept",
                do="run step() again (after reconnect() where the exchange was lost), or discard() it",
            )
        count = self._accumulator.accumulated_count if span is None else self._accumulator.count_of(span)
        if self._reducer.workers.started and (span is None or span.key in self._reducer.workers.started):
            raise WindowError(
                "the window is complete and on its way to the other workers"
                if span is None
                else f"{span.called} is on its way to the other workers",
                got=f"a contribution after the last of {count} micro-batches",
                expected="step()",
            )
        room = self._settings.micro_batches
        if room is not None and count >= room:
            raise WindowError(
                "the window is full" if span is None else f"the window of {span.called} is full",
                got=f"micro-batch {count + 1}",
                expected=f"step() after {room} micro-batches",
            )

    def of_nothing(self, captured: CapturedWindow | None, weight: object) -> None:
        """A micro-batch that counts nothing."""
        if as_float(weight) != 0:
            raise WindowError(
                "a micro-batch without gradients",
                got=f"weight {said(weight)}",
                expected="0: it counts nothing",
                do="add its gradients, or say add(None, weight=0) where there are none",
            )
        if captured is not None:
            raise WindowError("a captured window has micro-batches that count", got="add(None, weight=0)")

    def of_step(self, captured: CapturedWindow | None, way: str, last: StepResult | None) -> None:
        """A step whose gradients go that way, "in place", "out" or "deferred", after one with that result."""
        self.of_call(captured)
        closing = self._reducer.closing
        if closing is not None and closing.way != way:
            raise WindowError(
                f"step {closing.step} was interrupted when its gradients had been handed back",
                got=f"a step whose gradients go {way!r}",
                expected=repr(closing.way),
                do="run step() again with the same arguments",
            )
        if closing is not None:
            return
        if (
            self._accumulator.state.now is State.HALF_WRITTEN
            and not self._reducer.is_alone
            and self._reducer.agreed is not None
        ):
            raise WindowError(
                f"step {self._reducer.step} was interrupted while it handed back its gradients: they are half written",
                do="other workers may have applied theirs: restart all from one checkpoint (with out= it could be run "
                "again); discard() goes on without this step",
            )
        if self._accumulator.state.now is State.EMPTY:
            raise self._nothing_came(last)
        self._accumulator.state.ask(Call.STEP)

    def of_graph(self, captured: CapturedWindow | None) -> None:
        """A graph is a whole step of one worker's: nothing of one may be under way where it begins."""
        if not self._late.exist:
            device = self._accumulator.kernels.device
            raise CallerError("only a GPU's steps can be captured", got=f"device '{device}'", expected="a CUDA device")
        if not self._reducer.is_alone:
            raise CallerError("a step with an exchange waits for other workers and cannot be captured or replayed")
        self._refuse_closing()
        if captured is not None:
            raise WindowError(
                "a window is being captured", do="leave its `with` first; discard() where an interrupt did"
            )
        count = self._accumulator.accumulated_count
        if count:
            raise WindowError("a window is open", got=f"{count} micro-batches", do="step() or discard() it first")

    def of_loss_scale(self, value: float) -> None:
        """Another loss scale: between windows only."""
        count = self._accumulator.accumulated_count
        if count and value != self._settings.loss_scale:
            raise WindowError(
                "the loss scale of an open window cannot be changed",
                got=f"{value} after {count} micro-batches of {self._settings.loss_scale}",
                do="set it after step() or discard()",
            )

    def _nothing_came(self, last: StepResult | None) -> WindowError:
        """A step that was asked for twice would be made twice; on one of several workers it would join their next."""
        step, do = self._reducer.step, "add() gradients first"
        if last is not None and last.step == step - 1:
            do = f"step {last.step} is over, and engine.last_result has its result; for another one {do}"
        if not self._reducer.is_alone:
            do = f"{do}, or add(None, weight=0) where this worker has none"
        return WindowError(f"step {step} without a micro-batch", got="0 micro-batches", expected="at least 1", do=do)

    def _refuse_closing(self) -> None:
        closing = self._reducer.closing
        if closing is not None:
            raise WindowError(
                f"step {closing.step} was interrupted when its gradients had been handed back",
                do="run step() again with the same arguments for its result, or discard() it",
            )

    def raise_late(self) -> None:
        """The error of an earlier step, where its verdict has come and nobody was told of it yet."""
        if self._settings.raises:
            self._late.raise_untold()
        else:
            self._late.latest()  # taken, so that the next steps' have room to be sent
