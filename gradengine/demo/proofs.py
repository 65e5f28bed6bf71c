"""What the demo claims, each with the figure that shows it: same weights everywhere, learned, same as one process.

Ranks add their own micro-batches before the sums meet, (a + c) + (b + d), where one process adds ((a + b) + c) + d.
In fp32 both are right to the last place, and training amplifies last places. So the workers are held to two things: to
be no further from one process than that process is from itself with its sums in reverse order; and to be equal, byte
for byte, to one process that adds in their order. With one micro-batch for each worker both orders are one.

Shards of a model add up their own heads and columns first, so they never are one process bit for bit. And AdamW makes
the same of a gradient whatever its length, so that weights do not tell a wrong clip scale: the gradients that the first
step handed back do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gradengine.demo.model import Weights
from gradengine.demo.run import Record
from gradengine.demo.settings import counted
from gradengine.demo.worker import Finished, Step
from gradengine.engine.trainer import weights_digest

__all__ = ["LIMITS", "Proof", "distance", "prove", "shards_are_whole"]

ORDER_FACTOR = 100.0
"""Two orders of the same additions are two draws of rounding, but one may meet a weight whose gradient is nearly 0,
where AdamW makes much of it. A micro-batch lost in one of 20 steps moves the weights 50,000 times as far or more."""

LARGEST_TOLERANCE = 1e-2
"""Half of what one micro-batch lost in the last of 20 steps does: where order alone moves the weights as far, too many
steps are compared to show anything."""

LIMITS = {"loss": 1e-5, "norm": 1e-6, "scale": 1e-6, "gradients": 1e-5}
"""How far shards' first step may be from the model in one piece. fp32 rounds at 6e-8, sums of hundreds of terms and
what a softmax makes of them at about 1e-6; a missing all-reduce changes a third of the largest element. The norm is
summed in fp64, and the scale is a bound divided by it."""

LEAST_MEASURE = 1e-2
"""Of the largest gradient, what a component is measured by at least: w_q and w_k of one-byte sequences hold nothing but
rounding of what the others hold, and would be wrong by themselves in a model that is right."""

ENOUGH_STEPS = 60
"""The demo's own model beats the bytes' entropy after 15 steps; a run of less than these is told how many to make."""

_ORDER = "3a: fp32 sums depend on their order; with --micro-batches 1 and no shards the bits are equal."
_SAME_CODE = (
    "3b runs the code of the shards twice; that they compute what the whole model does is for 3a and 4 to show."
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
    record: Record, replays: Mapping[str, tuple[Step, Finished]], initial: Weights, entropy: float
) -> list[Proof]:
    """Hold a run against its claims: by what `replay_all` gave, the first weights, and the held-out bytes' entropy."""
    weights = {name: end.compared for name, (_, end) in replays.items()}
    proofs = [_same_on_all_ranks(record), _learned(record, entropy), *_same_as_one_process(record, weights, initial)]
    if record.settings.tensor_parallel > 1:
        proofs.append(shards_are_whole(replays["ranks"], replays["one"]))
    return proofs


def _same_on_all_ranks(record: Record) -> Proof:
    settings = record.settings
    claim = f"one set of weights on {counted(settings.workers, 'worker')} after {counted(len(record.steps), 'step')}"
    ends = [record.ends.get(rank, Finished(rank, "none", (), {}, {})) for rank in range(settings.workers)]
    holds = len({end.digest for end in ends}) == 1
    if settings.tensor_parallel > 1:
        shards = settings.workers * settings.tensor_parallel
        claim += f", and one copy of norms, embedding and LM head in all {shards} shards"
        replicated = [digest for end in ends for digest in end.replicated]
        holds = holds and len(replicated) == shards and len(set(replicated)) == 1
    return Proof("1", claim, _shown([end.digest for end in ends]), "must be one", holds)


def _shown(digests: list[str]) -> str:
    return "sha256 " + " and ".join(digest[:12] for digest in dict.fromkeys(digests))


def _learned(record: Record, entropy: float) -> Proof:
    loss, steps = record.evaluations[record.settings.steps], record.settings.steps
    required = f"must be below {entropy:.3f}, the bytes' entropy"
    if not loss < entropy and steps < ENOUGH_STEPS:
        required += f": {counted(steps, 'step')} may be too few, pass --steps {ENOUGH_STEPS} or more"
    claim = "unseen text is predicted better than by byte frequencies"
    return Proof("2", claim, f"loss {loss:.3f} nats/byte", required, loss < entropy)


def _same_as_one_process(record: Record, replays: Mapping[str, Weights], initial: Weights) -> list[Proof]:
    settings, kept = record.settings, record.ends[0].compared
    first = f"weights after {counted(settings.compared_steps, 'step')} are those of one process"
    one = f"{first} with {counted(settings.micro_batches_in_all, 'micro-batch')}"
    has_shards = settings.tensor_parallel > 1
    if not has_shards and (settings.workers == 1 or settings.micro_batches == 1):
        return [_equal("3", f"{one}, bit for bit", kept, replays["one"])]
    same_order = f"{first} that adds in the workers' order, bit for bit"
    return [
        _near("3a", one, kept, replays, initial),
        _equal("3b", same_order, kept, replays["ranks"], _SAME_CODE if has_shards else ""),
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


def _equal(name: str, claim: str, weights: Weights, others: Weights, remark: str = "") -> Proof:
    digests = [weights_digest(weights), weights_digest(others)]
    return Proof(name, claim, _shown(digests), "must be one", len(set(digests)) == 1, remark)


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


def _norm_of_difference(weights: Weights, others: Weights) -> float:
    return float(np.linalg.norm([np.linalg.norm(weights[name].astype(float) - others[name]) for name in others]))


def shards_are_whole(shards: tuple[Step, Finished], whole: tuple[Step, Finished]) -> Proof:
    """Proof 4, of two first steps: a figure that is NaN is within no limit."""
    (step, end), (whole_step, whole_end) = shards, whole
    figures = {
        **{name: abs(getattr(step, name) / getattr(whole_step, name) - 1.0) for name in ("loss", "norm", "scale")},
        "gradients": _apart(end.first, whole_end.first),
    }
    measured = "\n".join(f"{name} {apart:.1e}, limit {LIMITS[name]:.0e}" for name, apart in figures.items())
    holds = all(figures[name] <= limit for name, limit in LIMITS.items())
    claim = "the first step of all shards is that of the model in one piece: its loss, norm, scale, what it handed back"
    return Proof("4", claim, measured, "differences relative to the whole", holds)


def _apart(gradients: Weights, expected: Weights) -> float:
    """The largest difference of any component, in parts of what measures it; NaN where one is."""
    least = LEAST_MEASURE * max(float(np.abs(gradient).max()) for gradient in expected.values())
    apart = (np.abs(gradients[name] - part).max() / max(np.abs(part).max(), least) for name, part in expected.items())
    return float(np.max(list(apart)))  # Python's own `max` passes over a NaN wherever it does not come first
