"""Addresses reach the kernel that they were meant for: in its arguments, or through memory in the stream's order."""

import ctypes
import gc

import cuda_emulator
import numpy as np
import pytest
from devices import churned, launched, operations_of, synchronize
from folds import Fold, accumulate, measure_chunks, totals_of

from gradengine.kernels.launch import CAPACITIES, by_value

MANY = CAPACITIES["small"] + 1
LAUNCHES = 18


class TestByValue:
    @pytest.mark.parametrize(("count", "name"), [(0, "small"), (480, "small"), (481, "large"), (4000, "large")])
    @pytest.mark.parametrize("weights", [(), (3,), (3, 4, 5, 6)])
    def test_as_the_struct_lies(self, count, name, weights):
        addresses = np.arange(1, count + 1, dtype=np.uint64)
        found, argument = by_value(addresses, weights)

        class Struct(ctypes.Structure):
            _fields_ = (("address", ctypes.c_uint64 * CAPACITIES[name]), ("weight", ctypes.c_uint64 * len(weights)))

        assert found == name
        assert argument.nbytes == ctypes.sizeof(Struct)
        read = Struct.from_buffer_copy(argument.tobytes())
        assert read.address[:count] == addresses.tolist()
        assert tuple(read.weight) == tuple(int(np.float32(weight).view(np.uint32)) for weight in weights)

    @pytest.mark.parametrize(("name", "most"), [("small", 4096), ("large", 32764)])
    def test_all_arguments_of_a_launch_fit(self, name, most):
        """K1's others are six, of 8 bytes at most: rows, targets, entries, chunk, squares, counts."""
        _, argument = by_value(np.zeros(CAPACITIES[name], np.uint64), (1, 1, 1, 1))
        assert argument.nbytes + 6 * 8 <= most


class Counting:
    """Many targets of one element; each fold overwrites them with its own number, from memory of its own."""

    def __init__(self, backend):
        self.backend, self.kernels = backend, backend.kernels
        self.arena = self.kernels.device.allocate(32 * MANY)
        self.targets = [self.arena.part(32 * p, 32 * p + 1) for p in range(MANY)]
        self.partials = self.kernels.partial_sums([1] * MANY)
        self.sources = [backend.buffer(np.full(MANY, number, np.float32)) for number in range(LAUNCHES)]

    def fold(self, number, overwrite):
        source, weight = self.sources[number], np.float32(1)
        folds = [Fold(p, overwrite, (source.part(p, p + 1),), (weight,)) for p in range(MANY)]
        accumulate(self.kernels, self.targets, folds, self.partials, measure=False)

    def values(self):
        return set(self.backend.get(self.arena)[::32].tolist())


class TestThroughMemory:
    @pytest.fixture(autouse=True)
    def _few_by_value(self, monkeypatch):
        monkeypatch.setitem(CAPACITIES, "large", MANY - 1)

    def test_each_launch_has_its_own_though_nobody_waits(self, device):
        """Many copies are under way at once."""
        counting = Counting(device)
        for number in range(LAUNCHES):
            counting.fold(number, overwrite=number == 0)
        assert counting.values() == {sum(range(LAUNCHES))}

    def test_the_host_waits_for_none_of_them(self, emulated):
        counting, stream = Counting(emulated), emulated.xp.cuda.Stream(non_blocking=True)
        emulated.get(counting.arena)
        with stream:
            counting.fold(0, overwrite=True)
            with cuda_emulator.recorded() as record:
                for number in range(1, LAUNCHES):
                    counting.fold(number, overwrite=False)
            assert record.operations == ["copy host to device", "accumulate_1_table"] * (LAUNCHES - 1)
            assert record.waits == []
        assert counting.values() == {sum(range(LAUNCHES))}
        counting.fold(0, overwrite=False)
        assert len(counting.kernels.device.kept) <= 1  # what was sent before is let go

    def test_streams_do_not_share_them(self, device):
        """One stream's addresses are not written over by those of another that is ahead of it."""
        kernels, one, two = device.kernels, Counting(device), Counting(device)
        stream = device.xp.cuda.Stream(non_blocking=True)
        device.get(one.arena)
        for number in range(4):
            one.fold(number, overwrite=number == 0)
            with kernels.device.on(stream):
                two.fold(3 - number, overwrite=number == 0)
        stream.synchronize()
        assert one.values() == two.values() == {6}

    def test_a_graph_keeps_its_own(self, device):
        """What a later launch sends, and what the host frees, is nothing to a graph that was recorded before."""
        counting, kernels = Counting(device), device.kernels
        counting.fold(0, overwrite=True)
        with kernels.device.graph() as recorded:
            counting.fold(5, overwrite=False)
        counting.fold(1, overwrite=False)
        for _ in range(3):
            launched(device, recorded.graph)
        assert counting.values() == {16}
        counting.fold(2, overwrite=True)
        launched(device, recorded.graph)
        assert counting.values() == {7}

    @pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
    def test_a_graph_that_somebody_else_records_has_them_for_good(self, device, mode):
        """How long it lives is not known here; recorded again and again, it takes no more."""
        counting, place, xp = Counting(device), device.kernels.device, device.kernels.xp
        counting.fold(0, overwrite=True)
        synchronize(device)
        with device.active():
            stream = xp.cuda.Stream(non_blocking=True)
            taken = []
            for number in (5, 7, 5, 7):
                stream.begin_capture(getattr(xp.cuda.runtime, f"streamCaptureMode{mode}"))
                with stream:
                    counting.fold(number, overwrite=False)
                graph = stream.end_capture()
                taken.append(len(place._foreign))
        assert len(operations_of(graph)) == 1
        assert 0 < taken[1] == taken[2] == taken[3]
        gc.collect()
        for pinned in [xp.cuda.alloc_pinned_memory(8 * MANY) for _ in range(20)]:
            np.frombuffer(pinned, np.uint8)[:] = 0x11
        with place.on(place._uploads):
            churned(device)
            place._uploads.synchronize()
        launched(device, graph)
        assert counting.values() == {7}

    def test_measured_and_handed_back(self, device):
        kernels, count = device.kernels, MANY
        whole = device.buffer(np.full(2 * count, 3, np.float16))
        parts = [whole.part(2 * p, 2 * p + 1) for p in range(count)]
        sums = kernels.partial_sums([1] * count)
        measure_chunks(kernels, parts, sums, sums.chunks(range(count)))
        kernels.scale(parts, np.float32(0.5), parts)
        assert set(totals_of(kernels, sums).tolist()) == {9}
        assert device.get(whole).view(np.float16).tolist() == [1.5, 3] * count
