"""TLS: the same sums, nothing in plain on the wire, and whoever has no certificate of the authority is told so."""

import contextlib
import logging
import re
import shutil
import socket
import ssl
import sys
from functools import partial

import certificates
import pytest
from channel import TOKEN, Channel, knock
from faulty import Between, Reset, Slices, Way
from test_exchange_mesh import Clock, Started, start
from transports import SMALL, SOON, bound, contributions, leave_together, on_all, outcomes, rank_order_sum, tcp_pair

from gradengine.errors import CallerError, ExchangeError, HandshakeRefused, PeerLost
from gradengine.exchange import GradientServer, Progress, WorkerClient, connect
from gradengine.exchange.addresses import connect_once
from gradengine.exchange.linked import Exchange
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.listener import Listener, nameless
from gradengine.exchange.tls import Certificates, certificates_of
from gradengine.exchange.wire import Hello, Nonce
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
    listener = Listener(("127.0.0.1", 0), TOKEN)
    yield listener
    listener.close()


# ---- the sums ----


@pytest.mark.parametrize("size", [1, 5000, 300_000])
def test_the_sums_of_step_after_step_are_those_over_plain_connections(listener, run, size):
    layout = GradientLayout.of({"layers.1": (size,), "layers.0": (7,)})
    parts = contributions(layout, 3)
    links = [rank.link() for rank in start(listener, 3, range(3), tls=run, link="tcp")]
    exchanges = [Exchange(link, timeout=SOON, join_timeout=SOON, bucket_bytes=1 << 18) for link in links]
    workers = bound(exchanges, layout, parts)
    for _ in range(3):
        on_all(lambda worker: worker.sum(), workers)
        assert all(worker.arena.tobytes() == rank_order_sum(parts).tobytes() for worker in workers)
        on_all(lambda worker: worker.next_step(parts[worker.exchange.rank]), workers)
    on_all(leave_together, workers)


@pytest.mark.parametrize("is_served", [False, True], ids=["mesh", "served"])
def test_connect_and_a_server_take_a_folder_or_the_environments(folders, monkeypatch, is_served):
    folder = str(folders / "node1")
    with contextlib.ExitStack() as stack:
        if is_served:
            server = stack.enter_context(GradientServer(2, tls=folder))
            monkeypatch.setenv("GRADENGINE_TLS", folder)
            exchanges = [WorkerClient(server.address, 0, 2), connect(server.url, 1, 2, served=True)]
        else:
            first = connect("tcp://127.0.0.1:0", 0, 2, tls=folder, link="tcp")
            monkeypatch.setenv("GRADENGINE_TLS", folder)
            exchanges = [first, connect(first.url, 1, 2)]
        parts = contributions(SMALL, 2)
        workers = bound(exchanges, SMALL, parts)
        on_all(lambda worker: worker.sum(), workers)
        assert all(worker.arena.tobytes() == rank_order_sum(parts).tobytes() for worker in workers)
        assert all(is_encrypted(each) for exchange in exchanges for each in sockets_of(exchange))
        on_all(leave_together, workers)


def sockets_of(exchange):
    return [connection.socket for theirs in exchange._link._connections.values() for connection in theirs]


def is_encrypted(connection):
    return isinstance(connection, ssl.SSLSocket) and connection.version() == "TLSv1.3"


def test_ranks_on_one_host_go_on_over_unix_sockets(run, listener):
    """What they send does not leave the host; they have met over TLS."""
    near = Listener(("127.0.0.1", 0), TOKEN, is_beside=True)
    links = [rank.link() for rank in start(near, 2, range(2), tls=run, link="unix")]
    assert [link.name for link in links] == ["unix"] * 2
    for link in links:
        link.close()


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


class SmallPieces(Slices):
    read = Flipped.read


class ResetAt(Reset):
    read = Flipped.read


def a_step(certificates, *ways):
    """What a step of two ranks ends with, and their arenas; their bytes go these ways, to rank 1 and from it."""
    middle = Between(tcp_pair, *ways[::-1])
    ends = [middle.second, middle.first]
    if certificates is not None:
        ends = [certificates.encrypted(end, is_called=rank == 0) for rank, end in enumerate(ends)]
    links = [SocketLink(rank, {1 - rank: [end]}) for rank, end in enumerate(ends)]
    exchanges = [Exchange(link, timeout=SOON, join_timeout=SOON, bucket_bytes=4) for link in links]
    arenas = contributions(SMALL, 2)

    def work(exchange):
        exchange.bind(SMALL, arenas[exchange.rank], Progress())
        exchange.start(*SMALL.spans)
        exchange.wait()
        exchange.barrier()

    found = outcomes(work, exchanges)
    for exchange in exchanges:
        exchange.close()
    middle.end()
    return found, arenas


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_no_gradient_can_be_seen_on_the_wire(run, is_encrypted):
    ways = Recorded(), Recorded()
    found, arenas = a_step(run if is_encrypted else None, *ways)
    assert found == [None] * 2
    seen = bytes(ways[0].bytes + ways[1].bytes)
    slot = max(SMALL.slots, key=lambda slot: slot.size)
    (total,) = {arena[slot.offset :][:2].tobytes() for arena in arenas}
    assert total == rank_order_sum(contributions(SMALL, 2))[slot.offset :][:2].tobytes()
    assert (total in seen) is not is_encrypted


