"""The all-reduce of activations: rank order, the same bytes everywhere, any size up to its own, over each transport."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transports import Transport, group, leave_together, on_all, outcomes

from gradengine.demo.shards import ActivationAllReduce
from gradengine.errors import HandshakeRefused, PeerLost
from gradengine.exchange import local_group

PATIENCE = {"timeout": 10.0, "join_timeout": 10.0}


def parts_of(world_size, shape, seed=0):
    """Numbers of many magnitudes, so that the order of a sum shows."""
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal(shape) * 10.0 ** rng.integers(-5, 6, shape)).astype(np.float32) for _ in range(world_size)
    ]


def summed(exchanges, max_size, rounds):
    """Each rank's results of all rounds; a round is one array for each rank."""

    def work(exchange):
        all_reduce = ActivationAllReduce(exchange, max_size)
        results = [all_reduce(parts[exchange.rank].copy()) for parts in rounds]
        leave_together(type("Leaving", (), {"exchange": exchange}))
        return results

    return on_all(work, exchanges)


def in_rank_order(parts):
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_the_rank_ordered_sum_over_each_transport(transport, world_size):
    rounds = [parts_of(world_size, (5, 7), seed) for seed in range(4)]
    with group(transport, world_size, **PATIENCE) as exchanges:
        results = summed(exchanges, 35, rounds)
    for mine in results:
        for result, parts in zip(mine, rounds, strict=True):
            assert result.tobytes() == in_rank_order(parts).tobytes()


def test_the_order_of_the_ranks_shows():
    parts = parts_of(3, (1000,))
    with group(Transport.LOCAL, 3, **PATIENCE) as exchanges:
        total = summed(exchanges, 1000, [parts])[2][0]
    assert np.array_equal(total, in_rank_order(parts))
    assert not np.array_equal(total, in_rank_order(parts[::-1]))


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    world_size=st.integers(1, 4),
    bucket_bytes=st.sampled_from([4, 64, 1 << 21]),
)
def test_smaller_arrays_travel_between_larger_ones(sizes, world_size, bucket_bytes):
    rounds = [parts_of(world_size, (size,), seed) for seed, size in enumerate(sizes)]
    results = summed(local_group(world_size, bucket_bytes=bucket_bytes, **PATIENCE), 70, rounds)
    for mine in results:
        for result, parts in zip(mine, rounds, strict=True):
            assert result.tobytes() == in_rank_order(parts).tobytes()


def test_what_a_larger_array_left_behind_does_not_grow():
    large, small = [np.full(64, 1e38, np.float32)] * 2, [np.ones(1, np.float32)] * 2
    with group(Transport.LOCAL, 2, **PATIENCE) as exchanges:

        def work(exchange):
            all_reduce = ActivationAllReduce(exchange, 64)
            all_reduce(large[exchange.rank].copy())
            for _ in range(5):
                all_reduce(small[exchange.rank].copy())
            return all_reduce._arena.copy()

        arenas = on_all(work, exchanges)
    assert all(np.array_equal(arena, [2, *[0] * (arena.size - 1)]) for arena in arenas)


def test_the_sum_comes_back_in_the_same_memory_whatever_its_strides():
    with group(Transport.LOCAL, 2, **PATIENCE) as exchanges:

        def work(exchange):
            array = np.arange(12, dtype=np.float32).reshape(3, 4)
            view = array.T[::2]
            result = ActivationAllReduce(exchange, 6)(view)
            return result is view, array

        for same, array in on_all(work, exchanges):
            assert same
            assert array.tolist() == [[0, 1, 4, 3], [8, 5, 12, 7], [16, 9, 20, 11]]


def test_a_call_takes_no_memory_for_an_array():
    array = np.ones(1 << 18, np.float32)
    all_reduce = ActivationAllReduce(local_group(1)[0], array.size)
    all_reduce(array)
    tracemalloc.start()
    try:
        for _ in range(4):
            all_reduce(array)
        assert tracemalloc.get_traced_memory()[1] < array.nbytes / 8
    finally:
        tracemalloc.stop()


def test_nan_and_inf_go_through():
    parts = [np.array([1, np.nan, np.inf], np.float32), np.array([1, 1, 1], np.float32)]
    with group(Transport.LOCAL, 2, **PATIENCE) as exchanges:
        for (result,) in summed(exchanges, 3, [parts]):
            assert np.array_equal(result, [2, np.nan, np.inf], equal_nan=True)


# ---- what goes wrong ----


def test_ranks_of_other_sizes_do_not_come_together():
    results = outcomes(lambda e: ActivationAllReduce(e, 8 + e.rank), local_group(2, **PATIENCE))
    assert all(isinstance(result, HandshakeRefused) for result in results)
    assert "between the shards of a model: layouts differ" in str(results[0])
    assert "partial_sums" in str(results[0])


def test_a_rank_that_leaves_ends_the_others_wait_at_once_and_keeps_their_array():
    kept = np.ones(8, np.float32)

    def work(exchange):
        all_reduce = ActivationAllReduce(exchange, 8)
        exchange.barrier()
        if exchange.rank == 1:
            return exchange.close()
        return all_reduce(kept)

    first, _ = outcomes(work, local_group(2, timeout=60.0, join_timeout=10.0))
    assert isinstance(first, PeerLost)
    assert "between the shards of a model: rank 1 left the group" in str(first)
    assert kept.tolist() == [1] * 8
