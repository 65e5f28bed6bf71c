"""Borrowed memory: work on it is behind what its lender has queued and before what it queues next, or it is kept."""

import gc
import sys

import numpy as np
import pytest
from devices import all_on_host, named_cuda, on_host, put_all, raw, synchronize
from emulated_torch import Tensor, copy_on, emulated_torch, tensors_of
from producers import Producer

from gradengine import GradientEngine, GradientLayout, clip_by_global_norm, elementwise
from gradengine.buffer import NamedStream, UnknownStream
from gradengine.gpu_accumulate import GpuGradientAccumulator
from gradengine.kernels.loans import Loans

LAYOUT = GradientLayout.of({"layers.0.w": (5000,), "head": (7,)})


def new_engine(device, **options):
    return GradientEngine(LAYOUT, device.kernels, **{"max_norm": None, **options})


def filled(device, value, dtype=np.float32):
    return put_all(device, [np.full(slot.shape, value, np.float32).astype(dtype) for slot in LAYOUT.slots])


class Lender:
    """Somebody with gradients on the device and a stream of their own, as a way of passing them."""

    def __init__(self, device, way, monkeypatch):
        xp = self.xp = device.kernels.xp
        self.device, self.way = device, way
        self.stream = xp.cuda.Stream(non_blocking=True)
        self.arrays = filled(device, 0)
        if way.startswith("torch"):
            monkeypatch.setitem(sys.modules, "torch", emulated_torch(self.stream, is_old="before" in way))
        self.kept, self.values = tensors_of(self.arrays), []
        synchronize(device)

    def lent(self, arrays=None):
        """The arrays as they are passed."""
        arrays = self.arrays if arrays is None else arrays
        if self.way == "torch, the same tensors":
            return self.kept if arrays is self.arrays else tensors_of(arrays)
        if self.way.startswith("torch"):
            return tensors_of(arrays)
        return [raw(self.device.kernels.view(array, "w"), stream=self.stream.ptr) for array in arrays]

    def writes(self, value):
        """Queue new values on the lender's stream; all that is needed for it is there before."""
        values = filled(self.device, value)
        self.values.append(values)  # on a stream of its own, they must outlive the copies
        synchronize(self.device)
        return lambda: [copy_on(self.xp, self.stream, *pair) for pair in zip(self.arrays, values, strict=True)]

    def reads(self, arrays):
        """Queue copies of arrays on the lender's stream; the copies, to be looked at later."""
        with self.stream:  # what the pool gives out may still be in use on the stream that it was given out on
            copies = [self.xp.empty(array.shape, array.dtype) for array in arrays]
        for copy, array in zip(copies, arrays, strict=True):
            copy_on(self.xp, self.stream, copy, array)
        return copies


WAYS = ["torch", "torch, the same tensors", "torch before 2.10", "a pointer with a stream"]


@pytest.fixture(params=WAYS)
def lender(request, device, monkeypatch):
    return Lender(device, request.param, monkeypatch)


def all_are(arrays, value):
    return all((on_host(array) == value).all() for array in arrays)


