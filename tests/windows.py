"""Windows of any kind: micro-batches drawn by Hypothesis, each way in, and the contract's own arithmetic in NumPy."""

import math
import os
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import strategies as draw
from devices import number_of, on_host, put_all, raw
from hypothesis import Phase
from hypothesis import strategies as st

# A window that fails is shown as it was drawn: to shrink one takes minutes, which `make properties` alone has.
SHRINKS = [Phase.shrink] if os.environ.get("GRADENGINE_PROPERTIES") == "random" else []
PHASES = [Phase.explicit, Phase.generate, *SHRINKS]
WAYS = ("add", "add named", "raw", "parts", "parts named", "components")


@dataclass(frozen=True)
class MicroBatch:
    """Gradients by name, None where there is none, and the way they come; `order` is of spans, or of components."""

    gradients: dict
    weight: float
    way: str
    order: tuple

    def calls(self, layout, **last):
        """Functions of an engine and a backend: one, or one for each part."""
        if "parts" in self.way:
            return [partial(self._part, layout.spans_by_key[key], last) for key in self.order]
        return [self._components if self.way == "components" else self._whole]

    def with_other_values(self, seed):
        """The same with other values of the same shapes and dtypes."""
        others = {
            name: array if array is None else with_zeros([seed, i], array.shape, str(array.dtype))
            for i, (name, array) in enumerate(self.gradients.items())
        }
        return replace(self, gradients=others)

    def in_order(self, layout):
        """The gradients that are there, in the order in which they come."""
        names = list(self.gradients)
        if "parts" in self.way:
            names = [slot.name for key in self.order for slot in layout.spans_by_key[key].slots]
        return [self.gradients[name] for name in names if self.gradients[name] is not None]

    def _whole(self, engine, backend):
        if self.way == "raw":
            given = [None if g is None else raw(backend.buffer(g)) for g in self.gradients.values()]
        else:
            given = put_all(backend, self.gradients)
        engine.add(list(given.values()) if self.way == "add" else given, self.weight)

    def _components(self, engine, backend):
        with engine.micro_batch(self.weight) as micro_batch:
            for name in self.order:
                if self.gradients[name] is not None:
                    micro_batch.add(name, backend.put(self.gradients[name].copy()))

    def _part(self, span, last, engine, backend):
        arrays = put_all(backend, [self.gradients[slot.name] for slot in span.slots])
        if not isinstance(span.key, int):
            engine.add_non_block(span.key, arrays[0], self.weight, **last)
            return
        if "named" in self.way:
            arrays = dict(zip([slot.name.rsplit(".", 1)[1] for slot in span.slots], arrays, strict=True))
        engine.add_block(span.key, arrays, self.weight, **last)


def with_zeros(seed, shape, dtype):
    """Random values, of which some are zeros of both signs: added to the wrong zero they come out as another."""
    found = draw.random_array(seed, shape, dtype)
    found.reshape(-1)[1:4] = [-0.0, 0.0, -0.0][: max(0, found.size - 1)]
    return found


@st.composite
def micro_batches(draws, layout, ways=WAYS):
    """A micro-batch of finite values, some components without a gradient, each in a dtype of its own."""
    way, slots = draws(st.sampled_from(ways)), layout.slots
    most = len(slots) - ("parts" not in way)  # a whole micro-batch without any gradient is refused
    absent = draws(st.sets(st.integers(0, len(slots) - 1), max_size=most))
    seed, dtypes = draws(draw.seeds), draws(st.lists(draw.dtypes, min_size=1, max_size=3))
    gradients = {
        slot.name: None if i in absent else with_zeros([seed, i], slot.shape, dtypes[i % len(dtypes)])
        for i, slot in enumerate(slots)
    }
    order = [span.key for span in layout.spans] if "parts" in way else [slot.name for slot in slots]
    return MicroBatch(gradients, draws(draw.weights), way, tuple(draws(st.permutations(order))))


def windows(layout, count=(1, 4), ways=WAYS):
    """Lists of micro-batches."""
    return st.lists(micro_batches(layout, ways), min_size=count[0], max_size=count[1])


def calls_of(window, layout):
    """All calls of a window, in order; at each of them it may be cut."""
    return [call for micro_batch in window for call in micro_batch.calls(layout)]


def add_all(engine, backend, window):
    for call in calls_of(window, engine.layout):
        call(engine, backend)


