"""Offsets of a model's gradients in one flat arena, and their shards under tensor parallelism.

In: names and shapes (or a torch module, a nested mapping, a transformer's sizes). Out: `GradientLayout`, its slots,
blocks and spans (the units sent between workers: a block, or a component outside the blocks), and the shards of a
`TensorParallelConfig`. No gradient is read or written here. Imports `arrays`.
"""

from gradengine.layout.layout import (
    BLOCK_COMPONENTS,
    LORA_COMPONENTS,
    NON_BLOCK_COMPONENTS,
    GradientLayout,
    layout_from_table,
    refuse_no_layout,
)
from gradengine.layout.slots import Slot, Span

__all__ = [
    "BLOCK_COMPONENTS",
    "LORA_COMPONENTS",
    "NON_BLOCK_COMPONENTS",
    "GradientLayout",
    "Slot",
    "Span",
    "layout_from_table",
    "refuse_no_layout",
]
