"""Small facts that all ranks of a group tell each other, each with what it is and of which step.

A group that was lost and joined anew may find its ranks at different places: without these words one rank's loss would
be read as another's tally, or a tally of one window be added to that of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack

from gradengine.errors import ExchangeError, ProtocolError
from gradengine.unpacking import unpack

__all__ = ["heard", "in_group", "packed"]


def packed(what: str, facts: object) -> bytes:
    """What one rank gives to a gather.

    Args:
        what: What is told, and of which step or window: "loss of step 3".
        facts: What msgpack carries.
    """
    data: bytes = msgpack.packb([what, facts])
    return data


def heard(parts: Sequence[bytes]) -> list[Any]:
    """Every rank's facts, in rank order, of what a gather brought.

    Raises:
        ExchangeError: A rank tells something else than rank 0.
        ProtocolError: What a rank tells cannot be read.

    Example:
        >>> heard([packed("loss of step 0", [2.5, 1.0]), packed("loss of step 0", None)])
        [[2.5, 1.0], None]
    """
    told = [_unpacked(rank, part) for rank, part in enumerate(parts)]
    for rank, (theirs, _) in enumerate(told):
        if theirs != told[0][0]:
            raise ExchangeError(
                f"rank {rank} is elsewhere than rank 0",
                got=f"its {theirs}",
                expected=f"its {told[0][0]}",
                do="a window was finished or dropped on some ranks only: restart all from one checkpoint",
            )
    return [facts for _, facts in told]


@contextmanager
def in_group(name: str) -> Iterator[None]:
    """Within it, errors of an exchange say which of several groups they are of.

    >>> with in_group("between the shards"):
    ...     raise ExchangeError("rank 1 is late", got=3)
    Traceback (most recent call last):
    gradengine.errors.ExchangeError: between the shards: rank 1 is late: got 3
    """
    try:
        yield
    except ExchangeError as fault:
        what = f"{name}: {fault.what}"
        raise type(fault)(what, got=fault.got, expected=fault.expected, do=fault.do) from fault


def _unpacked(rank: int, part: bytes) -> tuple[str, Any]:
    told = unpack(part, f"what rank {rank} tells")
    if not isinstance(told, list) or len(told) != 2 or not isinstance(told[0], str):
        raise ProtocolError(f"what rank {rank} tells has no name", got=repr(told), expected="[text, facts]")
    return told[0], told[1]
