"""The command line: `gradengine demo`, `bench`, `plan`, `serve`, `env` and `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from gradengine.bench.command import bench
from gradengine.commands.doctor import doctor, show_version
from gradengine.commands.env import env
from gradengine.commands.serve import serve
from gradengine.console.options import flag
from gradengine.demo.command import demo
from gradengine.plan.command import plan

app = typer.Typer(
    help="The step between backward() and optimizer.step(): accumulate, exchange, check, clip, hand back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(plan)
app.command()(doctor)
app.command()(env)
app.command()(serve)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _begin(wanted: Annotated[bool, flag("--version", "Print the version and end.")] = False) -> None:
    if wanted:
        show_version()
        raise typer.Exit
