"""One micro-batch that comes component by component, as backward makes its gradients: none of them has to stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, SupportsFloat, final

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.state import State
from gradengine.accumulate.window import nothing_came
from gradengine.errors import ExchangeError
from gradengine.layout.slots import Span
from gradengine.reduction.reducer import Reducer


@final
class MicroBatch(AbstractContextManager["MicroBatch"]):
    """A micro-batch that comes component by component, in any order; `GradientEngine.micro_batch` makes it.

    It begins with the first component, and is over when its `with` is left, or at `end()`: what did not come had no
    gradient in it. An error that leaves the `with` before the first component changes nothing. A later one leaves the
    window with a part of a micro-batch, which takes no more: `discard()` drops it.
    """

    def __init__(
        self,
        accumulator: PerBlockGradientAccumulator,
        reducer: Reducer,
        whole: Callable[..., None],
        weight: SupportsFloat,
        *,
        is_last: bool,
    ) -> None:
        self._accumulator, self._reducer, self._whole, self._weight = accumulator, reducer, whole, weight
        self._measure = is_last and reducer.workers.is_alone
        self._sends = is_last and not reducer.workers.is_alone
        spans = accumulator.layout.spans if self._sends else ()
        self._missing = {span.key: {slot.name for slot in span.slots} for span in spans}
        self._window: object = None  # that it began in

    def add(self, name: str, gradient: object) -> None:
        """Add one component's gradient, which may be freed then (with `hold=1`); one that comes again is added, too.

        In the window's last micro-batch a block leaves for the other workers with the last of its components.

        Args:
            name: The component.
            gradient: Of any framework, fp32, fp16 or bf16, on the engine's device.

        Raises:
            LayoutMismatch: No such component, or another shape.
            BufferRefused: The gradient cannot be taken as it lies.
            WindowError: The micro-batch is over, or the component has left for the other workers.
        """
        self._whole(self._add, name, gradient)

    def end(self) -> None:
        """The micro-batch is over; `with` calls it.

        Raises:
            WindowError: No component came, or the window was dropped or stepped meanwhile.
        """
        self._whole(self._end)

    def fail(self, fault: type[BaseException]) -> None:
        """Its backward failed. What came of it cannot be taken out again: the window takes no more.

        Where parts of the window were sent, and after an interrupt, the exchange is closed, so that nobody waits.
        """
        if self._is_coming and (self._state is State.SENDING or not issubclass(fault, Exception)):
            self._reducer.break_off(self._reducer.step)

    def __enter__(self) -> MicroBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
        else:
            self.fail(kind)

    @property
    def _is_coming(self) -> bool:
        """Whether a component has come and the window is still the same."""
        return self._window is self._accumulator.window

    @property
    def _state(self) -> State:
        return self._accumulator.state.now

    def _add(self, name: str, gradient: Any) -> None:
        begins = self._window is None
        self._accumulator.add_component(name, gradient, self._weight, begins=begins, measure=self._measure)
        if begins:
            self._window = self._accumulator.window
        if self._sends:
            span = self._accumulator.span_of(name)
            self._missing[span.key].discard(name)
            if not self._missing[span.key]:
                self._send([span])

    def _end(self) -> None:
        if self._window is None:
            raise nothing_came(len(self._accumulator.layout.slots))
        self._accumulator.end_micro_batch()
        if self._sends:
            self._send(self._accumulator.layout.spans)

    def _send(self, spans: Sequence[Span]) -> None:
        try:
            self._reducer.start(spans)
        except ExchangeError:  # raised by the step again, which keeps the window; backward can go on
            self._sends = False
