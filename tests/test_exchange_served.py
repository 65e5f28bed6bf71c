"""A served group over real sockets: its server sums for all, names who is late or gone, and keeps no model."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import msgpack
import pytest
import strategies as draw
from channel import SECRET
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchange_mesh import call, told_by
from transports import (
    LARGE,
    SMALL,
    SOON,
    Worker,
    bound,
    contributions,
    leave_together,
    on_all,
    outcomes,
    rank_order_sum,
)

from gradengine.errors import DeadlineExceeded, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange.addresses import Listener
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.hello import Hello, packed_hello
from gradengine.exchange.mesh import Meeting
from gradengine.exchange.pump import Pump
from gradengine.exchange.server import Hub
from gradengine.exchange.wire import head
from gradengine.kernels import CHUNK
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
BUCKET = 128
WORLD = 3


class Served:
    """A server in a thread, for one group."""

    def __init__(self, world_size=WORLD, *, secret=None, job="", clock=time.monotonic, **options):
        self.world_size, self.secret, self.job = world_size, secret, job
        self.listener = Listener(("127.0.0.1", 0), secret)
        self.hub, self.failure, self.is_closing = None, None, False
        self._thread = threading.Thread(target=self._run, args=(clock,), kwargs=options, daemon=True)
        self._thread.start()

    def _run(self, clock, join_timeout=SOON, gives_up=lambda _: False, **options):
        options = {"timeout": SOON, "bucket_bytes": BUCKET, "most_bytes": 1 << 40} | options

        def closes():
            return self.is_closing

        try:
            options_of_meeting = {"secret": self.secret, "job": self.job, "is_served": True}
            meeting = Meeting(self.listener, self.world_size, self.world_size, **options_of_meeting)
            link = meeting.link(join_timeout, clock, lambda since: closes() or gives_up(since))
            self.hub = Hub(link, clock=clock, **options)
            self.hub.serve(closes)
        except BaseException as fault:
            self.failure = fault

    def meeting(self, rank, world_size=None, **options):
        options = {"secret": self.secret, "job": self.job or ""} | options
        return Meeting(self.listener.address, rank, world_size or self.world_size, is_served=True, **options)

    def exchanges(self):
        return [Exchange(self.meeting(rank), timeout=SOON, join_timeout=SOON) for rank in range(self.world_size)]

    def end(self):
        """What the server's group ended with."""
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "hangs"
        return self.failure

    def close(self):
        self.is_closing = True
        self._thread.join(SOON)
        self.listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@contextlib.contextmanager
def working(layout=SMALL, world_size=WORLD, data=None, **options):
    """A server and its bound workers."""
    with Served(world_size, **options) as server:
        workers = bound(server.exchanges(), layout, contributions(layout, world_size) if data is None else data)
        try:
            yield server, workers
        finally:
            for worker in workers:
                worker.exchange.close()


# ---- sums ----


@given(draw.uneven_layouts(CHUNK), st.integers(1, 4), st.sampled_from([4, 200, 1000, 1 << 22]), st.data())
@settings(max_examples=20)
def test_any_layout_is_summed_in_rank_order_whatever_the_order_of_arrival(layout, world_size, bucket_bytes, data):
    """And the server ends well when all have left."""
    arenas = contributions(layout, world_size, data.draw(draw.seeds))
    orders = [data.draw(st.permutations(layout.spans)) for _ in arenas]
    has_gone = [threading.Event() for _ in arenas]
    turns = data.draw(st.permutations(range(world_size)))

    def work(worker):
        place = turns.index(worker.exchange.rank)
        if place:
            has_gone[turns[place - 1]].wait(SOON)
        for span in orders[worker.exchange.rank]:
            worker.exchange.start(span)
        has_gone[worker.exchange.rank].set()
        assert not layout.spans or worker.exchange.wait().bad == []

    with working(layout, world_size, arenas, bucket_bytes=bucket_bytes) as (server, workers):
        on_all(work, workers)
        assert {worker.arena.tobytes() for worker in workers} == {rank_order_sum(arenas).tobytes()}
        on_all(leave_together, workers)
        assert server.end() is None


