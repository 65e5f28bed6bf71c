"""Links over a process group of torch, between processes; see test_exchange_links.py for what holds within one."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.timeout(150),
]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def parent():
    """The process whose forks are the ranks."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "link_process.py"), "torch"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture
def ranks_that_run(parent, tmp_path):
    """Exit status and words of the first ranks up to `last`, or of all; those that run then are killed."""

    def run(ranks, *command, last=None):
        store = tmp_path / "store"
        parent.stdin.write(json.dumps([ranks, str(store), last or ranks, *command]) + "\n")
        statuses = json.loads(parent.stdout.readline())
        return [(status, Path(f"{store}{rank}").read_text()) for rank, status in enumerate(statuses)]

    return run


def test_each_part_of_the_ranks_is_a_group_and_its_sums_are_those_in_rank_order(ranks_that_run):
    assert ranks_that_run(3, "part") == [(0, "the same\n")] * 3


def test_engines_over_a_process_group_find_what_they_find_over_threads(ranks_that_run):
    assert ranks_that_run(3, "engine") == [(0, "the same\n")] * 3


def test_engines_over_groups_of_workers_and_of_parts_find_what_they_find_over_threads(ranks_that_run):
    assert ranks_that_run(4, "grid") == [(0, "the same\n")] * 4


@pytest.mark.parametrize("what", ["raises", "killed", "late", "step-raises", "step-killed", "step-late"])
def test_a_rank_that_does_not_go_on_is_named_and_the_others_end(what, ranks_that_run):
    found = ranks_that_run(3, what, 2, last=2)
    assert [status for status, _ in found] == [1, 1], found
    late, gone = "DeadlineExceeded: rank 2 is late: ", "PeerLost: rank 2 is gone: the connection with it "
    said = late if what.endswith("late") else gone
    assert any(said in words for _, words in found), found
    assert all(re.match(r"rank \d: (PeerLost|DeadlineExceeded): rank \d is ", words) for _, words in found), found


def test_after_a_rank_has_left_in_a_step_all_join_again_and_end_with_the_same_bytes(ranks_that_run):
    assert ranks_that_run(3, "reconnects") == [(0, "the same\n")] * 3


def test_what_contradicts_the_group_is_refused_and_the_group_is_used_after_that(ranks_that_run):
    assert ranks_that_run(2, "arguments") == [(0, "the same\n")] * 2


def test_without_a_group_it_is_said_what_to_call():
    import torch.distributed

    from gradengine.errors import CallerError
    from gradengine.exchange.links.torch_group import torch_link

    assert not torch.distributed.is_initialized()
    with pytest.raises(CallerError, match=r"no torch process group .*init_process_group first"):
        torch_link()
