"""Real processes killed and stopped in the middle of a step: everybody else hears of it, and who it was."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from transports import LARGE, SOON, Worker, contributions, on_all, outcomes, package_threads

from gradengine.errors import CallerError, DeadlineExceeded, PeerLost
from gradengine.exchange import GradientServer, LocalExchange, WorkerClient
from gradengine.exchange.coordinator import Stall
from gradengine.exchange.interface import buckets_of

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


@contextlib.contextmanager
def two_ranks_and_a_process(spans, **options):
    """Ranks 0 (hosting) and 2 as threads of this process, bound; rank 1 as a process that started some spans."""
    server = GradientServer(WORLD, bucket_bytes=1000, **options)
    address = "{}:{}".format(*server.address)
    exchanges = [LocalExchange(server.group, 0, on_close=server.close), WorkerClient(server.address, 2, WORLD)]
    data = contributions(LARGE, WORLD)
    workers = [Worker(exchange, LARGE, data[exchange.rank]) for exchange in exchanges]
    try:
        with process("worker", address, 1, spans) as running:
            on_all(Worker.bind, workers)
            says(running, "joined")
            says(running, "started")
            yield workers, running
    finally:
        for exchange in reversed(exchanges):
            exchange.close()


def sum_of_all(workers, spans, meanwhile):
    """What each worker's step ends with and how long after `meanwhile()`.

    That runs once the others wait for what rank 1 has not started: all that it did has come.
    """
    began, first = [], sum(bucket.span in LARGE.spans[:spans] for bucket in buckets_of(LARGE, 1000))

    def strike():
        coordinator = workers[0].exchange._group
        wanted = Stall(late=(1,), waiting=(0, 2), what=f"bucket {first} of step 0")
        with coordinator.lock:
            coordinator.changed.wait_for(lambda: coordinator.coordinator.stall() == wanted, SOON)
        began.append(time.monotonic())
        meanwhile()

    def step(worker):
        error = outcomes(Worker.sum, [worker])[0]
        return error, time.monotonic()

    thread = threading.Thread(target=strike)
    thread.start()
    results = on_all(step, workers)
    thread.join(SOON)
    return [(error, ended - began[0]) for error, ended in results]


def test_killed_worker_is_an_error_on_all_others_at_once():
    with two_ranks_and_a_process(spans=2) as (workers, running):
        results = sum_of_all(workers, 2, running.kill)
        for error, seconds in results:
            assert isinstance(error, PeerLost), error
            assert "rank 1" in str(error)
            assert seconds < SOON
        print(f"from kill to error: {max(seconds for _, seconds in results):.3f} s")
        assert workers[0].progress.summed > 0, "it was in the middle of a step"  # what rank 2 was sent may be lost
    assert not package_threads()


def test_stopped_worker_is_named_after_the_deadline():
    with two_ranks_and_a_process(spans=1, timeout=1.0) as (workers, running):
        results = sum_of_all(workers, 1, lambda: running.send_signal(signal.SIGSTOP))
        late = sum(bucket.span is LARGE.spans[0] for bucket in buckets_of(LARGE, 1000))  # all of the span it started
        for error, seconds in results:
            assert isinstance(error, DeadlineExceeded), error
            assert f"rank 1 is late for bucket {late} of step 0, ranks 0, 2 are waiting: got nothing for 1 s" in str(
                error
            )
            assert 0.5 < seconds < SOON


def test_dead_coordinator_is_an_error_on_all_workers_at_once():
    with process("coordinator", "127.0.0.1:0", 0, 2) as running:
        host, _, port = running.stdout.readline().strip().rpartition(":")
        exchanges = [WorkerClient((host, int(port)), rank, WORLD) for rank in (1, 2)]
        data = contributions(LARGE, WORLD)
        workers = [Worker(exchange, LARGE, data[exchange.rank]) for exchange in exchanges]
        on_all(Worker.bind, workers)
        landed = threading.Event()
        workers[1].take = lambda span, upto: landed.set()
        killed = []

        def kill():
            landed.wait(SOON)
            killed.append(time.monotonic())
            running.kill()

        threading.Thread(target=kill).start()
        for error in outcomes(Worker.sum, workers):
            assert isinstance(error, PeerLost), error
            assert f"coordinator {host}:{port}" in str(error)
        assert time.monotonic() - killed[0] < SOON
        for exchange in exchanges:
            exchange.close()
    assert not package_threads()


def test_stopped_coordinator_is_found_by_the_workers(monkeypatch):
    monkeypatch.setattr("gradengine.exchange.tcp._GRACE_SECONDS", 0.2)
    with process("coordinator", "127.0.0.1:0", 0, 1) as running:
        host, _, port = running.stdout.readline().strip().rpartition(":")
        exchanges = [WorkerClient((host, int(port)), rank, WORLD, timeout=1.0) for rank in (1, 2)]
        data = contributions(LARGE, WORLD)
        workers = [Worker(exchange, LARGE, data[exchange.rank]) for exchange in exchanges]
        on_all(Worker.bind, workers)
        says(running, "joined")
        running.send_signal(signal.SIGSTOP)
        for error in outcomes(Worker.sum, workers):
            assert isinstance(error, DeadlineExceeded), error
            assert "waits for the sums and the coordinator is silent" in str(error)
        for exchange in exchanges:
            exchange.close()
    assert not package_threads()


def test_unix_socket_of_a_killed_coordinator_is_taken_over(tmp_path):
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
