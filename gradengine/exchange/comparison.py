"""What ranks tell each other when they join, and checks of what must be the same on all of them; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from gradengine.errors import HandshakeRefused, LayoutMismatch, ProtocolError
from gradengine.exchange.handshake import differing_rows
from gradengine.layout import GradientLayout, layout_from_table
from gradengine.layout.unpacking import unpack

_VERSION = 3  # of what is told; all ranks need the same


@dataclass(frozen=True)
class Membership:
    """A worker's identity in a step: a half-summed step can only be resumed by the same ranks of the same group.

    `group` is a random identifier, drawn when a step begins; empty before the first group.
    """

    group: bytes = b""
    rank: int = 0
    world_size: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} in group {self.group[:4].hex()}" if self.group else "nobody"


class Hello(NamedTuple):
    """What a rank tells the others when it joins."""

    layout: str = ""  # its fingerprint
    bucket_bytes: int = 4
    step: int = 0
    lends: bool = False  # whether parts may be read in its arena
    sums_by_calls: bool = False  # whether it can, on its GPU, by those of a process group
    is_over_another_kind: bool = False  # the step was begun over links unlike these
    nonce: bytes = b""  # rank 0's names the group
    group: bytes = b""  # the rest: where the step was begun
    group_rank: int = 0
    group_size: int = 0
    cut: int = 0  # its bucket_bytes
    may_hold_sums: bool = False
    has_told: bool = False  # the others something about this step: then all its sums are here
    has_answers: bool = False  # what all ranks told each other in the step before
    frontier: bytes = b""  # empty where no span was started


class ServerHello(NamedTuple):
    """What a server tells the ranks when they join."""

    bucket_bytes: int = 4
    most_bytes: int = 0  # of a layout's arena


def packed(hello: Hello | ServerHello) -> bytes:
    """A hello as bytes for the others."""
    data: bytes = msgpack.packb([_VERSION, *hello])
    return data


def hellos_of(parts: Sequence[bytes]) -> tuple[list[Hello], int]:
    """Every rank's hello, and rank 0's bucket_bytes; raises `HandshakeRefused` if a rank has another version."""
    hellos = [Hello(*_fields(f"rank {rank}", part, Hello())) for rank, part in enumerate(parts)]
    return hellos, hellos[0].bucket_bytes


def server_hello_of(part: bytes, layout: GradientLayout) -> ServerHello:
    """The server's hello; raises `HandshakeRefused` for another version, or a layout too large for the server."""
    hello = ServerHello(*_fields("the server", part, ServerHello()))
    refuse_large(layout, hello.most_bytes)
    return hello


def behind_of(hellos: Sequence[Hello]) -> tuple[list[int], int]:
    """The ranks that are one step behind and miss only what the others told each other, and a rank that has kept it.

    Such a rank has lost its links after the others had all that they needed of it, and they have gone on.
    """
    last = max(hello.step for hello in hellos)
    behind = [
        rank for rank, hello in enumerate(hellos)
        if hello.step == last - 1 and hello.has_told and (hello.group_rank, hello.group_size) == (rank, len(hellos))
    ]  # fmt: skip
    keepers = [rank for rank, hello in enumerate(hellos) if hello.step == last and hello.has_answers]
    return (behind, keepers[0]) if keepers else ([], 0)


def brought_up(hellos: Sequence[Hello], behind: Sequence[int]) -> list[Hello]:
    """The hellos, with the ranks that were one step behind at the others' step, of which they have begun nothing."""
    last, told = max(hello.step for hello in hellos), [*hellos]
    for rank in behind:
        told[rank] = told[rank]._replace(step=last, may_hold_sums=False, frontier=b"", is_over_another_kind=False)
    return told


def answers_of(keeper: int, data: bytes, world_size: int) -> dict[str, list[bytes]]:
    """What all ranks told each other in the step before, by what it was; raises `ProtocolError` if it is invalid."""
    answers = unpack(data, f"what rank {keeper} has kept of the step before")
    is_valid = isinstance(answers, dict) and all(
        isinstance(what, str) and isinstance(parts, list) and [*map(type, parts)] == [bytes] * world_size
        for what, parts in answers.items()
    )
    if not is_valid:
        raise ProtocolError(f"rank {keeper} sent invalid answers of the step before", got=repr(answers)[:200])
    found: dict[str, list[bytes]] = answers
    return found


