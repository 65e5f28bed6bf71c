"""All-gather of small objects, each tagged with a text that says what it is and of which step.

In a group that was lost and joined again the ranks may be at different places: without these tags one rank's loss would
be read as another's stats, or the stats of one window be added to those of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from types import TracebackType
from typing import Any, final

import msgpack

from gradengine.arguments import refuse_other_kind, said
from gradengine.errors import CallerError, ExchangeError, ProtocolError
from gradengine.exchange.interface import refuse_long_part
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD
from gradengine.layout.unpacking import MAX_DEPTH, MAX_OBJECTS, unpack


def packed(what: str, facts: object) -> bytes:
    """One rank's facts for a gather, tagged with what they are; raises `CallerError` for facts that cannot be sent."""
    refuse_other_kind("what is told", what, str)
    try:
        _refuse_unreadable([what, facts])
        data: bytes = msgpack.packb([what, facts])
    except (CallerError, MemoryError):
        raise
    except (TypeError, ValueError, OverflowError) as fault:  # of msgpack; text that is no UTF-8
        raise CallerError("the facts cannot be sent", got=said(fault)) from None
    refuse_long_part(data)
    return data


def gathered(parts: Sequence[bytes]) -> list[Any]:
    """Every rank's facts, in rank order; raises `ExchangeError` if a rank's tag is not rank 0's."""
    told = [_unpacked(rank, part) for rank, part in enumerate(parts)]
    for rank, (theirs, _) in enumerate(told):
        if theirs != told[0][0]:
            raise ExchangeError(
                f"rank {rank} is out of sync with rank 0",
                got=f"its {theirs}",
                expected=f"its {told[0][0]}",
                do="a window was finished or dropped on some ranks only: restart all from one checkpoint",
            )
    return [facts for _, facts in told]


@final
class in_group(AbstractContextManager[None]):  # noqa: N801  (read as a word of the `with`)
    """A context in which errors of an exchange begin with the name of its group."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(fault, ExchangeError):
            what = f"{self._name}: {fault.what}"
            raise type(fault)(what, got=fault.got, expected=fault.expected, do=fault.do) from fault


def _refuse_unreadable(told: object) -> None:
    """Raise `CallerError` for facts that `unpack` would refuse on other ranks; objects held twice count twice."""
    left, objects, length = [(told, 1)], 1, 0
    while left:
        value, depth = left.pop()
        if isinstance(value, (list, tuple, dict)) and not isinstance(value, msgpack.ExtType):
            inside = _inside(value)
            if inside and depth > MAX_DEPTH:
                raise CallerError("the facts are nested too deep", expected=f"at most {MAX_DEPTH - 1} containers")
            objects += len(inside)
            left += [(item, depth + 1) for item in inside]
        elif isinstance(value, (str, bytes, bytearray)):
            length += len(value)
        elif not _is_number_or_none(value):
            raise _unreadable(value)
        if objects > MAX_OBJECTS:
            raise CallerError("the facts have too many objects", expected=f"at most {MAX_OBJECTS}")
        if length > MAX_SMALL_PAYLOAD:
            raise CallerError("the facts are too long", expected=f"at most {MAX_SMALL_PAYLOAD} bytes")


def _inside(container: Iterable[Any]) -> list[Any]:
    items = list(islice(container, MAX_OBJECTS))
    if not isinstance(container, dict):
        return items
    for key in items:
        if not isinstance(key, (str, bytes)):
            raise _unreadable(key)
    return items + list(islice(container.values(), MAX_OBJECTS))


def _is_number_or_none(value: object) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    return value is None or isinstance(value, float)


def _unreadable(value: object) -> CallerError:
    return CallerError(
        "the facts hold an object that cannot be sent",
        got=said(value),
        expected="None, bool, int of 64 bits, float, str or bytes, in lists and in dicts with str keys",
        do="convert scalars by float(x) and arrays by x.tolist()",
    )


def _unpacked(rank: int, part: bytes) -> tuple[str, Any]:
    told = unpack(part, f"what rank {rank} tells")
    if not isinstance(told, list) or len(told) != 2 or not isinstance(told[0], str):
        raise ProtocolError(f"what rank {rank} tells has no name", got=repr(told), expected="[text, facts]")
    return told[0], told[1]
