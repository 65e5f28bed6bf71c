"""The accumulator on a GPU, with a report of the memory that it needs, and copies to a workspace."""

from __future__ import annotations

from typing import SupportsFloat, final

import numpy as np

from gradengine.accumulate.accumulator import PerBlockGradientAccumulator
from gradengine.accumulate.destinations import destinations_of
from gradengine.accumulate.gradients import Gradients, in_slot_order
from gradengine.errors import CallerError
from gradengine.kernels import DeviceLike, HostKernels, kernels_for
from gradengine.layout import GradientLayout, Span, refuse_no_layout


@final
class GpuGradientAccumulator(PerBlockGradientAccumulator):
    """An accumulator of a whole model's gradients in fp32 on a GPU. Every call queues its work and returns.

    Args:
        layout: Names, shapes and order of the components.
        device: "cuda" (the first GPU), "cuda:1", a torch.device, or kernels.
        hold: As for `PerBlockGradientAccumulator`.

    Raises:
        CallerError: `hold` is not a whole number >= 1.
        DeviceUnavailable: CuPy, the driver, the device or NVRTC is missing. The error names it.
        OutOfDeviceMemory: The accumulator does not fit. The error contains the bytes needed and free. Nothing stays
            allocated.

    Example:
        >>> layout = GradientLayout.transformer(24, 1024, 256, 4096, 32768, embedding=False)
        >>> GpuGradientAccumulator.memory_needed(layout)
        1606489632
    """

    def __init__(self, layout: GradientLayout, device: DeviceLike = "cuda", *, hold: int = 1) -> None:
        kernels = kernels_for(device)
        if isinstance(kernels, HostKernels):
            raise CallerError("this accumulator needs a GPU", got="device 'cpu'", do="use PerBlockGradientAccumulator")
        super().__init__(layout, kernels, hold=hold)

    @staticmethod
    def memory_needed(layout: GradientLayout) -> int:
        """Return the bytes of device memory that an accumulator takes, which are its arena and 1/128 more for tables.

        An engine with an exchange also takes up to 16 MiB of pinned host memory, or two shares if those are larger.
        """
        refuse_no_layout(layout)
        return layout.nbytes + layout.nbytes // 128

    def accumulate_block(self, index: int, gradients: Gradients, weight: SupportsFloat = 1.0) -> None:
        """Queue one block's part of a micro-batch. This is a second name of `add_block`.

        Raises:
            LayoutMismatch, BufferRefused, WindowError: As `add_block`.
        """
        self.add_block(index, gradients, weight)

    def accumulate_non_block(self, name: str | int, gradient: object, weight: SupportsFloat = 1.0) -> None:
        """Queue one component outside the blocks, by name or by id. This is a second name of `add_non_block`.

        Raises:
            LayoutMismatch, BufferRefused, WindowError: As `add_non_block`.
        """
        self.add_non_block(name, gradient, weight)

    def copy_block_to(self, index: int, workspace: Gradients) -> None:
        """Queue a copy of a block's current sums to buffers on the device, in their dtype. Zeros if nothing was added.

        Args:
            index: Index of the block.
            workspace: A sequence in the block's order, or a mapping by component name. None skips a component.

        Raises:
            LayoutMismatch: No such block, a component is missing, unknown or has the wrong shape, or all are None.
            BufferRefused: A buffer cannot be written in place, or two share memory.
        """
        block = self.layout.block(index)
        self._copy(block, workspace, f"the workspace of {block.called}", f"{block.name}.")

    def copy_non_block_to(self, name: str | int, destination: object) -> None:
        """Queue a copy of the current sum of one component outside the blocks to a buffer on the device, in its dtype.

        Raises:
            LayoutMismatch: No such component outside the blocks, or a wrong shape.
            BufferRefused: The buffer cannot be written in place.
        """
        span = self.layout.non_block_span(name)
        self._copy(span, [destination], span.called)

    def _copy(self, span: Span, workspace: Gradients, where: str, prefix: str = "") -> None:
        ordered = in_slot_order(span.slots, workspace, where, prefix)
        destinations = destinations_of(span.slots, self.kernels.device, self.memory, ordered, where)
        self.flush(span)
        sums = [self.target_of(span.slots[position]) for position in destinations]
        with self.arena.in_order():
            self.kernels.scale(sums, np.float32(1), [*destinations.values()])
