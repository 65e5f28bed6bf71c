"""The state of a step, and the table of calls that each state allows, which all objects of a step use.

The accumulator, the engine, its reducer and its captures share one `StepState`. None of them stores the step's state in
any other way. The table holds states only. The data of a state (agreed stats, spans that were sent, the recorded graph)
stays with its owner. The owner also makes the checks that need data, such as whether a window is full (engine) or a
span was sent (reducer). A trainer's batch and a group's connection have separate small tables.

    EMPTY --add--> OPEN --SEND--> SENDING --AGREE--> AGREED --end of step--> EMPTY, the next step

A micro-batch that is added component by component is COMING from its first component until it ends.

While memory is written the step is BROKEN, and it stays BROKEN after a call that was interrupted, as by Ctrl-C. No call
is resumed in the middle, and only `discard()` leaves this state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Final, TypeAlias, final

from gradengine.errors import WindowError
from gradengine.kernels import Device
from gradengine.kernels.events import FAILURES

Facts: TypeAlias = Mapping[str, object]


@final
class State(Enum):
    """The states of a step."""

    EMPTY = "nothing was added"
    NOTHING = "add(None) was called: this rank has no micro-batch"
    OPEN = "micro-batches were added"
    COMING = "a micro-batch is being added component by component"
    SENDING = "some of the window was sent to other ranks"
    FAILED = "the exchange failed; the window is kept"
    AGREED = "all ranks have the same sums, and no gradient was written"
    BROKEN = "a call is writing, or was interrupted"
    CAPTURING = "a graph is being recorded and is still empty"
    RECORDED = "micro-batches are in the graph"
    CAPTURED = "the graph holds its step"

    __hash__ = object.__hash__  # faster than Enum's, which is Python code


@final
class Call(Enum):
    """The calls of a user."""

    ADD = "add"
    ADD_PART = "add_block, add_non_block"
    ADD_NOTHING = "add(None, weight=0)"
    VIEW = "block, has_non_finite, and other calls that work on the arena"
    STEP = "step"
    SET = "loss_scale =, max_norm ="
    CAPTURE = "capture"
    REPLAY = "replay"
    ZERO_ALL = "the accumulator's zero_all"
    RECONNECT = "reconnect"
    BEGIN = "the first component of a micro-batch that is added component by component"
    COMPONENT = "each later component of such a micro-batch, and its end"
    SAVE = "state_dict"
    LOAD = "load_state_dict, and other calls between windows"

    __hash__ = object.__hash__


@final
class Event(Enum):
    """The events within a call."""

    SEND = "a span is sent to other ranks"
    FAIL = "an exchange failed"
    AGREE = "all ranks have the same sums"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Refusal:
    """The error of a call that the state does not allow, with names in braces that the facts replace."""

    what: str
    got: str | None = None
    expected: str | None = None
    do: str | None = None

    def error(self, facts: Facts) -> WindowError:
        """Return the error with the facts filled in."""
        known = {**_UNKNOWN, **facts}
        filled = [None if text is None else text.format_map(known) for text in (self.got, self.expected, self.do)]
        return WindowError(self.what.format_map(known), got=filled[0], expected=filled[1], do=filled[2])


#: The default facts, for an accumulator without an engine.
_UNKNOWN = {
    "step": "a step",
    "count": "some",
    "setting": "a setting",
    "change": "another",
    "or_nothing": "",
    "way_out": "zero_all()",
    "after_loss": "",
}
_none = Refusal("{step} without a micro-batch", "0 micro-batches", "at least 1", "add() gradients first{or_nothing}")
_sent = Refusal(
    "the window is complete and was sent to the other ranks",
    "a contribution after the last of {count} micro-batches",
    "step()",
)
_kept = Refusal(
    "{step} failed, and its window is kept",
    do="run step() again{after_loss}, or discard() it",
)
_broken = Refusal(
    "{step} is broken: a call was interrupted, or is running in another thread",
    do="drop its window by {way_out}, and add its micro-batches again",
)
_part = Refusal(
    "{step} holds a part of a micro-batch",
    "one that has begun but not ended",
    do="leave its `with`, or let its backward end; if that failed, drop the window by {way_out}",
)
_ended = Refusal("no micro-batch is being added component by component", do="begin one with engine.micro_batch()")
_open = Refusal("a window is open", "{count} micro-batches", do="step() or discard() it first")
_away = Refusal(
    "{step} cannot be saved, because a part of it was sent to the other ranks",
    do="save the window before its last micro-batch, or after step()",
)
_drop = Refusal("the ranks are summing this window", "zero_all()", do="call the engine's discard(), on every rank")
_fixed = Refusal("the {setting} of an open window cannot be changed", "{change}", do="set it after step() or discard()")
_graph = Refusal("a window is being captured", do="leave its `with` first; after an interrupt call discard()")
_one = Refusal(
    "a capture holds one window",
    "a further add() or step()",
    "one step() at the end",
    "leave its `with`; after an interrupt call discard()",
)
_attached = Refusal(
    "engine.step() would leave every .grad None, because the engine is attached to a module",
    do="call attached.step(); or pass out= or deferred=True, and set each .grad yourself",
)
_gone = Refusal(
    "{step} without a micro-batch: the hooks of attach() are gone",
    do="keep what attach() returns, or add() gradients first",
)
_zero = Refusal("a captured window takes only micro-batches with a weight", "add(None, weight=0)")
_whole = Refusal("a captured window takes whole micro-batches", "one added component by component", "add()")

Cell: TypeAlias = State | Refusal | None
SAME: Final = None  # the call leaves the state as it is
_: Final = None  # the event cannot happen in this state

# fmt: off
EMPTY, NOTHING, OPEN, COMING, SENDING, FAILED, AGREED, BROKEN, CAPTURING, RECORDED, CAPTURED = State
#: The state that a call leads to, or its refusal. The entry for STEP is only whether it can begin, since events change
#: the state in a step. A part can be added after others were sent. The reducer checks which were.
_CALLS: Mapping[State, tuple[Cell, ...]] = {
    #           ADD       ADD_PART  NOTHING  VIEW     STEP     SET      CAPTURE    REPLAY   ZERO_ALL   RECONNECT
    EMPTY:     (OPEN,     OPEN,     NOTHING, SAME,    _none,   SAME,    CAPTURING, SAME,    SAME,      SAME),
    NOTHING:   (OPEN,     OPEN,     SAME,    SAME,    SAME,    SAME,    CAPTURING, SAME,    EMPTY,     SAME),
    OPEN:      (SAME,     SAME,     SAME,    SAME,    SAME,    _fixed,  _open,     _open,   EMPTY,     SAME),
    COMING:    (_part,    _part,    _part,   SAME,    _part,   _fixed,  _open,     _open,   EMPTY,     SAME),
    SENDING:   (_sent,    SAME,     _sent,   SAME,    SAME,    _fixed,  _open,     _open,   _drop,     SAME),
    FAILED:    (_kept,    _kept,    _kept,   SAME,    SAME,    SAME,    _open,     _open,   _drop,     SAME),
    AGREED:    (_kept,    _kept,    _kept,   SAME,    SAME,    _fixed,  _open,     _open,   _drop,     FAILED),
    BROKEN:    (_broken,  _broken,  _broken, _broken, _broken, _broken, _broken,   _broken, EMPTY,     _broken),
    CAPTURING: (RECORDED, RECORDED, _zero,   SAME,    _none,   _graph,  _graph,    _graph,  SAME,      SAME),
    RECORDED:  (SAME,     SAME,     _zero,   SAME,    SAME,    _fixed,  _graph,    _graph,  CAPTURING, SAME),
    CAPTURED:  (_one,     _one,     _one,    _one,    _one,    _one,    _graph,    _graph,  SAME,      SAME),
}
#: The same table for calls that add a micro-batch component by component, and calls that save and load a window.
_MORE_CALLS: Mapping[State, tuple[Cell, ...]] = {
    #           BEGIN    COMPONENT  SAVE      LOAD
    EMPTY:     (COMING,  _ended,    SAME,     SAME),
    NOTHING:   (COMING,  _ended,    SAME,     _open),
    OPEN:      (COMING,  _ended,    SAME,     _open),
    COMING:    (_part,   SAME,      _part,    _open),
    SENDING:   (_sent,   SAME,      _away,    _open),
    FAILED:    (_kept,   _kept,     _kept,    _open),
    AGREED:    (_kept,   _kept,     _kept,    _open),
    BROKEN:    (_broken, _broken,   _broken,  _broken),
    CAPTURING: (_whole,  _whole,    _graph,   _graph),
    RECORDED:  (_whole,  _whole,    _graph,   _graph),
    CAPTURED:  (_one,    _one,      _graph,   _graph),
}
#: The state that an event leads to.
_EVENTS: Mapping[State, tuple[Cell, ...]] = {
    #           SEND     FAIL    AGREE
    EMPTY:     (_,       _,      _),
    NOTHING:   (SENDING, FAILED, AGREED),
    OPEN:      (SENDING, FAILED, AGREED),
    COMING:    (SENDING, _,      _),
    SENDING:   (SENDING, FAILED, AGREED),
    FAILED:    (FAILED,  FAILED, AGREED),
    AGREED:    (_,       FAILED, AGREED),
    BROKEN:    (_,       BROKEN, _),
    CAPTURING: (_,       _,      _),
    RECORDED:  (RECORDED, BROKEN, RECORDED),
    CAPTURED:  (_,       _,      _),
}
# fmt: on

#: State -> call or event -> the state that it leads to, or its refusal.
TABLE: Mapping[State, Mapping[Call | Event, State | Refusal]] = {
    state: {
        **{call: answer or state for call, answer in zip(Call, answers + _MORE_CALLS[state], strict=False)},
        **{event: answer for event, answer in zip(Event, _EVENTS[state], strict=True) if answer},
    }
    for state, answers in _CALLS.items()
}


@final
class StepState:
    """The state of one accumulator's step, shared by all objects that work on it.

    Args:
        device: The device of its memory. No call is allowed after the device has failed.

    Attributes:
        now: The state.
        has_engine: Whether there is an engine, whose `discard` drops a broken window instead of `zero_all`.
        hooks: The last hooks that were made to add its gradients; alive until they are removed.
        changes: The number of writes to the step's memory.
    """

    __slots__ = ("_device", "changes", "has_engine", "hooks", "now")

    def __init__(self, device: Device) -> None:
        self.now, self.has_engine, self.changes, self._device = State.EMPTY, False, 0, device
        self.hooks: weakref.finalize[Any, Any] | None = None

    def ask(self, happening: Call | Event, facts: Callable[[], Facts] | None = None) -> State:
        """Return the state that a call or an event leads to.

        Raises:
            WindowError: The state does not allow it. The message contains these facts.
            DeviceFailed: The device has failed.
        """
        if FAILURES:
            self._device.refuse_failed()
        answer = TABLE[self.now][happening]
        if self.has_engine and happening is Call.ZERO_ALL and self.now is State.BROKEN:
            answer = _broken
        if isinstance(answer, Refusal):
            way_out = {"way_out": "discard()"} if self.has_engine else {}
            raise answer.error({**way_out, **({} if facts is None else facts())})
        return answer

    def write(self) -> None:
        """Note that the step's memory is written from now on. It is BROKEN until the caller sets a state."""
        self.changes += 1
        self.now = State.BROKEN

    def refuse_bare_step(self, facts: Callable[[], Facts]) -> None:
        """Raise `WindowError` for a step whose gradients no module would get, or which lacks its hooks' gradients."""
        if self.hooks is not None and self.hooks.alive:
            raise _attached.error(facts())
        if self.now is State.EMPTY:
            raise _gone.error(facts())

    def enter(self, happening: Call | Event) -> None:
        """Change to the state that a call or an event leads to. Raise `WindowError` as `ask` does."""
        answer = TABLE[self.now][happening]
        self.now = answer if isinstance(answer, State) else self.ask(happening)


@final
class Changing(AbstractContextManager[None]):
    """A context in which the step is BROKEN. Afterwards it is in the state that the call leads to.

    It is no generator, because an interrupted generator would end with its traceback, in a later window.

    Args:
        state: The step's state.
        over: The state afterwards.
        order: The context that orders work on the memory that is written.
    """

    def __init__(self, state: StepState, over: State, order: AbstractContextManager[object]) -> None:
        self._state, self._over, self._order = state, over, order

    def __enter__(self) -> None:
        self._order.__enter__()
        self._state.write()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._state.now = self._over
        self._order.__exit__(kind, fault, trace)
