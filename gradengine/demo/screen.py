"""The demo on a terminal, or as plain lines where there is none."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gradengine.demo.settings import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from gradengine.demo.proofs import Proof
    from gradengine.demo.record import Record, Step
    from gradengine.demo.settings import Settings, Texts

__all__ = ["Screen"]

_ROWS = 20  # of steps in a whole run
_WEIGHT_BYTES = 4


@final
class Screen:
    """Shows a run, as its `Watcher`: use it as a context while the run lasts."""

    def __init__(self, settings: Settings, weights: int) -> None:
        self._settings, self._weights, self._begin = settings, weights, time.perf_counter()
        self._console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        columns = [*_bar(self._console), MofNCompleteColumn(), TimeElapsedColumn()]
        is_terminal = self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, disable=not is_terminal, transient=True)
        self._task = self._progress.add_task("", total=settings.steps)

    def introduce(self, texts: Texts, entropy: float) -> None:
        """Say what is going to be done."""
        settings = self._settings
        shards = f" in {settings.tensor_parallel} shards" if settings.tensor_parallel > 1 else ""
        self.note("model", f"byte-level Llama, {self._weights:,} weights{shards}")
        self.note("text", f"{texts.source}: {_size(texts.train)} to learn, {_size(texts.held_out)} held out")
        self.note("entropy", f"{entropy:.3f} nats per byte of the held-out text")
        work = f"{counted(settings.workers, 'worker')} x {counted(settings.micro_batches, 'micro-batch')}"
        sequences, length = counted(settings.batch_size, "sequence"), counted(settings.model.sequence_length, "byte")
        self.note("step", f"{work} x {sequences} of {length}")

    def started(self, processes: Mapping[str, int | None]) -> None:
        """See `Watcher.started`."""
        self.note("workers", ", ".join(f"{name}: process {process}" for name, process in processes.items()))

    def listening(self, urls: Sequence[str]) -> None:
        """See `Watcher.listening`."""
        for tp_rank, url in enumerate(urls):
            self.note("", f"over {url}" + (f", shard {tp_rank}" if len(urls) > 1 else ""))

    def stepped(self, step: Step) -> None:
        """See `Watcher.stepped`."""
        if step.number == 1:
            self._console.print("\n   step    loss    norm   MB/s  wait ms", style="bold")
            self._begin = time.perf_counter()  # the first step is not in the rate: interpreters were still starting
        self._progress.update(self._task, completed=step.number)
        if step.number % max(1, self._settings.steps // _ROWS) == 0:
            figures = f"{step.number:>7} {step.loss:>7.3f} {step.norm:>7.2f} {self._rate(step.number):>6}"
            self._console.print(f"{figures} {1e3 * step.exchange_seconds:>8.1f}")

    def _rate(self, steps: int) -> str:
        """MB that cross between workers in a second: each but the first sends its gradient and gets the sum."""
        nbytes = 2 * (self._settings.workers - 1) * _WEIGHT_BYTES * self._weights
        return f"{nbytes * (steps - 1) / (time.perf_counter() - self._begin) / 1e6:.1f}" if steps > 1 else "-"

    def trained(self, record: Record) -> None:
        """Say how training went."""
        times = sorted(step.exchange_seconds for step in record.steps)
        wait = f"the median step waited {1e3 * times[len(times) // 2]:.1f} ms for the exchange"
        self._console.print()
        self.note("trained", f"{counted(len(record.steps), 'step')} in {record.seconds:.1f} s; {wait}")

    def show(self, proofs: Sequence[Proof]) -> None:
        """The proofs, as a table."""
        table = Table("", "proof", "measured", "holds", box=SIMPLE_HEAD, pad_edge=False)
        for proof in proofs:
            verdict = Text("yes", "green") if proof.holds else Text("NO", "bold red")
            table.add_row(
                proof.name, proof.claim, Text.assemble(proof.measured, "\n", (proof.required, "dim")), verdict
            )
        self._console.print(table)
        for remark in (proof.remark for proof in proofs if proof.remark):
            self._console.print(remark, style="dim", soft_wrap=False)

    def note(self, name: str, what: str) -> None:
        """One line."""
        self._console.print(f"{name:<9}{what}", markup=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _bar(console: Console) -> list[ProgressColumn]:
    """Without colours what is not done yet is blank: then the bar needs ends."""
    bar = BarColumn(bar_width=None)
    return [TextColumn("|"), bar, TextColumn("|")] if console.no_color or console.color_system is None else [bar]


def _size(text: bytes) -> str:
    return f"{len(text) / 1e6:.2f} MB"
