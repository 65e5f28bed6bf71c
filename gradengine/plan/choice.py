"""Which transport to take, in one sentence; of those that do not exist in this version, what they would gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradengine.plan.overlap import Overlap

__all__ = ["TRANSPORTS", "Choice", "choose", "duration", "three_digits"]

# What this package makes of each algorithm; a ring in rank order does not exist: its order of sums is not the star's.
TRANSPORTS: Mapping[str, str | None] = {"star": "tcp://", "ring": None, "ordered": "mpi://", "nccl": "nccl://"}
_PLANNED = ("ordered", "nccl")  # in the order of preference: the first keeps the bits of the star
_NOTHING = 5e-9  # seconds: what a difference of two times leaves where it is none
_ENOUGH = 0.05  # of a step: what a wait may take before something faster is worth its trouble


@dataclass(frozen=True)
class Choice:
    """What to take.

    Attributes:
        transport: "none" for one worker, else "tcp://", the only one across machines that this version has.
        reason: One sentence.
        needed: The planned transport that would shorten the step by more than 5 %, if there is one.
        saves_seconds: What it would save in each step.
        of_step: That, as a share of the step over tcp://.
    """

    transport: str
    reason: str
    needed: str | None = None
    saves_seconds: float = 0.0
    of_step: float = 0.0


def choose(workers: int, compute_seconds: float, exchanges: Mapping[str, Overlap]) -> Choice:
    """Compare what the star exposes with what the planned transports would.

    Args:
        workers: Ranks that exchange gradients.
        compute_seconds: Of a step, without its exchange.
        exchanges: Algorithm -> its overlap.

    Example:
        >>> overlaps = dict.fromkeys(("star", "ordered", "nccl"), Overlap(1.0, 0.01))
        >>> choose(2, 1.0, overlaps).reason
        'a step waits 10.0 ms for it, 1.0 % of its time.'
    """
    if workers == 1:
        return Choice("none", "one worker has nobody to exchange with: build the engine without exchange=.")
    star = exchanges["star"].exposed_seconds
    step = compute_seconds + star
    waits = f"a step waits {duration(star)} for it, {100 * star / step:.1f} % of its time"
    best = min(exchanges[name].exposed_seconds for name in _PLANNED)
    near = [name for name in _PLANNED if exchanges[name].exposed_seconds - best <= _ENOUGH * (compute_seconds + best)]
    saved = star - exchanges[near[0]].exposed_seconds
    if saved <= _ENOUGH * step:
        return Choice("tcp://", f"{waits}.")
    needed = TRANSPORTS[near[0]]
    reason = (
        f"{waits}; {needed} would save {duration(saved)} of it and make a step {step / (step - saved):.2f} times as"
        f" fast, but is planned and does not exist in this version."
    )
    return Choice("tcp://", reason, needed, saved, saved / step)


def duration(seconds: float) -> str:
    """Seconds as people say them, three digits of them.

    >>> [duration(seconds) for seconds in (0, 5e-6, 0.0123, 0.9996, 3.5, 62.6, 4000)]
    ['0 s', '5.00 us', '12.3 ms', '1.00 s', '3.50 s', '62.6 s', '4000 s']
    """
    if seconds < _NOTHING:
        return "0 s"
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 999.5:
            return f"{three_digits(seconds * scale)} {unit}"
    return f"{three_digits(seconds)} s"


def three_digits(number: float) -> str:
    """A number with three digits, or all of its whole ones.

    >>> [three_digits(number) for number in (0.1234, 9.996, 99.96, 123.4, 4321.0)]
    ['0.12', '10.0', '100', '123', '4321']
    """
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"
