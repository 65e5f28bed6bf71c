"""The demo's text: found, bounded, divided and sampled the same way every time."""

from __future__ import annotations

import math
import re

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


def test_library_is_cut_where_asked(library):
    assert standard_library_text(8, library) == b"first,se"


def test_this_pythons_library_is_there_and_the_same_each_time():
    texts = read_texts(None, sequence_length=64)
    assert texts == read_texts(None, sequence_length=64)
    assert len(texts.train) + len(texts.held_out) == 4_000_000
    assert b"def " in texts.train
    assert 2.5 < unigram_entropy(texts.held_out) < 3.6
    assert re.fullmatch(r"the standard library of \w+ 3\.[\d.]+\S*", texts.source)


@pytest.mark.parametrize("folder", ["empty", "python311.zip"])
def test_absent_library_says_what_to_do(tmp_path, monkeypatch, folder):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(demo_text.sysconfig, "get_path", lambda _: str(tmp_path / folder))
    message = r"too little text in the standard library.*got 0 bytes, expected at least 10000; pass --text FILE"
    with pytest.raises(CallerError, match=message):
        read_texts(None, 64)


def test_reads_a_file_as_it_is(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xff\r\n\x00" * 5000)
    texts = read_texts(path, 64)
    assert texts.train + texts.held_out == b"\xff\r\n\x00" * 5000
    assert (len(texts.held_out), texts.source) == (2000, str(path))


@pytest.mark.parametrize(("name", "reason"), [("absent", "No such file"), (".", "Is a directory")])
def test_what_cannot_be_read(tmp_path, name, reason):
    with pytest.raises(CallerError, match=rf"cannot read the text '.*': {reason}"):
        read_texts(tmp_path / name, 64)


@pytest.mark.parametrize("length", [0, demo_text.MIN_TEXT_BYTES - 1])
def test_short_file(tmp_path, length):
    path = tmp_path / "short"
    path.write_bytes(bytes(length))
    with pytest.raises(CallerError, match=f"too little text in .*short: got {length} bytes, expected at least 10000"):
        read_texts(path, 64)


def test_a_text_too_short_for_the_sequences_is_refused(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(10_000))
    assert len(read_texts(path, 999).held_out) == 1000
    with pytest.raises(CallerError, match="got 1000 bytes held out, expected more than --sequence-length=1000"):
        read_texts(path, 1000)


# What is held out.


@given(length=st.integers(0, 300_000), fraction=st.floats(0.01, 0.99))
def test_split_keeps_every_byte_once(length, fraction):
    text = np.arange(length, dtype=np.uint32).astype(np.uint8).tobytes()
    train, held_out = split(text, fraction)
    assert len(train) + len(held_out) == length
    regions = max(1, length // demo_text.REGION_BYTES)
    assert len(held_out) == pytest.approx(length * fraction, abs=0.5 * regions + 1)


def test_split_takes_from_every_region():
    text = b"".join(bytes([region]) * demo_text.REGION_BYTES for region in range(5))
    train, held_out = split(text, 0.25)
    assert set(train) == set(held_out) == set(range(5))
    assert train + held_out != text


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


def test_micro_batch_draws_the_same_on_every_machine():
    assert micro_batch(COUNTING, 0, 4, 1, seed=0)[:, 0].tolist() == [59, 83, 211, 43]


def test_micro_batch_cuts_runs_of_the_text():
    drawn = micro_batch(COUNTING, 0, batch_size=50, sequence_length=20)
    assert (np.diff(drawn.astype(int), axis=1) % 256 == 1).all()
    assert len(set(drawn[:, 0].tolist())) > 20


def test_micro_batch_reaches_both_ends():
    starts = {int(start) for index in range(20) for start in micro_batch(b"0123", index, 8, 2)[:, 0]}
    assert starts == {ord("0"), ord("1")}


def test_text_of_one_window():
    assert micro_batch(b"abc", 0, 2, 2).tolist() == [list(b"abc")] * 2
