"""Several threads for one purpose: all results, or the failure of whoever is at fault."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING, TypeVar

from gradengine.errors import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["together"]

T = TypeVar("T")

_CONFESSION_SECONDS = 2.5  # given to the other threads once one has failed; less than a crew gives its processes


def together(works: Sequence[Callable[[], T]]) -> list[T]:
    """Do each work on a thread of its own, a single one on this thread.

    Args:
        works: Each must end soon after another has failed: by a `with` block around its exchanges, which ends what the
            others wait for. One that does not end is left behind after some seconds.

    Returns:
        The results, in order.

    Raises:
        BaseException: The first failure that is not the loss of a peer; the first of all where there is no such.

    Example:
        >>> together([lambda: 1, lambda: 2])
        [1, 2]
    """
    if len(works) == 1:
        return [works[0]()]
    failures: list[BaseException] = []
    futures = [_started(work, failures) for work in works]
    wait(futures, return_when=FIRST_EXCEPTION)
    if failures:
        wait(futures, timeout=_CONFESSION_SECONDS)
        raise next((failure for failure in failures if not isinstance(failure, PeerLost)), failures[0])
    return [future.result() for future in futures]


def _started(work: Callable[[], T], failures: list[BaseException]) -> Future[T]:
    future: Future[T] = Future()
    # A thread of a pool would be joined at the end of the process, whatever it waits for.
    threading.Thread(target=_do, args=(work, future, failures), daemon=True).start()
    return future


def _do(work: Callable[[], T], future: Future[T], failures: list[BaseException]) -> None:
    try:
        future.set_result(work())
    except BaseException as fault:  # noqa: BLE001  (raised again by the thread that waits)
        failures.append(fault)
        future.set_exception(fault)
