"""What ranks tell each other: all get all of it in rank order, or an error that says who tells something else."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from gradengine.errors import DeadlineExceeded, ExchangeError, NonFiniteGradient, ProtocolError
from gradengine.exchange import Progress
from gradengine.layout import GradientLayout
from gradengine.telling import heard, in_group, packed

facts = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(), lambda f: st.lists(f, max_size=3)
)


class Telling:
    """An exchange that is nothing but its gather: what the other ranks send is given."""

    def __init__(self, *others):
        self._others = others

    def gather(self, data):
        return [data, *self._others]


def tell_all(exchange, what, facts):
    return heard(exchange.gather(packed(what, facts)))


def told(what, facts):
    return msgpack.packb([what, facts])


@given(facts)
def test_all_are_told_in_rank_order(fact):
    assert tell_all(Telling(told("loss of step 3", "other")), "loss of step 3", fact) == [fact, "other"]


def test_through_an_exchange():
    def work(exchange):
        exchange.bind(GradientLayout.of([(1,)]), np.zeros(32, np.float32), Progress(), lambda *_: None)
        first = tell_all(exchange, "rank", exchange.rank)
        return first, tell_all(exchange, "square", exchange.rank**2)

    assert on_ranks(work, 3) == [([0, 1, 2], [0, 1, 4])] * 3


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ("tally of step 3", "rank 1 is elsewhere than rank 0: got its tally of step 3, expected its loss of step 3"),
        (
            "loss of step 2",
            "rank 1 is elsewhere than rank 0: got its loss of step 2, expected its loss of step 3; .*restart",
        ),
    ],
)
def test_a_rank_that_is_elsewhere_is_named(theirs, message):
    with pytest.raises(ExchangeError, match=message):
        tell_all(Telling(told(theirs, 1.0)), "loss of step 3", 1.0)


def test_all_ranks_name_the_same_one():
    def work(exchange):
        exchange.bind(GradientLayout.of([(1,)]), np.zeros(32, np.float32), Progress(), lambda *_: None)
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
    with pytest.raises(ExchangeError, match="rank 1 is elsewhere than rank 0: got its ") as raised:
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
