"""What `gradengine doctor` finds, and what it says to do about the rest."""

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import cuda_emulator
import numpy as np
import pytest

from gradengine import doctor


@pytest.fixture
def cupy(monkeypatch):
    """What `import cupy` gives: the emulator, as a version that is taken."""
    module = SimpleNamespace(**{name: getattr(cuda_emulator, name) for name in dir(cuda_emulator)})
    module.__version__ = "14.1.0"
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


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


def test_versions_are_those_of_the_packages_here(capsys):
    lines = shown(capsys)
    assert lines["numpy"] == np.__version__
    assert lines["msgpack"] == importlib.metadata.version("msgpack")


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
    assert lines["cuda"].startswith("not ready     device 'cuda:0' needs CuPy")
    assert "pip install 'gradengine[cuda12]' or 'gradengine[cuda13]'" in lines["cuda"]


def test_each_gpu_is_named_with_its_memory(cupy, capsys):
    if cuda_emulator.compiler() is None:
        pytest.skip("g++ is not installed")
    with cuda_emulator.options(device_count=2):
        lines = shown(capsys)
    for name in ("cuda:0", "cuda:1"):
        assert lines[name].startswith("ready         CUDA emulator, ")
        assert lines[name].endswith(" GB free")


@pytest.mark.parametrize("fault", [RuntimeError("NVRTC is broken"), MemoryError()])
def test_a_gpu_that_fails_is_said_so(cupy, monkeypatch, capsys, fault):
    def compiled(xp, name):
        raise fault

    monkeypatch.setattr(doctor, "compiled", compiled)
    assert shown(capsys)["cuda:0"].split(maxsplit=2) == ["not", "ready", str(fault) or "MemoryError"]


def test_no_framework_is_imported():
    code = (
        "import sys; sys.modules['cupy'] = None; from gradengine import doctor; doctor.doctor();"
        "assert not {'torch', 'jax', 'matplotlib', 'typer', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
