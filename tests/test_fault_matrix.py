"""The table of docs/faults.md, cell by cell: how each fault ends over each link."""

import contextlib
import hashlib
import inspect
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import certificates
import pytest
from channel import TOKEN, Channel
from faulty import SERVED, TLS, Cut, Faulty, Flip, Hole, Reset, Slices, Way
from test_exchange_faults import PARTS, SUMS
from test_exchange_mesh import Clock, Started, call, refusal_of, told_by
from test_exchange_processes import address_for, process, says, until
from test_exchange_served import Served
from test_exchange_tls import Flipped
from transports import (
    HAS_SHARED_MEMORY,
    LARGE,
    SMALL,
    SOON,
    Worker,
    contributions,
    on_all,
    outcomes,
    rank_order_sum,
    shared,
)

from gradengine.errors import DeadlineExceeded, ExchangeError, HandshakeRefused, PeerLost
from gradengine.exchange import GradientServer, WorkerClient, connect
from gradengine.exchange.addresses import connect_once
from gradengine.exchange.handshake import new_nonce, proof
from gradengine.exchange.linked import Exchange
from gradengine.exchange.links.threads import thread_links
from gradengine.exchange.listener import Listener
from gradengine.exchange.tls import Certificates, hashes_of
from gradengine.exchange.wire import Abort, Hello, Nonce, Proof, encode_head
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
PAGE = Path(__file__).parent.parent / "docs/faults.md"
THREADS, SHARED_MEMORY = "threads", "shared memory"
LINKS = [THREADS, "unix", "tcp", TLS, SHARED_MEMORY, SERVED]
KINDS = {"unix": "unix", SHARED_MEMORY: "shared_memory"}  # as `connect` takes them; tcp for all others
WORLD = 3
FAULTS = {}
FOLDERS = set()


def fault(what):
    """Register what makes a fault happen over a link, and returns how that ended: a word of the page."""

    def registered(function):
        FAULTS[what] = function
        if "folder" in inspect.signature(function).parameters:
            FOLDERS.add(what)
        return function

    return registered


# ---- groups ----


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


def group(link, world_size=WORLD, ways=None, clocks=None):
    if link == THREADS:
        return Threads(world_size, clocks or {})
    return Faulty(link, world_size, ways or (Way(), Way()), clocks)


def new_workers(link):
    parts = [shared(part) if link == SHARED_MEMORY else part for part in PARTS]
    return [Worker(None, SMALL, part) for part in parts]


def whole_step(worker):
    worker.sum()
    worker.exchange.barrier()


def run(workers, exchanges, work=whole_step):
    """What each worker's step ends with."""
    for worker, exchange in zip(workers, exchanges, strict=True):
        worker.exchange = exchange
    return outcomes(lambda worker: worker.bind() or work(worker), workers)


def run_again(link, workers):
    """How the step ends over new links: "resumed"; or else with new contributions on all ranks, "discarded"."""
    with group(link) as again:
        found = run(workers, again.exchanges)
    if found != [None] * WORLD:
        assert {*map(type, found)} == {HandshakeRefused}, found
        assert all("discard() the window on every rank" in str(each) for each in found), found
        for worker, part in zip(workers, PARTS, strict=True):
            worker.progress.restart()
            worker.arena[:] = part
        with group(link) as anew:
            assert run(workers, anew.exchanges) == [None] * WORLD
    assert all(worker.arena.tobytes() == SUMS[WORLD] for worker in workers)
    return "resumed" if found == [None] * WORLD else "discarded"


def refuse_unnamed(found):
    """Every rank has an error of ours that names another."""
    assert all(isinstance(each, ExchangeError) for each in found), found
    assert all(re.search(r"(rank \d|the server)", str(each)) for each in found), found


# ---- what networks do ----


def sent_to_rank_1(link, work):
    """The way of what goes to rank 1 in an undisturbed group, when all have done this."""
    way = Way()
    with group(link, ways=(way, Way())) as whole:
        assert not any(run(new_workers(link), whole.exchanges, work))
    return way


def half_way(link):
    """How many bytes go to rank 1 until about half of the sums are there."""
    joined, summed = (sent_to_rank_1(link, work).carried for work in (lambda _: None, Worker.sum))
    return (joined + summed) // 2


def broken(link, way):
    """How a step ends to whose bytes to rank 1 something happens."""
    workers = new_workers(link)
    with group(link, ways=(way, Way())) as faulty:
        found = run(workers, faulty.exchanges)
    refuse_unnamed(found)
    return run_again(link, workers)


@fault("slice")
def sliced(link):
    workers = new_workers(link)
    with group(link, ways=(Slices(1), Slices(2))) as faulty:
        assert run(workers, faulty.exchanges) == [None] * WORLD
    assert all(worker.arena.tobytes() == SUMS[WORLD] for worker in workers)
    return "same bytes"


