"""A failed step can be run again: the bytes are those of an undisturbed run, and only what is missing travels."""

from __future__ import annotations

import contextlib
import socket
import threading

import msgpack
import numpy as np
import pytest
from transports import (
    BY_A_COORDINATOR,
    SMALL,
    SOON,
    Failing,
    Transport,
    Worker,
    bound,
    contributions,
    free_port,
    group,
    leave_together,
    on_all,
    outcomes,
    rank_order_sum,
)

from gradengine import GradientEngine
from gradengine.errors import ExchangeError, HandshakeRefused, NonFiniteGradient, PeerLost
from gradengine.exchange import GradientServer, LocalExchange, WorkerClient, connect, local_group
from gradengine.exchange.interface import buckets_of

pytestmark = pytest.mark.timeout(150)
BUCKET = 128
COUNT = len(buckets_of(SMALL, BUCKET))
WORLD = 3
EXPECTED = rank_order_sum(contributions(SMALL, WORLD)).tobytes()


class Wire:
    """A TCP proxy in front of a server: keeps what passes each way and cuts the connection after so many bytes.

    Args:
        server: (host, port) behind it.
        cut: ("up" or "down", bytes); None never cuts.
    """

    def __init__(self, server, cut=None):
        self._server, self._cut = server, cut
        self.passed = {"up": bytearray(), "down": bytearray()}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._sockets, self._threads = [], []
        self._spawn(self._accept)

    def kinds(self, way):
        """The kinds of the messages that passed whole, in order, as stock msgpack reads them."""
        unpacker = msgpack.Unpacker()
        unpacker.feed(bytes(self.passed[way]))
        return [fields["kind"] for fields in unpacker if isinstance(fields, dict)]

    def close(self):
        self._hang_up()
        self._listener.close()
        for thread in self._threads:
            thread.join(SOON)

    def _spawn(self, work, *arguments):
        self._threads.append(threading.Thread(target=work, args=arguments))
        self._threads[-1].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            worker, _ = self._listener.accept()
            server = socket.create_connection(self._server)
            self._sockets += [worker, server]
            self._spawn(self._pump, worker, server, "up")
            self._spawn(self._pump, server, worker, "down")

    def _pump(self, source, sink, way):
        limit = self._cut[1] if self._cut and self._cut[0] == way else None
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if limit is not None and len(self.passed[way]) + len(data) >= limit:
                    data = data[: limit - len(self.passed[way])]
                    self.passed[way] += data
                    sink.sendall(data)
                    break
                self.passed[way] += data
                sink.sendall(data)
        self._hang_up()

    def _hang_up(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextlib.contextmanager
def behind_a_wire(cut=None):
    """Three exchanges: rank 0 hosts, rank 1 comes through a wire that may be cut, rank 2 comes straight."""
    server = GradientServer(WORLD, bucket_bytes=BUCKET, timeout=SOON, join_timeout=SOON)
    wire = Wire(server.address, cut)
    exchanges = [
        LocalExchange(server.group, 0, on_close=server.close),
        WorkerClient(wire.address, 1, WORLD),
        WorkerClient(server.address, 2, WORLD),
    ]
    try:
        yield wire, exchanges
    finally:
        for exchange in reversed(exchanges):
            exchange.close()
        wire.close()


def through_undisturbed():
    """Bytes each way in a whole step, and how many of them belong to the handshake."""
    with behind_a_wire() as (wire, exchanges):
        workers = bound(exchanges, SMALL, contributions(SMALL, WORLD))
        joined = {way: len(passed) for way, passed in wire.passed.items()}
        on_all(Worker.sum, workers)
        return joined, {way: len(passed) for way, passed in wire.passed.items()}


JOINED, ALL = through_undisturbed()
CUTS = [
    (way, JOINED[way] + 1 + (ALL[way] - JOINED[way] - 2) * part // 8) for way in ("up", "down") for part in range(9)
]


@pytest.mark.parametrize("cut", CUTS, ids=[f"{way}-{at}" for way, at in CUTS])
def test_step_cut_on_the_wire_is_run_again_with_what_is_missing(cut):
    with behind_a_wire(cut) as (_, exchanges):
        workers = bound(exchanges, SMALL, contributions(SMALL, WORLD))
        found = outcomes(lambda worker: worker.sum() or worker.exchange.barrier(), workers)
        assert all(isinstance(error, ExchangeError) for error in found), found
    summed = [worker.progress.summed for worker in workers]
    assert summed[0] >= max(worker.progress.summed + worker.progress.partially_written for worker in workers)
    with behind_a_wire() as (wire, exchanges):
        for worker, exchange in zip(workers, exchanges, strict=True):
            worker.exchange = exchange
        on_all(Worker.bind, workers)
        assert on_all(Worker.sum, workers) == [()] * WORLD
        on_all(leave_together, workers)
    for worker in workers:
        assert worker.arena.tobytes() == EXPECTED
        assert (worker.progress.summed, worker.progress.partially_written) == (COUNT, False)
    assert wire.kinds("up").count("gradient") == COUNT - summed[0]
    assert wire.kinds("down").count("sum") == COUNT - summed[1]


def test_cuts_reach_every_part_of_a_step():
    """The cuts above mean something only if they leave workers at different places."""
    seen = set()
    for cut in CUTS:
        with behind_a_wire(cut) as (_, exchanges):
            workers = bound(exchanges, SMALL, contributions(SMALL, WORLD))
            outcomes(lambda worker: worker.sum() or worker.exchange.barrier(), workers)
        seen.add((workers[0].progress.summed, workers[1].progress.summed, workers[1].progress.partially_written))
    assert len({summed for summed, _, _ in seen}) > 3
    assert any(ahead > behind for ahead, behind, _ in seen), "no worker ever lacked a sum that rank 0 had"


def cut_at(worker, bucket):
    """Make this worker leave when its `bucket`-th sum lands."""

    def take(span, upto):
        worker.landed.append((span.key, upto))
        if len(worker.landed) == bucket:
            worker.exchange.close()

    worker.take = take


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("bucket", [1, 4, COUNT])
def test_step_that_a_rank_left_is_run_again(rank, bucket):
    with group(Transport.LOCAL, WORLD, bucket_bytes=BUCKET) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, WORLD))
        cut_at(workers[rank], bucket)
        outcomes(lambda worker: worker.sum() or worker.exchange.barrier(), workers)
    with group(Transport.LOCAL, WORLD, bucket_bytes=BUCKET) as exchanges:
        for worker, exchange in zip(workers, exchanges, strict=True):
            worker.exchange, worker.take = exchange, lambda span, upto: None
        on_all(Worker.bind, workers)
        on_all(Worker.sum, workers)
        on_all(leave_together, workers)
    assert [worker.arena.tobytes() for worker in workers] == [EXPECTED] * WORLD


