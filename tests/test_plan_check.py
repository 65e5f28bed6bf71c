"""The script that holds predictions against this machine: its logic, at sizes where nothing takes time."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

from gradengine.errors import GradientError
from gradengine.plan.machine import Rates, rates_of
from gradengine.plan.models import Model
from gradengine.plan.prediction import Question, predict

ROOT = Path(__file__).parent.parent
ELEMENTS = 32 * 1024
RESULT = ROOT / "bench/results/cpu-2core-plan.json"


@pytest.fixture
def plan_check(monkeypatch):
    """The script as a module; workers' processes find it by the same path."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.delitem(sys.modules, "plan_check", raising=False)
    import plan_check

    return plan_check


def assert_sound(checks):
    assert all(0 < check.predicted < math.inf and 0 < check.measured < math.inf for check in checks)


def test_exchanges_are_predicted_and_measured_in_one_run(plan_check):
    checks, rates = plan_check.exchange_checks(2, ELEMENTS, rounds=1)
    names = [check.what.rpartition(", ")[2] for check in checks]
    assert names == rates.transports("cpu")
    assert_sound(checks)
    assert min(rates.tcp, rates.unix, rates.sum, rates.copy) > 0
    for name, check in zip(names, checks, strict=True):
        assert check.predicted == rates.seconds(name, 4 * ELEMENTS, 2)


# A model's layout in place of the benchmark's spans, so that the command's own path can be asked for the same figures.
MODEL = Model("tiny", "", 256, 4, 4, 4, 1024, 512)
RATES = Rates(2, tcp=4e9, unix=8e9, sum=20e9, copy=10e9, shared_memory=9e9)


@pytest.mark.parametrize("workers", [2, 3])
def test_what_is_compared_with_runs_is_what_the_command_predicts(plan_check, monkeypatch, workers):
    monkeypatch.setattr(plan_check, "span_layout", lambda _: MODEL.layout())
    asked = Question(MODEL, workers, machine=RATES, backward_seconds=0.01)
    here = predict(dataclasses.replace(asked, device="cpu")).exchanges
    assert plan_check.predicted_exchanges(RATES, 0, workers) == {name: pair[1].seconds for name, pair in here.items()}
    here = predict(asked).exchanges  # whose backward is elsewhere
    assert plan_check.predicted_wait(RATES, 0, workers, 0.01) == here["tcp://"][1].exposed_seconds


def test_the_constants_are_those_of_the_command(plan_check):
    found = {"owner": {"sum": 0.1, "copy": 0.3}, "tcp": {"seconds": 1.0}, "unix": {"seconds": 0.5}}
    seconds = {"sum": 0.1, "copy": 0.3, "tcp": 1.0, "unix": 0.5}
    assert plan_check.rates(found, ELEMENTS) == rates_of(seconds, ELEMENTS)
    found["shared_memory"], seconds["shared_memory"] = {"seconds": 0.2}, 0.2
    assert plan_check.rates(found, ELEMENTS) == rates_of(seconds, ELEMENTS)


def test_a_real_engine_is_overlapped_with_a_wait(plan_check):
    checks = plan_check.overlap_checks(ELEMENTS, [0.01], rounds=1)
    assert [check.kind for check in checks] == ["overlap"]
    assert_sound(checks)


def test_memory_is_predicted_for_rank_0_and_the_last(plan_check):
    checks = plan_check.memory_checks(1 << 20, [1, 2])
    if not checks:
        pytest.skip("this system keeps no peak of a process's memory")
    assert [re.search(r"rank \d", check.what)[0] for check in checks] == ["rank 0", "rank 0", "rank 1"]
    alone, first, last = (check.predicted for check in checks)
    assert alone == 4 << 20
    assert first == last == (4 << 20) + 2 * (2 << 20)  # half of it is this rank's: a row for the other's part, a sum
    assert_sound(checks)


def test_what_computes_something_else_is_not_timed(plan_check):
    class Wrong:
        def prepare(self): ...
        def run(self): ...
        def error(self):
            return math.nan

    with pytest.raises(GradientError, match="'ours' computes something else"):
        plan_check.refuse_wrong("ours", Wrong())


def test_the_wait_that_is_predicted_falls_with_a_longer_backward_to_what_comes_after_it(plan_check):
    elements = 25 << 20
    waits = [plan_check.predicted_wait(RATES, elements, 2, backward) for backward in (0.0, 0.05, 0.1, 10.0)]
    assert waits == sorted(waits, reverse=True)
    nbytes = 4 * elements  # each worker has a core of its own
    taking, clip = 2 * nbytes / RATES.sum, nbytes / RATES.copy
    assert waits[0] == pytest.approx(RATES.seconds("tcp://", nbytes, 2) + taking + clip)
    assert waits[-1] == pytest.approx((RATES.seconds("tcp://", nbytes, 2) + taking) / 25 + clip)


