"""Parts of a model find one norm: sharded is unsharded on 2 and 4 ranks and on a grid, or an error says why not."""

import dataclasses
import itertools
import math
import threading
import types

import cuda_emulator
import msgpack
import numpy as np
import pytest
import strategies as draw
from devices import all_on_host, on_host, put_all
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_grid, on_ranks
from transports import SOON, Transport, group, on_all, outcomes

from gradengine import (
    CallerError,
    DistributedTrainer,
    ExchangeError,
    GradientEngine,
    GradientLayout,
    NonFiniteGradient,
    TensorParallelConfig,
    local_group,
)
from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.errors import HandshakeRefused, PeerLost, ProtocolError, WindowError
from gradengine.reduction.tensor_parallel_group import TensorParallelGroup

pytestmark = pytest.mark.timeout(150)
SIZES = (2, 16, 16, 24, 12)  # blocks, H, KV, I, V
WHOLE = GradientLayout.transformer(*SIZES)
FORMS = ("same", "sum", "average")
MICRO_BATCHES = 2


def config(tp_rank, tp_size, **changed):
    return TensorParallelConfig(tp_rank, tp_size, 16, 24, 4, 4, **changed)


def layout_of(c):
    return GradientLayout.transformer(*SIZES, tensor_parallel=c)


def contribution(worker, k, magnitude=1.0):
    """A worker's k-th micro-batch, of the whole model."""
    return {
        slot.name: draw.random_array([worker, k, i], slot.shape, magnitude=magnitude)
        for i, slot in enumerate(WHOLE.slots)
    }


def part_of(gradients, c, form="same"):
    """What a rank's backward gives: its shards, and of replicated components what the parallel form gives each rank."""
    return {name: _held(c.shard_of(name, array.shape), array, form) for name, array in gradients.items()}


def _held(shard, array, form):
    mine = shard.extract_shard(array, copy=True)
    if shard.partition != "replicated" or form == "same":
        return mine
    if form == "average":
        return mine * np.float32(1 + (-1) ** shard.tp_rank * 2.0**-23)
    others = [draw.random_array([7, rank], array.shape) for rank in range(shard.tp_size - 1)]
    return (
        others[shard.tp_rank] if shard.tp_rank < shard.tp_size - 1 else mine - np.sum(others, axis=0, dtype=np.float32)
    )


def merged(parts, *, vocab_parallel=False):
    """Whole arrays from the results of all ranks of a group, in rank order."""
    c = config(0, len(parts), vocab_parallel=vocab_parallel)
    return {
        slot.name: c.shard_of(slot.name, slot.shape).merge_shards([part[slot.name] for part in parts])
        for slot in WHOLE.slots
    }


def whole_step(worlds=1, magnitude=1.0, **options):
    """The same step of one worker with the whole model and all micro-batches."""
    engine = GradientEngine(WHOLE, **{"max_norm": 1.0, **options})
    for worker, k in itertools.product(range(worlds), range(MICRO_BATCHES)):
        engine.add(contribution(worker, k, magnitude))
    return engine.step()


def figures(result):
    """What all ranks must agree on, bit for bit."""
    return (result.norm, result.scale, float(result.factor), result.block_norms, result.component_norms, result.weight)


def assert_near(got, expected, rtol=1e-6):
    for name in expected:
        bound = rtol * np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=rtol, atol=bound, err_msg=name)


