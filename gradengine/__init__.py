"""The step between backward() and optimizer.step(), for any framework.

Gradients are read in place and accumulated in fp32 over micro-batches. They are summed over ranks in rank order,
checked, clipped by their global norm, averaged and returned. `GradientEngine` is the whole step. Its parts can also be
used alone.
"""

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.block import BlockGradientSet
from gradengine.accumulate.gpu import GpuGradientAccumulator
from gradengine.arrays.buffer import RawBuffer
from gradengine.clip import (
    FusedClipState,
    clip_by_global_norm,
    clip_gradients_fused,
    clip_lora_gradients_fused,
    init_lora_fused_clip,
)
from gradengine.engine import GradientEngine
from gradengine.engine.result import StepResult
from gradengine.engine.trainer import DistributedTrainer, shard_batches
from gradengine.errors import CallerError, ExchangeError, GradientError, NonFiniteGradient
from gradengine.exchange import (
    Exchange,
    GradientServer,
    connect,
    connect_if_launched,
    local_group,
)
from gradengine.kernels.loss_scale import DynamicLossScale
from gradengine.kernels.spikes import SpikePolicy
from gradengine.layout import GradientLayout
from gradengine.layout.cost import Bandwidth, TensorParallelCost
from gradengine.layout.shards import ColumnParallelShard, RowParallelShard
from gradengine.layout.tensor_parallel import TensorParallelConfig

__version__ = "0.1.0"

__all__ = [
    "Bandwidth",
    "BlockGradientSet",
    "CallerError",
    "ColumnParallelShard",
    "DistributedTrainer",
    "DynamicLossScale",
    "Exchange",
    "ExchangeError",
    "FusedClipState",
    "GpuGradientAccumulator",
    "GradientEngine",
    "GradientError",
    "GradientLayout",
    "GradientServer",
    "NonFiniteGradient",
    "PerBlockGradientAccumulator",
    "RawBuffer",
    "RowParallelShard",
    "SpikePolicy",
    "StepResult",
    "TensorParallelConfig",
    "TensorParallelCost",
    "__version__",
    "clip_by_global_norm",
    "clip_gradients_fused",
    "clip_lora_gradients_fused",
    "connect",
    "connect_if_launched",
    "init_lora_fused_clip",
    "local_group",
    "shard_batches",
]
