"""Shared by an exchange and its callers: limits, its report of NaN and Inf, and checks of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.arguments import as_float, out_of_range, refuse_other_kind
from gradengine.errors import CallerError
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD
from gradengine.layout import GradientLayout

Float32: TypeAlias = npt.NDArray[np.float32]
GROUP_BYTES = 16  # of a group's random identifier
DEFAULT_BUCKET_BYTES = 1 << 21  # of what a server sums at a time: four of them are in flight
DEFAULT_TIMEOUT = 300.0  # seconds
DEFAULT_JOIN_TIMEOUT = 60.0


@dataclass(frozen=True)
class NonFiniteValue:
    """A NaN or Inf in one rank's contribution, at an index of the arena."""

    rank: int
    index: int
    value: float


def checked_seconds(name: str, seconds: float) -> float:
    """The seconds as a float; raises `CallerError` unless they are above 0 and at most 1e9."""
    number = as_float(seconds)
    if not 0 < number <= 1e9:  # also true of NaN
        raise out_of_range(name, seconds, "seconds above 0, at most 1e9")
    return number


def refuse_bad_arena(layout: GradientLayout, arena: Float32) -> None:
    """Raise `CallerError` unless the arena is flat contiguous fp32 memory of the layout's size."""
    refuse_other_kind("layout", layout, GradientLayout)
    refuse_other_kind("arena", arena, np.ndarray)
    if arena.shape != (layout.arena_size,) or arena.dtype != np.float32 or not arena.flags.c_contiguous:
        raise CallerError(
            "arena does not fit the layout",
            got=f"{arena.dtype} {arena.shape}",
            expected=f"contiguous float32 ({layout.arena_size},)",
        )


def refuse_long_part(data: bytes) -> None:
    """Raise `CallerError` unless a part of a gather is bytes, and at most 16 MiB."""
    refuse_other_kind("a part of a gather", data, bytes)
    if len(data) > MAX_SMALL_PAYLOAD:
        raise CallerError("too much to gather", got=f"{len(data)} bytes", expected=f"at most {MAX_SMALL_PAYLOAD}")
