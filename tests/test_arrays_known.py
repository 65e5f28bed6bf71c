"""Arrays known again: the same objects where they lay, and nobody's memory kept."""

import gc
import weakref

import numpy as np
import pytest

from gradengine import BlockGradientSet, GradientEngine, GradientLayout, RawBuffer, clip_by_global_norm
from gradengine.arrays.known import KnownArrays, destination_reader_of, read_each, read_numpy, reader_of
from gradengine.errors import BufferRefused, LayoutMismatch

LAYOUT = GradientLayout.of([(4, 6), (8,)])


def arrays(value=1.0):
    return [np.full(shape, value, np.float32) for shape in ((4, 6), (8,))]


def known(sources):
    return KnownArrays(sources, reader_of(sources))


class TestKnown:
    def test_the_same_arrays_are(self):
        given = arrays()
        assert known(given).are(given)
        assert known(given).are(list(given))
        assert not known(given).are(arrays())
        assert not known(given).are(given[::-1])

    def test_none_has_its_place(self):
        given = [None, arrays()[0]]
        assert known(given).are(given)
        assert not known(given).are(given[::-1])

    @pytest.mark.parametrize("change", [{"shape": (6, 4)}, {"shape": (24,)}, {"dtype": np.int32}])
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # NumPy would rather have views
    def test_an_array_that_was_changed_in_place_is_not(self, change):
        given = arrays()
        found = known(given)
        for name, value in change.items():
            setattr(given[0], name, value)
        assert not found.are(given)

    def test_numpy_gives_no_array_other_memory_while_it_is_known(self):
        """So that its address need not be asked: a weak reference is enough, whatever is not checked."""
        given = [np.zeros(4, np.float32)]
        found = known(given)
        with pytest.raises(ValueError, match="cannot resize"):
            given[0].resize(1 << 20, refcheck=False)
        assert found.are(given)

    def test_no_array_is_kept(self):
        given = arrays()
        found, gone = known(given), weakref.ref(given[1])
        del given[1]
        gc.collect()
        assert gone() is None
        assert not found.are_alive
        assert not found.are([given[0], np.ones(8, np.float32)])

    def test_kinds_that_cannot_be_asked_at_once(self):
        array = arrays()[0]
        assert reader_of([array, RawBuffer(array.ctypes.data, 24, "float32", owner=array)]) is None
        assert reader_of([np.ma.masked_array(array)]) is None
        assert reader_of([None]) is None
        assert reader_of([array, None]) is read_numpy
        assert destination_reader_of([RawBuffer(array.ctypes.data, 24, "float32", owner=array)]) is None
        assert read_each([array, None]) == [None, None]


class TestUse:
    def test_values_are_read_anew_at_each_add(self):
        engine, given = GradientEngine(LAYOUT), arrays()
        for value in (1, 2, 3):
            for array in given:
                array[...] = value
            engine.add(given)
        assert [float(array.flat[0]) for array in engine.step(deferred=True).sums.values()] == [6, 6]

    def test_an_array_that_has_another_shape_now_is_refused(self):
        engine, given = GradientEngine(LAYOUT), arrays()
        engine.add(given)
        given[0] = given[0].reshape(6, 4)
        with pytest.raises(LayoutMismatch, match="has another shape"):
            engine.add(given)

    def test_a_known_array_that_became_read_only_is_not_clipped(self):
        given = arrays()
        for _ in range(2):
            clip_by_global_norm(given, 1.0)
        before = [array.copy() for array in given]
        given[1].setflags(write=False)
        with pytest.raises(BufferRefused, match="read-only"):
            clip_by_global_norm(given, 0.5)
        assert all((array == was).all() for array, was in zip(given, before, strict=True))

    def test_known_arrays_are_clipped_as_new_ones_are(self):
        given = arrays(3.0)
        for bound in (8.0, 4.0, 2.0):
            fresh = [array.copy() for array in given]
            assert clip_by_global_norm(given, bound) == clip_by_global_norm(fresh, bound)
            assert [array.tobytes() for array in given] == [array.tobytes() for array in fresh]

    def test_a_block_takes_part_of_known_arrays(self):
        layout = GradientLayout.of({"layers.0.w": (3,), "head": (2,)})
        block, given = BlockGradientSet(layout.blocks[0]), [np.ones(3, np.float32)]
        for _ in range(2):
            block.accumulate(given)
        assert block.components["w"].tolist() == [2, 2, 2]
