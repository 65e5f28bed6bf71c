"""An engine inside an optax optimizer: optax's own way, flax's modules, weights, skips, workers, donation, refusals."""

import functools
import gc
import math
import weakref

import numpy as np
import pytest
import strategies as draw
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_links, on_ranks

from gradengine import GradientEngine, GradientLayout, local_group
from gradengine.errors import BufferRefused, CallerError, ExchangeError, LayoutMismatch, NonFiniteGradient, WindowError

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import nnx, serialization  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

from gradengine.jax import GradientTree, MultiStepsState, multi_steps  # noqa: E402

K, STEPS, FEATURES, CLASSES = 4, 6, 16, 4
BOUND = 0.2  # the norms of the loops below are 0.3 to 0.6


def engine_for(parameters, **options):
    return GradientEngine(GradientTree(parameters).layout, **{"max_norm": None, "micro_batches": K, **options})


def same_bits(tree, other):
    jax.tree.map(lambda one, two: draw.assert_same_bits(np.asarray(one), np.asarray(two)), tree, other)


def close(tree, other, rtol=1e-5, atol=1e-6):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), tree, other)


def dtypes_of(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def batches(count, rows=8, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x = rng.standard_normal((rows, FEATURES), np.float32)
        yield x, x[:, :CLASSES].argmax(axis=1)


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def model_of(parameters, x):
    for layer in parameters["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ parameters["head"]


def start():
    shapes = [(FEATURES, FEATURES), (FEATURES, FEATURES), (FEATURES, CLASSES)]
    *layers, head = (jnp.asarray(draw.random_array((0, i), shape)) / 4 for i, shape in enumerate(shapes))
    return {"layers": [{"w": w, "b": jnp.zeros(FEATURES)} for w in layers], "head": head}


@jax.jit
@jax.value_and_grad
def loss_and_gradients(parameters, x, y):
    return cross_entropy(model_of(parameters, x), y)


@functools.partial(jax.jit, donate_argnums=0)
def applied(parameters, updates):
    return optax.apply_updates(parameters, updates)


def trained(optimizer, micro_batches, begun=None, update=None):
    """Losses; parameters and state at the end."""
    parameters = start()
    parameters, state = begun or (parameters, optimizer.init(parameters))
    losses = []
    for x, y in micro_batches:
        loss, gradients = loss_and_gradients(parameters, x, y)
        updates, state = (update or optimizer.update)(gradients, state, parameters)
        parameters = applied(parameters, updates)
        losses.append(float(loss))
    return losses, parameters, state


class TestAsOptaxItself:
    """`optax.MultiSteps` around clipping and AdamW: losses to 1e-5, parameters to 1e-4 of themselves or 1e-5."""

    def test_a_loop(self):
        engine = engine_for(start(), max_norm=BOUND)
        losses, parameters, _ = trained(multi_steps(optax.adamw(1e-2), engine), batches(K * STEPS))
        inner = optax.chain(optax.clip_by_global_norm(BOUND), optax.adamw(1e-2))
        alone = optax.MultiSteps(inner, K)
        expected_losses, expected, _ = trained(alone, batches(K * STEPS), update=jax.jit(alone.update))
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        close(parameters, expected, rtol=1e-4, atol=1e-5)
        assert losses[-1] < losses[0]  # it learned
        assert engine.current_step == STEPS

    def test_an_nnx_state_by_itself_and_a_train_state(self):
        """Variables in it, where nnx's optimizer hands over their arrays."""
        rngs, (x, y) = nnx.Rngs(0), next(batches(1))
        # The latter has statistics, which are no parameters.
        model = nnx.Sequential(nnx.Linear(FEATURES, CLASSES, rngs=rngs), nnx.BatchNorm(CLASSES, rngs=rngs))
        parameters = nnx.state(model, nnx.Param)
        optimizer = multi_steps(optax.sgd(1.0), engine_for(parameters, micro_batches=1))
        gradients = nnx.grad(lambda model: cross_entropy(model(x), y))(model)
        updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
        same_bits(updates, jax.tree.map(lambda leaf: -leaf, gradients))
        engine = engine_for(parameters, micro_batches=2)
        own = nnx.Optimizer(model, multi_steps(optax.sgd(1.0), engine), wrt=nnx.Param)
        before = jax.tree.map(jnp.copy, parameters)
        for _ in range(2):
            own.update(model, gradients)
        close(nnx.state(model, nnx.Param), jax.tree.map(lambda leaf, gradient: leaf - gradient, before, gradients))
        assert int(own.opt_state.gradient_step[...]) == 1
        parameters = {"w": jnp.ones(3)}
        optimizer = multi_steps(optax.sgd(0.5), engine_for(parameters, micro_batches=2))
        train = TrainState.create(apply_fn=None, params=parameters, tx=optimizer)
        for value, expected in ((1.0, 1.0), (3.0, 0.0)):
            train = train.apply_gradients(grads={"w": jnp.full(3, value)})
            same_bits(train.params, {"w": jnp.full(3, expected)})

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
            close(*jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (updates, expected)), rtol=1e-2)
        assert dtypes_of(state.inner_opt_state) == dtypes_of(other.inner_opt_state)


class TestWindow:
    PARAMETERS = staticmethod(lambda: {"w": jnp.zeros((2, 3)), "b": [jnp.zeros(2), None]})

    def gradients(self, value):
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), self.PARAMETERS())

    def test_updates_are_zeros_until_it_is_full_and_a_schedule_counts_steps(self):
        parameters = self.PARAMETERS()
        optimizer = multi_steps(optax.sgd(lambda count: 1.0 + count), engine_for(parameters, micro_batches=3))
        state, seen = optimizer.init(parameters), []
        for value in (1.0, 2.0, 6.0, 4.0, 1.0, 1.0):
            updates, state = optimizer.update(self.gradients(value), state, parameters)
            seen.append((float(updates["w"][0, 0]), int(state.mini_step), int(state.gradient_step)))
            same_bits(updates, self.gradients(seen[-1][0]))
        assert seen == [(0, 1, 0), (0, 2, 0), (-3, 0, 1), (0, 1, 1), (0, 2, 1), (-4, 0, 2)]

    @pytest.mark.parametrize("micro_batches", [None, 4])
    def test_it_ends_where_the_caller_says(self, micro_batches):
        optimizer = multi_steps(optax.sgd(1.0), engine_for(self.PARAMETERS(), micro_batches=micro_batches))
        state = optimizer.init(self.PARAMETERS())
        for value, last, expected in ((1, False, 0), (3, True, -2), (5, True, -5), (2, False, 0), (6, np.True_, -4)):
            updates, state = optimizer.update(self.gradients(value), state, self.PARAMETERS(), last=last)
            assert float(updates["w"][0, 0]) == expected

    def test_other_arguments_reach_the_inner_optimizer_and_it_may_be_chained(self):
        """A state may hold a random key, too."""
        parameters, key = self.PARAMETERS(), jax.random.key(0)
        seen = optax.GradientTransformationExtraArgs(
            lambda _: (jnp.float32(0), key),
            lambda updates, state, params=None, *, value: (updates, (state[0] + value, jax.random.split(state[1])[0])),
        )
        optimizer = optax.chain(multi_steps(seen, engine_for(parameters, micro_batches=2)), optax.scale(-2.0))
        state = optimizer.init(parameters)
        for value in (1.0, 10.0, 100.0, 1000.0):
            given = {"value": jnp.float32(value), "weight": jnp.int32(3)}
            updates, state = optimizer.update(self.gradients(1.0), state, parameters, **given)
        assert float(state[0].inner_opt_state[0]) == 1010.0
        same_bits(updates, self.gradients(-2.0))

    @settings(max_examples=10)  # each compiles anew
    @given(
        st.lists(st.tuples(draw.words, draw.shapes, draw.dtypes), min_size=1, max_size=4, unique_by=lambda one: one[0]),
        st.lists(draw.weights, min_size=1, max_size=3),
        draw.seeds,
        st.booleans(),
    )
    def test_any_tree_is_updated_by_what_the_engine_hands_back(self, leaves, weights, seed, has_other_order):
        """Whatever order the engine's layout has."""

        def tree_of(i):
            made = (jnp.asarray(draw.random_array((seed, i, k), *leaf[1:])) for k, leaf in enumerate(leaves))
            return dict(zip([leaf[0] for leaf in leaves], made, strict=True))

        trees = [tree_of(i) for i in range(len(weights))]
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


