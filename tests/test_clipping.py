"""A bound that is set between windows: read by the next step, compared over ranks, saved, and read by each replay."""

import math

import numpy as np
import pytest
from backends import BACKENDS
from devices import all_on_host, assign, number_of, put_all
from ranks import on_ranks
from transports import Transport, group, outcomes

from gradengine import GradientEngine, GradientLayout, TensorParallelConfig
from gradengine.errors import CallerError, ExchangeError, WindowError

LAYOUT = GradientLayout.of({"layers.0.w": (40,), "layers.1.w": (7, 3), "b": (3,)})
GROUPS = {"block": ["block 0", "block 1", "rest"], None: ["all"]}
BOUNDS = [0.5, 1e9, None, 2.0, 1e-3]
HOST = BACKENDS["host"]()
MORE = {**dict.fromkeys(GROUPS["block"], 1.0), "rset": 1.0}


def drawn(*seed):
    random = np.random.default_rng(seed)
    return [random.standard_normal(slot.shape).astype(np.float32) for slot in LAYOUT.slots]


def bounds_of(step, groups):
    """What `max_norm` is set to for a step, and the naive model's bound of each component."""
    if groups is None:
        return BOUNDS[step % 5], [BOUNDS[step % 5]] * 3
    each = [BOUNDS[(step + number) % 5] for number in range(3)]
    return dict(zip(GROUPS[groups], each, strict=True)), each


def naive(step, world_size, groups):
    """The mean over the ranks, each group scaled by min(1, bound / norm), in fp64."""
    by_rank = [drawn(rank, step) for rank in range(world_size)]
    mean = [np.mean(each, axis=0, dtype=np.float64) for each in zip(*by_rank, strict=True)]
    norms = [math.sqrt((each**2).sum()) for each in mean]
    if groups is None:
        norms = [math.hypot(*norms)] * 3
    bounds = [math.inf if bound is None else bound for bound in bounds_of(step, groups)[1]]
    return [each * min(1.0, bound / norm) for each, bound, norm in zip(mean, bounds, norms, strict=True)]


def stepped(engine, step, groups, backend=HOST):
    engine.max_norm, _ = bounds_of(step, groups)
    assert engine.max_norm == bounds_of(step, groups)[0]
    engine.add(put_all(backend, drawn(engine.rank, step)))
    return all_on_host(engine.step().gradients)


def assert_close(found, expected):
    for one, other in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("transport", [Transport.THREADS, Transport.UNIX, Transport.TCP])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_step_clips_by_the_bound_that_is_set_also_in_a_resumed_run(transport, world_size):
    groups = "block" if world_size % 2 else None

    def work(place, state=None):
        exchange, first = place
        engine = GradientEngine(LAYOUT, max_norm=7.0, exchange=exchange, groups=groups)
        if state is not None:
            engine.load_state_dict(state)
            assert engine.max_norm == bounds_of(first - 1, groups)[0]
        found = [stepped(engine, step, groups) for step in range(first, first + 3)]
        return found, engine.state_dict()

    def run(first, states):
        with group(transport, world_size) as exchanges:
            places = [((exchange, first), state) for exchange, state in zip(exchanges, states, strict=True)]
            return outcomes(lambda place: work(*place), places)

    made = run(0, [None] * world_size)
    resumed = run(3, [state for _, state in made])
    for found in zip(made, resumed, strict=True):
        for step, gradients in enumerate([*found[0][0], *found[1][0]]):
            assert_close(gradients, naive(step, world_size, groups))
    assert {str(found) for found, _ in resumed} == {str(resumed[0][0])}


