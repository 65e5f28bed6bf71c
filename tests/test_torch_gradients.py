"""A module's gradients into an engine and back without a copy: layouts, views, what was not cleared or not used."""

import contextlib

import numpy as np
import pytest
from ranks import on_ranks

torch = pytest.importorskip("torch")

from torch_modules import DTYPES, Branches, accumulated, averaged, backward, has_grad_dtype, net, tied  # noqa: E402

from gradengine import GradientEngine, GradientLayout  # noqa: E402
from gradengine.errors import BufferRefused, CallerError, HandshakeRefused, LayoutMismatch, WindowError  # noqa: E402
from gradengine.layout import layout_from_table  # noqa: E402
from gradengine.torch import (  # noqa: E402
    attach,
    drop_unused,
    give_gradients,
    gradients_of,
    layout_of,
    step_fused,
    tensors_of,
)

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def channels_last(*shape):
    return torch.nn.Conv2d(*shape).to(memory_format=torch.channels_last)


def turned(dtype=torch.float32):
    """A square weight that lies transposed, a convolution in channels_last, a bias, a number, and nothing."""
    module = torch.nn.ParameterDict(
        {"square": torch.nn.Parameter(torch.ones(4, 4).t()), **dict(channels_last(3, 8, 3).named_parameters())}
    )
    module["one"], module["none"] = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(0, 3))
    return module.to(dtype)


