"""Bytes <-> messages: each kind against literal bytes; hostile bytes may raise ProtocolError and do nothing else."""

from __future__ import annotations

import dataclasses
import struct

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradengine.errors import ProtocolError
from gradengine.exchange import wire
from gradengine.exchange.wire import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Abort,
    Hello,
    Listening,
    Members,
    Message,
    Nonce,
    Proof,
    Refused,
    decode_header,
    decode_prefix,
    encode_head,
    expect_payload,
)

NONCE, PROOF = bytes(range(32)), bytes(range(100, 132))
# One of each kind: the message, its payload's length, and the bytes before its payload.
_KINDS = [
    *((Hello(1, 4, "job", NONCE), 0), (Refused(), 2), (Abort("PeerLost"), 11), (Nonce(NONCE, "beside"), 0)),
    *((Proof(PROOF), 0), (Listening("tcp://127.0.0.1:5000"), 0), (Members(NONCE[:16], "tcp"), 23)),
]
_HEADS = """
94a24745cc05ce0000005bcf000000000000000086a46b696e64a568656c6c6fa472616e6b01aa776f726c645f73697a6504a36a6f62a36a
6f62a56e6f6e6365c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa77061796c6f6164c600000000

94a24745cc05ce0000001bcf000000000000000282a46b696e64a772656675736564a77061796c6f6164c600000002

94a24745cc05ce00000028cf000000000000000b83a46b696e64a561626f7274a56572726f72a8506565724c6f7374a77061796c6f6164c6
0000000b

94a24745cc05ce0000004fcf000000000000000084a46b696e64a56e6f6e6365a56e6f6e6365c420000102030405060708090a0b0c0d0e0f
101112131415161718191a1b1c1d1e1fa6626573696465a6626573696465a77061796c6f6164c600000000

94a24745cc05ce00000041cf000000000000000083a46b696e64a570726f6f66a570726f6f66c4206465666768696a6b6c6d6e6f70717273
7475767778797a7b7c7d7e7f80818283a77061796c6f6164c600000000

94a24745cc05ce00000036cf000000000000000083a46b696e64a96c697374656e696e67a375726cb47463703a2f2f3132372e302e302e31
3a35303030a77061796c6f6164c600000000

94a24745cc05ce0000003ccf000000000000001784a46b696e64a76d656d62657273a567726f7570c410000102030405060708090a0b0c0d
0e0fa46c696e6ba3746370a77061796c6f6164c600000017
"""
LITERAL = [(*kind, text) for kind, text in zip(_KINDS, _HEADS.split("\n\n"), strict=True)]
every_kind = pytest.mark.parametrize(
    ("message", "payload_bytes", "head"),
    [(message, size, bytes.fromhex(text)) for message, size, text in LITERAL],
    ids=[message.kind for message, _, _ in LITERAL],
)


def decoded(head):
    """What a reader makes of a head that arrived whole."""
    header_bytes, payload_bytes = decode_prefix(head[:PREFIX_BYTES])
    return decode_header(head[PREFIX_BYTES : PREFIX_BYTES + header_bytes], payload_bytes), payload_bytes


def header_of(fields, *, payload=b"\xc6\0\0\0\0"):
    """A header with any entries; the last value is the head of an empty payload."""
    packed = b"".join(msgpack.packb(key) + msgpack.packb(value) for key, value in fields)
    return bytes([0x80 + len(fields) + 1]) + packed + msgpack.packb("payload") + payload


ABORT = [("kind", "abort"), ("error", "PeerLost")]
HELLO = [("kind", "hello"), ("rank", 1), ("world_size", 4), ("job", ""), ("nonce", NONCE)]


def of_rank(rank):
    """The fields of a hello."""
    return [*HELLO[:1], ("rank", rank), *HELLO[2:]]


# ---- what is right ----


@every_kind
def test_messages_are_these_bytes(message, payload_bytes, head):
    assert encode_head(message, payload_bytes) == head
    assert decoded(head) == (message, payload_bytes)


