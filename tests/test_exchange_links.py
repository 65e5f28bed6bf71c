"""Links, and small data over them: every way in which bytes move between ranks, as threads of one process."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
from transports import outcomes

from gradengine.errors import CallerError, DeadlineExceeded, DeviceUnavailable, PeerLost, ProtocolError
from gradengine.exchange.gather import Gather
from gradengine.exchange.links import threads
from gradengine.exchange.links.link import Completed, Completion, Idle
from gradengine.exchange.links.mpi import MpiLink
from gradengine.exchange.links.threads import thread_links
from gradengine.exchange.links.torch_group import TorchLink
from gradengine.exchange.pump import Pump
from gradengine.exchange.transfers import Send

SENT, RECEIVED = Completed.SENT, Completed.RECEIVED


def torch_links(world_size):
    """Gloo groups of one process, a thread for each rank while they find each other."""
    torch = pytest.importorskip("torch")
    store = torch.distributed.HashStore()

    def joined(rank):
        return torch.distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=60))

    with ThreadPoolExecutor(world_size) as pool:
        groups = [*pool.map(joined, range(world_size))]
    return [TorchLink(group, rank, range(world_size)) for rank, group in enumerate(groups)]


TRANSPORTS = {"threads": thread_links, "torch": torch_links}


@pytest.fixture(params=TRANSPORTS)
def links(request):
    """Makes a group's links, which are closed in the end."""
    made = []

    def make(world_size):
        made.extend(TRANSPORTS[request.param](world_size))
        return made[-world_size:]

    yield make
    for link in made:
        link.close()


def until(count, *links, reports=None):
    """What each link reports, until it is so much of all."""
    reports = reports or [[] for _ in links]
    while sum(map(len, reports)) < count:
        for link, report in zip(links, reports, strict=True):
            report.extend(link.poll())
    return reports


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "<i8"])
@pytest.mark.parametrize("size", [0, 1, 33, 70_000])
@pytest.mark.parametrize("is_sent_first", [True, False])
def test_memory_arrives_whichever_side_begins(links, dtype, size, is_sent_first):
    first, second = links(2)
    source, sink = np.arange(size).astype(dtype), np.zeros(size, dtype)
    begins = [partial(first.send, 1, 9, source), partial(second.receive, 0, 9, sink)]
    for begin in begins if is_sent_first else reversed(begins):
        begin()
    assert until(2, first, second) == [[(SENT, 1, 9)], [(RECEIVED, 0, 9)]]
    assert np.array_equal(source, sink)
    assert first.poll() == second.poll() == []


def test_many_transfers_are_open_at_a_time_and_each_is_reported_once(links):
    group, tags = links(4), range(20)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    sinks = {(a, b, tag): np.zeros(3) for a, b in pairs for tag in tags}
    numbers = np.random.default_rng(0)
    for a, b, tag in numbers.permutation([*sinks]).tolist():
        group[b].receive(a, tag, sinks[a, b, tag])
    for a, b, tag in numbers.permutation([*sinks]).tolist():
        group[a].send(b, tag, np.array([a, b, tag], float))
    reports = until(2 * len(sinks), *group)
    for rank, report in enumerate(reports):
        expected = {(kind, peer, tag) for kind in Completed for peer in range(4) if peer != rank for tag in tags}
        assert len(report) == len(expected)
        assert {*report} == expected
    assert all(np.array_equal(key, sink) for key, sink in sinks.items())


def test_one_tag_again_and_again_arrives_in_order(links):
    first, second = links(2)
    for value in range(5):
        source, sink = np.full(4, float(value)), np.zeros(4)
        first.send(1, 3, source)
        if value % 2:
            first.poll()
        second.receive(0, 3, sink)
        until(2, first, second)
        assert np.array_equal(source, sink)


def test_what_was_sent_may_be_overwritten(links):
    first, second = links(2)
    source, sink = np.ones(1000), np.zeros(1000)
    second.receive(0, 1, sink)
    first.send(1, 1, source)
    report = []
    while not report:
        second.poll()
        report = first.poll()
    source[:] = 7
    while not sink.any():
        second.poll()
    assert (sink == 1).all()


def test_a_rank_that_is_gone_is_named_where_a_transfer_with_it_is_open(links):
    first, second, third = links(3)
    first.receive(2, 5, np.zeros(2))
    third.close()
    with pytest.raises(PeerLost, match="rank 2 is gone"):
        until(1, first)
    assert second.poll() == []
    second.send(2, 1, np.zeros(2))
    with pytest.raises(PeerLost, match="rank 2 is gone"):
        until(1, second)


