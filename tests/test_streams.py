"""Work on several streams and in several threads: it is ordered by events, or refused, never left to chance."""

import gc
import threading
from types import SimpleNamespace

import cuda_emulator
import numpy as np
import pytest
from backends import on_the_stand_in
from devices import churned, on_host, put_all, synchronize
from ranks import on_ranks

from gradengine import (
    BlockGradientSet,
    FusedClipState,
    GradientEngine,
    GradientLayout,
    NonFiniteGradient,
    clip_gradients_fused,
)
from gradengine.errors import BufferRefused, CallerError, OutOfDeviceMemory
from gradengine.gpu_accumulate import GpuGradientAccumulator

LAYOUT = GradientLayout.of({"layers.0.w": (5000,), "head": (7,)})


def ones(value=1.0):
    return [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots]


def new_engine(device, **options):
    return GradientEngine(LAYOUT, device.kernels, max_norm=None, **options)


def stream_of(device):
    return device.kernels.xp.cuda.Stream(non_blocking=True)


class TestStreams:
    def test_an_add_on_one_and_a_step_on_another(self, device):
        engine, gradients = new_engine(device), put_all(device, ones())
        synchronize(device)
        with stream_of(device):
            engine.add(gradients)
        with stream_of(device):
            engine.add(gradients)
        result = engine.step()
        assert float(result.norm) == pytest.approx(np.sqrt(5007))
        assert (result.gradients["head"].get() == 1).all()

    def test_a_replay_is_behind_what_was_done_before(self, device):
        engine, gradients, others = new_engine(device), put_all(device, ones()), put_all(device, ones(5))
        synchronize(device)
        with engine.capture() as graph:
            engine.add(gradients)
            engine.step()
        with stream_of(device):
            engine.add(others)
            engine.step()
        assert float(graph.replay().norm) == pytest.approx(np.sqrt(5007))

    def test_a_clip_state_may_be_dropped_whatever_stream_it_worked_on(self, device):
        gradients, stream = put_all(device, ones(4)), stream_of(device)
        state = FusedClipState([5000, 7], device.kernels)
        synchronize(device)
        clip_gradients_fused(gradients, 1.0, state, stream=stream)
        norm = state.norm
        del state
        gc.collect()
        churned(device)
        stream.synchronize()
        assert float(norm) == pytest.approx(4 * np.sqrt(5007))
        assert gradients[1].get() == pytest.approx(1 / np.sqrt(5007))

    def test_a_producer_that_names_its_stream_is_waited_for(self, device):
        xp, stream = device.kernels.xp, stream_of(device)
        array, values = xp.zeros(7, np.float32), xp.asarray(np.full(7, 3, np.float32))
        synchronize(device)
        runtime = xp.cuda.runtime
        runtime.memcpyAsync(array.data.ptr, values.data.ptr, 28, runtime.memcpyDeviceToDevice, stream.ptr)
        interface = {**array.__cuda_array_interface__, "version": 3, "stream": stream.ptr}
        engine = GradientEngine(GradientLayout.of([(7,)]), device.kernels, max_norm=None)
        engine.add([SimpleNamespace(__cuda_array_interface__=interface)])
        assert (engine.step().gradients["0"].get() == 3).all()

    def test_an_interface_with_gaps_within_elements_is_refused(self, device):
        array = device.kernels.xp.zeros(8, np.float32)
        interface = {**array.__cuda_array_interface__, "shape": (4,), "strides": (6,), "stream": None}
        with pytest.raises(BufferRefused, match="not contiguous"):
            device.kernels.view(SimpleNamespace(__cuda_array_interface__=interface), "w")


class Sides:
    """Two streams that nothing orders but events; what the one asked first does not wait for comes too early."""

    def __init__(self, device, first):
        self.a, self.b = stream_of(device), stream_of(device)
        self._first = first
        synchronize(device)

    def finish(self):
        for stream in (self.a, self.b) if self._first == "a" else (self.b, self.a):
            stream.synchronize()


@pytest.fixture(params=["a", "b"])
def sides(request, device):
    return Sides(device, request.param)


