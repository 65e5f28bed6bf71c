"""The accumulator of a GPU: what it holds, what it takes of the device's memory, and that it never waits."""

import gc

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import on_the_stand_in
from devices import all_on_host, churned, named_cuda, nothing_is_launched, on_host, put_all, raw, synchronize

from gradengine import GpuGradientAccumulator, GradientEngine, GradientLayout, PerBlockGradientAccumulator
from gradengine.errors import BufferRefused, CallerError, DeviceUnavailable, LayoutMismatch, OutOfDeviceMemory
from gradengine.layout import BLOCK_COMPONENTS

LAYOUT = GradientLayout.transformer(2, 8, 4, 12, 16)
LARGE = GradientLayout.transformer(24, 1024, 256, 4096, 32768, embedding=False)
SIZES = (1048576, 262144, 262144, 1048576, 4194304, 4194304, 4194304, 1024, 1024)


def new(device, layout=LAYOUT, hold=1):
    return GpuGradientAccumulator(layout, device.kernels, hold=hold)


def batches_of(count, layout=LAYOUT, dtype="float32"):
    return [draw.random_gradients(seed, layout.slots, dtype) for seed in range(count)]


def host_sums(batches, weights=None, layout=LAYOUT):
    """What the accumulator on the CPU makes of the same micro-batches."""
    accumulator = PerBlockGradientAccumulator(layout)
    for gradients, weight in zip(batches, weights or [1.0] * len(batches), strict=True):
        accumulator.add(gradients, weight)
    accumulator.close()
    return {name: view.copy() for name, view in accumulator.views().items()}


def assert_same(got, wanted):
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        draw.assert_same_bits(on_host(got[name]), array)


class TestComponents:
    def test_nine_in_each_block_of_their_sizes(self):
        for block in LARGE.blocks:
            assert tuple(slot.name.split(".")[-1] for slot in block.slots) == BLOCK_COMPONENTS
            assert tuple(slot.size for slot in block.slots) == SIZES
        assert [slot.size for slot in LARGE.slots if slot.block is None] == [32768 * 1024, 1024]

    def test_of_an_accumulator(self, device):
        accumulator = new(device, GradientLayout.transformer(1, 1024, 256, 4096, 8, embedding=False))
        block = accumulator.block(0)
        assert block.component_sizes == SIZES
        assert tuple(block.components) == BLOCK_COMPONENTS
        assert [array.size for array in block.components.values()] == list(SIZES)
        assert accumulator.num_blocks == 1


class TestWithoutAGradient:
    """Experts that no token reached, frozen parts: None in each micro-batch of a window."""

    @pytest.mark.parametrize("hold", [1, 4])
    def test_of_500_of_1000_components_it_costs_one_launch(self, emulated, hold):
        layout = GradientLayout.of({f"e{i}": (3,) for i in range(1000)})
        engine = GradientEngine(layout, emulated.kernels, micro_batches=4, hold=hold)
        windows = []
        for nothing in (1, 0):  # another half in the second
            batches = batches_of(4, layout)
            for batch in batches:
                batch[nothing::2] = [None] * 500
            batches = [put_all(emulated, batch) for batch in batches]
            synchronize(emulated)
            with cuda_emulator.recorded() as record:
                for batch in batches:
                    engine.add(batch)
                result = engine.step()
            folds = ["accumulate_4_large"] if hold == 4 else ["accumulate_1_large"] * 4
            assert record.launches == [*folds, "accumulate_1_large", "finalise", "hand_back_large"]
            assert record.fills == 0
            arrays = all_on_host(result.gradients).values()
            windows.append([array.tobytes() == bytes(12) for array in arrays])
        assert windows == [[False, True] * 500, [True, False] * 500]

    @pytest.mark.parametrize("hold", [1, 4])
    def test_its_bits_are_the_hosts(self, device, hold):
        """Whichever lack it, in whichever micro-batch; what the last window left there is NaN."""
        accumulator = new(device, hold=hold)
        for seed in range(6):
            accumulator.add(put_all(device, [np.full(slot.shape, np.nan, np.float32) for slot in LAYOUT.slots]))
            accumulator.close()
            accumulator.zero_all()
            batches = batches_of(5)
            lacks = np.random.default_rng(seed).random((5, len(LAYOUT.slots))) < 0.7
            batches = [
                [None if lacking else array for array, lacking in zip(batch, row, strict=True)]
                for batch, row in zip(batches, lacks, strict=True)
            ]
            for batch in batches:
                accumulator.add(put_all(device, batch))
            accumulator.close()
            assert_same(accumulator.views(), host_sums(batches))
            accumulator.zero_all()


