"""The verdict's way to the host: the struct of the kernel, and readback that never waits."""

import cuda_emulator
import numpy as np
import pytest
from devices import number_of, on_host, synchronize
from folds import Fold, accumulate, arena_of_sums, finalise

from gradengine.kernels import ClipPlan, toolchain
from gradengine.kernels.host import HostKernels
from gradengine.kernels.status import RECORD, StatusReadback, StepStatus

PLAN = ClipPlan((0,), (1.0,))


class TestRecord:
    def test_it_is_the_struct_that_the_kernel_writes(self, device):
        """Every field is written by its name there and read by its name here."""
        xp = device.xp
        names = ["steps" if name == "step" else name for name in RECORD.names]
        writes = " ".join(f"verdict->{name} = {number};" for number, name in enumerate(names, 1))
        code = f"""{toolchain.source("finalise")}
extern "C" __global__ void write_all(StepStatus* verdict, u64* size) {{ {writes} *size = sizeof(StepStatus); }}
"""
        module = xp.RawModule(code=code, options=("--std=c++17",))
        record, size = xp.zeros(RECORD.itemsize, np.uint8), xp.zeros(1, np.uint64)
        with record.device:
            module.get_function("write_all")((1,), (1,), (record, size))
        assert int(on_host(size)[0]) == RECORD.itemsize
        assert on_host(record).view(RECORD)[0].tolist() == tuple(range(1, len(RECORD.names) + 1))

    def test_every_field_reaches_the_host(self, device):
        kernels = device.kernels
        decision = kernels.decision(arena_of_sums(kernels.partial_sums([1])), PLAN)
        record = np.zeros(1, RECORD)
        record[0] = tuple(range(1, len(RECORD.names) + 1))
        with device.active():  # CuPy writes, too, behind the current stream of the current device
            decision.record.set(record.view(np.uint8))
        synchronize(device)  # the verdict is read behind the kernels' own work alone
        found = decision.read()
        assert found == StepStatus(*range(1, len(RECORD.names) + 1))._replace(skipped=True, spiked=True)
        assert found.skipped is found.spiked is True
        for name in ("norm", "scale", "factor", "inverse", "skipped", "spiked", "spike_bound"):
            assert number_of(getattr(decision, name)) == RECORD.names.index(name) + 1, name


@pytest.mark.parametrize(("step", "bad_step", "is_bad"), [(3, 3, True), (3, 2, False), (1, 0, False)])
def test_only_this_steps_blame_makes_it_bad(step, bad_step, is_bad):
    assert StepStatus(1.0, step, bad_step).is_bad is is_bad


class Steps:
    """Steps of one target, each with the squared sum it is given; the device does them when somebody asks."""

    def __init__(self, backend):
        self.backend, self.kernels = backend, backend.kernels
        self.target, self.sums = self.kernels.device.allocate(4), self.kernels.partial_sums([4])
        self.readback = self.kernels.status_readback(arena_of_sums(self.sums), PLAN)
        self.views = {}

    def prepare(self, *values):
        """Uploads, which wait, before the steps, which do not."""
        for value in values:
            self.views[value] = self.backend.buffer(np.full(4, value, np.float32))
        self.fold(values[0])
        finalise(self.kernels, [self.target], self.sums, PLAN, 1.0, zero_if_bad=True)
        self.backend.get(self.target)

    def fold(self, value):
        fold = Fold(0, True, (self.views[value],), (np.float32(1),))
        accumulate(self.kernels, [self.target], [fold], self.sums)

    def step(self, value):
        self.fold(value)
        finalise(self.kernels, [self.target], self.sums, PLAN, 1.0, zero_if_bad=True)
        self.readback.send()

    def wait(self):
        with self.backend.active():
            self.kernels.xp.cuda.get_current_stream().synchronize()


