"""Borrowed memory: work on it is behind what its lender has queued and before what it queues next, or it is kept."""

import contextlib
import gc
import sys
import threading
import time
import types
import weakref

import cuda_emulator
import numpy as np
import pytest
from devices import named_cuda, nothing_is_launched, on_host, put_all, raw, synchronize
from emulated_torch import copy_on, emulated_torch, tensors_of
from producers import Producer

from gradengine import GradientEngine, GradientLayout, clip_by_global_norm, elementwise
from gradengine.accumulate.gpu import GpuGradientAccumulator
from gradengine.arrays import streams
from gradengine.arrays.streams import NamedStream
from gradengine.errors import BufferRefused, CallerError
from gradengine.kernels import events
from gradengine.kernels.cuda_device import CudaDevice
from gradengine.kernels.events import Kept

LAYOUT = GradientLayout.of({"layers.0.w": (5000,), "head": (7,)})


def new_engine(device, **options):
    return GradientEngine(LAYOUT, device.kernels, **{"max_norm": None, **options})


def filled(device, value, dtype=np.float32):
    return put_all(device, [np.full(slot.shape, value, np.float32).astype(dtype) for slot in LAYOUT.slots])


class ProducerStream:
    """Somebody with gradients on the device and a stream of their own, as a way of passing them."""

    def __init__(self, device, way, monkeypatch):
        xp = self.xp = device.xp
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
        return [raw(self.device.kernels.device.view(array, "w"), stream=self.stream.ptr) for array in arrays]

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
    return ProducerStream(device, request.param, monkeypatch)


def all_are(arrays, value):
    return all((on_host(array) == value).all() for array in arrays)


