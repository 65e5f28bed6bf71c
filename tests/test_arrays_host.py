"""Views of host memory: no copy, what is refused and how, and that memory stays alive behind a view."""

import gc
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import strategies as draw
from producers import NumPyProducer, Producer

from gradengine.arrays.buffer import RawBuffer, refuse_invalid_address
from gradengine.arrays.host import host_buffer, in_c_order
from gradengine.errors import BufferRefused, OutOfDeviceMemory
from gradengine.kernels import HostKernels

writable_host_buffer = HostKernels(1).device.writable_view  # as a step takes its destinations


def raw(array, **change):
    fields = {"pointer": array.ctypes.data, "size": array.size, "dtype": array.dtype.name, "owner": array, **change}
    return RawBuffer(**fields)


WAYS = {
    "numpy": lambda array: array,
    "raw": raw,
    "versioned": Producer,
    "unversioned": lambda array: Producer(array, versioned=False),
    "old-signature": lambda array: Producer(array, versioned=False, old_signature=True),
    "no-strides": lambda array: Producer(array, strides=None),
    "page-locked": lambda array: Producer(array, device=(3, 0)),
}


@pytest.fixture(params=list(WAYS))
def way(request):
    return WAYS[request.param]


class TestZeroCopy:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_the_same_memory_by_every_way(self, way, dtype):
        array = draw.random_array(0, (3, 5), dtype)
        view = host_buffer(way(array), "w")
        assert view.pointer == array.ctypes.data
        assert (view.dtype, view.size, view.nbytes) == (dtype, 15, array.nbytes)
        assert view.data.ndim == 1
        draw.assert_same_bits(view.data, array)
        array[1, 2] = 7
        draw.assert_same_bits(view.data, array)

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 1, 3), (1, 1)])
    def test_any_shape(self, way, shape):
        view = host_buffer(way(np.ones(shape, np.float32)), "w")
        assert view.size == int(np.prod(shape))
        assert view.shape in {shape, (view.size,)}  # a raw pointer has no shape but its size

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_written_memory_is_the_callers(self, way, dtype):
        array = np.zeros(4, draw.DTYPES[dtype])
        view = writable_host_buffer(way(array), "w")
        view.data[:] = draw.storage_bits(np.array([1, 2, 3, 4], array.dtype)).view(view.data.dtype)
        assert array.tolist() == [1, 2, 3, 4]

    def test_dlpack_of_numpy_itself(self):
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        view = host_buffer(NumPyProducer(array), "w")
        assert (view.pointer, view.shape, view.writable) == (array.ctypes.data, (2, 3), True)

    @pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="NumPy 2.0 exports none")
    def test_read_only_dlpack_of_numpy_itself(self):
        array = np.ones(3, np.float32)
        array.flags.writeable = False
        assert host_buffer(NumPyProducer(array), "w").writable is False

    def test_byte_offset_is_added(self):
        array = np.arange(8, dtype=np.float32)
        view = host_buffer(Producer(array[:5], byte_offset=8), "w")
        assert view.pointer == array.ctypes.data + 8
        assert view.data.tolist() == [2, 3, 4, 5, 6]

    @pytest.mark.parametrize("subclass", [np.matrix, np.recarray])
    def test_subclasses_become_flat_arrays(self, subclass):
        array = np.ones((2, 3), np.float32)
        view = host_buffer(array.view(subclass), "w")
        assert type(view.data) is np.ndarray
        assert view.data.shape == (6,)

    def test_strides_of_dimensions_of_size_one_mean_nothing(self):
        array = np.ones((4, 6), np.float32)[:1, :]
        odd = np.lib.stride_tricks.as_strided(array, (1, 6, 1), (999 * 4, 4, 555 * 4))
        for source in (odd, Producer(odd)):
            assert host_buffer(source, "w").pointer == array.ctypes.data

    def test_memory_maps(self, tmp_path):
        np.arange(5, dtype=np.float32).tofile(tmp_path / "gradient")
        mapped = np.memmap(tmp_path / "gradient", np.float32, "r")
        assert host_buffer(mapped, "w").data.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(BufferRefused, match="destination 'w' is read-only: got memmap"):
            writable_host_buffer(mapped, "w")


