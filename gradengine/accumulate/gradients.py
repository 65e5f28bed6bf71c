"""The matching of a caller's gradients and destinations with their slots, by name, order and shape."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, final

from gradengine.arguments import said
from gradengine.arrays.buffer import Buffer, refuse_other_shape
from gradengine.errors import LayoutMismatch
from gradengine.layout import Slot
from gradengine.layout.components import is_nested, named_components
from gradengine.layout.slots import Order, refuse_other_order

Gradients: TypeAlias = Mapping[str, object] | Sequence[object]
_ORDER_OF = operator.attrgetter("order")


@final
class NamedArrays(dict[str, Any]):
    """Arrays by component name, with the order in memory of those that are not contiguous.

    A layout must have the same orders. A pickle or a copy is a plain dict.

    >>> import copy
    >>> copy.deepcopy(NamedArrays({"w": np.zeros(2)}))
    {'w': array([0., 0.])}
    """

    def __init__(self, arrays: Mapping[str, Any], orders: Mapping[str, Order] | None = None) -> None:
        super().__init__(arrays)
        self.orders = orders or {}

    def __setitem__(self, name: str, array: object) -> NoReturn:
        """Refuse to replace an array, because that would not write to the memory of the view."""
        raise TypeError(f"'{name}' cannot be replaced; write its values with arrays['{name}'][...] = values")

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def in_slot_order(slots: Sequence[Slot], gradients: Gradients, where: str, prefix: str = "") -> Sequence[object]:
    """Return the gradients in the order of `slots`, each once. Raise `LayoutMismatch` if one is missing or unknown.

    `gradients` is a mapping by full name, or by name without `prefix` ("layers.0."), or a sequence in order. Either can
    be nested, as in a layout. `where` is the text for errors that names the purpose of the gradients.
    """
    if isinstance(gradients, NamedArrays) and (gradients.orders or any(map(_ORDER_OF, slots))):
        for slot in slots:
            name = slot.name if slot.name in gradients else slot.name.removeprefix(prefix)
            refuse_other_order(slot.name, gradients.orders.get(name), slot.order)
    # This check is first, because a check against an abstract class takes ten times as long.
    if not isinstance(gradients, (list, tuple)):
        if isinstance(gradients, Mapping):
            return _from_mapping(slots, gradients, where, prefix)
        if isinstance(gradients, (str, bytes)) or not isinstance(gradients, Sequence):
            raise LayoutMismatch(
                f"gradients of {where} are neither a mapping nor a sequence",
                got=type(gradients).__name__,
                do="pass a dict by component name, or a list in layout order",
            )
    if len(gradients) != len(slots) or is_nested(gradients[0]):
        gradients = [gradient for _, gradient in named_components(gradients)]
    if len(gradients) != len(slots):
        raise LayoutMismatch(
            f"wrong number of gradients for {where}",
            got=len(gradients),
            expected=f"{len(slots)}: {_named(slots)}",
        )
    return gradients


def _from_mapping(slots: Sequence[Slot], gradients: Mapping[str, object], where: str, prefix: str) -> list[object]:
    names = [slot.name for slot in slots]
    if len(gradients) == len(slots) and all(map(gradients.__contains__, names)):
        return [*map(gradients.__getitem__, names)]  # 0.1 us per component, compared with 0.8 us below
    full = {slot.name for slot in slots}
    short = {name: name.removeprefix(prefix) for name in full}
    # A short name that is also a full name is ambiguous, such as "0.w" with "0.0.w" in block "0".
    names = [s.name if s.name in gradients or short[s.name] in full else short[s.name] for s in slots]
    missing = [name for name in names if name not in gradients]
    if missing and any(map(is_nested, gradients.values())):
        return _from_mapping(slots, _flat(gradients, where), where, prefix)
    if missing:
        raise LayoutMismatch(
            f"gradients of {where} lack component '{missing[0]}'{and_more(missing)}",
            got=f"{len(gradients)} components",
            expected=f"{len(slots)}: {_named(slots)}",
            do="pass None for a component without a gradient",
        )
    known = set(names)
    unknown = [name for name in gradients if name not in known]
    if unknown:
        raise LayoutMismatch(
            f"{where} has no component {said(unknown[0])}{and_more(unknown)}", expected=f"{len(slots)}: {_named(slots)}"
        )
    return [gradients[name] for name in names]


def _flat(gradients: Mapping[str, object], where: str) -> dict[str, object]:
    pairs = named_components(gradients)
    flat = dict(pairs)
    if len(flat) < len(pairs):
        raise LayoutMismatch(f"two gradients of {where} have one name", do="rename one; dots join the parts of a name")
    return flat


def matched_views(
    slots: Sequence[Slot], sources: Sequence[object], resolve: Callable[[Sequence[object], Sequence[str]], list[Buffer]]
) -> list[Buffer | None]:
    """Return each slot's source as a buffer in the slot's shape or flat, or None if there is no source."""
    given = [(slot, source) for slot, source in zip(slots, sources, strict=True) if source is not None]
    found = resolve([source for _, source in given], [slot.name for slot, _ in given])
    for (slot, _), view in zip(given, found, strict=True):
        if view.shape != slot.shape:
            refuse_other_shape(slot.name, view.shape, slot.shape)
    remaining = iter(found)
    return [None if source is None else next(remaining) for source in sources]


def _named(slots: Sequence[Slot], limit: int = 9) -> str:
    return ", ".join(slot.name for slot in slots[:limit]) + (", ..." if len(slots) > limit else "")


def and_more(items: Sequence[object]) -> str:
    """Return the text after the first of several items in an error, such as " (and 2 more)", or an empty text."""
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
