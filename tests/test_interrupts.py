"""Ctrl-C at any line of any call, and at random times: what is left is right, or it says that it is not."""

import random
import threading
import time

import numpy as np
import pytest
from interrupts import interrupted_at, places_of, signalled

from gradengine.kernels import CHUNK, Fold
from gradengine.kernels.host import HostKernels

ONE = (np.float32(1),)


class TestHelpers:
    """The host's helper threads: when a call has ended, however it did, they write nothing of its any more."""

    def setup_method(self):
        self.kernels = HostKernels(3)
        self.targets = [self.kernels.allocate(CHUNK) for _ in range(24)]
        source = self.kernels.view(np.ones(CHUNK, np.float32), "w")
        self.folds = [Fold(i, True, (source,), ONE) for i in range(24)]

    def accumulate(self):
        self.kernels.accumulate(self.targets, self.folds)

    def assert_nobody_writes(self):
        for target in self.targets:
            target.data[:] = 7
        time.sleep(0.002)
        assert all((target.data == 7).all() for target in self.targets)
        self.accumulate()
        assert all((target.data == 1).all() for target in self.targets)

    def test_a_call_interrupted_at_any_line(self):
        for at in places_of(self.accumulate):
            interrupted_at(at, self.accumulate)
            self.assert_nobody_writes()

    @pytest.mark.parametrize("times", [1, 3])
    def test_a_call_interrupted_at_any_time(self, times):
        started = time.perf_counter()
        self.accumulate()
        lasts, seeds, interrupts = time.perf_counter() - started, random.Random(times), 0
        for _ in range(200):
            try:
                with signalled(seeds.uniform(0, lasts), "accumulate", times):
                    self.accumulate()
            except KeyboardInterrupt:
                interrupts += 1
                self.assert_nobody_writes()
            if interrupts == 25:
                break
        assert interrupts > 0

    def test_a_helper_that_begins_when_all_is_over_finds_nothing_to_do(self):
        """It may have been held up by another engine's work; the caller does not wait for it."""
        gate, entered = threading.Event(), threading.Semaphore(0)

        def hold(task):
            entered.release()
            assert gate.wait(10)

        busy = threading.Thread(target=self.kernels._run, args=(hold, range(3), 1 << 30))
        busy.start()
        for _ in range(3):
            assert entered.acquire(timeout=10)
        self.accumulate()
        assert all((target.data == 1).all() for target in self.targets)
        for target in self.targets:
            target.data[:] = 7
        gate.set()
        busy.join(10)
        time.sleep(0.002)
        assert all((target.data == 7).all() for target in self.targets)
