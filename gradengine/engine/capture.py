"""A whole window and its step as one CUDA graph: recorded once, replayed at the cost of one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, SupportsFloat, final

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.destinations import handed_back as handed_back_to
from gradengine.accumulate.gradients import Gradients, in_slot_order
from gradengine.accumulate.state import State
from gradengine.arguments import listed, truth_value
from gradengine.arrays.buffer import Buffer, RawBuffer, freed, refuse_freed
from gradengine.arrays.streams import ProducerStream
from gradengine.engine.deferred import DeferredErrors
from gradengine.engine.result import StepResult
from gradengine.errors import BufferRefused, CallerError, Fixed, WindowError
from gradengine.kernels import Destinations, Device, Graph, producers_of
from gradengine.layout import Slot
from gradengine.reduction.reducer import Reducer


@final
class _Arrays(NamedTuple):
    """Arrays of the caller's that a graph reads or writes, with their components' names and recorded addresses."""

    names: Sequence[str]
    arrays: Sequence[Any]
    addresses: Sequence[int]

    def refuse_moved(self) -> None:
        """Raise `BufferRefused` if an array is at another address now, or was freed."""
        now = addresses_of(self.arrays)
        if now == self.addresses:
            return
        position = next(i for i, pair in enumerate(zip(now, self.addresses, strict=True)) if len(set(pair)) == 2)
        name, array = self.names[position], self.arrays[position]
        if isinstance(array, RawBuffer):
            refuse_freed(array.owner, name)
        raise BufferRefused(
            f"component '{name}' is not at the address that the window was captured with",
            got=f"address {now[position]:#x}",
            expected=f"{self.addresses[position]:#x}",
            do="keep the same buffers, or repoint() the graph",
        )


@final
class CapturedWindow(Fixed):
    """What `GradientEngine.capture()` records: the adds of one window and its step.

    The graph holds the gradients' addresses, until `repoint` replaces them, and the micro-batches' weights as recorded,
    and keeps the arrays alive. A weight in an array on the GPU is read by each replay.

    Attributes:
        sums: The sums over workers on their GPUs, which the graph runs too; None without them.

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
        replayed: Callable[[CapturedWindow], StepResult],
        repointed: Callable[[CapturedWindow, Sequence[Gradients], Gradients | None], None],
        sums: object = None,
    ) -> None:
        self._replayed, self._repointed, self.sums = replayed, repointed, sums
        self._added: list[_Arrays] = []
        self._handed_back = _Arrays([], [], [])
        self._weights: list[_Arrays] = []  # that are on the GPU
        self._destinations: Mapping[int, Buffer] = {}
        self._has_parts = False  # an add was no whole micro-batch
        self._recorded: Graph | None = None
        self._producers: AbstractSet[ProducerStream] = frozenset()
        self._out: Gradients | None = None
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
        self._that_is_recorded()
        if truth_value("check", check):
            for arrays in (*self._added, *self._weights, self._handed_back):
                arrays.refuse_moved()
        return self._replayed(self)

    def repoint(self, micro_batches: Sequence[Gradients], out: Gradients | None = None) -> None:
        """Have later replays read other gradients, with the same weights, after one small copy; nothing else runs.

        Whatever else was captured stays as it is. JAX's arrays, new at each step, are replayed in this way.

        Args:
            micro_batches: As many as were captured, each as for `add`, with gradients for the same components.
            out: Destinations as for `step`, if the window was captured with some; by default those that were recorded.

        Raises:
            CallerError: Another number of micro-batches, or they were added block by block; other components have a
                gradient, or a destination, than at the capture.
            LayoutMismatch, BufferRefused: As `add` and `step`; the graph stays as it was.
            WindowError: Nothing was recorded, or a window is open or being captured.
        """
        self._that_is_recorded()
        micro_batches = listed("micro_batches", micro_batches)
        if self._has_parts or len(self._added) != len(micro_batches):
            raise CallerError(
                "the window cannot be replayed with these",
                got=f"{len(micro_batches)} micro-batches",
                expected="a window added in whole micro-batches" if self._has_parts else f"{len(self._added)}",
            )
        if out is not None and self._out is None:
            do = "give step(out=...) some at the capture"
            raise CallerError("the window was captured without destinations", got="out", expected="None", do=do)
        self._repointed(self, micro_batches, out)

    # ---- called by the engine ----

    def keep(
        self, slots: Sequence[Slot], gradients: Gradients, prefix: str = "", *, weight: SupportsFloat | None = None
    ) -> None:
        """Note the arrays of an `add` that was recorded; `weight` is given for a whole micro-batch."""
        self._added.append(_located(slots, in_slot_order(slots, gradients, "the window", prefix)))
        self._has_parts = self._has_parts or weight is None
        if weight is not None and any(address := addresses_of([weight])):
            self._weights.append(_Arrays(["a micro-batch's weight"], [weight], address))

    def closed(
        self,
        result: StepResult,
        slots: Sequence[Slot],
        producers: AbstractSet[ProducerStream],
        out: Gradients | None,
        destinations: Destinations | None,
    ) -> None:
        """Note the result and destinations of the step that was recorded."""
        if out is not None:
            self._handed_back, self._destinations = _destinations(slots, out), destinations or {}
        self._result, self._out = result, out
        self._producers = producers | producers_of(self._destinations.values())

    def recorded(self, recorded: Graph) -> None:
        """Take the finished graph, which keeps alive what it reads; raises `WindowError` if no step was recorded."""
        if self._result is None:
            raise WindowError("no step was made inside capture()", expected="add() as often as you like, then step()")
        recorded.lent += [*self._added, *self._weights, self._handed_back]
        self._recorded = recorded

    def run(self, accumulator: PerBlockGradientAccumulator, reducer: Reducer, late: DeferredErrors) -> StepResult:
        """Run the window once more, as a step of its own number."""
        recorded, result = self._that_is_recorded()
        device, state, step = accumulator.kernels.device, accumulator.state, reducer.step
        with accumulator.arena.in_order():
            device.wait_for(self._producers)  # refuses a stream that records a graph
            state.now = State.BROKEN  # from here on only the device knows whether it ran
            late.count_from(step)
            recorded.replay()
            device.hand_over(self._producers)
        late.send()
        state.changes += 1
        self._result = result.of_replay(step)
        reducer.next_step()
        return self._result

    def point(
        self,
        accumulator: PerBlockGradientAccumulator,
        micro_batches: Sequence[Gradients],
        out: Gradients | None,
    ) -> None:
        """Check what `repoint` was given, and have the graph read and write it."""
        slots, (recorded, result) = accumulator.layout.slots, self._that_is_recorded()
        ordered = [in_slot_order(slots, gradients, "the layout") for gradients in micro_batches]
        contributions = accumulator.contributions(ordered)
        destinations = None if out is None else accumulator.destinations.of(out)
        added = [_located(slots, arrays) for arrays in ordered]
        for number, (now, then) in enumerate(zip(added, self._added, strict=True)):
            _refuse_other_components(now, then, f"a gradient in micro-batch {number}")
        handed_back = self._handed_back if out is None else _destinations(slots, out)
        _refuse_other_components(handed_back, self._handed_back, "a destination")
        self._recorded = None  # an interrupted call leaves nothing to be replayed
        try:
            with accumulator.arena.in_order():
                recorded.repoint(contributions, destinations, [*added, *self._weights, handed_back])
        except Exception:
            self._recorded = recorded
            raise
        if out is not None and destinations is not None:
            self._out, self._destinations = out, destinations
            self._result = result.handed_to(handed_back_to(slots, out))
        self._added, self._handed_back, self._recorded = added, handed_back, recorded
        lenders = [contribution.producers for contribution in contributions]
        self._producers = producers_of(self._destinations.values()).union(*lenders)

    # ---- inside ----

    def _that_is_recorded(self) -> tuple[Graph, StepResult]:
        if self._recorded is None or self._result is None:
            raise WindowError("nothing was recorded", do="add() and step() inside `with engine.capture() as graph:`")
        return self._recorded, self._result


