"""The inputs that fuzzing begins with: well-formed ones made here, and those that reached new code, as lines of hex."""

from pathlib import Path

import msgpack

from fuzz.targets import HELLO, LAYOUT
from gradengine.exchange import hello
from gradengine.exchange.wire import checksum, encoded, head
from gradengine.layout import GradientLayout

FOLDER = Path(__file__).parent / "corpus"


def corpus(target):
    """All inputs of a target that are kept: each a text of bytes."""
    file = FOLDER / f"{target}.txt"
    return [*SEEDS[target], *(bytes.fromhex(line) for line in file.read_text().split())]


def keep(target, inputs):
    """Keep inputs that reached new code beside those that are made here."""
    lines = {each.hex() for each in inputs} - {each.hex() for each in SEEDS[target]}
    (FOLDER / f"{target}.txt").write_text(
        "".join(f"{line}\n" for line in sorted(lines, key=lambda line: (len(line), line)))
    )


def _addressed(tag, payload):
    return head(tag, checksum(tag, payload), len(payload)) + payload


_MESSAGES = [
    encoded("hello", 1, 2, "", bytes(32)),
    encoded("hello", 0, 65_536, "", bytes(range(32))),
    encoded("nonce", bytes(32)),
    encoded("moved", "unix:///a"),
    encoded("proof", bytes(32)),
    encoded("listening", "tcp://10.0.0.2:4000", "a host"),
    encoded("members", bytes(16), "unix", ["unix:///a"]),
    encoded("abort", "HandshakeRefused", "text"),
    encoded("abort", "PeerLost", "\x1b[2J"),
]
_TABLES = [LAYOUT, GradientLayout.of({"w": (0,), "b": ()}), GradientLayout.of([(3, 4, 5), (1,)])]
SEEDS = {
    "message": _MESSAGES,
    "hello": [
        HELLO,
        hello.packed_hello(hello.Hello(bucket_bytes=1 << 22, most_bytes=1 << 36)),
        HELLO[:-3],
        msgpack.packb([3, *msgpack.unpackb(HELLO)[1:]]),
        msgpack.packb([*msgpack.unpackb(HELLO)[:-2], True, {}]),
        msgpack.packb([*msgpack.unpackb(HELLO)[:-1], {"average": 1}]),
    ],
    "table": [layout.table() for layout in _TABLES],
    "addresses": [
        msgpack.packb(["tcp://10.0.0.2:4000", "tcp://[::1]:1"]),
        msgpack.packb(["unix:///a", "tcp://0.0.0.0:9"]),
    ],
    "stranger": [_MESSAGES[0], _MESSAGES[0] + _MESSAGES[4], _MESSAGES[0] + _MESSAGES[0], _MESSAGES[4], _MESSAGES[5]],
    "listener": [
        _MESSAGES[2],
        _MESSAGES[3],
        _MESSAGES[2] + _MESSAGES[4] + _MESSAGES[6],
        _MESSAGES[7],
        _MESSAGES[8],
    ],
    "link": [_addressed(0, bytes(range(8))), _addressed(6, bytes(8)) + _addressed(0, bytes(8)), head((1 << 21), 2, 0)],
}
SEEDS["shared_memory"] = [*SEEDS["link"], _addressed(1 << 22, bytes(16)), _addressed((1 << 22) + 1, bytes([8] * 16))]
