"""What each algorithm sends, beside counts by hand, and by playing it."""

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine import GradientLayout
from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES
from gradengine.exchange.linked import DEFAULT_SHARE_BYTES
from gradengine.exchange.shares import shares_of
from gradengine.plan.models import NAMED, load_model
from gradengine.plan.traffic import (
    ALGORITHMS,
    SOCKETS,
    SUMMED,
    Network,
    nccl,
    ordered,
    overlapped,
    ready_shares,
    ring,
    span_bytes,
    star,
)
from gradengine.tensor_parallel_cost import Bandwidth

ROOT = Path(__file__).parent.parent
FAST = Bandwidth(1e18)
LAYOUT = GradientLayout.transformer(4, 64, 32, 128, 512)
SPANS = span_bytes(LAYOUT)

spans = st.lists(st.integers(1, 1 << 32), min_size=1, max_size=12)
workers = st.integers(1, 100)
bandwidths = st.floats(1e6, 1e12).map(Bandwidth)
latencies = st.floats(0, 1e-2)


def network(bandwidth=1e9, latency=0.0, sockets=FAST):
    return Network(Bandwidth(bandwidth), latency, sockets, FAST)


# ---- bytes ----


def test_spans_travel_with_their_padding_in_backward_order():
    assert sum(SPANS) == LAYOUT.nbytes
    assert [span.key for span in LAYOUT.spans] == ["lm_head", "final_norm", 3, 2, 1, 0, "embedding"]
    assert SPANS[1] == 4 * 64


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_worker_sends_nothing(algorithm):
    traffic = ALGORITHMS[algorithm](SPANS, 1, network(latency=1.0))
    assert (traffic.busiest_link_bytes, traffic.total_bytes, traffic.messages, traffic.seconds) == (0, 0, 0, 0)


@pytest.mark.parametrize("algorithm", sorted({*ALGORITHMS} - {"star"}))
def test_two_workers_send_each_other_the_set_whatever_the_algorithm(algorithm):
    traffic = ALGORITHMS[algorithm](SPANS, 2, network())
    assert traffic.busiest_link_bytes == traffic.other_link_bytes == LAYOUT.nbytes
    assert traffic.total_bytes == 2 * LAYOUT.nbytes


def test_the_known_model_over_four_workers():
    sizes = span_bytes(load_model("350m").layout())
    found = {name: algorithm(sizes, 4, network()) for name, algorithm in ALGORITHMS.items()}
    assert found["star"].busiest_link_bytes == 4 * 1594036224
    assert found["star"].other_link_bytes == 1594036224
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


def ring_messages(world):
    """A ring, message by message: W - 1 rounds that reduce, W - 1 that gather."""
    for step, rank in itertools.product(range(2 * (world - 1)), range(world)):
        yield rank, (rank + 1) % world, (rank - step) % world


def ordered_messages(world):
    """Each rank sends its part of chunk c to rank c, which sends the sum to all."""
    for source, target in itertools.permutations(range(world), 2):
        yield source, target, target
        yield source, target, source


@pytest.mark.parametrize(("algorithm", "messages"), [(ring, ring_messages), (ordered, ordered_messages)])
@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_even_algorithms_send_what_playing_them_sends(algorithm, messages, world):
    sends = list(messages(world))
    out, into = played(world, [100] * world, sends)
    traffic = algorithm([100 * world], world, network())
    assert set(out) == set(into) == {traffic.busiest_link_bytes}
    assert sum(out) == traffic.total_bytes
    assert len(sends) == world * traffic.messages


# Two spans of whole chunks, so that nothing of the exchange's own cut is smaller than what is counted here.
CUT = GradientLayout.of({"layers.0.w": (1 << 24,), "layers.1.w": (1 << 23,)})


