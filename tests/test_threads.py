"""Threads that wait for each other while Ctrl-C comes: whatever line it comes at, nothing stays locked or unheard."""

import _thread
import subprocess
import sys
import threading
import time

import pytest
from interrupts import interrupted_at, places_of
from transports import SOON

from gradengine.threads import Condition, Threads, start_thread


def ends(call):
    """Whether another thread comes to the end of a call."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SOON)
    return not thread.is_alive()


class TestCondition:
    def waiting(self):
        """A condition, what waits for the list's second item, the list and the thread that fills it."""
        condition, items = Condition(), []

        def fill():
            for item in range(2):
                time.sleep(0.002)
                with condition.lock:
                    items.append(item)
                    condition.notify_all()

        thread = threading.Thread(target=fill)
        thread.start()
        return condition, lambda: condition.wait_for(lambda: len(items) == 2), thread

    def test_who_waits_hears_what_was_done(self):
        _, wait, thread = self.waiting()
        assert wait()
        thread.join()

    def test_a_wait_that_was_interrupted_at_any_line_can_be_done_again_and_the_lock_is_free(self):
        _, wait, thread = self.waiting()
        places = places_of(wait)
        thread.join()
        for at in places:
            condition, wait, thread = self.waiting()
            interrupted_at(at, wait)
            assert ends(wait), at
            thread.join()
            assert ends(condition.notify_all), at

    def test_a_lock_that_two_interrupts_at_once_left_to_a_thread_is_let_go_by_it_and_by_no_other(self):
        condition = Condition()
        for _ in range(2):
            condition.lock.acquire()
        assert ends(condition.let_go)
        assert not condition.lock.release()
        condition.let_go()
        condition.let_go()
        assert ends(condition.notify_all)

    def test_who_was_not_woken_looks_by_himself(self, monkeypatch):
        condition, is_done = Condition(), []
        monkeypatch.setattr(condition, "notify_all", lambda: None)
        thread = threading.Thread(target=lambda: condition.wait_for(lambda: bool(is_done)))
        thread.start()
        time.sleep(0.01)
        is_done.append(True)
        thread.join(SOON)
        assert not thread.is_alive()

    def test_it_waits_no_longer_than_it_is_told(self):
        started = time.monotonic()
        assert not Condition().wait_for(lambda: False, 0.02)
        assert 0.02 <= time.monotonic() - started < SOON


class TestThreads:
    def test_are_waited_for_until_they_have_ended_and_no_longer_than_told(self):
        threads, gate = Threads(), threading.Semaphore(0)
        threads.spawn("gradengine-test", gate.acquire)
        threads.join(0.01)
        assert "gradengine-test" in {thread.name for thread in threading.enumerate()}
        gate.release()
        threads.join(SOON)
        assert "gradengine-test" not in {thread.name for thread in threading.enumerate()}

    def test_one_that_was_waited_for_and_interrupted_is_waited_for_again(self):
        """`threading.Thread.join` takes it for ended then, before Python 3.13."""

        def new():
            threads, gate = Threads(), threading.Semaphore(0)
            threads.spawn("gradengine-test", lambda: gate.acquire(timeout=0.01))
            return threads, gate

        places = places_of(lambda: new()[0].join(SOON))
        for at in places:
            threads, ended = Threads(), []

            def work(ended=ended):
                time.sleep(0.01)
                ended.append(True)

            threads.spawn("gradengine-test", work)
            interrupted_at(at, lambda threads=threads: threads.join(SOON))
            threads.join(SOON)
            assert ended, at

    def test_one_that_its_own_work_ends_waits_for_the_others_alone(self):
        threads, waited = Threads(), []
        threads.spawn("gradengine-test", lambda: waited.append(threads.join(SOON)))
        threads.join(SOON)
        assert waited

    def test_a_start_interrupted_at_any_line_leaves_a_thread_that_works_or_none(self):
        def spawn():
            worked = threading.Semaphore(0)
            threads = Threads()
            threads.spawn("gradengine-test", worked.release)
            return threads

        for at in places_of(spawn):
            interrupted_at(at, spawn)
            deadline = time.monotonic() + SOON
            while "gradengine-test" in {thread.name for thread in threading.enumerate()}:
                assert time.monotonic() < deadline, at

    def test_where_the_process_may_have_no_more_it_says_so_and_nobody_is_waited_for(self, monkeypatch):
        def none(*_):
            raise RuntimeError("can't start new thread")

        threads, started = Threads(), time.monotonic()
        monkeypatch.setattr(_thread, "start_new_thread", none)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.spawn("gradengine-test", none)
        threads.join(SOON)
        assert time.monotonic() - started < SOON

    def test_the_last_one_that_there_may_be_does_the_work(self, monkeypatch):
        def none(thread):
            raise RuntimeError("can't start new thread")

        done = threading.Semaphore(0)
        monkeypatch.setattr(threading.Thread, "start", none)
        start_thread(threading.Thread(target=done.release))
        assert done.acquire(timeout=SOON)


def test_a_child_forked_while_a_property_is_computed_computes_its_own():
    """functools' cached_property has one lock for all objects before Python 3.12, and the child would find it held."""
    script = """
import os, sys, threading
from gradengine.threads import cached_property

class Slow:
    began, may_end = threading.Event(), threading.Event()

    @cached_property
    def value(self):
        if threading.current_thread() is not threading.main_thread():
            self.began.set()
            self.may_end.wait()
        return object()

slow = Slow()
thread = threading.Thread(target=lambda: slow.value)
thread.start()
Slow.began.wait()
child = os.fork()
if not child:
    other = Slow()
    os._exit(3 if other.value is other.value else 4)
status = os.waitpid(child, 0)[1]
Slow.may_end.set()
thread.join()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=SOON, check=False)
    assert done.returncode == 3
