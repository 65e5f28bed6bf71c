"""docs/wire.md is enough for another language: JavaScript with stock packages reads and writes what we do."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_exchange_wire import LITERAL

from gradengine.exchange.handshake import proof
from gradengine.exchange.links.sockets import checksum, head
from gradengine.exchange.wire import PROTOCOL_VERSION, Hello, encode_head

ROOT = Path(__file__).parent.parent
MODULES = ROOT / "out" / "node" / "node_modules"  # where `make test-wire-js` installs it
pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not (MODULES / "@node-rs").exists(), reason="@node-rs/xxhash is not installed"),
]
PAGE = re.findall(r"^```hex\n(.*?)^```$", (ROOT / "docs" / "wire.md").read_text(), re.DOTALL | re.MULTILINE)
MESSAGE, TRANSFER = map(bytes.fromhex, PAGE)
FACTS = np.array([1.0, 2.0])


def in_javascript(*, messages=(), transfers=(), proofs=()):
    """What JavaScript reads in these bytes and writes anew, and its proofs."""
    asked = {"messages": messages, "transfers": transfers, "proofs": proofs}
    done = subprocess.run(
        ["node", str(ROOT / "tests" / "wire.cjs")],
        input=json.dumps(asked, default=shown),
        env=os.environ | {"NODE_PATH": str(MODULES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shown(data):
    """Bytes in JSON."""
    return f"hex:{data.hex()}"


def test_the_message_of_the_page_is_read_and_written():
    [read] = in_javascript(messages=[MESSAGE.hex()])["messages"]
    assert read["prefix"] == ["GE", 5, 40, 11]
    fields = {"kind": "abort", "error": "PeerLost", "payload": shown(b"rank 1 left")}
    assert list(read["header"].items()) == list(fields.items())
    assert read["more"] == []
    assert read["written"] == shown(MESSAGE)
    assert read["isStable"]


def test_the_transfer_of_the_page_is_read_and_written_with_its_checksum():
    [read] = in_javascript(transfers=[TRANSFER.hex()])["transfers"]
    assert (read["tag"], read["payload"]) == (10, shown(FACTS.astype("<f8").tobytes()))
    assert read["check"] == read["checksum"] == str(0x79FE03D524DB3476)
    assert read["more"] == []
    assert read["written"] == shown(TRANSFER)
    assert read["isStable"]


def test_every_kind_of_message_is_read_and_written():
    """All messages of a handshake as they are on the wire."""
    payloads = [bytes(i % 251 for i in range(size)) for _, size, _ in LITERAL]
    sent = [bytes.fromhex(text) + payload for (_, _, text), payload in zip(LITERAL, payloads, strict=True)]
    found = in_javascript(messages=[data.hex() for data in sent])["messages"]
    for (message, size, _), payload, data, read in zip(LITERAL, payloads, sent, found, strict=True):
        fields = {"kind": message.kind, **dataclasses.asdict(message), "payload": payload}
        assert read["header"] == {
            name: shown(value) if isinstance(value, bytes) else value for name, value in fields.items()
        }
        assert read["prefix"] == ["GE", PROTOCOL_VERSION, len(encode_head(message, size)) - 20, size]
        assert read["written"] == shown(data)
        assert read["isStable"]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1001])
def test_a_checksum_of_any_size_is_the_same(size):
    payload = np.random.default_rng(size).integers(128, 256, size, np.uint8)
    sent = head(6 * 7 + 2, checksum(6 * 7 + 2, payload), size) + payload.tobytes()
    [read] = in_javascript(transfers=[sent.hex()])["transfers"]
    assert str(read["checksum"]) == str(read["check"]) == str(checksum(6 * 7 + 2, payload))
    assert read["written"] == shown(sent)


@pytest.mark.parametrize("role", ["caller", "called"])
@pytest.mark.parametrize("secret", ["", "ünlocked"])
@pytest.mark.parametrize("channel", [b"", bytes(range(64))], ids=["plain", "TLS"])
def test_a_proof_is_the_same(role, secret, channel):
    hello = Hello(rank=300, world_size=400, job="a job", nonce=bytes(range(32)))
    nonce, group = bytes(range(100, 132)), bytes(16)
    bound = [role, PROTOCOL_VERSION, hello.job, hello.rank, hello.world_size, hello.nonce, nonce, 7, group]
    bound += [channel] * bool(channel)
    [found] = in_javascript(proofs=[[secret, *bound]])["proofs"]
    assert found == shown(proof(secret, role, hello, nonce, 7, group, channel))
