"""A child that is forked from a rank has no part in its group: it is refused at once, and its end is not the rank's."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, threading
import numpy as np
from gradengine import GradientEngine, GradientLayout, GradientServer, connect, local_group
from gradengine.errors import CallerError

kind, end, folder = sys.argv[1:]
layout = GradientLayout.of({"w": (1000,)})
server = GradientServer(2) if kind == "served" else None
is_here = kind in {"unix", "shared memory"}
url = server.url if server else f"unix://{folder}/s" if is_here else "tcp://127.0.0.1:0"
link = None if server else "shared_memory" if kind == "shared memory" else "unix" if is_here else "tcp"
ranks, engines = local_group(2) if kind == "threads" else [], {}
for rank in range(len(ranks), 2):
    ranks.append(connect(ranks[0].url if ranks else url, rank, 2, served=bool(server), link=link))

def step(rank):
    if rank not in engines:
        engines[rank] = GradientEngine(layout, max_norm=None, exchange=ranks[rank])
    engines[rank].add({"w": np.ones(1000, np.float32)})
    engines[rank].step()

def both():
    threads = [threading.Thread(target=step, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

both()
child = os.fork()
if not child:
    with ranks[0], ranks[1]:
        try:
            step(1)
        except CallerError as refused:
            assert "the exchange of rank 1 belongs to the parent of this forked process" in str(refused)
        else:
            os._exit(9)
        if end == "raise":
            raise ValueError("the child's own")
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (1 if end == "raise" else 7)
both()
for rank in ranks:
    rank.close()
if server:
    server.serve()  # all have left, and said so
    server.close()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_child_that_uses_the_exchange_is_refused_and_its_error_is_not_the_ranks(tmp_path):
    """One that exits, over each link: the row "fork" of docs/specs/faults.md."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, "tcp", "raise", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr
    assert "ValueError: the child's own" in done.stderr
