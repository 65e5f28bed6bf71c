"""Connect ranks over sockets without a thread, either each with each other or all with one server.

All ranks have the address at which rank 0 listens. Each other rank calls it, and both prove that they have the secret.
Then the rank listens too, and sends rank 0 its address and its host. When all have called, rank 0 sends each rank the
list of these addresses and the group's random identifier. Each rank calls the ranks between 0 and itself and accepts
those above it, and each pair proves itself again. If all called over TCP from rank 0's host, rank 0 sends them the path
of a Unix socket instead, and all meet again there.

A server listens as rank 0 does, and each rank calls it. When all have called, it sends them a message, and no more.

The rank that is called proves itself last, and only to a caller that has done so. A stranger receives only a nonce and
a name.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from gradengine.arguments import checked_rank
from gradengine.arrays.shared import has_shared_memory
from gradengine.errors import CallerError, ExchangeError, HandshakeRefused, PeerLost
from gradengine.exchange import addresses
from gradengine.exchange.addresses import Address, Listener, is_loopback, url_of
from gradengine.exchange.handshake import Line, check_hello, new_nonce, proof, refuse_bad_job, refuse_bad_secret
from gradengine.exchange.links.shared_memory import SharedMemoryLink
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.tls import Certificates, hashes_of, reason_of, refusal_of
from gradengine.exchange.wire import Hello

T = TypeVar("T")
logger = logging.getLogger("gradengine.exchange")  # joins and refusals

# Callers that may be connected at a time without a proof, in addition to one for each rank. One more closes the oldest.
_STRANGERS = 64
GRACE_SECONDS = 5.0  # seconds that a rank waits longer than the one that detects the late rank
_LOOK_SECONDS = 0.1  # seconds until a waiting server checks again whether it should end
_LONGEST_SECONDS = 1e6  # longest wait in seconds, because a poll's milliseconds are a C int


@final
class Meeting:
    """The procedure by which one rank, or the server, joins its group.

    Rank 0 listens from the constructor on, so that others may call before it waits.

    Args:
        address: The address of rank 0 or of the server. These two may pass a listener.
        rank: This rank. The server itself passes the world size, with its listener.
        world_size: Ranks in the group.
        secret: The group's secret.
        job: The job's name. None at a server accepts the job of the first caller.
        link: One of `LINKS`, for all ranks. None on rank 0 chooses the best for the ranks' hosts, and on other ranks
            accepts rank 0's.
        is_served: Whether a server, not a rank, listens at the address. Then `link` must be None.
        tls: Certificates that encrypt connections over TCP, or None for plain ones.
        ports: The ports at which this rank may listen over TCP if its address names none, or None for all.

    Attributes:
        url: The address, on rank 0 with the actual port.
        shares_memory: Whether the link is expected to use shared memory, in which arenas are read in place. The ranks
            decide when they connect.
        lines: By rank, the connections with those that have proved their identity.

    Raises:
        CallerError: An argument is out of range, or rank 0 cannot listen at the address.
        DeviceUnavailable: `link` is "shared_memory", and this system has none.
    """

    def __init__(
        self,
        address: Address | Listener,
        rank: int,
        world_size: int,
        *,
        secret: str | None = None,
        job: str | None = "",
        link: str | None = None,
        is_served: bool = False,
        tls: Certificates | None = None,
        ports: range | None = None,
    ) -> None:
        self._listener = address if isinstance(address, Listener) else None
        self._is_server = self._listener is not None and rank == world_size
        if not self._is_server:
            rank, world_size = checked_rank(rank, world_size)
            refuse_bad_job(job)
        refuse_bad_secret(secret)
        self.rank, self.world_size = rank, world_size
        self._who = "the server" if self._is_server else f"rank {rank}"
        self._at = address.address if isinstance(address, Listener) else addresses.checked_address(address)
        self._secret, self._given_job, self._is_served, self._tls, self._ports = secret, job, is_served, tls, ports
        addresses.refuse_impossible(link, self._at)
        self._link = link  # Once the ranks have met, all use rank 0's link.
        if is_served and link is not None:
            raise CallerError("served=True takes no link", do="leave link out")
        is_here = isinstance(self._at, str) or is_loopback(self._at[0])
        is_best = link is None and is_here and world_size > 1 and not is_served and has_shared_memory()
        self.shares_memory = link == "shared_memory" or is_best
        self.lines: dict[int, Line] = {}
        self._strangers: list[Line] = []  # connections without a valid proof yet, oldest first
        self._group = b""  # the group's identifier, empty while ranks meet at rank 0
        self._aim = self._called = ""  # present action of a calling rank and the name of the called one, for errors
        self._was_let_in = False  # whether rank 0 or the server has accepted this rank at least once
        self._refused: ExchangeError | None = None  # last refusal of a single connection
        if rank == 0 and not is_served and self._listener is None:
            self._listener = Listener(self._at, secret, ports)
        self.url = url_of(self._at if self._listener is None else self._listener.address)

    def link(
        self,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        gives_up: Callable[[float], bool] = lambda _: False,
    ) -> SocketLink:
        """Connect this rank with all others, or with the server, and return its link. Call it once.

        Args:
            timeout: Seconds for the whole call. On a server they begin with the first rank.
            clock: The clock of all seconds here.
            gives_up: Called while this waits for ranks, and returns whether the wait ends. Its argument is the time
                since when no rank is connected, or infinity if one is.

        Raises:
            HandshakeRefused: Ranks have a different secret, job, world size or link, or the same rank. Or TLS fails
                between them.
            PeerLost: Not all ranks joined in time. The error names the missing ones.
            ProtocolError: The process that answers at the address is not a rank.
        """
        self._timeout, self._clock, self._gives_up = timeout, clock, gives_up
        self._begin()
        try:
            if self._listener is not None:
                self._host(self._listener)
            else:
                self._join()
            self.close()
            here = (line.socket.family == socket.AF_UNIX or is_loopback(line.origin) for line in self.lines.values())
            if self._tls is None and not all(here):
                logger.warning("gradients are sent to other hosts unencrypted: pass tls= (docs/how-to/tls.md)")
            kind = SharedMemoryLink if self._link == "shared_memory" else SocketLink
            sockets = {peer: line.socket for peer, line in self.lines.items()}
            return kind(self.rank, sockets, hub=self.world_size if self._is_served else None)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """Stop listening, except at a server's listener. May be called twice."""
        if self._listener is not None and not self._is_server:
            self._listener.close()

    # ---- inside ----

    def _begin(self) -> None:
        """Start without any rank. A server waits without a deadline, and its job may still be open."""
        self._job, self._began = self._given_job, self._clock()
        self._deadline = math.inf if self._is_server else self._began + self._timeout

    def _leave(self) -> None:
        """Close the listener and the connections of an attempt to meet."""
        self.close()
        for line in self.lines.values():
            line.socket.close()
        self.lines.clear()

    def _host(self, listener: Listener) -> None:
        """Connect as rank 0, or as a server."""
        try:
            self._accept(listener, range(0 if self._is_server else 1, self.world_size))
            # Ranks send no address to a server.
            urls = [line.url for _, line in sorted(self.lines.items()) if line.url]
            nearer = self._nearer(listener)
        except ExchangeError as failure:
            for line in self.lines.values():
                line.leave("abort", type(failure).__name__, str(failure))
            raise
        if nearer is not None:
            for line in self.lines.values():
                line.leave("moved", url_of(nearer.address))
            self.lines.clear()
            listener.close()
            self._host(nearer)
            return
        best = "unix" if self._is_server or not has_shared_memory() else "shared_memory"
        self._link = (self._link or best) if isinstance(listener.address, str) else "tcp"
        self._group = secrets.token_bytes(16)
        for line in self.lines.values():
            line.left = self._left  # A long list may have to wait until the other end reads.
            with contextlib.suppress(OSError):  # The link's transfers report a rank that is lost from now on.
                line.say("members", self._group, self._link, urls)

    def _nearer(self, listener: Listener) -> Listener | None:
        """Return a listener at a Unix socket if all ranks called over TCP from this host, or None to stay at TCP.

        Raises:
            HandshakeRefused: The link needs all ranks on this host and a Unix socket, and one of these is missing.
        """
        if isinstance(listener.address, str) or self._link == "tcp" or self._is_server or not self.lines:
            return None
        far = [rank for rank, line in self.lines.items() if line.host != addresses.this_host()]
        try:
            if not far:
                self._listener = addresses.nearer_listener(self._secret)
                return self._listener
            reason = f"rank {far[0]} on a different host"
        except CallerError as fault:
            reason = str(fault)
        if self._link is not None:
            what = f"link={self._link!r} needs all ranks on the host of rank 0 and in its namespaces"
            raise HandshakeRefused(what, got=reason, do='pass link="tcp", or None')
        logger.info("ranks stay at TCP: %s", reason)
        return None

    def _join(self) -> None:
        """Connect as a rank other than 0."""
        met: list[Address] | Address = self._at
        while not isinstance(met, list):  # Ranks of one host get a path at which they meet again.
            met = self._retried(self._meet, met)
        # A rank makes all its calls before it accepts any, and only calls lower ranks. Rank 1 calls none of them and
        # accepts rank 2's call. Then rank 2 accepts, and so on. So no ranks wait for each other in a circle.
        for rank, address in enumerate(met[: self.rank - 1], 1):
            self._retried(self._call, rank, address)
        if self._listener is not None:  # No rank listens if there is a server.
            self._accept(self._listener, range(self.rank + 1, self.world_size))

    # ---- as the rank that calls ----

    def _retried(self, attempt: Callable[..., T], *given: Any) -> T:
        """Repeat an attempt until its connection is not lost, and return its value. Ranks may start in any order."""
        while True:
            try:
                return attempt(*given)
            except OSError as fault:
                if self._was_let_in and isinstance(fault, (ConnectionRefusedError, FileNotFoundError)):
                    what = f"{self._called} no longer listens: it has ended, or has lost {self._who} while ranks joined"
                    raise PeerLost(what, do="reconnect on all ranks") from None
                if (refusal := refusal_of(fault, self._called)) is not None:
                    raise refusal from None
                reason = reason_of(fault)
            if not self._group:
                self._leave()
            if self._left() < addresses.RETRY_SECONDS:
                do = "start all ranks, and check host, port, permissions; a server serves one group at a time"
                raise PeerLost(f"{self._who} could not {self._aim} within {self._timeout:g} s ({reason})", do=do)
            time.sleep(addresses.RETRY_SECONDS)

    def _meet(self, address: Address) -> list[Address] | Address:
        """Call rank 0 or the server, and wait for all. Return the ranks' addresses, or rank 0's new address."""
        line = self._call(self.world_size if self._is_served else 0, address)
        self._aim = f"join the group of {line.who}"
        # The other end detects the missing ranks, and should report them before this rank's time is over.
        line.left = lambda: self._left() + GRACE_SECONDS
        if self._is_served:
            line.expect("members")
            return []
        own: Address = f"{address}.{self.rank}"
        if not isinstance(address, str):
            own = addresses.own_host(address[0], line.socket.getsockname()[0]), 0
        self._listener = Listener(own, self._secret, self._ports)
        line.say("listening", url_of(self._listener.address), addresses.this_host())
        kind, fields = line.expect("members", "moved")
        if kind == "moved":
            self._leave()
            return addresses.address_told(*fields)
        group, link, urls = fields
        addresses.refuse_chosen_link(link, self._link, address, self._who)
        self._link, self._group = link, group
        return addresses.addresses_of(urls, self.world_size - 1, line.origin)

    def _call(self, rank: int, address: Address) -> Line:
        """Return a line to a rank or the server, after both have proved themselves."""
        self._called = "the server" if rank == self.world_size else f"rank {rank}"
        self._aim = f"connect to {self._called} at {url_of(address)}"
        connection = addresses.connect_once(address, max(addresses.RETRY_SECONDS, self._left()))
        try:
            addresses.refuse_other_user(connection, self._secret)
            connection = self._tls.encrypted(connection, is_called=False) if self._tls else connection
            line = Line(connection, self._called, self._left)
            line.hello = Hello(self.rank, self.world_size, self._job or "", new_nonce())
            line.say("hello", *line.hello)
            _, (line.nonce,) = line.expect("nonce")
            line.say("proof", self._proof(line, "caller", rank))
            _, (given,) = line.expect("proof")
            line.refuse_other(given, self._proof(line, "called", rank))
            self.lines[rank], self._was_let_in = line, True
        except BaseException:
            connection.close()
            raise
        return line

    # ---- as the rank that is called ----

    def _accept(self, listener: Listener, others: range) -> None:
        """Accept ranks until all others have joined. A silent caller does not delay them."""
        self._selector = selectors.DefaultSelector()
        try:
            self._selector.register(listener.socket, selectors.EVENT_READ)
            while missing := [rank for rank in others if rank not in self.lines or self.lines[rank].awaited]:
                if self._left() <= 0 or self._gives_up(math.inf if self.lines else self._began):
                    raise self._late(missing)
                for key, _ in self._selector.select(min(self._left(), _LOOK_SECONDS if self._is_server else math.inf)):
                    if key.data is None:
                        self._take_in(listener.socket)
                    elif key.data.socket.fileno() >= 0:  # A new stranger may have just closed this connection.
                        self._hear(key.data)
        finally:
            for stranger in self._strangers:
                stranger.socket.close()
            self._strangers.clear()
            self._selector.close()

    def _take_in(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as fault:  # The caller is gone again, or this process can have no more connections.
            self._refused = ExchangeError(f"{self._who} could not accept a connection ({reason_of(fault)})")
            time.sleep(addresses.RETRY_SECONDS)  # Without this pause a lasting fault would use all processor time.
            return
        try:
            connection = self._tls.encrypted(connection, is_called=True) if self._tls else connection
            line = Line(connection, "a caller")
            self._selector.register(connection, selectors.EVENT_READ, line)
            self._strangers.append(line)
        except OSError:  # The caller is gone again.
            connection.close()
        if len(self._strangers) > _STRANGERS + self.world_size:
            self._drop(self._strangers[0], None)

    def _hear(self, line: Line) -> None:
        """Answer a line's next message, if it is complete."""
        try:
            kind, fields = line.hear(line.awaited)
            if kind == "hello":
                addresses.refuse_other_user(line.socket, self._secret)
                line.hello, line.nonce, line.awaited = Hello(*fields), new_nonce(), ["proof"]
                line.say("nonce", line.nonce)
            elif kind == "proof":
                self._admit(line, line.hello, *fields)
            else:
                line.url, line.host = fields
                addresses.address_told(line.url)
                line.awaited = []
        except BlockingIOError:
            pass
        except OSError as fault:
            self._drop(line, refusal_of(fault, line.who))
        except ExchangeError as refusal:
            self._drop(line, refusal)

    def _admit(self, line: Line, hello: Hello, given: bytes) -> None:
        line.who = f"rank {hello.rank}"
        own = hello.world_size if self._is_server else self.rank
        line.refuse_other(given, self._proof(line, "caller", own))
        check_hello(hello, self.world_size, self._job)
        if hello.rank == self.rank or hello.rank in self.lines:
            do = "give each process its own rank, or reconnect on all ranks if it has lost a connection"
            raise HandshakeRefused(f"{line.who} has joined already", do=do)
        if self._is_server and not self.lines:
            self._job, self._deadline = hello.job, self._clock() + self._timeout
        self.lines[hello.rank], line.awaited = line, [] if self.rank else ["listening"]
        self._strangers.remove(line)
        line.say("proof", self._proof(line, "called", own))
        logger.info("%s: rank %d has joined from %s", self._who, hello.rank, line.origin)
        if self._group:
            self._selector.unregister(line.socket)  # The link reads all bytes from now on.

    def _drop(self, line: Line, refusal: ExchangeError | None) -> None:
        """Close a line and send it the refusal. None means that the other end closed it, or there are too many."""
        self._selector.unregister(line.socket)
        if refusal is None:
            line.socket.close()
        else:
            self._refused = refusal
            logger.info("%s refuses a connection from %s: %s", self._who, line.origin, refusal)
            line.leave("abort", "HandshakeRefused", f"{self._who} refuses: {refusal}")
        if line in self._strangers:
            self._strangers.remove(line)
        else:  # Its rank may call again.
            del self.lines[line.hello.rank]
            if self._is_server and not self.lines:
                self._begin()

    # ---- both ----

    def _left(self) -> float:
        return min(self._deadline - self._clock(), _LONGEST_SECONDS)

    def _proof(self, line: Line, role: str, called: int) -> bytes:
        # The proof binds the called rank, the group and the certificates. Otherwise a call could be relayed to a wrong
        # rank or group, or by a host on the path that has a certificate.
        return proof(self._secret, role, line.hello, line.nonce, called, self._group, hashes_of(line.socket))

    def _late(self, ranks: list[int]) -> PeerLost:
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        do = "start all ranks" + (f" (last refused here: {self._refused})" if self._refused else "")
        return PeerLost(f"{named} did not join {self._who} within {self._timeout:g} s (join_timeout)", do=do)
