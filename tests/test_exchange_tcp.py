"""A worker's end: it trusts no coordinator that breaks the protocol, and its arena is its own again after a failure."""

from __future__ import annotations

import contextlib
import threading
import time

import msgpack
import numpy as np
import pytest
from transports import SMALL, SOON, Worker, contributions, package_threads

from gradengine.errors import (
    CallerError,
    DeadlineExceeded,
    ExchangeError,
    HandshakeRefused,
    PeerLost,
    ProtocolError,
)
from gradengine.exchange import GradientServer, NonFiniteValue, Progress, WorkerClient, tcp
from gradengine.exchange.channel import Channel, listen_socket
from gradengine.exchange.handshake import answer_hello
from gradengine.exchange.interface import buckets_of, wire_key
from gradengine.exchange.wire import (
    Abort,
    Challenge,
    Gather,
    Gathered,
    Gradient,
    Hello,
    Join,
    Refused,
    Sum,
    Verdict,
    Welcome,
)
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
BUCKET = 128
GROUP = bytes(range(16))
LAYOUT = GradientLayout.of({"a": (32,), "b": (40,)})
BUCKETS = buckets_of(LAYOUT, BUCKET)
SUMS = [Sum(0, *wire_key(bucket)) for bucket in BUCKETS]


@contextlib.contextmanager
def coordinator(script, *, welcome=True, hang_ups=0, **options):
    """A worker, and in a thread a coordinator by hand that runs `script(channel)` once the worker is in."""
    listener = listen_socket(("127.0.0.1", 0))
    channels = []

    def serve():
        for _ in range(hang_ups):
            listener.accept()[0].close()
        connection, _ = listener.accept()
        channel = Channel(connection, "rank 1")
        channels.append(channel)
        channel.set_deadline(10.0)
        if welcome:
            hello, _ = channel.expect(Hello)
            channel.send(answer_hello(None, hello))
            channel.expect(Join)
            channel.send(Welcome(0, BUCKET, GROUP))
        with contextlib.suppress(PeerLost):  # the worker may leave first; what it saw is asserted on its side
            script(channel)

    exchange = WorkerClient(listener.getsockname(), 1, 2, **{"timeout": 10.0, "join_timeout": 5.0, **options})
    with contextlib.closing(listener):
        thread = threading.Thread(target=serve)
        thread.start()
        worker = Worker(exchange, LAYOUT, contributions(LAYOUT, 1)[0])
        try:
            yield worker
        finally:
            exchange.close()
            thread.join(SOON)
            for channel in channels:
                channel.close()
            assert not thread.is_alive()


def payload(index, value=1.0):
    return np.full(BUCKETS[index].stop - BUCKETS[index].start, value, np.float32).tobytes()


def send_sums(channel):
    for index, message in enumerate(SUMS):
        channel.send(message, payload(index))


# ---- the coordinator breaks the protocol ----


@pytest.mark.parametrize(
    ("message", "data", "says"),
    [
        (SUMS[1], payload(1), "sent another sum: got"),
        (Sum(1, *wire_key(BUCKETS[0])), payload(0), "sent another sum"),
        (Sum(0, "b", 0, "<f8"), payload(0), "sent another sum"),
        (SUMS[0], payload(0)[:-4], "sent another sum"),
        (SUMS[0], payload(0) + bytes(1 << 20), "sent another sum"),
        (Verdict(0), msgpack.packb([]), "ended a step that is not over"),
        (Gradient(0, *wire_key(BUCKETS[0])), b"", "sent another message: got gradient"),
        (Hello(0, 1, "", b""), b"", "sent another message: got hello"),
        (Gathered(), b"", "a payload of rows cannot be read"),
        (Gathered(), msgpack.packb(7), "a payload is no list of rows: got int"),
        (Gathered(), msgpack.packb([b""]), "a gather is not one part of each rank: got 1 parts, expected 2"),
        (Gathered(), msgpack.packb([b"", "text"]), "a gather is not one part of each rank"),
        (Gathered(), bytes(2 * ((16 << 20) + 8) + 1), "payload of 'gathered' is too long"),
        (Verdict(0), bytes((16 << 20) + 1), "payload of 'verdict' is too long"),
    ],
)
def test_worker_fails_and_leaves_its_arena_alone(message, data, says):
    def break_the_protocol(channel):
        with contextlib.suppress(PeerLost):  # the worker hangs up in the middle of what it does not want
            channel.send(message, data)

    with coordinator(break_the_protocol) as worker:
        before = worker.arena.tobytes()
        worker.bind()
        with pytest.raises(ProtocolError, match=says):
            worker.sum()
        assert worker.arena.tobytes() == before
        assert (worker.progress.summed, worker.progress.partially_written) == (0, False)
        assert not package_threads()


