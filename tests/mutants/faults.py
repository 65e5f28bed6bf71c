"""The list of faults, and one of them in a copy of the project."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Fault:
    """A fault of the product.

    Attributes:
        file: The file, from the project's root.
        was: A text that the file holds once.
        now: The text in its place.
        tests: Names or patterns of the test files that should see it, the likeliest first.
        why: What the fault does, in a few words. With the file it names the fault.
    """

    file: str
    was: str
    now: str
    tests: tuple[str, ...]
    why: str

    @property
    def name(self) -> str:
        """A line that names it."""
        return f"{self.file}: {self.why}"

    @property
    def room(self) -> str:
        """The package it is in."""
        return "/".join(Path(self.file).parts[1:-1]) or Path(self.file).stem

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """Within it, the copy of the project at `root` has the fault."""
        file = root / self.file
        sound = file.read_text(encoding="utf-8")
        file.write_text(self.changed(sound), encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(sound, encoding="utf-8")

    def changed(self, text: str) -> str:
        """The file's text with the fault; ValueError if the text is not in it exactly once."""
        if text.count(self.was) != 1:
            raise ValueError(f"{self.name}: its text stands {text.count(self.was)} times in the file, expected once")
        return text.replace(self.was, self.now)


def faults() -> list[Fault]:
    """The list, as it is recorded."""
    entries = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def known_to_live() -> set[str]:
    """The names of the faults that no test sees."""
    return set((HERE / "lived.txt").read_text(encoding="utf-8").splitlines())
