"""Gradients to a backend's device and results back: what the tests share that run on every device."""

import contextlib
import unittest.mock

import cuda_emulator
import numpy as np

from gradengine import RawBuffer


def put_all(backend, gradients):
    """Each array's copy on the backend's device; None stays None, mappings stay mappings."""
    if isinstance(gradients, dict):
        return dict(zip(gradients, put_all(backend, list(gradients.values())), strict=True))
    return [None if gradient is None else backend.put(gradient.copy()) for gradient in gradients]


def on_host(array):
    """A copy of an array that lies anywhere, on the host; waits for the device."""
    return array.get() if hasattr(array, "get") else np.array(array)


def all_on_host(arrays):
    """The same of a mapping of arrays."""
    return {name: on_host(array) for name, array in arrays.items()}


def bits_of(result):
    """Name -> bytes of what a step handed back; waits for the device."""
    arrays = result.sums if result.deferred else result.gradients
    return {name: on_host(array).tobytes() for name, array in arrays.items()}


def synchronize(backend):
    """Wait for the device, where there is one."""
    if not backend.is_host:
        backend.kernels.xp.cuda.runtime.deviceSynchronize()


def raw(buffer, **change):
    """A buffer as a pointer that the caller vouches for."""
    fields = {"pointer": buffer.pointer, "size": buffer.size, "dtype": buffer.dtype, "device": buffer.device}
    return RawBuffer(**{**fields, "owner": buffer.owner, **change})


def churned(backend):
    """Have memory that was freed be taken by others and full of NaN."""
    xp = backend.kernels.xp
    others = [xp.empty(size, np.uint8) for size in (512, 1024, 2048, 4096, 8192, 65536) for _ in range(4)]
    for other in others:
        xp.cuda.runtime.memsetAsync(other.data.ptr, 0xFF, other.nbytes, xp.cuda.get_current_stream().ptr)


@contextlib.contextmanager
def nothing_is_launched(backend):
    """On the emulator, that nothing was queued: no kernel, copy or fill."""
    if getattr(backend.kernels, "xp", None) is not cuda_emulator:
        yield
        return
    with cuda_emulator.recorded() as record:
        yield
    assert record.operations == []


@contextlib.contextmanager
def named_cuda(backend):
    """Within it "cuda" is the backend's device by name too, also where that is the emulator."""
    if backend.is_host:
        yield
        return
    with unittest.mock.patch("gradengine.kernels.cuda_kernels", return_value=backend.kernels):
        yield
