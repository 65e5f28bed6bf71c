"""measured/gpu_check.py with stages that need no GPU: what runs, what is kept, what fails, and the tables."""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import draw
import gpu_check
import gpu_preflight
import gpu_results
import pytest
from gpu_bench import VARIANTS, parser
from gpu_check import Stage
from gpu_preflight import JAX, SECOND, TORCH, Preflight

from gradengine.bench.machine import commit_of

ROOT = Path(__file__).parent.parent
EVERYTHING = Preflight({})
MACHINE = {
    "machine": {"gpu": "NVIDIA Fake 1", "driver": "1", "runtime_cuda": "13.0", "gpu_memory_bytes": 80 << 30},
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


def stage(name, *words, limit=60, **facts):
    return Stage(name, "for the test", gpu_check.python(*words), limit, **facts)


MACHINE_STAGE = stage("machine", *writes("{folder}/machine.json", json.dumps(MACHINE)))
BENCH = stage("bench", *writes("{folder}/bench.json", json.dumps({"reports": [REPORT]})))
HANGS = "import time; time.sleep(300)"


def run(tmp_path, *groups, arguments=(), found=EVERYTHING):
    """Of a group of one the stage alone is given."""
    whole = [group if isinstance(group, list) else [group] for group in (MACHINE_STAGE, *groups)]

    @contextmanager
    def look():
        yield found, lambda limit: found

    words = ["--out", str(tmp_path / "out"), "--commit", "abc", *arguments]
    return gpu_check.main(words, lambda found, small=False: whole, tmp_path / "results", look)


def checked(tmp_path, *groups, **given):
    code = run(tmp_path, *groups, **given)
    kept = json.loads((tmp_path / "results/gpu-fake-1.json").read_text())
    assert kept == json.loads((tmp_path / "out/gpu-fake-1.json").read_text())
    return code, kept, {name: found["outcome"] for name, found in kept["stages"].items()}


def log_of(tmp_path, name):
    with tarfile.open(tmp_path / "out/logs.tar.gz") as logs:
        return logs.extractfile(name).read().decode()


class TestResults:
    def test_they_are_kept_with_machine_and_stages(self, tmp_path, capsys):
        code, kept, outcomes = checked(tmp_path, BENCH)
        assert code == 0
        assert kept["machine"] == MACHINE["machine"]
        assert kept["versions"]["commit"] == "abc"
        assert kept["reports"] == [{"stage": "bench", **REPORT}]
        assert outcomes == {"machine": "passed", "bench": "passed"}
        shown = capsys.readouterr().out.rpartition("stage      benchmark")[2]
        assert re.search(r"bench +step +torch foreach, sum +2\.000 +3\.000 +100 +2\.00", shown)
        assert "torch.compile" not in shown

    @pytest.mark.parametrize("together", [False, True])
    def test_a_stage_that_fails_or_hangs_takes_nothing_from_the_others(self, together, tmp_path, monkeypatch):
        monkeypatch.setattr(gpu_check, "GRACE", 0.2)
        half = f"{BENCH.command[2]}; import sys; print('failed: norm: ours'); sys.exit(3)"
        deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {HANGS}"
        child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"
        stages = [
            stage("bench", "-c", half),
            stage("slow", "-c", child, limit=0.5),
            stage("dies", "-c", "import os; os.kill(os.getpid(), 9)"),
            stage("last", "-c", "print('all is well')"),
        ]
        code, kept, outcomes = checked(tmp_path, *([stages] if together else stages))
        assert code == 1
        ends = {"bench": "failed", "slow": "timed out", "dies": "failed", "last": "passed"}
        assert outcomes == {"machine": "passed", **ends}
        assert kept["stages"]["bench"]["note"] == "exit status 3: failed: norm: ours"
        assert kept["stages"]["slow"]["note"].startswith("not done within 0.5 s")
        assert kept["reports"] == [{"stage": "bench", **REPORT}]
        assert "failed: norm: ours" in log_of(tmp_path, "bench.log")
        assert log_of(tmp_path, "last.log") == "all is well\n"
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu-fake-1.json", "logs.tar.gz"]

    def test_a_stage_at_its_limit_may_write_what_it_has(self, tmp_path):
        report = tmp_path / "report.json"
        report.write_text(json.dumps({"reports": [REPORT]}))
        words = f"trap 'cp {report} {{folder}}/bench.json; exit 1' INT; sleep 300 & wait"
        _, kept, outcomes = checked(tmp_path, Stage("bench", "for the test", ("sh", "-c", words), 0.5))
        assert outcomes["bench"] == "timed out"
        assert kept["reports"] == [{"stage": "bench", **REPORT}]

    def test_nothing_follows_where_the_first_does_not_pass(self, tmp_path, capsys):
        bad = stage("kernels", "-c", "import sys; sys.exit('other bits')")
        known = [[MACHINE_STAGE, bad], [BENCH], [stage("last", "-c", "pass")]]
        code = gpu_check.main(
            ["--out", str(tmp_path / "out"), "--commit", "abc"],
            lambda found, small=False: known,
            tmp_path / "results",
            lambda: nullcontext((EVERYTHING, lambda limit: pytest.fail("waits for frameworks"))),
        )
        assert code == 1
        shown = capsys.readouterr().out
        assert re.search(r"^kernels +failed .* exit status 1: other bits$", shown, re.MULTILINE)
        assert re.search(r"^bench +not run .* kernels did not pass$", shown, re.MULTILINE)
        assert json.loads((tmp_path / "out/gpu-fake-1.json").read_text())["stages"].keys() == {"machine", "kernels"}

    def test_limits_are_cut_to_the_time_that_is_left(self, tmp_path, monkeypatch, capsys):
        class Clock:
            sleep = time.sleep

            def monotonic():
                return 1000 if (tmp_path / "begun").exists() else 0

        monkeypatch.setattr(gpu_check, "time", Clock)
        slow = stage("slow", "-c", f"open({str(tmp_path / 'begun')!r}, 'w'); {HANGS}", limit=2000)
        late = stage("late", "-c", "pass"), stage("later", "-c", "pass")
        code, kept, outcomes = checked(tmp_path, BENCH, slow, *late, arguments=["--minutes", "10"])
        assert code == 1
        assert outcomes == {"machine": "passed", "bench": "passed", "slow": "timed out"}
        assert kept["stages"]["slow"]["note"] == "not done within 590 s"
        assert re.findall(r"^(\w+) +not run .* no time was left$", capsys.readouterr().out, re.MULTILINE) == [
            "late",
            "later",
        ]

    def test_answers_of_later_runs_take_the_place_of_their_own_alone(self, tmp_path):
        def answered(**outcomes):
            return stage("settle", *writes("{folder}/settle.json", json.dumps({"settled": outcomes})))

        checked(tmp_path, answered(one="failed", two="passed"))
        assert checked(tmp_path, answered(one="passed"))[1]["settled"] == {"one": "passed", "two": "passed"}

    def test_a_file_that_was_not_written_to_its_end_takes_nothing_away(self, tmp_path):
        torn = stage("torn", *writes("{folder}/torn.json", '{"reports": [{"ben'))
        _, kept, outcomes = checked(tmp_path, BENCH, torn, stage("last", "-c", "pass"))
        assert len(kept["reports"]) == 1
        assert outcomes["last"] == "passed"

    def test_what_stages_had_found_is_kept_when_the_program_is_stopped(self, tmp_path, capsys):
        words = f"{BENCH.command[2]}; import os, signal; os.kill(os.getppid(), signal.SIGTERM); {HANGS}"
        beside = [stage("bench", "-c", words), stage("beside", "-c", HANGS)]
        code, kept, outcomes = checked(tmp_path, stage("first", "-c", "pass"), beside, stage("last", "-c", "pass"))
        assert code == 1
        assert outcomes == {"machine": "passed", "first": "passed", "bench": "stopped", "beside": "stopped"}
        assert kept["reports"] == [{"stage": "bench", **REPORT}]
        assert re.search(r"^last +not run .* the program was stopped$", capsys.readouterr().out, re.MULTILINE)

    def test_a_write_that_is_cut_short_leaves_what_was_there(self, tmp_path, monkeypatch):
        path = tmp_path / "results/gpu-fake-1.json"
        path.parent.mkdir()
        path.write_text("whole")
        monkeypatch.setattr(gpu_results.os, "replace", lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, BENCH)
        assert path.read_text() == "whole"

    def test_stages_run_one_by_one_come_together(self, tmp_path):
        first = stage("first", "-c", "pass")
        checked(tmp_path, first, BENCH)
        code, kept, _ = checked(tmp_path, first, BENCH, arguments=["--only", "first"])
        assert code == 0
        assert list(kept["stages"]) == ["machine", "first", "bench"]
        assert len(kept["reports"]) == 1

    def test_of_another_commit_nothing_stays(self, tmp_path):
        checked(tmp_path, BENCH)
        _, kept, _ = checked(tmp_path, BENCH, arguments=["--commit", "def", "--only", "machine"])
        assert kept["reports"] == []

    def test_small_sizes_give_no_figures_to_keep(self, tmp_path):
        assert run(tmp_path, BENCH, arguments=["--small"]) == 0
        assert json.loads((tmp_path / "out/gpu-fake-1.json").read_text())["reports"]
        assert not (tmp_path / "results").exists()

    def test_recorded_results_make_no_commit_dirty(self, tmp_path):
        def git(*words):
            names = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
            subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True)

        result, code = tmp_path / "measured/results/gpu.json", tmp_path / "package/code.py"
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

    def test_the_steps_figures_come_last_and_yardsticks_once(self):
        named = [("step", "step"), ("step-bf16", "step"), ("parts", "norm"), ("fp32-odd", "step")]
        lines = gpu_results.figures([{**REPORT, "stage": stage, "benchmark": name} for stage, name in named])
        steps = [name for name in ("step-bf16", "fp32-odd", "step") for _ in range(2)]
        assert [line.split()[0] for line in lines] == ["stage", "parts", "parts", "stage", "step", *steps]
        assert [line.split()[2] for line in lines].count("copy") == 1


