"""A question (a model, its ranks, and the links between them) and its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradengine.arguments import MOST_RANKS, as_float, out_of_range, refuse_other_kind, refuse_unknown, whole_number
from gradengine.errors import CallerError
from gradengine.exchange.exchange import DEFAULT_SHARE_BYTES
from gradengine.exchange.ordered_all_reduce import IN_FLIGHT
from gradengine.layout import GradientLayout
from gradengine.layout.cost import Bandwidth, TensorParallelCost
from gradengine.plan.models import Model
from gradengine.plan.traffic import NCCL, SERVED, SOCKETS, TCP, Traffic, ready_seconds, traffic_of, weights_multiplied

DEVICES = ("cpu", "cuda")
DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
OPTIMIZERS: Mapping[str, int] = {"adamw": 8, "lion": 4, "momentum": 4, "sgd": 0}  # bytes of fp32 state for a weight
_COUNTS = {"workers": MOST_RANKS} | dict.fromkeys(("tp", "sequence_length", "batch_size", "micro_batches"), 1 << 20)
_WORDS = {"dtype": tuple(DTYPES), "optimizer": tuple(OPTIMIZERS), "device": DEVICES}
_BANDWIDTHS = ("bandwidth", "tp_bandwidth", "socket_bandwidth")
_RANGES = {  # wide ranges in which no sum or product overflows
    "tflops": (1e-9, 1e9, "TFLOP/s"),
    "backward_seconds": (1e-9, 1e9, "seconds"),
    "gpu_gigabytes": (1e-3, 1e9, "GB"),
    **dict.fromkeys(_BANDWIDTHS, (1.0, 1e18, "bytes/s")),
}
_FORMAT = 4  # version of the JSON, which docs/reference/plan-json.md describes
_WORTH_IT = 0.05  # share of a step that NCCL must save to be chosen


@dataclass(frozen=True)
class Question:
    """The question: a model, its ranks, and the links between them.

    Raises:
        CallerError: A number is out of range, a word is unknown, or a bandwidth has no unit.
    """

    model: Model  # the transformer
    workers: int  # data-parallel workers, each a group of `tp` ranks
    bandwidth: Bandwidth  # each way on a rank's link to the same rank of the other workers
    tp: int = 1  # tensor-parallel ranks of a worker
    tp_bandwidth: Bandwidth | None = None  # each way on a rank's link within its worker, None for `bandwidth`
    socket_bandwidth: Bandwidth = SOCKETS  # largest each way through one process's sockets, sums included
    sequence_length: int = 1024  # tokens of a sequence
    batch_size: int = 1  # sequences of a worker's micro-batch
    micro_batches: int = 1  # micro-batches of each worker in an optimizer step
    dtype: str = "float32"  # dtype of weights, gradients and activations
    optimizer: str = "adamw"  # a key of `OPTIMIZERS`
    device: str = "cuda"  # device of the model
    gpu_gigabytes: float = 80.0  # memory of a GPU, in 10^9 bytes
    tflops: float = 100.0  # speed that a rank achieves, in 10^12 operations a second
    # Time of one micro-batch on one rank, measured with its all-reduces, or None to compute it from `tflops`.
    backward_seconds: float | None = None
    vocab_parallel: bool = False  # whether embedding and LM head are cut too

    def __post_init__(self) -> None:
        for name, most in _COUNTS.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, most))
        for name, known in _WORDS.items():
            refuse_unknown(name, getattr(self, name), known)
        for name, (least, highest, unit) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in {"tp_bandwidth", "backward_seconds"}:
                continue
            if name in _BANDWIDTHS:
                refuse_other_kind(name, value, Bandwidth, do="use Bandwidth.gigabits or Bandwidth.gigabytes")
                value = value.bytes_per_second
            if not least <= as_float(value) <= highest:  # true for NaN too
                raise out_of_range(name, value, f"{least:g}..{highest:g} {unit}")

    @property
    def cost(self) -> TensorParallelCost:
        """The communication cost of tensor parallelism."""
        return TensorParallelCost(
            hidden_size=self.model.hidden_size, num_blocks=self.model.num_blocks, tp_size=self.tp,
            sequence_length=self.sequence_length, batch_size=self.batch_size, micro_batches=self.micro_batches,
            bytes_per_element=DTYPES[self.dtype], vocab_parallel=self.vocab_parallel,
        )  # fmt: skip

    @property
    def tp_seconds(self) -> float:
        """The seconds of a step's all-reduces within a worker."""
        return self.cost.seconds_per_step(self.tp_bandwidth or self.bandwidth)


