"""A question (a model, its ranks, and the links between them or the one machine they are on) and its answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradengine.arguments import MOST_RANKS, as_float, out_of_range, refuse_other_kind, refuse_unknown, whole_number
from gradengine.errors import CallerError
from gradengine.exchange.linked import DEFAULT_SHARE_BYTES
from gradengine.exchange.ordered_all_reduce import Flight, flight_of
from gradengine.exchange.shares import Share, shares_of
from gradengine.layout import GradientLayout
from gradengine.layout.cost import Bandwidth, TensorParallelCost
from gradengine.plan.machine import Rates, on_one_machine, overlap_on_one_machine
from gradengine.plan.models import Model
from gradengine.plan.traffic import (
    ALGORITHMS,
    SOCKETS,
    SUMMED,
    Network,
    Overlap,
    Traffic,
    overlapped,
    ready_shares,
    span_bytes,
    weights_multiplied,
)

__all__ = [
    "Choice", "Compute", "Memory", "Plan", "Question", "choose", "compute_of", "duration", "enough_micro_batches",
    "memory_of", "predict", "row_bytes",
]  # fmt: skip

DEVICES = ("cpu", "cuda")
DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
OPTIMIZERS: Mapping[str, int] = {"adamw": 8, "lion": 4, "momentum": 4, "sgd": 0}  # bytes of fp32 state for a weight
_COUNTS = {"workers": MOST_RANKS} | dict.fromkeys(("tp", "sequence_length", "batch_size", "micro_batches"), 1 << 20)
_WORDS = {"dtype": tuple(DTYPES), "optimizer": tuple(OPTIMIZERS), "device": DEVICES}
_MAY_BE_NONE = ("bandwidth", "tp_bandwidth", "backward_seconds")
_RANGES = {  # wide, but such that no sum or product of theirs overflows
    "latency_seconds": (0.0, 10.0, "s"),
    "tp_latency_seconds": (0.0, 10.0, "s"),
    "tflops": (1e-9, 1e9, "TFLOP/s"),
    "backward_seconds": (1e-9, 1e9, "s"),
    "gpu_gigabytes": (1e-3, 1e9, "GB"),
    **dict.fromkeys(("bandwidth", "tp_bandwidth", "socket_bandwidth", "sum_bandwidth"), (1.0, 1e18, "bytes/s")),
}
_TRANSPORTS = {"ordered": "tcp://", "nccl": "process_group="}  # the others are named as they are passed
_FORMAT = 3  # of the JSON: docs/plan.md says what is in it
_OF_COST = "bytes_per_all_reduce all_reduces_per_step bytes_per_step bytes_per_step_both_ways link_bytes_per_step"
_ENOUGH = 0.05  # of a step: what something faster must save to be worth its trouble
_LONG = 0.2  # of a step: what a wait may take before it is to be said how it is shortened
_NOTHING = 5e-9  # seconds: what a difference of two times leaves where it is none


@dataclass(frozen=True)
class Question:
    """The question: a model, its ranks, and the links between them or their one machine.

    Raises:
        CallerError: A number is out of range, a bandwidth has no unit, or not exactly one of `bandwidth` and `machine`
            is given.
    """

    model: Model  # the transformer
    workers: int  # data-parallel workers, each a group of `tp` ranks
    # Of each rank's link to the same rank of the other workers, each way; None on one machine.
    bandwidth: Bandwidth | None = None
    tp: int = 1  # tensor-parallel ranks of a worker
    tp_bandwidth: Bandwidth | None = None  # of each rank's link within its worker, each way; None for `bandwidth`
    latency_seconds: float = 50e-6  # of a message between workers
    tp_latency_seconds: float = 10e-6  # of a message within a worker
    socket_bandwidth: Bandwidth = SOCKETS  # what one process moves through its sockets each way
    sum_bandwidth: Bandwidth = SUMMED  # of the parts that one process sums
    sequence_length: int = 1024  # tokens of a sequence
    batch_size: int = 1  # sequences of a worker's micro-batch
    micro_batches: int = 1  # of each worker in an optimizer step
    dtype: str = "float32"  # of weights, gradients and activations
    optimizer: str = "adamw"  # a key of `OPTIMIZERS`
    tflops: float = 100.0  # 10^12 operations a second that a rank achieves, where backward was not measured
    tflops_measured: bool = False  # whether that is a worker's share of the one machine's, measured
    # Of one micro-batch on one rank, measured with its all-reduces; None to take it from `tflops`.
    backward_seconds: float | None = None
    vocab_parallel: bool = False  # whether the vocabulary is cut too
    device: str = "cuda"  # where the model is
    gpu_gigabytes: float = 80.0  # memory of a GPU, in 10^9 bytes
    machine: Rates | None = None  # the rates of the one machine that all workers are on, instead of `bandwidth`

    def __post_init__(self) -> None:
        for name, most in _COUNTS.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, most))
        for name, known in _WORDS.items():
            refuse_unknown(name, getattr(self, name), known)
        for name in _RANGES:
            if name not in _MAY_BE_NONE or getattr(self, name) is not None:
                _refuse_outside(name, getattr(self, name))
        if (self.bandwidth is None) == (self.machine is None):
            both = self.machine is not None
            do = "pass --bandwidth '10 Gbit/s', or --one-machine if all workers are on this one"
            what = "bandwidth and machine exclude each other" if both else "bandwidth or machine is needed"
            raise CallerError(what, got="both" if both else "neither", expected="one of them", do=do)
        if self.machine is not None and self.tp > 1:
            expected = "1 on one machine: ranks within a worker were not measured"
            raise CallerError("tp is out of range", got=self.tp, expected=expected)

    @property
    def within(self) -> Bandwidth | None:
        """The bandwidth within a worker; by default that between workers."""
        return self.tp_bandwidth or self.bandwidth

    @property
    def tp_seconds(self) -> float:
        """Seconds of a step's all-reduces within a worker."""
        if self.within is None or self.tp == 1:
            return 0.0
        return self.cost.seconds_per_step(self.within, latency_seconds=self.tp_latency_seconds)

    @property
    def cost(self) -> TensorParallelCost:
        """The communication cost of tensor parallelism."""
        return TensorParallelCost(
            hidden_size=self.model.hidden_size, num_blocks=self.model.num_blocks, tp_size=self.tp,
            sequence_length=self.sequence_length, batch_size=self.batch_size, micro_batches=self.micro_batches,
            bytes_per_element=DTYPES[self.dtype], vocab_parallel=self.vocab_parallel,
        )  # fmt: skip

    @property
    def has_shared_cores(self) -> bool:
        """Whether the cores that exchange are those that compute: backward hides nothing then."""
        return self.machine is not None and self.device == "cpu"

    def traffic(self, layout: GradientLayout, workers: int) -> dict[str, Traffic]:
        """The traffic of each algorithm, or each transport on one machine, over that many workers."""
        spans = span_bytes(layout)
        if self.bandwidth is not None:
            network = Network(self.bandwidth, self.latency_seconds, self.socket_bandwidth, self.sum_bandwidth)
            names = [name for name in ALGORITHMS if name != "nccl" or self.device == "cuda"]
            return {name: ALGORITHMS[name](spans, workers, network) for name in names}
        rates = self.machine
        assert rates is not None  # noqa: S101  (one of both is given)
        return {name: on_one_machine(name, spans, workers, rates) for name in rates.transports(self.device)}


