"""Arrays are looked at once, and known again only while they are the same at the same place."""

import gc
import weakref

import numpy as np
import pytest
from devices import put_all

from gradengine import GradientLayout
from gradengine.arrivals import Arrivals
from gradengine.errors import BufferRefused, LayoutMismatch
from gradengine.kernels import ADDRESS, Places

LAYOUT = GradientLayout.of([(4,), (2, 3)])
PLACES = Places(range(2))


class Tensor:
    """What torch's tensors are as far as they are asked: an export that is counted, an address, a dtype."""

    def __init__(self, array):
        self.array, self.dtype, self.exports = array, "float32", 0

    def data_ptr(self):
        return self.array.data.ptr

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        self.exports += 1
        if self.dtype != "float32":
            raise BufferError("its dtype was changed")
        return self.array.__dlpack__(**options)


class Looked:
    """Kernels that count how often an array is looked at."""

    def __init__(self, kernels):
        self._kernels, self.views = kernels, 0

    def __getattr__(self, name):
        return getattr(self._kernels, name)

    def view(self, source, component):
        self.views += 1
        return self._kernels.view(source, component)


@pytest.fixture
def kernels(device):
    return Looked(device.kernels)


@pytest.fixture
def arrivals(kernels):
    return Arrivals(kernels, kernels.allocate(64))


def arrays_of(device, value=1.0):
    return put_all(device, [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots])


def pointers(contribution):
    return [int(address) & ADDRESS for address in contribution.addresses]


def test_the_second_time_nothing_is_looked_at(device, kernels, arrivals):
    arrays = arrays_of(device)
    for _ in range(3):
        contribution = arrivals.contribution(PLACES, LAYOUT.slots, list(arrays))
        assert pointers(contribution) == [array.data.ptr for array in arrays]
    assert kernels.views == 2


def test_several_sets_are_known(device, kernels, arrivals):
    sets = [arrays_of(device) for _ in range(4)]
    for arrays in sets * 3:
        arrivals.contribution(PLACES, LAYOUT.slots, arrays)
    assert kernels.views == 4 * 2


def test_other_arrays_in_the_same_list_are_others(device, kernels, arrivals):
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


def test_a_tensor_that_moved_is_looked_at_again(device, arrivals):
    tensors, others = [Tensor(array) for array in arrays_of(device)], arrays_of(device)
    arrivals.contribution(PLACES, LAYOUT.slots, tensors)
    tensors[0].array = others[0]
    contribution = arrivals.contribution(PLACES, LAYOUT.slots, tensors)
    assert pointers(contribution)[0] == others[0].data.ptr
    assert tensors[0].exports == 2


def test_a_tensor_of_another_dtype_now_is_looked_at_again(device, arrivals):
    tensors = [Tensor(array) for array in arrays_of(device)]
    arrivals.contribution(PLACES, LAYOUT.slots, tensors)
    tensors[0].dtype = "float16"
    with pytest.raises(BufferRefused, match="its dtype was changed"):
        arrivals.contribution(PLACES, LAYOUT.slots, tensors)


def test_nobodys_memory_is_kept(device, arrivals):
    arrays = arrays_of(device)
    gone = weakref.ref(arrays[0])
    arrivals.contribution(PLACES, LAYOUT.slots, arrays)
    del arrays
    gc.collect()
    assert gone() is None


def test_a_set_of_which_one_is_gone_is_not_known_any_more(device, kernels, arrivals):
    """Its id may be another array's from then on."""
    for value in range(20):
        arrays = arrays_of(device, value)
        contribution = arrivals.contribution(PLACES, LAYOUT.slots, arrays)
        assert pointers(contribution) == [array.data.ptr for array in arrays]
        del arrays, contribution
    assert kernels.views == 20 * 2


def test_what_is_refused_is_refused_again(device, arrivals):
    wrong = put_all(device, [np.ones(5, np.float32), np.ones(6, np.float32)])
    for _ in range(2):
        with pytest.raises(LayoutMismatch, match="'0' has another shape"):
            arrivals.contribution(PLACES, LAYOUT.slots, wrong)
