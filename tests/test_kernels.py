"""K1 and the squared sums of every device, bit for bit, against NumPy written down step by step."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import strategies as draw
from backends import BACKENDS, available, host_backend
from devices import on_host
from folds import accumulate, measure, passes_of, totals_of, zero_sums
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import (
    ALL_16_BITS,
    OFFSETS,
    accumulated,
    batch_of,
    everything,
    fold_of,
    measured,
    scaled,
    size_of,
    sums_of,
)

from gradengine.kernels import CHUNK, Arena, Contribution, launch
from gradengine.kernels.decision import sum_in_order
from gradengine.kernels.host import HostKernels
from gradengine.kernels.operands import ADDRESS
from gradengine.layout.slots import Span

NAN, INF = math.nan, math.inf


@st.composite
def micro_batches(choose):
    """Weights of up to nine micro-batches, and for each component what it got of which: (size, overwrite, sources).

    A source is (micro-batch, dtype, offset); a component may lack any of the micro-batches, all of them, or only the
    first ones: a GPU folds four at a time, and what overwrites need not be among the first four.
    """
    count = choose(st.integers(1, 9))
    weights = choose(st.one_of(st.just([1.0] * count), st.lists(draw.weights, min_size=count, max_size=count)))
    source = st.tuples(draw.dtypes, st.sampled_from(OFFSETS))
    anyhow, late = st.lists(st.booleans(), min_size=count, max_size=count), st.integers(0, count)
    components = []
    for _ in range(choose(st.integers(1, 5))):
        present = choose(st.one_of(anyhow, late.map(lambda first: [i >= first for i in range(count)])))
        sources = [(i, *choose(source)) for i in range(count) if present[i]]
        components.append((choose(st.sampled_from(draw.SMALL_SIZES)), choose(st.booleans()), sources))
    positions = choose(st.permutations(range(len(components) + choose(st.integers(0, 2)))))[: len(components)]
    return weights, components, positions


@pytest.mark.parametrize("name", BACKENDS)
def test_what_follows_runs_on(name):
    """A backend that cannot be here is skipped once, by this name and reason."""
    assert available(name).get(available(name).kernels.device.allocate(3)).size == 3


def squared_sum(values):
    """The host's squared sum of one array."""
    kernels = HostKernels(1)
    arena = kernels.arena([kernels.device.view(values, "w")])
    kernels.measure(arena)
    return float(kernels.totals(arena)[0])