def test_samples_are_taken_in_turn_and_the_first_round_is_dropped(plan_check, monkeypatch):
    monkeypatch.setattr(plan_check, "REST_SECONDS", 0.0)
    order, values = [], iter([100.0, 1.0, 5.0, 3.0])

    def said():
        order.append("a")
        return {"sum": next(values)}

    found = plan_check.medians(
        {"a": (said, lambda: order.append("prepared")), "b": (lambda: order.append("b"), lambda: None)}, rounds=3
    )
    assert found["a"] == {"sum": 3.0}
    assert found["b"]["seconds"] >= 0
    assert order == ["prepared", "a", "b"] * 4


def test_errors_are_relative_to_what_was_measured(plan_check):
    def check(what, predicted, measured):
        return plan_check.Check("exchange", what, "s", predicted, measured)

    checks = [check("2 workers, 8 MB, tcp://", 8, 10), check("3 workers, 8 MB, tcp://", 14, 10)]
    assert [each.error for each in checks] == [pytest.approx(-0.2), pytest.approx(0.4)]
    assert plan_check.medians_of_error(checks) == {"exchange tcp://": pytest.approx(0.3)}


def test_what_was_found_is_shown_and_written(plan_check, tmp_path, monkeypatch, capsys):
    rates = Rates(2, 4e9, 8e9, sum=20e9, copy=10e9)
    asked = []

    def exchanges(workers, elements, rounds):
        asked.append((workers, 4e-6 * elements, rounds))
        return [plan_check.Check("exchange", f"{workers} workers, 1 MB, tcp://", "s", 0.011, 0.010)], rates

    monkeypatch.setattr(plan_check, "exchange_checks", exchanges)
    monkeypatch.setattr(plan_check, "overlap_checks", lambda *_: [plan_check.Check("overlap", "wait", "s", 0.1, 0.2)])
    monkeypatch.setattr(plan_check, "memory_checks", lambda *_: [plan_check.Check("memory", "rank 0", "B", 1e6, 1e6)])
    path = tmp_path / "plan.json"
    sizes = ["--workers", "2", "3", "--megabytes", "0.128", "1.28"]
    monkeypatch.setattr(sys, "argv", ["plan_check.py", "--rounds", "1", *sizes, "--json", str(path)])
    plan_check.main()
    assert asked == [(2, 0.128, 1), (2, 1.28, 1), (3, 0.128, 1), (3, 1.28, 1)]
    shown, kept = capsys.readouterr().out, json.loads(path.read_text())
    assert re.search(r"tcp://.* 11\.0 ms .* 10\.0 ms .*\+10%", shown)
    assert re.search(r"median, overlap .*50%", shown)
    assert {"machine", "versions", "load", "rates", "checks", "median_absolute_error"} <= set(kept)
    assert kept["median_absolute_error"] == {"exchange tcp://": pytest.approx(0.1), "overlap": 0.5, "memory": 0.0}
    assert kept["rates"][0]["tcp"] == 4e9
    assert kept["parameters"]["rounds"] == 1


# ---- what is recorded ----


def test_the_page_says_how_far_off_the_recorded_run_was():
    kept = json.loads(RESULT.read_text())
    page = (ROOT / "docs/plan.md").read_text()
    for kind, error in kept["median_absolute_error"].items():
        assert re.search(rf"^\| {re.escape(kind)} \| {error:.0%} \|", page, re.MULTILINE), f"{kind}: {error:.0%}"


def test_the_page_says_where_the_limits_of_a_process_are_from():
    rates = json.loads(RESULT.read_text())["rates"]
    page = (ROOT / "docs/plan.md").read_text()
    sockets = [each["tcp"] / 2e9 for each in rates]
    summed = [each["sum"] / 1e9 for each in rates]
    assert f"{min(sockets):.1f} to {max(sockets):.1f} GB/s" in page
    assert f"{min(summed):.0f} to {max(summed):.0f} GB/s" in page


def test_the_page_has_the_range_of_the_recorded_errors():
    page = (ROOT / "docs/plan.md").read_text()
    errors = [check["error"] for check in json.loads(RESULT.read_text())["checks"] if check["kind"] == "overlap"]
    assert f"| {min(errors):+.0%} to {max(errors):+.0%} |" in page


def test_the_page_says_by_how_much_the_recorded_predictions_were_off_at_most():
    largest = {"exchange": 0.0, "overlap": 0.0}
    for check in json.loads(RESULT.read_text())["checks"]:
        if check["kind"] in largest:
            largest[check["kind"]] = max(largest[check["kind"]], abs(check["error"]))
    said = f"Exchanges were within {largest['exchange']:.0%} and waits within {largest['overlap']:.0%}"
    assert said in (ROOT / "docs/plan.md").read_text()


def test_the_recorded_errors_are_those_of_its_figures():
    kept = json.loads(RESULT.read_text())
    for check in kept["checks"]:
        assert check["error"] == pytest.approx(check["predicted"] / check["measured"] - 1)
