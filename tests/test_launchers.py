"""Under the real torchrun: connect() without arguments makes one group of each run."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transports import SOON, free_port

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PAGE, EXAMPLE = ((ROOT / path).read_text() for path in ("docs/clusters.md", "examples/any_launcher.py"))
SHOWN = sorted({*re.findall(r"^ *torchrun (.* examples/any_launcher.py .*)$", PAGE + EXAMPLE, re.MULTILINE)})
(DEMO,) = re.findall(r"^torchrun (.* -m gradengine demo .*?) *#.*$", PAGE, re.MULTILINE)
SMALL = ["--hidden-size", "32", "--blocks", "1", "--sequence-length", "32", "--learning-rate", "0.03"]
SCRIPT = """
import os
import sys
import numpy as np

def say(*words):
    # Whole, which a line of print() to a pipe that other ranks have too need not be.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

{first}
from gradengine import GradientEngine, GradientLayout, connect

with connect() as exchange:
    engine = GradientEngine(GradientLayout.of({{"w": (3,)}}), exchange=exchange)
    engine.add({{"w": np.full(3, (exchange.rank + 1) * int(os.environ.get("TIMES", "1")), np.float32)}})
    total = engine.step().gradients["w"].tolist()
    say(f"rank {{exchange.rank}} of {{exchange.world_size}}: {{total}} {{exchange.url}}")
{last}
"""
ONE_DIES_FIRST = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    from gradengine import connect
    exchange = connect()
    if os.environ["RANK"] == "1":
        os._exit(1)
    import time; time.sleep(60)
"""
BESIDE_A_PROCESS_GROUP = """
import torch
torch.distributed.init_process_group("gloo")
"""


def started(command, **variables):
    """A launcher, without what another one around it says."""
    launchers = ("GRADENGINE_", "PMI", "OMPI_", "MPI_", "SLURM_", "TORCHELASTIC_", "MASTER_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return subprocess.Popen(
        [*map(str, command)],
        env=own | {"PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def ended(process):
    """What a launcher's ranks have said, if all ended well."""
    try:
        output, error = process.communicate(timeout=4 * SOON)
    except subprocess.TimeoutExpired:
        process.kill()
        output, error = process.communicate()
        pytest.fail(f"hangs: {output}{error}")
    assert process.returncode == 0, output + error
    return output


def said(command, **variables):
    return ended(started(command, **variables))


@pytest.fixture
def script(tmp_path):
    def written(first="", last=""):
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(first=first, last=last))
        return path

    return written


def groups(output, ranks, times=1):
    """The address of the only group that has spoken, once each rank has said the mean of all."""
    mean = [(ranks + 1) / 2 * times] * 3
    found = re.findall(r"^rank (\d) of (\d): (\[.*\]) (\S+)$", output, re.MULTILINE)
    assert sorted(row[:3] for row in found) == [(str(rank), str(ranks), str(mean)) for rank in range(ranks)], output
    addresses = {row[3] for row in found}
    assert len(addresses) == 1
    return addresses.pop()


def test_ranks_of_torchrun_on_one_host_meet_at_a_unix_socket(script):
    address = groups(said([*TORCHRUN, "--nproc-per-node", "2", script()]), 2)
    assert re.fullmatch(r"unix:///\S+/gradengine-\d+/[0-9a-f]{16}", address)


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_ranks_of_two_torchruns_meet_at_a_port_that_is_not_torch_s(script, rendezvous):
    """Two agents with a rank each: two hosts, as far as the ranks can see."""
    port, path = free_port(), script("say('store', os.environ['MASTER_PORT'])")
    common = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
    if rendezvous == "static":
        common += ["--master-addr", "127.0.0.1", "--master-port", port]
    else:
        common += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a run"]
    token = {"GRADENGINE_TOKEN": "0123456789abcdef0123456789abcdef"}
    agents = [started([*common, "--node-rank", rank, "--local-addr", "127.0.0.1", path], **token) for rank in (0, 1)]
    output = "".join(ended(agent) for agent in agents)
    host, mine = re.fullmatch(r"tcp://(.+):(\d+)", groups(output, 2)).groups()
    assert host in {"127.0.0.1", "localhost", socket.gethostname(), socket.getfqdn()}
    assert mine not in set(re.findall(r"store (\d+)", output)) | {str(port)}


def test_after_torchrun_has_started_its_ranks_again_they_meet_again(script):
    command = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    groups(said([*command, script(ONE_DIES_FIRST)]), 2)


def test_torchrun_s_own_process_group_works_beside(script):
    last = "both = torch.ones(1); torch.distributed.all_reduce(both); say('torch', both.item())"
    last += "\ntorch.distributed.barrier(); torch.distributed.destroy_process_group()"
    output = said([*TORCHRUN, "--nproc-per-node", "2", script(BESIDE_A_PROCESS_GROUP, last)])
    groups(output, 2)
    assert output.count("torch 2.0") == 2


def test_gradengine_env_under_torchrun():
    facts = json.loads(said([*TORCHRUN, "--nproc-per-node", "1", "-m", "gradengine", "env", "--json", "-"]))["facts"]
    assert facts["rank"] == {"value": 0, "from": "RANK"}
    assert facts["job"]["from"] in {"TORCHELASTIC_RUN_ID", ""}


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_that_is_shown_ends_well(command):
    output = said([*TORCHRUN, *command.replace("examples", str(ROOT / "examples")).split()])
    where = r"tcp://127.0.0.1:\d+" if command.endswith("torch") else r"unix://\S+"
    assert re.search(rf"^2 ranks over {where}: the same weights on all$", output, re.MULTILINE), output


def test_the_demo_that_is_shown_ends_with_the_digests_of_workers_that_it_starts(tmp_path):
    small = [*SMALL, "--steps", "20", "--compared-steps", "4", "--plot", tmp_path / "loss.png"]
    launched, own = (
        said([*how, *small]) for how in ([*TORCHRUN, *DEMO.split()], [sys.executable, "-m", "gradengine", "demo"])
    )
    digests = re.findall(r"sha256 [0-9a-f]{12}", launched)
    assert len(digests) == 2
    assert digests == re.findall(r"sha256 [0-9a-f]{12}", own)
    assert re.search(r"^workers  2 ranks that were launched, over unix:///", launched, re.MULTILINE)


@pytest.mark.parametrize("function", ["main", "main_over_torch"])
def test_what_the_page_defines_runs_under_torchrun(function, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)) + f"\n{function}()\n"
    )
    output = said([*TORCHRUN, "--nproc-per-node", "2", script])
    assert output.count("the mean of 2 ranks: [1.5 1.5 1.5 1.5]") == 2, output


def test_both_ways_of_torchrun_are_shown():
    assert len(SHOWN) == 2
