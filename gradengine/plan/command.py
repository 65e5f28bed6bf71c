"""`gradengine plan`: its options, and the order in which things happen."""

from __future__ import annotations

import json as json_format
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradengine.errors import CallerError
from gradengine.plan.models import NAMED, load_model
from gradengine.plan.prediction import Plan, Question, predict
from gradengine.plan.table import show
from gradengine.tensor_parallel_cost import Bandwidth

__all__ = ["plan"]


class Dtype(str, Enum):
    """Of weights, gradients and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Optimizer(str, Enum):
    """Whose state is counted."""

    ADAMW = "adamw"
    LION = "lion"
    MOMENTUM = "momentum"
    SGD = "sgd"


class Device(str, Enum):
    """Where the model is."""

    CPU = "cpu"
    CUDA = "cuda"


_MICROSECONDS = 1e6
_UNITS = "with its unit: '10 Gbit/s', '1.25 GB/s'"


def plan(
    model: Annotated[str, typer.Option(help=f"{', '.join(NAMED)}, or a Llama-like config.json.")],
    bandwidth: Annotated[str, typer.Option(help=f"Of each rank's link between workers, each way, {_UNITS}.")],
    workers: Annotated[
        int, typer.Option(min=1, help="Data-parallel workers; with --tp T each is a group of T ranks.")
    ] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of a worker: workers x tp ranks in all.")] = 1,
    tp_bandwidth: Annotated[str | None, typer.Option(help="Within a worker; else as --bandwidth.")] = None,
    latency_us: Annotated[float, typer.Option(help="Microseconds of a message between workers.")] = 50.0,
    tp_latency_us: Annotated[float, typer.Option(help="Microseconds of a message within a worker.")] = 10.0,
    socket_bandwidth: Annotated[
        str, typer.Option(help="What one process moves through its sockets each way, on any link; limits tcp://.")
    ] = "3 GB/s",
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a worker's micro-batch.")] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of each worker in an optimizer step.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of weights, gradients and activations.")] = Dtype.FLOAT32,
    optimizer: Annotated[Optimizer, typer.Option(help="Whose state is counted.")] = Optimizer.ADAMW,
    tflops: Annotated[float, typer.Option(help="10^12 operations a second that a rank achieves.")] = 100.0,
    backward_seconds: Annotated[
        float | None, typer.Option(help="Of one micro-batch on one rank, measured; instead of --tflops.")
    ] = None,
    vocab_parallel: Annotated[bool, typer.Option("--vocab-parallel", help="Cut LM head and embedding too.")] = False,
    device: Annotated[Device, typer.Option(help="Where the model is; a GPU's arena has a mirror.")] = Device.CUDA,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw exchange seconds against workers here.")] = None,
) -> None:
    """Say what a training run will take: memory of a rank, bytes and seconds of its exchange, the transport to take.

    N workers are data-parallel; each is a group of T tensor-parallel ranks, N x T ranks in all. Nothing is run.
    """
    question = Question(
        load_model(model),
        workers,
        Bandwidth.parse(bandwidth),
        tp=tp,
        tp_bandwidth=None if tp_bandwidth is None else Bandwidth.parse(tp_bandwidth),
        latency_seconds=latency_us / _MICROSECONDS,
        tp_latency_seconds=tp_latency_us / _MICROSECONDS,
        socket_bandwidth=Bandwidth.parse(socket_bandwidth),
        sequence_length=sequence_length,
        batch_size=batch_size,
        micro_batches=micro_batches,
        dtype=dtype.value,
        optimizer=optimizer.value,
        tflops=tflops,
        backward_seconds=backward_seconds,
        vocab_parallel=vocab_parallel,
        device=device.value,
    )
    found = predict(question)
    if json is not None:
        _write(json, found)
    if plot is not None:
        # Only a plot needs matplotlib, whose import takes longer than all else.
        from gradengine.plan.plot import refuse_bad_path, save_plot  # noqa: PLC0415

        refuse_bad_path(plot)
        save_plot(plot, found)
    show(found, Console(highlight=False))


def _write(path: Path, found: Plan) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_format.dumps(found.as_json(), indent=1, allow_nan=False) + "\n")
    except OSError as fault:
        raise CallerError(f"cannot write {str(path)!r}: {fault.strerror}", do="pass another --json FILE") from None
