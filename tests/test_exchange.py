"""One suite over every transport: the same sums, verdicts, gathers and failures from each; and connect()."""

from __future__ import annotations

import os
import random
import re
import sys
import threading

import numpy as np
import pytest
from transports import (
    HAS_SHARED_MEMORY,
    LARGE,
    OVER_SOCKETS,
    SMALL,
    SOON,
    Transport,
    Worker,
    bound,
    contributions,
    free_port,
    group,
    leave_together,
    on_all,
    outcomes,
    package_threads,
    rank_order_sum,
)

from gradengine import GradientEngine
from gradengine.arrays.shared import place_of
from gradengine.errors import CallerError, DeviceUnavailable, ExchangeError, PeerLost, WindowError
from gradengine.exchange import GradientServer, NonFiniteValue, connect, local_group
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
every_transport = pytest.mark.parametrize("transport", Transport, ids=lambda transport: transport.value)
over_sockets = pytest.mark.parametrize("transport", OVER_SOCKETS, ids=lambda transport: transport.value)


def summed(transport, layout, data, *, bucket_bytes, order=None):
    """All ranks' arenas after one step."""
    with group(transport, len(data), bucket_bytes=bucket_bytes) as exchanges:
        workers = bound(exchanges, layout, data)
        assert on_all(lambda worker: worker.sum(order and order(worker)), workers) == [()] * len(data)
        on_all(leave_together, workers)
        return [worker.arena for worker in workers]


def assert_same_bytes(arenas, expected):
    for rank, arena in enumerate(arenas):
        assert arena.tobytes() == expected.tobytes(), f"rank {rank}"


def test_order_shows_in_the_test_data():
    for layout in (SMALL, LARGE):
        a, b, c, d = contributions(layout, 4)
        assert rank_order_sum([a, b, c]).tobytes() != rank_order_sum([b, c, a]).tobytes()
        assert rank_order_sum([a, b, c, d]).tobytes() != rank_order_sum([d, c, b, a]).tobytes()
        assert rank_order_sum([a, b, c, d]).tobytes() != ((a + b) + (c + d)).tobytes()


@every_transport
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [4, 1000, 65536, 1 << 30])
def test_sum_is_the_rank_order_sum_bit_for_bit(transport, world_size, bucket_bytes):
    layout = SMALL if bucket_bytes == 4 else LARGE
    data = contributions(layout, world_size)
    assert_same_bytes(summed(transport, layout, data, bucket_bytes=bucket_bytes), rank_order_sum(data))


@every_transport
@pytest.mark.parametrize("world_size", [3, 4])
def test_order_of_starting_and_of_arrival_change_no_bit(transport, world_size):
    data = contributions(SMALL, world_size)
    arrival = random.Random(world_size).sample(range(world_size), world_size)
    gates = [threading.Event() for _ in range(world_size + 1)]
    gates[0].set()

    def shuffled(worker):
        """Each rank in an order of its own, and only after the rank that arrives before it is through."""
        place = arrival.index(worker.exchange.rank)
        gates[place].wait()
        spans = random.Random(place).sample(worker.layout.spans, len(worker.layout.spans))
        yield from spans
        gates[place + 1].set()

    arenas = summed(transport, SMALL, data, bucket_bytes=128, order=shuffled)
    assert_same_bytes(arenas, rank_order_sum(data))


@every_transport
def test_steps_in_a_row(transport):
    with group(transport, 3, bucket_bytes=1000) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 3))
        for step in range(4):
            data = contributions(SMALL, 3, seed=step)
            on_all(lambda worker, data=data: worker.arena.__setitem__(..., data[worker.exchange.rank]), workers)
            on_all(Worker.sum, workers)
            assert_same_bytes([worker.arena for worker in workers], rank_order_sum(data))
            on_all(lambda worker: worker.next_step(worker.arena), workers)
        assert [worker.progress.step for worker in workers] == [4, 4, 4]


@every_transport
def test_signed_zero_and_subnormals_are_kept(transport):
    layout = GradientLayout.of([(4,)])
    tiny = np.float32(1e-45)
    data = [np.zeros(layout.arena_size, np.float32) for _ in range(3)]
    for arena, last in zip(data, (tiny, tiny, -tiny), strict=True):
        arena[:4] = [-0.0, tiny, 0.0, last]
    data[2][2] = -0.0
    for arena in summed(transport, layout, data, bucket_bytes=8):
        assert np.signbit(arena[:4]).tolist() == [True, False, False, False]
        assert arena[1] == 3 * tiny
        assert arena[3] == tiny


