"""A group of workers in one process: the state machine, one lock, and the sum in rank order.

Members differ only in where their gradients lie: a thread's arena (local.py) or buffers filled from a socket
(server.py). Whoever completes a bucket sums it, so arrival decides who does the work and never what comes out.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from gradengine.errors import DeadlineExceeded, ExchangeError, HandshakeRefused, PeerLost
from gradengine.exchange.coordinator import Coordinator
from gradengine.exchange.handshake import differing_rows
from gradengine.exchange.interface import (
    GROUP_BYTES,
    Arena,
    Bucket,
    Membership,
    NonFiniteValue,
    Progress,
    again_if_interrupted,
    buckets_of,
    checked_bucket,
    checked_rank,
    checked_seconds,
    count_in,
    find_non_finite,
)
from gradengine.layout import GradientLayout
from gradengine.threads import Condition

__all__ = ["Group", "Member"]

_MAX_BAD = 64  # non-finite values told of a step


class Member(ABC):
    """One rank as the group sees it."""

    def __init__(self, rank: int, progress: Progress) -> None:
        self.rank, self.progress = rank, progress

    @abstractmethod
    def contribution(self, bucket: Bucket) -> Arena:
        """The rank's gradient of the bucket to be summed next."""

    @abstractmethod
    def deliver(self, step: int, bucket: Bucket, total: Arena) -> None:
        """The sum is there; `total` stays unchanged until the step is over. Called without the lock, in order."""

    @abstractmethod
    def end_step(self, step: int, bad: Sequence[NonFiniteValue]) -> None:
        """All sums of a step have been delivered."""

    @abstractmethod
    def deliver_gathered(self, parts: list[bytes]) -> None:
        """A gather is complete."""

    @abstractmethod
    def welcome(self, summed: int) -> None:
        """All ranks have joined, as `progress.membership` says; `summed` leading buckets have their sum already."""

    @abstractmethod
    def dismiss(self, failure: ExchangeError) -> None:
        """The group has failed."""

    @property
    @abstractmethod
    def has_all(self) -> bool:
        """Whether what was delivered no longer needs the memory it was delivered from."""