def test_jax_does_not_take_three_quarters_of_the_gpu_in_each_process(tmp_path):
    asks = "import os; assert os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'"
    assert checked(tmp_path, stage("asks", "-c", asks))[0] == 0


class TestClocks:
    @pytest.fixture(autouse=True)
    def _only_ours(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))

    def test_clocks_power_and_temperature_are_kept_beside_their_stage(self, tmp_path, capsys):
        def seen(name, *lines):
            said = "".join(f"{line}\n" for line in lines)
            return stage(
                name,
                "-c",
                f"open({{folder!r}} + '/clocks.csv', 'a').write({said!r})".replace("{folder!r}", "'{folder}'"),
            )

        hot = ("1410, 1980, 2619, 690.25, 71", "1200, 1980, 2619, 700, 73", "1410, 1980, 2619, 710, 73")
        stages = seen("first", "345, 1980, [N/A], 70, 31"), seen("second", *hot)
        _, kept, _ = checked(tmp_path, *stages)
        assert kept["stages"]["first"]["clocks"]["watts"] == {"least": 70, "median": 70, "most": 70}
        clocks = kept["stages"]["second"]["clocks"]
        assert clocks["sm_mhz"] == {"least": 1200, "median": 1410, "most": 1410}
        assert clocks["sm_mhz_at_most"]["most"] == 1980
        assert re.search(r"second +passed .* s  SM 1410 MHz \(least 1200\), 700 W, 73 C", capsys.readouterr().out)


