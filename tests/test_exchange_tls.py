"""TLS: the same sums, nothing in plain on the wire, and whoever has no certificate of the authority is told so."""

import contextlib
import logging
import shutil
import socket
import ssl
from functools import partial

import certificates
import pytest
from channel import SECRET, Channel, knock
from faulty import Between, Way
from test_exchange_mesh import Clock, Started, form, start
from transports import (
    HAS_SHARED_MEMORY,
    SMALL,
    SOON,
    Worker,
    bound,
    contributions,
    leave_together,
    on_all,
    rank_order_sum,
    tcp_pair,
)

from gradengine.errors import CallerError, HandshakeRefused, PeerLost
from gradengine.exchange import GradientServer, connect, mesh
from gradengine.exchange.addresses import Listener, connect_once
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.launchers import secret_in
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.tls import Certificates, certificates_of
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def folders():
    return certificates.folders()


@pytest.fixture
def run(folders):
    return Certificates(folders / "run")


@pytest.fixture
def listener():
    listener = Listener(("127.0.0.1", 0), SECRET)
    yield listener
    listener.close()


# ---- the sums ----


LARGE = GradientLayout.of({"layers.1": (200_000,), "layers.0": (7,)})


@pytest.mark.parametrize(("is_served", "layout"), [(False, LARGE), (True, SMALL)], ids=["mesh", "served"])
def test_connect_and_a_server_take_a_folder_or_the_environments(folders, monkeypatch, is_served, layout):
    folder, options = str(folders / "node1"), {"timeout": SOON, "join_timeout": SOON}
    with contextlib.ExitStack() as stack:
        if is_served:
            server = stack.enter_context(GradientServer(2, tls=folder))
            monkeypatch.setenv("GRADENGINE_TLS", folder)
            exchanges = [connect(server.url, rank, 2, served=True) for rank in range(2)]
        else:
            options |= {"bucket_bytes": 1 << 18}
            first = connect("tcp://127.0.0.1:0", 0, 2, tls=folder, link="tcp", **options)
            monkeypatch.setenv("GRADENGINE_TLS", folder)
            exchanges = [first, connect(first.url, 1, 2, **options)]
        parts = contributions(layout, 2)
        workers = bound(exchanges, layout, parts)
        for _ in range(2):
            on_all(lambda worker: worker.sum(), workers)
            assert all(worker.arena.tobytes() == rank_order_sum(parts).tobytes() for worker in workers)
            on_all(lambda worker: worker.next_step(parts[worker.exchange.rank]), workers)
        sockets = [each.socket for exchange in exchanges for each in exchange._link._connections.values()]
        assert all(isinstance(each, ssl.SSLSocket) and each.version() == "TLSv1.3" for each in sockets)
        on_all(leave_together, workers)


# ---- what goes over the wire ----


class Recorded(Way):
    """Carries bytes as they are, and keeps them."""

    def __init__(self):
        super().__init__()
        self.bytes = bytearray()

    def read(self, data):
        self.bytes += data


