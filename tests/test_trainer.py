"""Data-parallel training: the same weights on every worker, whatever the transport and the number of workers."""

import hashlib
import inspect
import math
import re
import threading
from unittest.mock import Mock

import numpy as np
import pytest
from devices import on_host
from hypothesis import given
from hypothesis import strategies as st

from gradengine import (
    DistributedTrainer,
    GradientEngine,
    GradientLayout,
    NonFiniteGradient,
    connect,
    local_group,
    shard_batches,
)
from gradengine.errors import CallerError, ExchangeError, PeerLost, ProtocolError, WindowError
from gradengine.settings import EngineOptions
from gradengine.trainer import Batch, weights_digest

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


def micro_batch(index, rows=6):
    rng = np.random.default_rng([7, index])
    return rng.standard_normal((rows, 4), dtype=np.float32), rng.standard_normal((rows, 3), dtype=np.float32)


def run_ranks(exchanges, work):
    outcomes = [None] * len(exchanges)

    def run(rank):
        try:
            outcomes[rank] = work(exchanges[rank])
        except Exception as error:
            outcomes[rank] = error
            exchanges[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for exchange in reversed(exchanges):
        exchange.close()
    return outcomes


def groups(transport, world_size):
    options = {"timeout": 20.0, "join_timeout": 10.0}
    if transport == "local":
        return local_group(world_size, **options)
    first = connect("tcp://127.0.0.1:0", 0, world_size, **options)
    return [first, *(connect(first.url, r, world_size, **options) for r in range(1, world_size))]


def train(exchange, *, trainer=None, steps=5, each=2, **options):
    trainer = trainer or LinearRegression()
    distributed = DistributedTrainer(trainer, exchange, LAYOUT, max_norm=0.5, **options)
    losses = []
    for step in range(steps):
        mine = shard_batches(each * distributed.world_size, distributed.rank, distributed.world_size)
        losses.append(distributed.train_batch(micro_batch(100 * step + i) for i in mine))
    return losses, weights_digest(trainer.weights()), trainer.applied


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("average", ["weighted", "per_worker", "sum"])
def test_all_workers_keep_the_same_weights_on_both_transports(world_size, average):
    """After each step every worker holds the same bytes."""
    outcomes = [
        outcome
        for transport in ("local", "tcp")
        for outcome in run_ranks(groups(transport, world_size), lambda e: train(e, average=average, check_every=1))
    ]
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
    assert outcomes[0][2] == 5


class Streaming(LinearRegression):
    streamed = 0

    def stream_backward(self, micro_batch):
        self.streamed += 1
        loss, gradients = self.forward_backward(micro_batch)
        return loss, iter([("head", gradients.pop("head")), (0, gradients)])


def test_streaming_the_last_micro_batch_changes_no_bit():
    plain = run_ranks(local_group(3), train)
    trainers = [Streaming() for _ in range(3)]
    streamed = run_ranks(groups("tcp", 3), lambda e: train(e, trainer=trainers[e.rank], micro_batches=2))
    assert streamed == plain
    assert [trainer.streamed for trainer in trainers] == [5, 5, 5]  # the last of two in each of five steps


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_micro_batch_each_is_one_process_with_all_bit_for_bit(world_size):
    alone = LinearRegression()
    one = DistributedTrainer(alone, None, LAYOUT, max_norm=0.5)
    for step in range(5):
        one.train_batch(micro_batch(100 * step + i) for i in range(world_size))
    outcomes = run_ranks(local_group(world_size), lambda e: train(e, each=1))
    assert [digest for _, digest, _ in outcomes] == [weights_digest(alone.weights())] * world_size


def test_the_loss_is_weighted_over_all_workers():
    def one(exchange):
        distributed = DistributedTrainer(TokenRegression(), exchange, LAYOUT, max_norm=1.0)
        return distributed.train_batch([micro_batch(exchange.rank, rows=2 + 5 * exchange.rank)])

    losses = [LinearRegression().forward_backward(micro_batch(r, rows=2 + 5 * r))[0] for r in range(3)]
    wanted = np.average(losses, weights=[2, 7, 12])
    assert run_ranks(local_group(3), one) == [pytest.approx(wanted, rel=1e-12)] * 3


@pytest.mark.parametrize(
    "facts",
    [None, 7, "ab", b"", [], [1.0], [1.0, 2.0, 3.0], [[], 1.0], [1.0, {}], {"loss": 1.0}, ["9" * 5000, 1.0],
     [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], ["x", 1.0]],
    ids=lambda facts: repr(facts)[:20],
)  # fmt: skip
def test_loss_that_cannot_be_is_a_protocol_error(facts):
    def one(exchange):
        if exchange.rank == 0:
            distributed = DistributedTrainer(LinearRegression(), exchange, LAYOUT, max_norm=1.0)
            with pytest.raises(ProtocolError, match="rank 1 sent an invalid loss: got"):
                distributed.train_batch([micro_batch(0)])
        else:
            GradientEngine(LAYOUT, exchange=exchange, max_norm=1.0).tell_all("loss of step 0", facts)
        return True

    assert run_ranks(local_group(2), one) == [True, True]


def test_tokens_weigh_the_gradient():
    """Unequal micro-batches by weight are one batch of all rows."""
    parts = [micro_batch(i, rows) for i, rows in enumerate((1, 5, 9))]
    by_weight, whole = TokenRegression(), LinearRegression()
    DistributedTrainer(by_weight, None, LAYOUT, max_norm=None).train_batch(parts)
    joined = tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))
    DistributedTrainer(whole, None, LAYOUT, max_norm=None).train_batch([joined])
    for name, weight in by_weight.parameters.items():
        np.testing.assert_allclose(weight, whole.parameters[name], rtol=1e-5, atol=1e-6)