def numbered(module):
    """Gradients that say which element they are of, and an engine that has added them."""
    wanted = {n: torch.arange(float(p.numel())).reshape(p.shape) for n, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.grad = torch.empty_like(parameter).copy_(wanted[name])
    engine = GradientEngine(layout_of(module), max_norm=None)
    engine.add(gradients_of(module))
    return wanted, engine


def is_at(tensor, array):
    return not tensor.numel() or tensor.data_ptr() == array.ctypes.data


def no_gradients(module):
    return all(parameter.grad is None for parameter in module.parameters())


class TestLayout:
    def test_is_that_of_the_trainable_parameters_in_their_order_and_tied_ones_come_once(self):
        module = net()
        module[0].bias.requires_grad_(False)
        expected = GradientLayout.of({"0.weight": (7, 5), "2.weight": (3, 7), "2.bias": (3,)})
        assert layout_of(module) == GradientLayout.of(module) == expected
        assert list(gradients_of(module)) == [slot.name for slot in layout_of(module).slots]
        module = tied()
        module[0].bias.requires_grad_(False)
        _, engine = numbered(module)
        assert [slot.name for slot in layout_of(module).slots] == ["0.weight", "1.bias"]
        assert list(tensors_of(module, engine.step().gradients)) == ["0.weight", "1.bias"]

    def test_a_permuted_parameter_has_the_shape_in_which_it_lies(self):
        module = channels_last(3, 8, (5, 7))
        assert layout_of(module).slot("weight").shape == (8, 5, 7, 3)
        assert layout_of(module) == GradientLayout.of(module)
        assert layout_of(module) != layout_of(torch.nn.Conv2d(3, 8, (5, 7)))  # so workers who differ will not meet
        shapes = {"square": (4, 4), "weight": (8, 3, 3, 3), "bias": (8,), "one": (), "none": (0, 3)}
        assert {slot.name: slot.shape for slot in layout_of(turned()).slots} == shapes

    def test_a_list_of_parameters_is_laid_out_by_position_and_will_do_for_a_whole_step(self):
        module = net()
        shapes = [(7, 5), (7,), (3, 7), (3,)]
        assert GradientLayout.of(module.parameters()) == GradientLayout.of(shapes)  # as a list of gradients is passed
        module[0].bias.requires_grad_(False)
        assert layout_of(module.parameters()) == GradientLayout.of({str(i): shapes[i] for i in (0, 2, 3)})
        ours, theirs = net(), net()
        for module, passed in ((ours, ours), (theirs, list(theirs.parameters()))):
            engine = GradientEngine(layout_of(passed))
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=True)
            for deferred in (False, True):
                module.zero_grad()
                backward(module, 0)
                engine.add(gradients_of(passed))
                result = engine.step(deferred=deferred)
                if deferred:
                    step_fused(optimizer, result, passed)
                else:
                    assert len(tensors_of(passed, result.gradients)) == 4
                    give_gradients(passed, result)
                    optimizer.step()
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))

    def test_a_module_with_nothing_to_train_is_refused(self):
        frozen = net().requires_grad_(False)
        for make, module in ((layout_of, frozen), (GradientLayout.of, frozen), (layout_of, list(frozen.parameters()))):
            with pytest.raises(LayoutMismatch, match="requires_grad") as caught:
                make(module)
            assert "0 of 4" in str(caught.value)
        with pytest.raises(LayoutMismatch, match="0 of 0"):
            GradientLayout.of(torch.nn.ReLU())

    def test_what_is_no_module_is_refused(self):
        for given in (None, [torch.ones(2)], torch.ones(2), {"w": 1}, "ab", 5):
            for call in (layout_of, gradients_of, lambda module: tensors_of(module, {})):
                with pytest.raises(CallerError, match="torch module") as caught:
                    call(given)
                assert caught.value.got == type(given).__name__

    def test_a_parameter_whose_gradients_would_be_refused_is_refused_at_once(self):
        for change, says in (
            (lambda m: m[2].double(), "'2.weight' .*float64"),
            (lambda m: setattr(m[2], "weight", torch.nn.Parameter(torch.ones(3, 7) * 1j)), "'2.weight' .*complex64"),
            (lambda m: setattr(m[0].weight, "to_local", None), "'0.weight' is a distributed tensor"),
            (lambda m: setattr(m[2], "bias", torch.nn.Parameter(torch.ones(3).to_sparse())), "'2.bias' is sparse"),
        ):
            module = net()
            change(module)
            for call in (layout_of, GradientLayout.of):
                with pytest.raises(BufferRefused, match=says):
                    call(module)
        with pytest.raises(BufferRefused, match=r"'1' .*float64"):
            GradientLayout.of([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).double())])

    @has_grad_dtype
    def test_one_whose_gradients_have_a_dtype_of_their_own_is_taken(self):
        module = net(torch.float64)
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32
        assert layout_of(module) == layout_of(net())

    def test_a_module_without_memory_has_a_layout_and_no_gradients(self):
        module = net().to("meta")
        assert layout_of(module) == layout_of(net())  # to know what it would take
        with pytest.raises(BufferRefused, match=r"'0\.weight' is on the meta device"):
            GradientEngine(layout_of(module)).add([torch.ones_like(p).detach() for p in module.parameters()])

    def test_lazy_parameters_are_refused_until_they_have_a_shape(self):
        module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LazyLinear(3))
        for call in (layout_of, lambda module: gradients_of(module, allocate=True)):
            with pytest.raises(LayoutMismatch, match=r"'1\.weight' has no shape yet"):
                call(module)
        module(torch.ones(1, 4))
        assert layout_of(module).slot("1.weight").shape == (3, 5)


