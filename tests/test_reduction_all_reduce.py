"""A group's sum that outlives its exchange: what was contributed is contributed again, what was dropped never is."""

import threading

import numpy as np
import pytest
from ranks import on_ranks
from transports import SOON, Transport, free_port, group, on_all

from gradengine import connect, local_group
from gradengine.errors import CallerError, HandshakeRefused, PeerLost
from gradengine.layout import GradientLayout
from gradengine.reduction.all_reduce import AllReduce

LAYOUT = GradientLayout.of({"a": (3,), "b": (5,)})


class Rank:
    """One rank's sum and arena: its number everywhere."""

    def __init__(self, rank):
        self.sum, self.arena = AllReduce(), np.full(LAYOUT.arena_size, rank + 1, np.float32)

    def join(self, exchange):
        self.sum.join(exchange, LAYOUT, self.arena)

    def start_all(self):
        for span in LAYOUT.spans:
            self.sum.start(span)


@pytest.mark.parametrize("transport", [Transport.THREADS, Transport.TCP, Transport.SERVER])
def test_the_sum_lands_once_and_the_next_step_is_another(transport):
    def work(exchange):
        rank = Rank(exchange.rank)
        rank.join(exchange)
        sums = []
        for _ in range(3):
            rank.arena[:] = exchange.rank + 1
            rank.start_all()
            rank.sum.wait()
            rank.sum.wait()  # it is there
            sums.append(float(rank.arena[0]))
            rank.sum.tell("end", None)
            rank.sum.restart()
            rank.sum.progress.step += 1
        return sums, rank.sum.progress.step, rank.sum.started

    with group(transport, 2, timeout=SOON) as exchanges:
        assert on_all(work, exchanges) == [([3.0, 3.0, 3.0], 3, set())] * 2


def test_a_rank_that_asks_again_is_told_alone_what_was_told_in_the_step_and_anew_by_another_group():
    """As where it runs a step again that the others have ended: they would not answer."""
    second, both = local_group(2, timeout=SOON), threading.Barrier(2)

    def work(exchange):
        rank = Rank(exchange.rank)
        rank.join(exchange)
        for _ in range(2 - exchange.rank):
            before = rank.sum.tell("loss", exchange.rank)
        both.wait(SOON)
        exchange.close()
        rank.join(second[exchange.rank])
        return before, rank.sum.tell("loss", 10 + exchange.rank)

    assert on_ranks(work, 2) == [([0, 1], [10, 11])] * 2


@pytest.mark.parametrize("started", [0, 1, 2])
def test_what_left_through_a_lost_exchange_is_contributed_again(started):
    second = local_group(2, timeout=SOON)

    def work(exchange):
        rank = Rank(exchange.rank)
        rank.join(exchange)
        for span in LAYOUT.spans[: started if exchange.rank == 0 else 0]:
            rank.sum.start(span)
        exchange.close()
        rank.join(second[exchange.rank])
        for span in LAYOUT.spans:
            if span.key not in rank.sum.started:
                rank.sum.start(span)
        rank.sum.wait()
        return [rank.arena[slot.offset : slot.stop].tolist() for slot in LAYOUT.slots]

    assert on_ranks(work, 2) == [[[3.0] * slot.size for slot in LAYOUT.slots]] * 2


class TestDropped:
    def test_what_is_on_its_way_closes_the_exchange_and_says_so(self):
        second, dropped = local_group(2, timeout=SOON), threading.Event()

        def work(exchange):
            rank = Rank(exchange.rank)
            rank.join(exchange)
            if exchange.rank == 0:
                rank.start_all()
                rank.sum.leave()
                rank.sum.restart()
                dropped.set()
                rank.start_all()
                for call in (rank.sum.wait, lambda: rank.sum.tell("loss", 1)):
                    with pytest.raises(PeerLost, match="this rank has left"):
                        call()
            else:
                assert dropped.wait(SOON)
                rank.start_all()
                with pytest.raises(PeerLost, match="rank 0 is gone"):
                    rank.sum.wait()
            rank.join(second[exchange.rank])
            rank.sum.wait()
            return float(rank.arena[0])

        assert on_ranks(work, 2) == [3.0, 3.0]

    def test_a_rank_that_contributed_nothing_does_not_join_a_step_that_is_summed(self):
        """A new process, or one that dropped its window alone: its next gradients would be taken for the sum."""

        def work(exchange):
            rank = Rank(exchange.rank)
            rank.join(exchange)
            rank.start_all()
            rank.sum.wait()
            exchange.barrier()
            return rank

        with group(Transport.TCP, 2, timeout=SOON) as exchanges:
            first, _ = on_all(work, exchanges)
        with group(Transport.TCP, 2, timeout=SOON, join_timeout=SOON) as exchanges:
            ranks = [first, Rank(1)]

            def join(exchange):
                with pytest.raises(HandshakeRefused, match="rank 1 has not contributed"):
                    ranks[exchange.rank].join(exchange)
                return True

            assert on_all(join, exchanges) == [True, True]


@pytest.mark.parametrize("started", [False, True])
def test_a_group_that_nobody_joined_in_time_gives_its_address_back_to_the_next_try(started):
    """Its exchange was given to the call that failed: nobody else could close it."""
    url, ranks = f"tcp://127.0.0.1:{free_port()}", [Rank(0), Rank(1)]
    if started:
        ranks[0].sum.started.add(LAYOUT.spans[0].key)
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 1 did not join"):
            ranks[0].join(connect(url, 0, 2, join_timeout=0.05))
        assert ranks[0].sum.exchange is None

    def work(rank):
        ranks[rank].join(connect(url, rank, 2, join_timeout=SOON))
        ranks[rank].sum.started.clear()
        told = ranks[rank].sum.tell("end", rank)
        ranks[rank].sum.exchange.close()
        return told

    assert on_all(work, [0, 1]) == [[0, 1]] * 2


def test_an_exchange_that_is_anothers_is_not_closed():
    first, second, (exchange,) = Rank(0), Rank(0), local_group(1)
    first.join(exchange)
    assert first.sum.is_alone
    with pytest.raises(CallerError, match="bound"):
        second.join(exchange)
    assert second.sum.is_alone
    assert first.sum.tell("end", 1.5) == [1.5]


@pytest.mark.parametrize("world_size", [0, 2])
def test_what_cannot_be_told_is_refused_before_anything_is_sent_and_alone_as_in_a_group(world_size):
    def work(exchange):
        rank = Rank(0 if exchange is None else exchange.rank)
        if exchange is not None:
            rank.join(exchange)
        for facts in ({1}, b"a" * (1 << 24)):
            with pytest.raises(CallerError):
                rank.sum.tell("loss", facts)
        return rank.sum.tell("loss", [1.5, {"w": 2}])

    found = on_ranks(work, 2) if world_size else [work(None)]
    assert found == [[[1.5, {"w": 2}]] * len(found)] * len(found)
