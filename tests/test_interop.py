"""Every framework, in and out, in every dtype: the same memory by address, and producers that may go."""

import gc
import importlib

import ml_dtypes
import numpy as np
import pytest
import strategies as draw
from producers import Producer

from gradengine import GradientEngine, GradientLayout, RawBuffer, clip_by_global_norm
from gradengine.arrays.host import host_buffer
from gradengine.errors import BufferRefused

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LAYOUT = GradientLayout.of({"layers.0.w": (3, 5), "layers.0.b": (7,), "head": (2, 1, 4)})


class NumPy:
    """NumPy's arrays, bf16 by ml_dtypes; the others are as this one but for what they change."""

    writable = True

    def put(self, array):
        return array.copy()

    def get(self, array):
        return np.asarray(array)

    def address(self, array):
        return array.ctypes.data

    def imported(self, array):
        """A step's result as this framework's own array."""
        return np.from_dlpack(array)


class Torch(NumPy):
    def __init__(self):
        self.torch = pytest.importorskip("torch")

    def put(self, array):
        bits = {2: np.int16, 4: np.int32}[array.itemsize]
        return self.torch.from_numpy(array.view(bits).copy()).view(getattr(self.torch, array.dtype.name))

    def get(self, array):
        return array.float().numpy().astype(DTYPES[str(array.dtype).removeprefix("torch.")])

    def address(self, array):
        return array.data_ptr()

    def imported(self, array):
        return self.torch.from_dlpack(array)


class TorchByDlpack(Torch):
    """A tensor of a kind that is not asked itself."""

    def put(self, array):
        return Handed(super().put(array))

    def get(self, array):
        return super().get(array.tensor)

    def address(self, array):
        return array.tensor.data_ptr()


class Handed:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)


class Jax(NumPy):
    writable = False

    def __init__(self):
        self.jax = pytest.importorskip("jax")

    def put(self, array):
        return self.jax.numpy.asarray(array)

    def address(self, array):
        return array.unsafe_buffer_pointer()

    def imported(self, array):
        return self.jax.dlpack.from_dlpack(array)


class Capsules(NumPy):
    """A producer made by hand."""

    def __init__(self, **options):
        self.options = options

    def put(self, array):
        return Producer(array.copy(), **self.options)

    def get(self, array):
        return array.array

    def address(self, array):
        return array.array.ctypes.data


class Pointers(NumPy):
    def put(self, array):
        own = array.copy()
        return RawBuffer(own.ctypes.data, own.size, own.dtype.name, owner=own)

    def get(self, array):
        return array.owner

    def address(self, array):
        return array.pointer


FRAMEWORKS = {
    "numpy": NumPy,
    "torch": Torch,
    "torch by DLPack": TorchByDlpack,
    "jax": Jax,
    "versioned DLPack": Capsules,
    "older DLPack": lambda: Capsules(versioned=False, old_signature=True),
    "raw pointers": Pointers,
}


@pytest.fixture(params=list(FRAMEWORKS))
def framework(request):
    return FRAMEWORKS[request.param]()


@pytest.fixture(params=list(DTYPES))
def dtype(request):
    return request.param


def values(dtype, seed=0):
    return {slot.name: draw.random_array([seed, i], slot.shape, dtype) for i, slot in enumerate(LAYOUT.slots)}


def test_gradients_are_read_where_they_lie(framework, dtype):
    for name, array in values(dtype).items():
        theirs = framework.put(array)
        view = host_buffer(theirs, name)
        assert (view.pointer, view.dtype, view.size) == (framework.address(theirs), dtype, array.size)
        draw.assert_same_bits(view.data, array)


def test_a_step_of_two_micro_batches(framework, dtype):
    engine = GradientEngine(LAYOUT, max_norm=None)
    batches = [values(dtype, seed) for seed in (0, 1)]
    for batch in batches:
        engine.add({name: framework.put(array) for name, array in batch.items()})
    for name, gradient in engine.step().gradients.items():
        first, second = (batch[name].astype(np.float32) for batch in batches)
        draw.assert_same_bits(gradient, (first + second) * np.float32(0.5))


@pytest.mark.parametrize("hold", [1, 2])
def test_producers_may_go_right_after_add(framework, dtype, hold):
    """Their memory is taken by others meanwhile, where nobody keeps it."""
    engine = GradientEngine(LAYOUT, max_norm=None, hold=hold)
    for seed in (0, 1):
        batch = {name: framework.put(array) for name, array in values(dtype, seed).items()}
        engine.add(batch)
        del batch
        gc.collect()
        others = [framework.put(np.full(slot.shape, np.nan, DTYPES[dtype])) for slot in LAYOUT.slots * 5]
    result = engine.step()
    for name, gradient in result.gradients.items():
        first, second = (values(dtype, seed)[name].astype(np.float32) for seed in (0, 1))
        draw.assert_same_bits(gradient, (first + second) * np.float32(0.5))
    assert len(others) == 15


def test_the_result_is_the_frameworks_without_a_copy(framework):
    engine = GradientEngine(LAYOUT, max_norm=None)
    engine.add(values("float32"))
    for array, target in zip(engine.step().gradients.values(), engine.accumulator.arena.targets, strict=True):
        theirs = framework.imported(array)
        assert NumPy.address(framework, np.asarray(theirs)) == target.pointer


def test_a_step_writes_into_the_frameworks_own(framework, dtype):
    engine = GradientEngine(LAYOUT, max_norm=1.0)
    gradients = values("float32")
    out = {name: framework.put(np.zeros(array.shape, DTYPES[dtype])) for name, array in gradients.items()}
    addresses = {name: framework.address(array) for name, array in out.items()}
    engine.add(gradients)
    if not framework.writable:
        with pytest.raises(BufferRefused, match=r"destination 'layers\.0\.w' is read-only"):
            engine.step(out=out)
        return
    result = engine.step(out=out)
    for name, array in out.items():
        assert framework.address(array) == addresses[name]
        wanted = (gradients[name] * result.factor).astype(DTYPES[dtype])
        draw.assert_same_bits(framework.get(array).reshape(wanted.shape), wanted)
        assert result.gradients[name] is array


def test_clipping_in_place(framework, dtype):
    arrays = values(dtype)
    theirs = {name: framework.put(array) for name, array in arrays.items()}
    if not framework.writable:  # gradengine.jax.clip_by_global_norm gives new arrays
        with pytest.raises(BufferRefused, match=r"destination 'layers\.0\.w' is read-only"):
            clip_by_global_norm(theirs, 1.0)
        return
    norm = clip_by_global_norm(theirs, 1.0)
    assert norm == pytest.approx(draw.exact_norm(list(arrays.values())), rel=1e-6)
    for name, array in arrays.items():
        wanted = (array.astype(np.float32) * np.float32(1 / norm)).astype(DTYPES[dtype])
        draw.assert_same_bits(framework.get(theirs[name]).reshape(wanted.shape), wanted)


def test_frameworks_in_one_micro_batch():
    """Each component as it comes."""
    names = [name for name in ("numpy", "torch", "jax") if name == "numpy" or importlib.util.find_spec(name)]
    engine = GradientEngine(LAYOUT, max_norm=None)
    gradients = values("float32")
    mixed = {name: FRAMEWORKS[names[i % len(names)]]().put(array) for i, (name, array) in enumerate(gradients.items())}
    engine.add(mixed)
    for name, gradient in engine.step().gradients.items():
        draw.assert_same_bits(gradient, gradients[name])
