"""What the demo claims, each with the figure that shows it: same weights everywhere, learned, same as one process.

Ranks add their own micro-batches before the sums meet, (a + c) + (b + d), where one process adds ((a + b) + c) + d.
In fp32 both are right to the last place, and training amplifies last places. So the workers are held to two things: to
be no further from one process than that process is from itself with its micro-batches added in reverse order; and to be
equal, byte for byte, to one process that adds in their order. With one micro-batch for each worker both orders are one.

Shards of a model add up their own heads and columns first, so they never are one process bit for bit: there the process
that is the measure adds heads and columns in reverse order too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradengine.demo.comparison import distance
from gradengine.demo.settings import counted
from gradengine.trainer import weights_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradengine.demo.record import Compared, Record, Weights

__all__ = ["Proof", "prove", "shards_are_whole"]

ORDER_FACTOR = 100.0
"""Two orders of the same additions are two draws of rounding, but one may meet a weight whose gradient is nearly 0,
where AdamW makes much of it. A micro-batch lost in one of 20 steps moves the weights 50,000 times as far or more."""

LARGEST_TOLERANCE = 1e-2
"""Half of what one micro-batch lost in the last of 20 steps does: where order alone moves the weights as far, too many
steps are compared to show anything."""

SHARD_TOLERANCE = 1e-5
"""Of outputs, gradients and a step of gradient descent, in parts of the largest: fp32 rounds at 6e-8, sums of hundreds
of terms and what a softmax makes of them at about 1e-6. A missing all-reduce changes a third of the largest."""

NORM_TOLERANCE = 1e-6
"""Of the global norm, which is summed in fp64, and of the clip scale, which is a bound divided by it."""

STEP_TOLERANCE = 1e-2
"""Of the weights after one step of AdamW, whose first step is as long where a gradient is nothing but rounding as where
it is large: it says no more than that no weight was left behind."""

ENOUGH_STEPS = 60
"""The demo's own model beats the bytes' entropy after 15 steps; a run of less than these is told how many to make."""

_ORDER = "3a: fp32 sums depend on their order; with --micro-batches 1 and no shards the bits are equal."
_SAME_CODE = (
    "3b runs the code of the shards twice: processes, transport and overlap change no bit. That shards compute what the"
    " model in one piece does is for 3a and 4 to show."
)


@dataclass(frozen=True)
class Proof:
    """A claim, what was measured, what it must be, whether it is, and why no more is claimed."""

    name: str
    claim: str
    measured: str
    required: str
    holds: bool
    remark: str = ""


def prove(
    record: Record,
    replays: Mapping[str, Weights],
    initial: Weights,
    entropy: float,
    comparison: Compared | None = None,
) -> list[Proof]:
    """Hold a run against its claims.

    Args:
        record: The run.
        replays: The weights of each replay, as `replay_all` gives them.
        initial: The weights that all began with.
        entropy: Unigram entropy of the held-out text in nats per byte.
        comparison: Of shards with the model in one piece, where the run had shards.
    """
    shards = [] if comparison is None else [shards_are_whole(comparison)]
    return [
        _same_on_all_ranks(record),
        _learned(record, entropy),
        *_same_as_one_process(record, replays, initial),
        *shards,
    ]


def _same_on_all_ranks(record: Record) -> Proof:
    settings = record.settings
    claim = f"one set of weights on {counted(settings.workers, 'rank')} after {counted(len(record.steps), 'step')}"
    digests = [record.digests.get(rank, "none") for rank in range(settings.workers)]
    holds = len(set(digests)) == 1 and len(set(record.kept_digests.values())) == 1
    if settings.tensor_parallel > 1:
        claim += f", and one copy of norms, embedding and LM head in {settings.tensor_parallel} shards"
        holds = holds and _shards_agree(record)
    return Proof("1", claim, f"sha256 {_shown(digests)}", "must be one", holds)


def _shown(digests: list[str]) -> str:
    return " and ".join(digest[:12] for digest in dict.fromkeys(digests))


def _shards_agree(record: Record) -> bool:
    """Whether all shards of all ranks reported one digest of what they all hold."""
    settings = record.settings
    replicated = [digest for rank in range(settings.workers) for digest in record.replicated_digests.get(rank, ())]
    return len(replicated) == settings.workers * settings.tensor_parallel and len(set(replicated)) == 1


def _learned(record: Record, entropy: float) -> Proof:
    loss, steps = record.evaluations[record.settings.steps], record.settings.steps
    required = f"must be below {entropy:.3f}, the bytes' entropy"
    if not loss < entropy and steps < ENOUGH_STEPS:
        required += f": {counted(steps, 'step')} may be too few, pass --steps {ENOUGH_STEPS} or more"
    claim = "unseen text is predicted better than by byte frequencies"
    return Proof("2", claim, f"loss {loss:.3f} nats/byte", required, loss < entropy)


def _same_as_one_process(record: Record, replays: Mapping[str, Weights], initial: Weights) -> list[Proof]:
    settings = record.settings
    first = f"weights after {counted(settings.compared_steps, 'step')} are those of one process"
    one = f"{first} with {counted(settings.micro_batches_in_all, 'micro-batch')}"
    has_shards = settings.tensor_parallel > 1
    if not has_shards and (settings.workers == 1 or settings.micro_batches == 1):
        return [_equal("3", f"{one}, bit for bit", record.kept, replays["one"])]
    same_order = f"{first} that adds in the workers' order, bit for bit"
    return [
        _near("3a", one, record.kept, replays, initial),
        _equal("3b", same_order, record.kept, replays["ranks"], _SAME_CODE if has_shards else ""),
    ]


def _near(name: str, claim: str, weights: Weights, replays: Mapping[str, Weights], initial: Weights) -> Proof:
    one = replays["one"]
    apart, order = distance(weights, one, initial), distance(replays["reversed"], one, initial)
    tolerance = min(ORDER_FACTOR * order, LARGEST_TOLERANCE)
    measured = f"{apart:.1e} of the way trained apart"
    required = f"must be at most {tolerance:.1e}: adding in reverse order makes {order:.1e}"
    if all(np.array_equal(one[name], initial[name]) for name in one):
        measured, required = "the weights of one process have not moved", "there is no way to measure by"
    return Proof(name, claim, measured, required, apart <= tolerance, _ORDER)


def shards_are_whole(comparison: Compared) -> Proof:
    """Proof 4: a figure that is NaN is within no limit."""
    pairs = {
        "outputs": (comparison.outputs, SHARD_TOLERANCE),
        "gradients": (comparison.gradients, SHARD_TOLERANCE),
        "norm": (comparison.norm, NORM_TOLERANCE),
        "clip scale": (comparison.scale, NORM_TOLERANCE),
        "clipped": (comparison.clipped, SHARD_TOLERANCE),
        "SGD step": (comparison.descended, SHARD_TOLERANCE),
        "AdamW step": (comparison.weights, STEP_TOLERANCE),
    }
    measured = "\n".join(f"{name} {apart:.1e}, limit {tolerance:.0e}" for name, (apart, tolerance) in pairs.items())
    holds = all(apart <= tolerance for apart, tolerance in pairs.values())
    claim = "one micro-batch and one step of all shards are those of the model in one piece"
    return Proof("4", claim, measured, "differences relative to the whole", holds)


def _equal(name: str, claim: str, weights: Weights, others: Weights, remark: str = "") -> Proof:
    digests = [weights_digest(weights), weights_digest(others)]
    return Proof(name, claim, f"sha256 {_shown(digests)}", "must be one", len(set(digests)) == 1, remark)
