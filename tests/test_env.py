"""`gradengine env`: what connect() would take, from which variable, and never the token."""

import json
import re
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("typer")

from test_cli import fails, run_without
from test_exchange_environment import ALL, SEEN
from typer.testing import CliRunner

from gradengine.commands.cli import app

SECRET = "0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for variable in ALL - {""}:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TMPDIR", "/t")
    monkeypatch.setenv("COLUMNS", "120")
    return monkeypatch


def launched(environment, variables):
    for name, value in variables.items():
        environment.setenv(name, value)


def shown(*arguments):
    done = CliRunner().invoke(app, ["env", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def rows(text):
    return {line[:13].strip(): line[13:].split() for line in text.splitlines() if line.strip()}


def test_each_fact_is_shown_with_its_variable(environment, tmp_path):
    (tmp_path / "token").write_text(f"{SECRET}\n")
    launched(environment, SEEN["torchrun"] | {"GRADENGINE_TOKEN_FILE": str(tmp_path / "token")})
    found = rows(shown())
    assert re.fullmatch(r"unix:///t/gradengine-\d+/[0-9a-f]{16}", found["address"].pop(0))
    for name, row in {
        "launcher": "torchrun RANK",
        "rank": "1 RANK",
        "world size": "2 WORLD_SIZE",
        "local rank": "1 LOCAL_RANK",
        "local size": "2 LOCAL_WORLD_SIZE",
        "address": "LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID, MASTER_PORT",
        "token": "set (24 characters) GRADENGINE_TOKEN_FILE",
        "job": "TORCHELASTIC_RUN_ID=700d4223 TORCHELASTIC_RUN_ID",
    }.items():
        assert found[name] == row.split()


def test_what_is_not_there_is_a_dash(environment):
    launched(environment, {"GRADENGINE_RANK": "0", "GRADENGINE_WORLD_SIZE": "2", "GRADENGINE_ADDRESS": "unix:///s"})
    found = rows(shown())
    assert [found[name] for name in ("local rank", "local size", "token", "job")] == [["-"]] * 4


@pytest.mark.parametrize("arguments", [[], ["--json", "-"]])
def test_the_token_is_not_shown(environment, arguments):
    launched(environment, SEEN["torchrun"] | {"GRADENGINE_TOKEN": SECRET})
    text = shown(*arguments)
    assert SECRET not in text
    assert "set (24 characters)" in text


def test_a_launcher_further_out_is_said_not_to_count(environment):
    launched(environment, SEEN["torchrun"] | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
    told = "not taken: OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=1: torchrun is the innermost launcher"
    assert told in shown()
    assert json.loads(shown("--json", "-"))["not_taken"] == ["OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=1"]


def test_json_has_numbers_and_the_table_too_where_it_is_a_file(environment, tmp_path):
    launched(environment, SEEN["srun"])
    assert rows(shown("--json", str(tmp_path / "env.json")))["rank"] == ["1", "SLURM_PROCID"]
    facts, nothing = json.loads((tmp_path / "env.json").read_text())["facts"], {"value": None, "from": ""}
    assert facts["rank"] == {"value": 1, "from": "SLURM_PROCID"}
    assert facts["local size"] == facts["token"] == nothing


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "no launcher found"),
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
        (SEEN["torchrun"] | {"RANK": "2"}, "RANK (of WORLD_SIZE=2) is out of range: got 2"),
        (SEEN["torchrun"] | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"}, "needs a token"),
        (SEEN["torchrun"] | {"GRADENGINE_TOKEN_FILE": "/none"}, "cannot read the token from '/none'"),
        (SEEN["torchrun"] | {"GRADENGINE_ADDRESS": "a:1"}, "URL (of environment variable GRADENGINE_ADDRESS)"),
    ],
)
def test_what_connect_would_refuse_is_said_in_one_line(environment, capsys, variables, told):
    launched(environment, variables)
    code, error = fails(environment, capsys, "env")
    assert (code, len(error.splitlines())) == (2, 1)
    assert told in error


def test_it_needs_no_matplotlib_and_opens_nothing(environment):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be too long for a Unix socket
        launched(environment, SEEN["torchrun"] | {"TMPDIR": folder})
        done = run_without("matplotlib", "env", cwd=folder)
        assert (done.returncode, done.stderr) == (0, "")
        assert [*Path(folder).iterdir()] == []


def test_it_says_what_joins_ranks_here(environment):
    launched(environment, SEEN["torchrun"] | {"GRADENGINE_ADDRESS": "mpi://"})
    text = shown()
    assert rows(text)["address"] == ["mpi://", "GRADENGINE_ADDRESS"]
    assert re.search(r"^tcp:// ready: sockets", text, re.MULTILINE)
    assert re.search(r"^mpi:// (not )?ready: .*mpi4py", text, re.MULTILINE)
    joined_by = json.loads(shown("--json", "-"))["joined_by"]
    assert [*joined_by] == ["tcp://", "mpi://", "process_group"]
    assert joined_by["tcp://"] == {"state": "ready", "by": "sockets, also unix:// on one machine, in shared memory"}