def refuse_large(layout: GradientLayout, most_bytes: int) -> None:
    """Raise `HandshakeRefused` for a layout whose arena is larger than a server takes."""
    if layout.nbytes > most_bytes:
        what, expected = "the layout is larger than this server takes", f"at most {most_bytes}"
        raise HandshakeRefused(what, got=f"{layout.nbytes} bytes", expected=expected)


def layout_of(rank: int, table: bytes) -> GradientLayout:
    """The layout in a table that a rank has sent; raises `ProtocolError` if the table is invalid."""
    try:
        return layout_from_table(table)
    except LayoutMismatch as fault:
        raise ProtocolError(f"rank {rank}: {fault}") from None


def refuse_differing(hellos: Sequence[Hello], tables: Sequence[bytes], *, can_rejoin: bool = True) -> None:
    """Raise `HandshakeRefused` for ranks with other layouts or steps.

    Args:
        hellos: Every rank's hello.
        tables: The layouts, if they differ.
        can_rejoin: Whether one rank may start again alone: not over MPI.
    """
    for rank, hello in enumerate(hellos):
        if hello.layout != hellos[0].layout:
            for sender in (rank, 0):
                layout_of(sender, tables[sender])
            rows = differing_rows(tables[rank], tables[0])
            raise HandshakeRefused(
                f"layouts differ between rank {rank} (here) and rank 0 (there):\n{rows}",
                do="build the layout from the same model on every rank",
            )
    last = max(hello.step for hello in hellos)
    for rank, hello in enumerate(hellos):
        if hello.step != last:
            do = f"load a checkpoint of step {last} first, then call engine.reconnect(connect(...))"
            do = do if can_rejoin else "load one checkpoint on all ranks"
            raise HandshakeRefused(f"rank {rank} is at another step", got=hello.step, expected=last, do=do)
        if hello.is_over_another_kind:
            raise HandshakeRefused(
                f"rank {rank} is in the middle of a step that was begun over another kind of exchange",
                do="use the same kind again, or discard() the window on every rank",
            )


def group_to_resume(hellos: Sequence[Hello]) -> bytes:
    """The identifier of the group in which a half-summed step must be resumed; empty if there is no such step.

    Raises `HandshakeRefused` for a rank that began the step as another rank or in another group: its part would be
    missing from some sums, or counted twice.
    """
    group = next((hello.group for hello in hellos if hello.may_hold_sums), b"")
    for rank, hello in enumerate(hellos):
        as_it_was = Membership(group, rank, len(hellos))
        membership = Membership(hello.group, hello.group_rank, hello.group_size)
        if group and hello.frontier and membership != as_it_was:
            raise HandshakeRefused(
                f"step {hello.step} is half summed and rank {rank} took part in it as another",
                got=as_it_was,
                expected=membership,
                do="join with all ranks as they were, or discard() the window on every rank",
            )
    return group


def refuse_lost_sums(hellos: Sequence[Hello]) -> None:
    """Raise `HandshakeRefused` for a rank with sums of the open step, over a server, which keeps none."""
    for rank, hello in enumerate(hellos):
        if hello.may_hold_sums:
            raise HandshakeRefused(
                f"rank {rank} has sums of step {hello.step} that the server lost",
                do="the local contributions are gone: discard() the window on every rank and accumulate it again",
            )


def refuse_other_cut(hellos: Sequence[Hello], bucket_bytes: int) -> None:
    """Raise `HandshakeRefused` for a rank whose half-summed step was cut into other buckets."""
    for rank, hello in enumerate(hellos):
        if hello.frontier and hello.cut != bucket_bytes:
            raise HandshakeRefused(
                f"rank {rank} is in the middle of a step cut into other buckets",
                got=f"bucket_bytes={bucket_bytes}",
                expected=f"bucket_bytes={hello.cut}",
                do="use the same bucket_bytes again, or discard() the window on every rank",
            )


def _fields(who: str, part: bytes, like: Hello | ServerHello) -> list[Any]:
    """The fields of a hello, each of its type."""
    told = unpack(part, f"the hello of {who}")
    if not isinstance(told, list) or told[:1] != [_VERSION] or len(told) != 1 + len(like):
        version = told[0] if isinstance(told, list) and told else told
        what, do = f"{who} speaks another version", "install one version of gradengine on all ranks"
        raise HandshakeRefused(what, got=version, expected=_VERSION, do=do)
    fields = told[1:]
    if [*map(type, fields)] != [*map(type, like)] or fields[like._fields.index("bucket_bytes")] < 4:
        raise ProtocolError(f"the hello of {who} is invalid", got=repr(told)[:200])
    return fields