def test_bucket_size_must_stay_while_a_step_is_half_done():
    """`summed` counts buckets: with other buckets it would mean other elements."""
    with group(Transport.LOCAL, WORLD, bucket_bytes=BUCKET) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, WORLD))
        cut_at(workers[1], 3)
        outcomes(Worker.sum, workers)
    assert all(worker.progress.summed for worker in workers)
    with group(Transport.LOCAL, WORLD, bucket_bytes=2 * BUCKET) as exchanges:
        for worker, exchange in zip(workers, exchanges, strict=True):
            worker.exchange, worker.take = exchange, lambda span, upto: None
        for error in outcomes(Worker.bind, workers):
            assert isinstance(error, HandshakeRefused)
            assert "cut into other buckets: got bucket_bytes=256, expected bucket_bytes=128; reconnect" in str(error)


def test_bucket_size_may_change_between_steps():
    workers = [
        Worker(exchange, SMALL, data) for exchange, data in zip([None] * 2, contributions(SMALL, 2), strict=True)
    ]
    for bucket_bytes in (64, 1000):
        for worker, exchange in zip(workers, local_group(2, bucket_bytes=bucket_bytes), strict=True):
            worker.exchange = exchange
            worker.arena[:] = contributions(SMALL, 2)[exchange.rank]
        on_all(Worker.bind, workers)
        on_all(Worker.sum, workers)
        for worker in workers:
            assert worker.arena.tobytes() == rank_order_sum(contributions(SMALL, 2)).tobytes()
            worker.progress.next_step()


