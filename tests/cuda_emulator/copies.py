"""Copies and fills: queued where CUDA queues them, at once where it cannot do otherwise."""

from __future__ import annotations

import ctypes

from .errors import CUDARuntimeError, EmulatorError
from .memory import ADDRESSES, DEVICE
from .native import is_registered
from .queues import Queue, Work, add, finish_queue
from .record import note_copy, note_fill, note_wait
from .settings import settings

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
_DIRECTIONS = {
    (False, False): "host to host",
    (False, True): "host to device",
    (True, False): "device to host",
    (True, True): "device to device",
}


def copy(destination: int, source: int, size: int, kind: int, queue: Queue, waits: bool = False) -> None:
    """Copy on a stream.

    From pageable memory the bytes are those of now, to it the host waits; pinned memory is read and written when the
    copy's turn comes.

    Args:
        destination: Address.
        source: Address.
        size: Bytes.
        kind: CUDA's number of the direction, checked against what the addresses are.
        queue: The stream.
        waits: Whether the host waits for the copy.
    """
    from_kind, to_kind = ADDRESSES.kind(source), ADDRESSES.kind(destination)
    direction = from_kind == DEVICE, to_kind == DEVICE
    if kind != DEFAULT and size and direction != (kind in (DEVICE_TO_HOST, DEVICE_TO_DEVICE), kind in (1, 3)):
        raise CUDARuntimeError(1)
    name = _DIRECTIONS[direction]
    note_copy(name)
    if queue.capture is not None and (waits or not from_kind or not to_kind):
        queue.capture.refuse(900)
    if not from_kind and size:
        kept = ctypes.create_string_buffer(ctypes.string_at(source, size), size)
        add(queue, Work(f"copy {name}", lambda: _move(destination, ctypes.addressof(kept), size, bool(to_kind), False)))
    else:
        add(queue, Work(f"copy {name}", lambda: _move(destination, source, size, bool(to_kind), bool(from_kind))))
    if waits or not to_kind:
        note_wait("copy")
        finish_queue(queue)


def fill(destination: int, value: int, size: int, queue: Queue) -> None:
    """Set bytes on a stream."""
    note_fill()

    def do() -> None:
        _check("fill writes", destination, size)
        ctypes.memset(destination, value, size)

    add(queue, Work("fill", do))


def _move(destination: int, source: int, size: int, checks_destination: bool, checks_source: bool) -> None:
    if checks_source:
        _check("copy reads", source, size)
    if checks_destination:
        _check("copy writes", destination, size)
    ctypes.memmove(destination, source, size)


def _check(what: str, address: int, size: int) -> None:
    if settings().check and size and not is_registered(address, size):
        raise EmulatorError(f"out of bounds: a {what} {size} bytes at {address:#x}, which are in no array (any more)")
