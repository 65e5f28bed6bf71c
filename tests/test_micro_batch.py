"""A micro-batch that comes component by component: its refusals, its interrupts, and when its blocks leave.

Its bits are those of one that comes whole: so say the tests of an engine's windows of any kind.
"""

from functools import partial
from unittest.mock import patch

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from devices import bits_of, number_of, on_host, put_all
from hypothesis import given
from hypothesis import strategies as st
from interrupts import interrupted_at, places_of
from ranks import on_ranks, started

from gradengine import GradientEngine, GradientLayout
from gradengine.accumulate import groups
from gradengine.accumulate.state import State
from gradengine.errors import BufferRefused, CallerError, GradientError, LayoutMismatch, PeerLost, WindowError

LAYOUT = GradientLayout.of({"norm": (3,), "layers.0.w": (4, 2), "layers.0.b": (2,), "layers.1.w": (33,), "head": (2,)})
TWO = GradientLayout.of({"w": (1,), "b": (1,)})
NAMES = [slot.name for slot in LAYOUT.slots]
HEAD = np.ones(2, np.float32)


def gradients_of(seed):
    return dict(zip(NAMES, draw.random_gradients(seed, LAYOUT.slots), strict=True))


def come(engine, gradients, then=lambda: None, **options):
    """Add a micro-batch component by component, and do what follows before its end."""
    with engine.micro_batch(**options) as micro_batch:
        for name, gradient in gradients.items():
            micro_batch.add(name, gradient)
        then()


def come_noted(engine, gradients, **options):
    """Note a micro-batch component by component, given as pairs, and add what is noted when it is due."""
    with engine.micro_batch(**options) as micro_batch:
        for name, gradient in gradients:
            if micro_batch.note(name, gradient):
                micro_batch.add_noted()


def fail_by(fault):
    raise fault


@pytest.mark.parametrize("hold", [1, 3])
@pytest.mark.parametrize("known", [1, None])
def test_a_component_that_comes_twice_is_added_and_counts_once(backend, hold, known):
    engine = GradientEngine(TWO, backend.kernels, hold=hold, micro_batches=known)
    values = put_all(backend, [np.float32([value]) for value in (3, 8, 5)])
    with engine.micro_batch(2.0) as micro_batch:
        for name, value in zip("wbw", values, strict=True):
            micro_batch.add(name, value)
    result = engine.step()
    assert (result.micro_batches, result.weight) == (1, 2.0)
    assert [float(on_host(g)[0]) for g in result.gradients.values()] == [8.0, 8.0]
    assert number_of(result.norm) == pytest.approx(128**0.5)


def test_its_weight_is_the_number_that_it_began_with():
    engine, weight = GradientEngine(TWO), np.array(2.0)
    with engine.micro_batch(weight) as micro_batch:
        micro_batch.add("w", np.float32([3]))
        weight[...] = 5
        micro_batch.add("b", np.float32([3]))
    assert engine.step().weight == 2.0