def test_a_sum_too_many():
    def script(channel):
        send_sums(channel)
        channel.send(SUMS[0], payload(0))

    with coordinator(script) as worker:
        worker.bind()
        with pytest.raises(ProtocolError, match="sent a sum too many"):
            worker.sum()


@pytest.mark.parametrize("step", [1, 2**63 - 1])
def test_verdict_of_another_step(step):
    def script(channel):
        send_sums(channel)
        channel.send(Verdict(step), msgpack.packb([]))

    with coordinator(script) as worker:
        worker.bind()
        with pytest.raises(ProtocolError, match="ended a step that is not over"):
            worker.sum()


@pytest.mark.parametrize(
    "rows",
    [b"\xc1", b"", msgpack.packb({}), msgpack.packb([7]), msgpack.packb([[1, 2]]), msgpack.packb([[1, 2, "x"]]),
     msgpack.packb([[1, 2.0, 3.0]]), msgpack.packb([[True, 2, 3.0]]), msgpack.packb([[1, 2, 3.0, 4]])],
)  # fmt: skip
def test_verdict_that_cannot_be_read(rows):
    def script(channel):
        send_sums(channel)
        channel.send(Verdict(0), rows)

    with coordinator(script) as worker:
        worker.bind()
        with pytest.raises(ProtocolError, match=r"a row of a verdict cannot be|payload"):
            worker.sum()


def test_verdict_is_told_as_it_came():
    def script(channel):
        send_sums(channel)
        channel.send(Verdict(0), msgpack.packb([[3, 17, float("-inf")]]))

    with coordinator(script) as worker:
        worker.bind()
        assert worker.sum() == (NonFiniteValue(3, 17, -np.inf),)
        assert worker.progress.bad == [NonFiniteValue(3, 17, -np.inf)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("PeerLost", PeerLost), ("DeadlineExceeded", DeadlineExceeded), ("HandshakeRefused", HandshakeRefused),
     ("ProtocolError", ProtocolError), ("ExchangeError", ExchangeError), ("SystemExit", ExchangeError),
     ("os.system", ExchangeError)],
)  # fmt: skip
def test_abort_raises_our_errors_and_nothing_else(name, kind):
    with coordinator(lambda channel: channel.send(Abort(name), b"rank 0 \xff is gone")) as worker:
        worker.bind()
        with pytest.raises(ExchangeError, match="rank 0 � is gone") as raised:
            worker.sum()
        assert type(raised.value) is kind


@pytest.mark.parametrize("depth", [9, 1000, 100_000])
@pytest.mark.parametrize("message", [Verdict(0), Gathered()], ids=lambda message: message.kind)
def test_deep_payload_is_a_protocol_error(message, depth):
    def script(channel):
        send_sums(channel)
        channel.send(message, b"\x91" * depth + b"\xc0")

    with coordinator(script) as worker:
        worker.bind()
        with pytest.raises(ProtocolError, match="a payload of rows is nested too deep"):
            worker.sum()


def test_verdict_is_shown_in_a_few_lines_where_it_cannot_be():
    def script(channel):
        send_sums(channel)
        channel.send(Verdict(0), msgpack.packb([["\x1b[2J" * 10**5] * 3]))

    with coordinator(script) as worker:
        worker.bind()
        with pytest.raises(ProtocolError, match="a row of a verdict cannot be") as raised:
            worker.sum()
        assert len(str(raised.value)) < 2000
        assert str(raised.value).isprintable()