def test_rank_world_size_coordinator_and_steps():
    def one(exchange):
        d = DistributedTrainer(LinearRegression(), exchange, LAYOUT, max_steps=2, max_norm=1.0)
        before = (d.rank, d.world_size, d.is_coordinator, d.step, d.reached_max_steps)
        for i in range(2):
            d.train_batch([micro_batch(i)])
        with pytest.raises(WindowError, match="all steps are done: got step 3, expected max_steps=2"):
            d.train_batch([micro_batch(9)])
        return before, d.step, d.reached_max_steps

    outcomes = run_ranks(local_group(2), one)
    assert outcomes == [((0, 2, True, 0, False), 2, True), ((1, 2, False, 0, False), 2, True)]


def test_nothing_is_clipped_that_nobody_bounded():
    distributed, bounded = (DistributedTrainer(LinearRegression(), None, LAYOUT, **o) for o in ({}, {"max_norm": 1.0}))
    for trainer in (distributed, bounded):
        trainer.train_batch([tuple(100 * column for column in micro_batch(0))])
    assert distributed.last_result.norm == bounded.last_result.norm > 1
    assert (distributed.last_result.scale, bounded.last_result.scale < 1) == (1.0, True)


def test_no_micro_batch_is_an_error():
    with pytest.raises(WindowError, match="without a micro-batch"):
        DistributedTrainer(LinearRegression(), None, LAYOUT, max_norm=1.0).train_batch([])


