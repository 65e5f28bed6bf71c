"""One worker as a process that saves itself after each micro-batch, for the test that kills it in the middle."""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import strategies as draw

from gradengine import GradientEngine, GradientLayout

LAYOUT = GradientLayout.of({"layers.0.w": (5, 7), "layers.1.w": (300,), "head": (3,)})
MICRO_BATCHES, STEPS = 4, 3


def begin(file):
    """Weights, an engine, and the number of the next micro-batch: the saved ones, if there are any."""
    weights = np.ones(LAYOUT.arena_size, np.float32)
    engine = GradientEngine(LAYOUT, max_norm=1.0, hold=3, micro_batches=MICRO_BATCHES)
    if not file.exists():
        return weights, engine, 0
    with np.load(file) as saved:
        arrays = dict(saved)
    weights, number = arrays.pop("my_weights"), int(arrays.pop("my_number"))
    engine.load_state_dict(arrays)
    return weights, engine, number


def save(file, engine, weights, number):
    """As one file, the old one or the new one: whoever is killed leaves no half."""
    written = file.with_suffix(".new")
    with written.open("wb") as target:
        np.savez(target, my_weights=weights, my_number=number, **engine.state_dict())
    os.replace(written, file)


def main(file, stop_at):
    """Train and say each micro-batch that is saved; stay at that one, if it comes."""
    weights, engine, first = begin(file)
    for number in range(first, STEPS * MICRO_BATCHES):
        engine.add(draw.random_gradients([number], LAYOUT.slots), weight=1.0 + number)
        if (number + 1) % MICRO_BATCHES == 0:
            for slot, gradient in zip(LAYOUT.slots, engine.step().gradients.values(), strict=True):
                weights[slot.offset : slot.stop] -= gradient.reshape(-1)
        save(file, engine, weights, number + 1)
        print(number + 1, flush=True)
        if number + 1 == stop_at:
            sys.stdin.read()
    print(hashlib.sha256(weights).hexdigest(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
