"""A question's answer as a whole: its properties, its JSON, and what cannot be asked."""

import dataclasses
import json
import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transports import Transport, group, on_all, shared

from gradengine import GpuGradientAccumulator, GradientEngine, GradientLayout, connect
from gradengine.errors import CallerError
from gradengine.exchange import Progress
from gradengine.exchange.linked import DEFAULT_SHARE_BYTES
from gradengine.exchange.ordered_all_reduce import IN_FLIGHT, OrderedAllReduce
from gradengine.exchange.shares import shares_of
from gradengine.kernels import HostKernels
from gradengine.kernels.device import DeviceArena
from gradengine.plan.machine import Rates
from gradengine.plan.models import NAMED, Model, load_model
from gradengine.plan.prediction import (
    DTYPES,
    OPTIMIZERS,
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
from gradengine.tensor_parallel_cost import Bandwidth

ROOT = Path(__file__).parent.parent
NUMPY = 389047  # tracemalloc's domain of NumPy's arrays: NPY_TRACE_DOMAIN
SMALL = 1 << 20  # bytes of indices and partial sums
TEN_GIGABITS = Bandwidth.gigabits(10)
QUESTION = Question(load_model("350m"), workers=4, bandwidth=TEN_GIGABITS, tp=2)

RATES = Rates(2, tcp=4e9, unix=8e9, sum=20e9, copy=10e9, shared_memory=9e9)
HERE = Question(load_model("350m"), 3, machine=RATES)
ON_CPUS = dataclasses.replace(HERE, device="cpu")

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


@given(questions)
def test_exposed_and_hidden_make_the_exchange(question):
    for traffic, overlap in predict(question).exchanges.values():
        assert 0 <= overlap.exposed_seconds <= overlap.seconds
        assert overlap.hidden_seconds + overlap.exposed_seconds == pytest.approx(overlap.seconds)
        assert overlap.seconds == pytest.approx(traffic.seconds)


@given(questions)
def test_tensor_parallelism_divides_what_workers_exchange(question):
    one, two = (predict(dataclasses.replace(question, tp=tp)) for tp in (1, 2))
    share = 0.5 if question.vocab_parallel else 0.45
    assert share * one.layout.nbytes <= two.layout.nbytes < one.layout.nbytes
    assert two.memory.on_device < one.memory.on_device


def test_a_cut_vocabulary_adds_two_all_reduces_a_micro_batch():
    whole, cut = (dataclasses.replace(QUESTION, vocab_parallel=cut).tp_seconds for cut in (False, True))
    assert cut / whole == pytest.approx(98 / 96)


def test_within_a_worker_the_bandwidth_is_its_own_where_it_is_given():
    fast = dataclasses.replace(QUESTION, tp_bandwidth=Bandwidth.gigabytes(900), tp_latency_seconds=0.0)
    assert fast.tp_seconds == pytest.approx(402653184 / 900e9)


def test_activations_have_the_dtype_of_the_gradients():
    assert dataclasses.replace(QUESTION, dtype="bfloat16").cost.bytes_per_all_reduce == 2097152


def numbers_of(found):
    if isinstance(found, dict):
        for inner in found.values():
            yield from numbers_of(inner)
    elif isinstance(found, (int, float)):
        yield found


@given(
    st.sampled_from([NAMED["350m"], NAMED["70b"]]),
    st.sampled_from([1, 1 << 16]),
    st.sampled_from([1.0, 1e18]),
    st.sampled_from([0.0, 10.0]),
    st.sampled_from([1, 1 << 20]),
    st.sampled_from([1e-9, 1e9]),
    st.sampled_from([None, 1e-9, 1e9]),
)
def test_nothing_overflows_at_the_limits(model, workers, rate, latency, count, tflops, backward):
    asked = Question(
        model,
        workers,
        Bandwidth(rate),
        tp=8 if model.num_blocks == 80 else 4,
        latency_seconds=latency,
        tp_latency_seconds=latency,
        sequence_length=count,
        batch_size=count,
        micro_batches=count,
        tflops=tflops,
        backward_seconds=backward,
    )
    if backward is not None and backward < asked.tp_seconds / count / 2:
        with pytest.raises(CallerError, match="backward_seconds is shorter"):
            predict(asked)
        return
    found = predict(asked).as_json()
    assert all(math.isfinite(number) and number >= 0 for number in numbers_of(found))
    json.dumps(found, allow_nan=False)


@given(questions)
def test_the_choice_is_that_of_the_exchanges(question):
    plan = predict(question)
    step = plan.compute_seconds + plan.exchanges["ordered"][1].exposed_seconds
    assert (plan.choice.transport == "none") == (question.workers == 1)
    assert plan.choice.waits_of_step * step == pytest.approx(plan.exchanges["ordered"][1].exposed_seconds)


def test_more_micro_batches_make_the_exchange_rarer_and_no_longer():
    one, many = (predict(dataclasses.replace(QUESTION, micro_batches=n)) for n in (1, 8))
    assert one.exchanges["ordered"][1] == many.exchanges["ordered"][1]
    assert many.compute_seconds == pytest.approx(8 * one.compute_seconds)
    assert many.question.tp_seconds == pytest.approx(8 * one.question.tp_seconds)


def test_a_slower_process_limits_what_is_ours():
    slow = predict(dataclasses.replace(QUESTION, socket_bandwidth=Bandwidth.gigabits(1)))
    fast = predict(QUESTION)
    for name in ("ordered", "star"):
        assert slow.exchanges[name][1].seconds > 4 * fast.exchanges[name][1].seconds
    for name in ("ring", "nccl"):
        assert slow.exchanges[name] == fast.exchanges[name]


# ---- memory ----

TINY = Model("tiny", "", 64, 2, 4, 2, 128, 256)


def memory(layout, dtype, optimizer, workers, *, model=TINY, device="cuda"):
    return memory_of(Question(model, workers, TEN_GIGABITS, dtype=dtype, optimizer=optimizer, device=device), layout)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "bytes_a_weight"),
    [("float32", "adamw", 20), ("float32", "sgd", 12), ("bfloat16", "adamw", 20), ("float16", "momentum", 16)],
)
def test_bytes_of_a_weight(dtype, optimizer, bytes_a_weight):
    layout = GradientLayout.of([(32, 32)])
    assert memory(layout, dtype, optimizer, 1).on_device == bytes_a_weight * 1024


