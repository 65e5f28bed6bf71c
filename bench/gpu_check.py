"""All that wants a GPU, in stages: `make gpu-check`, or `make gpu-check ARGS=--list`; see docs/gpu-check.md.

Each stage is a process of its own with a limit of its own: one that fails, hangs or loses the device leaves the others'
figures. All together end in half an hour, each part of them (`ARGS="--part figures"`) within ten minutes, with the
figures that matter most first. Before them a preflight imports all that takes long, and says what the machine lacks,
which stages and tests do not run for that, and the one line that installs it; nothing is installed here.

What was found goes into bench/results/gpu-<name>.json after each stage, and into the folder of --out with the logs;
also what a stage that failed, or was stopped together with this program, had found until then. The command fails if a
stage does, if a test is skipped for another reason than what the preflight has named, and if a stage that was asked for
by name cannot run.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

sys.path.insert(0, str(Path(__file__).parent))

import gpu_clocks
from gpu_preflight import LIMIT, TORCH, Preflight, preflight
from gpu_results import Results, figures

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"

PASSED, FAILED, TIMED_OUT, ABSENT, STOPPED = "passed", "failed", "timed out", "absent", "stopped"
PARTS = FIGURES, PROOFS, FURTHER = "figures", "proofs", "further"
GB = 1 << 30


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        name: Of the stage.
        about: What it does, in a line.
        command: Its words; "{folder}" in one stands for where it may write.
        limit: Seconds.
        part: Which it belongs to.
        needs: What must be there, in the preflight's words; without it the stage is absent.
        keeps: "machine", "reports", "settled" or "tests": what it writes to <folder>/<name>.json, or .xml for tests.
        lines: Of its output's end that are shown.
    """

    name: str
    about: str
    command: tuple[str, ...]
    limit: float
    part: str
    needs: tuple[str, ...] = ()
    keeps: str | None = None
    lines: int = 25


@dataclass(frozen=True)
class Outcome:
    """How a stage ended.

    Attributes:
        outcome: One of the words above.
        seconds: What it took.
        note: Why, where it did not pass.
        clocks: The GPU's, and its power and temperature, while it ran.
    """

    outcome: str
    seconds: float
    note: str = ""
    clocks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def python(*words: str) -> tuple[str, ...]:
    """A command of this interpreter."""
    return (sys.executable, *words)


def stages(found: Preflight, *, small: bool = False) -> list[Stage]:
    """All of them, the machine's first; then those that say most in the time.

    Args:
        found: What the machine has.
        small: Sizes at which everything runs quickly and no figure means anything.
    """

    def benchmark(name: str, about: str, limit: float, part: str, *words: str, **facts: object) -> Stage:
        sized = (*words, *(("--small",) if small else ()), "--json", f"{{folder}}/{name}.json")
        return Stage(name, about, python("-m", "gradengine.bench", *sized), limit, part, keeps="reports", **facts)

    def sanitized(tool: str, about: str) -> Stage:
        # Only the kernels' faults count: the driver's calls raise in Python.
        options = ("--tool", tool, "--error-exitcode", "66", "--report-api-errors", "no", "--launch-timeout", "0")
        command = ("compute-sanitizer", *options, *python("bench/gpu_once.py"))
        return Stage(tool, about, command, 85, FURTHER, ("compute-sanitizer",))

    parts, odd = ("accumulate", "norm", "hand-back", "hand-back-bf16"), ("--odd", "--blocks", "6")
    bf16, once = ("--dtype", "bfloat16"), python("bench/gpu_once.py", "--pool")
    machine = python("-m", "gradengine.bench.machine", "{folder}/machine.json")
    settle = python("bench/gpu_settle.py", *(("--small",) if small else ()), "--json", "{folder}/settle.json")
    return [
        Stage("machine", "GPU, driver and versions", machine, 20, FIGURES, keeps="machine", lines=60),
        Stage("kernels", "every kernel once, at odd sizes, against NumPy", once, 60, FIGURES),
        benchmark("fp32", "the 350M model's step and its parts", 180, FIGURES, "step", *parts, "clip", "window"),
        benchmark("bf16", "the same of bf16 gradients", 150, FIGURES, "step", "accumulate", "norm", "clip", *bf16),
        benchmark("calls", "the host's time for a call, LoRA's clip", 80, FIGURES, "host", "step-call", "lora"),
        benchmark("small", "small models; gradients that are None", 60, FIGURES, "step-few", "step-many", "half-none"),
        Stage("settle", "what only a device can answer, each in its process", settle, 240, PROOFS, keeps="settled"),
        stage_of_tests(found, small=small),
        benchmark("fp32-odd", "sizes no multiple of 8, at odd addresses", 55, FURTHER, "step", *parts, *odd),
        benchmark("bf16-odd", "the same of bf16", 55, FURTHER, "step", "accumulate", "norm", *odd, *bf16),
        sanitized("memcheck", "compute-sanitizer: no access out of bounds"),
        sanitized("racecheck", "compute-sanitizer: no race in shared memory"),
        benchmark("launches", "what a step asks of the device", 45, FURTHER, "launches", needs=(TORCH,)),
        benchmark(
            "compiled", "beside torch.compile", 180, FURTHER, "compiled", "--compile-limit", "70", needs=(TORCH,)
        ),
    ]