class TestOneGroup:
    @pytest.mark.parametrize("tp_size", [2, 4])
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("vocab_parallel", [False, True])
    def test_sharded_is_unsharded(self, backend, tp_size, form, vocab_parallel):
        def work(exchange):
            c = config(exchange.rank, tp_size, vocab_parallel=vocab_parallel)
            engine = GradientEngine(layout_of(c), backend.kernels, tp_exchange=exchange, replicated=form, max_norm=1.0)
            for k in range(MICRO_BATCHES):
                engine.add(put_all(backend, part_of(contribution(0, k), c, form)))
            result = engine.step()
            return figures(result), all_on_host(result.gradients)

        whole = whole_step()
        found = on_all(work, local_group(tp_size, timeout=SOON))
        assert len({figure for figure, _ in found}) == 1
        norm, scale, factor, blocks, components, weight = found[0][0]
        assert norm == pytest.approx(whole.norm, rel=1e-6)
        assert scale == pytest.approx(whole.scale, rel=1e-6)
        assert 0 < scale < 1
        assert factor == pytest.approx(float(whole.factor), rel=1e-6)
        assert blocks == pytest.approx(whole.block_norms, rel=1e-6)
        assert components == pytest.approx(whole.component_norms, rel=1e-6)
        assert weight == MICRO_BATCHES
        assert_near(merged([part for _, part in found], vocab_parallel=vocab_parallel), whole.gradients)
        for name in ("blocks.0.input_norm", "final_norm"):
            assert len({part[name].tobytes() for _, part in found}) == 1

    @pytest.mark.parametrize("transport", list(Transport))
    def test_over_every_transport_the_bytes_are_the_same(self, transport):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, replicated="sum", max_norm=1.0)
            norms = []
            for step in range(3):
                engine.add(part_of(contribution(step, 0), c, "sum"))
                norms.append(engine.step().norm)
            exchange.barrier()
            return norms, engine.accumulator.memory.data.tobytes()

        with group(transport, 2, timeout=SOON) as exchanges:
            found = on_all(work, exchanges)
        expected = on_ranks(work, 2)
        assert found == expected

    @pytest.mark.parametrize(
        "options", [{"groups": "block"}, {"groups": "component", "max_norm": 0.1}, {"max_norm": None}]
    )
    def test_groups_of_components_are_the_whole_models(self, options):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, **{"max_norm": 1.0, **options})
            for k in range(MICRO_BATCHES):
                engine.add(part_of(contribution(0, k), c))
            result = engine.step()
            return dict(result.group_norms), dict(result.gradients)

        whole = whole_step(**options)
        found = on_ranks(work, 2)
        for norms, _ in found:
            assert norms == pytest.approx(dict(whole.group_norms), rel=1e-6)
        assert_near(merged([part for _, part in found]), whole.gradients)

    @given(
        shares=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=4),
        tp_size=st.integers(1, 3),
        form=st.sampled_from(FORMS),
        seed=draw.seeds,
    )
    @settings(max_examples=30)
    def test_any_layout_finds_the_norm_of_its_whole(self, shares, tp_size, form, seed):
        """Components cut or not, empty ones too: the norm is that of all distinct elements."""
        rng = np.random.default_rng(seed)
        names = [str(i) for i in range(len(shares))]
        cut = {name: "column" for name, (_, is_cut) in zip(names, shares, strict=True) if is_cut}
        parts = [
            {n: rng.standard_normal(size).astype(np.float32) for n, (size, _) in zip(names, shares, strict=True)}
            for _ in range(tp_size)
        ]
        for name in set(names) - set(cut):
            for part in parts[1:]:
                part[name] = parts[0][name]

        def work(exchange):
            partitions = {name: cut.get(name, "replicated") for name in names}
            layout = GradientLayout.of(parts[0], tp_rank=exchange.rank, tp_size=tp_size, partitions=partitions)
            engine = GradientEngine(layout, max_norm=None, tp_exchange=exchange, replicated=form)
            engine.add(parts[exchange.rank])
            return engine.step().norm

        factor = tp_size if form == "sum" else 1
        distinct = [part[name] for name in cut for part in parts] + [
            factor * parts[0][name] for name in names if name not in cut
        ]
        for norm in on_ranks(work, tp_size):
            assert norm == pytest.approx(draw.exact_norm(distinct), rel=1e-6, abs=1e-12)

    def test_three_copies_are_averaged_with_one_rounding(self):
        values = [np.array([value], np.float32) for value in (0.1, 0.2, 0.4)]

        def work(exchange):
            layout = GradientLayout.of(
                {"norm": (1,)}, tp_rank=exchange.rank, tp_size=3, partitions={"norm": "replicated"}
            )
            engine = GradientEngine(layout, max_norm=None, tp_exchange=exchange, replicated="average")
            engine.add({"norm": values[exchange.rank]})
            return engine.step().gradients["norm"].tobytes()

        expected = (values[0] + values[1] + values[2]) * np.float32(1 / 3)
        assert on_ranks(work, 3) == [expected.tobytes()] * 3

    def test_a_deferred_step_leaves_the_sum_of_the_replicas(self):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, replicated="sum", max_norm=1.0)
            engine.add(part_of(contribution(0, 0), c, "sum"))
            result = engine.step(deferred=True)
            return np.array(result.sums["final_norm"]), float(result.factor)

        whole = GradientEngine(WHOLE, max_norm=1.0)
        whole.add(contribution(0, 0))
        expected = whole.step()
        for gradient, factor in on_ranks(work, 2):
            np.testing.assert_allclose(gradient, contribution(0, 0)["final_norm"], rtol=1e-5, atol=1e-6)
            assert factor == pytest.approx(float(expected.factor), rel=1e-6)

    @pytest.mark.parametrize("form", FORMS)
    def test_what_any_part_used_is_unused_on_none(self, form):
        """Else AdamW would decay a shard on one rank and not on the other."""

        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, replicated=form)
            gradients = part_of(contribution(0, 0), c, form)
            missing = ["blocks.0.w_q", "final_norm"] + ["blocks.1.gate"] * exchange.rank
            engine.add({name: None if name in missing else gradient for name, gradient in gradients.items()})
            return engine.step().unused

        assert on_ranks(work, 2) == [{"blocks.0.w_q", "final_norm"}] * 2

    def test_destinations_and_loss_scale_work_as_ever(self):
        def work(exchange):
            c = config(exchange.rank, 2)
            layout = layout_of(c)
            engine = GradientEngine(layout, loss_scale=4.0, tp_exchange=exchange, micro_batches=1, max_norm=1.0)
            engine.add(part_of(contribution(0, 0, 4.0), c))
            out = {slot.name: np.zeros(slot.shape, np.float16) for slot in layout.slots}
            engine.step(out=out)
            return out

        whole = GradientEngine(WHOLE, max_norm=1.0)
        whole.add(contribution(0, 0))
        assert_near(merged(on_ranks(work, 2)), whole.step().gradients, rtol=1e-3)

    def test_a_group_of_one_is_no_group(self):
        (exchange,) = local_group(1)
        alone = GradientEngine(WHOLE, tp_exchange=exchange, replicated="average", max_norm=1.0)
        alone.add(contribution(0, 0))
        whole = GradientEngine(WHOLE, max_norm=1.0)
        whole.add(contribution(0, 0))
        assert alone.step().norm == whole.step().norm
        assert alone.accumulator.memory.data.tobytes() == whole.accumulator.memory.data.tobytes()

    def test_what_is_the_same_takes_no_memory_and_what_travels_only_its_own(self):
        travellers = sum(slot.size for slot in layout_of(config(0, 2)).slots if slot.partition == "replicated")
        for tp_size, form, least, most in (
            (2, "same", 0, 0),
            (1, "sum", 0, 0),
            (2, "sum", travellers, travellers + 32 * 7),
        ):
            accumulator = PerBlockGradientAccumulator(layout_of(config(0, tp_size)))
            layout = TensorParallelGroup(accumulator, form)._layout
            assert least <= layout.arena_size <= most

    def test_no_memory_that_others_wrote_leaves_in_the_padding(self, monkeypatch):
        def poisoned(size):
            buffer = allocate(size)
            buffer.data[:] = math.nan
            return buffer

        accumulator = PerBlockGradientAccumulator(layout_of(config(0, 2)))
        allocate = accumulator.kernels.device.allocate
        monkeypatch.setattr(accumulator.kernels.device, "allocate", poisoned)
        assert not TensorParallelGroup(accumulator, "sum")._replicas.in_parts.any()


