"""The whole step, on one worker and on several: numbers, verdicts, and what is left after an error."""

import functools
import gc
import math
import sys
import threading
import weakref

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import all_on_host, assign, bits_of, nothing_is_launched, number_of, on_host, put_all, raw, synchronize
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import PACKAGE
from operations import Name, growth, operations
from ranks import may_hold_sums, on_grid, on_ranks, on_tcp

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient, local_group
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


def bad_gradients(value=math.nan, component=1, index=4, seed=0):
    gradients = random_gradients(seed)
    gradients[component].reshape(-1)[index] = value
    return gradients


def copies(result):
    return {name: array.copy() for name, array in result.gradients.items()}


def new_engine(backend, layout=SMALL, **options):
    return GradientEngine(layout, backend.kernels, **{"max_norm": 1.0, **options})


def add_to(engine, backend, gradients, weight=1.0):
    engine.add(put_all(backend, gradients), weight)


def add_by_parts(engine, gradients):
    """A micro-batch of which no part need have a gradient."""
    for block, gradient in enumerate(gradients[:2]):
        engine.add_block(block, [gradient])
    engine.add_non_block("head", gradients[2])


def expected_sum(micro_batches, weights):
    """The contract in NumPy: fp32 sums in order."""
    parts = [[gradients[i] for gradients in micro_batches] for i in range(len(micro_batches[0]))]
    return [draw.folded(None, part, weights, True).reshape(part[0].shape) for part in parts]


def expected_step(micro_batches, weights, max_norm):
    """The contract in NumPy: fp32 sums in order, norm in fp64, one fp32 factor."""
    total = expected_sum(micro_batches, weights)
    norm = math.sqrt(sum(float(np.sum(np.square(t, dtype=np.float64))) for t in total)) / sum(weights)
    scale = max_norm / norm if norm > max_norm else 1.0
    return [t * np.float32(scale / sum(weights)) for t in total], norm, scale


class TestOneWorker:
    @pytest.mark.parametrize("hold", [1, 2, 3, 5])
    @pytest.mark.parametrize("known", [True, False])
    def test_a_step_is_the_contract(self, backend, hold, known):
        micro_batches = [random_gradients(seed) for seed in range(4)]
        weights = [1.0, 3.0, 2.0, 1.0]
        engine = new_engine(backend, max_norm=0.5, micro_batches=4 if known else None, hold=hold)
        for _ in range(2):  # the second window overwrites what the first left
            for gradients, weight in zip(micro_batches, weights, strict=True):
                add_to(engine, backend, gradients, weight)
            result = engine.step()
            gradients, norm, scale = expected_step(micro_batches, weights, 0.5)
            assert float(result.norm) == pytest.approx(norm, rel=1e-6)
            assert float(result.scale) == pytest.approx(scale, rel=1e-6)
            assert (result.weight, result.micro_batches, bool(result.skipped)) == (7.0, 4, False)
            for slot, wanted in zip(SMALL.slots, gradients, strict=True):
                np.testing.assert_allclose(on_host(result.gradients[slot.name]), wanted, rtol=3e-7)

    @pytest.mark.parametrize("hold", range(1, 10))
    def test_the_mean_has_the_contracts_bits_for_any_hold_on_any_device(self, backend, hold):
        micro_batches, weights = [random_gradients(seed, LAYOUT) for seed in range(9)], [1, 1, 3, 0.5, 1, 1, 7, 1, 1]
        engine = new_engine(backend, LAYOUT, max_norm=None, hold=hold)
        for gradients, weight in zip(micro_batches, weights, strict=True):
            add_to(engine, backend, gradients, weight)
        result = engine.step()
        for total, got in zip(expected_sum(micro_batches, weights), result.gradients.values(), strict=True):
            draw.assert_same_bits(on_host(got), total * np.float32(1 / sum(weights)))

    def test_hold_and_fused_norm_change_no_bit(self, backend):
        micro_batches = [put_all(backend, random_gradients(seed, LAYOUT)) for seed in range(5)]
        outcomes = []
        for hold, known in [(1, None), (1, 5), (2, None), (4, 5), (5, None), (9, 5)]:
            engine = new_engine(backend, LAYOUT, max_norm=0.1, micro_batches=known, hold=hold)
            for gradients in micro_batches:
                engine.add(gradients)
            result = engine.step()
            outcomes.append((float(result.norm), float(result.scale), bits_of(result)))
        assert all(outcome == outcomes[0] for outcome in outcomes)

    def test_one_micro_batch_within_the_bound_comes_back_as_it_was(self, backend):
        gradients, engine = random_gradients(0), new_engine(backend, max_norm=None)
        add_to(engine, backend, gradients)
        for array, got in zip(gradients, engine.step().gradients.values(), strict=True):
            assert array.tobytes() == on_host(got).tobytes()

    def test_nothing_is_clipped_that_nobody_bounded(self, backend):
        gradients, engine = random_gradients(0), GradientEngine(SMALL, backend.kernels)
        add_to(engine, backend, [1000 * gradient for gradient in gradients])
        result = engine.step()
        assert float(result.norm) > 1000
        assert (float(result.scale), float(result.factor)) == (1.0, 1.0)
        for array, got in zip(gradients, result.gradients.values(), strict=True):
            draw.assert_same_bits(on_host(got), 1000 * array)

    def test_gradients_are_views_of_the_arena(self, backend):
        engine = new_engine(backend)
        add_to(engine, backend, random_gradients(0))
        result = engine.step()
        for slot, gradient in zip(SMALL.slots, result.gradients.values(), strict=True):
            view = backend.kernels.device.view(gradient, slot.name)
            assert view.pointer == engine.accumulator.memory.pointer + 4 * slot.offset
            assert gradient.shape == slot.shape

    def test_a_deferred_step_leaves_the_sum_and_its_factor(self, backend):
        micro_batches, weights = [random_gradients(seed) for seed in range(3)], [1.0, 2.0, 1.0]
        deferred, plain = (new_engine(backend, max_norm=0.5, hold=2) for _ in range(2))
        for engine in (deferred, plain):
            for gradients, weight in zip(micro_batches, weights, strict=True):
                add_to(engine, backend, gradients, weight)
        left, wanted = deferred.step(deferred=True), plain.step()
        assert left.deferred
        factor = on_host(left.factor)
        assert float(left.norm) == float(wanted.norm)
        for name, total in zip(left.sums, expected_sum(micro_batches, weights), strict=True):
            draw.assert_same_bits(on_host(left.sums[name]), total)
            draw.assert_same_bits(on_host(wanted.gradients[name]), total * factor)

    @pytest.mark.parametrize("change", [0.5, 2.0])
    def test_a_loss_scale_that_changes_within_a_window_is_refused(self, change):
        engine = GradientEngine(SMALL, loss_scale=1024.0)
        engine.add(random_gradients(0))
        with pytest.raises(WindowError, match="loss scale of an open window cannot be changed"):
            engine.loss_scale *= change
        engine.loss_scale = 1024.0
        engine.step()
        engine.loss_scale *= change
        assert engine.loss_scale == 1024 * change

    def test_loss_scale_is_undone(self, backend):
        plain, scaled = new_engine(backend, max_norm=0.3), new_engine(backend, max_norm=0.3, loss_scale=1024.0)
        add_to(plain, backend, random_gradients(0))
        add_to(scaled, backend, [1024 * g for g in random_gradients(0)])
        a, b = plain.step(), scaled.step()
        assert float(a.norm) == float(b.norm)
        assert bits_of(a) == bits_of(b)

    @pytest.mark.parametrize("hold", [1, 3])
    def test_blocks_may_come_one_by_one_in_any_order(self, backend, hold):
        engine, whole = (new_engine(backend, LAYOUT, max_norm=0.2, hold=hold) for _ in range(2))
        for seed in range(2):
            gradients = put_all(backend, random_gradients(seed, LAYOUT))
            by_name = dict(zip((slot.name for slot in LAYOUT.slots), gradients, strict=True))
            whole.add(gradients, 1.0 + seed)
            weight, last = 1.0 + seed, seed == 1
            engine.add_non_block("lm_head", by_name["lm_head"], weight, last=last)
            engine.add_non_block(1, by_name["final_norm"], weight, last=last)
            for block in reversed(LAYOUT.blocks):
                engine.add_block(block.index, [by_name[slot.name] for slot in block.slots], weight, last=last)
            engine.add_non_block("embedding", by_name["embedding"], weight, last=last)
        a, b = engine.step(), whole.step()
        assert float(a.norm) == float(b.norm)
        assert bits_of(a) == bits_of(b)

    @pytest.mark.parametrize("hold", [1, 2])
    def test_none_is_a_zero_gradient(self, backend, hold):
        engine, head = new_engine(backend, max_norm=None, hold=hold), np.ones(1, np.float32)
        for _ in range(2):  # the second window finds what the first left
            add_to(engine, backend, [None, None, head])
            add_to(engine, backend, [None, np.ones(7, np.float32), head])
            result = engine.step()
            got = all_on_host(result.gradients)
            assert not got["layers.0.w"].any()
            np.testing.assert_array_equal(got["layers.1.w"], np.full(7, 0.5, np.float32))
            np.testing.assert_array_equal(got["head"], head)
            assert float(result.norm) == pytest.approx(math.sqrt(7 / 4 + 1), rel=1e-6)
            full = new_engine(backend)
            add_to(engine, backend, random_gradients(0))
            add_to(full, backend, random_gradients(0))
            engine.step(), full.step()

    @pytest.mark.parametrize("hold", [1, 3])
    def test_what_no_micro_batch_had_a_gradient_for_is_named_and_zero(self, backend, hold):
        engine, (one, other, head) = new_engine(backend, hold=hold), put_all(backend, random_gradients(0))
        names = [slot.name for slot in SMALL.slots]
        for window, unused in (
            ([[None, other, head], [None, None, head]], names[:1]),
            ([[one, other, None], [None, other, None]], names[2:]),
            ([[None, None, None]], names),
            ([[one, None, None], [None, other, head]], []),
        ):
            for micro_batch in window:
                with backend.active():  # to copy by CuPy's own means wants that
                    copies = [g if g is None or hold == 1 else g.copy() for g in micro_batch]
                if any(gradient is not None for gradient in copies):
                    engine.add(copies)
                else:
                    add_by_parts(engine, copies)
            result = engine.step()
            assert result.unused == set(unused)
            assert [name for name in names if not on_host(result.gradients[name]).any()] == unused

    def test_a_gradient_of_zeros_is_one(self, backend):
        engine = new_engine(backend)
        add_to(engine, backend, [np.zeros(slot.shape, np.float32) for slot in SMALL.slots])
        assert engine.step().unused == frozenset()

    def test_what_may_have_been_written_through_a_view_is_used(self):
        engine = GradientEngine(SMALL)
        engine.accumulator.block(0)
        engine.add([None, None, random_gradients(0)[2]])
        assert engine.step().unused == {"layers.1.w"}

    def test_groups_have_norms_of_their_own(self, backend):
        bounds = {"block 0": 0.5, "block 1": math.inf, "rest": 0.25}
        engine = new_engine(backend, max_norm=bounds, groups="block")
        gradients = random_gradients(1)
        add_to(engine, backend, gradients)
        result = engine.step()
        norms = [float(np.linalg.norm(g.astype(np.float64))) for g in gradients]
        assert [float(norm) for norm in result.group_norms.values()] == pytest.approx(norms, rel=1e-6)
        assert [float(norm) for norm in result.block_norms] == pytest.approx(norms[:2], rel=1e-6)
        assert [float(norm) for norm in result.component_norms] == pytest.approx(norms, rel=1e-6)
        assert float(result.group_scales["block 1"]) == 1.0
        got = all_on_host(result.gradients)
        assert np.linalg.norm(got["layers.0.w"]) == pytest.approx(0.5, rel=1e-6)
        assert got["layers.1.w"].tobytes() == gradients[1].tobytes()
        assert abs(float(got["head"][0])) == pytest.approx(min(0.25, norms[2]), rel=1e-6)
        assert float(result.norm) == pytest.approx(math.hypot(*norms), rel=1e-6)
        assert float(result.scale) == pytest.approx(min(map(float, result.group_scales.values())), rel=1e-7)

    def test_bf16_in_adds_up_in_fp32(self, backend):
        engine = new_engine(backend, GradientLayout.of([(1,)]), max_norm=None)
        for value in (256, 1):
            add_to(engine, backend, [np.array([value], draw.DTYPES["bfloat16"])])
        assert float(engine.step().gradients["0"][0]) * 2 == 257  # bf16 itself would say 256


