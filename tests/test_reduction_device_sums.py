"""Workers whose GPUs sum by a process group's own calls: the bytes of every other transport, and nothing waits.

The group is a stand-in (emulated_process_group.py): its ranks are threads with engines on one device.
"""

import gc
import math
import sys

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import assign, bits_of, churned, number_of, on_host, operations_of, put_all, synchronize
from emulated_process_group import Mirrored, on_group, torch_with_nccl
from ranks import on_ranks

from gradengine import DynamicLossScale, GradientEngine, GradientLayout, NonFiniteGradient, TensorParallelConfig
from gradengine.errors import CallerError, ExchangeError, OutOfDeviceMemory, PeerLost, WindowError
from gradengine.exchange.device_calls import device_calls_of
from gradengine.exchange.shares import rounds_of, shares_of
from gradengine.reduction import reducer
from gradengine.reduction.device_sums import DeviceSums

LAYOUT = GradientLayout.transformer(2, 8, 4, 12, 16)  # one share of each span, or of several
SMALL = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})
WIDE = GradientLayout.of(
    {f"layers.0.w{n}": (16384 + 5 * n,) for n in range(6)} | {"head": (9,)}
)  # a share for each rank


@pytest.fixture
def torch(device, monkeypatch):
    """The stand-in, in torch's place."""
    return _instead_of_torch(device, monkeypatch)


def _instead_of_torch(backend, monkeypatch):
    torch = torch_with_nccl(backend.xp)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def contribution(rank, step, k, layout=LAYOUT):
    return draw.random_gradients([rank, step, k], layout.slots)


def add_window(engine, backend, step=0, layout=LAYOUT):
    for k in range(2):
        engine.add(put_all(backend, contribution(engine.rank, step, k, layout)), weight=1.0 + k + engine.rank)


def figures(result):
    """All that is the same on all ranks."""
    numbers = (result.norm, result.scale, result.weight, result.micro_batches, result.skipped)
    return (*map(number_of, numbers), result.unused, bits_of(result))


def train(exchange, backend, steps=2, layout=LAYOUT, link="nccl", **options):
    engine = GradientEngine(layout, backend.kernels, exchange=exchange, **{"max_norm": None, **options})
    assert exchange.link == link
    outcomes = []
    for step in range(steps):
        add_window(engine, backend, step, layout)
        outcomes.append(figures(engine.step()))
    return outcomes


