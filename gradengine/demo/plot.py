"""The plot of a run, with the loss of each step, the held-out loss, and the entropy that must be beaten."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from gradengine.demo.run import Record
from gradengine.demo.settings import counted

_TRAIN, _HELD_OUT, _ENTROPY = "#4c72b0", "#c44e52", "#555555"


def drawn(record: Record, entropy: float) -> Figure:
    """Return the plot of a run. The mean at each step is over about a fortieth of the run, over less at the ends."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    numbers, losses = [step.number for step in record.steps], np.array([step.loss for step in record.steps])
    window = np.ones(2 * (len(losses) // 80) + 1)
    means = np.convolve(losses, window, "same") / np.convolve(np.ones_like(losses), window, "same")
    axes.plot(numbers, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(numbers, means, color=_TRAIN, linewidth=1.6, label="training, each step and its mean")
    steps, held_out = zip(*record.evaluations.items(), strict=True)
    label = f"held out, {held_out[-1]:.2f} at last"
    axes.plot(steps, held_out, "o-", color=_HELD_OUT, markersize=4, linewidth=1.2, label=label)
    label = f"entropy of the held-out bytes, {entropy:.2f}"
    axes.axhline(entropy, color=_ENTROPY, linestyle="--", linewidth=1, label=label)
    axes.set_title(_title(record), fontsize=11)
    axes.set(xlabel="optimizer step", ylabel="cross-entropy, nats per byte", xlim=(0, 1.01 * record.settings.steps))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    return figure


def _title(record: Record) -> str:
    settings = record.settings
    workers, batches = counted(settings.workers, "worker"), counted(settings.micro_batches, "micro-batch")
    shards = f" x {settings.tensor_parallel} shards" if settings.tensor_parallel > 1 else ""
    way, seconds = settings.transport.value, f"{record.seconds:.0f} s"
    return f"byte-level Llama on {workers}{shards} x {batches} a step, {way}, {seconds}"
