"""The GPU's door: what comes in without a copy, and what is refused by name before any launch."""

import gc
import itertools
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import strategies as draw
from backends import available
from devices import assign, bits_of, churned, nothing_is_launched, on_host, put_all, raw, synchronize
from producers import Producer

from gradengine import GradientEngine, GradientLayout, RawBuffer, clip_by_global_norm
from gradengine.arrays.device import device_of
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch

HOST_MEMORY = np.ones(7, np.float32)
SMALL = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})


def new_engine(backend, **options):
    return GradientEngine(SMALL, backend.kernels, **{"max_norm": None, **options})


def values_of(seed=0, dtype="float32"):
    return draw.random_gradients(seed, SMALL.slots, dtype)


class Interface:
    """An array that says where it lies by `__cuda_array_interface__` alone."""

    def __init__(self, array, **change):
        said = dict(array.__cuda_array_interface__)
        self.__cuda_array_interface__ = {**said, **change}
        self.owner = array


class Forwarding:
    """A framework's tensor: it exports by DLPack alone, and notes what it was asked for."""

    def __init__(self, array, knows_versions=True):
        self.array, self.knows_versions, self.asked = array, knows_versions, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.knows_versions and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.asked.append(options)
        return self.array.__dlpack__(stream=options["stream"])


def producer(array, **fields):
    """A capsule made by hand for memory on the device; `array` must outlive it."""
    stands_for = np.empty(array.shape, array.dtype)
    return Producer(stands_for, **{"data": array.data.ptr, "device": (2, array.device.id), **fields})


def pointer_to(device, array):
    return raw(device.kernels.device.view(array, "array"))


WAYS = {
    "the device's own": lambda device, array: array,
    "pointer": pointer_to,
    "pointer on 'cuda'": lambda device, array: raw(
        device.kernels.device.view(array, "array"), device=device.kernels.device.name.removesuffix(":0")
    ),
    "DLPack": lambda device, array: Forwarding(array),
    "DLPack before 1.0": lambda device, array: Forwarding(array, knows_versions=False),
    "versioned capsule": lambda device, array: producer(array),
    "unversioned capsule": lambda device, array: producer(array, versioned=False),
    "managed memory": lambda device, array: producer(array, device=(13, array.device.id)),
    "no strides": lambda device, array: producer(array, strides=None),
    "CUDA array interface": lambda device, array: Interface(array),
    "CUDA array interface with strides": lambda device, array: Interface(array, strides=array.strides),
}
UNVERSIONED = {"DLPack", "DLPack before 1.0", "unversioned capsule"}  # which are taken for read-only


class TestZeroCopy:
    @pytest.mark.parametrize("way", WAYS)
    def test_the_same_memory_by_every_way_in_every_dtype_and_shape(self, device, way):
        for dtype, shape in itertools.product(draw.DTYPES, [(), (1,), (0,), (3, 0, 2), (2, 1, 3)]):
            array = device.put(draw.random_array(0, shape, dtype))
            if dtype == "bfloat16" and way.startswith("CUDA array interface"):  # which has no name for it
                with pytest.raises(BufferRefused, match="got void16"):
                    device.kernels.device.view(WAYS[way](device, array), "w")
                continue
            with nothing_is_launched(device):
                view = device.kernels.device.view(WAYS[way](device, array), "w")
            assert (view.pointer, view.dtype, view.size) == (array.data.ptr, dtype, math.prod(shape))
            assert view.shape in {shape, (view.size,)}  # a raw pointer has no shape but its size
            assert (view.writable, view.device) == (way not in UNVERSIONED, device.kernels.device.name)

    @pytest.mark.parametrize("way", sorted(WAYS.keys() - UNVERSIONED))
    def test_a_step_reads_and_writes_there(self, device, way):
        values = values_of(0, "float16")
        sources = put_all(device, values)
        destinations = put_all(device, [np.zeros(v.shape, v.dtype) for v in values])
        engine = new_engine(device)
        engine.add([WAYS[way](device, array) for array in sources])
        engine.step(out=[WAYS[way](device, array) for array in destinations])
        for value, got in zip(values, destinations, strict=True):
            draw.assert_same_bits(on_host(got), value)

    def test_byte_offsets_and_slices(self, device):
        array = device.put(np.arange(8, dtype=np.float32))
        assert device.kernels.device.view(producer(array[:5], byte_offset=8), "w").pointer == array.data.ptr + 8
        for source in (array[3:], Forwarding(array[3:]), Interface(array[3:])):
            view = device.kernels.device.view(source, "w")
            assert (view.pointer, view.size) == (array.data.ptr + 12, 5)

    def test_memory_lives_as_long_as_the_view(self, device):
        values = draw.random_array(0, 1000)
        for way in WAYS.values():
            array = device.put(values)
            view = device.kernels.device.view(way(device, array), "w")
            if isinstance(view.owner, tuple) and isinstance(view.owner[1], Producer):
                continue  # a capsule made by hand keeps nothing
            del array
            gc.collect()
            churned(device)
            draw.assert_same_bits(device.get(view), values)


