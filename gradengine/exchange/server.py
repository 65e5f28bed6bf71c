"""The coordinator over sockets: for each worker a reader and a writer thread, over a shared `Group`."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, final

import msgpack
import numpy as np

from gradengine.arguments import whole_number
from gradengine.errors import (
    ExchangeError,
    GradientError,
    HandshakeRefused,
    LayoutMismatch,
    NotCopied,
    PeerLost,
    ProtocolError,
)
from gradengine.exchange.channel import (
    Address,
    Channel,
    checked_address,
    listen_socket,
    refuse_bad_token,
    refuse_public_address,
    url_of,
)
from gradengine.exchange.group import Group, Member
from gradengine.exchange.handshake import (
    answer_hello,
    check_hello,
    check_proof,
    progress_of,
    refuse_bad_job,
    refuse_other_job,
)
from gradengine.exchange.interface import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_JOIN_TIMEOUT,
    DEFAULT_TIMEOUT,
    Bucket,
    Float32,
    NonFiniteValue,
    Progress,
    refuse_other_bucket,
    wire_key,
)
from gradengine.exchange.wire import (
    Abort,
    Gather,
    Gathered,
    Gradient,
    Hello,
    Join,
    Message,
    Refused,
    Sum,
    Verdict,
    Welcome,
)
from gradengine.layout import GradientLayout, layout_from_table
from gradengine.threads import Threads

if TYPE_CHECKING:
    from typing_extensions import Self

_HANDSHAKE_SECONDS = 10.0
_CLOSE_SECONDS = 1.0
BUCKETS_IN_FLIGHT = 8  # received from one worker and not yet summed: 16 MB a worker at the default bucket


@final
class GradientServer(NotCopied, instead="make one in the process that serves"):
    """Coordinator that receives every worker's gradients, sums them in rank order and sends the sums back.

    Alone it serves `world_size` remote workers, with an arena of its own for the sums; `connect` puts one into rank 0's
    process, whose arena is summed in place.

    Args:
        world_size: Workers in the group.
        address: (host, port), port 0 for any free one; or the path of a Unix socket.
        token: The group's secret; required beyond loopback.
        job: The job's name; a worker of another job is rejected, without any effect on the group. None: the job of the
            first worker that joins, since the coordinator may run outside of it.
        timeout: As for `connect`; so are join_timeout and bucket_bytes.
        max_arena_bytes: The largest arena of a worker's layout.

    Attributes:
        group: The state shared with a rank in this process.

    Raises:
        CallerError: An argument is out of range, the address cannot be bound, or it is beyond loopback and there is no
            token.

    Example:
        >>> with GradientServer(world_size=2) as server:
        ...     server.url.startswith("tcp://127.0.0.1:")
        True
    """

    def __init__(
        self,
        world_size: int,
        address: Address = ("127.0.0.1", 0),
        *,
        token: str | None = None,
        job: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        max_arena_bytes: int = 1 << 36,
    ) -> None:
        address = checked_address(address)
        refuse_bad_token(token)
        refuse_public_address(address, token)
        if job is not None:
            refuse_bad_job(job)
        self.group = Group(world_size, timeout, join_timeout, bucket_bytes)
        self._token, self._job = token, job
        self._max_arena_bytes = whole_number("max_arena_bytes", max_arena_bytes, 1)
        self._threads = Threads()
        self._channels: list[Channel] = []
        self._unauthenticated: set[Channel] = set()
        self._closing = threading.Event()
        self._departed = 0
        self._listener = listen_socket(address)
        self._listener.settimeout(0.2)
        self.address: Address = address if isinstance(address, str) else self._listener.getsockname()[:2]
        try:
            self._threads.spawn("gradengine-accept", self._accept)
            self._threads.spawn("gradengine-watch", self._watch)
        except BaseException:
            self.close()  # else the accepting thread would keep the address
            raise

    @property
    def url(self) -> str:
        """The address for workers."""
        return url_of(self.address)

    def serve(self) -> None:
        """Wait until all workers have joined and left.

        Raises:
            HandshakeRefused, PeerLost, ProtocolError, DeadlineExceeded: The group failed before all were done.
        """
        group = self.group
        with group.lock:
            group.changed.wait_for(
                lambda: self._closing.is_set() or self._departed == group.world_size or self._failed()
            )
            if self._failed() and group.failure is not None:
                raise group.failure

    def close(self) -> None:
        """Stop; workers that still wait get an error. May be called twice."""
        self.group.fail(PeerLost("the coordinator left the group", do="windows are kept: reconnect or discard()"))
        self._closing.set()
        self._stop_listening()
        for channel in tuple(self._unauthenticated):
            channel.close()
        self._threads.join(_CLOSE_SECONDS)
        for channel in self._channels:
            channel.close()  # a hanging worker never closes its end
        self._threads.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _failed(self) -> bool:
        """Whether the group ended before its workers were done: a rank waits, or has never joined."""
        stall = self.group.coordinator.stall() if self.group.coordinator else None
        return self.group.failure is not None and (stall is None or bool(stall.waiting))

    def _stop_listening(self) -> None:
        if self._listener.fileno() < 0:
            return  # another server may have the path by now
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which close() alone does not
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or for the moment out of file descriptors
                self._closing.wait(0.05)
                continue
            self._threads.spawn("gradengine-reader", self._serve_connection, connection)

    def _watch(self) -> None:
        """Enforce the timeouts, also if no rank of this process waits."""
        group = self.group
        while not self._closing.wait(min(0.25, group.timeout / 4)) and group.failure is None:
            group.fail_if_late()
        if group.failure is not None:
            group.fail(group.failure)  # the first call may have been interrupted before it had dismissed all

    def _serve_connection(self, connection: socket.socket) -> None:
        channel = Channel(connection, "a new worker")
        self._channels.append(channel)
        try:
            member = self._handshake(channel)
            if member is not None:
                self._threads.spawn("gradengine-writer", member.write_all)
                self._read_all(member)
        finally:
            channel.set_deadline(_CLOSE_SECONDS)
            channel.discard_until_end()
            channel.close()

    def _handshake(self, channel: Channel) -> _RemoteMember | None:
        """Admit a worker, or send a refusal. Only one with the token can make the group fail."""
        self._unauthenticated.add(channel)
        try:
            channel.set_deadline(_HANDSHAKE_SECONDS)
            hello, _ = channel.expect(Hello)
            if self._job in {None, hello.job}:
                self._refuse_untimely(hello)
            challenge = answer_hello(self._token, hello)
            channel.send(challenge)
            join, table = channel.expect(Join)
            check_proof(self._token, hello, challenge, join)
            refuse_other_job(hello, self._job_after(hello))
            return self._admit(channel, hello, join, table)
        except GradientError as refusal:
            self._unauthenticated.discard(channel)  # so that close() does not cut the refusal off
            _send_refusal(channel, refusal)
            return None
        finally:
            self._unauthenticated.discard(channel)

    def _job_after(self, hello: Hello) -> str:
        """The group's job, if necessary that of the first authenticated worker."""
        with self.group.lock:
            if self._job is None:
                self._job = hello.job
            return self._job

    def _refuse_untimely(self, hello: Hello) -> None:
        """Refuse a worker that reconnects before this group has noticed its loss or has ended; it tries again."""
        group = self.group
        with group.lock:
            if group.is_complete or isinstance(group.failure, PeerLost):
                known = group.failure is None and hello.rank in group.members
                raise HandshakeRefused(
                    f"rank {hello.rank} has joined already" if known else f"this group has ended ({group.failure})",
                    do="give each worker its own rank" if known else "start rank 0 again",
                )

    def _admit(self, channel: Channel, hello: Hello, join: Join, table: bytes) -> _RemoteMember:
        group = self.group
        try:
            check_hello(hello, group.world_size)
            layout = self._checked_layout(hello.rank, table)
        except ExchangeError as refusal:
            if not group.is_complete:
                group.fail(refusal)
            raise
        channel.peer = f"rank {hello.rank}"
        channel.set_deadline(None)
        member = _RemoteMember(hello.rank, progress_of(join), channel, group)
        group.admit(member, layout)
        return member

    def _checked_layout(self, rank: int, table: bytes) -> GradientLayout:
        try:
            layout = layout_from_table(table)
        except LayoutMismatch as fault:
            raise ProtocolError(f"rank {rank}: {fault}") from None
        if layout.nbytes > self._max_arena_bytes:
            raise HandshakeRefused(
                f"the layout of rank {rank} is larger than this server takes",
                got=f"{layout.nbytes} bytes",
                expected=f"at most {self._max_arena_bytes}",
            )
        return layout

    def _read_all(self, member: _RemoteMember) -> None:
        try:
            while True:
                member.read_one()
        except ExchangeError as failure:
            with self.group.lock:
                self._departed += 1
                self.group.fail(failure)
        except BaseException as fault:
            self.group.fail(ExchangeError(f"the coordinator failed while serving rank {member.rank} ({fault!r})"))
            raise