class TestSameBytes:
    @pytest.mark.parametrize(("ranks", "average"), [(2, "weighted"), (3, "weighted"), (3, "per_worker"), (3, "sum")])
    def test_as_over_threads_on_all_ranks(self, device, torch, ranks, average):
        found = on_group(lambda e: train(e, device, 2, average=average), ranks, torch)
        wanted = on_ranks(lambda e: train(e, device, 2, link="threads", average=average), ranks)
        assert [step[-1] for step in found[0]] == [step[-1] for step in wanted[0]], found
        for ours, theirs in zip(found[0], wanted[0], strict=True):
            assert ours[1:6] == theirs[1:6]
            assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
        assert all(other == found[0] for other in found)

    @pytest.mark.parametrize(("ranks", "bucket_bytes"), [(2, 1 << 22), (3, 1 << 16), (5, 1 << 16)])
    def test_with_a_share_for_each_rank_and_with_more_ranks_than_one_pass_folds(
        self, device, torch, ranks, bucket_bytes
    ):
        rounds = rounds_of(shares_of(WIDE, ranks, ranks * bucket_bytes))
        assert max(map(len, rounds)) > 1
        found = on_group(lambda e: train(e, device, 1, WIDE), ranks, torch, bucket_bytes=bucket_bytes)
        wanted = on_ranks(lambda e: train(e, device, 1, WIDE, link="threads"), ranks)
        assert [outcome[0][-1] for outcome in found] == [outcome[0][-1] for outcome in wanted], found

    @pytest.mark.parametrize(
        "options", [{"micro_batches": 2}, {"hold": 2, "micro_batches": 2}, {"groups": "block", "max_norm": 0.1}]
    )
    def test_clipped_and_whatever_is_known_or_held(self, device, torch, options):
        plain = on_group(lambda e: train(e, device, 2, **{**options, "hold": 1, "micro_batches": None}), 2, torch)
        assert on_group(lambda e: train(e, device, 2, **options), 2, torch) == plain

    @pytest.mark.parametrize("order", ["backward", "forward"])
    def test_blocks_are_sent_as_they_are_complete_in_whatever_order(self, device, torch, order):
        def overlapped(exchange):
            engine = GradientEngine(LAYOUT, device.kernels, max_norm=None, exchange=exchange)
            spans = [*LAYOUT.spans][:: -1 if order == "forward" and exchange.rank else 1]
            for k in range(2):
                arrays = put_all(device, contribution(exchange.rank, 0, k))
                named = dict(zip((slot.name for slot in LAYOUT.slots), arrays, strict=True))
                weight, last = 1.0 + k + exchange.rank, k == 1
                for span in spans:
                    if isinstance(span.key, int):
                        engine.add_block(span.key, [named[s.name] for s in span.slots], weight, last=last)
                    else:
                        engine.add_non_block(span.key, named[span.key], weight, last=last)
            return bits_of(engine.step())

        wanted = on_group(lambda e: train(e, device, steps=1), 2, torch)[0][0][-1]
        assert on_group(overlapped, 2, torch) == [wanted] * 2

    def test_a_rank_without_a_micro_batch_counts_nothing(self, device, torch):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, max_norm=None, exchange=exchange)
            if exchange.rank == 1:
                engine.add(None, weight=0)
            else:
                engine.add(put_all(device, contribution(exchange.rank, 0, 0, SMALL)), weight=4)
            return figures(engine.step())

        found = on_group(one, 2, torch)
        assert found[0] == found[1]
        assert found[0][2:4] == (4.0, 1.0)
        assert [*found[0][-1].values()] == [array.tobytes() for array in contribution(0, 0, 0, SMALL)]

    def test_weights_that_lie_on_the_device_are_added_up_there(self, device, torch):
        def one(exchange, is_there):
            engine, found = GradientEngine(SMALL, device.kernels, max_norm=None, exchange=exchange), []
            for step in range(2):
                for k in range(2):
                    weight = 1.0 + k + exchange.rank
                    given = device.put(np.array(weight, np.float32)) if is_there and k >= step else weight
                    engine.add(put_all(device, contribution(exchange.rank, step, k, SMALL)), weight=given)
                found.append(figures(engine.step()))
            return found

        wanted = on_group(lambda e: one(e, is_there=False), 2, torch)
        assert on_group(lambda e: one(e, is_there=True), 2, torch) == wanted
        assert on_group(lambda e: one(e, is_there=e.rank == 1), 2, torch) == wanted
        assert wanted[0] == wanted[1]

    def test_destinations_and_loss_scale(self, device, torch):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, max_norm=None, exchange=exchange, loss_scale=4.0)
            engine.add(put_all(device, contribution(exchange.rank, 0, 0, SMALL)))
            out = put_all(device, [np.zeros(slot.shape, np.float32) for slot in SMALL.slots])
            engine.step(out)
            return [array.get().tobytes() for array in out]

        both = zip(*(contribution(rank, 0, 0, SMALL) for rank in (0, 1)), strict=True)
        wanted = [((a + b) * np.float32(1 / 8)).tobytes() for a, b in both]
        with device.active():
            assert on_group(one, 2, torch) == [wanted] * 2


class TestUnused:
    def test_is_what_no_rank_had_a_gradient_for(self, device, torch):
        def one(exchange):
            engine, found = GradientEngine(SMALL, device.kernels, exchange=exchange), []
            for lacks in ([[], []], [[1], [1, 2]], [[0], []]):
                gradients = put_all(device, contribution(exchange.rank, 0, 0, SMALL))
                for position in lacks[exchange.rank]:
                    gradients[position] = None
                engine.add(gradients)
                found.append(engine.step().unused)
            return found

        assert on_group(one, 2, torch) == [[frozenset(), {"layers.1.w"}, frozenset()]] * 2

    def test_of_a_model_that_uses_all_nobody_is_asked(self, emulated, monkeypatch):
        torch = _instead_of_torch(emulated, monkeypatch)

        def one(exchange):
            engine = GradientEngine(SMALL, emulated.kernels, exchange=exchange)
            gradients = put_all(emulated, contribution(exchange.rank, 0, 0, SMALL))
            engine.add(gradients)
            engine.step()  # which makes its tables
            exchange.barrier()
            with cuda_emulator.recorded() as record:
                engine.add(gradients)
                result = engine.step()
                assert result.unused == frozenset()
                waits = [*record.waits]
                exchange.barrier()
            return waits

        assert on_group(one, 2, torch) == [[], []]