class TestNotFinite:
    PARAMETERS = staticmethod(lambda: {"w": jnp.ones(4), "b": jnp.ones(3)})

    def gradients(self, value):
        return {"w": jnp.full(4, value), "b": jnp.ones(3)}

    @pytest.mark.parametrize(("bad", "position"), [(math.nan, 0), (math.inf, 1), (-math.inf, 2)])
    def test_a_window_that_is_skipped_leaves_the_inner_state_as_it_was(self, bad, position):
        parameters = self.PARAMETERS()
        engine = engine_for(parameters, micro_batches=3, on_non_finite="skip", max_norm=1.0)
        optimizer = multi_steps(optax.adamw(1e-2), engine)
        state = optimizer.init(parameters)
        for window in range(3):
            before = state
            for i in range(3):
                value = bad if (window, i) == (1, position) else 1.0
                updates, state = optimizer.update(self.gradients(value), state, parameters)
            assert bool(state.skipped) is (window == 1)
            assert (int(state.mini_step), int(state.gradient_step)) == (0, window + 1)
            if state.skipped:
                same_bits(updates, jax.tree.map(jnp.zeros_like, parameters))
                same_bits(state.inner_opt_state, before.inner_opt_state)
        assert int(state.inner_opt_state[0].count) == 2
        assert np.isfinite(updates["w"]).all()

    def test_pass_hands_it_to_an_optimizer_that_looks_itself(self):
        parameters = self.PARAMETERS()
        engine = engine_for(parameters, micro_batches=1, on_non_finite="propagate")
        optimizer = multi_steps(optax.apply_if_finite(optax.sgd(1.0), 5), engine)
        _, state = optimizer.update(self.gradients(math.nan), optimizer.init(parameters), parameters)
        assert int(state.inner_opt_state.notfinite_count) == 1
        assert not state.skipped

    @pytest.mark.parametrize("is_resumed", [False, True])
    def test_raise_keeps_the_window(self, is_resumed):
        engine, resumed = (engine_for(self.PARAMETERS(), micro_batches=2) for _ in range(2))
        optimizer = multi_steps(optax.sgd(1.0), engine)
        _, state = optimizer.update(self.gradients(1.0), optimizer.init(self.PARAMETERS()))
        if is_resumed:
            resumed.load_state_dict(engine.state_dict())
            engine, optimizer = resumed, multi_steps(optax.sgd(1.0), resumed)
        for _ in range(2):
            with pytest.raises(NonFiniteGradient, match="'w'"):
                optimizer.update(self.gradients(math.nan), state)
            assert engine.accumulator.accumulated_count == 2
        engine.discard()
        for expected in (0.0, -3.0):
            updates, state = optimizer.update(self.gradients(3.0), state)
            same_bits(updates, {"w": jnp.full(4, expected), "b": jnp.full(3, expected and -1.0)})