class TestStreams:
    """What a producer is told of the stream that will read its memory."""

    @pytest.mark.parametrize("knows_versions", [True, False])
    def test_the_default_stream_is_1_and_another_its_handle(self, device, knows_versions):
        version = {"max_version": (1, 0)} if knows_versions else {}
        null, own = device.xp.cuda.Stream.null, device.xp.cuda.Stream(non_blocking=True)
        for stream, number in ((null, 1), (own, own.ptr)):
            tensor = Forwarding(device.put(np.ones(3, np.float32)), knows_versions)
            with stream:
                device.kernels.device.view(tensor, "w")
            assert tensor.asked == [{"stream": number, **version}]
        own.synchronize()

    def test_a_capture_asks_for_no_ordering(self, device):
        values = values_of()
        tensors = [Forwarding(array) for array in put_all(device, values)]
        engine = new_engine(device)
        with engine.capture() as graph:
            engine.add(tensors)
            engine.step()
        assert [asked["stream"] for tensor in tensors for asked in tensor.asked] == [-1] * 3
        result = graph.replay()
        assert list(bits_of(result).values()) == [value.tobytes() for value in values]

    @pytest.mark.parametrize("has_pointer", [True, False])
    @pytest.mark.parametrize("hold", [1, 2])
    def test_work_waits_for_the_producers_stream(self, device, has_pointer, hold):
        """A gradient that another stream is still writing: the export orders it before our own, in every window."""
        xp, engine = device.xp, new_engine(device, hold=hold)
        producing = xp.cuda.Stream(non_blocking=True)

        class OnItsStream(Forwarding):
            def __dlpack__(self, **options):
                with producing:
                    return super().__dlpack__(**options)

        if has_pointer:  # as torch's tensors have one
            OnItsStream.data_ptr = lambda tensor: tensor.array.data.ptr
        arrays = put_all(device, [np.zeros(slot.shape, np.float32) for slot in SMALL.slots])
        tensors = [OnItsStream(array) for array in arrays]
        for window in range(3):
            values = values_of(window)
            fresh = put_all(device, values)
            xp.cuda.runtime.deviceSynchronize()
            with producing:
                for array, value in zip(arrays, fresh, strict=True):
                    assign(array, value)
            engine.add(tensors)
            assert list(bits_of(engine.step()).values()) == [value.tobytes() for value in values]


def in_place_of_the_second(device, source):
    """A micro-batch whose second gradient is that."""
    first, _, last = put_all(device, values_of())
    return [first, source, last]


def seven(device, dtype=np.float32):
    return device.put(np.ones(7, dtype))


def pointer_to_pinned_memory(device):
    memory = device.xp.cuda.alloc_pinned_memory(64)
    return RawBuffer(memory.ptr, 7, "float32", device.kernels.device.name, owner=memory)


class Unexportable:
    def __init__(self, ordinal):
        self.ordinal = ordinal

    def __dlpack_device__(self):
        return 2, self.ordinal

    def __dlpack__(self, **options):
        raise BufferError("requires grad")


def ours(pointer):
    """A pointer that is said to be the device's."""
    return lambda device: RawBuffer(pointer, size=7, dtype="float32", device=device.kernels.device.name)


def pointer(**change):
    return lambda device: raw(device.kernels.device.view(seven(device), "x"), **change)


