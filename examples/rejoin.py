"""A run that continues after one of two ranks was killed in mid-window and started again.

Shows `engine.reconnect(connect(...))`. The rank that starts again loads its checkpoint first and then joins. The rank
that lost it keeps its window, reconnects and steps again.

Install in a clone and run:

    pip install .
    python examples/rejoin.py

The example checks itself. Both ranks must end with the same bytes, within 1e-5 of the weights of a run by hand.
Otherwise it exits with 1.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradengine import GradientEngine, GradientLayout, connect
from gradengine.errors import PeerLost

Array = npt.NDArray[np.float32]

STEPS, KILLED_AT, FEATURES, RATE = 8, 3, 16, np.float32(0.1)
LAYOUT = GradientLayout.of({"w": (FEATURES,)})


def gradient(weights: Array, step: int, rank: int) -> Array:
    """Return the gradient of a mean squared error on this rank's data."""
    inputs = np.random.default_rng([step, rank]).standard_normal((32, FEATURES), np.float32)
    return inputs.T @ (inputs @ (weights - np.float32(1))) / np.float32(32)


def train(rank: int, folder: str, *, is_killed: bool = False) -> None:
    """Train to the end, from the last checkpoint if there is one. Save a checkpoint after each step."""
    engine, weights, file = GradientEngine(LAYOUT), np.zeros(FEATURES, np.float32), Path(folder, f"{rank}.npz")
    if file.exists():
        saved = dict(np.load(file))
        weights = saved.pop("my_weights")
        engine.load_state_dict(saved)  # must precede `reconnect`, because the other rank is at this step
    exchange = connect(f"unix://{folder}/s", rank, 2)
    engine.reconnect(exchange)
    while engine.current_step < STEPS:
        engine.add({"w": gradient(weights, engine.current_step, rank)})
        if is_killed and engine.current_step == KILLED_AT:
            os._exit(9)  # the window is lost, as with kill -9
        try:
            result = engine.step()
        except PeerLost:
            exchange.close()
            exchange = connect(f"unix://{folder}/s", rank, 2)  # waits for the other rank
            engine.reconnect(exchange)
            result = engine.step()
        weights -= RATE * result.gradients["w"]
        np.savez(file, my_weights=weights, **engine.state_dict())
    exchange.close()


def main() -> int:
    """Run both ranks, start the killed rank again, compare, and print the result."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        first, killed, again = (
            context.Process(target=train, args=(rank, folder), kwargs={"is_killed": is_killed})
            for rank, is_killed in ((0, False), (1, True), (1, False))
        )
        first.start()
        killed.start()
        killed.join()
        again.start()
        for process in (first, again):
            process.join()
        one, other = (np.load(Path(folder, f"{rank}.npz"))["my_weights"] for rank in range(2))
    by_hand = np.zeros(FEATURES, np.float32)
    for step in range(STEPS):
        by_hand -= RATE * (gradient(by_hand, step, 0) + gradient(by_hand, step, 1)) / np.float32(2)
    apart, are_same = float(np.abs(one - by_hand).max()), one.tobytes() == other.tobytes()
    print(f"rank 1 ended with {killed.exitcode} and joined again: {'the same' if are_same else 'DIFFERENT'} weights")
    print(f"they differ from those of a run by hand by at most {apart:.1e}")
    return 0 if are_same and apart <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
