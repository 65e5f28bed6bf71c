"""The step of several workers whose gradients lie on GPUs, or some on a GPU and some not: one set of bytes for all."""

import contextlib
import math

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import available
from devices import bits_of, on_host, put_all, synchronize
from ranks import OPTIONS, on_links, on_ranks

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient, local_group
from gradengine.errors import HandshakeRefused, PeerLost
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.kernels.cuda_runtime import CudaRuntime

LAYOUT = GradientLayout.transformer(2, 8, 4, 12, 16)
SMALL = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})


HOST = available("host")


@pytest.fixture(params=["012", "02"])
def kernels_of(request, device):
    """A rank's kernels: the ranks named are on the device, the others on the CPU."""
    return lambda rank: device if str(rank) in request.param else HOST


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
        ("average", "max_norm"), [("weighted", None), ("per_worker", None), ("prescaled", None), ("weighted", 0.5)]
    )
    def test_on_all_ranks_and_those_of_workers_on_the_cpu(self, kernels_of, average, max_norm):
        """Without a bound to the bit; with one to the rounding of a factor, since devices sum squares differently."""
        options = {"average": average, "max_norm": max_norm}
        mixed = on_ranks(lambda e: train(e, kernels_of(e.rank), 2, **options), 3)
        on_cpu = on_ranks(lambda e: train(e, HOST, 2, **options), 3)
        assert all(outcome == mixed[0] for outcome in mixed), mixed
        for (*norms, weight, count, got), (*wanted_norms, wanted_weight, wanted_count, wanted) in zip(
            mixed[0], on_cpu[0], strict=True
        ):
            assert (weight, count) == (wanted_weight, wanted_count)
            assert norms == pytest.approx(wanted_norms, rel=1e-6)
            if max_norm is None:
                assert got == wanted
            for name in got:
                arrays = (np.frombuffer(bits[name], np.float32) for bits in (got, wanted))
                np.testing.assert_allclose(*arrays, rtol=3e-7)

    @pytest.mark.parametrize("options", [{"hold": 2}, {"micro_batches": 2, "hold": 3}])
    def test_knowing_and_holding_change_no_bit(self, device, options):
        plain = on_ranks(lambda e: train(e, device, 2), 2)
        assert on_ranks(lambda e: train(e, device, 2, **options), 2) == plain

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


class TestNonFinite:
    @pytest.mark.parametrize(("policy", "bad_rank"), [("raise", 0), ("skip", 1), ("propagate", 0)])
    def test_is_blamed_on_its_rank_everywhere_at_once(self, kernels_of, policy, bad_rank):
        def one(exchange):
            backend = kernels_of(exchange.rank)
            engine = GradientEngine(SMALL, backend.kernels, exchange=exchange, on_non_finite=policy, max_norm=1.0)
            gradients = contribution(exchange.rank, 0, 0, SMALL)
            if exchange.rank == bad_rank:
                gradients[1][3] = math.inf
            engine.add(put_all(backend, gradients))
            try:
                result = engine.step()
                found, is_zero = result.non_finite, not any(on_host(a).any() for a in result.gradients.values())
            except NonFiniteGradient as error:
                found, is_zero = error, None
                engine.discard()
            engine.add(put_all(backend, contribution(exchange.rank, 1, 0, SMALL)))
            result = engine.step()  # and nothing is raised late
            synchronize(backend)
            told = found.component, found.index, found.value, found.rank, found.step
            return told, is_zero, result.step, bits_of(result)

        first, *others = on_ranks(one, 3)
        is_zero = {"raise": None, "skip": True, "propagate": False}[policy]
        assert first[:3] == (("layers.1.w", 3, math.inf, bad_rank, 0), is_zero, 1)
        assert all(other == first for other in others)

    def test_a_sum_that_overflows_is_nobodys_fault(self, device):
        def one(exchange):
            options = {"exchange": exchange, "on_non_finite": "skip"}
            engine = GradientEngine(GradientLayout.of([(2,)]), device.kernels, **options)
            engine.add([device.put(np.array([0, 3e38], np.float32))])
            found = engine.step().non_finite
            return found.rank, found.index, found.value

        assert on_ranks(one, 2) == [(None, 1, math.inf)] * 2


class TestAfterAFault:
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


