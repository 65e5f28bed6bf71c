"""Accumulation on a GPU: the accumulator with its memory reported beforehand, and copies back to a workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsFloat, final

import numpy as np

from gradengine.accumulate.accumulator import GradientAccumulator
from gradengine.accumulate.destinations import destinations_of
from gradengine.accumulate.gradients import Gradients
from gradengine.errors import CallerError
from gradengine.kernels import DeviceLike, HostKernels, chunk_for, kernels_for
from gradengine.layout import GradientLayout, Slot, refuse_no_layout

_GRANULE = 512  # bytes: CuPy's pool gives out multiples of it
_BYTES_A_CHUNK = (8, 4)  # its squared sum, and how many of its elements are not finite
_BYTES_A_COMPONENT = (8, 8, 8, 4)  # K2's sum, count, norm and place in a group
_BYTES_OF_K2 = (8, 8, 8, 8, 4, 112)  # what it keeps of the whole set


@final
class GpuGradientAccumulator(GradientAccumulator):
    """Gradients of a whole model, accumulated in fp32 on a GPU; every call queues its work and returns.

    Args:
        layout: Where each component lies.
        device: "cuda" (the first GPU), "cuda:1", a torch.device, or kernels.
        hold: As for `PerBlockGradientAccumulator`.

    Raises:
        CallerError: `hold` is not a whole number >= 1.
        DeviceUnavailable: CuPy, the driver, the device or NVRTC is missing; the error says which.
        OutOfDeviceMemory: The accumulator does not fit; the error says how much is needed and free, and nothing stays
            allocated.

    Example:
        >>> layout = GradientLayout.transformer(24, 1024, 256, 4096, 32768, embedding=False)
        >>> GpuGradientAccumulator.memory_needed(layout)
        1594624000
    """

    def __init__(self, layout: GradientLayout, device: DeviceLike = "cuda", *, hold: int = 1) -> None:
        kernels = kernels_for(device)
        if isinstance(kernels, HostKernels):
            raise CallerError("this accumulator needs a GPU", got="device 'cpu'", do="use PerBlockGradientAccumulator")
        super().__init__(layout, kernels, hold)

    @staticmethod
    def memory_needed(layout: GradientLayout) -> int:
        """Bytes of device memory that an accumulator of this layout takes: its arena, and less than 1 % for tables.

        An engine with an exchange over sockets also takes `layout.nbytes` of pinned host memory; with another exchange
        at most 16 MiB, or two shares if those are larger.
        """
        refuse_no_layout(layout)
        chunk = chunk_for(layout.num_elements)
        chunks, components = _chunks_of(layout.slots, chunk), len(layout.slots)
        spans = [span.slots for span in layout.spans] if len(layout.spans) > 1 else []
        # Of all slots there are tables of K1, K2 and K3; of each span one of K1, for a window that comes in parts.
        tables = sum(_bytes_of_table(slots, chunk) for slots in (*spans, *[layout.slots] * 3))
        partials = [chunks * size for size in _BYTES_A_CHUNK]
        norms = [components * size for size in _BYTES_A_COMPONENT]
        return tables + sum(map(_taken, (layout.nbytes, *partials, *norms, *_BYTES_OF_K2)))

    def accumulate_block(self, index: int, gradients: Gradients, weight: SupportsFloat = 1.0) -> None:
        """Queue one block's part of a micro-batch: another name of `add_block`.

        Raises:
            LayoutMismatch, BufferRefused, WindowError: As `add_block`.
        """
        self.add_block(index, gradients, weight)

    def accumulate_non_block(self, name: str | int, gradient: object, weight: SupportsFloat = 1.0) -> None:
        """Queue one component outside the blocks, by name or by id: another name of `add_non_block`.

        Raises:
            LayoutMismatch, BufferRefused, WindowError: As `add_non_block`.
        """
        self.add_non_block(name, gradient, weight)

    def copy_block_to(self, index: int, workspace: Gradients) -> None:
        """Queue a copy of a block's current sums to buffers on the device, in their dtype; zeros if nothing was added.

        Args:
            index: The block.
            workspace: A sequence in the block's order, or a mapping by component name; None for one not wanted.

        Raises:
            LayoutMismatch: No such block, a component is missing, unknown or misshapen, or all are None.
            BufferRefused: A buffer cannot be written in place, or two share memory.
        """
        block = self.layout.block(index)
        self._copy(block.slots, workspace, f"the workspace of block {block.index}", f"{block.name}.")

    def copy_non_block_to(self, name: str | int, destination: object) -> None:
        """Queue a copy of the current sum of one component outside the blocks to a buffer on the device, in its dtype.

        Raises:
            LayoutMismatch: No such component outside the blocks, or another shape.
            BufferRefused: The buffer cannot be written in place.
        """
        span = self.layout.non_block_span(name)
        self._copy(span.slots, [destination], span.called)

    def _copy(self, slots: tuple[Slot, ...], workspace: Gradients, where: str, prefix: str = "") -> None:
        destinations = destinations_of(slots, self.kernels.device, self.memory, workspace, where, prefix)
        wanted = [slots[position] for position in destinations]
        self.flush(wanted)  # and be behind all that was queued, whatever the stream
        with self.arena.in_order():
            self.kernels.scale([*map(self.target_of, wanted)], np.float32(1), [*destinations.values()])


def _chunks_of(slots: Sequence[Slot], chunk: int) -> int:
    return sum(-(-slot.size // chunk) for slot in slots)


def _bytes_of_table(slots: Sequence[Slot], chunk: int) -> int:
    """Bytes of a table's rows and entries, as `kernels.launch` uploads them."""
    return _taken(8 * _chunks_of(slots, chunk)) + _taken(24 * len(slots))


def _taken(nbytes: int) -> int:
    return -(-nbytes // _GRANULE) * _GRANULE
