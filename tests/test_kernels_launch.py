"""What the kernels are told, byte for byte as they read it."""

import sys
import threading

import numpy as np
import pytest
import strategies as draw
from devices import on_host
from hypothesis import given
from hypothesis import strategies as st

from gradengine.arrays.buffer import Buffer
from gradengine.kernels import launch, toolchain
from gradengine.kernels.cuda import CudaPartialSums
from gradengine.kernels.launch import Entry, Tables, chunk_for
from gradengine.kernels.operands import OVERWRITE, tagged

entries = st.lists(st.integers(0, 9000).map(lambda size: Entry(64, size)), max_size=9)


def device_memory(pointer, dtype):
    return Buffer(pointer, 8, dtype, (8,), True, None, "cuda:0")


class Uploads(list):
    """Stands for the device: keeps what is copied there."""

    def __call__(self, array):
        self.append(array.copy())
        return self[-1]


class TestChunkFor:
    @given(st.integers(0, 2**40))
    def test_powers_of_two_within_limits(self, size):
        chunk = chunk_for(size)
        assert chunk in {2048, 4096, 8192, 16384, 32768}
        assert chunk == 2048 or size / chunk >= 1024  # enough chunks for a whole GPU
        assert chunk_for(size + 1) >= chunk

    def test_a_chunk_is_no_less_than_a_unit_for_each_thread(self):
        assert chunk_for(0) == 256 * draw.UNIT


class TestTagged:
    @pytest.mark.parametrize(("dtype", "tag"), [("float32", 0), ("float16", 1), ("bfloat16", 2)])
    @pytest.mark.parametrize("pointer", [0x100, (1 << 56) - 16])
    def test_the_dtype_is_in_the_upper_byte(self, dtype, tag, pointer):
        address = tagged(device_memory(pointer, dtype))
        assert (address & ~(0xFF << 56), address >> 56) == (pointer, tag)

    def test_no_tag_is_the_overwrite_flag(self):
        assert not any(tagged(device_memory(16, dtype)) & OVERWRITE for dtype in draw.DTYPES)


def let_go(events, memory):
    """Of a table's memory: nothing here still reads it."""


class TestTables:
    @given(entries, st.sampled_from([2048, 4096]))
    def test_each_row_is_one_chunk_and_each_chunk_has_one_row(self, found, chunk):
        table = Tables(Uploads(), let_go).of(found, chunk)
        expected = [(e, k) for e, entry in enumerate(found) for k in range(-(-entry.size // chunk))]
        assert (table.entries, table.blocks, table.chunk) == (len(found), len(expected), chunk)
        if expected:
            assert table.rows.view(np.uint32).reshape(-1, 2).tolist() == [list(row) for row in expected]

    def test_the_same_entries_are_copied_once(self):
        uploads = Uploads()
        made = Tables(uploads, let_go)
        table = made.of([Entry(64, 5), Entry(128, 7)], 2048)
        assert len(uploads) == 2
        assert made.of([Entry(64, 5), Entry(128, 7)], 2048) is table
        assert len(uploads) == 2
        others = [made.of([Entry(64, 5)], 2048), made.of([Entry(64, 5), Entry(128, 7)], 4096)]
        assert len({id(t) for t in (table, *others)}) == 3

    def test_only_so_many_are_remembered_and_the_oldest_goes_first(self, monkeypatch):
        """Destinations that move make new tables for ever."""
        monkeypatch.setattr(launch, "_TABLES", 3)
        uploads, dropped = Uploads(), []
        made = Tables(uploads, lambda events, memory: dropped.append(memory))
        for address in (64, 128, 192, 256, 320):
            made.of([Entry(address, 5)], 2048)
        assert (len(uploads), len(dropped)) == (10, 2)
        for address in (192, 256, 320):
            made.of([Entry(address, 5)], 2048)
        assert len(uploads) == 10
        made.of([Entry(64, 5)], 2048)
        assert len(uploads) == 12

    def test_nothing_is_copied_of_nothing(self):
        uploads = Uploads()
        table = Tables(uploads, let_go).of([], 2048)
        assert (table.blocks, table.rows, table.targets) == (0, None, None)
        assert Tables(uploads, let_go).of([Entry(0, 0)], 2048).rows is None
        assert len(uploads) == 1


READ_BACK = """
extern "C" __global__ void read_back(const Target* target, const Row* row, u64* out) {
  out[0] = target[1].address, out[1] = (u64)target[1].size, out[2] = target[1].first, out[3] = target[1].group;
  out[4] = row[1].entry, out[5] = row[1].chunk, out[6] = sizeof(Target), out[7] = sizeof(Row);
}
"""


def test_the_kernels_read_what_is_written(device):
    xp = device.xp
    table = Tables(xp.asarray, let_go).of([Entry(7, 1), Entry(0x123456789ABCDEF0, 3000, 0x87654321, 0x12345678)], 2048)
    module = xp.RawModule(code=toolchain.source("measure") + READ_BACK, options=("--std=c++17",))
    out = xp.zeros(8, np.uint64)
    with out.device:
        module.get_function("read_back")((1,), (1,), (table.targets, table.rows, out))
    assert on_host(out).tolist() == [0x123456789ABCDEF0, 3000, 0x87654321, 0x12345678, 1, 0, 24, 8]


class NoOrder:
    """The order of work on memory that nothing works on."""

    def keep(self, *memory):
        pass


class TestCudaPartialSums:
    def test_each_chunk_has_its_place(self):
        uploads = Uploads()
        sums = CudaPartialSums([5000, 0, 1], uploads, NoOrder())
        assert (sums.chunk, sums.first, sums.counts) == (2048, [0, 3, 3], [3, 0, 1])
        assert [array.dtype for array in uploads] == [np.float64, np.uint32]
        assert np.isnan(sums.values).all()  # unmeasured can never pass
        assert sums.non_finite.tolist() == [0] * 4

    def test_the_chunk_depends_on_the_whole_set(self, monkeypatch):
        monkeypatch.setattr(launch, "_WANTED_CHUNKS", 1)
        assert CudaPartialSums([5000], Uploads(), NoOrder()).chunk == 4096
        assert CudaPartialSums([5000, 5000], Uploads(), NoOrder()).chunk == 8192


def test_threads_share_tables():
    """Engines of one device do, and more tables are made than are remembered."""
    made, faults = Tables(lambda array: array, let_go), []

    def make(first):
        try:
            for size in range(first, first + 1000):
                assert made.of([Entry(0, size)], 2048).entries == 1
        except Exception as fault:
            faults.append(fault)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=make, args=(1 + 10_000 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert faults == []
