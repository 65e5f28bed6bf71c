"""Helpers for the options of commands, with choices, files to write, plots, and the options' names in errors."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from gradengine.errors import CallerError

STDOUT = Path("-")


def flag(name: str, what: str) -> Any:
    """Return an option without a value, for which --help shows no `<bool>`."""
    return typer.Option(name, metavar="", help=what)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a callback for an option that accepts only these words. Other words end the command with code 2.

    >>> one_of("float32", "bfloat16")("float32")
    'float32'
    """

    def checked(word: str) -> str:
        if word not in choices:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(choices)}.")
        return word

    return checked


@contextlib.contextmanager
def speaking_of(options: Mapping[str, str]) -> Iterator[None]:
    """Return a context that renames arguments to the user's options in the text of a `CallerError`.

    >>> with speaking_of({"num_heads": "--heads", "tp_size": "--tp"}):
    ...     raise CallerError("num_heads cannot be divided by tp_size", got="4 / 3")
    Traceback (most recent call last):
    gradengine.errors.CallerError: --heads cannot be divided by --tp: got 4 / 3
    """
    try:
        yield
    except CallerError as fault:
        what = re.sub(r"\w+", lambda word: options.get(word[0], word[0]), fault.what)
        raise CallerError(what, got=fault.got, expected=fault.expected, do=fault.do) from None


def writable_json(path: Path | None) -> Path | None:
    """Make the file given by --json before the command runs, or raise `CallerError` if it cannot be written."""
    if path is not None and path != STDOUT:
        save(path, "--json", _touch)
    return path


def refuse_bad_plot(path: Path) -> None:
    """Make the file of --plot, or raise `CallerError` if it has an unknown suffix or cannot be written.

    Imports matplotlib.
    """
    kinds = importlib.import_module("matplotlib.figure").Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise CallerError(f"cannot plot to {str(path)!r}", got=repr(path.suffix), expected=f"one of {', '.join(kinds)}")
    save(path, "--plot", _touch)


def save(path: Path, option: str, write: Callable[[Path], object]) -> None:
    """Make a file's folder and write the file, or raise `CallerError` with the option if the system fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as fault:
        reason = fault.strerror or str(fault)
        raise CallerError(f"cannot write {str(path)!r}: {reason}", do=f"pass a different {option} FILE") from None


def print_or_save(text: str, path: Path | None) -> None:
    """Write JSON to the destination given by --json (none, stdout or a file). Raises as `save`."""
    if path == STDOUT:
        typer.echo(text)
    elif path is not None:
        save(path, "--json", lambda file: file.write_text(f"{text}\n", encoding="utf-8"))


def _touch(path: Path) -> None:
    """Open a file for writing, and make it if it does not exist, without changing its content."""
    path.open("ab").close()
