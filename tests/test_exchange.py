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
    SMALL,
    SOON,
    Transport,
    Worker,
    bound,
    contributions,
    group,
    leave_together,
    on_all,
    outcomes,
    package_threads,
    rank_order_sum,
)

from gradengine import GradientEngine
from gradengine.arrays.shared import place_of
from gradengine.errors import CallerError, DeviceUnavailable, ExchangeError, HandshakeRefused, PeerLost, WindowError
from gradengine.exchange import GradientServer, connect, local_group
from gradengine.exchange.addresses import address_of
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.timeout(150)
every_transport = pytest.mark.parametrize("transport", Transport, ids=lambda transport: transport.value)
of_both_kinds = pytest.mark.parametrize("transport", [Transport.THREADS, Transport.SERVER])


def test_order_shows_in_the_test_data():
    for layout in (SMALL, LARGE):
        a, b, c, d = contributions(layout, 4)
        assert rank_order_sum([a, b, c]).tobytes() != rank_order_sum([b, c, a]).tobytes()
        assert rank_order_sum([a, b, c, d]).tobytes() != rank_order_sum([d, c, b, a]).tobytes()
        assert rank_order_sum([a, b, c, d]).tobytes() != ((a + b) + (c + d)).tobytes()


def steps_of(layout, world_size):
    """What each rank contributes to some steps, and what all are told of it: zeros of both signs, subnormals, no NaN;
    then NaN and Inf; then an overflow of finite values, which is nobody's fault."""
    tiny, slot = np.float32(1e-45), layout.slots[-1]
    steps = [contributions(layout, world_size, seed) for seed in range(4)]
    for rank, arena in enumerate(steps[0]):
        arena[slot.offset : slot.offset + 4] = -0.0, tiny, -0.0 if rank else 0.0, -tiny if rank == 2 else tiny
    last = world_size - 1
    steps[1][last][slot.offset + 5], steps[1][0][slot.stop - 1] = -np.inf, np.nan
    for arena in steps[2]:
        arena[slot.offset] = 3e38
    bad = sorted([(0, slot.stop - 1, "nan"), (last, slot.offset + 5, "-inf")])
    with np.errstate(over="ignore"):
        sums = [rank_order_sum(parts).tobytes() for parts in steps]
    return list(zip(steps, sums, [[], bad, [], []], strict=True))


@every_transport
@pytest.mark.parametrize(("world_size", "bucket_bytes"), [(2, 1 << 30), (3, 1000), (4, 100)])
def test_steps_in_any_order_are_summed_in_rank_order_bit_for_bit(transport, world_size, bucket_bytes):
    """Each rank starts in an order of its own, when the rank before it has; in the middle all tell something."""
    layout = LARGE if bucket_bytes == 1 << 30 else SMALL
    steps, numbers = steps_of(layout, world_size), random.Random(world_size)
    arrivals = [numbers.sample(range(world_size), world_size) for _ in steps]
    gates = [[threading.Event() for _ in range(world_size + 1)] for _ in steps]

    def work(worker):
        rank, found = worker.exchange.rank, []
        for step, (_, total, _) in enumerate(steps):
            place = arrivals[step].index(rank)
            assert place == 0 or gates[step][place].wait(SOON)
            spans = random.Random(f"{step} {rank}").sample(layout.spans, len(layout.spans))
            for span in spans[:2]:
                worker.exchange.start(span)
            gates[step][place + 1].set()
            parts = worker.exchange.all_gather(bytes([step, rank]) * rank)
            assert parts == [bytes([step, other]) * other for other in range(world_size)]
            bad = worker.sum(spans[2:])
            assert worker.arena.tobytes() == total
            found.append([(rank, index, str(value)) for rank, index, value in bad])
            following = steps[min(step + 1, len(steps) - 1)][0]
            worker.next_step(following[rank])
        assert worker.step == len(steps)
        leave_together(worker)
        return found

    with group(transport, world_size, bucket_bytes=bucket_bytes) as exchanges:
        assert on_all(work, bound(exchanges, layout, steps[0][0])) == [[bad for *_, bad in steps]] * world_size


@every_transport
def test_nobody_leaves_a_barrier_before_all_have_come_also_without_any_element(transport):
    layout, came = GradientLayout.of({"nothing": (0, 3)}), []

    def work(worker):
        for step in range(1, 3):
            assert worker.sum() == ()
            came.append(worker.exchange.rank)
            worker.exchange.barrier()
            assert len(came) >= 3 * step
            worker.next_step(worker.arena)

    with group(transport, 3) as exchanges:
        on_all(work, bound(exchanges, layout, contributions(layout, 3)))


@every_transport
def test_largest_gather_and_one_byte_more(transport):
    most = bytes(1 << 20)
    with group(transport, 2) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 2))
        for found in outcomes(lambda worker: worker.exchange.all_gather(most + b"x"), workers):
            assert isinstance(found, CallerError)
            assert str(1 + (1 << 20)) in str(found)
        assert on_all(lambda worker: worker.exchange.all_gather(most) == [most, most], workers) == [True, True]


