"""The accumulator of a GPU: what it holds, what it takes of the device's memory, and that it never waits."""

import contextlib
import gc

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import all_on_host, churned, named_cuda, nothing_is_launched, on_host, put_all, raw, synchronize

from gradengine import GpuGradientAccumulator, GradientEngine, GradientLayout, PerBlockGradientAccumulator
from gradengine.errors import BufferRefused, CallerError, DeviceUnavailable, LayoutMismatch, OutOfDeviceMemory
from gradengine.layout import BLOCK_COMPONENTS

LAYOUT = GradientLayout.transformer(2, 8, 4, 12, 16)
LARGE = GradientLayout.transformer(24, 1024, 256, 4096, 32768, embedding=False)


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


class TestWithoutAGradient:
    """Experts that no token reached, frozen parts: None in each micro-batch of a window."""

    @pytest.mark.parametrize("hold", [1, 4])
    def test_of_150_of_300_components_it_costs_one_launch(self, emulated, hold):
        layout = GradientLayout.of({f"e{i}": (3,) for i in range(300)})
        engine = GradientEngine(layout, emulated.kernels, micro_batches=4, hold=hold)
        windows = []
        for nothing in (1, 0):  # another half in the second
            batches = batches_of(4, layout)
            for batch in batches:
                batch[nothing::2] = [None] * 150
            batches = [put_all(emulated, batch) for batch in batches]
            synchronize(emulated)
            with cuda_emulator.recorded() as record:
                for batch in batches:
                    engine.add(batch)
                result = engine.step()
            launches = [name.removesuffix("_large").removesuffix("_small") for name in record.launches]
            folds = ["accumulate_4"] if hold == 4 else ["accumulate_1"] * 4
            assert launches == [*folds, "accumulate_1", "finalise", "hand_back"]
            assert record.fills == 0
            arrays = all_on_host(result.gradients).values()
            windows.append([array.tobytes() == bytes(12) for array in arrays])
        assert windows == [[False, True] * 150, [True, False] * 150]


def test_part_by_part_as_backward_makes_them(device):
    batches, weights = batches_of(3), [1.0, 2.0, 1.0]
    accumulator = new(device)
    for batch, weight in zip(batches, weights, strict=True):
        named = put_all(device, dict(zip((slot.name for slot in LAYOUT.slots), batch, strict=True)))
        accumulator.accumulate_non_block(0, named["lm_head"], weight)
        accumulator.accumulate_non_block("final_norm", named["final_norm"], weight)
        for block in reversed(LAYOUT.blocks):
            accumulator.accumulate_block(block.key, [named[slot.name] for slot in block.slots], weight)
        accumulator.accumulate_non_block(2, named["embedding"], weight)
    accumulator.close()
    assert_same(accumulator.views(), host_sums(batches, weights))


@contextlib.contextmanager
def all_but_taken(emulated, room):
    """A device on which so many bytes are free."""
    synchronize(emulated)
    emulated.kernels.device.kept.wait()
    free, total = emulated.xp.cuda.runtime.memGetInfo()
    with cuda_emulator.options(device_memory=total - free + room):
        yield