class TestTwoStreams:
    """Adds on one, and on another what is done to the sums: behind the adds before and before the adds after."""

    @pytest.mark.parametrize(("average", "wanted"), [("weighted", 4.0), ("per_worker", 3.5)])
    def test_a_step_with_other_workers(self, device, average, wanted):
        """Twice, so that the second window's add must not come before the first one's hand-back."""
        batches = [[put_all(device, ones(value * turn)) for value in (2.0, 5.0)] for turn in (1.0, 2.0)]
        synchronize(device)

        def one(exchange):
            engine = new_engine(device, exchange=exchange, average=average)
            sides, seen = Sides(device, "b"), []
            for batch in batches:
                with sides.a:
                    engine.add(batch[exchange.rank], weight=1 + exchange.rank)
                with sides.b:
                    result = engine.step()
                    seen += [(on_host(array).min(), on_host(array).max()) for array in result.gradients.values()]
                    seen.append(float(result.norm))
            return seen

        norm = pytest.approx(wanted * np.sqrt(5007))
        twice = [(wanted, wanted)] * 2 + [norm] + [(2 * wanted, 2 * wanted)] * 2 + [2 * norm.expected]
        assert on_ranks(one, 2) == [[*twice[:5], pytest.approx(twice[5])]] * 2

    def test_zeros_for_what_did_not_come_and_their_norm(self, device, sides):
        engine, gradients = new_engine(device), put_all(device, ones(3))
        synchronize(device)
        with sides.a:
            churned(device)  # so much to do that no look at a verdict comes to the end of it
            engine.add(gradients)
            engine.step()
            engine.add([None, gradients[1]])
        with sides.b:
            result = engine.step()
            sides.finish()
            assert not on_host(result.gradients["layers.0.w"]).any()
            assert float(result.norm) == pytest.approx(3 * np.sqrt(7))

    def test_a_copy_of_a_block(self, device, sides):
        accumulator = GpuGradientAccumulator(LAYOUT, device.kernels)
        gradients, others, workspace = (put_all(device, ones(value)) for value in (1, 8, 0))
        synchronize(device)
        with sides.a:
            accumulator.add(gradients)
        with sides.b:
            accumulator.copy_block_to(0, workspace[:1])
        with sides.a:
            accumulator.add(others)
        sides.finish()
        assert (on_host(workspace[0]) == 1).all()
        assert (on_host(accumulator.views()["layers.0.w"]) == 9).all()

    def test_a_copy_of_a_component_that_did_not_come(self, device, sides):
        accumulator = GpuGradientAccumulator(LAYOUT, device.kernels)
        gradients, head = put_all(device, ones()), put_all(device, ones(5))[1]
        synchronize(device)
        with sides.a:
            accumulator.add(gradients)
            accumulator.zero_all()
            accumulator.add_block(0, gradients[:1])
        with sides.b:
            accumulator.copy_non_block_to("head", head)
        sides.finish()
        assert not on_host(head).any()

    def test_the_mean(self, device, sides):
        accumulator, gradients = GpuGradientAccumulator(LAYOUT, device.kernels), put_all(device, ones(6))
        synchronize(device)
        with sides.a:
            accumulator.add(gradients, weight=1)
            accumulator.add(gradients, weight=3)
        with sides.b:
            accumulator.average()
        with sides.a:
            accumulator.add(gradients)
        sides.finish()
        assert all((on_host(array) == 12).all() for array in accumulator.views().values())

    @pytest.mark.parametrize("whose", ["the accumulator's", "its own"])
    @pytest.mark.parametrize(
        ("change", "wanted"),
        [
            (lambda block, array: block.accumulate([array]), 3 + 2 + 3),
            (lambda block, array: block.scale(2), 3 / 2 + 3),
            (lambda block, array: block.zero(), 3),
            (lambda block, array: block.from_flat(array), 2 + 3),
        ],
        ids=["accumulate", "scale", "zero", "from_flat"],
    )
    def test_what_is_done_to_a_block(self, device, sides, change, wanted, whose):
        layout = GradientLayout.of({"layers.0.w": (5024,)})
        accumulator, block = GpuGradientAccumulator(layout, device.kernels), None
        given, other = (device.put(np.full(5024, value, np.float32)) for value in (3, 2))
        synchronize(device)
        with sides.a:
            if whose == "its own":
                block = BlockGradientSet(layout.blocks[0], device.kernels)
                block.accumulate([given])
            else:
                accumulator.add([given])
                block = accumulator.block(0)
        with sides.b:
            change(block, other)
        with sides.a:
            block.accumulate([given]) if whose == "its own" else accumulator.add([given])
        sides.finish()
        assert (on_host(block.flatten()) == wanted).all()

    @pytest.mark.parametrize("asked", ["the accumulator", "a block"])
    @pytest.mark.parametrize("values", [(np.nan, 1.0), (1.0, np.nan)])
    def test_whether_it_is_finite(self, device, sides, values, asked):
        accumulator = GpuGradientAccumulator(LAYOUT, device.kernels)
        before, now = (put_all(device, ones(value)) for value in values)
        accumulator.add(before)
        accumulator.zero_all()
        synchronize(device)
        with sides.a:
            accumulator.add(now)
            block = accumulator.block(0)
        with sides.b:
            assert (accumulator if asked == "the accumulator" else block).has_non_finite() == np.isnan(values[1])

    def test_an_accumulator_may_be_dropped(self, device):
        """The memory goes back to the stream that it came from, behind the work of the others."""
        gradients, workspace = put_all(device, ones(3)), put_all(device, ones(0))
        synchronize(device)
        accumulator, sides = GpuGradientAccumulator(LAYOUT, device.kernels), Sides(device, "b")
        with sides.b:
            accumulator.add(gradients)
            accumulator.copy_block_to(0, workspace[:1])
        del accumulator
        gc.collect()
        churned(device)
        device.kernels.xp.cuda.Stream.null.synchronize()
        synchronize(device)
        assert (on_host(workspace[0]) == 3).all()


