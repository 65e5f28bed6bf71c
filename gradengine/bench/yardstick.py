"""What the memory of this machine can do: copy and triad (a = b + s c) on all CPUs, in NumPy like the kernels.

The triad is taken with s = 1, which NumPy does in one pass: STREAM's traffic, two arrays read and one written.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gradengine.bench.case import Case, relative_error
from gradengine.kernels.host import available_cpus

__all__ = ["TRIAD", "yardsticks"]

TRIAD = "triad"
_CHUNK = 262144  # elements: the kernels' own, few enough pieces that threads seldom meet at the GIL
_LARGEST = 1 << 25  # elements: 128 MB an array, four times the largest L3 of a core complex


def yardsticks(name: str, elements: int) -> list[Case]:
    """The cases "copy" (reads one array, writes one) and "triad" (reads two, writes one).

    Args:
        name: The benchmark they go with.
        elements: fp32 elements of an array; at most 2**25 are taken.
    """
    size = min(elements, _LARGEST)
    source, other = (np.full(size, value, np.float32) for value in (1.5, 2.5))
    target = np.zeros(size, np.float32)
    pool = ThreadPoolExecutor(available_cpus())

    def copy(part: slice) -> None:
        np.copyto(target[part], source[part])

    def triad(part: slice) -> None:
        np.add(other[part], source[part], out=target[part])

    def case(variant: str, work: Callable[[slice], None], arrays: int, expected: float) -> Case:
        return Case(
            name,
            variant,
            bytes=4 * size * arrays,
            run=lambda: _on_all_cpus(pool, work, size),
            error=lambda: relative_error([target], lambda _: np.full(size, expected)),
        )

    return [case("copy", copy, 2, 1.5), case(TRIAD, triad, 3, 4.0)]


def _on_all_cpus(pool: ThreadPoolExecutor, work: Callable[[slice], None], size: int) -> None:
    cpus = available_cpus()
    edges = [size * i // cpus for i in range(cpus + 1)]

    def share(i: int) -> None:
        for start in range(edges[i], edges[i + 1], _CHUNK):
            work(slice(start, min(edges[i + 1], start + _CHUNK)))

    for _ in pool.map(share, range(cpus)):
        pass