@fault("truncate")
def truncated(link):
    return broken(link, Cut(half_way(link)))


@fault("reset")
def reset(link):
    return broken(link, Reset(half_way(link)))


@fault("corrupt")
def corrupted(link):
    if link == TLS:
        return broken(link, Flipped(half_way(link)))
    sizes = [size for _, size in sent_to_rank_1(link, whole_step).messages]
    number = next(n for n, size in enumerate(sizes) if n > len(sizes) // 2 and size)
    return broken(link, Flip(number, is_in_head=False, place=0.5))


@fault("hole")
def swallowed(link):
    hole = Hole(half_way(link))
    waits, late = (WORLD, 1) if link == SERVED else (1, 0)

    def clock(now=[0.0]):  # noqa: B006  (it goes on from look to look)
        if hole.has_begun and faulty.has_joined(waits) and faulty.waits(waits, late):
            now[0] += 10 * SOON
        return now[0]

    workers = new_workers(link)
    with group(link, ways=(hole, Way()), clocks={waits: clock}) as faulty:
        found = run(workers, faulty.exchanges)
    found += [faulty.failure] if link == SERVED else []
    refuse_unnamed(found)
    assert isinstance(found[waits], DeadlineExceeded), found
    assert f"rank {late} is late" in str(found[waits]), found
    return run_again(link, workers)


# ---- what becomes of processes ----


@contextlib.contextmanager
def with_a_process(link, folder, spans):
    """The exchanges of ranks 0 and 1, and a process that is rank 2 and starts some spans."""
    with contextlib.ExitStack() as stack:
        kind, options = KINDS.get(link, "tcp"), {"timeout": SOON, "join_timeout": SOON}
        if link == SERVED:
            server = stack.enter_context(GradientServer(WORLD, bucket_bytes=1000))
            kind, address = "worker", "{}:{}".format(*server.address)
            exchanges = [WorkerClient(server.address, rank, WORLD, **options) for rank in range(2)]
        else:
            address = address_for(kind, folder)
            exchanges = [connect(address, rank, WORLD, link=kind, bucket_bytes=4, **options) for rank in range(2)]
        for exchange in exchanges:
            stack.callback(exchange.close)
        yield exchanges, stack.enter_context(process(kind, address, 2, spans))


@fault("kill")
def killed(link, folder):
    """And another process comes in its place, with the others' windows dropped."""
    parts = contributions(LARGE, WORLD)
    workers = [Worker(None, LARGE, shared(part) if link == SHARED_MEMORY else part) for part in parts[:2]]

    def kill():
        until(lambda: all(worker.exchange._all_reduce.may_hold_sums for worker in workers))
        running.kill()

    with with_a_process(link, folder, len(LARGE.spans) - 1) as (exchanges, running):
        on_all(lambda rank: workers[rank].bind(exchanges[rank]), range(2))
        killer = threading.Thread(target=kill)
        killer.start()
        found = outcomes(Worker.sum, workers)
        killer.join(SOON)
    assert {*map(type, found)} == {PeerLost}, found
    assert all(str(each).startswith("rank 2 is gone") for each in found), found
    for worker, part in zip(workers, parts, strict=False):
        worker.progress.restart()
        worker.arena[:] = part
    with with_a_process(link, folder, len(LARGE.spans)) as (exchanges, running):
        on_all(lambda rank: workers[rank].bind(exchanges[rank]), range(2))
        on_all(lambda worker: worker.sum() or worker.exchange.barrier(), workers)
        whole = rank_order_sum(parts)
        assert all(worker.arena.tobytes() == whole.tobytes() for worker in workers)
        for line in ("started", hashlib.sha256(whole).hexdigest()):
            says(running, line)
    return "replaced"


@fault("stop")
def stopped(link):
    """Rank 2 stands still, and goes on when all others have given it up."""
    waits, have_failed = (WORLD if link == SERVED else 0), threading.Event()

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
    return run_again(link, workers)


def again_as(link, workers, ranks):
    """What workers that have summed the whole step end with where they come again as these ranks."""
    with group(link) as whole:
        assert run(workers, whole.exchanges) == [None] * WORLD
    with group(link, len(ranks)) as other:
        found = run([workers[rank] for rank in ranks], other.exchanges)
    assert {*map(type, found)} == {HandshakeRefused}, found
    return [str(each) for each in found]


@fault("smaller group")
def smaller(link):
    workers = new_workers(link)
    told = again_as(link, workers, [0, 1])
    assert all("half summed" in each or "that the server lost" in each for each in told), told
    return f"refused by all, {run_again(link, workers)}"


@fault("swapped ranks")
def swapped(link):
    workers = new_workers(link)
    told = again_as(link, workers, [1, 0, 2])
    assert all("took part in it as another" in each or "that the server lost" in each for each in told), told
    return f"refused by all, {run_again(link, workers)}"


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


class Place:
    """An address where ranks join over a link, each in a thread."""

    def __init__(self, link, folder, clock):
        self.link, self.clock, self.is_served = link, clock, link == SERVED
        self.called = 2 if self.is_served else 0
        self.tls = Certificates(certificates.folders() / "run") if link == TLS else None
        at = ("127.0.0.1", 0) if link in {"tcp", TLS, SERVED} else str(folder / "s")
        self.kind = KINDS.get(link, "tcp")
        self.server = Served(2, token=TOKEN, job="run 1", clock=clock, join_timeout=SOON) if self.is_served else None
        self.listener = self.server.listener if self.server else Listener(at, TOKEN)
        self.first = None if self.is_served else self.rank(0)

    def rank(self, rank, **options):
        if self.is_served:
            return ServedRank(self.server, rank, options)
        at = self.listener if rank == 0 else self.listener.address
        return Started(at, rank, 2, clock=self.clock, tls=self.tls, link=self.kind, **{"job": "run 1"} | options)

    def knock(self):
        connection = connect_once(self.listener.address, SOON)
        return Channel(connection if self.tls is None else self.tls.encrypted(connection, is_called=False), "there")

    def form(self):
        """The right ranks join."""
        ranks = [self.rank(0) if self.is_served else self.first, self.rank(1)]
        for link in [rank.link() for rank in ranks]:
            link.close()

    def close(self):
        if self.server is not None:
            self.server._is_closing = True
            self.server.end()
        self.listener.close()


class ServedRank:
    def __init__(self, server, rank, options):
        self._meeting, self._found = server.meeting(rank, **options), []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._found.append(self._meeting.link(SOON))
        except ExchangeError as fault:
            self._found.append(fault)

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


@contextlib.contextmanager
def place(link, folder, clock=lambda: 0.0):
    with contextlib.closing(Place(link, folder, clock)) as place:
        yield place


@fault("wrong token")
def wrong_token(link, folder):
    with place(link, folder) as here:
        kind, told = here.rank(1, token="another secret of all ranks").error()
        assert kind is HandshakeRefused
        assert "rank 1 has another token" in told
        here.form()
    return "refused"


@fault("two jobs")
def two_jobs(link, folder):
    with place(link, folder) as here:
        kind, told = here.rank(1, job="run 2").error()
        assert kind is HandshakeRefused
        assert "rank 1 belongs to another job: got job='run 2', expected job='run 1'" in told
        here.form()
    return "refused"


@fault("replay")
def replayed(link, folder):
    """Of a rank that was let in; all that it said, to those that let it in."""
    with place(link, folder) as here:
        said = Hello(1, 2, "run 1", new_nonce())
        with contextlib.closing(here.knock()) as rank:
            rank.send(said)
            nonce, _ = rank.expect(Nonce)
            proved = Proof(proof(TOKEN, "caller", said, nonce.nonce, here.called, b"", hashes_of(rank._socket)))
            rank.send(proved)
            rank.expect(Proof)
        again = here.knock()
        again.send(said)
        again.expect(Nonce)
        again.send(proved)
        assert "rank 1 has another token" in refusal_of(again)
        here.form()
    return "refused"


@fault("oversized claim")
def oversized(link, folder):
    with place(link, folder) as here:
        for message in (Hello(1, 2, "run 1", bytes(32)), Abort("")):
            stranger = here.knock()
            stranger._socket.sendall(encode_head(message, 2**32 - 1))
            told = refusal_of(stranger)
            assert "payload of 'hello' is too long" in told or "sent another message" in told
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
        assert "ranks that have not joined: 1" in told
    with place(link, folder) as here:
        here.form()
    return "named"


# ---- the table ----

OVER_NETWORKS = {"slice", "truncate", "reset", "corrupt", "hole", "kill"}
AT_AN_ADDRESS = {"wrong token", "two jobs", "replay", "oversized claim", "late joiner"}


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


@pytest.mark.parametrize(("what", "link"), CELLS)
def test_a_cell(what, link, tmp_path, monkeypatch):
    if link == SHARED_MEMORY and not HAS_SHARED_MEMORY:
        pytest.skip("no memfd on this platform")
    if what == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork on this platform")
    if link == THREADS and what in OVER_NETWORKS | AT_AN_ADDRESS:
        assert CELLS[what, link] == "-"
        return
    if link == TLS:
        monkeypatch.setenv("GRADENGINE_TLS", str(certificates.folders() / "run"))
    found = FAULTS[what](link, tmp_path) if what in FOLDERS else FAULTS[what](link)
    assert found in CELLS[what, link].split(" or ")