class TestVerdict:
    @pytest.mark.parametrize("policy", ["raise", "skip", "pass"])
    def test_of_what_is_not_finite_is_the_same_on_all_ranks_and_late(self, device, torch, policy):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, on_non_finite=policy)
            gradients = contribution(exchange.rank, 0, 0, SMALL)
            if exchange.rank == 1:
                gradients[1][3] = math.inf
            engine.add(put_all(device, gradients))
            result = engine.step()
            bits, skipped = bits_of(result), number_of(result.skipped)
            if policy == "raise":
                with pytest.raises(NonFiniteGradient) as caught:
                    engine.check()
                found = caught.value
            else:
                engine.check()
                found = result.non_finite
            engine.add(put_all(device, contribution(exchange.rank, 1, 0, SMALL)))
            after = figures(engine.step())
            return (found.component, found.index, found.value, found.rank, found.step), skipped, bits, after

        first, second = on_group(one, 2, torch)
        assert first == second
        assert first[:2] == (("layers.1.w", 3, math.inf, None, 0), float(policy != "pass"))
        assert any(np.frombuffer(bits, np.float32).any() for bits in first[2].values()) is (policy == "pass")
        assert first[3][4] == 0

    def test_moves_a_dynamic_loss_scale_alike_on_all_ranks(self, device, torch):
        def one(exchange):
            options = {"loss_scale": DynamicLossScale(8.0), "on_non_finite": "skip", "max_norm": None}
            engine, found = GradientEngine(SMALL, device.kernels, exchange=exchange, **options), []
            for step in range(3):
                gradients = contribution(exchange.rank, step, 0, SMALL)
                gradients[0][0, 0] = math.inf if (exchange.rank, step) == (1, 1) else 1
                engine.add(put_all(device, gradients))
                result = engine.step()
                found.append((number_of(result.skipped), number_of(engine.loss_scale), bits_of(result)))
            return found

        first, second = on_group(one, 2, torch)
        assert first == second
        assert [step[:2] for step in first] == [(0.0, 8.0), (1.0, 4.0), (0.0, 4.0)]
        values = [np.frombuffer(step[2]["layers.0.w"], np.float32)[0] for step in first]
        assert values == [1 / 8, 0, 1 / 4]

    @pytest.mark.parametrize("policy", ["raise", "skip", "pass"])
    def test_ranks_that_are_not_in_one_step_skip_it_and_are_named(self, device, torch, policy):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, on_non_finite=policy)
            for step in range(2):
                if step and exchange.rank == 1:
                    engine._reducer.workers.progress.step += 1
                engine.add(put_all(device, contribution(exchange.rank, step, 0, SMALL)))
                result = engine.step()
            with pytest.raises(
                ExchangeError, match=r"step \d was skipped on all ranks: rank 1 was in another step than"
            ):
                result.check()
            engine.check()  # told once
            return number_of(result.skipped)

        assert on_group(one, 2, torch) == [1.0] * 2

    def test_another_loss_scale_is_told_by_rank(self, device, torch):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, on_non_finite="skip")
            engine.add(put_all(device, contribution(exchange.rank, 0, 0, SMALL)))
            engine.step(loss_scale=1.0 + (exchange.rank == 2))
            with pytest.raises(ExchangeError, match="rank 2 had another loss scale, or other settings, than rank 0"):
                engine.check()
            return True

        assert on_group(one, 3, torch) == [True] * 3

    def test_no_micro_batch_on_any_rank_is_told_late(self, device, torch):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange)
            engine.add(None, weight=0)
            result = engine.step()
            with pytest.raises(WindowError, match="step 0 was skipped on all ranks: none of them had a micro-batch"):
                result.check()
            add_window(engine, device, layout=SMALL)
            return number_of(engine.step().skipped)

        assert on_group(one, 2, torch) == [0.0, 0.0]

    def test_a_weight_that_divides_nothing_is_told_late(self, device, torch):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange)
            engine.add(put_all(device, [np.zeros(slot.shape, np.float32) for slot in SMALL.slots]), weight=3e38)
            result = engine.step()
            with pytest.raises(WindowError, match=r"weight of the window of step 0 is out of range.*got 6e\+38 in all"):
                engine.check()
            return [bool(on_host(array).any()) for array in result.gradients.values()]

        assert on_group(one, 2, torch) == [[False] * 3] * 2


