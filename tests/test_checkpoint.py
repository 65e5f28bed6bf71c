"""Saved and resumed: at every position of a window, through every file format, on other devices and transports."""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import checkpoint_process
import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import host_backend
from devices import bits_of, number_of, put_all, synchronize
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupted_at, places_of
from ranks import may_hold_sums, on_ranks
from transports import Transport, group, on_all

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient, local_group
from gradengine.accumulate.state import State
from gradengine.errors import (
    BufferRefused,
    CallerError,
    DeadlineExceeded,
    ExchangeError,
    GradientError,
    HandshakeRefused,
    LayoutMismatch,
    PeerLost,
    WindowError,
)

HERE = Path(__file__).parent
LAYOUT = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})
NAMES = (
    *("version", "step", "layout", "micro_batches", "average", "loss_scale", "loss_scale_tracker"),
    *("rank", "world_size", "says_nothing"),
    *("micro_batch_weights", "counts", "used", "filled", "sums"),
)


def through_npz(state):
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return np.load(file)


def gradients_of(seed, layout=LAYOUT):
    return draw.random_gradients([seed], layout.slots)


def engine_with(backend=None, layout=LAYOUT, window=0, **options):
    """An engine in whose window there are so many micro-batches."""
    engine = GradientEngine(layout, "cpu" if backend is None else backend.kernels, **options)
    for seed in range(window):
        engine.add(gradients_of(seed, layout) if backend is None else put_all(backend, gradients_of(seed, layout)))
    return engine


def outcome(result):
    """All that a step has to say, its bits included."""
    numbers = [number_of(number) for number in (result.norm, result.scale, result.factor)]
    return bits_of(result), numbers, result.weight, result.micro_batches, result.unused, result.step


def assert_same_state(got, expected):
    assert {*got} == {*expected}
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


# ---- calls that make a window, to be cut anywhere ----


@st.composite
def windows(draws, layout):
    """Calls of one window, in order: micro-batches as a whole, by parts or by components; some without a gradient."""
    calls, count = [], draws(st.integers(1, 4))
    for micro_batch in range(count):
        weight, dtype = draws(draw.weights), draws(draw.dtypes)
        gradients = draw.random_gradients([draws(draw.seeds), micro_batch], layout.slots, dtype)
        absent = draws(st.sets(st.integers(0, len(gradients) - 1), max_size=len(gradients) - 1))
        gradients = [None if i in absent else gradient for i, gradient in enumerate(gradients)]
        by_name = dict(zip([slot.name for slot in layout.slots], gradients, strict=True))
        way = draws(st.sampled_from(["add", "components", "parts"]))
        if way == "add":
            calls.append((way, gradients, weight))
            continue
        if way == "components":
            given = {name: gradient for name, gradient in by_name.items() if gradient is not None}
            calls.append((way, {name: given[name] for name in draws(st.permutations([*given]))}, weight))
            continue
        for span in draws(st.permutations(layout.spans)):
            given = [by_name[slot.name] for slot in span.slots]
            calls.append(("part", span.key, given, weight))
    return count, calls


def call(engine, backend, what):
    kind, *given = what
    if kind == "add":
        gradients, weight = given
        engine.add(put_all(backend, gradients), weight)
    elif kind == "components":
        gradients, weight = given
        with engine.micro_batch(weight) as micro_batch:
            for name, gradient in put_all(backend, gradients).items():
                micro_batch.add(name, gradient)
    elif isinstance(given[0], int):
        key, gradients, weight = given
        engine.add_block(key, put_all(backend, gradients), weight)
    else:
        key, gradients, weight = given
        engine.add_non_block(key, put_all(backend, gradients)[0], weight)


def call_all(engine, backend, calls):
    for what in calls:
        call(engine, backend, what)
    return engine


def new_engine(backend, layout, **options):
    """With one step made, so that its number is not 0 and the arena holds something."""
    engine = GradientEngine(layout, backend.kernels, **options)
    engine.add(put_all(backend, gradients_of(99, layout)))
    engine.step()
    return engine


def spoilt_engine(backend, layout, **options):
    """Without a step made, and with NaN in its arena: what is not loaded is not used."""
    engine = GradientEngine(layout, backend.kernels, **options)
    engine.add(put_all(backend, [np.full(slot.shape, np.nan, np.float32) for slot in layout.slots]))
    engine.discard()
    return engine


OPTIONS = st.fixed_dictionaries(
    {
        "average": st.sampled_from(["weighted", "per_worker", "sum"]),
        "loss_scale": st.sampled_from([1.0, 256.0]),
        "max_norm": st.sampled_from([None, 0.25]),
        "groups": st.sampled_from([None, "component"]),
    }
)


