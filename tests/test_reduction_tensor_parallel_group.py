"""Parts of a model find one norm: sharded is unsharded on any grid, or an error says why not."""

import contextlib
import itertools
import math
import types

import cuda_emulator
import msgpack
import numpy as np
import pytest
import strategies as draw
from devices import bits_of, number_of, on_host, put_all
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_grid, on_ranks
from transports import SOON, outcomes

from gradengine import (
    CallerError,
    DistributedTrainer,
    ExchangeError,
    GradientEngine,
    GradientLayout,
    NonFiniteGradient,
    local_group,
)
from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.errors import DeadlineExceeded, HandshakeRefused, PeerLost, ProtocolError, WindowError
from gradengine.exchange.gather import gathered, packed
from gradengine.reduction.stats import TensorParallelGroup, _InGroup

pytestmark = pytest.mark.timeout(150)
# Sizes of one rank's part, and whether ranks hold different elements. Empty ones too; two blocks, and others.
SIZES = {"layers.0.w": 4, "layers.0.norm": 3, "layers.1.w": 5, "none": 0, "cut": 0, "norm": 8}
CUT = {"layers.0.w": "column", "layers.1.w": "row", "cut": "column"}
PARTITIONS = {name: CUT.get(name, "replicated") for name in SIZES}
NAMES = [name for name, size in SIZES.items() if size]


def layout_of(tp_rank, tp_size, **sizes):
    shapes = {name: (size,) for name, size in {**SIZES, **sizes}.items()}
    return GradientLayout.of(shapes, tp_rank=tp_rank, tp_size=tp_size, partitions=PARTITIONS)


def whole_layout(tp_size):
    return GradientLayout.of({name: (size * (tp_size if name in CUT else 1),) for name, size in SIZES.items()})


def eighths(rng, size):
    return rng.integers(-31, 32, size).astype(np.float32) / 8


def whole(worker, k, tp_size=2):
    """A worker's k-th micro-batch, whose squares and sums are exact; of one component the last rank has nothing."""
    rng = np.random.default_rng([worker, k])
    gradients = {slot.name: eighths(rng, slot.size) for slot in whole_layout(tp_size).slots}
    if tp_size > 1:
        gradients["layers.0.w"][-SIZES["layers.0.w"] :] = 0
    return gradients


def part(gradients, t, tp_size=2):
    """What a rank's backward gives: its shards, and replicated components whole."""
    return {name: _held(name, array, t, tp_size) for name, array in gradients.items()}


def _held(name, array, t, tp_size):
    if name not in CUT:
        return array.copy()
    mine = np.split(array, tp_size)[t].copy()
    return None if name == "layers.0.w" and t and not mine.any() else mine


def merged(parts):
    """Bytes of whole arrays from the arrays of all ranks of a group, in rank order; replicas must be alike."""
    found = {}
    for name in SIZES:
        pieces = [each[name] for each in parts]
        assert name in CUT or len(set(pieces)) == 1
        found[name] = b"".join(pieces) if name in CUT else pieces[0]
    return found


def figures(result):
    """What all ranks must agree on, bit for bit."""
    numbers = (result.norm, result.scale, float(result.factor), result.weight, result.micro_batches)
    return numbers, result.block_norms, result.component_norms, dict(result.group_norms), result.unused


def engine_of(t, tp_exchange=None, exchange=None, tp_size=2, **options):
    options = {"exchange": exchange, "tp_exchange": tp_exchange, "max_norm": 1.0, **options}
    return GradientEngine(layout_of(t, tp_size), **options)


def norm_of(engine, *windows):
    """The norm of the last of some windows with one micro-batch each."""
    for gradients in windows:
        engine.add(gradients)
        norm = engine.step().norm
    return norm


def flat(rows):
    return list(itertools.chain(*rows))


shapes = st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)])
all_options = st.fixed_dictionaries(
    {
        "average": st.sampled_from(["weighted", "per_worker", "prescaled"]),
        "max_norm": st.sampled_from([None, 1.0, 1e6]),
    },
    optional={
        "groups": st.sampled_from(["block", "component", "deferred"]),
        "micro_batches": st.just(2),
        "loss_scale": st.just(4.0),
    },
)