class TestWhatIsMissing:
    WITHOUT_A_TOOL = Preflight({"sanitizer": "not on the PATH", JAX: "no module"})
    NEEDS_IT = stage("memcheck", "-c", "pass", needs=("sanitizer",))

    def test_it_is_named_with_what_does_not_run(self, tmp_path, capsys):
        code, kept, outcomes = checked(tmp_path, self.NEEDS_IT, found=self.WITHOUT_A_TOOL)
        assert (code, outcomes["memcheck"]) == (0, "absent")
        assert kept["stages"]["memcheck"]["note"] == "sanitizer: not on the PATH"
        shown = capsys.readouterr().out.splitlines()
        assert "  missing: sanitizer: not on the PATH; not run: memcheck" in shown
        assert "  missing: a GPU for JAX: no module" in shown
        assert kept["missing"] == dict(self.WITHOUT_A_TOOL.missing)

    def test_one_line_installs_every_package_that_is_missing_for_the_drivers_cuda(self, capsys, tmp_path):
        missing = dict.fromkeys(("cupy", "xdist", "jax"), "not installed") | {"g++": "not on the PATH", TORCH: "no"}
        assert run(tmp_path, found=Preflight(missing, cuda=13)) == 2
        *_, install = capsys.readouterr().out.splitlines()
        wanted = "'cupy-cuda13x>=14' 'cuda-toolkit[nvrtc,cudart]==13.*' 'pytest-xdist>=3.6' 'jax[cuda13]'"
        assert install == f"  install: {sys.executable} -m pip install {wanted}"

    def test_a_stage_asked_for_by_name_that_cannot_run_is_a_failure(self, tmp_path):
        assert run(tmp_path, self.NEEDS_IT, found=self.WITHOUT_A_TOOL, arguments=["--only", "memcheck"]) == 1

    @pytest.mark.parametrize("name", ["numpy", "msgpack", "xxhash", "cupy"])
    def test_without_what_the_package_needs_nothing_runs(self, name, tmp_path, capsys):
        assert run(tmp_path, BENCH, found=Preflight({name: "why"})) == 2
        assert capsys.readouterr().err == f"gpu-check cannot run here:\n  {name}: why\n"
        assert not (tmp_path / "out").exists()

    def test_a_copy_without_git_must_be_told_its_commit(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
        assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == f"gpu-check: {tmp_path} has no .git: say what is measured, by --commit SHA\n"
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("name", [SECOND, "torch", TORCH, "jax", JAX, "typer", "rich", "xdist", "nvidia-smi"])
    def test_what_runs_first_needs_none_of_these(self, name):
        found = Preflight({name: "not installed"})
        assert found.refusal == []
        lacking = [each.name for each in EACH if found.lacks(each.needs)]
        assert set(lacking) <= {"loop", "launches", "compiled"}

    def test_what_is_found_here(self, monkeypatch):
        monkeypatch.setattr(gpu_preflight, "PACKAGES", {"numpy": ("numpy",), "no_such_package": ("no-such",)})
        monkeypatch.setattr(gpu_preflight, "PROGRAMS", ("no-such-program",))
        answers = {
            SECOND: "print('a word')",
            TORCH: "sys.exit('a word before\\ntorch 2 finds no GPU')",
            JAX: "import os; os._exit(7)",
            "not asked": "",
        }
        monkeypatch.setattr(gpu_preflight, "QUESTIONS", answers)
        needs = {**dict.fromkeys(answers, ("numpy",)), "not asked": ("numpy", "no_such_package")}
        monkeypatch.setattr(gpu_preflight, "ASKED_OF", needs)
        with gpu_preflight.preflight() as (known, others):
            at_once = {"no_such_package": "not installed", "no-such-program": "not on the PATH"}
            at_once["not asked"] = "no_such_package not installed"
            assert known.missing == at_once
            assert others(60.0).missing == {**at_once, TORCH: "torch 2 finds no GPU", JAX: "exit status 7"}

    def test_a_framework_that_hangs_is_not_there(self, monkeypatch):
        monkeypatch.setattr(gpu_preflight, "QUESTIONS", {TORCH: HANGS})
        monkeypatch.setattr(gpu_preflight, "ASKED_OF", {TORCH: ()})
        with gpu_preflight.preflight() as (_, others):
            assert others(0.0).missing[TORCH] == "no answer in time"


def case(name, skipped=None):
    return (
        f'<testcase name="{name}">{"" if skipped is None else f"<skipped message={json.dumps(skipped)}/>"}</testcase>'
    )


CPU_ONLY = {"torch": "not installed", TORCH: "torch 2.13.0+cpu finds no GPU", "jax": "not installed", JAX: "no module"}


RUN, SKIPPED = case("test_a"), "1 of 2 tests were skipped: test_b: {}"
NO_CUDA, NO_TORCH, NO_JAX = "this torch has no CUDA", "could not import 'torch'", "could not import 'jax.extend'"


@pytest.mark.parametrize(
    ("cases", "missing", "note"),
    [
        ([RUN], {}, ""),
        ([RUN, case("test_b", "no GPU")], CPU_ONLY, SKIPPED.format("no GPU")),
        ([RUN, case("test_b", NO_CUDA)], CPU_ONLY, ""),
        ([RUN, case("test_b", NO_CUDA)], {}, SKIPPED.format(NO_CUDA)),
        ([RUN, case("test_b", f"{NO_TORCH}: No module named 'torch'")], CPU_ONLY, ""),
        ([RUN, case("test_b", "jax is not installed"), case("test_c", "jax has no GPU")], CPU_ONLY, ""),
        ([RUN, case("test_b", NO_JAX)], {"torch": "not installed"}, SKIPPED.format(NO_JAX)),
        ([case("test_b", "jax has no GPU")], CPU_ONLY, "no test was run"),
    ],
)
def test_only_skips_that_the_preflight_has_named_are_no_failure(cases, missing, note, tmp_path):
    words = writes("{folder}/tests.xml", f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    code, kept, outcomes = checked(tmp_path, stage("tests", *words, tests=True), found=Preflight(missing))
    assert kept["stages"]["tests"]["note"] == note
    assert (code, outcomes["tests"]) == ((1, "failed") if note else (0, "passed"))


def test_tests_that_leave_no_report_are_a_failure(tmp_path):
    code, kept, _ = checked(tmp_path, stage("tests", "-c", "pass", tests=True), BENCH)
    assert code == 1
    assert "no report of the tests" in kept["stages"]["tests"]["note"]
    assert len(kept["reports"]) == 1


EACH = [stage for group in gpu_check.plan(EVERYTHING) for stage in group]


class TestStages:
    def test_each_can_be_run_by_itself_and_all_are_listed(self, tmp_path, capsys):
        first, second = (stage(name, "-c", "pass") for name in ("first", "second"))
        assert list(checked(tmp_path, [first, second], arguments=["--only", "second"])[2]) == ["machine", "second"]
        with pytest.raises(SystemExit, match="no such stage: third; there are machine, first"):
            run(tmp_path, first, arguments=["--only", "first,third"])
        capsys.readouterr()
        assert gpu_check.main(["--list"]) == 0
        shown = capsys.readouterr().out
        assert all(re.search(rf"^[ +] {each.name} +\d+ s  ", shown, re.MULTILINE) for each in EACH)

    def test_all_end_within_the_hour_that_a_gpu_is_borrowed_for(self):
        assert gpu_preflight.LIMIT + gpu_check.limit_of(gpu_check.plan(EVERYTHING)) <= 3600

    @pytest.mark.parametrize("small", [False, True])
    def test_they_are_commands_that_there_are(self, small):
        names = [each.name for each in EACH]
        assert len(set(names)) == len(names)
        for each in (each for group in gpu_check.plan(EVERYTHING, small=small) for each in group):
            if "measured/gpu_bench.py" in each.command:
                given = parser().parse_args(each.command[each.command.index("measured/gpu_bench.py") + 1 :])
                assert set(given.names) <= set(VARIANTS)
                assert given.small is small
            assert all((ROOT / word).exists() for word in each.command if word.startswith(("measured/", "tests")))

    @pytest.mark.parametrize(
        ("gigabytes", "cpus", "missing", "processes"),
        [(80, 16, {}, 8), (80, 4, {}, 4), (24, 16, {}, 6), (6, 16, {}, None), (80, 16, {"xdist": ""}, None)],
    )
    def test_tests_run_in_as_many_processes_as_there_is_memory_for(
        self, gigabytes, cpus, missing, processes, monkeypatch
    ):
        monkeypatch.setattr(os, "cpu_count", lambda: cpus)
        command = gpu_check.run_of_tests(Preflight(missing, gigabytes << 30), small=False).command
        assert command[command.index("-n") + 1] == str(processes) if processes else "-n" not in command


def test_every_file_that_tests_a_device_is_named_where_cupy_is(request):
    """Of those that this run has collected: CI's run of the device's tests collects all."""

    def tests_a_device(item):
        parameters = getattr(item, "callspec", None)
        backends = [parameters.params.get(name) for name in ("backend", "device")] if parameters else []
        return any(isinstance(each, str) and each == "cupy" for each in backends)

    files = {f"tests/{item.path.name}" for item in request.session.items if tests_a_device(item)}
    assert files - set(gpu_check.device_tests()) == set()


# ---- measured/draw.py ----


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
    assert "| step, bfloat16 | gradengine hold=1 | 2.000 | 4000 | 91% | 100 |  |" in with_gpu
    assert "| step, bfloat16 | torch foreach, sum | 2.000 | 4000 |  | 100 | 2.00x (hold=1) |" in with_gpu
    assert "| copy |" not in with_gpu
    assert draw.drawn(with_gpu, tmp_path / "results") == with_gpu
    assert draw.drawn(with_gpu, tmp_path) == draw.drawn(PAGE, tmp_path)


def test_of_odd_sizes_ours_alone_is_drawn():
    rows = [{"variant": variant} for variant in ("ours", "torch foreach", "copy")]
    shown = draw.rows_shown({"benchmark": "norm", "rows": rows, "parameters": {"odd": True}})
    assert shown == [{"variant": "ours"}]
    assert draw.rows_shown({"benchmark": "launches"}) == []
