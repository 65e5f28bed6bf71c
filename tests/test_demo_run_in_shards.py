"""The demo in shards: runs, their proofs, and how a worker ends when one of its shards fails."""

import dataclasses
import threading
import time
from functools import partial

import numpy as np
import pytest
from test_demo_run import Silent
from transports import SOON, outcomes

from gradengine.demo import worker
from gradengine.demo.comparison import distance
from gradengine.demo.model import LlamaConfig, initial_weights
from gradengine.demo.proofs import prove
from gradengine.demo.record import Compared, Finished, Listening, Stepped
from gradengine.demo.run import replay_all, train
from gradengine.demo.settings import Settings, Transport, divide
from gradengine.demo.text import standard_library_text
from gradengine.demo.worker import Learner, replay
from gradengine.errors import CallerError, DeadlineExceeded, PeerLost, WindowError
from gradengine.exchange import GradientServer
from gradengine.trainer import weights_digest

MODEL = LlamaConfig(num_blocks=1, hidden_size=16, num_kv_heads=4, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(steps=6, tensor_parallel=2, batch_size=2, compared_steps=4, evaluations=2, model=MODEL)
IN_ONE_PIECE = dataclasses.replace(SETTINGS, tensor_parallel=1)
TEXTS = divide(standard_library_text(100_000), "the standard library", MODEL.sequence_length)


class Listener(Silent):
    def __init__(self):
        self.urls = ()

    def listening(self, urls):
        self.urls = urls


@pytest.fixture(scope="module")
def record():
    return train(SETTINGS, TEXTS, Silent())


@pytest.fixture(scope="module")
def replays():
    return replay_all(SETTINGS, TEXTS)


def initial():
    return initial_weights(MODEL, SETTINGS.seed)


# ---- training ----


def test_each_step_and_evaluation_is_reported_once(record):
    assert [step.number for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert sorted(record.evaluations) == [3, 6]
    assert all(step.norm > 0 and step.exchange_seconds > 0 for step in record.steps)


def test_all_ranks_hold_the_same_bytes_and_all_shards_the_same_replicas(record):
    assert set(record.digests) == set(record.replicated_digests) == {0, 1}
    assert len(set(record.digests.values())) == len(set(record.kept_digests.values())) == 1
    assert [len(digests) for digests in record.replicated_digests.values()] == [2, 2]
    assert len({digest for digests in record.replicated_digests.values() for digest in digests}) == 1
    assert {name: weight.shape for name, weight in record.kept.items()} == MODEL.weight_shapes


@pytest.mark.parametrize("transport", [Transport.UNIX, Transport.LOCAL])
def test_every_transport_gives_the_same_bytes(record, transport):
    listener = Listener()
    other = train(dataclasses.replace(SETTINGS, transport=transport), TEXTS, listener)
    assert (other.digests, other.replicated_digests) == (record.digests, record.replicated_digests)
    assert [(step.loss, step.norm) for step in other.steps] == [(step.loss, step.norm) for step in record.steps]
    assert len(set(listener.urls)) == (2 if transport is Transport.UNIX else 0)


def test_losses_and_norms_are_those_of_the_model_in_one_piece(record):
    whole = train(dataclasses.replace(IN_ONE_PIECE, transport=Transport.LOCAL), TEXTS, Silent())
    for step, expected in zip(record.steps, whole.steps, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=1e-5)
        assert step.norm == pytest.approx(expected.norm, rel=1e-3 if step.number > 1 else 1e-6)
    assert record.evaluations == pytest.approx(whole.evaluations, rel=1e-5)


def test_ports_follow_each_other_where_one_was_chosen():
    taken = Listener()
    train(dataclasses.replace(SETTINGS, steps=1, compared_steps=1), TEXTS, taken)
    port = int(taken.urls[0].rpartition(":")[2])
    again = Listener()
    train(dataclasses.replace(SETTINGS, steps=1, compared_steps=1, port=port), TEXTS, again)
    assert [int(url.rpartition(":")[2]) for url in again.urls] == [port, port + 1]


# ---- proofs ----


def verdicts(record, replays, entropy=9.0, **changed):
    weights = changed.get("weights", replays.weights)
    proofs = prove(record, weights, initial(), entropy, changed.get("comparison", replays.comparison))
    return {proof.name: proof.holds for proof in proofs}


def test_a_right_run_is_proved(record, replays):
    assert verdicts(record, replays) == {"1": True, "2": True, "3a": True, "3b": True, "4": True}


@pytest.mark.parametrize(("workers", "micro_batches", "tp_size"), [(1, 1, 2), (1, 2, 4), (2, 1, 2), (3, 2, 4)])
def test_a_run_of_any_shape_is_proved(workers, micro_batches, tp_size):
    changes = {"workers": workers, "micro_batches": micro_batches, "tensor_parallel": tp_size}
    settings = dataclasses.replace(SETTINGS, transport=Transport.LOCAL, **changes)
    found = verdicts(train(settings, TEXTS, Silent()), replay_all(settings, TEXTS))
    assert found == {"1": True, "2": True, "3a": True, "3b": True, "4": True}


def test_an_order_of_heads_is_a_rounding_even_of_one_micro_batch():
    """What 3a measures with is not 0 where there is no order of micro-batches."""
    one = dataclasses.replace(IN_ONE_PIECE, workers=1, micro_batches=1)
    straight, backwards = replay(one, TEXTS, 1), replay(one, TEXTS, 1, backwards=True)
    assert weights_digest(straight) == weights_digest(backwards)
    assert 0 < distance(replay(one, TEXTS, 1, staging=True), straight, initial()) < 1e-2


def test_replicas_that_differ_between_shards_are_found(record, replays):
    same = record.replicated_digests[0][0]
    for wrong in ({0: (same, same), 1: (same, "b")}, {0: (same, same), 1: (same,)}, {0: (same, same)}, {}):
        assert verdicts(dataclasses.replace(record, replicated_digests=wrong), replays)["1"] is False


def test_weights_that_differ_between_workers_are_found(record, replays):
    assert verdicts(dataclasses.replace(record, digests={0: "a", 1: "b"}), replays)["1"] is False


def test_a_lost_micro_batch_is_found(record, replays):
    fewer = replay(dataclasses.replace(IN_ONE_PIECE, workers=1, micro_batches=3), TEXTS, 1)
    assert verdicts(record, replays, weights=replays.weights | {"one": fewer})["3a"] is False


def test_a_single_other_bit_is_found(record, replays):
    weights = {name: array.copy() for name, array in replays.weights["ranks"].items()}
    weights["final_norm"][0] = np.nextafter(weights["final_norm"][0], np.float32(2))
    assert verdicts(record, replays, weights=replays.weights | {"ranks": weights})["3b"] is False


def test_the_bits_are_those_of_the_shards_and_not_of_the_model_in_one_piece(replays):
    whole = replay(IN_ONE_PIECE, TEXTS, SETTINGS.workers)
    assert weights_digest(whole) != weights_digest(replays.weights["ranks"])


@pytest.mark.parametrize("wrong", [0.1, float("inf"), float("nan")])
@pytest.mark.parametrize("figure", [field.name for field in dataclasses.fields(Compared)])
def test_each_figure_of_the_comparison_can_fail(record, replays, figure, wrong):
    comparison = dataclasses.replace(replays.comparison, **{figure: wrong})
    assert verdicts(record, replays, comparison=comparison)["4"] is False


def test_what_3b_shows_of_shards_is_said_with_it(record, replays):
    proofs = {proof.name: proof for proof in prove(record, replays.weights, initial(), 9.0, replays.comparison)}
    assert "twice" in proofs["3b"].remark
    assert "3a and 4" in proofs["3b"].remark


def test_proof_4_names_every_figure_and_no_contract(record, replays):
    proof = prove(record, replays.weights, initial(), 9.0, replays.comparison)[-1]
    names = [line.rpartition(", limit")[0].rpartition(" ")[0] for line in proof.measured.splitlines()]
    assert names == ["outputs", "gradients", "norm", "clip scale", "clipped", "SGD step", "AdamW step"]
    assert all(len(line) <= 31 for line in proof.measured.splitlines())  # a column of a terminal of 80
    assert "C-TP" not in proof.claim + proof.measured + proof.required


def test_one_worker_in_shards_is_not_called_all_ranks(record):
    settings = dataclasses.replace(SETTINGS, workers=1, micro_batches=1, transport=Transport.LOCAL)
    alone = train(settings, TEXTS, Silent())
    replays = replay_all(settings, TEXTS)
    proofs = prove(alone, replays.weights, initial(), 9.0, replays.comparison)
    assert proofs[0].claim.startswith("one set of weights on 1 rank after 6 steps, and one copy of norms")
    assert proofs[2].claim == "weights after 4 steps are those of one process with 1 micro-batch"


def test_without_shards_nothing_is_compared():
    replays = replay_all(IN_ONE_PIECE, TEXTS)
    assert replays.comparison is None
    assert set(replays.weights) == {"one", "reversed", "ranks"}


def test_a_worker_without_a_result_is_an_error_and_not_a_norm_of_0(monkeypatch):
    monkeypatch.setattr(worker.DistributedTrainer, "train_batch", lambda self, shard: 1.0)
    with pytest.raises(WindowError, match="the trainer has no result: got no step made"):
        worker.train_as_threads(SETTINGS, TEXTS, lambda report: None)


# ---- a shard that fails ----


def fail_as(monkeypatch, tp_rank, error, step=3, where="stream_backward"):
    """Have each worker's shard `tp_rank` fail in a step."""
    sound = getattr(Learner, where)
    begin = Learner.__init__

    def noting(self, settings, texts, rank, *others):
        self.tp_rank, self.calls = rank.tp_rank, 0
        begin(self, settings, texts, rank, *others)

    def failing(self, *arguments):
        self.calls += 1
        if self.tp_rank == tp_rank and self.calls == step:
            raise error
        return sound(self, *arguments)

    monkeypatch.setattr(Learner, "__init__", noting)
    monkeypatch.setattr(Learner, where, failing)


def demo_threads():
    return [thread for thread in threading.enumerate() if thread.name.endswith("(_do)")]


def ends_soon(work, error, message):
    begin = time.monotonic()
    with pytest.raises(error, match=message):
        work()
    assert time.monotonic() - begin < SOON
    for thread in demo_threads():
        thread.join(SOON)
    assert demo_threads() == []


@pytest.mark.parametrize("where", ["stream_backward", "forward_backward", "apply_gradients", "held_out_loss"])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_shard_that_fails_is_named_and_ends_all_others_at_once(monkeypatch, tp_rank, where):
    fail_as(
        monkeypatch, tp_rank, ZeroDivisionError("of the shard"), step=1 if where == "held_out_loss" else 3, where=where
    )
    work = partial(worker.train_as_threads, SETTINGS, TEXTS, lambda report: None)
    ends_soon(work, ZeroDivisionError, "of the shard")


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_shard_that_cannot_begin_ends_the_others_that_wait_for_it(monkeypatch, tp_rank):
    begin = Learner.__init__

    def failing(self, settings, texts, rank, *others):
        if rank.tp_rank == tp_rank:
            raise MemoryError("none left")
        begin(self, settings, texts, rank, *others)

    monkeypatch.setattr(Learner, "__init__", failing)
    work = partial(worker.train_as_threads, SETTINGS, TEXTS, lambda report: None)
    ends_soon(work, MemoryError, "none left")


def test_a_failed_shard_of_one_worker_ends_the_other_worker_over_tcp(monkeypatch):
    """Both workers here are threads of this process; rank 1's shard 1 fails."""
    doors = threading.Event()
    urls, failures = [], []

    def listening(report):
        if isinstance(report, Listening):
            urls.extend(report.urls)
            doors.set()

    def stepping(report):
        if isinstance(report, Stepped) and report.step == 3:
            raise ZeroDivisionError("of rank 1")

    def first():
        worker.train_as_rank_0(SETTINGS, TEXTS, [("127.0.0.1", 0)] * 2, "secret", listening)

    def second():
        assert doors.wait(SOON)
        worker.train_at(SETTINGS, TEXTS, 1, urls, "secret", stepping)

    begin = time.monotonic()
    failures = outcomes(lambda work: work(), [first, second])
    assert time.monotonic() - begin < SOON
    assert isinstance(failures[1], ZeroDivisionError)
    assert isinstance(failures[0], PeerLost)
    assert len(urls) == 2


def test_a_port_that_is_taken_is_said_before_any_door_is_named():
    reports = []
    with GradientServer(2) as blocking:
        port = blocking.address[1]
        addresses = [("127.0.0.1", 0), ("127.0.0.1", port)]
        with pytest.raises(CallerError, match=f"cannot listen at 127.0.0.1:{port}"):
            worker.train_as_rank_0(SETTINGS, TEXTS, addresses, "secret", reports.append)
    assert reports == []


def test_a_silent_worker_is_named_and_not_the_shards_that_wait_for_each_other(monkeypatch):
    """Shards wait longer for each other than workers do, so that it is the workers' deadline that passes."""
    exchanges = [worker.local_group(2, timeout=0.5) for _ in range(2)]
    awake = threading.Event()
    sound = worker._make_step

    def sleeping(settings, learner, trainer, step, say):
        if step == 3 and trainer.rank == 1 and say is worker._say_nothing:
            awake.wait(20)
        sound(settings, learner, trainer, step, say)

    monkeypatch.setattr(worker, "_make_step", sleeping)
    with pytest.raises(DeadlineExceeded, match=r"^rank 1 is late for .*rank 0 is waiting"):
        worker._train_all(SETTINGS, TEXTS, list(zip(*exchanges, strict=True)), lambda report: None)
    awake.set()


def test_reports_at_the_end_are_of_the_united_model(record):
    reports = []
    worker.train_as_threads(dataclasses.replace(SETTINGS, workers=1), TEXTS, reports.append)
    finished = reports[-1]
    assert isinstance(finished, Finished)
    assert {name: weight.shape for name, weight in finished.compared_weights.items()} == MODEL.weight_shapes
    assert finished.compared_digest == weights_digest(finished.compared_weights)
    assert len(finished.replicated) == 2


def test_a_run_that_ends_before_the_compared_steps_keeps_nothing():
    reports = []
    worker.train_as_threads(dataclasses.replace(SETTINGS, steps=2, compared_steps=4), TEXTS, reports.append)
    ends = [report for report in reports if isinstance(report, Finished)]
    assert [(end.compared_digest, end.compared_weights) for end in ends] == [(None, None)] * 2