@final
class _RemoteMember(Member):
    """A rank of another process: received gradients wait in a few buffers, sums in a queue."""

    def __init__(self, rank: int, progress: Progress, channel: Channel, group: Group) -> None:
        super().__init__(rank, progress)
        self._channel, self._group = channel, group
        self._outgoing: queue.SimpleQueue[tuple[Message, bytes | memoryview] | None] = queue.SimpleQueue()
        self._unsent = 0
        self._arrived: deque[Float32] = deque()
        self._summing: Float32 | None = None
        self._free: list[Float32] = []

    def contribution(self, bucket: Bucket) -> Float32:
        self._summing = self._arrived.popleft()
        return self._summing[: bucket.stop - bucket.start]

    def deliver(self, step: int, bucket: Bucket, total: Float32) -> None:
        with self._group.lock:
            if self._summing is not None:
                self._free.append(self._summing)
                self._summing = None
            self._unsent += 1
            self._outgoing.put((Sum(step, *wire_key(bucket)), total.data))
            self._group.changed.notify_all()

    def end_step(self, step: int, bad: Sequence[NonFiniteValue]) -> None:
        rows = msgpack.packb([[value.rank, value.index, value.value] for value in bad])
        self._outgoing.put((Verdict(step=step), rows))
        self.progress.next_step()

    def deliver_gathered(self, parts: list[bytes]) -> None:
        self._outgoing.put((Gathered(), msgpack.packb(parts)))

    def welcome(self, summed: int) -> None:
        size = max((bucket.stop - bucket.start for bucket in self._group.buckets), default=0)
        self._free = [np.empty(size, np.float32) for _ in range(BUCKETS_IN_FLIGHT)]
        self._outgoing.put((Welcome(summed, self._group.bucket_bytes, self.progress.membership.group), b""))

    def dismiss(self, failure: ExchangeError) -> None:
        self._outgoing.put((Abort(error=type(failure).__name__), str(failure).encode()))
        self._outgoing.put(None)

    @property
    def has_all(self) -> bool:
        return self._unsent == 0

    def read_one(self) -> None:
        """Receive and handle the worker's next message."""
        message, payload_bytes = self._channel.receive()
        if isinstance(message, Gradient):
            self._read_gradient(message, payload_bytes)
        elif isinstance(message, Gather):
            self._group.gather(self.rank, self._channel.receive_bytes(message, payload_bytes))
        else:
            raise self._channel.unexpected(message, "a gradient")

    def write_all(self) -> None:
        """Send queued messages until the group ends."""
        try:
            while (item := self._outgoing.get()) is not None:
                self._channel.send(*item)
                if isinstance(item[0], Sum):
                    with self._group.lock:
                        self._unsent -= 1
                        self._group.note_progress()
        except PeerLost as failure:
            self._group.fail(failure)
        self._channel.finish_sending()

    def _read_gradient(self, message: Gradient, payload_bytes: int) -> None:
        group = self._group
        with group.lock:
            if not group.buckets:
                raise ProtocolError(f"rank {self.rank} sent a gradient", got=message, expected="none: nothing to sum")
            step, index = group.opened().bucket_of(group.opened().expects(self.rank))
            bucket = group.buckets[index]
            refuse_other_bucket(self._channel.peer, message, payload_bytes, step, bucket)
        group.wait_until(lambda: bool(self._free))
        memory = self._free.pop()
        self._channel.receive_into(memory[: bucket.stop - bucket.start].data)
        self._arrived.append(memory)
        group.contribute(self.rank, 1)


def _send_refusal(channel: Channel, refusal: GradientError) -> None:
    try:
        channel.send(Refused(), str(refusal).encode())
    except PeerLost:
        return  # it left before the refusal
    channel.finish_sending()
