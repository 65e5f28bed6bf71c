"""torch interface: clipping like torch's, a module's gradients into and out of an engine, hooks, fused optimizers.

The only room that imports torch, and not imported by any other: `from gradengine.torch import ...`. On a GPU the
engine's work waits for torch's current stream, and that stream for the engine's.
"""

import sys

from gradengine.engine import GradientEngine
from gradengine.engine.micro_batch import MicroBatch
from gradengine.torch.attached import Attached, attach
from gradengine.torch.clipping import clip_grad_norm_
from gradengine.torch.eager import leave_untraced
from gradengine.torch.fused import step_fused
from gradengine.torch.gradients import drop_unused, give_gradients, gradients_of, layout_of, tensors_of

__all__ = [
    "Attached",
    "attach",
    "clip_grad_norm_",
    "drop_unused",
    "give_gradients",
    "gradients_of",
    "layout_of",
    "step_fused",
    "tensors_of",
]

leave_untraced(sys.modules[__name__], Attached, GradientEngine, MicroBatch)