def test_the_arena_counts_its_padding_and_the_others_do_not():
    found = memory(GradientLayout.of([(33,)]), "float32", "adamw", 1)
    assert (found.arena, found.gradients, found.optimizer) == (256, 132, 264)


def test_one_worker_has_no_rows():
    found = memory(load_model("350m").layout(), "float32", "adamw", workers=1)
    assert (found.exchange_rows, found.pinned_rows) == (0, 0)


def test_only_a_gpu_has_pinned_rows():
    layout = load_model("350m").layout()
    on = {device: memory(layout, "float32", "adamw", 2, device=device) for device in ("cpu", "cuda")}
    assert {device: found.pinned_rows for device, found in on.items()} == {"cpu": 0, "cuda": 4 * DEFAULT_SHARE_BYTES}
    assert on["cpu"].exchange_rows == on["cuda"].exchange_rows


def test_a_large_model_has_two_shares_of_each_other_rank_and_one_that_is_summed():
    for workers in (2, 3, 4):
        rows, _ = row_bytes(load_model("350m").layout(), workers)
        assert rows == (2 * (workers - 1) + 1) * DEFAULT_SHARE_BYTES


class Rows:
    """What a device's arena is asked for."""

    def __init__(self):
        self.nbytes = 0

    def rows(self, count, size):
        self.nbytes += 4 * count * size
        return [np.empty(0, np.float32)] * count


DeviceArena.register(Rows)