def stage_of_tests(found: Preflight, *, small: bool = False) -> Stage:
    """All that has a GPU under test; in as many processes as there is memory for, where pytest-xdist is there."""
    processes = min(8, os.cpu_count() or 1, found.gpu_memory // (4 * GB))
    several = ("-n", str(processes)) if processes > 1 and not found.lacks(["xdist"]) else ()
    files = [f"tests/test_{name}.py" for name in ("interop", "examples", "clip")] if small else device_tests()
    chosen_tests = ("-k", "cupy or runs_on_a_gpu", "--junitxml", "{folder}/tests.xml")
    command = python("-m", "pytest", *files, "-q", *chosen_tests, *several)
    needs = ("pytest", "hypothesis", "ml_dtypes")
    return Stage("tests", "all tests of the GPU", command, 300, PROOFS, needs, keeps="tests", lines=15)


def device_tests() -> list[str]:
    """The files with a test of a device, found by its fixtures' names.

    Collecting the others takes half a minute, and packages that a machine with a GPU need not have.
    """
    takes_a_device = re.compile(r"def test_\w+\([^)]*\b(backend|device)\b|test_it_runs_on_a_gpu|torch-cupy")
    found = (path for path in sorted(ROOT.glob("tests/test_*.py")) if takes_a_device.search(path.read_text()))
    return [str(path.relative_to(ROOT)) for path in found]


def run_stage(stage: Stage, folder: Path, found: Preflight) -> Outcome:
    """Run one stage; its output goes to a log in the folder, and the end of it to the terminal."""
    if lacking := found.lacks(stage.needs):
        return Outcome(ABSENT, 0, lacking)
    began, log = time.monotonic(), folder / f"{stage.name}.log"
    code, clocks = _run(stage, folder, log)
    seconds = round(time.monotonic() - began, 1)
    shown = log.read_text(errors="replace").splitlines()
    print(*shown[-stage.lines :], sep="\n", flush=True)
    if code is None:
        return Outcome(TIMED_OUT, seconds, f"not done within {stage.limit:g} s", clocks)
    if code != 0:
        return Outcome(FAILED, seconds, _reason(code, shown), clocks)
    note = unexpected_skips(folder / f"{stage.name}.xml", found) if stage.keeps == "tests" else ""
    return Outcome(FAILED if note else PASSED, seconds, note, clocks)


def _run(stage: Stage, folder: Path, log: Path) -> tuple[int | None, Mapping[str, Mapping[str, float]]]:
    """The exit status, or None where the limit ended it; and what the GPU's clocks were meanwhile."""
    command = [word.replace("{folder}", str(folder)) for word in stage.command]
    looks = [gpu_clocks.look()]
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603  (the commands stand above)
            command, cwd=ROOT, env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = _awaited(process, stage.limit, lambda: looks.append(gpu_clocks.look()))
        finally:  # after an interrupt too: it has a session of its own and would go on
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, gpu_clocks.summary([*looks, gpu_clocks.look()])


def _awaited(process: subprocess.Popen[bytes], limit: float, look: Callable[[], object]) -> int | None:
    """The exit status, or None when the limit is over; looks every few seconds meanwhile."""
    end = time.monotonic() + limit
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, gpu_clocks.EVERY))
        look()
    return None


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


