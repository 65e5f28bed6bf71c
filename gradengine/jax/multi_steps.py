"""An engine inside an optax optimizer, which adds micro-batches and updates by the clipped mean of a full window."""

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
    """The state of `multi_steps`, with the names of `optax.MultiStepsState`. The sum itself is in the engine.

    Attributes:
        mini_step: Micro-batches in the open window, 0 after an update by the inner optimizer.
        gradient_step: The number of the step whose window is open, as `engine.current_step`. Skipped steps count.
        inner_opt_state: The inner optimizer's state.
        norm: The last step's global norm, before clipping.
        scale: The last step's clip scale, 1 if nothing was clipped.
        skipped: Whether the last step was skipped because its gradient was not finite or its norm was a spike.
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
    """Return an optax optimizer that adds each micro-batch to an engine, and passes its result to an inner optimizer.

    It replaces `optax.MultiSteps(optax.chain(optax.clip_by_global_norm(...), inner), K)`. With an engine of
    `micro_batches=K`, K - 1 updates are zeros. The K-th is the inner optimizer's, for the averaged, exchanged and
    clipped gradient, rounded to the dtype of the gradients. A step that the engine skips does not change the inner
    state, and updates by zeros. To run a failed step again, repeat the same call. Its gradients are not added again.

    Call it outside of `jax.jit`. Jit the function of the gradients and `optax.apply_updates`, whose arguments may be
    donated. The inner update is jitted already. It is complete when `update` returns, because the next `update`
    overwrites the gradients.

    Besides the arguments of optax `update` accepts `weight` and `last`, and passes others to the inner optimizer.
    `weight` is the micro-batch's weight, 1 by default, or its number of tokens. `last` is whether the micro-batch ends
    the window, and by default follows the engine's `micro_batches`.

    Args:
        inner: The optimizer, such as `optax.adamw(1e-3)`.
        engine: An engine with the layout `GradientTree(parameters).layout`, used only by this optimizer.
        donate_state: Reuse the memory of the inner state at each step, which deletes the state that was passed in.

    Raises:
        CallerError: `inner` is not an optax transformation, or `engine` not an engine. `update` also raises it if it is
            traced, if the state is not of the engine's window, or without both `last` and `micro_batches`.
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
        import optax  # noqa: PLC0415  (the rest of this package needs only JAX)
    except ModuleNotFoundError:
        raise DeviceUnavailable("multi_steps needs optax, which is not installed", do="pip install optax") from None
    refuse_lacking("inner", inner, ["init", "update"])
    refuse_other_kind("engine", engine, GradientEngine)
    steps = _MultiSteps(optax.with_extra_args_support(inner), engine, truth_value("donate_state", donate_state))
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


