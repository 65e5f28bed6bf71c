"""What the device is asked for, and what the kernels are told, byte for byte as they read it; few launches, no wait."""

import ctypes
import gc
from types import SimpleNamespace

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import ORDERS
from devices import churned, launched, on_host, operations_of, synchronize
from folds import Fold, accumulate, finalise, hand_back, measure, totals_of
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import everything, fold_of, numbers, sums_of

from gradengine.arrays.buffer import Buffer
from gradengine.errors import CallerError
from gradengine.kernels import ClipPlan, launch, toolchain
from gradengine.kernels.host import HostKernels
from gradengine.kernels.launch import CAPACITIES, by_value, chunk_for, entries_of
from gradengine.kernels.operands import OVERWRITE, tagged
from gradengine.layout.slots import Span

PLAN = ClipPlan((0,), (1.0,))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(map(str, order.values())))
def test_the_same_bits_in_every_order_of_threads_and_blocks(emulated, order):
    with cuda_emulator.options(order="forward"):
        expected = everything(emulated)
    with cuda_emulator.options(**order):
        assert everything(emulated) == expected
    with cuda_emulator.options(order="forward", block_order=order["order"], seed=7):
        assert everything(emulated) == expected


class TestQueue:
    SIZES = (5, 3000, 0, 700)

    def step(self, kernels, targets, views, sums):
        """A window of four micro-batches, and one measured by a pass of its own."""
        accumulate(kernels, targets, [fold_of(p, True, view, [1, 2, 3, 4]) for p, view in enumerate(views)], sums)
        measure(kernels, targets, sums, range(len(targets)))
        plan = ClipPlan((0,) * len(targets), (1.0,))
        decision = finalise(kernels, targets, sums, plan, 3.0, zero_if_bad=True)
        hand_back(kernels, targets, decision, plan.groups, [view[0] for view in views])
        hand_back(kernels, targets, decision, plan.groups, targets)

    def test_one_launch_for_each_and_nothing_else_after_the_first(self, emulated):
        """Addresses travel with the launch: buffers that a framework puts elsewhere each time need no new table."""
        kernels = emulated.kernels
        targets, sums = [kernels.device.allocate(size) for size in self.SIZES], kernels.partial_sums(self.SIZES)
        arrays = [[draw.random_array(i, size, "bfloat16") for i in range(4)] for size in self.SIZES]
        times = [[[emulated.buffer(array) for array in row] for row in arrays] for _ in range(4)]
        self.step(kernels, targets, times[0], sums)
        with cuda_emulator.recorded() as record:
            for views in times[1:]:
                self.step(kernels, targets, views, sums)
        launches = ["accumulate_4_small", "measure_small", "finalise", "hand_back_small", "hand_back_small"]
        assert record.operations == record.launches == 3 * launches
        assert record.allocations == record.pinned_allocations == record.waits == []

    @pytest.mark.parametrize(
        ("components", "sources", "expected"),
        [
            (480, 1, ["accumulate_1_small"]),
            (481, 1, ["accumulate_1_large"]),
            (4000, 1, ["accumulate_1_large"]),
            (4001, 1, ["accumulate_1_table"]),
            (120, 4, ["accumulate_4_small"]),
            (121, 2, ["accumulate_4_large"]),
            (1000, 4, ["accumulate_4_large"]),
            (1001, 5, ["accumulate_4_table"] * 2),
            (3, 9, ["accumulate_4_small"] * 3),
        ],
    )
    def test_launches_of_k1(self, emulated, components, sources, expected):
        """One launch for four micro-batches: 480 addresses in 4 KB of arguments, 4000 in 32 KB, more by a copy."""
        arena, view = emulated.buffer(np.zeros(4 * components, np.float32)), emulated.buffer(np.ones(1, np.float32))
        targets = [arena.part(4 * p, 4 * p + 1) for p in range(components)]
        folds = [fold_of(p, True, [view] * sources, [1] * sources) for p in range(components)]
        with cuda_emulator.recorded() as record:
            accumulate(emulated.kernels, targets, folds)
        assert record.launches == expected
        assert (emulated.get(arena)[::4] == sources).all()

    def test_micro_batches_of_equal_weight_may_be_lacking_in_one_launch(self, emulated):
        targets, view = [emulated.kernels.device.allocate(3) for _ in range(4)], emulated.buffer(np.ones(3, np.float32))
        folds = [fold_of(p, True, [view] * count, [2] * count) for p, count in enumerate((4, 1, 3, 2))]
        with cuda_emulator.recorded() as record:
            accumulate(emulated.kernels, targets, folds)
        assert record.launches == ["accumulate_4_small"]
        assert [emulated.get(target)[2] for target in targets] == [8, 2, 6, 4]

    @pytest.mark.parametrize(("count", "expected"), [(480, "small"), (481, "large"), (4001, "table")])
    def test_launches_of_measure_and_hand_back(self, emulated, count, expected):
        whole = emulated.buffer(np.ones(4 * count, np.float16))
        buffers = [whole.part(4 * p, 4 * p + 1) for p in range(count)]
        sums = emulated.kernels.partial_sums([1] * count)
        with cuda_emulator.recorded() as record:
            measure(emulated.kernels, buffers, sums, range(count))
            emulated.kernels.scale(buffers, np.float32(2), buffers)
        assert record.launches == [f"measure_{expected}", f"hand_back_{expected}"]
        assert totals_of(emulated.kernels, sums).tolist() == [1] * count
        assert (emulated.get(whole)[::4] == emulated.get(whole)[0]).all()

    def test_what_is_dropped_is_given_out_again_behind_the_work_that_needs_it(self, emulated):
        """The host runs ahead: sums and decisions of earlier calls are gone before the device has used them."""
        buffers = [emulated.buffer(np.full(4, value, np.float32)) for value in range(5)]
        sums = (sums_of(emulated, [buffer]) for buffer in buffers)
        norms = [finalise(emulated.kernels, None, s, PLAN, 1.0, zero_if_bad=False).norm for s in sums]
        assert numbers(norms) == [0, 2, 4, 6, 8]

    def test_zeros_of_targets_and_of_their_sums_are_one_launch(self, emulated):
        kernels, buffers = emulated.kernels, [emulated.kernels.device.allocate(5) for _ in range(3)]
        arena, slots = kernels.arena(buffers), Span.at([0, 2])
        kernels.prepare(arena, [slots])
        with cuda_emulator.recorded() as record:
            kernels.fill_zero(buffers)
            kernels.zero(arena, slots, np.array([True, True]))
        assert record.operations == ["fill"] * 3 + ["accumulate_1_small"]


