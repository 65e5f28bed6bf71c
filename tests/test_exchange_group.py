"""What the members of a group share, with members made of lists: who may join, who sums, who is told of what."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest
from transports import SMALL, contributions, rank_order_sum

from gradengine.errors import CallerError, DeadlineExceeded, HandshakeRefused, PeerLost, WindowError
from gradengine.exchange.group import Group, Member
from gradengine.exchange.interface import Membership, Progress, buckets_of
from gradengine.layout import GradientLayout

BUCKET = 64
COUNT = len(buckets_of(SMALL, BUCKET))
FIRST, SECOND = (Membership(bytes(range(16)), rank, 2) for rank in range(2))


class Recorder(Member):
    """A rank that notes what it is told."""

    def __init__(self, rank, arena, progress=None):
        super().__init__(rank, progress or Progress())
        self.arena, self.told, self.sums = arena, [], []
        self.takes_its_sums = True

    def contribution(self, bucket):
        return self.arena[bucket.start : bucket.stop]

    def deliver(self, step, bucket, total):
        self.progress.partially_written = False
        self.sums.append((step, bucket.start, total.tobytes()))

    def end_step(self, step, bad):
        self.told.append(("end", step, list(bad)))

    def deliver_gathered(self, parts):
        self.told.append(("gathered", parts))

    def welcome(self, summed):
        self.told.append(("welcome", summed))

    def dismiss(self, failure):
        self.told.append(("dismiss", failure))

    @property
    def has_all(self):
        return self.takes_its_sums


def new_group(world_size=2, **options):
    return Group(world_size, **{"timeout": 9.0, "join_timeout": 9.0, "bucket_bytes": BUCKET, **options})


def opened(world_size, **options):
    group = new_group(world_size, **options)
    members = [Recorder(*pair) for pair in enumerate(contributions(SMALL, world_size))]
    for member in members:
        group.admit(member, SMALL)
    return group, members


def test_last_to_join_opens_the_group():
    group = new_group()
    first, second = (Recorder(rank, None) for rank in (1, 0))
    group.admit(first, SMALL)
    assert (group.is_complete, first.told) == (False, [])
    group.admit(second, SMALL)
    assert (group.is_complete, first.told, second.told) == (True, [("welcome", 0)], [("welcome", 0)])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_who_completes_a_bucket_sums_it(world_size):
    group, members = opened(world_size)
    total = rank_order_sum([member.arena for member in members])
    for rank in reversed(range(world_size)):
        assert all(not member.sums for member in members)
        group.contribute(rank, COUNT)
    expected = [(0, bucket.start, total[bucket.start : bucket.stop].tobytes()) for bucket in group.buckets]
    for member in members:
        assert member.sums == expected
        assert member.told == [("welcome", 0), ("end", 0, [])]


def test_contributions_are_left_as_they_are_where_the_group_has_memory_of_its_own():
    group, members = opened(2)
    before = [member.arena.copy() for member in members]
    for rank in range(2):
        group.contribute(rank, COUNT)
    assert [member.arena.tobytes() for member in members] == [arena.tobytes() for arena in before]


def test_rank_taken_twice_is_refused_and_the_group_goes_on():
    group = new_group()
    group.admit(Recorder(1, None), SMALL)
    with pytest.raises(HandshakeRefused, match="rank 1 has joined already; give each worker its own rank"):
        group.admit(Recorder(1, None), SMALL)
    group.admit(Recorder(0, None), SMALL)
    assert group.is_complete
    assert group.failure is None


def test_another_layout_ends_the_group_for_all():
    group, others = new_group(3), [Recorder(2, None), Recorder(0, None)]
    for member in others:
        group.admit(member, SMALL)
    with pytest.raises(HandshakeRefused) as refusal:
        group.admit(Recorder(1, None), GradientLayout.of({"w": (3,)}))
    text = str(refusal.value)
    assert "layouts differ between rank 1 (here) and ranks 0, 2 (there)" in text
    assert "row 0: here 'w' (3,), there 'layers.0.w' (7, 5)" in text
    assert [member.told for member in others] == [[("dismiss", refusal.value)]] * 2
    with pytest.raises(HandshakeRefused) as later:
        group.admit(Recorder(1, None), SMALL)
    assert later.value is refusal.value


def test_lost_sums_are_sent_again_before_the_step_goes_on():
    group = new_group(2)
    arenas = contributions(SMALL, 2)
    cut = group.buckets_at = 5
    first = Recorder(0, arenas[0], Progress(step=3, summed=cut, contributed=cut, membership=FIRST))
    behind = Recorder(
        1, arenas[1], Progress(step=3, summed=2, partially_written=True, contributed=cut, membership=SECOND)
    )
    group.admit(behind, SMALL)
    group.admit(first, SMALL, first.arena)
    sums = [(3, bucket.start, arenas[0][bucket.start : bucket.stop].tobytes()) for bucket in group.buckets[:cut]]
    assert (first.sums, behind.sums) == ([], sums[2:])
    assert first.told == behind.told == [("welcome", cut)]
    for rank in range(2):
        group.contribute(rank, COUNT - cut)
    assert [len(member.sums) for member in (first, behind)] == [COUNT - cut, COUNT - 2]
    assert first.told[-1] == behind.told[-1] == ("end", 3, [])


def test_step_that_only_lacked_deliveries_ends_at_once():
    group = new_group(2)
    arenas = contributions(SMALL, 2)
    arenas[0][:] = 1
    group.admit(Recorder(0, arenas[0], Progress(summed=COUNT, contributed=COUNT, membership=FIRST)), SMALL, arenas[0])
    behind = Recorder(1, arenas[1], Progress(summed=COUNT - 1, contributed=COUNT, membership=SECOND))
    group.admit(behind, SMALL)
    assert len(behind.sums) == 1
    assert behind.told == [("welcome", COUNT), ("end", 0, [])]


def test_first_failure_counts_and_everybody_is_told_once():
    group, members = opened(2)
    first, second = PeerLost("first"), PeerLost("second")
    group.fail(first)
    group.fail(second)
    assert group.failure is first
    assert [member.told[1:] for member in members] == [[("dismiss", first)]] * 2
    with pytest.raises(PeerLost) as raised:
        group.wait_until(lambda: False)
    assert raised.value is first


def test_failed_group_sums_nothing():
    group, members = opened(2)
    group.fail(PeerLost("gone"))
    for rank in range(2):
        group.contribute(rank, COUNT)
    assert not any(member.sums for member in members)


def test_only_a_group_in_which_somebody_waits_is_late(monkeypatch):
    now = 100.0
    monkeypatch.setattr("gradengine.exchange.group.time", types.SimpleNamespace(monotonic=lambda: now))
    group, _ = opened(2, timeout=5.0)
    now += 10
    assert group.fail_if_late() == 5
    assert group.failure is None
    group.contribute(1, 1)
    now += 2
    assert group.fail_if_late() == 3, "something moved"
    now += 4
    with pytest.raises(
        DeadlineExceeded, match=r"rank 0 is late for bucket 0 of step 0, rank 1 is waiting: got nothing for"
    ):
        group.wait_until(lambda: False)


def test_who_does_not_take_its_sums_is_late():
    group, members = opened(3, timeout=0.05)
    for rank in range(3):
        group.contribute(rank, COUNT)
    members[2].takes_its_sums = False
    with pytest.raises(DeadlineExceeded, match=r"rank 2 is late for taking the sums, ranks 0, 1 are waiting"):
        group.wait_until(lambda: False)


def test_time_to_join_begins_anew_with_each_rank():
    group = new_group(3, join_timeout=0.05)
    group.admit(Recorder(2, None), SMALL)
    with pytest.raises(PeerLost, match=r"ranks 0, 1 are late for joining, rank 2 is waiting: got nobody new in 0.05 s"):
        group.wait_until(lambda: False)


def test_sum_that_breaks_off_is_a_failure_not_a_hang():
    group, members = opened(2)

    def broken(step, bucket, total):
        raise MemoryError

    members[1].deliver = broken
    group.contribute(0, 1)
    with pytest.raises(MemoryError):
        group.contribute(1, 1)
    assert "the sum of bucket 0 of step 0 broke off (MemoryError" in str(group.failure)
    group.settle()


def test_calls_before_anybody_joined_are_refused():
    with pytest.raises(WindowError, match="not bound to a layout"):
        new_group().contribute(0, 1)


@pytest.mark.parametrize(
    ("option", "value"), [("world_size", 0), ("timeout", 0.0), ("join_timeout", -1.0), ("timeout", float("nan"))]
)
def test_arguments_out_of_range_are_refused(option, value):
    with pytest.raises(CallerError, match="out of range"):
        new_group(**{option: value})


@pytest.mark.parametrize("world_size", [3])
def test_many_threads_sum_each_bucket_once_and_in_order(world_size):
    group, members = opened(world_size)
    total = rank_order_sum([member.arena for member in members])

    def one_by_one(rank):
        for _ in range(COUNT):
            group.contribute(rank, 1)

    threads = [threading.Thread(target=one_by_one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    starts = [bucket.start for bucket in group.buckets]
    for member in members:
        assert [start for _, start, _ in member.sums] == starts
        landed = np.concatenate([np.frombuffer(data, np.float32) for _, _, data in member.sums])
        expected = np.concatenate([total[bucket.start : bucket.stop] for bucket in group.buckets])
        assert landed.tobytes() == expected.tobytes()
