"""Workers whose GPUs sum by a process group's own calls: the bytes of every other transport, and nothing waits.

The group is a stand-in (emulated_process_group.py): its ranks are threads with engines on one device.
"""

import contextlib
import gc
import math
import sys

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import available
from devices import assign, bits_of, churned, number_of, on_host, put_all, synchronize
from emulated_process_group import Mirrored, on_group, torch_with_nccl
from ranks import on_ranks

from gradengine import DynamicLossScale, GradientEngine, GradientLayout, NonFiniteGradient
from gradengine.errors import CallerError, ExchangeError, OutOfDeviceMemory, PeerLost, WindowError
from gradengine.exchange.shares import rounds_of, shares_of
from gradengine.exchange.torch_group import device_calls_of
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


def contribution(rank, step, k, layout=SMALL):
    return draw.random_gradients([rank, step, k], layout.slots)


def put(backend, *place, layout=SMALL):
    return put_all(backend, contribution(*place, layout))


def add_window(engine, backend, step=0, layout=SMALL):
    for k in range(2):
        engine.add(put(backend, engine.rank, step, k, layout=layout), weight=1.0 + k + engine.rank)


def named(backend, *place):
    return dict(zip((slot.name for slot in LAYOUT.slots), put(backend, *place, layout=LAYOUT), strict=True))


def figures(result):
    """All that is the same on all ranks."""
    numbers = (result.norm, result.scale, result.weight, result.micro_batches, result.skipped)
    return (*map(number_of, numbers), result.unused, bits_of(result))


def train(exchange, backend, steps=2, layout=SMALL, link="nccl", **options):
    engine = GradientEngine(layout, backend.kernels, exchange=exchange, **{"max_norm": None, **options})
    assert exchange.link == link
    outcomes = []
    for step in range(steps):
        add_window(engine, backend, step, layout)
        outcomes.append(figures(engine.step()))
    return outcomes


class TestSameBytes:
    @pytest.mark.parametrize(
        ("ranks", "options"),
        [(2, {"groups": "block", "max_norm": 0.1}), (3, {"average": "per_worker"}), (3, {"average": "prescaled"})],
    )
    def test_as_over_threads_on_all_ranks_whatever_is_known_or_held(self, device, torch, ranks, options):
        found = on_group(lambda e: train(e, device, 2, LAYOUT, **options), ranks, torch)
        wanted = on_ranks(lambda e: train(e, device, 2, LAYOUT, link="threads", **options), ranks)
        for ours, theirs in zip(found[0], wanted[0], strict=True):
            assert ours[2:6] == theirs[2:6]
            assert ours[:2] == pytest.approx(theirs[:2], rel=1e-6)
            assert "max_norm" in options or (ours[1], ours[-1]) == (theirs[1], theirs[-1])
        assert found == [found[0]] * ranks
        if ranks == 2:
            known = on_group(lambda e: train(e, device, 2, LAYOUT, hold=2, micro_batches=2, **options), 2, torch)
            assert known == found

    @pytest.mark.parametrize(("ranks", "bucket_bytes"), [(2, 1 << 22), (5, 1 << 16)])
    def test_with_a_share_for_each_rank_and_more_ranks_than_one_pass_folds(self, device, torch, ranks, bucket_bytes):
        assert max(map(len, rounds_of(shares_of(WIDE, ranks, ranks * bucket_bytes)))) > 1
        found = on_group(lambda e: train(e, device, 1, WIDE), ranks, torch, bucket_bytes=bucket_bytes)
        wanted = on_ranks(lambda e: train(e, device, 1, WIDE, link="threads"), ranks)
        assert [outcome[0][-1] for outcome in found] == [outcome[0][-1] for outcome in wanted], found

    def test_blocks_are_sent_as_they_are_complete_in_whatever_order(self, device, torch):
        def overlapped(exchange):
            engine = GradientEngine(LAYOUT, device.kernels, max_norm=None, exchange=exchange)
            for k in range(2):
                arrays = named(device, exchange.rank, 0, k)
                weight, last = 1.0 + k + exchange.rank, k == 1
                for span in [*LAYOUT.spans][:: -1 if exchange.rank else 1]:
                    if isinstance(span.key, int):
                        engine.add_block(span.key, [arrays[s.name] for s in span.slots], weight, last=last)
                    else:
                        engine.add_non_block(span.key, arrays[span.key], weight, last=last)
            return bits_of(engine.step())

        wanted = on_group(lambda e: train(e, device, 1, LAYOUT), 2, torch)[0][0][-1]
        assert on_group(overlapped, 2, torch) == [wanted] * 2

    def test_into_destinations_whose_memory_stays_until_the_work_on_it_is_done(self, device, torch):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, max_norm=None, exchange=exchange, loss_scale=4.0)
            out = put_all(device, [np.zeros(slot.shape, np.float32) for slot in SMALL.slots])
            engine.add(put(device, exchange.rank, 0, 0))
            engine.step(out)
            del engine
            gc.collect()
            churned(device)
            return [on_host(array).tobytes() for array in out]

        both = zip(*(contribution(rank, 0, 0) for rank in (0, 1)), strict=True)
        assert on_group(one, 2, torch) == [[((a + b) * np.float32(1 / 8)).tobytes() for a, b in both]] * 2


