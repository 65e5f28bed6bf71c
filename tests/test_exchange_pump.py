"""Whole steps of an all-reduce over links, each rank a thread with its pump; what goes wrong, and what it is called."""

import contextlib
import itertools
import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import strategies as draw
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchange_ordered_all_reduce import random_parts
from transports import SOCKET_LINKS, Failing, SlowArena, on_all, outcomes, rank_order_sum, shared

from gradengine.errors import DeadlineExceeded, ExchangeError, PeerLost, ProtocolError, WindowError
from gradengine.exchange.gather import _HEAD_TAG, Gather
from gradengine.exchange.links.link import DAMAGED, SEND, Completion, Link
from gradengine.exchange.links.threads import thread_links
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.pump import Pump
from gradengine.exchange.shares import shares_of
from gradengine.kernels import CHUNK, HostKernels
from gradengine.layout import GradientLayout

KERNELS = HostKernels(threads=1)
SOON = 60.0  # seconds; what would be waited for takes longer
SMALL = GradientLayout.of({"layers.0.w": (7, 5), "layers.1.w": (33,), "embedding": (3, 11), "head": (40,)})

in_both_ways = pytest.mark.parametrize("reads_in_place", [False, True])


def running(link, all_reduce, device_arena=None, **options):
    pump = Pump(link, **options)
    pump.run(all_reduce, device_arena)
    return pump


class Rank:
    """One rank's arena and all-reduce."""

    def __init__(self, rank, parts, layout, shares, on_devices=(), copy=np.copy, **options):
        self.rank, self.layout, self.arena = rank, layout, copy(parts[rank])
        self.on_device = SlowArena(self.arena) if rank in on_devices else None
        arena = self.on_device or self.arena
        self.all_reduce = OrderedAllReduce(rank, len(parts), layout, shares, arena, KERNELS, **options)

    def start(self, pump, *spans, in_background=True):
        with pump.lock:
            self.all_reduce.start(*spans)
            for span in spans if self.on_device else ():
                self.on_device.note(span.key)
            pump.wake(in_background=in_background)


def ranks_of(parts, layout, bucket_bytes=200, owner=None, **options):
    shares = shares_of(layout, len(parts), bucket_bytes, owner=owner)
    return [Rank(rank, parts, layout, shares, **options) for rank in range(len(parts))]


@given(
    draw.uneven_layouts(CHUNK),
    st.integers(1, 4),
    draw.seeds,
    st.sampled_from([4, 200, 1 << 22]),
    st.booleans(),
    st.sampled_from([0, 8 << 20]),
    st.sampled_from(["in place", "copied", *SOCKET_LINKS]),
    st.booleans(),
    st.sets(st.integers(0, 3)),
)
@settings(max_examples=40)
def test_several_steps_end_with_the_sums_in_rank_order(
    layout, world_size, seed, size, is_star, in_flight, way, is_polled, on_devices
):
    steps = [random_parts(layout, world_size, [seed + n]) for n in range(3)]
    owner = world_size - 1 if is_star else None
    options = {"in_flight": in_flight, "reads_in_place": way == "in place", "on_devices": on_devices}
    if way == "shared memory":  # in which a device's rows are not
        options |= {"copy": shared, "reads_in_place": not on_devices}
    ranks = ranks_of(steps[0], layout, size, owner, **options)
    links = SOCKET_LINKS.get(way, thread_links)(world_size)

    def work(rank):
        numbers, found = random.Random(seed + rank.rank), []
        link = links[rank.rank]
        pump = running(Failing(link, is_polled=True) if is_polled else link, rank.all_reduce, rank.on_device)
        for number, parts in enumerate(steps):
            rank.arena[:] = parts[rank.rank]
            spans = [*layout.spans]
            numbers.shuffle(spans)
            for span in spans:  # some ranks' are on their way while others begin
                rank.start(pump, span)
            pump.wait(SOON)
            found.append((rank.arena.copy(), rank.all_reduce.squares))
            assert pump.gather(bytes([number]), SOON) == [bytes([number])] * world_size
            with pump.lock:
                rank.all_reduce.next_step()
        pump.close()
        return found

    ends = on_all(work, ranks)
    for found in ends:
        for (arena, squares), (_, others), parts in zip(found, ends[0], steps, strict=True):
            draw.assert_same_values(arena, rank_order_sum(parts))
            assert np.array_equal(squares, others)


