"""The interleaver and the host's samples against a clock of its own."""

import gc

import pytest

from gradengine.bench.device import Case, Sample, open_host
from gradengine.bench.harness import interleave, median_ratio
from gradengine.errors import CallerError


class FakeClock:
    """Time passes only where a case says so."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def __call__(self):
        return self.now

    def case(self, variant, seconds, prepare=0.0):
        durations = iter(seconds)

        def run():
            assert not gc.isenabled()
            self.order.append(variant)
            self.now += next(durations)

        def put_back():
            self.now += prepare

        return Case(run, error=lambda: 0.0, prepare=put_back)


def timed(clock, cases, rounds, warm_up=1):
    host = open_host(1)
    host.clock, host.rest, host.work = clock, 0.0, 0.0
    samples = interleave(cases, rounds, host.sample, warm_up=warm_up)
    assert all(len(set(sample)) == 1 for series in samples for sample in series)  # on the host all three are one
    return [[sample.wall for sample in series] for series in samples]


def test_cases_run_in_turn_and_the_warm_up_is_dropped():
    clock = FakeClock()
    cases = [clock.case("a", [9, 1, 2]), clock.case("b", [9, 3, 4])]
    assert timed(clock, cases, rounds=2) == [[1, 2], [3, 4]]
    assert clock.order == ["a", "b"] * 3
    assert gc.isenabled()


def test_preparation_is_not_timed():
    clock = FakeClock()
    assert timed(clock, [clock.case("a", [1, 1], prepare=100)], rounds=1) == [[1]]


def test_a_machine_that_slows_down_changes_no_ratio():
    clock = FakeClock()
    speed = [1, 1, 5, 25, 125]
    ours, peer = clock.case("ours", speed), clock.case("peer", [2 * s for s in speed])
    base, times = timed(clock, [ours, peer], rounds=4)
    assert median_ratio(times, base) == 2


def test_the_median_of_ratios_is_taken_pair_by_pair():
    assert median_ratio([3, 10, 4], [1, 5, 2]) == 2
    assert median_ratio([1, 100], [1, 1]) == 50.5


def test_the_collector_comes_back_after_a_failure():
    def fail(case):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        interleave([Case(lambda: None, error=lambda: 0.0)], 1, fail, warm_up=1)
    assert gc.isenabled()


def test_no_round_is_refused():
    with pytest.raises(CallerError, match="got 0, expected at least 1"):
        interleave([], 0, lambda case: Sample(1, 1, 1), warm_up=1)