class TestRefusedArrays:
    @pytest.mark.parametrize(
        ("array", "strides"),
        [
            (np.ones((4, 6), np.float32)[:, ::2], r"shape \(4, 3\) with strides \(6, 2\) .* expected strides \(3, 1\)"),
            (np.ones((4, 6), np.float32).T, r"shape \(6, 4\) with strides \(1, 6\) .* expected strides \(4, 1\)"),
            (np.ones((4, 6), np.float32, order="F"), r"strides \(1, 4\) .* expected strides \(6, 1\)"),
            (np.ones(4, np.float32)[::-1], r"strides \(-1,\) .* expected strides \(1,\)"),
            (np.broadcast_to(np.float32(1), (2, 2)), r"strides \(0, 0\) .* expected strides \(2, 1\)"),
            (np.ones((2, 4), ml_dtypes.bfloat16)[:, :2], r"strides \(4, 1\) .* expected strides \(2, 1\)"),
        ],
    )
    def test_not_contiguous(self, array, strides):
        for source in (array, Producer(array)):
            with pytest.raises(BufferRefused, match=f"component 'w' is not contiguous: got .*{strides}"):
                host_buffer(source, "w")

    @pytest.mark.parametrize(
        ("module", "call"),
        [
            (
                "mlx.core",
                r"a contiguous copy, mlx\.core\.contiguous\(array\); .* with copy_strided=True copies gradients itself",
            ),
            ("mlxlike", "a contiguous copy; a GradientEngine on the CPU .*, but destinations must be contiguous"),
        ],
    )
    def test_not_contiguous_names_the_frameworks_call_that_copies(self, monkeypatch, module, call):
        array = np.ones((4, 6), np.float32).T
        monkeypatch.setattr(Producer, "__module__", module)
        with pytest.raises(BufferRefused, match=f"; pass {call}"):
            host_buffer(Producer(array), "w")
        copied = r"; pass a contiguous copy, numpy\.ascontiguousarray\(array\); .* destinations must be"
        for resolve in (host_buffer, writable_host_buffer):
            with pytest.raises(BufferRefused, match=copied):
                resolve(array, "w")

    @pytest.mark.parametrize(
        ("dtype", "got"),
        [
            (np.float64, "float64"),
            (np.int32, "int32"),
            (np.uint16, "uint16"),  # bf16's storage, but nobody said that it is bf16
            (np.complex64, "complex64"),
            (np.bool_, "bool"),
            (">f4", "float32 in foreign byte order"),
            (">f2", "float16 in foreign byte order"),
            (np.dtype([("a", "f4")]), "void32"),
            (object, "object"),
            (ml_dtypes.float8_e5m2, "float8_e5m2"),
        ],
    )
    def test_dtypes(self, dtype, got):
        message = f"component 'w' has an unsupported dtype: got {got}, expected float32, float16 or bfloat16; cast"
        with pytest.raises(BufferRefused, match=message):
            host_buffer(np.zeros(3, dtype), "w")

    @pytest.mark.parametrize("source", [[1.0, 2.0], (1.0,), 3.0, "abc", b"abc", {"w": 1}, object()])
    def test_no_arrays(self, source):
        message = f"component 'w' is not an array: got {type(source).__name__}, expected a NumPy array, .*; pass"
        with pytest.raises(BufferRefused, match=message):
            host_buffer(source, "w")

    def test_none_is_left_out(self):
        with pytest.raises(
            BufferRefused, match=r"is not an array: got NoneType, .*; leave out components that have no gradient"
        ):
            host_buffer(None, "w")

    @pytest.mark.parametrize("way", ["numpy", "dlpack", "torch"])
    def test_too_large_for_a_copy(self, way):
        shape = (1 << 44, 3)  # 192 TiB: more than a process can address
        array = np.lib.stride_tricks.as_strided(np.ones(1, np.float32), shape, (0, 0))
        if way == "torch":
            array = pytest.importorskip("torch").from_dlpack(Producer(array))
        elif way == "dlpack":
            array = Producer(array)
        with pytest.raises(OutOfDeviceMemory, match=r"for a copy of component 'w' \(.*alloc.*; pass it contiguous"):
            in_c_order(array, "w", shape)

    def test_read_only_is_a_source_but_no_destination(self):
        array = np.ones(3, np.float32)
        array.flags.writeable = False
        assert host_buffer(array, "w").writable is False
        for destination in (
            array,
            RawBuffer(array.ctypes.data, 3, "float32", writable=False),
            Producer(array, flags=1),
        ):
            with pytest.raises(BufferRefused, match=r"destination 'w' is read-only: got .*, expected writable memory"):
                writable_host_buffer(destination, "w")


