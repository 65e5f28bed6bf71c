"""The decision as it is defined, in fp64: against known values, and what holds for any squared sums."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradengine.errors import WindowError
from gradengine.kernels import ClipPlan, decide
from gradengine.kernels.decision import _rows, clip_scale, refuse_bad_divisor, sum_in_order

NAN, INF = math.nan, math.inf
SMALLEST = math.ulp(0.0)

squares = st.floats(0, 1e70)
plans = st.integers(1, 3).flatmap(
    lambda groups: st.tuples(
        st.lists(st.tuples(st.integers(0, groups - 1), squares), max_size=9),
        st.lists(st.one_of(st.just(INF), st.floats(1e-9, 1e9)), min_size=groups, max_size=groups),
    )
)


class TestDecide:
    def test_one_group(self):
        decision = decide(np.array([9.0, 16.0]), ClipPlan((0, 0), (1.0,)), divisor=2.0)
        assert decision.norm == 2.5
        assert decision.group_norms == (2.5,)
        assert decision.component_norms == (1.5, 2.0)
        assert decision.block_norms == ()
        assert decision.scales == (0.4,)
        assert decision.factors == (np.float32(0.2),)
        assert decision.bad == ()

    def test_each_group_has_its_own(self):
        plan = ClipPlan((0, 1, 0, 2), (1.0, 100.0, INF))
        decision = decide(np.array([9.0, 4.0, 16.0, 1e30]), plan, divisor=1.0)
        assert decision.group_norms == (5.0, 2.0, 1e15)
        assert decision.scales == (0.2, 1.0, 1.0)
        assert (decision.scale, decision.factor) == (0.2, np.float32(0.2))
        assert decision.norm == pytest.approx(1e15, rel=1e-15)
        assert decision.factors == (np.float32(0.2), 1, 1)

    def test_the_norms_of_blocks_bind_nobody(self):
        plan = ClipPlan((0,) * 5, (1e9,), (1, None, 0, 1, None))
        decision = decide(np.array([9.0, 1.0, 4.0, 16.0, 1.0]), plan, divisor=1.0)
        assert decision.block_norms == (2.0, 5.0)
        assert decision.scales == (1.0,)

    @pytest.mark.parametrize("divisor", [3.0, 7.0, 10.0, 0.3])
    def test_no_divisor_and_no_scale_is_rounded_before_the_factor_is(self, divisor):
        bounds = np.linspace(0.1, 0.9, 200).tolist()
        totals, plan = np.full(200, divisor**2), ClipPlan(tuple(range(200)), tuple(bounds))
        decision = decide(totals, plan, divisor)
        assert list(decision.factors) == [np.float32(scale / divisor) for scale in decision.scales]
        assert {factor.dtype for factor in decision.factors} == {np.dtype(np.float32)}

    @pytest.mark.parametrize("divisor", [2.0**-126, 1.0, 3.0, 2.0**126])
    @pytest.mark.parametrize("below", [1.0, 0.9999999, 0.7, 2.0**-20, 2.0**-30])
    def test_a_factor_is_normal_or_the_bound_holds_by_zeros(self, divisor, below):
        norm, bound = 2.0**60, 2.0**-66 * below * divisor
        decision = decide(np.array([(norm * divisor) ** 2]), ClipPlan((0,), (bound,)), divisor)
        if below == 1:
            assert (decision.factor, decision.inverse) == (2.0**-126, 2.0**126)
        else:
            assert (decision.scale, decision.factor, decision.inverse) == (0, 0, INF)

    @given(st.floats(2.0**-126, 2.0**126), st.floats(0, 1e60), st.floats(0, 1e60))
    def test_factor_and_inverse_are_zero_and_infinite_together(self, divisor, norm, bound):
        decision = decide(np.array([(norm * divisor) ** 2]), ClipPlan((0,), (bound,)), divisor)
        assert decision.factor == 0 or decision.factor >= 2.0**-126
        assert decision.inverse == INF if decision.factor == 0 else decision.inverse <= 2.0**126
        assert norm * divisor * float(decision.factor) <= max(bound * (1 + 1e-7), 0) or decision.scale == 1

    @pytest.mark.parametrize(("bound", "inverse"), [(0.7, 3.0 * 7 / 0.7), (9.0, 7.0), (0.0, INF), (1e-38, INF)])
    def test_the_inverse_is_for_those_who_divide(self, bound, inverse):
        decision = decide(np.array([(3.0 * 7) ** 2]), ClipPlan((0,), (bound,)), 7.0)
        assert decision.inverse.dtype == np.float32
        assert decision.inverse == np.float32(inverse)

    @pytest.mark.parametrize("bad", [NAN, INF])
    def test_the_bad_are_named_and_nothing_is_clipped_by_them(self, bad):
        decision = decide(np.array([1.0, bad, 4.0, bad]), ClipPlan((0, 1, 0, 1), (1.0, 1.0)), 1.0)
        assert decision.bad == (1, 3)
        assert not math.isfinite(decision.norm)
        assert decision.scales == (1 / math.sqrt(5), 1.0)

    @pytest.mark.parametrize("zero_if_bad", [False, True])
    @pytest.mark.parametrize("total", [1.0, NAN])
    def test_zeros_only_where_they_are_asked_for_and_something_is_bad(self, zero_if_bad, total):
        decision = decide(np.array([1.0, total]), ClipPlan((0, 0), (1.0,)), 1.0, zero_if_bad=zero_if_bad)
        assert decision.skipped is (zero_if_bad and math.isnan(total))

    def test_no_overflow_below_the_largest_number(self):
        decision = decide(np.full(1000, (3e38) ** 2 * 1e6), ClipPlan((0,) * 1000, (1.0,)), 1.0)
        assert decision.bad == ()
        assert decision.norm == pytest.approx(3e38 * math.sqrt(1e9))

    @given(plan=plans, divisor=st.floats(1e-6, 1e6))
    def test_of_any_sums(self, plan, divisor):
        """Groups partition the set, no group exceeds its bound, and none is made longer."""
        members, bounds = plan
        totals = np.array([square for _, square in members], np.float64)
        decision = decide(totals, ClipPlan(tuple(group for group, _ in members), tuple(bounds)), divisor)
        assert math.fsum(norm**2 for norm in decision.group_norms) == pytest.approx(decision.norm**2, rel=1e-12)
        assert math.fsum(norm**2 for norm in decision.component_norms) == pytest.approx(decision.norm**2, rel=1e-12)
        for norm, scale, factor, bound in zip(
            decision.group_norms, decision.scales, decision.factors, bounds, strict=True
        ):
            assert scale == clip_scale(norm, bound, divisor)
            assert factor == np.float32(scale / divisor)
        assert decision.scale == min(decision.scales)
        assert decision.bad == ()


class TestClipScale:
    @pytest.mark.parametrize(
        ("norm", "bound", "scale"),
        [
            (0.0, 1.0, 1.0),
            (0.0, 0.0, 1.0),
            (5.0, 0.0, 0.0),
            (5.0, INF, 1.0),
            (5.0, 5.0, 1.0),
            (math.nextafter(5.0, 6.0), 5.0, 5.0 / math.nextafter(5.0, 6.0)),
            (1e-300, 1e-301, 0.1),
            (NAN, 1.0, 1.0),
            (INF, 1.0, 1.0),
            (NAN, 0.0, 1.0),
        ],
    )
    def test_known_values(self, norm, bound, scale):
        assert clip_scale(norm, bound) == scale

    @given(st.floats(0, 1e300), st.floats(0, 1e300))
    @example(1e300, 1e-15)  # the quotient is subnormal in fp64
    @example(1e-310, 1e-320)  # both are
    @example(1e-320, 0.0)
    def test_it_is_at_most_one_and_reaches_the_bound(self, norm, bound):
        """To a rounding, where it is not 0: then it would be no normal number of fp32."""
        scale = clip_scale(norm, bound)
        assert 0 <= scale <= 1
        assert (scale == 1) or norm > bound
        if scale == 0:
            assert bound / norm < 2.0**-126
        else:
            assert abs(norm * scale - min(norm, bound)) <= 1e-15 * bound + SMALLEST


@pytest.mark.parametrize("divisor", [2.0**-126, 1.0, 2.0**126])
def test_divisors_whose_inverse_is_a_normal_number(divisor):
    refuse_bad_divisor(divisor, "the weight")
    assert 2.0**-126 <= np.float32(1 / divisor) < INF


@pytest.mark.parametrize("divisor", [0.0, -1.0, 1e-38, 1e38, INF, NAN])
def test_other_divisors_are_refused(divisor):
    with pytest.raises(WindowError, match=r"the weight is out of range: got .*, expected 2\*\*-126") as refusal:
        refuse_bad_divisor(divisor, "the weight")
    assert refusal.value.got == f"{divisor:g}"


@given(st.lists(st.floats(0, 1e300), max_size=40))
def test_sums_are_taken_from_first_to_last(values):
    expected = 0.0
    for value in values:
        expected += value
    assert sum_in_order(np.array(values, np.float64)) == expected


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=9))
def test_members_of_blocks(blocks):
    plan = ClipPlan((0,) * len(blocks), (1.0,), tuple(blocks))
    assert plan.members == [list(range(len(blocks)))]
    found = {target: block for block, members in enumerate(plan.block_members) for target in members}
    assert found == {target: block for target, block in enumerate(blocks) if block is not None}


class Counted(list):
    """A segment that counts how often its length is asked."""

    asked = 0

    def __len__(self):
        Counted.asked += 1
        return super().__len__()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
@example([1] * 2000)
def test_segments_become_rows_at_most_twice_as_large_in_a_time_that_grows_with_their_number(sizes):
    segments, Counted.asked = [Counted(range(size)) for size in sizes], 0
    matrices = _rows(segments)
    assert Counted.asked <= 10 * len(sizes)
    assert [[member for member in row if member >= 0] for matrix in matrices for row in matrix.tolist()] == segments
    assert sum(matrix.size for matrix in matrices) <= 2 * sum(sizes) + len(sizes)
