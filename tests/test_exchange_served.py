"""A served group over real sockets: its server sums for all, names who is late or gone, and keeps no model."""

from __future__ import annotations

import contextlib
import threading

import msgpack
import numpy as np
import pytest
import strategies as draw
from channel import TOKEN, knock
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchange_mesh import RUBBISH, call, told_by
from transports import (
    LARGE,
    SMALL,
    SOON,
    SlowArena,
    Worker,
    bound,
    contributions,
    leave_together,
    on_all,
    outcomes,
    rank_order_sum,
)

from gradengine.errors import DeadlineExceeded, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange.comparison import Hello, packed
from gradengine.exchange.hub import Hub
from gradengine.exchange.linked import Exchange
from gradengine.exchange.links.sockets import head
from gradengine.exchange.listener import Listener
from gradengine.exchange.mesh import Meeting, link_to_ranks
from gradengine.exchange.pump import Pump
from gradengine.kernels import CHUNK
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
BUCKET = 128
WORLD = 3


class Served:
    """A server in a thread, for one group."""

    def __init__(self, world_size, address=("127.0.0.1", 0), *, token=None, job="", clock=None, **options):
        self.world_size, self._token, self._job = world_size, token, job
        self._options = {"timeout": SOON, "bucket_bytes": BUCKET, "most_bytes": 1 << 40} | options
        self._clock = {} if clock is None else {"clock": clock}
        self._join_timeout = self._options.pop("join_timeout", SOON)
        self._gives_up = self._options.pop("gives_up", lambda _: False)
        self.listener = Listener(address, token)
        self.link, self.hub, self.failure, self._is_closing = None, None, None, False
        self.is_serving = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.link = link_to_ranks(
                self.listener, self.world_size, token=self._token, job=self._job, timeout=self._join_timeout,
                is_closing=self.is_closing, gives_up=self._gives_up, **self._clock,
            )  # fmt: skip
            self.hub = Hub(self.link, **self._options, **self._clock)
            self.is_serving.set()
            self.hub.serve(self.is_closing)
        except BaseException as fault:
            self.failure = fault

    def is_closing(self):
        return self._is_closing

    def exchange(self, rank, world_size=None, **options):
        options = {"timeout": SOON, "join_timeout": SOON} | options
        meeting = self.meeting(rank, world_size)
        return Exchange(meeting, **options)

    def meeting(self, rank, world_size=None, job=None, **options):
        options = {"token": self._token, "job": self._job or "" if job is None else job} | options
        return Meeting(self.listener.address, rank, world_size or self.world_size, is_served=True, **options)

    def exchanges(self, **options):
        return [self.exchange(rank, **options) for rank in range(self.world_size)]

    def end(self):
        """What the server's group ended with."""
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "hangs"
        return self.failure

    def close(self):
        self._is_closing = True
        self._thread.join(SOON)
        self.listener.close()


@contextlib.contextmanager
def served(world_size=WORLD, *arguments, **options):
    server = Served(world_size, *arguments, **options)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def working(layout=SMALL, world_size=WORLD, data=None, **options):
    """A server and its bound workers."""
    with served(world_size, **options) as server:
        workers = bound(server.exchanges(), layout, contributions(layout, world_size) if data is None else data)
        try:
            yield server, workers
        finally:
            for worker in workers:
                worker.exchange.close()


# ---- sums ----


@pytest.mark.parametrize("is_unix", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [4, BUCKET, 1 << 21])
def test_every_rank_gets_the_sum_in_rank_order_step_by_step(world_size, bucket_bytes, is_unix, tmp_path):
    address = str(tmp_path / "s") if is_unix else ("127.0.0.1", 0)
    steps = [contributions(LARGE, world_size, seed) for seed in range(3)]
    with served(world_size, address, bucket_bytes=bucket_bytes) as server:
        workers = bound(server.exchanges(), LARGE, steps[0])
        for n, arenas in enumerate(steps):
            if n:
                on_all(lambda worker, arenas=arenas: worker.next_step(arenas[worker.exchange.rank]), workers)
            assert on_all(Worker.sum, workers) == [()] * world_size
            assert {worker.arena.tobytes() for worker in workers} == {rank_order_sum(arenas).tobytes()}
            assert len({worker.progress.squares.tobytes() for worker in workers}) == 1
        on_all(leave_together, workers)
        assert server.end() is None


