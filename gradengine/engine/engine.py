"""The engine, which turns the micro-batches of a step into one averaged, checked and clipped gradient."""

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
    """An accumulator of gradients in fp32 whose `step` sums them over ranks, checks, averages and clips the sum.

    Every call checks its arguments before it changes anything. After a step that failed, call `step()` again (after
    `reconnect` if the exchange was lost) or drop the window with `discard()`. An interrupt, by Ctrl-C or an exception
    of a signal handler, leaves the step broken and the exchange closed. Then call `discard()` and `reconnect`. To stop
    all ranks after a whole step, call `stop_after_step()` in the handler.

    On a GPU `add` and `step` queue their work on the current CuPy stream without a wait, and norm, scale and verdict
    are device arrays. A gradient that is not finite becomes zeros. The first `add` or `step` after its verdict arrived
    raises its error. `result.check()` waits and raises it immediately. With an exchange, `step` waits for the ranks'
    sums, except if the ranks sum on their GPUs.

    Args:
        layout: Names, shapes and order of the components.
        device: "cpu", "cuda" (the first GPU), "cuda:1", a torch.device, or kernels.
        max_norm: Bound of the global norm, or one bound for each group by name. None (default) disables clipping, but
            the norm is still measured. 0 is refused.
        exchange: Exchange over the ranks with the same model, or the same part of it. None for one rank.
        on_non_finite: "raise" raises `NonFiniteGradient`. "skip" skips the step on all ranks. "propagate" returns a
            group that holds NaN or Inf unclipped, and clips the other groups. "drop_micro_batch" leaves out each
            micro-batch that is not finite, with its weight. It skips the step if none is left.
        micro_batches: Number of micro-batches in a window, if known. The last one measures the norm in the same pass
            and starts the exchange. One more, also of one block, raises `WindowError`. With fewer, `step` raises it.
        hold: Micro-batches kept by reference and added in one pass. Their buffers must stay unchanged until then.
        groups: Components that share a norm: None (all), "block", "component", {name: group} or a function of a slot.
        average: "weighted" is the mean over all micro-batches by weight. "per_worker" is the mean of the ranks'
            means. "prescaled" is the ranks' mean of weighted sums, as in torch's DistributedDataParallel. Use it if
            the loss is scaled before backward, as HF Trainer, Accelerate and Lightning do.
        loss_scale: Factor of the loss, which is divided out. With a torch GradScaler pass `scaler.get_scale()`, or norm
            and `max_norm` are those of the scaled gradient. Steps change a `DynamicLossScale` by GradScaler's rule.
        on_spike: Policy for a step whose global norm is far above those of earlier steps. None does nothing.
        measure_noise: Add the gradient noise scale to `result.metrics()`, from norms that are measured in passing.
        tp_exchange: Exchange over the ranks with the other parts of this rank's model, for a layout of a part. Its
            rank is the layout's `tp_rank`. Norm, scale and verdict are then those of the whole model. Replicated
            gradients must be equal on these ranks, which is checked. Under sequence parallelism all-reduce them before
            `add`, as Megatron-LM and DTensor do.

    Raises:
        CallerError: An argument is out of range, or a part of a model would be clipped or skipped by itself.
        DeviceUnavailable, OutOfDeviceMemory: The device cannot be used, or has too little memory.
        HandshakeRefused, PeerLost, DeadlineExceeded: The ranks could not form a group.

    Attributes:
        layout: The layout of the gradients.
        accumulator: The accumulator that holds the window.
        micro_batches: Number of micro-batches in a window, if known.
        on_non_finite: The policy for a gradient that is not finite.
        on_spike: The policy for spikes of the norm, if there is one.
        average: The kind of average.

    Example:
        >>> engine = GradientEngine(GradientLayout.of({"w": (2,)}), max_norm=1.0)
        >>> engine.add({"w": np.array([6, 0], np.float32)})
        >>> engine.add({"w": np.array([0, 8], np.float32)})
        >>> result = engine.step()
        >>> result.norm, result.scale, result.gradients["w"]
        (5.0, 0.2, array([0.6, 0.8], dtype=float32))
    """

    __reduce_ex__ = not_copied("build a new engine and load the dict that state_dict() returned")

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
        self._late = DeferredErrors.of(self.accumulator, plan, raises=on_non_finite == "raise")  # None on the CPU
        self._scaling = LossScaling(loss_scale, self.accumulator)
        self._deciding = Deciding(self._reducer, self._clipping, self._scaling, on_non_finite, on_spike, average)
        self._captures: list[CapturedWindow] = []  # none or one, while it records
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
        """The exchange over the ranks with the same model, or the same part of it, if there is one."""
        return self._reducer.workers

    @property
    def tp_exchange(self) -> Exchange | None:
        """The exchange over the ranks with the other parts of this rank's model, if there is one."""
        return self._reducer.parts.exchange

    @property
    def loss_scale(self) -> Any:
        """The factor of the open window's loss. It can be set between windows, unless it is a dynamic scale.

        On a GPU a dynamic scale is always the same 0-d fp32 array, which each step overwrites without a wait.
        With a torch GradScaler set it to `scaler.get_scale()` before each window. Do not call `scaler.unscale_` or
        `scaler.step`, which would unscale a second time. A captured window keeps the scale of its capture.

        Raises:
            WindowError: The scale is set while a window is open.
            CallerError: The scale is out of range, or is a dynamic one.
        """
        return self._scaling.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._scaling.set(value, self._reducer.facts)

    @property
    def max_norm(self) -> MaxNorm:
        """The bound of the global norm, or one for each group by name. None disables clipping.

        It can be set between windows, to the same value on all ranks, which compare it in each step. A captured step
        reads it at each replay. `state_dict` saves it, and `load_state_dict` restores it.

        Raises:
            WindowError: The bound is changed while a window is captured, or is open and its step has not failed.
            CallerError: A bound is 0, negative or NaN, or the bound of a group is missing.

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
        """The newest verdict (norm, scale, whether the step was skipped) that a GPU has reported, without a wait.

        It is None until the first report has arrived. On the CPU it is always None, and the result has the verdict.
        """
        self._kernels.device.refuse_failed(asks=True)
        return None if self._late is None else self._late.latest()

    @property
    def rank(self) -> int:
        """The number of this rank in `exchange`; 0 without an exchange."""
        return self._reducer.worker[0]

    @property
    def world_size(self) -> int:
        """The number of ranks in `exchange`; 1 without an exchange. The ranks of `tp_exchange` are not counted."""
        return self._reducer.worker[1]

    @in_range
    @whole
    def add(self, gradients: Gradients | None, weight: SupportsFloat = 1.0) -> None:
        """Add a micro-batch.

        Args:
            gradients: Mapping name -> gradient or a sequence in layout order, of any framework, fp32, fp16 or bf16, on
                the engine's device. None stands for a component without a gradient, but not for all components. A
                rank that has no micro-batch in a window calls `add(None, weight=0)` before its step.
            weight: Weight of the micro-batch in the average, such as 1 or its number of tokens.

        Raises:
            LayoutMismatch: A component is missing, unknown or has the wrong shape.
            BufferRefused: A gradient's dtype, device, strides or memory is not supported.
            WindowError: The weight is invalid, all components are None, the window is full, or a step failed or broke.
            NonFiniteGradient: On a GPU, the error of an earlier step.
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
        """Add one block's part of a micro-batch, after backward has finished the block.

        Args:
            index: Index of the block.
            gradients: A sequence in the block's order, or a mapping by component name.
            weight: The micro-batch's weight, the same for all its parts.
            last: Whether this is the window's last contribution to the block, which is then sent to the other ranks.

        Raises:
            LayoutMismatch, BufferRefused, WindowError, NonFiniteGradient: As `add`.
        """
        block = self.layout.block(index)
        add = partial(self.accumulator.add_block, index, gradients, weight)
        self._add_part(block, add, gradients, truth_value("last", last), f"{block.name}.")

    @whole
    def add_non_block(
        self, name: str | int, gradient: object, weight: SupportsFloat = 1.0, *, last: bool = False
    ) -> None:
        """Add one component outside the blocks, by name or id. The other arguments are those of `add_block`.

        Raises:
            LayoutMismatch, BufferRefused, WindowError, NonFiniteGradient: As `add`.
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
        """Return a micro-batch whose gradients are added one by one, in any order, while backward runs.

        Args:
            weight: Weight of the micro-batch in the average.
            last: Whether it is the window's last, which sends each block as soon as all its components were added. By
                default `micro_batches` decides. Pass False if a component is added more than once.

        Raises:
            WindowError: The weight is invalid, the window is full or captured, or an earlier step failed.

        Example:
            >>> engine = GradientEngine(GradientLayout.of({"w": (2,), "b": (1,)}))
            >>> with engine.micro_batch() as micro_batch:
            ...     micro_batch.add("w", np.array([3, 4], np.float32))
            >>> engine.step().norm
            5.0
        """
        self._ask(Call.BEGIN)
        # Refuse a full window before backward runs.
        settings.is_last(self.micro_batches, "the window", self.accumulator.accumulated_count)
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
        """Sum the window over ranks, check, average and clip the sum, and begin the next window.

        Args:
            out: Destinations, a mapping or sequence as for `add`, written in their dtype. None for a component that is
                not needed. By default the gradients are views of the arena.
            deferred: Leave the sum unscaled in `result.sums`, for an optimizer that multiplies by `result.factor`
                itself and reads `result.skipped`. This saves one pass.
            loss_scale: Factor of the window's losses, if not set before. It becomes the engine's scale, even if the
                step fails. A repeated `step` can pass a different one, unless the ranks have agreed on it.
            partial: Allow fewer micro-batches than the engine's `micro_batches`, as in the last window of an epoch.

        Returns:
            The result. A later `add` overwrites its gradients.

        Raises:
            WindowError: Nothing was added, micro-batches or components are missing, the step is broken, or the engine
                is attached. Or the total weight times the loss scale is outside 2**-126..2**126.
            BufferRefused, LayoutMismatch: A destination cannot be written. Nothing was done.
            NonFiniteGradient: NaN or Inf with on_non_finite="raise". The window is kept. On a GPU the error is that of
                an earlier step, whose gradients became zeros.
            ExchangeError: The exchange failed, or the ranks' settings or sums differ. The window is kept.
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
            what = "a deferred step writes to no destinations and has one factor"
            raise CallerError(what, expected="out=None and groups=None")
        self._ask(Call.STEP)
        accumulator, reducer, state = self.accumulator, self._reducer, self._state
        arrays = None if out is None else in_slot_order(self.layout.slots, out, "out")
        destinations = None if arrays is None else accumulator.destinations.of(arrays)
        settings.refuse_short(self.micro_batches, accumulator.accumulated_count, partial=partial)
        if loss_scale is not None:
            # A scale that all ranks have agreed on changes only if the state allows it.
            self._scaling.set(loss_scale, None if reducer.agreed is None else reducer.facts)
        step = reducer.step
        late = None if self._captures else self._late  # None: the graph counts its own steps
        stats, decision, non_finite, used_scale = self._deciding.decide(step, late)
        # The arena holds no sum from here until the next window opens.
        state.write()
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
        self._deciding.follow(decision)  # must be last: an interrupt before it leaves the step unmade
        return result

    def on_step(self, callback: Callable[[StepResult], object]) -> Callable[[], object]:
        """Call a function with the result of each step or replay before it is returned. Return a function to remove it.

        The step is made by then. If the function raises, `step` raises that error and calls no later function.

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
        """Request that all ranks stop together. The next step's `result.stop` is then true on every rank.

        One or more ranks can call this. It only sets an attribute, so a signal handler can call it at any time, even
        during another call of this engine. The loop must check `result.stop`, because nothing ends by itself.

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
        """Whether a window is open, which includes one that is being sent or is broken."""
        return self._state.now is not State.EMPTY

    @whole
    def all_gather_object(self, what: str, facts: object) -> list[Any]:
        """Send facts to all ranks and return the facts of every rank, in rank order.

        Args:
            what: Text that identifies the facts within a step, the same on all ranks, such as "loss of step 3".
            facts: None, bool, int, float, str or bytes, also in lists and in dicts with str keys. At most 1 MiB.

        Raises:
            CallerError: `what` or the facts have a wrong type or are too long, or this step sent other facts as `what`.
            ExchangeError: A rank's `what` differs from rank 0's.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed.

        Example:
            >>> GradientEngine(GradientLayout.of([(2,)])).all_gather_object("loss of step 0", 2.5)
            [2.5]
        """
        return self._reducer.all_gather_object(what, facts)

    def capture(self) -> CapturedWindow:
        """Record a whole window and its step as a CUDA graph. Each replay costs one launch.

        Inside the `with`, call `add` and `step` as usual. Nothing runs yet. The graph keeps the gradients' addresses
        and the weights, and `replay()` checks the addresses.

        Raises:
            CallerError: The engine is on the CPU, or has an exchange that waits for other ranks on the host.
            WindowError: A window is open or being captured, or no `step` was called inside the `with`.
        """
        device = self._kernels.device
        graph = device.graph()
        if graph is None or self._late is None:
            what, expected = "only steps on a GPU can be captured", "a CUDA device"
            raise CallerError(what, got=f"device '{device.name}'", expected=expected)
        return CapturedWindow(graph, self._reducer, self._late, self._observers, self._captures)

    @whole
    def state_dict(self) -> dict[str, Array]:
        """Return the state of this rank, at any point in a window. A resumed run produces the same bytes.

        Held micro-batches are folded, which changes no bit. Late errors of a GPU are not saved. Call `check()` first.

        Returns:
            Name -> NumPy array that shares no memory with the engine; 4 bytes per element once a micro-batch was added.
            On a GPU this waits for the work on the arena and for a copy on a separate stream, not the current stream.

        Raises:
            WindowError: Part of the window was sent, its step failed or is broken, or a graph is being recorded.
            BufferRefused: A held gradient was freed or moved.
            NonFiniteGradient: On a GPU, the error of an earlier step.

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
        """Load a saved state, while no window is open.

        The state holds the step, the loss scale, the bounds, the running norm of `on_spike` and the window. Device,
        transport and `hold` may differ. The saved bounds replace the engine's, as a torch optimizer's saved learning
        rate does. To change them, set `max_norm` afterwards. With an exchange, joined before or after, each rank loads
        the state that it saved. A state saved between windows fits any rank and any number of ranks.

        Args:
            state: The dict that `state_dict` returned. NumPy must be able to read its arrays (CPU torch tensors too).

        Raises:
            LayoutMismatch: Layout or order of components differ. The error shows the rows that differ.
            CallerError: `micro_batches`, `average`, `groups` or the version differ, or the state is incomplete.
            WindowError: A window is open (call `discard()`), or the state's window was saved by a different rank.
            NonFiniteGradient: On a GPU, the error of an earlier step, as in `check`.
        """
        self._ask(Call.LOAD)
        saved = loaded_state(state, self.layout, self.micro_batches, self._shared)
        plan, whose = self._clipping.with_saved(saved.max_norms), saved.worker if saved.window.is_open else None
        settings.refuse_lone_part(self.layout, self.tp_exchange, plan, self.on_non_finite, self.on_spike)
        if self.exchange is not None:
            refuse_other_worker(whose, self._reducer.worker)
        self.check()
        self._scaling.load(*saved.loss_scale)
        self._state.write()
        self._clipping.use(plan, State.BROKEN)
        self._deciding.norms = saved.norms
        if self._late is not None:
            self._late.restart()
        self._reducer.begin(saved.step, whose)
        self.accumulator.load(saved.window)

    def check(self) -> None:
        """Wait for a GPU's steps and raise the error that no call has raised yet, as before a checkpoint."""
        if self._late is not None:
            self._late.wait()
            self._late.raise_pending()

    def discard(self) -> None:
        """Drop the window, even one whose step failed or is broken, and a capture whose `with` was interrupted.

        With an exchange, call it on every rank. A step that all ranks agreed on, or that a lone rank decided,
        counts as made. If parts of the window were sent, or a call was interrupted, the exchanges are closed. Then call
        `reconnect`. It raises an error if some ranks applied a step's gradients and others dropped them. Then restart
        all ranks from one checkpoint. On a GPU that has failed, `discard` raises `DeviceFailed`, as every call does.
        """
        if self._captures:
            self._captures[0].abandon()
        self._kernels.device.refuse_failed(asks=True)
        if self._state.now is State.BROKEN:
            # An interrupt may have left different bounds on the device.
            self._clipping.use(self._clipping.plan, State.BROKEN)
        self._reducer.discard(is_queued=self._late is not None and self._late.drop(self.current_step))

    @whole
    def reconnect(self, exchange: Exchange | None = None, *, tp_exchange: Exchange | None = None) -> None:
        """Replace an exchange that failed, on all ranks. Then call `step()` again.

        Close the old exchange first, because it occupies its address until all ranks have joined it. A step that failed
        starts again and gives the bytes of an undisturbed run. If a rank holds sums of the step, the window is lost.
        Then call `discard()` on every rank and reconnect again.

        Args:
            exchange: New exchange over the ranks with the same model, or the same part. None keeps the current one.
            tp_exchange: New exchange over the ranks with the other parts of the model. None keeps the current one.

        Raises:
            CallerError: Rank and size of the tensor-parallel exchange are not the layout's.
            WindowError: The step is broken (call `discard()` first).
            HandshakeRefused, PeerLost: No group was formed, settings or steps differ, or all ranks lost the window.
        """
        settings.refuse_bad_exchanges(exchange, tp_exchange)
        self._reducer.connect(exchange, tp_exchange)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse an attribute that nothing reads, such as `engine.max_nrom = 0.5`, or that is set only once."""
        # A callable may replace a method.
        is_read = name in {"loss_scale", "max_norm"} or (callable(value) and hasattr(type(self), name))
        if not (is_read or name.startswith("_") or name in _SET_ONCE - self.__dict__.keys()):
            raise CallerError(f"'{name}' of an engine cannot be set", do="set max_norm or loss_scale, or build another")
        super().__setattr__(name, value)

    # ---- which calls are allowed now ----

    def _ask(self, call: Call) -> None:
        """Raise if the stream's capture or the state does not allow the call, or once for an earlier step's error."""
        if self._late is not None:
            refuse_other_graph(self._kernels.device, is_recording=bool(self._captures))
            if not self._captures:
                self._late.raise_pending()
        self._state.ask(call, self._reducer.facts)
