"""`gradengine bench accumulate | clip | step | exchange | gpu`: what was measured, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradengine.bench.benchmarks import NAMES, Benchmarks, Options, as_json, run
from gradengine.bench.case import Benchmark
from gradengine.bench.device import Device, open_gpu, open_host
from gradengine.bench.exchange import exchange_variants
from gradengine.bench.launches import LaunchReport
from gradengine.bench.parts import accumulate as accumulate_variants
from gradengine.bench.parts import clip as clip_variants
from gradengine.bench.report import Report, measure
from gradengine.bench.step import step as step_variants
from gradengine.bench.table import launch_table, table_of
from gradengine.bench.workload import Workload, block_layout, equal_layout
from gradengine.bench.yardstick import Yardsticks
from gradengine.errors import CallerError
from gradengine.options import STDOUT, one_of, print_or_save, writable_json

__all__ = ["bench"]

_DTYPES = ("float32", "bfloat16")
_MAIN = ("accumulate", "norm", "step", "lora", "host")

# Relative to fp64. PyTorch takes the norm in fp32: at 91 million elements it is 7e-5 off, ours 1e-7 (column "error").
TOLERANCES = {"accumulate": 1e-5, "clip": 1e-3, "step": 1e-3, "exchange": 1e-5}
_TOLERANCE_IN_BFLOAT16 = 3e-2  # of what is clipped where it lies: its rounding is 4e-3, and torch's norm has it too

_WIDE = 100  # columns of a terminal from which on the table has room for quantiles
_GPU_WIDTH = 150

bench = typer.Typer(
    help="Time each part beside NumPy by hand and PyTorch, in one interleaved run.", no_args_is_help=True
)

Rounds = Annotated[int, typer.Option(min=1, help="Samples of each variant.")]
Blocks = Annotated[int, typer.Option(min=1, help="Transformer blocks.")]
Hidden = Annotated[int, typer.Option(min=4, help="Hidden size; 1024 is the 350M model's, 256 a quick run.")]
Tensors = Annotated[int | None, typer.Option(min=1, help="Instead of blocks: as many tensors, of --elements each.")]
Elements = Annotated[int | None, typer.Option(min=1, help="Of each of --tensors.")]
MicroBatches = Annotated[int, typer.Option("--k", min=1, help="Micro-batches of a step.")]
Hold = Annotated[int | None, typer.Option(min=1, help="Micro-batches held and folded in one pass; K if not given.")]
Dtype = Annotated[str, typer.Option(help="Of the gradients.", metavar="|".join(_DTYPES), callback=one_of(*_DTYPES))]
Json = Annotated[
    Path | None,
    typer.Option("--json", callback=writable_json, help="Write every sample here; -: to stdout, and no table."),
]


@bench.command()
def accumulate(
    k: MicroBatches = 4,
    blocks: Blocks = 6,
    hidden: Hidden = 1024,
    tensors: Tensors = None,
    elements: Elements = None,
    dtype: Dtype = "float32",
    hold: Hold = None,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """K micro-batches become one fp32 sum."""
    workload, parameters = _drawn(k, blocks, hidden, tensors, elements, dtype)
    parameters = {"k": k, **parameters, "hold": hold or k}
    variants = accumulate_variants(workload, (1, hold or k))
    _show(workload.device, Benchmark("accumulate", variants, TOLERANCES["accumulate"], parameters), rounds, json)


@bench.command()
def clip(
    blocks: Blocks = 6,
    hidden: Hidden = 1024,
    tensors: Tensors = None,
    elements: Elements = None,
    dtype: Dtype = "float32",
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """Gradients are clipped in place by their global norm."""
    workload, parameters = _drawn(1, blocks, hidden, tensors, elements, dtype)
    tolerance = TOLERANCES["clip"] if dtype == "float32" else _TOLERANCE_IN_BFLOAT16
    _show(workload.device, Benchmark("clip", clip_variants(workload), tolerance, parameters), rounds, json)


@bench.command()
def step(
    k: MicroBatches = 4,
    blocks: Blocks = 6,
    hidden: Hidden = 1024,
    tensors: Tensors = None,
    elements: Elements = None,
    dtype: Dtype = "float32",
    hold: Hold = None,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """A whole step: K micro-batches are added, checked, clipped, averaged and handed back."""
    workload, parameters = _drawn(k, blocks, hidden, tensors, elements, dtype)
    parameters = {"k": k, **parameters, "hold": hold or k}
    variants = step_variants(workload, (1, hold or k))
    _show(workload.device, Benchmark("step", variants, TOLERANCES["step"], parameters), rounds, json)


@bench.command()
def exchange(
    workers: Annotated[int, typer.Option(min=2, help="Workers, each in a process of its own.")] = 2,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Size of the gradient set, in 10^6 bytes.")] = 100.0,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """Workers of one machine sum a gradient set."""
    elements = max(1, round(megabytes * 1e6 / 128)) * 32
    parameters = {"workers": workers, "megabytes": 4 * elements / 1e6}
    host = open_host(elements)
    with exchange_variants(host, workers, elements) as variants:
        _show(host, Benchmark("exchange", variants, TOLERANCES["exchange"], parameters), rounds, json)


@bench.command()
def gpu(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Which; else {', '.join(_MAIN)}.", callback=one_of(*NAMES)),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=2, help="Micro-batches of a step.")] = Options.k,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks, beside the LM head.")] = Options.blocks,
    hidden: Annotated[int, typer.Option(min=8, help="Hidden size; 1024 is the 350M model's.")] = Options.hidden,
    dtype: Dtype = Options.dtype,
    odd: Annotated[bool, typer.Option("--odd", help="Sizes no multiple of 8, buffers at odd elements.")] = False,
    rounds: Rounds = Options.rounds,
    compile_limit: Annotated[
        float, typer.Option(help="Seconds for each compiled variant of torch.")
    ] = Options.compile_limit,
    json: Json = None,
) -> None:
    """On a GPU: the 350M model's step and its parts, beside torch and CuPy by hand, on the same memory."""
    benchmarks = Benchmarks(open_gpu(), Options(k, blocks, hidden, dtype, odd, rounds, compile_limit))
    reports: list[Report | LaunchReport] = []
    console = Console(width=max(_GPU_WIDTH, Console().width))
    show, file = (reports.append, None) if json == STDOUT else (lambda report: _print(report, console), json)
    failed = run(benchmarks, names or _MAIN, file, show)
    if json == STDOUT:
        typer.echo(as_json(reports))
    _end(failed)