# What is done with lent memory of 3s and ours of 1s, and what the first arrays of both are then.
OPERATIONS = {
    "clip_by_global_norm": (lambda lent, ours: clip_by_global_norm(lent, 1.0), (1 / np.sqrt(5007), 1)),
    "elementwise.scale": (lambda lent, ours: elementwise.scale(lent[0], 2.0), (6, 1)),
    "elementwise.add": (lambda lent, ours: elementwise.add(ours[0], lent[0]), (3, 4)),
}


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

    @pytest.mark.usefixtures("lazy")
    @pytest.mark.parametrize("hold", [1, 2])
    @pytest.mark.parametrize("way", ["in place", "deferred"])
    def test_a_steps_result_read_at_once_by_the_lender(self, device, lender, way, hold):
        """On the lender's stream alone, which the device gets on with first: what it does not wait for is not there."""
        engine, given = new_engine(device, hold=hold), filled(device, 5)
        synchronize(device)
        for value in (1, 3):
            write = lender.writes(value)
            write()
            engine.add(lender.lent())
            engine.add(given)
            result = engine.step(deferred=way == "deferred")
            copies = lender.reads(list((result.sums if result.deferred else result.gradients).values()))
            factor = lender.reads([result.inverse_factor]) if result.deferred else ()
            lender.stream.synchronize()
            assert all_are(copies, value + 5 if result.deferred else (value + 5) / 2)
            assert all_are(factor, 2)

    def test_what_is_held_may_be_written_until_it_is_folded(self, device, lender):
        engine, own, write = new_engine(device, hold=2), filled(device, 2), lender.writes(8)
        synchronize(device)
        with lender.xp.cuda.Stream(non_blocking=True) as mine:
            engine.add(lender.lent())
            write()
            engine.add(own)
            mine.synchronize()
            assert all_are(engine.step().gradients.values(), 5)

    @pytest.mark.parametrize("captured", [False, True])
    def test_destinations_of_a_step(self, device, lender, captured):
        """They are written behind what the lender had queued, and read by it behind that."""
        engine, given, write = new_engine(device), filled(device, 3), lender.writes(np.nan)

        def step():
            engine.add(given)
            engine.step(out=lender.lent())

        if captured:
            with engine.capture() as graph:
                step()
        for _ in range(2):  # known from the second time on
            write()
            graph.replay() if captured else step()
            late = lender.reads(lender.arrays)
            synchronize(device)
            assert all_are(late, 3)

    @pytest.mark.usefixtures("lazy")
    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_an_operation_on_lent_memory(self, device, lender, operation):
        """In place, from lent memory to our own, or to a lent workspace; and the lender spoils what was read."""
        call, wanted = OPERATIONS[operation]
        for _ in range(2):
            write, spoil, ours = lender.writes(3), lender.writes(np.nan), filled(device, 1)
            synchronize(device)
            write()
            with named_cuda(device):
                call(lender.lent(), ours)
            copies = lender.reads(lender.arrays)
            spoil()
            lender.stream.synchronize()
            assert on_host(copies[0]) == pytest.approx(wanted[0], rel=1e-6)
            assert on_host(ours[0]) == pytest.approx(wanted[1])

    def test_a_copy_to_a_workspace(self, device, lender):
        sums, given, write = GpuGradientAccumulator(LAYOUT, device.kernels), filled(device, 3), lender.writes(np.nan)
        synchronize(device)
        write()
        sums.add(given)
        sums.copy_block_to(0, lender.lent()[:1])
        copies = lender.reads(lender.arrays[:1])
        synchronize(device)
        assert all_are(copies, 3)

    @pytest.mark.parametrize("has_destinations", [False, True])
    def test_a_graph_that_is_replayed(self, device, lender, has_destinations):
        engine, out = new_engine(device), filled(device, 0)
        with engine.capture() as graph:
            engine.add(lender.lent())
            engine.step(out=lender.lent(out) if has_destinations else None)
        for value in (1, 2, 3):
            write, spoil = lender.writes(value), lender.writes(np.nan)
            write()
            result = graph.replay()
            copies = lender.reads(out if has_destinations else list(result.gradients.values()))
            spoil()
            synchronize(device)
            assert all_are(copies, value)

    @pytest.mark.parametrize("lender", WAYS[:3], indirect=True)
    def test_a_fold_while_torch_is_on_another_stream_than_at_the_add(self, device, lender):
        """Torch's allocator gives memory out again on the stream that it came from, not on the one of the fold."""
        torch, engine = sys.modules["torch"], new_engine(device, hold=2)
        side, other = lender.stream, lender.xp.cuda.Stream(non_blocking=True)
        for value in (1, 2):
            write, spoil = lender.writes(value), lender.writes(np.nan)
            torch.current = side
            write()
            engine.add(lender.lent())
            torch.current = other
            result = engine.step()
            spoil()
            side.synchronize()
            assert all_are(result.gradients.values(), value)

    @pytest.mark.parametrize("hold", [1, 2])
    def test_an_interface_that_names_a_stream_is_read_after_it_whenever_it_comes_again(self, device, monkeypatch, hold):
        """With `.data.ptr` as CuPy's arrays have, but without the export that would order CuPy's."""
        lender, engine = ProducerStream(device, "an interface", monkeypatch), new_engine(device, hold=hold)
        given = [WithInterface(array, lender.stream) for array in lender.arrays]
        for value in (1, 2, 3):
            lender.writes(value)()
            engine.add(given)
            assert all_are(engine.step().gradients.values(), value)


class WithInterface:
    """An array that says by `__cuda_array_interface__` alone where it lies and which stream still writes to it."""

    def __init__(self, array, stream):
        self.data = types.SimpleNamespace(ptr=array.data.ptr)
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "version": 3, "stream": stream.ptr}


CALLS = {
    "add": lambda engine, lent: engine.add(lent),
    "add_block": lambda engine, lent: engine.add_block(0, lent[:1]),
    "step": lambda engine, _: engine.step(),
    "step, out=": lambda engine, lent: engine.step(out=lent),
    "clip": lambda _, lent: clip_by_global_norm(lent, 1.0),
}


