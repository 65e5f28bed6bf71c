"""Text to learn without a download: the sources of Python's own standard library, or a file of the user's.

All here are pure functions of their arguments and of the files read: all workers draw the same micro-batches.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradengine.errors import CallerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = [
    "evaluation_batches", "micro_batch", "read_text", "split", "standard_library_text", "step_indexes",
    "unigram_entropy",
]  # fmt: skip

MIN_TEXT_BYTES = 10_000
"""A shorter text leaves too little to hold out for a loss that means anything."""

REGION_BYTES = 65_536
"""`split` holds out the end of each region of about this size."""

_LEFT_OUT = {
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "__pycache__"),  # generated
    *("site-packages", "dist-packages", "ensurepip", "lib2to3"),  # installed
}


def standard_library_text(max_bytes: int = 4_000_000, folder: str | os.PathLike[str] | None = None) -> bytes:
    """Join the modules of the standard library, this interpreter's own or that in `folder`, in sorted order.

    Tests, installed packages and generated tables are left out, unreadable files skipped. CallerError if nothing is
    found: this interpreter keeps its library zipped or without sources.
    """
    root = Path(folder if folder is not None else sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _source_files(root):
        text += _bytes_or_nothing(path)
        if len(text) >= max_bytes:
            break
    place = f"the standard library's folder {str(root)!r}"
    return _long_enough(bytes(text[:max_bytes]), place, min(max_bytes, MIN_TEXT_BYTES))


def _source_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _bytes_or_nothing(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def read_text(path: str | os.PathLike[str]) -> bytes:
    """Read the user's file, in any encoding; CallerError if it cannot be read, or is too short to hold out a part."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        what = f"cannot read the text {os.fspath(path)!r}: {error.strerror}"
        raise CallerError(what, do="pass --text FILE") from None
    return _long_enough(text, repr(os.fspath(path)), MIN_TEXT_BYTES)


def _long_enough(text: bytes, place: str, minimum: int) -> bytes:
    if len(text) >= minimum:
        return text
    do = "pass --text FILE with any longer file, such as a book or source code"
    raise CallerError(f"too little text in {place}", got=f"{len(text)} bytes", expected=f"at least {minimum}", do=do)


def split(text: bytes, held_out_fraction: float = 0.1) -> tuple[bytes, bytes]:
    """Divide a text into what is learned and what is held out to test on; no byte is in both.

    The last part of every region of 64 KiB is held out, not the tail of the whole: a tail is whatever sorts last, other
    authors on other matters, and its loss would tell more of that than of the training.

    Example:
        >>> split(b"0123456789", 0.2)
        (b'01234567', b'89')
    """
    regions = max(1, len(text) // REGION_BYTES)
    train, held_out = [], []
    for region in range(regions):
        begin, end = len(text) * region // regions, len(text) * (region + 1) // regions
        cut = end - round((end - begin) * held_out_fraction)
        train.append(text[begin:cut])
        held_out.append(text[cut:end])
    return b"".join(train), b"".join(held_out)


def unigram_entropy(text: bytes) -> float:
    """Return the entropy of the text's own bytes, nats per byte: no model that ignores context can score lower on it.

    Example:
        >>> round(unigram_entropy(b"abababab"), 4)  # ln 2
        0.6931
    """
    counts = np.bincount(np.frombuffer(text, np.uint8))
    shares = counts[counts > 0] / len(text)
    return float(np.sum(shares * -np.log(shares)))


def step_indexes(step: int, micro_batches: int, rank: int, world_size: int) -> range:
    """Return the global indexes of the micro-batches that `rank` takes of a step's `micro_batches`.

    All workers together take each index once; what the step sees does not depend on how many they are.

    Example:
        >>> list(step_indexes(step=1, micro_batches=4, rank=0, world_size=2))
        [4, 6]
    """
    return range(step * micro_batches + rank, (step + 1) * micro_batches, world_size)


def micro_batch(text: bytes, index: int, batch_size: int, sequence_length: int, seed: int = 0) -> NDArray[np.uint8]:
    """Cut `batch_size` windows of the text at places drawn from `seed` and `index` alone.

    Returns (B, T+1) bytes: `[:, :-1]` are the inputs, `[:, 1:]` the targets. Drawn by `SeedSequence`, whose output
    NumPy keeps the same in all versions: unlike machines draw alike. ValueError if the text is shorter than a window.

    Example:
        >>> micro_batch(bytes(range(100)), index=0, batch_size=2, sequence_length=3).shape
        (2, 4)
    """
    places = _last_start(text, sequence_length) + 1
    drawn = np.random.SeedSequence((seed, index)).generate_state(batch_size, np.uint64)
    return _windows(text, (drawn % np.uint64(places)).astype(np.int64), sequence_length)


def evaluation_batches(
    text: bytes, batch_size: int, sequence_length: int, max_batches: int
) -> Iterator[NDArray[np.uint8]]:
    """Yield up to `max_batches` batches (B, T+1) of windows spread evenly over the text, the same ones every time.

    No two windows overlap by more than the byte that ends one and starts the next, as long as the text allows a batch.
    """
    last_start = _last_start(text, sequence_length)
    batches = max(1, min(max_batches, (last_start // sequence_length + 1) // batch_size))
    starts = np.linspace(0, last_start, batches * batch_size).astype(np.int64)
    for batch in starts.reshape(batches, batch_size):
        yield _windows(text, batch, sequence_length)


def _last_start(text: bytes, sequence_length: int) -> int:
    if len(text) <= sequence_length:
        raise ValueError(f"a window of {sequence_length} + 1 bytes does not fit into a text of {len(text)}")
    return len(text) - sequence_length - 1


def _windows(text: bytes, starts: NDArray[np.int64], sequence_length: int) -> NDArray[np.uint8]:
    windows: NDArray[np.uint8] = np.frombuffer(text, np.uint8)[starts[:, None] + np.arange(sequence_length + 1)]
    return windows
