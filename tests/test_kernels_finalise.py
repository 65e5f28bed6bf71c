"""What workers told each other added up, K2 as the host defines it, and what a device finds out for itself."""

import math

import numpy as np
import pytest
import strategies as draw
from devices import on_host
from folds import accumulate, arena_of, finalise, measure, status_of, totals_of
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import fold_of, measured, numbers, sums_of

from gradengine.kernels import ClipPlan, decide

NAN, INF = math.nan, math.inf
ONE_GROUP = ClipPlan((0,), (1.0,))


def finalised(backend, arrays, plan, divisor=1.0, *, zero_if_bad=False, look=True):
    """K2 on arrays as they are."""
    buffers = [backend.buffer(array) for array in arrays]
    sums = sums_of(backend, buffers)
    decision = finalise(backend.kernels, buffers if look else None, sums, plan, divisor, zero_if_bad=zero_if_bad)
    totals_of(backend.kernels, sums)  # waits: the sums are dropped here
    return decision


def numbers_of(decision):
    """All numbers of a decision, wherever they lie; of the least scale a device keeps fp32."""
    one = numbers([decision.norm, decision.factor, decision.inverse, decision.skipped])
    one.append(np.float32(numbers([decision.scale])[0]))
    several = (decision.group_norms, decision.block_norms, decision.component_norms, decision.scales, decision.factors)
    return [one, *map(numbers, several)]


class TestTally:
    """What workers told each other, added up; what is wrong is in the payload of a NaN, where the divisor would be."""

    NAMES = "step", "scale", "bounds", "stop", "dropped", "flags"
    FIELDS = np.dtype([("numbers", "<f8", 3), *((name, "<u8") for name in NAMES)])

    def tallied(self, device, rows):
        facts = [(*row[:4], *(row[4:] or [0]), 2, -1 % 2**64) for row in rows]
        told, sums = np.array(facts, self.FIELDS), device.put(np.zeros(5))
        there = device.put(told.view(np.int64))  # which is read later
        device.kernels.tally(there, len(rows), sums)
        return on_host(sums)

    def payload(self, number):
        assert math.isnan(number)
        return int(number.view(np.uint64)) - 0x7FF8 * 2**48

    def test_numbers_are_added_in_rank_order(self, device):
        rows = [(three, 7, 2**63 + 5, 9) for three in ((1e16, 1.0, 4), (1.0, 0.1, 0), (1.0, 0.2, 2))]
        assert self.tallied(device, rows).tolist() == [1e16 + 1.0 + 1.0, 1.0 + 0.1 + 0.2, 6, 0, 6]
        assert self.tallied(device, rows[2:]).tolist() == [1.0, 0.2, 2, 0, 2]

    @pytest.mark.parametrize(
        ("rows", "fault"),
        [
            ([(0, 0, 0), (0, 0, 0), (1, 0, 0), (2, 0, 0)], 1 + 5 * 2),
            ([(0, 0, 0), (0, 2**63, 0), (1, 0, 0)], 2 + 5 * 1),
            ([(0, 0, 0), (0, 0, 2**63), (1, 0, 0)], 4 + 5 * 1),
            ([(2**63, 5, 0)] * 69 + [(1, 5, 0)], 1 + 5 * 69),
        ],
    )
    def test_who_is_in_another_step_or_has_other_settings_is_told(self, device, rows, fault):
        sums = self.tallied(device, [((1.0, 2.0, 1), *row) for row in rows])
        assert self.payload(sums[0]) == fault
        assert sums[1:].tolist() == [2.0 * len(rows), len(rows), 0, 2 * len(rows)]

    @pytest.mark.parametrize("step", [3, 4])
    @pytest.mark.parametrize("asks", [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 1, 1)])
    def test_one_that_asks_to_stop_is_enough_also_where_a_step_is_refused(self, device, asks, step):
        rows = [((1.0, 2.0, 1), 3 if rank else step, 3, 3, stop) for rank, stop in enumerate(asks)]
        sums = self.tallied(device, rows)
        assert sums[3] == float(any(asks))
        assert math.isnan(sums[0]) is (step != 3)

    def test_no_micro_batch_at_all_is_told(self, device):
        assert self.payload(self.tallied(device, [((1.0, 0.0, 0), 3, 3, 3)] * 2)[0]) == 3


def filled(*values):
    """Arrays of one element each."""
    return [np.full(1, value, np.float32) for value in values]


EACH, BOUNDS = tuple(range(200)), tuple(np.linspace(0.1, 0.9, 200).tolist())


