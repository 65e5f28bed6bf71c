"""A process group's shared state in the coordinator's process: the state machine, one lock, the sum in rank order.

Members differ in where their gradients are: a thread's arena (local.py) or receive buffers of a socket (server.py). The
thread that completes a bucket sums it: the order of arrival decides which thread works, and never the result.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from gradengine.arguments import checked_rank, whole_number
from gradengine.errors import DeadlineExceeded, ExchangeError, HandshakeRefused, PeerLost
from gradengine.exchange.coordinator import Coordinator
from gradengine.exchange.handshake import differing_rows
from gradengine.exchange.interface import (
    GROUP_BYTES,
    Bucket,
    Float32,
    Membership,
    NonFiniteValue,
    Progress,
    buckets_of,
    checked_seconds,
    find_non_finite,
    not_bound,
    set_bucket_bytes,
)
from gradengine.layout import GradientLayout

_MAX_BAD = 64  # non-finite values reported of a step


class Member(ABC):
    """A rank of the group."""

    def __init__(self, rank: int, progress: Progress) -> None:
        self.rank, self.progress = rank, progress

    @abstractmethod
    def contribution(self, bucket: Bucket) -> Float32:
        """The rank's gradients of the bucket that is summed next."""

    @abstractmethod
    def deliver(self, step: int, bucket: Bucket, total: Float32) -> None:
        """Take a bucket's sum, in `total` until the step is over. Called in order, without the lock."""

    @abstractmethod
    def end_step(self, step: int, bad: Sequence[NonFiniteValue]) -> None:
        """All sums of the step have been delivered."""

    @abstractmethod
    def deliver_gathered(self, parts: list[bytes]) -> None:
        """Take the result of an all-gather."""

    @abstractmethod
    def welcome(self, summed: int) -> None:
        """All ranks have joined, and `progress.membership` is set; `summed` leading buckets are summed already."""

    @abstractmethod
    def dismiss(self, failure: ExchangeError) -> None:
        """The group has failed."""

    @property
    @abstractmethod
    def has_all(self) -> bool:
        """Whether all delivered sums have been copied or sent."""


