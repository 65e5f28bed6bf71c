"""Weights in a GPU's memory: the bits of the same weights on the host, no wait, and a verdict on bad ones."""

import itertools
import math
import sys
from dataclasses import replace

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
import windows
from devices import assign, bits_of, nothing_is_launched, number_of, put_all, synchronize
from emulated_torch import Tensor, emulated_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient
from gradengine.errors import BufferRefused, CallerError, WindowError
from gradengine.kernels.launch import CAPACITIES

LAYOUT = GradientLayout.of({"layers.0.w": (3, 50), "layers.0.b": (9,), "layers.1.w": (7, 4), "head": (5,)})
NAN, INF = math.nan, math.inf
DTYPES = ["float32", "float64", "int32", "int64"]


def values_of(seed):
    return draw.random_gradients(seed, LAYOUT.slots)


def put(device, weight, dtype="float64", shape=()):
    """A weight in an array on the device."""
    return device.put(np.full(shape, weight, dtype))


class Producer:
    """A DLPack producer and no more, as JAX's arrays are."""

    def __init__(self, array, where=None):
        self.array, self.where = array, where

    def __dlpack__(self, **options):
        return self.array.__dlpack__(stream=options["stream"])

    def __dlpack_device__(self):
        return self.where or self.array.__dlpack_device__()


#: How a weight may come, of the host's or on the device.
NUMBERS = {
    "host": lambda device, number, dtype: number,
    "numpy": lambda device, number, dtype: np.array(number, dtype),
    "device": put,
    "of one element": lambda device, number, dtype: put(device, number, dtype, (1, 1)),
    "dlpack": lambda device, number, dtype: Producer(put(device, number, dtype)),
}


def engine_on(device, **options):
    return GradientEngine(LAYOUT, device.kernels, **{"max_norm": 0.5, **options})


def stepped(device, batches, weights, **options):
    """The result of a window; None in place of gradients is left out."""
    engine = engine_on(device, **options)
    for values, weight in zip(batches, weights, strict=True):
        engine.add(put_all(device, values), weight)
    return engine.step()


def assert_same(found, expected):
    assert bits_of(found) == bits_of(expected)
    for name in ("weight", "norm", "scale", "factor", "inverse_factor", "skipped"):
        assert number_of(getattr(found, name)) == number_of(getattr(expected, name)), name


