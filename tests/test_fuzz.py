"""What `make fuzz` begins with, and changes of it, through each door; atheris itself is not needed."""

import random

import pytest
from fuzz.corpus import corpus
from fuzz.targets import TARGETS

CHANGES = 200


def changed(data, other, draw):
    """Bytes as fuzzers change them: some replaced, removed, doubled, or taken from another input."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, size = draw.randrange(len(data) + 1), draw.choice([1, 1, 2, 4, 8])
        data[at : at + draw.choice([0, size])] = draw.choice(
            [
                b"",
                draw.randbytes(size),
                bytes([draw.choice([0, 1, 0x7F, 0x80, 0x91, 0xC0, 0xDD, 0xFF])]) * size,
                other[at : at + 4 * size],
            ]
        )
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_that_was_kept_and_changes_of_them_end_well(target):
    kept, draw = corpus(target), random.Random(target)
    for data in kept:
        TARGETS[target](data)
    for _ in range(CHANGES):
        TARGETS[target](changed(draw.choice(kept), draw.choice(kept), draw))