class TestAnywhere:
    @settings(max_examples=15)
    @given(data=st.data())
    def test_resumed_at_every_position_it_ends_in_the_same_bits(self, backend, data):
        """Whatever layout, parts, weights and dtypes, and whatever is held; so does the one that saved."""
        layout = data.draw(draw.uneven_layouts(backend.chunk))
        count, calls = data.draw(windows(layout))
        options, holds = data.draw(OPTIONS), st.integers(1, 3)
        options["micro_batches"] = data.draw(st.sampled_from([None, count, count + 1]))
        here, there, wanted_hold = data.draw(holds), data.draw(holds), data.draw(holds)
        wanted = outcome(call_all(new_engine(backend, layout, hold=wanted_hold, **options), backend, calls).step())
        for position in range(len(calls) + 1):
            saved = call_all(new_engine(backend, layout, hold=here, **options), backend, calls[:position])
            state = through_npz(saved.state_dict())
            resumed = spoilt_engine(backend, layout, hold=there, **{**options, "loss_scale": 2.0})
            resumed.load_state_dict(state)
            for engine in (saved, resumed):
                assert outcome(call_all(engine, backend, calls[position:]).step()) == wanted

    @settings(max_examples=8)
    @given(data=st.data())
    def test_on_another_device_it_ends_in_the_same_bits(self, device, data):
        """From the host to a GPU and back, several times. A norm is a device's own: nothing is clipped."""
        layout = data.draw(draw.uneven_layouts(device.chunk))
        _, calls = data.draw(windows(layout))
        places = [host_backend(1), device]
        wanted = bits_of(call_all(GradientEngine(layout), places[0], calls).step())
        engine = GradientEngine(layout, places[0].kernels)
        for turn, what in enumerate(calls):
            call(engine, places[turn % 2], what)
            state = engine.state_dict()
            engine = spoilt_engine(places[(turn + 1) % 2], layout, hold=2)
            engine.load_state_dict(state)
        assert bits_of(engine.step()) == wanted

    def test_between_windows_there_is_nothing_large(self, backend):
        engine = new_engine(backend, LAYOUT)
        state = engine.state_dict()
        assert (tuple(state), state["sums"].size, int(state["step"])) == (NAMES, 0, 1)
        resumed = spoilt_engine(backend, LAYOUT)
        resumed.load_state_dict(state)
        assert (resumed.current_step, resumed.has_open_window) == (1, False)
        with pytest.raises(WindowError, match="without a micro-batch"):
            resumed.step()

    def test_every_value_is_an_array_without_pickles_that_is_nobody_elses_memory(self, backend):
        engine = engine_with(backend, window=1)
        state = engine.state_dict()
        for array in state.values():
            assert type(array) is np.ndarray
            assert array.flags.writeable
            assert not array.dtype.hasobject
            array[...] = 0
        again = engine_with(backend)
        again.load_state_dict(engine.state_dict())
        assert bits_of(again.step()) == bits_of(engine.step())

    def test_a_worker_that_said_it_has_nothing_has_said_so(self):
        engine, resumed = engine_with(), engine_with()
        engine.add(None, weight=0)
        resumed.load_state_dict(engine.state_dict())
        with pytest.raises(WindowError, match="without a micro-batch on any worker"):
            resumed.step()

    def test_what_was_written_through_views_counts(self, backend):
        """Also before the first micro-batch, and though no micro-batch has a gradient there."""
        engine, resumed = engine_with(backend), spoilt_engine(backend, LAYOUT)
        engine.accumulator.block(0).accumulate(put_all(backend, gradients_of(0)[:1]))
        resumed.load_state_dict(engine.state_dict())
        outcomes = []
        for each in (engine, resumed):
            each.add([None, *put_all(backend, gradients_of(1)[1:])])
            outcomes.append(outcome(each.step()))
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][4] == frozenset()

    def test_the_arenas_padding_and_what_an_earlier_window_left_are_not_saved(self, backend):
        engine = new_engine(backend, LAYOUT)
        engine.add_block(0, put_all(backend, gradients_of(0)[:1]))
        state, slot = engine.state_dict(), LAYOUT.slots[0]
        assert np.count_nonzero(state["sums"]) == np.count_nonzero(state["sums"][: slot.stop]) == slot.size

    def test_a_saved_padding_stays_outside(self, backend):
        engine = engine_with(backend, window=1)
        state = engine.state_dict()
        for slot in LAYOUT.slots:
            state["sums"][slot.stop : slot.stop + 3] = 7
        resumed = engine_with(backend)
        resumed.load_state_dict(state)
        assert_same_state(resumed.state_dict(), engine.state_dict())

    def test_a_window_is_resumed_as_often_as_one_likes(self, backend):
        engine = engine_with(backend, window=2)
        state = engine.state_dict()
        wanted = bits_of(engine.step())
        resumed = engine_with(backend)
        for _ in range(2):
            resumed.load_state_dict(state)
            assert bits_of(resumed.step()) == wanted

    def test_a_window_can_be_loaded_again_after_discard(self):
        engine = engine_with(window=1)
        state = engine.state_dict()
        engine.add(gradients_of(8))
        engine.discard()
        engine.load_state_dict(state)
        assert_same_state(engine.state_dict(), state)

    def test_an_interrupt_at_any_line_leaves_nothing_half_saved_or_half_loaded(self):
        """What is not broken then is all there."""
        state = engine_with(window=2, hold=2).state_dict()
        wanted = bits_of(engine_with(window=2).step())
        engine = engine_with(hold=3)

        def loaded_at_last():
            if engine.accumulator.state.now is not State.OPEN:
                engine.discard()
                engine.load_state_dict(state)
            return bits_of(engine.step())

        places = [*places_of(lambda: engine.load_state_dict(state))]
        engine.discard()
        for at in places:
            interrupted_at(at, lambda: engine.load_state_dict(state))
            assert engine.accumulator.state.now in {State.EMPTY, State.OPEN, State.BROKEN}
            assert loaded_at_last() == wanted
        for at in places_of(engine.state_dict):
            engine.load_state_dict(state)
            interrupted_at(at, engine.state_dict)
            assert loaded_at_last() == wanted

    def test_a_micro_batch_that_comes_component_by_component_is_saved_when_it_is_over(self):
        engine = engine_with(window=1)
        with engine.micro_batch() as micro_batch:
            micro_batch.add("head", gradients_of(1)[2])
            with pytest.raises(
                WindowError, match="step 0 holds a part of a micro-batch: got one that has begun and not"
            ):
                engine.state_dict()
        resumed = engine_with()
        resumed.load_state_dict(engine.state_dict())
        assert outcome(resumed.step()) == outcome(engine.step())

    def test_a_held_gradient_that_moved_is_refused(self):
        torch = pytest.importorskip("torch")
        engine, tensors = engine_with(hold=2), [torch.ones(slot.shape) for slot in LAYOUT.slots]
        engine.add(tensors)
        tensors[0].set_(torch.zeros(3, 5))
        with pytest.raises(BufferRefused, match="was given other memory, or freed, while it was held"):
            engine.state_dict()