class TestOut:
    @pytest.mark.parametrize("offset", [0, 1, 3])
    def test_destinations_are_written_in_their_dtype(self, backend, offset):
        """Also where they begin at no address that a GPU would choose, and what lies beside them stays."""
        wanted = new_engine(backend, max_norm=0.5)
        add_to(wanted, backend, random_gradients(0))
        gradients = all_on_host(wanted.step().gradients)
        for names in (list(draw.DTYPES), list(draw.DTYPES)[::-1]):
            dtypes = [draw.DTYPES[name] for name in names]
            whole, out = [], []
            for slot, dtype in zip(SMALL.slots, dtypes, strict=True):
                nines = [np.full(size, 9, dtype) for size in (slot.size, 3)]
                memory, (destination, _) = backend.buffers_in_one(nines, offset)
                whole.append(memory)
                out.append(raw(destination))
            engine = new_engine(backend, max_norm=0.5)
            add_to(engine, backend, random_gradients(0))
            result = engine.step(out=out)
            for slot, dtype, memory, array in zip(SMALL.slots, dtypes, whole, out, strict=True):
                got = backend.get(memory).view(dtype)
                draw.assert_same_bits(got[offset : offset + slot.size], gradients[slot.name].reshape(-1).astype(dtype))
                assert (got[offset + slot.size :] == 9).all()
                assert result.gradients[slot.name] is array

    def test_arrays_are_written_where_they_are(self, backend):
        out = put_all(backend, [np.full(slot.shape, 9, np.float16) for slot in SMALL.slots])
        engine, plain = new_engine(backend, max_norm=0.5), new_engine(backend, max_norm=0.5)
        for e in (engine, plain):
            add_to(e, backend, random_gradients(0))
        wanted = all_on_host(plain.step().gradients)
        engine.step(out=out)
        for slot, array in zip(SMALL.slots, out, strict=True):
            np.testing.assert_array_equal(on_host(array), wanted[slot.name].astype(np.float16))

    def test_none_leaves_a_destination_out(self, backend):
        engine = new_engine(backend)
        add_to(engine, backend, random_gradients(0))
        head = backend.put(np.empty(1, np.float32))
        result = engine.step(out={"layers.0.w": None, "layers.1.w": None, "head": head})
        assert list(result.gradients) == ["head"]

    @pytest.mark.parametrize(
        ("bad", "error", "says"),
        [
            (lambda out, other: out[:2], LayoutMismatch, "got 2, expected 3"),
            (lambda out, other: [3.0, *out[1:]], BufferRefused, "'layers.0.w' is not an array"),
            (lambda out, other: [out[0], out[1][:6], out[2]], LayoutMismatch, r"'layers.1.w'.*got \(6,\), 6 elements"),
            (lambda out, other: [out[0], other, out[2]], BufferRefused, "'layers.1.w'.*got float64"),
            (lambda out, other: [*out[:2], out[0].reshape(-1)[:1]], BufferRefused, "'layers.0.w' and 'head' overlap"),
        ],
    )
    def test_a_bad_destination_changes_nothing(self, backend, bad, error, says):
        engine, gradients = new_engine(backend, max_norm=None), random_gradients(0)
        add_to(engine, backend, gradients)
        out = put_all(backend, [np.full(slot.shape, 9, np.float32) for slot in SMALL.slots])
        other = backend.put(np.empty(7))
        with nothing_is_launched(backend), pytest.raises(error, match=says):
            engine.step(out=bad(out, other))
        assert all((on_host(array) == 9).all() for array in out)
        got = engine.step().gradients
        assert all(a.tobytes() == on_host(b).tobytes() for a, b in zip(gradients, got.values(), strict=True))

    def test_a_read_only_destination_changes_nothing(self, backend):
        engine = new_engine(backend)
        add_to(engine, backend, random_gradients(0))
        buffers = [backend.buffer(np.full(slot.size, 9, np.float32)) for slot in SMALL.slots]
        out = [raw(buffer, writable=i != 1) for i, buffer in enumerate(buffers)]
        with nothing_is_launched(backend), pytest.raises(BufferRefused, match=r"destination 'layers.1.w' is read-only"):
            engine.step(out=out)
        assert (backend.get(buffers[0]) == 9).all()

    def test_the_engines_own_arena_is_no_destination(self, backend):
        engine = new_engine(backend)
        add_to(engine, backend, random_gradients(0))
        out = list(engine.accumulator.views().values())
        with nothing_is_launched(backend), pytest.raises(BufferRefused, match="the arena"):
            engine.step(out=out)

    def test_a_deferred_step_has_no_destination(self, backend):
        engine = new_engine(backend)
        add_to(engine, backend, random_gradients(0))
        with pytest.raises(CallerError, match="a deferred step hands nothing back"):
            engine.step(out=put_all(backend, random_gradients(1)), deferred=True)
        assert engine.step().micro_batches == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_passed_on_a_bad_group_is_unclipped_and_every_other_keeps_its_bound(backend, bad):
    engine = new_engine(backend, groups="block", max_norm=1.0, on_non_finite="pass")
    add_to(engine, backend, [np.full((3, 5), 2, np.float32), bad_gradients(bad)[1], np.full(1, 4, np.float32)], 2.0)
    result = engine.step()
    assert {name: float(scale) for name, scale in result.group_scales.items()} == {
        "block 0": 1 / math.sqrt(60),
        "block 1": 1,
        "rest": 0.25,
    }
    handed = all_on_host(result.gradients)
    assert handed["layers.0.w"] == pytest.approx(2 / math.sqrt(60), rel=1e-6)
    draw.assert_same_values(handed["layers.1.w"], bad_gradients(bad)[1])
    assert handed["head"].tolist() == [1]


def test_an_option_without_effect_is_deprecated():
    with pytest.warns(DeprecationWarning, match=r"^reused_buffers has no effect any more: leave it out$"):
        GradientEngine(GradientLayout.of([(4,)]), reused_buffers=True)


@pytest.mark.parametrize(
    "options", [{"exchange": 5}, {"tp_exchange": "tcp://x:1"}, {"hold": 0}, {"micro_batches": 0}, {"max_norm": -1.0}]
)
def test_bad_arguments_are_refused_before_any_memory_is_taken(backend, monkeypatch, options):
    def taken(self, size):
        raise AssertionError("memory was taken")

    monkeypatch.setattr(type(backend.kernels.device), "allocate", taken)
    with pytest.raises(CallerError):
        GradientEngine(SMALL, backend.kernels, **options)


