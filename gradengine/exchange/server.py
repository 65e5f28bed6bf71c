"""The server of a group: one thread, which waits for the group's ranks and sums for them, then for the next group's."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, final

from gradengine.arguments import checked_rank, whole_number
from gradengine.errors import ExchangeError, Fixed, GradientError, NotCopied, PeerLost, refuses_renamed
from gradengine.exchange.addresses import RETRY_SECONDS, Address, url_of
from gradengine.exchange.handshake import refuse_bad_job
from gradengine.exchange.hub import Hub
from gradengine.exchange.interface import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_JOIN_TIMEOUT,
    DEFAULT_TIMEOUT,
    checked_seconds,
)
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.listener import Listener
from gradengine.exchange.mesh import link_to_ranks
from gradengine.exchange.tls import certificates_of
from gradengine.threads import Bell

if TYPE_CHECKING:
    from typing_extensions import Self

_LOOK_SECONDS = 0.1  # until `serve` looks again
_CLOSE_SECONDS = 60.0  # for the thread, which looks several times a second whether it is to end


@final
class ServedWorker(NamedTuple):
    """What a server knows of a worker; counts are of bytes since it joined."""

    rank: int
    host: str
    received: int
    sent: int


@final
class GradientServer(Fixed, NotCopied, instead="make one in the process that serves"):
    """Receives every worker's gradients, sums them in rank order and sends the sums back; it contributes none itself.

    It has memory only for the few shares in flight, and serves one group after another until it is closed.

    Args:
        world_size: Workers in a group.
        address: (host, port), port 0 for any free one; or the path of a Unix socket, for this user alone.
        secret: The group's secret, of at least 16 characters; required beyond loopback.
        job: The job's name; a worker of another job is refused, without any effect on the group. None: in each group
            the job of the first worker that joins, since the server may have been started outside of the job.
        timeout: Seconds without any progress after which a worker that others wait for is given up.
        join_timeout: Seconds that the first worker waits for the others, and `serve` for the first worker.
        bucket_bytes: Bytes that are summed at a time; changes no bit of the result.
        max_arena_bytes: The largest arena of the workers' layout.
        tls: As for `connect`.

    Attributes:
        address: The address, with the actual port.

    Raises:
        CallerError: An argument is out of range, the address cannot be bound, or it is beyond loopback and there is no
            secret; or a file of TLS cannot be used.

    Example:
        >>> with GradientServer(world_size=2) as server:
        ...     server.url.startswith("tcp://127.0.0.1:")
        True
    """

    @refuses_renamed
    def __init__(
        self,
        world_size: int,
        address: Address = ("127.0.0.1", 0),
        *,
        secret: str | None = None,
        job: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        max_arena_bytes: int = 1 << 36,
        tls: str | os.PathLike[str] | None = None,
    ) -> None:
        _, self._world_size = checked_rank(0, world_size)
        if job is not None:
            refuse_bad_job(job)
        self._secret, self._job, self._tls = secret, job, certificates_of(tls)
        self._timeout = checked_seconds("timeout", timeout)
        self._join_timeout = checked_seconds("join_timeout", join_timeout)
        self._bucket_bytes = whole_number("bucket_bytes", bucket_bytes, 4)
        self._most_bytes = whole_number("max_arena_bytes", max_arena_bytes, 1)
        self._is_closing = False
        self._ended: deque[GradientError | None] = deque(maxlen=1)  # how the last group did, where nobody was told
        self._waits_since = math.inf  # in `serve`
        self._group: tuple[SocketLink, Hub] | None = None  # once it has joined
        self._news = Bell()
        self._listener = Listener(address, secret)
        self.address = self._listener.address
        self._thread = threading.Thread(target=self._run, name="gradengine-server", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._is_closing = True
            self._listener.close()
            raise

    @property
    def url(self) -> str:
        """The URL for the workers' `connect`."""
        return url_of(self.address)

    @property
    def step(self) -> int | None:
        """The number of the group's open step; None before all workers have joined."""
        return None if self._group is None else self._group[1].step

    @property
    def workers(self) -> list[ServedWorker]:
        """The workers of the group that is served, by rank; none before all have joined."""
        return [] if self._group is None else [ServedWorker(*each) for each in self._group[0].traffic()]

    def serve(self) -> None:
        """Wait until all workers of one group have joined and left.

        Raises:
            HandshakeRefused, PeerLost, ProtocolError, DeadlineExceeded: The group failed before all were done, or
                nobody came for `join_timeout`.
        """
        self._waits_since = time.monotonic()
        try:
            while not self._ended:
                if self._is_closing:
                    raise PeerLost("the server was closed", do="make another one")
                self._news.wait(_LOOK_SECONDS)
        finally:
            self._waits_since = math.inf
        failure = self._ended.popleft()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Stop; workers that still wait get an error. May be called twice."""
        self._is_closing = True
        self._thread.join(_CLOSE_SECONDS)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- its thread ----

    def _run(self) -> None:
        while not self._is_closing:
            failure = self._serve_one()
            if not self._is_closing:
                self._ended.append(failure)
                self._news.ring()
                if failure is not None:
                    time.sleep(RETRY_SECONDS)  # it may be one that comes at once again, as of too few descriptors

    def _closes(self) -> bool:
        return self._is_closing

    def _gives_up(self, since: float) -> bool:
        """Whether nobody has come for too long, and somebody waits to hear of it."""
        return time.monotonic() - max(since, self._waits_since) > self._join_timeout

    def _serve_one(self) -> GradientError | None:
        """Serve one group; returns its error if it failed."""
        try:
            link = link_to_ranks(
                self._listener,
                self._world_size,
                secret=self._secret,
                job=self._job,
                timeout=self._join_timeout,
                is_closing=self._closes,
                gives_up=self._gives_up,
                tls=self._tls,
            )
            hub = Hub(link, timeout=self._timeout, bucket_bytes=self._bucket_bytes, most_bytes=self._most_bytes)
            self._group = link, hub
            hub.serve(self._closes)
        except GradientError as failure:
            return failure
        except BaseException as fault:  # noqa: BLE001  (raised where somebody waits, on another thread)
            failed = ExchangeError("the server failed", got=repr(fault))
            failed.__cause__ = fault
            return failed
        finally:
            self._group = None
        return None