# ---- on a GPU ----


class TestOnGpu:
    def test_it_is_one_copy_and_no_memory_of_the_devices(self, emulated):
        engine = engine_with(emulated, window=1)
        gradients = put_all(emulated, gradients_of(1))
        with cuda_emulator.recorded() as record:
            engine.add(gradients)
            engine.state_dict()
        assert record.operations == ["accumulate_1_small", "copy device to host"]
        assert (record.allocations, record.pinned_allocations) == ([], [])
        assert "device" not in record.waits

    @pytest.mark.parametrize("is_current", [True, False], ids=["the current stream", "another one"])
    @pytest.mark.usefixtures("lazy")
    def test_work_that_the_arena_does_not_need_goes_on(self, emulated, is_current):
        """The model's own, here a copy, whatever stream it is queued on."""
        engine = engine_with(emulated, window=1)
        synchronize(emulated)
        xp = emulated.xp
        stream = xp.cuda.get_current_stream() if is_current else xp.cuda.Stream(non_blocking=True)
        here = np.frombuffer(xp.cuda.alloc_pinned_memory(4), np.float32, 1)
        there = emulated.put(np.ones(1, np.float32))
        synchronize(emulated)
        here[:] = 0
        xp.cuda.runtime.memcpyAsync(here.ctypes.data, there.data.ptr, 4, xp.cuda.runtime.memcpyDeviceToHost, stream.ptr)
        engine.state_dict()
        assert here[0] == 0
        stream.synchronize()
        assert here[0] == 1

    def test_late_errors_are_raised_by_check_and_not_saved(self, device):
        engine = engine_with(device)
        engine.add(put_all(device, [gradient * np.float32(np.nan) for gradient in gradients_of(0)]))
        engine.step()
        with pytest.raises(NonFiniteGradient):
            engine.check()
        resumed = engine_with(device)
        resumed.load_state_dict(engine.state_dict())
        resumed.check()
        assert resumed.current_step == 1

    def test_a_late_error_is_told_before_another_step_is_loaded(self, device):
        engine = engine_with(device)
        state = engine.state_dict()
        engine.add(put_all(device, [gradient * np.float32(np.nan) for gradient in gradients_of(0)]))
        engine.step()
        with pytest.raises(NonFiniteGradient, match="step 0"):
            engine.load_state_dict(state)
        assert engine.current_step == 1
        engine.load_state_dict(state)
        assert engine.current_step == 0

    def test_steps_that_are_run_again_have_their_own_errors(self, device):
        """The device counts steps, and keeps which was bad: of what was dropped it knows nothing any more."""
        good, bad = gradients_of(0), [gradient * np.float32(np.nan) for gradient in gradients_of(0)]
        engine = engine_with(device)
        states = []
        for gradients in (good, bad, bad, good, good):
            states.append(engine.state_dict())
            engine.add(put_all(device, gradients))
            engine.step()
            with_error = gradients is bad
            if with_error:
                with pytest.raises(NonFiniteGradient):
                    engine.check()
        engine.load_state_dict(states[1])
        assert engine.latest_verdict is None
        for step in (1, 2):
            engine.add(put_all(device, good))
            result = engine.step()
            result.check()
            engine.check()
            assert (result.step, engine.latest_verdict.step, result.non_finite) == (step, step + 1, None)
        engine.add(put_all(device, bad))
        engine.step()
        with pytest.raises(NonFiniteGradient, match="step 3"):
            engine.check()

    def test_a_captured_window_is_replayed_at_the_step_that_was_loaded(self, device):
        engine = engine_with(device, window=1)
        engine.step()
        later = engine.state_dict()
        later["step"][...] = 41
        given = put_all(device, gradients_of(0))
        with engine.capture() as graph:
            engine.add(given)
            engine.step()
        graph.replay()
        engine.load_state_dict(later)
        assert graph.replay().step == 41
        engine.check()
        assert (engine.current_step, engine.latest_verdict.step) == (42, 42)