class TestOnStep:
    @staticmethod
    def engine(**options):
        return GradientEngine(GradientLayout.of({"w": (2,)}), **options)

    @staticmethod
    def stepped(engine):
        engine.add([np.array([3, 4], np.float32)])
        return engine.step()

    def test_each_steps_result_goes_to_all_in_turn_until_they_are_taken_away(self):
        engine, seen = self.engine(), []
        remove = engine.on_step(lambda result: seen.append(("first", result)))
        engine.on_step(lambda result: seen.append(("second", result)))
        first = self.stepped(engine)
        remove()
        remove()
        second = self.stepped(engine)
        assert seen == [("first", first), ("second", first), ("second", second)]

    def test_what_one_raises_comes_from_a_step_that_is_made_when_all_have_seen_it(self):
        engine, seen = self.engine(), []

        def fail(result):
            raise RuntimeError(f"disk full at step {result.step}")

        engine.on_step(fail)
        engine.on_step(seen.append)
        with pytest.raises(RuntimeError, match="disk full at step 0"):
            self.stepped(engine)
        assert (engine.current_step, engine.has_open_window, len(seen)) == (1, False, 1)

    def test_a_step_that_fails_is_not_shown(self):
        engine = self.engine()
        engine.on_step(pytest.fail)
        engine.add([np.array([3, np.nan], np.float32)])
        with pytest.raises(NonFiniteGradient):
            engine.step()

    def test_what_cannot_be_called_is_refused(self):
        with pytest.raises(CallerError, match=r"^callback cannot be called: got 5, expected a function"):
            self.engine().on_step(5)

    def test_the_exchanges_seconds_are_among_what_is_shown(self):
        def work(exchange):
            metrics = self.stepped(self.engine(exchange=exchange)).metrics()
            exchange.barrier()
            return metrics

        for metrics in on_ranks(work, 2):
            assert metrics["exchange_seconds"] > 0
            assert metrics["exchange_seconds"] >= metrics["exchange_hidden_seconds"] >= 0


@pytest.mark.parametrize("hold", [1, 2])
class TestCopyStrided:
    def test_the_step_has_the_bits_of_contiguous_gradients(self, hold):
        engines = [GradientEngine(SMALL, max_norm=0.5, hold=hold, copy_strided=copies) for copies in (True, False)]
        for seed in range(3):
            contiguous = random_gradients(seed)
            for engine, order in zip(engines, "FC", strict=True):
                engine.add([array.copy(order) for array in contiguous], seed + 1)
        copying, other = (engine.step() for engine in engines)
        assert (copying.norm, copying.scale) == (other.norm, other.scale)
        for name, gradient in other.gradients.items():
            draw.assert_same_bits(copying.gradients[name], gradient)

    def test_destinations_are_still_to_be_contiguous(self, hold):
        engine = GradientEngine(GradientLayout.of({"w": (2, 3)}), hold=hold, copy_strided=True)
        engine.add([np.ones((3, 2), np.float32).T])
        strided = np.zeros((3, 2), np.float32).T
        message = r"'w' is not contiguous: .* copies gradients itself, but destinations must be contiguous"
        with pytest.raises(BufferRefused, match=message):
            engine.step(out=[strided])
        assert not strided.any()
        assert engine.step().gradients["w"].sum() == 6


class TestBeyondFp32:
    """Finite gradients come back as Inf, NaN or 0 only where something says so."""

    @pytest.mark.parametrize(
        ("weight", "loss_scale"), [(1e-30, 2.0**-64), (1e30, 2.0**64), (2.0**-100, 2.0**-27), (2.0**100, 2.0**27)]
    )
    @pytest.mark.parametrize("options", [{}, {"deferred": True}])
    def test_a_divisor_that_no_fp32_factor_undoes_is_refused_and_the_window_kept(
        self, backend, weight, loss_scale, options
    ):
        engine = new_engine(backend, max_norm=None, loss_scale=loss_scale)
        add_to(engine, backend, random_gradients(0), weight)
        before = backend.get(engine.accumulator.memory).tobytes()
        for _ in range(2):
            with pytest.raises(
                WindowError, match=r"weight times the loss scale is out of range: got .*, expected 2\*\*"
            ):
                engine.step(**options)
        assert (engine.current_step, engine.accumulator.accumulated_count) == (0, 1)
        assert backend.get(engine.accumulator.memory).tobytes() == before
        engine.discard()
        add_to(engine, backend, [np.full(slot.shape, loss_scale, np.float32) for slot in SMALL.slots])
        assert float(engine.step().norm) == pytest.approx(math.sqrt(23), rel=1e-6)

    def test_all_workers_refuse_such_a_divisor_alike(self):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, loss_scale=2.0**64)
            engine.add(random_gradients(exchange.rank), 1e30 if exchange.rank else 1.0)
            with pytest.raises(WindowError, match="weight times the loss scale is out of range"):
                engine.step()
            engine.discard()
            engine.add(random_gradients(exchange.rank))
            return bits_of(engine.step())

        first, second = on_ranks(one, 2)
        assert first == second

    @pytest.mark.parametrize("call", ["average", "step"])
    def test_a_workers_own_mean_is_refused_alike(self, call):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, average="per_worker")
            engine.add(random_gradients(0), 3e38)
            with pytest.raises(WindowError, match="the window's weight is out of range"):
                engine.accumulator.average() if call == "average" else engine.step()
            engine.discard()
            engine.add(random_gradients(0))
            return engine.step().micro_batches

        assert on_ranks(one, 2) == [2, 2]

    @pytest.mark.parametrize("weight", [2.0**-126, 1.0, 3.0, 2.0**126])
    def test_up_to_its_limits_a_weight_is_undone_to_the_bit(self, backend, weight):
        engine, ones = new_engine(backend, max_norm=None), [np.ones(slot.shape, np.float32) for slot in SMALL.slots]
        add_to(engine, backend, ones, weight)
        expected = np.float32(weight) * np.float32(1 / weight)
        assert all((array == expected).all() for array in all_on_host(engine.step().gradients).values())

    def test_a_clip_below_normal_factors_hands_back_zeros_and_says_so(self, backend):
        engine = new_engine(backend, max_norm=1e-20)
        add_to(engine, backend, random_gradients(0, scale=1e30))
        result = engine.step()
        assert [float(result.scale), float(result.factor), float(result.inverse_factor)] == [0, 0, math.inf]
        assert float(result.norm) > 1e30
        assert not any(array.any() for array in all_on_host(result.gradients).values())

    @pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 3.38e38)])
    @pytest.mark.parametrize("clipped", [True, False])
    def test_what_is_no_longer_than_the_largest_number_overflows_nowhere(self, backend, dtype, largest, clipped):
        """No element is larger than the norm, so norm * scale says that an overflow at hand back cannot have been."""
        layout = GradientLayout.of([(3,)])
        engine = new_engine(backend, layout, max_norm=largest if clipped else None)
        for factor in (1.0, 0.999, 0.7) if not clipped else (1.0, 1.0000005, 1.005):
            total = np.array([0, -largest * factor, 1e-30 * largest], np.float32)
            out = backend.put(np.zeros(3, draw.DTYPES[dtype]))
            add_to(engine, backend, [total])
            result = engine.step(out=[out])
            assert float(result.norm) * float(result.scale) <= largest * (1 + 1e-6)
            assert np.isfinite(on_host(out).astype(np.float32)).all()

    def test_what_is_longer_may_overflow_as_ieee_rounding_has_it(self, backend):
        engine = new_engine(backend, GradientLayout.of([(2,)]), max_norm=None)
        add_to(engine, backend, [np.array([65519, 65520], np.float32)])
        out = backend.put(np.zeros(2, np.float16))
        assert not float(engine.step(out=[out]).skipped)
        assert on_host(out).tolist() == [65504, math.inf]


class TestCost:
    @pytest.mark.parametrize(
        "options", [{}, {"hold": 2}, {"groups": "component", "max_norm": 1.0}, {"groups": "block", "loss_scale": 2.0}]
    )
    def test_a_step_costs_what_its_tensors_are_and_not_their_square(self, options):
        def work_of(size):
            names = [Name(f"layers.{i}.w") for i in range(size)]
            layout = GradientLayout.of(dict.fromkeys(names, (1,)))
            engine = GradientEngine(layout, **options)
            made = [{Name(n): np.ones(1, np.float32) for n in names} for _ in range(4)]

            def window():
                for gradients in made[:3]:
                    engine.add(gradients)
                engine.step(out=made[3])

            return window

        assert growth(work_of, 60) < 2.2


