"""A caller's gradients find their slots: each once, in order, in its shape, or the error says which does not."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import strategies as draw
from devices import nothing_is_launched, put_all, raw
from hypothesis import given
from hypothesis import strategies as st
from operations import Name, growth

from gradengine.accumulate.destinations import destinations_of, handed_back
from gradengine.accumulate.gradients import in_slot_order, matched_views
from gradengine.arrays.host import host_buffer
from gradengine.errors import BufferRefused, LayoutMismatch
from gradengine.layout import GradientLayout, Slot

BLOCK = GradientLayout.of({"layers.0.a": (1,), "layers.0.b": (2,), "layers.0.c": (3,)}).blocks[0]
NESTED = GradientLayout.of({"encoder": [{"w": (1,), "b": (2,)}, {"w": (3,)}], "head": {"w": (4,)}})


def ordered(gradients):
    return list(in_slot_order(BLOCK.slots, gradients, "block 0", "layers.0."))


@pytest.mark.parametrize(
    "gradients",
    [[1, 2, 3], (1, 2, 3), {"layers.0.a": 1, "layers.0.b": 2, "layers.0.c": 3}, {"c": 3, "layers.0.b": 2, "a": 1}],
)
def test_in_the_order_of_the_slots_by_full_or_short_names(gradients):
    assert ordered(gradients) == [1, 2, 3]


@given(draw.layouts, st.randoms())
def test_a_mapping_in_any_order_is_the_sequence(layout, random):
    shuffled = list(layout.slots)
    random.shuffle(shuffled)
    assert in_slot_order(layout.slots, {slot.name: slot for slot in shuffled}, "the layout") == list(layout.slots)


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
    def arrays(value):
        if isinstance(value, dict):
            return {name: arrays(item) for name, item in value.items()}
        if isinstance(value, list):
            return [arrays(item) for item in value]
        return SimpleNamespace(shape=(), number=value)

    assert [a.number for a in in_slot_order(NESTED.slots, arrays(gradients), "the layout")] == [1, 2, 3, 4]


def test_what_a_container_lacks_or_has_twice_is_named_by_its_path():
    arrays = {"encoder": [{"w": np.ones(1), "b": None}, {}], "head": {"w": np.ones(4)}}
    with pytest.raises(LayoutMismatch, match=r"lack component 'encoder\.1\.w'"):
        in_slot_order(NESTED.slots, arrays, "the layout")
    with pytest.raises(LayoutMismatch, match="have one name"):
        in_slot_order(NESTED.slots, {"head": {"w": np.ones(4)}, "head.w": np.ones(4), "encoder": []}, "the layout")


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([1, 2], r"block 0: got 2, expected 3: layers\.0\.a, layers\.0\.b, layers\.0\.c"),
        ([1, 2, 3, 4], "got 4, expected 3"),
        ({}, r"block 0 lack component 'a' \(and 2 more\): got 0 components, expected 3"),
        ({"a": 1, "c": 3}, "lack component 'b': got 2 components, expected 3"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "no component 'd': expected 3"),
        ({"a": 1, "layers.0.a": 1, "b": 2, "c": 3}, "no component 'a'"),
        ({"layers.1.a": 1, "b": 2, "c": 3}, "lack component 'a'"),
        (defaultdict(int, {"layers.0.a": 1, "layers.0.b": 2, "layers.0.d": 3}), "lack component '(layers.0.)?c'"),
        ({"a": 1, "b": 2, "c": 3, 4: 4, "e": 5}, r"no component 4 \(and 1 more\)"),
        ("abc", "got str"),
        (b"abc", "got bytes"),
        (np.zeros(3), "got ndarray"),
        (iter([1, 2, 3]), "got list_iterator"),
        (None, "got NoneType"),
    ],
)
def test_refused(gradients, message):
    size = len(gradients) if hasattr(gradients, "__len__") else None
    with pytest.raises(LayoutMismatch, match=message):
        ordered(gradients)
    assert size is None or len(gradients) == size  # nothing was asked that a mapping makes when asked


def test_a_mapping_costs_what_its_names_are_and_not_their_square():
    def work_of(size):
        slots = GradientLayout.of({Name(f"layers.0.w{i}"): (1,) for i in range(size)}).slots
        gradients = {Name(f"w{i}"): i for i in range(size)}
        return lambda: in_slot_order(slots, gradients, "block 0", "layers.0.")

    assert growth(work_of, 100) < 2.2


def test_a_short_name_that_is_anothers_full_name_never_serves_two_slots():
    """In block "0" the short name of "0.0.w" is "0.w"."""
    slots = GradientLayout.of({"0.w": (1,), "0.0.w": (1,)}).blocks[0].slots
    assert in_slot_order(slots, {"0.0.w": 2, "0.w": 1}, "block 0", "0.") == [1, 2]
    for gradients in ({"0.w": 1}, {"0.w": 1, "w": 2}):
        with pytest.raises(LayoutMismatch, match=r"lack component '0\.0\.w'"):
            in_slot_order(slots, gradients, "block 0", "0.")


@pytest.mark.parametrize(
    ("shape", "slot_shape", "fits"),
    [
        *[((2, 3), (2, 3), True), ((6,), (2, 3), True), ((1,), (), True), ((0,), (3, 0), True)],
        ((3, 2), (2, 3), False),  # the same number of elements, but transposed
        *[((1, 6), (2, 3), False), ((5,), (2, 3), False), ((), (1,), False), ((0, 3), (3, 0), False)],
    ],
)
def test_a_gradient_has_the_slots_shape_or_is_flat(shape, slot_shape, fits):
    view, slot = host_buffer(np.zeros(shape, np.float32), "w"), Slot("w", slot_shape)
    if fits:
        assert matched_views([slot, slot], [None, view], lambda sources, _: list(sources)) == [None, view]
        return
    with pytest.raises(LayoutMismatch, match="'w'") as refusal:
        matched_views([slot], [view], lambda sources, _: list(sources))
    assert (refusal.value.got, refusal.value.expected) == (shape, slot_shape)


LAYOUT = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "empty": (0,), "head": (1,)})
NAMES = [slot.name for slot in LAYOUT.slots]


class TestDestinations:
    """Found by position, checked as a whole, named where one is refused."""

    @pytest.fixture
    def found(self, backend):
        """`destinations_of` with an arena on that device."""
        arena = backend.kernels.device.allocate(LAYOUT.arena_size)

        def find(out):
            return destinations_of(LAYOUT.slots, backend.kernels.device, arena, in_slot_order(LAYOUT.slots, out, "out"))

        find.arena = arena
        return find

    def out_on(self, backend, dtype=np.float32):
        return put_all(backend, [np.ones(slot.shape, dtype) for slot in LAYOUT.slots])

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_a_sequence_a_mapping_in_any_order_and_flat_ones(self, found, backend, dtype):
        out = self.out_on(backend, dtype)
        pointers = [backend.kernels.device.view(array, "array").pointer for array in out]
        named = dict(reversed(list(zip(NAMES, out, strict=True))))
        for given_out in (out, named, [array.reshape(-1) for array in out]):
            got = found(given_out)
            assert list(got) == [0, 1, 2, 3]
            assert [buffer.pointer for buffer in got.values()] == pointers
            assert [(buffer.size, buffer.dtype) for buffer in got.values()] == [(size, dtype) for size in (15, 7, 0, 1)]

    def test_none_is_not_wanted(self, found, backend):
        out = self.out_on(backend)
        assert list(found([None, out[1], None, None])) == [1]
        with pytest.raises(LayoutMismatch, match="no destination"):
            found([None] * 4)

    def test_refused_as_a_whole(self, found, backend):
        good, memory = self.out_on(backend), backend.put(np.ones(22, np.float32))
        last, named = backend.kernels.device.view(good[3], "last"), dict(zip(NAMES, good, strict=True))
        own = raw(found.arena.part(LAYOUT.slots[1].offset, LAYOUT.slots[1].stop))
        for out, message in (
            (good[:3], "out: got 3, expected 4"),
            ({name: named[name] for name in NAMES[:3]}, "lack component 'head'"),
            ({**named, "tail": None}, "no component 'tail'"),
            ("abc", "got str"),
            ([*good[:3], memory[:2]], r"'head' has the wrong shape: got \(2,\)"),
            ([*good[:3], backend.put(np.ones(1))], "'head' .* got float64"),
            ([*good[:3], raw(last, writable=False)], "'head' is read-only"),
            ([memory[:15], memory[14:21], None, None], "'layers.0.w' and 'layers.1.w' overlap"),
            ([memory[:15], None, None, memory[:1]], "'layers.0.w' and 'head' overlap"),
            ([None, own, None, None], "'layers.1.w' and 'the arena' overlap"),
        ):
            with nothing_is_launched(backend), pytest.raises((LayoutMismatch, BufferRefused), match=message):
                found(out)

    def test_what_was_handed_back(self):
        out = [np.ones(1) for _ in NAMES]
        given_back = handed_back(LAYOUT.slots, [out[0], None, None, out[3]])
        assert list(given_back) == ["layers.0.w", "head"]
        assert given_back["head"] is out[3]
        assert handed_back(LAYOUT.slots, out) == dict(zip(NAMES, out, strict=True))