def test_reports_of_the_first_try_are_not_forgotten():
    data = contributions(SMALL, WORLD)
    first = SMALL.spans[0].start
    data[2][first] = np.inf
    with group(Transport.LOCAL, WORLD, bucket_bytes=BUCKET) as exchanges:
        workers = bound(exchanges, SMALL, data)
        cut_at(workers[1], 2)
        outcomes(Worker.sum, workers)
    with group(Transport.LOCAL, WORLD, bucket_bytes=BUCKET) as exchanges:
        for worker, exchange in zip(workers, exchanges, strict=True):
            worker.exchange, worker.take = exchange, lambda span, upto: None
        on_all(Worker.bind, workers)
        found = on_all(Worker.sum, workers)
    assert [[(bad.rank, bad.index) for bad in each] for each in found] == [[(2, first)]] * WORLD


def test_server_alone_that_lost_its_sums_says_what_to_do():
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, WORLD))
        cut_at(workers[1], 3)
        outcomes(Worker.sum, workers)
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:
        for worker, exchange in zip(workers, exchanges, strict=True):
            worker.exchange, worker.take = exchange, lambda span, upto: None
        for error in outcomes(Worker.bind, workers):
            assert isinstance(error, HandshakeRefused)
            assert "has sums of step 0 that the coordinator lost" in str(error)
            assert "discard() the window on every rank and accumulate it again" in str(error)


def test_server_alone_that_had_summed_nothing_goes_on():
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, WORLD))
        exchanges[0].start(SMALL.spans[0])
        exchanges[1].close()
        outcomes(lambda worker: worker.exchange.wait(), workers)
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:
        for worker, exchange in zip(workers, exchanges, strict=True):
            worker.exchange = exchange
        on_all(Worker.bind, workers)
        on_all(Worker.sum, workers)
        assert [worker.arena.tobytes() for worker in workers] == [EXPECTED] * WORLD


# ---- in another group ----


def half_summed(transport=Transport.LOCAL, data=None):
    """Three workers that lost their group when some buckets held their sum."""
    with group(transport, WORLD, bucket_bytes=BUCKET) as exchanges:
        workers = bound(exchanges, SMALL, contributions(SMALL, WORLD) if data is None else data)
        cut_at(workers[1], 3)
        outcomes(lambda worker: worker.sum() or worker.exchange.barrier(), workers)
    for worker in workers:
        worker.take = lambda span, upto: None
    assert all(worker.progress.is_half_summed for worker in workers[:2])
    return workers


def rejoined(workers, transport, ranks):
    """What becomes of these workers when they join a new group as these ranks."""
    with group(transport, len(ranks), bucket_bytes=BUCKET, timeout=SOON, join_timeout=SOON) as exchanges:
        for worker, rank in zip(workers, ranks, strict=True):
            worker.exchange = exchanges[rank]
        return outcomes(Worker.bind, workers)


def refused_alike(errors, says):
    texts = [str(error) for error in errors]
    assert all(isinstance(error, HandshakeRefused) and says in str(error) for error in errors), texts
    assert all("reconnect all ranks as they were, or discard() the window on every rank" in text for text in texts)
    assert len({text.partition("refuses: ")[2] or text for text in texts}) == 1, "all ranks hear the same"


