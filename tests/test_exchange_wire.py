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
# One of each kind: the message, its payload's length, and the bytes before its payload (the first line is the prefix).
LITERAL = [
    (
        Hello(1, 4, "job", NONCE),
        0,
        """
        94 a2 47 45 cc 04 ce 00 00 00 5b cf 00 00 00 00 00 00 00 00
        86 a4 6b 69 6e 64 a5 68 65 6c 6c 6f a4 72 61 6e 6b 01 aa 77 6f 72 6c 64 5f 73 69 7a 65 04 a3 6a
        6f 62 a3 6a 6f 62 a5 6e 6f 6e 63 65 c4 20 00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f 10 11
        12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f a7 70 61 79 6c 6f 61 64 c6 00 00 00 00""",
    ),
    (
        Refused(),
        2,
        """
        94 a2 47 45 cc 04 ce 00 00 00 1b cf 00 00 00 00 00 00 00 02
        82 a4 6b 69 6e 64 a7 72 65 66 75 73 65 64 a7 70 61 79 6c 6f 61 64 c6 00 00 00 02""",
    ),
    (
        Abort("PeerLost"),
        11,
        """
        94 a2 47 45 cc 04 ce 00 00 00 28 cf 00 00 00 00 00 00 00 0b
        83 a4 6b 69 6e 64 a5 61 62 6f 72 74 a5 65 72 72 6f 72 a8 50 65 65 72 4c 6f 73 74 a7 70 61 79 6c
        6f 61 64 c6 00 00 00 0b""",
    ),
    (
        Nonce(NONCE, "beside"),
        0,
        """
        94 a2 47 45 cc 04 ce 00 00 00 4f cf 00 00 00 00 00 00 00 00
        84 a4 6b 69 6e 64 a5 6e 6f 6e 63 65 a5 6e 6f 6e 63 65 c4 20 00 01 02 03 04 05 06 07 08 09 0a 0b
        0c 0d 0e 0f 10 11 12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f a6 62 65 73 69 64 65 a6 62 65 73 69
        64 65 a7 70 61 79 6c 6f 61 64 c6 00 00 00 00""",
    ),
    (
        Proof(PROOF),
        0,
        """
        94 a2 47 45 cc 04 ce 00 00 00 41 cf 00 00 00 00 00 00 00 00
        83 a4 6b 69 6e 64 a5 70 72 6f 6f 66 a5 70 72 6f 6f 66 c4 20 64 65 66 67 68 69 6a 6b 6c 6d 6e 6f
        70 71 72 73 74 75 76 77 78 79 7a 7b 7c 7d 7e 7f 80 81 82 83 a7 70 61 79 6c 6f 61 64 c6 00 00 00
        00""",
    ),
    (
        Listening("tcp://127.0.0.1:5000"),
        0,
        """
        94 a2 47 45 cc 04 ce 00 00 00 36 cf 00 00 00 00 00 00 00 00
        83 a4 6b 69 6e 64 a9 6c 69 73 74 65 6e 69 6e 67 a3 75 72 6c b4 74 63 70 3a 2f 2f 31 32 37 2e 30
        2e 30 2e 31 3a 35 30 30 30 a7 70 61 79 6c 6f 61 64 c6 00 00 00 00""",
    ),
    (
        Members(NONCE[:16], "tcp"),
        23,
        """
        94 a2 47 45 cc 04 ce 00 00 00 3c cf 00 00 00 00 00 00 00 17
        84 a4 6b 69 6e 64 a7 6d 65 6d 62 65 72 73 a5 67 72 6f 75 70 c4 10 00 01 02 03 04 05 06 07 08 09
        0a 0b 0c 0d 0e 0f a4 6c 69 6e 6b a3 74 63 70 a7 70 61 79 6c 6f 61 64 c6 00 00 00 17""",
    ),
]
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
def test_encodes_to_these_bytes(message, payload_bytes, head):
    assert encode_head(message, payload_bytes) == head


@every_kind
def test_decodes_from_these_bytes(message, payload_bytes, head):
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
        assert prefix[:2] == ["GE", 4]
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
def test_what_was_encoded_is_decoded(message, payload_bytes):
    assert decoded(encode_head(message, payload_bytes)) == (message, payload_bytes)


def test_largest_integer_and_longest_payload():
    message = Hello(2**63 - 1, 0, "", b"")
    assert decoded(encode_head(message, 2**32 - 1)) == (message, 2**32 - 1)


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


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, 0x93, "not a gradengine message"),
        (2, ord("X"), "not a gradengine message"),
        (5, 1, "another protocol version: got 1, expected 4"),
    ],
)
def test_prefix_of_something_else(at, value, says):
    prefix = bytearray(encode_head(Abort("PeerLost"))[:PREFIX_BYTES])
    prefix[at] = value
    with pytest.raises(ProtocolError, match=says):
        decode_prefix(bytes(prefix))


@pytest.mark.parametrize("header_bytes", [0, 5, MAX_HEADER_BYTES + 1, 2**32 - 1])
def test_header_length_out_of_range(header_bytes):
    prefix = struct.pack(">BB2sBBBIBQ", 0x94, 0xA2, b"GE", 0xCC, 4, 0xCE, header_bytes, 0xCF, 0)
    with pytest.raises(ProtocolError, match=f"header length is out of range: got {header_bytes}"):
        decode_prefix(prefix)


@pytest.mark.parametrize("payload_bytes", [2**32, 2**40, 2**64 - 1])
def test_payload_of_4_gib_or_more(payload_bytes):
    prefix = struct.pack(">BB2sBBBIBQ", 0x94, 0xA2, b"GE", 0xCC, 4, 0xCE, 33, 0xCF, payload_bytes)
    with pytest.raises(ProtocolError, match="less than 4 GiB"):
        decode_prefix(prefix)


