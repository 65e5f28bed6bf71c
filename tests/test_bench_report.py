"""The interleaver, what is shown and what is kept of a run, and the commands."""

import dataclasses
import gc
import itertools
import json
import os
import re
import subprocess
import sys
from io import StringIO

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from gradengine.bench import harness
from gradengine.bench.command import bench
from gradengine.bench.device import Case, Missing, Sample, open_host
from gradengine.bench.harness import Benchmark, Variant, as_json, interleave, measure, median_ratio
from gradengine.bench.machine import machine, versions
from gradengine.bench.peers import ByHand
from gradengine.bench.table import table_of
from gradengine.errors import CallerError

SMALL = ["--hidden", "8", "--blocks", "1", "--rounds", "2"]
EIGHTY = 80


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """What this machine does besides is in no table here."""
    monkeypatch.setattr(harness, "load", lambda: 0.5)


# ---- the interleaver ----


class FakeClock:
    """Time passes only where a case says so."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def case(self, variant, seconds, prepare=0.0):
        durations = iter(seconds)

        def run():
            assert not gc.isenabled()
            self.order.append(variant)
            self.now += next(durations)

        def put_back():
            self.now += prepare

        return Case(run, error=lambda: 0.0, prepare=put_back)


def test_cases_run_in_turn_unprepared_and_the_warm_up_is_dropped():
    clock, host = FakeClock(), open_host(1)
    host.clock, host.rest, host.work = clock, 0.0, 0.0
    cases = [clock.case("a", [9, 1, 2], prepare=100), clock.case("b", [9, 3, 4])]
    samples = interleave(cases, 2, host.sample, warm_up=1)
    assert samples == [[(1, 1, 1), (2, 2, 2)], [(3, 3, 3), (4, 4, 4)]]  # on the host all three times are one
    assert clock.order == ["a", "b"] * 3
    assert gc.isenabled()


def test_the_median_of_ratios_is_taken_pair_by_pair():
    assert median_ratio([3, 10, 4], [1, 5, 2]) == 2
    assert median_ratio([1, 100], [1, 1]) == 50.5


def test_the_collector_comes_back_after_a_failure_and_no_round_is_refused():
    def fail(case):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        interleave([Case(lambda: None, error=lambda: 0.0)], 1, fail, warm_up=1)
    assert gc.isenabled()
    with pytest.raises(CallerError):
        interleave([], 0, lambda case: Sample(1, 1, 1), warm_up=1)


# ---- rows and JSON ----


def variant(name, error=1e-7, **facts):
    return Variant(name, 1000, lambda: Case(lambda: None, error=lambda: error), **facts)


def absent():
    raise Missing("torch not installed")


def report(*variants, rounds=3, durations=(1.0,)):
    """Cases that take so many seconds each, in turn."""
    ticks = itertools.accumulate(seconds for each in itertools.cycle(durations) for seconds in (0.0, each))
    host = open_host(1)
    host.rest, host.work, host.warm_up, host.clock = 0.0, 0.0, 0, lambda: next(ticks)
    return measure(host, Benchmark("fake", variants, 1e-6, {"k": 2}), rounds)


def test_rows_compare_everything_with_each_base():
    names = ["ours a", "ours b", "peer", "copy"]
    variants = [variant(name, base=name.startswith("ours")) for name in names]
    rows = report(*variants, durations=[1.0, 2.0, 4.0, 0.25]).rows
    assert [list(row.ratios.values()) for row in rows[:3]] == [[1, 0.5], [2, 1], [4, 2]]
    assert [row.of_copy for row in rows] == [1 / 4, 1 / 8, 1 / 16, 1]
    assert rows[2].gb_per_s == 1000 / 4.0 / 1e9


def test_a_row_has_the_median_and_the_quantiles_of_its_samples():
    (row,) = report(variant("ours"), rounds=5, durations=[5.0, 3.0, 1.0, 2.0, 4.0]).rows
    assert list(row.samples_s) == [5, 3, 1, 2, 4]
    assert (row.p10_s, row.median_s, row.p90_s) == pytest.approx((1.4, 3, 4.6))
    assert (row.device_s, row.wall_s, row.host_s) == (3, 3, 3)
    assert row.of_copy is None


def test_json_says_everything_and_what_differs_is_not_timed():
    made = report(variant("ours", base=True), variant("peer", error=1.0), Variant("torch", 8, absent))
    kept = json.loads(as_json(made))
    assert kept["parameters"] == {"k": 2, "rounds": 3}
    assert (kept["machine"], kept["versions"]) == (machine(), versions())
    assert kept["absent"][1] == {"variant": "torch", "why": "torch not installed"}
    assert kept["failed"] == ["peer"]
    assert [row["samples_s"] for row in kept["rows"]] == [made.rows[0].samples_s]
    assert (kept["tolerance"], kept["load"]) == (1e-6, 0.5)


def test_machine_and_versions():
    assert set(machine()) == {"cpu", "cores", "memory_bytes", "system"}
    assert set(versions()) == {"commit", "gradengine", "numpy", "python", "torch"}
    assert machine()["cores"] >= 1
    assert machine()["memory_bytes"] > 1 << 20
    assert versions()["numpy"]


# ---- the table ----


def shown(made, width=200, **options):
    console = Console(width=width, file=StringIO(), record=True)
    console.print(table_of(made, **options))
    return console.export_text()


@pytest.mark.parametrize("seconds", [[2.0], [2.0, 31.0, 3.0, 40.0, 5.0]], ids=["quiet", "noisy"])
@pytest.mark.parametrize(
    "names",
    [["ours hold=1", "ours hold=4", "torch foreach, mean", "copy"], ["ours tcp://", "ours unix://", "ours threads"]],
)
def test_at_80_columns_no_header_and_no_figure_is_cut_or_folded(names, seconds):
    made = report(
        *(variant(name, base=name.startswith("ours")) for name in names), Variant("peer", 8, absent),
        durations=seconds,
    )  # fmt: skip
    text = shown(made, EIGHTY, wide=False)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= EIGHTY
    headers = next(line for line in text.splitlines() if line.startswith("variant"))
    bases = [f"vs {name.removeprefix('ours ')}" for name in names if name.startswith("ours")]
    assert re.split(r"\s{2,}", headers.strip()) == ["variant", "ms", "GB/s", *bases]
    assert all(len([line for line in text.splitlines() if line.startswith(f"{name} ")]) == 1 for name in names)
    assert "absent: peer: torch not installed" in text
    assert "p10-90" in shown(made)


def noisy(factor):
    """Two rounds of four in which the peer takes so many times the time of the others."""
    peer = itertools.chain.from_iterable(zip([1.0] * 20, [2.0, 2.0, 2.0 * factor, 2.0 * factor] * 5, strict=True))
    return report(variant("ours hold=1", base=True), variant("torch foreach, mean"), rounds=20, durations=list(peer))


@pytest.mark.parametrize(("factor", "is_given"), [(1.0, True), (1.24, True), (1.26, False), (8, False)])
def test_a_ratio_whose_rounds_differ_is_not_given_and_that_is_the_first_line(factor, is_given):
    made = noisy(factor)
    text, kept = shown(made), json.loads(as_json(made))
    assert made.noisy is kept["noisy"] is not is_given
    assert ("NOISY: 1 of 1" not in text) is ("noisy" not in text) is is_given
    assert bool(re.search(r"torch foreach, mean .* \d\.\d\dx", text)) is is_given
    assert kept["rows"][1]["ratios"]["ours hold=1"] == pytest.approx(1 + factor)
    assert kept["rows"][1]["quartiles"]["ours hold=1"] == pytest.approx([2, 2 * factor])
    if factor == 8:
        assert re.search(r"torch foreach, mean .* noisy 2\.0-16\b", text)


def test_one_bad_round_of_many_forbids_nothing_nor_does_a_yardstick():
    durations = [1.0, 2.0, 1.0] * 9 + [1.0, 500.0, 50.0]
    made = report(variant("ours", base=True), variant("peer"), variant("copy"), rounds=10, durations=durations)
    assert (made.noisy, made.rows[1].ratios["ours"]) == (False, 2)
    assert not re.search("copy.*x", shown(made))


@pytest.mark.parametrize(("load", "says"), [(None, False), (2.0, False), (12.3, True)])
def test_a_busy_machine_is_the_first_line(load, says):
    made = report(variant("ours hold=1", base=True))
    made = dataclasses.replace(
        made, load=load, machine={**made.machine, "cores": 2}, parameters={"k": 4, "hold": 4, "rounds": 2}
    )
    first, *others = shown(made).splitlines()
    assert ("BUSY MACHINE: load 12.3 on 2 cores" in first) is says
    assert "fake: k 4, rounds 2" in "".join([first, *others])  # and no hold, in which rows differ


# ---- the commands ----


@pytest.mark.parametrize(
    "arguments",
    [
        ["accumulate", "--k", "2", "--dtype", "bfloat16", "--hold", "2", *SMALL],
        ["clip", "--dtype", "bfloat16", *SMALL],
        ["norm", *SMALL],
        ["step", "--tensors", "3", "--elements", "100", "--rounds", "2"],
        ["exchange", "--workers", "2", "--megabytes", "0.0128", "--rounds", "2"],
    ],
    ids=" ".join,
)
def test_each_command_prints_a_table_and_writes_json(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "new" / "run.json"
    result = CliRunner().invoke(bench, [*arguments, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    kept = json.loads(path.read_text())
    assert kept["benchmark"] == arguments[0]
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert {name: str(kept["parameters"][name.lstrip("-")]) for name in options} == options
    for row in kept["rows"]:
        assert row["variant"] in result.output
        assert row["error"] <= kept["tolerance"]
        assert row["of_copy"] is not None


@pytest.mark.parametrize(("json", "is_shown"), [("run.json", True), ("-", False)])
def test_progress_is_shown_on_a_terminal_and_not_beside_json(json, is_shown, tmp_path):
    terminal, its_end = os.openpty()
    command = [sys.executable, "-m", "gradengine", "bench", "norm", *SMALL, "--json", json]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=its_end, text=True, check=True)
    os.write(its_end, b"the end")
    shown = os.read(terminal, 1 << 16).decode()
    os.close(its_end)
    os.close(terminal)
    assert ("norm: check ours" in shown) is ("norm: round" in shown) is is_shown
    assert "norm: round" not in done.stdout


def test_json_to_stdout_is_all_that_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(bench, ["clip", *SMALL, "--json", "-"], catch_exceptions=False)
    assert json.loads(result.stdout)["benchmark"] == "clip"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(([*name.split(), "--json", "/dev/null/x.json"], "--json FILE") for name in ("clip", "exchange", "gpu step")),
        (["clip", "--tensors", "3", "--blocks", "8"], "--blocks and --tensors exclude"),
    ],
)
def test_mistakes_are_said_before_anything_is_run(arguments, named):
    done = CliRunner().invoke(bench, arguments)
    assert isinstance(done.exception, CallerError)
    assert named in str(done.exception)


@pytest.mark.parametrize("arguments", [["clip", "--dtype", "int8"]])
def test_a_word_that_is_no_choice_is_a_mistake_of_usage(arguments):
    done = CliRunner().invoke(bench, arguments)
    assert (done.exit_code, "is not one of" in done.output) == (2, True)


def test_a_peer_that_is_wrong_is_named_and_the_exit_code(monkeypatch):
    monkeypatch.setattr(ByHand, "clip", lambda *_, **__: None)
    done = CliRunner().invoke(bench, ["step", *SMALL], catch_exceptions=False)
    assert done.exit_code == 1
    assert "failed: step: numpy by hand" in done.output
