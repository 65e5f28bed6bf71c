"""Write the README's tables from recorded results: `python bench/draw.py` (they stand between marks there).

The GPU's table follows the CPU's where there are results of a GPU, and is nothing where there are none.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
BEGIN, END = "<!-- table: bench/draw.py -->", "<!-- end of table -->"
GPU_BEGIN, GPU_END = "<!-- table of GPUs: bench/draw.py -->", "<!-- end of table of GPUs -->"
YARDSTICKS = {"copy", "triad"}


def line(report: dict, row: dict) -> str:
    """One variant: its time, and how many times ours it takes."""
    ratios = ", ".join(
        f"{ratio:.2f}x {base.removeprefix('ours').strip() or 'ours'}"
        for base, ratio in row["ratios"].items()
        if not row["variant"].startswith("ours")
    )
    parameters = report["parameters"]
    size = [f"{parameters['tensors']} x {parameters['elements']:,}"] if "tensors" in parameters else []
    dtype = [name for name in [parameters.get("dtype", "float32")] if name != "float32"]
    benchmark = ", ".join([report["benchmark"], *size, *dtype])
    return f"| {benchmark} | {row['variant']} | {1e3 * row['median_s']:.1f} | {row['gb_per_s']:.1f} | {ratios} |"


def table(results: Path) -> str:
    """All recorded results of CPUs as Markdown."""
    paths = [path for path in sorted(results.glob("*.json")) if not path.name.startswith("gpu-")]
    reports = [report for report in (json.loads(path.read_text()) for path in paths) if "rows" in report]
    rows = [line(report, row) for report in reports for row in report["rows"] if row["variant"] not in YARDSTICKS]
    head = ["| benchmark | variant | median ms | GB/s counted | time, in times of ours |", "|---|---|---|---|---|"]
    return "\n".join([BEGIN, "", *head, *rows, "", END])


def gpu_tables(results: Path) -> str:
    """The recorded results of each GPU as Markdown; nothing where there are none."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("gpu-*.json"))]
    parts = [part for whole in found for part in gpu_table(whole)]
    return "\n".join([GPU_BEGIN, "", *parts, GPU_END]) if parts else ""


def gpu_table(whole: dict) -> list[str]:
    """One GPU's: a line for each variant; of the odd sizes ours alone."""
    rows = [gpu_line(report, row) for report in whole["reports"] for row in rows_shown(report)]
    if not rows:
        return []
    machine, versions = whole["machine"], whole["versions"]
    title = (
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['runtime_cuda']}, CuPy {versions['cupy']}, "
        f"torch {versions['torch']}:"
    )
    head = [
        "| benchmark | variant | ms | GB/s counted | of the copy | host us | time, in times of ours |",
        "|---|---|---|---|---|---|---|",
    ]
    return [title, "", *head, *rows, ""]


def rows_shown(report: dict) -> list[dict]:
    """What of a report the table has."""
    if report["benchmark"] == "launches":
        return []
    rows = [row for row in report["rows"] if row["variant"] not in YARDSTICKS]
    return [row for row in rows if row["variant"].startswith("ours")] if report["parameters"]["odd"] else rows


def gpu_line(report: dict, row: dict) -> str:
    """One variant on a GPU."""
    parameters = report["parameters"]
    facts = [report["benchmark"], *([] if parameters["dtype"] == "float32" else [parameters["dtype"]])]
    name = ", ".join([*facts, *(["odd sizes"] if parameters["odd"] else [])])
    share = "" if row["of_copy"] is None else f"{row['of_copy']:.0%}"
    ratios = ", ".join(
        f"{ratio:.2f}x {base.removeprefix('ours').strip() or 'ours'}"
        for base, ratio in row["ratios"].items()
        if base != row["variant"] and (report["benchmark"] == "lora" or not row["variant"].startswith("ours"))
    )
    figures = f"{1e3 * row['median_s']:.3f} | {row['gb_per_s']:.0f} | {share} | {1e6 * row['host_s']:.0f}"
    return f"| {name} | {row['variant']} | {figures} | {ratios} |"


def drawn(page: str, results: Path) -> str:
    """The page with the tables of these results."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    if GPU_BEGIN in after:
        after = after.split(GPU_BEGIN)[0].removesuffix("\n\n") + after.split(GPU_END)[1]
    gpus = gpu_tables(results)
    return before + table(results) + (f"\n\n{gpus}" if gpus else "") + after


if __name__ == "__main__":
    README = ROOT / "README.md"
    README.write_text(drawn(README.read_text(), RESULTS))
