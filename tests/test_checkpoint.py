"""Saved and resumed: at every position of a window, through every file format, on other devices and transports."""

import io
import threading

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
import windows
from backends import available
from devices import bits_of, number_of, put_all, synchronize
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupted_at, places_of
from ranks import holds_sums, on_ranks
from transports import Transport, group, on_all

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient, local_group
from gradengine.accumulate.state import State
from gradengine.errors import (
    CallerError,
    DeadlineExceeded,
    ExchangeError,
    GradientError,
    HandshakeRefused,
    LayoutMismatch,
    WindowError,
)

HOST = available("host")
LAYOUT = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})
NAMES = (
    *("version", "step", "layout", "micro_batches", "average", "groups", "max_norms"),
    *("loss_scale", "loss_scale_tracker", "norm_mean", "norm_variance", "norm_steps"),
    *("rank", "world_size", "counted_weight", "dropped", "says_nothing"),
    *("micro_batch_weights", "counts", "used", "filled", "sums"),
)


def through_npz(state):
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return np.load(file)


def gradients_of(seed, layout=LAYOUT):
    return draw.random_gradients([seed], layout.slots)


def engine_with(backend=HOST, layout=LAYOUT, window=0, **options):
    """An engine in whose window there are so many micro-batches."""
    engine = GradientEngine(layout, backend.kernels, **options)
    for seed in range(window):
        engine.add(put_all(backend, gradients_of(seed, layout)))
    return engine


def resumed_from(state, *arguments, **options):
    engine = engine_with(*arguments, **options)
    engine.load_state_dict(state)
    return engine


def outcome(result):
    """All that a step has to say, its bits included."""
    numbers = [number_of(number) for number in (result.norm, result.scale, result.factor)]
    return bits_of(result), numbers, result.weight, result.micro_batches, result.unused, result.step


def assert_same_state(got, expected):
    assert {*got} == {*expected}
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


