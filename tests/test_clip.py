"""Clipping: the norm it finds, the scale it takes, what it writes, and what it leaves alone."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import all_on_host, assign, launched, named_cuda, nothing_is_launched, on_host, put_all, raw, synchronize
from emulated_torch import copy_on, emulated_torch, tensors_of
from hypothesis import given
from hypothesis import strategies as st

import gradengine.clip as clip_module
from gradengine.clip import (
    FusedClipState,
    checked_max_norm,
    clip_by_global_norm,
    clip_gradients_fused,
    clip_lora_gradients_fused,
    clip_plan,
    init_lora_fused_clip,
)
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch
from gradengine.kernels import CHUNK, ClipPlan
from gradengine.kernels.host import HostKernels
from gradengine.kernels.host_device import HostDevice
from gradengine.layout import LORA_COMPONENTS, GradientLayout

NAN, INF = math.nan, math.inf
SHAPES = [(7, 5), (513,), (0,), (1,), (), (3, 1, 4)]
ENDLESS: list = []
ENDLESS.append([ENDLESS])
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half an ulp of 1


def random_arrays(seed, dtype="float32", magnitude=1.0):
    return [draw.random_array([seed, i], shape, dtype, magnitude) for i, shape in enumerate(SHAPES)]


def fused(arrays, max_norm, kernels="cpu"):
    """The norm by the fused call on state of its own."""
    state = FusedClipState([np.size(array) for array in arrays], kernels)
    clip_gradients_fused(arrays, max_norm, state)
    return state.norm


@pytest.fixture(params=["by global norm", "fused"])
def clip(request, backend):
    """What clips arrays in place and says the norm: by either call, on any device."""

    def clipped(arrays, max_norm):
        there = put_all(backend, arrays)
        with named_cuda(backend):
            by_norm = request.param == "by global norm"
            norm = clip_by_global_norm(there, max_norm) if by_norm else fused(there, max_norm, backend.kernels)
        for array, clipped in zip(arrays, there, strict=True):
            array[...] = on_host(clipped)
        return float(norm)

    return clipped


@pytest.fixture(params=[clip_by_global_norm, fused])
def clip_on_host(request):
    return request.param


class TestGlobalNorm:
    @pytest.mark.parametrize("max_norm", [float(bound) for bound in np.geomspace(1e-6, 20, 50)])
    def test_a_clipped_norm_is_the_threshold(self, clip, max_norm):
        arrays = random_arrays(1)
        exact = draw.exact_norm(arrays)
        assert exact > 20
        assert clip(arrays, max_norm) == pytest.approx(exact, rel=1e-6)
        assert draw.exact_norm(arrays) == pytest.approx(max_norm, rel=1e-6)

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("max_norm", [0.5, 3.0])
    def test_each_element_is_multiplied_once_by_one_factor(self, clip, dtype, max_norm):
        arrays = random_arrays(2, dtype)
        before = [array.astype(np.float32) for array in arrays]
        norm = clip(arrays, max_norm)
        assert norm == pytest.approx(draw.exact_norm(before), rel=1e-6)
        factor = np.float32(max_norm / norm)
        for array, value in zip(arrays, before, strict=True):
            draw.assert_same_bits(array, (value * factor).astype(draw.DTYPES[dtype]))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_clipping_again_tighter_is_clipping_once(self, dtype):
        """Both ways round each element once or twice to its dtype, so they differ by two roundings at most."""
        once, twice = random_arrays(3, dtype), random_arrays(3, dtype)
        clip_by_global_norm(once, 0.7)
        clip_by_global_norm(twice, 5.0)
        clip_by_global_norm(twice, 0.7)
        for one, two in zip(once, twice, strict=True):
            wide = one.astype(np.float64)
            np.testing.assert_allclose(two.astype(np.float64), wide, rtol=4 * ROUNDING[dtype], atol=1e-7)

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("bound", [1.0, 2.0, INF, None])
    def test_a_norm_within_the_bound_writes_nothing(self, clip, dtype, bound):
        """Minus zero and a norm equal to the bound are at the edge; memory that may not be read shows the rest."""
        array = np.array([1.0, -0.0, 0.0, 0.0], draw.DTYPES[dtype])
        before = array.copy()
        assert clip([array], bound) == 1.0
        draw.assert_same_bits(array, before)

    @pytest.mark.parametrize("bound", [0, 0.0, -0.0])
    def test_a_bound_of_zero_is_refused_and_says_what_clips_nothing(self, clip, bound):
        arrays = random_arrays(4)
        with pytest.raises(CallerError, match=r"max_norm is out of range.*to switch clipping off pass None"):
            clip(arrays, bound)
        for array, value in zip(arrays, random_arrays(4), strict=True):
            draw.assert_same_bits(array, value)

    @pytest.mark.parametrize("bound", [1e-300, 1.0])
    def test_zeros_stay_zeros(self, clip, bound):
        arrays = [np.zeros(5, np.float32), np.full(3, -0.0, np.float32)]
        assert clip(arrays, bound) == 0.0
        assert np.signbit(arrays[1]).all()

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_what_is_not_finite_scales_nothing_and_shows_in_the_norm(self, clip, bad, dtype):
        arrays = random_arrays(5, dtype)
        arrays[1][200] = bad
        before = [array.copy() for array in arrays]
        assert not math.isfinite(clip(arrays, 0.5))
        for array, value in zip(arrays, before, strict=True):
            draw.assert_same_bits(array, value)

    @pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e30, 3e37])
    def test_no_magnitude_is_lost(self, clip, magnitude):
        arrays = random_arrays(6, magnitude=magnitude)
        exact = draw.exact_norm(arrays)
        assert clip(arrays, exact / 4) == pytest.approx(exact, rel=1e-6)
        assert draw.exact_norm(arrays) == pytest.approx(exact / 4, rel=1e-5)

    def test_float16_norms_beyond_its_largest_number(self, clip):
        arrays = [np.full(10_000, 60000, np.float16)]
        assert clip(arrays, 100.0) == pytest.approx(6e6)
        assert (arrays[0] == np.float16(1.0)).all()

    def test_over_several_chunks(self, clip):
        arrays = [draw.random_array(0, CHUNK + 5), draw.random_array(1, 2 * CHUNK, "bfloat16")]
        exact = draw.exact_norm([array.astype(np.float32) for array in arrays])
        assert clip(arrays, 1.0) == pytest.approx(exact, rel=1e-6)
        after = draw.exact_norm([array.astype(np.float32) for array in arrays])
        assert after == pytest.approx(1.0, rel=1e-3)

    def test_nothing_has_norm_zero(self, clip):
        assert clip([], 1.0) == 0.0

    @given(
        values=st.lists(st.floats(-1e4, 1e4, width=16), max_size=9),
        dtype=draw.dtypes,
        bound=st.floats(0, 1e5, exclude_min=True),
    )
    def test_for_any_values(self, values, dtype, bound):
        array = np.array(values).astype(draw.DTYPES[dtype])
        before = array.astype(np.float64)
        norm = clip_by_global_norm([array], bound)
        assert norm == pytest.approx(float(np.linalg.norm(before)), rel=1e-6, abs=1e-300)
        after = array.astype(np.float64)
        tiniest = float(np.finfo(np.float16).smallest_subnormal)
        assert np.linalg.norm(after) <= bound * (1 + 2 * ROUNDING[dtype]) + 3 * tiniest
        assert (np.sign(after) * np.sign(before) >= 0).all()

    def test_mappings_name_their_arrays(self):
        arrays = {"w": np.full(4, 3, np.float32), "b": np.zeros(2, np.float16)}
        assert clip_by_global_norm(arrays, 3.0) == 6.0
        assert arrays["w"].tolist() == [1.5] * 4
        with pytest.raises(BufferRefused, match="component 'b' has an unsupported dtype: got float64"):
            clip_by_global_norm({**arrays, "b": np.zeros(2)}, 1.0)

    @pytest.mark.parametrize("parameters", [[(40, 30), (30,), (1,)], [(CHUNK + 3,), (2, 2)]])
    @pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e9])
    def test_as_torch(self, parameters, max_norm):
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        leaves = [torch.nn.Parameter(torch.randn(shape)) for shape in parameters]
        for leaf in leaves:
            leaf.grad = torch.randn_like(leaf)
        ours = [leaf.grad.clone() for leaf in leaves]
        theirs = torch.nn.utils.clip_grad_norm_(leaves, max_norm)
        assert clip_by_global_norm(ours, max_norm) == pytest.approx(float(theirs), rel=1e-5)
        for gradient, leaf in zip(ours, leaves, strict=True):
            torch.testing.assert_close(gradient, leaf.grad, rtol=2e-5, atol=1e-9)  # torch adds 1e-6 to the norm

    def test_torch_bfloat16_in_place(self):
        torch = pytest.importorskip("torch")
        gradient = torch.full((16,), 3.0, dtype=torch.bfloat16)
        assert clip_by_global_norm([gradient], 6.0) == 12.0
        assert gradient.tolist() == [1.5] * 16


class TestAgainAndAgain:
    """The one-liner in a loop: what it makes is kept by sizes, and what it says stays said."""

    def test_each_norm_is_its_own(self, device):
        with named_cuda(device):
            norms = [clip_by_global_norm(put_all(device, [np.full(4, value, np.float32)]), 1.0) for value in (1, 2, 3)]
        assert [float(on_host(norm)) for norm in norms] == [2.0, 4.0, 6.0]

    def test_the_second_time_nothing_is_made_and_nothing_waits(self, emulated):
        arrays = put_all(emulated, random_arrays(1))
        with named_cuda(emulated):
            clip_by_global_norm(arrays, 1.0)
            with cuda_emulator.recorded() as record:
                norm = clip_by_global_norm(arrays, 0.5)
        assert record.launches == ["measure_small", "finalise", "hand_back_small"]
        assert record.waits == []
        assert float(norm) == pytest.approx(1.0)

    def test_two_threads_do_not_disturb_each_other(self, backend):
        def loop(value):
            wanted, found = [], []
            for i in range(1, 20):
                norm = clip_by_global_norm(put_all(backend, [np.full(4, value * i, np.float32)]), 1e9)
                wanted.append(2.0 * value * i)
                found.append(norm)
            return [float(norm) for norm in found] == wanted

        with named_cuda(backend), ThreadPoolExecutor(2) as pool:
            assert list(pool.map(loop, [1, 1000])) == [True, True]


class Pair(NamedTuple):
    w: object
    b: object


NESTINGS = {
    "dicts": lambda a, b, c: {"enc": {"a": a, "b": b}, "c": c},
    "lists": lambda a, b, c: [[a, [b]], c],
    "tuples": lambda a, b, c: ((a, b), (c,)),
    "named tuples": lambda a, b, c: [Pair(a, b), c],
    "a mixture": lambda a, b, c: {"layers": [Pair(a, {"bias": b})], "head": (c,), "none": {}},
    "a generator": lambda a, b, c: (part for part in ([a, b], {"c": c})),
}


class TestNested:
    @pytest.mark.parametrize("nested", NESTINGS.values(), ids=NESTINGS)
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_containers_are_clipped_as_their_arrays_in_a_list(self, backend, nested, dtype):
        arrays = random_arrays(4, dtype)[:3]
        flat, within = put_all(backend, arrays), put_all(backend, arrays)
        with named_cuda(backend):
            for bound in (3.0, 2.0, 1.0):  # known from the second time on
                assert float(clip_by_global_norm(nested(*within), bound)) == float(clip_by_global_norm(flat, bound))
        for one, other in zip(within, flat, strict=True):
            draw.assert_same_bits(on_host(one), on_host(other))

    @pytest.mark.parametrize(
        ("arrays", "kind", "message"),
        [
            (lambda a: {"enc": {"w": a, "b": 3.0}}, BufferRefused, r"component 'enc\.b' is not an array: got float"),
            (lambda a: [a, [a.astype(np.float64)]], BufferRefused, r"'arrays\[1\]\.0' has an unsupported dtype"),
            (lambda a: {"x": [a], "y": {"z": a[2:]}}, BufferRefused, r"'x\.0' and 'y\.z' overlap in memory"),
            (lambda a: {"x": {0: a}}, LayoutMismatch, "name is not text: got 0"),
            (lambda a: ENDLESS, LayoutMismatch, "nested too deep"),
        ],
    )
    def test_what_is_wrong_within_is_named_by_its_path(self, arrays, kind, message):
        array = np.full(6, 3, np.float32)
        with pytest.raises(kind, match=message):
            clip_by_global_norm(arrays(array), 1.0)
        assert array.tolist() == [3] * 6


class TestKnownAgain:
    """Host arrays that come again are not looked at again, and of those that do not come nothing piles up."""

    @pytest.fixture
    def looks(self, monkeypatch):
        """Grows with each call whose arrays are looked at; what the thread knows is forgotten first."""
        found, look = [], HostDevice.writable_views
        monkeypatch.setattr(HostDevice, "writable_views", lambda *given: found.append(1) or look(*given))
        monkeypatch.setattr(clip_module, "_resolved", clip_module._Resolved())
        return found

    @staticmethod
    def arrays(seed):
        return [draw.random_array([seed, size], size) for size in (3, 40)]

    def test_sets_in_turn_are_looked_at_once(self, looks):
        sets = [self.arrays(seed) for seed in range(8)]
        for arrays in sets * 3:
            clip_by_global_norm(arrays, 1.0)
        assert len(looks) == 8

    def test_a_set_stays_known_while_others_come_and_go(self, looks):
        torch = pytest.importorskip("torch")
        stays, gone = [torch.ones(40)], [torch.ones(40) for _ in range(11)]
        clip_by_global_norm(stays, 1.0)
        while gone:
            clip_by_global_norm([gone.pop()], 1.0)
        clip_by_global_norm(stays, 1.0)
        assert len(looks) == 12

    def test_a_loop_that_changes_its_arrays_now_and_then_is_no_loop_of_new_ones(self, looks):
        sets = [self.arrays(seed) for seed in range(40)]
        for arrays in sets:
            for _ in range(3):
                clip_by_global_norm(arrays, 1.0)
        assert len(looks) == 40

    def test_a_loop_of_new_ones_does_not_pay_for_remembering_each(self, looks, monkeypatch):
        remembered, known = [], clip_module.KnownArrays
        monkeypatch.setattr(clip_module, "KnownArrays", lambda *given: remembered.append(1) or known(*given))
        sets = [self.arrays(seed) for seed in range(100)]
        for arrays in sets:
            clip_by_global_norm(arrays, 1.0)
        assert len(remembered) < 30

    def test_of_many_sets_that_stay_few_are_kept(self, looks):
        sets = [self.arrays(seed) for seed in range(15)]
        for arrays in sets:
            clip_by_global_norm(arrays, 1.0)
        assert len(clip_module._resolved._known) == 8

    def test_a_thread_that_clips_as_many_elements_meanwhile_does_not_change_the_norm(self, monkeypatch):
        finalise = HostKernels.finalise

        def interrupted(*given, **options):
            monkeypatch.setattr(HostKernels, "finalise", finalise)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(clip_by_global_norm, [np.full(4, 9, np.float32)], 1.0).result() == 18
            return finalise(*given, **options)

        monkeypatch.setattr(HostKernels, "finalise", interrupted)
        assert clip_by_global_norm([np.full(4, 2, np.float32)], 1.0) == 4


def test_a_torch_gradient_on_a_gpu_is_clipped_behind_its_stream_each_time_it_comes(device, monkeypatch):
    theirs, mine = (device.xp.cuda.Stream(non_blocking=True) for _ in range(2))
    monkeypatch.setitem(sys.modules, "torch", emulated_torch(theirs))
    arrays = put_all(device, [np.zeros(4, np.float32)])
    tensors, values = tensors_of(arrays), put_all(device, [np.full(4, value, np.float32) for value in (3, 5)])
    synchronize(device)
    for value, wanted in zip(values, (6, 10), strict=True):
        copy_on(device.xp, theirs, arrays[0], value)
        with named_cuda(device), mine:
            norm = clip_by_global_norm(tensors, INF)
            assert float(on_host(norm)) == wanted


class TestRefusals:
    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            (lambda a: [a[:4], a[3:]], r"'.*\[0\]' and '.*\[1\]' overlap in memory"),
            (lambda a: [a, a], r"'.*\[0\]' and '.*\[1\]' overlap in memory; pass each gradient once"),
            (lambda a: [a[:2], a[4:], a[1:3]], r"'.*\[0\]' and '.*\[2\]' overlap in memory"),
            (lambda a: [a, a.astype(np.float64)], r"'.*\[1\]' has an unsupported dtype: got float64, expected"),
            (lambda a: [a, a.tolist()], r"'.*\[1\]' is not an array: got list, expected"),
            (lambda a: [a[::2]], r"'.*\[0\]' is not contiguous: got .* expected strides"),
            (lambda a: [np.broadcast_to(np.float32(3), (1,))], r"destination '.*\[0\]' is read-only"),
        ],
    )
    def test_arrays(self, clip_on_host, arrays, message):
        array = np.full(6, 3, np.float32)
        passed = arrays(array)
        with pytest.raises(BufferRefused, match=message):
            clip_on_host(passed, 1.0)
        assert array.tolist() == [3] * 6

    @pytest.mark.parametrize("bound", [-1.0, -1e-300, NAN, -INF])
    def test_bounds(self, clip_on_host, bound):
        array = np.full(6, 3, np.float32)
        with pytest.raises(CallerError, match=r"max_norm is (out|not) .*: got .*, expected a number above 0"):
            clip_on_host([array], bound)
        assert array.tolist() == [3] * 6

    @pytest.mark.parametrize("bound", ["x", [1.0], {}, 1j])
    def test_bounds_that_are_no_numbers(self, clip_on_host, bound):
        with pytest.raises(CallerError, match=r"max_norm is (out|not) .*: got .*, expected a number above 0"):
            clip_on_host([np.ones(2, np.float32)], bound)

    def test_another_number_of_buffers(self):
        with pytest.raises(LayoutMismatch, match=r"another number of buffers .*: got 1, expected 2"):
            clip_gradients_fused([np.ones(3, np.float32)], 1.0, FusedClipState([3, 4]))

    def test_another_size(self):
        arrays = [np.ones(3, np.float32), np.ones(5, np.float32)]
        with pytest.raises(LayoutMismatch, match=r"buffers\[1\] has another size .*: got 5, expected 4"):
            clip_gradients_fused(arrays, 0.1, FusedClipState([3, 4]))
        assert all((array == 1).all() for array in arrays)

    def test_a_stream_on_the_cpu(self):
        with pytest.raises(CallerError, match="the CPU has no streams: got 7, expected stream=None"):
            clip_gradients_fused([], 1.0, FusedClipState([]), stream=7)

    def test_unknown_devices(self):
        with pytest.raises(CallerError, match="no kernels for the device"):
            FusedClipState([3], device="abacus")


class TestState:
    def test_is_used_again_and_again(self):
        state = FusedClipState([3, 2])
        assert math.isnan(state.norm)
        values = state.partials.values
        for scale in (4.0, 2.0, 0.5):
            arrays = [np.full(3, scale, np.float32), np.full(2, -scale, np.float32)]
            clip_gradients_fused(arrays, 3.0, state)
            assert state.norm == pytest.approx(scale * math.sqrt(5))
            assert state.scale == pytest.approx(min(1.0, 3.0 / (scale * math.sqrt(5))))
        assert state.partials.values is values

    @pytest.mark.parametrize("bound", [NAN, -1.0])
    def test_a_failing_call_leaves_the_last_norm(self, bound):
        state = FusedClipState([2])
        clip_gradients_fused([np.array([3, 4], np.float32)], 1.0, state)
        with pytest.raises(CallerError):
            clip_gradients_fused([np.ones(2, np.float32)], bound, state)
        assert (state.norm, state.scale) == (5.0, 0.2)

    def test_a_norm_that_is_not_finite_is_not_kept_for_the_next(self):
        state = FusedClipState([2])
        clip_gradients_fused([np.array([3, NAN], np.float32)], 1.0, state)
        assert math.isnan(state.norm)
        assert state.scale == 1.0
        clip_gradients_fused([np.array([3, 4], np.float32)], 1.0, state)
        assert state.norm == 5.0

    def test_run_to_run_the_bits_are_equal(self):
        norms = {fused([draw.random_array(0, 5 * CHUNK + 3)], 1.0) for _ in range(5)}
        assert len(norms) == 1


class TestOnADevice:
    """Norm and scale stay there, nothing waits, and what cannot be written is refused before any launch."""

    def gradients(self, device, dtype="float32"):
        arrays = random_arrays(1, dtype)
        return arrays, put_all(device, arrays)

    def state(self, device):
        return FusedClipState([math.prod(shape) for shape in SHAPES], device.kernels)

    def test_norm_and_scale_are_arrays_there(self, device):
        arrays, there = self.gradients(device)
        state = self.state(device)
        assert math.isnan(state.norm)
        clip_gradients_fused(there, 2.0, state)
        assert isinstance(state.norm, device.xp.ndarray)
        assert (state.norm.shape, state.scale.shape) == ((), ())
        assert float(state.norm) == pytest.approx(draw.exact_norm(arrays), rel=1e-6)
        assert float(state.scale) == pytest.approx(2 / draw.exact_norm(arrays), rel=1e-6)

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_the_bits_are_those_of_the_factor_on_the_host(self, device, dtype):
        arrays, there = self.gradients(device, dtype)
        state = self.state(device)
        clip_gradients_fused(there, 0.5, state)
        factor = np.float32(0.5 / float(state.norm))
        for array, got in zip(arrays, there, strict=True):
            draw.assert_same_bits(on_host(got), draw.scaled(array, factor, dtype))

    def test_three_launches_and_nothing_else(self, emulated):
        _, there = self.gradients(emulated)
        state = self.state(emulated)
        clip_gradients_fused(there, 0.5, state)
        with cuda_emulator.recorded() as record:
            clip_gradients_fused(there, 0.5, state)
        assert record.operations == ["measure_small", "finalise", "hand_back_small"]
        assert (record.waits, record.allocations) == ([], [])

    def test_three_launches_and_a_copy_of_the_norm(self, emulated):
        """For a norm that stays what it is when the next call comes."""
        _, there = self.gradients(emulated)
        with named_cuda(emulated):
            clip_by_global_norm(there, 0.5)
            with cuda_emulator.recorded() as record:
                clip_by_global_norm(there, 0.5)
        assert record.operations == ["measure_small", "finalise", "hand_back_small", "copy device to device"]
        assert record.waits == []

    def test_a_bound_that_changes_at_each_step_takes_no_memory_and_no_wait(self, emulated):
        _, there = self.gradients(emulated)
        state = self.state(emulated)
        clip_gradients_fused(there, 0.5, state)
        with cuda_emulator.recorded() as record:
            for bound in (0.4, 0.3, 0.2):
                clip_gradients_fused(there, bound, state)
        assert record.operations == ["measure_small", "finalise", "hand_back_small"] * 3
        assert (record.waits, record.allocations) == ([], [])
        assert float(state.norm) == pytest.approx(0.3, rel=1e-2)

    def test_state_is_used_again(self, device):
        state = FusedClipState([3, 2], device.kernels)
        for scale in (4.0, NAN, 2.0, 0.5):
            arrays = [np.full(3, scale, np.float32), np.full(2, -scale, np.float32)]
            there = put_all(device, arrays)
            clip_gradients_fused(there, 3.0, state)
            if math.isnan(scale):
                assert math.isnan(float(state.norm))
                assert np.isnan(on_host(there[0])).all()
            else:
                assert float(state.norm) == pytest.approx(scale * math.sqrt(5), rel=1e-6)
                wanted = scale * min(1.0, 3.0 / (scale * math.sqrt(5)))
                np.testing.assert_allclose(on_host(there[0]), wanted, rtol=1e-6)

    def streams(self, xp):
        stream = xp.cuda.Stream(non_blocking=True)
        yield stream, stream
        yield stream, stream.ptr
        yield stream, SimpleNamespace(cuda_stream=stream.ptr)  # as torch's streams say it
        yield stream, SimpleNamespace(__cuda_stream__=lambda: (0, stream.ptr))

    def test_a_stream_of_ones_own(self, device):
        xp = device.xp
        for stream, given_as in self.streams(xp):
            arrays, there = self.gradients(device)
            xp.cuda.runtime.deviceSynchronize()
            before = xp.cuda.get_current_stream().ptr
            state = self.state(device)
            clip_gradients_fused(there, 0.5, state, stream=given_as)
            assert xp.cuda.get_current_stream().ptr == before
            stream.synchronize()
            with stream:
                after = [array.get() for array in there]
            assert draw.exact_norm(after) == pytest.approx(0.5, rel=1e-6)
            assert len(arrays) == len(after)

    @pytest.mark.usefixtures("lazy")
    def test_work_goes_to_that_stream_and_no_other(self, emulated):
        xp = emulated.xp
        stream, state, (_, there) = xp.cuda.Stream(non_blocking=True), self.state(emulated), self.gradients(emulated)
        xp.cuda.runtime.deviceSynchronize()
        clip_gradients_fused(there, 0.5, state, stream=stream)
        assert xp.cuda.get_current_stream().done
        assert not stream.done
        stream.synchronize()  # the state must outlive it, as all memory that is used on another stream than its own

    @pytest.mark.parametrize("stream", ["fast", 1.5, object()])
    def test_what_is_no_stream(self, device, stream):
        state, (_, there) = self.state(device), self.gradients(device)
        with nothing_is_launched(device), pytest.raises(CallerError, match="not a CUDA stream: got"):
            clip_gradients_fused(there, 0.5, state, stream=stream)

    def test_a_graph_may_record_it(self, device):
        xp = device.xp
        arrays, there = self.gradients(device)
        state = self.state(device)
        clip_gradients_fused(there, 0.5, state)
        xp.cuda.runtime.deviceSynchronize()
        stream = xp.cuda.Stream(non_blocking=True)
        kept = []
        for _ in range(3):  # again and again: what the graphs read is kept once
            with stream:
                stream.begin_capture()
                clip_gradients_fused(there, 0.5, state)
                graph = stream.end_capture()
            kept.append(len(device.kernels.device._foreign))
        assert kept[0] == kept[2] > 0
        for scale in (1, 10):
            for array, values in zip(there, arrays, strict=True):
                assign(array, device.put(np.float32(scale) * values))
            launched(device, graph)
            assert float(on_host(state.norm)) == pytest.approx(scale * draw.exact_norm(arrays), rel=1e-6)
            assert draw.exact_norm([on_host(array) for array in there]) == pytest.approx(0.5, rel=1e-6)

    def refused(self, device):
        """Gradients that cannot be clipped, with what the error says."""
        _, good = self.gradients(device)
        first, last = good[0], good[-1]
        pointer = device.kernels.device.view(last, "last")
        yield [*good[:-1], on_host(last)], r"'buffers\[5\]' is on another device: got cpu, expected cuda:\d"
        yield [*good[:-1], first[:3].reshape(-1)[:12]], r"'buffers\[0\]' and 'buffers\[5\]' overlap in memory"
        yield [*good[:-1], device.put(np.ones(12))], r"'buffers\[5\]' has an unsupported dtype: got float64"
        yield [*good[:-1], device.put(np.ones((12, 2), np.float32))[:, 0]], r"'buffers\[5\]' is not contiguous"
        yield [*good[:-1], raw(pointer, writable=False)], r"'buffers\[5\]' is read-only"
        yield [*good[:-1], raw(pointer, device="cuda:7")], r"'buffers\[5\]' is on another device: got cuda:7"
        yield good[:-1], "another number of buffers .*: got 5, expected 6"
        yield [*good[:-1], last[:2]], r"buffers\[5\] has another size .*: got 8, expected 12"

    def test_what_cannot_be_written_is_refused_before_any_launch(self, device):
        state = self.state(device)
        for gradients, message in self.refused(device):
            with nothing_is_launched(device), pytest.raises((BufferRefused, LayoutMismatch), match=message):
                clip_gradients_fused(gradients, 0.5, state)

    @pytest.mark.parametrize("bound", [-1.0, NAN, "x"])
    def test_bad_bounds_launch_nothing(self, device, bound):
        _, there = self.gradients(device)
        state = self.state(device)
        with nothing_is_launched(device), pytest.raises(CallerError, match=r"max_norm is (out|not) "):
            clip_gradients_fused(there, bound, state)

    def test_a_pointer_is_as_good_as_an_array(self, device):
        arrays, there = self.gradients(device)
        pointers = [raw(device.kernels.device.view(array, "gradient")) for array in there]
        state = self.state(device)
        clip_gradients_fused(pointers, 0.5, state)
        assert draw.exact_norm([on_host(array) for array in there]) == pytest.approx(0.5, rel=1e-6)
        assert float(state.norm) == pytest.approx(draw.exact_norm(arrays), rel=1e-6)

    def test_a_lora_block_is_clipped_where_it_lies(self, device):
        arrays = dict(
            zip(LORA_COMPONENTS, draw.random_gradients(7, GradientLayout.lora(1, 16, 4, 2).slots), strict=True)
        )
        workspace = SimpleNamespace(**put_all(device, arrays))
        workspace.lora_b_v = None
        with named_cuda(device):
            state = init_lora_fused_clip(workspace)
        assert state.kernels is device.kernels
        clip_lora_gradients_fused(workspace, 0.5, state)
        present = {name: array for name, array in arrays.items() if name != "lora_b_v"}
        assert float(state.norm) == pytest.approx(draw.exact_norm(present.values()), rel=1e-6)
        got = all_on_host({name: getattr(workspace, name) for name in present})
        factor = np.float32(0.5 / float(state.norm))
        for name, array in present.items():
            draw.assert_same_bits(got[name], array * factor)


class TestLora:
    def workspace(self, **change):
        layout = GradientLayout.lora(1, 16, 4, 2)
        arrays = draw.random_gradients(7, layout.slots)
        return {**dict(zip(LORA_COMPONENTS, arrays, strict=True)), **change}

    @pytest.mark.parametrize("kind", [dict, lambda arrays: SimpleNamespace(**arrays)])
    def test_six_buffers_have_one_norm(self, kind):
        arrays = self.workspace()
        before = {name: array.copy() for name, array in arrays.items()}
        workspace = kind(arrays)
        state = init_lora_fused_clip(workspace)
        clip_lora_gradients_fused(workspace, 0.5, state)
        assert state.norm == pytest.approx(draw.exact_norm(before.values()), rel=1e-6)
        factor = np.float32(0.5 / state.norm)
        for name, array in arrays.items():
            draw.assert_same_bits(array, before[name] * factor)

    @pytest.mark.parametrize("name", LORA_COMPONENTS)
    @pytest.mark.parametrize("empty", [None, np.zeros(0, np.float32), "absent"])
    def test_what_is_empty_none_or_absent_is_skipped(self, name, empty):
        workspace = self.workspace(**{name: empty})
        if isinstance(empty, str):
            del workspace[name]
        present = [array.copy() for key, array in workspace.items() if key != name]
        state = init_lora_fused_clip(workspace)
        assert len(state.partials.sizes) == 5
        clip_lora_gradients_fused(workspace, 0.5, state)
        assert state.norm == pytest.approx(draw.exact_norm(present), rel=1e-6)

    def test_what_else_the_workspace_holds_is_left_alone(self):
        other = np.full(3, 1e6, np.float32)
        workspace = self.workspace(activations=other, w_q=other)
        state = init_lora_fused_clip(workspace)
        clip_lora_gradients_fused(workspace, 0.5, state)
        assert (other == 1e6).all()
        assert state.norm < 1e3

    @pytest.mark.parametrize("workspace", [{}, None, SimpleNamespace(), {"lora_a_q": np.zeros(0, np.float32)}])
    def test_none_of_the_six(self, workspace):
        with pytest.raises(LayoutMismatch, match="has none of the LoRA gradients: expected lora_a_q, lora_b_q"):
            init_lora_fused_clip(workspace)

    def test_another_workspace_than_the_states(self):
        state = init_lora_fused_clip(self.workspace())
        with pytest.raises(LayoutMismatch, match=r"another number of buffers .*: got 5, expected 6"):
            clip_lora_gradients_fused(self.workspace(input_norm=None), 1.0, state)
        with pytest.raises(LayoutMismatch, match=r"lora_b_v has another size .*: got 3, expected 8"):
            clip_lora_gradients_fused(self.workspace(lora_b_v=np.ones(3, np.float32)), 1.0, state)

    def test_errors_name_the_buffer(self):
        with pytest.raises(BufferRefused, match="component 'lora_a_v' has an unsupported dtype: got float64"):
            init_lora_fused_clip(self.workspace(lora_a_v=np.ones(3)))
        shared = np.ones(16, np.float32)
        workspace = self.workspace(input_norm=shared, post_attn_norm=shared)
        state = init_lora_fused_clip(workspace)
        with pytest.raises(BufferRefused, match="'input_norm' and 'post_attn_norm' overlap in memory"):
            clip_lora_gradients_fused(workspace, 1.0, state)


BY_KIND = {"embedding": "ends", "layers.0.a": "a", "layers.0.b": "b", "layers.1.a": "a", "head": "ends"}


class TestPlan:
    SLOTS = GradientLayout.of(
        {"embedding": (2,), "layers.0.a": (1,), "layers.0.b": (1,), "layers.1.a": (1,), "head": (3,)}
    ).slots

    @pytest.mark.parametrize(
        ("groups", "numbers", "names"),
        [
            (None, (0, 0, 0, 0, 0), ("all",)),
            ("block", (0, 1, 1, 2, 0), ("rest", "block 0", "block 1")),
            ("component", (0, 1, 2, 3, 4), ("embedding", "layers.0.a", "layers.0.b", "layers.1.a", "head")),
            (BY_KIND, (0, 1, 2, 1, 0), ("ends", "a", "b")),
            (lambda slot: slot.name[-1], (0, 1, 2, 1, 3), ("g", "a", "b", "d")),
        ],
    )
    def test_who_shares_a_norm(self, groups, numbers, names):
        plan, found = clip_plan(self.SLOTS, 2.0, groups)
        assert plan == ClipPlan(numbers, (2.0,) * len(names), blocks=(None, 0, 0, 1, None))
        assert found == names

    def test_a_bound_for_each_group(self):
        bounds = {"ends": 0.5, "a": None, "b": 3}
        plan, names = clip_plan(self.SLOTS, bounds, BY_KIND)
        assert dict(zip(names, plan.max_norms, strict=True)) == {"ends": 0.5, "a": INF, "b": 3.0}

    @pytest.mark.parametrize(("bound", "taken"), [(None, INF), (INF, INF), (5e-324, 5e-324), (np.float32(2), 2.0)])
    def test_bounds(self, bound, taken):
        assert clip_plan(self.SLOTS, bound)[0].max_norms == (taken,)
        assert checked_max_norm(bound) == taken

    @pytest.mark.parametrize(
        ("bound", "groups", "message"),
        [
            (-1.0, None, "max_norm is out of range: got -1.0, expected a number above 0, or None"),
            (NAN, "block", "max_norm is out of range: got nan"),
            ("tight", None, "max_norm is not a number: got 'tight'"),
            ("1", None, "max_norm is not a number: got '1', expected a number above 0, or None"),
            (True, None, "max_norm is not a number: got True"),
            (-0.0, None, "max_norm is out of range: got -0.0"),
            (0, None, "max_norm is out of range: got 0, expected a number above 0.*to switch clipping off pass None"),
            (np.float32(0), "component", r"max_norm is out of range: got 0\.0"),
            ({"ends": 1.0, "a": 0, "b": None}, BY_KIND, "max_norm is out of range: got 0,"),
            (1.0, 5, "groups is unknown: got 5, expected None, 'block'"),
            (1.0, lambda slot: 5, "the group of component 'embedding' is not a str: got 5"),
            (1.0, lambda slot: ["x"], "the group of component 'embedding' is not a str: got list"),
            ({"all": -1.0}, None, "max_norm is out of range: got -1.0"),
            (
                {"rest": 1.0, "block 0": 1.0},
                "block",
                r"names no bound for group 'block 1': got 2 bounds: 'rest', 'block 0'",
            ),
            (
                1.0,
                "layer",
                "groups is unknown: got 'layer', expected None, 'block', 'component', a mapping or a function",
            ),
            (1.0, {"embedding": "ends"}, "groups names no group for component 'layers.0.a'"),
        ],
    )
    def test_refused(self, bound, groups, message):
        with pytest.raises(CallerError, match=message):
            clip_plan(self.SLOTS, bound, groups)
