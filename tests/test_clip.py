"""Clipping: the norm it finds, the scale it takes, what it writes, and what it leaves alone."""

import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import assign, launched, named_cuda, nothing_is_launched, on_host, put_all, raw, synchronize

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


def random_arrays(seed, dtype="float32", magnitude=1.0, shapes=SHAPES):
    return [draw.random_array([seed, i], shape, dtype, magnitude) for i, shape in enumerate(shapes)]


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


class TestGlobalNorm:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize(
        ("max_norm", "shapes"), [(1e-6, SHAPES), (0.5, SHAPES), (3.0, SHAPES), (0.5, [(5,), (CHUNK + 5,)])]
    )
    def test_each_element_is_multiplied_once_by_one_factor(self, clip, dtype, max_norm, shapes):
        arrays = random_arrays(2, dtype, shapes=shapes)
        before = [array.astype(np.float32) for array in arrays]
        norm = clip(arrays, max_norm)
        assert norm == pytest.approx(draw.exact_norm(before), rel=1e-6)
        for array, value in zip(arrays, before, strict=True):
            draw.assert_same_bits(array, draw.scaled(value, np.float32(max_norm / norm), dtype))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("bound", [1.0, 2.0, INF, None])
    def test_a_norm_within_the_bound_writes_nothing(self, clip, dtype, bound):
        """Minus zero and a norm equal to the bound are at the edge; memory that may not be read shows the rest."""
        array = np.array([1.0, -0.0, 0.0, 0.0], draw.DTYPES[dtype])
        before = array.copy()
        assert clip([array], bound) == 1.0
        draw.assert_same_bits(array, before)

    def test_zeros_stay_zeros_and_nothing_has_norm_zero(self, clip):
        arrays = [np.zeros(5, np.float32), np.full(3, -0.0, np.float32)]
        assert clip(arrays, 1e-300) == clip([], 1.0) == 0.0
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

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("max_norm", [0.1, 1e9])
    def test_as_torch(self, dtype, max_norm):
        torch = pytest.importorskip("torch")
        leaves = [torch.nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype))) for shape in [(40, 30), (30,)]]
        for number, leaf in enumerate(leaves):
            leaf.grad = torch.tensor(draw.random_array(number, leaf.shape)).to(leaf.dtype)
        ours = [leaf.grad.clone() for leaf in leaves]
        theirs = torch.nn.utils.clip_grad_norm_(leaves, max_norm)
        rounding = 2e-5 if dtype == "float32" else 2e-2  # torch adds 1e-6 to the norm
        assert clip_by_global_norm(ours, max_norm) == pytest.approx(float(theirs), rel=rounding)
        for gradient, leaf in zip(ours, leaves, strict=True):
            torch.testing.assert_close(gradient, leaf.grad, rtol=rounding, atol=1e-9)


class TestAgainAndAgain:
    """The one-liner in a loop: what it makes is kept by sizes, and what it says stays said."""

    def test_two_threads_do_not_disturb_each_other(self, backend):
        def loop(value):
            values = [value * i for i in range(1, 20)]
            found = [clip_by_global_norm(put_all(backend, [np.full(4, v, np.float32)]), 1e9) for v in values]
            return [float(norm) for norm in found] == [2.0 * v for v in values]

        with named_cuda(backend), ThreadPoolExecutor(2) as pool:
            assert list(pool.map(loop, [1, 1000])) == [True, True]

    def test_a_thread_that_clips_as_many_elements_meanwhile_does_not_change_the_norm(self, monkeypatch):
        finalise = HostKernels.finalise

        def interrupted(*given, **options):
            monkeypatch.setattr(HostKernels, "finalise", finalise)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(clip_by_global_norm, [np.full(4, 9, np.float32)], 1.0).result() == 18
            return finalise(*given, **options)

        monkeypatch.setattr(HostKernels, "finalise", interrupted)
        assert clip_by_global_norm([np.full(4, 2, np.float32)], 1.0) == 4


class Pair(NamedTuple):
    w: object
    b: object


NESTINGS = {
    "a dict": lambda a, b, c: {"a": a, "b": b, "c": c},
    "dicts": lambda a, b, c: {"enc": {"a": a, "b": b}, "c": c},
    "lists": lambda a, b, c: [[a, [b]], c],
    "tuples": lambda a, b, c: ((a, b), (c,)),
    "a mixture": lambda a, b, c: {"layers": [Pair(a, {"bias": b})], "head": (c,), "none": {}},
    "a generator": lambda a, b, c: (part for part in ([a, b], {"c": c})),
}