@given(draw.uneven_layouts(CHUNK), st.integers(1, 4), st.sampled_from([4, 200, 1000, 1 << 22]), st.data())
@settings(max_examples=25)
def test_any_layout_is_summed_in_rank_order_whatever_the_order_of_arrival(layout, world_size, bucket_bytes, data):
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
        assert not layout.spans or worker.exchange.wait() == ()

    with working(layout, world_size, arenas, bucket_bytes=bucket_bytes) as (server, workers):
        on_all(work, workers)
        assert {worker.arena.tobytes() for worker in workers} == {rank_order_sum(arenas).tobytes()}
        on_all(leave_together, workers)
        assert server.end() is None


def test_what_is_not_finite_is_found_by_rank():
    data = contributions(SMALL, WORLD)
    places = [SMALL.slots[-1].offset + 3, SMALL.slots[0].offset]
    data[2][places[0]], data[1][places[1]] = np.inf, np.nan
    with working(data=data) as (_, workers):
        for found in on_all(Worker.sum, workers):
            assert [(bad.rank, bad.index) for bad in found] == [(1, places[1]), (2, places[0])]


def test_a_devices_arena_goes_through_rows():
    data = contributions(LARGE, 2)
    with served(2, bucket_bytes=4096) as server:
        workers = bound(server.exchanges(), LARGE, data)
        for worker in workers:
            worker.exchange.close()
    with served(2, bucket_bytes=4096) as server:
        workers = [Worker(exchange, LARGE, part) for exchange, part in zip(server.exchanges(), data, strict=True)]
        memory = [worker.arena for worker in workers]
        for worker in workers:
            worker.arena = SlowArena(worker.arena)
        on_all(Worker.bind, workers)
        on_all(Worker.sum, workers)
        assert [arena.tobytes() for arena in memory] == [rank_order_sum(data).tobytes()] * 2
        on_all(leave_together, workers)


def test_what_ranks_gather_goes_through_the_server_also_while_spans_travel():
    with working() as (_, workers):
        for worker in workers[1:]:
            worker.exchange.start(SMALL.spans[0])
        told = on_all(lambda worker: worker.exchange.gather(bytes([worker.exchange.rank]) * 10_000), workers)
        assert told == [[bytes([rank]) * 10_000 for rank in range(WORLD)]] * WORLD


def test_a_layout_without_elements():
    layout = GradientLayout.of({"nothing": (0,)})
    with working(layout) as (server, workers):
        for worker in workers:
            worker.exchange.start(layout.spans[0])
        assert on_all(lambda worker: worker.exchange.wait(), workers) == [()] * WORLD
        on_all(leave_together, workers)
        assert server.end() is None


def test_a_servers_memory_is_that_of_the_shares_in_flight():
    layout = GradientLayout.of({f"layers.{n}.w": (1 << 18,) for n in range(64)})  # 64 MiB
    with working(layout, 2, [np.zeros(layout.arena_size, np.float32)] * 2, bucket_bytes=1 << 20) as (server, workers):
        on_all(Worker.sum, workers)
        on_all(leave_together, workers)
        assert server.end() is None
        sums = server.hub._all_reduce
        parts = [*sums._free, *(incoming.memory for incoming in sums._open.values())]
        rows = [*sums._free_rows[1], *sums._rows.values()]
        assert 1 << 24 < sum(memory.nbytes for memory in parts + rows) <= 3 * (8 << 20)  # two ranks' parts, and sums


# ---- who comes ----


