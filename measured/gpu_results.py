"""What `make gpu-check` found so far, written anew after each stage: a later one that fails takes nothing away."""

import json
import os
import re
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

WHERE = ("name", "machine", "versions", "missing")  # all else is of a stage
YARDSTICKS = {"copy", "triad"}
LOGS = {".log", ".xml", ".csv"}


class Results:
    """What was found so far: one file, and one of logs.

    Args:
        folder: Where the stages write.
        out: Where a copy of the results goes, and the logs of this run.
        results: Where the results go; None for sizes that give no figures.
        commit: The commit that is measured, for a copy of the tree that does not know its own.
    """

    def __init__(self, folder: Path, out: Path, results: Path | None, commit: str | None) -> None:
        self._folder, self._out, self._results, self._commit = folder, out, results, commit
        self.whole: dict = {"name": "gpu-unknown", "machine": {}, "versions": {}, "missing": {}}
        self.whole |= {"stages": {}, "reports": [], "settled": {}}

    @property
    def gpu_memory(self) -> int:
        """The GPU's bytes; 0 where nobody has said."""
        return int(self.whole["machine"].get("gpu_memory_bytes", 0))

    def take(self, stage: str, outcome: Mapping[str, object]) -> None:
        """Take what a stage left in <folder>/<stage>.json, also one that failed half-way.

        Args:
            stage: Its name.
            outcome: How it ended.
        """
        left = _read(self._folder / f"{stage}.json")
        if "machine" in left:
            self._take_machine(left)
        self.whole["stages"][stage] = dict(outcome)
        kept = [report for report in self.whole["reports"] if report["stage"] != stage]
        self.whole["reports"] = [*kept, *({"stage": stage, **report} for report in left.get("reports", []))]
        for key in left.keys() - {*WHERE, "reports"}:
            self.whole[key] = {**self.whole.get(key, {}), **left[key]}
        self._write()

    def _take_machine(self, found: dict) -> None:
        self._file.unlink(missing_ok=True)  # of what ended before, under no name
        self.whole |= {"name": file_name(found["machine"]["gpu"]), **found}
        if self._commit:
            self.whole["versions"]["commit"] = self._commit
        earlier = _read(self._home / self._file.name)
        if earlier.get("versions") == self.whole["versions"]:  # so that the same commit's stages may be run one by one
            fresh = self.whole["stages"].keys()
            self.whole["reports"] += [report for report in earlier["reports"] if report["stage"] not in fresh]
            for key in earlier.keys() - {*WHERE, "reports"}:
                self.whole[key] = {**earlier[key], **self.whole.get(key, {})}

    @property
    def _home(self) -> Path:
        return self._results or self._out

    @property
    def _file(self) -> Path:
        return self._out / f"{self.whole['name']}.json"

    def _write(self) -> None:
        text = json.dumps(self.whole, indent=1) + "\n"
        write_whole(self._file, text)
        with tarfile.open(self._folder / "logs.partial", "w:gz") as logs:
            for path in sorted(path for path in self._folder.iterdir() if path.suffix in LOGS):
                logs.add(path, path.name)
        shutil.copyfile(self._folder / "logs.partial", self._out / "logs.tar.gz")
        if not self.whole["machine"]:
            return  # nobody knows whose results these are
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            write_whole(self._home / self._file.name, text)
        except OSError as fault:
            print(f"cannot write to {self._home}: {fault}", flush=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole: whoever is killed meanwhile leaves what was there before."""
    fresh = path.with_suffix(".partial")
    fresh.write_text(text)
    os.replace(fresh, path)


def _read(path: Path) -> dict:
    """What a file holds; nothing where it is not there, or was not written to its end."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def file_name(gpu: str) -> str:
    """The results' name, from the GPU's.

    >>> file_name("NVIDIA H200"), file_name("NVIDIA GeForce RTX 4090")
    ('gpu-h200', 'gpu-geforce-rtx-4090')
    """
    return "gpu-" + re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")


def figures(reports: Sequence[dict]) -> list[str]:
    """Every figure in one line each, for the end of the output: yardsticks once, and the step's last."""
    if not reports:
        return []
    times = f"{'device ms':>9} {'wall ms':>8} {'host us':>8} {'of copy':>7}"
    head = f"{'stage':10} {'benchmark':14} {'variant':30} {times}  times ours"
    others, steps, yardsticks = [], [], {}
    for report in sorted(reports, key=lambda each: each["stage"] == "step"):
        where = f"{report['stage']:10} {report['benchmark']:14}"
        lines = steps if report["benchmark"] == "step" else others
        if report["benchmark"] == "launches":
            lines += [f"{where} {variant:30} {counts}" for variant, counts in report["rows"].items()]
            continue
        for row in report["rows"]:
            line = f"{where} {_figures_of(row)}"
            if row["variant"] in YARDSTICKS:
                yardsticks[row["variant"]] = line
            else:
                lines.append(line)
    return [head, *others, head, *yardsticks.values(), *steps]  # a terminal may keep the end alone


def _figures_of(row: dict) -> str:
    share = "" if row["of_copy"] is None else f"{row['of_copy']:.1%}"
    times = f"{1e3 * row['device_s']:9.3f} {1e3 * row['wall_s']:8.3f} {1e6 * row['host_s']:8.0f}"
    ratios = " ".join(f"{ratio:.2f}" for ratio in row["ratios"].values())
    return f"{row['variant']:30} {times} {share:>7}  {ratios}"