def test_who_was_gone_first_is_named():
    """Also by a rank that had nothing to do with it, but with one that has closed for it."""
    first, second, third = thread_links(3)
    first.receive(2, 1, np.zeros(2))
    second.receive(0, 1, np.zeros(2))
    third.close()
    with pytest.raises(PeerLost, match="rank 2 is gone: it has closed its link"):
        first.poll()
    first.close()
    with pytest.raises(PeerLost, match="rank 2 is gone or late: rank 0 has closed its link for that"):
        second.poll()


def test_a_rank_that_was_given_up_reads_that_it_was_late_itself():
    first, second = thread_links(2)
    second.receive(0, 1, np.zeros(2))
    first.lost = 1
    first.close()
    with pytest.raises(PeerLost, match=r"rank 0 has closed its link: it waited for this rank \(1\) too long"):
        second.poll()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_over_torch_the_rank_that_was_lost_first_is_named_without_a_place_in_gloos_source(order):
    *others, third = torch_links(3)
    for peer in (0, 1):
        third.receive(peer, 1, np.zeros(2))
    for peer in order:
        third._run(fails, peer)
        with pytest.raises(PeerLost, match=rf"^rank {order[0]} is gone: the connection with it is lost \(\w"):
            third.poll()
    for link in (*others, third):
        link.close()


def fails(peer):
    raise RuntimeError(f"[/gloo/pair.cc:534] Connection with {peer} closed\nand more")


def test_ranks_that_are_left_go_on_with_each_other(links):
    first, second, third = links(3)
    third.close()
    sink = np.zeros(2)
    first.send(1, 1, np.ones(2))
    second.receive(0, 1, sink)
    until(2, first, second)
    assert sink.all()


def test_what_was_over_before_is_reported_first(links):
    first, second = links(2)
    second.receive(0, 1, np.zeros(2))
    first.send(1, 1, np.ones(2))
    first.send(1, 2, np.ones(2))
    until(1, second)
    second.close()
    assert until(1, first) == [[(SENT, 1, 1)]]
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        until(1, first)


def test_what_was_sent_arrives_though_the_sender_has_closed(links):
    first, second = links(2)
    sinks, sent, received = [np.zeros(2), np.zeros(1_000_000), np.zeros(1)], [], []
    for tag, sink in enumerate(sinks):
        second.receive(0, tag, sink)
    for tag, sink in enumerate(sinks[:2]):
        first.send(1, tag, np.full_like(sink, 7))
    while len(sent) < 2:
        sent += first.poll()
        received += second.poll()
    first.close()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        until(3, second, reports=[received])
    assert received == [(RECEIVED, 0, 0), (RECEIVED, 0, 1)]
    assert all((sink == 7).all() for sink in sinks[:2])


def test_a_closed_link_is_refused_and_may_be_closed_again(links):
    first, second = links(2)
    memory = np.zeros(2)
    first.receive(1, 1, memory)
    first.close()
    first.close()
    second.send(0, 1, np.ones(2))
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        until(1, second)
    assert not memory.any()
    for call in (first.poll, lambda: first.send(1, 2, memory), lambda: first.receive(1, 2, memory)):
        with pytest.raises(PeerLost, match="the link of rank 0 is closed"):
            call()


def test_another_size_is_refused(links):
    first, second = links(2)
    memory = np.zeros(3)
    second.receive(0, 4, memory)
    first.send(1, 4, np.ones(2))
    with pytest.raises(ProtocolError, match=r"rank 0 sent rank 1 another size with tag 4: got 16 bytes, expected 24"):
        until(1, second)
    assert not memory.any()


def test_a_link_is_not_copied(links):
    with pytest.raises(CallerError, match="cannot be copied"):
        links(1)[0].__reduce_ex__(2)


@pytest.mark.parametrize("closes", [0, 1])
def test_nothing_reads_or_writes_a_ranks_memory_after_it_has_closed(closes, monkeypatch):
    """The other rank is in the middle of a copy then."""
    group, log, copyto = thread_links(2), [], np.copyto

    def close():
        group[closes].close()
        log.append("closed")

    def slow(sink, source):
        closer.start()
        while not group[0]._group.ranks[closes].is_closed:
            pass
        closer.join(0.1)  # it ends here if it does not wait
        copyto(sink, source)
        log.append("copied")

    closer = threading.Thread(target=close)
    monkeypatch.setattr(threads.np, "copyto", slow)
    group[1].receive(0, 1, np.zeros(2))
    group[0].send(1, 1, np.ones(2))
    group[1].poll()
    closer.join(60)
    assert log == ["copied", "closed"]