class Flipped(Way):
    """Flips a bit of the byte at this place, of all that go this way."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def read(self, data):
        """It cannot tell messages from each other."""

    def changed(self, data):
        if 0 <= self.place - self.carried < len(data):
            data[self.place - self.carried] ^= 1
        return data


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_no_gradient_can_be_seen_on_the_wire(run, is_encrypted):
    ways = Recorded(), Recorded()
    middle = Between(tcp_pair, *ways)
    ends = [middle.second, middle.first]
    if is_encrypted:
        ends = [run.encrypted(end, is_called=rank == 0) for rank, end in enumerate(ends)]
    links = [SocketLink(rank, {1 - rank: end}) for rank, end in enumerate(ends)]
    exchanges = [Exchange(link, timeout=SOON, join_timeout=SOON, bucket_bytes=4) for link in links]
    parts = contributions(SMALL, 2)
    workers = bound(exchanges, SMALL, parts)
    on_all(Worker.sum, workers)
    on_all(leave_together, workers)
    middle.end()
    seen = bytes(ways[0].bytes + ways[1].bytes)
    slot = max(SMALL.slots, key=lambda slot: slot.size)
    assert (rank_order_sum(parts)[slot.offset :][:2].tobytes() in seen) is not is_encrypted


# ---- who is refused ----


def refused(listener, first, second, by_first, told, **options):
    """Rank 0 and rank 1 have these certificates and say these words: rank 1 at once, rank 0 at its deadline."""
    clock = Clock()
    ranks = [Started(listener, 0, 2, clock=clock, tls=first), Started(listener.address, 1, 2, tls=second, **options)]
    (kind, heard), _ = ranks[1].error(), clock.jump(listener.address)
    assert kind is HandshakeRefused
    kind, noticed = ranks[0].error()
    assert kind is PeerLost
    assert told in heard
    assert by_first in noticed
    assert "_ssl" not in heard + noticed  # where in OpenSSL's source it was seen


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "by_rank_0", "by_rank_1"),
    [
        ("run", "node1", "last refused here: TLS with a caller failed (", "(its certificate is rejected: "),
        ("run", "both", "its certificate is rejected: ", "alert unknown ca"),  # known once it is shown
        ("past", "past", "", "certificate has expired"),
        ("run", None, "TLS with a caller failed", "it does not speak TLS"),
        (None, "run", "sent an invalid head", "it does not speak TLS"),
    ],
)
def test_who_has_no_certificate_that_is_taken(listener, folders, tmp_path, of_rank_0, of_rank_1, by_rank_0, by_rank_1):
    shutil.copytree(folders / "node1", tmp_path, dirs_exist_ok=True)
    if of_rank_1 == "both":
        (tmp_path / "ca.crt").write_text((folders / "run/ca.crt").read_text() + (folders / "node1/ca.crt").read_text())
    elif of_rank_1 == "past":
        made = "openssl req -new -key tls.key -subj /CN=past | openssl x509 -req -signkey tls.key -days -1 -out tls.crt"
        certificates.shell(f"{made}; cp tls.crt ca.crt", tmp_path)
    places = {"run": folders / "run", "node1": folders / "node1", "both": tmp_path, "past": tmp_path}
    own = [name and Certificates(places[name]) for name in (of_rank_0, of_rank_1)]
    refused(listener, *own, by_rank_0, by_rank_1)


def test_a_certificate_without_the_secret(listener, run, caplog):
    caplog.set_level(logging.INFO, "gradengine.exchange")
    told = "rank 1 has a different secret"
    refused(listener, run, run, told, told, secret="another secret of ranks")
    assert "rank 0 refuses a connection from 127.0.0.1: " in caplog.text


def pass_on(ends, messages):
    """Pass on so many messages each way, as whoever is between rank 1 and rank 0."""
    rank_1, rank_0 = (Channel(end, "an end") for end in ends)
    for sender, receiver in [(rank_1, rank_0), (rank_0, rank_1)] * messages:
        kind, fields = sender.receive()
        receiver.send(kind, *fields)


def over_tcp(stack, front, back, relay):
    """Connections with rank 1, which calls `front`, and with rank 0 at `back`; encrypted by these certificates."""
    front.socket.setblocking(True)
    ends = [front.socket.accept()[0], connect_once(back.address, SOON)]
    if relay is not None:
        ends = [relay.encrypted(end, is_called=is_called) for end, is_called in zip(ends, [True, False], strict=True)]
    return [stack.enter_context(end) for end in ends]


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_whoever_is_between_two_ranks_with_a_certificate_and_no_secret_can_pass_nothing_on(
    listener, folders, is_encrypted
):
    """But without TLS it can, else this would prove nothing."""
    own, relay, clock = Certificates(folders / "node1"), Certificates(folders / "node2"), Clock()
    options = {"link": "tcp"} | ({"tls": own} if is_encrypted else {})
    with contextlib.closing(Listener(("127.0.0.1", 0), SECRET)) as front, contextlib.ExitStack() as stack:
        first = Started(listener, 0, 2, clock=clock, **options)
        second = Started(front.address, 1, 2, **options)
        ends = over_tcp(stack, front, listener, relay if is_encrypted else None)
        pass_on(ends, messages=2 if is_encrypted else 3)
        if not is_encrypted:
            form([first, second])
            return
        kind, told = second.error()
        assert kind is HandshakeRefused
        assert "rank 1 has a different secret" in told
        assert "a proxy that decrypts TLS" in told
        clock.jump(listener.address)
        assert "(last refused here: rank 1 has a different secret" in first.error()[1]


@pytest.mark.parametrize("secret", ["", SECRET], ids=["no secret", "secret"])
def test_ranks_on_one_host_with_certificates_of_their_own_meet_again_without_them(folders, secret):
    """In a folder of their user alone; what they send does not leave the host."""
    own = [Certificates(folders / name) for name in ("node1", "node2", "node1")]
    with contextlib.closing(Listener(("127.0.0.1", 0), secret)) as listener:
        ranks = [(listener if rank == 0 else listener.address, rank) for rank in range(3)]
        links = form([Started(at, rank, 3, tls=own[rank], secret=secret) for at, rank in ranks])
    assert {link.name for link in links} == {"shared_memory" if HAS_SHARED_MEMORY else "unix"}


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000])
def test_strangers_that_do_not_speak_tls_or_stop_in_it_hold_up_nobody(listener, run, said):
    with contextlib.closing(knock(listener.address)) as stranger:
        stranger._socket.sendall(said)
        form(start(listener, 3, range(3), tls=run, link="tcp"))


def test_an_older_tls_is_refused(listener, run, folders):
    clock = Clock()
    first = Started(listener, 0, 2, clock=clock, tls=run)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(listener.address) as plain, pytest.raises(ssl.SSLError, match=r"(?i)version"):
        context.wrap_socket(plain)
    clock.jump(listener.address)
    assert "unsupported protocol" in first.error()[1]


# ---- the folder ----


FILES = ("ca.crt", "tls.crt", "tls.key")
UNUSABLE = [*((name, "rm {}") for name in FILES), *((name, "echo no certificate > {}") for name in FILES)]
UNUSABLE += [("tls.key", "openssl ecparam -genkey -name prime256v1 -noout -out {}")]  # of another certificate
UNUSABLE += [("tls.crt", "openssl x509 -trustout -in {} -out trusted && mv trusted {}")]
# OpenSSL would ask on the terminal.
UNUSABLE += [("tls.key", "openssl pkcs8 -topk8 -passout pass:secret -in {} -out locked && mv locked {}")]


@pytest.mark.parametrize(("name", "made"), UNUSABLE)
def test_a_file_that_cannot_be_used_is_named(folders, tmp_path, name, made):
    shutil.copytree(folders / "run", tmp_path, dirs_exist_ok=True)
    certificates.shell(made.replace("{}", name), tmp_path)
    with pytest.raises(CallerError, match="password" if "pkcs8" in made else name):
        connect("tcp://127.0.0.1:0", 0, 2, tls=tmp_path)


def test_what_leaves_the_host_in_plain_is_warned_of_by_each_rank(run, tmp_path, caplog, monkeypatch):
    def formed(address, tls=None):
        link = "tcp" if isinstance(address, tuple) else None
        form(start(Listener(address, SECRET), 2, range(2), tls=tls, link=link))
        return sum("unencrypted: pass tls=" in said for said in caplog.messages)

    assert formed(("127.0.0.1", 0)) == 0
    monkeypatch.setattr(mesh, "is_loopback", lambda host: host != "127.0.0.1")  # as if that were another host's
    assert (formed(str(tmp_path / "s")), formed(("127.0.0.1", 0), run), formed(("127.0.0.1", 0))) == (0, 0, 2)


def test_a_secret_that_other_users_can_open_is_warned_of(folders, tmp_path, caplog):
    shutil.copytree(folders / "run", tmp_path / "run")
    secret, key = tmp_path / "secret", tmp_path / "run" / "tls.key"
    secret.write_text(SECRET)
    for mode in (0o600, 0o640, 0o644, 0o600):
        for path in (key, secret):
            path.chmod(mode)
        Certificates(tmp_path / "run")
        assert secret_in(secret) == SECRET
    assert [
        f"{path}'" in said and f"(mode {mode})" in said
        for said, (mode, path) in zip(
            caplog.messages, [(640, key), (640, secret), (644, key), (644, secret)], strict=True
        )
    ] == [True] * 4
    assert all("chmod 600" in said and SECRET not in said for said in caplog.messages)


def test_what_is_no_folder_and_mpi_takes_none(run):
    calls = [partial(certificates_of, each) for each in (3, b"run", True, "", "a\0b")]
    for call in (*calls, partial(connect, "mpi://", tls=run.folder)):
        with pytest.raises(CallerError, match=r"tls|TLS"):
            call()


@pytest.mark.parametrize(
    "made",
    [
        "cat own ca.crt > tls.crt",
        "openssl x509 -text -in own > tls.crt; cat ca.crt >> tls.crt",
        "sed 's/^/# /' ca.crt > tls.crt; cat own >> tls.crt",
        "sed 's/$/\\r/' own > tls.crt",
    ],
    ids=["chain", "text before", "another commented out", "CRLF"],
)
def test_proofs_hold_for_the_certificate_that_openssl_shows_out_of_its_file(folders, tmp_path, listener, made):
    shutil.copytree(folders / "node1", tmp_path, dirs_exist_ok=True)
    certificates.shell(f"mv tls.crt own; {made}", tmp_path)
    assert Certificates(tmp_path).own_hash == Certificates(folders / "node1").own_hash
    form(start(listener, 2, range(2), tls=Certificates(tmp_path), link="tcp"))