# ---- with workers ----


def contributions(rank):
    return [gradients_of(10 * rank + micro_batch) for micro_batch in range(3)]


def add_all(engine, gradients):
    for gradient in gradients:
        engine.add(gradient, weight=1.0 + engine.rank)


def steps(engine, window, count=3):
    """The rest of a window, and further steps: their bytes, and the exchange's own number of the last."""
    found = []
    for step in range(count):
        add_all(engine, window if step == 0 else contributions(engine.rank + step))
        found.append(bits_of(engine.step()))
    return found, engine.exchange._all_reduce.step


def undisturbed(world_size, before, **options):
    def work(exchange):
        engine = GradientEngine(LAYOUT, exchange=exchange, max_norm=1.0, **options)
        for step in range(before):
            add_all(engine, contributions(engine.rank + step))
            engine.step()
        return steps(engine, contributions(engine.rank))

    return on_ranks(work, world_size)


def saved_by(world_size, before, position, **options):
    """Each rank's state after so many steps and micro-batches, as files; then all of them are gone."""

    def work(exchange):
        engine = GradientEngine(LAYOUT, exchange=exchange, max_norm=1.0, **options)
        for step in range(before):
            add_all(engine, contributions(engine.rank + step))
            engine.step()
        add_all(engine, contributions(engine.rank)[:position])
        return through_npz(engine.state_dict())

    return on_ranks(work, world_size)


