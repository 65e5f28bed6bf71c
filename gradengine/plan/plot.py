"""The exchange's seconds against the number of workers, for each algorithm, beside the backward that may hide them."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, ScalarFormatter

from gradengine.plan.prediction import Plan

__all__ = ["drawn", "worker_counts"]

_STYLES: dict[str, tuple[str, str, Any, float]] = {
    "ordered": ("ordered: tcp://, mpi://", "#4c72b0", "-", 4.0),  # often with ring and NCCL on it
    "star": ("star: served=True", "#c44e52", "-", 2.2),
    "ring": ("ring (other libraries)", "#dd8452", (0, (4, 8)), 1.8),
    "nccl": ("NCCL: process_group=", "#8fd39a", (6, (4, 8)), 1.8),
    "tcp://": ("tcp://", "#c44e52", "-", 2.2),
    "unix://": ("unix://", "#4c72b0", "-", 2.2),
    "shared memory": ("shared memory", "#8172b3", "-", 2.2),
    "threads": ("threads", "#dd8452", "-", 2.2),
    "served": ("tcp://, served", "#8fd39a", "-", 2.2),
}
_GREY = "#555555"
_MOST_POINTS = 24


def drawn(plan: Plan) -> Figure:
    """The plot: a line for each algorithm, and one for backward."""
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    workers, backward = plan.question.workers, plan.compute.backward_seconds
    counts = worker_counts(workers)
    by_count = [plan.question.traffic(plan.layout, count) for count in counts]
    for name in plan.exchanges:
        label, color, line, width = _STYLES[name]
        seconds = [traffic[name].seconds for traffic in by_count]
        axes.plot(counts, seconds, linestyle=line, color=color, linewidth=width, label=label)
    axes.axhline(backward, color=_GREY, linestyle=":", linewidth=1.2)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, 4), "textcoords": "offset points"}
    axes.annotate("backward of the last micro-batch", (0.99, backward), **place, ha="right", color=_GREY, fontsize=9)
    if workers > 1:
        axes.axvline(workers, color=_GREY, linewidth=0.6, alpha=0.6)
        place = {"xycoords": ("data", "axes fraction"), "va": "top"}
        axes.annotate(" this plan", (workers, 1.0), **place, color=_GREY, fontsize=9)
    _label(axes, plan)
    return figure


def worker_counts(workers: int) -> list[int]:
    """Numbers of workers from 2 to twice the plan's, at least to 8; only some if there are many, the plan's included.

    >>> worker_counts(3)
    [2, 3, 4, 5, 6, 7, 8]
    """
    last = max(8, 2 * workers)
    counts = {round(2 * (last / 2) ** (i / (_MOST_POINTS - 1))) for i in range(_MOST_POINTS)}
    return sorted(counts | {max(2, workers), last})


def _label(axes: Axes, plan: Plan) -> None:
    question = plan.question
    tp = f", tensor parallel over {question.tp}" if question.tp > 1 else ""
    where = "within one machine" if question.bandwidth is None else f"over links of {question.bandwidth}"
    axes.set_title(f"{question.model.name}{tp}: exchange of a step {where}", fontsize=11)
    axes.set(xlabel="data-parallel workers", ylabel="seconds, nothing hidden", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=9)
