"""All that wants a GPU, in stages: `make gpu-check`, or `make gpu-check ARGS="--stage tests"`, or `ARGS=--list`.

Each stage is a process of its own with a limit of its own: one that fails, hangs or loses the device leaves the others'
figures. Those that run by default take less than ten minutes together, so do those of --further. A preflight says what
the machine lacks, and which stages and tests do not run for that.

What was found goes into bench/results/gpu-<name>.json after each stage, and into the folder of --out with the logs.
The command fails if a stage does, if a test is skipped for another reason than what the preflight has named, and if a
stage that was asked for by name cannot run.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

sys.path.insert(0, str(Path(__file__).parent))

from gpu_preflight import LIMIT, TORCH, Preflight, preflight
from gpu_results import Results, figures

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"

PASSED, FAILED, TIMED_OUT, ABSENT = "passed", "failed", "timed out", "absent"
GB = 1 << 30


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        name: Of the stage.
        about: What it does, in a line.
        command: Its words; "{folder}" in one stands for where it may write.
        limit: Seconds.
        needs: What must be there, in the preflight's words; without it the stage is absent.
        keeps: "machine", "reports" or "tests": what it writes to <folder>/<name>.json, or .xml for tests.
        further: Whether it runs only when asked for.
        lines: Of its output's end that are shown.
    """

    name: str
    about: str
    command: tuple[str, ...]
    limit: float
    needs: tuple[str, ...] = ()
    keeps: str | None = None
    further: bool = False
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


def stages(found: Preflight, *, small: bool = False) -> list[Stage]:
    """All of them, the machine's first; by default those that say most in the time.

    Args:
        found: What the machine has.
        small: Sizes at which everything runs quickly and no figure means anything.
    """

    def benchmark(name: str, about: str, limit: float, *words: str, **facts: object) -> Stage:
        sized = (*words, *(("--small",) if small else ()), "--json", f"{{folder}}/{name}.json")
        return Stage(name, about, python("-m", "gradengine.bench", *sized), limit, keeps="reports", **facts)

    def sanitized(tool: str, about: str) -> Stage:
        # Only the kernels' faults count: the driver's calls raise in Python.
        options = ("--tool", tool, "--error-exitcode", "66", "--report-api-errors", "no", "--launch-timeout", "0")
        command = ("compute-sanitizer", *options, *python("bench/gpu_once.py"))
        return Stage(tool, about, command, 85, ("compute-sanitizer",), further=True)

    parts, odd = ("accumulate", "norm", "hand-back", "hand-back-bf16"), ("--odd", "--blocks", "6")
    bf16 = ("--dtype", "bfloat16")
    machine = python("-m", "gradengine.bench.machine", "{folder}/machine.json")
    return [
        Stage("machine", "GPU, driver and versions", machine, 20, keeps="machine", lines=60),
        Stage("kernels", "every kernel once, at odd sizes, against NumPy", python("bench/gpu_once.py", "--pool"), 60),
        stage_of_tests(found, small=small),
        benchmark("fp32", "the 350M model's step and its parts", 110, *parts, "step"),
        benchmark("bf16", "the same of bf16 gradients", 90, "accumulate", "norm", "step", *bf16),
        benchmark("calls", "LoRA's clip, and the host's time for a call", 40, "lora", "host"),
        benchmark("fp32-odd", "sizes no multiple of 8, at odd addresses", 55, *parts, "step", *odd, further=True),
        benchmark("bf16-odd", "the same of bf16", 55, "accumulate", "norm", "step", *odd, *bf16, further=True),
        sanitized("memcheck", "compute-sanitizer: no access out of bounds"),
        sanitized("racecheck", "compute-sanitizer: no race in shared memory"),
        benchmark("launches", "what a step asks of the device", 45, "launches", needs=(TORCH,), further=True),
        benchmark(
            "compiled", "beside torch.compile", 180, "compiled", "--compile-limit", "70", needs=(TORCH,), further=True
        ),
    ]


