"""The whole step, on one worker and on several: numbers, verdicts, and what is left after an error."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient, connect, local_group
from gradengine.errors import (
    BufferRefused,
    CallerError,
    ExchangeError,
    HandshakeRefused,
    LayoutMismatch,
    PeerLost,
    WindowError,
)

LAYOUT = GradientLayout.transformer(2, 8, 4, 12, 16)
SMALL = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})


def random_gradients(seed, layout=SMALL, scale=1.0):
    rng = np.random.default_rng(seed)
    return [scale * rng.standard_normal(slot.shape, dtype=np.float32) for slot in layout.slots]


def copies(result):
    return {name: array.copy() for name, array in result.gradients.items()}


def on_ranks(work, world_size, **options):
    """Run work(exchange) on a thread for each rank of a local group; its results or errors in rank order."""
    outcomes = [None] * world_size

    def run(exchange):
        try:
            outcomes[exchange.rank] = work(exchange)
        except Exception as error:
            outcomes[exchange.rank] = error
            exchange.close()

    options = {"timeout": 20.0, "join_timeout": 10.0, **options}
    threads = [threading.Thread(target=run, args=(e,)) for e in local_group(world_size, **options)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def expected_step(micro_batches, weights, max_norm):
    """The contract in NumPy: fp32 sums in order, norm in fp64, one fp32 factor."""
    total = [np.float32(weights[0]) * g if weights[0] != 1 else g.copy() for g in micro_batches[0]]
    for gradients, weight in zip(micro_batches[1:], weights[1:], strict=True):
        total = [t + (g if weight == 1 else np.float32(weight) * g) for t, g in zip(total, gradients, strict=True)]
    norm = math.sqrt(sum(float(np.sum(np.square(t, dtype=np.float64))) for t in total)) / sum(weights)
    scale = max_norm / norm if norm > max_norm else 1.0
    return [t * np.float32(scale / sum(weights)) for t in total], norm, scale


class TestOneWorker:
    @pytest.mark.parametrize("hold", [1, 2, 3, 5])
    @pytest.mark.parametrize("known", [True, False])
    def test_a_step_is_the_contract(self, hold, known):
        micro_batches = [random_gradients(seed) for seed in range(4)]
        weights = [1.0, 3.0, 2.0, 1.0]
        engine = GradientEngine(SMALL, max_norm=0.5, micro_batches=4 if known else None, hold=hold)
        for _ in range(2):  # the second window overwrites what the first left
            for gradients, weight in zip(micro_batches, weights, strict=True):
                engine.add(gradients, weight)
            result = engine.step()
            gradients, norm, scale = expected_step(micro_batches, weights, 0.5)
            assert result.norm == pytest.approx(norm, rel=1e-6)
            assert result.scale == pytest.approx(scale, rel=1e-6)
            assert (result.weight, result.micro_batches, result.skipped) == (7.0, 4, False)
            for slot, wanted in zip(SMALL.slots, gradients, strict=True):
                np.testing.assert_allclose(result.gradients[slot.name], wanted, rtol=3e-7)

    def test_hold_and_fused_norm_change_no_bit(self):
        micro_batches = [random_gradients(seed, LAYOUT) for seed in range(5)]
        outcomes = []
        for hold, known in [(1, None), (1, 5), (2, None), (4, 5), (5, None), (9, 5)]:
            engine = GradientEngine(LAYOUT, max_norm=0.1, micro_batches=known, hold=hold)
            for gradients in micro_batches:
                engine.add(gradients)
            result = engine.step()
            outcomes.append((result.norm, result.scale, {n: a.tobytes() for n, a in result.gradients.items()}))
        assert all(outcome == outcomes[0] for outcome in outcomes)

    def test_one_micro_batch_within_the_bound_comes_back_as_it_was(self):
        gradients = random_gradients(0)
        engine = GradientEngine(SMALL, max_norm=None)
        engine.add(gradients)
        for array, got in zip(gradients, engine.step().gradients.values(), strict=True):
            assert array.tobytes() == got.tobytes()

    def test_gradients_are_views_of_the_arena(self):
        engine = GradientEngine(SMALL)
        engine.add(random_gradients(0))
        result = engine.step()
        assert all(np.shares_memory(g, engine.accumulator.arena.data) for g in result.gradients.values())
        assert [g.shape for g in result.gradients.values()] == [slot.shape for slot in SMALL.slots]

    def test_loss_scale_is_undone(self):
        plain, scaled = GradientEngine(SMALL, max_norm=0.3), GradientEngine(SMALL, max_norm=0.3, loss_scale=1024.0)
        gradients = random_gradients(0)
        plain.add(gradients)
        scaled.add([1024 * g for g in gradients])
        a, b = plain.step(), scaled.step()
        assert a.norm == b.norm
        assert all(a.gradients[n].tobytes() == b.gradients[n].tobytes() for n in a.gradients)

    def test_blocks_may_come_one_by_one_in_any_order(self):
        engine, whole = GradientEngine(LAYOUT, max_norm=0.2), GradientEngine(LAYOUT, max_norm=0.2)
        for seed in range(2):
            gradients = random_gradients(seed, LAYOUT)
            by_name = dict(zip((slot.name for slot in LAYOUT.slots), gradients, strict=True))
            whole.add(gradients)
            last = seed == 1
            engine.add_non_block("lm_head", by_name["lm_head"], last=last)
            engine.add_non_block(1, by_name["final_norm"], last=last)
            for block in reversed(LAYOUT.blocks):
                engine.add_block(block.index, [by_name[slot.name] for slot in block.slots], last=last)
            engine.add_non_block("embedding", by_name["embedding"], last=last)
        a, b = engine.step(), whole.step()
        assert a.norm == b.norm
        assert all(a.gradients[n].tobytes() == b.gradients[n].tobytes() for n in a.gradients)

    def test_none_is_a_zero_gradient(self):
        engine = GradientEngine(SMALL, max_norm=None)
        head = np.ones(1, np.float32)
        engine.add([None, None, head])
        engine.add([None, np.ones(7, np.float32), head])
        result = engine.step()
        assert not result.gradients["layers.0.w"].any()
        np.testing.assert_array_equal(result.gradients["layers.1.w"], np.full(7, 0.5, np.float32))
        np.testing.assert_array_equal(result.gradients["head"], head)

    def test_groups_have_norms_of_their_own(self):
        engine = GradientEngine(SMALL, max_norm={"block 0": 0.5, "block 1": math.inf, "rest": 0.25}, groups="block")
        gradients = random_gradients(1)
        engine.add(gradients)
        result = engine.step()
        norms = [float(np.linalg.norm(g.astype(np.float64))) for g in gradients]
        assert list(result.group_norms.values()) == pytest.approx(norms, rel=1e-6)
        assert result.group_scales["block 1"] == 1.0
        assert np.linalg.norm(result.gradients["layers.0.w"]) == pytest.approx(0.5, rel=1e-6)
        assert abs(float(result.gradients["head"][0])) == pytest.approx(min(0.25, norms[2]), rel=1e-6)
        assert result.norm == pytest.approx(math.hypot(*norms), rel=1e-6)
        assert result.scale == min(result.group_scales.values())

    def test_bf16_in_adds_up_in_fp32(self):
        ml_dtypes = pytest.importorskip("ml_dtypes")
        engine = GradientEngine(GradientLayout.of([(1,)]), max_norm=None)
        engine.add([np.array([256], ml_dtypes.bfloat16)])
        engine.add([np.array([1], ml_dtypes.bfloat16)])
        assert engine.step().gradients["0"][0] * 2 == 257  # bf16 itself would say 256


class TestOut:
    def test_destinations_are_written_in_their_dtype(self):
        ml_dtypes = pytest.importorskip("ml_dtypes")
        dtypes = [np.float32, np.float16, ml_dtypes.bfloat16]
        out = [np.full(slot.shape, 9, dtype) for slot, dtype in zip(SMALL.slots, dtypes, strict=True)]
        engine, plain = GradientEngine(SMALL, max_norm=0.5), GradientEngine(SMALL, max_norm=0.5)
        for e in (engine, plain):
            e.add(random_gradients(0))
        wanted = plain.step().gradients
        result = engine.step(out=out)
        for slot, array in zip(SMALL.slots, out, strict=True):
            np.testing.assert_array_equal(array, wanted[slot.name].astype(array.dtype))
            assert result.gradients[slot.name] is array

    def test_none_leaves_a_destination_out(self):
        engine = GradientEngine(SMALL)
        engine.add(random_gradients(0))
        head = np.empty(1, np.float32)
        result = engine.step(out={"layers.0.w": None, "layers.1.w": None, "head": head})
        assert list(result.gradients) == ["head"]

    @pytest.mark.parametrize(
        ("change", "error", "says"),
        [
            (lambda out: out.pop(), LayoutMismatch, "got 2, expected 3"),
            (lambda out: out[0].setflags(write=False), BufferRefused, "'layers.0.w' is read-only"),
            (lambda out: out.__setitem__(1, np.empty(6, np.float32)), LayoutMismatch, "got (6,), 6 elements"),
            (lambda out: out.__setitem__(1, np.empty(7)), BufferRefused, "got float64"),
            (lambda out: out.__setitem__(2, out[0].reshape(-1)[:1]), BufferRefused, "overlap"),
        ],
    )
    def test_a_bad_destination_changes_nothing(self, change, error, says):
        engine = GradientEngine(SMALL, max_norm=None)
        gradients = random_gradients(0)
        engine.add(gradients)
        out = [np.full(slot.shape, 9, np.float32) for slot in SMALL.slots]
        change(out)
        with pytest.raises(error, match=says.replace("(", r"\(").replace(")", r"\)")):
            engine.step(out=out)
        assert all((array == 9).all() for array in out[:1])
        result = engine.step()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(gradients, result.gradients.values(), strict=True))

    def test_the_engines_own_arena_is_no_destination(self):
        engine = GradientEngine(SMALL)
        engine.add(random_gradients(0))
        out = list(engine.accumulator.views().values())
        with pytest.raises(BufferRefused, match="the engine's arena"):
            engine.step(out=out)


class TestVerdict:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_raise_names_component_index_and_value_and_keeps_the_window(self, value):
        engine = GradientEngine(SMALL)
        gradients = random_gradients(0)
        gradients[1][4] = value
        engine.add(gradients)
        for _ in range(2):  # a second try finds the same
            with pytest.raises(NonFiniteGradient) as caught:
                engine.step()
            error = caught.value
            assert (error.component, error.index, error.step, error.rank) == ("layers.1.w", 4, 0, None)
            assert error.value == value or math.isnan(error.value) == math.isnan(value)
        assert engine.accumulator.views()["layers.1.w"].tobytes() == gradients[1].tobytes()
        with pytest.raises(WindowError, match=r"step 0 failed.*discard"):
            engine.add(gradients)
        engine.discard()
        engine.add(random_gradients(1))
        assert not engine.step().skipped

    def test_skip_hands_back_zeros_and_the_arena_is_good_again(self):
        engine = GradientEngine(SMALL, on_non_finite="skip")
        bad = random_gradients(0)
        bad[0][1, 2] = math.nan
        engine.add(bad)
        out = [np.full(slot.shape, 9, np.float16) for slot in SMALL.slots]
        result = engine.step(out=out)
        assert result.skipped
        assert (result.non_finite.component, result.non_finite.index) == ("layers.0.w", 7)
        assert math.isnan(result.norm)
        assert not any(array.any() for array in out)
        good = random_gradients(1)
        engine.add(good)
        result = engine.step()
        assert not result.skipped
        assert result.step == 1
        assert all(np.isfinite(g).all() for g in result.gradients.values())

    def test_pass_hands_on_what_came_unclipped(self):
        engine = GradientEngine(SMALL, on_non_finite="pass", max_norm=1e-3)
        gradients = random_gradients(0)
        gradients[2][0] = math.inf
        engine.add(gradients)
        result = engine.step()
        assert not result.skipped
        assert result.non_finite.component == "head"
        assert result.scale == 1.0
        assert result.gradients["layers.0.w"].tobytes() == gradients[0].tobytes()

    def test_an_overflowing_sum_is_found(self):
        engine = GradientEngine(GradientLayout.of([(2,)]))
        for _ in range(2):
            engine.add([np.array([1, 3e38], np.float32)])
        with pytest.raises(NonFiniteGradient) as caught:
            engine.step()
        assert (caught.value.index, caught.value.value) == (1, math.inf)

    @pytest.mark.parametrize("magnitude", [1e30, 1e-30, 1e-42])
    def test_norms_of_extreme_gradients_are_right(self, magnitude):
        engine = GradientEngine(GradientLayout.of([(1000,)]), max_norm=None)
        gradient = np.full(1000, magnitude, np.float32)
        engine.add([gradient])
        assert engine.step().norm == pytest.approx(float(gradient[0]) * math.sqrt(1000), rel=1e-6)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"max_norm": -1.0}, "got -1.0"),
            ({"max_norm": math.nan}, "got nan"),
            ({"on_non_finite": "ignore"}, "'raise', 'skip', 'pass'"),
            ({"average": "mean"}, "'weighted', 'per_worker'"),
            ({"micro_batches": 0}, "got 0"),
            ({"hold": 0}, "got 0"),
            ({"loss_scale": 0.0}, "got 0.0"),
            ({"device": "cuda"}, "got 'cuda'"),
            ({"groups": "layer"}, "got 'layer'"),
        ],
    )
    def test_options_out_of_range_are_refused(self, options, says):
        with pytest.raises(CallerError, match=says):
            GradientEngine(SMALL, **options)

    def test_step_needs_a_micro_batch(self):
        engine = GradientEngine(SMALL)
        with pytest.raises(WindowError, match="step without a micro-batch"):
            engine.step()
        engine.add(random_gradients(0))
        engine.step()
        with pytest.raises(WindowError, match="step without a micro-batch"):
            engine.step()

    @pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, 1e-60, "two", None])
    def test_bad_weights_are_refused_and_change_nothing(self, weight):
        engine = GradientEngine(SMALL)
        with pytest.raises(WindowError, match="weight is out of range"):
            engine.add(random_gradients(0), weight=weight)
        assert engine.accumulator.accumulated_count == 0

    def test_a_full_window_takes_no_more(self):
        engine = GradientEngine(SMALL, micro_batches=1)
        engine.add(random_gradients(0))
        with pytest.raises(WindowError, match=r"the window is full.*step\(\) after 1"):
            engine.add(random_gradients(1))
        assert engine.step().micro_batches == 1

    def test_a_component_that_lags_is_named(self):
        engine = GradientEngine(SMALL)
        engine.add(random_gradients(0))
        engine.add_block(0, [np.ones((3, 5), np.float32)])
        with pytest.raises(WindowError, match=r"'layers.1.w' \(and 1 more\).*got 1 micro-batches, expected 2"):
            engine.step()
        engine.add_block(1, {"w": np.ones(7, np.float32)})
        engine.add_non_block("head", np.ones(1, np.float32))
        assert engine.step().micro_batches == 2


WORLD_SIZES = [1, 2, 3, 4]


def train(exchange, *, average="weighted", steps=3, micro_batches=2, layout=LAYOUT, overlap=False, **options):
    engine = GradientEngine(layout, max_norm=0.5, exchange=exchange, average=average, **options)
    results = []
    for step in range(steps):
        for k in range(micro_batches):
            gradients = random_gradients([exchange.rank, step, k], layout)
            engine.add(gradients, weight=1.0 + k + exchange.rank)
        result = engine.step()
        exact = {n: a.tobytes() for n, a in result.gradients.items()}
        results.append((result.norm, result.scale, result.weight, result.micro_batches, exact))
    return results


class TestSeveralWorkers:
    @pytest.mark.parametrize("world_size", WORLD_SIZES)
    @pytest.mark.parametrize("average", ["weighted", "per_worker"])
    def test_all_ranks_end_with_the_same_bytes(self, world_size, average):
        outcomes = on_ranks(lambda e: train(e, average=average), world_size)
        assert all(outcome == outcomes[0] for outcome in outcomes)
        assert outcomes[0][0][3] == 2 * world_size

    @pytest.mark.parametrize("options", [{"micro_batches": 2}, {"hold": 2}, {"micro_batches": 2, "hold": 3}])
    def test_knowing_and_holding_change_no_bit(self, options):
        def with_options(exchange):
            known = options.get("micro_batches")
            engine_options = {"hold": options.get("hold", 1)}
            engine = GradientEngine(LAYOUT, max_norm=0.5, exchange=exchange, micro_batches=known, **engine_options)
            for k in range(2):
                engine.add(random_gradients([exchange.rank, 0, k], LAYOUT), weight=1.0 + k + exchange.rank)
            return {n: a.tobytes() for n, a in engine.step().gradients.items()}

        plain = on_ranks(lambda e: train(e, steps=1), 3)
        assert on_ranks(with_options, 3) == [plain[0][0][4]] * 3

    def test_the_sum_is_in_rank_order_and_the_mean_by_weight(self):
        def one(exchange):
            engine = GradientEngine(SMALL, max_norm=None, exchange=exchange)
            engine.add(random_gradients(exchange.rank), weight=float(exchange.rank + 1))
            return copies(engine.step())

        got = on_ranks(one, 3)[2]
        sums = [np.float32(r + 1) * g if r else g for r in range(3) for g in [random_gradients(r)[0]]]
        wanted = ((sums[0] + sums[1]) + sums[2]) * np.float32(1 / 6)
        assert got["layers.0.w"].tobytes() == wanted.tobytes()

    def test_per_worker_is_the_mean_of_means(self):
        def one(exchange):
            engine = GradientEngine(SMALL, max_norm=None, exchange=exchange, average="per_worker")
            for k in range(exchange.rank + 1):
                engine.add(random_gradients([exchange.rank, k]))
            return copies(engine.step())

        got = on_ranks(one, 3)[0]["layers.1.w"]
        means = [np.mean([random_gradients([r, k])[1] for k in range(r + 1)], axis=0) for r in range(3)]
        np.testing.assert_allclose(got, np.mean(means, axis=0), rtol=1e-5, atol=1e-7)

    def test_one_worker_gets_its_own_gradient_back(self):
        def one(exchange):
            engine = GradientEngine(SMALL, max_norm=None, exchange=exchange, average="per_worker")
            engine.add(random_gradients(5))
            return copies(engine.step())

        (got,) = on_ranks(one, 1)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(random_gradients(5), got.values(), strict=True))

    def test_one_micro_batch_each_is_one_process_with_all_bit_for_bit(self):
        def one(exchange):
            engine = GradientEngine(LAYOUT, max_norm=0.1, exchange=exchange)
            engine.add(random_gradients(exchange.rank, LAYOUT))
            return {n: a.tobytes() for n, a in engine.step().gradients.items()}

        alone = GradientEngine(LAYOUT, max_norm=0.1)
        for rank in range(4):
            alone.add(random_gradients(rank, LAYOUT))
        wanted = {n: a.tobytes() for n, a in alone.step().gradients.items()}
        assert on_ranks(one, 4) == [wanted] * 4

    def test_overlapped_blocks_give_the_same_bytes(self):
        def overlapped(exchange):
            engine = GradientEngine(LAYOUT, max_norm=0.5, exchange=exchange)
            for k in range(2):
                named = dict(
                    zip((s.name for s in LAYOUT.slots), random_gradients([exchange.rank, 0, k], LAYOUT), strict=True)
                )
                weight, last = 1.0 + k + exchange.rank, k == 1
                engine.add_non_block("lm_head", named["lm_head"], weight, last=last)
                engine.add_non_block("final_norm", named["final_norm"], weight, last=last)
                for block in reversed(LAYOUT.blocks):
                    engine.add_block(block.index, [named[s.name] for s in block.slots], weight, last=last)
                engine.add_non_block("embedding", named["embedding"], weight, last=last)
            return {n: a.tobytes() for n, a in engine.step().gradients.items()}

        wanted = on_ranks(lambda e: train(e, steps=1), 3)[0][0][4]
        assert on_ranks(overlapped, 3, bucket_bytes=64) == [wanted] * 3

    @pytest.mark.parametrize("policy", ["raise", "skip"])
    def test_a_bad_gradient_is_blamed_on_its_rank_everywhere(self, policy):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, on_non_finite=policy)
            gradients = random_gradients(exchange.rank)
            if exchange.rank == 1:
                gradients[1][3] = math.inf
            engine.add(gradients)
            try:
                found = engine.step().non_finite
            except NonFiniteGradient as error:
                found = error
                engine.discard()
            engine.add(random_gradients(exchange.rank))
            return (
                found.component,
                found.index,
                found.value,
                found.rank,
                found.step,
                copies(engine.step())["head"].tobytes(),
            )

        outcomes = on_ranks(one, 3)
        assert [outcome[:5] for outcome in outcomes] == [("layers.1.w", 3, math.inf, 1, 0)] * 3
        assert len({outcome[5] for outcome in outcomes}) == 1

    def test_a_sum_that_overflows_is_nobodys_fault(self):
        def one(exchange):
            engine = GradientEngine(GradientLayout.of([(2,)]), exchange=exchange, on_non_finite="skip")
            engine.add([np.array([0, 3e38], np.float32)])
            found = engine.step().non_finite
            return found.rank, found.index

        assert on_ranks(one, 2) == [(None, 1)] * 2

    def test_layouts_that_differ_are_shown_on_every_rank(self):
        other = GradientLayout.of({"layers.0.w": (5, 3), "layers.1.w": (7,), "head": (1,)})
        outcomes = on_ranks(lambda e: GradientEngine(other if e.rank == 2 else SMALL, exchange=e), 3)
        assert all(isinstance(outcome, HandshakeRefused) for outcome in outcomes)
        assert all("(5, 3)" in str(outcome) and "(3, 5)" in str(outcome) for outcome in outcomes)

    def test_a_complete_window_takes_no_more(self):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, micro_batches=1)
            engine.add(random_gradients(0))
            with pytest.raises(WindowError, match="on its way"):
                engine.add(random_gradients(1))
            return engine.step().micro_batches

        assert on_ranks(one, 2) == [2, 2]

    def test_a_rank_that_leaves_fails_the_others_and_loses_nothing(self):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, max_norm=None)
            gradients = random_gradients(exchange.rank)
            engine.add(gradients)
            if exchange.rank == 1:
                exchange.close()
                return None
            with pytest.raises(PeerLost, match="rank 1 left"):
                engine.step()
            with pytest.raises(WindowError, match="failed"):
                engine.add(gradients)
            kept = engine.accumulator.views()
            return all(a.tobytes() == b.tobytes() for a, b in zip(gradients, kept.values(), strict=True))

        assert on_ranks(one, 3) == [True, None, True]

    def test_a_failed_step_runs_again_on_another_exchange(self):
        """All ranks break off mid-step with some spans summed; the second try ends with the undisturbed bytes."""
        spans = [span.key for span in LAYOUT.spans]

        def broken(exchange):
            engine = GradientEngine(LAYOUT, max_norm=0.5, exchange=exchange)
            for k in range(2):
                engine.add(random_gradients([exchange.rank, 0, k], LAYOUT), weight=1.0 + k + exchange.rank)
            if exchange.rank == 1:  # contributes two spans, then its network is gone
                engine.accumulator.close()
                engine._start(span for span in LAYOUT.spans if span.key in spans[:2])
                return engine
            with pytest.raises((PeerLost, ExchangeError)):
                engine.step()
            return engine

        def again(exchange):
            engine = engines[exchange.rank]
            assert engine._progress.summed > 0
            engine.reconnect(exchange)
            return {n: a.tobytes() for n, a in engine.step().gradients.items()}

        wanted = on_ranks(lambda e: train(e, steps=1), 3)[0][0][4]
        engines = on_ranks(broken, 3, timeout=1.0)
        assert all(isinstance(engine, GradientEngine) for engine in engines), engines
        assert on_ranks(again, 3) == [wanted] * 3

    def test_tcp_gives_the_bytes_of_local(self):
        assert on_tcp(train) == on_ranks(train, 2)


shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)
layouts = st.lists(shapes, min_size=1, max_size=6).map(GradientLayout.of)


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts,
    weights=st.lists(st.floats(0.125, 64, width=32), min_size=1, max_size=5),
    hold=st.integers(1, 4),
    max_norm=st.floats(0.01, 100),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layout_weights_and_hold_follow_the_contract(layout, weights, hold, max_norm, seed):
    micro_batches = [random_gradients([seed, k], layout) for k in range(len(weights))]
    engine = GradientEngine(layout, max_norm=max_norm, hold=hold)
    for gradients, weight in zip(micro_batches, weights, strict=True):
        engine.add(gradients, weight)
    result = engine.step()
    wanted, norm, scale = expected_step(micro_batches, weights, max_norm)
    assert result.norm == pytest.approx(norm, rel=1e-6)
    assert result.scale == pytest.approx(scale, rel=1e-6)
    for got, array in zip(result.gradients.values(), wanted, strict=True):
        np.testing.assert_allclose(got, array, rtol=1e-6)
    clipped = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in result.gradients.values()))
    assert clipped <= max_norm * (1 + 1e-5)


def test_a_view_written_to_after_the_norm_was_taken_counts():
    engine = GradientEngine(SMALL, max_norm=None, micro_batches=1)
    block = engine.accumulator.block(0)
    engine.add(random_gradients(0))  # takes the norm in the same pass
    block.scale(0.25)
    result = engine.step()
    norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in result.gradients.values()))
    assert result.norm == pytest.approx(norm, rel=1e-6)


def test_an_arena_that_was_mended_after_a_verdict_steps_on():
    engine = GradientEngine(SMALL, micro_batches=1, max_norm=None)
    gradients = random_gradients(0)
    gradients[1][2] = math.nan
    engine.add(gradients)
    with pytest.raises(NonFiniteGradient):
        engine.step()
    engine.accumulator.views()["layers.1.w"][2] = 0
    assert math.isfinite(engine.step().norm)


class TestSeveralWorkersAfterAFault:
    def test_a_verdict_can_be_asked_for_again_and_nobody_waits(self):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange)
            gradients = random_gradients(exchange.rank)
            if exchange.rank == 0:
                gradients[0][0, 0] = math.nan
            engine.add(gradients)
            found = []
            for _ in range(3):
                with pytest.raises(NonFiniteGradient) as caught:
                    engine.step()
                found.append((caught.value.component, caught.value.rank, engine.current_step))
            engine.discard()
            engine.add(random_gradients(exchange.rank))
            return found, engine.step().step

        assert on_ranks(one, 2, timeout=3.0) == [([("layers.0.w", 0, 0)] * 3, 1)] * 2

    @pytest.mark.parametrize("transport", ["local", "tcp"])
    def test_a_window_discarded_before_it_travels_leaves_the_group_whole(self, transport):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange)
            engine.add(random_gradients(0))
            engine.discard()
            engine.add(random_gradients(exchange.rank))
            result = engine.step()
            exchange.barrier()
            return result.step, result.micro_batches, {n: a.tobytes() for n, a in result.gradients.items()}

        if transport == "local":
            first, second = on_ranks(one, 2)
        else:
            first, second = on_tcp(one)
        assert first == second
        assert first[:2] == (0, 2)

    def test_a_window_discarded_on_its_way_closes_the_exchange(self):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, micro_batches=1)
            engine.add(random_gradients(exchange.rank))
            if exchange.rank == 1:
                engine.discard()
            return engine

        engines = on_ranks(one, 2, timeout=2.0)

        def again(exchange):
            engine = engines[exchange.rank]
            engine.discard()
            engine.reconnect(exchange)
            engine.add(random_gradients(exchange.rank))
            return {n: a.tobytes() for n, a in engine.step().gradients.items()}

        def plain(exchange):
            engine = GradientEngine(SMALL, exchange=exchange)
            engine.add(random_gradients(exchange.rank))
            return {n: a.tobytes() for n, a in engine.step().gradients.items()}

        assert on_ranks(again, 2) == on_ranks(plain, 2)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("max_norm", [{"max_norm": 1.0}, {"max_norm": None}]),
            ("average", [{"average": "weighted"}, {"average": "per_worker"}]),
            ("loss_scale", [{"loss_scale": 1.0}, {"loss_scale": 2.0}]),
            ("on_non_finite", [{"on_non_finite": "skip"}, {"on_non_finite": "raise"}]),
            ("max_norm", [{"groups": None}, {"groups": "block"}]),
        ],
    )
    def test_settings_that_differ_are_an_error_on_every_rank(self, name, options):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, **options[exchange.rank])
            engine.add(random_gradients(0))
            with pytest.raises(ExchangeError, match=f"rank 1 has another {name} than rank 0"):
                engine.step()
            return True

        assert on_ranks(one, 2) == [True, True]

    def test_nan_in_padding_is_nobodys_gradient(self):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, max_norm=None)
            gradients = random_gradients(exchange.rank)
            engine.add(gradients)
            if exchange.rank == 0:
                engine.accumulator.block(0).flatten()[20] = math.nan  # behind the 15 elements of layers.0.w
            return float(engine.step().norm)

        norms = on_ranks(one, 2)
        assert norms[0] == norms[1]
        assert math.isfinite(norms[0])

    def test_waiting_for_what_nobody_started_is_refused(self):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange)
            with pytest.raises(WindowError, match="has started nothing"):
                exchange.wait()
            engine.add(random_gradients(0))
            return engine.step().micro_batches

        assert on_ranks(one, 2, timeout=3.0) == [2, 2]

    def test_an_uneven_window_does_not_travel_before_it_is_whole(self):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, micro_batches=2, max_norm=None)
            gradients = random_gradients(exchange.rank)
            engine.add_block(0, gradients[:1])
            engine.add(gradients)
            with pytest.raises(WindowError, match="lacks part of the window"):
                engine.step()
            engine.add_block(1, gradients[1:2])
            engine.add_non_block("head", gradients[2])
            return engine.step().micro_batches

        assert on_ranks(one, 2, timeout=3.0) == [4, 4]


def on_tcp(work):
    first = connect("tcp://127.0.0.1:0", 0, 2, timeout=20.0, join_timeout=10.0)
    exchanges = [first, connect(first.url, 1, 2, timeout=20.0, join_timeout=10.0)]
    outcomes = [None, None]

    def run(rank):
        try:
            outcomes[rank] = work(exchanges[rank])
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for exchange in reversed(exchanges):
        exchange.close()
    return outcomes


class Interrupting:
    """Kernels that are interrupted half way through one operation, as Ctrl-C does."""

    def __init__(self, kernels, operation):
        self._kernels, self._operation = kernels, operation

    def __getattr__(self, name):
        real = getattr(self._kernels, name)
        if name != self._operation:
            return real

        def interrupted(first, *rest):
            self._operation = None
            real(first[:1], *(r[:1] if isinstance(r, list) else r for r in rest))
            raise KeyboardInterrupt

        return interrupted


@pytest.mark.parametrize(
    ("operation", "hold"), [("accumulate", 1), ("hand_back", 1), ("accumulate", 3), ("hand_back", 2)]
)
def test_an_interrupt_half_way_is_never_taken_for_a_gradient(operation, hold):
    engine = GradientEngine(SMALL, max_norm=None, hold=hold)
    engine.add(random_gradients(0))
    engine.add(random_gradients(1))
    engine._kernels = engine.accumulator.kernels = Interrupting(engine._kernels, operation)
    with pytest.raises(KeyboardInterrupt):
        engine.add(random_gradients(2)) if (operation, hold) == ("accumulate", 1) else engine.step()
    for call in (lambda: engine.add(random_gradients(3)), engine.step):
        with pytest.raises(WindowError, match=r"half written.*discard"):
            call()
    engine.discard()
    gradients = random_gradients(4)
    engine.add(gradients)
    assert engine.step().gradients["head"].tobytes() == gradients[2].tobytes()
