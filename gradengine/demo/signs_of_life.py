"""A word now and then from work that takes long, so that it is not taken for stopped."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from gradengine.demo.reports import Advanced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gradengine.demo.reports import Report

__all__ = ["with_signs_of_life"]

_EVERY_SECONDS = 1.0  # steps of the demo's own model are shorter, and add nothing to what is reported of them

T = TypeVar("T")


def with_signs_of_life(items: Iterable[T], report: Callable[[Report], None]) -> Iterator[T]:
    """The items one by one, and between them a report where a second has passed without one.

    Example:
        >>> list(with_signs_of_life([3, 4], print))
        [3, 4]
    """
    last = monotonic()
    for item in items:
        if monotonic() - last >= _EVERY_SECONDS:
            report(Advanced())
            last = monotonic()
        yield item
