"""Which transport to take, in one sentence; and where a step waits long for it, what would shorten the wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gradengine.plan.quantities import duration
from gradengine.plan.traffic import Overlap
from gradengine.tensor_parallel_cost import Bandwidth

__all__ = ["ALONE", "Choice", "choose", "enough_micro_batches"]

_ENOUGH = 0.05  # of a step: what something faster must save to be worth its trouble
_LONG = 0.2  # of a step: what a wait may take before it is to be said how it is shortened


@dataclass(frozen=True)
class Choice:
    """The transport to take."""

    transport: str  # "none" for one worker, "unix://" on one machine, else "tcp://"
    reason: str  # one sentence
    waits_of_step: float = 0.0  # what a step waits for it, as a share of the step
    remedies: tuple[str, ...] = ()  # what shortens a wait of more than a fifth of the step, each a sentence


ALONE = Choice("none", "one worker has nobody to exchange with: build the engine without exchange=.")


def enough_micro_batches(micro_batch_seconds: float, waits: float) -> int:
    """As many as make a wait a fifth of the step; only the last one's backward hides any of it.

    >>> enough_micro_batches(0.5, waits=1.0)
    8
    """
    return math.ceil(waits * (1 - _LONG) / _LONG / micro_batch_seconds * (1 - 1e-12))


def choose(
    micro_batches: int,
    micro_batch_seconds: float,
    exchanges: Mapping[str, Overlap],
    *,
    faster_link: tuple[Bandwidth, Overlap] | None = None,
) -> Choice:
    """Say what a step of several workers waits, and what would shorten that.

    Args:
        micro_batches: Of a worker, between two exchanges.
        micro_batch_seconds: Forward and backward of one.
        exchanges: Algorithm, or transport on one machine -> its overlap.
        faster_link: A link that is as fast as the sockets, and the star over it, where the step's own is slower.

    Example:
        >>> choose(1, 0.99, {"unix://": Overlap(1.0, 0.01)}).reason
        'a step waits 10.0 ms for it, 1.0% of its time.'
    """
    transport, taken = ("tcp://", "star") if "star" in exchanges else ("unix://", "unix://")
    waits = exchanges[taken].exposed_seconds
    step = micro_batches * micro_batch_seconds + waits
    reason = f"a step waits {duration(waits)} for it, {waits / step:.1%} of its time."
    if waits <= _LONG * step:
        return Choice(transport, reason, waits / step)
    enough = enough_micro_batches(micro_batch_seconds, waits)
    remedies = [f"More micro-batches: {enough:,} a step, not {micro_batches:,}, make the wait a fifth of it."]
    if faster_link is not None:
        link, faster = faster_link[0], duration(faster_link[1].exposed_seconds)
        remedies.append(f"A faster link: at {link} a step would wait {faster}; more is no faster.")
    ring = exchanges.get("ring", exchanges[taken]).exposed_seconds
    if waits - ring > _ENOUGH * step:
        faster = duration(ring)
        remedies.append(f"Another library's ring, such as NCCL's, would wait {faster}; its sums are in another order.")
    return Choice(transport, reason, waits / step, tuple(remedies))
