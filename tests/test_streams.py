"""Work on several streams and in several threads: it is ordered by events, or refused, never left to chance."""

import gc
import threading
from types import SimpleNamespace

import cuda_emulator
import numpy as np
import pytest
from devices import churned, put_all, synchronize

from gradengine import FusedClipState, GradientEngine, GradientLayout, NonFiniteGradient, clip_gradients_fused
from gradengine.errors import BufferRefused, CallerError, OutOfDeviceMemory

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
