"""A small model's step beside an older commit's, a NumPy loop that checks nothing, and torch: medians of ratios.

Run: python measured/small_models.py OLDER [--tensors 34] [--elements 100] [--rounds 400] [--json FILE]

OLDER is a checkout of the older commit: git worktree add OLDER COMMIT. Both versions run in one process. In each round
every variant runs once, in a random order, after 32 MB of other memory were copied. Four micro-batches of fp32 are
added, checked, averaged and clipped. The loop and torch clip the sum, which saves them the average.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradengine.bench.machine import commit_of, machine, versions

MICRO_BATCHES = 4
Run = Callable[[], object]


def loaded(folder: Path) -> Any:
    """Return the package as it is in that checkout; modules that were imported before keep their own."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "gradengine"}
    sys.path.insert(0, str(folder))
    found = importlib.import_module("gradengine")
    if not Path(found.__file__ or "").is_relative_to(folder):
        raise SystemExit(f"{folder} has no gradengine/")
    sys.path.pop(0)
    sys.modules.update(ours)
    return found


def engine_step(package: Any, batches: list[list[Any]], hold: int) -> Run:
    """Return a step of that package's engine."""
    layout = package.GradientLayout.of([array.shape for array in batches[0]])
    engine = package.GradientEngine(layout, max_norm=1.0, micro_batches=MICRO_BATCHES, hold=hold)

    def run() -> object:
        for gradients in batches:
            engine.add(gradients)
        return engine.step()

    return run


def numpy_step(batches: list[list[Any]]) -> Run:
    """Return a loop over NumPy arrays that checks nothing."""
    sums = [np.empty_like(array) for array in batches[0]]

    def run() -> float:
        for total in sums:
            total[...] = 0
        for gradients in batches:
            for total, gradient in zip(sums, gradients, strict=True):
                np.add(total, gradient, out=total)
        norm = math.sqrt(sum(float(np.linalg.norm(total)) ** 2 for total in sums)) / MICRO_BATCHES
        factor = np.float32(min(1.0, 1.0 / norm) / MICRO_BATCHES)
        for total in sums:
            np.multiply(total, factor, out=total)
        return norm

    return run


def torch_step(batches: list[list[Any]]) -> Run:
    """Return torch's foreach functions and clip_grad_norm_."""
    tensors = [[torch.from_numpy(array) for array in gradients] for gradients in batches]
    parameters = [torch.nn.Parameter(torch.zeros(()).expand(array.shape)) for array in batches[0]]
    for parameter in parameters:
        parameter.grad = torch.zeros(parameter.shape)
    sums = [parameter.grad for parameter in parameters]

    def run() -> object:
        torch._foreach_zero_(sums)
        for gradients in tensors:
            torch._foreach_add_(sums, gradients)
        return torch.nn.utils.clip_grad_norm_(parameters, MICRO_BATCHES * 1.0, error_if_nonfinite=True, foreach=True)

    return run


def measured(variants: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return microseconds of each variant in each round, without ten rounds to warm up."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    names, source, other = list(variants), np.ones(1 << 23, np.float32), np.empty(1 << 23, np.float32)
    for _ in range(rounds + 10):
        random.shuffle(names)
        np.copyto(other, source)
        for name in names:
            start = time.perf_counter()
            variants[name]()
            samples[name].append(1e6 * (time.perf_counter() - start))
    return {name: found[10:] for name, found in samples.items()}


def main() -> None:
    """Measure, show, and write where it is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("older", type=Path)
    parser.add_argument("--tensors", type=int, default=34)
    parser.add_argument("--elements", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    draw = np.random.default_rng(0).standard_normal
    size, count = arguments.elements, arguments.tensors
    batches = [[draw(size, np.float32) for _ in range(count)] for _ in range(MICRO_BATCHES)]
    ours, older = importlib.import_module("gradengine"), loaded(arguments.older.resolve())
    variants = {f"ours hold={hold}": engine_step(ours, batches, hold) for hold in (1, 4)}
    variants |= {f"older hold={hold}": engine_step(older, batches, hold) for hold in (1, 4)}
    variants |= {"numpy": numpy_step(batches), "torch": torch_step(batches)}
    samples = measured(variants, arguments.rounds)
    medians = {name: statistics.median(found) for name, found in samples.items()}
    ratios = {
        f"{mine} / {other}": statistics.median(a / b for a, b in zip(samples[mine], samples[other], strict=True))
        for mine in list(variants)[:4]
        for other in ("numpy", "torch", *(["older" + mine[4:]] if mine.startswith("ours") else []))
    }
    for name, value in (medians | ratios).items():
        print(f"{name:32} {value:.3g}")
    if arguments.json:
        report = {"medians_us": medians, "ratios": ratios, "tensors": count, "elements": size}
        report |= {"rounds": arguments.rounds, "older": commit_of(arguments.older)}
        report |= {"machine": machine(), "versions": versions()}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