class TestALenderThatRecords:
    """Its stream records a graph: to wait for that is an error of the driver's, which ends the recording."""

    @pytest.mark.parametrize("hold", [1, 2])
    @pytest.mark.parametrize("call", CALLS)
    def test_is_refused_before_anything_is_done_and_both_go_on_afterwards(self, device, lender, call, hold):
        engine, other = new_engine(device, hold=hold), filled(device, 5)
        write, is_step = lender.writes(3), call.startswith("step")
        write()
        if is_step:
            engine.add(lender.lent(), weight=4)
        lent = lender.lent(other)
        lender.stream.begin_capture()
        refused = pytest.raises(
            CallerError, match=f"recording a graph on its stream: got stream {lender.stream.ptr:#x}"
        )
        with named_cuda(device), nothing_is_launched(device), refused:
            CALLS[call](engine, lent)
        lender.stream.end_capture()  # which is still valid
        assert (engine.accumulator.accumulated_count, engine.current_step) == (is_step, 0)
        if not is_step:
            engine.add(lender.lent(), weight=4)
        assert all_are(engine.step().gradients.values(), 3)
        assert all_are(other, 5)

    def test_a_copy_to_its_memory(self, device, lender):
        accumulator, workspace = GpuGradientAccumulator(LAYOUT, device.kernels), filled(device, 5)
        accumulator.add(filled(device, 1))
        lent = lender.lent(workspace)[:1]
        lender.stream.begin_capture()
        with nothing_is_launched(device), pytest.raises(CallerError, match="recording a graph on its stream"):
            accumulator.copy_block_to(0, lent)
        lender.stream.end_capture()
        assert all_are(workspace, 5)

    @pytest.mark.parametrize("call", ["block", "add"])
    @pytest.mark.parametrize("discards", [False, True])
    def test_a_fold_of_what_is_held_is_refused_and_loses_nothing(self, device, lender, call, discards):
        """When the recording is over, the window goes on, or can be dropped as well."""
        engine, gradients = new_engine(device, hold=2), filled(device, 1)
        lender.writes(3)()
        engine.add(lender.lent())
        lender.stream.begin_capture()
        with nothing_is_launched(device), pytest.raises(CallerError, match="recording a graph on its stream"):
            engine.add(gradients) if call == "add" else engine.accumulator.block(0)
        lender.stream.end_capture()
        assert engine.accumulator.accumulated_count == 1
        if discards:
            engine.discard()
        engine.add(gradients)
        assert all_are(engine.step().gradients.values(), 1 if discards else 2)

    def test_a_replay_is_refused_before_it_is_launched(self, device, lender):
        engine, lent = new_engine(device), lender.lent()
        lender.writes(3)()
        with engine.capture() as graph:
            engine.add(lent)
            engine.step()
        lender.stream.begin_capture()
        with nothing_is_launched(device), pytest.raises(CallerError, match="recording a graph on its stream"):
            graph.replay()
        lender.stream.end_capture()
        assert engine.current_step == 0
        assert all_are(graph.replay().gradients.values(), 3)


def capsules(arrays, **options):
    """Exports made by hand, whose destructors note when they are let go."""
    stand_in = [Producer(np.empty(array.shape, array.dtype), data=array.data.ptr, device=(2, 0)) for array in arrays]
    return stand_in, [producer.freed for producer in stand_in]


def keep_busy(device):
    """Have the current stream have so much to do that no polling comes to the end of it."""
    scratch, xp = device.put(np.zeros(8, np.float32)), device.xp
    for _ in range(100):
        xp.cuda.runtime.memsetAsync(scratch.data.ptr, 0, 32, xp.cuda.get_current_stream().ptr)


