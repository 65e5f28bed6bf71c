"""A pool of worker processes for `bench` and `demo`, which starts and watches them, and ends them with this process.

Each worker receives its jobs over a pipe, and sends reports and each job's result over it. A process that ends closes
its pipe, so the pool notices its death without delay. After a deadline without a report the pool ends all workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias, final

from gradengine.errors import DeadlineExceeded, ExchangeError, GradientError, PeerLost

Job: TypeAlias = Callable[..., Any]  # picklable, called with report=, a function that reports from any thread

_DEADLINE_SECONDS = 120.0
# Time for the process at fault to report after other workers lost it. Rank 0 leaves the group within two seconds.
_ROOT_CAUSE_SECONDS = 5.0
_REPORT, _RESULT, _FAILURE = range(3)  # the kinds of messages of a worker


@final
class ProcessPool(contextlib.AbstractContextManager["ProcessPool"]):
    """Processes that live no longer than the `with` block.

    Args:
        deadline: Seconds without a report from any worker, after which `reports` and `results` raise.
        environment: Environment variables of the workers, set before they import NumPy.

    Example:
        >>> with ProcessPool() as pool:
        ...     list(pool.reports())
        []
    """

    def __init__(self, deadline: float = _DEADLINE_SECONDS, environment: Mapping[str, str] | None = None) -> None:
        self._deadline, self._environment = deadline, environment or {}
        self._pipes: dict[SpawnProcess, Connection[Any, Any]] = {}  # sorted by time of start
        self._at_work: set[SpawnProcess] = set()

    def start(self, name: str) -> SpawnProcess:
        """Start an interpreter, which then waits for its jobs."""
        context, before = multiprocessing.get_context("spawn"), dict(os.environ)
        here, there = context.Pipe()
        worker = context.Process(target=_serve, args=(there,), name=name, daemon=True)
        os.environ.update(self._environment)
        try:
            with interrupts_blocked():
                worker.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        there.close()  # this process's open copy would keep a dead worker's pipe from ending
        self._pipes[worker] = here
        return worker

    def give(self, worker: SpawnProcess, job: Job) -> None:
        """Send a worker a job. If the worker has died, `reports` and `results` raise the error."""
        self._at_work.add(worker)
        with contextlib.suppress(OSError):  # the reader of the pipe reports that it has ended
            self._pipes[worker].send(job)

    def reports(self) -> Iterator[Any]:
        """Iterate over the workers' reports, until all jobs are done.

        Raises:
            PeerLost: A worker died.
            DeadlineExceeded: No working process reported within the deadline.
            ExchangeError: A worker's job raised an error, which the message contains.
        """
        while self._at_work:
            for _, kind, report in self._messages():
                if kind == _REPORT:
                    yield report

    def results(self) -> list[Any]:
        """Return the result of each worker's job, in the order in which workers were started. Raises as `reports`."""
        results = dict[SpawnProcess, Any]()
        while self._at_work:
            results |= {worker: result for worker, kind, result in self._messages() if kind == _RESULT}
        return [results[worker] for worker in self._pipes if worker in results]

    def terminate(self) -> None:
        """Kill all workers."""
        for worker in self._pipes:
            worker.kill()
        for worker, pipe in self._pipes.items():
            worker.join()
            pipe.close()
        self._pipes.clear()
        self._at_work.clear()

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def _messages(self) -> Iterator[tuple[SpawnProcess, int, Any]]:
        """Wait for a message of a working process, and yield the messages that have arrived."""
        workers = {pipe: worker for worker, pipe in self._pipes.items() if worker in self._at_work}
        ready: list[Any] = wait(workers, self._deadline)
        if not ready:
            late = ", ".join(map(_named, workers.values()))
            do = "check whether the process is stopped or hangs, and run the command again"
            raise DeadlineExceeded(f"{late} reported nothing for {self._deadline:g} s", do=do)
        for pipe in ready:
            worker = workers[pipe]
            try:
                kind, what = pipe.recv()
            except (EOFError, OSError):
                raise _lost(worker) from None
            if kind != _REPORT:
                self._at_work.remove(worker)
            if kind == _FAILURE:
                raise self._root_cause(worker, *what)
            yield worker, kind, what

    def _root_cause(self, worker: SpawnProcess, reason: str, lost_peer: bool) -> ExchangeError:
        """Return the error of the worker at fault, which may not be the first worker that reported an error."""
        deadline = time.monotonic() + _ROOT_CAUSE_SECONDS
        while lost_peer and self._at_work:
            if not wait([self._pipes[each] for each in self._at_work], max(0.0, deadline - time.monotonic())):
                break
            try:
                list(self._messages())
            except ExchangeError as cause:
                return cause
        return ExchangeError(f"{worker.name}: {reason}")


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Return a context in which started processes ignore Ctrl-C, and this process receives it at the end.

    A terminal sends Ctrl-C to all its processes. Any thread of this process may receive the signal (NumPy's BLAS has
    some). Python then interrupts the main thread, even in the middle of the bytes sent to a new process. That process
    would then die with its own traceback.
    """
    resource_tracker.ensure_running()  # otherwise the first process would start it, which unblocks the signal
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


def _named(worker: SpawnProcess) -> str:
    return f"{worker.name} (process {worker.pid})"


def _lost(worker: SpawnProcess) -> PeerLost:
    worker.join()
    code = worker.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return PeerLost(f"{_named(worker)} {how}", do="the others have been stopped")


def _serve(connection: Connection[Any, Any]) -> None:
    """Run a worker process, which does each job that it receives until the other end of the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def send(kind: int, what: object) -> None:
        with lock:
            connection.send((kind, what))

    with contextlib.suppress(BrokenPipeError, EOFError):
        while True:
            job = connection.recv()
            try:
                send(_RESULT, job(report=partial(send, _REPORT)))
            except GradientError as failure:
                send(_FAILURE, (str(failure), isinstance(failure, PeerLost)))
            except BrokenPipeError:
                raise
            except Exception as fault:  # noqa: BLE001  (shown here, and reported)
                traceback.print_exc()
                send(_FAILURE, (f"{type(fault).__name__}: {fault}", False))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