@every_transport
def test_layout_without_any_element(transport):
    layout = GradientLayout.of({"nothing": (0, 3)})
    with group(transport, 2) as exchanges:
        workers = bound(exchanges, layout, contributions(layout, 2))
        for _ in range(2):
            assert on_all(Worker.sum, workers) == [(), ()]
            on_all(lambda worker: worker.next_step(worker.arena), workers)


@every_transport
def test_padding_stays_zero(transport):
    data = contributions(SMALL, 3)
    padding = np.ones(SMALL.arena_size, bool)
    for slot in SMALL.slots:
        padding[slot.offset : slot.stop] = False
    assert padding.any()
    for arena in summed(transport, SMALL, data, bucket_bytes=100):
        assert not arena.view(np.uint32)[padding].any()


# ---- what is not finite ----


@every_transport
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_value_is_reported_alike_on_all_ranks(transport, value):
    data = contributions(SMALL, 3)
    index = SMALL.slot("layers.1.w").offset + 5
    data[1][index] = value
    with group(transport, 3, bucket_bytes=64) as exchanges:
        workers = bound(exchanges, SMALL, data)
        found = on_all(Worker.sum, workers)
    assert repr(found) == repr([(NonFiniteValue(1, index, float(value)),)] * 3)  # NaN is equal to itself only here


@every_transport
def test_report_of_one_step_does_not_stain_the_next(transport):
    clean = contributions(SMALL, 2)
    bad = [arena.copy() for arena in clean]
    bad[0][0] = np.nan
    with group(transport, 2, bucket_bytes=1000) as exchanges:
        workers = bound(exchanges, SMALL, bad)
        for contribution, count in ((clean, 1), (bad, 0), (clean, 1), (clean, 0)):
            assert [len(found) for found in on_all(Worker.sum, workers)] == [count, count]
            on_all(lambda worker, next_one=contribution: worker.next_step(next_one[worker.exchange.rank]), workers)


@every_transport
def test_overflow_of_finite_values_is_nobodys_fault(transport):
    layout = GradientLayout.of([(2,)])
    data = [np.zeros(layout.arena_size, np.float32) for _ in range(3)]
    for arena in data:
        arena[:2] = 3e38, 1.0
    with group(transport, 3) as exchanges:
        workers = bound(exchanges, layout, data)
        assert on_all(Worker.sum, workers) == [(), (), ()]
        assert all(worker.arena[:2].tolist() == [np.inf, 3.0] for worker in workers)


# ---- gather and barrier ----


@every_transport
def test_gather_is_in_rank_order_again_and_again(transport):
    with group(transport, 4) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 4))
        for turn in range(5):
            parts = [bytes([turn, rank]) * rank for rank in range(4)]
            gathered = on_all(lambda worker, parts=parts: worker.exchange.gather(parts[worker.exchange.rank]), workers)
            assert gathered == [parts] * 4


@every_transport
def test_gather_while_spans_are_on_their_way(transport):
    with group(transport, 3, bucket_bytes=64) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 3))

        def interleaved(worker):
            for span in worker.layout.spans[:2]:
                worker.exchange.start(span)
            parts = worker.exchange.gather(b"%d" % worker.exchange.rank)
            worker.sum(worker.layout.spans[2:])
            return parts

        assert on_all(interleaved, workers) == [[b"0", b"1", b"2"]] * 3
        assert_same_bytes([worker.arena for worker in workers], rank_order_sum(contributions(SMALL, 3)))


@every_transport
def test_nobody_leaves_a_barrier_before_all_have_come(transport):
    with group(transport, 3) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 3))
        came, lock = [], threading.Lock()

        def come(worker):
            with lock:
                came.append(worker.exchange.rank)
            worker.exchange.barrier()
            return len(came)

        assert on_all(come, workers) == [3, 3, 3]


@every_transport
def test_largest_gather_and_one_byte_more(transport):
    most = bytes(16 << 20)
    with group(transport, 2) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 2))
        for found in outcomes(lambda worker: worker.exchange.gather(most + b"x"), workers):
            assert isinstance(found, CallerError)
            assert "16777217" in str(found)
            assert "16777216" in str(found)
        assert on_all(lambda worker: worker.exchange.gather(most) == [most, most], workers) == [True, True]


# ---- the caller's mistakes ----


@every_transport
def test_calls_before_bind_are_refused(transport):
    with group(transport, 2) as exchanges:
        for exchange in exchanges:
            for call in (lambda e=exchange: e.start(SMALL.spans[0]), exchange.wait, exchange.barrier):
                with pytest.raises(WindowError, match="not bound"):
                    call()