@pytest.mark.parametrize("joined", [False, True])
def test_longer_text_than_a_refusal_or_an_abort_has_is_not_read(joined):
    said = Abort("PeerLost") if joined else Refused()
    script = (lambda channel: channel.send(said, bytes(65537))) if joined else refusing(said, bytes(65537))
    told = f"payload of '{said.kind}' is too long: got 65537, expected at most 65536"
    with coordinator(script, welcome=joined) as worker, pytest.raises(ProtocolError, match=told):
        worker.bind() or worker.sum()


# ---- joining ----


def refusing(message, data=b""):
    def script(channel):
        channel.expect(Hello)
        channel.send(message, data)

    return script


def test_coordinator_without_the_token():
    wrong = Challenge(nonce=bytes(32), proof=bytes(32))
    refused = pytest.raises(HandshakeRefused, match="the coordinator has another token")
    with coordinator(refusing(wrong), welcome=False, token="secret") as worker, refused:
        worker.bind()


@pytest.mark.parametrize(
    "text",
    [
        b"\x1b]0;owned\x07\x1b[31mDisk is being erased\x1b[0m\r",
        b"\xe2\x80\xae\x9b1m",
        b"line\n" * 13000,
        b"x" * 65536,
    ],
)
def test_words_of_a_coordinator_that_proved_nothing_change_no_terminal(text):
    with coordinator(refusing(Refused(), text), welcome=False, join_timeout=0.01) as worker:
        with pytest.raises(HandshakeRefused, match=r"^coordinator 127.0.0.1:[0-9]+ refuses: ") as raised:
            worker.bind()
        lines = str(raised.value).split("\n")
        assert len(lines) <= 12
        assert all(line.isprintable() and len(line) < 1500 for line in lines)


def test_refused_for_good_after_the_time_to_join():
    refused = pytest.raises(HandshakeRefused, match=r"coordinator 127\.0\.0\.1:\d+ refuses: no room")
    with coordinator(refusing(Refused(), b"no room"), welcome=False, join_timeout=0.05) as worker, refused:
        worker.bind()


@pytest.mark.parametrize("message", [Verdict(0), Abort("PeerLost")])
def test_another_message_than_a_challenge(message):
    """Nor is a stranger's word taken for the group's failure."""
    with coordinator(refusing(message), welcome=False, join_timeout=0.05) as worker, pytest.raises(ProtocolError):
        worker.bind()


@pytest.mark.parametrize(
    ("welcome", "progress"),
    [
        (Welcome(0, 3, GROUP), Progress()),
        (Welcome(0, BUCKET, GROUP), Progress(0, 1)),
        (Welcome(1, BUCKET, GROUP), Progress(0, 1, True)),
        (Welcome(0, BUCKET, b""), Progress()),
        (Welcome(0, BUCKET, GROUP + GROUP), Progress()),
        (Welcome(len(BUCKETS) + 1, BUCKET, GROUP), Progress()),
    ],
)
def test_welcome_that_cannot_be(welcome, progress):
    def script(channel):
        hello, _ = channel.expect(Hello)
        channel.send(answer_hello(None, hello))
        channel.expect(Join)
        channel.send(welcome)

    with coordinator(script, welcome=False) as worker:
        worker.progress = progress
        with pytest.raises(ProtocolError, match="sent a welcome that cannot be"):
            worker.bind()


def test_coordinator_that_hangs_up_before_it_answers_is_tried_again():
    with coordinator(send_sums, hang_ups=3) as worker:
        worker.bind()
    with coordinator(refusing(Refused()), welcome=False, hang_ups=1, join_timeout=0.01) as worker:
        with pytest.raises(PeerLost, match=r"closed the connection|broke"):
            worker.bind()
        with pytest.raises(HandshakeRefused):
            worker.bind()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_rank_out_of_range(rank, world_size):
    with pytest.raises(CallerError, match="out of range"):
        WorkerClient(("127.0.0.1", 1), rank, world_size)


# ---- failures ----


def test_silent_coordinator_is_found_by_the_worker_itself(monkeypatch):
    monkeypatch.setattr(tcp, "_GRACE_SECONDS", 0.1)
    release = threading.Event()
    with coordinator(lambda channel: release.wait(SOON), timeout=0.1) as worker:
        worker.bind()
        for call, what in ((worker.sum, "the sums"), (worker.exchange.barrier, "the sums")):
            with pytest.raises(DeadlineExceeded, match=f"rank 1 waits for {what} and the coordinator is silent"):
                call()
        release.set()


