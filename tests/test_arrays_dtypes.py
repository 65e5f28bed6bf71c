"""One table of dtypes: rows agree with those whose numbers they hold; one more dtype needs one row more here."""

import re

import ml_dtypes
import numpy as np
import pytest

from gradengine import GradientEngine
from gradengine.arrays import dtypes, host
from gradengine.arrays.buffer import Buffer, RawBuffer
from gradengine.arrays.dtypes import DTYPES, DType, by_dlpack_code, supported_name
from gradengine.errors import BufferRefused
from gradengine.kernels.operands import ADDRESS, OVERWRITE, tagged
from gradengine.kernels.toolchain import arithmetic
from gradengine.layout import GradientLayout

FLOAT8 = DType("float8_e4m3fn", 1, np.dtype("u1"), (10, 8), tag=3)
ARRAY = np.array([1.5, -2, 448], ml_dtypes.float8_e4m3fn)


@pytest.fixture
def with_float8(monkeypatch):
    """A table with one row more, and nothing remembered of the one before or after."""
    monkeypatch.setitem(DTYPES, FLOAT8.name, FLOAT8)
    supported_name.cache_clear()
    yield
    supported_name.cache_clear()


class TestRows:
    @pytest.mark.parametrize("row", [*DTYPES.values(), FLOAT8], ids=lambda row: row.name)
    def test_agree_with_numpy_and_dlpack(self, row):
        assert (row.itemsize, 8 * row.itemsize) == (row.storage.itemsize, row.dlpack[1])
        assert np.dtype(row.name).itemsize == row.itemsize  # of NumPy's or of ml_dtypes'

    def test_have_the_numbers_that_the_kernels_give_them(self):
        (numbers,) = re.findall(r"enum : u32 \{ (FLOAT32.*?) \}", arithmetic())
        assert dict(pair.split(" = ") for pair in numbers.split(", ")) == {
            row.name.upper(): str(row.tag) for row in DTYPES.values()
        }

    def test_dlpack_names_each(self):
        assert [by_dlpack_code(*row.dlpack) for row in DTYPES.values()] == [*DTYPES]
        assert by_dlpack_code(2, 64) is None


class TinygradDType:
    """As tinygrad's prints itself; its `name` is C's."""

    def __init__(self, text, name):
        self.text, self.name = text, name

    def __repr__(self):
        return self.text


class TinygradTensor:
    """No DLPack, no buffer."""

    def __init__(self, array, dtype):
        self.shape, self.dtype, self._array = array.shape, dtype, array

    def numpy(self):
        return self._array.copy()


class TestTinygrad:
    @pytest.mark.parametrize(
        ("text", "name", "ours"),
        [
            ("dtypes.float", "float", "float32"),
            ("dtypes.float32", "f32", "float32"),
            ("dtypes.half", "half", "float16"),
            ("dtypes.bfloat16", "__bf16", "bfloat16"),
            ("dtypes.double", "of C", None),
            ("dtypes.int", "of C", None),
            ("paddle.bfloat16", "BFLOAT16", "bfloat16"),
        ],
    )
    def test_its_dtypes_and_paddles_go_by_their_names_in_python(self, text, name, ours):
        dtype = TinygradDType(text, name)
        assert supported_name(dtype) == ours
        tensor = TinygradTensor(np.ones((2, 3), np.float32), dtype)
        if ours is None:
            with pytest.raises(BufferRefused, match=r"got (float64|int)"):
                GradientLayout.of({"w": tensor})
        else:
            assert GradientLayout.of({"w": tensor}) == GradientLayout.of({"w": (2, 3)})

    def test_its_tensors_are_refused_with_the_way_to_pass_them(self):
        tensor = TinygradTensor(np.ones((2, 3), np.float32), TinygradDType("dtypes.float", "float"))
        engine = GradientEngine(GradientLayout.of({"w": tensor}))
        with pytest.raises(BufferRefused, match=r"'w' is not an array: got TinygradTensor, .*\.numpy\(\)"):
            engine.add({"w": tensor})

    def test_pythons_float_is_no_float32(self):
        assert [dtypes.dtype_name(dtype) for dtype in (float, "float")] == ["float", "float"]


@pytest.mark.parametrize("tag", range(16))
def test_an_address_holds_sixteen_dtypes_apart_from_the_pointer_and_the_overwrite_flag(monkeypatch, tag):
    monkeypatch.setitem(DTYPES, "another", DType("another", 1, np.dtype("u1"), (0, 0), tag))
    for pointer in (0, ADDRESS):
        address = tagged(Buffer(pointer, 3, "another", (3,), True, None))
        assert (address & ADDRESS, address >> 56 & 15, address & OVERWRITE) == (pointer, tag, 0)
        assert (address | OVERWRITE) < 1 << 64


@pytest.mark.usefixtures("with_float8")
class TestOneRowMore:
    def test_is_taken_by_every_way_as_its_bits(self):
        bits = ARRAY.view(np.uint8).tolist()
        view = host.host_buffer(ARRAY, "w")
        assert (view.dtype, view.nbytes, view.data.dtype) == ("float8_e4m3fn", 3, np.uint8)
        assert view.part(1, 3).data.tolist() == bits[1:]
        raw = RawBuffer(ARRAY.ctypes.data, 3, ml_dtypes.float8_e4m3fn, owner=ARRAY)
        assert host.host_buffer(raw, "w").data.tolist() == bits
        assert by_dlpack_code(10, 8) == "float8_e4m3fn"
        assert GradientLayout.of([ARRAY]).slots[0].size == 3
        with pytest.raises(BufferRefused, match="float16, bfloat16 or float8_e4m3fn"):
            host.host_buffer(np.zeros(2), "w")

    def test_is_taken_from_torch(self):
        torch = pytest.importorskip("torch")
        tensor = torch.tensor([1.5, -2, 448]).to(torch.float8_e4m3fn)
        assert host.host_buffer(tensor, "w").data.tolist() == ARRAY.view(np.uint8).tolist()


def test_without_the_row_it_is_refused():
    """So it is the row that makes it one of ours."""
    with pytest.raises(BufferRefused, match="got float8_e4m3fn"):
        host.host_buffer(ARRAY, "w")
