"""The window: micro-batches counted and weighed per slot, and what each slot still holds."""

import math

import numpy as np
import pytest
import strategies as draw
from folds import folds_of
from hypothesis import given
from hypothesis import strategies as st

from gradengine.accumulate.window import Window, checked_weight, ordered_sum
from gradengine.arrays.host import host_buffer
from gradengine.errors import BufferRefused, WindowError
from gradengine.kernels import Contribution, SlotSet
from gradengine.layout import GradientLayout

ONE, TWO = np.float32(1), np.float32(2)


def given_to(places, *views):
    return Contribution.of(places, views)


def view(size=1):
    return host_buffer(np.zeros(size, np.float32), "w")


def views(count):
    return [view() for _ in range(count)]


def take(window, contribution, weight=ONE):
    window.count(contribution, weight)
    window.hold(contribution, weight)


def took(window, places, weight=ONE, holes=()):
    contribution = given_to(places, *[None if p in holes else view() for p in places.positions])
    take(window, contribution, weight)
    return contribution


def fold_held(window, places):
    for fold in window.held_passes(places):
        window.folded(fold)


def folds(window, places):
    return {fold.position: fold for batch in window.held_passes(places) for fold in folds_of(batch)}


class TestCounting:
    def test_counts_and_weights(self):
        window, first, rest = Window(3), SlotSet([0]), SlotSet([1, 2])
        took(window, first, TWO)
        took(window, rest, TWO, holes=[2])  # the rest of the same micro-batch
        assert (window.counts.tolist(), window.weights) == ([1, 1, 1], [2])
        took(window, SlotSet([2, 0]), ONE)
        assert (window.counts.tolist(), window.weights) == ([2, 1, 2], [2, 1])

    def test_it_is_even_again_once_the_last_part_has_come(self):
        window, first, rest = Window(3), SlotSet([0]), SlotSet([1, 2])
        for part, is_even in ((first, False), (rest, True), (rest, False), (first, True)):
            took(window, part)
            assert window.is_even is is_even

    def test_measured_until_the_next_contribution(self):
        window, both = Window(2), SlotSet([0, 1])
        took(window, both)
        fold_held(window, both)
        window.measured[:] = True
        took(window, both, holes=[0])  # nothing came for it, so its sum is what it was
        assert window.measured.tolist() == [True, False]

    def test_another_weight_within_a_micro_batch_is_refused(self):
        window, zero, one = Window(2), SlotSet([0]), SlotSet([1])
        took(window, zero, TWO)
        window.refuse_other_weight(one, TWO, "block 1")
        window.refuse_other_weight(zero, ONE, "block 0")  # begins the next one
        with pytest.raises(WindowError, match=r"block 1 of micro-batch 0 has another weight .* got 1.0, expected 2.0"):
            window.refuse_other_weight(SlotSet([0, 1]), ONE, "block 1")

    def test_the_mean_counts_as_one_micro_batch(self):
        window, both = Window(2), SlotSet([0, 1])
        for _ in range(3):
            took(window, both, TWO)
        fold_held(window, both)
        window.measured[:] = True
        window.become_one()
        assert (window.counts.tolist(), window.weights) == ([1, 1], [1])
        assert not window.measured.any()
        assert window.filled.all()


