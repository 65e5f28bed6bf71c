"""Fresh interpreters for the demo's jobs: started, watched, and gone when this one goes.

Each gets its work over a pipe and reports over it. The end of a pipe is the end of its process, so a death is noticed
at once and none is waited for in vain. One that is stopped has no end: after a deadline without a report it is killed,
and then it has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeAlias, final

from gradengine.demo.reports import Failed
from gradengine.errors import DeadlineExceeded, ExchangeError, GradientError, PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from typing_extensions import Self

    from gradengine.demo.reports import Report

__all__ = ["Crew", "Member", "interrupts_blocked"]

Work: TypeAlias = "Callable[..., None]"  # picklable; called with report=

_DEADLINE_SECONDS = 120.0  # reports come every second or so, also from work that takes long

_PARTING_SECONDS = 2.0  # given to a process that was told to end
_CONFESSION_SECONDS = 5.0  # given to who is at fault, after others missed it: rank 0 parts from them in up to two, and
# its threads wait for each other's word

_ENVIRONMENT = {
    # One BLAS thread each: workers share the cores, and a product's bits may depend on how it is divided.
    **{f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "BLIS")},
    "VECLIB_MAXIMUM_THREADS": "1",
    # glibc otherwise returns each large array's pages to the system, and faults them in again.
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
}


@final
@dataclass
class Member:
    """A process of a crew, by the name that errors call it."""

    name: str
    process: SpawnProcess
    connection: Connection[Any, Any]
    deadline: float = _DEADLINE_SECONDS
    failure: Failed | None = None
    at_work: bool = False
    is_late: bool = False

    def give(self, work: Work) -> None:
        """Send the process its work; if it has died or does not take it, `Crew.reports` will say so."""
        self.at_work = True
        with contextlib.suppress(OSError), _ending_late([self], self.deadline):
            self.connection.send(work)

    def end_late(self) -> None:
        """Kill it, as it is stopped or hangs; whoever waits for it finds the end of its pipe."""
        self.is_late = True
        self.process.kill()

    @property
    def has_lost_peer(self) -> bool:
        """Whether it gave up because another was gone."""
        return self.failure is not None and self.failure.lost_peer

    @property
    def epitaph(self) -> str:
        """How it ended, for an error."""
        if self.failure is not None:
            return f"{self.name}: {self.failure.message}"
        code, who = self.process.exitcode, f"{self.name} (process {self.process.pid})"
        if code is not None and code < 0:
            return f"{who} was killed by {signal.Signals(-code).name}"
        return f"{who} ended without a word, exit code {code}"


@final
class Crew:
    """Processes that live no longer than the `with` block.

    Args:
        deadline: Seconds without a report, of any of them, after which those at work are killed.

    Example:
        >>> with Crew() as crew:
        ...     list(crew.reports())
        []
    """

    def __init__(self, deadline: float = _DEADLINE_SECONDS) -> None:
        self._deadline = deadline
        self._running: dict[Connection[Any, Any], Member] = {}

    def start(self, name: str) -> Member:
        """Start an interpreter, which then waits for its work."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there,), name=name, daemon=True)
        with _environment(), interrupts_blocked():
            process.start()
        there.close()
        member = Member(name, process, here, self._deadline)
        self._running[here] = member
        return member

    def reports(self) -> Iterator[Report]:
        """What the processes report, until all have ended.

        Raises:
            PeerLost: One of them died.
            DeadlineExceeded: Those at work reported nothing for too long.
            ExchangeError: One of them gave up, for the reason it gave.
        """
        while self._running:
            at_work = [member for member in self._running.values() if member.at_work]
            with _ending_late(at_work, self._deadline):
                ready = wait(list(self._running))
            for connection in ready:
                report, failed = self._next_report(self._running[connection])  # type: ignore[index]
                if failed:
                    raise self._collapse(failed)
                if report is not None:
                    yield report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        members = list(self._running.values())
        for member in members:
            member.process.terminate()
        for member in members:
            member.process.join(_PARTING_SECONDS)
            member.process.kill()
            member.process.join()
            member.connection.close()

    def _next_report(self, member: Member) -> tuple[Report | None, Member | None]:
        """A member's next report, or the member itself where it failed or died."""
        try:
            with _ending_late([member], self._deadline):
                report: Report = member.connection.recv()
        except (EOFError, OSError):
            return None, self._bury(member)
        if isinstance(report, Failed):
            member.failure = report
            return None, member
        return report, None

    def _bury(self, member: Member) -> Member | None:
        """A process is over; return it if it should not be."""
        del self._running[member.connection]
        member.connection.close()
        member.process.join()
        return member if member.process.exitcode else None

    def _collapse(self, first: Member) -> ExchangeError:
        """The error for a crew of which one failed: who is at fault, not who noticed."""
        if first.is_late:
            return self._too_late(first)
        culprit = first
        deadline = time.monotonic() + _CONFESSION_SECONDS
        while culprit.has_lost_peer and (others := [c for c, member in self._running.items() if member.at_work]):
            ready = wait(others, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                _, failed = self._next_report(self._running[connection])  # type: ignore[index]
                if failed is not None and not failed.has_lost_peer:
                    culprit = failed
        culprit.process.join(_PARTING_SECONDS)  # it may still be printing what a bug report needs
        kind = PeerLost if culprit.failure is None else ExchangeError
        return kind(culprit.epitaph, do="the others have been stopped" if culprit.failure is None else None)

    def _too_late(self, first: Member) -> DeadlineExceeded:
        late = [first, *(member for member in self._running.values() if member.is_late)]
        names = ", ".join(f"{member.name} (process {member.process.pid})" for member in late)
        do = "it was stopped or hangs: the others have been ended too, run the demo again"
        return DeadlineExceeded(f"{names} reported nothing for {self._deadline:g} s", do=do)


@contextlib.contextmanager
def _ending_late(members: Sequence[Member], deadline: float) -> Iterator[None]:
    """Kill the members if the block takes longer than the deadline: a pipe's own calls cannot be given one."""

    def end_all() -> None:
        for member in members:
            member.end_late()

    timer = threading.Timer(deadline, end_all)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What processes started here find in their environment: it is read before NumPy, so it cannot be set later."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes started here never see Ctrl-C, which reaches a whole terminal: this one does, once they are started.

    Any thread of this process may be given the signal (NumPy's BLAS has some), and Python then interrupts the main one,
    blocked or not: between the bytes that a new process is sent, which would die of it with a traceback of its own.
    """
    resource_tracker.ensure_running()  # with the first process it would be started, and that unblocks the signal
    came: list[int] = []
    is_interruptible = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_interruptible else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_interruptible:
            signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def _serve(connection: Connection[Any, Any]) -> None:
    """The life of a process of the crew: take the work, do it, report."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = _Reporter(connection)
    try:
        work: Work = connection.recv()
        work(report=report)
    except (BrokenPipeError, EOFError):
        sys.exit(1)  # nobody is there to tell
    except GradientError as failure:
        report(Failed(str(failure), isinstance(failure, PeerLost)))
        sys.exit(1)
    except Exception as fault:
        report(Failed(f"{type(fault).__name__}: {fault}", lost_peer=False))
        raise


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@final
class _Reporter:
    """Sends reports; several threads may."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, report: Report) -> None:
        with self._lock:
            self._connection.send(report)
