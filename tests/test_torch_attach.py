"""Hooks that give an engine each gradient as backward makes it: torch's own loop, bit for bit, and what is refused."""

import contextlib
import copy
import gc
import math
import re
import shutil
import warnings
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import strategies as draw
from hypothesis import given
from hypothesis import strategies as st
from interrupts import interrupted_at, places_of
from ranks import on_ranks

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from gradengine import GradientEngine  # noqa: E402
from gradengine.accumulate.state import State  # noqa: E402
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch, NonFiniteGradient, WindowError  # noqa: E402
from gradengine.torch import attach, gradients_of, layout_of, tensors_of  # noqa: E402

needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


class Net(torch.nn.Module):
    """Two blocks among others, the head tied to the embedding on demand; `skip` leaves a block out."""

    def __init__(self, seed=0, width=6, tied=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Linear(width, width, bias=False)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(2)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, width, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, x, skip=None, reentrant=None):
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = torch.tanh(layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant))
        return self.head(self.norm(x))


def batch(*seed, width=6, dtype=torch.float32):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((4, width), np.float32)).to(dtype)


def loss_of(module, *seed, **options):
    return module(batch(*seed, dtype=next(module.parameters()).dtype), **options).float().square().mean()


def pair(engine_options=None, **options):
    """The same module twice, with an engine each; the first is attached."""
    ours, theirs = Net(**options), Net(**options)
    engines = [GradientEngine(layout_of(module), **(engine_options or {})) for module in (ours, theirs)]
    return attach(ours, engines[0]), ours, theirs, engines


def by_hand(module, engine, loss, weight=1.0):
    """A micro-batch of torch's loop: gradients stay until they are added, all at once."""
    module.zero_grad()
    loss.backward()
    engine.add(gradients_of(module), weight)
    module.zero_grad()


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).tolist()


def assert_same_gradients(ours, theirs, result):
    """Each `.grad` of ours has the bits of the result, and is None where that is unused."""
    expected = tensors_of(theirs, result.gradients)
    for name, parameter in ours.named_parameters():
        if name in result.unused:
            assert parameter.grad is None, name
        else:
            assert bits(parameter.grad) == bits(expected[name].to(parameter.dtype)), name


def no_gradients(module):
    return all(parameter.grad is None for parameter in module.parameters())


def fail_within(attached, *losses, fault):
    with attached.micro_batch():
        for loss in losses:
            loss.backward()
        raise fault


def fail_within_another(attached, first, second):
    with attached.micro_batch():
        first.backward()
        backward_within(attached, second)


def backward_within(attached, *losses, **options):
    with attached.micro_batch(**options):
        for loss in losses:
            loss.backward()


