"""`gradengine bench accumulate | clip | step | exchange | gpu`: what was measured, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from gradengine.bench.accumulate import accumulate_cases
from gradengine.bench.case import Absent, Case
from gradengine.bench.clip import clip_cases
from gradengine.bench.exchange import exchange_cases
from gradengine.bench.gpu.command import gpu
from gradengine.bench.options import DTYPES, STDOUT, one_of, print_or_save, writable_json
from gradengine.bench.report import Report, Row, measure
from gradengine.bench.step import step_cases
from gradengine.bench.workload import Workload, block_layout
from gradengine.bench.yardstick import yardsticks

__all__ = ["bench"]

# Relative to fp64. PyTorch takes the norm in fp32: at 91 million elements it is 7e-5 off, ours 1e-7 (column "error").
TOLERANCES = {"accumulate": 1e-5, "clip": 1e-3, "step": 1e-3, "exchange": 1e-5}
_TOLERANCE_IN_BFLOAT16 = 3e-2  # of what is clipped where it lies: its rounding is 4e-3, and torch's norm has it too

bench = typer.Typer(
    help="Time each part beside NumPy by hand and PyTorch, in one interleaved run.", no_args_is_help=True
)
bench.command()(gpu)

_WIDE = 100  # columns of a terminal from which on the table has room for quantiles

Rounds = Annotated[int, typer.Option(min=1, help="Samples of each variant.")]
Blocks = Annotated[int, typer.Option(min=1, help="Transformer blocks.")]
Hidden = Annotated[int, typer.Option(min=4, help="Hidden size; 1024 is the 350M model's, 256 a quick run.")]
MicroBatches = Annotated[int, typer.Option("--k", min=1, help="Micro-batches of a step.")]
Hold = Annotated[int | None, typer.Option(min=1, help="Micro-batches held and folded in one pass; K if not given.")]
Dtype = Annotated[str, typer.Option(help="Of the gradients.", metavar="|".join(DTYPES), callback=one_of(*DTYPES))]
Json = Annotated[
    Path | None,
    typer.Option("--json", callback=writable_json, help="Write every sample here; -: to stdout, and no table."),
]


@bench.command()
def accumulate(
    k: MicroBatches = 4,
    blocks: Blocks = 6,
    hidden: Hidden = 1024,
    dtype: Dtype = "float32",
    hold: Hold = None,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """K micro-batches become one fp32 sum."""
    workload = Workload.random(block_layout(blocks, hidden), k, dtype)
    parameters = {"k": k, "blocks": blocks, "hidden": hidden, "dtype": dtype, "hold": hold or k}
    _run("accumulate", accumulate_cases(workload, hold or k), workload.layout.num_elements, rounds, parameters, json)


@bench.command()
def clip(
    blocks: Blocks = 6, hidden: Hidden = 1024, dtype: Dtype = "float32", rounds: Rounds = 15, json: Json = None
) -> None:
    """Gradients are clipped in place by their global norm."""
    workload = Workload.random(block_layout(blocks, hidden), 1, dtype)
    parameters = {"blocks": blocks, "hidden": hidden, "dtype": dtype}
    tolerance = _TOLERANCE_IN_BFLOAT16 if dtype == "bfloat16" else None
    _run("clip", clip_cases(workload), workload.layout.num_elements, rounds, parameters, json, tolerance)


@bench.command()
def step(
    k: MicroBatches = 4,
    blocks: Blocks = 6,
    hidden: Hidden = 1024,
    dtype: Dtype = "float32",
    hold: Hold = None,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """A whole step: K micro-batches are added, checked, clipped, averaged and handed back."""
    workload = Workload.random(block_layout(blocks, hidden), k, dtype)
    parameters = {"k": k, "blocks": blocks, "hidden": hidden, "dtype": dtype, "hold": hold or k}
    _run("step", step_cases(workload, hold or k), workload.layout.num_elements, rounds, parameters, json)


@bench.command()
def exchange(
    workers: Annotated[int, typer.Option(min=2, help="Workers, each in a process of its own.")] = 2,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Size of the gradient set, in 10^6 bytes.")] = 100.0,
    rounds: Rounds = 15,
    json: Json = None,
) -> None:
    """Workers of one machine sum a gradient set."""
    elements = max(1, round(megabytes * 1e6 / 128)) * 32
    parameters = {"workers": workers, "megabytes": 4e-6 * elements}
    with exchange_cases(workers, elements) as cases:
        _run("exchange", cases, elements, rounds, parameters, json)


def _run(
    name: str,
    cases: list[Case | Absent],
    elements: int,
    rounds: int,
    parameters: Mapping[str, object],
    json: Path | None,
    tolerance: float | None = None,
) -> None:
    entries = [*cases, *yardsticks(name, elements)]
    report = measure(name, entries, rounds, tolerance=tolerance or TOLERANCES[name], parameters=parameters)
    print_or_save(report.as_json(), json)
    if json != STDOUT:
        console = Console()
        console.print(table_of(report, wide=console.width >= _WIDE))


def table_of(report: Report, *, wide: bool = True) -> Table:
    """The report as a table; absent variants are named below. A narrow one leaves the quantiles to --json."""
    with_memory = any(row.arenas is not None for row in report.rows)
    parameters = ", ".join(f"{name} {value}" for name, value in report.parameters.items())
    table = Table(
        title=f"{report.benchmark}: {parameters}",
        caption=_caption(report, with_memory),
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
    )
    table.add_column("variant", no_wrap=True)
    quantiles = ("p10-90",) if wide else ()
    for header in ("ms", *quantiles, "MB", "GB/s", "triad", *_ratio_headers(report), "error"):
        table.add_column(header, justify="right")
    if with_memory:
        table.add_column("arenas", justify="right")
    for row in report.rows:
        table.add_row(row.variant, *_cells(row, with_memory, wide))
    return table


def _ratio_headers(report: Report) -> list[str]:
    return [f"/ {base.removeprefix('ours ')}" for base in report.bases]


def _cells(row: Row, with_memory: bool, wide: bool) -> list[str]:
    cells = [
        f"{1e3 * row.median_s:.1f}",
        *([f"{1e3 * row.p10_s:.0f}-{1e3 * row.p90_s:.0f}"] if wide else []),
        f"{row.bytes / 1e6:.0f}",
        f"{row.gb_per_s:.1f}",
        "" if row.of_triad is None else f"{row.of_triad:.0%}",
        *(f"{ratio:.2f}" for ratio in row.ratios.values()),
        f"{row.error:.0e}",
    ]
    if with_memory:
        cells.append("" if row.arenas is None else f"{row.arenas:.2f}")
    return cells


def _caption(report: Report, with_memory: bool) -> str:
    lines = [
        *(f"absent: {absent.variant}: {absent.why}" for absent in report.absent),
        f"all results within {report.tolerance:g} of fp64's before anything was timed",
        "ms: median; MB: bytes moved, counted; / x: time of the row / time of our x, above 1 ours is faster",
    ]
    if with_memory:
        lines.append("arenas: memory beyond the gradients at its peak, in fp32 gradient sets")
    load = "" if report.load is None else f", load {report.load:.1f} before"
    lines.append(f"{report.machine['cpu']}, {report.machine['cores']} cores{load}; {_versions(report)}")
    return "\n".join(lines)


def _versions(report: Report) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items() if version and name != "commit")
