"""What networks do to bytes: every flipped bit is an error that names ranks, and the step can be run again."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from faulty import KINDS, SERVED, Faulty, Flip, Way
from transports import SMALL, SOON, Worker, contributions, outcomes, rank_order_sum, shared

from gradengine.errors import ExchangeError, HandshakeRefused, PeerLost, ProtocolError
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
PARTS = contributions(SMALL, 3)
PAIR = rank_order_sum(PARTS[:2]).tobytes()


def new_workers(kind, world_size):
    parts = [shared(part) if kind == "shared memory" else part for part in PARTS[:world_size]]
    return [Worker(None, SMALL, part) for part in parts]


def run(workers, group):
    """What each worker's step ends with."""
    for worker, exchange in zip(workers, group.exchanges, strict=True):
        worker.exchange = exchange
    return outcomes(lambda worker: worker.bind() or worker.sum() or worker.exchange.barrier(), workers)


# ---- a flipped bit ----

TO, FROM = 0, 1  # rank 1: the two ways


def messages_of_a_step(kind):
    """How many messages go each way before those of the last gather, which nobody may miss."""
    ways = Way(), Way()
    with Faulty(kind, 2, ways) as group:
        assert run(new_workers(kind, 2), group) == [None] * 2
        return [len(way.messages) - 1 for way in ways]


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
    flip = Flip(draw.randrange(messages[way]), draw.random() < 0.5, draw.random())
    ways = (flip, Way()) if way == TO else (Way(), flip)
    other = 2 if kind == SERVED else 0
    receiver, sender = (1, other) if way == TO else (other, 1)

    def clock(now=[0.0]):  # noqa: B006  (it goes on from look to look)
        # What is taken for another message, that nobody asks for, is waited for until the deadline.
        now[0] += 10 * SOON if flip.hit and region(flip.hit[1]) == "tag" else 0.0
        return now[0]

    workers = new_workers(kind, 2)
    with Faulty(kind, 2, ways, clocks={receiver: clock}) as group:
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


def run_again(kind, workers):
    """Run the step over new links, to the right bytes; or else all ranks are told what was lost."""
    with Faulty(kind, 2, (Way(), Way())) as group:
        found = run(workers, group)
    if found == [None] * 2:
        assert all(worker.arena.tobytes() == PAIR for worker in workers)
        return True
    assert [type(fault) for fault in found] == [HandshakeRefused] * 2, found
    assert len({str(fault) for fault in found}) == 1, found
    said = "that the server lost" if kind == SERVED else "to a message that was damaged on the way"
    assert said in str(found[0]), found
    return False


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "connections" not in kind])
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.timeout(1500))])
def test_every_flipped_bit_is_an_error_that_names_ranks_and_the_step_is_run_again(kind, count):
    """Of anything that travels after the handshake: heads and payloads, of gathers too."""
    messages = messages_of_a_step(kind)
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
