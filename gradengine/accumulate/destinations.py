"""Where a step hands a window back to: a caller's own arrays, checked, and known again when they come again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from gradengine.accumulate.gradients import Gradients, in_slot_order, matched_views
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
    """One accumulator's destinations."""

    def __init__(self, slots: Sequence[Slot], device: Device, arena: Buffer) -> None:
        self._slots, self._device, self._arena = slots, device, arena
        self._known: list[tuple[KnownArrays, Destinations, frozenset[ProducerStream]]] = []

    def of(self, out: Gradients) -> Destinations:
        """Where each component is handed back to, by position, checked before anything is written there."""
        sources = in_slot_order(self._slots, out, "out")
        for arrays, destinations, producers in self._known:
            if arrays.are(sources):
                self._device.wait_for(producers)
                return destinations
        found = destinations_of(self._slots, self._device, self._arena, sources)
        self._remember(sources, found)
        return found

    def _remember(self, sources: Sequence[Any], found: Destinations) -> None:
        """Keep the views, but not the arrays; of those whose export orders a stream's work, nothing."""
        self._known = [known for known in self._known if known[0].are_alive][1 - _REMEMBERED :]
        is_on_host = self._device.name == "cpu"
        reader = destination_reader_of(sources) if is_on_host else reader_of(sources)
        producers = producers_of(found.values())
        if reader is not None and None not in {producer.stream() for producer in producers}:
            views = {p: without_owner(view) if is_on_host else replace(view, owner=None) for p, view in found.items()}
            self._known.append((KnownArrays(sources, reader), Destinations(views), producers))


def destinations_of(
    slots: Sequence[Slot], device: Device, arena: Buffer, out: Gradients, where: str = "out", prefix: str = ""
) -> Destinations:
    """Where each component is handed back to, by position, checked before anything is written there."""
    views = matched_views(slots, in_slot_order(slots, out, where, prefix), device.writable_views)
    found = Destinations({position: view for position, view in enumerate(views) if view is not None})
    if not found:
        raise LayoutMismatch(f"{where} names no destination at all", got=f"{len(slots)} times None", expected="one")
    refuse_overlapping_destinations({slots[position].name: view for position, view in found.items()}, arena)
    return found


def handed_back(slots: Sequence[Slot], out: Gradients) -> Mapping[str, Any]:
    """Name -> what was written, of the caller's own destinations, whose frameworks are told."""
    arrays = zip(slots, in_slot_order(slots, out, "out"), strict=True)
    written = {slot.name: array for slot, array in arrays if array is not None}
    note_written(written.values())
    return written
