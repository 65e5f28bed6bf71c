"""What every device must do, bit for bit, against NumPy written down step by step."""

import itertools
import math
import os
import queue
import subprocess
import sys
import threading
import tracemalloc

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import BACKENDS, ORDERS, available, host_backend
from devices import number_of, on_host, operations_of
from folds import (
    Fold,
    accumulate,
    arena_of,
    finalise,
    hand_back,
    measure_chunks,
    passes_of,
    status_of,
    totals_of,
    zero_sums,
)
from hypothesis import given
from hypothesis import strategies as st
from operations import growth
from transports import SOON

from gradengine.arrays.dtypes import DTYPES
from gradengine.errors import CallerError, LayoutMismatch
from gradengine.kernels import (
    CHUNK,
    Arena,
    ClipPlan,
    Contribution,
    Decision,
    FoldPass,
    SlotSet,
    decide,
    host,
    host_threads,
    kernels_for,
    launch,
)
from gradengine.kernels.decision import clip_scale, sum_in_order
from gradengine.kernels.host import ROUND, WIDEN, HostKernels
from gradengine.kernels.host_sums import squared_sum
from gradengine.kernels.host_threads import shared_by_threads
from gradengine.kernels.operands import ADDRESS, AddressCheck

ALL_16_BITS = np.arange(2**16, dtype=np.uint16)
NAN, INF = math.nan, math.inf
OFFSETS = range(8)  # in elements: every way to lie beside a 16-byte boundary


def size_of(backend, limit):
    """A size of `strategies.LIMITS` in elements of that backend."""
    chunks, more = limit
    return chunks * backend.chunk + more


def fold_of(position, overwrite, views, weights):
    return Fold(position, overwrite, tuple(views), tuple(np.float32(weight) for weight in weights))


def batch_of(backend, positions, views, weights, overwrite):
    """Micro-batches as they are held: a row of views for each, None where it gave nothing."""
    places = SlotSet(positions)
    contributions = [Contribution.of(places, row) for row in views]
    return FoldPass(places, np.array(overwrite), contributions, [np.float32(weight) for weight in weights])


def sums_on_host(sizes):
    return HostKernels(1).partial_sums(sizes)


def accumulated(backend, target, sources, weights, overwrite, sums=None, offset=0):
    """K1 on one target, which keeps its values; the target afterwards."""
    buffer = backend.buffer(target)
    views = [backend.buffer_at(source, offset) for source in sources]
    accumulate(backend.kernels, [buffer], [fold_of(0, overwrite, views, weights)], sums)
    return backend.get(buffer)


def measured(backend, *arrays):
    """The squared sum of each array, by a pass of its own."""
    return totals_of(backend.kernels, sums_of(backend, [backend.buffer(array) for array in arrays]))


def sums_of(backend, buffers):
    sums = backend.kernels.partial_sums([buffer.size for buffer in buffers])
    measure_chunks(backend.kernels, buffers, sums, sums.chunks(range(len(buffers))))
    return sums


def scaled(backend, source, factor, dtype, offsets=(0, 0)):
    """K3 from one array to another of that dtype, each at an offset; also what lies on both sides of it is kept."""
    sevens = [np.full(size, 7, draw.DTYPES[dtype]) for size in (5, source.size, 5)]
    whole, (_, destination, _) = backend.buffers_in_one(sevens, offsets[1])
    backend.kernels.scale([backend.buffer_at(source, offsets[0])], np.float32(factor), [destination])
    got, first = backend.get(whole).view(draw.DTYPES[dtype]), offsets[1] + 5
    assert (got[offsets[1] : first] == 7).all()
    assert (got[first + source.size :] == 7).all()
    return got[first : first + source.size]


def numbers(values):
    """Norms, scales or factors on the host, wherever they lie."""
    return [number_of(value) for value in values]


