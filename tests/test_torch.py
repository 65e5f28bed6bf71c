"""What torch users are given: clipping as torch's own, modules in and out without a copy, fused optimizers."""

import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import itertools
import math
import os
import pickle
import subprocess
import sys
import types
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import strategies as draw
from hostile_values import HOSTILE, refusal_of
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

torch = pytest.importorskip("torch")

from gradengine import (  # noqa: E402
    FusedClipState,
    GpuGradientAccumulator,
    GradientEngine,
    GradientLayout,
    clip_gradients_fused,
    elementwise,
)
from gradengine.errors import (  # noqa: E402
    BufferRefused,
    CallerError,
    DeviceUnavailable,
    LayoutMismatch,
    NonFiniteGradient,
    WindowError,
)
from gradengine.torch import (  # noqa: E402
    clip_grad_norm_,
    drop_unused,
    fused,
    give_gradients,
    gradients,
    gradients_of,
    layout_of,
    step_fused,
    tensors_of,
)

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
has_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch < 2.10")
SHAPES = [(7, 5), (513,), (1,), (), (3, 1, 4)]
FUSED = {
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=0.1, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **o),
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
    "SGD with momentum": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, **o),
}


def parameter_of(gradient):
    """A parameter with that gradient, and nothing else."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def random_parameters(seed, shapes=SHAPES, dtype=torch.float32, magnitude=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [parameter_of((torch.randn(shape, generator=generator) * magnitude).to(dtype)) for shape in shapes]


def clones_of(parameters):
    return [parameter_of(p.grad.clone()) if p.grad is not None else torch.nn.Parameter(p.data) for p in parameters]


def exact_norm(parameters):
    return math.sqrt(math.fsum((p.grad.double() ** 2).sum().item() for p in parameters if p.grad is not None))


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).clone() if tensor.ndim else tensor.detach().reshape(1)


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other))


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(dtype)


def backward(module, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    parameter = next(module.parameters())
    inputs = torch.randn(4, parameter.shape[1], generator=generator).to(parameter.dtype)
    (module(inputs).float().square().mean() * scale).backward()


needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


def two_ranks_of_ddp(what, folder):
    """What each of two processes says."""
    here = Path(__file__).parent
    command, paths = (
        [sys.executable, str(here / "ddp_process.py"), what],
        os.pathsep.join([str(here), str(here.parent)]),
    )
    ranks = [
        subprocess.Popen(
            [*command, rank, str(folder)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        )
        for rank in "01"
    ]
    try:
        return [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


class TestClipAsTorch:
    @given(st.lists(draw.shapes, max_size=6), draw.seeds, st.sampled_from([1e-3, 0.5, 1.0, 7.0, 1e9]))
    def test_fp32_norm_and_gradients_are_torchs_within_1e_6(self, shapes, seed, max_norm):
        ours = random_parameters(seed, shapes)
        theirs = clones_of(ours)
        norm = clip_grad_norm_(ours, max_norm)
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        assert norm.dtype is torch.float32
        assert norm.shape == expected.shape == ()
        assert norm.device == expected.device
        assert float(norm) == pytest.approx(float(expected), rel=1e-6, abs=1e-30)
        clipping = max_norm < float(norm)
        epsilon = 1e-6 / max_norm if clipping else 0.0  # torch's own is in its scale
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6 + epsilon, atol=0)

    def test_the_signature_is_torchs(self):
        ours, theirs = (inspect.signature(f) for f in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_))
        assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
            (p.name, p.default, p.kind) for p in theirs.parameters.values()
        ]

    @pytest.mark.parametrize("foreach", [None, True, False])
    def test_foreach_changes_nothing(self, foreach):
        ours, same = random_parameters(1), random_parameters(1)
        assert clip_grad_norm_(ours, 1.0, foreach=foreach) == clip_grad_norm_(same, 1.0)
        assert_same_bits([p.grad for p in ours], [p.grad for p in same])

    def test_a_list_a_generator_an_iterator_and_a_module_give_the_same(self):
        for listed in (list, lambda ps: (p for p in ps), iter, lambda ps: torch.nn.ParameterList(ps).parameters()):
            parameters = random_parameters(2)
            assert float(clip_grad_norm_(listed(parameters), 1.0)) == pytest.approx(exact_norm(random_parameters(2)))
            assert exact_norm(parameters) == pytest.approx(1.0, rel=1e-6)

    def test_one_tensor(self):
        parameter = parameter_of(torch.tensor([3.0, 4.0]))
        assert clip_grad_norm_(parameter, 1.0) == 5.0
        assert torch.equal(parameter.grad, torch.tensor([3.0, 4.0]) * 0.2)

    def test_parameters_without_a_gradient_are_skipped(self):
        without = torch.nn.Parameter(torch.ones(3))
        parameters = [without, parameter_of(torch.tensor([3.0, 4.0])), without]
        assert clip_grad_norm_(parameters, 1.0) == 5.0
        assert without.grad is None
        assert exact_norm(parameters) == pytest.approx(1.0)

    @pytest.mark.parametrize(
        "parameters", [[], (), [torch.nn.Parameter(torch.ones(2))], torch.nn.Parameter(torch.ones(2))]
    )
    def test_no_gradients_have_norm_zero(self, parameters):
        ours, theirs = (f(parameters, 1.0) for f in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_))
        assert_same_bits([ours], [theirs])

    @pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
    def test_an_exhausted_generator_warns_as_torchs_does(self, clip):
        generator = (p for p in random_parameters(0))
        list(generator)
        with pytest.warns(UserWarning, match="generator"):
            assert clip(generator, 1.0) == 0.0

    def test_an_empty_list_warns_of_nothing(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert clip_grad_norm_([], 1.0) == 0.0

    def test_tied_parameters_count_once(self):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        module[1].weight = module[0].weight
        module(torch.ones(2, 4)).sum().backward()
        theirs = clones_of(module.parameters())
        norm = clip_grad_norm_(module.parameters(), 0.5)
        assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs, 0.5)), rel=1e-6)
        assert exact_norm(module.parameters()) == pytest.approx(0.5, rel=1e-6)

    def test_it_works_where_autograd_records(self):
        """Gradients that were made with create_graph belong to a graph themselves."""
        parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        (parameter.grad,) = torch.autograd.grad((parameter**2).sum(), parameter, create_graph=True)
        assert parameter.grad.requires_grad
        norm = clip_grad_norm_([parameter], 1.0)
        assert norm == 10.0
        assert not norm.requires_grad
        assert torch.allclose(parameter.grad.detach(), torch.tensor([0.6, 0.8]))

    @pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
    @pytest.mark.parametrize("gradient", [torch.ones(2), torch.ones(3, 2).t()], ids=["as usual", "transposed"])
    def test_backward_refuses_what_it_saved_before_the_clip(self, clip, gradient):
        """The gradient is written where torch does not see it, so torch is told."""
        parameter = parameter_of(gradient * 10)
        other = torch.ones(gradient.shape, requires_grad=True)
        product = (other * parameter.grad).sum()
        clip([parameter], 1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    def test_gradients_that_were_made_in_inference_mode(self):
        with torch.inference_mode():
            gradient = torch.tensor([3.0, 4.0])
        parameter = torch.zeros(2)
        parameter.grad = gradient
        assert clip_grad_norm_([parameter], 1.0) == 5.0
        assert gradient[0] == pytest.approx(0.6)


class TestClipBeyondTorch:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("magnitude", [1e-3, 1.0, 100.0])
    def test_the_norm_is_right_to_1e_6_in_every_dtype(self, dtype, magnitude):
        parameters = random_parameters(3, [(300, 40), (4096,), (5,)], dtype, magnitude)
        exact = exact_norm(parameters)
        norm = clip_grad_norm_(parameters, INF)
        assert norm.dtype is torch.float32
        assert float(norm) == pytest.approx(exact, rel=1e-6)

    def test_torchs_own_bf16_norm_is_not(self):
        parameters = random_parameters(3, [(300, 40), (4096,), (5,)], torch.bfloat16)
        theirs = torch.nn.utils.clip_grad_norm_(clones_of(parameters), INF)
        assert theirs.dtype is torch.bfloat16
        assert abs(float(theirs) / exact_norm(parameters) - 1) > 1e-4

    def test_an_fp16_norm_beyond_fp16_is_finite_where_torchs_is_not(self):
        parameters = [parameter_of(torch.full((9,), 6e4, dtype=torch.float16))]
        assert torch.nn.utils.clip_grad_norm_(clones_of(parameters), 1.0) == INF
        assert float(clip_grad_norm_(parameters, 1.0)) == pytest.approx(3 * float(torch.tensor(6e4).half()))
        assert exact_norm(parameters) == pytest.approx(1.0, rel=2**-10)

    def test_a_norm_beyond_fp32_is_returned_as_inf_and_clipped_by_its_true_value(self):
        parameters = [parameter_of(torch.full((4,), 3e38))]
        assert clip_grad_norm_(parameters, 100.0, error_if_nonfinite=True) == INF
        assert exact_norm(parameters) == pytest.approx(100.0, rel=1e-6)

    def test_dtypes_may_be_mixed_in_one_call(self):
        parameters = [p for i, dtype in enumerate(DTYPES) for p in random_parameters(i, SHAPES, dtype)]
        exact, before = exact_norm(parameters), [p.grad.clone().float() for p in parameters]
        assert float(clip_grad_norm_(iter(parameters), 0.5)) == pytest.approx(exact, rel=1e-6)
        factor = torch.tensor(0.5 / exact, dtype=torch.float32)
        for parameter, value in zip(parameters, before, strict=True):
            torch.testing.assert_close(parameter.grad, (value * factor).to(parameter.dtype), rtol=2**-7, atol=0)
        assert exact_norm(parameters) == pytest.approx(0.5, rel=2**-8)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_each_element_is_multiplied_once_in_fp32_and_rounded_once(self, dtype):
        gradient = torch.zeros(600, dtype=dtype)
        gradient[:2] = torch.tensor([3.0, 4.0])
        parameter = parameter_of(gradient)
        expected = (gradient.float() * np.float32(1 / 5)).to(dtype)
        clip_grad_norm_([parameter], 1.0)
        assert_same_bits([parameter.grad], [expected])

    @pytest.mark.parametrize("bound", [5.0, 6.0, INF])
    def test_a_norm_within_the_bound_writes_nothing(self, bound):
        """No epsilon: torch would scale at 5.0, and write in every case."""
        parameters = [parameter_of(torch.tensor([3.0, -0.0, 4.0]))]
        before = [p.grad.clone() for p in parameters]
        assert clip_grad_norm_(parameters, bound) == 5.0
        assert_same_bits([p.grad for p in parameters], before)

    @pytest.mark.parametrize("bound", [0, 0.0])
    def test_a_bound_of_zero_is_refused_where_torch_makes_zeros(self, bound):
        parameters = random_parameters(4)
        with pytest.raises(CallerError, match="to switch clipping off pass None"):
            clip_grad_norm_(parameters, bound)
        assert_same_bits([p.grad for p in parameters], [p.grad for p in random_parameters(4)])
        with pytest.raises(CallerError, match="to switch clipping off pass None"):
            clip_grad_norm_([], bound)

    def test_none_clips_nothing(self):
        parameters = random_parameters(4)
        assert float(clip_grad_norm_(parameters, None)) == pytest.approx(exact_norm(random_parameters(4)), rel=1e-6)
        assert_same_bits([p.grad for p in parameters], [p.grad for p in random_parameters(4)])

    @pytest.mark.parametrize("bound", [1e-300, 1.0])
    def test_zeros_stay_zeros(self, bound):
        parameters = [parameter_of(torch.zeros(4))]
        assert clip_grad_norm_(parameters, bound) == 0.0
        assert exact_norm(parameters) == 0.0

    def test_empty_gradients_count_nothing(self):
        parameters = [parameter_of(torch.zeros(0, 3)), parameter_of(torch.tensor([3.0, 4.0]))]
        assert clip_grad_norm_(parameters, 1.0) == 5.0
        assert clip_grad_norm_(parameters[:1], 1.0) == 0.0


class TestOrderOfMemory:
    def dense(self):
        """Gradients that fill their memory, in every order but the usual one."""
        torch.manual_seed(5)
        return {
            "channels_last": torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
            "channels_last 3d": torch.randn(4, 3, 2, 5, 5).to(memory_format=torch.channels_last_3d),
            "channels_last 1x1": torch.randn(8, 3, 1, 1).to(memory_format=torch.channels_last),
            "transposed": torch.randn(6, 4).t(),
            "permuted": torch.randn(3, 4, 5).permute(2, 0, 1),
            "a dimension of one with a wild stride": torch.randn(4, 6).t().unsqueeze(1)[:, :1],
            "bf16": torch.randn(6, 4).bfloat16().t(),
        }

    def test_any_dense_order_is_taken_as_it_lies(self):
        for name, gradient in self.dense().items():
            parameter, exact = torch.zeros(gradient.shape, dtype=gradient.dtype), gradient.double().norm().item()
            parameter.grad = gradient
            address, before = gradient.data_ptr(), gradient.float().clone()
            norm = clip_grad_norm_([parameter], 0.25)
            assert float(norm) == pytest.approx(exact, rel=1e-6), name
            assert parameter.grad is gradient
            assert gradient.data_ptr() == address
            expected = (before * np.float32(0.25 / exact)).to(gradient.dtype)
            torch.testing.assert_close(
                gradient, expected, rtol=1e-6 if gradient.dtype is torch.float32 else 2**-7, atol=0
            )

    def test_a_convolution_in_channels_last(self):
        module = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        module(torch.ones(2, 3, 6, 6).to(memory_format=torch.channels_last)).square().sum().backward()
        assert not module.weight.grad.is_contiguous()
        exact = exact_norm(module.parameters())
        assert float(clip_grad_norm_(module.parameters(), 1.0)) == pytest.approx(exact, rel=1e-6)
        assert exact_norm(module.parameters()) == pytest.approx(1.0, rel=1e-6)

    @pytest.mark.parametrize(
        "gradient",
        [
            torch.ones(1).expand(4),
            torch.ones(3, 1).expand(3, 4),
            torch.ones(8)[::2],
            torch.ones(4, 6)[:, :5].t(),
            torch.ones(9).as_strided((3, 3), (1, 2)),
        ],
        ids=["expanded", "expanded in part", "every second", "with gaps", "overlapping itself"],
    )
    def test_gaps_and_overlaps_are_refused_by_position(self, gradient):
        parameter = torch.zeros(gradient.shape)
        parameter.grad = gradient
        with pytest.raises(BufferRefused, match=r"'parameters\[2\].grad' is not contiguous"):
            clip_grad_norm_([*random_parameters(0, SHAPES[:2]), parameter], 1.0)
        assert (gradient == 1).all()


class TestClipRefuses:
    def refused(self, gradient, words, kind=BufferRefused):
        good = parameter_of(torch.tensor([30.0, 40.0]))
        parameter = torch.zeros_like(gradient)
        parameter.grad = gradient
        with pytest.raises(kind, match=words) as caught:
            clip_grad_norm_([good, parameter], 1.0)
        assert "parameters[1].grad" in str(caught.value)
        assert torch.equal(good.grad, torch.tensor([30.0, 40.0]))

    def test_sparse_gradients(self):
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1, 1])).sum().backward()
        self.refused(embedding.weight.grad, "sparse|strided")

    def test_gradients_in_a_compressed_sparse_layout(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls it beta
            gradient = torch.eye(3).to_sparse_csr()
            parameter = torch.zeros(3, 3).to_sparse_csr()
        good, parameter.grad = parameter_of(torch.ones(2)), gradient
        with pytest.raises(BufferRefused, match=r"parameters\[1\]\.grad"):
            clip_grad_norm_([good, parameter], 1.0)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
    def test_other_dtypes_and_says_which_are_taken(self, dtype):
        self.refused(torch.ones(3, dtype=dtype), f"{str(dtype)[6:]}.*float32, float16 or bfloat16")

    def test_complex_gradients_conjugated_lazily(self):
        self.refused(torch.ones(3, dtype=torch.complex64).conj(), "complex|conj")

    def test_kinds_of_tensor_that_know_alone_where_they_lie(self):
        class Elsewhere(torch.Tensor):
            pass

        self.refused(torch.ones(3).as_subclass(Elsewhere), "Elsewhere.*torch.Tensor")

    def test_gradients_on_another_device(self):
        self.refused(torch.ones(3, device="meta"), "meta|device|exported")

    def test_a_device_without_kernels(self):
        parameter = torch.zeros(3, device="meta")
        parameter.grad = torch.zeros(3, device="meta")
        with pytest.raises(CallerError, match="meta"):
            clip_grad_norm_([parameter], 1.0)

    def test_a_parameter_that_is_listed_twice(self):
        parameter = parameter_of(torch.tensor([3.0, 4.0]))
        with pytest.raises(BufferRefused, match=r"parameters\[0\].grad' and 'parameters\[2\].grad' overlap"):
            clip_grad_norm_([parameter, parameter_of(torch.ones(2)), parameter], 1.0)
        assert torch.equal(parameter.grad, torch.tensor([3.0, 4.0]))

    def test_gradients_that_share_memory(self):
        memory = torch.ones(6)
        parameters = [parameter_of(torch.ones(4)), parameter_of(torch.ones(4))]
        parameters[0].grad, parameters[1].grad = memory[:4], memory[2:]
        with pytest.raises(BufferRefused, match="overlap"):
            clip_grad_norm_(parameters, 1.0)

    @pytest.mark.parametrize("max_norm", [-1.0, NAN, "much", torch.tensor(-1.0)])
    @pytest.mark.parametrize("parameters", [[], "some"])
    def test_a_bound_that_is_none(self, max_norm, parameters):
        given_to_it = random_parameters(0) if parameters else []
        before = [p.grad.clone() for p in given_to_it]
        with pytest.raises(CallerError, match=r"max_norm is (out|not) "):
            clip_grad_norm_(given_to_it, max_norm)
        assert_same_bits([p.grad for p in given_to_it], before)

    def test_a_bound_may_be_a_tensor(self):
        parameters = random_parameters(0)
        clip_grad_norm_(parameters, torch.tensor(0.5))
        assert exact_norm(parameters) == pytest.approx(0.5, rel=1e-6)

    @pytest.mark.parametrize("norm_type", [1.0, INF, "inf", 0, NAN, None, "two"])
    def test_other_norms_and_says_what_to_use(self, norm_type):
        with pytest.raises(CallerError, match=r"norm_type.*expected 2; use torch\.nn\.utils"):
            clip_grad_norm_(random_parameters(0), 1.0, norm_type)

    @pytest.mark.parametrize("norm_type", [2, 2.0, "2"])
    def test_any_way_to_say_two(self, norm_type):
        assert clip_grad_norm_([parameter_of(torch.tensor([3.0, 4.0]))], 1.0, norm_type) == 5.0

    def test_what_is_no_parameter(self):
        module = net()
        with pytest.raises(CallerError, match=r"parameters\[0\] is not a tensor: got tuple.*module.parameters\(\)"):
            clip_grad_norm_(module.named_parameters(), 1.0)

    @pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), None, 3], ids=["a module", "None", "a number"])
    def test_what_is_no_list_of_parameters_and_says_what_to_pass(self, given):
        kind = type(given).__name__
        with pytest.raises(
            CallerError, match=rf"neither a tensor nor an iterable.*got {kind}; pass module.parameters\(\)"
        ):
            clip_grad_norm_(given, 1.0)

    def test_a_module_that_is_a_list_of_modules(self):
        with pytest.raises(
            CallerError, match=r"parameters\[0\] is not a tensor: got Linear; pass module.parameters\(\)"
        ):
            clip_grad_norm_(net(), 1.0)


class TestNotFinite:
    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nothing_is_written_and_the_norm_says_so(self, bad, dtype):
        """torch would multiply every gradient by NaN, or by 0."""
        parameters = random_parameters(6, dtype=dtype)
        parameters[1].grad[500] = bad
        before = [p.grad.clone() for p in parameters]
        assert not math.isfinite(clip_grad_norm_(parameters, 0.5))
        assert_same_bits([p.grad for p in parameters], before)

    @pytest.mark.parametrize("kind", [NonFiniteGradient, RuntimeError])
    def test_an_error_names_parameter_index_and_value(self, kind):
        parameters = [torch.nn.Parameter(torch.ones(2)), *random_parameters(7)]
        parameters[1].grad[2, 3] = -INF
        parameters[1].grad[6, 4] = parameters[2].grad[3] = NAN
        before = [p.grad.clone() for p in parameters[1:]]
        with pytest.raises(kind, match=r"'parameters\[1\].grad' at index 13: got -inf") as caught:
            clip_grad_norm_(parameters, 0.5, error_if_nonfinite=True)
        error = caught.value
        assert (error.component, error.index, error.value) == ("parameters[1].grad", 13, -INF)
        assert "discard" not in str(error)  # there is no window
        assert_same_bits([p.grad for p in parameters[1:]], before)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.index) == (type(error), str(error), 13)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_each_kind_is_an_error(self, bad):
        parameters = [*random_parameters(7), parameter_of(torch.tensor([1.0, bad, 2.0]))]
        with pytest.raises(NonFiniteGradient) as caught:
            clip_grad_norm_(iter(parameters), 0.5, error_if_nonfinite=True)
        error = caught.value
        assert (error.component, error.index, str(error.value)) == ("parameters[5].grad", 1, str(bad))

    def test_the_index_is_that_of_the_tensor_whatever_its_order_of_memory(self):
        parameter = torch.zeros(4, 6)
        parameter.grad = torch.ones(6, 4).t()
        parameter.grad[1, 2] = NAN
        with pytest.raises(NonFiniteGradient) as caught:
            clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
        assert caught.value.index == 8

    def test_a_finite_norm_raises_nothing(self):
        parameters = random_parameters(8)
        assert clip_grad_norm_(parameters, 0.5, error_if_nonfinite=True) == clip_grad_norm_(random_parameters(8), 0.5)


class TestStates:
    """Calls with gradients of the same sizes share what a clip needs; nothing else may be shared by that."""

    def test_no_gradient_is_kept_alive(self):
        parameters = random_parameters(0)
        clip_grad_norm_(parameters, 0.5)
        storages = [weakref.ref(p.grad.untyped_storage()) for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        gc.collect()
        assert all(storage() is None for storage in storages)

    def test_each_norm_is_that_of_its_own_call(self):
        for seed, magnitude in ((0, 1.0), (1, 100.0), (0, 1.0)):
            parameters = random_parameters(seed, magnitude=magnitude)
            exact = exact_norm(parameters)
            assert float(clip_grad_norm_(parameters, 0.5)) == pytest.approx(exact, rel=1e-6)

    def test_the_same_sizes_may_have_other_dtypes_and_orders(self):
        for dtype, turned in itertools.product(DTYPES, (False, True)):
            gradient = torch.full((4, 6), 2.0, dtype=dtype)
            parameter = torch.zeros((6, 4) if turned else (4, 6), dtype=dtype)
            parameter.grad = gradient.t() if turned else gradient
            assert float(clip_grad_norm_([parameter], 1.0)) == pytest.approx(math.sqrt(96))


def accumulated_ones(module):
    """A deferred step's result of gradients that are one everywhere."""
    engine = GradientEngine(layout_of(module), max_norm=None)
    engine.add([torch.ones(p.shape) for p in module.parameters()])
    return engine.step(deferred=True)