class TestWorkers:
    @pytest.mark.parametrize("is_joined_first", [True, False], ids=["join, load", "load, join"])
    @pytest.mark.parametrize("transport", Transport, ids=lambda transport: transport.value)
    @pytest.mark.parametrize(
        ("world_size", "before", "position", "options"),
        [(2, 1, 2, {"average": "per_worker"}), (3, 2, 1, {"hold": 2}), (2, 3, 0, {"micro_batches": 3})],
    )
    def test_a_group_goes_on_over_any_transport_in_the_same_bytes(
        self, world_size, before, position, options, transport, is_joined_first
    ):
        wanted, states = undisturbed(world_size, before, **options), saved_by(world_size, before, position, **options)

        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange if is_joined_first else None, max_norm=1.0, **options)
            engine.load_state_dict(states[exchange.rank])
            if not is_joined_first:
                engine.reconnect(exchange)
            assert (engine.current_step, engine.accumulator.accumulated_count) == (before, position)
            found = steps(engine, contributions(engine.rank)[position:])
            exchange.barrier()
            return found

        with group(transport, world_size, timeout=60.0, join_timeout=60.0) as exchanges:
            assert on_all(work, exchanges) == wanted

    def test_a_rank_that_died_in_mid_window_is_replaced_by_its_saved_state(self):
        """The others keep their windows and reconnect."""
        wanted, states = undisturbed(2, 1), saved_by(2, 1, 2)
        first, second = (local_group(2, timeout=60.0, join_timeout=60.0) for _ in range(2))

        def survivor(_):
            engine = GradientEngine(LAYOUT, exchange=first[0], max_norm=1.0)
            engine.load_state_dict(states[0])
            with pytest.raises(ExchangeError):
                first[0].barrier()
            engine.reconnect(second[0])
            return steps(engine, contributions(0)[2:])

        def dead(_):
            GradientEngine(LAYOUT, exchange=first[1], max_norm=1.0)
            first[1].close()
            engine = GradientEngine(LAYOUT, max_norm=1.0)
            engine.load_state_dict(states[1])
            engine.reconnect(second[1])
            return steps(engine, contributions(1)[2:])

        assert on_all(lambda work: work(None), [survivor, dead]) == wanted

    @pytest.mark.parametrize("before", [1, 2])
    def test_a_rank_that_died_before_it_sent_its_part_is_replaced_while_the_other_waits(self, before):
        """What that one has sent travels again, though its links have counted fewer steps than there were."""
        wanted, states = undisturbed(2, before, micro_batches=3), saved_by(2, before, 2, micro_batches=3)
        options, waiting = {"timeout": 60.0, "join_timeout": 60.0, "bucket_bytes": 4}, []

        def survivor(_):
            engine = GradientEngine(LAYOUT, exchange=first[0], max_norm=1.0, micro_batches=3)
            engine.load_state_dict(states[0])
            waiting.append(engine)
            add_all(engine, contributions(0)[2:])
            with pytest.raises(PeerLost):
                engine.step()
            engine.reconnect(second[0])
            return steps(engine, [])

        def dead(_):
            GradientEngine(LAYOUT, exchange=first[1], max_norm=1.0, micro_batches=3)
            for _ in range(6000):  # until its part has gone into the connection, and it receives the sum
                if waiting and may_hold_sums(waiting[0]):
                    break
                threading.Event().wait(0.01)
            first[1].close()
            engine = GradientEngine(LAYOUT, max_norm=1.0, micro_batches=3)
            engine.load_state_dict(states[1])
            engine.reconnect(second[1])
            return steps(engine, contributions(1)[2:])

        with group(Transport.UNIX, 2, **options) as first, group(Transport.UNIX, 2, **options) as second:
            assert on_all(lambda work: work(None), [survivor, dead]) == wanted

    def test_ranks_that_loaded_other_steps_do_not_join(self):
        states = saved_by(2, 1, 0)

        def work(exchange):
            engine = GradientEngine(LAYOUT, max_norm=1.0)
            if exchange.rank == 0:
                engine.load_state_dict(states[0])
            engine.reconnect(exchange)

        for error in on_ranks(work, 2):
            assert isinstance(error, HandshakeRefused)
            assert "rank 1 is at another step: got 0, expected 1; restart all from one checkpoint" in str(error)

    @pytest.mark.parametrize("before", [1, 2])
    def test_a_rank_that_forgot_to_load_is_found_by_the_next_step_and_nothing_is_handed_back(self, before):
        states = saved_by(2, before, 0)

        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, max_norm=1.0)
            if exchange.rank == 0:
                engine.load_state_dict(states[0])
            engine.add(gradients_of(0))
            engine.step()

        for error in on_ranks(work, 2):
            assert isinstance(error, ExchangeError)
            expected = (
                f"rank 1 is out of sync with rank 0: got its tally of step 0, expected its tally of step {before}"
            )
            assert expected in str(error)

    def test_a_late_rank_is_late_in_the_step_that_was_loaded(self):
        states = saved_by(2, 3, 0)

        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, max_norm=1.0)
            engine.load_state_dict(states[exchange.rank])
            if exchange.rank == 0:
                engine.add(gradients_of(0))
                engine.step()

        error, _ = on_ranks(work, 2, timeout=0.5)
        assert isinstance(error, DeadlineExceeded)
        assert "in step 3" in str(error)

    def test_a_window_of_another_rank_is_refused_and_between_windows_it_fits_all(self):
        """As where one rank saves for all: its part would be counted twice."""
        window, between = saved_by(2, 1, 1)[0], saved_by(2, 1, 0)[0]

        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, max_norm=1.0)
            if exchange.rank == 1:
                with pytest.raises(
                    WindowError, match=r"another worker's: .* got rank 1 of 2, expected rank 0 of 2; load"
                ):
                    engine.load_state_dict(window)
                assert (engine.current_step, engine.has_open_window) == (0, False)
            engine.load_state_dict(between)
            return steps(engine, contributions(exchange.rank))

        assert on_ranks(work, 2) == undisturbed(2, 1)

    def test_a_window_of_another_world_is_refused_where_it_is_joined_or_stepped(self):
        (state, _), (exchange,) = saved_by(2, 1, 1), local_group(1)
        engine = GradientEngine(LAYOUT, max_norm=1.0)
        engine.load_state_dict(state)
        for refused in (engine.step, lambda: engine.reconnect(exchange)):
            with pytest.raises(WindowError, match="got rank 0 of 1, expected rank 0 of 2"):
                refused()
        assert (engine.exchange, engine.accumulator.accumulated_count) == (None, 1)
        engine.discard()
        engine.reconnect(exchange)
        engine.add(gradients_of(0))
        assert engine.step().step == 1

    def test_a_part_of_it_on_its_way_cannot_be_saved(self):
        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, micro_batches=1)
            engine.add(gradients_of(0))
            with pytest.raises(
                WindowError, match="step 0 cannot be saved: some of it is on its way to the other workers"
            ):
                engine.state_dict()
            return bits_of(engine.step())

        first, second = on_ranks(work, 2)
        assert first == second

    def test_half_of_a_tensor_parallel_model_is_resumed_as_that_half(self):
        partitions = {"w": "column", "norm": "replicated"}
        halves = [
            GradientLayout.of({"w": (2, 3), "norm": (4,)}, tp_rank=rank, tp_size=2, partitions=partitions)
            for rank in range(2)
        ]

        def windows_of(exchange, cut):
            layout = halves[exchange.rank]
            engine = GradientEngine(layout, max_norm=1.0, tp_exchange=exchange)
            same = [np.ones((2, 3), np.float32) * (1 + exchange.rank), np.ones(4, np.float32)]
            engine.add(same)
            engine.step()
            engine.add(same)
            state = engine.state_dict()
            if cut is not None:
                engine = GradientEngine(layout, max_norm=1.0, tp_exchange=cut[exchange.rank])
                engine.load_state_dict(state)
            engine.add(same)
            return bits_of(engine.step()), state

        wanted = on_ranks(lambda exchange: windows_of(exchange, None), 2)
        cut = local_group(2)
        found = on_ranks(lambda exchange: windows_of(exchange, cut), 2)
        assert [bits for bits, _ in found] == [bits for bits, _ in wanted]
        with pytest.raises(LayoutMismatch, match=r"part of a model: here tp_rank 0 of 2 .*, there tp_rank 1 of 2"):
            GradientEngine(halves[0]).load_state_dict(found[1][1])