class TestGrid:
    """Two groups at once: workers with the same part, and the parts of one worker's model."""

    @pytest.mark.parametrize("shape", [(2, 2), (2, 4), (3, 2)])
    @pytest.mark.parametrize("form", FORMS)
    def test_weights_after_steps_are_the_unsharded_ones(self, shape, form):
        dp_size, tp_size = shape
        initial = contribution(99, 0)

        def descend(weights, gradients):
            for name in weights:
                weights[name] -= np.float32(0.1) * gradients[name]

        def work(data_parallel, tensor_parallel):
            c = config(tensor_parallel.rank, tp_size)
            weights = part_of(initial, c)
            engine = GradientEngine(
                layout_of(c),
                exchange=data_parallel,
                tp_exchange=tensor_parallel,
                replicated=form,
                micro_batches=MICRO_BATCHES,
                max_norm=1.0,
            )
            seen = []
            for step in range(3):
                for k in range(MICRO_BATCHES):
                    engine.add(part_of(contribution(data_parallel.rank, k, 1.0 + step), c, form))
                result = engine.step()
                seen.append(figures(result))
                descend(weights, result.gradients)
            return seen, weights

        whole = {name: array.copy() for name, array in initial.items()}
        for step in range(3):
            descend(whole, whole_step(dp_size, 1.0 + step).gradients)
        found = on_grid(work, dp_size, tp_size)
        assert len({str(seen) for row in found for seen, _ in row}) == 1
        for row in found:
            for (_, weights), (_, first) in zip(row, found[0], strict=True):
                assert all(weights[name].tobytes() == first[name].tobytes() for name in weights)
            assert_near(merged([weights for _, weights in row]), whole)

    def test_weights_of_micro_batches_and_workers_means(self):
        def work(average):
            def one(data_parallel, tensor_parallel):
                c = config(tensor_parallel.rank, 2)
                engine = GradientEngine(
                    layout_of(c),
                    exchange=data_parallel,
                    tp_exchange=tensor_parallel,
                    average=average,
                    max_norm=1.0,
                )
                for k in range(MICRO_BATCHES):
                    engine.add(part_of(contribution(data_parallel.rank, k), c), weight=1.0 + k + 3 * data_parallel.rank)
                result = engine.step()
                return result.norm, dict(result.gradients)

            return one

        def unsharded(average):
            def one(exchange):
                engine = GradientEngine(WHOLE, exchange=exchange, average=average, max_norm=1.0)
                for k in range(MICRO_BATCHES):
                    engine.add(contribution(exchange.rank, k), weight=1.0 + k + 3 * exchange.rank)
                result = engine.step()
                return result.norm, dict(result.gradients)

            return one

        for average in ("weighted", "per_worker", "sum"):
            expected = on_ranks(unsharded(average), 2)[0]
            for row in on_grid(work(average), 2, 2):
                assert [norm for norm, _ in row] == pytest.approx([expected[0]] * 2, rel=1e-6)
                assert_near(merged([part for _, part in row]), expected[1])

    def test_the_replicas_of_another_part_are_not_summed_by_mistake(self):
        """Groups that are wired crosswise: equal shapes, other parts."""

        def work(data_parallel, tensor_parallel):
            crossed = config((tensor_parallel.rank + data_parallel.rank) % 2, 2)
            GradientEngine(layout_of(crossed), max_norm=None, exchange=data_parallel)

        for error in itertools.chain(*on_grid(work, 2, 2)):
            assert isinstance(error, HandshakeRefused)
            assert "part of a model: here tp_rank" in str(error)

    def test_through_the_trainer(self):
        class Local:
            def __init__(self, c):
                self.c, self.shares = c, []

            def forward_backward(self, batch):
                return float(batch), part_of(contribution(0, batch), self.c)

            def apply_gradients(self, gradients):
                self.shares.append({name: np.array(g) for name, g in gradients.items()})

        def work(data_parallel, tensor_parallel):
            local = Local(config(tensor_parallel.rank, 2))
            trainer = DistributedTrainer(
                local, data_parallel, layout_of(local.c), tp_exchange=tensor_parallel, max_norm=1.0
            )
            loss = trainer.train_batch([2 * data_parallel.rank, 2 * data_parallel.rank + 1])
            return loss, local.shares[0]

        engine = GradientEngine(WHOLE, max_norm=1.0)
        for k in range(4):
            engine.add(contribution(0, k))
        expected = engine.step().gradients
        for row in on_grid(work, 2, 2):
            assert [loss for loss, _ in row] == [1.5, 1.5]
            assert_near(merged([share for _, share in row]), expected)


