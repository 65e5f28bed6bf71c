"""Any calls of an accumulator in any order: a window's sum is the contract's, and a failing call changes nothing.

Of any layout and hold, with any weights, gradients in each way in, and on each device.
"""

import functools

import numpy as np
import pytest
import strategies as draw
from accumulators import HOST, ODD, SMALL, bad_gradients, new, state
from backends import available, on_threads_too
from devices import all_on_host, assign, nothing_is_launched, on_host, put_all, raw
from folds import totals_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gradengine.errors import GradientError


class AnyCalls(RuleBasedStateMachine):
    """Good and bad calls in any order, layout and hold, against the contract in plain NumPy."""

    backend = HOST

    @initialize(hold=st.integers(1, 3), data=st.data())
    def begin(self, hold, data):
        self.layout = data.draw(st.one_of(st.sampled_from([ODD, SMALL]), draw.uneven_layouts(self.backend.chunk)))
        self.accumulator = new(self.layout, hold, self.backend)
        assert self.accumulator.alone  # whose tables go to the device once
        self.forget()
        self.seed, self.buffers = 0, {}

    def forget(self):
        self.values = dict.fromkeys((slot.name for slot in self.layout.slots), None)
        self.counts = dict.fromkeys(self.values, 0)
        self.weights = []

    def take(self, slots, gradients, weight):
        """What the call must do, or False where it must be refused."""
        for slot in slots:
            count = self.counts[slot.name]
            if count < len(self.weights) and self.weights[count] != np.float32(weight):
                return False
        if any(self.counts[slot.name] == len(self.weights) for slot in slots):
            self.weights.append(np.float32(weight))
        for slot, gradient in zip(slots, gradients, strict=True):
            self.counts[slot.name] += 1
            if gradient is not None:
                self.take_more(slot, gradient, weight)
        return True

    def take_more(self, slot, gradient, weight):
        held = self.values[slot.name]
        self.values[slot.name] = draw.folded(held, [gradient], [weight], held is None)

    def gradients(self, slots, dtype, gap=False):
        self.seed += 1
        batch = draw.random_gradients(self.seed, slots, dtype)
        return [None if gap and i % 2 else gradient for i, gradient in enumerate(batch)]

    def state(self):
        return state(self.accumulator, self.backend)

    def put(self, gradients):
        return put_all(self.backend, gradients)

    def given(self, slots, gradients, way):
        """The gradients on the device, in one of the ways in which a caller may pass them."""
        if way == "as before" and self.accumulator.hold == 1:  # a loop's buffers, with other values in them
            return [self.refilled(slot, g) for slot, g in zip(slots, gradients, strict=True)]
        arrays = self.put(gradients)
        if way == "flat":
            return [None if a is None else a.reshape(-1) for a in arrays]
        if way == "pointers":
            view = self.backend.kernels.device.view
            return tuple(None if a is None else raw(view(a, "gradient")) for a in arrays)
        if way == "by name":
            return {slot.name: a for slot, a in reversed(list(zip(slots, arrays, strict=True)))}
        return arrays

    def refilled(self, slot, gradient):
        if gradient is None:
            return None
        key = slot.name, gradient.dtype.name
        if key not in self.buffers:
            (self.buffers[key],) = self.put([gradient])
        else:
            assign(self.buffers[key], self.put([gradient])[0])
        return self.buffers[key]

    def call(self, fits, call, *arguments):
        if fits:
            call(*arguments)
        else:
            self.refused(call, *arguments)

    def refused(self, call, *arguments):
        before = self.state()
        with nothing_is_launched(self.backend), pytest.raises(GradientError):
            call(*arguments)
        assert self.state() == before

    ways = st.sampled_from(["as before", "fresh", "flat", "pointers", "by name"])

    @rule(dtype=draw.dtypes, weight=st.sampled_from([1.0, 0.3, 0.25, 0.75]), gap=st.booleans(), measure=st.booleans())
    def add(self, dtype, weight, gap, measure):
        self.add_in(dtype, weight, gap, "fresh", measure)

    @rule(dtype=draw.dtypes, weight=draw.weights, gap=st.booleans(), way=ways)
    def add_in(self, dtype, weight, gap, way, measure=False):
        batch = self.gradients(self.layout.slots, dtype, gap)
        add = functools.partial(self.accumulator.add, measure=measure)
        fits = self.take(self.layout.slots, batch, weight)
        self.call(fits, add, self.given(self.layout.slots, batch, way), weight)

    @precondition(lambda self: self.layout.blocks)
    @rule(data=st.data(), dtype=draw.dtypes, weight=st.sampled_from([1.0, 0.3]), way=ways, gap=st.booleans())
    def add_block(self, data, dtype, weight, way, gap):
        index, slots = self.some_block(data)
        batch = self.gradients(slots, dtype, gap)
        fits = self.take(slots, batch, weight)
        given = self.given(slots, batch, way)
        if index and isinstance(given, dict):  # by short names
            given = {name.rpartition(".")[2]: gradient for name, gradient in given.items()}
        self.call(fits, self.accumulator.add_block, index, given, weight)

    @precondition(lambda self: any(slot.block is None for slot in self.layout.slots))
    @rule(data=st.data(), weight=st.sampled_from([1.0, 0.3]), is_none=st.booleans(), by_id=st.booleans())
    def add_non_block(self, data, weight, is_none, by_id):
        slot = data.draw(st.sampled_from([slot for slot in self.layout.slots if slot.block is None]))
        gradients = [None] if is_none else self.gradients([slot], "float32")
        (array,) = self.put(gradients)
        ids = {"lm_head": 0, "final_norm": 1, "embedding": 2} if by_id else {}
        fits = self.take([slot], gradients, weight)
        self.call(fits, self.accumulator.add_non_block, ids.get(slot.name, slot.name), array, weight)

    @rule(data=st.data(), dtype=draw.dtypes, weight=st.sampled_from([1.0, 0.3]))
    def add_component_by_component(self, data, dtype, weight):
        """Some perhaps twice, whose gradients add up, and some not at all."""
        slots = data.draw(st.lists(st.sampled_from(self.layout.slots), min_size=1, max_size=4))
        accumulator, begins = self.accumulator, True
        fits = set(self.counts.values()) == {len(self.weights)}

        def add(slot, array, weight):
            accumulator.add_components(accumulator.alone[slot.name], [array], weight)

        for slot, gradient in zip(slots, self.gradients(slots, dtype), strict=True):
            (array,) = self.put([gradient])
            if begins:
                self.call(fits, accumulator.begin_micro_batch, weight, {slot.name: array})
                if not fits:
                    return
                self.weights.append(np.float32(weight))
            self.refused(accumulator.begin_micro_batch, weight, {slot.name: array})
            self.refused(add, slot, array, 7.0)
            add(slot, array, weight)
            self.take_more(slot, gradient, weight)
            begins = False
        self.refused(self.accumulator.add, self.put(draw.random_gradients(0, self.layout.slots)), weight)
        self.accumulator.end_micro_batch()
        self.counts = dict.fromkeys(self.counts, len(self.weights))
        self.refused(add, slot, array, weight)

    @precondition(lambda self: self.layout is ODD)
    @rule(case=st.integers(0, 8), measure=st.booleans())
    def add_what_is_wrong(self, case, measure):
        bad = list(bad_gradients(self.layout.slots, self.backend))
        self.refused(functools.partial(self.accumulator.add, measure=measure), bad[case % len(bad)][0])
        bad = list(bad_gradients(self.layout.blocks[0].slots, self.backend))
        self.refused(self.accumulator.add_block, 0, bad[case % len(bad)][0])

    @rule(weight=draw.bad_weights)
    def add_with_a_bad_weight(self, weight):
        self.refused(self.accumulator.add, self.put(draw.random_gradients(0, self.layout.slots)), weight)

    @rule()
    def add_nothing_at_all(self):
        self.refused(self.accumulator.add, [None] * len(self.layout.slots))

    @rule()
    def average(self):
        if self.weights in ([], [1]):
            before = self.state()
            self.accumulator.average()
            assert self.state() == before
        elif set(self.counts.values()) == {len(self.weights)}:
            self.accumulator.average()
            factor = np.float32(1 / sum(map(float, self.weights)))
            for slot in self.layout.slots:
                value = self.values[slot.name]
                self.values[slot.name] = np.zeros(slot.size, np.float32) if value is None else value * factor
            self.counts, self.weights = dict.fromkeys(self.counts, 1), [np.float32(1)]
        else:
            self.refused(self.accumulator.average)

    @rule()
    def drop(self):
        self.accumulator.zero_all()
        self.forget()

    def some_block(self, data):
        block = data.draw(st.sampled_from(self.layout.blocks))
        return block.key, block.slots

    def opened(self, data):
        """A block as it stands, its slots, and that it holds what it must."""
        index, slots = self.some_block(data)
        block = self.accumulator.block(index)
        for slot in slots:
            if self.values[slot.name] is None:
                self.values[slot.name] = np.zeros(slot.size, np.float32)
        self.assert_block(block, slots)
        return block, slots

    def assert_block(self, block, slots):
        components = all_on_host(block.components)
        assert list(components) == [slot.name.rpartition(".")[2] for slot in slots]
        flat = np.zeros(slots[-1].offset - slots[0].offset + -(-slots[-1].size // 32) * 32, np.float32)
        for slot, got in zip(slots, components.values(), strict=True):
            assert got.shape == slot.shape
            draw.assert_same_bits(got, self.values[slot.name])
            flat[slot.offset - slots[0].offset :][: slot.size] = self.values[slot.name]
        draw.assert_same_bits(on_host(block.flatten()), flat)
        assert block.has_non_finite() is False

    @precondition(lambda self: self.layout.blocks)
    @rule(data=st.data(), dtype=draw.dtypes, gap=st.booleans())
    def accumulate_into_a_block(self, data, dtype, gap):
        block, slots = self.opened(data)
        batch = self.gradients(slots, dtype, gap)
        block.accumulate(self.put(batch))
        for slot, gradient in zip(slots, batch, strict=True):
            if gradient is not None:
                self.values[slot.name] = draw.folded(self.values[slot.name], [gradient], [1], False)
        self.assert_block(block, slots)

    @precondition(lambda self: self.layout.blocks)
    @rule(data=st.data(), dtype=draw.dtypes)
    def replace_a_block(self, data, dtype):
        block, slots = self.opened(data)
        self.seed += 1
        flat = draw.random_array(self.seed, block.flatten().size, dtype)
        block.from_flat(self.backend.put(flat.copy()))
        for slot in slots:
            start = slot.offset - slots[0].offset
            self.values[slot.name] = flat[start : start + slot.size].astype(np.float32)
        self.assert_block(block, slots)

    @precondition(lambda self: self.layout.blocks)
    @rule(data=st.data(), divisor=st.sampled_from([None, 3.0, -0.5]))
    def scale_or_zero_a_block(self, data, divisor):
        block, slots = self.opened(data)
        if divisor is None:
            block.zero()
        else:
            block.scale(divisor)
        for slot in slots:
            value = self.values[slot.name]
            self.values[slot.name] = np.zeros_like(value) if divisor is None else value * np.float32(1 / divisor)
        self.assert_block(block, slots)

    @precondition(lambda self: self.accumulator.hold == 1 and any(value is not None for value in self.values.values()))
    @rule(data=st.data())
    def write_through_a_view(self, data):
        slot = self.layout.slot(data.draw(st.sampled_from([n for n, v in self.values.items() if v is not None])))
        (value,) = self.gradients([slot], "float32")
        assign(self.accumulator.views()[slot.name], self.backend.put(value.copy()))
        self.values[slot.name] = value.reshape(-1)

    @rule()
    def look_for_what_is_not_finite(self):
        assert self.accumulator.has_non_finite() is False

    @rule(measure=st.booleans())
    def close(self, measure):
        if not self.weights or set(self.counts.values()) != {len(self.weights)}:
            if self.weights:
                self.refused(self.accumulator.close)
            return
        self.accumulator.close(measure=measure)
        self.accumulator.measure_rest()
        squares = totals_of(self.accumulator.kernels, self.accumulator.arena.partials)
        for slot, square in zip(self.layout.slots, squares, strict=True):
            if self.values[slot.name] is None:
                self.values[slot.name] = np.zeros(slot.size, np.float32)
            draw.assert_same_bits(on_host(self.accumulator.views()[slot.name]), self.values[slot.name])
            exact = np.sum(np.square(self.values[slot.name].astype(np.float64)))
            assert square == pytest.approx(exact, rel=1e-6)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "accumulator"):
            assert self.accumulator.accumulated_count == len(self.weights)
            assert self.accumulator.total_weight == sum(map(float, self.weights))
            covered = np.zeros(self.layout.arena_size, bool)
            for slot in self.layout.slots:
                covered[slot.offset : slot.stop] = True
            memory = self.backend.get(self.accumulator.memory)
            assert (draw.storage_bits(memory)[~covered] == 0).all()


@on_threads_too
def test_any_calls_in_any_order_give_the_contracts_sum(backend):
    machine, few = type("AnyCalls", (AnyCalls,), {"backend": backend}), backend is not available("host")
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20 if few else 60, stateful_step_count=20, deadline=None)
    )