class TestAnywhere:
    @settings(max_examples=25, phases=windows.PHASES)
    @given(data=st.data())
    def test_resumed_at_every_position_it_ends_in_the_same_bits(self, backend, data):
        """Whatever layout, parts, weights and dtypes, and whatever is held; so does the one that saved."""
        layout, options = data.draw(draw.uneven_layouts(backend.chunk)), data.draw(windows.options)
        calls = windows.calls_of(data.draw(windows.windows(layout, (1, 3))), layout)
        options["micro_batches"] = data.draw(st.sampled_from([None, 3]))
        ones = [np.ones(slot.shape, np.float32) for slot in layout.slots]

        def begun(calls):
            """With one step made, so that its number is not 0 and the arena holds something."""
            engine = GradientEngine(layout, backend.kernels, **options)
            engine.add(put_all(backend, ones))
            engine.step(partial=True)
            return on_with(engine, calls)

        def on_with(engine, calls):
            for call in calls:
                call(engine, backend)
            return engine

        wanted = outcome(begun(calls).step(partial=True))
        for position in range(len(calls) + 1):
            saved = begun(calls[:position])
            # The other one has made no step, and has NaN in its arena: what is not loaded is not used.
            resumed = GradientEngine(layout, backend.kernels, **{**options, "loss_scale": 2.0, "hold": 2})
            resumed.add(put_all(backend, [array * np.float32(np.nan) for array in ones]))
            resumed.discard()
            resumed.load_state_dict(through_npz(saved.state_dict()))
            for engine in (saved, resumed):
                assert outcome(on_with(engine, calls[position:]).step(partial=True)) == wanted

    @settings(max_examples=8, phases=windows.PHASES)
    @given(data=st.data())
    def test_on_another_device_it_ends_in_the_same_bits(self, device, data):
        """From the host to a GPU and back, several times. A norm is a device's own: nothing is clipped."""
        layout = data.draw(draw.uneven_layouts(device.chunk))
        window, places = data.draw(windows.windows(layout, (1, 3))), [HOST, device]
        engine = GradientEngine(layout)
        for turn, call in enumerate(windows.calls_of(window, layout)):
            call(engine, places[turn % 2])
            engine = resumed_from(engine.state_dict(), places[(turn + 1) % 2], layout, hold=2)
        factor = np.float32(1 / windows.weight_of(window))
        wanted = {name: (array * factor).tobytes() for name, array in windows.sums_of(layout, window).items()}
        assert bits_of(engine.step()) == wanted

    def test_between_windows_there_is_nothing_large_and_no_memory_is_shared(self, backend):
        engine = engine_with(backend, window=1)
        state = engine.state_dict()
        for array in state.values():
            assert (type(array), array.flags.writeable, array.dtype.hasobject) == (np.ndarray, True, False)
            array[...] = 0
        again = resumed_from(engine.state_dict(), backend)
        assert bits_of(again.step()) == bits_of(engine.step())
        state = engine.state_dict()
        assert (tuple(state), state["sums"].size, int(state["step"])) == (NAMES, 0, 1)
        resumed = resumed_from(state, backend)
        assert (resumed.current_step, resumed.has_open_window) == (1, False)
        with pytest.raises(WindowError, match="without a micro-batch"):
            resumed.step()

    def test_a_worker_that_said_it_has_nothing_has_said_so(self):
        engine = engine_with()
        engine.add(None, weight=0)
        with pytest.raises(WindowError, match="without a micro-batch on any rank"):
            resumed_from(engine.state_dict()).step()

    def test_what_was_written_through_views_counts(self, backend):
        """Also before the first micro-batch, and though no micro-batch has a gradient there."""
        engine = engine_with(backend)
        engine.accumulator.block(0).accumulate(put_all(backend, gradients_of(0)[:1]))
        outcomes = []
        for each in (engine, resumed_from(engine.state_dict(), backend)):
            each.add([None, *put_all(backend, gradients_of(1)[1:])])
            outcomes.append(outcome(each.step()))
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][4] == frozenset()

    def test_padding_and_what_an_earlier_window_left_are_neither_saved_nor_loaded(self, backend):
        engine, slot = engine_with(backend, window=1), LAYOUT.slots[0]
        engine.step()
        engine.add_block(0, put_all(backend, gradients_of(0)[:1]))
        state = engine.state_dict()
        assert np.count_nonzero(state["sums"]) == np.count_nonzero(state["sums"][: slot.stop]) == slot.size
        spoilt = {**state, "sums": state["sums"].copy()}
        spoilt["sums"][slot.stop : slot.stop + 3] = 7
        assert_same_state(resumed_from(spoilt, backend).state_dict(), state)

    def test_an_interrupt_at_any_line_leaves_nothing_half_saved_or_half_loaded(self):
        """What is not broken then is all there."""
        state = engine_with(window=2, hold=2).state_dict()
        wanted, engine = bits_of(engine_with(window=2).step()), engine_with(hold=3)

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


class TestOnGpu:
    def test_it_is_one_copy_and_no_memory_of_the_devices(self, emulated):
        engine, gradients = engine_with(emulated, window=1), put_all(emulated, gradients_of(1))
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

    def test_late_errors_are_told_before_another_step_is_loaded_and_not_saved(self, device):
        """The device counts steps, and keeps which was bad: of what was dropped it knows nothing any more."""
        good = gradients_of(0)
        bad = [gradient * np.float32(np.nan) for gradient in good]
        engine, states = engine_with(device), []

        def step(gradients):
            engine.add(put_all(device, gradients))
            return engine.step()

        for gradients in (good, bad, bad, good):
            states.append(engine.state_dict())
            step(gradients)
            if gradients is bad:
                with pytest.raises(NonFiniteGradient, match=f"step {engine.current_step - 1}"):
                    engine.load_state_dict(states[1])
        resumed = resumed_from(engine.state_dict(), device)
        resumed.check()
        assert resumed.current_step == 4
        engine.load_state_dict(states[1])
        assert engine.latest_verdict is None
        for number in (1, 2):
            result = step(good)
            result.check()
            engine.check()
            assert (result.step, engine.latest_verdict.step, result.non_finite) == (number, number + 1, None)
        step(bad)
        with pytest.raises(NonFiniteGradient, match="step 3"):
            engine.check()

    def test_a_captured_window_is_replayed_at_the_step_that_was_loaded(self, device):
        engine, given = engine_with(device), put_all(device, gradients_of(0))
        later = {**engine.state_dict(), "step": np.array(41)}
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


def steps(engine, window, count=2):
    """The rest of a window, and further steps: their bytes, and the exchange's own number of the last."""
    found = []
    for step in range(count):
        add_all(engine, window if step == 0 else contributions(engine.rank + step))
        found.append(bits_of(engine.step()))
    return found, engine.exchange._all_reduce.step


