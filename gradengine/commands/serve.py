"""`gradengine serve`: sums for one group of workers, and shows who has joined, and what they send."""

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

_TERMINATED = 143  # as shells say it of SIGTERM


def serve(
    world_size: Annotated[int, typer.Option(min=1, help="Number of workers that will connect.")],
    host: Annotated[str, typer.Option(help="Address to listen at; beyond loopback a secret is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    unix: Annotated[Path | None, typer.Option(help="Listen at this Unix socket instead.")] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret; else $GRADENGINE_SECRET or the file $GRADENGINE_SECRET_FILE."),
    ] = None,
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
    after telling the workers. Says on stderr who joins and who is refused; on a terminal there is a table of workers.
    """
    if secret_file is not None:
        secret = secret_in(secret_file)
    else:  # not from an argument, which every user of the machine can read
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
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")  # above the table
            server.serve()
    typer.echo(f"all {world_size} workers have connected and left", err=True)


def _terminate(*_: object) -> NoReturn:
    """End as at Ctrl-C: workers are told, and a socket's file is removed."""
    raise SystemExit(_TERMINATED)


def table(server: GradientServer, world_size: int) -> Table | str:
    """The workers of the group that is served, and its step; a line while not all have joined."""
    workers, step = server.workers, server.step
    if step is None:
        return f"waiting for {world_size} workers"
    title = f"{world_size} workers, step {step}"
    shown = Table("rank", "host", "received", "sent", title=title, title_justify="left", box=SIMPLE_HEAD)
    for rank, host, received, sent in workers:
        shown.add_row(str(rank), host, decimal(received), decimal(sent))
    return shown
