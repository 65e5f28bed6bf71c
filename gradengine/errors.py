"""Exceptions of this package. A message names the failure and its place, got and expected values, and one action.

`CallerError` is a wrong call, `ExchangeError` a failed peer or connection, and `NonFiniteGradient` a diverged model.
If `add` or a setter raises a `CallerError`, it has changed nothing. After `DeviceFailed` the process can only be ended.
Messages are printable and of bounded length, because they may hold text of a peer or a million names.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex

_MAX_WHAT = 1000  # characters; it may hold the rows in which two layouts differ, or a peer's message
_MAX_VALUE = 300


class GradientError(Exception):
    """Base class of every error of this package.

    Args:
        what: The failure and its place, as one clause.
        got: The value that was found.
        expected: The values that are valid.
        do: The action that the reader can take now.

    Example:
        >>> print(GradientError("'w_q' is short", got="3 elements", expected="4 elements", do="pass it whole"))
        'w_q' is short: got 3 elements, expected 4 elements; pass it whole
    """

    def __init__(
        self, what: str, *, got: object | None = None, expected: object | None = None, do: str | None = None
    ) -> None:
        self.what, self.got, self.expected, self.do = what, got, expected, do
        super().__init__(what)

    def __str__(self) -> str:
        values = (("got", self.got), ("expected", self.expected))
        numbers = [f"{word} {_printable(value, _MAX_VALUE)}" for word, value in values if value is not None]
        what = _printable(self.what, _MAX_WHAT)
        message = f"{what}: {', '.join(numbers)}" if numbers else what
        return f"{message}; {_printable(self.do, _MAX_VALUE)}" if self.do else message


class CallerError(GradientError):
    """A call with wrong arguments or at the wrong time, which changed nothing. Base class of the following."""


class BufferRefused(CallerError):
    """An array or pointer of an unsupported dtype, device, stride or size, or a read-only destination."""


class LayoutMismatch(CallerError):
    """An unknown or missing component or block, or one whose shape differs from the layout's."""


class WindowError(CallerError):
    """A call that the window's state does not allow: no micro-batch yet, a bad weight, an earlier step that failed."""


class DeviceUnavailable(CallerError):
    """A device that cannot be used here. The message names the missing part and how to install it."""


class OutOfDeviceMemory(CallerError):
    """Too little free memory on the device. Nothing stays allocated."""


class DeviceFailed(GradientError):
    """Work on a GPU, of gradengine or another library, that ended in an error. The process cannot use the GPU again."""


class NonFiniteGradient(GradientError, RuntimeError):
    """A NaN or Inf in a gradient. Code written for torch catches it as a RuntimeError.

    Attributes:
        component: The component's name.
        index: Flat index of the component's first element that is not finite.
        value: The element's value in the rank's own contribution if it is still known, otherwise in the sum.
        rank: The rank that contributed the value. None if the sum itself overflowed or there is only one rank.
        tp_rank: The tensor-parallel rank whose shard `index` refers to. None without such a group.
        step: The number of the step with the value.
        is_late: Whether the step was over when the error was raised, as for an asynchronous step on a GPU.
    """

    def __init__(
        self,
        component: str,
        index: int,
        value: float,
        *,
        step: int,
        rank: int | None = None,
        tp_rank: int | None = None,
        is_late: bool = False,
    ) -> None:
        self.component, self.index, self.value = component, index, value
        self.step, self.rank, self.tp_rank, self.is_late = step, rank, tp_rank, is_late
        ranks = (("rank", rank), ("tensor-parallel rank", tp_rank))
        named = ", ".join(f"{what} {number}" for what, number in ranks if number is not None)
        source = f" of {named}" if named else ""
        super().__init__(
            f"step {step}: gradient '{component}'{source} is not finite at index {index}",
            got=value,
            expected="a finite number",
            do="that step returned zeros (a deferred step left the sum); pass on_non_finite='skip' to skip such steps"
            if is_late
            else "the micro-batches are kept: call discard() to drop them, or use on_non_finite='skip'",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return Exception.__new__, (type(self), self.what), vars(self)  # pickle passes no keyword arguments


class ExchangeError(GradientError):
    """A failed exchange. Reconnect and step again. If a rank holds sums of the step, `reconnect` says to discard it."""


class HandshakeRefused(ExchangeError):
    """A refused join. The ranks' layout, settings, world size, wire version or secret differ, or a rank is taken."""


class ProtocolError(ExchangeError):
    """A message from a peer that violates the protocol."""


class PeerLost(ExchangeError):
    """A peer or the server that closed its connection, died, or never connected."""


class DeadlineExceeded(ExchangeError):
    """No progress for longer than the timeout. The message names the ranks that are late and those that wait."""


def _printable(value: object, limit: int) -> str:
    """Return a value as text of about `limit` characters, with control characters of a peer's text escaped."""
    text = _shortened(reprlib.repr(value) if isinstance(value, (list, tuple, dict)) else str(value), limit)
    return _shortened("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text), limit)


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit + 60:  # the note about the cut would be as long
        return text
    tail = limit // 4  # the advice is at the end
    return f"{text[: limit - tail]} ... ({len(text) - limit} more characters) ... {text[-tail:]}"


def not_copied(do: str) -> Callable[[Any, SupportsIndex], NoReturn]:
    """Return a `__reduce_ex__` that refuses to copy or pickle an object with memory or a connection."""

    def refuse(self: object, _protocol: SupportsIndex) -> NoReturn:
        raise CallerError(f"{type(self).__name__} cannot be copied or pickled", do=do)

    return refuse
