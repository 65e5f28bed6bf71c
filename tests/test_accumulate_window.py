"""The window: micro-batches counted and weighed per slot, and what each slot still holds."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import strategies as draw
from folds import folds_of
from hypothesis import given
from hypothesis import strategies as st

from gradengine.accumulate.window import Window, checked_weight, ordered_sum
from gradengine.arrays.host import host_buffer
from gradengine.errors import BufferRefused, CallerError, WindowError
from gradengine.kernels import Contribution
from gradengine.layout import GradientLayout
from gradengine.layout.slots import Span

ONE = np.float32(1)


def view(size=1):
    return host_buffer(np.zeros(size, np.float32), "w")


def take(window, contribution, weight=ONE):
    window.count(contribution, weight)
    window.hold(contribution, weight)
    return contribution


def took(window, places, weight=ONE, holes=()):
    views = [None if p in holes else view() for p in places.positions]
    return take(window, Contribution.of(places, views), weight)


def fold_held(window, places):
    for fold in window.held_passes(places):
        window.folded(fold)


def folds(window, places):
    return {fold.position: fold for batch in window.held_passes(places) for fold in folds_of(batch)}


class TestFolding:
    def test_the_mean_counts_as_one_micro_batch_that_nobody_has_measured(self):
        window, both = Window(2), Span.at([0, 1])
        took(window, both, np.float32(2))
        took(window, both)
        fold_held(window, both)
        window.measured[:] = True
        window.become_one()
        assert (window.counts.tolist(), window.weights) == ([1, 1], [1])
        assert window.filled.all()
        assert not window.measured.any()

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7), st.booleans()), max_size=12))
    def test_any_order_of_parts_and_folds_gives_each_slot_its_own_in_order(self, calls):
        """Against a list for each slot: what a fold hands over is what came, once, in the order it came."""
        parts = [Span.at([0]), Span.at([1, 2]), Span.at([3]), Span.at(range(4))]
        window, waiting = Window(4), [[] for _ in range(4)]

        def fold(places):
            handed = {p: list(fold.sources) for p, fold in folds(window, places).items()}
            assert all(handed.get(p, []) == waiting[p] for p in places.positions)
            assert all(found == waiting[p] for p, found in handed.items())
            fold_held(window, places)
            for p in handed:
                waiting[p] = []

        for number, holes, is_fold in calls:
            places = parts[number]
            if is_fold or window.held_with(places) not in ([], [places]):
                fold(places)
            if not is_fold:
                contribution = took(window, places, holes=[p for p in range(4) if holes >> p & 1 == 0])
                for p, given_view in zip(places.positions, contribution.views, strict=True):
                    waiting[p] += [] if given_view is None else [given_view]
        fold(parts[3])
        assert waiting == [[]] * 4

    def test_an_address_is_held_until_its_fold_and_of_an_empty_view_none_is(self):
        window, slots = Window(2), GradientLayout.of([(1,), (1,)]).slots
        shared = view()
        take(window, Contribution.of(Span.at([0]), [shared]))
        again = Contribution.of(Span.at([1]), [shared])
        with pytest.raises(BufferRefused, match="'1' is held already"):
            window.refuse_aliases(again, slots)
        fold_held(window, Span.at([0]))
        window.refuse_aliases(again, slots)
        empty = take(window, Contribution.of(Span.at([0]), [view(0)]))
        window.refuse_aliases(empty, slots)


class TestWeight:
    @given(st.one_of(st.floats(1.2e-38, 3.4e38), draw.weights))
    def test_is_rounded_to_fp32_and_so_is_its_reciprocal(self, weight):
        scalar = checked_weight(weight)
        assert type(scalar) is np.float32
        assert scalar == np.float32(weight)
        assert 0 < np.float32(1 / float(scalar)) < np.inf

    @pytest.mark.parametrize("weight", [1, np.int64(3), np.float64(0.5), np.array(2.5), 2.0**-126])
    def test_is_whatever_is_a_number(self, weight):
        assert checked_weight(weight) == np.float32(float(weight))

    @pytest.mark.parametrize(
        "weight",
        [
            *(0, -0.0, -1, math.nan, math.inf, -math.inf, 1e-60, 1e-40, 2.0**-126 * (1 - 2**-20), 3.5e38, 1e60),
            *(10**400, "x", "3", None, True, [1], 1j),
        ],
    )
    def test_refused(self, weight):
        with pytest.raises(WindowError, match="a micro-batch's weight") as refusal:
            checked_weight(weight)
        assert refusal.value.got is weight or refusal.value.got in {repr(weight), "list", "an integer of 1329 bits"}

    def test_an_array_on_a_gpu_is_refused(self):
        on_gpu = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (2, 0))
        with pytest.raises(CallerError, match=r"device: got cuda:0, expected a number; call `\.item\(\)`"):
            checked_weight(on_gpu)


@pytest.mark.parametrize(
    ("values", "expected"), [([], 0.0), ([0.1] * 10, 0.9999999999999999), ([1e16, 1, 1, -1e16], 0.0)]
)
def test_a_sum_in_order_is_rounded_at_each_step(values, expected):
    assert ordered_sum(values) == expected  # a compensated sum gives 1.0 and 2.0
