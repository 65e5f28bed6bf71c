"""All that wants a GPU, in stages: `make gpu-check`, or `make gpu-check ARGS=--list`; see docs/project/gpu-check.md.

Each stage is a process of its own with a limit of its own: one that fails, hangs or loses the device leaves the others'
figures. They run in the order of their worth until the time of `--minutes` is over; what is left then is named. Nothing
follows where every kernel's bits are not right. What a machine lacks is named, with what does not run for that and
the one line that installs it; nothing is installed here.

After each stage measured/results/gpu-<name>.json has what was found, and the folder of --out the same file and
logs.tar.gz; also what a stage that failed, or was stopped together with this program, had found until then. The command
fails if a stage does, if a test is skipped for another reason than what the preflight has named, and if a stage that
was asked for by name did not run.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree as ET

sys.path.insert(0, str(Path(__file__).parent))

import gpu_clocks
from gpu_preflight import LIMIT, TORCH, Preflight, preflight
from gpu_results import Results, figures

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "measured/results"

PASSED, FAILED, TIMED_OUT, ABSENT, STOPPED = "passed", "failed", "timed out", "absent", "stopped"
NOT_RUN = "not run"
GB = 1 << 30
GRACE = 10.0  # seconds that a stage has to write what it has found, from SIGINT to SIGKILL
LEAST = 10.0  # seconds, below which no stage begins
EVERY = 0.1  # seconds between two looks at the processes
LONGEST = 300  # characters of a note in the last table
FOUND = "{folder}/machine.json"
KERNELS = ("accumulate", "measure", "finalise", "hand_back")  # what their names begin with


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        name: Of the stage.
        about: What it does, in a line.
        command: Its words; "{folder}" in one stands for where it may write. What it writes to <folder>/<name>.json is
            kept.
        limit: Seconds.
        needs: What must be there, in the preflight's words; without it the stage is absent.
        tests: Whether it must leave a report of tests, <folder>/<name>.xml.
        lines: Of its output's end that are shown.
    """

    name: str
    about: str
    command: tuple[str, ...]
    limit: float
    needs: tuple[str, ...] = ()
    tests: bool = False
    lines: int = 25


Plan = list[list[Stage]]


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


def plan(found: Preflight, *, small: bool = False) -> Plan:
    """All stages, what is worth most first. Those of one group run beside each other, since none of them takes times.

    Args:
        found: What the machine has.
        small: Sizes at which everything runs quickly and no figure means anything.
    """

    def benchmark(name: str, about: str, limit: float, *words: str, **facts: object) -> Stage:
        sized = (*words, *(("--small",) if small else ()), "--json", f"{{folder}}/{name}.json")
        return Stage(name, about, python("measured/gpu_bench.py", *sized), limit, **facts)

    parts, odd = ("accumulate", "norm"), ("--odd", "--blocks", "6")
    hand_back, bf16 = ("hand-back", "hand-back-bf16"), ("--dtype", "bfloat16")
    return [
        [
            Stage(
                "kernels",
                "every kernel once, at odd sizes, against NumPy",
                python("measured/gpu_once.py", "--pool"),
                150,
            ),
            Stage("machine", "GPU and versions", python("measured/gpu_machine.py", FOUND), 150, lines=60),
        ],
        [benchmark("step", "the 350M model's step", 90, "step")],
        [benchmark("step-bf16", "the same of bf16 gradients", 90, "step", *bf16)],
        [settling(small=small), run_of_tests(found, small=small), sanitized("memcheck", "no access out of bounds")],
        [benchmark("parts", "the step's kernels, each by itself", 90, *parts, "finalise", "hand-back")],
        [benchmark("parts-bf16", "the same of bf16", 90, *parts, "clip", *bf16)],
        [measuring("loop", "a GPT's whole step by four loops", 60, small=small, needs=(TORCH,))],
        [benchmark("small", "small models; gradients that are None", 60, "step-few", "step-many", "half-none")],
        [benchmark("host", "the host's time for a call", 60, "host", "step-call")],
        [benchmark("more", "the rest of the kernels", 120, "window", "clip", "hand-back-bf16", "lora")],
        # From here on: what the first ten minutes do without.
        [measuring("counters", "what ncu counts in each kernel", 90, small=small)],
        [benchmark("fp32-odd", "sizes no multiple of 8, at odd addresses", 55, "step", *parts, *hand_back, *odd)],
        [benchmark("bf16-odd", "the same of bf16", 55, "step", *parts, *odd, *bf16)],
        [sanitized("racecheck", "no race in shared memory")],
        [benchmark("launches", "what a step asks of the device", 45, "launches", needs=(TORCH,))],
        [benchmark("compiled", "beside torch.compile", 180, "compiled", "--compile-limit", "70", needs=(TORCH,))],
    ]


