"""What ranks tell each other: all get all of it in rank order, or an error that says who tells something else."""

from unittest.mock import Mock

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from gradengine.errors import CallerError, ExchangeError, ProtocolError
from gradengine.exchange.gather import gathered, packed
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD
from gradengine.layout import GradientLayout

anything = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(st.characters()) | st.binary() | st.complex_numbers(),
    lambda f: st.lists(f, max_size=2) | st.tuples(f) | st.dictionaries(st.text() | st.integers(), f, max_size=2),
)


class Telling:
    """An exchange that is nothing but its gather: what the other ranks send is given."""

    def __init__(self, *others):
        self._others = others

    def all_gather(self, data):
        return [data, *self._others]


def all_gather_object(exchange, what, facts):
    return gathered(exchange.all_gather(packed(what, facts)))


def told(what, facts):
    return msgpack.packb([what, facts])


@pytest.mark.parametrize("theirs", ["tally of step 3", "loss of step 2", "\x1b[2J\n" * 10**5])
def test_a_rank_that_is_elsewhere_is_named_in_a_few_printable_lines(theirs):
    with pytest.raises(ExchangeError, match="rank 1 is out of sync") as raised:
        all_gather_object(Telling(told(theirs, 1.0)), "loss of step 3", 1.0)
    lines = str(raised.value).split("\n")
    assert len(lines) <= 12
    assert all(line.isprintable() and len(line) < 1500 for line in lines)


def test_all_ranks_are_told_the_same_and_name_the_same_one():
    def work(exchange):
        exchange.bind(GradientLayout.of([(1,)]), np.zeros(32, np.float32))
        told.append(all_gather_object(exchange, "rank", exchange.rank))
        if exchange.rank == 2:
            exchange.barrier()
        all_gather_object(exchange, "tally", None)

    told = []
    assert len({str(error) for error in on_ranks(work, 3)}) == 1
    assert told == [[0, 1, 2]] * 3


def test_memory_that_has_run_out_stays_a_memory_error(monkeypatch):
    monkeypatch.setattr(msgpack, "packb", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        packed("loss of step 3", 1.0)


NO_FACTS = [7, [], ["loss"], ["loss", 1, 2], [None, 1], [3, 1], {"loss": 1}]
DEEP = [b"\x93\xa4loss" + b"\x91" * depth + b"\xc0" * 2 for depth in (1000, 10**6)]


@pytest.mark.parametrize("part", [b"", *DEEP, *map(msgpack.packb, NO_FACTS)])
def test_what_cannot_be_read_is_a_protocol_error(part):
    with pytest.raises(ProtocolError, match="rank 1"):
        all_gather_object(Telling(part), "loss", 1.0)


@given(st.binary(max_size=40))
def test_random_bytes_are_an_exchange_error(part):
    with pytest.raises(ExchangeError, match="rank 1"):
        all_gather_object(Telling(part), "loss of step 3", 1.0)


def held_often():
    """A list of few objects that msgpack would write 8**7 times."""
    value = "a" * 16
    for _ in range(7):
        value = [value] * 8
    return value


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


ITSELF = []
ITSELF.append(ITSELF)


UNSENDABLE = [
    *(np.float32(2.5), np.zeros(2, np.float32), {"loss": {1}}, {1: "one"}, [2**64], -(2**63) - 1, 10**5000),
    *(msgpack.ExtType(1, b"a"), msgpack.Timestamp(1), "\ud800", ITSELF, nested(1100)),
    *([None] * (MAX_SMALL_PAYLOAD - 10), held_often(), ["a" * (1 << 20)] * 32, b"a" * (MAX_SMALL_PAYLOAD - 10)),
]


@pytest.mark.parametrize("fact", UNSENDABLE, ids=range(len(UNSENDABLE)))
def test_what_the_others_could_not_read_is_refused_where_it_is_told(fact):
    with pytest.raises(CallerError) as refused:
        packed("loss", fact)
    assert len(str(refused.value)) < 1000


def test_what_has_no_text_for_its_name_is_refused():
    for what in (None, 5, ["loss"], b"loss"):
        with pytest.raises(CallerError):
            packed(what, 1.0)


@pytest.mark.parametrize(
    "fact",
    [
        nested(400),
        [None] * (MAX_SMALL_PAYLOAD - 11),
        b"a" * (MAX_SMALL_PAYLOAD - 11),
        {"a": -(2**63), b"b": 2**64 - 1, "c": float("inf"), "d": True},
        np.float64(2.5),
    ],
    ids=range(5),
)
def test_what_is_just_within_the_bounds_is_told(fact):
    assert all_gather_object(Telling(packed("loss", None)), "loss", fact) == [fact, None]


@given(anything)
def test_whatever_is_told_is_refused_here_or_read_by_all(fact):
    try:
        part = packed("loss", fact)
    except CallerError:
        return
    gathered([part])
