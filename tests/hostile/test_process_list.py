"""What every user of a machine can read of others' processes: no command takes a secret as an argument or gives one."""

import sys
from functools import partial
from pathlib import Path

import pytest
import typer
from channel import SECRET

from gradengine.commands.cli import app
from gradengine.console.processes import ProcessPool

PROC = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are counted in /proc")


def options(command, path=()):
    for parameter in command.params:
        yield path, parameter
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, (*path, name))


def test_no_option_takes_a_secret_but_that_of_a_file_which_has_it():
    found = list(options(typer.main.get_command(app)))
    assert len(found) > 40
    secrets = {"token", "secret", "password"}
    named = [(path, each.opts) for path, each in found if secrets & set(str(each.name).split("_"))]
    assert named == [(("serve",), ["--secret-file"])]


def tell(secret, report):
    return secret


@PROC
def test_workers_of_the_demo_are_given_theirs_by_a_pipe():
    with ProcessPool() as pool:
        worker = pool.start("rank 0")
        shown = Path(f"/proc/{worker.pid}/cmdline").read_text()
        pool.give(worker, partial(tell, SECRET))  # as the demo gives it: with a job
        assert pool.results() == [SECRET]
        assert SECRET not in shown + Path(f"/proc/{worker.pid}/cmdline").read_text()
