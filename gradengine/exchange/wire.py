"""Encoding and decoding of messages, without I/O: the format of docs/wire.md.

A message is two msgpack objects: a prefix of fixed width, and a header map whose last value is the payload as `bin`.
The stream is valid msgpack for any reader, yet the payload is sent from and received into the arena without a packer.
Lengths and types are checked here before anything is allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import msgpack

from gradengine.errors import ProtocolError
from gradengine.layout.unpacking import refuse_unbounded

PROTOCOL_VERSION = 5
MAX_HEADER_BYTES = 4096
MAX_SMALL_PAYLOAD = 16 << 20  # of a list of ranks; and of what is gathered, layout tables for example
MAX_TEXT_BYTES = 1 << 16  # of the text of a refusal or an abort
NONCE_BYTES = 32

_PREFIX = struct.Struct(">BB2sBBBIBQ")  # fixarray(4): "GE", uint8 version, uint32 header bytes, uint64 payload bytes
PREFIX_BYTES = _PREFIX.size
_BIN32 = struct.Struct(">BI")
_TLS_HELLO = b"\x16\x03"  # the first bytes of whoever begins TLS (RFC 8446, 5.1)


@dataclass(frozen=True)
class Message:
    """Base class of messages; `kind` is the name on the wire."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Hello(Message):
    """First message, from the rank that calls: rank, world size, job, and a nonce for the called rank's proof."""

    kind = "hello"
    rank: int
    world_size: int
    job: str
    nonce: bytes


@dataclass(frozen=True)
class Refused(Message):
    """From the called rank: the caller is refused. The payload is the reason, in UTF-8."""

    kind = "refused"


@dataclass(frozen=True)
class Abort(Message):
    """From the called rank: the group has failed. The payload is the reason, in UTF-8; `error` names its class."""

    kind = "abort"
    error: str


@dataclass(frozen=True)
class Nonce(Message):
    """From the called rank, after the caller's hello: a nonce for the caller's proof, and a socket for the same host.

    `beside` is that Unix socket's name, or empty. A stranger is told no more than this.
    """

    kind = "nonce"
    nonce: bytes
    beside: str


@dataclass(frozen=True)
class Proof(Message):
    """From the caller, then from the called rank: the proof that it has the secret."""

    kind = "proof"
    proof: bytes


@dataclass(frozen=True)
class Listening(Message):
    """From a rank to rank 0, after both have proved themselves: the URL at which the rank accepts those above it."""

    kind = "listening"
    url: str


@dataclass(frozen=True)
class Members(Message):
    """From rank 0 or the server, after all have joined: the group, and its link.

    The payload is a msgpack array of the others' URLs.
    """

    kind = "members"
    group: bytes
    link: str


_KINDS: dict[str, type[Message]] = {
    cls.kind: cls for cls in (*(Hello, Nonce, Proof, Listening, Members, Refused, Abort),)
}
_TYPES = {"int": int, "str": str, "bytes": bytes}


def encode_head(message: Message, payload_bytes: int = 0) -> bytes:
    """A message's prefix and header: everything before the payload."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(values) + 2)
    for key, value in {"kind": message.kind, **values}.items():
        packer.pack(key)
        packer.pack(value)
    packer.pack("payload")
    header: bytes = packer.bytes() + _BIN32.pack(0xC6, payload_bytes)
    prefix = _PREFIX.pack(0x94, 0xA2, b"GE", 0xCC, PROTOCOL_VERSION, 0xCE, len(header), 0xCF, payload_bytes)
    return prefix + header


def decode_prefix(prefix: bytes) -> tuple[int, int]:
    """The lengths of a message's header and payload in bytes."""
    if len(prefix) != PREFIX_BYTES:
        raise ProtocolError("message prefix is cut off", got=f"{len(prefix)} bytes", expected=f"{PREFIX_BYTES} bytes")
    array, string, magic, u8, version, u32, header_bytes, u64, payload_bytes = _PREFIX.unpack(prefix)
    if (array, string, magic, u8, u32, u64) != (0x94, 0xA2, b"GE", 0xCC, 0xCE, 0xCF):
        do = "if it calls with TLS, give all ranks tls=" if prefix.startswith(_TLS_HELLO) else None
        raise ProtocolError("not a gradengine message", got=prefix.hex(), expected="a prefix as in docs/wire.md", do=do)
    if version != PROTOCOL_VERSION:
        raise ProtocolError("the peer speaks another protocol version", got=version, expected=PROTOCOL_VERSION)
    if not _BIN32.size < header_bytes <= MAX_HEADER_BYTES:
        raise ProtocolError("header length is out of range", got=header_bytes, expected=f"6..{MAX_HEADER_BYTES}")
    if payload_bytes >= 1 << 32:
        raise ProtocolError("payload is longer than a msgpack bin", got=payload_bytes, expected="less than 4 GiB")
    return header_bytes, payload_bytes


