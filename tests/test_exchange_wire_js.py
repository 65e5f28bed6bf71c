"""docs/specs/wire.md is enough for another language: JavaScript with stock packages reads and writes what we do."""

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
from gradengine.exchange.wire import VERSION, Hello, checksum, head

ROOT = Path(__file__).parent.parent
MODULES = ROOT / "out" / "node" / "node_modules"  # where `make test-wire-js` installs it
pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not (MODULES / "@node-rs").exists(), reason="@node-rs/xxhash is not installed"),
]
PAGE = re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/specs/wire.md").read_text(), re.DOTALL | re.MULTILINE)
MESSAGE, TRANSFER = map(bytes.fromhex, PAGE)
FACTS = np.array([1.0, 2.0])


def in_javascript(*, frames=(), messages=(), proofs=()):
    """What JavaScript reads in these bytes and writes anew, and its proofs; of messages also their fields."""
    asked = {"frames": frames, "messages": messages, "proofs": proofs}
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
    assert (read["tag"], read["fields"], read["more"]) == (2**25 + 6, ["PeerLost", "rank 1 left"], [])
    assert read["written"] == shown(MESSAGE)
    assert read["isStable"]


def test_the_transfer_of_the_page_is_read_and_written_with_its_checksum():
    [read] = in_javascript(frames=[TRANSFER.hex()])["frames"]
    assert (read["tag"], read["payload"]) == (10, shown(FACTS.astype("<f8").tobytes()))
    assert read["check"] == read["checksum"] == str(0x79FE03D524DB3476)
    assert read["more"] == []
    assert read["written"] == shown(TRANSFER)
    assert read["isStable"]


def test_every_kind_of_message_is_read_and_written():
    """All messages of a handshake as they are on the wire."""
    found = in_javascript(messages=[frame.hex() for _, frame in LITERAL])["messages"]
    for ((kind, *fields), frame), read in zip(LITERAL, found, strict=True):
        opening = ["GE", VERSION] if kind == "hello" else []
        assert read["fields"] == [*opening, *(shown(each) if isinstance(each, bytes) else each for each in fields)]
        assert str(read["checksum"]) == str(read["check"])
        assert read["written"] == shown(frame)
        assert read["isStable"]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1001])
def test_a_checksum_of_any_size_is_the_same(size):
    payload = np.random.default_rng(size).integers(128, 256, size, np.uint8).tobytes()
    sent = head(6 * 7 + 2, checksum(6 * 7 + 2, payload), size) + payload
    [read] = in_javascript(frames=[sent.hex()])["frames"]
    assert str(read["checksum"]) == str(read["check"]) == str(checksum(6 * 7 + 2, payload))
    assert read["written"] == shown(sent)


@pytest.mark.parametrize("role", ["caller", "called"])
@pytest.mark.parametrize("secret", ["", "ünlocked"])
@pytest.mark.parametrize("channel", [b"", bytes(range(64))], ids=["plain", "TLS"])
def test_a_proof_is_the_same(role, secret, channel):
    hello = Hello(rank=300, world_size=400, job="a job", nonce=bytes(range(32)))
    nonce, group = bytes(range(100, 132)), bytes(16)
    bound = [role, VERSION, hello.job, hello.rank, hello.world_size, hello.nonce, nonce, 7, group]
    bound += [channel] * bool(channel)
    [found] = in_javascript(proofs=[[secret, *bound]])["proofs"]
    assert found == shown(proof(secret, role, hello, nonce, 7, group, channel))
