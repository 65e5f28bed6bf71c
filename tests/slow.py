"""Tests that take long and repeat what others show: `make matrix` runs them, and CI does not.

Each line is a pattern of test names. The one that a line leaves to CI is said beside it.
"""

import re

SLOW = [
    # The bits of one worker are compared on the host; on devices `make matrix` compares them too.
    r"test_bits\.py::test_of_one_worker\[cupy",
    # Examples run in CI; that their checks notice gradients that are one percent off, `make matrix` shows.
    r"test_its_check_notices_gradients_that_are_one_percent_off",
    # Ranks of a training framework as processes, each of which imports it: those of transformers are left.
    r"test_torch_trainers\.py::TestRanks::test_two_ranks_learn.*\[lightning",
    # Ranks of a torch process group as processes, each of which imports it: those that go on to the end are left.
    r"test_exchange_torch_group\.py::test_(a_rank_that_does_not|engines_over_groups|after_a_rank_has_left)",
    # A hundred flipped bits over each link are left.
    r"test_exchange_faults\.py::test_every_flipped_bit.*\[1000",
    # Interrupts at any line: for each kind of call one set of options is left.
    r"TestOneWorker::test_a_window_interrupted_at_any_(line|time).*options[123]",
    r"TestJoining::test_interrupted_at_any_line.*\[0\]",
    # Large: more than a million components, more than fit one launch, a table of addresses; smaller ones are left.
    r"TestQueue::test_launches_of_measure_and_hand_back\[.*4001-table",
    # Each dtype as a producer that goes right after: fp32 is left, and each dtype that is held.
    r"test_producers_may_go_right_after_add\[.*float16-1\]",
    # Measured against predicted, and benchmarks whose parts are tested one by one.
    r"test_bench_report\.py::test_each_command_prints_a_table.*(--workers 2|step|lora)",
    r"test_bench_cases\.py::test_(the_largest_error_of_a_crew|a_worker_that_cannot_be_made)",
    r"test_bench_gpu\.py::test_every_kernel_runs_once",
    r"test_bench_gpu\.py::test_every_case_computes_the_same_and_is_timed\[cupy-bfloat16",
    # On a device that is not the current one: where that matters CI shows it, `make matrix` everywhere.
    r"^(?!.*test_(arrays_device|kernels_streams|streams|capture)\.py).*\[.*cupy-other",
    # Kernels for each architecture: the oldest, the commonest and the newest are left.
    r"test_kernels_compile\.py::.*\bsm_(?!75\b|90\b|120\b)",
]
_ANY = re.compile("|".join(SLOW))


def is_slow(name: str) -> bool:
    """Whether a test of this name is for `make matrix` alone.

    >>> is_slow("tests/test_bench_gpu.py::test_every_kernel_runs_once"), is_slow("tests/test_cli.py::test_version")
    (True, False)
    """
    return bool(_ANY.search(name))
