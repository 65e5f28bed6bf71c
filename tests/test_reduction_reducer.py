"""The step of several workers whose gradients lie on GPUs, or some on a GPU and some not: one set of bytes for all."""

import math
import threading

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import bits_of, on_host, put_all, synchronize
from ranks import may_hold_sums, on_links, on_ranks

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient
from gradengine.errors import ExchangeError, PeerLost, WindowError
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.kernels.cuda_runtime import CudaRuntime

LAYOUT = GradientLayout.transformer(2, 8, 4, 12, 16)
SMALL = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})


@pytest.fixture(params=["012", "1", "02"])
def kernels_of(request, device, backend_on_host):
    """A rank's kernels: the ranks named are on the device, the others on the CPU."""
    return lambda rank: device if str(rank) in request.param else backend_on_host


@pytest.fixture(scope="session")
def backend_on_host():
    from backends import available  # the fixture `backend` would be every one of them

    return available("host-1")


def contribution(rank, step, k, layout=LAYOUT):
    return draw.random_gradients([rank, step, k], layout.slots)


def add_window(engine, backend, rank, step=0, layout=LAYOUT):
    for k in range(2):
        engine.add(put_all(backend, contribution(rank, step, k, layout)), weight=1.0 + k + rank)


def train(exchange, backend, steps=3, layout=LAYOUT, **options):
    engine = GradientEngine(layout, backend.kernels, exchange=exchange, **{"max_norm": 0.5, **options})
    outcomes = []
    for step in range(steps):
        add_window(engine, backend, exchange.rank, step, layout)
        result = engine.step()
        outcomes.append((result.norm, result.scale, result.weight, result.micro_batches, bits_of(result)))
    return outcomes


class TestSameBytes:
    @pytest.mark.parametrize(
        ("world_size", "average"), [(2, "weighted"), (3, "weighted"), (3, "per_worker"), (3, "sum")]
    )
    def test_on_all_ranks_and_those_of_workers_on_the_cpu(self, kernels_of, backend_on_host, world_size, average):
        """Without a bound to the bit; with one to the rounding of a factor, since devices sum squares differently."""
        for options in ({"average": average, "max_norm": None}, {"average": average, "max_norm": 0.5}):
            mixed = on_ranks(lambda e, o=options: train(e, kernels_of(e.rank), 2, **o), world_size)
            on_cpu = on_ranks(lambda e, o=options: train(e, backend_on_host, 2, **o), world_size)
            assert all(outcome == mixed[0] for outcome in mixed), mixed
            for (norm, scale, *facts, got), (wanted_norm, wanted_scale, *wanted_facts, wanted) in zip(
                mixed[0], on_cpu[0], strict=True
            ):
                assert facts == wanted_facts
                assert (norm, scale) == pytest.approx((wanted_norm, wanted_scale), rel=1e-6)
                if options["max_norm"] is None:
                    assert got == wanted
                for name in got:
                    arrays = (np.frombuffer(bits[name], np.float32) for bits in (got, wanted))
                    np.testing.assert_allclose(*arrays, rtol=3e-7)

    @pytest.mark.parametrize("options", [{"micro_batches": 2}, {"hold": 2}, {"micro_batches": 2, "hold": 3}])
    def test_knowing_and_holding_change_no_bit(self, device, options):
        plain = on_ranks(lambda e: train(e, device, 2), 2)
        assert on_ranks(lambda e: train(e, device, 2, **options), 2) == plain

    @pytest.mark.parametrize("bucket_bytes", [64, 1 << 21])
    def test_blocks_that_leave_early(self, device, bucket_bytes):
        def overlapped(exchange):
            engine = GradientEngine(LAYOUT, device.kernels, max_norm=0.5, exchange=exchange)
            for k in range(2):
                arrays = put_all(device, contribution(exchange.rank, 0, k))
                named = dict(zip((slot.name for slot in LAYOUT.slots), arrays, strict=True))
                weight, last = 1.0 + k + exchange.rank, k == 1
                for name in ("lm_head", "final_norm"):
                    engine.add_non_block(name, named[name], weight, last=last)
                for block in reversed(LAYOUT.blocks):
                    engine.add_block(block.index, [named[s.name] for s in block.slots], weight, last=last)
                engine.add_non_block("embedding", named["embedding"], weight, last=last)
            return bits_of(engine.step())

        wanted = on_ranks(lambda e: train(e, device, steps=1), 2)[0][0][4]
        assert on_ranks(overlapped, 2, bucket_bytes=bucket_bytes) == [wanted] * 2

    def test_one_worker_is_no_exchange(self, device):
        """Alone in its group a GPU's step stays asynchronous, and its verdict late."""

        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, max_norm=None, exchange=exchange)
            engine.add(put_all(device, contribution(0, 0, 0, SMALL)))
            result = engine.step()
            return isinstance(result.norm, device.xp.ndarray), bits_of(result)

        ((is_there, bits),) = on_ranks(one, 1)
        assert is_there
        assert list(bits.values()) == [array.tobytes() for array in contribution(0, 0, 0, SMALL)]

    def test_destinations_groups_and_loss_scale(self, kernels_of):
        def one(exchange):
            backend = kernels_of(exchange.rank)
            options = {"groups": "block", "loss_scale": 64.0, "max_norm": 1e-3, "exchange": exchange}
            engine = GradientEngine(LAYOUT, backend.kernels, **options)
            add_window(engine, backend, exchange.rank)
            dtypes = [list(draw.DTYPES.values())[i % 3] for i in range(len(LAYOUT.slots))]
            nines = [np.full(slot.shape, 9, dtype) for slot, dtype in zip(LAYOUT.slots, dtypes, strict=True)]
            out = put_all(backend, nines)
            result = engine.step(out=out)
            return [on_host(array).tobytes() for array in out], dict(result.group_norms), tuple(result.block_norms)

        first, *others = on_ranks(one, 3)
        assert all(other == first for other in others), others

    def test_a_deferred_step_leaves_the_sum_of_all(self, device):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, max_norm=1.0)
            engine.add(put_all(device, contribution(exchange.rank, 0, 0, SMALL)))
            return bits_of(engine.step(deferred=True))

        sums = [a + b for a, b in zip(*(contribution(rank, 0, 0, SMALL) for rank in range(2)), strict=True)]
        assert [list(bits.values()) for bits in on_ranks(one, 2)] == [[total.tobytes() for total in sums]] * 2


