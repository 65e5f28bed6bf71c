"""How ranks come to be connected: in any order, whatever strangers do; who is missing or does not belong is named."""

import contextlib
import errno
import os
import re
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
from channel import SECRET, Channel, claim, knock
from transports import HAS_SHARED_MEMORY, SOON

from gradengine import errors
from gradengine.errors import CallerError, ExchangeError, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange import addresses
from gradengine.exchange.addresses import MOST_PATH_BYTES, Listener, address_of, connect_once, this_host
from gradengine.exchange.handshake import new_nonce, proof
from gradengine.exchange.links import sockets
from gradengine.exchange.mesh import Meeting
from gradengine.exchange.wire import Hello, encoded

pytestmark = pytest.mark.timeout(150)
NOWHERE = "tcp://127.0.0.1:9"


@pytest.fixture(params=["tcp", "unix"])
def address(request, tmp_path):
    """Where rank 0 is to listen."""
    return ("127.0.0.1", 0) if request.param == "tcp" else str(tmp_path / "s")


@pytest.fixture(autouse=True)
def folder(tmp_path_factory, monkeypatch):
    """In which ranks of one host meet; a short one."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def listener():
    """Rank 0's, with a secret."""
    listener = Listener(("127.0.0.1", 0), SECRET)
    yield listener
    listener.close()


def mesh(at, rank, world_size, *, secret=None, job="", timeout, clock=time.monotonic, link=None, tls=None):
    """A rank's link; `at` is on rank 0 its listener, on the others rank 0's address."""
    return Meeting(at, rank, world_size, secret=secret, job=job, link=link, tls=tls).link(timeout, clock)


class Started:
    """A rank that joins in a thread."""

    def __init__(self, at, rank, world_size, *, after=lambda: None, **options):
        self._at, self._of, self._options = at, (rank, world_size), {"timeout": SOON, "secret": SECRET} | options
        self._found, self._after = [], after
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._found.append(mesh(self._at, *self._of, **self._options))
        except BaseException as fault:
            self._found.append(fault)

    def _outcome(self):
        self._thread.join(SOON)
        assert self._found, "hangs"
        return self._found[0]

    def link(self):
        if isinstance(found := self._outcome(), BaseException):
            raise found
        return found

    def error(self):
        found = self._outcome()
        assert isinstance(found, ExchangeError), found
        return type(found), str(found)


class Clock:
    """Stands still until the deadline is wanted."""

    now = 0.0

    def __init__(self):
        self._is_read = threading.Event()

    def __call__(self):
        now = self.now
        self._is_read.set()
        return now

    def jump(self, address):
        """Bring the deadline, and wake whoever still listens there."""
        assert self._is_read.wait(SOON)  # or it would be counted from after the jump
        self.now = 1e8
        with contextlib.suppress(OSError):
            connect_once(address, SOON).close()


def start(at, world_size, ranks, **options):
    """These ranks; `at` is rank 0's listener."""
    return [Started(at if rank == 0 else at.address, rank, world_size, **options) for rank in ranks]


def form(started):
    """The ranks join, and leave again."""
    links = [rank.link() for rank in started]
    for link in links:
        link.close()
    return links


def call(address, rank, world_size, *, secret=SECRET, job="", called=0, group=b""):
    """A channel by hand, after both sides have proved themselves."""
    channel, hello = knock(address), Hello(rank, world_size, job, new_nonce())
    channel.send("hello", *hello)
    (nonce,) = channel.expect("nonce")
    channel.send("proof", proof(secret, "caller", hello, nonce, called, group))
    assert channel.expect("proof") == [proof(secret, "called", hello, nonce, called, group)]
    return channel


def meet(address, rank, world_size, url=NOWHERE, host="elsewhere"):
    """A channel to rank 0 by hand, which has said where its rank listens, by default on another host."""
    channel = call(address, rank, world_size)
    channel.send("listening", url, host)
    return channel


def told_by(channel):
    """The error with which a channel by hand is dismissed."""
    with contextlib.closing(channel):
        error, text = channel.expect("abort")
        return getattr(errors, error), text


def called_by(listener):
    """Rank 0's channel by hand to the rank that calls it, and what that says first."""
    listener.socket.setblocking(True)
    channel = Channel(listener.socket.accept()[0], "whoever calls")
    return channel, Hello(*channel.expect("hello"))