def python(*words: str) -> tuple[str, ...]:
    """A command of this interpreter."""
    return (sys.executable, *words)


def measuring(name: str, about: str, limit: float, *, small: bool, needs: tuple[str, ...] = ()) -> Stage:
    """A script of its own, measured/gpu_<name>.py, that leaves reports as a benchmark does."""
    words = (f"measured/gpu_{name}.py", *(("--small",) if small else ()), "--json", f"{{folder}}/{name}.json")
    return Stage(name, about, python(*words), limit, needs)


def settling(*, small: bool) -> Stage:
    """The questions that only a device can answer."""
    words = (
        "measured/gpu_settle.py",
        "--jobs",
        "4",
        *(("--small",) if small else ()),
        "--json",
        "{folder}/settle.json",
    )
    return Stage("settle", "what only a device can answer, each in its process", python(*words), 150)


def sanitized(tool: str, about: str) -> Stage:
    """Our kernels under compute-sanitizer. Only their faults count: the driver's calls raise in Python."""
    options = ("--tool", tool, "--error-exitcode", "66", "--report-api-errors", "no", "--launch-timeout", "0")
    ours = (word for kernel in KERNELS for word in ("--kernel-regex", f"kns={kernel}"))
    command = ("compute-sanitizer", *options, *ours, *python("measured/gpu_once.py", "--few"))
    return Stage(tool, f"compute-sanitizer: {about}", command, 85, ("compute-sanitizer",))


