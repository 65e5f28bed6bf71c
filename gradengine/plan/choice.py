"""Which transport to take, in one sentence; and where a step waits long for it, what would shorten the wait."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gradengine.plan.quantities import duration
from gradengine.plan.traffic import Overlap
from gradengine.tensor_parallel_cost import Bandwidth

__all__ = ["Choice", "Step", "choose"]

_ENOUGH = 0.05  # of a step: what something faster must save to be worth its trouble
_LONG = 0.2  # of a step: what a wait may take before it is to be said how it is shortened


@dataclass(frozen=True)
class Step:
    """A step of W workers: its micro-batches of so many seconds, forward and backward; its exchange aside."""

    workers: int
    micro_batches: int
    micro_batch_seconds: float

    def share(self, waits: float) -> float:
        """Of the step, if it waits so long for its exchange.

        >>> Step(2, micro_batches=3, micro_batch_seconds=0.5).share(0.5)
        0.25
        """
        return waits / (self.micro_batches * self.micro_batch_seconds + waits)

    def enough_micro_batches(self, waits: float) -> int:
        """As many as make a wait a fifth of the step; only the last one's backward hides any of it.

        >>> Step(2, micro_batches=1, micro_batch_seconds=0.5).enough_micro_batches(waits=1.0)
        8
        """
        return math.ceil(waits * (1 - _LONG) / _LONG / self.micro_batch_seconds * (1 - 1e-12))


@dataclass(frozen=True)
class Choice:
    """The transport to take.

    Attributes:
        transport: "none" for one worker, "unix://" on one machine, else "tcp://".
        reason: One sentence.
        waits_of_step: What a step waits for it, as a share of the step.
        remedies: What shortens a wait of more than a fifth of the step, each a sentence.
    """

    transport: str
    reason: str
    waits_of_step: float = 0.0
    remedies: tuple[str, ...] = ()


def choose(
    step: Step, exchanges: Mapping[str, Overlap], *, faster_link: tuple[Bandwidth, Overlap] | None = None
) -> Choice:
    """Say what a step waits, and what would shorten that.

    Args:
        step: What is computed between two exchanges.
        exchanges: Algorithm, or transport on one machine -> its overlap.
        faster_link: A link that is as fast as the sockets, and the star over it, where the step's own is slower.

    Example:
        >>> choose(Step(2, 1, micro_batch_seconds=0.99), {"unix://": Overlap(1.0, 0.01)}).reason
        'a step waits 10.0 ms for it, 1.0% of its time.'
    """
    if step.workers == 1:
        return Choice("none", "one worker has nobody to exchange with: build the engine without exchange=.")
    transport, taken = ("tcp://", "star") if "star" in exchanges else ("unix://", "unix://")
    waits = exchanges[taken].exposed_seconds
    share = step.share(waits)
    remedies = tuple(_remedies(step, exchanges, waits, faster_link)) if share > _LONG else ()
    return Choice(transport, f"a step waits {duration(waits)} for it, {share:.1%} of its time.", share, remedies)


def _remedies(
    step: Step, exchanges: Mapping[str, Overlap], waits: float, faster_link: tuple[Bandwidth, Overlap] | None
) -> Iterator[str]:
    enough = step.enough_micro_batches(waits)
    yield f"More micro-batches: {enough:,} a step, not {step.micro_batches:,}, make the wait a fifth of it."
    if faster_link is not None:
        bandwidth, overlap = faster_link
        yield f"A faster link: at {bandwidth} a step would wait {duration(overlap.exposed_seconds)}; more is no faster."
    ring = exchanges["ring"].exposed_seconds if "ring" in exchanges else waits
    if step.share(waits) * (waits - ring) > _ENOUGH * waits:
        yield f"Another library's ring, such as NCCL's, would wait {duration(ring)}; its sums are in another order."
