"""Data-parallel training of a torch model on two processes, with gradients summed by gradengine over TCP.

Shows `connect`, which joins two processes that each train on half of the data. The engine sums, averages and clips, and
`give_gradients` makes the result the parameters' `.grad` without a copy.

Install in a clone and run:

    pip install . torch
    python examples/torch_two_processes.py [--steps 60]

The example checks itself. The weights must be the same bytes on both ranks. Each step's loss must be within a relative
1e-5 of the loss with torch's DistributedDataParallel over gloo on the same data. Otherwise it exits with 1. Every wait
has a deadline.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

from gradengine import GradientEngine, connect
from gradengine.torch import give_gradients, gradients_of, layout_of

WORLD_SIZE, MAX_NORM, SECONDS = 2, 0.5, 120.0


def new_model() -> nn.Module:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def train(model: nn.Module, rank: int, steps: int, finish_gradients: Callable[[], object]) -> tuple[list[float], str]:
    """Train, and return the loss of each step on this rank's data and the sha256 of the last weights."""
    # SGD shows a wrong factor on all gradients. Adam would hardly change.
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(WORLD_SIZE * step + rank))
        loss = nn.functional.mse_loss(model(inputs), torch.sin(inputs.sum(1, keepdim=True)))
        loss.backward()
        finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return losses, hashlib.sha256(weights).hexdigest()


def with_gradengine(rank: int, steps: int, addresses: Any) -> tuple[list[float], str]:
    """Train with gradients that the engine sums, averages and clips."""
    # The system chooses a free port for rank 0, and rank 0 sends its URL to the others. No process can take the port.
    url = "tcp://127.0.0.1:0" if rank == 0 else addresses.get(timeout=SECONDS / 2)
    with connect(url, rank, WORLD_SIZE, timeout=SECONDS / 3, join_timeout=SECONDS / 2) as exchange:
        if rank == 0:
            addresses.put(exchange.url)
        model = new_model()
        engine = GradientEngine(layout_of(model), max_norm=MAX_NORM, exchange=exchange)

        def finish_gradients() -> None:
            engine.add(gradients_of(model))
            give_gradients(model, engine.step())

        return train(model, rank, steps, finish_gradients)


def torchs_model(rank: int, file: str) -> nn.Module:
    """Return a model whose gradients DDP averages in the backward pass."""
    distributed.init_process_group("gloo", f"file://{file}", dt.timedelta(seconds=SECONDS / 2), WORLD_SIZE, rank)
    return nn.parallel.DistributedDataParallel(new_model())


def work(rank: int, steps: int, addresses: Any, file: str, found: Any) -> None:
    """Train in both ways as one rank and put both results into `found`."""
    torch.set_num_threads(1)
    ours, model = with_gradengine(rank, steps, addresses), torchs_model(rank, file)
    found.put((ours, train(model, rank, steps, lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))))
    found.close()
    found.join_thread()
    os._exit(0)  # skips the shutdown of gloo, which hangs once in 20 runs on a busy machine (torch 2.13)


def run(steps: int) -> list[Any]:
    """Return the results of the ranks. A rank that failed or took too long has none."""
    context, deadline = multiprocessing.get_context("spawn"), time.monotonic() + SECONDS
    addresses, found, results = context.Queue(), context.Queue(), list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (steps, addresses, f"{folder}/meet", found)
        workers = [context.Process(target=work, args=(rank, *arguments), daemon=True) for rank in range(WORLD_SIZE)]
        for worker in workers:
            worker.start()
        while len(results) < WORLD_SIZE and time.monotonic() < deadline and not any(w.exitcode for w in workers):
            try:
                results.append(found.get(timeout=0.2))
            except queue.Empty:
                continue
        for worker in workers:
            worker.join(2.0)
            worker.kill()
    return results


def main() -> int:
    """Train in both ways, compare, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    results = run(parser.parse_args().steps)
    if len(results) < WORLD_SIZE:
        print(f"a rank failed, or not all were done within {SECONDS:.0f} s")
        return 1
    pairs = [pair for (ours, _), (ddp, _) in results for pair in zip(ours, ddp, strict=True)]
    apart = max(abs(ours / ddp - 1) for ours, ddp in pairs)
    are_same = len({weights for (_, weights), _ in results}) == 1
    print(f"loss {pairs[0][0]:.4f} -> {pairs[-1][0]:.4f}; gradengine's and DDP's differ by {apart:.1e} of it at most")
    print(f"after gradengine's steps the weights are {'the same bytes' if are_same else 'DIFFERENT'} on both ranks")
    return 0 if are_same and apart <= 1e-5 and pairs[-1][0] < pairs[0][0] else 1


if __name__ == "__main__":
    sys.exit(main())