@st.composite
def micro_batches(choose):
    """Weights of up to nine micro-batches, and for each component what it got of which: (size, overwrite, sources).

    A source is (micro-batch, dtype, offset); a component may lack any of the micro-batches, but not all.
    """
    count = choose(st.integers(1, 9))
    weights = choose(st.one_of(st.just([1.0] * count), st.lists(draw.weights, min_size=count, max_size=count)))
    source = st.tuples(draw.dtypes, st.sampled_from(OFFSETS))
    components = []
    for _ in range(choose(st.integers(1, 5))):
        present = choose(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
        sources = [(i, *choose(source)) for i in range(count) if present[i]]
        components.append((choose(st.sampled_from(draw.SMALL_SIZES)), choose(st.booleans()), sources))
    return weights, components


@pytest.mark.parametrize("name", BACKENDS)
def test_what_follows_runs_on(name):
    """A backend that cannot be here is skipped once, by this name and reason."""
    assert available(name).get(available(name).kernels.device.allocate(3)).size == 3


def test_the_host_converts_each_dtype_of_the_table():
    assert {*WIDEN} == {*ROUND, "float32"} == {*DTYPES}


class TestAccumulate:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("limit", draw.LIMITS)
    def test_every_size(self, backend, dtype, limit):
        size = size_of(backend, limit)
        target, source = draw.random_array(1, size), draw.random_array(2, size, dtype)
        for weight, overwrite in itertools.product((1, 0.3), (True, False)):
            got = accumulated(backend, target, [source], [weight], overwrite)
            draw.assert_same_bits(got, draw.folded(target, [source], [weight], overwrite))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("limit", [(0, 7), (0, 15), (0, 16), (0, 24), (0, 33), (1, 9)])
    def test_sources_at_every_offset(self, backend, dtype, limit):
        """Neither the values nor their squared sum depend on where a gradient lies."""
        size = size_of(backend, limit)
        target, source = draw.random_array(1, size), draw.random_array(2, size, dtype)
        totals = []
        for offset in OFFSETS:
            sums = backend.kernels.partial_sums([size])
            got = accumulated(backend, target, [source, source], [1, 0.3], False, sums, offset)
            draw.assert_same_bits(got, draw.folded(target, [source, source], [1, 0.3], False))
            totals.append(totals_of(backend.kernels, sums)[0])
        assert set(totals) == set(measured(backend, got))

    @given(
        size=st.sampled_from(draw.SMALL_SIZES),
        sources=st.lists(st.tuples(draw.dtypes, draw.weights), min_size=1, max_size=9),
        overwrite=st.booleans(),
        seed=draw.seeds,
    )
    def test_folds_of_up_to_nine(self, backend, size, sources, overwrite, seed):
        target = draw.random_array(seed, size)
        arrays = [draw.random_array([seed, i], size, dtype) for i, (dtype, _) in enumerate(sources)]
        weights = [weight for _, weight in sources]
        got = accumulated(backend, target, arrays, weights, overwrite, offset=seed % 8)
        draw.assert_same_bits(got, draw.folded(target, arrays, weights, overwrite))

    @given(call=micro_batches(), seed=draw.seeds)
    def test_components_that_lack_some_micro_batches(self, backend, call, seed):
        """In one call: any dtypes, offsets and holes, folds that overwrite beside folds that add, empty components."""
        weights, components = call
        targets = [draw.random_array([seed, p], size) for p, (size, _, _) in enumerate(components)]
        folds, expected = [], []
        views = [[None] * len(components) for _ in weights]  # by micro-batch
        for p, (size, overwrite, sources) in enumerate(components):
            arrays = [draw.random_array([seed, p, i], size, dtype) for i, dtype, _ in sources]
            for (i, _, offset), array in zip(sources, arrays, strict=True):
                views[i][p] = backend.buffer_at(array, offset)
            mine = [weights[i] for i, _, _ in sources]
            folds.append(fold_of(p, overwrite, [views[i][p] for i, _, _ in sources], mine))
            expected.append(draw.folded(targets[p], arrays, mine, overwrite))
        batch = batch_of(backend, range(len(components)), views, weights, [overwrite for _, overwrite, _ in components])
        for passes in (passes_of(folds), [batch]):
            buffers = [backend.buffer(target) for target in targets]
            sums = backend.kernels.partial_sums([target.size for target in targets])
            for fold in passes:
                backend.kernels.accumulate(Arena(tuple(buffers), sums), fold, measure=True)
            for buffer, values in zip(buffers, expected, strict=True):
                draw.assert_same_bits(backend.get(buffer), values)
            draw.assert_same_bits(totals_of(backend.kernels, sums), measured(backend, *expected))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_a_contribution_says_where_gradients_lie(self, backend, dtype):
        """0 is nothing: a micro-batch that gave none, and a gradient without elements, wherever that is."""
        one, empty = (backend.buffer_at(np.ones(size, draw.DTYPES[dtype]), 3) for size in (5, 0))
        contribution = Contribution.of(SlotSet([4, 2, 7]), [one, None, empty])
        assert [int(address) & ADDRESS for address in contribution.addresses] == [one.pointer, 0, 0]
        assert contribution.present.tolist() == [True, False, True]

    @pytest.mark.parametrize("weights", [[1, 1, 1], [0.3, 2, 1], [1] * 6])
    def test_a_batch_of_some_targets(self, backend, weights):
        """Targets that are not among its places, or get nothing from any micro-batch, stay as they are, unmeasured."""
        sizes, positions = (33, 5, 0, backend.chunk + 9, 40), [3, 1, 4]
        targets = [draw.random_array([0, p], size) for p, size in enumerate(sizes)]
        arrays = [[draw.random_array([i, p], sizes[p], "bfloat16") for p in positions] for i in range(len(weights))]
        views = [[backend.buffer(row[0]), None, None] for row in arrays]
        views[1][1] = backend.buffer(arrays[1][1])
        buffers, sums = [backend.buffer(target) for target in targets], backend.kernels.partial_sums(sizes)
        zero_sums(backend.kernels, sums, [2])
        batch = batch_of(backend, positions, views, weights, [True, False, True])
        assert batch.present.tolist() == [True, True, False]
        backend.kernels.accumulate(Arena(tuple(buffers), sums), batch, measure=True)
        expected = list(targets)
        expected[3] = draw.folded(None, [row[0] for row in arrays], weights, True)
        expected[1] = draw.folded(targets[1], [arrays[1][1]], [weights[1]], False)
        for buffer, values in zip(buffers, expected, strict=True):
            draw.assert_same_bits(backend.get(buffer), values)
        assert np.isnan(totals_of(backend.kernels, sums)).tolist() == [True, False, False, False, True]

    @pytest.mark.parametrize(
        ("weights", "expected"), [([(2,), (3,)], [2, 3]), ([(2, 3), (3, 2)], [32, 23]), ([(2, 3), (3,)], [32, 3])]
    )
    def test_each_target_has_its_own_weights(self, backend, weights, expected):
        """Though there are two weights in all, and the second target may lack the first micro-batch."""
        one, ten = (backend.buffer(np.full(40, value, np.float32)) for value in (1, 10))
        targets = [backend.buffer(np.full(40, NAN, np.float32)) for _ in weights]
        folds = [fold_of(p, True, [one, ten][: len(mine)], mine) for p, mine in enumerate(weights)]
        accumulate(backend.kernels, targets, folds)
        assert [set(backend.get(target).tolist()) for target in targets] == [{value} for value in expected]

    @pytest.mark.parametrize("first", range(9))
    def test_whichever_micro_batch_gives_a_targets_first_gradient_overwrites_it(self, backend, first):
        """A GPU folds four at a time: the target's first gradient need not be of the first four."""
        ones = backend.buffer(np.ones(40, np.float32))
        views = [[ones, ones if i >= first else None] for i in range(9)]
        buffers = [backend.buffer(np.full(40, NAN, np.float32)) for _ in range(2)]
        batch = batch_of(backend, [0, 1], views, [2] * 9, [True, True])
        backend.kernels.accumulate(arena_of(backend.kernels, buffers), batch)
        assert (backend.get(buffers[0]) == 18).all()
        assert (backend.get(buffers[1]) == 2 * (9 - first)).all()

    def test_a_long_fold_across_chunks(self, backend):
        target, weights = draw.random_array(0, 2 * backend.chunk + 77), [1, 0.7, 3, 1, 2**-12]
        sources = [draw.random_array(i, target.size, d) for i, d in enumerate((*draw.DTYPES, "bfloat16", "float16"))]
        got = accumulated(backend, target, sources, weights, False)
        draw.assert_same_bits(got, draw.folded(target, sources, weights, False))

    def test_each_product_is_rounded_before_it_is_added(self, backend):
        """(1 + 2**-12)**2 = 1 + 2**-11 + 2**-24: a fused multiply-add keeps the last term, two roundings lose it."""
        value = np.full(64, 1 + 2.0**-12, np.float32)
        got = accumulated(backend, np.full(64, -1, np.float32), [value], [1 + 2.0**-12], False)
        assert (got == np.float32(2.0**-11)).all()

    def test_bfloat16_is_widened_exactly(self, backend):
        got = accumulated(backend, np.zeros(2**16, np.float32), [ALL_16_BITS.view(draw.DTYPES["bfloat16"])], [1], True)
        draw.assert_same_bits(got, (ALL_16_BITS.astype(np.uint32) << 16).view(np.float32))

    def test_float16_is_widened_exactly(self, backend):
        bits = ALL_16_BITS.astype(np.int64)
        sign, exponent, fraction = np.where(bits >> 15, -1.0, 1.0), bits >> 10 & 31, bits & 1023
        value = np.where(exponent == 0, np.ldexp(fraction, -24), np.ldexp(1024.0 + fraction, exponent - 25)) * sign
        value[(exponent == 31) & (fraction == 0)] = INF
        value[(exponent == 31) & (fraction == 0) & (sign < 0)] = -INF
        value[(exponent == 31) & (fraction != 0)] = NAN
        got = accumulated(backend, np.zeros(2**16, np.float32), [ALL_16_BITS.view(np.float16)], [1], True)
        draw.assert_same_values(got, value.astype(np.float32))

    def test_subnormals_and_signed_zeros_are_kept(self, backend):
        tiny = np.tile(np.array([1e-45, -1e-45, 1e-40, -0.0, 0.0, 1.1754944e-38], np.float32), 9)
        draw.assert_same_bits(accumulated(backend, np.ones_like(tiny), [tiny], [1], True), tiny)
        draw.assert_same_bits(accumulated(backend, tiny, [tiny], [1], False), tiny + tiny)
        halved = accumulated(backend, np.ones_like(tiny), [tiny], [0.5], True)
        draw.assert_same_bits(halved, tiny * np.float32(0.5))

    def test_overwriting_does_not_read(self, backend):
        source = draw.random_array(0, backend.chunk + 3)
        draw.assert_same_bits(accumulated(backend, np.full_like(source, NAN), [source], [1], True), source)

    def test_overflow_and_nan_arrive_without_a_warning(self, backend):
        target = np.tile(np.array([3e38, 1, -INF], np.float32), 9)
        source = np.tile(np.array([3e38, NAN, INF], np.float32), 9)
        got = accumulated(backend, target, [source], [1], False)
        draw.assert_same_values(got, np.tile(np.array([INF, NAN, NAN], np.float32), 9))

    def test_many_targets_and_only_those_folded(self, backend):
        sizes = [0, 3, backend.chunk + 1, 33, 0]
        targets = [draw.random_array([0, i], size) for i, size in enumerate(sizes)]
        sources = [draw.random_array([1, i], size, "bfloat16") for i, size in enumerate(sizes)]
        buffers, sums = [backend.buffer(target) for target in targets], backend.kernels.partial_sums(sizes)
        views = [backend.kernels.device.view(backend.put(source), "w") for source in sources]
        chosen = (4, 2, 0, 1)
        accumulate(backend.kernels, buffers, [fold_of(p, False, [views[p]], [2]) for p in chosen], sums)
        for p, (buffer, target, source) in enumerate(zip(buffers, targets, sources, strict=True)):
            expected = draw.folded(target, [source], [2], False) if p in chosen else target
            draw.assert_same_bits(backend.get(buffer), expected)
        assert np.isnan(totals_of(backend.kernels, sums)).tolist() == [False, False, False, True, False]

    def test_neighbours_in_an_arena_are_left_alone(self, backend):
        arena = backend.buffer(np.full(256, 7, np.float32))
        targets = [arena.part(start, start + size) for start, size in ((32, 25), (64, 7), (96, 32))]
        views = [backend.kernels.device.view(backend.put(np.ones(target.size, np.float16)), "w") for target in targets]
        accumulate(backend.kernels, targets, [fold_of(p, True, [view], [1]) for p, view in enumerate(views)])
        expected = np.full(256, 7, np.float32)
        expected[32:57] = expected[64:71] = expected[96:128] = 1
        draw.assert_same_bits(backend.get(arena), expected)

    @pytest.mark.parametrize(("components", "sources"), [(481, 1), (121, 4), (1001, 2), (4001, 1)])
    def test_more_tensors_than_a_launch_has_arguments_for(self, backend, components, sources):
        arrays = [draw.random_array(i, 5 * components, "bfloat16") for i in range(sources)]
        arena, views = backend.buffer(np.zeros(5 * components, np.float32)), [backend.buffer(a) for a in arrays]
        parts = [(5 * p, 5 * p + 1 + p % 4) for p in range(components)]
        targets = [arena.part(*part) for part in parts]
        weights = [3, 0.3, 1, 0.7][:sources]
        folds = [fold_of(p, True, [v.part(*parts[p]) for v in views], weights) for p in range(components)]
        accumulate(backend.kernels, targets, folds)
        expected = draw.folded(None, arrays, weights, True)
        expected[[i for p, (_, stop) in enumerate(parts) for i in range(stop, 5 * p + 5)]] = 0
        draw.assert_same_bits(backend.get(arena), expected)

    def test_memory_that_is_not_aligned_to_its_elements(self):
        """NumPy gives such arrays out (a record's field, a file's middle); raw pointers of that kind are refused."""
        values = draw.random_array(0, 2 * draw.ROW + 1)
        memory = np.zeros(values.nbytes + 1, np.uint8)
        odd = memory[1:].view(np.float32)
        odd[:] = values
        kernels, sums = HostKernels(1), sums_on_host([values.size])
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
    powers = (10 ** rng.uniform(-38, 38, size)).astype(np.float32)
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
        "mixed": powers,
        "lonely": lonely,
        "zero": np.zeros(size, np.float32),
    }


