"""The command `gradengine plan`, with its options and the order of its parts."""

from __future__ import annotations

import json as json_format
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradengine.console.options import STDOUT, flag, print_or_save, speaking_of, writable_json
from gradengine.layout.cost import Bandwidth
from gradengine.plan.models import NAMED, load_model
from gradengine.plan.prediction import DEVICES, DTYPES, OPTIMIZERS, Question, predict
from gradengine.plan.table import show
from gradengine.plan.traffic import SOCKETS

_OPTIONS = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(Question)} | {
    "tp_size": "--tp", "num_heads": "the model's heads", "num_kv_heads": "the model's key-value heads",
    "intermediate_size": "the model's intermediate size", "vocab_size": "the model's vocabulary",
}  # fmt: skip


def plan(
    model: Annotated[str, typer.Option(help=f"Model ({', '.join(NAMED)}, or the path of a Llama's config.json).")],
    bandwidth: Annotated[
        str, typer.Option(help="Bandwidth of each rank's link, each way, as '10 Gbit/s' or '1.25 GB/s'.")
    ],
    workers: Annotated[int, typer.Option(help="Number of data-parallel workers, each of --tp ranks.")] = 2,
    tp: Annotated[int, typer.Option(help="Number of tensor-parallel ranks of a worker.")] = 1,
    tp_bandwidth: Annotated[
        str | None, typer.Option(help="Bandwidth between the ranks of one worker (default: --bandwidth).")
    ] = None,
    socket_bandwidth: Annotated[
        str, typer.Option(help="Largest bandwidth of one process's sockets, which NCCL does not use.")
    ] = f"{SOCKETS.gigabytes_per_second:g} GB/s",
    sequence_length: Annotated[int, typer.Option(help="Length of a sequence, in tokens.")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Number of sequences of a worker's micro-batch.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Number of micro-batches of a worker in a step.")] = 1,
    dtype: Annotated[
        str, typer.Option(help=f"Dtype of weights, gradients and activations ({', '.join(DTYPES)}).")
    ] = "float32",
    optimizer: Annotated[str, typer.Option(help=f"Optimizer ({', '.join(OPTIMIZERS)}).")] = "adamw",
    device: Annotated[str, typer.Option(help=f"Device of the model ({', '.join(DEVICES)}).")] = "cuda",
    gpu_gigabytes: Annotated[float, typer.Option(help="Memory of a GPU, in 10^9 bytes.")] = 80.0,
    tflops: Annotated[float, typer.Option(help="Speed that a rank achieves, in 10^12 operations a second.")] = 100.0,
    backward_seconds: Annotated[
        float | None, typer.Option(help="Measured backward time of a micro-batch, in seconds (replaces --tflops).")
    ] = None,
    vocab_parallel: Annotated[
        bool, flag("--vocab-parallel", "Cut the LM head and the embedding over the tensor-parallel ranks too.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="JSON file for the whole plan ('-' for stdout, without a table).")
    ] = None,
) -> None:
    """Predict the memory of a rank, and the bytes and seconds of its exchange, before a training run.

    This is arithmetic, and runs and measures nothing. N workers are data-parallel.
    Each is a group of T tensor-parallel ranks, so there are N x T ranks.
    """
    writable_json(json)
    loaded, link, sockets = load_model(model), Bandwidth.parse(bandwidth), Bandwidth.parse(socket_bandwidth)
    within = None if tp_bandwidth is None else Bandwidth.parse(tp_bandwidth)
    with speaking_of(_OPTIONS):
        question = Question(
            loaded, workers, link, tp, within, sockets, sequence_length, batch_size, micro_batches, dtype, optimizer,
            device, gpu_gigabytes, tflops, backward_seconds, vocab_parallel,
        )  # fmt: skip
        found = predict(question)
    print_or_save(json_format.dumps(found.as_json(), indent=1, allow_nan=False), json)
    if json != STDOUT:
        show(found, Console(highlight=False))
