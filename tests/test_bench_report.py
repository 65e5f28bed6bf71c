"""What is shown and what is kept of a run."""

import dataclasses
import itertools
import json
import re
from io import StringIO

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from gradengine.bench import harness
from gradengine.bench.benchmarks import NAMES
from gradengine.bench.command import bench
from gradengine.bench.device import Case, Missing, open_host
from gradengine.bench.harness import Benchmark, Variant, as_json, measure
from gradengine.bench.machine import _dotted, machine, versions
from gradengine.bench.peers import ByHand
from gradengine.bench.table import _ms, table_of
from gradengine.errors import CallerError

SMALL = ["--hidden", "8", "--blocks", "1", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """What this machine does besides is in no table here."""
    monkeypatch.setattr(harness, "load", lambda: 0.5)


def variant(name, error=1e-7, arenas=None, **facts):
    return Variant(name, 1000, lambda: Case(lambda: None, error=lambda: error, arenas=arenas), **facts)


def absent():
    raise Missing("torch not installed")


def report(*variants, rounds=3, durations=(1.0,)):
    """Cases that take so many seconds each, in turn."""
    ticks = itertools.accumulate(seconds for each in itertools.cycle(durations) for seconds in (0.0, each))
    host = open_host(1)
    host.rest, host.work, host.warm_up, host.clock = 0.0, 0.0, 0, lambda: next(ticks)
    return measure(host, Benchmark("fake", variants, 1e-6, {"k": 2}), rounds)


def test_rows_compare_everything_with_each_base():
    names = ["ours a", "ours b", "peer", "copy", "triad"]
    variants = [variant(name, base=name.startswith("ours")) for name in names]
    rows = report(*variants, durations=[1.0, 2.0, 4.0, 0.25, 0.5]).rows
    assert [list(row.ratios.values()) for row in rows[:3]] == [[1, 0.5], [2, 1], [4, 2]]
    assert list(rows[4].ratios) == ["ours a", "ours b"]
    assert (rows[2].of_copy, rows[2].of_triad, rows[4].of_triad) == (1 / 16, 1 / 8, 1)
    assert rows[2].gb_per_s == 1000 / 4.0 / 1e9


def test_a_row_has_the_median_and_the_quantiles_of_its_samples():
    (row,) = report(variant("ours"), rounds=5, durations=[5.0, 3.0, 1.0, 2.0, 4.0]).rows
    assert list(row.samples_s) == [5, 3, 1, 2, 4]
    assert (row.p10_s, row.median_s, row.p90_s) == pytest.approx((1.4, 3, 4.6))
    assert (row.device_s, row.wall_s, row.host_s) == (3, 3, 3)
    assert (row.of_copy, row.of_triad) == (None, None)


def test_what_differs_is_not_timed():
    made = report(variant("ours", base=True), variant("peer", error=1.0))
    assert [row.variant for row in made.rows] == ["ours"]
    assert made.failed == ["peer"]


def test_json_says_everything():
    made = report(variant("ours", base=True, arenas=1.0), variant("triad"), Variant("torch", 8, absent))
    kept = json.loads(as_json(made))
    assert kept["parameters"] == {"k": 2, "rounds": 3}
    assert kept["machine"] == machine()
    assert kept["versions"] == versions()
    assert kept["absent"] == [{"variant": "torch", "why": "torch not installed"}]
    assert kept["failed"] == []
    assert kept["rows"][0]["samples_s"] == made.rows[0].samples_s
    assert kept["rows"][1]["ratios"] == dict(made.rows[1].ratios)
    assert kept["tolerance"] == 1e-6
    assert kept["load"] is None or kept["load"] >= 0


def shown(made, width=200, **options):
    console = Console(width=width, file=StringIO(), record=True)
    console.print(table_of(made, **options))
    return console.export_text()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_what_is_absent_and_why_is_never_cut(width):
    text = shown(report(variant("ours", base=True), Variant("torch foreach", 8, absent)), width)
    assert "absent: torch foreach: torch not installed" in re.sub(r"\s+", " ", text)
    assert "above 1 ours is faster" in re.sub(r"\s+", " ", text)
    assert "memory:" not in text


@pytest.mark.parametrize("wide", [True, False])
def test_a_narrow_table_leaves_the_quantiles_out(wide):
    headers = [column.header for column in table_of(report(variant("ours", base=True)), wide=wide).columns]
    assert ("p10-90" in headers) is wide
    assert "ms" in headers


def test_the_table_has_memory_where_it_was_measured():
    assert re.search(r"\b1\.02\b", shown(report(variant("ours", base=True, arenas=1.02))))


@pytest.mark.parametrize("seconds", [[2.0], [2.0, 31.0, 3.0, 40.0, 5.0]], ids=["quiet", "noisy"])
@pytest.mark.parametrize(
    "names",
    [["ours hold=1", "ours hold=4", "torch foreach, mean", "triad"], ["ours tcp://", "ours unix://", "ours threads"]],
)
def test_at_80_columns_no_header_and_no_figure_is_cut_or_folded(names, seconds):
    made = report(*(variant(name, base=name.startswith("ours"), arenas=1.02) for name in names), durations=seconds)
    text = shown(made, 80, wide=False)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    headers = next(line for line in text.splitlines() if line.startswith("variant"))
    bases = [f"vs {name.removeprefix('ours ')}" for name in names if name.startswith("ours")]
    assert re.split(r"\s{2,}", headers.strip()) == ["variant", "ms", "GB/s", *bases, "memory"]
    for name in names:
        assert len([line for line in text.splitlines() if line.startswith(f"{name} ")]) == 1


def noisy(factor):
    """Two rounds of four in which the peer takes so many times the time of the others."""
    peer = itertools.chain.from_iterable(zip([1.0] * 20, [2.0, 2.0, 2.0 * factor, 2.0 * factor] * 5, strict=True))
    return report(variant("ours hold=1", base=True), variant("torch foreach, mean"), rounds=20, durations=list(peer))


def test_a_ratio_whose_rounds_differ_is_not_given_and_that_is_the_first_line():
    made = noisy(8)
    assert made.noisy
    (pair,) = [row for row in made.rows if row.variant.startswith("torch")]
    assert (pair.ratios["ours hold=1"], pair.quartiles["ours hold=1"]) == (9, (2, 16))
    text = shown(made, 80, wide=False)
    assert text.splitlines()[-1].strip()
    assert "NOISY: 1 of 1 ratios are not given" in text[: text.index("fake: k 2")]
    assert re.search(r"torch foreach, mean .* noisy 2\.0-16\b", text)
    assert "9.00x" not in text
    assert "no ratio is given, as the rounds' quartiles a and b differ by over 1.25x" in " ".join(text.split())
    kept = json.loads(as_json(made))
    assert kept["noisy"] is True
    assert kept["rows"][1]["ratios"] == {"ours hold=1": 9}
    assert kept["rows"][1]["samples_s"] == [2, 2, 16, 16] * 5
    assert kept["rows"][1]["quartiles"] == {"ours hold=1": [2, 16]}


@pytest.mark.parametrize(("factor", "is_given"), [(1.0, True), (1.24, True), (1.26, False), (1e9, False)])
def test_the_limit_of_what_is_given(factor, is_given):
    made = noisy(factor)
    text = shown(made)
    assert made.noisy is json.loads(as_json(made))["noisy"] is not is_given
    assert ("NOISY" not in text) is ("noisy" not in text) is is_given
    assert bool(re.search(r"torch foreach, mean .* \d\.\d\dx", text)) is is_given


def test_one_bad_round_of_many_forbids_nothing():
    durations = [1.0, 2.0] * 9 + [1.0, 500.0]
    made = report(variant("ours", base=True), variant("peer"), rounds=10, durations=durations)
    assert (made.noisy, made.rows[1].ratios["ours"]) == (False, 2)


def test_a_yardstick_does_something_else_and_is_not_compared():
    made = report(variant("ours", base=True), variant("copy"), rounds=4, durations=[1.0, 1.0, 1.0, 50.0])
    assert not made.noisy
    assert not re.search("copy.*x", shown(made))


@pytest.mark.parametrize(("load", "says"), [(None, False), (2.0, False), (12.3, True)])
def test_a_busy_machine_is_the_first_line(load, says):
    made = report(variant("ours", base=True))
    made = dataclasses.replace(made, load=load, machine={**made.machine, "cores": 2})
    assert ("BUSY MACHINE: load 12.3 on 2 cores before the run" in shown(made).splitlines()[0]) is says


def test_a_gpu_s_table_with_four_of_ours_fits_80_columns_and_cuts_no_word():
    names = ["ours hold=1", "ours hold=4", "ours hold=1, captured", "ours hold=4, captured", "torch foreach, mean"]
    made = report(*(variant(name, base=name.startswith("ours")) for name in names), durations=[1.234])
    gpu = {"gpu": "one", "driver": "1", "runtime_cuda": "13.0"}
    text = shown(dataclasses.replace(made, machine={**made.machine, **gpu}), 80, wide=False)
    assert max(map(len, text.splitlines())) <= 80
    assert len(re.findall(r"(?<!, )\bcaptured\b", text.partition("\u2500")[0])) == 2


def test_a_share_of_the_memory_bandwidth_says_what_it_is_of():
    text = shown(report(variant("ours", base=True), variant("triad")))
    assert "of triad: fraction of the memory bandwidth that the triad reaches in this run" in " ".join(text.split())
    assert re.search("GB/s  of triad  ", text)


def test_the_title_names_no_hold_that_rows_differ_in():
    made = dataclasses.replace(report(variant("ours hold=1", base=True)), parameters={"k": 4, "hold": 4, "rounds": 2})
    assert table_of(made).title == "fake: k 4, rounds 2"


def test_machine_and_versions():
    assert set(machine()) == {"cpu", "cores", "memory_bytes", "system"}
    assert set(versions()) == {"commit", "gradengine", "numpy", "python", "torch"}
    assert machine()["cores"] >= 1
    assert machine()["memory_bytes"] > 1 << 20
    assert versions()["numpy"]


def test_numbers_as_they_are_written():
    assert (_ms(0.0882), _ms(0.000314)) == ("88.2", "0.314")
    assert _dotted(13020) == "13.2"


@pytest.mark.parametrize(
    "arguments",
    [
        ["accumulate", "--k", "2", *SMALL],
        ["accumulate", "--k", "2", "--dtype", "bfloat16", "--hold", "2", *SMALL],
        ["clip", *SMALL],
        ["clip", "--dtype", "bfloat16", *SMALL],
        ["step", "--k", "2", *SMALL],
        ["step", "--k", "3", "--dtype", "bfloat16", "--hold", "2", *SMALL],
        ["step", "--tensors", "3", "--elements", "100", "--rounds", "2"],
        ["exchange", "--workers", "2", "--megabytes", "0.0128", "--rounds", "2"],
    ],
    ids=" ".join,
)
def test_each_command_prints_a_table_and_writes_json(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "run.json"
    result = CliRunner().invoke(bench, [*arguments, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    kept = json.loads(path.read_text())
    assert kept["benchmark"] == arguments[0]
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert {name: str(kept["parameters"][name.lstrip("-")]) for name in options} == options
    for row in kept["rows"]:
        assert row["variant"] in result.output
        assert row["error"] <= kept["tolerance"]
        assert row["of_triad"] is not None
    assert {"copy", "triad"} < {row["variant"] for row in kept["rows"]}


def test_json_to_stdout_is_all_that_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(bench, ["clip", *SMALL, "--json", "-"], catch_exceptions=False)
    assert json.loads(result.stdout)["benchmark"] == "clip"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["accumulate", "clip", "step", "exchange", "gpu"])
def test_a_file_that_cannot_be_written_is_said_so_before_anything_is_run(command):
    done = CliRunner().invoke(bench, [command, "--json", "/dev/null/run.json"])
    assert isinstance(done.exception, CallerError)
    assert "'/dev/null' is not a folder; pass another --json FILE" in str(done.exception)


def test_a_folder_that_is_missing_is_made_for_json(tmp_path):
    path = tmp_path / "new" / "run.json"
    CliRunner().invoke(bench, ["clip", *SMALL, "--json", str(path)], catch_exceptions=False)
    assert json.loads(path.read_text())["benchmark"] == "clip"


@pytest.mark.parametrize(
    "arguments", [["clip", "--dtype", "int8"], ["gpu", "--dtype", "float16"], ["gpu", "norm", "no"]]
)
def test_a_word_that_is_no_choice_is_a_mistake_of_usage(arguments):
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 2
    assert "is not one of" in done.output


@pytest.mark.parametrize("given", [["--tensors", "3"], ["--elements", "100"]])
def test_a_small_model_has_a_number_of_tensors_and_a_size(given):
    done = CliRunner().invoke(bench, ["step", *given])
    assert str(done.exception) == "--tensors and --elements go together; pass both, or neither"


@pytest.mark.parametrize("command", ["accumulate", "step", "clip"])
@pytest.mark.parametrize("option", ["--blocks", "--hidden"])
def test_blocks_beside_tensors_are_refused_and_never_ignored(command, option):
    done = CliRunner().invoke(bench, [command, "--tensors", "3", "--elements", "100", option, "8"])
    assert isinstance(done.exception, CallerError)
    assert str(done.exception) == f"{option} and --tensors exclude each other: got both, expected one of them"


def test_the_help_names_every_benchmark_of_a_gpu():
    shown = CliRunner().invoke(bench, ["gpu", "--help"], env={"COLUMNS": "200"}).output
    assert f"Any of {', '.join(NAMES)}; if none, " in re.sub(r"[\s│]+", " ", shown)


def test_a_peer_that_is_wrong_is_named_and_the_exit_code(monkeypatch):
    monkeypatch.setattr(ByHand, "clip", lambda *_, **__: None)
    done = CliRunner().invoke(bench, ["step", *SMALL], catch_exceptions=False)
    assert done.exit_code == 1
    assert "failed: step: numpy by hand" in done.output
    assert "absent: numpy by hand: ResultsDiffer" in done.output