def averaged(module, seeds, weights, max_norm):
    """What the engine is to hand back, by torch in fp64: name -> gradient."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in module.named_parameters()}
    for seed, weight in zip(seeds, weights, strict=True):
        module.zero_grad()
        backward(module, seed)
        for name, p in module.named_parameters():
            total[name] += weight * p.grad.double()
    module.zero_grad()
    mean = {name: value / sum(weights) for name, value in total.items()}
    norm = math.sqrt(sum((value**2).sum().item() for value in mean.values()))
    return {name: value * min(1.0, max_norm / norm) for name, value in mean.items()}


def accumulated(module, seeds, weights, **options):
    """An engine with these micro-batches, its window open."""
    engine = GradientEngine(layout_of(module), **options)
    for seed, weight in zip(seeds, weights, strict=True):
        module.zero_grad()
        backward(module, seed, options.get("loss_scale", 1.0))
        engine.add(gradients_of(module), weight)
    module.zero_grad()
    return engine


class TestLayout:
    def test_is_that_of_the_trainable_parameters_in_their_order(self):
        module = net()
        module[0].bias.requires_grad_(False)
        assert layout_of(module) == GradientLayout.of({"0.weight": (7, 5), "2.weight": (3, 7), "2.bias": (3,)})
        assert list(gradients_of(module)) == [slot.name for slot in layout_of(module).slots]

    def test_tied_parameters_come_once(self):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        module[1].weight = module[0].weight
        assert [slot.name for slot in layout_of(module).slots] == ["0.weight", "0.bias", "1.bias"]

    def test_parameters_of_no_dimension_and_of_no_elements(self):
        module = torch.nn.ParameterDict(
            {"a": torch.nn.Parameter(torch.ones(())), "b": torch.nn.Parameter(torch.ones(0, 2))}
        )
        assert [slot.shape for slot in layout_of(module).slots] == [(), (0, 2)]

    def test_a_module_with_nothing_to_train_is_refused(self):
        frozen = net().requires_grad_(False)
        message = (
            r"at least one component, and nothing here requires a gradient: got 0 of 4 parameters, expected a "
            r"parameter with requires_grad=True; call \.requires_grad_\(True\)"
        )
        for make, module in ((layout_of, frozen), (GradientLayout.of, frozen), (layout_of, list(frozen.parameters()))):
            with pytest.raises(LayoutMismatch, match=message):
                make(module)
        with pytest.raises(LayoutMismatch, match="got 0 of 0 parameters"):
            GradientLayout.of(torch.nn.ReLU())

    def test_a_permuted_parameter_has_the_shape_in_which_it_lies(self):
        module = torch.nn.Conv2d(3, 8, (5, 7)).to(memory_format=torch.channels_last)
        assert layout_of(module).slot("weight").shape == (8, 5, 7, 3)
        assert layout_of(module) != layout_of(torch.nn.Conv2d(3, 8, (5, 7)))  # so workers who differ will not meet

    @pytest.mark.parametrize("given", [None, [torch.ones(2)], torch.ones(2), {}, "ab", 5])
    def test_what_is_no_module_is_refused(self, given):
        for call in (layout_of, gradients_of, lambda module: tensors_of(module, {})):
            with pytest.raises(
                CallerError, match=f"not a torch module: got {type(given).__name__}, expected torch.nn.Module, or"
            ):
                call(given)

    def test_a_module_is_laid_out_by_gradient_layout_too(self):
        for module in (net(), torch.nn.Conv2d(3, 8, (5, 7)).to(memory_format=torch.channels_last)):
            assert GradientLayout.of(module) == layout_of(module)

    def test_a_list_of_parameters_is_laid_out_by_position(self):
        module = net()
        module[0].bias.requires_grad_(False)
        shapes = [(7, 5), (7,), (3, 7), (3,)]
        assert GradientLayout.of(module.parameters()) == GradientLayout.of(shapes)  # as a list of gradients is passed
        assert layout_of(module.parameters()) == GradientLayout.of({str(i): shapes[i] for i in (0, 2, 3)})

    def test_a_list_of_parameters_will_do_for_a_whole_step(self):
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
        assert_same_bits(ours.parameters(), theirs.parameters())

    @pytest.mark.parametrize("call", [layout_of, GradientLayout.of])
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda m: m[2].double(), "'2.weight' has an unsupported dtype: got float64, .* cast it first"),
            (
                lambda m: setattr(m[2], "weight", torch.nn.Parameter(torch.ones(3, 7) * 1j)),
                "'2.weight' .* got complex64, .* complex: take its real view",
            ),
            (
                lambda m: setattr(m[0].weight, "to_local", None),
                "'0.weight' is a distributed tensor.* local shapes, and add",
            ),
            (
                lambda m: setattr(m[2], "bias", torch.nn.Parameter(torch.ones(3).to_sparse())),
                "'2.bias' is sparse: .*dense",
            ),
        ],
        ids=["float64", "complex", "DTensor", "sparse"],
    )
    def test_a_parameter_whose_gradients_would_be_refused_is_refused_at_once(self, call, change, says):
        module = net()
        change(module)
        with pytest.raises(BufferRefused, match=says):
            call(module)

    def test_so_it_is_in_a_list(self):
        with pytest.raises(BufferRefused, match="'1' has an unsupported dtype: got float64"):
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
        with pytest.raises(BufferRefused, match=r"'0\.weight' is on the meta device and has no memory"):
            GradientEngine(layout_of(module)).add([torch.ones_like(p).detach() for p in module.parameters()])

    def test_lazy_parameters_are_refused_until_they_have_a_shape(self):
        module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LazyLinear(3))
        for call in (layout_of, lambda module: gradients_of(module, allocate=True)):
            with pytest.raises(LayoutMismatch, match=r"'1\.weight' has no shape yet: got Uninit.*call the module once"):
                call(module)
        module(torch.ones(1, 4))
        assert layout_of(module).slot("1.weight").shape == (3, 5)


class TestGradientsOf:
    def test_are_the_gradients_themselves(self):
        module = net()
        assert gradients_of(module) == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"])
        backward(module, 0)
        for name, gradient in gradients_of(module).items():
            assert gradient is module.get_parameter(name).grad

    def test_allocated_are_zeros_where_there_were_none(self):
        module = net(torch.bfloat16)
        backward(module, 0)
        kept, module[0].bias.grad = module[0].weight.grad, None
        gradients = gradients_of(module, allocate=True)
        assert gradients["0.weight"] is kept
        assert gradients["0.bias"] is module[0].bias.grad
        assert gradients["0.bias"].dtype is torch.bfloat16
        assert not gradients["0.bias"].requires_grad
        assert (gradients["0.bias"] == 0).all()

    @has_grad_dtype
    @pytest.mark.parametrize(
        ("dtype", "allowed"),
        [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, None)],
    )
    def test_allocated_ones_have_the_parameters_grad_dtype(self, dtype, allowed):
        module = net(dtype)
        for parameter in module.parameters():
            parameter.grad_dtype = allowed
        for gradient in gradients_of(module, allocate=True).values():
            assert gradient.dtype is (allowed or dtype)  # None is any: the parameter's own then

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

    def test_what_the_last_micro_batch_did_not_use_is_dropped_unless_it_is_allocated(self):
        """As an expert that got no token in it."""
        written = {}
        for allocate in (False, True):
            module = torch.nn.ModuleDict({"expert": torch.nn.Linear(2, 1), "shared": torch.nn.Linear(2, 1)})
            engine = GradientEngine(layout_of(module), max_norm=None)
            for used in (module.values(), [module["shared"]]):
                module.zero_grad()
                sum(part(torch.ones(1, 2)).sum() for part in used).backward()
                engine.add(gradients_of(module))
            engine.step(out=gradients_of(module, allocate=allocate))
            written[allocate] = module["expert"].weight.grad
        assert written[False] is None
        assert torch.equal(written[True], torch.full((1, 2), 0.5))

    def test_a_permuted_parameter_whose_gradient_lies_otherwise_is_refused(self):
        module = torch.nn.Conv2d(3, 8, 3, bias=False).to(memory_format=torch.channels_last)
        module.weight.grad = torch.ones(8, 3, 3, 3)
        with pytest.raises(BufferRefused, match="'weight' is not contiguous"):
            GradientEngine(layout_of(module)).add(gradients_of(module))

    def test_a_parameter_with_gaps_has_a_gradient_in_the_usual_order(self):
        """Memory has no order there that a gradient could share, so autograd makes a contiguous one."""
        module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(4, 6)[:, :5].t())})
        (module["w"] * torch.arange(20.0).reshape(5, 4)).sum().backward()
        assert not module["w"].is_contiguous()
        engine = GradientEngine(layout_of(module), max_norm=None)
        engine.add(gradients_of(module))
        assert np.array_equal(engine.step().gradients["w"], np.arange(20.0).reshape(5, 4))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_round_trip_of_weighted_micro_batches(self, dtype):
        module, weights = net(dtype), (3.0, 5.0, 1.0)
        expected = averaged(module, range(3), weights, max_norm=0.05)
        engine = accumulated(module, range(3), weights, max_norm=0.05)
        addresses = {n: g.data_ptr() for n, g in gradients_of(module, allocate=True).items()}
        result = engine.step(out=gradients_of(module))
        assert float(result.norm) > 0.05
        for name, parameter in module.named_parameters():
            assert parameter.grad.data_ptr() == addresses[name]
            assert parameter.grad.dtype is dtype
            rounding = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}[dtype]
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=rounding, atol=1e-7)

    def test_a_parameter_that_no_micro_batch_used(self):
        module = net()
        backward(module, 0)
        module[0].weight.grad = None
        engine = GradientEngine(layout_of(module), max_norm=None)
        engine.add(gradients_of(module))
        engine.step(out=gradients_of(module, allocate=True))
        assert (module[0].weight.grad == 0).all()
        assert module[0].bias.grad.abs().sum() > 0


class TestTensorsOf:
    def turned(self, dtype=torch.float32):
        """A square weight that lies transposed, a convolution in channels_last, a bias, a number, and nothing."""
        conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        module = torch.nn.ParameterDict(
            {"square": torch.nn.Parameter(torch.ones(4, 4).t()), **dict(conv.named_parameters())}
        )
        module["one"], module["none"] = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(0, 3))
        return module.to(dtype)

    def stepped(self, module):
        """Gradients that say which element they are of, and what the engine made of them."""
        wanted = {n: torch.arange(float(p.numel())).reshape(p.shape) for n, p in module.named_parameters()}
        for name, parameter in module.named_parameters():
            parameter.grad = torch.empty_like(parameter).copy_(wanted[name])
        engine = GradientEngine(layout_of(module), max_norm=None)
        engine.add(gradients_of(module))
        return wanted, engine.step()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_have_the_parameters_shape_and_order_in_fp32_and_are_views(self, dtype):
        module = self.turned(dtype)
        wanted, result = self.stepped(module)
        tensors = tensors_of(module, result.gradients)
        assert list(tensors) == list(wanted)
        for name, parameter in module.named_parameters():
            assert tensors[name].dtype is torch.float32
            assert (tensors[name].shape, tensors[name].stride()) == (parameter.shape, parameter.stride())
            assert torch.equal(tensors[name], wanted[name]), name
            if parameter.numel():
                assert tensors[name].data_ptr() == result.gradients[name].ctypes.data

    def test_the_gradients_themselves_are_turned_which_a_square_does_not_show(self):
        module = self.turned()
        wanted, result = self.stepped(module)
        assert np.array_equal(result.gradients["square"], wanted["square"].numpy().T)

    def test_frozen_parameters_have_none_and_tied_ones_one(self):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        module[1].weight = module[0].weight
        module[1].bias.requires_grad_(False)
        _, result = self.stepped(module)
        assert list(tensors_of(module, result.gradients)) == ["0.weight", "0.bias"]

    def test_of_another_module_is_refused(self):
        _, result = self.stepped(self.turned())
        with pytest.raises(
            LayoutMismatch, match=r"no gradient for parameter '0\.weight': got none, expected shape \(7, 5\)"
        ):
            tensors_of(net(), result.gradients)

    def test_what_was_written_to_destinations_has_the_parameters_shape_too(self):
        module = self.turned(torch.bfloat16)
        wanted, _ = self.stepped(module)
        engine = GradientEngine(layout_of(module), max_norm=None)
        engine.add(gradients_of(module))
        result = engine.step(out=gradients_of(module))
        for name, tensor in tensors_of(module, result.gradients).items():
            assert torch.equal(tensor.float(), wanted[name])


class TestGiveGradients:
    def test_are_views_of_the_engines_memory_with_the_averaged_gradients(self):
        module, weights = net(), (3.0, 5.0)
        expected = averaged(module, range(2), weights, max_norm=0.05)
        result = accumulated(module, range(2), weights, max_norm=0.05).step()
        give_gradients(module, result)
        for name, parameter in module.named_parameters():
            assert parameter.grad.data_ptr() == result.gradients[name].ctypes.data
            assert parameter.grad.shape == parameter.shape
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=2e-6, atol=1e-8)

    def test_the_next_add_writes_over_them(self):
        module = net()
        engine = accumulated(module, [0], [1.0])
        give_gradients(module, engine.step())
        held = module[0].weight.grad
        before = held.clone()
        module.zero_grad()
        backward(module, 1)
        engine.add(gradients_of(module))
        assert torch.equal(held, module[0].weight.grad)
        assert not torch.equal(held, before)

    def test_a_forgotten_zero_grad_is_refused(self):
        module = net()
        engine = accumulated(module, [0], [1.0])
        give_gradients(module, engine.step())
        backward(module, 1)
        with pytest.raises(BufferRefused, match=r"'0\.weight' is in this accumulator's own arena"):
            engine.add(gradients_of(module))

    def test_a_training_loop_is_that_of_torch(self):
        ours, theirs = net(), net()
        engine = GradientEngine(layout_of(ours), max_norm=0.05)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs)]
        for step in range(5):
            backward(ours, step)
            engine.add(gradients_of(ours))
            give_gradients(ours, engine.step())
            backward(theirs, step)
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    def test_parameters_of_no_dimension_and_of_no_elements(self):
        module = torch.nn.ParameterDict(
            {"a": torch.nn.Parameter(torch.ones(())), "b": torch.nn.Parameter(torch.ones(0, 2))}
        )
        engine = GradientEngine(layout_of(module), max_norm=None)
        engine.add({"a": torch.full((), 3.0), "b": torch.ones(0, 2)})
        give_gradients(module, engine.step())
        assert module["a"].grad == 3.0
        assert module["b"].grad.shape == (0, 2)

    def test_frozen_parameters_are_given_none(self):
        module = net()
        module[0].bias.requires_grad_(False)
        give_gradients(module, accumulated(module, [0], [1.0]).step())
        assert module[0].bias.grad is None
        assert module[0].weight.grad is not None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_another_dtype_is_refused_by_name_and_nothing_is_set(self, dtype):
        module = net()
        result = accumulated(module, [0], [1.0]).step()
        module[2].to(dtype)
        with pytest.raises(BufferRefused, match=r"'2.weight'.*step\(out=gradients_of\(module, allocate=True\)\)"):
            give_gradients(module, result)
        assert all(p.grad is None for p in module.parameters())

    @has_grad_dtype
    @pytest.mark.parametrize("allowed", [torch.float32, None])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_other_parameters_whose_grad_dtype_allows_it_have_fp32_gradients(self, dtype, allowed):
        module = net()
        result = accumulated(module, [0], [1.0]).step()
        for parameter in module.to(dtype).parameters():
            parameter.grad_dtype = allowed
        give_gradients(module, result)
        for name, parameter in module.named_parameters():
            assert parameter.grad.dtype is torch.float32
            assert parameter.grad.data_ptr() == result.gradients[name].ctypes.data

    @has_grad_dtype
    def test_an_fp32_parameter_whose_grad_dtype_is_another_is_refused_by_name(self):
        module = net()
        result = accumulated(module, [0], [1.0]).step()
        module[2].bias.grad_dtype = torch.bfloat16
        with pytest.raises(BufferRefused, match=r"'2\.bias'.*got torch.float32, expected torch.bfloat16"):
            give_gradients(module, result)
        assert all(p.grad is None for p in module.parameters())

    def test_another_device_is_refused_by_name(self):
        result = accumulated(net(), [0], [1.0]).step()
        with pytest.raises(BufferRefused, match=r"'0\.weight' is on another device.*meta.*cpu"):
            give_gradients(net().to("meta"), result)

    def test_another_modules_result_is_refused_and_nothing_is_set(self):
        module = net()
        result = accumulated(module, [0], [1.0]).step()
        wider, longer = torch.nn.Sequential(torch.nn.Linear(5, 8)), torch.nn.Sequential(*net(), torch.nn.Linear(3, 2))
        for other, words in ((wider, r"'0.weight'.*\(7, 5\).*\(8, 5\)"), (longer, "'3.weight': got none")):
            with pytest.raises(LayoutMismatch, match=words):
                give_gradients(other, result)
            assert all(p.grad is None for p in other.parameters())

    def test_permuted_parameters_go_in_and_out_in_their_order(self):
        torch.manual_seed(0)
        module = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        module(torch.randn(2, 3, 6, 6)).square().sum().backward()
        before = {name: p.grad.clone() for name, p in module.named_parameters()}
        engine = GradientEngine(layout_of(module), max_norm=None)
        for hand_back in ("given", "written"):
            engine.add(gradients_of(module))
            engine.add(gradients_of(module), weight=3)
            if hand_back == "given":
                give_gradients(module, engine.step())
                assert module.weight.grad.stride() == module.weight.stride()
            else:
                module.zero_grad()
                engine.step(out=gradients_of(module, allocate=True))
            for name, p in module.named_parameters():
                torch.testing.assert_close(p.grad, before[name], rtol=1e-6, atol=0)
                p.grad = before[name].clone(memory_format=torch.preserve_format)


def stepped_by_hand(kind, module, steps, max_norm):
    """torch's own optimizer, not fused, on gradients averaged and clipped in fp64."""
    optimizer = FUSED[kind](module.parameters())
    for seeds, weights in steps:
        gradients = averaged(module, seeds, weights, max_norm)
        for name, p in module.named_parameters():
            p.grad = gradients[name].float()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def state_of(optimizer):
    return [value for state in optimizer.state_dict()["state"].values() for value in state.values()]