def answered(listener):
    """The same, to a rank that waits for the others then."""
    (channel, hello), nonce = called_by(listener), new_nonce()
    channel.send("nonce", nonce)
    assert channel.expect("proof") == [proof(SECRET, "caller", hello, nonce, 0, b"")]
    channel.send("proof", proof(SECRET, "called", hello, nonce, 0, b""))
    channel.expect("listening")
    return channel


def refusal_of(channel):
    """What a channel hears in place of an answer; it is closed then."""
    with contextlib.closing(channel):
        _, text = channel.expect("abort")
        with pytest.raises(PeerLost, match="closed the connection"):
            channel.receive()
        return text


# ---- ranks ----


@pytest.mark.parametrize("order", [[0], [1, 0], [3, 2, 1, 0], [1, 0, 3, 2]])
def test_ranks_that_start_in_any_order_are_connected(address, order, tmp_path):
    listener, started = Listener(address, SECRET), {}
    for rank in order:
        [started[rank]] = start(listener, len(order), [rank])
    links = [each.link() for each in started.values()]
    assert [(link.rank, {*link._connections}) for link in links] == [(rank, {*order} - {rank}) for rank in order]
    for link in links:
        link.close()
    assert [*tmp_path.iterdir()] == []
    assert listener.socket.fileno() < 0


@pytest.mark.parametrize("stops", ["connected", "met"])
def test_a_rank_calls_again_if_rank_0_ends_and_starts_again(tmp_path, stops):
    """Also if it listens at a path already, which it then does again."""
    before = Listener(str(tmp_path / "s"))
    second = Started(before.address, 1, 2)
    if stops == "met":
        channel = answered(before)
        before.close()
        again = Listener(before.address)
        channel.close()
    else:
        before.socket.setblocking(True)
        connection, _ = before.socket.accept()
        before.close()
        connection.close()
        again = Listener(before.address)
    form([*start(again, 2, [0]), second])
    assert [*tmp_path.iterdir()] == []


def test_connections_are_kept_alive_and_closed_in_children(listener):
    started = start(listener, 2, range(2), link="tcp")
    for link in [rank.link() for rank in started]:
        [connection] = [each.socket for each in link._connections.values()]
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
        assert connection in sockets._sockets
        link.close()
    assert listener.socket in sockets._sockets


# ---- strangers ----

LISTENING, PROOF = encoded("listening", NOWHERE, "elsewhere"), encoded("proof", bytes(32))
HELLO = encoded("hello", 1, 3, "", bytes(32))
RUBBISH = [
    *(b"", b"\x93\xce\x01", b"\x94\xa2GE\xcc\x04", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), HELLO[:-1]),
    encoded("hello", 1, 3, "", b"") + encoded("proof", b""),
    *(encoded("hello", rank, rank or 1, "", bytes(32)) + PROOF for rank in (0, 1 << 62)),
    *(HELLO + LISTENING, LISTENING),
    *(claim("hello", 1 << 30), claim("abort", 2**32 - 1), encoded("abort", "PeerLost", "words")),
    claim("members", 1 << 20) + bytes(1 << 12),
]


@pytest.mark.parametrize("stays", [False, True], ids=["leaves", "stays"])
def test_strangers_do_no_harm_and_delay_nobody(stays, monkeypatch, address):
    """At rank 0, and where each other rank listens."""
    with contextlib.ExitStack() as stack:
        sound = Listener.__init__

        def listened(listener, *arguments, **options):
            sound(listener, *arguments, **options)
            for says in RUBBISH:
                stranger = knock(listener.address)
                stack.callback(stranger.close)
                with contextlib.suppress(PeerLost):
                    stranger._socket.sendall(says)
                if not stays:
                    stranger.close()

        monkeypatch.setattr(Listener, "__init__", listened)
        form(start(Listener(address, SECRET), 3, range(3)))