class TestSquaredSums:
    @pytest.mark.parametrize("limit", draw.LIMITS)
    def test_within_one_millionth(self, backend, limit):
        size = size_of(backend, limit)
        kinds = signals(size)
        exact = [float(np.sum(np.square(values.astype(np.longdouble)))) for values in kinds.values()]
        sums = backend.kernels.partial_sums([size] * len(kinds))
        targets = [backend.buffer(np.zeros(size, np.float32)) for _ in kinds]
        views = [backend.kernels.device.view(backend.put(values), kind) for kind, values in kinds.items()]
        accumulate(backend.kernels, targets, [fold_of(p, True, [v], [1]) for p, v in enumerate(views)], sums)
        in_passing = totals_of(backend.kernels, sums)
        assert dict(zip(kinds, in_passing, strict=True)) == pytest.approx(
            dict(zip(kinds, exact, strict=True)), rel=1e-6, abs=0
        )
        draw.assert_same_bits(in_passing, measured(backend, *kinds.values()))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("magnitude", [1e-7, 1.0, 3e4])
    @pytest.mark.parametrize("is_odd", [False, True])
    def test_of_short_floats(self, backend, dtype, magnitude, is_odd):
        values = draw.random_array(0, backend.chunk + 512 + is_odd, dtype, magnitude).clip(-60000, 60000)
        exact = draw.exact_norm([values.astype(np.float32)]) ** 2
        totals = {
            float(totals_of(backend.kernels, sums_of(backend, [backend.buffer_at(values, offset)]))[0])
            for offset in OFFSETS
        }
        assert len(totals) == 1
        assert totals.pop() == pytest.approx(exact, rel=1e-6, abs=0)

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
        arrays = [np.zeros(4 * draw.UNIT, np.float32) for _ in range(4 * draw.UNIT)]
        for index, array in enumerate(arrays):
            array[index] = value
        expected = float(np.float32(value)) ** 2
        if math.isfinite(value):
            assert measured(backend, *arrays).tolist() == [expected] * len(arrays)
        else:
            assert not np.isfinite(measured(backend, *arrays)).any()

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
        values = draw.random_array([5, size], size)
        mean_square = np.mean(np.square(values, dtype=np.float64))
        values *= np.float32(math.sqrt(factor * 2.0**-100 / mean_square))
        rows = values[: size - size % draw.ROW].reshape(-1, draw.ROW)
        tail = values[size - size % draw.ROW :]
        in_fp32 = float(np.add.reduce(np.vecdot(rows, rows), dtype=np.float64)) + float(np.vecdot(tail, tail))
        wide = values.astype(np.float64)
        in_fp64 = float(np.add.reduce(wide * wide))
        assert in_fp32 != in_fp64
        assert squared_sum(values) == (in_fp32 if factor > 1 else in_fp64)

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

    @pytest.mark.parametrize("factor", [0.999, 1.001])
    def test_a_chunk_is_summed_in_fp32_or_fp64_whatever_else_is_measured(self, factor):
        kernels, values = HostKernels(1), draw.random_array(5, 5 * draw.ROW + 3)
        values *= np.float32(math.sqrt(factor * 2.0**-100 / np.mean(np.square(values, dtype=np.float64))))
        others = [np.ones(size, np.float32) for size in (1, CHUNK)]
        arena = kernels.arena([kernels.device.view(array, "w") for array in (others[0], values, others[1])])
        for positions in ([1], [0, 1], [2, 1], [0, 1, 2]):
            kernels.measure(arena, positions)
            assert kernels.totals(arena)[1] == squared_sum(values), positions

    def test_measured_in_the_fold_is_measured_apart(self, backend):
        size = backend.chunk + 700
        target, source = draw.random_array(0, size), draw.random_array(1, size, "bfloat16")
        sums = backend.kernels.partial_sums([size])
        folded = accumulated(backend, target, [source], [0.7], False, sums)
        draw.assert_same_bits(totals_of(backend.kernels, sums), measured(backend, folded))

    def test_only_the_targets_asked_for(self, backend):
        sums = backend.kernels.partial_sums([2 * backend.chunk + 1, 5, 0])
        buffers = [backend.buffer(np.ones(size, np.float32)) for size in sums.sizes]
        measure_chunks(backend.kernels, buffers, sums, sums.chunks([1, 2]))
        totals = totals_of(backend.kernels, sums)
        assert np.isnan(totals[0])  # unmeasured is not finite
        assert totals[1:].tolist() == [5, 0]

    @pytest.mark.parametrize("sizes", [(), (5,), (5, 7), (7, 5), (5, 7, 1)])
    def test_an_arena_has_those_of_its_own_targets(self, backend, sizes):
        """Its kernels cut each target by the sizes that they were made for, and would lose the rest without a word."""
        targets = tuple(backend.buffer(np.ones(size, np.float32)) for size in (5, 8))
        message = (
            r"an arena has the partial sums of other targets: got \(.*\), expected \(5, 8\), its targets' elements"
        )
        with pytest.raises(LayoutMismatch, match=message):
            Arena(targets, backend.kernels.partial_sums(sizes))

    def test_the_host_measures_only_the_chunks_asked_for(self):
        kernels, sums = HostKernels(1), sums_on_host([2 * CHUNK + 1, 5])
        buffers = [kernels.device.view(np.ones(size, np.float32), "w") for size in sums.sizes]
        measure_chunks(kernels, buffers, sums, [sums.chunks([0])[2]])
        assert sums.values[2] == 1
        assert np.isnan(np.delete(sums.values, 2)).all()
        assert np.isnan(totals_of(kernels, sums)).all()

    @pytest.mark.parametrize("chosen", [[0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]])
    def test_the_chosen_become_zero_and_no_others(self, backend, chosen):
        """Of some targets of several chunks, whatever they held; another is not among them."""
        sizes, positions = (2 * backend.chunk + 9, 0, 7, 3, backend.chunk, 5), [4, 0, 2, 1, 5]
        buffers = [backend.buffer(np.full(size, NAN, np.float32)) for size in sizes]
        arena, chosen = backend.kernels.arena(buffers), np.array(chosen, bool)
        backend.kernels.measure(arena)
        backend.kernels.zero(arena, SlotSet(positions), chosen)
        zeroed = set(np.array(positions)[chosen].tolist())
        totals = backend.kernels.totals(arena)
        for position, buffer in enumerate(buffers):
            bits = draw.storage_bits(backend.get(buffer))
            assert (bits == 0 if position in zeroed else bits == 0x7FC00000).all()
            assert (totals[position] == 0) == (position in zeroed or not sizes[position])

    def test_zeroed_without_being_measured(self, backend):
        sums = backend.kernels.partial_sums([5, 2 * backend.chunk + 1, 0, 3])
        buffers = [backend.buffer(np.full(size, 1 if size == 5 else NAN, np.float32)) for size in sums.sizes]
        measure_chunks(backend.kernels, buffers, sums, sums.chunks([0, 3]))
        zero_sums(backend.kernels, sums, [1, 2])
        totals = totals_of(backend.kernels, sums)
        assert totals[:3].tolist() == [5, 0, 0]
        assert np.isnan(totals[3])
        zero_sums(backend.kernels, sums, [3])
        assert totals_of(backend.kernels, sums).tolist() == [5, 0, 0, 0]

    @given(st.lists(st.sampled_from([0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]), max_size=5))
    def test_chunks_partition_each_target(self, sizes):
        sums = sums_on_host(sizes)
        chunks = [sums.chunks([p]) for p in range(len(sizes))]
        assert [index for target in chunks for _, index, _, _ in target] == list(range(sums.values.size))
        for size, target in zip(sizes, chunks, strict=True):
            limits = [0, *(stop for *_, stop in target)]
            assert [start for _, _, start, _ in target] == limits[:-1]
            assert limits[-1] == size
            assert all(0 < stop - start <= CHUNK for _, _, start, stop in target)

    def test_of_no_targets(self, backend):
        assert totals_of(backend.kernels, backend.kernels.partial_sums([])).tolist() == []
        assert totals_of(backend.kernels, backend.kernels.partial_sums([0, 0])).tolist() == [0, 0]


def finalised(backend, arrays, plan, divisor=1.0, *, zero_if_bad=False, look=True):
    """K2 on arrays as they are."""
    buffers = [backend.buffer(array) for array in arrays]
    sums = sums_of(backend, buffers)
    decision = finalise(backend.kernels, buffers if look else None, sums, plan, divisor, zero_if_bad=zero_if_bad)
    totals_of(backend.kernels, sums)  # waits: the sums are dropped here
    return decision


def one_group(arrays, max_norm=INF):
    return ClipPlan((0,) * len(arrays), (max_norm,))


class TestTally:
    """What workers told each other, added up; what is wrong is in the payload of a NaN, where the divisor would be."""

    FIELDS = np.dtype([("numbers", "<f8", 3), ("step", "<u8"), ("settings", "<u8"), ("flags", "<u8")])

    def tallied(self, device, rows):
        told, sums = np.zeros(len(rows), self.FIELDS), device.put(np.zeros(3))
        for row, (numbers, *facts) in zip(told, rows, strict=True):
            row["numbers"], row["step"], row["settings"], row["flags"] = numbers, *facts, -1 % 2**64
        there = device.put(told.view(np.int64))  # which is read later
        device.kernels.tally(there, len(rows), sums)
        return on_host(sums)

    def payload(self, number):
        assert math.isnan(number)
        return int(number.view(np.uint64)) - 0x7FF8 * 2**48

    def test_numbers_are_added_in_rank_order(self, device):
        rows = [((1e16, 1.0, 4), 7, 2**63 + 5), ((1.0, 0.1, 0), 7, 2**63 + 5), ((1.0, 0.2, 2), 7, 2**63 + 5)]
        assert self.tallied(device, rows).tolist() == [1e16 + 1.0 + 1.0, 1.0 + 0.1 + 0.2, 6]
        assert self.tallied(device, rows[2:]).tolist() == [1.0, 0.2, 2]

    @pytest.mark.parametrize(
        ("rows", "fault"),
        [
            ([(0, 0), (0, 0), (1, 0), (2, 0)], 1 + 4 * 2),
            ([(0, 0), (0, 2**63), (1, 0)], 2 + 4 * 1),
            ([(2**63, 5)] * 69 + [(1, 5)], 1 + 4 * 69),
        ],
    )
    def test_who_is_in_another_step_or_has_other_settings_is_told(self, device, rows, fault):
        sums = self.tallied(device, [((1.0, 2.0, 1), *row) for row in rows])
        assert self.payload(sums[0]) == fault
        assert sums[1:].tolist() == [2.0 * len(rows), len(rows)]

    def test_no_micro_batch_at_all_is_told_and_what_is_no_weight_has_nothing_to_tell(self, device):
        assert self.payload(self.tallied(device, [((1.0, 0.0, 0), 3, 3)] * 2)[0]) == 3
        nan = np.uint64(0x7FFFFFFFFFFFFFFF).view(np.float64)
        assert self.payload(self.tallied(device, [((1.0, 1.0, 1), 3, 3), ((nan, nan, 1), 3, 3)])[0]) == 0


