"""A request to stop: true in the same step on all ranks, once, whatever becomes of the step that it comes in."""

import contextlib
import sys
from unittest.mock import patch

import cuda_emulator
import numpy as np
import pytest
from devices import assign, churned, number_of, put_all, synchronize
from emulated_process_group import Mirrored, on_group, torch_with_nccl
from interrupts import places_of, raised_at
from ranks import OPTIONS, on_grid, on_ranks
from transports import Transport, group, on_all

from gradengine import DistributedTrainer, GradientEngine, GradientLayout, NonFiniteGradient, local_group
from gradengine.accumulate.state import State
from gradengine.errors import PeerLost, WindowError

LAYOUT = GradientLayout.of({"layers.0.w": (3,), "head": (2,)})
ONES = [np.ones(slot.shape, np.float32) for slot in LAYOUT.slots]
NAN = [np.full(slot.shape, np.nan, np.float32) for slot in LAYOUT.slots]


def stepped(engine, gradients=ONES, **options):
    """Whether the result of a window's step says stop."""
    engine.add(gradients)
    result = engine.step(**options)
    return bool(number_of(result.stop))


def flags_of(seed, steps, ranks):
    """Which rank asks before which step: nobody in half of the steps."""
    seeds = np.random.default_rng(seed)
    return (seeds.random((steps, ranks)) < 0.5) & (seeds.random((steps, 1)) < 0.5)


def steps_of(engine, flags, gradients=ONES):
    """Whether each step says stop, where this rank asks as the flags say: before its window, or in it."""
    found = []
    for step, asks in enumerate(flags):
        if asks and step % 2:
            engine.stop_after_step()
        engine.add(gradients)
        if asks:
            engine.stop_after_step()
        found.append(bool(number_of(engine.step().stop)))
    return found


class TestAllRanks:
    @pytest.mark.parametrize("transport", [Transport.THREADS, Transport.UNIX, Transport.TCP])
    @pytest.mark.parametrize("ranks", range(1, 5))
    def test_stop_in_the_step_in_which_any_of_them_asks(self, transport, ranks):
        flags = flags_of(ranks, 12, ranks)

        def work(exchange):
            return steps_of(GradientEngine(LAYOUT, exchange=exchange), flags[:, exchange.rank])

        with group(transport, ranks, **OPTIONS) as exchanges:
            assert on_all(work, exchanges) == [flags.any(axis=1).tolist()] * ranks
        assert len({*flags.any(axis=1).tolist()}) == 2

    @pytest.mark.parametrize("workers", [1, 2])
    def test_of_a_tensor_parallel_grid_too(self, workers):
        flags = np.kron(np.eye(2 * workers, dtype=bool), [[True], [False]])  # each rank alone, then nobody

        def work(group, parts):
            partitions = {"layers.0.w": "column", "head": "replicated"}
            layout = GradientLayout.of(
                {"layers.0.w": (3,), "head": (2,)}, tp_rank=parts.rank, tp_size=2, partitions=partitions
            )
            engine = GradientEngine(layout, exchange=group, tp_exchange=parts)
            return steps_of(engine, flags[:, 2 * group.rank + parts.rank])

        assert on_grid(work, workers, 2) == [[flags.any(axis=1).tolist()] * 2] * workers

    def test_a_trainers_last_result_says_so(self):
        class Descent:
            def forward_backward(self, target):
                return 0.0, ONES

            def apply_gradients(self, gradients):
                pass

        def work(exchange):
            trainer, found = DistributedTrainer(Descent(), exchange, LAYOUT), []
            for step in range(3):
                if exchange.rank == step == 1:
                    trainer.engine.stop_after_step()
                trainer.train_batch([1])
                found.append(trainer.last_result.stop)
            return found

        assert on_ranks(work, 2) == [[False, True, False]] * 2


