"""The command line of `gradengine demo`, `bench`, `plan`, `serve` and `doctor`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from gradengine import __version__
from gradengine.bench.command import bench
from gradengine.commands.doctor import sections, show
from gradengine.commands.serve import serve
from gradengine.console.options import STDOUT, flag, print_or_save, writable_json
from gradengine.demo.command import demo
from gradengine.plan.command import plan

app = typer.Typer(
    help="Tools for the step between backward() and optimizer.step(), which accumulates, exchanges, checks and clips.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(plan)


@app.command()
def doctor(
    json: Annotated[Path | None, typer.Option(help="JSON file for the whole report (-: only to stdout).")] = None,
) -> None:
    """Show installed packages, usable devices, and the settings and transports of connect() on this machine.

    Run it like your script, for example `srun gradengine doctor` or `mpiexec -n 2 gradengine doctor`.
    """
    writable_json(json)
    found = sections() if json is None else list(sections())
    if json is not None:
        print_or_save(json_format.dumps(dict(found), indent=1), json)
    if json != STDOUT:
        show(found)


app.command()(serve)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _begin(wanted: Annotated[bool, flag("--version", "Print the version and exit.")] = False) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