@pytest.mark.parametrize("passed_on_to", [None, 0])
def test_who_listens_in_a_ranks_place_is_not_taken_for_it(listener, passed_on_to):
    """Without the secret; also where a call is passed on to another rank, which would answer it as its own."""
    first, second = start(listener, 3, [0, 2])
    with socket.create_server(("127.0.0.1", 0)) as place:
        one = meet(listener.address, 1, 3, f"tcp://127.0.0.1:{place.getsockname()[1]}")
        impostor = Channel(place.accept()[0], "rank 2")
        hello = Hello(*impostor.expect("hello"))
        nonce = new_nonce()
        impostor.send("nonce", nonce)
        (given,) = impostor.expect("proof")
        group, *_ = one.expect("members")
        answer = bytes(32) if passed_on_to is None else proof(SECRET, "called", hello, nonce, passed_on_to, group)
        assert given == proof(SECRET, "caller", hello, nonce, 1, group)
        impostor.send("proof", answer)
        kind, told = second.error()
        assert kind is HandshakeRefused
        assert "rank 1 has a different secret" in told
        impostor.close()
        one.close()
    first.link().close()


# ---- who does not belong ----


def test_a_rank_that_has_joined_already_is_refused_and_the_group_goes_on(listener):
    first = Started(listener, 0, 3)
    joined = call(listener.address, 1, 3)
    for rank in (1, 0):
        channel, hello = knock(listener.address), Hello(rank, 3, "", new_nonce())
        channel.send("hello", *hello)
        channel.send("proof", proof(SECRET, "caller", hello, *channel.expect("nonce"), 0, b""))
        assert f"rank {rank} has joined already" in refusal_of(channel)
    joined.close()
    form([first, *start(listener, 3, [1, 2])])


def test_a_rank_with_another_world_size_is_refused_and_the_group_goes_on(listener):
    first = Started(listener, 0, 3)
    kind, told = Started(listener.address, 2, 4).error()
    assert kind is HandshakeRefused
    assert "rank 2 was started for a different world size" in told
    form([first, *start(listener, 3, [1, 2])])


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux all of 127.0.0.0/8 is loopback")
def test_a_rank_beside_rank_0_that_knows_it_by_a_name_for_loopback_is_found_at_rank_0_s_other_addresses(monkeypatch):
    """Debian's /etc/hosts has 127.0.1.1 for the host's own name, which is another address on other machines."""
    called = []

    def resolved(address, timeout):
        called.append(address)
        return connect_once(("127.0.1.1" if address[0] == "debian" else address[0], address[1]), timeout)

    monkeypatch.setattr(addresses, "connect_once", resolved)
    listener = Listener(("0.0.0.0", 0), SECRET)
    names = ["debian", "127.0.0.2", "debian"]
    ranks = [Started((name, listener.address[1]), rank, 4, link="tcp") for rank, name in enumerate(names, 1)]
    form([Started(listener, 0, 4, link="tcp"), *ranks])
    others = {host for host, port in called if port != listener.address[1]}
    assert others == {"127.0.0.2", "127.0.1.1", "127.0.0.1"}  # rank 1 from rank 2, ranks 1 and 2 from rank 3


@pytest.mark.parametrize("url", ["", "tcp://127.0.0.1"])
def test_a_rank_that_listens_nowhere_is_refused(listener, url):
    first = Started(listener, 0, 2)
    assert "a rank sent an invalid address" in refusal_of(meet(listener.address, 1, 2, url))
    form([first, *start(listener, 2, [1])])


@pytest.mark.parametrize("urls", [None, {}, [], [7], [["x"]], [""], ["tcp://127.0.0.1:5"] * 2, {"x": "y"}], ids=repr)
def test_a_list_of_ranks_that_cannot_be(listener, urls):
    second = Started(listener.address, 1, 2)
    channel = answered(listener)
    channel.send("members", bytes(16), "tcp", urls)
    assert second.error()[0] is ProtocolError
    channel.close()


# ---- who is missing ----


def test_at_the_deadline_rank_0_names_who_is_missing_to_those_that_came(listener):
    clock = Clock()
    first = Started(listener, 0, 4, clock=clock, timeout=7.0)
    joined, left = meet(listener.address, 2, 4), meet(listener.address, 3, 4)
    left.close()
    stranger = knock(listener.address)
    stranger.send("abort", "", "")
    assert "wrong message" in refusal_of(stranger)  # after this rank 3's leaving has been seen too
    clock.jump(listener.address)
    kind, told = first.error()
    assert kind is PeerLost
    assert "ranks 1, 3 did not join rank 0 within 7 s (join_timeout); start all ranks" in told
    assert "last refused" in told
    assert told_by(joined) == (kind, told)


