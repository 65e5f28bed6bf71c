"""The coordinator's end: strangers do no harm, a worker that breaks the protocol is named, closing leaves nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import types

import msgpack
import numpy as np
import pytest
from interrupts import interrupted_at, places_of
from transports import (
    SMALL,
    SOON,
    Worker,
    bound,
    contributions,
    deadline_when,
    free_port,
    join_by_hand,
    knock,
    leave_together,
    on_all,
    outcomes,
    package_threads,
    rank_order_sum,
)

from gradengine.errors import CallerError, DeadlineExceeded, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange import GradientServer, LocalExchange, Progress, WorkerClient, connect
from gradengine.exchange.handshake import new_nonce, proof
from gradengine.exchange.interface import buckets_of, wire_key
from gradengine.exchange.wire import (
    Abort,
    Challenge,
    Gather,
    Gradient,
    Hello,
    Join,
    Refused,
    Sum,
    Welcome,
    encode_head,
)
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
BUCKET = 64
BUCKETS = buckets_of(SMALL, BUCKET)


@pytest.fixture
def hosted():
    """A server in rank 0's process, for three ranks, and that rank's exchange."""
    server = GradientServer(3, bucket_bytes=BUCKET, token="secret", timeout=SOON, join_timeout=SOON)
    exchange = LocalExchange(server.group, 0, on_close=server.close)
    yield server, exchange
    exchange.close()


def step_of_all(server, exchange):
    """The three ranks make a step; their arenas."""
    clients = [WorkerClient(server.address, rank, 3, token="secret", join_timeout=SOON) for rank in (1, 2)]
    workers = bound([exchange, *clients], SMALL, contributions(SMALL, 3))
    on_all(Worker.sum, workers)
    on_all(leave_together, workers)
    return [worker.arena.tobytes() for worker in workers]


EXPECTED = [rank_order_sum(contributions(SMALL, 3)).tobytes()] * 3


# ---- strangers ----


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"\x94\xa2GE",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4096),
        encode_head(Hello(1, 3, "", bytes(32)))[:-1],
        encode_head(Gather(), 2**32 - 1),
        encode_head(Hello(1, 3, "", bytes(32)), 1 << 30),
        encode_head(Join(bytes(32), 0, 0, 0, 0, b"", 0, 0)),
        encode_head(Hello(1, 3, "", b"")) + encode_head(Join(b"", 0, 0, 0, 0, b"", 0, 0)),
        encode_head(Hello(0, 1, "", bytes(32))) + encode_head(Join(bytes(32), 0, 0, 0, 0, b"", 0, 0)),
        encode_head(Hello(9, 3, "", bytes(32))) + encode_head(Join(bytes(32), 9, 9, 9, 1, b"", 9, 9)),
    ],
)
@pytest.mark.parametrize("stays", [False, True], ids=["leaves", "stays"])
def test_stranger_does_no_harm_and_delays_nobody(hosted, says, stays, monkeypatch):
    monkeypatch.setattr("gradengine.exchange.server._CLOSE_SECONDS", 0.1)  # given to refusals to arrive
    server, exchange = hosted
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stranger = stack.enter_context(socket.create_connection(server.address))
            stranger.sendall(says)
            if not stays:
                stranger.close()
        assert step_of_all(server, exchange) == EXPECTED
        assert time.monotonic() - began < SOON


def test_wrong_token_of_a_worker_is_refused_and_the_group_goes_on(hosted):
    server, exchange = hosted
    with pytest.raises(HandshakeRefused, match="the coordinator has another token; start all with the same token="):
        Worker(WorkerClient(server.address, 1, 3, token="wrong"), SMALL, contributions(SMALL, 1)[0]).bind()
    with contextlib.closing(join_by_hand(server, 1, 3, token="wrong")) as channel:
        refused, why = channel.expect(Refused)
        assert (refused, why) == (Refused(), b"rank 1 has another token; start all with the same token=")
    assert step_of_all(server, exchange) == EXPECTED


def test_replayed_and_reflected_proofs_are_refused_and_the_group_goes_on(hosted):
    server, exchange = hosted
    hello = Hello(1, 3, "", new_nonce())
    overheard = proof("secret", "worker", hello, new_nonce())  # good for another challenge
    for answer in (lambda challenge: overheard, lambda challenge: challenge.proof):
        with contextlib.closing(knock(server.address)) as channel:
            channel.send(hello)
            challenge, _ = channel.expect(Challenge)
            channel.send(Join(answer(challenge), 0, 0, 0, 0, b"", 0, 0), SMALL.table())
            assert b"rank 1 has another token" in channel.expect(Refused)[1]
    assert step_of_all(server, exchange) == EXPECTED


# ---- another job at the same address ----


def refusal_of(url, job):
    """What a worker of this job hears there; at once, not when its time to join is over."""
    began = time.monotonic()
    stray = connect(url, 1, 2, job=job, join_timeout=2 * SOON, served=True)
    with stray, pytest.raises(HandshakeRefused) as refused:
        Worker(stray, SMALL, contributions(SMALL, 1)[0]).bind()
    assert time.monotonic() - began < SOON
    return str(refused.value)


def test_worker_of_another_job_is_refused_by_both_names_and_the_group_goes_on():
    with GradientServer(2, job="run 1") as server:
        for other in ("run 2", "", "RUN 1"):
            told = f"rank 1 belongs to another job: got job={other!r}, expected job='run 1'; two jobs came to one"
            assert told in refusal_of(server.url, other)
        mine = [connect(server.url, rank, 2, job="run 1", served=True) for rank in (0, 1)]
        workers = bound(mine, SMALL, contributions(SMALL, 2))
        assert "belongs to another job" in refusal_of(server.url, "run 2")  # also where the group is complete
        on_all(Worker.sum, workers)
        on_all(leave_together, workers)
        assert workers[1].arena.tobytes() == rank_order_sum(contributions(SMALL, 2)).tobytes()


def test_job_is_named_only_to_who_has_the_token():
    server = GradientServer(2, token="secret", job="run 1")
    with server, contextlib.closing(join_by_hand(server, 1, 2, token="wrong")) as channel:
        assert b"run 1" not in channel.expect(Refused)[1]


@pytest.mark.parametrize("job", [7, b"run", "x" * 257, "two\nlines", "\x1b[31m", "\ud800"], ids=repr)
def test_what_is_no_name_of_a_job_is_refused(job):
    for make in (lambda: GradientServer(2, job=job), lambda: WorkerClient(("127.0.0.1", 1), 1, 2, job=job)):
        with pytest.raises(CallerError, match="this is not a valid job name"):
            make()
    assert not package_threads()


def test_longest_name_of_a_job():
    job = "ключ" * 64
    with GradientServer(1, job=job) as server, WorkerClient(server.address, 0, 1, job=job) as exchange:
        Worker(exchange, SMALL, contributions(SMALL, 1)[0]).bind()


@pytest.mark.parametrize("address", [("0.0.0.0", 0), ("::", 0), ("192.0.2.1", 0)])
@pytest.mark.parametrize("token", [None, ""])
def test_address_beyond_loopback_needs_a_token(address, token):
    with pytest.raises(CallerError, match="reachable from other machines and there is no token"):
        GradientServer(2, address, token=token)
    assert not package_threads()


def test_address_beyond_loopback_with_a_token():
    with GradientServer(1, ("0.0.0.0", 0), token="secret") as server:
        worker = Worker(WorkerClient(("127.0.0.1", server.address[1]), 0, 1, token="secret"), SMALL, EMPTY.copy())
        worker.bind()
        worker.exchange.close()


EMPTY = np.zeros(SMALL.arena_size, np.float32)


def test_port_in_use():
    with (
        GradientServer(1) as server,
        pytest.raises(CallerError, match=f"cannot listen at 127.0.0.1:{server.address[1]}"),
    ):
        GradientServer(1, server.address)


def test_arguments_out_of_range():
    for options in ({"world_size": 0}, {"world_size": 1, "timeout": 0}, {"world_size": 1, "join_timeout": -1}):
        with pytest.raises(CallerError, match="out of range"):
            GradientServer(**options)
    assert not package_threads()


# ---- workers that do not fit ----


def test_another_world_size_ends_the_group_for_all():
    with GradientServer(2, join_timeout=SOON) as server:
        hosting = LocalExchange(server.group, 0)
        other = WorkerClient(server.address, 1, 3)
        workers = [Worker(exchange, SMALL, EMPTY) for exchange in (hosting, other)]
        for error in outcomes(Worker.bind, workers):
            assert isinstance(error, HandshakeRefused)
            assert "rank 1 was started for another world size: got 3, expected 2" in str(error)


def test_rank_taken_twice_is_refused_and_the_group_goes_on(hosted):
    server, exchange = hosted
    with contextlib.closing(join_by_hand(server, 1, 3, token="secret")) as first:
        with server.group.lock:
            assert server.group.changed.wait_for(lambda: 1 in server.group.members, SOON)
        second = Worker(WorkerClient(server.address, 1, 3, token="secret"), SMALL, EMPTY)
        with pytest.raises(HandshakeRefused, match="rank 1 has joined already; give each worker its own rank"):
            second.bind()
        third = WorkerClient(server.address, 2, 3, token="secret")
        workers = [Worker(each, SMALL, EMPTY) for each in (exchange, third)]
        on_all(Worker.bind, workers)
        welcome, _ = first.expect(Welcome)
        assert (welcome.summed, welcome.bucket_bytes, len(welcome.group)) == (0, BUCKET, 16)
        # Who comes to a complete group is given time, for its rank may be about to be lost.
        late = WorkerClient(server.address, 2, 3, token="secret", join_timeout=0.2)
        with pytest.raises(HandshakeRefused, match="rank 2 has joined already"):
            Worker(late, SMALL, EMPTY).bind()
        assert server.group.failure is None
        third.close()


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb([[], []]),
        msgpack.packb([[["w", [1], None]], ["v"]]),
        msgpack.packb([[["w", [-1], None]], ["w"]]),
        msgpack.packb([[["w", [1.5], None]], ["w"]]),
        msgpack.packb([[["w", "x", None]], ["w"]]),
        msgpack.packb([[["w", [1], None]] * 2, ["w", "w"]]),
        msgpack.packb([[["w", [1], "no number"]], [0]]),
        msgpack.packb([[["w", [1], None]], [["w"]]]),
        msgpack.packb([7, 7]),
        b"\x91" * 100_000 + b"\xc0",
        b"\x92\x91\x93" + b"\x91" * 1000 + b"\xc0\x90\xc0\x90",  # a name of lists in lists
        msgpack.packb([[["w", [1 << 62] * 65, None]], ["w"]]),
        msgpack.packb([[["\x1b[2J" * 1000, [1], None]], ["\x1b[2J" * 1000, 1]]),
    ],
)
def test_layout_table_that_cannot_be_read_is_refused(table):
    with GradientServer(1) as server, contextlib.closing(join_by_hand(server, 0, 1, table=table)) as channel:
        why = channel.expect(Refused)[1]
        assert b"rank 0: " in why
        assert b"\x1b" not in why
        assert len(why) < 4000
        assert isinstance(server.group.failure, ProtocolError)


def test_layout_larger_than_the_server_takes():
    for options, size in (({}, 1 << 60), ({"max_arena_bytes": SMALL.nbytes - 4}, SMALL.arena_size)):
        table = GradientLayout.of({"w": (size,)}).table()
        with (
            GradientServer(1, **options) as server,
            contextlib.closing(join_by_hand(server, 0, 1, table=table)) as channel,
        ):
            assert b"the layout of rank 0 is larger than this server takes" in channel.expect(Refused)[1]
    with (
        GradientServer(1, max_arena_bytes=SMALL.nbytes) as server,
        contextlib.closing(join_by_hand(server, 0, 1)) as ours,
    ):
        ours.expect(Welcome)


# ---- workers that break the protocol ----


def gradient(index, **changes):
    key, offset, dtype = wire_key(BUCKETS[index])
    return Gradient(**{"step": 0, "key": key, "offset": offset, "dtype": dtype, **changes})


def size_of(index):
    return 4 * (BUCKETS[index].stop - BUCKETS[index].start)


@pytest.mark.parametrize(
    ("message", "payload", "says"),
    [
        (gradient(1), bytes(size_of(1)), "rank 1 sent another gradient"),
        (gradient(0, step=1), bytes(size_of(0)), "rank 1 sent another gradient"),
        (gradient(0, key="embedding"), bytes(size_of(0)), "rank 1 sent another gradient"),
        (gradient(0, offset=16), bytes(size_of(0)), "rank 1 sent another gradient"),
        (gradient(0, dtype="<f2"), bytes(size_of(0)), "rank 1 sent another gradient"),
        (gradient(0), bytes(size_of(0) - 4), "rank 1 sent another gradient"),
        (gradient(0), b"", "rank 1 sent another gradient"),
        (gradient(0), bytes(1 << 20), "rank 1 sent another gradient"),
        (Sum(0, *wire_key(BUCKETS[0])), bytes(size_of(0)), "rank 1 sent another message: got sum"),
        (Hello(1, 2, "", bytes(32)), b"", "rank 1 sent another message: got hello"),
        (Abort("PeerLost"), b"", "rank 1 sent another message: got abort"),
        (Gather(), bytes((16 << 20) + 1), "payload of 'gather' is too long"),
    ],
)
def test_worker_that_breaks_the_protocol_ends_the_group_for_all(message, payload, says):
    with GradientServer(2, bucket_bytes=BUCKET) as server:
        hosting = LocalExchange(server.group, 0)
        channel = join_by_hand(server, 1, 2)
        worker = Worker(hosting, SMALL, EMPTY.copy())
        worker.bind()
        channel.expect(Welcome)
        with contextlib.suppress(PeerLost):  # the server need not read to the end what it does not want
            channel.send(message, payload)
        with pytest.raises(ProtocolError, match=says):
            worker.sum()
        abort, why = channel.expect(Abort)
        assert abort == Abort("ProtocolError")
        assert says in why.decode()
        channel.close()


def test_gradient_is_named_in_full_where_another_was_due():
    with GradientServer(1, bucket_bytes=BUCKET) as server, contextlib.closing(join_by_hand(server, 0, 1)) as channel:
        channel.expect(Welcome)
        channel.send(gradient(3), bytes(size_of(3)))
        why = channel.expect(Abort)[1].decode()
    assert f"got ({gradient(3)}, {size_of(3)}), expected ({gradient(0)}, {size_of(0)})" in why


def test_gradient_of_a_layout_without_elements():
    layout = GradientLayout.of({"nothing": (0,)})
    with GradientServer(1) as server, contextlib.closing(join_by_hand(server, 0, 1, layout)) as channel:
        channel.expect(Welcome)
        channel.send(Gradient(0, "nothing", 0, "<f4"))
        assert channel.expect(Abort)[0] == Abort("ProtocolError")


def test_second_part_of_a_gather():
    with GradientServer(2) as server:
        channels = [join_by_hand(server, rank, 2) for rank in range(2)]
        for channel in channels:
            channel.expect(Welcome)
        channels[1].send(Gather())
        channels[1].send(Gather())
        for channel in channels:
            assert b"rank 1 gathered twice" in channel.expect(Abort)[1]
            channel.close()


# ---- failures ----


def test_worker_that_takes_no_sums_is_found_late(tmp_path, monkeypatch):
    layout = GradientLayout.of({"w": (1 << 20,)})
    buckets = buckets_of(layout, 1 << 16)
    data = contributions(layout, 1)[0]
    watched = deadline_when(monkeypatch, (1,), (0,), "taking the sums")
    with watched, GradientServer(2, str(tmp_path / "s"), bucket_bytes=1 << 16, timeout=SOON) as server:
        hosting = LocalExchange(server.group, 0)
        channel = join_by_hand(server, 1, 2, layout)
        worker = Worker(hosting, layout, data)
        worker.bind()
        for span in layout.spans:
            hosting.start(span)
        for bucket in buckets:
            channel.send(Gradient(0, *wire_key(bucket)), data[bucket.start : bucket.stop].data)
        with pytest.raises(DeadlineExceeded, match="rank 1 is late for taking the sums, rank 0 is waiting"):
            hosting.wait()
        channel.close()


def test_lost_worker_is_named_to_the_others(hosted):
    server, exchange = hosted
    channel = join_by_hand(server, 1, 3, token="secret")
    workers = [Worker(exchange, SMALL, EMPTY.copy())]
    workers.append(Worker(WorkerClient(server.address, 2, 3, token="secret"), SMALL, EMPTY.copy()))
    on_all(Worker.bind, workers)
    threading.Thread(target=channel.close).start()
    for error in outcomes(Worker.sum, workers):
        assert isinstance(error, PeerLost)
        assert "rank 1 closed the connection" in str(error)


def test_worker_that_is_back_before_its_loss_was_noticed_gets_in_later():
    """The old coordinator is complete, then gone; a new one takes its place; the worker tries all along."""
    address = ("127.0.0.1", free_port())
    with GradientServer(1, address) as old:
        channel = join_by_hand(old, 0, 1)
        channel.expect(Welcome)
        back = Worker(WorkerClient(address, 0, 1, join_timeout=SOON), SMALL, EMPTY.copy())
        tries = threading.Event()
        refuse = old._refuse_untimely

        def refuse_and_tell(hello):
            tries.set()
            refuse(hello)

        old._refuse_untimely = refuse_and_tell
        joining = threading.Thread(target=back.bind)
        joining.start()
        assert tries.wait(SOON)
        channel.close()
    with GradientServer(1, address):
        joining.join(SOON)
        assert not joining.is_alive()
        assert back.sum() == ()
        back.exchange.close()


def test_sums_that_the_server_lost_are_refused_with_what_to_do():
    with GradientServer(2, bucket_bytes=BUCKET) as server:
        channels = [join_by_hand(server, rank, 2, progress=Progress(0, rank, False)) for rank in range(2)]
        # Whoever comes second is refused; the first may be a member by then, or still at the door.
        received = [channel.receive() for channel in channels]
        kinds = [type(message) for message, _ in received]
        assert Refused in kinds
        assert {*kinds} <= {Abort, Refused}
        for channel, (kind, size) in zip(channels, received, strict=True):
            message = channel.receive_bytes(kind, size).decode()
            assert "rank 1 has sums of step 0 that the coordinator lost: got 1 buckets" in message
            assert "discard() the window on every rank and accumulate it again" in message
        for channel in channels:
            channel.close()


# ---- serving ----


def test_serve_ends_when_all_have_come_and_gone():
    with GradientServer(2) as server:
        serving = threading.Thread(target=server.serve)
        serving.start()
        workers = bound([WorkerClient(server.address, rank, 2) for rank in range(2)], SMALL, contributions(SMALL, 2))
        on_all(Worker.sum, workers)
        assert serving.is_alive()
        on_all(leave_together, workers)
        serving.join(SOON)
        assert not serving.is_alive()


def test_serve_raises_where_a_worker_is_lost_in_a_step():
    with GradientServer(2) as server:
        workers = bound([WorkerClient(server.address, rank, 2) for rank in range(2)], SMALL, contributions(SMALL, 2))
        workers[0].exchange.start(SMALL.spans[0])
        with server.group.lock:
            assert server.group.changed.wait_for(lambda: server.group.coordinator.stall().waiting, SOON)
        workers[1].exchange.close()
        with pytest.raises(PeerLost, match="rank 1 closed the connection"):
            server.serve()
        workers[0].exchange.close()


def test_serve_raises_where_not_all_come():
    with GradientServer(2, join_timeout=0.3) as server:
        worker = Worker(WorkerClient(server.address, 0, 2), SMALL, EMPTY)
        for error in outcomes(lambda call: call(), [server.serve, worker.bind]):
            assert isinstance(error, PeerLost)
            assert "rank 1 is late for joining, rank 0 is waiting" in str(error)


def test_close_ends_serve_and_may_be_done_twice():
    server = GradientServer(2)
    closer = threading.Timer(0.05, server.close)
    closer.start()
    with pytest.raises(PeerLost, match="the coordinator left the group"):
        server.serve()
    closer.join()
    server.close()
    assert not package_threads()


def test_close_does_not_wait_for_a_worker_that_never_leaves():
    server = GradientServer(1)
    with contextlib.closing(join_by_hand(server, 0, 1)) as channel:
        channel.expect(Welcome)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < SOON
        assert b"the coordinator left the group" in channel.expect(Abort)[1]
    assert not package_threads()


def test_url_is_what_workers_connect_to(tmp_path):
    with GradientServer(1) as server:
        assert server.url == f"tcp://127.0.0.1:{server.address[1]}"
    with GradientServer(1, str(tmp_path / "s")) as server:
        assert server.url == f"unix://{tmp_path}/s"


@pytest.mark.parametrize("is_unix", [False, True])
def test_a_second_close_ends_and_gives_the_address_back_whatever_line_interrupted_the_first(is_unix, tmp_path):
    """Of a `threading.Event` that was being set the lock stayed held: the second close hung for ever."""

    def new():
        return GradientServer(2, str(tmp_path / "s") if is_unix else ("127.0.0.1", 0))

    for at in places_of(new().close):
        server = new()
        interrupted_at(at, server.close)
        again = threading.Thread(target=server.close, daemon=True)
        again.start()
        again.join(SOON)
        assert not again.is_alive(), at
        assert not is_unix or not (tmp_path / "s").exists(), at
        GradientServer(2, server.address).close()


def test_a_close_that_is_late_leaves_the_path_of_the_next_server(tmp_path):
    path = str(tmp_path / "s")
    first = GradientServer(2, path)
    first.close()
    with GradientServer(2, path):
        first.close()
        assert (tmp_path / "s").exists()


def test_a_failure_that_was_begun_and_not_told_is_told_by_the_thread_that_watches():
    with GradientServer(2, timeout=0.1, join_timeout=SOON) as server:
        told = []
        server.group.members[0] = types.SimpleNamespace(dismiss=told.append)
        server.group.failure = failure = PeerLost("rank 1 left")
        with server.group.lock:
            assert server.group.changed.wait_for(lambda: told == [failure], SOON)
