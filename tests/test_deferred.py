"""Verdicts that come late: each bad step is told once, in whatever order word of it comes."""

from dataclasses import replace

import numpy as np
import pytest

from gradengine.deferred import DeferredErrors
from gradengine.engine import GradientEngine
from gradengine.errors import ExchangeError, NonFiniteGradient, WindowError
from gradengine.kernels import StepStatus
from gradengine.layout import GradientLayout

LAYOUT = GradientLayout.of({"w": (4,), "head": (2,)})


def verdict(step, bad_steps=0, bad_step=0, component=0, index=0):
    return StepStatus(step, 1.0, 1.0, 1.0, False, bad_steps, bad_step, component, index, float("inf"), 1)


class Device:
    """A readback that says what it is told to say: what has arrived, and what a wait would find."""

    def __init__(self):
        self.arrived, self.now, self.sent = [], verdict(0), 0

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
def device():
    return Device()


@pytest.fixture
def late(device):
    return DeferredErrors(device, LAYOUT)


def test_each_bad_step_is_told_once(device, late):
    assert told(late) is None
    device.arrived = [verdict(1), verdict(2, 1, 2, 1, 1), verdict(3, 1, 2, 1, 1)]
    assert told(late) is None
    error = told(late)
    assert (error.component, error.index, error.step, error.is_late) == ("head", 1, 1, True)
    assert told(late) is None
    assert late.latest() == verdict(3, 1, 2, 1, 1)
    assert told(late) is None


def test_a_weight_that_makes_no_divisor_is_told_once_whatever_passes(device):
    late = DeferredErrors(device, LAYOUT, raises=False)
    bad = replace(verdict(2), bad_weights=1, bad_weight_step=2, bad_weight=-3.0)
    device.arrived = [verdict(1), bad, replace(bad, step=3)]
    assert told(late) is None
    with pytest.raises(WindowError, match=r"the window of step 1 is out of range: zeros .*got -3 in all"):
        late.raise_pending()
    assert told(late) is None
    device.now = replace(bad, step=3)
    late.raise_of_step(0)
    with pytest.raises(WindowError, match=r"the window of step 1 is out of range"):
        late.raise_of_step(1)
    assert late.of_step(1) is None


def test_of_several_the_last_is_told(device, late):
    device.arrived = [verdict(5, 3, 4, 0, 2)]
    assert (told(late).step, late.latest().bad_steps) == (3, 3)


def test_word_that_is_older_than_what_was_read_tells_nothing_again(device, late):
    """check() has read two bad steps; the first one's verdict arrives alone, then the second one's."""
    device.now = verdict(2, 2, 2)
    assert late.of_step(1).step == 1
    device.arrived = [verdict(1, 1, 1), verdict(2, 2, 2)]
    assert told(late) is None
    assert told(late) is None
    device.arrived = [verdict(3, 3, 3)]
    assert told(late).step == 2


def test_another_steps_verdict_is_still_to_be_told(device, late):
    device.now = verdict(2, 1, 1)
    assert late.of_step(1) is None
    device.arrived = [verdict(2, 1, 1)]
    assert told(late).step == 0


def test_asking_twice_is_answered_twice(device, late):
    device.now = verdict(1, 1, 1)
    assert [late.of_step(0).step for _ in range(2)] == [0, 0]


def test_a_wait_finds_what_has_not_arrived(device, late):
    late._readback.read = lambda: verdict(4, 1, 3, 1, 1)
    late.wait()
    assert (told(late).step, told(late)) == (2, None)


def test_word_that_is_older_than_what_was_waited_for_is_not_the_latest(device, late):
    device.now = verdict(5)
    late.wait()
    device.arrived = [verdict(3), verdict(6)]
    assert [late.latest().step for _ in range(2)] == [5, 6]


def test_the_device_counts_from_where_the_engine_stands_and_is_told_only_where_it_does_not(device, late):
    told = []
    device.count_from = told.append
    assert late.note_queued(0) == 1
    for step in (1, 2, 5, 6):
        late.count_from(step)
    assert told == [5]
    late.count_from(3)
    assert told == [5, 3]


def test_a_step_that_is_dropped_may_have_been_made_where_it_was_queued(device, late):
    device.count_from = lambda step: None
    assert not late.drop(0)
    late.count_from(0)
    assert late.drop(0)
    late.note_queued(1)
    assert [late.drop(2), late.drop(1)] == [False, False]


def test_after_a_step_was_dropped_the_device_s_count_is_set_anew(device, late):
    told = []
    device.count_from = told.append
    late.note_queued(0)
    late.drop(0)
    late.count_from(1)
    assert told == [1]


def test_what_a_check_has_raised_is_told(device, late):
    device.now = verdict(2, 1, 2)
    late.raise_of_step(0)
    with pytest.raises(NonFiniteGradient):
        late.raise_of_step(1)
    device.arrived = [verdict(2, 1, 2)]
    assert told(late) is None


def test_the_device_counts_steps_from_one_on(device, late):
    """0 is no step: it stands for none that was bad, and for a graph's own count."""
    assert [late.note_queued(step) for step in (0, 1, 5)] == [1, 2, 6]


def test_sending(device, late):
    assert late.exist
    late.send()
    assert device.sent == 1


def test_on_the_cpu_there_are_none():
    late = GradientEngine(LAYOUT)._late
    late.send()
    assert (late.exist, late.latest(), told(late)) == (False, None, None)


FAULTS = {
    4 * 3 + 1: (ExchangeError, "step 1 was skipped on all ranks: rank 3 was in another step than rank 0; a window was"),
    4 * 70000 + 2: (
        ExchangeError,
        "rank 70000 had another loss scale, or other settings, than rank 0; set the same",
    ),
    3: (WindowError, "step 1 was skipped on all ranks: none of them had a micro-batch; add"),
    0: (WindowError, "the weight of the window of step 1 is out of range: zeros were handed back: got nan in all"),
}


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_ranks_did_not_agree_on_is_told_once_whatever_is_done_with_values(device, fault, raises):
    late = DeferredErrors(device, LAYOUT, raises=raises)
    told = float(np.uint64(0x7FF8 << 48 | fault).view(np.float64))
    bad = replace(verdict(2), bad_weights=1, bad_weight_step=2, bad_weight=told)
    kind, words = FAULTS[fault]
    device.arrived, device.now = [bad], bad
    with pytest.raises(kind, match=words):
        late.raise_pending()
    late.raise_pending()
    with pytest.raises(kind, match=words):
        late.raise_of_step(1)
