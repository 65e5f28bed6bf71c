"""The exchange within one machine: copies counted by hand, and the rates that it is measured by."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transports import HAS_SHARED_MEMORY, Transport, group, on_all, shared

from gradengine.bench.workers import Crew, contribution
from gradengine.errors import CallerError
from gradengine.exchange import Progress
from gradengine.exchange.links.shared_memory import SharedMemoryLink
from gradengine.kernels.host_threads import available_cpus
from gradengine.layout import GradientLayout
from gradengine.plan import machine
from gradengine.plan.machine import (
    TRANSPORTS,
    Rates,
    Sum,
    measure_rates,
    on_one_machine,
    overlap_on_one_machine,
    pairs,
    rates_of,
)
from gradengine.plan.traffic import Network, ordered, span_bytes
from gradengine.tensor_parallel_cost import Bandwidth

RATES = Rates(cores=2, tcp=4e9, unix=8e9, sum=20e9, copy=10e9, shared_memory=5e9)


def test_copies_and_sums_are_counted_as_the_code_makes_them():
    """10^9 bytes, 3 workers: 2 sets of parts and 2 of sums; 3 sets summed; in place 2 sets of sums; a server 3."""
    assert RATES.seconds("tcp://", 10**9, 3) == pytest.approx(4 / 4 + 3 / 20)
    assert RATES.seconds("unix://", 10**9, 3) == pytest.approx(4 / 8 + 3 / 20)
    assert RATES.seconds("shared memory", 10**9, 3) == pytest.approx(2 / 5 + 3 / 20)
    assert RATES.seconds("threads", 10**9, 3) == pytest.approx(2 / 10 + 3 / 20)
    assert RATES.seconds("served", 10**9, 3) == pytest.approx(6 / 4 + 3 / 20)


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="no memfd on this platform")
def test_in_shared_memory_only_sums_are_copied_and_each_message_takes_two_signals(monkeypatch):
    """Counted in the link: bytes that each rank copies and that it reads in place, and signals that it sends."""
    elements, world = 6 << 20, 3  # two buckets
    layout = GradientLayout.of([(elements,)])
    copied, read, signals = (dict.fromkeys(range(world), 0) for _ in range(3))
    take, queue = SharedMemoryLink._take, SharedMemoryLink._queue

    def counted_take(link, peer, tag, start, size):
        take(link, peer, tag, start, size)
        (copied if link.borrowed(peer, tag) is None else read)[link.rank] += size

    def counted_queue(link, transfer, *rest, **options):
        signals[link.rank] += transfer.tag >= 1 << 22  # beyond those of an all-reduce
        queue(link, transfer, *rest, **options)

    monkeypatch.setattr(SharedMemoryLink, "_take", counted_take)
    monkeypatch.setattr(SharedMemoryLink, "_queue", counted_queue)
    with group(Transport.SHARED_MEMORY, world) as exchanges:

        def reduce(exchange):
            exchange.bind(layout, shared(contribution(exchange.rank, elements)), Progress())
            for span in layout.spans:
                exchange.start(span)
            exchange.wait()
            exchange.barrier()

        on_all(reduce, exchanges)
    found = on_one_machine("shared memory", span_bytes(layout), world, RATES)
    assert sum(copied.values()) == sum(read.values()) == found.total_bytes == (world - 1) * 4 * elements
    assert max(copied.values()) == pytest.approx(found.busiest_link_bytes, rel=0.01)
    assert set(signals.values()) == {found.messages}


@pytest.mark.parametrize("transport", ["tcp://", "unix://", "shared memory", "threads"])
def test_more_cores_help_as_far_as_there_are_workers(transport):
    at = {cores: dataclasses.replace(RATES, cores=cores).seconds(transport, 10**9, 4) for cores in (2, 3, 4, 16)}
    assert at[2] == pytest.approx(1.5 * at[3]) == pytest.approx(2 * at[4])
    assert at[4] == at[16]


def test_a_server_is_one_process_however_many_cores_there_are():
    at = [dataclasses.replace(RATES, cores=cores).seconds("served", 10**9, 4) for cores in (2, 16)]
    assert at[0] == at[1]


@given(st.integers(2, 64), st.integers(1, 1 << 40))
def test_every_worker_more_takes_longer_and_time_is_proportional_to_bytes(world, nbytes):
    for transport in TRANSPORTS:
        assert RATES.seconds(transport, nbytes, world) < RATES.seconds(transport, nbytes, world + 1)
        twice = RATES.seconds(transport, 2 * nbytes, world)
        assert twice == pytest.approx(2 * RATES.seconds(transport, nbytes, world))


def test_only_a_cpus_arenas_are_in_shared_memory_and_only_where_there_is_any():
    assert RATES.transports("cpu") == list(TRANSPORTS)
    without = ["tcp://", "unix://", "threads", "served"]
    assert RATES.transports("cuda") == dataclasses.replace(RATES, shared_memory=None).transports("cpu") == without


def test_one_core_takes_as_long_as_it_was_measured_to_take():
    """The sockets' rate was measured on the same core, so that nothing is scaled."""
    one = dataclasses.replace(RATES, cores=1)
    assert one.seconds("tcp://", 10**9, 2) == pytest.approx(2 / 4 + 2 / 20)


