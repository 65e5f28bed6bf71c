"""Exchanges over links: what the ranks compare when they join, how a lost step ends, and who is named."""

import re
import sys
import threading

import msgpack
import numpy as np
import pytest
from test_exchange_processes import until
from transports import (
    HAS_SHARED_MEMORY,
    SMALL,
    SOCKET_LINKS,
    SOON,
    Failing,
    SlowArena,
    Worker,
    bound,
    contributions,
    on_all,
    outcomes,
    rank_order_sum,
    shared,
)

from gradengine.errors import CallerError, DeadlineExceeded, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange import local_group
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.hello import Hello, packed_hello
from gradengine.exchange.links.threads import thread_links
from gradengine.exchange.pump import Pump

pytestmark = pytest.mark.timeout(150)
WORLD, BUCKET = 3, 128
EXPECTED = rank_order_sum(contributions(SMALL, WORLD)).tobytes()
ALL = list(SMALL.spans)


def exchanges_of(world_size, *, lost_after=None, links_of=thread_links, **options):
    links = links_of(world_size)
    if lost_after is not None:
        links[1] = Failing(links[1], lost_after)
    return [Exchange(link, **{"bucket_bytes": BUCKET} | options) for link in links]


def close(exchanges):
    for exchange in exchanges:
        exchange.close()


def rejoined(workers, **options):
    """What becomes of these workers when they join a new group."""
    pairs = [*zip(workers, exchanges_of(len(workers), **options), strict=True)]
    found = outcomes(lambda pair: pair[0].bind(pair[1]), pairs)
    assert found == [None] * len(workers) or {*map(type, found)} == {HandshakeRefused}, found
    assert len({*map(str, found)}) == 1, "all ranks are told the same"
    return found[0]


def end_well(workers):
    """Sum the step, to the right bytes, and leave."""
    assert on_all(Worker.sum, workers) == [()] * WORLD
    assert [worker.arena.tobytes() for worker in workers] == [EXPECTED] * WORLD
    on_all(lambda worker: worker.exchange.barrier(), workers)
    close(worker.exchange for worker in workers)


def drop(workers):
    for worker, part in zip(workers, contributions(SMALL, WORLD), strict=True):
        worker.begin(part, worker.step)


def is_sending(exchange):
    """Whether the link has got this rank's parts of all spans."""
    return len(exchange.started) == len(ALL) and not exchange._all_reduce._outbox


class Slow(Failing):
    """A link that sends nothing to one rank until an event is set."""

    def __init__(self, link, peer, event):
        super().__init__(link)
        self.peer, self.event, self.has_waited, self.waiting = peer, event, False, []
        self.send = self.send_later

    def send_later(self, peer, tag, memory):
        if peer == self.peer and not self.event.is_set():
            self.waiting.append((peer, tag, memory))
        else:
            self.link.send(peer, tag, memory)

    def poll(self):
        if self.waiting and self.event.is_set():
            self.has_waited = True
            for each in self.waiting:
                self.link.send(*each)
            self.waiting = []
        return super().poll()


def contributions_over(links):
    """In shared memory, where parts are to be read in it."""
    return [shared(part) if links == "shared memory" else part for part in contributions(SMALL, WORLD)]


def transfers_of_a_step(links):
    """How many transfers of rank 1 are over after a whole step, its hello among them."""
    exchanges = exchanges_of(WORLD, lost_after=1 << 30, links_of=LINKS[links])
    on_all(Worker.sum, bound(exchanges, SMALL, contributions_over(links)))
    close(exchanges)
    return (1 << 30) - exchanges[1]._link.left


HELLO = 2 * (WORLD - 1)
LINKS = {"threads": thread_links, **SOCKET_LINKS}
WHOLES = {links: transfers_of_a_step(links) for links in LINKS}


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("part", range(9))
def test_a_step_that_is_lost_anywhere_is_made_again_or_its_window_is_lost_on_all_ranks(part, links):
    lost_after = HELLO + (WHOLES[links] - HELLO) * part // 8
    exchanges = exchanges_of(WORLD, lost_after=lost_after, links_of=LINKS[links])
    workers = bound(exchanges, SMALL, contributions_over(links))
    found = outcomes(lambda worker: worker.sum() or worker.exchange.barrier(), workers)
    assert all(isinstance(error, PeerLost) for error in found), found
    holds_sums = [worker.exchange.holds_sums for worker in workers]
    refusal = rejoined(workers, links_of=LINKS[links])
    assert (refusal is not None) == any(holds_sums)
    if refusal is not None:
        assert f"the window of step 0 is lost: rank {holds_sums.index(True)} holds sums of it" in str(refusal)
        drop(workers)
        assert rejoined(workers, links_of=LINKS[links]) is None
    end_well(workers)


