"""A plan on a terminal: what was asked and assumed, three tables, and the transport to choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gradengine.plan.choice import TRANSPORTS
from gradengine.plan.quantities import duration, rate, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from gradengine.plan.overlap import Overlap
    from gradengine.plan.prediction import Plan, Question
    from gradengine.plan.traffic import Traffic

__all__ = ["show"]

_WIDE = 110  # columns from which on the exact bytes have room beside the others
_NARROW = 80  # below which the bytes of the links are left out
_LEAST = 60  # below which lines are cut

_NAMES = {"star": "star", "ring": "ring", "ordered": "ordered", "nccl": "NCCL"}  # on one machine: the transport
_TIED = (
    "The tied LM head is complete when backward ends, and first in the layout's order, so nothing is hidden."
    " GradientLayout.of, given it as the first name, lets it leave last."
)
_NOTES = {
    "star": "through rank 0, rank order",
    "ring": "of other libraries, another order",
    "ordered": "alltoall and allgather, rank order",
    "nccl": "ring or double tree, by speed",
    "tcp://": "processes, loopback, rank order",
    "unix://": "processes, rank order",
    "threads": "of one process (local_group), rank order",
}
_LINKS = (
    "* planned, not in this version. Only tcp:// is limited by its hosts here, the others by nothing but the links."
)
_ONE_MACHINE = "Predicted from those rates. exposed here: with the engines' work, on the same cores."
_OF_LINKS = "busiest, others: bytes of one link each way; total: sent by all; messages: of the busiest rank;"
_OF_TIMES = (
    "hidden: while the last backward runs, each span leaving after its share of it by elements (for arithmetic);"
    " exposed: what the step waits"
)


def show(plan: Plan, console: Console) -> None:
    """Print all of it."""
    if console.width < _LEAST:
        console.print(f"(cut to {console.width} columns: {_LEAST} show all of it, 80 the links' bytes too)")
    console.print(_grid(_facts(plan)))
    tables = [_memory(plan)]
    if plan.question.tp > 1:
        tables.append(_tensor_parallel(plan))
    if plan.question.workers > 1:
        tables.append(_exchanges(plan, console.width))
    for title, table in tables:
        console.print(Text(f"\n{title}", "bold"))
        console.print(table)
    console.print(_grid(_conclusions(plan)))


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
    yield from _links(question)
    batches = _count(question.micro_batches, "micro-batch", "es")
    sequences = f"{_count(question.batch_size, 'sequence')} of {_count(question.sequence_length, 'token')}"
    yield "step", f"{batches} of {sequences} a worker: {duration(plan.compute_seconds)} of compute"
    yield "backward", f"{duration(plan.compute.backward_seconds)} a micro-batch, {plan.compute.source}"
    if question.tp == 1:
        cost = question.cost
        one, all_of_them = f"{cost.bytes_per_all_reduce} bytes", f"{cost.all_reduces_per_step} one way"
        yield (
            "tensor",
            f"not parallel, nothing travels (with --tp: {one} an all-reduce, {cost.bytes_per_step} the {all_of_them})",
        )


def _links(question: Question) -> Iterator[tuple[str, str]]:
    machine, within = question.machine, question.within
    if machine is not None:
        sockets = (
            f"plain sockets of two processes {machine.tcp / 1e9:.3g} GB/s (TCP), {machine.unix / 1e9:.3g} GB/s (Unix)"
        )
        thread = (
            f"looks at {machine.check / 1e9:.3g}, adds {machine.add / 1e9:.3g}, copies {machine.copy / 1e9:.3g} GB/s"
        )
        yield "machine", f"{_count(machine.cores, 'core')}; {sockets}; one thread {thread}; measured"
        return
    network = question.network
    yield (
        "links",
        f"{rate(network.bandwidth)} each way of each rank, between workers; {_latency(network.latency_seconds)}",
    )
    if question.tp > 1 and within is not None:
        yield "", f"{rate(within)} within a worker; {_latency(question.tp_latency_seconds)}"
    yield "rank 0", f"{rate(network.socket_bandwidth)} each way at most through one process's sockets (tcp://)"
    yield "", f"{network.sum_bandwidth.gigabytes_per_second:.4g} GB/s looked at or added by its one summing thread"


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
        ("arena (this package), float32", memory.arena),
        ("master weights, float32", memory.master_weights),
        (f"state of {question.optimizer}, float32", memory.optimizer),
    ]
    for name, nbytes in rows:
        table.add_row(name, f"{nbytes:,}", size(nbytes))
    table.add_row("on its device", f"{memory.on_device:,}", size(memory.on_device), style="bold")
    if memory.host_mirror:
        table.add_row("host memory: arena's mirror", f"{memory.host_mirror:,}", size(memory.host_mirror))
    if memory.coordinator:
        table.add_row("rank 0's host: coordinator", f"{memory.coordinator:,}", size(memory.coordinator))
    return "Memory of a rank, activations not counted", table


def _tensor_parallel(plan: Plan) -> tuple[str, Table]:
    cost, tp = plan.question.cost, plan.question.tp
    table = _table("", "bytes", "")
    for name, nbytes in (
        ("one all-reduce", cost.bytes_per_all_reduce),
        (f"{cost.all_reduces_per_step} one way (forward)", cost.bytes_per_step),
        ("both ways (and backward)", cost.bytes_per_step_both_ways),
        ("a rank's link, each way", cost.link_bytes_per_step),
    ):
        table.add_row(name, str(nbytes), size(nbytes))
    assumed = plan.question.backward_seconds is None
    table.add_row("time, part of the compute" if assumed else "time, predicted", "", duration(plan.tp_seconds))
    return f"Tensor parallel over {_count(tp, 'rank')}, of a step", table


def _exchanges(plan: Plan, width: int) -> tuple[str, Table]:
    wide, narrow = width >= _WIDE, width < _NARROW
    links = [] if narrow else ["busiest, bytes" if wide else "busiest", "others", "total", "messages"]
    table = _table("", *links, "time", "hidden", "exposed", *(["how"] if wide else []))
    if wide:
        table.columns[-1].justify, table.columns[-1].no_wrap, table.columns[-1].style = "left", False, "dim"
    for name, (traffic, overlap) in plan.exchanges.items():
        bytes_of_links = [] if narrow else _bytes(traffic, wide=wide)
        table.add_row(_name(name), *bytes_of_links, *_times(overlap), *([_NOTES[name]] if wide else []))
    captions = [_LINKS if plan.question.machine is None else _ONE_MACHINE, *([] if narrow else [_OF_LINKS]), _OF_TIMES]
    table.caption = " ".join(captions)
    workers = _count(plan.question.workers, "worker")
    return f"Exchange of {size(plan.layout.nbytes)} over {workers}, of a step", table


def _name(name: str) -> Text:
    transport, style = TRANSPORTS.get(name), "bold" if name == "star" else "dim"
    planned = " *" if transport and name != "star" else ""
    return Text.assemble(_NAMES.get(name, name), (f" {transport}" if transport else "", style), (planned, "dim"))


def _bytes(traffic: Traffic, *, wide: bool) -> list[str]:
    busiest = f"{traffic.busiest_link_bytes:,}" if wide else size(traffic.busiest_link_bytes)
    return [busiest, size(traffic.other_link_bytes), size(traffic.total_bytes), f"{traffic.messages}"]


def _times(overlap: Overlap) -> list[str]:
    return [duration(seconds) for seconds in (overlap.seconds, overlap.hidden_seconds, overlap.exposed_seconds)]


def _conclusions(plan: Plan) -> Iterator[tuple[str, str | Text]]:
    choice = plan.choice
    chosen = "no exchange" if choice.transport == "none" else choice.transport
    yield "\nchoose", Text.assemble("\n", (chosen, "bold green"), f": {choice.reason}")
    for remedy in choice.remedies:
        yield "", f"- {remedy}"
    if choice.transport == "tcp://":
        yield "", "On one machine unix://, or local_group for threads: the same bits; --one-machine predicts them."
    if choice.transport == "unix://":
        yield "", "Threads of one process: local_group. Both have the same bits as tcp://."
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