class TestRefusedRawBuffers:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"device": "cuda:0"}, "component 'w' is on another device: got cuda:0, expected cpu"),
            ({"dtype": "float64"}, "an unsupported dtype: got float64"),
            ({"dtype": np.float64}, "an unsupported dtype: got float64"),
            ({"pointer": 1 << 64}, "valid address: got pointer 0x10000000000000000"),
            ({"size": 1 << 61}, "component 'w' is not at a valid address: got pointer 0x"),
            ({"dtype": ["float32"]}, r"an unsupported dtype: got \['float32'\]"),
            ({"size": -1}, "component 'w' is not at a valid address: got pointer .*, size -1, expected .* a size >= 0"),
            ({"size": 3.0}, "component 'w' is not at a valid address: got pointer .*, size 3.0"),
            ({"pointer": 0}, "component 'w' is not at a valid address: got pointer 0x0, size 4"),
            ({"pointer": -8}, "component 'w' is not at a valid address: got pointer -0x8"),
            ({"pointer": None}, "component 'w' is not at a valid address: got pointer None"),
            ({"pointer": 4099}, "component 'w' is not aligned to its elements: got pointer 0x1003, expected .* of 4"),
            ({"pointer": 4099, "dtype": "bfloat16"}, "expected a multiple of 2"),
        ],
    )
    def test_refused(self, change, message):
        with pytest.raises(BufferRefused, match=message):
            host_buffer(raw(np.ones(4, np.float32), **change), "w")

    @pytest.mark.parametrize("dtype", [np.float32, np.dtype("<f4"), SimpleNamespace(name="float32")])
    def test_dtypes_by_whoever_names_them(self, dtype):
        array = np.arange(3, dtype=np.float32)
        assert host_buffer(raw(array, dtype=dtype), "w").dtype == "float32"

    def test_foreign_byte_order_is_no_dtype_of_ours(self):
        array = np.arange(4, dtype=">f4")
        with pytest.raises(BufferRefused, match="unsupported dtype: got float32 in foreign byte order"):
            host_buffer(RawBuffer(array.ctypes.data, 4, array.dtype, owner=array), "w")

    def test_a_copy_is_no_destination(self):
        """What a producer says it copied for the export; it would never see what is written."""
        with pytest.raises(BufferRefused, match="destination 'w' is read-only"):
            writable_host_buffer(Producer(np.zeros(3, np.float32), flags=2), "w")

    def test_dtypes_and_devices_of_torch(self):
        torch = pytest.importorskip("torch")
        array = np.zeros(3, ml_dtypes.bfloat16)
        view = host_buffer(raw(array, dtype=torch.bfloat16, device=torch.device("cpu")), "w")
        assert (view.dtype, view.size) == ("bfloat16", 3)
        assert RawBuffer(0, 0, torch.float16, torch.device("cuda")) == RawBuffer(0, 0, "float16", "cuda:0")

    def test_nothing_may_lie_nowhere(self):
        assert host_buffer(RawBuffer(0, 0, "float32"), "w").size == 0

    def test_numpy_integers(self):
        array = np.arange(4, dtype=np.float32)
        view = host_buffer(raw(array, pointer=np.uint64(array.ctypes.data), size=np.int64(3)), "w")
        assert view.data.tolist() == [0, 1, 2]