def interface(dtype=np.float32, **change):
    return lambda device: Interface(seven(device, dtype), **change)


def tensor(**fields):
    return lambda device: producer(seven(device), **fields)


REFUSED = {
    "a NumPy array": (lambda d: np.ones(7, np.float32), "got cpu, expected cuda:0"),
    "a NumPy scalar": (lambda d: np.float32(1), "got cpu|is not an array on a GPU: got float32"),
    "a list": (lambda d: [1.0] * 7, "got list, expected an array on cuda:0"),
    "a pointer of the host's": (lambda d: RawBuffer(HOST_MEMORY.ctypes.data, 7, "float32"), "got cpu"),
    "a pointer to another device": (pointer(device="cuda:7"), "got cuda:7"),
    "host memory said to be the device's": (ours(HOST_MEMORY.ctypes.data), "not entirely on cuda:0"),
    "pinned memory said to be the device's": (pointer_to_pinned_memory, "not entirely on cuda:0"),
    "a pointer with too many elements": (pointer(size=1 << 44), "not entirely on cuda:0: .* 70368744177664 bytes"),
    "the wrong shape": (lambda d: d.put(np.ones(8, np.float32)), r"the wrong shape: got \(8,\), expected"),
    "a strided array": (lambda d: d.put(np.ones((7, 2), np.float32))[:, 0], r"not contiguous: .* strides \(2,\)"),
    "a strided tensor": (lambda d: Forwarding(d.put(np.ones((7, 2), np.float32))[:, 0]), "not contiguous"),
    "a strided interface": (interface(shape=(7,), strides=(8,)), r"not contiguous: .* \(2,\)"),
    "an interface between elements": (interface(shape=(7,), strides=(6,)), "not contiguous"),
    "float64": (lambda d: seven(d, np.float64), "got float64"),
    "uint16": (lambda d: seven(d, np.uint16), "got uint16"),  # bf16's storage
    "a float64 tensor": (lambda d: Forwarding(seven(d, np.float64)), "got float64"),
    "a float64 interface": (interface(np.float64), "got float64"),
    "an interface in foreign byte order": (interface(typestr=">f4"), "unsupported dtype"),
    "a masked interface": (lambda d: Interface(seven(d), mask=seven(d, np.int8)), "is a masked array"),
    "an interface of nothing": (interface(data=(0, False)), "got pointer 0x0, size 7"),
    "another device's tensor": (tensor(device=(2, 7)), "got cuda:7, expected cuda:0"),
    "a tensor that lies of its device": (
        lambda d: producer(seven(d), device=(2, 7), claims=(2, d.kernels.ordinal)),
        "got cuda:7, expected cuda:0",
    ),
    "a tensor on the host": (lambda d: Producer(HOST_MEMORY), "got cpu"),
    "an AMD GPU's": (tensor(device=(10, 0)), "got rocm:0"),
    "another DLPack": (tensor(major=2), "got version 2"),
    "a used capsule": (tensor(name=b"used_dltensor"), "DLPack capsule"),
    "a tensor of nothing": (tensor(data=None), "got pointer 0x0, size 7"),
    "a tensor that its framework keeps": (lambda d: Unexportable(d.kernels.ordinal), "BufferError: requires grad"),
}


