"""A server alone: where it listens, how it serves one group after another, and that closing it leaves nothing."""

from __future__ import annotations

import contextlib
import math
import threading

import numpy as np
import pytest
from channel import SECRET
from interrupts import interrupted_at, places_of
from test_exchange_mesh import call, told_by
from transports import (
    SMALL,
    SOON,
    Worker,
    bound,
    contributions,
    leave_together,
    on_all,
    outcomes,
    package_threads,
    rank_order_sum,
)

from gradengine.errors import CallerError, PeerLost
from gradengine.exchange import GradientServer, connect
from gradengine.exchange import server as hub
from gradengine.exchange import server as server_module

pytestmark = pytest.mark.timeout(150)
EMPTY = np.zeros(SMALL.arena_size, np.float32)


def clients(server, world_size, **options):
    options = {"timeout": SOON, "join_timeout": SOON} | options
    return [connect(server.url, rank, world_size, served=True, **options) for rank in range(world_size)]


def step_of_all(server, world_size, **options):
    """A group's step; nothing where all went well."""
    data = contributions(SMALL, world_size)
    workers = bound(clients(server, world_size, **options), SMALL, data)
    on_all(Worker.sum, workers)
    on_all(leave_together, workers)
    assert {worker.arena.tobytes() for worker in workers} == {rank_order_sum(data).tobytes()}


# ---- where it listens ----


@pytest.mark.parametrize("job", [7, b"run", "x" * 257, "two\nlines", "\x1b[31m", "\ud800"], ids=repr)
def test_what_is_no_name_of_a_job_is_refused(job):
    for make in (lambda: GradientServer(2, job=job), lambda: connect("tcp://127.0.0.1:1", 1, 2, served=True, job=job)):
        with pytest.raises(CallerError, match="this is not a valid job name"):
            make()
    assert not package_threads()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"world_size": 0}, "out of range"),
        ({"timeout": 0}, "out of range"),
        ({"join_timeout": -1}, "out of range"),
        ({"bucket_bytes": 3}, "out of range"),
        ({"max_arena_bytes": 0}, "out of range"),
        *(({"address": (host, 0), "secret": secret}, "there is no secret")
          for host in ("0.0.0.0", "::", "192.0.2.1") for secret in (None, "")),
    ],
)  # fmt: skip
def test_what_a_server_cannot_be_made_with_is_refused(options, says):
    with pytest.raises(CallerError, match=says):
        GradientServer(**{"world_size": 1} | options)
    assert not package_threads()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_rank_out_of_range(rank, world_size):
    with pytest.raises(CallerError, match="out of range"):
        connect("tcp://127.0.0.1:1", rank, world_size, served=True)


def test_workers_connect_to_its_url_wherever_it_listens(tmp_path):
    with GradientServer(1) as server:
        assert server.url == f"tcp://127.0.0.1:{server.address[1]}"
        with pytest.raises(CallerError, match=f"cannot listen at 127.0.0.1:{server.address[1]}"):
            GradientServer(1, server.address)
    for address, url in ((("0.0.0.0", 0), None), (str(tmp_path / "s"), f"unix://{tmp_path}/s")):
        with GradientServer(1, address, secret=SECRET) as server:
            assert url in {None, server.url}
            at = url or f"tcp://127.0.0.1:{server.address[1]}"
            with connect(at, 0, 1, served=True, secret=SECRET) as exchange:
                [worker] = bound([exchange], SMALL, contributions(SMALL, 1))
                assert exchange.url == at
                worker.sum()


# ---- one group after another ----


def test_serve_ends_when_all_have_come_and_gone_and_the_next_group_may_be_of_another_job():
    with GradientServer(2) as server:
        for job in ("run 1", "ключ" * 64, ""):
            serving = threading.Thread(target=server.serve)
            serving.start()
            workers = bound(clients(server, 2, job=job), SMALL, contributions(SMALL, 2))
            on_all(Worker.sum, workers)
            assert serving.is_alive()
            on_all(leave_together, workers)
            serving.join(SOON)
            assert not serving.is_alive()
            assert {worker.arena.tobytes() for worker in workers} == {rank_order_sum(contributions(SMALL, 2)).tobytes()}


def test_a_lost_group_comes_again_and_its_failure_is_told():
    """Also a rank that is back before the server has noticed: it waits until the group has ended."""
    with GradientServer(2) as server:
        workers = bound(clients(server, 2), SMALL, contributions(SMALL, 2))
        for span in SMALL.spans:
            workers[0].exchange.start(span)
        workers[1].exchange.close()
        again = connect(server.url, 1, 2, served=True, join_timeout=SOON)
        joining = threading.Thread(target=workers[1].bind, args=[again])
        joining.start()
        with pytest.raises(PeerLost, match="rank 1 is gone or late"):
            workers[0].exchange.wait()
        with pytest.raises(PeerLost, match="rank 1 is gone: it has closed its link"):
            server.serve()
        workers[0].bind(connect(server.url, 0, 2, served=True, join_timeout=SOON))
        joining.join(SOON)
        on_all(Worker.sum, workers)
        on_all(leave_together, workers)
        server.serve()


