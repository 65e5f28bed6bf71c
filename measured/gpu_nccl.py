"""One of two ranks on one GPU, by a process group of torch with NCCL: `python measured/gpu_nccl.py RANK FOLDER`.

Its last line is JSON: a digest of each step's gradients, eager and replayed. `found_by` gives the same over threads.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradengine import GradientEngine, GradientLayout, StepResult, connect
from gradengine.exchange import Exchange
from gradengine.exchange.torch_group import device_calls_of

RANKS, STEPS = 2, 3
LAYOUT = GradientLayout.of({"layers.0.w": (1 << 20,), "layers.0.b": (7,), "layers.1.w": (300, 77), "head": (5, 3)})
SENT, SIZE = (1.0, 2.0, 3.0, 4.0), 1 << 20
ENVIRONMENT = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # of NCCL 2.30: before it one rank has a GPU alone


def found_by(exchange: Exchange, *, captures: bool) -> list[str]:
    """A digest of what each step hands back over this exchange: eager steps, then replays or more eager ones."""
    xp = importlib.import_module("cupy")
    engine = GradientEngine(LAYOUT, "cuda", exchange=exchange, micro_batches=2)
    batches = [[xp.empty(slot.shape, np.float32) for slot in LAYOUT.slots] for _ in range(2)]

    def fill(step: int) -> None:
        for k, batch in enumerate(batches):
            for i, array in enumerate(batch):
                seed = np.random.default_rng([exchange.rank, step, k, i])
                array.set(seed.standard_normal(array.shape, np.float32))

    def window() -> StepResult:
        for k, batch in enumerate(batches):
            engine.add(batch, weight=1.0 + k + 2 * exchange.rank)
        return engine.step()

    def digest(result: StepResult) -> str:
        data = b"".join([array.get().tobytes() for array in result.gradients.values()])
        return hashlib.sha256(data).hexdigest()[:16]

    found = []
    for step in range(STEPS):
        fill(step)
        found.append(digest(window()))
    if captures:
        with engine.capture() as graph:
            window()
    for step in range(STEPS, 2 * STEPS):
        fill(step)
        found.append(digest(graph.replay() if captures else window()))
    engine.check()
    return found


@contextmanager
def group(rank: int, ranks: int, folder: str) -> Iterator[Any]:
    """The group of all ranks, with NCCL for GPUs, of a process that is in none; destroyed behind it."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(0)
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=meeting, rank=rank, world_size=ranks)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def moved_alone(xp: Any, alone: Any) -> list[set[float]]:
    """What arrives when the only rank of a group sends itself each of `SENT`: two eagerly, two by a graph's replays."""
    calls, stream = device_calls_of(alone), xp.cuda.Stream(non_blocking=True)
    source, target = (xp.zeros(SIZE, np.float32) for _ in range(2))
    xp.cuda.runtime.deviceSynchronize()  # they are made on another stream
    sent, received, theirs = calls.tensor(source), calls.tensor(target), calls.stream(stream.ptr, 0)

    def move() -> None:
        calls.all_to_all([received], [sent], theirs)

    def arrived(value: float, run: Callable[[], object]) -> set[float]:
        source.fill(value)
        run()
        return set(target.get().tolist())

    with stream:
        eager = [arrived(value, move) for value in SENT[:2]]
        stream.begin_capture()
        move()
        graph = stream.end_capture()
        return [*eager, *(arrived(value, graph.launch) for value in SENT[2:])]


def main(rank: int, folder: str) -> None:
    """Be a rank."""
    with group(rank, RANKS, folder) as both, connect(process_group=both, join_timeout=30) as exchange:
        found = found_by(exchange, captures=True)
        link = exchange.link
    print(json.dumps([link, *found]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
