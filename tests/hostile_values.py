"""What no call expects: values of every wrong kind, size and sign, some of which fight back."""

import decimal
import fractions
import math

import numpy as np

from gradengine import GradientError


class Hostile:
    """Has the names of a number and none of its ways."""

    def __float__(self):
        raise ValueError("no float")

    def __index__(self):
        raise TypeError("no index")


class Exporter:
    """Says that it has memory, and has an error of its own instead."""

    shape, dtype = (3,), "float32"

    def __dlpack__(self, **_):
        raise RuntimeError("no memory")

    __dlpack_device__ = __dlpack__


def doubling():
    """A few lists that hold each other so often that nobody can go through all of it."""
    value = []
    for _ in range(60):
        value = [value, value]
    return value


HOSTILE = [
    *(Exporter(), [Exporter()]),
    *("\ud800", b"x" * 10**7, "x" * 10**7, 2**62, 2**70, -(2**70), np.str_("3"), np.array("3")),
    *("", "3", "nan", b"x", True, None, object(), Hostile(), [], [1, "a"], {}, {"a": 1}, {1, 2}, (), len, 1j, ...),
    *(math.nan, math.inf, -math.inf, -1, 0, -0.0, 1, 2.5, 10**400, -(10**400), 1e-300, 1e300, 2**63),
    *(np.float32(np.nan), np.float32(2), np.int64(-1), np.int64(2), np.uint64(2**64 - 1), np.bool_(1), np.complex64(1)),
    *(np.array(2), np.array([1, 2]), np.array([]), np.array(["a"]), np.zeros((2, 2), np.float32), np.ma.masked),
    *(decimal.Decimal("NaN"), decimal.Decimal(1), fractions.Fraction(1, 3), np.datetime64("2020"), "x" * 10**5),
    *(range(3), slice(1), int, Exception("x"), lambda *_: 1),
]


def refusal_of(call):
    """What our error says; nothing where there is none. Any other goes on to the test."""
    try:
        call()
    except GradientError as refusal:
        return str(refusal)
    return ""
