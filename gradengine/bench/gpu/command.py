"""`gradengine bench gpu accumulate norm hand-back step ...`: the GPU's benchmarks, several in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradengine.bench.gpu.benchmarks import Benchmarks, run
from gradengine.bench.gpu.device import open_gpu
from gradengine.bench.gpu.launches import LaunchReport
from gradengine.bench.gpu.report import GpuReport, reports_as_json
from gradengine.bench.gpu.table import gpu_table, launch_table
from gradengine.bench.options import DTYPES, STDOUT, one_of, writable_json

__all__ = ["NAMES", "gpu", "show_on"]

NAMES = ("accumulate", "norm", "hand-back", "hand-back-bf16", "step", "compiled", "lora", "host", "launches")

_MAIN = ("accumulate", "norm", "step", "lora", "host")
_CONSOLE_WIDTH = 150


def gpu(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Which; else {', '.join(_MAIN)}.", callback=one_of(*NAMES)),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=2, help="Micro-batches of a step.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks, beside the LM head.")] = 24,
    hidden: Annotated[int, typer.Option(min=8, help="Hidden size; 1024 is the 350M model's.")] = 1024,
    dtype: Annotated[
        str, typer.Option(metavar="|".join(DTYPES), callback=one_of(*DTYPES), help="Of the gradients.")
    ] = "float32",
    odd: Annotated[bool, typer.Option("--odd", help="Sizes no multiple of 8, buffers at odd elements.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 20,
    compile_limit: Annotated[float, typer.Option(help="Seconds for each compiled variant of torch.")] = 100.0,
    json: Annotated[
        Path | None,
        typer.Option("--json", callback=writable_json, help="Write every sample here; -: to stdout, and no table."),
    ] = None,
) -> None:
    """On a GPU: the 350M model's step and its parts, beside torch and CuPy by hand, on the same memory."""
    benchmarks = Benchmarks(open_gpu(), blocks, hidden, k, dtype, odd, rounds, compile_limit)
    reports: list[GpuReport | LaunchReport] = []
    show, file = (reports.append, None) if json == STDOUT else (show_on(Console(width=_width())), json)
    failed = run(benchmarks, names or _MAIN, file, show)
    if json == STDOUT:
        typer.echo(reports_as_json(reports))
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    if failed:
        raise typer.Exit(1)


def show_on(console: Console) -> Callable[[GpuReport | LaunchReport], None]:
    """What prints each report as a table."""
    return lambda report: console.print(gpu_table(report) if isinstance(report, GpuReport) else launch_table(report))


def _width() -> int:
    return max(_CONSOLE_WIDTH, Console().width)