# ---- who comes ----


def test_a_server_without_a_job_serves_its_first_ranks_and_that_of_the_next_where_it_left():
    with Served(2, job=None) as server:
        call(server.listener.address, 0, 2, secret=None, job="run 1", called=2).close()
        first = call(server.listener.address, 1, 2, secret=None, job="run 2", called=2)
        with pytest.raises(HandshakeRefused, match="got job='run 3', expected job='run 2'"):
            server.meeting(0, job="run 3").link(SOON)
        first.close()


def test_who_does_not_belong_is_refused_and_the_group_goes_on():
    with Served(2) as server:
        first = call(server.listener.address, 0, 2, secret=None, called=2)
        with pytest.raises(HandshakeRefused, match="rank 0 has joined already"):
            server.meeting(0).link(SOON)
        with pytest.raises(HandshakeRefused, match="rank 1 was started for a different world size: got 3, expected 2"):
            server.meeting(1, 3).link(SOON)
        first.close()


def test_ranks_with_and_without_a_server_are_told_so():
    told = "all or none with served=True"
    with Served(2) as server, pytest.raises(HandshakeRefused, match=told):
        Meeting(server.listener.address, 1, 2).link(SOON)
    first = Meeting(("127.0.0.1", 0), 0, 2)
    joining = threading.Thread(target=lambda: first.link(SOON).close(), daemon=True)
    joining.start()
    with pytest.raises(HandshakeRefused, match=told):
        Meeting(first._listener.address, 1, 2, is_served=True).link(SOON)
    Meeting(first._listener.address, 1, 2).link(SOON).close()
    joining.join(SOON)


def test_ranks_that_never_come_are_named_to_all_that_did():
    now = [0.0]
    with Served(clock=lambda: now[0], join_timeout=60) as server:
        now[0] = 1e9  # nobody has come: there is no hurry
        first = call(server.listener.address, 1, WORLD, secret=None, called=WORLD)
        now[0] = 2e9
        kind, why = told_by(first)
        assert kind is PeerLost
        assert "ranks 0, 2 did not join the server within 60 s (join_timeout); start all ranks" in why
        assert str(server.end()).startswith("ranks 0, 2 did not join the server")


def test_a_server_that_is_waited_for_gives_up_where_nobody_comes_or_stays_and_says_who_was_refused():
    """Its time begins again where the last rank that was there is gone."""
    now, asked = [0.0], []

    def gives_up(since):
        asked.append(since)
        return now[0] - since > 60

    with Served(2, secret=SECRET, clock=lambda: now[0], gives_up=gives_up, join_timeout=60) as server:
        channel = call(server.listener.address, 1, 2, called=2)
        now[0] = 50.0
        channel.close()
        while 50.0 not in asked:
            threading.Event().wait(0.001)
        now[0] = 100.0
        call(server.listener.address, 1, 2, called=2).close()
        while 100.0 not in asked:
            threading.Event().wait(0.001)
        with pytest.raises(HandshakeRefused, match="different secret"):
            server.meeting(1, secret="a secret of others").link(SOON)
        now[0] = 161.0
        told = str(server.end())
        assert told.startswith("ranks 0, 1 did not join the server within 60 s (join_timeout); start all ranks")
        assert "(last refused here: rank 1 has a different secret" in told


# ---- what must be alike ----


OTHER = GradientLayout.of({"layers.0.w": (7, 6)})


@pytest.mark.parametrize(
    ("layout", "step", "options", "says"),
    [
        (OTHER, 0, {}, "layouts differ between rank 1 (here) and rank 0 (there):\nrow 0: here 'layers.0.w' (7, 6)"),
        (SMALL, 1, {}, "rank 0 is at a different step: got 0, expected 1"),
        (SMALL, 0, {"most_bytes": SMALL.nbytes - 4}, "the layout is larger than this server takes"),
    ],
)
def test_what_differs_or_is_too_large_is_refused_to_all_and_ends_the_group(layout, step, options, says):
    with Served(2, **options) as server:
        workers = [
            Worker(exchange, each, contributions(each, 1)[0])
            for exchange, each in zip(server.exchanges(), (SMALL, layout), strict=True)
        ]
        workers[1].step = step
        found = outcomes(Worker.bind, workers)
        assert all(isinstance(error, HandshakeRefused) and says in str(error) for error in found), found
        assert isinstance(server.end(), PeerLost) if options else says in str(server.end())
    with working(world_size=2, most_bytes=SMALL.nbytes):
        pass


