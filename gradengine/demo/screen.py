"""The demo on a terminal: lines, and the proofs as a table."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradengine.demo.proofs import Proof
from gradengine.demo.record import Record
from gradengine.demo.settings import Settings, counted
from gradengine.demo.text import Texts

__all__ = ["introduce", "say", "show", "trained"]


def _console() -> Console:
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def say(name: str, what: str) -> None:
    """One line."""
    _console().print(f"{name:<9}{what}", markup=False)


def introduce(settings: Settings, texts: Texts, weights: int, entropy: float) -> None:
    """Say what is going to be done."""
    shards = f" in {settings.tensor_parallel} shards" if settings.tensor_parallel > 1 else ""
    say("model", f"byte-level Llama, {weights:,} weights{shards}")
    sizes = f"{len(texts.train) / 1e6:.2f} MB to learn, {len(texts.held_out) / 1e6:.2f} MB held out"
    say("text", f"{texts.source}: {sizes}, entropy of its bytes {entropy:.3f} nats")
    work = f"{counted(settings.workers, 'worker')} x {counted(settings.micro_batches, 'micro-batch')}"
    sequences, length = counted(settings.batch_size, "sequence"), counted(settings.model.sequence_length, "byte")
    say("step", f"{work} x {sequences} of {length}")


def trained(record: Record) -> None:
    """Say how training went."""
    wait = 1e3 * statistics.median(step.exchange_seconds for step in record.steps)
    steps = counted(len(record.steps), "step")
    say("\ntrained", f" {steps} in {record.seconds:.1f} s; the median step waited {wait:.1f} ms for the exchange")


def show(proofs: Sequence[Proof]) -> None:
    """The proofs, and what is to be said with them."""
    table = Table("", "proof", "measured", "holds", box=SIMPLE_HEAD, pad_edge=False)
    for proof in proofs:
        verdict = Text("yes", "green") if proof.holds else Text("NO", "bold red")
        table.add_row(proof.name, proof.claim, Text.assemble(proof.measured, "\n", (proof.required, "dim")), verdict)
    _console().print(table)
    for remark in (proof.remark for proof in proofs if proof.remark):
        _console().print(remark, style="dim", soft_wrap=False)
