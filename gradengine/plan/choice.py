"""Which transport to take, in one sentence; and where a step waits long for it, what would shorten the wait."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gradengine.plan.overlap import Overlap
from gradengine.plan.quantities import duration, rate, two_digits
from gradengine.tensor_parallel_cost import Bandwidth

__all__ = ["TRANSPORTS", "Choice", "Step", "choose"]

# What this package makes of each algorithm; a ring in rank order does not exist: its order of sums is not the star's.
TRANSPORTS: Mapping[str, str | None] = {"star": "tcp://", "ring": None, "ordered": "mpi://", "nccl": "nccl://"}
_PLANNED = ("ordered", "nccl")  # in the order of preference: the first keeps the bits of the star
_ENOUGH = 0.05  # of a step: what a wait may take before something faster is worth its trouble
_LONG = 0.2  # of a step: what a wait may take before it is to be said how it is shortened


@dataclass(frozen=True)
class Step:
    """What a step is, its exchange aside.

    Attributes:
        workers: Ranks that exchange gradients.
        micro_batches: Of a worker.
        micro_batch_seconds: Forward and backward of one.
    """

    workers: int
    micro_batches: int
    micro_batch_seconds: float

    @property
    def seconds(self) -> float:
        """Of all its micro-batches.

        >>> Step(2, micro_batches=3, micro_batch_seconds=0.5).seconds
        1.5
        """
        return self.micro_batches * self.micro_batch_seconds

    def enough_micro_batches(self, waits: float) -> int:
        """As many as make a wait a fifth of the step; only the last one's backward hides any of it.

        >>> Step(2, micro_batches=1, micro_batch_seconds=0.5).enough_micro_batches(waits=1.0)
        8
        """
        return math.ceil(waits * (1 - _LONG) / _LONG / self.micro_batch_seconds * (1 - 1e-12))


@dataclass(frozen=True)
class Choice:
    """What to take.

    Attributes:
        transport: "none" for one worker, "unix://" on one machine, else "tcp://", the only one across machines that
            this version has.
        reason: One sentence.
        waits_of_step: What a step waits for it, as a share of the step.
        remedies: What shortens a wait of more than a fifth of the step, each a sentence; those first that exist.
        needed: The planned transport that would shorten the step by more than 5 %, if there is one.
        saves_seconds: What it would save in each step.
        of_step: That, as a share of the step over tcp://.
    """

    transport: str
    reason: str
    waits_of_step: float = 0.0
    remedies: tuple[str, ...] = ()
    needed: str | None = None
    saves_seconds: float = 0.0
    of_step: float = 0.0


def choose(
    step: Step, exchanges: Mapping[str, Overlap], *, faster_link: tuple[Bandwidth, Overlap] | None = None
) -> Choice:
    """Say what a step waits, and what would shorten that.

    Args:
        step: What is computed between two exchanges.
        exchanges: Algorithm, or transport on one machine -> its overlap.
        faster_link: A link that is as fast as the sockets, and the star over it, where the step's own is slower.

    Example:
        >>> overlaps = dict.fromkeys(("star", "ring", "ordered", "nccl"), Overlap(1.0, 0.01))
        >>> choose(Step(2, micro_batches=1, micro_batch_seconds=1.0), overlaps).reason
        'a step waits 10.0 ms for it, 1.0 % of its time.'
    """
    if step.workers == 1:
        return Choice("none", "one worker has nobody to exchange with: build the engine without exchange=.")
    if "star" not in exchanges:
        waits = exchanges["unix://"].exposed_seconds
        remedies = tuple(_more_micro_batches(step, waits)) if _share(step, waits) > _LONG else ()
        return Choice("unix://", _waits(step, waits), _share(step, waits), remedies)
    waits = exchanges["star"].exposed_seconds
    needed, saved = _needed(step, exchanges)
    remedies = tuple(_remedies(step, exchanges, faster_link)) if _share(step, waits) > _LONG else ()
    if needed is not None:
        remedies += (_planned(step, waits, needed, saved),)
    of_step = saved / (step.seconds + waits)
    return Choice("tcp://", _waits(step, waits), _share(step, waits), remedies, needed, saved, of_step)


def _share(step: Step, waits: float) -> float:
    return waits / (step.seconds + waits)


def _waits(step: Step, waits: float) -> str:
    return f"a step waits {duration(waits)} for it, {100 * _share(step, waits):.1f} % of its time."


def _needed(step: Step, exchanges: Mapping[str, Overlap]) -> tuple[str | None, float]:
    """The planned transport that is worth its trouble, and the seconds that it saves."""
    waits = exchanges["star"].exposed_seconds
    best = min(exchanges[name].exposed_seconds for name in _PLANNED)
    near = [name for name in _PLANNED if exchanges[name].exposed_seconds - best <= _ENOUGH * (step.seconds + best)]
    saved = waits - exchanges[near[0]].exposed_seconds
    return (TRANSPORTS[near[0]], saved) if saved > _ENOUGH * (step.seconds + waits) else (None, 0.0)


def _remedies(
    step: Step, exchanges: Mapping[str, Overlap], faster_link: tuple[Bandwidth, Overlap] | None
) -> Iterator[str]:
    """Those that exist."""
    waits = exchanges["star"].exposed_seconds
    yield from _more_micro_batches(step, waits)
    if faster_link is None:
        yield "No faster link: rank 0's sockets limit tcp:// and not the link."
    else:
        bandwidth, overlap = faster_link
        yield (
            f"A faster link: at {rate(bandwidth)}, as fast as rank 0's sockets, a step would wait"
            f" {duration(overlap.exposed_seconds)}."
        )
    ring = exchanges["ring"].exposed_seconds
    if waits - ring > _ENOUGH * (step.seconds + waits):
        yield (
            f"Another library's all-reduce for a model of this size, such as torch.distributed's NCCL: by a ring a step"
            f" would wait {duration(ring)}; its sums are in another order, and this package does not check them."
        )


def _more_micro_batches(step: Step, waits: float) -> Iterator[str]:
    enough = step.enough_micro_batches(waits)
    yield f"More micro-batches: {enough:,} a step, not {step.micro_batches:,}, make the wait a fifth of it."


def _planned(step: Step, waits: float, needed: str, saved: float) -> str:
    faster = (step.seconds + waits) / (step.seconds + waits - saved)
    return (
        f"Later: {needed} would save {duration(saved)} and make a step {two_digits(faster)} times as fast, if nothing"
        f" but the links limits it; it is planned and does not exist in this version."
    )
