"""How ranks come to be connected: in any order, whatever strangers do; who is missing or does not belong is named."""

import contextlib
import errno
import linecache
import os
import socket
import stat
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
from channel import SECRET, Channel, claim, knock
from interrupts import interrupted_at, places_of
from transports import SOON

from gradengine import errors
from gradengine.errors import CallerError, ExchangeError, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange import mesh as mesh_module
from gradengine.exchange.addresses import MOST_PATH_BYTES, connect_once, listen_socket
from gradengine.exchange.handshake import new_nonce, proof
from gradengine.exchange.links import sockets
from gradengine.exchange.listener import Listener, is_nameless, nameless
from gradengine.exchange.mesh import Meeting
from gradengine.exchange.rendezvous import address_of
from gradengine.exchange.wire import Abort, Hello, Listening, Members, Nonce, Proof, Refused, encoded

pytestmark = pytest.mark.timeout(150)
NOWHERE = "tcp://127.0.0.1:9"


@pytest.fixture(params=["tcp", "unix"])
def address(request, tmp_path):
    """Where rank 0 is to listen."""
    return ("127.0.0.1", 0) if request.param == "tcp" else str(tmp_path / "s")


@pytest.fixture
def listener():
    """Rank 0's, with a secret."""
    listener = Listener(("127.0.0.1", 0), SECRET)
    yield listener
    listener.close()


def mesh(at, rank, world_size, *, secret=None, job="", timeout, clock=time.monotonic, link=None, tls=None):
    """A rank's link; `at` is on rank 0 its listener, on the others rank 0's address."""
    joining = mesh_module._Joining(rank, world_size, secret, job, timeout, clock, link, tls)
    return joining.link(lambda: joining.host(at) if isinstance(at, Listener) else joining.join(at))


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
    channel.send(hello)
    nonce = channel.expect(Nonce)
    channel.send(Proof(proof(secret, "caller", hello, nonce.nonce, called, group)))
    answer = channel.expect(Proof)
    assert answer.proof == proof(secret, "called", hello, nonce.nonce, called, group)
    return channel


def meet(address, rank, world_size, url=NOWHERE):
    """A channel to rank 0 by hand, which has said where its rank listens."""
    channel = call(address, rank, world_size)
    channel.send(Listening(url))
    return channel


def told_by(channel):
    """The error with which a channel by hand is dismissed."""
    with contextlib.closing(channel):
        abort = channel.expect(Abort)
        return getattr(errors, abort.error), abort.text


def called_by(listener):
    """Rank 0's channel by hand to the rank that calls it, and what that says first."""
    listener.socket.setblocking(True)
    channel = Channel(listener.socket.accept()[0], "whoever calls")
    return channel, channel.expect(Hello)


def answered(listener, beside=""):
    """The same, to a rank that waits for the others then."""
    (channel, hello), nonce = called_by(listener), new_nonce()
    channel.send(Nonce(nonce, beside))
    given = channel.expect(Proof)
    assert given.proof == proof(SECRET, "caller", hello, nonce, 0, b"")
    channel.send(Proof(proof(SECRET, "called", hello, nonce, 0, b"")))
    channel.expect(Listening)
    return channel


def refusal_of(channel):
    """What a channel hears in place of an answer; it is closed then."""
    with contextlib.closing(channel):
        refused = channel.expect(Refused)
        with pytest.raises(PeerLost, match="closed the connection"):
            channel.receive()
        return refused.text


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
def test_a_rank_calls_again_where_rank_0_ends_and_starts_again(tmp_path, stops):
    """Also where it listens at a path already, which it then does again."""
    before = Listener(str(tmp_path / "s"))
    second = Started(before.address, 1, 2)
    if stops == "met":
        channel = answered(before)
        before.close()
        channel.close()
    else:
        before.socket.setblocking(True)
        connection, _ = before.socket.accept()
        before.close()
        connection.close()
    form([*start(Listener(before.address), 2, [0]), second])
    assert [*tmp_path.iterdir()] == []


def test_connections_are_kept_alive_and_closed_in_children(listener):
    started = start(listener, 2, range(2))
    for link in [rank.link() for rank in started]:
        [connection] = [each.socket for each in link._connections.values()]
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
        assert connection in sockets._sockets
        link.close()
    assert listener.socket in sockets._sockets


# ---- strangers ----

