"""What a machine is measured by: that the work is done which is timed, and what its seconds make."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.bench.crew import ProcessCrew
from gradengine.kernels.host import available_cpus
from gradengine.plan import measure
from gradengine.plan.measure import Sum, measure_rates, pairs, rates_of

ELEMENTS = 32 * 1024


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_each_of_a_pair_gets_what_the_other_has(tmp_path, transport):
    crew = pairs(tmp_path, ELEMENTS)[transport]()
    try:
        assert isinstance(crew, ProcessCrew)
        crew.prepare()
        assert crew.error() > 1
        crew.run()
        assert crew.error() == 0
    finally:
        crew.close()


def test_the_sum_is_looked_at_added_and_copied(monkeypatch):
    looked = []
    monkeypatch.setattr(measure, "find_non_finite", lambda rank, part, start: looked.append((rank, part.size, start)))
    work = Sum(measure._PIECE + 100)
    before = work._total.copy()
    spent = work.run()
    assert looked == [(1, measure._PIECE, 0), (1, 100, measure._PIECE)]
    assert set(spent) == {"check", "add", "copy"}
    assert min(spent.values()) > 0
    np.testing.assert_array_equal(work._total, before + work._part)
    np.testing.assert_array_equal(work._copy, work._total)


SECONDS = {"tcp": 1.0, "unix": 0.5, "check": 0.25, "add": 0.2, "copy": 0.1}


def test_rates_are_bytes_by_seconds_and_a_pair_sends_both_ways():
    rates = rates_of(SECONDS, 10**6)
    assert (rates.tcp, rates.unix) == (8e6, 16e6)
    assert (rates.check, rates.add, rates.copy) == (16e6, 20e6, 40e6)
    assert rates.cores == available_cpus()


@given(st.integers(1, 1 << 40), st.floats(1e-6, 1e3))
def test_rates_are_proportional_to_what_was_sent(elements, scale):
    found = rates_of({name: scale * seconds for name, seconds in SECONDS.items()}, elements)
    assert found.tcp == pytest.approx(8 * elements / scale)
    assert found.copy == pytest.approx(40 * elements / scale)


def test_this_machine_is_measured():
    """Only that it can be: a rate below a megabyte a second would be a fault of the measurement."""
    rates = measure_rates(elements=ELEMENTS, rounds=2)
    assert min(rates.tcp, rates.unix, rates.check, rates.add, rates.copy) > 1e6
    assert rates.cores >= 1


def test_the_median_of_rounds_counts_and_the_first_is_dropped(monkeypatch):
    class Crew:
        def run(self): ...
        def close(self): ...

    class Summed:
        def __init__(self, _): ...
        def run(self):
            return dict.fromkeys(("check", "add", "copy"), 1.0)

    taken = iter([100.0, 100.0, 1.0, 2.0, 5.0, 6.0, 3.0, 4.0])
    monkeypatch.setattr(measure, "pairs", lambda *_: {"tcp": Crew, "unix": Crew})
    monkeypatch.setattr(measure, "Sum", Summed)
    monkeypatch.setattr(measure, "_seconds", lambda _: next(taken))
    rates = measure_rates(elements=1000, rounds=3)
    assert (rates.tcp, rates.unix) == (8000 / 3.0, 8000 / 4.0)
