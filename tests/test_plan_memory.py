"""Bytes that a rank keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine import GpuGradientAccumulator, GradientEngine, GradientLayout
from gradengine.exchange import local_group
from gradengine.plan.memory import BUCKETS_IN_FLIGHT, DTYPES, OPTIMIZERS, coordinator_bytes, memory_of
from gradengine.plan.models import NAMED, Model, load_model


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
    assert memory_of(layout, "float32", "sgd", 1).arena == engine.accumulator.arena.nbytes


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