class TestBits:
    @settings(max_examples=25, phases=windows.PHASES)
    @given(data=st.data())
    def test_those_of_the_same_weights_on_the_host(self, device, data):
        """Of each dtype and shape of one number; of weight 0 a micro-batch counts nothing, whatever is in it."""
        options, window, expected = data.draw(windows.options), [], []
        first, *rest = data.draw(windows.windows(LAYOUT, (1, 4)))
        # Else what nobody has a gradient for would be -0.0 behind a micro-batch of weight 0.
        first = replace(first, gradients=dict(zip(first.gradients, values_of(0), strict=True)))
        for batch in (first, *rest):
            if data.draw(st.booleans()):
                bad, zero = (
                    data.draw(st.sampled_from([1.0, NAN, INF])),
                    put(device, 0, data.draw(st.sampled_from(DTYPES))),
                )
                nothing = {slot.name: np.full(slot.shape, bad, np.float32) for slot in LAYOUT.slots}
                window.append(replace(batch, gradients=nothing, weight=zero))
            way, dtype = data.draw(st.sampled_from([*NUMBERS])), data.draw(st.sampled_from(DTYPES))
            number = max(1.0, round(batch.weight)) if "int" in dtype else batch.weight
            window.append(replace(batch, weight=NUMBERS[way](device, number, dtype)))
            expected.append(replace(batch, weight=number))
        there, here = engine_on(device, **options), engine_on(device, **options)
        windows.add_all(there, device, window)
        windows.add_all(here, device, expected)
        assert_same(there.step(), here.step())

    def test_of_more_micro_batches_than_one_piece_of_memory_has_room_for(self, device):
        weights, values = [float(i % 7 + 1) for i in range(70)], values_of(1)
        there = stepped(device, [values] * 70, [put(device, weight) for weight in weights])
        assert_same(there, stepped(device, [values] * 70, weights))

    @pytest.mark.parametrize("hold", [1, 4])
    def test_beside_addresses_that_go_through_memory(self, emulated, monkeypatch, hold):
        for size in CAPACITIES:
            monkeypatch.setitem(CAPACITIES, size, 1)
        batches, weights = [values_of(seed) for seed in range(3)], [3.0, 0.1, 7.0]
        with cuda_emulator.recorded() as record:
            there = stepped(emulated, batches, [put(emulated, weight) for weight in weights], hold=hold)
        assert f"accumulate_{hold}_table" in record.launches
        assert_same(there, stepped(emulated, batches, weights, hold=hold))

    def test_each_is_read_as_its_micro_batch_begins(self, device):
        """Though it is folded later, and its array is written to meanwhile."""
        engine, weight = engine_on(device, hold=4), put(device, 0, "int64")
        batches = [values_of(seed) for seed in range(3)]
        for values, tokens in zip(batches, (5, 2, 9), strict=True):
            assign(weight, device.put(np.array(tokens)))
            engine.add(put_all(device, values), weight)
        assign(weight, device.put(np.array(77)))
        assert engine.accumulator.weights == (5.0, 2.0, 9.0)
        assert engine.accumulator.total_weight == 16.0
        assert_same(engine.step(), stepped(device, batches, [5, 2, 9], hold=4))

    def test_each_window_has_its_own_without_new_memory(self, device):
        engine, pieces = engine_on(device), []
        for seed in range(3):
            engine.add(put_all(device, values_of(seed)), put(device, seed + 2))
            assert_same(engine.step(), stepped(device, [values_of(seed)], [seed + 2]))
            pieces.append(list(engine.accumulator.weighing._there._pieces))
        assert pieces[0] == pieces[2]
        assert len(pieces[0]) == 1

    def test_the_arithmetic_mean_in_place(self, device):
        engine, expected = engine_on(device), engine_on(device)
        for each, weight in ((engine, put(device, 3)), (expected, 3)):
            each.add(put_all(device, values_of(1)), weight)
            each.accumulator.average()
            each.add(put_all(device, values_of(2)), 2.0)
        assert_same(engine.step(), expected.step())


def test_one_of_0_is_measured_too_where_nothing_else_comes_behind_a_saved_window(device):
    engine, resumed, expected = (engine_on(device) for _ in range(3))
    for each in (engine, expected):
        each.add(put_all(device, values_of(1)), 2.0)
    resumed.load_state_dict(engine.state_dict())
    resumed.add(put_all(device, values_of(2)), put(device, 0))
    assert_same(resumed.step(), expected.step())


class TestNoWait:
    @pytest.mark.parametrize("hold", [1, 4])
    def test_a_launch_of_one_thread_for_each_micro_batch(self, emulated, hold):
        engine, weight = engine_on(emulated, hold=hold), put(emulated, 3, "int64")
        batches = [put_all(emulated, values_of(seed)) for seed in range(4)]
        for _ in range(2):
            with cuda_emulator.recorded() as record:
                for arrays in batches:
                    engine.add(arrays, weight)
                engine.step()
            folds = ["weigh"] * 4 + ["accumulate_4_small"] if hold == 4 else ["weigh", "accumulate_1_small"] * 4
            assert record.launches == [*folds, "finalise", "hand_back_small"]
        assert record.waits == []  # where the first window has made room for weights

    def test_torchs_stream_is_waited_for(self, emulated, monkeypatch):
        xp = emulated.xp
        stream = xp.cuda.Stream(non_blocking=True)
        monkeypatch.setitem(sys.modules, "torch", emulated_torch(stream))
        engine, later = engine_on(emulated), put(emulated, 6, "int64")
        weight = Tensor(put(emulated, 1, "int64"))
        synchronize(emulated)
        with stream:  # behind which the engine's own stream has to read it
            xp.cuda.runtime.memcpyAsync(
                weight.data_ptr(), later.data.ptr, 8, xp.cuda.runtime.memcpyDeviceToDevice, stream.ptr
            )
        engine.add(put_all(emulated, values_of(1)), weight)
        assert_same(engine.step(), stepped(emulated, [values_of(1)], [6]))


