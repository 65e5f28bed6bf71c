"""Views of host memory: no copy, what is refused and how, and that memory stays alive behind a view."""

import gc
import itertools
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import strategies as draw
from producers import NumPyProducer, OlderTorch, Producer

from gradengine.arrays.buffer import RawBuffer, refuse_invalid_address
from gradengine.arrays.host import host_buffer
from gradengine.errors import BufferRefused
from gradengine.kernels import HostKernels

writable_host_buffer = HostKernels(1).device.writable_view  # as a step takes its destinations
ARRAY = np.ones(4, np.float32)


def raw(array, **change):
    fields = {"pointer": array.ctypes.data, "size": array.size, "dtype": array.dtype.name, "owner": array, **change}
    return RawBuffer(**fields)


WAYS = {
    "numpy": lambda array: array,
    "numpy by DLPack": lambda array: Producer(array) if array.dtype == ml_dtypes.bfloat16 else NumPyProducer(array),
    "raw": raw,
    "versioned": Producer,
    "unversioned": lambda array: Producer(array, versioned=False),
    "old-signature": lambda array: Producer(array, versioned=False, old_signature=True),
    "no-strides": lambda array: Producer(array, strides=None),
    "paddle": lambda array: Producer(array, claims=(1, None)),
    "page-locked": lambda array: Producer(array, device=(3, 0)),
    "page-locked for AMD": lambda array: Producer(array, device=(11, 0)),
}
IS_OLD_NUMPY = np.lib.NumpyVersion(np.__version__) < "2.1.0"


def is_unversioned(way, dtype):
    return way in {"unversioned", "old-signature"} or (
        IS_OLD_NUMPY and way == "numpy by DLPack" and dtype != "bfloat16"
    )


class TestZeroCopy:
    @pytest.mark.parametrize("way", WAYS)
    def test_the_same_memory_by_every_way_in_every_dtype_and_shape(self, way):
        for dtype, shape in itertools.product(draw.DTYPES, [(3, 5), (), (1,), (0,), (3, 0, 2), (2, 1, 3)]):
            array = draw.random_array(0, shape, dtype)
            view = host_buffer(WAYS[way](array), "w")
            assert view.writable is not is_unversioned(way, dtype)
            assert view.pointer == array.ctypes.data or not view.size
            assert (view.dtype, view.size, view.nbytes) == (dtype, array.size, array.nbytes)
            assert view.shape in {shape, (view.size,)}  # a raw pointer has no shape but its size
            assert view.data.ndim == 1
            draw.assert_same_bits(view.data, array)
            array[...] = 7
            draw.assert_same_bits(view.data, array)
            view.data[:] = 0
            assert not array.any()

    @pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="NumPy 2.0 exports none")
    def test_read_only_dlpack_of_numpy_itself(self):
        array = np.ones(3, np.float32)
        array.flags.writeable = False
        assert host_buffer(NumPyProducer(array), "w").writable is False

    def test_torchs_older_capsules_can_be_written_also_those_of_its_subclasses(self):
        for kind in (OlderTorch, type("Own", (OlderTorch,), {"__module__": "own"})):
            assert writable_host_buffer(kind(ARRAY), "w").writable

    def test_byte_offset_is_added(self):
        array = np.arange(8, dtype=np.float32)
        assert host_buffer(Producer(array[:5], byte_offset=8), "w").data.tolist() == [2, 3, 4, 5, 6]

    @pytest.mark.parametrize("subclass", [np.matrix, np.recarray])
    def test_subclasses_become_flat_arrays(self, subclass):
        view = host_buffer(np.ones((2, 3), np.float32).view(subclass), "w")
        assert (type(view.data), view.data.shape) == (np.ndarray, (6,))

    def test_strides_of_dimensions_of_size_one_mean_nothing(self):
        array = np.ones((4, 6), np.float32)[:1, :]
        odd = np.lib.stride_tricks.as_strided(array, (1, 6, 1), (999 * 4, 4, 555 * 4))
        for source in (odd, Producer(odd)):
            assert host_buffer(source, "w").pointer == array.ctypes.data

    @pytest.mark.parametrize("dtype", [np.float32, np.dtype("<f4"), SimpleNamespace(name="float32")])
    def test_a_pointers_dtype_by_whoever_names_it(self, dtype):
        assert host_buffer(raw(ARRAY, dtype=dtype), "w").dtype == "float32"

    def test_a_pointers_dtype_and_device_of_torch(self):
        torch = pytest.importorskip("torch")
        array = np.zeros(3, ml_dtypes.bfloat16)
        view = host_buffer(raw(array, dtype=torch.bfloat16, device=torch.device("cpu")), "w")
        assert (view.dtype, view.size) == ("bfloat16", 3)
        assert RawBuffer(0, 0, torch.float16, torch.device("cuda")) == RawBuffer(0, 0, "float16", "cuda:0")

    def test_nothing_may_lie_nowhere_and_numpys_integers_are_addresses(self):
        assert host_buffer(RawBuffer(0, 0, "float32"), "w").size == 0
        view = host_buffer(raw(ARRAY, pointer=np.uint64(ARRAY.ctypes.data), size=np.int64(3)), "w")
        assert view.data.tolist() == [1, 1, 1]

    def test_what_is_read_only_is_a_source_but_no_destination(self, tmp_path):
        array = np.ones(3, np.float32)
        array.tofile(tmp_path / "gradient")
        array.flags.writeable = False
        for source in (
            array,
            np.memmap(tmp_path / "gradient", np.float32, "r"),
            raw(array, writable=False),
            Producer(array, flags=1),
            Producer(array, flags=2),  # a copy for the export, whose producer would never see what is written
            *(Producer(array, versioned=False, old_signature=is_old) for is_old in (False, True)),  # TensorFlow's
            np.float32(1),
        ):
            view = host_buffer(source, "w")
            assert view.writable is False
            assert set(view.data.tolist()) == {1}
            with pytest.raises(BufferRefused, match="destination 'w' is read-only"):
                writable_host_buffer(source, "w")