@every_transport
def test_span_started_twice_in_a_step_is_refused(transport):
    with group(transport, 2) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 2))
        workers[1].exchange.start(SMALL.spans[-1])
        with pytest.raises(WindowError, match="has been started already"):
            workers[1].exchange.start(SMALL.spans[-1])


@every_transport
def test_bound_twice_or_to_a_wrong_arena_is_refused(transport):
    with group(transport, 1) as exchanges:
        worker = Worker(exchanges[0], SMALL, np.zeros(SMALL.arena_size + 1, np.float32))
        with pytest.raises(CallerError, match=f"expected contiguous float32 .{SMALL.arena_size},"):
            worker.bind()
        worker.arena = worker.arena[:-1]
        worker.bind()
        with pytest.raises(CallerError, match="bound already"):
            worker.bind()


# ---- the end ----


@every_transport
def test_closed_exchange_is_an_error_on_all_ranks_and_stays_one(transport):
    with group(transport, 3, bucket_bytes=64) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 3))

        def work(worker):
            if worker.exchange.rank == 1:
                worker.exchange.close()
            with pytest.raises(PeerLost) as first:
                worker.sum()
            for call in (worker.exchange.wait, worker.exchange.barrier):
                with pytest.raises(PeerLost) as again:
                    call()
                assert again.value is first.value
            return str(first.value)

        for message in on_all(work, workers):
            assert "rank 1" in message


@every_transport
def test_closing_leaves_no_thread_and_may_be_done_twice(transport):
    before = set(threading.enumerate())
    with group(transport, 3) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 3))
        on_all(Worker.sum, workers)
        on_all(leave_together, workers)
        for exchange in exchanges:
            exchange.close()
    assert set(threading.enumerate()) <= before
    assert not package_threads()


@every_transport
def test_close_before_bind_and_bind_after_close(transport):
    with group(transport, 2) as exchanges:
        exchanges[1].close()
        with pytest.raises(ExchangeError, match="rank 1"):
            Worker(exchanges[1], SMALL, contributions(SMALL, 1)[0]).bind()


@every_transport
def test_waiting_for_sums_to_which_nothing_was_given_is_refused(transport):
    with group(transport, 2, timeout=SOON) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 2))
        with pytest.raises(WindowError, match="rank 1 waits for sums and has started nothing"):
            workers[1].exchange.wait()
        on_all(Worker.sum, workers)
        with pytest.raises(WindowError, match="rank 1 waits for sums and has started nothing"):
            workers[1].exchange.wait()


@every_transport
def test_differing_rows_are_shown_on_every_rank(transport):
    other = GradientLayout.of({"layers.0.w": (5, 7), **{slot.name: slot.shape for slot in SMALL.slots[1:]}})
    with group(transport, 3) as exchanges:
        layouts = [SMALL, SMALL, other]
        data = [contributions(layout, 1)[0] for layout in layouts]
        workers = [Worker(*each) for each in zip(exchanges, layouts, data, strict=True)]
        messages = [str(error) for error in outcomes(Worker.bind, workers)]
    for message in messages:
        assert "layouts differ between rank" in message
        assert "row 0: here 'layers.0.w'" in message
        assert "(5, 7)" in message
        assert "(7, 5)" in message


@every_transport
def test_another_backward_order_is_another_layout(transport):
    theirs = GradientLayout.transformer(1, 4, 4, 4, 4)
    mine = GradientLayout.of({slot.name: slot.shape for slot in theirs.slots})
    assert mine.table() != theirs.table()
    with group(transport, 2) as exchanges:
        workers = [
            Worker(each, layout, contributions(layout, 1)[0])
            for each, layout in zip(exchanges, (mine, theirs), strict=True)
        ]
        for error in outcomes(Worker.bind, workers):
            assert type(error).__name__ == "HandshakeRefused"
            assert "backward order" in str(error)


@every_transport
def test_differing_steps_are_refused(transport):
    with group(transport, 2) as exchanges:
        workers = [Worker(exchange, SMALL, contributions(SMALL, 1)[0]) for exchange in exchanges]
        workers[1].progress.step = 7
        for error in outcomes(Worker.bind, workers):
            assert type(error).__name__ == "HandshakeRefused"
            assert "is at another step" in str(error)
            assert "restart all from one checkpoint" in str(error)


# ---- connect() ----


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:5000",
        "tcp://localhost",
        "tcp://:5000",
        "tcp://host:70000",
        "http://host:1",
        "unix://",
        "unix://a/b",
    ],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(CallerError, match=r"not a valid group URL.*local_group"):
        connect(url, 1, 2)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_rank_out_of_range_is_refused(rank, world_size):
    with pytest.raises(CallerError, match="out of range"):
        connect("tcp://127.0.0.1:0", rank, world_size)


