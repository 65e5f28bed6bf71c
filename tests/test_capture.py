"""Captured steps: the eager one's bits, its very launches and no more, and what is refused before any launch."""

import dataclasses
import gc
import math
import weakref

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
import windows
from devices import (
    assign,
    bits_of,
    churned,
    nothing_is_launched,
    number_of,
    on_host,
    operations_of,
    put_all,
    synchronize,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient, RawBuffer
from gradengine.engine.capture import addresses_of
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch, WindowError
from gradengine.kernels.launch import CAPACITIES

SMALL = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})
NAN = math.nan


def named(arrays):
    return dict(zip([slot.name for slot in SMALL.slots], arrays, strict=True))


def new_engine(device, layout=SMALL, **options):
    return GradientEngine(layout, device.kernels, **{"max_norm": 0.5, **options})


def values_of(seed, layout=SMALL):
    return draw.random_gradients(seed, layout.slots)


def arrays_of(device, seed, layout=SMALL):
    return put_all(device, values_of(seed, layout))


def refill(device, arrays, values):
    """Other gradients in the same memory, as a backward pass that keeps its buffers writes them."""
    for array, value in zip(arrays, values, strict=True):
        assign(array, device.put(value))


def captured_window(engine, batches, weights=None, **options):
    """The graph of these micro-batches and their step."""
    with engine.capture() as graph:
        for gradients, weight in zip(batches, weights or [1.0] * len(batches), strict=True):
            engine.add(gradients, weight)
        engine.step(**options)
    return graph


def captured(device, seed=0, **options):
    """An engine, a micro-batch's gradients, and the graph of it and its step."""
    engine, arrays = new_engine(device), arrays_of(device, seed)
    return engine, arrays, captured_window(engine, [arrays], **options)


def eager(device, *batches, weights=None, **options):
    """The bits of a fresh engine that does the same without a graph; batches are seeds, or values."""
    engine = new_engine(device, **options)
    for batch, weight in zip(batches, weights or [1.0] * len(batches), strict=True):
        engine.add(put_all(device, values_of(batch) if isinstance(batch, int) else batch), weight)
    return bits_of(engine.step())


def bytes_of(arrays):
    return [on_host(array).tobytes() for array in arrays]


