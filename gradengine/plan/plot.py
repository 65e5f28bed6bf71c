"""The exchange's seconds against the number of workers, for each algorithm, beside the backward that may hide them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gradengine.errors import CallerError
from gradengine.plan.quantities import rate
from gradengine.plan.traffic import span_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from gradengine.plan.prediction import Plan

__all__ = ["drawn", "refuse_unknown_kind", "save_plot", "worker_counts"]

_STYLES: dict[str, tuple[str, str, Any, float]] = {
    "star": ("star, tcp://", "#c44e52", "-", 2.2),
    "ring": ("ring", "#4c72b0", "-", 4.0),
    "ordered": ("ordered (mpi://, planned)", "#dd8452", (0, (4, 8)), 1.8),  # the three often lie on each other
    "nccl": ("NCCL (nccl://, planned)", "#8fd39a", (6, (4, 8)), 1.8),
    "tcp://": ("tcp://", "#c44e52", "-", 2.2),
    "unix://": ("unix://", "#4c72b0", "-", 2.2),
    "threads": ("threads", "#dd8452", "-", 2.2),
}
_BACKWARD = "#555555"
_MOST_POINTS = 24


def refuse_unknown_kind(path: Path) -> None:
    """Before anything is written.

    Raises:
        CallerError: No plot is saved by a name that ends so.
    """
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise CallerError(f"cannot plot to {str(path)!r}", got=repr(path.suffix), expected=f"one of {', '.join(kinds)}")


def save_plot(path: Path, plan: Plan) -> None:
    """Draw it and save it."""
    drawn(plan).savefig(path)


def drawn(plan: Plan) -> Figure:
    """The picture: a line for each algorithm, and one for backward."""
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    _draw(axes, plan)
    _dress(axes, plan)
    return figure


def worker_counts(workers: int) -> list[int]:
    """From 2 to twice the plan's workers, 8 at the least; of many only some, the plan's among them.

    >>> worker_counts(3)
    [2, 3, 4, 5, 6, 7, 8]
    """
    last = max(8, 2 * workers)
    counts = {round(2 * (last / 2) ** (i / (_MOST_POINTS - 1))) for i in range(_MOST_POINTS)}
    return sorted(counts | {max(2, workers), last})


def _draw(axes: Axes, plan: Plan) -> None:
    counts, spans = worker_counts(plan.question.workers), span_bytes(plan.layout)
    for name, predictor in plan.question.predictors.items():
        label, color, line, width = _STYLES[name]
        seconds = [predictor(spans, count).seconds for count in counts]
        axes.plot(counts, seconds, linestyle=line, color=color, linewidth=width, label=label)
    backward = plan.compute.backward_seconds
    axes.axhline(backward, color=_BACKWARD, linestyle=":", linewidth=1.2)
    axes.annotate(
        "backward of the last micro-batch", (0.99, backward), xycoords=("axes fraction", "data"), xytext=(0, 4),
        textcoords="offset points", ha="right", color=_BACKWARD, fontsize=9,
    )  # fmt: skip
    if plan.question.workers > 1:
        axes.axvline(plan.question.workers, color=_BACKWARD, linewidth=0.6, alpha=0.6)
        axes.annotate(
            " this plan", (plan.question.workers, 1.0), xycoords=("data", "axes fraction"), va="top", color=_BACKWARD,
            fontsize=9,
        )  # fmt: skip


def _dress(axes: Axes, plan: Plan) -> None:
    question = plan.question
    tp = f", tensor parallel over {question.tp}" if question.tp > 1 else ""
    where = "within one machine" if question.bandwidth is None else f"over links of {rate(question.bandwidth)}"
    axes.set_title(f"{question.model.name}{tp}: exchange of a step {where}", fontsize=11)
    axes.set_xlabel("data-parallel workers")
    axes.set_ylabel("seconds, nothing hidden")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    last = max(8, 2 * question.workers)
    ticks = [2**i for i in range(1, last.bit_length() + 1) if 2**i <= last]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=9)