class TestUnused:
    def test_is_what_no_rank_had_a_gradient_for_and_a_rank_without_a_micro_batch_counts_nothing(self, device, torch):
        def one(exchange):
            engine, found = GradientEngine(SMALL, device.kernels, max_norm=None, exchange=exchange), []
            for lacks in ([[], []], [[1], [1, 2]], [[0], []]):
                gradients = put(device, exchange.rank, 0, 0)
                for position in lacks[exchange.rank]:
                    gradients[position] = None
                engine.add(gradients)
                found.append(engine.step().unused)
            engine.add(None if exchange.rank else put(device, 0, 0, 0), weight=0 if exchange.rank else 4)
            return found, figures(engine.step())

        first, second = on_group(one, 2, torch)
        unused, (_, _, *counted, _, _, bits) = first
        assert first == second
        assert unused == [frozenset(), {"layers.1.w"}, frozenset()]
        assert counted == [4.0, 1.0]
        assert [*bits.values()] == [array.tobytes() for array in contribution(0, 0, 0)]


class TestVerdict:
    @pytest.mark.parametrize("policy", ["raise", "skip", "propagate"])
    def test_of_what_is_not_finite_is_the_same_on_all_ranks_and_late(self, device, torch, policy):
        """And moves a dynamic loss scale, whose step is skipped."""

        def one(exchange):
            scale = DynamicLossScale(8.0) if policy == "skip" else 8.0
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, on_non_finite=policy, loss_scale=scale)

            def step(number, value):
                gradients = contribution(exchange.rank, number, 0)
                gradients[1][3] = value
                engine.add(put_all(device, gradients))
                return engine.step()

            result = step(0, math.inf if exchange.rank else 0)
            bits, skipped = bits_of(result), number_of(result.skipped)
            with pytest.raises(NonFiniteGradient) if policy == "raise" else contextlib.nullcontext() as caught:
                engine.check()
            found = caught.value if caught else result.non_finite
            after = figures(step(1, 1))
            return (found.component, found.index, found.value, found.rank, found.step), skipped, bits, after

        first, second = on_group(one, 2, torch)
        assert first == second
        assert first[:2] == (("layers.1.w", 3, math.inf, None, 0), float(policy != "propagate"))
        assert any(np.frombuffer(bits, np.float32).any() for bits in first[2].values()) is (policy == "propagate")
        assert first[3][4] == 0
        assert np.frombuffer(first[3][-1]["layers.1.w"], np.float32)[3] == (1 / 4 if policy == "skip" else 1 / 8)

    @pytest.mark.parametrize(
        ("fault", "policy", "kind", "word"),
        [
            *(
                ("step", policy, ExchangeError, "rank 1 was in another step")
                for policy in ("raise", "skip", "propagate")
            ),
            ("scale", "skip", ExchangeError, "rank 1 .*loss scale"),
            ("bounds", "raise", ExchangeError, "rank 1 .*max_norm"),
            ("nothing", "raise", WindowError, "none of them had a micro-batch"),
            ("weight", "raise", WindowError, r"got 6e\+38 in all"),
        ],
    )
    def test_of_a_step_that_none_can_make_is_told_late_and_once(self, device, torch, fault, policy, kind, word):
        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, on_non_finite=policy)
            if fault == "step" and exchange.rank == 1:
                engine._reducer.step += 1
            if fault == "bounds":
                engine.max_norm = 1.0 + exchange.rank
            weight = {"nothing": 0, "weight": 3e38}.get(fault, 1.0)
            values = contribution(exchange.rank, 0, 0)
            gradients = put_all(device, [each * (fault != "weight") for each in values])
            engine.add(None if fault == "nothing" else gradients, weight=weight)
            result = engine.step(**({"loss_scale": 1.0 + exchange.rank} if fault == "scale" else {}))
            with pytest.raises(kind, match=word):
                engine.check()
            engine.check()
            found = number_of(result.skipped), any(on_host(array).any() for array in result.gradients.values())
            if fault == "nothing":
                add_window(engine, device)
                assert number_of(engine.step().skipped) == 0
            return found

        assert on_group(one, 2, torch) == [(1.0, False)] * 2


