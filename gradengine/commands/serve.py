"""`gradengine serve`, which sums for one group of workers, and shows the workers and their traffic."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from gradengine.exchange import GradientServer
from gradengine.exchange.launchers import read_secret, secret_in

_TERMINATED = 143  # exit status of a process that SIGTERM ended, as in shells


def serve(
    world_size: Annotated[int, typer.Option(min=1, help="Number of workers of the group.")],
    host: Annotated[str, typer.Option(help="Address to listen at. All but loopback need a secret.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at. 0 is any free port.")] = 0,
    unix: Annotated[Path | None, typer.Option(help="Unix socket to listen at, in place of host and port.")] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret. Default is $GRADENGINE_SECRET or the file $GRADENGINE_SECRET_FILE."),
    ] = None,
    tls: Annotated[
        Path | None, typer.Option(help="Folder with ca.crt, tls.crt, tls.key (default: $GRADENGINE_TLS).")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Name of the run (default: the first rank's).")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without any progress before the exchange fails.")] = 300.0,
    join_timeout: Annotated[float, typer.Option(help="Seconds in which all workers must connect.")] = 60.0,
) -> None:
    """Sum the gradients of one group of workers until all have connected and left.

    Print the URL for `gradengine.connect(url, ..., served=True)` on a separate line. Every rank connects, rank 0 too.

    The exit status is 0 if all workers left normally, and 1 if one was lost or did not connect.
    After SIGTERM the server notifies the workers and exits with 143.

    Workers that join or are rejected are logged to stderr. A terminal also shows a table of workers.
    """
    if secret_file is not None:
        secret = secret_in(secret_file)
    else:  # no option takes the secret itself, because every user of the machine can read arguments
        secret, _ = read_secret(os.environ)
    address = (host, port) if unix is None else str(unix.absolute())
    with GradientServer(
        world_size, address, secret=secret, job=job, timeout=timeout, join_timeout=join_timeout, tls=tls
    ) as server:  # fmt: skip
        signal.signal(signal.SIGTERM, _terminate)
        console = Console(stderr=True)
        typer.echo(server.url)
        shown = partial(table, server, world_size)
        live = Live(get_renderable=shown, console=console, refresh_per_second=2, transient=True)
        with live if console.is_terminal else contextlib.nullcontext():
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")  # printed above the table
            server.serve()
    typer.echo(f"all {world_size} workers have connected and left", err=True)


def _terminate(*_: object) -> NoReturn:
    """Exit as after Ctrl-C, so that the server notifies the workers and removes a socket's file."""
    raise SystemExit(_TERMINATED)


def table(server: GradientServer, world_size: int) -> Table | str:
    """Return a table of the group's workers and its step, or a line of text before all have joined."""
    workers, step = server.workers, server.step
    if step is None:
        return f"waiting for {world_size} workers"
    title = f"{world_size} workers, step {step}"
    shown = Table("rank", "host", "received", "sent", title=title, title_justify="left", box=SIMPLE_HEAD)
    for rank, host, received, sent in workers:
        shown.add_row(str(rank), host, decimal(received), decimal(sent))
    return shown
