"""The gradient noise scale beside a naive model: by ranks and by micro-batches, on each device, captured, resumed."""

import math
import sys
from unittest.mock import patch

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
import windows
from backends import BACKENDS
from devices import assign, operations_of, put_all
from emulated_process_group import on_group, torch_with_nccl
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from transports import Transport, group, outcomes

from gradengine import DynamicLossScale, GradientEngine, GradientLayout
from gradengine.engine.noise import Batch, noise_of
from gradengine.kernels.host import HostKernels

LAYOUT = GradientLayout.of({"layers.0.w": (7, 5), "layers.1.w": (33,), "b": (3,)})
SLOTS = LAYOUT.slots
HOST = BACKENDS["host"]()
AVERAGES = ["weighted", "per_worker", "prescaled"]
KEYS = ["noise", "signal", "noise_scale"]


# ---- the model: from the gradients themselves, in fp64 ----


def total_of(window):
    return sum(weight for weight, _ in window)


def mean_of(window):
    """The mean gradient of some micro-batches, each a pair of a weight and a flat gradient."""
    return sum(weight * gradient for weight, gradient in window) / total_of(window)


def expected_of(parts, own, *, first=1, average="weighted"):
    """Key -> number and tolerance, for the windows of all workers, of which one is this worker's own."""
    parts = [window for window in parts if window]
    every = [micro_batch for window in parts for micro_batch in window]
    large, shares = mean_of(every), [total_of(window) / total_of(every) for window in parts]
    unlike = 1 / total_of(every)  # E|mean|² is |G|² + S times this
    if average == "per_worker":
        shares = [1 / len(parts)] * len(parts)
        large = sum(map(mean_of, parts)) / len(parts)
        unlike = sum(1 / total_of(window) for window in parts) / len(parts) ** 2
    small = {}
    if len(parts) > 1:
        square = sum(share * (mean_of(window) ** 2).sum() for share, window in zip(shares, parts, strict=True))
        share = sum(share / total_of(window) for share, window in zip(shares, parts, strict=True))
        small["ranks"] = square, share
    if len(own) > first:
        small["micro_batches"] = (mean_of(own[:first]) ** 2).sum(), 1 / total_of(own[:first])
    found = {}
    for way, (square, share) in small.items():
        both = (large**2).sum()
        noise, error = (square - both) / (share - unlike), 1e-5 * (square + both) / abs(share - unlike)
        found[f"noise/{way}"] = noise, error
        found[f"signal/{way}"] = both - unlike * noise, unlike * error + 1e-5 * both
    return found


def noise_in(metrics):
    return {key: number for key, number in metrics.items() if key.split("/")[0] in KEYS}


def assert_as(metrics, expected):
    found = noise_in(metrics)
    ways = {key.split("/")[1] for key in expected}
    assert set(found) == {f"{key}/{way}" for key in KEYS for way in ways}
    for key, (number, error) in expected.items():
        assert found[key] == pytest.approx(number, rel=1e-5, abs=error)
    for way in ways:
        noise, signal = found[f"noise/{way}"], found[f"signal/{way}"]
        assert signal == 0 or found[f"noise_scale/{way}"] == noise / signal


def flat(layout, gradients):
    arrays = [np.zeros(slot.shape) if g is None else g for slot, g in zip(layout.slots, gradients, strict=True)]
    return np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])


def drawn(*seed):
    """A micro-batch's weight, and its gradients about a common mean."""
    random = np.random.default_rng(seed)
    gradients = [(0.3 + random.standard_normal(slot.shape)).astype(np.float32) for slot in SLOTS]
    return float(1 + seed[-1] % 3), gradients


def modelled(micro_batches):
    return [(weight, flat(LAYOUT, gradients)) for weight, gradients in micro_batches]


# ---- one worker ----


@settings(phases=windows.PHASES)
@given(draw.uneven_layouts(HOST.chunk), st.data())
def test_each_window_is_as_in_the_model_however_it_is_added(layout, data):
    hold = data.draw(st.integers(1, 3))
    average, scale = data.draw(st.sampled_from(AVERAGES)), data.draw(st.sampled_from([1.0, 2.0**-5, 1000.0]))
    ways = windows.WAYS if hold == 1 else ("add",)
    options = {"hold": hold, "average": average, "loss_scale": scale}
    engine = GradientEngine(layout, measure_noise=True, **options)
    for window in data.draw(st.lists(windows.windows(layout, ways=ways), min_size=2, max_size=2)):
        if any(all(g is None for g in batch.gradients.values()) for batch in window):
            return  # parts without any gradient
        windows.add_all(engine, HOST, window)
        plain = [(batch.weight, flat(layout, batch.gradients.values()) / scale) for batch in window]
        metrics = engine.step().metrics()
        if all((gradient == 0).all() for _, gradient in plain):
            return
        assert_as(metrics, expected_of([plain], plain, first=hold))