def run_of_tests(found: Preflight, *, small: bool) -> Stage:
    """All that has a GPU under test; in as many processes as there is memory for, where pytest-xdist is there."""
    most = min(8, os.cpu_count() or 1, found.gpu_memory // (4 * GB))
    processes = 1 if found.lacks(["xdist"]) else max(1, most)
    several = ("-n", str(processes)) if processes > 1 else ()
    files = [f"tests/test_{name}.py" for name in ("interop", "examples", "clip")] if small else device_tests()
    # Warnings are errors where the versions are those of CI; here they are what the machine has.
    chosen_tests = ("-k", "cupy or runs_on_a_gpu", "--junitxml", "{folder}/tests.xml", "-o", "filterwarnings=default")
    command = python("-m", "pytest", *files, "-q", *chosen_tests, *several)
    needs, limit = ("pytest", "hypothesis", "ml_dtypes"), 120 + 480 / processes
    return Stage("tests", "all tests of the GPU", command, limit, needs, tests=True, lines=15)


def device_tests() -> list[str]:
    """The files with a test of a device, found by its fixtures' names.

    Collecting the others takes half a minute, and packages that a machine with a GPU need not have.
    """
    takes_a_device = re.compile(r"def test_\w+\([^)]*\b(backend|device)\b|test_it_runs_on_a_gpu|torch-cupy")
    found = (path for path in sorted(ROOT.glob("tests/test_*.py")) if takes_a_device.search(path.read_text()))
    return [str(path.relative_to(ROOT)) for path in found]


class Process:
    """A stage at work, in a session of its own: asked to end at its limit, and ended `GRACE` seconds later.

    Args:
        stage: What to run.
        folder: Where it may write, and where its log goes.
        limit: Seconds that there are for it.
        clocks: The GPU's.
    """

    def __init__(self, stage: Stage, folder: Path, limit: float, clocks: gpu_clocks.Clocks) -> None:
        self.stage, self._folder, self._clocks = stage, folder, clocks
        self._limit, self._began, self._mark = limit, time.monotonic(), clocks.mark()
        self._end, self._over = self._began + limit, ""
        command = [word.replace("{folder}", str(folder)) for word in stage.command]
        with self._log.open("w") as output:
            self._process = subprocess.Popen(  # noqa: S603  (the commands stand above)
                command, cwd=ROOT, env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def _log(self) -> Path:
        return self._folder / f"{self.stage.name}.log"

    def stop(self) -> None:
        """Do as if it were at its limit."""
        if not self._over:
            self._end = time.monotonic()
            self._interrupt(STOPPED)

    def has_ended(self) -> bool:
        """Look at it, which must be done often: this is what ends it."""
        if self._process.poll() is not None:
            self._signal(signal.SIGKILL)  # for what it has left behind
            return True
        late = time.monotonic() - self._end
        if late >= 0 and not self._over:
            self._interrupt(TIMED_OUT)
        if late >= GRACE:
            self._signal(signal.SIGKILL)
        return False

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _interrupt(self, why: str) -> None:
        self._over = why  # pytest writes its report then
        self._signal(signal.SIGINT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def outcome(self, found: Preflight) -> Outcome:
        """How it ended; the end of its output goes to the terminal."""
        seconds, clocks = round(time.monotonic() - self._began, 1), self._clocks.since(self._mark)
        shown, code = self._log.read_text(errors="replace").splitlines(), self._process.returncode
        print(*shown[-self.stage.lines :], sep="\n", flush=True)
        ended, notes = self._over or (PASSED if code == 0 else FAILED), []
        if ended == TIMED_OUT:
            notes = [f"not done within {self._limit:.4g} s", *failures(shown)]
        elif ended == FAILED:
            last = next((line for line in reversed(shown) if line.strip()), "")
            notes = [f"exit status {code}", *(failures(shown) or [last])]
        elif ended == PASSED and self.stage.tests:
            notes = [note for note in [unexpected_skips(self._folder / f"{self.stage.name}.xml", found)] if note]
            ended = FAILED if notes else PASSED
        return Outcome(ended, seconds, ": ".join(notes)[:1000], clocks)


def failures(shown: Sequence[str]) -> list[str]:
    """What failed, by a stage's output, in one text; nothing where it names nothing."""
    failed = [line for line in shown if line.startswith(("failed: ", "FAILED ", "ERROR "))]
    more = [f"and {len(failed) - 5} more"] if len(failed) > 5 else []
    return ["; ".join([*(line[:150] for line in failed[:5]), *more])] if failed else []


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "GRADENGINE_REQUIRE_GPU": "1",
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # else each of the tests' processes takes three quarters of the GPU
    }


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


def chosen(whole: Plan, names: Sequence[str]) -> Plan:
    """The stages of these names, or all; the first group always, which says where all this is.

    Raises:
        SystemExit: There is no stage of that name.
    """
    known = [stage.name for group in whole for stage in group]
    unknown = set(names) - set(known)
    if unknown:
        sys.exit(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    first, *rest = whole
    wanted = [[stage for stage in group if stage.name in names] for group in rest] if names else rest
    return [first, *filter(None, wanted)]


def listed(whole: Plan) -> list[str]:
    """A line for each stage: its limit, what it does, what it needs; and what all take together."""
    lines = [f"all: at most {LIMIT + limit_of(whole):g} s; + runs beside the one before"]
    for group in whole:
        for stage in group:
            needs, sign = f" (needs {', '.join(stage.needs)})" if stage.needs else "", " " if stage is group[0] else "+"
            lines.append(f"{sign} {stage.name:10} {stage.limit:4g} s  {stage.about}{needs}")
    return lines


def limit_of(whole: Plan) -> float:
    """Seconds that these take at most, waiting for frameworks not counted."""
    return sum(max(stage.limit for stage in group) for group in whole)


def announced(found: Preflight, wanted: Plan) -> list[str]:
    """What the machine lacks, what does not run for that, and what installs it."""
    lines = []
    for name, why in found.missing.items():
        absent = [stage.name for group in wanted for stage in group if name in stage.needs]
        effect = f"; not run: {', '.join(absent)}" if absent else ""
        lines.append(f"  missing: {name}: {why}{effect}")
    return [*lines, *([f"  install: {found.install}"] if found.install else [])]


@dataclass(frozen=True)
class Run:
    """What a run goes by.

    Attributes:
        folder: Where stages write.
        end: When it must be over.
        clocks: The GPU's.
        kept: What was found.
        stop: Whether somebody has told the program to stop.
        outcomes: How each stage ended.
    """

    folder: Path
    end: float
    clocks: gpu_clocks.Clocks
    kept: Results
    stop: threading.Event
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def whole(self, groups: Plan, found: Preflight) -> None:
        """Run these groups, one after the other, until the time is over."""
        for group in groups:
            left = self.end - time.monotonic() - GRACE
            if self.stop.is_set() or left < LEAST:
                self.leave_out([group], "the program was stopped" if self.stop.is_set() else "no time was left")
            else:
                self._together(group, left, found)

    def leave_out(self, groups: Plan, why: str) -> None:
        """Say of each stage of these groups why it did not run."""
        for stage in (stage for group in groups for stage in group):
            self.outcomes[stage.name] = Outcome(NOT_RUN, 0, why)

    def _together(self, group: Sequence[Stage], left: float, found: Preflight) -> None:
        processes: list[Process] = []
        try:
            for stage in group:
                if lacking := found.lacks(stage.needs):
                    self._take(stage, Outcome(ABSENT, 0, lacking))
                    continue
                print(f"==== {stage.name}: {' '.join(stage.command)}", flush=True)
                processes.append(Process(stage, self.folder, min(stage.limit, left), self.clocks))
            while processes:
                time.sleep(EVERY)
                for process in processes if self.stop.is_set() else ():
                    process.stop()
                for process in [process for process in processes if process.has_ended()]:
                    processes.remove(process)
                    self._take(process.stage, process.outcome(found))
        finally:
            for process in processes:
                process.kill()

    def _take(self, stage: Stage, outcome: Outcome) -> None:
        print(f"==== {stage.name}: {outcome.outcome}, {outcome.seconds} s {outcome.note}", flush=True)
        self.outcomes[stage.name] = outcome
        self.kept.take(stage.name, vars(outcome))


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """Tell of Ctrl-C, and of the signal of those who limit a command; the second one ends all at once."""
    event = threading.Event()

    def tell(*_: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--list", action="store_true", help="name the stages and their limits, and end")
    made.add_argument("--minutes", type=float, default=60.0, help="what says most, in this time; an hour by default")
    made.add_argument(
        "--only", type=lambda text: text.split(","), default=[], metavar="STAGES", help="such as step,tests"
    )
    made.add_argument("--small", action="store_true", help="sizes at which all runs quickly; figures go to --out alone")
    made.add_argument("--out", type=Path, default=ROOT / "out/gpu-check", help="logs, and a copy of the results")
    made.add_argument("--commit", help="what is measured, where the tree does not know")
    return made


def main(
    arguments: Sequence[str] | None = None,
    plan_of: Callable[..., Plan] = plan,
    results: Path = RESULTS,
    look: Callable[[], AbstractContextManager[tuple[Preflight, Callable[[float], Preflight]]]] = preflight,
) -> int:
    """Run the stages; 1 if one of them did not pass, 2 if nothing can run here."""
    began, given = time.monotonic(), parser().parse_args(arguments)
    if given.list:
        print(*listed(plan_of(Preflight({}))), sep="\n")
        return 0
    if given.commit is None and not (ROOT / ".git").exists():
        print(f"gpu-check: {ROOT} has no .git: say what is measured, by --commit SHA", file=sys.stderr)
        return 2
    chosen(plan_of(Preflight({})), given.only)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(told_to_stop())
        known, others = stack.enter_context(look())
        if known.refusal:
            print(*announced(known, []), sep="\n", flush=True)
            print("gpu-check cannot run here:", *known.refusal, sep="\n  ", file=sys.stderr)
            return 2
        folder, out = Path(stack.enter_context(tempfile.TemporaryDirectory())), given.out.absolute()
        out.mkdir(parents=True, exist_ok=True)
        kept = Results(folder, out, None if given.small else results, given.commit)
        clocks = stack.enter_context(contextlib.closing(gpu_clocks.Clocks(folder)))
        run = Run(folder, began + 60 * given.minutes, clocks, kept, stop)
        run_all(run, known, others, lambda found: chosen(plan_of(found, small=given.small), given.only))
    print(*figures(kept.whole["reports"]), *table(run.outcomes), sep="\n")
    print(f"written: {kept.whole['name']}.json and logs.tar.gz in {out}{'' if given.small else f'; in {results}'}")
    good = {PASSED} if given.only else {PASSED, ABSENT, NOT_RUN}
    return 0 if all(outcome.outcome in good for outcome in run.outcomes.values()) and not stop.is_set() else 1


def run_all(
    run: Run, known: Preflight, others: Callable[[float], Preflight], wanted: Callable[[Preflight], Plan]
) -> None:
    """Run the first group while frameworks are imported, and the others if all is well.

    Args:
        run: The run.
        known: What the machine has, as far as it is known at once.
        others: Waits for the rest, so many seconds at most.
        wanted: The stages on a machine that has this.
    """
    first, *rest = wanted(known)
    run.whole([first], known)
    bad = [stage.name for stage in first if run.outcomes[stage.name].outcome != PASSED]
    if bad:
        run.leave_out(rest, f"{' and '.join(bad)} did not pass")
        return
    found = replace(others(min(LIMIT, (run.end - time.monotonic()) / 3)), gpu_memory=run.kept.gpu_memory)
    run.kept.whole["missing"] = dict(found.missing)
    rest = wanted(found)[1:]
    print(*announced(found, rest), sep="\n", flush=True)
    run.whole(rest, found)


def table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """How each stage ended, in a line."""
    lines = []
    for name, outcome in outcomes.items():
        notes = "; ".join(filter(None, (outcome.note[:LONGEST], gpu_clocks.shown(outcome.clocks))))
        lines.append(f"{name:10} {outcome.outcome:10} {outcome.seconds:7.1f} s  {notes}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
