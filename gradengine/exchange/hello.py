"""The data that ranks compare when they join, and checks that they fit together; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from gradengine.errors import HandshakeRefused, LayoutMismatch, ProtocolError
from gradengine.exchange.handshake import differing_rows
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD, unpacked
from gradengine.layout import GradientLayout, layout_from_table

_VERSION = 5  # version of these data, the same on all ranks


class Hello(NamedTuple):
    """The data that a rank, or the server, sends the others when they join."""

    layout: str = ""  # fingerprint of the layout
    bucket_bytes: int = 4
    step: int = 0
    lends: bool = False  # whether owners may read parts in its arena
    sums_by_calls: bool = False  # whether its GPU can sum by a process group's own calls
    holds_sums: bool = False  # whether its arena may hold sums of the step, whole or in part
    most_bytes: int = 0  # largest arena that the server accepts, in bytes
    settings: dict[str, str] = {}  # noqa: RUF012  (no code changes this default)


def packed_hello(hello: Hello) -> bytes:
    """Return a hello as bytes for the other ranks."""
    return bytes(msgpack.packb([_VERSION, *hello]))


def hellos_of(parts: Sequence[bytes], hub: int | None = None) -> list[Hello]:
    """Return every rank's hello, and then the hello of the server, whose number is `hub`.

    Raises:
        HandshakeRefused: A rank or the server has a different version.
        ProtocolError: A hello is invalid.
    """
    return [_hello_of("the server" if rank == hub else f"rank {rank}", part) for rank, part in enumerate(parts)]


def _hello_of(who: str, part: bytes) -> Hello:
    told = unpacked(part, f"the hello of {who}")
    version, *fields = told if isinstance(told, list) and told else [told]
    if version != _VERSION or len(fields) != len(Hello._fields):
        what, do = f"{who} has a different version", "install one version of gradengine on all ranks"
        raise HandshakeRefused(what, got=version, expected=_VERSION, do=do)
    hello = Hello(*fields)
    is_valid = [*map(type, hello)] == [*map(type, Hello())] and hello.bucket_bytes >= 4
    if not is_valid or {type(text) for pair in hello.settings.items() for text in pair} - {str}:
        raise ProtocolError(f"the hello of {who} is invalid", got=told)
    return hello


def refuse_large(layout: GradientLayout, most_bytes: int) -> None:
    """Raise `HandshakeRefused` for a layout whose arena or table is too large for a server."""
    arena, table = (layout.nbytes, most_bytes), (len(layout.table()), MAX_SMALL_PAYLOAD)
    for what, (size, most) in (("the layout", arena), ("the layout's table", table)):
        if size > most:
            got, expected, do = f"{size} bytes", f"at most {most}", "connect without a server"
            raise HandshakeRefused(f"{what} is larger than this server takes", got=got, expected=expected, do=do)


def layout_of(rank: int, table: bytes) -> GradientLayout:
    """Return the layout in a table that a rank has sent. Raises `ProtocolError` if the table is invalid."""
    try:
        return layout_from_table(table)
    except LayoutMismatch as fault:
        raise ProtocolError(f"rank {rank}: {fault}") from None


def refuse_differing(hellos: Sequence[Hello], tables: Sequence[bytes]) -> None:
    """Raise `HandshakeRefused`, the same on all ranks, unless they can begin the same step together.

    Args:
        hellos: Every rank's hello.
        tables: The tables of the layouts if they differ. An empty one stands for a table that is too long to show.
    """
    _refuse_other_layouts(hellos, tables)
    for rank, hello in enumerate(hellos):
        for name in {**hellos[0].settings, **hello.settings}:
            got, expected = (each.settings.get(name, "nothing") for each in (hello, hellos[0]))
            if got != expected:
                what, do = f"rank {rank} has a different {name} than rank 0", "build all engines with the same settings"
                raise HandshakeRefused(what, got=got, expected=expected, do=do)
    last = max(hello.step for hello in hellos)
    for rank, hello in enumerate(hellos):
        if hello.step != last:
            do = f"load a checkpoint of step {last} there, or the same one on all ranks; or give each run its own job="
            raise HandshakeRefused(f"rank {rank} is at a different step", got=hello.step, expected=last, do=do)
    for rank, hello in enumerate(hellos):
        if hello.holds_sums:
            what = f"the window of step {last} is lost: rank {rank} holds sums of it"
            raise HandshakeRefused(what, do="discard() the window on every rank, reconnect, and accumulate it again")


def _refuse_other_layouts(hellos: Sequence[Hello], tables: Sequence[bytes]) -> None:
    for rank, hello in enumerate(hellos):
        if hello.layout != hellos[0].layout:
            rows = "too many rows to show"
            if tables[rank] and tables[0]:
                for sender in (rank, 0):
                    layout_of(sender, tables[sender])
                rows = differing_rows(tables[rank], tables[0])
            what = f"layouts differ between rank {rank} (here) and rank 0 (there):\n{rows}"
            raise HandshakeRefused(what, do="build the layout from the same model on every rank")
