"""CUDA kernels, and what launches them, without a GPU: CuPy's names over a runtime that runs kernels on the CPU.

The same CUDA C++ that CuPy compiles is compiled by g++; threads are fibers, memory is the host's. By default each
access is checked (bounds, alignment, races, barriers, uninitialised shared memory) and nothing is done before the host
waits for it. Code under test takes this module as it takes `cupy`; of CuPy it has only what launchers need.

    kernel = cuda_emulator.RawKernel(code, "scale")
    with cuda_emulator.options(order="random", seed=1), cuda_emulator.recorded() as record:
        kernel((4,), (256,), (array, np.float32(2)))
        cuda_emulator.cuda.get_current_stream().synchronize()  # an EmulatorError is raised here
    assert record.launches == ["scale"]

What CuPy does not have: `options`, `settings`, `recorded`, `reset`, `compiler`, `EmulatorError`, `Graph.operations`,
`cuda.libcuda` (with CuPy it is the driver itself).
Where it is stricter than CuPy on purpose: memory that was freed into the pool is no device memory to it at once, and is
NaN; an argument of a wrong type or size is an error at the launch (CuPy takes a float as 8 bytes, whatever the kernel
wants), as is a grid that is no tuple. Where it knows less: errors in a capture and of a stream that is none may be of
another class than CuPy's, DLPack capsules have no version, copies of arrays are no kernels. tests/test_stand_in.py runs
on both, and tests/real_cupy runs all the others on CuPy.

It judges no speed, no code of the GPU's own (PTX, `__CUDA_ARCH__`), no memory model beyond "ordered or not", and trusts
any fence before any atomic. Kernels see `__CUDA_EMU__`.
"""

from . import cuda
from .arrays import array, asarray, asnumpy, empty, ndarray, zeros
from .compiler import compiler
from .elementwise import ElementwiseKernel
from .errors import CompileException, EmulatorError
from .kernels import RawKernel, RawModule
from .memory import POOL, MemoryPool
from .queues import forget_all, forget_captures
from .record import Record, recorded
from .settings import Settings, options, set_settings, settings
from .streams import forget_current_stream

__all__ = [
    "CompileException",
    "ElementwiseKernel",
    "EmulatorError",
    "MemoryPool",
    "RawKernel",
    "RawModule",
    "Record",
    "Settings",
    "array",
    "asarray",
    "asnumpy",
    "compiler",
    "cuda",
    "empty",
    "get_default_memory_pool",
    "ndarray",
    "options",
    "recorded",
    "reset",
    "settings",
    "zeros",
]

__version__ = "14.2.0"  # of the CuPy whose names these are


def get_default_memory_pool() -> MemoryPool:
    """The pool that all device memory comes from."""
    return POOL


def reset() -> None:
    """A fresh start: default settings, nothing queued, the default stream, no limit, no free memory kept."""
    set_settings(Settings())
    forget_captures()
    forget_all()
    forget_current_stream()
    POOL.set_limit(0)
    POOL.free_all_blocks()