@final
class Group:
    """The members of a group and their shared state. Arguments as for `gradengine.exchange.connect`."""

    def __init__(self, world_size: int, timeout: float, join_timeout: float, bucket_bytes: int) -> None:
        self.world_size = checked_rank(0, world_size)[1]
        self.timeout = checked_seconds("timeout", timeout)
        self.join_timeout = checked_seconds("join_timeout", join_timeout)
        self.bucket_bytes = whole_number("bucket_bytes", bucket_bytes, 4)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.layout: GradientLayout | None = None
        self.buckets: list[Bucket] = []
        self.failure: ExchangeError | None = None
        self.members: dict[int, Member] = {}
        self._dismissed: set[int] = set()
        self.coordinator: Coordinator | None = None
        self._store: Float32 | None = None
        self._summing_thread: int | None = None
        self._last_progress = time.monotonic()

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have joined."""
        return self.coordinator is not None and not self.coordinator.missing

    def admit(self, member: Member, layout: GradientLayout, arena: Float32 | None = None) -> None:
        """A rank joins; the last one opens the group. With rank 0's own arena, in this process, sums are made in it.

        Raises:
            HandshakeRefused: Another layout or step, upon which the group fails, or a rank that has joined already.
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
            self.note_progress()

    def contribute(self, rank: int, count: int) -> None:
        """A rank's next `count` buckets are complete; sums all that are ready."""
        with self.lock:
            for _ in range(count):
                self.opened().contribute(rank, self.opened().expects(rank))
            self.note_progress()
        self._sum_what_is_ready()

    def gather(self, rank: int, data: bytes) -> None:
        """A rank's part of an all-gather; the last one delivers the result to all."""
        with self.lock:
            parts = self.opened().gather(rank, data)
            if parts is not None:
                for member in self.members.values():
                    member.deliver_gathered(parts)
            self.note_progress()

    def fail(self, failure: ExchangeError) -> None:
        """End the group with its first failure; called again, it dismisses members that have not been told yet."""
        with self.lock:
            self.failure = self.failure or failure
            for rank, member in self.members.items():
                if rank not in self._dismissed:
                    member.dismiss(self.failure)
                    self._dismissed.add(rank)
            self.changed.notify_all()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait, without the lock, until `done()`; raises the group's failure, or a timeout."""
        left = 0.0
        with self.lock:
            while not self.changed.wait_for(lambda: done() or self.failure is not None, left):
                left = self.fail_if_late(caller_waits=True)
            if not done():
                self.refuse_failed()

    def settle(self) -> None:
        """Wait until no other thread is summing: after it a group that has failed writes to no arena."""
        me = threading.get_ident()
        with self.lock:
            has_settled = self.changed.wait_for(lambda: self._summing_thread in {None, me}, self.timeout)
        if not has_settled:
            raise DeadlineExceeded(
                "another thread is in the middle of a sum", got=f"no end in {self.timeout:g} s", do="start anew"
            )

    def fail_if_late(self, *, caller_waits: bool = False) -> float:
        """Fail the group if a rank, or the caller itself, has waited for the timeout; returns the seconds left."""
        with self.lock:
            limit = self.timeout if self.is_complete else self.join_timeout
            left = self._last_progress + limit - time.monotonic()
            if left > 0:
                return left
            receiving = [rank for rank, member in self.members.items() if not member.has_all]
            stall = self.coordinator.stall(receiving) if self.coordinator else None
            if stall is not None and stall.waiting:
                late = f"{_are(stall.late)} late for {stall.what}, {_are(stall.waiting)} waiting"
            elif caller_waits:
                late = "a rank waits and none is late: its sum has been given up, or it began no step"
            else:
                return limit
            if self.is_complete:
                self.fail(DeadlineExceeded(late, got=f"nothing for {limit:g} s", do="see what the late ranks do"))
            else:
                self.fail(PeerLost(late, got=f"nobody new in {limit:g} s", do="start all ranks; check their address"))
            return 0.0

    def note_progress(self) -> None:
        """Record progress, which restarts the timeout. Called with the lock held."""
        self._last_progress = time.monotonic()
        self.changed.notify_all()

    def opened(self) -> Coordinator:
        """The state machine, which exists once a rank has joined."""
        if self.coordinator is None:
            raise not_bound("the exchange")
        return self.coordinator

    def refuse_failed(self) -> None:
        """Raise the group's failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def _admit(self, member: Member, layout: GradientLayout, arena: Float32 | None) -> None:
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
        set_bucket_bytes(self.bucket_bytes, member.progress, member.rank)
        self.members[member.rank] = member
        if arena is not None:
            self._store = arena

    def _open(self) -> None:
        """All have joined: missing sums are sent again, then the step is resumed."""
        coordinator = self.opened()
        progresses = {rank: member.progress for rank, member in self.members.items()}
        group = coordinator.group_of(progresses) or secrets.token_bytes(GROUP_BYTES)
        # Sums are in rank 0's arena; a group with its own memory starts without any.
        summed = 0 if self._store is None else self.members[0].progress.summed
        coordinator.open(summed)
        lacking = {rank: coordinator.missing_sums(rank, progress) for rank, progress in progresses.items()}
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

    def _total(self, bucket: Bucket) -> Float32:
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
        """The next bucket to sum, claimed for this thread; None if there is none."""
        with self.lock:
            position = self.opened().ready()
            # One thread at a time, since members must get buckets in order; it continues with those that follow.
            if position is None or self._summing_thread is not None or self.failure is not None:
                return None
            self._summing_thread = threading.get_ident()
            return position

    def _release(self, step: int) -> None:
        with self.lock:
            if self.opened().mark_summed():
                bad = tuple(self.members[0].progress.bad[:_MAX_BAD])
                for member in self.members.values():
                    member.end_step(step, bad)
            self._summing_thread = None
            self.note_progress()

    def _break_off(self, fault: BaseException) -> None:
        with self.lock:
            step, index = self.opened().bucket_of(self.opened().summed)
            if self._summing_thread == threading.get_ident():
                self._summing_thread = None
            where = f"the sum of bucket {index} of step {step}"
            self.fail(PeerLost(f"{where} broke off ({fault!r})", do="windows are kept: reconnect or discard()"))

    def _sum(self, step: int, bucket: Bucket) -> None:
        total = self._total(bucket)
        members = [self.members[rank] for rank in range(self.world_size)]
        parts = [member.contribution(bucket) for member in members]
        first = members[0].progress
        first.partially_written = True  # the sum may be in place; rank 0 clears this before another rank can fail
        first.bad += _sum_in_rank_order(parts, total, bucket.start)
        for member in members:
            member.deliver(step, bucket, total)


def _sum_in_rank_order(parts: Sequence[Float32], total: Float32, start: int) -> list[NonFiniteValue]:
    """Total = parts[0] + parts[1] + ..., in place if `total` is rank 0's part."""
    bad = [value for rank, part in enumerate(parts) for value in find_non_finite(rank, part, start)]
    if parts[0].ctypes.data != total.ctypes.data:
        np.copyto(total, parts[0])
    with np.errstate(all="ignore"):  # NaN and Inf are reported by rank and index
        for part in parts[1:]:  # not in order of arrival: fp32 addition is not associative
            np.add(total, part, out=total)
    return bad


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _are(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"
