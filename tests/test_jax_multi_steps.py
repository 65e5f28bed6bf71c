"""An engine inside an optax optimizer: optax's own way, flax's modules, weights, skips, workers, donation, refusals."""

import doctest
import functools
import gc
import importlib
import math
import weakref

import numpy as np
import pytest
import strategies as draw
from hostile_values import HOSTILE, refusal_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_links, on_ranks
from transports import Transport, group, outcomes

from gradengine import GradientEngine, GradientLayout, local_group
from gradengine.errors import (
    BufferRefused,
    CallerError,
    ExchangeError,
    LayoutMismatch,
    NonFiniteGradient,
    WindowError,
)

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytest.importorskip("flax")

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx, serialization  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

from gradengine.jax import GradientTree, MultiStepsState, multi_steps  # noqa: E402

K, STEPS, FEATURES, CLASSES = 4, 6, 16, 4
BOUND = 0.2  # the norms of the loops below are 0.3 to 0.6


def engine_for(parameters, **options):
    return GradientEngine(GradientTree(parameters).layout, **{"max_norm": None, "micro_batches": K, **options})


def same_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        draw.assert_same_bits(np.asarray(one), np.asarray(two))


def close(tree, other, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=rtol, atol=atol)


def dtypes_of(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def batches(count, rows=8, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x = rng.standard_normal((rows, FEATURES), np.float32)
        yield x, x[:, :CLASSES].argmax(axis=1)


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.LayerNorm()(jnp.tanh(nn.Dense(FEATURES)(x)))
        return nn.Dense(CLASSES)(x)


LINEN = Linen()


def linen_parameters():
    return LINEN.init(jax.random.key(0), jnp.zeros((1, FEATURES)))


@jax.jit
@jax.value_and_grad
def linen_loss_and_gradients(parameters, x, y):
    return cross_entropy(LINEN.apply(parameters, x), y)


@functools.partial(jax.jit, donate_argnums=0)
def applied(parameters, updates):
    return optax.apply_updates(parameters, updates)


def linen_loop(optimizer, micro_batches, update=None):
    """Losses and parameters at the end."""
    parameters, losses = linen_parameters(), []
    state = optimizer.init(parameters)
    for x, y in micro_batches:
        loss, gradients = linen_loss_and_gradients(parameters, x, y)
        updates, state = (update or optimizer.update)(gradients, state, parameters)
        parameters = applied(parameters, updates)
        losses.append(float(loss))
    return losses, parameters


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(FEATURES, FEATURES, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(FEATURES, rngs=rngs)  # has statistics, which are no parameters
        self.head = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(self.norm(x))


@nnx.jit
def nnx_loss_and_gradients(model, x, y):
    return nnx.value_and_grad(lambda model: cross_entropy(model(x), y))(model)


def nnx_loop(model, optimizer, micro_batches, update=nnx.Optimizer.update):
    losses = []
    for x, y in micro_batches:
        loss, gradients = nnx_loss_and_gradients(model, x, y)
        update(optimizer, model, gradients)
        losses.append(float(loss))
    return losses, nnx.state(model, nnx.Param)


def optax_alone():
    inner = optax.chain(optax.clip_by_global_norm(BOUND), optax.adamw(1e-2))
    return optax.MultiSteps(inner, K)


class TestAsOptaxItself:
    """`optax.MultiSteps` around clipping and AdamW: losses to 1e-5, parameters to 1e-4 of themselves or 1e-5."""

    def test_a_linen_module(self):
        engine = engine_for(linen_parameters(), max_norm=BOUND)
        losses, parameters = linen_loop(multi_steps(optax.adamw(1e-2), engine), batches(K * STEPS))
        alone = optax_alone()
        expected_losses, expected = linen_loop(alone, batches(K * STEPS), jax.jit(alone.update))
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        close(parameters, expected, rtol=1e-4, atol=1e-5)
        assert losses[-1] < losses[0] / 1.2  # it learned
        assert engine.current_step == STEPS

    def test_an_nnx_module_and_its_own_optimizer(self):
        model, other = Nnx(nnx.Rngs(0)), Nnx(nnx.Rngs(0))
        engine = engine_for(nnx.state(model, nnx.Param), max_norm=BOUND)
        optimizer = nnx.Optimizer(model, multi_steps(optax.adamw(1e-2), engine), wrt=nnx.Param)
        losses, parameters = nnx_loop(model, optimizer, batches(K * STEPS))
        alone = nnx.Optimizer(other, optax_alone().gradient_transformation(), wrt=nnx.Param)
        expected_losses, expected = nnx_loop(other, alone, batches(K * STEPS), nnx.jit(nnx.Optimizer.update))
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        close(parameters, expected, rtol=1e-4, atol=1e-5)
        assert int(optimizer.opt_state.gradient_step[...]) == STEPS

    def test_an_nnx_state_by_itself(self):
        """Variables in it, where nnx's optimizer hands over their arrays."""
        model = Nnx(nnx.Rngs(0))
        parameters = nnx.state(model, nnx.Param)
        optimizer = multi_steps(optax.sgd(1.0), engine_for(parameters, micro_batches=1))
        _, gradients = nnx_loss_and_gradients(model, *next(batches(1)))
        updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
        same_bits(updates, jax.tree.map(lambda leaf: -leaf, gradients))

    def test_a_train_state(self):
        parameters = linen_parameters()
        optimizer = multi_steps(optax.sgd(0.1), engine_for(parameters))
        train = TrainState.create(apply_fn=LINEN.apply, params=parameters, tx=optimizer)
        for x, y in batches(K):
            same_bits(train.params, parameters)
            train = train.apply_gradients(grads=linen_loss_and_gradients(train.params, x, y)[1])
        mean = jax.tree.map(
            lambda *leaves: sum(leaves) / K, *(linen_loss_and_gradients(parameters, *b)[1] for b in batches(K))
        )
        close(train.params, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, mean))

    def test_the_inner_optimizer_in_lower_precision(self):
        """bf16 gradients reach it in bf16, and its state and updates have the dtypes that optax gives them."""
        parameters = {"w": jnp.ones((3, 5), jnp.bfloat16), "b": jnp.ones(5)}
        ours = multi_steps(optax.adam(1e-2), engine_for(parameters, micro_batches=2))
        theirs = optax.MultiSteps(optax.adam(1e-2), 2)
        state, other = ours.init(parameters), theirs.init(parameters)
        for value in (0.5, 1.0, 2.0, 0.25):  # whose means are exact
            gradients = jax.tree.map(lambda leaf, value=value: jnp.full_like(leaf, value), parameters)
            updates, state = ours.update(gradients, state, parameters)
            expected, other = theirs.update(gradients, other, parameters)
            assert dtypes_of(updates) == dtypes_of(expected)
            close(
                *(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in (updates, expected)), rtol=1e-2
            )
        assert dtypes_of(state.inner_opt_state) == dtypes_of(other.inner_opt_state)


class TestWindow:
    PARAMETERS = staticmethod(lambda: {"w": jnp.zeros((2, 3)), "b": [jnp.zeros(2), None]})

    def gradients(self, value):
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), self.PARAMETERS())

    def test_updates_are_zeros_until_it_is_full(self):
        parameters = self.PARAMETERS()
        optimizer = multi_steps(optax.sgd(1.0), engine_for(parameters, micro_batches=3))
        state, seen = optimizer.init(parameters), []
        for value in (1.0, 2.0, 6.0, 4.0):
            updates, state = optimizer.update(self.gradients(value), state, parameters)
            seen.append((float(updates["w"][0, 0]), int(state.mini_step), int(state.gradient_step)))
            same_bits(updates, self.gradients(seen[-1][0]))
        assert seen == [(0, 1, 0), (0, 2, 0), (-3, 0, 1), (0, 1, 1)]

    def test_a_schedule_counts_steps_and_not_micro_batches(self):
        parameters = self.PARAMETERS()
        optimizer = multi_steps(optax.sgd(lambda count: 1.0 + count), engine_for(parameters, micro_batches=2))
        state, seen = optimizer.init(parameters), []
        for _ in range(6):
            updates, state = optimizer.update(self.gradients(1.0), state)
            seen.append(float(updates["w"][0, 0]))
        assert seen == [0, -1, 0, -2, 0, -3]

    @pytest.mark.parametrize("micro_batches", [None, 4])
    def test_it_ends_where_the_caller_says(self, micro_batches):
        parameters = self.PARAMETERS()
        engine = engine_for(parameters, micro_batches=micro_batches)
        optimizer = multi_steps(optax.sgd(1.0), engine)
        state = optimizer.init(parameters)
        for value, last, expected in ((1, False, 0), (3, True, -2), (5, True, -5), (2, False, 0), (6, np.True_, -4)):
            updates, state = optimizer.update(self.gradients(value), state, parameters, last=last)
            assert float(updates["w"][0, 0]) == expected

    def test_weights_are_those_of_one_large_batch(self):
        """Plain AdamW on each step's rows as one batch."""
        sizes = [3, 16, 8, 5]
        engine = engine_for(linen_parameters(), max_norm=BOUND)
        optimizer = multi_steps(optax.adamw(1e-2), engine)
        plain = optax.chain(optax.clip_by_global_norm(BOUND), optax.adamw(1e-2))
        plain_update = jax.jit(plain.update)
        parameters = expected = linen_parameters()
        state, plain_state = optimizer.init(parameters), plain.init(expected)
        for step in range(STEPS):
            parts = [next(batches(1, rows, seed=(step, rows))) for rows in sizes]
            for x, y in parts:
                _, gradients = linen_loss_and_gradients(parameters, x, y)
                updates, state = optimizer.update(gradients, state, parameters, weight=jnp.int32(len(x)))
            parameters = optax.apply_updates(parameters, updates)
            _, gradients = linen_loss_and_gradients(expected, *map(np.concatenate, zip(*parts, strict=True)))
            updates, plain_state = plain_update(gradients, plain_state, expected)
            expected = optax.apply_updates(expected, updates)
            close(parameters, expected, rtol=1e-4, atol=1e-5)

    @settings(max_examples=20)  # each compiles anew
    @given(
        st.lists(st.tuples(draw.words, draw.shapes, draw.dtypes), min_size=1, max_size=4, unique_by=lambda one: one[0]),
        st.lists(draw.weights, min_size=1, max_size=3),
        draw.seeds,
        st.booleans(),
    )
    def test_any_tree_is_updated_by_what_the_engine_hands_back(self, leaves, weights, seed, has_other_order):
        """Whatever order the engine's layout has."""
        trees = [
            {
                name: jnp.asarray(draw.random_array((seed, i, k), shape, dtype))
                for k, (name, shape, dtype) in enumerate(leaves)
            }
            for i, _ in enumerate(weights)
        ]
        slots = GradientTree(trees[0]).layout.slots
        layout = GradientLayout.of({slot.name: slot.shape for slot in (slots[::-1] if has_other_order else slots)})
        plain, engine = (GradientEngine(layout, max_norm=1.0) for _ in range(2))
        optimizer = multi_steps(optax.identity(), engine)
        state = optimizer.init(trees[0])
        for i, (tree, weight) in enumerate(zip(trees, weights, strict=True)):
            plain.add(tree, weight)
            updates, state = optimizer.update(tree, state, weight=weight, last=i + 1 == len(weights))
        result = plain.step()
        expected = {n: np.asarray(g).astype(trees[0][n].dtype) for n, g in result.gradients.items()}
        same_bits(updates, expected)
        assert (float(state.norm), float(state.scale)) == (np.float32(result.norm), np.float32(result.scale))

    def test_other_arguments_reach_the_inner_optimizer_and_it_may_be_chained(self):
        parameters = self.PARAMETERS()
        seen = optax.GradientTransformationExtraArgs(
            lambda _: jnp.float32(0), lambda updates, state, params=None, *, value: (updates, state + value)
        )
        optimizer = optax.chain(multi_steps(seen, engine_for(parameters, micro_batches=2)), optax.scale(-2.0))
        state = optimizer.init(parameters)
        for value in (1.0, 10.0, 100.0, 1000.0):
            updates, state = optimizer.update(
                self.gradients(1.0), state, parameters, value=jnp.float32(value), weight=3
            )
        assert float(state[0].inner_opt_state) == 1010.0
        same_bits(updates, self.gradients(-2.0))

    def test_a_state_with_a_random_key(self):
        parameters, key = self.PARAMETERS(), jax.random.key(0)
        optimizer = multi_steps(optax.add_noise(0.1, 0.5, key), engine_for(parameters, micro_batches=1))
        plain = optax.add_noise(0.1, 0.5, key)
        state, other = optimizer.init(parameters), plain.init(parameters)
        for _ in range(2):
            updates, state = optimizer.update(self.gradients(1.0), state)
            expected, other = plain.update(self.gradients(1.0), other)
            close(updates, expected)