class TestStreams:
    def test_work_goes_to_the_stream_that_is_asked_for(self, device):
        xp, kernels = device.xp, device.kernels
        stream = xp.cuda.Stream(non_blocking=True)
        by_protocol = SimpleNamespace(__cuda_stream__=lambda: (0, stream.ptr))
        for asked in (stream, by_protocol, SimpleNamespace(cuda_stream=stream.ptr), stream.ptr):
            with kernels.device.on(asked):
                assert xp.cuda.get_current_stream().ptr == stream.ptr
        before = xp.cuda.get_current_stream().ptr
        with kernels.device.on(None):
            assert xp.cuda.get_current_stream().ptr == before

    @pytest.mark.parametrize("stream", ["stream", 1.5, object()])
    def test_what_is_no_stream(self, device, stream):
        with pytest.raises(CallerError, match="not a CUDA stream"):
            device.kernels.device.on(stream)

    def test_the_host_has_no_streams_and_records_nothing(self):
        with pytest.raises(CallerError, match="the CPU has no streams"):
            HostKernels(1).device.on(object())
        assert HostKernels(1).device.graph() is None

    def test_a_table_first_needed_while_recording_is_there_for_the_graph(self, emulated):
        """It is copied on a stream of its own, which no capture sees."""
        kernels, target = emulated.kernels, emulated.buffer(np.zeros(77, np.float32))
        view = emulated.buffer(np.ones(77, np.float32))
        with kernels.device.graph() as recorded:
            accumulate(kernels, [target], [fold_of(0, False, [view], [3])])
        assert operations_of(recorded.graph) == ["accumulate_1_small"]
        recorded.graph.launch()
        assert (emulated.get(target) == 3).all()


sizes = st.lists(st.integers(0, 9000), max_size=9)


def device_memory(pointer, dtype):
    return Buffer(pointer, 8, dtype, (8,), True, None, "cuda:0")


class TestChunkFor:
    @given(st.integers(0, 2**40))
    def test_powers_of_two_within_limits(self, size):
        chunk = chunk_for(size)
        assert chunk in {2048, 4096, 8192, 16384, 32768}  # at least a unit for each of 256 threads
        assert chunk == 2048 or size / chunk >= 1024  # enough chunks for a whole GPU
        assert chunk_for(size + 1) >= chunk


