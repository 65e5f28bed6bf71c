"""The exchange of a rank that is in its coordinator's process; no copy but that of the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from gradengine.errors import CallerError, ExchangeError, PeerLost
from gradengine.exchange.group import Group, Member
from gradengine.exchange.interface import (
    Bucket,
    Exchange,
    Float32,
    NonFiniteValue,
    OnReduced,
    Outbox,
    Progress,
    not_bound,
    nothing_started,
    refuse_bad_arena,
    refuse_long_part,
)
from gradengine.layout import GradientLayout, Span


@final
class LocalExchange(Exchange):
    """A rank in the coordinator's own process; `on_close` is called after `close`, `url` is for other processes."""

    def __init__(
        self, group: Group, rank: int, on_close: Callable[[], None] | None = None, url: str | None = None
    ) -> None:
        self._group, self.rank, self.world_size = group, rank, group.world_size
        self._member: _LocalMember | None = None
        self._outbox: Outbox | None = None
        self._on_close, self.url = on_close, url

    def bind(self, layout: GradientLayout, arena: Float32, progress: Progress, on_reduced: OnReduced) -> None:
        refuse_bad_arena(layout, arena)
        if self._member is not None:
            raise CallerError(f"rank {self.rank} is bound already", do="make a new group for another engine")
        member = _LocalMember(self.rank, arena, progress, on_reduced)
        group = self._group
        with group.lock:
            group.admit(member, layout, arena if self.rank == 0 else None)
            self._member = member
        self._wait_until(lambda: member.is_welcome)

    def start(self, span: Span) -> None:
        """See `Exchange.start`; the last rank to start a bucket sums it, before this returns."""
        member = self._bound()
        if self._outbox is None:
            self._outbox = Outbox(self._group.buckets, member.progress.summed)
        leaving = self._outbox.start(span)
        member.progress.contributed = max(member.progress.contributed, leaving.stop)
        self._group.contribute(self.rank, len(leaving))

    def wait(self) -> tuple[NonFiniteValue, ...]:
        member, group = self._bound(), self._group
        if self._outbox is None and group.buckets and not member.has_ended and group.failure is None:
            raise nothing_started(self.rank)
        self._wait_until(
            lambda: not group.buckets or (member.has_ended and all(m.has_all for m in group.members.values()))
        )
        member.has_ended, self._outbox = False, None
        return tuple(member.progress.bad)

    def gather(self, data: bytes) -> list[bytes]:
        member = self._bound()
        refuse_long_part(data)
        with self._group.lock:
            self._group.refuse_failed()
            self._group.gather(self.rank, data)
        self._wait_until(lambda: bool(member.gathers))
        return member.gathers.pop(0)

    def close(self) -> None:
        self._group.fail(PeerLost(f"rank {self.rank} left the group", do="windows are kept: reconnect or discard()"))
        try:
            self._group.settle()
        finally:
            if self._on_close is not None:
                self._on_close()

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait, without the lock; if the group fails, until no thread writes to this rank's arena."""
        try:
            self._group.wait_until(done)
        except ExchangeError:
            self._group.settle()
            raise

    def _bound(self) -> _LocalMember:
        if self._member is None:
            raise not_bound(f"rank {self.rank}'s exchange")
        return self._member


@final
class _LocalMember(Member):
    """A rank whose arena is in this process; rank 0's arena is summed in place."""

    def __init__(self, rank: int, arena: Float32, progress: Progress, on_reduced: OnReduced) -> None:
        super().__init__(rank, progress)
        self._arena, self._on_reduced = arena, on_reduced
        self.gathers: list[list[bytes]] = []
        self.is_welcome = self.has_ended = False

    def contribution(self, bucket: Bucket) -> Float32:
        return self._arena[bucket.start : bucket.stop]

    def deliver(self, step: int, bucket: Bucket, total: Float32) -> None:
        mine = self.contribution(bucket)
        if mine.ctypes.data != total.ctypes.data:
            np.copyto(mine, total)
        self.progress.summed += 1
        self.progress.partially_written = False
        self._on_reduced(bucket.span, bucket.stop)

    def end_step(self, step: int, bad: Sequence[NonFiniteValue]) -> None:
        self.progress.bad = list(bad)
        self.has_ended = True

    def deliver_gathered(self, parts: list[bytes]) -> None:
        self.gathers.append(parts)

    def welcome(self, summed: int) -> None:
        self.is_welcome = True

    def dismiss(self, failure: ExchangeError) -> None:
        """Its thread gets the failure in `wait`."""

    @property
    def has_all(self) -> bool:
        return True
