"""Every framework, in and out, in every dtype: the same memory by address, and producers that may go.

torch and JAX with their gradients on a real GPU, too. What needs no GPU of these is in test_arrays_frameworks.py and
test_kernels_streams.py, with a stand-in for torch.
"""

import contextlib
import copy
import importlib.util

import ml_dtypes
import numpy as np
import pytest
import strategies as draw
from backends import available, runnable
from devices import on_host
from producers import OlderTorch, Producer

from gradengine import GradientEngine, GradientLayout, RawBuffer, clip_by_global_norm
from gradengine.errors import BufferRefused, CallerError
from gradengine.kernels import HostKernels

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LAYOUT = GradientLayout.of({"layers.0.w": (300, 50), "layers.0.b": (7,), "head": (2, 1, 4)})


class NumPy:
    """NumPy's arrays, bf16 by ml_dtypes; the others are as this one but for what they change."""

    writable = True
    kernels = HostKernels(1)

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
        if array.dtype == np.int32:
            return self.torch.from_numpy(array.copy())
        bits = {2: np.int16, 4: np.int32}[array.itemsize]
        return self.torch.from_numpy(array.view(bits).copy()).view(getattr(self.torch, array.dtype.name))

    def get(self, array):
        return array.float().cpu().numpy().astype(DTYPES[str(array.dtype).removeprefix("torch.")])

    def address(self, array):
        return array.data_ptr()

    def imported(self, array):
        return self.torch.from_dlpack(array)


class TorchOnAGpu(Torch):
    def __init__(self):
        super().__init__()
        if not self.torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")
        self.kernels = available("cupy").kernels

    def put(self, array):
        return super().put(array).cuda()


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


class JaxOnAGpu(Jax):
    def __init__(self):
        super().__init__()
        if self.jax.default_backend() != "gpu":
            pytest.skip("this JAX has no CUDA")
        self.kernels = available("cupy").kernels


class Capsules(NumPy):
    """A producer made by hand."""

    def __init__(self, kind):
        self.kind = kind

    def put(self, array):
        return self.kind(array.copy())

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
    "jax": Jax,
    "versioned DLPack": lambda: Capsules(Producer),
    "older torch": lambda: Capsules(OlderTorch),
    "raw pointers": Pointers,
    "torch-cupy": TorchOnAGpu,
    "jax-cupy": JaxOnAGpu,
}
HERE = [
    name
    for name in FRAMEWORKS
    if "-" not in name or (runnable(["cupy"]) and importlib.util.find_spec(name.partition("-")[0]))
]


@pytest.fixture(params=HERE)
def framework(request):
    return FRAMEWORKS[request.param]()


@pytest.fixture(params=list(DTYPES))
def dtype(request):
    return request.param


def new_engine(framework, **options):
    return GradientEngine(LAYOUT, framework.kernels, **{"max_norm": None, **options})


def values(dtype, seed=0):
    return {slot.name: draw.random_array([seed, i], slot.shape, dtype) for i, slot in enumerate(LAYOUT.slots)}


def put_all(framework, arrays):
    return {name: framework.put(array) for name, array in arrays.items()}


def test_gradients_are_read_where_they_lie(framework, dtype):
    for name, array in values(dtype).items():
        theirs = framework.put(array)
        view = framework.kernels.device.view(theirs, name)
        assert (view.pointer, view.dtype, view.size) == (framework.address(theirs), dtype, array.size)
        assert view.writable is framework.writable


@pytest.mark.parametrize("hold", [1, 2])
def test_producers_may_go_right_after_add(framework, dtype, hold):
    """Their memory is taken by others meanwhile, where nobody keeps it."""
    engine = new_engine(framework, hold=hold)
    for seed in (0, 1):
        batch = put_all(framework, values(dtype, seed))
        engine.add(batch)
        del batch
        others = [framework.put(np.full(slot.shape, np.nan, DTYPES[dtype])) for slot in LAYOUT.slots * 5]
    for name, gradient in engine.step().gradients.items():
        first, second = (values(dtype, seed)[name].astype(np.float32) for seed in (0, 1))
        draw.assert_same_bits(on_host(gradient), (first + second) * np.float32(0.5))
    assert len(others) == 15