class Unexported(Producer):
    """Of another device: it is not even asked, as an export may wait for a stream, or take memory."""

    def __dlpack__(self, **options):
        raise AssertionError


class Half:
    def __dlpack__(self, **options):
        raise AssertionError


def saying(method, value):
    """A producer whose method says that, or raises it."""

    def said(self, **_):
        if isinstance(value, Exception):
            raise value
        return value

    return type("Odd", (Producer,), {method: said})(ARRAY)


def strided(array, got, expected):
    message = rf"not contiguous: .*strides \({got}\) .*strides \({expected}\)"
    return [(array, message), (Producer(array), message)]


DEVICES = [(2, "cuda"), (4, "opencl"), (7, "vulkan"), (8, "metal"), (10, "rocm"), (13, "cuda_managed"), (99, "99")]
KINDS = ["int", "uint", "float", "opaque", "bfloat", "complex", "bool"]
REFUSED = [
    *strided(np.ones((4, 6), np.float32)[:, ::2], "6, 2", "3, 1"),
    *strided(np.ones((4, 6), np.float32).T, "1, 6", "4, 1"),
    *strided(np.ones(4, np.float32)[::-1], "-1,", "1,"),
    *strided(np.broadcast_to(np.float32(1), (2, 2)), "0, 0", "2, 1"),
    *strided(np.ones((2, 4), ml_dtypes.bfloat16)[:, :2], "4, 1", "2, 1"),
    (np.ma.masked_array(np.ones(3, np.float32), mask=[0, 1, 0]), "masked"),
    # bf16's storage, but nobody said that it is bf16
    *((np.zeros(3, dtype), f"got {dtype}, expected float32") for dtype in ("float64", "int32", "uint16", "bool")),
    *((np.zeros(3, dtype), f"got {np.dtype(dtype).name} in foreign byte order") for dtype in (">f4", ">f2")),
    (np.zeros(3, [("a", "f4")]), "got void32"),
    (np.zeros(3, ml_dtypes.float8_e5m2), "got float8_e5m2"),
    *((source, f"got {type(source).__name__}") for source in ([1.0], 3.0, "abc", b"abc", {"w": 1}, object())),
    (None, "leave out components"),
    (raw(ARRAY, device="cuda:0"), "got cuda:0, expected cpu"),
    *(
        (Producer(ARRAY, versioned=versioned, **fields), message)
        for versioned in (True, False)
        for fields, message in (
            *(({"device": (code, 1)}, f"got {name}:1, expected cpu") for code, name in DEVICES),
            ({"device": (2, 0), "claims": (1, 0)}, "got cuda:0"),  # the capsule says where the memory is
            ({"lanes": 2}, "got float32 in vectors of 2"),
            *(({"code": code, "bits": 64}, f"got {name}64") for code, name in enumerate(KINDS)),
            ({"code": 1, "bits": 16}, "got uint16"),
            ({"code": 99}, "got code 99 32"),
            ({"data": None}, "got pointer 0x0, size 4"),
            ({"data": None, "byte_offset": 64}, "got pointer 0x0, size 4"),
            ({"byte_offset": 2}, "a multiple of 4"),
            ({"name": b"used_dltensor"}, "got b'used_dltensor'"),
        )
    ),
    (Producer(ARRAY, major=2), "got version 2"),
    (Unexported(ARRAY, claims=(2, 1)), "got cuda:1"),
    # Capsules that would have us read elsewhere.
    (Producer(ARRAY, ndim=-1), "got -1 dimensions"),
    (Producer(ARRAY, ndim=65), "got 65 dimensions"),
    (Producer(ARRAY, shape=None), "got 1 dimensions and a null pointer"),
    (Producer(ARRAY, byte_offset=2**64 - 4), "got pointer 0x1"),
    (Producer(np.empty(1, np.float32), lengths=(2**61,)), "valid address"),
    *((saying("__dlpack__", capsule), "DLPack capsule: got") for capsule in (None, 3, "dltensor", object())),
    *((saying("__dlpack_device__", at), r"\(\w+Error: .*got Odd") for at in (("cpu", 0), (2, None), (1,), 1, None)),
    *(
        (saying("__dlpack__", kind("not exportable")), rf"\({kind.__name__}: '?not exportable'?\)")
        for kind in (BufferError, RuntimeError, NotImplementedError, ValueError, TypeError, KeyError, OSError)
    ),
    (Half(), "__dlpack_device__.* got Half"),
]


