"""A micro-batch that is not finite is dropped alone: as if it had not been added, on each device and over ranks."""

import math
import sys

import numpy as np
import pytest
import strategies as draw
from backends import BACKENDS
from devices import all_on_host, assign, bits_of, number_of, put_all
from emulated_process_group import on_group, torch_with_nccl
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from transports import Transport, group, outcomes

from gradengine import GradientEngine, GradientLayout, SpikePolicy
from gradengine.errors import CallerError, WindowError
from gradengine.kernels.decision import clip_scale

LAYOUT = GradientLayout.of({"layers.0.w": (40,), "layers.1.w": (7, 300), "empty": (0,), "b": (3,)})
HOST = BACKENDS["host"]()
BAD = [math.nan, math.inf, -math.inf]
SCALE = 4.0


def drawn(*seed):
    random = np.random.default_rng([number % 2**32 for number in seed])
    return [(random.standard_normal(slot.shape) * SCALE).astype(np.float32) for slot in LAYOUT.slots]


def is_bad(rank, step, k):
    """About each third micro-batch, and each of step 2."""
    return step == 2 or np.random.default_rng([rank, step, k, 7]).random() < 0.35


def micro_batch(rank, step, k):
    arrays = drawn(rank, step, k)
    if is_bad(rank, step, k):
        arrays[(0, 1, 3)[k % 3]].flat[-1 - k] = BAD[(step + k) % 3]
    return arrays


def weight_of(rank, k):
    return 1.0 + k + rank


def added(engine, backend, step, count=3):
    for k in range(count):
        engine.add(put_all(backend, micro_batch(engine.rank, step, k)), weight_of(engine.rank, k))


def naive(world_size, step, count=3, average="weighted", max_norm=3.0):
    """The gradient, its norm before it is clipped, what was dropped and the weight of the rest, in fp64."""
    kept = [[k for k in range(count) if not is_bad(rank, step, k)] for rank in range(world_size)]
    sums = [np.zeros(slot.shape) for slot in LAYOUT.slots]
    weights = [sum(weight_of(rank, k) for k in ks) for rank, ks in enumerate(kept)]
    for rank, ks in enumerate(kept):
        share = 1 / weights[rank] if average == "per_worker" and world_size > 1 and ks else 1.0
        for k in ks:
            weight, terms = weight_of(rank, k) * share, drawn(rank, step, k)
            sums = [total + term.astype(float) * weight for total, term in zip(sums, terms, strict=True)]
    lone = "weighted" if average == "per_worker" and world_size == 1 else average
    divisor = {"weighted": sum(weights), "per_worker": sum(map(bool, kept)), "prescaled": world_size}[lone]
    mean = [s / (divisor or 1) / SCALE for s in sums]
    norm = math.sqrt(sum(float((m**2).sum()) for m in mean))
    return [m * clip_scale(norm, max_norm) for m in mean], norm, count * world_size - sum(map(len, kept)), sum(weights)


def figures(result):
    numbers = result.norm, result.dropped, result.weight, result.micro_batches, result.skipped
    return all_on_host(result.gradients), [number_of(each) for each in numbers]


def assert_as(found, world_size, step, count=3, average="weighted"):
    gradients, (norm, dropped, weight, micro_batches, skipped) = found
    expected, its_norm, were_dropped, kept_weight = naive(world_size, step, count, average)
    assert norm == pytest.approx(its_norm, rel=1e-5)  # all gradients are clipped: they alone would show no divisor
    assert (dropped, weight, micro_batches) == (were_dropped, kept_weight, count * world_size)
    assert skipped == (kept_weight == 0)
    for one, other in zip(gradients.values(), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def new_engine(backend=HOST, **options):
    options = {"max_norm": 3.0, "loss_scale": SCALE, "on_non_finite": "drop_micro_batch", **options}
    return GradientEngine(LAYOUT, backend.kernels, **options)


@pytest.mark.parametrize("average", ["weighted", "prescaled", "per_worker"])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 3}, {"groups": "component"}], ids=str)
def test_a_step_is_that_of_the_others(backend, average, options):
    engine = new_engine(backend, average=average, **options)
    if "groups" in options:
        engine.max_norm = dict.fromkeys(engine.max_norm, None)
    for step in range(5):
        added(engine, backend, step)
        result = engine.step()
        if "groups" not in options:
            assert_as(figures(result), 1, step, average=average)
        assert result.metrics()["dropped"] == naive(1, step)[2]
    engine.check()


