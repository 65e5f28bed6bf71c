"""Exchanges over links: what the ranks compare when they join, how a lost step goes on, and who is named."""

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
    Transport,
    Worker,
    bound,
    contributions,
    group,
    on_all,
    outcomes,
    rank_order_sum,
    shared,
)

from gradengine.errors import CallerError, DeadlineExceeded, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange import local_group
from gradengine.exchange.comparison import Hello, packed
from gradengine.exchange.interface import NonFiniteValue
from gradengine.exchange.linked import Exchange, Progress
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


def rejoined(workers, ranks=None, **options):
    """What becomes of these workers when they join a new group as these ranks."""
    ranks = range(len(workers)) if ranks is None else ranks
    exchanges = exchanges_of(len(ranks), **options)
    for worker, rank in zip(workers, ranks, strict=True):
        worker.exchange = exchanges[rank]
    return outcomes(Worker.bind, workers)


def end_well(workers):
    """Sum what is left of the step, to the right bytes, and leave."""
    assert on_all(Worker.sum, workers) == [()] * WORLD
    assert [worker.arena.tobytes() for worker in workers] == [EXPECTED] * WORLD
    on_all(lambda worker: worker.exchange.barrier(), workers)
    close(worker.exchange for worker in workers)


def is_sending(exchange):
    """Whether the link has got this rank's parts of all spans."""
    return all(map(exchange._all_reduce.is_started, ALL)) and not exchange._all_reduce._outbox


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


def half_summed(seed=0, copy=np.copy, **options):
    """Three workers of which rank 2 has not started its last span."""
    workers = bound(exchanges_of(WORLD, **options), SMALL, [*map(copy, contributions(SMALL, WORLD, seed))])

    def work(worker):
        for span in ALL if worker.exchange.rank < 2 else ALL[:-1]:
            worker.exchange.start(span)
        parts = worker.exchange.all_gather(b"")  # so that all have begun
        assert len(parts) == WORLD

    on_all(work, workers)
    # The share that waits for the last span is the last of all: the others are summed everywhere, sooner or later.
    until(lambda: all(worker.exchange._all_reduce.may_hold_sums for worker in workers))
    close(worker.exchange for worker in workers)
    return workers


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
def test_a_step_that_is_lost_anywhere_is_run_again_to_the_same_bytes(part, links):
    lost_after = HELLO + (WHOLES[links] - HELLO) * part // 8
    exchanges = exchanges_of(WORLD, lost_after=lost_after, links_of=LINKS[links])
    workers = bound(exchanges, SMALL, contributions_over(links))
    found = outcomes(lambda worker: worker.sum() or worker.exchange.barrier(), workers)
    assert all(isinstance(error, PeerLost) for error in found), found
    assert rejoined(workers, links_of=LINKS[links]) == [None] * WORLD
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


def test_what_was_found_before_the_loss_is_not_forgotten():
    data = contributions(SMALL, WORLD)
    data[2][SMALL.spans[0].start] = np.inf
    workers = bound(exchanges_of(WORLD), SMALL, data)
    on_all(Worker.sum, workers)
    close(worker.exchange for worker in workers)
    rejoined(workers)
    assert on_all(Worker.sum, workers) == [(NonFiniteValue(2, SMALL.spans[0].start, np.inf),)] * WORLD
    close(worker.exchange for worker in workers)


# ---- in another group ----


def refused_alike(errors, says):
    assert {type(error) for error in errors} == {HandshakeRefused}, errors
    assert len({str(error) for error in errors}) == 1, "all ranks hear the same"
    assert says in str(errors[0])


def test_a_half_summed_step_is_taken_up_by_its_own_ranks_in_its_own_buckets_alone():
    workers = half_summed(copy=shared)
    before = [worker.arena.tobytes() for worker in workers]
    other, dropped = half_summed(seed=9)[2], half_summed()
    fresh = Worker(None, SMALL, contributions(SMALL, 1)[0])
    dropped[0].progress.restart()
    for others, ranks in ((workers[:2], None), (workers, [1, 0, 2]), (workers, [0, 2, 1]), (workers, [1, 2, 0])):
        refused_alike(rejoined(others, ranks), "step 0 is half summed and rank ")
    refused_alike(rejoined([*workers[:2], other]), "step 0 is half summed and rank 2 took part in it as another")
    refused_alike(rejoined([*workers, fresh]), "got rank 0 of 4 in group")
    refused_alike(rejoined(workers, bucket_bytes=256), "got bucket_bytes=256, expected bucket_bytes=128")
    refused_alike(rejoined(dropped), "rank 0 has not contributed to what step 0 has summed")
    assert [worker.arena.tobytes() for worker in workers] == before
    # Over whatever links there are, one after the other.
    for links_of in (*LINKS.values(), thread_links):
        close(worker.exchange for worker in workers)
        assert rejoined(workers, links_of=links_of) == [None] * WORLD
    end_well(workers)


