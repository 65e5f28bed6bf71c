"""The exchange within one machine: copies counted by hand, and the rates that it is measured by."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.bench.workers import Crew
from gradengine.errors import CallerError
from gradengine.kernels.host_threads import available_cpus
from gradengine.plan import machine
from gradengine.plan.machine import (
    TRANSPORTS,
    Rates,
    Sum,
    measure_rates,
    on_one_machine,
    overlap_on_one_machine,
    pairs,
    rates_of,
)
from gradengine.plan.traffic import Network, star
from gradengine.tensor_parallel_cost import Bandwidth

RATES = Rates(cores=2, tcp=4e9, unix=8e9, check=20e9, add=20e9, copy=10e9)


def test_copies_are_counted_as_the_code_makes_them():
    """10^9 bytes, 3 workers: 4 transfers; a check of 3 contributions, 2 additions; threads make 2 copies."""
    assert RATES.seconds("tcp://", 10**9, 3) == pytest.approx(4 / 4 + 3 / 20 + 2 / 20)
    assert RATES.seconds("unix://", 10**9, 3) == pytest.approx(4 / 8 + 5 / 20)
    assert RATES.seconds("threads", 10**9, 3) == pytest.approx(5 / 20 + 2 / 10)


def test_more_cores_help_as_far_as_there_are_threads():
    at = [Rates(cores, 4e9, 8e9, 20e9, 20e9, 10e9).seconds("tcp://", 10**9, 2) for cores in (4, 16)]
    assert at[0] == at[1]
    assert Rates(8, 4e9, 8e9, 20e9, 20e9, 10e9).seconds("tcp://", 10**9, 3) < Rates(
        4, 4e9, 8e9, 20e9, 20e9, 10e9
    ).seconds("tcp://", 10**9, 3)


@given(st.integers(2, 64), st.integers(1, 1 << 40))
def test_every_worker_more_takes_longer_and_time_is_proportional_to_bytes(world, nbytes):
    for transport in TRANSPORTS:
        assert RATES.seconds(transport, nbytes, world) < RATES.seconds(transport, nbytes, world + 1)
        twice = RATES.seconds(transport, 2 * nbytes, world)
        assert twice == pytest.approx(2 * RATES.seconds(transport, nbytes, world))


def test_the_sum_looks_at_every_contribution_and_adds_all_but_the_first():
    assert RATES.sum_seconds(10**9, 4) == pytest.approx(4 / 20 + 3 / 20)


def test_one_core_takes_as_long_as_it_was_measured_to_take():
    """The sockets' rate was measured on the same core, so that nothing is scaled."""
    one = Rates(1, 4e9, 8e9, 20e9, 20e9, 10e9)
    assert one.seconds("tcp://", 10**9, 2) == pytest.approx(2 / 4 + 3 / 20)


@given(st.floats(1e8, 1e11), st.floats(1e8, 1e11))
def test_faster_sockets_never_take_longer(one, other):
    slow, fast = sorted((one, other))
    found = [Rates(2, rate, rate, 20e9, 20e9, 10e9) for rate in (slow, fast)]
    assert found[1].seconds("tcp://", 10**8, 3) <= found[0].seconds("tcp://", 10**8, 3)
    assert found[0].seconds("threads", 10**8, 3) == found[1].seconds("threads", 10**8, 3)


# ---- of spans ----


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(sizes=st.lists(st.integers(1, 1 << 32), min_size=1, max_size=8), workers=st.integers(2, 16))
def test_spans_take_together_what_the_set_takes(transport, sizes, workers):
    traffic = on_one_machine(transport, sizes, workers, RATES)
    assert traffic.seconds == pytest.approx(RATES.seconds(transport, sum(sizes), workers))
    assert traffic.busiest_link_bytes == (workers - 1) * sum(sizes)


def test_threads_send_nothing_and_copy_the_sum():
    traffic = on_one_machine("threads", [1000], 3, RATES)
    assert (traffic.messages, traffic.other_link_bytes, traffic.total_bytes) == (0, 0, 2000)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_worker_exchanges_nothing(transport):
    traffic = on_one_machine(transport, [1000], 1, RATES)
    assert (traffic.seconds, traffic.total_bytes) == (0.0, 0)


