"""Groups of components that are added in one pass, though backward makes their gradients one by one.

A group is a block. Blocks and other components that are small are joined to those before them, so that a model of many
small tensors takes few passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from gradengine.layout import GradientLayout, Span

JOINED = 1 << 20  # elements, up to which spans are joined: 4 MiB of fp32


@final
class Group:
    """Components that are added in one pass: those of one span, or of several small ones in a row."""

    def __init__(self, spans: Sequence[Span]) -> None:
        slots = sorted([slot for span in spans for slot in span.slots], key=lambda slot: slot.position)
        self.span = spans[0] if len(spans) == 1 else Span.of(slots, "a group")
        self.count = len(slots)


@final
class Groups:
    """All groups of a layout.

    Attributes:
        all: Each group, in the order in which backward completes them.
        places: Component name -> its group, its position in the group, and its elements.
        most: Elements that may be noted before they are added: those of the largest group of several components.
    """

    def __init__(self, layout: GradientLayout) -> None:
        self.all = [Group(spans) for spans in _joined(layout.spans)]
        self.places = {s.name: (group, i, s.size) for group in self.all for i, s in enumerate(group.span.slots)}
        several = [sum(slot.size for slot in group.span.slots) for group in self.all if len(group.span.slots) > 1]
        self.most = max(JOINED, *several) if several else JOINED


@final
class Noted:
    """Gradients of one micro-batch that were noted, in the order that backward made them, and are not added yet."""

    __slots__ = ("_elements", "_gradients", "_missing", "_most", "_places")

    def __init__(self, groups: Groups) -> None:
        self._places, self._most = groups.places, groups.most
        self._missing: dict[Group, int] = {}  # components of a group that have no gradient yet
        self._clear()

    def _clear(self) -> None:
        self._gradients: list[tuple[Group, int, object]] = []
        self._elements = 0

    def note(self, name: str, gradient: object) -> bool:
        """Note a gradient; returns whether to add what is noted. `KeyError` for an unknown component."""
        group, column, size = self._places[name]
        self._gradients.append((group, column, gradient))
        self._elements += size
        self._missing[group] = missing = self._missing.get(group, group.count) - 1
        return missing <= 0 or self._elements > self._most

    def complete(self, name: str) -> bool:
        """Count a component that needs no gradient; returns whether to add what is noted."""
        group, *_ = self._places[name]
        self._missing[group] = missing = self._missing.get(group, group.count) - 1
        return missing <= 0 and bool(self._gradients)

    def taken(self) -> Iterator[tuple[Group, list[object]]]:
        """Take what was noted: groups with their gradients in order, None for components without one.

        A component that was noted twice is in two of them, so that its gradients add up in order.
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
    """The spans in runs: each alone, or several of `JOINED` elements at most."""
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