def test_longest_header():
    longest = Abort("x" * (MAX_HEADER_BYTES - 34))
    head = encode_head(longest)
    assert len(head) == PREFIX_BYTES + MAX_HEADER_BYTES
    assert decoded(head) == (longest, 0)
    with pytest.raises(ProtocolError, match="got 4097"):
        decoded(encode_head(Abort(longest.error + "x")))


def test_prefix_and_header_that_announce_different_payloads():
    header = header_of(ABORT, payload=b"\xc6\0\0\0\x05")
    assert decode_header(header, 5) == Abort("PeerLost")
    for announced in (0, 4, 6):
        with pytest.raises(ProtocolError, match=f"different payloads: got 5, expected {announced}"):
            decode_header(header, announced)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ([*ABORT, ("error", "")], "each once"),
        ([("kind", "abort"), *ABORT], "each once"),
        ([*ABORT, ("payload", b"")], "each once"),
        ([*reversed(ABORT)], "'kind' first"),
        ([("error", "PeerLost")], "'kind' first"),
        ([], "'kind' first"),
        ([("kind", "pickle")], "unknown kind of message: got 'pickle'"),
        ([("kind", 3)], "unknown kind"),
        ([("kind", None)], "unknown kind"),
        ([("kind", ["abort"])], "header is not msgpack"),
        ([("kind", {"abort": 1})], "unknown kind"),
        ([("kind", "Abort"), ("error", "PeerLost")], "unknown kind"),
        ([("kind", "abort")], r"fields of 'abort' are wrong: got \[\], expected \['error'\]"),
        ([*ABORT, ("more", 1)], r"fields of 'abort' are wrong: got \['error', 'more'\]"),
        ([("kind", "abort"), (b"error", "")], "fields of 'abort' are wrong"),
        ([("kind", "abort"), (7, 7)], "header is not msgpack"),
        (of_rank("7"), "'hello.rank' has a wrong type: got str, expected int"),
        (of_rank(7.0), "got float"),
        (of_rank(True), "got bool"),
        (of_rank(None), "got NoneType"),
        (of_rank(b"7"), "got bytes"),
        (of_rank([]), "got list"),
        (of_rank({}), "has a wrong type"),
        (of_rank({"rank": {"rank": 7}}), "has a wrong type"),
        (of_rank([7]), "header is not msgpack"),
        (of_rank(msgpack.ExtType(5, b"")), "has a wrong type"),
        (of_rank(msgpack.ExtType(5, b"xyz")), "header is not msgpack"),
        (of_rank(msgpack.Timestamp(1)), "header is not msgpack"),
        (of_rank(-1), "out of range: got -1"),
        (of_rank(2**63), "out of range: got 9223372036854775808"),
        (of_rank(2**64 - 1), "out of range"),
        ([*HELLO[:-1], ("nonce", "text")], "'hello.nonce' has a wrong type: got str, expected bytes"),
        ([("kind", "abort"), ("error", b"PeerLost")], "'abort.error' has a wrong type: got bytes, expected str"),
    ],
)
def test_headers_that_cannot_be(fields, says):
    with pytest.raises(ProtocolError, match=says):
        decode_header(header_of(fields), 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x93\x01\x02\x03",  # an array
        b"\x82\xa4kind",  # a map that ends early
        b"\xdf\xff\xff\xff\xff",  # a map of 2**32 - 1 entries
        b"\xdd\xff\xff\xff\xff",  # an array of as many
        b"\x81" * 4000,  # maps in maps
        b"\x91" * 4000,
        b"\x81\xa4kind" + b"\x81\xa1x" * 300 + b"\xc0",  # a kind of maps in maps
        b"\x82\xa4kind\xa5abort\xa5error" + b"\x81\xa1x" * 1000 + b"\xc0",
        b"\x82\xa4kind\xa5\xff\xff\xff\xff\xff\xa7payload",  # no UTF-8
        header_of(ABORT)[:-5] + b"\x01",  # something between key and payload
    ],
)
def test_headers_that_are_no_map(body):
    with pytest.raises(ProtocolError):
        decode_header(body + b"\xc6\0\0\0\0", 0)


def test_two_objects_in_one_header():
    with pytest.raises(ProtocolError, match="ExtraData"):
        decode_header(b"\x01" + header_of(ABORT), 0)


@pytest.mark.parametrize("form", [b"\xc4\0", b"\xc5\0\0", b"\xa0", b"\xc0", b"\0\0\0\0\0"])
def test_payload_in_another_form(form):
    with pytest.raises(ProtocolError):
        decode_header(header_of(ABORT, payload=form), 0)


def test_payload_beyond_its_kinds_limit():
    expect_payload(Refused(), 10, 10)
    with pytest.raises(ProtocolError, match="payload of 'refused' is too long: got 11, expected at most 10"):
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


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
entries = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(["kind", "job", "error", "url", "group", "payload", "nonce", "rank"]), plain),
        st.one_of(st.sampled_from(["abort", "hello", "members", "proof"]), st.integers(0, 9), plain),
    ),
    max_size=8,
)


@given(st.one_of(st.binary(max_size=200), entries.map(header_of)))
def test_random_header(header):
    try:
        message = decode_header(header, 0)
    except ProtocolError:
        return
    assert decoded(encode_head(message, 0)) == (message, 0)


def test_limits_of_the_document():
    assert (PREFIX_BYTES, MAX_HEADER_BYTES, wire.MAX_SMALL_PAYLOAD, wire.PROTOCOL_VERSION) == (20, 4096, 16 << 20, 4)
