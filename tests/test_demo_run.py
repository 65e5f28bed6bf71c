"""The demo's runs, replays, proofs that can fail, and plot."""

import dataclasses
import os
import signal
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.demo import run
from gradengine.demo.comparison import distance
from gradengine.demo.model import LlamaConfig
from gradengine.demo.plot import drawn
from gradengine.demo.proofs import prove
from gradengine.demo.record import Evaluated, Finished, Record, Step, Stepped
from gradengine.demo.run import train
from gradengine.demo.settings import Settings, Transport, divide
from gradengine.demo.text import standard_library_text
from gradengine.demo.worker import Learner, layout_of, replay
from gradengine.errors import CallerError, DeadlineExceeded
from gradengine.processes import ProcessPool
from gradengine.trainer import weights_digest

MODEL = LlamaConfig(num_blocks=1, hidden_size=16, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(steps=6, batch_size=2, compared_steps=4, evaluations=2, model=MODEL)
TEXTS = divide(standard_library_text(100_000), "the standard library", MODEL.sequence_length)


PATIENCE = 100.0  # seconds in which an interpreter starts, however busy the machine is
DEADLINE = 0.5  # seconds without a report, once it has started

# ---- training ----


class Silent:
    def started(self, processes):
        self.processes = processes

    def listening(self, url):
        self.url = url

    def stepped(self, step):
        pass


@pytest.fixture(scope="module")
def record():
    return train(SETTINGS, TEXTS, Silent())


def test_a_run_reports_every_step_and_evaluation(record):
    assert [step.number for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert sorted(record.evaluations) == [3, 6]
    assert record.steps[0].loss == pytest.approx(np.log(256), rel=0.05)
    assert all(step.norm > 0 and step.exchange_seconds > 0 for step in record.steps)


def test_all_ranks_end_with_the_same_bytes(record):
    assert set(record.digests) == {0, 1}
    assert len(set(record.digests.values())) == 1
    assert len(set(record.kept_digests.values())) == 1


@pytest.mark.parametrize("transport", [Transport.UNIX, Transport.LOCAL])
def test_every_transport_gives_the_same_bytes(record, transport):
    other = train(dataclasses.replace(SETTINGS, transport=transport), TEXTS, Silent())
    assert other.digests == record.digests
    assert [(step.loss, step.norm) for step in other.steps] == [(step.loss, step.norm) for step in record.steps]


def test_stopped_ranks_that_are_threads_end_the_run_too(monkeypatch):
    pools = []

    class Watched(ProcessPool):
        def __init__(self, **options):
            super().__init__(PATIENCE, **options)
            pools.append(self)

    class Stopping(Silent):
        def stepped(self, step):
            if step.number == 2:
                os.kill(self.processes["all ranks"], signal.SIGSTOP)
                pools[0]._deadline = DEADLINE

    monkeypatch.setattr(run, "ProcessPool", Watched)
    settings = dataclasses.replace(SETTINGS, transport=Transport.LOCAL, steps=10_000)
    with pytest.raises(DeadlineExceeded, match=r"^all ranks \(process \d+\) reported nothing"):
        train(settings, TEXTS, Stopping())


def test_a_stopped_replay_ends_the_replays(monkeypatch):
    class Stopping(ProcessPool):
        def start(self, name):
            worker = super().start(name)
            if name == "the replay 'one'":
                os.kill(worker.process.pid, signal.SIGSTOP)
            return worker

        def reports(self):
            for count, report in enumerate(super().reports(), 1):
                yield report
                if count == 2:  # the other two are done
                    self._deadline = DEADLINE

    monkeypatch.setattr(run, "ProcessPool", partial(Stopping, PATIENCE))
    with pytest.raises(DeadlineExceeded, match=r"^the replay 'one' \(process \d+\) reported nothing"):
        run.replay_all(SETTINGS, TEXTS)


# ---- replays and proofs ----


def small(workers, micro_batches, **changes):
    return dataclasses.replace(SETTINGS, workers=workers, micro_batches=micro_batches, **changes)


def initial():
    return Learner(SETTINGS, TEXTS).weights


@pytest.mark.parametrize("workers", [2, 3])
def test_one_micro_batch_for_each_worker_is_one_process_bit_for_bit(workers):
    settings = small(workers, 1)
    assert weights_digest(replay(settings, TEXTS, workers)) == weights_digest(replay(settings, TEXTS, 1))


def test_several_micro_batches_for_each_worker_are_one_process_up_to_rounding():
    settings = small(2, 2)
    ranks, one = replay(settings, TEXTS, 2), replay(settings, TEXTS, 1)
    assert 0 < distance(ranks, one, initial()) < 1e-5


def replays_of(settings):
    return {
        "one": replay(settings, TEXTS, 1),
        "reversed": replay(settings, TEXTS, 1, backwards=True),
        "ranks": replay(settings, TEXTS, settings.workers),
    }


def verdicts(record, replays, entropy=9.0):
    return {proof.name: proof.holds for proof in prove(record, replays, initial(), entropy)}


def test_a_right_run_is_proved(record):
    assert verdicts(record, replays_of(SETTINGS)) == {"1": True, "2": True, "3a": True, "3b": True}


def test_weights_that_differ_between_ranks_are_found(record):
    wrong = dataclasses.replace(record, digests={0: "a", 1: "b"})
    assert verdicts(wrong, replays_of(SETTINGS))["1"] is False
    missing = dataclasses.replace(record, digests={0: "a"})
    assert verdicts(missing, replays_of(SETTINGS))["1"] is False


def test_a_model_that_learned_nothing_is_found(record):
    assert verdicts(record, replays_of(SETTINGS), entropy=1.0)["2"] is False


def test_a_run_too_short_to_learn_is_told_what_would_do(record):
    short = prove(record, replays_of(SETTINGS), initial(), entropy=1.0)[1]
    assert short.required.endswith(": 6 steps may be too few, pass --steps 60 or more")
    learned = prove(record, replays_of(SETTINGS), initial(), entropy=9.0)[1]
    assert learned.required == "must be below 9.000, the bytes' entropy"
    long = Record(dataclasses.replace(SETTINGS, steps=60), evaluations={60: 5.0}, kept=initial())
    replays = dict.fromkeys(("one", "reversed", "ranks"), initial())
    assert prove(long, replays, initial(), entropy=1.0)[1].required == "must be below 1.000, the bytes' entropy"


def test_one_of_a_thing_is_not_called_all():
    settings = small(1, 1, steps=1, compared_steps=1)
    weights = replay(settings, TEXTS, 1)
    record = Record(settings, [Step(1, 5.0, 1.0, 0.1)], {1: 5.0}, {0: "a"}, kept_digests={0: "a"}, kept=weights)
    claims = [proof.claim for proof in prove(record, {"one": weights}, initial(), 9.0)]
    assert claims[0] == "one set of weights on 1 rank after 1 step"
    assert claims[2] == "weights after 1 step are those of one process with 1 micro-batch, bit for bit"


def test_weights_that_never_moved_are_no_measure():
    weights = initial()
    moved = {name: weight + np.float32(1) for name, weight in weights.items()}
    assert distance(weights, weights, weights) == distance(moved, weights, weights) == float("inf")
    record = Record(SETTINGS, evaluations={6: 5.0}, digests={0: "a", 1: "a"}, kept=weights)
    near = prove(record, dict.fromkeys(("one", "reversed", "ranks"), weights), weights, 9.0)[2]
    assert (near.name, near.holds) == ("3a", False)
    assert near.measured == "the weights of one process have not moved"


@pytest.mark.parametrize("component", ["blocks.0.w_q", "blocks.0.up", "embedding"])
@pytest.mark.parametrize("which", ["kept", "one", "reversed"])
def test_nan_anywhere_in_the_weights_fails_proof_3a(record, which, component):
    replays = replays_of(SETTINGS) | {"kept": record.kept}
    spoilt = {name: weight.copy() for name, weight in replays[which].items()}
    spoilt[component][0, 0] = np.nan
    replays[which] = spoilt
    kept = replays.pop("kept")
    assert verdicts(dataclasses.replace(record, kept=kept), replays)["3a"] is False


def test_a_lost_micro_batch_is_found(record):
    replays = replays_of(SETTINGS) | {"one": replay(small(1, 3), TEXTS, 1)}
    assert verdicts(record, replays)["3a"] is False


def test_a_single_other_bit_is_found(record):
    replays = replays_of(SETTINGS)
    replays["ranks"]["final_norm"][0] = np.nextafter(replays["ranks"]["final_norm"][0], np.float32(2))
    assert verdicts(record, replays)["3b"] is False


def test_with_one_micro_batch_each_the_bits_are_compared():
    settings = small(2, 1)
    weights = replay(settings, TEXTS, 2)
    record = Record(settings, evaluations={settings.steps: 1.0}, digests={0: "a", 1: "a"}, kept=weights)
    assert verdicts(record, {"one": weights}) == {"1": False, "2": True, "3": True}  # nobody reported what was kept
    record.kept_digests = {0: "a", 1: "a"}
    assert all(verdicts(record, {"one": weights}).values())


# ---- the record and the settings ----


def test_a_step_is_complete_when_all_ranks_have_made_it():
    record = Record(SETTINGS)
    assert record.take(Stepped(0, 1, 2.0, 0.5, 0.1)) is None
    assert record.take(Stepped(0, 2, 1.5, 0.4, 0.1)) is None
    assert record.take(Stepped(1, 1, 2.0, 0.5, 0.3)) == Step(1, 2.0, 0.5, pytest.approx(0.2))
    assert len(record.steps) == 1


def test_the_record_keeps_rank_0s_weights():
    record, weights = Record(SETTINGS), {"w": np.ones(1, np.float32)}
    ends = [Finished(1, "e", (), "d"), Finished(0, "e", (), "d", weights), Finished(2, "e")]
    for report in (Evaluated(6, 2.5), *ends):
        record.take(report)
    assert record.kept is weights
    assert (record.kept_digests, record.evaluations) == ({1: "d", 0: "d"}, {6: 2.5})
    assert record.digests == {0: "e", 1: "e", 2: "e"}


@given(steps=st.integers(1, 500), evaluations=st.integers(1, 20))
def test_the_last_step_is_always_evaluated(steps, evaluations):
    settings = Settings(steps=steps, evaluations=evaluations)
    evaluated = [step for step in range(1, steps + 1) if settings.is_evaluated(step)]
    assert evaluated[-1] == steps
    assert len(evaluated) == min(steps, evaluations)


def test_a_text_too_short_for_the_sequences_is_refused():
    with pytest.raises(CallerError, match="more than --sequence-length=2000"):
        divide(bytes(10_000), "a file", 2000)


def test_the_layout_leaves_in_the_order_of_backward():
    streamed = [key for key, _ in Learner(SETTINGS, TEXTS).stream_backward(0)[1]]
    assert [span.key for span in layout_of(SETTINGS).spans] == streamed


# ---- the plot ----


@pytest.mark.parametrize("steps", [1, 400])
def test_the_plot_is_an_image(tmp_path, steps):
    record = Record(dataclasses.replace(SETTINGS, steps=steps), evaluations={steps: 2.0})
    record.steps = [Step(number, 5.0 / number, 1.0, 0.001) for number in range(1, steps + 1)]
    path = tmp_path / "loss.png"
    drawn(record, 3.0).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