class TestVerdict:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_raise_names_component_index_and_value_and_keeps_the_window(self, value):
        engine = GradientEngine(SMALL, max_norm=1.0)
        gradients = bad_gradients(value)
        engine.add(gradients)
        for _ in range(2):  # a second try finds the same
            with pytest.raises(NonFiniteGradient) as caught:
                engine.step()
            error = caught.value
            assert (error.component, error.index, error.step, error.rank) == ("layers.1.w", 4, 0, None)
            assert error.value == value or math.isnan(error.value) == math.isnan(value)
            assert not error.is_late
        assert engine.accumulator.views()["layers.1.w"].tobytes() == gradients[1].tobytes()
        with pytest.raises(WindowError, match=r"step 0 failed.*discard"):
            engine.add(gradients)
        engine.discard()
        engine.add(random_gradients(1))
        assert not engine.step().skipped

    @pytest.mark.parametrize("hold", [1, 2])
    def test_skip_hands_back_zeros_and_the_arena_is_good_again(self, backend, hold):
        engine = new_engine(backend, on_non_finite="skip", hold=hold)
        add_to(engine, backend, bad_gradients(component=0, index=7))
        out = put_all(backend, [np.full(slot.shape, 9, np.float16) for slot in SMALL.slots])
        result = engine.step(out=out)
        assert float(result.skipped) == 1.0
        assert (result.non_finite.component, result.non_finite.index) == ("layers.0.w", 7)
        assert math.isnan(float(result.norm))
        assert not any(on_host(array).any() for array in out)
        add_to(engine, backend, random_gradients(1))
        result = engine.step()
        assert float(result.skipped) == 0.0
        assert result.non_finite is None
        assert result.step == 1
        assert all(np.isfinite(g).all() for g in all_on_host(result.gradients).values())

    def test_skip_makes_zeros_of_the_arena_too(self, backend):
        engine = new_engine(backend, on_non_finite="skip", groups="component")
        add_to(engine, backend, bad_gradients())
        assert not any(array.any() for array in all_on_host(engine.step().gradients).values())

    def test_pass_hands_on_what_came_unclipped(self, backend):
        engine, gradients = new_engine(backend, on_non_finite="pass", max_norm=1e-3), bad_gradients(math.inf, 2, 0)
        add_to(engine, backend, gradients)
        result = engine.step()
        assert float(result.skipped) == 0.0
        assert result.non_finite.component == "head"
        assert float(result.scale) == 1.0
        for array, got in zip(gradients, result.gradients.values(), strict=True):
            assert on_host(got).tobytes() == array.tobytes()
        add_to(engine, backend, random_gradients(0))  # and nothing is raised late
        assert engine.step().step == 1

    def test_check_raises_what_was_found(self, backend):
        engine = new_engine(backend, on_non_finite="skip")
        add_to(engine, backend, random_gradients(0))
        engine.step().check()
        add_to(engine, backend, bad_gradients(-math.inf))
        with pytest.raises(NonFiniteGradient) as caught:
            engine.step().check()
        error = caught.value
        assert (error.component, error.index, error.value, error.step) == ("layers.1.w", 4, -math.inf, 1)

    def test_an_overflowing_sum_is_found(self, backend):
        engine = new_engine(backend, GradientLayout.of([(2,)]), on_non_finite="skip")
        for _ in range(2):
            add_to(engine, backend, [np.array([1, 3e38], np.float32)])
        found = engine.step().non_finite
        assert (found.index, found.value) == (1, math.inf)

    @pytest.mark.parametrize("magnitude", [1e30, 1e-30, 1e-42])
    def test_norms_of_extreme_gradients_are_right(self, backend, magnitude):
        engine = new_engine(backend, GradientLayout.of([(1000,)]), max_norm=None)
        gradient = np.full(1000, magnitude, np.float32)
        add_to(engine, backend, [gradient])
        assert float(engine.step().norm) == pytest.approx(float(gradient[0]) * math.sqrt(1000), rel=1e-6)


class TestLateVerdict:
    """on_non_finite="raise" where the host must wait to know: the step is over, and nothing of the next one is lost."""

    def told(self, engine, device, gradients):
        """Three more steps, each waited for: what was raised, and the last step's bytes."""
        errors, done = [], 0
        while done < 3:
            synchronize(device)
            try:
                if not engine.accumulator.accumulated_count:
                    add_to(engine, device, gradients)
                result, done = engine.step(), done + 1
            except NonFiniteGradient as error:
                errors.append(error)
        return errors, bits_of(result)

    def good_step(self, device):
        engine = new_engine(device)
        add_to(engine, device, random_gradients(1))
        return bits_of(engine.step())

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_zeros_are_handed_back_and_the_next_call_raises_once(self, device, value):
        engine = new_engine(device)
        add_to(engine, device, bad_gradients(value))
        result = engine.step()
        assert float(result.skipped) == 1.0
        assert not math.isfinite(float(result.norm))
        assert not any(array.any() for array in all_on_host(result.gradients).values())
        synchronize(device)
        with pytest.raises(NonFiniteGradient, match="zeros were handed back in that step") as caught:
            add_to(engine, device, random_gradients(1))
        error = caught.value
        assert (error.component, error.index, error.step, error.rank) == ("layers.1.w", 4, 0, None)
        assert error.value == value or math.isnan(error.value) == math.isnan(value)
        assert error.is_late
        assert (engine.accumulator.accumulated_count, engine.current_step) == (0, 1)
        assert self.told(engine, device, random_gradients(1)) == ([], self.good_step(device))

    @pytest.mark.usefixtures("lazy")
    def test_a_step_that_raises_keeps_its_window(self, emulated):
        engine = new_engine(emulated, hold=2)
        add_to(engine, emulated, bad_gradients())
        engine.step()
        add_to(engine, emulated, random_gradients(1))  # the verdict has not come yet
        synchronize(emulated)
        with pytest.raises(NonFiniteGradient):
            engine.step()
        assert (engine.accumulator.accumulated_count, engine.current_step) == (1, 1)
        result = engine.step()
        assert (result.step, bits_of(result)) == (1, self.good_step(emulated))

    @pytest.mark.parametrize("call", ["add_block", "add_non_block"])
    def test_parts_raise_too_and_take_nothing(self, device, call):
        engine, gradients = new_engine(device), put_all(device, random_gradients(1))
        add_to(engine, device, bad_gradients())
        engine.step()
        synchronize(device)
        parts = {
            "add_block": lambda: engine.add_block(0, gradients[:1]),
            "add_non_block": lambda: engine.add_non_block("head", gradients[2]),
        }
        with pytest.raises(NonFiniteGradient):
            parts[call]()
        parts["add_block"](), engine.add_block(1, gradients[1:2]), parts["add_non_block"]()
        assert bits_of(engine.step()) == self.good_step(device)

    def test_check_raises_at_once_and_then_nobody(self, device):
        engine = new_engine(device)
        add_to(engine, device, bad_gradients())
        result = engine.step()
        for _ in range(2):
            with pytest.raises(NonFiniteGradient) as caught:
                result.check()
            assert (caught.value.component, caught.value.index, caught.value.step) == ("layers.1.w", 4, 0)
        assert self.told(engine, device, random_gradients(1)) == ([], self.good_step(device))

    def test_check_of_a_step_before_the_last_still_knows(self, device):
        engine = new_engine(device)
        add_to(engine, device, bad_gradients())
        bad = engine.step()
        self.told(engine, device, random_gradients(1))
        add_to(engine, device, random_gradients(2))
        good = engine.step()
        good.check()
        assert good.non_finite is None
        assert bad.non_finite.step == 0

    def test_a_step_that_was_forgotten_for_a_later_bad_one_is_not_called_good(self, emulated):
        engine = new_engine(emulated, on_non_finite="skip")
        batches = [put_all(emulated, make()) for make in (bad_gradients, bad_gradients, lambda: random_gradients(1))]
        first, second, third = (engine.add(batch) or engine.step() for batch in batches)
        for ask in (first.check, lambda: first.non_finite):
            with pytest.raises(WindowError, match=r"step 0 was finite is no longer known: got 2 steps .* step 1"):
                ask()
        assert (second.non_finite.step, third.non_finite) == (1, None)

    def test_before_the_only_bad_step_all_were_good(self, emulated):
        engine = new_engine(emulated, on_non_finite="skip")
        batches = put_all(emulated, random_gradients(1)), put_all(emulated, bad_gradients())
        good, bad = (engine.add(batch) or engine.step() for batch in batches)
        good.check()
        assert (good.non_finite, bad.non_finite.step) == (None, 1)

    @pytest.mark.usefixtures("lazy")
    def test_check_of_a_good_step_hides_no_bad_one(self, emulated):
        engine = new_engine(emulated)
        bad, good = put_all(emulated, bad_gradients()), put_all(emulated, random_gradients(1))
        synchronize(emulated)
        engine.add(bad)
        engine.step()
        engine.add(good)
        engine.step().check()
        errors, _ = self.told(engine, emulated, random_gradients(1))
        assert [error.step for error in errors] == [0]

    @pytest.mark.parametrize("policy", ["raise", "skip", "pass"])
    def test_the_engine_checks_all_that_is_over(self, backend, policy):
        """Also of more steps than verdicts can be under way, and once."""
        engine = new_engine(backend, on_non_finite=policy)
        engine.check()
        add_to(engine, backend, random_gradients(0))
        engine.step()
        engine.check()
        if backend.is_host:
            return
        told, calls = [], [lambda: add_to(engine, backend, bad_gradients()), engine.step] * 6 + [engine.check] * 2
        while calls:
            call = calls[0]
            try:
                call()
                calls.pop(0)
            except NonFiniteGradient as error:
                told.append(error.step)
        assert (told[-1:], len(set(told))) == ([6] if policy == "raise" else [], len(told))
        assert engine.latest_verdict.bad_steps == 6

    def test_a_later_bad_step_is_told_after_an_earlier_one_was_checked(self, device):
        engine = new_engine(device)
        add_to(engine, device, bad_gradients())
        with pytest.raises(NonFiniteGradient):
            engine.step().check()
        add_to(engine, device, bad_gradients(component=0, index=2))
        engine.step()
        errors, _ = self.told(engine, device, random_gradients(1))
        assert [(error.step, error.component, error.index) for error in errors] == [(1, "layers.0.w", 2)]

    @pytest.mark.usefixtures("lazy")
    def test_of_several_the_last_is_named_and_all_are_counted(self, emulated):
        engine = new_engine(emulated)
        batches = [put_all(emulated, bad_gradients(index=index)) for index in range(3)]
        synchronize(emulated)
        for batch in batches:
            engine.add(batch)
            engine.step()
        errors, _ = self.told(engine, emulated, random_gradients(1))
        assert [(error.step, error.index) for error in errors] == [(2, 2)]
        assert (engine.latest_verdict.bad_steps, engine.latest_verdict.bad_step) == (3, 3)

    @pytest.mark.parametrize("policy", ["raise", "skip", "pass"])
    def test_however_far_the_host_runs_ahead_none_is_lost(self, device, policy):
        """More steps than verdicts can be under way; whoever is bad is raised once at most, the last one surely."""
        engine, bad, step, told = new_engine(device, on_non_finite=policy), {1, 2, 5, 6, 7, 11}, 0, []
        while step < 14:
            gradients = bad_gradients(index=step % 7) if step in bad else random_gradients(step)
            try:
                if not engine.accumulator.accumulated_count:
                    add_to(engine, device, gradients)
                step = engine.step().step + 1
            except NonFiniteGradient as error:
                told.append((error.step, error.index))
        told += [(error.step, error.index) for error in self.told(engine, device, random_gradients(1))[0]]
        synchronize(device)
        assert (engine.latest_verdict.bad_steps, engine.latest_verdict.bad_step) == (len(bad), 11 + 1)
        if policy == "raise":
            assert told == sorted(set(told))
            assert told[-1] == (11, 11 % 7)
            assert {step for step, _ in told} <= bad
        else:
            assert told == []

    def test_the_latest_verdict_comes_without_waiting(self, device):
        engine = new_engine(device, max_norm=0.5)
        assert engine.latest_verdict is None
        add_to(engine, device, random_gradients(0))
        result = engine.step()
        synchronize(device)
        verdict = engine.latest_verdict
        assert (verdict.step, verdict.skipped, verdict.bad_steps) == (1, False, 0)
        assert (verdict.norm, verdict.scale) == (float(result.norm), float(result.scale))
        assert verdict.factor == float(result.factor)
        assert engine.latest_verdict == verdict

    def test_on_the_cpu_there_is_none(self):
        engine = GradientEngine(SMALL, max_norm=1.0)
        engine.add(random_gradients(0))
        engine.step()
        assert engine.latest_verdict is None


