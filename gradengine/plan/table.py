"""Prints a plan as the question, two tables, and the transport to use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from gradengine.plan.prediction import Plan
from gradengine.plan.traffic import NCCL, TCP

_HOW = {
    TCP: "connect() uses shared memory by itself between ranks of one host, which is faster: the same bits.",
    NCCL: "connect(process_group=torch.distributed.group.WORLD) sums by NCCL in rank order: docs/how-to/nccl.md.",
}

size = partial(decimal, precision=2)  # 1594036224 bytes are "1.59 GB"


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    console.print(_grid(_facts(plan)))
    console.print(_memory(plan))
    if plan.exchanges:
        console.print(_exchanges(plan))
    console.print("", _grid(_conclusions(plan)), sep="\n")


def duration(seconds: float) -> str:
    """Return seconds as text.

    >>> duration(1234.5678)
    '1,234.568 s'
    """
    return f"{seconds:,.3f} s"


def _grid(lines: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, fact in lines:
        grid.add_row(name, Text(fact))  # plain text, since a file's name is no markup
    return grid


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    question, model, cost = plan.question, plan.question.model, plan.question.cost
    kinds = {"own": "", "tied": ", embedding tied to the LM head", "frozen": f", {model.frozen():,} of them frozen"}
    yield "model", f"{model.name} ({model.source}): {model.parameters:,} weights{kinds[model.embedding]}"
    ranks = f"{question.tp} tensor-parallel = {question.workers * question.tp} in all"
    yield "ranks", f"{question.workers} data-parallel (workers) x {ranks}"
    yield "links", f"{question.bandwidth}, each way of each rank"
    batch = f"{question.micro_batches} micro-batches x {question.batch_size} sequences"
    compute = f"{duration(plan.compute_seconds)} of compute"
    yield "step", f"{batch} x {question.sequence_length} tokens of each worker: {compute}"
    source = "as given" if question.backward_seconds else f"at {question.tflops:g} TFLOP/s of each rank (--tflops)"
    yield "backward", f"{duration(plan.backward_seconds)} a micro-batch, {source}"
    if question.tp > 1:
        link = f"a rank's link carries {size(cost.link_bytes_per_step)} each way in a step"
        yield "tensor", f"{size(cost.bytes_per_all_reduce)} an all-reduce; {link}: {duration(question.tp_seconds)}"


def _memory(plan: Plan) -> Table:
    title = f"Memory of a rank, {plan.question.dtype} and {plan.question.optimizer}, activations not counted"
    table = _table(title, "bytes", "")
    for name, nbytes in plan.memory.items():
        if nbytes:
            most, style = (", at most", "") if name.endswith("rows") else ("", "bold" if name == "on_device" else "")
            table.add_row(f"{name.replace('_', ' ')}{most}", f"{nbytes:,}", size(nbytes), style=style)
    return table


def _exchanges(plan: Plan) -> Table:
    title = f"Exchange of {size(plan.layout.nbytes)} over {plan.question.workers} workers, of a step"
    table = _table(title, "busiest link", "time", "step waits")
    for transport, traffic in plan.exchanges.items():
        times = map(duration, (traffic.seconds, traffic.exposed_seconds))
        table.add_row(transport, size(traffic.busiest_link_bytes), *times)
    table.caption = "step waits: what is left of the time after the last backward"
    return table


def _conclusions(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.missing_bytes:
        needs, has = size(plan.memory["on_device"]), f"{plan.question.gpu_gigabytes:g} GB (--gpu-gigabytes)"
        yield "memory", f"does not fit: a rank needs {needs}, its GPU has {has}. Raise --tp."
    if plan.choice is None:
        yield "choose", "no exchange: build the engine without exchange=."
        return
    step = plan.compute_seconds + plan.waiting_seconds
    waits = f"a step waits {duration(plan.waiting_seconds)} for it, {plan.waiting_seconds / step:.1%} of its time."
    yield "choose", f"{plan.choice}: {waits}"
    yield "", _HOW[plan.choice]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(f"\n{title}", "bold"), box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.collapse_padding = True
    table.title_justify = table.caption_justify = "left"
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