def after(world_size, before, then, **options):
    """What all ranks have to say after so many steps."""

    def work(exchange):
        engine = GradientEngine(LAYOUT, exchange=exchange, max_norm=1.0, **options)
        for step in range(before):
            add_all(engine, contributions(engine.rank + step))
            engine.step()
        return then(engine)

    return on_ranks(work, world_size)


def undisturbed(world_size, before, **options):
    return after(world_size, before, lambda engine: steps(engine, contributions(engine.rank)), **options)


def saved_by(world_size, before, position, **options):
    """Each rank's state after so many steps and micro-batches, as files; then all of them are gone."""

    def save(engine):
        add_all(engine, contributions(engine.rank)[:position])
        return through_npz(engine.state_dict())

    return after(world_size, before, save, **options)


def loaded(state, exchange=None, **options):
    return resumed_from(state, exchange=exchange, max_norm=1.0, **options)


class TestWorkers:
    @pytest.mark.parametrize("transport", Transport, ids=lambda transport: transport.value)
    @pytest.mark.parametrize(
        ("world_size", "before", "position", "options"),
        [(2, 1, 2, {"average": "per_worker"}), (3, 2, 1, {"hold": 2}), (2, 3, 0, {"micro_batches": 3})],
    )
    def test_a_group_goes_on_over_any_transport_in_the_same_bytes(
        self, world_size, before, position, options, transport
    ):
        """Whether they join and load, or load and join."""
        wanted, states = undisturbed(world_size, before, **options), saved_by(world_size, before, position, **options)

        def work(exchange):
            joins_first = world_size == 2
            engine = loaded(states[exchange.rank], exchange if joins_first else None, **options)
            if not joins_first:
                engine.reconnect(exchange)
            assert (engine.current_step, engine.accumulator.accumulated_count) == (before, position)
            found = steps(engine, contributions(engine.rank)[position:])
            exchange.barrier()
            return found

        with group(transport, world_size, timeout=60.0, join_timeout=60.0) as exchanges:
            assert on_all(work, exchanges) == wanted

    @pytest.mark.parametrize("is_sent", [False, True])
    def test_a_rank_that_died_in_mid_window_is_replaced_by_its_saved_state(self, is_sent):
        """The others keep their windows and reconnect; what they have sent travels again."""
        options = {"micro_batches": 3} if is_sent else {}
        wanted, states, waiting = undisturbed(2, 2, **options), saved_by(2, 2, 2, **options), []
        times = {"timeout": 60.0, "join_timeout": 60.0, "bucket_bytes": 4}

        def survivor(_):
            engine = GradientEngine(LAYOUT, exchange=first[0], max_norm=1.0, **options)
            engine.load_state_dict(states[0])
            waiting.append(engine)
            if is_sent:
                add_all(engine, contributions(0)[2:])
            with pytest.raises(ExchangeError):
                (engine.step if is_sent else first[0].barrier)()
            engine.reconnect(second[0])
            return steps(engine, [] if is_sent else contributions(0)[2:])

        def dead(_):
            GradientEngine(LAYOUT, exchange=first[1], max_norm=1.0, **options)
            for _ in range(6000):  # until its part has gone into the connection, and it receives the sum
                if not is_sent or (waiting and holds_sums(waiting[0])):
                    break
                threading.Event().wait(0.01)
            first[1].close()
            engine = loaded(states[1], **options)
            engine.reconnect(second[1])
            return steps(engine, contributions(1)[2:])

        with group(Transport.UNIX, 2, **times) as first, group(Transport.UNIX, 2, **times) as second:
            assert on_all(lambda work: work(None), [survivor, dead]) == wanted

    def test_ranks_at_other_steps_do_not_join_or_are_found_by_the_next_step_or_by_its_deadline(self):
        states = saved_by(2, 3, 0)

        def joins(exchange):
            engine = engine_with(max_norm=1.0) if exchange.rank else loaded(states[0])
            engine.reconnect(exchange)

        def steps_on(exchange, forgets):
            engine = engine_with(exchange=exchange, max_norm=1.0)
            if exchange.rank == 0 or not forgets:
                engine.load_state_dict(states[exchange.rank])
            if exchange.rank == 0 or forgets:
                engine.add(gradients_of(0))
                engine.step()

        for error in on_ranks(joins, 2):
            assert isinstance(error, HandshakeRefused)
            assert "rank 1 is at a different step: got 0, expected 3" in str(error)
        for error in on_ranks(lambda exchange: steps_on(exchange, forgets=True), 2):
            assert isinstance(error, ExchangeError)
            assert "rank 1 is out of sync with rank 0" in str(error)
        error, _ = on_ranks(lambda exchange: steps_on(exchange, forgets=False), 2, timeout=0.5)
        assert isinstance(error, DeadlineExceeded)
        assert "in step 3" in str(error)

    def test_a_window_of_another_rank_is_refused_and_between_windows_it_fits_all(self):
        """As where one rank saves for all: its part would be counted twice."""
        window, between = saved_by(2, 1, 1)[0], saved_by(2, 1, 0)[0]

        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, max_norm=1.0)
            if exchange.rank == 1:
                with pytest.raises(WindowError, match=r"saved .*by rank 0 of 2, and this is rank 1 of 2"):
                    engine.load_state_dict(window)
                assert (engine.current_step, engine.has_open_window) == (0, False)
            engine.load_state_dict(between)
            return steps(engine, contributions(exchange.rank))

        assert on_ranks(work, 2) == undisturbed(2, 1)

    def test_a_window_of_another_world_is_refused_where_it_is_joined_or_stepped(self):
        (state, _), (exchange,) = saved_by(2, 1, 1), local_group(1)
        engine = loaded(state)
        for refused in (engine.step, lambda: engine.reconnect(exchange)):
            with pytest.raises(WindowError, match=r"saved .*by rank 0 of 2, and this is rank 0 of 1"):
                refused()
        assert (engine.exchange, engine.accumulator.accumulated_count) == (None, 1)
        engine.discard()
        engine.reconnect(exchange)
        engine.add(gradients_of(0))
        assert engine.step().step == 1

    def test_half_of_a_tensor_parallel_model_is_resumed_as_that_half(self):
        partitions, states = {"w": "column", "norm": "replicated"}, [None, None]

        def layout_of(rank):
            return GradientLayout.of({"w": (2, 3), "norm": (4,)}, tp_rank=rank, tp_size=2, partitions=partitions)

        def work(exchange, resumes):
            engine = GradientEngine(layout_of(exchange.rank), max_norm=1.0, tp_exchange=exchange)
            same = [np.ones((2, 3), np.float32) * (1 + exchange.rank), np.ones(4, np.float32)]
            if resumes:
                engine.load_state_dict(states[exchange.rank])
            else:
                engine.add(same)
                engine.step()
                engine.add(same)
                states[exchange.rank] = engine.state_dict()
            engine.add(same)
            return bits_of(engine.step())

        assert on_ranks(lambda e: work(e, False), 2) == on_ranks(lambda e: work(e, True), 2)
        with pytest.raises(LayoutMismatch, match="tp_rank 1 of 2"):
            GradientEngine(layout_of(0)).load_state_dict(states[1])


