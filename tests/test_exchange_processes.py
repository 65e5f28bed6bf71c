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
from test_exchange_served import Served
from transports import (
    HAS_SHARED_MEMORY,
    LARGE,
    SOON,
    Worker,
    contributions,
    free_port,
    on_all,
    outcomes,
    package_threads,
    rank_order_sum,
    shared,
)

from gradengine.errors import CallerError, DeadlineExceeded, ExchangeError, PeerLost
from gradengine.exchange import GradientServer, WorkerClient, connect

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


class Clock:
    """Goes on by minutes each time that it is looked at, once that is so."""

    def __init__(self, is_so):
        self.now, self.is_so = 0.0, is_so

    def __call__(self):
        self.now += 10 * SOON if self.is_so() else 0.0
        return self.now


@contextlib.contextmanager
def two_ranks_and_a_process(spans, is_late=lambda server: False):
    """Ranks 0 and 2 as threads of this process, bound, and a server; rank 1 as a process that started some spans."""
    made = []
    made.append(server := Served(WORLD, bucket_bytes=1000, clock=Clock(lambda: bool(made) and is_late(*made))))
    address = "{}:{}".format(*server.listener.address)
    exchanges = [WorkerClient(server.listener.address, rank, WORLD) for rank in (0, 2)]
    data = contributions(LARGE, WORLD)
    workers = [Worker(exchange, LARGE, data[exchange.rank]) for exchange in exchanges]
    try:
        with process("worker", address, 1, spans) as running:
            on_all(Worker.bind, workers)
            says(running, "started")
            yield workers, running
    finally:
        for exchange in exchanges:
            exchange.close()
        server.end()
        server.listener.close()


def wait_for_sums(workers):
    """Return once these ranks have all sums of what all three have started."""
    for worker in workers:
        for span in LARGE.spans:
            worker.exchange.start(span)
    started = LARGE.spans[0]
    total = rank_order_sum(contributions(LARGE, WORLD))[started.start : started.stop].tobytes()
    for worker in workers:
        while worker.arena[started.start : started.stop].tobytes() != total:
            threading.Event().wait(0.01)  # within the test's own time


def test_killed_worker_is_an_error_on_all_others_at_once():
    with two_ranks_and_a_process(spans=2) as (workers, running):
        wait_for_sums(workers)
        running.kill()
        for error in outcomes(lambda worker: worker.exchange.wait(), workers):
            assert isinstance(error, PeerLost), error
            assert "rank 1 is gone or late: the server has closed its link for that" in str(error)
    assert not package_threads()


def test_stopped_worker_is_named_after_the_deadline():
    has_stopped = threading.Event()

    def is_late(server):
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):  # the server goes on just now
            return has_stopped.is_set() and server.hub._all_reduce.awaited[0] == 1
        return False

    with two_ranks_and_a_process(2, is_late) as (workers, running):
        running.send_signal(signal.SIGSTOP)
        has_stopped.set()
        for worker in workers:
            for span in LARGE.spans:
                worker.exchange.start(span)
        for error in outcomes(lambda worker: worker.exchange.wait(), workers):
            assert isinstance(error, PeerLost), error
            assert "rank 1 is gone or late: the server has closed its link for that" in str(error)


def waits_for(exchange, rank):
    """Whether a rank waits for that one, or for the server, whose number is the world size."""
    with contextlib.suppress(RuntimeError, AttributeError):  # another thread goes on with it at this moment
        awaited = exchange._all_reduce.awaited
        return awaited is not None and awaited[0] == rank
    return False


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_lost_server_is_an_error_on_all_workers(how):
    has_stopped = threading.Event()
    with process("server", "127.0.0.1:0", 0, 0) as running:
        host, _, port = running.stdout.readline().strip().rpartition(":")
        exchanges = [WorkerClient((host, int(port)), rank, WORLD, timeout=SOON) for rank in range(WORLD)]
        for exchange in exchanges:
            exchange._clock = Clock(lambda exchange=exchange: has_stopped.is_set() and waits_for(exchange, WORLD))
        data = contributions(LARGE, WORLD)
        workers = [Worker(exchange, LARGE, data[exchange.rank]) for exchange in exchanges]
        on_all(Worker.bind, workers)
        for worker in workers:
            worker.exchange.start(LARGE.spans[0])
        running.kill() if how == "killed" else running.send_signal(signal.SIGSTOP)
        for worker in workers:
            for span in LARGE.spans[1:]:
                worker.exchange.start(span)
        if how == "stopped":
            has_stopped.set()
        for error in outcomes(lambda worker: worker.exchange.wait(), workers):
            kind, says = (PeerLost, "the server is gone") if how == "killed" else (ExchangeError, "the server is late")
            assert isinstance(error, kind), error
            assert says in str(error)
        for exchange in exchanges:
            exchange.close()
    assert not package_threads()