# ---- the caller's mistakes ----


@of_both_kinds
def test_calls_out_of_turn_are_refused_and_change_nothing(transport):
    data = contributions(SMALL, 2)
    with group(transport, 2, timeout=SOON) as exchanges:
        for call in (lambda: exchanges[0].start(SMALL.spans[0]), exchanges[0].wait, exchanges[0].barrier):
            with pytest.raises(WindowError, match="not bound"):
                call()
        workers = bound(exchanges, SMALL, data)
        with pytest.raises(CallerError, match="bound already"):
            workers[0].bind()
        for _ in range(2):
            with pytest.raises(WindowError, match="rank 1 waits for sums and has started nothing"):
                exchanges[1].wait()
            exchanges[1].start()
            assert not exchanges[1].started, "nothing begins no step"
            exchanges[1].start(SMALL.spans[-1])
            with pytest.raises(WindowError, match="has been started already"):
                exchanges[1].start(SMALL.spans[-1])
            assert on_all(lambda worker: worker.sum(SMALL.spans[: -worker.exchange.rank or None]), workers) == [(), ()]
            assert [worker.arena.tobytes() for worker in workers] == [rank_order_sum(data).tobytes()] * 2
            on_all(lambda worker: worker.next_step(data[worker.exchange.rank]), workers)


# ---- the end ----


@every_transport
def test_a_closed_exchange_is_an_error_on_all_ranks_and_stays_one_and_leaves_no_thread(transport):
    before = set(threading.enumerate())
    with group(transport, 3, bucket_bytes=64) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, 3))

        def work(worker):
            if worker.exchange.rank == 1:
                worker.exchange.close()
                worker.exchange.close()
            with pytest.raises(PeerLost) as first:
                worker.sum()
            for call in (worker.exchange.wait, worker.exchange.barrier):
                with pytest.raises(PeerLost) as again:
                    call()
                assert again.value is first.value
            return str(first.value)

        assert all("rank 1" in message for message in on_all(work, workers))
    assert set(threading.enumerate()) <= before
    assert not package_threads()


@every_transport
def test_close_before_bind_and_bind_after_close(transport):
    with group(transport, 2) as exchanges:
        exchanges[1].close()
        with pytest.raises(ExchangeError, match="rank 1"):
            Worker(exchanges[1], SMALL, contributions(SMALL, 1)[0]).bind()


ORDERED = GradientLayout.transformer(1, 4, 4, 4, 4)
OTHERS = {
    "shapes": (GradientLayout.of({"layers.0.w": (5, 7)}), GradientLayout.of({"layers.0.w": (7, 5)})),
    "backward order": (GradientLayout.of({slot.name: slot.shape for slot in ORDERED.slots}), ORDERED),
    "steps": (SMALL, SMALL),
}


@of_both_kinds
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shapes", ["layouts differ between rank 1", "row 0: here 'layers.0.w'", "(5, 7)", "(7, 5)"]),
        ("backward order", ["backward order"]),
        ("steps", ["rank 0 is at a different step: got 0, expected 7", "load a checkpoint of step 7 there, or"]),
    ],
)
def test_what_differs_is_shown_on_every_rank(transport, what, words):
    with group(transport, 2) as exchanges:
        workers = [
            Worker(exchange, layout, contributions(layout, 1)[0])
            for exchange, layout in zip(exchanges, OTHERS[what], strict=True)
        ]
        workers[1].step = 7 if what == "steps" else 0
        for error in outcomes(Worker.bind, workers):
            assert isinstance(error, HandshakeRefused)
            assert [word for word in words if word not in str(error)] == []


def long_table(last):
    """A layout whose table is longer than what is sent."""
    return GradientLayout.of({name * (1 << 19): (1,) for name in ("a", "b", last)})


@of_both_kinds
@pytest.mark.parametrize("last", ["c", "d"])
def test_a_table_that_is_too_long_is_not_sent(transport, last):
    """Ranks need none while their layouts are equal, a server does."""
    with group(transport, 2) as exchanges:
        layouts = zip(exchanges, (long_table("c"), long_table(last)), strict=True)
        found = outcomes(Worker.bind, [Worker(each, layout, contributions(layout, 1)[0]) for each, layout in layouts])
    if transport is Transport.SERVER:
        size = len(long_table("c").table())
        for error in found:
            assert isinstance(error, HandshakeRefused)
            assert f"table is larger than this server takes: got {size} bytes, expected at most" in str(error)
    elif last == "c":
        assert found == [None, None]
    else:
        for error in found:
            assert isinstance(error, HandshakeRefused)
            assert "layouts differ" in str(error)
            assert "too many rows to show" in str(error)


# ---- connect() ----

NO_URLS = ["", "localhost:5000", "tcp://localhost", "tcp://:5000", "tcp://host:70000", "http://host:1", "unix://"]
NO_URLS += ["unix://a/b", "mpi://world", "MPI://", "mpi:", np.zeros(3), ["mpi://"], b"mpi://"]
GROUP = object()


