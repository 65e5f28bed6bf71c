"""Arrays are looked at once, and known again only while they are the same at the same place."""

import gc
import mmap
import sys
import weakref

import numpy as np
import pytest
from devices import on_host, put_all, raw
from emulated_torch import Tensor, emulated_torch, tensors_of
from producers import Producer

from gradengine import GradientEngine, GradientLayout
from gradengine.accumulate.intake import Intake
from gradengine.errors import BufferRefused, LayoutMismatch
from gradengine.kernels import ADDRESS, SlotSet

LAYOUT = GradientLayout.of([(4,), (2, 3)])
PLACES = SlotSet(range(2))


class Looked:
    """A device that counts how often an array is looked at."""

    def __init__(self, device):
        self._device, self.looked = device, 0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def views(self, sources, components):
        self.looked += len(sources)
        return self._device.views(sources, components)


@pytest.fixture
def lookup(device):
    return Looked(device.kernels.device)


@pytest.fixture
def arrivals(lookup):
    return Intake(lookup, lookup.allocate(64))


def arrays_of(device, value=1.0):
    return put_all(device, [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots])


def pointers(contribution):
    return [int(address) & ADDRESS for address in contribution.addresses]


def test_the_second_time_nothing_is_looked_at(device, lookup, arrivals):
    arrays = arrays_of(device)
    for _ in range(3):
        contribution = arrivals.contribution(PLACES, LAYOUT.slots, list(arrays))
        assert pointers(contribution) == [array.data.ptr for array in arrays]
    assert lookup.looked == 2


def test_several_sets_are_known(device, lookup, arrivals):
    sets = [arrays_of(device) for _ in range(4)]
    for arrays in sets * 3:
        arrivals.contribution(PLACES, LAYOUT.slots, arrays)
    assert lookup.looked == 4 * 2


def test_other_arrays_in_the_same_list_are_others(device, lookup, arrivals):
    arrays = arrays_of(device)
    arrivals.contribution(PLACES, LAYOUT.slots, arrays)
    arrays[1] = arrays_of(device)[1]
    assert pointers(arrivals.contribution(PLACES, LAYOUT.slots, arrays)) == [array.data.ptr for array in arrays]


def test_a_gradient_more_or_less_is_another_set(device, arrivals):
    first, second = arrays_of(device)
    assert pointers(arrivals.contribution(PLACES, LAYOUT.slots, [first, None])) == [first.data.ptr, 0]
    assert pointers(arrivals.contribution(PLACES, LAYOUT.slots, [first, second])) == [first.data.ptr, second.data.ptr]
    contribution = arrivals.contribution(PLACES, LAYOUT.slots, [first, None])
    assert contribution.present.tolist() == [True, False]


