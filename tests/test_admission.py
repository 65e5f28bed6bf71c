"""Which calls fit an engine's state: each refusal says what state it is, and changes nothing."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from devices import put_all
from ranks import on_ranks

from gradengine import GradientEngine, GradientLayout, local_group
from gradengine.errors import CallerError, WindowError

LAYOUT = GradientLayout.of({"layers.0.w": (3,), "head": (2,)})


def ones(backend):
    return put_all(backend, [np.ones(slot.shape, np.float32) for slot in LAYOUT.slots])


def test_a_window_has_room_for_what_was_said(backend):
    engine = GradientEngine(LAYOUT, backend.kernels, micro_batches=2)
    for _ in range(2):
        engine.add(ones(backend))
    with pytest.raises(WindowError, match=r"the window is full: got micro-batch 3, expected step\(\) after 2"):
        engine.add(ones(backend))
    assert engine.step().micro_batches == 2
    engine.add(ones(backend))
    assert engine.step().micro_batches == 1


def test_a_window_that_comes_in_parts_has_no_more_room(backend):
    engine, (block, head) = GradientEngine(LAYOUT, backend.kernels, micro_batches=2), ones(backend)
    for _ in range(2):
        engine.add_block(0, [block])
    with pytest.raises(
        WindowError, match=r"the window of block 0 is full: got micro-batch 3, expected step\(\) after 2"
    ):
        engine.add_block(0, [block])
    for _ in range(2):
        engine.add_non_block("head", head)
    with pytest.raises(
        WindowError, match=r"the window of component 'head' is full: got micro-batch 3, expected step\(\) after 2"
    ):
        engine.add_non_block("head", head)
    result = engine.step()
    assert (result.micro_batches, float(result.norm)) == (2, pytest.approx(5**0.5))


def test_a_step_that_failed_keeps_its_window():
    engine = GradientEngine(LAYOUT)
    engine.add([np.full(3, np.nan, np.float32), np.ones(2, np.float32)])
    with pytest.raises(Exception, match="not finite"):
        engine.step()
    for call in (
        lambda: engine.add([np.ones(3, np.float32), np.ones(2, np.float32)]),
        lambda: engine.add_block(0, [np.ones(3, np.float32)]),
        lambda: engine.add_non_block("head", np.ones(2, np.float32)),
    ):
        with pytest.raises(WindowError, match=r"step 0 failed, and its window is kept; run step\(\) again"):
            call()
    engine.discard()
    engine.add([np.ones(3, np.float32), np.ones(2, np.float32)])
    assert engine.step().norm == pytest.approx(5**0.5)


def test_what_is_on_its_way_takes_no_more():
    def work(exchange):
        engine = GradientEngine(LAYOUT, exchange=exchange)
        engine.add_block(0, [np.ones(3, np.float32)], last=True)
        with pytest.raises(
            WindowError,
            match="block 0 is on its way to the other workers: got a contribution after the last of 1 micro-batches",
        ):
            engine.add_block(0, [np.ones(3, np.float32)])
        engine.add_non_block("head", np.ones(2, np.float32))
        with pytest.raises(WindowError, match="the window is complete and on its way to the other workers"):
            engine.add([np.ones(3, np.float32), np.ones(2, np.float32)])
        return engine.step().micro_batches

    exchanges = local_group(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, exchanges)) == [2, 2]
    for exchange in exchanges:
        exchange.close()


def test_what_is_on_its_way_is_known_by_its_id_too():
    """Block 0 has left and the LM head, whose id is 0, has not; then it has."""
    layout = GradientLayout.transformer(1, 2, 2, 2, 2, embedding=False)
    gradients = {slot.name: np.ones(slot.shape, np.float32) for slot in layout.slots}

    def work(exchange):
        engine = GradientEngine(layout, exchange=exchange)
        engine.add_block(0, [gradients[slot.name] for slot in layout.blocks[0].slots], last=True)
        engine.add_non_block(0, gradients["lm_head"], last=True)
        with pytest.raises(WindowError, match="component 'lm_head' is on its way"):
            engine.add_non_block(0, gradients["lm_head"])
        engine.add_non_block(1, gradients["final_norm"])
        return engine.step().micro_batches

    assert on_ranks(work, 2) == [2, 2]


def test_a_graph_needs_a_gpu():
    engine = GradientEngine(LAYOUT)
    with pytest.raises(CallerError, match="only a GPU's steps can be captured: got device 'cpu'"):
        engine.capture()


def test_a_graph_needs_a_closed_window(device):
    engine = GradientEngine(LAYOUT, device.kernels)
    engine.add(ones(device))
    with pytest.raises(WindowError, match="a window is open: got 1 micro-batches"):
        engine.capture()
    engine.step()
    given = ones(device)
    with engine.capture():
        with pytest.raises(WindowError, match="a window is being captured"):
            engine.capture()
        engine.add(given)
        engine.step()
        with pytest.raises(WindowError, match="a capture holds one window"):
            engine.add(given)


def test_the_loss_scale_of_an_open_window(backend):
    engine = GradientEngine(LAYOUT, backend.kernels)
    engine.add_block(0, ones(backend)[:1])
    with pytest.raises(WindowError, match="loss scale of an open window"):
        engine.loss_scale = 2.0
    engine.discard()
    engine.loss_scale = 2.0
    assert engine.loss_scale == 2.0
