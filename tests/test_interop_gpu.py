"""torch and JAX with their gradients on a real GPU, in and out: addresses, bits, and streams of their own.

What needs no GPU of these is in test_arrays_frameworks.py and test_kernels_streams.py, with a stand-in for torch.
"""

import gc
import importlib.util

import ml_dtypes
import numpy as np
import pytest
import strategies as draw
from backends import available, missing
from devices import on_host

from gradengine import GradientEngine, GradientLayout, clip_by_global_norm
from gradengine.errors import BufferRefused

LAYOUT = GradientLayout.of({"layers.0.w": (300, 50), "layers.0.b": (7,), "head": (2, 1, 4)})
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Torch:
    writable = True

    def __init__(self):
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")

    def put(self, array):
        if array.dtype == np.int32:
            return self.torch.from_numpy(array.copy()).cuda()
        bits = {2: np.int16, 4: np.int32}[array.itemsize]
        here = self.torch.from_numpy(array.view(bits).copy())
        return here.cuda().view(getattr(self.torch, array.dtype.name))

    def get(self, array):
        return array.float().cpu().numpy()

    def address(self, array):
        return array.data_ptr()

    def imported(self, array):
        return self.torch.from_dlpack(array)


class Jax:
    writable = False

    def __init__(self):
        self.jax = pytest.importorskip("jax")
        if self.jax.default_backend() != "gpu":
            pytest.skip("this JAX has no CUDA")

    def put(self, array):
        return self.jax.numpy.asarray(array)

    def get(self, array):
        return np.asarray(array).astype(np.float32)

    def address(self, array):
        return array.unsafe_buffer_pointer()

    def imported(self, array):
        return self.jax.dlpack.from_dlpack(array)


FRAMEWORKS = {"torch": Torch, "jax": Jax}
RUNNABLE = [name for name in FRAMEWORKS if missing("cupy") is None and importlib.util.find_spec(name)]


@pytest.fixture
def gpu():
    return available("cupy")


@pytest.fixture(params=RUNNABLE or ["torch"], ids=lambda name: f"{name}-cupy")
def framework(request, gpu):
    return FRAMEWORKS[request.param]()


@pytest.fixture(params=list(DTYPES))
def dtype(request):
    return request.param


def values(dtype, seed=0):
    return {slot.name: draw.random_array([seed, i], slot.shape, dtype) for i, slot in enumerate(LAYOUT.slots)}


def test_gradients_are_read_where_they_lie(gpu, framework, dtype):
    for name, array in values(dtype).items():
        theirs = framework.put(array)
        view = gpu.kernels.device.view(theirs, name)
        assert (view.pointer, view.dtype, view.size) == (framework.address(theirs), dtype, array.size)
        assert view.writable is framework.writable


@pytest.mark.parametrize("hold", [1, 2])
def test_producers_may_go_right_after_add(gpu, framework, dtype, hold):
    engine = GradientEngine(LAYOUT, gpu.kernels, max_norm=None, hold=hold)
    for seed in (0, 1):
        batch = {name: framework.put(array) for name, array in values(dtype, seed).items()}
        engine.add(batch)
        del batch
        gc.collect()
        others = [framework.put(np.full(slot.shape, np.nan, DTYPES[dtype])) for slot in LAYOUT.slots * 5]
    for name, gradient in engine.step().gradients.items():
        first, second = (values(dtype, seed)[name].astype(np.float32) for seed in (0, 1))
        draw.assert_same_bits(on_host(gradient), (first + second) * np.float32(0.5))
    assert len(others) == 15


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_weights_are_read_where_they_lie(gpu, framework, kind):
    engine, host = (GradientEngine(LAYOUT, gpu.kernels, max_norm=None, hold=2) for _ in range(2))
    for seed, tokens in enumerate((300, 7)):
        batch = {name: framework.put(array) for name, array in values("float32", seed).items()}
        engine.add(batch, weight=framework.put(np.array(tokens, kind)))
        host.add(batch, weight=tokens)
    found, expected = engine.step(), host.step()
    assert float(found.weight) == expected.weight == 307
    for name, gradient in found.gradients.items():
        draw.assert_same_bits(on_host(gradient), on_host(expected.gradients[name]))


