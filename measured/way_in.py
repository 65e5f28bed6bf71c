"""What it costs to look at gradients: microseconds a tensor, for each framework that is installed here.

Run: python measured/way_in.py [--tensors 218] [--rounds 60] [--json measured/results/cpu-2core-way-in.json]

Small tensors, so that nothing but the looking is timed. *same*: the same objects at each window. *new*: new objects at
each window, as torch makes them after `zero_grad()` and JAX always; their memory is often where others' was. What an
accumulator does before it adds anything is timed. Frameworks take turns in each round; medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_variants import Lent
from rich.console import Console
from rich.table import Table

from gradengine import GradientLayout, RawBuffer
from gradengine.accumulate.intake import Intake
from gradengine.bench.machine import machine, versions
from gradengine.kernels import kernels_for
from gradengine.layout.slots import Span

SHAPE = (8, 8)


def of_numpy(count: int) -> Callable[[], list[Any]]:
    """NumPy arrays."""
    return lambda: [np.zeros(SHAPE, np.float32) for _ in range(count)]


def of_pointers(count: int) -> Callable[[], list[Any]]:
    """Raw pointers."""
    return lambda: [RawBuffer(a.ctypes.data, a.size, "float32", owner=a) for a in of_numpy(count)()]


def of_dlpack(count: int) -> Callable[[], list[Any]]:
    """Producers of a framework that is not known."""
    return lambda: [Lent(a) for a in of_numpy(count)()]


def of_torch(count: int, dtype: str) -> Callable[[], list[Any]]:
    """Tensors."""
    torch = importlib.import_module("torch")
    return lambda: [torch.zeros(SHAPE, dtype=getattr(torch, dtype)) for _ in range(count)]


def of_jax(count: int) -> Callable[[], list[Any]]:
    """Arrays as a jitted function returns them."""
    jax = importlib.import_module("jax")
    add = jax.jit(lambda arrays: [array + 1 for array in arrays])
    given = [jax.numpy.zeros(SHAPE) for _ in range(count)]
    return lambda: jax.block_until_ready(add(given))


def cases(count: int) -> dict[str, Callable[[], list[Any]]]:
    """What makes a micro-batch, by framework."""
    found = {"numpy": of_numpy(count), "raw pointers": of_pointers(count), "another by DLPack": of_dlpack(count)}
    if importlib.util.find_spec("torch"):
        found |= {"torch": of_torch(count, "float32"), "torch bfloat16": of_torch(count, "bfloat16")}
    if importlib.util.find_spec("jax"):
        found["jax"] = of_jax(count)
    return found


def measured(count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds a tensor: framework -> {"same", "new"}."""
    device, whole = kernels_for("cpu").device, Span.of(GradientLayout.of([SHAPE] * count).slots, "the layout")
    makers = cases(count)
    kinds = [(framework, kind) for framework in makers for kind in ("same", "new")]
    arrivals = {which: Intake(device, device.allocate(1)) for which in kinds}
    kept = {framework: make() for framework, make in makers.items()}
    samples: dict[str, dict[str, list[float]]] = {framework: {"same": [], "new": []} for framework in makers}
    for _ in range(rounds):
        for framework, make in makers.items():
            for kind, arrays in (("same", kept[framework]), ("new", make())):
                start = time.perf_counter()
                arrivals[framework, kind].contribution(whole, arrays)
                samples[framework][kind].append(1e6 * (time.perf_counter() - start) / count)
    return {f: {kind: statistics.median(taken) for kind, taken in kinds.items()} for f, kinds in samples.items()}


def main() -> None:
    """Measure, show, and write where it is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, default=218)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measured(arguments.tensors, arguments.rounds)
    table = Table("framework", "same objects, us", "new objects, us", title=f"{arguments.tensors} tensors of {SHAPE}")
    for framework, kinds in found.items():
        table.add_row(framework, *(f"{kinds[kind]:.2f}" for kind in ("same", "new")))
    Console().print(table)
    if arguments.json:
        report = {"us_a_tensor": found, "tensors": arguments.tensors, "machine": machine(), "versions": versions()}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