def test_a_rank_closes_when_it_reads_no_other_rank_s_memory_any_more(monkeypatch):
    """In the middle of a sum; rank 0 sums what rank 1 has lent."""
    ranks = ranks_of(random_parts(SMALL, 2, [1]), SMALL, owner=0, reads_in_place=True)
    links, log, make = thread_links(2), [], OrderedAllReduce._sum

    def slow(*arguments):
        if not log:
            closer.start()
            closer.join(0.1)  # it ends here if it does not wait
            log.append("summed")
        make(*arguments)

    monkeypatch.setattr(OrderedAllReduce, "_sum", slow)
    pumps = [running(link, rank.all_reduce) for link, rank in zip(links, ranks, strict=True)]
    closer = threading.Thread(target=lambda: (pumps[0].close(), log.append("closed")))
    for rank, pump in zip(ranks, pumps, strict=True):
        for span in SMALL.spans:
            with contextlib.suppress(PeerLost):  # which the other's closing is
                rank.start(pump, span)
    while closer.ident is None:
        pass
    closer.join(60)
    pumps[1].close()
    assert log == ["summed", "closed"]


def clock_of(rank, stall):
    """A minute goes by each time that it is looked at, but none before nothing can happen any more."""
    now = [0.0]

    def clock():
        awaited = rank.all_reduce.awaited
        now[0] += 61.0 if stall is not None and (awaited and awaited[:2]) in stall else 0.0
        return now[0]

    return clock


def on_pumps(ranks, work, stalls=None, leaves=()):
    """What becomes of the work of each rank with its pump; each waits for a minute once it waits for this."""
    links, everyone = thread_links(len(ranks)), threading.Barrier(len(ranks))

    def run(rank):
        pump = running(links[rank.rank], rank.all_reduce, clock=clock_of(rank, stalls and [stalls[rank.rank]]))
        try:
            return work(rank, pump)
        finally:
            if rank.rank in leaves:
                pump.close()
            everyone.wait(SOON)  # else the first one to close would be all that the others see
            pump.close()

    return outcomes(run, ranks)


def start(rank, pump, count=None):
    for span in SMALL.spans[:count]:
        rank.start(pump, span)


GOT = " in step 0: got nothing for 60 s"
LATE = {  # how many spans each rank starts, the owner of all, what each rank waits for then, and what it says
    "a rank that starts none": (
        [None, 0], None, [(1, "the part of share 0"), None],
        ["rank 1 is late: rank 0 waits for the part of share 0" + GOT,
         "rank 1 waits for step 0 and has not started all of its spans: got nothing for 60 s"],
    ),
    "one whose part is missing": (
        [None, None, 2], None, [(2, "the part of share 3"), (2, "the sum of share 2"), None],
        ["rank 2 is late: rank 0 waits for the part of share 3" + GOT,
         "rank 2 is late: rank 1 waits for the sum of share 2" + GOT],
    ),
    "who sums for all": (
        [None, None, 0], 0, [(2, "the part of share 0"), (0, "the sum of share 0"), None],
        ["rank 2 is late: rank 0 waits for the part of share 0" + GOT,
         "rank 0 is late: rank 1 waits for the sum of share 0" + GOT],
    ),
}  # fmt: skip


@in_both_ways
@pytest.mark.parametrize("who", LATE)
def test_who_is_late_is_named_with_what_is_missing(who, reads_in_place):
    counts, owner, stalls, says = LATE[who]
    ranks = ranks_of(random_parts(SMALL, len(counts), [1]), SMALL, owner=owner, reads_in_place=reads_in_place)
    faults = on_pumps(ranks, lambda rank, pump: start(rank, pump, counts[rank.rank]) or pump.wait(60.0), stalls)
    assert {*map(type, faults)} == {DeadlineExceeded}
    assert [str(fault).partition("; ")[0] for fault in faults][: len(says)] == says


