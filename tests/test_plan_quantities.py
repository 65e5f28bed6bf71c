"""Seconds and bytes as they are shown are what they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.plan.quantities import duration, size


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