class TestFinalise:
    """Norms, scales and factors; they may lie on the device, where numbers are read one by one."""

    GROUPS, BLOCKS = (0, 1, 0, 2, 1, 0), (None, 0, 0, 1, None, 1)
    PLAN = ClipPlan(GROUPS, (1.0, 1e6, INF), BLOCKS)

    @staticmethod
    def arrays(backend, magnitude=1.0):
        sizes = (5, backend.chunk + 3, 0, 40 * 2048 + 1, 1, 129)
        return [draw.random_array([3, i], size, magnitude=magnitude) for i, size in enumerate(sizes)]

    @pytest.mark.parametrize("magnitude", [1.0, 1e30, 1e-30, 1e-40])
    def test_norms_are_within_one_millionth(self, backend, magnitude):
        arrays = self.arrays(backend, magnitude)
        decision = finalised(backend, arrays, self.PLAN, 3.0)

        def exact(labels, label):
            return draw.exact_norm([array for array, mine in zip(arrays, labels, strict=True) if mine == label]) / 3

        assert number_of(decision.norm) == pytest.approx(draw.exact_norm(arrays) / 3, rel=1e-6, abs=0)
        for found, labels, count in ((decision.group_norms, self.GROUPS, 3), (decision.block_norms, self.BLOCKS, 2)):
            expected = [exact(labels, label) for label in range(count)]
            assert numbers(found) == pytest.approx(expected, rel=1e-6, abs=0)
        expected = [draw.exact_norm([array]) / 3 for array in arrays]
        assert numbers(decision.component_norms) == pytest.approx(expected, rel=1e-6, abs=0)

    @pytest.mark.parametrize("divisor", [3.0, 7.0, 10.0, 0.3])
    def test_the_factor_is_rounded_once(self, backend, divisor):
        """Two hundred groups of norm 1, so that a scale or divisor that is rounded before it shows in one of them."""
        arrays = [np.full(1, divisor, np.float32)] * 200
        plan = ClipPlan(tuple(range(200)), tuple(np.linspace(0.1, 0.9, 200).tolist()))
        decision = finalised(backend, arrays, plan, divisor)
        scales, factors = numbers(decision.scales), numbers(decision.factors)
        assert factors == [float(np.float32(scale / divisor)) for scale in scales]
        assert factors != [float(np.float32(scale) / np.float32(divisor)) for scale in scales]
        assert factors != [float(np.float32(scale * float(np.float32(1 / divisor)))) for scale in scales]

    @pytest.mark.parametrize("divisor", [3.0, 7.0, 0.3])
    def test_the_inverse_is_rounded_once(self, backend, divisor):
        """And is not the inverse of what was rounded already."""
        array, of_factor = np.full(1, divisor, np.float32), []
        sums = sums_of(backend, [backend.buffer(array)])
        for bound in np.linspace(0.1, 0.9, 20).tolist():
            decision = finalise(backend.kernels, None, sums, one_group([array], bound), divisor, zero_if_bad=False)
            (scale,) = numbers(decision.scales)
            assert number_of(decision.inverse) == np.float32(divisor / scale)
            of_factor.append(
                float(np.float32(1) / np.float32(number_of(decision.factor))) == number_of(decision.inverse)
            )
        assert not all(of_factor)

    @pytest.mark.parametrize(("below", "factor"), [(1.0, 2.0**-126), (0.999999, 0.0), (0.7, 0.0), (2.0**-30, 0.0)])
    @pytest.mark.parametrize("divisor", [2.0**-20, 1.0, 3.0, 2.0**60])
    def test_a_factor_is_normal_or_zero(self, backend, divisor, below, factor):
        array = np.full(1, 2.0**60, np.float32)
        plan = one_group([array], below * 2.0**-66)
        decision = finalised(backend, [array], plan, divisor)
        assert [number_of(decision.factor), number_of(decision.inverse)] == [factor, 1 / factor if factor else INF]
        assert numbers(decision.scales) == list(decide(measured(backend, array), plan, divisor).scales)

    @pytest.mark.parametrize("max_norm", [0.0, 1.0, INF])
    def test_a_norm_of_zero_has_scale_one_whatever_its_bound(self, backend, max_norm):
        arrays = [np.zeros(9, np.float32), np.ones(1, np.float32)]
        decision = finalised(backend, arrays, ClipPlan((0, 1), (max_norm, 0.0)), 4.0)
        assert numbers(decision.scales) == [1, 0]
        assert numbers(decision.factors) == [0.25, 0]
        assert [number_of(decision.inverse), number_of(decision.scale)] == [4, 0]

    @pytest.mark.parametrize("divisor", [1.0, 7.0, 2.0**-20])
    def test_scales_and_factors_follow_from_the_norms(self, backend, divisor):
        """The factor is taken in fp64 and rounded once."""
        decision = finalised(backend, self.arrays(backend), self.PLAN, divisor)
        norms, scales = numbers(decision.group_norms), numbers(decision.scales)
        assert scales == [clip_scale(norm, bound) for norm, bound in zip(norms, self.PLAN.max_norms, strict=True)]
        assert numbers(decision.factors) == [float(np.float32(scale / divisor)) for scale in scales]
        assert number_of(decision.scale) == pytest.approx(min(scales), rel=1e-7)
        assert number_of(decision.factor) == numbers(decision.factors)[0]
        assert not number_of(decision.skipped)

    def test_as_it_is_decided_on_the_host(self, backend):
        arrays = self.arrays(backend)
        decision = finalised(backend, arrays, self.PLAN, 3.0)
        expected = decide(measured(backend, *arrays), self.PLAN, 3.0)
        for name in ("group_norms", "block_norms", "component_norms", "scales", "factors"):
            assert numbers(getattr(decision, name)) == pytest.approx(numbers(getattr(expected, name)), rel=1e-13)
        assert number_of(decision.norm) == pytest.approx(expected.norm, rel=1e-14)

    def test_many_components_in_few_groups(self, backend):
        """More components than warps, and groups of more than a warp's 32 lanes."""
        arrays = [np.full(1 + i % 3, i, np.float32) for i in range(205)]
        plan = ClipPlan(tuple(i % 3 == 0 for i in range(205)), (50.0, 1e9), (None, *range(204)))
        decision = finalised(backend, arrays, plan)
        squares = [array.size * float(array[0]) ** 2 for array in arrays]
        assert number_of(decision.norm) == pytest.approx(math.sqrt(sum(squares)), rel=1e-14)
        groups = [math.sqrt(sum(s for s, mine in zip(squares, plan.groups, strict=True) if mine == g)) for g in (0, 1)]
        assert numbers(decision.group_norms) == pytest.approx(groups, rel=1e-14)
        assert numbers(decision.component_norms) == pytest.approx([math.sqrt(s) for s in squares], rel=1e-14)
        assert numbers(decision.block_norms) == pytest.approx([math.sqrt(s) for s in squares[1:]], rel=1e-14)
        assert numbers(decision.scales) == pytest.approx([50 / groups[0], 1], rel=1e-14)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_one_bad_group_clips_no_other(self, backend, bad):
        arrays = [np.full(4, 2, np.float32), np.array([1, bad], np.float32), np.full(1, 3, np.float32)]
        plan = ClipPlan((0, 1, 1), (1.0, 1.0), (0, 1, None))
        for zero_if_bad in (False, True):
            decision = finalised(backend, arrays, plan, zero_if_bad=zero_if_bad)
            assert not math.isfinite(number_of(decision.norm))
            assert number_of(decision.group_norms[0]) == 4
            assert not math.isfinite(number_of(decision.group_norms[1]))
            assert numbers(decision.scales) == [0.25, 1]
            assert bool(number_of(decision.skipped)) is zero_if_bad

    def test_what_nobody_measured_can_never_pass(self, backend):
        sums = backend.kernels.partial_sums([3, 3])
        measure_chunks(backend.kernels, [backend.buffer(np.ones(3, np.float32))] * 2, sums, sums.chunks([0]))
        decision = finalise(backend.kernels, None, sums, ClipPlan((0, 0), (1.0,)), 1.0, zero_if_bad=True)
        assert math.isnan(number_of(decision.norm))
        assert number_of(decision.skipped)
        assert number_of(decision.component_norms[0]) == pytest.approx(math.sqrt(3))

    @pytest.mark.parametrize("arrays", [[], [np.empty(0, np.float32)] * 2, [np.zeros(9, np.float32)]])
    def test_nothing_has_norm_zero(self, backend, arrays):
        decision = finalised(backend, arrays, one_group(arrays, 1.0), 4.0, zero_if_bad=True)
        assert [number_of(decision.norm), number_of(decision.scale), number_of(decision.factor)] == [0, 1, 0.25]
        assert not number_of(decision.skipped)

    @pytest.mark.parametrize("max_norm", [0.0, 5.0, math.nextafter(5.0, 0), INF])
    def test_bounds_at_their_limits(self, backend, max_norm):
        decision = finalised(backend, [np.array([3, 4], np.float32)], ClipPlan((0,), (max_norm,)))
        assert numbers(decision.scales) == [min(1.0, max_norm / 5)]

    def test_its_arrays_are_those_of_the_last_call(self, backend):
        """The same sums and plan: on a device the decision is written anew where it lay."""
        sums, plan = backend.kernels.partial_sums([1]), ClipPlan((0,), (1.0,))
        targets = [backend.kernels.device.allocate(1)]
        for value in (4, 2, 8):
            fold = fold_of(0, True, [backend.buffer(np.full(1, value, np.float32))], [1])
            accumulate(backend.kernels, targets, [fold], sums)
            decision = finalise(backend.kernels, targets, sums, plan, 1.0, zero_if_bad=False)
            assert (number_of(decision.norm), number_of(decision.factor)) == (value, 1 / value)

    def test_plans_are_forgotten_in_turn_and_made_again(self, device):
        """A schedule of several bounds makes a plan a step; decisions that are kept go on."""
        sums = sums_of(device, [device.buffer(np.full(1, 4, np.float32))] * 2)
        plans = [ClipPlan((0, 1), (1.0 + i, 2.0)) for i in range(20)]
        for plan in [*plans, plans[0]]:
            decision = finalise(device.kernels, None, sums, plan, 1.0, zero_if_bad=False)
            assert numbers(decision.scales) == [min(1, plan.max_norms[0] / 4), 0.5]
        assert len(sums.decisions) <= 8