@pytest.mark.parametrize("kind", [PeerLost, HandshakeRefused])
def test_a_rank_that_rank_0_dismisses_says_why(listener, kind):
    second = Started(listener.address, 1, 3)
    with contextlib.closing(answered(listener)) as channel:
        channel.send("abort", kind.__name__, "rank 2 is missing")
        assert second.error() == (kind, "rank 2 is missing")


@pytest.fixture
def listeners(monkeypatch):
    """All that are made."""
    made, sound = [], Listener.__init__

    def noted(listener, *arguments, **options):
        sound(listener, *arguments, **options)
        made.append(listener)

    monkeypatch.setattr(Listener, "__init__", noted)
    return made


def test_a_rank_that_another_does_not_call_names_it(listener, listeners):
    clock = Clock()
    [first], [second] = start(listener, 3, [0]), start(listener, 3, [1], clock=clock)
    with contextlib.closing(meet(listener.address, 2, 3)) as silent:
        silent.expect("members")
        first.link().close()
        with contextlib.closing(knock(listeners[0].address)) as stranger:
            stranger.send("hello", 2, 3, "", new_nonce())
            stranger.expect("nonce")  # now rank 1 accepts
            clock.jump(listeners[0].address)
        kind, told = second.error()
        assert kind is PeerLost
        assert "rank 2 did not join rank 1" in told


def test_a_rank_says_that_rank_0_waits_for_others(listener):
    """In the middle of its answer; at the first one: hostile/test_slow.py."""
    second = Started(listener.address, 1, 3, clock=(clock := Clock()))
    with contextlib.closing(answered(listener)) as channel:
        clock.now = 1e8
        channel._socket.sendall(encoded("members", bytes(16), "tcp", [])[:1])
        kind, told = second.error()
        assert kind is PeerLost
        assert "rank 1 could not join the group of rank 0 within " in told


# ---- over TCP, on one host ----


@pytest.mark.parametrize("link", [None, "unix", "shared_memory", "tcp"])
def test_ranks_of_one_host_meet_again_at_a_unix_socket_of_their_user_s_alone(listener, link, folder):
    if link == "shared_memory" and not HAS_SHARED_MEMORY:
        pytest.skip("no memfd on this platform")
    best = "shared_memory" if HAS_SHARED_MEMORY else "unix"
    links = form(start(listener, 4, range(4), link=link))
    assert [each.name for each in links] == [link or best] * 4
    assert [*folder.glob("*/*")] == []
    assert [stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()] == [0o700] * (link != "tcp")


@pytest.mark.parametrize("link", [None, "unix"])
def test_if_one_rank_is_elsewhere_all_go_over_tcp_or_are_refused_another_link(listener, link):
    started = start(listener, 3, [0, 1], link=link)
    with contextlib.closing(meet(listener.address, 2, 3)) as far:
        if link is not None:
            for kind, says in (*(rank.error() for rank in started), told_by(far)):
                assert kind is HandshakeRefused
                assert "got rank 2 on a different host" in says
            return
        group, link, urls = far.expect("members")
        assert link == "tcp"
        host, port = address_of(urls[0])
        with contextlib.closing(call((host, port), 2, 3, called=1, group=group)):
            assert [link.name for link in form(started)] == ["tcp", "tcp"]


@pytest.mark.parametrize("link", [None, "unix"])
def test_without_a_folder_ranks_of_one_host_stay_at_tcp_or_are_refused_another_link(listener, link, folder):
    (folder / f"gradengine-{os.getuid()}").touch()
    started = start(listener, 2, range(2), link=link)
    if link is None:
        assert [link.name for link in form(started)] == ["tcp", "tcp"]
        return
    for kind, says in [rank.error() for rank in started]:
        assert kind is HandshakeRefused
        assert f"cannot make '{folder}/gradengine-" in says


def test_a_stranger_that_was_there_before_is_not_let_in_at_the_second_meeting(listener):
    """Otherwise it would be the only one of a Unix group that is connected over TCP."""
    first, hello = Started(listener, 0, 2), Hello(1, 2, "", new_nonce())
    with contextlib.closing(knock(listener.address)) as stranger:
        stranger.send("hello", *hello)
        (nonce,) = stranger.expect("nonce")
        with contextlib.closing(meet(listener.address, 1, 2, host=this_host())) as second:
            path = address_of(*second.expect("moved"))
        with contextlib.suppress(PeerLost):
            stranger.send("proof", proof(SECRET, "caller", hello, nonce, 0, b""))
        with pytest.raises(PeerLost):
            stranger.receive()
    form([first, Started(path, 1, 2)])


