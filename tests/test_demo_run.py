"""The demo's runs and replays, whole and in shards, proofs that can fail, and the plot."""

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.demo import run, worker
from gradengine.demo.model import LlamaConfig, initial_weights
from gradengine.demo.proofs import distance, prove
from gradengine.demo.run import Record, train
from gradengine.demo.settings import Settings
from gradengine.demo.shards import TensorParallelRank, run_threads, tensor_parallel_group
from gradengine.demo.text import Texts, split, standard_library_text
from gradengine.demo.worker import Finished, Learner, Step, layout_of, replay, train_as_threads
from gradengine.engine.trainer import weights_digest
from gradengine.errors import CallerError, ExchangeError, PeerLost
from gradengine.exchange import GradientServer, local_group

ROOT = Path(__file__).parent.parent
MODEL = LlamaConfig(num_blocks=1, hidden_size=16, num_kv_heads=4, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(steps=6, batch_size=2, compared_steps=4, evaluations=2, model=MODEL)
TEXTS = Texts(*split(standard_library_text(100_000)), "the standard library")
SECRET = "a secret of all ranks"
INITIAL = initial_weights(MODEL, SETTINGS.seed)
PATIENCE = 100.0  # seconds in which an interpreter starts, however busy the machine is


def silent(name, what):
    pass


def ignored(report):
    pass


def asking(**changes):
    return dataclasses.replace(SETTINGS, **changes)


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "in-shards"])
def record(request):
    """A run of two processes over TCP."""
    return train(asking(tensor_parallel=request.param), TEXTS, silent)


@pytest.fixture(scope="module")
def replays(record):
    return replays_of(record.settings)


def replay_of(settings, **changes):
    """The weights at the end of a replay."""
    reports = []
    replay("it", dataclasses.replace(settings, is_replay=True, **changes), TEXTS, reports.append)
    ((name, weights),) = filter(None, reports)
    assert name == "it"
    return weights


def one_process(settings):
    return replay_of(settings, workers=1, micro_batches=settings.micro_batches_in_all, tensor_parallel=1)


def replays_of(settings):
    return {"one": one_process(settings), "ranks": replay_of(settings)}


# ---- training ----


def same(run, other):
    figures = [
        (
            {rank: end.digest for rank, end in each.ends.items()},
            [(step.loss, step.norm) for step in each.steps],
            each.evaluations,
            weights_digest(each.ends[0].compared),
        )
        for each in (run, other)
    ]
    return figures[0] == figures[1]


def test_a_run_reports_every_step_and_evaluation_and_all_ranks_end_alike(record):
    assert [step.number for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert sorted(record.evaluations) == [3, 6]
    assert record.steps[0].loss == pytest.approx(np.log(256), rel=0.05)
    assert all(step.norm > 0 and step.exchange_seconds >= 0 for step in record.steps)
    assert set(record.ends) == {0, 1}
    assert len({end.digest for end in record.ends.values()}) == 1
    assert {name: weight.shape for name, weight in record.ends[0].compared.items()} == MODEL.weight_shapes
    assert record.ends[1].compared == {}


def test_ranks_that_were_launched_give_the_same_bytes_and_rank_0_is_told_how_each_ended(record):
    """Threads take the place of processes here."""
    if record.settings.tensor_parallel > 1:
        return
    first, second = local_group(2)
    launched, _ = run_threads(
        [
            partial(train, SETTINGS, TEXTS, silent, first),
            partial(worker.train_launched, SETTINGS, TEXTS, second, ignored),
        ]
    )
    assert same(launched, record)
    for exchange in (first, second):
        with pytest.raises(PeerLost, match="left the group"):
            exchange.barrier()


def test_a_program_begins_anew_where_numpy_was_loaded_without_the_environment():
    script = "import os, sys; print(os.getpid(), *sys.argv[1:])\n"
    script += "from gradengine.demo.run import ENVIRONMENT, begin_anew; begin_anew()\n"
    script += "assert ENVIRONMENT.items() <= os.environ.items() and 'numpy' in sys.modules; print('goes on')"
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | run.ENVIRONMENT | {"OMP_NUM_THREADS": "4"}
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", script, "an", "argument"], env=environment, stdout=subprocess.PIPE, text=True
    )
    output, _ = process.communicate(timeout=PATIENCE)
    assert output == f"{process.pid} an argument\n" * 2 + "goes on\n"