class TestAsTorchsOwnLoop:
    @given(st.data())
    def test_gradients_have_the_bits_of_those_that_were_added_at_once(self, data):
        count = data.draw(st.integers(1, 4))
        options = {
            "max_norm": data.draw(st.sampled_from([None, 0.1])),
            "hold": data.draw(st.integers(1, 3)),
            "micro_batches": data.draw(st.sampled_from([None, count])),
            "average": data.draw(st.sampled_from(["weighted", "sum"])),
        }
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
        attached, ours, theirs, engines = pair(options, tied=data.draw(st.booleans()), dtype=dtype)
        for window in range(2):
            for k in range(count):
                skip, weight = data.draw(st.sampled_from([None, 0, 1])), data.draw(draw.weights)
                if data.draw(st.booleans()):
                    backward_within(attached, loss_of(ours, window, k, skip=skip), weight=weight)
                else:
                    weight = 1.0
                    loss_of(ours, window, k, skip=skip).backward()
                assert no_gradients(ours)
                by_hand(theirs, engines[1], loss_of(theirs, window, k, skip=skip), weight)
            found, expected = attached.step(), engines[1].step()
            assert (found.norm, found.weight, found.unused) == (expected.norm, expected.weight, expected.unused)
            assert_same_gradients(ours, theirs, expected)
            ours.zero_grad()

    @pytest.mark.parametrize(
        "optimizer",
        [
            lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
            lambda p: torch.optim.AdamW(p, lr=0.1),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        ],
        ids=["fused AdamW", "AdamW", "SGD"],
    )
    def test_a_loop_with_any_optimizer_and_a_schedule_learns_what_torchs_does(self, optimizer):
        ours, theirs = Net(), Net()
        attached = attach(ours, GradientEngine(layout_of(ours), max_norm=0.2, average="sum"))
        optimizers = [optimizer(module.parameters()) for module in (ours, theirs)]
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 8) for each in optimizers]
        for step in range(8):
            for k in range(3):
                for module in (ours, theirs):
                    (loss_of(module, step, k) / 3).backward()
            attached.step()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.2)
            for each in (*optimizers, *schedules):
                each.step()
            for module in (ours, theirs):
                module.zero_grad()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)

    def test_gradients_of_fp32_parameters_are_views_of_the_arena_and_others_are_not(self):
        attached, ours, *_ = pair()
        loss_of(ours, 0).backward()
        result = attached.step()
        assert np.shares_memory(ours.head.weight.grad.numpy(), result.gradients["head.weight"])
        attached, ours, *_ = pair(dtype=torch.bfloat16)
        loss_of(ours, 0).backward()
        attached.step()
        assert {parameter.grad.dtype for parameter in ours.parameters()} == {torch.bfloat16}

    def test_a_model_of_several_dtypes(self):
        ours, theirs = Net(dtype=torch.bfloat16), Net(dtype=torch.bfloat16)
        for module in (ours, theirs):
            module.norm.float()
            module.norm.register_forward_pre_hook(lambda _, args: args[0].float())
            module.norm.register_forward_hook(lambda *args: args[2].bfloat16())
        engines = [GradientEngine(layout_of(module), max_norm=0.1) for module in (ours, theirs)]
        attached = attach(ours, engines[0])
        loss_of(ours, 1).backward()
        by_hand(theirs, engines[1], loss_of(theirs, 1))
        attached.step()
        assert_same_gradients(ours, theirs, engines[1].step())
        assert ours.norm.weight.grad.dtype == torch.float32

    def test_channels_last(self):
        modules = [torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
        modules[1].load_state_dict(modules[0].state_dict())
        engines = [GradientEngine(layout_of(module)) for module in modules]
        attached, images = attach(modules[0], engines[0]), torch.randn(2, 3, 6, 6)
        modules[0](images).square().sum().backward()
        by_hand(modules[1], engines[1], modules[1](images).square().sum())
        attached.step()
        assert_same_gradients(*modules, engines[1].step())
        assert modules[0].weight.grad.stride() == modules[0].weight.stride()

    @pytest.mark.parametrize("is_attached", [True, False])
    def test_a_gradient_is_freed_before_backward_makes_the_next(self, is_attached):
        layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
        attached = attach(layers, GradientEngine(layout_of(layers))) if is_attached else None
        made, alive = [], []

        def note(gradient):
            made.append(weakref.ref(gradient.untyped_storage()))
            alive.append(sum(storage() is not None for storage in made))

        for parameter in layers.parameters():
            parameter.register_hook(note)
        layers(torch.ones(1, 8)).sum().backward()
        assert max(alive) == (1 if is_attached else 12)
        del attached


class TestWaysOfBackward:
    def test_tied_weights_come_once_with_the_sum_of_both_uses(self):
        attached, ours, theirs, engines = pair(tied=True)
        assert "head.weight" not in dict(ours.named_parameters())
        loss_of(ours, 0).backward()
        by_hand(theirs, engines[1], loss_of(theirs, 0))
        attached.step()
        assert_same_gradients(ours, theirs, engines[1].step())

    def test_several_backward_passes_are_one_micro_batch_of_their_sum(self):
        attached, ours, theirs, engines = pair()
        losses = [loss_of(ours, seed) for seed in range(3)]
        backward_within(attached, *losses, weight=2.0)
        for seed in range(3):
            by_hand(theirs, engines[1], loss_of(theirs, seed), 2.0)
        result, expected = attached.step(), engines[1].step()
        assert (result.micro_batches, result.weight) == (1, 2.0)
        for name, gradient in expected.gradients.items():  # the mean of three, of weight 6
            np.testing.assert_allclose(result.gradients[name], 3 * gradient, rtol=1e-6)

    def test_a_graph_that_is_kept_gives_its_gradient_again(self):
        attached, ours, *_ = pair()
        loss = loss_of(ours, 0)
        with attached.micro_batch():
            loss.backward(retain_graph=True)
            loss.backward()
        twice = {name: array.copy() for name, array in attached.step().gradients.items()}
        ours.zero_grad()
        loss_of(ours, 0).backward()
        for name, gradient in attached.step().gradients.items():
            np.testing.assert_array_equal(twice[name], 2 * gradient)

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activation_checkpointing(self, reentrant, tied):
        attached, ours, theirs, engines = pair(tied=tied)
        for seed in range(2):
            backward_within(attached, loss_of(ours, seed, reentrant=reentrant))
            by_hand(theirs, engines[1], loss_of(theirs, seed))
        assert attached.step().micro_batches == 2
        assert_same_gradients(ours, theirs, engines[1].step())

    def test_reentrant_checkpointing_that_uses_a_parameter_twice(self):
        """Its gradient comes in two parts, of which torch would make the sum."""
        attached, ours, theirs, engines = pair()

        def twice(module, x):
            return module.embed(checkpoint(module.embed, module.layers[0](x), use_reentrant=True)).square().mean()

        backward_within(attached, twice(ours, batch(0)))
        by_hand(theirs, engines[1], twice(theirs, batch(0)))
        found, expected = attached.step(), engines[1].step()
        assert (found.micro_batches, found.unused) == (1, expected.unused)
        for name, gradient in expected.gradients.items():
            np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-5, atol=1e-7)

    def test_without_a_with_reentrant_checkpointing_is_refused_where_its_part_comes_first(self):
        attached, ours, _, engines = pair()
        ours.head.requires_grad_(False)
        ours.norm.requires_grad_(False)
        with pytest.raises(
            WindowError, match=r"'layers.1.\w+', was made in a backward within a backward: .*use_reentrant"
        ):
            loss_of(ours, 0, reentrant=True).backward()
        assert engines[0].accumulator.state.now is State.EMPTY
        ours.zero_grad()
        loss_of(ours, 0, reentrant=False).backward()
        assert attached.step().micro_batches == 1

    def test_without_a_with_it_is_a_part_of_the_backward_around_it(self):
        attached, ours, theirs, engines = pair()
        for seed in range(2):
            loss_of(ours, seed, reentrant=True).backward()
            by_hand(theirs, engines[1], loss_of(theirs, seed))
        assert attached.step().micro_batches == 2
        assert_same_gradients(ours, theirs, engines[1].step())

    def test_frozen_late_frozen_and_unused_parameters(self):
        ours, theirs = Net(), Net()
        for module in (ours, theirs):
            module.embed.requires_grad_(False)
        engines = [GradientEngine(layout_of(module)) for module in (ours, theirs)]
        attached = attach(ours, engines[0])
        loss_of(ours, 0, skip=1).backward()
        by_hand(theirs, engines[1], loss_of(theirs, 0, skip=1))
        ours.norm.requires_grad_(False)  # late, with a gradient of the first micro-batch
        ours.head.requires_grad_(False)
        loss_of(ours, 1, skip=1).backward()
        theirs.zero_grad()
        loss_of(theirs, 1, skip=1).backward()
        late = [name for name in gradients_of(theirs) if name.startswith(("norm", "head"))]
        engines[1].add({**gradients_of(theirs), **dict.fromkeys(late)})
        result = attached.step()
        assert result.unused == {"layers.1.weight", "layers.1.bias"}
        assert ours.embed.weight.grad is None
        assert ours.norm.weight.grad is not None  # as torch, whose optimizers look at .grad alone
        assert_same_gradients_but_frozen(ours, theirs, engines[1].step())

    def test_a_backward_of_chosen_inputs(self):
        attached, ours, *_ = pair()
        loss_of(ours, 0).backward(inputs=[ours.head.weight])
        assert attached.step().unused == dict(ours.named_parameters()).keys() - {"head.weight"}

    def test_autograd_grad_is_no_micro_batch(self):
        attached, ours, *_ = pair()
        torch.autograd.grad(loss_of(ours, 0), ours.head.weight)
        with pytest.raises(WindowError, match="step 0 without a micro-batch"):
            attached.step()

    def test_gradients_that_can_be_derived_again(self):
        attached, ours, theirs, engines = pair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: it leaks, where gradients stay
            loss_of(ours, 0).backward(create_graph=True)
        by_hand(theirs, engines[1], loss_of(theirs, 0))
        attached.step()
        assert_same_gradients(ours, theirs, engines[1].step())

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compiled_modules(self, backend):
        attached, ours, theirs, engines = pair()
        compiled = torch.compile(ours, backend=backend)
        for seed in range(3):
            loss_of(compiled, seed).backward()
            assert no_gradients(ours)
            by_hand(theirs, engines[1], loss_of(theirs, seed))
        assert attached.step().micro_batches == 3
        assert_same_gradients(ours, theirs, engines[1].step())
        torch._dynamo.reset()

    def test_a_module_that_the_compiler_has_made_code_of(self):
        if shutil.which("g++") is None:
            pytest.skip("g++ is not installed")
        attached, ours, theirs, engines = pair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own parts, as it loads them
            compiled = torch.compile(ours)
            for seed in range(2):
                loss_of(compiled, seed).backward()
                by_hand(theirs, engines[1], loss_of(theirs, seed))
        result, expected = attached.step(), engines[1].step()
        for name, gradient in expected.gradients.items():
            np.testing.assert_allclose(result.gradients[name], gradient, rtol=1e-4, atol=1e-6)
        torch._dynamo.reset()

    @needs_distributed
    def test_within_no_sync_of_distributed_data_parallel(self, tmp_path):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
        try:
            attached, ours, theirs, engines = pair()
            parallel = torch.nn.parallel.DistributedDataParallel(ours)
            for seed in range(2):
                with parallel.no_sync():
                    loss_of(parallel, seed).backward()
                by_hand(theirs, engines[1], loss_of(theirs, seed))
            attached.step()
            assert_same_gradients(ours, theirs, engines[1].step())
        finally:
            torch.distributed.destroy_process_group()