def test_one_deadline_is_that_of_both_meetings(listener):
    clock = Clock()
    first = Started(listener, 0, 2, clock=clock, timeout=7.0)
    with contextlib.closing(meet(listener.address, 1, 2, host=this_host())) as second:
        path = address_of(*second.expect("moved"))
    clock.now = 6.9
    knock(path).close()
    clock.jump(path)
    kind, told = first.error()
    assert kind is PeerLost
    assert "rank 1 did not join rank 0 within 7 s" in told


IMPOSSIBLE = [("pigeon", None, ProtocolError), ("shared_memory", None, ProtocolError)]


@pytest.mark.parametrize(
    ("chosen", "own", "kind"), [("tcp", None, None), *IMPOSSIBLE, ("tcp", "unix", HandshakeRefused)]
)
def test_the_link_is_what_rank_0_has_chosen_unless_it_cannot_be_or_another_was_asked_for(listener, chosen, own, kind):
    second = Started(listener.address, 1, 2, link=own)
    with contextlib.closing(answered(listener)) as channel:
        channel.send("members", bytes(16), chosen, [NOWHERE])
        if kind is None:
            assert second.link().name == "tcp"
            second.link().close()
        else:
            assert second.error()[0] is kind


@pytest.mark.parametrize("url", ["", "tcp://127.0.0.1"])
def test_rank_0_that_sends_ranks_nowhere_is_refused(listener, url):
    second = Started(listener.address, 1, 2)
    with contextlib.closing(answered(listener)) as channel:
        channel.send("moved", url)
        assert second.error()[0] is ProtocolError


# ---- who cannot join any more ----


@pytest.mark.parametrize("where", ["rank 0", "rank 1"])
def test_a_rank_that_was_let_in_and_finds_no_listener_any_more_is_told_so_at_once(listener, where):
    """As one whose connection was reset before it heard that it was let in: the others listen no more then."""
    clock = Clock()  # which stands still, so that no attempt ends by its deadline
    second = Started(listener.address, 2, 3, clock=clock)
    channel = answered(listener)
    if where == "rank 1":
        channel.send("members", bytes(16), "tcp", [NOWHERE, NOWHERE])
        listener.close()
    else:
        listener.close()
        channel.close()
    kind, told = second.error()
    channel.close()
    assert kind is PeerLost
    assert f"{where} no longer listens" in told


# ---- the listener ----


def test_a_path_is_for_this_user_alone_and_a_stale_one_is_removed(tmp_path):
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        first = Listener(str(path))
        first.socket.close()  # as a killed process leaves it
        second = Listener(str(path))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(CallerError):
        Listener(str(path))
    second.close()
    assert not path.exists()
    with contextlib.closing(Listener(str(path))):
        second.close()
        assert path.exists()


def test_a_path_that_is_too_long_is_refused_on_all_ranks(tmp_path):
    path = str(tmp_path / "s")
    path += "s" * (MOST_PATH_BYTES - len(path))
    for rank in (0, 1, 9999):
        Meeting(path, rank, 10_000).close()
        with pytest.raises(CallerError, match=f"{MOST_PATH_BYTES}"):
            Meeting(path + "s", rank, 10_000)
    Listener(f"{path}.9999").close()
    assert not Path(path).exists()


@pytest.mark.parametrize("secret", [None, ""])
def test_an_address_beyond_loopback_needs_a_secret(secret):
    with pytest.raises(CallerError, match="no secret"):
        Listener(("0.0.0.0", 0), secret)
    Listener(("0.0.0.0", 0), SECRET).close()


def test_arguments_out_of_range(tmp_path):
    for changes in ({"rank": 2}, {"job": "two\nlines"}, {"secret": 7}):
        with pytest.raises(CallerError):
            Meeting(**{"address": str(tmp_path / "s"), "rank": 0, "world_size": 2} | changes)


def test_a_path_that_a_rank_may_not_use_is_named_at_the_deadline(tmp_path, monkeypatch):
    def denied(address, timeout):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(addresses, "connect_once", denied)
    kind, told = Started(str(tmp_path / "s"), 1, 2, timeout=0.01).error()
    assert kind is PeerLost
    assert re.match("rank 1 could not connect to rank 0 at .* [(]Permission denied[)].*permissions", told)
