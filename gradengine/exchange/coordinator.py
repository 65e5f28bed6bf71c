"""State machine of a group: contributions of each rank, the next bucket to sum, and the ranks that are late.

No I/O, clock or threads. Positions count buckets from the group's first step on: bucket b of step s is at
`s * num_buckets + b`, so that "in order" is one comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gradengine.errors import HandshakeRefused, ProtocolError
from gradengine.exchange.interface import Membership, Progress


@dataclass(frozen=True)
class Stall:
    """Ranks that are late and ranks that wait for them; none if `waiting` is empty."""

    late: tuple[int, ...]
    waiting: tuple[int, ...]
    what: str


class Coordinator:
    """The state of one group from the first join on; `summed` is the position of the next bucket to sum."""

    def __init__(self, world_size: int, num_buckets: int, step: int = 0) -> None:
        self.world_size, self.num_buckets, self.step = world_size, num_buckets, step
        self.summed = step * num_buckets
        self._contributed: dict[int, int] = {}
        self._gathering: dict[int, bytes] = {}
        self._gathers = 0

    def join(self, rank: int, step: int) -> None:
        """A worker joins; `HandshakeRefused` where it is at another step than the first that joined."""
        if step != self.step:
            raise HandshakeRefused(
                f"rank {rank} is at another step", got=step, expected=self.step, do="restart all from one checkpoint"
            )
        self._contributed[rank] = self.summed

    def open(self, summed: int) -> None:
        """All have joined; the coordinator still has the sums of the step's first `summed` buckets."""
        self.summed = self.step * self.num_buckets + summed
        self._contributed = dict.fromkeys(self._contributed, self.summed)

    def missing_sums(self, rank: int, progress: Progress) -> range:
        """Positions whose sum must be sent again to a worker that reconnected.

        `HandshakeRefused` where it has overwritten contributions whose sums the coordinator lost, or would contribute
        another window's gradients to buckets that are summed.
        """
        summed = self.summed - self.step * self.num_buckets
        if progress.contributed < summed:
            raise HandshakeRefused(
                f"rank {rank} has not contributed to what step {self.step} has summed",
                got=f"{progress.contributed} buckets",
                expected=f"at least {summed}",
                do="a new process, or one that dropped its window: discard() it on every rank, and accumulate it again",
            )
        has = self.step * self.num_buckets + progress.summed
        if has + progress.partially_written > self.summed:
            raise HandshakeRefused(
                f"rank {rank} has sums of step {self.step} that the coordinator lost",
                got=f"{progress.summed + progress.partially_written} buckets summed or half overwritten",
                expected=f"at most {self.summed - self.step * self.num_buckets}",
                do="the local contributions are gone: discard() the window on every rank and accumulate it again",
            )
        return range(has, self.summed)

    def group_of(self, progresses: Mapping[int, Progress]) -> bytes:
        """The identifier of the group in which a half-summed step must be resumed; empty if there is no such step.

        `HandshakeRefused` for a worker that contributed as another rank or in another group: its contribution would be
        missing from some sums, or counted twice.
        """
        by_rank = sorted(progresses.items())
        half_summed = [progress.membership for _, progress in by_rank if progress.is_half_summed]
        if not half_summed:
            return b""
        group = half_summed[0].group
        for rank, progress in by_rank:
            as_it_was = Membership(group, rank, self.world_size)
            if progress.contributed and progress.membership != as_it_was:
                raise HandshakeRefused(
                    f"step {self.step} is half summed and rank {rank} took part in it as another",
                    got=as_it_was,
                    expected=progress.membership,
                    do="reconnect all ranks as they were, or discard() the window on every rank",
                )
        return group

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not joined."""
        return tuple(rank for rank in range(self.world_size) if rank not in self._contributed)

    def contribute(self, rank: int, position: int) -> None:
        """A worker's contribution to a bucket has arrived; `ProtocolError` unless it is its next one."""
        expected = self._contributed.get(rank)
        if position != expected:
            raise ProtocolError(f"rank {rank} sent a bucket out of turn", got=position, expected=expected)
        self._contributed[rank] = position + 1

    def expects(self, rank: int) -> int:
        """The position of the worker's next bucket."""
        return self._contributed[rank]

    def ready(self) -> int | None:
        """The next position to sum; None before every rank has contributed to it."""
        if self.missing or min(self._contributed.values()) <= self.summed:
            return None
        return self.summed

    def mark_summed(self) -> bool:
        """Advance past the `ready` bucket; True if it was the last of its step."""
        self.summed += 1
        return self.summed % self.num_buckets == 0

    def gather(self, rank: int, data: bytes) -> list[bytes] | None:
        """A worker's part of an all-gather; all parts in rank order if it was the last, else None."""
        if rank in self._gathering:
            raise ProtocolError(f"rank {rank} gathered twice", got=f"a second part of gather {self._gathers}")
        self._gathering[rank] = data
        if len(self._gathering) < self.world_size:
            return None
        parts = [self._gathering[r] for r in range(self.world_size)]
        self._gathering = {}
        self._gathers += 1
        return parts

    def bucket_of(self, position: int) -> tuple[int, int]:
        """Step and bucket of a position."""
        return divmod(position, self.num_buckets)

    def stall(self, receiving: Collection[int] = ()) -> Stall:
        """The ranks that are late, and those that wait for them; `receiving` have not got all sums sent to them."""
        ranks = set(range(self.world_size))
        if self.missing:
            return Stall(self.missing, tuple(sorted(ranks - set(self.missing))), "joining")
        late = {rank for rank, position in self._contributed.items() if position == self.summed}
        if late and late != ranks:
            step, bucket = self.bucket_of(self.summed)
            return Stall(tuple(sorted(late)), tuple(sorted(ranks - late)), f"bucket {bucket} of step {step}")
        if receiving:
            return Stall(tuple(sorted(receiving)), tuple(sorted(ranks - set(receiving))), "taking the sums")
        if self._gathering:
            gave = set(self._gathering)
            return Stall(tuple(sorted(ranks - gave)), tuple(sorted(gave)), "a gather (end of step or barrier)")
        return Stall((), (), "nothing")
