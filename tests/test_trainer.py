"""Data-parallel training: the same weights on every worker, whatever the transport and the number of workers."""

import hashlib
import math
import re
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks, on_tcp

from gradengine import (
    DistributedTrainer,
    GradientLayout,
    NonFiniteGradient,
    local_group,
    shard_batches,
)
from gradengine.engine.trainer import Batch, weights_digest
from gradengine.errors import CallerError, PeerLost, ProtocolError, WindowError

LAYOUT = GradientLayout.of({"layers.0.w": (4, 3), "layers.0.b": (3,), "head": (1,)})


class LinearRegression:
    """The smallest local trainer: least squares on (x, y) micro-batches, plain gradient descent."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.parameters = {slot.name: rng.standard_normal(slot.shape, dtype=np.float32) for slot in LAYOUT.slots}
        self.applied = 0

    def forward_backward(self, micro_batch):
        x, y = micro_batch
        p = self.parameters
        error = x @ p["layers.0.w"] + p["layers.0.b"] + p["head"] - y
        gradients = {
            "layers.0.w": 2 * x.T @ error / error.size,
            "layers.0.b": 2 * error.sum(0) / error.size,
            "head": np.array([2 * error.sum() / error.size], np.float32),
        }
        return float((error**2).mean()), gradients

    def apply_gradients(self, gradients):
        self.applied += 1
        for name, gradient in gradients.items():
            self.parameters[name] -= np.float32(0.1) * gradient

    def weights(self):
        return self.parameters


class TokenRegression(LinearRegression):
    def weight(self, micro_batch):
        return len(micro_batch[0])


class Streaming(LinearRegression):
    streamed = 0

    def stream_backward(self, micro_batch):
        self.streamed += 1
        loss, gradients = self.forward_backward(micro_batch)
        return loss, iter([("head", gradients.pop("head")), (np.int64(0), gradients)])  # a block is any integer


def micro_batch(index, rows=6):
    rng = np.random.default_rng([7, index])
    return rng.standard_normal((rows, 4), dtype=np.float32), rng.standard_normal((rows, 3), dtype=np.float32)


def new_trainer(local=None, exchange=None, **options):
    return DistributedTrainer(local or LinearRegression(), exchange, LAYOUT, **options)


def digest(trainer):
    return weights_digest(trainer.trainer.weights())


def train(exchange, *, trainer=None, steps=3, each=2, **options):
    distributed = new_trainer(trainer, exchange, max_norm=0.5, **options)
    losses = []
    for step in range(steps):
        mine = shard_batches(each * distributed.world_size, distributed.rank, distributed.world_size)
        losses.append(distributed.train_batch(micro_batch(100 * step + i) for i in mine))
    if exchange is not None:
        exchange.barrier()
    return losses, digest(distributed), distributed.trainer.applied


class TestSameWeights:
    @pytest.mark.parametrize("average", ["weighted", "per_worker", "prescaled"])
    def test_all_workers_keep_the_same_weights_after_each_step_on_both_transports(self, average):
        def work(exchange):
            return train(exchange, average=average, check_every=1)

        outcomes = [*on_ranks(work, 2), *on_tcp(work)]
        assert outcomes == [outcomes[0]] * 4
        assert outcomes[0][2] == 3

    def test_streaming_the_last_micro_batch_changes_no_bit(self):
        trainers = [Streaming() for _ in range(3)]
        streamed = on_ranks(lambda e: train(e, trainer=trainers[e.rank], micro_batches=2), 3)
        assert streamed == on_ranks(train, 3)
        assert [trainer.streamed for trainer in trainers] == [3, 3, 3]  # the last of two in each of three steps

    def test_streaming_begins_with_the_last_micro_batch_that_counts(self):
        class Weighed(Streaming, TokenRegression):
            pass

        def work(exchange, kind):
            distributed = new_trainer(kind(), exchange, micro_batches=2)
            loss = distributed.train_batch([micro_batch(i, rows) for i, rows in enumerate((0, 3, 1, 0))])
            return loss, digest(distributed), getattr(distributed.trainer, "streamed", 1)

        assert on_ranks(lambda e: work(e, Weighed), 2) == on_ranks(lambda e: work(e, TokenRegression), 2)

    def test_one_micro_batch_each_is_one_process_with_all_bit_for_bit(self):
        (_, alone, _), outcomes = train(None, each=3), on_ranks(lambda e: train(e, each=1), 3)
        assert [digest for _, digest, _ in outcomes] == [alone] * 3

    def test_weights_that_differ_are_found_and_the_rank_is_named(self):
        seeds = (0, 0, 2)
        outcomes = on_ranks(lambda e: train(e, trainer=LinearRegression(seeds[e.rank]), check_every=2), 3)
        assert all("rank 2 differ from rank 0's after step 2" in str(outcome) for outcome in outcomes)

    @pytest.mark.parametrize("options", [{}, {"average": "per_worker"}, {"micro_batches": 1, "hold": 2}])
    def test_ranks_without_a_micro_batch_end_with_the_weights_of_those_that_have_one(self, options):
        """Two batches for three ranks, of which first one and then another goes without."""

        def work(exchange, shards):
            distributed = new_trainer(TokenRegression(), exchange, max_norm=0.5, check_every=1, **options)
            mine = [[micro_batch(i, rows=3 + i) for i in shard] for shard in shards[exchange.rank]]
            return [distributed.train_batch(batches) for batches in mine], digest(distributed)

        everywhere = on_ranks(lambda e: work(e, [[[0], []], [[1], [2]], [[], [3]]]), 3)
        both = on_ranks(lambda e: work(e, [[[0], [2]], [[1], [3]]]), 2)
        assert everywhere == [both[0]] * 3

    def test_where_nobody_has_one_the_next_batch_is_trained(self):
        def work(exchange):
            distributed = new_trainer(exchange=exchange)
            for _ in range(2):
                with pytest.raises(WindowError, match="got 0 micro-batches on each of 2 ranks"):
                    distributed.train_batch([])
            return distributed.train_batch([micro_batch(0)] * (exchange.rank == 1))

        assert on_ranks(work, 2) == [LinearRegression().forward_backward(micro_batch(0))[0]] * 2
        with pytest.raises(WindowError, match="without a micro-batch"):
            new_trainer().train_batch([])


class TestLoss:
    def test_it_is_weighted_over_all_workers_and_nobody_counts_what_weighs_nothing(self):
        def work(exchange):
            mine = [micro_batch(9, rows=0), micro_batch(exchange.rank, rows=2 + 5 * exchange.rank)]
            return new_trainer(TokenRegression(), exchange, micro_batches=2).train_batch(mine)

        losses = [LinearRegression().forward_backward(micro_batch(r, rows=2 + 5 * r))[0] for r in range(3)]
        wanted = np.average(losses, weights=[2, 7, 12])
        assert on_ranks(work, 3) == [pytest.approx(wanted, rel=1e-12)] * 3

    def test_tokens_weigh_the_gradient(self):
        """Unequal micro-batches by weight are one batch of all rows."""
        parts = [micro_batch(i, rows) for i, rows in enumerate((1, 5, 9))]
        by_weight, whole = new_trainer(TokenRegression()), new_trainer()
        by_weight.train_batch(parts)
        whole.train_batch([tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))])
        for name, weight in by_weight.trainer.parameters.items():
            np.testing.assert_allclose(weight, whole.trainer.parameters[name], rtol=1e-5, atol=1e-6)

    def test_one_that_is_nan_is_told_and_decides_nothing(self):
        trainer = new_trainer()
        gradients = {slot.name: np.ones(slot.shape, np.float32) for slot in LAYOUT.slots}
        trainer.trainer.forward_backward = lambda micro_batch: (math.nan, gradients)
        assert math.isnan(trainer.train_batch([0]))
        assert trainer.trainer.applied == 1

    @pytest.mark.parametrize(
        "facts",
        [
            *(None, "ab", [], [1.0], [1.0, 2.0, 3.0], [[], 1.0], {"loss": 1.0}, [1, 1.0], [1.0, 1]),
            *([1.0, weight] for weight in (-1.0, math.nan, math.inf)),
        ],
        ids=str,
    )
    def test_one_that_another_rank_cannot_have_sent_is_a_protocol_error(self, facts):
        trainer = new_trainer()
        trainer.engine.all_gather_object = lambda what, mine: [mine, facts]
        with pytest.raises(ProtocolError, match="rank 1 sent an invalid loss"):
            trainer.train_batch([micro_batch(0)])
        trainer.engine.all_gather_object = lambda what, mine: [[3.0, 1.0], [math.nan, 0.0]]
        assert trainer.finish_step() == 3.0

    @pytest.mark.parametrize("loss", [None, "1.5", True, np.bool_(0), [1.0, 2.0], 10**400], ids=lambda x: str(x)[:9])
    @pytest.mark.parametrize("count", [None, 1])
    def test_one_that_is_no_number_adds_nothing(self, loss, count):
        local = Streaming()
        trainer, backward = new_trainer(local, micro_batches=count), local.forward_backward
        local.forward_backward = lambda micro_batch: (loss, backward(micro_batch)[1])
        with pytest.raises(CallerError, match="loss is not a number"):
            trainer.train_batch([micro_batch(0)])
        assert trainer.engine.accumulator.accumulated_count == 0
        local.forward_backward = backward
        trainer.train_batch([micro_batch(0)])

    @pytest.mark.parametrize("answer", [{"w": 1, "b": 2}, [np.ones(1)] * 3, None, 2.5, np.zeros((2, 2)), "ab"])
    @pytest.mark.parametrize("count", [None, 1])
    def test_without_gradients_beside_it_the_trainer_is_told_what_is_expected(self, answer, count):
        local, expected = LinearRegression(), "(loss, stream)" if count else "(loss, gradients)"
        local.forward_backward = local.stream_backward = lambda micro_batch: answer
        trainer = new_trainer(local, micro_batches=count)
        with pytest.raises(CallerError, match=rf"gave no pair.*{re.escape(expected)}"):
            trainer.train_batch([micro_batch(0)])
        assert trainer.engine.accumulator.accumulated_count == 0


class TestVerdict:
    @pytest.mark.parametrize("policy", ["skip", "raise"])
    def test_of_a_bad_gradient_nothing_is_applied_on_any_worker(self, policy):
        def work(exchange):
            trainer = new_trainer(exchange=exchange, on_non_finite=policy)
            if exchange.rank == 1:
                backward = trainer.trainer.forward_backward
                trainer.trainer.forward_backward = lambda batch: (
                    1.0,
                    {**backward(batch)[1], "head": np.float32([np.nan])},
                )
            if policy == "skip":
                trainer.train_batch([micro_batch(0)])
                found = trainer.last_result.non_finite
            else:
                for call in (lambda: trainer.train_batch([micro_batch(0)]), trainer.finish_step):
                    with pytest.raises(NonFiniteGradient) as caught:
                        call()
                found = caught.value
            return trainer.trainer.applied, found.rank, found.component, trainer.step, digest(trainer)

        untouched = weights_digest(LinearRegression().weights())
        assert on_ranks(work, 2) == [(0, 1, "head", int(policy == "skip"), untouched)] * 2


class TestPeers:
    @pytest.mark.parametrize("who", [(), (1,), (0, 1)], ids=["left", "one rank's comparison", "both ranks' comparison"])
    def test_a_batch_whose_peer_was_lost_is_finished_with_new_exchanges(self, who):
        """Where the weights were to be compared it is finished: nothing is exchanged again."""
        spares = local_group(2, timeout=60.0)

        def lose(exchange):
            exchange.close()
            raise PeerLost("the line went dead")

        def work(exchange):
            trainer, shares = new_trainer(exchange=exchange, max_norm=0.5, check_every=1), []
            shares += [[micro_batch(100 * step + exchange.rank)] for step in (0, 1)]
            if exchange.rank in who:
                tell = trainer.engine.all_gather_object
                trainer.engine.all_gather_object = lambda what, facts: (
                    lose(exchange) if "digest" in what else tell(what, facts)
                )
            elif not who and exchange.rank == 1:
                exchange.close()
            with pytest.raises(PeerLost):
                trainer.train_batch(shares[0])
            assert trainer.trainer.applied == bool(who)
            if not who:
                with pytest.raises(WindowError, match="not finished"):
                    trainer.train_batch([micro_batch(9)])
            if exchange.rank in who:
                trainer.engine.all_gather_object = tell
            trainer.engine.reconnect(spares[exchange.rank])
            return [trainer.finish_step(), trainer.train_batch(shares[1])], digest(trainer), trainer.trainer.applied

        assert on_ranks(work, 2) == on_ranks(lambda e: train(e, each=1, steps=2, check_every=1), 2)

    def test_rank_world_size_coordinator_and_steps(self):
        def work(exchange):
            d = new_trainer(exchange=exchange, max_steps=2)
            before = (d.rank, d.world_size, d.is_coordinator, d.step, d.reached_max_steps)
            for i in range(2):
                d.train_batch([micro_batch(i)])
            with pytest.raises(WindowError, match="got step 3, expected max_steps=2"):
                d.train_batch([micro_batch(9)])
            return before, d.step, d.reached_max_steps

        assert on_ranks(work, 2) == [((0, 2, True, 0, False), 2, True), ((1, 2, False, 0, False), 2, True)]


#: Whose method ends in what, to leave a batch in a state.
STATES = [
    (Batch.READY, None, None, None),
    (Batch.ADDING, "trainer", "forward_backward", KeyboardInterrupt),
    (Batch.ADDED, "engine", "step", PeerLost("gone")),
    (Batch.ADDED, "engine", "all_gather_object", KeyboardInterrupt),
    (Batch.APPLYING, "engine", "step", KeyboardInterrupt),
    (Batch.APPLYING, "trainer", "apply_gradients", KeyboardInterrupt),
    (Batch.FINISHED, None, None, None),
]
REFUSED = {
    (Batch.READY, "finish_step"): "there is no batch to finish.*train_batch",
    (Batch.ADDING, "train_batch"): "not finished.*discard",
    (Batch.ADDING, "finish_step"): "stopped before all its micro-batches were added.*discard",
    (Batch.ADDED, "train_batch"): "not finished",
    (Batch.APPLYING, "train_batch"): "the weights may have changed",
    (Batch.APPLYING, "finish_step"): "the weights may have changed",
}


@pytest.mark.parametrize(("state", "owner", "method_name", "fault"), STATES)
@pytest.mark.parametrize("name", ["train_batch", "finish_step", "discard"])
def test_each_call_goes_on_to_the_batchs_end_or_is_refused_wherever_it_stands(state, owner, method_name, fault, name):
    trainer, batches = new_trainer(check_every=1), [micro_batch(0), micro_batch(1)]
    loss = trainer.train_batch(batches) if state is Batch.FINISHED else None
    if method_name:
        owner = getattr(trainer, owner) if owner else trainer
        method = getattr(owner, method_name)
        answers = [method(micro_batch(0))] if state is Batch.ADDING else []
        is_lost = pytest.raises((KeyboardInterrupt, PeerLost))
        with patch.object(owner, method_name, side_effect=[*answers, fault]), is_lost:
            trainer.train_batch(batches)
    assert trainer._batch is state
    before, weights = trainer.trainer.applied, digest(trainer)
    if (state, name) in REFUSED:
        with pytest.raises(WindowError, match=REFUSED[state, name]):
            trainer.train_batch(batches) if name == "train_batch" else trainer.finish_step()
        assert (trainer._batch, digest(trainer)) == (state, weights)
    elif name == "finish_step":
        assert trainer.finish_step() == trainer.finish_step() == (loss or new_trainer().train_batch(batches))
        is_applied = state is Batch.FINISHED
        assert (trainer.step, trainer.trainer.applied, digest(trainer) == weights) == (1, 1, is_applied)
    else:
        if name == "discard":
            trainer.discard()
            with pytest.raises(WindowError, match="there is no batch to finish"):
                trainer.finish_step()
        trainer.train_batch([micro_batch(2)])
        assert (trainer._batch, trainer.trainer.applied) == (Batch.FINISHED, before + 1)
        if not before:  # nothing of the other batch is mixed into it
            alone = new_trainer()
            alone.train_batch([micro_batch(2)])
            assert digest(trainer) == digest(alone)


class TestShards:
    @given(num_batches=st.integers(0, 100), world_size=st.integers(1, 12))
    def test_they_are_disjoint_complete_and_each_worldsth(self, num_batches, world_size):
        shards = [list(shard_batches(num_batches, rank, world_size)) for rank in range(world_size)]
        assert shards == [[i for i in range(num_batches) if i % world_size == rank] for rank in range(world_size)]

    @pytest.mark.parametrize(("num_batches", "rank", "world_size"), [(-1, 0, 1), (3, 2, 2), (3, -1, 2), (3, 0, 0)])
    def test_out_of_range_they_are_refused(self, num_batches, rank, world_size):
        with pytest.raises(CallerError, match="out of range"):
            shard_batches(num_batches, rank, world_size)


def test_a_digest_is_the_sha256_of_the_bytes_in_order():
    arrays = [np.arange(3, dtype=np.float32), np.ones((2, 2), np.float16)]
    assert weights_digest(arrays) == hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(3))
    assert weights_digest([parameter]) == weights_digest([np.ones(3, np.float32)])


class TestOptions:
    def test_are_the_engines(self):
        with pytest.raises(TypeError, match="max_nrom"):
            new_trainer(max_nrom=1.0)

    @pytest.mark.parametrize("options", [{"max_steps": -1}, {"check_every": -1}, {"max_norm": 0}], ids=str)
    def test_out_of_range_are_refused(self, options):
        with pytest.raises(CallerError, match=next(iter(options))):
            new_trainer(**options)

    def test_what_a_trainer_lacks_is_named(self):
        class Blind:
            forward_backward = apply_gradients = None

        with pytest.raises(CallerError, match="weights"):
            new_trainer(Blind(), check_every=1)
        with pytest.raises(CallerError, match="apply_gradients"):
            new_trainer(object())