class TestRefusedDLPack:
    ARRAY = np.ones(4, np.float32)

    @pytest.mark.parametrize("versioned", [True, False])
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"device": (2, 1)}, "component 'w' is on another device: got cuda:1, expected cpu"),
            ({"device": (13, 0)}, "got cuda_managed:0"),
            ({"device": (10, 2)}, "got rocm:2"),
            ({"device": (99, 0)}, "got 99:0"),
            ({"device": (2, 0), "claims": (1, 0)}, "got cuda:0"),  # the capsule says where the memory is
            ({"lanes": 2}, "got float32 in vectors of 2, expected float32, float16 or bfloat16"),
            ({"bits": 64}, "got float64"),
            ({"code": 0}, "got int32"),
            ({"code": 1, "bits": 16}, "got uint16"),
            ({"code": 6, "bits": 8}, "got bool8"),
            ({"code": 99}, "got code 99 32"),
            ({"data": None}, "component 'w' is not at a valid address: got pointer 0x0, size 4"),
            ({"data": None, "byte_offset": 64}, "component 'w' is not at a valid address: got pointer 0x0, size 4"),
            ({"byte_offset": 2}, "component 'w' is not aligned to its elements"),
            ({"name": b"used_dltensor"}, "component 'w' does not export a DLPack capsule: got b'used_dltensor'"),
        ],
    )
    def test_refused(self, versioned, fields, message):
        with pytest.raises(BufferRefused, match=message):
            host_buffer(Producer(self.ARRAY, versioned=versioned, **fields), "w")

    def test_another_major_version(self):
        with pytest.raises(
            BufferRefused, match="component 'w' exports an unsupported DLPack version: got version 2, expected"
        ):
            host_buffer(Producer(self.ARRAY, major=2), "w")

    def test_memory_of_another_device_is_not_even_exported(self):
        class Unexported(Producer):
            def __dlpack__(self, **options):
                raise AssertionError("an export may wait for a stream, or take memory")

        with pytest.raises(BufferRefused, match="component 'w' is on another device: got cuda:1"):
            host_buffer(Unexported(self.ARRAY, claims=(2, 1)), "w")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"ndim": -1}, "exports an invalid DLPack shape: got -1 dimensions, expected 0 to 64"),
            ({"ndim": 65}, "got 65 dimensions"),
            ({"ndim": 2**31 - 1}, "got 2147483647 dimensions"),
            ({"shape": None}, "got 1 dimensions and a null pointer"),
            ({"byte_offset": 2**64 - 4}, "component 'w' is not at a valid address: got pointer 0x1"),
        ],
    )
    def test_capsules_that_would_have_us_read_elsewhere(self, fields, message):
        with pytest.raises(BufferRefused, match=message):
            host_buffer(Producer(self.ARRAY, **fields), "w")

    @pytest.mark.parametrize("shape", [(2**61,), (2**40, 2**40)])
    def test_more_elements_than_there_are_addresses(self, shape):
        producer = Producer(np.empty(1, np.float32), lengths=shape[:1])
        with pytest.raises(BufferRefused, match="component 'w' is not at a valid address"):
            host_buffer(producer, "w") if len(shape) == 1 else refuse_invalid_address(4096, 2**80, 4, "w")

    @pytest.mark.parametrize("capsule", [None, 3, "dltensor", object()])
    def test_what_is_no_capsule(self, capsule):
        class Wrong(Producer):
            def __dlpack__(self, **options):
                return capsule

        with pytest.raises(
            BufferRefused, match=r"'w' does not export a DLPack capsule: got \w+, expected an unused capsule"
        ):
            host_buffer(Wrong(self.ARRAY), "w")

    @pytest.mark.parametrize("device", [("cpu", 0), (1, None), (1,), 1, None])
    def test_devices_that_are_none(self, device):
        class Lost(Producer):
            def __dlpack_device__(self):
                return device

        with pytest.raises(BufferRefused, match=r"'w' cannot be exported by its framework \(\w+Error: .*: got Lost"):
            host_buffer(Lost(self.ARRAY), "w")

    @pytest.mark.parametrize(
        "refusal",
        [BufferError, RuntimeError, NotImplementedError, ValueError, TypeError, KeyError, OSError, ArithmeticError],
    )
    def test_a_framework_that_refuses(self, refusal):
        class Refusing(Producer):
            def __dlpack__(self, **options):
                raise refusal("not exportable")

        with pytest.raises(BufferRefused, match=r"'w' cannot be exported by its framework \(\w+: '?not exportable'?\)"):
            host_buffer(Refusing(self.ARRAY), "w")

    def test_half_a_producer(self):
        class Half:
            def __dlpack__(self, **options):
                raise AssertionError

        with pytest.raises(BufferRefused, match=r"cannot be exported by its framework .*__dlpack_device__.*: got Half"):
            host_buffer(Half(), "w")


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
    def test_a_capsule_is_freed_once_and_not_before_its_view(self, versioned):
        producer = Producer(np.ones(4, np.float32), versioned=versioned)
        view = host_buffer(producer, "w")
        gc.collect()
        assert producer.freed == []
        del view
        gc.collect()
        assert len(producer.freed) == 1

    def test_a_refused_capsule_is_freed(self):
        producer = Producer(np.ones(4, np.float32), bits=64)
        with pytest.raises(BufferRefused):
            host_buffer(producer, "w")
        gc.collect()
        assert len(producer.freed) == 1


def test_masked_arrays_are_refused():
    masked = np.ma.masked_array(np.ones(3, np.float32), mask=[0, 1, 0])
    with pytest.raises(BufferRefused, match=r"'w' is a masked array"):
        host_buffer(masked, "w")