def test_the_literal_messages_are_all_kinds():
    kinds = {cls.kind for cls in Message.__subclasses__()}
    assert [message.kind for message, _, _ in LITERAL] == list(dict.fromkeys(message.kind for message, _, _ in LITERAL))
    assert {message.kind for message, _, _ in LITERAL} == kinds


def test_stock_msgpack_reads_the_whole_stream():
    sent, stream = [], msgpack.Unpacker()
    for message, payload_bytes, _ in LITERAL:
        payload = bytes(i % 251 for i in range(payload_bytes))
        sent.append((message, payload))
        stream.feed(encode_head(message, payload_bytes) + payload)
    objects = list(stream)
    assert len(objects) == 2 * len(sent)
    for (message, payload), prefix, fields in zip(sent, objects[::2], objects[1::2], strict=True):
        assert prefix[:2] == ["GE", 5]
        assert prefix[3] == len(payload)
        assert fields == {"kind": message.kind, **dataclasses.asdict(message), "payload": payload}
        assert (next(iter(fields)), list(fields)[-1]) == ("kind", "payload")


integers = st.integers(0, 2**63 - 1)
messages = st.one_of(
    st.builds(Hello, integers, integers, st.text(max_size=40), st.binary(max_size=64)),
    st.builds(Proof, st.binary(max_size=64)),
    st.builds(Listening, st.text(max_size=40)),
    st.builds(Members, st.binary(max_size=16), st.text(max_size=40)),
    st.builds(Abort, st.text(max_size=40)),
)


@given(messages, st.integers(0, 2**32 - 1))
@example(Hello(2**63 - 1, 0, "", b""), 2**32 - 1)
@example(Abort("x" * (MAX_HEADER_BYTES - 34)), 0)  # the longest
def test_what_was_encoded_is_decoded(message, payload_bytes):
    assert decoded(encode_head(message, payload_bytes)) == (message, payload_bytes)


# ---- what is hostile ----


@every_kind
def test_cut_off_at_every_byte(message, payload_bytes, head):
    for size in range(len(head)):
        with pytest.raises(ProtocolError):
            decoded(head[:size])


@every_kind
def test_every_flipped_byte_is_refused_or_another_message(message, payload_bytes, head):
    for at in range(len(head)):
        for value in {head[at] ^ (1 << bit) for bit in range(8)} | {0x00, 0xC1, 0xFF}:
            if value == head[at]:
                continue
            flipped = head[:at] + bytes([value]) + head[at + 1 :]
            try:
                found, found_bytes = decoded(flipped + bytes(MAX_HEADER_BYTES))  # as if more had come
            except ProtocolError:
                continue
            assert at >= PREFIX_BYTES, "no bit of the prefix is free"
            assert found_bytes == payload_bytes
            assert found != message
            assert decoded(encode_head(found, found_bytes)) == (found, found_bytes)


GOOD = [0x94, 0xA2, b"GE", 0xCC, 5, 0xCE, 33, 0xCF, 0]
BAD_PREFIXES = [(0, 0x93), (2, b"GX"), (4, 4), (4, 6), *((6, n) for n in (0, 5, MAX_HEADER_BYTES + 1, 2**32 - 1))]
BAD_PREFIXES += [(8, size) for size in (2**32, 2**40, 2**64 - 1)]


@pytest.mark.parametrize(("at", "value"), BAD_PREFIXES)
def test_prefix_of_something_else_or_with_lengths_out_of_range(at, value):
    fields = [*GOOD[:at], value, *GOOD[at + 1 :]]
    assert decode_prefix(struct.pack(">BB2sBBBIBQ", *GOOD)) == (33, 0)
    with pytest.raises(ProtocolError):
        decode_prefix(struct.pack(">BB2sBBBIBQ", *fields))


def test_prefix_and_header_that_announce_different_payloads():
    header = header_of(ABORT, payload=b"\xc6\0\0\0\x05")
    assert decode_header(header, 5) == Abort("PeerLost")
    for announced in (0, 4, 6):
        with pytest.raises(ProtocolError):
            decode_header(header, announced)


