"""An engine inside an optax optimizer: micro-batches are added, and a full window updates by its clipped mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from gradengine.accumulate.state import State
from gradengine.arguments import as_index, refuse_lacking, refuse_other_kind, said, truth_value
from gradengine.engine import GradientEngine
from gradengine.errors import CallerError, DeviceUnavailable
from gradengine.jax.tree import GradientTree, viewed

if TYPE_CHECKING:
    import optax

_COMPLETE = {State.SENDING, State.FAILED, State.AGREED}  # the window has its last micro-batch, and its step failed


class MultiStepsState(NamedTuple):
    """The state of `multi_steps`, named as `optax.MultiStepsState`; the sum itself is in the engine.

    Attributes:
        mini_step: Micro-batches in the open window; 0 after an update by the inner optimizer.
        gradient_step: The number of the step whose window is open, as `engine.current_step`; skipped ones count.
        inner_opt_state: The inner optimizer's state.
        norm: The last step's global norm, before clipping.
        scale: The last step's clip scale; 1 if nothing was clipped.
        skipped: Whether the last step was skipped: its gradient was not finite, or its norm a spike.
    """

    mini_step: Any
    gradient_step: Any
    inner_opt_state: Any
    norm: Any
    scale: Any
    skipped: Any


def multi_steps(
    inner: optax.GradientTransformation, engine: GradientEngine, *, donate_state: bool = False
) -> optax.GradientTransformationExtraArgs:
    """An optax optimizer that adds each micro-batch to an engine, and gives the engine's result to an inner optimizer.

    Replaces `optax.MultiSteps(optax.chain(optax.clip_by_global_norm(...), inner), K)`: with an engine of
    `micro_batches=K`, K - 1 updates are zeros and the K-th is the inner optimizer's, for the averaged, exchanged and
    clipped gradient, rounded to the dtype of the gradients. A step that the engine skips leaves the inner state as it
    was, and updates by zeros. To run a failed step again make the same call: its gradients are not added again.

    Call it outside of `jax.jit`: jit the gradients' function and `optax.apply_updates`, whose arguments may be donated.
    The inner update is jitted here, and is done when `update` returns, as the next `update` overwrites the gradients.

    Beside optax's arguments `update` takes `weight`, what the micro-batch counts: 1, or its tokens; and `last`, whether
    the micro-batch ends the window, by default as the engine's `micro_batches` says. Others go to the inner optimizer.

    Args:
        inner: The optimizer, such as `optax.adamw(1e-3)`.
        engine: An engine of the layout `GradientTree(parameters).layout`, used by this optimizer alone.
        donate_state: Reuse the memory of the inner state at each step: a state that was passed in is deleted then.

    Raises:
        CallerError: `inner` is not an optax transformation, or `engine` not an engine. From `update`: it is traced, the
            state is not of the engine's window, or neither `last` nor `micro_batches` says where a window ends.
        DeviceUnavailable: optax is not installed.

    Example:
        >>> import optax
        >>> from gradengine import GradientEngine
        >>> parameters = {"w": jnp.zeros(2)}
        >>> engine = GradientEngine(GradientTree(parameters).layout, max_norm=1.0, micro_batches=2)
        >>> optimizer = multi_steps(optax.sgd(1.0), engine)
        >>> state = optimizer.init(parameters)
        >>> for gradient in ([6.0, 0.0], [0.0, 8.0]):
        ...     updates, state = optimizer.update({"w": jnp.array(gradient)}, state, parameters)
        ...     print(updates["w"], state.mini_step, state.norm)
        [0. 0.] 1 0.0
        [-0.6 -0.8] 0 5.0
    """
    try:
        import optax  # noqa: PLC0415  (the rest of this room needs JAX alone)
    except ModuleNotFoundError:
        raise DeviceUnavailable("multi_steps needs optax, which is not installed", do="pip install optax") from None
    refuse_lacking("inner", inner, ["init", "update"])
    refuse_other_kind("engine", engine, GradientEngine)
    steps = _MultiSteps(optax.with_extra_args_support(inner), engine, truth_value("donate_state", donate_state))
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


@final
class _MultiSteps:
    """The functions of `multi_steps`, and what they remember of the engine's window."""

    def __init__(self, inner: Any, engine: GradientEngine, donate_state: bool) -> None:
        self._inner, self._engine = inner, engine
        self._tree: tuple[Any, GradientTree] | None = None  # of the gradients that came last, and their structure
        self._names: dict[str, str] = {_unboxed(slot.name): slot.name for slot in engine.layout.slots}
        self._step_reached = 0  # what the last state that was returned with a step's updates has
        self._proposed = jax.jit(self._propose, static_argnums=0)
        self._decided = jax.jit(self._decide, donate_argnums=(1,) if donate_state else ())

    def init(self, params: Any) -> MultiStepsState:
        """The state before a window's first micro-batch; may be called under jit."""
        last = {"norm": np.zeros((), np.float32), "scale": np.ones((), np.float32), "skipped": np.zeros((), np.bool_)}
        start = self._position() | {"mini_step": np.array(0, np.int32)}  # where a window is open, `update` refuses it
        return MultiStepsState(**start, inner_opt_state=self._inner.init(params), **last)

    def update(
        self,
        updates: Any,
        state: MultiStepsState,
        params: Any = None,
        *,
        weight: float = 1.0,
        last: bool | None = None,
        **extra: Any,
    ) -> tuple[Any, MultiStepsState]:
        """Add a micro-batch; after the window's last one step the engine, and update by its result."""
        _refuse_traced(weight, *jax.tree.leaves((updates, state, params, extra)))
        refuse_other_kind("state", state, MultiStepsState, do="pass what init() or the last update() returned")
        accumulator = self._engine.accumulator
        is_in = accumulator.state.now in _COMPLETE
        closes = is_in or self._closes(last)
        structure, tree = self._tree_of(updates)
        gradients = {self._names.get(_unboxed(name), name): leaf for name, leaf in tree.gradients(updates).items()}
        self._refuse_other_window(state, accumulator.accumulated_count - is_in)
        given = updates, state.inner_opt_state, params, extra
        zeros = self._proposed(closes, *given)
        if not is_in:
            self._engine.add(gradients, weight)
        self._tree = structure, tree
        if closes:
            return self._step(structure, gradients, given)
        return zeros, state._replace(**self._position())

    def _step(self, structure: Any, names: Iterable[str], given: tuple[Any, ...]) -> tuple[Any, MultiStepsState]:
        """Step the engine, and update by its result; when this returns no work reads the arena any more."""
        result = self._engine.step(partial=True)  # `last` may be said of any micro-batch
        arrays = [_readable(name, result.gradients[name]) for name in names]
        found = {name: _readable(name, getattr(result, name)) for name in ("norm", "scale", "skipped")}
        # JAX reads the arena itself, which the next add overwrites, and nothing else waits for all that is computed.
        updates, inner, found = jax.block_until_ready(self._decided(*given, structure.unflatten(arrays), found))
        self._step_reached = self._engine.current_step
        return updates, MultiStepsState(**self._position(), inner_opt_state=inner, **found)

    # ---- under jit ----

    def _propose(self, closes: bool, updates: Any, inner_state: Any, params: Any, extra: Any) -> Any:
        """Zeros in the form of the inner optimizer's updates, or None; raises its errors before anything is added."""
        proposed, _ = jax.eval_shape(lambda *given: self._inner.update(*given, **extra), updates, inner_state, params)
        return None if closes else jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), proposed)

    def _decide(self, like: Any, inner_state: Any, params: Any, extra: Any, gradients: Any, found: Any) -> Any:
        """The inner optimizer's updates and new state; or zeros and the old state."""
        rounded = jax.tree.map(lambda gradient, leaf: gradient.astype(leaf.dtype), gradients, like)
        updates, new_state = self._inner.update(rounded, inner_state, params, **extra)
        skipped = jnp.asarray(found["skipped"]) != 0
        updates = jax.tree.map(lambda leaf: jnp.where(skipped, jnp.zeros_like(leaf), leaf), updates)
        new_state = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), inner_state, new_state)
        norm, scale = (jnp.asarray(found[name], jnp.float32) for name in ("norm", "scale"))
        return updates, new_state, {"norm": norm, "scale": scale, "skipped": skipped}

    # ---- what is given ----

    def _tree_of(self, updates: Any) -> tuple[Any, GradientTree]:
        """The gradients' structure and tree; those of the last call, if they fit."""
        structure = jax.tree.structure(updates)
        if self._tree is not None and self._tree[0] == structure:
            return self._tree
        return structure, GradientTree(updates)

    def _closes(self, last: bool | None) -> bool:
        """Whether the window ends with the micro-batch that is to be added."""
        if last is not None:
            return truth_value("last", last)
        if self._engine.micro_batches is None:
            do = "build the engine with micro_batches=K, or say update(..., last=True) or last=False"
            raise CallerError("it is not known where the window ends", do=do)
        return self._engine.accumulator.accumulated_count + 1 == self._engine.micro_batches

    def _position(self) -> dict[str, Any]:
        """The engine's position, in a state's fields; arrays, since flax nnx keeps no other numbers."""
        count, step = self._engine.accumulator.accumulated_count, self._engine.current_step
        return {"mini_step": np.array(count, np.int32), "gradient_step": np.array(step, np.int32)}

    def _refuse_other_window(self, state: MultiStepsState, count: int) -> None:
        """Raise `CallerError` unless the state is of the engine's window, or of a window before it that was dropped."""
        step = self._engine.current_step
        earliest = step if count else min(step, self._step_reached)
        of_state, count_of_state = (as_index(number) for number in (state.gradient_step, state.mini_step))
        # After a window that was dropped comes the state of any of its micro-batches.
        if of_state is None or not earliest <= of_state <= step or (count and count_of_state != count):
            raise CallerError(
                "the optimizer's state is not of the engine's window",
                got=f"gradient_step {said(of_state)} and mini_step {said(count_of_state)}",
                expected=f"{step} and {count}",
                do="pass the state of the last update(); after a restart load the engine's state_dict() of then",
            )


def _refuse_traced(*given: Any) -> None:
    if any(isinstance(value, jax.core.Tracer) for value in given):
        what = "update() of multi_steps is traced by JAX, and an engine is not called under jax.jit"
        raise CallerError(what, do="call it outside; jit the function of the gradients, and optax.apply_updates")


def _unboxed(name: str) -> str:
    """A name without the part that flax nnx drops when its optimizer takes arrays in place of a state's Variables."""
    return name.removesuffix(".value")


def _readable(name: str, value: Any) -> Any:
    """A value that a jitted function reads in place: numbers and NumPy arrays unchanged, a GPU's array by DLPack."""
    return value if isinstance(value, (bool, float, np.ndarray, np.generic)) else viewed(name, value)
