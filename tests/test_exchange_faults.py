"""What networks do to bytes: every flipped bit is an error that names ranks, and the step can be run again."""

from __future__ import annotations

import fcntl
import functools
import random
import re
import termios
from collections import Counter

import pytest
from faulty import HEAD, KINDS, SERVED, Faulty, Flip, Hole, Reset, Slices, Way
from test_exchange_processes import until
from transports import SMALL, SOON, Worker, contributions, on_all, outcomes, rank_order_sum, shared

from gradengine.errors import DeadlineExceeded, ExchangeError, HandshakeRefused, PeerLost, ProtocolError
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
PARTS = contributions(SMALL, 3)
SUMS = {world_size: rank_order_sum(PARTS[:world_size]).tobytes() for world_size in (2, 3)}
TO, FROM = 0, 1  # rank 1: the two ways


def new_workers(kind, world_size):
    parts = [shared(part) if kind == "shared memory" else part for part in PARTS[:world_size]]
    return [Worker(None, SMALL, part) for part in parts]


def run(workers, group):
    """What each worker's step ends with."""
    for worker, exchange in zip(workers, group.exchanges, strict=True):
        worker.exchange = exchange
    return outcomes(lambda worker: worker.bind() or worker.sum() or worker.exchange.barrier(), workers)


def messages_of_a_step(kind, world_size):
    """The messages that go each way before those of the last gather: whatever becomes of one, all ranks miss it."""
    ways = Way(), Way()
    with Faulty(kind, world_size, ways) as group:
        assert run(new_workers(kind, world_size), group) == [None] * world_size
        return [way.messages[:-1] for way in ways]


def in_one_way(way, fault):
    return (fault, Way()) if way == TO else (Way(), fault)


def run_again(kind, workers):
    """Run the step over new links, to the right bytes; or else all ranks are told what was lost."""
    with Faulty(kind, len(workers), (Way(), Way())) as group:
        found = run(workers, group)
    if {*found} == {None}:
        assert all(worker.arena.tobytes() == SUMS[len(workers)] for worker in workers)
        return True
    assert {*map(type, found)} == {HandshakeRefused}, found
    assert len({*map(str, found)}) == 1, found
    said = "that the server lost" if kind == SERVED else "to a message that was damaged on the way"
    assert said in str(found[0]), found
    return False


# ---- a flipped bit ----


def region(bit):
    """Which part of a message that is."""
    byte = bit // 8
    return "tag" if 2 <= byte < 6 else "checksum" if 7 <= byte < 15 else "payload" if byte >= 20 else "form or size"


def words_for(tag):
    """What errors call a message with this tag: docs/wire.md."""
    tag %= 1 << 22  # above it: where a part or sum is, and that it has been read
    return (
        "a gather" if tag >= (1 << 21) - 2
        else f"the facts of {'the server' if tag // 6 == 2 else f'rank {tag // 6}'} in step 0" if tag % 6 // 2 == 2
        else f"the {['part', 'sum'][tag % 6 // 2]} of share {tag // 6} in step 0"
    )  # fmt: skip


def flipped(kind, seed, messages):
    """Run a step of which one bit is flipped: which part of a message that was, and whether the step was run again."""
    draw = random.Random(f"{kind} {seed}")
    way = draw.choice([TO, FROM])
    flip = Flip(draw.randrange(len(messages[way])), draw.random() < 0.5, draw.random())
    other = 2 if kind == SERVED else 0
    receiver, sender = (1, other) if way == TO else (other, 1)

    def clock(now=[0.0]):  # noqa: B006  (it goes on from look to look)
        # What is taken for another message, that nobody asks for, is waited for until the deadline.
        now[0] += 10 * SOON if flip.hit and region(flip.hit[1]) == "tag" else 0.0
        return now[0]

    workers = new_workers(kind, 2)
    with Faulty(kind, 2, in_one_way(way, flip), clocks={receiver: clock}) as group:
        found = run(workers, group)
    found = [*found, group.failure] if kind == SERVED else found
    refuse_unnamed(found, flip.hit, receiver, sender)
    return region(flip.hit[1]), run_again(kind, workers)


