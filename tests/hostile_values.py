"""What no call expects: values of every wrong kind, size and sign, some of which fight back."""

import decimal
import fractions
import math

import numpy as np

from gradengine import GradientError, RawBuffer


class Hostile:
    """Has the names of a number and none of its ways."""

    def __float__(self):
        raise ValueError("no float")

    def __index__(self):
        raise TypeError("no index")


HOSTILE = [
    *("", "3", "nan", b"x", True, None, object(), Hostile(), [], [1, "a"], {}, {"a": 1}, {1, 2}, (), len, 1j, ...),
    *(math.nan, math.inf, -math.inf, -1, 0, -0.0, 1, 2.5, 10**400, -(10**400), 1e-300, 1e300, 10**5000, 2**63),
    *(np.float32(np.nan), np.float32(2), np.int64(-1), np.int64(2), np.uint64(2**64 - 1), np.bool_(1), np.complex64(1)),
    *(np.array(2), np.array([1, 2]), np.array([]), np.array(["a"]), np.zeros((2, 2), np.float32), np.ma.masked),
    *(decimal.Decimal("NaN"), decimal.Decimal(1), fractions.Fraction(1, 3), np.datetime64("2020"), "x" * 10**5),
    *(range(3), slice(1), int, Exception("x"), RawBuffer("a", "b", "c"), RawBuffer(8, 10**30, "float32"), lambda *_: 1),
]


def refusal_of(call):
    """What our error says; nothing where there is none. Any other goes on to the test."""
    try:
        call()
    except GradientError as refusal:
        return str(refusal)
    return ""