GROUPS = {  # what a user says -> the group of a slot
    None: lambda slot: "all",
    "block": lambda slot: "rest" if slot.block is None else f"block {slot.block}",
    "component": lambda slot: slot.name,
}
options = st.fixed_dictionaries(
    {
        "hold": st.integers(1, 4),
        "average": st.sampled_from(["weighted", "per_worker", "prescaled"]),
        "groups": st.sampled_from([*GROUPS]),
        "max_norm": st.sampled_from([None, 0.01, 0.3, 30.0]),
        "loss_scale": st.sampled_from([1.0, 2.0**-5, 1000.0]),
    }
)


# ---- the contract ----


def sums_of(layout, window):
    """Name -> the sum of a window's gradients in fp32, one after the other; zeros where there is none."""
    found = {}
    for slot in layout.slots:
        given = [(b.gradients[slot.name], b.weight) for b in window if b.gradients[slot.name] is not None]
        found[slot.name] = draw.folded(None, *zip(*given, strict=True), True) if given else np.zeros(slot.size, "f4")
    return found


def unused_of(layout, window):
    return {slot.name for slot in layout.slots if all(b.gradients[slot.name] is None for b in window)}


def weight_of(window):
    return float(sum(np.float64(np.float32(b.weight)) for b in window))


def divisor_of(options, window):
    """What one worker's sum is divided by."""
    return options["loss_scale"] * (1.0 if options["average"] == "prescaled" else weight_of(window))


def summed(parts):
    """The sums of several workers, in the order of their ranks."""
    return {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in parts[0]}


def norm_of(arrays):
    return float(np.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in arrays)))


def assert_step(result, layout, sums, divisor, *, max_norm=None, groups=None, out=None):
    """Norms, scales and factor in fp64, and each bit of what is handed back.

    `out` has a Destination for each component that was wanted elsewhere than in the arena, and None for the others.
    """
    label = {slot.name: GROUPS[groups](slot) for slot in layout.slots}
    members = {group: [sums[name] for name in label if label[name] == group] for group in label.values()}
    bound = math.inf if max_norm is None else max_norm
    norms = {group: norm_of(arrays) / divisor for group, arrays in members.items()}
    about = partial(pytest.approx, rel=1e-6, abs=1e-30)
    assert number_of(result.norm) == about(norm_of(sums.values()) / divisor)
    assert {group: number_of(norm) for group, norm in result.group_norms.items()} == about(norms)
    scales = {group: number_of(scale) for group, scale in result.group_scales.items()}
    assert scales == about({group: bound / norm if norm > bound else 1.0 for group, norm in norms.items()})
    assert number_of(result.scale) == about(min(scales.values()))
    assert [*map(number_of, result.component_norms)] == about([norm_of([array]) / divisor for array in sums.values()])
    blocks = [[sums[slot.name] for slot in block.slots] for block in layout.blocks]
    assert [*map(number_of, result.block_norms)] == about([norm_of(arrays) / divisor for arrays in blocks])
    assert number_of(result.skipped) == 0
    factors = {group: np.float32(scale / divisor) for group, scale in scales.items()}
    first = next(iter(result.group_scales))
    assert number_of(result.factor) == factors[first]
    assert number_of(result.inverse_factor) == about(divisor / scales[first])
    if result.deferred:
        assert {*result.sums} == {*sums}
        for name, array in result.sums.items():
            draw.assert_same_bits(on_host(array), sums[name])
        return
    wanted = [name for name in sums if out is None or out[name]]
    assert [*result.gradients] == wanted
    for name in wanted:
        got = on_host(result.gradients[name]) if out is None else out[name].values()
        assert out or got.shape == layout.slot(name).shape
        expected = draw.scaled(sums[name], factors[label[name]], str(got.dtype))
        draw.assert_same_bits(got, expected)


class Destination:
    """Memory to hand back to, at any address, which says what was written there and that nothing beside it was."""

    def __init__(self, backend, slot, dtype, offset):
        self._backend, self._offset, self._size, self._dtype = backend, offset, slot.size, draw.DTYPES[dtype]
        nines = [np.full(size, 9, self._dtype) for size in (slot.size, 3)]
        self._whole, (place, _) = backend.buffers_in_one(nines, offset)
        self.pointer = raw(place)

    def values(self):
        found = self._backend.get(self._whole).view(self._dtype)
        assert (found[self._offset + self._size :] == 9).all()
        assert np.isnan(found[: self._offset].astype("f4")).all()
        return found[self._offset : self._offset + self._size]
