"""Decoding of untrusted msgpack: nesting and number of objects are bounded before any object is made."""

from __future__ import annotations

from typing import Any

import msgpack

from gradengine.errors import ProtocolError

MAX_DEPTH = 8  # a layout table, the most deeply nested object that is sent, has four
MAX_OBJECTS = 1 << 20  # 64 MB of Python objects at most


def unpack(data: bytes, what: str) -> Any:
    """Decode one msgpack object.

    Raises:
        ProtocolError: Invalid msgpack, nested deeper than 8, or more than 2**20 objects.
    """
    refuse_unbounded(data, what)
    try:
        return msgpack.unpackb(data, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as fault:
        raise ProtocolError(f"{what} cannot be read ({type(fault).__name__}: {fault})") from None


def refuse_unbounded(data: bytes, what: str) -> None:
    """Raise `ProtocolError` if objects are nested too deep or are too many, without decoding any.

    Truncated data and trailing bytes are left to the decoder.
    """
    at, objects, left = 0, 0, [1]  # remaining objects of each open container
    while left and at < len(data):
        left[-1] -= 1
        objects += 1
        at, inside = _after(data, at)
        if objects + inside > MAX_OBJECTS:
            raise ProtocolError(f"{what} has too many objects", expected=f"at most {MAX_OBJECTS}")
        if inside:
            left.append(inside)
        if len(left) > MAX_DEPTH + 1:
            raise ProtocolError(f"{what} is nested too deep", expected=f"at most {MAX_DEPTH} containers")
        while left and not left[-1]:
            left.pop()


def _after(data: bytes, at: int) -> tuple[int, int]:
    """The position after an object, or a container's first item, and the container's number of items (else 0)."""
    tag = data[at]
    if 0x80 <= tag < 0xA0:
        return at + 1, (tag & 15) * (1 if tag >= 0x90 else 2)
    if 0xA0 <= tag < 0xC0:
        return at + 1 + (tag & 31), 0
    if tag in _SIZED:
        width, extra = _SIZED[tag]
        return at + 1 + width + extra + int.from_bytes(data[at + 1 : at + 1 + width], "big"), 0
    if 0xDC <= tag < 0xE0:
        width = 2 if tag % 2 == 0 else 4
        return at + 1 + width, int.from_bytes(data[at + 1 : at + 1 + width], "big") * (1 if tag < 0xDE else 2)
    return at + 1 + _FIXED.get(tag, 0), 0


# Bytes after the tag, as the msgpack specification numbers them.
_SIZED = {  # bin, ext and str: bytes of the length, and of an ext's type
    first + i: (1 << i, extra) for first, extra in ((0xC4, 0), (0xC7, 1), (0xD9, 0)) for i in range(3)
}
_FIXED = dict(enumerate((4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17), start=0xCA))  # numbers, then fixext
