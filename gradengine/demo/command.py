"""`gradengine demo`: its options, the order of its parts, and what it prints."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradengine.console.options import refuse_bad_plot, save, speaking_of
from gradengine.demo.model import LlamaConfig, initial_weights
from gradengine.demo.proofs import Proof, prove
from gradengine.demo.run import Record, begin_anew, replay_all, train
from gradengine.demo.settings import Settings, Transport, counted
from gradengine.demo.text import Texts, read_texts, unigram_entropy
from gradengine.demo.worker import join_launched, train_launched
from gradengine.errors import CallerError
from gradengine.exchange import Exchange
from gradengine.exchange.launchers import read_world

_PLOT = Path("out/demo-loss.png")
_OPTIONS = {
    "hidden_size": "--hidden-size", "num_heads": "--heads", "num_kv_heads": "--kv-heads", "tp_size": "--tp",
    "intermediate_size": "the intermediate size",
}  # fmt: skip


def demo(
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Data-parallel workers; by default 2, or the ranks launched.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, max=64, help="Shards of each worker's model (tensor parallelism).")] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of each worker in each step.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 400,
    transport: Annotated[
        Transport | None,
        typer.Option(help="launcher, mpi: as a rank that torchrun, srun or mpiexec started; by default tcp."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="File to learn; by default Python's standard library.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help=f"File to draw the losses to. By default {_PLOT}, if matplotlib is installed."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a micro-batch.")] = 8,
    sequence_length: Annotated[int, typer.Option(min=1, help="Bytes that each sequence predicts.")] = 64,
    hidden_size: Annotated[int, typer.Option(min=8, help="The model's hidden size, a multiple of 8.")] = 96,
    heads: Annotated[int, typer.Option(min=1, help="The model's heads, a divisor of the hidden size.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="The model's key-value heads, a divisor of the heads.")] = 2,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks of the model.")] = 2,
    learning_rate: Annotated[float, typer.Option(min=1e-9, max=1, help="Rate after warm-up.")] = 6e-3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first weights and the micro-batches.")] = 0,
    compared_steps: Annotated[int, typer.Option(min=1, help="Steps to repeat in one process for proof 3.")] = 20,
) -> None:
    """Train a small Llama on real text with several workers, and prove that they are right.

    Needs no GPU and no download, and about half a minute on two idle cores; two minutes on busy ones.
    The exit code is 1 if a proof fails.
    """
    with speaking_of(_OPTIONS):
        model = LlamaConfig(
            blocks, hidden_size, heads, kv_heads, sequence_length=sequence_length,
            intermediate_size=-(-hidden_size * 8 // 96) * 32,  # 8/3 of it, a multiple of 32
        )  # fmt: skip
        model.sharded(0, tp)
    settings = Settings(
        workers or 2, tp, micro_batches, steps, batch_size, learning_rate, seed=seed,
        transport=transport or _default_transport(), compared_steps=min(compared_steps, steps), model=model,
    )  # fmt: skip
    if settings.transport is not Transport.TCP:
        proofs = _run_launched(settings, workers, text, plot)
    else:
        proofs = _run(settings, read_texts(text, sequence_length), plot)
    if not all(proof.holds for proof in proofs):
        raise typer.Exit(1)


def _default_transport() -> Transport:
    """TCP; raises `CallerError` if this is one of several ranks, each of which would start workers."""
    try:
        world = read_world(os.environ)
    except CallerError:  # none was launched
        return Transport.TCP
    if world.world_size > 1:
        raise CallerError(
            f"{world.launcher.world_size}={world.world_size}: each of these ranks would start workers of its own",
            do="pass --transport launcher or mpi for the ranks to be the workers, or tcp to start them all the same",
        )
    return Transport.TCP


def _run_launched(settings: Settings, workers: int | None, text: Path | None, plot: Path | None) -> list[Proof]:
    """Run as one of the ranks that were launched; rank 0 prints, and returns the proofs, the others return none."""
    if settings.tensor_parallel > 1:
        what = f"with --transport {settings.transport.value} each rank has the whole model"
        raise CallerError(what, got=f"--tp {settings.tensor_parallel}", expected="--tp 1")
    begin_anew()
    with join_launched(settings.transport) as exchange:  # before what may fail: MPI waits for who ends without it
        if workers not in {None, exchange.world_size}:
            what, do = "--workers is not the number of launched ranks", "leave --workers out"
            raise CallerError(what, got=workers, expected=exchange.world_size, do=do)
        settings = replace(settings, workers=exchange.world_size)
        texts = read_texts(text, settings.model.sequence_length)
        if exchange.rank == 0:
            return _run(settings, texts, plot, exchange)
        train_launched(settings, texts, exchange, lambda _: None)
        return []


def _run(settings: Settings, texts: Texts, plot: Path | None, exchange: Exchange | None = None) -> list[Proof]:
    save_plot, begin = _plotter(plot), time.perf_counter()
    initial, entropy = initial_weights(settings.model, settings.seed), unigram_entropy(texts.held_out)
    _introduce(settings, texts, sum(weight.size for weight in initial.values()), entropy)
    record = train(settings, texts, _say, exchange)
    _say("plot", save_plot(record, entropy))
    _say("replay", f"{counted(settings.compared_steps, 'step')} again, in one process")
    proofs = prove(record, replay_all(settings, texts), initial, entropy)
    _show(proofs)
    _say("all", f"{time.perf_counter() - begin:.1f} s")
    return proofs


def _say(name: str, what: str) -> None:
    typer.echo(f"{name:<9}{what}")


def _introduce(settings: Settings, texts: Texts, weights: int, entropy: float) -> None:
    shards = f" in {settings.tensor_parallel} shards, a thread for each" if settings.tensor_parallel > 1 else ""
    _say("model", f"byte-level Llama, {weights:,} weights{shards}")
    sizes = f"{len(texts.train) / 1e6:.2f} MB to learn, {len(texts.held_out) / 1e6:.2f} MB held out"
    _say("text", f"{texts.source}: {sizes}, entropy of its bytes {entropy:.3f} nats")
    work = f"{counted(settings.workers, 'worker')} x {counted(settings.micro_batches, 'micro-batch')}"
    sequences, length = counted(settings.batch_size, "sequence"), counted(settings.model.sequence_length, "byte")
    _say("step", f"{work} x {sequences} of {length}")


def _show(proofs: Sequence[Proof]) -> None:
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    table = Table("", "proof", "measured", "holds", box=SIMPLE_HEAD, pad_edge=False)
    for proof in proofs:
        verdict = Text("yes", "green") if proof.holds else Text("NO", "bold red")
        table.add_row(proof.name, proof.claim, Text.assemble(proof.measured, "\n", (proof.required, "dim")), verdict)
    console.print(table)


def _plotter(path: Path | None) -> Callable[[Record, float], str]:
    """A function that draws a run and returns where; raises at once if a plot that was asked for cannot be drawn."""
    if path is None and importlib.util.find_spec("matplotlib") is None:
        return lambda *_: "none without matplotlib: pip install 'gradengine[plot]'"
    place = path or _PLOT
    refuse_bad_plot(place)

    def save_plot(record: Record, entropy: float) -> str:
        from gradengine.demo.plot import drawn  # noqa: PLC0415  (matplotlib's import takes longer than all others)

        save(place, "--plot", drawn(record, entropy).savefig)
        return str(place)

    return save_plot
