"""Errors: their words, their kinds, and that they survive a trip to another process."""

import copy
import inspect
import pickle

import numpy as np
import pytest
from hostile_values import doubling

from gradengine import (
    BlockGradientSet,
    FusedClipState,
    GradientEngine,
    GradientLayout,
    PerBlockGradientAccumulator,
    errors,
    local_group,
)
from gradengine.errors import CallerError, ExchangeError, GradientError, NonFiniteGradient
from gradengine.exchange import GradientServer

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, GradientError)]


def test_a_message_says_what_was_given():
    for parts, message in (
        ({}, "'w' is short"),
        ({"got": 0, "expected": ""}, "'w' is short: got 0, expected "),  # nothing given is None, not what is false
        ({"do": "pass it whole"}, "'w' is short; pass it whole"),
        ({"got": 3, "expected": 4, "do": "pass it whole"}, "'w' is short: got 3, expected 4; pass it whole"),
    ):
        error = GradientError("'w' is short", **parts)
        given = [parts.get(part) for part in ("got", "expected", "do")]
        assert (str(error), error.what, [error.got, error.expected, error.do]) == (message, "'w' is short", given)


def test_who_must_mend_it_shows_in_the_kind():
    def below(kind):
        return {each.__name__ for each in KINDS if issubclass(each, kind)}

    refused = {"BufferRefused", "DeviceUnavailable", "LayoutMismatch", "OutOfDeviceMemory"}
    lost = {"HandshakeRefused", "ProtocolError", "PeerLost", "DeadlineExceeded"}
    assert below(CallerError) == {"CallerError", "WindowError", *refused}
    assert below(ExchangeError) == {"ExchangeError", *lost}
    others = {"CallerError", "WindowError", "ExchangeError", "GradientError", "DeviceFailed", "NonFiniteGradient"}
    assert below(GradientError) == {*others, *refused, *lost}


def test_an_error_survives_pickling_with_its_notes():
    for kind in set(KINDS) - {NonFiniteGradient}:
        error = kind("what", got=1, expected=2, do="mend it")
        error.context = "while loading"
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ({}, "'w' is"),
        ({"rank": 0}, "'w' of rank 0 is"),
        ({"tp_rank": 1}, "'w' of tensor-parallel rank 1 is"),
        ({"rank": 2, "tp_rank": 0, "is_late": True}, "'w' of rank 2, tensor-parallel rank 0 is"),
    ],
)
def test_a_non_finite_gradient_says_where_and_survives_pickling(where, named):
    error = NonFiniteGradient("w", 7, float("-inf"), step=12, **where)
    again = pickle.loads(pickle.dumps(error))
    facts = {"component": "w", "index": 7, "value": float("-inf"), "step": 12, "rank": None, "tp_rank": None}
    assert type(again) is NonFiniteGradient
    assert vars(error) == vars(again)
    assert facts | {"is_late": False} | where == {name: getattr(again, name) for name in [*facts, "is_late"]}
    assert str(again) == str(error)
    for words in (f"gradient {named}", "step 12", "index 7: got -inf"):
        assert words in str(error)
    assert ("returned zeros" in str(error)) == ("is_late" in where)


# ---- values from elsewhere ----


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class Talkative:
    def __repr__(self):
        return "words " * 10**5


LONG = ["x" * 10**7, list(range(10**5)), nested(5000), "\x1b[31m" * 10**4, doubling(), Talkative()]
LONG += [{"a": np.arange(10**5)}, {"all": doubling()}, {"n" * 10**6: 2}, {"v": [Talkative()] * 3}]


def test_a_message_is_short_and_printable_whatever_it_was_given():
    for value in LONG:
        for part in ("what", "got", "expected", "do"):
            message = str(GradientError(**{"what": "'w' is short", "do": "pass it whole", part: value}))
            assert len(message) < 1500
            assert message.isprintable()


def test_what_to_do_stays_where_a_message_that_was_passed_on_is_shortened():
    inner = GradientError("rows differ:\n" + "row\n" * 5000, got=3, do="build the layout from the same model")
    passed_on = str(GradientError(f"rank 0 refuses: {inner}" + "y" * 5000 + "; start again"))
    assert passed_on.startswith("rank 0 refuses: rows differ:\nrow\n")
    assert passed_on.endswith("y; start again")


ESCAPED = [
    ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    ("a\rb\tc\x00\x7f\x9b31m", r"a\rb\tc\x00\x7f\x9b31m"),
    ("\u202erof\u2028", r"\u202erof\u2028"),
    ("\ud800", r"\ud800"),
    ("ключ ö 'w' \\ two\nlines", "ключ ö 'w' \\ two\nlines"),
]


def test_control_characters_are_escaped():
    for text, shown in ESCAPED:
        assert str(GradientError("peer says", got=text)) == f"peer says: got {shown}"
        str(GradientError(text)).encode()


# ---- copies ----


def stepped():
    engine = GradientEngine(GradientLayout.of([(2,)]))
    engine.add([np.ones(2, np.float32)])
    return engine.step()


def closed_server():
    with GradientServer(1) as server:
        return server


SHARED = {
    "GradientEngine": lambda: GradientEngine(GradientLayout.of([(2,)])),
    "PerBlockGradientAccumulator": lambda: PerBlockGradientAccumulator(GradientLayout.of([(2,)])),
    "BlockGradientSet": lambda: BlockGradientSet(GradientLayout.transformer(1, 4, 2, 8, 16).blocks[0]),
    "Exchange": lambda: local_group(1)[0],
    "GradientServer": closed_server,
    "FusedClipState": lambda: FusedClipState([2]),
    "StepResult": stepped,
}


@pytest.mark.parametrize("name", SHARED)
def test_what_shares_memory_or_a_connection_is_not_copied_by_mistake(name):
    """Each copy's parts would have memory of their own: an engine that hands back what nobody added to."""
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CallerError, match=rf"^{name} cannot be copied or pickled; \w+"):
            copied(SHARED[name]())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_deep_copy_of_gradients_is_a_plain_dict_of_copies(copied):
    gradients = stepped().gradients
    kept = copied(gradients)
    assert type(kept) is dict
    kept["0"][:] = 5
    assert gradients["0"].tolist() == [1, 1]
    with pytest.raises(TypeError):
        gradients["0"] = kept["0"]