def stage_of_tests(found: Preflight, *, small: bool = False) -> Stage:
    """All that has a GPU under test; in as many processes as there is memory for, where pytest-xdist is there."""
    processes = min(8, os.cpu_count() or 1, found.gpu_memory // (4 * GB))
    several = ("-n", str(processes)) if processes > 1 and not found.lacks(["pytest-xdist"]) else ()
    files = ("tests/test_interop_gpu.py", "tests/test_examples.py", "tests/test_clip.py") if small else ("tests",)
    chosen_tests = ("-k", "(cupy or runs_on_a_gpu) and not real_cupy", "--junitxml", "{folder}/tests.xml")
    command = python("-m", "pytest", *files, "-q", *chosen_tests, *several)
    needs = ("pytest", "hypothesis", "ml_dtypes")
    return Stage("tests", "all tests of the GPU", command, 210, needs, keeps="tests", lines=15)


def run_stage(stage: Stage, folder: Path, found: Preflight) -> Outcome:
    """Run one stage; its output goes to a log in the folder, and the end of it to the terminal."""
    if lacking := found.lacks(stage.needs):
        return Outcome(ABSENT, 0, lacking)
    began, log = time.monotonic(), folder / f"{stage.name}.log"
    code = _run(stage, folder, log)
    seconds = round(time.monotonic() - began, 1)
    shown = log.read_text(errors="replace").splitlines()
    print(*shown[-stage.lines :], sep="\n", flush=True)
    if code is None:
        return Outcome(TIMED_OUT, seconds, f"not done within {stage.limit:g} s")
    if code != 0:
        return Outcome(FAILED, seconds, _reason(code, shown))
    note = unexpected_skips(folder / f"{stage.name}.xml", found) if stage.keeps == "tests" else ""
    return Outcome(FAILED if note else PASSED, seconds, note)


def _run(stage: Stage, folder: Path, log: Path) -> int | None:
    """The exit status, or None where the limit ended it."""
    command = [word.replace("{folder}", str(folder)) for word in stage.command]
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603  (the commands stand above)
            command, cwd=ROOT, env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(stage.limit)
        except BaseException as fault:  # an interrupt too: it has a session of its own and would go on
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(fault, subprocess.TimeoutExpired):
                return None
            raise


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "GRADENGINE_REQUIRE_GPU": "1",
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # else each of the tests' processes takes three quarters of the GPU
    }


def _reason(code: int, shown: Sequence[str]) -> str:
    failed = [line for line in shown if line.startswith(("failed: ", "FAILED ", "ERROR "))]
    last = next((line for line in reversed(shown) if line.strip()), "")
    return f"exit status {code}: {'; '.join(failed[:5]) or last}"[:500]


def unexpected_skips(path: Path, found: Preflight) -> str:
    """What is wrong with a run of tests that says it passed: nothing was run, or skipped for an unknown reason."""
    try:
        cases = list(ET.parse(path).getroot().iter("testcase"))  # noqa: S314  (pytest wrote it)
    except (OSError, ET.ParseError) as fault:
        return f"there is no report of the tests: {fault}"
    skipped = [(case.get("name"), str(skip.get("message"))) for case in cases for skip in case.iter("skipped")]
    if len(skipped) == len(cases):
        return "no test was run"
    unexpected = [(name, why) for name, why in skipped if not found.expects(why)]
    shown = "; ".join(f"{name}: {why}" for name, why in unexpected[:5])
    return f"{len(unexpected)} of {len(cases)} tests were skipped: {shown}" if unexpected else ""


def chosen(known: Sequence[Stage], names: Sequence[str], *, further: bool = False) -> list[Stage]:
    """The stages by name, or the default ones, or the further ones; the first always, which says where all this is.

    Raises:
        SystemExit: There is no stage of that name.
    """
    unknown = set(names) - {stage.name for stage in known}
    if unknown:
        sys.exit(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in known)}")
    wanted = set(names) or {stage.name for stage in known if stage.further is further}
    return [stage for stage in known if stage is known[0] or stage.name in wanted]


