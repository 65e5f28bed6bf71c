"""A question's answer as a whole: memory, seconds, the choice, and what cannot be asked."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradengine import GpuGradientAccumulator, GradientLayout
from gradengine.errors import CallerError
from gradengine.exchange.exchange import DEFAULT_SHARE_BYTES
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.shares import shares_of
from gradengine.kernels import HostKernels
from gradengine.kernels.cuda_device import DeviceArena
from gradengine.layout.cost import Bandwidth
from gradengine.plan.models import NAMED, Model, load_model
from gradengine.plan.prediction import DTYPES, Question, predict

ROOT = Path(__file__).parent.parent
TEN_GIGABITS = Bandwidth.gigabits(10)
QUESTION = Question(load_model("350m"), 4, TEN_GIGABITS, tp=2)

questions = st.builds(
    Question,
    st.sampled_from([NAMED["350m"], NAMED["1b"]]),
    st.integers(1, 300),
    st.floats(1e6, 1e12).map(Bandwidth),
    tp=st.sampled_from([1, 2, 4]),
    batch_size=st.integers(1, 64),
    micro_batches=st.integers(1, 16),
    dtype=st.sampled_from(sorted(DTYPES)),
    vocab_parallel=st.booleans(),
)


def asking(**changes):
    return dataclasses.replace(QUESTION, **changes)


@settings(max_examples=15)
@given(questions)
def test_the_choice_is_that_of_the_exchanges(question):
    plan = predict(question)
    for traffic in plan.exchanges.values():
        assert -1e-9 <= traffic.exposed_seconds <= traffic.seconds * (1 + 1e-9)
    assert (plan.choice is None) == (question.workers == 1)
    assert plan.waiting_seconds == (plan.exchanges[plan.choice].exposed_seconds if plan.choice else 0)


@settings(max_examples=15)
@given(questions)
def test_tensor_parallelism_divides_what_workers_exchange(question):
    one, two = (predict(dataclasses.replace(question, tp=tp)) for tp in (1, 2))
    share = 0.5 if question.vocab_parallel else 0.45
    assert share * one.layout.nbytes <= two.layout.nbytes < one.layout.nbytes
    assert two.memory["on_device"] < one.memory["on_device"]


def test_all_reduces_within_a_worker_are_counted_by_hand():
    whole, cut = (asking(vocab_parallel=cut).tp_seconds for cut in (False, True))
    assert cut / whole == pytest.approx(98 / 96)  # two more a micro-batch
    assert whole == pytest.approx(402653184 / 1.25e9)
    assert asking(tp_bandwidth=Bandwidth.gigabytes(900)).tp_seconds == pytest.approx(402653184 / 900e9)
    assert asking(dtype="bfloat16").cost.bytes_per_all_reduce == 2097152
    assert asking(tp=1).tp_seconds == 0


def test_more_micro_batches_make_the_exchange_rarer_and_no_longer():
    one, many = (predict(asking(micro_batches=n)) for n in (1, 8))
    assert one.exchanges == many.exchanges
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
        NAMED["70b"], at(1, 1 << 16), Bandwidth(at(1e18, 1.0)), tp=8, sequence_length=at(1, 1 << 20),
        batch_size=at(1, 1 << 20), micro_batches=at(1, 1 << 20), tflops=at(1e9, 1e-9),
    )  # fmt: skip
    found = predict(asked).as_json()
    assert all(math.isfinite(number) and number >= 0 for number in numbers_of(found))
    json.dumps(found, allow_nan=False)


def test_the_json_has_what_the_page_names_and_the_known_numbers():
    found = predict(asking(workers=np.int64(4), tp=np.uint8(2))).as_json()  # NumPy's integers are counts
    json.dumps(found)
    page = (ROOT / "docs/reference/plan-json.md").read_text()
    parts = [found, *(found[part] for part in ("question", "memory_bytes_per_rank", "tensor_parallel", "exchange"))]
    keys = {key for part in [*parts, found["question"]["model"], found["exchange"]["tcp://"]] for key in part}
    assert sorted(key for key in keys if f"`{key}`" not in page) == []
    assert found["question"]["bandwidth"] == {"bytes_per_second": 1.25e9}
    assert found["tensor_parallel"]["bytes_per_all_reduce"] == 4194304
    assert found["tensor_parallel"]["bytes_per_step"] == 201326592
    assert found["memory_bytes_per_rank"]["arena"] == found["memory_bytes_per_rank"]["gradients"]


# ---- memory ----

TINY = Model("tiny", "", 64, 2, 4, 2, 128, 256)


def memory(**changes):
    return predict(Question(**{"model": TINY, "workers": 1, "bandwidth": TEN_GIGABITS} | changes)).memory


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
    found = memory(dtype=dtype, optimizer=optimizer)
    assert found["on_device"] == bytes_a_weight * TINY.parameters
    assert found["master_weights"] == (0 if dtype == "float32" else 4 * TINY.parameters)
    assert [*found][:6] == ["weights", "gradients", "arena", "master_weights", "optimizer", "on_device"]
    assert sum([*found.values()][:5]) == found["on_device"]


def test_the_arena_counts_its_padding_and_is_what_an_accumulator_needs():
    padded = memory(model=Model("padded", "", 12, 1, 1, 1, 8, 5))
    assert padded["arena"] > padded["gradients"]
    model = load_model("350m")
    arena = memory(model=model)["arena"]
    assert arena <= GpuGradientAccumulator.memory_needed(model.layout()) < 1.01 * arena


def test_one_worker_has_no_rows_and_only_a_gpu_has_pinned_ones():
    rows = [
        (found["host_rows"], found["pinned_rows"])
        for found in (memory(), memory(workers=2, device="cpu"), memory(workers=2))
    ]
    assert rows == [(0, 0), (3 * DEFAULT_SHARE_BYTES, 0), (3 * DEFAULT_SHARE_BYTES, 4 * DEFAULT_SHARE_BYTES)]


class Rows(DeviceArena):
    """A device's arena that counts the bytes of its rows."""

    is_copying = note = copy = poll = None

    def __init__(self):
        self.nbytes = 0

    def rows(self, count, size):
        self.nbytes += 4 * count * size
        return [None] * count


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("name", ["350m", "1b"])
def test_rows_are_the_most_that_an_exchange_makes(name, workers):
    model, most = load_model(name), memory(model=load_model(name), workers=workers)
    layout, kernels, arenas = model.layout(), HostKernels(threads=1), [Rows() for _ in range(workers)]
    shares = shares_of(layout, workers, workers * DEFAULT_SHARE_BYTES)
    for rank, arena in enumerate(arenas):
        received = OrderedAllReduce(rank, workers, layout, shares, arena, kernels)._room.values()
        scratch = 4 * max(share.size for share in shares if share.owner == rank)
        assert most["host_rows"] / 2 < scratch + sum(each.nbytes for each in received) <= most["host_rows"]
    assert most["pinned_rows"] / 2 <= max(arena.nbytes for arena in arenas) <= most["pinned_rows"]


