"""What CI says of a run: stages, their table, tests that fail and those that only pass alone, skips and warnings."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis.internal.conjecture import providers

ROOT = Path(__file__).parent.parent
TESTS = """
import os, pathlib, pytest, warnings

def test_passes():
    assert "GRADENGINE_RECORD" not in os.environ  # a test's own pytest records nothing

@pytest.mark.parametrize("what", ["a b", "c"])
def test_fails(what):
    if what != "c":
        warnings.warn("old")

def test_passes_alone():
    seen = pathlib.Path({seen!r})
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""
SKIPS = """
import pytest

def test_skips():
    pytest.skip('no shared memory here')

@pytest.mark.skip(reason='slow')
def test_marked(): pass

def test_allowed():
    pytest.skip('torch is not installed')
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with our two plugins and a Makefile of one target."""
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['record', 'skips']\n")
    paths = os.pathsep.join([str(ROOT / "tests"), str(tmp_path)])
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "Makefile").write_text(
        f"tests:\n\tPYTHONPATH={paths} {sys.executable} -m pytest -q -p no:cacheprovider -n 2 $(ARGS) $(TESTS)\n"
        "good:\n\ttrue\nbad:\n\tfalse\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "TESTS", "ARGS"):  # of the `make` that runs this test
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(project, **variables):
    command, environment = ["make", "tests", "ARGS=-n 0"], {**os.environ, **variables}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def stages(monkeypatch):
    spec = importlib.util.spec_from_file_location("stages", ROOT / ".ci" / "stages.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stages", module)  # for its dataclass
    spec.loader.exec_module(module)
    return module


def test_skips_that_are_not_allowed_are_failures_that_say_what_to_do(project):
    (project / "test_it.py").write_text(SKIPS)
    (project / "test_other.py").write_text("import pytest\npytest.importorskip('mpi4py_no_such')\n")
    code, said = run(project)
    assert code == 2
    skipped = [line.split()[5] for line in said.splitlines() if line.startswith("SKIPPED, and must not be: ")]
    assert len(skipped) == 3
    assert "test_allowed" not in "".join(skipped)
    assert "give the reason a line in tests/skips.py" in said


def test_what_is_not_installed_may_be_skipped_unless_it_must_be_there(project):
    (project / "test_it.py").write_text(
        "import pytest\ndef test_it():\n    pytest.skip('torch is not installed')\ndef test_other(): pass\n"
    )
    assert run(project)[0] == 0
    code, said = run(project, GRADENGINE_REQUIRE="pytest no_such_module")
    assert (code, "not installed: no_such_module" in said) == (2, True)


def test_all_stages_run_and_the_table_says_what_failed_and_how_to_run_it_again(project, stages, capfd):
    (project / "test_it.py").write_text(TESTS.format(seen=str(project / "seen")))
    stages.CI[:] = [stages.Stage(name, name) for name in ("bad", "tests", "good")]
    assert stages.main([]) == 1
    before, _, table = capfd.readouterr().out.partition("\nall ")
    assert "allow it by name in pyproject.toml, filterwarnings" in before  # what a warning asks for
    for said in (
        "bad failed; again: make bad\n",
        "tests failed; again: make tests\n",
        "fails alone too: test_it.py::test_fails[a b]\n",
        "FLAKY, passes alone: test_it.py::test_passes_alone\n",
        "in the same order: make tests 'TESTS=@out/ci/tests/order-gw",
    ):
        assert said in table
    records = project / "out" / "ci" / "tests"
    orders = {path.stem: path.read_text().splitlines() for path in records.glob("order-*.txt")}
    assert sorted(orders) == ["order-gw0", "order-gw1"]
    assert sorted(name for order in orders.values() for name in order) == [
        f"test_it.py::{name}" for name in ("test_fails[a b]", "test_fails[c]", "test_passes", "test_passes_alone")
    ]
    for line in (records / "failed.txt").read_text().splitlines():
        process, name = line.split(" ", 1)
        assert name in orders[f"order-{process}"]
    assert (records / "alone" / "order-main.txt").read_text() == (records / "alone.txt").read_text()


@pytest.mark.usefixtures("project")
def test_stages_can_be_named(stages, capfd):
    stages.CI[:] = [stages.Stage(name, name) for name in ("bad", "good")]
    assert (stages.main(["good"]), stages.main(["other"])) == (0, 2)
    assert "no such stage: other; there are bad, good" in capfd.readouterr().out


def test_every_stage_is_a_target(stages):
    targets = {word for stage in [*stages.CI, *stages.MATRIX] for word in stage.target.split() if word[0] != "-"}
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_another_module_s_numbers_change_no_property():
    """One draw in twenty would be a literal of any file of ours that happens to be loaded."""
    constants = providers._get_local_constants()
    assert not any(constants.set_for_type(kind) for kind in ("integer", "float", "string", "bytes"))


def test_workflows_run_targets_that_exist():
    text = "".join(path.read_text() for path in sorted((ROOT / ".github/workflows").glob("*.yml")))
    targets = re.findall(r"run: make ([\w-]+)", text)
    assert {"ci", "test", "docs"} <= {*targets}
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