@pytest.mark.parametrize("transport", [Transport.THREADS, Transport.UNIX, Transport.TCP])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ranks_have_the_same_gradient_also_resumed_in_mid_window(transport, world_size):
    average = ["weighted", "per_worker", "prescaled"][world_size % 3]

    def work(exchange, state):
        engine, found = new_engine(exchange=exchange, average=average, micro_batches=3), []
        if state is not None:
            engine.load_state_dict(state)
            engine.add(micro_batch(engine.rank, 4, 2), weight_of(engine.rank, 2))
            found.append(figures(engine.step()))
        for step in range(engine.current_step, engine.current_step + 4):
            added(engine, HOST, step)
            found.append(figures(engine.step()))
        added(engine, HOST, 4, 2)
        return found, engine.state_dict()

    def run(states):
        with group(transport, world_size) as exchanges:
            return outcomes(lambda place: work(*place), [*zip(exchanges, states, strict=True)])

    made = run([None] * world_size)
    resumed = run([state for _, state in made])
    for (first, _), (second, _) in zip(made, resumed, strict=True):
        for step, found in enumerate([*first, *second]):
            assert_as(found, world_size, step, average=average)
    assert {str(found) for found, _ in made} == {str(made[0][0])}


@given(
    dtypes=st.lists(st.sampled_from(list(draw.DTYPES)), min_size=4, max_size=4),
    place=st.integers(0, 2**16),
    bad=st.sampled_from(BAD),
    absent=st.sets(st.integers(0, 3), max_size=3),
)
def test_one_element_of_any_dtype_is_enough(backend, dtypes, place, bad, absent):
    engine, arrays = new_engine(backend), drawn(place)
    arrays = [array.astype(draw.DTYPES[dtype]) for array, dtype in zip(arrays, dtypes, strict=True)]
    given = [None if position in absent else array for position, array in enumerate(arrays)]
    present = [array for array in given if array is not None and array.size]
    if not present:
        return
    engine.add(put_all(backend, drawn(3)))
    engine.add(put_all(backend, given))
    target = present[place % len(present)]
    target.flat[place % target.size] = bad
    engine.add(put_all(backend, given))
    assert number_of(engine.step().dropped) == 1


def test_the_largest_numbers_are_finite(backend):
    """Though their squares are not, in fp32."""
    engine = new_engine(backend, loss_scale=1.0)
    for name in draw.DTYPES:
        most = {"float32": np.finfo(np.float32).max, "float16": 65504, "bfloat16": 3.38e38}[name]
        signs = zip(LAYOUT.slots, (1, -1, 1, -1), strict=True)
        arrays = [np.full(slot.shape, sign * most, draw.DTYPES[name]) for slot, sign in signs]
        engine.add(put_all(backend, arrays), 0.25)
    assert number_of(engine.step().dropped) == 0


def test_each_replay_drops_by_itself(device):
    engine = new_engine(device)
    arrays = [put_all(device, drawn(k)) for k in range(3)]
    with engine.capture() as graph:
        for k in range(3):
            engine.add(arrays[k], weight_of(0, k))
        engine.step()
    for step in range(5):
        for k in range(3):
            for array, values in zip(arrays[k], micro_batch(0, step, k), strict=True):
                assign(array, device.put(values))
        assert_as(figures(graph.replay()), 1, step)
    engine.check()