class TestNoted:
    @given(data=st.data())
    def test_it_has_the_bits_of_one_that_is_added_component_by_component(self, backend, data):
        """In any order, with components that are missing or come twice, whatever spans are joined."""
        layout = data.draw(st.sampled_from([LAYOUT, TWO]))
        names = st.lists(st.sampled_from([slot.name for slot in layout.slots]), min_size=1, max_size=8)
        hold, weight = data.draw(st.integers(1, 3)), data.draw(draw.weights)
        with patch.object(groups, "JOINED", data.draw(st.sampled_from([0, 12, 1 << 20]))):
            engines = [GradientEngine(layout, backend.kernels, hold=hold, max_norm=0.5) for _ in range(2)]
            for seed in range(data.draw(st.integers(1, 3))):
                drawn = dict(
                    zip((s.name for s in layout.slots), draw.random_gradients(seed, layout.slots), strict=True)
                )
                pairs = [(name, backend.put(drawn[name] * (1 + i))) for i, name in enumerate(data.draw(names))]
                come_noted(engines[0], pairs, weight=weight)
                with engines[1].micro_batch(weight) as micro_batch:
                    for name, gradient in pairs:
                        micro_batch.add(name, gradient)
            found, expected = (engine.step() for engine in engines)
        assert found.unused == expected.unused
        assert number_of(found.norm) == number_of(expected.norm)
        assert bits_of(found) == bits_of(expected)

    def test_a_block_is_one_launch_and_small_ones_share_it(self, emulated):
        """K + 2 launches of a window, and one a block and micro-batch; no table is copied after the first."""
        layout = GradientLayout.of({f"layers.{i}.{name}": (64, 4) for i in range(6) for name in "abcdefghi"})
        gradients = [(slot.name, emulated.put(np.ones(slot.shape, "f4"))) for slot in reversed(layout.slots)]
        for joined, launches in ((0, 6), (2 * 9 * 256, 3), (1 << 20, 1)):
            with patch.object(groups, "JOINED", joined):
                engine = GradientEngine(layout, emulated.kernels, max_norm=1.0)
                come_noted(engine, gradients)
                engine.step()
                with cuda_emulator.recorded() as record:
                    for _ in range(2):
                        come_noted(engine, gradients)
                    engine.step()
            assert len(record.launches) == 2 * launches + 2
            assert record.copies == ["device to host"]  # the verdict's

    def test_no_more_is_noted_than_the_largest_block_has(self, monkeypatch):
        """Also where no block is complete before the end."""
        monkeypatch.setattr(groups, "JOINED", 0)
        layout = GradientLayout.of({f"layers.{i}.{name}": (8,) for i in range(5) for name in ("w", "b", "unused")})
        engine, due = GradientEngine(layout), []
        with engine.micro_batch() as micro_batch:
            for slot in layout.slots:
                if not slot.name.endswith("unused"):
                    due.append(micro_batch.note(slot.name, np.ones(8, np.float32)))
                    if due[-1]:
                        micro_batch.add_noted()
        assert due == [False, False, False, True, False, False, False, True, False, False]
        assert engine.step().gradients["layers.4.w"].tolist() == [1] * 8

    def test_a_bad_one_begins_nothing_or_ends_the_micro_batch(self):
        engine = GradientEngine(LAYOUT)
        micro_batch = engine.micro_batch()
        for name, bad, error in (("head", np.ones(2), BufferRefused), ("tail", HEAD, LayoutMismatch)):
            with pytest.raises(error, match=name):
                micro_batch.note(name, bad)
            assert not engine.has_open_window
        micro_batch.note("head", HEAD)
        with pytest.raises(WindowError, match="part of a micro-batch"):
            engine.step()
        with pytest.raises(LayoutMismatch, match="tail"):
            micro_batch.note("tail", HEAD)
        micro_batch.note("norm", np.ones(3))
        with pytest.raises(BufferRefused, match="norm"):
            micro_batch.add_noted()
        for call in (micro_batch.end, lambda: micro_batch.note("head", HEAD), lambda: micro_batch.add("head", HEAD)):
            with pytest.raises(WindowError, match="the micro-batch is over"):
                call()
        engine.discard()
        micro_batch = engine.micro_batch()
        micro_batch.note("head", HEAD)
        engine.discard()
        with pytest.raises(WindowError, match="the micro-batch is over"):
            micro_batch.note("norm", np.ones(3, np.float32))
        come_noted(engine, gradients_of(1).items())
        assert engine.step().micro_batches == 1