# Lists of a header's fields, without its payload.
BAD_FIELDS = [
    *([*ABORT, ("error", "")], [("kind", "abort"), *ABORT], [*ABORT, ("payload", b"")], [*reversed(ABORT)]),
    *([("error", "PeerLost")], [], [("kind", "abort")], [*ABORT, ("more", 1)], [("kind", "abort"), (b"error", "")]),
    *([("kind", kind)] for kind in ("pickle", 3, None, ["abort"], {"abort": 1})),
    *([("kind", "Abort"), ("error", "PeerLost")], [("kind", "abort"), (7, 7)], [*HELLO[:-1], ("nonce", "text")]),
    [("kind", "abort"), ("error", b"PeerLost")],
    *map(of_rank, ("7", 7.0, True, None, b"7", [], {}, {"rank": {"rank": 7}}, [7], -1, 2**63, 2**64 - 1)),
    *map(of_rank, (msgpack.ExtType(5, b""), msgpack.ExtType(5, b"xyz"), msgpack.Timestamp(1))),
]
NO_MAPS = [
    *(b"", b"\xc0", b"\x93\x01\x02\x03", b"\x82\xa4kind"),  # nothing, an array, a map that ends early
    *(b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"),  # a map and an array of 2**32 - 1 entries
    *(b"\x81" * 4000, b"\x91" * 4000, b"\x81\xa4kind" + b"\x81\xa1x" * 300 + b"\xc0"),  # maps in maps
    b"\x82\xa4kind\xa5abort\xa5error" + b"\x81\xa1x" * 1000 + b"\xc0",
    b"\x82\xa4kind\xa5\xff\xff\xff\xff\xff\xa7payload",  # no UTF-8
    header_of(ABORT)[:-5] + b"\x01",  # something between key and payload
]
PAYLOADS = [b"\xc4\0", b"\xc5\0\0", b"\xa0", b"\xc0", b"\0\0\0\0\0"]  # in another form
BAD_HEADERS = [
    *map(header_of, BAD_FIELDS),
    *(body + b"\xc6\0\0\0\0" for body in NO_MAPS),
    *(header_of(ABORT, payload=form) for form in PAYLOADS),
    b"\x01" + header_of(ABORT),
]


@pytest.mark.parametrize("header", BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_headers_that_cannot_be(header):
    assert decode_header(header_of(ABORT), 0) == Abort("PeerLost")
    assert decode_header(header_of(HELLO), 0) == Hello(1, 4, "", NONCE)
    with pytest.raises(ProtocolError):
        decode_header(header, 0)


def test_payload_beyond_its_kinds_limit():
    expect_payload(Refused(), 10, 10)
    with pytest.raises(ProtocolError, match="got 11"):
        expect_payload(Refused(), 11, 10)


@given(st.binary(max_size=64))
@example(b"\x94\xa2GE\xcc\x02\xce")
def test_random_prefix(data):
    try:
        header_bytes, payload_bytes = decode_prefix(data)
    except ProtocolError:
        return
    assert len(data) == PREFIX_BYTES
    assert header_bytes <= MAX_HEADER_BYTES
    assert payload_bytes < 2**32


words = st.sampled_from(["kind", "job", "error", "url", "payload", "nonce", "rank", "abort", "hello", "proof"])
plain = st.one_of(words, st.none(), st.integers(-1, 9), st.floats(), st.binary(), st.lists(words, max_size=2))
entries = st.lists(st.tuples(words, plain), max_size=8)


@given(st.one_of(st.binary(max_size=200), entries.map(header_of)))
def test_random_header(header):
    try:
        message = decode_header(header, 0)
    except ProtocolError:
        return
    assert decoded(encode_head(message, 0)) == (message, 0)


def test_limits_of_the_document():
    assert (PREFIX_BYTES, MAX_HEADER_BYTES, wire.MAX_SMALL_PAYLOAD, wire.PROTOCOL_VERSION) == (20, 4096, 16 << 20, 5)