def listed(known: Sequence[Stage]) -> list[str]:
    """A line for each stage: its limit, what it does, what it needs; and what all take together."""
    lines = []
    for option, is_further in (("default", False), ("--further", True)):
        group = chosen(known, (), further=is_further)
        lines.append(f"{option}: at most {limit_of(group):g} s")
        for stage in group:
            needs = f" (needs {', '.join(stage.needs)})" if stage.needs else ""
            lines.append(f"  {stage.name:10} {stage.limit:4g} s  {stage.about}{needs}")
    return lines


def limit_of(group: Sequence[Stage]) -> float:
    """Seconds that these take at most, the preflight before them counted in."""
    return LIMIT + sum(stage.limit for stage in group)


def announced(found: Preflight, wanted: Sequence[Stage]) -> list[str]:
    """What the machine lacks, and what does not run for that."""
    lines = [f"preflight: {found.gpu}, {found.gpu_memory / GB:.1f} GiB"]
    for name, why in found.missing.items():
        absent = [stage.name for stage in wanted if name in stage.needs]
        effect = f"; not run: {', '.join(absent)}" if absent else ""
        lines.append(f"  missing: {name}: {why}{effect}")
    return lines


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--list", action="store_true", help="name the stages and their limits, and end")
    made.add_argument("--stage", action="append", default=[], help="this one alone; may be given several times")
    made.add_argument("--further", action="store_true", help="the stages that are not run by default")
    made.add_argument("--small", action="store_true", help="sizes at which all runs quickly; figures go to --out alone")
    made.add_argument("--out", type=Path, default=ROOT / "out/gpu-check", help="logs, and a copy of the results")
    made.add_argument("--commit", help="what is measured, where the tree does not know")
    return made


def main(
    arguments: Sequence[str] | None = None,
    stages_of: Callable[..., Sequence[Stage]] = stages,
    results: Path = RESULTS,
    look: Callable[[], Preflight] = preflight,
) -> int:
    """Run the stages; 1 if one of them did not pass, 2 if nothing can run here."""
    given = parser().parse_args(arguments)
    if given.list:
        print(*listed(stages_of(Preflight({}))), sep="\n")
        return 0
    found = look()
    known = stages_of(found, small=given.small)
    wanted = chosen(known, given.stage, further=given.further)
    print(*announced(found, wanted), sep="\n", flush=True)
    if found.refusal:
        print("gpu-check cannot run here:", *found.refusal, sep="\n  ", file=sys.stderr)
        return 2
    folder = given.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    kept = Results(folder, None if given.small else results, given.commit)
    outcomes = {stage.name: _noted(stage, folder, found, kept) for stage in wanted}
    print(*figures(kept.whole["reports"]), sep="\n")
    for name, outcome in outcomes.items():
        print(f"{name:10} {outcome.outcome:10} {outcome.seconds:7.1f} s  {outcome.note}")
    print(f"written: {kept.whole['name']}.json in {folder}{'' if given.small else f' and in {results}'}")
    good = {PASSED} if given.stage else {PASSED, ABSENT}
    return 0 if all(outcome.outcome in good for outcome in outcomes.values()) else 1


def _noted(stage: Stage, folder: Path, found: Preflight, kept: Results) -> Outcome:
    """Run a stage, and write down what came of it."""
    print(f"==== {stage.name}: {' '.join(stage.command)}", flush=True)
    for suffix in ("json", "xml"):
        (folder / f"{stage.name}.{suffix}").unlink(missing_ok=True)  # of an earlier run
    outcome = run_stage(stage, folder, found)
    print(f"==== {stage.name}: {outcome.outcome}, {outcome.seconds} s {outcome.note}", flush=True)
    kept.take(stage.name, stage.keeps, vars(outcome))
    return outcome


if __name__ == "__main__":
    sys.exit(main())