class Branches(torch.nn.Module):
    """Two branches, one of them in a block of its own, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.other, self.tied = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)

    def forward(self, x, block=True):
        return self.tied(self.tied((self.layers[0] if block else self.other)(x)))


class TestNoGradient:
    SAYS = r"no component has a gradient in this micro-batch: got None for all 4"

    def test_zero_grad_between_backward_and_add_is_refused(self):
        module = net()
        engine = GradientEngine(layout_of(module), max_norm=1.0)
        for seed in range(2):
            backward(module, seed)
            module.zero_grad()
            with pytest.raises(WindowError, match=self.SAYS):
                engine.add(gradients_of(module))
            backward(module, seed)
            engine.add(gradients_of(module))
            module.zero_grad()
        assert engine.step().micro_batches == 2

    def test_a_module_whose_gradients_nobody_asked_for_is_refused(self):
        module = net()
        engine = GradientEngine(layout_of(module))
        with torch.no_grad():
            module(torch.ones(2, 5))
        with pytest.raises(WindowError, match=self.SAYS):
            engine.add(gradients_of(module))


class TestUnused:
    """What no micro-batch used has no gradient, so that AdamW does not decay it: as torch leaves it."""

    @staticmethod
    def stepped(module, optimizer, way, engine):
        if way == "give_gradients":
            give_gradients(module, engine.step())
        elif way == "zeros":
            give_gradients(module, engine.step(), zero_unused=True)
        elif way == "out":
            drop_unused(module, engine.step(out=gradients_of(module, allocate=True)))
        if way == "step_fused":
            step_fused(optimizer, engine.step(deferred=True), module)
        else:
            optimizer.step()

    def test_nothing_is_dropped_of_another_module_by_an_old_result_or_by_none(self):
        module = Branches()
        module(torch.ones(3, 4)).sum().backward()
        wrapped = torch.nn.ModuleDict({"module": module})
        engine = GradientEngine(layout_of(module))
        engine.add(gradients_of(module))
        result = engine.step(out=gradients_of(module, allocate=True))
        with pytest.raises(LayoutMismatch, match=r"'other.bias' \(and 1 more\) is not a parameter of this module"):
            drop_unused(wrapped, result)
        module.zero_grad()
        module(torch.ones(3, 4), block=False).sum().backward()
        engine.add(gradients_of(module))
        with pytest.raises(CallerError, match="out of date"):
            drop_unused(module, result)
        with pytest.raises(CallerError, match="result"):
            drop_unused(module, None)
        assert module.other.weight.grad is not None

    @pytest.mark.parametrize("way", ["give_gradients", "out", "step_fused", "zeros"])
    @pytest.mark.parametrize("world_size", [1, 2])
    def test_a_branch_that_nobody_used_stays_what_it_was(self, way, world_size):
        """On two workers each uses another branch in the first step, and neither the second branch in the second."""
        plain = Branches()
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
        modules = [Branches() for _ in range(world_size)]
        start = plain.other.weight.detach().clone()
        used = [[[True], [True]], [[True, False], [True, True]]][world_size - 1]
        for step in used:
            plain.zero_grad()
            torch.stack([plain(torch.ones(3, 4), block).square().sum() for block in step]).mean().backward()
            reference.step()

        def train(exchange):
            module = modules[exchange.rank]
            engine = GradientEngine(layout_of(module), exchange=exchange)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5, fused=way == "step_fused")
            for step in used:
                module.zero_grad()
                module(torch.ones(3, 4), step[exchange.rank]).square().sum().backward()
                engine.add(gradients_of(module))
                self.stepped(module, optimizer, way, engine)
            gradient = module.other.weight.grad
            return gradient is None or float(gradient.abs().max())

        assert on_ranks(train, world_size) == [0.0 if way == "zeros" else True] * world_size
        for module in modules if way != "zeros" else ():
            for one, other in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        if way == "zeros" and world_size == 1:
            torch.testing.assert_close(modules[0].other.weight.detach(), start * 0.95**2)

    def test_where_all_of_an_optimizers_parameters_are_unused_it_does_nothing(self):
        module = Branches()
        optimizer = torch.optim.AdamW(module.other.parameters(), fused=True)
        before = module.other.weight.detach().clone()
        engine = GradientEngine(layout_of(module))
        module(torch.ones(3, 4)).sum().backward()
        engine.add(gradients_of(module))
        step_fused(optimizer, engine.step(deferred=True), module)
        assert torch.equal(module.other.weight, before)


class TestStepFused:
    STEPS = (((0, 1), (3.0, 5.0)), ((2,), (7.0,)), ((3, 4, 5), (1.0, 2.0, 4.0)))

    @pytest.mark.parametrize("kind", FUSED)
    @pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
    @pytest.mark.parametrize("max_norm", [0.05, 1e9])
    def test_is_an_optimizer_on_averaged_and_clipped_gradients(self, kind, loss_scale, max_norm):
        ours, theirs = net(), net()
        reference = stepped_by_hand(kind, theirs, self.STEPS, max_norm)
        optimizer = FUSED[kind](ours.parameters(), fused=True)
        for seeds, weights in self.STEPS:
            engine = accumulated(ours, seeds, weights, max_norm=max_norm, loss_scale=loss_scale)
            result = engine.step(deferred=True)
            step_fused(optimizer, result, ours)
            ours.zero_grad()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        for one, other in zip(state_of(optimizer), state_of(reference), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

    def test_leaves_the_averaged_and_clipped_gradients(self):
        module = net()
        expected = averaged(module, (0, 1), (3.0, 5.0), max_norm=0.05)
        result = accumulated(module, (0, 1), (3.0, 5.0), max_norm=0.05).step(deferred=True)
        step_fused(torch.optim.AdamW(module.parameters(), fused=True), result, module)
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.grad.double(), expected[name], rtol=2e-6, atol=1e-8)

    @pytest.mark.parametrize("kind", FUSED)
    def test_a_skipped_step_changes_neither_parameters_nor_state(self, kind):
        module = net()
        optimizer = FUSED[kind](module.parameters(), fused=True)
        engine = GradientEngine(layout_of(module), max_norm=0.5, on_non_finite="skip")
        for is_bad in (False, True, False):
            backward(module, 0)
            if is_bad:
                module[0].weight.grad[1, 2] = NAN
            engine.add(gradients_of(module))
            before = [p.detach().clone() for p in module.parameters()], copy.deepcopy(state_of(optimizer))
            result = engine.step(deferred=True)
            assert result.skipped is is_bad
            step_fused(optimizer, result, module)
            module.zero_grad()
            if is_bad:
                assert_same_bits(module.parameters(), before[0])
                assert_same_bits(state_of(optimizer), before[1])
            else:
                assert not torch.equal(module[0].weight, before[0][0])
        assert all(torch.isfinite(p).all() for p in module.parameters())

    @pytest.mark.parametrize("kind", FUSED)
    def test_a_first_step_that_is_skipped_leaves_no_trace_in_the_second(self, kind):
        """torch's SGD makes its momentum's memory in the first step and fills it only if that is not skipped."""
        skipping, other = net(), net()
        optimizers = [FUSED[kind](m.parameters(), fused=True) for m in (skipping, other)]
        for seed, module, optimizer in (
            (NAN, skipping, optimizers[0]),
            (0, skipping, optimizers[0]),
            (0, other, optimizers[1]),
        ):
            engine = GradientEngine(layout_of(module), max_norm=0.5, on_non_finite="skip")
            backward(module, 0)
            if math.isnan(seed):
                module[2].bias.grad[0] = NAN
            engine.add(gradients_of(module))
            result = engine.step(deferred=True)
            step_fused(optimizer, result, module)
            module.zero_grad()
            assert all(torch.isfinite(value).all() for value in state_of(optimizer))
        for one, two in zip(skipping.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("skips", [(), (0,), (0, 1), (0, 2), (1,)])
    @pytest.mark.parametrize(
        "options", [{"dampening": 0.3}, {"dampening": 1.0, "weight_decay": 0.1}, {"nesterov": True}]
    )
    def test_an_sgds_first_step_is_the_first_that_is_not_skipped(self, skips, options):
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

    def test_a_gpus_numbers_are_handed_on_where_they_lie_with_no_wait(self, monkeypatch):
        """They stand for what cannot be here: reading one on the host would be the wait."""

        class OnGpu:
            def __init__(self, value):
                self.there = torch.tensor(float(value), dtype=torch.float32)

            def __dlpack_device__(self):
                return (2, 0)

            def __float__(self):
                raise AssertionError("the host read a number on the GPU")

        module = net()
        given = accumulated(module, [0], [4.0], max_norm=0.05).step(deferred=True)
        there = dataclasses.replace(given._decided.decision, inverse=OnGpu(given.inverse_factor), skipped=OnGpu(0.0))
        result = dataclasses.replace(given, _decided=dataclasses.replace(given._decided, decision=there))
        optimizer, seen = torch.optim.AdamW(module.parameters(), fused=True), []
        optimizer.register_step_pre_hook(lambda own, *_: seen.extend((own.grad_scale, own.found_inf)))
        from_dlpack = gradients.from_dlpack
        monkeypatch.setattr(gradients, "from_dlpack", lambda a: a.there if isinstance(a, OnGpu) else from_dlpack(a))
        step_fused(optimizer, result, module)
        assert seen[0] is result.inverse_factor.there
        assert seen[1] is result.skipped.there

    @pytest.mark.parametrize("fails", [False, True])
    def test_takes_its_two_attributes_away_again(self, fails):
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        seen = []

        def look(optimizer, *_):
            seen.append((optimizer.grad_scale, optimizer.found_inf))
            if fails:
                raise ArithmeticError("a hook failed")

        optimizer.register_step_pre_hook(look)
        result = accumulated(module, [0], [4.0], max_norm=0.05).step(deferred=True)
        if fails:
            with pytest.raises(ArithmeticError, match="a hook failed"):
                step_fused(optimizer, result, module)
            assert all(parameter.grad is None for parameter in module.parameters())  # no sum for the next optimizer
        else:
            step_fused(optimizer, result, module)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        ((scale, found),) = seen
        assert (scale.dtype, scale.shape, found.dtype, found.shape) == (torch.float32, (), torch.float32, ())
        assert (float(scale), float(found)) == (float(result.inverse_factor), 0.0)

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
    def test_an_optimizer_that_is_not_fused_is_refused_and_does_nothing(self, new):
        module = net()
        optimizer, before = new(module.parameters()), [p.detach().clone() for p in module.parameters()]
        result = accumulated(module, [0], [1.0]).step(deferred=True)
        with pytest.raises(CallerError, match=f"got {type(optimizer).__name__} that is not fused.*fused=True"):
            step_fused(optimizer, result, module)
        assert_same_bits(module.parameters(), before)
        assert not optimizer.state
        assert not hasattr(optimizer, "grad_scale")

    @pytest.mark.parametrize("then", ["add", "window"])
    def test_a_result_that_is_out_of_date_is_refused(self, then):
        module = net()
        optimizer, before = torch.optim.AdamW(module.parameters(), fused=True), [p.clone() for p in module.parameters()]
        engine = accumulated(module, [0], [2.0])
        gradients = {name: torch.ones_like(parameter) for name, parameter in module.named_parameters()}
        stale = engine.step(deferred=True)
        engine.add(gradients, weight=100)
        current = engine.step(deferred=True) if then == "window" else None
        for use in (lambda: step_fused(optimizer, stale, module), lambda: give_gradients(module, stale)):
            with pytest.raises(CallerError, match="the result of step 0 is out of date: got an add or a step of the e"):
                use()
        assert_same_bits(module.parameters(), before)
        if current is not None:
            step_fused(optimizer, current, module)

    def test_a_result_that_is_scaled_already_is_refused(self):
        module = net()
        optimizer, before = torch.optim.AdamW(module.parameters(), fused=True), [p.clone() for p in module.parameters()]
        result = accumulated(module, [0], [1.0]).step()
        with pytest.raises(CallerError, match=r"scaled its gradients already; .* engine.step\(deferred=True\)"):
            step_fused(optimizer, result, module)
        assert_same_bits(module.parameters(), before)

    def test_a_loaded_state_that_says_not_fused_is_refused(self):
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        optimizer.load_state_dict(torch.optim.AdamW(module.parameters()).state_dict())
        result = accumulated(module, [0], [1.0]).step(deferred=True)
        with pytest.raises(CallerError, match="not fused"):
            step_fused(optimizer, result, module)

    def refused(self, module, optimizer, result, words, kind=BufferRefused):
        before = [p.detach().clone() for p in module.parameters()], [p.grad for p in module.parameters()]
        with pytest.raises(kind, match=words):
            step_fused(optimizer, result, module)
        assert_same_bits(module.parameters(), before[0])
        assert all(p.grad is gradient for p, gradient in zip(module.parameters(), before[1], strict=True))
        assert not optimizer.state
        assert not hasattr(optimizer, "grad_scale")

    def test_the_last_micro_batchs_gradient_is_no_part_of_it(self):
        """`.grad` is that micro-batch's alone, and would be divided by the whole window's factor."""
        module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(module.weight)
        engine = GradientEngine(layout_of(module))
        for value in (1.0, 3.0):
            module.weight.grad = torch.full((1, 1), value)
            engine.add(gradients_of(module))
        step_fused(torch.optim.SGD(module.parameters(), lr=1.0, fused=True), engine.step(deferred=True), module)
        assert module.weight.item() == -2

    def test_a_sum_reaches_no_other_optimizer(self):
        module = net()
        result = accumulated(module, [0, 1], [1.0, 1.0]).step(deferred=True)
        for use in (
            lambda: give_gradients(module, result),
            lambda: tensors_of(module, result.gradients),
            lambda: result.gradients["0.weight"],
        ):
            with pytest.raises(CallerError, match=r"was deferred .* result\.sums .* result\.factor .*step_fused"):
                use()
        assert all(parameter.grad is None for parameter in module.parameters())
        assert tensors_of(module, result.sums)["0.weight"].shape == module[0].weight.shape

    def test_an_optimizer_of_another_module_is_refused(self):
        """It would do nothing at all."""
        module, optimizer = net(), torch.optim.AdamW(net().parameters(), fused=True)
        result = accumulated(module, [0], [1.0]).step(deferred=True)
        self.refused(module, optimizer, result, "none of the optimizer's parameters is the module's", CallerError)

    def test_a_parameter_of_the_optimizer_that_is_not_of_the_module_is_refused_by_group_and_position(self):
        module, other = net(), torch.nn.Linear(3, 2)
        other(torch.ones(1, 3)).sum().backward()
        groups = [{"params": list(module.parameters())}, {"params": [torch.nn.Parameter(torch.ones(2)), other.bias]}]
        optimizer, result = (
            torch.optim.AdamW(groups, fused=True),
            accumulated(module, [0], [1.0]).step(deferred=True),
        )
        self.refused(module, optimizer, result, r"param_groups\[1\]\['params'\]\[1\] has a gradient.*got shape \(2,\)")
        other.zero_grad()
        step_fused(optimizer, result, module)  # one without a gradient is passed over

    @pytest.mark.parametrize(("first", "is_within"), [(23, False), (24, True), (36, True), (37, False)])
    def test_a_gradient_that_only_begins_or_ends_within_the_arena_is_none_of_it(self, first, is_within):
        memory = torch.zeros(64)
        extent = fused._extent([memory[40:44].numpy(), memory[24:32].numpy()])
        assert fused._is_within(memory[first : first + 8], *extent) is is_within

    def test_a_sparse_gradient_of_another_parameter_is_refused(self):
        module, embedding = net(), torch.nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        optimizer = torch.optim.SGD([*module.parameters(), *embedding.parameters()], lr=0.1, fused=True)
        self.refused(module, optimizer, accumulated(module, [0], [1.0]).step(deferred=True), "not this result's")

    def test_a_gpus_arrays_are_asked_for_their_address_and_never_exported(self):
        """They stand for CuPy's, which cannot be here; exporting one to torch takes 10 us."""
        module = net()
        given = accumulated(module, [0], [4.0]).step(deferred=True)
        on_gpu = {
            name: types.SimpleNamespace(size=a.size, nbytes=a.nbytes, data=types.SimpleNamespace(ptr=a.ctypes.data))
            for name, a in given.sums.items()
        }
        assert fused._extent(on_gpu.values()) == fused._extent(given.sums.values())

    def test_layers_in_any_order_and_parameters_of_no_elements_are_taken(self):
        """Blocks lie before what is outside of them, whatever the order of the names is."""
        module = torch.nn.ParameterDict(
            {"z": torch.nn.Parameter(torch.ones(3)), "none": torch.nn.Parameter(torch.ones(0))}
        )
        module.layers = net()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        engine = GradientEngine(layout_of(module), max_norm=None)
        engine.add([torch.ones_like(p).detach() for p in module.parameters()])
        result = engine.step(deferred=True)
        addresses = [array.ctypes.data for array in result.sums.values() if array.size]
        assert addresses != sorted(addresses)
        step_fused(optimizer, result, module)
        assert module["z"][0] < 1

    def test_an_optimizer_of_ones_own_that_takes_both(self):
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
        result = engine.step(deferred=True)
        step_fused(Own(module.parameters(), {}), result, module)
        torch.testing.assert_close(module.weight.detach(), torch.tensor([[-0.6, -0.8]]))


