"""The demo in shards: runs, their proofs, and how a worker ends when one of its shards fails."""

import dataclasses
import re
import threading
import time
from functools import partial

import numpy as np
import pytest
from test_demo_run import TEXTS, ended, replayed, silent
from transports import SOON, outcomes

from gradengine.demo import worker
from gradengine.demo.model import LlamaConfig, initial_weights
from gradengine.demo.proofs import LIMITS, prove
from gradengine.demo.run import replay_all, train
from gradengine.demo.settings import Settings, Transport
from gradengine.demo.worker import Learner, Listening
from gradengine.errors import CallerError, DeadlineExceeded, PeerLost, WindowError
from gradengine.exchange import GradientServer, local_group
from gradengine.exchange.linked import Exchange
from gradengine.trainer import weights_digest

MODEL = LlamaConfig(num_blocks=1, hidden_size=16, num_kv_heads=4, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(steps=6, tensor_parallel=2, batch_size=2, compared_steps=4, evaluations=2, model=MODEL)
IN_ONE_PIECE = dataclasses.replace(SETTINGS, tensor_parallel=1)


@pytest.fixture(scope="module")
def record():
    return train(SETTINGS, TEXTS, silent)


@pytest.fixture(scope="module")
def replays():
    return replay_all(SETTINGS, TEXTS)


def initial():
    return initial_weights(MODEL, SETTINGS.seed)


def urls_of(said):
    return re.findall(r"(?:tcp|unix)://[^, ]+", " ".join(said))


# ---- training ----


def test_each_step_and_evaluation_is_reported_once(record):
    assert [step.number for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert sorted(record.evaluations) == [3, 6]
    assert all(step.norm > 0 and step.exchange_seconds > 0 for step in record.steps)


def test_all_ranks_hold_the_same_bytes_and_all_shards_the_same_replicas(record):
    assert set(record.ends) == {0, 1}
    assert len({(end.digest, end.replicated) for end in record.ends.values()}) == 1
    first, second = record.ends[0].replicated
    assert first == second
    assert {name: weight.shape for name, weight in record.ends[0].compared.items()} == MODEL.weight_shapes


@pytest.mark.parametrize("transport", [Transport.UNIX, Transport.LOCAL])
def test_every_transport_gives_the_same_bytes(record, transport):
    said = []
    settings = dataclasses.replace(SETTINGS, transport=transport)
    other = train(settings, TEXTS, lambda name, what: said.append(what))
    for rank, end in other.ends.items():
        assert (end.digest, end.replicated) == (record.ends[rank].digest, record.ends[rank].replicated)
    assert [(step.loss, step.norm) for step in other.steps] == [(step.loss, step.norm) for step in record.steps]
    assert len(set(urls_of(said))) == (2 if transport is Transport.UNIX else 0)


def test_losses_and_norms_are_those_of_the_model_in_one_piece(record):
    whole = train(dataclasses.replace(IN_ONE_PIECE, transport=Transport.LOCAL), TEXTS, silent)
    for step, expected in zip(record.steps, whole.steps, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=1e-5)
        assert step.norm == pytest.approx(expected.norm, rel=1e-3 if step.number > 1 else 1e-6)
    assert record.evaluations == pytest.approx(whole.evaluations, rel=1e-5)


def test_ports_follow_each_other_where_one_was_chosen():
    said, again = [], []
    short = dataclasses.replace(SETTINGS, steps=1, compared_steps=1)
    train(short, TEXTS, lambda name, what: said.append(what))
    port = int(urls_of(said)[0].rpartition(":")[2])
    train(dataclasses.replace(short, port=port), TEXTS, lambda name, what: again.append(what))
    assert [int(url.rpartition(":")[2]) for url in urls_of(again)] == [port, port + 1]


# ---- proofs ----


def verdicts(record, replays, entropy=9.0):
    return {proof.name: proof.holds for proof in prove(record, replays, initial(), entropy)}


@pytest.mark.parametrize(("workers", "micro_batches", "tp_size"), [(1, 1, 2), (1, 2, 4), (2, 1, 2), (3, 2, 4)])
def test_a_run_of_any_shape_is_proved(workers, micro_batches, tp_size):
    changes = {"workers": workers, "micro_batches": micro_batches, "tensor_parallel": tp_size}
    settings = dataclasses.replace(SETTINGS, transport=Transport.LOCAL, **changes)
    found = verdicts(train(settings, TEXTS, silent), replay_all(settings, TEXTS))
    assert found == {"1": True, "2": True, "3a": True, "3b": True, "4": True}


def test_replicas_that_differ_between_shards_are_found(record, replays):
    assert verdicts(record, replays)["1"] is True
    same = record.ends[0].replicated[0]
    for wrong in ((same, "b"), (same,), ()):
        assert verdicts(ended(record, 1, replicated=wrong), replays)["1"] is False


def with_weights(found, weights):
    step, end = found
    return step, dataclasses.replace(end, compared=weights)


def test_a_lost_micro_batch_is_found(record, replays):
    fewer = replayed(dataclasses.replace(IN_ONE_PIECE, workers=1, micro_batches=3))
    assert verdicts(record, replays | {"one": with_weights(replays["one"], fewer)})["3a"] is False


def test_a_single_other_bit_is_found(record, replays):
    weights = {name: array.copy() for name, array in replays["ranks"][1].compared.items()}
    weights["final_norm"][0] = np.nextafter(weights["final_norm"][0], np.float32(2))
    assert verdicts(record, replays | {"ranks": with_weights(replays["ranks"], weights)})["3b"] is False


def test_the_bits_are_those_of_the_shards_and_not_of_the_model_in_one_piece(replays):
    assert weights_digest(replayed(IN_ONE_PIECE)) != weights_digest(replays["ranks"][1].compared)


@pytest.mark.parametrize("wrong", [0.1, float("inf"), float("nan")])
@pytest.mark.parametrize("figure", LIMITS)
def test_each_figure_of_the_first_step_can_fail(record, replays, figure, wrong):
    step, end = replays["ranks"]
    if figure == "gradients":
        end = dataclasses.replace(end, first=end.first | {"final_norm": end.first["final_norm"] * (1 + wrong)})
    else:
        step = dataclasses.replace(step, **{figure: getattr(step, figure) * (1 + wrong)})
    assert verdicts(record, replays | {"ranks": (step, end)})["4"] is False


def test_what_the_proofs_show_of_shards_is_said_with_them(record, replays):
    first, *_, same_code, whole = prove(record, replays, initial(), 9.0)
    assert "on 2 workers" in first.claim
    assert first.claim.endswith(" in all 4 shards")
    assert "twice" in same_code.remark
    assert "3a and 4" in same_code.remark
    assert [line.rpartition(", limit")[0].rpartition(" ")[0] for line in whole.measured.splitlines()] == list(LIMITS)
    assert all(len(line) <= 31 for line in whole.measured.splitlines())  # a column of a terminal of 80


def test_one_worker_in_shards_is_not_called_all_ranks():
    settings = dataclasses.replace(SETTINGS, workers=1, micro_batches=1, transport=Transport.LOCAL)
    proofs = prove(train(settings, TEXTS, silent), replay_all(settings, TEXTS), initial(), 9.0)
    assert proofs[0].claim.startswith("one set of weights on 1 worker after 6 steps, and one copy of norms")
    assert proofs[0].claim.endswith(" in all 2 shards")
    assert proofs[2].claim == "weights after 4 steps are those of one process with 1 micro-batch"


def test_a_worker_without_a_result_is_an_error_and_not_a_norm_of_0(monkeypatch):
    monkeypatch.setattr(worker.DistributedTrainer, "train_batch", lambda self, shard: 1.0)
    with pytest.raises(WindowError, match="the trainer has no result: got no step made"):
        worker.train_as_threads(SETTINGS, TEXTS, lambda report: None)


# ---- a shard that fails ----


def fail_as(monkeypatch, tp_rank, error, step=3, where="stream_backward"):
    """Have each worker's shard `tp_rank` fail in a step."""
    sound = getattr(Learner, where)
    begin = Learner.__init__

    def noting(self, settings, texts, tp, report):
        self.tp_rank, self.calls = tp.tp_rank, 0
        begin(self, settings, texts, tp, report)

    def failing(self, *arguments):
        self.calls += 1
        if self.tp_rank == tp_rank and self.calls == step:
            raise error
        return sound(self, *arguments)

    monkeypatch.setattr(Learner, "__init__", noting)
    monkeypatch.setattr(Learner, where, failing)


def ends_soon(work, error, message):
    begin = time.monotonic()
    with pytest.raises(error, match=message):
        work()
    assert time.monotonic() - begin < SOON


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

    def failing(self, settings, texts, tp, report):
        if tp.tp_rank == tp_rank:
            raise MemoryError("none left")
        begin(self, settings, texts, tp, report)

    monkeypatch.setattr(Learner, "__init__", failing)
    work = partial(worker.train_as_threads, SETTINGS, TEXTS, lambda report: None)
    ends_soon(work, MemoryError, "none left")


def test_a_failed_shard_of_one_worker_ends_the_other_worker_over_tcp(monkeypatch):
    """Both workers here are threads of this process; rank 1's shard 1 fails."""
    doors = threading.Event()
    urls, forwards = [], []

    def listening(report):
        if isinstance(report, Listening):
            urls.extend(report.urls)
            doors.set()

    def stepping(report):
        forwards.append(report)
        if len(forwards) == 9:  # of two shards
            raise ZeroDivisionError("of rank 1")

    def first():
        worker.train_at(SETTINGS, TEXTS, 0, ["tcp://127.0.0.1:0"] * 2, "a secret of all ranks", listening)

    def second():
        assert doors.wait(SOON)
        worker.train_at(SETTINGS, TEXTS, 1, urls, "a secret of all ranks", stepping)

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
        urls = ["tcp://127.0.0.1:0", f"tcp://127.0.0.1:{port}"]
        with pytest.raises(CallerError, match=f"cannot listen at 127.0.0.1:{port}"):
            worker.train_at(SETTINGS, TEXTS, 0, urls, "a secret of all ranks", reports.append)
    assert reports == []


def test_a_silent_worker_is_named_and_not_the_shards_that_wait_for_each_other(monkeypatch):
    """Shards wait longer for each other than workers do, so that it is the workers' deadline that passes."""
    sound, now = worker.DistributedTrainer.train_batch, [0.0, 0.0]  # the clock, and what it goes by at each look

    def silent_at_two(self, shard):
        if (self.rank, self.engine.layout.tp_rank, self.step) == (1, 1, 2):
            now[1] = 10 * SOON
            while exchanges[1][0]._failure is None:  # within the test's own time
                threading.Event().wait(0.01)
        return sound(self, shard)

    def clock():
        now[0] += now[1]
        return now[0]

    monkeypatch.setattr(worker.DistributedTrainer, "train_batch", silent_at_two)
    exchanges = [local_group(2, timeout=SOON, join_timeout=SOON) for _ in range(2)]
    exchanges[1][0] = Exchange(exchanges[1][0]._link, timeout=SOON, clock=clock)  # of the second shard's group
    with pytest.raises(DeadlineExceeded, match=r"^rank 1 is late.* rank 0 waits"):
        worker._train(SETTINGS, TEXTS, list(zip(*exchanges, strict=True)), lambda report: None)