# ---- killed ----


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("stop_at", [2, 4, 7])
def test_a_run_that_was_killed_in_mid_window_and_resumed_ends_in_the_same_bytes(tmp_path, stop_at):
    def run(file, stop_at=0):
        command = [sys.executable, str(HERE / "checkpoint_process.py"), str(file), str(stop_at)]
        paths = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **paths}
        )

    total = checkpoint_process.STEPS * checkpoint_process.MICRO_BATCHES
    with run(tmp_path / "whole.npz") as whole, run(tmp_path / "cut.npz", stop_at) as killed:
        for number in range(stop_at):
            assert killed.stdout.readline() == f"{number + 1}\n"
        killed.kill()
        wanted = whole.communicate()[0].splitlines()
    with run(tmp_path / "cut.npz") as resumed:
        lines = resumed.communicate()[0].splitlines()
    assert (killed.returncode, whole.returncode, resumed.returncode) == (-9, 0, 0)
    assert lines[:-1] == [str(number) for number in range(stop_at + 1, total + 1)]
    assert len(lines[-1]) == 64
    assert lines[-1] == wanted[-1]


# ---- file formats ----


class TestFormats:
    """What others write and read is loaded as it comes."""

    @pytest.fixture(params=[0, 2], ids=["between windows", "in mid-window"])
    def engine(self, request):
        return engine_with(window=request.param)

    def assert_resumes(self, engine, state):
        resumed = engine_with()
        resumed.load_state_dict(state)
        assert_same_state(resumed.state_dict(), engine.state_dict())

    def test_numpy_without_pickles(self, engine, tmp_path):
        np.savez_compressed(tmp_path / "engine.npz", **engine.state_dict())
        with np.load(tmp_path / "engine.npz", allow_pickle=False) as state:
            self.assert_resumes(engine, state)

    def test_torch(self, engine):
        """Tensors are loaded with weights_only=True, as torch.load does by default; arrays need it off."""
        torch = pytest.importorskip("torch")
        state = engine.state_dict()
        tensors = {name: torch.from_numpy(array) for name, array in state.items()}
        for saved, weights_only in ((tensors, True), (state, False)):
            file = io.BytesIO()
            torch.save({"engine": saved, "epoch": 3}, file)
            file.seek(0)
            self.assert_resumes(engine, torch.load(file, weights_only=weights_only)["engine"])

    def test_safetensors(self, engine, tmp_path):
        safetensors = pytest.importorskip("safetensors.numpy")
        safetensors.save_file(engine.state_dict(), tmp_path / "engine.safetensors")
        self.assert_resumes(engine, safetensors.load_file(tmp_path / "engine.safetensors"))

    def test_accelerate(self, engine, tmp_path):
        accelerate = pytest.importorskip("accelerate")
        accelerator, state = accelerate.Accelerator(cpu=True), engine.state_dict()
        accelerator.register_for_checkpointing(engine)
        accelerator.save_state(tmp_path)
        engine.add(gradients_of(7))
        engine.discard()
        accelerator.load_state(tmp_path)
        assert_same_state(engine.state_dict(), state)


# ---- refused ----


def refused(engine, state, kind, match):
    """It is refused by name, and the engine is what it was."""
    before = engine.state_dict()
    with pytest.raises(kind, match=match):
        engine.load_state_dict(state)
    assert_same_state(engine.state_dict(), before)