def cleared_by(way, module):
    if way == "zero_grad()":
        module.zero_grad()
    elif way == "zero_grad(set_to_none=False)":
        module.zero_grad(set_to_none=False)
    elif way == "the optimizer":
        torch.optim.SGD(module.parameters(), lr=0.1).zero_grad(set_to_none=False)
    else:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()


WAYS_TO_CLEAR = ["zero_grad()", "zero_grad(set_to_none=False)", "the optimizer", "by hand"]


class TestUncleared:
    """torch adds to a `.grad` that is there: what was not cleared holds the earlier micro-batches too."""

    def backward(self, module, seed=0, **used):
        module(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)), **used).square().sum().backward()

    def test_a_zero_grad_that_is_outside_of_the_loop_is_refused_again_and_again(self):
        module = net()
        module.zero_grad()
        backward(module, 0)
        gradients_of(module)
        backward(module, 1)
        for _ in range(2):
            with pytest.raises(BufferRefused, match=r"'0\.weight' was not cleared .* without gradients_of\(\)$"):
                gradients_of(module)

    def test_one_that_no_backward_reached_does_not_hide_the_other(self):
        module = net()
        backward(module, 0)
        gradients_of(module)
        module[2](torch.ones(1, 7)).sum().backward()
        with pytest.raises(BufferRefused, match=r"'2\.weight' was not cleared"):
            gradients_of(module)

    def test_nor_does_one_that_is_new(self):
        module = net()
        backward(module, 0)
        gradients_of(module)
        module[0].weight.grad = None
        backward(module, 1)
        with pytest.raises(BufferRefused, match=r"'0\.bias' was not cleared"):
            gradients_of(module)

    def test_whatever_engine_takes_them(self):
        """As where a loop has one engine for each of two losses."""
        module = net()
        engines = [GradientEngine(layout_of(module)) for _ in range(2)]
        backward(module, 0)
        engines[0].add(gradients_of(module))
        backward(module, 1)
        with pytest.raises(BufferRefused, match="was not cleared"):
            engines[1].add(gradients_of(module))

    @pytest.mark.parametrize("out", [False, True])
    def test_so_it_is_in_channels_last_where_each_call_makes_new_views(self, out):
        module = torch.nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
        engine = GradientEngine(layout_of(module))

        def backward():
            module(torch.ones(2, 3, 4, 4)).sum().backward()

        for clear in (True, True, False):
            if clear:
                module.zero_grad(set_to_none=False)
            backward()
            if clear:
                engine.add(gradients_of(module))
                engine.step(out=gradients_of(module) if out else None)
        with pytest.raises(BufferRefused, match="'weight' was not cleared"):
            engine.add(gradients_of(module))

    def test_so_it_is_between_two_windows(self):
        module = net()
        engine = accumulated(module, [], [])
        backward(module, 0)
        engine.add(gradients_of(module))
        engine.step()
        backward(module, 1)
        with pytest.raises(BufferRefused, match="was not cleared"):
            engine.add(gradients_of(module))

    def test_so_it_is_after_a_step_that_wrote_into_the_gradients(self):
        module = net()
        engine = GradientEngine(layout_of(module))
        backward(module, 0)
        engine.add(gradients_of(module))
        engine.step(out=gradients_of(module))
        backward(module, 1)
        with pytest.raises(BufferRefused, match="was not cleared"):
            engine.add(gradients_of(module))

    def test_so_it_is_where_an_optimizer_clears_its_own_part_only(self):
        module = net()
        engine, part = GradientEngine(layout_of(module)), torch.optim.SGD(module[0].parameters(), lr=0.1)
        backward(module, 0)
        engine.add(gradients_of(module))
        part.zero_grad()
        backward(module, 1)
        with pytest.raises(BufferRefused, match=r"'2\.weight' was not cleared"):
            engine.add(gradients_of(module))

    @pytest.mark.parametrize("way", WAYS_TO_CLEAR)
    @pytest.mark.parametrize("detached", [False, True])
    @pytest.mark.parametrize("out", [False, True])
    def test_what_is_cleared_in_whatever_way_is_taken_whatever_branch_is_used(self, way, detached, out):
        """Parameters that no backward reaches, a weight used twice, several backwards a micro-batch, many windows."""
        module = Branches()
        engine = GradientEngine(layout_of(module))
        for _ in range(3):
            for backwards in (["block"], ["other"], ["block", "other"], ["other", "other"], []):
                cleared_by(way, module)
                for used in backwards:
                    self.backward(module, block=used == "block")
                given = {
                    name: gradient.detach() if detached and gradient is not None else gradient
                    for name, gradient in gradients_of(module).items()
                }
                is_empty = not any(gradient is not None for gradient in given.values())
                with pytest.raises(WindowError) if is_empty else contextlib.nullcontext():
                    engine.add(given)
            engine.step(out=gradients_of(module, allocate=True) if out else None)

    def test_reentrant_checkpoints_are_no_reason_to_refuse(self):
        module = Branches()
        engine = GradientEngine(layout_of(module))
        for _ in range(3):
            module.zero_grad(set_to_none=False)
            x = torch.ones(3, 4, requires_grad=True)
            once = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=True)
            torch.utils.checkpoint.checkpoint(module, once, use_reentrant=True).sum().backward()
            engine.add(gradients_of(module))

    def test_tensors_that_are_given_as_they_are_are_the_callers_own(self):
        buffer, wanted = torch.zeros(4), torch.zeros(4)
        engine = GradientEngine(GradientLayout.of([(4,)]))
        for value in (1.0, 2.0, 6.0):
            buffer.copy_(torch.full((4,), value))
            engine.add([buffer])
            wanted += value / 3
        np.testing.assert_allclose(engine.step().gradients["0"], wanted.numpy(), rtol=1e-6)

    @pytest.mark.timeout(150)
    @needs_distributed
    def test_what_ddp_gives_as_views_of_its_buckets_is_taken(self, tmp_path):
        """A bucket of one parameter is changed once, by DDP's copy of a gradient that was cleared."""
        assert two_ranks_of_ddp("buckets", tmp_path) == ["5 1\n" * 4 + "5 4\n" * 4] * 2

    def test_those_that_torch_counts_nothing_for_are_taken(self):
        module = torch.nn.Linear(4, 2)
        with torch.inference_mode():
            module.weight.grad = torch.zeros(2, 4)
            for _ in range(3):
                module.weight.grad += 1
                gradients_of(module)


