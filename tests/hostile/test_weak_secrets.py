"""A secret that could be guessed: who hears one proof may try secrets by the billion, so short ones are refused."""

import pytest
from channel import Channel, knock
from test_exchange_mesh import Started

from gradengine.errors import CallerError, HandshakeRefused, PeerLost
from gradengine.exchange import GradientServer, connect
from gradengine.exchange.handshake import new_nonce
from gradengine.exchange.launchers import read_secret
from gradengine.exchange.wire import encoded

WEAK = ["hunter2", "x" * 15, " " * 40, f"  {'x' * 15}  \n"]
USES = {
    "rank 0": lambda secret: connect("tcp://127.0.0.1:0", 0, 2, secret=secret),
    "rank 1": lambda secret: connect("tcp://127.0.0.1:9", 1, 2, secret=secret),
    "server": lambda secret: GradientServer(2, ("0.0.0.0", 0), secret=secret),
    "worker": lambda secret: connect("tcp://127.0.0.1:9", 1, 2, served=True, secret=secret),
    "environment": lambda secret: read_secret({"GRADENGINE_SECRET": secret}),
}


@pytest.mark.parametrize("who", USES)
def test_a_short_secret_is_refused_before_anything_is_opened_and_is_not_shown(who):
    for secret in WEAK:
        with pytest.raises(CallerError, match="is too short") as told:
            USES[who](secret)
        assert f"got {len(secret.strip())} characters, expected at least 16" in str(told.value)
        assert secret.strip() == "" or secret.strip() not in str(told.value)


def test_sixteen_characters_are_taken():
    with connect("tcp://127.0.0.1:0", 0, 1, secret="x" * 16):
        pass


@pytest.mark.parametrize("proof", [bytes(32), b"", bytes(4000)], ids=["wrong", "empty", "long"])
def test_who_has_not_proved_itself_gets_no_proof(listener, proof):
    """So that nobody without the secret can make others give something that secrets could be compared with."""
    first = Started(listener, 0, 2)
    stranger = knock(listener.address)
    stranger.send("hello", 1, 2, "", new_nonce())
    kinds = [stranger.receive()[0]]
    stranger.send("proof", proof)
    kinds.append(stranger.receive()[0])
    with pytest.raises(PeerLost, match="closed the connection"):
        stranger.receive()
    assert kinds == ["nonce", "abort"]
    stranger.close()
    second = Started(listener.address, 1, 2)
    for link in (first.link(), second.link()):
        link.close()


def test_a_proof_that_is_sent_back_proves_nothing(listener):
    """Whoever listens in rank 0's place has the caller's proof, and nothing to show for it."""
    listener.socket.setblocking(True)
    second = Started(listener.address, 1, 2)
    with listener.socket.accept()[0] as bare:
        impostor = Channel(bare, "rank 1")
        *_, nonce = impostor.expect("hello")
        bare.sendall(encoded("nonce", nonce))  # the nonces alike, so that only the role differs
        impostor.send("proof", *impostor.expect("proof"))
        kind, told = second.error()
        assert kind is HandshakeRefused
        assert "rank 0 has a different secret" in told