class TestAccumulation:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("hold", [1, 2, 5])
    def test_the_arena_has_the_hosts_bits(self, device, dtype, hold):
        batches, weights = batches_of(4, dtype=dtype), [1.0, 3.0, 0.3, 1.0]
        accumulator = new(device, hold=hold)
        for batch, weight in zip(batches, weights, strict=True):
            accumulator.add(put_all(device, batch), weight)
        accumulator.close()
        assert_same(accumulator.views(), host_sums(batches, weights))

    def test_part_by_part_as_backward_makes_them(self, device):
        batches, weights = batches_of(3), [1.0, 2.0, 1.0]
        accumulator = new(device)
        for batch, weight in zip(batches, weights, strict=True):
            named = put_all(device, dict(zip((slot.name for slot in LAYOUT.slots), batch, strict=True)))
            accumulator.accumulate_non_block(0, named["lm_head"], weight)
            accumulator.accumulate_non_block("final_norm", named["final_norm"], weight)
            for block in reversed(LAYOUT.blocks):
                accumulator.accumulate_block(block.index, [named[slot.name] for slot in block.slots], weight)
            accumulator.accumulate_non_block(2, named["embedding"], weight)
        accumulator.close()
        assert_same(accumulator.views(), host_sums(batches, weights))

    def test_mean_and_zero(self, device):
        batches = batches_of(3)
        accumulator = new(device, hold=2)
        for _ in range(2):
            for batch in batches:
                accumulator.add(put_all(device, batch))
            accumulator.average()
            third = np.float32(1 / 3)
            assert_same(accumulator.views(), {name: array * third for name, array in host_sums(batches).items()})
            assert (accumulator.accumulated_count, accumulator.total_weight) == (1, 1.0)
            accumulator.zero_all()
            assert accumulator.accumulated_count == 0

    def test_non_finite(self, device):
        accumulator = new(device)
        accumulator.add(put_all(device, batches_of(1)[0]))
        assert accumulator.has_non_finite() is False
        bad = batches_of(1)[0]
        bad[7][3] = np.inf
        accumulator.add(put_all(device, bad))
        assert accumulator.has_non_finite() is True


class TestMemory:
    def test_needed_for_350_million_parameters(self):
        assert 1.5e9 < GpuGradientAccumulator.memory_needed(LARGE) < 1.6e9
        assert LARGE.nbytes < GpuGradientAccumulator.memory_needed(LARGE) < 1.01 * LARGE.nbytes

    @on_the_stand_in
    @pytest.mark.parametrize(
        "layout",
        [
            GradientLayout.transformer(2, 64, 32, 256, 512),
            GradientLayout.transformer(6, 32, 16, 128, 1000),
            GradientLayout.of([(300_000,), (5,), (0,)]),
            GradientLayout.of({f"layers.{i}.w{j}": (3,) for i in range(40) for j in range(9)}),
            GradientLayout.of({f"w{i}": (3,) for i in range(200)}),
            GradientLayout.of([(3,)]),
        ],
    )
    @pytest.mark.parametrize("hold", [1, 2])
    def test_taken_is_no_more_than_needed(self, emulated, layout, hold):
        """With all the tables that a window makes, and what the pool rounds each allocation to."""
        pool, needed = emulated.xp.get_default_memory_pool(), GpuGradientAccumulator.memory_needed(layout)
        batches = [put_all(emulated, batch) for batch in batches_of(2, layout, "float16")]
        gc.collect()
        before = pool.used_bytes()
        with cuda_emulator.recorded() as record:
            accumulator = new(emulated, layout, hold)
            for batch in batches:
                accumulator.add(batch)
            accumulator.average()
        assert pool.used_bytes() - before <= needed
        assert layout.nbytes <= sum(record.allocations) <= needed

    def test_windows_take_nothing_more(self, emulated):
        accumulator, batches = new(emulated, hold=2), [put_all(emulated, batch) for batch in batches_of(3)]

        def window():
            for batch in batches:
                accumulator.add(batch)
            accumulator.average()
            accumulator.zero_all()

        window()
        with cuda_emulator.recorded() as record:
            for _ in range(3):
                window()
        assert (record.allocations, record.pinned_allocations) == ([], [])

    @on_the_stand_in
    def test_too_little_says_what_is_needed_and_what_is_free_and_takes_nothing(self, emulated):
        xp, layout = emulated.xp, GradientLayout.of([(1 << 20,)])
        pool = xp.get_default_memory_pool()
        pool.free_all_blocks()
        before, needed = pool.used_bytes(), GpuGradientAccumulator.memory_needed(layout)
        with cuda_emulator.options(device_memory=pool.total_bytes() + needed - 512):
            free = xp.cuda.runtime.memGetInfo()[0]
            with cuda_emulator.recorded() as record, pytest.raises(OutOfDeviceMemory) as caught:
                new(emulated, layout)
        assert f"got {free} bytes free of" in str(caught.value)
        assert f"expected {needed} bytes" in str(caught.value)
        assert (record.allocations, record.operations) == ([], [])
        del caught
        assert pool.used_bytes() == before

    def test_more_than_any_device_has(self, device):
        huge = GradientLayout.of([(1 << 40,)])
        with nothing_is_launched(device), pytest.raises(OutOfDeviceMemory, match=r"expected 43\d+ bytes; free memory"):
            new(device, huge)

    def test_what_the_pool_holds_unused_is_free(self, emulated):
        xp, layout = emulated.xp, GradientLayout.of([(1 << 20,)])
        pool = xp.get_default_memory_pool()
        pool.free_all_blocks()
        with cuda_emulator.options(device_memory=pool.total_bytes() + (8 << 20)):
            unused = xp.empty(6 << 20, np.uint8)
            del unused
            assert new(emulated, layout).memory.size == 1 << 20

    def test_it_is_given_back(self, emulated):
        pool = emulated.xp.get_default_memory_pool()
        accumulator = new(emulated, GradientLayout.of([(1 << 20,)]))
        synchronize(emulated)
        used = pool.used_bytes()
        del accumulator
        gc.collect()
        emulated.kernels.device.let_go()  # as the next call does: where threads have streams of their own it is kept
        assert used - pool.used_bytes() >= 4 << 20


