"""HF Trainer with an engine, which accumulates, sums over ranks, unscales and clips: a callback, without a subclass.

Not imported by `gradengine.torch`: `from gradengine.torch.transformers import EngineCallback`.
"""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any, final

import torch
from transformers import Trainer, TrainerCallback

from gradengine.arguments import refuse_other_kind
from gradengine.engine import GradientEngine
from gradengine.engine.result import StepResult
from gradengine.errors import CallerError
from gradengine.torch.attached import Attached, attach
from gradengine.torch.gradients import as_tensor
from gradengine.torch.trainers import leave_sum_to, refuse_clipping_twice, refuse_dividing_again

__all__ = ["EngineCallback"]


@final
class EngineCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that gives an engine each gradient of `trainer.train()`, and steps it where Trainer would clip.

    Trainer still logs `grad_norm` (the engine's, before it clips), steps a GradScaler, and saves. A checkpoint is
    always made between two windows, so it needs nothing of the engine. A window that an interrupted run left in the
    engine is dropped when the next run begins.

    The trainer has `max_grad_norm=0`. It is found when its `train()` begins, by its own frame.

    Args:
        engine: Built with `average="prescaled"`, under fp16 also `on_non_finite="propagate"`; with several ranks, with
            their exchange.

    Raises:
        CallerError: Trainer was passed the class in place of an instance. As `train()` begins: the engine divides
            again, Trainer clips too, DeepSpeed accumulates, or the ranks of Trainer are not those of the engine.
        LayoutMismatch, BufferRefused: As `train()` begins: as `attach`.

    Example::

        args = TrainingArguments("out", max_grad_norm=0, gradient_accumulation_steps=4)
        engine = GradientEngine(layout_of(model), args.device, max_norm=1.0, average="prescaled")
        trainer = Trainer(model, args, callbacks=[EngineCallback(engine)], ...)
        trainer.train()
    """

    result: StepResult | None = None  #: of the last step

    # Trainer calls a class that it is passed without arguments.
    def __init__(self, engine: GradientEngine = None) -> None:  # type: ignore[assignment]
        refuse_other_kind("engine", engine, GradientEngine, do="pass callbacks=[EngineCallback(engine)]")
        self._engine = engine
        self._attached: Attached | None = None  # while it trains

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach the engine to the model."""
        self.on_train_end(args, state, control)
        self._trainer = _calling_trainer()
        refuse_dividing_again(self._engine)
        refuse_clipping_twice("max_grad_norm", args.max_grad_norm)
        if self._trainer.is_deepspeed_enabled:
            raise CallerError("DeepSpeed accumulates gradients by itself, and the engine would leave it none")
        leave_sum_to(self._engine, self._trainer.model_wrapped, args.world_size)
        self._engine.discard()
        self._attached = attach(self._trainer.model, self._engine)
        # What Trainer calls for a norm to log, right after the last backward.
        self._trainer.accelerator.clip_grad_norm_ = partial(self._norm, self._attached)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Step the engine if Trainer asked for no norm, as before version 5."""
        if self._attached is not None and self._engine.has_open_window:
            self._step(self._attached)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hooks."""
        if self._attached is not None:
            self._attached.remove()
            self._attached = None
            vars(self._trainer.accelerator).pop("clip_grad_norm_", None)

    def _norm(self, attached: Attached, *_: Any, **__: Any) -> torch.Tensor:
        """Step the engine and return its norm, in place of Accelerate's."""
        norm = as_tensor(self._step(attached).norm)
        self._trainer.accelerator.unscale_gradients()
        return norm

    def _step(self, attached: Attached) -> StepResult:
        self.result = attached.step(scaler=self._trainer.accelerator.scaler, unscale=False, partial=True)
        return self.result


def _calling_trainer() -> Trainer:
    """The trainer whose event this is: Trainer passes a callback the model, but neither itself nor its accelerator."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    raise CallerError("no Trainer called on_train_begin()", do="call trainer.train()")
