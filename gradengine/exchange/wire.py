"""Bytes <-> messages, no I/O: the format of docs/wire.md.

A message is two msgpack objects in a row: a prefix of fixed width and a header map whose last value is the payload as
`bin`. The stream is plain msgpack for a reader in any language, yet the payload never enters a packer: it is sent from
and received into the arena. Everything a peer says is bounded and checked here before anything is allocated for it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

import msgpack

from gradengine.errors import ProtocolError
from gradengine.unpacking import refuse_unbounded

__all__ = [
    "PREFIX_BYTES",
    "PROTOCOL_VERSION",
    "Abort",
    "Challenge",
    "Gather",
    "Gathered",
    "Gradient",
    "Hello",
    "Join",
    "Message",
    "Refused",
    "Sum",
    "Verdict",
    "Welcome",
    "decode_header",
    "decode_prefix",
    "encode_head",
]

PROTOCOL_VERSION = 2
MAX_HEADER_BYTES = 4096
MAX_SMALL_PAYLOAD = 16 << 20  # layout tables and gathers; a gradient's bound is its bucket
MAX_TEXT_BYTES = 1 << 16  # why a worker is refused, or a group has failed
NONCE_BYTES = 32

_PREFIX = struct.Struct(">BB2sBBBIBQ")  # fixarray(4): "GE", uint8 version, uint32 header bytes, uint64 payload bytes
PREFIX_BYTES = _PREFIX.size
_BIN32 = struct.Struct(">BI")

Key: TypeAlias = int | str


@dataclass(frozen=True)
class Message:
    """The base of all messages; `kind` names each on the wire."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Hello(Message):
    """Worker to coordinator, first: who comes, to which job, and a nonce for the coordinator to prove itself with."""

    kind = "hello"
    rank: int
    world_size: int
    job: str
    nonce: bytes


@dataclass(frozen=True)
class Challenge(Message):
    """Coordinator to worker: its proof, and a nonce for the worker to prove itself with."""

    kind = "challenge"
    nonce: bytes
    proof: bytes


@dataclass(frozen=True)
class Join(Message):
    """Worker to coordinator: its proof, how far its step has come and as whom; the payload is the layout table."""

    kind = "join"
    proof: bytes
    step: int
    summed: int
    contributed: int
    torn: int
    group: bytes
    group_rank: int
    group_size: int


@dataclass(frozen=True)
class Welcome(Message):
    """Coordinator to worker, once all have joined: where the step stands, how spans are cut and which group it is."""

    kind = "welcome"
    summed: int
    bucket_bytes: int
    group: bytes


@dataclass(frozen=True)
class Refused(Message):
    """Coordinator to worker: it may not join. The payload says why, in UTF-8."""

    kind = "refused"


@dataclass(frozen=True)
class Gradient(Message):
    """Worker to coordinator: its contribution to one bucket; the payload is little-endian fp32."""

    kind = "gradient"
    step: int
    key: Key
    offset: int
    dtype: str


@dataclass(frozen=True)
class Sum(Message):
    """Coordinator to worker: the sum of one bucket over all ranks."""

    kind = "sum"
    step: int
    key: Key
    offset: int
    dtype: str


@dataclass(frozen=True)
class Verdict(Message):
    """Coordinator to worker, after a step's last sum: what was not finite, as payload rows [rank, index, value]."""

    kind = "verdict"
    step: int


@dataclass(frozen=True)
class Gather(Message):
    """Worker to coordinator: its part of a gather."""

    kind = "gather"


@dataclass(frozen=True)
class Gathered(Message):
    """Coordinator to worker: all parts in rank order, as a msgpack array of bin."""

    kind = "gathered"


@dataclass(frozen=True)
class Abort(Message):
    """Coordinator to worker: the group has failed. The payload says how, in UTF-8; `error` names its kind."""

    kind = "abort"
    error: str


_KINDS: dict[str, type[Message]] = {
    cls.kind: cls for cls in (Hello, Challenge, Join, Welcome, Refused, Gradient, Sum, Verdict, Gather, Gathered, Abort)
}
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "bytes": (bytes,), "Key": (int, str)}


