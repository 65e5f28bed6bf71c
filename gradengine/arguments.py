"""Validation of arguments: numbers, bools, words and sequences of Python, NumPy or a framework."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gradengine.errors import CallerError

MOST = (1 << 63) - 1  # the largest of C's and NumPy's integers
MOST_RANKS = 1 << 16  # ranks of a group
_LONGEST_TUPLE = 8  # items shown
_LONGEST_FAULT = 300  # characters shown of another library's error


def whole_number(name: str, value: object, least: int, most: int = MOST, kind: type[CallerError] = CallerError) -> int:
    """Return the value as a plain integer. Raises `kind` if it is a bool, not an integer, or out of range."""
    number = as_index(value)
    if number is not None and least <= number <= most:
        return number
    fault = "is not a whole number" if number is None else "is out of range"
    expected = f"a whole number >= {least}" if most == MOST else f"a whole number in {least}..{most}"
    raise kind(f"{name} {fault}", got=said(value), expected=expected)


def checked_rank(rank: int, size: int, names: tuple[str, str] = ("rank", "world_size")) -> tuple[int, int]:
    """Return a rank and its group's size as plain integers. Raises `CallerError` unless 0 <= rank < size <= 65536."""
    rank_name, size_name = names
    count = whole_number(size_name, size, 1, MOST_RANKS)
    return whole_number(f"{rank_name} of {size_name}={count}", rank, 0, count - 1), count


def as_index(value: Any) -> int | None:
    """Return the value as a plain integer, or None if it is not a whole number. A bool is not one."""
    is_truth = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    try:
        return None if is_truth else operator.index(value)
    except TypeError:  # an array of several elements and a traced array raise it too
        return None


def as_float(value: object) -> float:
    """Return the value as a float, or NaN if it is not a real number, so that a range check refuses it."""
    number = as_number(value)
    return math.nan if number is None else number


def as_number(value: Any) -> float | None:
    """Return a Python or NumPy number, or an array without dimensions, as a float. Infinity and NaN are numbers.

    Returns None if the value is not a real number, is larger than any float, or is text or a bool.
    """
    dtype, is_number = str(getattr(value, "dtype", "float")), hasattr(value, "__float__") or hasattr(value, "__index__")
    is_other = isinstance(value, (bool, np.ma.MaskedArray)) or bool(getattr(value, "ndim", 0))
    if is_other or not is_number or not ("float" in dtype or "int" in dtype):
        return None
    try:  # torch warns about a tensor that is not detached from autograd
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor without a value yet is a RuntimeError
        return None


def out_of_range(
    name: str, value: object, expected: str, kind: type[CallerError] = CallerError, do: str | None = None
) -> CallerError:
    """Return the error for a value that is not a number, or not in the expected range."""
    is_number = as_number(value) is not None or as_index(value) is not None  # an integer may be larger than any float
    fault = "out of range" if is_number else "not a number"
    return kind(f"{name} is {fault}", got=said(value), expected=expected, do=do)


def truth_value(name: str, value: object) -> bool:
    """Return a Python or NumPy bool as a plain bool. Raises `CallerError` for any other value."""
    if not isinstance(value, (bool, np.bool_)):
        raise CallerError(f"{name} is not a bool", got=said(value), expected="True or False")
    return bool(value)


def said(value: object) -> object:
    """Return a value as error messages show it. Numbers, short text and errors are shown, other values by their type.

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
    """Return the items of an iterable as a list. Raises `CallerError` if it is text, or not iterable."""
    return list(iterated(name, values))


def iterated(name: str, values: Any) -> Iterator[Any]:
    """Return an iterator over an iterable. Raises `CallerError` if it is text, or not iterable."""
    items: Any = None if isinstance(values, (str, bytes)) else values
    try:
        return iter(items)
    except TypeError:  # an array without dimensions raises it too
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
    """Return the seconds as a float. Raises `CallerError` unless they are above 0 and at most 1e9."""
    number = as_float(seconds)
    if not 0 < number <= 1e9:  # true for NaN too
        raise out_of_range(name, seconds, "seconds above 0, at most 1e9")
    return number
