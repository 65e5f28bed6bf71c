"""What a GPU needs: each missing piece is named, with the way to get it."""

import importlib
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import cuda_emulator
import numpy as np
import pytest

from gradengine import GradientEngine, GradientLayout
from gradengine.errors import CallerError, DeviceUnavailable
from gradengine.kernels import CudaKernels, HostKernels, kernels_for, toolchain
from gradengine.kernels.cuda import cuda_kernels
from gradengine.kernels.launch import CAPACITIES


def fails(fault):
    raise fault


@pytest.fixture
def cupy(monkeypatch):
    """What `import cupy` gives: as much as is looked at, with one GPU."""
    runtime = SimpleNamespace(getDeviceCount=lambda: 1)
    device = SimpleNamespace(compute_capability="90")
    module = SimpleNamespace(__version__="14.1.0", cuda=SimpleNamespace(runtime=runtime, Device=lambda _: device))
    module.device = device
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr("gradengine.kernels.cuda_kernels", cuda_kernels.__wrapped__)  # not asked for before
    return module


@pytest.mark.parametrize(("name", "ordinal"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:12", 12)])
def test_names_of_devices(name, ordinal):
    assert toolchain.device_ordinal(name) == ordinal


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "cuda0", None, 0])
def test_there_are_no_kernels_for_what_is_no_device(name):
    assert toolchain.device_ordinal(name) is None
    with pytest.raises(CallerError, match="no kernels for the device"):
        kernels_for(name)


def test_kernels_are_given_back_as_they_are():
    kernels = HostKernels(1)
    assert kernels_for(kernels) is kernels
    assert toolchain.device_ordinal("cpu") is None


def no_driver(cupy):
    cupy.cuda.runtime.getDeviceCount = lambda: fails(RuntimeError("cudaErrorNoDevice"))


@pytest.mark.parametrize(
    ("change", "asked", "told"),
    [
        (lambda cupy: setattr(cupy, "__version__", "13.6.0"), "cuda", "too old: got 13.6.0, expected >= 14; pip"),
        (lambda cupy: setattr(cupy, "__version__", "9.0.0b1"), "cuda", "too old: got 9.0.0b1, expected >= 14; pip"),
        (no_driver, "cuda", "finds no GPU .cudaErrorNoDevice.*nvidia-smi.*device='cpu'"),
        (lambda cupy: None, "cuda:1", "no device 'cuda:1': got 1 devices"),
        (lambda cupy: setattr(cupy.device, "compute_capability", "61"), "cuda:0", "'cuda:0'.* 6[.]1, .* 7[.]0"),
    ],
)
def test_what_cannot_be_used_is_refused(cupy, change, asked, told):
    change(cupy)
    with pytest.raises(DeviceUnavailable, match=told):
        kernels_for(asked)


@pytest.mark.parametrize(("version", "capability"), [("14.0.0rc1", "70"), ("15.2", "120")])
def test_what_can_be_used_is_given(cupy, version, capability):
    cupy.__version__, cupy.device.compute_capability = version, capability
    assert toolchain.load_cupy(0) is cupy


@pytest.mark.parametrize(("asked", "name"), [("cuda", "cuda:0"), ("cuda:3", "cuda:3")])
def test_without_cupy_it_says_how_to_get_it(cupy, monkeypatch, asked, name):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with pytest.raises(
        DeviceUnavailable, match=f"'{name}' needs CuPy.*pip install 'gradengine.cuda12.' or .*nvidia-smi"
    ):
        kernels_for(asked)


def test_a_cupy_that_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setattr(toolchain.importlib, "import_module", lambda _: fails(ImportError("libcublas.so.12: cannot")))
    with pytest.raises(DeviceUnavailable, match=r"needs CuPy \(libcublas\.so\.12"):
        toolchain.load_cupy(0)


def compiling(fault):
    """A CuPy whose compiler ends in a fault."""
    return SimpleNamespace(RawModule=lambda **_: SimpleNamespace(compile=lambda: fails(fault)))