class TestNothingWaits:
    def test_on_the_host_from_the_first_add_to_the_last_step(self, emulated, monkeypatch):
        torch = _instead_of_torch(emulated, monkeypatch)

        def one(exchange):
            engine = GradientEngine(LAYOUT, emulated.kernels, exchange=exchange, micro_batches=2)
            for step in range(2):  # destinations, pools and tables are there then
                add_window(engine, emulated, step)
                engine.step()
            gradients = [put_all(emulated, contribution(exchange.rank, 0, k)) for k in range(2)]
            synchronize(emulated)
            exchange.barrier()
            with cuda_emulator.recorded() as record:
                for arrays in gradients:
                    engine.add(arrays)
                engine.step()
                found = [*record.waits], [*record.allocations]
                exchange.barrier()
            return found

        assert on_group(one, 2, torch) == [([], [])] * 2

    def test_calls_of_a_block_are_queued_while_backward_goes_on(self, device, torch):
        def one(exchange):
            engine = GradientEngine(LAYOUT, device.kernels, exchange=exchange, micro_batches=1)
            arrays = dict(zip((s.name for s in LAYOUT.slots), put_all(device, contribution(0, 0, 0)), strict=True))
            before = torch.group.calls
            with engine.micro_batch() as micro_batch:
                for span in LAYOUT.spans:
                    for slot in span.slots:
                        micro_batch.add(slot.name, arrays[slot.name])
                exchange.barrier()
                during = torch.group.calls - before
            engine.step()
            exchange.barrier()
            return during, torch.group.calls - before

        rounds = len(rounds_of(shares_of(LAYOUT, 2, 2 * 64)))
        assert rounds > 2
        assert on_group(one, 2, torch, bucket_bytes=64) == [(2 * rounds, 2 * rounds + 1)] * 2

    def test_memory_stays_until_the_work_on_it_is_done(self, device, torch):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, max_norm=None)
            out = put_all(device, [np.zeros(slot.shape, np.float32) for slot in SMALL.slots])
            engine.add(put_all(device, contribution(exchange.rank, 0, 0, SMALL)))
            engine.step(out)
            del engine
            gc.collect()
            churned(device)
            with device.active():
                return [array.get().tobytes() for array in out]

        both = zip(*(contribution(rank, 0, 0, SMALL) for rank in (0, 1)), strict=True)
        assert on_group(one, 2, torch) == [[((a + b) * np.float32(0.5)).tobytes() for a, b in both]] * 2


