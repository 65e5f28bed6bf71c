"""Parts of an arena in host memory: what travels is what lies there."""

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import available
from devices import synchronize
from folds import Fold, accumulate

SIZE = 1000


def arena_of(backend, values):
    arena = backend.kernels.device.allocate(values.size)
    write(backend, arena, values)
    return arena


def write(backend, arena, values):
    fold = Fold(0, True, (backend.kernels.device.view(backend.put(values.copy()), "w"),), (np.float32(1),))
    accumulate(backend.kernels, [arena], [fold])


def test_the_hosts_arena_needs_no_copies_of_its_parts():
    arena = arena_of(available("host"), np.ones(SIZE, np.float32))
    assert available("host").kernels.device.in_parts(arena) is arena.data


class TestPartsOfADevice:
    def over(self, arena):
        found = []
        while arena.is_copying:
            found += arena.poll()
        return found

    @pytest.mark.parametrize("waits", [False, True])
    def test_there_and_back_behind_the_work_that_makes_them(self, device, waits):
        memory = arena_of(device, np.zeros(SIZE, np.float32))
        arena = device.kernels.device.in_parts(memory)
        rows = arena.rows(3, 200)
        for step in range(1, 4):
            write(device, memory, np.arange(SIZE, dtype=np.float32) * step)
            arena.note("span")
            for n, row in enumerate(rows):
                arena.copy(n, row[: 200 - n], 300 * n, is_to_arena=False, behind="span")
            assert sorted(arena.poll(waits=True) if waits else self.over(arena)) == [0, 1, 2]
            assert not arena.is_copying
            expected = np.arange(SIZE, dtype=np.float32) * step
            for n, row in enumerate(rows):
                draw.assert_same_bits(row[: 200 - n], expected[300 * n : 300 * n + 200 - n])
                np.add(row, 1, out=row)
                arena.copy(n, row[: 200 - n], 300 * n, is_to_arena=True, behind="span")
                expected[300 * n : 300 * n + 200 - n] += 1
            assert sorted(arena.poll(waits=True) if waits else self.over(arena)) == [0, 1, 2]
            draw.assert_same_bits(device.get(memory), expected)

    def test_who_begins_one_does_not_wait_for_it(self, emulated, lazy):
        memory = arena_of(emulated, np.ones(SIZE, np.float32))
        arena = emulated.kernels.device.in_parts(memory)
        (row,) = arena.rows(1, SIZE)
        row[:] = 7
        with cuda_emulator.recorded() as record:
            arena.note("span")
            arena.copy("it", row, 0, is_to_arena=False, behind="span")
            assert arena.is_copying
        assert record.operations == ["copy device to host"]
        assert record.waits == record.allocations == record.pinned_allocations == []
        assert arena.poll(waits=True) == ["it"]
        assert (row == 1).all()

    def test_come_behind_the_stream_that_was_current_when_their_key_was_noted(self, device):
        kernels, stream = device.kernels, device.xp.cuda.Stream(non_blocking=True)
        memory = arena_of(device, np.zeros(SIZE, np.float32))
        synchronize(device)
        arena = kernels.device.in_parts(memory)
        (row,) = arena.rows(1, SIZE)
        with device.active(), stream:
            write(device, memory, np.full(SIZE, 3, np.float32))
            arena.note(0)
        arena.copy("it", row, 0, is_to_arena=False, behind=0)
        assert self.over(arena) == ["it"]
        assert (row == 3).all()

    def test_rows_are_pinned_and_may_be_none(self, device):
        arena = device.kernels.device.in_parts(device.kernels.device.allocate(SIZE))
        rows, runtime = arena.rows(3, 1 << 18), device.xp.cuda.runtime
        assert [row.shape for row in rows] == [(1 << 18,)] * 3
        assert {runtime.pointerGetAttributes(row[at:].ctypes.data).type for row in rows for at in (0, -1)} == {
            runtime.memoryTypeHost
        }
        assert [len(arena.rows(*shape)) for shape in ((0, 5), (5, 0), (0, 0))] == [0, 0, 0]

    def test_its_memory_lives_as_long_as_it_does(self, device):
        arena = device.kernels.device.in_parts(arena_of(device, np.ones(SIZE, np.float32)))
        others = [device.kernels.device.allocate(SIZE) for _ in range(4)]
        device.kernels.fill_zero(others)
        (row,) = arena.rows(1, SIZE)
        arena.note("span")
        arena.copy("it", row, 0, is_to_arena=False, behind="span")
        assert arena.poll(waits=True) == ["it"]
        assert (row == 1).all()
