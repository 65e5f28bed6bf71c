"""Clipping as torch's own, and what torch's other machinery does beside an engine."""

import gc
import inspect
import itertools
import math
import os
import pickle
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import strategies as draw
from hostile_values import HOSTILE, refusal_of
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch_modules import DTYPES, accumulated, assert_same_bits, needs_distributed, net  # noqa: E402

from gradengine import (  # noqa: E402
    FusedClipState,
    GpuGradientAccumulator,
    GradientEngine,
    GradientLayout,
    clip_gradients_fused,
    elementwise,
)
from gradengine.errors import BufferRefused, CallerError, DeviceUnavailable, NonFiniteGradient  # noqa: E402
from gradengine.torch import (  # noqa: E402
    clip_grad_norm_,
    drop_unused,
    give_gradients,
    gradients_of,
    layout_of,
    step_fused,
    tensors_of,
)

NAN, INF = math.nan, math.inf
SHAPES = [(7, 5), (513,), (1,), (), (3, 1, 4), (0, 3)]
PARAMETERS = [list, iter, lambda parameters: torch.nn.ParameterList(parameters).parameters()]


def parameter_of(gradient):
    """A parameter with that gradient, and nothing else."""
    parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def random_parameters(seed, shapes=SHAPES, dtype=torch.float32, magnitude=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [parameter_of((torch.randn(shape, generator=generator) * magnitude).to(dtype)) for shape in shapes]


def three_four():
    return parameter_of(torch.tensor([3.0, 4.0]))


def grads(parameters):
    return [p.grad.clone() for p in parameters if p.grad is not None]


def exact_norm(parameters):
    return math.sqrt(math.fsum((g.double() ** 2).sum().item() for g in grads(parameters)))


class TestClip:
    @given(
        st.lists(draw.shapes, max_size=6),
        draw.seeds,
        st.sampled_from([1e-3, 0.5, 1.0, 7.0, 1e9]),
        st.sampled_from([None, True, False]),
        st.sampled_from(PARAMETERS),
    )
    def test_fp32_norm_and_gradients_are_torchs_within_1e_6(self, shapes, seed, max_norm, foreach, given_as):
        ours, theirs = (random_parameters(seed, shapes) for _ in range(2))
        without = torch.nn.Parameter(torch.ones(3))
        with torch.device("meta"):  # a user's default device is not the gradients'
            norm = clip_grad_norm_(given_as([without, *ours]), max_norm, foreach=foreach)
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        assert (norm.dtype, norm.shape, norm.device) == (torch.float32, (), expected.device)
        assert float(norm) == pytest.approx(float(expected), rel=1e-6, abs=1e-30)
        epsilon = 1e-6 / max_norm if max_norm < float(norm) else 0.0  # torch's own is in its scale
        assert without.grad is None
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6 + epsilon, atol=0)

    @given(
        st.lists(st.tuples(st.sampled_from(DTYPES), draw.shapes, st.permutations(range(3))), min_size=1, max_size=5),
        draw.seeds,
        st.sampled_from([1e-3, 1.0, 100.0]),
        st.sampled_from([0.25, None, INF]),
    )
    def test_in_every_dtype_and_order_of_memory_it_is_the_definition_in_fp64(self, kinds, seed, magnitude, max_norm):
        """The norm to 1e-6; each element multiplied once in fp32 and rounded once, where it lies."""
        parameters = []
        for i, (dtype, shape, order) in enumerate(kinds):
            (parameter,) = random_parameters(seed + i, [shape], dtype, magnitude)
            turned = parameter.grad.permute([d for d in order if d < len(shape)])
            parameters.append(parameter_of(turned))
        before, exact = grads(parameters), exact_norm(parameters)
        own, addresses = [p.grad for p in parameters], [p.grad.data_ptr() for p in parameters]
        norm = clip_grad_norm_(parameters, max_norm)
        assert norm.dtype is torch.float32
        assert float(norm) == pytest.approx(exact, rel=1e-6)
        assert all(p.grad is g for p, g in zip(parameters, own, strict=True))
        assert [p.grad.data_ptr() for p in parameters] == addresses
        if max_norm != 0.25 or exact <= 0.25:
            assert_same_bits(grads(parameters), before)
            return
        for parameter, value in zip(parameters, before, strict=True):
            rtol, atol = {torch.float32: (1e-6, 0), torch.float16: (2**-10, 1e-7)}.get(value.dtype, (2**-7, 0))
            expected = (value.float() * np.float32(0.25 / exact)).to(value.dtype)
            torch.testing.assert_close(parameter.grad, expected, rtol=rtol, atol=atol)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bits_at_known_values_and_none_is_written_within_the_bound(self, dtype):
        """No epsilon: torch would scale at 5.0, and write in every case."""
        gradient = torch.zeros(600, dtype=dtype)
        gradient[:3] = torch.tensor([3.0, -0.0, 4.0])
        parameter, before = parameter_of(gradient), gradient.clone()
        for bound in (5.0, 6.0, INF, None):
            assert clip_grad_norm_(parameter, bound) == 5.0
            assert_same_bits([parameter.grad], [before])
        clip_grad_norm_([parameter], torch.tensor(1.0))
        assert_same_bits([parameter.grad], [(before.float() * np.float32(1 / 5)).to(dtype)])

    def test_norms_beyond_the_dtype_are_clipped_by_their_true_value(self):
        for gradient, bound, expected in (
            (torch.full((9,), 6e4, dtype=torch.float16), 1.0, 3 * float(torch.tensor(6e4).half())),
            (torch.full((4,), 3e38), 100.0, INF),
        ):
            parameters = [parameter_of(gradient)]
            assert float(clip_grad_norm_(parameters, bound, error_if_nonfinite=True)) == pytest.approx(expected)
            assert exact_norm(parameters) == pytest.approx(bound, rel=2**-10)

    def test_the_signature_is_torchs(self):
        ours, theirs = (inspect.signature(f) for f in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_))
        assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
            (p.name, p.default, p.kind) for p in theirs.parameters.values()
        ]

    def test_no_gradients_have_norm_zero_and_zeros_stay_zeros(self):
        without = torch.nn.Parameter(torch.ones(2))
        for parameters in ([], (), [without], without):
            assert_same_bits(*([f(parameters, 1.0)] for f in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_)))
        parameters = [parameter_of(torch.zeros(4))]
        assert clip_grad_norm_(parameters, 1e-300, error_if_nonfinite=True) == exact_norm(parameters) == 0.0

    @pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
    def test_an_exhausted_generator_warns_as_torchs_does(self, clip):
        generator = (p for p in random_parameters(0))
        list(generator)
        with pytest.warns(UserWarning, match="generator"):
            assert clip(generator, 1.0) == 0.0

    def test_it_works_where_autograd_records_and_on_what_inference_made(self):
        """Gradients that were made with create_graph belong to a graph themselves."""
        parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        (parameter.grad,) = torch.autograd.grad((parameter**2).sum(), parameter, create_graph=True)
        norm = clip_grad_norm_([parameter], 1.0)
        assert (norm, norm.requires_grad) == (10.0, False)
        assert torch.allclose(parameter.grad.detach(), torch.tensor([0.6, 0.8]))
        with torch.inference_mode():
            parameter = three_four()
        assert clip_grad_norm_([parameter], 1.0) == 5.0
        assert parameter.grad[0] == pytest.approx(0.6)

    @pytest.mark.parametrize("gradient", [torch.ones(2), torch.ones(3, 2).t()], ids=["as usual", "transposed"])
    def test_backward_refuses_what_it_saved_before_the_clip(self, gradient):
        """The gradient is written where torch does not see it, so torch is told."""
        parameter = parameter_of(gradient * 10)
        product = (torch.ones(gradient.shape, requires_grad=True) * parameter.grad).sum()
        clip_grad_norm_([parameter], 1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    def test_no_gradient_is_kept_alive(self):
        parameters = random_parameters(0)
        clip_grad_norm_(parameters, 0.5)
        storages = [weakref.ref(p.grad.untyped_storage()) for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        gc.collect()
        assert all(storage() is None for storage in storages)

    def test_calls_of_the_same_sizes_share_what_a_clip_needs_and_nothing_else(self):
        for dtype, turned, value in itertools.product(DTYPES, (False, True), (2.0, 100.0, 2.0)):
            gradient = torch.full((4, 6), value, dtype=dtype)
            parameter = parameter_of(gradient.t() if turned else gradient)
            assert float(clip_grad_norm_([parameter], 1.0)) == pytest.approx(value * math.sqrt(24), rel=1e-6)


class Elsewhere(torch.Tensor):
    """A kind of tensor that knows alone where it lies."""


def of_kind(gradient):
    parameter = torch.zeros_like(gradient)
    parameter.grad = gradient
    return parameter


GRADIENTS = {  # what is refused, by its position; and a word that says why
    "sparse": (lambda: of_kind(torch.ones(3).to_sparse()), "sparse|strided"),
    "float64": (lambda: of_kind(torch.ones(3, dtype=torch.float64)), "float64.*float32, float16 or bfloat16"),
    "complex": (lambda: of_kind(torch.ones(3, dtype=torch.complex64)), "complex64"),
    "conjugated": (lambda: of_kind(torch.ones(3, dtype=torch.complex64).conj()), "complex|conj"),
    "subclass": (lambda: of_kind(torch.ones(3).as_subclass(Elsewhere)), "Elsewhere"),
    "meta": (lambda: of_kind(torch.ones(3, device="meta")), "meta|device|exported"),
    "expanded": (lambda: parameter_of(torch.ones(1).expand(4)), "not contiguous"),
    "expanded in part": (lambda: parameter_of(torch.ones(3, 1).expand(3, 4)), "not contiguous"),
    "every second": (lambda: parameter_of(torch.ones(8)[::2]), "not contiguous"),
    "with gaps": (lambda: parameter_of(torch.ones(4, 6)[:, :5].t()), "not contiguous"),
    "overlapping itself": (lambda: parameter_of(torch.ones(9).as_strided((3, 3), (1, 2))), "not contiguous"),
}


class TestClipRefuses:
    @pytest.mark.parametrize("kind", GRADIENTS)
    def test_a_gradient_by_its_position_and_writes_nothing(self, kind):
        make, word = GRADIENTS[kind]
        good, bad = three_four(), make()
        with pytest.raises(BufferRefused, match=word) as caught:
            clip_grad_norm_([good, bad], 1.0)
        assert "parameters[1].grad" in str(caught.value)
        assert torch.equal(good.grad, torch.tensor([3.0, 4.0]))

    def test_gradients_that_share_memory_by_both_positions(self):
        parameter, memory = three_four(), torch.ones(6)
        halves = [parameter_of(memory[:4]), parameter_of(memory[2:])]
        for given_to_it, second in (([parameter, three_four(), parameter], 2), ([*halves, three_four()], 1)):
            words = rf"parameters\[0\].grad' and 'parameters\[{second}\].grad' overlap"
            with pytest.raises(BufferRefused, match=words):
                clip_grad_norm_(given_to_it, 1.0)
        assert torch.equal(parameter.grad, torch.tensor([3.0, 4.0]))

    def test_a_bound_or_a_norm_that_is_none(self):
        kept = three_four()
        for bad in (0, 0.0, -1.0, NAN, "much", torch.tensor(-1.0)):
            for parameters in ([], [kept]):
                with pytest.raises(CallerError, match="max_norm"):
                    clip_grad_norm_(parameters, bad)
        for bad in (1.0, INF, "inf", 0, NAN, None, "two"):
            with pytest.raises(CallerError, match="norm_type") as caught:
                clip_grad_norm_([kept], 1.0, bad)
            assert caught.value.expected == "2"
        assert_same_bits([kept.grad], [torch.tensor([3.0, 4.0])])
        for two in (2, 2.0, "2", "2.0"):
            assert clip_grad_norm_([three_four()], 1.0, two) == 5.0

    def test_what_is_no_parameters(self):
        for passed, what, got in (
            (net().named_parameters(), "parameters[0] is not a tensor", "tuple"),
            (net(), "parameters[0] is not a tensor", "Linear"),
            (np.ones(2, np.float32), "parameters[0] is not a tensor", "float32"),
            (torch.nn.Linear(2, 2), "parameters is not a sequence", "Linear"),
            (None, "parameters is not a sequence", "None"),
        ):
            with pytest.raises(CallerError) as caught:
                clip_grad_norm_(passed, 1.0)
            assert (caught.value.what, caught.value.got) == (what, got)

    def test_a_device_without_kernels(self):
        with pytest.raises(CallerError, match="meta"):
            clip_grad_norm_([of_kind(torch.zeros(3, device="meta"))], 1.0)


class TestNotFinite:
    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nothing_is_written_and_the_norm_or_an_error_says_so(self, bad, dtype):
        """torch would multiply every gradient by NaN, or by 0."""
        parameters = [torch.nn.Parameter(torch.ones(2)), *random_parameters(6, dtype=dtype)]
        parameters[2].grad[500] = bad
        parameters[2].grad[502] = parameters[5].grad[0] = NAN
        before = grads(parameters)
        assert not math.isfinite(clip_grad_norm_(parameters, 0.5))
        with pytest.raises(NonFiniteGradient) as caught:
            clip_grad_norm_(iter(parameters), 0.5, error_if_nonfinite=True)
        error = caught.value
        assert isinstance(error, RuntimeError)  # which is torch's
        assert (error.component, error.index, str(error.value)) == ("parameters[2].grad", 500, str(bad))
        assert "discard" not in str(error)  # there is no window
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.index) == (type(error), str(error), 500)
        assert_same_bits(grads(parameters), before)

    def test_the_index_is_that_of_the_tensor_whatever_its_order_of_memory(self):
        parameter = parameter_of(torch.ones(6, 4).t())
        parameter.grad[1, 2] = NAN
        with pytest.raises(NonFiniteGradient) as caught:
            clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
        assert caught.value.index == 8


@pytest.mark.slow  # processes that import torch; DDP's buckets are in test_torch_gradients.py
@needs_distributed
def test_beside_ddp_gradients_are_taken_and_their_sum_is_its(tmp_path):
    """Also as views of its buckets, in a window that is short, and where a rank has no more data."""
    here = Path(__file__).parent
    command, paths = [sys.executable, str(here / "ddp_process.py")], os.pathsep.join([str(here), str(here.parent)])
    started = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    ranks = [started([*command, rank, str(tmp_path)]) for rank in "01"]
    try:
        said = [rank.communicate(timeout=240)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [len(lines) for lines in said] == [4, 3]
    assert max(float(line) for lines in said for line in lines) <= 1e-6, said


class TestDevice:
    """A torch.device wherever a device is taken by name."""

    def test_the_cpu(self):
        cpu = torch.device("cpu")
        gradient = torch.full((4,), 3.0)
        engine = GradientEngine(GradientLayout.of([(4,)]), device=cpu, max_norm=3.0)
        engine.add([gradient])
        assert engine.step().norm == 6
        clip_gradients_fused([gradient], 3.0, FusedClipState([4], device=torch.device("cpu", 0)))
        elementwise.scale(gradient, 2.0, device=cpu)
        assert gradient.eq(3).all()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
    @pytest.mark.parametrize("build", [GpuGradientAccumulator, GradientEngine])
    def test_a_gpu_that_is_not_there_is_missed_and_one_without_kernels_is_named(self, build):
        for device, kind in (("cuda:1", DeviceUnavailable), ("mps:0", CallerError)):
            with pytest.raises(kind, match=device):
                build(GradientLayout.of([(4,)]), device=torch.device(device))


class TestBesideTorch:
    """What the pages say about torch's own machinery."""

    def test_writing_to_destinations_raises_autograds_version(self):
        module = net()
        engine = accumulated(module)
        gradients = gradients_of(module, allocate=True)
        product = (torch.ones(7, 5, requires_grad=True) * gradients["0.weight"]).sum()
        engine.step(out=gradients)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def _result(deferred=False):
    module = net()
    return module, accumulated(module).step(deferred=deferred)


def _stepped_fused(name, value):
    module, result = _result(deferred=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)
    step_fused(**{"optimizer": optimizer, "result": result, "module": module, name: value})


TENSORS = [torch.tensor(2.0), torch.tensor(True), torch.ones(2), torch.tensor(1j), torch.empty(0)]
TENSORS += [torch.ones(2).to_sparse(), torch.tensor(2.0, requires_grad=True), torch.tensor(2.0, device="meta")]
TENSORS += [torch.float32, torch.device("cpu")]


@pytest.mark.parametrize(
    "call",
    [
        *(layout_of, gradients_of, lambda v: clip_grad_norm_(v, 1.0), lambda v: clip_grad_norm_([v], 1.0)),
        *(lambda v: clip_grad_norm_(net().parameters(), v), lambda v: clip_grad_norm_(net().parameters(), 1.0, v)),
        lambda v: clip_grad_norm_(net().parameters(), 1.0, error_if_nonfinite=v),
        lambda v: gradients_of(net(), allocate=v),
        *(lambda v: tensors_of(v, {}), lambda v: tensors_of(net(), v)),
        *(lambda v: give_gradients(net(), v), lambda v: give_gradients(*_result(), zero_unused=v)),
        *(lambda v: drop_unused(v, _result()[1]), lambda v: drop_unused(net(), v)),
        *(partial(_stepped_fused, name) for name in ("optimizer", "result", "module")),
    ],
)
def test_whatever_a_call_is_given_it_is_taken_or_refused_by_an_error_of_ours(call):
    refusals = [refusal_of(partial(call, value)) for value in [*HOSTILE, *TENSORS]]
    assert max(map(len, refusals)) < 1500
