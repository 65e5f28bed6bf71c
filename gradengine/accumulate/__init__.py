"""Micro-batches add up in fp32: a caller's gradients are matched with their slots, counted, and folded into an arena.

In: gradients by name or in layout order, and their weight. Out: the arena, one flat fp32 buffer, with the weighted sum
of the window (the micro-batches of one optimizer step), and the squared sums measured on the way. `state.py` says where
a step stands and what may be called then, `window.py` counts and touches no array, `intake.py` knows arrays that come
again, `accumulator.py` has the kernels fold. Imports `layout`, `kernels` and `arrays`; knows of no exchange.
"""

from gradengine.accumulate.accumulator import GradientAccumulator, PerBlockGradientAccumulator
from gradengine.accumulate.block import BlockGradientSet
from gradengine.accumulate.gpu import GpuGradientAccumulator
from gradengine.accumulate.gradients import Gradients

__all__ = [
    "BlockGradientSet",
    "GpuGradientAccumulator",
    "GradientAccumulator",
    "Gradients",
    "PerBlockGradientAccumulator",
]