class TestBits:
    @settings(max_examples=20, phases=windows.PHASES)
    @given(data=st.data())
    def test_a_replay_is_the_eager_step(self, device, data):
        """Whatever kind of window, with other values in the same memory, and whatever happens to memory in between."""
        layout, options = data.draw(draw.uneven_layouts(device.chunk)), data.draw(windows.options)
        options["micro_batches"] = data.draw(st.sampled_from([None, 3]))
        window, placed = data.draw(windows.windows(layout, (1, 3), windows.WAYS[:-1])), []
        deferred = options["groups"] is None and data.draw(st.booleans())
        dtype = data.draw(st.none() | draw.dtypes)

        def destinations():
            return {slot.name: windows.Destination(device, slot, dtype, 1) for slot in layout.slots}

        def put(array):
            placed.append(device.put(array))
            return placed[-1]

        def stepped(engine, backend, out):
            windows.add_all(engine, backend, window)
            where = out and {name: each.pointer for name, each in out.items()}
            return engine.step(where, deferred=deferred, partial=True)

        out = destinations() if dtype and not deferred else None
        engine = GradientEngine(layout, device.kernels, **options)
        # Brought there before the stream records.
        windows.add_all(new_engine(device, layout), dataclasses.replace(device, put=put), window)
        ready = iter(placed)
        with engine.capture() as graph:
            stepped(engine, dataclasses.replace(device, put=lambda array: next(ready)), out)
        for replay in range(2):
            window = [batch.with_other_values(replay) for batch in window]
            refill(device, placed, [array for batch in window for array in batch.in_order(layout)])
            churned(device)
            result, other = graph.replay(check=bool(replay)), destinations() if out else None
            wanted = stepped(GradientEngine(layout, device.kernels, **options), device, other)
            for number in ("norm", "scale", "factor", "weight", "micro_batches"):
                assert number_of(getattr(result, number)) == number_of(getattr(wanted, number)), number
            assert (result.step, result.unused) == (replay, wanted.unused)
            if out is None:
                assert bits_of(result) == bits_of(wanted)
            for slot in layout.slots if out else ():
                draw.assert_same_bits(out[slot.name].values(), other[slot.name].values())

    def test_capturing_runs_nothing_and_eager_steps_and_replays_take_turns(self, device):
        engine = new_engine(device)
        engine.add(arrays_of(device, 5))
        before = list(bits_of(engine.step()).values())
        graph = captured_window(engine, [[None, *arrays_of(device, 0)[1:]]])
        synchronize(device)
        assert bytes_of(engine.accumulator.views().values()) == before
        wanted = eager(device, [None, *values_of(0)[1:]])
        for step in (1, 3):
            result = graph.replay()
            assert (result.step, result.unused, bits_of(result)) == (step, {"layers.0.w"}, wanted)
            engine.add(arrays_of(device, 5))
            assert list(bits_of(engine.step()).values()) == before
        assert engine.current_step == 5

    def test_gradients_and_engine_that_nobody_else_refers_to_are_kept(self, device):
        graph = captured_window(new_engine(device), [arrays_of(device, seed) for seed in range(2)])
        gc.collect()
        churned(device)
        assert bits_of(graph.replay()) == bits_of(graph.replay()) == eager(device, 0, 1)

    @pytest.mark.parametrize("when", ["capture", "replay"])
    def test_on_a_stream_of_ones_own(self, device, when):
        graph = captured(device)[2] if when == "replay" else None
        synchronize(device)
        with device.xp.cuda.Stream(non_blocking=True) as stream:
            graph = graph or captured(device)[2]
            assert device.xp.cuda.get_current_stream() == stream
            got = {name: array.get() for name, array in graph.replay().gradients.items()}
            stream.synchronize()
        assert {name: array.tobytes() for name, array in got.items()} == eager(device, 0)


class TestDropped:
    """What a graph reads and writes outlives its last replay, whoever has dropped it before that was done."""

    COUNT = CAPACITIES["small"] + 1

    @pytest.fixture(autouse=True)
    def _through_memory(self, monkeypatch):
        monkeypatch.setitem(CAPACITIES, "large", CAPACITIES["small"])

    def test_its_engine_keeps_it_no_longer_than_its_caller(self, device):
        """With it go the gradients that it keeps: a GPU's memory."""
        _engine, _, graph = captured(device)
        graph.replay()
        kept = weakref.ref(graph)
        del graph
        assert kept() is None

    def window(self, device):
        """A graph whose addresses travel through memory of its own, its gradients, and where it writes to."""
        layout = GradientLayout.of([(5,)] * self.COUNT)
        gradients = put_all(device, [np.full(5, 1 + position % 7, np.float32) for position in range(self.COUNT)])
        out = put_all(device, [np.zeros(5, np.float32)] * self.COUNT)
        engine = new_engine(device, layout, max_norm=None)
        graph = captured_window(engine, [gradients], out=out)
        synchronize(device)
        return graph, gradients, out

    def taken_by_others(self, device):
        """Whatever memory was freed, pinned or the device's, whichever stream it came from."""
        xp, place = device.xp, device.kernels.device
        gc.collect()
        place.let_go()
        for nbytes in (512, 4096, 8192, 65536):
            for pinned in [xp.cuda.alloc_pinned_memory(nbytes) for _ in range(20)]:
                np.frombuffer(pinned, np.uint8)[:] = 0x11
        for stream in (place._uploads, place.current_stream()):
            with device.kernels.device.on(stream):
                others = [xp.empty(512, np.uint8) for _ in range(2 * self.COUNT)]
                others += [xp.empty(size, np.uint8) for size in (1024, 4096, 4608, 8192) for _ in range(20)]
                for other in others:
                    xp.cuda.runtime.memsetAsync(other.data.ptr, 0xFF, other.nbytes, stream.ptr)
                stream.synchronize()  # as early as can be

    @pytest.mark.parametrize("how", ["dropped", "with its gradients"])
    def test_while_its_last_replay_runs(self, device, how):
        graph, gradients, out = self.window(device)
        values = [1 + position % 7 for position in range(self.COUNT)]
        scratch = device.put(np.zeros(8, np.float32))
        xp = device.kernels.xp
        with device.kernels.device.active():
            own = xp.cuda.Stream(non_blocking=True)
        with device.kernels.device.on(None if how == "dropped" else own), device.kernels.device.active():
            for _ in range(100):  # so much to do that no look at an event comes to the end of it
                xp.cuda.runtime.memsetAsync(scratch.data.ptr, 0, 32, xp.cuda.get_current_stream().ptr)
            graph.replay()
        if how != "dropped":
            gradients.clear()
        del graph
        self.taken_by_others(device)
        synchronize(device)
        assert [on_host(array)[0] for array in out] == values

    def test_is_let_go_when_that_is_done(self, device):
        graph, gradients, _ = self.window(device)
        place, reference = device.kernels.device, weakref.ref(graph._graph)
        graph.replay()
        del graph
        gc.collect()
        assert reference() is None
        synchronize(device)
        device.kernels.device.allocate(1)
        assert not place.kept
        assert gradients  # which are the caller's


