"""Hooks that give an engine each gradient as backward makes it: torch's own loop, bit for bit, and what is refused."""

import contextlib
import copy
import gc
import itertools
import math
import re
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import strategies as draw
from hypothesis import example, given
from hypothesis import strategies as st
from interrupts import interrupted_at, places_of, raised_at
from ranks import on_ranks, started

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_modules import loop_of_the_readme, needs_distributed  # noqa: E402

from gradengine import GradientEngine, SpikePolicy  # noqa: E402
from gradengine.accumulate import groups  # noqa: E402
from gradengine.accumulate.state import State  # noqa: E402
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch, NonFiniteGradient, WindowError  # noqa: E402
from gradengine.torch import attach, give_gradients, gradients_of, layout_of, tensors_of  # noqa: E402


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
        if name in result.unused or name not in expected:
            assert parameter.grad is None, name
        else:
            assert bits(parameter.grad) == bits(expected[name].to(parameter.dtype)), name


SPIKES = SpikePolicy("skip", z_score=None, threshold=1e-6)  # each step is one


def gradient_norm(module):
    norms = [parameter.grad.norm() for parameter in module.parameters() if parameter.grad is not None]
    return float(torch.stack(norms).norm())


def no_gradients(module):
    return all(parameter.grad is None for parameter in module.parameters())


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
            "average": data.draw(st.sampled_from(["weighted", "prescaled"])),
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
            if dtype is torch.float32:
                assert np.shares_memory(ours.embed.weight.grad.numpy(), found.gradients["embed.weight"])
            ours.zero_grad()

    def test_a_model_of_several_dtypes_and_orders_of_memory(self):
        modules = [
            torch.nn.Sequential(
                torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), torch.nn.Conv2d(4, 2, 3).bfloat16()
            )
            for _ in range(2)
        ]
        modules[1].load_state_dict(modules[0].state_dict())
        engines = [GradientEngine(layout_of(module), max_norm=0.1) for module in modules]
        attached, images = attach(modules[0], engines[0]), torch.randn(2, 3, 6, 6)
        losses = [module[1](module[0](images).bfloat16()).float().square().sum() for module in modules]
        losses[0].backward()
        by_hand(modules[1], engines[1], losses[1])
        attached.step()
        assert_same_gradients(*modules, engines[1].step())
        assert [p.grad.dtype for p in modules[0].parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
        assert modules[0][0].weight.grad.stride() == modules[0][0].weight.stride()

    @pytest.mark.parametrize("used", ["all", "all but the biases"])
    def test_one_blocks_gradients_are_alive_beside_the_one_that_backward_makes(self, used, monkeypatch):
        monkeypatch.setattr(groups, "JOINED", 0)
        layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
        attached, made, alive = attach(layers, GradientEngine(layout_of(layers))), [], []

        def note(gradient):
            made.append(weakref.ref(gradient.untyped_storage()))
            alive.append(sum(storage().nbytes() for storage in made if storage() is not None))

        for parameter in layers.parameters():
            parameter.register_hook(note)
        block = 4 * (64 + 8)
        x = torch.ones(1, 8)
        for layer in layers:
            x = torch.nn.functional.linear(x, layer.weight, layer.bias if used == "all" else None)
        x.sum().backward()
        assert 4 * 64 <= max(alive) <= block + 4 * 64  # of 6 blocks that torch would hold
        assert attached.step().micro_batches == 1

    def test_gradients_are_added_on_the_stream_that_made_them(self, monkeypatch):
        """Streams are numbers that the CPU's device only notes."""
        attached, ours, theirs, engines = pair()
        streams, current, added = iter([7, 7, 7, *[8] * 6, 8, 8]), [], []
        device, add = engines[0].accumulator.kernels.device, engines[0].accumulator.add_components
        monkeypatch.setattr(attached, "_current_stream", lambda: next(streams))
        monkeypatch.setattr(type(device), "on", lambda _, stream: contextlib.nullcontext(current.append(stream)))

        def note(span, gradients, *given, **options):
            added.append((current[-1], sum(gradient is not None for gradient in gradients)))
            add(span, gradients, *given, **options)

        monkeypatch.setattr(engines[0].accumulator, "add_components", note)
        loss_of(ours, 0).backward()
        by_hand(theirs, engines[1], loss_of(theirs, 0))
        assert added == [(7, 3), (8, 5)]
        assert_same_gradients(ours, theirs, attached.step() and engines[1].step())

    def test_memory_to_which_backward_added_may_be_written_after_the_hook(self):
        """As DistributedDataParallel does to its buckets, of which each `.grad` may be a view."""

        def rewrite(bucket, _):
            bucket.zero_()

        attached, ours, theirs, engines = pair()
        for parameter in ours.parameters():
            parameter.grad = bucket = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(partial(rewrite, bucket))
        loss_of(ours, 0).backward()
        by_hand(theirs, engines[1], loss_of(theirs, 0))
        assert_same_gradients(ours, theirs, attached.step() and engines[1].step())


class TestWaysOfBackward:
    @pytest.mark.parametrize(
        "losses",
        [
            [*(lambda net, seed=seed: loss_of(net, seed) for seed in range(3))],
            [lambda net: net.embed(checkpoint(net.embed, net.norm(batch(0)), use_reentrant=True)).square().mean()],
        ],
        ids=["several passes", "reentrant checkpointing of a part that uses a parameter twice"],
    )
    def test_gradients_that_come_in_parts_are_one_micro_batch_of_their_sum(self, losses):
        attached, ours, theirs, engines = pair()
        backward_within(attached, *(loss(ours) for loss in losses), weight=2.0)
        by_hand(theirs, engines[1], sum(loss(theirs) for loss in losses), 2.0)
        found, expected = attached.step(), engines[1].step()
        assert (found.micro_batches, found.weight, found.unused) == (1, 2.0, expected.unused)
        for name, gradient in expected.gradients.items():
            np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("way", ["with", "alone"])
    @pytest.mark.parametrize(
        "kind", ["reentrant", "checkpointed", "derived again", pytest.param("compiled", marks=pytest.mark.slow)]
    )
    def test_whatever_torch_does_in_backward_the_gradients_are_the_same(self, kind, way):
        """Without a `with` a checkpointed part that is run again belongs to the backward around it."""
        attached, ours, theirs, engines = pair(tied=True)
        called = torch.compile(ours, backend="aot_eager") if kind == "compiled" else ours
        reentrant = {"reentrant": True, "checkpointed": False}.get(kind)
        for seed in range(2):
            with warnings.catch_warnings(), attached.micro_batch() if way == "with" else contextlib.nullcontext():
                warnings.simplefilter("ignore")  # torch: create_graph leaks, where gradients stay
                loss_of(called, seed, reentrant=reentrant).backward(create_graph=kind == "derived again")
            assert no_gradients(ours)
            by_hand(theirs, engines[1], loss_of(theirs, seed))
        assert attached.step().micro_batches == 2
        assert_same_gradients(ours, theirs, engines[1].step())
        if kind == "compiled":
            torch._dynamo.reset()

    @pytest.mark.parametrize("way", ["by hand", "hooks", "with"])
    def test_inside_of_torch_compile_the_engine_runs_as_it_is(self, way):
        attached, ours, theirs, engines = pair({"max_norm": 0.1})

        def step(x):
            if way == "by hand":
                theirs.zero_grad()
                theirs(x).square().mean().backward()
                engines[1].add(gradients_of(theirs))
                give_gradients(theirs, engines[1].step())
            else:
                with attached.micro_batch(weight=2.0) if way == "with" else contextlib.nullcontext():
                    ours(x).square().mean().backward()
                attached.step()

        torch.compile(step, backend="eager")(batch(0))
        way = "hooks" if way == "by hand" else "by hand"
        step(batch(0))
        assert [bits(p.grad) for p in ours.parameters()] == [bits(p.grad) for p in theirs.parameters()]
        torch._dynamo.reset()

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of Dynamo
    def test_a_backward_whose_end_cannot_be_seen_needs_a_with(self):
        attached, ours, *_ = pair()
        with torch._dynamo.config.patch(compiled_autograd=True):
            backward = torch.compile(lambda: loss_of(ours, 0).backward(), backend="eager")
            with pytest.raises(CallerError, match=r"'head.weight' cannot be seen.*attached\.micro_batch\(\)"):
                backward()
            ours.zero_grad()
            with attached.micro_batch():
                backward()
        assert attached.step().micro_batches == 1
        torch._dynamo.reset()

    def test_without_a_with_reentrant_checkpointing_is_refused_where_its_part_comes_first(self):
        attached, ours, _, engines = pair()
        ours.head.requires_grad_(False)
        ours.norm.requires_grad_(False)
        with pytest.raises(WindowError, match=r"'layers.1.\w+' cannot be seen: nested"):
            loss_of(ours, 0, reentrant=True).backward()
        assert engines[0].accumulator.state.now is State.EMPTY
        ours.zero_grad()
        loss_of(ours, 0, reentrant=False).backward()
        assert attached.step().micro_batches == 1

    def test_frozen_late_frozen_and_unused_parameters(self):
        modules = Net(), Net()
        for module in modules:
            module.embed.requires_grad_(False)
        engines = [GradientEngine(layout_of(module)) for module in modules]
        attached = attach(modules[0], engines[0])
        for is_late in (False, True):
            modules[0].norm.weight.requires_grad_(not is_late)  # it has the first micro-batch's gradient
            for module in modules:
                loss_of(module, is_late, skip=1).backward()
            if is_late:
                modules[1].norm.weight.grad = None
            engines[1].add(gradients_of(modules[1]))
            modules[1].zero_grad()
        result = attached.step()
        assert result.unused == {"layers.1.weight", "layers.1.bias"}
        assert_same_gradients(*modules, engines[1].step())

    def test_a_backward_of_chosen_inputs_is_a_micro_batch_and_autograd_grad_is_none(self):
        attached, ours, *_ = pair()
        torch.autograd.grad(loss_of(ours, 0), ours.head.weight)
        with pytest.raises(WindowError, match="step 0 without a micro-batch"):
            attached.step()
        loss_of(ours, 0).backward(inputs=[ours.head.weight])
        assert attached.step().unused == dict(ours.named_parameters()).keys() - {"head.weight"}


class TestWhatGoesWrong:
    def failing(self, module, fault):
        """A loss whose backward fails once two layers have their gradients."""

        def fail(gradient):
            raise fault

        hidden = torch.tanh(module.layers[0](module.embed(batch(0))))
        hidden.register_hook(fail)
        return module.head(module.norm(torch.tanh(module.layers[1](hidden)))).square().mean()

    @pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
    @pytest.mark.parametrize("way", ["with", "alone"])
    def test_a_backward_that_failed_leaves_a_window_that_only_discard_leads_out_of(self, fault, way):
        attached, ours, theirs, engines = pair()
        loss_of(ours, 0).backward()
        loss = self.failing(ours, fault)
        with pytest.raises(fault):
            backward_within(attached, loss) if way == "with" else loss.backward()
        ours.zero_grad()
        for call in (attached.step, partial(backward_within, attached), loss_of(ours, 1).backward):
            with pytest.raises(WindowError, match=r"step 0 (is broken|holds a part of a micro-batch).*discard\(\)"):
                call()
        assert attached._of_backward is None
        engines[0].discard()
        loss_of(ours, 1).backward()
        by_hand(theirs, engines[1], loss_of(theirs, 1))
        assert attached.step().micro_batches == 1
        assert_same_gradients(ours, theirs, engines[1].step())

    @pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
    def test_an_error_in_a_with_breaks_the_window_once_there_was_a_gradient(self, fault):
        def fail(*losses):
            with attached.micro_batch():
                for loss in losses:
                    loss.backward()
                raise fault

        attached, ours, *_ = pair()
        loss_of(ours, 0).backward()
        with pytest.raises(fault):
            fail()
        with pytest.raises(WindowError, match="no component has a gradient"):
            backward_within(attached)
        loss_of(ours, 1).backward()
        assert attached.step().micro_batches == 2
        ours.zero_grad()
        with pytest.raises(fault):
            fail(loss_of(ours, 0))
        with pytest.raises(WindowError, match=r"part of a micro-batch|is broken"):
            attached.step()

    def test_a_micro_batch_within_another(self):
        def backward_around(attached, *losses):
            with attached.micro_batch():
                for loss in losses[1:]:
                    loss.backward()
                backward_within(attached, losses[0])

        attached, ours, *_ = pair()
        with pytest.raises(WindowError, match="no component has a gradient"):
            backward_around(attached, loss_of(ours, 0))
        assert attached.step().micro_batches == 1  # the inner one
        ours.zero_grad()
        with pytest.raises(WindowError, match="part of a micro-batch"):
            backward_around(attached, loss_of(ours, 0), loss_of(ours, 1))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_step_that_failed_or_has_no_hooks_sets_nothing(self, dtype):
        attached, ours, _, engines = pair(dtype=dtype)
        (loss_of(ours, 0) * math.inf).backward()
        with pytest.raises(NonFiniteGradient):
            attached.step()
        engines[0].discard()
        loss_of(ours, 0).backward()
        attached.remove()
        with pytest.raises(CallerError, match="hooks were removed"):
            attached.step()
        assert no_gradients(ours)

    @pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_step_interrupted_at_any_line_is_broken_or_did_not_begin_or_set_each_grad(self, dtype, fault):
        """As one with a function of `on_step` that raises."""

        def begun():
            module = torch.nn.Linear(2, 2, dtype=dtype)
            engine = GradientEngine(layout_of(module), on_non_finite="skip")
            attached = attach(module, engine)
            module(torch.ones(1, 2, dtype=dtype)).sum().backward()
            return module, engine, attached

        ends = set()
        for at in [None, *places_of(begun()[2].step)]:
            module, engine, attached = begun()
            if at is None:
                engine.on_step(lambda _: 1 / 0)
            raised_at(at, attached.step, fault())
            ends.add(state := engine.accumulator.state.now)
            assert state is not State.EMPTY or (engine.current_step and not no_gradients(module)), at
            if state is State.BROKEN:
                with pytest.raises(WindowError, match=r"discard\(\)"):
                    attached.step()
        assert ends == {State.OPEN, State.BROKEN, State.EMPTY}

    @pytest.mark.parametrize("policy", ["raise", "drop_micro_batch"])
    @pytest.mark.parametrize("way", ["with", "alone"])
    def test_interrupted_at_any_line_a_micro_batch_is_in_the_window_or_is_not_or_the_window_is_refused(
        self, way, policy
    ):
        def begun():
            module = torch.nn.Linear(2, 2)
            torch.nn.init.ones_(module.weight)
            engine = GradientEngine(layout_of(module), on_non_finite=policy)
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
            is_open = engine.accumulator.state.now is State.OPEN
            try:
                ends.add(round(attached.step().norm ** 2, 3))
            except WindowError:
                assert not is_open, at
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
        attached.remove()
        hook = module.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        attached = attach(module, engine)
        with pytest.raises(BufferRefused, match=r"'weight' has no gradient any more"):
            module(torch.tensor([1, 2])).sum().backward()
        hook.remove()
        module(torch.tensor([1, 2])).sum().backward()
        assert attached.step().micro_batches == 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("way", ["none", "zeros", "made anew", "derived again"])
    @pytest.mark.filterwarnings("ignore:Using backward")  # torch: create_graph leaks, where gradients stay
    def test_the_last_steps_gradients_must_be_gone(self, dtype, way):
        attached, ours, _, engines = pair(dtype=dtype)
        loss_of(ours, 0).backward()
        attached.step()
        if way == "zeros":
            ours.zero_grad(set_to_none=False)
        elif way == "made anew":
            for parameter in ours.parameters():
                parameter.grad = parameter.grad + 1
        with pytest.raises(BufferRefused, match=r"has an old \.grad, .* zero_grad.*attached\.paused\(\)"):
            loss_of(ours, 1).backward(create_graph=way == "derived again")
        assert not engines[0].has_open_window
        for parameter in ours.parameters():
            parameter.grad = torch.zeros_like(parameter)  # as DistributedDataParallel leaves it after its own sum
        loss_of(ours, 1).backward()
        assert attached.step().micro_batches == 1

    def test_while_it_is_paused_backward_is_torchs_own(self):
        """As where a generator's loss runs through the discriminator."""
        attached, ours, theirs, engines = pair()
        loss_of(ours, 0).backward()
        with attached.paused():
            with attached.paused():
                pass
            loss_of(ours, 1).backward()
            assert ours.head.weight.grad is not None
        with pytest.raises(BufferRefused, match=r"has an old \.grad"):
            loss_of(ours, 2).backward()
        ours.zero_grad()
        loss_of(ours, 3).backward()
        for seed in (0, 3):
            by_hand(theirs, engines[1], loss_of(theirs, seed))
        assert attached.step().micro_batches == 2
        assert_same_gradients(ours, theirs, engines[1].step())

    def test_an_optimizer_that_steps_before_the_window_does(self):
        attached, ours, *_ = pair()
        optimizer, others = torch.optim.SGD(ours.parameters(), 1.0), torch.optim.SGD(Net().parameters(), 1.0)
        optimizer.step()  # no window is open
        loss_of(ours, 0).backward()
        for closure in (None, lambda: 0.0):
            with pytest.raises(WindowError, match=r"moved no weight.* call attached.step\(\) before"):
                optimizer.step(closure)
        others.step()
        before = ours.head.weight.clone()
        optimizer.step(lambda: attached.step().norm)
        assert not torch.equal(ours.head.weight, before)
        ours.zero_grad()
        with optimizer.register_step_pre_hook(lambda *_: (attached.step(), None)[1]):
            loss_of(ours, 1).backward()
            optimizer.step()
        torch.autograd.grad(loss_of(ours, 2), ours.head.weight)  # adds nothing to the .grad that is there
        ours.zero_grad()
        loss_of(ours, 3).backward()
        attached.remove()
        optimizer.step()

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
            else pytest.raises(CallerError, match=r"the engine has no exchange.* exchange=connect\(\)")
        ):
            assert attached.step().micro_batches == 1


