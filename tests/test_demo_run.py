"""The demo's runs and replays, whole and in shards, proofs that can fail, and the plot."""

import dataclasses
import os
import re
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
from gradengine.demo.proofs import LIMITS, distance, prove, shards_are_whole
from gradengine.demo.run import Record, train
from gradengine.demo.settings import Settings, Transport
from gradengine.demo.shards import TensorParallelRank, run_threads, tensor_parallel_group
from gradengine.demo.text import Texts, split, standard_library_text
from gradengine.demo.worker import Finished, Learner, Step, layout_of, replay, train_as_threads
from gradengine.engine import GradientEngine
from gradengine.engine.trainer import weights_digest
from gradengine.errors import CallerError, ExchangeError, PeerLost, WindowError
from gradengine.exchange import GradientServer, local_group

ROOT = Path(__file__).parent.parent
MODEL = LlamaConfig(num_blocks=1, hidden_size=16, num_kv_heads=4, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(steps=6, batch_size=2, compared_steps=4, evaluations=2, model=MODEL)
TEXTS = Texts(*split(standard_library_text(100_000)), "the standard library")
TOKEN = "a secret of all ranks"
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
    """The first step of a replay, and its end."""
    reports = []
    replay("it", dataclasses.replace(settings, is_replay=True, **changes), TEXTS, reports.append)
    assert [report[0] for report in reports if report is not None] == ["it"]
    return next(found for _, found in filter(None, reports))


def one_process(settings, **changes):
    whole = {"workers": 1, "micro_batches": settings.micro_batches_in_all, "tensor_parallel": 1}
    return replay_of(settings, **whole, **changes)


def replays_of(settings):
    one, backwards = one_process(settings), one_process(settings, backwards=True)
    return {"one": one, "reversed": backwards, "ranks": replay_of(settings)}


# ---- training ----


def same(run, other):
    figures = [
        (
            {rank: (end.digest, end.replicated) for rank, end in each.ends.items()},
            [(step.loss, step.norm, step.scale) for step in each.steps],
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
    assert all(step.norm > 0 and step.exchange_seconds > 0 for step in record.steps)
    assert set(record.ends) == {0, 1}
    assert len({(end.digest, *set(end.replicated)) for end in record.ends.values()}) == 1
    assert {len(end.replicated) for end in record.ends.values()} == {record.settings.tensor_parallel}
    assert {name: weight.shape for name, weight in record.ends[0].compared.items()} == MODEL.weight_shapes
    assert record.ends[1].compared == {}


@pytest.mark.parametrize("transport", [Transport.UNIX, Transport.LOCAL])
def test_every_transport_gives_the_same_bytes(record, transport):
    said = []
    settings = dataclasses.replace(record.settings, transport=transport)
    assert same(train(settings, TEXTS, lambda name, what: said.append(what)), record)
    urls = set(re.findall(r"unix://[^, ]+", " ".join(said)))
    assert len(urls) == (settings.tensor_parallel if transport is Transport.UNIX else 0)


def test_ports_follow_each_other():
    assert run._urls(asking(tensor_parallel=2, port=8000), "") == ["tcp://127.0.0.1:8000", "tcp://127.0.0.1:8001"]
    assert run._urls(asking(tensor_parallel=2), "") == ["tcp://127.0.0.1:0"] * 2


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
    ends = {rank: dataclasses.replace(end, replicated=()) for rank, end in record.ends.items()}
    launched.ends[0] = dataclasses.replace(launched.ends[0], replicated=())
    assert same(launched, dataclasses.replace(record, ends=ends))
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
    weights = replay_of(settings)[1].compared
    assert weights_digest(weights) == weights_digest(one_process(settings)[1].compared)


def test_a_replay_adds_whole_micro_batches(monkeypatch):
    monkeypatch.setattr(Learner, "stream_backward", lambda learner, index: pytest.fail("it streams"))
    assert replay_of(SETTINGS)[1].compared.keys() == MODEL.weight_shapes.keys()


def test_weights_are_those_after_the_compared_steps_and_gradients_those_of_the_first():
    """Compared is the end of a run that ends there; and the first step is the same one however many follow."""
    reports = []
    train_as_threads(asking(steps=4), TEXTS, reports.append)
    assert reports[0] is None  # each forward is a sign of life: a long step is not taken for a process that hangs
    assert reports.count(None) == 4 * SETTINGS.micro_batches_in_all + SETTINGS.evaluations * 24
    end = next(report for report in reports if isinstance(report, Finished))
    assert end.digest == weights_digest(end.compared)
    ends = [replay_of(SETTINGS, compared_steps=steps)[1] for steps in (1, 4)]
    assert weights_digest(ends[0].first) == weights_digest(ends[1].first)
    assert weights_digest(ends[0].compared) != weights_digest(ends[1].compared)


def test_backwards_is_the_same_up_to_rounding_even_of_one_micro_batch():
    """What 3a measures with is not 0 where there is no order of micro-batches."""
    settings = asking(workers=1, micro_batches=1)
    forth, back = (replay_of(settings, backwards=backwards)[1].compared for backwards in (False, True))
    assert 0 < distance(back, forth, INITIAL) < 1e-5


def verdicts(record, replays, entropy=9.0):
    return {proof.name: proof.holds for proof in prove(record, replays, INITIAL, entropy)}


def ended(record, rank=0, **changes):
    """The record, whose rank ended otherwise."""
    return dataclasses.replace(record, ends=record.ends | {rank: dataclasses.replace(record.ends[rank], **changes)})


def with_weights(found, name, component, value):
    """The replays, one of which has another value in one weight."""
    step, end = found[name]
    weights = {key: weight.copy() for key, weight in end.compared.items()}
    weights[component].reshape(-1)[0] = value
    return found | {name: (step, dataclasses.replace(end, compared=weights))}


def made_up(settings, weights):
    """The record of a run of which only the end counts."""
    steps = [Step(settings.steps, 5.0, 1.0, 1.0, 0.1, 5.0)]
    return Record(settings, steps, {rank: Finished(rank, "a", (), weights, {}) for rank in range(settings.workers)})


def test_a_right_run_is_proved_and_each_proof_can_fail(record, replays):
    found = verdicts(record, replays)
    names = ["1", "2", "3a", "3b", *(["4"] if record.settings.tensor_parallel > 1 else [])]
    assert found == dict.fromkeys(names, True)

    def fails(name, wrong=record, others=replays, **more):
        return verdicts(wrong, others, **more) == found | {name: False}

    assert fails("1", ended(record, 1, digest="b"))
    assert fails("1", dataclasses.replace(record, ends={0: record.ends[0]}))
    assert fails("2", entropy=1.0)
    assert ["--steps 60" in prove(record, replays, INITIAL, entropy)[1].required for entropy in (1.0, 9.0)] == [
        True,
        False,
    ]
    fewer = one_process(dataclasses.replace(record.settings, workers=3, micro_batches=1))
    lost = replays["one"][0], dataclasses.replace(fewer[1], first=replays["one"][1].first)
    assert fails("3a", others=replays | {"one": lost})
    norm = replays["ranks"][1].compared["final_norm"][0]
    assert fails("3b", others=with_weights(replays, "ranks", "final_norm", np.nextafter(norm, np.float32(2))))
    for name in ("one", "reversed"):
        assert fails("3a", others=with_weights(replays, name, "blocks.0.up", np.nan))
    if record.settings.tensor_parallel > 1:
        own = record.ends[0].replicated[0]
        for wrong in ((own, "b"), (own,), ()):
            assert fails("1", ended(record, 1, replicated=wrong))
        step, end = replays["ranks"]
        for wrong in (1.1, np.inf, np.nan):
            for figure in ("loss", "norm", "scale"):
                changed = dataclasses.replace(step, **{figure: getattr(step, figure) * wrong})
                assert fails("4", others=replays | {"ranks": (changed, end)})
            first = end.first | {"final_norm": end.first["final_norm"] * wrong}
            assert fails("4", others=replays | {"ranks": (step, dataclasses.replace(end, first=first))})


def test_with_one_micro_batch_each_the_bits_are_compared():
    settings = asking(micro_batches=1)
    replayed = {"one": replay_of(settings)}
    record = made_up(settings, replayed["one"][1].compared)
    assert verdicts(record, replayed) == {"1": True, "2": True, "3": True}
    assert verdicts(record, with_weights(replayed, "one", "final_norm", 9))["3"] is False


def test_weights_that_never_moved_are_no_measure():
    moved = {name: weight + np.float32(1) for name, weight in INITIAL.items()}
    assert distance(INITIAL, INITIAL, INITIAL) == distance(moved, INITIAL, INITIAL) == float("inf")
    replays = dict.fromkeys(("one", "reversed", "ranks"), (None, Finished(0, "", (), INITIAL, {})))
    near = prove(made_up(SETTINGS, INITIAL), replays, INITIAL, 9.0)[2]
    assert (near.name, near.holds) == ("3a", False)
    assert "not moved" in near.measured


# ---- proof 4: shards against the model in one piece ----

CLIPPED = asking(workers=1, micro_batches=1, compared_steps=1, max_norm=0.01)  # of the first gradient


def figures(tp_size, **changes):
    settings = dataclasses.replace(CLIPPED, **changes)
    found = shards_are_whole(replay_of(settings, tensor_parallel=tp_size), replay_of(settings))
    apart = re.findall(r"^(\w+) (\S+), limit", found.measured, re.MULTILINE)
    assert [name for name, _ in apart] == list(LIMITS)
    assert found.holds == all(float(figure) <= LIMITS[name] for name, figure in apart)
    return {name: float(figure) for name, figure in apart}, found.holds


@pytest.mark.parametrize("length", [16, 1])
def test_shards_are_the_model_in_one_piece_within_the_limits(length):
    """With one byte in a sequence the gradients of w_q and w_k are nothing but rounding."""
    model = dataclasses.replace(MODEL, sequence_length=length)
    for tp_size, seed in ((2, 0), (2, 1), (4, 2)):
        found, holds = figures(tp_size, model=model, seed=seed)
        assert holds
        assert found["gradients"] > 0
    assert figures(1, model=model) == (dict.fromkeys(LIMITS, 0.0), True)


def with_figures(result, **changes):
    decided = result._decided
    decision = dataclasses.replace(decided.decision, **changes)
    return dataclasses.replace(result, _decided=dataclasses.replace(decided, decision=decision))


def multiplied(result, factor, component=""):
    gradients = {
        name: gradient * np.float32(factor if name.endswith(component) else 1)
        for name, gradient in result.gradients.items()
    }
    return dataclasses.replace(result, _arrays=gradients)


WRONG = {  # what engines of shards may do wrong -> the figures that show it
    "not clipped": (lambda tp_rank, result: multiplied(result, 1 / result.scale), {"gradients"}),
    "one shard": (lambda tp_rank, result: multiplied(result, 1 + 6 * tp_rank), {"gradients"}),
    "one forgotten": (lambda tp_rank, result: multiplied(result, 0, "w_k"), {"gradients"}),
    "one not a number": (lambda tp_rank, result: multiplied(result, np.nan if tp_rank else 1, "up"), {"gradients"}),
    "scale": (lambda tp_rank, result: with_figures(result, scales=(result.scale * (1 + 1e-5),)), {"scale"}),
    "norm": (lambda tp_rank, result: with_figures(result, norm=result.norm * (1 + 1e-5)), {"norm"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_an_engine_of_shards_gets_wrong_fails_proof_4(monkeypatch, name):
    sound, (change, shown) = GradientEngine.step, WRONG[name]

    def step(self, *arguments, **options):
        result = sound(self, *arguments, **options)
        return change(self.layout.tp_rank, result) if self.layout.tp_size > 1 else result

    monkeypatch.setattr(GradientEngine, "step", step)
    found, holds = figures(2)
    assert not holds
    assert {name for name, value in found.items() if not value <= LIMITS[name]} == shown


@pytest.mark.parametrize("position", range(4))
def test_a_wrong_all_reduce_is_refused_or_in_the_figures(monkeypatch, position):
    """One of the block's four: forward attention, feed-forward, then both backward."""
    whole, counts, outcome = TensorParallelRank.all_reduce, {}, []

    def some(self, partial):
        count = counts[id(self)] = counts.get(id(self), -1) + 1
        is_it = self.exchange is not None and count % 4 == position
        return outcome[0](self, partial) if is_it else whole(self, partial)

    monkeypatch.setattr(TensorParallelRank, "all_reduce", some)
    outcome[:] = [lambda self, partial: partial]
    with pytest.raises(ExchangeError, match="is not the same on ranks 0 and 1"):
        figures(2)
    counts.clear()
    outcome[:] = [lambda self, partial: 2 * whole(self, partial)]  # by all shards alike
    found, _ = figures(2)
    assert (found["loss"] > 10 * LIMITS["loss"]) == (position < 2)
    assert found["gradients"] > 1000 * LIMITS["gradients"]


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
            worker.train_at(asking(tensor_parallel=2), TEXTS, 0, urls, TOKEN, reports.append)
    assert reports == []


def test_a_worker_without_a_result_is_an_error_and_not_a_norm_of_0(monkeypatch):
    monkeypatch.setattr(worker.DistributedTrainer, "train_batch", lambda self, shard: 1.0)
    with pytest.raises(WindowError, match="no result"):
        train_as_threads(SETTINGS, TEXTS, ignored)


# ---- the settings, the learner and the plot ----


@given(step=st.integers(1, 1000), micro_batches=st.integers(1, 16), workers=st.integers(1, 20), turned=st.booleans())
def test_workers_share_the_micro_batches_of_a_step(step, micro_batches, workers, turned):
    settings = Settings(workers=workers, micro_batches=micro_batches, backwards=turned)
    shares = [list(settings.share(step, rank)) for rank in range(workers)]
    count = workers * micro_batches
    assert sorted(index for share in shares for index in share) == list(range((step - 1) * count, step * count))
    assert {len(share) for share in shares} == {micro_batches}
    assert all(share == sorted(share, reverse=turned) for share in shares)


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