@final
class _MultiSteps:
    """The functions of `multi_steps`, and their state between calls."""

    def __init__(self, inner: Any, engine: GradientEngine, donate_state: bool) -> None:
        self._inner, self._engine = inner, engine
        self._tree: tuple[Any, GradientTree] | None = None  # structure and tree of the last gradients
        self._names: dict[str, str] = {_unboxed(slot.name): slot.name for slot in engine.layout.slots}
        self._step_reached = 0  # `gradient_step` of the state that the last step returned
        self._proposed = jax.jit(self._propose, static_argnums=0)
        self._decided = jax.jit(self._decide, donate_argnums=(1,) if donate_state else ())

    def init(self, params: Any) -> MultiStepsState:
        """Return the state before a window's first micro-batch; may be called under jit."""
        last = {"norm": np.zeros((), np.float32), "scale": np.ones((), np.float32), "skipped": np.zeros((), np.bool_)}
        start = self._position() | {"mini_step": np.array(0, np.int32)}  # `update` rejects this in an open window
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
        """Add a micro-batch. After the window's last one step the engine, and update by its result."""
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
        """Step the engine, and update by its result. After this call no work reads the arena."""
        result = self._engine.step(partial=True)  # `last=True` may end a window early
        arrays = [_readable(name, result.gradients[name]) for name in names]
        found = {name: _readable(name, getattr(result, name)) for name in ("norm", "scale", "skipped")}
        # JAX reads the arena itself, so all its work must end here, before the next add overwrites the arena.
        updates, inner, found = jax.block_until_ready(self._decided(*given, structure.unflatten(arrays), found))
        self._step_reached = self._engine.current_step
        return updates, MultiStepsState(**self._position(), inner_opt_state=inner, **found)

    # ---- under jit ----

    def _propose(self, closes: bool, updates: Any, inner_state: Any, params: Any, extra: Any) -> Any:
        """Return zeros like the inner optimizer's updates, or None; raise its errors before gradients are added."""
        proposed, _ = jax.eval_shape(lambda *given: self._inner.update(*given, **extra), updates, inner_state, params)
        return None if closes else jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), proposed)

    def _decide(self, like: Any, inner_state: Any, params: Any, extra: Any, gradients: Any, found: Any) -> Any:
        """Return the inner optimizer's updates and new state, or after a skipped step zeros and the old state."""
        rounded = jax.tree.map(lambda gradient, leaf: gradient.astype(leaf.dtype), gradients, like)
        updates, new_state = self._inner.update(rounded, inner_state, params, **extra)
        skipped = jnp.asarray(found["skipped"]) != 0
        updates = jax.tree.map(lambda leaf: jnp.where(skipped, jnp.zeros_like(leaf), leaf), updates)
        new_state = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), inner_state, new_state)
        norm, scale = (jnp.asarray(found[name], jnp.float32) for name in ("norm", "scale"))
        return updates, new_state, {"norm": norm, "scale": scale, "skipped": skipped}

    # ---- what is given ----

    def _tree_of(self, updates: Any) -> tuple[Any, GradientTree]:
        """Return the gradients' structure and tree, from the last call if the structure is the same."""
        structure = jax.tree.structure(updates)
        if self._tree is not None and self._tree[0] == structure:
            return self._tree
        return structure, GradientTree(updates)

    def _closes(self, last: bool | None) -> bool:
        """Return whether the window ends with the micro-batch that is to be added."""
        if last is not None:
            return truth_value("last", last)
        if self._engine.micro_batches is None:
            do = "build the engine with micro_batches=K, or pass last=True or last=False to update()"
            raise CallerError("the end of the window is not known", do=do)
        return self._engine.accumulator.accumulated_count + 1 == self._engine.micro_batches

    def _position(self) -> dict[str, Any]:
        """Return the engine's position in a state's fields, as arrays because flax nnx keeps no other numbers."""
        count, step = self._engine.accumulator.accumulated_count, self._engine.current_step
        return {"mini_step": np.array(count, np.int32), "gradient_step": np.array(step, np.int32)}

    def _refuse_other_window(self, state: MultiStepsState, count: int) -> None:
        """Raise `CallerError` unless the state is of the engine's window, or of an earlier window that was dropped."""
        step = self._engine.current_step
        earliest = step if count else min(step, self._step_reached)
        of_state, count_of_state = (as_index(number) for number in (state.gradient_step, state.mini_step))
        # After a window was dropped, the state of any of its micro-batches is accepted.
        if of_state is None or not earliest <= of_state <= step or (count and count_of_state != count):
            raise CallerError(
                "the optimizer's state is not of the engine's window",
                got=f"gradient_step {said(of_state)} and mini_step {said(count_of_state)}",
                expected=f"{step} and {count}",
                do="pass the state of the last update(), or load the engine's state_dict() that was saved with it",
            )


def _refuse_traced(*given: Any) -> None:
    if any(isinstance(value, jax.core.Tracer) for value in given):
        what = "update() of multi_steps is traced by JAX, but an engine cannot run under jax.jit"
        raise CallerError(what, do="jit only the function of the gradients and optax.apply_updates")


def _unboxed(name: str) -> str:
    """Return a name without the part that flax nnx drops if its optimizer takes arrays in place of Variables."""
    return name.removesuffix(".value")


def _readable(name: str, value: Any) -> Any:
    """Return a value that a jitted function reads in place, with a GPU's array passed by DLPack."""
    return value if isinstance(value, (bool, float, np.ndarray, np.generic)) else viewed(name, value)
