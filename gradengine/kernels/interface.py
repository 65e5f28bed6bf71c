"""The interface of the computations on a device, `accumulate` (K1), `finalise` (K2) and `hand_back` (K3).

The accumulator, the clip and the engine use `Kernels` alone. `host.py` implements it in NumPy, `cuda.py` in CUDA. All
lists are parallel, so position i in one is position i in every other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer
from gradengine.kernels.arena import Arena, PartialSums
from gradengine.kernels.decision import ClipPlan, Decision, Float64, Scalar
from gradengine.kernels.device import Device
from gradengine.kernels.kept import Drops, Kept, drops_of
from gradengine.kernels.loss_scale import LossScale
from gradengine.kernels.operands import Contribution, Destinations, FoldPass
from gradengine.kernels.spikes import Spikes
from gradengine.kernels.status import StatusReadback
from gradengine.layout.slots import Span


class Kernels(ABC):
    """The operations of one device. Every method is deterministic, so the order of threads changes no bit.

    Attributes:
        device: The device whose memory the kernels work on.
        measures_in_passing: Whether K1's squared sums cost nothing, so that every fold measures them.
    """

    device: Device
    measures_in_passing: bool

    def arena(self, targets: Sequence[Buffer], memory: Buffer | None = None) -> Arena:
        """Return an arena of these buffers, with memory for their squared sums and the order of work over streams.

        Args:
            targets: The buffers to be summed into, or clipped.
            memory: The memory from `Device.allocate` that contains the targets, if any. It is kept alive until the work
                on it is done.
        """
        return Arena(tuple(targets), self.partial_sums([target.size for target in targets], memory), memory)

    def partial_sums(self, sizes: Sequence[int], memory: Buffer | None = None) -> PartialSums:
        """Return memory for the squared sums of targets of these sizes, as in `arena`."""
        return PartialSums(sizes, self.device.order(memory))

    @abstractmethod
    def prepare(self, arena: Arena, spans: Sequence[Span], plan: ClipPlan | None = None) -> None:
        """Allocate now what later calls need for this arena, so that no later call allocates."""

    @abstractmethod
    def accumulate(self, arena: Arena, fold: FoldPass, *, measure: bool = False) -> None:
        """Fold gradients into fp32 targets (K1). With `measure`, also make the squared sums in the same pass."""

    @abstractmethod
    def judge(
        self, arena: Arena, contribution: Contribution, weight: np.float32, drops: Drops, *, is_first: bool
    ) -> Any:
        """Read a micro-batch's gradients, and count its weight, or count it as dropped if one is not finite.

        Args:
            arena: The arena to which the micro-batch is to be added.
            contribution: The gradients of all targets.
            weight: The micro-batch's weight.
            drops: The counts of the window's micro-batches so far.
            is_first: Whether the micro-batch is the window's first, at which the counts begin.

        Returns:
            The value for `FoldPass.dropped`.
        """

    @abstractmethod
    def measure(self, arena: Arena, positions: Sequence[int] | None = None) -> None:
        """Measure the squared sums of all targets, or of those at these positions."""

    @abstractmethod
    def totals(self, arena: Arena, kept: Any = None) -> Float64:
        """Return each target's squared sum on the host, with chunks added in order. On a GPU this waits.

        `kept` is the result of `keep_sums`, for the squared sums at that time.
        """

    @abstractmethod
    def keep_sums(self, arena: Arena) -> Any:
        """Return a copy of all squared sums. On a GPU it is on the device, in memory that is allocated once."""

    @abstractmethod
    def zero(self, arena: Arena, slots: Span, chosen: npt.NDArray[np.bool_]) -> None:
        """Write zeros to the chosen targets and to their squared sums."""

    @abstractmethod
    def finalise(
        self,
        arena: Arena,
        plan: ClipPlan,
        divisor: float,
        *,
        zero_if_bad: bool,
        step: int = 0,
        weight: Scalar = None,
        counted: Scalar = None,
        loss_scale: LossScale | None = None,
        bounds: Kept | None = None,
        spikes: Spikes | None = None,
    ) -> Decision:
        """Make norms, scales and factors from the squared sums, and find the targets that are not finite (K2).

        Args:
            arena: An arena whose squared sums are up to date. If it has `memory`, the first bad element is located.
            plan: The groups of targets that share a norm.
            divisor: The number by which the sum is divided to make the average.
            zero_if_bad: Whether the result is zeros if anything is not finite.
            step: The number of the step, counted from 1. 0 means the one after the last.
            weight: On a GPU, an fp64 number there that the divisor is multiplied by. If the product is out of range,
                the result is zeros and the status reports the weight.
            counted: On a GPU, the weight there of the micro-batches that were not dropped. 0 skips the step.
            loss_scale: On a GPU, a loss scale that the divisor is multiplied by, and that K2 updates.
            bounds: On a GPU, a record of `kept.bounds_of`, read when the work runs. The default is the plan's bounds.
            spikes: A policy for spikes, and the norms before this one, which K2 updates on a GPU.
        """

    @abstractmethod
    def hand_back(
        self, arena: Arena, decision: Decision, plan: ClipPlan, destinations: Destinations | None = None
    ) -> None:
        """Write destination = target x its group's factor, or zeros if the decision is to skip (K3). See `scale`.

        Args:
            arena: The arena whose targets are read.
            decision: The decision about the targets.
            plan: The groups of targets that share a factor.
            destinations: The destinations by position. None writes all targets in place.
        """

    @abstractmethod
    def scale(self, sources: Sequence[Buffer], factor: np.float32, destinations: Sequence[Buffer]) -> None:
        """Write destination = source x factor, by one fp32 multiplication and one rounding to the destination's dtype.

        A destination that is its source is not touched if the factor is 1.
        """

    @abstractmethod
    def fill_zero(self, buffers: Sequence[Buffer]) -> None:
        """Write zeros to these buffers."""

    @abstractmethod
    def first_non_finite(self, buffer: Buffer) -> tuple[int, float] | None:
        """Return index and value of the first NaN or Inf, or None. On a GPU this waits."""

    def kept(self, arena: Arena, dtype: np.dtype[Any], *values: Any) -> Kept:
        """Return a record of these fields, which the decisions on this arena's steps read and may change."""
        return Kept(dtype, *values)

    def drops(self, arena: Arena) -> Drops:
        """Return the counts of a window's micro-batches in this arena, for when non-finite ones are dropped."""
        kept = self.kept(arena, drops_of(len(arena.targets)), 0.0, 0, 0.0, 0, 0)
        return Drops(kept, self.partial_sums(arena.partials.sizes, arena.memory))

    def status_readback(self, arena: Arena, plan: ClipPlan) -> StatusReadback | None:
        """Return the readback of the status of this arena's steps, or None if decisions are made on the host."""
        return None
