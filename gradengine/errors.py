"""Every error this package raises: what, where, got, expected, and what to do about it.

The caller's mistakes (`CallerError`), the peers' (`ExchangeError`) and the model's (`NonFiniteGradient`) are different
kinds, because they are mended by different people. All of them leave the state as it was before the failed call.
What they say may come from a peer or hold a million names: it is printable, and a few lines, whatever it was given.
"""

from __future__ import annotations

import functools
import reprlib

__all__ = [
    "BufferRefused",
    "CallerError",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "ExchangeError",
    "GradientError",
    "HandshakeRefused",
    "LayoutMismatch",
    "NonFiniteGradient",
    "OutOfDeviceMemory",
    "PeerLost",
    "ProtocolError",
    "WindowError",
]

_MAX_WHAT = 1000  # characters; it may hold the rows in which two layouts differ, or another's message
_MAX_VALUE = 300
_MAX_LINES = 12
_MAX_ITEMS = 32  # of a container
_containers = reprlib.Repr()
_containers.maxlevel = 3
_containers.maxlist = _containers.maxtuple = _containers.maxdict = _containers.maxset = _containers.maxfrozenset = (
    _MAX_ITEMS
)
_containers.maxstring = _containers.maxlong = _containers.maxother = _MAX_VALUE


class GradientError(Exception):
    """The base of every error of this package.

    Args:
        what: What went wrong and where, one clause.
        got: What came.
        expected: What would have been right.
        do: What the reader can do now.

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
    """The call was wrong; nothing has changed. The base of the kinds below."""


class BufferRefused(CallerError):
    """An array or pointer cannot be taken as it lies: dtype, device, strides, size, or read-only."""


class LayoutMismatch(CallerError):
    """What was passed does not fit the layout: an unknown, missing or misshapen component or block."""


class WindowError(CallerError):
    """The call does not fit the state of the window: no micro-batch yet, a bad weight, a step that failed before."""


class DeviceUnavailable(CallerError):
    """The device asked for cannot be used here; the error names what is missing and how to get it."""


class OutOfDeviceMemory(CallerError):
    """The device has not the memory that is needed; nothing was taken."""


class NonFiniteGradient(GradientError):
    """A gradient holds NaN or Inf.

    Attributes:
        component: The slot's name.
        index: The first flat index within the component.
        value: The value found there (of the local contribution where it is still known, else of the sum).
        rank: The worker that contributed it; None where the sum itself overflowed or there is one worker.
        tp_rank: The tensor-parallel rank whose part holds it; `index` counts in that part. None without such a group.
        step: The step it happened in.
        is_late: Whether that step is over: a GPU's verdict, read without waiting for it.
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
            do="zeros were handed back in that step (a deferred one left the sum); on_non_finite='skip' raises nothing"
            if is_late
            else "the window is kept (of several workers, as their sum): discard() it, or use on_non_finite='skip'",
        )

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = functools.partial(
            type(self), step=self.step, rank=self.rank, tp_rank=self.tp_rank, is_late=self.is_late
        )  # pickle knows no keyword arguments
        return rebuild, (self.component, self.index, self.value), self.__dict__


class ExchangeError(GradientError):
    """The sum over workers failed. The local state says which spans are summed, so the step can be run again."""


class HandshakeRefused(ExchangeError):
    """This worker may not join: another layout, world size, rank, protocol version or token."""


class ProtocolError(ExchangeError):
    """A peer sent what the protocol does not allow here."""


class PeerLost(ExchangeError):
    """A peer or the coordinator closed its connection, died, or was never there."""


class DeadlineExceeded(ExchangeError):
    """Nothing moved for longer than the progress deadline; the error names who is late and who waits."""


def _printable(value: object, limit: int) -> str:
    """A value as text that changes no terminal: bounded from its middle, control characters escaped, lines kept."""
    try:
        # Containers item by item: a few lists that hold each other often are more text than there is memory.
        text = _containers.repr(value) if isinstance(value, (list, tuple, dict, set, frozenset)) else str(value)
    except Exception as fault:  # noqa: BLE001  (nested too deep, too many digits, or a caller's own object and error)
        text = f"<{type(value).__name__} that cannot be shown: {type(fault).__name__}>"
    lines = _shortened(text, limit).split("\n")
    shown = lines if len(lines) <= _MAX_LINES else [*lines[: _MAX_LINES - 2], "...", lines[-1]]
    escaped = "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in shown)
    return _shortened(escaped, limit)


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit + 60:  # what is said of the rest is no longer
        return text
    tail = limit // 4  # what to do stands at the end
    return f"{text[: limit - tail]} ... ({len(text) - limit} more characters) ... {text[-tail:]}"


def not_copied(what: str, do: str) -> CallerError:
    """The error for an attempt to copy or pickle what shares memory, or a connection, with others.

    >>> raise not_copied("a StepResult", "copy the arrays that you need")
    Traceback (most recent call last):
    gradengine.errors.CallerError: a StepResult cannot be copied or pickled; copy the arrays that you need
    """
    return CallerError(f"{what} cannot be copied or pickled", do=do)
