"""A pytest plugin: which tests each process ran, in which order, which failed, and how long each took.

With GRADENGINE_RECORD=folder each process writes `order-NAME.txt` there, a line for each test before it runs, and the
process that reports writes `failed.txt`, a line of process and test for each that failed, and at the end `seconds.txt`,
the longest test first. `pytest -n 0 @order-gw1.txt` runs the tests of process gw1 again in the same order.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import pytest

RECORD = "GRADENGINE_RECORD"


def pytest_configure(config: pytest.Config) -> None:
    """Record if asked; a process of xdist takes the request from the environment, a test's own pytest finds none."""
    if RECORD not in os.environ:
        return
    folder, is_worker = Path(os.environ[RECORD]), hasattr(config, "workerinput")
    runs_tests = is_worker or not config.getoption("numprocesses", None)
    if runs_tests:
        del os.environ[RECORD]
        name = config.workerinput["workerid"] if is_worker else "main"
        config.pluginmanager.register(Order((folder / f"order-{name}.txt").open("w", encoding="utf-8", buffering=1)))
    if not is_worker:
        config.pluginmanager.register(Outcomes(folder))


class Order:
    """Writes each test before it runs."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """One line."""
        self.file.write(f"{nodeid}\n")


class Outcomes:
    """Writes each test, or file, that failed, and the process that ran it; and the seconds of all tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed = (folder / "failed.txt").open("w", encoding="utf-8", buffering=1)
        self.seen: set[str] = set()
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One line of a failure, though a test may fail in its body and after it."""
        self.seconds[report.nodeid] += getattr(report, "duration", 0.0)
        if report.failed and report.nodeid not in self.seen:
            self.seen.add(report.nodeid)
            node = getattr(report, "node", None)
            self.failed.write(f"{node.gateway.id if node else 'main'} {report.nodeid}\n")

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self) -> None:
        """The longest test first."""
        lines = (f"{seconds:8.2f} {name}\n" for name, seconds in self.seconds.most_common())
        (self.folder / "seconds.txt").write_text("".join(lines), encoding="utf-8")
