"""Hooks that give an engine each gradient as backward makes it, and free it: the set never exists as a whole."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, SupportsFloat, final

import torch

from gradengine.arguments import refuse_lacking, refuse_other_kind, truth_value
from gradengine.engine import GradientEngine
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch, WindowError
from gradengine.layout import GradientLayout
from gradengine.layout.components import trainable
from gradengine.micro_batch import MicroBatch
from gradengine.result import StepResult
from gradengine.torch.gradients import Parameters, grad_dtype_of, in_memory_order, layout_of, view_for

_BACKWARD_OF_A_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__


def attach(module: Parameters, engine: GradientEngine, *, alone: bool = False) -> Attached:
    """Have each gradient of a module go into an engine as backward makes it, and `.grad` freed.

    Args:
        module: The module of the engine's layout; its parameters lie on the engine's device. Of a wrapped one
            (DistributedDataParallel, torch.compile) the inner module, if the layout is the inner module's.
        engine: With `hold=1`, else the gradients stay until they are folded.
        alone: Each rank of torch.distributed trains a model of its own. Else a step of an engine without an exchange is
            refused where there are several: DistributedDataParallel's own sum is lost with `.grad`.

    Returns:
        What begins micro-batches and steps. Keep it: the hooks are there until it is gone, or its `with` is left.

    Raises:
        LayoutMismatch: The layout is not `layout_of(module)`: names the first parameter that differs.
        BufferRefused: A parameter lies on another device, or has a gradient already.
        CallerError: The module, a part of it or the engine is attached already.

    Example::

        attached = attach(model, engine)
        for tokens, batch in micro_batches:
            with attached.micro_batch(weight=tokens):
                loss_of(model, batch).backward()
        attached.step()
        optimizer.step()
        optimizer.zero_grad()
    """
    refuse_other_kind("engine", engine, GradientEngine)
    parameters, alone = trainable(module), truth_value("alone", alone)
    _refuse_other_layout(layout_of(module), engine.layout)
    device = engine.accumulator.kernels.device.name
    for name, parameter in parameters.items():
        if str(parameter.device) != device:
            what = f"parameter '{name}' is on another device than the engine"
            raise BufferRefused(what, got=parameter.device, expected=device)
        if parameter.grad is not None:
            raise BufferRefused(f"parameter '{name}' has a gradient already", do="call zero_grad() before attach()")
    for other in list(_live):
        other._refuse_same(parameters, engine)
    return Attached(module, parameters, engine, alone=alone)


@final
class Attached(AbstractContextManager["Attached"]):
    """A module whose gradients go into an engine as backward makes them; from `attach`.

    A backward outside of `micro_batch` is a micro-batch of weight 1, which ends with it. Between micro-batches the
    engine may be called by hand, too.
    """

    def __init__(
        self, module: Parameters, parameters: Mapping[str, torch.nn.Parameter], engine: GradientEngine, *, alone: bool
    ) -> None:
        self._module, self._parameters, self._engine, self._alone = module, parameters, engine, alone
        self._within: MicroBatch | None = None  # of the `with`
        self._unentered: MicroBatch | None = None  # made, for a `with` that has not begun
        self._is_paused = False
        self._of_backward: MicroBatch | None = None  # of a backward without one,
        self._backward = -1  # which has this number
        self._given: dict[str, weakref.ref[torch.Tensor]] = {}  # what the last step handed back
        # Weak: torch shows the garbage collector no hooks, and a parameter would keep itself alive by its own.
        take = weakref.WeakMethod(self._take)
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_take, take, name))
            for name, parameter in parameters.items()
        ]
        self._remove = weakref.finalize(self, _remove_all, handles)
        _live.add(self)

    def micro_batch(self, weight: SupportsFloat = 1.0, *, last: bool | None = None) -> AbstractContextManager[None]:
        """A context: the gradients of all backward passes in it are one micro-batch; of a tensor's several, the sum.

        An error in it before the first gradient changes nothing. After a later one, or Ctrl-C, the window takes no
        more: `engine.discard()` drops it.

        Args:
            weight: What the micro-batch counts: 1, or its tokens.
            last: It is the window's last, of which blocks leave for the other workers while backward runs; by default
                as the engine's `micro_batches` says. False where a parameter gets several gradients in it: by several
                backward passes, or by reentrant checkpointing of what uses it twice.

        Raises:
            WindowError: As `GradientEngine.micro_batch`; and at its end, where no parameter got a gradient.

        Example::

            with attached.micro_batch(weight=tokens):
                loss.backward()
        """
        self._drop_unfinished()
        self._unentered = self._engine.micro_batch(weight, last=last)
        return _Passes(self, self._unentered)

    def paused(self) -> AbstractContextManager[None]:
        """A context in which backward leaves `.grad` to torch: for a loss of another model that runs through this one.

        Example::

            with attached.paused():
                loss_of_the_generator(discriminator(generator(noise))).backward()
            discriminator.zero_grad()
        """
        return _Pause(self)

    def step(self, *, scaler: Any = None, unscale: bool = True) -> StepResult:
        """Step the engine, and make each parameter's `.grad` its result, for any optimizer.

        They are views of the arena where all parameters take fp32 gradients, good until the next micro-batch: call
        `zero_grad()` after `optimizer.step()`. Else each is a new tensor of its parameter's dtype, rounded once. None
        stands for a parameter that no worker used, as torch has it. Of a step that the engine skips
        (`on_non_finite="skip"`) all are None, so that `optimizer.step()` changes nothing; on a GPU this waits for it.

        Args:
            scaler: The torch.amp.GradScaler that scaled the window's losses; the engine has `on_non_finite="skip"`.
                The gradients are unscaled by it, and it is updated: in place of `scaler.step` and `scaler.update`
                follows `optimizer.step()` alone.
            unscale: False where a trainer calls `scaler.step` and `scaler.update` itself. Then `.grad` is clipped by
                the true norm and still multiplied by the scale, and the engine has `on_non_finite="pass"`: the scaler
                skips and is updated as ever.

        Returns:
            The engine's result.

        Raises:
            LayoutMismatch: A parameter was replaced, or requires gradients and did not when the hooks were made.
            CallerError: The scaler has scaled no loss, or the engine does not leave the verdict where it belongs; the
                hooks are gone; or torch.distributed has several ranks, and the engine no exchange.
            GradientError: As `GradientEngine.step`; no `.grad` was set.

        Example::

            attached.step(scaler=scaler)
            optimizer.step()
            optimizer.zero_grad()
        """
        self._refuse_lone_rank()
        self._refuse_other_parameters()
        self._drop_unfinished()
        used = scaler if scaler is not None and _is_enabled(scaler) else None
        loss_scale = None if used is None else _scale_of(used, self._engine, unscale=truth_value("unscale", unscale))
        with self._on_torchs_stream():
            result, gradients = self._stepped(loss_scale)
        is_skipped = self._engine.on_non_finite == "skip" and float(result.skipped) > 0
        kept = {} if is_skipped else {n: g for n, g in gradients.items() if n not in result.unused}
        for name, parameter in self._parameters.items():
            parameter.grad = kept.get(name)
        self._given = {name: weakref.ref(gradient) for name, gradient in kept.items()}
        if loss_scale is not None and unscale:
            _tell(used, next(iter(self._parameters.values())).device, is_skipped=is_skipped)
        elif loss_scale is not None and kept:
            torch._foreach_mul_(list(kept.values()), loss_scale)
        return result

    def remove(self) -> None:
        """Take the hooks away; the window stays as it is."""
        self._remove()
        _live.discard(self)

    def _refuse_same(self, parameters: Mapping[str, torch.nn.Parameter], engine: GradientEngine) -> None:
        """Raise `CallerError` where any of these parameters, or the engine, is attached here."""
        own, do = {id(parameter) for parameter in self._parameters.values()}, "remove() what attach() returned first"
        for name, parameter in parameters.items():
            if id(parameter) in own:
                raise CallerError(f"parameter '{name}' is attached to an engine already", do=do)
        if engine is self._engine:
            raise CallerError("the engine is attached to another module", do=do)

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # ---- in backward ----

    def _enter(self, micro_batch: MicroBatch) -> None:
        """The gradients that come next are this micro-batch's."""
        self._within, self._unentered = micro_batch, None

    def _leave(self, micro_batch: MicroBatch, *fault: Any) -> None:
        """They are so no more: it is over, or its backward failed."""
        self._within = None
        with self._on_torchs_stream():
            micro_batch.__exit__(*fault)

    def _take(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Add the gradient of a parameter, which torch has just set, and free it; the next would be added to it."""
        if self._is_paused:
            return
        try:
            gradient = self._new_gradient(name, parameter)
            micro_batch = self._within or self._of_this_backward(name)
            with self._on_torchs_stream():
                micro_batch.add(name, in_memory_order(gradient, parameter))
        finally:
            parameter.grad = None

    def _new_gradient(self, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient, given = parameter.grad, self._given.get(name)
        if gradient is None:
            raise BufferRefused(f"parameter '{name}' has no gradient any more", do="see what other hooks do with it")
        if given is not None and given() is gradient:
            raise BufferRefused(
                f"parameter '{name}' still had the gradient of the last step, or of a pause, when backward began",
                got="a .grad that was there, to which backward adds",
                do="call zero_grad(), with its default set_to_none=True, after each optimizer.step()",
            )
        return gradient.detach()

    def _of_this_backward(self, name: str) -> MicroBatch:
        """The micro-batch that the outermost backward began, which queues its end."""
        number = torch._C._current_graph_task_id()
        if self._of_backward is not None and (number == self._backward or _is_nested()):
            return self._of_backward
        if _is_nested():
            raise WindowError(
                f"the first gradient, of '{name}', came in a backward within a backward",
                got="an end that is not the micro-batch's",
                do="use `with attached.micro_batch():`, or checkpoint(use_reentrant=False)",
            )
        if self._unentered is not None:
            self._unentered = None
            what = "a micro_batch() was made, and backward ran outside of it"
            raise WindowError(what, do="with attached.micro_batch(...): loss.backward()")
        self._drop_unfinished()
        self._of_backward, self._backward = self._engine.micro_batch(), number
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        return self._of_backward

    def _end_of_backward(self) -> None:
        micro_batch, self._of_backward = self._of_backward, None
        if micro_batch is not None:
            with self._on_torchs_stream():
                micro_batch.end()

    def _drop_unfinished(self) -> None:
        """A backward that did not come to its end left a part of a micro-batch, which the engine then refuses."""
        micro_batch, self._of_backward = self._of_backward, None
        self._within = self._unentered = None  # of a `with` that an interrupt kept from being left, or entered
        if micro_batch is not None:
            micro_batch.fail(RuntimeError)

    def _on_torchs_stream(self) -> AbstractContextManager[object]:
        """Within it the engine's work is queued on torch's current stream, on a GPU: no event is needed."""
        device = self._engine.accumulator.kernels.device
        return device.on(None if device.name == "cpu" else torch.cuda.current_stream(torch.device(device.name)))

    # ---- the step ----

    def _stepped(self, loss_scale: float | None) -> tuple[StepResult, Mapping[str, torch.Tensor]]:
        """The result, and each parameter's gradient in its own shape."""
        dtypes = {name: grad_dtype_of(parameter) for name, parameter in self._parameters.items()}
        if all(dtype in (None, torch.float32) for dtype in dtypes.values()):
            result = self._engine.step(loss_scale=loss_scale)
            return result, {name: view_for(p, name, result.gradients) for name, p in self._parameters.items()}
        made = {name: torch.empty_like(p, dtype=dtypes[name]) for name, p in self._parameters.items()}
        out = {name: in_memory_order(made[name], p) for name, p in self._parameters.items()}
        return self._engine.step(out=out, loss_scale=loss_scale), made

    def _refuse_lone_rank(self) -> None:
        if not self._remove.alive:
            raise CallerError("the hooks are gone: remove() was called, or the `with` was left", do="attach() again")
        engine, group = self._engine, torch.distributed
        is_alone = engine.world_size == 1 and engine.tp_exchange is None and not self._alone
        if is_alone and group.is_available() and group.is_initialized() and group.get_world_size() > 1:
            raise CallerError(
                "torch.distributed has several ranks, and the engine no exchange: each would keep its own gradients",
                got=f"world size {group.get_world_size()}, and 1",
                do="build the engine with exchange=connect(); or attach(..., alone=True) where each has its own model",
            )

    def _refuse_other_parameters(self) -> None:
        for name, parameter in trainable(self._module).items():
            if name not in self._parameters:
                what = f"parameter '{name}' requires gradients, and did not when the hooks were made"
                raise LayoutMismatch(what, do="freeze it, or attach() an engine of the new layout_of(module)")
            if parameter is not self._parameters[name]:
                what = f"parameter '{name}' is another tensor than when the hooks were made"
                raise LayoutMismatch(what, do="discard() the window, remove() the hooks and attach() again")


_live: weakref.WeakSet[Attached] = weakref.WeakSet()


@final
class _Passes(AbstractContextManager[None]):
    """The backward passes of one micro-batch. No generator: one that an interrupt leaves suspended would end late."""

    def __init__(self, attached: Attached, micro_batch: MicroBatch) -> None:
        self._attached, self._micro_batch = attached, micro_batch

    def __enter__(self) -> None:
        self._attached._enter(self._micro_batch)

    def __exit__(self, *fault: object) -> None:
        self._attached._leave(self._micro_batch, *fault)


@final
class _Pause(AbstractContextManager[None]):
    """Backward passes whose gradients are torch's; what they leave in `.grad` is refused later, as a step's is."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def __enter__(self) -> None:
        self._attached._is_paused = True

    def __exit__(self, *_: object) -> None:
        self._attached._is_paused = False
        for name, parameter in self._attached._parameters.items():
            if parameter.grad is not None:
                self._attached._given[name] = weakref.ref(parameter.grad)


def _take(take: weakref.WeakMethod[Any], name: str, parameter: torch.nn.Parameter) -> None:
    method = take()
    if method is not None:
        method(name, parameter)


def _remove_all(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def _is_nested() -> bool:
    """Whether a function's own backward, as reentrant checkpointing has one, runs the backward that calls us."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _BACKWARD_OF_A_FUNCTION:
        frame = frame.f_back
    return frame is not None


def _refuse_other_layout(own: GradientLayout, layout: GradientLayout) -> None:
    shapes = [{slot.name: slot.shape for slot in each.slots} for each in (own, layout)]
    for name in shapes[0] | shapes[1]:
        ours, engines = (each.get(name, "none") for each in shapes)
        if ours != engines:
            what = f"the engine's layout is not the module's: component '{name}' differs"
            raise LayoutMismatch(what, got=engines, expected=ours, do="build the engine with layout_of(module)")


# ---- loss scaling ----


def _is_enabled(scaler: Any) -> bool:
    refuse_lacking("scaler", scaler, ("is_enabled", "get_scale", "unscale_", "update"))
    return bool(scaler.is_enabled())


def _scale_of(scaler: Any, engine: GradientEngine, *, unscale: bool) -> float:
    got = f"on_non_finite={engine.on_non_finite!r}"
    if unscale and engine.on_non_finite != "skip":
        do = 'build the engine with on_non_finite="skip"'
        raise CallerError("a GradScaler skips steps, and this engine does not", got=got, do=do)
    if not unscale and engine.on_non_finite != "pass":
        do = 'build the engine with on_non_finite="pass"'
        raise CallerError("a trainer's GradScaler skips by what it finds in .grad", got=got, do=do)
    if getattr(scaler, "_scale", scaler) is None:  # torch makes it with the first loss
        raise CallerError("the scaler has scaled no loss", do="call scaler.scale(loss).backward()")
    return float(scaler.get_scale())


def _tell(scaler: Any, device: torch.device, *, is_skipped: bool) -> None:
    """Update a scaler: an optimizer that stands in for the real one shows it a gradient that is finite, or is not."""
    verdict = torch.zeros(1, device=device, requires_grad=True)
    verdict.grad = torch.full_like(verdict, math.inf if is_skipped else 0.0)
    stand_in = torch.optim.SGD([verdict], lr=0.0)
    scaler.unscale_(stand_in)
    scaler.update()
