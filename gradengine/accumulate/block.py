"""The gradients of one block, and the operations on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import numpy as np

from gradengine.accumulate.gradients import Gradients, NamedArrays, in_slot_order, matched_views
from gradengine.arguments import as_float, out_of_range, refuse_other_kind
from gradengine.arrays.buffer import Buffer
from gradengine.errors import BufferRefused, LayoutMismatch, not_copied
from gradengine.kernels import Arena, Contribution, FoldPass, Kernels, kernels_for
from gradengine.kernels.decision import SMALLEST_FACTOR
from gradengine.layout.slots import Span


@final
class BlockGradientSet:
    """The gradients of one block, which are a range of fp32 memory and the components in it.

    A call that is interrupted, as by Ctrl-C, leaves the block half written. Then call `zero()`, or replace all its
    gradients.

    Args:
        block: The block, from `layout.blocks`.
        kernels: The device's kernels; NumPy on the CPU by default.
        arena: The layout's arena, which contains the block. By default the block gets separate zeroed memory.
        slots: The positions of the block's components among the arena's targets, in order; by default all.
        writing: Function that returns the context for writes to the block, or raises. By default the context only
            orders the work.

    Example:
        >>> from gradengine import GradientLayout
        >>> layout = GradientLayout.transformer(1, 4, 2, 8, 16)
        >>> block = BlockGradientSet(layout.blocks[0])
        >>> block.component_sizes
        (16, 8, 8, 16, 32, 32, 32, 4, 4)
    """

    __reduce_ex__ = not_copied("make a new one for the block, and pass flatten() to its from_flat()")

    def __init__(
        self,
        block: Span,
        kernels: Kernels | None = None,
        arena: Arena | None = None,
        slots: Span | None = None,
        writing: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        refuse_other_kind("block", block, Span, do="pass one of layout.blocks")
        self._block, self._kernels = block, kernels_for("cpu" if kernels is None else kernels)
        whole, start, stop = None if arena is None else arena.memory, block.start, block.stop
        self._memory = self._kernels.device.allocate(stop - start) if whole is None else whole.part(start, stop)
        if arena is None:
            targets = [self._memory.part(slot.offset - start, slot.stop - start) for slot in block.slots]
            self._arena = self._kernels.arena(targets, self._memory)
        else:
            self._arena = arena
        self._slots, self._writing = slots or self._arena.whole, writing or self._arena.in_order
        self._targets = [self._arena.targets[position] for position in self._slots.positions]
        if arena is None:
            self.zero()

    @property
    def components(self) -> Mapping[str, Any]:
        """Component name without the block's ("w_q") -> view of its gradient in its shape.

        On a GPU the views, and that of `flatten`, can be read on the streams that are current at this call.
        """
        self._arena.follow()
        slots, prefix = self._block.slots, f"{self._block.name}."
        names = [slot.name.removeprefix(prefix) for slot in slots]
        pairs = zip(slots, self._targets, strict=True)
        views = [self._kernels.device.array(target, slot.shape) for slot, target in pairs]
        orders = {name: slot.order for name, slot in zip(names, slots, strict=True) if slot.order is not None}
        return NamedArrays(dict(zip(names, views, strict=True)), orders)

    @property
    def component_sizes(self) -> tuple[int, ...]:
        """The number of elements of each component, in order."""
        return tuple(slot.size for slot in self._block.slots)

    def flatten(self) -> Any:
        """Return the whole block as one flat view, without a copy.

        A component whose size is not a multiple of 32 is followed by padding, which is zero.
        """
        self._arena.follow()
        return self._kernels.device.array(self._memory, (self._memory.size,))

    def from_flat(self, flat: object) -> None:
        """Replace the block's gradients by those of a flat array like that of `flatten`. Padding is not copied.

        Raises:
            LayoutMismatch: The array has the wrong length.
            BufferRefused: The array is not contiguous fp32, fp16 or bf16 on this device.
        """
        view = self._kernels.device.view(flat, self._block.name)
        if view.size != self._memory.size:
            raise LayoutMismatch(
                f"flat gradient of {self._block.called} has the wrong length",
                got=f"{view.size} elements",
                expected=f"{self._memory.size} elements (padding between components included)",
            )
        start = self._block.start
        sources = [view.part(slot.offset - start, slot.stop - start) for slot in self._block.slots]
        self._write(sources, overwrite=True)

    def accumulate(self, gradients: Gradients) -> None:
        """Add gradients, a sequence in order or a mapping by component name, to the block. None adds nothing.

        Raises:
            LayoutMismatch: A component is missing, unknown or has the wrong shape.
            BufferRefused: A gradient's dtype, device, strides or memory is not supported, or it overlaps the block and
                is not the component itself.
        """
        slots = self._block.slots
        sources = in_slot_order(slots, gradients, self._block.called, f"{self._block.name}.")
        self._write(matched_views(slots, sources, self._kernels.device.views), overwrite=False)

    def scale(self, divisor: float) -> None:
        """Divide by `divisor` in one multiplication by fp32(1 / divisor).

        Raises:
            CallerError: 1 / divisor is not a normal fp32 number, because the divisor is not finite, or is too small or
                too large.
        """
        number = as_float(divisor)
        if not SMALLEST_FACTOR <= abs(number) <= 1 / SMALLEST_FACTOR:  # NaN is refused too.
            raise out_of_range("a divisor", divisor, "a finite number in +-(2**-126..2**126)")
        factor = np.float32(1 / number)
        with self._writing():
            self._kernels.scale(self._targets, factor, self._targets)

    def zero(self) -> None:
        """Write zeros, padding included."""
        with self._writing():
            self._kernels.fill_zero([self._memory])

    def has_non_finite(self) -> bool:
        """Return whether any component holds NaN or Inf."""
        with self._arena.in_order():
            return any(self._kernels.first_non_finite(target) is not None for target in self._targets)

    def _write(self, sources: Sequence[Buffer | None], *, overwrite: bool) -> None:
        for slot, source, target in zip(self._block.slots, sources, self._targets, strict=True):
            if source and source.pointer != target.pointer and source.overlaps(self._memory):
                raise BufferRefused(
                    f"the gradient for component '{slot.name}' overlaps the memory of this block",
                    got=f"address {source.pointer:#x}",
                    expected="memory outside the block",
                    do="pass a copy",
                )
        contribution = Contribution.of(self._slots, sources)
        is_first = np.full(len(sources), overwrite)
        with self._writing():
            self._kernels.accumulate(self._arena, FoldPass(self._slots, is_first, [contribution], [np.float32(1)]))