@pytest.mark.parametrize("kind", [RuntimeError, OSError, ImportError])
def test_without_a_compiler_it_says_what_is_missing(kind):
    with pytest.raises(
        DeviceUnavailable, match=r"cannot be compiled .no libnvrtc.*NVRTC and CUDA's headers.*cuda-toolkit"
    ):
        toolchain.compiled(compiling(kind("no libnvrtc")), "measure")


@pytest.mark.parametrize("base", [Exception, RuntimeError])
def test_a_fault_in_the_source_is_not_dressed_up(base):
    """CuPy's CompileException is an Exception; in case it becomes a RuntimeError, it is told by its name."""
    fault = type("CompileException", (base,), {})("error: expected ';'")
    with pytest.raises(type(fault), match="expected ';'"):
        toolchain.compiled(compiling(fault), "measure")


def test_sources_are_read_from_a_zip_file_too(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as app:
        app.writestr("zipped/__init__.py", "")
        for path in Path(toolchain.__file__).parent.iterdir():
            if path.suffix in {".cu", ".cuh"} or path.name == "toolchain.py":
                app.write(path, f"zipped/{path.name}")
    monkeypatch.syspath_prepend(tmp_path / "app.zip")
    zipped = importlib.import_module("zipped.toolchain")
    assert (zipped.source("measure"), zipped.arithmetic()) == (toolchain.source("measure"), toolchain.arithmetic())


def test_small_arguments_are_a_define_and_sources_are_whole():
    """CuPy's cache is keyed by the text, and would not see a change in a header."""
    taken, module = [], SimpleNamespace(compile=lambda: None)
    xp = SimpleNamespace(RawModule=lambda *, code, options: taken.append((code, options)) or module)
    for name in ("accumulate", "measure", "finalise", "hand_back"):
        assert toolchain.compiled(xp, name) is module
    toolchain.compiled(xp, "measure", large_arguments=False)
    assert [options for _, options in taken[-2:]] == [("--std=c++17",), ("--std=c++17", "-DSMALL_ARGUMENTS_ONLY")]
    assert all("#include" not in code and "struct Stretch" in code for code, _ in taken)


class TestLargeArguments:
    """32 KB of arguments are of CUDA 12.1: by an older NVRTC or driver the 4 KB kernels carry what they can."""

    @pytest.mark.parametrize(
        ("nvrtc", "driver", "are_taken"),
        [
            ((12, 1), 12010, True),
            ((13, 0), 13000, True),
            ((12, 0), 13000, False),
            ((11, 8), 12010, False),
            ((12, 9), 12000, False),
            (None, 13000, False),  # the compiler is what is missing, and is missed later
        ],
    )
    def test_versions_say_whether_they_are_taken(self, nvrtc, driver, are_taken):
        version = (lambda: nvrtc) if nvrtc else lambda: fails(RuntimeError("CuPy failed to load libnvrtc.so.12"))
        runtime = SimpleNamespace(driverGetVersion=lambda: driver)
        xp = SimpleNamespace(cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=version), runtime=runtime))
        assert toolchain.takes_large_arguments(xp) is are_taken

    def test_what_does_not_fit_goes_through_memory(self, emulated, monkeypatch):
        """With the kernels as they are compiled for an older driver: they have no large ones."""
        xp, count = emulated.kernels.xp, CAPACITIES["small"] + 1
        monkeypatch.setattr(xp.cuda.runtime, "driverGetVersion", lambda: 12000)
        engine = GradientEngine(GradientLayout.of([(3,)] * count), CudaKernels(xp), max_norm=1.0)
        with cuda_emulator.recorded() as record:
            engine.add([xp.asarray(np.ones(3, np.float32))] * count)
            result = engine.step()
        assert record.launches == ["accumulate_1_table", "finalise", "hand_back_table"]
        assert float(result.norm) == pytest.approx((3 * count) ** 0.5)
        with pytest.raises(xp.cuda.driver.CUDADriverError):
            toolchain.compiled(xp, "measure", large_arguments=False).get_function("measure_large")


def test_cuda_is_the_first_gpu_and_made_once(emulated):
    kernels = kernels_for("cuda")
    assert kernels.device.name == "cuda:0"
    assert kernels_for("cuda:0") is kernels