class TestAttaching:
    def test_what_does_not_belong_together(self):
        for module, kind, word in (
            (torch.nn.Sequential(torch.nn.Linear(6, 6)), LayoutMismatch, "'0.weight'"),
            (Net(width=7), LayoutMismatch, r"'embed.weight' .*\(6, 6\), expected \(7, 7\)"),
            (Net(tied=True), LayoutMismatch, r"'head.weight' .*\(6, 6\), expected none"),
            (None, CallerError, "torch module"),
        ):
            with pytest.raises(kind, match=word):
                attach(module, GradientEngine(layout_of(Net())))
        with pytest.raises(CallerError, match="engine"):
            attach(Net(), None)

    def test_twice(self):
        attached, ours, theirs, engines = pair()
        with pytest.raises(CallerError, match="attached"):
            attach(theirs, engines[0])
        again = attach([ours.head.weight], GradientEngine(layout_of([ours.head.weight])))
        with pytest.raises(BufferRefused, match="'0' has no gradient any more"):
            loss_of(ours, 0).backward()
        again.remove()
        engines[0].discard()
        attached.remove()
        attached.remove()
        attached = attach(theirs, engines[0])
        loss_of(theirs, 0).backward()
        assert attached.step().micro_batches == 1

    def test_parameters_that_were_changed_since(self):
        ours = Net()
        ours.embed.requires_grad_(False)
        attached = attach(ours, GradientEngine(layout_of(ours)))
        loss_of(ours, 0).backward()
        ours.embed.requires_grad_(True)
        with pytest.raises(LayoutMismatch, match=r"'embed.weight' was replaced, or required no"):
            attached.step()
        ours.embed.requires_grad_(False)
        kept, ours.head.weight = ours.head.weight, torch.nn.Parameter(torch.ones(6, 6))
        with pytest.raises(LayoutMismatch, match=r"'head.weight' was replaced"):
            attached.step()
        ours.head.weight = kept
        assert attached.step().micro_batches == 1

    def test_a_list_of_parameters_with_an_add_by_hand_between_two_backwards(self):
        module = Net()
        parameters = list(module.parameters())
        attached = attach(parameters, engine := GradientEngine(layout_of(parameters)))
        loss_of(copy.deepcopy(module), 0).backward()  # a copy is not attached
        assert not engine.has_open_window
        loss_of(module, 0).backward()
        engine.add([np.ones(p.shape, np.float32) for p in parameters], 2.0)
        loss_of(module, 1).backward()
        assert attached.step().weight == 4.0
        assert module.head.weight.grad is not None

    @pytest.mark.parametrize("way", ["with", "del"])
    def test_the_hooks_are_gone_with_what_was_returned_and_keep_nothing_alive(self, way):
        module = Net()
        engine = GradientEngine(layout_of(module))
        with attach(module, engine) if way == "with" else contextlib.nullcontext():
            attached = None if way == "with" else attach(module, engine)
            loss_of(module, 0).backward()
            with pytest.raises(WindowError, match=r"attached to a module; call attached\.step\(\); or pass out="):
                engine.step()
            assert engine.step(deferred=True).micro_batches == 1
            del attached
        with pytest.raises(WindowError, match=r"the hooks of attach\(\) are gone; keep what"):
            engine.step()
        loss_of(module, 0).backward()
        assert module.head.weight.grad is not None
        assert not engine.has_open_window
        module.zero_grad()
        attached = attach(module, engine)
        parameters = [weakref.ref(parameter) for parameter in module.parameters()]
        del module, attached
        gc.collect()
        assert [reference() for reference in parameters] == [None] * len(parameters)