class TestAsynchronous:
    @pytest.mark.parametrize("hold", [1, 3])
    def test_a_window_neither_waits_nor_copies(self, emulated, hold):
        accumulator, batches = new(emulated, hold=hold), [put_all(emulated, batch) for batch in batches_of(4)]
        workspace = put_all(emulated, batches_of(1)[0])

        def window():
            for batch in batches:
                accumulator.add(batch)
            accumulator.average()
            accumulator.copy_block_to(0, workspace[:9])
            accumulator.zero_all()

        window()
        synchronize(emulated)
        with cuda_emulator.recorded() as record:
            window()
        assert (record.waits, record.copies) == ([], [])
        assert len(record.launches) == -(-4 // hold) + 2  # the folds, the mean, the copy

    @pytest.mark.parametrize("hold", [1, 2])
    def test_uninitialised_memory_is_never_read(self, device, hold):
        """Fresh memory full of NaN, components that did not come, and padding: nothing of it shows."""
        churned(device)
        accumulator, batch = new(device, hold=hold), batches_of(1)[0]
        gaps = [gradient if i % 3 else None for i, gradient in enumerate(batch)]
        accumulator.add(put_all(device, gaps))
        accumulator.close()
        for array, got in zip(gaps, accumulator.views().values(), strict=True):
            draw.assert_same_bits(on_host(got), np.zeros_like(on_host(got)) if array is None else array)
        assert accumulator.has_non_finite() is False
        assert np.isfinite(device.get(accumulator.memory)).all()

    def test_gradients_may_go_as_soon_as_they_were_added(self, device):
        batches = batches_of(3)
        accumulator = new(device, hold=2)
        for batch in batches:
            accumulator.add(put_all(device, batch))
            gc.collect()
            churned(device)
        accumulator.close()
        assert_same(accumulator.views(), host_sums(batches))


class TestCopies:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("offset", [0, 1])
    def test_of_a_block_in_any_dtype_at_any_address(self, device, dtype, offset):
        batches, block = batches_of(2), LAYOUT.blocks[1]
        accumulator = new(device, hold=3)
        for batch in batches:
            accumulator.add(put_all(device, batch))
        nines = [np.full(slot.size, 9, draw.DTYPES[dtype]) for slot in block.slots]
        buffers = [device.buffer_at(array, offset) for array in nines]
        accumulator.copy_block_to(1, [raw(buffer) for buffer in buffers])
        wanted = host_sums(batches)
        for slot, buffer in zip(block.slots, buffers, strict=True):
            got = device.get(buffer).view(draw.DTYPES[dtype])
            draw.assert_same_bits(got, wanted[slot.name].reshape(-1).astype(got.dtype))
        accumulator.close()
        assert_same(accumulator.views(), wanted)

    def test_of_what_is_wanted_by_name(self, device):
        batches, accumulator = batches_of(1), new(device)
        accumulator.add(put_all(device, batches[0]))
        workspace = dict.fromkeys(BLOCK_COMPONENTS)
        workspace["gate"] = device.put(np.full((8, 12), 9, np.float32))
        accumulator.copy_block_to(0, workspace)
        draw.assert_same_bits(on_host(workspace["gate"]), host_sums(batches)["blocks.0.gate"])

    @pytest.mark.parametrize("name", ["final_norm", 1])
    def test_of_a_component_outside_the_blocks(self, device, name):
        batches, accumulator = batches_of(1), new(device)
        accumulator.add(put_all(device, batches[0]))
        destination = device.put(np.full(8, 9, np.float16))
        accumulator.copy_non_block_to(name, destination)
        draw.assert_same_bits(on_host(destination), host_sums(batches)["final_norm"].astype(np.float16))

    def test_zeros_where_nothing_came(self, device):
        accumulator = new(device)
        nines = [np.full(slot.shape, 9, np.float32) for slot in LAYOUT.blocks[0].slots]
        workspace = put_all(device, nines)
        accumulator.copy_block_to(0, workspace)
        assert not any(on_host(array).any() for array in workspace)

    def test_more_may_be_added_behind_a_copy(self, device):
        batches, accumulator = batches_of(3), new(device, hold=4)
        destination = device.put(np.empty(8, np.float32))
        for i, batch in enumerate(batches):
            accumulator.add(put_all(device, batch))
            accumulator.copy_non_block_to("final_norm", destination)
            draw.assert_same_bits(on_host(destination), host_sums(batches[: i + 1])["final_norm"])
        accumulator.close()
        assert_same(accumulator.views(), host_sums(batches))

    def bad_workspaces(self, device, accumulator):
        block = LAYOUT.blocks[0]
        good = put_all(device, [np.full(slot.shape, 9, np.float32) for slot in block.slots])
        last, own = device.kernels.device.view(good[8], "last"), accumulator.target_of(block.slots[8])
        yield good[:8], "got 8, expected 9"
        yield [*good[:8], device.put(np.empty(9, np.float32))], "'blocks.0.post_attn_norm' has another shape"
        yield [*good[:8], np.empty(8, np.float32)], "'blocks.0.post_attn_norm' is on another device: got cpu"
        yield [*good[:8], device.put(np.empty(8))], "'blocks.0.post_attn_norm' has an unsupported dtype: got float64"
        yield [*good[:8], raw(last, writable=False)], "destination 'blocks.0.post_attn_norm' is read-only"
        yield [*good[:8], good[7]], "'blocks.0.input_norm' and 'blocks.0.post_attn_norm' overlap"
        yield [*good[:8], raw(own)], "'blocks.0.post_attn_norm' and 'the arena' overlap"
        yield dict.fromkeys(BLOCK_COMPONENTS[:8]), "lack component 'post_attn_norm'"

    def test_bad_workspaces_are_refused_before_any_launch(self, device):
        accumulator = new(device, hold=2)
        accumulator.add(put_all(device, batches_of(1)[0]))
        for workspace, message in self.bad_workspaces(device, accumulator):
            with nothing_is_launched(device), pytest.raises((BufferRefused, LayoutMismatch), match=message):
                accumulator.copy_block_to(0, workspace)
        for name in (3, "blocks.0.gate", "lm_tail"):
            with pytest.raises(LayoutMismatch):
                accumulator.copy_non_block_to(name, device.put(np.empty(8, np.float32)))
        with pytest.raises(LayoutMismatch, match="unknown block: got 2"):
            accumulator.copy_block_to(2, [])
        accumulator.close()
        assert_same(all_on_host(accumulator.views()), host_sums(batches_of(1)))


class TestDevices:
    def test_by_name(self, device):
        with named_cuda(device):
            for name in ("cuda", "cuda:0"):
                assert GpuGradientAccumulator(LAYOUT, name).kernels is device.kernels
            assert GpuGradientAccumulator(LAYOUT).kernels is device.kernels

    def test_the_cpu_has_its_own(self):
        with pytest.raises(CallerError, match=r"this accumulator needs a GPU.*PerBlockGradientAccumulator"):
            GpuGradientAccumulator(LAYOUT, "cpu")

    @pytest.mark.parametrize("device_name", ["gpu", "cuda:x", "cuda:", "abacus", 0])
    def test_unknown_ones(self, device_name):
        with pytest.raises(CallerError, match="there are no kernels for the device"):
            GpuGradientAccumulator(LAYOUT, device_name)

    def test_one_that_is_not_there(self):
        with pytest.raises(DeviceUnavailable, match=r"cuda:99|CuPy|GPU"):
            GpuGradientAccumulator(LAYOUT, "cuda:99")

    @pytest.mark.parametrize("hold", [0, -1, 1.5, None])
    def test_hold_is_a_count(self, emulated, hold):
        with (
            cuda_emulator.recorded() as record,
            pytest.raises(CallerError, match=r"hold is (out|not) "),
        ):
            new(emulated, hold=hold)
        assert record.allocations == []
