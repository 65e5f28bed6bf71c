"""Torch gradients that were not cleared between micro-batches, told by autograd's count of changes in place.

Backward adds to a `.grad` that is there, and changes it once by that; clearing it in place is a change too. A gradient
that came before, was changed once since and is not zero holds the earlier micro-batches as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, final

from gradengine.arrays.frameworks import NonZero, fills_flat_buffer, is_torch, torch_versions
from gradengine.errors import BufferRefused
from gradengine.kernels import Device, SlotSet
from gradengine.layout import Slot

_MOST_MISSES = 8  # micro-batches in new storages, after which tensors are known again by themselves alone


@final
class Uncleared:
    """Refuses torch's gradients that come again and were not cleared; while a graph is recorded, none."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._latest: dict[SlotSet, Versions] = {}
        self._doubts: list[tuple[Sequence[Slot], NonZero]] = []  # on a GPU, while it works

    def refuse(
        self, slot_set: SlotSet, slots: Sequence[Slot], sources: Sequence[Any], of_this_set: Versions | None
    ) -> Versions | None:
        """The arrays' versions now, None where nothing is torch's; `BufferRefused` for a gradient that was not cleared.

        On a GPU the error comes at the first call behind its work. `of_this_set` is what was returned when these very
        arrays came before; None where they are not known again.
        """
        versions = torch_versions(sources)
        if versions.count(None) == len(versions):
            return None
        before = of_this_set or self._latest.get(slot_set)
        suspects: list[int] = []
        if before is not None and before.versions != versions:
            suspects = before.changed_once(versions, None if before is of_this_set else sources)
        if (suspects or self._doubts) and not self._device.is_capturing():
            self._refuse_answered()
            self._refuse_non_zero(slots, sources, suspects)
        now = of_this_set or Versions(sources, versions, before)
        now.versions = versions
        self._latest[slot_set] = now
        return now

    def refuse_late(self) -> None:
        """Raise `BufferRefused` for what a GPU was asked and nobody was told yet; waits for it."""
        for _, non_zero in self._doubts:
            non_zero.wait()
        self._refuse_answered()

    def note_written(self, arrays: Collection[Any], known: Iterable[Versions] = ()) -> None:
        """What a step handed back into these arrays is no change that backward made; nor of sets that are `known`."""
        for versions in {id(versions): versions for versions in (*self._latest.values(), *known)}.values():
            versions.look_again(arrays)

    def _refuse_answered(self) -> None:
        while self._doubts and self._doubts[0][1].is_known:
            slots, non_zero = self._doubts.pop(0)
            _refuse_first(slots, non_zero)

    def _refuse_non_zero(self, slots: Sequence[Slot], sources: Sequence[Any], suspects: Sequence[int]) -> None:
        """Zeros were cleared, and no backward reached them since."""
        # DDP's copy into a bucket of one parameter is one change too, where it was cleared.
        positions = [position for position in suspects if not fills_flat_buffer(sources[position])]
        if not positions:
            return
        doubted, non_zero = [slots[p] for p in positions], NonZero([sources[p] for p in positions])
        if non_zero.is_known:
            _refuse_first(doubted, non_zero)
        else:
            self._doubts.append((doubted, non_zero))


@final
class Versions:
    """How often torch tensors had been changed in place when they last came: their `versions`.

    A tensor is known again by its storage, too: `gradients_of` makes a new view each time of a channels_last gradient,
    and `detach()` does. A loop that makes new storages each time, as zero_grad() has backward do, soon pays for none of
    this. `before` are those that came before for the same targets.
    """

    def __init__(self, sources: Sequence[Any], versions: Sequence[int | None], before: Versions | None) -> None:
        self.versions = versions  # None for what is none of torch's, or not counted
        self._tensors = [None if v is None else weakref.ref(s) for s, v in zip(sources, versions, strict=True)]
        self._storages: list[Any] = []
        self._misses: int = 0 if before is None else before._misses
        if before is not None and before._storages:
            self._misses += next(filter(None, before._storages))() is None
        if self._misses < _MOST_MISSES:
            self._storages = [
                None if v is None else weakref.ref(s.untyped_storage()) for s, v in zip(sources, versions, strict=True)
            ]

    def changed_once(self, versions: Sequence[int | None], sources: Sequence[Any] | None) -> list[int]:
        """The positions of tensors that came before and changed once since, where none of them changed more often.

        Backward changes a gradient once, and clearing it changes it too: where one has changed twice, all were cleared.
        `sources` are compared with those before; None where they are known to be the same.
        """
        changes = {
            position: now - then
            for position, (then, now) in enumerate(zip(self.versions, versions, strict=True))
            if then is not None and now is not None and then < now
        }
        if sources is not None:
            changes = {position: n for position, n in changes.items() if self._is_again(position, sources[position])}
        return list(changes) if max(changes.values(), default=0) == 1 else []

    def look_again(self, written: Collection[Any]) -> None:
        """A step wrote into these arrays, which may be the tensors, or other views of their storages."""
        now = torch_versions([None if tensor is None else tensor() for tensor in self._tensors])
        if None in now and self._storages:
            counts = {id(array.untyped_storage()): array._version for array in written if _is_counted(array)}
            now = [
                counts.get(id(storage()), then) if version is None and storage is not None else version
                for version, then, storage in zip(now, self.versions, self._storages, strict=True)
            ]
        self.versions = now

    def _is_again(self, position: int, tensor: Any) -> bool:
        came = self._tensors[position]
        if came is not None and came() is tensor:
            return True
        storage = self._storages[position] if self._storages else None
        return storage is not None and storage() is tensor.untyped_storage()


def _is_counted(array: Any) -> bool:
    return is_torch(array) and not array.is_inference()


def _refuse_first(slots: Sequence[Slot], non_zero: NonZero) -> None:
    for slot, is_non_zero in zip(slots, non_zero.answers(), strict=True):
        if is_non_zero:
            raise BufferRefused(
                f"component '{slot.name}' was not cleared since an earlier micro-batch",
                got="the same torch tensor, changed once in place: backward adds to a .grad that is there",
                expected="the gradient of one micro-batch alone",
                do="discard() the window and call zero_grad() before each backward; or, where you write each gradient "
                "into this tensor yourself, build the engine with reused_buffers=True",
            )