class TestSeveralWorkers:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    @pytest.mark.parametrize("micro_batches", [None, 2])
    def test_ranks_with_unlike_batches_end_together_with_the_mean_over_all_tokens(self, world_size, micro_batches):
        """As in docs/how-to/token-weighted-accumulation.md: each rank has a different number of windows."""
        rng, start = np.random.default_rng(world_size), Net()
        windows = [
            [[(int(rng.integers(1, 20)), int(rng.integers(99))) for _ in range(rng.integers(1, 3))] for _ in range(n)]
            for n in rng.permutation(4)[:world_size]
        ]
        expected = []
        for step in range(max(map(len, windows))):
            found = [each for mine in windows for each in mine[step : step + 1] for each in each]
            modules = [copy.deepcopy(start) for _ in found]
            for module, (_, seed) in zip(modules, found, strict=True):
                loss_of(module, seed).backward()
            tokens = sum(tokens for tokens, _ in found)
            grads = [[t * p.grad.double() for p in m.parameters()] for m, (t, _) in zip(modules, found, strict=True)]
            expected.append((tokens, len(found), [sum(each) / tokens for each in zip(*grads, strict=True)]))

        def work(exchange):
            module, found = copy.deepcopy(start), []
            engine = GradientEngine(layout_of(module), exchange=exchange, micro_batches=micro_batches)
            attached = attach(module, engine)
            for window in itertools.chain(windows[exchange.rank], itertools.repeat([])):
                if not any(engine.all_gather_object("batches left", len(window))):
                    break
                for tokens, seed in window:
                    with attached.micro_batch(weight=tokens):
                        loss_of(module, seed).backward()
                if not window:
                    engine.add(None, weight=0)
                result = attached.step(partial=True)
                found.append((result.weight, result.micro_batches, [p.grad.clone() for p in module.parameters()]))
                module.zero_grad()
            return found

        for steps in on_ranks(work, world_size):
            assert [step[:2] for step in steps] == [step[:2] for step in expected]
            for (*_, ours), (*_, theirs) in zip(steps, expected, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)

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

    @pytest.mark.parametrize("micro_batches", [2, None])
    def test_blocks_leave_while_backward_runs_and_a_rank_may_have_none(self, micro_batches, monkeypatch):
        """Those of the last micro-batch; without a count of micro-batches `last` says which that is."""
        monkeypatch.setattr(groups, "JOINED", 0)
        start = Net()

        def work(exchange):
            module, found = copy.deepcopy(start), []
            engine = GradientEngine(layout_of(module), exchange=exchange, micro_batches=micro_batches)
            attached = attach(module, engine)
            module.embed.weight.register_hook(lambda _: found.append(started(engine)))
            for last in (False, True):
                loss = loss_of(module, 0)
                loss.backward() if micro_batches else backward_within(attached, loss, last=last)
            found.append(started(engine))
            attached.step()
            if micro_batches is None:
                module.zero_grad()
                loss_of(module, 0).backward() if exchange.rank else engine.add(None, weight=0)
                attached.step()
            return [*found[:3], bits(module.head.weight.grad)]

        before = {"head.weight", "norm.weight", "norm.bias", 0, 1}
        first, second = on_ranks(work, 2)
        assert first == second
        assert first[:-1] == [set(), before, before | {"embed.weight"}]