# ---- ranks without a server ----

LINKS = ["tcp", "unix", *(["shared_memory"] if HAS_SHARED_MEMORY else [])]


def address_for(link, folder):
    """What a process is told; the same for all ranks."""
    return f"tcp://127.0.0.1:{free_port()}" if link == "tcp" else f"unix://{folder}/s"


def until(is_so):
    """Return once that is so, which comes by itself."""
    while not is_so():
        threading.Event().wait(0.001)  # within the test's own time


def join(workers, link, address, clocks):
    """Bind ranks 0 and 1 with the process that is rank 2."""

    def joined(rank):
        exchange = connect(address, rank, WORLD, link=link, bucket_bytes=4, timeout=SOON, join_timeout=SOON)
        exchange._clock = clocks[rank]
        workers[rank].bind(exchange)

    on_all(joined, range(2))


def refuse_unnamed(found, how):
    """Both ranks are told that it is rank 2 that others have waited for."""
    if how == "killed":
        assert {*map(type, found)} == {PeerLost}, found
        assert all(str(fault).startswith("rank 2 is gone") for fault in found), found
    else:
        assert isinstance(found[0], DeadlineExceeded), found
        assert str(found[0]).startswith("rank 2 is late: rank 0 waits for "), found
        assert str(found[1]).startswith("rank 2 is gone or late: rank 0 has closed its link for that"), found


# One that is killed over shared memory, and that nothing is left of it: tests/test_exchange_links_shared_memory.py.
@pytest.mark.parametrize(
    ("link", "how"), [("tcp", "killed"), ("unix", "killed"), *((link, "stopped") for link in LINKS)]
)
def test_a_rank_that_does_not_go_on_in_a_step_is_named_and_another_process_takes_its_place(link, how, tmp_path):
    parts, has_stopped = contributions(LARGE, WORLD), threading.Event()
    workers = [Worker(None, LARGE, shared(part) if link == "shared_memory" else part) for part in parts[:2]]
    clocks = Clock(lambda: has_stopped.is_set() and waits_for(workers[0].exchange, 2)), lambda: 0.0

    def stop():
        until(lambda: all(worker.exchange._all_reduce.may_hold_sums for worker in workers))
        running.kill() if how == "killed" else running.send_signal(signal.SIGSTOP)
        has_stopped.set()

    with process(link, address := address_for(link, tmp_path), 2, len(LARGE.spans) - 1) as running:
        join(workers, link, address, clocks)
        stopper = threading.Thread(target=stop)
        stopper.start()
        found = outcomes(Worker.sum, workers)
        stopper.join(SOON)
    refuse_unnamed(found, how)
    for worker, part in zip(workers, parts, strict=False):
        worker.exchange.close()
        worker.progress.restart()
        worker.arena[:] = part
    with process(link, address := address_for(link, tmp_path), 2, len(LARGE.spans)) as running:
        join(workers, link, address, [lambda: 0.0] * 2)
        on_all(lambda worker: worker.sum() or worker.exchange.barrier(), workers)
        whole = rank_order_sum(parts)
        assert [worker.arena.tobytes() == whole.tobytes() for worker in workers] == [True] * 2
        for line in ("started", hashlib.sha256(whole).hexdigest()):
            says(running, line)
    for worker in workers:
        worker.exchange.close()


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