class TestNotFinite:
    PARAMETERS = staticmethod(lambda: {"w": jnp.ones(4), "b": jnp.ones(3)})

    def gradients(self, value):
        return {"w": jnp.full(4, value), "b": jnp.ones(3)}

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("position", range(3))
    def test_a_window_that_is_skipped_leaves_the_inner_state_as_it_was(self, bad, position):
        parameters = self.PARAMETERS()
        engine = engine_for(parameters, micro_batches=3, on_non_finite="skip", max_norm=1.0)
        optimizer = multi_steps(optax.adamw(1e-2), engine)
        state = optimizer.init(parameters)
        for _ in range(3):
            updates, state = optimizer.update(self.gradients(1.0), state, parameters)
        assert not state.skipped
        before = state
        for i in range(3):
            updates, state = optimizer.update(self.gradients(bad if i == position else 1.0), state, parameters)
        assert bool(state.skipped)
        assert (int(state.mini_step), int(state.gradient_step)) == (0, 2)
        same_bits(updates, jax.tree.map(jnp.zeros_like, parameters))
        same_bits(state.inner_opt_state, before.inner_opt_state)
        for _ in range(3):
            updates, state = optimizer.update(self.gradients(1.0), state, parameters)
        assert int(state.inner_opt_state[0].count) == 2
        assert not state.skipped
        assert np.isfinite(updates["w"]).all()

    def test_pass_hands_it_to_an_optimizer_that_looks_itself(self):
        parameters = self.PARAMETERS()
        engine = engine_for(parameters, micro_batches=1, on_non_finite="pass")
        optimizer = multi_steps(optax.apply_if_finite(optax.sgd(1.0), 5), engine)
        _, state = optimizer.update(self.gradients(math.nan), optimizer.init(parameters), parameters)
        assert int(state.inner_opt_state.notfinite_count) == 1
        assert not state.skipped

    def test_raise_keeps_the_window_until_it_is_dropped(self):
        parameters = self.PARAMETERS()
        engine = engine_for(parameters, micro_batches=2)
        optimizer = multi_steps(optax.sgd(1.0), engine)
        _, state = optimizer.update(self.gradients(1.0), optimizer.init(parameters), parameters)
        for _ in range(2):
            with pytest.raises(NonFiniteGradient, match="'w' is not finite"):
                optimizer.update(self.gradients(math.nan), state, parameters)
            assert engine.accumulator.accumulated_count == 2
        engine.discard()
        for expected in (0.0, -3.0):
            updates, state = optimizer.update(self.gradients(3.0), state, parameters)
            same_bits(updates, {"w": jnp.full(4, expected), "b": jnp.full(3, expected and -1.0)})