def test_serve_raises_where_not_all_come():
    with GradientServer(2, join_timeout=0.01) as server:
        first = call(server.address, 0, 2, secret=None, called=2)
        with pytest.raises(
            PeerLost, match=r"rank 1 did not join the server within 0\.01 s .*; start all ranks"
        ) as raised:
            server.serve()
        assert told_by(first)[1] == str(raised.value)


def test_serve_raises_where_nobody_comes_and_the_server_waits_on():
    with GradientServer(2, join_timeout=0.01) as server:
        told = "ranks 0, 1 did not join the server within 0.01 s"
        with pytest.raises(PeerLost, match=told):
            server.serve()
        assert server._waits_since == math.inf
    with GradientServer(1, join_timeout=0.01) as server:
        step_of_all(server, 1)
        server.serve()  # at once: a group has come and gone, however long ago


def test_a_rank_that_comes_to_a_group_that_is_there_says_that_one_is_served_at_a_time():
    with GradientServer(1) as server:
        [worker] = bound(clients(server, 1), SMALL, [EMPTY])
        late = Worker(connect(server.url, 0, 1, served=True, join_timeout=0.1), SMALL, EMPTY)
        with pytest.raises(PeerLost, match=r"rank 0 could not connect to the server .*serves one group at a time"):
            late.bind()
        worker.exchange.close()


def test_a_fault_of_the_server_is_told_and_the_next_group_is_served(monkeypatch):
    def out_of_memory(*_, **__):
        raise MemoryError("out of luck")

    with GradientServer(1) as server:
        with monkeypatch.context() as patch:
            patch.setattr(hub, "OrderedAllReduce", out_of_memory)
            [worker] = clients(server, 1)
            [found] = outcomes(lambda each: Worker(each, SMALL, EMPTY).bind() or each.barrier(), [worker])
            assert isinstance(found, PeerLost)
            with pytest.raises(MemoryError, match="out of luck"):
                server.serve()
        step_of_all(server, 1)


# ---- the end ----


def test_close_ends_serve_and_does_not_wait_for_a_worker_that_never_leaves():
    server = GradientServer(2)
    first = call(server.address, 0, 2, secret=None, called=2)
    serving = threading.Thread(target=outcomes, args=(lambda _: server.serve(), [0]))
    serving.start()
    server.close()
    serving.join(SOON)
    assert not serving.is_alive()
    with pytest.raises(PeerLost, match="the server was closed"):
        server.serve()
    server.close()
    assert told_by(first) == (PeerLost, "the server was closed; reconnect on all ranks")
    server = GradientServer(1)
    [worker] = bound(clients(server, 1), SMALL, [EMPTY])
    server.close()
    with pytest.raises(PeerLost, match="the server is gone: it has closed its link"):
        worker.exchange.barrier()
    assert not package_threads()


def test_a_second_close_ends_and_gives_the_address_back_whatever_line_interrupted_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "LOOK_SECONDS", 0.001)

    def new():
        return GradientServer(2, str(tmp_path / "s"))

    for at in places_of(new().close):
        server = new()
        interrupted_at(at, server.close)
        again = threading.Thread(target=server.close, daemon=True)
        again.start()
        again.join(SOON)
        assert not again.is_alive(), at
        assert not (tmp_path / "s").exists(), at
        GradientServer(2, server.address).close()


def test_a_close_that_is_late_leaves_the_path_of_the_next_server(tmp_path):
    path = str(tmp_path / "s")
    first = GradientServer(2, path)
    first.close()
    with GradientServer(2, path):
        first.close()
        assert (tmp_path / "s").exists()


def test_silent_server_is_found_by_the_worker_itself(monkeypatch):
    """One that is stopped, say: nobody else can name anybody."""
    monkeypatch.setattr("gradengine.exchange.exchange.GRACE_SECONDS", 0.1)
    is_stopped, go_on, turn = threading.Event(), threading.Event(), hub.Hub._turn

    def stopping(serving):
        if is_stopped.is_set():
            go_on.wait(SOON)
        return turn(serving)

    monkeypatch.setattr(hub.Hub, "_turn", stopping)
    with GradientServer(2) as server, contextlib.ExitStack() as stack:
        workers = bound(clients(server, 2, timeout=0.1), SMALL, contributions(SMALL, 2))
        stack.callback(go_on.set)
        is_stopped.set()
        for error in outcomes(Worker.sum, workers):
            assert type(error).__name__ == "DeadlineExceeded", error
            assert "the server is late: rank" in str(error)
            assert "got nothing for 0.2 s" in str(error), "longer than the server waits, which knows who is late"
