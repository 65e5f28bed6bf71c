"""Under the real torchrun: connect() without arguments makes one group of each run.

Each run imports torch several times, so one is left to the ordinary tests.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transports import SOON, free_port

torch = pytest.importorskip("torch")

from test_docs import blocks_of  # noqa: E402
from torch_modules import loop_of_the_readme  # noqa: E402

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PAGE, EXAMPLE = ((ROOT / path).read_text() for path in ("docs/how-to/launch.md", "examples/any_launcher.py"))
SHOWN = sorted({*re.findall(r"^ *torchrun (.* examples/any_launcher.py .*)$", PAGE + EXAMPLE, re.MULTILINE)})
(DEMO,) = re.findall(r"^torchrun (.* -m gradengine demo .*?) *#.*$", PAGE, re.MULTILINE)
SCRIPT = """import os, time
import numpy as np
{first}
from gradengine import GradientEngine, GradientLayout, connect
with connect() as exchange:
    engine = GradientEngine(GradientLayout.of({{"w": (3,)}}), exchange=exchange)
    engine.add({{"w": np.full(3, exchange.rank + 1, np.float32)}})
    total = engine.step().gradients["w"].tolist()
    said = f"rank {{exchange.rank}} of {{exchange.world_size}}: {{total}} {{exchange.url}}\\n"
    os.write(1, said.encode())  # whole, which a line of print() to a pipe that other ranks have too need not be
{last}
"""
ONE_DIES_FIRST = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import gradengine
    exchange = gradengine.connect()
    os._exit(1) if os.environ["RANK"] == "1" else time.sleep(60)
"""
BESIDE_A_PROCESS_GROUP = """
import torch
torch.distributed.init_process_group("gloo")
"""


LAUNCHED = {  # the variables of two ranks on one host
    "torchrun": "RANK={0} WORLD_SIZE=2 LOCAL_RANK={0} LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={1}",
    "mpiexec": "OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={0} "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=run-{1}",
    "srun": "SLURM_PROCID={0} SLURM_NTASKS=2 SLURM_LOCALID={0} SLURM_JOB_ID={1} SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n",
}
LOOP = """import os, sys, torch
from gradengine import CallerError
os.chdir(sys.argv[1])
for loop in sys.argv[2:]:
    try:
        exec(loop)
        print(sum(value.sum().item() for value in model.state_dict().values()))
    except CallerError as fault:
        print(fault)
    engine.exchange.close()
"""


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[] if name == "srun" else [pytest.mark.slow]) for name in LAUNCHED]
)
def test_unseeded_ranks_of_the_pages_loops_end_in_equal_weights_and_without_broadcast_are_refused(launcher, tmp_path):
    (page,) = blocks_of("docs/start/from-ddp.md")
    readme = loop_of_the_readme().replace("torch.manual_seed(0)", "torch.seed()")
    loops = readme.replace("attached.broadcast()", ""), readme, page
    command = [sys.executable, "-c", LOOP, tmp_path, *loops]
    port = free_port()
    ranks = [started(command, **dict(re.findall(r"(\w+)=(\S+)", LAUNCHED[launcher].format(r, port)))) for r in "01"]
    (refused, *weights), (also, *others) = (ended(rank).splitlines() for rank in ranks)
    assert refused == also
    assert "parameter 'weight' of rank 1 is not that of rank 0" in refused
    printed = [line for line in weights if line.startswith("step ")]  # rank 0 alone prints
    assert len(printed) == 4
    assert re.fullmatch(r"step 19, norm \d.\d\d, losses \[.*, .*\]", printed[-1])
    weights = [line for line in weights if line not in printed]
    assert weights == others
    assert len(weights) == 2
    assert len(torch.load(tmp_path / "model.pt")) == 9


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


def said(command):
    return ended(started(command))


@pytest.fixture
def script(tmp_path):
    def written(first="", last=""):
        (tmp_path / "script.py").write_text(SCRIPT.format(first=first, last=last))
        return tmp_path / "script.py"

    return written


