"""A question's answer as a whole: its properties, memory, seconds, the choice, and what cannot be asked."""

import dataclasses
import json
import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradengine import GpuGradientAccumulator, GradientLayout
from gradengine.errors import CallerError
from gradengine.exchange.linked import DEFAULT_SHARE_BYTES
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.shares import shares_of
from gradengine.kernels import HostKernels
from gradengine.kernels.device import DeviceArena
from gradengine.layout.cost import Bandwidth
from gradengine.plan.models import NAMED, Model, load_model
from gradengine.plan.prediction import (
    DTYPES,
    Question,
    choose,
    compute_of,
    duration,
    enough_micro_batches,
    memory_of,
    predict,
    row_bytes,
)
from gradengine.plan.traffic import Overlap

ROOT = Path(__file__).parent.parent
NUMPY = 389047  # tracemalloc's domain of NumPy's arrays: NPY_TRACE_DOMAIN
SMALL = 1 << 20  # bytes of indices and partial sums
TEN_GIGABITS = Bandwidth.gigabits(10)
QUESTION = Question(load_model("350m"), workers=4, bandwidth=TEN_GIGABITS, tp=2)

questions = st.builds(
    Question,
    st.sampled_from([NAMED["350m"], NAMED["1b"]]),
    st.integers(1, 300),
    st.floats(1e6, 1e12).map(Bandwidth),
    tp=st.sampled_from([1, 2, 4]),
    latency_seconds=st.floats(0, 1e-2),
    batch_size=st.integers(1, 64),
    micro_batches=st.integers(1, 16),
    dtype=st.sampled_from(sorted(DTYPES)),
    vocab_parallel=st.booleans(),
)


def asking(**changes):
    return dataclasses.replace(QUESTION, **changes)


@settings(max_examples=15)
@given(questions)
def test_exposed_and_hidden_make_the_exchange_and_the_choice_is_that_of_the_exchanges(question):
    plan = predict(question)
    for traffic, overlap in plan.exchanges.values():
        assert 0 <= overlap.exposed_seconds <= overlap.seconds == pytest.approx(traffic.seconds)
        assert overlap.hidden_seconds + overlap.exposed_seconds == pytest.approx(overlap.seconds)
    taken = "nccl" if plan.choice.transport == "process_group=" else "ordered"
    waits = plan.exchanges[taken][1].exposed_seconds
    assert (plan.choice.transport == "none") == (question.workers == 1)
    assert plan.choice.waits_of_step * (plan.compute_seconds + waits) == pytest.approx(waits)


@settings(max_examples=15)
@given(questions)
def test_tensor_parallelism_divides_what_workers_exchange(question):
    one, two = (predict(dataclasses.replace(question, tp=tp)) for tp in (1, 2))
    share = 0.5 if question.vocab_parallel else 0.45
    assert share * one.layout.nbytes <= two.layout.nbytes < one.layout.nbytes
    assert two.memory.on_device < one.memory.on_device


def test_all_reduces_within_a_worker_are_counted_by_hand():
    whole, cut = (asking(vocab_parallel=cut).tp_seconds for cut in (False, True))
    assert cut / whole == pytest.approx(98 / 96)  # two more a micro-batch
    fast = asking(tp_bandwidth=Bandwidth.gigabytes(900), tp_latency_seconds=0.0)
    assert fast.tp_seconds == pytest.approx(402653184 / 900e9)
    assert asking(dtype="bfloat16").cost.bytes_per_all_reduce == 2097152
    assert asking(tp=1).tp_seconds == 0


def test_more_micro_batches_make_the_exchange_rarer_and_no_longer():
    one, many = (predict(asking(micro_batches=n)) for n in (1, 8))
    assert one.exchanges["ordered"][1] == many.exchanges["ordered"][1]
    assert many.compute_seconds == pytest.approx(8 * one.compute_seconds)
    assert many.question.tp_seconds == pytest.approx(8 * one.question.tp_seconds)


def numbers_of(found):
    if isinstance(found, dict):
        for inner in found.values():
            yield from numbers_of(inner)
    elif isinstance(found, (int, float)):
        yield found


