"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from gradengine.bench.harness import COPY, NOISY, Report, Row, compared, is_noisy

_ON_A_GPU: Mapping[str, Callable[[Row], str]] = {
    "device ms": lambda row: f"{1e3 * row.device_s:.3f}",
    "wall ms": lambda row: f"{1e3 * row.wall_s:.3f}",
    "host us": lambda row: f"{1e6 * row.host_s:.0f}",
}
_ON_A_HOST: Mapping[str, Callable[[Row], str]] = {
    "ms": lambda row: _ms(row.median_s),
    "p10-90": lambda row: f"{_ms(row.p10_s)}-{_ms(row.p90_s)}",
}
_ONLY_WIDE = {"p10-90", "wall ms", "host us", "of copy", "error"}


def table_of(report: Report, *, wide: bool = True) -> Table:
    """Return the report as a table, with absent variants named below. A narrow table leaves some columns to --json."""
    columns = _columns(report, wide=wide)
    lines = [
        f"all results within {report.tolerance:g} of fp64's before anything was timed",
        "vs x: time of the row / time of our x, median of the rounds, above 1 ours is faster",
        *([f"noisy a-b: no ratio is given, as the rounds' quartiles a and b differ by over {NOISY}x"] * report.noisy),
        f"GB/s: of bytes moved, counted, by the median {report.time} time",
        *(["of copy: share of the bandwidth that a copy reaches in this run"] * wide),
    ]
    cells = {row.variant: [cell(row) for cell in columns.values()] for row in report.rows}
    return _table(report, columns, cells, lines)


def _columns(report: Report, *, wide: bool) -> dict[str, Callable[[Row], str]]:
    """Return the function that gives a row's text, for each column by its header."""
    columns = dict(_ON_A_GPU if "gpu" in report.machine else _ON_A_HOST)
    columns["GB/s"] = lambda row: f"{row.gb_per_s:.1f}"
    columns["of copy"] = lambda row: "" if row.of_copy is None else f"{row.of_copy:.1%}"
    for base in report.rows[0].ratios if report.rows else ():
        header = f"vs {base.removeprefix('ours').strip() or 'ours'}"
        columns[header] = lambda row, base=base: _ratio(row, base)  # type: ignore[misc]
    columns["error"] = lambda row: f"{row.error:.0e}"
    return columns if wide else {header: cell for header, cell in columns.items() if header not in _ONLY_WIDE}


def _table(report: Report, headers: Iterable[str], rows: Mapping[str, list[str]], lines: Sequence[str]) -> Table:
    """Return the table, with a caption that names the machine, and the absent variants with their reasons."""
    parameters = ", ".join(f"{name} {value}" for name, value in report.parameters.items() if name != "hold")
    absent = [f"absent: {absent.variant}: {absent.why}" for absent in report.absent]
    table = Table(
        title="\n".join([*_warnings(report), f"{report.benchmark}: {parameters}"]),
        caption="\n".join([*absent, *lines, _where(report)]),
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    table.title_justify = table.caption_justify = "left"
    table.add_column("variant", no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    for variant, cells in rows.items():
        table.add_row(variant, *cells)
    return table


def _warnings(report: Report) -> Iterator[str]:
    """Yield the warnings that a reader must see before the figures."""
    if report.load is not None and report.load > int(str(report.machine["cores"])):
        yield f"BUSY MACHINE: load {report.load:.1f} on {report.machine['cores']} cores before the run"
    if report.noisy:
        pairs = compared(report.rows)
        noisy = sum(is_noisy(row, base) for row, base in pairs)
        yield f"NOISY: {noisy} of {len(pairs)} ratios are not given, their rounds differ too much"
        yield "Run it again when nothing else runs."


def _ratio(row: Row, base: str) -> str:
    if row.variant == COPY:
        return ""
    if is_noisy(row, base):
        return "noisy " + "-".join(f"{edge:.{0 if edge >= 9.95 else 1}f}" for edge in row.quartiles[base])
    return f"{row.ratios[base]:.2f}x"


def _where(report: Report) -> str:
    facts = report.machine
    device = "{gpu}, driver {driver}, CUDA {runtime_cuda}" if "gpu" in facts else "{cpu}, {cores} cores"
    load = "" if report.load is None else f", load {report.load:.1f} before"
    versions = [f"{name} {version}" for name, version in report.versions.items() if version and name != "commit"]
    return f"{device.format(**facts)}{load}; {', '.join(versions)}"


def _ms(seconds: float) -> str:
    """Return milliseconds as text, with microseconds below 10 ms."""
    return f"{1e3 * seconds:.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.3f}"
