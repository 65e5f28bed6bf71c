"""Verdicts that come late: each bad step is told once, in whatever order word of it comes, and no window is lost."""

import numpy as np
import pytest
from devices import all_on_host, bits_of, number_of, put_all, synchronize

from gradengine.engine import GradientEngine
from gradengine.engine.result import DeferredErrors
from gradengine.errors import ExchangeError, NonFiniteGradient, WindowError
from gradengine.kernels import StepStatus
from gradengine.layout import GradientLayout

LAYOUT = GradientLayout.of({"w": (4,), "head": (2,)})


def verdict(step, bad_steps=0, bad_step=0, component=0, index=0):
    return StepStatus(1.0, step, bad_step, bad_steps, component, index, 1, bad_value=float("inf"))


class Device:
    """A readback that says what it is told to say: what has arrived, what a wait would find; and notes what it gets."""

    def __init__(self):
        self.arrived, self.now, self.sent, self.counted_from = [], verdict(0), 0, []
        self.count_from = self.counted_from.append

    def newest(self):
        return self.arrived.pop(0) if self.arrived else None

    def read(self):
        return self.now

    def send(self):
        self.sent += 1


def told(late):
    """The error that whoever calls next is told, or None."""
    try:
        late.raise_pending()
    except NonFiniteGradient as error:
        return error
    return None


@pytest.fixture
def device_said():
    return Device()


@pytest.fixture
def late(device_said):
    return DeferredErrors(device_said, LAYOUT, raises=True)


def test_each_bad_step_is_told_once_and_of_several_the_last(device_said, late):
    device_said.arrived = [verdict(1), verdict(2, 1, 2, 1, 1), verdict(3, 1, 2, 1, 1), verdict(6, 3, 5, 0, 2)]
    found = [told(late) for _ in range(6)]
    assert [error and (error.component, error.index, error.step, error.is_late) for error in found] == [
        *(None, ("head", 1, 1, True), None, ("w", 2, 4, True), None, None)
    ]
    assert late.latest() == verdict(6, 3, 5, 0, 2)


def test_word_that_is_older_than_what_was_read_tells_nothing_again(device_said, late):
    """check() has read two bad steps; the first one's verdict arrives alone, then the second one's."""
    device_said.now = verdict(2, 2, 2)
    assert [late.of_step(1).step for _ in range(2)] == [1, 1]  # as often as one asks
    device_said.arrived = [verdict(1, 1, 1), verdict(2, 2, 2), verdict(3, 3, 3)]
    assert [told(late), told(late), told(late).step] == [None, None, 2]


def test_another_steps_verdict_is_still_to_be_told(device_said, late):
    device_said.now = verdict(2, 1, 1)
    assert late.of_step(1) is None
    late.wait()
    assert (told(late).step, told(late)) == (0, None)


def test_of_a_step_before_the_last_bad_one_it_is_known_only_whether_that_was_the_only_one(device_said, late):
    device_said.now = verdict(4, 1, 3)
    assert late.of_step(1) is None
    device_said.now = verdict(4, 2, 3)
    for ask in (late.of_step, late.raise_of_step):
        with pytest.raises(WindowError, match="step 1 was finite is no longer known"):
            ask(1)


def test_word_that_is_older_than_what_was_waited_for_is_not_the_latest(device_said, late):
    device_said.now = verdict(5)
    late.wait()
    device_said.arrived = [verdict(3), verdict(6)]
    assert [late.latest().step for _ in range(2)] == [5, 6]


def test_what_a_check_has_raised_is_told(device_said, late):
    device_said.now = verdict(2, 1, 2)
    late.raise_of_step(0)
    with pytest.raises(NonFiniteGradient):
        late.raise_of_step(1)
    device_said.arrived = [verdict(2, 1, 2)]
    assert told(late) is None


def test_the_device_counts_from_one_and_is_told_only_where_it_does_not_know(device_said, late):
    assert [late.note_queued(step) for step in (1, 5, 0)] == [2, 6, 1]  # 0 stands for none that was bad
    for step in (1, 2, 5, 6, 3):
        late.count_from(step)
    assert device_said.counted_from == [5, 3]


def test_a_step_that_is_dropped_may_have_been_made_where_it_was_queued(device_said, late):
    assert not late.drop(0)
    late.count_from(0)
    assert late.drop(0)
    late.note_queued(1)
    assert [late.drop(2), late.drop(1)] == [False, False]
    late.count_from(2)  # set anew, whatever the number
    assert device_said.counted_from == [0, 2]


def test_on_the_cpu_there_are_none():
    engine = GradientEngine(LAYOUT)
    engine.add([np.ones(slot.shape, np.float32) for slot in LAYOUT.slots])
    engine.step()
    engine.check()
    assert engine.latest_verdict is None


