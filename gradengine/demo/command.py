"""The command `gradengine demo`, with its options, the order of its parts, and its output."""

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
        int | None,
        typer.Option(min=1, max=64, help="Number of data-parallel workers (default: 2, or all launched ranks)."),
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, max=64, help="Number of shards of each worker's model (tensor parallelism).")
    ] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Number of micro-batches of each worker in a step.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps.")] = 400,
    transport: Annotated[
        Transport | None,
        typer.Option(
            help="Transport between workers (default: tcp). launcher and mpi use ranks of torchrun, srun or mpiexec."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file to learn (default: Python's standard library).")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help=f"Image file for the losses (default: {_PLOT}, if matplotlib is installed)."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of sequences of a micro-batch.")] = 8,
    sequence_length: Annotated[int, typer.Option(min=1, help="Number of bytes that each sequence predicts.")] = 64,
    hidden_size: Annotated[int, typer.Option(min=8, help="Hidden size of the model, a multiple of 8.")] = 96,
    heads: Annotated[int, typer.Option(min=1, help="Number of attention heads, a divisor of the hidden size.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="Number of key-value heads, a divisor of the heads.")] = 2,
    blocks: Annotated[int, typer.Option(min=1, help="Number of transformer blocks.")] = 2,
    learning_rate: Annotated[float, typer.Option(min=1e-9, max=1, help="Learning rate after warm-up.")] = 6e-3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial weights and the micro-batches.")] = 0,
    compared_steps: Annotated[int, typer.Option(min=1, help="Number of steps that proof 3 repeats.")] = 20,
) -> None:
    """Train a small Llama on real text with several workers, and prove that their weights are right.

    It needs no GPU and no download. It takes half a minute on two idle cores, two minutes on busy ones.
    The exit code is 1 if a proof fails.
    """
    with speaking_of(_OPTIONS):
        model = LlamaConfig(
            blocks, hidden_size, heads, kv_heads, sequence_length=sequence_length,
            intermediate_size=-(-hidden_size * 8 // 96) * 32,  # 8/3 of the hidden size, rounded up to a multiple of 32
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
    """Return TCP. Raises `CallerError` if this process is one of several launched ranks."""
    try:
        world = read_world(os.environ)
    except CallerError:  # no launcher started this process
        return Transport.TCP
    if world.world_size > 1:
        raise CallerError(
            f"--transport is missing in one of several launched ranks ({world.launcher.world_size}={world.world_size})",
            do="pass --transport launcher or mpi to use these ranks as the workers, or tcp to start others",
        )
    return Transport.TCP


def _run_launched(settings: Settings, workers: int | None, text: Path | None, plot: Path | None) -> list[Proof]:
    """Run as one of the launched ranks. Rank 0 prints, and returns the proofs. The other ranks return none."""
    if settings.tensor_parallel > 1:
        what = f"--transport {settings.transport.value} does not support tensor parallelism"
        raise CallerError(what, got=f"--tp {settings.tensor_parallel}", expected="--tp 1")
    begin_anew()
    # Join before the checks that may fail, because MPI waits for a rank that ends without joining.
    with join_launched(settings.transport) as exchange:
        if workers not in {None, exchange.world_size}:
            what, do = "--workers is not the number of launched ranks", "omit --workers"
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
    """Return a function that draws a run and returns the file's name. Raises if a requested plot cannot be drawn."""
    if path is None and importlib.util.find_spec("matplotlib") is None:
        return lambda *_: "none without matplotlib: pip install 'gradengine[plot]'"
    place = path or _PLOT
    refuse_bad_plot(place)

    def save_plot(record: Record, entropy: float) -> str:
        from gradengine.demo.plot import drawn  # noqa: PLC0415  (matplotlib's import takes longer than all others)

        save(place, "--plot", drawn(record, entropy).savefig)
        return str(place)

    return save_plot
