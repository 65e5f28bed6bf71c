"""Host memory that stands for an arena: what travels is what lies there."""

import itertools

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import available, on_the_stand_in
from devices import synchronize
from folds import Fold, accumulate
from hypothesis import given
from hypothesis import strategies as st

SIZE = 1000


def arena_of(backend, values):
    arena = backend.kernels.device.allocate(values.size)
    write(backend, arena, values)
    return arena


def write(backend, arena, values):
    fold = Fold(0, True, (backend.kernels.device.view(backend.put(values.copy()), "w"),), (np.float32(1),))
    accumulate(backend.kernels, [arena], [fold])


class TestEveryMirror:
    def test_all_of_it_there_and_back(self, backend):
        values = draw.random_array(0, SIZE)
        arena = arena_of(backend, values)
        staging = backend.kernels.device.staging(arena)
        assert (staging.data.dtype, staging.data.shape) == (np.float32, (SIZE,))
        assert staging.is_arena is backend.is_host
        staging.fetch(0, SIZE)
        draw.assert_same_bits(staging.data, values)
        staging.data[:] *= 2
        staging.put_back()
        draw.assert_same_bits(backend.get(arena), 2 * values)

    @given(cuts=st.lists(st.integers(0, SIZE), max_size=5))
    def test_piece_by_piece(self, backend, cuts):
        values = draw.random_array(0, SIZE)
        staging = backend.kernels.device.staging(arena_of(backend, values))
        limits = [0, *sorted(cuts), SIZE]
        for start, stop in itertools.pairwise(limits):
            staging.fetch(start, stop)
            draw.assert_same_bits(staging.data[:stop], values[:stop])

    def test_behind_the_work_that_makes_it(self, backend):
        """The fold is queued and nobody has waited for it; what is put back is there for the work that follows."""
        arena = arena_of(backend, np.zeros(SIZE, np.float32))
        staging = backend.kernels.device.staging(arena)
        for step in range(1, 4):
            write(backend, arena, np.full(SIZE, step, np.float32))
            staging.fetch(0, SIZE)
            assert (staging.data == step).all()
            staging.data[:] = 10 * step
            staging.put_back()
            staging.data[:] = -1 if not staging.is_arena else 10 * step  # another buffer's turn
            backend.kernels.scale([arena], np.float32(2), [arena])
            assert (backend.get(arena) == 20 * step).all()

    def test_of_nothing(self, backend):
        staging = backend.kernels.device.staging(backend.kernels.device.allocate(0))
        staging.fetch(0, 0)
        staging.put_back()
        assert staging.data.size == 0


def test_the_hosts_arena_needs_no_copies_of_its_parts():
    arena = arena_of(available("host-1"), np.ones(SIZE, np.float32))
    assert available("host-1").kernels.device.in_parts(arena) is arena.data


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
            assert (arena.poll(waits=True) if waits else self.over(arena)) == [0, 1, 2]
            assert not arena.is_copying
            expected = np.arange(SIZE, dtype=np.float32) * step
            for n, row in enumerate(rows):
                draw.assert_same_bits(row[: 200 - n], expected[300 * n : 300 * n + 200 - n])
                np.add(row, 1, out=row)
                arena.copy(n, row[: 200 - n], 300 * n, is_to_arena=True, behind="span")
                expected[300 * n : 300 * n + 200 - n] += 1
            assert (arena.poll(waits=True) if waits else self.over(arena)) == [0, 1, 2]
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


class TestOfADevice:
    def test_only_the_stretch_asked_for_is_copied(self, device):
        staging = device.kernels.device.staging(arena_of(device, np.ones(SIZE, np.float32)))
        staging.data[:] = 7
        staging.fetch(10, 20)
        expected = np.full(SIZE, 7, np.float32)
        expected[10:20] = 1
        draw.assert_same_bits(staging.data, expected)

    @pytest.mark.parametrize(("start", "stop"), [(0, SIZE), (3, 3), (999, 1000)])
    def test_one_copy_and_one_wait(self, emulated, start, stop):
        staging = emulated.kernels.device.staging(arena_of(emulated, np.ones(SIZE, np.float32)))
        with cuda_emulator.recorded() as record:
            staging.fetch(start, stop)
        assert record.operations == ["copy device to host"]
        assert record.waits == ["stream"]
        with cuda_emulator.recorded() as record:
            staging.put_back()
        assert record.operations == ["copy host to device"]
        assert record.waits == ["stream"]
        assert record.allocations == record.pinned_allocations == []

    @on_the_stand_in
    @pytest.mark.parametrize("size", [(1 << 18) + 1, 3 << 18])
    def test_takes_as_much_pinned_memory_as_its_arena_has(self, emulated, size):
        """CuPy's pool would round up to a power of two: 2 GB for 1.6."""
        arena = emulated.kernels.device.allocate(size)
        with cuda_emulator.recorded() as record:
            staging = emulated.kernels.device.staging(arena)
        assert staging.data.size == size
        pool = emulated.kernels.xp is not cuda_emulator  # of real CuPy only what the pool gives is recorded
        assert record.pinned_allocations == ([] if pool else [4 * size])

    def test_large_memory_is_pinned(self, device):
        xp, staging = device.xp, device.kernels.device.staging(device.kernels.device.allocate(3 << 18))
        kinds = {xp.cuda.runtime.pointerGetAttributes(staging.data[at:].ctypes.data).type for at in (0, -1)}
        assert kinds == {xp.cuda.runtime.memoryTypeHost}

    def test_on_the_stream_that_is_current(self, device):
        """Work of a stream of its own is waited for, and seen."""
        xp, kernels = device.xp, device.kernels
        arena = arena_of(device, np.ones(SIZE, np.float32))
        staging, stream = kernels.device.staging(arena), xp.cuda.Stream(non_blocking=True)
        synchronize(device)
        with kernels.device.on(stream):
            kernels.scale([arena], np.float32(3), [arena])
            staging.fetch(0, SIZE)
            assert (staging.data == 3).all()

    def test_it_lives_as_long_as_its_arena_is_needed(self, device):
        staging = device.kernels.device.staging(arena_of(device, np.ones(SIZE, np.float32)))
        others = [device.kernels.device.allocate(SIZE) for _ in range(4)]
        device.kernels.fill_zero(others)
        staging.fetch(0, SIZE)
        assert (staging.data == 1).all()
