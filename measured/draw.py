"""Write the tables of docs/project/benchmarks.md and of the README from recorded results: `python measured/draw.py`.

The tables are between marks. The GPU's table follows the CPU's, if there are results of a GPU. The README has a row for
each line of `CHOSEN`.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "measured/results"
BEGIN, END = "<!-- table: measured/draw.py -->", "<!-- end of table -->"
GPU_BEGIN, GPU_END = "<!-- table of GPUs: measured/draw.py -->", "<!-- end of table of GPUs -->"
YARDSTICKS = {"copy", "triad"}
# The rows that the README shows, also if gradengine is slower: words, recorded result, its variant, the other variant.
CHOSEN = (
    (
        "whole step of 91 million fp32 gradients, 4 micro-batches",
        "cpu-2core-step",
        "ours hold=1",
        "torch foreach, mean",
    ),
    ("sum of 4 micro-batches of bf16 gradients in fp32", "cpu-2core-accumulate-bf16", "ours hold=1", "torch add_"),
    ("100 MB between two processes, in shared memory", "cpu-2core-exchange", "ours shared memory", "torch gloo"),
    ("clip 91 million bf16 gradients", "cpu-2core-clip-bf16", "ours", "torch foreach"),
    ("whole step of 34 tensors of 100 elements", "cpu-2core-step-34x100", "ours hold=1", "numpy by hand"),
    ("training step of a 124M GPT in bf16, 4 micro-batches", "gpu-h200/loop", "ours attach", "torch"),
)


def line(report: dict, row: dict) -> str:
    """Return the row of one variant, with its time and its ratio to each variant of gradengine."""
    ratios = ", ".join(ratio_to(*each) for each in row["ratios"].items() if not row["variant"].startswith("ours"))
    parameters = report["parameters"]
    size = size_of(parameters)
    dtype = [name for name in [parameters.get("dtype", "float32")] if name != "float32"]
    benchmark = ", ".join([report["benchmark"], *size, *dtype])
    figures = f"{1e3 * row['median_s']:.1f} | {row['gb_per_s']:.1f}"
    return f"| {benchmark} | {name_of(row['variant'])} | {figures} | {ratios} |"


def name_of(variant: str) -> str:
    """Return a variant's name in the tables. The recorded results call gradengine's variants "ours"."""
    return variant.replace("ours", "gradengine", 1) if variant.startswith("ours") else variant


def ratio_to(base: str, ratio: float) -> str:
    """Return a ratio of times, and the variant of gradengine that it refers to if there are several."""
    variant = base.removeprefix("ours").strip(" ,")
    return f"{ratio:.2f}x" + (f" ({variant})" if variant else "")


def size_of(parameters: dict) -> list[str]:
    """Return the number and size of the tensors if all are alike, otherwise nothing."""
    return [f"{parameters['tensors']} x {parameters['elements']:,}"] if "tensors" in parameters else []


def table(results: Path) -> str:
    """Return all recorded results of CPUs as Markdown."""
    paths = [path for path in sorted(results.glob("*.json")) if not path.name.startswith("gpu-")]
    reports = [report for report in (json.loads(path.read_text()) for path in paths) if "rows" in report]
    rows = [line(report, row) for report in reports for row in report["rows"] if row["variant"] not in YARDSTICKS]
    head = ["| benchmark | variant | median ms | GB/s | time / gradengine's time |", "|---|---|---|---|---|"]
    return "\n".join([BEGIN, "", *head, *rows, "", END])


def chosen(results: Path) -> str:
    """Return the rows of `CHOSEN` as Markdown."""
    found = ["| | gradengine | other | time of the other | ratio |", "|---|---|---|---|---|"]
    for words, name, ours, other in CHOSEN:
        rows = {row["variant"]: row for row in recorded(results, name)}
        times = [f"{1e3 * rows[variant]['median_s']:.1f} ms" for variant in (ours, other)]
        ratio = rows[other]["ratios"].get(ours) or 1 / rows[ours]["ratios"][other]
        found.append(f"| {words} | {times[0]} | {other} | {times[1]} | {ratio:.2f}x |")
    return "\n".join([BEGIN, "", *found, "", END])


def recorded(results: Path, name: str) -> list[dict]:
    """Return the rows of a result. The name is "file/benchmark" for a file with several results."""
    file, _, benchmark = name.partition("/")
    whole = json.loads((results / f"{file}.json").read_text())
    if benchmark:
        whole = next(each for each in whole["reports"] if each["benchmark"] == benchmark)
    return whole["rows"]


def gpu_tables(results: Path) -> str:
    """Return the recorded results of each GPU as Markdown, or nothing if there are none."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("gpu-*.json"))]
    parts = [part for whole in found for part in gpu_table(whole)]
    return "\n".join([GPU_BEGIN, "", *parts, GPU_END]) if parts else ""