HELLOS = [Hello(1, 3, "", bytes(32)), Hello(0, 1, "", bytes(32)), Hello(1 << 62, 1 << 62, "", bytes(32))]
RUBBISH = [
    *(b"", b"\x93\xce\x01", b"\x94\xa2GE\xcc\x04", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), encoded(HELLOS[0])[:-1]),
    encoded(Hello(1, 3, "", b"")) + encoded(Proof(b"")),
    *(encoded(hello) + encoded(Proof(bytes(32))) for hello in HELLOS[1:]),
    *(encoded(HELLOS[0]) + encoded(Listening(NOWHERE)), encoded(Listening(NOWHERE))),
    *(claim(HELLOS[0], 1 << 30), claim(Abort("", ""), 2**32 - 1), encoded(Refused("words"))),
    claim(Members(b"", "", []), 1 << 20) + bytes(1 << 12),
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


def test_strangers_by_the_thousand_are_a_line_a_second_in_the_log_with_their_number(listener, caplog):
    caplog.set_level("INFO", "gradengine.exchange")
    clock = Clock()
    first = Started(listener, 0, 2, clock=clock)
    for second in (0.0, 0.5, 0.9, 1.0, 1.5):
        clock.now = second
        stranger = knock(listener.address)
        stranger.send(Abort("", ""))
        assert "another message" in refusal_of(stranger)
    form([first, *start(listener, 2, [1])])
    lines = [line for line in caplog.messages if "refuse" in line]
    assert [line.partition("(and ")[2][:8] for line in lines] == ["", "2 others", ""]
    assert lines[2].startswith("rank 0 has refused 1 others, at last: a caller sent another message")


@pytest.mark.parametrize("passed_on_to", [None, 0])
def test_who_listens_in_a_ranks_place_is_not_taken_for_it(listener, passed_on_to):
    """Without the secret; also where a call is passed on to another rank, which would answer it as its own."""
    first, second = start(listener, 3, [0, 2])
    with socket.create_server(("127.0.0.1", 0)) as place:
        one = meet(listener.address, 1, 3, f"tcp://127.0.0.1:{place.getsockname()[1]}")
        impostor = Channel(place.accept()[0], "rank 2")
        hello = impostor.expect(Hello)
        nonce = new_nonce()
        impostor.send(Nonce(nonce, ""))
        given = impostor.expect(Proof)
        group = one.expect(Members).group
        answer = bytes(32) if passed_on_to is None else proof(SECRET, "called", hello, nonce, passed_on_to, group)
        assert given.proof == proof(SECRET, "caller", hello, nonce, 1, group)
        impostor.send(Proof(answer))
        kind, told = second.error()
        assert kind is HandshakeRefused
        assert "rank 1 has another secret" in told
        impostor.close()
        one.close()
    first.link().close()


# ---- who does not belong ----


def test_a_rank_that_has_joined_already_is_refused_and_the_group_goes_on(listener):
    first = Started(listener, 0, 3)
    joined = call(listener.address, 1, 3)
    for rank in (1, 0):
        kind, told = Started(listener.address, rank, 3).error()
        assert kind is HandshakeRefused
        assert f"rank {rank} has joined already" in told
    joined.close()
    form([first, *start(listener, 3, [1, 2])])


@pytest.mark.parametrize("far", ["tcp://10.0.0.7:5", None])
def test_another_world_size_and_a_rank_that_another_cannot_reach_end_the_group_for_all_that_came(listener, far):
    first, joined = Started(listener, 0, 3), meet(listener.address, 1, 3, "tcp://127.0.0.1:5")
    other = meet(listener.address, 2, 3, far) if far else Started(listener.address, 2, 4)
    word = "rank 2 cannot reach rank 1" if far else "rank 2 was started for another world size"
    for kind, told in (first.error(), told_by(joined), told_by(other) if far else other.error()):
        assert kind is HandshakeRefused
        assert word in told


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux all of 127.0.0.0/8 is loopback")
def test_a_rank_beside_rank_0_that_knows_it_by_a_name_for_loopback_is_found_at_rank_0_s_other_addresses(monkeypatch):
    """Debian's /etc/hosts has 127.0.1.1 for the host's own name, which is another address on other machines."""
    called = []

    def resolved(address, timeout):
        called.append(address)
        return connect_once(("127.0.1.1" if address[0] == "debian" else address[0], address[1]), timeout)

    monkeypatch.setattr(mesh_module, "connect_once", resolved)
    listener = Listener(("0.0.0.0", 0), SECRET)
    names = ["debian", "127.0.0.2", "debian"]
    ranks = [Started((name, listener.address[1]), rank, 4) for rank, name in enumerate(names, 1)]
    form([Started(listener, 0, 4), *ranks])
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
    channel.send(Members(bytes(16), "tcp", urls))
    assert second.error()[0] is ProtocolError
    channel.close()


# ---- who is missing ----