class TestVerdict:
    """What a device finds out for itself, and remembers."""

    @staticmethod
    def verdict(device, arrays, **options):
        return status_of(finalised(device, arrays, one_group(arrays, 1.0), **options))

    @given(
        sizes=st.lists(st.sampled_from([0, 1, 9, 33, 2049, 5000]), min_size=1, max_size=4),
        places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4999)), max_size=5),
        bad=st.sampled_from([NAN, INF, -INF]),
    )
    def test_the_first_bad_component_and_element_and_how_many(self, device, sizes, places, bad):
        arrays = [np.ones(size, np.float32) for size in sizes]
        for p, index in places:
            if p < len(arrays) and arrays[p].size:
                arrays[p][index % arrays[p].size] = bad
        found = self.verdict(device, arrays, zero_if_bad=True)
        wrong = [np.flatnonzero(~np.isfinite(array)) for array in arrays]
        assert found.is_bad == found.skipped == any(w.size for w in wrong)
        if found.is_bad:
            first = next(p for p, w in enumerate(wrong) if w.size)
            assert (found.bad_component, found.bad_index) == (first, wrong[first][0])
            assert found.bad_value == bad or math.isnan(found.bad_value) == math.isnan(bad)
        assert found.non_finite == sum(w.size for w in wrong)

    def test_among_more_chunks_than_the_block_has_threads(self, device):
        """Each thread looks at several chunks' counts; the last chunk is the one."""
        values = np.ones(600 * device.chunk, np.float32)
        values[599 * device.chunk + 1000 :] = INF
        found = self.verdict(device, [np.ones(3, np.float32), values])
        assert (found.bad_component, found.bad_index, found.bad_value) == (1, 599 * device.chunk + 1000, INF)
        assert found.non_finite == device.chunk - 1000

    def test_in_the_last_of_many_components(self, device):
        arrays = [np.ones(1, np.float32) for _ in range(100)]
        arrays[71][0] = arrays[99][0] = NAN
        found = self.verdict(device, arrays)
        assert (found.bad_component, found.bad_index, found.non_finite) == (71, 0, 2)

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_in_memory_of_any_dtype(self, device, dtype):
        values = np.ones(100, draw.DTYPES[dtype])
        values[77:] = -INF
        found = self.verdict(device, [values])
        assert (found.bad_index, found.bad_value, found.non_finite) == (77, -INF, 23)

    def test_numbers_of_one_step(self, device):
        found = self.verdict(device, [np.full(4, 6, np.float32)], divisor=3.0)
        assert (found.step, found.norm, found.scale, found.skipped) == (1, 4.0, 0.25, False)
        assert found.factor == np.float32(0.25 / 3)
        assert (found.bad_steps, found.bad_step, found.non_finite, found.is_bad) == (0, 0, 0, False)

    def test_where_it_may_not_look(self, device):
        found = self.verdict(device, [np.ones(2, np.float32), np.full(3, NAN, np.float32)], look=False)
        assert (found.bad_component, found.bad_index, found.bad_value, found.non_finite) == (1, -1, 0.0, 3)

    def test_the_last_blame_stays_until_there_is_another(self, device):
        kernels, plan = device.kernels, ClipPlan((0, 0), (1.0,))
        targets, sums = [kernels.device.allocate(3), kernels.device.allocate(3)], kernels.partial_sums([3, 3])
        steps = ([1, 1], [1, NAN], [1, 1], [INF, NAN], [1, 1])
        blamed = [(0, 0, 0), (1, 2, 3), (1, 2, 3), (2, 4, 6), (2, 4, 6)]
        for step, (values, blame) in enumerate(zip(steps, blamed, strict=True), 1):
            views = [device.buffer(np.full(3, value, np.float32)) for value in values]
            accumulate(kernels, targets, [fold_of(p, True, [view], [1]) for p, view in enumerate(views)], sums)
            found = status_of(finalise(kernels, targets, sums, plan, 1.0, zero_if_bad=True))
            assert found.step == step
            assert (found.bad_steps, found.bad_step, found.non_finite) == blame
            assert found.skipped == found.is_bad == (step in {2, 4})
        assert (found.bad_component, found.bad_index, found.bad_value) == (0, 0, INF)

    def test_of_the_step_that_is_named_or_the_one_after_the_last(self, device):
        """A step that was run again has its number again; a graph that is replayed counts by itself."""
        sums, plan = sums_of(device, [device.buffer(np.full(1, INF, np.float32))]), ClipPlan((0,), (1.0,))
        found = []
        for step in (1, 2, 2, 0, 0, 40, 0):
            decision = finalise(device.kernels, None, sums, plan, 1.0, zero_if_bad=True, step=step)
            found.append(status_of(decision))
        assert [verdict.step for verdict in found] == [1, 2, 2, 3, 4, 40, 41]
        assert [verdict.bad_step for verdict in found] == [1, 2, 2, 3, 4, 40, 41]
        assert [verdict.bad_steps for verdict in found] == [1, 2, 2, 3, 4, 5, 6]

    @pytest.mark.parametrize("is_ours", [True, False])
    def test_other_targets_with_the_same_sums_and_plan(self, device, is_ours):
        """What was made for the first is not looked into, nor scaled, for the second."""
        sums, plan, kept = device.kernels.partial_sums([9]), ClipPlan((0,), (INF,)), []
        for index in (3, 7):
            array = np.full(9, 4, np.float32)
            array[index] = INF
            kept.append((device.buffer(array),))
            measure_chunks(device.kernels, kept[-1], sums, sums.chunks([0]))
            decision = finalise(device.kernels, kept[-1], sums, plan, 2.0, zero_if_bad=False)
            assert status_of(decision).bad_index == index
            device.kernels.hand_back(arena_of(device.kernels, kept[-1], sums, is_ours=is_ours), decision, plan)
        for (buffer,), index in zip(kept, (3, 7), strict=True):
            assert device.get(buffer).tolist() == [2 if i != index else INF for i in range(9)]

    def test_nobody_measured_it(self, device):
        sums = device.kernels.partial_sums([3])
        decision = finalise(device.kernels, None, sums, ClipPlan((0,), (1.0,)), 1.0, zero_if_bad=False)
        found = status_of(decision)
        assert found.is_bad
        assert not found.skipped
        assert (found.bad_component, found.bad_index, found.non_finite) == (0, -1, 0)