class TestNonFinite:
    @pytest.mark.parametrize("policy", ["raise", "skip", "pass"])
    @pytest.mark.parametrize("bad_rank", [0, 1])
    def test_is_blamed_on_its_rank_everywhere_at_once(self, kernels_of, policy, bad_rank):
        def one(exchange):
            backend = kernels_of(exchange.rank)
            engine = GradientEngine(SMALL, backend.kernels, exchange=exchange, on_non_finite=policy, max_norm=1.0)
            gradients = contribution(exchange.rank, 0, 0, SMALL)
            if exchange.rank == bad_rank:
                gradients[1][3] = math.inf
            engine.add(put_all(backend, gradients))
            try:
                found = engine.step().non_finite
            except NonFiniteGradient as error:
                assert policy == "raise"
                found = error
                engine.discard()
            engine.add(put_all(backend, contribution(exchange.rank, 1, 0, SMALL)))
            result = engine.step()  # and nothing is raised late
            synchronize(backend)
            return (found.component, found.index, found.value, found.rank, found.step), result.step, bits_of(result)

        first, *others = on_ranks(one, 3)
        assert first[:2] == (("layers.1.w", 3, math.inf, bad_rank, 0), 1)
        assert all(other == first for other in others)

    def test_skip_hands_back_zeros(self, device):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, on_non_finite="skip", max_norm=1.0)
            gradients = contribution(exchange.rank, 0, 0, SMALL)
            gradients[0][0, 0] = math.nan
            engine.add(put_all(device, gradients))
            result = engine.step()
            return result.skipped, [on_host(array).any() for array in result.gradients.values()]

        assert on_ranks(one, 2) == [(True, [False] * 3)] * 2

    def test_a_sum_that_overflows_is_nobodys_fault(self, device):
        def one(exchange):
            options = {"exchange": exchange, "on_non_finite": "skip"}
            engine = GradientEngine(GradientLayout.of([(2,)]), device.kernels, **options)
            engine.add([device.put(np.array([0, 3e38], np.float32))])
            found = engine.step().non_finite
            return found.rank, found.index, found.value

        assert on_ranks(one, 2) == [(None, 1, math.inf)] * 2