def assert_same_gradients_but_frozen(ours, theirs, result):
    expected = tensors_of(theirs, result.gradients)
    for name, parameter in ours.named_parameters():
        if name in expected and name not in result.unused:
            assert bits(parameter.grad) == bits(expected[name]), name


class TestWhatGoesWrong:
    def failing(self, module, fault, seed=0, after="layers.1.weight"):
        """A loss whose backward fails once that parameter has its gradient."""

        def fail(gradient):
            raise fault

        hidden = batch(seed)
        hidden = torch.tanh(module.layers[0](module.embed(hidden)))
        hidden.register_hook(fail)
        return module.head(module.norm(torch.tanh(module.layers[1](hidden)))).square().mean()

    @pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt, MemoryError])
    @pytest.mark.parametrize("way", ["with", "alone"])
    def test_a_backward_that_failed_leaves_a_window_that_only_discard_leads_out_of(self, fault, way):
        attached, ours, theirs, engines = pair()
        loss_of(ours, 0).backward()
        loss = self.failing(ours, fault)
        with pytest.raises(fault):
            backward_within(attached, loss) if way == "with" else loss.backward()
        ours.zero_grad()
        for call in (attached.step, attached.micro_batch, loss_of(ours, 1).backward, engines[0].step):
            with pytest.raises(WindowError, match=r"step 0 (is broken|holds a part of a micro-batch).*discard\(\)"):
                call()
        assert attached._of_backward is None
        engines[0].discard()
        ours.zero_grad()
        loss_of(ours, 1).backward()
        by_hand(theirs, engines[1], loss_of(theirs, 1))
        assert attached.step().micro_batches == 1
        assert_same_gradients(ours, theirs, engines[1].step())

    def test_a_backward_that_failed_and_was_discarded_by_hand_is_forgotten(self):
        attached, ours, _, engines = pair()
        with pytest.raises(ZeroDivisionError):
            self.failing(ours, ZeroDivisionError).backward()
        engines[0].discard()
        loss_of(ours, 1).backward()
        assert attached.step().micro_batches == 1

    @pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
    def test_an_error_before_the_first_gradient_changes_nothing(self, fault):
        attached, ours, *_ = pair()
        loss_of(ours, 0).backward()
        with pytest.raises(fault):
            fail_within(attached, fault=fault)
        with pytest.raises(WindowError, match="no component has a gradient in this micro-batch"):
            backward_within(attached)
        loss_of(ours, 1).backward()
        assert attached.step().micro_batches == 2

    def test_an_error_after_backward_is_in_the_micro_batch_too(self):
        attached, ours, *_ = pair()
        with pytest.raises(ZeroDivisionError):
            fail_within(attached, loss_of(ours, 0), fault=ZeroDivisionError)
        with pytest.raises(WindowError, match="holds a part of a micro-batch"):
            attached.step()

    @pytest.mark.parametrize("way", ["with", "alone"])
    def test_interrupted_at_any_line_a_micro_batch_is_in_the_window_or_is_not_or_the_window_is_refused(self, way):
        def begun():
            module = torch.nn.Linear(2, 2)
            torch.nn.init.ones_(module.weight)
            engine = GradientEngine(layout_of(module))
            attached = attach(module, engine)
            module(torch.ones(1, 2)).sum().backward()
            return module, engine, attached

        def second(module, attached):
            loss = module(torch.full((1, 2), 4.0)).sum()
            backward_within(attached, loss) if way == "with" else loss.backward()

        module, _, attached = begun()
        places, ends = places_of(partial(second, module, attached)), set()
        for at in places:
            module, engine, attached = begun()
            interrupted_at(at, partial(second, module, attached))
            module.zero_grad()
            if engine.accumulator.state.now is State.OPEN:
                ends.add(round(attached.step().norm ** 2, 3))
            else:
                with pytest.raises(WindowError, match=r"discard\(\)"):
                    attached.step()
                ends.add("refused")
                engine.discard()
            module.zero_grad()
            module(torch.ones(1, 2)).sum().backward()
            assert attached.step().norm == pytest.approx(math.sqrt(6)), at
        assert ends == {6.0, 27.0, "refused"}  # 1s alone, or their mean with 4s for the weights

    def test_a_gradient_that_cannot_be_added(self):
        module = torch.nn.Embedding(5, 3)
        engine = GradientEngine(layout_of(module))
        attached = attach(module, engine)
        module.sparse = True
        with pytest.raises(BufferRefused, match=r"'weight'.*(sparse|strided)"):
            module(torch.tensor([1, 2])).sum().backward()
        module.sparse = False
        module.zero_grad()
        module(torch.tensor([1, 2])).sum().backward()
        assert attached.step().micro_batches == 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("clear", [lambda m: None, lambda m: m.zero_grad(set_to_none=False)], ids=["none", "zeros"])
    def test_the_last_steps_gradients_must_be_gone(self, dtype, clear):
        attached, ours, *_ = pair(dtype=dtype)
        loss_of(ours, 0).backward()
        attached.step()
        clear(ours)
        with pytest.raises(BufferRefused, match=r"still had the gradient of the last step, .* call zero_grad"):
            loss_of(ours, 1).backward()
        ours.zero_grad()
        loss_of(ours, 1).backward()
        assert attached.step().micro_batches == 1

    def test_while_it_is_paused_backward_is_torchs_own(self):
        """As where a generator's loss runs through the discriminator."""
        attached, ours, theirs, engines = pair()
        loss_of(ours, 0).backward()
        with attached.paused():
            loss_of(ours, 1).backward()
            assert ours.head.weight.grad is not None
        with pytest.raises(BufferRefused, match="still had the gradient of the last step, or of a pause,"):
            loss_of(ours, 2).backward()
        ours.zero_grad()
        loss_of(ours, 3).backward()
        for seed in (0, 3):
            by_hand(theirs, engines[1], loss_of(theirs, seed))
        result, expected = attached.step(), engines[1].step()
        assert (result.micro_batches, result.norm) == (2, expected.norm)
        for name, parameter in ours.named_parameters():
            np.testing.assert_array_equal(parameter.grad, expected.gradients[name])

    def test_a_micro_batch_that_is_made_and_not_entered(self):
        attached, ours, *_ = pair()
        attached.micro_batch(weight=300.0)
        with pytest.raises(WindowError, match=r"a micro_batch\(\) was made, and backward ran outside of it; with att"):
            loss_of(ours, 0).backward()
        backward_within(attached, loss_of(ours, 0), weight=300.0)
        assert attached.step().weight == 300

    def test_a_step_without_hooks(self):
        attached, ours, *_ = pair()
        loss_of(ours, 0).backward()
        attached.remove()
        with pytest.raises(CallerError, match=r"the hooks were removed, by remove\(\) or at the end of a `with`"):
            attached.step()

    @needs_distributed
    @pytest.mark.parametrize("is_meant", [False, True])
    def test_several_ranks_of_torch_and_no_exchange(self, is_meant, monkeypatch):
        """DistributedDataParallel's sum is lost with `.grad`, and each rank would go its own way."""
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        module = Net()
        attached = attach(module, GradientEngine(layout_of(module)), alone=is_meant)
        loss_of(module, 0).backward()
        with (
            contextlib.nullcontext()
            if is_meant
            else pytest.raises(CallerError, match=r"several ranks, and the engine no exchange.* exchange=connect\(\)")
        ):
            assert attached.step().micro_batches == 1

    def test_another_hook_that_takes_a_gradient_first(self):
        module = Net()
        module.head.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        attached = attach(module, GradientEngine(layout_of(module)))
        with pytest.raises(BufferRefused, match=r"'head.weight' has no gradient any more"):
            loss_of(module, 0).backward()
        attached.remove()

    def test_a_micro_batch_within_another(self):
        attached, ours, *_ = pair()
        with pytest.raises(WindowError, match="no component has a gradient"), attached.micro_batch():
            backward_within(attached, loss_of(ours, 0))
        assert attached.step().micro_batches == 1  # the inner one
        ours.zero_grad()
        with pytest.raises(WindowError, match="holds a part"):
            fail_within_another(attached, loss_of(ours, 0), loss_of(ours, 1))

    def test_nothing_is_set_by_a_step_that_failed(self):
        for dtype in (torch.float32, torch.bfloat16):
            attached, ours, *_ = pair(dtype=dtype)
            (loss_of(ours, 0) * math.inf).backward()
            with pytest.raises(NonFiniteGradient):
                attached.step()
            assert no_gradients(ours)

    def test_a_step_that_is_skipped_leaves_optimizers_nothing_to_do(self):
        attached, ours, *_ = pair({"on_non_finite": "skip"})
        optimizer = torch.optim.AdamW(ours.parameters())
        before = copy.deepcopy(ours.state_dict())
        (loss_of(ours, 0) * math.inf).backward()
        assert attached.step().skipped
        optimizer.step()
        assert all(torch.equal(before[name], value) for name, value in ours.state_dict().items())
        assert not optimizer.state