class TestRefused:
    @pytest.mark.parametrize(
        ("shapes", "match"),
        [
            (
                {"layers.0.w": (3, 5), "layers.1.w": (8,), "head": (1,)},
                r"row 1: here 'layers.1.w' \(8,\) .*, there .*\(7,\)",
            ),
            (
                {"head": (1,), "layers.0.w": (3, 5), "layers.1.w": (7,)},
                r"row 0: here 'head' \(1,\), there 'layers.0.w'",
            ),
            ({"layers.0.w": (5, 3), "layers.1.w": (7,), "head": (1,)}, r"row 0: here .*\(5, 3\) .*, there .*\(3, 5\)"),
            ({"layers.0.w": (3, 5), "layers.1.w": (7,)}, "row 2: here nothing, there 'head'"),
        ],
        ids=["shape", "order", "transposed", "one less"],
    )
    @pytest.mark.parametrize("window", [0, 1])
    def test_another_layout_or_order_of_weights(self, shapes, match, window):
        refused(
            engine_with(layout=GradientLayout.of(shapes)), engine_with(window=window).state_dict(), LayoutMismatch,
            rf"the saved state \(there\) is of another layout than the engine \(here\):\n(.*\n)*?{match}",
        )  # fmt: skip

    def test_another_backward_order(self):
        """Its spans leave for the other workers in another order."""
        layout = GradientLayout(LAYOUT._rows, ["head", 0, 1])
        refused(engine_with(layout=layout), engine_with().state_dict(), LayoutMismatch, "backward order from 1")

    @pytest.mark.parametrize("window", [0, 1])
    @pytest.mark.parametrize(
        ("here", "match"),
        [
            ({"micro_batches": 5}, "another micro_batches: got 4, expected 5; build the engine with micro_batches=4"),
            ({"micro_batches": None}, "another micro_batches: got 4, expected None"),
            ({"average": "sum"}, "another average: got 'weighted', expected 'sum'"),
        ],
    )
    def test_another_number_of_micro_batches_or_average(self, here, match, window):
        state = engine_with(window=window, micro_batches=4).state_dict()
        refused(engine_with(**{"micro_batches": 4, **here}), state, CallerError, match)

    def test_what_was_changed_on_purpose_between_windows_is_loaded(self):
        state = engine_with(micro_batches=4).state_dict()
        state["micro_batches"][...] = 8
        engine_with(micro_batches=8).load_state_dict(state)

    @pytest.mark.parametrize("begin", [lambda e: e.add(gradients_of(0)), lambda e: e.add(None, weight=0)])
    def test_an_open_window_here(self, begin):
        engine, state = engine_with(), engine_with(window=2).state_dict()
        begin(engine)
        refused(engine, state, WindowError, r"a window is open: got \d micro-batches; step\(\) or discard\(\) it first")
        engine.discard()
        engine.load_state_dict(state)

    def test_a_failed_step_and_a_broken_one_are_not_saved(self):
        engine = engine_with()
        engine.add([gradient * np.float32(np.nan) for gradient in gradients_of(0)])
        with pytest.raises(NonFiniteGradient):
            engine.step()
        with pytest.raises(WindowError, match="step 0 failed, and its window is kept"):
            engine.state_dict()
        with pytest.raises(KeyboardInterrupt), engine.accumulator.changing():
            raise KeyboardInterrupt
        for refused_call in (engine.state_dict, lambda: engine.load_state_dict({})):
            with pytest.raises(WindowError, match="step 0 is broken"):
                refused_call()

    def test_a_failed_exchange_keeps_what_cannot_be_saved(self):
        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange)
            if exchange.rank == 1:
                exchange.close()
                return
            engine.add(gradients_of(0))
            with pytest.raises(ExchangeError):
                engine.step()
            with pytest.raises(WindowError, match="step 0 failed, and its window is kept"):
                engine.state_dict()

        assert on_ranks(work, 2) == [None, None]


def changed(**change):
    return {**engine_with(window=2, micro_batches=3).state_dict(), **change}


def without(name):
    state = changed()
    del state[name]
    return state


def number(value, dtype=np.int64):
    return np.array(value, dtype)