def test_rank_0_hosts_and_the_others_come_in_any_order():
    url = f"tcp://127.0.0.1:{free_port()}"
    data = contributions(SMALL, 3)
    hosting = threading.Event()

    def work(rank):
        if rank == 0:
            hosting.wait()
        exchange = connect(url, rank, 3, token="a secret of all ranks", join_timeout=SOON)
        if rank == 2:
            threading.Timer(0.1, hosting.set).start()  # the workers are trying by then
        worker = Worker(exchange, SMALL, data[rank])
        worker.bind()
        worker.sum()
        leave_together(worker)
        return worker.arena.tobytes()

    assert set(on_all(work, range(3))) == {rank_order_sum(data).tobytes()}


@pytest.mark.parametrize("served", [False, True])
def test_a_rank_without_the_other_end_says_so_in_time(served):
    exchange = connect(f"tcp://127.0.0.1:{free_port()}", 1, 2, join_timeout=0.1, served=served)
    says = f"rank 1 has not reached {'the server' if served else 'rank 0'} at 127"
    with pytest.raises(PeerLost, match=says):
        Worker(exchange, SMALL, contributions(SMALL, 1)[0]).bind()


def test_ipv6_address():
    try:
        exchange = connect("tcp://[::1]:0", 0, 1)
    except PeerLost as refusal:
        pytest.skip(f"no IPv6 here: {refusal}")
    exchange.close()


def test_unix_address_can_be_used_again_after_close(tmp_path):
    url = f"unix://{tmp_path}/socket"
    for _ in range(2):
        with connect(url, 0, 1):
            assert (tmp_path / "socket").is_socket()
        assert not (tmp_path / "socket").exists()


def test_url_says_where_the_group_is(tmp_path):
    with connect("tcp://127.0.0.1:0", 0, 2) as host:
        assert host.url.startswith("tcp://127.0.0.1:")
        assert not host.url.endswith(":0")
        with connect(host.url, 1, 2) as worker:
            assert worker.url == host.url
    with connect(f"unix://{tmp_path}/group", 0, 1) as host:
        assert host.url == f"unix://{tmp_path}/group"
    assert local_group(1)[0].url is None


BEST = "shared_memory" if HAS_SHARED_MEMORY else "unix"  # between ranks of one host


@pytest.mark.parametrize(
    ("scheme", "asked", "found"),
    [
        ("tcp", "tcp", "tcp"),
        *((scheme, asked, asked or BEST) for scheme in ("tcp", "unix") for asked in (None, "unix", BEST)),
    ],
)
def test_how_bytes_go_is_the_best_there_is_or_what_rank_0_asks_for(scheme, asked, found, tmp_path):
    data = contributions(SMALL, 3)
    host = connect("tcp://127.0.0.1:0" if scheme == "tcp" else f"unix://{tmp_path}/s", 0, 3, link=asked)
    exchanges = [host, *(connect(host.url, rank, 3) for rank in (1, 2))]
    assert [exchange.link for exchange in exchanges] == [None] * 3
    workers = bound(exchanges, SMALL, data)
    assert [exchange.link for exchange in exchanges] == [found] * 3
    on_all(Worker.sum, workers)
    on_all(leave_together, workers)
    assert_same_bytes([worker.arena for worker in workers], rank_order_sum(data))


def test_threads_and_servers_say_how_bytes_go():
    assert local_group(1)[0].link == "threads"
    with group(Transport.SERVER, 2) as exchanges:
        bound(exchanges, SMALL, contributions(SMALL, 2))
        assert [exchange.link for exchange in exchanges] == ["tcp"] * 2


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        (
            "tcp://127.0.0.1:0",
            {"link": "carrier pigeon"},
            "unknown link: got 'carrier pigeon', expected one of tcp, unix",
        ),
        ("unix:///tmp/s", {"link": "tcp"}, 'link="tcp" over a Unix socket; pass tcp://host:port of rank 0, or'),
        ("tcp://127.0.0.1:1", {"link": "unix", "served": True}, "with served=True takes no link: each rank has one"),
        ("mpi://", {"link": "unix"}, 'connect with url="mpi://" takes no link: bytes are sent over the comm'),
    ],
)
def test_a_link_that_cannot_be_is_refused(url, options, says):
    with pytest.raises(CallerError, match=re.escape(says)):
        connect(url, 0, 1, **options)