class TestBesideDistributedDataParallel:
    @pytest.mark.timeout(150)
    @needs_distributed
    def test_the_sum_of_divided_losses_is_its_gradient(self, tmp_path):
        """Also in a window that is short, and where a rank has no more data."""
        said = [[float(line) for line in told.split()] for told in two_ranks_of_ddp("sum", tmp_path)]
        assert [len(lines) for lines in said] == [4, 3]
        assert max(itertools.chain(*said)) <= 1e-6, said


class TestDevice:
    """A torch.device wherever a device is taken by name."""

    def test_the_cpu(self):
        cpu = torch.device("cpu")
        gradient = torch.full((4,), 3.0)
        engine = GradientEngine(GradientLayout.of([(4,)]), device=cpu, max_norm=3.0)
        engine.add([gradient])
        assert engine.step().norm == 6
        state = FusedClipState([4], device=torch.device("cpu", 0))
        clip_gradients_fused([gradient], 3.0, state)
        elementwise.scale(gradient, 2.0, device=cpu)
        assert gradient.eq(3).all()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
    @pytest.mark.parametrize("build", [GpuGradientAccumulator, GradientEngine])
    @pytest.mark.parametrize("named", ["cuda", "cuda:1"])
    def test_a_gpu_that_is_not_there_is_missed_as_by_name(self, build, named):
        errors = []
        for device in (named, torch.device(named)):
            with pytest.raises(DeviceUnavailable) as caught:
                build(GradientLayout.of([(4,)]), device=device)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]

    def test_one_without_kernels_is_named(self):
        with pytest.raises(CallerError, match=r"no kernels for the device: got 'mps:0'"):
            GradientEngine(GradientLayout.of([(4,)]), device=torch.device("mps", 0))