class TestNonFinite:
    def poisoned(self, name, index, value, tp_rank):
        def gradients(c):
            part = part_of(contribution(0, 0), c)
            if c.tp_rank == tp_rank:
                part[name].reshape(-1)[index] = value
            return part

        return gradients

    def steps(self, gradients, form="same", tp_size=2, **options):
        def work(exchange):
            c = config(exchange.rank, tp_size)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, replicated=form, **{"max_norm": 1.0, **options})
            engine.add(gradients(c))
            return engine.step()

        return on_ranks(work, tp_size)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("name", ["blocks.1.w_o", "blocks.0.gate"])
    def test_in_a_shard_it_is_named_on_all_ranks(self, name, value):
        for error in self.steps(self.poisoned(name, 5, value, tp_rank=1)):
            assert isinstance(error, NonFiniteGradient)
            assert (error.component, error.index, error.tp_rank, error.rank) == (name, 5, 1, None)
            assert str(error.value) == str(value)
            assert f"gradient '{name}' of tensor-parallel rank 1 is not finite at index 5" in str(error)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("tp_rank", [0, 1])
    def test_in_one_ranks_replica_it_is_that_ranks(self, form, tp_rank):
        for error in self.steps(self.poisoned("final_norm", 3, math.nan, tp_rank), form):
            assert isinstance(error, NonFiniteGradient)
            assert (error.component, error.index, error.tp_rank) == ("final_norm", 3, tp_rank)

    def test_the_first_in_the_layout_of_several_is_named(self):
        def gradients(c):
            part = part_of(contribution(0, 0), c)
            part["blocks.1.up" if c.tp_rank == 0 else "blocks.0.up"].reshape(-1)[c.tp_rank] = math.nan
            return part

        assert {(e.component, e.tp_rank, e.index) for e in self.steps(gradients)} == {("blocks.0.up", 1, 1)}

    def test_a_sum_that_overflows_is_found_too(self):
        def gradients(c):
            part = part_of(contribution(0, 0), c)
            part["final_norm"][7] = 3e38
            return part

        for error in self.steps(gradients, "sum"):
            assert (error.component, error.index, error.value) == ("final_norm", 7, math.inf)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", ["blocks.1.w_o", "blocks.0.input_norm"])
    def test_all_ranks_skip_or_none(self, form, name):
        for result in self.steps(self.poisoned(name, 0, math.nan, tp_rank=1), form, on_non_finite="skip"):
            assert result.skipped
            assert not any(gradient.any() for gradient in result.gradients.values())
            assert result.non_finite.tp_rank == 1

    @pytest.mark.parametrize("form", FORMS)
    def test_passed_on_the_other_components_norms_are_right(self, form):
        def gradients(c):
            part = part_of(contribution(0, 0), c, form)
            part["final_norm"][0] = math.nan if c.tp_rank else part["final_norm"][0]
            return part

        whole = GradientEngine(WHOLE, max_norm=1.0)
        whole.add(contribution(0, 0))
        expected = list(whole.step().component_norms)
        expected[[slot.name for slot in WHOLE.slots].index("final_norm")] = math.nan
        for result in self.steps(gradients, form, on_non_finite="pass"):
            assert math.isnan(result.norm)
            assert list(result.component_norms) == pytest.approx(expected, rel=1e-6, nan_ok=True)

    def test_a_sum_that_overflows_is_told_again_without_a_word_to_the_others(self):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, replicated="sum", max_norm=1.0)
            part = part_of(contribution(0, 0), c)
            part["final_norm"][7] = 3e38
            engine.add(part)
            for _ in range(2 if exchange.rank == 0 else 1):
                with pytest.raises(NonFiniteGradient):
                    engine.step()
            return True

        assert on_ranks(work, 2) == [True, True]

    @pytest.mark.parametrize(
        "found",
        [
            *([], [1], 7, "text", [None] * 4, ["nope", 0, 1.0, None], [["final_norm"], 0, 1.0, 0]),
            *(["final_norm", *rest] for rest in (["x", 1.0, None], [0, "x", 0], [0, 1.0, "x"])),
        ],
    )
    def test_what_another_rank_found_is_read_with_care(self, found):
        told = msgpack.packb(["finding in step 3", found])
        group = TensorParallelGroup(PerBlockGradientAccumulator(layout_of(config(0, 2))), "same")
        group.group.exchange = types.SimpleNamespace(world_size=2, gather=lambda mine: [mine, told])
        group.group.is_alone = False
        with pytest.raises(ProtocolError, match=r"in the tensor-parallel group: (what rank 1|the finding of rank 1)"):
            group.tell_non_finite(None, "step 3", 3)

    def test_the_next_step_is_a_good_one(self):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, replicated="average", max_norm=1.0)
            engine.add(self.poisoned("blocks.0.w_q", 0, math.nan, tp_rank=0)(c))
            with pytest.raises(NonFiniteGradient):
                engine.step()
            with pytest.raises(WindowError):
                engine.add(part_of(contribution(0, 0), c))
            if exchange.rank == 0:
                with pytest.raises(NonFiniteGradient):
                    engine.step()  # told again, without another word to the others
            engine.discard()
            engine.add(part_of(contribution(0, 0), c))
            engine.add(part_of(contribution(0, 1), c))
            return engine.step().norm

        assert on_ranks(work, 2) == pytest.approx([whole_step().norm] * 2, rel=1e-6)

    def test_on_a_grid_rank_and_part_are_named(self):
        def work(data_parallel, tensor_parallel):
            c = config(tensor_parallel.rank, 2)
            engine = GradientEngine(
                layout_of(c), exchange=data_parallel, tp_exchange=tensor_parallel, replicated="sum", max_norm=1.0
            )
            part = part_of(contribution(data_parallel.rank, 0), c)
            if (data_parallel.rank, tensor_parallel.rank) == (1, 0):
                part["blocks.0.down"].reshape(-1)[2] = -math.inf
            engine.add(part)
            engine.step()

        for error in itertools.chain(*on_grid(work, 2, 2)):
            assert (error.component, error.index, error.rank, error.tp_rank) == ("blocks.0.down", 2, 1, 0)
            assert "of rank 1, tensor-parallel rank 0" in str(error)