def _refuse_outside(name: str, value: Any) -> None:
    least, most, unit = _RANGES[name]
    if unit == "bytes/s":
        refuse_other_kind(name, value, Bandwidth, do="name its unit: Bandwidth.gigabits or .gigabytes")
        value = value.bytes_per_second
    if not least <= as_float(value) <= most:  # NaN is refused
        raise out_of_range(name, value, f"{least:g}..{most:g} {unit}")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, activations not counted."""

    weights: int  # in the gradients' dtype, those that are not trained among them
    gradients: int  # as backward leaves them, in their dtype
    arena: int  # the fp32 sum of micro-batches and workers
    master_weights: int  # a copy of the trained weights in fp32, where they are kept in less
    optimizer: int  # its state in fp32
    exchange_rows: int  # host memory for other ranks' parts of this rank's shares, and for the sum of one
    pinned_rows: int  # pinned host memory through which a GPU's arena is exchanged

    @property
    def on_device(self) -> int:
        """Bytes on the model's device."""
        return self.weights + self.gradients + self.arena + self.master_weights + self.optimizer


@dataclass(frozen=True)
class Compute:
    """Seconds of one micro-batch on one rank, all-reduces of tensor parallelism included."""

    forward_seconds: float  # its forward
    backward_seconds: float  # its backward, twice the forward's arithmetic
    source: str  # where the figures are from, as the table says it

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Choice:
    """The recommended transport."""

    # "none" for one worker, "shared memory" or "unix://" on one machine, else "tcp://", or "process_group=" by NCCL
    transport: str
    reason: str  # one sentence
    waits_of_step: float = 0.0  # the step's wait for it, as a share of the step
    remedies: tuple[str, ...] = ()  # ways to shorten a wait of more than a fifth of the step, each a sentence


