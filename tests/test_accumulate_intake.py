"""Gradients are looked at once, and those of the same form are taken where they lie."""

import gc
import sys
import weakref

import numpy as np
import pytest
from devices import Looked, on_host, put_all, raw
from emulated_torch import Tensor, emulated_torch, tensors_of
from producers import Producer

from gradengine import GradientEngine, GradientLayout
from gradengine.accumulate.intake import Intake
from gradengine.errors import BufferRefused, LayoutMismatch
from gradengine.kernels.operands import ADDRESS
from gradengine.layout.slots import Span

LAYOUT = GradientLayout.of([(4,), (2, 3)])
WHOLE = Span.of(LAYOUT.slots, "the layout")


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


def test_sets_of_one_form_are_looked_at_once(device, lookup, arrivals):
    sets = [arrays_of(device) for _ in range(4)]
    for arrays in sets * 3:
        contribution = arrivals.contribution(WHOLE, list(arrays))
        assert pointers(contribution) == [array.data.ptr for array in arrays]
        assert contribution.present.tolist() == [True, True]
    assert lookup.looked == 2


def test_another_array_or_none_in_the_same_list_is_another_set(device, arrivals):
    first, second = arrays_of(device)
    given = [first, None]
    for other in (None, second, arrays_of(device)[1], None):
        given[1] = other
        contribution = arrivals.contribution(WHOLE, given)
        assert pointers(contribution) == [first.data.ptr, 0 if other is None else other.data.ptr]
        assert contribution.present.tolist() == [True, other is not None]


