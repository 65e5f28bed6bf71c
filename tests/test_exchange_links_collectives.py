"""A link over an all-to-all: the same sums as over any other link, in rounds that all ranks make together."""

import threading

import numpy as np
import pytest
import strategies as draw
from hypothesis import given, settings
from hypothesis import strategies as st
from transports import SMALL, SOON, Worker, contributions, on_all, outcomes, rank_order_sum

from gradengine.errors import PeerLost, ProtocolError
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.links.collectives import CollectiveLink
from gradengine.exchange.links.link import RECEIVE, SEND, Completion
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.pump import Pump
from gradengine.exchange.shares import shares_of
from gradengine.kernels import CHUNK, HostKernels
from gradengine.layout import GradientLayout


class Rounds:
    """An all-to-all between threads, which fails where not all of them come."""

    def __init__(self, world_size, seconds=SOON):
        self.barrier, self.seconds = threading.Barrier(world_size), seconds
        self.table = [None] * world_size

    def link(self, rank):
        def all_to_all(sent):
            try:
                self.table[rank] = sent
                self.barrier.wait(self.seconds)
                received = [pieces[rank] for pieces in self.table]
                self.barrier.wait(self.seconds)
            except threading.BrokenBarrierError:
                raise PeerLost("not all ranks take part in a round") from None
            return received

        return CollectiveLink(rank, len(self.table), all_to_all)


def links_of(world_size, **options):
    rounds = Rounds(world_size, **options)
    return [rounds.link(rank) for rank in range(world_size)]


@given(
    draw.uneven_layouts(CHUNK),
    st.integers(1, 4),
    st.sampled_from([4, 300, 1 << 22]),
    st.booleans(),
    st.lists(st.sampled_from([0, 1, 5000, 20000]), min_size=4, max_size=4),
)
@settings(max_examples=40)
def test_the_sums_are_those_of_any_link_and_what_is_told_comes_to_all(layout, world_size, bucket, in_background, told):
    parts = contributions(layout, world_size)

    def work(worker):
        rank, found = worker.exchange.rank, []
        worker.bind()
        for _ in range(3):
            for span in layout.spans:
                worker.exchange.start(span, in_background=in_background)
            worker.exchange.wait()
            found.append(worker.arena.tobytes())
            texts = worker.exchange.all_gather(bytes([rank]) * told[rank])
            assert texts == [bytes([other]) * told[other] for other in range(world_size)]
            worker.next_step(parts[rank])
        worker.exchange.close()
        return found

    exchanges = [Exchange(link, bucket_bytes=bucket, timeout=SOON) for link in links_of(world_size)]
    workers = [Worker(*pair) for pair in zip(exchanges, [layout] * world_size, parts, strict=True)]
    assert on_all(work, workers) == [[rank_order_sum(parts).tobytes()] * 3] * world_size
    assert {exchange.link for exchange in exchanges} == {"collectives"}


def test_a_message_waits_until_it_is_received_and_needs_no_other_round_then():
    first, second = links_of(2)
    memory = np.zeros(2)

    def work(link):
        if link is first:
            link.send(1, 7, np.array([1.0, 2.0]))
        else:
            link.receive(0, 9, np.zeros(1))
        return link.poll()

    assert on_all(work, [first, second]) == [[Completion(SEND, 1, 7)], []]
    assert second.held() == {0: 7}
    second.receive(0, 7, memory)
    assert second.poll() == [Completion(RECEIVE, 0, 7)]
    assert (memory.tolist(), second.held()) == ([1.0, 2.0], {})


def test_another_size_is_named():
    first, second = links_of(2)
    second.receive(0, 7, np.zeros(3))
    first.send(1, 7, np.zeros(2))
    error, _ = outcomes(lambda link: link.poll(), [second, first])
    assert isinstance(error, ProtocolError)
    assert "rank 0 sent rank 1 a message of the wrong size with tag 7: got 16 bytes, expected 24 bytes" in str(error)


def test_a_rank_that_does_not_come_is_an_error_on_all_others():
    exchanges = [Exchange(link, timeout=SOON) for link in links_of(3, seconds=0.5)]
    workers = [Worker(exchange, SMALL, part) for exchange, part in zip(exchanges, contributions(SMALL, 3), strict=True)]
    on_all(Worker.bind, workers)
    assert {*map(type, outcomes(Worker.sum, workers[:2]))} == {PeerLost}
    for _ in range(2):
        exchanges[2].close()
    link = exchanges[2]._link
    for call in (link.poll, lambda: link.send(0, 1, np.zeros(1)), lambda: link.receive(0, 1, np.zeros(1))):
        with pytest.raises(PeerLost, match="is closed"):
            call()


def test_a_rank_that_waits_while_a_round_hangs_leaves_the_error_to_the_round():
    """It cannot see which rank is missing: a deadline of its own would name an innocent one."""
    in_round, is_over, now = threading.Event(), threading.Event(), 0.0

    def all_to_all(_):
        in_round.set()
        assert is_over.wait(60)
        raise PeerLost("not all ranks take part in a round")

    def clock():  # a second at each look, until the waiting rank's time is over
        nonlocal now
        if in_round.is_set() and now < 10.0:
            now += 1.0
        elif in_round.is_set():
            is_over.set()
        return now

    layout = GradientLayout.of({"w": (8,), "v": (8,)})
    shares = tuple(share._replace(owner=1) for share in shares_of(layout, 2, 4))
    arena = np.zeros(layout.arena_size, np.float32)
    pump = Pump(CollectiveLink(1, 2, all_to_all), clock=clock)
    sums = OrderedAllReduce(1, 2, layout, shares, arena, HostKernels(threads=1))
    pump.run(sums)
    with pump.lock:
        sums.start(*layout.spans)
        pump.wake(in_background=True)
    assert in_round.wait(60)
    with pytest.raises(PeerLost, match="not all ranks take part"):
        pump.wait(8.0)
    pump.close()