class TestMemoryFormat:
    """Of a convolution whose shape is the same in either."""

    def made(self, order=torch.contiguous_format):
        torch.manual_seed(0)
        module = torch.nn.Conv2d(2, 2, 2, bias=False).to(memory_format=order)
        return module, GradientEngine(layout_of(module))

    def test_layouts_saved_states_and_ranks_of_two_differ(self):
        (plain, engine), (turned, other) = self.made(), self.made(torch.channels_last)
        assert layout_of(plain) != layout_of(turned) == layout_from_table(layout_of(turned).table())
        for one, two in ((engine, other), (other, engine)):
            with pytest.raises(LayoutMismatch, match=r"'weight' \(2, 2, 2, 2\), dimensions \[0, 2, 3, 1\] in memory"):
                one.load_state_dict(two.state_dict())
        layouts = [layout_of(plain), layout_of(turned)]
        for error in on_ranks(lambda exchange: GradientEngine(layouts[exchange.rank], exchange=exchange), 2):
            assert isinstance(error, HandshakeRefused)
            assert "dimensions [0, 2, 3, 1]" in str(error)
        with pytest.raises(LayoutMismatch, match="'weight' has a different memory format"):
            attach(turned, engine)

    def test_a_block_is_added_by_its_own_modules_names(self):
        blocks = torch.nn.Sequential(torch.nn.Sequential(channels_last(2, 2, 2)))
        engine = GradientEngine(GradientLayout.of(blocks))
        assert [block.name for block in engine.layout.blocks] == ["0"]
        blocks(torch.ones(1, 2, 3, 3)).sum().backward()
        engine.add_block(0, gradients_of(blocks[0]))
        give_gradients(blocks, engine.step())
        assert (blocks[0][0].weight.grad == 4).all()

    @pytest.mark.parametrize("way", ["by hand", "out", "backward", "step"])
    def test_a_change_in_mid_window_is_refused_and_can_be_undone(self, way):
        module, engine = self.made()
        attached = attach(module, engine) if way in ("backward", "step") else None

        def work(way):
            if way in ("by hand", "backward"):
                module(torch.arange(18.0).reshape(1, 2, 3, 3)).sum().backward()
            if way == "by hand":
                engine.add(gradients_of(module))
            elif way == "out":
                engine.step(out=gradients_of(module, allocate=True))
            elif way == "step":
                attached.step()
            module.zero_grad()

        work("backward" if attached else "by hand")
        module.to(memory_format=torch.channels_last)
        with pytest.raises(LayoutMismatch, match=r"'weight' .*got dimensions \(0, 2, 3, 1\), expected contiguous"):
            work(way)
        result = None if attached else engine.step()
        with pytest.raises(LayoutMismatch, match="'weight' has a different memory format"):
            attached.step() if attached else give_gradients(module, result)
        module.to(memory_format=torch.contiguous_format)
        module.zero_grad()
        attached.step() if attached else give_gradients(module, result)
        assert module.weight.grad[0, 0].tolist() == [[8, 12], [20, 24]]  # of one micro-batch


class TestGradientsOf:
    def test_are_the_gradients_themselves_or_none_or_zeros_of_their_dtype(self):
        module = net(torch.bfloat16)
        assert gradients_of(module) == dict.fromkeys(NAMES)
        backward(module, 0)
        kept, module[0].bias.grad = module[0].weight.grad, None
        gradients = gradients_of(module, allocate=True)
        assert gradients["0.weight"] is kept
        assert gradients["0.bias"] is module[0].bias.grad
        assert gradients["0.bias"].dtype is torch.bfloat16
        assert not gradients["0.bias"].requires_grad
        assert (gradients["0.bias"] == 0).all()

    @has_grad_dtype
    def test_fp32_gradients_of_bf16_parameters_are_added_and_written_without_rounding(self):
        module = torch.nn.Linear(1, 1, bias=False).bfloat16()
        module.weight.grad_dtype = torch.float32
        engine = GradientEngine(layout_of(module), max_norm=None)
        for value in (1.0, 1.0 + 2**-10):
            module.weight.grad = torch.full((1, 1), value)
            engine.add(gradients_of(module))
            module.zero_grad()
        engine.step(out=gradients_of(module, allocate=True))
        assert module.weight.grad.dtype is torch.float32
        assert module.weight.grad == 1.0 + 2**-11

    @pytest.mark.parametrize("allocate", [False, True])
    def test_what_the_last_micro_batch_did_not_use_is_dropped_unless_it_is_allocated(self, allocate):
        """As an expert that got no token in it."""
        module = torch.nn.ModuleDict({"expert": torch.nn.Linear(2, 1), "shared": torch.nn.Linear(2, 1)})
        engine = GradientEngine(layout_of(module), max_norm=None)
        for used in (module.values(), [module["shared"]]):
            module.zero_grad()
            sum(part(torch.ones(1, 2)).sum() for part in used).backward()
            engine.add(gradients_of(module))
        engine.step(out=gradients_of(module, allocate=allocate))
        written = module["expert"].weight.grad
        assert torch.equal(written, torch.full((1, 2), 0.5)) if allocate else written is None

    def test_a_permuted_parameter_whose_gradient_lies_otherwise_is_refused(self):
        module = channels_last(3, 8, 3)
        module.weight.grad = torch.ones(8, 3, 3, 3)
        with pytest.raises(BufferRefused, match="'weight' is not contiguous"):
            GradientEngine(layout_of(module)).add(gradients_of(module))

    def test_a_parameter_with_gaps_has_a_gradient_in_the_usual_order(self):
        """Memory has no order there that a gradient could share, so autograd makes a contiguous one."""
        module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(4, 6)[:, :5].t())})
        (module["w"] * torch.arange(20.0).reshape(5, 4)).sum().backward()
        engine = GradientEngine(layout_of(module), max_norm=None)
        engine.add(gradients_of(module))
        assert np.array_equal(engine.step().gradients["w"], np.arange(20.0).reshape(5, 4))