class TestFolding:
    def test_a_fold_has_all_that_is_held_in_order_and_overwrites_once(self):
        window, places = Window(1), SlotSet([0])
        first, second = took(window, places, TWO), took(window, places, ONE)
        (batch,) = window.held_passes(places)
        assert (batch.overwrite.tolist(), list(batch.weights)) == ([True], [TWO, ONE])
        assert list(batch.contributions) == [first, second]
        fold_held(window, places)
        assert window.held_passes(places) == []
        took(window, places)
        assert folds(window, places)[0].overwrite is False

    def test_what_came_together_is_one_batch(self):
        window, whole = Window(4), SlotSet(range(4))
        for _ in range(3):
            took(window, whole, holes=[2])
        (batch,) = window.held_passes(whole)
        assert batch.slots is whole
        assert [fold.position for fold in folds_of(batch)] == [0, 1, 3]
        fold_held(window, whole)
        assert window.filled.tolist() == [True, True, False, True]

    def test_parts_that_came_apart_are_folded_as_they_came(self):
        window, whole, left, right = Window(3), SlotSet(range(3)), SlotSet([0, 1]), SlotSet([2])
        a, b, c = took(window, left, TWO), took(window, right, TWO), took(window, left, ONE)
        found = folds(window, whole)
        assert found[0].sources == (a.views[0], c.views[0])
        assert found[2].sources == (b.views[0],)
        assert [batch.slots for batch in window.held_passes(whole)] == [left, right]

    def test_what_came_together_is_folded_together(self):
        window, whole, left = Window(3), SlotSet(range(3)), SlotSet([0, 1])
        took(window, whole)
        assert (window.held_with(left), window.depth(left), window.depth(whole)) == ([whole], 0, 1)
        assert sorted(folds(window, left)) == [0, 1, 2]
        fold_held(window, left)
        assert window.held_with(whole) == window.held_passes(whole) == []

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7), st.booleans()), max_size=12))
    def test_any_order_of_parts_and_folds_gives_each_slot_its_own_in_order(self, calls):
        """Against a list for each slot: what a fold hands over is what came, once, in the order it came."""
        parts = [SlotSet([0]), SlotSet([1, 2]), SlotSet([3]), SlotSet(range(4))]
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


class TestAddresses:
    def test_one_is_held_until_its_fold(self):
        window, first, slots = Window(2), SlotSet([0]), GradientLayout.of([(1,), (1,)]).slots
        shared = view()
        take(window, given_to(first, shared))
        again = given_to(SlotSet([1]), shared)
        with pytest.raises(BufferRefused, match="component '1' is held already at the same address"):
            window.refuse_aliases(again, slots)
        fold_held(window, first)
        window.refuse_aliases(again, slots)

    def test_nothing_is_held_of_an_empty_view(self):
        window, places = Window(1), SlotSet([0])
        empty = given_to(places, view(0))
        take(window, empty)
        window.refuse_aliases(empty, GradientLayout.of([(0,)]).slots)


class TestWeight:
    @given(st.floats(1e-37, 1e38))
    def test_is_rounded_to_fp32(self, weight):
        scalar = checked_weight(weight)
        assert type(scalar) is np.float32
        assert scalar == np.float32(weight)

    @pytest.mark.parametrize("weight", [1, np.int64(3), np.float64(0.5), np.array(2.5)])
    def test_whatever_is_a_number(self, weight):
        assert checked_weight(weight) == np.float32(float(weight))

    @pytest.mark.parametrize(
        "weight",
        [
            0,
            0.0,
            -0.0,
            -1,
            math.nan,
            math.inf,
            -math.inf,
            1e-60,
            1e-40,
            3.5e38,
            1e60,
            10**400,
            "x",
            "3",
            None,
            True,
            [1],
            1j,
        ],
    )
    def test_refused(self, weight):
        with pytest.raises(
            WindowError, match=r"a micro-batch's weight is (out|not) .*: got .*, expected a finite"
        ) as e:
            checked_weight(weight)
        assert e.value.got is weight or e.value.got in {repr(weight), "list", "an integer of 1329 bits"}

    @given(draw.weights)
    def test_its_reciprocal_is_an_fp32_number(self, weight):
        assert 0 < np.float32(1 / float(checked_weight(weight))) < np.inf

    def test_the_smallest_has_a_finite_reciprocal(self):
        tiny = checked_weight(2.0**-126)
        assert np.float32(1) / tiny < np.inf


@pytest.mark.parametrize(
    ("values", "expected"), [([], 0.0), ([0.1] * 10, 0.9999999999999999), ([1e16, 1, 1, -1e16], 0.0)]
)
def test_a_sum_in_order_is_rounded_at_each_step(values, expected):
    assert ordered_sum(values) == expected  # a compensated sum gives 1.0 and 2.0
