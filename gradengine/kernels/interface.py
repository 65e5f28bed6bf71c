"""The computations on a device as one interface: K1 accumulate, K2 finalise, K3 hand back.

The accumulator, the clip and the engine are written once over `Kernels`; `host.py` implements it in NumPy, `cuda.py` in
CUDA. All lists are parallel: position i in one is position i in every other.
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
    """The operations of one device. Every method is deterministic: same input, same bits, whatever the thread order.

    Attributes:
        device: The device whose memory the kernels work on.
        measures_in_passing: Whether K1's squared sums cost nothing, so that every fold measures them.
    """

    device: Device
    measures_in_passing: bool

    def arena(self, targets: Sequence[Buffer], memory: Buffer | None = None) -> Arena:
        """An arena of these buffers, with room for their squared sums, and the order of work on them over streams.

        Args:
            targets: The buffers to be summed into, or clipped.
            memory: Our memory that the targets are parts of, if any: kept alive until work on it is done.
        """
        return Arena(tuple(targets), self.partial_sums([target.size for target in targets], memory), memory)

    def partial_sums(self, sizes: Sequence[int], memory: Buffer | None = None) -> PartialSums:
        """Room for the squared sums of targets of these sizes; see `arena`."""
        return PartialSums(sizes, self.device.order(memory))

    @abstractmethod
    def prepare(self, arena: Arena, spans: Sequence[Span], plan: ClipPlan | None = None) -> None:
        """Make now what later calls need for this arena, so that none of them allocates."""

    @abstractmethod
    def accumulate(self, arena: Arena, fold: FoldPass, *, measure: bool = False) -> None:
        """K1: fold gradients into fp32 targets; measure what was folded in the same pass."""

    @abstractmethod
    def judge(
        self, arena: Arena, contribution: Contribution, weight: np.float32, drops: Drops, *, is_first: bool
    ) -> Any:
        """Read a micro-batch's gradients, and count its weight, or if one is not finite that it is dropped.

        Args:
            arena: The arena to which the micro-batch is to be added.
            contribution: The gradients of all targets.
            weight: The micro-batch's weight.
            drops: What the window's micro-batches count so far.
            is_first: Whether the micro-batch is the window's first, so that counts begin with it.

        Returns:
            `FoldPass.dropped`.
        """

    @abstractmethod
    def measure(self, arena: Arena, positions: Sequence[int] | None = None) -> None:
        """Measure the squared sums of all targets, or of those at these positions."""

    @abstractmethod
    def totals(self, arena: Arena, kept: Any = None) -> Float64:
        """Each target's squared sum, chunks added in order, on the host: on a GPU this waits.

        `kept` is what `keep_sums` returned, for the squared sums as they were then.
        """

    @abstractmethod
    def keep_sums(self, arena: Arena) -> Any:
        """Copy all squared sums aside, and return the copy; on a GPU one copy there, into memory that is made once."""

    @abstractmethod
    def zero(self, arena: Arena, slots: Span, chosen: npt.NDArray[np.bool_]) -> None:
        """Write zeros to the chosen ones of these targets, and to their squared sums."""

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
        """K2: norms, scales and factors from the squared sums, and which targets are not finite.

        Args:
            arena: An arena whose squared sums are up to date; if its memory is ours, the first bad element is located.
            plan: Which targets share a norm.
            divisor: The number by which the sum is divided to make the average.
            zero_if_bad: Whether zeros are to be handed back if anything is not finite.
            step: The number of the verdict's step, counted from 1; 0 means the one after the last.
            weight: On a GPU an fp64 number there that the divisor is multiplied by. A product that is no divisor gives
                zeros, and a verdict of its own.
            counted: On a GPU the weight there of the micro-batches that were not dropped: 0 skips the step.
            loss_scale: On a GPU a loss scale that the divisor is multiplied by, and that the verdict changes.
            bounds: On a GPU a record of `kept.bounds_of`, read when the work runs; by default the plan's bounds.
            spikes: A policy for spikes, and the norms before this one, which a GPU's verdict changes.
        """

    @abstractmethod
    def hand_back(
        self, arena: Arena, decision: Decision, plan: ClipPlan, destinations: Destinations | None = None
    ) -> None:
        """K3: destination = target x its group's factor, or zeros if the decision says skip. See `scale`.

        Args:
            arena: The arena whose targets are handed back.
            decision: The decision about the targets.
            plan: Which targets share a factor.
            destinations: The destinations by position; None hands back all targets in place.
        """

    @abstractmethod
    def scale(self, sources: Sequence[Buffer], factor: np.float32, destinations: Sequence[Buffer]) -> None:
        """Write destination = source x factor: one fp32 multiplication, then one rounding to the destination's dtype.

        A destination that is its source and has factor 1 is not touched.
        """

    @abstractmethod
    def fill_zero(self, buffers: Sequence[Buffer]) -> None:
        """Write zeros."""

    @abstractmethod
    def first_non_finite(self, buffer: Buffer) -> tuple[int, float] | None:
        """Index and value of the first NaN or Inf, or None; on a GPU this waits."""

    def kept(self, arena: Arena, dtype: np.dtype[Any], *values: Any) -> Kept:
        """Numbers that the decisions on this arena's steps read, and may change: a record of these fields."""
        return Kept(dtype, *values)

    def drops(self, arena: Arena) -> Drops:
        """What the micro-batches of a window count in this arena, if those that are not finite are dropped."""
        kept = self.kept(arena, drops_of(len(arena.targets)), 0.0, 0, 0.0, 0, 0)
        return Drops(kept, self.partial_sums(arena.partials.sizes, arena.memory))

    def status_readback(self, arena: Arena, plan: ClipPlan) -> StatusReadback | None:
        """Reads back the status of steps that K2 decides from this arena; None if decisions are known at once."""
        return None