@pytest.mark.parametrize("average", ["weighted", "prescaled", "per_worker"])
def test_ranks_that_sum_on_their_gpus(device, monkeypatch, average):
    torch = torch_with_nccl(device.xp)
    monkeypatch.setitem(sys.modules, "torch", torch)

    def work(exchange):
        engine, found = new_engine(device, exchange=exchange, average=average), []
        for step in range(4):
            if step == 3 and exchange.rank:
                engine.add(None, weight=0)
            else:
                added(engine, device, step)
            found.append(figures(engine.step()))
        engine.check()
        return found

    found = on_group(work, 2, torch)
    for each in found:
        for step in range(3):
            assert_as(each[step], 2, step, average=average)
    assert str(found[0]) == str(found[1])


@pytest.mark.parametrize("components", [600, 4100])
def test_of_any_number_of_components(device, components):
    """More than the arguments of a launch hold."""
    layout = GradientLayout.of({f"w{position}": (1,) for position in range(components)})
    engine = GradientEngine(layout, device.kernels, max_norm=None, on_non_finite="drop_micro_batch")
    for last in (1.0, math.nan, 1.0):
        values = np.ones(components, np.float32)
        values[-1] = last
        engine.add(put_all(device, np.split(values, components)))
    result = engine.step()
    assert number_of(result.dropped) == 1
    assert {array.item() for array in all_on_host(result.gradients).values()} == {1.0}


def test_a_device_sums_the_same_bits_as_the_host(device):
    engines = [new_engine(backend, max_norm=None) for backend in (HOST, device)]
    for step in range(5):
        results = []
        for engine, backend in zip(engines, (HOST, device), strict=True):
            added(engine, backend, step)
            results.append(bits_of(engine.step()))
        assert results[0] == results[1]


def test_a_window_of_which_nothing_is_left_moves_no_mean(backend):
    engine = new_engine(backend, on_spike=SpikePolicy("skip"))
    added(engine, backend, 2)
    result = engine.step()
    assert (number_of(result.skipped), number_of(result.spiked), number_of(result.norm)) == (1, 0, 0)
    assert not any(array.any() for array in all_on_host(result.gradients).values())
    assert engine.state_dict()["norm_steps"] == 0


def test_a_sum_that_overflows_is_skipped(backend):
    engine = new_engine(backend, loss_scale=1.0)
    for _ in range(2):
        engine.add(put_all(backend, [np.full(slot.shape, 3e38, np.float32) for slot in LAYOUT.slots]))
    result = engine.step()
    assert (number_of(result.dropped), number_of(result.skipped)) == (0, 1)
    assert result.non_finite is not None


def test_workers_without_a_micro_batch_have_no_step_as_ever():
    def work(exchange):
        engine = new_engine(exchange=exchange)
        engine.add(None, weight=0)
        with pytest.raises(WindowError, match="without a micro-batch"):
            engine.step()
        added(engine, HOST, 0)
        return figures(engine.step())

    for found in on_ranks(work, 2):
        assert_as(found, 2, 0)


@pytest.mark.parametrize("micro_batches", [None, 3])
@pytest.mark.parametrize("by_note", [True, False])
def test_one_that_comes_component_by_component_is_kept_until_its_end(backend, by_note, micro_batches):
    engine = new_engine(backend, micro_batches=micro_batches)
    for step in range(4):
        for k in range(3):
            with engine.micro_batch(weight_of(0, k)) as one:
                for slot, gradient in zip(LAYOUT.slots, put_all(backend, micro_batch(0, step, k)), strict=True):
                    assert not (one.note if by_note else one.add)(slot.name, gradient)
        assert_as(figures(engine.step()), 1, step)
    one, gradient = engine.micro_batch(), backend.put(drawn(0)[3])
    one.note("b", gradient)
    with pytest.raises(WindowError, match="twice"):
        one.note("b", gradient)
    one.fail(RuntimeError)  # as of a backward that ends with an error
    with pytest.raises(WindowError, match="no component"), engine.micro_batch():
        pass
    with pytest.raises(WindowError, match="over"):
        one.note("b", gradient)
    assert not engine.has_open_window