# ---- replays and proofs ----


def test_one_micro_batch_for_each_worker_is_one_process_bit_for_bit():
    settings = asking(workers=3, micro_batches=1)
    assert weights_digest(replay_of(settings)) == weights_digest(one_process(settings))


def test_a_replay_adds_whole_micro_batches(monkeypatch):
    monkeypatch.setattr(Learner, "stream_backward", lambda learner, index: pytest.fail("it streams"))
    assert replay_of(SETTINGS).keys() == MODEL.weight_shapes.keys()


def test_weights_are_those_after_the_compared_steps():
    """They are the end of a run that ends there."""
    reports = []
    train_as_threads(asking(steps=4), TEXTS, reports.append)
    assert reports[0] is None  # each forward is a sign of life: a long step is not taken for a process that hangs
    assert reports.count(None) == 4 * SETTINGS.micro_batches_in_all + SETTINGS.evaluations * 24
    end = next(report for report in reports if isinstance(report, Finished))
    assert end.digest == weights_digest(end.compared)


def verdicts(record, replays, entropy=9.0):
    return {proof.name: proof.holds for proof in prove(record, replays, INITIAL, entropy)}


def ended(record, rank=0, **changes):
    """The record, whose rank ended otherwise."""
    return dataclasses.replace(record, ends=record.ends | {rank: dataclasses.replace(record.ends[rank], **changes)})


def with_weight(replays, name, component, value):
    """The replays, one of which has another value in one weight."""
    weights = {key: weight.copy() for key, weight in replays[name].items()}
    weights[component].reshape(-1)[0] = value
    return replays | {name: weights}


def made_up(settings, weights):
    """The record of a run of which only the end counts."""
    steps = [Step(settings.steps, 5.0, 1.0, 0.1, 5.0)]
    return Record(settings, steps, {rank: Finished(rank, "a", weights) for rank in range(settings.workers)})


def test_a_right_run_is_proved_and_each_proof_can_fail(record, replays):
    found = verdicts(record, replays)
    assert found == dict.fromkeys(("1", "2", "3a", "3b"), True)

    def fails(name, wrong=record, others=replays, **more):
        return verdicts(wrong, others, **more) == found | {name: False}

    assert fails("1", ended(record, 1, digest="b"))
    assert fails("1", dataclasses.replace(record, ends={0: record.ends[0]}))
    assert fails("2", entropy=1.0)
    hints = ["--steps 60" in prove(record, replays, INITIAL, entropy)[1].required for entropy in (1.0, 9.0)]
    assert hints == [True, False]
    fewer = one_process(dataclasses.replace(record.settings, workers=3, micro_batches=1))
    assert fails("3a", others=replays | {"one": fewer})
    assert fails("3a", others=with_weight(replays, "one", "blocks.0.up", np.nan))
    norm = replays["ranks"]["final_norm"][0]
    assert fails("3b", others=with_weight(replays, "ranks", "final_norm", np.nextafter(norm, np.float32(2))))


def test_with_one_micro_batch_each_the_bits_are_compared():
    settings = asking(micro_batches=1)
    replayed = replays_of(settings)
    record = made_up(settings, replayed["one"])
    assert verdicts(record, replayed) == {"1": True, "2": True, "3": True}
    assert verdicts(record, with_weight(replayed, "one", "final_norm", 9))["3"] is False


def test_weights_that_never_moved_are_no_measure():
    moved = {name: weight + np.float32(1) for name, weight in INITIAL.items()}
    assert distance(INITIAL, INITIAL, INITIAL) == distance(moved, INITIAL, INITIAL) == float("inf")
    near = prove(made_up(SETTINGS, INITIAL), dict.fromkeys(("one", "ranks"), INITIAL), INITIAL, 9.0)[2]
    assert (near.name, near.holds) == ("3a", False)