@pytest.mark.parametrize("limit", [0, 1])
def test_nothing_overflows_at_the_limits(limit):
    def at(*ends):
        return ends[limit]

    asked = Question(
        NAMED["70b"], at(1, 1 << 16), Bandwidth(at(1e18, 1.0)), tp=8, latency_seconds=at(0.0, 10.0),
        tp_latency_seconds=at(0.0, 10.0), sequence_length=at(1, 1 << 20), batch_size=at(1, 1 << 20),
        micro_batches=at(1, 1 << 20), tflops=at(1e9, 1e-9),
    )  # fmt: skip
    found = predict(asked).as_json()
    assert all(math.isfinite(number) and number >= 0 for number in numbers_of(found))
    json.dumps(found, allow_nan=False)


def test_the_json_has_what_the_page_names_and_the_known_numbers():
    found = predict(asking(workers=np.int64(4), tp=np.uint8(2))).as_json()  # NumPy's integers are counts
    json.dumps(found)
    page = (ROOT / "docs/plan.md").read_text()
    keys = {*found, *(key for part in found.values() if isinstance(part, dict) for key in part)}
    assert sorted(key for key in keys | set(found["exchange"]["ordered"]) if f"`{key}`" not in page) == []
    assert found["question"]["ranks"] == 8
    assert found["question"]["tp_bandwidth_bytes_per_second"] == 1.25e9
    assert found["tensor_parallel"]["bytes_per_all_reduce"] == 4194304
    assert found["tensor_parallel"]["bytes_per_step"] == 201326592
    assert found["memory_bytes_per_rank"]["arena"] == found["memory_bytes_per_rank"]["gradients"]


# ---- memory ----

TINY = Model("tiny", "", 64, 2, 4, 2, 128, 256)


def memory(layout, dtype="float32", optimizer="adamw", workers=1, *, model=TINY, device="cuda"):
    return memory_of(Question(model, workers, TEN_GIGABITS, dtype=dtype, optimizer=optimizer, device=device), layout)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "bytes_a_weight"),
    [
        ("float32", "adamw", 20),
        ("float32", "sgd", 12),
        ("float32", "lion", 16),
        ("bfloat16", "adamw", 20),
        ("float16", "momentum", 16),
    ],
)
def test_bytes_of_a_weight(dtype, optimizer, bytes_a_weight):
    layout = GradientLayout.of([(32, 32)])
    found = memory(layout, dtype, optimizer)
    assert found.on_device == bytes_a_weight * 1024
    assert found.master_weights == (0 if dtype == "float32" else 4096)


def test_the_arena_counts_its_padding_and_the_others_do_not():
    found = memory(GradientLayout.of([(33,)]))
    assert (found.arena, found.gradients, found.optimizer) == (256, 132, 264)
    layout = load_model("350m").layout()
    needed = GpuGradientAccumulator.memory_needed(layout)
    assert memory(layout).arena <= needed < 1.01 * layout.nbytes


def test_one_worker_has_no_rows_and_only_a_gpu_has_pinned_ones():
    layout = load_model("350m").layout()
    alone, cpu, cuda = memory(layout), memory(layout, workers=2, device="cpu"), memory(layout, workers=2)
    assert (alone.exchange_rows, alone.pinned_rows) == (0, 0)
    assert (cpu.pinned_rows, cuda.pinned_rows) == (0, 4 * DEFAULT_SHARE_BYTES)
    assert cpu.exchange_rows == cuda.exchange_rows == 3 * DEFAULT_SHARE_BYTES


class Rows:
    """What a device's arena is asked for."""

    def __init__(self):
        self.nbytes = 0

    def rows(self, count, size):
        self.nbytes += 4 * count * size
        return [np.empty(0, np.float32)] * count


DeviceArena.register(Rows)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize(
    "layout",
    [
        GradientLayout.of({f"layers.{i}.w": (1 << 20,) for i in range(9)}),
        GradientLayout.of([(64,), (32,)]),
        GradientLayout.of({"head": (5 << 20,), "a": (100,), "b": (3,)}),
    ],
    ids=["spans of 4 MB", "tiny", "uneven"],
)
def test_rows_are_what_an_exchange_makes(layout, workers):
    """Measured: what NumPy allocates on each rank, and what its device is asked for."""
    shares, kernels = shares_of(layout, workers, DEFAULT_SHARE_BYTES * workers), HostKernels()
    taken, pinned = [], []
    for rank in range(workers):
        device = Rows()
        tracemalloc.start()
        try:
            reduce = OrderedAllReduce(rank, workers, layout, shares, device, kernels)
            found = [trace.size for trace in tracemalloc.take_snapshot().traces if trace.domain == NUMPY]
        finally:
            tracemalloc.stop()
        taken.append(sum(found) - sum(each.nbytes for each in reduce._facts.values()))
        pinned.append(device.nbytes)
    rows = row_bytes(layout, workers)
    assert max(pinned) == rows[1]
    assert rows[0] <= max(taken) <= rows[0] + SMALL


