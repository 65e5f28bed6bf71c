"""`gradengine bench accumulate | clip | step | exchange | gpu`: measures, and shows a table or writes JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradengine.bench.benchmarks import NAMES, Benchmarks, Options, run
from gradengine.bench.device import Host, open_gpu, open_host
from gradengine.bench.harness import NOISY, Benchmark, Report, as_json, measure, yardsticks
from gradengine.bench.parts import accumulate
from gradengine.bench.parts import clip as clip_variants
from gradengine.bench.step import step
from gradengine.bench.table import table_of
from gradengine.bench.workers import exchange_variants
from gradengine.bench.workload import Workload, model_layout
from gradengine.console.options import STDOUT, flag, one_of, print_or_save, writable_json
from gradengine.errors import CallerError
from gradengine.layout import GradientLayout

__all__ = ["bench"]

_DTYPES = ("float32", "bfloat16")
_MAIN = ("accumulate", "norm", "step", "lora", "host")

# Relative to fp64. PyTorch takes the norm in fp32: at 91 million elements it is 7e-5 off, ours 1e-7 (column "error").
_TOLERANCES = {"accumulate": 1e-5, "clip": 1e-3, "step": 1e-3, "exchange": 1e-5}
_TOLERANCE_IN_BFLOAT16 = 3e-2  # of what is clipped where it lies: its rounding is 4e-3, and torch's norm has it too

_BLOCKS, _HIDDEN = 6, 1024
_WIDE = 120  # columns of a terminal from which on the table has room for every column

_WHAT = "Time each part beside NumPy by hand and PyTorch, in one interleaved run."
bench = typer.Typer(
    help=f"{_WHAT} If the rounds of a ratio differ too much (upper quartile over {NOISY} times the lower one), no ratio"
    " is given: it is called noisy, with both quartiles.",
    short_help=_WHAT,
    no_args_is_help=True,
)

Rounds = Annotated[int, typer.Option(min=1, help="Samples of each variant.")]
Blocks = Annotated[int | None, typer.Option(min=1, help=f"Transformer blocks; {_BLOCKS} if not given.")]
Hidden = Annotated[int | None, typer.Option(min=4, help=f"Hidden size; {_HIDDEN} if not given, 256 is a quick run.")]
Tensors = Annotated[int | None, typer.Option(min=1, help="Instead of blocks: so many tensors, of --elements each.")]
Elements = Annotated[int | None, typer.Option(min=1, help="Elements of each of --tensors.")]
MicroBatches = Annotated[int, typer.Option("--k", min=1, help="Micro-batches of a step.")]
Hold = Annotated[int | None, typer.Option(min=1, help="Micro-batches held and folded in one pass; K if not given.")]
Dtype = Annotated[
    str, typer.Option(help="Dtype of the gradients.", metavar="|".join(_DTYPES), callback=one_of(*_DTYPES))
]
Json = Annotated[
    Path | None,
    typer.Option("--json", callback=writable_json, help="Write all samples to a file; -: to stdout, and no table."),
]


@bench.command("step", help="A whole step: add K micro-batches, check, clip, average and hand back.")
@bench.command("accumulate", help="Add K micro-batches to one fp32 sum.")
def _window(
    context: typer.Context,
    k: MicroBatches = 4,
    blocks: Blocks = None,
    hidden: Hidden = None,
    tensors: Tensors = None,
    elements: Elements = None,
    dtype: Dtype = "float32",
    hold: Hold = None,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    layout, size = _model(blocks, hidden, tensors, elements)
    host, holds = open_host(layout.num_elements), (1, hold or k)
    variants_of = {"accumulate": accumulate, "step": step}[name := str(context.info_name)]
    variants = variants_of(Workload.drawn(host, layout, k, dtype), holds)
    parameters = {"k": k, **size, "dtype": dtype, "hold": holds[1]}
    _show(host, Benchmark(name, variants, _TOLERANCES[name], parameters), rounds, json)


@bench.command()
def clip(
    blocks: Blocks = None,
    hidden: Hidden = None,
    tensors: Tensors = None,
    elements: Elements = None,
    dtype: Dtype = "float32",
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """Clip gradients in place by their global norm."""
    layout, size = _model(blocks, hidden, tensors, elements)
    host = open_host(layout.num_elements)
    variants = clip_variants(Workload.drawn(host, layout, 1, dtype))
    tolerance = _TOLERANCES["clip"] if dtype == "float32" else _TOLERANCE_IN_BFLOAT16
    _show(host, Benchmark("clip", variants, tolerance, {**size, "dtype": dtype}), rounds, json)


@bench.command()
def exchange(
    workers: Annotated[int, typer.Option(min=2, help="Workers, each in a process of its own.")] = 2,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Size of the gradient set, in 10^6 bytes.")] = 100.0,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """Sum a gradient set over workers on one machine."""
    elements = max(1, round(megabytes * 1e6 / 128)) * 32
    parameters = {"workers": workers, "megabytes": 4 * elements / 1e6}
    host = open_host(elements)
    with exchange_variants(host, workers, elements) as variants:
        _show(host, Benchmark("exchange", variants, _TOLERANCES["exchange"], parameters), rounds, json)


@bench.command()
def gpu(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Any of {', '.join(NAMES)}; if none, {', '.join(_MAIN)}.", callback=one_of(*NAMES)),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=2, help="Micro-batches of a step.")] = Options.k,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks, beside the LM head.")] = Options.blocks,
    hidden: Annotated[int, typer.Option(min=8, help="Hidden size; 1024 is the 350M model's.")] = Options.hidden,
    dtype: Dtype = Options.dtype,
    odd: Annotated[bool, flag("--odd", "Sizes that are no multiple of 8, buffers at odd elements.")] = False,
    rounds: Rounds = Options.rounds,
    compile_limit: Annotated[
        float, typer.Option(help="Seconds for each compiled variant of torch.")
    ] = Options.compile_limit,
    json: Json = None,
) -> None:
    """On a GPU: the 350M model's step and its parts, beside torch and CuPy by hand, on the same memory."""
    benchmarks = Benchmarks(open_gpu(), Options(k, blocks, hidden, dtype, odd, rounds, compile_limit))
    reports: list[Report] = []
    show, file = (reports.append, None) if json == STDOUT else (_print, json)
    failed = run(benchmarks, names or _MAIN, file, show)
    if json == STDOUT:
        typer.echo(as_json({"reports": reports}))
    _end(failed)


