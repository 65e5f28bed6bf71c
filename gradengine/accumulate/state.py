"""Where a step stands, and what may be called then: one table, which everyone who takes part in a step asks.

The accumulator, the engine, its reducer and its captures share one `StepState`, and none of them remembers where the
step stands in any other way. What belongs to a state (the stats that all workers agreed on, the spans that have left,
the graph that is recorded) is data, and lies with whoever made it.

    EMPTY --add--> OPEN --SEND--> SENDING --AGREE--> AGREED --HAND_BACK--> HANDED_BACK --> EMPTY, the next step

A state changes in one statement, so that an interrupt finds it before or behind a change. While memory is written a
step is in one of the HALF_ states; a call that is interrupted there leaves it so, and only `discard()` leads out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, final

from gradengine.errors import WindowError

__all__ = ["RECORDING_STATES", "TABLE", "Call", "Event", "Facts", "Refusal", "State", "StepState"]

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
    VIEW = "block, average, has_non_finite, and what else works on the arena"
    ZERO_ALL = "the accumulator's zero_all"
    STEP = "step"
    SET_LOSS_SCALE = "loss_scale ="
    CAPTURE = "capture"
    REPLAY = "replay"
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
        """The error, filled in.

        >>> Refusal("{step} failed", do="run step() again").error({"step": "step 3"})
        WindowError('step 3 failed')
        """
        known = {**_UNKNOWN, **facts}
        filled = [None if text is None else text.format_map(known) for text in (self.got, self.expected, self.do)]
        return WindowError(self.what.format_map(known), got=filled[0], expected=filled[1], do=filled[2])


#: What an accumulator without an engine does not know.
_UNKNOWN = {"step": "a step", "count": "some", "change": "another", "last": "", "or_nothing": "", "others": ""}
_NO_MICRO_BATCH = Refusal(
    "{step} without a micro-batch", "0 micro-batches", "at least 1", "{last}add() gradients first{or_nothing}"
)
_ON_ITS_WAY = Refusal(
    "the window is complete and on its way to the other workers",
    "a contribution after the last of {count} micro-batches",
    "step()",
)
_KEPT = Refusal(
    "{step} failed, and its window is kept",
    do="run step() again (after reconnect() where the exchange was lost), or discard() it",
)
_HANDED_BACK = Refusal(
    "{step} was interrupted when its gradients had been handed back",
    do="run step() again with the same arguments for its result, or discard() it",
)
_HALF_WRITTEN = Refusal(
    "the window is half written: a call was interrupted, or another thread is in one",
    do="drop it by zero_all() or the engine's discard(), and add its micro-batches again",
)
_HALF_HANDED_BACK = Refusal(
    "{step} was interrupted while it handed back its gradients: they are half written",
    do="{others}discard() goes on without this step",
)
_OPEN = Refusal("a window is open", "{count} micro-batches", do="step() or discard() it first")
_SCALED = Refusal(
    "the loss scale of an open window cannot be changed",
    "{change}",
    do="set it after step() or discard()",
)
_BEING_CAPTURED = Refusal("a window is being captured", do="leave its `with` first; discard() where an interrupt did")
_ONE_WINDOW = Refusal(
    "a capture holds one window",
    "another add() or step()",
    "one step(), last",
    "leave its `with`; discard() where an interrupt did",
)
_HALF_CAPTURED = Refusal("a call was interrupted while it was captured", do="leave its `with`, or discard() it")
_COUNTS_NOTHING = Refusal("a captured window has micro-batches that count", "add(None, weight=0)")
_PERHAPS_RUN = Refusal(
    "a replay was interrupted, and {step} may have run", do="replay() again: it says whether that was so"
)

Row: TypeAlias = Mapping[Call | Event, State | Refusal]


def _every(refusal: Refusal) -> dict[Call | Event, State | Refusal]:
    """A row of refusals, for what a state does not name; every state can be discarded."""
    return {**dict.fromkeys(Call, refusal), Call.DISCARD: State.EMPTY}


#: For each state, what a call or an event leads to: the state when it is over, or its refusal. An event that a state
#: does not name cannot come there. What a step does on its way is events; its row says whether it may begin.
TABLE: Mapping[State, Row] = {
    State.EMPTY: {
        Call.ADD: State.OPEN,
        Call.ADD_PART: State.OPEN,
        Call.ADD_NOTHING: State.NOTHING,
        Call.VIEW: State.EMPTY,
        Call.ZERO_ALL: State.EMPTY,
        Call.STEP: _NO_MICRO_BATCH,
        Call.SET_LOSS_SCALE: State.EMPTY,
        Call.CAPTURE: State.CAPTURING,
        Call.REPLAY: State.LAUNCHING,
        Call.RECONNECT: State.EMPTY,
        Call.DISCARD: State.EMPTY,
        Event.WRITE: State.HALF_WRITTEN,
    },
    State.NOTHING: {
        Call.ADD: State.OPEN,
        Call.ADD_PART: State.OPEN,
        Call.ADD_NOTHING: State.NOTHING,
        Call.VIEW: State.NOTHING,
        Call.ZERO_ALL: State.EMPTY,
        Call.STEP: State.NOTHING,
        Call.SET_LOSS_SCALE: State.NOTHING,
        Call.CAPTURE: State.CAPTURING,
        Call.REPLAY: State.LAUNCHING,
        Call.RECONNECT: State.NOTHING,
        Call.DISCARD: State.EMPTY,
        Event.WRITE: State.HALF_WRITTEN,
        Event.SEND: State.SENDING,
        Event.FAIL: State.FAILED,
        Event.AGREE: State.AGREED,
    },
    State.OPEN: {
        Call.ADD: State.OPEN,
        Call.ADD_PART: State.OPEN,
        Call.ADD_NOTHING: State.OPEN,
        Call.VIEW: State.OPEN,
        Call.ZERO_ALL: State.EMPTY,
        Call.STEP: State.OPEN,
        Call.SET_LOSS_SCALE: _SCALED,
        Call.CAPTURE: _OPEN,
        Call.REPLAY: _OPEN,
        Call.RECONNECT: State.OPEN,
        Call.DISCARD: State.EMPTY,
        Event.WRITE: State.HALF_WRITTEN,
        Event.SEND: State.SENDING,
        Event.FAIL: State.FAILED,
        Event.AGREE: State.AGREED,
    },
    State.SENDING: {
        **_every(_ON_ITS_WAY),
        Call.ADD_PART: State.SENDING,  # of a span that has not left, which the spans know
        Call.VIEW: State.SENDING,
        Call.ZERO_ALL: State.HALF_SENT,  # the others have it, or wait for the rest
        Call.STEP: State.SENDING,
        Call.SET_LOSS_SCALE: _SCALED,
        Call.CAPTURE: _OPEN,
        Call.REPLAY: _OPEN,
        Call.RECONNECT: State.SENDING,
        Event.WRITE: State.HALF_SENT,
        Event.SEND: State.SENDING,
        Event.FAIL: State.FAILED,
        Event.AGREE: State.AGREED,
    },
    State.FAILED: {
        **_every(_KEPT),
        Call.VIEW: State.FAILED,
        Call.ZERO_ALL: State.HALF_SENT,
        Call.STEP: State.FAILED,
        Call.SET_LOSS_SCALE: _SCALED,
        Call.CAPTURE: _OPEN,
        Call.REPLAY: _OPEN,
        Call.RECONNECT: State.FAILED,
        Event.WRITE: State.HALF_SENT,
        Event.SEND: State.FAILED,
        Event.FAIL: State.FAILED,
        Event.AGREE: State.AGREED,
    },
    State.AGREED: {
        **_every(_KEPT),
        Call.VIEW: State.AGREED,
        Call.ZERO_ALL: State.AGREED,  # nothing is written, and the stats are known
        Call.STEP: State.AGREED,
        Call.SET_LOSS_SCALE: _SCALED,
        Call.CAPTURE: _OPEN,
        Call.REPLAY: _OPEN,
        Call.RECONNECT: State.FAILED,  # the agreement may have reached this rank alone
        Event.WRITE: State.HALF_HANDED_BACK,
        Event.FAIL: State.AGREED,
        Event.AGREE: State.AGREED,
        Event.HAND_BACK: State.HANDED_BACK,
    },
    State.HANDED_BACK: {
        **_every(_HANDED_BACK),
        Call.ZERO_ALL: State.HANDED_BACK,
        Call.STEP: State.HANDED_BACK,
        Call.RECONNECT: State.HANDED_BACK,
        Event.WRITE: State.HALF_HANDED_BACK,
        Event.HAND_BACK: State.HANDED_BACK,
    },
    State.HALF_WRITTEN: {
        **_every(_HALF_WRITTEN),
        Call.ZERO_ALL: State.EMPTY,
        Call.RECONNECT: State.HALF_WRITTEN,
        Event.WRITE: State.HALF_WRITTEN,
        Event.FAIL: State.HALF_SENT,
    },
    State.HALF_SENT: {
        **_every(_HALF_WRITTEN),
        Call.ZERO_ALL: State.HALF_SENT,
        Call.RECONNECT: State.HALF_SENT,
        Event.WRITE: State.HALF_SENT,
        Event.FAIL: State.HALF_SENT,
    },
    State.HALF_HANDED_BACK: {
        **_every(_HALF_HANDED_BACK),
        Call.ZERO_ALL: State.HALF_HANDED_BACK,
        Call.RECONNECT: State.HALF_SENT,
        Event.WRITE: State.HALF_HANDED_BACK,
        Event.FAIL: State.HALF_HANDED_BACK,
    },
    State.CAPTURING: {
        **_every(_BEING_CAPTURED),
        Call.ADD: State.RECORDED,
        Call.ADD_PART: State.RECORDED,
        Call.ADD_NOTHING: _COUNTS_NOTHING,
        Call.VIEW: State.CAPTURING,
        Call.ZERO_ALL: State.CAPTURING,
        Call.STEP: _NO_MICRO_BATCH,
        Call.SET_LOSS_SCALE: State.CAPTURING,
        Call.RECONNECT: State.CAPTURING,
        Event.WRITE: State.HALF_CAPTURED,
    },
    State.RECORDED: {
        **_every(_BEING_CAPTURED),
        Call.ADD: State.RECORDED,
        Call.ADD_PART: State.RECORDED,
        Call.ADD_NOTHING: _COUNTS_NOTHING,
        Call.VIEW: State.RECORDED,
        Call.ZERO_ALL: State.CAPTURING,
        Call.STEP: State.RECORDED,
        Call.SET_LOSS_SCALE: _SCALED,
        Call.RECONNECT: State.RECORDED,
        Event.WRITE: State.HALF_CAPTURED,
        Event.AGREE: State.RECORDED,
        Event.HAND_BACK: State.CAPTURED,
    },
    State.CAPTURED: {
        **_every(_BEING_CAPTURED),
        **dict.fromkeys((Call.ADD, Call.ADD_PART, Call.ADD_NOTHING, Call.VIEW, Call.STEP), _ONE_WINDOW),
        Call.ZERO_ALL: State.CAPTURED,
        Call.RECONNECT: State.CAPTURED,
        Event.WRITE: State.HALF_CAPTURED,
        Event.HAND_BACK: State.CAPTURED,
    },
    State.HALF_CAPTURED: {
        **_every(_HALF_CAPTURED),
        Call.CAPTURE: _BEING_CAPTURED,
        Call.REPLAY: _BEING_CAPTURED,
        Call.ZERO_ALL: State.HALF_CAPTURED,
        Call.RECONNECT: State.HALF_CAPTURED,
        Event.WRITE: State.HALF_CAPTURED,
    },
    State.LAUNCHING: {
        Call.ADD: State.OPEN,
        Call.ADD_PART: State.OPEN,
        Call.ADD_NOTHING: State.NOTHING,
        Call.VIEW: State.LAUNCHING,
        Call.ZERO_ALL: State.LAUNCHING,
        Call.STEP: _NO_MICRO_BATCH,
        Call.SET_LOSS_SCALE: State.LAUNCHING,
        Call.CAPTURE: _PERHAPS_RUN,
        Call.REPLAY: State.LAUNCHING,
        Call.RECONNECT: State.LAUNCHING,
        Call.DISCARD: State.LAUNCHING,  # it drops a window, and a replay has none
        Event.WRITE: State.HALF_WRITTEN,
    },
}

#: Those in which the current stream records a graph, and nothing runs.
RECORDING_STATES = frozenset({State.CAPTURING, State.RECORDED, State.CAPTURED, State.HALF_CAPTURED})


@final
class StepState:
    """Where one accumulator's step stands, whoever works on it.

    Attributes:
        now: The state.

    Example:
        >>> state = StepState()
        >>> state.enter(Call.ADD)
        >>> state.now.name, state.ask(Call.ZERO_ALL).name
        ('OPEN', 'EMPTY')
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = State.EMPTY

    def ask(self, happening: Call | Event, facts: Callable[[], Facts] | None = None) -> State:
        """The state that a call or an event leads to; nothing changes.

        Raises:
            WindowError: The call does not fit the state; `facts` says of what step, and how it came.
        """
        answer = TABLE[self.now][happening]
        if isinstance(answer, Refusal):
            raise answer.error({} if facts is None else facts())
        return answer

    def enter(self, happening: Call | Event) -> None:
        """It has happened; raises `WindowError` as `ask`."""
        answer = TABLE[self.now][happening]
        self.now = answer if isinstance(answer, State) else self.ask(happening)
