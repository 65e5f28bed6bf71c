"""Prints a plan: the question and its assumptions, two tables, and the transport to use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from gradengine.plan.prediction import Plan, Question, duration

__all__ = ["show", "size"]

_ALGORITHMS = {  # on one machine: the transport
    "ordered": "ordered, tcp://",
    "star": "star, served=True",
    "nccl": "NCCL, process_group=",
    "threads": "local_group",
    "served": "tcp://, served",
}
_EXPOSED = "hidden: while the last backward runs; exposed: what the step waits"
_ONE_MACHINE = f"{_EXPOSED}, its engine's work included"
_SHARED_CORES = (
    "exposed: what the step waits, its engine's work included; backward takes the same cores, and hides nothing"
)
_HOW = {  # by the transport that is chosen
    "tcp://": "On one machine connect() takes a faster link by itself: the same bits; see --one-machine.",
    "process_group=": "connect(process_group=torch.distributed.group.WORLD) sums by NCCL in rank order: docs/nccl.md.",
    "shared memory": "connect() takes it by itself where all ranks are on one host.",
}
_ON_THE_HOST = ("exchange_rows", "pinned_rows")
_TIED = (
    "The tied LM head is complete when backward ends, and first in the layout's order, so nothing is hidden."
    " GradientLayout.of, given it as the first name, sends it last."
)


size = partial(decimal, precision=2)  # 1594036224 bytes are "1.59 GB"


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    console.print(_grid(_facts(plan)))
    console.print(_memory(plan))
    if plan.question.workers > 1:
        console.print(_exchanges(plan))
    console.print("", _grid(_conclusions(plan)), sep="\n")


def _grid(lines: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, fact in lines:
        grid.add_row(name, Text(fact))  # a file's name is no markup
    return grid


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    question, model = plan.question, plan.question.model
    kinds = {"own": "", "tied": ", embedding tied to the LM head", "frozen": f", {model.frozen():,} of them frozen"}
    yield "model", f"{model.name} ({model.source}): {model.parameters:,} weights{kinds[model.embedding]}"
    sizes = f"blocks {model.num_blocks}, H {model.hidden_size}, I {model.intermediate_size}, V {model.vocab_size}"
    yield "", f"{sizes}, heads {model.num_heads}, KV heads {model.num_kv_heads}"
    ranks = f"{question.tp} tensor-parallel = {question.workers * question.tp} in all"
    yield "ranks", f"{question.workers} data-parallel (workers) x {ranks}"
    yield from _links(question)
    batch = f"micro-batches {question.micro_batches} x sequences {question.batch_size}"
    compute = f"{duration(plan.compute_seconds)} of compute"
    yield "step", f"{batch} x tokens {question.sequence_length} of each worker: {compute}"
    yield "backward", f"{duration(plan.compute.backward_seconds)} a micro-batch, {plan.compute.source}"
    yield "tensor", _tensor_parallel(question)


def _tensor_parallel(question: Question) -> str:
    cost = question.cost
    sent = f"{cost.bytes_per_all_reduce} bytes an all-reduce, {cost.bytes_per_step} a forward"
    if question.tp == 1:
        return f"not parallel, nothing is sent (--tp: {sent})"
    link = f"a rank's link carries {size(cost.link_bytes_per_step)} each way in a step"
    part = "part of the compute" if question.backward_seconds is None else "predicted"
    return f"{sent}, as much backward; {link}, {duration(question.tp_seconds)}, {part}"


def _links(question: Question) -> Iterator[tuple[str, str]]:
    if question.machine is not None:
        rates = {name.replace("_", " "): rate for name, rate in vars(question.machine).items() if rate is not None}
        cores, said = rates.pop("cores"), ", ".join(f"{name} {rate / 1e9:.3g}" for name, rate in rates.items())
        yield "machine", f"cores {cores}; GB/s as measured: {said}"
        return
    yield "links", f"{question.bandwidth} each way of each rank; {duration(question.latency_seconds)} a message"
    if question.tp > 1:
        yield "", f"{question.within} within a worker; {duration(question.tp_latency_seconds)} a message"
    sums = f"{question.sum_bandwidth.gigabytes_per_second:.4g} GB/s"
    yield "process", f"ordered and star: its sockets {question.socket_bandwidth} each way, its sum {sums} of parts"


def _memory(plan: Plan) -> Table:
    title = f"Memory of a rank, {plan.question.dtype} and {plan.question.optimizer}, activations not counted"
    table = _table(title, "bytes", "")
    rows = vars(plan.memory) | {"on_device": plan.memory.on_device}
    for name, nbytes in sorted(rows.items(), key=lambda row: row[0] in _ON_THE_HOST):  # below the sum of the others
        if nbytes:
            style = "bold" if name == "on_device" else ""
            table.add_row(name.replace("_", " "), f"{nbytes:,}", size(nbytes), style=style)
    return table


def _exchanges(plan: Plan) -> Table:
    title = f"Exchange of {size(plan.layout.nbytes)} over {plan.question.workers} workers, of a step"
    table = _table(title, "busiest link", "time", "hidden", "exposed")
    for name, (traffic, overlap) in plan.exchanges.items():
        times = map(duration, (overlap.seconds, overlap.hidden_seconds, overlap.exposed_seconds))
        table.add_row(_ALGORITHMS.get(name, name), size(traffic.busiest_link_bytes), *times)
    table.caption = _EXPOSED if plan.question.machine is None else _ONE_MACHINE
    if plan.question.has_shared_cores:
        table.caption = _SHARED_CORES
    return table


def _conclusions(plan: Plan) -> Iterator[tuple[str, str]]:
    choice, has = plan.choice, plan.question.gpu_gigabytes
    if plan.missing_bytes:
        needs = size(plan.memory.on_device)
        yield "memory", f"a rank needs {needs}, and its GPU has {has:g} GB (--gpu-gigabytes): raise --tp."
    yield "choose", f"{'no exchange' if choice.transport == 'none' else choice.transport}: {choice.reason}"
    for remedy in choice.remedies:
        yield "", f"- {remedy}"
    if choice.transport in _HOW:
        yield "", _HOW[choice.transport]
    if plan.question.model.embedding == "tied" and choice.transport != "none":
        yield "", _TIED


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(f"\n{title}", "bold"), box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.collapse_padding = True
    table.title_justify = table.caption_justify = "left"
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
