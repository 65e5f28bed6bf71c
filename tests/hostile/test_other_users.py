"""Other users of the machine: a socket at a path is this user's alone as soon as it is there, whatever the umask."""

import os
import stat

import pytest
from test_exchange_mesh import Started

from gradengine.exchange import GradientServer, connect
from gradengine.exchange import addresses as addresses_module
from gradengine.exchange.listener import Listener


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