HOSTILE = {
    "no mapping": (lambda: [1, 2], "state is not a Mapping"),
    "nothing": (dict, "lacks 'average'"),
    "a model's": (lambda: {"w": np.zeros(3, np.float32)}, "lacks 'average'"),
    **{f"no {name}": (lambda name=name: without(name), f"lacks '{name}'") for name in NAMES},
    "one more": (lambda: changed(extra=number(1)), "unknown 'extra'"),
    "a later version": (lambda: changed(version=number(2)), "another version: got 2, expected 1; load it with"),
    "a later one with more": (lambda: {**changed(version=number(2)), "more": number(1)}, "another version: got 2"),
    "a version in words": (lambda: changed(version="1"), "'version' of a saved state is another array"),
    "a float for a step": (lambda: changed(step=number(1, np.float64)), r"got float64 of shape \(\), expected int64"),
    "several steps": (
        lambda: changed(step=np.zeros(2, np.int64)),
        r"got int64 of shape \(2,\), expected int64 of shape",
    ),
    "a step below 0": (lambda: changed(step=number(-1)), "step is out of range: got -1"),
    "a step beyond all": (lambda: changed(step=number(2**63 - 1)), "step is out of range"),
    "no layout": (lambda: changed(layout=np.zeros(0, np.uint8)), "layout table cannot be read"),
    "half a layout": (lambda: changed(layout=changed()["layout"][:9]), "layout table cannot be read"),
    "fewer than 0 micro-batches": (lambda: changed(micro_batches=number(-3)), "another micro_batches: got -3"),
    "an average of bytes": (lambda: changed(average=np.full(9, 255, np.uint8)), "another average"),
    "a loss scale of 0": (lambda: changed(loss_scale=number(0, np.float64)), "loss_scale is out of range"),
    "a loss scale of NaN": (lambda: changed(loss_scale=number(np.nan, np.float64)), "loss_scale"),
    "a tracker below 0": (lambda: changed(loss_scale_tracker=number(-1)), "loss_scale_tracker"),
    "a rank beyond": (lambda: changed(rank=number(1)), "rank of world_size=1 is out of range"),
    "no world": (lambda: changed(world_size=number(0)), "world_size is out of range"),
    "a weight below 0": (lambda: changed(micro_batch_weights=np.full(2, -1, np.float32)), "weight is out of range"),
    "a weight of NaN": (lambda: changed(micro_batch_weights=np.full(2, np.nan, np.float32)), "weight is out of range"),
    "a weight more": (
        lambda: changed(micro_batch_weights=np.ones(3, np.float32)),
        "cannot be: got 3 weights, and 2 to 2",
    ),
    "a weight less": (
        lambda: changed(micro_batch_weights=np.ones(1, np.float32)),
        "cannot be: got 1 weights, and 2 to 2",
    ),
    "weights of doubles": (lambda: changed(micro_batch_weights=np.ones(2)), "'micro_batch_weights' .* got float64"),
    "counts below 0": (lambda: changed(counts=np.array([2, 2, -1])), "and -1 to 2 micro-batches"),
    "more counts than K": (
        lambda: changed(counts=np.array([4, 4, 4]), micro_batch_weights=np.ones(4, np.float32)),
        "a weight for each micro-batch, of 3 at most",
    ),
    "counts of fewer": (lambda: changed(counts=np.array([2, 2])), "'counts' .* expected 3 elements"),
    "flags of more": (lambda: changed(used=np.ones(4, bool)), "'used' .* expected 3 elements"),
    "flags of bytes": (lambda: changed(filled=np.ones(3, np.uint8)), "'filled' .* expected bool"),
    "sums of fewer": (lambda: changed(sums=np.zeros(5, np.float32)), "'sums' .* expected 96 elements"),
    "sums in rows": (
        lambda: changed(sums=np.zeros((32, 3), np.float32)),
        "'sums' .* expected float32 of one dimension",
    ),
    "sums that nothing filled": (lambda: changed(filled=np.zeros(3, bool)), "'sums' .* expected 0 elements"),
    "nothing and something": (lambda: changed(says_nothing=number(True, bool)), "cannot be: got 2 weights"),
    "objects": (lambda: changed(sums=np.array([None] * 96)), "'sums' .* got object"),
    "swapped bytes": (lambda: changed(counts=np.array([2, 2, 2], ">i8")), "'counts' .* got >i8"),
    "no array": (lambda: changed(sums=None), "'sums' .* got object"),
    "ragged": (lambda: changed(sums=[[1.0], [1.0, 2.0]]), "'sums' of a saved state cannot be read"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_state_is_refused_by_name(what):
    make, match = HOSTILE[what]
    refused(engine_with(micro_batches=3), make(), CallerError, match)


def test_a_file_that_was_cut_off_or_damaged_is_refused(tmp_path):
    """Where NumPy opens it at all, which reads the list of names at its end."""
    np.savez(tmp_path / "engine.npz", **engine_with(window=2).state_dict())
    data = bytearray((tmp_path / "engine.npz").read_bytes())
    at = data.index(b"sums.npy") + 200
    data[at : at + 4] = b"\xff\xff\xff\xff"
    with np.load(io.BytesIO(data)) as state:
        refused(engine_with(), state, CallerError, "'sums' of a saved state cannot be read")


@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(["bool", "uint8", "int64", "float32", "float64", "U3", "O"]),
    shape=st.sampled_from([(), (0,), (1,), (2,), (3,), (96,), (97,), (2, 48)]),
    fill=st.sampled_from([0, 1, 2, -1, 2**62, np.nan, np.inf, -0.0]),
)
def test_any_other_array_is_loaded_or_refused_and_never_half_loaded(name, dtype, shape, fill):
    with np.errstate(all="ignore"):
        array = np.full(shape, fill).astype(dtype)
    engine, before = engine_with(micro_batches=3), engine_with(micro_batches=3).state_dict()
    try:
        engine.load_state_dict(changed(**{name: array}))
    except GradientError:
        assert_same_state(engine.state_dict(), before)
    else:
        engine.discard()
    engine.load_state_dict(changed())
    engine.add(gradients_of(2))
    assert bits_of(engine.step()) == bits_of(engine_with(window=3).step())