def test_the_loop_of_the_readme_learns_what_it_learns_without_us(capsys):
    """The same lines with torch's own sum of averaged losses, and its own clip."""
    ours = loop_of_the_readme()
    theirs = re.sub(r"(?ms)^engine = .*?^\)\n|^(from gradengine|attached|exchange).*?\n", "", ours)
    theirs = theirs.replace("loss.backward()", "(loss / 4).backward()").replace("engine.rank", "0")
    clip = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    theirs = re.sub(r"result = attached.step\(\).*", clip, theirs).replace("result.norm", "norm")
    assert not re.search("engine|attached", theirs)
    learned = [learned_by(loop) for loop in (ours, theirs)]
    for one, other in zip(*learned, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    printed = capsys.readouterr().out.splitlines()
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :]


def learned_by(loop):
    names = {}
    exec(compile(loop, "README.md", "exec"), names)
    return [parameter.detach().numpy() for parameter in names["model"].parameters()]


def test_a_micro_batch_that_is_not_finite_is_dropped_alone():
    attached, ours, theirs, _ = pair({"on_non_finite": "drop_micro_batch", "max_norm": None})
    for seed, factor in enumerate((1.0, math.nan, 1.0)):
        (loss_of(ours, seed) * factor).backward()
        if factor == 1:
            (loss_of(theirs, seed) / 2).backward()
    result = attached.step()
    assert (result.dropped, result.weight) == (1, 2)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    ours.zero_grad()
    (loss_of(ours, 0) * math.nan).backward()
    assert attached.step().skipped
    assert no_gradients(ours)


