"""Bells."""

import threading

from transports import SOON

from gradengine.threads import Bell


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
