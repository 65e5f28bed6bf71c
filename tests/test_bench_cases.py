"""Every case on the host at a tiny size: what it computes, and the bytes counted by hand."""

import importlib.util
import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from transports import SOON

from gradengine.bench import harness, parts
from gradengine.bench.device import Case, Missing, open_host, peak_growth
from gradengine.bench.harness import Absent, Benchmark, Variant, check, relative_error, yardsticks
from gradengine.bench.peers import ByHand
from gradengine.bench.step import step
from gradengine.bench.workers import Crew, Reduction, exchange_variants, span_layout
from gradengine.bench.workload import Workload, model_layout, widened
from gradengine.errors import CallerError, ExchangeError

SET = 4 * (16 + 4 + 4 + 16 + 3 * 64 + 4 + 4)  # bytes of one block of hidden size 4 in fp32
TORCH = importlib.util.find_spec("torch") is not None
HOST, WITHOUT_TORCH = open_host(1), open_host(1)
WITHOUT_TORCH.torch_module = None
HOST.copied = 1024


def tiny(micro_batches=3, dtype="float32", host=HOST):
    return Workload.drawn(host, model_layout(1, 4, head=False), micro_batches, dtype)


def counted(variants):
    return {variant.name: variant.bytes for variant in variants}


def checked(variants, tolerance):
    """What can be timed; nothing has failed, and only torch is absent."""
    found, absent, failed = check(Benchmark("fake", variants, tolerance, {}))
    assert failed == []
    assert {each.variant.partition(" ")[0] for each in absent} <= (set() if TORCH else {"torch"})
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulate(dtype):
    variants = parts.accumulate(tiny(dtype=dtype), (1, 2))
    checked(variants, 1e-6)
    gradient = SET if dtype == "float32" else SET // 2
    by_passes = SET + 3 * (gradient + 2 * SET)
    assert counted(variants) == {
        "ours hold=1": 3 * gradient + (1 + 2 + 2) * SET,
        "ours hold=2": 3 * gradient + (1 + 2) * SET,
        "numpy by hand": by_passes,
        "torch foreach" if dtype == "float32" else "torch add_": by_passes,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step(dtype):
    variants = step(tiny(dtype=dtype), (1, 3))
    checked(variants, 1e-5)
    gradient = SET if dtype == "float32" else SET // 2
    kind = "foreach" if dtype == "float32" else "add_"
    by_passes = SET + 3 * (gradient + 2 * SET)
    assert counted(variants) == {
        "ours hold=1": 3 * gradient + (1 + 2 + 2) * SET + 2 * SET,
        "ours hold=3": 3 * gradient + SET + 2 * SET,
        "numpy by hand": by_passes + SET + 2 * SET,
        f"torch {kind}, sum": by_passes + SET + 2 * SET,
        f"torch {kind}, mean": by_passes + 2 * SET + SET + 2 * SET,
    }


@pytest.mark.parametrize(
    ("variants_of", "nbytes"),
    [
        (parts.clip, 3 * SET),
        (parts.norm, SET),
        (lambda workload: parts.hand_back(workload, to_bf16=False), 2 * SET),
    ],
    ids=["clip", "norm", "hand back"],
)
def test_parts(variants_of, nbytes):
    variants = variants_of(tiny(1))
    checked(variants, 1e-5)
    assert counted(variants) == dict.fromkeys(["ours", "numpy by hand", "torch foreach"], nbytes)


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2**-24), ("bfloat16", 2**-8)])
def test_a_clip_is_by_a_factor_that_rounds(dtype, rounding):
    """Halves are exact in every dtype: all errors were 0."""
    errors = {variant.name: error for variant, _, error in checked(parts.clip(tiny(1, dtype)), 3e-2)}
    assert all(rounding / 16 < error for error in errors.values())
    assert errors["ours"] <= 2 * rounding


