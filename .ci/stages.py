"""Run the stages of CI, or of the matrix, one after the other, and print a table of how they ended.

A stage that fails does not end the run. A test that fails is run once more by itself. One that passes then is FLAKY:
the run stays red, and the order of tests in which it failed is kept. The table has the command that runs a failed stage
again in that order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

OUT = Path("out/ci")
MOST_ALONE = 5  # of the tests that failed, so many are run again by themselves


@dataclass
class Stage:
    """A make target and how it ended."""

    name: str
    target: str
    variables: list[str] = field(default_factory=list)
    budget: int | None = None  # seconds on two quiet cores; a stage that takes longer is marked in the table
    seconds: float = 0.0
    code: int = 0
    lines: list[str] = field(default_factory=list)

    def command(self, *more: str) -> list[str]:
        """The stage's command; given later, a variable counts."""
        return ["make", *self.target.split(), *self.variables, *more]

    @property
    def records(self) -> Path:
        """The folder of what its tests recorded: their order, and which failed."""
        return OUT / self.name


DEMO = ["ARGS=--steps 40 --plot out/ci-demo-loss.png"]
CI = [
    Stage("environments", "-j2 environments", budget=40),
    Stage("check", "check", budget=50),
    Stage("docs", "docs", budget=25),
    Stage("demo", "demo", DEMO, budget=20),
    Stage("test", "test-interop", budget=220),
    Stage("device", "test-device", budget=90),
    Stage("compile", "compile-check", budget=75),
    Stage("package", "test-package", budget=40),
    Stage("lowest", "test-lowest", budget=40),
]
NEWEST = ["VENV=.venv-unpinned", "UNPINNED=1", "SELECT="]
MATRIX = [
    Stage("check", "check", NEWEST),
    Stage("docs", "docs", NEWEST),
    Stage("demo", "demo", [*NEWEST, *DEMO]),
    Stage("test", "test", NEWEST),
    Stage("compile", "compile-check", NEWEST),
    Stage("kernel-table", "kernel-table", NEWEST),
    Stage("package", "test-package", NEWEST),
    Stage("interop", "test-interop", NEWEST),
    Stage("wire-js", "test-wire-js", NEWEST),
    Stage("lowest", "test-lowest", NEWEST),
    Stage("newest", "test-newest", NEWEST),
    Stage("device", "test-device", NEWEST),
    Stage("device-lazy", "test-device", [*NEWEST, "CUDA=12", "ORDER=lazy"]),
    Stage("device-eager", "test-device", [*NEWEST, "ORDER=eager"]),
    Stage("device-own-streams", "test-device", [*NEWEST, "CUDA=12", "STREAM=own"]),
    Stage("mpi", "test-mpi", NEWEST),
    Stage("gpu-check-small", "gpu-check-small", NEWEST),
]


def main(arguments: list[str]) -> int:
    """Run the stages, or those of them that are named; 1 if one failed."""
    stages = MATRIX if arguments[:1] == ["matrix"] else CI
    wanted = arguments[1:] if stages is MATRIX else arguments
    unknown = set(wanted) - {stage.name for stage in stages}
    if unknown:
        print(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in stages)}")
        return 2
    stages = [stage for stage in stages if not wanted or stage.name in wanted]
    for stage in stages:
        run(stage)
    print(*table(stages), sep="\n", flush=True)
    return int(any(stage.code for stage in stages))


def run(stage: Stage) -> None:
    """Run a stage, and then each of its failed tests by itself."""
    load = os.getloadavg()[0]
    print(f"\n==== {stage.name}: {' '.join(stage.command())}   (load {load:.1f})", flush=True)
    began = time.monotonic()
    stage.code = started(stage.command(), stage.records)
    failed = lines_of(stage.records / "failed.txt") if stage.code else []
    stage.lines = [again(stage, *line.split(" ", 1)) for line in failed[:MOST_ALONE]]
    if len(failed) > MOST_ALONE:
        stage.lines.append(f"{len(failed) - MOST_ALONE} more: {stage.records / 'failed.txt'}")
    stage.seconds = time.monotonic() - began
    print(f"==== {stage.name}: {'FAILED' if stage.code else 'passed'} in {stage.seconds:.0f} s", flush=True)


def again(stage: Stage, worker: str, test: str) -> str:
    """Run a failed test by itself; what is to be said of it."""
    alone = stage.records / "alone.txt"
    alone.write_text(f"{test}\n")
    passes = started(stage.command(f"TESTS=@{alone}", "ARGS=-n 0"), stage.records / "alone") == 0
    order = stage.records / f"order-{worker}.txt"
    repeat = " ".join(map(quoted, stage.command(f"TESTS=@{order}", "ARGS=-n 0")))
    return f"{'FLAKY, passes alone' if passes else 'fails alone too'}: {test}\n    in the same order: {repeat}"


def started(command: list[str], records: Path) -> int:
    """The exit code of a command whose tests record into a folder of its own, which is emptied before."""
    records.mkdir(parents=True, exist_ok=True)
    for old in records.glob("*.txt"):
        if old.name != "alone.txt":
            old.unlink()
    variables = {**os.environ, "GRADENGINE_RECORD": str(records.absolute())}
    return subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=False).returncode


def table(stages: list[Stage]) -> list[str]:
    """A line for each stage, and what is to be done about those that failed."""
    width = max(len(stage.name) for stage in stages)
    rows = [f"{s.name:{width}}  {s.seconds:6.0f} s{beside(s)}  {'FAILED' if s.code else 'passed'}" for s in stages]
    total = f"{'all':{width}}  {sum(stage.seconds for stage in stages):6.0f} s"
    failed = [stage for stage in stages if stage.code]
    said = [
        line
        for stage in failed
        for line in (f"{stage.name} failed; again: {' '.join(map(quoted, stage.command()))}", *stage.lines)
    ]
    return ["", *rows, total, *said]


def beside(stage: Stage) -> str:
    """The stage's budget, and whether it took longer."""
    if stage.budget is None:
        return ""
    return f" of {stage.budget:3} s" + (", OVER" if stage.seconds > stage.budget else "      ")


def quoted(word: str) -> str:
    """A word for the shell."""
    return f"'{word}'" if set(word) & set(" @[]()'&;") else word


def lines_of(file: Path) -> list[str]:
    """The lines of a file; none of one that is not there."""
    return file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell has it
