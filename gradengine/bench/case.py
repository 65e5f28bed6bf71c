"""A variant of a benchmark, and the check that it must pass before anything is timed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gradengine.errors import GradientError
from gradengine.kernels.host import available_cpus

__all__ = ["Absent", "Benchmark", "Case", "Checked", "Missing", "ResultsDiffer", "Variant", "check", "relative_error"]

Result = TypeVar("Result")


class ResultsDiffer(GradientError):
    """A variant does not compute what it should; there is nothing to time then."""


class Missing(Exception):
    """What a variant needs is not there; it keeps its line in the table."""


def nothing() -> None:
    """What a case does before it is run, where it needs no preparation."""


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """One call that makes them all."""

    def run() -> None:
        for call in calls:
            call()

    return run


@dataclass(frozen=True)
class Case:
    """What is timed."""

    run: Callable[[], object]  # does it once; this alone is timed
    error: Callable[[], float]  # after a run, the largest relative difference of its result from fp64's
    prepare: Callable[[], object] = nothing  # puts back what a run changes; before each run, untimed
    arenas: float | None = None  # memory that it took beyond the gradients, in fp32 gradient sets, where measured


@dataclass(frozen=True)
class Variant:
    """A line of a benchmark, which is built when its turn comes.

    The benchmark fails where a base does, or what is required though no base; a peer that fails is only absent.
    """

    name: str  # "ours hold=4", "torch foreach"
    bytes: int  # memory traffic of one run, counted by hand: each pass's reads and writes of whole buffers
    build: Callable[[], Case]
    base: bool = False  # whether the others' times are compared with its own
    required: bool = False
    tolerance: float | None = None  # the largest error that it may have, where that is not the benchmark's


@dataclass(frozen=True)
class Benchmark:
    """Variants that are compared with each other."""

    name: str
    variants: Sequence[Variant]
    tolerance: float  # the largest relative error that counts as the same result
    parameters: Mapping[str, object]  # what to record with the figures
    time: str = "wall"  # which of a sample's times it is about


@dataclass(frozen=True)
class Absent:
    """A variant that does not run here, and why; it keeps its line in the table."""

    variant: str
    why: str


Checked: TypeAlias = tuple[Variant, Case, float]  # one that was built and computes what it should, up to that error


def check(benchmark: Benchmark) -> tuple[list[Checked], list[Absent], list[str]]:
    """Build each variant, run it once and compare its result with fp64's.

    Returns:
        What can be timed; what cannot, and why; and which of those is a failure of the benchmark: a variant that is
        wrong or required, but none for which something is `Missing`.
    """
    checked: list[Checked] = []
    absent: list[Absent] = []
    failed: list[str] = []
    for variant in benchmark.variants:
        try:
            checked.append(_checked(benchmark, variant))
        except Exception as fault:  # noqa: BLE001, PERF203  (a compiler or a driver may raise anything)
            absent.append(Absent(variant.name, reason(fault)))
            is_needed = variant.base or variant.required or isinstance(fault, ResultsDiffer)
            if is_needed and not isinstance(fault, Missing):
                failed.append(variant.name)
    return checked, absent, failed


def _checked(benchmark: Benchmark, variant: Variant) -> Checked:
    case = variant.build()
    case.prepare()
    case.run()
    error = case.error()
    tolerance = benchmark.tolerance if variant.tolerance is None else variant.tolerance
    if not error <= tolerance:  # written so that NaN is refused
        raise ResultsDiffer(
            f"{benchmark.name}: '{variant.name}' computes something else",
            got=f"a relative error of {error:.3g}",
            expected=f"at most {tolerance:.3g} from the result in fp64",
        )
    return variant, case, error


def reason(fault: Exception) -> str:
    """Why, in a line; the traceback of what is no error of ours goes to stderr."""
    if isinstance(fault, Missing):
        return str(fault)
    if not isinstance(fault, GradientError):
        traceback.print_exception(fault, limit=-8, file=sys.stderr)
    first_line = (str(fault).strip().splitlines() or [""])[0]
    return f"{type(fault).__name__}: {first_line}"[:200]


def relative_error(
    results: Sequence[npt.NDArray[np.float32]], expected: Callable[[int], npt.NDArray[np.float64]]
) -> float:
    """The largest difference of any component from its fp64 value, relative to the component's largest value.

    NaN where a result is NaN.

    >>> relative_error([np.array([2, 4], np.float32)], lambda position: np.array([2.0, 5.0]))
    0.2
    """

    def error(position: int) -> float:
        found, wanted = results[position].reshape(-1), expected(position).reshape(-1)
        if found.size != wanted.size:
            raise ResultsDiffer("a result has another size", got=found.size, expected=wanted.size)
        largest, difference = (float(np.max(np.abs(each), initial=0.0)) for each in (wanted, found - wanted))
        return difference / largest if largest else difference

    return float(np.max(on_all_cpus(error, range(len(results))), initial=0.0))


def on_all_cpus(work: Callable[[int], Result], numbers: Iterable[int]) -> list[Result]:
    """The results for these numbers, in order; such work calls this for no work of its own."""
    return list(_pool().map(work, numbers))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cpus())
