"""All-gather of small objects, each tagged with a text that says what it is and of which step.

In a group that was lost and joined again the ranks may be at different places: without these tags one rank's loss would
be read as another's stats, or the stats of one window be added to those of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from gradengine.arguments import refuse_other_kind, said
from gradengine.errors import CallerError, ExchangeError, ProtocolError
from gradengine.exchange.interface import refuse_long_part
from gradengine.layout.unpacking import unpack


def packed(what: str, facts: object) -> bytes:
    """One rank's facts for a gather, tagged with what they are; raises `CallerError` for facts that cannot be sent."""
    refuse_other_kind("what is told", what, str)
    try:
        data: bytes = msgpack.packb([what, facts])
        unpack(data, "what is told")  # msgpack also packs what other ranks would refuse
    except (TypeError, ValueError, OverflowError, ProtocolError) as fault:
        raise CallerError(
            "the facts cannot be sent",
            got=said(fault),
            expected="None, bool, int of 64 bits, float, str or bytes, in lists and in dicts with str keys",
            do="convert scalars by float(x) and arrays by x.tolist()",
        ) from None
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


def _unpacked(rank: int, part: bytes) -> tuple[str, Any]:
    told = unpack(part, f"what rank {rank} tells")
    if not isinstance(told, list) or len(told) != 2 or not isinstance(told[0], str):
        raise ProtocolError(f"what rank {rank} tells has no name", got=repr(told), expected="[text, facts]")
    return told[0], told[1]
