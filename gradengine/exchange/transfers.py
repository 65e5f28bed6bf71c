"""The requests of an all-reduce and a gather: transfers between ranks, and copies between a device's arena and rows."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from gradengine.exchange.links.link import Memory


class Send(NamedTuple):
    """Memory to be sent to a rank; it must not change until the send is over."""

    peer: int
    tag: int
    memory: Memory


class Receive(NamedTuple):
    """Memory to be filled by a rank's message with this tag, which must have the memory's size."""

    peer: int
    tag: int
    memory: Memory


class Copy(NamedTuple):
    """Memory to be filled from the device's arena, or to be copied there: a `Receive` or `Send` of the rank itself."""

    peer: int  # the rank itself
    tag: int
    memory: Memory
    start: int  # of the share, in the arena
    is_to_arena: bool
    behind: int | str  # key of the span whose start completed the share: the copy waits for work queued before that


class Borrow(NamedTuple):
    """A part that a rank sends with this tag, to be read in that rank's memory until a `Release`."""

    peer: int
    tag: int


class Release(NamedTuple):
    """The end of reading the memory that was borrowed from a rank with this tag."""

    peer: int
    tag: int


Transfer: TypeAlias = Send | Receive | Copy | Borrow | Release
