"""One micro-batch that is added component by component while backward runs, so that no gradient has to be kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from gradengine.accumulate.groups import Noted
from gradengine.accumulate.state import Call, State
from gradengine.accumulate.window import nothing_came
from gradengine.engine.settings import is_last
from gradengine.errors import ExchangeError, WindowError
from gradengine.layout.slots import Span
from gradengine.reduction.reducer import Reducer, whole

_OVER = object()


@final
class MicroBatch(AbstractContextManager["MicroBatch"]):
    """A micro-batch of `GradientEngine.micro_batch`, which is added component by component, in any order.

    It begins with the first component, and ends with its `with` or `end()`. A component that was not added counts as
    one without a gradient. An error in the `with` before the first component changes nothing. A later error leaves part
    of a micro-batch in the window, which then accepts no more. Drop that window with the engine's `discard()`.

    If the engine drops micro-batches that are not finite, this one is kept until its end, and checked and added as a
    whole. Until then each gradient must stay unchanged in a separate array, and an error changes nothing.
    """

    def __init__(self, reducer: Reducer, room: int | None, weight: float, last: bool | None) -> None:
        self._reducer, self._room, self._weight, self._last = reducer, room, weight, last
        self._accumulator, self._layout = reducer.accumulator, reducer.accumulator.layout
        self._measure = self._sends = False
        self._missing: dict[int | str, set[str]] = {}  # span to send -> components that were not added yet
        self._window: object = None  # the window in which it began, or _OVER
        self._noted = Noted(self._accumulator.groups)
        self._kept: dict[str, Any] | None = None if self._accumulator.drops is None else {}
        self._before = State.EMPTY  # state of the window before a micro-batch that is kept

    @whole
    def add(self, name: str, gradient: Any) -> None:
        """Add one component's gradient. Several gradients of one component are summed.

        With `hold=1` the gradient can be freed after this. In the window's last micro-batch a block is sent to the
        other ranks as soon as all its components were added.

        Args:
            name: Name of the component.
            gradient: Array of any framework, in fp32, fp16 or bf16, on the engine's device.

        Raises:
            LayoutMismatch: No such component, or a wrong shape.
            BufferRefused: The gradient's dtype, device, strides or memory is not supported.
            WindowError: The micro-batch is over, or the component was already sent to the other ranks.
        """
        if self._kept is not None:
            self._keep(name, gradient)
            return
        if self._is_coming:
            self.add_noted()
        else:
            self._begin(name, gradient)
        alone = self._accumulator.alone[self._layout.slot(name).name]
        self._accumulator.add_components(alone, [gradient], self._weight, measure=self._measure)
        self._send_complete([name])

    @whole
    def begin(self) -> None:
        """Begin now and zero components without a sum, for layers that add gradients to the arena themselves.

        Such a layer adds to `engine.accumulator.arrays()`, in the order of the current stream. Call `note_added` after
        it. From here on an error leaves a window that accepts no more. Drop it with the engine's `discard()`.

        Raises:
            WindowError: As `GradientEngine.micro_batch`, or the micro-batch's weight is not 1.
        """
        if self._weight != 1:
            what = "layers that add to the arena themselves need weight 1"
            do = 'scale the loss, and build the engine with average="prescaled"'
            raise WindowError(what, got=f"weight {self._weight}", expected="1", do=do)
        if not self._is_coming:
            self._begin()
        self._accumulator.flush()

    @whole
    def note_added(self, name: str) -> None:
        """Note that a component's layer has added its gradient to the arena, which counts as `add`.

        The step measures its squared sum. In the window's last micro-batch this can complete the block, which is sent.

        Raises:
            LayoutMismatch: No such component.
            WindowError: The micro-batch is over or has not begun, or the component was already sent.
        """
        if self._window is None:
            raise WindowError("the micro-batch has not begun", do="call begin() before a layer adds to the arena")
        self._refuse_if_over()
        self._accumulator.note_added(name)
        if self._noted.complete(name):
            self.add_noted()
        self._send_complete([name])

    def note(self, name: str, gradient: object) -> bool:
        """Note one component's gradient, to be added with the rest of its block. It must stay unchanged until then.

        This costs a fraction of `add`. At most the gradients of one block, or 1,048,576 elements, are noted.

        Args:
            name: Name of the component.
            gradient: Array as for `add`, which is kept alive. It is checked when it is added, but the first one now.

        Returns:
            Whether to call `add_noted()`, because a block is complete or enough is noted. `end()` adds the rest.

        Raises:
            LayoutMismatch: No such component.
            BufferRefused, WindowError: As `add`.

        Example:
            >>> import numpy as np
            >>> from gradengine import GradientEngine, GradientLayout
            >>> engine = GradientEngine(GradientLayout.of({"w": (2,), "b": (1,)}))
            >>> with engine.micro_batch() as micro_batch:
            ...     for name, values in {"b": [0], "w": [3, 4]}.items():
            ...         if micro_batch.note(name, np.array(values, np.float32)):
            ...             micro_batch.add_noted()
            >>> engine.step().norm
            5.0
        """
        if self._kept is not None:
            return self._keep(name, gradient)
        if not self._is_coming:
            self._begin(name, gradient)
        try:
            return self._noted.note(name, gradient)
        except (KeyError, TypeError):
            self._layout.slot(name)  # raises
            raise

    @whole
    def add_noted(self) -> None:
        """Add the noted gradients. On a GPU this is one launch per block, on the current stream.

        Raises:
            LayoutMismatch, BufferRefused, WindowError: As `add`. The micro-batch is then over, and part of it remains
                in its window.
        """
        try:
            for group, gradients in self._noted.taken():
                self._refuse_if_over()
                self._accumulator.add_components(group.span, gradients, self._weight, measure=self._measure)
                pairs = zip(group.span.slots, gradients, strict=True)
                self._send_complete(slot.name for slot, gradient in pairs if gradient is not None)
        except BaseException as fault:
            self.fail(type(fault))
            raise

    @whole
    def end(self) -> None:
        """End the micro-batch. The end of its `with` does the same.

        Raises:
            WindowError: No component was added, or the window was dropped or stepped in the meantime.
        """
        if self._kept:
            self._add_kept(self._kept)
            return
        if self._window is None:
            raise nothing_came(len(self._layout.slots))
        self.add_noted()
        self._refuse_if_over()
        self._accumulator.end_micro_batch()
        self._window = _OVER
        self._send(self._layout.spans)

    def _keep(self, name: str, gradient: object) -> bool:
        """Keep a gradient until the end. Return False, because nothing is to be added yet."""
        assert self._kept is not None  # noqa: S101  (checked by the callers)
        name = self._layout.slot(name).name
        if self._window is not None:
            self._refuse_if_over()
        if name in self._kept:
            what = f"component '{name}' was added twice to a micro-batch that may be dropped"
            raise WindowError(what, do="sum its gradients yourself, or use on_non_finite='skip'")
        if self._window is None:
            state = self._accumulator.state
            self._before, state.now = state.now, state.ask(Call.BEGIN, self._reducer.facts)
            self._window = self._accumulator.window
        self._kept[name] = gradient
        return False

    def _add_kept(self, kept: dict[str, Any]) -> None:
        """Add the kept gradients as one micro-batch, which may be dropped. Send the window if it was the last one."""
        self._refuse_if_over()
        self._window, self._kept, self._accumulator.state.now = _OVER, {}, self._before
        if len(set(map(id, kept.values()))) < len(kept):
            what = "two components of a micro-batch that may be dropped are in the same array"
            raise WindowError(what, do="pass a separate array for each, and keep it unchanged until the end")
        ends = is_last(self._room, "the window", self._accumulator.accumulated_count)
        ends, is_alone = ends if self._last is None else self._last, self._reducer.is_only_worker
        gradients = {slot.name: kept.get(slot.name) for slot in self._layout.slots}
        self._accumulator.add(gradients, self._weight, measure=ends and is_alone)
        self._sends = ends and not is_alone
        self._send(self._layout.spans)

    def fail(self, fault: type[BaseException]) -> None:
        """End the micro-batch after backward failed. The window keeps a part of it and accepts no more.

        If parts of the window were sent, or after an interrupt, the exchange is closed, so that no rank waits.
        """
        is_coming, self._window = self._is_coming, _OVER
        if is_coming and self._kept is not None and self._accumulator.state.now is State.COMING:
            self._accumulator.state.now = self._before
        elif is_coming and (self._accumulator.state.now is State.SENDING or not issubclass(fault, Exception)):
            self._reducer.break_off(self._reducer.step)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()
        else:
            self.fail(kind)

    @property
    def _is_coming(self) -> bool:
        """Whether it has begun, is not over, and the window is still the same."""
        return self._window is self._accumulator.window

    def _refuse_if_over(self) -> None:
        if not self._is_coming:
            raise WindowError(
                "the micro-batch is over",
                got="a call after its end(), or after its window was stepped or dropped",
                do="begin a new one with engine.micro_batch()",
            )

    @whole
    def _begin(self, name: str | None = None, gradient: object = None) -> None:
        """Begin, check the first gradient, if any, without adding it, and choose whether blocks are measured or sent.

        Raises `WindowError` if the micro-batch is over or the window is full.
        """
        if self._window is not None:
            self._refuse_if_over()
        ends = is_last(self._room, "the window", self._accumulator.accumulated_count)
        ends, is_alone = ends if self._last is None else self._last, self._reducer.is_only_worker
        first = {} if name is None else {self._layout.slot(name).name: gradient}
        self._accumulator.begin_micro_batch(self._weight, first)
        self._measure, self._sends = ends and (is_alone or self._accumulator.keeps_first), ends and not is_alone
        if self._sends:
            self._missing = {span.key: {slot.name for slot in span.slots} for span in self._layout.spans}
        self._window = self._accumulator.window

    def _send_complete(self, added: Iterable[str]) -> None:
        """Send the spans that these components complete to the other ranks."""
        for name in added if self._sends else ():
            span = self._layout.span_of(name)
            missing = self._missing[span.key]
            missing.discard(name)
            if not missing:
                self._send([span])

    def _send(self, spans: Sequence[Span]) -> None:
        try:
            if self._sends:
                self._reducer.start(spans)
        except ExchangeError:
            # Backward can continue, because the step keeps the window and raises this again.
            self._sends = False
