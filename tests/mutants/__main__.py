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
from pathlib import Path

import pytest

from .faults import ROOT, Fault, faults, lived_at_first

PYTHONS = [ROOT / ".venv/bin/python", ROOT / ".venv-cuda13/bin/python"]  # the host, and CuPy over the stand-in driver
QUICKLY = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "--timeout=90")
LIMIT = 400  # seconds for the tests of one fault in one environment; a fault that makes them hang is found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults that are asked for; 1 if one lived that was found when the list was made."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults whose file or words contain one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project whose code and tests are tried")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, type=Path)
    parser.add_argument("--lived", type=Path, help="a file for the names of those that lived")
    given = parser.parse_args(arguments)
    chosen = [each for each in faults() if not given.words or any(word in each.name for word in given.words)]
    if not chosen:
        parser.error(f"no fault has any of these words: {' '.join(given.words)}")
    pythons = [python.absolute() for python in given.pythons]
    outcomes = tried(chosen, given.root, pythons, given.jobs)
    lived = sorted(fault.name for fault, found in outcomes.items() if not found)
    new = [name for name in lived if name not in lived_at_first()]
    print(*table(outcomes), sep="\n")
    print(*(f"LIVED, and was found before: {name}" for name in new), sep="\n")
    if given.lived:
        given.lived.write_text("".join(f"{name}\n" for name in lived), encoding="utf-8")
    return int(bool(new))


def tried(chosen: Sequence[Fault], root: Path, pythons: Sequence[Path], jobs: int) -> dict[Fault, bool]:
    """Whether each fault was found; a line for each as it ends."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(fault: Fault) -> bool:
        copy, began = copies.get(), time.monotonic()
        try:
            with fault.planted(copy):
                found = any(fails(fault, copy, python) for python in pythons)
        finally:
            copies.put(copy)
        print(f"{'found' if found else 'LIVED'} {time.monotonic() - began:5.0f} s  {fault.name}", flush=True)
        return found

    with tempfile.TemporaryDirectory(prefix="mut") as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            copies.put(copied(root, Path(folder) / str(number)))
        return dict(zip(chosen, pool.map(one, chosen), strict=True))


def copied(root: Path, copy: Path) -> Path:
    """A copy of the project without its environments and history."""
    return Path(
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "out", ".*_cache", "__pycache__"))
    )


def fails(fault: Fault, copy: Path, python: Path) -> bool:
    """Whether a test fails, or does not end, in an environment; one after the other, up to the first that fails."""
    files = [str(file) for name in fault.tests for file in sorted((copy / "tests").glob(name))]
    if not files:
        raise FileNotFoundError(f"{fault.name}: none of its test files is there: {', '.join(fault.tests)}")
    paths = os.pathsep.join(map(str, (copy, copy / "tests")))
    try:
        done = subprocess.run(
            [python, "-B", "-m", "pytest", *QUICKLY, *dict.fromkeys(files)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": paths, "REAL_CUPY_ORDER": "random", "CI": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    if done.returncode in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        return False
    if done.returncode < 0 or re.search(r"\b\d+ (failed|error)", done.stdout):  # a signal ended it, or a test failed
        return True
    raise RuntimeError(f"{fault.name}: its tests did not run:\n{done.stdout[-2000:]}")


def table(outcomes: dict[Fault, bool]) -> list[str]:
    """For each package, how many were found."""
    all_of, found = Counter(f.room for f in outcomes), Counter(f.room for f, is_found in outcomes.items() if is_found)
    rows = [f"{room:24} {found[room]:4} of {all_of[room]:4}" for room in sorted(all_of)]
    return [*rows, f"{'all':24} {sum(found.values()):4} of {len(outcomes):4} found"]


if __name__ == "__main__":
    sys.exit(main())
