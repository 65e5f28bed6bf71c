"""Offsets of a model's gradients in one flat arena, and their shards under tensor parallelism.

The input is names and shapes, a torch module, a nested mapping, or a transformer's sizes. The output is a
`GradientLayout` with its slots, blocks and spans, or the shards of a `TensorParallelConfig`. A span is the unit sent
between ranks, a block or a component outside the blocks. No gradient is read or written here. Imports `arrays`.
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