@given(st.floats(1e8, 1e11), st.floats(1e8, 1e11))
def test_faster_sockets_never_take_longer(one, other):
    slow, fast = sorted((one, other))
    found = [Rates(2, rate, rate, 20e9, 10e9) for rate in (slow, fast)]
    assert found[1].seconds("tcp://", 10**8, 3) <= found[0].seconds("tcp://", 10**8, 3)
    assert found[0].seconds("threads", 10**8, 3) == found[1].seconds("threads", 10**8, 3)


# ---- of spans ----


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(sizes=st.lists(st.integers(1, 1 << 32), min_size=1, max_size=8), workers=st.integers(2, 16))
def test_spans_take_together_what_the_set_takes(transport, sizes, workers):
    traffic = on_one_machine(transport, sizes, workers, RATES)
    assert traffic.seconds == pytest.approx(RATES.seconds(transport, sum(sizes), workers))


def test_bytes_are_those_that_a_rank_or_the_server_sends_and_in_place_what_one_copies():
    found = {name: on_one_machine(name, [3000], 3, RATES) for name in TRANSPORTS}
    links = {name: (each.busiest_link_bytes, each.total_bytes, each.messages) for name, each in found.items()}
    assert links == {
        "tcp://": (4000, 12000, 4), "unix://": (4000, 12000, 4), "served": (9000, 18000, 3),
        "shared memory": (2000, 6000, 8), "threads": (2000, 6000, 0),
    }  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_worker_exchanges_nothing(transport):
    traffic = on_one_machine(transport, [1000], 1, RATES)
    assert (traffic.seconds, traffic.total_bytes) == (0.0, 0)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_it_is_what_links_take_that_limit_nothing_where_each_process_has_its_part_of_the_cores(workers):
    limits = Network(Bandwidth(1e18), 0.0, Bandwidth(RATES.tcp / workers), Bandwidth(RATES.sum / workers))
    by_links, here = ordered([10**9], workers, limits), on_one_machine("tcp://", [10**9], workers, RATES)
    assert by_links.seconds == pytest.approx(here.seconds)


def test_a_step_waits_for_the_engines_too():
    """10^9 bytes, 2 workers on 2 cores: 0.6 s of exchange; each engine adds and clips on a core of its own."""
    traffic = on_one_machine("tcp://", [10**9], 2, RATES)
    found = overlap_on_one_machine([1.0], 10.0, [10**9], traffic, 2, RATES)
    assert found.seconds == pytest.approx(2 / 4 + 2 / 20)
    assert found.exposed_seconds == pytest.approx(found.seconds + 2 / 20 + 1 / 10)
    assert found.hidden_seconds == 0
    crowded = dataclasses.replace(RATES, cores=1)
    on_one = overlap_on_one_machine([1.0], 10.0, [10**9], traffic, 2, crowded)
    assert on_one.exposed_seconds == pytest.approx(found.seconds + 2 * (2 / 20 + 1 / 10))


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), True, "4e9", None])
@pytest.mark.parametrize("name", ["cores", "tcp", "unix", "sum", "copy", "shared_memory"])
def test_rates_out_of_range_are_refused_by_name(name, rate):
    if (name, rate) == ("shared_memory", None):  # a system that has none
        assert dataclasses.replace(RATES, shared_memory=rate).shared_memory is None
        return
    with pytest.raises(CallerError, match=f"a machine's '{name}' is out of range"):
        Rates(**{**vars(RATES), name: rate})


# ---- what is measured ----

ELEMENTS = (1 << 20) + 32 * 1024  # two messages each way