def test_the_result_is_the_frameworks_without_a_copy(framework):
    engine, gradients = new_engine(framework), values("float32")
    engine.add(put_all(framework, gradients))
    for (name, array), target in zip(engine.step().gradients.items(), engine.accumulator.arena.targets, strict=True):
        theirs = framework.imported(array)
        assert framework.kernels.device.view(theirs, name).pointer == target.pointer
        draw.assert_same_bits(on_host(array), gradients[name])


def test_a_step_writes_into_the_frameworks_own(framework, dtype):
    engine, gradients = new_engine(framework, max_norm=1.0), values("float32")
    out = put_all(framework, {name: np.zeros(array.shape, DTYPES[dtype]) for name, array in gradients.items()})
    addresses = {name: framework.address(array) for name, array in out.items()}
    engine.add(put_all(framework, gradients))
    if not framework.writable:
        with pytest.raises(BufferRefused, match=r"'layers\.0\.w' is read-only"):
            engine.step(out=out)
        return
    result = engine.step(out=out)
    for name, array in out.items():
        assert framework.address(array) == addresses[name]
        wanted = (gradients[name] * np.float32(on_host(result.factor))).astype(DTYPES[dtype])
        draw.assert_same_bits(framework.get(array).reshape(wanted.shape), wanted)
        assert result.gradients[name] is array


def test_clipping_in_place(framework, dtype):
    arrays = values(dtype)
    theirs = put_all(framework, arrays)
    if not framework.writable:  # gradengine.jax.clip_by_global_norm gives new arrays
        with pytest.raises(BufferRefused, match=r"'layers\.0\.w' is read-only"):
            clip_by_global_norm(theirs, 1.0)
        return
    norm = float(clip_by_global_norm(theirs, 1.0))
    assert norm == pytest.approx(draw.exact_norm(list(arrays.values())), rel=1e-6)
    for name, array in arrays.items():
        wanted = (array.astype(np.float32) * np.float32(1 / norm)).astype(DTYPES[dtype])
        draw.assert_same_bits(framework.get(theirs[name]).reshape(wanted.shape), wanted)


def test_frameworks_in_one_micro_batch():
    """Each component as it comes."""
    names = [name for name in ("numpy", "torch", "jax") if name == "numpy" or importlib.util.find_spec(name)]
    engine, gradients = GradientEngine(LAYOUT, max_norm=None), values("float32")
    engine.add({n: FRAMEWORKS[names[i % len(names)]]().put(array) for i, (n, array) in enumerate(gradients.items())})
    for name, gradient in engine.step().gradients.items():
        draw.assert_same_bits(gradient, gradients[name])


ON_A_GPU = pytest.mark.parametrize("framework", [n for n in HERE if "-" in n] or ["torch-cupy"], indirect=True)
OF_TORCH = pytest.mark.parametrize("framework", ["torch-cupy"], indirect=True)


@ON_A_GPU
def test_a_weight_in_a_gpus_memory_is_refused_and_nothing_is_added(framework):
    engine, batch = new_engine(framework), put_all(framework, values("float32"))
    with pytest.raises(CallerError, match="weight"):
        engine.add(batch, weight=framework.put(np.array(300, "float32")))
    engine.add(batch, weight=7)
    assert float(engine.step().weight) == 7


