"""What `gradengine doctor` finds, and what it says to do about the rest."""

import importlib.metadata
import re
import subprocess
import sys

import numpy as np
import pytest

from gradengine.commands import doctor


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")


def shown(capsys):
    doctor.doctor()
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line}


def test_on_a_terminal_of_80_columns_each_line_fits_and_no_word_is_cut(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    whole = " ".join(shown(capsys)["cuda"].split())
    monkeypatch.setenv("COLUMNS", "80")
    doctor.doctor()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "device 'cuda:0' needs CuPy" in next(line for line in lines if line.startswith("cuda"))
    assert whole in " ".join(" ".join(lines).split())


def test_what_is_missing_is_said_with_the_line_that_gets_it(monkeypatch, capsys):
    def version(name):
        if name != "numpy":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.0.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "cupy", None)
    lines = shown(capsys)
    assert lines["numpy"] == "2.0.0"
    assert lines["matplotlib"].split(maxsplit=1) == ["-", "no plots: pip install 'gradengine[plot]'"]
    assert lines["mpi://"].startswith("not ready     needs mpi4py: pip install 'gradengine[mpi]', and an MPI: ")
    assert lines["cuda"].startswith("not ready     device 'cuda:0' needs CuPy")
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
    assert lines["tcp://"] == "ready         sockets, also unix:// on one machine, in shared memory"


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
    assert shown(capsys)["mpi://"] == f"ready         mpi4py 4.1, {library}"


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("raise RuntimeError('cannot load MPI library')", "RuntimeError: cannot load MPI library"),
        ("import os; os._exit(3)", "exit code 3"),
    ],
)
def test_without_an_mpi_library_that_works_it_says_why(mpi4py, capsys, module, told):
    mpi4py(module)
    assert shown(capsys)["mpi://"] == f"not ready     mpi4py 4.1: {told}"


def test_an_mpi_library_that_hangs_does_not_stop_the_others(mpi4py, monkeypatch, capsys):
    mpi4py("import time; time.sleep(3600)")
    monkeypatch.setattr(doctor, "_MPI_SECONDS", 0.1)
    lines = shown(capsys)
    assert lines["mpi://"] == "not ready     mpi4py 4.1: its library is not loaded after 0.1 s"
    assert "process_group" in lines


def test_a_process_group_needs_torch_and_its_own_beginning(monkeypatch, capsys):
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9" if name == "torch" else found(name))
    ready = "installed     torch 2.9: ready after torch.distributed.init_process_group"
    assert shown(capsys)["process_group"] == ready

    def without_torch(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", without_torch)
    assert shown(capsys)["process_group"] == "not ready     needs torch"


def test_no_framework_is_imported():
    code = (
        "import sys; sys.modules['cupy'] = None; from gradengine.commands import doctor; doctor.doctor();"
        "assert not {'torch', 'jax', 'matplotlib', 'typer', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