@pytest.mark.parametrize("hold", [1, 2])
@pytest.mark.parametrize("known", [4, None])
@pytest.mark.parametrize("scale", [8.0, "dynamic"])
def test_each_device_and_each_way_in(backend, hold, known, scale):
    rule = DynamicLossScale(initial=8.0, growth_interval=2) if scale == "dynamic" else scale
    options = {"loss_scale": rule, "on_non_finite": "skip", "hold": hold, "micro_batches": known}
    engine = GradientEngine(LAYOUT, backend.kernels, max_norm=1.0, measure_noise=True, **options)
    for step in range(5):
        window = [drawn(step, k) for k in range(4)]
        now = float(engine.loss_scale)
        for weight, gradients in window:
            scaled = put_all(backend, [gradient * np.float32(now) for gradient in gradients])
            add(engine, scaled, weight, step)
        own = modelled(window)
        assert_as(engine.step().metrics(), expected_of([own], own, first=hold))


def add(engine, gradients, weight, way, last=None):
    """Add a micro-batch whole, by components, noted, or by its parts."""
    named = dict(zip([slot.name for slot in SLOTS], gradients, strict=True))
    if way % 4 == 0:
        engine.add(gradients, weight)
    elif way % 4 < 3:
        with engine.micro_batch(weight) as micro_batch:
            for name in reversed(named):
                if way % 4 == 1:
                    micro_batch.add(name, named[name])
                elif micro_batch.note(name, named[name]):
                    micro_batch.add_noted()
    else:
        options = {} if last is None else {"last": last}
        engine.add_block(1, [named["layers.1.w"]], weight, **options)
        engine.add_non_block("b", named["b"], weight, **options)
        engine.add_block(0, [named["layers.0.w"]], weight, **options)


def test_a_component_that_comes_twice_in_the_first_micro_batch(backend):
    engine = GradientEngine(LAYOUT, backend.kernels, measure_noise=True)
    (_, first), (_, second), (_, third) = (drawn(0, k) for k in range(3))
    with engine.micro_batch() as micro_batch:
        for gradients in (first, second):
            for slot, gradient in zip(SLOTS, put_all(backend, gradients), strict=True):
                micro_batch.add(slot.name, gradient)
    engine.add(put_all(backend, third))
    own = [(1.0, flat(LAYOUT, first) + flat(LAYOUT, second)), (1.0, flat(LAYOUT, third))]
    assert_as(engine.step().metrics(), expected_of([own], own))


def test_numbers_that_cannot_be_told_are_left_out(backend):
    batches = [put_all(backend, drawn(0, k)[1]) for k in range(3)]

    def told(*given, hold=1, before=lambda engine: None, **options):
        engine = GradientEngine(LAYOUT, backend.kernels, hold=hold, **{"measure_noise": True, **options})
        before(engine)
        for gradients in given:
            engine.add(gradients)
        return set(noise_in(engine.step().metrics()))

    def add_to_the_arena(engine):
        with engine.micro_batch() as micro_batch:
            micro_batch.begin()
            for slot in SLOTS:
                assign(engine.accumulator.arrays()[slot.name], 1.0)
                micro_batch.note_added(slot.name)

    def average_one(engine):
        engine.add(batches[0], 2.0)
        engine.accumulator.average()

    every = {f"{key}/micro_batches" for key in KEYS}
    assert told(*batches) == told(*batches, hold=2) == told(*batches[:2]) == every
    assert told(*batches, measure_noise=False) == told(batches[0]) == told(*batches, hold=3) == set()
    assert told(*batches, before=add_to_the_arena) == told(*batches, before=average_one) == set()
    infinite = put_all(backend, [np.full(slot.shape, np.inf, np.float32) for slot in SLOTS])
    assert (
        told(infinite, *batches, on_non_finite="propagate") == told(infinite, *batches, on_non_finite="skip") == set()
    )


