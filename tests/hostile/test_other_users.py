"""Other users of the machine: a socket at a path is this user's alone, whatever the umask and whoever bound it."""

import os
import socket
import stat

import pytest
from channel import SECRET
from test_exchange_mesh import Clock, Started, form, start

from gradengine.errors import HandshakeRefused, PeerLost
from gradengine.exchange import GradientServer, connect
from gradengine.exchange import addresses as addresses_module
from gradengine.exchange.addresses import Listener


@pytest.fixture
def listening(monkeypatch):
    """The mode of each path at the moment when somebody could connect."""
    modes, sound = [], addresses_module.socket.socket.listen

    def listen(own, *backlog):
        if isinstance(name := own.getsockname(), str) and name:
            modes.append(stat.S_IMODE(os.stat(name).st_mode))
        return sound(own, *backlog)

    monkeypatch.setattr(addresses_module.socket.socket, "listen", listen)
    before = os.umask(0)
    yield modes
    os.umask(before)


def test_rank_0_a_server_and_the_other_ranks(listening, tmp_path):
    with connect(f"unix://{tmp_path}/s", 0, 2), GradientServer(2, str(tmp_path / "t")):
        pass
    assert listening == [0o600] * 2
    listener = Listener(str(tmp_path / "s"))
    ranks = [Started(listener if rank == 0 else listener.address, rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.link().close()
    assert listening[2:] == [0o600] * 3


@pytest.mark.parametrize("end", ["calls", "is called"])
def test_another_user_at_the_other_end_of_a_path_is_refused_on_both_ends_without_a_secret(end, tmp_path, monkeypatch):
    """As one who binds rank 0's path first, in a folder that all may write to, and lets all connect."""
    here, there = socket.socketpair()
    with here, there:
        assert addresses_module.user_at(here) == os.geteuid()
    listener, clock = Listener(str(tmp_path / "s")), Clock()

    def user_at(connection):
        return os.geteuid() + ((connection.getsockname() == "") == (end == "calls"))

    monkeypatch.setattr(addresses_module, "user_at", user_at)
    first, second = Started(listener, 0, 2, secret=None, clock=clock), Started(listener.address, 1, 2, secret=None)
    kind, told = second.error()
    assert kind is HandshakeRefused
    assert f"another user is at the other end of the Unix socket: got user {os.geteuid() + 1}" in told
    clock.jump(listener.address)
    assert first.error()[0] is PeerLost
    form(start(Listener(str(tmp_path / "t")), 3, range(3), secret=SECRET))
