"""A deferred step, which torch's fused optimizers average, clip and skip by themselves."""

import copy
import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

from torch_modules import accumulated, assert_same_bits, averaged, backward, net  # noqa: E402

from gradengine import GradientEngine  # noqa: E402
from gradengine.errors import BufferRefused, CallerError  # noqa: E402
from gradengine.torch import give_gradients, gradients, gradients_of, layout_of, step_fused, tensors_of  # noqa: E402

NAN = math.nan
FUSED = {
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=0.1, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **o),
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
    "SGD with momentum": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, **o),
}
STEPS = (((0, 1), (3.0, 5.0)), ((2,), (7.0,)), ((3, 4, 5), (1.0, 2.0, 4.0)))


def copied(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def state_of(optimizer):
    return [value for state in optimizer.state_dict()["state"].values() for value in state.values()]


def deferred(module, **options):
    return accumulated(module, **options).step(deferred=True)


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize(("max_norm", "loss_scale"), [(0.05, 1024.0), (1e9, 1.0)])
def test_it_is_an_optimizer_on_averaged_and_clipped_gradients_which_it_leaves(kind, max_norm, loss_scale):
    """torch's own optimizer, not fused, on gradients averaged and clipped in fp64."""
    ours, theirs = net(), net()
    optimizer, reference = FUSED[kind](ours.parameters(), fused=True), FUSED[kind](theirs.parameters())
    for seeds, weights in STEPS:
        expected = averaged(theirs, seeds, weights, max_norm)
        engine = accumulated(ours, seeds, weights, max_norm=max_norm, loss_scale=loss_scale)
        with torch.device("meta"):  # a user's default device is not the model's
            step_fused(optimizer, engine.step(deferred=True), ours)
        for (name, p), mine in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            p.grad = expected[name].float()
            torch.testing.assert_close(mine.grad, p.grad, rtol=1e-3, atol=1e-5)
        reference.step()
        ours.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for one, other in zip(state_of(optimizer), state_of(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("skips", [(0,), (1,)])
def test_a_skipped_step_changes_neither_parameters_nor_state_and_leaves_no_trace(kind, skips):
    """torch's SGD makes its momentum's memory in the first step and fills it only if that is not skipped."""
    modules = net(), net()
    optimizers = [FUSED[kind](m.parameters(), fused=True) for m in modules]
    for module, optimizer, left_out in zip(modules, optimizers, ((), skips), strict=True):
        engine = GradientEngine(layout_of(module), max_norm=0.5, on_non_finite="skip")
        for number in range(3):
            if number in left_out:
                continue
            backward(module, number)
            if is_bad := number in skips and not left_out:
                module[2].bias.grad[0] = NAN
            engine.add(gradients_of(module))
            before = copied(module.parameters()), copy.deepcopy(state_of(optimizer))
            result = engine.step(deferred=True)
            assert result.skipped is is_bad
            step_fused(optimizer, result, module)
            module.zero_grad()
            if is_bad:
                assert_same_bits(module.parameters(), before[0])
                if number:
                    assert_same_bits(state_of(optimizer), before[1])
            else:
                assert not torch.equal(module[0].weight, before[0][0])
            assert all(torch.isfinite(value).all() for value in state_of(optimizer))
    assert_same_bits(modules[0].parameters(), modules[1].parameters())


@pytest.mark.parametrize("skips", [(), (0,), (0, 1), (0, 2), (1,)])
@pytest.mark.parametrize("options", [{"dampening": 0.3}, {"dampening": 1.0, "weight_decay": 0.1}, {"nesterov": True}])
def test_an_sgds_first_step_is_the_first_that_is_not_skipped(skips, options):
    """Against torch's own kernel with grad_scale and found_inf, which is called for no step that is skipped."""
    modules = net(), net()
    ours, torchs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True, **options) for m in modules)
    engine = GradientEngine(layout_of(modules[0]), max_norm=0.5, on_non_finite="skip")
    for number in range(4):
        backward(modules[0], number)
        if number in skips:
            modules[0][2].bias.grad[0] = NAN
        engine.add(gradients_of(modules[0]))
        result = engine.step(deferred=True)
        assert result.skipped is (number in skips)
        if number not in skips:
            views = tensors_of(modules[1], result.sums)
            for name, parameter in modules[1].named_parameters():
                parameter.grad = views[name].clone()
            torchs.grad_scale, torchs.found_inf = torch.tensor(float(result.inverse_factor)), torch.tensor(0.0)
            torchs.step()
        step_fused(ours, result, modules[0])
        modules[0].zero_grad()
        assert_same_bits(modules[0].parameters(), list(modules[1].parameters()))


def test_a_gpus_numbers_are_handed_on_where_they_lie_with_no_wait(monkeypatch):
    """They stand for what cannot be here: reading one on the host would be the wait."""

    class OnGpu:
        def __init__(self, value):
            self.there = torch.tensor(float(value), dtype=torch.float32)

        def __dlpack_device__(self):
            return (2, 0)

        def __float__(self):
            raise AssertionError("the host read a number on the GPU")

    module = net()
    given = deferred(module, weights=[4.0], max_norm=0.05)
    there = dataclasses.replace(given._decision, inverse=OnGpu(given.inverse_factor), skipped=OnGpu(0.0))
    result = dataclasses.replace(given, _decision=there)
    optimizer, seen = torch.optim.AdamW(module.parameters(), fused=True), []
    optimizer.register_step_pre_hook(lambda own, *_: seen.extend((own.grad_scale, own.found_inf)))
    from_dlpack = gradients.from_dlpack
    monkeypatch.setattr(gradients, "from_dlpack", lambda a: a.there if isinstance(a, OnGpu) else from_dlpack(a))
    step_fused(optimizer, result, module)
    assert seen[0] is result.inverse_factor.there
    assert seen[1] is result.skipped.there


@pytest.mark.parametrize("fails", [False, True])
def test_it_takes_its_two_attributes_away_again(fails):
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    seen = []

    def look(optimizer, *_):
        seen.extend((optimizer.grad_scale, optimizer.found_inf))
        if fails:
            raise ArithmeticError

    optimizer.register_step_pre_hook(look)
    result = deferred(module, weights=[4.0], max_norm=0.05)
    if fails:
        with pytest.raises(ArithmeticError):
            step_fused(optimizer, result, module)
        assert all(parameter.grad is None for parameter in module.parameters())  # no sum for the next optimizer
    else:
        step_fused(optimizer, result, module)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    assert [(each.dtype, each.shape) for each in seen] == [(torch.float32, ())] * 2
    assert [float(each) for each in seen] == [float(result.inverse_factor), 0.0]


def test_the_last_micro_batchs_gradient_is_no_part_of_it():
    """`.grad` is that micro-batch's alone, and would be divided by the whole window's factor."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    engine = GradientEngine(layout_of(module))
    for value in (1.0, 3.0):
        module.weight.grad = torch.full((1, 1), value)
        engine.add(gradients_of(module))
    step_fused(torch.optim.SGD(module.parameters(), lr=1.0, fused=True), engine.step(deferred=True), module)
    assert module.weight.item() == -2


def test_a_sum_reaches_no_other_optimizer():
    module = net()
    result = deferred(module)
    for use in (
        lambda: give_gradients(module, result),
        lambda: tensors_of(module, result.gradients),
        lambda: result.gradients["0.weight"],
    ):
        with pytest.raises(CallerError, match="deferred"):
            use()
    assert all(parameter.grad is None for parameter in module.parameters())


def test_layers_in_any_order_and_parameters_of_no_elements_are_taken():
    """Blocks lie before what is outside of them, whatever the order of the names is."""
    module = torch.nn.ParameterDict({"z": torch.nn.Parameter(torch.ones(3)), "none": torch.nn.Parameter(torch.ones(0))})
    module.layers = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    engine = GradientEngine(layout_of(module), max_norm=None)
    engine.add([torch.ones_like(p).detach() for p in module.parameters()])
    result = engine.step(deferred=True)
    addresses = [array.ctypes.data for array in result.sums.values() if array.size]
    assert addresses != sorted(addresses)
    step_fused(optimizer, result, module)
    assert module["z"][0] < 1


def test_an_optimizer_of_ones_own_that_takes_both():
    class Own(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data -= p.grad / self.grad_scale

    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    engine = GradientEngine(layout_of(module), max_norm=1.0)
    engine.add([torch.tensor([[6.0, 8.0]])], weight=2)
    step_fused(Own(module.parameters(), {}), engine.step(deferred=True), module)
    torch.testing.assert_close(module.weight.detach(), torch.tensor([[-0.6, -0.8]]))


class TestRefused:
    def refused(self, module, optimizer, result, words, kind=CallerError):
        before = copied(module.parameters()), [p.grad for p in module.parameters()]
        with pytest.raises(kind, match=words):
            step_fused(optimizer, result, module)
        assert_same_bits(module.parameters(), before[0])
        assert all(p.grad is gradient for p, gradient in zip(module.parameters(), before[1], strict=True))
        assert not optimizer.state
        assert not hasattr(optimizer, "grad_scale")

    @pytest.mark.parametrize(
        "new",
        [
            torch.optim.AdamW,
            lambda p: torch.optim.AdamW(p, foreach=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            torch.optim.RMSprop,
        ],
        ids=["AdamW", "foreach", "SGD", "RMSprop"],
    )
    def test_an_optimizer_that_is_not_fused(self, new):
        module = net()
        optimizer = new(module.parameters())
        self.refused(module, optimizer, deferred(module), f"got {type(optimizer).__name__}, expected .*fused=True")

    def test_one_whose_loaded_state_says_not_fused(self):
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        optimizer.load_state_dict(torch.optim.AdamW(module.parameters()).state_dict())
        self.refused(module, optimizer, deferred(module), "fused=True")

    def test_a_fused_one_that_takes_no_scale_in_this_torch(self):
        """As Adagrad's of torch 2.11."""
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        del optimizer._step_supports_amp_scaling
        self.refused(module, optimizer, deferred(module), "got AdamW, expected .* accepts a scale; use engine")

    @pytest.mark.parametrize("then", ["add", "window"])
    def test_a_result_that_is_out_of_date(self, then):
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        engine = accumulated(module, weights=[2.0])
        stale = engine.step(deferred=True)
        engine.add({name: torch.ones_like(p) for name, p in module.named_parameters()}, weight=100)
        current = engine.step(deferred=True) if then == "window" else None
        self.refused(module, optimizer, stale, "step 0 is out of date")
        with pytest.raises(CallerError, match="step 0 is out of date"):
            give_gradients(module, stale)
        if current is not None:
            step_fused(optimizer, current, module)

    def test_a_result_that_is_scaled_already(self):
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        self.refused(module, optimizer, accumulated(module).step(), "deferred=True")

    def test_an_optimizer_of_another_module(self):
        """It would do nothing at all."""
        module, optimizer = net(), torch.optim.AdamW(net().parameters(), fused=True)
        self.refused(module, optimizer, deferred(module), "none of the optimizer's parameters")

    def test_a_gradient_that_is_not_of_the_module_by_group_and_position(self):
        module, other = net(), torch.nn.Linear(3, 2)
        other(torch.ones(1, 3)).sum().backward()
        groups = [{"params": list(module.parameters())}, {"params": [torch.nn.Parameter(torch.ones(2)), other.bias]}]
        optimizer, result = torch.optim.AdamW(groups, fused=True), deferred(module)
        self.refused(module, optimizer, result, r"param_groups\[1\]\['params'\]\[1\]", BufferRefused)
        other.zero_grad()
        step_fused(optimizer, result, module)  # one without a gradient is passed over

    def test_a_sparse_gradient_of_another_parameter(self):
        module, embedding = net(), torch.nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        optimizer = torch.optim.SGD([*module.parameters(), *embedding.parameters()], lr=0.1, fused=True)
        self.refused(module, optimizer, deferred(module), "not this result's", BufferRefused)
