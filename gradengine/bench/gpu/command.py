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
from gradengine.bench.gpu.report import GpuReport
from gradengine.bench.gpu.table import gpu_table, launch_table

__all__ = ["gpu", "show_on"]

_CONSOLE_WIDTH = 150


def gpu(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="accumulate, norm, hand-back, hand-back-bf16, step, compiled, lora, host, launches."),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=2, help="Micro-batches of a step.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks, beside the LM head.")] = 24,
    hidden: Annotated[int, typer.Option(min=8, help="Hidden size; 1024 is the 350M model's.")] = 1024,
    dtype: Annotated[str, typer.Option(help="Of the gradients: float32 or bfloat16.")] = "float32",
    odd: Annotated[bool, typer.Option("--odd", help="Sizes no multiple of 8, buffers at odd elements.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 20,
    compile_limit: Annotated[float, typer.Option(help="Seconds for each compiled variant of torch.")] = 100.0,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything here, each sample included.")] = None,
) -> None:
    """On a GPU: the 350M model's step and its parts, beside torch and CuPy by hand, on the same memory."""
    benchmarks = Benchmarks(open_gpu(), blocks, hidden, k, dtype, odd, rounds, compile_limit)
    wanted = names or ["accumulate", "norm", "step", "lora", "host"]
    failed = run(benchmarks, wanted, json, show_on(Console(width=_width())))
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    if failed:
        raise typer.Exit(1)


def show_on(console: Console) -> Callable[[GpuReport | LaunchReport], None]:
    """What prints each report as a table."""
    return lambda report: console.print(gpu_table(report) if isinstance(report, GpuReport) else launch_table(report))


def _width() -> int:
    return max(_CONSOLE_WIDTH, Console().width)