@pytest.fixture
def tensors(device, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", emulated_torch(device.xp.cuda.get_current_stream()))
    return tensors_of(arrays_of(device))


def test_tensors_are_known_again(lookup, arrivals, tensors):
    for _ in range(3):
        contribution = arrivals.contribution(PLACES, LAYOUT.slots, tensors)
        assert pointers(contribution) == [tensor.data_ptr() for tensor in tensors]
    assert lookup.looked == 2


def test_a_tensor_that_moved_is_looked_at_again(device, lookup, arrivals, tensors):
    arrivals.contribution(PLACES, LAYOUT.slots, tensors)
    tensors[0].array = arrays_of(device)[0]
    contribution = arrivals.contribution(PLACES, LAYOUT.slots, tensors)
    assert pointers(contribution) == [tensor.data_ptr() for tensor in tensors]
    assert lookup.looked == 4


def test_a_tensor_of_another_dtype_now_is_looked_at_again(arrivals, tensors):
    arrivals.contribution(PLACES, LAYOUT.slots, tensors)
    tensors[0].dtype = "torch.float64"
    with pytest.raises(BufferRefused, match="got float64"):
        arrivals.contribution(PLACES, LAYOUT.slots, tensors)


def test_new_tensors_at_the_same_addresses_are_looked_at(device, lookup, arrivals, tensors):
    """As torch makes them where gradients are set to None between micro-batches."""
    arrivals.contribution(PLACES, LAYOUT.slots, tensors)
    again = [Tensor(tensor.array) for tensor in tensors]
    assert pointers(arrivals.contribution(PLACES, LAYOUT.slots, again)) == [tensor.data_ptr() for tensor in tensors]
    assert lookup.looked == 4


def test_a_loop_that_makes_new_arrays_is_noticed(device, lookup, arrivals, tensors):
    """To remember them costs as much as to look at them, and nothing comes of it."""
    for _ in range(100):
        arrivals.contribution(PLACES, LAYOUT.slots, [Tensor(tensor.array) for tensor in tensors])
    assert arrivals._known[PLACES] == []
    for _ in range(2):
        contribution = arrivals.contribution(PLACES, LAYOUT.slots, tensors)
        assert pointers(contribution) == [tensor.data_ptr() for tensor in tensors]
    assert lookup.looked == 102 * 2


def test_sets_that_came_again_before_they_went_are_no_reason_to_give_up(device, lookup, arrivals):
    """As a loop that changes its buffers now and then."""
    for _ in range(100):
        arrays = arrays_of(device)
        for _ in range(2):
            arrivals.contribution(PLACES, LAYOUT.slots, arrays)
    assert lookup.looked == 100 * 2


def test_pointers_are_known_again_while_their_owner_lives(device, lookup, arrivals):
    arrays, owner = arrays_of(device), mmap.mmap(-1, 4096)
    pointing = [raw(device.kernels.device.view(array, "w"), owner=owner) for array in arrays]
    for _ in range(3):
        arrivals.contribution(PLACES, LAYOUT.slots, pointing)
    assert lookup.looked == 2
    owner.close()
    with pytest.raises(BufferRefused, match="'0' is in memory that its owner has freed: got a mmap that is closed"):
        arrivals.contribution(PLACES, LAYOUT.slots, pointing)


def test_exports_are_asked_for_each_time(device, lookup, arrivals):
    """An export is what orders the producer's work before ours."""
    arrays = arrays_of(device)
    producers = [Producer(np.empty(a.shape, a.dtype), data=a.data.ptr, device=(2, a.device.id)) for a in arrays]
    for _ in range(3):
        arrivals.contribution(PLACES, LAYOUT.slots, producers)
    assert [len(producer.asked) for producer in producers] == [3, 3]


def test_so_are_those_of_what_wraps_an_array_of_the_devices_own(device, lookup, arrivals):
    """It has the array's address where the array has it, and a stream that only its export knows."""
    arrays = arrays_of(device)
    producers = [Producer(np.empty(a.shape, a.dtype), data=a.data.ptr, device=(2, a.device.id)) for a in arrays]
    for producer, array in zip(producers, arrays, strict=True):
        producer.data, producer.__cuda_array_interface__ = array.data, array.__cuda_array_interface__
    for _ in range(3):
        arrivals.contribution(PLACES, LAYOUT.slots, producers)
    assert [len(producer.asked) for producer in producers] == [3, 3]


def test_an_empty_view_of_the_arena_is_no_gradient_in_it(backend):
    engine = GradientEngine(GradientLayout.of({"first": (64,), "empty": (0,), "last": (64,)}), backend.kernels)
    gradients = put_all(backend, {"first": np.ones(64, np.float32), "last": np.ones(64, np.float32)})
    first = engine.accumulator.target_of(engine.layout.slot("first"))
    for _ in range(2):
        engine.add({**gradients, "empty": raw(first, pointer=first.pointer + 128, size=0)})
        assert on_host(engine.step().gradients["last"]).tolist() == [1] * 64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("hold", [1, 3])
def test_new_torch_gradients_of_16_bits_are_read_as_such_in_each_micro_batch(dtype, hold):
    torch = pytest.importorskip("torch")
    engine = GradientEngine(GradientLayout.of([(1000,)]), hold=hold)
    for value in range(1, 30):
        engine.add([torch.full((1000,), value, dtype=getattr(torch, dtype))], weight=2)
        assert set(engine.step().gradients["0"].tolist()) == {value}


def test_nobodys_memory_is_kept(device, arrivals):
    arrays = arrays_of(device)
    gone = weakref.ref(arrays[0])
    arrivals.contribution(PLACES, LAYOUT.slots, arrays)
    del arrays
    gc.collect()
    assert gone() is None


def test_a_set_of_which_one_is_gone_is_not_known_any_more(device, lookup, arrivals):
    """Its id may be another array's from then on."""
    for value in range(20):
        arrays = arrays_of(device, value)
        contribution = arrivals.contribution(PLACES, LAYOUT.slots, arrays)
        assert pointers(contribution) == [array.data.ptr for array in arrays]
        del arrays, contribution
    assert lookup.looked == 20 * 2


def test_what_is_refused_is_refused_again(device, arrivals):
    wrong = put_all(device, [np.ones(5, np.float32), np.ones(6, np.float32)])
    for _ in range(2):
        with pytest.raises(LayoutMismatch, match="'0' has another shape"):
            arrivals.contribution(PLACES, LAYOUT.slots, wrong)