class TestRefused:
    def outcomes(self, work, tp_size=2):
        return outcomes(work, local_group(tp_size, timeout=SOON, join_timeout=SOON))

    def test_replicas_that_differ_are_named_and_what_to_do(self):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, max_norm=1.0)
            engine.add(part_of(contribution(0, 0), c, "sum"))
            engine.step()

        for error in self.outcomes(work):
            assert isinstance(error, ExchangeError)
            message = str(error)
            assert message.startswith(
                "in the tensor-parallel group: replicated gradient 'blocks.0.input_norm' is not the same"
            )
            assert "on ranks 0 and 1: got norm " in message
            assert "replicated='sum'" in message

    @pytest.mark.parametrize("share", [1.001, 1e-6, 0.0])
    def test_one_small_replica_of_many_is_enough(self, share):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, max_norm=1.0)
            part = part_of(contribution(0, 0, magnitude=1e-3), c)
            part["final_norm"] *= np.float32(share if exchange.rank else 1)
            engine.add(part)
            engine.step()

        for error in self.outcomes(work):
            assert "replicated gradient 'final_norm' is not the same on ranks 0 and 1" in str(error)

    def test_a_replica_that_differs_by_rounding_is_the_same(self):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, max_norm=1.0)
            engine.add(part_of(contribution(0, 0), c, "average"))
            return engine.step().norm

        first, second = self.outcomes(work)
        assert first == second

    @pytest.mark.parametrize(
        ("weights", "shown"), [([1], "1"), ([2], "2"), ([3, 1], "3, 1"), ([1] * 9, "1, ... (sha256 ")]
    )
    def test_another_window_than_rank_0s(self, weights, shown):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, max_norm=1.0)
            for weight in [1, 3] if exchange.rank else weights:
                engine.add(part_of(contribution(0, 0), c), weight=weight)
            engine.step()

        message = "rank 1 has another window than rank 0: got 2 micro-batches of weight 1, 3, expected "
        for error in self.outcomes(work):
            assert message + f"{len(weights)} micro-batches of weight {shown}" in str(error)

    def test_other_settings_than_rank_0s(self):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, max_norm=1.0 + exchange.rank)
            engine.add(part_of(contribution(0, 0), c))
            engine.step()

        for error in self.outcomes(work):
            assert "in the tensor-parallel group: rank 1 has another max_norm than rank 0: got (2.0,)" in str(error)

    @pytest.mark.parametrize(
        ("of_rank_1", "row"),
        [
            ({"replicated": "sum"}, "'replicated=sum'"),
            ({"vocab_parallel": True}, "'lm_head (row)'"),
            ({"intermediate_size": 32}, "'blocks.0.gate (column)'"),
        ],
    )
    def test_parts_of_other_models_do_not_join(self, of_rank_1, row):
        def work(exchange):
            changed = dict(of_rank_1) if exchange.rank else {}
            form = changed.pop("replicated", "same")
            c = dataclasses.replace(config(exchange.rank, 2), **changed)
            layout = GradientLayout.transformer(2, 16, 16, c.intermediate_size, 12, tensor_parallel=c)
            GradientEngine(layout, tp_exchange=exchange, replicated=form, max_norm=1.0)

        for error in self.outcomes(work):
            assert isinstance(error, HandshakeRefused)
            assert row in str(error)

    def test_a_shard_that_one_rank_takes_for_a_replica(self):
        """Of equal shapes, and with gradients of equal norms: only the partitions say it."""

        def work(exchange):
            partition = "replicated" if exchange.rank else "column"
            layout = GradientLayout.of({"w": (4,)}, tp_rank=exchange.rank, tp_size=2, partitions={"w": partition})
            GradientEngine(layout, tp_exchange=exchange, max_norm=1.0)

        for error in self.outcomes(work):
            assert isinstance(error, HandshakeRefused)
            assert "in the tensor-parallel group: layouts differ" in str(error)
            assert "'w (column)'" in str(error)
            assert "'w (replicated)'" in str(error)

    def test_workers_that_treat_replicas_in_two_ways(self):
        def work(data_parallel, tensor_parallel):
            c, form = config(tensor_parallel.rank, 2), ("same", "average")[data_parallel.rank]
            engine = GradientEngine(
                layout_of(c), exchange=data_parallel, tp_exchange=tensor_parallel, replicated=form, max_norm=1.0
            )
            engine.add(part_of(contribution(0, 0), c))
            engine.step()

        for error in itertools.chain(*on_grid(work, 2, 2)):
            assert "rank 1 has another tensor-parallel group than rank 0: got 2 ranks with replicated='average'" in str(
                error
            )

    def test_a_worker_without_its_group(self):
        def work(data_parallel, tensor_parallel):
            c = config(tensor_parallel.rank, 2)
            group_of_mine = tensor_parallel if data_parallel.rank == 0 else None
            engine = GradientEngine(layout_of(c), max_norm=None, exchange=data_parallel, tp_exchange=group_of_mine)
            engine.add(part_of(contribution(0, 0), c))
            engine.step()

        for error in itertools.chain(*on_grid(work, 2, 2)):
            assert "rank 1 has another tensor-parallel group than rank 0: got none, expected 2 ranks with" in str(error)

    def test_one_exchange_for_both_groups(self):
        exchange = local_group(2)[0]
        with pytest.raises(CallerError, match="exchange and tp_exchange are the same"):
            GradientEngine(layout_of(config(0, 2)), exchange=exchange, tp_exchange=exchange, max_norm=1.0)

    def test_an_exchange_of_another_rank_or_size(self):
        exchanges = local_group(4)
        message = "tp_exchange does not fit the layout: got rank 1 of 4, expected tp_rank 0 of tp_size 2"
        with pytest.raises(CallerError, match=message):
            GradientEngine(layout_of(config(0, 2)), tp_exchange=exchanges[1], max_norm=1.0)
        with pytest.raises(CallerError, match="expected tp_rank 0 of tp_size 1"):
            GradientEngine(WHOLE, tp_exchange=exchanges[0], max_norm=1.0)

    @pytest.mark.parametrize(
        "options",
        [
            {"max_norm": 1.0},
            {"on_non_finite": "skip"},
            {"groups": "block", "max_norm": {"block 0": math.inf, "block 1": math.inf, "rest": 2.0}},
        ],
    )
    def test_a_part_alone_is_not_clipped_by_its_own_norm(self, options):
        with pytest.raises(
            CallerError,
            match=r"one part of a model cannot be clipped or skipped by itself: got part 1 of 2",
        ):
            GradientEngine(layout_of(config(1, 2)), **options)

    @pytest.mark.parametrize("form", FORMS)
    def test_nor_are_its_replicas_touched_where_workers_alone_sum(self, form):
        def work(exchange):
            c = config(1, 2)
            engine = GradientEngine(layout_of(c), max_norm=None, exchange=exchange, replicated=form)
            engine.add(part_of(contribution(exchange.rank, 0), c))
            return dict(engine.step().gradients)

        expected = (contribution(0, 0)["final_norm"] + contribution(1, 0)["final_norm"]) / 2
        for gradients in on_ranks(work, 2):
            np.testing.assert_array_equal(gradients["final_norm"], expected)

    def test_but_it_may_be_accumulated_and_averaged(self):
        c = config(1, 2)
        engine = GradientEngine(layout_of(c), max_norm=None)
        engine.add(part_of(contribution(0, 0), c))
        engine.add(part_of(contribution(0, 1), c))
        expected = part_of(whole_step(max_norm=None).gradients, c)
        for name, gradient in engine.step().gradients.items():
            np.testing.assert_array_equal(gradient, expected[name])

    @pytest.mark.parametrize("form", ["mean", "", None, 1])
    def test_an_unknown_form(self, form):
        with pytest.raises(CallerError, match="unknown replicated"):
            GradientEngine(WHOLE, replicated=form, max_norm=1.0)

    def test_a_captured_step(self, device):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), device.kernels, tp_exchange=exchange, max_norm=1.0)
            with pytest.raises(CallerError, match="a step with an exchange waits for other workers"):
                engine.capture()

        assert on_ranks(work, 2) == [None, None]