class TestBesideTorch:
    """What the pages say about torch's own machinery."""

    def test_a_grad_scaler_gives_its_number_and_nothing_else(self):
        scaled, plain = net(), net()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        engines = [GradientEngine(layout_of(module), max_norm=0.05) for module in (scaled, plain)]
        for seed in range(3):
            assert (
                scaler.scale(torch.ones(())) == scaler.get_scale()
            )  # of a loss; update() wants it to have been called
            engines[0].loss_scale = scaler.get_scale()
            for module, engine, scale in zip((scaled, plain), engines, (engines[0].loss_scale, 1.0), strict=True):
                module.zero_grad()
                backward(module, seed, scale)
                engine.add(gradients_of(module))
                engine.step(out=gradients_of(module, allocate=True))
            for one, other in zip(scaled.parameters(), plain.parameters(), strict=True):
                assert one.grad.abs().sum() > 0
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-9)
            scaler.update(scaler.get_scale() / 2)
        assert scaler.get_scale() == 128.0

    @pytest.mark.parametrize(
        ("options", "norm_is_off_by", "step_is_off_by"),
        [
            ({"on_non_finite": "pass"}, 1024, 1),
            ({"max_norm": 0.05}, 1024, 1 / 1024),
            ({"loss_scale": 1024.0}, 1, 1 / 1024),
        ],
    )
    def test_a_grad_scaler_that_stays_as_it_is(self, options, norm_is_off_by, step_is_off_by):
        """The engine cannot see it: right where nothing is bounded, and else a step of next to nothing."""
        scaled, plain = net(), net()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before, norms = [p.detach().clone() for p in plain.parameters()], []
        for module, engine, scale in (
            (scaled, GradientEngine(layout_of(scaled), **options), scaler.scale(torch.ones(())).item()),
            (plain, GradientEngine(layout_of(plain), **{**options, "loss_scale": 1.0}), 1.0),
        ):
            backward(module, 0, scale)
            engine.add(gradients_of(module))
            norms.append(engine.step(out=gradients_of(module)).norm)
        scaler.step(torch.optim.SGD(scaled.parameters(), lr=1.0))
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        assert norms[0] == pytest.approx(norm_is_off_by * norms[1], rel=1e-6)
        for one, other, old in zip(scaled.parameters(), plain.parameters(), before, strict=True):
            torch.testing.assert_close(one - old, (other - old) * step_is_off_by, rtol=1e-3, atol=1e-7)

    def test_swapping_parameters_needs_gradients_that_are_dropped(self):
        """Gradients are remembered by weak references, and torch swaps no tensor that has one."""
        module = net()
        backward(module, 0)
        engine = GradientEngine(layout_of(module))
        engine.add(gradients_of(module))
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with pytest.raises(RuntimeError, match="Couldn't swap"):
                module.to(torch.bfloat16)
            module.zero_grad()
            module.to(torch.bfloat16)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert module[0].weight.dtype is torch.bfloat16
        backward(module, 1)
        engine.add(gradients_of(module))
        assert engine.step().micro_batches == 2

    def test_writing_to_destinations_raises_autograds_version(self):
        module = net()
        engine = accumulated(module, [0], [1.0])
        gradients = gradients_of(module, allocate=True)
        other = torch.ones_like(gradients["0.weight"], requires_grad=True)
        product = (other * gradients["0.weight"]).sum()
        engine.step(out=gradients)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    def test_a_wrapped_modules_names_are_others(self):
        class Wrapper(torch.nn.Module):  # as DistributedDataParallel, without its process group
            def __init__(self, module):
                super().__init__()
                self.module = module

        module = net()
        wrapped = Wrapper(module)
        result = accumulated(module, [0], [1.0]).step()
        with pytest.raises(LayoutMismatch, match=r"'module\.0\.weight': got none"):
            give_gradients(wrapped, result)
        give_gradients(wrapped.module, result)
        assert module[0].weight.grad is not None


