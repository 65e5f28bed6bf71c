"""A torch gradient that backward added to since it last came is refused: on a GPU here, by a stand-in for torch.

What torch itself counts, and its ways to clear, are in test_torch.py.
"""

import sys
import types

import numpy as np
import pytest
from devices import assign, put_all
from emulated_torch import Tensor, emulated_torch, tensors_of

from gradengine import GradientEngine, GradientLayout
from gradengine.accumulate.intake import Intake
from gradengine.errors import BufferRefused
from gradengine.kernels import SlotSet

LAYOUT = GradientLayout.of([(4,), (2, 3)])
PLACES = SlotSet(range(2))


@pytest.fixture
def torch(device, monkeypatch):
    module = emulated_torch(device.xp.cuda.get_current_stream())
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def new_tensors(device, torch):
    return lambda: tensors_of(put_all(device, [np.ones(slot.shape, np.float32) for slot in LAYOUT.slots]))


@pytest.fixture
def tensors(new_tensors):
    return new_tensors()


@pytest.fixture
def add(device):
    """A micro-batch for an accumulator."""
    return adding(device.kernels.device)


def adding(device, **options):
    arrivals = Intake(device, device.allocate(64), **options)

    def add(tensors):
        arrivals.contribution(PLACES, LAYOUT.slots, tensors)

    add.note_written = arrivals.uncleared.note_written
    return add


def change(tensors, times=1):
    for tensor in tensors:
        tensor._version += times


def clear(tensors):
    for tensor in tensors:
        assign(tensor.array, 0)
        tensor._version += 1


def views_of(tensors):
    """As `gradients_of` makes them anew for channels_last gradients, and `detach()` does."""
    return [Tensor(tensor.array, _version=tensor._version, storage=tensor.storage) for tensor in tensors]


@pytest.fixture(params=["the same tensors", "views made anew"])
def given(request):
    return list if request.param == "the same tensors" else views_of


class TestRefused:
    """Backward adds to a `.grad` that is there, once in place; whoever clears it changes it in place too."""

    def test_what_was_changed_once_since_it_came_by_name_again_and_again(self, add, tensors, given):
        add(given(tensors))
        change(tensors)
        for _ in range(2):
            with pytest.raises(BufferRefused, match=r"'0' was not cleared .* zero_grad\(\) .* reused_buffers=True"):
                add(given(tensors))

    def test_one_that_no_backward_reached_does_not_hide_the_other(self, add, tensors, given):
        add(given(tensors))
        change(tensors[1:])
        with pytest.raises(BufferRefused, match="'1' was not cleared"):
            add(given(tensors))

    def test_nor_do_others_that_are_new(self, add, tensors, new_tensors, given):
        add(given(tensors))
        change(tensors)
        with pytest.raises(BufferRefused, match="'1' was not cleared"):
            add([new_tensors()[0], *given(tensors)[1:]])

    def test_nor_do_others_that_came_in_between(self, add, tensors, new_tensors):
        add(tensors)
        add(new_tensors())
        change(tensors)
        with pytest.raises(BufferRefused, match="'0' was not cleared"):
            add(tensors)

    def test_what_a_step_wrote_into_is_no_backwards_work_and_hides_none(self, add, tensors, given):
        add(given(tensors))
        for times in (1, 2):
            change(tensors, times)
            add.note_written(given(tensors))
            add(given(tensors))
        change(tensors)
        with pytest.raises(BufferRefused, match="'0' was not cleared"):
            add(given(tensors))

    def test_so_it_is_between_what_a_step_wrote_and_the_next_micro_batch(self, add, tensors, given):
        add(given(tensors))
        change(tensors, 2)
        add.note_written(given(tensors))
        change(tensors)
        with pytest.raises(BufferRefused, match="'0' was not cleared"):
            add(given(tensors))


