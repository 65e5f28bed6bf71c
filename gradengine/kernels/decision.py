"""The decision of a step in fp64, which makes norms, clip scales, factors and whether to skip from squared sums.

This is the definition. A GPU makes the same decision in its memory, and the host can read it later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from gradengine.errors import WindowError

SMALLEST_FACTOR = 2.0**-126  # fp32's smallest normal number

Float64: TypeAlias = npt.NDArray[np.float64]
Scalar: TypeAlias = Any  # a float, or a 0-d array on a GPU


@dataclass(frozen=True)
class ClipPlan:
    """The groups of targets that share a norm, and each group's bound."""

    groups: tuple[int, ...]  # group number of each target
    max_norms: tuple[float, ...]  # bound of each group, infinity for no clipping
    blocks: tuple[int | None, ...] = ()  # block of each target or None, empty if there are no blocks

    @cached_property
    def digest(self) -> int:
        """A hash of 8 bytes that ranks compare to find different bounds."""
        return xxhash.xxh3_64_intdigest(np.array(self.max_norms).tobytes())

    @cached_property
    def members(self) -> list[list[int]]:
        """The targets of each group."""
        return _collected(self.groups, len(self.max_norms))

    @cached_property
    def block_members(self) -> list[list[int]]:
        """The targets of each block."""
        return _collected(self.blocks, 1 + max((block for block in self.blocks if block is not None), default=-1))

    @cached_property
    def rows(self) -> list[npt.NDArray[np.intp]]:
        """The targets of each group, then of each block, as rows of matrices, padded with -1."""
        return _rows([*self.members, *self.block_members])