@pytest.mark.parametrize("cut", [0, 1, 50, 60, 130])
def test_lost_connection_leaves_a_progress_that_is_true(cut):
    """The coordinator dies after `cut` bytes of its second sum: the worker knows which bucket is half overwritten."""

    def script(channel):
        channel.send(SUMS[0], payload(0))
        head = bytearray()

        class Collect:
            def sendmsg(self, parts):
                head.extend(b"".join(parts))
                return sum(map(len, parts))

        whole = Channel.__new__(Channel)
        whole._socket = Collect()
        whole.send(SUMS[1], payload(1))
        channel._socket.sendall(head[:cut])
        channel.close()

    with coordinator(script) as worker:
        before = worker.arena.copy()
        worker.bind()
        began = time.monotonic()
        with pytest.raises(PeerLost, match=r"coordinator 127\.0\.0\.1:\d+ closed the connection|broke while"):
            worker.sum()
        assert time.monotonic() - began < SOON
        assert worker.progress.summed == 1
        first, second = BUCKETS[0], BUCKETS[1]
        assert (worker.arena[first.start : first.stop] == 1).all()
        untouched = worker.arena[second.start : second.stop].tobytes() == before[second.start : second.stop].tobytes()
        assert worker.progress.partially_written or untouched


def test_nothing_lands_after_a_failure_was_told():
    """Sums that still come when the failure is raised find no arena any more: it may be another exchange's by then."""
    go_on = threading.Event()

    def script(channel):
        channel.send(SUMS[0], payload(0))
        go_on.wait(SOON)
        with contextlib.suppress(PeerLost):
            channel.send(SUMS[1], payload(1, 7.0))

    with coordinator(script) as worker:
        landed = threading.Event()
        worker.take = lambda span, upto: landed.set()
        worker.bind()
        assert landed.wait(SOON)
        worker.exchange._fail(PeerLost("the sender met a broken connection"))
        with pytest.raises(PeerLost):
            worker.exchange.wait()
        assert not package_threads()
        before = worker.arena.tobytes()
        go_on.set()
    assert worker.arena.tobytes() == before
    assert worker.progress.summed == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fault_in_a_callback_is_a_failure_not_a_hang():
    def out_of_luck(span, upto):
        raise ArithmeticError("out of luck")

    with coordinator(send_sums) as worker:
        worker.take = out_of_luck
        worker.bind()
        with pytest.raises(ExchangeError, match=r"rank 1 failed while receiving .*out of luck"):
            worker.sum()
        assert worker.progress.summed == 1, "the sum is in the arena, whatever became of the callback"


def test_close_from_a_callback_does_not_hang():
    with coordinator(send_sums) as worker:
        worker.take = lambda span, upto: worker.exchange.close()
        worker.bind()
        with pytest.raises(PeerLost, match="rank 1 has left the group"):
            worker.sum()


def test_gradients_leave_in_backward_order_from_the_arena():
    got = []

    def script(channel):
        for _ in BUCKETS:
            message, size = channel.receive()
            got.append((message, channel.receive_bytes(message, size)))
        channel.expect(Gather)
        channel.close()

    with coordinator(script) as worker:
        worker.bind()
        for span in reversed(LAYOUT.spans):
            worker.exchange.start(span)
        with contextlib.suppress(ExchangeError):
            worker.exchange.barrier()
        arena = worker.arena
    assert got == [(Gradient(0, *wire_key(b)), arena[b.start : b.stop].tobytes()) for b in BUCKETS]


def test_closed_from_elsewhere_while_it_binds(monkeypatch):
    """A thread of it that only begins then ends at once, and is waited for."""
    server = GradientServer(1)
    client = WorkerClient(server.address, 0, 1)
    start, closing = threading.Thread.start, threading.Thread(target=client.close)

    def closing_first(thread):
        if thread.name == "gradengine-sender":
            start(closing)
            with client._lock:
                assert client._changed.wait_for(lambda: client._failure is not None, SOON)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", closing_first)
    Worker(client, SMALL, contributions(SMALL, 1)[0]).bind()
    with pytest.raises(PeerLost, match="has left the group"):
        client.gather(b"")
    closing.join(SOON)
    client.close()
    server.close()