def test_a_window_is_neither_stepped_nor_dropped_within_a_micro_batch(backend):
    engine, arrays = new_engine(backend), put_all(backend, drawn(0))
    engine.add(arrays)
    one = engine.micro_batch()
    one.add("b", arrays[3])
    for call in (engine.step, engine.state_dict, lambda: engine.add(arrays)):
        with pytest.raises(WindowError, match="part of a micro-batch"):
            call()
    engine.discard()
    with pytest.raises(WindowError, match="over"):
        one.end()
    assert not engine.has_open_window
    with engine.micro_batch() as one:
        one.add("b", arrays[3])
    one = engine.micro_batch()
    one.add("b", arrays[3])
    one.add("layers.0.w", arrays[3])
    with pytest.raises(WindowError, match="same array"):
        one.end()
    assert number_of(engine.step().micro_batches) == 1


def test_ranks_whose_micro_batches_come_component_by_component():
    def work(exchange):
        engine, found = new_engine(exchange=exchange, micro_batches=3), []
        for step in range(4):
            for k in range(3):
                with engine.micro_batch(weight_of(engine.rank, k)) as one:
                    for slot, gradient in zip(LAYOUT.slots, micro_batch(engine.rank, step, k), strict=True):
                        one.note(slot.name, gradient)
            found.append(figures(engine.step()))
        return found

    for found in on_ranks(work, 3):
        for step, each in enumerate(found):
            assert_as(each, 3, step)


def test_parts_of_a_micro_batch_and_what_else_cannot_be_are_refused():
    engine, arrays = new_engine(), drawn(0)
    for call in (
        lambda: engine.add_block(0, arrays[:1]),
        lambda: engine.add_non_block("b", arrays[3]),
        lambda: engine.micro_batch().begin(),
    ):
        with pytest.raises(CallerError, match="as a whole"):
            call()
    assert not engine.has_open_window
    with pytest.raises(CallerError, match="hold"):
        new_engine(hold=2)
    part = GradientLayout.of({"w": (2,)}, tp_size=2, partitions={"w": "column"})
    with pytest.raises(CallerError, match="part 0 of 2"):
        GradientEngine(part, on_non_finite="drop_micro_batch", max_norm=None)


def test_a_state_with_dropped_micro_batches_is_for_an_engine_that_drops():
    engine = new_engine(micro_batches=3)
    added(engine, HOST, 2, 2)
    state = engine.state_dict()
    with pytest.raises(CallerError, match="on_non_finite"):
        new_engine(micro_batches=3, on_non_finite="skip").load_state_dict(state)
    changes = [*({"dropped": np.array(count)} for count in (-1, 1, 3)), {"counted_weight": np.array(1.0)}]
    for change in changes:
        with pytest.raises(CallerError, match="dropped"):
            new_engine(micro_batches=3).load_state_dict({**state, **change})


def test_the_noise_is_not_measured_beside_it():
    with pytest.raises(CallerError, match="noise"):
        new_engine(measure_noise=True)


@pytest.mark.parametrize("average", ["weighted", "per_worker", "prescaled"])
def test_a_request_to_stop_is_reported_by_a_replay(device, average):
    engine, arrays = new_engine(device, average=average), put_all(device, drawn(0))
    with engine.capture() as graph:
        engine.add(arrays)
        engine.step()
    engine.stop_after_step()
    assert [bool(graph.replay().stop) for _ in range(2)] == [True, False]


def test_the_mean_of_a_window_counts_once(backend):
    engine = new_engine(backend, max_norm=None, loss_scale=1.0)
    for bad in (False, True, False):
        arrays = drawn(0)
        arrays[0].flat[3] = math.nan if bad else 1.0
        engine.add(put_all(backend, arrays), 2.0)
    engine.accumulator.average()
    result = engine.step()
    assert (number_of(result.weight), number_of(result.dropped)) == (1.0, 0.0)
    np.testing.assert_allclose(all_on_host(result.gradients)["b"], drawn(0)[3], rtol=1e-6)


def test_all_elements_may_be_bad_and_those_that_do_not_come_are_not(backend):
    engine = new_engine(backend)
    engine.add(put_all(backend, [np.full(slot.shape, math.nan, np.float32) for slot in LAYOUT.slots]))
    engine.add([None, None, None, backend.put(drawn(0)[3])])
    assert number_of(engine.step().dropped) == 1