@pytest.mark.parametrize("options", [{"max_steps": -1}, {"check_every": -1}, {"max_norm": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(CallerError):
        DistributedTrainer(LinearRegression(), None, LAYOUT, **options)


def test_check_every_needs_weights():
    class Blind:
        forward_backward = apply_gradients = None

    with pytest.raises(CallerError, match="weights"):
        DistributedTrainer(Blind(), None, LAYOUT, check_every=1, max_norm=1.0)


def test_weights_that_differ_are_found_and_the_rank_is_named():
    outcomes = run_ranks(
        local_group(3), lambda e: train(e, trainer=LinearRegression(seed=int(e.rank == 2)), check_every=2)
    )
    assert all(isinstance(outcome, ExchangeError) for outcome in outcomes)
    assert all("rank 2 differ from rank 0's after step 2" in str(outcome) for outcome in outcomes)


def test_a_skipped_step_applies_nothing_on_any_worker():
    class Poisoned(LinearRegression):
        def forward_backward(self, micro_batch):
            loss, gradients = super().forward_backward(micro_batch)
            gradients["head"][0] = np.nan
            return loss, gradients

    def one(exchange):
        trainer = Poisoned() if exchange.rank == 1 else LinearRegression()
        distributed = DistributedTrainer(trainer, exchange, LAYOUT, on_non_finite="skip", max_norm=1.0)
        distributed.train_batch([micro_batch(0)])
        found = distributed.last_result.non_finite
        return trainer.applied, found.rank, found.component, weights_digest(trainer.weights())

    untouched = weights_digest(LinearRegression().weights())
    assert run_ranks(local_group(2), one) == [(0, 1, "head", untouched)] * 2


def test_raise_stops_every_worker_and_names_the_culprit():
    def one(exchange):
        trainer = LinearRegression()
        if exchange.rank == 1:
            trainer.parameters["layers.0.b"][2] = np.inf
        distributed = DistributedTrainer(trainer, exchange, LAYOUT, max_norm=1.0)
        with np.errstate(all="ignore"), pytest.raises(NonFiniteGradient) as caught:
            distributed.train_batch([micro_batch(0)])
        return caught.value.rank, trainer.applied

    assert run_ranks(local_group(2), one) == [(1, 0)] * 2


def test_a_step_whose_peer_left_is_finished_with_new_exchanges():
    wanted = run_ranks(local_group(2), lambda e: train(e, steps=1))[0][1]

    def broken(exchange):
        distributed = DistributedTrainer(LinearRegression(), exchange, LAYOUT, max_norm=0.5)
        if exchange.rank == 1:
            exchange.close()
        with pytest.raises(PeerLost):
            distributed.train_batch(micro_batch(i) for i in shard_batches(4, exchange.rank, 2))
        assert distributed.trainer.applied == 0
        return distributed

    trainers = run_ranks(local_group(2), broken)

    def again(exchange):
        distributed = trainers[exchange.rank]
        distributed.engine.reconnect(exchange)
        distributed.finish_step()
        return weights_digest(distributed.trainer.weights())

    assert run_ranks(local_group(2), again) == [wanted] * 2


@pytest.mark.parametrize(
    ("num_batches", "world_size", "shards"),
    [
        (10, 2, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]),
        (7, 3, [[0, 3, 6], [1, 4], [2, 5]]),
        (2, 4, [[0], [1], [], []]),
        (0, 2, [[], []]),
    ],
)
def test_shards_are_the_known_ones(num_batches, world_size, shards):
    assert [list(shard_batches(num_batches, rank, world_size)) for rank in range(world_size)] == shards


@given(num_batches=st.integers(0, 500), world_size=st.integers(1, 40))
def test_shards_are_disjoint_complete_and_even(num_batches, world_size):
    shards = [list(shard_batches(num_batches, rank, world_size)) for rank in range(world_size)]
    assert sorted(i for shard in shards for i in shard) == list(range(num_batches))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize(("num_batches", "rank", "world_size"), [(-1, 0, 1), (3, 2, 2), (3, -1, 2), (3, 0, 0)])
def test_shards_out_of_range_are_refused(num_batches, rank, world_size):
    with pytest.raises(CallerError, match="out of range"):
        shard_batches(num_batches, rank, world_size)


def test_a_digest_is_the_sha256_of_the_bytes_in_order():
    arrays = [np.arange(3, dtype=np.float32), np.ones((2, 2), np.float16)]
    assert weights_digest(arrays) == hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    assert weights_digest(arrays) != weights_digest(arrays[::-1])


def test_a_batch_that_broke_off_is_not_mixed_into_the_next():
    class Breaking(LinearRegression):
        calls = 0

        def forward_backward(self, micro_batch):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("out of memory")
            return super().forward_backward(micro_batch)

    trainer = DistributedTrainer(Breaking(), None, LAYOUT, max_norm=None)
    with pytest.raises(RuntimeError):
        trainer.train_batch([micro_batch(0), micro_batch(1)])
    with pytest.raises(WindowError, match=r"not finished: got 1 micro-batches.*discard"):
        trainer.train_batch([micro_batch(2)])
    trainer.engine.discard()
    trainer.train_batch([micro_batch(2)])
    alone = LinearRegression()
    DistributedTrainer(alone, None, LAYOUT, max_norm=None).train_batch([micro_batch(2)])
    assert weights_digest(trainer.trainer.weights()) == weights_digest(alone.weights())


def test_gradients_that_could_not_be_applied_may_have_changed_the_weights():
    class Failing(LinearRegression):
        def apply_gradients(self, gradients):
            raise RuntimeError("disk full")

    trainer = DistributedTrainer(Failing(), None, LAYOUT)
    with pytest.raises(RuntimeError):
        trainer.train_batch([micro_batch(0)])
    for call in (trainer.finish_step, lambda: trainer.train_batch([micro_batch(9)])):
        with pytest.raises(
            WindowError, match=r"step 0 may have changed the weights.*load one checkpoint, on every rank"
        ):
            call()


class Late(LinearRegression):
    """It has applied the gradients when it raises."""

    def apply_gradients(self, gradients):
        super().apply_gradients(gradients)
        if self.applied == 1:
            raise KeyboardInterrupt


def test_a_finished_batch_is_not_trained_twice_by_who_asks_for_its_loss_again():
    """Whose train_batch() was interrupted as it returned cannot know, and its worker would train one batch more."""
    trainer = DistributedTrainer(LinearRegression(), None, LAYOUT)
    with pytest.raises(WindowError, match=r"there is no batch to finish.*train_batch\(\) first"):
        trainer.finish_step()
    loss, weights = trainer.train_batch([micro_batch(0)]), weights_digest(trainer.trainer.weights())
    assert [trainer.finish_step(), trainer.finish_step()] == [loss, loss]
    assert (trainer.step, weights_digest(trainer.trainer.weights())) == (1, weights)
    trainer.discard()
    with pytest.raises(WindowError, match="there is no batch to finish"):
        trainer.finish_step()


def test_a_micro_batch_of_weight_0_is_left_out():
    plain, sparse = (DistributedTrainer(TokenRegression(), None, LAYOUT, micro_batches=3) for _ in range(2))
    full = [micro_batch(0), micro_batch(1, rows=3)]
    losses = plain.train_batch(full), sparse.train_batch([full[0], micro_batch(2, rows=0), full[1]])
    assert losses[0] == losses[1]
    assert weights_digest(sparse.trainer.weights()) == weights_digest(plain.trainer.weights())


def test_a_batch_whose_update_failed_can_be_dropped():
    trainer = DistributedTrainer(Late(), None, LAYOUT)
    with pytest.raises(KeyboardInterrupt):
        trainer.train_batch([micro_batch(0)])
    trainer.discard()
    trainer.train_batch([micro_batch(1)])
    assert trainer.trainer.applied == 2


@pytest.mark.parametrize("answer", [{"w": 1, "b": 2}, [np.ones(1)] * 3, None, 2.5, np.zeros((2, 2)), "ab"])
def test_a_trainer_that_returns_no_loss_beside_its_gradients_is_told_what_is_expected(answer):
    local = LinearRegression()
    local.forward_backward = local.stream_backward = lambda micro_batch: answer
    for count, expected in ((None, "(loss, gradients)"), (1, "(loss, stream)")):
        trainer = DistributedTrainer(local, None, LAYOUT, micro_batches=count)
        with pytest.raises(CallerError, match=rf"_backward gave no pair: got .*, expected {re.escape(expected)}"):
            trainer.train_batch([micro_batch(0)])
        assert trainer.engine.accumulator.accumulated_count == 0


def test_a_block_that_is_streamed_may_be_any_integer():
    """NumPy's was taken for the id of a component outside the blocks."""
    gradients = {slot.name: np.ones(slot.shape, np.float32) for slot in LAYOUT.slots}
    parts = [("head", gradients["head"]), (np.int64(0), [gradients["layers.0.w"], gradients["layers.0.b"]])]
    local = LinearRegression()
    local.stream_backward = lambda micro_batch: (1.0, parts)
    trainer = DistributedTrainer(local, None, LAYOUT, micro_batches=1)
    assert trainer.train_batch([micro_batch(0)]) == 1.0
    assert trainer.last_result.gradients["layers.0.w"].tolist() == gradients["layers.0.w"].tolist()


def test_a_loss_that_is_nan_is_told_and_decides_nothing():
    local = LinearRegression()
    gradients = {slot.name: np.ones(slot.shape, np.float32) for slot in LAYOUT.slots}
    local.forward_backward = lambda micro_batch: (math.nan, gradients)
    assert math.isnan(DistributedTrainer(local, None, LAYOUT).train_batch([0]))
    assert local.applied == 1


@pytest.mark.parametrize("loss", [None, "high", "1.5", True, np.bool_(0), [1.0, 2.0], 10**400])
def test_a_loss_that_is_no_number_adds_nothing(loss):
    class Odd(Streaming):
        def forward_backward(self, micro_batch):
            found, gradients = super().forward_backward(micro_batch)
            return (found if self.is_mended else loss), gradients

        is_mended = False

    for streams in (False, True):
        trainer = DistributedTrainer(Odd(), None, LAYOUT, micro_batches=1 if streams else None)
        with pytest.raises(CallerError, match="a micro-batch's loss is not a number: got"):
            trainer.train_batch([micro_batch(0)])
        assert trainer.engine.accumulator.accumulated_count == 0
        with pytest.raises(WindowError, match="a batch stopped before all its micro-batches were added"):
            trainer.finish_step()
        Odd.is_mended = True
        trainer.train_batch([micro_batch(0)])
        Odd.is_mended = False


class TestARankWithoutAMicroBatch:
    @pytest.mark.parametrize("transport", ["local", "tcp"])
    @pytest.mark.parametrize("options", [{}, {"average": "per_worker"}, {"micro_batches": 1, "hold": 2}])
    def test_ends_with_the_weights_of_those_that_have_one(self, transport, options):
        """Two batches for three ranks, of which first one and then another goes without."""

        def work(exchange, shards):
            trainer = TokenRegression()
            distributed = DistributedTrainer(trainer, exchange, LAYOUT, max_norm=0.5, check_every=1, **options)
            mine = [[micro_batch(i, rows=3 + i) for i in shard] for shard in shards[exchange.rank]]
            return [distributed.train_batch(batches) for batches in mine], weights_digest(trainer.weights())

        everywhere = run_ranks(groups(transport, 3), lambda e: work(e, [[[0], []], [[1], [2]], [[], [3]]]))
        assert everywhere == [everywhere[0]] * 3
        both = run_ranks(local_group(2), lambda e: work(e, [[[0], [2]], [[1], [3]]]))
        assert everywhere[0] == both[0]

    def test_nobody_has_one(self):
        def one(exchange):
            distributed = DistributedTrainer(LinearRegression(), exchange, LAYOUT)
            for _ in range(2):
                with pytest.raises(WindowError, match="got 0 micro-batches on each of 2 workers"):
                    distributed.train_batch([])
            return distributed.train_batch([micro_batch(0)] * (exchange.rank == 1))

        assert run_ranks(local_group(2), one) == [LinearRegression().forward_backward(micro_batch(0))[0]] * 2

    def test_a_batch_that_failed_is_not_taken_for_the_next(self):
        def one(exchange):
            distributed = DistributedTrainer(LinearRegression(), exchange, LAYOUT)
            if exchange.rank == 1:
                exchange.close()
            with pytest.raises(PeerLost):
                distributed.train_batch([micro_batch(0)] * (exchange.rank == 1))
            with pytest.raises(WindowError, match="not finished"):
                distributed.train_batch([micro_batch(0)])
            distributed.discard()
            return distributed

        for distributed in run_ranks(local_group(2), one):
            assert isinstance(distributed, DistributedTrainer), distributed


def test_a_digest_takes_parameters_as_they_are():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(3))
    assert weights_digest([parameter]) == weights_digest([np.ones(3, np.float32)])


@pytest.mark.parametrize("who", ["both ranks", "one rank"])
def test_a_comparison_that_was_lost_is_made_by_finish_step(who):
    """The step is done and applied: neither the loss nor the gradients are exchanged again."""

    class Faulty:
        """An exchange that is lost at the comparison of weights."""

        shares_memory = False

        def __init__(self, exchange):
            self.exchange, self.rank, self.world_size, self.url = exchange, exchange.rank, exchange.world_size, None
            self.bind, self.start, self.wait, self.close = exchange.bind, exchange.start, exchange.wait, exchange.close

        def gather(self, data):
            if b"digest" in data:
                self.exchange.close()
                raise PeerLost("the line went dead")
            return self.exchange.gather(data)

    spares = local_group(2, timeout=60.0)

    def one(exchange):
        trainer = LinearRegression()
        exchange = Faulty(exchange) if who == "both ranks" or exchange.rank == 1 else exchange
        distributed = DistributedTrainer(trainer, exchange, LAYOUT, max_norm=0.5, check_every=1)
        with pytest.raises(PeerLost):
            distributed.train_batch([micro_batch(exchange.rank)])
        with pytest.raises(WindowError, match="not finished"):
            distributed.train_batch([micro_batch(9)])
        distributed.engine.reconnect(spares[exchange.rank])
        losses = [distributed.finish_step(), distributed.train_batch([micro_batch(2 + exchange.rank)])]
        return losses, trainer.applied, weights_digest(trainer.weights())

    def undisturbed(exchange):
        trainer = LinearRegression()
        distributed = DistributedTrainer(trainer, exchange, LAYOUT, max_norm=0.5, check_every=1)
        losses = [distributed.train_batch([micro_batch(2 * step + exchange.rank)]) for step in (0, 1)]
        return losses, trainer.applied, weights_digest(trainer.weights())

    assert run_ranks(groups("local", 2), one) == run_ranks(groups("local", 2), undisturbed)


#: Whose method ends in what, to leave a batch in a state.
BROKEN = {
    Batch.ADDING: ("trainer", "forward_backward", KeyboardInterrupt),
    Batch.ADDED: ("engine", "step", PeerLost("gone")),
    Batch.APPLYING: ("trainer", "apply_gradients", KeyboardInterrupt),
    Batch.APPLIED: (None, "_compare_weights", KeyboardInterrupt),
}
UNFINISHED, PERHAPS = "of an earlier batch is not finished", "may have changed the weights"
REFUSED = {
    (Batch.READY, "finish_step"): "there is no batch to finish",
    (Batch.ADDING, "train_batch"): UNFINISHED,
    (Batch.ADDING, "finish_step"): "a batch stopped before all its micro-batches were added",
    (Batch.ADDED, "train_batch"): UNFINISHED,
    (Batch.APPLYING, "train_batch"): PERHAPS,
    (Batch.APPLYING, "finish_step"): PERHAPS,
    (Batch.APPLIED, "train_batch"): UNFINISHED,
}


class TestWhereABatchStands:
    """Each state of a batch and each call: it goes on to the batch's end, or is refused and leaves the state."""

    def trainer_in(self, state):
        trainer = DistributedTrainer(LinearRegression(), None, LAYOUT, check_every=1)
        if state is Batch.FINISHED:
            trainer.train_batch([micro_batch(0)])
        elif state is not Batch.READY:
            owner, name, fault = BROKEN[state]
            owner = getattr(trainer, owner) if owner else trainer
            method = getattr(owner, name)
            answers = [method(micro_batch(0))] if state is Batch.ADDING else []
            setattr(owner, name, Mock(side_effect=[*answers, fault]))
            with pytest.raises((KeyboardInterrupt, PeerLost)):
                trainer.train_batch([micro_batch(0), micro_batch(1)])
            setattr(owner, name, method)
        assert trainer._batch is state
        return trainer

    @pytest.mark.parametrize("state", Batch, ids=lambda state: state.name)
    @pytest.mark.parametrize("name", ["train_batch", "finish_step"])
    def test_each_call_in_each_state(self, state, name):
        trainer = self.trainer_in(state)
        calls = {
            "train_batch": lambda: trainer.train_batch([micro_batch(0)]),
            "finish_step": trainer.finish_step,
        }
        if (state, name) not in REFUSED:
            calls[name]()
            assert trainer._batch is Batch.FINISHED
            return
        with pytest.raises(WindowError, match=REFUSED[state, name]):
            calls[name]()
        assert trainer._batch is state

    @pytest.mark.parametrize("state", Batch, ids=lambda state: state.name)
    def test_what_is_dropped_makes_room(self, state):
        trainer = self.trainer_in(state)
        trainer.discard()
        trainer.train_batch([micro_batch(0)])
        assert trainer._batch is Batch.FINISHED


class TestOptions:
    def test_are_the_engines(self):
        parameters = set(inspect.signature(GradientEngine).parameters)
        assert set(EngineOptions.__annotations__) == parameters - {"layout", "exchange"}

    def test_that_it_has_not_are_refused_by_name(self):
        with pytest.raises(TypeError, match="max_nrom"):
            DistributedTrainer(LinearRegression(), None, LAYOUT, max_nrom=1.0)

    def test_loss_scale_is_undone(self):
        class Scaled(LinearRegression):
            def forward_backward(self, micro_batch):
                loss, gradients = super().forward_backward(micro_batch)
                return loss, {name: gradient * np.float32(1024) for name, gradient in gradients.items()}

        plain, scaled = LinearRegression(), Scaled()
        losses = [
            DistributedTrainer(plain, None, LAYOUT).train_batch([micro_batch(0)]),
            DistributedTrainer(scaled, None, LAYOUT, loss_scale=1024.0).train_batch([micro_batch(0)]),
        ]
        assert losses[0] == losses[1]
        assert weights_digest(scaled.weights()) == weights_digest(plain.weights())

    def test_gradients_lie_on_the_engines_device(self, device):
        class OnDevice(LinearRegression):
            def forward_backward(self, micro_batch):
                loss, gradients = super().forward_backward(micro_batch)
                return loss, {
                    name: device.put(np.asarray(gradient, np.float32)) for name, gradient in gradients.items()
                }

            def apply_gradients(self, gradients):
                super().apply_gradients({name: on_host(g) for name, g in gradients.items()})

        trainer = DistributedTrainer(OnDevice(), None, LAYOUT, device=device.kernels)
        trainer.train_batch([micro_batch(0)])
        assert trainer.engine.accumulator.kernels is device.kernels
