"""What each algorithm sends, beside counts by hand, and by playing it; what backward hides of it."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine import GradientLayout
from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES
from gradengine.exchange.linked import DEFAULT_SHARE_BYTES
from gradengine.exchange.shares import shares_of
from gradengine.layout.cost import Bandwidth
from gradengine.plan.models import load_model
from gradengine.plan.traffic import (
    ALGORITHMS,
    Network,
    nccl,
    ordered,
    overlapped,
    ready_shares,
    ring,
    span_bytes,
    star,
)

FAST = Bandwidth(1e18)
LAYOUT = GradientLayout.transformer(4, 64, 32, 128, 512)
SPANS = span_bytes(LAYOUT)

spans = st.lists(st.integers(1, 1 << 32), min_size=1, max_size=12)
workers = st.integers(2, 100)
bandwidths = st.floats(1e6, 1e12)
latencies = st.floats(0, 1e-2)


def network(bandwidth=1e9, latency=0.0, sockets=FAST, sums=FAST):
    return Network(Bandwidth(bandwidth), latency, sockets, sums)


# ---- bytes ----


def test_spans_travel_with_their_padding_in_backward_order():
    assert (sum(SPANS), SPANS[1]) == (LAYOUT.nbytes, 4 * 64)


def test_one_worker_sends_nothing_and_two_send_each_other_the_set():
    for name, algorithm in ALGORITHMS.items():
        alone = algorithm(SPANS, 1, network(latency=1.0))
        assert (alone.busiest_link_bytes, alone.total_bytes, alone.messages, alone.seconds) == (0, 0, 0, 0)
        two = algorithm(SPANS, 2, network())
        assert two.busiest_link_bytes == LAYOUT.nbytes * (2 if name == "star" else 1)
        assert two.other_link_bytes == LAYOUT.nbytes


def test_the_known_model_over_four_workers():
    sizes = span_bytes(load_model("350m").layout())
    found = {name: algorithm(sizes, 4, network()) for name, algorithm in ALGORITHMS.items()}
    assert found["star"].busiest_link_bytes == 4 * found["star"].other_link_bytes == 4 * 1594036224
    assert found["ring"].busiest_link_bytes == found["ordered"].busiest_link_bytes == 1594036224 * 3 // 2
    assert {name: traffic.total_bytes // 1594036224 for name, traffic in found.items()} == {
        "ordered": 6, "star": 8, "ring": 6, "nccl": 6
    }  # fmt: skip


def played(world, chunks, sends):
    """Bytes that each rank sends and receives, of messages (source, target, chunk)."""
    out, into = [0] * world, [0] * world
    for source, target, chunk in sends:
        out[source] += chunks[chunk]
        into[target] += chunks[chunk]
    return out, into


@pytest.mark.parametrize("world", [2, 3, 7])
def test_a_ring_sends_what_playing_it_sends(world):
    """Message by message: W - 1 rounds that reduce, W - 1 that gather."""
    rounds = itertools.product(range(2 * (world - 1)), range(world))
    sends = [(rank, (rank + 1) % world, (rank - step) % world) for step, rank in rounds]
    out, into = played(world, [100] * world, sends)
    traffic = ring([100 * world], world, network())
    assert set(out) == set(into) == {traffic.busiest_link_bytes}
    assert (sum(out), len(sends)) == (traffic.total_bytes, world * traffic.messages)


# Two spans of whole chunks, so that nothing of the exchange's own cut is smaller than what is counted here.
CUT = GradientLayout.of({"layers.0.w": (1 << 24,), "layers.1.w": (1 << 23,)})


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("is_served", [False, True])
def test_ours_send_what_the_shares_of_the_exchange_send(world, is_served):
    """A message of each rank to each share's owner, unless that is itself, and of the owner to each other rank."""
    if is_served:
        shares = shares_of(CUT, world, DEFAULT_BUCKET_BYTES, owner=world)
    else:
        shares = shares_of(CUT, world, world * DEFAULT_SHARE_BYTES)
    pairs = [(share, rank) for share in shares for rank in range(world) if rank != share.owner]
    sends = [message for s, rank in pairs for message in ((rank, s.owner, s.number), (s.owner, rank, s.number))]
    out, into = played(world + is_served, [4 * share.size for share in shares], sends)
    traffic = (star if is_served else ordered)(span_bytes(CUT), world, network())
    assert out == into
    assert (max(out), min(out), sum(out)) == (
        traffic.busiest_link_bytes,
        traffic.other_link_bytes,
        traffic.total_bytes,
    )
    assert sum(source == (world if is_served else 0) for source, _, _ in sends) == traffic.messages


