"""What a GPU needs: each missing piece is named, with the way to get it."""

import sys
from types import SimpleNamespace

import cuda_emulator
import numpy as np
import pytest
from backends import on_the_stand_in

from gradengine import GradientEngine, GradientLayout
from gradengine.errors import CallerError, DeviceUnavailable, OutOfDeviceMemory
from gradengine.kernels import CudaKernels, HostKernels, kernels_for, toolchain
from gradengine.kernels.cuda import cuda_kernels
from gradengine.kernels.launch import CAPACITIES


@pytest.fixture
def cupy(monkeypatch):
    """What `import cupy` gives: the emulator, with a version that a test may change."""
    module = SimpleNamespace(**{name: getattr(cuda_emulator, name) for name in dir(cuda_emulator)})
    module.__version__ = "14.1.0"
    monkeypatch.setitem(sys.modules, "cupy", module)
    cuda_kernels.cache_clear()
    yield module
    cuda_kernels.cache_clear()


class TestNames:
    @pytest.mark.parametrize(("name", "ordinal"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:12", 12)])
    def test_of_devices(self, name, ordinal):
        assert toolchain.device_ordinal(name) == ordinal

    @pytest.mark.parametrize(
        "name", ["cpu", "", "gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "cuda0", None, 0]
    )
    def test_of_none(self, name):
        assert toolchain.device_ordinal(name) is None

    @pytest.mark.parametrize("name", ["gpu", "CPU", "", "cuda:", "cuda:x", None, 0])
    def test_kernels_for_what_is_no_device(self, name):
        with pytest.raises(CallerError, match=r"no kernels for the device: got .*, expected 'cpu', 'cuda' or"):
            kernels_for(name)

    def test_kernels_are_given_back_as_they_are(self):
        kernels = HostKernels(1)
        assert kernels_for(kernels) is kernels


class TestLoadCupy:
    def test_what_is_there_is_given(self, cupy):
        assert toolchain.load_cupy(0) is cupy

    def test_no_cupy(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
        monkeypatch.setattr("gradengine.kernels.cuda_kernels", cuda_kernels.__wrapped__)  # nor asked for before
        for device, name in (("cuda", "cuda:0"), ("cuda:3", "cuda:3")):
            with pytest.raises(DeviceUnavailable, match=f"device '{name}' needs CuPy") as caught:
                kernels_for(device)
            assert "pip install 'gradengine[cuda12]' or 'gradengine[cuda13]'" in str(caught.value)
            assert "nvidia-smi" in str(caught.value)

    def test_a_cupy_that_cannot_be_imported_says_why(self, monkeypatch):
        def broken(name):
            raise ImportError("libcublas.so.12: cannot open shared object file")

        monkeypatch.setattr(toolchain.importlib, "import_module", broken)
        with pytest.raises(DeviceUnavailable, match=r"needs CuPy \(libcublas\.so\.12"):
            toolchain.load_cupy(0)

    @pytest.mark.parametrize("version", ["13.6.0", "9.0.0b1"])
    def test_an_old_cupy(self, cupy, version):
        cupy.__version__ = version
        with pytest.raises(DeviceUnavailable, match=f"CuPy is too old: got {version}, expected >= 14; pip install"):
            toolchain.load_cupy(0)

    @pytest.mark.parametrize("version", ["14.0.0rc1", "15.2"])
    def test_a_new_one(self, cupy, version):
        cupy.__version__ = version
        assert toolchain.load_cupy(0) is cupy

    def test_no_driver_or_no_gpu(self, cupy):
        with (
            cuda_emulator.options(device_count=0),
            pytest.raises(DeviceUnavailable, match=r"CuPy finds no GPU \(cudaErrorNoDevice.*nvidia-smi.*device='cpu'"),
        ):
            toolchain.load_cupy(0)

    @pytest.mark.parametrize("ordinal", [1, 7])
    def test_no_such_gpu(self, cupy, ordinal):
        expected = f"there is no device 'cuda:{ordinal}': got 1 devices; count from 0, and check CUDA_VISIBLE_DEVICES"
        with pytest.raises(DeviceUnavailable, match=expected):
            kernels_for(f"cuda:{ordinal}")

    @pytest.mark.parametrize(("capability", "is_taken"), [("61", False), ("70", True), ("90", True), ("120", True)])
    def test_old_gpus(self, cupy, monkeypatch, capability, is_taken):
        monkeypatch.setattr(cuda_emulator.cuda.Device, "compute_capability", capability)
        if is_taken:
            assert toolchain.load_cupy(0) is cupy
        else:
            with pytest.raises(DeviceUnavailable, match=r"'cuda:0' is too old: got compute capability 6\.1, .* 7\.0"):
                toolchain.load_cupy(0)


class Compiling:
    """A CuPy whose compiler ends in a fault."""

    def __init__(self, fault):
        self.RawModule = lambda **_: SimpleNamespace(compile=self.compile)
        self._fault = fault

    def compile(self):
        raise self._fault


class TestCompiled:
    @pytest.mark.parametrize(
        "fault",
        [
            RuntimeError("CuPy failed to load libnvrtc.so.12: cannot open shared object file"),
            OSError("libnvrtc-builtins.so.12.9: no such file"),
            ImportError("no module named nvrtc"),
        ],
    )
    def test_no_compiler(self, fault):
        with pytest.raises(DeviceUnavailable, match="the kernels cannot be compiled") as caught:
            toolchain.compiled(Compiling(fault), "measure")
        assert str(fault) in str(caught.value)
        assert "expected NVRTC and CUDA's headers" in str(caught.value)
        assert "pip install 'cuda-toolkit[nvrtc,cudart]==12.*'" in str(caught.value)

    def test_each_choice_is_a_define(self):
        taken = []
        module = SimpleNamespace(compile=lambda: None)
        xp = SimpleNamespace(RawModule=lambda *, code, options: taken.append(options) or module)
        assert toolchain.compiled(xp, "measure") is module
        toolchain.compiled(xp, "measure", large_arguments=False, whole_sectors=True)
        assert taken == [("--std=c++17",), ("--std=c++17", "-DSMALL_ARGUMENTS_ONLY", "-DWHOLE_SECTORS")]

    def test_a_fault_in_the_source_is_not_dressed_up(self):
        """CuPy's CompileException is an Exception; in case it becomes a RuntimeError, it is told by its name."""
        for kind in (Exception, RuntimeError):
            fault = type("CompileException", (kind,), {})("error: expected ';'")
            with pytest.raises(type(fault), match="expected ';'"):
                toolchain.compiled(Compiling(fault), "measure")

    @pytest.mark.parametrize("name", ["accumulate", "measure", "finalise", "hand_back"])
    def test_sources_are_whole(self, name):
        """CuPy's cache is keyed by the text, and would not see a change in a header."""
        text = toolchain.source(name)
        assert "#include" not in text
        assert text.count('extern "C" __global__') >= 1
        assert "struct Stretch" in text


class TestLargeArguments:
    """32 KB of arguments are of CUDA 12.1: by an older NVRTC or driver the 4 KB kernels carry what they can."""

    @pytest.mark.parametrize(
        ("nvrtc", "driver", "are_taken"),
        [
            ((12, 1), 12010, True),
            ((13, 0), 13000, True),
            ((12, 9), 13000, True),
            ((12, 0), 13000, False),
            ((11, 8), 12010, False),
            ((12, 9), 12000, False),
            ((12, 9), 11080, False),
        ],
    )
    def test_by_versions(self, monkeypatch, nvrtc, driver, are_taken):
        monkeypatch.setattr(cuda_emulator.cuda.nvrtc, "getVersion", lambda: nvrtc)
        with cuda_emulator.options(driver_version=driver):
            assert toolchain.takes_large_arguments(cuda_emulator) is are_taken

    def test_without_nvrtc_the_compiler_is_what_is_missing(self, monkeypatch):
        def missing():
            raise RuntimeError("CuPy failed to load libnvrtc.so.12")

        monkeypatch.setattr(cuda_emulator.cuda.nvrtc, "getVersion", missing)
        assert toolchain.takes_large_arguments(cuda_emulator) is False

    def test_what_does_not_fit_goes_through_memory(self):
        """With the kernels as they are compiled for an older driver: they have no large ones."""
        count = CAPACITIES["small"] + 1
        with cuda_emulator.options(driver_version=12000):
            kernels = CudaKernels(cuda_emulator)
        layout = GradientLayout.of([(3,)] * count)
        engine = GradientEngine(layout, kernels, max_norm=1.0)
        with cuda_emulator.recorded() as record:
            engine.add([cuda_emulator.asarray(np.ones(3, np.float32))] * count)
            result = engine.step()
        assert record.launches == ["accumulate_1_table", "finalise", "hand_back_table"]
        assert float(result.norm) == pytest.approx((3 * count) ** 0.5)
        with pytest.raises(cuda_emulator.EmulatorError, match="no kernel 'measure_large'"):
            toolchain.compiled(cuda_emulator, "measure", large_arguments=False).get_function("measure_large")


class TestKernelsFor:
    def test_cuda_is_the_first_gpu_and_made_once(self, cupy, emulated):
        kernels = kernels_for("cuda")
        assert isinstance(kernels, CudaKernels)
        assert kernels.device.name == "cuda:0"
        assert kernels_for("cuda:0") is kernels


class TestMemory:
    def test_what_does_not_fit_is_named_before_anything_is_taken(self, emulated):
        taken = emulated.xp.get_default_memory_pool().total_bytes()
        room = 1 << 20
        with cuda_emulator.options(device_memory=taken + room):
            with (
                cuda_emulator.recorded() as record,
                pytest.raises(OutOfDeviceMemory, match="does not fit on the device") as caught,
            ):
                emulated.kernels.device.allocate(1 << 30)
            assert record.allocations == []
            assert f"expected {4 << 30} bytes" in str(caught.value)
            assert int(str(caught.value).split("got ")[1].split(" ")[0]) >= room
            assert emulated.kernels.device.allocate(room // 8).size == room // 8

    @on_the_stand_in
    def test_what_the_pool_holds_unused_is_free(self, emulated):
        cuda_emulator.get_default_memory_pool().free_all_blocks()
        unused = emulated.kernels.device.allocate(1 << 18)
        pool = cuda_emulator.get_default_memory_pool()
        with cuda_emulator.options(device_memory=pool.total_bytes()):
            with pytest.raises(OutOfDeviceMemory):
                emulated.kernels.device.allocate(1 << 18)
            del unused
            assert emulated.kernels.device.allocate(1 << 18).size == 1 << 18

    @on_the_stand_in
    def test_a_limit_of_the_pool_is_told_in_its_own_words(self, emulated):
        pool = cuda_emulator.get_default_memory_pool()
        pool.free_all_blocks()
        pool.set_limit(pool.total_bytes() + 4096)
        try:
            with pytest.raises(OutOfDeviceMemory, match=r"Out of memory allocating .* expected 4194304 bytes"):
                emulated.kernels.device.allocate(1 << 20)
        finally:
            pool.set_limit(0)
