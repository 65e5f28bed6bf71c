"""Where sockets listen: an address that is taken, left over, too long or of no system is said so by name."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

import pytest
from channel import SECRET
from transports import SOON, free_port

from gradengine.errors import CallerError
from gradengine.exchange import addresses, connect
from gradengine.exchange.addresses import Listener, address_of, connect_once, shown, this_host

pytestmark = pytest.mark.timeout(150)


def test_port_in_use_is_named_and_can_be_used_again_at_once():
    with contextlib.closing(Listener(("127.0.0.1", 0))) as first:
        address = first.address
        with pytest.raises(CallerError, match=rf"cannot listen at 127\.0\.0\.1:{address[1]} .*in use"):
            Listener(address)
        client = connect_once(address, 1.0)
        first.socket.accept()[0].close()
        client.close()
    Listener(address).close()


def test_unix_path_in_use_is_named_and_one_left_over_is_taken(tmp_path):
    path = str(tmp_path / "socket")
    first = Listener(path)
    with pytest.raises(CallerError, match=r"cannot listen at .*socket .*another process may use it"):
        Listener(path)
    first.socket.close()  # as a killed process leaves it: the path stays
    assert (tmp_path / "socket").is_socket()
    with contextlib.closing(Listener(path)), contextlib.closing(connect_once(path, 1.0)):
        pass


def test_file_in_the_way_is_not_removed(tmp_path):
    (tmp_path / "precious").write_text("data")
    with pytest.raises(CallerError):
        Listener(str(tmp_path / "precious"))
    assert (tmp_path / "precious").read_text() == "data"


# ---- ports ----


def test_a_listener_takes_the_first_free_port_of_a_range_and_no_other():
    with contextlib.closing(Listener(("127.0.0.1", 0))) as taken:
        port = taken.address[1]
        with pytest.raises(CallerError, match=f"no port of {port}-{port} is free"):
            Listener(("127.0.0.1", 0), ports=range(port, port + 1))
        with contextlib.closing(Listener(("127.0.0.1", 0), ports=range(port, 1 << 16))) as first:
            assert first.address[1] > port


# ---- hosts ----


def test_this_host_is_the_same_for_processes_with_one_loopback_user_and_files(monkeypatch):
    assert this_host() == this_host()
    found = {this_host()}
    monkeypatch.setattr(addresses.os, "geteuid", lambda: 4711)
    found.add(this_host())
    if sys.platform == "linux":
        monkeypatch.setattr(addresses.os, "readlink", lambda path: path)
        found.add(this_host())
        monkeypatch.setattr(addresses, "Path", lambda _: Path("/nowhere"))
        monkeypatch.setattr(addresses.sys, "platform", "darwin")
        found.add(this_host())
        assert len(found) == 4
    assert len(found) > 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_without_proc_no_other_process_is_on_this_host(monkeypatch):
    monkeypatch.setattr(addresses, "Path", lambda _: Path("/nowhere"))
    assert this_host() != this_host()


@pytest.mark.parametrize("path", ["/nowhere/socket", "/tmp/" + "x" * 200])
def test_unix_path_that_cannot_be_or_nobody_there(path):
    with pytest.raises(CallerError, match=r"cannot listen at .* [(](?!None)"):
        Listener(path)
    with pytest.raises(OSError, match=r"."):
        connect_once(path, 0.1)
    with pytest.raises(ConnectionRefusedError):
        connect_once(("127.0.0.1", free_port()), SOON)


def test_connection_with_itself_is_none(monkeypatch):
    address = ("127.0.0.1", free_port())

    class GivenThatPort(socket.socket):
        """What the kernel does once in many tries where nobody listens at an ephemeral port."""

        def connect(self, there):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(there)
            super().connect(there)

    monkeypatch.setattr(addresses.socket, "socket", GivenThatPort)
    with pytest.raises(OSError, match="connected to itself"):
        connect_once(address, 0.1)


def named(monkeypatch, **numbers):
    """Have the resolver give these addresses for these names."""
    real = socket.getaddrinfo

    def found(host, *arguments, **options):
        return [each for number in numbers.get(host, [host]) for each in real(number, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this platform")
@pytest.mark.parametrize("numbers", [["::1"], ["::1", "127.0.0.1"], ["127.0.0.1", "::1"]])
def test_ranks_join_by_a_name_whatever_addresses_it_has(monkeypatch, numbers):
    named(monkeypatch, six=numbers)
    with connect("tcp://six:0", 0, 2, secret=SECRET) as exchange:
        port = address_of(exchange.url)[1]
        with contextlib.closing(connect_once(("six", port), SOON)) as connection:
            assert connection.getpeername()[0] == ("::1" if len(numbers) == 1 else "127.0.0.1")
    for there in ("::1", "127.0.0.1"):
        with contextlib.closing(Listener((there, 0), SECRET)) as listener:
            port = listener.address[1]
            if there in numbers:
                connect_once(("six", port), SOON).close()
            else:
                with pytest.raises(ConnectionRefusedError):
                    connect_once(("six", port), SOON)


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
    for use in (Listener, lambda given: connect_once(given, 0.1)):
        with pytest.raises(CallerError, match=f"no exchange over {url}"):
            use(address)
