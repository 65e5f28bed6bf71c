"""What is shown and what is kept of a run."""

import json
import re
from io import StringIO

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from gradengine.bench import by_hand
from gradengine.bench.case import Absent, Case, ResultsDiffer
from gradengine.bench.command import bench, table_of
from gradengine.bench.machine import machine, versions
from gradengine.bench.report import measure
from gradengine.errors import CallerError

SMALL = ["--hidden", "8", "--blocks", "1", "--rounds", "2"]


def case(variant, **facts):
    return Case("fake", variant, bytes=1000, run=lambda: None, error=lambda: 1e-7, **facts)


def report(entries):
    return measure("fake", entries, 3, tolerance=1e-6, parameters={"k": 2})


def test_rows_compare_everything_with_each_of_ours():
    rows = report([case("ours a", ours=True), case("ours b", ours=True), case("peer"), case("triad")]).rows
    assert [list(row.ratios) for row in rows] == [["ours a", "ours b"]] * 4
    assert rows[0].ratios["ours a"] == 1
    assert rows[3].of_triad == 1
    assert rows[2].gb_per_s == pytest.approx(1000 / rows[2].median_s / 1e9)
    assert rows[2].p10_s <= rows[2].median_s <= rows[2].p90_s
    assert all(len(row.samples_s) == 3 for row in rows)


def test_without_a_triad_there_is_no_share_of_it():
    assert report([case("ours", ours=True)]).rows[0].of_triad is None


def test_nothing_is_timed_where_results_differ():
    calls = []
    wrong = Case("fake", "peer", 0, run=lambda: calls.append(1), error=lambda: 1.0)
    with pytest.raises(ResultsDiffer):
        report([case("ours", ours=True), wrong])
    assert len(calls) == 1


def test_json_says_everything():
    made = report([case("ours", ours=True, arenas=1.0), case("triad"), Absent("torch", "torch not installed")])
    kept = json.loads(made.as_json())
    assert kept["parameters"] == {"k": 2, "rounds": 3}
    assert kept["machine"] == machine()
    assert kept["versions"] == versions()
    assert kept["absent"] == [{"variant": "torch", "why": "torch not installed"}]
    assert kept["rows"][0]["samples_s"] == made.rows[0].samples_s
    assert kept["rows"][1]["ratios"] == dict(made.rows[1].ratios)
    assert kept["tolerance"] == 1e-6
    assert kept["load"] is None or kept["load"] >= 0


def shown(made, width=200):
    console = Console(width=width, file=StringIO(), record=True)
    console.print(table_of(made))
    return console.export_text()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_what_is_absent_and_why_is_never_cut(width):
    text = shown(report([case("ours", ours=True), Absent("torch foreach", "torch not installed")]), width)
    assert "absent: torch foreach: torch not installed" in re.sub(r"\s+", " ", text)
    assert "above 1 ours is faster" in re.sub(r"\s+", " ", text)
    assert "arenas" not in text


def test_the_table_has_memory_where_it_was_measured():
    assert re.search(r"\b1\.02\b", shown(report([case("ours", ours=True, arenas=1.02)])))


def test_machine_and_versions():
    assert machine()["cores"] >= 1
    assert machine()["memory_bytes"] > 1 << 20
    assert versions()["numpy"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["accumulate", "--k", "2", *SMALL],
        ["accumulate", "--k", "2", "--dtype", "bfloat16", "--hold", "2", *SMALL],
        ["clip", *SMALL],
        ["clip", "--dtype", "bfloat16", *SMALL],
        ["step", "--k", "2", *SMALL],
        ["step", "--k", "3", "--dtype", "bfloat16", "--hold", "2", *SMALL],
        ["exchange", "--workers", "2", "--megabytes", "0.01", "--rounds", "2"],
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
    assert kept["parameters"]["rounds"] == 2
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
    assert "'/dev/null' is no folder; pass another --json FILE" in str(done.exception)


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


def test_a_wrong_peer_ends_the_command(monkeypatch):
    monkeypatch.setattr(by_hand, "clip", lambda *_, **__: 0.0)
    with pytest.raises(ResultsDiffer, match="'numpy by hand'"):
        CliRunner().invoke(bench, ["step", *SMALL], catch_exceptions=False)