def captured(engine, batches, weights, **options):
    with engine.capture() as graph:
        for arrays, weight in zip(batches, weights, strict=True):
            engine.add(arrays, weight)
        engine.step(**options)
    return graph


class TestCapture:
    @pytest.mark.parametrize("hold", [1, 3])
    def test_each_replay_reads_the_weights_anew(self, device, hold):
        engine, values = engine_on(device, hold=hold), [values_of(seed) for seed in range(3)]
        batches, weights = [put_all(device, each) for each in values], [put(device, 1, "int64") for _ in range(2)]
        graph = captured(engine, batches, [weights[0], 2.5, weights[1]])
        for tokens in ((3, 4), (100, 0), (7, 7)):
            for weight, count in zip(weights, tokens, strict=True):
                assign(weight, device.put(np.array(count)))
            kept = [0, 1, 2] if tokens[1] else [0, 1]
            expected = [(tokens[0], 2.5, tokens[1])[i] for i in kept]
            assert_same(graph.replay(), stepped(device, [values[i] for i in kept], expected, hold=hold))

    def test_a_bad_weight_is_told_late_and_the_next_replay_is_good(self, device):
        engine, arrays, weight = engine_on(device), put_all(device, values_of(1)), put(device, 2)
        graph = captured(engine, [arrays], [weight])
        assign(weight, device.put(np.array(NAN)))
        result = graph.replay()
        assert number_of(result.skipped) == 1
        with pytest.raises(WindowError, match=r"step 0 .*got nan"):
            engine.check()
        assign(weight, device.put(np.array(4.0)))
        assert_same(graph.replay(), stepped(device, [values_of(1)], [4]))
        engine.check()

    def test_what_is_not_known_yet_is_not_read(self, device):
        engine, arrays, weight = engine_on(device), put_all(device, values_of(1)), put(device, 2)
        with engine.capture():
            engine.add(arrays, weight)
            with pytest.raises(CallerError, match="not known while a window is captured"):
                _ = engine.accumulator.total_weight
            engine.step()


BAD = [[0.0, 0.0], [2.0, NAN], [NAN, 2.0], [3.0, -1.0], [INF], [2.0, 1e-40], [1e300], [3e38, 3e38]]


class TestBadWeights:
    @pytest.mark.parametrize(
        ("weights", "on_non_finite", "average"),
        [
            *zip(BAD, itertools.cycle(["raise", "skip", "pass"]), itertools.repeat("weighted")),
            *zip(BAD[:3], itertools.cycle(["raise", "skip", "pass"]), itertools.repeat("sum")),
        ],
    )
    def test_zeros_are_handed_back_and_the_error_comes_late(self, device, weights, on_non_finite, average):
        engine = engine_on(device, on_non_finite=on_non_finite, average=average)
        for seed, weight in enumerate(weights):
            engine.add(put_all(device, values_of(seed)), put(device, weight))
        result = engine.step()
        assert number_of(result.skipped) == 1
        assert number_of(result.factor) == 0
        assert number_of(result.inverse_factor) == INF
        assert all(not np.frombuffer(bits, np.float32).any() for bits in bits_of(result).values())
        for _ in range(2):
            with pytest.raises(WindowError, match=r"weight of the window of step 0 is out of range: zeros"):
                result.check()
        engine.check()  # once is enough
        assert engine.latest_verdict.bad_weights == 1
        assert engine.latest_verdict.bad_steps == 0
        engine.add(put_all(device, values_of(9)), put(device, 2))
        assert_same(engine.step(), stepped(device, [values_of(9)], [2], average=average))

    def test_the_next_call_tells_it_without_being_asked(self, device):
        engine = engine_on(device, on_non_finite="pass")
        engine.add(put_all(device, values_of(1)), put(device, -2))
        engine.step()
        engine.accumulator.has_non_finite()  # a wait
        with pytest.raises(WindowError, match=r"got nan in all"):
            engine.add(put_all(device, values_of(2)))
        engine.add(put_all(device, values_of(2)))

    def test_a_gradient_that_is_not_finite_is_told_as_ever(self, device):
        bad = [np.full(slot.shape, NAN, np.float32) for slot in LAYOUT.slots]
        result = stepped(device, [bad], [put(device, 3)])
        with pytest.raises(NonFiniteGradient):
            result.check()

    @pytest.mark.parametrize(
        "bad",
        [
            *(lambda device, dtype=dtype: put(device, 1, dtype) for dtype in ("float16", "uint8", "bool", "int16")),
            *(lambda device, shape=shape: put(device, 1, shape=shape) for shape in ((0,), (2,), (1, 2))),
            lambda device: Producer(put(device, 1), where=(2, 7)),
        ],
    )
    def test_what_is_no_number_there_is_refused(self, device, bad):
        engine, arrays, weight = engine_on(device), put_all(device, values_of(1)), bad(device)
        for call in (lambda: engine.add(arrays, weight), lambda: engine.micro_batch(weight)):
            with nothing_is_launched(device), pytest.raises(BufferRefused, match="weight"):
                call()
        assert not engine.has_open_window

    def test_the_parts_of_a_micro_batch_have_one_array(self, device):
        engine, arrays, weight = engine_on(device), put_all(device, values_of(1)), put(device, 3)
        engine.add_block(0, arrays[:2], weight)
        for other in (put(device, 3), 3):
            with pytest.raises(WindowError, match=r"'head'.* has another weight than its other parts"):
                engine.add_non_block("head", arrays[3], other)
        engine.add_non_block("head", arrays[3], weight)
        engine.add_block(1, arrays[2:3], weight)
        assert number_of(engine.step().weight) == 3