def test_strangers_do_no_harm_and_delay_nobody():
    with served(token=TOKEN) as server, contextlib.ExitStack() as stack:
        for says in RUBBISH:
            stranger = stack.enter_context(contextlib.closing(knock(server.listener.address)))
            with contextlib.suppress(PeerLost):
                stranger._socket.sendall(says)
        workers = bound(server.exchanges(), SMALL, contributions(SMALL, WORLD))
        on_all(Worker.sum, workers)
        on_all(leave_together, workers)
        assert server.end() is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"token": "a secret of others"},
            "the server refuses: rank 1 has another token; start all with the same token=",
        ),
        ({"job": "run 2"}, "the server refuses: rank 1 belongs to another job: got job='run 2', expected job='run 1'"),
    ],
)
def test_who_does_not_belong_is_refused_and_the_group_goes_on(options, says):
    with served(token=TOKEN, job="run 1") as server:
        stray = server.meeting(1, **options)
        with pytest.raises(HandshakeRefused, match=says):
            stray.link(SOON)
        on_all(leave_together, bound(server.exchanges(), SMALL, contributions(SMALL, WORLD)))


def test_a_server_without_a_job_serves_its_first_ranks_and_that_of_the_next_where_it_left():
    with served(2, job=None) as server:
        call(server.listener.address, 0, 2, token=None, job="run 1", called=2).close()
        first = call(server.listener.address, 1, 2, token=None, job="run 2", called=2)
        with pytest.raises(HandshakeRefused, match="got job='run 3', expected job='run 2'"):
            server.meeting(0, job="run 3").link(SOON)
        first.close()


def test_a_rank_that_is_taken_is_refused():
    refused = pytest.raises(HandshakeRefused, match="rank 1 has joined already; give each process its own rank")
    with served(2) as server, contextlib.closing(call(server.listener.address, 1, 2, token=None, called=2)), refused:
        server.meeting(1).link(SOON)


def test_another_world_size_ends_the_group_for_all():
    with served(2) as server:
        first = call(server.listener.address, 0, 2, token=None, called=2)
        with pytest.raises(HandshakeRefused, match="rank 1 was started for another world size: got 3, expected 2"):
            server.meeting(1, 3).link(SOON)
        kind, why = told_by(first)
        assert kind is HandshakeRefused
        assert "rank 1 was started for another world size" in why
        assert "rank 1 was started for another world size" in str(server.end())


def test_ranks_with_and_without_a_server_are_told_so():
    refused = pytest.raises(HandshakeRefused, match="rank 1 looks for rank 0 here; pass served=True on all ranks")
    with served(2) as server, refused:
        Meeting(server.listener.address, 1, 2).link(SOON)
    first = Meeting(("127.0.0.1", 0), 0, 2)
    joining = threading.Thread(target=lambda: first.link(SOON).close(), daemon=True)
    joining.start()
    with pytest.raises(HandshakeRefused, match="rank 1 looks for a server here; pass served=True on all ranks"):
        Meeting(first._listener.address, 1, 2, is_served=True).link(SOON)
    Meeting(first._listener.address, 1, 2).link(SOON).close()
    joining.join(SOON)


def test_ranks_that_never_come_are_named_to_all_that_did():
    now = [0.0]
    with served(clock=lambda: now[0], join_timeout=60) as server:
        now[0] = 1e9  # nobody has come: there is no hurry
        first = call(server.listener.address, 1, WORLD, token=None, called=WORLD)
        now[0] = 2e9
        kind, why = told_by(first)
        assert kind is PeerLost
        assert "the server waits for ranks that have not joined: 0, 2: got 60 s; start all ranks" in why
        assert str(server.end()).startswith("the server waits for ranks that have not joined: 0, 2")


def test_a_server_that_is_waited_for_gives_up_where_nobody_comes_or_stays():
    """Its time begins again where the last rank that was there is gone."""
    now, asked = [0.0], []

    def gives_up(since):
        asked.append(since)
        return now[0] - since > 60

    with served(2, clock=lambda: now[0], gives_up=gives_up, join_timeout=60) as server:
        channel = call(server.listener.address, 1, 2, token=None, called=2)
        now[0] = 50.0
        channel.close()
        while 50.0 not in asked:
            threading.Event().wait(0.001)
        now[0] = 100.0
        call(server.listener.address, 1, 2, token=None, called=2).close()
        while 100.0 not in asked:
            threading.Event().wait(0.001)
        now[0] = 161.0
        assert str(server.end()) == "the server waits for ranks that have not joined: 0, 1: got 60 s; start all ranks"