def test_half_summed_step_is_not_taken_up_by_a_smaller_group():
    """Some buckets hold three ranks' sum; the others would get two ranks'."""
    workers = half_summed()
    before = [(worker.arena.tobytes(), worker.progress.summed) for worker in workers]
    refused_alike(rejoined(workers[:2], Transport.LOCAL, [0, 1]), "step 0 is half summed and rank 0 took part in it as")
    refused_alike(rejoined(workers[:1], Transport.LOCAL, [0]), "got rank 0 of 1 in group")
    assert [(worker.arena.tobytes(), worker.progress.summed) for worker in workers] == before


def test_half_summed_step_is_not_taken_up_by_a_larger_group():
    workers = half_summed()
    fresh = Worker(None, SMALL, contributions(SMALL, 1)[0])
    refused_alike(rejoined([*workers, fresh], Transport.LOCAL, [0, 1, 2, 3]), "got rank 0 of 4 in group")


@pytest.mark.parametrize("ranks", [[1, 0, 2], [0, 2, 1], [1, 2, 0]], ids=str)
def test_half_summed_step_is_not_taken_up_by_ranks_in_another_order(ranks):
    workers = half_summed()
    moved = next(rank for rank in range(WORLD) if ranks[rank] != rank)
    refused_alike(rejoined(workers, Transport.LOCAL, ranks), "step 0 is half summed and rank ")
    membership = workers[moved].progress.membership
    assert (membership.rank, membership.world_size) == (moved, WORLD)


def test_half_summed_step_takes_nobody_of_another_group_in():
    """Rank 2 of another group stands at the same step: its gradients are in no sum of this one."""
    ours = half_summed()
    theirs = half_summed(data=contributions(SMALL, WORLD, seed=9))
    names = [workers[0].progress.membership.group[:4].hex() for workers in (ours, theirs)]
    assert names[0] != names[1]
    errors = rejoined([*ours[:2], theirs[2]], Transport.LOCAL, [0, 1, 2])
    refused_alike(errors, f"got rank 2 of 3 in group {names[0]}, expected rank 2 of 3 in group {names[1]}")


def test_rank_whose_own_buckets_are_all_local_belongs_to_the_half_summed_step_too():
    """It has given to the sums that the others hold, and lacks them."""
    ours = half_summed()
    theirs = half_summed(data=contributions(SMALL, WORLD, seed=9))
    theirs[2].arena[:] = contributions(SMALL, WORLD, seed=9)[2]
    theirs[2].progress.summed, theirs[2].progress.partially_written = 0, False
    errors = rejoined([*ours[:2], theirs[2]], Transport.LOCAL, [0, 1, 2])
    refused_alike(errors, "step 0 is half summed and rank 2 took part in it as another")


def test_half_summed_step_of_a_served_group_is_refused_as_another_group_first():
    workers = half_summed(Transport.SERVER)
    refused_alike(rejoined(workers[:2], Transport.SERVER, [0, 1]), "got rank 0 of 2 in group")


@pytest.mark.parametrize("transport", BY_A_COORDINATOR, ids=lambda each: each.value)
@pytest.mark.parametrize("how", ["contributed only", "dropped", "finished"])
def test_ranks_may_come_together_anew_where_nothing_is_half_summed(transport, how):
    data = contributions(SMALL, WORLD)
    with group(transport, WORLD, bucket_bytes=BUCKET) as exchanges:
        workers = bound(exchanges, SMALL, data)
        if how == "contributed only":
            workers[0].exchange.start(SMALL.spans[0])
        elif how == "finished":
            on_all(Worker.sum, workers)
    for worker, contribution in zip(workers, data, strict=True):
        worker.take = lambda span, upto: None
        worker.arena[:] = contribution
        if how == "finished":
            worker.progress.next_step()
        elif how == "dropped":
            worker.progress.restart()
    with group(transport, 2, bucket_bytes=BUCKET) as exchanges:
        for worker, exchange in zip((workers[2], workers[0]), exchanges, strict=True):
            worker.exchange = exchange
        on_all(Worker.bind, [workers[2], workers[0]])
        on_all(Worker.sum, [workers[2], workers[0]])
    assert workers[0].arena.tobytes() == workers[2].arena.tobytes() == rank_order_sum([data[2], data[0]]).tobytes()


