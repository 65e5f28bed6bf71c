"""Arithmetic of a micro-batch by hand, and when each span of the layout is ready."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine import GradientLayout
from gradengine.plan.compute import assumed, measured, ready_shares
from gradengine.plan.models import NAMED, Model, load_model
from gradengine.plan.overlap import overlapped

LAYOUT = GradientLayout.transformer(4, 64, 32, 128, 512)


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


def test_arithmetic_is_counted_as_it_is_done():
    """One block by hand: 2 operations a weight and token, scores and their sum 2 each; backward twice that."""
    model = Model("tiny", "", 8, 1, 2, 1, 16, 32)
    weights = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 2 * 8 + 8 + 32 * 8
    forward = 10 * (2 * weights + 2 * 2 * 5 * 8)
    compute = assumed(model, model.layout(), 10, 5, tflops=1e-6, tp_seconds=0.0)
    assert compute.forward_seconds == pytest.approx(forward / 1e6)
    assert compute.backward_seconds == pytest.approx(2 * forward / 1e6)


def test_tensor_parallel_ranks_share_the_arithmetic_and_wait_for_their_all_reduces():
    model = load_model("7b")
    whole, half = (assumed(model, model.layout(tp, vocab_parallel=True), 1024, 1024, 100, 0.0) for tp in (1, 2))
    waiting = assumed(model, model.layout(2, vocab_parallel=True), 1024, 1024, 100, 0.5)
    assert half.forward_seconds == pytest.approx(whole.forward_seconds / 2, rel=1e-3)
    assert waiting.backward_seconds == pytest.approx(half.backward_seconds + 0.25)
    assert waiting.forward_seconds == pytest.approx(half.forward_seconds + 0.25)


def test_a_measured_backward_is_taken_as_it_is():
    assert (measured(0.4).backward_seconds, measured(0.4).forward_seconds) == (0.4, 0.2)


@given(st.sampled_from([NAMED["350m"], NAMED["1b"]]), st.integers(1, 1 << 16), st.floats(1e-3, 1e3), st.floats(0, 10))
def test_time_is_proportional_to_tokens_and_falls_with_speed(model, tokens, tflops, tp_seconds):
    layout = model.layout()
    one, more, faster = (
        assumed(model, layout, n, 1024, speed, tp_seconds)
        for n, speed in ((tokens, tflops), (2 * tokens, tflops), (tokens, 2 * tflops))
    )
    alone = one.forward_seconds - tp_seconds / 2
    assert more.forward_seconds - tp_seconds / 2 == pytest.approx(2 * alone, rel=1e-6, abs=1e-9)
    assert faster.forward_seconds - tp_seconds / 2 == pytest.approx(alone / 2, rel=1e-6, abs=1e-9)
    assert one.backward_seconds >= one.forward_seconds


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_span_of_every_model_has_its_share(name, tp):
    layout = load_model(name).layout(tp)
    shares = ready_shares(layout)
    assert len(shares) == len(layout.spans)
    assert 0 < shares[0] < shares[2] < 1
    assert shares == sorted(shares)
