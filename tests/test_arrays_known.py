"""Arrays known again: by their form and their addresses, with nobody's memory kept."""

import gc
import weakref

import numpy as np
import pytest

from gradengine import GradientEngine, GradientLayout, RawBuffer, clip_by_global_norm
from gradengine.arrays.host import host_buffer
from gradengine.arrays.known import KnownArrays, facts_of, views_at
from gradengine.arrays.streams import NamedStream, ProducerStream
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch

LAYOUT = GradientLayout.of([(4, 6), (8,)])


def arrays(value=1.0):
    return [np.full(shape, value, np.float32) for shape in ((4, 6), (8,))]


def written(sources):
    return facts_of(sources, np.ndarray, written=True)


def read(sources, ours=None):
    return facts_of(sources, np.ndarray, ours)


def checked(sources):
    return [host_buffer(array, "w") for array in sources]


def raw(array, **changes):
    return RawBuffer(
        **{"pointer": array.ctypes.data, "size": array.size, "dtype": "float32", "owner": array, **changes}
    )


class TestFacts:
    def test_they_are_those_of_the_memory_and_not_of_the_object(self):
        given = arrays()
        assert written(given) == written([array.view() for array in given])
        assert written(given) != written(arrays())
        assert written(given) != written(given[::-1])
        assert written(given).form == written(arrays()).form

    @pytest.mark.parametrize("change", [{"shape": (6, 4)}, {"shape": (24,)}, {"dtype": np.int32}])
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # NumPy would rather have views
    def test_an_array_that_was_changed_in_place_has_others(self, change):
        given = arrays()
        before = read(given), written(given)
        for name, value in change.items():
            setattr(given[0], name, value)
        assert read(given).form != before[0].form
        assert written(given).form != before[1].form

    def test_what_is_not_read_as_it_lies_has_none(self):
        array, of_a_view = arrays()[0], np.frombuffer(bytearray(96), np.float32)
        assert read([array, None]) is None
        assert read([np.ma.masked_array(array)]) is None
        assert read([of_a_view]) is None  # its memory is not an array's
        assert read([array[1:]]) is not None
        assert read([array[1:]], ours=array) is None
        assert read([]) is read([None]) is read([array, raw(array)]) is None

    def test_what_cannot_be_written_has_none(self):
        given = arrays()
        assert written([None, given[1]]).pointers == [0, given[1].ctypes.data]
        given[0].flags.writeable = False
        assert written(given) is None

    @pytest.mark.parametrize("change", [{"size": 20}, {"dtype": "float16"}, {"writable": False}, {"stream": 1}])
    def test_pointers_are_compared_field_by_field(self, change):
        array = arrays()[0]
        assert read([raw(array), None]).pointers == [array.ctypes.data, 0]
        assert read([raw(array)]).form != read([raw(array, **change)]).form

    def test_of_torch_all_that_decides(self):
        torch = pytest.importorskip("torch")
        tensor = torch.ones(4, 6)
        complex_one = torch.view_as_complex(torch.ones(4, 6, 2))
        others = [tensor.T, tensor.half(), tensor.view(24), tensor.detach().requires_grad_(), complex_one.conj().imag]
        forms = [read([other]).form for other in (tensor, *others)]
        assert all(forms.count(form) == 1 for form in forms)
        assert read([torch.ones(3).to_sparse()]) is None


class TestKnown:
    def test_no_array_is_kept_and_few_sets_are(self):
        known, given = KnownArrays(2), arrays()
        facts, gone = written(given), weakref.ref(given[1])
        first = known.of(facts, lambda: checked(given), list)
        assert [view.pointer for view in first] == facts.pointers
        assert known.of(facts, pytest.fail, pytest.fail) is first
        others = arrays(), arrays()
        for other in others:
            known.of(written(other), pytest.fail, list)
        assert known.of(facts, pytest.fail, list) is not first
        del given[:]
        gc.collect()
        assert gone() is None

    def test_arrays_of_a_known_form_are_viewed_where_they_lie(self):
        known, given, others = KnownArrays(2), arrays(), arrays(2.0)
        known.of(written(given), lambda: checked(given), list)
        views = known.of(written(others), pytest.fail, list)
        assert [view.data.tolist() for view in views] == [array.ravel().tolist() for array in others]
        assert [view.owner for view in views] == [None, None]

    def test_an_address_that_must_be_checked_is_not_viewed(self):
        views = checked(arrays())
        assert views_at([None, views[1]], [0, 4096])[1].pointer == 4096
        assert views_at(views, [4096, 0]) is views_at(views, [4098, 4096]) is None

    @pytest.mark.parametrize(
        ("producer", "is_known"), [(None, True), (NamedStream(5), True), (ProducerStream(), False)]
    )
    def test_what_must_be_kept_alive_is_not_known(self, producer, is_known):
        known, given = KnownArrays(2), [None, arrays()[1]]
        views = [None, host_buffer(given[1], "w")]
        views[1].producer = producer
        first = known.of(written(given), lambda: views, list)
        assert (first[1].owner is None) is is_known
        assert (known.of(written(given), lambda: views, list) is first) is is_known

    def test_arrays_without_facts_are_checked_in_each_call(self):
        known, views = KnownArrays(2), checked(arrays())
        first = known.of(None, lambda: views, list)
        assert known.of(None, lambda: views, list) is not first
        assert [view.owner for view in first] == [view.owner for view in views]


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

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # NumPy would rather have views
    def test_a_held_array_is_read_as_it_was_passed(self):
        engine = GradientEngine(GradientLayout.of([(8,)]), hold=2)
        for change in ({"shape": (2, 4)}, {"dtype": np.int32}, {}):
            held = np.ones(8, np.float32)
            engine.add([held])
            for name, value in change.items():
                setattr(held, name, value)
            assert engine.step(deferred=True).sums["0"].tolist() == [1] * 8

    def test_a_held_tensor_s_memory_is_kept(self):
        torch = pytest.importorskip("torch")
        engine = GradientEngine(GradientLayout.of([(300_000,)]), hold=2)
        for _ in range(2):
            held = torch.ones(300_000)
            engine.add([held])
            held.data = torch.zeros(1)
            assert set(engine.step(deferred=True).sums["0"].tolist()) == {1}

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