def test_frozen_weights_are_weights_and_nothing_else():
    layout = GradientLayout.of([(64,)])
    frozen, trained = (
        memory(layout, "bfloat16", model=dataclasses.replace(TINY, embedding=kind)) for kind in ("frozen", "own")
    )
    assert frozen.weights - trained.weights == frozen.on_device - trained.on_device == 2 * 256 * 64


# ---- compute ----


def assumed(model, tokens, sequence_length, tflops, **more):
    question = Question(
        model, 2, TEN_GIGABITS, batch_size=tokens // sequence_length, sequence_length=sequence_length,
        tflops=tflops, **more,
    )  # fmt: skip
    return compute_of(question, model.layout(question.tp, vocab_parallel=question.vocab_parallel))


def test_arithmetic_is_counted_as_it_is_done():
    """One block by hand: 2 operations a weight and token, scores and their sum 2 each; backward twice that."""
    weights = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 2 * 8 + 8 + 32 * 8
    forward = 10 * (2 * weights + 2 * 2 * 5 * 8)
    compute = assumed(Model("tiny", "", 8, 1, 2, 1, 16, 32), 10, 5, tflops=1e-6)
    assert compute.forward_seconds == pytest.approx(forward / 1e6)
    assert compute.backward_seconds == pytest.approx(2 * forward / 1e6)
    assert "GPU of 1e-06 TFLOP/s" in compute.source


def test_tensor_parallel_ranks_share_the_arithmetic_and_wait_for_their_all_reduces():
    model, fast = load_model("7b"), {"tp_bandwidth": Bandwidth(1e18), "tp_latency_seconds": 0.0, "vocab_parallel": True}
    whole, half = (assumed(model, 1024, 1024, 100, tp=tp, **fast) for tp in (1, 2))
    slow = fast | {"tp_latency_seconds": 0.5 / (4 * 65)}  # 65 all-reduces each way, 2 messages each
    waiting = assumed(model, 1024, 1024, 100, tp=2, **slow)
    assert half.forward_seconds == pytest.approx(whole.forward_seconds / 2, rel=1e-3)
    assert waiting.backward_seconds == pytest.approx(half.backward_seconds + 0.25)
    assert waiting.forward_seconds == pytest.approx(half.forward_seconds + 0.25)


def test_a_measured_backward_is_taken_as_it_is_unless_it_is_shorter_than_its_all_reduces():
    """350m over 2 ranks by 10 Gbit/s: 324 ms of all-reduces a step, half of them backward."""
    measured = predict(asking(tp=1, backward_seconds=0.1)).compute
    assert (measured.backward_seconds, measured.forward_seconds) == (0.1, 0.05)
    with pytest.raises(CallerError, match=r"backward_seconds is shorter .*got 100 ms, expected at least the 162 ms"):
        predict(asking(backward_seconds=0.1))
    assert predict(asking(backward_seconds=0.163, micro_batches=7)).compute.backward_seconds == 0.163


# ---- the choice ----


def overlaps(ours, ring, nccl):
    exposed = {"ordered": ours, "star": 2 * ours, "ring": ring, "nccl": nccl}
    return {name: Overlap(10.0, seconds) for name, seconds in exposed.items()}


def test_one_worker_needs_no_exchange():
    plan = predict(asking(workers=1))
    assert (plan.choice.transport, plan.exchanges["ordered"][1].seconds) == ("none", 0)


def test_a_short_wait_needs_no_remedy():
    choice = choose(1, 1.0, overlaps(0.02, 0.01, 0.01))
    assert (choice.transport, choice.remedies) == ("tcp://", ())
    assert "20.0 ms" in choice.reason
    assert choose(1, 1.0, overlaps(0.24, 0.24, 0.24)).remedies == ()
    assert len(choose(1, 1.0, overlaps(0.26, 0.26, 0.26)).remedies) == 1


