"""Gradients to a backend's device and results back: what the tests share that run on every device."""

import contextlib
import re
import unittest.mock

import cuda_emulator
import numpy as np
from backends import IS_EMULATED_CUPY

from gradengine import RawBuffer
from gradengine.kernels import Device


def put_all(backend, gradients):
    """Each array's copy on the backend's device; None stays None, mappings stay mappings."""
    if isinstance(gradients, dict):
        return dict(zip(gradients, put_all(backend, list(gradients.values())), strict=True))
    return [None if gradient is None else backend.put(gradient.copy()) for gradient in gradients]


def on_host(array):
    """A copy of an array that lies anywhere, on the host; waits for the device."""
    if not hasattr(array, "get"):
        return np.array(array)
    with array.device:  # CuPy reads behind the current stream of the current device
        return array.get()


def number_of(scalar):
    """A number without dimensions that lies anywhere, on the host."""
    return float(on_host(scalar))


def assign(array, values, where=...):
    """Other values for elements of an array, by its own framework, on the current stream of its device."""
    with contextlib.nullcontext() if isinstance(array, np.ndarray) else array.device:
        array[where] = values


def current_device_kept(backend):
    """A context that makes the device current again that is current now."""
    return contextlib.nullcontext() if backend.is_host else backend.kernels.xp.cuda.Device()


def launched(device, graph):
    """Queue a recorded graph on the current stream of the device."""
    with device.active():
        graph.launch()


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
        backend.kernels.xp.cuda.Device(backend.kernels.ordinal).synchronize()


def operations_of(graph):
    """The names of a recorded graph's kernels, copies and fills, in the order they were asked for.

    CUDA's own labels begin with the node's number, and one is that of the whole graph.
    """
    labels = re.findall(r'label="([^"]*)"', graph.debug_dot_str())
    return [label.split("\n")[1 if "\n" in label else 0] for label in labels if not label.startswith("graph_")]


def raw(buffer, **change):
    """A buffer as a pointer that the caller vouches for."""
    fields = {"pointer": buffer.pointer, "size": buffer.size, "dtype": buffer.dtype, "device": buffer.device}
    return RawBuffer(**{**fields, "owner": buffer.owner, **change})


def churned(backend):
    """Have memory that was freed be taken by others and full of NaN."""
    xp = backend.xp
    others = [xp.empty(size, np.uint8) for size in (512, 1024, 2048, 4096, 8192, 65536) for _ in range(4)]
    for other in others:
        xp.cuda.runtime.memsetAsync(other.data.ptr, 0xFF, other.nbytes, xp.cuda.get_current_stream().ptr)


@contextlib.contextmanager
def nothing_is_launched(backend):
    """Where that is recorded, that nothing was queued: no kernel, copy or fill."""
    if backend.is_host or not IS_EMULATED_CUPY:
        yield
        return
    with cuda_emulator.recorded() as record:
        yield
    assert record.operations == []


@contextlib.contextmanager
def named_cuda(backend):
    """Within it "cuda" is the backend's device by name too."""
    if backend.is_host:
        yield
        return
    with unittest.mock.patch("gradengine.kernels.cuda_kernels", return_value=backend.kernels):
        yield


class Looked:
    """A device that counts how often an array is looked at."""

    def __init__(self, device):
        self._device, self.looked = device, 0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def views(self, sources, components):
        self.looked += len(sources)
        return self._device.views(sources, components)

    writable_views = Device.writable_views