class Faulty:
    """An exchange that is lost at its n-th call of one kind, as a peer's death would be noticed there."""

    shares_memory = False

    def __init__(self, exchange, call, count=1):
        self.exchange, self.call, self.left = exchange, call, count
        self.rank, self.world_size, self.url = exchange.rank, exchange.world_size, exchange.url

    def bind(self, *arguments):
        self.exchange.bind(*arguments)

    def start(self, *spans, in_background=True):
        self.exchange.start(*spans, in_background=in_background)

    def wait(self):
        self._fail_at("wait")
        return self.exchange.wait()

    def gather(self, data):
        self._fail_at("gather")
        return self.exchange.gather(data)

    def barrier(self):
        self.exchange.barrier()

    def close(self):
        self.exchange.close()

    def _fail_at(self, call):
        if call == self.call:
            self.left -= 1
            if self.left == 0:
                self.exchange.close()
                raise PeerLost("the line went dead")


class Deaf(Faulty):
    """An exchange whose first gather is complete, but is not heard of here."""

    def __init__(self, exchange):
        super().__init__(exchange, "gather")

    def gather(self, data):
        parts = self.exchange.gather(data)
        self._fail_at("gather")
        return parts


def norms_of_two_workers():
    """Of a step with each worker's first micro-batch, then of one with its second."""

    def work(exchange):
        engine, norms = GradientEngine(WHOLE, exchange=exchange, max_norm=1.0), []
        for k in range(MICRO_BATCHES):
            engine.add(contribution(exchange.rank, k))
            norms.append(engine.step().norm)
        return norms

    return on_ranks(work, 2)[0]


def spare_groups():
    return [local_group(2, timeout=SOON) for _ in range(2)]


def joined_anew(lost, first, then, **options):
    """What then(engine, d, c) gives on each rank of a grid of 2 x 2 that lost both groups in its first step.

    As after the death of a process, each closes both and joins both anew. lost(exchange, tp_exchange) gives those that
    fail, first(d, c) a rank's micro-batch.
    """
    spare_columns, spare_rows = spare_groups(), spare_groups()

    def work(data_parallel, tensor_parallel):
        d, t = data_parallel.rank, tensor_parallel.rank
        c, (exchange, tp_exchange) = config(t, 2), lost(data_parallel, tensor_parallel)
        engine = GradientEngine(layout_of(c), exchange=exchange, tp_exchange=tp_exchange, max_norm=1.0, **options)
        engine.add(first(d, c))
        with pytest.raises(PeerLost):
            engine.step()
        engine.exchange.close()
        engine.tp_exchange.close()
        engine.reconnect(spare_columns[t][d], tp_exchange=spare_rows[d][t])
        return then(engine, d, c)

    return list(itertools.chain(*on_grid(work, 2, 2)))


