"""A micro-batch that comes component by component: the same bits as one that comes whole, whatever the order."""

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import strategies as draw
from devices import bits_of, put_all
from hypothesis import given
from hypothesis import strategies as st
from interrupts import interrupted_at, places_of
from ranks import on_ranks

from gradengine import GradientEngine, GradientLayout
from gradengine.accumulate.state import State
from gradengine.errors import BufferRefused, LayoutMismatch, PeerLost, WindowError

LAYOUT = GradientLayout.of({"norm": (3,), "layers.0.w": (4, 2), "layers.0.b": (2,), "layers.1.w": (33,), "head": (2,)})
TWO = GradientLayout.of({"w": (1,), "b": (1,)})
NAMES = [slot.name for slot in LAYOUT.slots]


def gradients_of(seed, layout=LAYOUT):
    return dict(zip([s.name for s in layout.slots], draw.random_gradients(seed, layout.slots), strict=True))


def come(engine, gradients, weight=1.0, order=None, **options):
    """Add a micro-batch component by component; what has no gradient does not come."""
    with engine.micro_batch(weight, **options) as micro_batch:
        for name in order or gradients:
            if gradients[name] is not None:
                micro_batch.add(name, gradients[name])


def come_until(engine, *parts, then=lambda: None):
    """Add these components, and do what follows before its end."""
    with engine.micro_batch() as micro_batch:
        for name, gradient in parts:
            micro_batch.add(name, gradient)
        then()


def fail_by(fault):
    raise fault


def left(engine):
    return engine._reducer.workers.started


class TestOneWorker:
    @given(st.data())
    def test_whatever_the_order_the_bits_are_those_of_whole_micro_batches(self, data):
        layout = data.draw(draw.uneven_layouts(100))
        names, options = [slot.name for slot in layout.slots], {"max_norm": 0.5, "hold": data.draw(st.integers(1, 3))}
        count = data.draw(st.integers(1, 4))
        options["micro_batches"] = data.draw(st.sampled_from([None, count]))
        apart, whole = (GradientEngine(layout, **options) for _ in range(2))
        for window in range(2):
            for k in range(count):
                used = data.draw(st.sets(st.sampled_from(names), min_size=1))
                gradients = gradients_of([window, k], layout)
                gradients = {name: gradients[name] if name in used else None for name in names}
                weight = data.draw(draw.weights)
                whole.add(gradients, weight)
                if data.draw(st.integers(0, 3)) == 0:  # by hand in between
                    apart.add(gradients, weight)
                else:
                    come(apart, gradients, weight, data.draw(st.permutations(names)))
            results = [apart.step(), whole.step()]
            assert bits_of(results[0]) == bits_of(results[1])
            assert results[0].norm == results[1].norm
            assert results[0].unused == results[1].unused
            assert results[0].weight == results[1].weight

    @pytest.mark.parametrize("hold", [1, 2, 4])
    @pytest.mark.parametrize("known", [True, False])
    def test_on_every_device(self, backend, hold, known):
        engines = [
            GradientEngine(LAYOUT, backend.kernels, max_norm=0.1, hold=hold, micro_batches=3 if known else None)
            for _ in range(2)
        ]
        kept = [put_all(backend, gradients_of(k)) for k in range(3)]
        for k, gradients in enumerate(kept):
            come(engines[0], gradients, k + 1.0, order=NAMES[k:] + NAMES[:k])
            engines[1].add(gradients, k + 1.0)
        results = [engine.step() for engine in engines]
        assert bits_of(results[0]) == bits_of(results[1])
        assert float(results[0].norm) == float(results[1].norm)

    @pytest.mark.parametrize("hold", [1, 3])
    @pytest.mark.parametrize("known", [1, None])
    def test_a_component_that_comes_twice_is_added_and_counts_once(self, backend, hold, known):
        engine = GradientEngine(TWO, backend.kernels, hold=hold, micro_batches=known)
        values = put_all(backend, [np.float32([value]) for value in (3, 8, 5)])
        with engine.micro_batch(2.0) as micro_batch:
            micro_batch.add("w", values[0])
            micro_batch.add("b", values[1])
            micro_batch.add("w", values[2])
        result = engine.step()
        assert (result.micro_batches, result.weight) == (1, 2.0)
        assert [float(g[0]) for g in result.gradients.values()] == [8.0, 8.0]
        assert float(result.norm) == pytest.approx(128**0.5)

    def test_it_is_said_at_step_what_the_losses_were_multiplied_by(self):
        engine = GradientEngine(GradientLayout.of({"w": (1,)}))
        engine.add([np.float32([8])])
        assert engine.step(loss_scale=4.0).norm == 2.0
        assert engine.loss_scale == 4.0
        engine.add([np.float32([np.nan])])
        with pytest.raises(Exception, match="loss_scale"):
            engine.step(loss_scale=0.0)
        assert engine.loss_scale == 4.0

    def test_one_that_all_agreed_on_is_not_changed_at_a_second_try(self):
        engine = GradientEngine(GradientLayout.of({"w": (1,)}), loss_scale=2.0)
        engine.add([np.float32([np.nan])])
        for scale in (2.0, 2.0):
            with pytest.raises(Exception, match="not finite"):
                engine.step(loss_scale=scale)
        with pytest.raises(WindowError, match="loss scale of an open window"):
            engine.step(loss_scale=4.0)


