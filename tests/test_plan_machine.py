"""The exchange within one machine: copies counted by hand, its measured rates, and the script that checks it."""

import dataclasses
import math
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transports import HAS_SHARED_MEMORY

from gradengine.bench.workers import contribution
from gradengine.errors import CallerError, GradientError
from gradengine.kernels.host_threads import available_cpus
from gradengine.layout.cost import Bandwidth
from gradengine.plan import machine
from gradengine.plan.machine import TRANSPORTS, Rates, Sum, on_one_machine, overlap_on_one_machine, pairs
from gradengine.plan.models import Model, load_model
from gradengine.plan.prediction import Question, predict

RATES = Rates(cores=2, tcp=4e9, unix=8e9, sum=20e9, copy=10e9, shared_memory=5e9)
ELEMENTS = (1 << 20) + 32 * 1024  # two messages each way
HERE = Question(load_model("350m"), 3, machine=RATES)
PAIRS = ["tcp", "unix", *(["shared_memory"] if HAS_SHARED_MEMORY else [])]


def test_copies_and_sums_are_counted_as_the_code_makes_them():
    """10^9 bytes, 3 workers: 2 sets of parts and 2 of sums; 3 sets summed; in place 2 sets of sums; a server 3."""
    copies = {"tcp://": 4 / 4, "unix://": 4 / 8, "shared memory": 2 / 5, "threads": 2 / 10, "served": 6 / 4}
    for transport, seconds in copies.items():
        assert RATES.seconds(transport, 10**9, 3) == pytest.approx(seconds + 3 / 20)
        nbytes = HERE.model.layout().nbytes
        found = predict(dataclasses.replace(HERE, device="cpu")).exchanges[transport][1].seconds
        assert found == pytest.approx((seconds + 3 / 20) * nbytes / 1e9)


def test_more_cores_help_as_far_as_there_are_workers_and_a_server_is_one_process():
    for transport in TRANSPORTS:
        at = {cores: dataclasses.replace(RATES, cores=cores).seconds(transport, 10**9, 4) for cores in (2, 4, 16)}
        assert at[2] == pytest.approx(at[4] * (1 if transport == "served" else 2))
        assert at[4] == at[16]
    one = dataclasses.replace(RATES, cores=1)  # on which the sockets' rate was measured: nothing is scaled
    assert one.seconds("tcp://", 10**9, 2) == pytest.approx(2 / 4 + 2 / 20)


def test_bytes_are_those_that_a_rank_or_the_server_sends_and_in_place_what_one_copies():
    found = {name: on_one_machine(name, [3000], 3, RATES) for name in TRANSPORTS}
    links = {name: (each.busiest_link_bytes, each.total_bytes, each.messages) for name, each in found.items()}
    assert links == {
        "tcp://": (4000, 12000, 4), "unix://": (4000, 12000, 4), "served": (9000, 18000, 3),
        "shared memory": (2000, 6000, 8), "threads": (2000, 6000, 0),
    }  # fmt: skip
    spans = {name: on_one_machine(name, [1, 10**6], 3, RATES).span_seconds for name in TRANSPORTS}
    assert spans == {name: (RATES.seconds(name, 1, 3), RATES.seconds(name, 10**6, 3)) for name in TRANSPORTS}
    assert {on_one_machine(name, [1000], 1, RATES).seconds for name in TRANSPORTS} == {0.0}


def test_a_step_waits_for_the_engines_too():
    """10^9 bytes, 2 workers: each engine adds and clips, on a core of its own or on one for both."""
    traffic = on_one_machine("tcp://", [10**9], 2, RATES)
    for cores, shared in ((2, 1), (1, 2)):
        rates = dataclasses.replace(RATES, cores=cores)
        found = overlap_on_one_machine([1.0], 10.0, [10**9], traffic, 2, rates)
        assert found.exposed_seconds == pytest.approx(traffic.seconds + shared * (2 / 20 + 1 / 10))
        assert found.hidden_seconds == 0