def decode_header(header: bytes, payload_bytes: int) -> Message:
    """The message in a header whose payload has `payload_bytes`."""
    if len(header) <= _BIN32.size:
        raise ProtocolError("message header is cut off", got=f"{len(header)} bytes")
    tag, announced = _BIN32.unpack(header[-_BIN32.size :])
    if (tag, announced) != (0xC6, payload_bytes):
        raise ProtocolError("header and prefix announce different payloads", got=announced, expected=payload_bytes)
    entries = _entries(header[: -_BIN32.size] + b"\xc4\x00")
    keys = [key for key, _ in entries]
    if keys[:1] != ["kind"] or keys[-1:] != ["payload"] or len(set(map(repr, keys))) != len(keys):
        raise ProtocolError("header keys are wrong", got=keys[:12], expected="'kind' first, 'payload' last, each once")
    values = dict(entries[1:-1])
    cls = _KINDS.get(entries[0][1]) if isinstance(entries[0][1], str) else None
    if cls is None:
        raise ProtocolError("unknown kind of message", got=repr(entries[0][1])[:80], expected=sorted(_KINDS))
    return _checked(cls, values)


def expect_payload(message: Message, payload_bytes: int, limit: int) -> None:
    """Raise `ProtocolError` for a payload that is longer than this kind's limit; called before it is allocated."""
    if payload_bytes > limit:
        raise ProtocolError(f"payload of '{message.kind}' is too long", got=payload_bytes, expected=f"at most {limit}")


def _entries(header: bytes) -> list[tuple[Any, Any]]:
    refuse_unbounded(header, "a message header")
    try:
        # Pairs, not a dict, in which the last of two equal keys would win silently.
        unpacked = msgpack.unpackb(
            header, object_pairs_hook=_Pairs, strict_map_key=True, max_array_len=0, max_map_len=16, max_ext_len=0
        )
    except (ValueError, TypeError, msgpack.UnpackException) as fault:
        raise ProtocolError(f"header is not msgpack ({type(fault).__name__}: {fault})") from None
    if not isinstance(unpacked, _Pairs):
        raise ProtocolError("header is not a map", got=type(unpacked).__name__)
    return list(unpacked)


class _Pairs(list[tuple[Any, Any]]):
    """A map's entries in wire order."""


def _checked(cls: type[Message], values: dict[Any, Any]) -> Message:
    expected = {field.name: str(field.type) for field in fields(cls)}
    if set(values) != set(expected):
        raise ProtocolError(
            f"fields of '{cls.kind}' are wrong", got=sorted(map(str, values)), expected=sorted(expected)
        )
    for name, type_name in expected.items():
        value = values[name]
        if type(value) is not _TYPES[type_name]:  # a bool is not an int here
            raise ProtocolError(f"'{cls.kind}.{name}' has a wrong type", got=type(value).__name__, expected=type_name)
        if isinstance(value, int) and not 0 <= value < 1 << 63:
            raise ProtocolError(f"'{cls.kind}.{name}' is out of range", got=value, expected="0..2**63 - 1")
    return cls(**values)
