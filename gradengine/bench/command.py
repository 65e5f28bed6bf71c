"""The command `gradengine bench`, which measures a part of the step and shows a table or writes JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from gradengine.bench.device import Device, open_gpu, open_host
from gradengine.bench.harness import NOISY, Benchmark, Progress, Variant, as_json, measure, silent, yardstick
from gradengine.bench.parts import accumulate, clip, norm
from gradengine.bench.step import step
from gradengine.bench.table import table_of
from gradengine.bench.workers import exchange_variants
from gradengine.bench.workload import Workload, model_layout
from gradengine.console.options import STDOUT, one_of, print_or_save, writable_json
from gradengine.errors import CallerError
from gradengine.layout import GradientLayout

# Largest relative errors by dtype. They are wide because torch computes a norm in the gradients' dtype.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 3e-2}
_TOLERANCE_OF_SUMS = 1e-5
_ON_GPU, _ON_HOST = 24, 6  # transformer blocks of the 350M model, and a quarter of them
_WIDE = 120  # terminal columns that the full table needs

_WHAT = "Time each part of the step beside NumPy by hand and PyTorch, in one interleaved run."
bench = typer.Typer(
    help=f"{_WHAT} If the rounds of a ratio differ too much (upper quartile over {NOISY} times the lower one), the"
    " table shows both quartiles as noisy instead of the ratio.",
    short_help=_WHAT,
    no_args_is_help=True,
)

gpu = typer.Typer(
    help="Time the 350M model's step and its parts on a GPU, beside torch and CuPy by hand, on the same memory.",
    no_args_is_help=True,
)
bench.add_typer(gpu, name="gpu")

_VARIANTS: Mapping[str, Callable[[Workload, Sequence[int]], list[Variant]]] = {
    "step": step,
    "accumulate": accumulate,
    "norm": lambda load, _: norm(load),
    "clip": lambda load, _: clip(load),
}

Rounds = Annotated[int, typer.Option(min=1, help="Number of samples of each variant.")]
Blocks = Annotated[
    int | None,
    typer.Option(min=1, help=f"Number of transformer blocks (default: {_ON_HOST}, on a GPU {_ON_GPU} and an LM head)."),
]
Hidden = Annotated[int, typer.Option(min=4, help="Hidden size, a multiple of 4 (256 for a quick run).")]
Tensors = Annotated[int | None, typer.Option(min=1, help="Number of equal tensors to use instead of a transformer.")]
Elements = Annotated[int, typer.Option(min=1, help="Number of elements of each of the --tensors.")]
MicroBatches = Annotated[int, typer.Option("--k", min=1, help="Number of micro-batches of a step.")]
Hold = Annotated[
    int | None, typer.Option(min=1, help="Number of micro-batches added in one pass (default: all of the step).")
]
Dtype = Annotated[
    str, typer.Option(help="Dtype of the gradients.", metavar="|".join(_TOLERANCES), callback=one_of(*_TOLERANCES))
]
Json = Annotated[
    Path | None,
    typer.Option("--json", callback=writable_json, help="JSON file for all samples ('-' for stdout, without a table)."),
]


def _window(
    context: typer.Context,
    k: MicroBatches = 4,
    blocks: Blocks = None,
    hidden: Hidden = 1024,
    tensors: Tensors = None,
    elements: Elements = 10_000,
    dtype: Dtype = "float32",
    hold: Hold = None,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    _run(context, blocks, hidden, tensors, elements, dtype, rounds, json, {"k": k, "hold": hold or k})


def _once(
    context: typer.Context,
    blocks: Blocks = None,
    hidden: Hidden = 1024,
    tensors: Tensors = None,
    elements: Elements = 10_000,
    dtype: Dtype = "float32",
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    _run(context, blocks, hidden, tensors, elements, dtype, rounds, json, {})


for _app in (bench, gpu):
    _app.command("step", help="Make a step: add K micro-batches, check, clip, average, write the result.")(_window)
    _app.command("accumulate", help="Add K micro-batches to one fp32 sum.")(_window)
    _app.command("norm", help="Compute the global norm of gradients.")(_once)
    _app.command("clip", help="Clip gradients in place by their global norm.")(_once)


def _run(
    context: typer.Context,
    blocks: int | None,
    hidden: int,
    tensors: int | None,
    elements: int,
    dtype: str,
    rounds: int,
    json: Path | None,
    window: Mapping[str, int],
) -> None:
    """Run the benchmark on the device. The context names both."""
    is_gpu, name = context.parent is not None and context.parent.info_name == "gpu", str(context.info_name)
    blocks = blocks or (_ON_GPU if is_gpu else _ON_HOST)
    if tensors is None:
        size, layout = {"blocks": blocks, "hidden": hidden}, model_layout(blocks, hidden, head=is_gpu)
    elif context.params["blocks"] is not None:
        raise CallerError("--blocks and --tensors exclude each other", got="both", expected="one of them")
    else:
        size, layout = {"tensors": tensors, "elements": elements}, GradientLayout.of([(elements,)] * tensors)
    device = open_gpu() if is_gpu else open_host(layout.num_elements)
    load = Workload.drawn(device, layout, window.get("k", 1), dtype)
    variants = _VARIANTS[name](load, (1, window.get("hold", 1)))
    parameters = {**size, "dtype": dtype, **window}
    time = "device" if is_gpu and tensors is None else "wall"  # small models are limited by the host
    _measure(device, Benchmark(name, variants, _TOLERANCES[dtype], parameters, time), rounds, json)


@bench.command()
def exchange(
    workers: Annotated[int, typer.Option(min=2, help="Number of workers, each a process.")] = 2,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Size of the gradient set, in 10^6 bytes.")] = 100.0,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """Sum a gradient set over workers on one machine."""
    elements = max(1, round(megabytes * 1e6 / 128)) * 32
    host, parameters = open_host(elements), {"workers": workers, "megabytes": 4 * elements / 1e6}
    with exchange_variants(host, workers, elements) as variants:
        _measure(host, Benchmark("exchange", variants, _TOLERANCE_OF_SUMS, parameters), rounds, json)


def _measure(device: Device, benchmark: Benchmark, rounds: int, json: Path | None) -> None:
    """Measure, then show or write the report. The exit code is 1 if a variant failed."""
    with _progress(benchmark.name, json) as progress:
        report = measure(device, benchmark, rounds, [yardstick(device)], progress)
    print_or_save(as_json(report), json)
    if json != STDOUT:
        console = Console()
        console.print(table_of(report, wide=console.width >= _WIDE))
    for variant in report.failed:
        typer.echo(f"failed: {report.benchmark}: {variant}", err=True)
    if report.failed:
        raise typer.Exit(1)


@contextmanager
def _progress(name: str, json: Path | None) -> Iterator[Progress]:
    """Show on stderr what runs, if stderr is a terminal. It draws only between samples, outside the measured time."""
    if json == STDOUT or not sys.stderr.isatty():
        yield silent
        return
    columns = TextColumn(f"{name}: {{task.description}}"), BarColumn(), MofNCompleteColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False) as bar:
        task = bar.add_task("")
        yield lambda what, number, of: bar.update(task, description=what, completed=number, total=of, refresh=True)