@pytest.mark.parametrize("links", LINKS)
def test_what_a_rank_tells_before_it_begins_a_step_passes_the_sums_that_others_have_begun(links):
    """As a trainer tells its loss: a rank without a micro-batch before its spans, the others behind theirs."""

    def work(worker):
        rank = worker.exchange.rank
        for step in range(3):
            spans = [] if rank == step else ALL
            for span in spans:
                worker.exchange.start(span)
            if spans:
                until(lambda: is_sending(worker.exchange))
            assert worker.exchange.all_gather(bytes([rank])) == [b"\0", b"\1", b"\2"]
            worker.sum([span for span in ALL if span not in spans])
            assert worker.arena.tobytes() == EXPECTED
            worker.next_step(contributions(SMALL, WORLD)[rank])

    exchanges = exchanges_of(WORLD, links_of=LINKS[links], timeout=SOON)
    on_all(work, bound(exchanges, SMALL, contributions_over(links)))
    close(exchanges)


@pytest.mark.parametrize("links", LINKS)
def test_a_rank_that_leaves_after_the_last_gather_is_not_missed_by_one_that_is_still_in_it(links):
    """What it told was here before the gather began, and so held back: that begins no step."""
    exchanges, left = exchanges_of(WORLD, links_of=LINKS[links], timeout=SOON), threading.Event()
    workers = bound(exchanges, SMALL, contributions(SMALL, WORLD))
    on_all(lambda worker: [worker.sum(), worker.next_step(worker.arena)], workers)
    slow = exchanges[2]._pump._link = Slow(exchanges[2]._link, 0, left)

    def work(worker):
        rank = worker.exchange.rank
        if rank == 0:
            until(lambda: exchanges[0]._link.poll() or exchanges[0]._link.held() or links == "threads")
        parts = worker.exchange.all_gather(bytes([rank]))
        if rank == 1:
            worker.exchange.close()
            left.set()
            slow.bell.ring()
        return parts

    assert on_all(work, workers) == [[b"\0", b"\1", b"\2"]] * WORLD
    assert slow.has_waited
    close(exchanges)


def test_the_sums_are_here_as_often_as_they_are_asked_for_and_the_next_step_is_another():
    data = contributions(SMALL, WORLD)
    data[2][SMALL.spans[0].start] = np.inf
    exchanges = exchanges_of(WORLD, timeout=SOON)

    def work(worker):
        found = []
        for step in range(3):
            worker.exchange.start(*ALL)
            assert worker.exchange.started == {span.key for span in ALL}
            sums = worker.exchange.wait()
            assert worker.exchange.wait() is sums
            found.append((sums.bad, sums.squares.tobytes(), worker.arena.tobytes(), worker.exchange.tell("end", step)))
            worker.next_step(data[worker.exchange.rank])
            assert not worker.exchange.started
        return found

    first, *others = on_all(work, bound(exchanges, SMALL, data))
    assert others == [first] * 2
    assert [bad for bad, *_ in first] == [[(2, SMALL.spans[0].start, np.inf)]] * 3
    assert [told for *_, told in first] == [[step] * WORLD for step in range(3)]
    close(exchanges)


def test_what_a_rank_has_told_in_a_step_is_not_told_again_but_over_another_group():
    """The others may have gone on, and would not answer."""
    workers = bound(exchanges_of(2, timeout=SOON), SMALL, contributions(SMALL, 2))

    def tell(worker):
        for _ in range(2 - worker.exchange.rank):
            told = worker.exchange.tell("loss", worker.exchange.rank)
        return told

    assert on_all(tell, workers) == [[0, 1]] * 2
    assert rejoined(workers) is None
    assert on_all(lambda worker: worker.exchange.tell("loss", 10 + worker.exchange.rank), workers) == [[10, 11]] * 2
    close(worker.exchange for worker in workers)


# ---- in another group ----


@pytest.mark.parametrize("how", ["dropped", "finished"])
def test_ranks_may_come_together_anew_and_otherwise_where_they_hold_no_sums(how):
    data = contributions(SMALL, WORLD)
    workers = bound(exchanges_of(WORLD), SMALL, data)
    on_all(Worker.sum, workers)
    assert rejoined(workers) is not None
    for worker, part in zip(workers, data, strict=True):
        worker.begin(part, int(how == "finished"))
    pair = [workers[2], workers[0]]
    assert rejoined(pair, bucket_bytes=1000) is None
    on_all(Worker.sum, pair)
    assert {worker.arena.tobytes() for worker in pair} == {rank_order_sum([data[2], data[0]]).tobytes()}
    close(worker.exchange for worker in pair)


