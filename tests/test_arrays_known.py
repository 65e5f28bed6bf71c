"""Arrays known again: the same objects where they lay, and nobody's memory kept."""

import gc
import weakref

import numpy as np
import pytest

from gradengine import GradientEngine, GradientLayout, RawBuffer, clip_by_global_norm
from gradengine.arrays.known import KnownArrays, destination_reader_of, numpy_form, read_each, reader_of
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch

LAYOUT = GradientLayout.of([(4, 6), (8,)])


def arrays(value=1.0):
    return [np.full(shape, value, np.float32) for shape in ((4, 6), (8,))]


def known(sources):
    return KnownArrays(sources, destination_reader_of(sources))


class TestKnown:
    def test_the_same_arrays_are(self):
        given = arrays()
        assert known(given).are(given)
        assert known(given).are(list(given))
        assert not known(given).are(arrays())
        assert not known(given).are(given[::-1])

    @pytest.mark.parametrize("change", [{"shape": (6, 4)}, {"shape": (24,)}, {"dtype": np.int32}])
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # NumPy would rather have views
    def test_an_array_that_was_changed_in_place_is_not(self, change):
        given = arrays()
        found, form = known(given), numpy_form(given, None)
        for name, value in change.items():
            setattr(given[0], name, value)
        assert not found.are(given)
        assert numpy_form(given, None) != form

    def test_no_array_is_kept_or_kept_from_being_resized(self):
        given = arrays()
        found, gone = known(given), weakref.ref(given[1])
        assert found.are(given)
        del given[1]
        gc.collect()
        assert gone() is None
        given[0].resize(1 << 20, refcheck=False)
        assert not found.are([given[0], np.ones(8, np.float32)])

    def test_what_is_not_read_as_it_lies(self):
        array, of_a_view = arrays()[0], np.frombuffer(bytearray(96), np.float32)
        assert numpy_form([array, None], None) is None
        assert numpy_form([np.ma.masked_array(array)], None) is None
        assert numpy_form([of_a_view], None) is None  # its memory is not an array's
        assert numpy_form([array[1:]], None) is not None
        assert numpy_form([array[1:]], array) is None  # ours
        assert numpy_form([], None) is None

    def test_kinds_that_cannot_be_asked_at_once(self):
        array = arrays()[0]
        raw = RawBuffer(array.ctypes.data, 24, "float32", owner=array)
        assert reader_of([array, raw]) is None
        assert reader_of([array]) is None
        assert reader_of([None]) is None
        assert destination_reader_of([raw]) is None
        assert read_each([array, None]) == [None, None]


class TestUse:
    def test_memory_that_an_array_was_given_since_is_what_is_read(self):
        engine, given = GradientEngine(LAYOUT), arrays(7.0)
        engine.add(given)
        given[0].__setstate__((1, (4, 6), np.dtype(np.float32), False, np.full(24, 5, np.float32).tobytes()))
        engine.add(given)
        assert [float(array.flat[0]) for array in engine.step(deferred=True).sums.values()] == [12, 14]

    def test_a_view_of_the_arena_is_refused_though_its_form_is_known(self):
        engine, given = GradientEngine(LAYOUT), arrays()
        for _ in range(2):
            engine.add(given)
            handed = engine.step().gradients
        by_its_memory = [np.asarray(memoryview(array))[:] for array in handed.values()]
        for views in (list(handed.values()), by_its_memory):
            with pytest.raises(BufferRefused, match="own arena"):
                engine.add(views)

    @pytest.mark.parametrize("hold", [1, 2])
    def test_an_array_with_gaps_or_of_another_shape_is_refused_though_one_of_its_shape_was_taken(self, hold):
        engine, given = GradientEngine(LAYOUT, hold=hold), arrays()
        for _ in range(2):
            engine.add(arrays())
        for other in (np.ones((6, 4), np.float32).T, np.ones((4, 12), np.float32)[:, ::2], given[0].reshape(6, 4)):
            with pytest.raises((BufferRefused, LayoutMismatch), match=r"not contiguous|the wrong shape"):
                engine.add([other, given[1]])

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

    def test_a_name_that_is_no_text_is_refused_of_known_arrays_too(self):
        given = arrays()
        for _ in range(2):
            clip_by_global_norm(given, 1.0)
        with pytest.raises(CallerError, match="a gradient's name is not a str: got 0"):
            clip_by_global_norm(dict(enumerate(given)), 1.0)