def test_a_server_to_which_nobody_comes_says_who_was_refused():
    now = [0.0]
    with served(2, token=TOKEN, clock=lambda: now[0], gives_up=lambda _: now[0] > 60, join_timeout=60) as server:
        with pytest.raises(HandshakeRefused, match="another token"):
            server.meeting(1, token="a secret of others").link(SOON)
        now[0] = 61.0
        refused = "(last refused here: rank 1 has another token; start all with the same token=)"
        assert str(server.end()).endswith(f"have not joined: 0, 1: got 60 s; start all ranks {refused}")


def test_a_rank_whose_server_is_not_there_says_so():
    meeting = Meeting(("127.0.0.1", 1), 1, 2, is_served=True)
    with pytest.raises(
        PeerLost, match=r"rank 1 has not reached the server at 127.0.0.1:1 .*; start the server and all"
    ):
        meeting.link(0.01)


def test_a_server_that_closes_tells_who_waits_for_the_others():
    server = Served(2)
    first = call(server.listener.address, 1, 2, token=None, called=2)
    server.close()
    assert told_by(first) == (PeerLost, "the server was closed; reconnect on all ranks")


# ---- what must be alike ----


def all_refused(server, workers, says):
    found = outcomes(Worker.bind, workers)
    assert all(isinstance(error, HandshakeRefused) and says in str(error) for error in found), found
    assert says in str(server.end())


def test_layouts_that_differ_are_shown_on_every_rank():
    other = GradientLayout.of({"layers.0.w": (7, 6)})
    with served() as server:
        workers = [
            Worker(
                exchange,
                other if exchange.rank == 1 else SMALL,
                contributions(other, 1)[0] if exchange.rank == 1 else contributions(SMALL, 1)[0],
            )
            for exchange in server.exchanges()
        ]
        all_refused(
            server, workers, "layouts differ between rank 1 (here) and rank 0 (there):\nrow 0: here 'layers.0.w' (7, 6)"
        )


def test_another_step_is_refused():
    with served() as server:
        workers = [Worker(exchange, SMALL, contributions(SMALL, 1)[0]) for exchange in server.exchanges()]
        workers[2].progress.step = 1
        all_refused(server, workers, "rank 2 is at another step: got 1, expected 0")


def test_a_layout_larger_than_the_server_takes_is_refused():
    with served(most_bytes=SMALL.nbytes - 4) as server:
        workers = [Worker(exchange, SMALL, contributions(SMALL, 1)[0]) for exchange in server.exchanges()]
        found = outcomes(Worker.bind, workers)
        assert all("the layout is larger than this server takes" in str(error) for error in found)
        assert isinstance(server.end(), PeerLost)
    with working(most_bytes=SMALL.nbytes):
        pass


def by_hand(server, rank):
    """A pump of a rank that speaks for itself."""
    return Pump(server.meeting(rank).link(SOON))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (b"", "rank 0: "),
        (b"\xc1", "rank 0: "),
        (msgpack.packb([[["w", [1 << 62] * 65, None]], ["w"]]), "rank 0: "),
        (LARGE.table(), "rank 0 sent the table of another layout"),
        (SMALL.table(), "the layout is larger than this server takes"),
    ],
)
def test_a_table_that_a_server_cannot_take_ends_the_group(table, says):
    with served(1, most_bytes=SMALL.nbytes - 4) as server:
        pump = by_hand(server, 0)
        pump.gather(packed(Hello(layout=SMALL.fingerprint)), SOON)
        pump.gather(table, SOON)
        assert says in str(server.end())
        with pytest.raises(PeerLost, match="the server is gone: it has closed its link"):
            pump.gather(b"", SOON)
        pump.close()


def test_a_hello_that_cannot_be_read_ends_the_group():
    with served(1) as server:
        pump = by_hand(server, 0)
        pump.gather(msgpack.packb([1, 7]), SOON)
        assert "rank 0 speaks another version: got 1, expected 3" in str(server.end())
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
            awaited = all_reduce.awaited if all_reduce is not None and hub._is_summing else None
            if (awaited or (hub._is_gathering and (hub._gather.awaited, "a gather"))) == late:
                return
        threading.Event().wait(0.01)
    raise AssertionError(f"never waits for {late}, but for {awaited}")