def test_the_result_is_the_frameworks_without_a_copy(gpu, framework):
    engine = GradientEngine(LAYOUT, gpu.kernels, max_norm=None)
    gradients = values("float32")
    engine.add({name: framework.put(array) for name, array in gradients.items()})
    result = engine.step()
    for (name, array), target in zip(result.gradients.items(), engine.accumulator.arena.targets, strict=True):
        theirs = framework.imported(array)
        assert framework.address(theirs) == target.pointer
        draw.assert_same_bits(framework.get(theirs), gradients[name])


@pytest.fixture
def torch(gpu):
    return Torch()


class TestTorchCupy:
    def test_a_step_writes_into_its_own(self, gpu, torch, dtype):
        engine, gradients = GradientEngine(LAYOUT, gpu.kernels, max_norm=1.0), values("float32")
        out = {name: torch.put(np.zeros(array.shape, DTYPES[dtype])) for name, array in gradients.items()}
        engine.add({name: torch.put(array) for name, array in gradients.items()})
        factor = np.float32(on_host(engine.step(out=out).factor))
        for name, array in out.items():
            wanted = (gradients[name] * factor).astype(DTYPES[dtype]).astype(np.float32)
            draw.assert_same_bits(torch.get(array), wanted)

    @pytest.mark.parametrize("makes_new", [True, False])
    def test_a_stream_of_its_own(self, torch, gpu, makes_new):
        """Written late on torch's stream, overwritten there at once; read there after the step."""
        t, engine = torch.torch, GradientEngine(LAYOUT, gpu.kernels, max_norm=None)
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

    def test_what_was_not_cleared_is_told_and_what_was_is_not_asked(self, torch, gpu):
        from gradengine.torch import gradients_of

        t, module = torch.torch, torch.torch.nn.Linear(64, 8).cuda()

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

    def test_clipping_in_place(self, torch, gpu, dtype):
        arrays = values(dtype)
        theirs = {name: torch.put(array) for name, array in arrays.items()}
        norm = clip_by_global_norm(theirs, 1.0)
        assert float(norm) == pytest.approx(draw.exact_norm(list(arrays.values())), rel=1e-6)

    def test_its_own_signature(self, torch, gpu):
        from gradengine.torch import clip_grad_norm_

        t = torch.torch
        parameters = [t.nn.Parameter(t.zeros(1000, 33, device="cuda")) for _ in range(5)]
        for parameter in parameters:
            parameter.grad = t.randn_like(parameter)
        expected = [parameter.grad.clone() for parameter in parameters]
        theirs = [t.nn.Parameter(t.zeros_like(parameter)) for parameter in parameters]
        for parameter, gradient in zip(theirs, expected, strict=True):
            parameter.grad = gradient
        norms = clip_grad_norm_(parameters, 1.0), t.nn.utils.clip_grad_norm_(theirs, 1.0)
        assert norms[0].device == norms[1].device
        t.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for ours, their in zip(parameters, theirs, strict=True):
            t.testing.assert_close(ours.grad, their.grad, rtol=2e-5, atol=1e-9)

    @pytest.mark.parametrize("is_bad", [False, True])
    def test_a_fused_optimizer_takes_a_deferred_step(self, torch, gpu, is_bad):
        from gradengine.torch import gradients_of, layout_of, step_fused

        t = torch.torch
        t.manual_seed(0)
        ours = t.nn.Linear(300, 50, device="cuda")
        other = t.nn.Linear(300, 50, device="cuda")
        other.load_state_dict(ours.state_dict())
        engine = GradientEngine(layout_of(ours), gpu.kernels, max_norm=0.5, on_non_finite="skip")
        fused, plain = (t.optim.AdamW(m.parameters(), lr=0.1, fused=m is ours) for m in (ours, other))
        before = [parameter.clone() for parameter in ours.parameters()]
        for module in (ours, other):
            module(t.ones(8, 300, device="cuda") * (float("nan") if is_bad else 1)).square().sum().backward()
        engine.add(gradients_of(ours))
        result = engine.step(deferred=True)
        step_fused(fused, result, ours)
        if not is_bad:
            t.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            plain.step()
        wanted = before if is_bad else list(other.parameters())
        for parameter, value in zip(ours.parameters(), wanted, strict=True):
            t.testing.assert_close(parameter.data, value.data, rtol=1e-4, atol=1e-5)