class TestMemory:
    """JAX reads the arena in place, and asynchronously; what is handed out is nobody else's."""

    SIZE = 1 << 16  # large enough to be read in place

    @pytest.mark.parametrize(
        "inner", [optax.identity(), optax.sgd(1.0), optax.trace(0.9)], ids=["identity", "sgd", "trace"]
    )
    def test_what_an_update_returned_is_not_overwritten(self, inner):
        parameters = {"w": jnp.zeros(self.SIZE)}
        optimizer = multi_steps(inner, engine_for(parameters, micro_batches=1))
        state, kept = optimizer.init(parameters), []
        for value in (1.0, 2.0, 3.0):
            updates, state = optimizer.update({"w": jnp.full(self.SIZE, value)}, state, parameters)
            kept.append(((updates, state.inner_opt_state), jax.tree.map(np.array, (updates, state.inner_opt_state))))
        for now, then in kept:
            same_bits(now, then)

    def test_the_arena_is_read_before_the_next_micro_batch_overwrites_it(self):
        """By an inner optimizer that is slow, whose results the next gradients do not need: they are there before."""
        size = 256
        parameters = {"w": jnp.zeros((size, size))}

        def slow(updates, state, params=None):
            product = jax.lax.fori_loop(0, 300, lambda _, x: x @ jnp.eye(size), jnp.eye(size))
            return updates, state + product @ updates["w"]

        inner = optax.GradientTransformation(lambda _: jnp.zeros((size, size)), slow)
        optimizer = multi_steps(inner, engine_for(parameters, micro_batches=1))
        state = optimizer.init(parameters)
        every = jax.block_until_ready([{"w": jnp.full((size, size), value)} for value in (1.0, 2.0, 4.0, 8.0)])
        for gradients in every:
            _, state = optimizer.update(gradients, state)
        np.testing.assert_array_equal(state.inner_opt_state, np.full((size, size), 15.0))

    def test_gradients_and_parameters_may_be_donated_to_the_next_call(self):
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def gradients_into(parameters, last_gradients, x):
            """Into the memory of the last ones."""
            gradients = jax.grad(lambda p: jnp.sum((p["w"] * x) ** 2))(parameters)
            return jax.tree.map(lambda p: p + 0, parameters), jax.tree.map(
                lambda g, o: g + 0 * o, gradients, last_gradients
            )

        def run(donated):
            parameters, gradients = {"w": jnp.linspace(0, 1, self.SIZE)}, {"w": jnp.zeros(self.SIZE)}
            optimizer = multi_steps(optax.adamw(1e-2), engine_for(parameters, micro_batches=3), donate_state=donated)
            state, step = optimizer.init(parameters), gradients_into if donated else gradients_into.__wrapped__
            for i in range(9):
                parameters, gradients = step(parameters, gradients, jnp.float32(i))
                updates, state = optimizer.update(gradients, state, parameters)
                parameters = (applied if donated else optax.apply_updates)(parameters, updates)
            return parameters

        close(run(donated=True), run(donated=False))

    @pytest.mark.parametrize("donated", [True, False])
    def test_the_inner_state_is_donated_where_that_is_asked_for(self, donated):
        parameters = {"w": jnp.ones(self.SIZE)}
        optimizer = multi_steps(optax.adam(1e-2), engine_for(parameters, micro_batches=2), donate_state=donated)
        state, deleted = optimizer.init(parameters), []
        for _ in range(4):
            before = state
            _, state = optimizer.update({"w": jnp.ones(self.SIZE)}, state, parameters)
            deleted.append(before.inner_opt_state[0].mu["w"].is_deleted())
        assert deleted == [False, donated, False, donated]

    def test_the_arena_goes_with_the_optimizer(self):
        """Functions that JAX has compiled keep nothing of it."""
        parameters = {"w": jnp.ones(3)}
        optimizer = multi_steps(optax.adam(1.0), engine_for(parameters, micro_batches=1))
        arena = weakref.ref(optimizer.update.__self__._engine.accumulator)
        optimizer.update(parameters, optimizer.init(parameters))
        del optimizer
        gc.collect()
        assert arena() is None

    def test_gradients_that_were_donated_are_refused_and_nothing_is_added(self):
        parameters = {"w": jnp.ones(3)}
        engine = engine_for(parameters)
        optimizer = multi_steps(optax.sgd(1.0), engine)
        gradients = {"w": jnp.ones(3)}
        gradients["w"].delete()
        with pytest.raises(BufferRefused, match="'w' was deleted by JAX"):
            optimizer.update(gradients, optimizer.init(parameters), parameters)
        assert engine.accumulator.accumulated_count == 0