class TestWhenItIsRead:
    def test_one_that_comes_after_that_counts_for_the_next_step_also_after_another_one(self):
        engine = GradientEngine(LAYOUT)
        hand_back = engine._kernels.hand_back

        def late(*given):
            engine.stop_after_step()
            hand_back(*given)

        engine.stop_after_step()
        with patch.object(type(engine._kernels), "hand_back", side_effect=late):
            assert stepped(engine) is True
        assert [stepped(engine) for _ in range(2)] == [True, False]

    def test_one_that_comes_while_the_ranks_agree_counts_for_the_next_step_on_all(self):
        def work(exchange):
            engine, gather = GradientEngine(LAYOUT, exchange=exchange), exchange.all_gather

            def late(data):
                engine.stop_after_step()
                return gather(data)

            with patch.object(exchange, "all_gather", late) if exchange.rank else contextlib.nullcontext():
                found = [stepped(engine)]
            return found + [stepped(engine) for _ in range(2)]

        assert on_ranks(work, 2) == [[False, True, False]] * 2

    def test_several_before_one_step_are_one(self):
        engine = GradientEngine(LAYOUT)
        engine.stop_after_step()
        engine.stop_after_step()
        assert [stepped(engine) for _ in range(2)] == [True, False]


class TestKept:
    def test_by_a_step_that_is_not_finite_and_by_discard(self):
        engine = GradientEngine(LAYOUT)
        engine.stop_after_step()
        for _ in range(2):
            with pytest.raises(NonFiniteGradient):
                stepped(engine, NAN)
            engine.discard()
        assert [stepped(engine) for _ in range(2)] == [True, False]

    @pytest.mark.parametrize("again", [False, True])
    def test_by_a_step_that_all_ranks_agreed_on_and_refused(self, again):
        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange)
            if exchange.rank:
                engine.stop_after_step()
            engine.add(NAN)
            for _ in range(1 + again):
                with pytest.raises(NonFiniteGradient):
                    engine.step()
            engine.discard()
            return [stepped(engine) for _ in range(2)]

        assert on_ranks(work, 2) == [[True, False]] * 2

    def test_by_a_step_without_a_micro_batch_on_any_rank(self):
        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange)
            if exchange.rank:
                engine.stop_after_step()
            engine.add(None, weight=0)
            with pytest.raises(WindowError, match="without a micro-batch"):
                engine.step()
            return [stepped(engine) for _ in range(2)]

        assert on_ranks(work, 2) == [[True, False]] * 2

    def test_by_a_step_whose_exchange_is_lost(self):
        spares = local_group(2, **OPTIONS)

        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange)
            engine.add(ONES)
            if exchange.rank:
                exchange.close()
            else:
                engine.stop_after_step()
            with pytest.raises(PeerLost):
                engine.step()
            engine.reconnect(spares[exchange.rank])
            return [engine.step().stop, stepped(engine)]

        assert on_ranks(work, 2) == [[True, False]] * 2

    def test_by_a_step_that_is_interrupted_at_any_line(self):
        """Unless the step was over: then its result had it, and was lost."""

        def new():
            engine = GradientEngine(LAYOUT)
            engine.add(ONES)
            engine.stop_after_step()
            return engine

        kept = 0
        for at in places_of(new().step):
            engine = new()
            raised_at(at, engine.step, KeyboardInterrupt())
            was_over = engine.current_step == 1
            engine.discard()
            assert [stepped(engine) for _ in range(2)] == [not was_over, False], at
            kept += not was_over
        assert kept > 50

    def test_by_no_saved_state(self):
        engine, resumed = GradientEngine(LAYOUT), GradientEngine(LAYOUT)
        engine.stop_after_step()
        engine.add(ONES)
        state = engine.state_dict()
        resumed.load_state_dict(state)
        assert resumed.step().stop is False
        engine.discard()
        engine.load_state_dict(state)
        assert [engine.step().stop, stepped(engine)] == [True, False]

    def test_a_resumed_run_stops_by_a_request_of_its_own(self):
        engine, resumed = GradientEngine(LAYOUT), GradientEngine(LAYOUT)
        engine.stop_after_step()
        assert stepped(engine) is True
        resumed.load_state_dict(engine.state_dict())
        resumed.stop_after_step()
        assert [stepped(resumed) for _ in range(2)] == [True, False]


class TestReported:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_by_a_step_that_is_skipped_and_by_one_that_is_deferred(self, ranks):
        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, on_non_finite="skip")
            found = []
            for gradients, options in ((NAN, {}), (ONES, {"deferred": True})):
                engine.stop_after_step()
                found += [stepped(engine, gradients, **options), stepped(engine)]
            return found

        assert on_ranks(work, ranks) == [[True, False] * 2] * ranks

    def test_as_a_bool_of_a_lone_engine_and_in_no_figures(self, backend):
        engine = GradientEngine(LAYOUT, backend.kernels)
        for asks in (True, False):
            if asks:
                engine.stop_after_step()
            engine.add(put_all(backend, ONES))
            result = engine.step()
            assert result.stop is asks
            assert "stop" not in result.metrics()