class TestKept:
    """Producers whose stream nobody knows, as JAX's: their memory is theirs again when our work is done, not before."""

    @pytest.mark.usefixtures("lazy")
    @pytest.mark.parametrize("hold", [1, 2])
    @pytest.mark.parametrize("use", ["gradients", "destinations", "source and target"])
    def test_until_the_work_is_done(self, emulated, hold, use):
        engine, arrays, other = new_engine(emulated, hold=hold), filled(emulated, 3), filled(emulated, 1)
        synchronize(emulated)
        keep_busy(emulated)
        producers, freed = capsules(arrays)
        if use == "gradients":
            engine.add(producers)
            engine.step()
        elif use == "destinations":
            engine.add(other)
            engine.step(out=producers)
        else:
            elementwise.add(producers[0], producers[0], device=emulated.kernels)
            elementwise.scale(producers[1], 2.0, device=emulated.kernels)
        del producers
        gc.collect()
        assert freed == [[], []]
        synchronize(emulated)
        engine.add(capsules(other)[0])
        engine.step()
        gc.collect()
        assert [bool(calls) for calls in freed] == [True, True]
        assert all_are(arrays, {"gradients": 3, "destinations": 1}.get(use, 6))

    @pytest.mark.usefixtures("lazy")
    def test_a_pointers_owner(self, emulated):
        class Owner:
            pass

        owner, freed = Owner(), []
        array = emulated.put(np.ones(7, np.float32))
        layout = GradientLayout.of([(7,)])
        engine = GradientEngine(layout, emulated.kernels)
        synchronize(emulated)
        keep_busy(emulated)
        engine.add([raw(emulated.kernels.device.view(array, "w"), owner=owner)])
        engine.step()
        reference = weakref.ref(owner, freed.append)
        del owner
        gc.collect()
        assert reference() is not None
        synchronize(emulated)
        engine.add([raw(emulated.kernels.device.view(array, "w"), owner=None)])
        gc.collect()
        # No array is kept alive.
        assert reference() is None

    def test_torchs_is_not(self, device, monkeypatch):
        """Its allocator gives memory to later work on the stream that we are before: it need not wait for us."""
        lender, engine = ProducerStream(device, "torch", monkeypatch), new_engine(device)
        tensors = lender.lent()
        references = [weakref.ref(tensor) for tensor in tensors]
        engine.add(tensors)
        del tensors
        gc.collect()
        assert [reference() for reference in references] == [None, None]

    @pytest.mark.usefixtures("lazy")
    @pytest.mark.parametrize(("sets", "waits"), [(0, 5), (2, 3), (6, 0)])
    def test_a_host_that_runs_ahead_keeps_no_more_than_its_last_and_what_may_be_kept(
        self, emulated, monkeypatch, sets, waits
    ):
        """It waits for the oldest then; while all of it may be kept, for nothing."""
        engine, arrays, lent, alive = new_engine(emulated), filled(emulated, 3), [], []
        monkeypatch.setattr(events, "MOST_LENT", sets * sum(array.nbytes for array in arrays))
        synchronize(emulated)
        emulated.kernels.device.kept.wait()
        with cuda_emulator.recorded() as record:
            for _ in range(6):
                keep_busy(emulated)
                producers, freed = capsules(arrays)
                lent.append(freed)
                engine.add(producers)
                del producers
                gc.collect()
                alive.append([bool(calls) for calls, _ in lent].count(False))
        assert max(alive) == min(sets + 1, 6)
        assert record.waits == ["event"] * waits
        assert all_are(engine.step().gradients.values(), 3)


class JaxArray(Producer):
    """A JAX array on a GPU, as far as the package asks it: its capsule does not say that it is immutable."""

    class sharding:
        device_set = frozenset()

    aval = "float32[7]"

    def __init__(self, array):
        super().__init__(np.empty(array.shape, array.dtype), data=array.data.ptr, device=(2, 0))

    def is_deleted(self):
        return False


