"""msgpack from elsewhere becomes a value or a ProtocolError, whatever it is; its depth and size are bounded first."""

from __future__ import annotations

import contextlib
import struct

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradengine.errors import ProtocolError
from gradengine.layout.unpacking import MAX_DEPTH, MAX_OBJECTS, unpack

leaves = st.one_of(
    *(st.none(), st.booleans(), st.floats(allow_nan=False)),
    *(st.integers(-(2**63), 2**64 - 1), st.text(max_size=300), st.binary(max_size=300)),
)
values = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=20), st.dictionaries(st.text(max_size=4), inner))
)


def depth_of(value):
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth_of, inside), default=0)


def nested(depth, leaf=b"\xc0"):
    return b"\x91" * depth + leaf


@given(values)
@example([[0] * 16, {str(i): i for i in range(16)}])  # array 16 and map 16
@example([[0] * 70000, {str(i): i for i in range(70000)}])  # array 32 and map 32
def test_what_was_packed_comes_back_unless_it_is_deep(value):
    if depth_of(value) <= MAX_DEPTH:
        assert unpack(msgpack.packb(value), "a value") == value
    else:
        with pytest.raises(ProtocolError, match="deep"):
            unpack(msgpack.packb(value), "a value")


@pytest.mark.parametrize(
    "scalar",
    [
        *(b"\x7f", b"\xff", b"\xc0", b"\xc2", b"\xc3", b"\xca1234", b"\xcb12345678"),
        *(b"\xcc1", b"\xcd12", b"\xce1234", b"\xcf12345678", b"\xd01", b"\xd112", b"\xd21234", b"\xd312345678"),
        *(b"\xa0", b"\xbf" + b"x" * 31, b"\xd9\x03abc", b"\xda\0\x03abc", b"\xdb\0\0\0\x03abc"),
        *(b"\xc4\x03abc", b"\xc5\0\x03abc", b"\xc6\0\0\0\x03abc"),
    ],
)
def test_every_form_is_stepped_over_as_the_decoder_does(scalar):
    """What follows would be counted as something else if a length were misread."""
    beside = nested(MAX_DEPTH - 1)
    assert unpack(b"\x92" + scalar + beside, "a value")[0] == msgpack.unpackb(scalar)
    for deep in (b"\x92" + scalar + nested(MAX_DEPTH), b"\x92" + nested(MAX_DEPTH) + scalar):
        with pytest.raises(ProtocolError, match="nested too deep"):
            unpack(deep, "a value")


@pytest.mark.parametrize("container", [b"\x91", b"\xdc\0\x01", b"\xdd\0\0\0\x01", b"\x81\xa0", b"\xde\0\x01\xa0"])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
def test_deep_nesting_is_refused_before_it_is_decoded(container, depth, monkeypatch):
    monkeypatch.setattr(msgpack, "unpackb", None)
    with pytest.raises(ProtocolError, match="a tally is nested too deep"):
        unpack(container * depth + b"\xc0", "a tally")


@pytest.mark.parametrize(
    "data",
    [
        *(struct.pack(">BI", 0xDD, count) for count in (MAX_OBJECTS, 2**32 - 1)),  # with itself one too many
        struct.pack(">BI", 0xDF, MAX_OBJECTS // 2),
        struct.pack(">BI", 0xDD, MAX_OBJECTS - 1) + b"\x90" * (MAX_OBJECTS - 2) + b"\x91\xc0",
        struct.pack(">BI", 0xDD, 16) + (struct.pack(">BI", 0xDD, 65535) + b"\xc0" * 65535) * 16 + b"\xc0",
    ],
    ids=["one array", "all of them", "one map", "the last is full", "many arrays"],
)
def test_too_many_objects_are_refused_before_they_are_made(data, monkeypatch):
    monkeypatch.setattr(msgpack, "unpackb", None)
    with pytest.raises(ProtocolError, match="a layout has too many objects"):
        unpack(data, "a layout")


def test_as_many_objects_as_are_allowed():
    assert len(unpack(struct.pack(">BI", 0xDD, MAX_OBJECTS - 1) + b"\xc0" * (MAX_OBJECTS - 1), "a layout")) == 2**20 - 1


BAD = [b"", b"\xc1", b"\x92\x01", b"\x01\x02", b"\xa1\xff", b"\x81\x07\x07", b"\xc7\x01\x05x", b"\xd6\xff\0\0\0\0"]


@pytest.mark.parametrize("data", [*BAD, b"\xd9", b"\xdb\xff\xff"])
def test_what_is_no_value_cannot_be_read(data):
    with pytest.raises(ProtocolError, match="a value cannot be read"):
        unpack(data, "a value")


TAGS = st.sampled_from([bytes([tag]) for tag in (0x81, 0x91, 0x9F, *range(0xC0, 0xE0))])


@given(st.lists(st.one_of(TAGS, st.binary(max_size=6), st.just(b"\x91" * 300)), max_size=30).map(b"".join))
def test_hostile_bytes_are_refused_or_a_shallow_value(data):
    with contextlib.suppress(ProtocolError):
        assert depth_of(unpack(data, "a value")) <= MAX_DEPTH
