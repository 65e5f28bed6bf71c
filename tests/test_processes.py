"""The pool of worker processes: who dies, fails or hangs is named, and none is left."""

import itertools
import os
import signal
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import wait

import pytest

from gradengine.console import processes
from gradengine.console.processes import ProcessPool, interrupts_blocked
from gradengine.errors import CallerError, DeadlineExceeded, ExchangeError, PeerLost

PATIENCE = 100.0  # seconds in which an interpreter starts, however busy the machine is
DEADLINE = 0.5  # seconds without a report, once it has started


def test_no_interrupt_comes_while_a_process_is_started_whichever_thread_is_given_the_signal():
    released, waited = threading.Event(), []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored

    def start():
        with interrupts_blocked():
            os.kill(os.getpid(), signal.SIGINT)
            waited.extend(time.sleep(0.005) for _ in range(20))

    other = threading.Thread(target=released.wait)  # as one of BLAS: nothing is blocked in it
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert len(waited) == 20
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    finally:
        released.set()
        other.join()
        signal.signal(signal.SIGINT, before)


def announce_and_wait(report):
    report(os.getpid())
    threading.Event().wait()


def miss_a_peer(report):
    raise PeerLost("somebody is gone")


def report_and_stop(report):
    report(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def report_often(report):
    for number in range(6):
        report(number)


def give_up(report):
    time.sleep(0.2)
    raise CallerError("this cannot be", got=1, expected=2)


def break_down(report):
    raise ZeroDivisionError("a fault of the program")


def end_at_once(report):
    sys.exit(3)


def twice(number, report):
    return os.environ["OMP_NUM_THREADS"], 2 * number


def ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pool_of(pool, **works):
    for name, work in works.items():
        pool.give(pool.start(name), work)


def test_a_killed_process_is_named_and_none_is_left():
    begin = time.monotonic()
    with ProcessPool() as pool:
        pool_of(pool, first=announce_and_wait, second=announce_and_wait)
        reports = pool.reports()
        pids = [next(reports), next(reports)]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(PeerLost, match=rf"(first|second) \(process {pids[1]}\) was killed by SIGKILL"):
            next(reports)
    assert all(ended(pid) for pid in pids)
    assert time.monotonic() - begin < PATIENCE


@pytest.mark.parametrize(
    ("works", "kind", "says"),
    [
        ({"noticing": miss_a_peer, "failing": give_up}, ExchangeError, "failing: this cannot be: got 1, expected 2"),
        ({"only": miss_a_peer}, ExchangeError, "only: somebody is gone"),
        ({"broken": break_down}, ExchangeError, "broken: ZeroDivisionError: a fault of the program"),
        ({"gone": end_at_once}, PeerLost, r"gone \(process \d+\) ended with exit code 3"),
    ],
    ids=["who is at fault and not who noticed", "the first who missed a peer", "a fault of the program", "an exit"],
)
def test_who_failed_is_named(works, kind, says, capfd):
    with ProcessPool(PATIENCE) as pool:
        pool_of(pool, **works)
        with pytest.raises(kind, match=says):
            list(pool.reports())
    assert ("Traceback" in capfd.readouterr().err) is ("broken" in works)


def test_a_process_that_is_stopped_is_named_when_the_deadline_passes():
    with ProcessPool(PATIENCE) as pool:
        worker, waiting = pool.start("sleeper"), pool.start("waiting")
        pool.give(worker, report_and_stop)
        reports = pool.reports()
        assert next(reports) == worker.pid
        pool._deadline, begin = DEADLINE, time.monotonic()
        with pytest.raises(DeadlineExceeded, match=rf"^sleeper \(process \d+\) reported nothing for {DEADLINE:g} s; "):
            list(reports)
        assert time.monotonic() - begin < PATIENCE / 2
    assert ended(worker.pid)
    assert ended(waiting.pid)


def test_processes_that_report_are_given_all_the_time_they_need(monkeypatch):
    """The deadline begins anew with each report."""
    waits = []
    monkeypatch.setattr(processes, "wait", lambda pipes, seconds: waits.append(seconds) or wait(pipes, seconds))
    with ProcessPool(PATIENCE) as pool:
        pool.give(pool.start("slow"), report_often)
        seen = [(report, len(waits)) for report in pool.reports()]
    assert [report for report, _ in seen] == list(range(6))
    assert all(later[1] > earlier[1] for earlier, later in itertools.pairwise(seen))
    assert set(waits) == {PATIENCE}


def test_a_worker_does_jobs_until_the_pool_ends_it(monkeypatch):
    """In an environment of its own; that of this process stays as it was."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with ProcessPool(PATIENCE, environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}) as pool:
        workers = [pool.start(name) for name in ("first", "second")]
        assert os.environ["OMP_NUM_THREADS"] == "7"
        assert "OPENBLAS_NUM_THREADS" not in os.environ
        for begin in (1, 3):
            for number, worker in enumerate(workers, begin):
                pool.give(worker, partial(twice, number))
            assert pool.results() == [("1", 2 * begin), ("1", 2 * begin + 2)]
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2