class TestAddedByOthers:
    @pytest.mark.parametrize("known", [3, None])
    def test_what_layers_add_to_the_arena_has_the_bits_of_what_is_added(self, backend, known):
        """Beside components that are noted, and whole micro-batches; the squared sums are measured, too."""
        engines = [GradientEngine(LAYOUT, backend.kernels, max_norm=0.5, micro_batches=known) for _ in range(2)]
        for window in range(2):
            for k, others in enumerate([(), ("head", "layers.0.w"), ("norm", "layers.1.w", "layers.0.b")]):
                gradients = put_all(backend, gradients_of(3 * window + k))
                if not others:
                    engines[0].add(gradients)
                else:
                    with backend.active(), engines[0].micro_batch() as micro_batch:
                        micro_batch.begin()
                        arena = engines[0].accumulator.arrays()
                        for name, gradient in gradients.items():
                            if name in others:
                                arena[name][...] += gradient
                                micro_batch.note_added(name)
                            elif micro_batch.note(name, gradient):
                                micro_batch.add_noted()
                engines[1].add(gradients)
            found, expected = (engine.step() for engine in engines)
            assert number_of(found.norm) == number_of(expected.norm)
            assert bits_of(found) == bits_of(expected)

    def test_the_first_of_a_window_finds_zeros_and_may_leave_the_rest_unused(self, backend):
        engine = GradientEngine(TWO, backend.kernels)
        engine.add(put_all(backend, [np.float32([5]), np.float32([5])]))
        engine.step()
        with backend.active(), engine.micro_batch() as micro_batch:
            micro_batch.begin()
            engine.accumulator.arrays()["w"][...] += 3
            micro_batch.note_added("w")
        result = engine.step()
        assert result.unused == {"b"}
        assert [float(on_host(g)[0]) for g in result.gradients.values()] == [3.0, 0.0]
        assert number_of(result.norm) == 3.0

    def test_it_is_refused_before_it_begins_and_once_it_is_over(self):
        engine = GradientEngine(TWO)
        micro_batch = engine.micro_batch()
        with pytest.raises(WindowError, match="has not begun"):
            micro_batch.note_added("w")
        micro_batch.begin()
        with pytest.raises(LayoutMismatch, match="tail"):
            micro_batch.note_added("tail")
        for call, why in ((engine.step, "part of a micro-batch"), (micro_batch.end, "no component has a gradient")):
            with pytest.raises(WindowError, match=why):
                call()
        engine.discard()
        with pytest.raises(WindowError, match="the micro-batch is over"):
            micro_batch.note_added("w")


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "gradient", "error"),
        [
            ("head", np.ones(3, "f4"), LayoutMismatch),
            ("head", np.ones(2), BufferRefused),
            ("tail", HEAD, LayoutMismatch),
        ],
    )
    def test_a_first_component_that_is_refused_begins_nothing(self, name, gradient, error):
        engine = GradientEngine(LAYOUT)
        come(engine, gradients_of(0))
        with pytest.raises(error, match=name):
            come(engine, {name: gradient})
        with pytest.raises(ZeroDivisionError):
            come(engine, {}, then=lambda: 1 / 0)
        assert engine.accumulator.state.now is State.OPEN
        come(engine, gradients_of(1))
        assert engine.step().micro_batches == 2

    @pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt, BufferRefused])
    def test_a_part_of_a_micro_batch_is_refused_and_discard_leads_out(self, fault):
        engine, other = GradientEngine(LAYOUT), GradientEngine(LAYOUT)
        come(engine, gradients_of(0))
        bad = {"norm": np.ones(3)} if fault is BufferRefused else {}
        with pytest.raises(fault):
            come(engine, {"head": HEAD, **bad}, then=lambda: fail_by(fault))
        said = "is broken" if fault is KeyboardInterrupt else "holds a part of a micro-batch"
        for call in (lambda: engine.add(gradients_of(1)), engine.step, engine.micro_batch):
            with pytest.raises(WindowError, match=rf"step 0 {said}.*discard\(\)"):
                call()
        engine.discard()
        for each in (engine, other):
            come(each, gradients_of(1))
        assert bits_of(engine.step()) == bits_of(other.step())

    def test_an_interrupt_while_memory_is_written_breaks_the_step(self):
        engine = GradientEngine(LAYOUT)
        with (
            patch.object(engine.accumulator.kernels, "accumulate", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            come(engine, {"head": HEAD})
        with pytest.raises(WindowError, match="is broken"):
            engine.step()

    def test_interrupted_at_any_line_it_is_in_the_window_or_is_not_or_the_window_is_broken(self):
        def begun():
            engine = GradientEngine(TWO, hold=2)
            engine.add([np.float32([1]), np.float32([1])])
            return engine

        gradients, ends = {"w": np.float32([4]), "b": np.float32([4])}, set()
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

    def test_without_a_component_it_is_none(self):
        engine = GradientEngine(LAYOUT)
        with pytest.raises(WindowError, match="None for all 5"):
            come(engine, {})
        assert not engine.has_open_window
        with engine.micro_batch() as micro_batch:
            engine.add(gradients_of(0))  # not begun yet
            micro_batch.add("head", HEAD)
            with pytest.raises(WindowError, match="holds a part of a micro-batch"):
                engine.state_dict()
        assert engine.step().micro_batches == 2

    def test_what_is_over_takes_no_more(self):
        engine = GradientEngine(LAYOUT)
        with engine.micro_batch() as micro_batch:
            micro_batch.add("head", HEAD)
        for call in (lambda: micro_batch.add("head", HEAD), lambda: come(engine, {"head": HEAD}, then=engine.discard)):
            with pytest.raises(WindowError, match="the micro-batch is over"):
                call()
        assert not engine.has_open_window

    def test_what_is_over_adds_nothing_to_the_next_and_does_not_end_it(self):
        engine = GradientEngine(LAYOUT)
        first, second = engine.micro_batch(), engine.micro_batch()
        with first:
            first.add("head", HEAD)
        with second:
            second.add("head", HEAD)
            for call in (lambda: first.add("head", HEAD), first.end):
                with pytest.raises(WindowError, match="the micro-batch is over"):
                    call()
            second.add("norm", np.ones(3, np.float32))
        result = engine.step()
        assert (result.micro_batches, result.gradients["head"].tolist()) == (2, [1, 1])

    def test_two_that_were_made_before_either_began_do_not_pass_a_full_window(self):
        engine = GradientEngine(LAYOUT, micro_batches=1)
        first, second = engine.micro_batch(), engine.micro_batch()
        with first:
            first.add("head", HEAD)
        with pytest.raises(WindowError, match="full: got micro-batch 2"):
            second.add("head", HEAD)
        assert engine.step().micro_batches == 1

    def test_what_blocks_by_hand_have_left_uneven(self):
        engine = GradientEngine(LAYOUT)
        engine.add_block(1, [np.ones(33, np.float32)])
        with pytest.raises(WindowError, match=r"'norm' .*lacks part of the window"):
            come(engine, gradients_of(0))
        assert engine.accumulator.state.now is State.OPEN

    def test_it_is_refused_before_it_begins_in_a_full_window_or_with_arguments_that_cannot_be(self):
        engine = GradientEngine(LAYOUT, micro_batches=1)
        for options, error in (({"weight": -1.0}, WindowError), ({"last": "yes"}, CallerError)):
            with pytest.raises(error, match=next(iter(options))):
                engine.micro_batch(**options)
        come(engine, gradients_of(0))
        with pytest.raises(WindowError, match="full: got micro-batch 2"):
            engine.micro_batch()


class TestLossScaleOfAStep:
    def test_it_is_said_at_step_what_the_losses_were_multiplied_by(self):
        engine = GradientEngine(TWO, loss_scale=2.0)
        engine.add([np.float32([8]), None])
        assert engine.step(loss_scale=4.0).norm == 2.0
        assert engine.loss_scale == 4.0

    def test_a_step_that_failed_runs_again_with_it_or_with_another_that_is_not_agreed_on(self):
        def work(exchange):
            engine, found = GradientEngine(TWO, exchange=exchange, loss_scale=2.0), []
            engine.add([np.float32([np.nan]), None])
            for scale in (0.0, 4.0, 4.0, 8.0):
                with pytest.raises(GradientError) as refusal:
                    engine.step(loss_scale=scale)
                found.append((engine.loss_scale, "not finite" in str(refusal.value)))
            return found

        assert work(None) == [(2.0, False), (4.0, True), (4.0, True), (8.0, True)]
        assert on_ranks(work, 2) == [[(2.0, False), (4.0, True), (4.0, True), (4.0, False)]] * 2

    def test_one_that_is_too_large_for_the_weight_is_followed_by_another(self):
        engine = GradientEngine(TWO)
        engine.add([np.float32([8]), None], 2.0**100)
        with pytest.raises(WindowError, match="loss scale"):
            engine.step(loss_scale=2.0**100)
        assert engine.step(loss_scale=2.0).norm == 4.0


class TestSeveralWorkers:
    def test_a_block_leaves_with_the_last_of_its_components_and_the_rest_at_the_end(self):
        def work(exchange):
            engine, gradients = GradientEngine(LAYOUT, exchange=exchange, micro_batches=2), gradients_of(exchange.rank)
            come(engine, gradients)
            found = [started(engine)]
            with engine.micro_batch() as micro_batch:
                for name in ("layers.0.b", "head", "layers.0.w", "layers.1.w"):
                    micro_batch.add(name, gradients[name])
                    found.append(started(engine))
            found.append(started(engine))
            engine.step()
            return found

        steps = [set(), set(), {"head"}, {"head", 0}, {"head", 0, 1}, {"head", 0, 1, "norm"}]
        assert on_ranks(work, 2) == [steps, steps]

    def test_nothing_leaves_where_it_is_not_known_to_be_the_last_and_all_does_where_it_is_said(self):
        def work(exchange):
            engine, found = GradientEngine(LAYOUT, exchange=exchange), []
            for options in ({}, {"last": True}):
                come(engine, gradients_of(exchange.rank), **options)
                found.append(started(engine))
            with pytest.raises(WindowError, match="complete and was sent"):
                engine.micro_batch()
            engine.step()
            return found

        assert on_ranks(work, 2) == [[set(), {span.key for span in LAYOUT.spans}]] * 2

    def test_what_comes_again_after_it_has_left_is_refused_and_is_not_where_it_stays(self):
        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, micro_batches=1)

            def twice(**options):
                with engine.micro_batch(**options) as micro_batch:
                    micro_batch.add("head", HEAD)
                    micro_batch.add("head", HEAD.copy())

            twice(last=False)
            found = float(engine.step().gradients["head"][0])
            with pytest.raises(WindowError, match=r"component 'head' was sent .*micro_batch\(last=False\)"):
                twice()
            with pytest.raises(WindowError, match=r"step 1 is broken: .*discard\(\)"):
                engine.step()
            return found

        assert on_ranks(work, 2) == [2.0, 2.0]

    def test_a_peer_that_is_lost_meanwhile_is_told_by_the_step_which_keeps_the_window(self):
        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, micro_batches=1)
            with patch.object(engine.exchange, "start", side_effect=PeerLost("a peer is gone")) as start:
                come(engine, gradients_of(exchange.rank))  # to its end
                assert start.call_count == 1
                with pytest.raises(PeerLost):
                    engine.step()
            assert engine.accumulator.state.now in {State.SENDING, State.FAILED}
            assert engine.accumulator.is_even
            exchange.close()

        assert on_ranks(work, 2) == [None, None]

    def test_an_interrupt_closes_the_exchange_so_that_nobody_waits(self):
        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, micro_batches=1)
            if exchange.rank == 0:
                with pytest.raises(KeyboardInterrupt):
                    come(engine, {"head": HEAD}, then=lambda: fail_by(KeyboardInterrupt))
            else:
                come(engine, gradients_of(exchange.rank))
            with pytest.raises(PeerLost if exchange.rank else WindowError):
                engine.step()

        assert on_ranks(work, 2) == [None, None]