def gpu_table(whole: dict) -> list[str]:
    """Return one GPU's table, with a line for each variant. Odd sizes have gradengine's variants only."""
    rows = [gpu_line(report, row) for report in whole["reports"] for row in rows_shown(report)]
    if not rows:
        return []
    machine, versions = whole["machine"], whole["versions"]
    title = (
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['runtime_cuda']}, CuPy {versions['cupy']}, "
        f"torch {versions['torch']}:"
    )
    head = [
        "| benchmark | variant | median ms | GB/s | speed of a copy | host us | time / gradengine's time |",
        "|---|---|---|---|---|---|---|",
    ]
    return [title, "", *head, *rows, ""]


def rows_shown(report: dict) -> list[dict]:
    """Return the rows of a report that the table shows."""
    if report["benchmark"] in {"launches", "counters"}:
        return []
    rows = [row for row in report["rows"] if row["variant"] not in YARDSTICKS]
    return [row for row in rows if row["variant"].startswith("ours")] if report["parameters"]["odd"] else rows


def gpu_line(report: dict, row: dict) -> str:
    """Return the row of one variant on a GPU."""
    parameters = report["parameters"]
    facts = [
        report["benchmark"],
        *size_of(parameters),
        *([] if parameters["dtype"] == "float32" else [parameters["dtype"]]),
    ]
    name = ", ".join([*facts, *(["odd sizes"] if parameters["odd"] else [])])
    share = "" if row["of_copy"] is None else f"{row['of_copy']:.0%}"
    ratios = ", ".join(
        ratio_to(base, ratio)
        for base, ratio in row["ratios"].items()
        if base != row["variant"] and (report["benchmark"] == "lora" or not row["variant"].startswith("ours"))
    )
    rate = f"{row['gb_per_s']:.0f}" if row["gb_per_s"] else ""  # the bytes of a whole training step are not counted
    figures = f"{1e3 * row['median_s']:.3f} | {rate} | {share} | {1e6 * row['host_s']:.0f}"
    return f"| {name} | {name_of(row['variant'])} | {figures} | {ratios} |"


def put(page: str, drawn_table: str) -> str:
    """Return the page with this table between its marks."""
    before, rest = page.split(BEGIN)
    return before + drawn_table + rest.split(END)[1]


def drawn(page: str, results: Path) -> str:
    """Return the page with the tables of these results."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    if GPU_BEGIN in after:
        after = after.split(GPU_BEGIN)[0].removesuffix("\n\n") + after.split(GPU_END)[1]
    gpus = gpu_tables(results)
    return before + table(results) + (f"\n\n{gpus}" if gpus else "") + after


if __name__ == "__main__":
    README, MEASURED = ROOT / "README.md", ROOT / "docs/project/benchmarks.md"
    README.write_text(put(README.read_text(), chosen(RESULTS)))
    MEASURED.write_text(drawn(MEASURED.read_text(), RESULTS))