def chosen(known: Sequence[Stage], names: Sequence[str], part: str | None = None) -> list[Stage]:
    """The stages by name, or those of a part, or all; the first always, which says where all this is.

    Raises:
        SystemExit: There is no stage of that name.
    """
    unknown = set(names) - {stage.name for stage in known}
    if unknown:
        sys.exit(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in known)}")
    wanted = set(names) or {stage.name for stage in known if part in {None, stage.part}}
    return [stage for stage in known if stage is known[0] or stage.name in wanted]


def listed(known: Sequence[Stage]) -> list[str]:
    """A line for each stage: its limit, what it does, what it needs; and what all take together."""
    lines = [f"all: at most {LIMIT + limit_of(known):g} s, of which the preflight, on a cold disk, {LIMIT:g} s"]
    for part in PARTS:
        lines.append(f"--part {part}: at most {limit_of(chosen(known, (), part)):g} s")
        for stage in (stage for stage in known if stage.part == part):
            needs = f" (needs {', '.join(stage.needs)})" if stage.needs else ""
            lines.append(f"  {stage.name:10} {stage.limit:4g} s  {stage.about}{needs}")
    return lines


def limit_of(group: Sequence[Stage]) -> float:
    """Seconds that these take at most, the preflight before them not counted."""
    return sum(stage.limit for stage in group)


def announced(found: Preflight, wanted: Sequence[Stage]) -> list[str]:
    """What the machine lacks, what does not run for that, and what installs it."""
    lines = [f"preflight: {found.gpu}, {found.gpu_memory / GB:.1f} GiB"]
    for name, why in found.missing.items():
        absent = [stage.name for stage in wanted if name in stage.needs]
        effect = f"; not run: {', '.join(absent)}" if absent else ""
        lines.append(f"  missing: {name}: {why}{effect}")
    return [*lines, *([f"  install: {found.install}"] if found.install else [])]


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--list", action="store_true", help="name the stages and their limits, and end")
    made.add_argument("--stage", action="append", default=[], help="this one alone; may be given several times")
    made.add_argument("--part", choices=PARTS, help="the stages of this part alone")
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
    wanted = chosen(known, given.stage, given.part)
    print(*announced(found, wanted), sep="\n", flush=True)
    if found.refusal:
        print("gpu-check cannot run here:", *found.refusal, sep="\n  ", file=sys.stderr)
        return 2
    folder = given.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    kept = Results(folder, None if given.small else results, given.commit, found.missing)
    outcomes = {stage.name: _noted(stage, folder, found, kept) for stage in wanted}
    print(*figures(kept.whole["reports"]), sep="\n")
    for name, outcome in outcomes.items():
        notes = "; ".join(filter(None, (outcome.note, gpu_clocks.shown(outcome.clocks))))
        print(f"{name:10} {outcome.outcome:10} {outcome.seconds:7.1f} s  {notes}")
    print(f"written: {kept.whole['name']}.json in {folder}{'' if given.small else f' and in {results}'}")
    good = {PASSED} if given.stage else {PASSED, ABSENT}
    return 0 if all(outcome.outcome in good for outcome in outcomes.values()) else 1


def _noted(stage: Stage, folder: Path, found: Preflight, kept: Results) -> Outcome:
    """Run a stage, and write down what came of it, also where it is stopped half-way."""
    print(f"==== {stage.name}: {' '.join(stage.command)}", flush=True)
    for suffix in ("json", "xml"):
        (folder / f"{stage.name}.{suffix}").unlink(missing_ok=True)  # of an earlier run
    outcome = Outcome(STOPPED, 0)
    try:
        outcome = run_stage(stage, folder, found)
    finally:
        print(f"==== {stage.name}: {outcome.outcome}, {outcome.seconds} s {outcome.note}", flush=True)
        kept.take(stage.name, stage.keeps, vars(outcome))
    return outcome


def stopped(*_: object) -> None:
    """As Ctrl-C, for those who limit a command by a signal: the stage ends, and what it has found is kept."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stopped)
    sys.exit(main())