class TestUnsharded:
    @given(shapes, st.sets(st.sampled_from(NAMES), max_size=2), all_options)
    @settings(max_examples=40)
    def test_is_what_parts_find_bit_for_bit(self, shape, lacks, options):
        (dp_size, tp_size), deferred = shape, options.get("groups") == "deferred"
        options = {name: value for name, value in options.items() if value != "deferred"}

        def steps(layout, d, held, **exchanges):
            engine, found = GradientEngine(layout, **exchanges, **options), []
            for step in range(2):
                for k in (0, 1):
                    gradients = held(whole(d, 2 * step + k, tp_size))
                    gradients |= dict.fromkeys(lacks)
                    engine.add(gradients, weight=(1.0, 3.0 + 4 * d)[k])
                result = engine.step(deferred=deferred)
                found.append((figures(result), bits_of(result)))
            return found

        def of_part(exchange, tp_exchange):
            t = tp_exchange.rank
            exchanges = {"exchange": exchange, "tp_exchange": tp_exchange}
            return steps(layout_of(t, tp_size), exchange.rank, lambda g: part(g, t, tp_size), **exchanges)

        wanted = on_ranks(lambda e: steps(whole_layout(tp_size), e.rank, dict, exchange=e), dp_size)
        for row in on_grid(of_part, dp_size, tp_size):
            for step, (numbers, bits) in enumerate(wanted[0]):
                assert [rank[step][0] for rank in row] == [numbers] * tp_size
                assert merged([rank[step][1] for rank in row]) == bits

    def test_is_what_parts_find_on_a_device(self, device):
        def step(held, exchange=None, tp_size=2):
            engine = engine_of(exchange.rank if exchange else 0, exchange, None, tp_size, device=device.kernels)
            engine.add(put_all(device, held))
            result = engine.step()
            return (number_of(result.norm), number_of(result.factor)), bits_of(result)

        unsharded = GradientEngine(whole_layout(2), max_norm=1.0)
        unsharded.add(whole(0, 0))
        wanted = unsharded.step()
        found = on_ranks(lambda e: step(part(whole(0, 0), e.rank), e), 2)
        assert [numbers for numbers, _ in found] == [pytest.approx((wanted.norm, float(wanted.factor)), rel=1e-6)] * 2
        clipped = (np.frombuffer(bits, np.float32) for bits in merged([bits for _, bits in found]).values())
        for got, expected in zip(clipped, wanted.gradients.values(), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)


all_places = st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(0, 1))
poison = st.tuples(st.integers(0, 2), st.sampled_from([math.nan, math.inf, -math.inf]))
all_poisons = st.dictionaries(st.sampled_from(NAMES), poison, min_size=1, max_size=2)


UNREADABLE = [[], 7, "text", [None] * 4, *([position, 0, 1.0, None] for position in (-1, len(SIZES), "norm", True))]
UNREADABLE += [[0, *rest] for rest in (["x", 1.0, None], [0, "x", 0], [0, 1.0, "x"], [0, 1.0], [0, 1.0, 0, 0])]


class TestNonFinite:
    @given(all_places, st.sampled_from(["raise", "skip", "propagate"]), all_poisons)
    @settings(max_examples=40)
    def test_is_found_by_all_alike_and_the_next_step_is_good(self, places, policy, poisons):
        """Of what both parts of a worker found the first in the layout is named, with worker and part."""
        dp_size, bad_worker = places[0], places[1] % places[0]
        poisons = {name: (*bad, (places[2] + i) % 2) for i, (name, bad) in enumerate(poisons.items())}

        def work(exchange, tp_exchange):
            d, t = exchange.rank, tp_exchange.rank
            engine = engine_of(t, tp_exchange, exchange, on_non_finite=policy)
            bad, good = (part(whole(d, k), t) for k in (0, 1))
            for name, (index, value, bad_part) in poisons.items():
                if (bad_worker, bad_part) == (d, t):
                    bad[name] = np.zeros(SIZES[name], np.float32) if bad[name] is None else bad[name]
                    bad[name][index] = value
            engine.add(bad)
            norms = None
            if policy == "raise":
                for _ in range(2 if (d, t) == (0, 0) else 1):  # told again without a word to the others
                    with pytest.raises(NonFiniteGradient) as caught:
                        engine.step()
                found = caught.value
                with pytest.raises(WindowError):
                    engine.add(good)
                engine.discard()
            else:
                result = engine.step()
                assert result.skipped is (policy == "skip")
                assert policy != "skip" or not any(gradient.any() for gradient in result.gradients.values())
                found, norms = result.non_finite, result.component_norms
            told = found.component, found.index, str(found.value), found.rank, found.tp_rank
            return told, norms, norm_of(engine, good)

        rows = flat(on_grid(work, dp_size, 2))
        name = next(name for name in SIZES if name in poisons)
        index, value, t = poisons[name]
        assert {told for told, *_ in rows} == {(name, index, str(value), bad_worker if dp_size > 1 else None, t)}
        bad, good = ([whole(d, k) for d in range(dp_size)] for k in (0, 1))
        assert len({norm for *_, norm in rows}) == 1
        assert rows[0][-1] == pytest.approx(norm_of_workers(good), rel=1e-6)
        if policy == "propagate":
            finite = [n for n in SIZES if n not in poisons]
            expected = {n: draw.exact_norm([sum(g[n] for g in bad) / dp_size]) for n in finite}
            for _, norms, _ in rows:
                assert {n: norms[i] for i, n in enumerate(SIZES) if n in finite} == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("found", UNREADABLE, ids=range(len(UNREADABLE)))
    def test_finding_of_another_rank_is_read_with_care(self, found):
        told = msgpack.packb(["finding in step 3", found])
        tell = lambda *facts: gathered([packed(*facts), told])  # noqa: E731
        group = TensorParallelGroup(PerBlockGradientAccumulator(layout_of(0, 2)))
        group.exchange, group.is_alone = types.SimpleNamespace(world_size=2, tell=tell), False
        with pytest.raises(ProtocolError, match="rank 1"):
            group.first_found(None, 3)


