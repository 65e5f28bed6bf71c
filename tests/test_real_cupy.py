"""Real CuPy over the stand-in for a GPU (`make test-device`, and nowhere else): it finds what a GPU lets pass."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import host_time
import numpy as np
import pytest
from backends import available
from devices import on_host, put_all, synchronize

from gradengine import GradientEngine, GradientLayout
from gradengine.errors import DeviceFailed
from gradengine.kernels.cuda_device import CudaDevice

pytestmark = pytest.mark.usefixtures("emulated")
ROOT = Path(__file__).parent.parent
LAYOUT = GradientLayout.of({"layers.0.w": (5000,), "head": (7,)})


@pytest.fixture(params=["cupy"])
def device(request):
    return available(request.param)


@pytest.fixture
def faults():
    """What is expected to be done wrong, to be looked at when all is done."""
    from real_cupy.loaded import expected_faults

    with expected_faults() as found:
        yield found
    print(*found, sep="\n")  # where the test failed, by one that it did not mean


def ones(device, value=1.0):
    return put_all(device, [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots])


def python(code, **environment):
    """A Python of its own, with the tests' modules."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **paths, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def a_step_over_two_streams(device):
    """An add on one stream, the step on another: the result, which is 1 everywhere if they are ordered."""
    engine, gradients = GradientEngine(LAYOUT, device.kernels, max_norm=None), ones(device)
    streams = [device.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
    synchronize(device)
    with device.kernels.device.on(streams[0]):
        engine.add(gradients)
    with device.kernels.device.on(streams[1]):
        result = engine.step()
        seen = [on_host(array) for array in result.gradients.values()]
    synchronize(device)
    return all((array == 1).all() for array in seen)


class TestPlantedBugs:
    """In the package, or in a caller: each is seen by the values that come of it, or is a fault."""

    def test_none(self, device):
        assert a_step_over_two_streams(device)

    def test_an_event_that_nobody_waits_for(self, device, lazy, faults, monkeypatch):
        monkeypatch.setattr(device.kernels.xp.cuda.Stream, "wait_event", lambda *_: None)
        try:
            is_right = a_step_over_two_streams(device)
        except (DeviceFailed, device.kernels.xp.cuda.runtime.CUDARuntimeError):  # a table was read before it was there
            is_right = not faults_of(faults)
        assert not is_right

    def test_work_on_a_stream_of_another_device(self, device, faults):
        cupy = device.kernels.xp
        array = device.put(np.ones(7, np.float32))
        with cupy.cuda.Device(1):
            stream = cupy.cuda.Stream(non_blocking=True)
        kernel = cupy.RawKernel('extern "C" __global__ void one(float* x) { x[0] = 1; }', "one")
        handle = SimpleNamespace(__cuda_stream__=lambda: (0, stream.ptr))
        with cupy.cuda.Stream.from_external(handle), pytest.raises(cupy.cuda.driver.CUDADriverError):
            kernel((1,), (1,), (array,))
        assert "a stream of device 1 while 0 is current" in faults_of(faults)

    def test_a_kernel_with_memory_of_another_device(self, device, faults):
        cupy = device.kernels.xp
        with cupy.cuda.Device(1):
            array = cupy.zeros(7, np.float32)
        kernel = cupy.RawKernel('extern "C" __global__ void one(float* x) { x[0] = 1; }', "one")
        with pytest.raises(cupy.cuda.driver.CUDADriverError):
            kernel((1,), (1,), (array.data.ptr,))
        assert "argument 0 has an address in device 1's memory" in faults_of(faults)

    def test_memory_that_is_given_back_under_running_work(self, device, lazy, faults):
        """The pool gives it out again on the stream that it came from; another stream's copy still reads it."""
        xp, stream = device.kernels.xp, device.xp.cuda.Stream(non_blocking=True)
        source, target = device.put(np.ones(5000, np.float32)), device.put(np.zeros(5000, np.float32))
        synchronize(device)
        runtime = xp.cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, kind, stream.ptr)
        del source  # without an event that its own stream waits for
        xp.cuda.get_current_stream().synchronize()
        with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):
            stream.synchronize()
        assert "freed before its turn came" in faults_of(faults)

    def test_pinned_memory_that_is_given_back_under_a_copy(self, device, lazy):
        xp, target = device.kernels.xp, device.put(np.zeros(5000, np.float32))
        synchronize(device)
        pinned = np.frombuffer(xp.cuda.alloc_pinned_memory(20_000), np.float32, 5000)
        pinned[:] = 1
        place = CudaDevice(xp, 0)
        place.copy_to(target, pinned)
        del pinned
        assert np.isnan(on_host(target)).all()

    def test_memory_that_the_driver_has_back_under_a_copy(self, device, faults):
        xp, runtime = device.kernels.xp, device.kernels.xp.cuda.runtime
        stream, target = xp.cuda.Stream(non_blocking=True), device.put(np.zeros(1000, np.float32))
        pointer = runtime.mallocAsync(4000, stream.ptr)
        runtime.freeAsync(pointer, stream.ptr)
        stream.synchronize()
        with pytest.raises(runtime.CUDARuntimeError, match="InvalidValue"):
            runtime.memcpyAsync(target.data.ptr, pointer, 4000, runtime.memcpyDeviceToDevice, stream.ptr)
        assert "said to be device to device is host to device" in faults_of(faults)

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda xp, stream, before: stream.synchronize(), "StreamCaptureUnsupported"),
            (lambda xp, stream, before: xp.cuda.runtime.deviceSynchronize(), "StreamCaptureUnsupported"),
            (lambda xp, stream, before: stream.wait_event(before), "StreamCaptureIsolation"),
        ],
        ids=["wait for the stream", "wait for the device", "wait for what is not captured"],
    )
    def test_an_illegal_call_under_capture(self, device, call, name):
        xp, stream = device.kernels.xp, device.xp.cuda.Stream(non_blocking=True)
        array, before = device.put(np.ones(7, np.float32)), xp.cuda.get_current_stream().record()
        error = xp.cuda.runtime.CUDARuntimeError
        with stream:
            stream.begin_capture()
            array.fill(2)
            with pytest.raises(error, match=name):
                call(xp, stream, before)
            with pytest.raises(error, match="StreamCaptureInvalidated"):
                stream.end_capture()
        assert (on_host(array) == 1).all()

    def test_an_allocation_under_a_capture_that_forbids_it(self, device):
        xp, stream = device.kernels.xp, device.xp.cuda.Stream(non_blocking=True)
        runtime = xp.cuda.runtime
        stream.begin_capture(runtime.streamCaptureModeGlobal)
        with pytest.raises(runtime.CUDARuntimeError, match="StreamCaptureUnsupported"):
            runtime.malloc(512)
        with pytest.raises(runtime.CUDARuntimeError, match="StreamCaptureInvalidated"):
            stream.end_capture()

    def test_the_host_reads_device_memory(self):
        code = "import cupy, ctypes; a = cupy.zeros(3, 'f4'); a.device.synchronize(); print('there', flush=True); {}"
        look = "ctypes.string_at(a.data.ptr, 4); print('seen')"
        done = python(code.format(look), REAL_CUPY_GUARD="1")
        assert (done.returncode < 0, done.stdout) == (True, "there\n"), done.stderr
        assert python(code.format("print(a)"), REAL_CUPY_GUARD="1").stdout == "there\n[0. 0. 0.]\n"

    def test_what_a_kernel_does_wrong_is_a_fault_with_its_name(self, device, lazy, faults):
        xp, array = device.kernels.xp, device.put(np.ones(128_000, np.float32))
        kernel = xp.RawKernel('extern "C" __global__ void beyond(float* x) { x[1 << 28] = 1; }', "beyond")
        kernel((1,), (1,), (array,))
        with pytest.raises(xp.cuda.runtime.CUDARuntimeError, match="LaunchFailure"):
            synchronize(device)
        assert "beyond: EmulatorError" in faults_of(faults)

    def test_what_a_kernel_does_wrong_is_told_by_whoever_asks_for_a_verdict_behind_it(self, device, lazy, faults):
        xp, engine = device.kernels.xp, GradientEngine(LAYOUT, device.kernels)
        engine.add(ones(device))
        synchronize(device)
        xp.RawKernel('extern "C" __global__ void beyond(float* x) { x[1 << 28] = 1; }', "beyond")(
            (1,), (1,), (device.put(np.ones(7, np.float32)),)
        )
        engine.step()
        with pytest.raises(DeviceFailed, match=r"got cudaErrorLaunchFailure: .*; start this process again"):
            any(engine.latest_verdict for _ in range(1000))
        assert "beyond: EmulatorError" in faults_of(faults)

    def test_a_launch_with_too_few_arguments(self, device, faults):
        xp = device.kernels.xp
        code = 'extern "C" __global__ void nine(int a, int b, int c, int d, int e, int f, int g, int h, float* x) {}'
        with pytest.raises(xp.cuda.driver.CUDADriverError):
            xp.RawKernel(code, "nine")((1,), (1,), (np.int32(1),))
        assert "arguments for 9 parameters" in faults_of(faults)


