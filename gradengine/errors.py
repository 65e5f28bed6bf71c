"""Exceptions of this package: what failed and where, got and expected, and what to do about it.

`CallerError` is a wrong call, `ExchangeError` a failed peer or connection, `NonFiniteGradient` a diverged model. After
each of them the state is what it was before the failed call; after `DeviceFailed` the process can only be ended.
Messages may hold text of a peer or a million names: they are printable, and a few lines at most.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from typing import Any, ClassVar, NoReturn, SupportsIndex

__all__ = [
    "BufferRefused",
    "CallerError",
    "DeadlineExceeded",
    "DeviceFailed",
    "DeviceUnavailable",
    "ExchangeError",
    "FixedAttribute",
    "GradientError",
    "HandshakeRefused",
    "LayoutMismatch",
    "NonFiniteGradient",
    "OutOfDeviceMemory",
    "PeerLost",
    "ProtocolError",
    "WindowError",
]

_MAX_WHAT = 1000  # characters; it may hold the rows in which two layouts differ, or a peer's message
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
    """Base class of every error of this package.

    Args:
        what: What failed and where, one clause.
        got: The value that was found.
        expected: What would have been valid.
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
    """A call with wrong arguments or at the wrong time, which changed nothing. Base class of the following."""


class BufferRefused(CallerError):
    """An array or pointer of an unsupported dtype, device, stride or size, or a read-only destination."""


class LayoutMismatch(CallerError):
    """An unknown or missing component or block, or one of another shape than the layout's."""


class WindowError(CallerError):
    """A call that the window's state does not allow: no micro-batch yet, a bad weight, an earlier step that failed."""


class DeviceUnavailable(CallerError):
    """A device that cannot be used here; the message names what is missing and how to install it."""


class OutOfDeviceMemory(CallerError):
    """Too little free memory on the device; nothing stays allocated."""


class FixedAttribute(CallerError, AttributeError):
    """An attribute that cannot be set, as an object ignores it or has it for life; or one that was renamed."""


class DeviceFailed(GradientError):
    """Work on a GPU that ended in an error, ours or another library's: this process can do nothing more on that GPU."""


class NonFiniteGradient(GradientError):
    """A NaN or Inf in a gradient.

    Attributes:
        component: The component's name.
        index: Flat index of the component's first element that is not finite.
        value: The element's value: in the rank's own contribution if still known, else in the sum.
        rank: The rank that contributed the value; None if the sum itself overflowed or there is one worker.
        tp_rank: The tensor-parallel rank whose shard `index` refers to; None without such a group.
        step: The step it happened in.
        is_late: Whether the step was over when the error was raised, as that of an asynchronous step on a GPU.
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
            else "the micro-batches are kept: call discard() to drop them, or use on_non_finite='skip'",
        )

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = functools.partial(
            type(self), step=self.step, rank=self.rank, tp_rank=self.tp_rank, is_late=self.is_late
        )  # pickle knows no keyword arguments
        return rebuild, (self.component, self.index, self.value), self.__dict__


class ExchangeError(GradientError):
    """A failed exchange. The engine knows which buckets are summed, so that the step can be run again."""


class HandshakeRefused(ExchangeError):
    """A refused join: the ranks' layout, settings, world size, wire version or secret differ, or a rank is taken."""


class ProtocolError(ExchangeError):
    """A message from a peer that violates the protocol."""


class PeerLost(ExchangeError):
    """A peer or the server that closed its connection, died, or never connected."""


class DeadlineExceeded(ExchangeError):
    """No progress for longer than the timeout; the message names the ranks that are late and those that wait."""


def _printable(value: object, limit: int) -> str:
    """A value as printable text of bounded length: shortened in its middle, control characters escaped."""
    try:
        # Containers item by item: a few lists that hold each other many times print as more text than memory can hold.
        text = _containers.repr(value) if isinstance(value, (list, tuple, dict, set, frozenset)) else str(value)
    except Exception as fault:  # noqa: BLE001  (nested too deep, too many digits, or a caller's own object and error)
        text = f"<{type(value).__name__} that cannot be shown: {type(fault).__name__}>"
    lines = _shortened(text, limit).split("\n")
    shown = lines if len(lines) <= _MAX_LINES else [*lines[: _MAX_LINES - 2], "...", lines[-1]]
    escaped = "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in shown)
    return _shortened(escaped, limit)


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit + 60:  # the note about what was cut would be as long
        return text
    tail = limit // 4  # the advice is at the end
    return f"{text[: limit - tail]} ... ({len(text) - limit} more characters) ... {text[-tail:]}"


class Fixed:
    """Base class of public objects: after `__init__` a public attribute is set by a property's setter, or not at all.

    A method may be replaced, as the mock of a test does.

    Raises:
        FixedAttribute: Another public attribute is set.
    """

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        init = cls.__init__

        @functools.wraps(init)
        def init_and_fix(self: Fixed, *given: Any, **named: Any) -> None:
            init(self, *given, **named)
            if type(self) is cls:
                vars(self)["_is_fixed"] = True

        cls.__init__ = init_and_fix  # type: ignore[method-assign, assignment]

    def __setattr__(self, name: str, value: object) -> None:
        if name[0] != "_" and "_is_fixed" in vars(self) and not _may_be_set(type(self), name):
            raise _cannot_be_set(type(self), name)
        object.__setattr__(self, name, value)


def _may_be_set(kind: type, name: str) -> bool:
    return _has_setter(kind, name) or inspect.isfunction(getattr(kind, name, None))


def _has_setter(kind: type, name: str) -> bool:
    return getattr(getattr(kind, name, None), "fset", None) is not None


def _cannot_be_set(kind: type, name: str) -> CallerError:
    others = ", ".join(other for other in dir(kind) if _has_setter(kind, other))
    expected = f"one that can be set: {others}" if others else None
    is_given = name in inspect.signature(kind).parameters
    do = f"make another {kind.__name__} with {name}=" if is_given else "keep it in a variable of your own"
    return FixedAttribute(f"attribute '{name}' of {kind.__name__} cannot be set", expected=expected, do=do)


class NotCopied:
    """Base class of objects that hold memory or a connection: to copy or pickle one raises `CallerError`."""

    _instead: ClassVar[str]

    def __init_subclass__(cls, *, instead: str | None = None) -> None:
        if instead is not None:
            cls._instead = instead

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        article = "an" if name[0] in "AEIO" else "a"
        raise CallerError(f"{article} {name} cannot be copied or pickled", do=self._instead)