class TestCaptured:
    def captured(self, engine, arrays):
        with engine.capture() as graph:
            engine.add(arrays)
            result = engine.step()
        assert not number_of(result.stop), "nothing was made"
        return graph

    def test_each_replay_reads_the_request_and_a_recording_does_not(self, device):
        engine, arrays = GradientEngine(LAYOUT, device.kernels), put_all(device, ONES)
        engine.stop_after_step()
        graph = self.captured(engine, arrays)
        found = [graph.replay().stop for _ in range(2)]
        engine.stop_after_step()
        found += [graph.replay().stop, stepped(engine, arrays), graph.replay().stop]
        assert found == [True, False, True, False, False]
        for array in arrays:
            assign(array, np.float32(np.nan))
        engine.stop_after_step()
        result = graph.replay()
        assert (result.stop, number_of(result.skipped)) == (True, 1.0)

    def test_one_that_is_interrupted_at_any_line_keeps_it(self, emulated):
        def new():
            engine, arrays = GradientEngine(LAYOUT, emulated.kernels), put_all(emulated, ONES)
            graph = self.captured(engine, arrays)
            engine.stop_after_step()
            return engine, graph

        for at in places_of(new()[1].replay)[::3]:
            engine, graph = new()
            raised_at(at, graph.replay, KeyboardInterrupt())
            was_over = engine._state.now is not State.BROKEN and engine.current_step == 1
            if engine.has_open_window:
                engine.discard()
            assert [graph.replay().stop for _ in range(2)] == [not was_over, False], at

    def test_with_sums_by_nccl_on_the_device(self, emulated, monkeypatch):
        """Its ranks hold what rank 0 does. A replay waits for nothing, also where it sends a request."""
        torch = torch_with_nccl(emulated.xp)
        monkeypatch.setitem(sys.modules, "torch", torch)
        engine, arrays = GradientEngine(LAYOUT, emulated.kernels), put_all(emulated, ONES)

        def join(exchange):
            if exchange.rank == 0:
                engine.reconnect(exchange)
            else:
                GradientEngine(LAYOUT, emulated.kernels, exchange=exchange)

        assert on_group(join, 3, torch, group=Mirrored(torch.xp, 3)) == [None] * 3
        graph = self.captured(engine, arrays)
        found = []
        for step, asks in enumerate([False, True, True, False, True, False]):
            churned(emulated)
            if asks:
                engine.stop_after_step()
            synchronize(emulated)
            with cuda_emulator.recorded() as record:
                result = graph.replay()
            assert (record.waits, record.allocations) == ([], []), step
            found.append(number_of(result.stop))
            assert isinstance(result.stop, emulated.xp.ndarray)
        engine.stop_after_step()
        found += [stepped(engine, arrays), number_of(graph.replay().stop)]
        assert found == [0, 1, 1, 0, 1, 0, 1, 0]
        engine.check()


class TestSumsByNccl:
    @pytest.fixture
    def torch(self, device, monkeypatch):
        torch = torch_with_nccl(device.xp)
        monkeypatch.setitem(sys.modules, "torch", torch)
        return torch

    @pytest.mark.parametrize("ranks", [2, 3, 4])
    def test_stop_in_the_step_in_which_any_of_them_asks(self, device, torch, ranks):
        flags = flags_of(ranks, 8, ranks)

        def work(exchange):
            engine = GradientEngine(LAYOUT, device.kernels, exchange=exchange)
            assert exchange.link == "nccl"
            return steps_of(engine, flags[:, exchange.rank], put_all(device, ONES))

        assert on_group(work, ranks, torch) == [flags.any(axis=1).tolist()] * ranks

    def test_a_step_that_none_can_make_reports_it_too(self, device, torch):
        def work(exchange):
            engine = GradientEngine(LAYOUT, device.kernels, exchange=exchange, on_non_finite="skip")
            if exchange.rank:
                engine.stop_after_step()
            found = [stepped(engine, put_all(device, NAN))]
            engine.stop_after_step()
            engine.add(None, weight=0)
            found.append(bool(number_of(engine.step().stop)))
            with pytest.raises(WindowError, match="none of them had a micro-batch"):
                engine.check()
            return [*found, stepped(engine, put_all(device, ONES))]

        assert on_group(work, 2, torch) == [[True, True, False]] * 2