class TestTensorsOf:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_have_the_parameters_shape_and_order_in_fp32_and_are_views(self, dtype):
        module = turned(dtype)
        wanted, engine = numbered(module)
        result = engine.step()
        tensors = tensors_of(module, result.gradients)
        assert list(tensors) == list(wanted)
        for name, parameter in module.named_parameters():
            assert tensors[name].dtype is torch.float32
            assert (tensors[name].shape, tensors[name].stride()) == (parameter.shape, parameter.stride())
            assert torch.equal(tensors[name], wanted[name]), name
            assert is_at(tensors[name], result.gradients[name])
        assert np.array_equal(result.gradients["square"], wanted["square"].numpy().T)  # which its shape does not show
        module["bias"].requires_grad_(False).grad = None
        if dtype is torch.float32:
            give_gradients(module, result)
            assert module["bias"].grad is None
            for name in tensors.keys() - {"bias"}:
                assert torch.equal(module[name].grad, wanted[name])
                assert module[name].grad.stride() == module[name].stride()

    def test_what_was_written_to_destinations_has_the_parameters_shape_too(self):
        module = turned(torch.bfloat16)
        wanted, engine = numbered(module)
        result = engine.step(out=gradients_of(module))
        for name, tensor in tensors_of(module, result.gradients).items():
            assert torch.equal(tensor.float(), wanted[name])


class TestGiveGradients:
    def test_are_views_of_the_engines_memory_with_the_averaged_gradients_until_the_next_add(self):
        module, weights = net(), (3.0, 5.0)
        expected = averaged(module, range(2), weights, max_norm=0.05)
        engine = accumulated(module, range(2), weights, max_norm=0.05)
        result = engine.step()
        give_gradients(module, result)
        for name, parameter in module.named_parameters():
            assert is_at(parameter.grad, result.gradients[name])
            assert parameter.grad.shape == parameter.shape
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=2e-6, atol=1e-8)
        held = module[0].weight.grad
        backward(module, 1)
        with pytest.raises(BufferRefused, match=r"'0\.weight' is in this accumulator's own arena"):
            engine.add(gradients_of(module))
        module.zero_grad()
        backward(module, 1)
        engine.add(gradients_of(module))
        assert torch.equal(held, module[0].weight.grad)

    def test_a_parameter_that_takes_no_such_gradient_is_refused_by_name_and_nothing_is_set(self):
        for change, kind, says in (
            (lambda m: m[2].bfloat16() and m, BufferRefused, r"'2.weight'.*allocate=True"),
            (lambda m: m[2].double() and m, BufferRefused, "'2.weight'"),
            (lambda m: m.to("meta"), BufferRefused, r"'0\.weight' .*meta.*cpu"),
            (lambda m: torch.nn.Sequential(torch.nn.Linear(5, 8)), LayoutMismatch, r"'0.weight'.*\(7, 5\).*\(8, 5\)"),
            (lambda m: torch.nn.Sequential(*m, torch.nn.Linear(3, 2)), LayoutMismatch, "'3.weight': got none"),
        ):
            module = net()
            result = accumulated(module).step()
            module = change(module)
            with pytest.raises(kind, match=says):
                give_gradients(module, result)
            assert no_gradients(module)

    @has_grad_dtype
    def test_so_is_one_whose_grad_dtype_is_another(self):
        module = net()
        result = accumulated(module).step()
        module[2].bias.grad_dtype = torch.bfloat16
        with pytest.raises(BufferRefused, match=r"'2.bias'.*float32, expected torch.bfloat16"):
            give_gradients(module, result)
        assert no_gradients(module)

    @has_grad_dtype
    @pytest.mark.parametrize("allowed", [torch.float32, None])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_other_parameters_whose_grad_dtype_allows_it_have_fp32_gradients(self, dtype, allowed):
        """None is any: allocated gradients have the parameter's own then."""
        module = net()
        result = accumulated(module).step()
        for parameter in module.to(dtype).parameters():
            parameter.grad_dtype = allowed
        give_gradients(module, result)
        for name, parameter in module.named_parameters():
            assert parameter.grad.dtype is torch.float32
            assert is_at(parameter.grad, result.gradients[name])
        module.zero_grad()
        assert {g.dtype for g in gradients_of(module, allocate=True).values()} == {allowed or dtype}