class TestRefused:
    @pytest.mark.parametrize("what", list(REFUSED))
    def test_a_gradient_or_destination_is_named_and_nothing_is_launched(self, device, what):
        engine, (make, message) = new_engine(device, hold=2), REFUSED[what]
        refused = pytest.raises(
            (BufferRefused, LayoutMismatch),
            match=rf"(?s)'layers\.1\.w'.*({message.replace('cuda:0', device.kernels.device.name)})",
        )
        values, gradients = values_of(1), in_place_of_the_second(device, make(device))
        with nothing_is_launched(device), refused:
            engine.add(gradients)
        assert engine.accumulator.accumulated_count == 0
        engine.add(put_all(device, values))
        with nothing_is_launched(device), pytest.raises((BufferRefused, LayoutMismatch), match=r"'layers\.1\.w'"):
            engine.step(out=gradients)
        assert list(bits_of(engine.step()).values()) == [value.tobytes() for value in values]

    @pytest.mark.parametrize(
        "make",
        [
            lambda d, array: raw(d.kernels.device.view(array, "x"), writable=False),
            lambda d, array: producer(array, flags=1),
            lambda d, array: Interface(array, data=(array.data.ptr, True)),
        ],
        ids=["pointer", "DLPack", "interface"],
    )
    def test_what_is_read_only_is_a_source_but_no_destination(self, device, make):
        engine, values = new_engine(device), values_of()
        arrays, kept = put_all(device, values), seven(device)
        engine.add([make(device, array) for array in arrays])
        out = in_place_of_the_second(device, make(device, kept))
        with nothing_is_launched(device), pytest.raises(BufferRefused, match=r"'layers\.1\.w' is read-only"):
            engine.step(out=out)
        assert (on_host(kept) == 1).all()
        assert list(bits_of(engine.step()).values()) == [value.tobytes() for value in values]

    @pytest.mark.parametrize("way", ["the device's own", "pointer", "DLPack", "CUDA array interface"])
    def test_on_an_engine_of_the_cpu(self, device, way):
        engine, (_, source, _) = GradientEngine(SMALL), put_all(device, values_of())
        first, _, last = values_of()
        with nothing_is_launched(device), pytest.raises(BufferRefused) as caught:
            engine.add([first, WAYS[way](device, source), last])
        assert "component 'layers.1.w' " in str(caught.value)
        assert device.kernels.device.name in str(caught.value) or "is not an array" in str(caught.value)
        assert engine.accumulator.accumulated_count == 0


def read_by_an_engine(device, source):
    """A micro-batch of that one gradient, through a step."""
    engine = GradientEngine(GradientLayout.of([(7,)]), device.kernels, max_norm=None)
    engine.add([source])
    return on_host(engine.step().gradients["0"]).tolist()


def queue_copy(device, target, source, stream):
    runtime = device.kernels.xp.cuda.runtime
    runtime.memcpyAsync(target.data.ptr, source.data.ptr, target.nbytes, runtime.memcpyDeviceToDevice, stream)


class TestStreamsOfInterfaces:
    """What numba and others say of the stream that they work on."""

    @pytest.mark.parametrize(
        "said", [{"version": 2}, *({"version": 3, "stream": stream} for stream in (None, 0, 1))], ids=str
    )
    def test_by_number_or_not_at_all(self, device, said):
        source = Interface(device.put(np.full(7, 3, np.float32)))
        source.__cuda_array_interface__.pop("stream", None)
        source.__cuda_array_interface__.update(said)
        synchronize(device)
        assert read_by_an_engine(device, source) == [3] * 7

    def test_by_a_handle(self, device):
        array, threes = device.put(np.zeros(7, np.float32)), device.put(np.full(7, 3, np.float32))
        stream = device.xp.cuda.Stream(non_blocking=True)
        synchronize(device)
        queue_copy(device, array, threes, stream.ptr)
        assert read_by_an_engine(device, Interface(array, version=3, stream=np.int64(stream.ptr))) == [3] * 7

    @pytest.mark.parametrize("stream", [-1, 1 << 63, pytest.param(10**5000, id="a huge one"), 2.5, "7", [7]])
    def test_what_is_no_stream_is_refused(self, device, stream):
        said = Interface(seven(device), version=3, stream=stream)
        with nothing_is_launched(device), pytest.raises(CallerError, match="not a CUDA stream: got"):
            device.kernels.device.view(said, "w")

    def test_a_handle_of_nothing_is_refused(self, emulated):
        """On a GPU the driver need not find out."""
        said = Interface(seven(emulated), version=3, stream=0x7EADBEEF0)
        with pytest.raises(CallerError, match=r"not a stream of cuda:0 .*: got handle 0x7eadbeef0"):
            emulated.kernels.device.view(said, "w")


