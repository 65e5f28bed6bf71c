"""Interface to torch, with hooks, access to a module's gradients, clipping and fused optimizers.

Only this package imports torch, and no other package imports it. Import it with `from gradengine.torch import ...`. On
a GPU the engine's work runs after the work on torch's current stream, and before later work on that stream.
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
