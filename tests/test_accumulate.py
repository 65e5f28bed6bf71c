"""The accumulator: what its sums are in numbers, what is held, copied and refused; any calls are in another file."""

import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import strategies as draw
from accumulators import ODD, SMALL, closed, new, ones, state
from devices import assign, nothing_is_launched, put_all, raw
from operations import growth

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.state import State
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch, WindowError
from gradengine.kernels import CHUNK
from gradengine.kernels.host import HostKernels
from gradengine.layout import GradientLayout

TWO = GradientLayout.of({"layers.0.w": (2,), "head": (2,)})
NAN, INF = math.nan, math.inf


class TestValues:
    """What the sum is, in numbers that everybody can check."""

    @pytest.mark.parametrize(
        ("gradients", "expected"),
        [
            ([np.float32([-0.0, 0.0])], [-0.0, 0.0]),
            ([np.full(2, value, ml_dtypes.bfloat16) for value in (256, 1)], [257, 257]),  # bf16 itself says 256
            ([np.full(2, 60000, np.float16)] * 4, [240000, 240000]),
        ],
        ids=["signed zeros", "bf16", "fp16"],
    )
    def test_in_fp32(self, backend, gradients, expected):
        accumulator = new(GradientLayout.of([(2,)]), backend=backend)
        assert accumulator.has_non_finite() is False  # a look before the window is none of its additions
        for gradient in gradients:
            accumulator.add([backend.put(gradient.copy())])
        draw.assert_same_bits(closed(accumulator)["0"], np.float32(expected))

    def test_what_a_fold_measured_is_not_measured_again(self, backend, monkeypatch):
        accumulator, measured = new(SMALL, 5, backend), []
        for seed in range(3):
            accumulator.add(put_all(backend, draw.random_gradients(seed, SMALL.slots, "bfloat16")), measure=seed == 2)
        accumulator.close()
        monkeypatch.setattr(backend.kernels, "measure", lambda arena, positions=None: measured.append(positions))
        accumulator.measure_rest()
        accumulator.block(1)
        accumulator.measure_rest()
        accumulator.forget_measured()
        accumulator.measure_rest()
        accumulator.views()
        accumulator.measure_rest()
        exposed = [i for i, slot in enumerate(SMALL.slots) if slot.block == 1]
        assert measured == [exposed, None, None]  # what was handed out to be written to is, each time

    def test_gradients_are_only_read(self):
        gradient = np.full(3, 2, np.float32)
        gradient.flags.writeable = False
        accumulator = new(GradientLayout.of([(3,)]))
        accumulator.add([gradient], 2.0)
        assert closed(accumulator)["0"].tolist() == [4] * 3

    @pytest.mark.parametrize("hold", [1, 3])
    def test_tied_components_may_share_a_gradient(self, backend, hold):
        accumulator, shared = new(TWO, hold, backend), backend.put(ones())
        accumulator.add([shared, shared])
        assert [array.tolist() for array in closed(accumulator).values()] == [[1, 1]] * 2

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("hold", [1, 2])
    def test_what_is_not_finite_is_found_in_any_component(self, backend, bad, hold):
        for i, slot in enumerate(ODD.slots):
            if not slot.size:
                continue
            accumulator, batch = new(hold=hold, backend=backend), draw.random_gradients(0, ODD.slots)
            batch[i].reshape(-1)[-1] = bad
            accumulator.add(put_all(backend, batch))
            assert accumulator.has_non_finite() is True
            accumulator.zero_all()
            assert accumulator.has_non_finite() is False

    def test_so_is_an_overflow_of_the_sum(self, backend):
        accumulator = new(GradientLayout.of([(2,)]), backend=backend)
        for _ in range(2):
            assert accumulator.has_non_finite() is False
            accumulator.add([backend.put(np.full(2, 3e38, np.float32))])
        assert accumulator.has_non_finite() is True

    def test_so_is_what_a_view_was_given(self, backend):
        accumulator = new(backend=backend)
        accumulator.add(put_all(backend, draw.random_gradients(0, ODD.slots)), measure=True)
        block = accumulator.block(1)
        assert accumulator.has_non_finite() is False
        assign(block.components["w"], NAN, 3)
        assert accumulator.has_non_finite() is True