class TestAccumulate:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("limit", draw.LIMITS)
    def test_every_size_and_offset(self, backend, dtype, limit):
        """Neither the values nor their squared sum depend on where a gradient lies; who overwrites does not read."""
        size = size_of(backend, limit)
        source = draw.random_array(2, size, dtype)
        for offset in OFFSETS if size < 40 or limit == (1, 7) else (0, 1, 5, 7):
            overwrite, count = offset & 1 != 0, 1 + 2 * (offset >> 2)
            weights = [(1, 1, 1), (0.3, 1, 2)][offset >> 1 & 1][:count]
            target = np.full(size, NAN, np.float32) if overwrite else draw.random_array(1, size)
            sums, sources = backend.kernels.partial_sums([size]), [source] * count
            got = accumulated(backend, target, sources, weights, overwrite, sums, offset)
            draw.assert_same_bits(got, draw.folded(target, sources, weights, overwrite))
            draw.assert_same_bits(totals_of(backend.kernels, sums), measured(backend, got))

    @given(call=micro_batches(), seed=draw.seeds)
    def test_components_that_lack_some_micro_batches(self, backend, call, seed):
        """In one call: any dtypes, offsets and holes, folds that overwrite beside folds that add, empty components.

        Targets that are not in the call, or get nothing, stay as they are, unmeasured.
        """
        weights, components, positions = call
        targets = [draw.random_array([seed, p], 5) for p in range(len(components) + 2)]
        views, folds, overwrites = [[None] * len(components) for _ in weights], [], []  # views by micro-batch
        for column, (position, (size, overwrite, sources)) in enumerate(zip(positions, components, strict=True)):
            targets[position] = (
                np.full(size, NAN, np.float32) if overwrite else draw.random_array([seed, position], size)
            )
            arrays = [draw.random_array([seed, position, i], size, dtype) for i, dtype, _ in sources]
            for (i, _, offset), array in zip(sources, arrays, strict=True):
                views[i][column] = backend.buffer_at(array, offset)
            mine = [weights[i] for i, _, _ in sources]
            overwrites.append(overwrite)
            if sources:
                fold = fold_of(position, overwrite, [views[i][column] for i, _, _ in sources], mine)
                folds.append((fold, draw.folded(targets[position], arrays, mine, overwrite)))
        batch, expected = batch_of(positions, views, weights, overwrites), list(targets)
        for fold, values in folds:
            expected[fold.position] = values
        sizes = [target.size for target in targets]
        sums_expected = np.array([NAN if size else 0 for size in sizes])
        folded = [fold.position for fold, _ in folds]
        sums_expected[folded] = measured(backend, *(expected[position] for position in folded))
        for passes in (passes_of([fold for fold, _ in folds]), [batch]):
            buffers, sums = [backend.buffer(target) for target in targets], backend.kernels.partial_sums(sizes)
            for fold in passes:
                backend.kernels.accumulate(Arena(tuple(buffers), sums), fold, measure=True)
            for buffer, values in zip(buffers, expected, strict=True):
                draw.assert_same_bits(backend.get(buffer), values)
            draw.assert_same_values(totals_of(backend.kernels, sums), sums_expected)

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_a_contribution_says_where_gradients_lie(self, dtype):
        """0 is nothing: a micro-batch that gave none, and a gradient without elements, wherever that is."""
        one, empty = (available("host").buffer_at(np.ones(size, draw.DTYPES[dtype]), 3) for size in (5, 0))
        contribution = Contribution.of(Span.at([4, 2, 7]), [one, None, empty])
        assert [int(address) & ADDRESS for address in contribution.addresses] == [one.pointer, 0, 0]
        assert contribution.present.tolist() == [True, False, True]

    def test_a_long_fold_across_chunks(self, backend):
        target, weights = draw.random_array(0, 2 * backend.chunk + 77), [1, 0.7, 3, 1, 2**-12]
        sources = [draw.random_array(i, target.size, d) for i, d in enumerate((*draw.DTYPES, "bfloat16", "float16"))]
        got = accumulated(backend, target, sources, weights, False)
        draw.assert_same_bits(got, draw.folded(target, sources, weights, False))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_16_bits_are_widened_exactly(self, backend, dtype):
        values = ALL_16_BITS.view(draw.DTYPES[dtype])
        got = accumulated(backend, np.zeros(2**16, np.float32), [values], [1], True)
        draw.assert_same_values(got, values.astype(np.float32))

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("weight", [1, 0.5])
    def test_subnormals_signed_zeros_and_what_is_not_finite(self, backend, overwrite, weight):
        """None is flushed, and overflow and NaN arrive without a warning."""
        target = np.tile(np.array([1e-45, -1e-45, 1e-40, -0.0, 0.0, 2.0**-126, 3e38, 1, -INF], np.float32), 9)
        source = np.tile(np.array([1e-45, -1e-45, 1e-40, -0.0, 0.0, 2.0**-126, 3e38, NAN, INF], np.float32), 9)
        got = accumulated(backend, target, [source], [weight], overwrite)
        with np.errstate(all="ignore"):
            draw.assert_same_values(got, draw.folded(target, [source], [weight], overwrite))

    @pytest.mark.parametrize(("components", "sources"), [(481, 1), (121, 4), (1001, 2), (4001, 1)])
    def test_more_tensors_than_a_launch_has_arguments_for(self, backend, components, sources):
        arrays = [draw.random_array(i, 5 * components, "bfloat16") for i in range(sources)]
        arena, views = backend.buffer(np.zeros(5 * components, np.float32)), [backend.buffer(a) for a in arrays]
        parts = [(5 * p, 5 * p + 1 + p % 4) for p in range(components)]
        weights = [3, 0.3, 1, 0.7][:sources]
        folds = [fold_of(p, True, [v.part(*parts[p]) for v in views], weights) for p in range(components)]
        accumulate(backend.kernels, [arena.part(*part) for part in parts], folds)
        expected = draw.folded(None, arrays, weights, True)
        expected[[i for p, (_, stop) in enumerate(parts) for i in range(stop, 5 * p + 5)]] = 0
        draw.assert_same_bits(backend.get(arena), expected)

    def test_memory_that_is_not_aligned_to_its_elements(self):
        """NumPy gives such arrays out (a record's field, a file's middle); raw pointers of that kind are refused."""
        values = draw.random_array(0, 2 * draw.ROW + 1)
        odd = np.zeros(values.nbytes + 1, np.uint8)[1:].view(np.float32)
        odd[:] = values
        kernels = HostKernels(1)
        sums = kernels.partial_sums([values.size])
        target, view = kernels.device.allocate(values.size), kernels.device.view(odd, "w")
        accumulate(kernels, [target], [fold_of(0, True, [view], [1])], sums)
        draw.assert_same_bits(target.data, values)
        kernels.scale([target], np.float32(0.5), [view])
        draw.assert_same_bits(odd.copy(), values * np.float32(0.5))


