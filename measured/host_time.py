"""What our calls cost the host on a GPU, where kernels take no time; beside torch's own host time for the same work.

Run: make host-time, which needs no GPU: CuPy itself works over tests/real_cupy's driver, whose kernels are not run. All
else is as on a GPU but the driver's own part of a call. On a GPU: PYTHONPATH=. python measured/host_time.py. torch's
calls are those of its CPU build, on as many tensors of one element, so that next to nothing is computed.

Microseconds of the calling thread, medians of calls that take turns.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from gradengine import GradientEngine, GradientLayout
from gradengine.accumulate import groups
from gradengine.bench.machine import machine, versions

COUNTS = (34, 218, 1000)
MICRO_BATCHES = 4
Calls = Mapping[str, Callable[[], float]]  # name -> seconds that one call took


def timed(call: Callable[[], object]) -> float:
    """Seconds of this thread that a call took."""
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def ours(count: int) -> Calls:
    """Our calls for as many CuPy arrays; `add` stands for each of a window's."""
    xp = importlib.import_module("cupy")
    layout = GradientLayout.of([(1,)] * count)

    def arrays() -> list[Any]:
        return [xp.zeros((1,), np.float32) for _ in range(count)]

    known, out = [arrays() for _ in range(MICRO_BATCHES)], arrays()

    def engine(hold: int = 1) -> GradientEngine:
        return GradientEngine(layout, "cuda", max_norm=1.0, micro_batches=MICRO_BATCHES, hold=hold)

    def adds(made: GradientEngine, batches: Callable[[], list[Any]]) -> float:
        taken = sum(timed(lambda: made.add(batch)) for batch in batches())  # noqa: B023  (called at once)
        made.step()
        return taken / MICRO_BATCHES

    def step(made: GradientEngine, out: list[Any] | None = None) -> float:
        for batch in known:
            made.add(batch)
        return timed(lambda: made.step(out))

    def window(made: GradientEngine) -> None:
        for batch in known:
            made.add(batch)
        made.step()

    graph_of = engine()
    with graph_of.capture() as graph:
        for batch in known:
            graph_of.add(batch)
        graph_of.step()
    # As in a model whose blocks of nine tensors are too large to be joined with others.
    blocks = GradientLayout.of({f"layers.{i // 9}.{i % 9}": (1,) for i in range(count)})
    with patch.object(groups, "JOINED", 0):
        hooked = GradientEngine(blocks, "cuda", max_norm=1.0, micro_batches=MICRO_BATCHES)
        _ = hooked.accumulator.groups

    def note(arrays: list[Any]) -> None:
        with hooked.micro_batch() as micro_batch:
            for slot, array in zip(reversed(blocks.slots), arrays, strict=True):
                if micro_batch.note(slot.name, array):
                    micro_batch.add_noted()

    def notes() -> float:
        batches = [arrays() for _ in range(MICRO_BATCHES)]
        taken = sum(timed(lambda: note(batch)) for batch in batches)  # noqa: B023  (called at once)
        hooked.step()
        return taken / MICRO_BATCHES

    first, second, third, fourth, fifth, sixth = engine(), engine(), engine(hold=4), engine(), engine(), engine()
    return {
        "add, the same arrays": lambda: adds(first, lambda: known),
        "add, new arrays": lambda: adds(second, lambda: [arrays() for _ in range(MICRO_BATCHES)]),
        "attach: noted, added by blocks": notes,
        "add, the same arrays, hold=4": lambda: adds(third, lambda: known),
        "step": lambda: step(fourth),
        "step(out=)": lambda: step(fifth, out),
        "4 adds and a step": lambda: timed(lambda: window(sixth)),
        "replay": lambda: timed(graph.replay),
        "replay(check=False)": lambda: timed(lambda: graph.replay(check=False)),
    }


def torchs(count: int) -> Calls:
    """Calls of torch for the same work."""
    torch = importlib.import_module("torch")
    from gradengine.torch import attach, layout_of  # noqa: PLC0415  (an environment need not have torch)

    torch.set_num_threads(1)
    sums, gradients = ([torch.ones(1) for _ in range(count)] for _ in range(2))
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(count)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

    weights = [[torch.nn.Parameter(torch.ones(1)) for _ in range(count)] for _ in range(2)]
    engine = GradientEngine(layout_of(weights[1]), micro_batches=MICRO_BATCHES)
    attached = attach(weights[1], engine)

    def backward(parameters: list[Any]) -> float:
        loss = torch.cat(parameters).sum()
        taken = timed(loss.backward)
        if parameters is weights[0]:
            for parameter in parameters:
                parameter.grad = None
        elif engine.accumulator.accumulated_count == MICRO_BATCHES:
            attached.step()
            for parameter in parameters:
                parameter.grad = None
        return taken

    def window() -> None:
        for _ in range(MICRO_BATCHES):
            torch._foreach_add_(sums, gradients)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)

    return {
        "torch foreach_add_": lambda: timed(lambda: torch._foreach_add_(sums, gradients)),
        "torch clip_grad_norm_": lambda: timed(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)),
        "torch 4 adds and a clip": lambda: timed(window),
        "torch backward": lambda: backward(weights[0]),
        "torch backward, attach on the CPU": lambda: backward(weights[1]),
    }


def measured(calls: Calls, rounds: int) -> dict[str, float]:
    """Microseconds of each call; Python's collector runs between the turns, as timeit has it."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 12):  # arrays that are new at each call are taken by their form from the ninth on
        gc.collect()
        gc.disable()
        for name, call in calls.items():
            seconds = call()
            if turn >= 12:
                samples[name].append(1e6 * seconds)
        gc.enable()
    return {name: round(statistics.median(taken), 1) for name, taken in samples.items()}


def rows(rounds: int) -> dict[int, dict[str, float]]:
    """Number of tensors -> microseconds by call, of what this environment has."""
    has_cupy, has_torch = (importlib.util.find_spec(name) is not None for name in ("cupy", "torch"))
    found: dict[int, dict[str, float]] = {}
    for count in COUNTS:
        found[count] = measured(ours(count), rounds) if has_cupy else {}
        found[count] |= measured(torchs(count), rounds) if has_torch else {}
    return found


def main() -> None:
    """Measure here, and torch in another environment where one is given; show, and write where it is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--torch", type=Path, help="the Python of an environment that has torch, where this has none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if importlib.util.find_spec("real_cupy") and importlib.util.find_spec("cupy"):
        importlib.import_module("real_cupy.loaded").be_idle()
    found = rows(arguments.rounds)
    if arguments.torch:
        command = [arguments.torch, __file__, "--rounds", str(arguments.rounds), "--json", "/dev/stdout"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  (our own)
        for count, row in json.loads(told[told.index("{") :])["us"].items():
            found[int(count)] |= row
    print(f"{'us of the host, tensors:':34}", *(f"{count:9}" for count in COUNTS))
    for name in found[COUNTS[0]]:
        print(f"{name:34}", *(f"{found[count][name]:9.1f}" for count in COUNTS))
    if arguments.json:
        sys.stdout.flush()
        report = {"us": found, "machine": machine(), "versions": versions()}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