@dataclass(frozen=True)
class Plan:
    """The memory, seconds and traffic that answer a question."""

    question: Question  # the question of this plan
    layout: GradientLayout  # layout of one rank's gradients
    # Bytes of one rank by use, without activations. "on_device" is the sum of the entries before it. "host_rows" and
    # "pinned_rows" are the most host memory that an exchange over sockets takes.
    memory: Mapping[str, int]
    forward_seconds: float  # forward of one micro-batch on one rank, with its tensor-parallel all-reduces
    backward_seconds: float  # backward of one micro-batch on one rank, with its tensor-parallel all-reduces
    exchanges: Mapping[str, Traffic]  # traffic by transport, as it is passed to `connect`, empty for one worker

    @property
    def missing_bytes(self) -> int:
        """The bytes by which a rank's memory exceeds its GPU's, or 0 if it fits or is on the CPU."""
        has = int(1e9 * self.question.gpu_gigabytes)
        return max(0, self.memory["on_device"] - has) if self.question.device == "cuda" else 0

    @property
    def compute_seconds(self) -> float:
        """The seconds of a step's micro-batches on one rank."""
        return self.question.micro_batches * (self.forward_seconds + self.backward_seconds)

    @property
    def choice(self) -> str | None:
        """The transport to use, NCCL if it shortens a step by more than a twentieth, otherwise tcp://.

        It is None for one worker. It is never a server, because its link carries the sets of all workers.
        """
        if not self.exchanges:
            return None
        waits = self.exchanges[TCP].exposed_seconds
        saved = waits - self.exchanges[NCCL].exposed_seconds if NCCL in self.exchanges else 0.0
        return NCCL if saved > _WORTH_IT * (self.compute_seconds + waits) else TCP

    @property
    def waiting_seconds(self) -> float:
        """The seconds that a step waits for its exchange after backward, over the transport of `choice`."""
        return self.exchanges[self.choice].exposed_seconds if self.choice else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the plan in plain types, as docs/reference/plan-json.md describes."""
        of_cost = ("bytes_per_all_reduce", "bytes_per_step", "link_bytes_per_step")
        return {
            "format": _FORMAT,
            "question": dataclasses.asdict(self.question),
            "parameters": self.question.model.parameters,
            "elements_per_rank": self.layout.num_elements,
            "memory_bytes_per_rank": {**self.memory, "missing": self.missing_bytes},
            "tensor_parallel": {name: getattr(self.question.cost, name) for name in of_cost}
            | {"seconds_per_step": self.question.tp_seconds},
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
            "compute_seconds": self.compute_seconds,
            "exchange": {transport: dataclasses.asdict(traffic) for transport, traffic in self.exchanges.items()},
            "choice": self.choice,
            "waiting_seconds": self.waiting_seconds,
        }


def predict(question: Question) -> Plan:
    """Return the plan that answers a question.

    Raises:
        CallerError: Heads, sizes or vocabulary cannot be divided by the tensor-parallel ranks, or a measured backward
            is shorter than the all-reduces in it.

    Example:
        >>> from gradengine.plan.models import load_model
        >>> plan = predict(Question(load_model("350m"), workers=4, bandwidth=Bandwidth.gigabits(10)))
        >>> plan.exchanges["tcp://"].busiest_link_bytes
        2391054336
    """
    layout = question.model.layout(question.tp, vocab_parallel=question.vocab_parallel)
    forward, backward = _compute(question, layout)
    return Plan(question, layout, _memory(question, layout), forward, backward, _exchanges(question, layout, backward))


def _memory(question: Question, layout: GradientLayout) -> dict[str, int]:
    elements, width, others = layout.num_elements, DTYPES[question.dtype], question.workers - 1
    frozen = question.model.frozen(question.tp, vocab_parallel=question.vocab_parallel)
    found = {
        "weights": width * (elements + frozen),
        "gradients": width * elements,
        "arena": layout.nbytes,
        "master_weights": 4 * elements if width < 4 else 0,
        "optimizer": OPTIMIZERS[question.optimizer] * elements,
    }
    return found | {
        "on_device": sum(found.values()),
        "host_rows": others * IN_FLIGHT + DEFAULT_SHARE_BYTES if others else 0,
        "pinned_rows": 2 * IN_FLIGHT if others and question.device == "cuda" else 0,
    }


def _compute(question: Question, layout: GradientLayout) -> tuple[float, float]:
    """Return the seconds of forward and backward of a micro-batch, from the measured backward if there is one.

    Otherwise forward is 2 operations for each weight and token, and backward is 4. The scores of attention and their
    sum add 4 S operations for each token, block and hidden element, over all ranks.
    """
    all_reduces, backward = question.tp_seconds / question.micro_batches / 2, question.backward_seconds
    if backward is None:
        model, length = question.model, question.sequence_length
        weights = sum(weights_multiplied(span) for span in layout.spans)
        scores = 4 * length * model.hidden_size * model.num_blocks / layout.tp_size
        forward = question.batch_size * length * (2 * weights + scores) / (1e12 * question.tflops)
        return forward + all_reduces, 2 * forward + all_reduces
    if backward < all_reduces:
        what, expected = "backward_seconds is shorter than its all-reduces", f"at least {all_reduces:.3g} s"
        raise CallerError(what, got=f"{backward:g} s", expected=expected, do="measure it on ranks of a whole worker")
    return backward / 2, backward


def _exchanges(question: Question, layout: GradientLayout, backward: float) -> dict[str, Traffic]:
    if question.workers == 1:
        return {}
    ready = ready_seconds(layout, backward, tied=question.model.embedding == "tied")
    link = question.bandwidth.bytes_per_second
    sockets = min(link, question.socket_bandwidth.bytes_per_second)
    rates = {TCP: sockets, SERVED: sockets} | ({NCCL: link} if question.device == "cuda" else {})
    return {
        transport: traffic_of(layout, question.workers, rate, ready, served=transport == SERVED)
        for transport, rate in rates.items()
    }