def test_blocks_that_are_added_one_after_the_other_leave_no_first_micro_batch(backend):
    engine = GradientEngine(LAYOUT, backend.kernels, measure_noise=True)
    for at, (name, key) in enumerate([("layers.0.w", 0), ("layers.1.w", 1), ("b", "b")]):
        assert SLOTS[at].name == name
        for k in range(3):
            gradient = backend.put(drawn(0, k)[1][at])
            engine.add_block(key, [gradient]) if name != "b" else engine.add_non_block(key, gradient)
    assert noise_in(engine.step().metrics()) == {}


def test_after_the_next_add_the_first_micro_batch_is_not_known_any_more(backend):
    engine = GradientEngine(LAYOUT, backend.kernels, measure_noise=True)
    batches = [put_all(backend, drawn(0, k)[1]) for k in range(2)]
    for gradients in batches:
        engine.add(gradients)
    result = engine.step()
    assert len(noise_in(result.metrics())) == 3
    engine.add(batches[0])
    assert noise_in(result.metrics()) == {}
    engine.discard()
    engine.add(batches[0])
    assert noise_in(engine.step().metrics()) == {}


# ---- workers ----


@pytest.mark.parametrize("transport", [Transport.THREADS, Transport.UNIX, Transport.TCP])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_find_the_same_numbers_also_in_a_resumed_run(transport, world_size):
    average, hold = AVERAGES[world_size % 3], 1 + world_size % 2

    def counts(step):
        """Micro-batches of each rank: unlike each other, and of rank 2 none in every other step."""
        return [0 if rank == 2 and step % 2 else 3 + (rank + step) % 2 for rank in range(world_size)]

    def window(rank, step):
        return [drawn(rank, step, k) for k in range(counts(step)[rank])]

    def engine_of(exchange):
        return GradientEngine(LAYOUT, exchange=exchange, average=average, hold=hold, loss_scale=4.0, measure_noise=True)

    def add_some(engine, step, ks):
        batches = window(engine.rank, step)
        for k in ks:
            if k < len(batches):
                weight, gradients = batches[k]
                add(engine, [gradient * np.float32(4) for gradient in gradients], weight, step, k == len(batches) - 1)
        if not batches and 0 in ks:
            engine.add(None, weight=0)

    def check(engine, metrics, step, *, is_resumed=False):
        parts = [modelled(window(rank, step)) for rank in range(world_size)]
        expected = expected_of(parts, parts[engine.rank], first=hold, average=average)
        ways = {"ranks"} if step % 4 == 3 else set()  # added with `last=True`, so that the last fold is measured
        ways |= set() if is_resumed else {"micro_batches"}
        assert_as(metrics, {key: value for key, value in expected.items() if key.split("/")[1] in ways})
        return [number for key, number in metrics.items() if key.endswith("/ranks")]

    def work(exchange):
        engine, found = engine_of(exchange), []
        for step in range(4):
            add_some(engine, step, range(4))
            found.append(check(engine, engine.step().metrics(), step))
        add_some(engine, 7, range(hold))
        return found, engine.state_dict()

    def resume(place):
        exchange, state = place
        engine = engine_of(exchange)
        engine.load_state_dict(state)
        add_some(engine, 7, range(hold, 4))
        return check(engine, engine.step().metrics(), 7, is_resumed=True)

    with group(transport, world_size) as exchanges:
        made = outcomes(work, exchanges)
    assert all(found == made[0][0] for found, _ in made)
    assert any(made[0][0]) == (world_size > 1)
    with group(transport, world_size) as exchanges:
        resumed = outcomes(resume, [(e, state) for e, (_, state) in zip(exchanges, made, strict=True)])
    assert all(found == resumed[0] for found in resumed)
    assert bool(resumed[0]) == (world_size > 1)


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("average", AVERAGES)
def test_the_last_of_known_micro_batches_is_measured_on_each_device(backend, way, average):
    def work(exchange):
        options = {"exchange": exchange, "average": average, "micro_batches": 2 + exchange.rank}
        engine = GradientEngine(LAYOUT, backend.kernels, measure_noise=True, **options)
        for step in range(2):
            parts = [[drawn(rank, step, k) for k in range(2 + rank)] for rank in range(2)]
            for weight, gradients in parts[engine.rank]:
                add(engine, put_all(backend, gradients), weight, way)
            models = [modelled(window) for window in parts]
            expected = expected_of(models, models[engine.rank], average=average)
            assert_as(engine.step().metrics(), expected)
        return True

    assert on_ranks(work, 2) == [True, True]


