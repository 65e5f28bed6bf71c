"""`gradengine plan`: its options, and the order of its parts."""

from __future__ import annotations

import json as json_format
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradengine.console.options import STDOUT, flag, print_or_save, refuse_bad_plot, save, speaking_of, writable_json
from gradengine.errors import CallerError
from gradengine.layout.cost import Bandwidth
from gradengine.plan.machine import Rates, measure_rates, measure_tflops
from gradengine.plan.models import NAMED, load_model
from gradengine.plan.prediction import DEVICES, DTYPES, OPTIMIZERS, Plan, Question, predict
from gradengine.plan.table import show
from gradengine.plan.traffic import SOCKETS, SUMMED

__all__ = ["plan"]

_MICROSECONDS = 1e6
_UNITS = "each way: '10 Gbit/s', '1.25 GB/s'"
_SOCKETS, _SUMMED = (f"{each.gigabytes_per_second:g} GB/s" for each in (SOCKETS, SUMMED))
_OPTIONS = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(Question)} | {
    "latency_seconds": "--latency-us", "tp_latency_seconds": "--tp-latency-us", "machine": "--one-machine",
    "tp_size": "--tp", "num_heads": "the model's heads", "num_kv_heads": "the model's key-value heads",
    "intermediate_size": "the model's intermediate size", "vocab_size": "the model's vocabulary",
}  # fmt: skip
_TFLOPS = Question.tflops
_DEVICE = "The model's device; by default cuda, with --one-machine cpu."
_NOT_MEASURED = Rates(1, 1.0, 1.0, 1.0, 1.0)


def plan(
    model: Annotated[str, typer.Option(help=f"{', '.join(NAMED)}, or a Llama-like config.json.")],
    bandwidth: Annotated[str | None, typer.Option(help=f"Each rank's link between workers, {_UNITS}.")] = None,
    one_machine: Annotated[bool, flag("--one-machine", "Instead: all workers on this machine, measured.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Data-parallel workers; with --tp T each is T ranks.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of a worker.")] = 1,
    tp_bandwidth: Annotated[str | None, typer.Option(help="Links within a worker; else as --bandwidth.")] = None,
    latency_us: Annotated[float, typer.Option(help="Microseconds of a message between workers.")] = 50.0,
    tp_latency_us: Annotated[float, typer.Option(help="Microseconds of a message within a worker.")] = 10.0,
    socket_bandwidth: Annotated[str, typer.Option(help="One process's sockets, each way: limits tcp://.")] = _SOCKETS,
    sum_bandwidth: Annotated[str, typer.Option(help="One process's sum of parts: limits tcp://.")] = _SUMMED,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a worker's micro-batch.")] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of a worker in a step.")] = 1,
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="Of weights and activations.")] = "float32",
    optimizer: Annotated[str, typer.Option(metavar="|".join(OPTIMIZERS), help="Its state is counted.")] = "adamw",
    tflops: Annotated[
        float | None, typer.Option(help=f"10^12 operations a second of a rank; by default {_TFLOPS:g}.")
    ] = None,
    backward_seconds: Annotated[float | None, typer.Option(help="A micro-batch's, measured; not --tflops.")] = None,
    vocab_parallel: Annotated[bool, flag("--vocab-parallel", "Cut LM head and embedding too.")] = False,
    device: Annotated[str | None, typer.Option(metavar="|".join(DEVICES), help=_DEVICE)] = None,
    gpu_gigabytes: Annotated[float, typer.Option(help="Memory of a GPU, in 10^9 bytes.")] = 80.0,
    json: Annotated[Path | None, typer.Option(help="Write everything to a file; -: to stdout, and no table.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw exchange seconds against workers to a file.")] = None,
) -> None:
    """Predict what a training run takes: memory of a rank, bytes and seconds of its exchange, the transport to use.

    N workers are data-parallel; each is a group of T tensor-parallel ranks,
    N x T ranks in all. Nothing is run. For --one-machine its links, sums
    and matrix products are timed for 4 seconds; the products only if neither
    --tflops nor --backward-seconds is given.
    """
    _refuse_bad_paths(json, plot)
    device, measures_compute = device or ("cpu" if one_machine else "cuda"), False
    if tflops is None:
        tflops, measures_compute = _TFLOPS, one_machine and backward_seconds is None
    if measures_compute and device == "cuda":
        do = "pass what your GPU achieves, or --device cpu"
        raise CallerError("--one-machine does not measure a GPU", expected="--tflops or --backward-seconds", do=do)
    texts = {
        "bandwidth": bandwidth, "tp_bandwidth": tp_bandwidth,
        "socket_bandwidth": socket_bandwidth, "sum_bandwidth": sum_bandwidth,
    }  # fmt: skip
    bandwidths: dict[str, Any] = {name: _bandwidth(name, text) for name, text in texts.items()}
    loaded = load_model(model)
    with speaking_of(_OPTIONS):
        question = Question(
            loaded, workers, tp=tp, **bandwidths,
            latency_seconds=latency_us / _MICROSECONDS, tp_latency_seconds=tp_latency_us / _MICROSECONDS,
            sequence_length=sequence_length, batch_size=batch_size, micro_batches=micro_batches, dtype=dtype,
            optimizer=optimizer, tflops=tflops, backward_seconds=backward_seconds, vocab_parallel=vocab_parallel,
            device=device, gpu_gigabytes=gpu_gigabytes, machine=_NOT_MEASURED if one_machine else None,
        )  # fmt: skip
        found = predict(question)
    if one_machine:  # only once all else can be planned
        question = replace(question, machine=measure_rates())
        if measures_compute:
            question = replace(question, tflops=measure_tflops() / workers, tflops_measured=True)
        found = predict(question)
    _write(found, json, plot)
    if json != STDOUT:
        show(found, Console(highlight=False))
    if plot is not None:
        typer.echo(f"plot      {plot}", err=json == STDOUT)  # stdout is JSON alone then


def _bandwidth(field: str, text: str | None) -> Bandwidth | None:
    try:
        return None if text is None else Bandwidth.parse(text)
    except CallerError as fault:
        what = f"{_OPTIONS[field]}: {fault.what}"
        raise CallerError(what, got=fault.got, expected=fault.expected, do=fault.do) from None


def _refuse_bad_paths(json: Path | None, plot: Path | None) -> None:
    """Raise `CallerError` for paths that cannot be written, before anything is measured or written."""
    writable_json(json)
    if plot is None:
        return
    if json is not None and json.resolve() == plot.resolve():
        raise CallerError("--json and --plot are one file", got=repr(str(plot)), expected="two")
    if not (folder := plot.absolute().parent).exists():
        what = f"cannot write {str(plot)!r}: there is no folder {str(folder)!r}"
        raise CallerError(what, do="make it, or pass another --plot FILE")
    refuse_bad_plot(plot)


def _write(found: Plan, json: Path | None, plot: Path | None) -> None:
    print_or_save(json_format.dumps(found.as_json(), indent=1, allow_nan=False), json)
    if plot is not None:
        from gradengine.plan.plot import drawn  # noqa: PLC0415  (matplotlib's import takes longer than all else)

        save(plot, "--plot", lambda file: drawn(found).savefig(file))
