"""`python -m gradengine.bench step --json step.json`: the GPU's benchmarks where typer and rich are not installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradengine.bench.benchmarks import NAMES, Benchmarks, Options, run
from gradengine.bench.device import Gpu, open_gpu
from gradengine.bench.harness import Report

__all__ = ["benchmarks_of", "parser"]

_SMALL_ELEMENTS = 1 << 14


def parser() -> argparse.ArgumentParser:
    """The options, which mean what those of `gradengine bench gpu` do."""
    made = argparse.ArgumentParser(prog="python -m gradengine.bench", description=__doc__)
    made.add_argument("names", nargs="+", help=f"any of {', '.join(NAMES)}")
    made.add_argument("--blocks", type=int, default=Options.blocks)
    made.add_argument("--dtype", default=Options.dtype, choices=["float32", "bfloat16"])
    made.add_argument("--odd", action="store_true", help="sizes that are no multiple of 8, buffers at odd elements")
    made.add_argument("--rounds", type=int, default=Options.rounds)
    made.add_argument("--compile-limit", type=float, default=Options.compile_limit, help="seconds for each variant")
    made.add_argument("--small", action="store_true", help="small sizes, to try that all runs; figures mean nothing")
    made.add_argument("--json", type=Path)
    return made


def benchmarks_of(given: argparse.Namespace, gpu: Gpu) -> Benchmarks:
    """The benchmarks with these options, on a device."""
    options = Options(**{name: getattr(given, name) for name in ("blocks", "dtype", "odd", "rounds", "compile_limit")})
    if given.small:
        gpu.scratch = gpu.copied = _SMALL_ELEMENTS
        options = replace(options, blocks=1, hidden=16, rounds=2, lora_hidden=48, tensors=(3, 5), elements=50)
    return Benchmarks(gpu, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; 1 if something failed."""
    given = parser().parse_args(arguments)
    failed = run(benchmarks_of(given, open_gpu()), given.names, given.json, _show)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _show(report: Report) -> None:
    print(f"{report.benchmark}: {len(report.rows)} variants, {len(report.absent)} absent", flush=True)


if __name__ == "__main__":
    sys.exit(main())
