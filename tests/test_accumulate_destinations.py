"""Destinations are checked once, and those of the same form are written where they lie."""

import gc
import sys
import weakref

import numpy as np
import pytest
import strategies as draw
from backends import available
from devices import Looked, all_on_host, on_host, put_all, raw
from emulated_torch import emulated_torch, tensors_of

from gradengine import GradientEngine, GradientLayout
from gradengine.accumulate.destinations import KnownDestinations
from gradengine.errors import BufferRefused, LayoutMismatch

LAYOUT = GradientLayout.of({"w": (4,), "v": (2, 3)})


@pytest.fixture
def lookup(backend):
    return Looked(backend.kernels.device)


@pytest.fixture
def arena(lookup):
    return lookup.allocate(LAYOUT.arena_size)


@pytest.fixture
def known(lookup, arena):
    return KnownDestinations(LAYOUT.slots, lookup, arena)


def arrays_of(backend, dtype=np.float32):
    return put_all(backend, [np.zeros(slot.shape, dtype) for slot in LAYOUT.slots])


def places(destinations):
    return [view.pointer for view in destinations.values()]


def test_the_second_time_nothing_is_looked_at(backend, lookup, known):
    out = arrays_of(backend)
    first = known.of(out)
    for given in (out, [*out]):
        again = known.of(given)
        assert places(again) == places(first)
        assert [view.dtype for view in again.values()] == ["float32", "float32"]
    assert lookup.looked == 2
    assert known.of(out) is known.of(out)


def test_sets_of_one_form_are_looked_at_once(backend, lookup, known):
    sets = [arrays_of(backend) for _ in range(3)]
    for out in sets * 3:
        assert places(known.of(out)) == [backend.kernels.device.view(array, "w").pointer for array in out]
    assert lookup.looked == 2
    assert known.of(sets[0]) is known.of(sets[0])


def test_nobodys_memory_is_kept(backend, known):
    out = arrays_of(backend)
    gone = weakref.ref(out[0])
    known.of(out)
    known.of(out)
    del out
    gc.collect()
    assert gone() is None


def test_what_is_refused_is_refused_again(backend, arena, known):
    first, second = arrays_of(backend)
    ours, other = raw(arena.part(0, 4)), backend.put(np.zeros(5, np.float32))
    for out, says in (
        ([first, other], "'v' has the wrong shape"),
        ([None, None], "destination"),
        ([ours, second], "arena"),
        ([raw(arena.part(0, 4)), raw(arena.part(4, 10))], "arena"),
    ):
        for _ in range(2):
            with pytest.raises((BufferRefused, LayoutMismatch), match=says):
                known.of(out)


def test_an_array_that_became_read_only_is_refused():
    device, out = available("host").kernels.device, [np.zeros(slot.shape, np.float32) for slot in LAYOUT.slots]
    known = KnownDestinations(LAYOUT.slots, device, device.allocate(LAYOUT.arena_size))
    known.of(out)
    out[0].flags.writeable = False
    with pytest.raises(BufferRefused, match="'w' is read-only"):
        known.of(out)


def test_torchs_on_the_host_are_known_too_one_that_is_not_wanted_among_them():
    torch = pytest.importorskip("torch")
    lookup = Looked(available("host").kernels.device)
    known = KnownDestinations(LAYOUT.slots, lookup, lookup.allocate(LAYOUT.arena_size))
    out = [None, torch.zeros(2, 3)]
    for _ in range(3):
        assert places(known.of(out)) == [out[1].data_ptr()]
    assert lookup.looked == 1


@pytest.mark.parametrize("dtype", list(draw.DTYPES))
def test_each_step_is_handed_back_there_whatever_comes_between(backend, dtype):
    """Other sets, and steps in the arena."""
    engine, plain = (GradientEngine(LAYOUT, backend.kernels, max_norm=0.5) for _ in range(2))
    sets = [arrays_of(backend, draw.DTYPES[dtype]) for _ in range(2)]
    for step, out in enumerate((sets[0], sets[0], sets[1], None, sets[0], sets[1], sets[0])):
        for each in (engine, plain):
            each.add(put_all(backend, draw.random_gradients(step, LAYOUT.slots)))
        engine.step(out=out)
        wanted = all_on_host(plain.step().gradients)
        for slot, array in zip(LAYOUT.slots, out or [], strict=out is not None):
            draw.assert_same_bits(on_host(array), wanted[slot.name].astype(draw.DTYPES[dtype]))


def test_torchs_are_written_behind_the_stream_that_torch_is_on_now(device, monkeypatch):
    waited = []

    class Waits(Looked):
        def wait_for(self, producers):
            waited.append({producer.stream() for producer in producers})
            self._device.wait_for(producers)

    monkeypatch.setitem(sys.modules, "torch", emulated_torch(device.xp.cuda.get_current_stream()))
    lookup = Waits(device.kernels.device)
    known = KnownDestinations(LAYOUT.slots, lookup, lookup.allocate(LAYOUT.arena_size))
    out = tensors_of(arrays_of(device))
    known.of(out)
    sys.modules["torch"].current = side = device.xp.cuda.Stream(non_blocking=True)
    known.of(out)
    assert lookup.looked == 2
    assert waited[-1] == {side.ptr}