def trained(optimizer, micro_batches):
    parameters = linen_parameters()
    state = optimizer.init(parameters)
    for x, y in micro_batches:
        updates, state = optimizer.update(linen_loss_and_gradients(parameters, x, y)[1], state, parameters)
        parameters = applied(parameters, updates)
    return parameters


def share(rank, world_size, micro_batches):
    """Of each world_size * micro_batches the rank's own, in order."""
    every = list(batches(world_size * micro_batches * 3))
    return [b for i, b in enumerate(every) if i // micro_batches % world_size == rank]


class TestWorkers:
    @pytest.mark.parametrize("transport", [Transport.THREADS, Transport.SERVER], ids=["threads", "served"])
    @pytest.mark.parametrize("micro_batches", [1, 2])
    def test_two_are_one_with_twice_the_micro_batches(self, transport, micro_batches):
        """Bit for bit where each has one, whose sum over workers is the sum over the window."""

        def work(exchange):
            engine = engine_for(linen_parameters(), exchange=exchange, max_norm=BOUND, micro_batches=micro_batches)
            found = trained(multi_steps(optax.adamw(1e-2), engine), share(exchange.rank, 2, micro_batches))
            exchange.barrier()
            return found

        alone = engine_for(linen_parameters(), max_norm=BOUND, micro_batches=2 * micro_batches)
        expected = trained(multi_steps(optax.adamw(1e-2), alone), batches(2 * micro_batches * 3))
        with group(transport, 2, timeout=60.0, join_timeout=60.0) as exchanges:
            first, second = outcomes(work, exchanges)
        same_bits(first, second)
        (same_bits if micro_batches == 1 else functools.partial(close, rtol=1e-4, atol=1e-5))(first, expected)

    @pytest.mark.parametrize("lost_after", [6, 8, 10, 12])
    def test_a_step_whose_exchange_failed_is_run_again_by_the_same_call(self, lost_after):
        expected = on_ranks(
            lambda exchange: trained(
                multi_steps(optax.adamw(1e-2), engine_for(linen_parameters(), exchange=exchange, micro_batches=2)),
                share(exchange.rank, 2, 2)[:2],
            ),
            2,
        )
        second, failures = local_group(2, timeout=60.0, join_timeout=60.0, bucket_bytes=512), []

        def work(exchange):
            parameters = linen_parameters()
            engine = engine_for(parameters, exchange=exchange, micro_batches=2)
            optimizer = multi_steps(optax.adamw(1e-2), engine)
            state = optimizer.init(parameters)
            for x, y in share(exchange.rank, 2, 2)[:2]:
                _, gradients = linen_loss_and_gradients(parameters, x, y)
                try:
                    updates, state = optimizer.update(gradients, state, parameters)
                except ExchangeError as failure:
                    failures.append(failure)
                    engine.reconnect(second[exchange.rank])
                    updates, state = optimizer.update(gradients, state, parameters)
            assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
            return applied(parameters, updates)

        found = on_links(work, 2, lost_after=lost_after, bucket_bytes=512)
        assert len(failures) == 2, found
        for one, other in zip(found, expected, strict=True):
            same_bits(one, other)


class TestResumed:
    @pytest.mark.parametrize("position", range(4))
    def test_state_and_engine_saved_anywhere_go_on_to_the_same_bytes(self, position):
        every = list(batches(8))

        def fresh():
            engine = engine_for(linen_parameters(), micro_batches=3, max_norm=BOUND)
            return engine, multi_steps(optax.adamw(1e-2), engine)

        def run(optimizer, parameters, state, micro_batches):
            for x, y in micro_batches:
                updates, state = optimizer.update(linen_loss_and_gradients(parameters, x, y)[1], state, parameters)
                parameters = optax.apply_updates(parameters, updates)
            return parameters, state

        engine, optimizer = fresh()
        parameters, state = run(
            optimizer, linen_parameters(), optimizer.init(linen_parameters()), every[: 2 + position]
        )
        saved = serialization.to_bytes((parameters, state)), engine.state_dict()
        expected, last = run(optimizer, parameters, state, every[2 + position :])

        engine, optimizer = fresh()
        template = linen_parameters(), optimizer.init(linen_parameters())
        parameters, state = serialization.from_bytes(template, saved[0])
        assert isinstance(state, MultiStepsState)
        engine.load_state_dict(saved[1])
        found, state = run(optimizer, parameters, state, every[2 + position :])
        same_bits(found, expected)
        same_bits(state, last)

    def made(self, micro_batches):
        parameters = {"w": jnp.zeros(3)}
        engine = engine_for(parameters, micro_batches=2)
        optimizer = multi_steps(optax.sgd(1.0), engine)
        states = [optimizer.init(parameters)]
        for _ in range(micro_batches):
            states.append(optimizer.update({"w": jnp.ones(3)}, states[-1])[1])
        return engine, optimizer, states

    @pytest.mark.parametrize("micro_batches", [2, 3])
    def test_a_state_without_its_engine_is_refused(self, micro_batches):
        _, _, states = self.made(micro_batches)
        engine, optimizer, _ = self.made(0)
        said = rf"window: got gradient_step 1 and mini_step {micro_batches - 2}, expected 0 and 0; .* state_dict\(\)"
        with pytest.raises(CallerError, match=said):
            optimizer.update({"w": jnp.ones(3)}, states[-1])
        assert not engine.has_open_window

    @pytest.mark.parametrize(("made", "passed"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2), (4, 1)])
    def test_an_older_state_is_refused(self, made, passed):
        """As by a loop that forgets to keep the state that update() returned."""
        engine, optimizer, states = self.made(made)
        count = engine.accumulator.accumulated_count
        with pytest.raises(CallerError, match="the optimizer's state is not of the engine's window"):
            optimizer.update({"w": jnp.ones(3)}, states[passed])
        assert engine.accumulator.accumulated_count == count
        optimizer.update({"w": jnp.ones(3)}, states[-1])

    @pytest.mark.parametrize("is_another", [False, True])
    def test_a_new_state_while_a_window_is_open_is_refused(self, is_another):
        """As of a notebook's cell that is run again, whose sum would be of both runs."""
        engine, optimizer, _ = self.made(3)
        optimizer = multi_steps(optax.sgd(1.0), engine) if is_another else optimizer
        state = optimizer.init({"w": jnp.zeros(3)})
        with pytest.raises(CallerError, match="got gradient_step 1 and mini_step 0, expected 1 and 1"):
            optimizer.update({"w": jnp.ones(3)}, state)
        engine.discard()
        optimizer.update({"w": jnp.ones(3)}, optimizer.init({"w": jnp.zeros(3)}))

    def test_a_state_of_mid_window_without_its_engine_is_refused_also_in_the_first_step(self):
        _, _, states = self.made(1)
        engine, optimizer, _ = self.made(0)
        with pytest.raises(CallerError, match="got gradient_step 0 and mini_step 1, expected 0 and 0"):
            optimizer.update({"w": jnp.ones(3)}, states[-1])
        assert not engine.has_open_window