def encode_head(message: Message, payload_bytes: int = 0) -> bytes:
    """Everything of a message that comes before its payload.

    Example:
        >>> head = encode_head(Verdict(step=7), payload_bytes=3)
        >>> msgpack.unpackb(head[PREFIX_BYTES:] + b"abc")
        {'kind': 'verdict', 'step': 7, 'payload': b'abc'}
    """
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
    """Header bytes and payload bytes of the message that begins so.

    Raises:
        ProtocolError: Not ours, another version, or a header that is too long.

    Example:
        >>> decode_prefix(encode_head(Verdict(step=7))[:PREFIX_BYTES])
        (33, 0)
    """
    if len(prefix) != PREFIX_BYTES:
        raise ProtocolError("message prefix is cut off", got=f"{len(prefix)} bytes", expected=f"{PREFIX_BYTES} bytes")
    array, string, magic, u8, version, u32, header_bytes, u64, payload_bytes = _PREFIX.unpack(prefix)
    if (array, string, magic, u8, u32, u64) != (0x94, 0xA2, b"GE", 0xCC, 0xCE, 0xCF):
        raise ProtocolError("this is no gradengine message", got=prefix.hex(), expected="a prefix as in docs/wire.md")
    if version != PROTOCOL_VERSION:
        raise ProtocolError("the peer speaks another protocol version", got=version, expected=PROTOCOL_VERSION)
    if not _BIN32.size < header_bytes <= MAX_HEADER_BYTES:
        raise ProtocolError("header length is out of range", got=header_bytes, expected=f"6..{MAX_HEADER_BYTES}")
    if payload_bytes >= 1 << 32:
        raise ProtocolError("payload is longer than a msgpack bin", got=payload_bytes, expected="less than 4 GiB")
    return header_bytes, payload_bytes


def decode_header(header: bytes, payload_bytes: int) -> Message:
    """The message of a header that announces `payload_bytes`.

    Raises:
        ProtocolError: Not a map of exactly one kind's fields, or fields of other types or out of range.

    Example:
        >>> head = encode_head(Verdict(step=7))
        >>> decode_header(head[PREFIX_BYTES:], 0)
        Verdict(step=7)
    """
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
    """Raise `ProtocolError` where a payload is longer than this kind's limit: before memory is taken for it."""
    if payload_bytes > limit:
        raise ProtocolError(f"payload of '{message.kind}' is too long", got=payload_bytes, expected=f"at most {limit}")


def _entries(header: bytes) -> list[tuple[Any, Any]]:
    refuse_unbounded(header, "a message header")
    try:
        # Pairs, not a dict: msgpack lets the last of two equal keys win silently.
        unpacked = msgpack.unpackb(
            header, object_pairs_hook=_Pairs, strict_map_key=True, max_array_len=0, max_map_len=16, max_ext_len=0
        )
    except (ValueError, TypeError, msgpack.UnpackException) as fault:
        raise ProtocolError(f"header is not msgpack ({type(fault).__name__}: {fault})") from None
    if not isinstance(unpacked, _Pairs):
        raise ProtocolError("header is no map", got=type(unpacked).__name__)
    return list(unpacked)


class _Pairs(list[tuple[Any, Any]]):
    """A map's entries in the order of the wire."""


def _checked(cls: type[Message], values: dict[Any, Any]) -> Message:
    expected = {field.name: str(field.type) for field in fields(cls)}
    if set(values) != set(expected):
        raise ProtocolError(
            f"fields of '{cls.kind}' are wrong", got=sorted(map(str, values)), expected=sorted(expected)
        )
    for name, type_name in expected.items():
        value = values[name]
        if type(value) not in _TYPES[type_name]:  # bool is no int here
            raise ProtocolError(f"'{cls.kind}.{name}' has a wrong type", got=type(value).__name__, expected=type_name)
        if isinstance(value, int) and not 0 <= value < 1 << 63:
            raise ProtocolError(f"'{cls.kind}.{name}' is out of range", got=value, expected="0..2**63 - 1")
    return cls(**values)