def test_at_the_deadline_rank_0_names_who_is_missing_to_those_that_came(listener):
    clock = Clock()
    first = Started(listener, 0, 4, clock=clock, timeout=7.0)
    joined, left = meet(listener.address, 2, 4), meet(listener.address, 3, 4)
    left.close()
    stranger = knock(listener.address)
    stranger.send(Abort("", ""))
    assert "another message" in refusal_of(stranger)  # after this rank 3's leaving has been seen too
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
        channel.send(Abort(kind.__name__, "rank 2 is missing"))
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
        silent.expect(Members)
        first.link().close()
        with contextlib.closing(knock(listeners[0].address)) as stranger:
            stranger.send(Hello(2, 3, "", new_nonce()))
            stranger.expect(Nonce)  # now rank 1 accepts
            clock.jump(listeners[0].address)
        kind, told = second.error()
        assert kind is PeerLost
        assert "rank 2 did not join rank 1" in told


def test_a_rank_that_was_let_in_and_has_not_heard_so_is_let_in_again(listener, listeners):
    """Its connection was reset before the answer came; one that is there is refused; what it sends is kept."""
    started = start(listener, 4, [0, 1])
    with contextlib.ExitStack() as stack:
        two, _ = (stack.enter_context(contextlib.closing(meet(listener.address, rank, 4))) for rank in (2, 3))
        group = two.expect(Members).group
        [second] = listeners
        for way in ("reset", "closed"):
            lost = call(second.address, 2, 4, called=1, group=group)
            if way == "reset":
                lost._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            lost.close()
        there = stack.enter_context(contextlib.closing(call(second.address, 2, 4, called=1, group=group)))
        hello = Hello(2, 4, "", new_nonce())
        for says in (b"", b"early"):
            there._socket.sendall(says)
            again = knock(second.address)
            again.send(hello)
            nonce = again.expect(Nonce).nonce
            again.send(Proof(proof(SECRET, "caller", hello, nonce, 1, group)))
            assert "rank 2 has joined already" in refusal_of(again)
        stack.enter_context(contextlib.closing(call(second.address, 3, 4, called=1, group=group)))
        links = [rank.link() for rank in started]
        assert links[1]._connections[2].socket.recv(9) == b"early"
        for link in links:
            link.close()


def test_a_rank_says_that_rank_0_waits_for_others(listener):
    """In the middle of its answer; at the first one: hostile/test_slow.py."""
    second = Started(listener.address, 1, 3, clock=(clock := Clock()))
    with contextlib.closing(answered(listener)) as channel:
        clock.now = 1e8
        channel._socket.sendall(encoded(Members(bytes(16), "tcp", []))[:1])
        kind, told = second.error()
        assert kind is PeerLost
        assert "rank 1 could not join the group of rank 0 within " in told


# ---- over TCP, on one host ----


@pytest.fixture
def beside():
    """Rank 0's, which ranks on its host reach over a Unix socket too."""
    listener = Listener(("127.0.0.1", 0), SECRET, is_beside=True)
    yield listener
    listener.close()


ONE_HOST = pytest.mark.skipif(sys.platform != "linux", reason="no Unix sockets without a path on this platform")


@ONE_HOST
@pytest.mark.parametrize("link", [None, "unix", "shared_memory"])
def test_ranks_of_one_host_find_that_out(beside, link):
    links = form(start(beside, 4, range(4), link=link))
    assert [each.name for each in links] == [link or "shared_memory"] * 4


@ONE_HOST
@pytest.mark.parametrize("link", [None, "unix"])
def test_where_one_rank_is_elsewhere_all_go_over_tcp_or_are_refused_another_link(beside, link):
    """One by hand, which stays with the connection over TCP as whoever does not reach the Unix socket."""
    started = start(beside, 3, [0, 1], link=link)
    with contextlib.closing(meet(beside.address, 2, 3)) as far:
        if link is not None:
            for kind, says in (*(rank.error() for rank in started), told_by(far)):
                assert kind is HandshakeRefused
                assert "got rank 2 elsewhere" in says
            return
        members = far.expect(Members)
        assert members.link == "tcp"
        host, port = address_of(members.urls[0])
        with contextlib.closing(call((host, port), 2, 3, called=1, group=members.group)):
            assert [link.name for link in form(started)] == ["tcp", "tcp"]


@ONE_HOST
def test_who_finds_a_unix_socket_busy_tries_again(beside, monkeypatch):
    """Its backlog is full, as strangers may have it, who know its name: that is no reason to go over TCP."""
    failed = []

    def busy(address, timeout):
        if isinstance(address, str) and len(failed) < 3:
            failed.append(address)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return connect_once(address, timeout)

    monkeypatch.setattr(mesh_module, "connect_once", busy)
    assert [link.name for link in form(start(beside, 3, range(3)))] == ["shared_memory"] * 3
    assert len(failed) == 3