@pytest.mark.parametrize("to_bf16", [False, True])
def test_an_odd_hand_back_is_of_buffers_that_lie_at_odd_elements(monkeypatch, to_bf16):
    given, sound = [], HOST.kernels.scale
    monkeypatch.setattr(HOST.kernels, "scale", lambda *buffers: (given.append(buffers), sound(*buffers)))
    odd = Workload.drawn(HOST, model_layout(1, 4, odd=True), 1, odd=True)
    checked(parts.hand_back(odd, to_bf16=to_bf16), 3e-2)
    (sources, _, destinations), *_ = given
    assert len(sources) == len(destinations) == len(odd.layout.slots)
    arrays = [buffer.data for buffer in (*sources, *destinations)]
    assert {array.ctypes.data // array.itemsize % 2 for array in arrays} == {1}


def test_holding_one_is_listed_once():
    assert [variant.name for variant in step(tiny(), (1, 1)) if variant.base] == ["ours hold=1"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_exchange(world_size):
    with exchange_variants(HOST, world_size, elements=96) as variants:
        for _, case, _ in checked(variants, 1e-6):  # a second run begins from the contributions again
            case.prepare()
            case.run()
            assert case.error() <= 1e-6
        assert set(counted(variants).values()) == {2 * (world_size - 1) * 4 * 96}
        assert [each.name for each in variants if each.base] == [
            "ours tcp://",
            "ours unix://",
            "ours shared memory",
            "ours threads",
        ]


def test_yardsticks():
    variants = yardsticks(HOST)
    checked(variants, 0.0)
    assert counted(variants) == {"copy": 2 * 4096, "triad": 3 * 4096}


def test_a_copy_that_copies_nothing_is_no_yardstick(monkeypatch):
    monkeypatch.setattr(harness, "spread", lambda *_: None)
    assert check(Benchmark("fake", yardsticks(HOST), 1e-6, {}))[2] == ["copy", "triad"]


def test_missing_torch_is_named():
    workload = tiny(host=WITHOUT_TORCH)
    with exchange_variants(WITHOUT_TORCH, 2, 32) as exchanges:
        kinds = [step(workload, (3,)), parts.accumulate(workload), parts.clip(workload.first(1)), exchanges[-1:]]
        found = [check(Benchmark("fake", variants, 1e-5, {}))[1:] for variants in kinds]
    names = [["foreach, sum", "foreach, mean"], ["foreach"], ["foreach"], ["gloo"]]
    assert found == [([Absent(f"torch {name}", "torch not installed") for name in each], []) for each in names]


# ---- the check ----


def fake(name, error=0.0, **facts):
    return Variant(name, 8, lambda: Case(lambda: None, error=lambda: error), **facts)


def broken():
    raise OSError("no such device\nand a long tale of it")


def missing():
    raise Missing("not here")


def test_one_variant_that_fails_leaves_the_others(capsys):
    variants = [
        fake("good"),
        fake("its own", error=1e-2, tolerance=1e-1),
        fake("wrong", error=2e-3),
        fake("infinite", error=math.inf),
        fake("nan", error=math.nan, base=True),
        Variant("broken", 8, broken),
        Variant("ours broken", 8, broken, base=True),
        Variant("needed", 8, broken, required=True),
        Variant("missing", 8, missing, base=True),
    ]
    found, absent, failed = check(Benchmark("fake", variants, 1e-3, {}))
    assert [(variant.name, error) for variant, _, error in found] == [("good", 0.0), ("its own", 1e-2)]
    assert [each.variant for each in absent] == [variant.name for variant in variants[2:]]
    assert absent[0].why == (
        "ResultsDiffer: fake: 'wrong' has a wrong result: got a relative error of 0.002, "
        "expected at most 0.001 from the result in fp64"
    )
    assert {each.why for each in absent[3:6]} == {"OSError: no such device"}
    assert absent[6] == Absent("missing", "not here")
    assert failed == ["wrong", "infinite", "nan", "ours broken", "needed"]  # a peer that cannot run is no failure
    told = capsys.readouterr().err  # and what other threads of this process say meanwhile: torch has some
    assert told.count(", in broken\n") == told.count("OSError: no such device\n") == 3
    assert "ResultsDiffer" not in told  # ours, which needs no traceback


def test_a_peer_that_computes_something_else_is_a_failure(monkeypatch):
    monkeypatch.setattr(ByHand, "add", lambda self, gradients: None)
    assert check(Benchmark("fake", parts.accumulate(tiny()), 1e-5, {}))[2] == ["numpy by hand"]


def test_relative_errors():
    expected = [np.zeros(2), np.array([4.0, 1.0])]
    near = [np.zeros(2, np.float32), np.array([4, 3], np.float32)]
    assert relative_error(near, expected.__getitem__) == 0.5
    assert relative_error([], expected.__getitem__) == 0
    assert relative_error([np.ones(2, np.float32)], expected.__getitem__) == 1  # nothing to be relative to
    assert math.isnan(relative_error([near[0], np.array([np.nan, 1], np.float32)], expected.__getitem__))
    long = np.ones(3 << 16, np.float32)  # compared in pieces
    long[-1] = 3
    assert relative_error([long], lambda _: np.ones(3 << 16)) == 2
    with pytest.raises(Exception, match="another size: got 1, expected 2"):
        relative_error([np.ones(1, np.float32)], expected.__getitem__)


def test_by_hand_refuses_what_is_not_finite():
    with pytest.raises(FloatingPointError):
        ByHand([np.array([np.inf], np.float32)]).clip(1.0)


# ---- workloads ----


def test_workloads():
    workload = tiny(dtype="bfloat16")
    assert workload.gradient_bytes * 2 == workload.sum_bytes == SET
    assert workload.sums[0] == pytest.approx(sum(widened(batch[0]).reshape(-1) for batch in workload.batches))
    mean = np.concatenate(workload.sums) / 3
    assert workload.norm == pytest.approx(np.linalg.norm(mean))
    assert model_layout(6, 1024, head=False).num_elements == 6 * 15206400
    assert not np.array_equal(workload.batches[0][0], workload.batches[1][0])
    assert workload.first(2).batches == workload.batches[:2]


def test_the_350m_model():
    aligned, odd = model_layout(24, 1024), model_layout(24, 1024, odd=True)
    assert (len(aligned.slots), len(odd.slots), aligned.nbytes) == (218, 218, 1594036224)
    assert all(slot.size % 8 for slot in odd.slots)
    assert [slot.name for slot in aligned.slots] == [slot.name for slot in odd.slots]


@pytest.mark.parametrize(
    "make",
    [lambda: model_layout(0, 4), lambda: model_layout(1, 6), lambda: tiny(0), lambda: tiny(dtype="int8")],
)
def test_workloads_that_cannot_be(make):
    with pytest.raises(CallerError):
        make()


# ---- memory ----


def test_memory_is_measured_at_its_peak():
    size = 1 << 26
    kept, grown = peak_growth(lambda: [np.ones(size, np.uint8), np.ones(size, np.uint8).sum()][0])
    assert kept.nbytes == size
    assert grown is None or 1.8 * size < grown < 3 * size


def test_a_step_takes_one_arena():
    """In a process of its own: in one that has run other tests, what they have freed may be used again unseen."""
    script = """
import numpy as np
from gradengine.bench.device import open_host
from gradengine.bench.step import step
from gradengine.bench.workload import Workload, model_layout

used_before = [np.ones(1 << 20, np.float32) for _ in range(20)]
del used_before
print(step(Workload.drawn(open_host(1), model_layout(1, 512, head=False), 2), (2,))[0].build().arenas)
"""
    arenas = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SOON, check=True)
    assert arenas.stdout == "None\n" or 0.9 < float(arenas.stdout) < 1.3  # 15 MB: the interpreter's own growth shows


def test_of_a_small_set_no_memory_is_shown():
    assert step(tiny(), (1,))[0].build().arenas is None


# ---- crews ----


class Faulty(Reduction):
    """Fails where it is told to."""

    def __init__(self, rank):
        super().__init__(rank, 2, 32)

    def run(self):
        raise ValueError(f"rank {self.rank} cannot")


def refuse(rank):
    raise OSError(f"no room for {rank}")


def test_a_worker_that_fails_is_named():
    crew = Crew(Faulty, 2)
    crew.prepare()
    with pytest.raises(ExchangeError, match=r"rank [01]: ValueError: rank [01] cannot"):
        crew.run()
    crew.close()


class Judged:
    """Has the error that its rank is given."""

    def __init__(self, errors, rank):
        self.error = lambda: errors[rank]


@pytest.mark.parametrize(("errors", "counts"), [((0.25, 0.5), "0.5"), ((0.5, math.nan), "nan"), ((math.nan, 1), "nan")])
def test_the_largest_error_of_a_crew_counts_and_nan_before_all(errors, counts):
    crew = Crew(partial(Judged, errors), 2)
    assert str(crew.error()) == counts
    crew.close()


def test_a_worker_that_cannot_be_made_is_named():
    with pytest.raises(ExchangeError, match=r"rank (\d): OSError: no room for \1"):
        Crew(refuse, 2)


def test_spans_fill_the_set():
    layout = span_layout((1 << 20) + 32)
    assert layout.arena_size == layout.num_elements == (1 << 20) + 32
    assert len(layout.spans) == 2
