"""HF Trainer with an engine, which accumulates, sums over ranks, unscales and clips: a callback, without a subclass.

Not imported by `gradengine.torch`: `from gradengine.torch.transformers import EngineCallback`.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import FrameType
from typing import Any, final

import torch
from transformers import Trainer, TrainerCallback

from gradengine.arguments import refuse_other_kind
from gradengine.engine import GradientEngine
from gradengine.engine.result import StepResult
from gradengine.errors import CallerError
from gradengine.torch.attached import attach
from gradengine.torch.gradients import as_tensor
from gradengine.torch.trainers import leave_sum_to, refuse_doing_twice

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
        self._run = ExitStack()  # undoes at the end of a run what its start did

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach the engine to the model."""
        self._run.close()  # after a run that broke off
        trainer = _calling_trainer()
        if trainer.is_deepspeed_enabled:
            raise CallerError("DeepSpeed accumulates gradients by itself, and the engine would leave it none")
        refuse_doing_twice(self._engine, "max_grad_norm", args.max_grad_norm)
        leave_sum_to(self._engine, trainer.model_wrapped, args.world_size)
        self._engine.discard()
        self._attached = self._run.enter_context(attach(trainer.model, self._engine))
        # What Trainer calls for a norm to log, right after the last backward.
        self._accelerator = trainer.accelerator
        self._accelerator.clip_grad_norm_ = self._norm
        self._run.callback(vars(self._accelerator).pop, "clip_grad_norm_")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Step the engine if Trainer asked for no norm, as before version 5."""
        if self._engine.has_open_window:
            self._step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the run after a step that says stop, and save a checkpoint if Trainer saves any."""
        if self.result is not None and self.result.stop:
            control.should_training_stop = True
            control.should_save |= args.save_strategy != "no"

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hooks."""
        self._run.close()

    def _norm(self, *_: Any, **__: Any) -> torch.Tensor:
        """Step the engine and return its norm, in place of Accelerate's."""
        norm = as_tensor(self._step().norm)
        self._accelerator.unscale_gradients()
        return norm

    def _step(self) -> StepResult:
        self.result = self._attached.step(scaler=self._accelerator.scaler, unscale=False, partial=True)
        return self.result


def _calling_trainer() -> Trainer:
    """The trainer whose event this is: Trainer passes a callback the model, but neither itself nor its accelerator."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    raise CallerError("no Trainer called on_train_begin()", do="call trainer.train()")
