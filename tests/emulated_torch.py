"""Torch as far as the package asks it, over arrays on a GPU that CuPy (or the emulator) has."""

import types
from types import SimpleNamespace

import numpy as np


class Tensor:
    """A tensor on the device; it has no DLPack, so that whoever falls back to that is found out."""

    is_cpu = is_meta = False
    is_leaf = True
    requires_grad = False
    _version = 0
    _base = None

    def untyped_storage(self):
        return self.array

    def __init__(self, array, **change):
        self.array, self.layout, self.device = array, "strided", SimpleNamespace(type="cuda", index=array.device.id)
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

    def is_inference(self):
        return False


class Stream:
    """A stream of torch's: from 2.10 on with `__cuda_stream__`, before with a handle."""

    def __init__(self, torch, stream, *, is_old=False):
        self._torch, self.cuda_stream = torch, stream.ptr
        if not is_old:
            self.__cuda_stream__ = lambda: (0, stream.ptr)


def emulated_torch(stream, *, is_old=False):
    """A module; its current stream is `stream` until `current` is set, `asked` and `written` note what it is told."""
    torch = types.ModuleType("torch")
    torch.Tensor, torch.strided = Tensor, "strided"
    for dtype in ("float32", "float16", "bfloat16"):
        setattr(torch, dtype, f"torch.{dtype}")
    torch.asked, torch.written, torch.current = [], [], stream

    def current_stream(ordinal):
        torch.asked.append(ordinal)
        return Stream(torch, torch.current, is_old=is_old)

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
