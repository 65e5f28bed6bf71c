"""`gradengine env`: what `connect()` reads from the environment, and from which variables; nothing is opened.

It also shows the other ways to connect ranks here.
"""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from gradengine.commands.doctor import engines
from gradengine.console.options import STDOUT, print_or_save, writable_json
from gradengine.exchange.environment import World, not_taken, read_job, read_token, read_world
from gradengine.exchange.rendezvous import read_address, refuse_without_token
from gradengine.exchange.tls import VARIABLE, certificates_of

__all__ = ["env"]

Facts: TypeAlias = "dict[str, tuple[int | str | None, str]]"  # by name: value, and the variables that it is from


def env(
    json: Annotated[Path | None, typer.Option(help="Write everything to a file; -: to stdout, and no table.")] = None,
) -> None:
    """Show what connect() reads from the environment, and from which variables: rank, world size, address, token, job.

    Run it as the script is run: `srun gradengine env`, `mpiexec -n 2 gradengine env`, or after torchrun --no-python.
    """
    writable_json(json)
    facts, lost = _facts(os.environ), not_taken(os.environ)
    rows = {name: {"value": value, "from": source} for name, (value, source) in facts.items()}
    joined_by = {name: {"state": state, "by": more} for name, state, more in engines()}
    print_or_save(json_format.dumps({"facts": rows, "not_taken": lost, "joined_by": joined_by}, indent=1), json)
    if json != STDOUT:
        _show(facts, lost)
        for name, way in joined_by.items():
            print(f"{name} {way['state']}: {way['by']}")


def _facts(environment: Mapping[str, str]) -> Facts:
    """Every fact, but not the token's text; raises `CallerError` where `connect()` would."""
    token, job = read_token(environment), read_job(environment)
    address = read_address(environment, token=token.value if token else None)
    refuse_without_token(address, token.value if token else None)
    certificates = certificates_of(None)
    return {
        **_place(read_world(environment)),
        "address": (address.value, address.source),
        "token": (f"set ({len(token.value)} characters)", token.source) if token else (None, ""),
        "tls": (str(certificates.folder), VARIABLE) if certificates else (None, ""),
        "job": (job.value or None, job.source),
    }


def _place(world: World) -> Facts:
    launcher = world.launcher
    return {
        "launcher": (launcher.name, launcher.rank),
        "rank": (world.rank, launcher.rank),
        "world size": (world.world_size, launcher.world_size),
        "local rank": (world.local_rank, launcher.local_rank if world.local_rank is not None else ""),
        "local size": (world.local_size, launcher.local_size if world.local_size is not None else ""),
    }


def _show(facts: Facts, lost: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    table = Table("fact", Column("value", overflow="fold"), Column("from", overflow="fold"), box=SIMPLE_HEAD)
    for name, (value, source) in facts.items():
        table.add_row(name, "-" if value is None else str(value), source)
    console.print(table)
    for place in lost:
        console.print(f"not taken: {place}: {facts['launcher'][0]} is the innermost launcher", style="dim")