@pytest.fixture(params=[0, 8 << 20], ids=["one-row", "many-rows"])
def in_flight(request, monkeypatch):
    """Rows for one share, or for all of them."""
    monkeypatch.setitem(OrderedAllReduce.__init__.__kwdefaults__, "in_flight", request.param)


@pytest.mark.usefixtures("in_flight")
class TestOverLinks:
    @pytest.mark.parametrize("options", [{}, {"average": "per_worker", "micro_batches": 2, "hold": 2}])
    def test_all_bytes_are_those_of_workers_on_the_cpu(self, kernels_of, options):
        """The norm's too: all have the squared sums that the owners measured."""
        mixed = on_links(lambda e: train(e, kernels_of(e.rank), **options), 3, bucket_bytes=84)
        assert mixed == on_links(lambda e: train(e, HOST, **options), 3, bucket_bytes=84)
        assert all(isinstance(outcome, list) for outcome in mixed), mixed

    @pytest.mark.parametrize(("lost_after", "average"), [(14, "per_worker"), (34, "weighted"), (54, "per_worker")])
    def test_a_step_that_is_lost_anywhere_is_made_again_or_its_window_is_lost(self, kernels_of, lost_after, average):
        options = {"max_norm": 0.5, "average": average}

        def first(exchange):
            backend = kernels_of(exchange.rank)
            engine = GradientEngine(LAYOUT, backend.kernels, exchange=exchange, micro_batches=2, **options)

            def step():
                add_window(engine, backend, exchange.rank)  # its last part is in the window before any of it leaves
                engine.step()

            with pytest.raises(PeerLost):
                step()
            return engine

        def again(exchange):
            engine, backend = engines[exchange.rank], kernels_of(exchange.rank)
            try:
                engine.reconnect(exchange)
            except HandshakeRefused as lost:
                refusals.append(str(lost))
                engine.discard()
                engine.reconnect(third[exchange.rank])
                add_window(engine, backend, exchange.rank)
            first = bits_of(engine.step())
            add_window(engine, backend, exchange.rank, step=1)
            return first, bits_of(engine.step())

        undisturbed = on_links(lambda e: train(e, HOST, steps=2, **options), 3, bucket_bytes=84)
        wanted = tuple(step[-1] for step in undisturbed[0])
        engines = on_links(first, 3, bucket_bytes=84, lost_after=lost_after)
        assert all(isinstance(engine, GradientEngine) for engine in engines), engines
        third, refusals = local_group(3, bucket_bytes=84, **OPTIONS), []
        assert on_links(again, 3, bucket_bytes=84) == [wanted] * 3
        assert len(refusals) in {0, 3}, refusals


class TestCopiesOfShares:
    def test_take_pinned_memory_for_those_that_are_on_their_way(self, emulated, monkeypatch):
        monkeypatch.setitem(OrderedAllReduce.__init__.__kwdefaults__, "in_flight", 0)
        layout = GradientLayout.of({f"layers.{n}.w": (1000,) for n in range(10)})

        def one(exchange):
            backend = HOST if exchange.rank else emulated
            return train(exchange, backend, steps=2, layout=layout)

        asked, sound = [], CudaRuntime.pinned

        def pinned(self, count, dtype):
            asked.append(count * np.dtype(dtype).itemsize)
            return sound(self, count, dtype)

        monkeypatch.setattr(CudaRuntime, "pinned", pinned)
        with cuda_emulator.recorded() as record:
            on_gpu, on_cpu = on_links(one, 2, bucket_bytes=4000)
        assert on_gpu == on_cpu
        assert record.copies.count("device to host") >= 20
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
            for _ in range(2):
                add_window(engine, emulated, exchange.rank)
                exchange.barrier()
                with contextlib.nullcontext() if exchange.rank else cuda_emulator.recorded() as record:
                    engine.step()
                    exchange.barrier()
            return record

        record, _ = on_ranks(one, 2)
        assert record.copies.count("host to device") <= 2  # this rank's, and the other's in the same time
        assert record.pinned_allocations == record.allocations == []

    def test_an_engine_alone_has_none(self, emulated):
        with cuda_emulator.recorded() as record:
            engine = GradientEngine(SMALL, emulated.kernels, max_norm=1.0)
        assert sum(record.pinned_allocations) < SMALL.nbytes + 4096
        assert engine.exchange is None