@pytest.mark.parametrize(
    ("hold", "count", "ways"), [(2, 3, {"ranks", "micro_batches"}), (2, 2, {"ranks"}), (3, 2, {"ranks"})]
)
def test_what_a_step_folds_itself_is_measured_then(hold, count, ways):
    def work(exchange):
        engine = GradientEngine(LAYOUT, exchange=exchange, hold=hold, measure_noise=True)
        parts = [modelled([drawn(rank, k) for k in range(count)]) for rank in range(2)]
        for k in range(count):
            weight, gradients = drawn(engine.rank, k)
            engine.add(gradients, weight)
        expected = expected_of(parts, parts[engine.rank], first=hold)
        assert_as(engine.step().metrics(), {key: of for key, of in expected.items() if key.split("/")[1] in ways})
        return True

    assert on_ranks(work, 2) == [True, True]


def test_if_one_rank_does_not_measure_no_rank_has_the_ranks_number():
    def work(exchange):
        engine = GradientEngine(LAYOUT, exchange=exchange, measure_noise=exchange.rank == 0, micro_batches=2)
        for k in range(2):
            engine.add(drawn(exchange.rank, k)[1])
        return {key.split("/")[1] for key in noise_in(engine.step().metrics())}

    assert on_ranks(work, 2) == [{"micro_batches"}, set()]


def test_a_step_that_failed_and_is_run_again_has_the_same_numbers():
    def work(exchange):
        engine = GradientEngine(LAYOUT, exchange=exchange, measure_noise=True, micro_batches=2)
        parts = [[drawn(rank, k) for k in range(2)] for rank in range(2)]
        for weight, gradients in parts[engine.rank]:
            engine.add(gradients, weight)
        with pytest.raises(Exception, match="loss_scale"):
            engine.step(loss_scale=2.0 + engine.rank)
        models = [[(weight, g / 2) for weight, g in modelled(window)] for window in parts]
        assert_as(engine.step(loss_scale=2.0).metrics(), expected_of(models, models[engine.rank]))
        return True

    assert on_ranks(work, 2) == [True, True]


def test_parts_of_a_model_have_no_numbers():
    def work(exchange):
        shapes = {"w": (4,)}
        part = GradientLayout.of(shapes, tp_rank=exchange.rank, tp_size=2, partitions={"w": "column"})
        engine = GradientEngine(part, tp_exchange=exchange, measure_noise=True)
        for _ in range(2):
            engine.add([np.ones(4, np.float32)])
        return noise_in(engine.step().metrics())

    assert on_ranks(work, 2) == [{}, {}]


@pytest.mark.parametrize("average", AVERAGES)
def test_workers_that_sum_on_their_gpus_have_the_number_by_micro_batches(device, monkeypatch, average):
    torch = torch_with_nccl(device.xp)
    monkeypatch.setitem(sys.modules, "torch", torch)

    def work(exchange):
        engine = GradientEngine(LAYOUT, device.kernels, exchange=exchange, average=average, measure_noise=True)
        assert exchange.link == "nccl"
        parts = [[drawn(rank, k) for k in range(2 + rank)] for rank in range(2)]
        for weight, gradients in parts[engine.rank]:
            engine.add(put_all(device, gradients), weight)
        models = [modelled(window) for window in parts]
        expected = {} if average == "per_worker" else expected_of(models, models[engine.rank])
        told = {key: value for key, value in expected.items() if key.endswith("micro_batches")}
        assert_as(engine.step().metrics(), told)
        return True

    assert on_group(work, 2, torch) == [True, True]


# ---- what it costs ----


def test_a_replay_has_its_own_numbers_by_one_copy_more(device):
    batches = [put_all(device, drawn(0, k)[1]) for k in range(3)]
    operations, graphs = [], []
    for measure_noise in (False, True):
        engine = GradientEngine(LAYOUT, device.kernels, measure_noise=measure_noise)
        with engine.capture() as graph:
            for k, gradients in enumerate(batches):
                engine.add(gradients, drawn(0, k)[0])
            engine.step()
        graphs.append(graph)
    for step in range(3):
        window = [drawn(step, k) for k in range(3)]
        for arrays, (_, gradients) in zip(batches, window, strict=True):
            for array, values in zip(arrays, gradients, strict=True):
                assign(array, device.put(values))
        own = modelled(window)
        assert_as(graphs[1].replay().metrics(), expected_of([own], own))
    operations = [operations_of(graph._graph.graph) for graph in graphs]
    assert len(operations[1]) == len(operations[0]) + 1


