"""The claims of the demo, each with the figure that shows it.

The ranks end with the same weights, the model has learned, and the weights are those of one process.

Ranks add up their own micro-batches first, (a + c) + (b + d). One process adds ((a + b) + c) + d. In fp32 both are
right to the last place, and training amplifies last places. So the workers must meet two conditions. They must be as
near to one process as rounding allows. They must be equal, byte for byte, to one process that adds in their order. With
one micro-batch for each worker both orders are the same.

Shards of a model add up their own heads and columns first, so they never equal one process bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradengine.demo.model import Weights
from gradengine.demo.run import Record
from gradengine.demo.settings import counted
from gradengine.demo.worker import Finished
from gradengine.engine.trainer import weights_digest

LIMIT = 1e-2
"""Largest `distance` of the workers from one process. In 20 steps the order of additions makes 1e-7 to 1e-3, most at a
high rate. A micro-batch lost in the last step makes 2e-2. After many more steps the order alone makes as much."""


@dataclass(frozen=True)
class Proof:
    """A claim, the measured value, the required value, and whether the claim holds."""

    name: str
    claim: str
    measured: str
    required: str
    holds: bool


def prove(record: Record, replays: Mapping[str, Weights], initial: Weights, entropy: float) -> list[Proof]:
    """Check the claims of a run. `replays` is the result of `replay_all`, `entropy` that of the held-out bytes."""
    return [_same_on_all_ranks(record), _learned(record, entropy), *_same_as_one_process(record, replays, initial)]


def _same_on_all_ranks(record: Record) -> Proof:
    settings = record.settings
    claim = f"one set of weights on {counted(settings.workers, 'worker')} after {counted(len(record.steps), 'step')}"
    ends = [record.ends.get(rank, Finished(rank, "none", {})) for rank in range(settings.workers)]
    return _equal("1", claim, [end.digest for end in ends])


def _equal(name: str, claim: str, digests: Sequence[str]) -> Proof:
    shown = " and ".join(digest[:12] for digest in dict.fromkeys(digests))
    return Proof(name, claim, f"sha256 {shown}", "must be one", len(set(digests)) == 1)


def _learned(record: Record, entropy: float) -> Proof:
    loss, required = record.evaluations[record.settings.steps], f"must be below {entropy:.3f}, the bytes' entropy"
    if not loss < entropy:
        required += "; a short run has not learned: pass --steps 60 or more"
    claim = "unseen text is predicted better than by byte frequencies"
    return Proof("2", claim, f"loss {loss:.3f} nats/byte", required, loss < entropy)


def _same_as_one_process(record: Record, replays: Mapping[str, Weights], initial: Weights) -> list[Proof]:
    settings, kept = record.settings, record.ends[0].compared
    first = f"weights after {counted(settings.compared_steps, 'step')} are those of one process"
    one = f"{first} with {counted(settings.micro_batches_in_all, 'micro-batch')}"
    whole, in_their_order = ([weights_digest(kept), weights_digest(replays[name])] for name in ("one", "ranks"))
    if settings.tensor_parallel == 1 and (settings.workers == 1 or settings.micro_batches == 1):
        return [_equal("3", f"{one}, bit for bit", whole)]
    apart = distance(kept, replays["one"], initial)
    required = f"must be at most {LIMIT}: fp32 sums depend on their order"
    near = Proof("3a", one, f"{apart:.1e} of the way trained apart", required, apart <= LIMIT)
    return [near, _equal("3b", f"{first} that adds in the workers' order, bit for bit", in_their_order)]


def distance(weights: Weights, others: Weights, initial: Weights) -> float:
    """Return the L2 distance of two sets of weights, relative to the distance of `others` from `initial`.

    The result is infinite if `others` equal `initial`, so that no limit holds.

    Example:
        >>> start, end = {"w": np.zeros(2, np.float32)}, {"w": np.array([3, 4], np.float32)}
        >>> distance({"w": np.array([3, 4.5], np.float32)}, end, start)
        0.1
    """
    apart, way = (
        np.linalg.norm([np.linalg.norm(end[name].astype(float) - begin[name]) for name in begin])
        for end, begin in ((weights, others), (others, initial))
    )
    return float(apart / way) if way else math.inf