class TestOrder:
    """Each on streams of their own that nothing orders but events; on the emulator work is done as late as can be."""

    @pytest.mark.parametrize("hold", [1, 2])
    def test_gradients_are_read_after_they_were_written_and_before_they_are_overwritten(self, device, lender, hold):
        engine = new_engine(device, hold=hold)
        for value in (1, 2, 3):
            write, spoil = lender.writes(value), lender.writes(np.nan)
            write()
            engine.add(lender.lent())
            if hold == 1:
                spoil()
                lender.stream.synchronize()
            assert all_are(engine.step().gradients.values(), value)

    def test_a_fold_on_another_stream_than_the_add(self, device, lender):
        engine, write = new_engine(device, hold=2), lender.writes(5)
        with lender.xp.cuda.Stream(non_blocking=True):
            write()
            engine.add(lender.lent())
        spoil = lender.writes(np.nan)
        with lender.xp.cuda.Stream(non_blocking=True) as stream:
            result = engine.step()
            spoil()
            stream.synchronize()
        assert all_are(result.gradients.values(), 5)

    def test_the_arena_is_read_after_the_step_and_before_the_next_window(self, device, lender):
        engine = new_engine(device)
        copies = []
        for value in (1, 2, 3):
            write = lender.writes(value)
            write()
            engine.add(lender.lent())
            copies.append(lender.reads(list(engine.step().gradients.values())))
        synchronize(device)
        assert [all_are(copy, value) for copy, value in zip(copies, (1, 2, 3), strict=True)] == [True] * 3

    def test_a_deferred_steps_factor(self, device, lender):
        engine, write = new_engine(device), lender.writes(4)
        write()
        engine.add(lender.lent(), weight=8)
        copy = lender.reads([engine.step(deferred=True).inverse_factor])
        synchronize(device)
        assert on_host(copy[0]) == 8

    @pytest.mark.parametrize("max_norm", [None, 1.0])
    def test_destinations_of_a_step(self, device, lender, max_norm):
        engine, out = new_engine(device, max_norm=max_norm), filled(device, 0)
        given, early, late = filled(device, 3), filled(device, np.nan), None
        synchronize(device)
        for target, source in zip(out, early, strict=True):
            copy_on(lender.xp, lender.stream, target, source)
        engine.add(given)
        engine.step(out=lender.lent(out))
        late = lender.reads(out)
        synchronize(device)
        assert all_are(late, 3) if max_norm is None else not np.isnan(on_host(late[0])).any()

    def test_clipping_in_place(self, device, lender):
        write = lender.writes(3)
        write()
        with named_cuda(device):
            clip_by_global_norm(dict(zip("ab", lender.lent(), strict=True)), 1.0)
        copies = lender.reads(lender.arrays)
        synchronize(device)
        assert on_host(copies[1]) == pytest.approx(1 / np.sqrt(5007), rel=1e-6)

    def test_the_operations_on_one_buffer(self, device, lender):
        write = lender.writes(3)
        write()
        elementwise.scale(lender.lent()[0], 2.0, device=device.kernels)
        copies = lender.reads(lender.arrays[:1])
        synchronize(device)
        assert all_are(copies, 6)

    def test_copies_to_a_workspace(self, device, lender):
        accumulator, write = GpuGradientAccumulator(LAYOUT, device.kernels), lender.writes(3)
        workspace = filled(device, 0)
        synchronize(device)
        write()
        accumulator.add(lender.lent())
        accumulator.copy_block_to(0, lender.lent(workspace)[:1])
        copies = lender.reads(workspace[:1])
        synchronize(device)
        assert all_are(copies, 3)

    def test_a_graph_that_is_replayed(self, device, lender):
        engine, out = new_engine(device), filled(device, 0)
        lent = lender.lent()
        synchronize(device)
        with engine.capture() as graph:
            engine.add(lent)
            engine.step(out=lender.lent(out))
        for value in (1, 2, 3):
            write, spoil = lender.writes(value), lender.writes(np.nan)
            write()
            graph.replay()
            copies = lender.reads(out)
            spoil()
            synchronize(device)
            assert all_are(copies, value)

    def test_a_graph_for_other_arrays(self, device, lender):
        """Recorded with the device's own arrays, then for a lender's."""
        engine, out, own = new_engine(device), filled(device, 0), filled(device, 1)
        with engine.capture() as graph:
            engine.add(own)
            engine.step()
        graph.repoint([lender.lent()], out=lender.lent(out))
        write = lender.writes(9)
        write()
        graph.replay()
        copies = lender.reads(out)
        synchronize(device)
        assert all_are(copies, 9)


def capsules(arrays, **options):
    """Exports made by hand, whose destructors note when they are let go."""
    stand_in = [Producer(np.empty(array.shape, array.dtype), data=array.data.ptr, device=(2, 0)) for array in arrays]
    return stand_in, [producer.freed for producer in stand_in]