def test_a_rank_that_starts_nothing_is_named_to_all():
    clock = Clock()
    with working(clock=clock, timeout=60.0) as (server, workers):
        clock.now = 1e6  # nobody waits: no rank has begun
        for worker in (workers[0], workers[2]):
            for span in SMALL.spans:
                worker.exchange.start(span)
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


def test_a_rank_that_is_late_for_a_gather_is_named_to_all():
    clock = Clock()
    with working(clock=clock, timeout=60.0) as (server, workers):
        threads = [threading.Thread(target=outcomes, args=(lambda w: w.exchange.barrier(), workers[:2]))]
        threads[0].start()
        waits_for(server, ([2], "a gather"))
        clock.step = 86400.0
        failure = server.end()
        assert "rank 2 is late: others wait for a gather (end of step or barrier)" in str(failure)
        threads[0].join(SOON)


def test_a_rank_that_leaves_in_a_step_is_named_to_all():
    with working() as (server, workers):
        for worker in workers[:2]:
            worker.exchange.start(SMALL.spans[0])
        workers[2].exchange.close()
        for error in outcomes(lambda worker: worker.exchange.wait(), workers[:2]):
            assert isinstance(error, PeerLost)
            assert "rank 2 is gone or late: the server has closed its link for that" in str(error)
        assert "rank 2 is gone: it has closed its link" in str(server.end())


def test_a_rank_that_leaves_between_steps_is_missed_by_who_begins_the_next():
    with working() as (server, workers):
        on_all(Worker.sum, workers)
        on_all(lambda worker: worker.exchange.barrier(), workers)
        workers[2].exchange.close()
        found = outcomes(lambda worker: worker.exchange.barrier(), workers[:2])
        assert all("rank 2 is gone" in str(error) for error in found), found
        assert "rank 2 is gone: it has closed its link" in str(server.end())


def test_a_rank_that_leaves_when_all_is_done_is_not_missed():
    with working() as (server, workers):
        on_all(Worker.sum, workers)
        on_all(lambda worker: worker.exchange.barrier(), workers)
        for worker in workers:
            worker.exchange.close()
        assert server.end() is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (head(0, 0, 12), "rank 1 sent the server another size with tag 0"),
        (
            head(0, 1, 516) + bytes(516),
            "what rank 1 sent the server was damaged on the way: the part of share 0 in step 0",
        ),
        (bytes(20), "rank 1 sent the server an invalid head of a message"),
    ],
)
def test_a_rank_that_sends_what_it_should_not_is_named_to_all(data, says):
    with working(world_size=2) as (server, workers):
        connection = workers[1].exchange._link._connections[2][0].socket
        connection.send(data)
        workers[0].exchange.start(SMALL.spans[0])
        with pytest.raises(PeerLost, match="rank 1 is gone or late: the server has closed its link for that"):
            workers[0].exchange.wait()
        failure = server.end()
        assert isinstance(failure, ProtocolError)
        assert says in str(failure)


def test_a_server_that_closes_in_a_step_is_named():
    with working() as (server, workers):
        workers[0].exchange.start(SMALL.spans[0])
        server.close()
        with pytest.raises(PeerLost, match="the server is gone: it has closed its link"):
            workers[0].exchange.wait()


# ---- lost, and joined again ----


def again(workers, **options):
    with served(len(workers), **options) as server:
        for worker, exchange in zip(workers, server.exchanges(), strict=True):
            worker.exchange = exchange
        return outcomes(lambda worker: worker.bind() or worker.sum() or leave_together(worker), workers)