def faults_of(found):
    """All of them that are there by now."""
    from real_cupy.loaded import faults

    found += faults()
    text = "\n".join(found)
    found.clear()
    return text


class TestOrders:
    @pytest.mark.parametrize(("order", "last", "seen"), [("lazy", 0, 1), ("lazy", 1, 2), ("eager", 0, 2)])
    def test_work_is_done_when_it_is_waited_for_or_as_it_comes(self, device, monkeypatch, order, last, seen):
        from real_cupy.loaded import ORDER, seed

        monkeypatch.setenv(ORDER, order)
        seed(0)
        streams, target, _sources = self.written_on_two_streams(device, ordered=False)
        streams[1 - last].synchronize()
        streams[last].synchronize()
        assert int(on_host(target)[0]) == seen

    @staticmethod
    def written_on_two_streams(device, *, ordered):
        """1 on the first, 2 on the second."""
        runtime = device.kernels.xp.cuda.runtime
        streams = [device.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
        target, *sources = [device.put(np.full(1, value, np.int32)) for value in (0, 1, 2)]
        synchronize(device)
        for source, stream in zip(sources, streams, strict=True):
            runtime.memcpyAsync(target.data.ptr, source.data.ptr, 4, runtime.memcpyDeviceToDevice, stream.ptr)
            if ordered:
                streams[1].wait_event(stream.record())
        return streams, target, sources  # which are read until then

    @pytest.mark.parametrize(("ordered", "possible"), [(False, {1, 2}), (True, {2})], ids=["free", "by events"])
    def test_random_work_is_done_in_any_order_that_is_allowed(self, device, monkeypatch, ordered, possible):
        from real_cupy.loaded import ORDER, seed

        monkeypatch.setenv(ORDER, "random")
        seen = set()
        for number in range(20):
            seed(number)
            _, target, _sources = self.written_on_two_streams(device, ordered=ordered)
            synchronize(device)
            seen.add(int(on_host(target)[0]))
        assert seen == possible

    def test_the_default_stream_and_blocking_ones_wait_for_each_other(self, device):
        xp, runtime = device.kernels.xp, device.kernels.xp.cuda.runtime
        blocking = xp.cuda.Stream()
        target, *sources = [device.put(np.full(1, value, np.int32)) for value in (0, 1, 2, 3)]
        synchronize(device)
        for source, stream in zip(sources, (xp.cuda.Stream.null, blocking, xp.cuda.Stream.null), strict=True):
            runtime.memcpyAsync(target.data.ptr, source.data.ptr, 4, runtime.memcpyDeviceToDevice, stream.ptr)
        xp.cuda.Stream.null.synchronize()
        assert int(on_host(target)[0]) == 3


class TestMemory:
    def test_what_the_driver_has_back_is_host_memory_to_it(self, device):
        runtime = device.kernels.xp.cuda.runtime
        pointer = runtime.malloc(1000)
        last = pointer + 999
        assert runtime.pointerGetAttributes(last).type == runtime.memoryTypeDevice
        assert runtime.pointerGetAttributes(last + 1).type == runtime.memoryTypeUnregistered
        runtime.free(pointer)
        assert runtime.pointerGetAttributes(last).type == runtime.memoryTypeUnregistered

    @pytest.mark.parametrize("size", [3, 4, 5])
    def test_a_piece_of_the_pool_ends_where_it_was_asked_to(self, device, size, faults):
        """A copy or a fill of four elements is a fault where there are three, also where the pool gives 512 bytes."""
        from real_cupy.loaded import finish_all

        runtime, sources = device.kernels.xp.cuda.runtime, device.put(np.ones(4, np.float32))
        target = device.xp.empty(size, np.float32)
        synchronize(device)
        stream = device.xp.cuda.Stream(non_blocking=True)
        for queue in (
            lambda: runtime.memcpyAsync(
                target.data.ptr, sources.data.ptr, 16, runtime.memcpyDeviceToDevice, stream.ptr
            ),
            lambda: runtime.memsetAsync(target.data.ptr, 0, 16, stream.ptr),
        ):
            with contextlib.suppress(runtime.CUDARuntimeError):
                queue()
                stream.synchronize()
            assert ("beyond its array" in faults_of(faults)) is (size < 4)
            finish_all()

    def test_fresh_memory_is_nan(self, device):
        array = device.xp.empty(5000, np.float32)
        synchronize(device)
        assert np.isnan(on_host(array)).all()

    def test_memory_of_the_pool_is_nan_when_it_comes_again(self, device):
        array = device.put(np.ones(77, np.float32))
        pointer = array.data.ptr
        synchronize(device)
        del array
        again = [device.xp.empty(77, np.float32) for _ in range(50)]
        assert pointer in [array.data.ptr for array in again]
        assert all(np.isnan(on_host(array)).all() for array in again)

    def test_it_runs_out(self, device):
        import cuda_emulator

        xp = device.kernels.xp
        with cuda_emulator.options(device_memory=1 << 40), pytest.raises(xp.cuda.memory.OutOfMemoryError):
            xp.empty(1 << 42, np.uint8)


def test_a_step_in_managed_memory():
    """The whole pool of it, and unified memory enabled: a read waits, and later steps do not change what it gave."""
    code = """
import cupy
cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
from gradengine import GradientEngine, GradientLayout
runtime, array, read = cupy.cuda.runtime, cupy.ones(5000, "f4"), []
engine = GradientEngine(GradientLayout.of({"w": (5000,)}), "cuda", max_norm=None)
print(runtime.pointerGetAttributes(engine.accumulator.memory.pointer).type == 3)
for value in (2, 3):
    array.fill(value)
    engine.add([array])
    read.append(engine.accumulator.arena.read(engine.step().gradients["w"]))
    engine.check()
print([set(arena.tolist()) for arena in read], engine.latest_verdict.norm)
"""
    done = python(code, CUPY_ENABLE_UMP="1", REAL_CUPY_ORDER="lazy")
    assert done.stdout == f"True\n{[{2.0}, {3.0}]} {3 * 5000**0.5}\n", done.stderr[-2000:]


def test_every_python_of_the_environment_has_it():
    """Processes that tests and tools start, too; nothing of ours is imported before CuPy is."""
    done = python("import sys; print('numpy' in sys.modules); import cupy; print(cupy.arange(3))")
    assert done.stdout == "False\n[0 1 2]\n", done.stderr


def test_host_time_of_each_call(monkeypatch):
    """`make host-time`, for three tensors; in a process of its own kernels stand still."""
    monkeypatch.setattr("host_time.COUNTS", (3,))
    (row,) = host_time.rows(rounds=1).values()
    assert {"add, new arrays", "step(out=)", "replay"} <= row.keys()
    assert all(taken > 0 for taken in row.values())
    code = "from real_cupy.loaded import be_idle; be_idle(); import cupy; print((cupy.zeros(3) + 1).get()[0] != 1)"
    assert python(code).stdout == "True\n"