class TestRefused:
    @pytest.mark.parametrize(
        ("of_rank_1", "kind", "word"),
        [
            ({"factor": 3}, ExchangeError, "'layers.0.norm'"),
            *(({"share": share}, ExchangeError, "'norm'") for share in (1.001, 1e-6, 0)),
            *(({"weights": weights}, ExchangeError, "window") for weights in ([2], [1] * 8, [1] * 8 + [2])),
            ({"max_norm": 2.0}, HandshakeRefused, "max_norm"),
            ({"sizes": {"layers.0.w": 6}}, HandshakeRefused, "layers.0.w"),
            ({"partitions": {**PARTITIONS, "norm": "column"}}, HandshakeRefused, "norm"),
        ],
    )
    def test_another_part_is_named_on_all_ranks(self, of_rank_1, kind, word):
        given = {"factor": 1, "share": 1, "weights": [1] * 9 if word == "window" else [1], "max_norm": 1.0}
        given |= {"sizes": {}, "partitions": PARTITIONS}

        def work(exchange):
            it = types.SimpleNamespace(**given | (of_rank_1 if exchange.rank else {}))
            shapes = {name: (size,) for name, size in {**SIZES, **it.sizes}.items()}
            layout = GradientLayout.of(shapes, tp_rank=exchange.rank, tp_size=2, partitions=it.partitions)
            engine = GradientEngine(layout, tp_exchange=exchange, max_norm=it.max_norm)
            gradients = part(whole(0, 0), exchange.rank)
            gradients["layers.0.norm"] *= np.float32(it.factor)
            gradients["norm"] *= np.float32(1e-3 * it.share)
            for weight in it.weights:
                engine.add(gradients, weight=weight)
            engine.step()

        for error in outcomes(work, local_group(2, timeout=SOON, join_timeout=SOON)):
            assert type(error) is kind
            assert str(error).startswith("in the tensor-parallel group: ")
            assert word in str(error)

    def test_replica_that_differs_by_rounding_is_the_same(self):
        def work(exchange):
            mine = part(whole(0, 0), exchange.rank)
            mine["norm"] *= np.float32(1 + exchange.rank * 2.0**-23)
            return norm_of(engine_of(exchange.rank, exchange), mine)

        first, second = on_ranks(work, 2)
        assert first == second

    @pytest.mark.parametrize(
        ("of_worker_1", "kind", "word"),
        [
            ({"tp_exchange": None}, HandshakeRefused, "tensor-parallel group"),
            ({"crossed": True}, HandshakeRefused, "tp_rank"),
        ],
    )
    def test_another_worker_is_named_on_the_whole_grid(self, of_worker_1, kind, word):
        def work(exchange, tp_exchange):
            given = {"tp_exchange": tp_exchange, **(of_worker_1 if exchange.rank else {})}
            t = (tp_exchange.rank + given.pop("crossed", False)) % 2
            if word == "tp_rank":
                given["tp_exchange"] = None
            norm_of(engine_of(t, exchange=exchange, max_norm=None, **given), part(whole(0, 0), t))

        for error in flat(on_grid(work, 2, 2)):
            assert type(error) is kind
            assert word in str(error)

    def test_callers_mistakes(self):
        pair, four = local_group(2), local_group(4)
        for options in (
            {"exchange": pair[0], "tp_exchange": pair[0]},
            {"tp_exchange": pair[1]},
            {"tp_exchange": four[0]},
            {"tp_exchange": pair[0], "tp_size": 1},
            *({}, {"max_norm": None, "on_non_finite": "skip"}),  # nobody knows the whole model's norm
            {"groups": "block", "max_norm": {"layers.0": math.inf, "layers.1": math.inf, "rest": 2.0}},
        ):
            with pytest.raises(CallerError):
                engine_of(0, **options)

    def test_step_with_parts_is_not_captured(self, device):
        def work(exchange):
            engine = GradientEngine(layout_of(exchange.rank, 2), device.kernels, tp_exchange=exchange, max_norm=1.0)
            with pytest.raises(CallerError):
                engine.capture().__enter__()

        assert on_ranks(work, 2) == [None, None]