class TestUnused:
    """What no micro-batch used has no gradient, so that AdamW does not decay it: as torch leaves it."""

    @pytest.mark.parametrize("way", ["give_gradients", "out", "step_fused", "zeros"])
    def test_a_branch_that_nobody_used_stays_what_it_was(self, way):
        """On two workers each uses another branch in the first step, and neither the second branch in the second."""
        plain, used = Branches(), [[True, False], [True, True]]
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
        for step in used:
            plain.zero_grad()
            torch.stack([plain(torch.ones(3, 4), block).square().sum() for block in step]).mean().backward()
            if way == "zeros":
                gradients_of(plain, allocate=True)
            reference.step()
        modules = Branches(), Branches()

        def train(exchange):
            module = modules[exchange.rank]
            engine = GradientEngine(layout_of(module), exchange=exchange)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5, fused=way == "step_fused")
            for step in used:
                module.zero_grad()
                module(torch.ones(3, 4), step[exchange.rank]).square().sum().backward()
                engine.add(gradients_of(module))
                if way == "step_fused":
                    step_fused(optimizer, engine.step(deferred=True), module)
                    continue
                if way == "out":
                    drop_unused(module, engine.step(out=gradients_of(module, allocate=True)))
                else:
                    give_gradients(module, engine.step(), zero_unused=way == "zeros")
                optimizer.step()
            gradient = module.other.weight.grad
            return gradient is None or float(gradient.abs().max())

        assert on_ranks(train, 2) == [0.0 if way == "zeros" else True] * 2
        for module in modules:
            for one, other in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    def test_nothing_is_dropped_of_another_module_by_an_old_result_or_by_none(self):
        module = Branches()
        module(torch.ones(3, 4)).sum().backward()
        engine = GradientEngine(layout_of(module))
        engine.add(gradients_of(module))
        result = engine.step(out=gradients_of(module, allocate=True))
        with pytest.raises(LayoutMismatch, match=r"'other.bias' \(and 1 more\)"):
            drop_unused(torch.nn.ModuleDict({"module": module}), result)
        module.zero_grad()
        module(torch.ones(3, 4), block=False).sum().backward()
        engine.add(gradients_of(module))
        for given, word in ((result, "out of date"), (None, "result")):
            with pytest.raises(CallerError, match=word):
                drop_unused(module, given)
        assert module.other.weight.grad is not None

    def test_where_all_of_an_optimizers_parameters_are_unused_it_does_nothing(self):
        module = Branches()
        optimizer = torch.optim.AdamW(module.other.parameters(), fused=True)
        before = module.other.weight.detach().clone()
        engine = GradientEngine(layout_of(module))
        module(torch.ones(3, 4)).sum().backward()
        engine.add(gradients_of(module))
        step_fused(optimizer, engine.step(deferred=True), module)
        assert torch.equal(module.other.weight, before)