def test_one_copy_on_the_device_is_all_that_it_adds(emulated):
    batches = [put_all(emulated, drawn(0, k)[1]) for k in range(3)]

    def recorded(measure_noise):
        engine = GradientEngine(LAYOUT, emulated.kernels, measure_noise=measure_noise)

        def window():
            for gradients in batches:
                engine.add(gradients)
            return engine.step()

        window()
        with cuda_emulator.recorded() as record:
            window()
        return record

    without, record = recorded(False), recorded(True)
    assert record.waits == []
    assert record.launches == without.launches
    assert record.allocations == without.allocations
    assert record.pinned_allocations == without.pinned_allocations
    assert sorted(record.copies) == sorted([*without.copies, "device to device"])


@pytest.mark.parametrize(("known", "world_size"), [(3, 1), (3, 2), (None, 1), (None, 2)])
def test_a_cpu_takes_no_pass_for_it(known, world_size):
    def passes(exchange, measure_noise):
        options = {"exchange": exchange, "micro_batches": known, "measure_noise": measure_noise}
        engine = GradientEngine(LAYOUT, HostKernels(1), **options)
        kernels, arena, folds, measured = engine.accumulator.kernels, engine.accumulator.arena, [], []
        accumulate, measure = kernels.accumulate, kernels.measure

        def note_fold(where, fold, *, measure=False):
            if where is arena:
                folds.append(measure)
            accumulate(where, fold, measure=measure)

        def note_pass(where, *positions):
            measured.append(where)
            measure(where, *positions)

        with patch.object(kernels, "accumulate", note_fold), patch.object(kernels, "measure", note_pass):
            for k in range(3):
                engine.add(drawn(0, k)[1])
            engine.step()
        return folds, len(measured)

    without, measuring = (on_ranks(lambda e, on=on: passes(e, on), world_size) for on in (False, True))
    for (folds, before), (noise_folds, after) in zip(without, measuring, strict=True):
        assert folds == [False, False, bool(known) and world_size == 1]
        assert noise_folds == [True, False, bool(known)]
        assert before == after == (known is None and world_size == 1)


# ---- statistics ----


@pytest.mark.parametrize("average", ["weighted", "per_worker"])
def test_averaged_over_steps_they_are_those_of_the_distribution(average):
    """Gradients of weight w are G + s/sqrt(w) times a normal distribution: noise is s² a component, signal |G|²."""
    size, steps, deviation = 64, 800, 1.5
    true = np.random.default_rng(1).standard_normal(size)
    noise, signal = size * deviation**2, (true**2).sum()

    def work(exchange):
        random = np.random.default_rng([2, exchange.rank])
        layout = GradientLayout.of([(size,)])
        engine = GradientEngine(layout, exchange=exchange, average=average, micro_batches=2, measure_noise=True)
        found = []
        for _ in range(steps):
            for weight in (1.0 + exchange.rank, 3.0):
                gradient = true + deviation / weight**0.5 * random.standard_normal(size)
                engine.add([gradient.astype(np.float32)], weight)
            found.append(noise_in(engine.step().metrics()))
        return {key: np.mean([one[key] for one in found]) for key in found[0]}

    for found in on_ranks(work, 2):
        assert {key.split("/")[1] for key in found} == {"ranks", "micro_batches"}
        for way in ("ranks", "micro_batches"):
            assert found[f"noise/{way}"] == pytest.approx(noise, rel=0.04)
            assert found[f"signal/{way}"] == pytest.approx(signal, rel=0.04)


@given(*[st.floats(1e-3, 1e3)] * 4)
def test_the_formula_is_that_of_its_source(size, more, small, large):
    """S = (A - B) / (R - 1) and |G|² = (B - S) / W, where A and B are squares of sums over weights."""
    found = noise_of(Batch(size, small), Batch(size + more, large))
    noise = (small - large) / (1 / size - 1 / (size + more))
    assert found == (pytest.approx(noise), pytest.approx(large - noise / (size + more), abs=1e-9 * abs(noise) + 1e-9))


@pytest.mark.parametrize("square", [math.nan, math.inf])
def test_norms_that_are_not_finite_and_equal_sizes_tell_nothing(square):
    assert noise_of(Batch(1, square), Batch(2, 1.0)) is noise_of(Batch(1, 1.0), Batch(2, square)) is None
    assert noise_of(Batch(2, 1.0), Batch(2, 3.0)) is None