class TestSaved:
    def test_weights_are_saved_as_numbers(self, device):
        engine, host = engine_on(device, hold=4), GradientEngine(LAYOUT, max_norm=0.5)
        batches, weights = [values_of(seed) for seed in range(3)], [2, 0, 0.1]
        for values, weight in zip(batches, weights, strict=True):
            engine.add(put_all(device, values), put(device, weight))
        state = engine.state_dict()
        assert state["micro_batch_weights"].tolist() == [2, 0, np.float32(0.1)]
        host.load_state_dict(state)
        assert host.step().weight == number_of(engine.step().weight)

    def test_a_bad_one_is_found_when_it_is_loaded(self, device):
        engine = engine_on(device)
        engine.add(put_all(device, values_of(1)), put(device, NAN))
        with pytest.raises(WindowError, match="weight is out of range"):
            engine_on(device).load_state_dict(engine.state_dict())


class TestWorkers:
    @pytest.mark.parametrize("average", ["weighted", "per_worker", "sum"])
    def test_they_have_the_same_weights_as_from_the_host(self, device, average):
        def worker(exchange):
            engine, rank = engine_on(device, exchange=exchange, average=average), exchange.rank
            for seed in range(2):
                tokens = 10 * rank + seed + 1
                weight = put(device, tokens, "int64") if where == "device" else tokens
                engine.add(put_all(device, values_of(2 * rank + seed)), weight)
            result = engine.step()
            return bits_of(result), result.weight, result.norm

        found = {}
        for where in ("device", "host"):
            found[where] = on_ranks(worker, 2)
        assert found["device"] == found["host"]
        assert [weight for _, weight, _ in found["host"]] == [26.0, 26.0]

    @pytest.mark.parametrize("average", ["weighted", "sum"])
    def test_a_bad_one_is_refused_by_all_of_them(self, device, average):
        def worker(exchange):
            engine = engine_on(device, exchange=exchange, average=average)
            for weights, got in (((2, NAN), "nan"), ((0, 0), "0")):
                engine.add(put_all(device, values_of(1)), put(device, weights[exchange.rank]))
                with pytest.raises(WindowError, match=f"out of range.*got {got}"):
                    engine.step()
                engine.discard()
            engine.add(put_all(device, values_of(1)), put(device, 0 if exchange.rank else 2))
            return engine.step().weight

        assert on_ranks(worker, 2) == [2, 2]