@pytest.mark.parametrize(
    ("hello", "table", "says"),
    [
        (msgpack.packb([1, 7]), b"", "rank 0 has a different version: got 1, expected 5"),
        (SMALL, b"", "rank 0: "),
        (SMALL, b"\xc1", "rank 0: "),
        (SMALL, msgpack.packb([[["w", [1 << 62] * 65, None]], ["w"]]), "rank 0: "),
        (SMALL, LARGE.table(), "rank 0 sent the table of a different layout"),
        (SMALL, SMALL.table(), "the layout is larger than this server takes"),
    ],
)
def test_what_a_server_cannot_read_or_take_ends_the_group(hello, table, says):
    with Served(1, most_bytes=SMALL.nbytes - 4) as server:
        pump = Pump(server.meeting(0).link(SOON))
        for told in (packed_hello(Hello(layout=hello.fingerprint)) if hello is SMALL else hello, table):
            with contextlib.suppress(PeerLost):  # it may have left already
                pump.gather(told, SOON)
        assert says in str(server.end())
        with pytest.raises(PeerLost, match="the server is gone: it has closed its link"):
            pump.gather(b"", SOON)
        pump.close()


# ---- who is late, or gone ----


class Clock:
    """Stands still until somebody is late; then a day goes by each time that it is looked at."""

    now = step = 0.0

    def __call__(self):
        self.now += self.step
        return self.now


def waits_for(server, late):
    """Return once the server waits for that, and for nothing that can still come."""
    hub, awaited = server.hub, None
    for _ in range(int(SOON * 100)):
        with contextlib.suppress(RuntimeError):  # the server goes on at this moment
            all_reduce = hub._all_reduce
            awaited = all_reduce.awaited if all_reduce is not None and hub._is_in_step else None
            if ((awaited and awaited[:2]) or (hub._is_gathering and (hub._gather.awaited, "a gather"))) == late:
                return
        threading.Event().wait(0.01)
    raise AssertionError(f"never waits for {late}, but for {awaited}")


def test_a_rank_that_starts_nothing_is_named_to_all():
    clock = Clock()
    with working(clock=clock, timeout=60.0) as (server, workers):
        clock.now = 1e6  # nobody waits: no rank has begun
        for worker in (workers[0], workers[2]):
            worker.exchange.start(*SMALL.spans)
        waits_for(server, (1, "the part of share 0"))
        clock.step = 86400.0
        found = outcomes(lambda worker: worker.exchange.wait(), [workers[0], workers[2]])
        for error in found:
            assert isinstance(error, PeerLost)
            assert "rank 1 is gone or late: the server has closed its link for that; reconnect on all ranks" in str(
                error
            )
        with pytest.raises(PeerLost, match=r"the server has closed its link: this rank \(1\) was lost or late"):
            workers[1].exchange.barrier()
        failure = server.end()
        assert isinstance(failure, DeadlineExceeded)
        assert "rank 1 is late: others wait for the part of share 0 in step 0: got nothing for 60 s" in str(failure)


def test_a_rank_that_is_late_for_a_gather_is_named_to_all(caplog, monkeypatch):
    monkeypatch.setattr("gradengine.exchange.server.LOOK_SECONDS", 0.0)
    clock = Clock()
    with working(clock=clock, timeout=60.0) as (server, workers):
        threads = [threading.Thread(target=outcomes, args=(lambda w: w.exchange.barrier(), workers[:2]))]
        threads[0].start()
        waits_for(server, ([2], "a gather"))
        clock.step = 0.5
        failure = server.end()
        said = [f"the server has waited {seconds} s for rank 2 (step 0)" for seconds in (10, 20, 40)]
        assert [each.message for each in caplog.records if each.levelno == logging.WARNING] == said
        assert "rank 2 is late: others wait for a gather (end of step or barrier)" in str(failure)
        threads[0].join(SOON)


