"""The table of docs/specs/faults.md, cell by cell: how each fault ends over each link, at each moment."""

import contextlib
import functools
import inspect
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import certificates
import pytest
from channel import SECRET, Channel, claim
from faulty import (
    HEAD,
    SERVED,
    SHARED_MEMORY,
    SUMS,
    TLS,
    Cut,
    Faulty,
    Flip,
    Hole,
    Reset,
    Slices,
    Way,
    new_workers,
    run,
    run_again,
    traffic_of,
    whole_step,
)
from test_exchange_mesh import Clock, call, mesh, refusal_of, told_by
from test_exchange_processes import killed_and_replaced
from test_exchange_served import Served
from test_exchange_tls import Flipped
from transports import HAS_SHARED_MEMORY, SOON, Failing, Worker, on_all, outcomes, shared

from gradengine.errors import DeadlineExceeded, ExchangeError, HandshakeRefused, PeerLost
from gradengine.exchange.addresses import Listener, connect_once
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.handshake import new_nonce, proof
from gradengine.exchange.links.threads import thread_links
from gradengine.exchange.tls import Certificates, hashes_of
from gradengine.exchange.wire import Hello
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
PAGE = Path(__file__).parent.parent / "docs/specs/faults.md"
THREADS = "threads"
LINKS = [THREADS, "unix", "tcp", TLS, SHARED_MEMORY, SERVED]
KINDS = {"unix": "unix", SHARED_MEMORY: "shared_memory"}  # as `connect` takes them; tcp for all others
FAULTS = {}


def fault(what):
    """Register what makes a fault happen over a link, and returns how that ended: a word of the page."""
    return lambda function: FAULTS.setdefault(what, function)