@pytest.fixture
def tensors(device, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", emulated_torch(device.xp.cuda.get_current_stream()))
    return tensors_of(arrays_of(device))


def test_tensors_that_moved_or_are_new_are_taken_where_they_lie(device, lookup, arrivals, tensors):
    again = [Tensor(tensor.array) for tensor in tensors]
    for given in (tensors, tensors, again, tensors):
        if given is again:
            tensors[0].array = arrays_of(device)[0]
        contribution = arrivals.contribution(WHOLE, given)
        assert pointers(contribution) == [tensor.data_ptr() for tensor in given]
    assert lookup.looked == 2


def test_a_tensor_of_another_dtype_now_is_looked_at_again(arrivals, tensors):
    arrivals.contribution(WHOLE, tensors)
    tensors[0].dtype = "torch.float64"
    with pytest.raises(BufferRefused, match="got float64"):
        arrivals.contribution(WHOLE, tensors)


class TestByTheirForm:
    """A loop that makes new arrays of one form has each taken as it lies."""

    @pytest.fixture(params=["torch", "CuPy"])
    def new(self, request, device, tensors):
        """New arrays, as a framework makes them for each micro-batch."""
        made = tensors_of if request.param == "torch" else list
        return lambda value=1.0: made(arrays_of(device, value))

    @pytest.fixture
    def add(self, arrivals):
        def add(arrays):
            return arrivals.contribution(WHOLE, arrays)

        return add

    @pytest.fixture
    def noticed(self, new, add):
        add(new())

    @pytest.fixture
    def lies_at(self):
        return lambda array: array.data_ptr() if isinstance(array, Tensor) else array.data.ptr

    def test_they_are_looked_at_no_more(self, lookup, new, add, noticed, lies_at):
        looked = lookup.looked
        for _ in range(5):
            arrays = new()
            contribution = add(arrays)
            assert pointers(contribution) == [lies_at(array) for array in arrays]
            assert contribution.present.tolist() == [True, True]
        assert lookup.looked == looked

    def test_another_form_is_looked_at(self, device, lookup, new, add, noticed):
        looked = lookup.looked
        made = type(new()[0])
        halves = put_all(device, [np.ones(slot.shape, np.float16) for slot in LAYOUT.slots])
        halves = tensors_of(halves) if made is Tensor else halves
        contribution = add(halves)
        assert lookup.looked == looked + 2
        assert [int(address) >> 56 for address in contribution.addresses] == [1, 1]

    def test_what_would_be_refused_is(self, device, arrivals, new, add, noticed):
        wrong = put_all(device, [np.ones(4, np.float32), np.ones(5, np.float32)])
        strided = put_all(device, [np.ones(4, np.float32), np.ones((3, 2), np.float32)])
        strided[1] = strided[1].T
        ours = [device.kernels.device.array(arrivals._arena.part(0, 4), (4,)), arrays_of(device)[1]]
        as_they_come = tensors_of if isinstance(new()[0], Tensor) else list
        for arrays, says in ((wrong, "'1' has the wrong"), (strided, "'1' is not contiguous"), (ours, "own arena")):
            for _ in range(2):
                with pytest.raises((BufferRefused, LayoutMismatch), match=says):
                    add(as_they_come(arrays))

    def test_one_without_a_gradient_is_looked_at(self, lookup, new, add, noticed):
        assert add([new()[0], None]).present.tolist() == [True, False]

    def test_nobodys_memory_is_kept(self, new, add, noticed):
        arrays = new()
        gone = weakref.ref(arrays[0])
        add(arrays)
        del arrays
        gc.collect()
        assert gone() is None


def test_tensors_are_taken_by_their_form_behind_the_stream_that_torch_is_on_now(device, arrivals, tensors):
    def producers():
        contribution = arrivals.contribution(WHOLE, tensors_of(arrays_of(device)))
        return {producer.stream() for producer in contribution.producers}

    for _ in range(3):
        assert producers() == {sys.modules["torch"].current.ptr}
    sys.modules["torch"].current = side = device.xp.cuda.Stream(non_blocking=True)
    assert producers() == {side.ptr}


def test_pointers_are_known_again(device, lookup, arrivals):
    pointing = [raw(device.kernels.device.view(array, "w")) for array in arrays_of(device)]
    for _ in range(3):
        arrivals.contribution(WHOLE, pointing)
    assert lookup.looked == 2
    arrivals.contribution(WHOLE, [raw(device.kernels.device.view(array, "w")) for array in arrays_of(device)])
    assert lookup.looked == 4  # only a check finds out what lies at another address


@pytest.mark.parametrize("wraps_ours", [False, True])
def test_exports_are_asked_for_each_time(device, arrivals, wraps_ours):
    """An export is what orders the producer's work before ours, also of what has the address of an array of CuPy's."""
    arrays = arrays_of(device)
    producers = [Producer(np.empty(a.shape, a.dtype), data=a.data.ptr, device=(2, a.device.id)) for a in arrays]
    if wraps_ours:
        for producer, array in zip(producers, arrays, strict=True):
            producer.data, producer.__cuda_array_interface__ = array.data, array.__cuda_array_interface__
    for _ in range(3):
        arrivals.contribution(WHOLE, producers)
    assert [len(producer.asked) for producer in producers] == [3, 3]


def test_an_empty_view_of_the_arena_is_no_gradient_in_it(backend):
    engine = GradientEngine(GradientLayout.of({"first": (64,), "empty": (0,), "last": (64,)}), backend.kernels)
    gradients = put_all(backend, {"first": np.ones(64, np.float32), "last": np.ones(64, np.float32)})
    first = engine.accumulator.target_of(engine.layout.slot("first"))
    for _ in range(2):
        engine.add({**gradients, "empty": raw(first, pointer=first.pointer + 128, size=0)})
        assert on_host(engine.step().gradients["last"]).tolist() == [1] * 64


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("hold", [1, 3])
def test_new_torch_gradients_are_read_as_their_dtype_says_in_each_micro_batch(dtype, hold):
    torch = pytest.importorskip("torch")
    engine = GradientEngine(GradientLayout.of([(1000,)]), hold=hold)
    for value in range(1, 30):
        engine.add([torch.full((1000,), value, dtype=getattr(torch, dtype))], weight=2)
        assert set(engine.step().gradients["0"].tolist()) == {value}


def test_nobodys_memory_is_kept(device, arrivals):
    arrays = arrays_of(device)
    gone = weakref.ref(arrays[0])
    arrivals.contribution(WHOLE, arrays)
    del arrays
    gc.collect()
    assert gone() is None