def refuse_unnamed(found, hit, receiver, sender):
    """Each end has an error of ours that names somebody; who receives what is damaged says what that was."""
    names = ["rank 0", "rank 1", "the server"]
    for fault in found:
        assert isinstance(fault, ExchangeError), (found, hit)
        assert any(name in str(fault) for name in names), (found, hit)
    tag, bit = hit
    damaged = f"what {names[sender]} sent {names[receiver]} was damaged on the way: {words_for(tag)}; reconnect on all"
    no_message = f"{names[sender]} sent {names[receiver]} "
    if region(bit) != "tag":
        assert isinstance(found[receiver], ProtocolError), (found, hit)
        assert str(found[receiver]).startswith(damaged if region(bit) != "form or size" else no_message), (found, hit)
        assert {type(fault) for n, fault in enumerate(found) if n != receiver} == {PeerLost}, (found, hit)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "connections" not in kind])
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.timeout(1500))])
def test_every_flipped_bit_is_an_error_that_names_ranks_and_the_step_is_run_again(kind, count):
    """Of anything that travels after the handshake: heads and payloads, of gathers too."""
    messages = messages_of_a_step(kind, 2)
    found = Counter(flipped(kind, seed, messages) for seed in range(count))
    assert {where for where, _ in found} == {"tag", "checksum", "payload", "form or size"}
    # A server has no sums; else only a wrong tag can have something written over a part of which there is no sum.
    assert kind == SERVED or all(is_again or where == "tag" for where, is_again in found), found


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_part_that_comes_as_a_sum_is_an_error_and_the_part_that_it_is_written_over_is_missed(kind):
    """One bit of its tag was flipped: rank 1's part of share 0 as the sum of share 1, which rank 1 owns and has not."""
    layout = GradientLayout.of({"layers.0.w": (32,), "layers.1.w": (32,)})
    flip, parts = Flip(1, is_in_head=True, place=(5 * 8 + 3.5) / 160), contributions(layout, 2)
    workers = [Worker(None, layout, part) for part in parts]
    with Faulty(kind, 2, (Way(), flip)) as group:
        for worker, exchange in zip(workers, group.exchanges, strict=True):
            worker.exchange = exchange
        found = outcomes(lambda worker: worker.bind() or worker.sum(layout.spans[: 2 - worker.exchange.rank]), workers)
    assert flip.hit[0] == 0
    assert str(found[0]).startswith("what rank 1 sent rank 0 was damaged on the way: the sum of share 1 in step 0")
    assert isinstance(found[1], PeerLost)
    assert not run_again(kind, workers)
    for worker, part in zip(workers, parts, strict=True):
        worker.progress.restart()
        worker.arena[:] = part
    with Faulty(kind, 2, (Way(), Way())) as group:
        assert run(workers, group) == [None] * 2
    assert all(worker.arena.tobytes() == rank_order_sum(parts).tobytes() for worker in workers)


# ---- other faults of a connection ----

of_every_kind = pytest.mark.parametrize("kind", KINDS)
in_each_way = pytest.mark.parametrize("way", [TO, FROM], ids=["to rank 1", "from rank 1"])
at_each_moment = pytest.mark.parametrize("moment", ["first message", "middle", "last byte"])


@functools.cache
def sizes_of_a_step(kind):
    return [[HEAD.size + size for _, size in way] for way in messages_of_a_step(kind, 3)]


def bytes_before(kind, way, moment):
    first, *_ = sizes = sizes_of_a_step(kind)[way]
    return {"first message": first // 2, "middle": first + (sum(sizes) - first) // 2, "last byte": sum(sizes) - 1}[
        moment
    ]