class TestHold:
    """Gradients that are held lie where their caller has them, until they are folded."""

    def test_is_by_reference_until_the_fold_and_no_longer_than_n_adds(self, backend):
        accumulator, early, late = new(TWO, 2, backend), backend.put(ones()), backend.put(ones())
        accumulator.add([backend.put(ones()), early])
        assign(early, 3)
        accumulator.add([backend.put(ones()), None])
        assign(early, 100)  # though another had no gradient for it, it was folded
        accumulator.add([backend.put(ones()), late])
        assign(late, 5)
        assert closed(accumulator)["head"].tolist() == [8, 8]

    def test_a_part_that_gives_nothing_counts_among_what_is_held(self):
        accumulator, early = new(TWO, hold=2), ones()
        accumulator.add_block(0, [early])
        accumulator.add_block(0, [None])
        early[:] = 100
        accumulator.add_block(0, [ones()])
        assert accumulator.block(0).flatten()[:2].tolist() == [2, 2]

    def test_memory_stays_alive_until_the_fold(self, backend):
        accumulator = new(GradientLayout.of([(100_000,)]), hold=3, backend=backend)
        for value in (1, 2):
            accumulator.add([backend.put(np.full(100_000, value, np.float32))])
        others = [backend.put(np.full(100_000, 9, np.float32)) for _ in range(4)]
        assert (closed(accumulator)["0"] == 3).all()
        assert len(others) == 4

    def test_the_same_address_twice_is_refused_by_name_also_in_another_dtype(self, backend):
        accumulator = new(TWO, hold=2, backend=backend)
        head, other, buffer = backend.put(ones()), backend.put(ones()), backend.buffer(ones())
        accumulator.add([head, raw(buffer)])
        before = state(accumulator, backend)
        for again in (raw(buffer), raw(buffer, dtype="float16")):
            with (
                nothing_is_launched(backend),
                pytest.raises(BufferRefused, match=rf"'head' is held .* {buffer.pointer:#x} "),
            ):
                accumulator.add([other, again])
            assert state(accumulator, backend) == before
        accumulator.zero_all()
        accumulator.add([head, raw(buffer, dtype="float16")])
        with pytest.raises(BufferRefused, match="'head' is held"):
            accumulator.add([backend.put(ones()), raw(buffer)])
        accumulator.add([backend.put(ones()), None])  # folded
        accumulator.add([head, raw(buffer)])

    def test_a_shared_address_stays_refused_until_those_who_hold_it_are_folded(self, backend):
        accumulator, shared = new(TWO, hold=3, backend=backend), backend.put(ones())
        accumulator.add([shared, shared])
        with pytest.raises(BufferRefused, match="'head' is held"):
            accumulator.add_non_block("head", shared)
        accumulator.block(0)  # folds what came with the block, too
        accumulator.add_non_block("head", shared)

    @pytest.mark.parametrize("wholes", [0, 3])
    def test_a_block_costs_the_same_however_many_there_are(self, wholes):
        """Four micro-batches held, the last of them, or all, block by block: nothing that other blocks hold is read."""

        def work_of(blocks):
            layout = GradientLayout.of({f"layers.{i}.{name}": (1,) for i in range(blocks) for name in "ab"})
            accumulator = PerBlockGradientAccumulator(layout, hold=4)
            gradients = [[[ones(1) for _ in "ab"] for _ in range(blocks)] for _ in range(4)]

            def window():
                for parts in gradients[:wholes]:
                    accumulator.add([gradient for part in parts for gradient in part])
                for parts in gradients[wholes:]:
                    for index, part in enumerate(parts):
                        accumulator.add_block(index, part)
                accumulator.zero_all()

            return window

        assert growth(work_of, 30) < 2.2


