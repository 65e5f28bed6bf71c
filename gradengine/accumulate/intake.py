"""Checks of one accumulator's gradients, which gradients of an unchanged form skip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from gradengine.accumulate.gradients import matched_views
from gradengine.arrays.buffer import Buffer
from gradengine.arrays.host import without_owners
from gradengine.arrays.known import Facts, facts_of
from gradengine.errors import BufferRefused
from gradengine.kernels import Contribution, Device
from gradengine.layout import Slot
from gradengine.layout.slots import Span


class _Known(NamedTuple):
    """Gradients that were checked."""

    facts: Facts
    contribution: Contribution  # keeps no array alive
    most_bytes: int  # size of the largest gradient


@final
class Intake:
    """A factory of contributions from one accumulator's gradients, which refuses gradients in the arena."""

    def __init__(self, device: Device, arena: Buffer) -> None:
        self._device, self._arena, self._stop = device, arena, arena.pointer + arena.nbytes
        self._known: dict[Span, _Known] = {}  # last checked gradients of each span

    def contribution(self, span: Span, sources: Sequence[Any]) -> Contribution:
        """Return the gradients of one micro-batch for these slots. The engine's stream waits for their producers."""
        facts = facts_of(sources, self._device.array_type, self._arena.owner)
        known = self._known.get(span)
        if facts is None or known is None or known.facts.form != facts.form:
            return self._checked(span, sources, facts)
        if not facts.pointers:  # NumPy arrays are used directly.
            return Contribution.of_fp32(span, [s if s.ndim == 1 else s.ravel() for s in sources])
        is_same, found = facts.pointers == known.facts.pointers, known.contribution
        if not is_same and not self._may_lie_there(facts.pointers, known):
            return self._checked(span, sources, facts)
        if self._device.name != "cpu":
            found = found.moved(facts.pointers)
        elif not is_same:
            found = Contribution.of(span, without_owners(found.views, facts.pointers))
        self._device.wait_for(found.producers)
        return found.passed(sources)

    def _may_lie_there(self, pointers: list[int], known: _Known) -> bool:
        """Return whether gradients of a known form can be at these addresses. False if they may be in the arena."""
        addresses, first = np.array(pointers, np.uint64), max(0, self._arena.pointer - known.most_bytes)
        is_apart = ((addresses <= first) | (addresses >= self._stop)).all()
        return bool(is_apart and addresses.all() and not (addresses % 4).any())

    def _checked(self, span: Span, sources: Sequence[Any], facts: Facts | None) -> Contribution:
        found = Contribution.of(span, self._views(span.slots, sources))
        self._known.pop(span, None)
        if facts is not None and (found.fp32 is not None if not facts.pointers else all(map(_is_plain, found.views))):
            views = without_owners(found.views, [0 if view is None else view.pointer for view in found.views])
            most_bytes = 4 * max(slot.size for slot in span.slots)
            self._known[span] = _Known(facts, Contribution.of(span, views), most_bytes)
        return found.passed(sources)

    def check(self, slot: Slot, source: Any) -> None:
        """Raise the `LayoutMismatch` or `BufferRefused` that `contribution` would raise for this gradient."""
        self._views((slot,), (source,))

    def _views(self, slots: Sequence[Slot], sources: Sequence[object]) -> list[Buffer | None]:
        views = matched_views(slots, sources, self._device.views)
        for slot, view in zip(slots, views, strict=True):
            if view is not None and view.overlaps(self._arena):
                raise BufferRefused(
                    f"the gradient for component '{slot.name}' is in this accumulator's own arena",
                    got=f"address {view.pointer:#x}",
                    expected="separate memory",
                    do="pass a copy (torch: zero_grad(set_to_none=True) before backward)",
                )
        return views


def _is_plain(view: Buffer | None) -> bool:
    """Return whether autograd does not track a tensor, so that it is no parameter in later calls either."""
    return view is None or view.writable