class Threads:
    """A group over no network at all."""

    def __init__(self, world_size, clocks):
        self.exchanges = [
            Exchange(link, bucket_bytes=4, timeout=SOON, join_timeout=SOON, clock=clocks.get(link.rank, lambda: 0.0))
            for link in thread_links(world_size)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for exchange in self.exchanges:
            exchange.close()


def group(link, world_size=3, ways=None, clocks=None):
    if link == THREADS:
        return Threads(world_size, clocks or {})
    return Faulty(link, world_size, ways or (Way(), Way()), clocks)


def again(link, workers):
    return run_again(workers, functools.partial(group, link))


def refuse_unnamed(found):
    """Every rank has an error of ours that names another."""
    assert all(isinstance(each, ExchangeError) for each in found), found
    assert all(re.search(r"(rank \d|the server)", str(each)) for each in found), found


# ---- what networks do ----

TO, FROM = 0, 1  # rank 1: the two ways
FIRST, MIDDLE, LAST = "first message", "middle", "last byte"


@functools.cache
def moments(link):
    """Each way, moment, and how many bytes have gone before it; TLS hides where messages begin."""
    if link == TLS:
        joined, summed = (traffic_of(TLS, work=work) for work in (lambda _: None, Worker.sum))
        return [(way, MIDDLE, (joined[way][0] + summed[way][0]) // 2) for way in (TO, FROM)]
    found = []
    for way, (_, messages) in enumerate(traffic_of(link)):
        first, *rest = [HEAD.size + size for _, size in messages]
        found += [(way, FIRST, first // 2), (way, MIDDLE, first + sum(rest) // 2), (way, LAST, first + sum(rest) - 1)]
    return found


def in_one_way(way, fault):
    return (fault, Way()) if way == TO else (Way(), fault)


def broken(link, fault, way=TO):
    """How a step ends to whose bytes something happens, and what each rank was told, and the server."""
    workers = new_workers(link)
    with group(link, ways=in_one_way(way, fault)) as faulty:
        found = run(workers, faulty.exchanges)
    found += [faulty.failure] if link == SERVED else []
    refuse_unnamed(found)
    return again(link, workers), found


def one_of(ends):
    """How they all end: both ways, if sums were made at some of the moments."""
    return " or ".join(sorted(ends, reverse=True))


@fault("slice")
def sliced(link):
    workers = new_workers(link)
    with group(link, ways=(Slices(1), Slices(2))) as faulty:
        assert run(workers, faulty.exchanges) == [None] * 3
        assert all(worker.arena.tobytes() == SUMS[3] for worker in workers)
        if link != TLS:
            on_all(lambda worker: worker.next_step(worker.arena), workers)
            on_all(Worker.sum, workers)
            assert len({worker.arena.tobytes() for worker in workers}) == 1
    return "same bytes"


@fault("truncate")
def truncated(link):
    return one_of({broken(link, Cut(after), way)[0] for way, _, after in moments(link)})


@fault("reset")
def reset(link):
    ends = set()
    for way, _, after in moments(link):
        end, found = broken(link, Reset(after), way)
        ends.add(end)
        assert {*map(type, found)} == {PeerLost}, found
        names = "(the server|rank 1)" if link == SERVED else "(rank 0|rank 1)"
        told = rf"{names} (is gone|has closed its link)|rank 2 has closed its link: this rank \([01]\) was lost"
        # Rank 2 is told first and leaves; whom it had lost is not read behind a message that nobody receives yet.
        told += "" if link == SERVED else r"|rank 2 is gone: (the connection with it is lost|its connection has ended)"
        assert any(re.match(names, str(fault)) for fault in found), found
        assert all(re.match(told, str(fault)) for fault in found), found
    return one_of(ends)


@fault("corrupt")
def corrupted(link):
    """More bits of more messages: test_exchange_faults.py."""
    if link == TLS:
        (_, _, middle), _ = moments(link)
        return broken(link, Flipped(middle))[0]
    sizes = [size for _, size in traffic_of(link)[TO][1]]
    number = next(n for n, size in enumerate(sizes) if n > len(sizes) // 2 and size)
    return broken(link, Flip(number, is_in_head=False, place=0.5))[0]


@fault("hole")
def swallowed(link):
    return one_of({swallowed_at(link, *each) for each in moments(link)})


def swallowed_at(link, way, moment, after):
    hole = Hole(after)
    waits, late = (3, 1) if link == SERVED else (1, 0) if way == TO else (0, 1)

    def clock(now=[0.0]):  # noqa: B006  (it goes on from look to look)
        # A rank that has joined may be in the hole while this one has not read yet that it has.
        if hole.has_begun and (moment == FIRST or faulty.has_joined(waits)) and faulty.waits(waits, late):
            now[0] += 10 * SOON
        return now[0]

    workers = new_workers(link)
    with group(link, ways=in_one_way(way, hole), clocks={waits: clock}) as faulty:
        found = run(workers, faulty.exchanges)
    found += [faulty.failure] if link == SERVED else []
    refuse_unnamed(found)
    assert isinstance(found[waits], DeadlineExceeded), found
    assert f"rank {late} is late" in str(found[waits]), found
    assert all(isinstance(fault, PeerLost) for n, fault in enumerate(found) if n != waits), found
    if link != TLS:
        said = f"has closed its link: this rank ({late}) was lost or late"
        if link == SERVED and way == TO:
            said = "the server is gone: its connection has ended"  # what it says vanishes too
        assert said in str(found[late]), found
    return again(link, workers)


@pytest.mark.parametrize("link", LINKS)
def test_a_step_that_is_lost_after_any_number_of_transfers_is_made_again_or_discarded(link):
    if link == SHARED_MEMORY and not HAS_SHARED_MEMORY:
        pytest.skip("no memfd on this platform")
    ends, found = [], None
    while found != [None] * 3:
        workers = new_workers(link)
        with group(link) as failing:
            exchange = failing.exchanges[1]
            exchange._link = Failing(exchange._link, len(ends))
            found = run(workers, failing.exchanges)
        ends.append(again(link, workers))
    assert ends[0] == "made again"
    assert ends[-1] == "discarded"


# ---- what becomes of processes ----


@fault("kill")
def killed(link, folder):
    return killed_and_replaced(KINDS.get(link, "worker" if link == SERVED else "tcp"), folder)


@fault("stop")
def stopped(link):
    """Rank 2 stands still, and goes on when all others have given it up."""
    waits, have_failed = (3 if link == SERVED else 0), threading.Event()

    def is_waited_for():
        with contextlib.suppress(RuntimeError, AttributeError, TypeError, NameError):  # it begins, or goes on just now
            waiting = stopping.hub if link == SERVED else stopping.exchanges[0]
            return waiting._all_reduce.awaited[0] == 2
        return False

    def clock(now=[0.0]):  # noqa: B006
        now[0] += 10 * SOON if is_waited_for() else 0.0
        return now[0]

    def work(worker):
        if worker.exchange.rank == 2:
            assert have_failed.wait(SOON)
        try:
            whole_step(worker)
        finally:
            have_failed.set()

    workers = new_workers(link)
    with group(link, clocks={waits: clock}) as stopping:
        found = run(workers, stopping.exchanges, work)
    refuse_unnamed(found)
    first = stopping.failure if link == SERVED else found[0]
    assert isinstance(first, DeadlineExceeded), found
    assert "rank 2 is late" in str(first), found
    return again(link, workers)


@fault("other layout")
def other_layout(link):
    workers = new_workers(link)
    workers[1].layout = other = GradientLayout.of({"layers.0.w": (7, 5), "other": (3,)})
    workers[1].arena = shared(workers[1].arena[: other.arena_size])
    with group(link) as differing:
        found = run(workers, differing.exchanges)
    assert {*map(type, found)} == {HandshakeRefused}, found
    assert all("layouts differ between rank 1 (here) and rank 0 (there)" in str(each) for each in found), found
    return "refused by all"


@fault("fork")
def forked(link, folder):
    from hostile.test_forked_child import SCRIPT

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if link == TLS:
        environment["GRADENGINE_TLS"] = str(certificates.folders() / "run")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, link, "exit", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.stdout == "done\n", done.stderr
    return "child refused"


# ---- who comes to the address ----


class Joining:
    """A rank that joins in a thread."""

    def __init__(self, make):
        self._found, self._make = [], make
        self._thread = threading.Thread(target=lambda: self._found.extend(outcomes(lambda _: make(), [None])))
        self._thread.start()

    def link(self):
        self._thread.join(SOON)
        (found,) = self._found
        if isinstance(found, ExchangeError):
            raise found
        return found

    def error(self):
        with pytest.raises(ExchangeError) as told:
            self.link()
        return told.type, str(told.value)


class Place:
    """An address where two ranks join over a link, each in a thread."""

    def __init__(self, link, folder, clock=lambda: 0.0):
        self.link, self.clock, self.is_served = link, clock, link == SERVED
        self.called = 2 if self.is_served else 0
        self.tls = Certificates(certificates.folders() / "run") if link == TLS else None
        at = ("127.0.0.1", 0) if link in {"tcp", TLS, SERVED} else str(folder / "s")
        self.server = Served(2, secret=SECRET, job="run 1", clock=clock, join_timeout=SOON) if self.is_served else None
        self.listener = self.server.listener if self.server else Listener(at, SECRET)
        self.first = None if self.is_served else self.rank(0)

    def rank(self, rank, **options):
        if self.is_served:
            return Joining(lambda: self.server.meeting(rank, **options).link(SOON))
        at = self.listener if rank == 0 else self.listener.address
        options = {"secret": SECRET, "job": "run 1", "timeout": SOON, "tls": self.tls, "clock": self.clock} | options
        return Joining(lambda: mesh(at, rank, 2, link=KINDS.get(self.link, "tcp"), **options))

    def knock(self):
        connection = connect_once(self.listener.address, SOON)
        return Channel(connection if self.tls is None else self.tls.encrypted(connection, is_called=False), "there")

    def form(self):
        """The right ranks join."""
        ranks = [self.rank(0) if self.is_served else self.first, self.rank(1)]
        for link in [rank.link() for rank in ranks]:
            link.close()

    def close(self):
        (self.server or self.listener).close()


def place(*arguments):
    return contextlib.closing(Place(*arguments))


def refused(link, folder, words, **options):
    with place(link, folder) as here:
        kind, told = here.rank(1, **options).error()
        assert kind is HandshakeRefused
        assert words in told
        here.form()
    return "refused"


@fault("wrong secret")
def wrong_secret(link, folder):
    return refused(link, folder, "rank 1 has a different secret", secret="another secret of all ranks")


@fault("two jobs")
def two_jobs(link, folder):
    words = "rank 1 belongs to a different job: got job='run 2', expected job='run 1'"
    return refused(link, folder, words, job="run 2")


@fault("replay")
def replayed(link, folder):
    """Of a rank that was let in; all that it said, to those that let it in."""
    with place(link, folder) as here:
        said = Hello(1, 2, "run 1", new_nonce())
        with contextlib.closing(here.knock()) as rank:
            rank.send("hello", *said)
            (nonce,) = rank.expect("nonce")
            proved = proof(SECRET, "caller", said, nonce, here.called, b"", hashes_of(rank._socket))
            rank.send("proof", proved)
            rank.expect("proof")
        once_more = here.knock()
        once_more.send("hello", *said)
        once_more.expect("nonce")
        once_more.send("proof", proved)
        assert "rank 1 has a different secret" in refusal_of(once_more)
        here.form()
    return "refused"


@fault("oversized claim")
def oversized(link, folder):
    with place(link, folder) as here:
        for kind in ("hello", "abort"):
            stranger = here.knock()
            stranger._socket.sendall(claim(kind, 2**32 - 1))
            told = refusal_of(stranger)
            assert "too long" in told or "sent a wrong message" in told
        here.form()
    return "refused"


@fault("late joiner")
def late(link, folder):
    """Rank 1 is not there at the deadline; who waits is told, and all may come again."""
    clock = Clock()
    with place(link, folder, clock) as here:
        if here.is_served:  # whose deadline begins with the first rank
            first = call(here.listener.address, 0, 2, job="run 1", called=2)
        clock.jump(here.listener.address)
        kind, told = told_by(first) if here.is_served else here.first.error()
        assert kind is PeerLost
        assert "rank 1 did not join" in told
    with place(link, folder) as here:
        here.form()
    return "named"


# ---- the table ----

NOT_OVER_THREADS = {"slice", "truncate", "reset", "corrupt", "hole", "kill"}
NOT_OVER_THREADS |= {"wrong secret", "two jobs", "replay", "oversized claim", "late joiner"}
SLOW = [("kill", "unix"), ("kill", TLS), ("kill", SHARED_MEMORY), ("fork", "unix"), ("fork", TLS)]  # as over tcp


def table():
    """The cells of the page: by fault and link."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if "|" in line]
    (_, *links), _, *rows = rows
    return {(what, link): cell for what, *cells in rows for link, cell in zip(links, cells, strict=True)}


CELLS = table()


def test_the_table_has_every_fault_and_link_and_the_page_says_what_each_word_means():
    assert [*dict.fromkeys(what for what, _ in CELLS)] == [*FAULTS]
    assert [*dict.fromkeys(link for _, link in CELLS)] == LINKS
    words = {word for cell in CELLS.values() for word in re.split(" or |, ", cell)}
    assert [word for word in words if f"- **{word}**" not in PAGE.read_text()] == []


@pytest.mark.parametrize(
    ("what", "link"), [pytest.param(*each, marks=pytest.mark.slow if each in SLOW else ()) for each in CELLS]
)
def test_a_cell(what, link, tmp_path, monkeypatch):
    if link == SHARED_MEMORY and not HAS_SHARED_MEMORY:
        pytest.skip("no memfd on this platform")
    if what == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork on this platform")
    expected = CELLS[what, link]
    if link == THREADS and what in NOT_OVER_THREADS:
        assert expected == "-"
        return
    if link == TLS:
        monkeypatch.setenv("GRADENGINE_TLS", str(certificates.folders() / "run"))
    takes_folder = "folder" in inspect.signature(FAULTS[what]).parameters
    found = FAULTS[what](link, tmp_path) if takes_folder else FAULTS[what](link)
    assert found in {expected, *expected.split(" or ")}