def test_what_comes_a_few_bytes_at_a_time_is_summed_as_ever(run):
    found, arenas = a_step(run, SmallPieces(1), SmallPieces(2))
    assert found == [None] * 2
    assert all(arena.tobytes() == rank_order_sum(contributions(SMALL, 2)).tobytes() for arena in arenas)


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("part", [0.0, 0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("fault", [Flipped, ResetAt])
def test_what_is_changed_or_cut_on_the_way_is_an_error_and_never_another_sum(run, way, part, fault):
    whole = Recorded(), Recorded()
    assert a_step(run, *whole)[0] == [None] * 2
    ways = [Recorded(), Recorded()]
    ways[way] = fault(int(len(whole[way].bytes) * part))
    found, arenas = a_step(run, *ways)
    assert any(isinstance(each, ExchangeError) for each in found), found
    assert all(each is None or isinstance(each, ExchangeError) for each in found), found
    assert "_ssl" not in str(found)  # where in OpenSSL's source it was seen
    parts = contributions(SMALL, 2)
    possible = [*parts, rank_order_sum(parts)]
    for arena in arenas:
        for slot in SMALL.slots:
            here = slice(slot.offset, slot.stop)
            assert arena[here].tobytes() in [each[here].tobytes() for each in possible]


# ---- who is refused ----


def refused(listener, first, second):
    """What rank 0 and rank 1 say that have these certificates: rank 1 at once, rank 0 at its deadline."""
    clock = Clock()
    ranks = [Started(listener, 0, 2, clock=clock, tls=first), Started(listener.address, 1, 2, tls=second)]
    told = ranks[1].error()
    clock.jump(listener.address)
    return ranks[0].error(), told


def test_a_certificate_of_another_authority(listener, folders, run, caplog):
    caplog.set_level(logging.INFO, "gradengine.exchange")
    (kind, by_first), told = refused(listener, run, Certificates(folders / "node1"))
    assert "rank 0 refuses a connection from 127.0.0.1: TLS with a caller failed (" in caplog.text
    assert told[0] is HandshakeRefused
    assert "TLS with rank 0 failed (its certificate is not taken: " in told[1]
    assert kind is PeerLost
    assert "(last refused here: TLS with a caller failed (" in by_first
    assert "docs/tls.md" in by_first


def test_a_certificate_that_only_the_called_rank_does_not_take(listener, folders, run, tmp_path):
    """The caller has both authorities, and hears only after it has shown its own certificate."""
    for name in ("tls.crt", "tls.key"):
        shutil.copy(folders / "node1" / name, tmp_path)
    (tmp_path / "ca.crt").write_text((folders / "run/ca.crt").read_text() + (folders / "node1/ca.crt").read_text())
    (_, by_first), told = refused(listener, run, Certificates(tmp_path))
    assert told[0] is HandshakeRefused
    assert re.search(r"TLS with rank 0 failed \(the other end says: unknown ca\)", told[1]), told
    assert "(last refused here: TLS with a caller failed (its certificate is not taken: " in by_first


def test_one_that_has_ended(listener, tmp_path, run):
    certificates.shell("openssl req -newkey rsa:2048 -nodes -subj /CN=past -keyout tls.key -out asked", tmp_path)
    certificates.shell(
        "openssl x509 -req -in asked -signkey tls.key -days -1 -out tls.crt; cp tls.crt ca.crt", tmp_path
    )
    _, told = refused(listener, Certificates(tmp_path), Certificates(tmp_path))
    assert "TLS with rank 0 failed (its certificate is not taken: certificate has expired" in told[1]


def test_a_rank_without_certificates_hears_of_them(listener, run):
    (_, by_first), told = refused(listener, run, None)
    assert told[0] is HandshakeRefused
    assert "rank 0 refuses: TLS with a caller failed (it does not speak TLS); give all ranks tls=" in told[1]
    assert "(last refused here: TLS with a caller failed (" in by_first


def test_a_rank_with_certificates_where_rank_0_has_none(listener, run):
    (_, by_first), told = refused(listener, None, run)
    assert told[0] is HandshakeRefused
    assert "TLS with rank 0 failed (it does not speak TLS)" in told[1]
    assert "(last refused here: not a gradengine message: got 16030" in by_first
    assert "; if it calls with TLS, give all ranks tls=)" in by_first


def pass_on(ends, messages):
    """Pass on so many messages each way, as whoever is between rank 1 and rank 0."""
    rank_1, rank_0 = (Channel(end, "an end") for end in ends)
    for sender, receiver in [(rank_1, rank_0), (rank_0, rank_1)] * messages:
        receiver.send(*sender.receive())


def over_tcp(stack, front, back, relay):
    """Connections with rank 1, which calls `front`, and with rank 0 at `back`; encrypted by these certificates."""
    front.socket.setblocking(True)
    ends = [front.socket.accept()[0], connect_once(back.address, SOON)]
    if relay is not None:
        ends = [relay.encrypted(end, is_called=is_called) for end, is_called in zip(ends, [True, False], strict=True)]
    return [stack.enter_context(end) for end in ends]


def over_sockets_beside(stack, front, back, relay):
    """The same by Unix sockets, whose names the relay says, and hears, over TCP."""
    rank_1, rank_0 = (Channel(end, "an end") for end in over_tcp(stack, front, back, relay))
    rank_0.send(rank_1.expect(Hello)[0])
    nonce, _ = rank_0.expect(Nonce)
    rank_1.send(Nonce(nonce.nonce, front.beside))
    front.nearby[0].setblocking(True)
    ends = front.nearby[0].accept()[0], connect_once(nameless(nonce.beside), SOON)
    return [stack.enter_context(end) for end in ends]


@pytest.fixture(params=[over_tcp, over_sockets_beside])
def between(request):
    """A function that stands between two ranks, their own listener, and one that rank 1 takes for it."""
    is_beside = request.param is over_sockets_beside
    if is_beside and sys.platform != "linux":
        pytest.skip("sockets without a path are Linux's")
    with contextlib.ExitStack() as stack:
        back, front = (
            stack.enter_context(contextlib.closing(Listener(("127.0.0.1", 0), TOKEN, is_beside=is_beside)))
            for _ in range(2)
        )
        yield partial(request.param, stack, front, back), back, front


def test_whoever_is_between_two_ranks_with_a_certificate_and_no_token_can_pass_nothing_on(between, folders):
    stand, back, front = between
    own, relay, clock = Certificates(folders / "node1"), Certificates(folders / "node2"), Clock()
    first = Started(back, 0, 2, clock=clock, tls=own)
    second = Started(front.address, 1, 2, tls=own)
    pass_on(stand(relay), messages=2)
    kind, told = second.error()
    assert kind is HandshakeRefused
    assert told == (
        "rank 0 refuses: rank 1 has another token, or is not the one at the other end of TLS; start all with the same "
        "token=, and connect them directly: a proxy that decrypts TLS is refused"
    )
    clock.jump(back.address)
    assert "(last refused here: rank 1 has another token, or is not the one at" in first.error()[1]


def test_without_tls_it_can(between):
    """Else the test before would prove nothing."""
    stand, back, front = between
    ranks = Started(back, 0, 2), Started(front.address, 1, 2)
    pass_on(stand(None), messages=3)
    for link in [rank.link() for rank in ranks]:
        link.close()


def test_ranks_on_one_host_with_certificates_of_their_own_go_on_over_unix_sockets(folders):
    """Where there are such sockets; each rank's proof holds for the certificate of the rank that it called over TCP."""
    own = [Certificates(folders / name) for name in ("node1", "node2", "node1")]
    with contextlib.closing(Listener(("127.0.0.1", 0), TOKEN, is_beside=sys.platform == "linux")) as near:
        ranks = [Started(near if rank == 0 else near.address, rank, 3, tls=own[rank]) for rank in range(3)]
        links = [rank.link() for rank in ranks]
    assert {link.name for link in links} == ({"shared_memory"} if sys.platform == "linux" else {"tcp"})
    for link in links:
        link.close()


def test_a_certificate_without_the_token(listener, run):
    clock = Clock()
    first, second = (
        Started(at, rank, 2, clock=clock, tls=run, token=token)
        for rank, (at, token) in enumerate([(listener, TOKEN), (listener.address, "another secret of ranks")])
    )
    assert second.error()[0] is HandshakeRefused
    clock.jump(listener.address)
    assert "rank 1 has another token" in first.error()[1]


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000])
def test_strangers_that_do_not_speak_tls_or_stop_in_it_hold_up_nobody(listener, run, said):
    with contextlib.closing(knock(listener.address)) as stranger:
        stranger._socket.sendall(said)
        for link in [rank.link() for rank in start(listener, 3, range(3), tls=run, link="tcp")]:
            link.close()


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


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_a_file_that_is_missing_or_no_pem_is_named_and_nothing_is_opened(folders, tmp_path, name):
    shutil.copytree(folders / "run", tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("no certificate")
    loaded = name if name == "ca.crt" else "tls.crt with tls.key"
    with pytest.raises(
        CallerError, match=rf"^{loaded} in '{tmp_path}' cannot be used \([A-Za-z ]+\): expected PEM, and"
    ):
        connect("tcp://127.0.0.1:0", 0, 2, tls=tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CallerError, match=rf"cannot read '{tmp_path / name}' for TLS: No such file"):
        connect("tcp://127.0.0.1:0", 0, 2, tls=tmp_path)


def test_a_key_of_another_certificate(folders, tmp_path):
    shutil.copytree(folders / "run", tmp_path, dirs_exist_ok=True)
    shutil.copy(folders / "node1/tls.key", tmp_path)
    with pytest.raises(CallerError, match=r"\(key values mismatch\).*expected PEM, and tls.key the key of tls.crt"):
        Certificates(tmp_path)


def test_a_key_with_a_password_is_refused_where_openssl_would_ask_on_the_terminal(folders, tmp_path):
    shutil.copytree(folders / "run", tmp_path, dirs_exist_ok=True)
    certificates.shell(
        "openssl pkcs8 -topk8 -passout pass:secret -in tls.key -out locked && mv locked tls.key", tmp_path
    )
    with pytest.raises(CallerError, match=r"tls.key' has a password"):
        Certificates(tmp_path)


@pytest.mark.parametrize("folder", [3, b"run", True])
def test_what_is_no_folder(folder):
    with pytest.raises(CallerError, match="tls is not a folder"):
        certificates_of(folder)


def test_mpi_takes_none(run):
    with pytest.raises(CallerError, match=r"takes no tls: MPI sends the bytes"):
        connect("mpi://", tls=run.folder)


@pytest.mark.parametrize("token", ["", TOKEN], ids=["no token", "token"])
def test_without_a_token_ranks_of_one_host_need_certificates_too(folders, token):
    """A Unix socket without a path can be called by any user of the host."""
    first = connect("tcp://127.0.0.1:0", 0, 2, tls=folders / "run", token=token)
    assert bool(first._link._listener.nearby) is (bool(token) and sys.platform == "linux")
    first.close()


@pytest.mark.parametrize(
    "made",
    [
        "cat own ca.crt > tls.crt",
        "openssl x509 -text -in own > tls.crt; cat ca.crt >> tls.crt",
        "openssl x509 -trustout -in own > tls.crt; cat ca.crt >> tls.crt",
        "sed 's/^/# /' ca.crt > tls.crt; cat own >> tls.crt",
        "sed 's/$/\\r/' own > tls.crt",
    ],
    ids=["chain", "text before", "trusted", "another commented out", "CRLF"],
)
def test_proofs_hold_for_the_certificate_that_openssl_shows_out_of_its_file(folders, tmp_path, listener, made):
    shutil.copytree(folders / "node1", tmp_path, dirs_exist_ok=True)
    certificates.shell(f"mv tls.crt own; {made}", tmp_path)
    assert Certificates(tmp_path).own_hash == Certificates(folders / "node1").own_hash
    ranks = start(listener, 2, range(2), tls=Certificates(tmp_path), link="tcp")
    for link in [rank.link() for rank in ranks]:
        link.close()


def test_files_that_are_replaced_while_they_are_read(folders, tmp_path, monkeypatch):
    """Else one rank would show a certificate, and prove that it has another."""
    shutil.copytree(folders / "node1", tmp_path, dirs_exist_ok=True)
    made = ssl.SSLContext.load_cert_chain

    def load(self, *arguments, **options):
        made(self, *arguments, **options)
        shutil.copytree(folders / "node2", tmp_path, dirs_exist_ok=True)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load)
    with pytest.raises(CallerError, match="were replaced while they were read; connect again"):
        Certificates(tmp_path)
    assert Certificates(tmp_path).own_hash == Certificates(folders / "node2").own_hash


def test_a_path_that_is_none():
    with pytest.raises(CallerError, match="for TLS: embedded null byte"):
        Certificates("a\0b")
    with pytest.raises(CallerError, match="tls is not a folder: got ''"):
        certificates_of("")
