"""What backward hides of an exchange, beside a clock that ticks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.plan.overlap import overlapped
from gradengine.plan.traffic import ALGORITHMS, Network
from gradengine.tensor_parallel_cost import Bandwidth

FAST = Bandwidth(1e18)

spans = st.lists(st.integers(1, 1 << 32), min_size=1, max_size=12)
workers = st.integers(1, 100)
bandwidths = st.floats(1e6, 1e12).map(Bandwidth)
latencies = st.floats(0, 1e-2)

shares_and_seconds = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=10)


def simulated(shares, backward, seconds, tail):
    """The same, span by span on a clock that ticks."""
    clock, waiting = 0.0, list(zip(shares, seconds, strict=True))
    while waiting:
        share, length = waiting[0]
        if clock < share * backward:
            clock = share * backward
            continue
        clock += length
        waiting.pop(0)
    return max(0.0, clock + tail - backward)


@given(shares_and_seconds, st.floats(0, 1000), st.floats(0, 10))
def test_what_is_exposed_is_what_a_clock_shows(pairs, backward, tail):
    shares = [*sorted(share for share, _ in pairs)[1:], 1.0]
    seconds = [length for _, length in pairs]
    found = overlapped(shares, backward, seconds, tail)
    assert found.exposed_seconds == pytest.approx(simulated(shares, backward, seconds, tail), abs=1e-6)


@given(shares_and_seconds, st.floats(0, 1000), st.floats(0, 10))
def test_exposed_is_part_of_the_exchange_and_at_least_what_cannot_be_hidden(pairs, backward, tail):
    shares = [*sorted(share for share, _ in pairs)[1:], 1.0]
    seconds = [length for _, length in pairs]
    found = overlapped(shares, backward, seconds, tail)
    assert 0 <= found.exposed_seconds <= found.seconds
    assert found.hidden_seconds >= 0
    assert found.exposed_seconds >= max(found.seconds - backward, seconds[-1] + tail) - 1e-6 * (
        1 + found.seconds + backward
    )


@given(spans, workers, latencies, st.floats(1e-3, 10), bandwidths, bandwidths)
def test_exposure_falls_as_bandwidth_rises(sizes, world, latency, backward, one, other):
    slow, fast = sorted((one, other), key=lambda bandwidth: bandwidth.bytes_per_second)
    shares = [(i + 1) / len(sizes) for i in range(len(sizes))]
    for algorithm in ALGORITHMS.values():
        found = []
        for bandwidth in (slow, fast):
            traffic = algorithm(sizes, world, Network(bandwidth, latency, FAST, FAST))
            found.append(overlapped(shares, backward, traffic.span_seconds, traffic.tail_seconds).exposed_seconds)
        assert found[1] <= found[0] * (1 + 1e-9) + 1e-9


def test_what_is_ready_at_the_end_is_not_hidden():
    assert overlapped([1.0, 1.0], 100.0, [2.0, 3.0], 0.5).exposed_seconds == 5.5


def test_by_hand():
    """Ready at 2, 4, 8, 10 of 10 s: sent 2-5, 5-6, 8-12, 12-13; and a tail of 1."""
    found = overlapped([0.2, 0.4, 0.8, 1.0], 10.0, [3.0, 1.0, 4.0, 1.0], 1.0)
    assert (found.seconds, found.exposed_seconds, found.hidden_seconds) == (10.0, 4.0, 6.0)


def test_without_a_backward_all_is_exposed():
    assert overlapped([0.5, 1.0], 0.0, [1.0, 2.0], 0.5).exposed_seconds == 3.5


def test_a_span_too_many_is_a_fault_of_the_program():
    with pytest.raises(ValueError, match="zip"):
        overlapped([1.0], 1.0, [1.0, 1.0], 0.0)
