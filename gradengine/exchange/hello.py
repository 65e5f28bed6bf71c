"""What ranks tell each other when they join, and checks of what must be the same on all of them; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from gradengine.errors import HandshakeRefused, LayoutMismatch, ProtocolError
from gradengine.exchange.handshake import differing_rows
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD, unpacked
from gradengine.layout import GradientLayout, layout_from_table

_VERSION = 4  # of what is told; all ranks need the same


class Hello(NamedTuple):
    """What a rank tells the others when it joins."""

    layout: str = ""  # its fingerprint
    bucket_bytes: int = 4
    step: int = 0
    lends: bool = False  # whether parts may be read in its arena
    sums_by_calls: bool = False  # whether its GPU can sum by a process group's own calls
    holds_sums: bool = False  # whether its arena may hold sums of the step, or pieces of them
    settings: dict[str, str] = {}  # noqa: RUF012  (a default that nothing changes)


class ServerHello(NamedTuple):
    """What a server tells the ranks when they join."""

    bucket_bytes: int = 4
    most_bytes: int = 0  # of a layout's arena


def packed_hello(hello: Hello | ServerHello) -> bytes:
    """Return a hello as bytes for the others."""
    data: bytes = msgpack.packb([_VERSION, *hello])
    return data


def hellos_of(parts: Sequence[bytes]) -> tuple[list[Hello], int]:
    """Return every rank's hello, and rank 0's bucket_bytes.

    Raises:
        HandshakeRefused: A rank has another version.
        ProtocolError: A hello is invalid.
    """
    hellos = [Hello(*_fields(f"rank {rank}", part, Hello())) for rank, part in enumerate(parts)]
    for rank, hello in enumerate(hellos):
        if {type(text) for pair in hello.settings.items() for text in pair} - {str}:
            raise ProtocolError(f"the settings of rank {rank} are not text", got=hello.settings)
    return hellos, hellos[0].bucket_bytes


def server_hello_of(part: bytes, layout: GradientLayout) -> ServerHello:
    """Return the server's hello; raises `HandshakeRefused` for another version, or a layout too large for it."""
    hello = ServerHello(*_fields("the server", part, ServerHello()))
    refuse_large(layout, hello.most_bytes)
    return hello


def refuse_large(layout: GradientLayout, most_bytes: int) -> None:
    """Raise `HandshakeRefused` for a layout whose arena is larger than a server takes."""
    if layout.nbytes > most_bytes:
        what, expected = "the layout is larger than this server takes", f"at most {most_bytes}"
        raise HandshakeRefused(what, got=f"{layout.nbytes} bytes", expected=expected)


def table_told(layout: GradientLayout, *, is_served: bool) -> bytes:
    """Return the layout's table for the others; empty if it is too long for ranks to show its rows.

    Raises:
        HandshakeRefused: It is too long for a server, which needs it.
    """
    table = layout.table()
    if len(table) <= MAX_SMALL_PAYLOAD:
        return table
    if is_served:
        what, got = "the layout's table is too long for a server", f"{len(table)} bytes"
        raise HandshakeRefused(what, got=got, expected=f"at most {MAX_SMALL_PAYLOAD}", do="connect without a server")
    return b""


def layout_of(rank: int, table: bytes) -> GradientLayout:
    """Return the layout in a table that a rank has sent; raises `ProtocolError` if the table is invalid."""
    try:
        return layout_from_table(table)
    except LayoutMismatch as fault:
        raise ProtocolError(f"rank {rank}: {fault}") from None


def refuse_differing(hellos: Sequence[Hello], tables: Sequence[bytes], *, can_rejoin: bool = True) -> None:
    """Raise `HandshakeRefused`, the same on all ranks, unless they can begin the same step together.

    Args:
        hellos: Every rank's hello.
        tables: The layouts, if they differ, as `table_told`.
        can_rejoin: Whether one rank may start again alone: not over MPI.
    """
    _refuse_other_layouts(hellos, tables)
    _refuse_other_settings([hello.settings for hello in hellos])
    last = max(hello.step for hello in hellos)
    for rank, hello in enumerate(hellos):
        if hello.step != last:
            do = f"load a checkpoint of step {last} first, then call engine.reconnect(connect(...))"
            do = do if can_rejoin else "load one checkpoint on all ranks"
            raise HandshakeRefused(f"rank {rank} is at another step", got=hello.step, expected=last, do=do)
    for rank, hello in enumerate(hellos):
        if hello.holds_sums:
            raise HandshakeRefused(
                f"the window of step {last} is lost: rank {rank} holds sums of it, and not all ranks do",
                do="discard() the window on every rank, reconnect, and accumulate it again",
            )


def _refuse_other_layouts(hellos: Sequence[Hello], tables: Sequence[bytes]) -> None:
    for rank, hello in enumerate(hellos):
        if hello.layout != hellos[0].layout:
            rows = "too many rows to show"
            if tables[rank] and tables[0]:
                for sender in (rank, 0):
                    layout_of(sender, tables[sender])
                rows = differing_rows(tables[rank], tables[0])
            raise HandshakeRefused(
                f"layouts differ between rank {rank} (here) and rank 0 (there):\n{rows}",
                do="build the layout from the same model on every rank",
            )


def _refuse_other_settings(settings: Sequence[dict[str, str]]) -> None:
    first = settings[0]
    for rank, theirs in enumerate(settings):
        for name in dict.fromkeys([*first, *theirs]):
            if theirs.get(name) != first.get(name):
                raise HandshakeRefused(
                    f"rank {rank} has another {name} than rank 0",
                    got=theirs.get(name, "nothing"),
                    expected=first.get(name, "nothing"),
                    do="build the engines of all workers with the same settings",
                )


def _fields(who: str, part: bytes, like: Hello | ServerHello) -> list[Any]:
    """Return the fields of a hello, each of its type."""
    told = unpacked(part, f"the hello of {who}")
    if not isinstance(told, list) or told[:1] != [_VERSION] or len(told) != 1 + len(like):
        version = told[0] if isinstance(told, list) and told else told
        what, do = f"{who} speaks another version", "install one version of gradengine on all ranks"
        raise HandshakeRefused(what, got=version, expected=_VERSION, do=do)
    fields = told[1:]
    if [*map(type, fields)] != [*map(type, like)] or fields[like._fields.index("bucket_bytes")] < 4:
        raise ProtocolError(f"the hello of {who} is invalid", got=told)
    return fields