@pytest.mark.parametrize("workers", [2, 3, 5, 40])
@pytest.mark.parametrize(
    "layout",
    [
        load_model("350m").layout(),
        GradientLayout.of({f"layers.{i}.w": (1 << 20,) for i in range(9)}),
        GradientLayout.of([(64,), (32,)]),
        GradientLayout.of({"head": (5 << 20,), "a": (100,), "b": (3,)}),
    ],
    ids=["350m", "spans of 4 MB", "tiny", "uneven"],
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
        facts = sum(each.nbytes for each in reduce._facts.values())
        taken.append(sum(found) - facts)
        pinned.append(device.nbytes)
    rows = row_bytes(layout, workers)
    assert max(pinned) == rows[1]
    assert rows[0] <= max(taken) <= rows[0] + SMALL


@pytest.mark.parametrize("transport", [transport for transport in Transport if transport is not Transport.SERVER])
def test_rows_are_what_ranks_that_have_joined_have_taken(transport):
    """Measured: what NumPy has allocated in a process with three ranks; some read the others' parts in place."""
    layout = GradientLayout.of({f"layers.{i}.w": (1 << 22,) for i in range(6)})
    with group(transport, 3) as exchanges:
        arenas = [shared(np.zeros(layout.arena_size, np.float32)) for _ in exchanges]
        tracemalloc.start()
        try:
            on_all(lambda pair: pair[0].bind(layout, pair[1], Progress()), [*zip(exchanges, arenas, strict=True)])
            taken = sum(trace.size for trace in tracemalloc.take_snapshot().traces if trace.domain == NUMPY)
        finally:
            tracemalloc.stop()
    is_in_place = transport.value in {"threads", "shared_memory"}
    rows = DEFAULT_SHARE_BYTES if is_in_place else row_bytes(layout, 3)[0]
    assert taken == pytest.approx(3 * rows, abs=3 * SMALL)


@given(st.integers(1, 1000), st.sampled_from(sorted(DTYPES)), st.sampled_from(sorted(OPTIMIZERS)))
def test_no_memory_of_the_model_grows_with_the_workers(workers, dtype, optimizer):
    layout = TINY.layout()
    few, more = (memory(layout, dtype, optimizer, w) for w in (workers, workers + 1))
    assert few.on_device == more.on_device
    assert 0 < more.exchange_rows <= workers * IN_FLIGHT + DEFAULT_SHARE_BYTES


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_arena_is_the_one_that_an_engine_takes(tp):
    layout = Model("tiny", "", 64, 2, 4, 4, 128, 256).layout(tp)
    engine = GradientEngine(layout, max_norm=None)
    assert memory(layout, "float32", "sgd", 1).arena == engine.accumulator.memory.nbytes


def test_a_gpus_arena_is_what_its_accumulator_says_that_it_needs():
    layout = load_model("350m").layout()
    needed = GpuGradientAccumulator.memory_needed(layout)
    assert memory(layout, "float32", "adamw", 1).arena <= needed < 1.01 * layout.nbytes


@pytest.mark.parametrize("name", NAMED)
def test_weights_in_half_the_width_take_half_and_a_copy_in_fp32(name):
    layout = load_model(name).layout()
    whole, half = (memory(layout, dtype, "adamw", 1) for dtype in ("float32", "bfloat16"))
    assert 2 * half.weights == whole.weights
    assert (whole.master_weights, half.master_weights) == (0, whole.weights)
    assert half.optimizer == whole.optimizer


def test_frozen_weights_are_weights_and_nothing_else():
    layout = GradientLayout.of([(64,)])
    frozen, trained = (
        memory(layout, "bfloat16", "adamw", 1, model=dataclasses.replace(TINY, embedding=kind))
        for kind in ("frozen", "own")
    )
    assert frozen.weights - trained.weights == 2 * 256 * 64
    assert frozen.on_device - trained.on_device == 2 * 256 * 64


# ---- compute ----


def assumed(model, tokens, sequence_length, tflops, **more):
    question = Question(
        model,
        2,
        TEN_GIGABITS,
        batch_size=tokens // sequence_length,
        sequence_length=sequence_length,
        tflops=tflops,
        **more,
    )
    return compute_of(question, model.layout(question.tp, vocab_parallel=question.vocab_parallel))


def test_arithmetic_is_counted_as_it_is_done():
    """One block by hand: 2 operations a weight and token, scores and their sum 2 each; backward twice that."""
    weights = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 2 * 8 + 8 + 32 * 8
    forward = 10 * (2 * weights + 2 * 2 * 5 * 8)
    compute = assumed(Model("tiny", "", 8, 1, 2, 1, 16, 32), 10, 5, tflops=1e-6)
    assert compute.forward_seconds == pytest.approx(forward / 1e6)
    assert compute.backward_seconds == pytest.approx(2 * forward / 1e6)
    assert compute.source == "assumed: each rank a GPU of 1e-06 TFLOP/s (--tflops)"


def test_tensor_parallel_ranks_share_the_arithmetic_and_wait_for_their_all_reduces():
    model, fast = load_model("7b"), {"tp_bandwidth": Bandwidth(1e18), "tp_latency_seconds": 0.0, "vocab_parallel": True}
    whole, half = (assumed(model, 1024, 1024, 100, tp=tp, **fast) for tp in (1, 2))
    slow = fast | {"tp_latency_seconds": 0.5 / (4 * 65)}  # 65 all-reduces each way, 2 messages each
    waiting = assumed(model, 1024, 1024, 100, tp=2, **slow)
    assert half.forward_seconds == pytest.approx(whole.forward_seconds / 2, rel=1e-3)
    assert waiting.backward_seconds == pytest.approx(half.backward_seconds + 0.25)
    assert waiting.forward_seconds == pytest.approx(half.forward_seconds + 0.25)
    assert waiting.source.endswith(", with its all-reduces")


def test_a_measured_backward_is_taken_as_it_is():
    measured = predict(dataclasses.replace(QUESTION, tp=1, backward_seconds=0.4)).compute
    assert (measured.backward_seconds, measured.forward_seconds) == (0.4, 0.2)


@given(st.sampled_from([NAMED["350m"], NAMED["1b"]]), st.integers(1, 1 << 16), st.floats(1e-3, 1e3))
def test_time_is_proportional_to_tokens_and_falls_with_speed(model, tokens, tflops):
    one, more, faster = (
        assumed(model, n, 1, speed) for n, speed in ((tokens, tflops), (2 * tokens, tflops), (tokens, 2 * tflops))
    )
    assert more.forward_seconds == pytest.approx(2 * one.forward_seconds)
    assert faster.forward_seconds == pytest.approx(one.forward_seconds / 2)
    assert one.backward_seconds == pytest.approx(2 * one.forward_seconds)


# ---- the choice ----


def overlaps(ours, ring, nccl):
    exposed = {"ordered": ours, "star": 2 * ours, "ring": ring, "nccl": nccl}
    return {name: Overlap(10.0, seconds) for name, seconds in exposed.items()}


def chosen(compute, found, **more):
    return choose(1, compute, found, **more)


def test_one_worker_needs_no_exchange():
    plan = predict(dataclasses.replace(QUESTION, workers=1))
    assert plan.choice.transport == "none"
    assert "without exchange=" in plan.choice.reason
    assert plan.exchanges["ordered"][1].seconds == 0


def test_what_is_hidden_is_enough():
    choice = chosen(1.0, overlaps(0.02, 0.01, 0.01))
    assert (choice.transport, choice.remedies) == ("tcp://", ())
    assert choice.reason == "a step waits 20.0 ms for it, 2.0% of its time."


def test_where_a_step_waits_long_it_says_what_shortens_the_wait_today():
    """1 s of compute, 1 s of waiting: with 4 micro-batches it is a fifth."""
    choice = chosen(1.0, overlaps(1.0, 0.25, 0.24), faster_link=(TEN_GIGABITS, Overlap(2.0, 0.5)))
    micro_batches, link, library = choice.remedies
    assert "4 a step, not 1" in micro_batches
    assert "1.25 GB/s = 10 Gbit/s" in link
    assert "500 ms" in link
    assert "NCCL" in library
    assert "250 ms" in library
    assert choice.waits_of_step == 0.5


def test_a_ring_that_saves_nothing_is_not_advised():
    assert not any("library" in remedy for remedy in chosen(1.0, overlaps(1.0, 1.0, 1.0)).remedies)


def test_a_short_wait_needs_no_remedy():
    assert chosen(1.0, overlaps(0.24, 0.24, 0.24)).remedies == ()
    assert len(chosen(1.0, overlaps(0.26, 0.26, 0.26)).remedies) == 1


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_so_many_micro_batches_make_a_fifth_and_one_less_makes_more(compute, waits):
    enough = enough_micro_batches(compute, waits)
    assert waits <= 0.2 * (1 + 1e-9) * (enough * compute + waits)
    assert waits >= 0.2 * (1 - 1e-9) * ((enough - 1) * compute + waits)


def test_the_plans_advice_holds_in_the_plan():
    slow = dataclasses.replace(QUESTION, bandwidth=Bandwidth.gigabits(1), tp_bandwidth=TEN_GIGABITS)
    waiting = predict(slow)
    enough = enough_micro_batches(waiting.compute.seconds, waiting.exchanges["ordered"][1].exposed_seconds)
    assert f"{enough} a step, not 1" in waiting.choice.remedies[0]
    assert predict(dataclasses.replace(slow, micro_batches=enough)).choice.waits_of_step <= 0.2
    assert predict(dataclasses.replace(slow, micro_batches=enough - 1)).choice.waits_of_step > 0.2
    link = next(remedy for remedy in waiting.choice.remedies if remedy.startswith("A faster link"))
    faster = predict(dataclasses.replace(slow, bandwidth=slow.socket_bandwidth))
    assert f"wait {duration(faster.exchanges['ordered'][1].exposed_seconds)};" in link


def test_on_one_machine_processes_take_shared_memory_where_there_is_any_else_unix_sockets():
    here = {name: Overlap(1.0, seconds) for name, seconds in (("tcp://", 0.9), ("unix://", 0.5), ("threads", 0.1))}
    choice = chosen(0.5, here)
    assert (choice.transport, choice.waits_of_step) == ("unix://", 0.5)
    assert len(choice.remedies) == 1
    assert "4 a step, not 1" in choice.remedies[0]
    assert chosen(100.0, here).remedies == ()
    assert chosen(0.5, here | {"shared memory": Overlap(1.0, 0.2)}).transport == "shared memory"


def test_the_only_transport_recommended_exists():
    with connect(f"{predict(QUESTION).choice.transport}127.0.0.1:0", 0, 1) as exchange:
        assert exchange.world_size == 1
    for missing in ("mpi://", "nccl://"):
        with pytest.raises(CallerError):
            connect(missing, 0, 1)


@given(st.floats(1e-7, 1e5))
def test_durations_are_what_they_say(number):
    shown, unit = duration(number).split()
    assert float(shown) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit] == pytest.approx(number, rel=0.006, abs=6e-9)