def interesting_floats():
    """Each sign, exponent and upper fraction of fp32, with lower bits that lie on, beside and between ties."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((ALL_16_BITS.astype(np.uint32) << 16)[:, None] + low).reshape(-1).view(np.float32)


def float16_floats():
    """fp32 on and beside every fp16 number and every tie between two, and beyond both ends."""
    numbers = ALL_16_BITS[:0x7C01].view(np.float16).astype(np.float32)
    ties = (numbers[1:-1] + numbers[:-2]) / 2
    places = np.concatenate([numbers[:-1], ties, np.array([65519.996, 65520, 1e30, 1e-8, 2.0**-25, 3e-8], np.float32)])
    beside = [places, np.nextafter(places, np.float32(INF)), np.nextafter(places, np.float32(-INF))]
    return np.concatenate([sign * values for values in beside for sign in (np.float32(1), np.float32(-1))])


class TestHostThreads:
    """Helpers are for chunks that are large enough, whatever lies beside them, and as many as the elements are for."""

    @staticmethod
    def helpers(monkeypatch, sizes, work):
        used = []

        def shared(do, tasks, helpers, threads):
            used.append(helpers)
            shared_by_threads(do, tasks, helpers, threads)

        monkeypatch.setattr(host, "shared_by_threads", shared)
        kernels = HostKernels(16)
        memory = kernels.device.allocate(sum(sizes))
        memory.data.fill(1)  # zeros are looked at once more
        edges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        work(kernels, kernels.arena([memory.part(*edge) for edge in edges], memory))
        return used[0] if used else 0

    SIZES = (
        ([4 * CHUNK + 1] * 2, 3),  # a last chunk that is small
        ([4 * CHUNK] * 2 + [64] * 2000, 3),
        ([CHUNK] * 24, 11),
        ([10_000] * 218, 0),
        ([CHUNK], 0),
    )

    @pytest.mark.parametrize(("sizes", "expected"), SIZES)
    def test_of_a_fold_and_of_a_measurement(self, monkeypatch, sizes, expected):
        def fold(kernels, arena):
            sources = [kernels.device.view(np.ones(size, np.float32), "w") for size in sizes]
            contribution = Contribution.of(arena.whole, sources)
            kernels.accumulate(arena, FoldPass(arena.whole, np.ones(len(sizes), np.bool_), [contribution], [1]))

        def clip(kernels, arena):
            kernels.measure(Arena(arena.targets, arena.partials))

        for work in (fold, clip, HostKernels.measure):
            assert self.helpers(monkeypatch, sizes, work) == expected, work

    def test_to_be_measured_chunks_must_be_larger_than_to_be_folded(self, monkeypatch):
        sizes = [75_000] * 124
        assert self.helpers(monkeypatch, sizes, HostKernels.measure) == 0
        assert self.helpers(monkeypatch, sizes, lambda k, arena: k.scale(arena.targets, np.float32(2), arena.targets))


class TestScale:
    @pytest.mark.parametrize("source", draw.DTYPES)
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_one_multiplication_and_one_rounding(self, backend, source, dtype):
        limits = ((0, 0), (0, 1), (0, 513), (1, -1), (1, 1), (1, 23))
        for limit, factor in itertools.product(limits, (1, 0.3, 2.0**-20)):
            size = size_of(backend, limit)
            values = draw.random_array(size, size, source)
            draw.assert_same_bits(scaled(backend, values, factor, dtype), draw.scaled(values, factor, dtype))

    @pytest.mark.parametrize("source", draw.DTYPES)
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_from_every_offset_to_every_offset(self, backend, source, dtype):
        for there, here in itertools.product(OFFSETS, OFFSETS):
            size = (1, 15, 22, 23, 30, 37, 70, backend.chunk + 5)[(3 * there + here) % 8]
            values = draw.random_array(size, size, source)
            got = scaled(backend, values, 0.3, dtype, (there, here))
            draw.assert_same_bits(got, draw.scaled(values, 0.3, dtype))

    @pytest.mark.parametrize("source", ["bfloat16", "float16"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("factor", [1, 0.3, 2.0**20, 1e-40, 0, NAN])
    def test_many_of_16_bits_are_each_as_it_is_alone(self, source, dtype, factor):
        """Where there are many the host looks their products up, in a table of all values that there are."""
        kernels = HostKernels(2)
        parts = [*np.split(ALL_16_BITS, 16), np.tile(ALL_16_BITS, 8)[1:]]  # 16 chunks; and 2**19 elements, nearly
        products = [np.full_like(part, 7) for part in parts]

        def scale(numbers):
            sources = [kernels.device.view(parts[i].view(draw.DTYPES[source]), "source") for i in numbers]
            places = [kernels.device.writable_view(products[i].view(draw.DTYPES[dtype]), "place") for i in numbers]
            kernels.scale(sources, np.float32(factor), places)

        for number in range(16):
            scale([number])
        alone = np.concatenate(products[:16])
        scale(range(17))
        assert np.array_equal(np.concatenate(products[:16]), alone)
        assert np.array_equal(products[16], np.tile(alone, 8)[1:])

    @pytest.mark.parametrize("limit", draw.LIMITS)
    def test_every_size(self, backend, limit):
        values = draw.random_array(1, size_of(backend, limit))
        for offset in (0, 1, 7):
            got = scaled(backend, values, 0.3, "bfloat16", (2, offset))
            draw.assert_same_bits(got, draw.scaled(values, 0.3, "bfloat16"))

    @pytest.mark.parametrize("factor", [1, 0.75])
    def test_bfloat16_rounds_to_nearest_even(self, backend, factor):
        values = interesting_floats()
        got = scaled(backend, values, factor, "bfloat16")
        draw.assert_same_values(got, draw.scaled(values, factor, "bfloat16"))

    @pytest.mark.parametrize("factor", [1, 0.5])
    def test_float16_rounds_to_nearest_even_and_overflows_to_infinity(self, backend, factor):
        values = float16_floats()
        draw.assert_same_bits(scaled(backend, values, factor, "float16"), draw.scaled(values, factor, "float16"))

    def test_float16_by_known_values(self, backend):
        values = np.array([65504, 65519.996, 65520, -65520, 1e30, 2049, 2051, 6e-8, 2.9e-8, 3e-8, -0.0], np.float32)
        expected = [65504, 65504, INF, -INF, INF, 2048, 2052, 6e-8, 0, 6e-8, -0.0]
        draw.assert_same_bits(scaled(backend, values, 1, "float16"), np.array(expected, np.float16))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_subnormals_are_kept(self, backend, dtype):
        """What comes in, the product and what goes out may each be subnormal; none is flushed to zero."""
        values = np.tile(np.array([1e-45, -3e-40, 1.2e-38, 2.4e-38, 3e-5, 6e-8, -0.0], np.float32), 5)
        for factor in (1, 0.5, 0.3, 1e-3, 1e-40):
            got = scaled(backend, values, factor, dtype)
            draw.assert_same_bits(got, draw.scaled(values, factor, dtype))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("factor", [1, 0.5, 0])
    def test_nan_stays_nan(self, backend, dtype, factor):
        quiet_and_signalling = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)
        got = scaled(backend, np.tile(quiet_and_signalling, 9), factor, dtype)
        assert np.isnan(got.astype(np.float32)).all()

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_factor_one_in_place_writes_nothing(self, backend, dtype):
        """A signalling NaN does not survive a multiplication, so its bits show whether there was one."""
        values = signalling(dtype, backend.chunk + 5)
        buffer = backend.buffer(values)
        backend.kernels.scale([buffer], np.float32(1), [buffer])
        draw.assert_same_bits(backend.get(buffer), values)
        backend.kernels.scale([buffer], np.float32(0.5), [buffer])
        assert (draw.storage_bits(backend.get(buffer)) != draw.storage_bits(values)).all()

    def test_factor_one_in_place_may_be_read_only(self):
        kernels, array = HostKernels(1), np.ones(5, np.float32)
        array.flags.writeable = False
        buffer = kernels.device.view(array, "w")
        kernels.scale([buffer], np.float32(1), [buffer])

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("offset", OFFSETS)
    def test_in_place_with_neighbours(self, backend, dtype, offset):
        """Tensors that touch, as in a framework's flat buffer: each thread block keeps to its own."""
        sizes = (1, 30, backend.chunk + 77, 15, 2, 23, 64)
        arrays = [draw.random_array(i, size, dtype) for i, size in enumerate(sizes)]
        whole, parts = backend.buffers_in_one(arrays, offset)
        chosen = [0, 1, 2, 4, 6]
        backend.kernels.scale([parts[i] for i in chosen], np.float32(0.3), [parts[i] for i in chosen])
        arrays = [draw.scaled(array, 0.3, dtype) if i in chosen else array for i, array in enumerate(arrays)]
        draw.assert_same_bits(backend.get(whole)[offset:], np.concatenate(arrays))

    def test_more_tensors_than_a_launch_has_arguments_for(self, backend):
        source, destination = draw.random_array(0, 5 * 4001), np.full(5 * 4001, 7, np.float16)
        whole, there = backend.buffer(destination), backend.buffer(source)
        parts = [(5 * p, 5 * p + 1 + p % 4) for p in range(4001)]
        backend.kernels.scale([there.part(*p) for p in parts], np.float32(0.3), [whole.part(*p) for p in parts])
        expected = draw.scaled(source, 0.3, "float16")
        expected[[i for p, (_, stop) in enumerate(parts) for i in range(stop, 5 * p + 5)]] = 7
        draw.assert_same_bits(backend.get(whole), expected)


def signalling(dtype, size):
    bits = {"float32": 0x7F800001, "float16": 0x7C01, "bfloat16": 0xFF81}[dtype]
    return np.full(size, bits, f"u{draw.DTYPES[dtype].itemsize}").view(draw.DTYPES[dtype])


class TestHandBack:
    GROUPS = (0, 1, 0, 2, 1)
    PLAN = ClipPlan(GROUPS, (1.0, 1e9, 0.5))

    @staticmethod
    def arrays(backend):
        sizes = (5, 0, backend.chunk + 2, 33, 70)
        return [draw.random_array([5, i], size) for i, size in enumerate(sizes)]

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_each_group_has_its_own_factor(self, backend, dtype):
        arrays = self.arrays(backend)
        buffers = [backend.buffer(array) for array in arrays]
        sums = sums_of(backend, buffers)
        decision = finalise(backend.kernels, buffers, sums, self.PLAN, 3.0, zero_if_bad=True)
        factors = numbers(decision.factors)
        assert len(set(factors)) == 3
        there = [backend.buffer_at(np.full(array.size, 7, draw.DTYPES[dtype]), 3) for array in arrays]
        hand_back(backend.kernels, buffers, decision, self.GROUPS, there)
        for buffer, array, group in zip(there, arrays, self.GROUPS, strict=True):
            draw.assert_same_bits(backend.get(buffer), draw.scaled(array, factors[group], dtype))
        hand_back(backend.kernels, buffers, decision, self.GROUPS, buffers)
        for buffer, array, group in zip(buffers, arrays, self.GROUPS, strict=True):
            draw.assert_same_bits(backend.get(buffer), draw.scaled(array, factors[group], "float32"))

    def test_only_those_asked_for(self, backend):
        arrays = self.arrays(backend)
        buffers = [backend.buffer(array) for array in arrays]
        sums = sums_of(backend, buffers)
        decision = finalise(backend.kernels, buffers, sums, self.PLAN, 3.0, zero_if_bad=True)
        hand_back(backend.kernels, [buffers[3], buffers[0]], decision, [2, 0], [buffers[3], buffers[0]])
        factors = numbers(decision.factors)
        expected = [factors[0], 1, 1, factors[2], 1]
        for buffer, array, factor in zip(buffers, arrays, expected, strict=True):
            draw.assert_same_bits(backend.get(buffer), draw.scaled(array, factor, "float32"))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_a_skipped_step_hands_back_zeros(self, backend, dtype):
        """Also where the factor is 1 and the destination is the source: NaN times anything is NaN."""
        arrays = [np.ones(33, draw.DTYPES[dtype]), np.full(backend.chunk + 5, NAN, draw.DTYPES[dtype])]
        buffers = [backend.buffer_at(array, 3) for array in arrays]
        sums = sums_of(backend, buffers)
        there = [backend.buffer_at(np.full(array.size, NAN, np.float16), 5) for array in arrays]
        decision = finalise(backend.kernels, buffers, sums, ClipPlan((0, 0), (INF,)), 1.0, zero_if_bad=True)
        hand_back(backend.kernels, buffers, decision, [0, 0], there)
        hand_back(backend.kernels, buffers, decision, [0, 0], buffers)
        for buffer in (*there, *buffers):
            assert (draw.storage_bits(backend.get(buffer)) == 0).all()

    def test_a_bad_step_that_is_not_skipped_hands_on_what_came(self, backend):
        arrays = [np.array([1, NAN, -INF], np.float32), np.full(40, 8, np.float32)]
        buffers = [backend.buffer(array) for array in arrays]
        plan, sums = ClipPlan((0, 0), (1.0,)), sums_of(backend, buffers)
        decision = finalise(backend.kernels, buffers, sums, plan, 4.0, zero_if_bad=False)
        hand_back(backend.kernels, buffers, decision, plan.groups, buffers)
        for buffer, array in zip(buffers, arrays, strict=True):
            draw.assert_same_values(backend.get(buffer), draw.scaled(array, 0.25, "float32"))

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_factor_one_in_place_writes_nothing(self, backend, dtype):
        values = signalling(dtype, backend.chunk + 5)
        buffer = backend.buffer_at(values, 1)
        sums = sums_of(backend, [buffer])
        decision = finalise(backend.kernels, None, sums, ClipPlan((0,), (1.0,)), 1.0, zero_if_bad=False)
        hand_back(backend.kernels, [buffer], decision, [0], [buffer])
        draw.assert_same_bits(backend.get(buffer), values)

    def test_a_decision_that_the_host_took(self, backend):
        arrays = self.arrays(backend)
        buffers = [backend.buffer(array) for array in arrays]
        decision = decide(measured(backend, *arrays), self.PLAN, 3.0)
        hand_back(backend.kernels, buffers, decision, self.GROUPS, buffers)
        for buffer, array, group in zip(buffers, arrays, self.GROUPS, strict=True):
            draw.assert_same_bits(backend.get(buffer), draw.scaled(array, decision.factors[group], "float32"))
        skipping = Decision(NAN, (), (), (), (), (), NAN, skipped=True, bad=(0,))
        hand_back(backend.kernels, buffers, skipping, self.GROUPS, buffers)
        assert all((draw.storage_bits(backend.get(buffer)) == 0).all() for buffer in buffers)

    def test_each_factor_of_the_host_is_looked_for_once(self, emulated, monkeypatch):
        scaled = []
        monkeypatch.setattr(type(emulated.kernels), "scale", lambda self, *arguments: scaled.append(arguments))

        def work_of(size):
            decision = Decision(1.0, (), (), (), (), tuple(map(np.float32, range(size))), 1.0, skipped=False, bad=())
            buffers, groups = [emulated.kernels.device.allocate(1)] * size, list(range(size))
            return lambda: hand_back(emulated.kernels, buffers, decision, groups, buffers)

        assert growth(work_of, 40) < 2.2
        assert max(factor for _, factor, _ in scaled) == 79


