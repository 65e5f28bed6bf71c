"""A whole window and its step as one CUDA graph: recorded once, replayed at the cost of one launch."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, final

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.gradients import Gradients, in_slot_order
from gradengine.accumulate.state import Call, State
from gradengine.arguments import truth_value
from gradengine.arrays.buffer import RawBuffer
from gradengine.arrays.streams import ProducerStream
from gradengine.engine.ranges import nvtx_range
from gradengine.engine.result import DeferredErrors, Observers, StepResult
from gradengine.errors import BufferRefused, CallerError, Fixed, WindowError
from gradengine.kernels import Destinations, Device, Graph, producers_of
from gradengine.layout import Slot
from gradengine.reduction.reducer import Reducer, whole

_REPLAY = nvtx_range("gradengine.replay")


@final
class _Arrays(NamedTuple):
    """Arrays of the caller's that a graph reads or writes, with their components' names and recorded addresses."""

    names: Sequence[str]
    arrays: Sequence[Any]
    addresses: Sequence[int]

    def refuse_moved(self) -> None:
        """Raise `BufferRefused` if an array is at another address now."""
        now = addresses_of(self.arrays)
        if now == self.addresses:
            return
        position = next(i for i, pair in enumerate(zip(now, self.addresses, strict=True)) if len(set(pair)) == 2)
        raise BufferRefused(
            f"component '{self.names[position]}' is not at the address that the window was captured with",
            got=f"address {now[position]:#x}",
            expected=f"{self.addresses[position]:#x}",
            do="keep the same buffers, or capture() the window anew",
        )


@final
class CapturedWindow(Fixed):
    """What `GradientEngine.capture()` records: the adds of one window and its step.

    The graph holds the addresses of the gradients and of `out`, and the weights of the micro-batches, as they were
    recorded. It keeps the arrays alive.

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
        self, accumulator: PerBlockGradientAccumulator, reducer: Reducer, errors: DeferredErrors, observers: Observers
    ) -> None:
        self._accumulator, self._reducer, self._errors, self._observers = accumulator, reducer, errors, observers
        self._sums = reducer.on_device
        self._arrays: list[_Arrays] = []  # that each replay reads or writes
        self._graph: Graph | None = None
        self._producers: AbstractSet[ProducerStream] = frozenset()
        self._result: StepResult | None = None

    @property
    def result(self) -> StepResult | None:
        """The result of the last replay, at first of the recorded step; each replay overwrites its arrays."""
        return self._result

    def replay(self, *, check: bool = True) -> StepResult:
        """Run the window and its step on the current stream; returns before they are done.

        Args:
            check: Compare every array's address with the recorded one first: about 0.1 us for each. Without the check
                an array that was moved meanwhile is read, or written, at its old address.

        Raises:
            BufferRefused: An array's address has changed; nothing was launched.
            WindowError: Nothing was recorded, or a window is open or being captured.
            CallerError: The engine has joined other workers since.
            NonFiniteGradient: An earlier step's, as in the engine's `step`; nothing was launched.
        """
        if self._graph is None or self._result is None:
            raise WindowError("nothing was recorded", do="add() and step() inside `with engine.capture() as graph:`")
        if truth_value("check", check):
            for arrays in self._arrays:
                arrays.refuse_moved()
        with _REPLAY:
            self._result = self._run(self._graph, self._result)
        return self._observers.shown(self._result)

    @whole
    def _run(self, graph: Graph, result: StepResult) -> StepResult:
        """Run the window once more, as a step of its own number."""
        device, state, step = self._accumulator.kernels.device, self._accumulator.state, self._reducer.step
        self.ask(Call.REPLAY)
        self._errors.raise_pending()
        with self._accumulator.arena.in_order():
            device.wait_for(self._producers)  # refuses a stream that records a graph
            state.now = State.BROKEN  # from here on only the device knows whether it ran
            self._errors.count_from(step)
            graph.replay()
            device.hand_over(self._producers)
        self._errors.send()
        state.changes += 1
        made = result.of_replay(step)
        self._reducer.begin(step + 1)
        return made

    def ask(self, call: Call) -> State:
        """Return the state that a capture or a replay leads to; raises if the state, workers or a graph forbid it."""
        self._reducer.refuse_other_group(self._sums)
        leads_to = self._accumulator.state.ask(call, self._reducer.facts)
        refuse_other_graph(self._accumulator.kernels.device, is_recording=False)
        return leads_to

    # ---- called by the engine ----

    def begin(self) -> None:
        """Have the engine's next calls be recorded."""
        self._accumulator.state.now = self.ask(Call.CAPTURE)

    def keep(self, slots: Sequence[Slot], gradients: Gradients, prefix: str = "") -> None:
        """Note the arrays of an `add` that was recorded."""
        self._arrays.append(_located(slots, in_slot_order(slots, gradients, "the window", prefix)))

    def closed(self, result: StepResult, out: Sequence[Any] | None, destinations: Destinations | None) -> None:
        """Note the result and destinations of the step that was recorded."""
        self._result, self._producers = result, self._accumulator.producers
        if out is not None and destinations is not None:
            self._arrays.append(_located(self._accumulator.layout.slots, out))
            self._producers |= producers_of(destinations.values())

    def recorded(self, graph: Graph) -> None:
        """Take the finished graph, which keeps alive what it reads; raises `WindowError` if no step was recorded."""
        if self._result is None:
            raise WindowError("no step was made inside capture()", expected="add() as often as you like, then step()")
        graph.kept += self._arrays
        self._graph = graph

    def end(self) -> None:
        """Begin the engine's step again: nothing of the graph has run, however its recording ended."""
        self._reducer.begin(self._reducer.step)


