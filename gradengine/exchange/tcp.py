"""A worker over sockets: gradients are sent from the arena, and sums received into it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, final

from gradengine.arguments import checked_rank
from gradengine.errors import CallerError, DeadlineExceeded, ExchangeError, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange.channel import (
    Address,
    Channel,
    Kind,
    checked_address,
    connect_socket,
    refuse_bad_token,
    shown,
    url_of,
)
from gradengine.exchange.environment import job_or_launchers
from gradengine.exchange.handshake import check_challenge, error_told, join_of, new_nonce, proof
from gradengine.exchange.interface import (
    DEFAULT_JOIN_TIMEOUT,
    DEFAULT_TIMEOUT,
    GROUP_BYTES,
    Bucket,
    Exchange,
    Float32,
    Membership,
    NonFiniteValue,
    OnReduced,
    Outbox,
    Progress,
    buckets_of,
    checked_seconds,
    not_bound,
    nothing_started,
    refuse_bad_arena,
    refuse_long_part,
    refuse_other_bucket,
    set_bucket_bytes,
    wire_key,
)
from gradengine.exchange.wire import (
    MAX_SMALL_PAYLOAD,
    MAX_TEXT_BYTES,
    Abort,
    Challenge,
    Gather,
    Gathered,
    Gradient,
    Hello,
    Message,
    Refused,
    Sum,
    Verdict,
    Welcome,
)
from gradengine.layout import GradientLayout, Span
from gradengine.threads import Threads
from gradengine.unpacking import unpack

_RETRY_SECONDS = 0.05
_GRACE_SECONDS = 5.0  # the coordinator knows which rank is late, so its error should arrive first


@final
class WorkerClient(Exchange):
    """Exchange of a worker that is connected to its group's coordinator.

    Args:
        address: (host, port), or the path of a Unix socket.
        rank: This worker's rank, 1..world_size - 1, or from 0 on if a `GradientServer` runs alone.
        world_size: Workers in the group.
        token: The group's secret.
        job: As for `connect`; so are timeout and join_timeout.

    Raises:
        CallerError: The rank is out of range, or the job's name is too long or not printable.
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        world_size: int,
        *,
        token: str | None = None,
        job: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
    ) -> None:
        address = checked_address(address)
        refuse_bad_token(token)
        self.rank, self.world_size = checked_rank(rank, world_size)
        self.url = url_of(address)
        self._address, self._token, self._job = address, token, job_or_launchers(job)
        self._timeout = checked_seconds("timeout", timeout)
        self._join_timeout = checked_seconds("join_timeout", join_timeout)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._outgoing: queue.SimpleQueue[tuple[Message, bytes | memoryview] | None] = queue.SimpleQueue()
        self._gathers: list[list[bytes]] = []
        self._buckets: list[Bucket] = []
        self._outbox: Outbox | None = None
        self._channel: Channel | None = None
        self._failure: ExchangeError | None = None
        self._threads = Threads()
        self._has_ended = False
        self._last_progress = time.monotonic()

    def bind(self, layout: GradientLayout, arena: Float32, progress: Progress, on_reduced: OnReduced) -> None:
        refuse_bad_arena(layout, arena)
        if self._channel is not None:
            raise CallerError(f"rank {self.rank} is bound already", do="make a new exchange for another engine")
        if self._failure is not None:
            raise self._failure
        self._arena, self._progress, self._on_reduced = arena, progress, on_reduced
        channel, hello, challenge = self._connect()
        try:
            summed = self._join(channel, hello, challenge, layout)
            channel.set_deadline(None)
            self._outbox, self._channel = Outbox(self._buckets, summed), channel
        except BaseException:
            channel.close()
            raise
        for name, work in (("sender", self._send_all), ("receiver", self._receive_all)):
            self._threads.spawn(f"gradengine-{name}", work, channel)

    def start(self, span: Span) -> None:
        self._refuse_unbound()
        if self._outbox is None:
            self._outbox = Outbox(self._buckets, 0)
        leaving = self._outbox.start(span)
        self._progress.contributed = max(self._progress.contributed, leaving.stop)
        for index in leaving:
            bucket = self._buckets[index]
            message = Gradient(self._progress.step, *wire_key(bucket))
            self._outgoing.put((message, self._arena[bucket.start : bucket.stop].data))

    def wait(self) -> tuple[NonFiniteValue, ...]:
        self._refuse_unbound()
        idle = self._outbox is None or self._outbox.is_untouched
        if idle and self._buckets and not self._has_ended and self._failure is None:
            raise nothing_started(self.rank)
        self._wait_until(lambda: not self._buckets or self._has_ended, "the sums")
        self._has_ended, self._outbox = False, None
        return tuple(self._progress.bad)

    def gather(self, data: bytes) -> list[bytes]:
        self._refuse_unbound()
        refuse_long_part(data)
        self._outgoing.put((Gather(), data))
        self._wait_until(lambda: bool(self._gathers), "a gather (end of step or barrier)")
        return self._gathers.pop(0)

    def close(self) -> None:
        self._fail(PeerLost(f"rank {self.rank} has left the group"))
        self._stop()

    def _refuse_unbound(self) -> None:
        if self._channel is None:
            raise not_bound(f"rank {self.rank}'s exchange")

    def _stop(self) -> None:
        """After this no thread of this exchange uses the arena or the progress, and another exchange may."""
        if self._channel is not None:
            self._channel.close()
        self._threads.join(_GRACE_SECONDS)

    def _connect(self) -> tuple[Channel, Hello, Challenge]:
        """A connection that was answered; retried while a coordinator restarts after a failure."""
        deadline = time.monotonic() + self._join_timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            channel = Channel(connect_socket(self._address, left), f"coordinator {shown(self._address)}")
            hello = Hello(self.rank, self.world_size, self._job, new_nonce())
            try:
                channel.set_deadline(self._join_timeout + _GRACE_SECONDS)
                channel.send(hello)
                return channel, hello, _answer(channel, Challenge)
            except (PeerLost, HandshakeRefused):
                channel.close()
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
            except BaseException:
                channel.close()
                raise

    def _join(self, channel: Channel, hello: Hello, challenge: Challenge, layout: GradientLayout) -> int:
        check_challenge(self._token, hello, challenge)
        progress = self._progress
        own_proof = proof(self._token, "worker", hello, challenge.nonce)
        channel.send(join_of(progress, own_proof), layout.table())
        welcome = _answer(channel, Welcome)
        set_bucket_bytes(welcome.bucket_bytes, progress, self.rank)
        self._buckets = buckets_of(layout, max(4, welcome.bucket_bytes))
        has = progress.summed + progress.partially_written
        if (
            welcome.bucket_bytes < 4
            or len(welcome.group) != GROUP_BYTES
            or not has <= welcome.summed <= len(self._buckets)
        ):
            raise ProtocolError(f"{channel.peer} sent a welcome that cannot be", got=welcome)
        progress.membership = Membership(welcome.group, self.rank, self.world_size)
        return welcome.summed

    def _send_all(self, channel: Channel) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                channel.send(*item)
        except PeerLost as failure:
            # The receiver may still get the reason why the coordinator closed the connection.
            with self._lock:
                self._changed.wait_for(lambda: self._failure is not None, 1.0)
            self._fail(failure)

    def _receive_all(self, channel: Channel) -> None:
        try:
            while True:
                message, payload_bytes = channel.receive()
                self._receive_one(channel, message, payload_bytes)
                with self._lock:
                    self._last_progress = time.monotonic()
                    self._changed.notify_all()
        except ExchangeError as failure:
            self._fail(failure)
        except BaseException as fault:
            self._fail(ExchangeError(f"rank {self.rank} failed while receiving ({fault!r})"))
            raise

    def _receive_one(self, channel: Channel, message: Message, payload_bytes: int) -> None:
        if isinstance(message, Sum):
            self._receive_sum(channel, message, payload_bytes)
            return
        data = channel.receive_bytes(message, payload_bytes, self._limit_of(message))
        if isinstance(message, Verdict):
            progress = self._progress
            if (message.step, progress.summed) != (progress.step, len(self._buckets)):
                raise ProtocolError(f"{channel.peer} ended a step that is not over", got=message)
            progress.bad = [_non_finite_value(row) for row in _rows(data)]
            self._has_ended = True
        elif isinstance(message, Gathered):
            self._gathers.append(_parts(data, self.world_size))
        elif isinstance(message, Abort):
            raise error_told(message.error, data.decode(errors="replace"))
        else:
            raise channel.unexpected(message, "a sum")

    def _limit_of(self, message: Message) -> int:
        if isinstance(message, Gathered):
            return self.world_size * (MAX_SMALL_PAYLOAD + 8)
        return MAX_TEXT_BYTES if isinstance(message, Abort) else MAX_SMALL_PAYLOAD

    def _receive_sum(self, channel: Channel, message: Sum, payload_bytes: int) -> None:
        progress = self._progress
        if progress.summed >= len(self._buckets):
            raise ProtocolError(f"{channel.peer} sent a sum too many", got=message)
        bucket = self._buckets[progress.summed]
        refuse_other_bucket(channel.peer, message, payload_bytes, progress.step, bucket)
        progress.partially_written = True
        channel.receive_into(self._arena[bucket.start : bucket.stop].data)
        progress.summed += 1
        progress.partially_written = False
        self._on_reduced(bucket.span, bucket.stop)

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        limit = left = self._timeout + _GRACE_SECONDS
        self._last_progress = time.monotonic()
        with self._lock:
            while not self._changed.wait_for(lambda: done() or self._failure is not None, left):
                left = self._last_progress + limit - time.monotonic()
                if left <= 0:
                    silent = f"rank {self.rank} waits for {what} and the coordinator is silent"
                    self._fail(DeadlineExceeded(silent, got=f"nothing for {limit:g} s"))
            if done():
                return
        self._stop()
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: ExchangeError) -> None:
        with self._lock:
            self._failure = self._failure or failure
            self._changed.notify_all()
        self._outgoing.put(None)