def _model(
    blocks: int | None, hidden: int | None, tensors: int | None, elements: int | None
) -> tuple[GradientLayout, dict[str, int]]:
    """The layout that the options ask for, and the options to record with the figures."""
    if (tensors is None) is not (elements is None):
        raise CallerError("--tensors and --elements go together", do="pass both, or neither")
    if tensors is None or elements is None:
        blocks, hidden = blocks or _BLOCKS, hidden or _HIDDEN
        return model_layout(blocks, hidden, head=False), {"blocks": blocks, "hidden": hidden}
    if blocks is not None or hidden is not None:
        ignored = "--hidden" if blocks is None else "--blocks"
        raise CallerError(f"{ignored} and --tensors exclude each other", got="both", expected="one of them")
    return GradientLayout.of([(elements,)] * tensors), {"tensors": tensors, "elements": elements}


def _show(host: Host, benchmark: Benchmark, rounds: int, json: Path | None) -> None:
    report = measure(host, benchmark, rounds, yardsticks(host))
    print_or_save(as_json(report), json)
    if json != STDOUT:
        _print(report)
    _end([f"{report.benchmark}: {variant}" for variant in report.failed])


def _print(report: Report) -> None:
    console = Console()
    console.print(table_of(report, wide=console.width >= _WIDE))


def _end(failed: Sequence[str]) -> None:
    """Exit with code 1 if anything failed, after a line for each failure."""
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    if failed:
        raise typer.Exit(1)