def shares_sent(shares, world):
    """A message of each rank to each share's owner, unless that is itself, and of the owner to each other rank."""
    for share in shares:
        for rank in {*range(world)} - {share.owner}:
            yield rank, share.owner, share.number
            yield share.owner, rank, share.number


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ordered_sends_what_the_shares_of_the_exchange_send(world):
    shares = shares_of(CUT, world, world * DEFAULT_SHARE_BYTES)
    sends = list(shares_sent(shares, world))
    out, into = played(world, [4 * share.size for share in shares], sends)
    traffic = ordered(span_bytes(CUT), world, network())
    assert set(out) == set(into) == {traffic.busiest_link_bytes} == {traffic.other_link_bytes}
    assert sum(out) == traffic.total_bytes
    assert sum(source == 0 for source, _, _ in sends) == traffic.messages


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_the_star_sends_what_the_shares_of_a_server_send(world):
    shares = shares_of(CUT, world, DEFAULT_BUCKET_BYTES, owner=world)
    sends = list(shares_sent(shares, world))
    out, into = played(world + 1, [4 * share.size for share in shares], sends)
    traffic = star(span_bytes(CUT), world, network())
    assert out[world] == into[world] == traffic.busiest_link_bytes == max(out)
    assert out[0] == into[0] == traffic.other_link_bytes == min(out)
    assert sum(out) == traffic.total_bytes
    assert sum(source == world for source, _, _ in sends) == traffic.messages


@given(spans, st.integers(2, 100))
def test_links_between_ranks_carry_what_a_rings_do_and_less_than_a_servers(sizes, world):
    found = {name: ALGORITHMS[name](sizes, world, network()).busiest_link_bytes for name in ("ordered", "ring", "star")}
    assert found["ordered"] == found["ring"] < found["star"]


@given(spans, st.integers(2, 100), bandwidths, latencies)
def test_no_link_carries_more_than_the_busiest_nor_all_more_than_there_are_links(sizes, world, bandwidth, latency):
    for name, algorithm in ALGORITHMS.items():
        traffic = algorithm(sizes, world, Network(bandwidth, latency, FAST, FAST))
        assert traffic.other_link_bytes <= traffic.busiest_link_bytes <= traffic.total_bytes
        assert traffic.total_bytes <= (world + (name == "star")) * traffic.busiest_link_bytes
        assert traffic.total_bytes == 2 * (world - (name != "star")) * sum(sizes)


# ---- seconds ----


def test_the_star_takes_what_the_servers_link_takes_and_its_last_bucket_once_more():
    sizes = [10 * DEFAULT_BUCKET_BYTES, 3 * DEFAULT_BUCKET_BYTES + 100]
    traffic = star(sizes, 3, network(1e6, latency=0.5))
    assert traffic.seconds == pytest.approx(3 * (sum(sizes) + 100) / 1e6 + 4 * 0.5)


def test_ordered_takes_what_a_ranks_link_takes_and_three_messages():
    """The last part, its sum, and what the ranks tell each other."""
    traffic = ordered([10**6, 10**3], 4, network(1e6, latency=0.5))
    assert traffic.seconds == pytest.approx(1.5 * 1.001 + 3 * 0.5)


def test_sums_are_added_to_what_they_limit():
    """10^9 bytes of 3 workers at 20 GB/s: a rank sums 3 parts of a third, a server 3 of all."""
    sums = Network(FAST, 0.0, FAST, Bandwidth.gigabytes(20))
    assert ordered([10**9], 3, sums).seconds == pytest.approx(0.05)
    assert star([10**9], 3, sums).seconds == pytest.approx(0.15)
    for others in (ring, nccl):
        assert others([10**9], 3, sums) == others([10**9], 3, network(1e18))


def test_what_limits_a_process_is_what_was_recorded():
    """The defaults are in the range of the run of bench/plan_check.py, and no more than a third from its median."""
    kept = json.loads((ROOT / "bench/results/cpu-2core-plan.json").read_text())["rates"]
    sockets = [rates["tcp"] / 2 for rates in kept]
    summed = [rates["sum"] for rates in kept]
    for default, found in ((SOCKETS, sockets), (SUMMED, summed)):
        assert min(found) <= default.bytes_per_second <= max(found)
        assert default.bytes_per_second == pytest.approx(statistics.median(found), rel=0.34)


