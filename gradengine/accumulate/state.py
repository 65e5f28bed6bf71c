"""Where a step stands, and what may be called then: one table, which everyone who takes part in a step asks.

The accumulator, the engine, its reducer and its captures share one `StepState`, and none of them remembers where the
step stands in any other way. What belongs to a state (the stats that all workers agreed on, the spans that have left,
the graph that is recorded) is data, and lies with whoever made it. What a call needs beyond the state is asked where
that data is: whether a window has room (engine), whether a span has left (reducer). A trainer's batch and a group's
connection have small tables of their own.

    EMPTY --add--> OPEN --SEND--> SENDING --AGREE--> AGREED --HAND_BACK--> HANDED_BACK --> EMPTY, the next step

A state changes in one statement, so that an interrupt finds it before or behind a change. While memory is written a
step is in one of the HALF_ states; a call that is interrupted there leaves it so, and only `discard()` leads out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias, final

from gradengine.errors import WindowError

Facts: TypeAlias = Mapping[str, object]


@final
class State(Enum):
    """Where a step stands."""

    EMPTY = "nothing has come"
    NOTHING = "add(None) said that nothing comes"
    OPEN = "micro-batches have come"
    SENDING = "some of it has left for other workers"
    FAILED = "its exchange failed; the window is kept"
    AGREED = "all workers know the same sums, and nothing has been handed back"
    HANDED_BACK = "the gradients have been handed back, and the next window is not open yet"
    HALF_WRITTEN = "half written, and nothing has left"
    HALF_SENT = "half written, and some of it has left"
    HALF_HANDED_BACK = "half written by what all workers agreed on"
    CAPTURING = "a graph is recorded that holds nothing yet"
    RECORDED = "micro-batches are in the graph"
    CAPTURED = "the graph holds its step"
    HALF_CAPTURED = "a call was interrupted while it was recorded"
    LAUNCHING = "a replay is queued, or was interrupted where only the device knows"

    __hash__ = object.__hash__  # Enum's own is Python code, at each look into the table


@final
class Call(Enum):
    """What a user may call."""

    ADD = "add"
    ADD_PART = "add_block, add_non_block"
    ADD_NOTHING = "add(None, weight=0)"
    VIEW = "block, has_non_finite, and what else works on the arena"
    STEP = "step"
    SET_LOSS_SCALE = "loss_scale ="
    CAPTURE = "capture"
    REPLAY = "replay"
    ZERO_ALL = "the accumulator's zero_all"
    RECONNECT = "reconnect"
    DISCARD = "discard"

    __hash__ = object.__hash__


@final
class Event(Enum):
    """What happens within a call."""

    WRITE = "memory is half written until the call is over"
    SEND = "a span leaves for other workers"
    FAIL = "an exchange failed"
    AGREE = "all workers know the same sums"
    HAND_BACK = "the gradients have been handed back"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Refusal:
    """A call that does not fit the state: its error, with facts in braces for who knows them."""

    what: str
    got: str | None = None
    expected: str | None = None
    do: str | None = None

    def error(self, facts: Facts) -> WindowError:
        """The error, filled in."""
        known = {**_UNKNOWN, **facts}
        filled = [None if text is None else text.format_map(known) for text in (self.got, self.expected, self.do)]
        return WindowError(self.what.format_map(known), got=filled[0], expected=filled[1], do=filled[2])


#: What an accumulator without an engine does not know.
_UNKNOWN = {"step": "a step", "count": "some", "change": "another", "last": "", "or_nothing": "", "others": ""}
_none = Refusal(
    "{step} without a micro-batch", "0 micro-batches", "at least 1", "{last}add() gradients first{or_nothing}"
)
_sent = Refusal(
    "the window is complete and on its way to the other workers",
    "a contribution after the last of {count} micro-batches",
    "step()",
)
_kept = Refusal(
    "{step} failed, and its window is kept",
    do="run step() again (after reconnect() where the exchange was lost), or discard() it",
)
_over = Refusal(
    "{step} was interrupted when its gradients had been handed back",
    do="run step() again with the same arguments for its result, or discard() it",
)
_half = Refusal(
    "the window is half written: a call was interrupted, or another thread is in one",
    do="drop it by the engine's discard(), or by zero_all() where there is none, and add its micro-batches again",
)
_back = Refusal(
    "{step} was interrupted while it handed back its gradients: they are half written",
    do="{others}discard() goes on without this step",
)
_open = Refusal("a window is open", "{count} micro-batches", do="step() or discard() it first")
_scale = Refusal(
    "the loss scale of an open window cannot be changed", "{change}", do="set it after step() or discard()"
)
_graph = Refusal("a window is being captured", do="leave its `with` first; discard() where an interrupt did")
_one = Refusal(
    "a capture holds one window",
    "another add() or step()",
    "one step(), last",
    "leave its `with`; discard() where an interrupt did",
)
_cut = Refusal("a call was interrupted while it was captured", do="leave its `with`, or discard() it")
_zero = Refusal("a captured window has micro-batches that count", "add(None, weight=0)")
_ran = Refusal("a replay was interrupted, and {step} may have run", do="replay() again: it says whether that was so")

Cell: TypeAlias = State | Refusal | None
SAME: Final = None  # the call leaves the state as it is
_: Final = None  # the event does not come there

# fmt: off
(
    EMPTY, NOTHING, OPEN, SENDING, FAILED, AGREED, HANDED_BACK, HALF_WRITTEN, HALF_SENT, HALF_HANDED_BACK, CAPTURING,
    RECORDED, CAPTURED, HALF_CAPTURED, LAUNCHING,
) = State
#: The state that a call leads to when it is over, or its refusal. For a step it says whether it may begin: what it does
#: on its way is events. A part may come while others have left; of which span, the reducer knows.
_CALLS: Mapping[State, tuple[Cell, ...]] = {
    #                  ADD       ADD_PART  NOTHING  VIEW   STEP   SCALE   CAPTURE    REPLAY     ZERO_ALL   RECONNECT
    EMPTY:            (OPEN,     OPEN,     NOTHING, SAME,  _none, SAME,   CAPTURING, LAUNCHING, SAME,      SAME),
    NOTHING:          (OPEN,     OPEN,     SAME,    SAME,  SAME,  SAME,   CAPTURING, LAUNCHING, EMPTY,     SAME),
    OPEN:             (SAME,     SAME,     SAME,    SAME,  SAME,  _scale, _open,     _open,     EMPTY,     SAME),
    SENDING:          (_sent,    SAME,     _sent,   SAME,  SAME,  _scale, _open,     _open,     HALF_SENT, SAME),
    FAILED:           (_kept,    _kept,    _kept,   SAME,  SAME,  _scale, _open,     _open,     HALF_SENT, SAME),
    AGREED:           (_kept,    _kept,    _kept,   SAME,  SAME,  _scale, _open,     _open,     HALF_SENT, FAILED),
    HANDED_BACK:      (_over,    _over,    _over,   _over, SAME,  _over,  _over,     _over,     SAME,      SAME),
    HALF_WRITTEN:     (_half,    _half,    _half,   _half, _half, _half,  _half,     _half,     EMPTY,     SAME),
    HALF_SENT:        (_half,    _half,    _half,   _half, _half, _half,  _half,     _half,     SAME,      SAME),
    HALF_HANDED_BACK: (_back,    _back,    _back,   _back, _back, _back,  _back,     _back,     SAME,      HALF_SENT),
    CAPTURING:        (RECORDED, RECORDED, _zero,   SAME,  _none, SAME,   _graph,    _graph,    SAME,      SAME),
    RECORDED:         (SAME,     SAME,     _zero,   SAME,  SAME,  _scale, _graph,    _graph,    CAPTURING, SAME),
    CAPTURED:         (_one,     _one,     _one,    _one,  _one,  _one,   _graph,    _graph,    SAME,      SAME),
    HALF_CAPTURED:    (_cut,     _cut,     _cut,    _cut,  _cut,  _cut,   _cut,      _cut,      SAME,      SAME),
    LAUNCHING:        (OPEN,     OPEN,     NOTHING, SAME,  _none, SAME,   _ran,      SAME,      SAME,      SAME),
}
#: The state that an event leads to.
_EVENTS: Mapping[State, tuple[Cell, ...]] = {
    #                  WRITE             SEND     FAIL              AGREE     HAND_BACK
    EMPTY:            (HALF_WRITTEN,     _,       _,                _,        _),
    NOTHING:          (HALF_WRITTEN,     SENDING, FAILED,           AGREED,   _),
    OPEN:             (HALF_WRITTEN,     SENDING, FAILED,           AGREED,   _),
    SENDING:          (HALF_SENT,        SENDING, FAILED,           AGREED,   _),
    FAILED:           (HALF_SENT,        FAILED,  FAILED,           AGREED,   _),
    AGREED:           (HALF_HANDED_BACK, _,       AGREED,           AGREED,   HANDED_BACK),
    HANDED_BACK:      (HALF_HANDED_BACK, _,       _,                _,        HANDED_BACK),
    HALF_WRITTEN:     (HALF_WRITTEN,     _,       HALF_SENT,        _,        _),
    HALF_SENT:        (HALF_SENT,        _,       HALF_SENT,        _,        _),
    HALF_HANDED_BACK: (HALF_HANDED_BACK, _,       HALF_HANDED_BACK, _,        _),
    CAPTURING:        (HALF_CAPTURED,    _,       _,                _,        _),
    RECORDED:         (HALF_CAPTURED,    _,       _,                RECORDED, CAPTURED),
    CAPTURED:         (HALF_CAPTURED,    _,       _,                _,        CAPTURED),
    HALF_CAPTURED:    (HALF_CAPTURED,    _,       _,                _,        _),
    LAUNCHING:        (HALF_WRITTEN,     _,       _,                _,        _),
}
# fmt: on

#: For each state what a call or an event leads to.
TABLE: Mapping[State, Mapping[Call | Event, State | Refusal]] = {
    state: {
        **{call: answer or state for call, answer in zip(Call, answers, strict=False)},
        Call.DISCARD: EMPTY if state is not LAUNCHING else LAUNCHING,  # it drops a window, and a replay has none
        **{event: answer for event, answer in zip(Event, _EVENTS[state], strict=True) if answer},
    }
    for state, answers in _CALLS.items()
}

#: Those in which the current stream records a graph, and nothing runs.
RECORDING_STATES = frozenset({State.CAPTURING, State.RECORDED, State.CAPTURED, State.HALF_CAPTURED})


@final
class StepState:
    """Where one accumulator's step stands, whoever works on it."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = State.EMPTY

    def ask(self, happening: Call | Event, facts: Callable[[], Facts] | None = None) -> State:
        """The state that a call or an event leads to; `WindowError`, with these facts, where the call does not fit."""
        answer = TABLE[self.now][happening]
        if isinstance(answer, Refusal):
            raise answer.error({} if facts is None else facts())
        return answer

    def enter(self, happening: Call | Event) -> None:
        """It has happened; raises `WindowError` as `ask`."""
        answer = TABLE[self.now][happening]
        self.now = answer if isinstance(answer, State) else self.ask(happening)