def test_a_healthy_exchange_is_left_for_another():
    """Before a step has sums, by ranks that all reconnect at once: the first pump must not write any more."""
    workers = bound(exchanges_of(WORLD), SMALL, contributions(SMALL, WORLD))
    first = [worker.exchange for worker in workers]
    on_all(lambda worker: worker.exchange.start(*ALL[: -(worker.exchange.rank == 0) or None]), workers[:1])
    assert rejoined(workers) is None
    with pytest.raises(PeerLost):
        first[0].wait()
    end_well(workers)


def test_how_long_the_sums_took_and_what_was_waited_for_them(monkeypatch):
    """From the first span to the last sum; of which a thread moved what came before the wait."""
    now, wait, both = [10.0], Pump.wait, threading.Barrier(2)

    def later(pump, timeout):
        both.wait(SOON)
        now[0] = 17.0
        both.wait(SOON)
        wait(pump, timeout)

    monkeypatch.setattr(Pump, "wait", later)
    exchanges = exchanges_of(2, clock=lambda: now[0])

    def work(worker):
        worker.exchange.start(ALL[0], in_background=False)
        both.wait(SOON)
        now[0] = 12.0
        worker.exchange.start(*ALL[1:], in_background=False)
        sums = worker.exchange.wait()
        return sums.total, sums.waited

    assert on_all(work, bound(exchanges, SMALL, contributions(SMALL, 2))) == [(7.0, 5.0)] * 2
    close(exchanges)


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="no memfd on this platform")
@pytest.mark.parametrize("is_on_device", [False, True])
def test_parts_are_read_in_place_where_all_arenas_lie_in_shared_memory_only(is_on_device):
    exchanges = exchanges_of(WORLD, links_of=LINKS["shared memory"])
    workers = bound(exchanges, SMALL, contributions_over("shared memory"))
    assert all(exchange._all_reduce.reads_in_place for exchange in exchanges)
    close(exchanges)
    arena = workers[1].arena.copy()
    workers[1].arena = SlowArena(arena) if is_on_device else arena
    assert rejoined(workers, links_of=LINKS["shared memory"]) is None
    assert not any(worker.exchange._all_reduce.reads_in_place for worker in workers)
    on_all(Worker.sum, workers)
    workers[1].arena = arena
    assert [worker.arena.tobytes() for worker in workers] == [EXPECTED] * WORLD
    close(worker.exchange for worker in workers)


# ---- what a rank says of itself ----


def changed(at, value=None):
    def change(told):
        told.pop() if at is None else told.__setitem__(at, value)

    return change


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (changed(0, 4), HandshakeRefused, "rank 1 has a different version: got 4, expected 5"),
        (changed(None), HandshakeRefused, "rank 1 has a different version"),
        *((changed(field, [1]), ProtocolError, "hello of rank 1") for field in range(1, 1 + len(Hello._fields))),
        (changed(-1, {"average": 1}), ProtocolError, "hello of rank 1"),
        (
            changed(-1, {"average": "weighted"}),
            HandshakeRefused,
            "rank 1 has a different average than rank 0",
        ),
    ],
)
def test_what_cannot_be_read_of_another_rank_is_refused(change, kind, says):
    first, second = thread_links(2)
    exchange, part = Exchange(first), contributions(SMALL, 1)[0]
    told = [*msgpack.unpackb(packed_hello(Hello(SMALL.fingerprint, lends=True)))]
    change(told)

    def speak(rank):
        if rank == 0:
            return Worker(exchange, SMALL, part).bind()
        pump = Pump(second)
        pump.gather(msgpack.packb(told), SOON)
        return pump

    error, pump = outcomes(speak, range(2))
    pump.close()
    assert isinstance(error, kind)
    assert says in str(error)


# ---- who is named ----


def clock_when(is_so):
    """A minute goes by each time that it is looked at, once that is so."""
    now = [0.0]

    def clock():
        now[0] += 10 * SOON if is_so() else 0.0
        return now[0]

    return clock


def test_a_rank_that_never_comes_is_named():
    first, *_ = thread_links(3)
    exchange = Exchange(first, clock=clock_when(lambda: True), join_timeout=SOON)
    with pytest.raises(DeadlineExceeded, match="ranks 1, 2 are late for joining, rank 0 waits: got nothing for 60 s"):
        Worker(exchange, SMALL, contributions(SMALL, 1)[0]).bind()


