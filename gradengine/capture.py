"""A whole window and its step as one CUDA graph: recorded once, replayed at the cost of one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, SupportsFloat, final

from gradengine.accumulate.gradients import Gradients, in_slot_order
from gradengine.arguments import listed, truth_value
from gradengine.arrays.buffer import RawBuffer, refuse_freed
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import BufferRefused, CallerError, WindowError
from gradengine.kernels import Device, Graph
from gradengine.layout import Slot
from gradengine.result import StepResult


class Recorder(Protocol):
    """The engine that a window is captured of: see `GradientEngine`."""

    def capture(self) -> AbstractContextManager[CapturedWindow]:
        """Record a window."""

    def add(self, gradients: Gradients | None, weight: SupportsFloat = 1.0) -> None:
        """Add a micro-batch."""

    def step(self, out: Gradients | None = None, *, deferred: bool = False) -> StepResult:
        """Close the window."""


@final
class CapturedWindow:
    """What `GradientEngine.capture()` records: the adds of one window and its step.

    The graph holds the gradients' addresses and the micro-batches' weights as they were, and keeps the arrays alive. A
    weight in an array on the GPU is read by each replay.

    Attributes:
        out: Destinations that its step hands back to; None for the arena.
        producers: Whose streams the arrays are worked on.
        sums: Over workers, which it holds too, where these sum on their GPUs.
        result: The result of the step that was replayed last, or is recorded; its gradients and device scalars are
            written anew by each replay.

    Example:
        >>> def loop(engine, gradients, backward, steps):
        ...     with engine.capture() as graph:
        ...         engine.add(gradients)
        ...         engine.step()
        ...     for _ in range(steps):
        ...         backward(gradients)
        ...         result = graph.replay()
    """

    def __init__(
        self,
        launched: Callable[[CapturedWindow, Graph, StepResult], StepResult],
        engine: Recorder,
        sums: object = None,
    ) -> None:
        self._launched, self._engine, self.sums = launched, engine, sums
        self._kept: list[tuple[str, Any, int]] = []
        self._weights: list[SupportsFloat] | None = []
        self._recorded: Graph | None = None
        self.producers: AbstractSet[ProducerStream] = frozenset()
        self.out: Gradients | None = None
        self.result: StepResult | None = None

    def replay(self, *, check: bool = True) -> StepResult:
        """Run the window and its step on the current stream; returns before they are done.

        Args:
            check: Compare every array's address with the recorded one first: about 0.1 us for each. Without it an array
                that was moved meanwhile is read, or written, where it was.

        Raises:
            BufferRefused: An array lies elsewhere now; nothing was launched.
            WindowError: Nothing was recorded, or a window is open or being captured.
            CallerError: The engine has joined other workers since.
            NonFiniteGradient: Of an earlier step, as by the engine's `step`; nothing was launched.
        """
        if self._recorded is None or self.result is None:
            raise WindowError("nothing was recorded", do="add() and step() inside `with engine.capture() as graph:`")
        if truth_value("check", check):
            self._refuse_moved()
        return self._launched(self, self._recorded, self.result)

    def repoint(self, micro_batches: Sequence[Gradients], out: Gradients | None = None) -> None:
        """Record the window anew for gradients at other addresses, with the same weights; nothing runs.

        Args:
            micro_batches: As many as were recorded, each as for `add`.
            out: Destinations as for `step`; those that were recorded by default.

        Raises:
            CallerError: Another number of micro-batches, or they were added block by block.
            LayoutMismatch, BufferRefused: As `add` and `step`; the graph stays what it was.
        """
        micro_batches = listed("micro_batches", micro_batches)
        if self._weights is None or len(self._weights) != len(micro_batches):
            raise CallerError(
                "the window cannot be recorded anew from these",
                got=f"{len(micro_batches)} micro-batches",
                expected="whole ones only" if self._weights is None else f"{len(self._weights)}",
            )
        is_deferred = self.result is not None and self.result.deferred
        with self._engine.capture() as fresh:
            for gradients, weight in zip(micro_batches, self._weights, strict=True):
                self._engine.add(gradients, weight)
            self._engine.step(self.out if out is None else out, deferred=is_deferred)
        self._kept, self._recorded, self.result = fresh._kept, fresh._recorded, fresh.result
        self.out, self.producers, self.sums = fresh.out, fresh.producers, fresh.sums

    # ---- told by the engine ----

    def keep(
        self, slots: Sequence[Slot], gradients: Gradients, prefix: str = "", *, weight: SupportsFloat | None = None
    ) -> None:
        """An add was recorded; `weight` where it is a whole micro-batch."""
        self._keep(slots, gradients, prefix)
        self._weights = None if weight is None or self._weights is None else [*self._weights, weight]
        if weight is not None and (address := address_of(weight)):
            self._kept.append(("a micro-batch's weight", weight, address))

    def closed(
        self, result: StepResult, slots: Sequence[Slot], out: Gradients | None, producers: AbstractSet[ProducerStream]
    ) -> None:
        """The step was recorded."""
        if out is not None:
            self._keep(slots, out)
        self.result, self.out, self.producers = result, out, producers

    def recorded(self, recorded: Graph) -> None:
        """The kernels have recorded it; they keep what it reads."""
        if self.result is None:
            raise WindowError("nothing was closed inside capture()", expected="add() as often as you like, then step()")
        recorded.kept += [array for _, array, _ in self._kept]
        self._recorded = recorded

    # ---- inside ----

    def _keep(self, slots: Sequence[Slot], gradients: Gradients, prefix: str = "") -> None:
        arrays = zip(slots, in_slot_order(slots, gradients, "the window", prefix), strict=True)
        self._kept += [(slot.name, array, address_of(array)) for slot, array in arrays if array is not None]

    def _refuse_moved(self) -> None:
        for name, array, address in self._kept:
            if isinstance(array, RawBuffer):
                refuse_freed(array.owner, name)
            if address_of(array) != address:
                raise BufferRefused(
                    f"component '{name}' lies elsewhere than when the window was captured",
                    got=f"address {address_of(array):#x}",
                    expected=f"{address:#x}",
                    do="keep the same buffers, or repoint() the graph",
                )


@final
class Capture(AbstractContextManager[CapturedWindow]):
    """Context in which the calls of an engine are recorded as `graph`; `begin` and `end` tell the engine.

    No generator: one that an interrupt leaves suspended would go on recording until its traceback is gone.
    """

    def __init__(
        self, window: CapturedWindow, graph: Graph, begin: Callable[[Capture], None], end: Callable[[], None]
    ) -> None:
        self.window, self._graph, self._begin, self._end = window, graph, begin, end

    def __enter__(self) -> CapturedWindow:
        window = self.window
        self._begin(self)
        try:
            self._graph.__enter__()
        except BaseException as fault:
            self._leave(type(fault), fault, fault.__traceback__)
            raise
        return window

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(kind, fault, trace)
        if kind is None:
            self.window.recorded(self._graph)

    def abandon(self) -> None:
        """Record nothing any more."""
        self._leave(KeyboardInterrupt, None, None)

    def _leave(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._graph.__exit__(kind, fault, trace)
        except BaseException as interrupt:
            self._graph.__exit__(type(interrupt), interrupt, None)
            raise
        finally:
            self._end()


def graph_of(device: Device) -> Graph:
    """A graph to be recorded; `CallerError` where there are none."""
    graph = device.graph()
    if graph is None:
        got = f"device '{device.name}'"
        raise CallerError("only a GPU's steps can be captured", got=got, expected="a CUDA device")
    return graph


def refuse_other_graph(device: Device, *, is_recording: bool) -> None:
    """Raise `CallerError` where the current stream records a graph and an engine does not, or the other way."""
    if device.is_capturing() != is_recording:
        raise CallerError(
            "the current stream is not the one that is captured"
            if is_recording
            else "the current stream records a graph that this engine knows nothing of",
            do="use this engine's capture(), on the stream of its `with`; discard() where an interrupt left that",
        )


def address_of(array: Any) -> int:
    """Where an array lies now, by the shortest way that its framework has; 0 where it has none."""
    if isinstance(array, RawBuffer):
        return array.pointer
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    pointer = getattr(getattr(array, "data", None), "ptr", None)
    if pointer is not None:
        return int(pointer)
    interface = getattr(array, "__cuda_array_interface__", None)
    return int(interface["data"][0]) if interface else 0