class TestAfterAFault:
    def test_a_rank_that_leaves_fails_the_others_and_loses_nothing(self, kernels_of):
        def one(exchange):
            backend = kernels_of(exchange.rank)
            engine = GradientEngine(SMALL, backend.kernels, exchange=exchange, max_norm=None)
            gradients = contribution(exchange.rank, 0, 0, SMALL)
            arrays = put_all(backend, gradients)
            engine.add(arrays)
            if exchange.rank == 1:
                exchange.close()
                return None
            with pytest.raises(PeerLost, match="rank 1 is gone"):
                engine.step()
            with pytest.raises(WindowError, match="failed"):
                engine.add(arrays)
            kept = engine.accumulator.views().values()
            return all(a.tobytes() == on_host(b).tobytes() for a, b in zip(gradients, kept, strict=True))

        assert on_ranks(one, 3) == [True, None, True]

    @pytest.mark.parametrize(("started", "average"), [(1, "weighted"), (2, "per_worker"), (4, "weighted")])
    def test_a_lost_exchange_is_gone_on_with(self, kernels_of, average, started):
        """All ranks break off with some spans summed; the second try ends with the undisturbed bytes."""
        spans, begun, never = [span.key for span in LAYOUT.spans], [], threading.Event()

        def broken(exchange):
            backend = kernels_of(exchange.rank)
            engine = GradientEngine(LAYOUT, backend.kernels, max_norm=0.5, exchange=exchange, average=average)
            add_window(engine, backend, exchange.rank)
            begun.append(engine)
            if exchange.rank == 1:  # contributes some spans, then its network is gone
                engine.accumulator.close()
                engine._reducer.start(span for span in LAYOUT.spans if span.key in spans[:started])
                while not (len(begun) == 3 and all(map(may_hold_sums, begun))):
                    assert not never.wait(0.001)
                exchange.close()
                return engine
            with pytest.raises((PeerLost, ExchangeError)):
                engine.step()
            return engine

        def again(exchange):
            engine = engines[exchange.rank]
            assert may_hold_sums(engine)
            engine.reconnect(exchange)
            first = bits_of(engine.step())
            add_window(engine, kernels_of(exchange.rank), exchange.rank, step=1)
            return first, bits_of(engine.step())

        undisturbed = on_ranks(lambda e: train(e, kernels_of(e.rank), steps=2, average=average), 3)
        wanted = tuple(step[4] for step in undisturbed[0])
        engines = on_ranks(broken, 3, bucket_bytes=64)
        assert all(isinstance(engine, GradientEngine) for engine in engines), engines
        assert on_ranks(again, 3, bucket_bytes=64) == [wanted] * 3

    def test_a_window_discarded_on_its_way_begins_anew(self, device):
        def first(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, micro_batches=1, max_norm=None)
            engine.add(put_all(device, contribution(exchange.rank, 9, 9, SMALL)))
            if exchange.rank == 1:
                engine.discard()
            return engine

        engines = on_ranks(first, 2, timeout=2.0)

        def again(exchange):
            engine = engines[exchange.rank]
            engine.discard()
            engine.reconnect(exchange)
            engine.add(put_all(device, contribution(exchange.rank, 0, 0, SMALL)))
            return list(bits_of(engine.step()).values())

        a, b = (contribution(rank, 0, 0, SMALL) for rank in range(2))
        wanted = [((x + y) * np.float32(0.5)).tobytes() for x, y in zip(a, b, strict=True)]
        assert on_ranks(again, 2) == [wanted] * 2

    def test_settings_that_differ_are_an_error_on_every_rank(self, kernels_of):
        def one(exchange):
            backend, bound = kernels_of(exchange.rank), 1.0 + exchange.rank
            engine = GradientEngine(SMALL, backend.kernels, exchange=exchange, max_norm=bound)
            engine.add(put_all(backend, contribution(0, 0, 0, SMALL)))
            with pytest.raises(ExchangeError, match="rank 1 has another max_norm than rank 0"):
                engine.step()
            return True

        assert on_ranks(one, 2) == [True, True]


@pytest.fixture(params=[0, 8 << 20], ids=["one-row", "many-rows"])
def in_flight(request, monkeypatch):
    """Rows for one share, or for all of them."""
    monkeypatch.setitem(OrderedAllReduce.__init__.__kwdefaults__, "in_flight", request.param)