class TestLaunches:
    @pytest.mark.parametrize(("count", "hold", "folds"), [(1, 1, 1), (4, 4, 1), (5, 2, 3)])
    def test_the_graph_is_the_eager_launch_list(self, emulated, count, hold, folds):
        """K + 2 launches without hold: each micro-batch, the verdict, the hand-back."""
        engine = new_engine(emulated, hold=hold)
        batches = [arrays_of(emulated, seed) for seed in range(count)]
        graph = captured_window(engine, batches)  # a first one: what it needs is brought there outside of the graph
        with cuda_emulator.recorded() as record:
            for gradients in batches:
                engine.add(gradients)
            engine.step()
        assert operations_of(graph._graph.graph) == record.launches
        assert len(record.launches) == folds + 2
        assert [name for name in record.operations if name not in record.launches] == ["copy device to host"]

    def test_nothing_is_allocated_and_nothing_waits(self, emulated):
        engine, arrays, _ = captured(emulated)
        with cuda_emulator.recorded() as record:
            graph = captured_window(engine, [arrays])
        assert (record.allocations, record.pinned_allocations) == ([], [])
        graph.replay()
        with cuda_emulator.recorded() as record:
            for _ in range(3):
                graph.replay()
        assert (record.allocations, record.pinned_allocations, record.waits) == ([], [], [])
        assert record.operations == ["graph", "copy device to host"] * 3


class Movable:
    """An array of a framework whose arrays may be given other memory, as torch's `.data =` does."""

    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.data.ptr

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


class TestMoved:
    @pytest.mark.parametrize("way", ["add", "add named", "parts", "out"])
    def test_an_array_elsewhere_is_refused_by_name_before_any_launch(self, device, way):
        engine, movable = new_engine(device), [Movable(array) for array in arrays_of(device, 0)]
        (w0, w1, head), others = movable, arrays_of(device, 1)
        with engine.capture() as graph:
            if way == "parts":
                engine.add_block(0, {"w": w0})
                engine.add_block(1, [w1])
                engine.add_non_block("head", head)
            else:
                given = others if way == "out" else movable
                engine.add(named(given) if way == "add named" else given)
            engine.step([None, *movable[1:]] if way == "out" else None)
        for name, array in list(named(movable).items())[way == "out" :]:
            first, array.array = array.array, device.put(on_host(array.array))
            with nothing_is_launched(device), pytest.raises(BufferRefused, match=f"component '{name}' .*address"):
                graph.replay()
            array.array = first
        assert engine.current_step == 0
        assert graph.replay().step == 0

    def test_addresses_by_every_way_a_framework_has(self, device):
        array = arrays_of(device, 0)[0]
        pointer = array.data.ptr

        class Interface:
            __cuda_array_interface__ = array.__cuda_array_interface__

        class OwnBuffer(RawBuffer):
            pass

        pointers = [kind(pointer, 15, "float32", "cuda:0") for kind in (RawBuffer, OwnBuffer)]
        sources = [array, Movable(array), Interface(), *pointers]
        assert addresses_of(sources) == [pointer] * len(sources)
        for source in sources:
            assert addresses_of([source, source]) == [pointer] * 2
        assert addresses_of([object()]) == [0]
        assert addresses_of([]) == []


