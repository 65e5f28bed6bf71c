"""Real processes killed and stopped in the middle of a step: everybody else hears of it, and who it was."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transports import LARGE, SOON, Worker, contributions, free_port, on_all, outcomes, rank_order_sum, shared

from gradengine.errors import CallerError, DeadlineExceeded, PeerLost
from gradengine.exchange import GradientServer, connect

pytestmark = [pytest.mark.timeout(150), pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")]
WORLD = 3
HERE = Path(__file__).parent


@contextlib.contextmanager
def process(role, address, rank, spans):
    """A rank as a process; killed in the end."""
    command = [sys.executable, str(HERE / "exchange_process.py"), role, address, str(rank), str(WORLD), str(spans)]
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def says(running, line):
    assert running.stdout.readline().strip() == line


def kill(running):
    running.kill()
    running.wait()


def stop(running):
    """Return once it stands still: the signal may arrive long after it was sent."""
    running.send_signal(signal.SIGSTOP)
    os.waitpid(running.pid, os.WUNTRACED)


def until(is_so):
    """Return once that is so, which comes by itself."""
    while not is_so():
        threading.Event().wait(0.001)  # within the test's own time


class Clock:
    """Stands still until a rank is stopped and is waited for; then minutes go by each time that it is looked at."""

    def __init__(self):
        self.now, self.has_stopped, self.exchange, self.late = 0.0, threading.Event(), None, None

    def __call__(self):
        if self.has_stopped.is_set():
            with contextlib.suppress(RuntimeError, AttributeError):  # another thread goes on with it at this moment
                awaited = self.exchange._all_reduce.awaited
                self.now += 10 * SOON if awaited is not None and awaited[0] == self.late else 0.0
        return self.now


@contextlib.contextmanager
def with_a_process(link, folder, spans):
    """The exchanges of ranks 0 and 1, over links or served, and a process that is rank 2, and starts some spans."""
    with contextlib.ExitStack() as stack:
        options = {"timeout": SOON, "join_timeout": SOON}
        if link == "worker":
            server = stack.enter_context(GradientServer(WORLD, bucket_bytes=1000))
            address = "{}:{}".format(*server.address)
            exchanges = [connect(server.url, rank, WORLD, served=True, **options) for rank in range(2)]
        else:
            address = f"tcp://127.0.0.1:{free_port()}" if link == "tcp" else f"unix://{folder}/s"
            exchanges = [connect(address, rank, WORLD, link=link, bucket_bytes=4, **options) for rank in range(2)]
        for exchange in exchanges:
            stack.callback(exchange.close)
        yield exchanges, stack.enter_context(process(link, address, 2, spans))


def failed_and_replaced(link, folder, fail, clock=None):
    """What ranks 0 and 1 are told where rank 2 fails in a step; then another process comes in its place."""
    parts = contributions(LARGE, WORLD)
    workers = [Worker(None, LARGE, shared(part) if link == "shared_memory" else part) for part in parts[:2]]

    def fail_in_the_middle():
        until(lambda: all(worker.exchange.holds_sums for worker in workers))
        fail(running)

    with with_a_process(link, folder, len(LARGE.spans) - 1) as (exchanges, running):
        if clock is not None:
            exchanges[0]._clock, clock.exchange = clock, exchanges[0]
        on_all(lambda rank: workers[rank].bind(exchanges[rank]), range(2))
        stopper = threading.Thread(target=fail_in_the_middle)
        stopper.start()
        found = outcomes(Worker.sum, workers)
        stopper.join(SOON)
    for worker, part in zip(workers, parts, strict=False):
        worker.begin(part, 0)
    with with_a_process(link, folder, len(LARGE.spans)) as (exchanges, running):
        on_all(lambda rank: workers[rank].bind(exchanges[rank]), range(2))
        on_all(Worker.sum, workers)
        on_all(lambda worker: worker.exchange.barrier(), workers)
        whole = rank_order_sum(parts)
        assert all(worker.arena.tobytes() == whole.tobytes() for worker in workers)
        for line in ("started", hashlib.sha256(whole).hexdigest()):
            says(running, line)
    return found


def killed_and_replaced(link, folder):
    """The row "kill" of docs/specs/faults.md."""
    found = failed_and_replaced(link, folder, kill)
    assert {*map(type, found)} == {PeerLost}, found
    # A rank that hears of it first leaves, and may be in the middle of a message, behind which it does not say why.
    assert any(str(fault).startswith("rank 2 is gone") for fault in found), found
    assert all(str(fault).startswith(("rank 2 is gone", "rank 0 is gone", "rank 1 is gone")) for fault in found), found
    return "replaced"


def test_a_rank_that_is_stopped_in_a_step_is_named_at_the_deadline_and_another_process_takes_its_place(tmp_path):
    clock = Clock()
    clock.late = 2

    found = failed_and_replaced("tcp", tmp_path, lambda running: (stop(running), clock.has_stopped.set()), clock)
    assert isinstance(found[0], DeadlineExceeded), found
    assert str(found[0]).startswith("rank 2 is late: rank 0 waits for "), found
    assert isinstance(found[1], PeerLost), found
    assert str(found[1]).startswith(("rank 2 is gone or late: rank 0 has closed its link", "rank 0 is gone")), found


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_server_is_an_error_on_all_workers(how):
    with process("server", "127.0.0.1:0", 0, 0) as running:
        host, _, port = running.stdout.readline().strip().rpartition(":")
        exchanges = [connect(f"tcp://{host}:{port}", rank, WORLD, served=True, timeout=SOON) for rank in range(WORLD)]
        clocks = [Clock() for _ in exchanges]
        for exchange, clock in zip(exchanges, clocks, strict=True):
            exchange._clock, clock.exchange, clock.late = clock, exchange, WORLD
        data = contributions(LARGE, WORLD)
        workers = [Worker(exchange, LARGE, data[exchange.rank]) for exchange in exchanges]
        on_all(Worker.bind, workers)
        for worker in workers:
            worker.exchange.start(LARGE.spans[0])
        kill(running) if how == "killed" else stop(running)
        for worker, clock in zip(workers, clocks, strict=True):
            worker.exchange.start(*LARGE.spans[1:])
            if how == "stopped":
                clock.has_stopped.set()
        kind, words = (PeerLost, "the server is gone") if how == "killed" else (DeadlineExceeded, "the server is late")
        for error in outcomes(lambda worker: worker.exchange.wait(), workers):
            assert isinstance(error, kind), error
            assert words in str(error)
        for exchange in exchanges:
            exchange.close()


def test_unix_socket_of_a_killed_server_is_taken_over(tmp_path):
    path = str(tmp_path / "s")
    code = f"from gradengine.exchange import GradientServer; GradientServer(1, {path!r}); print(flush=True); input()"
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as running:
        running.stdout.readline()
        with pytest.raises(CallerError, match=f"cannot listen at {path}"):
            GradientServer(1, path)
        running.kill()
    assert Path(path).is_socket()
    GradientServer(1, path).close()
