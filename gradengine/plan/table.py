"""A plan on a terminal: what was asked and assumed, three tables, and the transport to choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gradengine.plan.quantities import duration, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from gradengine.plan.prediction import Plan, Question

__all__ = ["show"]

_NARROW = 80  # columns, below which the bytes of the links are left out
_ALGORITHMS = {  # on one machine: the transport
    "star": "star, tcp://",
    "ordered": "ordered, mpi:// *",
    "nccl": "NCCL, nccl:// *",
    "threads": "local_group",
}
_EXPOSED = "hidden: while the last backward runs; exposed: what the step waits"
_OVER_LINKS = f"{_EXPOSED}\n* planned, not in this version"
_ONE_MACHINE = f"{_EXPOSED}, its engine's work included"
_TIED = (
    "The tied LM head is complete when backward ends, and first in the layout's order, so nothing is hidden."
    " GradientLayout.of, given it as the first name, lets it leave last."
)


def show(plan: Plan, console: Console) -> None:
    """Print all of it."""
    console.print(_grid(_facts(plan)))
    tables = [_memory(plan)]
    if plan.question.tp > 1:
        tables.append(_tensor_parallel(plan.question))
    if plan.question.workers > 1:
        tables.append(_exchanges(plan, with_bytes=console.width >= _NARROW))
    for title, table in tables:
        console.print(Text(f"\n{title}", "bold"))
        console.print(table)
    console.print("", _grid(_conclusions(plan)), sep="\n")


def _grid(lines: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, fact in lines:
        grid.add_row(name, Text(fact))  # a file's name is no markup
    return grid


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    question, model, cost = plan.question, plan.question.model, plan.question.cost
    kinds = {"own": "", "tied": ", embedding tied to the LM head", "frozen": f", {model.frozen():,} of them frozen"}
    yield "model", f"{model.name} ({model.source}): {model.parameters:,} weights{kinds[model.embedding]}"
    heads = f"{_count(model.num_heads, 'head')}, {_count(model.num_kv_heads, 'KV head')}"
    sizes = f"H {model.hidden_size}, I {model.intermediate_size}, {heads}, V {model.vocab_size}"
    yield "", f"{_count(model.num_blocks, 'block')}, {sizes}"
    ranks = f"{question.tp} tensor-parallel ranks = {question.workers * question.tp} ranks"
    workers = _count(question.workers, "data-parallel worker")
    yield "ranks", f"{workers} x {ranks}" if question.tp > 1 else f"{workers} of 1 rank each"
    yield from _links(question)
    batches = _count(question.micro_batches, "micro-batch", "es")
    sequences = f"{_count(question.batch_size, 'sequence')} of {_count(question.sequence_length, 'token')}"
    yield "step", f"{batches} of {sequences} a worker: {duration(plan.compute_seconds)} of compute"
    yield "backward", f"{duration(plan.compute.backward_seconds)} a micro-batch, {plan.compute.source}"
    if question.tp == 1:
        sent = f"{cost.bytes_per_all_reduce} bytes an all-reduce, {cost.bytes_per_step} a forward"
        yield "tensor", f"not parallel, nothing travels (--tp: {sent})"


def _links(question: Question) -> Iterator[tuple[str, str]]:
    if question.machine is not None:
        rates = {name: f"{rate / 1e9:.3g}" for name, rate in vars(question.machine).items()}
        sockets = f"two processes' sockets {rates['tcp']} GB/s (TCP), {rates['unix']} GB/s (Unix)"
        thread = f"a thread checks {rates['check']}, adds {rates['add']}, copies {rates['copy']} GB/s"
        yield "machine", f"{_count(question.machine.cores, 'core')}; {sockets}; {thread}; measured"
        return
    yield "links", f"{question.bandwidth} each way of each rank; {duration(question.latency_seconds)} a message"
    if question.tp > 1:
        yield "", f"{question.within} within a worker; {duration(question.tp_latency_seconds)} a message"
    sums = f"{question.sum_bandwidth.gigabytes_per_second:.4g} GB/s"
    yield "rank 0", f"tcp:// alone: its sockets {question.socket_bandwidth} each way, its sum {sums}"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _memory(plan: Plan) -> tuple[str, Table]:
    question, memory = plan.question, plan.memory
    rows = {
        f"weights, {question.dtype}": memory.weights,
        f"gradients, {question.dtype}": memory.gradients,
        "arena (this package), float32": memory.arena,
        "master weights, float32": memory.master_weights,
        f"state of {question.optimizer}, float32": memory.optimizer,
        "on its device": memory.on_device,
        "host memory: arena's mirror": memory.host_mirror,
        "rank 0's host: coordinator": memory.coordinator,
    }
    return "Memory of a rank, activations not counted", _bytes_table({name: n for name, n in rows.items() if n}, ",")


def _tensor_parallel(question: Question) -> tuple[str, Table]:
    cost = question.cost
    table = _bytes_table(
        {
            "one all-reduce": cost.bytes_per_all_reduce,
            f"{cost.all_reduces_per_step} one way (forward)": cost.bytes_per_step,
            "both ways (and backward)": cost.bytes_per_step_both_ways,
            "a rank's link, each way": cost.link_bytes_per_step,
        }
    )
    part = "part of the compute" if question.backward_seconds is None else "predicted"
    table.add_row(f"time, {part}", "", duration(question.tp_seconds))
    return f"Tensor parallel over {question.tp} ranks, of a step", table


def _bytes_table(rows: dict[str, int], separator: str = "") -> Table:
    table = _table("", "bytes", "")
    for name, nbytes in rows.items():
        table.add_row(name, f"{nbytes:{separator}}", size(nbytes), style="bold" if name == "on its device" else "")
    return table


def _exchanges(plan: Plan, *, with_bytes: bool) -> tuple[str, Table]:
    table = _table("", *(["busiest link", "all links", "messages"] if with_bytes else []), "time", "hidden", "exposed")
    for name, (traffic, overlap) in plan.exchanges.items():
        links = [size(traffic.busiest_link_bytes), size(traffic.total_bytes), str(traffic.messages)]
        times = map(duration, (overlap.seconds, overlap.hidden_seconds, overlap.exposed_seconds))
        table.add_row(_ALGORITHMS.get(name, name), *(links if with_bytes else []), *times)
    table.caption = _OVER_LINKS if plan.question.machine is None else _ONE_MACHINE
    return f"Exchange of {size(plan.layout.nbytes)} over {plan.question.workers} workers, of a step", table


def _conclusions(plan: Plan) -> Iterator[tuple[str, str]]:
    choice = plan.choice
    yield "choose", f"{'no exchange' if choice.transport == 'none' else choice.transport}: {choice.reason}"
    for remedy in choice.remedies:
        yield "", f"- {remedy}"
    if choice.transport == "tcp://":
        yield "", "On one machine unix://, or local_group for threads: the same bits; see --one-machine."
    if plan.question.model.embedding == "tied" and choice.transport != "none":
        yield "", _TIED


def _table(first: str, *columns: str) -> Table:
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, caption_justify="left", show_edge=False
    )
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
