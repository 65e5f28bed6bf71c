"""A question (model, ranks, network) and all that can be said about it before the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradengine.errors import CallerError
from gradengine.layout import GradientLayout
from gradengine.plan.choice import Choice, choose
from gradengine.plan.compute import Compute, assumed, measured, ready_shares
from gradengine.plan.memory import DEVICES, DTYPES, OPTIMIZERS, Memory, memory_of
from gradengine.plan.models import Model
from gradengine.plan.overlap import Overlap, overlapped
from gradengine.plan.traffic import ALGORITHMS, Network, Traffic, span_bytes
from gradengine.tensor_parallel_cost import Bandwidth, TensorParallelCost

__all__ = ["Plan", "Question", "predict"]

_FORMAT = 1  # of the JSON: docs/plan.md says what is in it
_MOST_RANKS = 1 << 20
_RANGES = (  # wide, but such that no sum or product of theirs overflows
    ("latency_seconds", 0.0, 1e3, "s"),
    ("tp_latency_seconds", 0.0, 1e3, "s"),
    ("tflops", 1e-9, 1e9, "TFLOP/s"),
    ("backward_seconds", 1e-9, 1e9, "s"),
)


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    Attributes:
        model: The transformer.
        workers: Data-parallel workers, each a group of `tp` ranks.
        tp: Tensor-parallel ranks of a worker.
        bandwidth: Of each rank's link to the same rank of the other workers, each way.
        tp_bandwidth: Of each rank's link within its worker, each way.
        latency_seconds: Of a message between workers.
        tp_latency_seconds: Of a message within a worker.
        socket_bandwidth: What one process moves through its sockets each way.
        sequence_length: Tokens of a sequence.
        batch_size: Sequences of a rank's micro-batch.
        micro_batches: Of an optimizer step.
        dtype: Of weights, gradients and activations.
        optimizer: A key of `memory.OPTIMIZERS`.
        tflops: 10^12 operations a second that a rank achieves, where backward was not measured.
        backward_seconds: Of one micro-batch on one rank, measured; None to take it from `tflops`.
        vocab_parallel: Whether the vocabulary is cut too.
        device: Where the model is.

    Raises:
        CallerError: A number is out of range.
    """

    model: Model
    workers: int
    bandwidth: Bandwidth
    tp: int = 1
    tp_bandwidth: Bandwidth | None = None
    latency_seconds: float = 50e-6
    tp_latency_seconds: float = 10e-6
    socket_bandwidth: Bandwidth = dataclasses.field(default_factory=lambda: Bandwidth.gigabytes(3))
    sequence_length: int = 1024
    batch_size: int = 1
    micro_batches: int = 1
    dtype: str = "float32"
    optimizer: str = "adamw"
    tflops: float = 100.0
    backward_seconds: float | None = None
    vocab_parallel: bool = False
    device: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("workers", "tp", "sequence_length", "batch_size", "micro_batches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_RANKS:
                raise CallerError(f"{name} is out of range", got=value, expected=f"a whole number, 1..{_MOST_RANKS}")
        for name, least, most, unit in _RANGES:
            _refuse_outside(name, getattr(self, name), least, most, unit)
        for name in ("bandwidth", "tp_bandwidth", "socket_bandwidth"):
            if getattr(self, name) is not None:
                _refuse_outside(name, getattr(self, name).bytes_per_second, 1.0, 1e18, "bytes/s")
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise CallerError(
                    f"unknown {name}", got=repr(getattr(self, name)), expected=f"one of {', '.join(known)}"
                )

    @property
    def network(self) -> Network:
        """Between workers."""
        return Network(self.bandwidth, self.latency_seconds, self.socket_bandwidth)

    @property
    def within(self) -> Bandwidth:
        """The bandwidth within a worker; the other one's where it is not given."""
        return self.tp_bandwidth or self.bandwidth

    @property
    def cost(self) -> TensorParallelCost:
        """Of tensor parallelism."""
        return TensorParallelCost(
            self.model.hidden_size,
            self.model.num_blocks,
            self.sequence_length,
            self.tp,
            self.batch_size,
            self.micro_batches,
            DTYPES[self.dtype],
        )


@dataclass(frozen=True)
class Plan:
    """What will be.

    Attributes:
        question: What was asked.
        layout: Of one rank's gradients.
        memory: Of one rank.
        compute: Of one micro-batch.
        tp_seconds: Of a step's all-reduces within a worker, part of the compute where that is assumed.
        exchanges: Algorithm -> its traffic, and what of it backward hides.
        choice: The transport to take.
    """

    question: Question
    layout: GradientLayout
    memory: Memory
    compute: Compute
    tp_seconds: float
    exchanges: Mapping[str, tuple[Traffic, Overlap]]
    choice: Choice

    @property
    def compute_seconds(self) -> float:
        """Of a step's micro-batches on one rank."""
        return self.question.micro_batches * (self.compute.forward_seconds + self.compute.backward_seconds)

    def as_json(self) -> dict[str, Any]:
        """All of it in plain types, as docs/plan.md describes."""
        question, cost = self.question, self.question.cost
        model = dataclasses.asdict(question.model) | {
            "kv_hidden_size": question.model.kv_hidden_size,
            "parameters": question.model.parameters,
            "elements_per_rank": self.layout.num_elements,
        }
        return {
            "format": _FORMAT,
            "model": model,
            "question": _asked(question),
            "memory_bytes_per_rank": dataclasses.asdict(self.memory) | {"on_device": self.memory.on_device},
            "tensor_parallel": {
                "bytes_per_all_reduce": cost.bytes_per_all_reduce,
                "all_reduces_per_step": cost.all_reduces_per_step,
                "bytes_per_step": cost.bytes_per_step,
                "bytes_per_step_both_ways": cost.bytes_per_step_both_ways,
                "link_bytes_per_step": cost.link_bytes_per_step,
                "seconds_per_step": self.tp_seconds,
            },
            "compute": dataclasses.asdict(self.compute) | {"seconds_per_step": self.compute_seconds},
            "exchange": {name: _shown(*pair) for name, pair in self.exchanges.items()},
            "choice": dataclasses.asdict(self.choice),
        }


def predict(question: Question) -> Plan:
    """Answer a question.

    Raises:
        CallerError: Heads, sizes or vocabulary cannot be divided by the tensor-parallel ranks.

    Example:
        >>> from gradengine.plan.models import load_model
        >>> plan = predict(Question(load_model("350m"), workers=4, bandwidth=Bandwidth.gigabits(10)))
        >>> traffic, overlap = plan.exchanges["star"]
        >>> traffic.busiest_link_bytes, plan.choice.transport
        (4782108672, 'tcp://')
    """
    layout = question.model.layout(question.tp, vocab_parallel=question.vocab_parallel)
    tp_seconds = _tp_seconds(question)
    compute = _compute(question, layout, tp_seconds)
    exchanges = _exchanges(question, layout, compute.backward_seconds)
    step = question.micro_batches * (compute.forward_seconds + compute.backward_seconds)
    return Plan(
        question,
        layout,
        memory_of(
            layout,
            question.dtype,
            question.optimizer,
            question.workers,
            frozen=question.model.frozen(question.tp, vocab_parallel=question.vocab_parallel),
            device=question.device,
        ),
        compute,
        tp_seconds,
        exchanges,
        choose(question.workers, step, {name: overlap for name, (_, overlap) in exchanges.items()}),
    )


def _tp_seconds(question: Question) -> float:
    """A step's all-reduces; a vocabulary that is cut adds the embedding's and, backward, the LM head's."""
    cost = question.cost
    seconds = cost.seconds_per_step(question.within, question.tp_latency_seconds)
    blocks = question.model.num_blocks
    return seconds * (2 * blocks + 1) / (2 * blocks) if question.vocab_parallel else seconds


def _compute(question: Question, layout: GradientLayout, tp_seconds: float) -> Compute:
    if question.backward_seconds is not None:
        return measured(question.backward_seconds)
    return assumed(
        question.model,
        layout,
        question.batch_size * question.sequence_length,
        question.sequence_length,
        question.tflops,
        tp_seconds / question.micro_batches,
    )


def _exchanges(
    question: Question, layout: GradientLayout, backward_seconds: float
) -> dict[str, tuple[Traffic, Overlap]]:
    shares, spans = ready_shares(layout, tied=question.model.embedding == "tied"), span_bytes(layout)
    found = {}
    for name, algorithm in ALGORITHMS.items():
        traffic = algorithm(spans, question.workers, question.network)
        found[name] = traffic, overlapped(shares, backward_seconds, traffic.span_seconds, traffic.tail_seconds)
    return found


def _asked(question: Question) -> dict[str, Any]:
    fields = {field.name: getattr(question, field.name) for field in dataclasses.fields(question)}
    del fields["model"]
    fields["tp_bandwidth"] = question.within
    rates = {name: value for name, value in fields.items() if isinstance(value, Bandwidth)}
    plain = {name: value for name, value in fields.items() if name not in rates}
    return (
        plain
        | {f"{name}_bytes_per_second": value.bytes_per_second for name, value in rates.items()}
        | {"ranks": question.workers * question.tp}
    )


def _shown(traffic: Traffic, overlap: Overlap) -> dict[str, Any]:
    fields = dataclasses.asdict(traffic)
    del fields["algorithm"], fields["span_seconds"], fields["tail_seconds"]
    return fields | {
        "seconds": overlap.seconds,
        "hidden_seconds": overlap.hidden_seconds,
        "exposed_seconds": overlap.exposed_seconds,
    }


def _refuse_outside(name: str, value: float | None, least: float, most: float, unit: str) -> None:
    if value is None and name == "backward_seconds":
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:  # NaN is refused
        raise CallerError(f"{name} is out of range", got=f"{value} {unit}", expected=f"{least:g}..{most:g} {unit}")
