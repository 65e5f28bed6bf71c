"""All that can be said about a run before it: the answer to a question."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradengine.errors import CallerError
from gradengine.layout import GradientLayout
from gradengine.plan.choice import Choice, Step, choose
from gradengine.plan.compute import Compute, assumed, measured, ready_shares
from gradengine.plan.machine import Rates, overlap_on_one_machine
from gradengine.plan.memory import Memory, memory_of
from gradengine.plan.overlap import Overlap, overlapped
from gradengine.plan.quantities import duration
from gradengine.plan.question import Question
from gradengine.plan.traffic import Traffic, span_bytes
from gradengine.tensor_parallel_cost import Bandwidth

__all__ = ["Plan", "Question", "predict"]

_FORMAT = 1  # of the JSON: docs/plan.md says what is in it


@dataclass(frozen=True)
class Plan:
    """What will be.

    Attributes:
        question: What was asked.
        layout: Of one rank's gradients.
        memory: Of one rank.
        compute: Of one micro-batch.
        exchanges: Algorithm, or transport on one machine -> its traffic, and what of it backward hides.
        choice: The transport to take.
    """

    question: Question
    layout: GradientLayout
    memory: Memory
    compute: Compute
    exchanges: Mapping[str, tuple[Traffic, Overlap]]
    choice: Choice

    @property
    def tp_seconds(self) -> float:
        """Of a step's all-reduces within a worker, part of the compute where that is assumed."""
        return self.question.tp_seconds

    @property
    def compute_seconds(self) -> float:
        """Of a step's micro-batches on one rank."""
        return self.question.micro_batches * self.compute.seconds

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
    compute = _compute(question, layout)
    exchanges = _exchanges(question, layout, compute)
    step = Step(question.workers, question.micro_batches, compute.seconds)
    overlaps = {name: overlap for name, (_, overlap) in exchanges.items()}
    return Plan(
        question,
        layout,
        _memory(question, layout),
        compute,
        exchanges,
        choose(step, overlaps, faster_link=_over_a_faster_link(question, layout, compute)),
    )


def _compute(question: Question, layout: GradientLayout) -> Compute:
    tp_seconds = question.tp_seconds / question.micro_batches
    if question.backward_seconds is not None:
        if question.backward_seconds < tp_seconds / 2:
            raise CallerError(
                "backward_seconds is shorter than the all-reduces of tensor parallelism that it holds",
                got=duration(question.backward_seconds),
                expected=f"at least the {duration(tp_seconds / 2)} that they take at {question.within}",
                do="measure it on the ranks of a worker, and say how fast the links between those are (tp_bandwidth)",
            )
        return measured(question.backward_seconds)
    return assumed(
        question.model,
        layout,
        question.batch_size * question.sequence_length,
        question.sequence_length,
        question.tflops,
        tp_seconds,
    )


def _memory(question: Question, layout: GradientLayout) -> Memory:
    return memory_of(
        layout,
        question.dtype,
        question.optimizer,
        question.workers,
        frozen=question.model.frozen(question.tp, vocab_parallel=question.vocab_parallel),
        device=question.device,
    )


def _exchanges(question: Question, layout: GradientLayout, compute: Compute) -> dict[str, tuple[Traffic, Overlap]]:
    spans = span_bytes(layout)
    found = {name: predictor(spans, question.workers) for name, predictor in question.predictors.items()}
    return {name: (traffic, _overlap(question, layout, compute, traffic)) for name, traffic in found.items()}


def _overlap(question: Question, layout: GradientLayout, compute: Compute, traffic: Traffic) -> Overlap:
    shares, backward = ready_shares(layout, tied=question.model.embedding == "tied"), compute.backward_seconds
    if question.machine is None:
        return overlapped(shares, backward, traffic.span_seconds, traffic.tail_seconds)
    return overlap_on_one_machine(shares, backward, span_bytes(layout), traffic, question.workers, question.machine)


def _over_a_faster_link(
    question: Question, layout: GradientLayout, compute: Compute
) -> tuple[Bandwidth, Overlap] | None:
    """The star over the slowest link that is as fast as rank 0's sockets; None where it has one already."""
    fastest = question.socket_bandwidth
    if question.bandwidth is None or question.bandwidth.bytes_per_second >= fastest.bytes_per_second:
        return None
    faster = dataclasses.replace(question, bandwidth=fastest)
    traffic = faster.predictors["star"](span_bytes(layout), question.workers)
    return fastest, _overlap(faster, layout, compute, traffic)


def _asked(question: Question) -> dict[str, Any]:
    fields = {field.name: getattr(question, field.name) for field in dataclasses.fields(question)}
    del fields["model"]
    fields["tp_bandwidth"] = question.within
    return dict(map(_plain, fields, fields.values())) | {"ranks": question.workers * question.tp}


def _plain(name: str, value: Any) -> tuple[str, Any]:
    if name.endswith("bandwidth"):
        return f"{name}_bytes_per_second", value and value.bytes_per_second
    return name, dataclasses.asdict(value) if isinstance(value, Rates) else value


def _shown(traffic: Traffic, overlap: Overlap) -> dict[str, Any]:
    fields = dataclasses.asdict(traffic)
    del fields["algorithm"], fields["span_seconds"], fields["tail_seconds"]
    return fields | {
        "seconds": traffic.seconds,
        "hidden_seconds": overlap.hidden_seconds,
        "exposed_seconds": overlap.exposed_seconds,
    }
