"""A question (a model, its ranks, and the links between them or the one machine they are on) and its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradengine.arguments import as_float, out_of_range, refuse_other_kind, refuse_unknown, whole_number
from gradengine.errors import CallerError
from gradengine.layout import GradientLayout
from gradengine.plan import rank
from gradengine.plan.choice import ALONE, Choice, choose
from gradengine.plan.machine import ON_ONE_MACHINE, Rates, on_one_machine, overlap_on_one_machine
from gradengine.plan.models import Model
from gradengine.plan.quantities import duration
from gradengine.plan.traffic import ALGORITHMS, SOCKETS, SUMMED, Network, Overlap, Traffic, overlapped, span_bytes
from gradengine.tensor_parallel_cost import Bandwidth, TensorParallelCost

__all__ = ["Plan", "Question", "predict"]

_FORMAT = 1  # of the JSON: docs/plan.md says what is in it
_OF_COST = "bytes_per_all_reduce all_reduces_per_step bytes_per_step bytes_per_step_both_ways link_bytes_per_step"
_MOST = 1 << 20
_COUNTS = ("workers", "tp", "sequence_length", "batch_size", "micro_batches")
_WORDS = {"dtype": tuple(rank.DTYPES), "optimizer": tuple(rank.OPTIMIZERS), "device": rank.DEVICES}
_MAY_BE_NONE = ("bandwidth", "tp_bandwidth", "backward_seconds")
_RANGES = {  # wide, but such that no sum or product of theirs overflows
    "latency_seconds": (0.0, 10.0, "s"),
    "tp_latency_seconds": (0.0, 10.0, "s"),
    "tflops": (1e-9, 1e9, "TFLOP/s"),
    "backward_seconds": (1e-9, 1e9, "s"),
    **dict.fromkeys(("bandwidth", "tp_bandwidth", "socket_bandwidth", "sum_bandwidth"), (1.0, 1e18, "bytes/s")),
}


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    Raises:
        CallerError: A number is out of range, a bandwidth names no unit, or there is not one of `bandwidth` and
            `machine`.
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
    sum_bandwidth: Bandwidth = SUMMED  # what one thread of rank 0 checks, or adds to the sum
    sequence_length: int = 1024  # tokens of a sequence
    batch_size: int = 1  # sequences of a worker's micro-batch
    micro_batches: int = 1  # of each worker in an optimizer step
    dtype: str = "float32"  # of weights, gradients and activations
    optimizer: str = "adamw"  # a key of `rank.OPTIMIZERS`
    tflops: float = 100.0  # 10^12 operations a second that a rank achieves, where backward was not measured
    # Of one micro-batch on one rank, measured with its all-reduces; None to take it from `tflops`.
    backward_seconds: float | None = None
    vocab_parallel: bool = False  # whether the vocabulary is cut too
    device: str = "cuda"  # where the model is
    machine: Rates | None = None  # the rates of the one machine that all workers are on, instead of `bandwidth`

    def __post_init__(self) -> None:
        for name in _COUNTS:
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, _MOST))
        for name, known in _WORDS.items():
            refuse_unknown(name, getattr(self, name), known)
        for name in _RANGES:
            if name not in _MAY_BE_NONE or getattr(self, name) is not None:
                _refuse_outside(name, getattr(self, name))
        if (self.bandwidth is None) == (self.machine is None):
            got = "neither" if self.machine is None else "both"
            raise CallerError("bandwidth and one machine exclude each other", got=got, expected="one of them")
        if self.machine is not None and self.tp > 1:
            expected = "1 on one machine: ranks within a worker were not measured"
            raise CallerError("tp is out of range", got=self.tp, expected=expected)

    @property
    def within(self) -> Bandwidth | None:
        """The bandwidth within a worker; the other one's where it is not given."""
        return self.tp_bandwidth or self.bandwidth

    @property
    def tp_seconds(self) -> float:
        """Of a step's all-reduces within a worker."""
        if self.within is None or self.tp == 1:
            return 0.0
        return self.cost.seconds_per_step(self.within, latency_seconds=self.tp_latency_seconds)

    @property
    def cost(self) -> TensorParallelCost:
        """Of tensor parallelism."""
        return TensorParallelCost(
            hidden_size=self.model.hidden_size,
            num_blocks=self.model.num_blocks,
            sequence_length=self.sequence_length,
            tp_size=self.tp,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            bytes_per_element=rank.DTYPES[self.dtype],
            vocab_parallel=self.vocab_parallel,
        )

    def traffic(self, layout: GradientLayout, workers: int) -> dict[str, Traffic]:
        """What each algorithm, or each transport on one machine, takes over that many workers."""
        spans = span_bytes(layout)
        if self.bandwidth is not None:
            network = Network(self.bandwidth, self.latency_seconds, self.socket_bandwidth, self.sum_bandwidth)
            return {name: algorithm(spans, workers, network) for name, algorithm in ALGORITHMS.items()}
        rates = self.machine
        return {name: on_one_machine(name, spans, workers, rates) for name in ON_ONE_MACHINE} if rates else {}


def _refuse_outside(name: str, value: Any) -> None:
    least, most, unit = _RANGES[name]
    if unit == "bytes/s":
        refuse_other_kind(name, value, Bandwidth, do="name its unit: Bandwidth.gigabits or .gigabytes")
        value = value.bytes_per_second
    if not least <= as_float(value) <= most:  # NaN is refused
        raise out_of_range(name, value, f"{least:g}..{most:g} {unit}")


