"""Destinations of a step in the caller's memory, checked before anything is written there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradengine.accumulate.gradients import Gradients, in_slot_order, matched_views
from gradengine.arrays.buffer import Buffer, refuse_overlapping_destinations
from gradengine.errors import LayoutMismatch
from gradengine.kernels import Device
from gradengine.layout import Slot

__all__ = ["destinations_of", "handed_back"]


def destinations_of(
    slots: Sequence[Slot], device: Device, arena: Buffer, out: Gradients, where: str = "out", prefix: str = ""
) -> dict[int, Buffer]:
    """Where each component is handed back to, by position, checked before anything is written there."""
    views = matched_views(slots, in_slot_order(slots, out, where, prefix), device.writable_views)
    found = {position: view for position, view in enumerate(views) if view is not None}
    if not found:
        raise LayoutMismatch(f"{where} names no destination at all", got=f"{len(slots)} times None", expected="one")
    refuse_overlapping_destinations({slots[position].name: view for position, view in found.items()}, arena)
    return found


def handed_back(slots: Sequence[Slot], out: Gradients) -> Mapping[str, Any]:
    """Name -> what was written, of the caller's own destinations."""
    arrays = zip(slots, in_slot_order(slots, out, "out"), strict=True)
    return {slot.name: array for slot, array in arrays if array is not None}