class TestGradScaler:
    def scaler(self, **options):
        return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**4, "growth_interval": 3, **options})

    @pytest.mark.parametrize("way", ["alone", "unscale_ is left", "a trainer steps it"])
    @pytest.mark.parametrize("bad", [(), (0,), (2, 3)])
    def test_losses_skips_and_scale_are_those_of_torchs_own_loop(self, bad, way):
        """Over many steps, with a loss that is not finite in some; growth and backoff both come."""
        modules, scalers = [Net(), Net()], [self.scaler(), self.scaler()]
        is_trainers = way == "a trainer steps it"
        on_non_finite = "propagate" if is_trainers else "skip"
        engine = GradientEngine(layout_of(modules[0]), max_norm=0.05, average="prescaled", on_non_finite=on_non_finite)
        attached = attach(modules[0], engine)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=0.02) for module in modules]
        seen = [[], []]
        for step in range(8):
            for which, (module, scaler) in enumerate(zip(modules, scalers, strict=True)):
                for k in range(2):
                    loss = loss_of(module, step, k) / 2
                    seen[which].append(loss.item())
                    scaler.scale(loss * (math.inf if step in bad and k else 1)).backward()
            if way == "unscale_ is left":
                scalers[0].unscale_(optimizers[0])
            result = attached.step(scaler=scalers[0], unscale=not is_trainers)
            is_none = no_gradients(modules[0])
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
            assert is_none == (step in bad and not is_trainers)
            assert scalers[0].state_dict() == scalers[1].state_dict()
        assert scalers[0].get_scale() != 2.0**4
        np.testing.assert_allclose(seen[0], seen[1], rtol=1e-4)
        assert [s["step"] for s in optimizers[0].state.values()] == [s["step"] for s in optimizers[1].state.values()]

    @given(st.lists(st.sampled_from(["", "", "D", "G", "DG"]), max_size=12))
    @example(["G", "", "", "", "D", "DG"])
    def test_one_for_two_models_does_what_torch_does_with_two_steps_and_one_update(self, bad):
        """A GAN, whose generator's loss runs through the discriminator; both backward passes come first."""
        scalers, runs = [self.scaler(), self.scaler()], []
        for is_ours, scaler in zip((True, False), scalers, strict=True):
            nets = {"D": Net(0), "G": Net(1)}
            optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
            options = {"max_norm": 0.05, "on_non_finite": "propagate"}
            hooks = {n: attach(net, GradientEngine(layout_of(net), **options)) for n, net in nets.items() if is_ours}
            for step, at in enumerate(bad):
                losses = {"D": loss_of(nets["D"], step), "G": nets["D"](nets["G"](batch(step))).square().mean()}
                losses = {n: scaler.scale(loss * (math.inf if n in at else 1)) for n, loss in losses.items()}
                for name, net in nets.items():
                    losses[name].backward(inputs=[*net.parameters()])
                for name, optimizer in optimizers.items():
                    if is_ours:
                        hooks[name].step(scaler=scaler, unscale=False)
                    else:
                        scaler.unscale_(optimizer)
                        torch.nn.utils.clip_grad_norm_(nets[name].parameters(), 0.05)
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
            runs.append([p.detach().numpy() for net in nets.values() for p in net.parameters()])
        assert scalers[0].state_dict() == scalers[1].state_dict()
        for ours, theirs in zip(*runs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)

    def test_a_window_whose_scaler_was_updated_since_it_began_is_refused(self):
        """Models may share one in turn, and it may be updated between windows."""
        scaler, (attached, ours, *_), (other, theirs, *_) = (
            self.scaler(),
            *(pair({"on_non_finite": "skip"}) for _ in range(2)),
        )

        def backward(module):
            module.zero_grad()
            scaler.scale(loss_of(module, 0)).backward()

        def plain_step():
            backward(plain := Net())
            scaler.step(torch.optim.SGD(plain.parameters(), lr=1.0))
            scaler.update()

        scaler.scale(torch.ones(()))
        for which, module in ((attached, ours), (other, theirs), (attached, ours)):
            scaler.update(8.0)
            backward(module)
            assert which.step(scaler=scaler).micro_batches == 1
        for between in (lambda: attached.step(scaler=scaler), plain_step):
            backward(ours)
            backward(theirs)
            between()
            with pytest.raises(CallerError, match=r"since this window began; .*unscale=False.*update\(\) it once"):
                other.step(scaler=scaler)
            other._engine.discard()
            attached._engine.discard()

    @pytest.mark.parametrize("unscale", [True, False])
    def test_a_scale_that_grows_without_end(self, unscale):
        """As in bf16, where nothing overflows: growth ends at 2**64, or goes on if it is not updated here."""
        scaler = self.scaler(init_scale=2.0**63, growth_interval=1)
        attached, ours, *_ = pair({"on_non_finite": "skip" if unscale else "propagate"})
        loss_of(ours, 0).backward()
        norm = attached.step().norm
        for _ in range(3):
            ours.zero_grad()
            scaler.scale(loss_of(ours, 0)).backward()
            assert attached.step(scaler=scaler, unscale=unscale).norm == pytest.approx(norm)
            if not unscale:
                scaler.step(torch.optim.SGD(ours.parameters(), lr=0.0))
                scaler.update()
        assert scaler.get_scale() == 2.0 ** (64 if unscale else 66)

    @pytest.mark.parametrize("action", ["skip", "clip"])
    def test_a_spike_moves_no_scaler_and_if_it_is_skipped_no_weight(self, action):
        scaler, policy = self.scaler(growth_interval=2), SpikePolicy(action, z_score=None, threshold=1e-6)
        attached, ours, *_ = pair({"on_non_finite": "skip", "on_spike": policy})
        for _ in range(2):
            scaler.scale(loss_of(ours, 0)).backward()
            result = attached.step(scaler=scaler)
            assert (result.spiked, result.skipped, no_gradients(ours)) == (True, action == "skip", action == "skip")
            assert action == "skip" or gradient_norm(ours) == pytest.approx(1e-6)
            ours.zero_grad()
        assert scaler.get_scale() == 2.0**5

    def test_what_is_refused_and_keeps_the_window(self):
        """One that is not enabled is none."""
        unused, used = self.scaler(), self.scaler()
        used.scale(torch.ones(1))
        for options, passed, word in (
            ({}, {"scaler": used}, "on_non_finite='raise'"),
            ({"on_non_finite": "skip"}, {"scaler": unused}, "scaled no loss"),
            ({"on_non_finite": "skip"}, {"scaler": 2.0**16}, "scaler"),
            ({"on_non_finite": "skip"}, {"scaler": used, "unscale": False}, "on_non_finite='skip'"),
            ({"on_non_finite": "skip"}, {"scaler": used, "unscale": None}, "unscale"),
            ({"on_non_finite": "propagate", "on_spike": SPIKES}, {"scaler": used, "unscale": False}, "spike"),
        ):
            attached, ours, _, engines = pair(options)
            loss_of(ours, 0).backward()
            with pytest.raises(CallerError, match=word):
                attached.step(**passed)
            assert engines[0].accumulator.accumulated_count == 1
            assert attached.step(scaler=self.scaler(enabled=False)).norm > 0