@final
class Capture(AbstractContextManager[CapturedWindow]):
    """A context in which the engine's calls are recorded as `graph`; it calls the engine's `begin` and `end`.

    Not a generator: an interrupted generator would go on recording until its traceback is freed.
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
            self._end()


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


def _destinations(slots: Sequence[Slot], out: Gradients) -> _Arrays:
    return _located(slots, in_slot_order(slots, out, "the window"))


def _refuse_other_components(now: _Arrays, then: _Arrays, what: str) -> None:
    if now.names != then.names:
        name = min(set(now.names).symmetric_difference(then.names))
        raise CallerError(
            f"component '{name}' {'has' if name in now.names else 'lacks'} {what}, other than at the capture",
            got=f"{len(now.names)} components",
            expected=f"the {len(then.names)} of the capture",
            do="capture() the window anew",
        )


def addresses_of(arrays: Sequence[Any]) -> list[int]:
    """Each array's address now, by the fastest way that its framework has; 0 if it has none, or its memory was freed.

    It takes 0.1 us an array where all are of one framework, and 1 us where they are not.
    """
    kinds = set(map(type, arrays))
    if len(kinds) != 1:
        return [addresses_of([array])[0] for array in arrays]
    if isinstance(arrays[0], RawBuffer):
        return [0 if freed(array.owner) else array.pointer for array in arrays]
    if hasattr(arrays[0], "data_ptr"):
        return [array.data_ptr() for array in arrays]
    if hasattr(getattr(arrays[0], "data", None), "ptr"):
        return [array.data.ptr for array in arrays]
    interfaces = [getattr(array, "__cuda_array_interface__", None) for array in arrays]
    return [int(interface["data"][0]) if interface else 0 for interface in interfaces]