@pytest.mark.parametrize("framework", ["torch", "torch-cupy"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hooks_give_the_bits_of_gradients_that_are_added_by_hand(framework, dtype):
    """On a stream of torch's own, if it has streams; a window is skipped, and a GradScaler follows."""
    from gradengine.torch import attach, gradients_of, layout_of

    t, device = framework.torch, framework.put(np.zeros(1, np.float32)).device
    start = t.nn.Sequential(t.nn.Linear(300, 50), t.nn.Tanh(), t.nn.Linear(50, 7)).to(device, getattr(t, dtype))
    ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
    options = {"max_norm": 0.5, "on_non_finite": "skip"}
    engine, by_hand = (GradientEngine(layout_of(m), framework.kernels, **options) for m in (ours, theirs))
    attached, scaler = attach(ours, engine), t.amp.GradScaler(device.type, init_scale=2.0**4)
    with t.cuda.stream(t.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext():
        for window in range(4):
            for k in range(2):
                x = t.full((8, 300), k + 1.0 if window != 1 else float("inf"), dtype=getattr(t, dtype), device=device)
                scale = scaler.scale(t.ones((), device=device))
                (ours(x).square().mean().float() * scale).backward()
                theirs.zero_grad()
                (theirs(x).square().mean().float() * scale).backward()
                by_hand.add(gradients_of(theirs))
            expected = by_hand.step(out=gradients_of(theirs, allocate=True), loss_scale=float(scale))
            found = attached.step(scaler=scaler)
            assert float(found.skipped) == float(expected.skipped) == (window == 1)
            for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert our.grad is None if window == 1 else t.equal(our.grad, their.grad)
            ours.zero_grad()
    assert scaler.get_scale() == 2.0**3


@OF_TORCH
class TestTorchOnAGpu:
    @pytest.mark.parametrize("makes_new", [True, False])
    def test_a_stream_of_its_own(self, framework, makes_new):
        """Written late on torch's stream, overwritten there at once; read there after the step."""
        t, engine = framework.torch, new_engine(framework)
        kept = [t.zeros(slot.shape, device="cuda") for slot in LAYOUT.slots]
        t.cuda.synchronize()
        with t.cuda.stream(t.cuda.Stream()):
            for value in (1.0, 2.0, 3.0):
                gradients = [t.empty_like(tensor) for tensor in kept] if makes_new else kept
                t.cuda._sleep(20_000_000)
                for tensor in gradients:
                    tensor.fill_(value)
                engine.add(gradients)
                for tensor in gradients:
                    tensor.fill_(float("nan"))
                del gradients
                copies = [t.from_dlpack(array).clone() for array in engine.step().gradients.values()]
                assert all(bool((copy == value).all()) for copy in copies)

    def test_what_was_not_cleared_is_told_and_what_was_is_not_asked(self, framework):
        from gradengine.torch import gradients_of

        t, module = framework.torch, framework.torch.nn.Linear(64, 8).cuda()

        def backward():
            module(t.ones(2, 64, device="cuda")).sum().backward()

        backward()
        gradients_of(module)
        t.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                module.zero_grad(set_to_none=False)
                backward()
                gradients_of(module)
        finally:
            t.cuda.set_sync_debug_mode("default")
        backward()
        with pytest.raises(BufferRefused, match=r"'weight' was not cleared"):
            gradients_of(module)

    def test_its_own_signature(self, framework):
        from gradengine.torch import clip_grad_norm_

        t = framework.torch
        ours, theirs = ([t.nn.Parameter(t.zeros(1000, 33, device="cuda")) for _ in range(5)] for _ in range(2))
        for our, their in zip(ours, theirs, strict=True):
            our.grad = t.randn_like(our)
            their.grad = our.grad.clone()
        norms = clip_grad_norm_(ours, 1.0), t.nn.utils.clip_grad_norm_(theirs, 1.0)
        assert norms[0].device == norms[1].device
        t.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for our, their in zip(ours, theirs, strict=True):
            t.testing.assert_close(our.grad, their.grad, rtol=2e-5, atol=1e-9)

    @pytest.mark.parametrize("is_bad", [False, True])
    def test_a_fused_optimizer_takes_a_deferred_step(self, framework, is_bad):
        from gradengine.torch import gradients_of, layout_of, step_fused

        t = framework.torch
        ours, other = (t.nn.Linear(300, 50, device="cuda") for _ in range(2))
        other.load_state_dict(ours.state_dict())
        engine = GradientEngine(layout_of(ours), framework.kernels, max_norm=0.5, on_non_finite="skip")
        fused, plain = (t.optim.AdamW(m.parameters(), lr=0.1, fused=m is ours) for m in (ours, other))
        before = [parameter.clone() for parameter in ours.parameters()]
        for module in (ours, other):
            module(t.ones(8, 300, device="cuda") * (float("nan") if is_bad else 1)).square().sum().backward()
        engine.add(gradients_of(ours))
        step_fused(fused, engine.step(deferred=True), ours)
        if not is_bad:
            t.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            plain.step()
        for parameter, value in zip(ours.parameters(), before if is_bad else other.parameters(), strict=True):
            t.testing.assert_close(parameter.data, value.data, rtol=1e-4, atol=1e-5)
