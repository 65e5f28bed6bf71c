"""A block's own operations, in layouts whose blocks are unlike the layout's first components."""

import numpy as np
import pytest
import strategies as draw
from devices import all_on_host, on_host, put_all

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.block import BlockGradientSet
from gradengine.errors import LayoutMismatch
from gradengine.kernels import CHUNK
from gradengine.layout import GradientLayout

# Each block's components are larger than those that the layout begins with, or come behind an empty one.
UNLIKE_THE_FIRST = {
    "behind another": {"head": (2,), "layers.0.w": (5,)},
    "behind an empty one": {"none": (0,), "layers.0.w": (3, 4), "layers.0.b": ()},
    "of other sizes": {"layers.0.w": (2,), "layers.0.b": (1,), "layers.1.w": (33,), "layers.1.b": (7,)},
    "with empty components": {"layers.0.none": (0,), "layers.0.w": (8,), "head": (1,), "layers.1.w": (0, 3)},
    "out of order": {"layers.1.w": (40,), "head": (3,), "layers.0.w": (2, 3), "layers.1.b": (9,), "layers.0.b": (50,)},
    "of several chunks": {"head": (2,), "layers.0.w": (CHUNK + 5,), "layers.0.b": (3,), "layers.1.w": (9,)},
}


@pytest.fixture(params=UNLIKE_THE_FIRST)
def layout(request):
    return GradientLayout.of(UNLIKE_THE_FIRST[request.param])


def blocks_of(layout, backend):
    """Each block by itself, and as part of an accumulator."""
    for block in layout.blocks:
        yield block, BlockGradientSet(block, backend.kernels)
        yield block, PerBlockGradientAccumulator(layout, backend.kernels).block(block.index)


def assert_holds(block, expected):
    got = all_on_host(block.components).values()
    for array, wanted in zip(got, expected, strict=True):
        draw.assert_same_bits(array, wanted)
    assert np.count_nonzero(on_host(block.flatten())) == sum(map(np.count_nonzero, expected))  # the padding is zero


class TestEveryElement:
    def test_accumulate(self, backend, layout):
        for block, own in blocks_of(layout, backend):
            first, second = (draw.random_gradients(seed, block.slots) for seed in (1, 2))
            own.accumulate(put_all(backend, first))
            own.accumulate(put_all(backend, second))
            assert_holds(own, [np.float32(0) + a + b for a, b in zip(first, second, strict=True)])

    def test_accumulate_without_some(self, backend, layout):
        for block, own in blocks_of(layout, backend):
            gradients = [np.float32(0) + g for g in draw.random_gradients(1, block.slots)]
            own.accumulate([None, *put_all(backend, gradients)[1:]])
            own.accumulate(put_all(backend, gradients[:1]) + [None] * (len(gradients) - 1))
            assert_holds(own, gradients)

    def test_from_flat(self, backend, layout):
        for block, own in blocks_of(layout, backend):
            own.from_flat(backend.put(np.full(block.stop - block.start, 7, np.float32)))
            assert_holds(own, [np.full(slot.shape, 7, np.float32) for slot in block.slots])

    def test_scale_and_zero(self, backend, layout):
        for block, own in blocks_of(layout, backend):
            own.from_flat(backend.put(np.full(block.stop - block.start, 7, np.float32)))
            own.scale(2)
            assert_holds(own, [np.full(slot.shape, 3.5, np.float32) for slot in block.slots])
            own.zero()
            assert_holds(own, [np.zeros(slot.shape, np.float32) for slot in block.slots])

    def test_has_non_finite(self, backend, layout):
        for block, own in blocks_of(layout, backend):
            for slot in block.slots:
                gradients = [np.zeros(other.shape, np.float32) for other in block.slots]
                gradients[block.slots.index(slot)].reshape(-1)[-1:] = np.nan
                own.zero()
                own.accumulate(put_all(backend, gradients))
                assert own.has_non_finite() is (slot.size > 0)

    def test_no_other_element_is_written(self, backend, layout):
        for block in layout.blocks:
            accumulator = PerBlockGradientAccumulator(layout, backend.kernels)
            batch = draw.random_gradients(1, layout.slots)
            accumulator.add(put_all(backend, batch), measure=True)
            own = accumulator.block(block.index)
            own.accumulate([backend.put(np.ones(slot.shape, np.float32)) for slot in block.slots])
            accumulator.measure_rest()
            got = list(all_on_host(accumulator.views()).values())
            expected = [
                gradient + np.float32(1) if slot in block.slots else gradient
                for slot, gradient in zip(layout.slots, batch, strict=True)
            ]
            for array, wanted in zip(got, expected, strict=True):
                draw.assert_same_bits(array, wanted)
            norms = np.sqrt(backend.kernels.totals(accumulator.arena))
            np.testing.assert_allclose(norms, [draw.exact_norm([array]) for array in expected], rtol=1e-6)


def test_another_blocks_targets_are_refused(backend):
    layout = GradientLayout.of({"head": (2,), "layers.0.w": (5,)})
    arena = PerBlockGradientAccumulator(layout, backend.kernels).arena
    message = r"block 0 is given other targets: got \(2, 5\), expected \(5,\)"
    with pytest.raises(LayoutMismatch, match=message):
        BlockGradientSet(layout.blocks[0], backend.kernels, arena)