class TestTagged:
    @pytest.mark.parametrize(("dtype", "tag"), [("float32", 0), ("float16", 1), ("bfloat16", 2)])
    @pytest.mark.parametrize("pointer", [0x100, (1 << 56) - 16])
    def test_the_dtype_is_in_the_upper_byte(self, dtype, tag, pointer):
        address = tagged(device_memory(pointer, dtype))
        assert (address & ~(0xFF << 56), address >> 56, address & OVERWRITE) == (pointer, tag, 0)


class TestTable:
    @given(sizes, st.sampled_from([2048, 4096]))
    def test_each_row_is_one_chunk_and_each_chunk_has_one_row(self, found, chunk):
        expected = [(e, k) for e, size in enumerate(found) for k in range(-(-size // chunk))]
        assert launch._rows_of(entries_of(64, found), chunk).tolist() == expected

    def test_the_same_entries_are_copied_once(self, emulated):
        table = emulated.kernels._launches.table
        made = [table(entries_of(64, sizes), chunk) for sizes, chunk in (([5, 7], 2048), ([5], 2048), ([5, 7], 4096))]
        with cuda_emulator.recorded() as record:
            assert table(entries_of([64, 64], [5, 7]), 2048) is made[0]
        assert record.operations == record.allocations == []
        assert len(set(map(id, made))) == 3
        assert (made[0].entries, made[0].blocks, made[0].chunk) == (2, 2, 2048)


READ_BACK = """
extern "C" __global__ void read_back(const Target* target, const Row* row, u64* out) {
  out[0] = target[1].address, out[1] = (u64)target[1].size, out[2] = target[1].first, out[3] = target[1].group;
  out[4] = row[1].entry, out[5] = row[1].chunk, out[6] = sizeof(Target), out[7] = sizeof(Row);
}
"""


def test_the_kernels_read_what_is_written(device):
    xp = device.xp
    entries = entries_of([7, 0x123456789ABCDEF0], [1, 3000], [0, 0x87654321], [0, 0x12345678])
    table = device.kernels._launches.table(entries, 2048)
    module = xp.RawModule(code=toolchain.source("measure") + READ_BACK, options=("--std=c++17",))
    out = xp.zeros(8, np.uint64)
    with out.device:
        module.get_function("read_back")((1,), (1,), (table.targets, table.rows, out))
    assert on_host(out).tolist() == [0x123456789ABCDEF0, 3000, 0x87654321, 0x12345678, 1, 0, 24, 8]


class TestPartialSums:
    def test_each_chunk_has_its_place(self, device):
        sums = device.kernels.partial_sums([5000, 0, 1])
        assert (sums.chunk, sums.first, sums.counts) == (2048, [0, 3, 3], [3, 0, 1])
        assert (sums.values.dtype, sums.non_finite.dtype) == (np.float64, np.uint32)
        assert np.isnan(on_host(sums.values)).all()  # unmeasured can never pass
        assert on_host(sums.non_finite).tolist() == [0] * 4

    def test_the_chunk_depends_on_the_whole_set(self, device, monkeypatch):
        monkeypatch.setattr(launch, "_WANTED_CHUNKS", 1)
        assert [device.kernels.partial_sums([5000] * count).chunk for count in (1, 2)] == [4096, 8192]


MANY = CAPACITIES["small"] + 1
LAUNCHES = 18


class TestByValue:
    @pytest.mark.parametrize(("count", "name"), [(0, "small"), (480, "small"), (481, "large"), (4000, "large")])
    @pytest.mark.parametrize("weights", [(), (3,), (3, 4, 5, 6)])
    def test_as_the_struct_lies(self, count, name, weights):
        addresses = np.arange(1, count + 1, dtype=np.uint64)
        found, argument = by_value(addresses, weights)

        class Struct(ctypes.Structure):
            _fields_ = (("address", ctypes.c_uint64 * CAPACITIES[name]), ("weight", ctypes.c_float * len(weights)))

        assert found == name
        assert argument.nbytes == ctypes.sizeof(Struct)
        read = Struct.from_buffer_copy(argument.tobytes())
        assert read.address[:count] == addresses.tolist()
        assert tuple(read.weight) == weights

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
