"""What comes through each door, as a function of bytes: it ends, lets nobody in, and raises errors of ours alone."""

from __future__ import annotations

import contextlib
import selectors
import socket
import tempfile

import numpy as np

from gradengine.errors import ExchangeError, GradientError, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange import addresses as addresses_module
from gradengine.exchange import mesh
from gradengine.exchange.handshake import Line
from gradengine.exchange.hello import Hello, hellos_of, packed_hello, refuse_differing, refuse_large
from gradengine.exchange.links.link import DAMAGED, RECEIVE
from gradengine.exchange.links.shared_memory import SharedMemoryLink
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.wire import HEAD_BYTES, announced, checksum, decoded, encoded, unpacked
from gradengine.layout import GradientLayout, layout_from_table

SECRET = "a secret that the fuzzer does not know"
MOST_BYTES = 1 << 16  # of one input: a socket has room for it
HELLO = packed_hello(Hello("a", 1 << 22, 3, True, False, False, 0, {"average": "mean"}))
LAYOUT = GradientLayout.of({"layers.0.w": (5,), "head": (3, 2)})


def message(data: bytes) -> None:
    """The decoder of joining messages; what it takes, it writes as it was."""
    for said in {data, _with_checksums(data)}:
        with contextlib.suppress(ProtocolError):
            kind, check, size = announced(said[:HEAD_BYTES].ljust(HEAD_BYTES), "a rank")
            found = decoded(kind, check, said[HEAD_BYTES:][:size])
            if kind != "members":  # whose list may hold what msgpack reads, and would not write
                again = encoded(kind, *found)
                assert decoded(*announced(again[:HEAD_BYTES], "a rank")[:2], again[HEAD_BYTES:]) == found


def hello(data: bytes) -> None:
    """What ranks and a server tell when they join."""
    with contextlib.suppress(ProtocolError, HandshakeRefused):
        hellos = hellos_of([data, data], hub=1)
        refuse_differing(hellos, [LAYOUT.table()] * 2)
        refuse_large(LAYOUT, hellos[1].most_bytes)


def table(data: bytes) -> None:
    """A layout's table, as a server reads it, and as ranks show in what it differs."""
    with contextlib.suppress(GradientError):
        layout = layout_from_table(data)
        assert layout_from_table(layout.table()) == layout
    with contextlib.suppress(GradientError):
        hellos = [hellos_of([HELLO])[0]._replace(layout=name) for name in ("a", "b")]
        refuse_differing(hellos, [LAYOUT.table(), data])


def addresses(data: bytes) -> None:
    """Rank 0's list of addresses."""
    with contextlib.suppress(ProtocolError):
        urls = unpacked(data, "the list of ranks")
        if isinstance(urls, list):
            addresses_module.addresses_of(urls, 2, "10.0.0.1")


def stranger(data: bytes) -> None:
    """All that a caller says to a rank; nobody is let in by it."""
    for said in {data, _with_checksums(data)}:
        meeting = _meeting()
        with _said(said) as ours, selectors.DefaultSelector() as meeting._selector:
            line = Line(ours, "a caller")
            meeting._selector.register(ours, selectors.EVENT_READ, line)
            meeting._strangers.append(line)
            while line in meeting._strangers:
                meeting._hear(line)
        assert not meeting.lines


def listener(data: bytes) -> None:
    """All that whoever listens at rank 0's address answers; a rank that calls takes nobody for rank 0."""
    for said in {data, _with_checksums(data)}:
        _answer(said)


def link(data: bytes) -> None:
    """What a rank sends over its link, in a step: what is not its message changes no memory that was not to receive."""
    _over_a_link(data, SocketLink)


def shared_memory(data: bytes) -> None:
    """The same, where ranks lend each other their memory."""
    if hasattr(socket, "SCM_RIGHTS"):
        _over_a_link(data, SharedMemoryLink)


def _answer(data: bytes) -> None:
    with _said(data) as ours, tempfile.TemporaryDirectory() as folder:
        meeting = _meeting()
        connect, addresses_module.connect_once = addresses_module.connect_once, lambda *_: ours
        try:
            meeting._meet(f"{folder}/s")
        except (OSError, ExchangeError):
            pass
        else:
            raise AssertionError("a stranger was taken for rank 0")
        finally:
            addresses_module.connect_once = connect
            meeting.close()
        assert not meeting.lines


def _meeting() -> mesh.Meeting:
    """Rank 1's, once it has begun to join; it has opened nothing."""
    meeting = mesh.Meeting("/nowhere", 1, 2, secret=SECRET)
    meeting._timeout, meeting._clock = 60.0, lambda: 0.0
    meeting._begin()
    return meeting


def _with_checksums(data: bytes) -> bytes:
    """The frames in these bytes with the checksums that their payloads have, which changed bytes have not."""
    frames = b""
    while len(data) >= HEAD_BYTES:
        tag, end = int.from_bytes(data[2:6], "big"), HEAD_BYTES + int.from_bytes(data[16:HEAD_BYTES], "big")
        check = checksum(tag, data[HEAD_BYTES:end]).to_bytes(8, "big")
        frames += data[:7] + check + data[15:end]
        data = data[end:]
    return frames + data


def _over_a_link(data: bytes, kind: type[SocketLink]) -> None:
    with _said(data) as ours:
        link = kind(0, {1: ours})
        memory = np.zeros(64, np.uint8)
        for tag in (0, 1, 6):
            link.receive(1, tag, memory[8 * tag : 8 * tag + 8])
        over = []
        with contextlib.suppress(PeerLost, ProtocolError):
            while new := link.poll():  # it is empty too where a message waits that nobody receives
                over += new
        link.close()
        written = {tag for completed, _, tag in over if completed in {RECEIVE, DAMAGED}}
        begun = {tag for tag in (0, 1, 6) if memory[8 * tag : 8 * tag + 8].any()}
        assert not memory[16:48].any()
        assert not memory[56:].any()
        assert len(begun - written) <= 1, "more than one message had begun to arrive"


@contextlib.contextmanager
def _said(data: bytes):
    """One end of a connection at whose other end this was said, and nothing more is."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[:MOST_BYTES])
        theirs.shutdown(socket.SHUT_WR)
        yield ours


TARGETS = {each.__name__: each for each in (message, hello, table, addresses, stranger, listener, link, shared_memory)}