class TestKept:
    """Producers whose stream nobody knows, as JAX's: their memory is theirs again when our work is done, not before."""

    @pytest.mark.parametrize("hold", [1, 2])
    def test_until_the_work_is_done(self, emulated, hold):
        engine, arrays = new_engine(emulated, hold=hold), filled(emulated, 3)
        other = filled(emulated, 1)
        synchronize(emulated)
        producers, freed = capsules(arrays)
        engine.add(producers)
        del producers
        result = engine.step()
        gc.collect()
        assert freed == [[], []]
        assert all_are(result.gradients.values(), 3)
        engine.add(capsules(other)[0])
        engine.step()
        gc.collect()
        assert [len(calls) for calls in freed] == [1, 1]

    def test_destinations(self, emulated):
        engine, out = new_engine(emulated), filled(emulated, 0)
        engine.add(filled(emulated, 3))
        producers, freed = capsules(out)
        engine.step(out=producers)
        del producers
        gc.collect()
        assert freed == [[], []]
        assert all_are(out, 3)

    def test_a_pointers_owner(self, emulated):
        class Owner:
            pass

        owner, freed = Owner(), []
        array = emulated.put(np.ones(7, np.float32))
        layout = GradientLayout.of([(7,)])
        engine = GradientEngine(layout, emulated.kernels)
        synchronize(emulated)
        engine.add([raw(emulated.kernels.view(array, "w"), owner=owner)])
        engine.step()
        import weakref

        reference = weakref.ref(owner, freed.append)
        del owner
        gc.collect()
        assert reference() is not None
        synchronize(emulated)
        engine.add([raw(emulated.kernels.view(array, "w"), owner=None)])
        gc.collect()
        # What is known again holds weak references only.
        assert reference() is None

    def test_torchs_is_not(self, device, monkeypatch):
        """Its allocator gives memory to later work on the stream that we are before: it need not wait for us."""
        import weakref

        lender, engine = Lender(device, "torch", monkeypatch), new_engine(device)
        tensors = lender.lent()
        references = [weakref.ref(tensor) for tensor in tensors]
        engine.add(tensors)
        del tensors
        gc.collect()
        assert [reference() for reference in references] == [None, None]

    def test_nothing_is_kept_for_ever(self, emulated):
        engine, arrays = new_engine(emulated), filled(emulated, 3)
        for _ in range(20):
            engine.add(capsules(arrays)[0])
            engine.step()
            synchronize(emulated)
        assert len(emulated.kernels._loans._kept) <= 2


class TestLoans:
    """Told how often streams wait for each other."""

    def test_nothing_is_recorded_on_one_stream(self, emulated):
        loans = Loans(emulated.kernels._place)
        current = emulated.kernels.xp.cuda.get_current_stream()
        with emulated.kernels.xp.recorded() as record:
            loans.wait_for([NamedStream(current.ptr)])
            loans.give_back([NamedStream(current.ptr)], [1])
        assert record.operations == []
        assert not loans._kept

    def test_a_lender_without_memory_keeps_nothing(self, emulated):
        loans = Loans(emulated.kernels._place)
        loans.give_back([UnknownStream()])
        assert not loans._kept


def test_a_window_forgets_its_lenders(device, monkeypatch):
    """A stream that came with an earlier window may be gone."""
    lender, engine = Lender(device, "a pointer with a stream", monkeypatch), new_engine(device)
    engine.add(lender.lent())
    assert engine.accumulator.lenders == {NamedStream(lender.stream.ptr)}
    engine.step()
    assert engine.accumulator.lenders == set()
    engine.add(lender.lent())
    engine.discard()
    assert engine.accumulator.lenders == set()


def test_mixed_lenders_in_one_micro_batch(device, monkeypatch):
    lender, engine = Lender(device, "torch", monkeypatch), new_engine(device)
    own = device.put(np.full(7, 2, np.float32))
    synchronize(device)
    write = lender.writes(2)
    write()
    engine.add([lender.lent()[0], own])
    assert all((array == 2).all() for array in all_on_host(engine.step().gradients).values())
    assert isinstance(lender.kept[0], Tensor)