@pytest.mark.parametrize("position", range(4))
def test_a_wrong_all_reduce_is_refused_or_fails_a_proof(monkeypatch, position):
    """One of the block's four: forward attention, feed-forward, then both backward."""
    settings = asking(workers=1, micro_batches=1, tensor_parallel=2)
    one, whole, counts, outcome = one_process(settings), TensorParallelRank.all_reduce, {}, []

    def some(self, partial):
        count = counts[id(self)] = counts.get(id(self), -1) + 1
        return (outcome[0] if count % 4 == position else whole)(self, partial)

    monkeypatch.setattr(TensorParallelRank, "all_reduce", some)
    outcome[:] = [lambda self, partial: partial]
    with pytest.raises(ExchangeError, match="is not the same on ranks 0 and 1"):
        replay_of(settings)
    counts.clear()
    outcome[:] = [lambda self, partial: 2 * whole(self, partial)]  # by all shards alike
    wrong = replay_of(settings)
    assert verdicts(made_up(settings, wrong), {"one": one, "ranks": wrong})["3a"] is False


# ---- a shard that fails ----


@pytest.mark.parametrize("where", ["__init__", "stream_backward", "apply_gradients", "held_out_loss"])
def test_a_shard_that_fails_is_named_and_ends_all_others(monkeypatch, where):
    sound, begin = getattr(Learner, where), Learner.__init__

    def noting(self, settings, texts, tp, report):
        self.tp_rank = tp.tp_rank
        begin(self, settings, texts, tp, report)

    def failing(self, *arguments):
        if (arguments[2] if where == "__init__" else self).tp_rank == 1:
            raise ZeroDivisionError("of the shard")
        return sound(self, *arguments)

    monkeypatch.setattr(Learner, "__init__", noting)
    monkeypatch.setattr(Learner, where, failing)
    with pytest.raises(ZeroDivisionError, match="of the shard"):
        train_as_threads(asking(tensor_parallel=2), TEXTS, ignored)


def test_a_port_that_is_taken_is_said_before_any_door_is_named():
    reports = []
    with GradientServer(2) as blocking:
        port = blocking.address[1]
        urls = ["tcp://127.0.0.1:0", f"tcp://127.0.0.1:{port}"]
        with pytest.raises(CallerError, match=f"cannot listen at 127.0.0.1:{port}"):
            worker.train_at(asking(tensor_parallel=2), TEXTS, 0, urls, SECRET, reports.append)
    assert reports == []


# ---- the settings, the learner and the plot ----


@given(step=st.integers(1, 1000), micro_batches=st.integers(1, 16), workers=st.integers(1, 20))
def test_workers_share_the_micro_batches_of_a_step(step, micro_batches, workers):
    settings = Settings(workers=workers, micro_batches=micro_batches)
    shares = [list(settings.share(step, rank)) for rank in range(workers)]
    count = workers * micro_batches
    assert sorted(index for share in shares for index in share) == list(range((step - 1) * count, step * count))
    assert {len(share) for share in shares} == {micro_batches}
    assert all(share == sorted(share) for share in shares)


@given(steps=st.integers(1, 500), evaluations=st.integers(1, 20))
def test_the_last_step_is_always_evaluated(steps, evaluations):
    settings = Settings(steps=steps, evaluations=evaluations)
    evaluated = [step for step in range(1, steps + 1) if settings.is_evaluated(step)]
    assert (evaluated[-1], len(evaluated)) == (steps, min(steps, evaluations))


def test_the_layout_leaves_in_the_order_of_backward():
    learner = Learner(SETTINGS, TEXTS, tensor_parallel_group(1)[0], ignored)
    streamed = [key for key, _ in learner.stream_backward(0)[1]]
    assert [span.key for span in layout_of(SETTINGS, 0).spans] == streamed
    assert all(np.array_equal(weight, INITIAL[name]) for name, weight in learner.weights.items())