class TestRefusals:
    def test_a_first_component_that_is_refused_begins_nothing(self):
        engine = GradientEngine(LAYOUT)
        come(engine, gradients_of(0))
        with pytest.raises(LayoutMismatch, match="head"), engine.micro_batch() as micro_batch:
            micro_batch.add("head", np.ones(3, np.float32))
        with pytest.raises(BufferRefused), engine.micro_batch() as micro_batch:
            micro_batch.add("head", np.ones(2))
        with pytest.raises(LayoutMismatch, match="unknown component: got 'tail'"), engine.micro_batch() as micro_batch:
            micro_batch.add("tail", np.ones(2))
        with pytest.raises(ZeroDivisionError), engine.micro_batch():
            raise ZeroDivisionError
        assert engine.accumulator.state.now is State.OPEN
        come(engine, gradients_of(1))
        assert engine.step().micro_batches == 2

    @pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt, BufferRefused])
    def test_a_part_of_a_micro_batch_is_refused_by_name_and_discard_leads_out(self, fault):
        engine = GradientEngine(LAYOUT)
        come(engine, gradients_of(0))
        parts = [("head", np.ones(2, np.float32))]
        parts += [("norm", np.ones(3))] * (fault is BufferRefused)
        with pytest.raises(fault):
            come_until(engine, *parts, then=lambda: fail_by(fault))
        said = "broken: a call was interrupted" if fault is KeyboardInterrupt else "holds a part of a micro-batch"
        for call in (lambda: engine.add(gradients_of(1)), engine.step, engine.micro_batch):
            with pytest.raises(WindowError, match=rf"step 0 .*{said}.*drop .* window by discard\(\)"):
                call()
        engine.discard()
        come(engine, gradients_of(1))
        other = GradientEngine(LAYOUT)
        other.add(gradients_of(1))
        assert bits_of(engine.step()) == bits_of(other.step())

    def test_an_interrupt_while_memory_is_written_breaks_the_step(self):
        engine = GradientEngine(LAYOUT)
        with (
            patch.object(engine.accumulator.kernels, "accumulate", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
            engine.micro_batch() as micro_batch,
        ):
            micro_batch.add("head", np.ones(2, np.float32))
        with pytest.raises(WindowError, match="is broken"):
            engine.step()

    @pytest.mark.parametrize("hold", [1, 2])
    def test_interrupted_at_any_line_it_is_in_the_window_or_is_not_or_the_window_is_broken(self, hold):
        def begun():
            engine = GradientEngine(TWO, hold=hold)
            engine.add([np.float32([1]), np.float32([1])])
            return engine

        gradients = {"w": np.float32([4]), "b": np.float32([4])}
        ends = set()
        for at in places_of(partial(come, begun(), gradients)):
            engine = begun()
            interrupted_at(at, partial(come, engine, gradients))
            if engine.accumulator.state.now is State.OPEN:
                ends.add(float(engine.step().gradients["w"][0]))
            else:
                with pytest.raises(WindowError, match=r"discard\(\)"):
                    engine.step()
                ends.add("refused")
                engine.discard()
            engine.add(gradients)
            assert engine.step().gradients["b"][0] == 4.0, at
        assert ends == {1.0, 2.5, "refused"}

    def test_nothing_that_came(self):
        engine = GradientEngine(LAYOUT)
        with pytest.raises(WindowError, match="no component has a gradient in this micro-batch: got None for all 5"):
            come(engine, dict.fromkeys(NAMES))
        assert not engine.has_open_window

    def test_within_it_nothing_else_is_called(self):
        engine = GradientEngine(LAYOUT)
        with engine.micro_batch() as micro_batch:
            engine.add(gradients_of(0))  # not begun yet
            micro_batch.add("head", np.ones(2, np.float32))
            for call in (
                lambda: engine.add(gradients_of(0)),
                lambda: engine.add_non_block("head", np.ones(2, np.float32)),
                lambda: engine.add(None, weight=0),
                engine.step,
                engine.micro_batch,
            ):
                with pytest.raises(WindowError, match="step 0 holds a part of a micro-batch"):
                    call()
        assert engine.step().micro_batches == 2

    def test_what_is_over_takes_no_more(self):
        engine = GradientEngine(LAYOUT)
        come(engine, gradients_of(0))
        with engine.micro_batch() as micro_batch:
            micro_batch.add("head", np.ones(2, np.float32))
        with pytest.raises(WindowError, match="no micro-batch is being added"):
            micro_batch.add("head", np.ones(2, np.float32))
        with pytest.raises(WindowError, match="no micro-batch is being added"):
            come_until(engine, ("head", np.ones(2, np.float32)), then=engine.discard)
        assert not engine.has_open_window

    def test_what_blocks_by_hand_have_left_uneven(self):
        engine = GradientEngine(LAYOUT)
        engine.add_block(1, [np.ones(33, np.float32)])
        with pytest.raises(WindowError, match=r"'norm' \(and 3 more\) lacks part of the window"):
            come(engine, gradients_of(0))
        assert engine.accumulator.state.now is State.OPEN

    def test_a_window_that_is_full_and_a_bad_weight(self):
        engine = GradientEngine(LAYOUT, micro_batches=1)
        with pytest.raises(WindowError, match="weight"):
            engine.micro_batch(-1.0)
        with pytest.raises(Exception, match="last"):
            engine.micro_batch(last="yes")
        come(engine, gradients_of(0))
        with pytest.raises(WindowError, match="the window is full: got micro-batch 2"):
            engine.micro_batch()


class TestSeveralWorkers:
    @pytest.mark.parametrize("average", ["weighted", "per_worker", "sum"])
    @pytest.mark.parametrize("hold", [1, 2])
    def test_blocks_leave_in_any_order_and_the_bytes_are_those_of_whole_micro_batches(self, average, hold):
        def work(apart):
            def stepped(exchange):
                options = {"average": average, "hold": hold, "max_norm": 0.3, "micro_batches": 2}
                engine, found = GradientEngine(LAYOUT, exchange=exchange, **options), []
                for window in range(3):
                    for k in range(2):
                        gradients = gradients_of([window, k, exchange.rank])
                        gradients[NAMES[window + k]] = None
                        order = list(np.random.default_rng([window, k, exchange.rank]).permutation(NAMES))
                        come(engine, gradients, 2.0, order) if apart else engine.add(gradients, 2.0)
                    found.append((bits_of(result := engine.step()), result.norm, result.unused))
                return found

            return stepped

        apart, whole = (on_ranks(work(way), 2) for way in (True, False))
        assert apart[0] == apart[1] == whole[0] == whole[1]

    def test_a_block_leaves_with_the_last_of_its_components_and_the_rest_at_the_end(self):
        def work(exchange):
            engine, gradients = GradientEngine(LAYOUT, exchange=exchange, micro_batches=2), gradients_of(exchange.rank)
            come(engine, gradients)
            found = [set(left(engine))]
            with engine.micro_batch() as micro_batch:
                for name in ("layers.0.b", "head", "layers.0.w", "layers.1.w"):
                    micro_batch.add(name, gradients[name])
                    found.append(set(left(engine)))
            found.append(set(left(engine)))
            engine.step()
            return found

        steps = [set(), set(), {"head"}, {"head", 0}, {"head", 0, 1}, {"head", 0, 1, "norm"}]
        assert on_ranks(work, 2) == [steps, steps]

    def test_nothing_leaves_where_it_is_not_known_to_be_the_last_and_all_does_where_it_is_said(self):
        def work(exchange):
            engine, gradients = GradientEngine(LAYOUT, exchange=exchange), gradients_of(exchange.rank)
            come(engine, gradients)
            found = [set(left(engine))]
            come(engine, gradients, last=True)
            found.append(set(left(engine)))
            with pytest.raises(WindowError, match="complete and was sent"):
                engine.micro_batch()
            engine.step()
            return found

        spans = {span.key for span in LAYOUT.spans}
        assert on_ranks(work, 2) == [[set(), spans]] * 2

    def test_what_comes_again_after_it_has_left_is_refused_and_is_not_where_it_stays(self):
        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, micro_batches=1)
            head, again = np.ones(2, np.float32), np.ones(2, np.float32)
            with engine.micro_batch(last=False) as micro_batch:
                micro_batch.add("head", head)
                micro_batch.add("head", again)
            found = float(engine.step().gradients["head"][0])
            with pytest.raises(WindowError, match=r"component 'head' was sent .*; use micro_batch\(last=False\)"):
                come_until(engine, ("head", head), ("head", again))
            with pytest.raises(WindowError, match=r"step 1 is broken: .*discard\(\)"):
                engine.step()
            return found

        assert on_ranks(work, 2) == [2.0, 2.0]

    def test_a_peer_that_is_lost_meanwhile_is_told_by_the_step_which_keeps_the_window(self):
        def work(exchange):
            engine, gradients = GradientEngine(LAYOUT, exchange=exchange, micro_batches=1), gradients_of(exchange.rank)
            with patch.object(engine.exchange, "start", side_effect=PeerLost("a peer is gone")) as start:
                come(engine, gradients)  # to its end
                assert start.call_count == 1
                with pytest.raises(PeerLost):
                    engine.step()
            assert engine.accumulator.state.now in {State.SENDING, State.FAILED}
            assert engine.accumulator.is_even
            exchange.close()

        assert on_ranks(work, 2) == [None, None]

    def test_an_interrupt_closes_the_exchange_so_that_nobody_waits(self):
        def work(exchange):
            engine, gradients = GradientEngine(LAYOUT, exchange=exchange, micro_batches=1), gradients_of(exchange.rank)
            if exchange.rank == 0:
                with pytest.raises(KeyboardInterrupt):
                    come_until(engine, ("head", gradients["head"]), then=lambda: fail_by(KeyboardInterrupt))
                with pytest.raises(WindowError, match="broken"):
                    engine.step()
            else:
                come(engine, gradients)
                with pytest.raises(PeerLost):
                    engine.step()

        assert on_ranks(work, 2) == [None, None]
