"""The whole step on several workers: the contract's sum on each, and what is left after a worker or a call failed."""

import itertools
import math
import threading

import numpy as np
import pytest
import strategies as draw
import windows
from backends import available
from devices import bits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import OPTIONS, holds_sums, on_grid, on_ranks, on_tcp

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient, local_group
from gradengine.errors import CallerError, ExchangeError, HandshakeRefused, PeerLost, WindowError

HOST = available("host")
SMALL = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})


def gradients_of(seed, layout=SMALL):
    return draw.random_gradients(seed, layout.slots)


def new_engine(exchange, layout=SMALL, **options):
    return GradientEngine(layout, exchange=exchange, **options)


def stepped(engine, *micro_batches):
    """The bytes that a window's step hands back."""
    for gradients in micro_batches or [gradients_of(engine.rank)]:
        engine.add(gradients)
    return bits_of(engine.step())


def undisturbed(world_size, **options):
    return on_ranks(lambda exchange: stepped(new_engine(exchange, **options)), world_size)


@st.composite
def parts_of(draws, layout, world_size):
    """Each rank's window, not all of them empty, and whether its last micro-batch says so or the engine knows."""
    found = [draws(windows.windows(layout, (0, 3), ways=("add", "parts", "components"))) for _ in range(world_size)]
    found[draws(st.integers(0, world_size - 1))] += [draws(windows.micro_batches(layout))]
    return found, draws(st.booleans())


def work_of(parts, layout, options, transport=on_ranks, **links):
    """Two windows, of which the second overwrites what the first left; what all ranks have to say of them."""
    windows_of_ranks, is_known = parts

    def work(exchange):
        window, told = windows_of_ranks[exchange.rank], {**options}
        told["micro_batches"] = len(window) if is_known and window else None
        engine, found = new_engine(exchange, layout, **told), []
        for _ in range(2):
            for position, micro_batch in enumerate(window):
                last = {"last": True} if position == len(window) - 1 and not is_known else {}
                for call in micro_batch.calls(layout, **last):
                    call(engine, HOST)
            if not window:
                engine.add(None, weight=0)
            result = engine.step()
            numbers = [result.norm, result.factor, result.weight, result.micro_batches, result.unused]
            found.append((result, numbers, bits_of(result)))
        return found

    return transport(work, len(windows_of_ranks), **links)


@settings(max_examples=40, phases=windows.PHASES)
@given(data=st.data())
def test_workers_of_any_kind_have_the_contracts_sum_in_the_order_of_their_ranks(data):
    """In whole or in parts that leave early; a rank without a micro-batch changes no bit."""
    layout, world_size = data.draw(draw.uneven_layouts(100)), data.draw(st.integers(1, 3))
    (parts, _), options = given_parts = data.draw(parts_of(layout, world_size)), data.draw(windows.options)
    outcomes = work_of(given_parts[0], layout, options, bucket_bytes=data.draw(st.sampled_from([64, 1 << 20])))
    for outcome in outcomes:
        assert [each[1:] for each in outcome] == [each[1:] for each in outcomes[0]]
    sums, weights = [], [windows.weight_of(window) for window in parts]
    for window, weight in zip(parts, weights, strict=True):
        mine = windows.sums_of(layout, window)
        if not window:
            mine = {name: -array for name, array in mine.items()}  # -0.0, which changes nothing
        elif options["average"] == "per_worker" and world_size > 1 and np.float32(1 / weight) != 1:
            mine = {name: array * np.float32(1 / weight) for name, array in mine.items()}
        sums.append(mine)
    divisors = {"weighted": sum(weights), "per_worker": sum(map(bool, parts)), "prescaled": world_size}
    divisor = divisors[options["average"]] if world_size > 1 or options["average"] == "prescaled" else weights[0]
    everything = [micro_batch for window in parts for micro_batch in window]
    for result, *_ in outcomes[0]:
        plan = {name: options[name] for name in ("max_norm", "groups")}
        windows.assert_step(result, layout, windows.summed(sums), divisor * options["loss_scale"], **plan)
        assert result.unused == windows.unused_of(layout, everything)
        assert (result.weight, result.micro_batches) == (pytest.approx(sum(weights), rel=1e-12), len(everything))