class TestLongChunks:
    """A GPU's chunks grow with the set, up to 16 units for each thread; here for sets of any size."""

    @pytest.fixture(autouse=True)
    def _few_chunks(self, monkeypatch):
        monkeypatch.setattr(launch, "_WANTED_CHUNKS", 2)

    def test_a_component_that_begins_with_zeros_forgets_its_nan(self, device):
        """Its first micro-batch gave none; the window before left a NaN."""
        target, sums = device.buffer(np.full(9, NAN, np.float32)), device.kernels.partial_sums([9])
        measure(device.kernels, [target], sums, [0])
        zero_sums(device.kernels, sums, [0])
        assert (totals_of(device.kernels, sums), sums.non_finite.get()) == ([0], [0])

    @pytest.mark.parametrize("chunk", [4096, 16384, 32768])
    @pytest.mark.parametrize("more", [0, 8, 1023])
    def test_a_thread_takes_several_units(self, device, chunk, more):
        values = draw.random_array(chunk, 2 * chunk + more, "bfloat16")
        target, sums = device.buffer(np.zeros(values.size, np.float32)), device.kernels.partial_sums([values.size])
        assert sums.chunk == chunk
        accumulate(device.kernels, [target], [fold_of(0, True, [device.buffer_at(values, 3)], [3])], sums)
        expected = draw.folded(None, [values], [3], True)
        draw.assert_same_bits(device.get(target), expected)
        draw.assert_same_bits(totals_of(device.kernels, sums), measured(device, expected))
        assert totals_of(device.kernels, sums)[0] == pytest.approx(draw.exact_norm([expected]) ** 2, rel=1e-6)
        draw.assert_same_bits(scaled(device, values, 3, "float32", (1, 3)), expected)

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("units", range(1, 9))
    def test_units_that_are_read_at_once_are_added_as_one_by_one(self, device, dtype, units):
        """At once where they begin on a 16-byte boundary; `units` are those of a thread in the last chunk."""
        values = draw.random_array(units, 2 * 16384 + 2048 * units - 3, dtype)
        sums = [sums_of(device, [device.buffer_at(values, offset)]) for offset in (0, 1)]
        assert {part.chunk for part in sums} == {16384}
        draw.assert_same_bits(*(on_host(part.values) for part in sums))


