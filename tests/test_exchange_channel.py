"""One socket that speaks messages: whole whatever the pieces, and any fault is a PeerLost or ProtocolError at once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import tracemalloc

import pytest
from transports import SOON, free_port

from gradengine.errors import CallerError, PeerLost, ProtocolError
from gradengine.exchange import channel as channel_module
from gradengine.exchange.channel import Channel, connect_socket, listen_socket, shown
from gradengine.exchange.wire import PREFIX_BYTES, Gather, Gathered, Verdict, encode_head

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def pair():
    """A channel, and the bare socket of its peer."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "rank 7")
    channel.set_deadline(10.0)
    yield channel, theirs
    channel.close()
    theirs.close()


def in_pieces(peer, data, size):
    for start in range(0, len(data), size):
        peer.sendall(data[start : start + size])


# ---- whole messages ----


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_message_in_pieces_arrives_whole(pair, size):
    channel, peer = pair
    in_pieces(peer, encode_head(Gather(), 100) + bytes(range(100)) + encode_head(Verdict(7)), size)
    assert channel.expect(Gather) == (Gather(), bytes(range(100)))
    assert channel.expect(Verdict) == (Verdict(7), b"")


def test_payload_larger_than_any_buffer_is_sent_whole(pair):
    channel, peer = pair
    payload = bytes(range(256)) * (1 << 14)
    sender = threading.Thread(target=channel.send, args=(Gather(), memoryview(payload)))
    sender.start()
    received = bytearray()
    while len(received) < len(encode_head(Gather(), len(payload))) + len(payload):
        received += peer.recv(100_003)
    sender.join()
    assert received == encode_head(Gather(), len(payload)) + payload


def test_payload_is_received_into_the_callers_memory(pair):
    channel, peer = pair
    peer.sendall(encode_head(Gather(), 8) + b"12345678")
    memory = bytearray(b"-" * 12)
    assert channel.receive() == (Gather(), 8)
    channel.receive_into(memoryview(memory)[2:10])
    assert memory == b"--12345678--"


def test_one_thread_sends_while_another_receives(pair):
    channel, peer = pair
    other = Channel(peer, "rank 8")
    payload = bytes(1 << 22)

    def both(one):
        sender = threading.Thread(target=one.send, args=(Gather(), payload))
        sender.start()
        assert one.expect(Gather) == (Gather(), payload)
        sender.join()

    threads = [threading.Thread(target=both, args=(one,)) for one in (channel, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads)


# ---- faults ----


@pytest.mark.parametrize("cut", [0, 1, PREFIX_BYTES - 1, PREFIX_BYTES, PREFIX_BYTES + 5, -1])
def test_end_in_the_middle_of_a_message(pair, cut):
    channel, peer = pair
    peer.sendall((encode_head(Gather(), 4) + b"abcd")[:cut])
    peer.close()
    with pytest.raises(PeerLost, match=r"rank 7 closed the connection: got \d+ bytes, expected \d+ bytes"):
        channel.expect(Gather)


def test_reset_connection(pair):
    channel, peer = pair
    peer.close()
    with pytest.raises(PeerLost, match="connection with rank 7 broke while sending"):
        channel.send(Gather(), bytes(1 << 20))


@pytest.mark.parametrize("doing", ["receiving", "sending"])
def test_deadline_of_a_read_and_of_a_write(pair, doing):
    channel, _ = pair
    channel.set_deadline(0.05)
    with pytest.raises(PeerLost, match=rf"rank 7 broke while {doing} \(stood still too long\)"):
        channel.receive() if doing == "receiving" else channel.send(Gather(), bytes(1 << 24))


@pytest.mark.parametrize("doing", ["receiving", "sending"])
def test_close_wakes_who_reads_or_writes(pair, doing):
    channel, _ = pair
    channel.set_deadline(None)
    failures = []

    def work():
        try:
            channel.receive() if doing == "receiving" else channel.send(Gather(), bytes(1 << 24))
        except PeerLost as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "it should be blocked by now"
    channel.close()
    thread.join(SOON)
    assert not thread.is_alive()
    assert len(failures) == 1


def test_closing_twice_and_using_after(pair):
    channel, _ = pair
    channel.close()
    channel.close()
    channel.set_deadline(1.0)
    channel.finish_sending()
    channel.discard_until_end()
    for call in (channel.receive, lambda: channel.send(Gather())):
        with pytest.raises(PeerLost):
            call()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64), b"\xff" * 64, b"\x80\x04K\x01." * 9]
)
def test_garbage_is_no_message(pair, garbage):
    channel, peer = pair
    peer.sendall(garbage)
    with pytest.raises(ProtocolError, match="no gradengine message"):
        channel.receive()


