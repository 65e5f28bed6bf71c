"""Bytes <-> messages: each kind against literal bytes; hostile bytes may raise ProtocolError and do nothing else."""

from __future__ import annotations

import contextlib
import socket
import struct
import tracemalloc

import msgpack
import pytest
from channel import claim, framed, tag_of
from hypothesis import example, given
from hypothesis import strategies as st

from gradengine.errors import ExchangeError, ProtocolError
from gradengine.exchange.handshake import Line
from gradengine.exchange.wire import (
    _KINDS,
    HEAD_BYTES,
    MAX_SMALL_PAYLOAD,
    VERSION,
    announced,
    checksum,
    decoded,
    encoded,
    head,
    head_of,
    unpacked,
)

NONCE, PROOF = bytes(range(32)), bytes(range(100, 132))
_MESSAGES = [
    *(("hello", 1, 4, "job", NONCE), ("nonce", NONCE), ("proof", PROOF)),
    *(("listening", "tcp://127.0.0.1:5000", "a host"), ("members", NONCE[:16], "tcp", ["unix:///a", "tcp://[::1]:5"])),
    *(("moved", "unix:///s"), ("abort", "PeerLost", "rank 1 left")),
]
_FRAMES = """
93ce02000000cf0fc1268452121a1fc60000002d96a24745050104a36a6f62c420000102030405060708090a0b0c0d0e0f10111213141516
1718191a1b1c1d1e1f

93ce02000001cfb4f862ab77b9fa2ec60000002391c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f

93ce02000002cf62c34b796f5a887bc60000002391c4206465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283

93ce02000003cf271ba5458cd7f85ac60000001d92b47463703a2f2f3132372e302e302e313a35303030a66120686f7374

93ce02000004cfa6442a76e31433dfc60000003093c410000102030405060708090a0b0c0d0e0fa374637092a9756e69783a2f2f2f61ad74
63703a2f2f5b3a3a315d3a35

93ce02000005cf17595a89edbf54cac60000000b91a9756e69783a2f2f2f73

93ce02000006cff1c0683f486a5384c60000001692a8506565724c6f7374ab72616e6b2031206c656674
"""
LITERAL = [(message, bytes.fromhex(text)) for message, text in zip(_MESSAGES, _FRAMES.split("\n\n"), strict=True)]
every_kind = pytest.mark.parametrize(("message", "frame"), LITERAL, ids=_KINDS)


def read(frame):
    """What a reader makes of a frame that arrived whole."""
    kind, check, size = announced(frame[:HEAD_BYTES], "a rank")
    assert size == len(frame) - HEAD_BYTES
    return kind, *decoded(kind, check, frame[HEAD_BYTES:])


