"""A pool of worker processes, for `bench` and `demo`: started, watched, and ended with this process.

Each worker gets its job over a pipe and reports over it. A process that ends closes its pipe, so its death is noticed
at once. All are ended after a deadline without a report.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, TypeAlias, final

from gradengine.errors import DeadlineExceeded, ExchangeError, GradientError, PeerLost

if TYPE_CHECKING:
    from typing_extensions import Self

Job: TypeAlias = Callable[..., None]  # picklable; called with report=, a `Reporter`

_DEADLINE_SECONDS = 120.0
_JOIN_SECONDS = 2.0  # for a process that was told to end
_ROOT_CAUSE_SECONDS = 5.0  # for the process at fault to report, after others lost it: rank 0 leaves them within two


@final
@dataclass(eq=False)
class Worker:
    """A process of a pool, with the name that errors use for it."""

    name: str
    process: SpawnProcess
    connection: Connection[Any, Any]
    is_at_work: bool = False

    def __str__(self) -> str:
        return f"{self.name} (process {self.process.pid})"


@final
class Reporter:
    """A worker's end of the pipe: call it to report, from any thread; iterate over it for what `give` sends."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, report: object) -> None:
        """Report."""
        with self._lock:
            self._connection.send(report)

    def __iter__(self) -> Iterator[Any]:
        with contextlib.suppress(EOFError):
            while True:
                yield self._connection.recv()


class ProcessPool:
    """Processes that live no longer than the `with` block.

    Args:
        deadline: Seconds without a report from any worker, after which `reports` and `answers` raise.
        environment: Environment variables of the workers, set before they import NumPy.

    Example:
        >>> with ProcessPool() as pool:
        ...     list(pool.reports())
        []
    """

    def __init__(self, deadline: float = _DEADLINE_SECONDS, environment: Mapping[str, str] | None = None) -> None:
        self._deadline, self._environment = deadline, environment or {}
        self._running: list[Worker] = []  # in the order of start

    def start(self, name: str) -> Worker:
        """Start an interpreter, which then waits for its job."""
        context, before = multiprocessing.get_context("spawn"), dict(os.environ)
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there,), name=name, daemon=True)
        os.environ.update(self._environment)
        try:
            with interrupts_blocked():
                process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        there.close()  # this process's copy: with it a dead worker's pipe would not end
        self._running.append(Worker(name, process, here))
        return self._running[-1]

    def give(self, worker: Worker, job: Job | str) -> None:
        """Send a worker its job; if it has died, `reports` and `answers` raise that."""
        worker.is_at_work = True
        with contextlib.suppress(OSError):  # its pipe has ended, which is read where its reports are
            worker.connection.send(job)

    def reports(self) -> Iterator[Any]:
        """Iterate over the workers' reports, until all have ended.

        Raises:
            PeerLost: A worker died.
            DeadlineExceeded: The workers at work reported nothing for too long.
            ExchangeError: A worker gave up; the error has its reason.
        """
        while self._running:
            for _, report in self._next_reports(self._running):
                yield report

    def answers(self) -> list[Any]:
        """Return one report of each worker, in the order in which they were started; raises as `reports`."""
        workers, answers = [*self._running], dict[Worker, Any]()
        while missing := [worker for worker in workers if worker not in answers]:
            answers.update(self._next_reports(missing))
            if ended := [worker for worker in missing if worker not in self._running and worker not in answers]:
                raise PeerLost(f"{ended[0]} ended without a report")
        return [answers[worker] for worker in workers]

    def close(self) -> None:
        """Let the workers end by themselves, as no more jobs are sent, and kill those that do not."""
        for worker in self._running:
            worker.connection.close()
        for worker in self._running:
            worker.process.join(self._deadline)
        self.terminate()

    def terminate(self) -> None:
        """End all workers at once."""
        for worker in self._running:
            worker.process.terminate()
        for worker in self._running:
            worker.process.join(_JOIN_SECONDS)
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._running.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def _next_reports(self, workers: Sequence[Worker]) -> Iterator[tuple[Worker, Any]]:
        """Wait for these workers, and yield the reports that have arrived; one that has ended is no longer running."""
        ready = wait([worker.connection for worker in workers], self._deadline)
        if not ready:
            late = ", ".join(str(worker) for worker in workers if worker.is_at_work)
            do = "a process that is stopped or hangs; the others have been ended too, run the command again"
            raise DeadlineExceeded(f"{late} reported nothing for {self._deadline:g} s", do=do)
        for worker in [worker for worker in workers if worker.connection in ready]:
            try:
                report = worker.connection.recv()
            except (EOFError, OSError):
                self._running.remove(worker)
                worker.connection.close()
                worker.process.join()
                if code := worker.process.exitcode:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    raise PeerLost(f"{worker} {how}", do="the others have been stopped") from None
                continue
            if isinstance(report, GradientError):
                raise self._root_cause(worker, report)
            yield worker, report

    def _root_cause(self, worker: Worker, failed: GradientError) -> ExchangeError:
        """Return the error to raise when a worker gave up: that of the worker at fault, not of the first to notice."""
        worker.is_at_work, deadline = False, time.monotonic() + _ROOT_CAUSE_SECONDS
        while isinstance(failed, PeerLost) and (others := [each for each in self._running if each.is_at_work]):
            if not wait([each.connection for each in others], max(0.0, deadline - time.monotonic())):
                break
            try:
                list(self._next_reports(others))
            except ExchangeError as cause:
                return cause
        worker.process.join(_JOIN_SECONDS)  # it may still be printing what a bug report needs
        return ExchangeError(f"{worker.name}: {failed}")


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A context in which started processes ignore Ctrl-C, which goes to a whole terminal; this one sees it at the end.

    Any thread of this process may receive the signal (NumPy's BLAS has some), and Python then interrupts the main
    thread, even in the middle of the bytes sent to a new process, which would then die with a traceback of its own.
    """
    resource_tracker.ensure_running()  # with the first process it would be started, and that unblocks the signal
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def _serve(connection: Connection[Any, Any]) -> None:
    """Run a worker process: take the job, do it, report."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = Reporter(connection)
    try:
        connection.recv()(report=report)
    except (BrokenPipeError, EOFError):
        sys.exit(1)  # the parent has gone: there is nobody to report to
    except GradientError as failure:
        # If this worker lost another one, that one is at fault, and may still report the cause.
        report(PeerLost(str(failure)) if isinstance(failure, PeerLost) else GradientError(str(failure)))
        sys.exit(1)
    except Exception as fault:
        report(GradientError(f"{type(fault).__name__}: {fault}"))
        raise


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