def exact_cases():
    """Arrays, plan and divisors: norms of a single chunk each, so that all numbers are the same to the bit."""
    # With two hundred groups a scale or divisor that is rounded before the factor, or the inverse of one, shows.
    yield filled(*[1.0] * 200), ClipPlan(EACH, BOUNDS), (3.0, 7.0, 0.3)
    yield filled(1.0), ClipPlan((0,), (0.7,)), np.linspace(0.3, 7.0, 40).tolist()
    for below in (1.0, 0.999999, 0.7, 2.0**-30):  # of the least factor that is a normal number
        yield filled(2.0**60), ClipPlan((0,), (below * 2.0**-66,)), (2.0**-20, 1.0, 3.0, 2.0**60)
    for bound in (0.0, 1.0, INF):  # of a norm of zero
        yield [np.zeros(9, np.float32), *filled(1)], ClipPlan((0, 1), (bound, 0.0)), (4.0,)
    for bound in (0.0, 5.0, math.nextafter(5.0, 0), INF):  # at and beside the norm
        yield [np.array([3, 4], np.float32)], ClipPlan((0,), (bound,)), (1.0,)
    for bad in (NAN, INF, -INF):  # in one group, which clips no other
        arrays = [np.full(4, 2, np.float32), np.array([1, bad], np.float32), *filled(3)]
        yield arrays, ClipPlan((0, 1, 1), (1.0, 1.0), (0, 1, None)), (1.0,)
    for nothing in ([], [np.empty(0, np.float32)] * 2):
        yield nothing, ClipPlan((0,) * len(nothing), (1.0,)), (4.0,)


class TestFinalise:
    GROUPS, BLOCKS = (0, 1, 0, 2, 1, 0), (None, 0, 0, 1, None, 1)
    PLAN = ClipPlan(GROUPS, (1.0, 1e6, INF), BLOCKS)

    @staticmethod
    def arrays(backend, magnitude=1.0):
        sizes = (5, backend.chunk + 3, 0, 40 * 2048 + 1, 1, 129)
        return [draw.random_array([3, i], size, magnitude=magnitude) for i, size in enumerate(sizes)]

    @pytest.mark.parametrize("magnitude", [1.0, 1e30, 1e-30, 1e-40])
    def test_norms_are_within_one_millionth(self, backend, magnitude):
        arrays = self.arrays(backend, magnitude)
        found = finalised(backend, arrays, self.PLAN, 3.0)

        def exact(labels, label):
            return draw.exact_norm([array for array, mine in zip(arrays, labels, strict=True) if mine == label]) / 3

        for got, labels, count in (
            ([found.norm], (0,) * 6, 1),
            (found.group_norms, self.GROUPS, 3),
            (found.block_norms, self.BLOCKS, 2),
            (found.component_norms, range(6), 6),
        ):
            assert numbers(got) == pytest.approx([exact(labels, label) for label in range(count)], rel=1e-6, abs=0)

    @pytest.mark.parametrize("zero_if_bad", [False, True])
    @pytest.mark.parametrize(("arrays", "plan", "divisors"), list(exact_cases()))
    def test_each_number_is_as_it_is_decided_on_the_host(self, device, arrays, plan, divisors, zero_if_bad):
        for divisor in divisors:
            found = finalised(device, arrays, plan, divisor, zero_if_bad=zero_if_bad)
            expected = decide(measured(device, *arrays), plan, divisor, zero_if_bad=zero_if_bad)
            for got, wanted in zip(numbers_of(found), numbers_of(expected), strict=True):
                np.testing.assert_array_equal(got, wanted)

    @pytest.mark.parametrize("divisor", [1.0, 7.0, 2.0**-20])
    def test_large_sets_and_more_components_than_a_block_has_warps(self, device, divisor):
        """Groups of more than a warp's 32 lanes add up in another order than the host's."""
        many = [np.full(1 + i % 3, i, np.float32) for i in range(205)]
        plan = ClipPlan(tuple(i % 3 == 0 for i in range(205)), (50.0, 1e9), (None, *range(204)))
        for arrays, of in ((self.arrays(device), self.PLAN), (many, plan)):
            found, expected = finalised(device, arrays, of, divisor), decide(measured(device, *arrays), of, divisor)
            for got, wanted in zip(numbers_of(found), numbers_of(expected), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-13)

    def test_a_warp_adds_row_by_row_and_then_its_lanes(self, device):
        """However many rows are loaded at once: the bits depend on the number of chunks alone."""
        draws, chunks = np.random.default_rng(4), [1, 31, 33, 129, 512, 513, 1024, 1100, 4133]
        counts = [count for _ in range(16) for count in draws.permutation(chunks).tolist()][:-5]
        sums = device.kernels.partial_sums([count * 32768 for count in counts])
        squares, bad = draws.exponential(size=sum(counts)), draws.integers(0, 32769, sum(counts), np.uint32)
        device.kernels.device.copied_into(sums.values, squares)
        device.kernels.device.copied_into(sums.non_finite, bad)
        decision = finalise(device.kernels, None, sums, ClipPlan((0,) * len(counts), (1.0,)), 1.0, zero_if_bad=False)
        expected = []
        for first, count in zip(sums.first, counts, strict=True):
            rows = np.append(squares[first : first + count], np.zeros(-count % 32)).reshape(-1, 32)
            lanes = np.add.accumulate(rows)[-1]
            for distance in (16, 8, 4, 2, 1):
                lanes = lanes[:distance] + lanes[distance:]
            expected.append(lanes[0])
        np.testing.assert_array_equal(on_host(decision.written[0]), expected)
        np.testing.assert_array_equal(on_host(decision.written[1]), np.add.reduceat(bad, sums.first, dtype=np.int64))

    def test_what_nobody_measured_can_never_pass(self, backend):
        sums = backend.kernels.partial_sums([3, 3])
        measure(backend.kernels, [backend.buffer(np.ones(3, np.float32))] * 2, sums, [0])
        for zero_if_bad in (False, True):
            plan = ClipPlan((0, 0), (1.0,))
            decision = finalise(backend.kernels, None, sums, plan, 1.0, zero_if_bad=zero_if_bad)
            assert np.isnan(numbers([decision.norm, decision.component_norms[1]])).all()
            assert numbers([decision.component_norms[0]]) == pytest.approx([math.sqrt(3)])
            assert numbers([decision.skipped]) == [zero_if_bad]
            if not backend.is_host:
                found = status_of(decision)
                assert (found.is_bad, found.bad_component, found.bad_index, found.non_finite) == (True, 1, -1, 0)

    def test_its_arrays_are_those_of_the_last_call(self, backend):
        """The same sums and plan: on a device the decision is written anew where it lay."""
        sums, targets = backend.kernels.partial_sums([1]), [backend.kernels.device.allocate(1)]
        for value in (4, 2, 8):
            fold = fold_of(0, True, [backend.buffer(np.full(1, value, np.float32))], [1])
            accumulate(backend.kernels, targets, [fold], sums)
            decision = finalise(backend.kernels, targets, sums, ONE_GROUP, 1.0, zero_if_bad=False)
            assert numbers([decision.norm, decision.factor]) == [value, 1 / value]


