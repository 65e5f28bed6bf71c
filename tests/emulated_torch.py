"""Torch as far as the package asks it, over arrays on a GPU that CuPy (or the emulator) has."""

import types
from types import SimpleNamespace

import numpy as np
from devices import on_host


class Tensor:
    """A tensor on the device; it has no DLPack, so that whoever falls back to that is found out."""

    is_cpu = is_meta = False
    is_leaf = True
    requires_grad = False
    _version = 0
    _base = None

    def __init__(self, array, **change):
        self.array, self.layout, self.device = array, "strided", SimpleNamespace(type="cuda", index=array.device.id)
        self.storage = Storage()
        self.dtype, self.shape = f"torch.{array.dtype.name}", array.shape
        for name, value in change.items():
            setattr(self, name, value)

    def data_ptr(self):
        return self.array.data.ptr

    def numel(self):
        return self.array.size

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def is_contiguous(self):
        return bool(self.array.flags.c_contiguous)

    def is_neg(self):
        return False

    def any(self):
        return OnDevice([bool(on_host(self.array).any())], self.device)

    def untyped_storage(self):
        return self.storage

    def is_inference(self):
        return False


class Storage:
    """Memory, of one tensor or of several that are views of it."""


class OnDevice:
    """Truth values on the device: whoever asks for one waits, and is found out."""

    is_cpu = False

    def __init__(self, values, device):
        self.values, self.device = values, device

    def __bool__(self):
        raise AssertionError("the host waits for the device")

    tolist = __bool__


class Pinned:
    """Host memory that a copy comes to; it has come when the module says that the device `is_done`."""

    def __init__(self, torch):
        self._torch = torch

    def copy_(self, source, *, non_blocking):
        assert non_blocking
        self._source = source
        return self

    def tolist(self):
        assert self._torch.is_done
        return self._source.values


class Stream:
    """A stream of torch's: from 2.10 on with `__cuda_stream__`, before with a handle."""

    def __init__(self, torch, stream, *, is_old=False):
        self._torch, self.cuda_stream = torch, stream.ptr
        if not is_old:
            self.__cuda_stream__ = lambda: (0, stream.ptr)

    def record_event(self):
        return SimpleNamespace(
            query=lambda: self._torch.is_done, synchronize=lambda: setattr(self._torch, "is_done", True)
        )


def emulated_torch(stream, *, is_old=False):
    """A module; its current stream is `stream` until `current` is set, `asked` and `written` note what it is told."""
    torch = types.ModuleType("torch")
    torch.Tensor, torch.strided, torch.bool, torch.is_done = Tensor, "strided", "torch.bool", True
    for dtype in ("float32", "float16", "bfloat16"):
        setattr(torch, dtype, f"torch.{dtype}")
    torch.asked, torch.written, torch.current = [], [], stream

    def current_stream(ordinal):
        torch.asked.append(ordinal)
        return Stream(torch, torch.current, is_old=is_old)

    def empty(_size, *, dtype, device, pin_memory):
        assert (dtype, device, pin_memory) == (torch.bool, "cpu", True)
        return Pinned(torch)

    def stack(found):
        return OnDevice([value for each in found for value in each.values], found[0].device)

    torch.empty, torch.stack = empty, stack
    torch.cuda = SimpleNamespace(current_stream=current_stream)
    torch.autograd = SimpleNamespace(graph=SimpleNamespace(increment_version=torch.written.extend))
    return torch


def tensors_of(arrays):
    return [Tensor(array) for array in arrays]


def copy_on(xp, stream, target, source):
    """Queue a copy on a stream, as a framework's own work."""
    runtime = xp.cuda.runtime
    kind = runtime.memcpyDeviceToDevice
    runtime.memcpyAsync(
        target.data.ptr, source.data.ptr, source.size * np.dtype(source.dtype).itemsize, kind, stream.ptr
    )