class TestFailures:
    @pytest.mark.parametrize("last_call", range(1, 4))
    def test_a_call_that_fails_loses_the_peer_and_breaks_the_step(self, device, torch, last_call):
        """At whichever of a step's calls, made by an add or by the step."""

        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, micro_batches=2)
            if exchange.rank == 1:
                torch.group.fail_after(last_call - 1)
            exchange.barrier()
            add_window(engine, device, layout=SMALL)
            with pytest.raises(
                PeerLost, match=r"process group failed \(.*NCCL.*\); discard\(\) the window; make a new"
            ):
                engine.step()
            with pytest.raises(WindowError, match=r"step 0 is broken.*discard\(\)"):
                engine.step()
            engine.discard()
            add_window(engine, device, layout=SMALL)
            with pytest.raises(PeerLost, match=r"has left the group.*reconnect\(\)"):
                engine.step()
            return engine

        engines = on_group(one, 2, torch)
        assert all(isinstance(engine, GradientEngine) for engine in engines), engines
        with pytest.raises(CallerError, match=r"was left in the middle; make a new group on all ranks"):
            device_calls_of(torch.group)

        def again(exchange):
            engine = engines[exchange.rank]
            engine.discard()
            engine.reconnect(exchange)
            add_window(engine, device, layout=SMALL)
            return bits_of(engine.step())

        wanted = on_ranks(lambda e: train(e, device, 1, SMALL, "threads"), 2)[0][0][-1]
        assert on_group(again, 2, torch) == [wanted] * 2

    def test_any_other_error_after_the_first_call_breaks_the_step_too(self, device, torch, monkeypatch):
        """Else it could be run again, and its calls would meet those of the others' next step."""

        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange)
            add_window(engine, device, layout=SMALL)
            exchange.barrier()
            monkeypatch.setattr(type(device.kernels), "tally", fail)
            exchange.barrier()
            with pytest.raises(OutOfDeviceMemory, match="none left"):
                engine.step()
            with pytest.raises(WindowError, match=r"step 0 is broken.*discard\(\)"):
                engine.step()
            engine.discard()
            return True

        def fail(*given):
            raise OutOfDeviceMemory("none left")

        assert on_group(one, 2, torch) == [True, True]

    def test_an_interrupt_within_a_call_breaks_the_step_and_leaves_the_group(self, device, torch, monkeypatch):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange)
            add_window(engine, device, layout=SMALL)
            exchange.barrier()
            monkeypatch.setattr(torch.distributed, "all_to_all", interrupted)
            exchange.barrier()
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            with pytest.raises(WindowError, match=r"step 0 is broken.*discard\(\)"):
                engine.step()
            engine.discard()
            return True

        def interrupted(*given, **named):
            raise KeyboardInterrupt

        assert on_group(one, 2, torch) == [True, True]
        with pytest.raises(CallerError, match=r"was left in the middle"):
            device_calls_of(torch.group)

    def test_a_window_that_is_dropped_on_its_way_leaves_the_group_to_nobody(self, device, torch):
        def one(exchange):
            engine = GradientEngine(LAYOUT, device.kernels, exchange=exchange)
            span = LAYOUT.spans[0]
            arrays = dict(zip((s.name for s in LAYOUT.slots), put_all(device, contribution(0, 0, 0)), strict=True))
            engine.add_non_block(span.key, arrays[span.key], last=True)
            with pytest.raises(WindowError, match=r"step 0 is half summed on GPUs, and cannot be resumed.*discard\(\)"):
                engine.reconnect(exchange)
            engine.discard()
            return engine.has_open_window

        assert on_group(one, 2, torch, bucket_bytes=64) == [False, False]
        with pytest.raises(CallerError, match=r"was left in the middle"):
            device_calls_of(torch.group)

    def test_between_steps_a_group_may_be_left_and_joined_again(self, device, torch):
        def one(exchange):
            return train(exchange, device, 1, SMALL)

        assert on_group(one, 2, torch) == on_group(one, 2, torch, group=torch.group)

    def test_settings_that_differ_are_named_when_the_group_forms(self, device, torch):
        def one(exchange):
            with pytest.raises(ExchangeError, match="rank 1 has another max_norm than rank 0"):
                GradientEngine(SMALL, device.kernels, exchange=exchange, max_norm=1.0 + exchange.rank)
            return True

        assert on_group(one, 2, torch) == [True, True]

    def test_what_one_rank_cannot_make_is_told_to_the_others(self, device, torch, monkeypatch):
        def made(exchange, *given):
            if exchange.rank == 1:
                torch.group.abort()  # as the process ends
                raise OutOfDeviceMemory("none left")
            return DeviceSums(exchange, *given)

        monkeypatch.setattr(reducer, "DeviceSums", made)

        def one(exchange):
            with pytest.raises(OutOfDeviceMemory if exchange.rank == 1 else PeerLost):
                GradientEngine(SMALL, device.kernels, exchange=exchange)
            with pytest.raises(PeerLost, match="left the group"):
                exchange.barrier()
            return True

        assert on_group(one, 2, torch) == [True, True]


class TestElsewhere:
    def test_a_group_without_nccl_sums_in_the_hosts_memory(self, device, torch):
        torch.backends = "cpu:gloo,cuda:gloo"
        assert on_group(lambda e: len(train(e, device, 1, link="threads")), 2, torch) == [1, 1]

    def test_and_so_do_ranks_of_which_one_is_on_the_cpu(self, device, torch):
        from backends import available

        def one(exchange):
            return train(exchange, device if exchange.rank else available("host-1"), 1, link="threads")[0][-1]

        first, second = on_group(one, 2, torch)
        assert first == second

    def test_and_so_do_parts_of_a_model(self, device, torch):
        config = TensorParallelConfig(0, 2, 8, 12, 2, 2)
        layout = GradientLayout.transformer(1, 8, 8, 12, 16, tensor_parallel=config)

        def one(exchange):
            return len(train(exchange, device, 1, layout, "threads", on_non_finite="pass"))

        assert on_group(one, 2, torch) == [1, 1]

    def test_one_rank_alone_has_no_group(self, device, torch):
        (outcome,) = on_group(lambda e: figures_alone(e, device), 1, torch)
        assert outcome == [array.tobytes() for array in contribution(0, 0, 0, SMALL)]