def _deferred():
    module = net()
    return module, accumulated(module, [0], [1.0]).step(deferred=True)


def _stepped():
    module = net()
    return module, accumulated(module, [0], [1.0]).step()


def _stepped_fused(optimizer=None, result=None, module=None):
    own, deferred = _deferred()
    built = torch.optim.SGD(own.parameters(), lr=0.1, fused=True)
    step_fused(
        built if optimizer is None else optimizer,
        deferred if result is None else result,
        own if module is None else module,
    )


TENSORS = [
    torch.tensor(2.0),
    torch.tensor(True),
    torch.ones(2),
    torch.tensor(1j),
    torch.empty(0),
    torch.ones(2).to_sparse(),
]
TENSORS += [torch.tensor(2.0, requires_grad=True), torch.tensor(2.0, device="meta"), torch.float32, torch.device("cpu")]


@pytest.mark.parametrize(
    "call",
    [
        lambda v: clip_grad_norm_(v, 1.0),
        lambda v: clip_grad_norm_([v], 1.0),
        lambda v: clip_grad_norm_(net().parameters(), v),
        lambda v: clip_grad_norm_(net().parameters(), 1.0, v),
        layout_of,
        gradients_of,
        lambda v: clip_grad_norm_(net().parameters(), 1.0, error_if_nonfinite=v),
        lambda v: gradients_of(net(), allocate=v),
        lambda v: give_gradients(*_stepped(), zero_unused=v),
        lambda v: drop_unused(v, _stepped()[1]),
        lambda v: drop_unused(net(), v),
        lambda v: tensors_of(v, {}),
        lambda v: tensors_of(net(), v),
        lambda v: give_gradients(net(), v),
        lambda v: _stepped_fused(optimizer=v),
        lambda v: _stepped_fused(result=v),
        lambda v: _stepped_fused(module=v),
        lambda v: GradientEngine(layout_of(net()), max_norm=v),
        lambda v: GradientEngine(layout_of(net()), loss_scale=v),
        lambda v: GradientEngine(layout_of(net()), hold=v),
    ],
)
def test_whatever_a_call_is_given_it_is_taken_or_refused_by_an_error_of_ours(call):
    refusals = [refusal_of(functools.partial(call, value)) for value in [*HOSTILE, *TENSORS]]
    assert max(map(len, refusals)) < 1500