@of_every_kind
def test_what_comes_a_few_bytes_at_a_time_is_summed_as_ever(kind):
    with Faulty(kind, 3, (Slices(1), Slices(2))) as group:
        workers = new_workers(kind, 3)
        assert run(workers, group) == [None] * 3
        assert all(worker.arena.tobytes() == SUMS[3] for worker in workers)
        on_all(lambda worker: worker.next_step(PARTS[worker.exchange.rank]), workers)
        on_all(Worker.sum, workers)
        assert all(worker.arena.tobytes() == SUMS[3] for worker in workers)


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
        if link.bell.has_ended:
            return True
        unread = bytearray(4)
        try:
            (connection,) = [theirs for peer, (theirs, *_) in link._connections.items() if peer in {0, 3}]
            fcntl.ioctl(connection.socket, termios.FIONREAD, unread)
        except (OSError, ValueError):  # the rank is closing, and will have closed when this is asked again
            return False
        return not any(unread) and pump is not None and pump._moved_bytes == link.moved_bytes


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "connections" not in kind])
def test_bytes_that_flow_put_off_the_deadline(kind):
    trickle = Trickle(1)
    with Faulty(kind, 3, (trickle, Way()), clocks={1: lambda: trickle.now}) as group:
        trickle.exchange = group.exchanges[1]
        assert run(new_workers(kind, 3), group) == [None] * 3
    assert trickle.now > 5 * SOON


@of_every_kind
@in_each_way
@at_each_moment
def test_a_connection_that_is_reset_is_an_error_that_names_its_ends_and_the_step_is_run_again(kind, way, moment):
    workers = new_workers(kind, 3)
    with Faulty(kind, 3, in_one_way(way, Reset(bytes_before(kind, way, moment)))) as group:
        found = run(workers, group)
    found += [group.failure] if kind == SERVED else []
    assert {*map(type, found)} == {PeerLost}, found
    ends = "(the server|rank 1)" if kind == SERVED else "(rank 0|rank 1)"
    told = rf"{ends} (is gone|has closed its link)|rank 2 has closed its link: this rank \([01]\) was lost"
    # Rank 2 is told first and leaves; whom it had lost is not read behind a message that nobody receives yet.
    told += "" if kind == SERVED else r"|rank 2 is gone: (the connection with it is lost|its connection has ended)"
    assert any(re.match(ends, str(fault)) for fault in found), found
    assert all(re.match(told, str(fault)) for fault in found), found
    assert run_again(kind, workers) or kind == SERVED


@of_every_kind
@in_each_way
@at_each_moment
def test_what_vanishes_on_the_way_is_missed_at_the_deadline_and_the_step_is_run_again(kind, way, moment):
    hole = Hole(bytes_before(kind, way, moment))
    waits, late = (3, 1) if kind == SERVED else (1, 0) if way == TO else (0, 1)

    def clock(now=[0.0]):  # noqa: B006  (it goes on from look to look)
        # A rank that has joined may be in the hole while this one has not read yet that it has.
        if hole.has_begun and (moment == "first message" or group.has_joined(waits)) and group.waits(waits, late):
            now[0] += 10 * SOON
        return now[0]

    workers = new_workers(kind, 3)
    with Faulty(kind, 3, in_one_way(way, hole), clocks={waits: clock}) as group:
        found = run(workers, group)
    found += [group.failure] if kind == SERVED else []
    assert f"rank {late} is late" in str(found[waits]), found
    assert isinstance(found[waits], DeadlineExceeded if kind == SERVED or moment != "first message" else PeerLost)
    said = f"has closed its link: this rank ({late}) was lost or late"
    if kind == SERVED and way == TO:
        said = "the server is gone: its connection has ended"  # what it says vanishes too
    assert said in str(found[late]), found
    assert all(isinstance(fault, PeerLost) for n, fault in enumerate(found) if n != waits), found
    assert all(re.match(r"(rank \d|the server) (is|has)", str(fault)) for fault in found), found
    assert run_again(kind, workers) or kind == SERVED