# ---- on one machine ----


def test_one_machine_is_predicted_by_the_model_of_its_copies():
    found = predict(ON_CPUS).exchanges
    nbytes = HERE.model.layout().nbytes
    assert found["tcp://"][1].seconds == pytest.approx(4 * nbytes / 4e9 + 3 * nbytes / 20e9)
    assert found["unix://"][1].seconds == pytest.approx(4 * nbytes / 8e9 + 3 * nbytes / 20e9)
    assert found["shared memory"][1].seconds == pytest.approx(2 * nbytes / 9e9 + 3 * nbytes / 20e9)
    assert found["threads"][1].seconds == pytest.approx(2 * nbytes / 10e9 + 3 * nbytes / 20e9)
    assert found["served"][1].seconds == pytest.approx(6 * nbytes / 4e9 + 3 * nbytes / 20e9)
    assert predict(ON_CPUS).choice.transport == "shared memory"


def test_a_gpus_arenas_are_not_in_shared_memory():
    assert set(predict(ON_CPUS).exchanges) - set(predict(HERE).exchanges) == {"shared memory"}
    assert predict(HERE).choice.transport == "unix://"


def test_one_worker_waits_for_nothing_on_one_machine_either():
    alone = predict(dataclasses.replace(HERE, workers=1))
    assert {overlap.exposed_seconds for _, overlap in alone.exchanges.values()} == {0.0}
    assert alone.choice.transport == "none"


