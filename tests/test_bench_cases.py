"""Every case on the host at a tiny size: what it computes, and the bytes counted by hand."""

import importlib.util
import math

import numpy as np
import pytest

from gradengine.bench import harness, parts
from gradengine.bench.device import Case, Missing, open_host
from gradengine.bench.harness import Absent, Benchmark, Variant, check, relative_error, yardstick
from gradengine.bench.step import step
from gradengine.bench.workers import Crew, Reduction, ThreadReductions, exchange_variants, span_layout
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
    variants = step(tiny(dtype=dtype), (1, 3, 1))
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
    [(parts.clip, 3 * SET), (parts.norm, SET)],
    ids=["clip", "norm"],
)
def test_parts(variants_of, nbytes):
    variants = variants_of(tiny(1))
    checked(variants, 1e-5)
    assert counted(variants) == dict.fromkeys(["ours", "numpy by hand", "torch foreach"], nbytes)


def test_exchange():
    with exchange_variants(HOST, 3, elements=96) as variants:
        assert set(counted(variants).values()) == {2 * 2 * 4 * 96}
        names = ["ours tcp://", "ours unix://", "ours shared memory", "ours threads"]
        assert [each.name for each in variants if each.base] == names
    group = ThreadReductions(3, 96, 0)
    for _ in range(2):  # a second run begins from the contributions again
        group.prepare()
        assert group.error() > 0.1
        group.run()
        assert group.error() <= 1e-6


def test_the_copy_is_checked(monkeypatch):
    copy = yardstick(HOST)
    assert ([each[2] for each in checked([copy], 1e-5)], copy.bytes) == ([0.0], 2 * 4096)
    monkeypatch.setattr(harness, "spread", lambda *_: None)
    assert check(Benchmark("fake", [yardstick(HOST)], 1e-6, {}))[2] == ["copy"]


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
    assert absent[0].why.startswith("ResultsDiffer: fake: 'wrong'")
    assert {each.why for each in absent[3:6]} == {"OSError: no such device"}
    assert absent[6] == Absent("missing", "not here")
    assert failed == ["wrong", "infinite", "nan", "ours broken", "needed"]  # a peer that cannot run is no failure
    told = capsys.readouterr().err  # and what other threads of this process say meanwhile: torch has some
    assert told.count(", in broken\n") == told.count("OSError: no such device\n") == 3
    assert "ResultsDiffer" not in told  # ours, which needs no traceback


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
    with pytest.raises(Exception, match="wrong size: got 1, expected 2"):
        relative_error([np.ones(1, np.float32)], expected.__getitem__)


# ---- workloads ----


def test_the_largest_error_of_a_crew_counts_and_nan_before_all():
    crew = Crew.__new__(Crew)
    for errors, counts in (([0.25, 0.5], "0.5"), ([0.5, math.nan], "nan"), ([math.nan, 1], "nan")):
        crew.tell = lambda method, errors=errors: errors
        assert str(crew.error()) == counts


def test_workloads():
    workload = tiny(dtype="bfloat16")
    assert workload.gradient_bytes * 2 == workload.sum_bytes == SET
    assert workload.sums[0] == pytest.approx(sum(widened(batch[0]).reshape(-1) for batch in workload.batches))
    mean = np.concatenate(workload.sums) / 3
    assert workload.norm == pytest.approx(np.linalg.norm(mean))
    assert model_layout(6, 1024, head=False).num_elements == 6 * 15206400
    assert not np.array_equal(workload.batches[0][0], workload.batches[1][0])
    assert workload.first(2).batches == workload.batches[:2]
    whole = model_layout(24, 1024)
    assert (len(whole.slots), whole.nbytes) == (218, 1594036224)
    spans = span_layout((1 << 20) + 32)
    assert (len(spans.spans), spans.num_elements) == (2, (1 << 20) + 32)


@pytest.mark.parametrize("size", [(0, 4), (1, 6)])
def test_models_that_cannot_be(size):
    with pytest.raises(CallerError):
        model_layout(*size)


# ---- crews ----


class Faulty(Reduction):
    """Fails where it is told to."""

    def __init__(self, rank):
        super().__init__(rank, 2, 32)

    def run(self):
        raise ValueError(f"rank {self.rank} cannot")


def test_a_worker_that_fails_is_named():
    crew = Crew(Faulty, 2)
    crew.prepare()
    with pytest.raises(ExchangeError, match=r"rank [01]: ValueError: rank [01] cannot"):
        crew.run()
    crew.close()