def test_frozen_weights_are_weights_and_nothing_else():
    frozen, own = (memory(model=dataclasses.replace(TINY, embedding=kind)) for kind in ("frozen", "own"))
    assert frozen["weights"] == own["weights"]
    assert own["gradients"] - frozen["gradients"] == 4 * 256 * 64


def test_what_a_gpu_lacks():
    asked = asking(model=load_model("7b"), workers=8, tp=1, dtype="bfloat16")
    assert predict(asked).missing_bytes == predict(asked).memory["on_device"] - 80 * 10**9 > 0
    assert predict(dataclasses.replace(asked, gpu_gigabytes=141.0)).missing_bytes == 0
    assert predict(dataclasses.replace(asked, device="cpu")).missing_bytes == 0


# ---- compute ----


def assumed(model, **changes):
    return predict(Question(model, 2, TEN_GIGABITS, **changes))


def test_arithmetic_is_counted_as_it_is_done():
    """One block by hand: 2 operations a weight and token, scores and their sum 2 each; backward twice that."""
    model, tokens = Model("one", "", 8, 1, 2, 1, 16, 32), 6
    attention, feed_forward, head = 8 * 8 * 2 + 8 * 4 * 2, 3 * 8 * 16, 8 * 32
    norms, scores = 3 * 8, 2 * 2 * 3 * 8
    forward = tokens * (2 * (attention + feed_forward + head + norms) + scores)
    plan = assumed(model, batch_size=2, sequence_length=3, tflops=1e-6)
    assert plan.forward_seconds == pytest.approx(forward / 1e6)
    assert plan.backward_seconds == pytest.approx(2 * forward / 1e6)


