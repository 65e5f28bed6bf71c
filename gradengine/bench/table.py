"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.table import Table

from gradengine.bench.harness import COUNTED, Report, Row

__all__ = ["table_of"]

_ON_A_GPU: Mapping[str, Callable[[Row], str]] = {
    "device ms": lambda row: f"{1e3 * row.device_s:.3f}",
    "wall ms": lambda row: f"{1e3 * row.wall_s:.3f}",
    "host us": lambda row: f"{1e6 * row.host_s:.0f}",
}
_ON_A_HOST: Mapping[str, Callable[[Row], str]] = {
    "ms": lambda row: _ms(row.median_s),
    "p10-90": lambda row: f"{_ms(row.p10_s)}-{_ms(row.p90_s)}",
}


def table_of(report: Report, *, wide: bool = True) -> Table:
    """The report as a table; absent variants are named below. A narrow one leaves the quantiles to --json."""
    if isinstance(report.rows, Mapping):
        counts = {variant: [str(found) for found in row.values()] for variant, row in report.rows.items()}
        return _table(report, COUNTED, counts, [])
    columns, has_memory = _columns(report, report.rows, wide=wide), any(row.arenas is not None for row in report.rows)
    memory = "copy" if "gpu" in report.machine else "triad"
    lines = [
        f"all results within {report.tolerance:g} of fp64's before anything was timed",
        f"MB: bytes moved, counted; GB/s and / x: by the median {report.time} time",
        "/ x: time of the row / time of our x, above 1 ours is faster",
        f"of {memory}: fraction of the memory bandwidth that the {memory} reaches in this run",
        *(["arenas: memory beyond the gradients at its peak, in fp32 gradient sets"] if has_memory else []),
    ]
    cells = {row.variant: [cell(row) for cell in columns.values()] for row in report.rows}
    return _table(report, columns, cells, lines)


def _columns(report: Report, rows: Sequence[Row], *, wide: bool) -> dict[str, Callable[[Row], str]]:
    """Header -> what stands below it."""
    on_a_gpu = "gpu" in report.machine
    columns = dict(_ON_A_GPU if on_a_gpu else _ON_A_HOST)
    if not wide:
        columns.pop("p10-90", None)
    columns |= {"MB": lambda row: f"{row.bytes / 1e6:.1f}", "GB/s": lambda row: f"{row.gb_per_s:.1f}"}
    columns["of copy" if on_a_gpu else "of triad"] = lambda row: _share(row.of_copy if on_a_gpu else row.of_triad)
    for base in rows[0].ratios if rows else ():
        header = f"/ {base.removeprefix('ours').strip() or 'ours'}"
        columns[header] = lambda row, base=base: f"{row.ratios[base]:.2f}"  # type: ignore[misc]
    columns["error"] = lambda row: f"{row.error:.0e}"
    if any(row.arenas is not None for row in rows):
        columns["arenas"] = lambda row: "" if row.arenas is None else f"{row.arenas:.2f}"
    return columns


def _table(
    report: Report, headers: Sequence[str] | Mapping[str, object], rows: Mapping[str, list[str]], lines: Sequence[str]
) -> Table:
    """Below the rows stands what is absent and why, and where all this is; rows say in their names what they hold."""
    parameters = ", ".join(f"{name} {value}" for name, value in report.parameters.items() if name != "hold")
    absent = [f"absent: {absent.variant}: {absent.why}" for absent in report.absent]
    table = Table(
        title=f"{report.benchmark}: {parameters}",
        caption="\n".join([*absent, *lines, _where(report)]),
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("variant", no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right")
    for variant, cells in rows.items():
        table.add_row(variant, *cells)
    return table


def _where(report: Report) -> str:
    facts = report.machine
    device = "{gpu}, driver {driver}, CUDA {runtime_cuda}" if "gpu" in facts else "{cpu}, {cores} cores"
    load = "" if report.load is None else f", load {report.load:.1f} before"
    versions = [f"{name} {version}" for name, version in report.versions.items() if version and name != "commit"]
    return f"{device.format(**facts)}{load}; {', '.join(versions)}"


def _ms(seconds: float) -> str:
    """Milliseconds, to a microsecond where they are few."""
    return f"{1e3 * seconds:.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.3f}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
