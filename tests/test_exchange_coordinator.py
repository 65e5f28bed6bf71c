"""The protocol as a state machine: however things arrive, sums come in order and never too early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gradengine.errors import HandshakeRefused, ProtocolError
from gradengine.exchange.coordinator import Coordinator, Stall
from gradengine.exchange.interface import Progress


def opened(world_size, num_buckets, step=0, summed=0):
    coordinator = Coordinator(world_size, num_buckets, step)
    for rank in range(world_size):
        coordinator.join(rank, step)
    coordinator.open(summed)
    return coordinator


class Intake(RuleBasedStateMachine):
    """Contributions, sums and gathers in any order, beside the plainest model of them: a count for each rank."""

    @initialize(world_size=st.integers(1, 4), num_buckets=st.integers(1, 4), step=st.integers(0, 3), data=st.data())
    def open(self, world_size, num_buckets, step, data):
        first = data.draw(st.integers(0, num_buckets))
        self.coordinator = opened(world_size, num_buckets, step, first)
        self.first = step * num_buckets + first
        self.given = [self.first] * world_size
        self.sums, self.ends = [], []
        self.parts = {}

    @rule(data=st.data())
    def contribute(self, data):
        rank = data.draw(st.integers(0, len(self.given) - 1))
        assert self.coordinator.expects(rank) == self.given[rank]
        self.coordinator.contribute(rank, self.given[rank])
        self.given[rank] += 1

    @rule(data=st.data(), away=st.integers(-3, 3).filter(bool))
    def contribute_out_of_turn(self, data, away):
        rank = data.draw(st.integers(0, len(self.given) - 1))
        with pytest.raises(ProtocolError, match=f"rank {rank} sent a bucket out of turn"):
            self.coordinator.contribute(rank, self.given[rank] + away)

    @rule()
    def sum_what_is_ready(self):
        position = self.coordinator.ready()
        if position is not None:
            assert all(given > position for given in self.given), "summed before all had contributed"
            self.sums.append(position)
            if self.coordinator.mark_summed():
                self.ends.append(position)

    @rule(data=st.data())
    def gather(self, data):
        rank = data.draw(st.integers(0, len(self.given) - 1))
        part = bytes([rank, len(self.parts)])
        if rank in self.parts:
            with pytest.raises(ProtocolError, match=f"rank {rank} gathered twice"):
                self.coordinator.gather(rank, part)
            return
        self.parts[rank] = part
        gathered = self.coordinator.gather(rank, part)
        if len(self.parts) < len(self.given):
            assert gathered is None
        else:
            assert gathered == [self.parts[rank] for rank in range(len(self.given))]
            self.parts = {}

    @invariant()
    @precondition(lambda self: hasattr(self, "coordinator"))
    def sums_are_in_order_and_none_is_left_out(self):
        assert self.sums == list(range(self.first, self.first + len(self.sums)))
        assert (self.coordinator.ready() is not None) == (min(self.given) > self.coordinator.summed)
        buckets = self.coordinator.num_buckets
        assert self.ends == [position for position in self.sums if position % buckets == buckets - 1]

    @invariant()
    @precondition(lambda self: hasattr(self, "coordinator"))
    def stall_names_who_is_behind(self):
        stall = self.coordinator.stall()
        behind = {rank for rank, given in enumerate(self.given) if given == self.coordinator.summed}
        ranks = set(range(len(self.given)))
        if behind and behind != ranks:
            assert (set(stall.late), set(stall.waiting)) == (behind, ranks - behind)
            assert stall.what == "bucket {1} of step {0}".format(
                *divmod(self.coordinator.summed, self.coordinator.num_buckets)
            )
        elif self.parts:
            assert (set(stall.late), set(stall.waiting)) == (ranks - set(self.parts), set(self.parts))
        else:
            assert stall == Stall((), (), "nothing")


TestArrivals = Intake.TestCase
TestArrivals.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.permutations([rank for rank in range(3) for _ in range(4)]))
def test_any_arrival_gives_all_sums_in_order(arrival):
    coordinator, sums = opened(3, 4), []
    for rank in arrival:
        coordinator.contribute(rank, coordinator.expects(rank))
        while (position := coordinator.ready()) is not None:
            sums.append(position)
            assert coordinator.mark_summed() is (position == 3)
    assert sums == [0, 1, 2, 3]


def test_nothing_is_ready_before_all_have_joined():
    coordinator = Coordinator(2, 1)
    coordinator.join(0, 0)
    coordinator.contribute(0, 0)
    assert coordinator.ready() is None
    assert coordinator.missing == (1,)
    assert coordinator.stall() == Stall((1,), (0,), "joining")


def test_contribution_of_a_rank_that_has_not_joined():
    with pytest.raises(ProtocolError, match="rank 1 sent a bucket out of turn: got 0"):
        Coordinator(2, 1).contribute(1, 0)


def test_positions_count_on_over_steps():
    coordinator = opened(2, 3, step=5)
    assert coordinator.expects(1) == 15
    assert coordinator.bucket_of(16) == (5, 1)
    assert coordinator.bucket_of(18) == (6, 0)


def test_another_step_is_refused():
    coordinator = Coordinator(2, 3, step=5)
    coordinator.join(0, 5)
    with pytest.raises(HandshakeRefused, match="rank 1 is at another step: got 4, expected 5; restart all"):
        coordinator.join(1, 4)
    assert coordinator.missing == (1,)


@pytest.mark.parametrize(
    ("summed", "torn", "lacks"), [(0, False, range(30, 32)), (1, True, range(31, 32)), (2, False, range(0))]
)
def test_a_worker_that_is_back_lacks_what_it_has_not(summed, torn, lacks):
    coordinator = opened(2, 3, step=10, summed=2)
    assert list(coordinator.missing_sums(1, Progress(10, summed, torn, contributed=4))) == list(lacks)


@pytest.mark.parametrize(("summed", "torn", "got"), [(2, True, 3), (3, False, 3), (3, True, 4)])
def test_sums_that_only_a_worker_has_are_lost(summed, torn, got):
    coordinator = opened(2, 4, step=10, summed=2)
    with pytest.raises(HandshakeRefused, match=rf"rank 1 has sums of step 10 .* got {got} .* at most 2; .*discard\(\)"):
        coordinator.missing_sums(1, Progress(10, summed, torn, contributed=4))


def test_who_does_not_take_its_sums_is_late_where_no_bucket_is():
    coordinator = opened(3, 2)
    assert coordinator.stall([1]) == Stall((1,), (0, 2), "taking the sums")
    coordinator.gather(2, b"")
    assert coordinator.stall([1]) == Stall((1,), (0, 2), "taking the sums")
    coordinator.contribute(1, 0)
    assert coordinator.stall([1]) == Stall((0, 2), (1,), "bucket 0 of step 0")


def test_nobody_is_late_while_a_bucket_waits_for_its_sum():
    coordinator = opened(2, 2)
    coordinator.contribute(0, 0)
    coordinator.contribute(1, 0)
    assert coordinator.ready() == 0
    assert coordinator.stall() == Stall((), (), "nothing")