class TestWhereabouts:
    @pytest.mark.parametrize(
        ("now", "columns", "moved"),
        [
            ([1, 2, 3], [0, 1, 2], None),
            ([1, 2, 9], [0, 1, 2], 2),
            ([1, 9, None], [0, 1, 2], 1),
            ([9, 2, 3], [1, 2], None),
            ([9, 2, 9], [2, 1], 2),
            ([9, 9, 9], [], None),
        ],
    )
    def test_the_first_asked_for_that_lies_elsewhere(self, now, columns, moved):
        arrays = ["a", "b", "c"]
        where = dict(zip(arrays, now, strict=True))
        address_check = AddressCheck(lambda asked: [where[array] for array in asked], arrays, [1, 2, 3])
        assert address_check.moved(columns) == moved


class TestFirstNonFinite:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("limit", [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (2, 4)])
    def test_index_and_value(self, backend, dtype, limit):
        index = size_of(backend, limit)
        values = np.ones(2 * backend.chunk + 5, draw.DTYPES[dtype])
        values[index:] = NAN
        values[index] = -INF
        assert backend.kernels.first_non_finite(backend.buffer_at(values, 1)) == (index, -INF)

    @pytest.mark.parametrize("values", [[], [1.0], [3e38, -3e38], [1e-45]])
    def test_none(self, backend, values):
        assert backend.kernels.first_non_finite(backend.buffer(np.array(values, np.float32))) is None

    def test_nan_is_found(self, backend):
        index, value = backend.kernels.first_non_finite(backend.buffer(np.array([1, NAN, INF], np.float32)))
        assert index == 1
        assert math.isnan(value)


class TestMemory:
    @pytest.mark.parametrize("size", [0, 1, 31, 513, CHUNK + 1])
    def test_allocations_are_aligned(self, kernels, size):
        buffers = [kernels.device.allocate(size) for _ in range(5)]
        for buffer in buffers:
            assert (buffer.size, buffer.nbytes, buffer.shape) == (size, 4 * size, (size,))
            assert (buffer.dtype, buffer.writable, buffer.device) == ("float32", True, kernels.device.name)
            assert size == 0 or buffer.pointer % 128 == 0

    def test_zero_is_written_everywhere_and_nowhere_else(self, backend):
        sizes = (0, 3, backend.chunk + 1, 5)
        arrays = [np.full(size, NAN, np.float32) for size in sizes]
        buffers = [backend.buffer(array) for array in arrays]
        _, (odd, beside) = backend.buffers_in_one([np.full(size, NAN, np.float16) for size in (7, 9)], 3)
        backend.kernels.fill_zero([*buffers[:3], odd])
        assert all((draw.storage_bits(backend.get(buffer)) == 0).all() for buffer in (*buffers[:3], odd))
        assert np.isnan(backend.get(buffers[3])).all()
        assert np.isnan(backend.get(beside).view(np.float16)).all()

    @pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1)])
    def test_a_buffer_as_an_array(self, backend, shape):
        buffer = backend.buffer(np.arange(6, dtype=np.float32))
        array = backend.kernels.device.array(buffer, shape)
        assert array.shape == shape
        assert backend.kernels.device.view(array, "w").pointer == buffer.pointer

    def test_nothing_to_do(self, kernels):
        sums = kernels.partial_sums([])
        decision = finalise(kernels, [], sums, ClipPlan((), (1.0,)), 1.0, zero_if_bad=False)
        empty = kernels.device.allocate(0)
        kernels.fill_zero([])
        kernels.fill_zero([empty])
        accumulate(kernels, [], [], sums)
        accumulate(kernels, [empty], [fold_of(0, True, [empty], [1])])
        hand_back(kernels, [], decision, [], [])
        kernels.scale([], np.float32(2), [])
        kernels.scale([empty], np.float32(2), [empty])
        measure_chunks(kernels, [], sums, [])
        zero_sums(kernels, sums, [])


def everything(backend):
    """The bits of a fold, its squared sums and its hand back, over several chunks and dtypes."""
    kernels, chunk = backend.kernels, backend.chunk
    sizes = [3 * chunk + 5, 700, 0, chunk]
    targets, sums = [kernels.device.allocate(size) for size in sizes], kernels.partial_sums(sizes)
    folds = []
    for p, size in enumerate(sizes):
        views = [backend.buffer_at(draw.random_array([p, i], size, d), p + i) for i, d in enumerate(draw.DTYPES)]
        folds.append(fold_of(p, True, views, [1, 0.3, 5]))
    accumulate(kernels, targets, folds, sums)
    totals = totals_of(kernels, sums)
    plan = ClipPlan((0, 0, 1, 1), (1.0, 0.3), (0, 0, None, 1))
    decision = finalise(kernels, targets, sums, plan, 6.3, zero_if_bad=True)
    hand_back(kernels, targets, decision, plan.groups, targets)
    norms = (decision.norm, *decision.group_norms, *decision.block_norms, *decision.component_norms)
    bits = [totals.tobytes(), np.array(numbers((*norms, *decision.factors))).tobytes()]
    return b"".join([*bits, *(backend.get(target).tobytes() for target in targets)])


class TestRunToRun:
    def test_the_same_bits(self, backend):
        assert len({everything(backend) for _ in range(3)}) == 1

    @pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(map(str, order.values())))
    def test_in_every_order_of_threads_and_blocks(self, emulated, order):
        with cuda_emulator.options(order="forward"):
            expected = everything(emulated)
        with cuda_emulator.options(**order):
            assert everything(emulated) == expected
        with cuda_emulator.options(order="forward", block_order=order["order"], seed=7):
            assert everything(emulated) == expected


class TestQueue:
    """What the device is asked for: few launches, no copies, no allocations, and nobody waits."""

    SIZES = (5, 3000, 0, 700)

    def step(self, kernels, targets, views, sums):
        """A window of four micro-batches, and one measured by a pass of its own."""
        accumulate(kernels, targets, [fold_of(p, True, view, [1, 2, 3, 4]) for p, view in enumerate(views)], sums)
        measure_chunks(kernels, targets, sums, sums.chunks(range(len(targets))))
        plan = ClipPlan((0,) * len(targets), (1.0,))
        decision = finalise(kernels, targets, sums, plan, 3.0, zero_if_bad=True)
        hand_back(kernels, targets, decision, plan.groups, [view[0] for view in views])
        hand_back(kernels, targets, decision, plan.groups, targets)

    def test_one_launch_for_each_and_nothing_else_after_the_first(self, emulated):
        kernels = emulated.kernels
        targets, sums = [kernels.device.allocate(size) for size in self.SIZES], kernels.partial_sums(self.SIZES)
        arrays = [[draw.random_array(i, size, "bfloat16") for i in range(4)] for size in self.SIZES]
        views = [[emulated.buffer(array) for array in row] for row in arrays]
        self.step(kernels, targets, views, sums)
        with cuda_emulator.recorded() as record:
            for _ in range(3):
                self.step(kernels, targets, views, sums)
        launches = ["accumulate_4_small", "measure_small", "finalise", "hand_back_small", "hand_back_small"]
        assert record.operations == record.launches == 3 * launches
        assert record.allocations == record.pinned_allocations == record.waits == []

    def test_other_gradients_every_time_cost_no_copy(self, emulated):
        """Addresses travel with the launch: buffers that a framework puts elsewhere each time need no new table."""
        kernels, target, sums = (
            emulated.kernels,
            emulated.kernels.device.allocate(3000),
            emulated.kernels.partial_sums([3000]),
        )
        views = [emulated.buffer(np.ones(3000, np.float32)) for _ in range(4)]
        for view in views:
            with cuda_emulator.recorded() as record:
                accumulate(kernels, [target], [fold_of(0, False, [view], [1])], sums)
                measure_chunks(kernels, [view], sums, sums.chunks([0]))
                kernels.scale([target], np.float32(0.5), [view])
                kernels.scale([view], np.float32(0.5), [view])
            assert len(record.launches) == 4
        assert record.operations == record.launches
        assert record.allocations == []

    @pytest.mark.parametrize(
        ("components", "sources", "expected"),
        [
            (480, 1, ["accumulate_1_small"]),
            (481, 1, ["accumulate_1_large"]),
            (4000, 1, ["accumulate_1_large"]),
            (4001, 1, ["accumulate_1_table"]),
            (120, 4, ["accumulate_4_small"]),
            (121, 2, ["accumulate_4_large"]),
            (1000, 4, ["accumulate_4_large"]),
            (1001, 2, ["accumulate_4_table"]),
            (1001, 5, ["accumulate_4_table"] * 2),
            (3, 5, ["accumulate_4_small"] * 2),
            (3, 9, ["accumulate_4_small"] * 3),
        ],
    )
    def test_launches_of_k1(self, emulated, components, sources, expected):
        """One launch for four micro-batches: 480 addresses in 4 KB of arguments, 4000 in 32 KB, more by a copy."""
        arena, view = emulated.buffer(np.zeros(4 * components, np.float32)), emulated.buffer(np.ones(1, np.float32))
        targets = [arena.part(4 * p, 4 * p + 1) for p in range(components)]
        folds = [fold_of(p, True, [view] * sources, [1] * sources) for p in range(components)]
        with cuda_emulator.recorded() as record:
            accumulate(emulated.kernels, targets, folds)
        assert record.launches == expected
        assert (emulated.get(arena)[::4] == sources).all()

    def test_micro_batches_of_equal_weight_may_be_lacking_in_one_launch(self, emulated):
        targets, view = [emulated.kernels.device.allocate(3) for _ in range(4)], emulated.buffer(np.ones(3, np.float32))
        folds = [fold_of(p, True, [view] * count, [2] * count) for p, count in enumerate((4, 1, 3, 2))]
        with cuda_emulator.recorded() as record:
            accumulate(emulated.kernels, targets, folds)
        assert record.launches == ["accumulate_4_small"]
        assert [emulated.get(target)[2] for target in targets] == [8, 2, 6, 4]

    @pytest.mark.parametrize(("count", "expected"), [(480, "small"), (481, "large"), (4001, "table")])
    def test_launches_of_measure_and_hand_back(self, emulated, count, expected):
        whole = emulated.buffer(np.ones(4 * count, np.float16))
        buffers = [whole.part(4 * p, 4 * p + 1) for p in range(count)]
        sums = emulated.kernels.partial_sums([1] * count)
        with cuda_emulator.recorded() as record:
            measure_chunks(emulated.kernels, buffers, sums, sums.chunks(range(count)))
            emulated.kernels.scale(buffers, np.float32(2), buffers)
        assert record.launches == [f"measure_{expected}", f"hand_back_{expected}"]
        assert totals_of(emulated.kernels, sums).tolist() == [1] * count
        assert (emulated.get(whole)[::4] == emulated.get(whole)[0]).all()

    def test_nothing_is_launched_for_nothing(self, emulated):
        kernels = emulated.kernels
        sums, empty = kernels.partial_sums([0]), kernels.device.allocate(0)
        of_none = kernels.partial_sums([])
        decision = finalise(kernels, [empty], sums, ClipPlan((0,), (1.0,)), 1.0, zero_if_bad=False)
        one = emulated.buffer(np.ones(1, np.float32))
        with cuda_emulator.recorded() as record:
            accumulate(kernels, [], [], of_none)
            accumulate(kernels, [empty], [fold_of(0, True, [empty], [1])], sums)
            measure_chunks(kernels, [empty], sums, sums.chunks([0]))
            hand_back(kernels, [], decision, [], [])
            hand_back(kernels, [empty], decision, [0], [empty])
            kernels.scale([empty], np.float32(2), [empty])
            kernels.scale([one], np.float32(1), [one])
            kernels.fill_zero([empty])
            zero_sums(kernels, sums, [0])
        assert record.operations == []

    def test_what_is_dropped_is_given_out_again_behind_the_work_that_needs_it(self, emulated):
        """The host runs ahead: sums and decisions of earlier calls are gone before the device has used them."""
        plan = ClipPlan((0,), (1.0,))
        buffers = [emulated.buffer(np.full(4, value, np.float32)) for value in range(5)]
        sums = (sums_of(emulated, [buffer]) for buffer in buffers)
        norms = [finalise(emulated.kernels, None, s, plan, 1.0, zero_if_bad=False).norm for s in sums]
        assert numbers(norms) == [0, 2, 4, 6, 8]

    def test_zeros_of_targets_and_of_their_sums_are_one_launch(self, emulated):
        kernels, buffers = emulated.kernels, [emulated.kernels.device.allocate(5) for _ in range(3)]
        arena, slots = kernels.arena(buffers), SlotSet([0, 2])
        kernels.prepare(arena, [slots])
        with cuda_emulator.recorded() as record:
            kernels.fill_zero(buffers)
            kernels.zero(arena, slots, np.array([True, True]))
        assert record.operations == ["fill"] * 3 + ["accumulate_1_small"]


