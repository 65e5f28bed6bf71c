"""Connects ranks over sockets, each with each other, or all with one server; without a thread.

Rank 0 listens at an address that all know. Each other rank calls it, both prove that they have the secret, and then the
rank listens too and tells rank 0 its address and its host. When all have called, rank 0 sends each the list of these
addresses and the group's random identifier; each rank calls those between 0 and itself, accepts those above it, and
each pair proves itself again. If all called over TCP from rank 0's host, rank 0 sends them the path of a Unix socket
instead, and all meet again there.

A server listens as rank 0 does, and each rank calls it; when all have called, it tells them so, and that is all.

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

from gradengine.arguments import checked_rank
from gradengine.arrays.shared import has_shared_memory
from gradengine.errors import CallerError, ExchangeError, HandshakeRefused, NotCopied, PeerLost
from gradengine.exchange.addresses import (
    RETRY_SECONDS,
    Address,
    Listener,
    address_told,
    addresses_of,
    checked_address,
    chosen_link,
    connect_once,
    is_loopback,
    nearer_listener,
    own_host,
    refuse_long_path,
    refuse_other_link,
    refuse_other_user,
    refuse_out_of_reach,
    shown,
    this_host,
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
from gradengine.exchange.tls import Certificates, reason_of, refusal_of, warn_once
from gradengine.exchange.wire import GROUP_BYTES, Abort, Hello, Listening, Members, Moved, Nonce, Proof, Refused

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
        ports: The ports at which this rank may listen over TCP, if its address names none; None for all.

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
        ports: range | None = None,
    ) -> None:
        self.rank, self.world_size = checked_rank(rank, world_size)
        refuse_bad_secret(secret)
        refuse_bad_job(job)
        self._secret, self._job, self._at = secret, job, checked_address(address)
        self._is_served, self._link, self._tls, self._ports = is_served, link, tls, ports
        refuse_other_link(link, self._at)
        if is_served and link is not None:
            what = "connect with served=True takes no link: each rank has one connection, with the server"
            raise CallerError(what, do="leave link out")
        is_here = isinstance(self._at, str) or is_loopback(self._at[0])
        is_best = link is None and is_here and self.world_size > 1 and not is_served and has_shared_memory()
        self.shares_memory = link == "shared_memory" or is_best
        if isinstance(self._at, str) and self.world_size > 1 and not is_served:
            refuse_long_path(f"{self._at}.{self.world_size - 1}")
        self._listener: Listener | None = None
        if self.rank == 0 and not is_served:
            self._listener = Listener(self._at, secret, ports)
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
        secret, job, link, ports = self._secret, self._job, self._link, self._ports
        joining = Joining(self.rank, self.world_size, secret, job, timeout, clock, link, self._tls, ports)
        if self._is_served:
            return joining.link(partial(joining.find_server, self._at))
        if self._listener is not None:
            return joining.link(partial(joining.host, self._listener))
        return joining.link(partial(joining.join, self._at))

    def close(self) -> None:
        """Stop listening; may be called twice."""
        if self._listener is not None:
            self._listener.close()


@final
class Joining:
    """Connects one rank, or the server, to its group; the server's number is the world size.

    Args:
        rank: The rank; so are world_size, secret and job as for `Meeting`. A job of None is that of the first caller.
        timeout: Seconds for all of this; a server's begin with the first rank.
        clock: The clock of all seconds here.
        link: As for `Meeting`, like tls and ports.

    Attributes:
        is_closing: Called while a server waits; returns whether it ends.
        gives_up: Called while no rank is there, with the time since when; returns whether the wait for the first ends.
        lines: By rank, the connections with those that have proved who they are.
    """

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
        ports: range | None = None,
    ) -> None:
        self._rank, self._world_size, self._secret, self._given_job, self._tls = rank, world_size, secret, job, tls
        self._ports = ports
        self._timeout, self._clock, self._link = timeout, clock, link  # rank 0's is that of all from `host`, `join` on
        self._is_server = rank == world_size
        self._who = "the server" if self._is_server else f"rank {rank}"
        self.is_closing: Callable[[], bool] = lambda: False
        self.gives_up: Callable[[float], bool] = lambda _: False
        self._begin()
        self._group = b""  # while ranks meet at rank 0
        self.lines: dict[int, Line] = {}
        self._strangers: list[Line] = []  # who have not, in the order in which they came
        self._told: dict[int, Listening] = {}  # where those ranks listen, at rank 0
        self._listener: Listener | None = None
        self._selector = selectors.DefaultSelector()
        self._aim = ""  # of the rank that calls, for the error at the deadline
        self._called = ""  # who was called last
        self._was_let_in = False  # by rank 0 or the server, once at least
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
        met: Container[int] = self.lines
        others = range(self._world_size)
        if not self._is_server:
            self._listener, others, met = listener, range(1, self._world_size), self._told
        try:
            self._accept(listener, lambda: [rank for rank in others if rank not in met])
            urls = [self._told[rank].url for rank in sorted(self._told)]  # at a server no rank says any
            refuse_out_of_reach(urls)
            nearer = self._nearer(listener)
        except ExchangeError as failure:
            for line in self.lines.values():
                line.leave(Abort(type(failure).__name__, str(failure)))
            raise
        if nearer is not None:
            self._move(listener, nearer)
            self.host(nearer)
            return
        is_at_path = isinstance(listener.address, str)
        best = "unix" if self._is_server or not has_shared_memory() else "shared_memory"
        self._link = (self._link or best) if is_at_path else "tcp"
        self._group = secrets.token_bytes(GROUP_BYTES)
        for line in self.lines.values():
            line.left = self._left  # long lists may have to wait until they are read
            with contextlib.suppress(OSError):  # whoever is lost from now on is missed by the link's transfers
                line.say(Members(self._group, self._link, urls))

    def _nearer(self, listener: Listener) -> Listener | None:
        """A listener at a Unix socket, if all ranks have called over TCP and are on this host; None if they stay there.

        Raises:
            HandshakeRefused: The link needs all ranks on this host, or such a socket, and there is none.
        """
        if isinstance(listener.address, str) or self._link == "tcp" or not self._told:
            return None
        if far := [rank for rank, told in self._told.items() if told.host != this_host()]:
            if self._link is None:
                return None
            what = f"link={self._link!r} needs all ranks on the host of rank 0, and in its namespaces"
            raise HandshakeRefused(what, got=f"rank {far[0]} elsewhere", do='pass link="tcp", or None')
        try:
            self._listener = nearer_listener(self._secret)
        except CallerError as fault:
            if self._link is not None:
                raise HandshakeRefused(str(fault)) from None
            logger.warning("ranks of one host stay at TCP: %s", fault)
            return None
        return self._listener

    def _move(self, listener: Listener, nearer: Listener) -> None:
        """Send all ranks the path at which they meet again, and leave the first address."""
        for line in self.lines.values():
            with contextlib.suppress(OSError):  # a rank that is lost does not come there
                line.say(Moved(url_of(nearer.address)))
        for line in [*self.lines.values(), *self._strangers]:
            self._drop(line)
        listener.close()

    def join(self, address: Address) -> None:
        """Play the part of each other rank."""
        addresses: list[Address] | Address = address
        while not isinstance(addresses, list):  # ranks of one host are sent to a path, to meet again
            listener, addresses = self._retried(partial(self._meet, addresses))
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
                if (refusal := self._refusal_of(fault)) is not None:
                    raise refusal from None
                reason = reason_of(fault)
            if self._left() < RETRY_SECONDS:
                raise PeerLost(f"{self._who} could not {self._aim} within {self._timeout:g} s ({reason})", do=do)
            time.sleep(RETRY_SECONDS)

    def _refusal_of(self, fault: OSError) -> ExchangeError | None:
        """The error after which another attempt would end in the same way; None if it may succeed."""
        if isinstance(fault, PermissionError):
            what = f"{self._who} may not {self._aim} ({reason_of(fault)})"
            return HandshakeRefused(what, do="check the permissions of the path, or the firewall")
        if self._was_let_in and isinstance(fault, (ConnectionRefusedError, FileNotFoundError)):
            what = f"{self._called} listens no more: it has ended, or has lost {self._who} while ranks joined"
            return PeerLost(what, do="reconnect on all ranks")
        return refusal_of(fault, self._called)

    def _meet(self, address: Address) -> tuple[Listener, list[Address] | Address]:
        """Call rank 0, listen, and wait for the others' addresses, or for the path at which to call it again."""
        try:
            line = self._call(0, address)
            here = line.socket.getsockname()[0] if not isinstance(address, str) else ""
            own = f"{address}.{self._rank}" if isinstance(address, str) else (own_host(address[0], here), 0)
            listener = self._listener = Listener(own, self._secret, self._ports)
            line.say(Listening(url_of(listener.address), this_host()))
            self._aim = "join the group of rank 0"
            answer = line.expect(Members, Moved)
            if isinstance(answer, Moved):
                self._leave()
                return listener, address_told(answer.url)
            assert isinstance(answer, Members)  # noqa: S101  (the only one left)
            link = chosen_link(answer.link, self._link, self._rank, is_local=line.is_local)
            self._group, self._link = answer.group, link
            return listener, addresses_of(answer.urls, self._world_size - 1, line.origin)
        except BaseException:
            self._leave()
            raise

    def _meet_server(self, address: Address) -> None:
        """Call the server, and wait until all have."""
        line = self._call(self._world_size, address)
        # The server knows who is missing, and is to say so before this rank's own time is over.
        line.left = lambda: self._left() + _GRACE_SECONDS
        self._aim = "join the group of the server"
        try:
            line.expect(Members)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """Close what an attempt to meet rank 0 or the server has opened."""
        if self._listener is not None:
            self._listener.close()
        for line in self.lines.values():
            line.socket.close()
        self.lines.clear()

    def _call(self, rank: int, address: Address) -> Line:
        """A line to a rank or the server, after both have proved themselves."""
        who = self._called = "the server" if rank == self._world_size else f"rank {rank}"
        self._aim = f"connect to {who} at {shown(address)}"
        connection = connect_once(address, max(RETRY_SECONDS, self._left()))
        try:
            refuse_other_user(connection, self._secret)
            connection = self._encrypted(connection, is_called=False)
            line = Line(connection, who, self._left)
            hello = Hello(self._rank, self._world_size, self._job or "", new_nonce())
            line.say(hello)
            nonce = line.expect(Nonce)
            line.say(Proof(self._proof(line, "caller", hello, nonce.nonce, rank)))
            answer = line.expect(Proof)
            expected = self._proof(line, "called", hello, nonce.nonce, rank)
            refuse_other_proof(answer.proof, expected, line.who, is_encrypted=bool(line.channel))
            self.lines[rank], self._was_let_in = line, True
        except BaseException:
            connection.close()
            raise
        return line

    # ---- as the rank that is called ----

    def _accept(self, listener: Listener, missing: Callable[[], list[int]]) -> None:
        """Accept ranks until none is missing; a caller that sends nothing holds up nobody."""
        self._selector.register(listener.socket, selectors.EVENT_READ)
        while ranks := missing():
            if self.is_closing():
                raise PeerLost("the server was closed", do="reconnect on all ranks")
            if self._left() <= 0 or (not self.lines and self.gives_up(self._began)):
                raise self._late(ranks)
            for key, _ in self._selector.select(min(self._left(), _LOOK_SECONDS if self._is_server else math.inf)):
                if key.data is None:
                    self._take_in(listener.socket)
                elif key.data.socket.fileno() >= 0:  # it may have been one stranger too many just now
                    self._hear(key.data)
            if self._failure is not None:
                raise self._failure
        self._selector.unregister(listener.socket)

    def _take_in(self, listener: socket.socket) -> None:
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
            line.say(Nonce(line.nonce))
        elif isinstance(message, Proof):
            self._admit(line, line.hello, message)
        elif isinstance(message, Listening):
            address_told(message.url)
            self._told[line.hello.rank], line.awaited = message, ()

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
            self._told.pop(line.hello.rank, None)
            if self._is_server and not self.lines:
                self._begin()

    # ---- both ----

    def _encrypted(self, connection: socket.socket, *, is_called: bool) -> socket.socket:
        """A connection over TLS, if there are certificates and it leaves this host."""
        if self._tls is None or connection.family == socket.AF_UNIX:
            return connection
        return self._tls.encrypted(connection, is_called=is_called)

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