class TestVerdict:
    """What a device finds out for itself, and remembers."""

    @staticmethod
    def verdict(device, arrays, **options):
        return status_of(finalised(device, arrays, ClipPlan((0,) * len(arrays), (1.0,)), **options))

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

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    @pytest.mark.parametrize("look", [True, False])
    def test_in_memory_of_any_dtype_among_many_components_where_it_may_look(self, device, dtype, look):
        arrays = [np.ones(100, draw.DTYPES[dtype]) for _ in range(100)]
        arrays[71][77:], arrays[99][0] = -INF, NAN
        found = self.verdict(device, arrays, look=look)
        assert (found.bad_component, found.non_finite) == (71, 24)
        assert (found.bad_index, found.bad_value) == ((77, -INF) if look else (-1, 0))

    def test_numbers_of_one_step(self, device):
        found = self.verdict(device, [np.full(4, 6, np.float32)], divisor=3.0)
        assert (found.step, found.norm, found.scale, found.skipped) == (1, 4.0, 0.25, False)
        assert found.factor == np.float32(0.25 / 3)
        assert (found.bad_steps, found.bad_step, found.non_finite, found.is_bad) == (0, 0, 0, False)

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
        sums, found = sums_of(device, [device.buffer(np.full(1, INF, np.float32))]), []
        for step in (1, 2, 2, 0, 0, 40, 0):
            decision = finalise(device.kernels, None, sums, ONE_GROUP, 1.0, zero_if_bad=True, step=step)
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
            measure(device.kernels, kept[-1], sums, [0])
            decision = finalise(device.kernels, kept[-1], sums, plan, 2.0, zero_if_bad=False)
            assert status_of(decision).bad_index == index
            device.kernels.hand_back(arena_of(device.kernels, kept[-1], sums, is_ours=is_ours), decision, plan)
        for (buffer,), index in zip(kept, (3, 7), strict=True):
            assert device.get(buffer).tolist() == [2 if i != index else INF for i in range(9)]