def figures_alone(exchange, backend):
    engine = GradientEngine(SMALL, backend.kernels, exchange=exchange, max_norm=None)
    engine.add(put_all(backend, contribution(0, 0, 0, SMALL)))
    return [*bits_of(engine.step()).values()]


class TestCapture:
    """By a group whose other ranks hold what this one does, so that one graph has all of it."""

    def joined(self, engine, backend, torch):
        """As rank 0 of three; the others say what it does when the group forms, and no more."""

        def one(exchange):
            if exchange.rank == 0:
                engine.reconnect(exchange)
            else:
                GradientEngine(SMALL, backend.kernels, exchange=exchange)

        assert on_group(one, 3, torch, group=Mirrored(torch.xp, 3)) == [None] * 3

    @pytest.mark.parametrize("micro_batches", [None, 2])
    def test_a_window_with_its_sums_is_one_graph(self, device, torch, micro_batches):
        engine = GradientEngine(SMALL, device.kernels, micro_batches=micro_batches)
        self.joined(engine, device, torch)
        arrays = [put_all(device, contribution(0, 0, k, SMALL)) for k in range(2)]
        with engine.capture() as graph:
            for k in range(2):
                engine.add(arrays[k], weight=k + 1.0)
            engine.step()
        for step in range(3):
            churned(device)
            for k in range(2):
                for array, values in zip(arrays[k], contribution(0, step, k, SMALL), strict=True):
                    assign(array, device.put(values))
            result = graph.replay()
            assert result.step == step
            told = engine._reducer.on_device._told
            assert [on_host(told)[rank, 3] for rank in range(3)] == [step] * 3  # what ranks compare, counted there
            first, second = (contribution(0, step, k, SMALL) for k in (0, 1))
            sums = [a + np.float32(2) * b for a, b in zip(first, second, strict=True)]
            assert [*bits_of(result).values()] == [((s + s + s) * np.float32(1 / 9)).tobytes() for s in sums]
            assert (number_of(result.weight), number_of(result.micro_batches)) == (9.0, 6.0)
        engine.check()
        add_window(engine, device, layout=SMALL)  # and without it again
        engine.step()
        engine.check()

    def test_what_was_captured_alone_or_with_others_is_refused(self, device, torch):
        engine, arrays = GradientEngine(SMALL, device.kernels), put_all(device, contribution(0, 0, 0, SMALL))

        def captured():
            with engine.capture() as graph:
                engine.add(arrays)
                engine.step()
            return graph

        alone = captured()
        self.joined(engine, device, torch)
        together = captured()
        with pytest.raises(CallerError, match="captured with other workers; capture it again"):
            alone.replay()
        together.repoint([arrays])
        together.replay()
        engine.check()
        engine.load_state_dict(GradientEngine(SMALL, device.kernels).state_dict())  # at the others' step
        self.joined(engine, device, torch)
        with pytest.raises(CallerError, match="captured with other workers; capture it again"):
            together.replay()

    def test_only_copies_sums_and_one_more_kernel_are_recorded(self, emulated, monkeypatch):
        torch, engine = _instead_of_torch(emulated, monkeypatch), GradientEngine(SMALL, emulated.kernels)
        self.joined(engine, emulated, torch)
        arrays = put_all(emulated, contribution(0, 0, 0, SMALL))
        with cuda_emulator.recorded() as record, engine.capture() as graph:
            engine.add(arrays)
            engine.step()
        assert {*record.waits} <= {"stream"}  # until tables and addresses are there
        operations = operations_of(graph._recorded.graph)
        kernels = ["accumulate_1_table", "accumulate_4_small", "tally", "measure_small", "finalise", "hand_back_small"]
        assert [name for name in operations if name in kernels] == kernels


def test_rounds_have_each_owner_once_and_are_ready_together():
    for ranks in (1, 2, 3):
        shares = shares_of(WIDE, ranks, 1 << 17)
        rounds = rounds_of(shares)
        assert [share for each in rounds for share in each] == [*shares]
        for each in rounds:
            assert len({share.owner for share in each}) == len(each)
            assert len({share.spans for share in each}) == 1