class TestCapture:
    def test_work_on_another_stream_is_refused(self, device):
        engine, gradients = new_engine(device), put_all(device, ones())
        with engine.capture() as graph:
            with stream_of(device), pytest.raises(CallerError, match="not the one that is captured"):
                engine.add(gradients)
            engine.add(gradients)
            engine.step()
        assert float(graph.replay().norm) == pytest.approx(np.sqrt(5007))

    def test_another_engine_is_refused_and_goes_on_afterwards(self, device):
        captured, other, gradients = new_engine(device), new_engine(device), put_all(device, ones())
        with captured.capture():
            with pytest.raises(CallerError, match="knows nothing of"):
                other.add(gradients)
            with pytest.raises(CallerError, match="another window is being captured"), other.capture():
                pass
            captured.add(gradients)
            captured.step()
        other.add(gradients)
        assert float(other.step().norm) == pytest.approx(np.sqrt(5007))

    def test_repointing_keeps_the_destinations(self, device):
        engine, out, gradients = new_engine(device), put_all(device, ones(0)), put_all(device, ones())
        with engine.capture() as graph:
            engine.add(gradients)
            engine.step(out=out)
        graph.repoint([put_all(device, ones(6))])
        graph.replay()
        assert (out[1].get() == 6).all()

    def test_a_deferred_step_leaves_one_factor(self, device):
        engine = new_engine(device, groups="component")
        engine.add(put_all(device, ones()))
        with pytest.raises(CallerError, match="leaves one factor"):
            engine.step(deferred=True)
        engine.step()


class TestSteps:
    def test_a_verdict_is_of_the_step_that_the_engine_counts(self, device):
        """Also behind a step that was interrupted after K2."""
        engine = new_engine(device)
        engine.add(put_all(device, ones()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(device.kernels), "hand_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        engine.discard()
        engine.add(put_all(device, ones(np.nan)))
        result = engine.step()
        with pytest.raises(NonFiniteGradient) as caught:
            result.check()
        assert caught.value.step == result.step

    def test_a_component_without_a_gradient_in_a_later_micro_batch_costs_no_pass(self, emulated):
        engine, gradients = new_engine(emulated), put_all(emulated, ones())
        for _ in range(2):
            with cuda_emulator.recorded() as record:
                engine.add(gradients)
                engine.add([None, gradients[1]])
                result = engine.step()
        assert record.launches == ["accumulate_1_small"] * 2 + ["finalise", "hand_back_small"]
        assert float(result.norm) == pytest.approx(np.sqrt(5000 / 4 + 7))

    @on_the_stand_in
    def test_memory_that_runs_out_later_stops_no_window(self, emulated):
        """All that a window and its step need is there before the first of them."""
        engine, gradients = new_engine(emulated), put_all(emulated, ones())
        pool = emulated.kernels.xp.get_default_memory_pool()
        pool.free_all_blocks()
        pool.set_limit(size=pool.used_bytes())
        try:
            with pytest.raises(OutOfDeviceMemory, match="expected"):
                emulated.kernels.squared_sums([10**6])
            engine.add(gradients)
            engine.add_block(0, gradients[:1])
            engine.add_non_block("head", gradients[1])
            assert float(engine.step().norm) == pytest.approx(np.sqrt(5007))
        finally:
            pool.set_limit(0)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("components", [50, 4100])
def test_engines_in_two_threads_do_not_disturb_each_other(emulated, components):
    """With more addresses than a launch carries they share the memory that these are copied to."""
    layout = GradientLayout.of([(3,)] * components)
    outcomes, start = {}, threading.Barrier(2)

    def work(value):
        engine = GradientEngine(layout, emulated.kernels, max_norm=None)
        gradient = emulated.put(np.full(3, value, np.float32))
        start.wait(30)
        engine.add([gradient] * components)
        outcomes[value] = [array.get()[0] for array in list(engine.step().gradients.values())[:: components // 5]]

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == {value: [value] * len(outcomes[value]) for value in (1, 2)}
