"""What `make fuzz` begins with, and changes of it, through each door; atheris itself is not needed."""

import random

import pytest
from fuzz.__main__ import COUNTS
from fuzz.corpus import SEEDS, corpus
from fuzz.targets import TARGETS

from gradengine.exchange import mesh, wire
from gradengine.exchange.links import sockets

CHANGES = 300


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


def test_all_of_them_together_are_a_million_inputs():
    assert COUNTS.keys() == SEEDS.keys() == TARGETS.keys()
    assert sum(COUNTS.values()) >= 10**6


class TestPlantedBugs:
    """Each is found by what is there to begin with."""

    def found(self, target):
        for data in corpus(target):
            TARGETS[target](data)

    @pytest.mark.parametrize("target", ["stranger", "listener"])
    def test_a_proof_that_is_not_looked_at(self, target, monkeypatch):
        monkeypatch.setattr(mesh, "refuse_other_proof", lambda *_, **__: None)
        with pytest.raises(AssertionError):
            self.found(target)

    @pytest.mark.parametrize("target", ["message", "stranger", "listener"])
    def test_an_error_that_is_not_ours(self, target, monkeypatch):
        monkeypatch.setattr(wire, "_entries", lambda header: {}[header])
        with pytest.raises(KeyError):
            self.found(target)

    def test_a_size_that_is_not_compared_with_the_memory(self, monkeypatch):
        def placed(self, connection):
            *_, tag, _, _, _, size = sockets._HEAD.unpack(connection.head)
            connection.receiving = sockets.Completion(sockets.Completed.RECEIVED, 1, tag)
            whole = self._open[connection.receiving].base
            connection.missing = whole[8 * tag : 8 * tag + size].data

        monkeypatch.setattr(sockets.SocketLink, "_place", placed)
        with pytest.raises(AssertionError):
            TARGETS["link"](sockets.head(1, 0, 16) + bytes([1] * 16))
