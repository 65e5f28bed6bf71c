"""Threads of one process: any layout, bucket and number of ranks; and what a fault in one leaves for the others."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupted_at, places_of
from transports import (
    SMALL,
    SOON,
    Transport,
    Worker,
    bound,
    contributions,
    coordinated,
    group,
    on_all,
    outcomes,
    rank_order_sum,
)

from gradengine.errors import DeadlineExceeded, PeerLost
from gradengine.exchange.coordinator import Coordinator
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)

names = st.one_of(
    st.integers(0, 3).flatmap(lambda block: st.sampled_from("abc").map(lambda name: f"layers.{block}.{name}")),
    st.sampled_from(["head", "norm", "embedding"]),
)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
layouts = st.dictionaries(names, shapes, min_size=1, max_size=8).map(GradientLayout.of)


@settings(max_examples=60)
@given(layouts, st.integers(1, 4), st.sampled_from([4, 36, 128, 1000, 1 << 20]), st.randoms(use_true_random=False))
def test_any_layout_bucket_and_group_gives_the_rank_order_sum(layout, world_size, bucket_bytes, rng):
    orders = [rng.sample(layout.spans, len(layout.spans)) for _ in range(world_size)]
    data = contributions(layout, world_size, seed=rng.randrange(1000))
    with group(Transport.LOCAL, world_size, bucket_bytes=bucket_bytes) as exchanges:
        workers = bound(exchanges, layout, data)
        assert on_all(lambda worker: worker.sum(orders[worker.exchange.rank]), workers) == [()] * world_size
        for worker in workers:
            assert worker.arena.tobytes() == rank_order_sum(data).tobytes()


def test_one_thread_may_drive_all_ranks():
    with group(Transport.LOCAL, 3, bucket_bytes=64) as exchanges:
        data = contributions(SMALL, 3)
        workers = bound(exchanges, SMALL, data)
        for worker in workers:
            for span in SMALL.spans:
                worker.exchange.start(span)
        for worker in workers:
            worker.exchange.wait()
            assert worker.arena.tobytes() == rank_order_sum(data).tobytes()


# ---- what a fault leaves behind ----


def bound_in_turn(workers, order):
    """Bind one after the other."""
    shared = workers[0].exchange._group
    threads = []
    for rank in order:
        threads.append(threading.Thread(target=workers[rank].bind))
        threads[-1].start()
        with shared.lock:
            assert shared.changed.wait_for(lambda rank=rank: rank in shared.members, SOON)
    for thread in threads:
        thread.join(SOON)


def bound_again(workers, **options):
    """All workers in a new group, arenas and progress as they are."""
    for worker, exchange in zip(workers, coordinated(len(workers), **options), strict=True):
        worker.exchange.close()
        worker.exchange = exchange
    on_all(Worker.bind, workers)


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_fault_in_a_callback_ends_the_group_and_the_step_can_be_run_again(culprit, order):
    data = contributions(SMALL, 3)
    workers = [Worker(exchange, SMALL, data[exchange.rank]) for exchange in coordinated(3, bucket_bytes=64)]
    bound_in_turn(workers, order)
    calls = []

    def out_of_luck(span, upto):
        calls.append(upto)
        if len(calls) == 3:
            raise ArithmeticError("out of luck")

    workers[culprit].take = out_of_luck
    found = outcomes(Worker.sum, workers)
    assert [type(error) for error in found].count(ArithmeticError) == 1, "the caller whose thread it was"
    for error in found:
        if not isinstance(error, ArithmeticError):
            assert type(error) is PeerLost
            says = (
                "the sum of bucket 2 of step 0 broke off (ArithmeticError('out of luck')); windows are kept: reconnect"
            )
            assert says in str(error)
    workers[culprit].take = lambda span, upto: None
    bound_again(workers, bucket_bytes=64)
    on_all(Worker.sum, workers)
    for worker in workers:
        assert worker.arena.tobytes() == rank_order_sum(data).tobytes()


def test_arena_summed_half_way_in_place_is_not_taken_for_a_contribution(monkeypatch):
    data = contributions(SMALL, 2)
    workers = bound(coordinated(2, bucket_bytes=64), SMALL, data)

    def interrupted(parts, total, start):
        total += parts[1]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gradengine.exchange.group._sum_in_rank_order", interrupted)
        workers[0].exchange.start(SMALL.spans[0])
        with pytest.raises(KeyboardInterrupt):
            workers[1].exchange.start(SMALL.spans[0])
    with pytest.raises(PeerLost, match=r"broke off.*reconnect"):
        workers[0].exchange.wait()
    for worker, exchange in zip(workers, coordinated(2, bucket_bytes=64), strict=True):
        worker.exchange = exchange
    for error in outcomes(Worker.bind, workers):
        assert "rank 0 has sums of step 0 that the coordinator lost" in str(error)
        assert "discard() the window on every rank" in str(error)


def test_nobody_hears_of_a_failure_while_an_arena_is_still_written():
    events = []
    exchanges = coordinated(3, bucket_bytes=1 << 20)
    workers = bound(exchanges, SMALL, contributions(SMALL, 3))
    shared = exchanges[0]._group

    def slow(span, upto):
        if not events:
            threading.Thread(target=exchanges[1].close).start()
            with shared.lock:
                shared.changed.wait_for(lambda: shared.failure is not None, SOON)
            time.sleep(0.05)  # time in which the others would hear of it
            events.append("written")

    workers[2].take = slow

    def work(worker):
        with pytest.raises(PeerLost, match="rank 1"):
            worker.sum()
        events.append("told")

    on_all(work, workers)
    assert events == ["written", "told", "told", "told"]


def test_close_from_a_callback_does_not_hang():
    workers = bound(coordinated(2, bucket_bytes=64), SMALL, contributions(SMALL, 2))
    workers[1].take = lambda span, upto: workers[1].exchange.close()
    assert {type(error) for error in outcomes(Worker.sum, workers)} == {PeerLost}


def test_sum_is_taken_in_rank_0s_arena_without_a_copy():
    data = contributions(SMALL, 2)
    workers = bound(coordinated(2), SMALL, data)
    arena = workers[0].arena
    on_all(Worker.sum, workers)
    assert workers[0].arena is arena
    assert workers[0].exchange._group._store is arena
    assert np.array_equal(arena, rank_order_sum(data))


def test_a_sum_interrupted_before_it_began_is_not_waited_for(monkeypatch):
    """The thread that had claimed it left it claimed: the other rank, and each close(), waited for ever."""
    workers = bound(coordinated(2, timeout=SOON), SMALL, contributions(SMALL, 2))

    def interrupted(coordinator, position):
        monkeypatch.undo()
        raise KeyboardInterrupt

    workers[0].exchange.start(SMALL.spans[0])
    monkeypatch.setattr(Coordinator, "bucket_of", interrupted)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        workers[1].exchange.start(SMALL.spans[0])
    with pytest.raises(PeerLost, match=r"broke off.*reconnect"):
        workers[0].exchange.wait()
    for worker in workers:
        worker.exchange.close()
    assert time.monotonic() - started < 10


def test_no_wait_is_for_ever_whoever_is_to_blame():
    """A claim that nobody will give back: two interrupts, the second one while the first is dealt with."""
    workers = bound(coordinated(2, timeout=0.3), SMALL, contributions(SMALL, 2))
    shared = workers[0].exchange._group
    shared._summing_thread = -1
    found = outcomes(Worker.sum, workers)
    assert {type(error) for error in found} == {DeadlineExceeded}
    for worker in workers:
        with pytest.raises(DeadlineExceeded, match="another thread is in the middle of a sum"):
            worker.exchange.close()
    shared._summing_thread = None


@pytest.mark.parametrize("transport", [Transport.LOCAL, Transport.TCP])
def test_a_close_interrupted_at_any_line_tells_the_others_who_left_at_its_second_call(transport):
    def waiting():
        """Rank 0's exchange, and the thread of rank 1, which waits in a gather, with what it hears."""
        leaver, _ = exchanges = stack.enter_context(group(transport, 2, timeout=SOON, join_timeout=SOON))
        workers = bound(exchanges, SMALL, contributions(SMALL, 2))
        heard = []

        def wait():
            try:
                workers[1].exchange.gather(b"")
            except PeerLost as lost:
                heard.append(str(lost))

        thread = threading.Thread(target=wait)
        thread.start()
        return leaver, thread, heard

    with contextlib.ExitStack() as stack:
        leaver, thread, _ = waiting()
        places = places_of(leaver.close)
        thread.join()
    for at in places:
        with contextlib.ExitStack() as stack:
            leaver, thread, heard = waiting()
            interrupted_at(at, leaver.close)
            leaver.close()
            thread.join(SOON / 2)
            assert len(heard) == 1, at
            says = "rank 0 left the group" if transport is Transport.LOCAL else "rank 0 is gone: it"
            assert says in heard[0], (at, heard)
