"""A JAX training loop with micro-batches of unequal size, a weighted mean, clipping and AdamW, on a parameter tree.

Shows `GradientTree`, which names a tree's arrays for the engine and makes a tree of its result, both without a copy.
AdamW is plain `jax.tree.map`. Any optimizer that takes a tree of gradients can replace it. `gradengine.jax.multi_steps`
wraps those of optax (docs/start/jax.md).

Install in a clone and run:

    pip install . jax
    python examples/jax_loop.py

The example checks itself against the same loop in JAX alone, which sums by `jax.tree.map` in fp32, divides and clips.
In each step losses must agree to 1e-5 and gradients to 1e-4 of their norm. Otherwise it exits with 1. The two loops
round differently, and each step builds on the one before.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradengine import GradientEngine
from gradengine.jax import GradientTree

FEATURES, CLASSES, MICRO_BATCHES, STEPS = 32, 8, 4, 8
MAX_NORM = 0.5
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4

Batch = tuple[Any, Any]
Averaged = Callable[[Any, list[Batch]], tuple[Any, float]]  # parameters, batches -> gradients, loss


def initial_parameters() -> dict[str, Any]:
    """Return two layers, the second without a bias, and a head."""
    w1, w2, head = jax.random.normal(jax.random.key(0), (3, FEATURES, FEATURES)) / 6
    return {"layers": [{"w": w1, "b": jnp.zeros(FEATURES)}, {"w": w2, "b": None}], "head": head[:, :CLASSES]}


@jax.jit
@jax.value_and_grad
def loss_and_gradients(parameters: Any, x: Any, y: Any) -> Any:
    """Return the mean cross entropy over a batch."""
    for layer in parameters["layers"]:
        x = jnp.tanh(x @ layer["w"] + (0 if layer["b"] is None else layer["b"]))
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ parameters["head"]), y[:, None], axis=1))


def steps() -> Iterator[list[Batch]]:
    """Yield each step's micro-batches of 8 to 24 rows. A row's class is the index of the largest first number."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        rows = [rng.standard_normal((8 * int(rng.integers(1, 4)), FEATURES), np.float32) for _ in range(MICRO_BATCHES)]
        yield [(x, x[:, :CLASSES].argmax(axis=1)) for x in rows]


def with_gradengine() -> Averaged:
    """Return a function that adds up, averages and clips by the engine."""
    tree = GradientTree(initial_parameters())
    engine = GradientEngine(tree.layout, max_norm=MAX_NORM, micro_batches=MICRO_BATCHES)

    def averaged(parameters: Any, batches: list[Batch]) -> tuple[Any, float]:
        losses = []
        for x, y in batches:
            loss, gradients = loss_and_gradients(parameters, x, y)
            engine.add(tree.gradients(gradients), weight=len(x))
            losses.append(len(x) * float(loss))
        result = engine.step()
        # For optax, `gradengine.jax.multi_steps` does all of this and handles skipped steps.
        return tree.tree(result.gradients), sum(losses) / result.weight

    return averaged


def with_jax_alone(parameters: Any, batches: list[Batch]) -> tuple[Any, float]:
    """Return the averaged and clipped gradients and the loss, by JAX alone."""
    weights = [len(x) for x, _ in batches]
    losses, gradients = zip(*(loss_and_gradients(parameters, x, y) for x, y in batches), strict=True)
    mean = jax.tree.map(lambda *g: sum(w * one for w, one in zip(weights, g, strict=True)) / sum(weights), *gradients)
    clipped = jax.tree.map(lambda leaf: leaf * jnp.minimum(1, MAX_NORM / norm(mean)), mean)
    return clipped, float(np.dot(weights, np.array(losses))) / sum(weights)


def norm(tree: Any) -> Any:
    """Return the global norm, in fp32."""
    return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)))


@jax.jit
def adamw(parameters: Any, gradients: Any, mean: Any, square: Any, count: Any) -> tuple[Any, Any, Any]:
    """Make one step. The results are new arrays, so the arena is free for the next window when they are ready."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, gradients)

    def updated(p: Any, m: Any, v: Any) -> Any:
        return p - 0.01 * (m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-6) + 1e-3 * p)

    return jax.tree.map(updated, parameters, mean, square), mean, square


def trained(averaged: Averaged) -> Iterator[tuple[float, Any]]:
    """Yield each step's loss and gradients. The next step overwrites the gradients."""
    parameters = initial_parameters()
    mean = square = jax.tree.map(jnp.zeros_like, parameters)
    for count, batches in enumerate(steps(), 1):
        gradients, loss = averaged(parameters, batches)
        yield loss, gradients
        parameters, mean, square = adamw(parameters, gradients, mean, square, count)
    jax.block_until_ready((parameters, mean, square))  # the process may abort if it ends while XLA computes


def main() -> None:
    """Run both loops and compare each step."""
    for step, ((loss, got), (expected_loss, expected)) in enumerate(
        zip(trained(with_gradengine()), trained(with_jax_alone), strict=True)
    ):
        difference = float(norm(jax.tree.map(jnp.subtract, got, expected)) / norm(expected))
        print(f"step {step}: loss {loss:.6f}, JAX alone {expected_loss:.6f}; gradients differ by {difference:.1e}")
        if not (abs(loss - expected_loss) <= LOSS_TOLERANCE * expected_loss and difference <= GRADIENT_TOLERANCE):
            raise SystemExit(f"step {step} differs")
    print(f"{STEPS} steps of {MICRO_BATCHES} micro-batches agree")


if __name__ == "__main__":
    main()
