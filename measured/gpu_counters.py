"""What the hardware counts in each of our kernels at 350M, by ncu: the stage `counters` of gpu_check.py.

    python measured/gpu_counters.py --json counters.json

One launch of each kernel: K1 of a first, a later and four held micro-batches, measure, K2, K3; fp32, then bf16. The
metrics are few, so that one pass suffices and ncu saves and restores no memory. Without ncu, or without the right to
profile, the report says so in `absent`, and that is no failure.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpu_results import write_whole

from gradengine import GradientEngine, clip_by_global_norm
from gradengine.bench.device import Gpu, open_gpu
from gradengine.bench.workload import Workload, model_layout

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
METRICS = (
    TIME,
    READ,
    WRITTEN,
    "lts__t_sectors_op_write.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
KERNELS = "regex:accumulate|measure|finalise|hand_back"
DTYPES = "float32", "bfloat16"
UNABLE = "ERR_NVGPUCTRPERM", "LibraryNotLoaded"  # no right to profile; no profiler under gVisor
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
LONG = {"nsecond": "ns", "usecond": "us", "msecond": "ms", "second": "s"}  # as older ones write it
HELD = 4
MAX_NORM = 1e-3  # below any norm here: the gradients are multiplied
SMALL, WHOLE = (1, 16), (24, 1024)  # blocks and hidden size


class Absent(Exception):
    """Nothing can be counted on this machine."""


class Failed(Exception):
    """ncu, or what it was to look at, did not do its work."""


def work(gpu: Gpu, dtype: str, size: tuple[int, int]) -> None:
    """Launch each kernel."""
    load = Workload.drawn(gpu, model_layout(*size), HELD, dtype)
    batches = load.for_ours()
    for hold, adds in ((1, 2), (HELD, HELD)):
        engine = GradientEngine(load.layout, gpu.kernels, max_norm=MAX_NORM, micro_batches=adds, hold=hold)
        for batch in batches[:adds]:
            engine.add(batch)
        engine.step()
        del engine  # its arena
    clip_by_global_norm(batches[0], MAX_NORM)
    gpu.wait()


def rows_of(lines: Iterable[str]) -> list[dict[str, object]]:
    """A row for each launch, in order, of what `ncu --csv` wrote: one line for each launch and metric, after others.

    Raises:
        Failed: A metric has a unit that is not known here, or is missing.
    """
    counted: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    for line in table:
        launch, metric = line["ID"], line["Metric Name"]
        names[launch] = line["Kernel Name"].partition("(")[0]
        counted.setdefault(launch, {})[metric] = _number(metric, line["Metric Value"], line["Metric Unit"])
    return [_row(f"{number} {names[launch]}", counted[launch]) for number, launch in enumerate(counted, start=1)]


def _number(metric: str, value: str, unit: str) -> float:
    number = float(value.replace(",", ""))
    if metric not in {TIME, READ, WRITTEN}:
        return number
    unit = LONG.get(unit, unit)
    if unit not in UNITS:
        raise Failed(f"ncu gives {metric} in '{unit}': expected one of {', '.join(UNITS)}")
    return number * UNITS[unit]


def _row(name: str, counted: dict[str, float]) -> dict[str, object]:
    """As a benchmark's row; a launch is seen from the device alone."""
    missing = set(METRICS) - counted.keys()
    if missing:
        raise Failed(f"ncu does not count {', '.join(sorted(missing))} in '{name}'")
    seconds, moved = counted[TIME], counted[READ] + counted[WRITTEN]
    times = dict.fromkeys(("median_s", "device_s", "wall_s"), seconds)
    rate = {"bytes": moved, "gb_per_s": moved / seconds / 1e9}
    return {"variant": name, **times, "host_s": 0.0, **rate, "of_copy": None, "ratios": {}, "counters": counted}


def counted(dtype: str, *, small: bool) -> list[dict[str, object]]:
    """The rows of one dtype.

    Raises:
        Absent: There is no ncu, or nobody but an administrator may profile here.
        Failed: It ended in another error, or has seen no launch.
    """
    if shutil.which("ncu") is None:
        raise Absent("ncu is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        options = ("--clock-control", "none", "--csv", "--print-units", "base", "--log-file", str(log))
        ours = (sys.executable, __file__, "--work", dtype, *(("--small",) if small else ()))
        command = ("ncu", *options, "-k", KERNELS, "--metrics", ",".join(METRICS), *ours)
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (it stands above)
        lines = log.read_text().splitlines() if log.exists() else []
    said = [line for line in (*lines, *done.stdout.splitlines(), *done.stderr.splitlines()) if line.strip()]
    for line in said:
        if any(word in line for word in UNABLE):
            raise Absent(line.removeprefix("==ERROR==").strip()[:300])
    rows = rows_of(lines)
    if done.returncode != 0 or not rows:
        last = said[-1] if said else "nothing"
        raise Failed(f"ncu has seen {len(rows)} launches, exit status {done.returncode}: {last[:300]}")
    return rows


def report(dtype: str, *, small: bool) -> dict[str, object]:
    """As a benchmark's report; raises as `counted`, but for `Absent`."""
    blocks, hidden = SMALL if small else WHOLE
    parameters = {"blocks": blocks, "hidden": hidden, "dtype": dtype, "odd": False}
    rows, absent = [], []
    try:
        rows = counted(dtype, small=small)
    except Absent as why:
        absent = [{"variant": "ncu", "why": str(why)}]
    return {"benchmark": "counters", "parameters": parameters, "time": "device", "rows": rows, "absent": absent}


def main(arguments: Sequence[str] | None = None) -> int:
    """Count; 1 if that failed."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--work", choices=DTYPES, help="launch the kernels in this process, for ncu to watch")
    made.add_argument("--small", action="store_true", help="tiny sizes, to try that all runs")
    made.add_argument("--json", type=Path)
    given = made.parse_args(arguments)
    if given.work:
        work(open_gpu(), given.work, SMALL if given.small else WHOLE)
        return 0
    reports: list[dict[str, object]] = []
    for dtype in DTYPES:
        try:
            found = report(dtype, small=given.small)
        except Failed as fault:
            print(f"failed: counters: {dtype}: {fault}")
            return 1
        print(*shown(found), sep="\n", flush=True)
        reports.append(found)
        if given.json is not None:
            write_whole(given.json, json.dumps({"reports": reports}, indent=1) + "\n")
    return 0


def shown(found: dict) -> list[str]:
    """A line for each launch."""
    dtype = found["parameters"]["dtype"]
    lines = [f"absent: {each['variant']}: {each['why']}" for each in found["absent"]]
    for row in found["rows"]:
        time, *others = (f"{name} {value:g}" for name, value in row["counters"].items())
        lines.append(f"{dtype} {row['variant']}: {row['gb_per_s']:.0f} GB/s, {time}, {', '.join(others)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