class TestNothingWaits:
    def test_on_the_host_from_the_first_add_to_the_last_step(self, emulated, monkeypatch):
        torch = _instead_of_torch(emulated, monkeypatch)

        def one(exchange):
            engine = GradientEngine(LAYOUT, emulated.kernels, exchange=exchange, micro_batches=2)
            for step in range(2):  # destinations, pools and tables are there then
                add_window(engine, emulated, step, LAYOUT)
                engine.step()
            gradients = [put_all(emulated, contribution(exchange.rank, 0, k, LAYOUT)) for k in range(2)]
            synchronize(emulated)
            exchange.barrier()
            with contextlib.nullcontext() if exchange.rank else cuda_emulator.recorded() as record:
                for arrays in gradients:
                    engine.add(arrays)
                assert engine.step().unused == frozenset()  # of a model that uses all no device is asked
                exchange.barrier()
                found = record and ([*record.waits], [*record.allocations])  # of both
                exchange.barrier()
            return found

        assert on_group(one, 2, torch) == [([], []), None]

    def test_calls_of_a_block_are_queued_while_backward_goes_on(self, device, torch):
        def one(exchange):
            engine = GradientEngine(LAYOUT, device.kernels, exchange=exchange, micro_batches=1)
            arrays = named(device, 0, 0, 0)
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


