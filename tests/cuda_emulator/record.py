"""What the host asked of the device: for tests that count launches, copies, allocations and waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Record:
    """What was asked for since the recording began, in order.

    Attributes:
        operations: Names of all kernels, copies, fills and graphs: "scale", "copy host to device", "fill", "graph".
        launches: Of those, the kernels.
        copies: Of those, the copies without the word: "host to device".
        fills: How many fills.
        graphs: How many graphs were launched (what is in them is counted where it was captured).
        allocations: Bytes of each piece of device memory asked for.
        pinned_allocations: Bytes of each piece of pinned host memory.
        waits: How often the host waited for the device: "stream", "device", "event", "copy".
    """

    operations: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    fills: int = 0
    graphs: int = 0
    allocations: list[int] = field(default_factory=list)
    pinned_allocations: list[int] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


_records: list[Record] = []


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """A `Record` of what is asked for until the end of the block; recordings nest."""
    record = Record()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def note_launch(name: str) -> None:
    """A kernel was launched."""
    for record in _records:
        record.operations.append(name)
        record.launches.append(name)


def note_copy(direction: str) -> None:
    """A copy was asked for."""
    for record in _records:
        record.operations.append(f"copy {direction}")
        record.copies.append(direction)


def note_fill() -> None:
    """A fill was asked for."""
    for record in _records:
        record.operations.append("fill")
        record.fills += 1


def note_graph() -> None:
    """A captured graph was launched."""
    for record in _records:
        record.operations.append("graph")
        record.graphs += 1


def note_allocation(size: int, pinned: bool = False) -> None:
    """Memory was asked for."""
    for record in _records:
        (record.pinned_allocations if pinned else record.allocations).append(size)


def note_wait(what: str) -> None:
    """The host waited."""
    for record in _records:
        record.waits.append(what)
