"""A step's destinations: a caller's own arrays, checked, and cached for the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from gradengine.accumulate.gradients import matched_views
from gradengine.arrays.buffer import Buffer, refuse_overlapping_destinations
from gradengine.arrays.frameworks import note_written
from gradengine.arrays.host import without_owner
from gradengine.arrays.known import KnownArrays, destination_reader_of, reader_of
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import LayoutMismatch
from gradengine.kernels import Destinations, Device, producers_of
from gradengine.layout import Slot

_REMEMBERED = 4  # sets of arrays: a loop has one, or two in turn


@final
class KnownDestinations:
    """One accumulator's cache of checked destinations."""

    def __init__(self, slots: Sequence[Slot], device: Device, arena: Buffer) -> None:
        self._slots, self._device, self._arena = slots, device, arena
        self._known: list[tuple[KnownArrays, Destinations, frozenset[ProducerStream]]] = []

    def of(self, sources: Sequence[Any]) -> Destinations:
        """Return the destinations of arrays in slot order, checked before anything is written to any."""
        for arrays, destinations, producers in self._known:
            if arrays.are(sources):
                self._device.wait_for(producers)
                return destinations
        found = destinations_of(self._slots, self._device, self._arena, sources)
        self._remember(sources, found)
        return found

    def _remember(self, sources: Sequence[Any], found: Destinations) -> None:
        """Keep the views, but not the arrays; nothing of arrays whose export orders a stream's work."""
        self._known = [known for known in self._known if known[0].are_alive][1 - _REMEMBERED :]
        is_on_host = self._device.name == "cpu"
        reader = destination_reader_of(sources) if is_on_host else reader_of(sources)
        producers = producers_of(found.values())
        if reader is not None and None not in {producer.stream() for producer in producers}:
            views = {p: without_owner(view) if is_on_host else replace(view, owner=None) for p, view in found.items()}
            self._known.append((KnownArrays(sources, reader), Destinations(views), producers))


def destinations_of(
    slots: Sequence[Slot], device: Device, arena: Buffer, sources: Sequence[Any], where: str = "out"
) -> Destinations:
    """Where each component is handed back to, by position, checked before anything is written there."""
    views = matched_views(slots, sources, device.writable_views)
    found = Destinations({position: view for position, view in enumerate(views) if view is not None})
    if not found:
        raise LayoutMismatch(f"{where} has no destination", got=f"{len(slots)} times None", expected="at least one")
    refuse_overlapping_destinations({slots[position].name: view for position, view in found.items()}, arena)
    return found


def handed_back(slots: Sequence[Slot], sources: Sequence[Any]) -> Mapping[str, Any]:
    """Name -> the caller's own destination that was written; its framework is told of the change."""
    written = {slot.name: array for slot, array in zip(slots, sources, strict=True) if array is not None}
    note_written(written.values())
    return written