def detach_and_zero(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_().zero_()


WAYS_TO_CLEAR = {
    "to none": lambda module: module.zero_grad(),
    "to zeros": lambda module: module.zero_grad(set_to_none=False),
    "by hand": detach_and_zero,
}


class TestUncleared:
    """torch adds to a `.grad` that is there: what was not cleared holds the earlier micro-batches too."""

    @pytest.mark.parametrize("between", ["nothing", "a step", "a step into them"])
    @pytest.mark.parametrize(
        ("spoil", "again", "name"),
        [
            (lambda m: None, lambda m: backward(m, 1), "0.weight"),
            (lambda m: None, lambda m: m[2](torch.ones(1, 7)).sum().backward(), "2.weight"),
            (lambda m: setattr(m[0].weight, "grad", None), lambda m: backward(m, 1), "0.bias"),
            (lambda m: m[0].zero_grad(), lambda m: backward(m, 1), "2.weight"),
        ],
        ids=["none is cleared", "a part is used", "one is new", "a part is cleared"],
    )
    def test_what_backward_added_to_is_refused_again_and_again(self, between, spoil, again, name):
        """Whatever engine takes it, as where a loop has one engine for each of two losses."""
        module = net()
        engine, other = (GradientEngine(layout_of(module)) for _ in range(2))
        backward(module, 0)
        engine.add(gradients_of(module))
        if between != "nothing":
            engine.step(out=gradients_of(module) if between == "a step into them" else None)
        spoil(module)
        again(module)
        for each in (engine, other):
            with pytest.raises(BufferRefused, match=f"'{name}' was not cleared"):
                each.add(gradients_of(module))

    @pytest.mark.parametrize("out", [False, True])
    def test_so_it_is_in_channels_last_where_each_call_makes_new_views(self, out):
        module = channels_last(3, 4, 3)
        engine = GradientEngine(layout_of(module))
        for _ in range(2):
            module.zero_grad(set_to_none=False)
            module(torch.ones(2, 3, 4, 4)).sum().backward()
            engine.add(gradients_of(module))
            engine.step(out=gradients_of(module) if out else None)
        module(torch.ones(2, 3, 4, 4)).sum().backward()
        with pytest.raises(BufferRefused, match="'weight' was not cleared"):
            engine.add(gradients_of(module))

    @pytest.mark.parametrize("way", WAYS_TO_CLEAR)
    @pytest.mark.parametrize("detached", [False, True])
    @pytest.mark.parametrize("out", [False, True])
    def test_what_is_cleared_in_whatever_way_is_taken_whatever_branch_is_used(self, way, detached, out):
        """Parameters that no backward reaches, a weight used twice, several backwards a micro-batch, many windows."""
        module = Branches()
        engine = GradientEngine(layout_of(module))
        for _ in range(2):
            for backwards in (["block"], ["other"], ["block", "other"], ["other", "other"], []):
                WAYS_TO_CLEAR[way](module)
                for used in backwards:
                    module(torch.ones(3, 4), block=used == "block").square().sum().backward()
                given = {
                    name: gradient.detach() if detached and gradient is not None else gradient
                    for name, gradient in gradients_of(module).items()
                }
                is_empty = not any(gradient is not None for gradient in given.values())
                with pytest.raises(WindowError) if is_empty else contextlib.nullcontext():
                    engine.add(given)
            engine.step(out=gradients_of(module, allocate=True) if out else None)

    def test_those_that_torch_counts_nothing_for_are_taken(self):
        module = torch.nn.Linear(4, 2)
        with torch.inference_mode():
            module.weight.grad = torch.zeros(2, 4)
            for _ in range(3):
                module.weight.grad += 1
                gradients_of(module)

    @pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
    def test_a_view_of_a_whole_flat_bucket_is_taken_and_of_a_part_of_it_not(self, shape):
        """As of DistributedDataParallel, which copies a gradient that was cleared into its bucket: one change."""
        for size in (8, 9):
            module, bucket = torch.nn.Linear(*shape[::-1], bias=False), torch.zeros(size)
            module.weight.grad = bucket[:8].view(shape)
            gradients_of(module)
            module.weight.grad.copy_(torch.ones(shape))
            with pytest.raises(BufferRefused) if size == 9 else contextlib.nullcontext():
                gradients_of(module)