class TestMemory:
    """JAX reads the arena in place, and asynchronously; what is handed out is nobody else's."""

    SIZE = 1 << 16  # large enough to be read in place

    @pytest.mark.parametrize("inner", [optax.identity(), optax.sgd(1.0), optax.trace(0.9)])
    def test_what_an_update_returned_is_not_overwritten(self, inner):
        optimizer = multi_steps(inner, engine_for({"w": jnp.zeros(self.SIZE)}, micro_batches=1))
        state, kept = optimizer.init({"w": jnp.zeros(self.SIZE)}), []
        for value in (1.0, 2.0, 3.0):
            updates, state = optimizer.update({"w": jnp.full(self.SIZE, value)}, state)
            now = updates, state.inner_opt_state
            kept.append((now, jax.tree.map(np.array, now)))
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


def share(rank, world_size, micro_batches):
    """Of each world_size * micro_batches the rank's own, in order."""
    every = list(batches(world_size * micro_batches * 3))
    return [b for i, b in enumerate(every) if i // micro_batches % world_size == rank]


class TestWorkers:
    def test_two_are_one_with_twice_the_micro_batches(self):
        def work(exchange):
            engine = engine_for(start(), exchange=exchange, max_norm=BOUND, micro_batches=1)
            return trained(multi_steps(optax.adamw(1e-2), engine), share(exchange.rank, 2, 1))[1]

        alone = engine_for(start(), max_norm=BOUND, micro_batches=2)
        _, expected, _ = trained(multi_steps(optax.adamw(1e-2), alone), batches(6))
        for found in on_ranks(work, 2):
            same_bits(found, expected)

    def test_a_step_whose_exchange_failed_before_the_sums_is_run_again_by_the_same_call(self):
        second, failures = local_group(2, timeout=60.0, join_timeout=60.0, bucket_bytes=512), []

        def work(exchange):
            engine = engine_for(start(), exchange=exchange, micro_batches=2)
            optimizer = multi_steps(optax.adamw(1e-2), engine)

            def update(*given):
                try:
                    return optimizer.update(*given)
                except ExchangeError as failure:
                    failures.append(failure)
                    engine.reconnect(second[exchange.rank])
                    return optimizer.update(*given)

            _, parameters, state = trained(optimizer, share(exchange.rank, 2, 2)[:2], update=update)
            assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
            return parameters

        expected = on_ranks(work, 2)
        assert failures == []
        found = on_links(work, 2, lost_after=2, bucket_bytes=512)
        assert len(failures) == 2, found
        for one, other in zip(found, expected, strict=True):
            same_bits(one, other)


class TestResumed:
    @pytest.mark.parametrize("position", [1, 2])
    def test_state_and_engine_saved_anywhere_go_on_to_the_same_bytes(self, position):
        every = list(batches(8))

        def fresh():
            engine = engine_for(start(), micro_batches=3, max_norm=BOUND)
            return engine, multi_steps(optax.adamw(1e-2), engine)

        engine, optimizer = fresh()
        _, *begun = trained(optimizer, every[: 2 + position])
        saved = serialization.to_bytes(begun), engine.state_dict()
        _, *expected = trained(optimizer, every[2 + position :], begun)
        engine, optimizer = fresh()
        begun = serialization.from_bytes([start(), optimizer.init(start())], saved[0])
        assert isinstance(begun[1], MultiStepsState)
        engine.load_state_dict(saved[1])
        _, *found = trained(optimizer, every[2 + position :], begun)
        same_bits(found, expected)

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
        with pytest.raises(CallerError, match=r"state_dict\(\)") as caught:
            optimizer.update({"w": jnp.ones(3)}, states[-1])
        assert caught.value.got == f"gradient_step {micro_batches // 2} and mini_step {micro_batches % 2}"
        assert caught.value.expected == "0 and 0"
        assert not engine.has_open_window

    @pytest.mark.parametrize("is_another", [False, True])
    def test_a_new_state_while_a_window_is_open_is_refused(self, is_another):
        """As of a notebook's cell that is run again, whose sum would be of both runs."""
        engine, optimizer, _ = self.made(3)
        optimizer = multi_steps(optax.sgd(1.0), engine) if is_another else optimizer
        state = optimizer.init({"w": jnp.zeros(3)})
        with pytest.raises(CallerError, match="gradient_step 1 and mini_step 0, expected 1 and 1"):
            optimizer.update({"w": jnp.ones(3)}, state)
        earlier = state._replace(gradient_step=jnp.array(0), mini_step=jnp.array(1))
        with pytest.raises(CallerError, match="gradient_step 0 and mini_step 1, expected 1 and 1"):
            optimizer.update({"w": jnp.ones(3)}, earlier)
        engine.discard()
        optimizer.update({"w": jnp.ones(3)}, optimizer.init({"w": jnp.zeros(3)}))

    @pytest.mark.parametrize(("made", "passed"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2), (4, 1)])
    def test_an_older_state_is_refused(self, made, passed):
        """As by a loop that forgets to keep the state that update() returned."""
        engine, optimizer, states = self.made(made)
        count = engine.accumulator.accumulated_count
        with pytest.raises(CallerError, match="not of the engine's window"):
            optimizer.update({"w": jnp.ones(3)}, states[passed])
        assert engine.accumulator.accumulated_count == count
        optimizer.update({"w": jnp.ones(3)}, states[-1])


