"""The destinations of a step, which are a caller's arrays. They are checked once and cached for later steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from gradengine.accumulate.gradients import matched_views
from gradengine.arrays.buffer import Buffer, refuse_overlapping_destinations
from gradengine.arrays.frameworks import note_written
from gradengine.arrays.known import KnownArrays, facts_of
from gradengine.errors import LayoutMismatch
from gradengine.kernels import Destinations, Device
from gradengine.layout import Slot

_REMEMBERED = 4  # sets of arrays; a loop has one, or two in turn


@final
class KnownDestinations:
    """One accumulator's cache of checked destinations."""

    def __init__(self, slots: Sequence[Slot], device: Device, arena: Buffer) -> None:
        self._slots, self._device, self._arena = slots, device, arena
        self._known: KnownArrays[Destinations] = KnownArrays(_REMEMBERED)

    def of(self, sources: Sequence[Any]) -> Destinations:
        """Return the destinations of arrays in slot order. All are checked before any is written to."""
        facts = facts_of(sources, self._device.array_type, written=True)
        found = self._known.of(
            facts,
            lambda: matched_views(self._slots, sources, self._device.writable_views),
            lambda views: _checked(self._slots, views, self._arena, "out"),
        )
        self._device.wait_for(found.producers)
        return found


def destinations_of(
    slots: Sequence[Slot], device: Device, arena: Buffer, sources: Sequence[Any], where: str = "out"
) -> Destinations:
    """Return each component's destination by position. All are checked before any is written to."""
    return _checked(slots, matched_views(slots, sources, device.writable_views), arena, where)


def _checked(slots: Sequence[Slot], views: Sequence[Buffer | None], arena: Buffer, where: str) -> Destinations:
    found = Destinations({position: view for position, view in enumerate(views) if view is not None})
    if not found:
        raise LayoutMismatch(f"{where} has no destination", got=f"{len(slots)} times None", expected="at least one")
    refuse_overlapping_destinations({slots[position].name: view for position, view in found.items()}, arena)
    return found


def handed_back(slots: Sequence[Slot], sources: Sequence[Any]) -> Mapping[str, Any]:
    """Return name -> the caller's array that was written, after notifying its framework of the change."""
    written = {slot.name: array for slot, array in zip(slots, sources, strict=True) if array is not None}
    note_written(written.values())
    return written
