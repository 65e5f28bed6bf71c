"""Captured steps: the eager one's bits, its very launches and no more, and what is refused before any launch."""

import gc
import math
import weakref

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import assign, bits_of, churned, nothing_is_launched, on_host, operations_of, put_all, raw, synchronize
from ranks import on_ranks

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient, RawBuffer, local_group
from gradengine.capture import addresses_of
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch, WindowError
from gradengine.kernels.launch import CAPACITIES

LAYOUT = GradientLayout.transformer(2, 8, 4, 12, 16)
SMALL = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})
NAN = math.nan


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


def eager(device, batches, weights=None, layout=SMALL, **options):
    """The result of a fresh engine that does the same without a graph."""
    engine = new_engine(device, layout, **options)
    for values, weight in zip(batches, weights or [1.0] * len(batches), strict=True):
        engine.add(put_all(device, values), weight)
    return engine.step()


class TestBits:
    @pytest.mark.parametrize(
        ("options", "weights"),
        [
            ({}, [1.0]),
            ({}, [1.0, 3.0, 0.5]),
            ({"hold": 2}, [1.0, 1.0, 1.0]),
            ({"hold": 9}, [2.0] * 6),
            ({"micro_batches": 2}, [1.0, 1.0]),
            ({"groups": "block"}, [1.0, 1.0]),
            ({"loss_scale": 256.0, "max_norm": None}, [1.0, 2.0]),
            ({"average": "sum", "loss_scale": 4.0}, [1.0, 3.0, 0.5]),
        ],
    )
    def test_a_replay_is_the_eager_step(self, device, options, weights):
        """Also with other values in the same memory, and whatever happens to memory in between."""
        engine = new_engine(device, LAYOUT, **options)
        batches = [arrays_of(device, seed, LAYOUT) for seed in range(len(weights))]
        graph = captured_window(engine, batches, weights)
        for replay in range(3):
            values = [values_of(10 * replay + seed, LAYOUT) for seed in range(len(weights))]
            for arrays, value in zip(batches, values, strict=True):
                refill(device, arrays, value)
            churned(device)
            result, wanted = graph.replay(), eager(device, values, weights, LAYOUT, **options)
            assert bits_of(result) == bits_of(wanted)
            assert float(result.norm) == float(wanted.norm)
            assert float(result.scale) == float(wanted.scale)
            assert (result.weight, result.micro_batches) == (sum(weights), len(weights))

    def test_twice_is_the_same_step_twice(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        first = bits_of(graph.replay())
        churned(device)
        assert bits_of(graph.replay()) == first == bits_of(eager(device, [values_of(0)]))

    def test_capturing_runs_nothing(self, device):
        engine = new_engine(device)
        engine.add(arrays_of(device, 0))
        before = bits_of(engine.step())
        captured_window(engine, [arrays_of(device, 1)])
        synchronize(device)
        assert {n: on_host(a).tobytes() for n, a in engine.accumulator.views().items()} == before
        assert engine.current_step == 1

    def test_eager_steps_and_replays_take_turns(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        for turn in range(2):
            result = graph.replay()
            assert (result.step, bits_of(result)) == (2 * turn, bits_of(eager(device, [values_of(0)])))
            engine.add(arrays_of(device, 5))
            result = engine.step()
            assert (result.step, bits_of(result)) == (2 * turn + 1, bits_of(eager(device, [values_of(5)])))

    def test_components_without_a_gradient_are_zero_in_each_replay(self, device):
        engine, values = new_engine(device, max_norm=None), values_of(0)
        graph = captured_window(engine, [[None, *put_all(device, values[1:])]])
        for _ in range(2):
            result = graph.replay()
            assert result.unused == {"layers.0.w"}
            assert not on_host(result.gradients["layers.0.w"]).any()
            assert on_host(result.gradients["head"]).tobytes() == values[2].tobytes()
            assert float(result.norm) == pytest.approx(draw.exact_norm(values[1:]), rel=1e-6)
            engine.add(arrays_of(device, 1))  # leaves something else there
            engine.step()

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_destinations_are_written_by_each_replay(self, device, dtype):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        buffers = [device.buffer_at(np.full(slot.size, 9, draw.DTYPES[dtype]), 1) for slot in SMALL.slots]
        graph = captured_window(engine, [arrays], out=[raw(buffer) for buffer in buffers])
        assert all((device.get(buffer).view(draw.DTYPES[dtype]) == 9).all() for buffer in buffers)
        for seed in range(2):
            refill(device, arrays, values_of(seed))
            graph.replay()
            wanted = eager(device, [values_of(seed)])
            for buffer, array in zip(buffers, wanted.gradients.values(), strict=True):
                got = device.get(buffer).view(draw.DTYPES[dtype])
                draw.assert_same_bits(got, on_host(array).astype(got.dtype))

    def test_a_deferred_step(self, device):
        engine, values = new_engine(device), [values_of(seed) for seed in range(2)]
        graph = captured_window(engine, [put_all(device, value) for value in values], deferred=True)
        result, wanted = graph.replay(), eager(device, values)
        factor = on_host(result.factor)
        for array, total in zip(wanted.gradients.values(), zip(*values, strict=True), strict=True):
            draw.assert_same_bits(on_host(array), (total[0] + total[1]) * factor)
        for array, total in zip(result.sums.values(), zip(*values, strict=True), strict=True):
            draw.assert_same_bits(on_host(array), total[0] + total[1])

    def test_blocks_one_by_one(self, device):
        engine, values = new_engine(device), values_of(0)
        w0, w1, head = put_all(device, values)
        with engine.capture() as graph:
            engine.add_non_block("head", head)
            engine.add_block(1, {"w": w1})
            engine.add_block(0, [w0])
            engine.step()
        assert bits_of(graph.replay()) == bits_of(eager(device, [values]))

    def test_gradients_that_nobody_else_refers_to_are_kept(self, device):
        engine, values = new_engine(device), [values_of(seed) for seed in range(2)]
        batches = [put_all(device, value) for value in values]
        graph = captured_window(engine, batches)
        batches.clear()
        gc.collect()
        churned(device)
        assert bits_of(graph.replay()) == bits_of(eager(device, values))

    def test_the_graph_keeps_its_engine(self, device):
        def made():
            return captured_window(new_engine(device), [arrays_of(device, 0)])

        graph = made()
        gc.collect()
        churned(device)
        assert bits_of(graph.replay()) == bits_of(eager(device, [values_of(0)]))

    def test_on_the_current_stream(self, device):
        xp = device.xp
        graph = captured_window(new_engine(device), [arrays_of(device, 0)])
        synchronize(device)
        with xp.cuda.Stream(non_blocking=True) as stream:
            result = graph.replay()
            got = {name: array.get() for name, array in result.gradients.items()}
            stream.synchronize()
        wanted = eager(device, [values_of(0)])
        assert {name: array.tobytes() for name, array in got.items()} == bits_of(wanted)

    def test_captured_on_a_stream_of_ones_own(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        synchronize(device)
        with device.xp.cuda.Stream(non_blocking=True) as stream:
            graph = captured_window(engine, [arrays])
            assert device.xp.cuda.get_current_stream() == stream
            stream.synchronize()
        assert bits_of(graph.replay()) == bits_of(eager(device, [values_of(0)]))


class TestDropped:
    """What a graph reads and writes outlives its last replay, whoever has dropped it before that was done."""

    COUNT = CAPACITIES["small"] + 1

    @pytest.fixture(autouse=True)
    def _through_memory(self, monkeypatch):
        monkeypatch.setitem(CAPACITIES, "large", CAPACITIES["small"])

    def test_its_engine_keeps_it_no_longer_than_its_caller(self, device):
        """With it go the gradients that it keeps: a GPU's memory."""
        engine = new_engine(device)
        graph = captured_window(engine, [arrays_of(device, 0)])
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

    @pytest.mark.parametrize("stream", ["the current one", "its own"])
    @pytest.mark.parametrize("how", ["dropped", "pointed elsewhere", "dropped with its gradients"])
    def test_while_its_last_replay_runs(self, device, how, stream):
        graph, gradients, out = self.window(device)
        values = [1 + position % 7 for position in range(self.COUNT)]
        scratch = device.put(np.zeros(8, np.float32))
        xp = device.kernels.xp
        with device.kernels.device.active():
            own = xp.cuda.Stream(non_blocking=True)
        with device.kernels.device.on(own if stream == "its own" else None), device.kernels.device.active():
            for _ in range(100):  # so much to do that no look at an event comes to the end of it
                xp.cuda.runtime.memsetAsync(scratch.data.ptr, 0, 32, xp.cuda.get_current_stream().ptr)
            graph.replay()
        if how == "pointed elsewhere":
            graph.repoint([put_all(device, [np.zeros(5, np.float32)] * self.COUNT)], out=out)
        if how == "dropped with its gradients":
            gradients.clear()
        del graph
        self.taken_by_others(device)
        synchronize(device)
        assert [on_host(array)[0] for array in out] == values

    def test_is_let_go_when_that_is_done(self, device):
        graph, gradients, _ = self.window(device)
        place, reference = device.kernels.device, weakref.ref(graph._recorded)
        graph.replay()
        del graph
        gc.collect()
        assert reference() is None
        synchronize(device)
        device.kernels.device.allocate(1)
        assert not place.kept
        assert gradients  # which are the caller's


class TestLaunches:
    @pytest.mark.parametrize(("count", "hold", "folds"), [(1, 1, 1), (4, 1, 4), (4, 4, 1), (5, 2, 3), (9, 9, 3)])
    def test_the_graph_is_the_eager_launch_list(self, emulated, count, hold, folds):
        """K + 2 launches without hold: each micro-batch, the verdict, the hand-back. K1 reads its addresses."""
        engine = new_engine(emulated, LAYOUT, hold=hold)
        batches = [arrays_of(emulated, seed, LAYOUT) for seed in range(count)]

        def window():
            for gradients in batches:
                engine.add(gradients)
            engine.step()

        window()
        with cuda_emulator.recorded() as record:
            window()
        graph = captured_window(engine, batches)
        reads = [name.replace("small", "table") if "accumulate" in name else name for name in record.launches]
        assert operations_of(graph._recorded.graph) == reads
        assert len(record.launches) == folds + 2
        assert [name for name in record.operations if name not in record.launches] == ["copy device to host"]

    def test_nothing_is_allocated_and_nothing_waits(self, emulated):
        engine = new_engine(emulated)
        arrays = arrays_of(emulated, 0)
        engine.add(arrays)
        engine.step()
        with cuda_emulator.recorded() as record:
            graph = captured_window(engine, [arrays])
        assert (record.allocations, record.pinned_allocations) == ([65536], [])  # the addresses
        with cuda_emulator.recorded() as record:
            for _ in range(3):
                graph.replay()
        assert (record.allocations, record.pinned_allocations, record.waits) == ([], [], [])
        assert record.operations == ["graph", "copy device to host"] * 3

    def test_a_first_window_may_be_captured(self, emulated):
        """What it needs on the device is brought there outside of the graph."""
        graph = captured_window(new_engine(emulated), [arrays_of(emulated, 0)])
        assert operations_of(graph._recorded.graph) == ["accumulate_1_table", "finalise", "hand_back_small"]

    def test_unchecked_replays_are_the_same(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        assert bits_of(graph.replay(check=False)) == bits_of(eager(device, [values_of(0)]))


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
    @pytest.mark.parametrize("as_mapping", [True, False])
    def test_a_gradient_elsewhere_is_refused_by_name_before_any_launch(self, device, as_mapping):
        engine = new_engine(device)
        arrays = [Movable(array) for array in arrays_of(device, 0)]
        names = [slot.name for slot in SMALL.slots]
        graph = captured_window(engine, [dict(zip(names, arrays, strict=True)) if as_mapping else arrays])
        first, arrays[1].array = arrays[1].array, device.put(values_of(1)[1])
        message = (
            r"component 'layers.1.w' is not at the address that .* captured with: got address 0x\w+, expected 0x\w+"
        )
        with nothing_is_launched(device), pytest.raises(BufferRefused, match=message):
            graph.replay()
        assert engine.current_step == 0
        arrays[1].array = first
        assert bits_of(graph.replay()) == bits_of(eager(device, [values_of(0)]))

    def test_of_a_block(self, device):
        engine, (w0, w1, head) = new_engine(device), [Movable(array) for array in arrays_of(device, 0)]
        with engine.capture() as graph:
            engine.add_block(0, {"w": w0})
            engine.add_block(1, [w1])
            engine.add_non_block("head", head)
            engine.step()
        for name, moved in (("layers.0.w", w0), ("layers.1.w", w1), ("head", head)):
            kept, moved.array = moved.array, device.put(on_host(moved.array))
            with (
                nothing_is_launched(device),
                pytest.raises(BufferRefused, match=f"component '{name}' is not at the address"),
            ):
                graph.replay()
            moved.array = kept

    def test_a_destination_elsewhere(self, device):
        engine, out = new_engine(device), [Movable(array) for array in arrays_of(device, 0)]
        graph = captured_window(engine, [arrays_of(device, 0)], out=[None, None, out[2]])
        out[2].array = device.put(values_of(1)[2])
        with nothing_is_launched(device), pytest.raises(BufferRefused, match="component 'head' is not at the address"):
            graph.replay()

    @pytest.mark.parametrize("what", ["gradients", "destinations"])
    def test_a_pointer_whose_owner_was_freed(self, device, what):
        class Owner:
            pass

        engine, arrays, owner = new_engine(device), arrays_of(device, 0), Owner()
        memory = arrays_of(device, 1)
        pointers = [raw(device.kernels.device.view(array, "w"), owner=weakref.ref(owner)) for array in memory]
        options = {"out": [None, *pointers[1:]]} if what == "destinations" else {}
        graph = captured_window(engine, [arrays if options else [arrays[0], *pointers[1:]]], **options)
        graph.replay()
        del owner
        gc.collect()
        with nothing_is_launched(device), pytest.raises(BufferRefused, match=r"'layers.1.w' .* freed: got a weak ref"):
            graph.replay()
        assert engine.current_step == 1
        graph.repoint([arrays], out=[None, *arrays_of(device, 2)[1:]] if options else None)
        assert graph.replay().step == 1

    def test_repoint_reads_other_memory(self, device):
        engine, weights = new_engine(device, hold=2), [1.0, 3.0]
        batches, others = ([arrays_of(device, seed) for seed in seeds] for seeds in ((0, 1), (5, 6)))
        graph = captured_window(engine, batches, weights)
        before = bits_of(graph.replay())
        graph.repoint(others)
        assert bits_of(graph.result) == before  # nothing has run
        for batch in batches:
            refill(device, batch, [np.full(slot.shape, NAN, np.float32) for slot in SMALL.slots])
        result = graph.replay()
        assert bits_of(result) == bits_of(eager(device, [values_of(5), values_of(6)], weights))
        assert (result.step, result.weight) == (1, 4.0)
        graph.repoint(others[::-1])
        assert bits_of(graph.replay()) == bits_of(eager(device, [values_of(6), values_of(5)], weights))

    def test_repoint_of_destinations(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        first, second = arrays_of(device, 1), arrays_of(device, 2)
        graph = captured_window(engine, [arrays], out=first)
        graph.repoint([arrays], out=second)
        graph.replay()
        wanted = bits_of(eager(device, [values_of(0)]))
        assert [on_host(array).tobytes() for array in second] == list(wanted.values())
        assert [on_host(array).tobytes() for array in first] == [value.tobytes() for value in values_of(1)]

    def test_destinations_of_one_repoint_are_those_of_the_next(self, device):
        first, last = (put_all(device, [np.zeros(s.shape, np.float32) for s in SMALL.slots]) for _ in range(2))
        graph = captured_window(new_engine(device), [arrays_of(device, 0)], out=first)
        graph.repoint([arrays_of(device, 1)], out=last)
        graph.repoint([arrays_of(device, 2)])
        graph.replay()
        wanted = eager(device, [values_of(2)]).gradients
        assert [on_host(array).tobytes() for array in last] == [on_host(array).tobytes() for array in wanted.values()]
        assert not any(on_host(array).any() for array in first)

    def test_repoint_keeps_it_deferred(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays], deferred=True)
        graph.repoint([arrays])
        got = graph.replay().sums.values()
        assert [on_host(array).tobytes() for array in got] == [value.tobytes() for value in values_of(0)]

    @pytest.mark.parametrize(
        ("batches", "error", "message"),
        [
            (lambda good: [], CallerError, "cannot be replayed with these: got 0 micro-batches, expected 1"),
            (lambda good: [good, good], CallerError, "got 2 micro-batches, expected 1"),
            (lambda good: [good[:2]], LayoutMismatch, "got 2, expected 3"),
            (lambda good: [[*good[:2], np.ones(1, np.float32)]], BufferRefused, "'head' is on another device"),
            (
                lambda good: [{"layers.0.w": [good[0]], "layers.1.w": good[1], "head": good[2]}],
                BufferRefused,
                "'layers.0.w' is not an array on a GPU: got list",
            ),
            (
                lambda good: [[good[0], None, good[2]]],
                CallerError,
                "'layers.1.w' lacks a gradient in micro-batch 0, other than at the capture: got 2 components",
            ),
        ],
    )
    def test_a_repoint_that_fails_leaves_the_graph(self, device, batches, error, message):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        with pytest.raises(error, match=message):
            graph.repoint(batches(arrays_of(device, 1)))
        assert (engine.current_step, engine.accumulator.accumulated_count) == (0, 0)
        assert bits_of(graph.replay()) == bits_of(eager(device, [values_of(0)]))

    def test_repoint_without_destinations_at_the_capture(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        with pytest.raises(CallerError, match="captured without destinations"):
            graph.repoint([arrays], out=arrays_of(device, 1))
        assert bits_of(graph.replay()) == bits_of(eager(device, [values_of(0)]))

    def test_repoint_to_other_destinations_than_were_wanted(self, device):
        engine, arrays, there = new_engine(device), arrays_of(device, 0), arrays_of(device, 1)
        graph = captured_window(engine, [arrays], out=[None, *there[1:]])
        with pytest.raises(CallerError, match=r"'layers.0.w' has a destination, other than at the capture"):
            graph.repoint([arrays], out=there)

    def test_repoint_with_an_array_twice_in_one_fold(self, device):
        engine, batches = new_engine(device, hold=2), [arrays_of(device, seed) for seed in range(4)]
        graph = captured_window(engine, batches)
        graph.repoint([*batches[:2], *batches[:2]])
        with pytest.raises(BufferRefused, match=r"'layers.0.w' is held already at the same address"):
            graph.repoint([batches[0], batches[0], *batches[2:]])

    def test_repoint_is_one_copy(self, emulated):
        batches, others = ([arrays_of(emulated, seed) for seed in seeds] for seeds in (range(3), range(3, 6)))
        there = arrays_of(emulated, 8), arrays_of(emulated, 9)
        graph = captured_window(new_engine(emulated), batches, out=there[0])
        graph.repoint(others, out=there[1])  # which brings pinned memory to the pool
        synchronize(emulated)
        with cuda_emulator.recorded() as record:
            graph.repoint(batches, out=there[0])
        assert (record.operations, record.allocations, record.waits) == (["copy host to device"], [], [])

    def test_repoint_with_more_addresses_than_a_block_of_them_has(self, device):
        count = 300
        layout = GradientLayout.of({f"w{i}": (1 + i % 5,) for i in range(count)})
        batches = [arrays_of(device, seed, layout) for seed in range(30)]
        graph = captured_window(new_engine(device, layout), batches)
        graph.repoint(batches[::-1])
        wanted = eager(device, [values_of(seed, layout) for seed in range(30)][::-1], layout=layout)
        assert bits_of(graph.replay()) == bits_of(wanted)

    def test_repoint_keeps_what_else_was_captured(self, device):
        """Work of one's own between the adds is part of the graph."""
        engine, arrays, others = new_engine(device), arrays_of(device, 0), arrays_of(device, 1)
        with engine.capture() as graph:
            engine.add(arrays)
            head = engine.accumulator.target_of(SMALL.slot("head"))
            device.kernels.scale([head], np.float32(2), [head])
            engine.step(deferred=True)
        graph.repoint([others])
        sums = [on_host(array) for array in graph.replay().sums.values()]
        w0, w1, head = values_of(1)
        assert [array.tobytes() for array in sums] == [array.tobytes() for array in (w0, w1, 2 * head)]

    def test_repoint_to_another_dtype(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        short = [value.astype(np.float16) for value in values_of(1)]
        graph = captured_window(engine, [arrays])
        graph.repoint([put_all(device, short)])
        assert bits_of(graph.replay()) == bits_of(eager(device, [short]))

    @pytest.mark.parametrize("fault", [MemoryError, KeyboardInterrupt])
    def test_a_repoint_that_ends_before_its_copy(self, device, monkeypatch, fault):
        """An error leaves the graph as it was; an interrupt may have come after the copy, and leaves none."""

        def fail(*_):
            raise fault

        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        others = arrays_of(device, 1)
        with monkeypatch.context() as patch:
            patch.setattr(device.kernels.device, "copied_into", fail)
            with pytest.raises(fault):
                graph.repoint([others])
        if fault is KeyboardInterrupt:
            engine.discard()
            with pytest.raises(WindowError, match="nothing was recorded"):
                graph.replay()
        else:
            assert bits_of(graph.replay()) == bits_of(eager(device, [values_of(0)]))

    def test_windows_by_blocks_are_not_repointed(self, device):
        engine, (w0, w1, head) = new_engine(device), arrays_of(device, 0)
        with engine.capture() as graph:
            engine.add_block(0, [w0]), engine.add_block(1, [w1]), engine.add_non_block("head", head)
            engine.step()
        with pytest.raises(CallerError, match="expected a window added in whole micro-batches"):
            graph.repoint([[w0, w1, head]])

    def test_addresses_by_every_way_a_framework_has(self, device):
        array = arrays_of(device, 0)[0]
        pointer = array.data.ptr

        class Interface:
            __cuda_array_interface__ = array.__cuda_array_interface__

        class OwnBuffer(RawBuffer):
            pass

        raw = [kind(pointer, 15, "float32", "cuda:0") for kind in (RawBuffer, OwnBuffer)]
        sources = [array, Movable(array), Interface(), *raw]
        assert addresses_of(sources) == [pointer] * len(sources)
        for source in sources:
            assert addresses_of([source, source]) == [pointer] * 2
        assert addresses_of([object()]) == [0]
        assert addresses_of([]) == []


class TestCounting:
    def test_each_replay_is_a_step(self, device):
        engine = new_engine(device)
        graph = captured_window(engine, [arrays_of(device, 0)])
        assert [graph.replay().step for _ in range(7)] == list(range(7))
        assert engine.current_step == 7
        synchronize(device)
        graph.replay()
        synchronize(device)
        verdict = engine.latest_verdict
        assert (verdict.step, verdict.bad_steps, verdict.skipped) == (8, 0, False)
        assert verdict.norm == float(graph.result.norm)

    @pytest.mark.parametrize("before", ["a window that was refused", "another worker"])
    def test_of_steps_that_the_device_did_not_see(self, device, before):
        """A verdict is known by its step's number: a NaN of a later replay was taken for another step's, and missed."""
        if before == "another worker":

            def step(exchange):
                engine = new_engine(device, exchange=exchange, on_non_finite="skip")
                engine.add(arrays_of(device, 0))
                engine.step()
                return engine

            engine = on_ranks(step, 2)[0]
            engine.exchange.close()
            engine.reconnect(*local_group(1))
        else:
            engine = new_engine(device, loss_scale=2.0**60, on_non_finite="skip")
            engine.add(arrays_of(device, 0), 2.0**100)
            with pytest.raises(WindowError, match="discard"):
                engine.step()
            engine.discard()
        arrays = arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        good = graph.replay()
        values = values_of(0)
        values[1][4] = NAN
        refill(device, arrays, values)
        bad = graph.replay()
        assert (good.step, bad.step, bad.non_finite.step, good.non_finite) == (1, 2, 2, None)


class TestVerdict:
    def bad(self, device, arrays, index=4):
        values = values_of(0)
        values[1][index] = NAN
        refill(device, arrays, values)

    @pytest.mark.parametrize("call", ["replay", "add", "step"])
    def test_raised_late_by_what_comes_next(self, device, call):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        graph.replay()
        self.bad(device, arrays)
        result = graph.replay()
        assert float(result.skipped) == 1.0
        assert not any(on_host(array).any() for array in result.gradients.values())
        synchronize(device)
        others = arrays_of(device, 1)
        calls = {"replay": graph.replay, "add": lambda: engine.add(others), "step": engine.step}
        with nothing_is_launched(device), pytest.raises(NonFiniteGradient) as caught:
            calls[call]()
        error = caught.value
        assert (error.component, error.index, error.step, error.is_late) == ("layers.1.w", 4, 1, True)
        assert engine.current_step == 2
        refill(device, arrays, values_of(0))
        result = graph.replay()
        assert (result.step, bits_of(result)) == (2, bits_of(eager(device, [values_of(0)])))

    def test_each_replay_is_shown_and_the_recording_is_not(self, device):
        engine, arrays, seen = new_engine(device), arrays_of(device, 0), []
        engine.on_step(lambda result: seen.append(result.step))
        graph = captured_window(engine, [arrays])
        assert seen == []
        graph.replay()
        graph.replay()
        assert seen == [0, 1]

    def test_check_of_a_replay(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        graph.replay().check()
        self.bad(device, arrays, index=2)
        result = graph.replay()
        with pytest.raises(NonFiniteGradient) as caught:
            result.check()
        assert (caught.value.step, caught.value.index) == (1, 2)
        refill(device, arrays, values_of(0))
        synchronize(device)
        result = graph.replay()  # told once
        result.check()
        assert result.step == 2

    def test_a_loop_of_replays_tells_every_last_bad_step(self, device):
        engine, arrays, told = new_engine(device), arrays_of(device, 0), []
        graph = captured_window(engine, [arrays])
        step, bad = 0, {1, 2, 5, 6, 9}
        while step < 13:
            if step in bad:
                self.bad(device, arrays, step % 7)
            else:
                refill(device, arrays, values_of(0))
            step = max(step, self.replayed(graph, told))
        for _ in range(3):
            synchronize(device)
            self.replayed(graph, told)
        assert engine.latest_verdict.bad_steps == len(bad)
        assert told == sorted(set(told))
        assert told[-1] == (9, 2)

    def replayed(self, graph, told):
        """The steps that are over afterwards, or 0 where an earlier one's error came instead."""
        try:
            return graph.replay().step + 1
        except NonFiniteGradient as error:
            told.append((error.step, error.index))
            return 0

    @pytest.mark.parametrize("policy", ["skip", "pass"])
    def test_policies_that_raise_nothing(self, device, policy):
        engine, arrays = new_engine(device, on_non_finite=policy), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        self.bad(device, arrays)
        for _ in range(3):
            result = graph.replay()
            synchronize(device)
        assert float(result.skipped) == (policy == "skip")
        assert np.isnan(on_host(result.gradients["layers.1.w"])[4]) == (policy == "pass")
        assert result.non_finite.step == 2
        assert engine.latest_verdict.bad_steps == 3


class TestMisuse:
    def capture(self, engine, *calls):
        with engine.capture():
            for call in calls:
                call()

    def assert_as_before(self, device, engine):
        """The stream works, nothing is open, and the next step is the first."""
        stream = device.xp.cuda.get_current_stream()
        assert not stream.is_capturing()
        assert (engine.current_step, engine.accumulator.accumulated_count) == (0, 0)
        engine.add(arrays_of(device, 3))
        result = engine.step()
        assert (result.step, bits_of(result)) == (0, bits_of(eager(device, [values_of(3)])))
        result.check()
        engine.discard()
        graph = captured_window(engine, [arrays_of(device, 4)])
        assert bits_of(graph.replay()) == bits_of(eager(device, [values_of(4)]))

    def test_on_the_cpu(self):
        with pytest.raises(CallerError, match="only a GPU's steps can be captured: got device 'cpu'"):
            GradientEngine(SMALL).capture()

    def test_with_a_window_open(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        engine.add(arrays)
        with pytest.raises(WindowError, match="a window is open: got 1 micro-batches"):
            engine.capture()
        assert bits_of(engine.step()) == bits_of(eager(device, [values_of(0)]))

    def test_replay_with_a_window_open(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        engine.add(arrays_of(device, 1))
        with nothing_is_launched(device), pytest.raises(WindowError, match="a window is open: got 1 micro-batches"):
            graph.replay()
        result = engine.step()
        assert (result.step, bits_of(result)) == (0, bits_of(eager(device, [values_of(1)])))
        assert graph.replay().step == 1

    def test_without_a_step(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        with pytest.raises(WindowError, match=r"no step was made inside capture\(\)"), engine.capture() as graph:
            engine.add(arrays)
        with nothing_is_launched(device), pytest.raises(WindowError, match="nothing was recorded"):
            graph.replay()
        self.assert_as_before(device, engine)

    def test_with_nothing_at_all(self, device):
        engine = new_engine(device)
        with pytest.raises(WindowError, match="no step was made"), engine.capture():
            pass
        self.assert_as_before(device, engine)

    def test_a_step_without_a_micro_batch(self, device):
        engine = new_engine(device)
        with pytest.raises(WindowError, match="step 0 without a micro-batch"), engine.capture():
            engine.step()
        self.assert_as_before(device, engine)

    @pytest.mark.parametrize("again", ["add", "add_block", "add_non_block", "step"])
    def test_more_than_one_window(self, device, again):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        calls = {
            "add": lambda: engine.add(arrays),
            "add_block": lambda: engine.add_block(0, arrays[:1]),
            "add_non_block": lambda: engine.add_non_block("head", arrays[2]),
            "step": engine.step,
        }
        with pytest.raises(WindowError, match="a capture holds one window"):
            self.capture(engine, lambda: engine.add(arrays), engine.step, calls[again])
        self.assert_as_before(device, engine)

    def test_an_error_of_ones_own_inside(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        with pytest.raises(ZeroDivisionError):
            self.capture(engine, lambda: engine.add(arrays), engine.step, lambda: 1 / 0)
        self.assert_as_before(device, engine)

    def test_a_step_that_is_interrupted_inside(self, device, monkeypatch):
        def interrupted(*arguments):
            raise KeyboardInterrupt

        engine, arrays = new_engine(device), arrays_of(device, 0)
        with monkeypatch.context() as patch:
            patch.setattr(type(device.kernels), "hand_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                self.capture(engine, lambda: engine.add(arrays), engine.step)
        self.assert_as_before(device, engine)

    @pytest.mark.parametrize("wait", ["a number", "the stream"])
    def test_waiting_for_the_device_inside(self, device, wait):
        """The driver ends the capture then; the engine and the stream are as before."""
        engine, arrays, xp = new_engine(device), arrays_of(device, 0), device.xp
        waits = {
            "a number": lambda: float(engine.step().norm),
            "the stream": lambda: xp.cuda.get_current_stream().synchronize(),
        }
        with pytest.raises(RuntimeError, match=r"(?i)captur"):
            self.capture(engine, lambda: engine.add(arrays), waits[wait])
        self.assert_as_before(device, engine)

    @pytest.mark.parametrize("bad", [3.0, "abc", [1.0, 2.0, 3.0]])
    def test_gradients_that_are_refused_inside(self, device, bad):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        with engine.capture() as graph:
            with pytest.raises((LayoutMismatch, BufferRefused)):
                engine.add(bad)
            engine.add(arrays)  # and nothing of the others is in the graph
            engine.step()
        assert bits_of(graph.replay()) == bits_of(eager(device, [values_of(0)]))
        graph.repoint([arrays])

    def test_a_window_dropped_inside_may_begin_anew(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        with pytest.raises(WindowError, match="step 0 without a micro-batch"):
            self.capture(engine, lambda: engine.add(arrays), engine.discard, engine.step)
        self.assert_as_before(device, engine)

    def test_a_capture_inside_another(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        with pytest.raises(WindowError, match="a window is being captured"):
            self.capture(engine, lambda: engine.add(arrays), engine.step, engine.capture)
        self.assert_as_before(device, engine)

    def test_a_replay_inside_another_capture(self, device):
        engine, arrays = new_engine(device), arrays_of(device, 0)
        graph = captured_window(engine, [arrays])
        with pytest.raises(WindowError, match="a window is being captured"), engine.capture():
            graph.replay()
        self.assert_as_before(device, engine)

    def test_with_an_exchange(self, emulated):
        """Neither captured nor replayed: the other workers' sums are no part of a graph."""
        before = new_engine(emulated)
        graph = captured_window(before, [arrays_of(emulated, 0)])

        def one(exchange):
            engine = before if exchange.rank == 0 else new_engine(emulated)
            engine.reconnect(exchange)
            calls = [engine.capture, *([graph.replay] if exchange.rank == 0 else [])]
            for call in calls:
                with pytest.raises(CallerError, match="a step with an exchange waits for other workers"):
                    call()
            return engine.current_step

        assert on_ranks(one, 2) == [0, 0]