class TestMemory:
    def test_needed_for_350_million_parameters(self):
        assert LARGE.nbytes < GpuGradientAccumulator.memory_needed(LARGE) < 1.01 * LARGE.nbytes

    def test_more_than_any_device_has(self, device):
        huge = GradientLayout.of([(1 << 40,)])
        with nothing_is_launched(device), pytest.raises(OutOfDeviceMemory, match=r"expected 43\d+ bytes"):
            new(device, huge)

    def test_what_the_caller_s_pool_holds_unused_is_free(self, emulated):
        xp, pool = emulated.xp, emulated.xp.cuda.MemoryPool()
        with xp.cuda.using_allocator(pool.malloc), all_but_taken(emulated, 8 << 20):
            unused = xp.empty(6 << 20, np.uint8)
            del unused
            assert new(emulated, GradientLayout.of([(1 << 20,)])).memory.size == 1 << 20

    @pytest.mark.parametrize("room", [1 << 20, (4 << 20) + 512])
    @pytest.mark.parametrize("is_pooled", [True, False])
    def test_what_does_not_fit_is_refused_and_nothing_is_left(self, emulated, room, is_pooled):
        """Neither without room for the sums, nor with none for what is made after them."""
        pool, free = emulated.xp.cuda.MemoryPool(), r"got \d+ bytes free of \d+, expected \d+ bytes; .*empty_cache"
        with emulated.xp.cuda.using_allocator(pool.malloc if is_pooled else None), all_but_taken(emulated, room):
            with pytest.raises(OutOfDeviceMemory, match=free):
                new(emulated, GradientLayout.of([(1 << 20,)]))
            gc.collect()
            pool.free_all_blocks()
            assert emulated.xp.cuda.runtime.memGetInfo()[0] == room

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
    def test_a_window_neither_waits_nor_copies_nor_takes_memory(self, emulated, hold):
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
        assert (record.allocations, record.pinned_allocations) == ([], [])
        assert len(record.launches) == -(-4 // hold) + 2  # the folds, the mean, the copy

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

    def test_of_what_is_wanted_by_name_or_id_and_zeros_where_nothing_came(self, device):
        (batch,), accumulator = batches_of(1), new(device)
        workspace = dict.fromkeys(BLOCK_COMPONENTS)
        workspace["gate"] = device.put(np.full((8, 12), 9, np.float32))
        accumulator.copy_block_to(0, workspace)
        assert not on_host(workspace["gate"]).any()
        accumulator.add(put_all(device, batch))
        wanted = host_sums([batch])
        accumulator.copy_block_to(0, workspace)
        draw.assert_same_bits(on_host(workspace["gate"]), wanted["blocks.0.gate"])
        for name in ("final_norm", 1):
            destination = device.put(np.full(8, 9, np.float16))
            accumulator.copy_non_block_to(name, destination)
            draw.assert_same_bits(on_host(destination), wanted["final_norm"].astype(np.float16))

    def test_more_may_be_added_behind_a_copy(self, device):
        batches, accumulator = batches_of(3), new(device, hold=4)
        destination = device.put(np.empty(8, np.float32))
        for i, batch in enumerate(batches):
            accumulator.add(put_all(device, batch))
            accumulator.copy_non_block_to("final_norm", destination)
            draw.assert_same_bits(on_host(destination), host_sums(batches[: i + 1])["final_norm"])
        accumulator.close()
        assert_same(accumulator.views(), host_sums(batches))

    def test_bad_workspaces_are_refused_before_any_launch(self, device):
        accumulator, block = new(device, hold=2), LAYOUT.blocks[0]
        accumulator.add(put_all(device, batches_of(1)[0]))
        good = put_all(device, [np.full(slot.shape, 9, np.float32) for slot in block.slots])
        own = raw(accumulator.target_of(block.slots[8]))
        copy_block, copy_non_block = accumulator.copy_block_to, accumulator.copy_non_block_to
        for copy, which, workspace, message in (
            (copy_block, 0, good[:8], "the workspace of block 0: got 8, expected 9"),
            (copy_block, 0, [*good[:8], np.empty(8, np.float32)], "'blocks.0.post_attn_norm' .* got cpu"),
            (copy_block, 0, [*good[:8], own], "'blocks.0.post_attn_norm' and 'the arena' overlap"),
            (copy_block, 0, dict.fromkeys(BLOCK_COMPONENTS[:8]), "lack component 'post_attn_norm'"),
            (copy_block, 2, [], "unknown block: got 2"),
            *((copy_non_block, name, good[7], "component|non-block") for name in (3, "blocks.0.gate", "lm_tail")),
        ):
            with nothing_is_launched(device), pytest.raises((BufferRefused, LayoutMismatch), match=message):
                copy(which, workspace)
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

    def test_one_that_is_not_there(self):
        with pytest.raises(DeviceUnavailable, match=r"cuda:99|CuPy|GPU"):
            GpuGradientAccumulator(LAYOUT, "cuda:99")

    def test_a_hold_that_is_no_count_is_refused_before_any_memory_is_taken(self, emulated):
        with cuda_emulator.recorded() as record, pytest.raises(CallerError, match="hold"):
            new(emulated, hold=0)
        assert record.allocations == []
