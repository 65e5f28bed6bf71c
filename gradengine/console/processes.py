"""A pool of worker processes, for `bench`, `plan` and `demo`: started, watched, and ended with this process.

Each worker gets its job over a pipe and reports over it. A process that ends closes its pipe, so its death is noticed
at once. A worker that is stopped or hangs is killed after a deadline without a report.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeAlias, final

from gradengine.errors import DeadlineExceeded, ExchangeError, GradientError, PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from typing_extensions import Self

__all__ = ["Job", "ProcessPool", "Reporter", "Worker", "interrupts_blocked"]

Job: TypeAlias = "Callable[..., None]"  # picklable; called with report=, a `Reporter`

_DEADLINE_SECONDS = 120.0
_JOIN_SECONDS = 2.0  # for a process that was told to end
_ROOT_CAUSE_SECONDS = 5.0  # for the process at fault to report, after others lost it: rank 0 leaves them within two


@dataclass(frozen=True)
class _Failed:
    """The last report of a worker that gives up."""

    message: str
    lost_peer: bool  # another worker is at fault, and may still report the cause


@final
@dataclass(eq=False)
class Worker:
    """A process of a pool, with the name that errors use for it."""

    name: str
    process: SpawnProcess
    connection: Connection[Any, Any]
    failure: _Failed | None = None
    is_at_work: bool = False
    is_late: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether the worker is late, gave up, or died."""
        return self.is_late or self.failure is not None or (self.connection.closed and self.process.exitcode != 0)

    @property
    def has_lost_peer(self) -> bool:
        """Whether the worker gave up because it lost another one."""
        return self.failure is not None and self.failure.lost_peer

    @property
    def exit_message(self) -> str:
        """How the worker ended, for an error."""
        if self.failure is not None:
            return f"{self.name}: {self.failure.message}"
        code, who = self.process.exitcode, f"{self.name} (process {self.process.pid})"
        if code is not None and code < 0:
            return f"{who} was killed by {signal.Signals(-code).name}"
        return f"{who} ended without a report, exit code {code}"

    def kill(self) -> None:
        """Kill the worker because it is late; this closes its pipe too."""
        self.is_late = True
        self.process.kill()


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
        deadline: Seconds without a report from any worker, after which those at work are killed.
        environment: Environment variables of the workers, set before they import NumPy.

    Example:
        >>> with ProcessPool() as pool:
        ...     list(pool.reports())
        []
    """

    def __init__(self, deadline: float = _DEADLINE_SECONDS, environment: Mapping[str, str] | None = None) -> None:
        self._deadline, self._environment = deadline, dict(environment or {})
        self._running: dict[Any, Worker] = {}  # by connection, in the order of start

    def start(self, name: str) -> Worker:
        """Start an interpreter, which then waits for its job."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there,), name=name, daemon=True)
        with _environment(self._environment), interrupts_blocked():
            process.start()
        there.close()  # this process's copy: with it a dead worker's pipe would not end
        self._running[here] = Worker(name, process, here)
        return self._running[here]

    def give(self, worker: Worker, job: Job | str) -> None:
        """Send a worker its job; if it has died or does not take the job, `reports` and `answers` raise that."""
        worker.is_at_work = True
        _set_timeout(worker.connection, self._deadline)
        try:
            worker.connection.send(job)
        except BlockingIOError:
            worker.kill()
        except OSError:
            pass  # its pipe has ended, which is read where its reports are

    def reports(self) -> Iterator[Any]:
        """Iterate over the workers' reports, until all have ended.

        Raises:
            PeerLost: A worker died.
            DeadlineExceeded: The workers at work reported nothing for too long.
            ExchangeError: A worker gave up; the error has its reason.
        """
        while self._running:
            for _, report in self._next_reports(list(self._running.values()), may_end=True):
                yield report

    def answers(self) -> list[Any]:
        """One report of each worker, in the order in which they were started; raises as `reports`."""
        workers, answers = list(self._running.values()), dict[Worker, Any]()
        while missing := [worker for worker in workers if worker not in answers]:
            answers.update(self._next_reports(missing, may_end=False))
        return [answers[worker] for worker in workers]

    def close(self) -> None:
        """Let the workers end by themselves, as no more jobs are sent, and kill those that do not."""
        for worker in self._running.values():
            worker.connection.close()
        for worker in self._running.values():
            worker.process.join(self._deadline)
        self.terminate()

    def terminate(self) -> None:
        """End all workers at once."""
        for worker in self._running.values():
            worker.process.terminate()
        for worker in self._running.values():
            worker.process.join(_JOIN_SECONDS)
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._running.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def _next_reports(self, workers: Sequence[Worker], *, may_end: bool) -> Iterator[tuple[Worker, Any]]:
        """Wait for these workers, and yield the reports that have arrived."""
        ready = wait([worker.connection for worker in workers], self._deadline)
        if not ready:
            for worker in workers:
                if worker.is_at_work:
                    worker.kill()
        for connection in ready:
            worker = self._running[connection]
            report = self._receive(worker)
            if worker.has_failed:
                raise self._root_cause(worker)
            if not worker.connection.closed:
                yield worker, report
            elif not may_end:
                raise PeerLost(worker.exit_message)

    def _receive(self, worker: Worker) -> Any:
        """A worker's next report; None if there is no further one."""
        _set_timeout(worker.connection, self._deadline)
        report = None
        try:
            report = worker.connection.recv()
        except BlockingIOError:
            worker.kill()
        except (EOFError, OSError):
            del self._running[worker.connection]
            worker.connection.close()
            worker.process.join()
        if isinstance(report, _Failed):
            worker.failure = report
        return report

    def _root_cause(self, first: Worker) -> ExchangeError:
        """The error to raise when a worker failed: that of the worker at fault, not of the first that noticed."""
        if first.is_late:
            late = dict.fromkeys([first, *(worker for worker in self._running.values() if worker.is_late)])
            names = ", ".join(f"{worker.name} (process {worker.process.pid})" for worker in late)
            do = "a process that is stopped or hangs; the others have been ended too, run the command again"
            return DeadlineExceeded(f"{names} reported nothing for {self._deadline:g} s", do=do)
        culprit, deadline = first, time.monotonic() + _ROOT_CAUSE_SECONDS
        while culprit.has_lost_peer and (others := [c for c, worker in self._running.items() if worker.is_at_work]):
            ready = wait(others, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for worker in [self._running[connection] for connection in ready]:
                self._receive(worker)
                if worker.has_failed and not worker.has_lost_peer:
                    culprit = worker
        culprit.process.join(_JOIN_SECONDS)  # it may still be printing what a bug report needs
        if culprit.failure is None:
            return PeerLost(culprit.exit_message, do="the others have been stopped")
        return ExchangeError(culprit.exit_message)


def _set_timeout(connection: Connection[Any, Any], seconds: float) -> None:
    """Set a timeout of the pipe's reads and writes, which then raise BlockingIOError; a pipe is a pair of sockets."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A context in which started processes get these environment variables."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A context in which started processes ignore Ctrl-C, which goes to a whole terminal; this one sees it at the end.

    Any thread of this process may receive the signal (NumPy's BLAS has some), and Python then interrupts the main
    thread, even in the middle of the bytes sent to a new process, which would then die with a traceback of its own.
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
    """Run a worker process: take the job, do it, report."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = Reporter(connection)
    try:
        job: Job = connection.recv()
        job(report=report)
    except (BrokenPipeError, EOFError):
        sys.exit(1)  # the parent has gone: there is nobody to report to
    except GradientError as failure:
        report(_Failed(str(failure), isinstance(failure, PeerLost)))
        sys.exit(1)
    except Exception as fault:
        report(_Failed(f"{type(fault).__name__}: {fault}", lost_peer=False))
        raise


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
