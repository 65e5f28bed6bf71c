"""Write the README's table from recorded results: `python bench/draw.py` (it stands between two marks there)."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- table: bench/draw.py -->", "<!-- end of table -->"


def line(report: dict, row: dict) -> str:
    """One variant: its time, and how many times ours it takes."""
    ratios = ", ".join(
        f"{ratio:.2f}x {base.removeprefix('ours').strip() or 'ours'}"
        for base, ratio in row["ratios"].items()
        if not row["variant"].startswith("ours")
    )
    dtype = report["parameters"].get("dtype", "float32")
    benchmark = report["benchmark"] + ("" if dtype == "float32" else f", {dtype}")
    return f"| {benchmark} | {row['variant']} | {1e3 * row['median_s']:.1f} | {row['gb_per_s']:.1f} | {ratios} |"


def table() -> str:
    """All recorded results as Markdown."""
    reports = [json.loads(path.read_text()) for path in sorted((ROOT / "bench/results").glob("*.json"))]
    rows = [
        line(report, row) for report in reports for row in report["rows"] if row["variant"] not in {"copy", "triad"}
    ]
    head = ["| benchmark | variant | median ms | GB/s counted | time, in times of ours |", "|---|---|---|---|---|"]
    return "\n".join([BEGIN, "", *head, *rows, "", END])


if __name__ == "__main__":
    page = ROOT / "README.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + table() + rest.split(END)[1])
