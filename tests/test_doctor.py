"""What `gradengine doctor` finds, what it says to do about the rest, and what connect() would read here."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from test_exchange_launchers import ALL, SEEN

import gradengine
from gradengine.commands import doctor

SECRET = "0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Launched by nobody."""
    for variable in ALL - {""}:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def shown(capsys):
    doctor.show(doctor.sections())
    return {line[2:15].strip(): line[16:] for line in capsys.readouterr().out.splitlines() if line.startswith(" ")}


def test_what_is_missing_is_said_with_the_line_that_gets_it(monkeypatch, capsys):
    def version(name):
        if name != "numpy":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.0.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "cupy", None)
    lines = shown(capsys)
    assert lines["numpy"] == "2.0.0"
    assert lines["gradengine"] == gradengine.__version__
    assert lines["matplotlib"].split(maxsplit=1) == ["-", "no plots: pip install 'gradengine[plot]'"]
    assert lines["mpi://"].startswith("not ready    needs mpi4py (pip install 'gradengine[mpi]') and an MPI ")
    assert lines["cuda"].startswith("not ready    device 'cuda:0' needs CuPy")
    assert "pip install 'gradengine[cuda12]' or 'gradengine[cuda13]'" in lines["cuda"]


def test_each_gpu_is_named_with_its_memory(emulated, capsys):
    lines, runtime = shown(capsys), emulated.kernels.xp.cuda.runtime
    for number in range(runtime.getDeviceCount()):
        name = runtime.getDeviceProperties(number)["name"].decode()
        assert re.fullmatch(rf"ready +{name}, \d+\.\d of 8\.6 GB free", lines[f"cuda:{number}"])


@pytest.mark.parametrize("fault", [RuntimeError("NVRTC is broken"), MemoryError()])
def test_a_gpu_that_fails_is_said_so(emulated, monkeypatch, capsys, fault):
    def compiled(xp, name):
        raise fault

    monkeypatch.setattr(doctor, "compiled", compiled)
    assert shown(capsys)["cuda:0"].split(maxsplit=2) == ["not", "ready", str(fault) or "MemoryError"]


@pytest.fixture
def mpi4py(monkeypatch, tmp_path):
    """What stands for mpi4py in other processes: a version, and what the module MPI does."""

    def stands(module):
        folder = tmp_path / "mpi4py"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("def rc(**options): rc.options = options\n")
        (folder / "MPI.py").write_text(module)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        found = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.1" if name == "mpi4py" else found(name))

    return stands


def test_versions_are_those_of_the_packages_here_and_sockets_join_ranks_everywhere(capsys):
    lines = shown(capsys)
    assert lines["numpy"] == np.__version__
    assert lines["msgpack"] == importlib.metadata.version("msgpack")
    assert lines["tcp://"] == "ready        sockets, also unix:// on one machine, in shared memory"


@pytest.mark.parametrize(
    ("said", "library"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: x", "MPICH Version: 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI of somebody\0", "Open MPI v5.0.11"),
    ],
)
def test_an_mpi_library_is_named_and_not_initialized(mpi4py, capsys, said, library):
    mpi4py(
        "from mpi4py import rc\nassert rc.options == {'initialize': False, 'finalize': False}\n"
        f"def Get_library_version(): return {said!r}\n"
    )
    assert shown(capsys)["mpi://"] == f"ready        mpi4py 4.1, {library}"


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("raise RuntimeError('cannot load MPI library')", "RuntimeError: cannot load MPI library"),
        ("import os; os._exit(3)", "returned non-zero exit status 3."),
    ],
)
def test_without_an_mpi_library_that_works_it_says_why(mpi4py, capsys, module, told):
    mpi4py(module)
    line = shown(capsys)["mpi://"]
    assert line.startswith("not ready    mpi4py 4.1: ")
    assert line.endswith(told)


def test_an_mpi_library_that_hangs_does_not_stop_the_others(mpi4py, monkeypatch, capsys):
    mpi4py("import time; time.sleep(3600)")
    monkeypatch.setattr(doctor, "_MPI_SECONDS", 0.1)
    lines = shown(capsys)
    assert lines["mpi://"].endswith("timed out after 0.1 seconds")
    assert "process_group" in lines


