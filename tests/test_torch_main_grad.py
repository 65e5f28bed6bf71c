"""Layers that add weight gradients to `main_grad` in backward, as TransformerEngine's and Megatron-LM's do."""

import copy
from functools import partial

import numpy as np
import pytest
from ranks import on_ranks, started

torch = pytest.importorskip("torch")

from gradengine import GradientEngine  # noqa: E402
from gradengine.accumulate import groups  # noqa: E402
from gradengine.errors import CallerError, NonFiniteGradient, WindowError  # noqa: E402
from gradengine.torch import attach, gradients_of, layout_of  # noqa: E402


class Fused(torch.autograd.Function):
    """A linear layer whose backward adds to `weight.main_grad`, in fp32, where the weight has one."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        if not hasattr(weight, "main_grad"):
            return gradient @ weight, gradient.T @ x
        weight.main_grad += gradient.T.float() @ x.float()
        if not hasattr(weight, "grad_added_to_main_grad"):
            return gradient @ weight, None
        weight.grad_added_to_main_grad = True
        fill = 0.0 if getattr(weight, "zero_out_wgrad", False) else float("nan")
        return gradient @ weight, torch.full_like(weight, fill)


class Net(torch.nn.Module):
    """Fused layers among others; the first weight is also used by a plain layer at the end."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.to(dtype)

    def forward(self, x, fused=(0, 1), tied=False):
        for i, layer in enumerate(self.layers):
            x = Fused.apply(x, layer.weight) + layer.bias if i in fused else layer(x)
        return torch.nn.functional.linear(x, self.layers[0].weight) if tied else x


def batch(*seed, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, (2, 4)).astype("f4")).to(dtype)


def pair(dtype=torch.float32, **options):
    ours = Net(dtype)
    theirs = copy.deepcopy(ours)
    engines = [GradientEngine(layout_of(module), **options) for module in (ours, theirs)]
    return attach(ours, engines[0], main_grad=True), ours, theirs, engines


def loss_of(module, *seed, **options):
    return module(batch(*seed, dtype=module.unused.dtype), **options).float().sum()


def assert_close(found, expected):
    assert found.unused == expected.unused == {"unused"}
    assert found.norm == pytest.approx(expected.norm, rel=1e-5)
    for name, gradient in expected.gradients.items():
        if name not in expected.unused:
            np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hold", [1, 3])
@pytest.mark.parametrize("micro_batches", [3, None])
@pytest.mark.parametrize("tied", [False, True])
def test_the_sum_is_that_of_plain_layers(tied, micro_batches, hold):
    """Which layers are fused may change from one micro-batch to the next, and windows follow each other."""
    attached, ours, theirs, engines = pair(max_norm=1.0, hold=hold, micro_batches=micro_batches)
    ours.layers[0].weight.zero_out_wgrad = tied
    for window in range(2):
        for k, fused in enumerate([(0, 1), (0,), (0, 1, 2)]):
            with attached.micro_batch():
                loss_of(ours, window, k, fused=fused, tied=tied).backward()
            theirs.zero_grad()
            loss_of(theirs, window, k, fused=(), tied=tied).backward()
            engines[1].add(gradients_of(theirs))
        assert_close(attached.step(), engines[1].step())
        assert ours.layers[1].weight.grad.data_ptr() == ours.layers[1].weight.main_grad.data_ptr()
        ours.zero_grad()


def test_a_bf16_model_has_fp32_sums_for_master_weights():
    """`engine.step()` leaves the result in each `main_grad`."""
    attached, ours, theirs, engines = pair(torch.bfloat16)
    with attached.micro_batch():
        loss_of(ours, 0).backward()
    loss_of(theirs, 0, fused=()).backward()
    engines[1].add(gradients_of(theirs))
    found, expected = engines[0].step(), engines[1].step()
    weight = ours.layers[1].weight
    assert (weight.main_grad.dtype, weight.grad) == (torch.float32, None)
    np.testing.assert_allclose(weight.main_grad, expected.gradients["layers.1.weight"], rtol=0.1, atol=0.05)
    assert found.micro_batches == 1
    with attached.micro_batch():
        loss_of(ours, 1).backward()
    attached.step()
    assert weight.grad.dtype == torch.bfloat16


def test_what_a_layer_added_is_measured_and_searched():
    attached, ours, *_ = pair(micro_batches=1)
    with attached.micro_batch():
        (loss_of(ours, 0) * float("inf")).backward()
    with pytest.raises(NonFiniteGradient, match=r"layers\.\d\.(weight|bias)"):
        attached.step()