@pytest.mark.parametrize("nested", NESTINGS.values(), ids=NESTINGS)
def test_containers_are_clipped_as_their_arrays_in_a_list(backend, nested):
    arrays = random_arrays(4)[:3]
    flat, within = put_all(backend, arrays), put_all(backend, arrays)
    with named_cuda(backend):
        for bound in (3.0, 2.0, 1.0):  # known from the second time on
            assert float(clip_by_global_norm(nested(*within), bound)) == float(clip_by_global_norm(flat, bound))
    for one, other in zip(within, flat, strict=True):
        draw.assert_same_bits(on_host(one), on_host(other))


def test_arrays_of_a_known_form_are_looked_at_once(monkeypatch):
    looks, look = [], HostDevice.writable_views
    monkeypatch.setattr(HostDevice, "writable_views", lambda *given: looks.append(1) or look(*given))
    monkeypatch.setattr(clip_module, "_remembered", clip_module._Remembered())
    sets = [[draw.random_array([seed, size], size) for size in (3, 40)] for seed in range(12)]
    for arrays in sets * 2:
        expected = [
            array * np.float32(0.5 / np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in arrays)))
            for array in arrays
        ]
        clip_by_global_norm(arrays, 0.5)
        for array, wanted in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=1e-6)
    assert len(looks) == 1
    with pytest.raises(BufferRefused, match="overlap"):
        clip_by_global_norm([sets[0][1][:3], sets[0][1]], 0.5)


# What is refused: arrays made of six ones of fp32, and the error with the name of what is wrong.
REFUSED_ARRAYS = [
    (lambda a: [a[:4], a[3:]], BufferRefused, r"\[0\]' and '.*\[1\]' overlap"),
    (lambda a: [a, a], BufferRefused, r"\[0\]' and '.*\[1\]' overlap"),
    (lambda a: [a[:2], a[4:], a[1:3]], BufferRefused, r"\[0\]' and '.*\[2\]' overlap"),
    (lambda a: [a, a.astype(np.float64)], BufferRefused, r"\[1\]' has an unsupported dtype"),
    (lambda a: [a, a.tolist()], BufferRefused, r"\[1\]' is not an array|arrays\[1\]\.0' is not an array"),
    (lambda a: [a[::2]], BufferRefused, r"\[0\]' is not contiguous"),
    (lambda a: [np.broadcast_to(np.float32(3), (1,))], BufferRefused, r"\[0\]' is read-only"),
]
REFUSED_WITHIN = [
    (lambda a: {"w": a, "b": np.zeros(2)}, BufferRefused, "'b' has an unsupported dtype"),
    (lambda a: {"enc": {"w": a, "b": 3.0}}, BufferRefused, r"'enc\.b' is not an array"),
    (lambda a: [a, [a.astype(np.float64)]], BufferRefused, r"'arrays\[1\]\.0' has an unsupported dtype"),
    (lambda a: {"x": [a], "y": {"z": a[2:]}}, BufferRefused, r"'x\.0' and 'y\.z' overlap"),
    (lambda a: {"x": {0: a}}, LayoutMismatch, "name is not text"),
]
BAD_BOUNDS = [0, -0.0, -1.0, -1e-300, NAN, -INF, "x", [1.0], 1j]


