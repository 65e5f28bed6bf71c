"""A whole window and its step as one CUDA graph, whose replay costs one launch."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any, final

from gradengine.accumulate.gradients import Gradients, in_slot_order
from gradengine.accumulate.state import Call, State
from gradengine.arguments import truth_value
from gradengine.arrays.buffer import RawBuffer
from gradengine.arrays.streams import ProducerStream
from gradengine.engine.ranges import in_range
from gradengine.engine.result import DeferredErrors, Observers, StepResult
from gradengine.errors import BufferRefused, CallerError, WindowError
from gradengine.kernels import Destinations, Device, Graph, producers_of
from gradengine.layout import Slot
from gradengine.reduction.reducer import Reducer, whole


@final
class CapturedWindow(AbstractContextManager["CapturedWindow"]):
    """The adds of one window and its step, which `GradientEngine.capture()` records as a graph.

    The graph holds the addresses of the gradients and of `out`, and the weights of the micro-batches, at the time of
    the recording. It keeps the arrays alive.

    Example:
        >>> def loop(engine, gradients, backward, steps):
        ...     with engine.capture() as graph:
        ...         engine.add(gradients)
        ...         engine.step()
        ...     for _ in range(steps):
        ...         backward(gradients)
        ...         result = graph.replay()
    """

    # This is no generator, because an interrupted generator would record until its traceback is freed.

    def __init__(
        self, graph: Graph, reducer: Reducer, late: DeferredErrors, observers: Observers, captures: list[CapturedWindow]
    ) -> None:
        self._graph, self._reducer, self._late, self._observers = graph, reducer, late, observers
        self._captures = captures  # the engine's list, which holds this object while it records
        self._accumulator, self._state = reducer.accumulator, reducer.accumulator.state
        self._sums = reducer.on_device
        self._arrays: list[tuple[list[str], list[Any], list[int]]] = []  # names, arrays and recorded addresses
        self._producers: AbstractSet[ProducerStream] = frozenset()
        self._result: StepResult | None = None

    @property
    def result(self) -> StepResult | None:
        """The result of the last replay, or before that of the recorded step. Each replay overwrites its arrays."""
        return self._result

    @in_range
    def replay(self, *, check: bool = True) -> StepResult:
        """Queue the window and its step on the current stream, and return before they are done.

        Args:
            check: Whether to compare every array's address with the recorded one first, in about 0.1 us each. Without
                the check, an array that has moved is read or written at its old address.

        Raises:
            BufferRefused: An array's address has changed. Nothing was launched.
            WindowError: Nothing was recorded, or a window is open or being captured.
            CallerError: The engine has joined a different group since the capture.
            NonFiniteGradient: The error of an earlier step, as in the engine's `step`. Nothing was launched.
        """
        if self._result is None:
            raise WindowError("nothing was recorded", do="add() and step() inside `with engine.capture() as graph:`")
        for names, arrays, addresses in self._arrays if truth_value("check", check) else ():
            _refuse_moved(names, addresses_of(arrays), addresses)
        result = self._result = self._run(self._result)
        for callback in list(self._observers.values()):
            callback(result)
        return result

    @whole
    def _run(self, result: StepResult) -> StepResult:
        """Run the window once more, as the step that is open."""
        device, step = self._accumulator.kernels.device, self._reducer.step
        self.ask(Call.REPLAY)
        self._late.raise_pending()
        with self._accumulator.arena.in_order():
            device.wait_for(self._producers)  # refuses a stream that records a graph
            # From here on only the device has the information whether the graph ran.
            self._state.now = State.BROKEN
            self._late.count_from(step)
            stop = self._reducer.asks_to_stop()
            if self._sums is not None:
                self._sums.ask_to_stop(stop)
            self._graph.replay()
            device.hand_over(self._producers)
        self._late.send()
        self._state.changes += 1
        made = result.of_replay(step, stop)
        self._reducer.begin(step + 1, is_made=True)
        return made

    def ask(self, call: Call) -> State:
        """Return the state that a capture or a replay leads to. Raise if the state, exchange or a graph forbids it."""
        self._reducer.refuse_other_group(self._sums)
        leads_to = self._state.ask(call, self._reducer.facts)
        refuse_other_graph(self._accumulator.kernels.device, is_recording=False)
        return leads_to

    def __enter__(self) -> CapturedWindow:
        """Start to record the engine's calls."""
        now = self.ask(Call.CAPTURE)
        self._captures.append(self)
        self._state.now = now
        try:
            self._graph.__enter__()
        except Exception:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The result is set again below if the graph is whole.
        result, self._result = self._result, None
        try:
            # After an interrupt of this call the engine's discard() does the rest.
            self._graph.__exit__(kind, None, None)
        except Exception:
            self._end()
            raise
        self._end()
        if kind is None:
            if result is None:
                do = "call add() as often as you like, then step()"
                raise WindowError("no step was made inside capture()", do=do)
            self._graph.kept += self._arrays
            self._result = result

    def _end(self) -> None:
        """Begin the engine's step again, because no part of the graph has run."""
        self._captures.clear()
        self._reducer.begin(self._reducer.step)

    # ---- called by the engine ----

    def keep(self, slots: Sequence[Slot], gradients: Gradients, prefix: str = "") -> None:
        """Note the arrays, and their addresses, of a recorded `add` or of the `out` of a recorded step."""
        given = zip(slots, in_slot_order(slots, gradients, "the window", prefix), strict=True)
        found = {slot.name: array for slot, array in given if array is not None}
        self._arrays.append(([*found], [*found.values()], addresses_of([*found.values()])))

    def close(self, result: StepResult, out: Sequence[object] | None, destinations: Destinations | None) -> None:
        """Note the result and destinations of the step that was recorded."""
        self._result, self._producers = result, self._accumulator.producers
        if out is not None and destinations is not None:
            self.keep(self._accumulator.layout.slots, out)
            self._producers |= producers_of(destinations.values())
        self._accumulator.drop_window()
        self._state.now = State.CAPTURED

    def abandon(self) -> None:
        """Stop recording and drop the graph."""
        self.__exit__(KeyboardInterrupt)


def _refuse_moved(names: Sequence[str], now: Sequence[int], recorded: Sequence[int]) -> None:
    """Raise `BufferRefused` if an array is not at its recorded address."""
    for name, address, expected in zip(names, now, recorded, strict=True) if now != recorded else ():
        if address != expected:
            raise BufferRefused(
                f"component '{name}' is not at the address at which the window was captured",
                got=f"address {address:#x}",
                expected=f"{expected:#x}",
                do="keep the same buffers, or capture() the window again",
            )


def refuse_other_graph(device: Device, *, is_recording: bool) -> None:
    """Raise `CallerError` unless the current stream records a graph if, and only if, the engine does."""
    if device.is_capturing() != is_recording:
        captured, other = "is not the captured stream", "records a graph that this engine did not begin"
        do = "use this engine's capture() on the stream of its `with`; after an interrupt call discard()"
        raise CallerError(f"the current stream {captured if is_recording else other}", do=do)


def addresses_of(arrays: Sequence[Any]) -> list[int]:
    """Return each array's current address, by the fastest way that its framework has, or 0 without an address.

    It takes 0.1 us per array if all are of one framework, and otherwise 1 us.
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