def test_a_group_keeps_its_name_until_its_step_is_over():
    workers = half_summed()
    names = {worker.progress.membership.group for worker in workers}
    for _ in range(2):
        assert rejoined(workers) == [None] * WORLD
        assert {worker.progress.membership.group for worker in workers} == names
        close(worker.exchange for worker in workers)
    for worker in workers:
        worker.progress.restart()
    rejoined(workers)
    assert len({worker.progress.membership.group for worker in workers} | names) == 2
    close(worker.exchange for worker in workers)


@pytest.mark.parametrize("how", ["dropped", "finished"])
def test_ranks_may_come_together_anew_where_nothing_is_half_summed(how):
    data = contributions(SMALL, WORLD)
    workers = bound(exchanges_of(WORLD), SMALL, data)
    on_all(Worker.sum if how == "finished" else lambda worker: worker.exchange.start(ALL[0]), workers)
    close(worker.exchange for worker in workers)
    for worker, part in zip(workers, data, strict=True):
        worker.arena[:] = part
        worker.progress.next_step() if how == "finished" else worker.progress.restart()
    pair = [workers[2], workers[0]]
    assert rejoined(pair, bucket_bytes=1000) == [None] * 2
    on_all(Worker.sum, pair)
    assert {worker.arena.tobytes() for worker in pair} == {rank_order_sum([data[2], data[0]]).tobytes()}
    close(worker.exchange for worker in pair)


def test_a_healthy_exchange_is_left_for_another():
    """In the middle of a step, by ranks that all reconnect at once: the first pump must not write any more."""
    workers = bound(exchanges_of(WORLD), SMALL, contributions(SMALL, WORLD))
    first = [worker.exchange for worker in workers]
    on_all(lambda worker: [worker.exchange.start(span) for span in ALL], workers)
    assert rejoined(workers) == [None] * WORLD
    with pytest.raises(PeerLost):
        first[0].wait()
    end_well(workers)


def test_how_long_the_sums_took_and_what_was_waited_for_them(monkeypatch):
    """From the first span to the last sum; of which a thread moved what came before the wait."""
    now, wait = [10.0], Pump.wait

    def later(pump, timeout):
        now[0] = 17.0
        wait(pump, timeout)

    monkeypatch.setattr(Pump, "wait", later)
    (exchange,) = exchanges_of(1, clock=lambda: now[0])
    (worker,) = bound([exchange], SMALL, contributions(SMALL, 1))
    exchange.start(ALL[0], in_background=False)
    now[0] = 12.0
    exchange.start(*ALL[1:], in_background=False)
    exchange.wait()
    assert worker.progress.took == (7.0, 5.0)
    worker.progress.next_step()
    assert worker.progress.took == (0.0, 0.0)
    exchange.close()


def test_a_step_begun_over_links_goes_on_over_links_and_another_does_not():
    over_links = half_summed()
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET, join_timeout=SOON) as exchanges:
        for worker, exchange in zip(over_links, exchanges, strict=True):
            worker.exchange = exchange
        errors = outcomes(Worker.bind, over_links)
    assert all("begun over another kind of exchange" in str(error) for error in errors)
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:
        others = bound(exchanges, SMALL, contributions(SMALL, WORLD))
        on_all(Worker.sum, others)
    refused_alike(rejoined(others), "rank 0 is in the middle of a step that was begun over another kind of exchange")


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="no memfd on this platform")
@pytest.mark.parametrize("is_on_device", [False, True])
def test_parts_are_read_in_place_where_all_arenas_lie_in_shared_memory_only(is_on_device):
    exchanges = exchanges_of(WORLD, links_of=LINKS["shared memory"])
    workers = bound(exchanges, SMALL, contributions_over("shared memory"))
    assert all(exchange._all_reduce.reads_in_place for exchange in exchanges)
    close(exchanges)
    for worker, exchange in zip(workers, exchanges_of(WORLD, links_of=LINKS["shared memory"]), strict=True):
        worker.exchange, worker.progress = exchange, Progress()
    arena = workers[1].arena.copy()
    workers[1].arena = SlowArena(arena) if is_on_device else arena
    on_all(Worker.bind, workers)
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
        (changed(0, 4), HandshakeRefused, "rank 1 speaks another version: got 4, expected 3"),
        (changed(None), HandshakeRefused, "rank 1 speaks another version"),
        *((changed(field, [1]), ProtocolError, "hello of rank 1") for field in range(1, 1 + len(Hello._fields))),
    ],
)
def test_what_cannot_be_read_of_another_rank_is_refused(change, kind, says):
    first, second = thread_links(2)
    exchange, part = Exchange(first), contributions(SMALL, 1)[0]
    told = [*msgpack.unpackb(packed(Exchange(second)._hello(SMALL, part, Progress(), exchange._link)))]
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
    with pytest.raises(PeerLost, match=r"ranks 1, 2 are late for joining, rank 0 waits: got nothing for 60 s; start"):
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
