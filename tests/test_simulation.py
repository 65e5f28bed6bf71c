"""Groups on a virtual clock and network end in equal bytes on all ranks, or in the same error."""

import pytest
from simulation.world import Schedule

# `make simulate` runs 10,000. The last found what few others do.
SEEDS = [*range(200), 283]


@pytest.mark.parametrize("first", range(10))
def test_every_schedule_ends_as_it_must(first):
    for seed in SEEDS[first::10]:
        Schedule(seed).run()


def test_a_seed_is_replayed_to_the_same_log():
    logs = []
    for _ in range(2):
        schedule = Schedule(7)
        schedule.run()
        logs.append([schedule.described, schedule.ending, *schedule.log])
    assert logs[0] == logs[1]
    assert any("fault" in line for line in logs[0])