def _drawn(
    k: int, blocks: int, hidden: int, tensors: int | None, elements: int | None, dtype: str
) -> tuple[Workload, dict[str, Any]]:
    """The workload on the host that the options ask for, and those of them that it is recorded by."""
    if (tensors is None) is not (elements is None):
        raise CallerError("--tensors and --elements go together", do="pass both, or neither")
    layout, size = block_layout(blocks, hidden), {"blocks": blocks, "hidden": hidden}
    if tensors is not None and elements is not None:
        layout, size = equal_layout(tensors, elements), {"tensors": tensors, "elements": elements}
    return Workload.drawn(open_host(layout.num_elements), layout, k, dtype), {**size, "dtype": dtype}


def _show(device: Device, benchmark: Benchmark, rounds: int, json: Path | None) -> None:
    report = measure(device, benchmark, rounds, Yardsticks(device))
    print_or_save(report.as_json(), json)
    if json != STDOUT:
        _print(report, Console())
    _end([f"{report.benchmark}: {variant}" for variant in report.failed])


def _print(report: Report | LaunchReport, console: Console) -> None:
    if isinstance(report, LaunchReport):
        console.print(launch_table(report))
    else:
        console.print(table_of(report, wide=console.width >= _WIDE))


def _end(failed: Sequence[str]) -> None:
    """With exit code 1, and what failed in a line each, if anything did."""
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    if failed:
        raise typer.Exit(1)
