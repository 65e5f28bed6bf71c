"""What ranks tell each other: all get all of it in rank order, or an error that says who tells something else."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from gradengine.errors import CallerError, DeadlineExceeded, ExchangeError, NonFiniteGradient, ProtocolError
from gradengine.exchange import Progress
from gradengine.layout import GradientLayout
from gradengine.reduction.all_gather import gathered, in_group, packed
from gradengine.unpacking import MAX_DEPTH, MAX_OBJECTS

facts = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(), lambda f: st.lists(f, max_size=3)
)
anything = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(st.characters()) | st.binary() | st.complex_numbers(),
    lambda f: st.lists(f, max_size=2) | st.tuples(f) | st.dictionaries(st.text() | st.integers(), f, max_size=2),
)


class Telling:
    """An exchange that is nothing but its gather: what the other ranks send is given."""

    def __init__(self, *others):
        self._others = others

    def gather(self, data):
        return [data, *self._others]


def tell_all(exchange, what, facts):
    return gathered(exchange.gather(packed(what, facts)))


def told(what, facts):
    return msgpack.packb([what, facts])


@given(facts)
def test_all_are_told_in_rank_order(fact):
    assert tell_all(Telling(told("loss of step 3", "other")), "loss of step 3", fact) == [fact, "other"]


def test_through_an_exchange():
    def work(exchange):
        exchange.bind(GradientLayout.of([(1,)]), np.zeros(32, np.float32), Progress())
        first = tell_all(exchange, "rank", exchange.rank)
        return first, tell_all(exchange, "square", exchange.rank**2)

    assert on_ranks(work, 3) == [([0, 1, 2], [0, 1, 4])] * 3


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ("tally of step 3", "rank 1 is out of sync with rank 0: got its tally of step 3, expected its loss of step 3"),
        (
            "loss of step 2",
            "rank 1 is out of sync with rank 0: got its loss of step 2, expected its loss of step 3; .*restart",
        ),
    ],
)
def test_a_rank_that_is_elsewhere_is_named(theirs, message):
    with pytest.raises(ExchangeError, match=message):
        tell_all(Telling(told(theirs, 1.0)), "loss of step 3", 1.0)


def test_all_ranks_name_the_same_one():
    def work(exchange):
        exchange.bind(GradientLayout.of([(1,)]), np.zeros(32, np.float32), Progress())
        tell_all(exchange, "loss" if exchange.rank == 2 else "tally", None)

    assert len({str(error) for error in on_ranks(work, 3)}) == 1


@pytest.mark.parametrize(
    "part", [b"", b"\xc1", *map(msgpack.packb, (7, [], ["loss"], ["loss", 1, 2], [None, 1], [3, 1], {"loss": 1}))]
)
def test_what_cannot_be_read_is_a_protocol_error(part):
    with pytest.raises(ProtocolError, match=r"what rank 1 tells (cannot be read|has no name)"):
        tell_all(Telling(part), "loss", 1.0)


@pytest.mark.parametrize("depth", [9, 1000, 10**6])
def test_deep_facts_are_a_protocol_error(depth):
    with pytest.raises(ProtocolError, match="what rank 1 tells is nested too deep"):
        tell_all(Telling(b"\x92\xa4loss" + b"\x91" * depth + b"\xc0"), "loss", 1.0)


def test_long_words_of_a_peer_are_a_few_printable_lines():
    with pytest.raises(ExchangeError, match="rank 1 is out of sync with rank 0: got its ") as raised:
        tell_all(Telling(msgpack.packb(["\x1b[2J\n" * 10**5, 1.0])), "loss of step 3", 1.0)
    lines = str(raised.value).split("\n")
    assert len(lines) <= 12
    assert all(line.isprintable() and len(line) < 1500 for line in lines)


@given(st.binary(max_size=40))
def test_random_bytes_are_an_exchange_error(part):
    with pytest.raises(ExchangeError, match="rank 1"):
        tell_all(Telling(part), "loss of step 3", 1.0)


class TestInGroup:
    def test_an_error_keeps_its_kind_and_what_to_do(self):
        with pytest.raises(DeadlineExceeded) as caught, in_group("between the parts"):
            raise DeadlineExceeded("rank 1 is late", got="nothing for 3 s", expected="something", do="see what it does")
        assert str(caught.value) == (
            "between the parts: rank 1 is late: got nothing for 3 s, expected something; see what it does"
        )
        assert isinstance(caught.value.__cause__, DeadlineExceeded)

    def test_other_errors_pass_as_they_are(self):
        error = NonFiniteGradient("w", 0, 1.0, step=0)
        with pytest.raises(NonFiniteGradient) as caught, in_group("between the parts"):
            raise error
        assert caught.value is error

    def test_an_error_of_many_ranks_is_named_once_for_each(self):
        """A local group's failure is one object for all its threads."""
        shared = ExchangeError("rank 1 left")
        for _ in range(2):
            with pytest.raises(ExchangeError, match=r"^between the parts: rank 1 left$"), in_group("between the parts"):
                raise shared


def held_often():
    """A list of few objects that msgpack would write 8**7 times."""
    value = "a" * 16
    for _ in range(MAX_DEPTH - 1):
        value = [value] * 8
    return value


class Hostile(list):
    def __iter__(self):
        raise ZeroDivisionError


ITSELF = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("fact", "says"),
    [
        (np.float32(2.5), "got 2.5, expected None, bool"),
        (np.zeros(2, np.float32), "got ndarray, expected"),
        ({"loss": {1}}, "got set"),
        ({1: "one"}, "got 1, expected .* in dicts with str keys"),
        ([2**64], "got 18446744073709551616"),
        (-(2**63) - 1, "int of 64 bits"),
        (10**5000, "an integer of 16610 bits"),
        (msgpack.ExtType(1, b""), "got ExtType"),
        (msgpack.Timestamp(1), "got Timestamp"),
        ("\ud800", "cannot be sent: got UnicodeEncodeError"),
        (Hostile([1]), "cannot be sent: got ZeroDivisionError"),
        (ITSELF, "nested too deep: expected at most 7 containers"),
        ([[[[[[[[1]]]]]]]], "nested too deep"),
        ([None] * MAX_OBJECTS, "too many objects: expected at most 1048576"),
        (held_often(), "too many objects|too long"),
        (["a" * (1 << 20)] * 32, "too long: expected at most 16777216 bytes"),
        (b"a" * ((1 << 24) - 5), "too much to gather: got 167772.. bytes, expected at most 16777216"),
    ],
    ids=range(17),
)
def test_what_the_others_could_not_read_is_refused_where_it_is_told(fact, says):
    with pytest.raises(CallerError, match=says):
        packed("loss", fact)


def test_what_has_no_text_for_its_name_is_refused():
    for what in (None, 5, ["loss"], b"loss"):
        with pytest.raises(CallerError, match="what is told is not a str"):
            packed(what, 1.0)


@pytest.mark.parametrize(
    "fact",
    [
        [[[[[[[1]]]]]]],
        [[[[[[[[]]]]]]]],
        [None] * (MAX_OBJECTS - 3),
        b"a" * ((1 << 24) - 12),
        {"a": -(2**63), b"b": 2**64 - 1, "c": float("inf"), "d": True},
        np.float64(2.5),
    ],
    ids=range(6),
)
def test_what_is_just_within_the_bounds_is_told(fact):
    assert tell_all(Telling(packed("loss", None)), "loss", fact) == [fact, None]


@given(anything)
def test_whatever_is_told_is_refused_here_or_read_by_all(fact):
    try:
        part = packed("loss", fact)
    except CallerError:
        return
    gathered([part])
