"""Seconds, bytes and bandwidths as they are shown are what they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.plan.quantities import duration, rate, size, three_digits, two_digits
from gradengine.tensor_parallel_cost import Bandwidth


@given(st.floats(1e-9, 99))
def test_three_digits_are_right_to_half_of_the_last(number):
    assert float(three_digits(number)) == pytest.approx(number, rel=0.006, abs=0.0051)


@given(st.floats(1, 1e12))
def test_two_digits_are_two_and_right_to_half_of_the_second(number):
    shown = two_digits(number).replace(",", "")
    assert float(shown) == pytest.approx(number, rel=0.051)
    assert len(shown.replace(".", "").rstrip("0")) <= 2


@given(st.floats(1e-7, 1e5))
def test_durations_are_what_they_say(number):
    shown, unit = duration(number).split()
    assert float(shown) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit] == pytest.approx(number, rel=0.006, abs=6e-9)


@given(st.integers(0, 10**17))
def test_sizes_are_what_they_say(nbytes):
    number, unit = size(nbytes).split()
    scale = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert float(number) * scale == pytest.approx(nbytes, rel=0.006)
    assert float(number) < 1000 or unit == "TB"


@given(st.floats(1, 1e18).map(Bandwidth))
def test_a_rate_names_both_units_and_is_read_as_about_itself(bandwidth):
    for half in rate(bandwidth).split(" = "):
        assert Bandwidth.parse(half).bytes_per_second == pytest.approx(bandwidth.bytes_per_second, rel=1e-3)
