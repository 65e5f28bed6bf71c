"""A block's own operations, in layouts whose blocks are unlike the layout's first components."""

import numpy as np
import pytest
import strategies as draw
from accumulators import PoisonedKernels, bad_gradients
from devices import all_on_host, assign, nothing_is_launched, on_host, put_all
from folds import totals_of
from hypothesis import given
from hypothesis import strategies as st

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.block import BlockGradientSet
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch
from gradengine.kernels.launch import chunk_for
from gradengine.layout import GradientLayout

LAYOUT = GradientLayout.of({"head": (2,), "layers.0.w": (2, 4), "layers.0.b": (4,), "layers.0.c": (4,)})
BLOCK = LAYOUT.blocks[0]
CALLS = ["accumulate", "by name", "some", "itself", "from flat", "its own flat", "scale", "zero"]


def assert_holds(block, slots, expected):
    got = all_on_host(block.components)
    assert list(got) == [slot.name.rpartition(".")[2] for slot in slots]
    assert block.component_sizes == tuple(slot.size for slot in slots)
    for slot, array, wanted in zip(slots, got.values(), expected, strict=True):
        assert array.shape == slot.shape
        draw.assert_same_bits(array, wanted)
    assert np.count_nonzero(on_host(block.flatten())) == sum(map(np.count_nonzero, expected))  # the padding is zero


@given(
    layout=draw.uneven_layouts(chunk_for(0)), calls=st.lists(st.tuples(st.sampled_from(CALLS), draw.dtypes), max_size=6)
)
def test_any_calls_of_a_block_by_itself_in_any_order(backend, layout, calls):
    for block in layout.blocks:
        own, start = BlockGradientSet(block, PoisonedKernels(backend.kernels)), block.start
        values = [np.zeros(slot.shape, np.float32) for slot in block.slots]
        for seed, (call, dtype) in enumerate(calls):
            batch = draw.random_gradients(seed, block.slots, dtype)
            flat = np.full(block.stop - start, seed + 1.5, draw.DTYPES[dtype])
            if call in {"accumulate", "by name", "some"}:
                batch = [None if call == "some" and i % 2 == 0 else g for i, g in enumerate(batch)]
                names = [slot.name.rpartition(".")[2] for slot in block.slots]
                arrays = put_all(backend, batch)
                own.accumulate(dict(zip(names, arrays, strict=True)) if call == "by name" else arrays)
                values = [v if g is None else v + g.astype(np.float32) for v, g in zip(values, batch, strict=True)]
            elif call == "itself":
                own.accumulate(own.components)
                values = [value + value for value in values]
            elif call == "from flat":
                own.from_flat(backend.put(flat))
                values = [np.full(slot.shape, seed + 1.5, np.float32) for slot in block.slots]
            elif call == "its own flat":
                own.from_flat(own.flatten())
            elif call == "scale":
                own.scale(3)
                values = [value * np.float32(1 / 3) for value in values]
            else:
                own.zero()
                values = [np.zeros_like(value) for value in values]
            assert_holds(own, block.slots, values)
        for slot, component, value in zip(block.slots, own.components.values(), values, strict=True):
            assert own.has_non_finite() is False
            if slot.size:
                assign(component, np.inf, (..., -1))
                assert own.has_non_finite() is True
                assign(component, backend.put(value))


def filled(backend):
    block, gradients = BlockGradientSet(BLOCK, backend.kernels), draw.random_gradients(5, BLOCK.slots)
    block.accumulate(put_all(backend, gradients))
    return block, gradients


class TestOfAnAccumulator:
    def test_it_is_the_accumulators_memory_and_measured_again_once_it_was_handed_out(self, backend):
        accumulator = PerBlockGradientAccumulator(LAYOUT, backend.kernels)
        accumulator.add(put_all(backend, draw.random_gradients(0, LAYOUT.slots)), measure=True)
        block = accumulator.block(0)
        flat = backend.kernels.device.view(block.flatten(), "flat")
        assert flat.pointer == accumulator.memory.pointer + 4 * BLOCK.start
        assign(block.components["b"], 3)
        accumulator.measure_rest()
        assert totals_of(accumulator.kernels, accumulator.arena.partials)[2] == 9 * 4
        accumulator.forget_measured()
        assert (on_host(accumulator.views()["layers.0.b"]) == 3).all()


class TestRefused:
    def test_the_components_cannot_be_replaced(self, backend):
        with pytest.raises(TypeError):
            filled(backend)[0].components["w"] = np.zeros((2, 4), np.float32)

    @pytest.mark.parametrize("change", [-1, 1])
    def test_a_flat_gradient_of_another_length(self, backend, change):
        block, gradients = filled(backend)
        size = block.flatten().size
        flat = backend.put(np.ones(size + change, np.float32))
        with nothing_is_launched(backend), pytest.raises(LayoutMismatch, match=f"got {size + change} .* {size} elem"):
            block.from_flat(flat)
        assert_holds(block, BLOCK.slots, gradients)

    def test_memory_of_its_own_elsewhere(self, backend):
        block, gradients = filled(backend)
        swapped = {**block.components, "b": block.components["c"], "c": block.components["b"]}
        with nothing_is_launched(backend), pytest.raises(BufferRefused, match=r"'layers.0.b' .* memory of this block"):
            block.accumulate(swapped)
        assert_holds(block, BLOCK.slots, gradients)

    def test_wrong_gradients(self, backend):
        block, good = filled(backend)
        for gradients, message in bad_gradients(BLOCK.slots, backend):
            with nothing_is_launched(backend), pytest.raises((LayoutMismatch, BufferRefused), match=message):
                block.accumulate(gradients)
            assert_holds(block, BLOCK.slots, good)

    @pytest.mark.parametrize("divisor", [-2.0, 0.1, 1e30, np.float32(7), 2.0**126, 2.0**-126])
    def test_a_divisor_is_multiplied_by_its_reciprocal(self, backend, divisor):
        block, gradients = filled(backend)
        block.scale(divisor)
        with np.errstate(over="ignore"):
            expected = [gradient * np.float32(1 / float(divisor)) for gradient in gradients]
        assert_holds(block, BLOCK.slots, expected)

    @pytest.mark.parametrize("divisor", [0, -0.0, np.nan, np.inf, -np.inf, 1e-40, 5e-324, 1e39, -1e300, "x"])
    def test_a_divisor_that_makes_no_number(self, backend, divisor):
        block, gradients = filled(backend)
        with nothing_is_launched(backend), pytest.raises(CallerError, match="a divisor"):
            block.scale(divisor)
        assert_holds(block, BLOCK.slots, gradients)