def groups(output, ranks=2):
    """The address of the only group that has spoken, once each rank has said the mean of all."""
    mean = [(ranks + 1) / 2] * 3
    found = re.findall(r"^rank (\d) of (\d): (\[.*\]) (\S+)$", output, re.MULTILINE)
    assert sorted(row[:3] for row in found) == [(str(rank), str(ranks), str(mean)) for rank in range(ranks)], output
    addresses = {row[3].replace("[::]", "0.0.0.0") for row in found}  # rank 0 listens at both, others call one
    assert len(addresses) == 1
    return addresses.pop()


def test_ranks_of_torchrun_on_one_host_meet_at_a_unix_socket_beside_its_own_process_group(script):
    last = "both = torch.ones(1); torch.distributed.all_reduce(both); os.write(1, b'torch %d\\n' % both.item())"
    last += "\ntorch.distributed.barrier(); torch.distributed.destroy_process_group()"
    output = said([*TORCHRUN, "--nproc-per-node", "2", script(BESIDE_A_PROCESS_GROUP, last)])
    assert re.fullmatch(r"unix:///\S+/gradengine-\d+/[0-9a-f]{16}", groups(output))
    assert output.count("torch 2") == 2


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_ranks_of_two_torchruns_meet_at_a_port_that_is_not_torch_s(script, rendezvous):
    """Two agents with a rank each: two hosts, as far as the ranks can see."""
    port, path = free_port(), script("os.write(1, b'store %s\\n' % os.environ['MASTER_PORT'].encode())")
    common = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
    if rendezvous == "static":
        common += ["--master-addr", "127.0.0.1", "--master-port", port]
    else:
        common += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a run"]
    secret = {"GRADENGINE_SECRET": "0123456789abcdef0123456789abcdef"}
    agents = [started([*common, "--node-rank", rank, "--local-addr", "127.0.0.1", path], **secret) for rank in (0, 1)]
    output = "".join(map(ended, agents))
    host, mine = re.fullmatch(r"tcp://(.+):(\d+)", groups(output)).groups()
    assert host in {"127.0.0.1", socket.gethostname(), socket.getfqdn()}  # as torchrun says, or has found
    assert mine not in set(re.findall(r"store (\d+)", output)) | {str(port)}


@pytest.mark.slow
def test_after_torchrun_has_started_its_ranks_again_they_meet_again(script):
    restarts = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    groups(said([*TORCHRUN, *restarts, script(ONE_DIES_FIRST)]))


@pytest.mark.slow
def test_gradengine_doctor_under_torchrun():
    told = said([*TORCHRUN, "--nproc-per-node", "1", "-m", "gradengine", "doctor", "--json", "-"])
    facts = json.loads(told)["environment"]
    assert facts["rank"] == [0, "RANK"]
    assert facts["job"][1] in {"TORCHELASTIC_RUN_ID", ""}


@pytest.mark.slow
@pytest.mark.parametrize("command", [*SHOWN, DEMO])
def test_a_command_that_is_shown_ends_well(command, tmp_path):
    """The demo with a small model; what it proves, test_demo_command.py shows."""
    over = r"tcp://127.0.0.1:\d+" if command.endswith("torch") else r"unix://\S+"
    expected = rf"^2 ranks over {over}: the same weights on all$"
    if command == DEMO:
        expected = r"^workers  2 ranks that were launched, over unix:///"
        command += " --hidden-size 32 --blocks 1 --sequence-length 32 --learning-rate 0.03 --steps 20"
        command += f" --compared-steps 4 --plot {tmp_path}/loss.png"
    output = said([*TORCHRUN, *command.replace("examples/", f"{ROOT}/examples/").split()])
    assert re.search(expected, output, re.MULTILINE), output


@pytest.mark.slow
@pytest.mark.parametrize("function", ["main", "main_over_torch"])
def test_what_the_page_defines_runs_under_torchrun(function, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text("\n".join(['__name__ = "page"', *blocks, f"{function}()\n"]))
    output = said([*TORCHRUN, "--nproc-per-node", "2", tmp_path / "train.py"])
    assert output.count("the mean of 2 ranks: [1.5 1.5 1.5 1.5]") == 2, output