class TestStreams:
    def test_work_goes_to_the_stream_that_is_asked_for(self, device):
        xp, kernels = device.xp, device.kernels
        stream = xp.cuda.Stream(non_blocking=True)
        for asked in (stream, WithProtocol(stream), TorchLike(stream), stream.ptr):
            with kernels.device.on(asked):
                assert xp.cuda.get_current_stream().ptr == stream.ptr
        before = xp.cuda.get_current_stream().ptr
        with kernels.device.on(None):
            assert xp.cuda.get_current_stream().ptr == before

    def test_what_is_no_stream(self, device):
        with pytest.raises(CallerError, match="not a CUDA stream"):
            device.kernels.device.on("stream")
        with pytest.raises(CallerError, match="the CPU has no streams"):
            HostKernels(1).device.on(object())

    def test_recorded_work_is_done_when_its_graph_is_launched(self, device):
        kernels, target = device.kernels, device.buffer(np.zeros(3000, np.float32))
        view, sums = device.buffer(np.ones(3000, np.float32)), device.kernels.partial_sums([3000])
        fold, plan = fold_of(0, False, [view], [1]), ClipPlan((0,), (1.0,))

        def step():
            accumulate(kernels, [target], [fold], sums)
            decision = finalise(kernels, [target], sums, plan, 1.0, zero_if_bad=True)
            hand_back(kernels, [target], decision, [0], [view])
            return decision

        decision = step()
        with kernels.device.graph() as recorded:
            assert kernels.device.is_capturing()
            step()
        assert not kernels.device.is_capturing()
        assert status_of(decision).step == 1
        for _ in range(2):
            with sums.order.use():
                recorded.replay()
        assert status_of(decision).step == 3
        total = np.ones(3000, np.float32)
        for _ in range(2):
            total = total + draw.scaled(total, 1 / np.sqrt(np.sum(total.astype(float) ** 2)), "float32")
        np.testing.assert_allclose(device.get(target), total, rtol=1e-6)

    def test_a_table_first_needed_while_recording_is_there_for_the_graph(self, emulated):
        """It is copied on a stream of its own, which no capture sees."""
        kernels, target = emulated.kernels, emulated.buffer(np.zeros(77, np.float32))
        view = emulated.buffer(np.ones(77, np.float32))
        with kernels.device.graph() as recorded:
            accumulate(kernels, [target], [fold_of(0, False, [view], [3])])
        assert operations_of(recorded.graph) == ["accumulate_1_table"]
        recorded.graph.launch()
        assert (emulated.get(target) == 3).all()

    def test_the_host_records_nothing(self):
        assert HostKernels(1).device.graph() is None


class WithProtocol:
    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return 0, self.stream.ptr


class TorchLike:
    def __init__(self, stream):
        self.cuda_stream = stream.ptr


class TestThreads:
    def test_their_number_changes_no_bit(self):
        expected = everything(host_backend(1))
        for threads in (2, 3, 3, 8):
            assert everything(host_backend(threads)) == expected

    def test_callers_in_several_threads_do_not_disturb_each_other(self):
        backend, outcomes, gate = host_backend(3), [None] * 4, threading.Barrier(4)
        expected = everything(host_backend(1))

        def work(i):
            gate.wait(200)
            outcomes[i] = all(everything(backend) == expected for _ in range(3))

        workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(250)
        assert outcomes == [True] * 4

    @pytest.mark.parametrize("threads", [1, 3])
    def test_a_fault_in_any_thread_reaches_the_caller(self, threads):
        """Whatever goes wrong in a chunk must not be lost with the thread it happened in."""
        kernels = HostKernels(threads)
        read_only = kernels.device.view(np.broadcast_to(np.float32(1), (1,)), "w")
        for position in range(5):
            targets = [kernels.device.allocate(1) for _ in range(5)]
            targets[position] = read_only
            with pytest.raises(ValueError, match="read-only"):
                kernels.fill_zero(targets)

    def test_a_fault_in_a_helper_reaches_the_caller(self):
        me, is_failing = threading.current_thread(), threading.Event()

        def work(_):
            if threading.current_thread() is me:
                assert is_failing.wait(SOON)
            else:
                is_failing.set()
                raise MemoryError("in a helper")

        with pytest.raises(MemoryError, match="in a helper"):
            shared_by_threads(work, range(4), 1, 2)

    def test_callers_that_start_at_once_leave_the_threads_of_one_of_them(self, monkeypatch):
        ended, is_first, start, serve = queue.SimpleQueue(), [True], threading.Thread.start, host_threads._serve

        def another_is_quicker(thread):
            if is_first.pop():
                is_first.append(False)
                host_threads._pool(2)
            start(thread)

        monkeypatch.setattr(host_threads, "_pools", {})
        monkeypatch.setattr(threading.Thread, "start", another_is_quicker)
        monkeypatch.setattr(host_threads, "_serve", lambda calls: (serve(calls), ended.put(calls)))
        pool = host_threads._pool(2)
        assert ended.get(timeout=SOON) is not pool
        pool.put(None)
        assert ended.get(timeout=SOON) is pool

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
    def test_a_forked_child_has_threads_of_its_own(self):
        program = """
import os, signal, sys, threading, time, warnings
import numpy as np
from gradengine.kernels import CHUNK
from gradengine.kernels.host import HostKernels
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+ warns of any fork beside threads
def wait_for_threads():
    while threading.active_count() < 3:  # they start by themselves
        time.sleep(0.001)
kernels = HostKernels(3)
targets = [kernels.device.allocate(CHUNK) for _ in range(24)]  # enough for two threads
kernels.fill_zero(targets)
wait_for_threads()
child = os.fork()
if child == 0:
    signal.alarm(20)  # a child that has no threads, or waits for those of its parent, ends here
    buffers = [kernels.device.view(np.ones(CHUNK, np.float32), "w") for _ in targets]
    kernels.scale(buffers, np.float32(2), targets)
    wait_for_threads()  # without them it would end too, and calls that nobody makes would keep its arrays
    os._exit(0 if all((target.data == 2).all() for target in targets) else 1)
kernels.fill_zero(targets)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0

    @pytest.mark.parametrize("threads", [0, -1])
    def test_too_few(self, threads):
        with pytest.raises(CallerError, match=f"threads is (out|not) .*: got {threads}, expected a whole number >= 1"):
            HostKernels(threads)

    @pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this platform")
    def test_by_default_one_for_each_cpu(self):
        assert kernels_for("cpu").threads == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("device", ["gpu", "CPU", "", None, 0])
def test_unknown_devices(device):
    with pytest.raises(CallerError, match="no kernels for the device"):
        kernels_for(device)
