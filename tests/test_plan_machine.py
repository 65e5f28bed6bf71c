"""The exchange within one machine: copies counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.plan.machine import ON_ONE_MACHINE, Rates

RATES = Rates(cores=2, tcp=4e9, unix=8e9, check=20e9, add=20e9, copy=10e9)


def test_copies_are_counted_as_the_code_makes_them():
    """10^9 bytes, 3 workers: 4 transfers; a check of 3 contributions, 2 additions; threads make 2 copies."""
    assert RATES.by_tcp(10**9, 3) == pytest.approx(4 / 4 + 3 / 20 + 2 / 20)
    assert RATES.by_unix(10**9, 3) == pytest.approx(4 / 8 + 5 / 20)
    assert RATES.by_threads(10**9, 3) == pytest.approx(5 / 20 + 2 / 10)


def test_more_cores_help_as_far_as_there_are_threads():
    at = [Rates(cores, 4e9, 8e9, 20e9, 20e9, 10e9).by_tcp(10**9, 2) for cores in (4, 16)]
    assert at[0] == at[1]
    assert Rates(8, 4e9, 8e9, 20e9, 20e9, 10e9).by_tcp(10**9, 3) < Rates(4, 4e9, 8e9, 20e9, 20e9, 10e9).by_tcp(10**9, 3)


@given(st.integers(2, 64), st.integers(1, 1 << 40))
def test_every_worker_more_takes_longer_and_time_is_proportional_to_bytes(world, nbytes):
    for predict in ON_ONE_MACHINE.values():
        assert predict(RATES, nbytes, world) < predict(RATES, nbytes, world + 1)
        assert predict(RATES, 2 * nbytes, world) == pytest.approx(2 * predict(RATES, nbytes, world))


def test_the_sum_looks_at_every_contribution_and_adds_all_but_the_first():
    assert RATES.sum_seconds(10**9, 4) == pytest.approx(4 / 20 + 3 / 20)


def test_one_core_takes_as_long_as_it_was_measured_to_take():
    """The sockets' rate was measured on the same core, so that nothing is scaled."""
    one = Rates(1, 4e9, 8e9, 20e9, 20e9, 10e9)
    assert one.by_tcp(10**9, 2) == pytest.approx(2 / 4 + 3 / 20)


@given(st.floats(1e8, 1e11), st.floats(1e8, 1e11))
def test_faster_sockets_never_take_longer(one, other):
    slow, fast = sorted((one, other))
    found = [Rates(2, rate, rate, 20e9, 20e9, 10e9) for rate in (slow, fast)]
    assert found[1].by_tcp(10**8, 3) <= found[0].by_tcp(10**8, 3)
    assert found[0].by_threads(10**8, 3) == found[1].by_threads(10**8, 3)