def test_one_machine_and_a_bandwidth_exclude_each_other():
    with pytest.raises(CallerError, match="exclude each other: got both"):
        dataclasses.replace(HERE, bandwidth=TEN_GIGABITS)
    with pytest.raises(CallerError, match="bandwidth or machine is needed: got neither"):
        dataclasses.replace(HERE, machine=None)
    with pytest.raises(CallerError, match=r"tp is out of range: got 2, expected 1 on one machine"):
        dataclasses.replace(HERE, tp=2)


def test_the_json_of_one_machine_has_its_rates_and_no_bandwidth():
    found = predict(HERE).as_json()
    assert found["question"]["machine"] == dataclasses.asdict(HERE.machine)
    assert found["question"]["bandwidth_bytes_per_second"] is None
    assert set(found["exchange"]) == {"tcp://", "unix://", "threads", "served"}
    assert predict(ON_CPUS).as_json()["exchange"]["shared memory"]["messages"] > 0
    json.dumps(found, allow_nan=False)


# ---- a measured backward ----


def test_a_backward_shorter_than_its_all_reduces_is_refused_with_both_numbers():
    """350m over 2 ranks by 10 Gbit/s: 324 ms of all-reduces a step, half of them backward."""
    with pytest.raises(CallerError, match=r"backward_seconds is shorter .*got 100 ms, expected at least the 162 ms"):
        predict(dataclasses.replace(QUESTION, backward_seconds=0.1))
    assert predict(dataclasses.replace(QUESTION, backward_seconds=0.163)).compute.backward_seconds == 0.163
    assert predict(dataclasses.replace(QUESTION, backward_seconds=0.1, tp=1)).compute.backward_seconds == 0.1


