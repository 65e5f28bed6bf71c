"""`make simulate`: many schedules on all cores, or one of them with its log."""

import argparse
import collections
import concurrent.futures
import logging
import sys
import traceback

from simulation.world import Schedule

_AT_A_TIME = 100


def fault_of(schedule):
    """What is wrong with a schedule, once it was run; None if nothing is."""
    try:
        schedule.run()
    except Exception as fault:
        return fault
    return None


def failing(seeds):
    """The seeds among these whose schedules do not end as they must, with what is wrong; and how the others ended."""
    found, endings = [], collections.Counter()
    logging.getLogger("gradengine").setLevel(logging.ERROR)  # each group that is in plain says so
    for seed in seeds:
        schedule = Schedule(seed)
        fault = fault_of(schedule)
        if fault is not None:
            found.append((seed, f"{type(fault).__name__}: {fault}"))
        endings[schedule.ending] += 1
    return found, endings


def replay(seed):
    """Run one schedule, and print its log."""
    schedule = Schedule(seed)
    fault = fault_of(schedule)
    print(schedule.described, *schedule.log, sep="\n")
    if fault is not None:
        traceback.print_exception(fault)
    return int(fault is not None)


def run(first, count):
    """Run schedules on all cores, and print those that fail, and how to see them."""
    blocks = [range(start, min(start + _AT_A_TIME, first + count)) for start in range(first, first + count, _AT_A_TIME)]
    found, endings = [], collections.Counter()
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for failures, ended in pool.map(failing, blocks):
            endings += ended
            found += failures
            for seed, fault in failures:
                print(f'seed {seed}: {fault}\n    make simulate ARGS="--seed {seed}"', flush=True)
    print(f"{count} schedules, {len(found)} failed; " + ", ".join(f"{n} {how}" for how, n in endings.most_common()))
    return int(bool(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this schedule, and print its log")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--schedules", type=int, default=10_000, help="how many")
    given = parser.parse_args()
    sys.exit(run(given.first, given.schedules) if given.seed is None else replay(given.seed))