class TestAttaching:
    def test_what_does_not_belong_together(self):
        module = Net()
        engine = GradientEngine(layout_of(module))
        with pytest.raises(LayoutMismatch, match=r"component '2.weight' differs: got none, expected \(5, 5\)"):
            attach(
                torch.nn.Sequential(*[torch.nn.Linear(5, 5) for _ in range(3)][:3]),
                GradientEngine(layout_of(torch.nn.Sequential(*[torch.nn.Linear(5, 5) for _ in range(2)]))),
            )
        with pytest.raises(LayoutMismatch, match=r"component 'embed.weight' differs: got \(6, 6\), expected \(7, 7\)"):
            attach(Net(width=7), engine)
        with pytest.raises(LayoutMismatch, match=r"component 'head.weight' differs: got \(6, 6\), expected none"):
            attach(Net(tied=True), engine)
        with pytest.raises(BufferRefused, match=r"'embed.weight' is on another device than the engine: got meta"):
            attach(Net().to("meta"), engine)
        with pytest.raises(CallerError, match="engine"):
            attach(module, None)
        with pytest.raises(CallerError, match="not a torch module"):
            attach(None, engine)
        loss_of(module, 0).backward()
        with pytest.raises(BufferRefused, match=r"has a gradient already; call zero_grad\(\) before attach"):
            attach(module, engine)
        module.zero_grad()
        attach(module, engine)

    def test_twice(self):
        attached, ours, theirs, engines = pair()
        with pytest.raises(CallerError, match=r"'embed.weight' is attached to an engine already; remove"):
            attach(ours, GradientEngine(layout_of(ours)))
        with pytest.raises(CallerError, match="'0' is attached to an engine already"):
            attach([ours.head.weight], GradientEngine(layout_of([ours.head.weight])))
        with pytest.raises(CallerError, match="the engine is attached to another module"):
            attach(theirs, engines[0])
        attached.remove()
        attached.remove()
        attached = attach(theirs, engines[0])
        loss_of(theirs, 0).backward()
        assert engines[0].step().micro_batches == 1

    def test_at_the_end_of_its_with_the_hooks_are_gone(self):
        module = Net()
        with attach(module, engine := GradientEngine(layout_of(module))) as attached:
            loss_of(module, 0).backward()
            attached.step()
            module.zero_grad()
        loss_of(module, 0).backward()
        assert module.head.weight.grad is not None
        assert not engine.has_open_window

    def test_the_hooks_are_gone_with_what_was_returned_and_keep_nothing_alive(self):
        module = Net()
        engine = GradientEngine(layout_of(module))
        attached = attach(module, engine)
        loss_of(module, 0).backward()
        assert engine.step().micro_batches == 1
        parameters = [weakref.ref(parameter) for parameter in module.parameters()]
        del attached
        loss_of(module, 0).backward()
        assert module.head.weight.grad is not None
        attached = attach(module, engine) if module.zero_grad() is None else None
        del module, attached
        gc.collect()
        assert [reference() for reference in parameters] == [None] * len(parameters)

    def test_a_copy_of_the_module_is_not_attached(self):
        _, ours, _, engines = pair()
        other = copy.deepcopy(ours)
        loss_of(other, 0).backward()
        assert other.head.weight.grad is not None
        assert not engines[0].has_open_window

    def test_parameters_that_were_changed_since(self):
        ours = Net()
        ours.embed.requires_grad_(False)
        engine = GradientEngine(layout_of(ours))
        attached = attach(ours, engine)
        loss_of(ours, 0).backward()
        ours.embed.requires_grad_(True)
        with pytest.raises(LayoutMismatch, match=r"'embed.weight' requires gradients, and did not when"):
            attached.step()
        ours.embed.requires_grad_(False)
        kept, ours.head.weight = ours.head.weight, torch.nn.Parameter(torch.ones(6, 6))
        with pytest.raises(LayoutMismatch, match=r"'head.weight' is another tensor than when"):
            attached.step()
        ours.head.weight = kept
        assert attached.step().micro_batches == 1

    def test_a_list_of_parameters(self):
        module = Net()
        parameters = list(module.parameters())
        attached = attach(parameters, GradientEngine(layout_of(parameters)))
        loss_of(module, 0).backward()
        assert attached.step().norm > 0
        assert module.head.weight.grad is not None

    def test_by_hand_in_between(self):
        attached, ours, _, engines = pair()
        loss_of(ours, 0).backward()
        engines[0].add({name: np.ones(p.shape, np.float32) for name, p in ours.named_parameters()}, 2.0)
        loss_of(ours, 1).backward()
        assert attached.step().weight == 4.0