class Faulty:
    """An exchange that is lost at its n-th call of one kind, as a peer's death would be noticed there."""

    def __init__(self, exchange, call, count=1):
        self.exchange, self.call, self.left = exchange, call, count

    def __getattr__(self, name):
        return getattr(self.exchange, name)

    def tell(self, what, facts):
        return self._called("all_gather", lambda: self.exchange.tell(what, facts))

    def wait(self):
        return self._called("wait", self.exchange.wait)

    def all_gather(self, data):
        return self._called("all_gather", lambda: self.exchange.all_gather(data))

    def _called(self, name, call):
        self.left -= name == self.call
        if name == self.call and self.left == 0:
            self.exchange.close()
            raise PeerLost("the line went dead")
        return call()


def norm_of_workers(gradients):
    """The norm of a step in which each worker has one micro-batch of weight 1."""
    return draw.exact_norm([sum(each[name] for each in gradients) / len(gradients) for name in SIZES])


def spare_groups():
    return [local_group(2, timeout=SOON) for _ in range(2)]


class TestRunAgain:
    def test_a_step_that_lost_its_parts_gives_the_bytes_of_an_undisturbed_one(self):
        """On rank (1, 1) of the grid; its row reconnects and steps again, and the workers' sums are still here."""

        def work_with(is_disturbed):
            spares = spare_groups()

            def work(exchange, tp_exchange):
                d, t = exchange.rank, tp_exchange.rank
                lost = Faulty(tp_exchange, "all_gather") if is_disturbed and (d, t) == (1, 1) else tp_exchange
                engine, failures = engine_of(t, lost, exchange), 0
                for step in range(2):
                    engine.add(part(whole(d, step), t))
                    try:
                        result = engine.step()
                    except PeerLost:
                        failures += 1
                        with pytest.raises(WindowError):
                            engine.add(part(whole(d, step), t))
                        engine.reconnect(tp_exchange=spares[d][t])
                        result = engine.step()
                return failures, figures(result), engine.accumulator.memory.data.tobytes()

            return flat(on_grid(work, 2, 2))

        calm, disturbed = work_with(is_disturbed=False), work_with(is_disturbed=True)
        assert [failures for failures, *_ in disturbed] == [0, 0, 1, 1]
        assert [rest for _, *rest in disturbed] == [rest for _, *rest in calm]

    @pytest.mark.parametrize("is_bad", [False, True])
    def test_a_window_whose_workers_were_lost_after_the_sums_is_lost_on_all_ranks(self, is_bad):
        """Before the workers agree, or while the finder of a NaN is told; the next window is whole again."""
        columns, rows = [spare_groups() for _ in range(2)], [spare_groups() for _ in range(2)]

        def work(data_parallel, tensor_parallel):
            d, t = data_parallel.rank, tensor_parallel.rank
            exchange = data_parallel if is_bad else Faulty(data_parallel, "all_gather")
            tp_exchange = Faulty(tensor_parallel, "all_gather", count=2) if is_bad else tensor_parallel
            engine, gradients = engine_of(t, tp_exchange, exchange), part(whole(d, 7), t)
            gradients["norm"][0] = math.nan if is_bad else 1.0
            engine.add(gradients)
            with pytest.raises(PeerLost):
                engine.step()
            engine.exchange.close()
            engine.tp_exchange.close()
            with pytest.raises(HandshakeRefused, match="the window of step 0 is lost"):
                engine.reconnect(columns[0][t][d], tp_exchange=rows[0][d][t])
            engine.discard()
            engine.reconnect(columns[1][t][d], tp_exchange=rows[1][d][t])
            return norm_of(engine, part(whole(d, 0), t))

        found = flat(on_grid(work, 2, 2))
        assert found == [found[0]] * 4
        assert found[0] == pytest.approx(norm_of_workers([whole(d, 0) for d in (0, 1)]), rel=1e-6)

    @pytest.mark.parametrize("is_made", [False, True])
    def test_a_step_that_one_column_dropped_is_not_mixed_with_the_others_next(self, is_made):
        """One column loses its workers and drops the window; the other has made the step, or waits in it."""
        spares = spare_groups()

        def work(data_parallel, tensor_parallel):
            d, t = data_parallel.rank, tensor_parallel.rank
            is_dropping = t == is_made
            if is_dropping:
                data_parallel = Faulty(data_parallel, "all_gather" if is_made else "wait")
            engine, gradients = engine_of(t, tensor_parallel, data_parallel), part(whole(0, 0), t)
            engine.add(gradients)
            if is_dropping:
                with pytest.raises(PeerLost):
                    engine.step()
                engine.discard()
                engine.reconnect(spares[t][d])
            elif is_made:
                engine.step()
            if is_dropping or is_made:
                engine.add(gradients)
            engine.step()

        assert {*map(type, flat(on_grid(work, 2, 2)))} == {PeerLost}