class TestFailures:
    @pytest.mark.parametrize("last_call", range(1, 4))
    def test_a_call_that_fails_loses_the_peer_and_breaks_the_step(self, device, torch, last_call):
        """At whichever of a step's calls, made by an add or by the step."""
        said = [
            (PeerLost, r"process group failed \(.*NCCL.*\); discard\(\) the window; make a new"),
            (WindowError, r"step 0 is broken.*discard\(\)"),
        ]

        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange, micro_batches=2)
            if exchange.rank == 1:
                torch.group.fail_after(last_call - 1)
            exchange.barrier()
            add_window(engine, device)
            for kind, words in said:
                with pytest.raises(kind, match=words):
                    engine.step()
            engine.discard()
            add_window(engine, device)
            with pytest.raises(PeerLost, match=r"left the group.*reconnect"):
                engine.step()
            return engine

        engines = on_group(one, 2, torch)
        assert all(isinstance(engine, GradientEngine) for engine in engines), engines
        with pytest.raises(CallerError, match=r"was not finished; make a new group on all ranks"):
            device_calls_of(torch.group)

        def again(exchange):
            engine = engines[exchange.rank]
            engine.discard()
            engine.reconnect(exchange)
            add_window(engine, device)
            return bits_of(engine.step())

        wanted = on_ranks(lambda e: train(e, device, 1, SMALL, "threads"), 2)[0][0][-1]
        assert on_group(again, 2, torch) == [wanted] * 2

    @pytest.mark.parametrize("fault", [OutOfDeviceMemory("none left"), KeyboardInterrupt()], ids=["error", "interrupt"])
    def test_any_other_error_after_the_first_call_breaks_the_step_too(self, device, torch, monkeypatch, fault):
        """Else it could be run again, and its calls would meet those of the others' next step."""
        is_error = isinstance(fault, OutOfDeviceMemory)
        place = (type(device.kernels), "tally") if is_error else (torch.distributed, "all_to_all")

        def fail(*given, **named):
            raise fault

        def one(exchange):
            engine = GradientEngine(SMALL, device.kernels, exchange=exchange)
            add_window(engine, device)
            exchange.barrier()
            monkeypatch.setattr(*place, fail)
            exchange.barrier()
            for error in (type(fault), WindowError):
                with pytest.raises(error):
                    engine.step()
            engine.discard()
            return True

        assert on_group(one, 2, torch) == [True, True]
        with pytest.raises(CallerError):
            device_calls_of(torch.group)

    def test_a_window_that_is_dropped_on_its_way_leaves_the_group_to_nobody(self, device, torch):
        def one(exchange):
            engine = GradientEngine(LAYOUT, device.kernels, exchange=exchange)
            span = LAYOUT.spans[0]
            arrays = named(device, 0, 0, 0)
            engine.add_non_block(span.key, arrays[span.key], last=True)
            with pytest.raises(WindowError, match=r"step 0 is half summed on GPUs, and cannot be resumed.*discard\(\)"):
                engine.reconnect(exchange)
            engine.discard()
            return engine.has_open_window

        assert on_group(one, 2, torch, bucket_bytes=64) == [False, False]
        with pytest.raises(CallerError, match=r"was not finished"):
            device_calls_of(torch.group)

    def test_between_steps_a_group_may_be_left_and_joined_again(self, device, torch):
        found = on_group(lambda e: train(e, device, 1), 2, torch)
        assert on_group(lambda e: train(e, device, 1), 2, torch, group=torch.group) == found

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
    @pytest.mark.parametrize("why", ["gloo", "host", "parts"])
    def test_groups_without_nccl_of_a_rank_on_the_cpu_and_parts_sum_in_the_hosts_memory(self, device, torch, why):
        torch.backends = "cpu:gloo,cuda:gloo" if why == "gloo" else torch.backends
        shapes = {slot.name: slot.shape for slot in SMALL.slots}
        part = GradientLayout.of(shapes, tp_size=2, partitions=dict.fromkeys(shapes, "column"))

        def one(exchange):
            backend = available("host") if why == "host" and exchange.rank else device
            layout = part if why == "parts" else SMALL
            return train(exchange, backend, 1, layout, "threads", on_non_finite="propagate")

        first, second = on_group(one, 2, torch)
        assert first == second
        assert isinstance(first, list)


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
        arrays = [put(device, 0, 0, k) for k in range(2)]
        with engine.capture() as graph:
            for k in range(2):
                engine.add(arrays[k], weight=k + 1.0)
            engine.step()
        for step in range(3):
            churned(device)
            for k in range(2):
                for array, values in zip(arrays[k], contribution(0, step, k), strict=True):
                    assign(array, device.put(values))
            engine.max_norm = [None, 1e9, 1e8][step]
            result = graph.replay()
            assert result.step == step
            told = engine._reducer.on_device._told
            assert [on_host(told)[rank, 3] for rank in range(3)] == [step] * 3  # what ranks compare, counted there
            assert set(on_host(told)[:, 5].view(np.uint64).tolist()) == {engine._clipping.plan.digest}
            first, second = (contribution(0, step, k) for k in (0, 1))
            sums = [a + np.float32(2) * b for a, b in zip(first, second, strict=True)]
            assert [*bits_of(result).values()] == [((s + s + s) * np.float32(1 / 9)).tobytes() for s in sums]
            assert (number_of(result.weight), number_of(result.micro_batches)) == (9.0, 6.0)
        engine.check()
        add_window(engine, device)  # and without it again
        engine.step()
        engine.check()

    def test_what_was_captured_alone_or_with_others_is_refused(self, device, torch):
        engine, arrays = GradientEngine(SMALL, device.kernels), put(device, 0, 0, 0)

        def captured():
            with engine.capture() as graph:
                engine.add(arrays)
                engine.step()
            return graph

        alone = captured()
        self.joined(engine, device, torch)
        together = captured()
        with pytest.raises(CallerError, match="captured with a different exchange; capture it again"):
            alone.replay()
        together.replay()
        engine.check()
        engine.load_state_dict(GradientEngine(SMALL, device.kernels).state_dict())  # at the others' step
        self.joined(engine, device, torch)
        with pytest.raises(CallerError, match="captured with a different exchange; capture it again"):
            together.replay()