class TestTaken:
    def test_what_was_cleared_in_place(self, add, tensors, given):
        for _ in range(3):
            add(given(tensors))
            change(tensors, 2)
            tensors[1]._version -= 1  # cleared, and backward did not reach it

    def test_what_was_cleared_in_place_and_used_nowhere(self, add, tensors, given):
        for _ in range(3):
            add(given(tensors))
            clear(tensors)

    def test_what_is_the_callers_own_buffer_where_the_caller_says_so(self, device, tensors, given):
        add = adding(device.kernels.device, reused_buffers=True)
        for _ in range(3):
            add(given(tensors))
            change(tensors)

    def test_what_ddp_copied_into_a_bucket_of_one_parameter(self, add, tensors):
        """One change as well, and it was cleared: what was not has two."""
        for tensor in tensors:
            tensor._base = types.SimpleNamespace(ndim=1, numel=tensor.numel)
        for _ in range(3):
            add(tensors)
            change(tensors)

    def test_new_tensors_whatever_their_versions_and_addresses(self, add, tensors):
        """As torch makes them where gradients are set to None between micro-batches; its allocator gives their memory
        to the next.
        """
        arrays = [tensor.array for tensor in tensors]
        tensors.clear()
        for version in range(20):
            add([Tensor(array, _version=version) for array in arrays])

    def test_what_a_graph_records(self, device, tensors):
        """What its memory holds is not known before it runs."""

        class Recording:
            def __getattr__(self, name):
                return getattr(device.kernels.device, name)

            def is_capturing(self):
                return True

        add = adding(Recording())
        for _ in range(3):
            add(tensors)
            change(tensors)


class TestStorages:
    """A view that is made anew each time is known again by its storage, which takes longer than by itself."""

    def test_a_loop_that_makes_new_ones_each_time_soon_asks_for_none(self, add, tensors, monkeypatch):
        asked = []
        monkeypatch.setattr(Tensor, "untyped_storage", lambda tensor: asked.append(1) or tensor.storage)
        for _ in range(20):
            add([Tensor(tensor.array) for tensor in tensors])
        del asked[:]
        add([Tensor(tensor.array) for tensor in tensors])
        assert asked == []

    def test_and_still_refuses_tensors_that_come_again_themselves(self, add, tensors):
        for _ in range(20):
            add([Tensor(tensor.array) for tensor in tensors])
        add(tensors)
        change(tensors)
        with pytest.raises(BufferRefused, match="'0' was not cleared"):
            add(tensors)

    def test_a_loop_that_clears_in_place_asks_on(self, add, tensors):
        for _ in range(20):
            add(views_of(tensors))
            change(tensors, 2)
        add(views_of(tensors))
        change(tensors)
        with pytest.raises(BufferRefused, match="'0' was not cleared"):
            add(views_of(tensors))


class TestNoWait:
    """Whether a gradient is zero only a GPU knows, behind all its work: the host is told when that is done."""

    @pytest.fixture(autouse=True)
    def working(self, torch):
        torch.is_done = False

    def test_what_was_not_cleared_is_told_once_at_the_first_call_after_the_work_was_done(self, torch, add, tensors):
        add(tensors)
        change(tensors[1:])
        add(tensors)
        add(tensors)
        torch.is_done = True
        with pytest.raises(BufferRefused, match="'1' was not cleared"):
            add(tensors)
        add(tensors)

    def test_what_was_cleared_and_used_nowhere_is_taken(self, torch, add, tensors):
        for is_done in (False, False, True, True, False):
            torch.is_done = is_done
            add(tensors)
            clear(tensors)

    def test_what_was_found_in_a_later_micro_batch_than_zeros_is_told_too(self, torch, add, tensors):
        add(tensors)
        clear(tensors)
        add(tensors)
        assign(tensors[0].array, 1)
        change(tensors)
        add(tensors)
        torch.is_done = True
        with pytest.raises(BufferRefused, match="'0' was not cleared"):
            add(tensors)

    def test_at_the_latest_it_is_told_by_check(self, device, tensors):
        engine = GradientEngine(LAYOUT, device.kernels, max_norm=None)
        engine.add(tensors)
        change(tensors)
        engine.add(tensors)
        engine.step()
        with pytest.raises(BufferRefused, match="'0' was not cleared"):
            engine.check()
        engine.check()

    def test_nothing_is_asked_where_the_counts_say_that_all_is_well(self, add, tensors, monkeypatch):
        monkeypatch.setattr(Tensor, "any", None)
        for times in (0, 2, 0, 3):
            add(tensors)
            change(tensors, times)
        add([Tensor(tensor.array, _version=1) for tensor in tensors])
