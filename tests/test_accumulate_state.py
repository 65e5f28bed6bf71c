"""Where a step stands: each state and each call, driven through an engine; a refusal says why, and changes nothing."""

from unittest.mock import patch

import numpy as np
import pytest
from devices import put_all
from interrupts import interrupted_at, places_of
from ranks import on_ranks

from gradengine import GradientEngine, GradientLayout, PerBlockGradientAccumulator
from gradengine.accumulate.state import TABLE, Call, Event, Refusal, State, StepState
from gradengine.errors import CallerError, NonFiniteGradient, PeerLost, WindowError
from gradengine.exchange.exchange import Exchange, Sums
from gradengine.kernels.host_device import HostDevice

LAYOUT = GradientLayout.of({"layers.0.w": (3,), "head": (2,)})


def test_a_window_has_room_for_what_was_said_whole_or_in_parts():
    engine, gradients = GradientEngine(LAYOUT, micro_batches=2), [np.ones(3, np.float32), np.ones(2, np.float32)]
    for _ in range(2):
        engine.add(gradients)
    with pytest.raises(WindowError, match=r"the window is full: got micro-batch 3, .* after 2"):
        engine.add(gradients)
    assert engine.step().micro_batches == 2
    for what, add in (
        ("block 0", lambda: engine.add_block(0, gradients[:1])),
        ("component 'head'", lambda: engine.add_non_block("head", gradients[1])),
    ):
        for _ in range(2):
            add()
        with pytest.raises(WindowError, match=rf"the window of {what} is full: got micro-batch 3, .* after 2"):
            add()
    result = engine.step()
    assert (result.micro_batches, float(result.norm)) == (2, pytest.approx(5**0.5))


def test_what_is_on_its_way_takes_no_more_by_name_or_id():
    """Block 0 has left and the LM head, whose id is 0, has not; then it has."""
    layout = GradientLayout.transformer(1, 2, 2, 2, 2, embedding=False)
    gradients = {slot.name: np.ones(slot.shape, np.float32) for slot in layout.slots}
    block = [gradients[slot.name] for slot in layout.blocks[0].slots]

    def work(exchange):
        engine = GradientEngine(layout, exchange=exchange)
        engine.add_block(0, block, last=True)
        with pytest.raises(WindowError, match=r"block 0 was sent .* of 1 micro-batches"):
            engine.add_block(0, block)
        engine.add_non_block(0, gradients["lm_head"], last=True)
        with pytest.raises(WindowError, match="component 'lm_head' was sent"):
            engine.add_non_block(0, gradients["lm_head"])
        engine.add_non_block(1, gradients["final_norm"])
        with pytest.raises(WindowError, match="the window is complete and was sent"):
            engine.add(gradients)
        return engine.step().micro_batches

    assert on_ranks(work, 2) == [2, 2]


class Echo(Exchange):
    """A group of two whose other rank says what this one says; its sums are what is there, unless it is `lost`."""

    rank, world_size, url, shares_memory, holds_sums, device_calls, started = 0, 2, None, False, False, None, ()

    def __init__(self, lost=False):
        self.lost = lost

    def bind(self, layout, arena, **_):
        sums = arena.rows(1, layout.arena_size)[0]
        vars(self).update(layout=layout, arena=arena, sums=sums, started=set(), _told={})

    def begin(self, step):
        vars(self).update(started=set(), _told={})

    def start(self, *spans, in_background=True):
        self.started.update(span.key for span in spans)
        for span in spans:
            self.arena.note(span.key)
            row = self.sums[span.start : span.stop]
            self.arena.copy("", row, span.start, is_to_arena=False, behind=span.key)
        while self.arena.is_copying:
            self.arena.poll(waits=True)

    def wait(self):
        if self.lost:
            raise PeerLost("the other rank is gone")
        squares = np.array([np.square(self.sums[slot.offset : slot.stop]).sum() for slot in LAYOUT.slots])
        return Sums(squares, [], 0.0, 0.0)

    def all_gather(self, data):
        return [data, data]

    def close(self):
        pass


