"""What each transport sends, beside counts by hand, and by playing it; what backward hides of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine import GradientLayout
from gradengine.exchange.exchange import DEFAULT_SHARE_BYTES
from gradengine.exchange.server import DEFAULT_BUCKET_BYTES
from gradengine.exchange.shares import shares_of
from gradengine.plan.models import load_model
from gradengine.plan.traffic import ready_seconds, traffic_of

LAYOUT = GradientLayout.transformer(4, 64, 32, 128, 512)
# Two spans of whole chunks, so that nothing of the exchange's own cut is smaller than what is counted here.
CUT = GradientLayout.of({"layers.0.w": (1 << 24,), "layers.1.w": (1 << 23,)})


def traffic(layout=LAYOUT, workers=2, rate=1e9, backward=0.0, *, served=False):
    return traffic_of(layout, workers, rate, ready_seconds(layout, backward), served=served)


def test_the_known_model_over_four_workers():
    layout = load_model("350m").layout()
    ours, served = (traffic(layout, 4, served=served) for served in (False, True))
    assert (ours.busiest_link_bytes, ours.total_bytes) == (1594036224 * 3 // 2, 1594036224 * 6)
    assert (served.busiest_link_bytes, served.total_bytes) == (1594036224 * 4, 1594036224 * 8)
    assert (ours.seconds, served.seconds) == (pytest.approx(2.391054336), pytest.approx(6.376144896))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("served", [False, True])
def test_it_is_what_the_shares_of_the_exchange_send(world, served):
    """A message of each rank to each share's owner, unless that is itself, and of the owner to each other rank."""
    if served:
        shares = shares_of(CUT, world, DEFAULT_BUCKET_BYTES, owner=world)
    else:
        shares = shares_of(CUT, world, world * DEFAULT_SHARE_BYTES)
    sent = [0] * (world + served)
    for share in shares:
        for rank in range(world):
            if rank != share.owner:
                sent[rank] += 4 * share.size
                sent[share.owner] += 4 * share.size
    found = traffic(CUT, world, served=served)
    assert (max(sent), sum(sent)) == (found.busiest_link_bytes, found.total_bytes)


@given(st.integers(2, 1 << 16), st.floats(1e6, 1e12))
def test_a_server_carries_more_and_time_is_that_of_the_busiest_link(workers, rate):
    ours, served = (traffic(CUT, workers, rate, served=served) for served in (False, True))
    assert ours.busiest_link_bytes < served.busiest_link_bytes
    for found in (ours, served):
        assert found.seconds == pytest.approx(found.busiest_link_bytes / rate, rel=1e-6)
        assert found.exposed_seconds == pytest.approx(found.seconds)  # nothing hides it


# ---- when spans are ready ----


def test_spans_are_ready_in_order_and_an_embedding_takes_no_time():
    ready = ready_seconds(LAYOUT, 1.0)
    assert ready == sorted(ready)
    assert ready[0] == pytest.approx(512 * 64 / (LAYOUT.num_elements - 512 * 64) - 1)
    assert (ready[-2:], len(ready)) == ([0.0, 0.0], len(LAYOUT.spans))
    assert ready_seconds(GradientLayout.of({"embedding": (4, 4)}), 1.0) == [0.0]


def test_a_tied_head_is_ready_at_the_end_and_one_that_is_named_first_leaves_last():
    layout = GradientLayout.transformer(4, 64, 32, 128, 512, embedding=False)
    assert ready_seconds(layout, 1.0, tied=True)[0] == 0.0
    assert ready_seconds(layout, 1.0)[0] < -0.5
    names = ["lm_head", *(f"blocks.{i}.w" for i in range(4)), "final_norm"]
    advised = GradientLayout.of(dict.fromkeys(names, (64,)))
    assert ready_seconds(advised, 6.0, tied=True) == pytest.approx([-5, -4, -3, -2, -1, 0])


# ---- what backward hides ----


def test_by_hand():
    """Spans of 3, 1, 4 and 1 s, ready at 2, 4, 8 and 10 of 10 s: sent 2-5, 5-6, 8-12, 12-13."""
    layout = GradientLayout.of({f"layers.{i}.w": (size,) for i, size in enumerate((32, 128, 32, 96))})
    sizes = [4 * (span.stop - span.start) for span in layout.spans]
    assert sizes == [384, 128, 512, 128]
    found = traffic_of(layout, 2, 128.0, [-8.0, -6.0, -2.0, 0.0], served=False)
    assert (found.seconds, found.exposed_seconds) == (9.0, 3.0)


@given(st.integers(2, 9), st.floats(1.0, 1e9), st.floats(0, 1000))
def test_what_is_exposed_is_what_a_clock_shows(workers, rate, backward):
    found, clock = traffic(LAYOUT, workers, rate, backward), 0.0
    for ready, span in zip(ready_seconds(LAYOUT, backward), LAYOUT.spans, strict=True):
        clock = max(clock, backward + ready) + 8 * (span.stop - span.start) * (workers - 1) / workers / rate
    assert found.exposed_seconds == pytest.approx(clock - backward, rel=1e-6, abs=1e-6)
    assert 0 <= found.exposed_seconds <= found.seconds * (1 + 1e-9)
