"""Accumulators that tests share: on memory that is full of NaN, their state as a whole, and wrong gradients."""

import math

import numpy as np
import strategies as draw
from backends import host_backend
from devices import all_on_host, on_host, put_all

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.arrays.buffer import RawBuffer
from gradengine.kernels import Kernels
from gradengine.layout import GradientLayout

SMALL = GradientLayout.transformer(2, 8, 4, 12, 16)
ODD = GradientLayout.of(
    {"layers.0.w": (3, 5), "layers.0.b": (5,), "layers.1.w": (33,), "layers.1.empty": (0,), "head": (7, 1), "t": ()}
)
HOST = host_backend(1)


@Kernels.register
class PoisonedKernels:
    """Kernels on a device whose fresh memory is full of NaN, as fresh memory may be."""

    def __init__(self, kernels):
        self._kernels, self.device = kernels, PoisonedDevice(kernels)

    def __getattr__(self, name):
        return getattr(self._kernels, name)


class PoisonedDevice:
    def __init__(self, kernels):
        self._kernels = kernels

    def __getattr__(self, name):
        return getattr(self._kernels.device, name)

    def allocate(self, size, **options):
        buffer = self._kernels.device.allocate(size, **options)
        if buffer.device == "cpu":
            buffer.data.fill(math.nan)
        else:
            cuda = self._kernels.xp.cuda
            with cuda.Device(self._kernels.ordinal):
                cuda.runtime.memsetAsync(buffer.pointer, 0xFF, buffer.nbytes, cuda.get_current_stream().ptr)
        return buffer


def new(layout=ODD, hold=1, backend=HOST):
    return PerBlockGradientAccumulator(layout, PoisonedKernels(backend.kernels), hold=hold)


def ones(size=2):
    return np.ones(size, np.float32)


def state(accumulator, backend=HOST):
    """All there is to the state, bit for bit; reading it changes nothing."""
    partials = accumulator.arena.partials
    sums = (on_host(partials.values).tobytes(), on_host(getattr(partials, "non_finite", ())).tobytes())
    window = {name: shown(value) for name, value in vars(accumulator._window).items()}
    return backend.get(accumulator.memory).tobytes(), sums, window, accumulator.state.now


def shown(value):
    """What may be compared later: arrays by their bytes, what is held by its identity."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(id(key), [*map(id, held)] if isinstance(held, list) else id(held)) for key, held in value.items()]
    return repr(value)


def closed(accumulator):
    accumulator.close()
    return all_on_host(accumulator.views())


def bad_gradients(slots, backend=HOST):
    """Each way to pass wrong gradients for slots, with what its error names."""
    good = put_all(backend, draw.random_gradients(99, slots))
    last, size = slots[-1].name, slots[-1].size

    def ending_in(array):
        return [*good[:-1], backend.put(array)]

    yield good[:-1], f"got {len(good) - 1}, expected {len(good)}"
    yield [*good, good[0]], f"got {len(good) + 1}, expected {len(good)}"
    yield ending_in(ones(size + 1)), f"'{last}' has the wrong shape: got .*{size + 1}"
    yield ending_in(np.ones(slots[-1].shape)), f"'{last}' .*: got float64"
    yield [*good[:-1], on_host(good[-1]).tolist()], f"'{last}' is not an array"
    yield dict.fromkeys((slot.name for slot in slots[1:]), good[0]), f"lack component '.*{slots[0].name[-1]}'"
    yield "abc", "neither a mapping nor a sequence"
    if size > 1:
        strided = backend.put(np.ones((*slots[-1].shape, 2), np.float32))[..., 0]
        yield [*good[:-1], strided], f"'{last}' is not contiguous"
    if size:
        elsewhere = "cuda:0" if backend.is_host else "cpu"
        message = f"'{last}' is on the wrong device: got {elsewhere}"
        yield [*good[:-1], RawBuffer(4096, size, "float32", elsewhere)], message