epochs = st.lists(st.lists(st.lists(st.tuples(draw.seeds, st.integers(1, 300)), min_size=1, max_size=3), max_size=3))


@settings(max_examples=25)
@given(st.integers(1, 4).flatmap(lambda size: st.lists(epochs, min_size=size, max_size=size)))
def test_ranks_with_unlike_numbers_of_batches_leave_each_epoch_together(ranks):
    """As in docs/how-to/token-weighted-accumulation.md; a step's gradient is the mean over all tokens of all ranks."""
    ranks = [[*mine[:2], [], []][:2] for mine in ranks]

    def work(exchange):
        engine, found = new_engine(exchange), []
        for epoch, mine in enumerate(ranks[exchange.rank]):
            for window in itertools.chain(mine, itertools.repeat([])):
                if not any(engine.all_gather_object(f"batches left in epoch {epoch}", len(window))):
                    break
                for seed, tokens in window:
                    engine.add(gradients_of(seed), weight=tokens)
                if not window:
                    engine.add(None, weight=0)
                result = engine.step()
                found.append((result.weight, result.micro_batches, {n: a.copy() for n, a in result.gradients.items()}))
        return found

    expected = []
    for epoch in zip(*ranks, strict=True):
        for windows_of_step in itertools.zip_longest(*epoch, fillvalue=[]):
            batches = [batch for window in windows_of_step for batch in window]
            weight = sum(tokens for _, tokens in batches)
            parts = [[tokens * np.float64(g) for g in gradients_of(seed)] for seed, tokens in batches]
            expected.append((weight, len(batches), [sum(each) / weight for each in zip(*parts, strict=True)]))
    for steps in on_ranks(work, len(ranks)):
        assert [step[:2] for step in steps] == [step[:2] for step in expected]
        for (*_, ours), (*_, theirs) in zip(steps, expected, strict=True):
            for one, other in zip(ours.values(), theirs, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_one_micro_batch_each_is_one_process_with_all_bit_for_bit_over_tcp_too():
    def work(exchange):
        return stepped(new_engine(exchange, max_norm=0.1))

    wanted = stepped(GradientEngine(SMALL, max_norm=0.1), gradients_of(0), gradients_of(1))
    assert on_ranks(work, 2) == on_tcp(work) == [wanted] * 2


class TestVerdicts:
    @pytest.mark.parametrize("policy", ["raise", "skip"])
    def test_a_bad_gradient_is_blamed_on_its_rank_everywhere_and_nobody_waits(self, policy):
        def work(exchange):
            engine, gradients = new_engine(exchange, on_non_finite=policy), gradients_of(exchange.rank)
            if exchange.rank == 1:
                gradients[1][3] = math.inf
            engine.add(gradients)
            found = []
            if policy == "skip":
                found = [engine.step().non_finite]
            else:
                for _ in range(3):  # a verdict can be asked for again
                    with pytest.raises(NonFiniteGradient) as caught:
                        engine.step()
                    found.append(caught.value)
                engine.discard()
            assert {(e.component, e.index, e.value, e.rank, e.step) for e in found} == {
                ("layers.1.w", 3, math.inf, 1, 0)
            }
            return stepped(engine), engine.current_step

        assert on_ranks(work, 3, timeout=5.0) == [(bits, 2) for bits in undisturbed(3)]

    def test_a_sum_that_overflows_is_nobodys_fault(self):
        def work(exchange):
            engine = new_engine(exchange, GradientLayout.of([(2,)]), on_non_finite="skip")
            engine.add([np.array([0, 3e38], np.float32)])
            found = engine.step().non_finite
            return found.rank, found.index

        assert on_ranks(work, 2) == [(None, 1)] * 2

    def test_nan_in_padding_is_nobodys_gradient(self):
        def work(exchange):
            engine = new_engine(exchange)
            engine.add(gradients_of(exchange.rank))
            if exchange.rank == 0:
                engine.accumulator.block(0).flatten()[20] = math.nan  # behind the 15 elements of layers.0.w
            return bits_of(engine.step())

        assert on_ranks(work, 2) == undisturbed(2)

    @pytest.mark.parametrize(
        ("average", "weights", "loss_scale"), [("weighted", (1.0, 1e30), 2.0**64), ("per_worker", (3e38, 3e38), 1.0)]
    )
    def test_a_divisor_that_cannot_be_is_refused_by_all_alike(self, average, weights, loss_scale):
        def work(exchange):
            engine = new_engine(exchange, average=average, loss_scale=loss_scale)
            engine.add(gradients_of(0), weights[exchange.rank])
            for call in (engine.accumulator.average, engine.step)[average == "weighted" :]:
                with pytest.raises(WindowError, match="out of range"):
                    call()
            engine.discard()
            return stepped(engine, gradients_of(0))

        first, second = on_ranks(work, 2)
        assert first == second


SETTINGS = {
    "max_norm": ({"max_norm": 1.0}, {"groups": "block"}),
    "average": ({"average": "prescaled"}, {"average": "per_worker"}),
    "loss_scale": ({"loss_scale": 1.0}, {"loss_scale": 2.0}),
    "on_non_finite": ({"on_non_finite": "skip"}, {"on_non_finite": "raise"}),
}


class TestDisagreement:
    @pytest.mark.parametrize("name", SETTINGS)
    def test_settings_that_differ_are_an_error_on_every_rank(self, name):
        def work(exchange):
            engine = new_engine(exchange, **SETTINGS[name][exchange.rank])
            engine.add(gradients_of(0))
            engine.step()

        for error in on_ranks(work, 2):
            assert isinstance(error, ExchangeError)
            assert f"{name} than rank 0" in str(error)

    def test_a_setting_that_was_put_right_is_taken_by_the_next_group_and_a_loss_scale_by_the_next_step(self):
        second = local_group(2, **OPTIONS)

        def work(exchange):
            with pytest.raises(HandshakeRefused, match="average"):
                new_engine(exchange, average=["weighted", "prescaled"][exchange.rank])
            engine = new_engine(second[exchange.rank], average="weighted", loss_scale=2.0)
            engine.add(gradients_of(exchange.rank))
            with pytest.raises(ExchangeError, match="loss_scale"):
                engine.step(loss_scale=[1.0, 2.0][exchange.rank])
            return bits_of(engine.step(loss_scale=1.0))

        assert on_ranks(work, 2) == undisturbed(2)

    def test_layouts_that_differ_are_shown_on_every_rank(self):
        other = GradientLayout.of({"layers.0.w": (5, 3), "layers.1.w": (7,), "head": (1,)})
        for error in on_ranks(lambda e: new_engine(e, other if e.rank == 2 else SMALL), 3):
            assert isinstance(error, HandshakeRefused)
            assert "(5, 3)" in str(error)
            assert "(3, 5)" in str(error)

    def test_who_has_nothing_says_so_or_takes_no_part(self):
        """Else one that called step() once too often would join the others' next one."""

        def work(exchange):
            engine, weights = new_engine(exchange), []
            for step in range(2):
                engine.add(gradients_of(step))
                weights.append(engine.step().weight)
                if exchange.rank == 1:
                    with pytest.raises(WindowError, match=r"add\(None, weight=0\)"):
                        engine.step()
            for step in (2, 3):  # of nobody's a step is an error on each, and the next one goes on
                engine.add(None, weight=0)
                with pytest.raises(WindowError, match=f"got 0 micro-batches on each of {exchange.world_size} ranks"):
                    engine.step()
                assert engine.current_step == step + 1
            engine.add(None, weight=0)
            engine.discard()
            assert not engine.has_open_window
            return [*weights, stepped(engine, gradients_of(0))]

        assert on_ranks(work, 2) == [[2.0, 2.0, stepped(GradientEngine(SMALL), gradients_of(0))]] * 2

    def test_what_it_writes_to_a_block_counts_and_all_else_is_negative_zero(self):
        def work(exchange):
            engine = new_engine(exchange, average="prescaled", micro_batches=1)
            if exchange.rank == 0:
                engine.add([np.full(slot.shape, -0.0, np.float32) for slot in SMALL.slots])
            else:
                engine.add(None, weight=0)
                engine.accumulator.block(0).accumulate([np.full((3, 5), 10, np.float32)])
            w0, *rest = engine.step().gradients.values()
            return w0.max(), [np.signbit(array).all() for array in rest]

        assert on_ranks(work, 2) == [(5.0, [True, True])] * 2

    def test_in_a_grid_the_norm_is_that_of_the_model_of_those_that_have_something(self):
        partitions = {"w": "column", "b": "replicated"}

        def work(workers, parts):
            layout = GradientLayout.of({"w": (4,), "b": (2,)}, tp_rank=parts.rank, tp_size=2, partitions=partitions)
            engine = new_engine(workers, layout, tp_exchange=parts, max_norm=1.0)
            if workers.rank == 1:
                engine.add([np.full(4, 3 + parts.rank, np.float32), np.full(2, 2, np.float32)])
            else:
                engine.add(None, weight=0)
            result = engine.step()
            return result.norm, result.weight, result.micro_batches, bits_of(result)["b"]

        (_, (norm, *_, bits)), *_ = grid = on_grid(work, 2, 2)
        assert norm == pytest.approx(math.sqrt(4 * 9 + 4 * 16 + 2 * 4))
        assert grid == [[(norm, 1.0, 1, bits)] * 2] * 2


class TestFaults:
    def test_a_rank_that_leaves_fails_the_others_and_loses_nothing(self):
        def work(exchange):
            engine, gradients = new_engine(exchange), gradients_of(exchange.rank)
            engine.add(gradients)
            if exchange.rank == 1:
                exchange.close()
                return None
            with pytest.raises(PeerLost, match="rank 1 is gone"):
                engine.step()
            with pytest.raises(WindowError, match="failed"):
                engine.add(gradients)
            return [array.tobytes() for array in engine.accumulator.views().values()]

        kept = [[array.tobytes() for array in gradients_of(rank)] for rank in range(3)]
        assert on_ranks(work, 3) == [kept[0], None, kept[2]]

    def test_a_window_of_which_something_is_summed_is_lost_on_all_ranks_and_its_number_is_used_again(self):
        """All ranks break off mid-step with some spans summed; after discard() they accumulate the window again."""
        layout = GradientLayout.transformer(2, 8, 4, 12, 16)
        spans, begun, never = [span.key for span in layout.spans], [], threading.Event()

        def begin(exchange):
            engine = new_engine(exchange, layout, max_norm=0.5)
            engine.add(gradients_of(exchange.rank, layout), weight=1.0 + exchange.rank)
            return engine

        def broken(exchange):
            engine = begin(exchange)
            begun.append(engine)
            if exchange.rank == 1:  # contributes two spans, then its network is gone
                engine.accumulator.close()
                engine._reducer.start(span for span in layout.spans if span.key in spans[:2])
                while not (len(begun) == 3 and all(map(holds_sums, begun))):
                    assert not never.wait(0.001)
                exchange.close()
                return engine
            with pytest.raises((PeerLost, ExchangeError)):
                engine.step()
            return engine

        second = local_group(3, **OPTIONS)

        def again(exchange):
            engine = engines[exchange.rank]
            assert holds_sums(engine)
            with pytest.raises(HandshakeRefused, match=r"the window of step 0 is lost: rank 0 holds sums.*discard\(\)"):
                engine.reconnect(exchange)
            engine.discard()
            engine.reconnect(second[exchange.rank])
            engine.add(gradients_of(exchange.rank, layout), weight=1.0 + exchange.rank)
            return engine.current_step, bits_of(engine.step())

        engines = on_ranks(broken, 3, bucket_bytes=64)
        assert all(isinstance(engine, GradientEngine) for engine in engines), engines
        assert on_ranks(again, 3, bucket_bytes=64) == on_ranks(lambda e: (0, bits_of(begin(e).step())), 3)

    @pytest.mark.parametrize("transport", [on_ranks, on_tcp])
    def test_a_window_discarded_before_it_travels_leaves_the_group_whole(self, transport):
        def work(exchange):
            engine = new_engine(exchange)
            engine.add(gradients_of(7))
            engine.discard()
            found = stepped(engine)
            exchange.barrier()
            return found, engine.current_step

        found = on_ranks(work, 2) if transport is on_ranks else on_tcp(work)
        assert found == [(bits, 1) for bits in undisturbed(2)]

    def test_a_window_discarded_on_its_way_closes_the_exchange(self):
        def work(exchange):
            engine = new_engine(exchange, micro_batches=1)
            engine.add(gradients_of(exchange.rank))
            if exchange.rank == 1:
                engine.discard()
            return engine

        def again(exchange):
            engine = engines[exchange.rank]
            engine.discard()
            engine.reconnect(exchange)
            return stepped(engine)

        engines = on_ranks(work, 2, timeout=2.0)
        assert on_ranks(again, 2) == undisturbed(2)

    def test_what_has_left_takes_no_more_and_is_not_written_to(self):
        """It would be handed back by this rank alone, and not be measured."""

        def work(exchange):
            engine, (w0, w1, head) = new_engine(exchange, micro_batches=1), gradients_of(exchange.rank)
            with pytest.raises(WindowError, match="has started nothing"):
                exchange.wait()
            engine.add_non_block("head", head)
            block = engine.accumulator.block(0)
            engine.add_block(1, [w1])
            engine.add_block(0, [w0], last=True)
            ways = [lambda: block.accumulate([w0]), block.zero, lambda: block.scale(2)]
            ways += [lambda: block.from_flat(block.flatten().copy()), engine.accumulator.views]
            for way in (*ways, lambda: engine.add([w0, w1, head])):
                with pytest.raises(WindowError, match="was sent"):
                    way()
            return bits_of(engine.step())

        assert on_ranks(work, 2) == undisturbed(2)

    def test_an_uneven_window_does_not_travel_before_it_is_whole(self):
        def work(exchange):
            engine, (w0, w1, head) = new_engine(exchange, micro_batches=2), gradients_of(exchange.rank)
            engine.add_block(0, [w0])
            engine.add([w0, w1, head])
            with pytest.raises(WindowError, match="lacks part of the window"):
                engine.step()
            engine.add_block(1, [w1])
            engine.add_non_block("head", head)
            return engine.step().micro_batches

        assert on_ranks(work, 2) == [4, 4]

    def test_the_exchanges_seconds_are_among_the_metrics(self):
        def work(exchange):
            engine = new_engine(exchange)
            engine.add(gradients_of(0))
            metrics = engine.step().metrics()
            exchange.barrier()
            return metrics

        for metrics in on_ranks(work, 2):
            assert metrics["exchange_seconds"] > 0
            assert metrics["exchange_seconds"] >= metrics["exchange_hidden_seconds"] >= 0


@pytest.mark.parametrize("name", ["exchange", "tp_exchange"])
def test_an_address_in_place_of_an_exchange_is_refused_with_the_call_that_makes_one(name):
    with pytest.raises(CallerError, match=rf"^{name} is not an Exchange: got str; pass connect\(url, \.\.\.\)$"):
        GradientEngine(SMALL, **{name: "tcp://127.0.0.1:1"})


def test_alone_in_a_group_a_worker_that_has_nothing_is_told():
    engine = new_engine(local_group(1)[0])
    engine.add(None, weight=0)
    with pytest.raises(WindowError, match="got 0 micro-batches on each of 1 ranks"):
        engine.step()


def test_a_text_takes_one_answer_in_a_step_and_other_facts_are_refused():
    def work(exchange):
        engine = new_engine(exchange)
        for facts in (1.0, math.nan, (2, "a")):
            first = engine.all_gather_object(f"loss {facts}", facts)
            assert str(engine.all_gather_object(f"loss {facts}", facts)) == str(first)
        with pytest.raises(CallerError, match=r"loss 1.0. was already"):
            engine.all_gather_object("loss 1.0", 2.0)
        return stepped(engine), engine.all_gather_object("loss 1.0", 2.0)

    found = on_ranks(work, 2)
    assert found[0] == found[1]
    assert found[0][1] == [2.0, 2.0]
