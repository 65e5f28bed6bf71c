"""All that wants a GPU, in one command: `make gpu-check`, or `python bench/gpu_check.py --stages kernels,step-fp32`.

Each stage is a process of its own with a limit: one that fails, hangs or loses the device leaves the others' figures.
What they found goes into bench/results/gpu-<name>.json after each of them, and into the folder of --out with the logs.
The command fails if a stage does, or has no time left; a tool that is not installed is named as absent.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
TOTAL_LIMIT = 570.0  # seconds: under ten minutes with what starting and ending take

PASSED, FAILED, TIMED_OUT, ABSENT, NOT_RUN = "passed", "failed", "timed out", "absent", "not run"
GOOD = {PASSED, ABSENT}


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        name: Of the stage.
        command: Its words; "{folder}" in one stands for where it may write.
        limit: Seconds.
        needs: A program without which it is absent.
        keeps: "machine", "reports" or "tests": what it writes to <folder>/<name>.json, or .xml for tests.
        lines: Of its output's end that are shown.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    needs: str | None = None
    keeps: str | None = None
    lines: int = 25


@dataclass(frozen=True)
class Outcome:
    """How a stage ended.

    Attributes:
        outcome: One of the words above.
        seconds: What it took.
        note: Why, where it did not pass.
    """

    outcome: str
    seconds: float
    note: str = ""


def python(*words: str) -> tuple[str, ...]:
    """A command of this interpreter."""
    return (sys.executable, *words)


def benchmark(stage: str, limit: float, *words: str) -> Stage:
    """A stage of `gradengine bench gpu`."""
    command = python("-m", "gradengine", "bench", "gpu", *words, "--json", f"{{folder}}/{stage}.json")
    return Stage(stage, command, limit, keeps="reports", lines=200)


def sanitized(tool: str, limit: float) -> Stage:
    """A stage under compute-sanitizer: every kernel once. Only kernels' faults count: the driver's calls raise here."""
    options = ("--tool", tool, "--error-exitcode", "66", "--report-api-errors", "no", "--launch-timeout", "0")
    return Stage(tool, ("compute-sanitizer", *options, *python("bench/gpu_once.py")), limit, needs="compute-sanitizer")


MACHINE = Stage(
    "machine", python("-m", "gradengine.bench.gpu.machine", "{folder}/machine.json"), 60, keeps="machine", lines=60
)
# More than a thousand tests at about 0.1 s: in one process they might not be done in time.
IN_PARALLEL = ("-n", "8") if importlib.util.find_spec("xdist") else ()
PARTS = ("accumulate", "norm", "hand-back", "hand-back-bf16", "step")
SHORT = ("accumulate", "norm", "step")
ODD = ("--odd", "--blocks", "6")
STAGES = (
    MACHINE,
    Stage("kernels", python("bench/gpu_once.py", "--pool"), 60),
    Stage(
        "tests",
        python("-m", "pytest", "tests", "-q", "-k", "cupy", "--junitxml", "{folder}/tests.xml", *IN_PARALLEL),
        170,
        keeps="tests",
        lines=15,
    ),
    benchmark("fp32", 110, *PARTS),
    benchmark("bf16", 90, *SHORT, "--dtype", "bfloat16"),
    benchmark("fp32-odd", 50, *PARTS, *ODD),
    benchmark("bf16-odd", 50, *SHORT, *ODD, "--dtype", "bfloat16"),
    benchmark("small", 50, "lora", "host"),
    sanitized("memcheck", 75),
    sanitized("racecheck", 75),
    benchmark("launches", 60, "launches"),
    benchmark("compiled", 190, "compiled", "--compile-limit", "75"),
)


def run_stage(stage: Stage, folder: Path, limit: float) -> Outcome:
    """Run one stage; its output goes to a log in the folder, and the end of it to the terminal.

    Args:
        stage: Which.
        folder: Where it may write.
        limit: Seconds that are left for it.
    """
    if stage.needs and shutil.which(stage.needs) is None:
        return Outcome(ABSENT, 0, f"{stage.needs} is not installed")
    if limit <= 0:
        return Outcome(NOT_RUN, 0, "no time was left")
    began, log = time.monotonic(), folder / f"{stage.name}.log"
    code = _run(stage, folder, log, limit)
    seconds = round(time.monotonic() - began, 1)
    shown = log.read_text(errors="replace").splitlines()
    print(*shown[-stage.lines :], sep="\n", flush=True)
    if code is None:
        return Outcome(TIMED_OUT, seconds, f"not done within {limit:.0f} s")
    if code != 0:
        return Outcome(FAILED, seconds, _reason(code, shown))
    note = _skipped_tests(folder / f"{stage.name}.xml") if stage.keeps == "tests" else ""
    return Outcome(FAILED if note else PASSED, seconds, note)


def _run(stage: Stage, folder: Path, log: Path, limit: float) -> int | None:
    """The exit status, or None where the limit ended it."""
    command = [word.replace("{folder}", str(folder)) for word in stage.command]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "GRADENGINE_REQUIRE_GPU": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603  (the commands stand above)
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except BaseException as fault:  # an interrupt too: it has a session of its own and would go on
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(fault, subprocess.TimeoutExpired):
                return None
            raise


def _reason(code: int, shown: Sequence[str]) -> str:
    failed = [line for line in shown if line.startswith(("failed: ", "FAILED ", "ERROR "))]
    last = next((line for line in reversed(shown) if line.strip()), "")
    return f"exit status {code}: {'; '.join(failed[:5]) or last}"[:500]


def _skipped_tests(path: Path) -> str:
    """What is wrong with a run of tests that says it passed: nothing was run, or something was skipped."""
    cases = list(ET.parse(path).getroot().iter("testcase"))  # noqa: S314  (pytest wrote it)
    skipped = [(case.get("name"), found.get("message")) for case in cases for found in case.iter("skipped")]
    if not cases:
        return "no test was run"
    shown = "; ".join(f"{name}: {why}" for name, why in skipped[:5])
    return f"{len(skipped)} of {len(cases)} tests were skipped: {shown}" if skipped else ""


class Results:
    """What was found so far, written anew after each stage.

    Args:
        folder: Where the stages write, and where a copy of the results goes.
        results: Where the results go.
        commit: The commit that is measured, for a copy of the tree that does not know its own.
    """

    def __init__(self, folder: Path, results: Path, commit: str | None) -> None:
        self._folder, self._results, self._commit = folder, results, commit
        self.whole: dict = {"name": "gpu-unknown", "machine": {}, "versions": {}, "stages": {}, "reports": []}

    def take(self, stage: Stage, outcome: Outcome) -> None:
        """Take what a stage left, also one that failed half-way."""
        path = self._folder / f"{stage.name}.json"
        if stage.keeps == "machine" and path.exists():
            self._take_machine(json.loads(path.read_text()))
        self.whole["stages"][stage.name] = vars(outcome)
        kept = [report for report in self.whole["reports"] if report["stage"] != stage.name]
        fresh = json.loads(path.read_text())["reports"] if stage.keeps == "reports" and path.exists() else []
        self.whole["reports"] = [*kept, *({"stage": stage.name, **report} for report in fresh)]
        self._write()

    def _take_machine(self, found: dict) -> None:
        self.whole |= {"name": file_name(found["machine"]["gpu"]), **found}
        if self._commit:
            self.whole["versions"]["commit"] = self._commit
        before = self._results / f"{self.whole['name']}.json"
        if before.exists():  # the same commit's other stages stay, so that they may be run one by one
            earlier = json.loads(before.read_text())
            if earlier["versions"] == self.whole["versions"]:
                self.whole |= {"stages": earlier["stages"], "reports": earlier["reports"]}

    def _write(self) -> None:
        text = json.dumps(self.whole, indent=1) + "\n"
        (self._folder / f"{self.whole['name']}.json").write_text(text)
        if not self.whole["machine"]:
            return  # nobody knows whose results these are
        try:
            self._results.mkdir(parents=True, exist_ok=True)
            (self._results / f"{self.whole['name']}.json").write_text(text)
        except OSError as fault:
            print(f"cannot write to {self._results}: {fault}", flush=True)


def file_name(gpu: str) -> str:
    """The results' name, from the GPU's.

    >>> file_name("NVIDIA H200"), file_name("NVIDIA GeForce RTX 4090")
    ('gpu-h200', 'gpu-geforce-rtx-4090')
    """
    return "gpu-" + re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")


def figures(reports: Sequence[dict]) -> list[str]:
    """Every figure in one line each, for the end of the output."""
    times = f"{'device ms':>9} {'wall ms':>8} {'host us':>8} {'of copy':>7}"
    lines = [f"{'stage':9} {'benchmark':14} {'variant':30} {times}  times ours"]
    for report in reports:
        where = f"{report['stage']:9} {report['benchmark']:14}"
        if report["benchmark"] == "launches":
            lines += [f"{where} {variant:30} {counts}" for variant, counts in report["rows"].items()]
        else:
            lines += [f"{where} {_figures_of(row)}" for row in report["rows"]]
        lines += [f"{where} {absent['variant']:30} absent: {absent['why']}" for absent in report["absent"]]
    return lines


def _figures_of(row: dict) -> str:
    share = "" if row["of_copy"] is None else f"{row['of_copy']:.1%}"
    times = f"{1e3 * row['device_s']:9.3f} {1e3 * row['wall_s']:8.3f} {1e6 * row['host_s']:8.0f}"
    ratios = " ".join(f"{ratio:.2f}" for ratio in row["ratios"].values())
    return f"{row['variant']:30} {times} {share:>7}  {ratios}"


def chosen(stages: Sequence[Stage], names: str) -> list[Stage]:
    """The stages by name, in their order; the first one always, which says where all this is.

    Raises:
        SystemExit: There is no stage of that name.
    """
    wanted = [name for name in names.split(",") if name] or [stage.name for stage in stages]
    unknown = set(wanted) - {stage.name for stage in stages}
    if unknown:
        sys.exit(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in stages)}")
    return [stage for stage in stages if stage is stages[0] or stage.name in wanted]


def main(
    arguments: Sequence[str] | None = None,
    stages: Sequence[Stage] = STAGES,
    results: Path = RESULTS,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the stages; 1 if one of them did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out/gpu-check", help="logs, and a copy of the results")
    environment = os.environ.get("GPU_CHECK_STAGES", "")
    parser.add_argument("--stages", default=environment, help="some of them, with commas; or $GPU_CHECK_STAGES")
    parser.add_argument("--limit", type=float, default=TOTAL_LIMIT, help="seconds for all of them")
    parser.add_argument("--commit", help="what is measured, where the tree does not know")
    given = parser.parse_args(arguments)
    folder = given.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found, end, outcomes = Results(folder, results, given.commit), clock() + given.limit, {}
    for stage in chosen(stages, given.stages):
        print(f"==== {stage.name}: {' '.join(stage.command)}", flush=True)
        (folder / f"{stage.name}.json").unlink(missing_ok=True)  # of an earlier run
        outcome = outcomes[stage.name] = run_stage(stage, folder, min(stage.limit, end - clock()))
        print(f"==== {stage.name}: {outcome.outcome}, {outcome.seconds} s {outcome.note}", flush=True)
        found.take(stage, outcome)
    print(*figures(found.whole["reports"]), sep="\n")
    for name, outcome in outcomes.items():
        print(f"{name:10} {outcome.outcome:10} {outcome.seconds:7.1f} s  {outcome.note}")
    print(f"written: {found.whole['name']}.json in {folder} and, of a GPU that is known, in {results}")
    return 0 if all(outcome.outcome in GOOD for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