def test_on_two_cores_it_is_the_star_over_links_that_only_sockets_and_the_sum_limit():
    """But for the last bucket, which the star over links sends once the others have gone."""
    limits = Network(Bandwidth(1e18), 0.0, Bandwidth(RATES.tcp / 2), Bandwidth(RATES.check))
    by_links, here = star([10**9], 3, limits), on_one_machine("tcp://", [10**9], 3, RATES)
    assert by_links.seconds - by_links.tail_seconds == pytest.approx(here.seconds)


def test_a_step_waits_for_the_engines_too():
    """10^9 bytes, 2 workers on 2 cores: 0.65 s of exchange; each engine adds, looks and clips on a core of its own."""
    traffic = on_one_machine("tcp://", [10**9], 2, RATES)
    found = overlap_on_one_machine([1.0], 10.0, [10**9], traffic, 2, RATES)
    assert found.seconds == pytest.approx(2 / 4 + 3 / 20)
    assert found.exposed_seconds == pytest.approx(found.seconds + 1 / 20 + 1 / 20 + 1 / 10)
    assert found.hidden_seconds == 0
    crowded = Rates(1, 4e9, 8e9, 20e9, 20e9, 10e9)
    on_one = overlap_on_one_machine([1.0], 10.0, [10**9], traffic, 2, crowded)
    assert on_one.exposed_seconds == pytest.approx(found.seconds + 2 * (1 / 20 + 1 / 20 + 1 / 10))


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), True, "4e9", None])
@pytest.mark.parametrize("name", ["cores", "tcp", "unix", "check", "add", "copy"])
def test_rates_out_of_range_are_refused_by_name(name, rate):
    with pytest.raises(CallerError, match=f"a machine's '{name}' is out of range"):
        Rates(**{**vars(RATES), name: rate})


# ---- what is measured ----

ELEMENTS = 32 * 1024


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_each_of_a_pair_gets_what_the_other_has(tmp_path, transport):
    crew = pairs(tmp_path, ELEMENTS)[transport]()
    try:
        assert isinstance(crew, Crew)
        crew.prepare()
        assert crew.error() > 1
        crew.run()
        assert crew.error() == 0
    finally:
        crew.close()


def test_the_sum_is_looked_at_added_and_copied(monkeypatch):
    looked = []
    monkeypatch.setattr(machine, "squared_sum", lambda part: looked.append(part.size))
    work = Sum(machine._BUCKET + 100)
    before = work._total.copy()
    spent = work.run()
    assert looked == [machine._BUCKET, 100]
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


def test_matrix_products_are_counted_as_2_n_cubed_and_the_median_counts(monkeypatch):
    taken = iter([100.0, 1.0, 2.0, 5.0])
    products = []
    monkeypatch.setattr(machine, "_seconds", lambda work: products.append(work()) or next(taken))
    assert machine.measure_tflops(size=8, rounds=3) == pytest.approx(2 * 8**3 / 2.0 / 1e12)
    assert [(product.shape, product.dtype) for product in products] == [((8, 8), np.float32)] * 4


def test_the_median_of_rounds_counts_and_the_first_is_dropped(monkeypatch):
    class Crew:
        def run(self): ...
        def close(self): ...

    class Summed:
        def __init__(self, _): ...
        def run(self):
            return dict.fromkeys(("check", "add", "copy"), 1.0)

    taken = iter([100.0, 100.0, 1.0, 2.0, 5.0, 6.0, 3.0, 4.0])
    monkeypatch.setattr(machine, "pairs", lambda *_: {"tcp": Crew, "unix": Crew})
    monkeypatch.setattr(machine, "Sum", Summed)
    monkeypatch.setattr(machine, "_seconds", lambda _: next(taken))
    rates = measure_rates(elements=1000, rounds=3)
    assert (rates.tcp, rates.unix) == (8000 / 3.0, 8000 / 4.0)
