"""Real CuPy without a GPU (`make real-cupy`; collected there alone): what goes wrong on a GPU is found here."""

import os
import subprocess
import sys
import threading
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
        except device.kernels.xp.cuda.runtime.CUDARuntimeError:  # a table was read before its addresses were there
            is_right = "out of bounds" not in faults_of(faults)
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

    def test_memory_that_is_given_back_under_running_work(self, device, lazy):
        """The pool gives it out again on the stream that it came from; another stream's kernel still reads it."""
        xp, stream = device.kernels.xp, device.xp.cuda.Stream(non_blocking=True)
        source, target = device.put(np.ones(5000, np.float32)), device.put(np.zeros(5000, np.float32))
        synchronize(device)
        runtime = xp.cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, kind, stream.ptr)
        del source  # without an event that its own stream waits for
        xp.cuda.get_current_stream().synchronize()
        stream.synchronize()
        assert np.isnan(on_host(target)).all()

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
            (lambda xp, stream: stream.synchronize(), "StreamCaptureUnsupported"),
            (lambda xp, stream: xp.cuda.runtime.deviceSynchronize(), "StreamCaptureUnsupported"),
        ],
        ids=["wait for the stream", "wait for the device"],
    )
    def test_an_illegal_call_under_capture(self, device, call, name):
        xp, stream = device.kernels.xp, device.xp.cuda.Stream(non_blocking=True)
        array = device.put(np.ones(7, np.float32))
        error = xp.cuda.runtime.CUDARuntimeError
        with stream:
            stream.begin_capture()
            array.fill(2)
            with pytest.raises(error, match=name):
                call(xp, stream)
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

    def test_waiting_in_a_capture_for_what_is_not_captured(self, device):
        xp, stream = device.kernels.xp, device.xp.cuda.Stream(non_blocking=True)
        event = xp.cuda.get_current_stream().record()
        stream.begin_capture()
        with pytest.raises(xp.cuda.runtime.CUDARuntimeError, match="StreamCaptureIsolation"):
            stream.wait_event(event)

    def test_the_host_looks_before_the_copy_has_come(self, device, lazy):
        xp, source = device.kernels.xp, device.put(np.ones(1000, np.float32))
        synchronize(device)
        pinned = np.frombuffer(xp.cuda.alloc_pinned_memory(4000), np.float32, 1000)
        pinned[:] = 0
        source.get(out=pinned, blocking=False)
        assert not pinned.any()
        synchronize(device)
        assert (pinned == 1).all()

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
        assert "beyond: RuntimeError" in faults_of(faults)

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
        assert "beyond: RuntimeError" in faults_of(faults)

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
    CODE = """
import cupy, numpy as np
a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
array, pinned = cupy.zeros(1, 'i4'), np.frombuffer(cupy.cuda.alloc_pinned_memory(8), 'i4', 2)
cupy.cuda.Device().synchronize()
one, two = (cupy.full(1, value, 'i4') for value in (1, 2))
cupy.cuda.Device().synchronize()
runtime, kind = cupy.cuda.runtime, cupy.cuda.runtime.memcpyDeviceToDevice
runtime.memcpyAsync(array.data.ptr, one.data.ptr, 4, kind, a.ptr)
runtime.memcpyAsync(array.data.ptr, two.data.ptr, 4, kind, b.ptr)
{}
cupy.cuda.Device().synchronize()
print(int(array[0]))
"""

    def test_lazy_work_is_done_when_it_is_waited_for(self):
        assert python(self.CODE.format("b.synchronize(); a.synchronize()"), REAL_CUPY_ORDER="lazy").stdout == "1\n"
        assert python(self.CODE.format("a.synchronize(); b.synchronize()"), REAL_CUPY_ORDER="lazy").stdout == "2\n"

    def test_eager_work_is_done_as_it_comes(self):
        assert python(self.CODE.format("b.synchronize(); a.synchronize()"), REAL_CUPY_ORDER="eager").stdout == "2\n"

    @pytest.mark.parametrize(("ordered", "possible"), [(False, {1, 2}), (True, {2})], ids=["free", "by events"])
    def test_random_work_is_done_in_any_order_that_is_allowed(self, device, monkeypatch, ordered, possible):
        from real_cupy.loaded import ORDER, seed

        monkeypatch.setenv(ORDER, "random")
        runtime = device.kernels.xp.cuda.runtime
        seen = set()
        for number in range(20):
            seed(number)
            streams = [device.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
            target, *sources = [device.put(np.full(1, value, np.int32)) for value in (0, 1, 2)]
            synchronize(device)
            for source, stream in zip(sources, streams, strict=True):
                runtime.memcpyAsync(target.data.ptr, source.data.ptr, 4, runtime.memcpyDeviceToDevice, stream.ptr)
                if ordered:
                    streams[1].wait_event(stream.record())
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

    def test_what_another_thread_drops_goes_back_on_the_stream_it_came_from(self):
        """A thread's default stream has one handle in all: by that, NaN came on the stream of whoever dropped it."""
        code = """
import cupy, threading
from concurrent.futures import ThreadPoolExecutor
def fill(value):
    array = cupy.empty(77, "f4")
    array.fill(value)
    return array
with ThreadPoolExecutor(1) as thread:
    first = thread.submit(fill, 1).result()
    busy, pointer = fill(0), first.data.ptr
    del first
    arrays = thread.submit(lambda: [fill(2) for _ in range(5)]).result()
    assert pointer in [array.data.ptr for array in arrays]
    thread.submit(cupy.cuda.Stream.ptds.synchronize).result()
    cupy.cuda.Stream.ptds.synchronize()
    print([float(array[0]) for array in arrays])
"""
        done = python(code, CUPY_CUDA_PER_THREAD_DEFAULT_STREAM="1", REAL_CUPY_ORDER="lazy")
        assert done.stdout == f"{[2.0] * 5}\n", done.stderr[-2000:]

    def test_streams_that_are_gone_leave_room(self):
        """Their memory is nobody else's in the pool, and of mappings a process has few: it ended by a signal."""
        code = "import cupy\nfor _ in range(34_000):\n with cupy.cuda.Stream(non_blocking=True): cupy.empty(7)\n{}"
        done = python(code.format("print('there')"))
        assert (done.returncode, done.stdout) == (0, "there\n"), done.stderr[-2000:]

    def test_more_pieces_than_a_process_may_map(self, device):
        runtime, pieces = device.kernels.xp.cuda.runtime, []
        with pytest.raises(runtime.CUDARuntimeError, match="MemoryAllocation"):
            pieces.extend(runtime.malloc(512) for _ in range(30_000))
        for piece in pieces:
            runtime.free(piece)
        assert len(pieces) > 10_000

    def test_what_a_test_leaves_unused_is_given_back(self, device):
        from real_cupy.pools import give_back_unused

        xp = device.kernels.xp
        pool = xp.get_default_memory_pool()
        with xp.cuda.Stream(non_blocking=True):
            xp.empty(1 << 20)
        assert pool.free_bytes() >= 8 << 20
        give_back_unused()
        assert pool.free_bytes() < 8 << 20

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


def test_the_current_device_is_known_while_another_thread_waits_for_work(device):
    """CuPy asks for it amid work of its own, holding Python's lock, which no driver would let others have there."""
    xp, begun, known, seen = device.kernels.xp, threading.Event(), threading.Event(), []

    def work_that_waits(_):
        begun.set()
        seen.append(known.wait(30))

    def work():
        stream = xp.cuda.Stream(non_blocking=True)
        stream.launch_host_func(work_that_waits, None)
        stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    with xp.cuda.Device(0):
        assert xp.cuda.runtime.getDevice() == 0
        known.set()
    thread.join(60)
    assert seen == [True]


def test_every_python_of_the_environment_has_it():
    """Processes that tests and tools start, too; nothing of ours is imported before CuPy is."""
    done = python("import sys; print('numpy' in sys.modules); import cupy; print(cupy.arange(3))")
    assert done.stdout == "False\n[0 1 2]\n", done.stderr


def test_host_time_of_each_call(monkeypatch):
    """`make host-time`, for three tensors; in a process of its own kernels stand still."""
    monkeypatch.setattr("host_time.COUNTS", (3,))
    (row,) = host_time.rows(rounds=1).values()
    assert {"add, new arrays", "step(out=)", "repoint"} <= row.keys()
    assert all(taken > 0 for taken in row.values())
    code = "from real_cupy.loaded import be_idle; be_idle(); import cupy; print((cupy.zeros(3) + 1).get()[0] != 1)"
    assert python(code).stdout == "True\n"


class TestPlugin:
    """What a run leaves out, it says; and it leaves out only what no mode could run."""

    @pytest.mark.parametrize("processes", [0, 1])
    def test_a_test_that_is_kept_out_is_named_with_its_reason(self, processes, tmp_path):
        path = tmp_path / "test_kept_out.py"
        path.write_text(
            "import pytest\n\n@pytest.mark.not_on_real_cupy('cuBLAS')\ndef test_product(device):\n    pass\n"
        )
        plugin = ["-p", "real_cupy.plugin", "-o", "markers=not_on_real_cupy"]
        told = python(f"import pytest; pytest.main(['-q', '-n', '{processes}', *{plugin}, {str(path)!r}])").stdout
        assert "NOT RUN, since real CuPy without a GPU cannot: 1\n" in told
        assert "test_kept_out.py::test_product needs cuBLAS" in told

    @pytest.mark.parametrize(
        "mode",
        [{"REAL_CUPY_ORDER": "eager"}, {"REAL_CUPY_STREAM": "own"}, {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}],
    )
    def test_every_mode_runs_the_same_tests(self, mode):
        """With a device that is not the current one, with what the host has not waited for, of the default stream."""
        code = "import pytest; pytest.main(['-q', '--collect-only', *{files}])"
        files = [f"tests/test_{name}.py" for name in ("arrays_device", "kernels_streams", "real_cupy")]
        told = [python(code.format(files=files), **order).stdout for order in ({"REAL_CUPY_ORDER": "lazy"}, mode)]
        tests = [[line for line in text.splitlines() if "::" in line] for text in told]
        assert tests[0] == tests[1]
        assert all(part in told[0] for part in ("cupy-other", "default_stream", "until_the_work_is_done"))
