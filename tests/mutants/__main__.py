"""Plant each fault in a copy of the project, run its tests on the host and on CuPy, and print which faults lived."""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from .faults import ROOT, Fault, faults, known_to_live

QUICKLY = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "--timeout=90")
LIMIT = 400  # seconds for the tests of one fault in one environment; a fault that makes them hang is found
CHANGES_TESTS = re.compile("PYTEST|PYTHON|GRADENGINE|REAL_CUPY|CUDA_EMULATOR")  # how the names of such variables begin
FOUND, LIVED, NOT_RUN = "found", "LIVED", "NOT RUN"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults that are asked for; 1 if one lived that was found before, or if tests fail without a fault."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults whose file or words contain one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project whose code and tests are tried")
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], type=Path, help="of each environment")
    given = parser.parse_args(arguments)
    chosen = [each for each in faults() if not given.words or any(word in each.name for word in given.words)]
    if not chosen:
        parser.error(f"no fault of faults.toml has any of these words: {' '.join(given.words)}")
    pythons = [python.absolute() for python in given.pythons]
    control = [nothing(chosen[0], name) for name in sorted({name for fault in chosen for name in fault.tests})]
    print("First the tests without a fault:", flush=True)
    if set(tried(control, given.root, pythons, given.jobs).values()) != {LIVED}:
        print("A test file above fails, or runs no test, without a fault. Mend that first.")
        return 1
    outcomes = tried(chosen, given.root, pythons, given.jobs)
    known = known_to_live()
    new = [fault.name for fault, outcome in outcomes.items() if outcome != FOUND and fault.name not in known]
    seen = [fault.name for fault, outcome in outcomes.items() if outcome == FOUND and fault.name in known]
    print(*table(outcomes), sep="\n")
    print(*(f"LIVED, and was found before: {name}" for name in new), sep="\n")
    print(*(f"found now, take it out of lived.txt: {name}" for name in seen), sep="\n")
    return int(bool(new))


def nothing(fault: Fault, name: str) -> Fault:
    """A change that is none, and the test files of that name, which have to pass with it."""
    return replace(fault, now=fault.was, tests=(name,), why=f"no fault, {name}")


def tried(chosen: Sequence[Fault], root: Path, pythons: Sequence[Path], jobs: int) -> dict[Fault, str]:
    """How each fault ended; a line for each as it ends."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(fault: Fault) -> str:
        copy, began = copies.get(), time.monotonic()
        try:
            with fault.planted(copy):
                outcome, why = run(fault, copy, pythons)
        finally:
            copies.put(copy)
        print(f"{outcome:7} {time.monotonic() - began:5.0f} s  {fault.name}{why and f'  by {why}'}", flush=True)
        return outcome

    with tempfile.TemporaryDirectory(prefix="mut") as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            copies.put(copied(root, Path(folder) / str(number)))
        return dict(zip(chosen, pool.map(one, chosen), strict=True))


def copied(root: Path, copy: Path) -> Path:
    """A copy of the project without its environments, history and caches."""
    left = shutil.ignore_patterns(".venv*", ".git", "out", ".*_cache", ".hypothesis", "__pycache__")
    return Path(shutil.copytree(root, copy, ignore=left))


def run(fault: Fault, copy: Path, pythons: Sequence[Path]) -> tuple[str, str]:
    """Run the tests of a fault, in one environment after the other, until one fails; the outcome, and that test."""
    outcome = NOT_RUN
    for python in pythons:
        code, said = tests_of(fault, copy, python)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        if failed or code is None or code < 0:
            return FOUND, failed[1] if failed else f"tests that ended with {code}"
        if code not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
            return NOT_RUN, said[-2000:]
        if re.search(r"\b\d+ passed", said):
            outcome = LIVED
    return outcome, ""


def tests_of(fault: Fault, copy: Path, python: Path) -> tuple[int | None, str]:
    """The exit code of a fault's tests and what they print; no code if they do not end."""
    files = [str(file) for name in fault.tests for file in sorted((copy / "tests").glob(name))]
    try:
        done = subprocess.run(
            [python, "-m", "pytest", *QUICKLY, *(dict.fromkeys(files) or ["none"])],
            cwd=copy,
            env=environment(copy),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def environment(copy: Path) -> dict[str, str]:
    """The variables of a run that imports the copy's code and tests, and writes no bytecode."""
    kept = {name: value for name, value in os.environ.items() if not CHANGES_TESTS.match(name)}
    paths = os.pathsep.join(map(str, (copy, copy / "tests")))
    return {**kept, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "REAL_CUPY_ORDER": "random", "CI": "true"}


def table(outcomes: dict[Fault, str]) -> list[str]:
    """For each package, how many were found."""
    all_of = Counter(fault.room for fault in outcomes)
    found = Counter(fault.room for fault, outcome in outcomes.items() if outcome == FOUND)
    rows = [f"{room:24} {found[room]:4} of {all_of[room]:4}" for room in sorted(all_of)]
    return [*rows, f"{'all':24} {sum(found.values()):4} of {len(outcomes):4} found"]


if __name__ == "__main__":
    sys.exit(main())