def test_who_is_late_for_a_gather_is_named_and_the_others_hear_whom_it_is_about():
    is_bound, links = threading.Event(), thread_links(3)
    exchanges = [Exchange(links[0], clock=clock_when(is_bound.is_set), timeout=SOON)]
    exchanges += [Exchange(link, timeout=1e6) for link in links[1:]]
    workers = bound(exchanges, SMALL, contributions(SMALL, 3))
    is_bound.set()
    # One after the other: rank 1 would not hear of rank 0 if it had rank 0's part already.
    (first,), (second,) = (outcomes(lambda worker: worker.exchange.barrier(), [each]) for each in workers[:2])
    assert isinstance(first, DeadlineExceeded)
    assert re.match(r"ranks 1, 2 are late for a gather", str(first))
    assert re.match(r"rank [12] is gone or late: rank 0 has closed its link for that|rank 0 has closed", str(second))
    assert isinstance(second, PeerLost)
    close(exchanges)


@pytest.mark.parametrize("links", SOCKET_LINKS)
def test_ranks_in_different_calls_are_told_so_before_the_deadline(links):
    now = [0.0]

    def clock():
        now[0] += 2.0 if links_made[0].held() else 0.0
        return now[0]

    links_made = LINKS[links](2)
    exchanges = [Exchange(links_made[0], clock=clock, timeout=1e6), Exchange(links_made[1], timeout=1e6)]
    workers = bound(exchanges, SMALL, contributions(SMALL, 2))
    sums, barrier = outcomes(lambda worker: [worker.exchange.barrier, worker.sum][worker.exchange.rank == 0](), workers)
    assert str(sums).startswith("rank 1 is in a gather, and rank 0 in the all-reduce: expected the part of share")
    assert isinstance(barrier, PeerLost)
    assert now[0] < 100
    close(exchanges)


def test_starting_a_span_does_not_fail_where_a_rank_is_gone():
    """Gradients are added then: they are kept, and `wait` says what is wrong."""
    exchanges = exchanges_of(2)
    (worker, _) = workers = bound(exchanges, SMALL, contributions(SMALL, 2))
    worker.exchange.start(ALL[0])
    workers[1].exchange.close()
    failed = worker.exchange._pump
    with pytest.raises(PeerLost):
        failed.wait(SOON)
    for span in ALL[1:]:
        worker.exchange.start(span)
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        worker.exchange.wait()
    close(exchanges)


def test_an_interrupted_wait_closes_the_exchange(monkeypatch):
    exchanges = exchanges_of(2)
    workers = bound(exchanges, SMALL, contributions(SMALL, 2))
    exchanges[0].start(ALL[0])

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pump, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            exchanges[0].wait()
    with pytest.raises(PeerLost, match="rank 0 left the group; the window is kept"):
        exchanges[0].wait()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        workers[1].sum()
    close(exchanges)


OUT_OF_RANGE = [{"world_size": size} for size in (0, -1, 65537, 10**9, 10**400)]
OUT_OF_RANGE += [{name: seconds} for name in ("timeout", "join_timeout") for seconds in (0, -1, float("nan"))]
OUT_OF_RANGE += [{"bucket_bytes": 3}]


@pytest.mark.parametrize("wrong", OUT_OF_RANGE, ids=lambda wrong: next(iter(wrong)))
def test_what_is_out_of_range_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(CallerError, match=f"^{name} is out of range"):
        local_group(**{"world_size": 2} | wrong)
    if name != "world_size":
        with pytest.raises(CallerError, match=f"^{name} is out of range"):
            Exchange(*thread_links(1), **wrong)


def test_no_call_of_a_step_runs_code_of_threading_where_a_signal_could_leave_a_lock_locked():
    """Ctrl-C in the Python code of an Event, a Condition or Thread.start left both ranks waiting for ever."""
    exchanges = exchanges_of(2)
    workers, entered = bound(exchanges, SMALL, contributions(SMALL, 2)), set()

    def noting(frame, _event, _argument):
        if frame.f_code.co_filename == threading.__file__:
            entered.add(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)

    def step(worker):
        if worker.exchange.rank == 0:
            sys.settrace(noting)
        try:
            worker.sum()
            worker.exchange.all_gather(b"")
        finally:
            sys.settrace(None)

    on_all(step, workers)
    assert not entered
    close(exchanges)