class TestAsynchronous:
    """What the emulator counts of a window and its step."""

    @pytest.mark.parametrize(("hold", "known"), [(1, None), (3, None), (2, 4)])
    def test_nothing_waits_and_nothing_is_allocated(self, emulated, hold, known):
        engine = new_engine(emulated, LAYOUT, hold=hold, micro_batches=known)
        batches = [put_all(emulated, random_gradients(seed, LAYOUT)) for seed in range(4)]

        def window():
            for gradients in batches:
                engine.add(gradients, 2.0)
            return engine.step()

        bits = bits_of(window())
        with cuda_emulator.recorded() as record:
            result = window()
        assert (record.waits, record.allocations, record.pinned_allocations) == ([], [], [])
        assert record.copies == ["device to host"]  # the verdict's, into pinned memory
        folds = -(-4 // hold)
        assert len(record.launches) == folds + 2
        assert record.launches[-2:] == ["finalise", "hand_back_small"]
        assert bits_of(result) == bits


class TestAverageSum:
    """The loss was divided before backward: nothing is divided but by the number of workers."""

    def test_one_worker_gets_the_weighted_sum_and_its_norm(self, backend):
        engine = new_engine(backend, GradientLayout.of({"w": (2,)}), max_norm=None, average="sum")
        add_to(engine, backend, [np.array([1, 2], np.float32)])
        add_to(engine, backend, [np.array([1, 3], np.float32)], 2.0)
        result = engine.step()
        np.testing.assert_array_equal(on_host(result.gradients["w"]), [3.0, 8.0])
        assert float(result.norm) == pytest.approx(math.sqrt(73), rel=1e-6)
        assert (float(result.factor), float(result.inverse_factor), float(result.scale)) == (1.0, 1.0, 1.0)
        assert (result.weight, result.micro_batches) == (3.0, 2)

    @pytest.mark.parametrize("hold", [1, 2, 5])
    @pytest.mark.parametrize("known", [True, False])
    def test_a_short_window_is_its_own_sum(self, backend, hold, known):
        engine = new_engine(
            backend, LAYOUT, max_norm=None, average="sum", hold=hold, micro_batches=4 if known else None
        )
        for first, count in ((0, 4), (10, 3), (20, 1)):
            micro_batches = [random_gradients(first + k, LAYOUT) for k in range(count)]
            for gradients in micro_batches:
                add_to(engine, backend, gradients)
            result = engine.step()
            for total, got in zip(expected_sum(micro_batches, [1.0] * count), result.gradients.values(), strict=True):
                draw.assert_same_bits(on_host(got), total)

    def test_divided_losses_are_the_mean_of_undivided_ones(self, backend):
        means, sums = new_engine(backend, max_norm=0.3), new_engine(backend, max_norm=0.3, average="sum")
        for seed in range(4):
            gradients = random_gradients(seed)
            add_to(means, backend, gradients)
            add_to(sums, backend, [gradient / 4 for gradient in gradients])
        mean, total = means.step(), sums.step()
        assert (float(mean.norm), float(mean.scale)) == (float(total.norm), float(total.scale))
        assert float(mean.scale) < 1
        assert bits_of(mean) == bits_of(total)

    def test_groups_are_clipped_by_the_norms_of_their_sums(self, backend):
        engine = new_engine(backend, groups="block", max_norm=0.25, average="sum", loss_scale=8.0)
        micro_batches, weights = [random_gradients(seed, scale=8.0) for seed in range(3)], [1.0, 2.0, 0.5]
        for gradients, weight in zip(micro_batches, weights, strict=True):
            add_to(engine, backend, gradients, weight)
        result = engine.step()
        for total, norm, got in zip(
            expected_sum(micro_batches, weights), result.group_norms.values(), result.gradients.values(), strict=True
        ):
            wanted = np.linalg.norm(np.float64(total)) / 8
            assert float(norm) == pytest.approx(wanted, rel=1e-6)
            np.testing.assert_allclose(on_host(got), total / 8 * min(1, 0.25 / wanted), rtol=3e-7)

    @given(draw.layouts, draw.seeds, st.lists(draw.weights, min_size=1, max_size=4), st.data())
    def test_it_is_the_sum_in_fp64(self, layout, seed, weights, data):
        loss_scale, hold = data.draw(st.sampled_from([1.0, 2.0**-5, 1000.0])), data.draw(st.integers(1, 3))
        micro_batches = [draw.random_gradients([seed, k], layout.slots) for k in range(len(weights))]
        engine = GradientEngine(layout, max_norm=1e-3, average="sum", hold=hold, loss_scale=loss_scale)
        for gradients, weight in zip(micro_batches, weights, strict=True):
            engine.add(gradients, weight)
        result = engine.step()
        totals = [
            sum(np.float64(np.float32(weight)) * gradient for gradient, weight in zip(parts, weights, strict=True))
            for parts in zip(*micro_batches, strict=True)
        ]
        norm = math.sqrt(sum(float(np.square(total).sum()) for total in totals)) / loss_scale
        assert result.norm == pytest.approx(norm, rel=1e-5)
        for total, got in zip(totals, result.gradients.values(), strict=True):
            wanted = total / loss_scale * result.scale
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * sum(weights) / loss_scale * result.scale)

    @pytest.mark.parametrize("options", [{}, {"hold": 2}, {"micro_batches": 3}, {"max_norm": 0.2, "loss_scale": 4.0}])
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_workers_get_the_mean_of_their_sums_those_without_a_micro_batch_included(
        self, backend, world_size, options
    ):
        """As DistributedDataParallel: the gradients of all ranks added up, and divided by their number."""

        def one(exchange):
            engine = new_engine(backend, exchange=exchange, average="sum", **{"max_norm": None, **options})
            outcomes = []
            for window in (3, 2):  # the second one is short; the last rank of several has nothing in it
                count = 0 if window == 2 and exchange.rank == 2 else window
                for k in range(count):
                    add_to(engine, backend, random_gradients([exchange.rank, window, k]), 1.0 + k + exchange.rank)
                if not count:
                    engine.add(None, weight=0)
                result = engine.step()
                facts = [float(number) for number in (result.norm, result.scale, result.weight, result.factor)]
                outcomes.append((facts, bits_of(result)))
            return outcomes

        outcomes = on_ranks(one, world_size)
        assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
        loss_scale = options.get("loss_scale", 1.0)
        for window, ((norm, scale, weight, factor), got) in zip((3, 2), outcomes[0], strict=True):
            ranks = [rank for rank in range(world_size) if window == 3 or rank != 2]
            weights = {(rank, k): 1.0 + k + rank for rank in ranks for k in range(window)}
            totals = [
                sum(w * np.float64(random_gradients([r, window, k])[i]) for (r, k), w in weights.items())
                for i in range(len(SMALL.slots))
            ]
            expected = [total / world_size / loss_scale for total in totals]
            assert norm == pytest.approx(math.sqrt(sum(float(np.square(e).sum()) for e in expected)), rel=1e-6)
            assert weight == sum(weights.values())
            assert scale == pytest.approx(min(1.0, options.get("max_norm", math.inf) / norm), rel=1e-6)
            assert factor == pytest.approx(scale / world_size / loss_scale, rel=1e-6)
            for bits, wanted in zip(got.values(), expected, strict=True):
                array = np.frombuffer(bits, np.float32).reshape(wanted.shape)
                np.testing.assert_allclose(array, wanted * scale, rtol=1e-5, atol=1e-6)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"max_norm": -1.0}, "got -1.0"),
            ({"max_norm": math.nan}, "got nan"),
            ({"max_norm": 0}, "got 0, expected a number above 0.*to switch clipping off pass None"),
            (
                {"max_norm": {"block 0": 1.0, "block 1": 0.0, "rest": 1.0}, "groups": "block"},
                "to switch clipping off pass None",
            ),
            ({"on_non_finite": "ignore"}, "'raise', 'skip', 'pass'"),
            ({"average": "mean"}, "'weighted', 'per_worker', 'sum'"),
            ({"micro_batches": 0}, "got 0"),
            ({"hold": 0}, "got 0"),
            ({"loss_scale": 0.0}, "got 0.0"),
            ({"device": "gpu"}, "got 'gpu'"),
            ({"groups": "layer"}, "got 'layer'"),
        ],
    )
    def test_options_out_of_range_are_refused(self, options, says):
        with pytest.raises(CallerError, match=says):
            GradientEngine(SMALL, **options)

    def test_step_needs_a_micro_batch(self, backend):
        engine = new_engine(backend)
        with pytest.raises(WindowError, match="step 0 without a micro-batch: got 0 micro-batches, expected at least 1"):
            engine.step()
        add_to(engine, backend, random_gradients(0))
        engine.step()
        with pytest.raises(WindowError, match="step 1 without a micro-batch"):
            engine.step()

    @pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, 1e-60, "two", None])
    def test_bad_weights_are_refused_and_change_nothing(self, backend, weight):
        engine, gradients = new_engine(backend), put_all(backend, random_gradients(0))
        with nothing_is_launched(backend), pytest.raises(WindowError, match=r"weight is (out|not) "):
            engine.add(gradients, weight=weight)
        assert engine.accumulator.accumulated_count == 0

    @pytest.mark.parametrize("hold", [1, 2])
    @pytest.mark.parametrize(
        "nothing",
        [
            [None] * 3,
            dict.fromkeys((slot.name for slot in SMALL.slots), None),
            {"layers": [{"w": None}, {"w": None}], "head": None},
        ],
        ids=["sequence", "mapping", "nested"],
    )
    def test_gradients_that_are_all_none_are_refused_and_change_nothing(self, backend, nothing, hold):
        engine, plain = (new_engine(backend, micro_batches=2, hold=hold) for _ in range(2))
        says = r"no component has a gradient.*None for all 3.*before zero_grad\(\).*add\(None, weight=0\)"
        for seed in range(2):
            with nothing_is_launched(backend), pytest.raises(WindowError, match=says):
                engine.add(nothing, 5.0)
            assert engine.has_open_window == (seed > 0)
            assert engine.accumulator.weights == (1.0,) * seed
            add_to(engine, backend, random_gradients(seed))
            add_to(plain, backend, random_gradients(seed))
        result = engine.step()
        assert (result.weight, result.micro_batches, result.unused) == (2.0, 2, frozenset())
        assert bits_of(result) == bits_of(plain.step())

    def test_a_full_window_takes_no_more(self, backend):
        engine = new_engine(backend, micro_batches=1)
        add_to(engine, backend, random_gradients(0))
        with pytest.raises(WindowError, match=r"the window is full.*step\(\) after 1"):
            add_to(engine, backend, random_gradients(1))
        assert engine.step().micro_batches == 1

    def test_a_component_that_lags_is_named(self, backend):
        engine = new_engine(backend)
        add_to(engine, backend, random_gradients(0))
        engine.add_block(0, [backend.put(np.ones((3, 5), np.float32))])
        with pytest.raises(WindowError, match=r"'layers.1.w' \(and 1 more\).*got 1 micro-batches, expected 2"):
            engine.step()
        engine.add_block(1, {"w": backend.put(np.ones(7, np.float32))})
        engine.add_non_block("head", backend.put(np.ones(1, np.float32)))
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
    @pytest.mark.parametrize("average", ["weighted", "per_worker", "sum"])
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

    @pytest.mark.parametrize("average", ["weighted", "per_worker"])
    def test_what_any_worker_used_is_unused_on_none(self, average):
        def one(exchange):
            engine, unused = GradientEngine(SMALL, exchange=exchange, average=average), []
            for used_by_rank in ((0, 1, 0), (None, 2, 2), (None, None, None)):
                used = used_by_rank[exchange.rank]
                gradients = [array if position == used else None for position, array in enumerate(random_gradients(0))]
                add_by_parts(engine, gradients)
                unused.append(engine.step().unused)
            return unused

        names = [slot.name for slot in SMALL.slots]
        assert on_ranks(one, 3) == [[{names[2]}, set(names[:2]), set(names)]] * 3

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
            engine = GradientEngine(SMALL, exchange=exchange, on_non_finite=policy, max_norm=1.0)
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
            engine = GradientEngine(GradientLayout.of([(2,)]), exchange=exchange, on_non_finite="skip", max_norm=1.0)
            engine.add([np.array([0, 3e38], np.float32)])
            found = engine.step().non_finite
            return found.rank, found.index

        assert on_ranks(one, 2) == [(None, 1)] * 2

    def test_layouts_that_differ_are_shown_on_every_rank(self):
        other = GradientLayout.of({"layers.0.w": (5, 3), "layers.1.w": (7,), "head": (1,)})
        outcomes = on_ranks(lambda e: GradientEngine(other if e.rank == 2 else SMALL, exchange=e, max_norm=1.0), 3)
        assert all(isinstance(outcome, HandshakeRefused) for outcome in outcomes)
        assert all("(5, 3)" in str(outcome) and "(3, 5)" in str(outcome) for outcome in outcomes)

    def test_a_component_that_leaves_is_found_without_a_search(self):
        """Each leaves as it comes; the first of those left over by the other rank is looked for in none of the rest."""

        def work_of(size):
            layout, others_left = GradientLayout.of({f"w{i}": (1,) for i in range(size)}), threading.Event()

            def window():
                def one(exchange):
                    engine = GradientEngine(layout, exchange=exchange)
                    adds = [
                        functools.partial(engine.add_non_block, slot.name, np.ones(1, np.float32), last=True)
                        for slot in layout.slots
                    ]
                    if exchange.rank:
                        others_left.wait()  # then it is this thread that sums
                        count = operations(lambda: [add() for add in adds])
                    else:
                        count = [add() for add in adds]
                        others_left.set()
                    engine.step()
                    return count

                return on_ranks(one, 2)[1]

            return window

        assert work_of(400)() / work_of(200)() < 2.2

    def test_a_complete_window_takes_no_more(self):
        def one(exchange):
            engine = GradientEngine(SMALL, exchange=exchange, micro_batches=1, max_norm=1.0)
            engine.add(random_gradients(0))
            with pytest.raises(WindowError, match="was sent"):
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
            with pytest.raises(PeerLost, match="rank 1 is gone"):
                engine.step()
            with pytest.raises(WindowError, match="failed"):
                engine.add(gradients)
            kept = engine.accumulator.views()
            return all(a.tobytes() == b.tobytes() for a, b in zip(gradients, kept.values(), strict=True))

        assert on_ranks(one, 3) == [True, None, True]

    def test_a_failed_step_runs_again_on_another_exchange(self):
        """All ranks break off mid-step with some spans summed; the second try ends with the undisturbed bytes."""
        spans, begun, never = [span.key for span in LAYOUT.spans], [], threading.Event()

        def broken(exchange):
            engine = GradientEngine(LAYOUT, max_norm=0.5, exchange=exchange)
            for k in range(2):
                engine.add(random_gradients([exchange.rank, 0, k], LAYOUT), weight=1.0 + k + exchange.rank)
            begun.append(engine)
            if exchange.rank == 1:  # contributes two spans, then its network is gone
                engine.accumulator.close()
                engine._reducer.start(span for span in LAYOUT.spans if span.key in spans[:2])
                while not (len(begun) == 3 and all(map(may_hold_sums, begun))):
                    assert not never.wait(0.001)
                exchange.close()
                return engine
            with pytest.raises((PeerLost, ExchangeError)):
                engine.step()
            return engine

        def again(exchange):
            engine = engines[exchange.rank]
            assert may_hold_sums(engine)
            engine.reconnect(exchange)
            return {n: a.tobytes() for n, a in engine.step().gradients.items()}

        wanted = on_ranks(lambda e: train(e, steps=1), 3)[0][0][4]
        engines = on_ranks(broken, 3, bucket_bytes=64)
        assert all(isinstance(engine, GradientEngine) for engine in engines), engines
        assert on_ranks(again, 3, bucket_bytes=64) == [wanted] * 3

    def test_tcp_gives_the_bytes_of_local(self):
        assert on_tcp(train) == on_ranks(train, 2)


shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)
layouts = st.lists(shapes, min_size=1, max_size=6).map(GradientLayout.of)


@settings(max_examples=40, deadline=None)
@given(
    layout=layouts,
    weights=st.lists(st.floats(0.125, 64, width=32), min_size=1, max_size=5),
    hold=st.integers(1, 4),
    max_norm=st.floats(0.01, 100),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layout_weights_and_hold_follow_the_contract(backend, layout, weights, hold, max_norm, seed):
    micro_batches = [random_gradients([seed, k], layout) for k in range(len(weights))]
    engine = new_engine(backend, layout, max_norm=max_norm, hold=hold)
    for gradients, weight in zip(micro_batches, weights, strict=True):
        add_to(engine, backend, gradients, weight)
    result = engine.step()
    wanted, norm, scale = expected_step(micro_batches, weights, max_norm)
    assert float(result.norm) == pytest.approx(norm, rel=1e-6)
    assert float(result.scale) == pytest.approx(scale, rel=1e-6)
    got = [on_host(array) for array in result.gradients.values()]
    for array, expected in zip(got, wanted, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6)
    clipped = math.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in got))
    assert clipped <= max_norm * (1 + 1e-5)


def add_in_parts(engine, backend, gradients, weight):
    """A micro-batch block by block from the last one on, then what lies in no block."""
    arrays = dict(zip([slot.name for slot in engine.layout.slots], put_all(backend, gradients), strict=True))
    for block in reversed(engine.layout.blocks):
        engine.add_block(block.index, [arrays[slot.name] for slot in block.slots], weight)
    for slot in engine.layout.slots:
        if slot.block is None:
            engine.add_non_block(slot.name, arrays[slot.name], weight)


def norm_of(arrays):
    return math.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in arrays))


ANY = GradientLayout.of({"head": (2,), "layers.0.w": (5,)})