class TestSeveralWorkers:
    @pytest.mark.parametrize("micro_batches", [None, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_all_ranks_have_the_bytes_of_whole_micro_batches(self, micro_batches, dtype):
        start = Net(dtype=dtype)  # made once: the generator that draws it is all threads'

        def work(attaches):
            def stepped(exchange):
                module, found = copy.deepcopy(start), []
                options = {"max_norm": 0.1, "micro_batches": micro_batches}
                engine = GradientEngine(layout_of(module), exchange=exchange, **options)
                attached = attach(module, engine) if attaches else None
                for window in range(3):
                    for k in range(2):
                        # Blocks are finished in another order on each rank, and one is left out now and then.
                        loss = loss_of(module, window, k, exchange.rank, skip=(window + exchange.rank) % 3)
                        loss.backward() if attaches else by_hand(module, engine, loss)
                    result = attached.step() if attaches else engine.step()
                    gradients = gradients_of(module) if attaches else tensors_of(module, result.gradients)
                    found.append((result.norm, [bits(g.to(dtype)) for g in gradients.values()]))
                    module.zero_grad()
                return found

            return stepped

        ours, whole = on_ranks(work(True), 2), on_ranks(work(False), 2)
        assert ours[0] == ours[1] == whole[0] == whole[1]

    def test_blocks_leave_while_backward_runs(self):
        def work(exchange):
            module = Net()
            engine = GradientEngine(layout_of(module), exchange=exchange, micro_batches=2)
            attached, found = attach(module, engine), []
            module.embed.weight.register_hook(lambda _: found.append(set(engine._reducer.workers.started)))
            loss_of(module, 0).backward()
            loss_of(module, 1).backward()
            found.append(set(engine._reducer.workers.started))
            attached.step()
            return found

        before = {"head.weight", "norm.weight", "norm.bias", 0, 1}
        assert on_ranks(work, 2) == [[set(), before, before | {"embed.weight"}]] * 2

    def test_without_a_count_of_micro_batches_last_says_when(self):
        def work(exchange):
            module = Net()
            engine = GradientEngine(layout_of(module), exchange=exchange)
            attached, found = attach(module, engine), []
            for last in (False, True):
                backward_within(attached, loss_of(module, 0), last=last)
                found.append(len(engine._reducer.workers.started))
            attached.step()
            return found

        assert on_ranks(work, 2) == [[0, 6]] * 2

    def test_several_passes_in_the_last_micro_batch_are_refused_or_said(self):
        def work(exchange):
            module = Net()
            engine = GradientEngine(layout_of(module), exchange=exchange, micro_batches=1)
            attached = attach(module, engine)
            backward_within(attached, loss_of(module, 0), loss_of(module, 1), last=False)
            result = attached.step()
            module.zero_grad()
            with pytest.raises(WindowError, match=r"was sent .*; use micro_batch\(last=False\)"):
                backward_within(attached, loss_of(module, 0), loss_of(module, 1))
            with pytest.raises(WindowError, match="is broken"):
                attached.step()
            return result.micro_batches

        assert on_ranks(work, 2) == [2, 2]

    def test_a_rank_without_a_micro_batch(self):
        def work(exchange):
            module = Net()
            engine = GradientEngine(layout_of(module), exchange=exchange)
            attached = attach(module, engine)
            loss_of(module, 0).backward() if exchange.rank else engine.add(None, weight=0)
            attached.step()
            return bits(module.head.weight.grad)

        first, second = on_ranks(work, 2)
        assert first == second


class Gpt(Net):
    """What nanoGPT's model answers: its logits and the loss."""

    def forward(self, x, y):
        logits = super().forward(x)
        return logits, (logits - y).square().mean()


class Enough(Exception):
    """There are no more batches."""


class TestTheReadme:
    """A loop before and after."""

    def weights(self, without, monkeypatch):
        text = (Path(__file__).parent.parent / "README.md").read_text()
        lines = re.search(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1].splitlines()
        for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
        model = Net()
        names = {
            "torch": torch,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05),
            "loss_of": lambda output, y: (output - y).square().mean(),
            "windows": [[(batch(step, k), torch.zeros(())) for k in range(3)] for step in range(4)],
        }
        exec(compile("\n".join(line[1:] for line in lines if line[0] != without), "README.md", "exec"), names)
        if "engine" in names:
            names["engine"].exchange.close()
        return [parameter.detach().numpy() for parameter in model.parameters()]

    def test_the_loop_learns_what_it_did(self, monkeypatch):
        before, after = (self.weights(which, monkeypatch) for which in "+-")
        for ours, theirs in zip(after, before, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


class TestThePage:
    """nanoGPT's loop, as docs/torch.md shows it before and after."""

    TEXT = (Path(__file__).parent.parent / "docs" / "torch.md").read_text()
    LINES = re.search(r"^```text\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)[1].splitlines()

    def losses(self, without, is_enabled):
        program = "\n".join(line[1:] for line in self.LINES if line[0] != without)
        model, found = Gpt(), []
        model.register_forward_hook(lambda *args: found.append(args[2][1].item()))

        def get_batch(_):
            if len(found) == 24:
                raise Enough
            return batch(len(found)), torch.zeros(())

        names = {
            "torch": torch,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled=is_enabled),
            "device": "cpu",
            "grad_clip": 0.05,
            "gradient_accumulation_steps": 4,
            "ctx": contextlib.nullcontext(),
            "get_batch": get_batch,
            "X": batch(0),
            "Y": torch.zeros(()),
        }
        with pytest.raises(Enough):
            exec(compile(program, "docs/torch.md", "exec"), names)
        return found, names["scaler"].state_dict()

    @pytest.mark.parametrize("is_enabled", [True, False])
    def test_the_loop_learns_what_it_did(self, is_enabled):
        (before, scale), (after, our_scale) = (self.losses(which, is_enabled) for which in "+-")
        assert before[-1] < before[0] / 2
        np.testing.assert_allclose(after, before, rtol=1e-4)
        assert scale == our_scale

    def test_at_most_five_lines_change(self):
        assert [sum(line[0] == sign for line in self.LINES) for sign in "+-"] == [5, 5]


class TestGradScaler:
    def scaler(self, **options):
        return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**4, "growth_interval": 3, **options})

    @pytest.mark.parametrize("way", ["alone", "unscale_ is left", "a trainer steps it"])
    @pytest.mark.parametrize("bad", [(), (0,), (2, 3, 9)])
    def test_losses_skips_and_scale_are_those_of_torchs_own_loop(self, bad, way):
        """Over many steps, with a loss that is not finite in some; growth and backoff both come."""
        modules, scalers = [Net(), Net()], [self.scaler(), self.scaler()]
        is_trainers = way == "a trainer steps it"
        on_non_finite = "pass" if is_trainers else "skip"
        engine = GradientEngine(layout_of(modules[0]), max_norm=0.05, average="sum", on_non_finite=on_non_finite)
        attached = attach(modules[0], engine)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=0.02) for module in modules]
        seen = [[], []]
        for step in range(14):
            for which, (module, scaler) in enumerate(zip(modules, scalers, strict=True)):
                for k in range(2):
                    loss = loss_of(module, step, k) / 2
                    seen[which].append(loss.item())
                    scaler.scale(loss * (math.inf if step in bad and k else 1)).backward()
            if way == "unscale_ is left":
                scalers[0].unscale_(optimizers[0])
            result = attached.step(scaler=scalers[0], unscale=not is_trainers)
            if is_trainers:
                scalers[0].step(optimizers[0])
                scalers[0].update()
            else:
                optimizers[0].step()
            scalers[1].unscale_(optimizers[1])
            torch.nn.utils.clip_grad_norm_(modules[1].parameters(), 0.05)
            scalers[1].step(optimizers[1])
            scalers[1].update()
            for module in modules:
                module.zero_grad()
            assert math.isfinite(result.norm) == (step not in bad)
            assert scalers[0].state_dict() == scalers[1].state_dict()
        assert scalers[0].get_scale() != 2.0**4
        np.testing.assert_allclose(seen[0], seen[1], rtol=1e-4)
        assert [s["step"] for s in optimizers[0].state.values()] == [s["step"] for s in optimizers[1].state.values()]

    def test_what_a_trainer_is_left_is_clipped_by_the_true_norm_and_scaled(self):
        attached, ours, theirs, engines = pair({"on_non_finite": "pass", "max_norm": 0.01})
        scaler = self.scaler()
        scaler.scale(loss_of(ours, 0)).backward()
        by_hand(theirs, engines[1], loss_of(theirs, 0))
        result, expected = attached.step(scaler=scaler, unscale=False), engines[1].step()
        assert result.norm == pytest.approx(expected.norm, rel=1e-6)
        for name, parameter in ours.named_parameters():
            np.testing.assert_allclose(parameter.grad, 2.0**4 * expected.gradients[name], rtol=1e-5, atol=1e-9)

    def test_one_that_is_not_enabled_is_none(self):
        attached, ours, *_ = pair()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(loss_of(ours, 0)).backward()
        assert attached.step(scaler=scaler).norm > 0

    def test_what_is_refused_and_keeps_the_window(self):
        attached, ours, *_ = pair()
        scaler = self.scaler()
        scaler.scale(loss_of(ours, 0)).backward()
        with pytest.raises(
            CallerError, match="steps are skipped, and this engine does not skip: got on_non_finite='raise'"
        ):
            attached.step(scaler=scaler)
        attached, ours, _, engines = pair({"on_non_finite": "skip"})
        loss_of(ours, 0).backward()
        with pytest.raises(CallerError, match=r"the scaler has scaled no loss; call scaler.scale\(loss\)"):
            attached.step(scaler=self.scaler())
        with pytest.raises(CallerError, match="scaler"):
            attached.step(scaler=2.0**16)
        scaler = self.scaler()
        scaler.scale(torch.ones(1))
        with pytest.raises(
            CallerError,
            match=r"trainer's GradScaler must find NaN and Inf in .grad to skip a step: got .*'skip'; build",
        ):
            attached.step(scaler=scaler, unscale=False)
        with pytest.raises(CallerError, match="unscale is not a bool"):
            attached.step(scaler=scaler, unscale=None)
        assert engines[0].accumulator.accumulated_count == 1
        assert attached.step().norm > 0

    def test_ranks_skip_alike(self):
        def work(exchange):
            module, scaler = Net(), self.scaler()
            engine = GradientEngine(layout_of(module), exchange=exchange, on_non_finite="skip")
            attached = attach(module, engine)
            scaler.scale(loss_of(module, 0) * (math.inf if exchange.rank else 1)).backward()
            assert attached.step(scaler=scaler).skipped
            return scaler.get_scale(), no_gradients(module)

        assert on_ranks(work, 2) == [(2.0**3, True)] * 2