class TestStatusReadback:
    def test_the_newest_that_has_come_is_told_until_another_comes(self, device):
        steps = Steps(device)
        assert steps.readback.newest() is None
        steps.prepare(1, 2)
        for value in (1, 2, 1, 2):
            steps.step(value)
            steps.wait()
            assert [steps.readback.newest().norm for _ in range(2)] == [2 * value] * 2
        steps.step(1)
        steps.step(2)
        steps.wait()
        newest = steps.readback.newest()
        assert (newest.norm, newest.step) == (4, 7)
        assert steps.readback.newest() == newest

    def test_a_host_far_ahead_is_not_sent_everything_and_loses_no_blame(self, device):
        """No slot is written while its copy is under way; the last blame stands in every later verdict."""
        steps = Steps(device)
        steps.prepare(1, np.inf)
        ahead = 3 * StatusReadback.SLOTS
        for number in range(ahead):
            steps.step(np.inf if number == StatusReadback.SLOTS + 1 else 1)
        steps.wait()
        newest = steps.readback.newest()
        assert 1 <= newest.step - 1 <= ahead
        steps.step(1)
        steps.wait()
        newest = steps.readback.newest()
        assert newest.step == ahead + 2
        assert (newest.bad_steps, newest.bad_step, newest.bad_index) == (1, StatusReadback.SLOTS + 3, 0)
        assert not newest.is_bad

    def test_slots_are_exhausted_when_nobody_asks(self, emulated):
        """Neither sending nor asking waits."""
        steps = Steps(emulated)
        steps.prepare(1)
        with cuda_emulator.recorded() as record:
            for _ in range(3 * StatusReadback.SLOTS):
                steps.step(1)
        assert len(record.copies) == StatusReadback.SLOTS
        steps.wait()
        with cuda_emulator.recorded() as another:
            assert steps.readback.newest().step == 1 + StatusReadback.SLOTS
            steps.step(1)
        assert another.copies == ["device to host"]
        for seen in (record, another):
            assert seen.waits == seen.allocations == seen.pinned_allocations == []

    def test_its_memory_is_given_back_when_nothing_is_written_there_any_more(self, device):
        """An engine may go while its last step's verdict is still on the way."""
        steps, xp = Steps(device), device.xp
        steps.prepare(1)
        steps.step(1)
        size = steps.readback._host.nbytes
        steps.readback = None
        others = [np.frombuffer(xp.cuda.alloc_pinned_memory(size), np.uint8) for _ in range(20)]
        for other in others:
            other[:] = 7
        synchronize(device)
        assert all((other == 7).all() for other in others)
        device.kernels.device.allocate(1)  # whoever takes memory next lets go of what is done
        assert not device.kernels.device.kept

    @pytest.mark.usefixtures("lazy")
    def test_each_verdict_is_that_of_its_step(self, emulated):
        """What a slot holds is the record as it was behind that step, whatever later steps made of it."""
        steps = Steps(emulated)
        steps.prepare(1, 2, 3)
        for value in (3, 1, 2):
            steps.step(value)
        seen = []
        while len(seen) < 3:
            found = steps.readback.newest()  # each question lets the device go on a little
            seen += [] if found is None or seen[-1:] == [found.norm] else [found.norm]
        assert seen == [6, 2, 4]

    def test_the_host_needs_none(self):
        kernels = HostKernels(1)
        assert kernels.status_readback(arena_of_sums(kernels.partial_sums([1])), PLAN) is None


class TestDeviceDecision:
    def test_each_plan_has_its_own(self, device):
        kernels = device.kernels
        sums = kernels.partial_sums([3, 3])
        plans = [ClipPlan((0, 0), (1.0,)), ClipPlan((0, 1), (1.0, 2.0))]
        first, second = (kernels.decision(arena_of_sums(sums), plan) for plan in plans)
        assert kernels.decision(arena_of_sums(sums), ClipPlan((0, 0), (1.0,))) is first
        assert first.record is not second.record
        assert (len(first.factors), len(second.factors)) == (1, 2)

    def test_before_the_first_step_nothing_is_clipped(self, device):
        decision = device.kernels.decision(arena_of_sums(device.kernels.partial_sums([3])), PLAN)
        assert [*map(number_of, decision.scales), *map(number_of, decision.factors)] == [1, 1]
        assert not number_of(decision.skipped)
        assert decision.bad is None  # only the device knows

    def test_scalars_are_views_that_the_next_step_writes(self, device):
        steps = Steps(device)
        steps.prepare(2, 8)
        decision = steps.kernels.decision(arena_of_sums(steps.sums), PLAN)
        norm, scale, factor, inverse = decision.norm, decision.scale, decision.factor, decision.inverse
        for value in (2, 8):
            steps.step(value)
            assert (norm.shape, number_of(norm), number_of(scale)) == ((), 2 * value, 0.5 / value)
            assert (number_of(factor), number_of(inverse)) == (0.5 / value, 2 * value)