class TestKeptViews:
    """A block or views that a user keeps: what is written to them counts in the window that is open, or is refused."""

    @pytest.mark.parametrize("hold", [1, 3])
    def test_what_is_written_to_views_before_the_step_is_handed_back(self, backend, hold):
        engine = new_engine(backend, ANY, max_norm=None, hold=hold)
        engine.add(put_all(backend, [np.ones(2, np.float32), np.ones(5, np.float32)]))
        assign(engine.accumulator.views()["head"], backend.put(np.full(2, 50, np.float32)))
        assert on_host(engine.step().gradients["head"]).tolist() == [50, 50]

    @pytest.mark.parametrize("hold", [1, 3])
    def test_a_block_of_an_earlier_window_counts_in_this_one(self, backend, hold):
        engine, ones = new_engine(backend, ANY, max_norm=None, hold=hold), np.ones(5, np.float32)
        batches = [put_all(backend, [np.ones(2, np.float32), ones]) for _ in range(3)]
        engine.add(batches[0])
        block = engine.accumulator.block(0)
        engine.step()
        block.accumulate([backend.put(ones)])
        engine.add(batches[1])
        assert on_host(engine.step().gradients["layers.0.w"]).tolist() == [2] * 5
        engine.add(batches[2])
        block.zero()
        assert on_host(engine.step().gradients["layers.0.w"]).tolist() == [0] * 5

    def test_what_has_left_for_other_workers_is_not_written_to(self):
        """It would be handed back by this rank alone, and not be measured."""

        def one(exchange):
            engine = GradientEngine(ANY, exchange=exchange, max_norm=1.0)
            engine.add_non_block("head", np.ones(2, np.float32), last=True)
            block = engine.accumulator.block(0)
            engine.add_block(0, [np.ones(5, np.float32)], last=True)
            ways = [lambda: block.accumulate([np.ones(5, np.float32)]), block.zero, lambda: block.scale(2)]
            if exchange.rank == 1:
                for way in [*ways, lambda: block.from_flat(block.flatten().copy()), engine.accumulator.views]:
                    with pytest.raises(WindowError, match="was sent to the other workers already"):
                        way()
            return bits_of(engine.step())

        first, second = on_ranks(one, 2)
        assert first == second


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    hold=st.integers(1, 3),
    groups=st.sampled_from([None, "block", "component"]),
    max_norm=st.floats(0.01, 100),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_element_of_any_layout_by_any_way(backend, data, hold, groups, max_norm, seed):
    """Windows come whole or in parts, with gaps, are changed in place and handed back in the arena or elsewhere."""
    layout = data.draw(draw.uneven_layouts(backend.chunk))
    engine = new_engine(backend, layout, max_norm=max_norm, hold=hold, groups=groups)
    written = set()  # through views
    for window in range(2):
        weights = data.draw(st.lists(st.sampled_from([1.0, 0.3, 4.0]), min_size=1, max_size=3))
        batches = []
        for k, weight in enumerate(weights):
            add = data.draw(st.sampled_from([add_to, add_in_parts]))
            most = len(layout.slots) - (add is add_to)  # a whole micro-batch without any gradient is refused
            gaps = data.draw(st.sets(st.sampled_from(layout.slots), max_size=most))
            found = draw.random_gradients([seed, window, k], layout.slots, data.draw(draw.dtypes))
            batches.append([None if slot in gaps else g for slot, g in zip(layout.slots, found, strict=True)])
            add(engine, backend, batches[-1], weight)
        sums, unused = [], {slot.name for slot in layout.slots}
        for slot, column in zip(layout.slots, zip(*batches, strict=True), strict=True):
            pairs = [(g, w) for g, w in zip(column, weights, strict=True) if g is not None]
            sums.append(
                draw.folded(None, *zip(*pairs, strict=True), True) if pairs else np.zeros(slot.size, np.float32)
            )
            unused -= {slot.name} if pairs else set()
        change = data.draw(st.sampled_from(["none", "average", "views", *(["block"] if layout.blocks else [])]))
        weight = sum(map(float, map(np.float32, weights)))
        if change == "average":
            engine.accumulator.average()
            sums, weight = [array * np.float32(1 / weight) for array in sums], 1.0
        elif change == "views":  # of what is folded and not to be overwritten
            engine.accumulator.close()
            for view, array in zip(engine.accumulator.views().values(), sums, strict=True):
                assign(view, backend.put((array * np.float32(2)).reshape(view.shape)))
            sums = [array * np.float32(2) for array in sums]
            written = {slot.name for slot in layout.slots}
        elif change == "block":
            block = data.draw(st.sampled_from(layout.blocks))
            engine.accumulator.block(block.index).scale(0.5)
            sums = [a * np.float32(2 if s in block.slots else 1) for s, a in zip(layout.slots, sums, strict=True)]
            written |= {slot.name for slot in block.slots}
        dtype = data.draw(draw.dtypes)
        wanted = data.draw(st.none() | st.sets(st.sampled_from(layout.slots), min_size=1))
        out = None
        if wanted is not None:
            there = [np.full(slot.shape, 7).astype(draw.DTYPES[dtype]) for slot in layout.slots]
            out = {s.name: backend.put(a) if s in wanted else None for s, a in zip(layout.slots, there, strict=True)}
        assert engine.accumulator.has_non_finite() is False
        result = engine.step(out)
        members = {}
        for slot, array in zip(layout.slots, sums, strict=True):
            label = "rest" if slot.block is None else f"block {slot.block}"
            members.setdefault({None: "all", "block": label, "component": slot.name}[groups], {})[slot.name] = array
        norms = {label: norm_of(arrays.values()) / weight for label, arrays in members.items()}
        scales = {label: max_norm / norm if norm > max_norm else 1.0 for label, norm in norms.items()}
        about = functools.partial(pytest.approx, rel=1e-5)
        assert number_of(result.norm) == about(norm_of(sums) / weight)
        assert [*map(number_of, result.component_norms)] == about([norm_of([array]) / weight for array in sums])
        assert {label: number_of(norm) for label, norm in result.group_norms.items()} == about(norms)
        assert [*map(number_of, result.block_norms)] == about(
            [
                norm_of([a for s, a in zip(layout.slots, sums, strict=True) if s.block == block.index]) / weight
                for block in layout.blocks
            ]
        )
        assert result.unused == unused - written
        expected = {
            name: array * np.float32(scales[label] / weight)
            for label, arrays in members.items()
            for name, array in arrays.items()
        }
        got = all_on_host(result.gradients)
        assert set(got) == {slot.name for slot in (layout.slots if wanted is None else wanted)}
        rounding = 1e-5 if wanted is None else {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
        for name, array in got.items():
            assert array.shape == layout.slot(name).shape
            np.testing.assert_allclose(array.reshape(-1).astype(np.float32), expected[name], rtol=rounding, atol=1e-7)


def test_a_view_written_to_after_the_norm_was_taken_counts(backend):
    engine = new_engine(backend, max_norm=None, micro_batches=1)
    block = engine.accumulator.block(0)
    add_to(engine, backend, random_gradients(0))  # takes the norm in the same pass
    block.scale(0.25)
    result = engine.step()
    got = all_on_host(result.gradients).values()
    norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in got))
    assert float(result.norm) == pytest.approx(norm, rel=1e-6)


class TestWrittenThroughViews:
    LAYOUT = GradientLayout.of({"w": (2,), "b": (1,)})

    def step_of(self, backend, values, taken_at, **options):
        """A step of [3, 4] that becomes `values` after its norm was taken; by views that were taken then or earlier."""
        engine = new_engine(backend, self.LAYOUT, micro_batches=1, **options)
        early = engine.accumulator.views()
        add_to(engine, backend, [np.array([3, 4], np.float32), np.zeros(1, np.float32)])
        if taken_at == "an earlier step":
            engine.step()
            add_to(engine, backend, [np.array([3, 4], np.float32), np.zeros(1, np.float32)])
        views = engine.accumulator.views() if taken_at == "once" else early
        assign(views["w"], backend.put(np.array(values, np.float32)))
        return engine.step()

    @pytest.mark.parametrize("taken_at", ["once", "the beginning", "an earlier step"])
    def test_they_have_the_norm_of_what_is_handed_back(self, backend, taken_at):
        result = self.step_of(backend, [30, 40], taken_at, max_norm=25.0)
        assert (number_of(result.norm), number_of(result.scale)) == (50, 0.5)
        assert on_host(result.gradients["w"]).tolist() == [15, 20]

    @pytest.mark.parametrize("taken_at", ["once", "the beginning", "an earlier step"])
    def test_a_nan_is_found(self, backend, taken_at):
        result = self.step_of(backend, [30, math.nan], taken_at, on_non_finite="skip")
        assert bool(number_of(result.skipped))
        assert on_host(result.gradients["w"]).tolist() == [0, 0]

    def test_they_are_used(self, backend):
        engine = new_engine(backend, self.LAYOUT, micro_batches=1)
        add_to(engine, backend, [np.ones(2, np.float32), None])
        assert engine.step().unused == {"b"}
        add_to(engine, backend, [np.ones(2, np.float32), None])
        engine.accumulator.views()
        assert engine.step().unused == frozenset()

    def test_what_a_step_hands_back_costs_the_next_one_no_measurement(self, backend, monkeypatch):
        engine = new_engine(backend, self.LAYOUT, micro_batches=1)
        monkeypatch.setattr(engine.accumulator, "measure_rest", self.measured(engine, found := []))
        for _ in range(3):
            add_to(engine, backend, [np.ones(2, np.float32), np.ones(1, np.float32)])
            assign(engine.step().gradients["w"], 7)
        assert found == [0, 0, 0]

    def measured(self, engine, found):
        """`measure_rest`, which says how many components it measures."""
        accumulator, measure_rest = engine.accumulator, engine.accumulator.measure_rest

        def measure():
            found.append(int((accumulator._exposed | ~accumulator._window.measured).sum()))
            measure_rest()

        return measure


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
            engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
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
            engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
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
            engine = GradientEngine(SMALL, exchange=exchange, micro_batches=1, max_norm=1.0)
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
            engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
            engine.add(random_gradients(exchange.rank))
            return {n: a.tobytes() for n, a in engine.step().gradients.items()}

        assert on_ranks(again, 2) == on_ranks(plain, 2)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("max_norm", [{"max_norm": 1.0}, {"max_norm": None}]),
            ("average", [{"average": "weighted"}, {"average": "per_worker"}]),
            ("average", [{"average": "sum"}, {"average": "weighted"}]),
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
            engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
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