PAIRS = ["tcp", "unix", *(["shared_memory"] if HAS_SHARED_MEMORY else [])]


def test_a_pair_that_cannot_be_is_not_measured(tmp_path, monkeypatch):
    assert list(pairs(tmp_path, ELEMENTS)) == PAIRS
    monkeypatch.setattr(machine, "has_shared_memory", lambda: False)
    assert list(pairs(tmp_path, ELEMENTS)) == ["tcp", "unix"]
    assert rates_of(SECONDS, 10**6).shared_memory is None


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="no memfd on this platform")
def test_a_pair_in_shared_memory_sends_nothing_else_through_its_socket(tmp_path):
    work = on_all(lambda rank: machine.Duplex(SharedMemoryLink, str(tmp_path / "lent"), ELEMENTS, rank), [0, 1])
    on_all(machine.Duplex.run, work)
    for each in work:
        assert each.error() == 0
        assert each._link.lends(each._mine)
        assert each._link.lends(each.arena)
        each._link.close()


@pytest.mark.parametrize("transport", PAIRS)
def test_each_of_a_pair_gets_what_the_other_has(tmp_path, transport):
    crew = pairs(tmp_path, ELEMENTS)[transport]()
    try:
        assert isinstance(crew, Crew)
        crew.prepare()
        assert crew.error() > 1
        crew.run()
        assert crew.error() == 0
    finally:
        crew.close()


def test_the_owner_sums_its_own_and_the_others_parts_share_by_share_and_again():
    work = Sum(3 * machine._SHARE + 128)
    total = work.arena.copy()
    for _ in range(2):
        spent = work.run()
        total += contribution(1, total.size)
        np.testing.assert_array_equal(work.arena[: total.size], total)
        assert set(spent) == {"sum", "copy"}
        assert min(spent.values()) > 0


SECONDS = {"tcp": 1.0, "unix": 0.5, "sum": 0.25, "copy": 0.1}


def test_rates_are_bytes_by_seconds_and_a_pair_sends_both_ways():
    rates = rates_of(SECONDS, 10**6)
    assert (rates.tcp, rates.unix) == (8e6, 16e6)
    assert rates_of(SECONDS | {"shared_memory": 0.8}, 10**6).shared_memory == 1e7
    assert (rates.sum, rates.copy) == (32e6, 40e6)
    assert rates.cores == available_cpus()


@given(st.integers(1, 1 << 40), st.floats(1e-6, 1e3))
def test_rates_are_proportional_to_what_was_sent(elements, scale):
    found = rates_of({name: scale * seconds for name, seconds in SECONDS.items()}, elements)
    assert found.tcp == pytest.approx(8 * elements / scale)
    assert found.copy == pytest.approx(40 * elements / scale)


def test_this_machine_is_measured():
    """Only that it can be: a rate below a megabyte a second would be a fault of the measurement."""
    rates = measure_rates(elements=ELEMENTS, rounds=2)
    assert min(rates.tcp, rates.unix, rates.sum, rates.copy, rates.shared_memory or 1e7) > 1e6
    assert (rates.shared_memory is not None) == HAS_SHARED_MEMORY
    assert rates.cores >= 1


def test_matrix_products_are_counted_as_2_n_cubed_and_the_median_counts(monkeypatch):
    taken = iter([100.0, 1.0, 2.0, 5.0])
    products = []
    monkeypatch.setattr(machine, "_seconds", lambda work: products.append(work()) or next(taken))
    assert machine.measure_tflops(size=8, rounds=3) == pytest.approx(2 * 8**3 / 2.0 / 1e12)
    assert [(product.shape, product.dtype) for product in products] == [((8, 8), np.float32)] * 4


def test_the_median_of_rounds_counts_and_the_first_is_dropped(monkeypatch):
    class Crew:
        def run(self): ...
        def close(self): ...

    class Summed:
        def __init__(self, _): ...
        def run(self):
            return dict.fromkeys(("sum", "copy"), 1.0)

    taken = iter([100.0, 100.0, 1.0, 2.0, 5.0, 6.0, 3.0, 4.0])
    monkeypatch.setattr(machine, "pairs", lambda *_: {"tcp": Crew, "unix": Crew})
    monkeypatch.setattr(machine, "Sum", Summed)
    monkeypatch.setattr(machine, "_seconds", lambda _: next(taken))
    rates = measure_rates(elements=1000, rounds=3)
    assert (rates.tcp, rates.unix) == (8000 / 3.0, 8000 / 4.0)
