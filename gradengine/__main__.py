"""`python -m gradengine` and the `gradengine` command."""

from __future__ import annotations

import errno
import sys

from gradengine.errors import CallerError, GradientError

_WANTED = {"typer": ("the command line", "cli"), "rich": ("the command line", "cli"), "matplotlib": ("a plot", "plot")}


_INTERRUPTED = 130  # as shells say it of Ctrl-C


def main() -> None:
    """Run the command line; what the user can mend is one line on stderr and no traceback.

    It exits with 2 where the command cannot be carried out as it was given, with 1 where it failed.
    """
    try:
        # Here, so that a package that is not installed can be named.
        from gradengine.cli import app  # noqa: PLC0415

        app()
    except ModuleNotFoundError as fault:
        package = (fault.name or "").partition(".")[0]
        if package not in _WANTED:
            raise
        what, extra = _WANTED[package]
        _end(2, f"{what} needs {package}, which is not installed: pip install 'gradengine[{extra}]'")
    except CallerError as fault:
        _end(2, str(fault))
    except GradientError as fault:
        _end(1, str(fault))
    except OSError as fault:
        if fault.errno not in {errno.ENOSPC, errno.EPIPE}:
            raise
        sys.stdout = None  # its flush at the end of the process would fail again
        _end(1, f"cannot write to stdout: {fault.strerror}")
    except KeyboardInterrupt:
        _end(_INTERRUPTED, "interrupted")
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # typer's, for a KeyboardInterrupt
            _end(_INTERRUPTED, "interrupted")
        raise


def _end(code: int, message: str) -> None:
    print(f"gradengine: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
