"""Communication cost of tensor parallelism: bytes of a step's all-reduces, and seconds at a given bandwidth."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import final

from gradengine.arguments import as_float, as_number, out_of_range, said, truth_value, whole_number
from gradengine.errors import CallerError

_BITS_A_BYTE = 8
_QUANTITY = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|\.\d+)\s*(?P<unit>[A-Za-z/]*)\s*", re.ASCII)
_PREFIXES = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_SYMBOLS = {"bit/s": _BITS_A_BYTE, "Bit/s": _BITS_A_BYTE, "B/s": 1, "Bps": 1}  # how many make a byte a second
_UNITS = {  # bytes a second; "Gb/s" is bits, and "gb/s" unknown, as it may be meant for bytes
    f"{prefix}{infix}{symbol}": Fraction(base**power, bits)
    for prefix, power in _PREFIXES.items()
    for infix, base in (("", 1000), ("i", 1024))
    for symbol, bits in _SYMBOLS.items()
} | {f"{prefix}{symbol}": Fraction(1000 ** _PREFIXES[prefix], 8) for prefix in "MGT" for symbol in ("b/s", "bps")}
_LONGEST_TEXT = 100
_SAME = 1e-9  # relative difference of two notations of one bandwidth, whose digits may have been cut


@final
@dataclass(frozen=True)
class Bandwidth:
    """Bandwidth of a link in one direction, with an explicit unit.

    Args:
        bytes_per_second: The rate; see `gigabytes`, `gigabits` and `parse` for other units.

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
        rate = as_float(self.bytes_per_second)
        if not 0 < rate < math.inf:  # NaN is refused
            raise out_of_range("a bandwidth", self.bytes_per_second, "bytes/s above 0, and finite")
        object.__setattr__(self, "bytes_per_second", rate)

    @staticmethod
    def gigabytes(per_second: float) -> Bandwidth:
        """From 10^9 bytes a second; raises as the class.

        Example:
            >>> Bandwidth.gigabytes(1.25).gigabits_per_second
            10.0
        """
        return Bandwidth(_scaled(per_second, Fraction(10**9)))

    @staticmethod
    def gigabits(per_second: float) -> Bandwidth:
        """From 10^9 bits a second, as network links are sold; raises as the class."""
        return Bandwidth(_scaled(per_second, Fraction(10**9, _BITS_A_BYTE)))

    @staticmethod
    def parse(text: str) -> Bandwidth:
        """From text with a number and a unit.

        Args:
            text: "10 Gbit/s", "10 Gbps", "1.25GB/s", "900 MB/s", "3.35 TB/s", "12 GiB/s"; or the output of `str`. Bits
                are bit/s, and b/s or bps after a capital M, G or T; bytes are B/s or Bps, with a capital B.

        Raises:
            CallerError: No number, no unit or an unknown one, or a rate out of range.

        Example:
            >>> Bandwidth.parse("900 MB/s").gigabytes_per_second
            0.9
            >>> Bandwidth.parse("10")
            Traceback (most recent call last):
            gradengine.errors.CallerError: a bandwidth has an unknown unit: got '10', expected a number with a unit ...
        """
        parts = text.split("=") if isinstance(text, str) and len(text) <= _LONGEST_TEXT else [text]
        first, *others = map(_parsed, parts)
        for other in others:
            if not math.isclose(first.bytes_per_second, other.bytes_per_second, rel_tol=_SAME):
                raise CallerError("a bandwidth's two notations differ", got=repr(text), expected=f"'{first}'")
        return first

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes a second."""
        return self.bytes_per_second / 1e9

    @property
    def gigabits_per_second(self) -> float:
        """10^9 bits a second."""
        return self.bytes_per_second * _BITS_A_BYTE / 1e9

    def __str__(self) -> str:
        # Decimal instead of a division, so that `parse` gives the same float back.
        gigabytes = Decimal(repr(self.bytes_per_second)).scaleb(-9)
        return f"{_plain(gigabytes)} GB/s = {_plain(gigabytes * _BITS_A_BYTE)} Gbit/s"


@final
@dataclass(frozen=True)
class TensorParallelCost:
    """Communication of a tensor-parallel group in one optimizer step.

    Each transformer block needs two all-reduces of its activations in the forward and two in the backward (Megatron-LM,
    Shoeybi et al. 2019, arXiv:1909.08053, section 3); a sharded vocabulary adds one each way, the embedding's and the
    LM head's. The loss, a few floats for each token, is not counted.

    Args:
        hidden_size: H of the whole model.
        num_blocks: Transformer blocks.
        sequence_length: S, tokens of a sequence.
        tp_size: Ranks of the group.
        batch_size: Sequences of a micro-batch.
        micro_batches: Micro-batches of an optimizer step.
        bytes_per_element: Bytes of one activation: 4 in fp32, 2 in bf16.
        vocab_parallel: Whether embedding and LM head are sharded too.

    Raises:
        CallerError: A size is not a whole number above 0, or `vocab_parallel` not a bool.

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
        """Bytes of one all-reduce of activations: S x H x batch x bytes of an element."""
        return self.sequence_length * self.hidden_size * self.batch_size * self.bytes_per_element

    @property
    def all_reduces_per_step(self) -> int:
        """All-reduces of a step's forward; the backward has as many."""
        return (2 * self.num_blocks + self.vocab_parallel) * self.micro_batches

    @property
    def bytes_per_step(self) -> int:
        """Bytes of the buffers that a step's forward reduces, whatever `tp_size` is."""
        return self.all_reduces_per_step * self.bytes_per_all_reduce

    @property
    def bytes_per_step_both_ways(self) -> int:
        """Bytes of all all-reduces of a step's forward and backward."""
        return 2 * self.bytes_per_step

    @property
    def link_bytes_per_step(self) -> int:
        """Bytes that each rank sends in a step by ring all-reduces: 2 (T - 1) / T of both ways' bytes, rounded up."""
        return -(-2 * (self.tp_size - 1) * self.bytes_per_step_both_ways // self.tp_size)

    def seconds_per_step(self, bandwidth: Bandwidth, *, latency_seconds: float = 0.0) -> float:
        """Seconds of a step's ring all-reduces, forward and backward, without overlap.

        Args:
            bandwidth: Bandwidth of each rank's link, in each direction.
            latency_seconds: Latency of one message; an all-reduce has 2 (T - 1) messages in sequence.

        Raises:
            CallerError: The bandwidth is a plain number, or the latency is negative or not finite.

        Example:
            >>> cost = TensorParallelCost(1024, 24, 1024, tp_size=2)
            >>> round(cost.seconds_per_step(Bandwidth.gigabits(10), latency_seconds=50e-6), 4)
            0.3317
        """
        if not isinstance(bandwidth, Bandwidth):
            raise CallerError(
                "a bandwidth must name its unit", got=said(bandwidth), expected="Bandwidth.gigabits or .gigabytes"
            )
        latency = as_float(latency_seconds)
        if not 0 <= latency < math.inf:
            raise out_of_range("latency_seconds", latency_seconds, "seconds >= 0")
        messages = 2 * self.all_reduces_per_step * 2 * (self.tp_size - 1)
        return self.link_bytes_per_step / bandwidth.bytes_per_second + messages * latency


def _scaled(value: object, factor: Fraction) -> float:
    number = as_number(value)
    if number is None:
        raise CallerError("a bandwidth is not a number", got=said(value), expected="a number, or Bandwidth.parse(text)")
    return _rounded(Fraction(number) * factor) if math.isfinite(number) else number


def _rounded(exact: Fraction) -> float:
    """The nearest float; infinity where it is too large."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf


def _plain(number: Decimal) -> str:
    return f"{number.normalize():{'f' if 1e-6 <= number < 1e15 else 'E'}}"


def _parsed(text: object) -> Bandwidth:
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST_TEXT else None
    if found is None:
        raise CallerError("a bandwidth cannot be read", got=said(text), expected="text such as '10 Gbit/s'")
    if found["unit"] not in _UNITS:
        expected = "a number with a unit such as Gbit/s, GB/s or GiB/s"
        raise CallerError("a bandwidth has an unknown unit", got=said(text), expected=expected)
    return Bandwidth(_rounded(Fraction(found["number"]) * _UNITS[found["unit"]]))