def test_tensor_parallel_ranks_share_the_arithmetic_and_wait_for_their_all_reduces():
    model = load_model("7b")
    whole, half = (assumed(model, tp=tp, tp_bandwidth=Bandwidth(1e18), vocab_parallel=True) for tp in (1, 2))
    waiting = assumed(model, tp=2, tp_bandwidth=TEN_GIGABITS, vocab_parallel=True)
    assert half.forward_seconds == pytest.approx(whole.forward_seconds / 2, rel=1e-3)
    for way in ("forward_seconds", "backward_seconds"):
        waits = getattr(waiting, way) - getattr(half, way)
        assert waits == pytest.approx(waiting.question.tp_seconds / 2, rel=1e-6)


def test_a_measured_backward_is_taken_as_it_is_unless_it_is_shorter_than_its_all_reduces():
    """350m over 2 ranks by 10 Gbit/s: 322 ms of all-reduces a step, half of them backward."""
    measured = predict(asking(tp=1, backward_seconds=0.1))
    assert (measured.backward_seconds, measured.forward_seconds) == (0.1, 0.05)
    with pytest.raises(CallerError, match=r"backward_seconds is shorter .*got 0.1 s, expected at least 0.161 s"):
        predict(asking(backward_seconds=0.1))
    assert predict(asking(backward_seconds=0.162, micro_batches=7)).backward_seconds == 0.162


# ---- the transports ----


def test_one_worker_needs_no_exchange():
    plan = predict(asking(workers=1))
    assert (plan.choice, plan.exchanges, plan.waiting_seconds) == (None, {}, 0)


def test_sockets_limit_tcp_and_a_server_and_links_alone_limit_nccl():
    for link, slow in ((100e9, 1.2e9), (1e9, 1e9)):
        found = predict(asking(bandwidth=Bandwidth(link), tp=1)).exchanges
        nbytes = load_model("350m").layout().nbytes
        assert found["process_group="].seconds == pytest.approx(1.5 * nbytes / link)
        assert found["tcp://"].seconds == pytest.approx(1.5 * nbytes / slow)
        assert found["served=True"].seconds == pytest.approx(4 * nbytes / slow)
    fast = asking(bandwidth=Bandwidth(100e9), socket_bandwidth=Bandwidth(5e9), tp=1)
    assert predict(fast).exchanges["tcp://"].seconds == pytest.approx(1.5 * nbytes / 5e9)


def test_nccl_is_taken_for_gpus_alone_and_only_if_it_is_faster():
    """7b over 8 workers by 200 Gbit/s: sockets take 39 s, and NCCL 1.9."""
    asked = asking(model=load_model("7b"), workers=8, tp=1, bandwidth=Bandwidth.gigabits(200), dtype="bfloat16")
    assert predict(asked).choice == "process_group="
    assert predict(dataclasses.replace(asked, micro_batches=2000)).choice == "tcp://"  # a step is long
    assert predict(dataclasses.replace(asked, bandwidth=Bandwidth.gigabits(1))).choice == "tcp://"  # the link limits
    on_cpus = predict(dataclasses.replace(asked, device="cpu"))
    assert (on_cpus.choice, "process_group=" in on_cpus.exchanges) == ("tcp://", False)


def test_a_tied_head_hides_nothing_of_the_exchange():
    own, tied = (
        predict(asking(model=dataclasses.replace(load_model("1b"), embedding=kind), tp=1, backward_seconds=100.0))
        for kind in ("own", "tied")
    )
    assert own.waiting_seconds < 0.2 * tied.waiting_seconds
    assert tied.waiting_seconds == pytest.approx(tied.exchanges["tcp://"].seconds)


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
        for field in ("tflops", "backward_seconds", "gpu_gigabytes")
        for value in (-1.0, math.nan, math.inf, 1e300, True, "1", 10**5000)
    ),
    *(
        (field, value)
        for field in ("bandwidth", "tp_bandwidth", "socket_bandwidth")
        for value in (10, "10 GB/s", Bandwidth(0.5), Bandwidth(1e19))
    ),
    ("bandwidth", None),
]


def test_what_is_out_of_range_or_unknown_is_refused_by_name():
    for field, value in REFUSED:
        with pytest.raises(CallerError, match=rf"^(unknown )?{field}\b") as refusal:
            asking(**{field: value})
        assert refusal.value.got is not None or re.search("Bandwidth", str(refusal.value))


def test_a_model_that_cannot_be_cut_so_is_refused():
    with pytest.raises(CallerError, match="num_heads cannot be divided by tp_size"):
        predict(asking(tp=3))
    assert GradientLayout is type(predict(asking(tp=4)).layout)