class TestRefusals:
    @pytest.mark.parametrize(
        ("clips", "arrays", "error", "word"),
        [
            *((clips, *row) for clips in (clip_by_global_norm, fused) for row in REFUSED_ARRAYS),
            *((clip_by_global_norm, *row) for row in REFUSED_WITHIN),
        ],
    )
    def test_arrays(self, clips, arrays, error, word):
        array = np.full(6, 3, np.float32)
        with pytest.raises(error, match=word):
            clips(arrays(array), 1.0)
        assert array.tolist() == [3] * 6

    @pytest.mark.parametrize("bound", BAD_BOUNDS)
    def test_bounds(self, backend, bound):
        """They change nothing, not the last norm either; a bound of 0 says what clips nothing."""
        state, (array,) = FusedClipState([2], backend.kernels), put_all(backend, [np.array([3, 4], np.float32)])
        clip_gradients_fused([array], 1.0, state)
        with named_cuda(backend):
            clip_by_global_norm([array], None)
        before = on_host(array)
        for call in (lambda: clip_by_global_norm([array], bound), lambda: clip_gradients_fused([array], bound, state)):
            with named_cuda(backend), nothing_is_launched(backend), pytest.raises(CallerError) as refusal:
                call()
            assert ("pass None" in str(refusal.value)) == (bound == 0)
        draw.assert_same_bits(on_host(array), before)
        assert [float(state.norm), float(state.scale)] == pytest.approx([5.0, 0.2])

    def test_a_state_of_others(self):
        one = np.ones(3, np.float32)
        with pytest.raises(LayoutMismatch, match="number of buffers") as refusal:
            clip_gradients_fused([one], 1.0, FusedClipState([3, 4]))
        assert (refusal.value.got, refusal.value.expected) == (1, 2)
        with pytest.raises(LayoutMismatch, match=r"buffers\[1\] has the wrong size") as refusal:
            clip_gradients_fused([one, np.ones(5, np.float32)], 0.1, FusedClipState([3, 4]))
        assert (refusal.value.got, refusal.value.expected) == (5, 4)
        assert (one == 1).all()

    def test_streams_on_the_cpu_and_unknown_devices(self):
        with pytest.raises(CallerError, match="the CPU has no streams"):
            clip_gradients_fused([], 1.0, FusedClipState([]), stream=7)
        with pytest.raises(CallerError, match="no kernels for the device"):
            FusedClipState([3], device="abacus")

    def refused(self, device, good):
        """Gradients that cannot be clipped on a device, with what the error says."""
        first, last = good[0], good[-1]
        pointer = device.kernels.device.view(last, "last")
        yield [*good[:-1], on_host(last)], r"'buffers\[5\]' is on the wrong device"
        yield [*good[:-1], first[:3].reshape(-1)[:12]], r"'buffers\[0\]' and 'buffers\[5\]' overlap"
        yield [*good[:-1], device.put(np.ones(12))], r"'buffers\[5\]' has an unsupported dtype"
        yield [*good[:-1], device.put(np.ones((12, 2), np.float32))[:, 0]], r"'buffers\[5\]' is not contiguous"
        yield [*good[:-1], raw(pointer, writable=False)], r"'buffers\[5\]' is read-only"
        yield [*good[:-1], raw(pointer, device="cuda:7")], r"'buffers\[5\]' is on the wrong device"
        yield good[:-1], "number of buffers"
        yield [*good[:-1], last[:2]], r"buffers\[5\] has the wrong size"

    def test_what_cannot_be_written_is_refused_before_any_launch(self, device):
        state = FusedClipState(map(math.prod, SHAPES), device.kernels)
        for gradients, message in self.refused(device, put_all(device, random_arrays(1))):
            with nothing_is_launched(device), pytest.raises((BufferRefused, LayoutMismatch), match=message):
                clip_gradients_fused(gradients, 0.5, state)


class TestState:
    def test_is_used_again_and_again(self, backend):
        """Norm and scale are numbers on the host and arrays on a device; NaN is not kept for the next."""
        state = FusedClipState([3, 2], backend.kernels)
        assert math.isnan(state.norm)
        assert state.scale == 1
        values = state.partials.values
        for scale in (4.0, NAN, 2.0, 0.5):
            there = put_all(backend, [np.full(3, scale, np.float32), np.full(2, -scale, np.float32)])
            clip_gradients_fused(there, 3.0, state)
            norm = scale * math.sqrt(5)
            wanted = 1.0 if math.isnan(norm) else min(1.0, 3.0 / norm)
            assert float(state.norm) == pytest.approx(norm, nan_ok=True)
            assert float(state.scale) == pytest.approx(wanted)
            np.testing.assert_allclose(on_host(there[0]), scale * wanted, rtol=1e-6)
        assert state.partials.values is values
        if not backend.is_host:
            assert isinstance(state.norm, backend.xp.ndarray)
            assert (state.norm.shape, state.scale.shape) == ((), ())


class TestOnADevice:
    """Norm and scale stay there, and nothing waits."""

    def state(self, device):
        return FusedClipState(map(math.prod, SHAPES), device.kernels)

    def test_three_launches_and_nothing_else(self, emulated):
        """Also for another bound at each step; and a copy of a norm that stays what it is when the next call comes."""
        launches, there = ["measure_small", "finalise", "hand_back_small"], put_all(emulated, random_arrays(1))
        state = self.state(emulated)
        clip_gradients_fused(there, 0.5, state)
        with cuda_emulator.recorded() as record:
            for bound in (0.4, 0.3, 0.2):
                clip_gradients_fused(there, bound, state)
        assert record.operations == launches * 3
        assert (record.waits, record.allocations) == ([], [])
        assert float(state.norm) == pytest.approx(0.3, rel=1e-2)
        with named_cuda(emulated):
            clip_by_global_norm(there, 0.5)
            with cuda_emulator.recorded() as record:
                clip_by_global_norm(there, 0.5)
        assert record.operations == [*launches, "copy device to device"]
        assert record.waits == []

    @pytest.mark.usefixtures("lazy")
    def test_work_goes_to_that_stream_and_no_other(self, emulated):
        xp, there, state = emulated.xp, put_all(emulated, random_arrays(1)), self.state(emulated)
        stream = xp.cuda.Stream(non_blocking=True)
        xp.cuda.runtime.deviceSynchronize()
        clip_gradients_fused(there, 0.5, state, stream=stream)
        assert xp.cuda.get_current_stream().done
        assert not stream.done
        stream.synchronize()

    def test_a_graph_may_record_it(self, device):
        arrays, state = random_arrays(1), self.state(device)
        there = put_all(device, arrays)
        clip_gradients_fused(there, 0.5, state)
        synchronize(device)
        stream, kept = device.xp.cuda.Stream(non_blocking=True), []
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


