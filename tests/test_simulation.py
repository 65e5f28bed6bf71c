"""Groups on a virtual clock end in equal bytes on all ranks, or in the same error; planted bugs are found."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.__main__ import failing, fault_of
from simulation.mutations import MUTATIONS
from simulation.world import Schedule

SCHEDULES = 1000
AT_A_TIME = 50
TESTS = Path(__file__).parent


@pytest.mark.parametrize("first", range(0, SCHEDULES, AT_A_TIME))
def test_every_schedule_ends_as_it_must(first):
    for seed in range(first, first + AT_A_TIME):
        Schedule(seed).run()


@pytest.mark.parametrize("bug", MUTATIONS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    mutation = MUTATIONS[bug]
    mutation.plant(monkeypatch)
    seeds = itertools.chain([mutation.seed], range(SCHEDULES))
    assert any(fault_of(Schedule(seed)) for seed in seeds)


def test_faults_of_every_kind_happen_and_every_ending_is_seen():
    schedules = [Schedule(seed) for seed in range(2 * AT_A_TIME)]
    for schedule in schedules:
        schedule.run()
    log = "\n".join(line for schedule in schedules for line in schedule.log)
    for fault in ("cut between", "is slow", "sleeps for", "dies", "comes back at step", "a second process", "flipped"):
        assert fault in log
    endings = {schedule.ending for schedule in schedules}
    assert endings == {"in the sums", "in the sums after errors", "in one error"}
    assert {schedule.world_size for schedule in schedules} == {2, 3, 4}


def test_a_seed_is_replayed_by_one_command_to_the_same_log():
    schedule = Schedule(7)
    schedule.run()
    command = [sys.executable, "-m", "simulation", "--seed", "7"]
    shown = subprocess.run(
        command,
        cwd=TESTS,
        env={"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == [schedule.described, *schedule.log]
    assert schedule.log


def test_many_schedules_are_counted_and_those_that_fail_are_told_with_their_command(monkeypatch):
    found, endings = failing(range(20))
    assert (found, sum(endings.values())) == ([], 20)
    MUTATIONS["a share is summed before all parts are there"].plant(monkeypatch)
    found, _ = failing(range(20))
    assert any("Wrong: step 0 ended with other bytes" in fault for _, fault in found)
