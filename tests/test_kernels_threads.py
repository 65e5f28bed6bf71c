"""Threads that share the host's work: as many as it is worth, no fault lost, and no caller disturbed by another."""

import itertools
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from backends import host_backend
from kernel_calls import everything
from transports import SOON

from gradengine.errors import CallerError
from gradengine.kernels import CHUNK, Arena, Contribution, FoldPass, host, host_threads
from gradengine.kernels.host import HostKernels
from gradengine.kernels.host_threads import shared_by_threads


class TestHelpers:
    """They are for chunks that are large enough, whatever lies beside them, and as many as the elements are for."""

    @staticmethod
    def helpers(monkeypatch, sizes, work):
        used = []

        def shared(do, tasks, helpers, threads):
            used.append(helpers)
            shared_by_threads(do, tasks, helpers, threads)

        monkeypatch.setattr(host, "shared_by_threads", shared)
        kernels = HostKernels(16)
        memory = kernels.device.allocate(sum(sizes))
        memory.data.fill(1)  # zeros are looked at once more
        edges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        work(kernels, kernels.arena([memory.part(*edge) for edge in edges], memory))
        return used[0] if used else 0

    SIZES = (
        ([4 * CHUNK + 1] * 2, 3),  # a last chunk that is small
        ([4 * CHUNK] * 2 + [64] * 2000, 3),
        ([CHUNK] * 24, 11),
        ([10_000] * 218, 0),
        ([CHUNK], 0),
    )

    @pytest.mark.parametrize(("sizes", "expected"), SIZES)
    def test_of_a_fold_and_of_a_measurement(self, monkeypatch, sizes, expected):
        def fold(kernels, arena):
            sources = [kernels.device.view(np.ones(size, np.float32), "w") for size in sizes]
            contribution = Contribution.of(arena.whole, sources)
            kernels.accumulate(arena, FoldPass(arena.whole, np.ones(len(sizes), np.bool_), [contribution], [1]))

        def clip(kernels, arena):
            kernels.measure(Arena(arena.targets, arena.partials))

        for work in (fold, clip):
            assert self.helpers(monkeypatch, sizes, work) == expected, work

    def test_to_be_measured_chunks_must_be_larger_than_to_be_folded_or_stand_at_equal_distances(self, monkeypatch):
        sizes = [75_000] * 124
        assert self.helpers(monkeypatch, sizes, lambda k, arena: k.measure(Arena(arena.targets, arena.partials))) == 0
        assert self.helpers(monkeypatch, sizes, lambda k, arena: k.scale(arena.targets, np.float32(2), arena.targets))
        assert self.helpers(monkeypatch, sizes, HostKernels.measure)


class TestThreads:
    def test_callers_in_several_threads_do_not_disturb_each_other(self):
        backend, outcomes, gate = host_backend(3), [None] * 3, threading.Barrier(3)
        expected = everything(host_backend(1))

        def work(i):
            gate.wait(200)
            outcomes[i] = all(everything(backend) == expected for _ in range(2))

        workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(250)
        assert outcomes == [True] * 3

    @pytest.mark.parametrize("threads", [1, 3])
    def test_a_fault_in_any_thread_reaches_the_caller(self, threads):
        """Whatever goes wrong in a chunk must not be lost with the thread it happened in."""
        kernels = HostKernels(threads)
        read_only = kernels.device.view(np.broadcast_to(np.float32(1), (1,)), "w")
        for position in range(5):
            targets = [kernels.device.allocate(1) for _ in range(5)]
            targets[position] = read_only
            with pytest.raises(ValueError, match="read-only"):
                kernels.fill_zero(targets)

    def test_a_fault_in_a_helper_reaches_the_caller(self):
        me, is_failing = threading.current_thread(), threading.Event()

        def work(_):
            if threading.current_thread() is me:
                assert is_failing.wait(SOON)
            else:
                is_failing.set()
                raise MemoryError("in a helper")

        with pytest.raises(MemoryError, match="in a helper"):
            shared_by_threads(work, range(4), 1, 2)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
    def test_a_forked_child_has_threads_of_its_own(self):
        program = """
import os, signal, sys, threading, time, warnings
import numpy as np
from gradengine.kernels import CHUNK
from gradengine.kernels.host import HostKernels
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+ warns of any fork beside threads
def wait_for_threads():
    while threading.active_count() < 3:  # they start by themselves
        time.sleep(0.001)
kernels = HostKernels(3)
targets = [kernels.device.allocate(CHUNK) for _ in range(24)]  # enough for two threads
kernels.fill_zero(targets)
wait_for_threads()
child = os.fork()
if child == 0:
    signal.alarm(20)  # a child that has no threads, or waits for those of its parent, ends here
    buffers = [kernels.device.view(np.ones(CHUNK, np.float32), "w") for _ in targets]
    kernels.scale(buffers, np.float32(2), targets)
    wait_for_threads()  # without them it would end too, and calls that nobody makes would keep its arrays
    os._exit(0 if all((target.data == 2).all() for target in targets) else 1)
kernels.fill_zero(targets)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0

    def test_without_room_for_one_the_caller_does_the_work_alone(self, monkeypatch):
        monkeypatch.setattr(host_threads, "_pools", {})
        monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no new thread")))
        done = []
        shared_by_threads(done.append, range(4), 2, 3)
        assert done == [0, 1, 2, 3]
        assert host_threads._pools == {}, "a queue that nobody serves would keep the arrays"

    @pytest.mark.parametrize("threads", [0, -1])
    def test_too_few(self, threads):
        with pytest.raises(CallerError) as refusal:
            HostKernels(threads)
        assert refusal.value.got == threads

    @pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this platform")
    def test_by_default_one_for_each_cpu_that_the_container_has_time_for(self, monkeypatch):
        for quota, expected in ((math.inf, len(os.sched_getaffinity(0))), (0.5, 1), (1.0, 1)):
            monkeypatch.setattr(host_threads, "cpu_quota", lambda quota=quota: quota)
            assert HostKernels().threads == expected

    QUOTAS = (
        ("0::/job/step", {"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000"}, 1.5),
        ("0::/../..", {"cpu.max": "50000 100000"}, 0.5),  # of version 2, in a container
        ("4:cpu,cpuacct:/docker/a", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, math.inf),
        ("4:cpuset:/", {"cpu.max": "50000 100000"}, math.inf),
    )

    @pytest.mark.parametrize(("groups", "files", "expected"), QUOTAS)
    def test_the_time_of_a_container_is_that_of_its_smallest_group(self, tmp_path, groups, files, expected):
        for name, text in {"../../../proc/self/cgroup": groups, **files}.items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        assert host_threads.cpu_quota(tmp_path) == expected
