"""Work that takes long says so, and work that does not says nothing."""

import dataclasses
import itertools
from functools import partial

import pytest

from gradengine.demo import worker
from gradengine.demo.model import LlamaConfig
from gradengine.demo.record import Heartbeat, Replayed, Stepped
from gradengine.demo.settings import Settings, divide
from gradengine.demo.text import standard_library_text
from gradengine.demo.worker import replay, report_replay, train_as_threads, with_heartbeat

MODEL = LlamaConfig(num_blocks=1, hidden_size=16, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(steps=3, batch_size=2, compared_steps=3, model=MODEL)
TEXTS = divide(standard_library_text(50_000), "the standard library", MODEL.sequence_length)


def ticking(monkeypatch, seconds):
    """A clock that is read once for each item, and once more for each report."""
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(worker, "monotonic", lambda: next(clock))


def test_all_items_come_in_order():
    assert list(with_heartbeat(iter("abc"), print)) == ["a", "b", "c"]


def test_nothing_gives_nothing():
    reports = []
    assert list(with_heartbeat([], reports.append)) == []
    assert reports == []


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, 0), (0.25, 1), (1.0, 5)])
def test_a_report_comes_no_more_than_once_a_second(monkeypatch, seconds, expected):
    reports = []
    ticking(monkeypatch, seconds)
    assert list(with_heartbeat(range(5), reports.append)) == [0, 1, 2, 3, 4]
    assert reports == [Heartbeat()] * expected


def test_what_comes_late_is_reported_before_it_is_worked_on(monkeypatch):
    reports = []
    ticking(monkeypatch, 2.0)
    items = with_heartbeat([1, 2], reports.append)
    assert reports == []
    next(items)
    assert reports == [Heartbeat()]


def test_a_slow_replay_reports_between_its_micro_batches(monkeypatch):
    monkeypatch.setattr(worker, "_HEARTBEAT_SECONDS", 0.0)
    reports = []
    report_replay("one", partial(replay, SETTINGS, TEXTS, 1), reports.append)
    assert isinstance(reports[-1], Replayed)
    assert reports[:-1] == [Heartbeat()] * (3 + 3 * SETTINGS.micro_batches_in_all)  # each step, and each micro-batch


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_slow_step_of_the_workers_reports_too(monkeypatch, tp_size):
    monkeypatch.setattr(worker, "_HEARTBEAT_SECONDS", 0.0)
    reports = []
    train_as_threads(dataclasses.replace(SETTINGS, workers=1, tensor_parallel=tp_size), TEXTS, reports.append)
    steps = [report for report in reports if isinstance(report, (Heartbeat, Stepped))]
    assert sum(report == Heartbeat() for report in steps) == 3 * SETTINGS.micro_batches
    assert steps[0] == Heartbeat()
