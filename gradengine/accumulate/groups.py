"""Groups of components that are added in one pass, although backward makes their gradients one by one.

A group is a block. Small blocks and other small components are joined to those before them, so that a model of many
small tensors takes few passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from gradengine.layout import GradientLayout, Span

JOINED = 1 << 20  # most elements of joined spans (4 MiB of fp32)


@final
class Group:
    """Components of one span, or of several small spans in a row, that are added in one pass."""

    def __init__(self, spans: Sequence[Span]) -> None:
        slots = sorted([slot for span in spans for slot in span.slots], key=lambda slot: slot.position)
        self.span = spans[0] if len(spans) == 1 else Span.of(slots, "a group")
        self.count = len(slots)


@final
class Groups:
    """All groups of a layout.

    Attributes:
        all: All groups, in the order in which backward completes them.
        places: Component name -> its group, its position in the group, and its number of elements.
        most: Number of elements that can be noted before they are added, which the largest group of several components
            determines.
    """

    def __init__(self, layout: GradientLayout) -> None:
        self.all = [Group(spans) for spans in _joined(layout.spans)]
        self.places = {s.name: (group, i, s.size) for group in self.all for i, s in enumerate(group.span.slots)}
        several = [sum(slot.size for slot in group.span.slots) for group in self.all if len(group.span.slots) > 1]
        self.most = max(JOINED, *several) if several else JOINED


@final
class Noted:
    """The noted gradients of one micro-batch, which are not added yet, in the order in which backward made them."""

    __slots__ = ("_elements", "_gradients", "_missing", "_most", "_places")

    def __init__(self, groups: Groups) -> None:
        self._places, self._most = groups.places, groups.most
        self._missing: dict[Group, int] = {}  # group -> number of its components without a gradient
        self._clear()

    def _clear(self) -> None:
        self._gradients: list[tuple[Group, int, object]] = []
        self._elements = 0

    def note(self, name: str, gradient: object) -> bool:
        """Note a gradient and return whether to add all noted ones. Raise `KeyError` for an unknown component."""
        group, column, size = self._places[name]
        self._gradients.append((group, column, gradient))
        self._elements += size
        self._missing[group] = missing = self._missing.get(group, group.count) - 1
        return missing <= 0 or self._elements > self._most

    def complete(self, name: str) -> bool:
        """Count a component that needs no gradient. Return whether to add all noted gradients."""
        group, *_ = self._places[name]
        self._missing[group] = missing = self._missing.get(group, group.count) - 1
        return missing <= 0 and bool(self._gradients)

    def taken(self) -> Iterator[tuple[Group, list[object]]]:
        """Remove and yield the noted gradients as groups with gradients in order, and None for missing gradients.

        A component that was noted twice is in two of these groups, so that its gradients are summed in order.
        """
        gradients = self._gradients
        self._clear()
        begun: dict[Group, list[object]] = {}
        for group, column, gradient in gradients:
            row = begun.get(group)
            if row is not None and row[column] is not None:
                yield group, row
                row = None
            if row is None:
                row = begun[group] = [None] * len(group.span.slots)
            row[column] = gradient
        yield from begun.items()


def _joined(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans in runs of one span, or of several with at most `JOINED` elements."""
    runs: list[list[Span]] = []
    size = JOINED
    for span in spans:
        elements = sum(slot.size for slot in span.slots)
        size += elements
        if size > JOINED or not runs:
            runs.append([])
            size = elements
        runs[-1].append(span)
    return runs
