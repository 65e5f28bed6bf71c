"""What `make gpu-check` found so far, written anew after each stage: a later one that fails takes nothing away."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

KEEPS = ("machine", "reports", "settled")  # kinds of what a stage writes to <folder>/<stage>.json


class Results:
    """What was found so far.

    Args:
        folder: Where the stages write, and where a copy of the results goes.
        results: Where the results go; None for sizes that give no figures.
        commit: The commit that is measured, for a copy of the tree that does not know its own.
        missing: What the machine lacks, by name, and why.
    """

    def __init__(self, folder: Path, results: Path | None, commit: str | None, missing: Mapping[str, str]) -> None:
        self._folder, self._results, self._commit = folder, results, commit
        self.whole: dict = {"name": "gpu-unknown", "machine": {}, "versions": {}, "missing": dict(missing)}
        self.whole |= {"stages": {}, "reports": [], "settled": {}}

    def take(self, stage: str, keeps: str | None, outcome: Mapping[str, object]) -> None:
        """Take what a stage left, also one that failed half-way.

        Args:
            stage: Its name.
            keeps: "machine", "reports" or "settled": what it writes to <folder>/<stage>.json.
            outcome: How it ended.
        """
        left = _read(self._folder / f"{stage}.json") if keeps in KEEPS else {}
        if keeps == "machine" and left:
            self._take_machine(left)
        self.whole["stages"][stage] = dict(outcome)
        self.whole["settled"] |= left.get("settled", {})
        kept = [report for report in self.whole["reports"] if report["stage"] != stage]
        fresh = left.get("reports", []) if keeps == "reports" else []
        self.whole["reports"] = [*kept, *({"stage": stage, **report} for report in fresh)]
        self._write()

    def _take_machine(self, found: dict) -> None:
        self.whole |= {"name": file_name(found["machine"]["gpu"]), **found}
        if self._commit:
            self.whole["versions"]["commit"] = self._commit
        earlier = _read(self._home / f"{self.whole['name']}.json")
        if earlier.get("versions") == self.whole["versions"]:  # so that the same commit's stages may be run one by one
            self.whole |= {each: earlier[each] for each in ("stages", "reports", "settled")}

    @property
    def _home(self) -> Path:
        return self._results or self._folder

    def _write(self) -> None:
        text = json.dumps(self.whole, indent=1) + "\n"
        _replace(self._folder / f"{self.whole['name']}.json", text)
        if not self.whole["machine"]:
            return  # nobody knows whose results these are
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            _replace(self._home / f"{self.whole['name']}.json", text)
        except OSError as fault:
            print(f"cannot write to {self._home}: {fault}", flush=True)


def _replace(path: Path, text: str) -> None:
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
    """Every figure in one line each, for the end of the output."""
    times = f"{'device ms':>9} {'wall ms':>8} {'host us':>8} {'of copy':>7}"
    lines = [f"{'stage':10} {'benchmark':14} {'variant':30} {times}  times ours"]
    for report in reports:
        where = f"{report['stage']:10} {report['benchmark']:14}"
        if report["benchmark"] == "launches":
            lines += [f"{where} {variant:30} {counts}" for variant, counts in report["rows"].items()]
        else:
            lines += [f"{where} {_figures_of(row)}" for row in report["rows"]]
        lines += [f"{where} {absent['variant']:30} absent: {absent['why']}" for absent in report["absent"]]
    return lines


def _figures_of(row: dict) -> str:
    share = "" if row["of_copy"] is None else f"{row['of_copy']:.1%}"
    times = f"{1e3 * row['device_s']:9.3f} {1e3 * row['wall_s']:8.3f} {1e6 * row['host_s']:8.0f}"
    ratios = " ".join(f"{ratio:.2f}" for ratio in row["ratios"].values())
    return f"{row['variant']:30} {times} {share:>7}  {ratios}"
