"""bench/gpu_check.py with stages that need no GPU: what runs, what is kept, what fails; and the tables drawn of it."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import draw
import gpu_check
import gpu_preflight
import pytest
from gpu_check import Stage
from gpu_preflight import GPU, JAX, SECOND, TORCH, Preflight
from gpu_results import file_name

from gradengine.bench.__main__ import parser
from gradengine.bench.benchmarks import NAMES
from gradengine.bench.machine import commit_of

ROOT = Path(__file__).parent.parent
EVERYTHING = Preflight({}, "NVIDIA Fake 1", 80 << 30)
MACHINE = {
    "machine": {"gpu": "NVIDIA Fake 1", "driver": "1", "runtime_cuda": "13.0"},
    "versions": {"cupy": "14", "torch": "2", "commit": None},
}
REPORT = {
    "benchmark": "step",
    "parameters": {"dtype": "bfloat16", "odd": False},
    "rows": [
        {
            "variant": variant,
            "median_s": 0.002,
            "device_s": 0.002,
            "wall_s": 0.003,
            "host_s": 0.0001,
            "gb_per_s": 4000.0,
            "of_copy": share,
            "ratios": {"ours hold=1": ratio},
        }
        for variant, share, ratio in (("ours hold=1", 0.91, 1), ("torch foreach, sum", None, 2), ("copy", 1.0, 1))
    ],
    "absent": [{"variant": "torch.compile", "why": "no compiler"}],
}


def writes(path, content):
    return ("-c", f"import pathlib; pathlib.Path({path!r}).write_text({content!r})")


def stage(name, *words, **facts):
    return Stage(name, "for the test", gpu_check.python(*words), facts.pop("limit", 60), **facts)


MACHINE_STAGE = stage("machine", *writes("{folder}/machine.json", json.dumps(MACHINE)), keeps="machine")
BENCH = stage("bench", *writes("{folder}/bench.json", json.dumps({"reports": [REPORT]})), keeps="reports")


def run(tmp_path, *stages, arguments=(), found=EVERYTHING):
    known = [MACHINE_STAGE, *stages]
    out = ["--out", str(tmp_path / "out"), *arguments]
    return gpu_check.main(out, lambda found, small=False: known, tmp_path / "results", lambda: found)


def checked(tmp_path, *stages, **given):
    code = run(tmp_path, *stages, **given)
    kept = json.loads((tmp_path / "results/gpu-fake-1.json").read_text())
    assert kept == json.loads((tmp_path / "out/gpu-fake-1.json").read_text())
    return code, kept, {name: found["outcome"] for name, found in kept["stages"].items()}


class TestResults:
    def test_they_are_kept_with_machine_and_stages(self, tmp_path, capsys):
        code, kept, outcomes = checked(tmp_path, BENCH, arguments=["--commit", "abc"])
        assert code == 0
        assert kept["machine"] == MACHINE["machine"]
        assert kept["versions"]["commit"] == "abc"
        assert kept["reports"] == [{"stage": "bench", **REPORT}]
        assert outcomes == {"machine": "passed", "bench": "passed"}
        shown = capsys.readouterr().out
        assert re.search(r"bench +step +torch foreach, sum +2\.000 +3\.000 +100 +2\.00", shown)
        assert re.search(r"bench +step +torch.compile +absent: no compiler", shown)

    def test_a_stage_that_fails_leaves_the_others_figures(self, tmp_path):
        half = "import pathlib, sys; print('failed: norm: ours'); sys.exit(3)"
        slow = stage("slow", "-c", "import time; time.sleep(60)", limit=0.5)
        code, kept, outcomes = checked(tmp_path, BENCH, stage("half", "-c", half), slow)
        assert code == 1
        assert outcomes == {"machine": "passed", "bench": "passed", "half": "failed", "slow": "timed out"}
        assert kept["stages"]["half"]["note"] == "exit status 3: failed: norm: ours"
        assert kept["stages"]["slow"]["note"] == "not done within 0.5 s"
        assert len(kept["reports"]) == 1
        assert "failed: norm: ours" in (tmp_path / "out/half.log").read_text()

    def test_what_a_failing_stage_wrote_is_kept(self, tmp_path):
        words = BENCH.command[2] + "; raise SystemExit(1)"
        code, kept, _ = checked(tmp_path, stage("bench", "-c", words, keeps="reports"))
        assert code == 1
        assert kept["reports"] == [{"stage": "bench", **REPORT}]

    def test_a_file_that_was_not_written_to_its_end_takes_nothing_away(self, tmp_path):
        torn = stage("torn", *writes("{folder}/torn.json", '{"reports": [{"ben'), keeps="reports")
        _, kept, outcomes = checked(tmp_path, BENCH, torn, stage("last", "-c", "pass"))
        assert len(kept["reports"]) == 1
        assert outcomes["last"] == "passed"

    def test_they_are_on_the_disk_before_the_next_stage_begins(self, tmp_path):
        looks = (
            f"import pathlib; assert 'bench' in pathlib.Path({str(tmp_path / 'results/gpu-fake-1.json')!r}).read_text()"
        )
        assert checked(tmp_path, BENCH, stage("looks", "-c", looks))[0] == 0

    def test_stages_run_one_by_one_come_together(self, tmp_path):
        first = stage("first", "-c", "pass")
        checked(tmp_path, first, BENCH)
        code, kept, _ = checked(tmp_path, first, BENCH, arguments=["--stage", "first"])
        assert code == 0
        assert list(kept["stages"]) == ["machine", "first", "bench"]
        assert len(kept["reports"]) == 1

    def test_of_another_commit_nothing_stays(self, tmp_path):
        checked(tmp_path, BENCH, arguments=["--commit", "abc"])
        _, kept, _ = checked(tmp_path, BENCH, arguments=["--commit", "def", "--stage", "machine"])
        assert kept["reports"] == []

    def test_small_sizes_give_no_figures_to_keep(self, tmp_path):
        assert run(tmp_path, BENCH, arguments=["--small"]) == 0
        assert json.loads((tmp_path / "out/gpu-fake-1.json").read_text())["reports"]
        assert not (tmp_path / "results").exists()

    def test_recorded_results_make_no_commit_dirty(self, tmp_path):
        def git(*words):
            names = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
            subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True)

        result, code = tmp_path / "bench/results/gpu.json", tmp_path / "package/code.py"
        for path in (result, code):
            path.parent.mkdir(parents=True)
            path.write_text("1")
        git("init")
        git("add", ".")
        git("commit", "-m", "one")
        commit = commit_of(code.parent)
        result.write_text("2")
        assert commit_of(code.parent) == commit
        code.write_text("2")
        assert commit_of(code.parent) == f"{commit}-dirty"

    def test_their_names(self):
        assert file_name("NVIDIA H200") == "gpu-h200"
        assert file_name("NVIDIA GeForce RTX 4090") == "gpu-geforce-rtx-4090"


def test_a_limit_reaches_the_stage_s_own_children(tmp_path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(300)'])"
    began = time.monotonic()
    assert checked(tmp_path, stage("slow", "-c", child, limit=0.5))[2]["slow"] == "timed out"
    assert time.monotonic() - began < 60


def test_jax_does_not_take_three_quarters_of_the_gpu_in_each_process(tmp_path):
    asks = "import os; assert os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'"
    assert checked(tmp_path, stage("asks", "-c", asks))[0] == 0


class TestWhatIsMissing:
    WITHOUT_A_TOOL = Preflight({"sanitizer": "not on the PATH", JAX: "no module"}, "NVIDIA Fake 1", 80 << 30)
    NEEDS_IT = stage("memcheck", "-c", "pass", needs=("sanitizer",))

    def test_it_is_named_before_anything_runs_with_what_does_not_run(self, tmp_path, capsys):
        code, kept, outcomes = checked(tmp_path, self.NEEDS_IT, found=self.WITHOUT_A_TOOL)
        assert (code, outcomes["memcheck"]) == (0, "absent")
        assert kept["stages"]["memcheck"]["note"] == "sanitizer: not on the PATH"
        first, second, third, *_ = capsys.readouterr().out.splitlines()
        assert first == "preflight: NVIDIA Fake 1, 80.0 GiB"
        assert second == "  missing: sanitizer: not on the PATH; not run: memcheck"
        assert third == "  missing: a GPU for JAX: no module"

    def test_a_stage_asked_for_by_name_that_cannot_run_is_a_failure(self, tmp_path):
        assert run(tmp_path, self.NEEDS_IT, found=self.WITHOUT_A_TOOL, arguments=["--stage", "memcheck"]) == 1

    @pytest.mark.parametrize("name", ["numpy", "msgpack", GPU])
    def test_without_a_gpu_or_what_the_package_needs_nothing_runs(self, name, tmp_path, capsys):
        assert run(tmp_path, BENCH, found=Preflight({name: "why"})) == 2
        assert capsys.readouterr().err == f"gpu-check cannot run here:\n  {name}: why\n"
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "name",
        [
            SECOND,
            "torch",
            TORCH,
            "jax",
            JAX,
            "typer",
            "rich",
            "matplotlib",
            "pytest-timeout",
            "pytest-xdist",
            "compute-sanitizer",
        ],
    )
    def test_default_stages_need_none_of_these(self, name):
        found = Preflight({name: "not installed"}, "NVIDIA Fake 1", 80 << 30)
        assert found.refusal == []
        assert not any(found.lacks(each.needs) for each in gpu_check.stages(found) if not each.further)

    def test_what_is_found_here(self, monkeypatch):
        monkeypatch.setattr(gpu_preflight, "PACKAGES", {"numpy": "numpy", "no-such": "no_such_package"})
        monkeypatch.setattr(gpu_preflight, "PROGRAMS", ("no-such-program",))
        answers = {
            GPU: "print('a word before'); print(json.dumps(['NVIDIA Fake 1', 5]))",
            TORCH: "sys.exit('torch 2 finds no GPU')",
            JAX: "import os; os._exit(7)",
        }
        monkeypatch.setattr(gpu_preflight, "QUESTIONS", answers)
        found = gpu_preflight.preflight()
        assert (found.gpu, found.gpu_memory) == ("NVIDIA Fake 1", 5)
        assert found.missing == {
            "no-such": "not installed",
            "no-such-program": "not on the PATH",
            TORCH: "torch 2 finds no GPU",
            JAX: "exit status 7",
        }

    def test_a_framework_that_does_not_answer_is_not_there(self, monkeypatch):
        monkeypatch.setattr(gpu_preflight, "LIMIT", 0.3)
        monkeypatch.setattr(gpu_preflight, "QUESTIONS", dict.fromkeys((GPU, JAX), "import time; time.sleep(300)"))
        began = time.monotonic()
        assert gpu_preflight.preflight().refusal == [f"{GPU}: no answer within 0 s"]
        assert time.monotonic() - began < 60

    def test_without_cupy_the_refusal_says_how_to_get_it(self, monkeypatch):
        hides_cupy = "sys.modules['cupy'] = None\n" + gpu_preflight.QUESTIONS[GPU]
        monkeypatch.setattr(gpu_preflight, "QUESTIONS", {GPU: hides_cupy})
        (refusal,) = gpu_preflight.preflight().refusal
        assert "needs CuPy" in refusal
        assert "pip install 'gradengine[cuda12]'" in refusal


def case(name, skipped=None):
    return (
        f'<testcase name="{name}">{"" if skipped is None else f"<skipped message={json.dumps(skipped)}/>"}</testcase>'
    )


CPU_ONLY = {"torch": "not installed", TORCH: "torch 2.13.0+cpu finds no GPU", "jax": "not installed", JAX: "no module"}


@pytest.mark.parametrize(
    ("cases", "missing", "note"),
    [
        ([case("test_a")], {}, ""),
        ([case("test_a"), case("test_b", "no GPU")], CPU_ONLY, "1 of 2 tests were skipped: test_b: no GPU"),
        ([case("test_a"), case("test_b", "this torch has no CUDA")], CPU_ONLY, ""),
        (
            [case("test_a"), case("test_b", "this torch has no CUDA")],
            {},
            "1 of 2 tests were skipped: test_b: this torch has no CUDA",
        ),
        ([case("test_a"), case("test_b", "could not import 'torch': No module named 'torch'")], CPU_ONLY, ""),
        ([case("test_a"), case("test_b", "jax is not installed"), case("test_c", "jax has no GPU")], CPU_ONLY, ""),
        (
            [case("test_a"), case("test_b", "could not import 'jax.extend'")],
            {"torch": "not installed"},
            "1 of 2 tests were skipped: test_b: could not import 'jax.extend'",
        ),
        ([case("test_b", "jax has no GPU")], CPU_ONLY, "no test was run"),
        ([], {}, "no test was run"),
    ],
    ids=["run", "skipped", "named", "not missing", "no torch", "no jax", "other", "all skipped", "none"],
)
def test_only_skips_that_the_preflight_has_named_are_no_failure(cases, missing, note, tmp_path):
    words = writes("{folder}/tests.xml", f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = Preflight(missing, "NVIDIA Fake 1", 80 << 30)
    code, kept, outcomes = checked(tmp_path, stage("tests", *words, keeps="tests"), found=found)
    assert kept["stages"]["tests"]["note"] == note
    assert (code, outcomes["tests"]) == ((1, "failed") if note else (0, "passed"))


def test_tests_that_leave_no_report_are_a_failure(tmp_path):
    code, kept, _ = checked(tmp_path, stage("tests", "-c", "pass", keeps="tests"), BENCH)
    assert code == 1
    assert "no report of the tests" in kept["stages"]["tests"]["note"]
    assert len(kept["reports"]) == 1


def test_skips_that_are_known_are_said_by_a_test():
    """A message that no test says any more would let another pass."""
    said = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py") if path != Path(__file__))
    literal = {
        "torch is not installed": "{framework} is not installed",
        "torch has no GPU": "{framework} has no GPU",
        "fewer than 2 GPUs": "fewer than {wanted} GPUs",
    }
    for patterns in gpu_preflight.SKIPS.values():
        for pattern in patterns:
            message = pattern.replace("\\", "").replace("jax is", "torch is").replace("jax has", "torch has")
            wanted = literal.get(message, message)
            assert wanted in said or f'importorskip("{message.split(chr(39))[1]}")' in said, pattern


class TestStages:
    ALL = gpu_check.stages(EVERYTHING)

    def test_each_can_be_run_by_itself_and_all_are_listed(self, tmp_path, capsys):
        first, second = (stage(name, "-c", "pass") for name in ("first", "second"))
        assert list(checked(tmp_path, first, second, arguments=["--stage", "second"])[2]) == ["machine", "second"]
        with pytest.raises(SystemExit, match="no such stage: third; there are machine, first"):
            run(tmp_path, first, arguments=["--stage", "third"])
        capsys.readouterr()
        assert gpu_check.main(["--list"]) == 0
        shown = capsys.readouterr().out
        assert all(re.search(rf"^  {each.name} +\d+ s  ", shown, re.MULTILINE) for each in self.ALL)

    def test_by_default_the_further_ones_are_not_run(self, tmp_path):
        further = stage("further", "-c", "pass", further=True)
        assert list(checked(tmp_path, BENCH, further)[2]) == ["machine", "bench"]
        (tmp_path / "results/gpu-fake-1.json").unlink()
        assert list(checked(tmp_path, BENCH, further, arguments=["--further"])[2]) == ["machine", "further"]

    @pytest.mark.parametrize("further", [False, True])
    def test_together_they_end_within_what_one_call_may_take(self, further):
        assert gpu_check.limit_of(gpu_check.chosen(self.ALL, (), further=further)) <= 570

    @pytest.mark.parametrize("small", [False, True])
    def test_they_are_commands_that_there_are(self, small):
        names = [each.name for each in self.ALL]
        assert len(set(names)) == len(names)
        assert self.ALL[0].keeps == "machine"
        for each in gpu_check.stages(EVERYTHING, small=small):
            if each.keeps == "reports":
                given = parser().parse_args(each.command[each.command.index("gradengine.bench") + 1 :])
                assert set(given.names) <= set(NAMES)
                assert given.small is small
            assert all((ROOT / word).exists() for word in each.command if word.startswith(("bench/", "tests")))

    @pytest.mark.parametrize(
        ("gigabytes", "cpus", "missing", "processes"),
        [(80, 16, {}, 8), (80, 4, {}, 4), (24, 16, {}, 6), (6, 16, {}, None), (80, 16, {"pytest-xdist": ""}, None)],
    )
    def test_tests_run_in_as_many_processes_as_there_is_memory_for(
        self, gigabytes, cpus, missing, processes, monkeypatch
    ):
        monkeypatch.setattr(os, "cpu_count", lambda: cpus)
        command = gpu_check.stage_of_tests(Preflight(missing, "NVIDIA Fake 1", gigabytes << 30)).command
        assert command[command.index("-n") + 1] == str(processes) if processes else "-n" not in command


WITHOUT_PYTEST_TIMEOUT = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "pytest_timeout" else find_spec(name, *package)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_the_tests_run_without_pytest_timeout():
    """It is no part of what gives a test its result; a stage has its own limit."""
    command = [
        sys.executable,
        "-c",
        WITHOUT_PYTEST_TIMEOUT,
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_plan_models.py",
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- bench/draw.py ----


PAGE = f"before\n{draw.BEGIN}\nold\n{draw.END}\n\nafter\n"


def test_without_results_of_a_gpu_the_page_has_no_word_of_it(tmp_path):
    (tmp_path / "cpu-other.json").write_text('{"format": 1}')  # a result of another kind has no place in the table
    page = draw.drawn(PAGE, tmp_path)
    assert page.startswith("before\n")
    assert page.endswith(f"{draw.END}\n\nafter\n")
    assert draw.GPU_BEGIN not in page


def test_results_of_a_gpu_follow_the_cpus_and_go_with_their_file(tmp_path):
    checked(tmp_path, BENCH)
    with_gpu = draw.drawn(PAGE, tmp_path / "results")
    assert "NVIDIA Fake 1, driver 1, CUDA 13.0, CuPy 14, torch 2:" in with_gpu
    assert "| step, bfloat16 | ours hold=1 | 2.000 | 4000 | 91% | 100 |  |" in with_gpu
    assert "| step, bfloat16 | torch foreach, sum | 2.000 | 4000 |  | 100 | 2.00x hold=1 |" in with_gpu
    assert "| copy |" not in with_gpu
    assert draw.drawn(with_gpu, tmp_path / "results") == with_gpu
    assert draw.drawn(with_gpu, tmp_path) == draw.drawn(PAGE, tmp_path)


def test_the_pages_have_what_was_recorded():
    readme, measured = ((ROOT / name).read_text() for name in ("README.md", "docs/measured.md"))
    assert draw.put(readme, draw.chosen(draw.RESULTS)) == readme
    assert draw.drawn(measured, draw.RESULTS) == measured


def test_what_is_lost_is_among_what_is_told_first():
    ratios = [float(ratio) for ratio in re.findall(r"\| (\d\.\d\d)x \|$", draw.chosen(draw.RESULTS), re.MULTILINE)]
    assert len(ratios) == len(draw.CHOSEN)
    assert min(ratios) < 0.5 < 2 < max(ratios)


def test_of_odd_sizes_ours_alone_is_drawn():
    rows = [{"variant": variant} for variant in ("ours", "torch foreach", "copy")]
    shown = draw.rows_shown({"benchmark": "norm", "rows": rows, "parameters": {"odd": True}})
    assert shown == [{"variant": "ours"}]
    assert draw.rows_shown({"benchmark": "launches"}) == []