@final
class Group:
    """What the members of a group share.

    Args:
        world_size: Workers in the group.
        timeout: Progress deadline in seconds.
        join_timeout: How long the group waits for all to join, in seconds.
        bucket_bytes: Bytes summed at a time.

    Raises:
        CallerError: The world size is not in 1..65536, or a time or size is not above zero.
    """

    def __init__(self, world_size: int, timeout: float, join_timeout: float, bucket_bytes: int) -> None:
        self.world_size = checked_rank(0, world_size)[1]
        self.timeout = checked_seconds("timeout", timeout)
        self.join_timeout = checked_seconds("join_timeout", join_timeout)
        self.bucket_bytes = checked_bucket(bucket_bytes)
        self.changed = Condition()
        self.lock = self.changed.lock
        self.layout: GradientLayout | None = None
        self.buckets: list[Bucket] = []
        self.failure: ExchangeError | None = None
        self.members: dict[int, Member] = {}
        self._dismissed: set[int] = set()
        self.coordinator: Coordinator | None = None
        self._store: Arena | None = None
        self._summer: int | None = None  # the thread that is summing
        self._moved = time.monotonic()

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have joined."""
        return self.coordinator is not None and not self.coordinator.missing

    def admit(self, member: Member, layout: GradientLayout, arena: Arena | None = None) -> None:
        """A rank joins; the last one to come opens the group.

        Args:
            member: The rank.
            layout: Its layout, compared with the first one's.
            arena: Rank 0's own arena where it lives in this process: sums are taken there.

        Raises:
            HandshakeRefused: The layout, step or rank does not fit; the group fails with it unless the rank is taken.
        """
        with self.lock:
            self.refuse_failed()
            if member.rank in self.members:
                raise HandshakeRefused(f"rank {member.rank} has joined already", do="give each worker its own rank")
            try:
                self._admit(member, layout, arena)
                if self.is_complete:
                    self._open()
            except HandshakeRefused as refusal:
                self.fail(refusal)
                raise
            self.move()

    def contribute(self, rank: int, count: int) -> None:
        """A rank's next `count` buckets are complete; sums what can be summed."""
        with self.lock:
            for _ in range(count):
                self.opened().contribute(rank, self.opened().expects(rank))
            self.move()
        self._sum_what_is_ready()

    def gather(self, rank: int, data: bytes) -> None:
        """A rank's part of a gather; the last one delivers it to all."""
        with self.lock:
            parts = self.opened().gather(rank, data)
            if parts is not None:
                for member in self.members.values():
                    member.deliver_gathered(parts)
            self.move()

    def fail(self, failure: ExchangeError) -> None:
        """End the group; the first failure counts. Who was not told of it, as this was interrupted, is told again."""
        with self.lock:
            self.failure = self.failure or failure
            for rank, member in self.members.items():
                if rank not in self._dismissed:
                    member.dismiss(self.failure)
                    self._dismissed.add(rank)
            self.changed.notify_all()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait, without the lock, until `done`; raises the group's failure, or that somebody is late."""
        left = 0.0
        while not self.changed.wait_for(lambda: done() or self.failure is not None, left):
            left = self.fail_if_late(somebody_waits=True)
        with self.lock:
            if not done():
                self.refuse_failed()

    def settle(self) -> None:
        """Wait until no other thread is summing: from then on a group that failed touches no arena.

        Raises:
            DeadlineExceeded: It does not come to its end.
        """
        me = threading.get_ident()
        if not self.changed.wait_for(lambda: self._summer in {None, me}, self.timeout):
            raise DeadlineExceeded(
                "another thread is in the middle of a sum", got=f"no end in {self.timeout:g} s", do="start anew"
            )

    def fail_if_late(self, *, somebody_waits: bool = False) -> float:
        """Fail if somebody waits and nothing has moved for too long; else say for how many seconds that is not so.

        Args:
            somebody_waits: Whether the caller is one who does, whatever the others are at.
        """
        with self.lock:
            patience = self.timeout if self.is_complete else self.join_timeout
            left = self._moved + patience - time.monotonic()
            if left > 0:
                return left
            receiving = [rank for rank, member in self.members.items() if not member.has_all]
            stall = self.coordinator.stall(receiving) if self.coordinator else None
            if stall is not None and stall.waiting:
                late = f"{_are(stall.late)} late for {stall.what}, {_are(stall.waiting)} waiting"
            elif somebody_waits:
                late = "a rank waits and none is late: its sum has been given up, or it began no step"
            else:
                return patience
            if self.is_complete:
                self.fail(DeadlineExceeded(late, got=f"nothing for {patience:g} s", do="see what the late ranks do"))
            else:
                self.fail(
                    PeerLost(late, got=f"nobody new in {patience:g} s", do="start all ranks; check their address")
                )
            return 0.0

    def move(self) -> None:
        """Something happened, with the lock held: deadlines begin anew."""
        self._moved = time.monotonic()
        self.changed.notify_all()

    def opened(self) -> Coordinator:
        """The state machine; there is one as soon as a rank has joined."""
        if self.coordinator is None:
            raise ExchangeError("the exchange is not bound to a layout", do="call bind() first; GradientEngine does")
        return self.coordinator

    def refuse_failed(self) -> None:
        """Raise the group's failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def _admit(self, member: Member, layout: GradientLayout, arena: Arena | None) -> None:
        if self.layout is None:
            self.layout, self.buckets = layout, buckets_of(layout, self.bucket_bytes)
        elif self.layout != layout:
            rows = differing_rows(layout.table(), self.layout.table())
            others = _ranks(sorted(self.members)) if self.members else "the coordinator"
            raise HandshakeRefused(
                f"layouts differ between rank {member.rank} (here) and {others} (there):\n{rows}",
                do="build the layout from the same model on every rank",
            )
        if self.coordinator is None:
            self.coordinator = Coordinator(self.world_size, len(self.buckets), member.progress.step)
        self.coordinator.join(member.rank, member.progress.step)
        count_in(self.bucket_bytes, member.progress, member.rank)
        self.members[member.rank] = member
        if arena is not None:
            self._store = arena

    def _open(self) -> None:
        """All are here: sums that somebody lacks are sent again, then the step goes on where it stood."""
        coordinator = self.opened()
        progresses = {rank: member.progress for rank, member in self.members.items()}
        group = coordinator.group_of(progresses) or secrets.token_bytes(GROUP_BYTES)
        # Sums live in rank 0's arena; a group with memory of its own begins without any.
        summed = 0 if self._store is None else self.members[0].progress.summed
        coordinator.open(summed)
        lacking = {rank: coordinator.lacks(rank, progress) for rank, progress in progresses.items()}
        if self._store is None and self.layout is not None:
            self._store = np.empty(self.layout.arena_size, np.float32)
        for rank, member in self.members.items():
            member.progress.membership = Membership(group, rank, self.world_size)
            member.welcome(summed)
            for position in lacking[rank]:
                step, index = coordinator.bucket_of(position)
                member.deliver(step, self.buckets[index], self._total(self.buckets[index]))
            if summed and summed == len(self.buckets):
                member.end_step(coordinator.step, self.members[0].progress.bad)

    def _total(self, bucket: Bucket) -> Arena:
        assert self._store is not None  # noqa: S101  (set when the group opens)
        return self._store[bucket.start : bucket.stop]

    def _sum_what_is_ready(self) -> None:
        try:
            while (position := self._claim()) is not None:
                step, index = self.opened().bucket_of(position)
                self._sum(step, self.buckets[index])
                self._release(step)
        except BaseException as fault:
            self._break_off(fault)
            raise

    def _claim(self) -> int | None:
        """The next bucket to sum; None where there is none for this thread."""
        with self.lock:
            position = self.opened().ready()
            if position is None or self._summer is not None or self.failure is not None:
                return None
            self._summer = threading.get_ident()
            return position

    def _release(self, step: int) -> None:
        with self.lock:
            if self.opened().mark_summed():
                bad = tuple(self.members[0].progress.bad[:_MAX_BAD])
                for member in self.members.values():
                    member.end_step(step, bad)
            self._summer = None
            self.move()

    @again_if_interrupted
    def _break_off(self, fault: BaseException) -> None:
        with self.lock:
            step, index = self.opened().bucket_of(self.opened().summed)
            if self._summer == threading.get_ident():
                self._summer = None
            where = f"the sum of bucket {index} of step {step}"
            self.fail(PeerLost(f"{where} broke off ({fault!r})", do="windows are kept: reconnect or discard()"))

    def _sum(self, step: int, bucket: Bucket) -> None:
        total = self._total(bucket)
        members = [self.members[rank] for rank in range(self.world_size)]
        parts = [member.contribution(bucket) for member in members]
        first = members[0].progress
        first.partially_written = True  # it may be summed in place; rank 0 clears this before anybody else can fail
        first.bad += _sum_in_rank_order(parts, total, bucket.start)
        for member in members:
            member.deliver(step, bucket, total)


def _sum_in_rank_order(parts: Sequence[Arena], total: Arena, start: int) -> list[NonFiniteValue]:
    """Total = parts[0] + parts[1] + ..., in place where rank 0's part is the total already."""
    bad = [value for rank, part in enumerate(parts) for value in find_non_finite(rank, part, start)]
    if parts[0].ctypes.data != total.ctypes.data:
        np.copyto(total, parts[0])
    with np.errstate(all="ignore"):  # NaN and Inf are reported by rank and index
        for part in parts[1:]:
            np.add(total, part, out=total)
    return bad


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _are(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"
