"""The demo's runs, replays, proofs that can fail, and plot."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.demo import run
from gradengine.demo.model import LlamaConfig, initial_weights
from gradengine.demo.plot import drawn
from gradengine.demo.proofs import distance, prove
from gradengine.demo.run import Record, train
from gradengine.demo.settings import Settings, Transport
from gradengine.demo.shards import run_threads, tensor_parallel_group
from gradengine.demo.text import Texts, split, standard_library_text
from gradengine.demo.worker import Finished, Learner, Step, layout_of, replay, train_as_threads, train_launched
from gradengine.errors import DeadlineExceeded, PeerLost
from gradengine.exchange import local_group
from gradengine.processes import ProcessPool
from gradengine.trainer import weights_digest

ROOT = Path(__file__).parent.parent
MODEL = LlamaConfig(num_blocks=1, hidden_size=16, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(steps=6, batch_size=2, compared_steps=4, evaluations=2, model=MODEL)
TEXTS = Texts(*split(standard_library_text(100_000)), "the standard library")


PATIENCE = 100.0  # seconds in which an interpreter starts, however busy the machine is
DEADLINE = 0.5  # seconds without a report, once it has started

# ---- training ----


def silent(name, what):
    pass


@pytest.fixture(scope="module")
def record():
    return train(SETTINGS, TEXTS, silent)


def test_a_run_reports_every_step_and_evaluation(record):
    assert [step.number for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert sorted(record.evaluations) == [3, 6]
    assert record.steps[0].loss == pytest.approx(np.log(256), rel=0.05)
    assert all(step.norm > 0 and step.exchange_seconds > 0 for step in record.steps)


def test_all_ranks_end_with_the_same_bytes(record):
    assert set(record.ends) == {0, 1}
    assert len({end.digest for end in record.ends.values()}) == 1
    assert record.ends[0].compared.keys() == MODEL.weight_shapes.keys()
    assert record.ends[1].compared == {}


@pytest.mark.parametrize("transport", [Transport.UNIX, Transport.LOCAL])
def test_every_transport_gives_the_same_bytes(record, transport):
    other = train(dataclasses.replace(SETTINGS, transport=transport), TEXTS, silent)
    assert digests_of(other) == digests_of(record)
    assert [(step.loss, step.norm) for step in other.steps] == [(step.loss, step.norm) for step in record.steps]


def digests_of(record):
    return {rank: end.digest for rank, end in record.ends.items()}


def test_ranks_that_were_launched_give_the_same_bytes_and_rank_0_is_told_how_each_ended(record):
    """Threads take the place of processes here."""
    first, second = local_group(2)
    told = []
    works = [
        partial(train, SETTINGS, TEXTS, silent, first),
        partial(train_launched, SETTINGS, TEXTS, second, told.append),
    ]
    launched, _ = run_threads(works)
    assert digests_of(launched) == digests_of(record)
    assert {report.rank: report.digest for report in told if isinstance(report, Finished)} == digests_of(record)
    assert [(step.loss, step.norm) for step in launched.steps] == [(step.loss, step.norm) for step in record.steps]
    assert weights_digest(launched.ends[0].compared) == weights_digest(record.ends[0].compared)
    assert launched.ends[1].compared == {}
    for exchange in (first, second):
        with pytest.raises(PeerLost, match="left the group"):
            exchange.barrier()


@pytest.mark.parametrize("missing", [None, "OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_"])
def test_a_program_begins_anew_where_numpy_was_loaded_without_the_environment(missing):
    script = "import os, sys; print(os.getpid(), *sys.argv[1:])\n"
    script += "from gradengine.demo.run import ENVIRONMENT, begin_anew; begin_anew()\n"
    script += "assert ENVIRONMENT.items() <= os.environ.items() and 'numpy' in sys.modules; print('goes on')"
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | run.ENVIRONMENT
    if missing:
        environment[missing] = "4"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", script, "an", "argument"], env=environment, stdout=subprocess.PIPE, text=True
    )
    output, _ = process.communicate(timeout=PATIENCE)
    assert output == f"{process.pid} an argument\n" * (2 if missing else 1) + "goes on\n"


def test_stopped_ranks_that_are_threads_end_the_run_too(monkeypatch):
    pools, processes = [], []

    class Watched(ProcessPool):
        def __init__(self, **options):
            super().__init__(PATIENCE, **options)
            pools.append(self)

    def stopping(name, what):
        processes.extend(re.findall(r"all ranks: process (\d+)", what))
        if name == "    100":
            os.kill(int(processes[0]), signal.SIGSTOP)
            pools[0]._deadline = DEADLINE

    monkeypatch.setattr(run, "ProcessPool", Watched)
    settings = dataclasses.replace(SETTINGS, transport=Transport.LOCAL, steps=2000)
    with pytest.raises(DeadlineExceeded, match=r"^all ranks \(process \d+\) reported nothing"):
        train(settings, TEXTS, stopping)


def test_a_stopped_replay_ends_the_replays(monkeypatch):
    class Stopping(ProcessPool):
        def start(self, name):
            worker = super().start(name)
            if name == "the replay 'one'":
                os.kill(worker.process.pid, signal.SIGSTOP)
            return worker

        def reports(self):
            count = 0
            for report in super().reports():
                yield report
                count += report is not None
                if count == 2:  # the other two are done
                    self._deadline = DEADLINE

    monkeypatch.setattr(run, "ProcessPool", partial(Stopping, PATIENCE))
    with pytest.raises(DeadlineExceeded, match=r"^the replay 'one' \(process \d+\) reported nothing"):
        run.replay_all(SETTINGS, TEXTS)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_each_forward_is_a_sign_of_life(tp_size):
    """So that a step that takes long is not taken for a process that hangs."""
    reports = []
    model = dataclasses.replace(MODEL, num_kv_heads=4)
    train_as_threads(dataclasses.replace(SETTINGS, tensor_parallel=tp_size, model=model), TEXTS, reports.append)
    assert reports[0] is None
    forwards = SETTINGS.steps * SETTINGS.micro_batches_in_all + SETTINGS.evaluations * 24
    assert reports.count(None) == tp_size * forwards


# ---- replays and proofs ----


def small(workers, micro_batches, **changes):
    return dataclasses.replace(SETTINGS, workers=workers, micro_batches=micro_batches, **changes)


def initial():
    return initial_weights(MODEL, SETTINGS.seed)


def replay_of(settings, **changes):
    """The first step of a replay, and its end."""
    reports = []
    replay("it", dataclasses.replace(settings, is_replay=True, **changes), TEXTS, reports.append)
    assert [report[0] for report in reports if report is not None] == ["it"]
    return next(found for _, found in filter(None, reports))


def replayed(settings, **changes):
    """Its weights after the compared steps."""
    return replay_of(settings, **changes)[1].compared


def one_process(settings, **changes):
    return replayed(settings, workers=1, micro_batches=settings.micro_batches_in_all, **changes)


@pytest.mark.parametrize("workers", [2, 3])
def test_one_micro_batch_for_each_worker_is_one_process_bit_for_bit(workers):
    settings = small(workers, 1)
    assert weights_digest(replayed(settings)) == weights_digest(one_process(settings))


def test_several_micro_batches_for_each_worker_are_one_process_up_to_rounding():
    assert 0 < distance(replayed(SETTINGS), one_process(SETTINGS), initial()) < 1e-5


def test_a_replay_adds_whole_micro_batches(monkeypatch):
    monkeypatch.setattr(Learner, "stream_backward", lambda learner, index: pytest.fail("it streams"))
    assert replayed(SETTINGS).keys() == MODEL.weight_shapes.keys()


def test_weights_are_those_after_the_compared_steps_and_gradients_those_of_the_first():
    """Compared is the end of a run that ends there; and the first step is the same one however many follow."""
    reports = []
    train_as_threads(dataclasses.replace(SETTINGS, steps=4), TEXTS, reports.append)
    end = next(report for report in reports if isinstance(report, Finished))
    assert end.digest == weights_digest(end.compared)
    ends = [replay_of(SETTINGS, compared_steps=steps)[1] for steps in (1, 4)]
    assert weights_digest(ends[0].first) == weights_digest(ends[1].first)
    assert weights_digest(ends[0].compared) != weights_digest(ends[1].compared)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_backwards_is_the_same_up_to_rounding_even_of_one_micro_batch(micro_batches):
    """What 3a measures with is not 0 where there is no order of micro-batches."""
    settings = small(1, micro_batches)
    assert 0 < distance(replayed(settings, backwards=True), replayed(settings), initial()) < 1e-5


def replays_of(settings):
    return {
        "one": one_process(settings),
        "reversed": one_process(settings, backwards=True),
        "ranks": replayed(settings),
    }


def verdicts(record, replays, entropy=9.0):
    return {proof.name: proof.holds for proof in prove(record, ends_of(replays), initial(), entropy)}


def ends_of(weights):
    return {name: (None, Finished(0, "", (), compared, {})) for name, compared in weights.items()}


def ended(record, rank=0, **changes):
    """The record, whose rank ended otherwise."""
    return dataclasses.replace(record, ends=record.ends | {rank: dataclasses.replace(record.ends[rank], **changes)})


def made_up(settings, weights, evaluations=None):
    """The record of a run of which only the end counts."""
    losses = {settings.steps: 5.0} if evaluations is None else evaluations
    steps = [Step(number, 5.0, 1.0, 1.0, 0.1, loss) for number, loss in losses.items()]
    return Record(settings, steps, {rank: Finished(rank, "a", (), weights, {}) for rank in range(settings.workers)})


def test_a_right_run_is_proved(record):
    assert verdicts(record, replays_of(SETTINGS)) == {"1": True, "2": True, "3a": True, "3b": True}


def test_weights_that_differ_between_ranks_are_found(record):
    missing = dataclasses.replace(record, ends={0: record.ends[0]})
    for wrong in (ended(record, 1, digest="b"), missing):
        assert verdicts(wrong, replays_of(SETTINGS))["1"] is False


def test_a_model_that_learned_nothing_is_found(record):
    assert verdicts(record, replays_of(SETTINGS), entropy=1.0)["2"] is False


def test_a_run_too_short_to_learn_is_told_what_would_do(record):
    short = prove(record, ends_of(replays_of(SETTINGS)), initial(), entropy=1.0)[1]
    assert short.required.endswith(": 6 steps may be too few, pass --steps 60 or more")
    learned = prove(record, ends_of(replays_of(SETTINGS)), initial(), entropy=9.0)[1]
    assert learned.required == "must be below 9.000, the bytes' entropy"
    long = made_up(dataclasses.replace(SETTINGS, steps=60), initial())
    replays = dict.fromkeys(("one", "reversed", "ranks"), initial())
    assert (
        prove(long, ends_of(replays), initial(), entropy=1.0)[1].required == "must be below 1.000, the bytes' entropy"
    )


def test_one_of_a_thing_is_not_called_all():
    settings = small(1, 1, steps=1, compared_steps=1)
    weights = replayed(settings)
    claims = [proof.claim for proof in prove(made_up(settings, weights), ends_of({"one": weights}), initial(), 9.0)]
    assert claims[0] == "one set of weights on 1 worker after 1 step"
    assert claims[2] == "weights after 1 step are those of one process with 1 micro-batch, bit for bit"


def test_weights_that_never_moved_are_no_measure():
    weights = initial()
    moved = {name: weight + np.float32(1) for name, weight in weights.items()}
    assert distance(weights, weights, weights) == distance(moved, weights, weights) == float("inf")
    replays = ends_of(dict.fromkeys(("one", "reversed", "ranks"), weights))
    near = prove(made_up(SETTINGS, weights), replays, weights, 9.0)[2]
    assert (near.name, near.holds) == ("3a", False)
    assert near.measured == "the weights of one process have not moved"


@pytest.mark.parametrize("component", ["blocks.0.w_q", "blocks.0.up", "embedding"])
@pytest.mark.parametrize("which", ["kept", "one", "reversed"])
def test_nan_anywhere_in_the_weights_fails_proof_3a(record, which, component):
    replays = replays_of(SETTINGS) | {"kept": record.ends[0].compared}
    spoilt = {name: weight.copy() for name, weight in replays[which].items()}
    spoilt[component][0, 0] = np.nan
    replays[which] = spoilt
    kept = replays.pop("kept")
    assert verdicts(ended(record, compared=kept), replays)["3a"] is False


def test_a_lost_micro_batch_is_found(record):
    replays = replays_of(SETTINGS) | {"one": replayed(small(1, 3))}
    assert verdicts(record, replays)["3a"] is False


def test_a_single_other_bit_is_found(record):
    replays = replays_of(SETTINGS)
    replays["ranks"]["final_norm"][0] = np.nextafter(replays["ranks"]["final_norm"][0], np.float32(2))
    assert verdicts(record, replays)["3b"] is False


def test_with_one_micro_batch_each_the_bits_are_compared():
    settings = small(2, 1)
    weights = replayed(settings)
    assert verdicts(made_up(settings, weights), {"one": weights}) == {"1": True, "2": True, "3": True}
    other = weights | {"final_norm": weights["final_norm"] + np.float32(1e-6)}
    assert verdicts(made_up(settings, weights), {"one": other})["3"] is False


# ---- the settings and the learner ----


@given(step=st.integers(1, 1000), micro_batches=st.integers(1, 16), workers=st.integers(1, 20), turned=st.booleans())
def test_workers_share_the_micro_batches_of_a_step(step, micro_batches, workers, turned):
    settings = Settings(workers=workers, micro_batches=micro_batches, backwards=turned)
    taken = [index for rank in range(workers) for index in settings.share(step, rank)]
    count = workers * micro_batches
    assert sorted(taken) == list(range((step - 1) * count, step * count))
    assert {len(settings.share(step, rank)) for rank in range(workers)} == {micro_batches}
    assert all(
        list(settings.share(step, rank)) == sorted(settings.share(step, rank), reverse=turned) for rank in (0, 1)
    )


@given(steps=st.integers(1, 500), evaluations=st.integers(1, 20))
def test_the_last_step_is_always_evaluated(steps, evaluations):
    settings = Settings(steps=steps, evaluations=evaluations)
    evaluated = [step for step in range(1, steps + 1) if settings.is_evaluated(step)]
    assert evaluated[-1] == steps
    assert len(evaluated) == min(steps, evaluations)


def test_the_layout_leaves_in_the_order_of_backward():
    learner = Learner(SETTINGS, TEXTS, tensor_parallel_group(1)[0], lambda _: None)
    streamed = [key for key, _ in learner.stream_backward(0)[1]]
    assert [span.key for span in layout_of(SETTINGS, 0).spans] == streamed
    assert all(np.array_equal(weight, initial()[name]) for name, weight in learner.weights.items())


# ---- the plot ----


@pytest.mark.parametrize("steps", [1, 400])
def test_the_plot_is_an_image(tmp_path, steps):
    losses = [5.0 / number for number in range(1, steps + 1)]
    record = Record(dataclasses.replace(SETTINGS, steps=steps))
    record.steps = [Step(i, loss, 1.0, 1.0, 0.001, loss if i == steps else None) for i, loss in enumerate(losses, 1)]
    path = tmp_path / "loss.png"
    drawn(record, 3.0).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
