"""The producers that tests lend by DLPack: what they lend lives until its consumer lets it go, and no longer."""

import gc
import weakref

import numpy as np
import producers
import pytest
from producers import Producer


def weakable(value):
    return np.full(1000, value, np.float32).view(type("Weakable", (np.ndarray,), {}))


def produced(*, versioned):
    """A producer, and its array for as long as that is alive."""
    array = weakable(3)
    return Producer(array, versioned=versioned), weakref.ref(array)


OF_NUMPY = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # whether NumPy itself takes versioned capsules


@pytest.mark.parametrize("versioned", [True, False] if OF_NUMPY else [False])
def test_what_numpy_took_lives_until_numpy_lets_it_go(versioned):
    """It reads the deleter from the producer's own memory, when the producer may long be gone."""
    producer, alive = produced(versioned=versioned)
    freed, taken = producer.freed, np.from_dlpack(producer)
    del producer
    gc.collect()
    assert alive() is not None
    assert freed == []
    assert (taken == 3).all()
    del taken
    gc.collect()
    assert alive() is None
    assert len(freed) == 1


@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_that_nobody_took_frees_it(versioned):
    producer, alive = produced(versioned=versioned)
    capsules, freed = [producer.__dlpack__(), producer.__dlpack__()], producer.freed
    del producer
    for count in (1, 2):
        assert alive() is not None
        capsules.pop()
        gc.collect()
        assert len(freed) == count
    assert alive() is None


def test_nothing_stays():
    gc.collect()
    before = len(producers.LENT)
    for _ in range(100):
        assert (np.from_dlpack(Producer(weakable(1), versioned=OF_NUMPY)) == 1).all()
    gc.collect()
    assert len(producers.LENT) == before
