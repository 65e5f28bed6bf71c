"""Schedules of whole groups on a virtual clock and network end in equal bytes on all ranks, or in the same named error."""

import pytest
from simulation.world import Schedule


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_each_schedule_ends_as_it_must(first):
    for seed in range(first, first + 50):
        Schedule(seed).run()