def test_sockets_limit_what_is_ours():
    slow = network(1e9, sockets=Bandwidth(1e6))
    assert star([10**6], 2, slow).seconds == pytest.approx(4.0)  # the last bucket is all of it
    assert ordered([10**6], 2, slow).seconds == pytest.approx(1.0)
    assert ring([10**6], 2, slow).seconds == pytest.approx(1e-3)


def test_a_rings_messages_wait_for_each_other_in_every_span():
    traffic = ring([4, 4, 4], 5, network(1e18, latency=1e-3))
    assert traffic.latency_steps == 3 * 8 + 1
    assert traffic.seconds == pytest.approx(25e-3)


@given(st.integers(2, 1 << 20))
def test_a_tree_is_as_deep_as_a_binary_tree(world):
    assert nccl([1], world, network(1e18, latency=1.0)).latency_steps == 2 * math.ceil(math.log2(world)) + 1


@pytest.mark.parametrize(("world", "messages"), [(2, 2), (4, 4), (64, 4)])
def test_a_rank_of_two_trees_sends_half_a_span_to_each_parent_and_child(world, messages):
    traffic = nccl([1 << 10], world, network(1e12, latency=1.0))
    assert traffic.messages == messages
    assert traffic.busiest_link_bytes == messages * (1 << 9)


def test_nccl_takes_the_tree_where_latency_counts_and_the_ring_where_bytes_do():
    small, large = (nccl([nbytes], 64, network(1e9, latency=1e-5)) for nbytes in (1 << 10, 1 << 32))
    assert (small.latency_steps, small.busiest_link_bytes) == (12 + 1, 2 << 10)
    assert large.latency_steps == 126 + 1
    assert large.busiest_link_bytes == (1 << 32) * 126 // 64


@given(spans, workers, bandwidths, latencies)
def test_nccl_is_never_slower_than_a_ring(sizes, world, bandwidth, latency):
    given_network = Network(bandwidth, latency, FAST, FAST)
    assert nccl(sizes, world, given_network).seconds <= ring(sizes, world, given_network).seconds * (1 + 1e-9)


# ---- when spans are ready ----


def test_spans_are_ready_in_order_and_the_last_at_the_end():
    shares = ready_shares(LAYOUT)
    assert shares == sorted(shares)
    assert shares[0] == 512 * 64 / (LAYOUT.num_elements - 512 * 64)
    assert shares[-1] == 1.0


def test_an_embedding_takes_no_time():
    assert ready_shares(LAYOUT)[-2:] == [1.0, 1.0]


def test_a_tied_head_is_ready_at_the_end_and_holds_the_others_up():
    layout = GradientLayout.transformer(4, 64, 32, 128, 512, embedding=False)
    assert ready_shares(layout, tied=True)[0] == 1.0
    assert ready_shares(layout)[0] < 0.5
    seconds = [1e-3] * len(layout.spans)
    held, free = (
        overlapped(ready_shares(layout, tied=tied), 1.0, seconds, 0.0).exposed_seconds for tied in (True, False)
    )
    assert held == pytest.approx(sum(seconds))
    assert free == pytest.approx(1e-3)


def test_a_tied_head_that_is_named_first_leaves_last():
    """What the plan advises: then the blocks are not held up."""
    names = ["lm_head", *(f"blocks.{i}.w" for i in range(4)), "final_norm"]
    layout = GradientLayout.of(dict.fromkeys(names, (64,)))
    assert [span.key for span in layout.spans] == ["final_norm", 3, 2, 1, 0, "lm_head"]
    assert ready_shares(layout, tied=True) == [pytest.approx((i + 1) / 6) for i in range(6)]


def test_nothing_to_multiply_is_ready_at_the_end():
    assert ready_shares(GradientLayout.of({"embedding": (4, 4)})) == [1.0]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_span_of_every_model_has_its_share(name, tp):
    layout = load_model(name).layout(tp)
    shares = ready_shares(layout)
    assert len(shares) == len(layout.spans)
    assert 0 < shares[0] < shares[2] < 1
    assert shares == sorted(shares)


# ---- what backward hides ----

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
