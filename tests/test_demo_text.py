"""The demo's text: found, bounded, divided and sampled the same way every time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.demo import text as demo_text
from gradengine.demo.text import (
    micro_batch,
    read_texts,
    split,
    standard_library_text,
    unigram_entropy,
)
from gradengine.errors import CallerError

COUNTING = bytes(range(256)) * 4


@pytest.fixture
def library(tmp_path):
    """A small standard library, with all that must be left out of it."""
    files = {
        "b.py": b"second,",
        "a.py": b"first,",
        "pack/c.py": b"third,",
        "notes.txt": b"not a module",
        "test/test_a.py": b"a test",
        "pack/tests/test_c.py": b"a test",
        "site-packages/x.py": b"installed",
        "encodings/table.py": b"generated",
        "__pycache__/a.py": b"cached",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "away.py").symlink_to(tmp_path / "nowhere")
    return tmp_path


# Where it comes from.


def test_library_is_joined_in_order_without_what_is_left_out(library):
    assert standard_library_text(19, library) == b"first,second,third,"
    assert standard_library_text(8, library) == b"first,se"


def test_what_cannot_be_read_or_is_too_short_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_text.sysconfig, "get_path", lambda _: str(tmp_path / "python311.zip"))
    short, enough = tmp_path / "short", tmp_path / "enough"
    short.write_bytes(bytes(demo_text.MIN_TEXT_BYTES - 1))
    enough.write_bytes(bytes(10_000))
    texts = read_texts(enough, 500)
    assert (len(texts.train), len(texts.held_out), texts.source) == (9000, 1000, str(enough))
    for path, length, named in (
        (None, 64, "got 0 bytes"),
        (tmp_path / "absent", 64, "No such file"),
        (tmp_path, 64, "Is a directory"),
        (short, 64, "got 9999 bytes"),
        (enough, 501, "expected at least 10020"),
    ):
        with pytest.raises(CallerError, match=rf"{named}.*pass --text FILE"):
            read_texts(path, length)


def test_this_pythons_library_is_there():
    texts = read_texts(None, sequence_length=64)
    assert len(texts.train) + len(texts.held_out) == 4_000_000
    assert 2.5 < unigram_entropy(texts.held_out) < 3.6
    assert texts.source.startswith("the standard library of ")


# What is held out.


@given(length=st.integers(0, 300_000), fraction=st.floats(0.01, 0.99))
def test_split_keeps_every_byte_once(length, fraction):
    text = np.arange(length, dtype=np.uint32).astype(np.uint8).tobytes()
    train, held_out = split(text, fraction)
    assert len(train) + len(held_out) == length
    regions = max(1, length // demo_text.REGION_BYTES)
    assert len(held_out) == pytest.approx(length * fraction, abs=0.5 * regions + 1)


def test_split_takes_the_end_of_every_region():
    text = b"".join(bytes([region, region + 9]) * (demo_text.REGION_BYTES // 2) for region in range(3))
    train, held_out = split(text, 0.25)
    assert set(train) == set(held_out) == set(text)
    assert train.startswith(text[: demo_text.REGION_BYTES * 3 // 4])


@pytest.mark.parametrize(
    ("text", "entropy"),
    [
        (COUNTING, math.log(256)),
        (b"\x00" * 100, 0.0),
        (b"\xff" * 100, 0.0),
        (b"aaab" * 10, 0.25 * math.log(4) + 0.75 * math.log(4 / 3)),
    ],
)
def test_entropy_of_known_distributions(text, entropy):
    assert unigram_entropy(text) == pytest.approx(entropy, abs=1e-12)


# What is drawn.


def test_micro_batch_is_its_seed_and_index():
    drawn = micro_batch(COUNTING, 3, batch_size=4, sequence_length=7, seed=5)
    assert (drawn.shape, drawn.dtype) == ((4, 8), np.uint8)
    assert np.array_equal(drawn, micro_batch(COUNTING, 3, 4, 7, seed=5))
    assert not np.array_equal(drawn, micro_batch(COUNTING, 4, 4, 7, seed=5))
    assert not np.array_equal(drawn, micro_batch(COUNTING, 3, 4, 7, seed=6))
    assert (np.diff(drawn.astype(int), axis=1) % 256 == 1).all()
    assert micro_batch(COUNTING, 0, 4, 1, seed=0)[:, 0].tolist() == [59, 83, 211, 43]  # on every machine


def test_micro_batch_reaches_both_ends():
    starts = {int(start) for index in range(20) for start in micro_batch(b"0123", index, 8, 2)[:, 0]}
    assert starts == {ord("0"), ord("1")}
