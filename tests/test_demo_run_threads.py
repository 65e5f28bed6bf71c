"""Threads for one purpose: who is at fault is raised, and none keeps the others."""

import queue
import threading
import time

import pytest
from transports import SOON

from gradengine.demo import shards as module
from gradengine.demo.shards import ActivationAllReduce, run_threads
from gradengine.errors import CallerError, DeadlineExceeded, PeerLost
from gradengine.exchange import local_group


def fail(error, after=0.0):
    time.sleep(after)
    raise error


def test_results_come_in_the_order_of_the_works():
    assert run_threads([lambda s=s: (time.sleep(s), s)[1] for s in (0.1, 0.0, 0.05)]) == [0.1, 0.0, 0.05]


def test_nothing_to_do_is_done():
    assert run_threads([]) == []


def test_each_work_has_a_thread_and_a_single_one_has_this():
    meeting = threading.Barrier(3)
    assert sorted(run_threads([lambda: meeting.wait(10)] * 3)) == [0, 1, 2]
    assert run_threads([threading.get_ident]) == [threading.get_ident()]
    assert threading.get_ident() not in run_threads([threading.get_ident] * 2)


@pytest.mark.parametrize("lost_first", [True, False])
def test_who_is_at_fault_is_raised_and_not_who_missed_it(lost_first):
    at_fault, missed = (0.1, 0.0) if lost_first else (0.0, 0.1)
    works = [lambda: fail(PeerLost("gone"), missed), lambda: fail(CallerError("mistaken"), at_fault), lambda: 1]
    with pytest.raises(CallerError, match="mistaken"):
        run_threads(works)


def test_where_all_miss_a_peer_the_first_to_say_so_is_raised():
    first = queue.Queue()

    def fails_first():
        first.put(threading.current_thread())
        raise PeerLost("first")

    def fails_second():
        first.get().join()
        raise PeerLost("second")

    with pytest.raises(PeerLost, match="first"):
        run_threads([fails_second, fails_first])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), DeadlineExceeded("late"), ZeroDivisionError()])
def test_every_kind_of_failure_comes_through(error):
    with pytest.raises(type(error)):
        run_threads([lambda: fail(error), lambda: 1])


def test_a_thread_that_never_ends_is_left_behind(monkeypatch):
    monkeypatch.setattr(module, "_ROOT_CAUSE_SECONDS", 0.2)
    ended = threading.Event()
    begin = time.monotonic()
    with pytest.raises(CallerError):
        run_threads([lambda: ended.wait(60), lambda: fail(CallerError("mistaken"))])
    assert time.monotonic() - begin < SOON
    ended.set()


def test_no_failure_is_no_hurry(monkeypatch):
    monkeypatch.setattr(module, "_ROOT_CAUSE_SECONDS", 0.0)
    assert run_threads([lambda: time.sleep(0.3), lambda: 2]) == [None, 2]


def test_a_failed_rank_ends_what_the_others_wait_for():
    def work(exchange):
        with exchange:
            if exchange.rank == 2:
                raise ZeroDivisionError("of rank 2")
            ActivationAllReduce(exchange, max_size=4)

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="of rank 2"):
        run_threads([lambda e=e: work(e) for e in local_group(3)])
    assert time.monotonic() - begin < SOON