@pytest.mark.parametrize("url", NO_URLS, ids=repr)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(CallerError, match="not a valid group URL") as refused:
        connect(url, 1, 2)
    assert "mpi://" in refused.value.expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": -1}, "out of range"),
        ({"rank": 2}, "out of range"),
        ({"world_size": 0}, "out of range"),
        ({"link": "carrier pigeon"}, "unknown link: got 'carrier pigeon', expected one of 'tcp', 'unix'"),
        ({"url": "unix:///tmp/s", "link": "tcp"}, 'link="tcp" over a Unix socket'),
        ({"link": "unix", "served": True}, "takes no link"),
        ({"process_group": GROUP, "communicator": GROUP, "url": None}, "got both"),
    ],
)
def test_what_connect_cannot_do_is_refused(options, says):
    with pytest.raises(CallerError, match=re.escape(says)):
        connect(**{"url": "tcp://127.0.0.1:0", "rank": 0, "world_size": 2} | options)


def test_url_says_where_the_group_is_and_the_place_may_be_used_again(tmp_path):
    assert address_of("tcp://[::1]:5000") == ("::1", 5000)
    with connect("tcp://127.0.0.1:0", 0, 2) as host:
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", host.url)
        with connect(host.url, 1, 2) as worker:
            assert worker.url == host.url
    for _ in range(2):
        with connect(f"unix://{tmp_path}/group", 0, 1) as host:
            assert host.url == f"unix://{tmp_path}/group"
            assert (tmp_path / "group").is_socket()
        assert not (tmp_path / "group").exists()
    with GradientServer(2) as server:
        exchanges = [connect(server.url, rank, 2, served=True) for rank in range(2)]
        assert {exchange.url for exchange in exchanges} == {server.url}  # else rank 0 could not listen there
        bound(exchanges, SMALL, contributions(SMALL, 2))
        assert [exchange.link for exchange in exchanges] == ["tcp"] * 2
        for exchange in exchanges:
            exchange.close()
    assert (local_group(1)[0].url, local_group(1)[0].link) == (None, "threads")


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
    secret = "a secret of all ranks"
    host = connect("tcp://127.0.0.1:0" if scheme == "tcp" else f"unix://{tmp_path}/s", 0, 3, link=asked, secret=secret)
    exchanges = [host, *(connect(host.url, rank, 3, secret=secret) for rank in (1, 2))]
    assert [exchange.link for exchange in exchanges] == [None] * 3
    workers = bound(exchanges, SMALL, data)
    assert [exchange.link for exchange in exchanges] == [found] * 3
    on_all(Worker.sum, workers)
    on_all(leave_together, workers)
    assert {worker.arena.tobytes() for worker in workers} == {rank_order_sum(data).tobytes()}


def test_shared_memory_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(DeviceUnavailable, match='pass link="unix" on all ranks'):
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


OVER_A_GROUP = {
    "process_group": {"process_group": GROUP},
    "communicator": {"communicator": GROUP},
    'url="mpi://"': {"url": "mpi://"},
}


@pytest.mark.parametrize("way", OVER_A_GROUP)
def test_what_sockets_alone_need_is_refused_beside_a_group(way):
    needs = {"secret": "a secret", "job": "tp", "served": True, "rank": 0, "world_size": 2}
    needs |= {} if way == "process_group" else {"link": "unix"}
    needs |= {} if "url" in OVER_A_GROUP[way] else {"url": "mpi://"}
    for name, value in needs.items():
        with pytest.raises(CallerError) as refused:
            connect(**OVER_A_GROUP[way], **{name: value})
        assert str(refused.value).startswith(f"connect with {way} takes no {name};")
        assert "a secret" not in str(refused.value)
    for seconds in (0, -1, float("nan"), "1"):  # before the group is asked for anything
        with pytest.raises(CallerError, match="join_timeout is "):
            connect(**OVER_A_GROUP[way], join_timeout=seconds)


def test_the_environment_can_say_mpi_and_what_is_given_wins(monkeypatch):
    monkeypatch.setenv("GRADENGINE_ADDRESS", "mpi://")
    with pytest.raises(CallerError, match=r'url="mpi://" takes no job'):
        connect(job="tp")
    with pytest.raises(CallerError, match="connect with process_group takes no job"):
        connect(process_group=GROUP, job="tp")
    with connect("tcp://127.0.0.1:0", 0, 1, job="tp") as exchange:
        assert exchange.url.startswith("tcp://")


@pytest.mark.parametrize("way", ['url="mpi://"', "communicator"])
def test_without_mpi4py_it_is_said_what_to_install(way, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DeviceUnavailable, match=r"gradengine\[mpi\]"):
        connect(**OVER_A_GROUP[way])


def test_a_non_finite_value_is_told_as_it_is():
    data = contributions(SMALL, 3)
    data[1][SMALL.slot("layers.1.w").offset + 5] = np.inf
    found = on_all(Worker.sum, bound(exchanges := local_group(3), SMALL, data))
    assert found == [((1, SMALL.slot("layers.1.w").offset + 5, np.inf),)] * 3
    for exchange in exchanges:
        exchange.close()
