"""Tensors of more than 2**33 elements: whole kernels over address space of which only a few pages are ever touched.

Elements beyond 2**31 and 2**32, and bytes beyond 4 GiB, are where an index in 32 bits wraps round. A launch takes the
rows of its table that it is given, so a few chunks stand for all of them; the rest of the memory is never backed.
"""

import contextlib
import ctypes
import dataclasses
import mmap

import numpy as np
import pytest
import strategies as draw
from cuda_emulator.native import register, unregister
from folds import finalise, status_of

from gradengine.arrays.buffer import Buffer
from gradengine.arrays.dtypes import DTYPES
from gradengine.kernels import ClipPlan
from gradengine.kernels.launch import _ROW, _rows_of, entries_of
from gradengine.kernels.operands import OVERWRITE, tagged

CHUNK = 32768
SIZE = 2**33 + 13
LAST = 2**33 // CHUNK
CHUNKS = [0, 2**30 // CHUNK, 2**31 // CHUNK, 2**32 // CHUNK - 1, 2**32 // CHUNK, LAST - 1, LAST]
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; Python names it from 3.13 on
AROUND = 16  # elements that a misaligned access may reach beyond a chunk


@pytest.fixture
def kernels(emulated):
    return emulated.kernels


@pytest.fixture
def far_memory(kernels):
    """Makes device memory as a NumPy array in its storage dtype, and a buffer of SIZE elements of it."""
    with contextlib.ExitStack() as stack:

        def make(dtype, offset=0):
            length = (SIZE + offset) * DTYPES[dtype].itemsize
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            memory = mmap.mmap(-1, length, flags)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            register(address, length)
            stack.callback(unregister, address)
            elements = np.frombuffer(memory, DTYPES[dtype].storage)[offset:]
            pointer = address + offset * DTYPES[dtype].itemsize
            return elements, Buffer(pointer, SIZE, dtype, (SIZE,), True, memory, "cuda:0")

        yield make
        kernels.xp.cuda.runtime.deviceSynchronize()


def only(kernels, table, chunks):
    """The same table with a few of its rows."""
    rows = table.rows.get().view(_ROW)[chunks]
    assert rows["chunk"].tolist() == chunks
    return dataclasses.replace(table, blocks=len(rows), rows=kernels.xp.asarray(rows.view(np.uint8)))


def sums_of_nothing(kernels):
    sums = kernels.partial_sums([SIZE])
    kernels.device.clear(sums.values.data.ptr, sums.values.nbytes)
    return sums


def stretches(head=0):
    """What each chosen chunk is, and a little on both sides: (chunk, start, stop, first shown, last shown)."""
    for chunk in CHUNKS:
        start, stop = (chunk * CHUNK + head if chunk else 0), min((chunk + 1) * CHUNK + head, SIZE)
        yield chunk, start, stop, max(start - AROUND, 0), min(stop + AROUND, SIZE)


def values_at(chunk, size, dtype):
    return draw.random_array([chunk, size], size, dtype)


def fill(elements, dtype, head=0):
    for chunk, _, _, first, last in stretches(head):
        elements[first:last] = draw.storage_bits(values_at(chunk, last - first, dtype)).view(DTYPES[dtype].storage)


def chunk_of(elements, dtype, start, stop):
    return elements[start:stop].view(draw.DTYPES[dtype]).copy()


@pytest.mark.parametrize("overwrite", [False, True])
def test_chunks_of_8_billion_elements_are_accumulated_where_they_lie(kernels, far_memory, overwrite):
    arena, target = far_memory("float32")
    given = [("bfloat16", *far_memory("bfloat16", 1)), ("float32", *far_memory("float32", 3))]
    fill(arena, "float32")
    for dtype, elements, _ in given:
        fill(elements, dtype)
    before = {chunk: chunk_of(arena, "float32", start, stop) for chunk, start, stop, *_ in stretches()}
    edges = {chunk: chunk_of(arena, "float32", first, last) for chunk, _, _, first, last in stretches()}
    sums = sums_of_nothing(kernels)
    table = kernels._launches.table(entries_of(target.pointer, [SIZE]), CHUNK)
    addresses = np.array([[tagged(source)] for _, _, source in given] + [[0], [0]], np.uint64)
    addresses[0] |= np.uint64(OVERWRITE if overwrite else 0)
    weights = [np.float32(w) for w in (0.3, 1, 1, 1)]
    arguments = (np.uint32(table.entries), np.int64(table.chunk), sums.values, sums.non_finite)
    work = only(kernels, table, CHUNKS)
    kernels._launches.over(work, "accumulate_4", arguments, addresses.reshape(-1), weights)
    kernels.xp.cuda.runtime.deviceSynchronize()
    expected_squares = np.zeros(LAST + 1)
    for chunk, start, stop, first, last in stretches():
        sources = [chunk_of(elements, dtype, start, stop) for dtype, elements, _ in given]
        expected = draw.folded(before[chunk], sources, weights[:2], overwrite)
        draw.assert_same_bits(chunk_of(arena, "float32", start, stop), expected)
        expected_squares[chunk] = np.sum(expected.astype(np.float64) ** 2)
        if chunk + 1 not in CHUNKS:  # nobody's in this launch
            draw.assert_same_bits(chunk_of(arena, "float32", stop, last), edges[chunk][stop - first :])
        if chunk - 1 not in CHUNKS:
            draw.assert_same_bits(chunk_of(arena, "float32", first, start), edges[chunk][: start - first])
    np.testing.assert_allclose(sums.values.get(), expected_squares, rtol=1e-6)
    assert not sums.non_finite.get().any()


@pytest.mark.parametrize("dtype", draw.DTYPES)
def test_chunks_of_8_billion_elements_are_measured_where_they_lie(kernels, far_memory, dtype):
    elements, buffer = far_memory(dtype, 5)
    fill(elements, dtype)
    elements[2**33 + 7] = draw.storage_bits(np.array(np.nan, draw.DTYPES[dtype])).view(DTYPES[dtype].storage)[0]
    sums = sums_of_nothing(kernels)
    table = only(kernels, kernels._launches.table(entries_of(0, [SIZE]), CHUNK), CHUNKS)
    arguments = (np.int64(CHUNK), sums.values, sums.non_finite)
    kernels._launches.over(table, "measure", arguments, np.array([tagged(buffer)], np.uint64))
    squares, counts = sums.values.get(), sums.non_finite.get()
    for chunk, start, stop, *_ in stretches():
        values = chunk_of(elements, dtype, start, stop).astype(np.float64)
        np.testing.assert_allclose(squares[chunk], np.sum(values**2), rtol=1e-6)
    assert np.flatnonzero(squares).tolist() == CHUNKS
    assert np.flatnonzero(counts).tolist() == [LAST]


@pytest.mark.parametrize(("source", "destination", "offset"), [("float32", "bfloat16", 3), ("bfloat16", "float32", 1)])
def test_chunks_of_8_billion_elements_are_handed_back_where_they_lie(kernels, far_memory, source, destination, offset):
    given, from_there = far_memory(source, 1)
    elements, to_there = far_memory(destination, offset)
    head = -offset % (16 // DTYPES[destination].itemsize)
    fill(given, source, head)
    table = kernels._launches.table(entries_of(tagged(from_there), [SIZE]), CHUNK)
    null = np.uint64(0)
    arguments = (np.int64(CHUNK), null, null, np.float32(0.3))
    where = np.array([tagged(to_there)], np.uint64)
    kernels._launches.over(only(kernels, table, CHUNKS), "hand_back", arguments, where)
    kernels.xp.cuda.runtime.deviceSynchronize()
    for chunk, start, stop, first, last in stretches(head):
        expected = draw.scaled(chunk_of(given, source, start, stop), 0.3, destination)
        draw.assert_same_bits(chunk_of(elements, destination, start, stop), expected)
        if chunk + 1 not in CHUNKS:
            assert not elements[stop:last].any()
        if chunk - 1 not in CHUNKS:
            assert not elements[first:start].any()


def test_factor_1_copies_to_memory_whose_address_differs_by_4_gib_alone(kernels, far_memory):
    elements, buffer = far_memory("float32")
    elements[:500] = draw.random_array(1, 500)
    kernels.scale([buffer.part(0, 500)], np.float32(1), [buffer.part(2**30, 2**30 + 500)])
    kernels.xp.cuda.runtime.deviceSynchronize()
    draw.assert_same_bits(elements[2**30 : 2**30 + 500], elements[:500])


@pytest.mark.parametrize("index", [2**30 + 1, 2**31 + 777, 2**32 - 1, 2**32 + 5, 2**33, SIZE - 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bad_element_is_found_and_shown_wherever_it_lies(kernels, far_memory, index, dtype):
    elements, buffer = far_memory(dtype)
    elements[index] = draw.storage_bits(np.array(-np.inf, draw.DTYPES[dtype])).view(DTYPES[dtype].storage)[0]
    sums = kernels.partial_sums([SIZE])
    squares, counts = np.zeros(LAST + 1), np.zeros(LAST + 1, np.uint32)
    squares[index // CHUNK], counts[index // CHUNK] = np.inf, 1
    sums.values.set(squares)
    sums.non_finite.set(counts)
    verdict = status_of(finalise(kernels, [buffer], sums, ClipPlan((0,), (1.0,)), 1.0, zero_if_bad=False))
    assert (verdict.bad_component, verdict.bad_index, verdict.non_finite) == (0, index, 1)
    assert verdict.bad_value == -np.inf


def test_every_chunk_of_8_billion_elements_is_in_the_norm(kernels):
    sums = kernels.partial_sums([SIZE, 1])
    squares = np.zeros(LAST + 2)
    squares[[0, 2**31 // CHUNK, 2**32 // CHUNK, LAST]] = 1.0, 4.0, 16.0, 64.0
    squares[LAST + 1] = 144.0
    sums.values.set(squares)
    decision = finalise(kernels, None, sums, ClipPlan((0, 0), (1.0,)), 1.0, zero_if_bad=False)
    assert [float(norm) for norm in decision.component_norms] == [85**0.5, 12.0]
    assert float(decision.norm) == 229**0.5


def test_table_of_8_billion_elements_has_a_row_for_each_chunk():
    entries = entries_of(0, [1, SIZE, 5], [0, 1, 2])
    rows = _rows_of(entries, CHUNK)
    assert rows["entry"].tolist() == [0, *[1] * (LAST + 1), 2]
    assert rows["chunk"].tolist() == [0, *range(LAST + 1), 0]
    assert entries["size"].tolist() == [1, SIZE, 5]