class TestLost:
    def test_the_trainer_finishes_a_step_whose_parts_lost_each_other(self):
        """Only row 0 loses its group; the other row is in the step already, past the exchange of the losses."""
        spare_row = local_group(2, timeout=SOON)

        def work(data_parallel, tensor_parallel):
            d, t = data_parallel.rank, tensor_parallel.rank
            applied = []
            local = types.SimpleNamespace(
                forward_backward=lambda batch: (float(d), part(whole(d, batch), t)),
                apply_gradients=lambda gradients: applied.append(gradients["norm"].tobytes()),
            )
            row = Faulty(tensor_parallel, "all_gather") if (d, t) == (0, 1) else tensor_parallel
            trainer = DistributedTrainer(local, data_parallel, layout_of(t, 2), tp_exchange=row, max_norm=1.0)
            try:
                loss = trainer.train_batch([0])
            except PeerLost:
                trainer.engine.reconnect(tp_exchange=spare_row[t])
                loss = trainer.finish_step()
            return loss, trainer.train_batch([1]), *applied

        found = flat(on_grid(work, 2, 2))
        assert found == [found[0]] * 4
        assert found[0][:2] == (0.5, 0.5)


def test_on_a_device_what_is_the_same_costs_no_copy(emulated):
    """The whole model's norm needs the squared sums alone; gradients stay where they are."""

    def work(exchange):
        engine = GradientEngine(layout_of(exchange.rank, 2), emulated.kernels, tp_exchange=exchange, max_norm=1.0)
        gradients = put_all(emulated, part(whole(0, 0), exchange.rank))
        engine.add(gradients)
        engine.step()
        engine.add(gradients)
        exchange.barrier()  # the other rank's arrays are there too
        with contextlib.nullcontext() if exchange.rank else cuda_emulator.recorded() as record:
            result = engine.step()
            exchange.barrier()
        return record, on_host(result.gradients["norm"]).tobytes()

    (record, first), (_, second) = on_ranks(work, 2)
    assert record.allocations == record.pinned_allocations == []
    assert set(record.copies) <= {"device to host"}
    assert first == second


def test_in_a_group_an_error_keeps_its_kind_and_what_to_do_and_is_named_once_for_each_rank():
    """A local group's failure is one object for all its threads; other errors pass as they are."""
    shared = DeadlineExceeded("rank 1 is late", got="nothing", expected="something", do="see what it does")
    for _ in range(2):
        with pytest.raises(DeadlineExceeded) as caught, _InGroup():
            raise shared
        assert str(caught.value) == f"in the tensor-parallel group: {shared}"
        assert caught.value.__cause__ is shared
    other = NonFiniteGradient("w", 0, 1.0, step=0)
    with pytest.raises(NonFiniteGradient) as caught, _InGroup():
        raise other
    assert caught.value is other