@final
class Capture(AbstractContextManager[CapturedWindow]):
    """A context in which the engine's calls are recorded; `captures` holds this object meanwhile.

    Not a generator: an interrupted generator would go on recording until its traceback is freed.
    """

    def __init__(self, window: CapturedWindow, graph: Graph, captures: list[Capture]) -> None:
        self.window, self._graph, self._captures = window, graph, captures

    def __enter__(self) -> CapturedWindow:
        window = self.window
        window.begin()
        self._captures.append(self)
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
        """Stop recording; nothing of the graph is kept."""
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
            self._captures.clear()  # the graph is the caller's to drop, and what it keeps alive
            self.window.end()


def graph_of(device: Device) -> Graph:
    """A graph of this device's, to be recorded; `CallerError` where there are none."""
    graph = device.graph()
    if graph is None:
        raise CallerError("only a GPU's steps can be captured", got=f"device '{device.name}'", expected="a CUDA device")
    return graph


def refuse_other_graph(device: Device, *, is_recording: bool) -> None:
    """Raise `CallerError` unless the current stream records a graph if, and only if, the engine does."""
    if device.is_capturing() != is_recording:
        raise CallerError(
            "the current stream is not the one that is captured"
            if is_recording
            else "the current stream records a graph that this engine did not begin",
            do="use this engine's capture(), on the stream of its `with`; after an interrupt of that, discard()",
        )


def _located(slots: Sequence[Slot], arrays: Sequence[Any]) -> _Arrays:
    """The arrays that are there, one for each slot or None, at their addresses of now."""
    names = [slot.name for slot, array in zip(slots, arrays, strict=True) if array is not None]
    arrays = [array for array in arrays if array is not None]
    return _Arrays(names, arrays, addresses_of(arrays))


def addresses_of(arrays: Sequence[Any]) -> list[int]:
    """Each array's address now, by the fastest way that its framework has; 0 if it has none.

    It takes 0.1 us an array where all are of one framework, and 1 us where they are not.
    """
    kinds = set(map(type, arrays))
    if len(kinds) != 1:
        return [addresses_of([array])[0] for array in arrays]
    if isinstance(arrays[0], RawBuffer):
        return [array.pointer for array in arrays]
    if hasattr(arrays[0], "data_ptr"):
        return [array.data_ptr() for array in arrays]
    if hasattr(getattr(arrays[0], "data", None), "ptr"):
        return [array.data.ptr for array in arrays]
    interfaces = [getattr(array, "__cuda_array_interface__", None) for array in arrays]
    return [int(interface["data"][0]) if interface else 0 for interface in interfaces]