@pytest.mark.parametrize("is_missed", [True, False])
def test_a_rank_that_leaves_between_steps_is_missed_by_who_begins_the_next_alone(is_missed):
    with working() as (server, workers):
        on_all(Worker.sum, workers)
        on_all(lambda worker: worker.exchange.barrier(), workers)
        workers[2].exchange.close()
        if is_missed:
            found = outcomes(lambda worker: worker.exchange.barrier(), workers[:2])
            assert all("rank 2 is gone" in str(error) for error in found), found
            assert "rank 2 is gone: it has closed its link" in str(server.end())
        else:
            for worker in workers[:2]:
                worker.exchange.close()
            assert server.end() is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (head(0, 1, 516) + bytes(516), "damaged on the way: the part of share 0 in step 0"),
        (bytes(20), "rank 1 sent the server an invalid head of a message"),
    ],
)
def test_a_rank_that_sends_what_it_should_not_is_named_to_all(data, says):
    with working(world_size=2) as (server, workers):
        workers[1].exchange._link._connections[2].socket.send(data)
        workers[0].exchange.start(SMALL.spans[0])
        with pytest.raises(PeerLost, match="rank 1 is gone or late: the server has closed its link for that"):
            workers[0].exchange.wait()
        failure = server.end()
        assert isinstance(failure, ProtocolError)
        assert says in str(failure)


# ---- lost, and joined again ----


def joined_again(worker, exchange):
    worker.bind(exchange)
    worker.sum()
    leave_together(worker)


def again(workers, **options):
    with Served(len(workers), **options) as server:
        return outcomes(lambda pair: joined_again(*pair), [*zip(workers, server.exchanges(), strict=True)])


def test_a_step_of_which_nothing_was_summed_is_made_again():
    data = contributions(SMALL, WORLD)
    with working(data=data) as (server, workers):
        workers[0].exchange.start(SMALL.spans[0])
        workers[1].exchange.start(SMALL.spans[0])
        waits_for(server, (2, "the part of share 0"))
        workers[2].exchange.close()
        outcomes(lambda worker: worker.exchange.wait(), workers[:2])
    assert again(workers) == [None] * WORLD
    assert [worker.arena.tobytes() for worker in workers] == [rank_order_sum(data).tobytes()] * WORLD


def test_a_step_with_sums_is_refused_to_all_until_they_discard():
    data = contributions(SMALL, WORLD)
    with working(data=data) as (server, workers):
        for worker in workers:
            worker.exchange.start(SMALL.spans[0])
        for worker in workers[:2]:
            worker.exchange.start(*SMALL.spans[1:])
        later = next(share for share in workers[0].exchange._all_reduce._shares if share.spans > 1)
        waits_for(server, (2, f"the part of share {later.number}"))
        workers[2].exchange.close()
        outcomes(lambda worker: worker.exchange.wait(), workers[:2])
    for error in again(workers):
        assert isinstance(error, HandshakeRefused)
        assert "the window of step 0 is lost: rank 0 holds sums of it" in str(error)
        assert "discard() the window on every rank" in str(error)
    for worker, part in zip(workers, data, strict=True):
        worker.begin(part, 0)
    assert again(workers) == [None] * WORLD
    assert [worker.arena.tobytes() for worker in workers] == [rank_order_sum(data).tobytes()] * WORLD


def test_an_exchange_that_is_closed_twice_leaves_the_next_one_alone():
    with working(world_size=1) as (_, workers):
        first = workers[0].exchange
        workers[0].exchange.start(SMALL.spans[0])
        first.close()
        workers[0].begin(workers[0].arena.copy(), 0)
    assert again(workers) == [None]
    first.close()
