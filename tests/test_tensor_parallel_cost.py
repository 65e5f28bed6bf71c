"""Bandwidths that nobody can misread, and what tensor parallelism sends."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.errors import CallerError
from gradengine.layout.cost import Bandwidth, TensorParallelCost

rates = st.floats(1e-3, 1e18)
sizes = st.integers(1, 1 << 16)
groups = st.integers(1, 64)
HUGE = [10**400, pytest.param(10**5000, id="digits"), pytest.param(-(10**5000), id="digits-below")]


class TestBandwidth:
    @pytest.mark.parametrize(
        ("texts", "bytes_per_second"),
        [
            (("10 Gbit/s", "10Gbit/s", "10 Gbps", "1.25GB/s"), 1.25e9),
            (("100 Mbps",), 12.5e6),
            (("1.6 Tbit/s",), 2e11),
            (("900 MB/s",), 9e8),
            (("3.35 TB/s",), 3.35e12),
            (("12GiB/s",), 12.0 * (1 << 30)),
            (("5 B/s",), 5.0),
            (("  2e3 MB/s ", "2 GB/s"), 2e9),
            (("1. GB/s",), 1e9),
        ],
    )
    def test_known_units_are_read(self, texts, bytes_per_second):
        for text in texts:
            assert Bandwidth.parse(text).bytes_per_second == pytest.approx(bytes_per_second, rel=1e-15)

    @pytest.mark.parametrize("unit", ["", "gb/s", "gbps", "Gb/s", "GBps", "GB/S", "b/s"])
    def test_no_unit_and_one_that_may_mean_bits_or_bytes_are_unknown(self, unit):
        with pytest.raises(CallerError, match=r"unknown unit: got '8.*GB/s"):
            Bandwidth.parse(f"8 {unit}")

    @pytest.mark.parametrize(
        "text",
        [
            *("", " ", "fast", "GB/s", "10 GB", "10 GB/h", "-1 GB/s", "+1 GB/s", "nan GB/s", "inf GB/s", "1e GB/s"),
            *("1,5 GB/s", "0x10 GB/s", "1_000 GB/s", "10 PB/s", "10 GB/s/s", "10 GB/s ja", "=", "1 GB/s ="),
            *("1e9999 GB/s", "1e305 GB/s", "\u0661 GB/s", "9" * 400 + " GB/s"),
        ],
    )
    def test_what_is_no_bandwidth_is_refused(self, text):
        with pytest.raises(CallerError) as refusal:
            Bandwidth.parse(text)
        assert len(str(refusal.value)) < 400

    @pytest.mark.parametrize("given", [10, 1.25e9, None, b"10 GB/s", ["10 GB/s"]])
    def test_what_is_no_text_is_refused(self, given):
        with pytest.raises(CallerError, match="expected text such as"):
            Bandwidth.parse(given)

    @given(rates)
    def test_a_byte_is_eight_bits(self, rate):
        bandwidth = Bandwidth(rate)
        assert bandwidth.gigabits_per_second == pytest.approx(8 * bandwidth.gigabytes_per_second)
        assert Bandwidth.gigabits(8 * rate).bytes_per_second == pytest.approx(
            Bandwidth.gigabytes(rate).bytes_per_second
        )

    @pytest.mark.parametrize("make", [Bandwidth, Bandwidth.gigabytes, Bandwidth.gigabits])
    @pytest.mark.parametrize("rate", [0, 0.0, -1, math.nan, math.inf, -math.inf, True, "10", None, 1 + 0j, *HUGE])
    def test_rates_out_of_range_are_refused_in_a_few_words(self, make, rate):
        with pytest.raises(CallerError, match="bandwidth is") as refusal:
            make(rate)
        assert len(str(refusal.value)) < 300

    def test_it_shows_bytes_and_bits_and_cannot_be_changed(self):
        assert str(Bandwidth(np.float64(1.25e9))) == "1.25 GB/s = 10 Gbit/s" == str(Bandwidth.gigabits(10))
        assert str(Bandwidth.gigabytes(10)) == "10 GB/s = 80 Gbit/s"
        with pytest.raises(dataclasses.FrozenInstanceError):
            Bandwidth.gigabits(1).bytes_per_second = 2.0


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.int8(1)])
def test_whether_the_vocabulary_is_cut_is_a_bool(value):
    with pytest.raises(CallerError, match="vocab_parallel is not a bool"):
        dataclasses.replace(TestCost.cost, vocab_parallel=value)


class TestCost:
    """H = 1024, L = 24, S = 1024, fp32: the model with 350 million weights in its blocks."""

    cost = TensorParallelCost(hidden_size=1024, num_blocks=24, sequence_length=1024, tp_size=2)

    @pytest.mark.parametrize(("tp", "share", "messages"), [(1, 0.0, 0), (2, 1.0, 2), (4, 1.5, 6), (8, 1.75, 14)])
    def test_known_values(self, tp, share, messages):
        """A ring carries its share each way, and latency counts for each message that waits for another."""
        cost = dataclasses.replace(self.cost, tp_size=tp)
        assert (cost.bytes_per_all_reduce, cost.all_reduces_per_step) == (4194304, 48)
        assert (cost.bytes_per_step, cost.bytes_per_step_both_ways) == (201326592, 402653184)
        assert cost.link_bytes_per_step == share * 402653184
        seconds = [cost.seconds_per_step(make(10)) for make in (Bandwidth.gigabits, Bandwidth.gigabytes)]
        assert seconds == pytest.approx([share * 402653184 / 1.25e9, share * 402653184 / 1e10])
        waited = cost.seconds_per_step(Bandwidth(1e18), latency_seconds=1e-3)
        assert waited == pytest.approx(2 * 48 * messages * 1e-3, rel=1e-6)

    @pytest.mark.parametrize(
        ("bandwidth", "latency", "word"),
        [
            *((given, 0.0, "bandwidth is not a Bandwidth") for given in (10, 1.25e9, "10 GB/s", None)),
            *((Bandwidth(1.0), v, "latency_seconds") for v in (-1e-9, math.nan, math.inf, "1 ms", None, True, 10**400)),
        ],
    )
    def test_what_is_no_bandwidth_or_latency_is_refused(self, bandwidth, latency, word):
        with pytest.raises(CallerError, match=word):
            self.cost.seconds_per_step(bandwidth, latency_seconds=latency)
        with pytest.raises(TypeError, match="positional"):  # it could be milliseconds
            self.cost.seconds_per_step(bandwidth, latency)

    def test_a_cut_vocabulary_adds_one_all_reduce_each_way_to_bytes_and_seconds_alike(self):
        cut = dataclasses.replace(self.cost, vocab_parallel=True, micro_batches=3)
        whole = dataclasses.replace(cut, vocab_parallel=False)
        assert cut.all_reduces_per_step - whole.all_reduces_per_step == 3
        for figure in ("bytes_per_step", "bytes_per_step_both_ways", "link_bytes_per_step"):
            assert getattr(cut, figure) * 48 == getattr(whole, figure) * 49
        seconds = [cost.seconds_per_step(Bandwidth.gigabits(1), latency_seconds=1e-4) for cost in (cut, whole)]
        assert seconds[0] / seconds[1] == pytest.approx(49 / 48)

    def test_numpys_integers_are_whole_numbers_and_their_products_do_not_wrap(self):
        cost = TensorParallelCost(np.int32(1 << 20), np.int8(100), np.int64(1 << 20), tp_size=np.uint8(2))
        assert cost == TensorParallelCost(1 << 20, 100, 1 << 20, tp_size=2)
        assert cost.bytes_per_step == 200 * (1 << 42)

    @pytest.mark.parametrize(
        "name", [f.name for f in dataclasses.fields(TensorParallelCost) if f.name != "vocab_parallel"]
    )
    @pytest.mark.parametrize(
        "value", [0, -1, 1.5, True, None, "2", np.float32(2), pytest.param(-(10**5000), id="digits-below")]
    )
    def test_sizes_out_of_range_are_refused_by_name(self, name, value):
        with pytest.raises(CallerError, match=rf"{name} is (out|not) .*: got .*expected a whole number >= 1"):
            dataclasses.replace(self.cost, **{name: value})

    @given(sizes, sizes, sizes, groups, st.integers(1, 16), st.integers(1, 16), st.sampled_from([2, 4]))
    def test_counts_are_products(self, hidden, blocks, length, tp, batch, micro_batches, width):
        cost = TensorParallelCost(hidden, blocks, length, tp, batch, micro_batches, width)
        assert cost.bytes_per_all_reduce == length * hidden * batch * width
        assert cost.bytes_per_step == 2 * blocks * micro_batches * cost.bytes_per_all_reduce
        exact = 2 * (tp - 1) * cost.bytes_per_step_both_ways
        assert exact <= cost.link_bytes_per_step * tp < exact + tp

    @given(sizes, groups, rates, rates, st.floats(0, 1))
    def test_more_bandwidth_never_takes_longer(self, hidden, tp, one, other, latency):
        cost = TensorParallelCost(hidden, 2, 16, tp)
        slow, fast = sorted((one, other))
        assert cost.seconds_per_step(Bandwidth(fast), latency_seconds=latency) <= cost.seconds_per_step(
            Bandwidth(slow), latency_seconds=latency
        )