@pytest.mark.parametrize("window", [0, 2])
def test_what_torch_writes_and_reads_is_loaded_as_it_comes(window):
    """Tensors are loaded with weights_only=True, as torch.load does by default; arrays need it off."""
    torch, state = pytest.importorskip("torch"), engine_with(window=window).state_dict()
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    for saved, weights_only in ((tensors, True), (state, False)):
        file = io.BytesIO()
        torch.save({"engine": saved, "epoch": 3}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)["engine"]
        assert_same_state(resumed_from(loaded).state_dict(), state)


# ---- refused ----


def refused(engine, state, kind, match):
    """It is refused by name, and the engine is what it was."""
    before = engine.state_dict()
    with pytest.raises(kind, match=match):
        engine.load_state_dict(state)
    assert_same_state(engine.state_dict(), before)


class TestRefused:
    @pytest.mark.parametrize(
        ("layout", "match"),
        [
            (GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (8,), "head": (1,)}), "row 1: here 'layers.1.w'"),
            (GradientLayout.of({"head": (1,), "layers.0.w": (3, 5), "layers.1.w": (7,)}), "row 0: here 'head'"),
            (GradientLayout.of({"layers.0.w": (5, 3), "layers.1.w": (7,), "head": (1,)}), "row 0: here"),
            (GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,)}), "row 2: here nothing, there 'head'"),
            (GradientLayout(LAYOUT.slots, ["head", 0, 1]), "backward order at 1"),
        ],
        ids=["shape", "order", "transposed", "one less", "order of backward"],
    )
    def test_another_layout_or_order_of_weights(self, layout, match):
        for window in (0, 1):
            refused(engine_with(layout=layout), engine_with(window=window).state_dict(), LayoutMismatch, match)

    @pytest.mark.parametrize("here", [{"micro_batches": 5}, {"micro_batches": None}, {"average": "prescaled"}], ids=str)
    def test_another_number_of_micro_batches_or_average(self, here):
        for window in (0, 1):
            state = engine_with(window=window, micro_batches=4).state_dict()
            refused(engine_with(**{"micro_batches": 4, **here}), state, CallerError, f"different {next(iter(here))}")
        changed_on_purpose = {**engine_with(micro_batches=4).state_dict(), "micro_batches": np.array(8)}
        resumed_from(changed_on_purpose, micro_batches=8)


