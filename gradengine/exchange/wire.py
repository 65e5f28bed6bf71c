"""The format of all connections between ranks, which docs/specs/wire.md describes. This module does no I/O.

A frame is the msgpack array [tag, checksum, payload], in a form with 20 bytes before the payload, its head. Ranks that
join send messages in frames. The payload of such a frame is the msgpack array of a message's fields. A reader checks
lengths before it allocates memory.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgpack
from xxhash import xxh3_64_intdigest

from gradengine.errors import ProtocolError

VERSION = 5
MAX_SMALL_PAYLOAD = 1 << 20  # bytes of a list of ranks, or of gathered values; decoded they take 100 MB at most

_HEAD = struct.Struct(">BBIBQBI")  # fixarray(3), uint32 tag, uint64 checksum, bin32 with the payload's size
HEAD_BYTES = _HEAD.size


def checksum(tag: int, payload: bytes | memoryview) -> int:
    """Return a frame's checksum, which is the 64-bit XXH3 of its payload with the tag as seed.

    >>> checksum(3, b"payload")
    5188528926478741161
    """
    return xxh3_64_intdigest(payload, tag)


def head(tag: int, check: int, size: int) -> bytes:
    """Return the bytes before a payload of this size."""
    return _HEAD.pack(0x93, 0xCE, tag, 0xCF, check, 0xC6, size)


def head_of(data: bytes | bytearray, sent: str, tags: range) -> tuple[int, int, int]:
    """Return the tag, checksum and payload size in a head. Raises `ProtocolError` unless its tag is in `tags`.

    `sent` begins the error, for example "rank 1 sent rank 0".
    """
    array, uint32, tag, uint64, check, bin32, size = _HEAD.unpack(data)
    if (array, uint32, uint64, bin32) == (0x93, 0xCE, 0xCF, 0xC6) and tag in tags:
        return tag, check, size
    expected = f"93 ce .. cf .. c6 .. with a tag in {tags.start}..{tags.stop - 1}"
    raise ProtocolError(f"{sent} an invalid head of a message", got=data.hex(" "), expected=expected)


def unpacked(data: bytes, what: str, most_items: int = -1) -> Any:
    """Decode one msgpack object. Raises `ProtocolError` for other data, extension types or too long arrays."""
    try:
        return msgpack.unpackb(data, max_array_len=most_items, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as fault:
        raise ProtocolError(f"{what} cannot be read ({type(fault).__name__}: {fault})") from None


# ---- messages of ranks that join ----


class Hello(NamedTuple):
    """The fields of the first message, which the calling rank sends. The nonce is for the called rank's proof."""

    rank: int
    world_size: int
    job: str
    nonce: bytes


# The types of the fields of each kind of message. The kinds have the order of their tags.
_FIELDS: dict[str, list[type]] = {
    "hello": [int, int, str, bytes],  # see `Hello` and `_OPENING`
    # The called rank answers a hello with a nonce for the caller's proof. A caller without the secret gets no more.
    "nonce": [bytes],
    # The caller, then the called rank, proves that it has the secret.
    "proof": [bytes],
    # After both proofs a rank sends rank 0 the URL at which it accepts higher ranks, and a text. Ranks with the same
    # text can meet at a path.
    "listening": [str, str],
    # After all ranks have joined, rank 0 or the server sends the group, its link, and the URLs of ranks 1, 2, ...
    "members": [bytes, str, list],
    # After all ranks have joined over TCP on one host, rank 0 sends the URL of a Unix socket at which all meet again.
    "moved": [str],
    # The called rank refuses the caller, or the group has failed. The fields are the error's class and the reason.
    "abort": [str, str],
}
_KINDS = [*_FIELDS]
# Transfers have lower tags. OpenSSL would read 1 << 24 in a first frame as a hello of SSL 2, and wait for its rest.
_TAGS = range(1 << 25, (1 << 25) + len(_KINDS))
_MOST_BYTES = {"members": MAX_SMALL_PAYLOAD, "abort": 1 << 16}  # payload bytes; 4096 for other kinds
_MOST_FIELDS = 32  # fields of a message at most, of which a later version may use more
_OPENING = ["GE", VERSION]  # the first items of a hello, in all later versions too


def encoded(kind: str, *fields: object) -> bytes:
    """Return a message as a frame."""
    opening = _OPENING if kind == "hello" else []
    payload: bytes = msgpack.packb([*opening, *fields], unicode_errors="replace")
    tag = _TAGS[_KINDS.index(kind)]
    return head(tag, checksum(tag, payload), len(payload)) + payload


def announced(data: bytes | bytearray, who: str) -> tuple[str, int, int]:
    """Return the kind, checksum and payload size of the message that a head from `who` announces.

    Raises `ProtocolError` unless it is the head of a message, and its payload is not too long.
    """
    tag, check, size = head_of(data, f"{who} sent", _TAGS)
    kind = _KINDS[tag - _TAGS.start]
    if size > (most := _MOST_BYTES.get(kind, 4096)):
        raise ProtocolError(f"{kind} from {who} is too long", got=f"{size} bytes", expected=f"at most {most}")
    return kind, check, size


def decoded(kind: str, check: int, payload: bytes) -> list[Any]:
    """Return the fields of a message's payload. Raises `ProtocolError` for a wrong version, fields or checksum."""
    what = f"the payload of {kind}"
    if checksum(_TAGS[_KINDS.index(kind)], payload) != check:
        raise ProtocolError(f"{what} was damaged on the way")
    # msgpack allocates the announced sizes of nested arrays. Only proven ranks send members, which have the high limit.
    told = unpacked(payload, what, -1 if kind == "members" else _MOST_FIELDS)
    fields = told if isinstance(told, list) else []
    if kind == "hello":
        opening, fields = fields[:2], fields[2:]
        if opening != _OPENING:
            raise ProtocolError("the peer has a different protocol version", got=opening, expected=_OPENING)
    if [*map(type, fields)] != _FIELDS[kind]:  # a bool is not an int here
        got, expected = ([each.__name__ for each in types] for types in (map(type, fields), _FIELDS[kind]))
        raise ProtocolError(f"{what} has wrong fields", got=got, expected=expected)
    return fields
