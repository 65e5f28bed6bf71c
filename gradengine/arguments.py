"""Validation of arguments: numbers, bools, words and sequences of Python, NumPy or a framework."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gradengine.errors import CallerError

MOST = (1 << 63) - 1  # the largest of C's and NumPy's integers
MOST_RANKS = 1 << 16  # of a group
_LONGEST_TUPLE = 8  # items shown
_LONGEST_FAULT = 300  # characters shown of another library's error


def whole_number(name: str, value: object, least: int, most: int = MOST, kind: type[CallerError] = CallerError) -> int:
    """The value as a plain integer, of any integer type but bool; raises `kind` if it is another or out of range."""
    number = as_index(value)
    if number is not None and least <= number <= most:
        return number
    fault = "is not a whole number" if number is None else "is out of range"
    expected = f"a whole number >= {least}" if most == MOST else f"a whole number in {least}..{most}"
    raise kind(f"{name} {fault}", got=said(value), expected=expected)


def checked_rank(rank: int, size: int, names: tuple[str, str] = ("rank", "world_size")) -> tuple[int, int]:
    """A rank and the size of its group as plain integers; raises `CallerError` unless 0 <= rank < size <= 65536."""
    rank_name, size_name = names
    count = whole_number(size_name, size, 1, MOST_RANKS)
    return whole_number(f"{rank_name} of {size_name}={count}", rank, 0, count - 1), count


def as_index(value: Any) -> int | None:
    """The value as a plain integer; None where it is not a whole number. A bool is not one."""
    is_truth = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    try:
        return None if is_truth else operator.index(value)
    except TypeError:  # an array of several too, and one that is traced
        return None


def as_float(value: object) -> float:
    """The value as a float; NaN where it is not a real number, so that a comparison written for NaN refuses it."""
    number = as_number(value)
    return math.nan if number is None else number


def as_number(value: Any) -> float | None:
    """The value of a Python or NumPy number, or of an array without dimensions, as a float, infinity and NaN included.

    None if the value is not a real number, or is larger than any float, text or a bool.
    """
    dtype, is_number = str(getattr(value, "dtype", "float")), hasattr(value, "__float__") or hasattr(value, "__index__")
    is_other = isinstance(value, (bool, np.ma.MaskedArray)) or bool(getattr(value, "ndim", 0))
    if is_other or not is_number or not ("float" in dtype or "int" in dtype):
        return None
    try:  # torch warns of a tensor that autograd watches
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor that has no value yet
        return None


def out_of_range(
    name: str, value: object, expected: str, kind: type[CallerError] = CallerError, do: str | None = None
) -> CallerError:
    """The error for a value that is not a number, or not in the expected range."""
    is_number = as_number(value) is not None or as_index(value) is not None  # an integer may be larger than any float
    fault = "out of range" if is_number else "not a number"
    return kind(f"{name} is {fault}", got=said(value), expected=expected, do=do)


def truth_value(name: str, value: object) -> bool:
    """A Python or NumPy bool as a plain bool; raises `CallerError` for anything else, truthy or not."""
    if not isinstance(value, (bool, np.bool_)):
        raise CallerError(f"{name} is not a bool", got=said(value), expected="True or False")
    return bool(value)


def said(value: object) -> object:
    """A value as error messages show it: numbers, short text and errors themselves, otherwise the type's name.

    >>> said("a"), said(2), said([1, 2]), said(KeyError("w"))
    ("'a'", 2, 'list', "KeyError: 'w'")
    """
    if isinstance(value, str):
        return repr(value[:80]) + ("..." if len(value) > 80 else "")
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"[:_LONGEST_FAULT]
    if type(value) is tuple and len(value) <= _LONGEST_TUPLE:  # a shape, an address
        return f"({', '.join(str(said(item)) for item in value)}{',' if len(value) == 1 else ''})"
    if value is None:
        return "None"
    if isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to show one of more than 4300 digits
        return f"an integer of {value.bit_length()} bits"
    is_scalar = isinstance(value, (np.generic, np.ndarray)) and not value.ndim and not value.dtype.hasobject
    return value if is_scalar or type(value) in {bool, int, float, complex} else type(value).__name__


def listed(name: str, values: Any) -> list[Any]:
    """The items of an iterable, as a list; raises `CallerError` if it is text, or not iterable."""
    return list(iterated(name, values))


def iterated(name: str, values: Any) -> Iterator[Any]:
    """An iterator over an iterable; raises `CallerError` if it is text, or not iterable."""
    items: Any = None if isinstance(values, (str, bytes)) else values
    try:
        return iter(items)
    except TypeError:  # an array without dimensions too
        raise CallerError(f"{name} is not a sequence", got=said(values), expected="a list") from None


def refuse_unknown(name: str, value: object, known: Sequence[str], do: str | None = None) -> None:
    """Raise `CallerError` unless the value is one of these words."""
    if not isinstance(value, str) or value not in known:
        raise CallerError(f"unknown {name}", got=said(value), expected=f"one of {', '.join(map(repr, known))}", do=do)


def refuse_lacking(name: str, value: object, attributes: Sequence[str]) -> None:
    """Raise `CallerError` unless the value has all of these attributes."""
    lacking = [attribute for attribute in attributes if not hasattr(value, attribute)]
    if lacking:
        expected = f"an object with {', '.join(attributes)}"
        raise CallerError(f"{name} has no {lacking[0]}", got=said(value), expected=expected)


def refuse_other_kind(name: str, value: object, kind: type, do: str | None = None) -> None:
    """Raise `CallerError` unless the value is an instance of this class."""
    if not isinstance(value, kind):
        raise CallerError(f"{name} is not a {kind.__name__}", got=said(value), do=do)


def checked_seconds(name: str, seconds: float) -> float:
    """Return the seconds as a float; raises `CallerError` unless they are above 0 and at most 1e9."""
    number = as_float(seconds)
    if not 0 < number <= 1e9:  # also true of NaN
        raise out_of_range(name, seconds, "seconds above 0, at most 1e9")
    return number
