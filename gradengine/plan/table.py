"""A plan on a terminal: what was asked and assumed, three tables, and the transport to choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gradengine.plan.choice import TRANSPORTS, duration, three_digits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from gradengine.plan.overlap import Overlap
    from gradengine.plan.prediction import Plan, Question
    from gradengine.plan.traffic import Traffic

__all__ = ["show", "size"]

_WIDE = 110  # columns from which on the exact bytes have room beside the others

_NAMES = {"star": "star", "ring": "ring", "ordered": "ordered", "nccl": "NCCL"}
_TIED = (
    "The tied LM head is complete when backward ends, and first in the layout's order, so nothing is hidden."
    " GradientLayout.of, given it as the first name, lets it leave last."
)
_NOTES = {
    "star": "through rank 0, rank order",
    "ring": "of other libraries, another order",
    "ordered": "alltoall and allgather, rank order",
    "nccl": "ring or double tree, by speed",
}


def show(plan: Plan, console: Console) -> None:
    """Print all of it."""
    wide = console.width >= _WIDE
    console.print(_grid(_facts(plan)))
    tables = [_memory(plan), _tensor_parallel(plan)]
    if plan.question.workers > 1:
        tables.append(_exchanges(plan, wide=wide))
    for title, table in tables:
        console.print(Text(f"\n{title}", "bold"))
        console.print(table)
    console.print(_grid(_conclusions(plan)))


def size(nbytes: float) -> str:
    """Bytes as people say them.

    >>> [size(nbytes) for nbytes in (0, 999, 4194304, 1594036224, 6.4e12)]
    ['0 B', '999 B', '4.19 MB', '1.59 GB', '6.40 TB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{three_digits(nbytes)} {unit}"
        nbytes /= 1000
    return f"{three_digits(nbytes)} TB"


def _grid(lines: Iterable[tuple[str, str | Text]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, fact in lines:
        grid.add_row(name, Text(fact) if isinstance(fact, str) else fact)  # a file's name is no markup
    return grid


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    question, model = plan.question, plan.question.model
    kinds = {"own": "", "tied": ", embedding tied to the LM head", "frozen": f", {model.frozen():,} of them frozen"}
    yield "model", f"{model.name} ({model.source}): {model.parameters:,} weights{kinds[model.embedding]}"
    heads = f"{_count(model.num_heads, 'head')}, {_count(model.num_kv_heads, 'KV head')}"
    sizes = f"H {model.hidden_size}, I {model.intermediate_size}, {heads}, V {model.vocab_size}"
    yield "", f"{_count(model.num_blocks, 'block')}, {sizes}"
    yield "ranks", _ranks(question)
    yield "links", f"{question.bandwidth} each way of each rank, between workers; {_latency(question.latency_seconds)}"
    if question.tp > 1:
        yield "", f"{question.within} within a worker; {_latency(question.tp_latency_seconds)}"
    yield "", f"{question.socket_bandwidth} each way at most through one process's sockets (tcp://)"
    batches = _count(question.micro_batches, "micro-batch", "es")
    sequences = f"{_count(question.batch_size, 'sequence')} of {_count(question.sequence_length, 'token')}"
    yield "step", f"{batches} of {sequences} a worker: {duration(plan.compute_seconds)} of compute"
    yield "backward", f"{duration(plan.compute.backward_seconds)} a micro-batch, {plan.compute.source}"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _ranks(question: Question) -> str:
    workers = _count(question.workers, "data-parallel worker")
    if question.tp == 1:
        return f"{workers} of 1 rank each"
    return (
        f"{workers} x {question.tp} tensor-parallel ranks = {question.workers * question.tp} ranks;"
        f" {question.tp} exchanges of {_count(question.workers, 'rank')} side by side"
    )


def _latency(seconds: float) -> str:
    return f"{duration(seconds)} a message"


def _memory(plan: Plan) -> tuple[str, Table]:
    question, memory = plan.question, plan.memory
    table = _table("", "bytes", "")
    rows = [
        (f"weights, {question.dtype}", memory.weights),
        (f"gradients, {question.dtype}", memory.gradients),
        ("arena of this package, float32", memory.arena),
        ("master weights, float32", memory.master_weights),
        (f"state of {question.optimizer}, float32", memory.optimizer),
    ]
    for name, nbytes in rows:
        table.add_row(name, f"{nbytes:,}", size(nbytes))
    table.add_row("on its device", f"{memory.on_device:,}", size(memory.on_device), style="bold")
    if memory.host_mirror:
        table.add_row("in host memory: the arena's mirror", f"{memory.host_mirror:,}", size(memory.host_mirror))
    if memory.coordinator:
        table.add_row("on rank 0's host: the coordinator", f"{memory.coordinator:,}", size(memory.coordinator))
    return "Memory of a rank, activations not counted", table


def _tensor_parallel(plan: Plan) -> tuple[str, Table]:
    cost, tp = plan.question.cost, plan.question.tp
    table = _table("", "bytes", "")
    for name, nbytes in (
        ("one all-reduce", cost.bytes_per_all_reduce),
        (f"{cost.all_reduces_per_step} all-reduces, one way (forward)", cost.bytes_per_step),
        ("both ways (forward and backward)", cost.bytes_per_step_both_ways),
        ("each rank's link carries, each way", cost.link_bytes_per_step),
    ):
        table.add_row(name, str(nbytes), size(nbytes))
    table.add_row("their time, part of the step's compute", "", duration(plan.tp_seconds))
    return f"Tensor parallel over {_count(tp, 'rank')}, of a step" + ("" if tp > 1 else ": nothing travels"), table


def _exchanges(plan: Plan, *, wide: bool) -> tuple[str, Table]:
    how = ["how"] if wide else []
    table = _table("", "busiest", "others", "total", "messages", "time", "hidden", "exposed", *how)
    if wide:
        table.columns[1].header = "busiest, bytes"
        table.columns[-1].justify, table.columns[-1].no_wrap, table.columns[-1].style = "left", False, "dim"
    for name, (traffic, overlap) in plan.exchanges.items():
        table.add_row(_name(name), *_cells(traffic, overlap, wide=wide), *([_NOTES[name]] if wide else []))
    table.caption = (
        "* planned, not in this version. busiest, others: bytes of one link each way; total: sent by all; messages: of"
        " the busiest rank; hidden: while the last backward runs, each span leaving after its share of it by elements"
        " (for arithmetic); exposed: what the step waits"
    )
    workers = _count(plan.question.workers, "worker")
    return f"Exchange of {size(plan.layout.nbytes)} over {workers}, of a step", table


def _name(name: str) -> Text:
    transport, style = TRANSPORTS[name], "bold" if name == "star" else "dim"
    planned = " *" if transport and name != "star" else ""
    return Text.assemble(_NAMES[name], (f" {transport}" if transport else "", style), (planned, "dim"))


def _cells(traffic: Traffic, overlap: Overlap, *, wide: bool) -> list[str]:
    busiest = f"{traffic.busiest_link_bytes:,}" if wide else size(traffic.busiest_link_bytes)
    times = (overlap.seconds, overlap.hidden_seconds, overlap.exposed_seconds)
    return [
        busiest,
        size(traffic.other_link_bytes),
        size(traffic.total_bytes),
        f"{traffic.messages}",
        *map(duration, times),
    ]


def _conclusions(plan: Plan) -> Iterator[tuple[str, str | Text]]:
    choice = plan.choice
    chosen = "no exchange" if choice.transport == "none" else choice.transport
    yield "\nchoose", Text.assemble("\n", (chosen, "bold green"), f": {choice.reason}")
    if choice.transport != "none":
        yield "", "On one machine unix://, or local_group for threads: the same bits without a network."
    if plan.question.model.embedding == "tied" and choice.transport != "none":
        yield "", _TIED


def _table(*columns: str) -> Table:
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, caption_justify="left", show_edge=False
    )
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table
