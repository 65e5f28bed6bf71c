"""Bells, and properties that are computed once."""

import subprocess
import sys
import threading

from transports import SOON

from gradengine.threads import Bell


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


class TestBell:
    def test_a_ring_ends_one_wait_before_or_after_it_and_two_rings_are_one(self):
        bell, heard = Bell(), []
        bell.ring()
        bell.ring()
        assert [bell.wait(0), bell.wait(0), bell.wait(0.001)] == [True, False, False]
        waiter = threading.Thread(target=lambda: heard.append(bell.wait()))
        waiter.start()
        bell.ring()
        waiter.join(SOON)
        assert heard == [True]

    def test_a_wait_of_no_time_ends(self):
        """A queue's went on for ever where it looked at the clock a moment too late."""
        bell = Bell()
        for _ in range(2000):
            bell.ring()
            assert bell.wait(1e-9)
            assert not bell.wait(1e-9)