@pytest.mark.parametrize("groups", GROUPS)
def test_each_replay_reads_it_anew(device, groups):
    engine = GradientEngine(LAYOUT, device.kernels, groups=groups)
    arrays = put_all(device, drawn(0, 0))
    with engine.capture() as graph:
        engine.add(arrays)
        engine.step()
    for step in range(6):
        engine.max_norm, _ = bounds_of(step, groups)
        for array, values in zip(arrays, drawn(0, step), strict=True):
            assign(array, device.put(values))
        assert_close(all_on_host(graph.replay().gradients), naive(step, 1, groups))
        assert_close(stepped(engine, step + 1, groups, device), naive(step + 1, 1, groups))


def test_it_is_refused_while_a_window_is_open_or_captured(backend):
    engine = GradientEngine(LAYOUT, backend.kernels, max_norm=1.0)
    engine.add(put_all(backend, drawn(0)))
    engine.max_norm = 1.0  # changes nothing
    for value, kind, word in [(2.0, WindowError, "bound"), (0, CallerError, "max_norm"), ({}, CallerError, "max_norm")]:
        with pytest.raises(kind, match=word):
            engine.max_norm = value
    assert engine.max_norm == 1.0
    assert number_of(engine.step().scale) == pytest.approx(1 / np.sqrt(sum((g**2).sum() for g in drawn(0))))
    if not backend.is_host:
        arrays = put_all(backend, drawn(0))
        with engine.capture():
            with pytest.raises(WindowError, match="captured"):
                engine.max_norm = 2.0
            engine.add(arrays)
            engine.step()
    engine.max_norm = 2.0
    assert engine.max_norm == 2.0


@pytest.mark.parametrize("bad", [math.nan, -1, 0, "1", True, {"block 0": 1.0}, {**MORE, "rest": 0}, MORE])
def test_a_bound_that_cannot_be_changes_nothing(bad):
    engine = GradientEngine(LAYOUT, max_norm=3.0, groups="block")
    with pytest.raises(CallerError, match="max_norm"):
        engine.max_norm = bad
    assert engine.max_norm == dict.fromkeys(GROUPS["block"], 3.0)
    with pytest.raises(TypeError):
        engine.max_norm["rest"] = 1.0  # nothing would read it


def test_a_state_of_other_groups_is_refused_by_name():
    state = GradientEngine(LAYOUT, groups="block").state_dict()
    with pytest.raises(CallerError, match="groups"):
        GradientEngine(LAYOUT).load_state_dict(state)


@pytest.mark.parametrize("groups", [None, "component"])
def test_ranks_with_another_bound_are_told_before_anything_is_handed_back(groups):
    layout = GradientLayout.of({f"w{number}": (1,) for number in range(60)})

    def work(exchange):
        engine = GradientEngine(layout, exchange=exchange, groups=groups)
        engine.max_norm = 1.0 if groups is None else {f"w{n}": 1.0 + (n == 59) * exchange.rank for n in range(60)}
        if groups is None and exchange.rank:
            engine.max_norm = 2.0
        engine.add([np.ones(1, np.float32)] * 60)
        with pytest.raises(ExchangeError, match=r"rank 1 has .*max_norm"):
            engine.step()
        engine.max_norm = 1.0 if groups is None else dict.fromkeys(engine.max_norm, 1.0)
        return number_of(engine.step().scale)

    expected = 1 if groups else 60**-0.5
    assert on_ranks(work, 2) == pytest.approx([expected, expected])


def test_a_group_is_joined_with_the_bound_of_the_next_step():
    def work(exchange):
        engine = GradientEngine(LAYOUT, max_norm=1.0 + exchange.rank)
        engine.max_norm = 5.0
        engine.reconnect(exchange)
        return stepped(engine, 3, None)

    for found in on_ranks(work, 2):
        assert_close(found, naive(3, 2, None))


def test_one_part_of_a_model_has_no_bound_of_its_own():
    part = TensorParallelConfig(0, 2, 8, 8, 4, 2)
    layout = GradientLayout.transformer(1, 8, 4, 8, 16, tensor_parallel=part)
    engine = GradientEngine(layout)
    with pytest.raises(CallerError, match="tp_exchange"):
        engine.max_norm = 1.0
    assert engine.max_norm is None
