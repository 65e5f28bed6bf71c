"""Where a step hands its gradients back to: found by position, checked as a whole, named where it is refused."""

import numpy as np
import pytest
from devices import nothing_is_launched, put_all, raw

from gradengine.accumulate.destinations import destinations_of, handed_back
from gradengine.errors import BufferRefused, LayoutMismatch
from gradengine.layout import GradientLayout

LAYOUT = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "empty": (0,), "head": (1,)})
NAMES = [slot.name for slot in LAYOUT.slots]


@pytest.fixture
def found(backend):
    """`destinations_of` with an arena on that device."""
    arena = backend.kernels.device.allocate(LAYOUT.arena_size)

    def find(out):
        return destinations_of(LAYOUT.slots, backend.kernels.device, arena, out)

    find.arena = arena
    return find


def out_on(backend, dtype=np.float32):
    return put_all(backend, [np.ones(slot.shape, dtype) for slot in LAYOUT.slots])


def pointers(backend, arrays):
    return [backend.kernels.device.view(array, "array").pointer for array in arrays]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_sequence_in_layout_order(found, backend, dtype):
    out = out_on(backend, dtype)
    got = found(out)
    assert list(got) == [0, 1, 2, 3]
    assert [buffer.pointer for buffer in got.values()] == pointers(backend, out)
    assert {buffer.dtype for buffer in got.values()} == {np.dtype(dtype).name}


def test_a_mapping_in_any_order(found, backend):
    out = dict(zip(NAMES, out_on(backend), strict=True))
    got = found(dict(reversed(out.items())))
    assert [got[position].pointer for position in range(4)] == pointers(backend, out.values())


def test_none_is_not_wanted(found, backend):
    out = out_on(backend)
    assert list(found([None, out[1], None, None])) == [1]
    with pytest.raises(LayoutMismatch, match="out names no destination at all: got 4 times None"):
        found([None] * 4)


def test_flat_ones(found, backend):
    out = [array.reshape(-1) for array in out_on(backend)]
    assert [buffer.size for buffer in found(out).values()] == [15, 7, 0, 1]


def test_refused_as_a_whole(found, backend):
    good = out_on(backend)
    memory = backend.put(np.ones(22, np.float32))
    last = backend.kernels.device.view(good[3], "last")
    own = raw(found.arena.part(LAYOUT.slots[1].offset, LAYOUT.slots[1].stop))
    for out, message in (
        (good[:3], "another number of gradients than out has: got 3, expected 4"),
        ([*good, good[3]], "another number of gradients than out has: got 5, expected 4"),
        (dict(zip(NAMES[:3], good[:3], strict=True)), "gradients of out lack component 'head'"),
        ({**dict(zip(NAMES, good, strict=True)), "tail": None}, "out has no component 'tail'"),
        ("abc", "gradients of out are neither a mapping nor a sequence: got str"),
        ([*good[:3], memory[:2]], r"component 'head' has another shape: got \(2,\), 2 elements"),
        ([*good[:3], backend.put(np.ones(1))], "component 'head' has an unsupported dtype: got float64"),
        ([*good[:3], raw(last, writable=False)], "destination 'head' is read-only"),
        ([memory[:15], memory[14:21], None, None], "destinations 'layers.0.w' and 'layers.1.w' overlap in memory"),
        ([memory[:15], None, None, memory[:1]], "destinations 'layers.0.w' and 'head' overlap in memory"),
        ([None, own, None, None], "destinations 'layers.1.w' and 'the arena' overlap in memory"),
    ):
        with nothing_is_launched(backend), pytest.raises((LayoutMismatch, BufferRefused), match=message):
            found(out)


def test_neighbours_do_not_overlap(found, backend):
    memory = backend.put(np.ones(23, np.float32))
    assert list(found([memory[:15], memory[15:22], memory[3:3], memory[22:]])) == [0, 1, 2, 3]


def test_what_was_handed_back():
    out = [np.ones(1) for _ in NAMES]
    given = handed_back(LAYOUT.slots, [out[0], None, None, out[3]])
    assert list(given) == ["layers.0.w", "head"]
    assert given["head"] is out[3]
    named = dict(zip(NAMES, out, strict=True))
    assert handed_back(LAYOUT.slots, dict(reversed(named.items()))) == named
