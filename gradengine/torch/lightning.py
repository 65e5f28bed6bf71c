"""A callback for Lightning's automatic optimization, by which an engine accumulates, sums, unscales and clips.

`gradengine.torch` does not import this module. Use `from gradengine.torch.lightning import EngineCallback`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gradengine.arguments import refuse_other_kind
from gradengine.engine import GradientEngine
from gradengine.engine.result import StepResult
from gradengine.errors import CallerError
from gradengine.torch.attached import Attached, attach
from gradengine.torch.trainers import leave_sum_to, refuse_doing_twice

__all__ = ["EngineCallback"]


@final
class EngineCallback(Callback):  # type: ignore[misc]
    """A callback that adds each gradient of `trainer.fit()` to an engine, and steps the engine before the optimizer.

    It wraps the closure that Lightning passes to the module's `optimizer_step`. The engine's state is in Lightning's
    checkpoints, which may be made in the middle of a window. A resumed fit ends with the same bytes.

    Args:
        engine: An engine with `average="prescaled"`, under "16-mixed" also with `on_non_finite="propagate"`, and for
            several ranks with an exchange over them.

    Raises:
        CallerError: `fit()` raises it if optimization is manual, the engine would divide again, `gradient_clip_val` is
            set, the strategy accumulates, or its ranks are not the engine's.
        LayoutMismatch, BufferRefused: Raised by `fit()`, as by `attach`.

    Example::

        engine = GradientEngine(layout_of(module), max_norm=1.0, average="prescaled")
        trainer = Trainer(accumulate_grad_batches=4, callbacks=[EngineCallback(engine)])
        trainer.fit(module, loader)
    """

    result: StepResult | None = None  #: the result of the last step

    def __init__(self, engine: GradientEngine) -> None:
        refuse_other_kind("engine", engine, GradientEngine)
        self._engine = engine
        self._fit = ExitStack()  # undoes the changes of `on_fit_start` at the end of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the window that an interrupted run left, before Lightning loads a checkpoint."""
        self._engine.discard()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the engine to the module."""
        if not pl_module.automatic_optimization:
            do = "call attach() and attached.step() in the module, without this callback"
            raise CallerError("the module uses manual optimization", do=do)
        if trainer.strategy.handles_gradient_accumulation:
            raise CallerError("the strategy accumulates gradients by itself", got=type(trainer.strategy).__name__)
        refuse_doing_twice(self._engine, "gradient_clip_val", trainer.gradient_clip_val)
        leave_sum_to(self._engine, trainer.strategy.model, trainer.world_size)
        attached = self._fit.enter_context(attach(pl_module, self._engine))
        self._fit.callback(vars(pl_module).pop, "optimizer_step", None)
        finish = partial(self._finish, trainer, attached, getattr(trainer.precision_plugin, "scaler", None))
        pl_module.optimizer_step = partial(_optimizer_step, pl_module.optimizer_step, finish)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: object) -> None:
        """Remove the hooks."""
        self._fit.close()

    on_exception = teardown  # after an exception Lightning does not call `teardown`

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state, as tensors."""
        return {name: torch.from_numpy(array) for name, array in self._engine.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the engine's state from a checkpoint."""
        self._engine.load_state_dict(state_dict)

    def _finish(self, trainer: Trainer, attached: Attached, scaler: Any, closure: Callable[[], Any]) -> Any:
        """Run the last micro-batch of a window, then the engine's step, and return the micro-batch's output."""
        output = closure()
        if self._engine.has_open_window:
            self.result = attached.step(scaler=scaler, unscale=False, partial=True)
            trainer.should_stop = trainer.should_stop or bool(self.result.stop)
        return output


def _optimizer_step(
    own: Callable[..., None], finish: Callable[..., Any], epoch: int, batch_idx: int, optimizer: Any, closure: Any
) -> None:
    """Call the module's own `optimizer_step` with the wrapped closure."""
    own(epoch, batch_idx, optimizer, partial(finish, closure))