@dataclass(frozen=True)
class Plan:
    """The answer: memory, seconds, traffic, and the transport to use."""

    question: Question  # the question that was asked
    layout: GradientLayout  # of one rank's gradients
    memory: Memory  # of one rank
    compute: Compute  # of one micro-batch
    # Algorithm, or transport on one machine -> its traffic, and what of it backward hides.
    exchanges: Mapping[str, tuple[Traffic, Overlap]]
    choice: Choice  # the transport to take

    @property
    def missing_bytes(self) -> int:
        """Bytes by which a rank's memory is more than its GPU's; 0 if it fits, or on the CPU."""
        if self.question.device != "cuda":
            return 0
        return max(0, self.memory.on_device - int(1e9 * self.question.gpu_gigabytes))

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step's micro-batches on one rank."""
        return self.question.micro_batches * self.compute.seconds

    def as_json(self) -> dict[str, Any]:
        """The plan in plain types, as docs/plan.md describes."""
        question, model, cost = self.question, self.question.model, self.question.cost
        sizes = {"kv_hidden_size": model.kv_hidden_size, "parameters": model.parameters}
        return {
            "format": _FORMAT,
            "model": dataclasses.asdict(model) | sizes | {"elements_per_rank": self.layout.num_elements},
            "question": _asked(question) | {"ranks": question.workers * question.tp},
            "memory_bytes_per_rank": dataclasses.asdict(self.memory)
            | {"on_device": self.memory.on_device, "missing": self.missing_bytes},
            "tensor_parallel": {name: getattr(cost, name) for name in _OF_COST.split()}
            | {"seconds_per_step": question.tp_seconds},
            "compute": dataclasses.asdict(self.compute) | {"seconds_per_step": self.compute_seconds},
            "exchange": {name: _exchange(*pair) for name, pair in self.exchanges.items()},
            "choice": dataclasses.asdict(self.choice),
        }


def _asked(question: Question) -> dict[str, Any]:
    asked = dataclasses.asdict(dataclasses.replace(question, tp_bandwidth=question.within))
    del asked["model"]
    rates = {name: asked.pop(name) for name in list(asked) if name.endswith("bandwidth")}
    return asked | {f"{name}_bytes_per_second": rate and rate["bytes_per_second"] for name, rate in rates.items()}


def _exchange(traffic: Traffic, overlap: Overlap) -> dict[str, Any]:
    fields = dataclasses.asdict(traffic)
    del fields["span_seconds"], fields["tail_seconds"]
    return fields | dataclasses.asdict(overlap) | {"hidden_seconds": overlap.hidden_seconds}