@given(spans, workers, bandwidths, latencies)
def test_no_link_carries_more_than_the_busiest_nor_all_more_than_there_are_links(sizes, world, bandwidth, latency):
    found = {name: algorithm(sizes, world, network(bandwidth, latency)) for name, algorithm in ALGORITHMS.items()}
    for name, traffic in found.items():
        assert traffic.other_link_bytes <= traffic.busiest_link_bytes <= traffic.total_bytes
        assert traffic.total_bytes <= (world + (name == "star")) * traffic.busiest_link_bytes
        assert traffic.total_bytes == 2 * (world - (name != "star")) * sum(sizes)
    assert found["ordered"].busiest_link_bytes == found["ring"].busiest_link_bytes < found["star"].busiest_link_bytes
    assert dataclasses.replace(found["nccl"], span_seconds=found["ordered"].span_seconds) == found["ordered"]
    assert found["nccl"].seconds <= found["ordered"].seconds * (1 + 1e-9)


# ---- seconds ----


def test_seconds_by_hand():
    """A server's link carries all, and its last bucket once more; a rank's its part, and three messages after it."""
    sizes = [10 * DEFAULT_BUCKET_BYTES, 3 * DEFAULT_BUCKET_BYTES + 100]
    assert star(sizes, 3, network(1e6, latency=0.5)).seconds == pytest.approx(3 * (sum(sizes) + 100) / 1e6 + 4 * 0.5)
    assert ordered([10**6, 10**3], 4, network(1e6, latency=0.5)).seconds == pytest.approx(1.5 * 1.001 + 3 * 0.5)
    rounds = ring([4, 4, 4], 5, network(1e18, latency=1e-3))
    assert (rounds.latency_steps, rounds.seconds) == (3 * 8 + 1, pytest.approx(25e-3))


def test_a_process_s_sums_and_sockets_limit_what_is_ours_alone():
    """10^9 bytes of 3 workers at 20 GB/s: a rank sums 3 parts of a third, a server 3 of all."""
    sums, slow = network(1e18, sums=Bandwidth.gigabytes(20)), network(1e9, sockets=Bandwidth(1e6))
    assert ordered([10**9], 3, sums).seconds == pytest.approx(0.05)
    assert star([10**9], 3, sums).seconds == pytest.approx(0.15)
    assert star([10**6], 2, slow).seconds == pytest.approx(4.0)  # the last bucket is all of it
    assert ordered([10**6], 2, slow).seconds == pytest.approx(1.0)
    for others in (ring, nccl):
        assert others([10**9], 3, sums) == others([10**9], 3, network(1e18))
        assert others([10**6], 2, slow).seconds == pytest.approx(1e-3)


# ---- when spans are ready ----


def test_spans_are_ready_in_order_and_an_embedding_takes_no_time():
    shares = ready_shares(LAYOUT)
    assert shares == sorted(shares)
    assert shares[0] == 512 * 64 / (LAYOUT.num_elements - 512 * 64)
    assert (shares[-2:], len(shares)) == ([1.0, 1.0], len(LAYOUT.spans))
    assert ready_shares(GradientLayout.of({"embedding": (4, 4)})) == [1.0]


def test_a_tied_head_is_ready_at_the_end_and_one_that_is_named_first_leaves_last():
    layout = GradientLayout.transformer(4, 64, 32, 128, 512, embedding=False)
    assert ready_shares(layout, tied=True)[0] == 1.0
    assert ready_shares(layout)[0] < 0.5
    names = ["lm_head", *(f"blocks.{i}.w" for i in range(4)), "final_norm"]
    advised = GradientLayout.of(dict.fromkeys(names, (64,)))
    assert ready_shares(advised, tied=True) == pytest.approx([(i + 1) / 6 for i in range(6)])


# ---- what backward hides ----


def simulated(shares, backward, seconds, tail):
    """The same, span by span on a clock that ticks."""
    clock = 0.0
    for share, length in zip(shares, seconds, strict=True):
        if clock < share * backward:
            clock = share * backward
        clock += length
    return max(0.0, clock + tail - backward)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=10),
    st.floats(0, 1000),
    st.floats(0, 10),
)
def test_what_is_exposed_is_what_a_clock_shows(pairs, backward, tail):
    shares, seconds = [*sorted(share for share, _ in pairs)[1:], 1.0], [length for _, length in pairs]
    found = overlapped(shares, backward, seconds, tail)
    assert found.exposed_seconds == pytest.approx(simulated(shares, backward, seconds, tail), abs=1e-6)
    assert 0 <= found.exposed_seconds <= found.seconds == pytest.approx(sum(seconds) + tail)
    assert found.hidden_seconds == pytest.approx(found.seconds - found.exposed_seconds)


def test_by_hand():
    """Ready at 2, 4, 8, 10 of 10 s: sent 2-5, 5-6, 8-12, 12-13; and a tail of 1."""
    found = overlapped([0.2, 0.4, 0.8, 1.0], 10.0, [3.0, 1.0, 4.0, 1.0], 1.0)
    assert (found.seconds, found.exposed_seconds, found.hidden_seconds) == (10.0, 4.0, 6.0)
    assert overlapped([0.5, 1.0], 0.0, [1.0, 2.0], 0.5).exposed_seconds == 3.5
    assert math.isclose(overlapped([1.0, 1.0], 100.0, [2.0, 3.0], 0.5).exposed_seconds, 5.5)
