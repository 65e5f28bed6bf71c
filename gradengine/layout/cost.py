"""Communication cost of tensor parallelism, in bytes of a step's all-reduces and in seconds at a given bandwidth."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import final

from gradengine.arguments import as_float, out_of_range, refuse_other_kind, said, truth_value, whole_number
from gradengine.errors import CallerError

_QUANTITY = re.compile(r"\s*(\d+\.?\d*(?:e[+-]?\d{1,3})?)\s*([a-z/]*)\s*", re.ASCII | re.IGNORECASE)
# Bytes a second. "gb/s" is unknown, because it may mean bits or bytes.
_BYTES = {"B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "MiB/s": 1 << 20, "GiB/s": 1 << 30}
_BITS = {"Mbit/s": 1.25e5, "Gbit/s": 1.25e8, "Tbit/s": 1.25e11, "Mbps": 1.25e5, "Gbps": 1.25e8, "Tbps": 1.25e11}
_UNITS = _BYTES | _BITS


@final
@dataclass(frozen=True)
class Bandwidth:
    """Bandwidth of a link in one direction, with an explicit unit.

    Args:
        bytes_per_second: The rate in bytes/s. See `gigabytes`, `gigabits` and `parse` for other units.

    Raises:
        CallerError: The rate is NaN, infinite, or not above 0.

    Example:
        >>> print(Bandwidth.gigabits(10))
        1.25 GB/s = 10 Gbit/s
        >>> Bandwidth.parse("10 Gbit/s") == Bandwidth.gigabytes(1.25)
        True
    """

    bytes_per_second: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_second", _positive(self.bytes_per_second))

    @staticmethod
    def gigabytes(per_second: float) -> Bandwidth:
        """Return a bandwidth from a rate in 10^9 bytes/s. Raises the same errors as the class.

        Example:
            >>> Bandwidth.gigabytes(1.25).gigabits_per_second
            10.0
        """
        return Bandwidth(_positive(per_second) * 1e9)

    @staticmethod
    def gigabits(per_second: float) -> Bandwidth:
        """Return a bandwidth from a rate in 10^9 bits/s, the unit of network links. Raises as the class."""
        return Bandwidth(_positive(per_second) * 1.25e8)

    @staticmethod
    def parse(text: str) -> Bandwidth:
        """Return a bandwidth from text with a number and a unit.

        Args:
            text: "10 Gbit/s", "10 Gbps", "1.25GB/s", "900 MB/s", "3.35 TB/s", "12 GiB/s".

        Raises:
            CallerError: No number, no unit or an unknown one, or a rate out of range.

        Example:
            >>> Bandwidth.parse("900 MB/s").gigabytes_per_second
            0.9
            >>> Bandwidth.parse("10")
            Traceback (most recent call last):
            gradengine.errors.CallerError: a bandwidth has an unknown unit: got '10', expected text such as ...
        """
        found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
        if found is None or found[2] not in _UNITS:
            expected = "text such as '10 Gbit/s', '1.25 GB/s' or '12 GiB/s'"
            raise CallerError("a bandwidth has an unknown unit", got=said(text), expected=expected)
        return Bandwidth(float(found[1]) * _UNITS[found[2]])

    @property
    def gigabytes_per_second(self) -> float:
        """The rate in 10^9 bytes/s."""
        return self.bytes_per_second / 1e9

    @property
    def gigabits_per_second(self) -> float:
        """The rate in 10^9 bits/s."""
        return self.bytes_per_second * 8 / 1e9

    def __str__(self) -> str:
        return f"{self.gigabytes_per_second:.6g} GB/s = {self.gigabits_per_second:.6g} Gbit/s"


@final
@dataclass(frozen=True)
class TensorParallelCost:
    """Communication of a tensor-parallel group in one optimizer step.

    Each transformer block needs two all-reduces of its activations in the forward and two in the backward (Megatron-LM,
    Shoeybi et al. 2019, arXiv:1909.08053, section 3). A sharded vocabulary adds one each way, for the embedding and the
    LM head. The loss, a few floats for each token, is not counted.

    Args:
        hidden_size: H of the whole model.
        num_blocks: Transformer blocks.
        sequence_length: S, tokens of a sequence.
        tp_size: Ranks of the group.
        batch_size: Sequences of a micro-batch.
        micro_batches: Micro-batches of an optimizer step.
        bytes_per_element: Bytes of one activation, 4 in fp32 and 2 in bf16.
        vocab_parallel: Whether embedding and LM head are sharded too.

    Raises:
        CallerError: A size is not a whole number above 0, or `vocab_parallel` is not a bool.

    Example:
        >>> cost = TensorParallelCost(hidden_size=1024, num_blocks=24, sequence_length=1024, tp_size=2)
        >>> cost.bytes_per_all_reduce, cost.bytes_per_step, cost.bytes_per_step_both_ways
        (4194304, 201326592, 402653184)
        >>> cost.link_bytes_per_step, cost.seconds_per_step(Bandwidth.gigabytes(4.02653184))
        (402653184, 0.1)
    """

    hidden_size: int
    num_blocks: int
    sequence_length: int
    tp_size: int
    batch_size: int = 1
    micro_batches: int = 1
    bytes_per_element: int = 4
    vocab_parallel: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocab_parallel", truth_value("vocab_parallel", self.vocab_parallel))
        for name in sorted(vars(self).keys() - {"vocab_parallel"}):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))

    @property
    def bytes_per_all_reduce(self) -> int:
        """Bytes of one all-reduce of activations, S x H x batch x bytes of an element."""
        return self.sequence_length * self.hidden_size * self.batch_size * self.bytes_per_element

    @property
    def all_reduces_per_step(self) -> int:
        """Number of all-reduces in a step's forward. The backward has as many."""
        return (2 * self.num_blocks + self.vocab_parallel) * self.micro_batches

    @property
    def bytes_per_step(self) -> int:
        """Bytes of the buffers that a step's forward reduces, for any `tp_size`."""
        return self.all_reduces_per_step * self.bytes_per_all_reduce

    @property
    def bytes_per_step_both_ways(self) -> int:
        """Bytes of all all-reduces of a step's forward and backward."""
        return 2 * self.bytes_per_step

    @property
    def link_bytes_per_step(self) -> int:
        """Bytes that each rank sends in a step by ring all-reduces, 2 (T - 1) / T of both ways' bytes, rounded up."""
        return -(-2 * (self.tp_size - 1) * self.bytes_per_step_both_ways // self.tp_size)

    def seconds_per_step(self, bandwidth: Bandwidth, *, latency_seconds: float = 0.0) -> float:
        """Return the seconds of a step's ring all-reduces, forward and backward, without overlap.

        Args:
            bandwidth: Bandwidth of each rank's link, in each direction.
            latency_seconds: Latency of one message in seconds. An all-reduce has 2 (T - 1) messages in sequence.

        Raises:
            CallerError: The bandwidth is a plain number, or the latency is negative or not finite.

        Example:
            >>> cost = TensorParallelCost(1024, 24, 1024, tp_size=2)
            >>> round(cost.seconds_per_step(Bandwidth.gigabits(10), latency_seconds=50e-6), 4)
            0.3317
        """
        refuse_other_kind("bandwidth", bandwidth, Bandwidth, do="use Bandwidth.gigabits or Bandwidth.gigabytes")
        latency = as_float(latency_seconds)
        if not 0 <= latency < math.inf:
            raise out_of_range("latency_seconds", latency_seconds, "seconds >= 0")
        messages = 2 * self.all_reduces_per_step * 2 * (self.tp_size - 1)
        return self.link_bytes_per_step / bandwidth.bytes_per_second + messages * latency


def _positive(rate: float) -> float:
    number = as_float(rate)
    if not 0 < number < math.inf:  # NaN takes this branch too
        raise out_of_range("a bandwidth", rate, "a finite number above 0, or Bandwidth.parse(text)")
    return number
