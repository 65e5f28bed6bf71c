"""Data-parallel training of a linear model in NumPy, on the ranks of torchrun, mpiexec or srun.

Shows three ways to join the ranks. `connect()` reads the launcher's variables. `connect("mpi://")` uses MPI.
`connect(process_group=...)` joins the ranks of a torch process group. Each rank trains on its part of each batch, and
the engine sums and clips in the same way over each transport.

Install in a clone ('.[mpi]' for MPI, torch for torchrun):

    pip install .

Run:

    python examples/any_launcher.py
    torchrun --nproc-per-node 2 examples/any_launcher.py --by launcher
    torchrun --nproc-per-node 2 examples/any_launcher.py --by torch
    mpiexec -n 2 python examples/any_launcher.py --by launcher
    mpiexec -n 2 python examples/any_launcher.py --by mpi

With MPICH's mpiexec, set GRADENGINE_JOB to a new name in each run of `--by launcher`.

The example checks itself. All ranks must end with the same bytes, within 1e-5 of the weights of one process that trains
on the whole batches. Otherwise it exits with 1.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import numpy.typing as npt

from gradengine import Exchange, GradientEngine, GradientLayout, connect

Array = npt.NDArray[np.float32]

STEPS, BATCH, FEATURES, RATE, MAX_NORM = 20, 60, 16, np.float32(0.05), 1.0


def joined(by: str) -> Exchange:
    """Return this rank's exchange with the others."""
    if by == "alone":
        return connect("tcp://127.0.0.1:0", rank=0, world_size=1)
    if by == "launcher":
        return connect()
    if by == "mpi":
        return connect("mpi://")
    from torch import distributed  # noqa: PLC0415  (only --by torch needs it)

    if not distributed.is_initialized():
        distributed.init_process_group("gloo")  # "nccl" works too, since gradengine uses its own sockets here
    return connect(process_group=distributed.group.WORLD)


def batch(step: int) -> tuple[Array, Array]:
    """Return inputs and targets of a step, the same on every rank."""
    rng = np.random.default_rng(step)
    inputs = rng.standard_normal((BATCH, FEATURES), np.float32)
    return inputs, inputs @ np.linspace(-1, 1, FEATURES, dtype=np.float32)


def gradient(weights: Array, inputs: Array, targets: Array) -> Array:
    """Return the gradient of the mean squared error."""
    return 2 * inputs.T @ (inputs @ weights - targets) / np.float32(len(targets))


def train(exchange: Exchange) -> Array:
    """Train on this rank's part of each batch and return the weights."""
    engine = GradientEngine(GradientLayout.of({"w": (FEATURES,)}), max_norm=MAX_NORM, exchange=exchange)
    weights = np.zeros(FEATURES, np.float32)
    for step in range(STEPS):
        inputs, targets = (array[engine.rank :: engine.world_size] for array in batch(step))
        # Parts may differ by one in size, and a part may be empty. With sizes as weights the mean is over all examples.
        engine.add({"w": gradient(weights, inputs, targets)} if len(targets) else None, weight=len(targets))
        weights -= RATE * engine.step().gradients["w"]
    return weights


def train_by_hand() -> Array:
    """Train in one process without an engine and return the weights."""
    weights = np.zeros(FEATURES, np.float32)
    for step in range(STEPS):
        mean = gradient(weights, *batch(step))
        weights -= RATE * np.float32(min(1.0, MAX_NORM / np.linalg.norm(mean))) * mean
    return weights


def main() -> int:
    """Train, compare, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--by", choices=["alone", "launcher", "mpi", "torch"], default="alone")
    with joined(parser.parse_args().by) as exchange:
        weights = train(exchange)
        are_same = len(set(exchange.all_gather(weights.tobytes()))) == 1
        rank, ranks, url = exchange.rank, exchange.world_size, exchange.url
    apart = float(np.abs(weights - train_by_hand()).max())
    if rank == 0:
        print(f"{ranks} ranks over {url}: {'the same' if are_same else 'DIFFERENT'} weights on all")
        print(f"they differ from those of one process by at most {apart:.1e}")
    return 0 if are_same and apart <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
