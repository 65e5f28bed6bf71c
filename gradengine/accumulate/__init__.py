"""Accumulation in fp32, which matches a caller's gradients with their slots, counts them, and adds them to an arena.

The input is gradients by name or in layout order, and their weight. The output is the arena, one flat fp32 buffer. It
holds the weighted sum of the window (the micro-batches of one optimizer step), and the squared sums that folds measure.
To *fold* is to add one or several micro-batches to the arena in one pass. `state.py` is the table of a step's states
and the calls allowed in each. `window.py` counts and touches no array. `intake.py` checks arrays and remembers checked
ones. `accumulator.py` calls the kernels. Imports `layout`, `kernels` and `arrays`, not the exchange.
"""

from gradengine.accumulate.accumulator import PerBlockGradientAccumulator
from gradengine.accumulate.block import BlockGradientSet
from gradengine.accumulate.gpu import GpuGradientAccumulator
from gradengine.accumulate.gradients import Gradients

__all__ = [
    "BlockGradientSet",
    "GpuGradientAccumulator",
    "Gradients",
    "PerBlockGradientAccumulator",
]