def test_only_a_cpus_arenas_are_in_shared_memory_and_only_where_there_is_any():
    without = ["tcp://", "unix://", "threads", "served"]
    assert RATES.transports("cpu") == list(TRANSPORTS)
    assert RATES.transports("cuda") == dataclasses.replace(RATES, shared_memory=None).transports("cpu") == without
    assert predict(HERE).choice.transport == "unix://"
    assert predict(dataclasses.replace(HERE, device="cpu")).choice.transport == "shared memory"
    measured = dataclasses.replace(HERE, backward_seconds=60)  # on the cores that exchange it hides nothing
    assert predict(measured).exchanges["tcp://"][1].hidden_seconds > 0
    assert predict(dataclasses.replace(measured, device="cpu")).exchanges["tcp://"][1].hidden_seconds == 0


def test_what_cannot_be_asked_of_one_machine():
    for changes in ({"bandwidth": Bandwidth(1e9)}, {"machine": None}, {"tp": 2}):
        with pytest.raises(CallerError):
            dataclasses.replace(HERE, **changes)
    for name in ("cores", "tcp", "unix", "sum", "copy", "shared_memory"):
        for rate in (0, math.nan, math.inf, True, "4e9"):
            with pytest.raises(CallerError, match=f"'{name}'"):
                Rates(**{**vars(RATES), name: rate})


# ---- what is measured ----


@pytest.mark.parametrize("transport", PAIRS)
def test_each_of_a_pair_gets_what_the_other_has(tmp_path, transport):
    assert list(pairs(tmp_path, ELEMENTS)) == PAIRS
    with closing(pairs(tmp_path, ELEMENTS)[transport]()) as crew:
        crew.prepare()
        assert crew.error() > 1
        crew.run()
        assert crew.error() == 0


def test_the_owner_sums_its_own_and_the_others_parts_share_by_share_and_again():
    work = Sum(3 * machine._SHARE + 128)
    total = work.arena.copy()
    for _ in range(2):
        spent = work.run()
        total += contribution(1, total.size)
        np.testing.assert_array_equal(work.arena[: total.size], total)
        assert {name for name, seconds in spent.items() if seconds > 0} == {"sum", "copy"}


def test_medians_count_and_the_first_round_is_dropped(monkeypatch):
    class Fake:
        __init__ = close = lambda *_: None
        run = lambda _: dict.fromkeys(("sum", "copy"), 1.0)  # noqa: E731

    taken = iter([100.0, 100.0, 1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 100.0, 1.0, 2.0, 5.0])
    monkeypatch.setattr(machine, "pairs", lambda *_: {"tcp": Fake, "unix": Fake})
    monkeypatch.setattr(machine, "Sum", Fake)
    monkeypatch.setattr(machine, "_seconds", lambda work: (work(), next(taken))[1])
    rates = machine.measure_rates(elements=1000, rounds=3)
    assert rates == Rates(available_cpus(), tcp=8000 / 3.0, unix=8000 / 4.0, sum=8000.0, copy=4000.0)
    assert machine.measure_tflops(size=8, rounds=3) == pytest.approx(2 * 8**3 / 2.0 / 1e12)


# ---- measured/plan_check.py ----


def test_the_script_compares_runs_with_what_the_command_predicts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    monkeypatch.delitem(sys.modules, "plan_check", raising=False)
    import plan_check

    model = Model("tiny", "", 256, 4, 4, 4, 1024, 512)
    monkeypatch.setattr(plan_check, "span_layout", lambda _: model.layout())
    asked = Question(model, 3, machine=RATES, backward_seconds=0.01)
    here = predict(dataclasses.replace(asked, device="cpu")).exchanges
    assert plan_check.predicted_exchanges(RATES, 0, 3) == {name: pair[1].seconds for name, pair in here.items()}
    there = predict(asked).exchanges["tcp://"][1]  # whose backward is elsewhere
    assert plan_check.predicted_wait(RATES, 0, 3, 0.01) == there.exposed_seconds
    found = {"owner": {"sum": 0.25, "copy": 0.1}, "tcp": {"seconds": 1.0}, "unix": {"seconds": 0.5}}
    assert plan_check.rates(found, 10) == Rates(available_cpus(), tcp=80.0, unix=160.0, sum=320.0, copy=400.0)
    with pytest.raises(GradientError, match="'ours'"):
        plan_check.refuse_wrong("ours", SimpleNamespace(prepare=list, run=list, error=lambda: math.nan))