@in_both_ways
def test_who_is_late_is_named_also_by_ranks_that_lose_one_that_has_given_up(reads_in_place):
    ranks = ranks_of(random_parts(SMALL, 3, [1]), SMALL, owner=0, reads_in_place=reads_in_place)

    def work(rank, pump):
        if rank.rank < 2:
            start(rank, pump)
            pump.wait(60.0)

    first, second, _ = on_pumps(ranks, work, [(2, "the part of share 0")] * 3, leaves=[0])
    assert str(first).startswith("rank 2 is late: rank 0 waits for the part of share 0 in step 0")
    assert str(second).startswith("rank 2 is gone or late: rank 0 has closed its link for that")


@in_both_ways
def test_a_late_rank_may_still_come(reads_in_place):
    """The error has changed nothing: who waits again has the sums."""
    parts, is_late = random_parts(SMALL, 2, [1]), threading.Event()
    ranks = ranks_of(parts, SMALL, reads_in_place=reads_in_place)

    def work(rank, pump):
        if rank.rank == 1:
            is_late.wait(SOON)
        start(rank, pump)
        if rank.rank == 0:
            with pytest.raises(DeadlineExceeded):
                pump.wait(60.0)
            is_late.set()
        pump.wait(1e9)

    assert on_pumps(ranks, work, [(1, "the part of share 0")] * 2) == [None] * 2
    for rank in ranks:
        draw.assert_same_values(rank.arena, rank_order_sum(parts))


def test_a_rank_that_waits_for_long_says_for_whom_at_doubled_intervals(caplog, monkeypatch):
    monkeypatch.setattr("gradengine.exchange.pump.LOOK_SECONDS", 0.0)
    monkeypatch.setattr(Link, "refuse_vanished", lambda _: asked.append(len(caplog.records)))
    (rank, _), looks, asked = ranks_of(random_parts(SMALL, 2, [1]), SMALL), itertools.count(), []
    pump = running(thread_links(2)[0], rank.all_reduce, clock=lambda: 0.5 * next(looks))
    rank.start(pump, *SMALL.spans, in_background=False)
    for wait in (pump.wait, partial(pump.gather, b"")):
        with pytest.raises(DeadlineExceeded):
            wait(60.0)
    said = [f"rank 0 has waited {seconds} s for rank 1 (step 0)" for seconds in (10, 20, 40)]
    assert [each.message for each in caplog.records] == 2 * said
    assert {*asked} == {2, 3, 5, 6}  # warnings by then: not before the second of each wait
    pump.close()


def test_a_group_that_stood_still_as_a_whole_goes_on():
    parts, paused = random_parts(SMALL, 2, [1]), threading.Event()
    ranks, links = ranks_of(parts, SMALL), thread_links(2)

    def clock():
        if not any(ranks[0].all_reduce._waiting) and ranks[0].all_reduce.awaited == (1, "the part of share 0", True):
            paused.set()
        return 1e6 * paused.is_set()

    def work(rank):
        if rank.rank == 1:
            paused.wait(SOON)
        with contextlib.closing(running(links[rank.rank], rank.all_reduce, clock=clock)) as pump:
            rank.start(pump, *SMALL.spans, in_background=False)
            pump.wait(60.0)

    assert outcomes(work, ranks) == [None] * 2


def test_what_has_come_is_read_before_the_clock_counts():
    (link, other), looks = thread_links(2), []

    def clock():
        looks.append(61.0)
        if len(looks) == 5:  # the first look that finds it too late
            for transfer in Gather(1, 2, b"theirs").transfers():
                (other.send if transfer.kind == SEND else other.receive)(*transfer[1:])
            other.poll()
        return sum(looks)

    assert Pump(link, clock=clock).gather(b"mine", 60.0) == [b"mine", b"theirs"]


