"""Cache of resolved gradient views: one accumulator's gradients, resolved once and known again as `KnownArrays`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gradengine.accumulate.gradients import matched_views
from gradengine.accumulate.uncleared import Uncleared, Versions
from gradengine.arrays.buffer import Buffer
from gradengine.arrays.host import without_owner
from gradengine.arrays.known import KnownArrays, Reader, read_cupy, read_each, read_numpy, reader_of
from gradengine.errors import BufferRefused
from gradengine.kernels import AddressCheck, Contribution, Device, SlotSet, as_of_now
from gradengine.layout import Slot

__all__ = ["Intake"]

_REMEMBERED = 16  # sets of arrays for each set of components: as many micro-batches may have buffers of their own
_PATIENCE = 8  # sets that went without having come again, after which no more are remembered


class Intake:
    """Cache of one accumulator's resolved gradients.

    Args:
        device: Where the gradients lie.
        arena: The accumulator's own memory, which no gradient may lie in.
        holds: Whether gradients are read later than they come, so that they may have moved by then.
        reused_buffers: Whether the caller writes each micro-batch into the same torch tensors.
    """

    def __init__(self, device: Device, arena: Buffer, *, holds: bool = False, reused_buffers: bool = False) -> None:
        self._device, self._arena, self._holds = device, arena, holds
        self._reused_buffers, self.uncleared = reused_buffers, Uncleared(device)
        self._known: dict[SlotSet, list[_Known]] = {}
        self._in_vain = 0

    def contribution(self, places: SlotSet, slots: Sequence[Slot], sources: Sequence[Any]) -> Contribution:
        """The gradients of one micro-batch for these slots, checked; what is queued next is behind their work."""
        known = self._known.setdefault(places, [])
        met = None
        for candidate in known:
            if candidate.arrays.are(sources):
                met = candidate
                break
        if met is None:
            looked_at = Contribution.of(places, self._views(slots, sources))
            met = self._remember(known, sources, looked_at)
            contribution = self._as_it_came(looked_at, sources)
        else:
            contribution = met.again(sources, holds=self._holds)
            if contribution.producers:
                self._device.wait_for(contribution.producers)
        if not self._reused_buffers and (met is None or met.arrays.reader is not read_numpy):
            versions = self.uncleared.refuse(places, slots, sources, None if met is None else met.versions)
            if met is not None:
                met.versions = versions
        return contribution

    def _as_it_came(self, contribution: Contribution, sources: Sequence[Any]) -> Contribution:
        """With its producers' streams of now, and where it lies now if it is read later."""
        if not (contribution.producers or self._holds):
            return contribution
        address_check = _check_of(reader_of(sources) or read_each, sources) if self._holds else None
        return dataclasses.replace(
            contribution, producers=as_of_now(contribution.producers), address_check=address_check
        )

    def _remember(self, known: list[_Known], sources: Sequence[Any], contribution: Contribution) -> _Known | None:
        """Unless this loop makes new arrays for each micro-batch: to remember them costs as much as to look at them."""
        self._in_vain += sum(not candidate.arrays.are_alive and not candidate.was_met for candidate in known)
        known[:] = [candidate for candidate in known if candidate.arrays.are_alive][-_REMEMBERED + 1 :]
        reader = reader_of(sources) if self._in_vain < _PATIENCE else None
        must_export = reader is read_cupy and contribution.producers  # another's that wraps one of CuPy's
        if reader is None or must_export:
            return None
        known.append(_Known(sources, contribution, reader))
        return known[-1]

    def _views(self, slots: Sequence[Slot], sources: Sequence[object]) -> list[Buffer | None]:
        views = matched_views(slots, sources, self._device.views)
        start, stop = self._arena.pointer, self._arena.pointer + self._arena.nbytes
        for slot, view in zip(slots, views, strict=True):
            if view is not None and view.pointer < stop and start < view.pointer + view.nbytes and view.size:
                raise _lies_in_arena(view, slot)
        return views


class _Known:
    """The contribution of arrays that came before; `was_met` once they have come again."""

    was_met = False
    versions: Versions | None = None

    def __init__(self, sources: Sequence[Any], contribution: Contribution, reader: Reader) -> None:
        self.arrays = KnownArrays(sources, reader)
        views = [None if view is None else without_owner(view) for view in contribution.views]
        self._contribution = dataclasses.replace(contribution, views=views)

    def again(self, sources: Sequence[Any], *, holds: bool) -> Contribution:
        """That of the same arrays come again, which are kept alive by it where it outlives the call."""
        self.was_met, found = True, self._contribution
        if not (holds or found.producers):
            return found
        kept = tuple(sources)
        check = _check_of(self.arrays.reader, kept) if holds else None
        again = Contribution(found.slots, found.views, as_of_now(found.producers), kept, check)
        again.addresses = found.addresses  # made once
        return again


def _check_of(reader: Reader, sources: Sequence[Any]) -> AddressCheck | None:
    """None for NumPy's arrays, from which nothing takes the memory while views of them are held."""
    return None if reader is read_numpy else AddressCheck(reader, tuple(sources), reader(sources))


def _lies_in_arena(view: Buffer, slot: Slot) -> BufferRefused:
    return BufferRefused(
        f"component '{slot.name}' lies in this accumulator's own arena",
        got=f"address {view.pointer:#x}",
        expected="memory of the caller's",
        do="give each gradient memory of its own; of torch, zero_grad(set_to_none=True) before the next backward",
    )