def signals(size):
    """Values of every kind that a sum of squares may stumble over."""
    rng = np.random.default_rng(size)
    normal = rng.standard_normal(size, np.float32)
    lonely = np.full(size, 1e-30, np.float32)
    lonely[size // 2 :][:1] = 1e30
    return {
        "random": normal,
        "constant": np.full(size, 0.1, np.float32),
        "huge": np.float32(1e30) * normal,
        "largest": np.full(size, 3.4e38, np.float32),
        "tiny": np.float32(1e-30) * normal,
        "subnormal": np.float32(1e-40) * normal,
        "edge": np.float32(2.0**-63) * normal,  # squares about fp32's smallest normal number
        "mixed": (10 ** rng.uniform(-38, 38, size)).astype(np.float32),
        "lonely": lonely,
        "zero": np.zeros(size, np.float32),
    }


class TestSquaredSums:
    @pytest.mark.parametrize("limit", draw.LIMITS)
    def test_within_one_millionth(self, backend, limit):
        kinds = signals(size_of(backend, limit))
        exact = {kind: float(np.sum(np.square(values.astype(np.longdouble)))) for kind, values in kinds.items()}
        totals, values = measured(backend, *kinds.values()), [backend.buffer(values) for values in kinds.values()]
        assert dict(zip(kinds, totals.tolist(), strict=True)) == pytest.approx(exact, rel=1e-6, abs=0)
        sums = backend.kernels.partial_sums([target.size for target in values])
        accumulate(backend.kernels, values, [fold_of(p, True, [view], [1]) for p, view in enumerate(values)], sums)
        draw.assert_same_bits(totals_of(backend.kernels, sums), totals)  # in passing

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("magnitude", [1e-7, 1.0, 3e4])
    @pytest.mark.parametrize("is_odd", [False, True])
    def test_of_short_floats(self, backend, dtype, magnitude, is_odd):
        values = draw.random_array(0, backend.chunk + 512 + is_odd, dtype, magnitude).clip(-60000, 60000)
        sums = [sums_of(backend, [backend.buffer_at(values, offset)]) for offset in OFFSETS]
        totals = {float(totals_of(backend.kernels, each)[0]) for each in sums}
        exact = draw.exact_norm([values.astype(np.float32)]) ** 2
        assert list(totals) == pytest.approx([exact], rel=1e-6, abs=0)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_one_bad_element_anywhere_shows(self, backend, bad, dtype):
        chunk = backend.chunk
        size = 2 * chunk + draw.ROW + 3
        clean = np.zeros(size, draw.DTYPES[dtype])
        arrays = []
        for index in (0, 1, draw.ROW - 1, draw.ROW, chunk - 1, chunk, chunk + 1, 2 * chunk + draw.ROW, size - 1):
            arrays.append(clean.copy())
            arrays[-1][index] = bad
        totals = measured(backend, *arrays, clean)
        assert not np.isfinite(totals[:-1]).any()
        assert totals[-1] == 0

    @pytest.mark.parametrize("value", [NAN, -INF, 3e38, 1e-30, 2.0**-149])
    def test_every_position_among_zeros_of_a_unit_shows(self, backend, value):
        arrays = np.diag(np.full(4 * draw.UNIT, value, np.float32))
        arrays[~np.eye(4 * draw.UNIT, dtype=bool)] = 0
        totals, expected = measured(backend, *arrays), float(np.float32(value)) ** 2
        assert (totals == expected).all() if math.isfinite(value) else not np.isfinite(totals).any()

    @pytest.mark.parametrize("size", [1, draw.ROW, draw.ROW + 1, 5 * draw.ROW])
    def test_every_position_of_a_bad_element_shows(self, size):
        values = np.ones(size, np.float32)
        for index, bad in itertools.product(range(size), (NAN, -INF)):
            values[index] = bad
            assert not math.isfinite(squared_sum(values)), index
            values[index] = 1

    @pytest.mark.parametrize("values", [np.zeros(CHUNK, np.float32), np.full(CHUNK - 1, -0.0, np.float32)])
    def test_zeros_are_not_widened_to_fp64(self, values):
        tracemalloc.start()
        total = squared_sum(values)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (total, math.copysign(1, total)) == (0, 1)
        assert peak < values.nbytes / 8  # in fp64 they are twice as many bytes

    @pytest.mark.parametrize("value", [2.0**-149, 1e-40, -1e-30])
    @pytest.mark.parametrize("size", [1, draw.ROW, CHUNK])
    def test_one_tiny_value_among_zeros_is_not_lost(self, value, size):
        values = np.zeros(size, np.float32)
        values[size // 2] = value
        assert squared_sum(values) == float(np.float32(value)) ** 2

    @pytest.mark.parametrize("exponent", [*range(-24, -12), *range(17, 22)])
    def test_magnitudes_at_which_fp32_squares_are_subnormal_or_overflow(self, exponent):
        """Equal values round all the same way, so that nothing cancels what a square loses."""
        for mantissa in (1.0, 1.7, 3.3, 7.1):
            values = np.full(CHUNK - 1, float(f"{mantissa}e{exponent}"), np.float32)
            exact = values.size * float(values[0]) ** 2
            assert math.sqrt(squared_sum(values)) == pytest.approx(math.sqrt(exact), rel=1e-6, abs=0)

    @pytest.mark.parametrize("size", [draw.ROW, 3 * draw.ROW + 5, CHUNK])
    @pytest.mark.parametrize("factor", [0.999, 1.001])
    def test_a_mean_square_of_2_to_the_minus_100_is_the_last_to_be_summed_in_fp32(self, size, factor):
        """Whatever else is measured with it."""
        values = draw.random_array([5, size], size)
        values *= np.float32(math.sqrt(factor * 2.0**-100 / np.mean(np.square(values, dtype=np.float64))))
        rows = values[: size - size % draw.ROW].reshape(-1, draw.ROW)
        tail = values[size - size % draw.ROW :]
        in_fp32 = float(np.add.reduce(np.vecdot(rows, rows), dtype=np.float64)) + float(np.vecdot(tail, tail))
        wide = values.astype(np.float64)
        in_fp64 = float(np.add.reduce(wide * wide))
        assert in_fp32 != in_fp64
        expected = in_fp32 if factor > 1 else in_fp64
        assert squared_sum(values) == expected
        kernels = HostKernels(1)
        arrays = (np.ones(1, np.float32), values, np.ones(CHUNK, np.float32))
        arena = kernels.arena([kernels.device.view(array, "w") for array in arrays])
        for positions in ([1], [0, 1], [2, 1], [0, 1, 2]):
            kernels.measure(arena, positions)
            assert kernels.totals(arena)[1] == expected, positions

    @pytest.mark.parametrize("threads", [1, 2])
    def test_an_arena_of_ours_has_the_sums_of_each_chunk_alone(self, threads):
        """Rows of all chunks are added up together; to the bit as chunk by chunk, and whatever is in them."""
        sizes = [1, 511, 512, 513, 700, 512, 0, 5 * draw.ROW, CHUNK, CHUNK + 513, 1300, 1300, 1300]
        kernels = HostKernels(threads)
        for filled, last in [(1, 2), (1e30, 1e30), (1e-30, 1e-25), (0, 1e-40), (0, 0), (NAN, 1), (1, -INF)]:
            arrays = [draw.random_array([7, i], size) for i, size in enumerate(sizes)]
            for array in arrays[3::3]:
                array[:], array[-1:] = filled, last
            memory = kernels.device.allocate(sum(sizes))
            edges = list(itertools.accumulate(sizes, initial=0))
            arena = kernels.arena([memory.part(*edge) for edge in itertools.pairwise(edges)], memory)
            for target, array in zip(arena.targets, arrays, strict=True):
                target.data[:] = array
            expected = [
                sum_in_order(np.array([squared_sum(array[k : k + CHUNK]) for k in range(0, array.size, CHUNK)]))
                for array in arrays
            ]
            kernels.measure(arena)
            draw.assert_same_bits(kernels.totals(arena), np.array(expected))
            arena.targets[0].data[:] = 3
            kernels.measure(arena)  # anew
            draw.assert_same_bits(kernels.totals(arena), np.array([9, *expected[1:]]))

    @pytest.mark.parametrize("count", [1, 3, 12])
    def test_no_row_is_lost_where_some_chunks_are_measured_and_not_all(self, backend, count):
        """A few are added up one by one, many together."""
        for size in (1, draw.ROW, draw.ROW + 44, 2 * draw.ROW, 5 * draw.ROW + 3, backend.chunk + 300):
            arena = backend.kernels.arena([backend.buffer(np.ones(size, np.float32)) for _ in range(count + 1)])
            backend.kernels.measure(arena)
            zero_sums(backend.kernels, arena.partials, range(count + 1))
            backend.kernels.measure(arena, range(count))
            assert totals_of(backend.kernels, arena.partials).tolist() == [size] * count + [0]

    def test_only_the_targets_asked_for(self, backend):
        sums = backend.kernels.partial_sums([2 * backend.chunk + 1, 5, 0])
        buffers = [backend.buffer(np.ones(size, np.float32)) for size in sums.sizes]
        measure(backend.kernels, buffers, sums, [1, 2])
        totals = totals_of(backend.kernels, sums)
        assert np.isnan(totals[0])  # unmeasured is not finite
        assert totals[1:].tolist() == [5, 0]

    @pytest.mark.parametrize("chosen", [[0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]])
    def test_the_chosen_become_zero_and_no_others(self, backend, chosen):
        """Of some targets of several chunks, whatever they held; another is not among them."""
        sizes, positions = (2 * backend.chunk + 9, 0, 7, 3, backend.chunk, 5), [4, 0, 2, 1, 5]
        buffers = [backend.buffer(np.full(size, NAN, np.float32)) for size in sizes]
        arena, chosen = backend.kernels.arena(buffers), np.array(chosen, bool)
        backend.kernels.measure(arena)
        backend.kernels.zero(arena, Span.at(positions), chosen)
        zeroed = set(np.array(positions)[chosen].tolist())
        totals = backend.kernels.totals(arena)
        for position, buffer in enumerate(buffers):
            bits = draw.storage_bits(backend.get(buffer))
            assert (bits == 0 if position in zeroed else bits == 0x7FC00000).all()
            assert (totals[position] == 0) == (position in zeroed or not sizes[position])

    @given(st.lists(st.sampled_from([0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]), max_size=5))
    def test_chunks_partition_each_target(self, sizes):
        sums = HostKernels(1).partial_sums(sizes)
        chunks = [sums.chunks([p]) for p in range(len(sizes))]
        assert [index for target in chunks for _, index, _, _ in target] == list(range(sums.values.size))
        for size, target in zip(sizes, chunks, strict=True):
            limits = [0, *(stop for *_, stop in target)]
            assert [start for _, _, start, _ in target] == limits[:-1]
            assert limits[-1] == size
            assert all(0 < stop - start <= CHUNK for _, _, start, stop in target)


class TestRunToRun:
    def test_the_same_bits(self, backend):
        assert len({everything(backend) for _ in range(3)}) == 1

    def test_the_hosts_threads_change_no_bit(self):
        assert len({everything(host_backend(threads)) for threads in (1, 2, 3, 3, 8)}) == 1
