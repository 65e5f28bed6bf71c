"""The command line: `gradengine demo`, `bench`, `plan`, `serve`, `env` and `doctor`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gradengine.bench.command import bench
from gradengine.demo.command import demo
from gradengine.doctor import doctor, show_version
from gradengine.env import env
from gradengine.exchange import GradientServer
from gradengine.exchange.environment import read_token, token_in
from gradengine.options import flag
from gradengine.plan.command import plan

_TERMINATED = 143  # as shells say it of SIGTERM

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
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _begin(wanted: Annotated[bool, flag("--version", "Print the version and end.")] = False) -> None:
    if wanted:
        show_version()
        raise typer.Exit


@app.command()
def serve(
    world_size: Annotated[int, typer.Option(min=1, help="Number of workers that will connect.")],
    host: Annotated[str, typer.Option(help="Address to listen at; beyond loopback a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    unix: Annotated[Path | None, typer.Option(help="Listen at this Unix socket instead.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token; else $GRADENGINE_TOKEN.")] = None,
    tls: Annotated[
        Path | None, typer.Option(help="Folder with ca.crt, tls.crt, tls.key; else $GRADENGINE_TLS.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Name of the run; by default the first rank's.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without any progress before the exchange fails.")] = 300.0,
    join_timeout: Annotated[float, typer.Option(help="Seconds in which all workers have to connect.")] = 60.0,
) -> None:
    """Serve one group of workers: sum their gradients, until all have connected and left.

    Prints the url for `gradengine.connect(url, ..., served=True)` on a line by itself. Every rank connects, rank 0 too.
    Exits with 0 if all workers said that they left, with 1 if one was lost or did not connect, and with 143 at SIGTERM,
    after telling the workers.
    """
    address = (host, port) if unix is None else str(unix.absolute())
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with GradientServer(
            world_size,
            address,
            token=_token(token_file),
            job=job,
            timeout=timeout,
            join_timeout=join_timeout,
            tls=tls,
        ) as server:
            typer.echo(server.url)
            server.serve()
    finally:
        signal.signal(signal.SIGTERM, before)
    typer.echo(f"all {world_size} workers have connected and left", err=True)


def _terminate(*_: object) -> NoReturn:
    """End as at Ctrl-C: workers are told, and a socket's file is removed."""
    raise SystemExit(_TERMINATED)


def _token(path: Path | None) -> str | None:
    """The group's secret, from a file or the environment, since every user of the machine can read arguments."""
    if path is not None:
        return token_in(path)
    found = read_token(os.environ)
    return found.value if found else None