class TestRefused:
    """By its class and what it names; that nothing changes, the machine above shows for each kind."""

    @pytest.mark.parametrize("shift", [0, -1, 1])
    def test_its_own_arena(self, backend, shift):
        accumulator, slot = new(SMALL, backend=backend), SMALL.slots[1]
        accumulator.add(put_all(backend, draw.random_gradients(0, SMALL.slots)))
        before, target = state(accumulator, backend), accumulator.arena.targets[1]
        own = raw(target.part(0, slot.size), pointer=target.pointer + 4 * shift)
        for source in (own, *([accumulator.views()[slot.name]] if shift == 0 else [])):
            gradients = put_all(backend, draw.random_gradients(1, SMALL.slots))
            gradients[1] = source
            with nothing_is_launched(backend), pytest.raises(BufferRefused, match=r"'blocks.0.w_k' is in .* own arena"):
                accumulator.add(gradients)
            assert state(accumulator, backend) == before

    def test_an_empty_view_of_its_own_arena_is_none(self):
        accumulator = new(GradientLayout.of({"empty": (0,), "w": (2,)}))
        accumulator.add([accumulator.memory.data[:0], ones()])
        assert accumulator.accumulated_count == 1

    def test_another_weight_within_a_micro_batch(self):
        accumulator = new(SMALL)
        accumulator.add_block(1, draw.random_gradients(0, SMALL.blocks[1].slots), 2.0)
        with pytest.raises(WindowError, match=r"block 0 of micro-batch 0 .* got 3.0, expected 2.0"):
            accumulator.add_block(0, draw.random_gradients(1, SMALL.blocks[0].slots), 3.0)
        accumulator.add_block(1, draw.random_gradients(2, SMALL.blocks[1].slots), 3.0)  # the next micro-batch begins
        assert accumulator.accumulated_count == 2

    def test_a_window_with_a_part_missing_is_not_closed(self, backend):
        accumulator = new(SMALL, hold=2, backend=backend)
        for seed, index in enumerate((0, 1, 1)):
            accumulator.add_block(index, put_all(backend, draw.random_gradients(seed, SMALL.blocks[index].slots)), 0.5)
        before = state(accumulator, backend)
        for call in (accumulator.close, accumulator.average):  # also where the weights happen to make 1
            with pytest.raises(WindowError, match=r"'blocks.0.w_q' \(and 11 more\) .*got 1 .*expected 2"):
                call()
            assert state(accumulator, backend) == before

    def test_a_window_without_a_micro_batch_is_not_closed(self):
        with pytest.raises(WindowError, match="without a micro-batch"):
            new().close()

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            *[(3, "non-block id: got 3"), (-1, "non-block id: got -1"), (1.5, "got 1.5"), (None, "got None")],
            *[("lm_tail", "unknown component"), ("blocks.1.w_q", "in block 1"), (2, "got 'embedding'")],
        ],
    )
    def test_unknown_non_block_components(self, name, message):
        accumulator = new(GradientLayout.transformer(2, 4, 2, 4, 8, embedding=False))
        before = state(accumulator)
        with pytest.raises(LayoutMismatch, match=message):
            accumulator.add_non_block(name, np.ones((8, 4), np.float32))
        assert state(accumulator) == before

    @pytest.mark.parametrize("index", [-1, 2, "0", None, 0.0])
    def test_unknown_blocks(self, index):
        for call in (new().block, lambda i: new().add_block(i, [])):
            with pytest.raises(LayoutMismatch, match="unknown block"):
                call(index)

    @pytest.mark.parametrize("hold", [0, -1, 1.5, NAN, "2", None, True])
    def test_a_hold_that_is_no_count(self, hold):
        with pytest.raises(CallerError, match="hold"):
            new(hold=hold)

    def test_what_has_left_until_the_window_is_dropped(self, backend):
        accumulator, gradient = new(TWO, backend=backend), backend.put(ones())
        accumulator.add_block(0, [gradient])
        accumulator.close_span(TWO.block(0))
        with pytest.raises(WindowError, match="block 0 was sent"):
            accumulator.add_block(0, [gradient])
        accumulator.state.now = State.SENDING
        with pytest.raises(WindowError, match="the window was sent"):  # what is written to a view would be lost
            accumulator.views()
        accumulator.state.now = State.FAILED  # where the exchange failed that is said first
        with pytest.raises(WindowError, match="its window is kept"):
            accumulator.add_block(0, [gradient])
        accumulator.drop_window()
        accumulator.state.now = State.EMPTY
        accumulator.add([gradient, gradient])
        assert closed(accumulator)["layers.0.w"].tolist() == [1, 1]


def test_counts():
    assert (new(SMALL).num_blocks, new(ODD).num_blocks, new(GradientLayout.of([(1,)])).num_blocks) == (2, 2, 0)
    assert type(new(hold=np.int64(2)).hold) is int


@pytest.mark.parametrize(("dtype", "hold"), [("float32", 1), ("float16", 2)])
def test_a_step_takes_next_to_nothing_beside_the_arena_whose_views_it_shows(dtype, hold):
    layout = GradientLayout.transformer(3, 256, 64, 1024, 2048)
    tracemalloc.start()
    accumulator = PerBlockGradientAccumulator(layout, HostKernels(2), hold=hold)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert layout.nbytes == accumulator.memory.nbytes <= taken < 1.02 * layout.nbytes
    batches = [draw.random_gradients(seed, layout.slots, dtype) for seed in range(2)]

    def step():
        for batch in batches:
            accumulator.add(batch, 0.3, measure=batch is batches[-1])
        accumulator.has_non_finite()
        accumulator.average()
        accumulator.block(0).accumulate(batches[0][:9])
        accumulator.close()
        accumulator.zero_all()

    for _ in range(3):
        step()
    tracemalloc.start()
    step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    scratch = 2 * 4 * CHUNK  # a thread takes its own at its first chunk, which may be in any of the steps
    assert peak < 0.05 * layout.nbytes + scratch
    for slot, view in zip(layout.slots, accumulator.views().values(), strict=True):
        assert view.shape == slot.shape
        assert np.shares_memory(view, accumulator.memory.data)