class TestRunAgain:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("call", ["wait", "gather"])
    @pytest.mark.parametrize("which", ["data", "tensor"])
    def test_a_step_that_lost_either_group_gives_the_bytes_of_an_undisturbed_one(self, form, call, which):
        """On rank (1, 1) of the grid, in the sum or in the agreement; all who noticed reconnect and step again."""

        def work_with(is_disturbed):
            spare_rows, spare_columns = spare_groups(), spare_groups()

            def work(data_parallel, tensor_parallel):
                d, t = data_parallel.rank, tensor_parallel.rank
                c, spares = config(t, 2), {"data": spare_columns[t][d], "tensor": spare_rows[d][t]}
                if is_disturbed and (d, t) == (1, 1):
                    data_parallel = Faulty(data_parallel, call) if which == "data" else data_parallel
                    tensor_parallel = Faulty(tensor_parallel, call) if which == "tensor" else tensor_parallel
                engine = GradientEngine(
                    layout_of(c),
                    exchange=data_parallel,
                    tp_exchange=tensor_parallel,
                    replicated=form,
                    max_norm=1.0,
                )
                failures = 0
                for step in range(2):
                    engine.add(part_of(contribution(d, step), c, form))
                    try:
                        result = engine.step()
                    except PeerLost as lost:
                        failures += 1
                        told.append("tensor-parallel group" in str(lost))
                        with pytest.raises(WindowError):
                            engine.add(part_of(contribution(d, step), c, form))
                        (engine.exchange if which == "data" else engine.tp_exchange).close()
                        if which == "data":
                            engine.reconnect(spares["data"])
                        else:
                            engine.reconnect(tp_exchange=spares["tensor"])
                        result = engine.step()
                return failures, figures(result), engine.accumulator.memory.data.tobytes()

            return on_grid(work, 2, 2)

        told = []
        calm, disturbed = work_with(is_disturbed=False), work_with(is_disturbed=True)
        assert set(told) <= {which == "tensor"}
        if (form, call, which) == ("same", "wait", "tensor"):
            assert all(
                failures == 0 for failures, *_ in itertools.chain(*disturbed)
            )  # nothing travels: no sum to wait for
        else:
            assert disturbed[1][1][0] == 1
        assert [[rest for _, *rest in row] for row in disturbed] == [[rest for _, *rest in row] for row in calm]

    def test_the_arena_keeps_the_workers_sum_until_all_workers_have_it(self):
        """A worker that lost its sums is sent rank 0's: they must not be those of the tensor-parallel group yet."""
        spares = spare_groups()

        def work(data_parallel, tensor_parallel):
            d, t = data_parallel.rank, tensor_parallel.rank
            c, data_parallel = config(t, 2), Faulty(data_parallel, "gather")
            engine = GradientEngine(
                layout_of(c), max_norm=None, exchange=data_parallel, tp_exchange=tensor_parallel, replicated="sum"
            )
            engine.add(part_of(contribution(d, 0), c, "sum"))
            with pytest.raises(PeerLost):
                engine.step()
            before = engine.accumulator.views()["final_norm"].copy()
            engine.reconnect(spares[t][d])
            return before, engine.step().gradients["final_norm"].copy()

        found = on_grid(work, 2, 2)
        for t in (0, 1):
            parts = [part_of(contribution(d, 0), config(t, 2), "sum")["final_norm"] for d in (0, 1)]
            for d in (0, 1):
                np.testing.assert_array_equal(found[d][t][0], parts[0] + parts[1])
        whole = sum(contribution(d, 0)["final_norm"] for d in (0, 1)) / 2
        for _, after in itertools.chain(*found):
            np.testing.assert_allclose(after, whole, rtol=1e-5, atol=1e-6)

    def test_half_summed_replicas_are_not_taken_up_by_the_parts_of_another_model(self):
        """Two models in two shards each lose their groups with replicas summed, and then come together crosswise."""
        firsts = [local_group(2, timeout=SOON) for _ in range(2)]
        crossed = [local_group(2, timeout=SOON, join_timeout=SOON) for _ in range(2)]
        refused = "in the tensor-parallel group: step 0 is half summed and rank . took part in it as another: got"

        def work(place):
            model, rank = place
            c, exchange = config(rank, 2), firsts[model][rank]
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, replicated="sum")
            engine.add(part_of(contribution(model, 0), c, "sum"))
            engine._reducer.parts._sum_replicas()
            exchange.close()
            with pytest.raises(HandshakeRefused, match=refused):
                engine.reconnect(tp_exchange=crossed[model if rank == 0 else 1 - model][rank])

        on_all(work, list(itertools.product(range(2), range(2))))

    def test_a_window_dropped_half_way_closes_the_group(self):
        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=Faulty(exchange, "wait"), replicated="sum", max_norm=1.0)
            engine.add(part_of(contribution(0, 0), c, "sum"))
            with pytest.raises(PeerLost):
                engine.step()
            engine.discard()
            engine.reconnect(tp_exchange=spares[exchange.rank])
            for k in range(MICRO_BATCHES):
                engine.add(part_of(contribution(0, k), c, "sum"))
            return engine.step().norm

        spares = local_group(2, timeout=SOON)
        assert on_ranks(work, 2) == pytest.approx([whole_step().norm] * 2, rel=1e-6)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_window_dropped_after_the_group_agreed_may_be_followed_by_another(self, form):
        """All four lose their data-parallel group behind the other's agreement, and drop the window."""
        spares = spare_groups()

        def work(data_parallel, tensor_parallel):
            d, t = data_parallel.rank, tensor_parallel.rank
            c = config(t, 2)
            engine = GradientEngine(
                layout_of(c),
                exchange=Faulty(data_parallel, "gather"),
                tp_exchange=tensor_parallel,
                replicated=form,
                max_norm=1.0,
            )
            engine.add(part_of(contribution(7, 0), c, form))
            with pytest.raises(PeerLost):
                engine.step()
            engine.discard()
            engine.reconnect(spares[t][d], tp_exchange=second_rows[d][t])
            norms = []
            for k in range(MICRO_BATCHES):
                engine.add(part_of(contribution(d, k), c, form))
                norms.append(engine.step().norm)
            return norms

        second_rows = spare_groups()
        with group(Transport.TCP, 2, timeout=SOON) as first, group(Transport.TCP, 2, timeout=SOON) as second:
            found = on_grid(work, 2, 2, rows=[first, second])
        for norms in itertools.chain(*found):
            assert norms == pytest.approx(norms_of_two_workers(), rel=1e-6)

    @pytest.mark.parametrize("form", FORMS)
    def test_both_groups_may_be_joined_anew(self, form):
        """Column 0 loses its workers behind the agreement of its parts; column 1 never hears that these agreed."""

        def lost(exchange, tp_exchange):
            return (exchange, Deaf(tp_exchange)) if tp_exchange.rank else (Faulty(exchange, "gather"), tp_exchange)

        def go_on(engine, d, c):
            norms = [engine.step().norm]
            engine.add(part_of(contribution(d, 1), c, form))
            return [*norms, engine.step().norm]

        for norms in joined_anew(lost, lambda d, c: part_of(contribution(d, 0), c, form), go_on, replicated=form):
            assert norms == pytest.approx(norms_of_two_workers(), rel=1e-6)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_step_that_some_finished_and_others_dropped_is_not_mixed_with_the_next(self, form):
        """Column 1 loses its workers in the last agreement and drops the window; column 0 has made the step."""
        spares = spare_groups()

        def work(data_parallel, tensor_parallel):
            d, t = data_parallel.rank, tensor_parallel.rank
            c = config(t, 2)
            data_parallel = Faulty(data_parallel, "gather") if t == 1 else data_parallel
            engine = GradientEngine(
                layout_of(c), exchange=data_parallel, tp_exchange=tensor_parallel, replicated=form, max_norm=1.0
            )
            engine.add(part_of(contribution(0, 0), c, form))
            if t == 1:
                with pytest.raises(PeerLost):
                    engine.step()
                engine.discard()
                engine.reconnect(spares[t][d])
            else:
                engine.step()
            engine.add(part_of(contribution(0, 0), c, form))
            engine.step()

        for error in itertools.chain(*on_grid(work, 2, 2)):
            assert isinstance(error, PeerLost)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("on_non_finite", ["raise", "skip"])
    def test_groups_joined_anew_after_a_verdict_serve_the_next_window(self, form, on_non_finite):
        """A NaN; both groups are lost while its finder is told, or after it; all join anew, step again and go on."""

        def lost(exchange, tp_exchange):
            return exchange, Faulty(tp_exchange, "gather", count=2)

        def bad(d, c):
            part = part_of(contribution(d, 7), c, form)
            part["final_norm"][0] = math.nan
            return part

        def go_on(engine, d, c):
            if on_non_finite == "raise":
                with pytest.raises(NonFiniteGradient):
                    engine.step()
                engine.discard()
            else:
                assert engine.step().skipped
            norms = []
            for k in range(MICRO_BATCHES):
                engine.add(part_of(contribution(d, k), c, form))
                norms.append(engine.step().norm)
            return norms

        for norms in joined_anew(lost, bad, go_on, replicated=form, on_non_finite=on_non_finite):
            assert norms == pytest.approx(norms_of_two_workers(), rel=1e-6)

    def test_a_finding_does_not_meet_a_tally(self):
        """Column 0 heard that its parts agreed, column 1 did not: joined anew, all agree anew before they tell."""

        def lost(exchange, tp_exchange):
            return exchange, Deaf(tp_exchange) if tp_exchange.rank else Faulty(tp_exchange, "gather", count=2)

        def bad(d, c):
            part = part_of(contribution(d, 7), c)
            part["blocks.0.w_q"][0, 0] = math.nan
            return part

        def again(engine, d, c):
            with pytest.raises(NonFiniteGradient) as caught:
                engine.step()
            return str(caught.value)

        assert len(set(joined_anew(lost, bad, again))) == 1

    @pytest.mark.parametrize("form", FORMS)
    def test_a_window_dropped_while_the_other_part_waits_is_not_mixed_with_its(self, form):
        """Column 0 loses its workers, drops the window and goes on; column 1 waits for it in the step's agreement."""
        spares = spare_groups()

        def work(data_parallel, tensor_parallel):
            d, t = data_parallel.rank, tensor_parallel.rank
            c = config(t, 2)
            data_parallel = data_parallel if t else Faulty(data_parallel, "wait")
            engine = GradientEngine(
                layout_of(c), exchange=data_parallel, tp_exchange=tensor_parallel, replicated=form, max_norm=1.0
            )
            engine.add(part_of(contribution(0, 0), c, form))
            if t == 0:
                with pytest.raises(PeerLost):
                    engine.step()
                engine.discard()
                engine.reconnect(spares[t][d])
                engine.add(part_of(contribution(0, 0), c, form))
            engine.step()

        for error in itertools.chain(*on_grid(work, 2, 2)):
            assert isinstance(error, PeerLost)

    def test_the_trainer_finishes_a_step_whose_parts_lost_each_other(self):
        """Only row 0 loses its group; the other row is in the step already, past the exchange of the losses."""
        spare_row = local_group(2, timeout=SOON)

        class Local:
            def __init__(self, c, rank):
                self.c, self.rank, self.applied = c, rank, []

            def forward_backward(self, batch):
                return float(self.rank), part_of(contribution(self.rank, batch), self.c)

            def apply_gradients(self, gradients):
                self.applied.append(gradients["final_norm"].tobytes())

        def work(data_parallel, tensor_parallel):
            d, t = data_parallel.rank, tensor_parallel.rank
            local = Local(config(t, 2), d)
            row = Faulty(tensor_parallel, "gather") if (d, t) == (0, 1) else tensor_parallel
            trainer = DistributedTrainer(local, data_parallel, layout_of(local.c), tp_exchange=row, max_norm=1.0)
            try:
                losses = [trainer.train_batch([0])]
            except PeerLost:
                trainer.engine.reconnect(tp_exchange=spare_row[t])
                losses = [trainer.finish_step()]
            return [*losses, trainer.train_batch([1])], local.applied

        found = list(itertools.chain(*on_grid(work, 2, 2)))
        assert [losses for losses, _ in found] == [[0.5, 0.5]] * 4
        assert len({tuple(applied) for _, applied in found}) == 1

    def test_a_rank_that_never_comes_is_named_with_its_group(self):
        exchanges = local_group(2, timeout=0.5)
        met = threading.Barrier(2)

        def work(exchange):
            c = config(exchange.rank, 2)
            engine = GradientEngine(layout_of(c), tp_exchange=exchange, max_norm=1.0)
            engine.add(part_of(contribution(0, 0), c))
            met.wait(SOON)
            return engine.step() if exchange.rank == 0 else None

        error, _ = outcomes(work, exchanges)
        assert isinstance(error, ExchangeError)
        assert "in the tensor-parallel group: rank 1 is late for a gather" in str(error)


def test_on_a_device_what_is_the_same_costs_no_copy(emulated):
    """The whole model's norm needs the squared sums alone; gradients stay where they are."""

    def work(exchange):
        c = config(exchange.rank, 2)
        engine = GradientEngine(layout_of(c), emulated.kernels, tp_exchange=exchange, max_norm=1.0)
        engine.add(put_all(emulated, part_of(contribution(0, 0), c)))
        engine.step()
        engine.add(put_all(emulated, part_of(contribution(0, 0), c)))
        exchange.barrier()  # the other rank's arrays are there too
        record = None
        if exchange.rank == 0:
            with cuda_emulator.recorded() as record:
                result = engine.step()
        else:
            result = engine.step()
        return record, on_host(result.gradients["final_norm"])

    (record, first), (_, second) = on_ranks(work, 2)
    assert record.allocations == record.pinned_allocations == []
    assert set(record.copies) <= {"device to host"}
    assert first.tobytes() == second.tobytes()