def test_group_keeps_its_name_until_its_step_is_summed():
    workers = half_summed()
    names = {worker.progress.membership.group for worker in workers}
    for _ in range(2):  # joined and lost again, and joined
        assert rejoined(workers, Transport.LOCAL, [0, 1, 2]) == [None] * WORLD
        assert {worker.progress.membership.group for worker in workers} == names
    for worker in workers:
        worker.progress.restart()
    rejoined(workers, Transport.LOCAL, [0, 1, 2])
    after = {worker.progress.membership.group for worker in workers}
    assert (len(names), len(after), len(names & after)) == (1, 1, 0)


# ---- the whole engine ----


def engine_step(engine):
    result = engine.step()
    return result.norm, {name: gradient.tobytes() for name, gradient in result.gradients.items()}


def gradients(rank, seed):
    arena = contributions(SMALL, WORLD, seed)[rank]
    return {slot.name: arena[slot.offset : slot.stop].reshape(slot.shape) for slot in SMALL.slots}


def undisturbed():
    def work(exchange):
        engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
        for seed in (1, 2):
            engine.add(gradients(exchange.rank, seed))
        return engine_step(engine)

    return on_all(work, local_group(WORLD, bucket_bytes=BUCKET))


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
@pytest.mark.parametrize("streamed", [False, True], ids=["at step()", "while adding"])
@pytest.mark.parametrize("lost_after", [1, 9])
def test_engine_reconnects_at_the_same_address_and_steps_again(scheme, streamed, lost_after, tmp_path):
    """Each rank closes, connects and steps again as soon as it hears of the failure; nobody waits for the others."""
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"unix://{tmp_path}/s"
    micro_batches = 2 if streamed else None

    def work(rank):
        def join():
            return connect(url, rank, WORLD, bucket_bytes=BUCKET, timeout=SOON, join_timeout=SOON)

        engine = GradientEngine(SMALL, exchange=join(), micro_batches=micro_batches, max_norm=1.0)
        if rank == 1:
            pump = engine.exchange._pump
            pump._link = Failing(pump._link, lost_after)
        for seed in (1, 2):
            engine.add(gradients(rank, seed))
        with pytest.raises(ExchangeError):
            engine.step()
        engine.exchange.close()
        engine.reconnect(join())
        first = engine_step(engine)
        engine.add(gradients(rank, 3))
        if streamed:
            engine.add(gradients(rank, 4))
        engine_step(engine)
        engine.exchange.barrier()
        engine.exchange.close()
        return first

    assert on_all(work, range(WORLD)) == undisturbed()


def test_engines_discard_where_the_coordinator_lost_its_sums():
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:
        engines = on_all(lambda exchange: GradientEngine(SMALL, exchange=exchange, max_norm=1.0), exchanges)
        land, landed = engines[1]._reducer._on_reduced, []

        def take(span, upto):
            land(span, upto)
            landed.append(upto)
            if len(landed) == 2:
                exchanges[1].close()

        exchanges[1]._on_reduced = take

        def fail(engine):
            engine.add(gradients(engine.rank, 0))
            with pytest.raises(ExchangeError):
                engine.step()

        on_all(fail, engines)
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:
        for error in outcomes(lambda engine: engine.reconnect(exchanges[engine.rank]), engines):
            assert "discard() the window on every rank" in str(error)
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:

        def again(engine):
            engine.discard()
            engine.reconnect(exchanges[engine.rank])
            for seed in (1, 2):
                engine.add(gradients(engine.rank, seed))
            return engine_step(engine)

        assert on_all(again, engines) == undisturbed()