class TestRefused:
    PARAMETERS = staticmethod(lambda: {"w": jnp.ones((4, 3)), "b": [jnp.ones(4)]})

    def made(self, inner=None, **options):
        engine = engine_for(self.PARAMETERS(), **options)
        optimizer = multi_steps(inner or optax.sgd(1.0), engine)
        return engine, optimizer, optimizer.init(self.PARAMETERS())

    @pytest.mark.parametrize("which", ["updates", "state", "params", "weight", "extra"])
    def test_what_is_traced(self, which):
        """But `init` may be."""
        engine, optimizer, state = self.made(optax.adam(1.0))
        given = {"updates": self.PARAMETERS(), "state": state, "params": self.PARAMETERS(), "weight": 1.0, "extra": 1.0}
        others = [jax.vmap, lambda f: jax.grad(lambda tree: f(tree) or 0.0), nnx.jit] if which == "updates" else []
        for transformation in [jax.jit, *others]:
            with pytest.raises(CallerError, match="traced by JAX"):
                transformation(lambda traced: optimizer.update(**{**given, which: traced})[0])(given[which])
            assert not engine.has_open_window
        same_bits(jax.jit(optimizer.init)(self.PARAMETERS()), state)

    def test_what_cannot_be_added_leaves_the_engine_as_it_was(self):
        deleted, other = self.PARAMETERS(), optax.MultiSteps(optax.sgd(1.0), 2).init(self.PARAMETERS())
        deleted["w"].delete()
        for micro_batches, passed, kind, says in (
            (None, {}, CallerError, "micro_batches=K"),
            (K, {"state": other}, CallerError, "MultiStepsState"),
            (K, {"updates": deleted}, BufferRefused, "'w' was deleted by JAX"),
            (K, {"updates": {"w": jnp.ones((4, 3)), "b": [None]}}, LayoutMismatch, r"'b\.0'"),
            (K, {"weight": "x"}, CallerError, "weight"),
            (K, {"last": 2}, CallerError, "last"),
        ):
            engine, optimizer, state = self.made(micro_batches=micro_batches)
            with pytest.raises(kind, match=says):
                optimizer.update(**{"updates": self.PARAMETERS(), "state": state, **passed})
            assert not engine.has_open_window
        _, optimizer, state = self.made(micro_batches=1)
        _, state = optimizer.update(self.PARAMETERS(), state, last=False)
        with pytest.raises(WindowError):
            optimizer.update(self.PARAMETERS(), state)

    def test_what_is_no_transformation_or_no_engine(self):
        engine, inner = engine_for(self.PARAMETERS()), optax.sgd(1.0)
        for given_to_it, word in (((optax.sgd, engine), "inner"), ((inner, engine.layout), "engine")):
            with pytest.raises(CallerError, match=word):
                multi_steps(*given_to_it)
        with pytest.raises(CallerError, match="donate_state"):
            multi_steps(inner, engine, donate_state=1)

    def test_the_inner_optimizers_own_errors_are_raised_before_anything_is_added(self):
        for micro_batches in (1, 2):
            engine, optimizer, state = self.made(optax.adamw(1.0), micro_batches=micro_batches)
            with pytest.raises(ValueError, match="not passing `params`"):
                optimizer.update(self.PARAMETERS(), state)
            assert (engine.current_step, engine.has_open_window) == (0, False)
            _, state = optimizer.update(self.PARAMETERS(), state, self.PARAMETERS())
