"""Whatever accepting ends in, the loop goes on: no stranger and no other process can end it, only its deadline does."""

import contextlib
import errno
import os
import selectors
import threading

import pytest
from channel import knock
from test_exchange_mesh import Clock, Started, form, start
from transports import SOON

from gradengine.errors import PeerLost
from gradengine.exchange import addresses
from gradengine.exchange.handshake import Line

FULL = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM]
FAULTS = [*FULL, errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ETIMEDOUT, errno.EHOSTUNREACH]


class Failing:
    """A listening socket whose `accept` fails so many times."""

    def __init__(self, bare, number, times):
        self.fileno, self.close, self._bare, self._number, self.left = bare.fileno, bare.close, bare, number, times
        self.has_failed = threading.Event()

    def accept(self):
        if self.left:
            self.left -= 1
            self.has_failed.set()
            raise OSError(self._number, os.strerror(self._number))
        return self._bare.accept()


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(addresses, "RETRY_SECONDS", 0.001)


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_accepting_fails_some_times_and_then_the_group_forms(listener, number):
    listener.socket = failing = Failing(listener.socket, number, 5)
    form(start(listener, 3, range(3)))
    assert failing.left == 0


def test_where_it_never_ends_the_deadline_says_why_nobody_came(listener):
    number = errno.EMFILE
    listener.socket = failing = Failing(listener.socket, number, 1 << 62)
    clock = Clock()
    first = Started(listener, 0, 2, clock=clock)
    with contextlib.closing(knock(listener.address)):
        assert failing.has_failed.wait(SOON)
        clock.jump(listener.address)
    kind, told = first.error()
    assert kind is PeerLost
    assert "rank 1 did not join rank 0 within 60 s (join_timeout)" in told
    assert f"rank 0 could not accept a connection ({os.strerror(number)})" in told


@pytest.mark.parametrize("where", ["line", "selector"])
def test_what_cannot_be_done_with_one_connection_ends_that_alone(listener, where, monkeypatch):
    """As where the system watches no more sockets, or a caller is gone already."""
    closed, line, register = [], Line.__init__, selectors.DefaultSelector.register

    def refuse(connection):
        if len(closed) < 3:
            closed.append(connection)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def made(own, connection, who, *left):
        if where == "line" and who == "a caller":
            refuse(connection)
        line(own, connection, who, *left)

    def registered(own, connection, events, data=None):
        if where == "selector" and isinstance(data, Line):
            refuse(connection)
        return register(own, connection, events, data)

    monkeypatch.setattr(Line, "__init__", made)
    monkeypatch.setattr(selectors.DefaultSelector, "register", registered)
    form(start(listener, 2, range(2)))
    assert [each.fileno() for each in closed] == [-1] * 3