class TestVerdict:
    def test_of_a_step_behind_one_that_the_device_did_not_see(self, device):
        """A verdict is known by its step's number: a NaN of a later replay was taken for another step's, and missed."""
        engine = new_engine(device, loss_scale=2.0**60, on_non_finite="skip")
        engine.add(arrays_of(device, 0), 2.0**100)
        with pytest.raises(WindowError, match="discard"):
            engine.step()
        engine.discard()
        arrays = arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        good = graph.replay()
        self.spoil(device, arrays)
        bad = graph.replay()
        assert (good.step, bad.step, bad.non_finite.step, good.non_finite) == (1, 2, 2, None)

    def spoil(self, device, arrays, index=4):
        values = values_of(0)
        values[1][index] = NAN
        refill(device, arrays, values)

    @pytest.mark.parametrize("policy", ["raise", "skip", "propagate"])
    def test_a_loop_of_replays_tells_every_last_bad_step(self, device, policy):
        engine, arrays, told = new_engine(device, on_non_finite=policy), arrays_of(device, 0), []
        seen = []
        engine.on_step(lambda result: seen.append(result.step))
        graph = captured_window(engine, [arrays])
        step, bad = 0, {1, 2, 5, 6, 9}
        while step < 13:
            self.spoil(device, arrays, step % 7) if step in bad else refill(device, arrays, values_of(0))
            try:
                result = graph.replay()
                assert bool(np.isnan(on_host(result.gradients["layers.1.w"])).any()) == (
                    policy == "propagate" and step in bad
                )
                step = result.step + 1
            except NonFiniteGradient as error:
                told.append((error.step, error.component, error.index, error.is_late, engine.current_step))
            synchronize(device)
        assert seen == list(range(13))  # the recording is not shown
        verdict = engine.latest_verdict
        assert (verdict.step, verdict.bad_steps, verdict.norm) == (13, len(bad), number_of(graph.result.norm))
        errors = [(step, "layers.1.w", step % 7, True, step + 1) for step in sorted(bad)]
        assert told == (errors if policy == "raise" else [])


#: Calls of an engine, with gradients and CuPy, that a capture does not allow, and what is raised then.
MISUSE = {
    "no step": (lambda e, a, x: e.add(a), WindowError, "no step was made"),
    "nothing": (lambda e, a, x: None, WindowError, "no step was made"),
    "an empty step": (lambda e, a, x: e.step(), WindowError, "without a micro-batch"),
    "a dropped one": (lambda e, a, x: (e.add(a), e.discard(), e.step()), WindowError, "without a micro-batch"),
    "nothing counted": (lambda e, a, x: e.add(None, weight=0), WindowError, "micro-batches with a weight"),
    "components": (lambda e, a, x: e.micro_batch(), WindowError, "takes whole micro-batches"),
    "another add": (lambda e, a, x: (e.add(a), e.step(), e.add(a)), WindowError, "holds one window"),
    "a block": (lambda e, a, x: (e.add(a), e.step(), e.add_block(0, a[:1])), WindowError, "holds one window"),
    "a part": (lambda e, a, x: (e.add(a), e.step(), e.add_non_block("head", a[2])), WindowError, "one window"),
    "another step": (lambda e, a, x: (e.add(a), e.step(), e.step()), WindowError, "holds one window"),
    "another capture": (
        lambda e, a, x: (e.add(a), e.step(), e.capture().__enter__()),
        WindowError,
        "is being captured",
    ),
    "saving": (lambda e, a, x: e.state_dict(), WindowError, "is being captured"),
    "the user's error": (lambda e, a, x: (e.add(a), e.step(), 1 / 0), ZeroDivisionError, ""),
    "a number": (lambda e, a, x: (e.add(a), float(e.step().norm)), RuntimeError, "(?i)captur"),
    "a wait": (lambda e, a, x: (e.add(a), x.cuda.get_current_stream().synchronize()), RuntimeError, "(?i)captur"),
}