def changed(**change):
    """A state of two micro-batches of three, in which this is changed; None leaves it out."""
    state = {**engine_with(window=2, micro_batches=3).state_dict(), **change}
    return {name: value for name, value in state.items() if value is not None}


def number(value, dtype=np.int64):
    return np.array(value, dtype)


#: What is changed -> the key word that the refusal has to say, by default the name of what is changed.
HOSTILE = [
    *(({name: None}, f"lacks '{name}'") for name in NAMES),
    ({"extra": number(1)}, "unknown 'extra'"),
    *(({"version": number(1), **more}, "version: got 1") for more in ({}, {"more": number(1)})),
    ({"version": "1"},),
    *(({"step": bad},) for bad in (number(1, np.float64), np.zeros(2, np.int64), number(-1), number(2**63 - 1))),
    *(({"layout": bad},) for bad in (np.zeros(0, np.uint8), np.zeros(9, np.uint8))),
    ({"micro_batches": number(-3)},),
    ({"average": np.full(9, 255, np.uint8)},),
    *(({"loss_scale": number(bad, np.float64)},) for bad in (0, np.nan)),
    ({"loss_scale_tracker": number(-1)},),
    *(({name: number(bad, np.float64)},) for name in ("norm_mean", "norm_variance") for bad in (-1, np.nan, 1e300)),
    *(({"norm_steps": number(bad)},) for bad in (-1, 2**63 - 1)),
    *(({"counted_weight": number(bad, np.float64)},) for bad in (0, -1, 77, np.nan, np.inf)),
    ({"dropped": number(1)}, "on_non_finite"),
    ({"groups": np.full(12, 48, np.uint8)},),
    *(({"max_norms": np.array(bad)}, "max_norm") for bad in ([], [1.0, 2.0], [0.0], [np.nan], [-1.0], 1.0, [1])),
    ({"rank": number(1)},),
    ({"world_size": number(0)},),
    *(({"micro_batch_weights": np.full(2, bad, np.float32)}, "weight is out of range") for bad in (-1, np.nan)),
    *(({"micro_batch_weights": np.ones(count, np.float32)}, f"contradict .* {count} weights") for count in (1, 3)),
    ({"micro_batch_weights": np.ones(2)},),
    *(({"counts": bad},) for bad in (np.array([2, 2]), np.array([2, 2, 2], ">i8"))),
    ({"counts": np.array([2, 2, -1])}, "contradict"),
    ({"counts": np.array([4, 4, 4]), "micro_batch_weights": np.ones(4, np.float32)}, "of 3 at most"),
    ({"used": np.ones(4, bool)},),
    ({"filled": np.ones(3, np.uint8)},),
    *(({"sums": bad},) for bad in (np.zeros(5, "f4"), np.zeros((32, 3), "f4"), np.array([None] * 96))),
    ({"filled": np.zeros(3, bool)}, "sums"),
    ({"says_nothing": number(True, bool)}, "contradict"),
]  # fmt: skip


@pytest.mark.parametrize("bad", HOSTILE, ids=lambda bad: str(bad[0])[:40])
def test_what_is_no_state_is_refused_by_name(bad):
    change, *word = bad
    refused(engine_with(micro_batches=3), changed(**change), CallerError, *(word or change))


@pytest.mark.parametrize("state", [[1, 2], {}, {"w": np.zeros(3, np.float32)}], ids=str)
def test_what_is_anything_else_is_refused(state):
    refused(engine_with(), state, CallerError, "state")


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