@ONE_HOST
def test_where_all_are_on_one_host_a_rank_that_is_not_reached_there_is_named(beside, monkeypatch):
    tried, clock = threading.Semaphore(0), Clock()

    def nobody(address, timeout):
        if is_nameless(address) and address != nameless(beside.beside):
            tried.release()
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return connect_once(address, timeout)

    monkeypatch.setattr(mesh_module, "connect_once", nobody)
    monkeypatch.setattr(mesh_module, "RETRY_SECONDS", 0.001)
    started = [*start(beside, 3, [0, 1]), Started(beside.address, 2, 3, clock=clock)]
    started[0].link().close()
    for _ in range(2):  # it tries again, and no other way
        assert tried.acquire(timeout=SOON)
    clock.now = 1e8
    kind, told = started[2].error()
    assert kind is PeerLost
    assert "rank 2 could not connect to rank 1" in told


@pytest.mark.parametrize("name", ["a" * 31, "A" * 32, "../" + "a" * 29])
def test_a_name_that_nobody_draws_is_refused(listener, name):
    second = Started(listener.address, 1, 2)
    with contextlib.closing(called_by(listener)[0]) as channel:
        channel.send(Nonce(bytes(32), name))
        assert second.error()[0] is ProtocolError


@ONE_HOST
def test_a_name_leads_to_no_other_name(listener):
    second = Started(listener.address, 1, 2)
    with contextlib.closing(listen_socket(nameless("0" * 32))) as trap, contextlib.ExitStack() as stack:
        channel = stack.enter_context(contextlib.closing(called_by(listener)[0]))
        channel.send(Nonce(bytes(32), "0" * 32))
        led = stack.enter_context(contextlib.closing(Channel(trap.accept()[0], "rank 1")))
        led.expect(Hello)
        led.send(Nonce(bytes(32), "0" * 32))
        assert second.error()[0] is ProtocolError


@pytest.mark.parametrize(
    ("chosen", "own", "kind"), [("tcp", None, None), ("pigeon", None, ProtocolError), ("tcp", "unix", HandshakeRefused)]
)
def test_the_link_is_what_rank_0_has_chosen_unless_it_cannot_be_or_another_was_asked_for(listener, chosen, own, kind):
    """Where the name that rank 0 says leads nowhere."""
    second = Started(listener.address, 1, 2, link=own)
    with contextlib.closing(answered(listener, "0" * 32)) as channel:
        channel.send(Members(bytes(16), chosen, [NOWHERE]))
        if kind is None:
            assert second.link().name == "tcp"
            second.link().close()
        else:
            assert second.error()[0] is kind


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


def test_a_path_that_is_too_long_with_the_last_ranks_number_is_refused_on_all_ranks(tmp_path):
    path = str(tmp_path / "s")
    path += "s" * (MOST_PATH_BYTES - len(".10") - len(path))
    for rank in (0, 1, 10):
        Meeting(path, rank, 11).close()
        with pytest.raises(CallerError, match=f"{MOST_PATH_BYTES}"):
            Meeting(path, rank, 101)
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


# ---- Ctrl-C ----


@pytest.mark.parametrize("is_beside", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_interrupted_at_any_line_nothing_is_left_open(rank, is_beside, tmp_path, monkeypatch):
    """The other rank, which may try again and again, is told at last that its time is over."""
    made, sound = [], socket.socket.__init__

    def noted(connection, *arguments, **options):
        sound(connection, *arguments, **options)
        made.append(connection)

    monkeypatch.setattr(socket.socket, "__init__", noted)
    monkeypatch.setattr(mesh_module, "RETRY_SECONDS", 0.001)
    given = ("127.0.0.1", 0) if is_beside else str(tmp_path / "s")

    def joined(call):
        clock, listener = Clock(), Listener(given, is_beside=is_beside)
        address = listener.address
        places = (listener, address) if rank == 0 else (address, listener)
        other = Started(places[1], 1 - rank, 2, clock=clock)
        found = call(lambda: mesh(places[0], rank, 2, secret=SECRET, timeout=SOON).close())
        if rank == 0:
            listener.close()
        clock.jump(address)
        with contextlib.suppress(PeerLost):
            other.link().close()
        left = [each for each in made if each.fileno() >= 0]
        made.clear()
        return found, left

    # What a return hands over that is interrupted nobody can close; at a `try` no signal is looked for.
    files = {"line.py", "listener.py", "mesh.py"}
    lines = [
        (file, line, event, time)
        for file, line, event, time in joined(places_of)[0]
        if event == "line" and Path(file).name in files and linecache.getline(file, line).strip() != "try:"
    ]
    assert len(lines) > 50
    for at in lines:
        assert joined(lambda work, at=at: interrupted_at(at, work))[1] == [], at
