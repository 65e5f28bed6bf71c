"""What CI says of a run: stages, their table, tests that fail and those that only pass alone, skips and warnings."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import pathlib, pytest, warnings

def test_passes():
    pass

@pytest.mark.parametrize("what", ["a b", "c"])
def test_fails(what):
    assert what == "c"

def test_passes_alone():
    seen = pathlib.Path({seen!r})
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""


@pytest.fixture
def project(tmp_path):
    """A project with our two plugins and a Makefile of one target."""
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['record', 'skips']\n")
    paths = os.pathsep.join([str(ROOT / "tests"), str(tmp_path)])
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "Makefile").write_text(
        f"tests:\n\tPYTHONPATH={paths} {sys.executable} -m pytest -q -p no:cacheprovider -n 2 $(ARGS) $(TESTS)\n"
        "good:\n\ttrue\nbad:\n\tfalse\n"
    )
    return tmp_path


def run(project, *arguments, **variables):
    command = ["make", "tests", f"ARGS={' '.join(arguments)}"]
    return subprocess.run(
        command, cwd=project, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def stages():
    spec = importlib.util.spec_from_file_location("stages", ROOT / ".ci" / "stages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["stages"] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


class TestRecord:
    def test_each_process_writes_its_order_and_the_failed_are_named_with_it(self, project):
        (project / "test_it.py").write_text(TESTS.format(seen=str(project / "seen")))
        (project / "records").mkdir()
        assert run(project, GRADENGINE_RECORD=str(project / "records")).returncode == 2
        orders = {path.stem: path.read_text().splitlines() for path in (project / "records").glob("order-*.txt")}
        assert sorted(orders) == ["order-gw0", "order-gw1"]
        assert sorted(name for order in orders.values() for name in order) == [
            f"test_it.py::{name}" for name in ("test_fails[a b]", "test_fails[c]", "test_passes", "test_passes_alone")
        ]
        for line in (project / "records" / "failed.txt").read_text().splitlines():
            process, name = line.split(" ", 1)
            assert name in orders[f"order-{process}"]

    def test_an_order_can_be_run_again(self, project):
        (project / "test_it.py").write_text(TESTS.format(seen=str(project / "seen")))
        names = ["test_it.py::test_passes", "test_it.py::test_fails[c]"]
        (project / "order.txt").write_text("".join(f"{name}\n" for name in names))
        assert run(project, "-n 0 @order.txt", GRADENGINE_RECORD=str(project)).returncode == 0
        assert (project / "order-main.txt").read_text() == (project / "order.txt").read_text()

    def test_a_test_s_own_pytest_records_nothing(self, project):
        (project / "test_it.py").write_text(
            "import os\ndef test_environment():\n    assert 'GRADENGINE_RECORD' not in os.environ\n"
        )
        assert run(project, GRADENGINE_RECORD=str(project)).returncode == 0
        assert run(project, "-n 0", GRADENGINE_RECORD=str(project)).returncode == 0


class TestSkips:
    @pytest.mark.parametrize(
        "text",
        [
            "import pytest\npytest.importorskip('mpi4py')\n",
            "import pytest\ndef test_it():\n    pytest.skip('no shared memory here')\n",
            "import pytest\n@pytest.mark.skip(reason='slow')\ndef test_it():\n    pass\n",
        ],
    )
    def test_another_reason_is_a_failure_that_says_what_to_do(self, project, text):
        (project / "test_it.py").write_text(text)
        done = run(project, "-n 0")
        assert done.returncode == 2
        assert "SKIPPED, and must not be: test_it.py" in done.stdout
        assert "give the reason a line in tests/skips.py" in done.stdout

    def test_what_is_not_installed_may_be_skipped(self, project):
        (project / "test_it.py").write_text(
            "import pytest\ndef test_it():\n    pytest.skip('torch is not installed')\ndef test_other(): pass\n"
        )
        assert run(project, "-n 0").returncode == 0

    def test_what_must_be_installed_and_is_not_is_said_before_anything_runs(self, project):
        (project / "test_it.py").write_text("def test_it(): pass\n")
        done = run(project, "-n 0", GRADENGINE_REQUIRE="pytest no_such_module")
        assert done.returncode == 2
        assert (
            "no_such_module not installed, and GRADENGINE_REQUIRE='pytest no_such_module'" in done.stdout + done.stderr
        )

    def test_a_warning_is_a_failure_that_says_what_to_do(self, project):
        (project / "test_it.py").write_text("import warnings\ndef test_it():\n    warnings.warn('old')\n")
        done = run(project, "-n 0")
        assert done.returncode == 2
        assert "allow it by name in pyproject.toml, filterwarnings" in done.stdout


class TestStages:
    def test_all_run_and_the_table_says_what_failed_and_how_to_run_it_again(self, project, monkeypatch, capfd):
        (project / "test_it.py").write_text(TESTS.format(seen=str(project / "seen")))
        monkeypatch.chdir(project)
        module = stages()
        monkeypatch.setattr(module, "CI", [module.Stage(name, name) for name in ("bad", "tests", "good")])
        assert module.main([]) == 1
        table = capfd.readouterr().out.partition("\nall ")[2]
        assert "bad failed; again: make bad\n" in table
        assert "tests failed; again: make tests\n" in table
        assert "fails alone too: test_it.py::test_fails[a b]\n" in table
        assert "FLAKY, passes alone: test_it.py::test_passes_alone\n" in table
        assert "in the same order: make tests 'TESTS=@out/ci/tests/order-gw" in table

    def test_stages_can_be_named(self, project, monkeypatch, capfd):
        monkeypatch.chdir(project)
        module = stages()
        monkeypatch.setattr(module, "CI", [module.Stage(name, name) for name in ("bad", "good")])
        assert module.main(["good"]) == 0
        assert module.main(["other"]) == 2
        assert "no such stage: other; there are bad, good" in capfd.readouterr().out

    def test_every_stage_is_a_target(self):
        module = stages()
        targets = {word for stage in [*module.CI, *module.MATRIX] for word in stage.target.split() if word[0] != "-"}
        done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


class TestExamples:
    def test_another_module_s_numbers_change_no_property(self):
        """One draw in twenty would be a literal of any file of ours that happens to be loaded."""
        code = (
            "import sys; sys.path[:0] = ['tests']; import conftest, hashlib; {extra}\n"
            "from hypothesis import given, strategies as st\n"
            "seen = hashlib.sha256()\n"
            "@given(st.integers())\ndef test(number): seen.update(repr(number).encode())\n"
            "test(); print(seen.hexdigest())"
        )
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        found = {
            subprocess.check_output([sys.executable, "-c", code.format(extra=extra)], cwd=ROOT, env=variables)
            for extra in ("", "import gradengine.plan.models, gradengine.bench.table")
        }
        assert len(found) == 1