def test_what_is_borrowed_is_the_senders_memory_until_it_is_released():
    first, second = thread_links(2)
    assert first.reads_in_place
    source = np.arange(5.0)
    second.borrow(0, 3)
    assert second.borrowed(0, 3) is None
    first.send(1, 3, source)
    assert second.poll() == [(RECEIVED, 0, 3)]
    assert second.borrowed(0, 3) is source
    assert first.poll() == second.poll() == []
    second.release(0, 3)
    assert second.borrowed(0, 3) is None
    assert first.poll() == [(SENT, 1, 3)]
    first.close()
    assert second.poll() == []


def borrowing():
    """Two links, of which the second has borrowed of the first."""
    first, second = thread_links(2)
    first.send(1, 3, np.zeros(2))
    second.borrow(0, 3)
    assert second.poll() == [(RECEIVED, 0, 3)]
    return first, second


@pytest.mark.parametrize("ends", [lambda link: link.release(0, 3), lambda link: link.close()])
def test_who_has_lent_memory_closes_when_nobody_reads_it_any_more(ends):
    first, second = borrowing()
    closer = threading.Thread(target=first.close)
    closer.start()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        until(1, second)
    assert second.borrowed(0, 3) is not None
    closer.join(0.1)
    assert closer.is_alive()
    ends(second)
    closer.join(60)
    assert not closer.is_alive()


def test_who_has_borrowed_closes_and_the_lender_loses_it():
    first, second = borrowing()
    second.close()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        first.poll()
    first.close()
    with pytest.raises(PeerLost, match="the link of rank 1 is closed"):
        second.release(0, 3)


def test_who_closes_does_not_wait_for_those_who_have_not_begun_to_read():
    first, second = thread_links(2)
    first.send(1, 3, np.zeros(2))
    second.borrow(0, 3)
    first.close()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        second.poll()


def test_who_waits_for_something_else_besides_rests_for_milliseconds_only():
    idle = Idle(thread_links(2)[1])
    for _ in range(3):
        idle.rest(is_woken=False)


def test_who_rests_is_woken_by_what_the_other_rank_does():
    first, second = thread_links(2)
    idle = Idle(second)
    second.receive(0, 1, np.zeros(1))
    threading.Thread(target=first.send, args=(1, 1, np.ones(1))).start()
    idle.rest()
    assert second.poll() == [Completion(RECEIVED, 0, 1)]
    threading.Thread(target=first.close).start()
    idle.rest()
    second.receive(0, 2, np.zeros(1))
    with pytest.raises(PeerLost):
        second.poll()


def test_without_mpi4py_a_link_over_mpi_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DeviceUnavailable, match=r"needs mpi4py and an MPI library .* pip install 'gradengine\[mpi\]'"):
        MpiLink()


# ---- small data ----


def gathered(link, *parts, **options):
    """What the ranks give to these gathers in a row."""
    pump = Pump(link, **options)
    try:
        return [pump.gather(part, 60.0) for part in parts]
    finally:
        pump.close()


@pytest.mark.parametrize("world_size", range(1, 5))
def test_all_have_every_ranks_bytes_in_rank_order(links, world_size):
    sizes = [(31 * rank * rank) % 7 * 1000 for rank in range(world_size)]
    whole = [bytes([rank]) * size for rank, size in enumerate(sizes)]
    leaving = threading.Barrier(world_size)

    def work(link):
        pump = Pump(link)
        found = [pump.gather(part, 60.0) for part in (whole[link.rank], b"", b"again")]
        leaving.wait(60.0)
        pump.close()
        return found

    assert outcomes(work, links(world_size)) == [[whole, [b""] * world_size, [b"again"] * world_size]] * world_size


def test_a_late_rank_is_named(links):
    has_come, looks = threading.Event(), []

    def clock():
        looks.append(has_come.is_set())
        # Once what has come was polled; then it goes on, for a transfer that is over late makes the seconds count anew.
        return 61.0 * max(0, sum(looks) - 1)

    def work(link):
        if link.rank == 0:
            return gathered(link, b"x", clock=clock)
        if link.rank == 1:  # it sends its part, so that rank 2 alone is late
            gather = Gather(1, 3, b"")
            for transfer in gather.transfers():
                begin = link.send if isinstance(transfer, Send) else link.receive
                if transfer.peer == 0:
                    begin(*transfer)
            until(2, link)
            has_come.set()
        return None

    late, *_ = outcomes(work, links(3))
    assert isinstance(late, DeadlineExceeded)
    assert "rank 2 is late for a gather (end of step or barrier), rank 0 waits: got nothing for 60 s" in str(late)


def test_a_rank_that_is_gone_ends_a_gather(links):
    group = links(3)
    lost = outcomes(lambda link: link.close() if link.rank == 2 else gathered(link, b"x"), group)
    assert all(isinstance(fault, PeerLost) and str(fault).startswith("rank 2 is gone") for fault in lost[:2])