def predict(question: Question) -> Plan:
    """Answer a question.

    Raises:
        CallerError: Heads, sizes or vocabulary cannot be divided by the tensor-parallel ranks; or a measured backward
            is shorter than the all-reduces that it holds.

    Example:
        >>> from gradengine.plan.models import load_model
        >>> plan = predict(Question(load_model("350m"), workers=4, bandwidth=Bandwidth.gigabits(10)))
        >>> traffic, overlap = plan.exchanges["ordered"]
        >>> traffic.busiest_link_bytes, plan.choice.transport
        (2391054336, 'process_group=')
    """
    layout = question.model.layout(question.tp, vocab_parallel=question.vocab_parallel)
    compute = compute_of(question, layout)
    exchanges = _exchanges(question, layout, compute)
    overlaps = {name: overlap for name, (_, overlap) in exchanges.items()}
    choice = Choice("none", "one worker has nobody to exchange with: build the engine without exchange=.")
    if question.workers > 1:
        faster = _over_a_faster_link(question, layout, compute)
        choice = choose(question.micro_batches, compute.seconds, overlaps, faster_link=faster)
    return Plan(question, layout, memory_of(question, layout), compute, exchanges, choice)


def memory_of(question: Question, layout: GradientLayout) -> Memory:
    """The memory of one rank."""
    elements, width = layout.num_elements, DTYPES[question.dtype]
    frozen = question.model.frozen(question.tp, vocab_parallel=question.vocab_parallel)
    rows, pinned = row_bytes(layout, question.workers)
    return Memory(
        weights=width * (elements + frozen),
        gradients=width * elements,
        arena=layout.nbytes,
        master_weights=4 * elements if width < 4 else 0,
        optimizer=OPTIMIZERS[question.optimizer] * elements,
        exchange_rows=rows,
        pinned_rows=pinned if question.device == "cuda" else 0,
    )


def row_bytes(layout: GradientLayout, workers: int) -> tuple[int, int]:
    """The most bytes that a rank has for shares in flight: memory for parts and a sum; and pinned, for a GPU's arena.

    >>> row_bytes(GradientLayout.of([(1 << 21,)]), workers=2)  # one share each, 4 MiB: two rows, as pinned ones
    (8388608, 8388608)
    """
    if workers == 1:
        return 0, 0
    shares = shares_of(layout, workers, DEFAULT_SHARE_BYTES * workers)
    owned: dict[int, list[Share]] = {}
    for share in shares:
        owned.setdefault(share.owner, []).append(share)
    largest = max(share.size for share in shares)
    flights = [flight_of(mine, len(shares), largest) for mine in owned.values()]

    def rows(flight: Flight) -> int:
        return 4 * flight.largest_own * (1 + flight.received * (workers - 1))

    return max(map(rows, flights)), max(4 * each.largest * (each.own + each.sent) for each in flights)


def compute_of(question: Question, layout: GradientLayout) -> Compute:
    """A backward that was measured, or arithmetic: 2 operations a weight and token forward, 4 backward.

    Attention's scores and their sum are 4 S operations a token, block and hidden element, over all ranks.

    Raises:
        CallerError: The measured time is shorter than the all-reduces in it.
    """
    all_reduces, backward = question.tp_seconds / question.micro_batches / 2, question.backward_seconds
    if backward is None:
        model, length = question.model, question.sequence_length
        weights = sum(weights_multiplied(span) for span in layout.spans)
        scores = 4 * length * model.hidden_size * model.num_blocks / layout.tp_size
        forward = question.batch_size * length * (2 * weights + scores) / (1e12 * question.tflops)
        if question.tflops_measured:
            whole = f"{question.workers * question.tflops:.3g} TFLOP/s"
            return Compute(forward, 2 * forward, f"by this machine's {whole}, measured, which all workers share")
        rank = f"{'GPU' if question.device == 'cuda' else 'CPU'} of {question.tflops:g} TFLOP/s"
        source = f"assumed: each rank a {rank} (--tflops)" + (", with its all-reduces" if all_reduces else "")
        return Compute(forward + all_reduces, 2 * forward + all_reduces, source)
    if backward < all_reduces:
        raise CallerError(
            "backward_seconds is shorter than the all-reduces of tensor parallelism in it",
            got=duration(backward),
            expected=f"at least the {duration(all_reduces)} that they take at {question.within}",
            do="measure it on the ranks of a worker, and say how fast the links between those are (--tp-bandwidth)",
        )
    return Compute(backward / 2, backward, "measured by you")