class TestOfAnEngine:
    def test_a_smaller_group_is_refused_in_the_middle_of_a_step_and_taken_after_discard(self):
        """Half of the window's buckets would hold three ranks' sum, and the mean over two would be taken of it."""
        second, third = local_group(2, timeout=SOON, join_timeout=SOON), local_group(2, timeout=SOON, join_timeout=SOON)

        def work(exchange):
            engine = GradientEngine(SMALL, max_norm=None, exchange=exchange)
            engine.add([np.full(slot.shape, 1.0 + exchange.rank, np.float32) for slot in SMALL.slots])
            engine._reducer.start(SMALL.spans)
            exchange.wait()
            exchange.close()
            if exchange.rank == 2:
                return 1.5
            with pytest.raises(HandshakeRefused, match=r"step 0 is half summed and rank 0 .*got rank 0 of 2 .*of 3"):
                engine.reconnect(second[exchange.rank])
            engine.discard()
            engine.reconnect(third[exchange.rank])
            engine.add([np.full(slot.shape, 1.0 + exchange.rank, np.float32) for slot in SMALL.slots])
            return float(engine.step().gradients["head"][0])

        assert on_all(work, local_group(3, timeout=SOON)) == [1.5] * 3

    def test_a_rank_that_dropped_its_window_alone_does_not_take_the_next_for_the_sum(self):
        """All sums of the step have landed; one rank then drops its window, joins again and adds another."""
        second = local_group(2, timeout=SOON, join_timeout=SOON)

        def work(exchange):
            engine = GradientEngine(SMALL, max_norm=None, exchange=exchange)
            engine.add([np.full(slot.shape, 1.0, np.float32) for slot in SMALL.slots])
            engine._reducer.start(SMALL.spans)
            exchange.wait()
            exchange.close()
            if exchange.rank == 1:
                engine.discard()
            with pytest.raises(HandshakeRefused, match=r"rank 1 has not contributed to what step 0 has summed"):
                engine.reconnect(second[exchange.rank])
            return True

        assert on_all(work, local_group(2, timeout=SOON)) == [True, True]

    def test_a_group_joined_anew_after_a_verdict_sums_the_next_window(self):
        """What all agreed on belongs to the lost exchange; the new one is waited for, and left clean."""
        second = local_group(2, timeout=SOON, join_timeout=SOON)

        def work(exchange):
            engine = GradientEngine(SMALL, max_norm=None, exchange=exchange)
            bad = [np.full(slot.shape, np.nan, np.float32) for slot in SMALL.slots]
            engine.add(bad)
            with pytest.raises(NonFiniteGradient):
                engine.step()
            exchange.barrier()
            exchange.close()
            engine.reconnect(second[exchange.rank])
            with pytest.raises(NonFiniteGradient):
                engine.step()
            engine.discard()
            sums = []
            for step in (1, 2):
                engine.add([np.full(slot.shape, step + exchange.rank, np.float32) for slot in SMALL.slots])
                sums.append(float(engine.step().gradients["head"][0]))
            return sums

        assert on_all(work, local_group(2, timeout=SOON)) == [[1.5, 2.5]] * 2

    def test_a_window_dropped_right_after_joining_anew_says_what_to_do(self):
        second, third = (local_group(2, timeout=SOON, join_timeout=SOON) for _ in range(2))

        def work(exchange):
            engine = GradientEngine(SMALL, max_norm=None, exchange=exchange)
            engine.add([np.full(slot.shape, np.nan, np.float32) for slot in SMALL.slots])
            with pytest.raises(NonFiniteGradient):
                engine.step()
            exchange.barrier()
            exchange.close()
            engine.reconnect(second[exchange.rank])
            engine.discard()  # its spans are on their way again
            engine.add([np.full(slot.shape, 1 + exchange.rank, np.float32) for slot in SMALL.slots])
            with pytest.raises(PeerLost, match=r"dropped a window that was on its way; reconnect\(\) on all ranks"):
                engine.step()
            engine.reconnect(third[exchange.rank])
            return float(engine.step().gradients["head"][0])

        assert on_all(work, local_group(2, timeout=SOON)) == [1.5, 1.5]