def test_another_kind_than_expected(pair):
    channel, peer = pair
    peer.sendall(encode_head(Verdict(7)))
    with pytest.raises(ProtocolError, match="rank 7 sent another message: got verdict, expected gather"):
        channel.expect(Gather)


def test_no_memory_is_taken_for_what_is_only_claimed(pair):
    channel, peer = pair
    peer.sendall(encode_head(Gathered(), 2**32 - 1))
    tracemalloc.start()
    try:
        with pytest.raises(
            ProtocolError, match="payload of 'gathered' is too long: got 4294967295, expected at most 16"
        ):
            channel.expect(Gathered)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---- addresses ----


def test_port_in_use_is_named():
    with contextlib.closing(listen_socket(("127.0.0.1", 0))) as first:
        port = first.getsockname()[1]
        with pytest.raises(CallerError, match=rf"cannot listen at 127\.0\.0\.1:{port} \(.*in use\); .* port 0 for any"):
            listen_socket(("127.0.0.1", port))


def test_port_can_be_used_again_at_once():
    with contextlib.closing(listen_socket(("127.0.0.1", 0))) as first:
        address = first.getsockname()
        client = connect_socket(address, 1.0)
        connection, _ = first.accept()
        connection.close()
        client.close()
    listen_socket(address).close()


def test_unix_path_in_use_is_named_and_one_left_over_is_taken(tmp_path):
    path = str(tmp_path / "socket")
    first = listen_socket(path)
    with pytest.raises(CallerError, match=r"cannot listen at .*socket \(.*in use\)"):
        listen_socket(path)
    first.close()  # as a killed coordinator leaves it: the path stays
    assert (tmp_path / "socket").is_socket()
    with contextlib.closing(listen_socket(path)), contextlib.closing(connect_socket(path, 1.0)):
        pass


def test_file_in_the_way_is_not_removed(tmp_path):
    (tmp_path / "precious").write_text("data")
    with pytest.raises(CallerError, match="cannot listen"):
        listen_socket(str(tmp_path / "precious"))
    assert (tmp_path / "precious").read_text() == "data"


@pytest.mark.parametrize("path", ["/nowhere/socket", "/tmp/" + "x" * 200])
def test_unix_path_that_cannot_be(path):
    with pytest.raises(CallerError, match=r"cannot listen at .* [(](?!None)"):
        listen_socket(path)
    with pytest.raises(PeerLost, match=r"no coordinator at .* [(](?!None)"):
        connect_socket(path, 0.1)


@pytest.mark.parametrize("timeout", [0.0, 0.3])
def test_nobody_there(timeout):
    address, began = ("127.0.0.1", free_port()), time.monotonic()
    with pytest.raises(PeerLost, match=rf"no coordinator at {shown(address)} .* no connection in {timeout:g} s; start"):
        connect_socket(address, timeout)
    assert time.monotonic() - began < SOON


def test_waits_for_who_comes_later():
    address = ("127.0.0.1", free_port())
    listeners = []
    late = threading.Timer(0.15, lambda: listeners.append(listen_socket(address)))
    late.start()
    connect_socket(address, 10.0).close()
    late.join()
    listeners[0].close()


def test_connection_with_itself_is_none(monkeypatch):
    address = ("127.0.0.1", free_port())

    class GivenThatPort(socket.socket):
        """What the kernel does once in many tries where nobody listens at an ephemeral port."""

        def connect(self, there):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(there)
            super().connect(there)

    monkeypatch.setattr(channel_module.socket, "socket", GivenThatPort)
    with pytest.raises(PeerLost, match=r"no coordinator at .* \(only itself answers there\)"):
        connect_socket(address, 0.1)


@pytest.mark.parametrize(
    ("address", "text"), [(("::1", 5000), "[::1]:5000"), (("host", 1), "host:1"), ("/tmp/socket", "/tmp/socket")]
)
def test_addresses_are_shown_as_urls_write_them(address, text):
    assert shown(address) == text


# ---- systems ----


@pytest.mark.parametrize("missing", ["AF_UNIX", "sendmsg"])
@pytest.mark.parametrize(("address", "url"), [("/run/x", "unix:///run/x"), (("127.0.0.1", 1), "tcp://127.0.0.1:1")])
def test_a_system_without_posix_sockets_is_refused_by_name(monkeypatch, missing, address, url):
    """As Windows is: no AttributeError of Python's."""
    if missing == "AF_UNIX":
        monkeypatch.delattr(socket, "AF_UNIX")
    else:
        monkeypatch.setattr(socket, "socket", object)
    for use in (listen_socket, lambda given: connect_socket(given, 0.1)):
        with pytest.raises(CallerError, match=f"no exchange over {url}: this system's sockets are not POSIX: got"):
            use(address)