@dataclass(frozen=True)
class Plan:
    """What will be."""

    question: Question  # what was asked
    layout: GradientLayout  # of one rank's gradients
    memory: rank.Memory  # of one rank
    compute: rank.Compute  # of one micro-batch
    # Algorithm, or transport on one machine -> its traffic, and what of it backward hides.
    exchanges: Mapping[str, tuple[Traffic, Overlap]]
    choice: Choice  # the transport to take

    @property
    def compute_seconds(self) -> float:
        """Of a step's micro-batches on one rank."""
        return self.question.micro_batches * self.compute.seconds

    def as_json(self) -> dict[str, Any]:
        """All of it in plain types, as docs/plan.md describes."""
        question, model, cost = self.question, self.question.model, self.question.cost
        sizes = {"kv_hidden_size": model.kv_hidden_size, "parameters": model.parameters}
        return {
            "format": _FORMAT,
            "model": dataclasses.asdict(model) | sizes | {"elements_per_rank": self.layout.num_elements},
            "question": _asked(question) | {"ranks": question.workers * question.tp},
            "memory_bytes_per_rank": dataclasses.asdict(self.memory) | {"on_device": self.memory.on_device},
            "tensor_parallel": {name: getattr(cost, name) for name in _OF_COST.split()}
            | {"seconds_per_step": question.tp_seconds},
            "compute": dataclasses.asdict(self.compute) | {"seconds_per_step": self.compute_seconds},
            "exchange": {name: _exchange(*pair) for name, pair in self.exchanges.items()},
            "choice": dataclasses.asdict(self.choice),
        }


def _asked(question: Question) -> dict[str, Any]:
    asked = dataclasses.asdict(dataclasses.replace(question, tp_bandwidth=question.within))
    del asked["model"]
    bandwidths = [name for name in asked if name.endswith("bandwidth")]
    rates = {f"{name}_bytes_per_second": asked.pop(name) for name in bandwidths}
    return asked | {name: rate and rate["bytes_per_second"] for name, rate in rates.items()}


def _exchange(traffic: Traffic, overlap: Overlap) -> dict[str, Any]:
    fields = dataclasses.asdict(traffic)
    del fields["algorithm"], fields["span_seconds"], fields["tail_seconds"]
    return fields | dataclasses.asdict(overlap) | {"hidden_seconds": overlap.hidden_seconds}


def predict(question: Question) -> Plan:
    """Answer a question.

    Raises:
        CallerError: Heads, sizes or vocabulary cannot be divided by the tensor-parallel ranks; or a measured backward
            is shorter than the all-reduces that it holds.

    Example:
        >>> from gradengine.plan.models import load_model
        >>> plan = predict(Question(load_model("350m"), workers=4, bandwidth=Bandwidth.gigabits(10)))
        >>> traffic, overlap = plan.exchanges["star"]
        >>> traffic.busiest_link_bytes, plan.choice.transport
        (4782108672, 'tcp://')
    """
    layout = question.model.layout(question.tp, vocab_parallel=question.vocab_parallel)
    frozen = question.model.frozen(question.tp, vocab_parallel=question.vocab_parallel)
    memory = rank.memory_of(
        layout, question.dtype, question.optimizer, question.workers, frozen=frozen, device=question.device
    )
    compute = _compute(question, layout)
    exchanges = _exchanges(question, layout, compute)
    overlaps = {name: overlap for name, (_, overlap) in exchanges.items()}
    faster = _over_a_faster_link(question, layout, compute)
    choice = choose(question.micro_batches, compute.seconds, overlaps, faster_link=faster)
    return Plan(question, layout, memory, compute, exchanges, choice if question.workers > 1 else ALONE)


def _compute(question: Question, layout: GradientLayout) -> rank.Compute:
    tp_seconds, backward = question.tp_seconds / question.micro_batches, question.backward_seconds
    if backward is None:
        tokens = question.batch_size * question.sequence_length
        return rank.assumed(question.model, layout, tokens, question.sequence_length, question.tflops, tp_seconds)
    if backward < tp_seconds / 2:
        raise CallerError(
            "backward_seconds is shorter than the all-reduces of tensor parallelism that it holds",
            got=duration(backward),
            expected=f"at least the {duration(tp_seconds / 2)} that they take at {question.within}",
            do="measure it on the ranks of a worker, and say how fast the links between those are (tp_bandwidth)",
        )
    return rank.measured(backward)


def _exchanges(question: Question, layout: GradientLayout, compute: rank.Compute) -> dict[str, tuple[Traffic, Overlap]]:
    shares, backward = rank.ready_shares(layout, tied=question.model.embedding == "tied"), compute.backward_seconds

    def overlap(traffic: Traffic) -> Overlap:
        if question.machine is None:
            return overlapped(shares, backward, traffic.span_seconds, traffic.tail_seconds)
        return overlap_on_one_machine(shares, backward, span_bytes(layout), traffic, question.workers, question.machine)

    return {name: (traffic, overlap(traffic)) for name, traffic in question.traffic(layout, question.workers).items()}


def _over_a_faster_link(
    question: Question, layout: GradientLayout, compute: rank.Compute
) -> tuple[Bandwidth, Overlap] | None:
    """The star over the slowest link that is as fast as rank 0's sockets; None where it has one already."""
    fastest = question.socket_bandwidth
    if question.bandwidth is None or question.bandwidth.bytes_per_second >= fastest.bytes_per_second:
        return None
    return fastest, _exchanges(dataclasses.replace(question, bandwidth=fastest), layout, compute)["star"][1]
