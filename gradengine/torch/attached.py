"""Hooks that add each gradient to an engine during backward and free it, so that not all gradients exist together."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, SupportsFloat, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradengine.accumulate.state import Call, State
from gradengine.arguments import refuse_lacking, refuse_other_kind, truth_value
from gradengine.engine import GradientEngine
from gradengine.engine.micro_batch import MicroBatch
from gradengine.engine.result import StepResult
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch, WindowError
from gradengine.layout import GradientLayout
from gradengine.layout.components import memory_order, trainable
from gradengine.layout.slots import refuse_other_order
from gradengine.torch.gradients import Parameters, grad_dtype_of, in_memory_order, layout_of, view_for
from gradengine.torch.main_grad import MainGrads, takes_added
from gradengine.torch.weights import buffers_of, parameters_of, refuse_other_weights, send_from_rank_0

_current_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
_note = MicroBatch.note  # the original method, since `leave_untraced` later replaces it and the hooks need no wrapper
_BACKWARD_OF_A_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__
_GIVEN = "_gradengine_given"  # attribute of each .grad that a step has set
_MOST_SCALE = 2.0**64


def attach(module: Parameters, engine: GradientEngine, *, alone: bool = False, main_grad: bool = False) -> Attached:
    """Register hooks that add each gradient of a module to an engine as backward makes it, and free `.grad`.

    Args:
        module: The module that the engine's layout was made from, with its parameters on the engine's device. For a
            wrapped module (DistributedDataParallel, torch.compile) pass the inner one if the layout is the inner one's.
        engine: The engine. With `hold` > 1 the engine keeps the gradients until it folds them.
        alone: True if each rank of torch.distributed trains a different model. With False and several ranks the engine
            needs an exchange, because freeing `.grad` discards the sum of DistributedDataParallel.
        main_grad: Give each parameter a `main_grad`, its view of the arena, for layers of TransformerEngine and
            Megatron-LM that add weight gradients in their GEMM. Each backward needs a `micro_batch()` of weight 1.
            `engine.step()` is then allowed too and leaves the result in `main_grad`.

    Returns:
        The object that begins micro-batches and steps. Keep a reference to it. The hooks are removed when it is
        garbage-collected and at the end of its `with`.

    Raises:
        LayoutMismatch: The layout is not `layout_of(module)`. The message names the first parameter that differs.
        CallerError: The engine is attached already, or a parameter has a `main_grad`.

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
    alone, main_grad = truth_value("alone", alone), truth_value("main_grad", main_grad)
    _refuse_other_layout(layout_of(module), engine.layout)
    if main_grad and engine.on_non_finite == "drop_micro_batch":
        what = "on_non_finite='drop_micro_batch' does not work with main_grad=True"
        raise CallerError(what, do="use on_non_finite='skip'")
    if any(other._engine is engine for other in _live):
        raise CallerError("the engine is attached to a module already", do="remove() what attach() returned first")
    return Attached(module, engine, alone=alone, main_grad=main_grad)


