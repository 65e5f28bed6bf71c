"""The demo on a terminal, or as plain lines where there is none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gradengine.demo.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from gradengine.demo.proofs import Proof
    from gradengine.demo.record import Record, Step
    from gradengine.demo.settings import Settings, Texts

__all__ = ["Screen"]

_PLAIN_LINES = 20  # of progress in a whole run


@final
class Screen:
    """Shows a run: use it as a context while the run lasts."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._progress = Progress(
            TextColumn("training"),
            *_bar(self._console),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=settings.steps, figures="")

    def introduce(self, texts: Texts, weights: int, entropy: float) -> None:
        """Say what is going to be done."""
        settings, model = self._settings, self._settings.model
        shards = f", in {settings.tensor_parallel} shards" if settings.tensor_parallel > 1 else ""
        self._line("model", f"byte-level Llama, {counted(model.num_blocks, 'block')}, {weights:,} weights{shards}")
        self._line("text", f"{texts.source}: {_size(texts.train)} to learn, {_size(texts.held_out)} held out")
        self._line("", f"entropy of the held-out bytes: {entropy:.3f} nats each")
        self._line(
            "step",
            f"{counted(settings.workers, 'worker')} x {counted(settings.micro_batches, 'micro-batch')}"
            f" x {counted(settings.batch_size, 'sequence')} of {counted(model.sequence_length, 'byte')}",
        )

    def started(self, processes: Mapping[str, int | None]) -> None:
        """See `Watcher.started`."""
        self._line("workers", ", ".join(f"{name}: process {process}" for name, process in processes.items()))

    def listening(self, urls: Sequence[str]) -> None:
        """See `Watcher.listening`."""
        for tp_rank, url in enumerate(urls):
            self._line("", f"over {url}" + (f", shard {tp_rank}" if len(urls) > 1 else ""))

    def stepped(self, step: Step) -> None:
        """See `Watcher.stepped`."""
        figures = f"loss {step.loss:.3f}  norm {step.norm:.2f}  exchange {1e3 * step.exchange_seconds:5.1f} ms"
        self._progress.update(self._task, completed=step.number, figures=figures)
        every = max(1, self._settings.steps // _PLAIN_LINES)
        if not self._console.is_terminal and step.number % every == 0:
            self._line("training", f"step {step.number:>4}/{self._settings.steps}  {figures}")

    def trained(self, record: Record) -> None:
        """Say how training went."""
        self._progress.stop()
        times = sorted(step.exchange_seconds for step in record.steps)
        self._line(
            "trained",
            f"{counted(len(record.steps), 'step')} in {record.seconds:.1f} s; the median step waited"
            f" {1e3 * times[len(times) // 2]:.1f} ms for the exchange",
        )

    def show(self, proofs: Sequence[Proof]) -> None:
        """The proofs, as a table."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, leading=1)
        for heading in ("", "proof", "measured", "holds"):
            table.add_column(heading)
        for proof in proofs:
            verdict = Text("yes", "green") if proof.holds else Text("NO", "bold red")
            figures = Text.assemble(proof.measured, "\n", (proof.required, "dim"))
            table.add_row(proof.name, proof.claim, figures, verdict)
        self._console.print(table)
        for proof in proofs:
            if proof.remark:
                self._console.print(proof.remark, "\n", style="dim", soft_wrap=False)

    def note(self, name: str, what: str) -> None:
        """One more line."""
        self._line(name, what)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _line(self, name: str, what: str) -> None:
        self._console.print(f"{name:<9}{what}", markup=False)


def _bar(console: Console) -> list[ProgressColumn]:
    """Without colours what is not done yet is blank: then the bar needs ends."""
    bar = BarColumn(bar_width=None)
    return [TextColumn("|"), bar, TextColumn("|")] if console.no_color or console.color_system is None else [bar]


def _size(text: bytes) -> str:
    return f"{len(text) / 1e6:.2f} MB"
