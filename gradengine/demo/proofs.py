"""What the demo claims, each with the figure that shows it: same weights everywhere, learned, same as one process.

Why W workers are not one process bit for bit: each rank adds its own micro-batches before the sums meet,
(a + c) + (b + d), where one process adds ((a + b) + c) + d. In fp32 both are right to the last place, and training
amplifies last places. So the workers are held to two things: to be no further from one process than that process is
from itself with its micro-batches added in reverse order; and to be equal, byte for byte, to one process that adds in
their order. With one micro-batch for each worker both orders are the same, and so must all bytes be.

Shards of a model (tensor parallelism) each add up their own heads and columns before the sums meet, so they never are
one process bit for bit: there the process that is the measure adds heads and columns in reverse order too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradengine.demo.words import counted
from gradengine.trainer import weights_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradengine.demo.record import Record
    from gradengine.demo.reports import Compared, Weights
    from gradengine.demo.settings import Settings

__all__ = ["Proof", "distance", "largest_difference", "prove", "shards_are_whole"]

ORDER_FACTOR = 100.0
"""Two orders of the same additions are two draws of rounding: alike at first, but one may meet a weight whose gradient
is nearly 0, where AdamW makes much of it. One micro-batch lost in one of 20 steps moves the weights 50,000 times as far
as rounding or more."""

LARGEST_TOLERANCE = 1e-2
"""Half of what one micro-batch lost in the last of 20 steps does: where order alone moves the weights as far, too many
steps are compared to show anything."""

SHARD_TOLERANCE = 1e-5
"""Of outputs, gradients and a step of gradient descent, in parts of the largest: fp32 rounds at 6e-8, sums of hundreds
of terms and what a softmax makes of them at about 1e-6. A missing all-reduce changes a third of the largest and more,
and a wrong clip scale all of the gradients by its own error."""

NORM_TOLERANCE = 1e-6
"""Of the global norm, which is summed in fp64, and of the clip scale, which is a bound divided by it."""

STEP_TOLERANCE = 1e-2
"""Of the weights after one step of AdamW, in parts of it. Its first step is as long where a gradient is nothing but
rounding as where it is large, so this says less than gradient descent does: that no weight was left behind."""

ENOUGH_STEPS = 60
"""The demo's own model beats the bytes' entropy after 15 steps; a run of less than these is told how many to make."""

_NOT_BITWISE = (
    "3a is not bit for bit: each rank adds its own first, (a + c) + (b + d), one process ((a + b) + c) + d,"
    " and fp32 rounds these differently. With --micro-batches 1 both are one order, and the bits are equal."
)

_NOT_BITWISE_IN_SHARDS = (
    "3a is not bit for bit: each shard adds up its own heads and columns first, one process all of them in a row, and"
    " fp32 rounds these differently; so does each rank's sum over its own micro-batches, where it has several."
)
_SAME_CODE = (
    "3b runs the code of the shards twice: it shows that processes, transport and overlap change no bit. That shards"
    " compute what the model in one piece does is for 3a and 4 to show."
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
    shards = [] if comparison is None else [shards_are_whole(comparison, record.settings)]
    return [
        _same_on_all_ranks(record),
        _learned(record, entropy),
        *_same_as_one_process(record, replays, initial),
        *shards,
    ]


def _same_on_all_ranks(record: Record) -> Proof:
    digests = [record.digests.get(rank, "none") for rank in range(record.settings.workers)]
    shown = ", ".join(f"{digest[:12]}" for digest in dict.fromkeys(digests))
    holds = len(set(digests)) == 1 and len(set(record.kept_digests.values())) == 1
    if record.settings.tensor_parallel > 1:
        holds = holds and _shards_agree(record)
    return Proof("1", _same_claim(record), f"sha256 {shown}", "must be one sha256", holds)


def _same_claim(record: Record) -> str:
    workers, tp_size = record.settings.workers, record.settings.tensor_parallel
    after, replicated = f"after {counted(len(record.steps), 'step')}", "the same norms, embedding and LM head"
    if workers > 1:
        shards = f", and all their shards {replicated}" if tp_size > 1 else ""
        return f"all {workers} ranks hold the same weights {after}{shards}"
    if tp_size > 1:
        return f"all {tp_size} shards of the only rank hold {replicated} {after}"
    return f"the only rank reported its weights {after}: there is no other that could differ"


def _shards_agree(record: Record) -> bool:
    """Whether all shards of all ranks reported one digest of what they all hold."""
    settings = record.settings
    replicated = [digest for rank in range(settings.workers) for digest in record.replicated_digests.get(rank, ())]
    return len(replicated) == settings.workers * settings.tensor_parallel and len(set(replicated)) == 1


def _learned(record: Record, entropy: float) -> Proof:
    loss = record.evaluations[record.settings.steps]
    claim = "unseen text is predicted better than by the frequencies of its bytes"
    required = f"must be below {entropy:.3f}, the bytes' entropy"
    holds = loss < entropy
    if not holds and record.settings.steps < ENOUGH_STEPS:
        steps = counted(record.settings.steps, "step")
        required += f": {steps} may be too few to get there, pass --steps {ENOUGH_STEPS} or more"
    return Proof("2", claim, f"loss {loss:.3f} nats/byte", required, holds)


def _same_as_one_process(record: Record, replays: Mapping[str, Weights], initial: Weights) -> list[Proof]:
    settings = record.settings
    first = f"the weights after {counted(settings.compared_steps, 'step')} are those of one process"
    in_all = settings.micro_batches_in_all
    one = f"{first} with {'its only micro-batch' if in_all == 1 else f'all {in_all} micro-batches'}"
    has_shards = settings.tensor_parallel > 1
    if not has_shards and (settings.workers == 1 or settings.micro_batches == 1):
        return [_equal("3", f"{one}, bit for bit", record.kept, replays["one"])]
    runs = f"runs all {settings.workers} workers" if settings.workers > 1 else "runs the worker"
    cut = f", cut into {settings.tensor_parallel} shards," if has_shards else ""
    same_order = f"{first} that {runs}{cut} and adds in their order, bit for bit"
    remarks = (_NOT_BITWISE_IN_SHARDS, _SAME_CODE) if has_shards else (_NOT_BITWISE, "")
    return [
        _near("3a", one, record.kept, replays, initial, remarks[0]),
        _equal("3b", same_order, record.kept, replays["ranks"], remarks[1]),
    ]


def _near(
    name: str, claim: str, weights: Weights, replays: Mapping[str, Weights], initial: Weights, remark: str
) -> Proof:
    one = replays["one"]
    apart, order = distance(weights, one, initial), distance(replays["reversed"], one, initial)
    tolerance = min(ORDER_FACTOR * order, LARGEST_TOLERANCE)
    measured = f"{apart:.1e} of the way trained apart, no weight by more than {largest_difference(weights, one):.1e}"
    required = f"must be at most {tolerance:.1e}: adding in reverse order makes {order:.1e}"
    if not _norm_of_difference(one, initial):
        measured, required = "the weights of one process have not moved", "there is no way to measure by"
    return Proof(name, claim, measured, required, apart <= tolerance, remark)


def shards_are_whole(comparison: Compared, settings: Settings) -> Proof:
    """Proof 4: a figure that is NaN is within no limit."""
    claim = f"one micro-batch and one step of {settings.tensor_parallel} shards are those of the model in one piece"
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
    return Proof("4", claim, measured, "differences relative to the whole", holds)


def _equal(name: str, claim: str, weights: Weights, others: Weights, remark: str = "") -> Proof:
    digest, other = weights_digest(weights), weights_digest(others)
    shown = f"sha256 {digest[:12]}" + ("" if digest == other else f" and {other[:12]}")
    return Proof(name, claim, shown, "must be one sha256", digest == other, remark)


def distance(weights: Weights, others: Weights, initial: Weights) -> float:
    """How far two sets of weights are apart, in parts of how far `others` have come from `initial` (L2).

    Infinite where these have not moved: there is nothing to measure by, and whoever asks for a limit shall not pass.

    Example:
        >>> start, end = {"w": np.zeros(2, np.float32)}, {"w": np.array([3, 4], np.float32)}
        >>> distance({"w": np.array([3, 4.5], np.float32)}, end, start)
        0.1
    """
    way = _norm_of_difference(others, initial)
    return _norm_of_difference(weights, others) / way if way else math.inf


def largest_difference(weights: Weights, others: Weights) -> float:
    """The largest difference of any one weight; NaN where any is NaN."""
    return float(np.max([np.abs(weights[name] - others[name]).max() for name in weights]))


def _norm_of_difference(weights: Weights, others: Weights) -> float:
    return float(np.linalg.norm([np.linalg.norm(weights[n].astype(float) - others[n]) for n in weights]))
