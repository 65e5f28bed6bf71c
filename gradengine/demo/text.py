"""Text to learn without a download, which is the standard library of Python or a user's file.

All functions depend only on their arguments and on the files that they read. All workers draw the same micro-batches.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.errors import CallerError

Tokens: TypeAlias = npt.NDArray[np.uint8]

MIN_TEXT_BYTES = 10_000
"""Fewest bytes of a text. The held-out loss of a shorter text would be meaningless."""

REGION_BYTES = 65_536
"""`split` holds out the end of each region of about this size."""

_LEFT_OUT = {
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "__pycache__"),  # generated files
    *("site-packages", "dist-packages", "ensurepip", "lib2to3"),  # installed packages
}


@dataclass(frozen=True)
class Texts:
    """The text to learn, the text that is held out, and their source."""

    train: bytes
    held_out: bytes
    source: str


def read_texts(path: Path | None, sequence_length: int) -> Texts:
    """Read the user's file, in any encoding, or the standard library. A tenth is held out.

    Raises `CallerError` if the text cannot be read, or is too short for a meaningful held-out loss.
    """
    try:
        text = standard_library_text() if path is None else path.read_bytes()
    except OSError as fault:
        raise CallerError(f"cannot read the text '{path}': {fault.strerror}", do="pass --text FILE") from None
    python = f"{platform.python_implementation()} {platform.python_version()}"
    source = str(path or f"the standard library of {python}")
    least, do = max(MIN_TEXT_BYTES, 20 * sequence_length), "pass --text FILE with any longer file, such as a book"
    if len(text) < least:
        raise CallerError(f"too little text in {source}", got=f"{len(text)} bytes", expected=f"at least {least}", do=do)
    train, held_out = split(text)
    return Texts(train, held_out, source)


def standard_library_text(max_bytes: int = 4_000_000, root: Path | None = None) -> bytes:
    """Join the modules of a standard library, by default this interpreter's, in sorted order.

    Tests, installed packages, generated tables and unreadable files are skipped. A zipped library gives an empty text.
    """
    text = bytearray()
    for folder, folders, files in os.walk(root or sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(files):
            if name.endswith(".py") and len(text) < max_bytes:
                with contextlib.suppress(OSError):
                    text += Path(folder, name).read_bytes()
    return bytes(text[:max_bytes])


def split(text: bytes, held_out_fraction: float = 0.1) -> tuple[bytes, bytes]:
    """Divide a text into a part to learn and a held-out part to test on. No byte is in both.

    The last part of every region of 64 KiB is held out. The tail of the whole text would not do, since it can have
    other authors and subjects than the rest.

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
    """Return the entropy of the text's bytes, in nats per byte. No model that ignores context has a lower loss on it.

    Example:
        >>> round(unigram_entropy(b"abababab"), 4)  # ln 2
        0.6931
    """
    counts = np.bincount(np.frombuffer(text, np.uint8))
    shares = counts[counts > 0] / len(text)
    return float(np.sum(shares * -np.log(shares)))


def micro_batch(text: bytes, index: int, batch_size: int, sequence_length: int, seed: int = 0) -> Tokens:
    """Cut `batch_size` windows from a text that is longer than a window, at places that `seed` and `index` fix.

    Returns (B, T+1) bytes. `[:, :-1]` are the inputs, `[:, 1:]` the targets. `SeedSequence` draws the places, since its
    output is the same in all versions of NumPy and on all machines.

    Example:
        >>> micro_batch(bytes(range(100)), index=0, batch_size=2, sequence_length=3).shape
        (2, 4)
    """
    drawn = np.random.SeedSequence((seed, index)).generate_state(batch_size, np.uint64)
    starts = (drawn % np.uint64(len(text) - sequence_length)).astype(np.int64)
    windows: Tokens = np.frombuffer(text, np.uint8)[starts[:, None] + np.arange(sequence_length + 1)]
    return windows