def _collected(labels: Sequence[int | None], count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for target, label in enumerate(labels):
        if label is not None:
            found[label].append(target)
    return found


def _rows(segments: Sequence[Sequence[int]]) -> list[npt.NDArray[np.intp]]:
    """Return matrices of consecutive segments. Each is at most twice as large as its segments."""
    found: list[list[Sequence[int]]] = []
    width = members = 0  # columns and members of the last matrix
    for segment in segments:
        width, members = max(width, len(segment)), members + len(segment)
        if not found or width * (len(found[-1]) + 1) > 2 * members:
            found.append([])
            width = members = len(segment)
        found[-1].append(segment)
    matrices = [np.full((len(rows), max(1, *map(len, rows))), -1, np.intp) for rows in found]
    for matrix, rows in zip(matrices, found, strict=True):
        for row, segment in zip(matrix, rows, strict=True):
            row[: len(segment)] = segment
    return matrices


@dataclass(frozen=True)
class Spike:
    """A policy's judgement of a finite norm."""

    bound: float  # the bound above which a norm is a spike
    held: float  # the value for the running mean, to which a spike is clipped if it is not skipped
    is_found: bool = False
    skips: bool = False


@dataclass(frozen=True)
class Decision:
    """The result of K2, with norms of the averaged gradient and the factor that each group is multiplied by."""

    norm: Scalar  # norm over all targets
    group_norms: Sequence[Scalar]
    block_norms: Sequence[Scalar]
    component_norms: Sequence[Scalar]  # norm of each target
    scales: Sequence[Scalar]  # clip scale of each group, in 0..1
    factors: Sequence[Scalar]  # clip scale / divisor of each group in fp32, a normal number or 0
    inverse: Scalar  # 1 / the first group's factor, rounded once to fp32, or infinity if the factor is 0
    skipped: Scalar  # whether the result is zeros
    bad: tuple[int, ...] | None  # positions of the targets with NaN or Inf, None if only the device has them
    loss_scale: Scalar = field(default=None, kw_only=True)  # loss scale of the decision, if it is on the device
    spiked: Scalar = field(default=False, kw_only=True)  # whether the norm was a spike
    spike_bound: Scalar = field(default=math.inf, kw_only=True)  # the bound above which a norm is a spike
    spike: Spike | None = field(default=None, kw_only=True)  # the judgement, if the host made it

    @property
    def scale(self) -> Scalar:
        """The clip scale, or the smallest one of several groups."""
        return min(self.scales)

    @property
    def factor(self) -> Scalar:
        """The first group's factor, or the only one."""
        return self.factors[0]

    def kept_norm(self) -> Scalar:
        """Return the norm in memory that the next decision does not overwrite."""
        return self.norm


def decide(
    totals: Float64,
    plan: ClipPlan,
    divisor: float,
    *,
    zero_if_bad: bool = False,
    judged: Callable[[float], Spike] | None = None,
) -> Decision:
    """Return the decision from each target's squared sum, in fp64. Factors are rounded once to fp32.

    `judged` returns whether a finite norm is a spike. If a spike is clipped, no group's scale is larger than the
    spike's. A divisor of infinity means that all micro-batches were dropped, so the step is skipped.
    """
    norm = math.sqrt(sum_in_order(totals)) / divisor
    groups = len(plan.max_norms)
    norms = [norm] if groups == 1 and not plan.block_members else _norms_of_rows(totals, plan, divisor)
    scales = list(map(clip_scale, norms, plan.max_norms, repeat(divisor)))  # The groups are first.
    bad = () if math.isfinite(norm) else tuple(np.flatnonzero(~np.isfinite(totals)).tolist())
    is_empty = math.isinf(divisor)
    spike = judged(norm) if judged is not None and math.isfinite(norm) and not is_empty else None
    if spike is not None and spike.is_found and not spike.skips:
        most = clip_scale(norm, spike.held, divisor)
        scales = [min(scale, most) for scale in scales]
    return Decision(
        norm=norm,
        group_norms=tuple(norms[:groups]),
        block_norms=tuple(norms[groups:]),
        component_norms=tuple((np.sqrt(totals) / divisor).tolist()),
        scales=tuple(scales),
        factors=tuple([np.float32(scale / divisor) for scale in scales]),
        inverse=np.float32(divisor / scales[0] if scales[0] else math.inf),
        skipped=is_empty or (bool(bad) and zero_if_bad) or (spike is not None and spike.skips),
        bad=bad,
        spiked=spike is not None and spike.is_found,
        spike_bound=math.inf if spike is None else spike.bound,
        spike=spike,
    )


def _norms_of_rows(totals: Float64, plan: ClipPlan, divisor: float) -> list[float]:
    """Return each group's norm, then each block's, by a few NumPy calls for any number of them."""
    padded = np.append(totals, 0.0)  # The padding of a row, -1, selects this zero.
    sums = [np.add.accumulate(padded[rows], axis=1)[:, -1] for rows in plan.rows]
    norms: list[float] = (np.sqrt(np.concatenate(sums)) / divisor).tolist()
    return norms


def clip_scale(norm: float, max_norm: float, divisor: float = 1.0) -> float:
    """Return min(1, max_norm / norm), without an epsilon. A norm that is 0 or not finite gives 1.

    The result is 0 if scale / divisor is below fp32's normal numbers. Rounded there, it could exceed the bound by half,
    and its inverse may not be an fp32 number.
    """
    if not max_norm < norm < math.inf:
        return 1.0
    scale = max_norm / norm
    return scale if scale / divisor >= SMALLEST_FACTOR else 0.0


def refuse_bad_divisor(divisor: float, what: str) -> None:
    """Raise `WindowError` unless 1 / divisor is a normal fp32 number, since otherwise it is Inf, 0 or loses bits."""
    if not SMALLEST_FACTOR <= divisor <= 1 / SMALLEST_FACTOR:  # NaN is refused too.
        raise WindowError(
            f"{what} is out of range",
            got=f"{divisor:g}",
            expected="2**-126..2**126",
            do="discard() the window, and use weights nearer to 1",
        )


def sum_in_order(values: Float64) -> float:
    """Return the sum from first to last. NumPy's and Python's sums change order or rounding between versions."""
    return float(np.add.accumulate(values)[-1]) if values.size else 0.0
