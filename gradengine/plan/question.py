"""What can be asked of a plan: a model, its ranks, and either the links between them or the one machine they are on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from gradengine.errors import CallerError
from gradengine.plan.machine import ON_ONE_MACHINE, Rates, on_one_machine
from gradengine.plan.memory import DEVICES, DTYPES, OPTIMIZERS
from gradengine.plan.models import Model
from gradengine.plan.traffic import ALGORITHMS, SOCKETS, SUMMED, Algorithm, Network, Traffic
from gradengine.tensor_parallel_cost import Bandwidth, TensorParallelCost

__all__ = ["Predictor", "Question"]

Predictor: TypeAlias = Callable[[Sequence[int], int], Traffic]  # bytes of each span, workers

_MOST = 1 << 20
_COUNTS = ("workers", "tp", "sequence_length", "batch_size", "micro_batches")
_BANDWIDTHS = ("bandwidth", "tp_bandwidth", "socket_bandwidth", "sum_bandwidth")
_MAY_BE_NONE = ("bandwidth", "tp_bandwidth", "backward_seconds")
_RANGES = (  # wide, but such that no sum or product of theirs overflows
    ("latency_seconds", 0.0, 10.0, "s"),
    ("tp_latency_seconds", 0.0, 10.0, "s"),
    ("tflops", 1e-9, 1e9, "TFLOP/s"),
    ("backward_seconds", 1e-9, 1e9, "s"),
)


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    Attributes:
        model: The transformer.
        workers: Data-parallel workers, each a group of `tp` ranks.
        bandwidth: Of each rank's link to the same rank of the other workers, each way; None on one machine.
        tp: Tensor-parallel ranks of a worker.
        tp_bandwidth: Of each rank's link within its worker, each way; None for `bandwidth`.
        latency_seconds: Of a message between workers.
        tp_latency_seconds: Of a message within a worker.
        socket_bandwidth: What one process moves through its sockets each way.
        sum_bandwidth: What one thread of rank 0 looks at, or adds to the sum.
        sequence_length: Tokens of a sequence.
        batch_size: Sequences of a worker's micro-batch.
        micro_batches: Of each worker in an optimizer step.
        dtype: Of weights, gradients and activations.
        optimizer: A key of `memory.OPTIMIZERS`.
        tflops: 10^12 operations a second that a rank achieves, where backward was not measured.
        backward_seconds: Of one micro-batch on one rank, measured with its all-reduces; None to take it from `tflops`.
        vocab_parallel: Whether the vocabulary is cut too.
        device: Where the model is.
        machine: The rates of the one machine that all workers are on, instead of `bandwidth`.

    Raises:
        CallerError: A number is out of range, a bandwidth names no unit, or there is not one of `bandwidth` and
            `machine`.
    """

    model: Model
    workers: int
    bandwidth: Bandwidth | None = None
    tp: int = 1
    tp_bandwidth: Bandwidth | None = None
    latency_seconds: float = 50e-6
    tp_latency_seconds: float = 10e-6
    socket_bandwidth: Bandwidth = SOCKETS
    sum_bandwidth: Bandwidth = SUMMED
    sequence_length: int = 1024
    batch_size: int = 1
    micro_batches: int = 1
    dtype: str = "float32"
    optimizer: str = "adamw"
    tflops: float = 100.0
    backward_seconds: float | None = None
    vocab_parallel: bool = False
    device: str = "cuda"
    machine: Rates | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        for name, least, most, unit in _RANGES:
            if name not in _MAY_BE_NONE or getattr(self, name) is not None:
                _refuse_outside(name, getattr(self, name), least, most, unit)
        for name in _BANDWIDTHS:
            if name not in _MAY_BE_NONE or getattr(self, name) is not None:
                _refuse_no_bandwidth(name, getattr(self, name))
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS), ("device", DEVICES)):
            _refuse_unknown(name, getattr(self, name), known)
        if (self.bandwidth is None) == (self.machine is None):
            raise CallerError(
                "bandwidth and one machine exclude each other",
                got="neither" if self.machine is None else "both",
                expected="the bandwidth between workers, or one machine that they are all on",
            )
        if self.machine is not None and self.tp > 1:
            raise CallerError(
                "tp is out of range", got=self.tp, expected="1 on one machine: ranks within a worker were not measured"
            )

    @property
    def network(self) -> Network:
        """Between workers.

        Raises:
            CallerError: They are on one machine.
        """
        if self.bandwidth is None:
            raise CallerError("on one machine there is no network", expected="a question with a bandwidth")
        return Network(self.bandwidth, self.latency_seconds, self.socket_bandwidth, self.sum_bandwidth)

    @property
    def predictors(self) -> Mapping[str, Predictor]:
        """Algorithm, or transport on one machine -> what it takes."""
        if self.machine is not None:
            return {name: partial(_of_machine, name, self.machine) for name in ON_ONE_MACHINE}
        return {name: partial(_over_links, algorithm, self.network) for name, algorithm in ALGORITHMS.items()}

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
            bytes_per_element=DTYPES[self.dtype],
            vocab_parallel=self.vocab_parallel,
        )


def _over_links(algorithm: Algorithm, network: Network, spans: Sequence[int], workers: int) -> Traffic:
    return algorithm(spans, workers, network)


def _of_machine(transport: str, rates: Rates, spans: Sequence[int], workers: int) -> Traffic:
    return on_one_machine(transport, spans, workers, rates)


def _count(name: str, value: object) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if not 1 <= number <= _MOST:
        raise CallerError(f"{name} is out of range", got=_shown(value), expected=f"a whole number, 1..{_MOST}")
    return number


def _refuse_unknown(name: str, value: object, known: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise CallerError(f"unknown {name}", got=_shown(value), expected=f"one of {', '.join(known)}")


def _refuse_no_bandwidth(name: str, value: object) -> None:
    if not isinstance(value, Bandwidth):
        raise CallerError(f"{name} must name its unit", got=_shown(value), expected="Bandwidth.gigabits or .gigabytes")
    _refuse_outside(name, value.bytes_per_second, 1.0, 1e18, "bytes/s")


def _refuse_outside(name: str, value: object, least: float, most: float, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:  # NaN is refused
        raise CallerError(
            f"{name} is out of range", got=f"{_shown(value)} {unit}", expected=f"{least:g}..{most:g} {unit}"
        )


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # Python shows no integer of thousands of digits
        return "a number of thousands of digits"
    return shown if len(shown) <= 80 else f"{shown[:40]}..."