def test_where_a_step_waits_long_it_says_what_shortens_the_wait_today():
    """1 s of compute, 1 s of waiting: with 4 micro-batches it is a fifth."""
    choice = choose(1, 1.0, overlaps(1.0, 0.25, 1.0), faster_link=(TEN_GIGABITS, Overlap(2.0, 0.5)))
    assert choice.waits_of_step == 0.5
    for remedy, words in zip(choice.remedies, (("4 a step",), ("10 Gbit/s", "500 ms"), ("250 ms",)), strict=True):
        assert all(word in remedy for word in words)
    assert len(choose(1, 1.0, overlaps(1.0, 0.95, 1.0)).remedies) == 1  # a ring that saves little is not advised


def test_nccl_is_taken_for_gpus_alone_and_only_if_it_is_faster():
    """7b over 8 workers by 200 Gbit/s: sockets take 40 s, and NCCL 1.6."""
    asked = asking(model=load_model("7b"), workers=8, tp=1, bandwidth=Bandwidth.gigabits(200), dtype="bfloat16")
    assert predict(asked).choice.transport == "process_group="
    assert choose(1, 1.0, overlaps(0.02, 0.01, 0.0)).transport == "tcp://"
    on_cpus = predict(dataclasses.replace(asked, device="cpu"))
    assert (on_cpus.choice.transport, "nccl" in on_cpus.exchanges) == ("tcp://", False)
    assert [predict(asked).missing_bytes, on_cpus.missing_bytes] == [predict(asked).memory.on_device - 80 * 10**9, 0]
    assert predict(dataclasses.replace(asked, gpu_gigabytes=141.0)).missing_bytes == 0


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_so_many_micro_batches_make_a_fifth_and_one_less_makes_more(compute, waits):
    enough = enough_micro_batches(compute, waits)
    assert waits <= 0.2 * (1 + 1e-9) * (enough * compute + waits)
    assert waits >= 0.2 * (1 - 1e-9) * ((enough - 1) * compute + waits)


def test_the_plans_advice_holds_in_the_plan():
    slow = asking(bandwidth=Bandwidth.gigabits(1), tp_bandwidth=TEN_GIGABITS, device="cpu")
    waiting = predict(slow)
    enough = enough_micro_batches(waiting.compute.seconds, waiting.exchanges["ordered"][1].exposed_seconds)
    assert f"{enough} a step, not 1" in waiting.choice.remedies[0]
    assert predict(dataclasses.replace(slow, micro_batches=enough)).choice.waits_of_step <= 0.2
    faster = predict(dataclasses.replace(slow, bandwidth=slow.socket_bandwidth))
    assert duration(faster.exchanges["ordered"][1].exposed_seconds) in waiting.choice.remedies[1]


@given(st.floats(1e-7, 1e5))
def test_durations_are_what_they_say(number):
    shown, unit = duration(number).split()
    assert float(shown) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit] == pytest.approx(number, rel=0.006, abs=6e-9)


# ---- what cannot be asked ----

REFUSED = [
    *((field, value) for field in ("dtype", "optimizer", "device") for value in ("x", [])),
    *(
        (field, value)
        for field in ("workers", "tp", "sequence_length", "batch_size", "micro_batches")
        for value in (0, 1.5, True, "2", None, (1 << 20) + 1, 10**5000)
    ),
    *(
        (field, value)
        for field in ("latency_seconds", "tp_latency_seconds", "tflops", "backward_seconds")
        for value in (-1.0, math.nan, math.inf, 1e300, True, "1", 10**5000)
    ),
    ("latency_seconds", 10.5),
    *(
        (field, value)
        for field in ("bandwidth", "tp_bandwidth", "socket_bandwidth", "sum_bandwidth")
        for value in (10, "10 GB/s", Bandwidth(0.5), Bandwidth(1e19))
    ),
]


def test_what_is_out_of_range_or_unknown_is_refused_by_name():
    for field, value in REFUSED:
        with pytest.raises(CallerError, match=rf"^(unknown )?{field}\b") as refusal:
            asking(**{field: value})
        assert refusal.value.got is not None or re.search("Bandwidth", str(refusal.value))


def test_a_bandwidth_is_needed():
    with pytest.raises(CallerError, match="needed"):
        asking(bandwidth=None)