def _exchanges(question: Question, layout: GradientLayout, compute: Compute) -> dict[str, tuple[Traffic, Overlap]]:
    shares, backward = ready_shares(layout, tied=question.model.embedding == "tied"), compute.backward_seconds
    if question.has_shared_cores:
        backward = 0.0

    def overlap(traffic: Traffic) -> Overlap:
        if question.workers == 1:
            return Overlap(0.0, 0.0)
        if question.machine is None:
            return overlapped(shares, backward, traffic.span_seconds, traffic.tail_seconds)
        return overlap_on_one_machine(shares, backward, span_bytes(layout), traffic, question.workers, question.machine)

    return {name: (traffic, overlap(traffic)) for name, traffic in question.traffic(layout, question.workers).items()}


def _over_a_faster_link(
    question: Question, layout: GradientLayout, compute: Compute
) -> tuple[Bandwidth, Overlap] | None:
    """The exchange over the slowest link that is as fast as a process's sockets; None if the own link is as fast."""
    fastest = question.socket_bandwidth
    if question.bandwidth is None or question.bandwidth.bytes_per_second >= fastest.bytes_per_second:
        return None
    return fastest, _exchanges(dataclasses.replace(question, bandwidth=fastest), layout, compute)["ordered"][1]


def choose(
    micro_batches: int,
    micro_batch_seconds: float,
    exchanges: Mapping[str, Overlap],
    *,
    faster_link: tuple[Bandwidth, Overlap] | None = None,
) -> Choice:
    """The transport to use, how long a step of several workers waits for it, and what would shorten that.

    NCCL is taken if it shortens a step by more than a twentieth. `faster_link` is a link as fast as the sockets, with
    the exchange over it, if the question's own link is slower.

    Example:
        >>> choose(1, 0.99, {"unix://": Overlap(1.0, 0.01)}).reason
        'a step waits 10.0 ms for it, 1.0% of its time.'
    """
    taken = next(name for name in ("ordered", "shared memory", "unix://") if name in exchanges)
    waits, compute = exchanges[taken].exposed_seconds, micro_batches * micro_batch_seconds
    if "nccl" in exchanges and waits - exchanges["nccl"].exposed_seconds > _ENOUGH * (compute + waits):
        taken, waits, faster_link = "nccl", exchanges["nccl"].exposed_seconds, None
    transport, step = _TRANSPORTS.get(taken, taken), compute + waits
    reason = f"a step waits {duration(waits)} for it, {waits / step:.1%} of its time."
    if waits <= _LONG * step:
        return Choice(transport, reason, waits / step)
    enough = enough_micro_batches(micro_batch_seconds, waits)
    remedies = [f"More micro-batches: {enough:,} a step, not {micro_batches:,}, make the wait a fifth of it."]
    if faster_link is not None:
        link, faster = faster_link[0], duration(faster_link[1].exposed_seconds)
        remedies.append(f"A faster link: at {link} a step would wait {faster}; more is no faster.")
    ring = exchanges.get("ring", exchanges[taken]).exposed_seconds
    if waits - ring > _ENOUGH * step:
        faster = duration(ring)
        remedies.append(f"Another library's ring, such as gloo's, would wait {faster}; its sums are in another order.")
    return Choice(transport, reason, waits / step, tuple(remedies))


def enough_micro_batches(micro_batch_seconds: float, waits: float) -> int:
    """The number of micro-batches that makes a wait a fifth of the step; only the last one's backward hides any of it.

    >>> enough_micro_batches(0.5, waits=1.0)
    8
    """
    return math.ceil(waits * (1 - _LONG) / _LONG / micro_batch_seconds * (1 - 1e-12))


def duration(seconds: float) -> str:
    """Seconds as text of three digits and a unit.

    >>> [duration(seconds) for seconds in (0, 5e-6, 0.0123, 0.9996, 3.5, 62.6, 4000)]
    ['0 s', '5.00 us', '12.3 ms', '1.00 s', '3.50 s', '62.6 s', '4000 s']
    """
    if seconds < _NOTHING:
        return "0 s"
    scale, unit = next((s, u) for s, u in ((1e6, "us"), (1e3, "ms"), (1, "s")) if seconds * s < 999.5 or u == "s")
    digits = 2 - sum(seconds * scale >= limit for limit in (9.995, 99.95))
    return f"{seconds * scale:.{digits}f} {unit}"
