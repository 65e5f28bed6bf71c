"""A caller's gradients find their slots: each once, in order, in its shape, or the error says which does not."""

import numpy as np
import pytest
import strategies as draw
from hypothesis import given
from hypothesis import strategies as st
from operations import Name, growth

from gradengine.accumulate.gradients import in_slot_order, matched_views
from gradengine.arrays.host import host_buffer
from gradengine.errors import LayoutMismatch
from gradengine.layout import GradientLayout, Slot

BLOCK = GradientLayout.of({"layers.0.a": (1,), "layers.0.b": (2,), "layers.0.c": (3,)}).blocks[0]


def ordered(gradients):
    return list(in_slot_order(BLOCK.slots, gradients, "block 0", "layers.0."))


@pytest.mark.parametrize(
    "gradients",
    [
        [1, 2, 3],
        (1, 2, 3),
        {"layers.0.a": 1, "layers.0.b": 2, "layers.0.c": 3},
        {"c": 3, "b": 2, "a": 1},
        {"c": 3, "layers.0.b": 2, "a": 1},
    ],
)
def test_in_the_order_of_the_slots(gradients):
    assert ordered(gradients) == [1, 2, 3]


NESTED = GradientLayout.of({"encoder": [{"w": (1,), "b": (2,)}, {"w": (3,)}], "head": {"w": (4,)}})


@pytest.mark.parametrize(
    "gradients",
    [
        {"head": {"w": 4}, "encoder": [{"b": 2, "w": 1}, {"w": 3}]},
        {"encoder": {"0": {"b": 2, "w": 1}, "1": {"w": 3}}, "head.w": 4},
        {"encoder.0": {"w": 1, "b": 2}, "encoder.1.w": 3, "head": {"w": 4}},
        [[{"w": 1, "b": 2}, {"w": 3}], {"w": 4}],
        [[1, 2, {"w": 3}], [4]],
    ],
)
def test_containers_are_taken_apart_as_the_layout_took_them(gradients):
    class Array:
        shape = ()

        def __init__(self, number):
            self.number = number

    def arrays(value):
        if isinstance(value, dict):
            return {name: arrays(item) for name, item in value.items()}
        return [arrays(item) for item in value] if isinstance(value, list) else Array(value)

    assert [a.number for a in in_slot_order(NESTED.slots, arrays(gradients), "the layout")] == [1, 2, 3, 4]


def test_what_a_container_lacks_is_named_by_its_path():
    arrays = {"encoder": [{"w": np.ones(1), "b": None}, {}], "head": {"w": np.ones(4)}}
    with pytest.raises(LayoutMismatch, match=r"gradients of the layout lack component 'encoder\.1\.w'"):
        in_slot_order(NESTED.slots, arrays, "the layout")
    with pytest.raises(LayoutMismatch, match="two gradients of the layout have one name"):
        in_slot_order(NESTED.slots, {"head": {"w": np.ones(4)}, "head.w": np.ones(4), "encoder": []}, "the layout")


@given(draw.layouts, st.randoms())
def test_a_mapping_in_any_order_is_the_sequence(layout, random):
    shuffled = list(layout.slots)
    random.shuffle(shuffled)
    assert in_slot_order(layout.slots, {slot.name: slot for slot in shuffled}, "the layout") == list(layout.slots)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (
            [1, 2],
            r"another number of gradients than block 0 has: got 2, expected 3: layers.0.a, layers.0.b, layers.0.c",
        ),
        ([1, 2, 3, 4], "another number of gradients than block 0 has: got 4, expected 3"),
        ({}, r"gradients of block 0 lack component 'a' \(and 2 more\): got 0 components, expected 3"),
        ({"a": 1, "c": 3}, "gradients of block 0 lack component 'b': got 2 components: a, c, expected 3"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "block 0 has no component 'd': expected 3"),
        ({"a": 1, "layers.0.a": 1, "b": 2, "c": 3}, "block 0 has no component 'a'"),
        ({"layers.1.a": 1, "b": 2, "c": 3}, "gradients of block 0 lack component 'a'"),
        ({"a": 1, "b": 2, "c": 3, 4: 4, "e": 5}, r"block 0 has no component 4 \(and 1 more\)"),
        ("abc", "neither a mapping nor a sequence: got str"),
        (b"abc", "neither a mapping nor a sequence: got bytes"),
        (np.zeros(3), "neither a mapping nor a sequence: got ndarray"),
        (iter([1, 2, 3]), "neither a mapping nor a sequence: got list_iterator"),
        ({1, 2, 3}, "neither a mapping nor a sequence: got set"),
        (None, "neither a mapping nor a sequence: got NoneType"),
    ],
)
def test_refused(gradients, message):
    with pytest.raises(LayoutMismatch, match=message):
        ordered(gradients)


def test_a_mapping_costs_what_its_names_are_and_not_their_square():
    def work_of(size):
        slots = GradientLayout.of({Name(f"layers.0.w{i}"): (1,) for i in range(size)}).slots
        gradients = {Name(f"w{i}"): i for i in range(size)}
        return lambda: in_slot_order(slots, gradients, "block 0", "layers.0.")

    assert growth(work_of, 100) < 2.2


def test_long_lists_of_names_are_cut():
    slots = GradientLayout.of({f"w{i}": (1,) for i in range(12)}).slots
    with pytest.raises(LayoutMismatch, match=r"expected 12: w0, .*, w8, \.\.\."):
        in_slot_order(slots, [], "the layout")


class TestNestedNumbers:
    """In block "0" the short name of "0.0.w" is "0.w", which is the full name of another."""

    SLOTS = GradientLayout.of({"0.w": (1,), "0.0.w": (1,)}).blocks[0].slots

    def test_full_names(self):
        assert in_slot_order(self.SLOTS, {"0.0.w": 2, "0.w": 1}, "block 0", "0.") == [1, 2]

    @pytest.mark.parametrize("gradients", [{"0.w": 1}, {"0.w": 1, "w": 2}])
    def test_one_gradient_never_serves_two_slots(self, gradients):
        with pytest.raises(LayoutMismatch, match=r"lack component '0\.0\.w'"):
            in_slot_order(self.SLOTS, gradients, "block 0", "0.")


@pytest.mark.parametrize(
    ("shape", "slot_shape", "fits"),
    [
        ((2, 3), (2, 3), True),
        ((6,), (2, 3), True),
        ((3, 2), (2, 3), False),  # the same number of elements, but transposed
        ((1, 6), (2, 3), False),
        ((5,), (2, 3), False),
        ((1,), (), True),
        ((), (1,), False),
        ((0,), (3, 0), True),
        ((0, 3), (3, 0), False),
    ],
)
def test_a_gradient_has_the_slots_shape_or_is_flat(shape, slot_shape, fits):
    view, slot = host_buffer(np.zeros(shape, np.float32), "w"), Slot("w", slot_shape, 0, None)
    if fits:
        assert matched_views([slot, slot], [None, view], lambda sources, _: list(sources)) == [None, view]
        return
    with pytest.raises(LayoutMismatch, match="component 'w' has another shape") as refusal:
        matched_views([slot], [view], lambda sources, _: list(sources))
    assert refusal.value.got == f"{shape}, {view.size} elements"
    assert refusal.value.expected.startswith(f"{slot_shape}, {slot.size} elements")