def test_without_room_for_a_thread_the_caller_moves_all_while_it_waits(monkeypatch):
    parts = random_parts(SMALL, 2, [1])
    ranks = ranks_of(parts, SMALL)
    monkeypatch.setattr("_thread.start_new_thread", lambda *_: (_ for _ in ()).throw(RuntimeError("no new thread")))
    assert on_pumps(ranks, lambda rank, pump: start(rank, pump) or pump.wait(SOON)) == [None] * 2
    for rank in ranks:
        draw.assert_same_values(rank.arena, rank_order_sum(parts))


def test_what_fails_on_the_pumps_thread_is_raised_where_one_waits_and_the_others_lose_the_rank(monkeypatch):
    ranks = ranks_of(random_parts(SMALL, 2, [1]), SMALL, owner=0)
    monkeypatch.setattr(OrderedAllReduce, "_sum", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))

    def work(rank, pump):
        try:
            start(rank, pump)
            pump.wait(SOON)
        except ExchangeError:
            pump.wait(SOON)

    first, second = on_pumps(ranks, work, leaves=[0])
    assert "the exchange of rank 0 failed: got MemoryError('no room')" in str(first)
    assert isinstance(first.__cause__, MemoryError)
    assert isinstance(second, PeerLost)
    assert "rank 0 is gone" in str(second)


def test_calls_that_do_not_fit_change_nothing():
    (rank,) = ranks_of(random_parts(SMALL, 1, [1]), SMALL)
    pump = running(*thread_links(1), rank.all_reduce)
    rank.start(pump, SMALL.spans[0])
    with pytest.raises(WindowError, match="has been started already"):
        rank.start(pump, SMALL.spans[1], SMALL.spans[0])
    rank.start(pump, *SMALL.spans[1:])
    pump.wait(SOON)
    pump.close()
    pump.close()
    for call in (lambda: pump.wake(in_background=True), lambda: pump.gather(b"", SOON)):
        with pytest.raises(PeerLost, match="rank 0 has closed its pump"):
            call()


def test_a_sum_that_is_being_copied_when_the_pump_closes_is_a_sum():
    """The arena may hold half of it: to step again would count it as this rank's part."""
    parts = random_parts(SMALL, 1, [1])
    (rank,) = ranks_of(parts, SMALL, 1 << 20, on_devices=[0])
    rank.on_device.polls = 1 << 60

    def until(is_to_arena):
        while not any(is_to_arena == (target.base is rank.arena) for _, _, target, _ in rank.on_device.begun):
            time.sleep(0)

    pump = running(*thread_links(1), rank.all_reduce, rank.on_device)
    for span in SMALL.spans:
        rank.start(pump, span)
    until(is_to_arena=False)
    for copy in rank.on_device.begun:
        copy[0] = 1
    until(is_to_arena=True)
    assert not rank.all_reduce.holds_sums
    pump.close()
    assert rank.on_device.begun == []
    assert rank.all_reduce.holds_sums
    assert rank.all_reduce.is_done


def test_a_sum_whose_copy_ends_beside_a_damaged_message_is_a_sum():
    """The arena holds it: to step again would count it as this rank's part."""
    parts = random_parts(SMALL, 1, [1])
    (rank,) = ranks_of(parts, SMALL, 1 << 20, on_devices=[0])

    class Damaging(Failing):
        def poll(self):
            over = super().poll()
            for copy in rank.on_device.begun:
                if copy[2].base is rank.arena:
                    copy[0], over = 1, [Completion(DAMAGED, 0, _HEAD_TAG)]
            return over

    pump = running(Damaging(*thread_links(1)), rank.all_reduce, rank.on_device)
    rank.start(pump, *SMALL.spans, in_background=False)
    with contextlib.suppress(ProtocolError):  # not if all sums are there
        pump.wait(SOON)
    assert rank.on_device.begun == []
    assert rank.all_reduce.is_done
    pump.close()