@pytest.mark.usefixtures("in_flight")
class TestOverLinks:
    @pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"average": "per_worker", "hold": 2}])
    def test_all_bytes_are_those_of_workers_on_the_cpu(self, kernels_of, backend_on_host, options):
        """The norm's too: all have the squared sums that the owners measured."""
        mixed = on_links(lambda e: train(e, kernels_of(e.rank), **options), 3, bucket_bytes=84)
        assert mixed == on_links(lambda e: train(e, backend_on_host, **options), 3, bucket_bytes=84)
        assert all(isinstance(outcome, list) for outcome in mixed), mixed

    @pytest.mark.parametrize("lost_after", range(14, 55, 10))
    def test_a_step_that_is_lost_anywhere_is_gone_on_with(self, kernels_of, backend_on_host, lost_after):
        def first(exchange):
            backend = kernels_of(exchange.rank)
            engine = GradientEngine(LAYOUT, backend.kernels, max_norm=0.5, exchange=exchange, micro_batches=2)
            try:
                add_window(engine, backend, exchange.rank)  # its last part is in the window before any of it leaves
                engine.step()
            except PeerLost:
                return engine
            return "the step was not lost"

        def again(exchange):
            engine = engines[exchange.rank]
            engine.reconnect(exchange)
            first = bits_of(engine.step())
            add_window(engine, kernels_of(exchange.rank), exchange.rank, step=1)
            return first, bits_of(engine.step())

        undisturbed = on_links(lambda e: train(e, backend_on_host, steps=2), 3, bucket_bytes=84)
        wanted = tuple(step[-1] for step in undisturbed[0])
        engines = on_links(first, 3, bucket_bytes=84, lost_after=lost_after)
        assert all(isinstance(engine, GradientEngine) for engine in engines), engines
        assert on_links(again, 3, bucket_bytes=84) == [wanted] * 3

    def test_a_sum_that_is_not_finite_is_blamed_on_its_rank(self, kernels_of):
        def one(exchange):
            backend = kernels_of(exchange.rank)
            engine = GradientEngine(SMALL, backend.kernels, exchange=exchange, on_non_finite="skip")
            gradients = contribution(exchange.rank, 0, 0, SMALL)
            gradients[1][3] = math.inf if exchange.rank == 2 else 0
            engine.add(put_all(backend, gradients))
            found = engine.step().non_finite
            return found.component, found.index, found.value, found.rank

        assert on_links(one, 3) == [("layers.1.w", 3, math.inf, 2)] * 3


class TestCopiesOfShares:
    def test_take_pinned_memory_for_those_that_are_on_their_way(self, emulated, backend_on_host, monkeypatch):
        monkeypatch.setitem(OrderedAllReduce.__init__.__kwdefaults__, "in_flight", 0)
        layout = GradientLayout.of({f"layers.{n}.w": (1000,) for n in range(40)})

        def one(exchange):
            backend = backend_on_host if exchange.rank else emulated
            return train(exchange, backend, steps=2, layout=layout)

        asked, sound = [], CudaRuntime.pinned

        def pinned(self, count, dtype):
            asked.append(count * np.dtype(dtype).itemsize)
            return sound(self, count, dtype)

        monkeypatch.setattr(CudaRuntime, "pinned", pinned)
        with cuda_emulator.recorded() as record:
            on_gpu, on_cpu = on_links(one, 2, bucket_bytes=4000)
        assert on_gpu == on_cpu
        assert record.copies.count("device to host") >= 80
        assert [size for size in asked if size >= 4000] == [4000, 4000], "one of the rank's own, one of the other's"

    def test_are_not_waited_for_by_who_starts_them(self, emulated):
        def one(exchange):
            engine = GradientEngine(LAYOUT, emulated.kernels, exchange=exchange, micro_batches=2)
            gradients = put_all(emulated, contribution(exchange.rank, 0, 0))
            engine.add(gradients)
            exchange.barrier()
            waits = None
            if exchange.rank == 0:
                with cuda_emulator.recorded() as record:
                    engine.add(gradients)
                waits = record.waits
            exchange.barrier()
            if exchange.rank == 1:
                engine.add(gradients)
            return waits, bits_of(engine.step())

        (waits, bits), (_, others) = on_links(one, 2)
        assert waits == []
        assert bits == others


class TestMirror:
    def test_a_span_is_fetched_once_and_the_arena_put_back_once(self, emulated):

        def one(exchange):
            engine = GradientEngine(LAYOUT, emulated.kernels, exchange=exchange, max_norm=None)
            add_window(engine, emulated, exchange.rank)
            engine.step()
            add_window(engine, emulated, exchange.rank)
            exchange.barrier()
            if exchange.rank == 1:
                engine.step()
                return None
            with cuda_emulator.recorded() as record:
                engine.step()
            return record

        record, _ = on_ranks(one, 2)
        copies = [copy for copy in record.copies if copy == "host to device"]
        assert 1 <= len(copies) <= 2  # this rank's, and perhaps the other's in the same time
        assert record.pinned_allocations == []
        assert record.allocations == []

    def test_an_engine_alone_has_none(self, emulated):
        with cuda_emulator.recorded() as record:
            engine = GradientEngine(SMALL, emulated.kernels, max_norm=1.0)
        assert sum(record.pinned_allocations) < SMALL.nbytes + 4096
        assert engine.exchange is None