class TestMisuse:
    """Whatever was refused, the engine and the stream are as before."""

    @pytest.mark.parametrize("what", MISUSE)
    def test_a_call_that_a_capture_does_not_allow(self, device, what):
        call, error, word = MISUSE[what]
        engine, arrays = new_engine(device), arrays_of(device, 0)
        with pytest.raises(error, match=word or None), engine.capture() as graph:
            call(engine, arrays, device.xp)
        with nothing_is_launched(device), pytest.raises(WindowError, match="nothing was recorded"):
            graph.replay()
        self.assert_as_before(device, engine)

    def assert_as_before(self, device, engine):
        """The stream works, nothing is open, and the next step is the first."""
        assert not device.xp.cuda.get_current_stream().is_capturing()
        assert (engine.current_step, engine.accumulator.accumulated_count) == (0, 0)
        engine.add(arrays_of(device, 3))
        result = engine.step()
        assert (result.step, bits_of(result)) == (0, eager(device, 3))
        result.check()
        engine.discard()
        assert bits_of(captured_window(engine, [arrays_of(device, 4)]).replay()) == eager(device, 4)

    def test_a_step_that_is_interrupted_inside(self, device, monkeypatch):
        def interrupted(*arguments):
            raise KeyboardInterrupt

        engine, arrays = new_engine(device), arrays_of(device, 0)
        with monkeypatch.context() as patch:
            patch.setattr(type(device.kernels), "hand_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                captured_window(engine, [arrays])
        self.assert_as_before(device, engine)

    def test_gradients_that_are_refused_inside_are_no_part_of_it(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        with engine.capture() as graph:
            for bad in (3.0, "abc", [1.0, 2.0, 3.0]):
                with pytest.raises((LayoutMismatch, BufferRefused)):
                    engine.add(bad)
            engine.add(arrays)
            engine.step()
        assert bits_of(graph.replay()) == eager(device, 0)

    def test_a_replay_inside_another_capture(self, device):
        engine, _, graph = captured(device)
        with pytest.raises(WindowError, match="is being captured"), engine.capture():
            graph.replay()
        self.assert_as_before(device, engine)

    def test_with_a_window_open(self, device):
        engine, _, graph = captured(device)
        engine.add(arrays_of(device, 1))
        for call in (engine.capture().__enter__, graph.replay):
            with nothing_is_launched(device), pytest.raises(WindowError, match="a window is open: got 1 micro-batches"):
                call()
        result = engine.step()
        assert (result.step, bits_of(result)) == (0, eager(device, 1))
        assert graph.replay().step == 1
        with pytest.raises(CallerError, match="check"):
            graph.replay(check="no")

    def test_with_an_exchange(self, emulated):
        """Neither captured nor replayed: the other workers' sums are no part of a graph."""
        before, _, graph = captured(emulated)

        def one(exchange):
            engine = before if exchange.rank == 0 else new_engine(emulated)
            engine.reconnect(exchange)
            for call in [engine.capture().__enter__, *([graph.replay] if exchange.rank == 0 else [])]:
                with pytest.raises(CallerError, match="waits for other ranks"):
                    call()
            return engine.current_step

        assert on_ranks(one, 2) == [0, 0]