def test_shared_memory_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(DeviceUnavailable, match=r'does not have: got .*; pass link="unix" on all ranks'):
        connect(f"unix://{tmp_path}/s", 0, 2, link="shared_memory")
    exchanges = [connect(f"unix://{tmp_path}/s", rank, 2) for rank in range(2)]
    with exchanges[0], exchanges[1]:
        bound(exchanges, SMALL, contributions(SMALL, 2))
        assert [(exchange.link, exchange.shares_memory) for exchange in exchanges] == [("unix", False)] * 2


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="no memfd on this platform")
@pytest.mark.parametrize("late", [False, True], ids=["made with it", "joins it later"])
def test_an_engine_that_is_made_with_its_exchange_has_its_arena_where_others_read_it(late, tmp_path):
    def work(exchange):
        engine = GradientEngine(SMALL, exchange=None if late and exchange.rank else exchange)
        engine.reconnect(exchange if late and exchange.rank else None)
        for _ in range(2):
            engine.add([np.full(slot.shape, exchange.rank + 1, np.float32) for slot in SMALL.slots])
            result = engine.step()
        engine.exchange.barrier()
        return place_of(engine.accumulator.memory.data) is not None, next(iter(result.gradients.values())).flat[0]

    exchanges = [connect(f"unix://{tmp_path}/s", rank, 2) for rank in range(2)]
    with exchanges[0], exchanges[1]:
        assert on_all(work, exchanges) == [(True, 1.5), (not late, 1.5)]
        assert [exchange.link for exchange in exchanges] == ["unix" if late else "shared_memory"] * 2


def test_served_group_has_rank_0_connect_as_well():
    with GradientServer(2) as server:
        exchanges = [connect(server.url, rank, 2, served=True) for rank in range(2)]
        assert {exchange.url for exchange in exchanges} == {server.url}  # else rank 0 could not listen there


OVER_A_GROUP = {
    "process_group": {"process_group": object()},
    "communicator": {"communicator": object()},
    'url="mpi://"': {"url": "mpi://"},
}


@pytest.mark.parametrize("way", OVER_A_GROUP)
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("token", "a secret", "no process outside of the group can join"),
        ("job", "tp", "the ranks are those of one group"),
        ("served", True, "there is no server"),
    ],
)
def test_what_sockets_alone_need_is_refused_beside_a_group(way, name, value, why):
    with pytest.raises(CallerError) as refused:
        connect(**OVER_A_GROUP[way], **{name: value})
    assert str(refused.value).startswith(f"connect with {way} takes no {name}: {why}")
    assert str(refused.value).endswith(f"; leave {name} out")
    assert "a secret" not in str(refused.value)


@pytest.mark.parametrize("way", ["process_group", "communicator"])
@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "mpi://"])
def test_a_group_has_no_address(way, url):
    with pytest.raises(CallerError, match=f"connect with {way} takes no url: the group says who"):
        connect(url, **OVER_A_GROUP[way])


def test_two_groups_are_one_too_many():
    with pytest.raises(CallerError, match="a process_group or a communicator, and was given both"):
        connect(process_group=object(), communicator=object())


@pytest.mark.parametrize("way", OVER_A_GROUP)
@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "1"])
def test_a_time_to_join_is_checked_before_a_group_is_asked_for_anything(way, seconds):
    with pytest.raises(CallerError, match="join_timeout is "):
        connect(**OVER_A_GROUP[way], join_timeout=seconds)


def test_the_environment_can_say_mpi_and_what_is_given_wins(monkeypatch):
    monkeypatch.setenv("GRADENGINE_ADDRESS", "mpi://")
    with pytest.raises(CallerError, match=r'url="mpi://" takes no job'):
        connect(job="tp")
    with pytest.raises(CallerError, match="connect with process_group takes no job"):
        connect(process_group=object(), job="tp")
    with connect("tcp://127.0.0.1:0", 0, 1, job="tp") as exchange:
        assert exchange.url.startswith("tcp://")


@pytest.mark.parametrize("way", ['url="mpi://"', "communicator"])
def test_without_mpi4py_it_is_said_what_to_install(way, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DeviceUnavailable, match=r"needs mpi4py and an MPI library .*gradengine\[mpi\]"):
        connect(**OVER_A_GROUP[way])


@pytest.mark.parametrize("url", ["mpi://world", "MPI://", "mpi:", np.zeros(3), ["mpi://"], b"mpi://"])
def test_no_other_url_is_mpi_s(url):
    with pytest.raises(CallerError, match="expected 'tcp://host:port', 'unix:///path' or 'mpi://'"):
        connect(url, 0, 1)
