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
    RawBuffer,
    clip_by_global_norm,
    errors,
    local_group,
)
from gradengine.errors import BufferRefused, CallerError, ExchangeError, GradientError, NonFiniteGradient
from gradengine.exchange import GradientServer, WorkerClient

KINDS = [getattr(errors, name) for name in errors.__all__]
PLAIN = [kind for kind in KINDS if kind is not NonFiniteGradient]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "'w' is short"),
        ({"got": 3}, "'w' is short: got 3"),
        ({"expected": 4}, "'w' is short: expected 4"),
        ({"got": 0, "expected": ""}, "'w' is short: got 0, expected "),  # nothing given is None, not what is false
        ({"do": "pass it whole"}, "'w' is short; pass it whole"),
        ({"got": 3, "expected": 4, "do": "pass it whole"}, "'w' is short: got 3, expected 4; pass it whole"),
    ],
)
def test_a_message_says_what_was_given(parts, message):
    error = GradientError("'w' is short", **parts)
    assert str(error) == message
    assert (error.what, error.got, error.expected, error.do) == (
        "'w' is short",
        *(parts.get(part) for part in ("got", "expected", "do")),
    )


def test_who_must_mend_it_shows_in_the_kind():
    assert {kind.__name__ for kind in KINDS if issubclass(kind, CallerError)} == {
        "CallerError",
        "BufferRefused",
        "DeviceUnavailable",
        "LayoutMismatch",
        "OutOfDeviceMemory",
        "WindowError",
    }
    assert {kind.__name__ for kind in KINDS if issubclass(kind, ExchangeError)} == {
        "ExchangeError",
        "HandshakeRefused",
        "ProtocolError",
        "PeerLost",
        "DeadlineExceeded",
    }
    for kind in (NonFiniteGradient, errors.DeviceFailed):
        assert not issubclass(kind, (CallerError, ExchangeError))
    assert all(issubclass(kind, GradientError) for kind in KINDS)


def test_every_error_is_listed():
    defined = {n for n, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("kind", PLAIN)
def test_an_error_survives_pickling(kind):
    error = pickle.loads(pickle.dumps(kind("what", got=1, expected=2, do="mend it")))
    assert type(error) is kind
    assert (str(error), error.got, error.expected) == ("what: got 1, expected 2; mend it", 1, 2)


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_a_non_finite_gradient_says_where_and_survives_pickling(rank):
    error = NonFiniteGradient("layers.0.w", 7, float("-inf"), step=12, rank=rank)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is NonFiniteGradient
    for e in (error, copy):
        assert (e.component, e.index, e.value, e.step, e.rank) == ("layers.0.w", 7, float("-inf"), 12, rank)
        assert "step 12" in str(e)
        assert "'layers.0.w'" in str(e)
        assert "index 7: got -inf" in str(e)
        assert ("of rank" in str(e)) == (rank is not None)
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ({"tp_rank": 1}, "'w' of tensor-parallel rank 1 is"),
        ({"rank": 2, "tp_rank": 0}, "'w' of rank 2, tensor-parallel rank 0 is"),
        ({}, "'w' is"),
    ],
)
def test_the_part_of_a_model_is_named_too(ranks, named):
    error = NonFiniteGradient("w", 0, 1.0, step=0, **ranks)
    copy = pickle.loads(pickle.dumps(error))
    assert named in str(error)
    assert (str(copy), copy.tp_rank) == (str(error), ranks.get("tp_rank"))


@pytest.mark.parametrize("error", [BufferRefused("what"), NonFiniteGradient("w", 0, 1.0, step=0)])
def test_notes_are_kept_by_pickling(error):
    error.context = "while loading"
    assert pickle.loads(pickle.dumps(error)).context == "while loading"


# ---- values from elsewhere ----


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    ["x" * 10**7, "row\n" * 10**5, list(range(10**5)), nested(5000), 10**5000, "\x1b[31m" * 10**4],
    ids=["text", "lines", "list", "nested", "digits", "colours"],
)
@pytest.mark.parametrize("part", ["what", "got", "expected", "do"])
def test_a_message_is_a_few_printable_lines_whatever_it_was_given(part, value):
    if part == "what":
        message = str(GradientError(value, do="pass it whole"))
    else:
        message = str(GradientError("'w' is short", **{part: value}))
    assert len(message) < 1500
    lines = message.split("\n")
    assert len(lines) <= 12
    assert all(line.isprintable() for line in lines)