def _answer(channel: Channel, kind: type[Kind]) -> Kind:
    message, payload_bytes = channel.receive()
    text = channel.receive_bytes(message, payload_bytes, MAX_TEXT_BYTES).decode(errors="replace")
    if isinstance(message, Refused):
        raise HandshakeRefused(f"{channel.peer} refuses: {text}")
    if isinstance(message, Abort) and kind is Welcome:
        raise error_told(message.error, text)
    if not isinstance(message, kind):
        raise channel.unexpected(message, kind.kind)
    return message


def _parts(data: bytes, world_size: int) -> list[bytes]:
    parts = _rows(data)
    if len(parts) != world_size or not all(isinstance(part, bytes) for part in parts):
        raise ProtocolError("a gather is not one part of each rank", got=f"{len(parts)} parts", expected=world_size)
    return parts


def _non_finite_value(row: Any) -> NonFiniteValue:
    if not isinstance(row, list) or list(map(type, row)) != [int, int, float]:
        raise ProtocolError("a row of a verdict cannot be", got=row, expected="[rank, index, value]")
    return NonFiniteValue(*row)


def _rows(data: bytes) -> list[Any]:
    rows = unpack(data, "a payload of rows")
    if not isinstance(rows, list):
        raise ProtocolError("a payload is no list of rows", got=type(rows).__name__)
    return rows