class TestJax:
    @pytest.fixture
    def given(self, emulated, monkeypatch):
        """JAX arrays, and what they hold."""
        jax = types.ModuleType("jax")
        jax.Array, jax.core = JaxArray, types.SimpleNamespace(Tracer=type("Tracer", (), {}))
        monkeypatch.setitem(sys.modules, "jax", jax)
        gpu = type("Device", (), {"platform": "gpu", "local_hardware_id": 0})()
        monkeypatch.setattr(JaxArray.sharding, "device_set", frozenset({gpu}))
        arrays = filled(emulated, 3)
        synchronize(emulated)
        return [JaxArray(array) for array in arrays], arrays

    def test_is_read_and_exported_anew_for_each_window(self, emulated, given):
        engine = new_engine(emulated)
        for window in (1, 2):
            engine.add(given[0])
            assert all_are(engine.step().gradients.values(), 3)
            assert [len(array.asked) for array in given[0]] == [window] * 2

    def test_of_a_replicated_one_the_copy_on_the_engines_device_is_read(self, emulated, given):
        near, far = JaxArray.sharding.device_set, {type("Device", (), {"platform": "gpu", "local_hardware_id": 1})()}
        far_array, whole_array = (
            type("Of", (JaxArray,), {"sharding": type("sharding", (), {"device_set": on}), "is_fully_replicated": True})
            for on in (far, near | far)
        )
        wholes = [whole_array(array) for array in given[1]]
        for whole, copy, array in zip(wholes, *given, strict=True):
            whole.addressable_shards = [types.SimpleNamespace(data=data) for data in (far_array(array), copy)]
        engine = new_engine(emulated)
        engine.add(wholes)
        assert all_are(engine.step().gradients.values(), 3)
        assert [len(array.asked) for array in (*wholes, *given[0])] == [0, 0, 1, 1]

    def test_is_no_destination(self, emulated, given):
        engine = new_engine(emulated)
        engine.add(filled(emulated, 1))
        with (
            nothing_is_launched(emulated),
            pytest.raises(BufferRefused, match=r"'layers.0.w' is read-only: got JaxArr"),
        ):
            engine.step(out=given[0])
        assert all_are(given[1], 3)

    def test_is_refused_in_a_capture_which_goes_on_without_it(self, emulated, given):
        engine, others = new_engine(emulated), filled(emulated, 4)
        message = "component 'layers.0.w' is a JAX array, which a CUDA graph cannot capture"
        with engine.capture() as graph:
            with pytest.raises(BufferRefused, match=message):
                engine.add(given[0])
            engine.add(others)
            engine.step()
        assert [array.asked for array in given[0]] == [[], []]
        assert all_are(graph.replay().gradients.values(), 4)


class StubEvent:
    """An event that lets other threads run while it is asked, as the driver's does."""

    is_done = False

    @property
    def done(self):
        time.sleep(0)
        return self.is_done


class StubDevice(CudaDevice):
    """A device whose events are done when the test says so."""

    def __init__(self):
        self.stream = types.SimpleNamespace(ptr=0, wait_event=lambda event: None)
        is_done, relaxed = (lambda event: event.done), (lambda call, *given: call(*given))
        self.events, self.recorded_events = types.SimpleNamespace(is_done=is_done, relaxed=relaxed), []
        self.kept = Kept(self.events)

    def active(self):
        return contextlib.nullcontext()

    def is_capturing(self):
        return False

    def current_stream(self):
        return self.stream

    def stream_of(self, handle):
        return self.stream

    def records(self, handle):
        return False

    def record(self):
        self.recorded_events.append(StubEvent())
        return self.recorded_events[-1]

    def behind(self, handle):
        return StubEvent()


class Lent:
    """Memory, as far as it can be kept."""

    def __init__(self, name=None, nbytes=0):
        self.name, self.nbytes = name, nbytes


