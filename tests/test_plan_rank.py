"""What one rank keeps and computes: bytes, arithmetic by hand, and when each span of the layout is ready."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine import GpuGradientAccumulator, GradientEngine, GradientLayout
from gradengine.exchange import local_group
from gradengine.plan.models import NAMED, Model, load_model
from gradengine.plan.rank import (
    BUCKETS_IN_FLIGHT,
    DTYPES,
    OPTIMIZERS,
    assumed,
    coordinator_bytes,
    measured,
    memory_of,
    ready_shares,
)
from gradengine.plan.traffic import overlapped

# ---- memory ----


@pytest.mark.parametrize(
    ("dtype", "optimizer", "bytes_a_weight"),
    [("float32", "adamw", 20), ("float32", "sgd", 12), ("bfloat16", "adamw", 20), ("float16", "momentum", 16)],
)
def test_bytes_of_a_weight(dtype, optimizer, bytes_a_weight):
    layout = GradientLayout.of([(32, 32)])
    assert memory_of(layout, dtype, optimizer, 1).on_device == bytes_a_weight * 1024


def test_the_arena_counts_its_padding_and_the_others_do_not():
    memory = memory_of(GradientLayout.of([(33,)]), "float32", "adamw", 1)
    assert (memory.arena, memory.gradients, memory.optimizer) == (256, 132, 264)


def test_one_worker_needs_neither_mirror_nor_coordinator():
    memory = memory_of(load_model("350m").layout(), "float32", "adamw", workers=1)
    assert (memory.host_mirror, memory.coordinator) == (0, 0)


def test_only_a_gpu_has_a_mirror():
    layout = load_model("350m").layout()
    on = {device: memory_of(layout, "float32", "adamw", 2, device=device).host_mirror for device in ("cpu", "cuda")}
    assert on == {"cpu": 0, "cuda": layout.nbytes}


def test_the_coordinator_keeps_what_the_servers_code_says():
    assert BUCKETS_IN_FLIGHT == 8
    group = local_group(1)[0]._group
    assert coordinator_bytes(load_model("350m").layout(), 3) == 2 * 8 * group.bucket_bytes == 33554432


def test_buckets_are_no_larger_than_what_travels():
    assert coordinator_bytes(GradientLayout.of([(64,), (32,)]), 2) == 8 * 256


@given(st.integers(1, 1000), st.sampled_from(sorted(DTYPES)), st.sampled_from(sorted(OPTIMIZERS)))
def test_memory_grows_with_the_workers_on_rank_0_alone(workers, dtype, optimizer):
    layout = Model("tiny", "", 64, 2, 4, 2, 128, 256).layout()
    few, more = (memory_of(layout, dtype, optimizer, w) for w in (workers, workers + 1))
    assert few.on_device == more.on_device
    assert few.coordinator < more.coordinator


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_arena_is_the_one_that_an_engine_takes(tp):
    layout = Model("tiny", "", 64, 2, 4, 4, 128, 256).layout(tp)
    engine = GradientEngine(layout, max_norm=None)
    assert memory_of(layout, "float32", "sgd", 1).arena == engine.accumulator.memory.nbytes


def test_a_gpus_arena_is_what_its_accumulator_says_that_it_needs():
    layout = load_model("350m").layout()
    needed = GpuGradientAccumulator.memory_needed(layout)
    assert memory_of(layout, "float32", "adamw", 1).arena <= needed < 1.01 * layout.nbytes


@pytest.mark.parametrize("name", NAMED)
def test_weights_in_half_the_width_take_half_and_a_copy_in_fp32(name):
    layout = load_model(name).layout()
    whole, half = (memory_of(layout, dtype, "adamw", 1) for dtype in ("float32", "bfloat16"))
    assert 2 * half.weights == whole.weights
    assert (whole.master_weights, half.master_weights) == (0, whole.weights)
    assert half.optimizer == whole.optimizer


def test_frozen_weights_are_weights_and_nothing_else():
    layout = GradientLayout.of([(64,)])
    frozen, trained = (memory_of(layout, "bfloat16", "adamw", 1, frozen=frozen) for frozen in (1000, 0))
    assert frozen.weights - trained.weights == 2000
    assert frozen.on_device - trained.on_device == 2000


# ---- compute ----

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
