"""Every case at a tiny size: what it computes, and the bytes counted by hand."""

import importlib.util
import math

import numpy as np
import pytest

from gradengine.bench import by_hand, torch_peers
from gradengine.bench.accumulate import accumulate_cases
from gradengine.bench.case import Absent, Case, ResultsDiffer, check_results, relative_error
from gradengine.bench.clip import clip_cases
from gradengine.bench.crew import ProcessCrew
from gradengine.bench.exchange import exchange_cases
from gradengine.bench.memory import peak_growth
from gradengine.bench.reduction import Reduction, span_layout
from gradengine.bench.step import step_cases
from gradengine.bench.workload import Workload, block_layout, widened
from gradengine.bench.yardstick import yardsticks
from gradengine.errors import CallerError, ExchangeError

SET = 4 * (16 + 4 + 4 + 16 + 3 * 64 + 4 + 4)  # bytes of one block of hidden size 4 in fp32
TORCH = importlib.util.find_spec("torch") is not None


def tiny(micro_batches=3, dtype="float32"):
    return Workload.random(block_layout(1, 4), micro_batches, dtype)


def counted(cases):
    return {case.variant: case.bytes for case in cases if isinstance(case, Case)}


def present(cases):
    return [case for case in cases if isinstance(case, Case)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulate(dtype):
    cases = accumulate_cases(tiny(dtype=dtype), hold=2)
    assert all(found.error <= 1e-6 for found in check_results(present(cases), 1e-6))
    gradient = SET if dtype == "float32" else SET // 2
    expected = {
        "ours hold=1": 3 * gradient + (1 + 2 + 2) * SET,
        "ours hold=2": 3 * gradient + (1 + 2) * SET,
        "numpy by hand": SET + 3 * (gradient + 2 * SET),
    }
    if TORCH:
        expected["torch foreach" if dtype == "float32" else "torch add_"] = SET + 3 * (gradient + 2 * SET)
    assert counted(cases) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step(dtype):
    cases = step_cases(tiny(dtype=dtype), hold=3)
    check_results(present(cases), 1e-5)
    gradient = SET if dtype == "float32" else SET // 2
    kind = "foreach" if dtype == "float32" else "add_"
    by_passes = SET + 3 * (gradient + 2 * SET)
    expected = {
        "ours hold=1": 3 * gradient + (1 + 2 + 2) * SET + 2 * SET,
        "ours hold=3": 3 * gradient + SET + 2 * SET,
        "numpy by hand": by_passes + SET + 2 * SET,
    }
    if TORCH:
        expected[f"torch {kind}, sum"] = by_passes + SET + 2 * SET
        expected[f"torch {kind}, mean"] = by_passes + 2 * SET + SET + 2 * SET
    assert counted(cases) == expected


def test_clip():
    cases = clip_cases(tiny(micro_batches=1))
    check_results(present(cases), 1e-5)
    assert set(counted(cases).values()) == {3 * SET}


def test_holding_one_is_listed_once():
    assert [case.variant for case in present(step_cases(tiny(), hold=1)) if case.ours] == ["ours hold=1"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_exchange(world_size):
    with exchange_cases(world_size, elements=96) as cases:
        check_results(present(cases), 1e-6)
        check_results(present(cases), 1e-6)  # a second run begins from the contributions again
        assert set(counted(cases).values()) == {2 * (world_size - 1) * 4 * 96}
        assert [case.variant for case in present(cases) if case.ours] == ["ours tcp://", "ours unix://", "ours threads"]


def test_yardsticks():
    copy, triad = yardsticks("step", 1000)
    check_results([copy, triad], 0.0)
    assert (copy.bytes, triad.bytes) == (2 * 4000, 3 * 4000)


def test_missing_torch_is_named(monkeypatch):
    monkeypatch.setattr(torch_peers.importlib.util, "find_spec", lambda name: None)
    step, accumulate, clip = step_cases(tiny(), 3), accumulate_cases(tiny(), 3), clip_cases(tiny(1))
    assert step[-2:] == [
        Absent("torch foreach, sum", "torch not installed"),
        Absent("torch foreach, mean", "torch not installed"),
    ]
    assert accumulate[-1] == clip[-1] == Absent("torch foreach", "torch not installed")
    assert torch_peers.torch_version() is None
    with exchange_cases(2, 32) as cases:
        assert cases[-1] == Absent("torch gloo", "torch not installed")


def test_a_peer_that_computes_something_else_is_an_error(monkeypatch):
    monkeypatch.setattr(by_hand, "add", lambda totals, gradients: None)
    with pytest.raises(ResultsDiffer, match="accumulate: 'numpy by hand' computes something else: got a relative"):
        check_results(present(accumulate_cases(tiny(), hold=3)), 1e-5)


@pytest.mark.parametrize("error", [math.nan, math.inf, 2e-6])
def test_what_is_not_close_is_refused(error):
    with pytest.raises(ResultsDiffer):
        check_results([Case("x", "y", 0, run=lambda: None, error=lambda: error)], 1e-6)


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
    with pytest.raises(ResultsDiffer, match="another size: got 1, expected 2"):
        relative_error([np.ones(1, np.float32)], expected.__getitem__)


def test_workloads():
    workload = tiny(dtype="bfloat16")
    assert workload.gradient_bytes * 2 == workload.total_bytes == SET
    assert workload.total(0) == pytest.approx(sum(widened(batch[0]).reshape(-1) for batch in workload.micro_batches))
    mean = [workload.total(i) / 3 for i in range(9)]
    assert workload.norm == pytest.approx(np.linalg.norm(np.concatenate(mean)))
    assert block_layout(6, 1024).num_elements == 6 * 15206400
    assert np.array_equal(tiny().micro_batches[1][2], tiny().micro_batches[1][2])


@pytest.mark.parametrize(
    "make",
    [lambda: block_layout(0, 4), lambda: block_layout(1, 6), lambda: tiny(0), lambda: tiny(dtype="int8")],
)
def test_workloads_that_cannot_be(make):
    with pytest.raises(CallerError):
        make()


def test_by_hand_refuses_what_is_not_finite():
    with pytest.raises(FloatingPointError):
        by_hand.clip([np.array([np.inf], np.float32)], 1.0)


def test_memory_is_measured_at_its_peak():
    size = 1 << 26
    kept, grown = peak_growth(lambda: [np.ones(size, np.uint8), np.ones(size, np.uint8).sum()][0])
    assert kept.nbytes == size
    assert grown is None or 1.8 * size < grown < 3 * size


def test_a_step_takes_one_arena():
    used_before = [np.ones(1 << 20, np.float32) for _ in range(20)]
    del used_before
    workload = Workload.random(block_layout(1, 512), 2)
    ours = next(case for case in present(step_cases(workload, hold=2)) if case.ours)
    assert ours.arenas is None or 0.9 < ours.arenas < 1.3  # 15 MB: the interpreter's own growth shows


class Faulty(Reduction):
    """Fails where it is told to."""

    def __init__(self, rank):
        super().__init__(rank, 2, 32)

    def run(self):
        raise ValueError(f"rank {self.rank} cannot")

    def close(self):
        pass


def refuse(rank):
    raise OSError(f"no room for {rank}")


def test_a_worker_that_fails_is_named():
    crew = ProcessCrew(Faulty, 2)
    crew.prepare()
    with pytest.raises(ExchangeError, match=r"rank [01]: ValueError: rank [01] cannot"):
        crew.run()
    crew.close()


def test_a_worker_that_cannot_be_made_is_named():
    with pytest.raises(ExchangeError, match=r"rank (\d): OSError: no room for \1"):
        ProcessCrew(refuse, 2)


def test_spans_fill_the_set():
    layout = span_layout((1 << 20) + 32)
    assert layout.arena_size == layout.num_elements == (1 << 20) + 32
    assert len(layout.spans) == 2