class TestSharedByThreads:
    def test_nothing_is_lost_when_threads_give_back_and_let_go_at_once(self):
        device, names = StubDevice(), list(range(120))
        threads = [
            threading.Thread(
                target=lambda mine=names[i::4]: [device.give_back([streams.ProducerStream()], [Lent(n)]) for n in mine]
            )
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(lent.name for _, ((lent,), _), _ in device.kept._waiting) == names

    def test_what_comes_while_another_thread_asks_an_event_is_kept(self, monkeypatch):
        device = StubDevice()
        device.give_back([streams.ProducerStream()], [Lent("first")])

        def asked(_):
            monkeypatch.undo()
            other = threading.Thread(target=device.give_back, args=([streams.ProducerStream()], [Lent("meanwhile")]))
            other.start()
            other.join(60)
            return False

        monkeypatch.setattr(StubEvent, "done", property(asked))
        device.give_back([streams.ProducerStream()], [Lent("last")])
        assert {lent.name for _, ((lent,), _), _ in device.kept._waiting} == {"first", "meanwhile", "last"}

    @pytest.mark.parametrize(
        "call",
        [
            lambda device: device.wait_for([]),
            lambda device: device.wait_for([NamedStream(7)]),
            lambda device: device.give_back([NamedStream(7)], None),
            lambda device: device.give_back([streams.ProducerStream()], [Lent("another")]),
        ],
        ids=["wait_for nobody", "wait_for", "give_back", "give_back what is kept"],
    )
    def test_whoever_calls_next_lets_go(self, call):
        device, lent = StubDevice(), Lent()
        reference = weakref.ref(lent)
        device.give_back([streams.ProducerStream()], [lent])
        del lent
        call(device)
        assert reference() is not None
        device.recorded_events[0].is_done = True
        call(device)
        assert reference() is None


def test_nothing_is_recorded_on_one_stream_and_nothing_kept_without_memory(emulated):
    device = emulated.kernels.device
    current = emulated.xp.cuda.get_current_stream()
    device.kept.wait()
    with cuda_emulator.recorded() as record:
        device.wait_for([NamedStream(current.ptr)])
        device.give_back([NamedStream(current.ptr)], [Lent()])
        device.give_back([streams.ProducerStream()], None)
    assert record.operations == []
    assert not emulated.kernels.device.kept


def test_a_window_forgets_its_lenders(device, monkeypatch):
    """A stream that came with an earlier window may be gone."""
    lender, engine = ProducerStream(device, "a pointer with a stream", monkeypatch), new_engine(device)
    engine.add(lender.lent())
    assert engine.accumulator.producers == {NamedStream(lender.stream.ptr)}
    engine.step()
    assert engine.accumulator.producers == set()
    engine.add(lender.lent())
    engine.discard()
    assert engine.accumulator.producers == set()


def test_each_of_several_lenders_is_waited_for_and_told(device, monkeypatch):
    """In one micro-batch, of streams of their own; whichever the device does first."""
    producers = [ProducerStream(device, "a pointer with a stream", monkeypatch) for _ in range(2)]
    engine = new_engine(device)
    for value, order in ((2, 1), (3, -1)):
        writes, spoils = ([lender.writes(v) for lender in producers] for v in (value, np.nan))
        for write in writes:
            write()
        engine.add([lender.lent()[i] for i, lender in enumerate(producers)])
        for spoil in spoils:
            spoil()
        for lender in producers[::order]:
            lender.stream.synchronize()
        assert all_are(engine.step().gradients.values(), value)


@pytest.mark.usefixtures("lazy")
def test_each_micro_batchs_lender_waits_for_the_fold_of_several_that_were_held(device, monkeypatch):
    """Its next gradients must not be written over those that are still to be read."""
    lenders = [ProducerStream(device, "a pointer with a stream", monkeypatch) for _ in range(2)]
    engine = new_engine(device, hold=2)
    for value, order in ((2, 1), (4, -1)):
        writes, spoils = ([lender.writes(v) for lender in lenders] for v in (value, np.nan))
        for lender, write in zip(lenders, writes, strict=True):
            write()
            engine.add(lender.lent())
        for lender, spoil in list(zip(lenders, spoils, strict=True))[::order]:
            spoil()
            lender.stream.synchronize()
        assert all_are(engine.step().gradients.values(), value)