def test_blocks_leave_while_backward_runs(monkeypatch):
    monkeypatch.setattr(groups, "JOINED", 0)
    start = Net()

    def work(exchange):
        ours, found = copy.deepcopy(start), []
        engine = GradientEngine(layout_of(ours), exchange=exchange, micro_batches=1)
        attached = attach(ours, engine, main_grad=True)
        ours.layers[0].weight.register_hook(lambda _: found.append(started(engine)))
        with attached.micro_batch():
            loss_of(ours, exchange.rank).backward()
        result = attached.step()
        assert 2 in found[0]  # the last layer's block, before the first layer's gradient was there
        return {name: gradient.tolist() for name, gradient in result.gradients.items()}

    first, second = on_ranks(work, 2)
    assert first == second


@pytest.mark.parametrize("tied", [False, True])
def test_several_ranks_sum_what_layers_added_and_what_hooks_took(tied):
    """Also in blocks that are joined, some of which a layer completes before the others' hooks."""
    start = Net()

    def work(main_grad, exchange):
        module = copy.deepcopy(start)
        module.layers[0].weight.zero_out_wgrad = tied
        engine = GradientEngine(layout_of(module), exchange=exchange, micro_batches=2)
        attached = attach(module, engine, main_grad=main_grad)
        for k in range(2):
            with attached.micro_batch():
                loss_of(module, exchange.rank, k, fused=(0, 2) if main_grad else (), tied=tied).backward()
        return {name: gradient.copy() for name, gradient in attached.step().gradients.items()}

    for found, expected in zip(*(on_ranks(partial(work, way), 2) for way in (True, False)), strict=True):
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-5)


class TestRefused:
    @pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
    def test_a_failed_backward_leaves_a_window_that_only_discard_leads_out_of(self, fault):
        def fail():
            with attached.micro_batch():
                loss_of(ours, 0).backward()
                raise fault

        attached, ours, theirs, engines = pair()
        with pytest.raises(fault):
            fail()
        for call in (attached.step, fail):
            with pytest.raises(WindowError, match=r"discard\(\)"):
                call()
        engines[0].discard()
        ours.zero_grad()
        with attached.micro_batch():
            loss_of(ours, 1).backward()
        loss_of(theirs, 1, fused=()).backward()
        engines[1].add(gradients_of(theirs))
        assert_close(attached.step(), engines[1].step())

    @pytest.mark.parametrize("way", ["bare", "full", "autograd.grad"])
    def test_what_layers_add_outside_of_a_micro_batch_spoils_the_window(self, way):
        attached, ours, _, engines = pair(micro_batches=1 if way == "full" else None)
        with attached.micro_batch():
            loss_of(ours, 0).backward()
        x = batch(1).requires_grad_()
        loss = Fused.apply(x, ours.layers[1].weight).sum()
        if way == "autograd.grad":
            torch.autograd.grad(loss, x)
        else:
            with pytest.raises(WindowError, match=r"'layers\.1\.weight' ran outside of micro_batch"):
                loss.backward()
        with pytest.raises(WindowError, match=r"discard\(\)"):
            attached.step()
        engines[0].discard()
        ours.zero_grad()
        with attached.micro_batch():
            loss_of(ours, 2, fused=()).backward()  # a layer that has added before is not taken for one that adds now
        assert float(attached.step().gradients["layers.1.weight"].sum()) != 0

    def test_a_weight_and_a_pause_and_another_owner(self):
        attached, ours, theirs, engines = pair()
        with pytest.raises(WindowError, match="weight 2"), attached.micro_batch(weight=2.0):
            pass
        assert not engines[0].has_open_window
        with pytest.raises(CallerError, match="paused"), attached.paused():
            pass
        theirs.unused.main_grad = torch.zeros(3)
        with pytest.raises(CallerError, match="'unused' has a main_grad"):
            attach(theirs, engines[1], main_grad=True)
        assert not hasattr(theirs.layers[0].weight, "main_grad")
        attached.remove()
        assert not hasattr(ours.unused, "main_grad")
        assert not hasattr(ours.unused, "grad_added_to_main_grad")


def test_with_an_engine_that_drops_micro_batches_it_is_refused():
    module = torch.nn.Linear(2, 2)
    engine = GradientEngine(layout_of(module), on_non_finite="drop_micro_batch")
    with pytest.raises(CallerError, match="main_grad"):
        attach(module, engine, main_grad=True)
    assert not hasattr(module.weight, "main_grad")
    attach(module, engine).remove()