class Stand:
    """A GPU's engine that is brought to a state, as users get there, with a graph that it captured before."""

    def __init__(self, backend, state):
        self.backend, self.engine = backend, GradientEngine(LAYOUT, backend.kernels)
        self.of = {value: self.put(value) for value in (1, 2, np.nan)}  # before a stream records
        with self.engine.capture() as self.graph:
            self.engine.add(self.of[1])
            self.engine.step()
        self.capture = None
        getattr(self, state.name.lower())()
        assert self.now is state

    @property
    def now(self):
        return self.engine.accumulator.state.now

    def put(self, value):
        return put_all(self.backend, [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots])

    def interrupt(self, owner, name, call):
        with patch.object(owner, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            call()

    def leave_half_written(self):
        with pytest.raises(KeyboardInterrupt), self.engine.accumulator.changing():
            raise KeyboardInterrupt

    # ---- how each state is reached ----

    def empty(self):
        pass

    def nothing(self):
        self.engine.add(None, weight=0)

    def open(self):
        self.engine.add(self.of[1])

    def coming(self):
        self.engine.micro_batch().add("head", self.of[1][1])

    def sending(self, value=1, lost=False):
        self.engine.reconnect(Echo(lost))
        self.engine.add_block(0, self.of[value][:1], last=True)

    def failed(self):
        self.sending(lost=True)
        self.engine.add_non_block("head", self.of[1][1])
        with pytest.raises(PeerLost):
            self.engine.step()
        vars(self.engine.exchange)["lost"] = False

    def agreed(self):
        self.sending(np.nan)
        self.engine.add_non_block("head", self.of[1][1])
        with pytest.raises(NonFiniteGradient):
            self.engine.step()

    def broken(self):
        self.open()
        self.leave_half_written()

    def capturing(self):
        self.capture = self.engine.capture()
        self.capture.__enter__()

    def recorded(self):
        self.capturing()
        self.engine.add(self.of[1])

    def captured(self):
        self.recorded()
        self.engine.step()

    # ---- what is called ----

    def call(self, call):
        engine, adder = self.engine, self.engine.accumulator
        calls = {
            Call.ADD: lambda: engine.add(self.of[1]),
            Call.ADD_PART: lambda: engine.add_non_block("head", self.of[1][1]),
            Call.ADD_NOTHING: lambda: engine.add(None, weight=0),
            Call.VIEW: lambda: engine.accumulator.block(0),
            Call.ZERO_ALL: engine.accumulator.zero_all,
            Call.STEP: engine.step,
            Call.SET: lambda: setattr(engine, "loss_scale", 2.0),
            Call.CAPTURE: self.capture_more,
            Call.REPLAY: self.graph.replay,
            Call.RECONNECT: lambda: engine.reconnect(Echo()),
            Call.SAVE: engine.state_dict,
            Call.LOAD: lambda: engine.load_state_dict(GradientEngine(LAYOUT).state_dict()),
            Call.BEGIN: lambda: engine.micro_batch().add("head", self.of[1][1]),
            Call.COMPONENT: lambda: adder.add_components(adder.alone["head"], [self.of[1][1]]),
        }
        return calls[call]()

    def capture_more(self):
        capture = self.engine.capture()
        capture.__enter__()
        self.capture = capture

    def leave(self):
        if self.capture is not None:
            self.capture.abandon()


#: Where a call is over that the table lets begin: what follows are events.
OVER = {
    **{(state, Call.STEP): State.EMPTY for state in (State.NOTHING, State.OPEN, State.FAILED)},
    (State.RECORDED, Call.STEP): State.CAPTURED,
    **{(state, Call.REPLAY): State.EMPTY for state in (State.EMPTY, State.NOTHING)},
}
#: Errors of a call that the state lets begin.
FAILS = {
    (State.NOTHING, Call.STEP): "without a micro-batch on any rank",
    (State.SENDING, Call.STEP): "'head' lacks part of the window",
    (State.AGREED, Call.STEP): "not finite",
}
#: Refused before the state is asked.
NOT_ALONE = {State.SENDING, State.FAILED, State.AGREED}
#: Asked by the accumulator or the reducer, which do not know what the engine does.
WITHOUT_FACTS = {Call.VIEW, Call.ZERO_ALL, Call.RECONNECT, Call.COMPONENT}


@pytest.fixture
def stand(emulated):
    stands = []

    def build(state):
        stands.append(Stand(emulated, state))
        return stands[-1]

    yield build
    for built in stands:
        built.leave()


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("call", Call, ids=lambda call: call.name)
def test_each_call_in_each_state_leads_where_the_table_says_or_is_refused(stand, state, call):
    stand, answer = stand(state), TABLE[state][call]
    if (state, call) == (State.BROKEN, Call.ZERO_ALL):  # the way out of an accumulator that has no engine
        answer = TABLE[state][Call.VIEW]
    counts = stand.engine.accumulator.accumulated_count, stand.engine.current_step
    if call in {Call.CAPTURE, Call.REPLAY} and state in NOT_ALONE:
        with pytest.raises(CallerError, match="a step with an exchange"):
            stand.call(call)
        assert stand.now is state
    elif isinstance(answer, Refusal):
        change = f"2.0 after {counts[0]} micro-batches of 1.0"
        facts = {**stand.engine._reducer.facts(), "setting": "loss scale", "change": change}
        known = {} if call in WITHOUT_FACTS else facts
        known["way_out"] = "discard()"
        with pytest.raises(WindowError) as caught:
            stand.call(call)
        assert str(caught.value) == str(answer.error(known))
        assert stand.now is state
        assert (stand.engine.accumulator.accumulated_count, stand.engine.current_step) == counts
    else:
        if (state, call) in FAILS:
            with pytest.raises((WindowError, NonFiniteGradient), match=FAILS[state, call]):
                stand.call(call)
        else:
            stand.call(call)
        assert stand.now is OVER.get((state, call), answer)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_a_discard_that_is_interrupted_at_any_line_is_over_or_can_be_called_again(stand, state):
    for at in places_of(stand(state).engine.discard):
        interrupted = stand(state)
        interrupted_at(at, interrupted.engine.discard)
        if interrupted.engine.has_open_window:
            interrupted.engine.discard()
        assert interrupted.now is State.EMPTY, at
        if interrupted.engine.exchange is None:
            interrupted.engine.add(interrupted.of[2])
            assert float(interrupted.engine.step().norm) == pytest.approx(20**0.5), at


def test_what_cannot_happen_in_a_state_is_no_refusal_but_a_fault():
    with pytest.raises(KeyError):
        StepState(HostDevice()).enter(Event.SEND)


def test_an_accumulator_without_an_engine_drops_a_broken_window_by_zero_all():
    accumulator, gradients = PerBlockGradientAccumulator(LAYOUT), [np.ones(3, np.float32), np.ones(2, np.float32)]
    accumulator.add(gradients)
    with pytest.raises(KeyboardInterrupt), accumulator.changing():
        raise KeyboardInterrupt
    for call in (lambda: accumulator.add(gradients), accumulator.average, lambda: accumulator.block(0)):
        with pytest.raises(WindowError, match=r"a step is broken: .*; drop its window by zero_all\(\), and add"):
            call()
    accumulator.zero_all()
    accumulator.add(gradients)
    assert accumulator.accumulated_count == 1


BREAKING = {
    "a write": ("open", lambda stand: stand.leave_half_written()),
    "a hand back": ("open", lambda stand: stand.interrupt(stand.engine._kernels, "hand_back", stand.engine.step)),
    "the end of a step": ("open", lambda stand: stand.interrupt(stand.engine._reducer, "begin", stand.engine.step)),
    "a replay": ("empty", lambda stand: stand.interrupt(stand.engine._late, "send", stand.graph.replay)),
    "an add that counts": ("open", lambda stand: stand.interrupt(stand.engine.accumulator, "_add", stand.open)),
}


@pytest.mark.parametrize("what", BREAKING)
def test_whatever_was_interrupted_only_discard_leads_out(stand, what):
    before, interrupt = BREAKING[what]
    stand = stand(State[before.upper()])
    interrupt(stand)
    assert stand.now is State.BROKEN
    for call in Call:
        with pytest.raises(WindowError, match=r"is broken: a call was interrupted, .*; drop its window by discard\(\)"):
            stand.call(call)
    stand.engine.discard()
    stand.engine.add(stand.of[2])
    assert float(stand.engine.step().norm) == pytest.approx(20**0.5)


def test_what_has_left_for_other_workers_is_not_changed_behind_the_engine():
    """The others have this worker's sum: it would hand back another one than they do."""
    gradients = [np.ones(3, np.float32), np.ones(2, np.float32)]

    def handed_back(exchange):
        engine = GradientEngine(LAYOUT, exchange=exchange, micro_batches=2)
        for value in (1, 3):
            engine.add([gradient * np.float32(value + exchange.rank) for gradient in gradients])
        add, add_part = engine.accumulator.add, engine.accumulator.add_non_block
        for change in (engine.accumulator.average, lambda: add_part("head", gradients[1]), lambda: add(gradients)):
            if exchange.rank == 0:
                with pytest.raises(WindowError, match="sent to the other ranks"):
                    change()
        return [array.tolist() for array in engine.step().gradients.values()]

    assert on_ranks(handed_back, 2) == [[[2.5] * 3, [2.5] * 2]] * 2


def test_a_broken_step_shows_no_views():
    engine = GradientEngine(LAYOUT)
    engine.accumulator.state.now = State.BROKEN
    with pytest.raises(WindowError, match="is broken"):
        engine.accumulator.views()
