"""The window: micro-batches counted and weighed per slot, and what each slot still holds."""

import math

import numpy as np
import pytest
import strategies as draw
from hypothesis import given
from hypothesis import strategies as st

from gradengine.buffer import host_buffer
from gradengine.errors import WindowError
from gradengine.window import Window, checked_weight, ordered_sum

ONE, TWO = np.float32(1), np.float32(2)


def view(size=1):
    return host_buffer(np.zeros(size, np.float32), "w")


def test_counts_and_weights():
    window = Window(3)
    window.take([0], [view()], TWO)
    window.take([1, 2], [view(), None], TWO)  # the rest of the same micro-batch
    assert (window.counts, window.weights) == ([1, 1, 1], [2])
    window.take([2, 0], [view(), view()], ONE)
    assert (window.counts, window.weights) == ([2, 1, 2], [2, 1])
    assert [len(held) for held in window.pending] == [2, 1, 1]


def test_a_fold_has_all_that_is_held_in_order_and_overwrites_once():
    window, views = Window(1), [view(), view(), view()]
    window.take([0], views[:1], TWO)
    window.take([0], views[1:2], ONE)
    fold = window.fold(0)
    assert (fold.position, fold.overwrite, fold.weights) == (0, True, (2, 1))
    assert all(a is b for a, b in zip(fold.sources, views, strict=False))
    window.folded([0])
    assert window.pending == [[]]
    window.take([0], views[2:], ONE)
    assert window.fold(0).overwrite is False


def test_measured_until_the_next_contribution():
    window = Window(2)
    window.take([0, 1], [view(), view()], ONE)
    window.folded([0, 1])
    window.measured.update([0, 1])
    assert window.measured == {0, 1}
    window.take([1], [None], ONE)
    assert window.measured == {0}


def test_an_address_is_held_until_its_last_fold():
    window, shared = Window(3), view()
    window.take([0, 1], [shared, shared], ONE)
    window.folded([0])
    assert window.held[shared.pointer]  # slot 1 still waits for it
    window.folded([1])
    assert not window.held[shared.pointer]


def test_nothing_is_held_of_an_empty_view():
    window, empty = Window(1), view(0)
    window.take([0], [empty], ONE)
    assert not window.held[empty.pointer]


def test_another_weight_within_a_micro_batch_is_refused():
    window = Window(2)
    window.take([0], [view()], TWO)
    window.refuse_other_weight([1], TWO, "block 1")
    window.refuse_other_weight([0], ONE, "block 0")  # begins the next one
    with pytest.raises(WindowError, match=r"block 1 of micro-batch 0 has another weight .* got 1.0, expected 2.0"):
        window.refuse_other_weight([0, 1], ONE, "block 1")


def test_the_mean_counts_as_one_micro_batch():
    window = Window(2)
    for _ in range(3):
        window.take([0, 1], [view(), view()], TWO)
    window.folded([0, 1])
    window.measured.update([0, 1])
    window.become_one()
    assert (window.counts, window.weights, window.measured) == ([1, 1], [1], set())
    assert window.filled == [True, True]


class TestWeight:
    @given(st.floats(1e-37, 1e38))
    def test_is_rounded_to_fp32(self, weight):
        scalar = checked_weight(weight)
        assert type(scalar) is np.float32
        assert scalar == np.float32(weight)

    @pytest.mark.parametrize("weight", [1, True, np.int64(3), np.float64(0.5), "2.5"])
    def test_whatever_is_a_number(self, weight):
        assert checked_weight(weight) == np.float32(float(weight))

    @pytest.mark.parametrize(
        "weight",
        [0, 0.0, -0.0, -1, math.nan, math.inf, -math.inf, 1e-60, 1e-40, 3.5e38, 1e60, 10**400, "x", None, [1], 1j],
    )
    def test_refused(self, weight):
        with pytest.raises(
            WindowError, match=r"a micro-batch's weight is out of range: got .*, expected a finite"
        ) as e:
            checked_weight(weight)
        assert e.value.got == repr(weight)

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
