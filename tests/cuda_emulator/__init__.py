"""CUDA kernels without a GPU: CUDA C++ is compiled by g++, threads are fibers, memory is the host's.

`tests/real_cupy` runs what CuPy launches on it. By default each access is checked: bounds, alignment, races, barriers,
uninitialised shared memory.

    with cuda_emulator.options(order="random", seed=1), cuda_emulator.recorded() as record:
        kernel((4,), (256,), (array, np.float32(2)))
        cupy.cuda.get_current_stream().synchronize()  # a launch that did wrong fails here
    assert record.launches == ["scale"]

It judges no speed, no code of the GPU's own (PTX, `__CUDA_ARCH__`), no memory model beyond "ordered or not", and trusts
any fence before any atomic. Kernels see `__CUDA_EMU__`.
"""

from .errors import CompileException, EmulatorError
from .record import Record, recorded
from .settings import Settings, options, reset, set_settings, settings

__all__ = [
    "CompileException",
    "EmulatorError",
    "Record",
    "Settings",
    "options",
    "recorded",
    "reset",
    "set_settings",
    "settings",
]