class TestTwoDevices:
    """What lies on one device, or is worked on there, and an engine on the other."""

    @pytest.fixture
    def devices(self, device):
        return device, available("cupy" if device.kernels.ordinal else "cupy-other")

    def test_arrays_of_the_other_are_refused_by_name(self, devices):
        mine, other = devices
        for way in WAYS.values():
            array = seven(other)  # which a capsule made by hand does not keep
            self.refused(mine, way(other, array), other.kernels.device.name)

    def test_a_pointer_to_the_others_memory_that_is_called_ours_is_refused(self, devices):
        mine, other = devices
        pointer = raw(other.kernels.device.view(seven(other), "x"), device=mine.kernels.device.name)
        self.refused(mine, pointer, f"memory of {other.kernels.device.name}")

    def refused(self, mine, source, lies_on):
        engine, gradients = new_engine(mine), in_place_of_the_second(mine, source)
        with nothing_is_launched(mine), pytest.raises(BufferRefused, match=r"'layers\.1\.w' ") as caught:
            engine.add(gradients)
        assert lies_on in caught.value.got.replace("cuda_managed", "cuda")
        assert mine.kernels.device.name in str(caught.value)

    @pytest.mark.parametrize("way", ["interface", "pointer"])
    def test_a_stream_of_the_other_is_waited_for(self, devices, way):
        """CuPy names the current device's stream, wherever the array lies."""
        mine, other = devices
        array, threes = (mine.put(np.full(7, value, np.float32)) for value in (0, 3))
        with other.kernels.device.active():
            stream = other.kernels.xp.cuda.Stream(non_blocking=True)
        synchronize(mine)
        with other.kernels.device.active(), stream:
            queue_copy(mine, array, threes, stream.ptr)
            said = (
                Interface(array) if way == "interface" else raw(mine.kernels.device.view(array, "x"), stream=stream.ptr)
            )
        assert way == "pointer" or said.__cuda_array_interface__["stream"] == stream.ptr
        assert read_by_an_engine(mine, said) == [3] * 7

    def test_a_stream_of_the_other_waits_for_our_work(self, devices):
        mine, other = devices
        engine, array = new_engine(mine), mine.put(np.ones(7, np.float32))
        nans = mine.put(np.full(7, np.nan, np.float32))
        with other.kernels.device.active():
            stream = other.kernels.xp.cuda.Stream(non_blocking=True)
        gradients = in_place_of_the_second(mine, raw(mine.kernels.device.view(array, "x"), stream=stream.ptr))
        synchronize(mine)
        engine.add(gradients)
        with other.kernels.device.active():
            queue_copy(mine, array, nans, stream.ptr)
            stream.synchronize()
        assert (on_host(engine.step().gradients["layers.1.w"]) == 1).all()

    def test_what_an_interface_alone_says_is_worked_on_where_it_lies(self, devices):
        for device in devices:
            array = device.put(np.full(4, 3, np.float32))
            synchronize(device)
            assert float(clip_by_global_norm({"w": Interface(array)}, 3.0)) == 6
            assert on_host(array).tolist() == pytest.approx([1.5] * 4)


class TestDeviceOf:
    def test_arrays_there(self, device):
        array = device.put(np.ones(3, np.float32))
        for source in (array, Forwarding(array), producer(array), Interface(array)):
            assert device_of(source) == device.kernels.device.name
        assert device_of(pointer_to(device, array)) == device.kernels.device.name

    def test_what_the_host_takes_or_refuses_and_what_says_where_it_lies(self):
        for source in (np.ones(3), np.float32(1), [1.0], None, object(), Producer(HOST_MEMORY)):
            assert device_of(source) == "cpu"
        assert device_of(RawBuffer(4096, 1, "float32", "cuda:3")) == "cuda:3"
        assert device_of(Producer(HOST_MEMORY, device=(2, 5))) == "cuda:5"

    def test_the_driver_is_asked_of_an_interface_before_anybody_has_imported_its_library(self, monkeypatch, tmp_path):
        """Else what is on another device is worked on by the first one's kernels."""
        (tmp_path / "cupy.py").write_text(
            "from types import SimpleNamespace as Of\n"
            "cuda = Of(runtime=Of(pointerGetAttributes=lambda pointer: Of(type=2, device=pointer // 4096)))\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "cupy", None)  # put back at the end, whatever is imported meanwhile
        del sys.modules["cupy"]
        assert device_of(SimpleNamespace(__cuda_array_interface__={"data": (3 * 4096, False)})) == "cuda:3"
