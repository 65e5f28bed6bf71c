"""One thing that is timed, and the one check that it must pass before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradengine.errors import GradientError
from gradengine.kernels.host import available_cpus

__all__ = ["Absent", "Case", "Difference", "ResultsDiffer", "check_results", "relative_error"]

_PIECE = 1 << 16  # elements that are compared at a time


class ResultsDiffer(GradientError):
    """Two variants of a case do not compute the same; there is nothing to time then."""


def nothing() -> None:
    """What a case does before it is run, where it needs no preparation."""


@dataclass(frozen=True)
class Case:
    """One variant of one benchmark.

    Attributes:
        name: The benchmark: "step".
        variant: What is measured: "ours hold=4", "torch foreach".
        bytes: Memory traffic of one run, counted by hand: each pass's reads and writes of whole buffers.
        run: Does it once; this alone is timed.
        error: After a run, the largest relative difference of its result from fp64's.
        prepare: Puts back what a run changes; before each run, untimed.
        ours: Whether the other variants are compared with this one.
        arenas: Memory that it took beyond the gradients, in fp32 gradient sets; None where not measured.
        tolerance: The largest error that it may have, where that is not the benchmark's.
    """

    name: str
    variant: str
    bytes: int
    run: Callable[[], object]
    error: Callable[[], float]
    prepare: Callable[[], object] = nothing
    ours: bool = False
    arenas: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Absent:
    """A variant that cannot run here, and why; it keeps its line in the table."""

    variant: str
    why: str


@dataclass(frozen=True)
class Difference:
    """How far a variant's result is from fp64's: the largest difference, relative to the component's largest value."""

    variant: str
    error: float


def check_results(cases: Iterable[Case], tolerance: float) -> list[Difference]:
    """Run each case once and compare its result with fp64's.

    Args:
        cases: What will be timed.
        tolerance: The largest relative error that counts as the same result.

    Raises:
        ResultsDiffer: A case's error is larger, or not a number.

    Example:
        >>> check_results([Case("add", "numpy", 8, run=nothing, error=lambda: 1e-7)], tolerance=1e-6)
        [Difference(variant='numpy', error=1e-07)]
    """
    return [_checked(case, tolerance) for case in cases]


def relative_error(
    results: Sequence[npt.NDArray[np.float32]], expected: Callable[[int], npt.NDArray[np.float64]]
) -> float:
    """The largest difference of any component from its fp64 value, relative to the component's largest value.

    Args:
        results: Components, in order.
        expected: Position -> the component in fp64, of as many elements.

    Returns:
        The error; NaN where a result is NaN.

    Example:
        >>> relative_error([np.array([2, 4], np.float32)], lambda position: np.array([2.0, 5.0]))
        0.2
    """
    with ThreadPoolExecutor(available_cpus()) as pool:
        errors = list(pool.map(lambda i: _difference(results[i], expected(i)), range(len(results))))
    return float(np.max(errors, initial=0.0))


def _checked(case: Case, tolerance: float) -> Difference:
    case.prepare()
    case.run()
    error = case.error()
    tolerance = tolerance if case.tolerance is None else case.tolerance
    if not error <= tolerance:  # written so that NaN is refused
        raise ResultsDiffer(
            f"{case.name}: '{case.variant}' computes something else",
            got=f"a relative error of {error:.3g}",
            expected=f"at most {tolerance:.3g} from the result in fp64",
        )
    return Difference(case.variant, error)


def _difference(result: npt.NDArray[np.float32], expected: npt.NDArray[np.float64]) -> float:
    """Of one component, in pieces that stay in the cache."""
    found, wanted = result.reshape(-1), expected.reshape(-1)
    if found.size != wanted.size:
        raise ResultsDiffer("a result has another size", got=found.size, expected=wanted.size)
    pieces = [slice(start, start + _PIECE) for start in range(0, wanted.size, _PIECE)]
    largest = float(np.max([np.max(np.abs(wanted[piece])) for piece in pieces], initial=0.0))
    difference = float(np.max([np.max(np.abs(found[piece] - wanted[piece])) for piece in pieces], initial=0.0))
    return difference / largest if largest else difference