class TestRefused:
    PARAMETERS = staticmethod(lambda: {"w": jnp.ones((4, 3)), "b": [jnp.ones(4)]})

    def made(self, inner=None, **options):
        engine = engine_for(self.PARAMETERS(), **options)
        optimizer = multi_steps(inner or optax.sgd(1.0), engine)
        return engine, optimizer, optimizer.init(self.PARAMETERS())

    @pytest.mark.parametrize("transformation", [jax.jit, jax.vmap, lambda f: jax.grad(lambda tree: f(tree) or 0.0)])
    def test_gradients_that_are_traced(self, transformation):
        engine, optimizer, state = self.made()
        with pytest.raises(
            CallerError, match=r"is traced by JAX, and an engine is not called under jax.jit; call it out"
        ):
            transformation(lambda gradients: optimizer.update(gradients, state)[0])(self.PARAMETERS())
        assert not engine.has_open_window

    @pytest.mark.parametrize("which", ["state", "params", "weight"])
    def test_anything_else_that_is_traced(self, which):
        engine, optimizer, state = self.made()
        given = {"state": state, "params": self.PARAMETERS(), "weight": 1.0}
        with pytest.raises(CallerError, match="is traced by JAX"):
            jax.jit(lambda traced: optimizer.update(self.PARAMETERS(), **{**given, which: traced})[0])(given[which])
        assert not engine.has_open_window

    def test_under_nnx_jit(self):
        model = Nnx(nnx.Rngs(0))
        optimizer = nnx.Optimizer(
            model, multi_steps(optax.sgd(1.0), engine_for(nnx.state(model, nnx.Param))), wrt=nnx.Param
        )
        with pytest.raises(CallerError, match="is traced by JAX"):
            nnx.jit(lambda model, optimizer: optimizer.update(model, nnx.state(model, nnx.Param)))(model, optimizer)

    def test_init_may_be_traced(self):
        _, optimizer, state = self.made(optax.adam(1.0))
        same_bits(jax.jit(optimizer.init)(self.PARAMETERS()), state)

    @pytest.mark.parametrize(
        ("gradients", "said"),
        [
            ({"w": jnp.ones((4, 3))}, r"'b\.0'"),
            ({"w": jnp.ones((4, 3)), "b": [None]}, r"'b\.0'"),
            ({"w": jnp.ones((3, 4)), "b": [jnp.ones(4)]}, "'w' "),
            ({"w": jnp.ones((4, 3)), "b": [jnp.ones(4), jnp.ones(1)]}, r"'b\.1'"),
            ({"v": jnp.ones((4, 3)), "b": [jnp.ones(4)]}, "'v'|'w'"),
        ],
    )
    @pytest.mark.parametrize("is_first", [True, False])
    def test_gradients_of_another_tree(self, gradients, said, is_first):
        engine, optimizer, state = self.made()
        if not is_first:
            _, state = optimizer.update(self.PARAMETERS(), state)
        with pytest.raises(LayoutMismatch, match=said):
            optimizer.update(gradients, state)
        assert engine.accumulator.accumulated_count == (not is_first)
        optimizer.update(self.PARAMETERS(), state)

    def test_a_micro_batch_that_is_one_too_many(self):
        _, optimizer, state = self.made(micro_batches=1)
        _, state = optimizer.update(self.PARAMETERS(), state, last=False)
        with pytest.raises(WindowError, match="1"):
            optimizer.update(self.PARAMETERS(), state)

    def test_a_window_without_an_end(self):
        engine, optimizer, state = self.made(micro_batches=None)
        with pytest.raises(
            CallerError, match=r"it is not known where the window ends; build the engine with micro_batches=K"
        ):
            optimizer.update(self.PARAMETERS(), state)
        assert not engine.has_open_window

    def test_the_inner_optimizers_own_errors_are_raised_before_anything_is_added(self):
        for micro_batches in (1, 2):
            engine, optimizer, state = self.made(optax.adamw(1.0), micro_batches=micro_batches)
            with pytest.raises(ValueError, match="not passing `params`"):
                optimizer.update(self.PARAMETERS(), state)
            assert (engine.current_step, engine.has_open_window) == (0, False)
            _, state = optimizer.update(self.PARAMETERS(), state, self.PARAMETERS())

    def test_another_optimizers_state(self):
        _, optimizer, _ = self.made()
        with pytest.raises(CallerError, match=r"state is not a MultiStepsState: got .*; pass what init\(\)"):
            optimizer.update(self.PARAMETERS(), optax.MultiSteps(optax.sgd(1.0), 2).init(self.PARAMETERS()))

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (lambda engine: multi_steps(optax.sgd, engine), "inner has no init"),
            (lambda engine: multi_steps(optax.sgd(1.0), engine.layout), "engine is not a GradientEngine"),
            (lambda engine: multi_steps(optax.sgd(1.0), engine, donate_state=1), "donate_state is not a bool"),
        ],
    )
    def test_what_is_no_transformation_or_no_engine(self, call, said):
        with pytest.raises(CallerError, match=said):
            call(engine_for(self.PARAMETERS()))

    @pytest.mark.parametrize(
        "call",
        [
            lambda engine, v: multi_steps(v, engine),
            lambda engine, v: multi_steps(optax.sgd(1.0), v),
            lambda engine, v: multi_steps(optax.sgd(1.0), engine, donate_state=v),
            lambda engine, v: updated(engine, last=v),
            lambda engine, v: updated(engine, weight=v),
        ],
    )
    def test_whatever_a_call_is_given_it_is_taken_or_refused_by_an_error_of_ours(self, call):
        for value in HOSTILE:
            assert len(refusal_of(functools.partial(call, engine_for(self.PARAMETERS()), value))) < 1500


def updated(engine, **options):
    optimizer = multi_steps(optax.sgd(1.0), engine)
    return optimizer.update(TestRefused.PARAMETERS(), optimizer.init(TestRefused.PARAMETERS()), **options)


def test_the_examples_in_the_docstrings_run():
    found = doctest.testmod(importlib.import_module("gradengine.jax.multi_steps"))
    assert found.attempted >= 7
    assert found.failed == 0
