"""The facts that decide whether arrays are accepted, and a cache of results for arrays with the same facts.

Arrays are checked one by one if their facts are new. Arrays with a form that was checked need no second check, even if
they are different objects. An array that is passed exists, so no other array has its address. Arrays by DLPack and by
CUDA array interfaces have no facts. They are checked in each call, since only their export orders their work before the
engine's work.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar, final

import numpy as np

from gradengine.arrays.buffer import Buffer, RawBuffer
from gradengine.arrays.frameworks import torch_kinds
from gradengine.arrays.host import without_owners

Made = TypeVar("Made")
_base, _dtype, _shape, _is_dense = map(attrgetter, ("base", "dtype", "shape", "flags.c_contiguous"))
_cupy_form = attrgetter("dtype", "shape", "strides", "data.device_id")
# The form of a pointer includes its address, since only a check finds out which memory is there.
_raw_form = attrgetter("pointer", "size", "dtype", "device", "writable", "stream")


class Facts(NamedTuple):
    """All that decides whether arrays are accepted."""

    form: list[Any]  # dtype, shape and so on of each array, and which of them are None
    pointers: list[int]  # address of each array (0 for None), empty if NumPy arrays are only read


@final
class KnownArrays(Generic[Made]):
    """The results made from destination arrays in earlier calls, for arrays with the same facts.

    No array is kept alive. At most `most` sets of arrays are remembered.
    """

    def __init__(self, most: int) -> None:
        self._known: deque[tuple[Facts, list[Buffer | None], Made]] = deque(maxlen=most)

    def of(
        self, facts: Facts | None, resolve: Callable[[], Sequence[Any]], make: Callable[[Sequence[Any]], Made]
    ) -> Made:
        """Return the result of `make` for arrays with these facts. `resolve` checks the arrays if their form is new.

        Nothing is remembered for arrays without facts, or with an unknown stream, since their owners must be kept.
        """
        for known, _, made in self._known:
            if known == facts:
                return made
        moved = self._moved(facts)
        views = resolve() if moved is None else moved
        streams = {view.producer for view in views if view is not None and view.producer is not None}
        if facts is None or any(stream.stream() is None for stream in streams):
            return make(views)
        kept = without_owners(views, [0 if view is None else view.pointer for view in views])
        made = make(kept)
        self._known.append((facts, kept, made))
        return made

    def _moved(self, facts: Facts | None) -> list[Any] | None:
        """Return views of arrays whose form is known, at any address, or None if they must be checked."""
        if facts is not None:
            for known, views, _ in self._known:
                if known.form == facts.form:
                    return views_at(views, facts.pointers)
        return None


def facts_of(sources: Sequence[Any], own: type, ours: object = None, *, written: bool = False) -> Facts | None:
    """Return the facts of arrays of one kind, or None if each must be checked in every call.

    Args:
        sources: Arrays, or None.
        own: The device's class of arrays, numpy.ndarray or cupy.ndarray.
        ours: The owner of gradengine's memory on the host. Views of that memory have no facts.
        written: Whether the arrays will be written to.
    """
    kinds = set(map(type, sources))
    is_full = NoneType not in kinds
    kinds.discard(NoneType)
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind is np.ndarray:
        return _of_written_numpy(sources) if written else _of_numpy(sources, ours) if is_full else None
    if kind in torch_kinds():
        return _of_torch(sources)
    if kind is RawBuffer:
        return Facts(_each(_raw_form, sources), [0 if s is None else s.pointer for s in sources])
    if kind is own:
        return Facts(_each(_cupy_form, sources), [0 if s is None else s.data.ptr for s in sources])
    return None


def _each(form: Callable[[Any], Any], sources: Sequence[Any]) -> list[Any]:
    return [None if source is None else form(source) for source in sources]


def _of_numpy(sources: Sequence[Any], ours: object) -> Facts | None:
    """Return the facts of arrays that are only read, or None for views of `ours` or of memory that no array owns."""
    if set(map(type, map(_base, sources))) != {NoneType}:
        for base in map(_base, sources):
            if base is not None and (type(base) is not np.ndarray or base.base is not None or base is ours):
                return None
    return Facts(_numpy_form(sources), [])


def _of_written_numpy(sources: Sequence[Any]) -> Facts | None:
    """Return the facts of arrays that are written to, or None if one is read-only or empty."""
    try:
        pointers = [0 if s is None else ctypes.addressof(ctypes.c_char.from_buffer(s)) for s in sources]
    except (TypeError, ValueError):
        return None
    return Facts([list(map(type, sources)), *_numpy_form([s for s in sources if s is not None])], pointers)


def _numpy_form(arrays: Sequence[Any]) -> list[Any]:
    # A list for each attribute takes half the time of a tuple for each array.
    return [list(map(_dtype, arrays)), list(map(_shape, arrays)), list(map(_is_dense, arrays))]


def _of_torch(sources: Sequence[Any]) -> Facts | None:
    try:
        form = [
            t if t is None else (t.dtype, t.shape, t.device, t.is_contiguous(), t.is_neg(), t.requires_grad)
            for t in sources
        ]
        return Facts(form, [0 if t is None else t.data_ptr() for t in sources])
    except RuntimeError:  # The check reports a tensor that is sparse or has no storage.
        return None


def views_at(views: Sequence[Buffer | None], pointers: Sequence[int]) -> list[Buffer | None] | None:
    """Return views like these at different addresses, without owners, or None if an address must be checked."""
    given = [pointer for view, pointer in zip(views, pointers, strict=True) if view is not None]
    if not all(given) or any(pointer % 4 for pointer in given):
        return None
    return without_owners(views, pointers)
