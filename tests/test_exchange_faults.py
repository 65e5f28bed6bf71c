"""Every flipped bit is an error that names ranks, and the step can be made again; what flows puts off the deadline."""

from __future__ import annotations

import fcntl
import functools
import random
import termios
from collections import Counter

import pytest
from faulty import KINDS, SERVED, Faulty, Flip, Slices, Way, new_workers, run, run_again, traffic_of
from test_exchange_processes import until
from transports import SOON, Worker, contributions

from gradengine.errors import ExchangeError, PeerLost, ProtocolError
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
NAMES = ["rank 0", "rank 1", "the server"]


def region(bit):
    """Which part of a message that is."""
    byte = bit // 8
    return "tag" if 2 <= byte < 6 else "checksum" if 7 <= byte < 15 else "payload" if byte >= 20 else "form or size"


def words_for(tag):
    """What errors call a message with this tag: docs/specs/wire.md."""
    tag %= 1 << 22  # above it: where a part or sum is, and that it has been read
    return (
        "a gather" if tag >= (1 << 21) - 2
        else f"the facts of {'the server' if tag // 6 == 2 else f'rank {tag // 6}'} in step 0" if tag % 6 // 2 == 2
        else f"the {['part', 'sum'][tag % 6 // 2]} of share {tag // 6} in step 0"
    )  # fmt: skip


def flipped(kind, seed, messages):
    """Run a step of which one bit is flipped: which part of a message that was, and how the step went on."""
    draw = random.Random(f"{kind} {seed}")
    way = draw.choice([0, 1])  # to rank 1, or from it
    flip = Flip(draw.randrange(len(messages[way])), draw.random() < 0.5, draw.random())
    other = 2 if kind == SERVED else 0
    receiver, sender = (1, other) if way == 0 else (other, 1)

    def clock(now=[0.0]):  # noqa: B006  (it goes on from look to look)
        # What is taken for another message, that nobody asks for, is waited for until the deadline.
        now[0] += 10 * SOON if flip.hit and region(flip.hit[1]) == "tag" else 0.0
        return now[0]

    workers, ways = new_workers(kind, 2), (flip, Way())
    with Faulty(kind, 2, ways if way == 0 else ways[::-1], clocks={receiver: clock}) as group:
        found = run(workers, group.exchanges)
    found = [*found, group.failure] if kind == SERVED else found
    assert all(isinstance(fault, ExchangeError) for fault in found), (found, flip.hit)
    assert all(any(name in str(fault) for name in NAMES) for fault in found), (found, flip.hit)
    tag, bit = flip.hit
    if region(bit) != "tag":
        said = f"the message from {NAMES[sender]} to {NAMES[receiver]} was damaged on the way: {words_for(tag)}"
        said = f"{NAMES[sender]} sent {NAMES[receiver]} " if region(bit) == "form or size" else said
        assert isinstance(found[receiver], ProtocolError), (found, flip.hit)
        assert str(found[receiver]).startswith(said), (found, flip.hit)
        assert {type(fault) for n, fault in enumerate(found) if n != receiver} == {PeerLost}, (found, flip.hit)
    return region(bit), run_again(workers, functools.partial(Faulty, kind, 2, (Way(), Way())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.timeout(1500))])
def test_every_flipped_bit_is_an_error_that_names_ranks_and_the_step_is_made_again_or_discarded(kind, count):
    """Of anything that travels after the handshake: heads and payloads, of gathers too."""
    messages = [messages for _, messages in traffic_of(kind, 2)]
    found = Counter(flipped(kind, seed, messages) for seed in range(count))
    assert {where for where, _ in found} == {"tag", "checksum", "payload", "form or size"}
    assert {how for _, how in found} == {"made again", "discarded"}, found


def test_a_part_that_arrives_as_a_sum_is_an_error_and_the_part_that_it_is_written_over_is_missed():
    """One bit of its tag was flipped: rank 1's part of share 0 as the sum of share 1, which rank 1 owns and has not."""
    layout = GradientLayout.of({"layers.0.w": (32,), "layers.1.w": (32,)})
    flip, parts = Flip(1, is_in_head=True, place=(5 * 8 + 3.5) / 160), contributions(layout, 2)
    workers = [Worker(None, layout, part) for part in parts]
    with Faulty("tcp", 2, (Way(), flip)) as group:
        found = run(workers, group.exchanges, lambda worker: worker.sum(layout.spans[: 2 - worker.exchange.rank]))
    assert flip.hit[0] == 0
    assert str(found[0]).startswith("the message from rank 1 to rank 0 was damaged on the way: the sum of share 1")
    assert isinstance(found[1], PeerLost)
    with Faulty("tcp", 2, (Way(), Way())) as group:
        again = run(workers, group.exchanges)
    assert all("rank 0 holds sums of it" in str(fault) for fault in again), again


class Trickle(Slices):
    """A slow network: after each few bytes, once they have been received, most of the deadline goes by."""

    def __init__(self, seed):
        super().__init__(seed)
        self.exchange, self.now = None, 0.0

    def pieces(self, data):
        for piece in super().pieces(data):
            yield piece
            until(self.has_received)
            self.now += 0.9 * SOON

    def has_received(self):
        """Whether all that was sent was read, and the pump knows; or nobody reads any more."""
        pump, link = self.exchange._pump, self.exchange._link
        if link.is_closed:
            return True
        unread = bytearray(4)
        try:
            (connection,) = [each for peer, each in link._connections.items() if peer in {0, 3}]
            fcntl.ioctl(connection.socket, termios.FIONREAD, unread)
        except (OSError, ValueError):  # the rank is closing, and will have closed when this is asked again
            return False
        return not any(unread) and pump is not None and pump._moved_bytes == link.moved_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_flow_put_off_the_deadline(kind):
    trickle = Trickle(1)
    with Faulty(kind, 3, (trickle, Way()), clocks={1: lambda: trickle.now}) as group:
        trickle.exchange = group.exchanges[1]
        assert run(new_workers(kind), group.exchanges) == [None] * 3
    assert trickle.now > 5 * SOON
