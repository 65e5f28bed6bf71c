"""What arrays and pointers become: parts, overlaps, and owners that are gone."""

import mmap
import weakref
from multiprocessing import shared_memory
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradengine.arrays.buffer import Buffer, RawBuffer, freed, overlapping, refuse_read_only
from gradengine.arrays.host import host_buffer
from gradengine.arrays.streams import NamedStream
from gradengine.errors import BufferRefused


def test_a_part_is_of_the_same_memory():
    whole = Buffer(4096, 8, "float32", (2, 4), False, "owner", "cuda:1", producer=NamedStream(7))
    part = whole.part(2, 5)
    assert (part.pointer, part.size, part.nbytes, part.shape) == (4096 + 8, 3, 12, (3,))
    assert (part.owner, part.device, part.producer, part.writable) == ("owner", "cuda:1", NamedStream(7), False)
    array = np.arange(5, dtype=np.float16)
    assert host_buffer(array, "w").part(1, 4).data.view(np.float16).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"dtype": dtype}, f"got {said}") for dtype, said in (("fp32", "fp32"), (np.float64, "float64"))),
        ({"dtype": ["float32"]}, r"got \['float32'\]"),
        ({"dtype": np.dtype(">f4")}, "got float32 in foreign byte order"),
        *(
            ({"pointer": at}, f"got pointer {said}")
            for at, said in ((0, "0x0"), (16, "0x10"), (-8, "-0x8"), (None, "None"))
        ),
        *(({"pointer": at}, "valid address") for at in (1 << 64, "a", 16.0)),
        *(({"size": size}, "valid address") for size in (1 << 61, 10**30, -1, 3.0, None)),
        ({"pointer": 4098}, "got pointer 0x1002, .* a multiple of 4"),
        ({"pointer": 4099, "dtype": "bfloat16"}, "a multiple of 2"),
    ],
)
def test_a_raw_pointer_that_cannot_be_is_refused_where_it_is_made(fields, message):
    with pytest.raises(BufferRefused, match=f"RawBuffer .*{message}"):
        RawBuffer(**{"pointer": 4096, "size": 3, "dtype": "float32", **fields})


class TestOverlap:
    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=7))
    @example([(0, 3), (0, 0)])
    def test_found_exactly_where_elements_are_shared(self, stretches):
        memory = np.zeros(30, np.float32)
        buffers = [host_buffer(memory[start : start + size], "w") for start, size in stretches]
        elements = [set(range(start, start + size)) for start, size in stretches]
        shared = {(i, j) for j in range(len(elements)) for i in range(j) if elements[i] & elements[j]}
        assert (overlapping(buffers) in shared) if shared else (overlapping(buffers) is None)

    def test_of_different_dtypes(self):
        memory = np.zeros(4, np.float32)
        halves = memory.view(np.float16)
        assert overlapping([host_buffer(memory[2:], "a"), host_buffer(halves[:5], "b")]) == (0, 1)
        assert overlapping([host_buffer(memory[2:], "a"), host_buffer(halves[:4], "b")]) is None


class Deleted:
    """What a JAX array says when its buffer was donated."""

    def is_deleted(self):
        return True


class Odd:
    @property
    def closed(self):
        raise ValueError("odd")


def released():
    view = memoryview(bytearray(8))
    view.release()
    return view


def closed(memory):
    memory.close()
    if hasattr(memory, "unlink"):
        memory.unlink()
    return memory


def new_shared_memory():
    return shared_memory.SharedMemory(create=True, size=64)


DELETED = Deleted()
FREED = [
    (lambda: weakref.ref(np.zeros(2)), "a weak reference to nothing"),
    (lambda: weakref.proxy(Deleted()), "a weak reference to nothing"),
    (lambda: weakref.ref(DELETED), "a Deleted that is deleted"),
    (lambda: closed(new_shared_memory()), "a SharedMemory that is closed"),
    (lambda: closed(mmap.mmap(-1, 4096)), "a mmap that is closed"),
    (released, "a memoryview that is released"),
    (Deleted, "a Deleted that is deleted"),
    (Odd, r"a Odd that cannot say whether it is \(ValueError: odd\)"),
]


class TestOwners:
    @pytest.mark.parametrize(("owner", "how"), FREED)
    def test_that_are_gone_are_refused_by_name(self, owner, how):
        raw = RawBuffer(np.zeros(2, np.float32).ctypes.data, 2, "float32", owner=owner())
        with pytest.raises(BufferRefused, match=f"component 'w' is in memory that its owner has freed: got {how}"):
            host_buffer(raw, "w")

    @pytest.mark.parametrize(
        "owner", [None, np.zeros(2), SimpleNamespace(buf=None), mmap.mmap(-1, 4096), memoryview(b"ab"), "closed", 3]
    )
    def test_others_are_alive(self, owner):
        assert freed(owner) is None

    def test_shared_memory_that_is_open_is_alive(self):
        memory = new_shared_memory()
        try:
            assert freed(memory) is None
        finally:
            closed(memory)

    def test_one_that_goes_is_noticed_the_next_time(self):
        array = np.ones(2, np.float32)
        raw = RawBuffer(array.ctypes.data, 2, "float32", owner=weakref.ref(array))
        assert host_buffer(raw, "w").data.tolist() == [1, 1]
        del array
        with pytest.raises(BufferRefused, match="a weak reference to nothing"):
            host_buffer(raw, "w")


def test_a_destination_that_requires_grad():
    class Watched:
        requires_grad = True

    buffer = Buffer(4096, 2, "float32", (2,), True, None)
    with pytest.raises(BufferRefused, match=r"'w' requires grad: got Watched, .*pass the parameter's \.grad"):
        refuse_read_only(buffer, Watched(), "w")