@final
class Attached(AbstractContextManager["Attached"]):
    """A module whose gradients are added to an engine during backward, made by `attach`.

    A backward outside of `micro_batch` is a micro-batch of weight 1, which ends with that backward. The engine may
    also be called directly between micro-batches.
    """

    def __init__(self, module: Parameters, engine: GradientEngine, *, alone: bool, main_grad: bool) -> None:
        self._module, self._engine, self._alone = module, engine, alone
        self._parameters: Mapping[str, torch.nn.Parameter] = trainable(module)
        self._within: MicroBatch | None = None  # the micro-batch of the open `with`
        self._pauses = 0  # number of open `paused()` contexts, which may be nested
        self._of_backward: MicroBatch | None = None  # the micro-batch of a backward outside of `micro_batch`
        self._backward = -1  # autograd's id of that backward
        self._old: dict[str, bool] = {}  # for parameters with a .grad before backward, whether it is an error
        self._orders, self._device = engine.layout.orders, engine.accumulator.kernels.device
        gpu = torch.device(self._device.name).index
        self._current_stream = (lambda: None) if gpu is None else partial(torch._C._cuda_getCurrentRawStream, gpu)
        self._stream: int | None = None  # the stream that made the noted gradients
        self._compared: object = None  # the exchange over which the weights compared equal, or True with a tp_exchange
        self._scaler: Any = None  # the scaler that the last step updated
        self._scale_version = -1  # version counter of the scaler's scale at the start of the window
        _ = engine.accumulator.groups  # copies their tables to a GPU now, not in the first backward
        self._main_grads = MainGrads(self._parameters, engine.accumulator.arrays()) if main_grad else None
        self._remove = weakref.finalize(self, self._made_hooks().close)
        self._refusal = None if main_grad else self._remove  # forbids a bare engine.step(), which sets no .grad
        engine.accumulator.state.hooks = self._refusal
        _live.add(self)

    def _made_hooks(self) -> ExitStack:
        """Register the hooks, and return a stack whose `close` removes them.

        The hooks hold a weak reference to this object. The garbage collector does not see torch's hooks, so that a
        strong reference would keep the parameters alive.
        """
        hooks, own, made = (Attached._look, Attached._take, Attached._refuse_early), weakref.proxy(self), ExitStack()
        look, take, refuse = (partial(torch.compiler.disable(hook), own) for hook in hooks)
        made.callback(register_optimizer_step_post_hook(refuse).remove)
        for name, parameter in self._parameters.items():
            # torch calls the first hook before it adds to `.grad`, and the second one after.
            made.callback(parameter.register_hook(partial(look, name)).remove)
            made.callback(parameter.register_post_accumulate_grad_hook(partial(take, name)).remove)
        if self._main_grads:
            made.callback(self._main_grads.remove)
        return made

    @contextmanager
    def micro_batch(self, weight: SupportsFloat = 1.0, *, last: bool | None = None) -> Iterator[None]:
        """Return a context in which all backward passes form one micro-batch, summing the gradients of a parameter.

        An error before the first gradient changes nothing. After a later error, or Ctrl-C, the window accepts no more
        gradients until `engine.discard()` drops it.

        Args:
            weight: The micro-batch's weight: 1, or its number of tokens.
            last: Whether this is the window's last micro-batch, whose blocks are sent to the other ranks while
                backward runs. The default follows the engine's `micro_batches`. Pass False if a parameter gets several
                gradients, from several backward passes or from reentrant checkpointing of a part that uses it twice.

        Raises:
            WindowError: As `GradientEngine.micro_batch`, and also at the end if no parameter got a gradient.
            CallerError: The parameters of two ranks differ in step 0, as in `step`.

        Example::

            with attached.micro_batch(weight=tokens):
                loss.backward()
        """
        micro_batch = self._begun(weight, last=last)
        if self._main_grads:
            self._refuse_stray()
            with self._device.on(self._current_stream()):
                micro_batch.begin()
        self._within = micro_batch
        try:
            yield
            self._end(micro_batch)
        except BaseException as fault:
            micro_batch.fail(type(fault))
            raise
        finally:
            if self._within is micro_batch:  # after an interrupt this may run later, within a different `with`
                self._within = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which backward sets `.grad` as in plain torch.

        Use it for the loss of a different model whose backward passes through this module.

        Example::

            with attached.paused():
                loss_of_the_generator(discriminator(generator(noise))).backward()
            discriminator.zero_grad()
        """
        if self._main_grads:
            do = "freeze the module, or give the other model's loss a module without main_grad"
            raise CallerError("paused() does not work with main_grad=True", do=do)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def step(self, *, scaler: Any = None, unscale: bool = True, partial: bool = False) -> StepResult:
        """Step the engine, and set each parameter's `.grad` to its result, for any optimizer.

        If all parameters accept fp32 gradients, each `.grad` is a view of the arena, valid until the next micro-batch.
        Call `zero_grad()` after `optimizer.step()`. Otherwise each `.grad` is a new tensor of its parameter's dtype,
        rounded once. A parameter that no rank used gets None, as in torch. After a step that the engine skips
        (`on_non_finite`, `on_spike`) each `.grad` is None, so that `optimizer.step()` changes nothing. On a GPU this
        call waits for the step.

        Args:
            scaler: The torch.amp.GradScaler that scaled the window's losses and no other model's losses. The engine
                needs `on_non_finite="skip"`. This call unscales the gradients and updates the scaler, to at most 2**64.
                Then call `optimizer.step()`, without `scaler.step` and `scaler.update`.
            unscale: False if `scaler.step(optimizer)` and `scaler.update()` follow, as in a trainer, or if several
                models share a scaler. Then `.grad` is clipped by the true norm and still multiplied by the scale. The
                engine needs `on_non_finite="propagate"`, and the scaler skips and updates as usual.
            partial: As `GradientEngine.step`.

        Returns:
            The engine's result.

        Raises:
            LayoutMismatch: A parameter was replaced, has a different memory format, or requires gradients now but did
                not when the hooks were registered.
            CallerError: The scaler has scaled no loss, or serves several models. The engine's `on_non_finite` does not
                fit `scaler`. The hooks were removed. torch.distributed has several ranks, and the engine has no
                exchange. In step 0 a parameter, frozen or not, differs between two ranks; `micro_batch` and backward
                raise this too. Then discard() an open window, and call `broadcast()` on all ranks.
            GradientError: As `GradientEngine.step`. No `.grad` was set.

        After an error that follows the engine's step, such as one in a function of `engine.on_step`, call `discard()`.

        Example::

            attached.step(scaler=scaler)
            optimizer.step()
            optimizer.zero_grad()
        """
        if not self._remove.alive:
            raise CallerError("the hooks were removed, by remove() or at the end of a `with`", do="attach() again")
        self._refuse_lone_rank()
        self._refuse_other_parameters()
        self._drop_unfinished()
        self._refuse_stray()
        self._refuse_other_weights()
        loss_scale, step = self._scale_of(scaler, unscale=unscale), self._engine.current_step
        try:
            return self._handed_over(scaler, loss_scale, unscale=unscale, is_partial=partial)
        except BaseException:
            if self._engine.current_step != step:  # the engine has stepped, but not every .grad is set
                self._engine._reducer.break_off(step)
            raise

    def broadcast(self, *, buffers_only: bool = False) -> None:
        """Copy rank 0's parameters and buffers to all ranks, in place.

        Call it on all ranks, between windows. It sends all parameters, frozen ones too, and all buffers, of any dtype
        and device. With a `tp_exchange`, rank 0 of each `exchange` sends its part of the model. If the
        `exchange` has no other ranks, the call does nothing.

        Call it before an optimizer copies the weights, as an optimizer with fp32 masters does. The optimizer's state
        is not sent.

        Args:
            buffers_only: Send only the buffers, for example before an evaluation on all ranks, because each rank's
                BatchNorm has the statistics of its own data.

        Raises:
            WindowError: A window is open. Nothing has been sent.
            LayoutMismatch: A rank's module has different names, dtypes or shapes than rank 0's. No rank has written.
            ExchangeError: A rank is in a different step, for example because only that rank loaded a saved state, or
                in a different call.
            CallerError: A tensor cannot be read, for example on "meta", or cannot be written because it was made in
                inference_mode(). Or torch.distributed has several ranks, and the engine has no exchange.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed, and some tensors may be rank 0's and some
                the rank's own. Call `engine.reconnect` and then `broadcast` again, on all ranks.

        Example::

            attached = attach(model, engine)
            attached.broadcast()  # each rank may have its own seed; rank 0 may have loaded a checkpoint
        """
        buffers_only = truth_value("buffers_only", buffers_only)
        self._refuse_lone_rank()
        engine, accumulator = self._engine, self._engine.accumulator
        accumulator.state.ask(Call.LOAD, lambda: {"count": accumulator.accumulated_count})
        tensors = buffers_of(self._module) if buffers_only else parameters_of(self._module) | buffers_of(self._module)
        if engine.exchange is not None and engine.world_size > 1:
            send_from_rank_0(engine.exchange, engine.tp_exchange, tensors, engine.current_step)

    def remove(self) -> None:
        """Remove the hooks. The window does not change."""
        self._remove()
        _live.discard(self)

    def __exit__(self, *_: object) -> None:
        self.remove()

    # ---- in backward ----

    def _begun(self, weight: SupportsFloat = 1.0, *, last: bool | None = None) -> MicroBatch:
        """Return a new micro-batch after failing an unfinished one, and record the scaler's version in a new window."""
        self._drop_unfinished()
        self._refuse_other_weights()  # must precede the first block that is sent, because sending cannot be undone
        if self._scaler is not None and not self._engine.has_open_window:
            self._scale_version = self._scaler._scale._version
        return self._engine.micro_batch(weight, last=last)

    def _end(self, micro_batch: MicroBatch) -> None:
        self._add_noted(micro_batch)
        with self._device.on(self._current_stream()):
            micro_batch.end()

    def _refuse_stray(self) -> None:
        """Raise `WindowError` if a layer added to an open window outside of a micro-batch."""
        name = self._main_grads.take_stray() if self._main_grads else None
        if name is not None and self._engine.has_open_window:
            self._engine.accumulator.state.now = State.BROKEN  # lasts until discard()
            what = f"the layer of '{name}' added to main_grad outside of micro_batch(), or in a backward that failed"
            raise WindowError(what, do="discard() the window; use torch.autograd.grad between windows")

    def _look(self, name: str, _: torch.Tensor) -> None:
        """Note a `.grad` to which backward would add; torch.autograd.grad also calls this hook but adds nothing."""
        old = self._parameters[name].grad
        self._old.pop(name, None)
        # Zeros that DistributedDataParallel leaves after its sum are allowed. Zeros that a step set are engine memory.
        if old is not None and not self._pauses:
            self._old[name] = hasattr(old, _GIVEN) or bool(old.any())

    def _take(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Add a parameter's gradient, which torch has just set, and free `.grad`, so that backward cannot add to it."""
        if self._pauses:
            return
        gradient, parameter.grad = parameter.grad, None
        old = self._old.get(name)  # None if backward made a new .grad
        if old:
            do = "call zero_grad() after each optimizer.step(); for another model's loss use `with attached.paused():`"
            raise BufferRefused(f"parameter '{name}' has an old .grad, and backward added to it", do=do)
        if gradient is None:
            raise BufferRefused(f"parameter '{name}' has no gradient any more", do="look for a hook that frees it")
        micro_batch = self._within or self._of_this_backward(name)
        # With zero_out_wgrad the gradient holds the contributions of the parameter's other uses.
        if self._main_grads and takes_added(parameter) and not getattr(parameter, "zero_out_wgrad", False):
            micro_batch.note_added(name)
            return
        if gradient.requires_grad:  # happens with create_graph=True
            gradient = gradient.detach()
        if name in self._orders or not parameter.is_contiguous():
            refuse_other_order(name, memory_order(parameter), self._orders.get(name))
            gradient = in_memory_order(gradient, parameter)
        stream = self._current_stream()
        if stream != self._stream:  # torch synchronizes the streams only at the end of backward
            self._add_noted(micro_batch)
            self._stream = stream
        if _note(micro_batch, name, gradient) or old is not None:
            self._add_noted(micro_batch)

    def _add_noted(self, micro_batch: MicroBatch) -> None:
        """Add the noted gradients on the stream that made them, because later work there may reuse their memory."""
        with self._device.on(self._stream):
            micro_batch.add_noted()

    def _of_this_backward(self, name: str) -> MicroBatch:
        """Return the outermost backward's micro-batch, which starts at the first gradient and has its end queued."""
        if self._main_grads:
            what = f"with main_grad=True the backward of '{name}' ran outside of micro_batch()"
            raise WindowError(what, do="discard() the window; then with attached.micro_batch(): loss.backward()")
        if self._of_backward and (_current_graph_task() == self._backward or _is_nested()):
            return self._of_backward
        if _is_nested() or _is_compiled():
            what = f"the end of the backward that made the gradient of '{name}' cannot be seen: nested or compiled"
            do = "use `with attached.micro_batch():` around each backward, or checkpoint(use_reentrant=False)"
            raise WindowError(what, do=do)
        self._of_backward, self._backward = self._begun(), _current_graph_task()
        _queue_callback(self._end_of_backward)
        return self._of_backward

    def _end_of_backward(self) -> None:
        micro_batch, self._of_backward = self._of_backward, None
        if micro_batch is not None:
            self._end(micro_batch)

    def _drop_unfinished(self) -> None:
        """Fail the micro-batch of an unfinished backward, so that the engine accepts its window only for `discard`."""
        micro_batch, self._of_backward = self._of_backward, None
        self._within = None  # may be left from a `with` that an interrupt ended
        if micro_batch is not None:
            micro_batch.fail(RuntimeError)

    # ---- the step ----

    def _handed_over(self, scaler: Any, loss_scale: float | None, *, unscale: bool, is_partial: bool) -> StepResult:
        """Step the engine, set each `.grad`, and update the scaler."""
        with self._device.on(self._current_stream()):
            result, gradients = self._stepped(loss_scale, is_partial=is_partial)
        is_skipped = self._may_skip and self._device.relaxed(float, result.skipped) > 0
        kept = {} if is_skipped else {n: g for n, g in gradients.items() if n not in result.unused}
        for name, parameter in self._parameters.items():
            parameter.grad = kept.get(name)
        for gradient in kept.values():
            setattr(gradient, _GIVEN, True)
        if loss_scale is not None and unscale:
            is_bad = is_skipped and not self._device.relaxed(float, result.spiked)
            _update(scaler, loss_scale, is_bad=is_bad)
            self._scaler, self._scale_version = scaler, scaler._scale._version
        elif loss_scale is not None and kept:
            torch._foreach_mul_(list(kept.values()), loss_scale)
        return result

    def _stepped(self, loss_scale: float | None, *, is_partial: bool) -> tuple[StepResult, Mapping[str, torch.Tensor]]:
        """Step the engine, and return the result and each parameter's gradient in the parameter's shape."""
        dtypes = {name: grad_dtype_of(parameter) for name, parameter in self._parameters.items()}
        if all(dtype in (None, torch.float32) for dtype in dtypes.values()):
            state = self._engine.accumulator.state
            state.hooks = None  # allows this step, because `_handed_over` sets each .grad after it
            try:
                result = self._engine.step(loss_scale=loss_scale, partial=is_partial)
            finally:
                state.hooks = self._refusal
            return result, {name: view_for(p, name, result.gradients) for name, p in self._parameters.items()}
        made = {name: torch.empty_like(p, dtype=dtypes[name]) for name, p in self._parameters.items()}
        out = {name: in_memory_order(made[name], p) for name, p in self._parameters.items()}
        return self._engine.step(out=out, loss_scale=loss_scale, partial=is_partial), made

    def _scale_of(self, scaler: Any, *, unscale: bool) -> float | None:
        """Return the scale of the window's losses, or None if there is no enabled scaler."""
        if scaler is None:
            return None
        refuse_lacking("scaler", scaler, ("is_enabled", "get_scale", "unscale_", "update"))
        if not scaler.is_enabled():
            return None
        needed = "skip" if truth_value("unscale", unscale) else "propagate"
        if self._engine.on_non_finite != needed:
            got, do = f"on_non_finite={self._engine.on_non_finite!r}", f'build the engine with on_non_finite="{needed}"'
            raise CallerError(f"the engine does not fit a GradScaler with unscale={unscale}", got=got, do=do)
        if not unscale and self._engine.on_spike is not None and self._engine.on_spike.action == "skip":
            what, do = "scaler.step() fails without a .grad and cannot skip a spike", 'use SpikePolicy("clip", ...)'
            raise CallerError(what, do=do)
        if getattr(scaler, "_scale", scaler) is None:  # torch makes the scale with the first loss
            raise CallerError("the scaler has scaled no loss", do="call scaler.scale(loss).backward()")
        if unscale and scaler is self._scaler and scaler._scale._version != self._scale_version:
            do = "step all models that share it with unscale=False and scaler.step(optimizer), then update() it once"
            raise CallerError("the scaler was updated since this window began", do=do)
        return float(scaler.get_scale())

    @property
    def _may_skip(self) -> bool:
        policy = self._engine.on_spike
        skips_spikes = policy is not None and policy.action == "skip"
        return skips_spikes or self._engine.on_non_finite in {"skip", "drop_micro_batch"}

    def _refuse_early(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise `WindowError` after the step of an optimizer that moved no weight because the window is still open.

        The check runs after the optimizer, because the optimizer's hooks or a closure may step the engine.
        """
        if not self._engine.has_open_window:
            return
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {id(parameter) for parameter in self._parameters.values()}
        if all(parameter.grad is None for parameter in held) and any(id(parameter) in own for parameter in held):
            what = "the optimizer moved no weight: the window is open, and every .grad is None"
            raise WindowError(what, do="call attached.step() before optimizer.step()")

    def _refuse_lone_rank(self) -> None:
        engine, group = self._engine, torch.distributed
        is_alone = engine.world_size == 1 and engine.tp_exchange is None and not self._alone
        if is_alone and group.is_available() and group.is_initialized() and group.get_world_size() > 1:
            what = "torch.distributed has several ranks, and the engine has no exchange"
            do = "build the engine with exchange=connect(), or pass alone=True if each rank has its own model"
            raise CallerError(what, do=do)

    def _refuse_other_weights(self) -> None:
        """Raise `CallerError` on all ranks if in step 0 a rank's parameters are not rank 0's.

        The ranks compare once over each exchange, because a rank may join again in step 0. With a `tp_exchange` the
        ranks compare only once. Otherwise a part with a replaced exchange would wait for the other parts.
        """
        engine = self._engine
        group = engine.exchange if engine.tp_exchange is None else True
        if engine.current_step or engine.exchange is None or engine.world_size == 1 or self._compared is group:
            return
        refuse_other_weights(engine.exchange, engine.tp_exchange, parameters_of(self._module))
        self._compared = group

    def _refuse_other_parameters(self) -> None:
        for name, parameter in trainable(self._module).items():
            if self._parameters.get(name) is not parameter:
                what = f"parameter '{name}' was replaced, or required no gradients when the hooks were made"
                raise LayoutMismatch(what, do="freeze it; or discard() the window, remove() the hooks, attach() again")
            refuse_other_order(name, memory_order(parameter), self._orders.get(name))


_live: weakref.WeakSet[Attached] = weakref.WeakSet()


def _is_compiled() -> bool:
    """Return whether compiled autograd runs the current backward, at whose end it runs no callbacks."""
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)


def _is_nested() -> bool:
    """Return whether the current backward runs inside another one, as in reentrant checkpointing."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _BACKWARD_OF_A_FUNCTION:
        frame = frame.f_back
    return frame is not None


def _refuse_other_layout(own: GradientLayout, layout: GradientLayout) -> None:
    ours, engines = ({slot.name: slot.shape for slot in each.slots} for each in (own, layout))
    for slot in own.slots:
        refuse_other_order(slot.name, slot.order, layout.orders.get(slot.name))
    for name in ours | engines:
        got, expected = engines.get(name, "none"), ours.get(name, "none")
        if got != expected:
            what = f"the engine's layout is not the module's: component '{name}' differs"
            raise LayoutMismatch(what, got=got, expected=expected, do="build the engine with layout_of(module)")


def _update(scaler: Any, loss_scale: float, *, is_bad: bool) -> None:
    """Update a scaler through a dummy optimizer, whose gradient is Inf if `is_bad` and otherwise 0."""
    verdict = torch.zeros_like(scaler._scale, requires_grad=True)
    verdict.grad = torch.full_like(verdict, math.inf if is_bad else 0.0)
    scaler.unscale_(torch.optim.SGD([verdict], lr=0.0))
    scaler.update()
    if loss_scale > _MOST_SCALE / 2:  # bf16 gradients do not overflow, so nothing else limits the scale
        scaler.update(min(float(scaler.get_scale()), _MOST_SCALE))
