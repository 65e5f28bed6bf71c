"""The reports of a GPU as tables for a terminal."""

from __future__ import annotations

from dataclasses import asdict

from rich import box
from rich.table import Table

from gradengine.bench.case import Absent
from gradengine.bench.gpu.launches import LaunchReport
from gradengine.bench.gpu.report import GpuReport, GpuRow

__all__ = ["gpu_table", "launch_table"]


def gpu_table(report: GpuReport) -> Table:
    """One line for each variant, absent ones too."""
    table = _table(f"{report.benchmark}: {_shown(report.parameters)} ({report.time} time)", _machine(report.machine))
    for header in ("device ms", "wall ms", "host us", "MB", "GB/s", "of copy", *_ratio_headers(report), "error"):
        table.add_column(header, justify="right")
    for row in report.rows:
        assert isinstance(row, GpuRow)
        table.add_row(row.variant, *_cells(row))
    return _with_absent(table, report.absent)


def launch_table(report: LaunchReport) -> Table:
    """What each variant's step asked of the device."""
    table = _table(f"{report.benchmark}: {_shown(report.parameters)}", _machine(report.machine))
    for header in ("kernels", "copies", "fills", "launches", "waits"):
        table.add_column(header, justify="right")
    for variant, counts in report.rows.items():
        table.add_row(variant, *map(str, asdict(counts).values()))
    return _with_absent(table, report.absent)


def _table(title: str, caption: str) -> Table:
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    table.add_column("variant", no_wrap=True)
    return table


def _with_absent(table: Table, absent: object) -> Table:
    lines = [f"{a.variant}: {a.why}" for a in absent if isinstance(a, Absent)]  # type: ignore[attr-defined]
    if lines:
        table.caption = "\n".join([*(f"absent: {line}" for line in lines), str(table.caption)])
    return table


def _cells(row: GpuRow) -> list[str]:
    return [
        f"{1e3 * row.device_s:.3f}",
        f"{1e3 * row.wall_s:.3f}",
        f"{1e6 * row.host_s:.0f}",
        f"{row.bytes / 1e6:.1f}",
        f"{row.gb_per_s:.0f}",
        "" if row.of_copy is None else f"{row.of_copy:.1%}",
        *(f"{ratio:.2f}" for ratio in row.ratios.values()),
        f"{row.error:.0e}",
    ]


def _ratio_headers(report: GpuReport) -> list[str]:
    return [f"/ {base.removeprefix('ours').strip() or 'ours'}" for base in report.bases]


def _shown(parameters: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in dict(parameters).items())  # type: ignore[call-overload]


def _machine(machine: object) -> str:
    facts = dict(machine)  # type: ignore[call-overload]
    return f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['runtime_cuda']}"