class TestRefused:
    @pytest.mark.parametrize(("source", "message"), REFUSED)
    def test_by_the_components_name_and_with_what_is_wrong(self, source, message):
        for resolve in (host_buffer, writable_host_buffer):
            with pytest.raises(BufferRefused, match=f"component 'w' .*{message}"):
                resolve(source, "w")

    def test_an_address_beyond_all_there_are(self):
        with pytest.raises(BufferRefused, match="component 'w' is not at a valid address"):
            refuse_invalid_address(4096, 2**80, 4, "w")

    @pytest.mark.parametrize("module", ["mlx.core", "mlxlike"])
    def test_a_strided_array_names_its_frameworks_call_that_copies(self, monkeypatch, module):
        monkeypatch.setattr(Producer, "__module__", module)
        with pytest.raises(BufferRefused, match="contiguous") as refusal:
            host_buffer(Producer(np.ones((4, 6), np.float32).T), "w")
        assert ("mlx.core.contiguous(array)" in refusal.value.do) == (module == "mlx.core")


class TestOwnership:
    @pytest.mark.parametrize("way", [raw, Producer, lambda a: Producer(a, versioned=False)])
    def test_memory_lives_as_long_as_the_view(self, way):
        array = np.full(1000, 3, np.float32).view(type("Weakable", (np.ndarray,), {}))
        alive, view = weakref.ref(array), host_buffer(way(array), "w")
        del array
        gc.collect()
        assert alive() is not None
        del view
        gc.collect()
        assert alive() is None

    @pytest.mark.parametrize("versioned", [True, False])
    def test_a_capsule_is_freed_once_and_not_before_its_view_and_a_refused_one_too(self, versioned):
        producer = Producer(np.ones(4, np.float32), versioned=versioned)
        view = host_buffer(producer, "w")
        gc.collect()
        assert producer.freed == []
        del view
        gc.collect()
        assert len(producer.freed) == 1
        producer.fields["bits"] = 64
        with pytest.raises(BufferRefused):
            host_buffer(producer, "w")
        gc.collect()
        assert len(producer.freed) == 2