class TestLora:
    def workspace(self, **change):
        arrays = draw.random_gradients(7, GradientLayout.lora(1, 16, 4, 2).slots)
        return {**dict(zip(LORA_COMPONENTS, arrays, strict=True)), **change}

    @pytest.mark.parametrize("kind", [dict, lambda arrays: SimpleNamespace(**arrays)])
    @pytest.mark.parametrize("lacks", [None, *LORA_COMPONENTS])
    @pytest.mark.parametrize("empty", [None, np.zeros(0, np.float32), "absent"])
    def test_those_that_are_there_have_one_norm(self, backend, kind, lacks, empty):
        """What is None, empty or absent is skipped, and what else the workspace holds is left alone."""
        arrays = {name: array for name, array in self.workspace().items() if name != lacks}
        given = put_all(backend, {**arrays, "activations": np.full(3, 1e6, np.float32)})
        nothing = {} if lacks is None or isinstance(empty, str) else put_all(backend, {lacks: empty})
        workspace = kind({**given, **nothing})
        with named_cuda(backend):
            state = init_lora_fused_clip(workspace)
        assert (state.kernels.device.name, len(state.partials.sizes)) == (backend.kernels.device.name, len(arrays))
        clip_lora_gradients_fused(workspace, 0.5, state)
        assert float(state.norm) == pytest.approx(draw.exact_norm(arrays.values()), rel=1e-6)
        factor = np.float32(0.5 / float(state.norm))
        for name, array in arrays.items():
            draw.assert_same_bits(on_host(given[name]), array * factor)
        assert (on_host(given["activations"]) == 1e6).all()

    @pytest.mark.parametrize("workspace", [{}, None, SimpleNamespace(), {"lora_a_q": np.zeros(0, np.float32)}])
    def test_none_of_the_six(self, workspace):
        with pytest.raises(LayoutMismatch, match="none of the LoRA gradients"):
            init_lora_fused_clip(workspace)

    @pytest.mark.parametrize(
        ("change", "error", "word"),
        [
            ({"input_norm": None}, LayoutMismatch, "number of buffers"),
            ({"lora_b_v": np.ones(3, np.float32)}, LayoutMismatch, "lora_b_v has the wrong size"),
            ({"lora_a_v": np.ones(3)}, BufferRefused, "'lora_a_v' has an unsupported dtype"),
            (
                dict.fromkeys(("input_norm", "post_attn_norm"), np.ones(16, np.float32)),
                BufferRefused,
                "'input_norm' and 'post_attn_norm' overlap",
            ),
        ],
    )
    def test_another_workspace_than_the_states(self, change, error, word):
        state = init_lora_fused_clip(self.workspace())
        with pytest.raises(error, match=word):
            clip_lora_gradients_fused(self.workspace(**change), 1.0, state)


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
        plan, names = clip_plan(self.SLOTS, {"ends": 0.5, "a": None, "b": 3}, BY_KIND)
        assert dict(zip(names, plan.max_norms, strict=True)) == {"ends": 0.5, "a": INF, "b": 3.0}

    @pytest.mark.parametrize(("bound", "taken"), [(None, INF), (INF, INF), (5e-324, 5e-324), (np.float32(2), 2.0)])
    def test_bounds(self, bound, taken):
        assert clip_plan(self.SLOTS, bound)[0].max_norms == (taken,)
        assert checked_max_norm(bound) == taken

    @pytest.mark.parametrize(
        ("bound", "groups", "word"),
        [
            *((bound, None, "max_norm") for bound in (*BAD_BOUNDS, "1", True, np.float32(0))),
            ({"ends": 1.0, "a": 0, "b": None}, BY_KIND, "max_norm"),
            ({"rest": 1.0, "block 0": 1.0}, "block", "'block 1'"),
            (1.0, 5, "groups is unknown"),
            (1.0, "layer", "groups is unknown"),
            (1.0, lambda slot: 5, "'embedding' is not a str"),
            (1.0, lambda slot: ["x"], "'embedding' is not a str"),
            (1.0, {"embedding": "ends"}, r"'layers\.0\.a'"),
        ],
    )
    def test_refused(self, bound, groups, word):
        with pytest.raises(CallerError, match=word):
            clip_plan(self.SLOTS, bound, groups)
