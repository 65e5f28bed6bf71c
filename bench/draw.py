"""Print the README's table from recorded results: `python bench/draw.py bench/results/*.json`."""

import json
import sys
from pathlib import Path


def rows(path: Path):
    """(benchmark, variant, ms, GB/s, share of triad, ratios) of each line of one result."""
    report = json.loads(path.read_text())
    for row in report["rows"]:
        if row["variant"] not in {"copy", "triad"}:
            yield report["benchmark"], row


def main(paths: list[str]) -> None:
    """Print one Markdown table of all results."""
    print("| benchmark | variant | ms | GB/s | time / ours |")
    print("|---|---|---|---|---|")
    for path in map(Path, paths):
        for benchmark, row in rows(path):
            ratios = " · ".join(
                f"{base}: {ratio:.2f}" for base, ratio in row["ratios"].items() if base != row["variant"]
            )
            print(
                f"| {benchmark} | {row['variant']} | {1e3 * row['median_s']:.1f} | {row['gb_per_s']:.0f} | {ratios} |"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
