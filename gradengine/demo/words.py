"""Numbers with their nouns, as the demo says them."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """The number and its noun, which gets an s unless there is one.

    Example:
        >>> counted(1, "step"), counted(2, "micro-batch"), counted(60, "step")
        ('1 step', '2 micro-batches', '60 steps')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