def test_what_to_do_stays_where_a_message_that_was_passed_on_is_shortened():
    inner = GradientError("rows differ:\n" + "row\n" * 5000, got=3, do="build the layout from the same model")
    passed_on = str(GradientError(f"rank 0 refuses: {inner}" + "y" * 5000 + "; start again"))
    assert passed_on.startswith("rank 0 refuses: rows differ:\nrow\n")
    assert passed_on.endswith("y; start again")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("a\rb\tc\x00\x7f\x9b31m", r"a\rb\tc\x00\x7f\x9b31m"),
        ("\u202erof\u2028", r"\u202erof\u2028"),
        ("\ud800", r"\ud800"),
        ("ключ ö 'w' \\ two\nlines", "ключ ö 'w' \\ two\nlines"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert str(GradientError("peer says", got=text)) == f"peer says: got {shown}"
    str(GradientError(text)).encode()


def stepped():
    engine = GradientEngine(GradientLayout.of([(2,)]))
    engine.add([np.ones(2, np.float32)])
    return engine.step()


def closed_server():
    with GradientServer(1) as server:
        return server


SHARED = {
    "a GradientEngine": lambda: GradientEngine(GradientLayout.of([(2,)])),
    "a PerBlockGradientAccumulator": lambda: PerBlockGradientAccumulator(GradientLayout.of([(2,)])),
    "a BlockGradientSet": lambda: BlockGradientSet(GradientLayout.transformer(1, 4, 2, 8, 16).blocks[0]),
    "an Exchange": lambda: local_group(1)[0],
    "a WorkerClient": lambda: WorkerClient(("127.0.0.1", 1), 1, 2),
    "a GradientServer": closed_server,
    "a FusedClipState": lambda: FusedClipState([2]),
    "a StepResult": stepped,
}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_deep_copy_of_gradients_is_a_plain_dict_of_copies(copied):
    gradients = stepped().gradients
    kept = copied(gradients)
    assert type(kept) is dict
    kept["0"][:] = 5
    assert gradients["0"].tolist() == [1, 1]
    with pytest.raises(TypeError):
        gradients["0"] = kept["0"]


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_shares_memory_or_a_connection_is_not_copied_by_mistake(name, copied):
    """Each copy's parts would have memory of their own: an engine that hands back what nobody added to."""
    with pytest.raises(CallerError, match=rf"^{name} cannot be copied or pickled; \w+"):
        copied(SHARED[name]())


def test_a_list_whose_text_would_fill_the_memory_is_said_in_short():
    assert len(str(CallerError("what", got=doubling(), expected={"all": doubling()}))) < 1500


class Talkative:
    def __repr__(self):
        return "words " * 10**5


LARGE = np.arange(10**5, dtype=np.float64)
HOSTILE = {
    "an array": LARGE,
    "50 arrays in one name": {"encoder": {f"a{i}": LARGE for i in range(50)}},
    "text": "x" * 10**6,
    "lines": "row\n" * 10**5,
    "colours": "\x1b[31m\x07" * 10**4,
    "a long name": {"n" * 10**6: (2,)},
    "numbers": list(range(10**4)),
    "digits": 10**4000,
    "names": {str(i): "w" * 1000 for i in range(1000)},
    "an object": Talkative(),
    "objects": {"w": Talkative(), "v": [Talkative()] * 3},
}
LONG_NAMES = GradientLayout.of({f"layers.{i}.{'c' * 200}": (2,) for i in range(300)})
PAIR = GradientLayout.of([(2,)])


def stepped_into(out):
    engine = GradientEngine(PAIR)
    engine.add([np.ones(2, np.float32)])
    return engine.step(out=out)


CALLS = {
    "of": GradientLayout.of,
    "of one": lambda given: GradientLayout.of({"w": given}),
    "of parts": lambda given: GradientLayout.of({"w": (2,)}, tp_size=2, partitions={"w": given}),
    "transformer": lambda given: GradientLayout.transformer(given, 1, 1, 1, 1),
    "slot": lambda given: LONG_NAMES.slot(str(given)),
    "add": lambda given: GradientEngine(LONG_NAMES).add(given),
    "add one": lambda given: GradientEngine(PAIR).add([given]),
    "add a block": lambda given: GradientEngine(LONG_NAMES).add_block(0, given),
    "a weight": lambda given: GradientEngine(PAIR).add([np.ones(2, np.float32)], weight=given),
    "out": stepped_into,
    "max_norm": lambda given: GradientEngine(PAIR, max_norm={"all": given}),
    "loss_scale": lambda given: GradientEngine(PAIR, loss_scale=given),
    "clip": lambda given: clip_by_global_norm(given, 1.0),
    "a pointer": lambda given: GradientEngine(PAIR).add([RawBuffer(given, 2, "float32")]),
    "a dtype": lambda given: GradientEngine(PAIR).add([RawBuffer(4096, 2, given)]),
}

FIT = {
    "of": {"a long name"},
    "of one": {"a long name"},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", HOSTILE)
def test_whatever_a_call_is_given_its_error_is_ours_and_a_few_lines(call, given):
    if given in FIT.get(call, ()):
        CALLS[call](HOSTILE[given])
        return
    with pytest.raises(GradientError) as caught:
        CALLS[call](HOSTILE[given])
    message = str(caught.value)
    assert len(message) < 1500
    assert len(message.split("\n")) <= 12