FAULTS = {
    None: (WindowError, r"step 1 .*weight .*out of range: got -3 in all"),
    0: (WindowError, "step 1 .*weight .*out of range: got nan in all"),
    5 * 3 + 1: (ExchangeError, "step 1 .*rank 3 was in another step"),
    5 * 70000 + 2: (ExchangeError, "rank 70000 .*loss scale"),
    5 * 7 + 4: (ExchangeError, "rank 7 .*max_norm"),
    3: (WindowError, "step 1 .*none of them had a micro-batch"),
}


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_makes_no_divisor_is_told_once_whatever_is_done_with_values(device_said, fault, raises):
    late, (kind, words) = DeferredErrors(device_said, LAYOUT, raises=raises), FAULTS[fault]
    weight = -3.0 if fault is None else float(np.uint64(0x7FF8 << 48 | fault).view(np.float64))
    bad = verdict(2)._replace(bad_weights=1, bad_weight_step=2, bad_weight=weight)
    device_said.arrived, device_said.now = [verdict(1), bad, bad._replace(step=3)], bad._replace(step=3)
    late.raise_pending()
    with pytest.raises(kind, match=words):
        late.raise_pending()
    late.raise_pending()
    late.raise_of_step(0)
    with pytest.raises(kind, match=words):
        late.raise_of_step(1)
    assert late.of_step(1) is None


# ---- on a device ----


def gradients_of(device, bad_at=None, value=1.0):
    found = [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots]
    if bad_at is not None:
        found[0][bad_at] = np.nan
    return put_all(device, found)


def new_engine(device, **options):
    return GradientEngine(LAYOUT, device.kernels, **{"max_norm": 1.0, **options})


def stepped(engine, gradients):
    engine.add(gradients)
    return engine.step()


def loop(engine, device, steps, bad, then=3):
    """A training loop, and then good steps that are each waited for; (step, index) of each error."""
    found, step, begun = [], engine.current_step, engine.current_step
    while step < begun + steps + then:
        if step >= begun + steps:
            synchronize(device)
        try:
            if not engine.accumulator.accumulated_count:
                engine.add(gradients_of(device, step % 3 if step in bad else None))
            step = engine.step().step + 1
        except NonFiniteGradient as error:
            found.append((error.step, error.index))
    return found


@pytest.mark.parametrize("call", ["add", "add_block", "add_non_block", "micro_batch", "step", "check"])
def test_the_next_call_raises_once_and_takes_nothing(device, call):
    layout = GradientLayout.of({"layers.0.w": (4,), "head": (2,)})
    engine, (w, head) = GradientEngine(layout, device.kernels, max_norm=1.0), gradients_of(device)
    result = stepped(engine, gradients_of(device, 2))
    assert number_of(result.skipped) == 1
    assert not any(array.any() for array in all_on_host(result.gradients).values())
    synchronize(device)
    calls = {
        "add": lambda: engine.add([w, head]),
        "add_block": lambda: engine.add_block(0, [w]),
        "add_non_block": lambda: engine.add_non_block("head", head),
        "micro_batch": engine.micro_batch,
        "step": engine.step,
        "check": engine.check,
    }
    with pytest.raises(NonFiniteGradient) as caught:
        calls[call]()
    error = caught.value
    assert (error.component, error.index, error.step, error.is_late) == ("layers.0.w", 2, 0, True)
    assert (engine.accumulator.accumulated_count, engine.current_step) == (0, 1)
    wanted = stepped(GradientEngine(layout, device.kernels, max_norm=1.0), [w, head])
    assert bits_of(stepped(engine, [w, head])) == bits_of(wanted)
    engine.check()


@pytest.mark.usefixtures("lazy")
def test_a_step_that_raises_keeps_its_window(emulated):
    engine, good = new_engine(emulated, hold=2), gradients_of(emulated)
    stepped(engine, gradients_of(emulated, 1))
    engine.add(good)  # the verdict has not come yet
    synchronize(emulated)
    with pytest.raises(NonFiniteGradient):
        engine.step()
    assert (engine.accumulator.accumulated_count, engine.current_step) == (1, 1)
    result = engine.step()
    assert (result.step, bits_of(result)) == (1, bits_of(stepped(new_engine(emulated), good)))


@pytest.mark.usefixtures("lazy")
def test_check_of_a_good_step_hides_no_bad_one_of_which_the_last_is_named(emulated):
    engine = new_engine(emulated)
    batches = [gradients_of(emulated, index) for index in (0, 2, None)]
    synchronize(emulated)
    for batch in batches[:2]:
        stepped(engine, batch)
    stepped(engine, batches[2]).check()
    assert loop(engine, emulated, 0, ()) == [(1, 2)]
    assert (engine.latest_verdict.bad_steps, engine.latest_verdict.bad_step) == (2, 2)


@pytest.mark.parametrize("policy", ["raise", "skip", "propagate"])
def test_however_far_the_host_runs_ahead_none_is_lost(device, policy):
    """More steps than verdicts can be under way; whoever is bad is raised once at most, the last one surely."""
    engine, bad = new_engine(device, on_non_finite=policy), {1, 2, 5, 6, 7, 11}
    engine.check()
    found = loop(engine, device, 14, bad)
    engine.check()
    assert (engine.latest_verdict.bad_steps, engine.latest_verdict.bad_step) == (len(bad), 11 + 1)
    assert found == sorted(set(found))
    assert found[-1:] == ([(11, 11 % 3)] if policy == "raise" else [])
    assert {step for step, _ in found} <= bad


def test_the_latest_verdict_comes_without_waiting(device):
    engine = new_engine(device, max_norm=0.5)
    assert engine.latest_verdict is None
    result = stepped(engine, gradients_of(device))
    synchronize(device)
    found = engine.latest_verdict
    assert (found.step, found.skipped, found.bad_steps) == (1, False, 0)
    assert [found.norm, found.scale, found.factor] == [number_of(n) for n in (result.norm, result.scale, result.factor)]
    assert engine.latest_verdict == found