def test_as_many_micro_batches_as_there_are_do_not_make_a_measured_backward_shorter():
    asked = dataclasses.replace(QUESTION, backward_seconds=0.163, micro_batches=7)
    assert predict(asked).compute.backward_seconds == 0.163


NUMBER = (int, float)
SCHEMA = {
    "format": int,
    "model": dict.fromkeys(
        [
            *("hidden_size", "num_blocks", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size"),
            *("kv_hidden_size", "parameters", "elements_per_rank"),
        ],
        int,
    )
    | {"name": str, "source": str, "embedding": str},
    "question": dict.fromkeys(["workers", "tp", "ranks", "sequence_length", "batch_size", "micro_batches"], int)
    | dict.fromkeys(["latency_seconds", "tp_latency_seconds", "tflops"], NUMBER)
    | {f"{name}bandwidth_bytes_per_second": NUMBER for name in ("", "tp_", "socket_", "sum_")}
    | {
        "dtype": str,
        "optimizer": str,
        "device": str,
        "vocab_parallel": bool,
        "tflops_measured": bool,
        "machine": type(None),
        "backward_seconds": (*NUMBER, type(None)),
    },
    "memory_bytes_per_rank": dict.fromkeys(
        [
            *("weights", "gradients", "arena", "master_weights", "optimizer", "on_device"),
            *("exchange_rows", "pinned_rows"),
        ],
        int,
    ),
    "tensor_parallel": dict.fromkeys(
        [
            *("bytes_per_all_reduce", "all_reduces_per_step"),
            *("bytes_per_step", "bytes_per_step_both_ways", "link_bytes_per_step"),
        ],
        int,
    )
    | {"seconds_per_step": NUMBER},
    "compute": dict.fromkeys(["forward_seconds", "backward_seconds", "seconds_per_step"], NUMBER) | {"source": str},
    "exchange": dict.fromkeys(
        ["star", "ring", "ordered", "nccl"],
        dict.fromkeys(["busiest_link_bytes", "other_link_bytes", "total_bytes", "messages", "latency_steps"], int)
        | dict.fromkeys(["seconds", "hidden_seconds", "exposed_seconds"], NUMBER),
    ),
    "choice": {
        "transport": str,
        "reason": str,
        "waits_of_step": NUMBER,
        "remedies": (list, tuple),
    },
}


def assert_fits(found, schema, path="plan"):
    if isinstance(schema, dict):
        assert set(found) == set(schema), path
        for key, inner in schema.items():
            assert_fits(found[key], inner, f"{path}.{key}")
    else:
        assert isinstance(found, schema), path


def test_every_key_of_the_json_is_on_the_page():
    page = (ROOT / "docs/plan.md").read_text()
    found = predict(QUESTION).as_json()
    keys = {*found, *(key for part in found.values() if isinstance(part, dict) for key in part)}
    keys |= set(found["exchange"]["ordered"])
    assert sorted(key for key in keys if f"`{key}`" not in page) == []


def test_the_json_of_every_named_model_fits():
    for model in NAMED.values():
        assert_fits(predict(dataclasses.replace(QUESTION, model=model)).as_json(), SCHEMA)


# ---- what cannot be asked ----


@pytest.mark.parametrize("field", ["dtype", "optimizer", "device"])
def test_unknown_names_are_refused_with_the_known_ones(field):
    with pytest.raises(CallerError, match=rf"unknown {field}: got 'x', expected one of '\w+', "):
        dataclasses.replace(QUESTION, **{field: "x"})
    with pytest.raises(CallerError, match=rf"unknown {field}: got list"):
        dataclasses.replace(QUESTION, **{field: []})


@pytest.mark.parametrize("field", ["workers", "tp", "sequence_length", "batch_size", "micro_batches"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None, (1 << 20) + 1, pytest.param(10**5000, id="digits")])
def test_counts_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(
        CallerError, match=f"{field} is (out of range|not a whole number): got .*, expected a whole number"
    ):
        dataclasses.replace(QUESTION, **{field: value})


@pytest.mark.parametrize("field", ["latency_seconds", "tp_latency_seconds", "tflops", "backward_seconds"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e300, True, "1", pytest.param(10**5000, id="digits")])
def test_figures_out_of_range_are_refused_with_the_range(field, value):
    with pytest.raises(CallerError, match=rf"{field} is (out of range|not a number): got .*, expected .*\.\."):
        dataclasses.replace(QUESTION, **{field: value})


@pytest.mark.parametrize("field", ["bandwidth", "tp_bandwidth", "socket_bandwidth"])
@pytest.mark.parametrize("rate", [10, 1.25e9, "10 GB/s", True])
def test_a_bandwidth_without_a_unit_is_refused_by_name(field, rate):
    with pytest.raises(CallerError, match=rf"^{field} is not a Bandwidth: got .*name its unit: Bandwidth\.gigabits"):
        dataclasses.replace(QUESTION, **{field: rate})


def test_a_latency_is_named_and_at_most_ten_seconds():
    with pytest.raises(CallerError, match=r"latency_seconds is out of range: got 1000\.0, expected 0\.\.10 s"):
        dataclasses.replace(QUESTION, latency_seconds=1e3)


def test_numpys_integers_are_counts():
    asked = dataclasses.replace(QUESTION, workers=np.int64(4), tp=np.uint8(2), micro_batches=np.int32(1))
    assert asked == QUESTION
    json.dumps(predict(asked).as_json())


@pytest.mark.parametrize("field", ["bandwidth", "tp_bandwidth", "socket_bandwidth", "sum_bandwidth"])
@pytest.mark.parametrize("rate", [0.5, 1e19])
def test_bandwidths_beyond_any_link_are_refused(field, rate):
    with pytest.raises(CallerError, match=rf"^{field} is out of range: got {re.escape(str(rate))}"):
        dataclasses.replace(QUESTION, **{field: Bandwidth(rate)})
