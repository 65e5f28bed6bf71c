"""The whole step: micro-batches in, one averaged, checked, clipped gradient out, the same on every worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, SupportsFloat, final

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.destinations import handed_back
from gradengine.accumulate.gradients import Gradients, in_slot_order
from gradengine.accumulate.state import Call, State
from gradengine.accumulate.window import checked_weight, weighs_nothing, weight_as_float
from gradengine.arguments import said, truth_value, whole_number
from gradengine.arrays.buffer import Array
from gradengine.clip import Groups, MaxNorm, clip_plan
from gradengine.engine import settings
from gradengine.engine.capture import CapturedWindow, refuse_other_graph
from gradengine.engine.checkpoint import Content, loaded_state, saved_state
from gradengine.engine.clipping import Clipping
from gradengine.engine.deciding import Deciding
from gradengine.engine.loss_scaling import LossScaling, checked_loss_scale
from gradengine.engine.micro_batch import MicroBatch
from gradengine.engine.ranges import in_range
from gradengine.engine.result import DeferredErrors, Observers, StepResult
from gradengine.engine.settings import Average, OnNonFinite
from gradengine.errors import CallerError, not_copied
from gradengine.exchange.exchange import Exchange
from gradengine.kernels import DeviceLike, StepStatus, kernels_for
from gradengine.kernels.loss_scale import DynamicLossScale
from gradengine.kernels.spikes import SpikePolicy
from gradengine.layout import GradientLayout, Span, refuse_no_layout
from gradengine.reduction.reducer import Reducer, refuse_other_worker, whole

_SET_ONCE = {"layout", "accumulator", "micro_batches", "on_non_finite", "on_spike", "average"}


@final
class GradientEngine:
    """Accumulates micro-batches in fp32, sums them over workers, checks, clips, averages and hands back.

    Every call checks its arguments before it changes anything. A step that failed can be run again: call `step()` once
    more, after `reconnect` if the exchange was lost; or drop the window by `discard()`. A call that was interrupted, as
    by Ctrl-C or by what a signal handler raises, leaves the step broken and the exchange closed: call `discard()`, then
    `reconnect`. To stop all ranks after a whole step call `stop_after_step()` in the handler.

    On a GPU nothing waits for the device: work is queued on the current CuPy stream, and norm, scale and verdict are
    arrays on the device. A gradient that is not finite is handed back as zeros, and its error is raised late, by the
    first `add` or `step` that sees the verdict (`result.check()` waits and raises it at once). With an exchange a step
    waits for the workers' sums.

    Args:
        layout: The components: names, shapes and order.
        device: "cpu", "cuda" (the first GPU), "cuda:1", a torch.device, or kernels.
        max_norm: Bound of the global norm, or one bound for each group, by name. None (default) clips nothing; the norm
            is measured all the same. 0 is refused.
        exchange: Sums over workers; None for one worker. For a part of a model: over the workers with the same part.
        on_non_finite: "raise" a `NonFiniteGradient`; "skip" the step on all workers; or "propagate" the gradient
            unclipped: with groups only the group that holds it, while each other group keeps its bound.
            "drop_micro_batch" reads each micro-batch before it is added, and leaves out one that is not finite, with
            its weight. The rest of the window is a step; one of which nothing is left is skipped.
        micro_batches: Micro-batches in a window, if known: the last one measures the norm in the same pass, and its
            spans are sent to the other workers at once. More are refused, of any block, as fewer are by `step()`.
        hold: Micro-batches kept by reference and added in one pass; their buffers must stay unchanged until then.
        groups: Components that share a norm: None (all), "block", "component", a mapping name -> group, or a function.
        average: "weighted" is the mean over all micro-batches by weight; "per_worker" the mean of the workers' means;
            "prescaled" the weighted sum, for a loss that was scaled before backward, as HF Trainer, Accelerate and
            Lightning do; over workers the mean of all workers' sums, as in torch's DistributedDataParallel.
        loss_scale: What the loss was multiplied by; undone in the same multiplication. The engine cannot see a torch
            GradScaler: pass `scaler.get_scale()` here, or norm and `max_norm` are those of the scaled gradient.
            A `DynamicLossScale` changes by GradScaler's rule, by the steps that are skipped.
        on_spike: What is done about a step whose global norm is far above those before it; None does nothing.
        measure_noise: Add the gradient noise scale to `result.metrics()`, from norms that are measured in passing.
        tp_exchange: The exchange over the ranks that hold the other parts of this worker's model, for a layout of a
            part: its rank is the layout's `tp_rank`. Norm, scale and verdict are then the whole model's. Replicated
            gradients must be the same on these ranks, which is checked: under sequence parallelism all-reduce them
            before `add`, as Megatron-LM and DTensor do.

    Raises:
        CallerError: An argument is out of range, or a part of a model would be clipped or skipped by itself.
        DeviceUnavailable, OutOfDeviceMemory: The device cannot be used, or has too little memory.
        HandshakeRefused, PeerLost, DeadlineExceeded: The workers could not form a group.

    Attributes:
        layout: The components.
        accumulator: The accumulator that holds the window.
        micro_batches: Micro-batches in a window, if known.
        on_non_finite: What is done with a gradient that is not finite.
        on_spike: The policy for spikes of the norm, if there is one.
        average: What the sum is divided by.

    Example:
        >>> engine = GradientEngine(GradientLayout.of({"w": (2,)}), max_norm=1.0)
        >>> engine.add({"w": np.array([6, 0], np.float32)})
        >>> engine.add({"w": np.array([0, 8], np.float32)})
        >>> result = engine.step()
        >>> result.norm, result.scale, result.gradients["w"]
        (5.0, 0.2, array([0.6, 0.8], dtype=float32))
    """

    __reduce_ex__ = not_copied("build another, and load_state_dict() what state_dict() saved")

    def __init__(
        self,
        layout: GradientLayout,
        device: DeviceLike = "cpu",
        max_norm: MaxNorm = None,
        exchange: Exchange | None = None,
        on_non_finite: OnNonFinite = "raise",
        micro_batches: int | None = None,
        *,
        hold: int = 1,
        groups: Groups = None,
        average: Average = "weighted",
        loss_scale: float | DynamicLossScale = 1.0,
        on_spike: SpikePolicy | None = None,
        measure_noise: bool = False,
        tp_exchange: Exchange | None = None,
    ) -> None:
        refuse_no_layout(layout)
        settings.refuse_bad_exchanges(exchange, tp_exchange)
        plan, names = clip_plan(layout.slots, max_norm, groups)
        shared = settings.shared_settings(plan, on_non_finite, average, loss_scale, on_spike)
        self.micro_batches = None if micro_batches is None else whole_number("micro_batches", micro_batches, 1)
        if not isinstance(loss_scale, DynamicLossScale):
            loss_scale = checked_loss_scale(loss_scale)
        settings.refuse_lone_part(layout, tp_exchange, plan, on_non_finite, on_spike)
        self.layout, self.on_non_finite, self.on_spike, self.average = layout, on_non_finite, on_spike, average
        is_shared = exchange is not None and exchange.shares_memory
        self.accumulator = PerBlockGradientAccumulator(
            layout, kernels_for(device), hold=hold, is_shared=is_shared, drops=on_non_finite == "drop_micro_batch"
        )
        self._kernels, self._state = self.accumulator.kernels, self.accumulator.state
        self._state.has_engine = True
        self._shared, self._clipping = shared, Clipping(plan, names, self.accumulator, shared)
        bounds = self._clipping.bounds
        self._reducer = Reducer(self.accumulator, average=average, settings=shared, plan=plan, bounds=bounds)
        self._late = DeferredErrors.of(self.accumulator, plan, raises=on_non_finite == "raise")  # on a GPU
        self._scaling = LossScaling(loss_scale, self.accumulator)
        self._deciding = Deciding(self._reducer, self._clipping, self._scaling, on_non_finite, on_spike, average)
        self._captures: list[CapturedWindow] = []  # the one that records now, if any
        self._observers: Observers = {}
        self._kernels.prepare(self.accumulator.arena, (), plan)
        if settings.measures_noise(layout, on_non_finite, measure_noise=measure_noise):
            self.accumulator.keep_first_folds()
        if exchange is not None or tp_exchange is not None:
            self.reconnect(exchange, tp_exchange=tp_exchange)

    @property
    def current_step(self) -> int:
        """The number of the step whose window is open, counted from 0."""
        return self._reducer.step

    @property
    def exchange(self) -> Exchange | None:
        """The exchange over workers that this engine joined, if there is one."""
        return self._reducer.workers

    @property
    def tp_exchange(self) -> Exchange | None:
        """The exchange over the other parts of this worker's model, if there is one."""
        return self._reducer.parts.exchange

    @property
    def loss_scale(self) -> Any:
        """What the loss of the open window is multiplied by; may be set between windows, unless it is a dynamic one.

        A dynamic one is on a GPU always the same 0-d fp32 array, which each step writes anew: no wait.
        With a torch GradScaler set it to `scaler.get_scale()` before each window, and do without `scaler.unscale_` and
        `scaler.step`, which would unscale a second time. A captured window keeps the scale it was captured with.

        Raises:
            WindowError: The scale is set while a window is open.
            CallerError: The scale is out of range, or a dynamic one.
        """
        return self._scaling.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._scaling.set(value, self._reducer.facts)

    @property
    def max_norm(self) -> MaxNorm:
        """The bound of the global norm, or one for each group by name; None clips nothing. May be set between windows.

        Set it to the same value on all workers, whose steps compare it. A captured step reads it at each replay. It is
        saved by `state_dict`, and `load_state_dict` brings it back.

        Raises:
            WindowError: The bound is changed while a window is captured, or open and its step has not failed.
            CallerError: A bound is 0, negative or NaN, or a group's is missing.

        Example:
            >>> engine = GradientEngine(GradientLayout.of({"w": (2,)}), max_norm=1.0)
            >>> engine.max_norm = 2.5
            >>> engine.add({"w": np.array([3, 4], np.float32)})
            >>> engine.step().scale
            0.5
        """
        return self._clipping.value

    @max_norm.setter
    @whole
    def max_norm(self, value: MaxNorm) -> None:
        plan = self._clipping.with_bounds(value)
        settings.refuse_lone_part(self.layout, self.tp_exchange, plan, self.on_non_finite, self.on_spike)
        if plan.max_norms != self._clipping.plan.max_norms:
            change = {"setting": "bound", "change": f"max_norm={value}"}
            self._clipping.use(plan, self._state.ask(Call.SET, lambda: {**self._reducer.facts(), **change}))

    @property
    def latest_verdict(self) -> StepStatus | None:
        """The newest verdict that a GPU has reported: norm, scale, whether the step was skipped. Late, but never waits.

        None until the first report has arrived, and on the CPU, where each step's result has it at once.
        """
        self._kernels.device.refuse_failed(asks=True)
        return None if self._late is None else self._late.latest()

    @property
    def rank(self) -> int:
        """This worker's rank; 0 without an exchange."""
        return self._reducer.worker[0]

    @property
    def world_size(self) -> int:
        """Workers that exchange, each with a whole model or the same part of one; 1 without an exchange."""
        return self._reducer.worker[1]

    @in_range
    @whole
    def add(self, gradients: Gradients | None, weight: SupportsFloat = 1.0) -> None:
        """Add a micro-batch.

        Args:
            gradients: Mapping name -> gradient or a sequence in layout order, of any framework, fp32, fp16 or bf16, on
                the engine's device. A component without a gradient is given as None, but not all components may be. A
                worker that has no micro-batch in a window calls `add(None, weight=0)` before its step.
            weight: What the micro-batch counts in the average: 1, or its tokens.

        Raises:
            LayoutMismatch: A component is missing, unknown or misshapen.
            BufferRefused: A gradient's dtype, device, strides or memory is not supported.
            WindowError: A bad weight, None for all components (as after a `zero_grad()` that was called too early), a
                full window, or an earlier step that failed or is broken.
        """
        self._ask(Call.ADD if gradients is not None else Call.ADD_NOTHING)
        ends = settings.is_last(self.micro_batches, "the window", self.accumulator.accumulated_count)
        if gradients is None:
            if weight_as_float(weight) != 0:
                raise weighs_nothing(weight)
            self.accumulator.add_nothing()
            return
        is_alone = self._reducer.is_only_worker
        self.accumulator.add(gradients, weight, measure=ends and (is_alone or self.accumulator.keeps_first))
        if self._captures:
            self._captures[0].keep(self.layout.slots, gradients)
        if ends and not is_alone and self.accumulator.is_even:
            self._reducer.start(self.layout.spans)

    @whole
    def add_block(self, index: int, gradients: Gradients, weight: SupportsFloat = 1.0, *, last: bool = False) -> None:
        """Add one block's part of a micro-batch, as backward finishes it.

        Args:
            index: The block.
            gradients: A sequence in the block's order, or a mapping by component name.
            weight: The micro-batch's weight, the same for all its parts.
            last: This is the window's last contribution to the block, so the block can be sent to the other workers.

        Raises:
            LayoutMismatch, BufferRefused, WindowError: As `add`.
        """
        block = self.layout.block(index)
        add = partial(self.accumulator.add_block, index, gradients, weight)
        self._add_part(block, add, gradients, truth_value("last", last), f"{block.name}.")

    @whole
    def add_non_block(
        self, name: str | int, gradient: object, weight: SupportsFloat = 1.0, *, last: bool = False
    ) -> None:
        """Add one component outside the blocks, by name or id; otherwise as `add_block`.

        Raises:
            LayoutMismatch, BufferRefused, WindowError: As `add`.
        """
        add = partial(self.accumulator.add_non_block, name, gradient, weight)
        self._add_part(self.layout.non_block_span(name), add, [gradient], truth_value("last", last))

    def _add_part(
        self, span: Span, add: Callable[..., None], gradients: Gradients, last: bool, prefix: str = ""
    ) -> None:
        self._ask(Call.ADD_PART)
        settings.is_last(self.micro_batches, f"the window of {span.called}", self.accumulator.count_of(span))
        add(measure=last and (self._reducer.is_only_worker or self.accumulator.keeps_first))
        if self._captures:
            self._captures[0].keep(span.slots, gradients, prefix)
        if last:
            self._reducer.start((span,))

    def micro_batch(self, weight: SupportsFloat = 1.0, *, last: bool | None = None) -> MicroBatch:
        """A micro-batch whose gradients are added one by one, in any order, as backward makes them.

        Args:
            weight: What the micro-batch counts in the average.
            last: Whether it is the window's last, in which each block is sent to the other workers as soon as its
                components are in; by default as `micro_batches` says. False if a component is added more than once.

        Raises:
            WindowError: A bad weight, a window that is full or captured, or an earlier step that failed.

        Example:
            >>> engine = GradientEngine(GradientLayout.of({"w": (2,), "b": (1,)}))
            >>> with engine.micro_batch() as micro_batch:
            ...     micro_batch.add("w", np.array([3, 4], np.float32))
            >>> engine.step().norm
            5.0
        """
        self._ask(Call.BEGIN)
        settings.is_last(self.micro_batches, "the window", self.accumulator.accumulated_count)  # before backward runs
        last = None if last is None else truth_value("last", last)
        kept = float(checked_weight(weight))
        return MicroBatch(self._reducer, self.micro_batches, kept, last)

    @in_range
    def step(
        self,
        out: Gradients | None = None,
        *,
        deferred: bool = False,
        loss_scale: float | None = None,
        partial: bool = False,
    ) -> StepResult:
        """Close the window: sum over workers, check, clip, average and hand back.

        Args:
            out: Destinations, a mapping or sequence as for `add`, written in their dtype; None for a component that is
                not wanted. By default the gradients are handed back in the arena.
            deferred: Leave the sum unscaled, in `result.sums`, for an optimizer that multiplies by `result.factor`
                itself and reads `result.skipped`: one pass less.
            loss_scale: What the window's losses were multiplied by, if not set before; becomes the engine's, also
                if the step fails: `step()` runs it again with this scale, or another, unless the workers agreed on it.
            partial: Allow fewer micro-batches than the engine's `micro_batches`, as in the last window of an epoch.

        Returns:
            The result; a later `add` overwrites its gradients.

        Raises:
            WindowError: Nothing was added, or nothing that counts on any worker; the window is short of
                `micro_batches`, or a component of the window's; the window's weight times the loss scale is outside
                2**-126..2**126; an interrupt left the window broken; or the engine is attached: use `attached.step()`.
            BufferRefused, LayoutMismatch: A destination cannot be written; nothing has been done then.
            NonFiniteGradient: NaN or Inf, with on_non_finite="raise"; the window is kept. On a GPU: an earlier step's,
                whose gradients were handed back as zeros.
            ExchangeError: The exchange failed, or the workers' settings or sums differ; the window is kept.
        """
        if self._state.hooks is not None and out is None and not deferred:
            self._state.refuse_bare_step(self._reducer.facts)
        result = self._step(out, truth_value("deferred", deferred), loss_scale, truth_value("partial", partial))
        for callback in list(self._observers.values()) if not self._captures else ():
            callback(result)
        return result

    @whole
    def _step(self, out: Gradients | None, deferred: bool, loss_scale: float | None, partial: bool) -> StepResult:
        if deferred and (out is not None or len(self._clipping.names) > 1):
            what = "a deferred step hands nothing back, and leaves one factor"
            raise CallerError(what, expected="out=None, and groups=None")
        self._ask(Call.STEP)
        accumulator, reducer, state = self.accumulator, self._reducer, self._state
        arrays = None if out is None else in_slot_order(self.layout.slots, out, "out")
        destinations = None if arrays is None else accumulator.destinations.of(arrays)
        settings.refuse_short(self.micro_batches, accumulator.accumulated_count, partial=partial)
        if loss_scale is not None:  # one that all workers agreed on is asked for like any change
            self._scaling.set(loss_scale, None if reducer.agreed is None else reducer.facts)
        step = reducer.step
        late = None if self._captures else self._late  # a graph counts its own steps as it runs
        stats, decision, non_finite, used_scale = self._deciding.decide(step, late)
        state.write()  # until the next window is open: what is handed back is not a sum any more
        if not deferred:
            with accumulator.arena.in_order():
                self._kernels.hand_back(accumulator.arena, decision, self._clipping.plan, destinations)
        handed = accumulator.by_name if arrays is None else handed_back(self.layout.slots, arrays)
        noise = self._deciding.noise(stats, used_scale) if accumulator.keeps_first else None
        result = StepResult(
            step, deferred, stats, decision, non_finite, reducer.sums, used_scale,
            handed, accumulator, state.changes, self._clipping.names, self._late, self.on_spike is not None, noise,
        )  # fmt: skip
        if self._captures:
            self._captures[0].close(result, arrays, destinations)
            return result
        if self._late is not None:
            self._kernels.device.hand_over(accumulator.producers)
            if decision.bad is None:
                self._late.send()
        reducer.begin(step + 1, is_made=True)
        self._deciding.follow(decision)  # last: a call that is interrupted before it has not made the step
        return result

    def on_step(self, callback: Callable[[StepResult], object]) -> Callable[[], object]:
        """Call a function with each step's or replay's result before it is returned; returns a function to remove it.

        The step is made by then. `step` raises an error of the function, and calls no function after it.

        Example:
            >>> engine = GradientEngine(GradientLayout.of({"w": (2,)}))
            >>> remove = engine.on_step(lambda result: print(result.metrics()["grad_norm"]))
            >>> engine.add({"w": np.array([3, 4], np.float32)})
            >>> result = engine.step()
            5.0
        """
        if not callable(callback):
            raise CallerError("callback cannot be called", got=said(callback), expected="a function of a step's result")
        key = object()
        self._observers[key] = callback
        return partial(self._observers.pop, key, None)

    def stop_after_step(self) -> None:
        """Ask all ranks to stop together: the next step's `result.stop` is true on every rank.

        One rank calls this, or several. It only sets an attribute, so a signal handler may call it at any time, also
        while another call of this engine runs. Nothing ends by itself: the loop looks at `result.stop`.

        A step reads the request just before the ranks agree on it, or before a replay is queued. A request that arrives
        later counts for the next step. Each request is reported once, also by a step that was skipped or deferred. A
        step that fails keeps the request, as `discard()` and most interrupts do. `state_dict()` does not save it.

        Example:
            >>> import os, signal
            >>> engine = GradientEngine(GradientLayout.of({"w": (2,)}))
            >>> before = signal.signal(signal.SIGTERM, lambda *_: engine.stop_after_step())
            >>> os.kill(os.getpid(), signal.SIGTERM)
            >>> engine.add({"w": np.array([3, 4], np.float32)})
            >>> engine.step().stop
            True
            >>> handler = signal.signal(signal.SIGTERM, before)
        """
        self._reducer.stop_request = object()

    @property
    def has_open_window(self) -> bool:
        """Whether a window is open: something was added, is being sent, or is broken."""
        return self._state.now is not State.EMPTY

    @whole
    def all_gather_object(self, what: str, facts: object) -> list[Any]:
        """Send facts to all workers and return every worker's, in rank order; once for each `what` in a step.

        Args:
            what: What the facts are, the same on all workers: "loss of step 3".
            facts: None, bool, int, float, str or bytes, also in lists and in dicts with str keys; at most 1 MiB.

        Raises:
            CallerError: `what` is not a str, or the facts are of another type or too long; nothing has been sent. Or
                the step has told other facts by this text.
            ExchangeError: A worker's `what` is not rank 0's.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed.

        Example:
            >>> GradientEngine(GradientLayout.of([(2,)])).all_gather_object("loss of step 0", 2.5)
            [2.5]
        """
        return self._reducer.all_gather_object(what, facts)

    def capture(self) -> CapturedWindow:
        """Record a whole window and its step as a CUDA graph, to be replayed at the cost of one launch.

        Inside the `with`, call `add` and `step` as usual; nothing runs yet. The graph keeps the gradients' addresses
        and the weights, and `replay()` checks the addresses.

        Raises:
            CallerError: The engine is on the CPU, or has an exchange that waits for other workers on the host.
            WindowError: A window is open or being captured, or no `step` was called inside the `with`.
        """
        device = self._kernels.device
        graph = device.graph()
        if graph is None or self._late is None:
            what, expected = "only a GPU's steps can be captured", "a CUDA device"
            raise CallerError(what, got=f"device '{device.name}'", expected=expected)
        return CapturedWindow(graph, self._reducer, self._late, self._observers, self._captures)

    @whole
    def state_dict(self) -> dict[str, Array]:
        """Save this rank's part of the open step, anywhere in its window; a resumed run ends in the same bytes.

        Held micro-batches are folded, which changes no bit. Late errors of a GPU are not saved: call `check()` before.

        Returns:
            Name -> NumPy array in memory of its own: 4 bytes an element once a micro-batch was added. On a GPU this
            waits for the work on the arena and for the copy, on a stream of its own; the current stream is not held up.

        Raises:
            WindowError: Part of the window was sent to other workers; its step failed or is broken; or a graph records.
            BufferRefused: A held gradient was freed or given other memory.
            NonFiniteGradient: An earlier step's, on a GPU, as in `add`.

        Example:
            >>> engine, resumed = (GradientEngine(GradientLayout.of({"w": (2,)})) for _ in range(2))
            >>> engine.add({"w": np.array([6, 0], np.float32)})
            >>> resumed.load_state_dict(engine.state_dict())
            >>> resumed.step().gradients["w"]
            array([6., 0.], dtype=float32)
        """
        self._ask(Call.SAVE)
        scale, max_norms, norms = self._scaling.saved(), self._clipping.plan.max_norms, self._deciding.norms
        content = Content(self.current_step, self._reducer.worker, scale, max_norms, norms, self.accumulator.saved())
        return saved_state(content, self.layout, self.micro_batches, self._shared)

    @whole
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, in place of an empty window.

        Step, loss scale, bounds, the norms that `on_spike` has seen, and the window are as then. Device, transport and
        `hold` may differ. The saved bounds replace the engine's, as a torch optimizer's saved learning rate replaces
        its own: set `max_norm` afterwards to change them. With an exchange, joined already or joined later, each rank
        loads what it saved. A state saved between windows suits any rank, and any number of ranks.

        Args:
            state: What `state_dict` returned; its arrays may be any that NumPy can read, as torch's on the host.

        Raises:
            LayoutMismatch: The state is of another layout or order of components; shows the rows that differ.
            CallerError: The state is of other `micro_batches`, `average` or `groups`, of another version, or not whole.
            WindowError: A window is open here (`discard()` it), or the state's window is another rank's.
            NonFiniteGradient: An earlier step's, on a GPU, as in `check`.
        """
        self._ask(Call.LOAD)
        saved = loaded_state(state, self.layout, self.micro_batches, self._shared)
        plan, whose = self._clipping.with_saved(saved.max_norms), saved.worker if saved.window.is_open else None
        settings.refuse_lone_part(self.layout, self.tp_exchange, plan, self.on_non_finite, self.on_spike)
        if self.exchange is not None:
            refuse_other_worker(whose, self._reducer.worker)
        self.check()
        self._scaling.load(*saved.loss_scale)
        self._state.write()  # until all is loaded
        self._clipping.use(plan, State.BROKEN)
        self._deciding.norms = saved.norms
        if self._late is not None:
            self._late.restart()
        self._reducer.begin(saved.step, whose)
        self.accumulator.load(saved.window)

    def check(self) -> None:
        """Wait for a GPU's steps, and raise the error that no call has raised yet: at the end, before a checkpoint."""
        if self._late is not None:
            self._late.wait()
            self._late.raise_pending()

    def discard(self) -> None:
        """Drop the window, also one whose step failed or is broken, and a capture whose `with` was interrupted.

        With an exchange, call it on every rank. A step that all workers agreed on, or that a lone worker decided,
        counts as made. If parts of the window were sent already, or a call was interrupted, the exchanges are closed:
        go on with `reconnect`. If some ranks applied a step's gradients and others dropped them, `reconnect` refuses:
        restart all from one checkpoint. On a GPU that has failed it raises `DeviceFailed`, as each call does.
        """
        if self._captures:
            self._captures[0].abandon()
        self._kernels.device.refuse_failed(asks=True)
        if self._state.now is State.BROKEN:
            self._clipping.use(self._clipping.plan, State.BROKEN)  # the device may have others
        self._reducer.discard(is_queued=self._late is not None and self._late.drop(self.current_step))

    @whole
    def reconnect(self, exchange: Exchange | None = None, *, tp_exchange: Exchange | None = None) -> None:
        """Replace an exchange that failed by another one, on all ranks; then call `step()` again.

        Close the old exchange first: until all ranks have joined it, it occupies its address. A step that failed begins
        anew, and its result has the bytes of an undisturbed run. If a rank holds sums of it, the window is lost:
        `discard()` it on every rank, and reconnect once more.

        Args:
            exchange: Replaces the one over workers; None leaves it as it is.
            tp_exchange: Replaces the one over the parts of this worker's model; None leaves it as it is.

        Raises:
            CallerError: Rank and size of the tensor-parallel exchange are not the layout's.
            WindowError: The step is broken: discard() it first.
            HandshakeRefused, PeerLost: The workers could not form a group, differ in settings, or are at different
                steps; or the window is lost, on all ranks alike.
        """
        settings.refuse_bad_exchanges(exchange, tp_exchange)
        self._reducer.connect(exchange, tp_exchange)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse what nothing would read, as in `engine.max_nrom = 0.5`, and all that is set once."""
        is_read = name in {"loss_scale", "max_norm"} or (callable(value) and hasattr(type(self), name))  # a stand-in
        if not (is_read or name.startswith("_") or name in _SET_ONCE - self.__dict__.keys()):
            raise CallerError(f"'{name}' of an engine cannot be set", do="set max_norm or loss_scale, or build another")
        super().__setattr__(name, value)

    # ---- which calls are allowed now ----

    def _ask(self, call: Call) -> None:
        """Raise if the stream's capture or the state does not allow the call; also an earlier step's error, once."""
        if self._late is not None:
            refuse_other_graph(self._kernels.device, is_recording=bool(self._captures))
            if not self._captures:
                self._late.raise_pending()
        self._state.ask(call, self._reducer.facts)
