"""What arrays and pointers become: parts and overlaps."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradengine.arrays.buffer import Buffer, RawBuffer, overlapping, refuse_read_only
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


def test_a_destination_that_requires_grad():
    class Watched:
        requires_grad = True

    buffer = Buffer(4096, 2, "float32", (2,), True, None)
    with pytest.raises(BufferRefused, match=r"'w' requires grad: got Watched, .*pass the parameter's \.grad"):
        refuse_read_only(buffer, Watched(), "w")