def test_a_process_group_needs_torch_and_its_own_beginning(monkeypatch, capsys):
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9" if name == "torch" else found(name))
    ready = "installed    torch 2.9: ready after torch.distributed.init_process_group"
    assert shown(capsys)["process_group"] == ready

    def without_torch(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", without_torch)
    assert shown(capsys)["process_group"] == "not ready    needs torch"


def test_no_framework_is_imported():
    code = (
        "import sys; sys.modules['cupy'] = None; from gradengine.commands.doctor import sections, show;"
        "show(sections());"
        "assert not {'torch', 'jax', 'matplotlib', 'typer', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# ---- what connect() would read ----


def launched(environment, variables):
    for name, value in variables.items():
        environment.setenv(name, value)
    return doctor.environment({"TMPDIR": "/t", **variables})


def test_each_fact_is_shown_with_its_variable(environment, tmp_path):
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    found = launched(environment, SEEN["torchrun"] | {"GRADENGINE_SECRET_FILE": str(tmp_path / "secret")})
    address, source = found.pop("address")
    assert re.fullmatch(r"unix:///t/gradengine-\d+/[0-9a-f]{16}", address)
    assert source == "LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID, MASTER_PORT"
    assert found == {
        "launcher": ("torchrun", "RANK"),
        "rank": (1, "RANK"),
        "world size": (2, "WORLD_SIZE"),
        "local size": (2, "LOCAL_WORLD_SIZE"),
        "secret": ("set (24 characters)", "GRADENGINE_SECRET_FILE"),
        "ports": (None, ""),
        "tls": (None, ""),
        "job": ("TORCHELASTIC_RUN_ID=700d4223", "TORCHELASTIC_RUN_ID"),
    }


def test_what_is_not_there_is_a_dash(environment, capsys):
    given = {"GRADENGINE_RANK": "0", "GRADENGINE_WORLD_SIZE": "2", "GRADENGINE_ADDRESS": "mpi://"}
    launched(environment, given)
    found = shown(capsys)
    assert [found[name] for name in ("local size", "secret", "tls", "job")] == ["-"] * 4
    assert found["address"].split() == ["mpi://", "GRADENGINE_ADDRESS"]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "no launcher found"),
        ({"RANK": "1"}, "environment variable WORLD_SIZE is not a whole number"),
        (SEEN["torchrun"] | {"RANK": "2"}, "RANK is out of range: got 2, expected a whole number in 0..1"),
        (SEEN["torchrun"] | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"}, "needs a secret"),
        (SEEN["torchrun"] | {"GRADENGINE_SECRET_FILE": "/none"}, "cannot read the secret from '/none'"),
        (SEEN["torchrun"] | {"GRADENGINE_ADDRESS": "a:1"}, "URL (of environment variable GRADENGINE_ADDRESS)"),
    ],
)
def test_what_connect_would_refuse_is_said_beside_all_else(environment, capsys, variables, told):
    launched(environment, variables)
    lines = shown(capsys)
    assert lines["connect()"].startswith("not ready")
    assert told in lines["connect()"]
    assert "numpy" in lines


def test_the_secret_is_not_shown_and_nothing_is_opened(environment, capsys):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be too long for a Unix socket
        launched(environment, SEEN["torchrun"] | {"GRADENGINE_SECRET": SECRET, "TMPDIR": folder})
        doctor.show(doctor.sections())
        assert [*Path(folder).iterdir()] == []
    text = capsys.readouterr().out
    assert SECRET not in text
    assert "set (24 characters)  GRADENGINE_SECRET" in text


def test_json_has_all_sections_and_the_lines_too_where_it_is_a_file(environment, tmp_path):
    runner = pytest.importorskip("typer.testing").CliRunner()
    pytest.importorskip("rich")
    from gradengine.commands.cli import app

    launched(environment, SEEN["srun"] | {"GRADENGINE_SECRET": SECRET})
    for path in (str(tmp_path / "found.json"), "-"):
        done = runner.invoke(app, ["doctor", "--json", path])
        assert (done.exit_code, SECRET in done.output) == (0, False)
        text = done.output if path == "-" else Path(path).read_text()
        assert ("world size" in done.output.partition("{")[0]) == (path != "-")
        found = json.loads(text)
        assert [*found] == ["packages", "devices", "transports", "environment"]
        assert found["packages"]["numpy"] == [np.__version__, ""]
        assert found["transports"]["tcp://"][0] == "ready"
        assert found["environment"]["rank"] == [1, "SLURM_PROCID"]
        assert found["environment"]["local size"] == [None, ""]
