"""Connects ranks over sockets, each with each other, or all with one server; without a thread.

Rank 0 listens at an address that all know. Each other rank calls it, both prove that they have the secret, and then the
rank listens too and tells rank 0 its address. When all have called, rank 0 sends each the list of these addresses and
the group's random identifier; each rank calls those between 0 and itself, accepts those above it, and each pair proves
itself again.

A server listens as rank 0 does, and each rank calls it; when all have called, it tells them so, and that is all.

Over TCP, on a system that has Unix sockets without a path, a rank also listens at such a socket, under a random name,
which it tells its callers. A caller that reaches it there is on the same host (in a container with its own network it
is not), and uses that connection. If all reached rank 0 so, their link is one for ranks of one host.

The rank that is called proves itself last, and only to a caller that has: a stranger learns a nonce and a name.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Container
from functools import partial
from typing import TypeVar, final

from gradengine.arguments import checked_rank, said
from gradengine.arrays.shared import has_shared_memory
from gradengine.errors import CallerError, ExchangeError, HandshakeRefused, NotCopied, PeerLost, ProtocolError
from gradengine.exchange.addresses import (
    RETRY_SECONDS,
    Address,
    checked_address,
    connect_once,
    refuse_long_path,
    refuse_other_user,
    shown,
    url_of,
)
from gradengine.exchange.handshake import (
    check_hello,
    is_same_proof,
    new_nonce,
    proof,
    refuse_bad_job,
    refuse_bad_secret,
    refuse_other_job,
    refuse_other_proof,
)
from gradengine.exchange.line import Line
from gradengine.exchange.links.shared_memory import SharedMemoryLink
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.listener import Listener, is_name, is_nameless, nameless
from gradengine.exchange.reach import (
    address_told,
    addresses_of,
    chosen_link,
    own_host,
    refuse_other_link,
    refuse_out_of_reach,
)
from gradengine.exchange.rendezvous import LOOPBACK, is_loopback
from gradengine.exchange.tls import HASH_BYTES, Certificates, reason_of, refusal_of, warn_once
from gradengine.exchange.wire import GROUP_BYTES, Abort, Hello, Listening, Members, Nonce, Proof, Refused

T = TypeVar("T")
logger = logging.getLogger("gradengine.exchange")  # who joins, and who is refused

_STRANGERS = 64  # may be connected at a time, besides one for each rank; for a further one the oldest is closed
_GRACE_SECONDS = 5.0
_LOG_SECONDS = 1.0  # between two lines about refusals
_LOOK_SECONDS = 0.1  # until a server that waits looks whether it is to end
_LONGEST_SECONDS = 1e6  # of a wait: a poll's milliseconds are a C int
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@final
class Meeting(NotCopied, instead="connect in the process that steps"):
    """The means by which one rank joins its group; rank 0 listens from now on, so that others may call before it waits.

    Args:
        address: Rank 0's address, or the server's.
        rank: This rank.
        world_size: Ranks in the group.
        secret: The group's secret.
        job: The job's name.
        link: One of `LINKS`, for all ranks; None on rank 0: the best for the ranks' hosts; on other ranks: rank 0's.
        is_served: Whether a server, not a rank, listens at the address; then `link` must be None.
        tls: Certificates by which connections over TCP are encrypted; None for plain ones.

    Attributes:
        url: The address, on rank 0 with the actual port.
        shares_memory: Whether, as far as is known before the ranks connect, the link will be over shared memory, where
            arenas in shared memory are read in place.

    Raises:
        CallerError: An argument is out of range, or rank 0 cannot listen there.
        DeviceUnavailable: `link` is "shared_memory", and this system has none.
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        world_size: int,
        *,
        secret: str | None = None,
        job: str = "",
        link: str | None = None,
        is_served: bool = False,
        tls: Certificates | None = None,
    ) -> None:
        self.rank, self.world_size = checked_rank(rank, world_size)
        refuse_bad_secret(secret)
        refuse_bad_job(job)
        self._secret, self._job, self._at = secret, job, checked_address(address)
        self._is_served, self._link, self._tls = is_served, link, tls
        refuse_other_link(link, self._at)
        if is_served and link is not None:
            what = "connect with served=True takes no link: each rank has one connection, with the server"
            raise CallerError(what, do="leave link out")
        is_here = isinstance(self._at, str) or self._at[0] in LOOPBACK
        # Any user of this host may call a Unix socket without a path, and needs no certificate for it.
        is_safe = tls is None or bool(secret) or isinstance(self._at, str)
        is_best = link is None and is_here and self.world_size > 1 and not is_served and has_shared_memory() and is_safe
        self.shares_memory = link == "shared_memory" or is_best
        if isinstance(self._at, str) and self.world_size > 1 and not is_served:
            refuse_long_path(f"{self._at}.{self.world_size - 1}")
        self._listener: Listener | None = None
        if self.rank == 0 and not is_served:
            self._listener = Listener(self._at, secret, is_beside=link != "tcp" and is_safe)
        self.url = url_of(self._at if self._listener is None else self._listener.address)

    def link(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> SocketLink:
        """Connect this rank with all others, or the server, and return its link; call it once.

        Args:
            timeout: Seconds for all of this.
            clock: The clock of all seconds here.

        Raises:
            HandshakeRefused: Ranks have another secret, job or world size, or the same rank; or cannot reach each
                other; or TLS fails between them.
            PeerLost: Not all ranks joined in time; the error names the missing ones.
            ProtocolError: The process that answers at the address is not a rank.
        """
        joining = _Joining(self.rank, self.world_size, self._secret, self._job, timeout, clock, self._link, self._tls)
        if self._is_served:
            return joining.link(partial(joining.find_server, self._at))
        if self._listener is not None:
            return joining.link(partial(joining.host, self._listener))
        return joining.link(partial(joining.join, self._at))

    def close(self) -> None:
        """Stop listening; may be called twice."""
        if self._listener is not None:
            self._listener.close()


def link_to_ranks(
    listener: Listener,
    world_size: int,
    *,
    secret: str | None,
    job: str | None,
    timeout: float,
    is_closing: Callable[[], bool],
    gives_up: Callable[[float], bool] = lambda _: False,
    clock: Callable[[], float] = time.monotonic,
    tls: Certificates | None = None,
) -> SocketLink:
    """A server's link to the ranks of its next group; returns when all have joined.

    Args:
        listener: The server's listener, which goes on listening.
        world_size: Ranks in the group.
        secret: The group's secret.
        job: The job's name; None for that of the first rank that calls.
        timeout: Seconds that the first rank waits for the others.
        is_closing: Called while this waits for ranks; returns whether the server ends.
        gives_up: Called while no rank is there, with the time since when; returns whether the wait for the first ends.
        clock: The clock of all seconds here.
        tls: As for `Meeting`.

    Raises:
        PeerLost: As `Meeting.link`; or the server ends.
        HandshakeRefused: A rank with the secret has another world size.
    """
    joining = _Joining(world_size, world_size, secret, job, timeout, clock, tls=tls)
    joining.is_closing, joining.gives_up = is_closing, gives_up
    return joining.link(partial(joining.host, listener))


@final
class _Joining:
    """One rank's, or the server's, connecting to its group; the server's number is the world size."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        secret: str | None,
        job: str | None,
        timeout: float,
        clock: Callable[[], float],
        link: str | None = None,
        tls: Certificates | None = None,
    ) -> None:
        self._rank, self._world_size, self._secret, self._given_job, self._tls = rank, world_size, secret, job, tls
        self._timeout, self._clock, self._link = timeout, clock, link  # rank 0's is that of all from `host`, `join` on
        self._is_server = rank == world_size
        self._who = "the server" if self._is_server else f"rank {rank}"
        self.is_closing: Callable[[], bool] = lambda: False
        self.gives_up: Callable[[float], bool] = lambda _: False
        self._begin()
        self._group = b""  # while ranks meet at rank 0
        self._way = "", ""  # this rank's host and rank 0's, as a connection over TCP has them
        self.lines: dict[int, Line] = {}  # to the ranks that have proved who they are
        self._strangers: list[Line] = []  # who have not, in the order in which they came
        self._urls: dict[int, str] = {}  # where those ranks listen, at rank 0
        self._listener: Listener | None = None
        self._selector = selectors.DefaultSelector()
        self._aim = ""  # of the rank that calls, for the error at the deadline
        self._called = ""  # who was called last
        self._logged_at, self._unlogged = -math.inf, 0  # when a refusal was logged, and how many were not since
        self._refused: ExchangeError | None = None  # the last of those that concern one connection alone
        self._failure: ExchangeError | None = None  # one that ends the group

    def _begin(self) -> None:
        """Start without any rank; a server waits without a deadline, and may be of any job."""
        self._job, self._began = self._given_job, self._clock()
        self._deadline = math.inf if self._is_server else self._began + self._timeout

    def link(self, join: Callable[[], None]) -> SocketLink:
        """The link over the lines that `join` makes."""
        try:
            join()
            self.end()
            self._warn_in_plain()
            kind = SharedMemoryLink if self._link == "shared_memory" else SocketLink
            hub = self._world_size if self._is_server or self._world_size in self.lines else None
            return kind(self._rank, {peer: line.socket for peer, line in self.lines.items()}, hub=hub)
        except BaseException:
            for line in self.lines.values():
                line.socket.close()
            self.end()
            raise

    def host(self, listener: Listener) -> None:
        """Play rank 0's part, or a server's."""
        met: Container[int]
        if self._is_server:
            others, met = range(self._world_size), self.lines
        else:
            self._listener, others, met = listener, range(1, self._world_size), self._urls
        try:
            self._accept(listener, lambda: [rank for rank in others if rank not in met])
            urls = [self._urls[rank] for rank in sorted(self._urls)]  # at a server nobody says any
            refuse_out_of_reach(urls)
            self._link = self._best_link()
        except ExchangeError as failure:
            for line in self.lines.values():
                line.leave(Abort(type(failure).__name__, str(failure)))
            raise
        self._group = secrets.token_bytes(GROUP_BYTES)
        for line in self.lines.values():
            line.left = self._left  # long lists may have to wait until they are read
            with contextlib.suppress(OSError):  # whoever is lost from now on is missed by the link's transfers
                line.say(Members(self._group, self._link, urls))

    def join(self, address: Address) -> None:
        """Play the part of each other rank."""
        listener, addresses = self._retried(partial(self._meet, address))
        # All calls come before any is accepted, and go to lower ranks alone: rank 1 makes none and accepts at once, so
        # rank 2's call is answered and rank 2 accepts, and so on. No ranks wait for each other in a circle.
        for rank in range(1, self._rank):
            self._retried(partial(self._call, rank, addresses[rank - 1]))
        above = range(self._rank + 1, self._world_size)
        self._accept(listener, lambda: [rank for rank in above if rank not in self.lines])

    def find_server(self, address: Address) -> None:
        """Play the part of each rank in a group with a server."""
        do = "start the server and all ranks, and check its host and port; it serves one group at a time"
        self._retried(partial(self._meet_server, address), do)

    def end(self) -> None:
        """Close all but the lines."""
        if self._unlogged:
            logger.info("%s has refused %d others, at last: %s", self._who, self._unlogged, self._refused)
        for stranger in self._strangers:
            stranger.socket.close()
        self._selector.close()
        if self._listener is not None:
            self._listener.close()

    def _warn_in_plain(self) -> None:
        """Log once in a process that what this rank sends to other hosts is not encrypted."""
        if self._tls is None and not all(line.is_local or is_loopback(line.origin) for line in self.lines.values()):
            warn_once("gradients are sent to other hosts in plain: pass tls= to encrypt them (docs/tls.md)")

    # ---- as the rank that calls ----

    def _retried(self, attempt: Callable[[], T], do: str = "start all ranks, and check host and port of rank 0") -> T:
        """Repeat an attempt until its connection is not lost, and return its value: ranks start in any order."""
        while True:
            try:
                return attempt()
            except OSError as fault:
                if (refusal := refusal_of(fault, self._called)) is not None:
                    raise refusal from None
                reason = reason_of(fault)
            if self._left() < RETRY_SECONDS:
                raise PeerLost(f"{self._who} could not {self._aim} within {self._timeout:g} s ({reason})", do=do)
            time.sleep(RETRY_SECONDS)

    def _meet(self, address: Address) -> tuple[Listener, list[Address]]:
        """Call rank 0, listen, and wait for the others' addresses."""
        try:
            line = self._call(0, address)
            own = f"{address}.{self._rank}" if isinstance(address, str) else (own_host(address[0], self._way[0]), 0)
            listener = self._listener = Listener(own, self._secret, is_beside=line.is_local)
            line.say(Listening(url_of(listener.address)))
            self._aim = "join the group of rank 0"
            members = line.expect(Members)
            self._group, self._link = members.group, chosen_link(members.link, self._link, self._rank)
            addresses = addresses_of(members.urls, self._world_size - 1, self._way[1])
        except BaseException:
            if self._listener is not None:
                self._listener.close()
            if 0 in self.lines:
                self.lines.pop(0).socket.close()
            raise
        return listener, addresses

    def _meet_server(self, address: Address) -> None:
        """Call the server, and wait until all have."""
        line = self._call(self._world_size, address)
        # The server knows who is missing, and is to say so before this rank's own time is over.
        line.left = lambda: self._left() + _GRACE_SECONDS
        self._aim = "join the group of the server"
        try:
            line.expect(Members)
        except BaseException:
            self.lines.pop(self._world_size).socket.close()
            raise

    def _call(self, rank: int, address: Address, called_hash: bytes = b"") -> Line:
        """A line to a rank or the server, after both have proved themselves."""
        who = self._called = "the server" if rank == self._world_size else f"rank {rank}"
        if not is_nameless(address):
            self._aim = f"connect to {who} at {shown(address)}"
        connection = connect_once(address, max(RETRY_SECONDS, self._left()))
        try:
            refuse_other_user(connection, self._secret)
            connection = self._encrypted(connection, is_called=False)
            line = Line(connection, who, self._left)
            line.called_hash = called_hash
            hello = Hello(self._rank, self._world_size, self._job or "", new_nonce())
            line.say(hello)
            nonce = line.expect(Nonce)
            if not line.is_local:
                self._way = connection.getsockname()[0], connection.getpeername()[0]
            if nonce.beside and (near := self._call_beside(rank, nonce.beside, line)) is not None:
                connection.close()
                return near
            line.say(Proof(self._proof(line, "caller", hello, nonce.nonce, rank)))
            answer = line.expect(Proof)
            expected = self._proof(line, "called", hello, nonce.nonce, rank)
            refuse_other_proof(answer.proof, expected, line.who, is_encrypted=bool(line.channel))
            self.lines[rank] = line
        except BaseException:
            connection.close()
            raise
        return line

    def _call_beside(self, rank: int, name: str, line: Line) -> Line | None:
        """A line over the Unix socket of the rank that is called; None if none has that name here: it is elsewhere.

        After any other failure, such as a full backlog, `_retried` begins again.
        """
        if line.is_local or not is_name(name):
            raise ProtocolError(f"{line.who} sent an invalid name of a Unix socket", got=said(name))
        try:
            return self._call(rank, nameless(name), line.channel[-HASH_BYTES:])
        except ConnectionRefusedError:
            if self._group and self._link != "tcp":  # rank 0 has seen that all are on one host
                raise
            return None

    # ---- as the rank that is called ----

    def _accept(self, listener: Listener, missing: Callable[[], list[int]]) -> None:
        """Accept ranks until none is missing; a caller that sends nothing holds up nobody."""
        for each in (listener.socket, *listener.nearby):
            self._selector.register(each, selectors.EVENT_READ, each)
        while ranks := missing():
            if self.is_closing():
                raise PeerLost("the server was closed", do="reconnect on all ranks")
            if self._left() <= 0 or (not self.lines and self.gives_up(self._began)):
                raise self._late(ranks)
            for key, _ in self._selector.select(min(self._left(), _LOOK_SECONDS if self._is_server else math.inf)):
                if not isinstance(key.data, Line):
                    self._take_in(key.data, listener.beside)
                elif key.data.socket.fileno() >= 0:  # it may have been one stranger too many just now
                    self._hear(key.data)
            if self._failure is not None:
                raise self._failure

    def _take_in(self, listener: socket.socket, beside: str) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as fault:  # for most reasons the caller's: it is gone again
            if fault.errno in _FULL:
                what = f"{self._who} can have no more connections ({fault.strerror})"
                self._refused = ExchangeError(what, do="raise the limit: ulimit -n")
                time.sleep(RETRY_SECONDS)
            return
        try:
            connection = self._encrypted(connection, is_called=True)
            line = Line(connection, "a caller")
            line.beside = "" if line.is_local else beside
            line.called_hash = self._tls.own_hash if self._tls and line.is_local and beside else b""
            self._selector.register(connection, selectors.EVENT_READ, line)
            self._strangers.append(line)
        except BaseException as fault:
            connection.close()
            if not isinstance(fault, OSError):
                raise
        if len(self._strangers) > _STRANGERS + self._world_size:
            self._drop(self._strangers[0])

    def _hear(self, line: Line) -> None:
        """Answer a line's next message, if it is complete."""
        try:
            self._answer(line)
        except BlockingIOError:
            pass
        except OSError as fault:
            self._dismiss(line, refusal_of(fault, line.who))
        except ExchangeError as refusal:
            self._dismiss(line, refusal)

    def _answer(self, line: Line) -> None:
        message = line.hear(line.awaited)
        if isinstance(message, Hello):
            refuse_other_user(line.socket, self._secret)
            line.hello, line.nonce, line.awaited = message, new_nonce(), (Proof,)
            line.say(Nonce(line.nonce, line.beside))
        elif isinstance(message, Proof):
            self._admit(line, line.hello, message)
        elif isinstance(message, Listening):
            address_told(message.url)
            self._urls[line.hello.rank], line.awaited = message.url, ()

    def _admit(self, line: Line, hello: Hello, given: Proof) -> None:
        line.who = f"rank {hello.rank}"
        own, other = (hello.world_size, 0) if self._is_server else (self._rank, hello.world_size)
        if is_same_proof(given.proof, self._proof(line, "caller", hello, line.nonce, other)):
            what = f"{line.who} looks for {'rank 0' if self._is_server else 'a server'} here"
            raise HandshakeRefused(what, do="pass served=True on all ranks if there is a server, else on none")
        expected = self._proof(line, "caller", hello, line.nonce, own)
        refuse_other_proof(given.proof, expected, line.who, is_encrypted=bool(line.channel))
        self._job = hello.job if self._job is None else self._job
        refuse_other_job(hello, self._job)
        try:
            check_hello(hello, self._world_size)
        except HandshakeRefused as refusal:
            self._failure = refusal
            raise
        before = self.lines.get(hello.rank)
        if before is not None and self._group and hello.rank > self._rank and before.has_gone:
            self.lines.pop(hello.rank).socket.close()  # it was let in, and has not heard so
        if hello.rank == self._rank or hello.rank in self.lines:
            raise HandshakeRefused(f"{line.who} has joined already", do="give each process its own rank")
        if self._is_server and not self.lines:
            self._deadline = self._clock() + self._timeout
        line.say(Proof(self._proof(line, "called", hello, line.nonce, own)))
        self.lines[hello.rank], line.awaited = line, () if self._is_server else (Listening,)
        self._strangers.remove(line)
        logger.info("%s: rank %d has joined from %s", self._who, hello.rank, line.origin)
        if self._group:
            self._selector.unregister(line.socket)  # what comes now is the link's

    def _dismiss(self, line: Line, refusal: ExchangeError | None) -> None:
        """Drop a line for a reason of its own, which is kept and logged; None: it was closed there."""
        if refusal is not None:
            self._refused = refusal
            self._log_refused(f"from {line.origin}: {refusal}")
        self._drop(line, refusal)

    def _log_refused(self, why: str) -> None:
        """Log a refusal, but only one a second and how many others there were: strangers may come by the thousand."""
        if self._clock() - self._logged_at < _LOG_SECONDS:
            self._unlogged += 1
            return
        others = f" (and {self._unlogged} others since the last line)" if self._unlogged else ""
        logger.info("%s refuses a connection %s%s", self._who, why, others)
        self._logged_at, self._unlogged = self._clock(), 0

    def _drop(self, line: Line, refusal: ExchangeError | None = None) -> None:
        self._selector.unregister(line.socket)
        if refusal is None:
            line.socket.close()
        else:
            line.leave(Refused(str(refusal)))
        if line in self._strangers:
            self._strangers.remove(line)
        else:  # its rank may come again
            del self.lines[line.hello.rank]
            self._urls.pop(line.hello.rank, None)
            if self._is_server and not self.lines:
                self._begin()

    # ---- both ----

    def _encrypted(self, connection: socket.socket, *, is_called: bool) -> socket.socket:
        """A connection over TLS, if there are certificates and it leaves this host."""
        if self._tls is None or connection.family == socket.AF_UNIX:
            return connection
        return self._tls.encrypted(connection, is_called=is_called)

    def _best_link(self) -> str:
        """The link of all ranks: the one that was asked for, or the best for how they are connected with this one.

        Raises:
            HandshakeRefused: The link needs all ranks on this host, and they are not.
        """
        far = [rank for rank, line in self.lines.items() if not line.is_local]
        best = "tcp" if far or not self.lines else "shared_memory" if has_shared_memory() else "unix"
        if self._is_server:
            return "tcp" if far else "unix"
        if far and self._link not in {None, "tcp"}:
            what = f"link={self._link!r} needs all ranks on the host of rank 0, and in its network namespace"
            raise HandshakeRefused(what, got=f"rank {far[0]} elsewhere", do='pass link="tcp", or None')
        return self._link or best

    def _left(self) -> float:
        return min(self._deadline - self._clock(), _LONGEST_SECONDS)

    def _proof(self, line: Line, role: str, hello: Hello, nonce: bytes, called: int) -> bytes:
        # With the rank that is called, the group and the certificates, or a call could be passed on to another rank, to
        # another group, or by whoever is on the path and has a certificate.
        return proof(self._secret, role, hello, nonce, called, self._group, line.channel)

    def _late(self, ranks: list[int]) -> PeerLost:
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        do = "start all ranks"
        if self._refused is not None:
            do += f" (last refused here: {self._refused})"
        return PeerLost(f"{named} did not join {self._who} within {self._timeout:g} s (join_timeout)", do=do)
