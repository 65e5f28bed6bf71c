"""`python -m gradengine` and the `gradengine` command."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from gradengine import __version__
from gradengine.commands.doctor import sections, show
from gradengine.errors import CallerError, GradientError

_EXTRAS = {"typer": "cli", "rich": "cli", "matplotlib": "plot"}  # package -> gradengine's extra that installs it
_HELP = """\
gradengine doctor     installed packages, usable devices, and what connect() would read and start
gradengine --version  the version

After pip install 'gradengine[cli]' also gradengine demo, bench, plan and serve.\
"""

_ENDED = {130: "interrupted", 143: "terminated"}  # the exit codes that shells use for SIGINT and SIGTERM


def main() -> None:
    """Run the command line. An error that the user can correct is one line on stderr, without a traceback.

    The exit code is 2 if the command is invalid as given, and 1 if it failed.
    """
    try:
        _run(sys.argv[1:])
    except ModuleNotFoundError as fault:
        package = _package(fault)
        if package not in _EXTRAS:
            raise
        _end(2, f"{package} is not installed: pip install 'gradengine[{_EXTRAS[package]}]'")
    except GradientError as fault:
        _end(2 if isinstance(fault, CallerError) else 1, str(fault))
    except OSError as fault:
        if fault.errno not in {errno.ENOSPC, errno.EPIPE}:
            raise
        sys.stdout = None  # the flush at the end of the process would fail again
        _end(1, f"cannot write to stdout: {fault.strerror}")
    except KeyboardInterrupt:
        _end(130, _ENDED[130])
    except SystemExit as end:
        if end.code in _ENDED:  # raised by typer for a KeyboardInterrupt, or after SIGTERM
            _end(end.code, _ENDED[end.code])
        raise


def _run(arguments: Sequence[str]) -> None:
    """Run the command line. If typer or rich is not installed, run only the commands that need neither."""
    try:
        from gradengine.commands.cli import app  # noqa: PLC0415  (it may need a package that is not installed)
    except ModuleNotFoundError as fault:
        if _package(fault) not in {"typer", "rich"}:
            raise
        match list(arguments):
            case ["doctor"]:
                show(sections())
            case ["--version"]:
                print(__version__)
            case [] | ["-h"] | ["--help"]:
                print(_HELP)
            case _:
                raise
    else:
        app()


def _package(fault: ModuleNotFoundError) -> str:
    return (fault.name or "").partition(".")[0]


def _end(code: int, message: str) -> None:
    print(f"gradengine: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