def heard(data, kinds=_KINDS):
    """What a line that does not wait hears in bytes, of which no more follow."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours, "a caller")
        theirs.sendall(data)
        kind, fields = line.hear(kinds)
        return kind, *fields


# ---- what is right ----


@every_kind
def test_messages_are_these_bytes(message, frame):
    assert encoded(*message) == frame
    assert read(frame) == heard(frame) == message


def test_the_literal_messages_are_all_kinds():
    assert [kind for (kind, *_), _ in LITERAL] == _KINDS


def test_stock_msgpack_reads_the_whole_stream():
    stream = msgpack.Unpacker()
    for _, frame in LITERAL:
        stream.feed(frame)
    for number, ((message, _), (tag, check, payload)) in enumerate(zip(LITERAL, stream, strict=True)):
        assert (tag, check) == ((1 << 25) + number, checksum(tag, payload))
        opening = ["GE", 5] if message[0] == "hello" else []
        assert msgpack.unpackb(payload) == [*opening, *message[1:]]


integers, urls = st.integers(0, 2**64 - 1), st.lists(st.text(max_size=40), max_size=9)
messages = st.one_of(
    st.tuples(st.just("hello"), integers, integers, st.text(max_size=40), st.binary(max_size=64)),
    st.tuples(st.sampled_from(["nonce", "proof"]), st.binary(max_size=64)),
    st.tuples(st.sampled_from(["listening", "abort"]), st.text(max_size=40), st.text(max_size=40)),
    st.tuples(st.just("moved"), st.text(max_size=40)),
    st.tuples(st.just("members"), st.binary(max_size=16), st.text(max_size=40), urls),
)


@given(messages)
@example(("listening", "x" * 4091, ""))  # the longest
@example(("abort", "", "x" * (2**16 - 5)))
@example(("members", b"", "", ["x" * 9] * 100_000))
def test_what_was_encoded_is_decoded(message):
    assert read(encoded(*message)) == message


@given(integers.map(lambda number: number >> 32), integers, integers.map(lambda number: number >> 32))
def test_a_head_is_read_as_it_was_written(tag, check, size):
    data = head(tag, check, size)
    assert head_of(data, "", range(tag, tag + 1)) == (tag, check, size)
    for tags in (range(tag), range(tag + 1, 1 << 32)):
        with pytest.raises(ProtocolError, match="an invalid head"):
            head_of(data, "a rank sent", tags)


def test_a_text_that_has_no_utf_8_is_sent_without_it():
    assert read(encoded("abort", "", "a\ud800")) == ("abort", "", "a?")


# ---- what is hostile ----


@every_kind
def test_cut_off_at_every_byte(message, frame):
    for size in range(len(frame)):
        with pytest.raises(BlockingIOError):
            heard(frame[:size])


@every_kind
def test_every_flipped_byte_is_refused_or_makes_the_frame_longer(message, frame):
    for at in range(len(frame)):
        for value in {frame[at] ^ (1 << bit) for bit in range(8)} | {0x00, 0xC1, 0xFF} - {frame[at]}:
            with pytest.raises((ProtocolError, BlockingIOError)):
                heard(frame[:at] + bytes([value]) + frame[at + 1 :])


@every_kind
def test_a_payload_beyond_its_kinds_limit_is_refused_by_its_head(message, frame):
    kind, *_ = message
    most = {"abort": 1 << 16, "members": 1 << 20}.get(kind, 4096)
    assert announced(claim(kind, most), "a rank") == (kind, 0, most)
    for size in (most + 1, (1 << 32) - 1):
        with pytest.raises(ProtocolError, match="too long"):
            heard(claim(kind, size))


@every_kind
def test_a_kind_that_is_not_expected_is_refused_by_its_head(message, frame):
    with pytest.raises(ProtocolError, match="wrong message"):
        heard(frame[:HEAD_BYTES], [kind for kind in _KINDS if kind != message[0]])


@pytest.mark.parametrize("tag", [0, (1 << 21) - 1, 1 << 24, (1 << 25) - 1, (1 << 25) + len(_KINDS), (1 << 32) - 1])
def test_a_tag_that_no_message_has(tag):
    with pytest.raises(ProtocolError, match="an invalid head"):
        heard(head(tag, checksum(tag, b"\x90"), 1) + b"\x90")


HELLO = _MESSAGES[0][1:]


@pytest.mark.parametrize("more", [[], [1, 4], ["more", "fields", "of", {}], [0] * 30])
def test_a_hello_of_a_later_version_is_refused_by_its_version(more):
    with pytest.raises(ProtocolError, match=r"protocol version.*got \['GE', 6\], expected \['GE', 5\]"):
        heard(framed("hello", msgpack.packb(["GE", 6, *more])))


BAD_HELLOS = [
    *([], ["GE"], ["GX", 5, *HELLO], [5, "GE", *HELLO], ["GE", 5], ["GE", 5, *HELLO[:-1]], ["GE", 5, *HELLO, 0]),
    *(["GE", 5, rank, *HELLO[1:]] for rank in ("7", 7.0, True, None, b"7", [], {}, [7], msgpack.Timestamp(1))),
    *(["GE", 5, 1, 4, *more] for more in ((b"job", NONCE), ("job", "text"), (NONCE, "job"), (None, None))),
    *([*HELLO], ["GE", "5", *HELLO], ["GE", 5.5, *HELLO]),
    *({"rank": 1}, "GE", 5, None),
]
NO_PAYLOADS = [
    *(b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 4000, b"\x81\xa1k" * 1300),
    *(
        encoded("hello", *HELLO)[HEAD_BYTES:-1],
        encoded("hello", *HELLO)[HEAD_BYTES:] + b"\0",
        b"\x96\xa2GE\x05\x01\x04\xa1\xff\xc4\0",
    ),
]


@pytest.mark.parametrize("payload", [*map(msgpack.packb, BAD_HELLOS), *NO_PAYLOADS])
def test_payloads_that_cannot_be(payload):
    assert heard(framed("hello", msgpack.packb(["GE", 5, *HELLO]))) == ("hello", *HELLO)
    with pytest.raises(ProtocolError):
        heard(framed("hello", payload))


@pytest.mark.parametrize(
    "fields", [[], ["PeerLost"], ["PeerLost", "text", 1], [b"PeerLost", "text"], ["PeerLost", None]]
)
def test_fields_of_another_kind(fields):
    with pytest.raises(ProtocolError, match="wrong fields"):
        heard(framed("abort", msgpack.packb(fields)))


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.floats(), st.text(max_size=9), st.binary(max_size=9)
)
payloads = st.one_of(
    st.binary(max_size=200), st.lists(st.one_of(scalars, st.lists(scalars, max_size=2)), max_size=8).map(msgpack.packb)
)


@given(st.sampled_from(_MESSAGES), payloads)
def test_any_payload_is_refused_or_a_message(message, payload):
    kind, *_ = message
    with contextlib.suppress(ProtocolError):
        found = read(framed(kind, payload))
        assert encoded(*found) == framed(kind, msgpack.packb(msgpack.unpackb(payload)))


said = st.lists(st.one_of(messages.map(lambda message: encoded(*message)), st.binary(max_size=60)), max_size=3).map(
    b"".join
)


@given(said)
def test_any_bytes_are_refused_or_awaited_or_a_message(data):
    with contextlib.suppress(ProtocolError, BlockingIOError):
        assert data.startswith(encoded(*heard(data)))


@given(said)
def test_a_caller_gets_an_answer_or_an_error_of_ours(data):
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.suppress(ExchangeError, BlockingIOError):
        line = Line(ours, "rank 0")
        theirs.sendall(data)
        assert line.expect("nonce")[0] == "nonce"


# ---- what was gathered ----

leaves = st.one_of(
    *(st.none(), st.booleans(), st.floats(allow_nan=False)),
    *(st.integers(-(2**63), 2**64 - 1), st.text(max_size=300), st.binary(max_size=300)),
)
values = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=20), st.dictionaries(st.text(max_size=4), inner))
)


@given(values)
@example([[0] * 70000, {str(i): i for i in range(70000)}])
def test_what_was_packed_comes_back(value):
    assert unpacked(msgpack.packb(value), "a value") == value


BAD = [b"", b"\xc1", b"\x92\x01", b"\x01\x02", b"\xa1\xff", b"\x81\x07\x07", b"\xc7\x01\x05x", b"\xd6\xff\0\0\0\0"]
DEEP = [each * 1025 + b"\xc0" for each in (b"\x91", b"\xdc\0\x01", b"\xdd\0\0\0\x01", b"\x81\xa0", b"\xde\0\x01\xa0")]


@pytest.mark.parametrize("data", [*BAD, b"\xd9", b"\xdb\xff\xff", b"\x81\x90\x07", *DEEP, b"\x91" * (1 << 20)])
def test_what_is_no_value_cannot_be_read(data):
    with pytest.raises(ProtocolError, match="a value cannot be read"):
        unpacked(data, "a value")


@given(st.lists(st.one_of(st.binary(max_size=6), st.just(b"\x91" * 300), st.just(b"\x81\xa0" * 9)), max_size=30))
def test_hostile_bytes_are_refused_or_a_value(pieces):
    with contextlib.suppress(ProtocolError):
        unpacked(b"".join(pieces), "a value")


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">BI", 0xDD, MAX_SMALL_PAYLOAD - 5) + b"\x90" * (MAX_SMALL_PAYLOAD - 5),  # as many empty lists
        struct.pack(">BI", 0xDD, MAX_SMALL_PAYLOAD - 5) + b"\x80" * (MAX_SMALL_PAYLOAD - 5),  # and maps
        struct.pack(">BI", 0xDD, MAX_SMALL_PAYLOAD - 1) * 1000 + bytes(MAX_SMALL_PAYLOAD - 5000),  # lists in lists
    ],
    ids=["lists", "maps", "nested"],
)
def test_no_payload_takes_more_than_a_hundred_megabytes(data):
    tracemalloc.start()
    with contextlib.suppress(ProtocolError):
        unpacked(data, "a value")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100 << 20


def test_limits_of_the_document():
    assert (HEAD_BYTES, MAX_SMALL_PAYLOAD, VERSION) == (20, 1 << 20, 5)
    assert tag_of("hello") == 1 << 25