def test_a_step_of_which_nothing_was_summed_begins_anew():
    data = contributions(SMALL, WORLD)
    with working(data=data) as (server, workers):
        workers[0].exchange.start(SMALL.spans[0])
        workers[1].exchange.start(SMALL.spans[0])
        waits_for(server, (2, "the part of share 0"))
        workers[2].exchange.close()
        outcomes(lambda worker: worker.exchange.wait(), workers[:2])
    assert again(workers) == [None] * WORLD
    assert [worker.arena.tobytes() for worker in workers] == [rank_order_sum(data).tobytes()] * WORLD


def test_a_step_with_sums_is_refused_with_what_to_do():
    with working() as (server, workers):
        for worker in workers:
            worker.exchange.start(SMALL.spans[0])
        for worker in workers[:2]:
            for span in SMALL.spans[1:]:
                worker.exchange.start(span)
        later = next(share for share in workers[0].exchange._all_reduce._shares if share.spans > 1)
        waits_for(server, (2, f"the part of share {later.number}"))
        workers[2].exchange.close()
        outcomes(lambda worker: worker.exchange.wait(), workers[:2])
    for error in again(workers):
        assert isinstance(error, HandshakeRefused)
        assert "rank 0 has sums of step 0 that the server lost; the local contributions are gone: discard()" in str(
            error
        )
        assert "discard() the window on every rank and accumulate it again" in str(error)


def test_a_half_summed_step_is_refused_as_another_group_first():
    with working() as (_, workers):
        on_all(Worker.sum, workers)
    for error in again(workers[:2]):
        assert "step 0 is half summed and rank 0 took part in it as another: got rank 0 of 2 in group" in str(error)


@pytest.mark.parametrize("how", ["dropped", "finished"])
def test_ranks_may_come_together_anew_where_nothing_is_half_summed(how):
    data = contributions(SMALL, WORLD)
    with working() as (_, workers):
        on_all(Worker.sum, workers)
    for worker, contribution in zip(workers, data, strict=True):
        worker.arena[:] = contribution
        worker.progress.next_step() if how == "finished" else worker.progress.restart()
    others = [workers[2], workers[0]]
    assert again(others) == [None] * 2
    assert {worker.arena.tobytes() for worker in others} == {rank_order_sum([data[2], data[0]]).tobytes()}


def test_a_step_that_was_begun_over_a_server_is_not_resumed_without_one(tmp_path):
    with working(world_size=1) as (_, workers):
        on_all(Worker.sum, workers)
    workers[0].exchange = Exchange(Meeting(("127.0.0.1", 0), 0, 1))
    with pytest.raises(HandshakeRefused, match="rank 0 is in the middle of a step that was begun over another kind"):
        workers[0].bind()


def test_a_sum_that_was_half_received_counts_as_one():
    """The server dies in the middle of it: what is in the arena is neither a part nor the sum."""
    layout = GradientLayout.of({"w": (1 << 10,)})
    listener = Listener(("127.0.0.1", 0))
    server = {}

    def serve():
        server["link"] = link = link_to_ranks(listener, 1, token=None, job="", timeout=SOON, is_closing=lambda: False)
        [[connection]] = link._connections.values()
        hub = Hub(link, timeout=SOON, bucket_bytes=1 << 20, most_bytes=1 << 40)
        send = link.send

        def torn(peer, tag, memory):
            if tag != 2:  # the sum of share 0
                send(peer, tag, memory)
                return
            connection.socket.send(head(tag, 0, memory.nbytes) + bytes(100))
            raise PeerLost("the server dies")

        link.send = torn
        with contextlib.suppress(PeerLost):
            hub.serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    exchange = Exchange(Meeting(listener.address, 0, 1, is_served=True), timeout=SOON, join_timeout=SOON)
    worker = Worker(exchange, layout, np.ones(layout.arena_size, np.float32))
    worker.bind()
    with pytest.raises(PeerLost):
        worker.sum()
    thread.join(SOON)
    listener.close()
    [error] = again([worker])
    assert "rank 0 has sums of step 0 that the server lost" in str(error)


def test_an_exchange_that_is_closed_twice_leaves_the_next_one_alone():
    with working(world_size=1) as (_, workers):
        first = workers[0].exchange
        workers[0].exchange.start(SMALL.spans[0])
        first.close()
    assert again(workers) in ([None], [None])
    first.close()
