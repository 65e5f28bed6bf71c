"""Numbers and words as callers give them: Python's, NumPy's or a framework's; whatever else is refused by name."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradengine.errors import CallerError

__all__ = [
    "as_float",
    "as_index",
    "as_number",
    "listed",
    "refuse_lacking",
    "refuse_other_kind",
    "refuse_unknown",
    "said",
    "whole_number",
]


def whole_number(
    name: str, value: object, least: int, most: int | None = None, kind: type[CallerError] = CallerError
) -> int:
    """The value as a plain integer.

    Args:
        name: What it is, as the error says it.
        value: An integer of any kind; no truth value.
        least: The smallest that will do.
        most: The largest, where there is one.
        kind: The error's.

    Raises:
        CallerError: It is no whole number, or not among these; of the kind asked for.

    Example:
        >>> import numpy as np
        >>> whole_number("hold", np.int64(2), 1)
        2
        >>> whole_number("hold", "2", 1)
        Traceback (most recent call last):
        gradengine.errors.CallerError: hold is out of range: got '2', expected a whole number >= 1
    """
    number = as_index(value)
    if number is None or number < least or (most is not None and number > most):
        expected = f"a whole number >= {least}" if most is None else f"a whole number in {least}..{most}"
        raise kind(f"{name} is out of range", got=said(value), expected=expected)
    return number


def as_index(value: Any) -> int | None:
    """The value as a plain integer; None where it is no whole number, a truth value among them.

    >>> as_index(3), as_index(3.0), as_index(True), as_index("3")
    (3, None, None, None)
    """
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several, one that is traced
        return None


def as_float(value: object) -> float:
    """The value as a float; NaN where it is no real number, so that a comparison written for NaN refuses it.

    >>> as_float(3), as_float("3"), as_float(True), as_float(1j)
    (3.0, nan, nan, nan)
    """
    number = as_number(value)
    return math.nan if number is None else number


def as_number(value: Any) -> float | None:
    """The value as a float, infinity and NaN among them; None where it is no real number, or larger than any float.

    A number is Python's, NumPy's, or an array without dimensions; not text that reads like one, and no truth value.

    >>> as_number(2), as_number("2"), as_number(math.inf), as_number(10**400)
    (2.0, None, inf, None)
    """
    if isinstance(value, (bool, np.ma.MaskedArray)):
        return None
    dtype = getattr(value, "dtype", None)
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    if not is_number or (dtype is not None and not _is_real(str(dtype))):
        return None
    try:
        detached = value.detach() if hasattr(value, "detach") else value  # torch warns of one that autograd watches
        return None if getattr(value, "ndim", 0) else float(detached)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor that has no value yet
        return None


def _is_real(dtype: str) -> bool:
    return "float" in dtype or "int" in dtype


def said(value: object) -> object:
    """What an error says that it got: numbers and short text as they are, of anything else the type.

    >>> said("a"), said(2), said([1, 2])
    ("'a'", 2, 'list')
    """
    if isinstance(value, str):
        return repr(value[:80]) + ("..." if len(value) > 80 else "")
    if value is None:
        return "None"
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    is_number = isinstance(value, (int, float, complex)) or type(value).__module__ == "numpy"
    is_scalar = is_number and not getattr(value, "ndim", 0)
    return value if is_scalar else type(value).__name__


def listed(name: str, values: Any, kind: type[CallerError] = CallerError) -> list[Any]:
    """What an iterable gives; of text, which gives its letters, and of what is none an error of that kind.

    Raises:
        CallerError: It is text, or cannot be iterated over.

    Example:
        >>> listed("sizes", (2, 3))
        [2, 3]
    """
    try:
        if not isinstance(values, (str, bytes)):
            return list(values)
    except TypeError:
        pass
    raise kind(f"{name} is no sequence", got=said(values), expected="a list")


def refuse_unknown(name: str, value: object, known: Sequence[str]) -> None:
    """Raise `CallerError` unless the value is one of these words.

    >>> refuse_unknown("average", 5, ("weighted", "per_worker"))
    Traceback (most recent call last):
    gradengine.errors.CallerError: unknown average: got 5, expected one of 'weighted', 'per_worker'
    """
    if not isinstance(value, str) or value not in known:
        raise CallerError(f"unknown {name}", got=said(value), expected=f"one of {', '.join(map(repr, known))}")


def refuse_lacking(name: str, value: object, attributes: Sequence[str]) -> None:
    """Raise `CallerError` unless the value has all of these attributes.

    >>> refuse_lacking("exchange", 5, ("rank", "bind"))
    Traceback (most recent call last):
    gradengine.errors.CallerError: exchange has no rank: got 5, expected an object with rank, bind
    """
    lacking = [attribute for attribute in attributes if not hasattr(value, attribute)]
    if lacking:
        expected = f"an object with {', '.join(attributes)}"
        raise CallerError(f"{name} has no {lacking[0]}", got=said(value), expected=expected)


def refuse_other_kind(name: str, value: object, kind: type, do: str | None = None) -> None:
    """Raise `CallerError` unless the value is of this class.

    >>> refuse_other_kind("text", 5, str)
    Traceback (most recent call last):
    gradengine.errors.CallerError: text is no str: got 5
    """
    if not isinstance(value, kind):
        raise CallerError(f"{name} is no {kind.__name__}", got=said(value), do=do)