class Interrupting:
    """Kernels that are interrupted behind one operation, before anybody noted that it was done, as Ctrl-C does."""

    def __init__(self, kernels, operation):
        self._kernels, self._operation = kernels, operation

    def __getattr__(self, name):
        real = getattr(self._kernels, name)
        if not name.startswith(self._operation):
            return real

        def interrupted(*arguments, **options):
            self._operation = "nothing more"
            real(*arguments, **options)
            raise KeyboardInterrupt

        return interrupted


@pytest.mark.parametrize(
    ("operation", "hold"), [("accumulate", 1), ("hand_back", 1), ("accumulate", 3), ("hand_back", 2)]
)
def test_an_interrupt_half_way_is_never_taken_for_a_gradient(backend, operation, hold):
    engine = new_engine(backend, max_norm=None, hold=hold)
    for seed in range(2):
        add_to(engine, backend, random_gradients(seed))
    engine._kernels = engine.accumulator.kernels = Interrupting(engine._kernels, operation)
    call = engine.step if hold > 1 or operation == "hand_back" else lambda: add_to(engine, backend, random_gradients(2))
    with pytest.raises(KeyboardInterrupt):
        call()
    for call in (lambda: add_to(engine, backend, random_gradients(3)), engine.step):
        with pytest.raises(WindowError, match=r"is broken: a call was interrupted.*discard\(\)"):
            call()
    engine.discard()
    gradients = random_gradients(4)
    add_to(engine, backend, gradients)
    assert on_host(engine.step().gradients["head"]).tobytes() == gradients[2].tobytes()


class TestAWorkerWithoutAMicroBatch:
    """It takes part with weight 0: the others' step is theirs, to the bit, and its own result is the same."""

    LAYOUT = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (4,)})

    def gradients(self, rank):
        """With zeros of both signs, which added to the wrong zero come out as another."""
        arrays = draw.random_gradients(50 + rank, self.LAYOUT.slots)
        for array in arrays:
            array.reshape(-1)[:3] = [-0.0, 0.0, 1e-42]
        return arrays

    def step(self, exchange, backend, empty, of=None, **options):
        engine = GradientEngine(self.LAYOUT, backend.kernels, exchange=exchange, **options)
        rank = exchange.rank if of is None else of[exchange.rank]
        if rank != empty:
            engine.add(put_all(backend, self.gradients(rank)), 1.0 + rank)
        else:
            engine.add(None, weight=0)
        result = engine.step()
        return result.norm, result.weight, result.micro_batches, bits_of(result)

    @pytest.mark.parametrize("empty", [0, 1, 2])
    @pytest.mark.parametrize("options", [{}, {"average": "per_worker"}, {"max_norm": 0.5, "hold": 3}])
    def test_the_others_end_as_if_it_were_not_there(self, backend, empty, options):
        others = [rank for rank in range(3) if rank != empty]
        wanted = on_ranks(lambda e: self.step(e, backend, None, others, **options), 2)
        got = on_ranks(lambda e: self.step(e, backend, empty, **options), 3)
        assert got == [wanted[0]] * 3

    def test_over_tcp_in_any_step(self):
        def work(exchange):
            engine = GradientEngine(self.LAYOUT, exchange=exchange, micro_batches=1)
            found = []
            for step in range(3):
                mine = exchange.rank == step % 2
                engine.add(self.gradients(step) if mine else None, float(mine))
                result = engine.step()
                found.append((result.step, result.weight, bits_of(result)))
            return found

        arrays = [zip(self.LAYOUT.slots, self.gradients(step), strict=True) for step in range(3)]
        wanted = [(i, 1.0, {slot.name: array.tobytes() for slot, array in pairs}) for i, pairs in enumerate(arrays)]
        assert on_tcp(work) == [wanted, wanted]

    def test_beside_workers_whose_blocks_leave_early(self):
        def work(exchange):
            engine = GradientEngine(self.LAYOUT, exchange=exchange)
            if exchange.rank == 1:
                w0, w1, head = self.gradients(1)
                engine.add_non_block("head", head, last=True)
                engine.add_block(1, [w1], last=True)
                engine.add_block(0, [w0], last=True)
            else:
                engine.add(None, weight=0)
            return bits_of(engine.step())

        wanted = {slot.name: a.tobytes() for slot, a in zip(self.LAYOUT.slots, self.gradients(1), strict=True)}
        assert on_ranks(work, 2) == [wanted, wanted]

    def test_of_nobodys_a_step_is_an_error_on_each_and_the_next_one_goes_on(self):
        def work(exchange):
            engine = GradientEngine(self.LAYOUT, exchange=exchange)
            for _ in range(2):
                engine.add(None, weight=0)
                with pytest.raises(WindowError, match=r"any worker: got 0 micro-batches on each of 2 workers.*add\(\)"):
                    engine.step()
            engine.add(self.gradients(0))
            result = engine.step()
            return result.step, result.weight, result.micro_batches

        assert on_ranks(work, 2) == [(2, 2.0, 2)] * 2

    def test_alone_it_is_an_error(self, backend):
        (exchange,) = local_group(1)
        for options in ({}, {"exchange": exchange}):
            engine = GradientEngine(self.LAYOUT, backend.kernels, **options)
            engine.add(None, weight=0)
            with pytest.raises(WindowError, match="step without a micro-batch on any worker: got 0"):
                engine.step()

    @pytest.mark.parametrize("replicated", ["same", "sum", "average"])
    def test_in_a_grid_the_norm_is_that_of_the_others_model(self, replicated):
        partitions = {"w": "column", "b": "replicated"}

        def work(workers, parts):
            layout = GradientLayout.of({"w": (4,), "b": (2,)}, tp_rank=parts.rank, tp_size=2, partitions=partitions)
            options = {"exchange": workers, "tp_exchange": parts, "replicated": replicated}
            engine = GradientEngine(layout, max_norm=1.0, **options)
            if workers.rank == 1:
                engine.add([np.full(4, 3 + parts.rank, np.float32), np.full(2, 2, np.float32)])
            else:
                engine.add(None, weight=0)
            result = engine.step()
            return result.norm, result.weight, result.micro_batches, bits_of(result)["b"]

        (_, (norm, *_, bits)), *_ = grid = on_grid(work, 2, 2)
        assert norm == pytest.approx(math.sqrt(4 * 9 + 4 * 16 + 2 * (16 if replicated == "sum" else 4)))
        assert grid == [[(norm, 1.0, 1, bits)] * 2] * 2

    def test_its_window_can_be_dropped_by_all(self):
        def work(exchange):
            engine = GradientEngine(self.LAYOUT, exchange=exchange)
            engine.add(None, weight=0)
            engine.discard()
            assert not engine.has_open_window
            mine = exchange.rank == 0
            engine.add(self.gradients(0) if mine else None, weight=float(mine))
            return engine.step().weight

        assert on_ranks(work, 2) == [1.0, 1.0]

    def test_that_says_nothing_takes_no_part_until_it_does(self):
        """Else one that called step() once too often would join the others' next one."""

        def work(exchange):
            engine, weights = GradientEngine(self.LAYOUT, exchange=exchange), []
            for step in range(2):
                engine.add(self.gradients(step))
                weights.append(engine.step().weight)
                if exchange.rank == 1:
                    says = rf"step {step + 1} without a micro-batch.*add\(None, weight=0\)"
                    with pytest.raises(WindowError, match=says):
                        engine.step()
            return weights

        assert on_ranks(work, 2) == [[2.0, 2.0]] * 2


class TestAMicroBatchThatCountsNothing:
    def test_among_others_changes_nothing(self, backend):
        engine, wanted, gradients = new_engine(backend), new_engine(backend), random_gradients(3)
        add_to(wanted, backend, gradients)
        engine.add(None, weight=0)
        add_to(engine, backend, gradients)
        engine.add(None, weight=0)
        assert bits_of(engine.step()) == bits_of(wanted.step())

    @pytest.mark.parametrize("weight", [1.0, "0", None, math.nan])
    def test_has_weight_0_and_is_not_gradients_that_were_forgotten(self, weight):
        engine = GradientEngine(SMALL)
        with pytest.raises(WindowError, match=f"without gradients: got weight {weight!r}, expected 0"):
            engine.add(None, weight)
        assert not engine.has_open_window

    def test_is_no_reason_to_capture_anything(self, emulated):
        engine = new_engine(emulated)
        with pytest.raises(WindowError, match="a captured window has micro-batches that count"), engine.capture():
            engine.add(None, weight=0)


def test_an_engine_that_is_dropped_is_gone_at_once():
    engine = GradientEngine(SMALL)
    engine.add(random_gradients(0))
    engine.step()
    kept = weakref.ref(engine.accumulator)
    gc.disable()  # a cycle would keep a GPU's memory until it is collected
    try:
        del engine
        assert kept() is None
    finally:
        gc.enable()


def calls_of(work):
    """Python functions of the package that a call goes through, comprehensions and generators included."""
    count = 0

    def count_calls(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    sys.setprofile(count_calls)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_an_add_of_three_tensors_is_sixty_calls_and_a_step_75():
    """What many small tensors cost is Python's: 0.1 us a call, and more where it has not run for a while."""
    engine = GradientEngine(GradientLayout.of([(4,), (5,), (6,)]), max_norm=1.0)
    gradients = [np.ones(size, np.float32) for size in (4, 5, 6)]
    for _ in range(2):
        engine.add(gradients)
        engine.step()
    engine.add(gradients)
    assert 10 < calls_of(lambda: engine.add(gradients)) <= 60
    assert 10 < calls_of(engine.step) <= 75
