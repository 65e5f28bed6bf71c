"""A callback for HF Trainer, by which an engine accumulates, sums over ranks, unscales and clips.

`gradengine.torch` does not import this module. Use `from gradengine.torch.transformers import EngineCallback`.
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
    """A callback that adds each gradient of `trainer.train()` to an engine, and steps the engine when Trainer clips.

    Trainer still logs `grad_norm` (the engine's norm before clipping), steps a GradScaler, and saves. A checkpoint is
    always made between two windows, so it needs no state of the engine. If an interrupted run left a window in the
    engine, the next run drops it.

    The trainer needs `max_grad_norm=0`. The callback finds the trainer in the call stack when `train()` begins.

    Args:
        engine: An engine with `average="prescaled"`, under fp16 also with `on_non_finite="propagate"`, and for several
            ranks with an exchange over them.

    Raises:
        CallerError: Trainer was passed the class in place of an instance. `train()` also raises it if the engine would
            divide again, Trainer clips too, DeepSpeed accumulates, or Trainer's ranks are not the engine's.
        LayoutMismatch, BufferRefused: Raised by `train()`, as by `attach`.

    Example::

        args = TrainingArguments("out", max_grad_norm=0, gradient_accumulation_steps=4)
        engine = GradientEngine(layout_of(model), args.device, max_norm=1.0, average="prescaled")
        trainer = Trainer(model, args, callbacks=[EngineCallback(engine)], ...)
        trainer.train()
    """

    result: StepResult | None = None  #: the result of the last step

    # `engine` has a default because Trainer calls a class in `callbacks` without arguments.
    def __init__(self, engine: GradientEngine = None) -> None:  # type: ignore[assignment]
        refuse_other_kind("engine", engine, GradientEngine, do="pass callbacks=[EngineCallback(engine)]")
        self._engine = engine
        self._run = ExitStack()  # undoes the changes of `on_train_begin` at the end of a run

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach the engine to the model."""
        self._run.close()  # needed after a run that did not reach `on_train_end`
        trainer = _calling_trainer()
        if trainer.is_deepspeed_enabled:
            raise CallerError("DeepSpeed accumulates gradients by itself, and the engine would leave it none")
        refuse_doing_twice(self._engine, "max_grad_norm", args.max_grad_norm)
        leave_sum_to(self._engine, trainer.model_wrapped, args.world_size)
        self._engine.discard()
        self._attached = self._run.enter_context(attach(trainer.model, self._engine))
        # Trainer calls this method right after the last backward, for a norm to log.
        self._accelerator = trainer.accelerator
        self._accelerator.clip_grad_norm_ = self._norm
        self._run.callback(vars(self._accelerator).pop, "clip_grad_norm_")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Step the engine if Trainer computed no norm, as in versions before 5."""
        if self._engine.has_open_window:
            self._step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the run if the step's result has `stop` set, and save a checkpoint if Trainer saves any."""
        if self.result is not None and self.result.stop:
            control.should_training_stop = True
            control.should_save |= args.save_strategy != "no"

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hooks."""
        self._run.close()

    def _norm(self, *_: Any, **__: Any) -> torch.Tensor:
        """Step the engine and return its norm, in place of Accelerate's method."""
        norm = as_tensor(self._step().norm)
        self._accelerator.unscale_gradients()
        return norm

    def _step(self) -> StepResult:
        self.result = self._attached.step(scaler=self._accelerator.scaler, unscale=False, partial=True)
        return self.result


def _calling_trainer() -> Trainer:
    """Return the calling trainer from the stack, because Trainer passes a callback the model but not itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    raise CallerError("no Trainer called on_train_begin()", do="call trainer.train()")
