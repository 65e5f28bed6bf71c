"""The bits that users have today, recorded: the same on every backend, and after every change of the code.

All values come from whole numbers and each recorded operation is rounded once, so that no machine rounds otherwise.
After a change of the contract: `python tests/test_bits.py` writes bits.json anew; the difference is to be explained.
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from backends import available
from devices import on_host, put_all
from ranks import on_ranks
from strategies import DTYPES

from gradengine import GradientEngine, GradientLayout

RECORD = Path(__file__).with_name("bits.json")
LAYOUTS = {
    "odd sizes": GradientLayout.of({"layers.0.w": (3, 5), "layers.0.b": (1,), "layers.1.w": (77,), "head": (4,)}),
    "transformer": GradientLayout.transformer(2, 8, 4, 12, 16),
    "lora": GradientLayout.lora(3, 24, 8, 2),
    "over a chunk": GradientLayout.of({"layers.0.w": (40_007,), "layers.1.w": (3,), "head": (33_000,)}),
}
KINDS = [*DTYPES, "mixed"]
WEIGHTS = [(1.0,), (1.0, 1.0, 1.0), (1.0, 2.0, 5.0)]


def whole_numbers(seed, size):
    """Up to 2**32, each size and seed its own; by operations that no library changes."""
    numbers = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed * 40503 + 12345)
    return (numbers ^ (numbers >> np.uint64(13))) * np.uint64(2246822519) % np.uint64(2**32)


def rough(seed, size):
    """Full mantissas of both signs, from 2**-20 to 8: what is added to them is rounded."""
    numbers = whole_numbers(seed, size)
    mantissas = (numbers % np.uint64(2**24)).astype(np.float64) / 2**23 - 1
    return np.ldexp(mantissas, 3 - (numbers >> np.uint64(27)).astype(np.int32) % 24)


def exact(seed, size):
    """Multiples of 1/4 up to 2, whose sums and squares no order of additions rounds: all norms are the same."""
    return (whole_numbers(seed, size) % np.uint64(17)).astype(np.float64) / 4 - 2


def micro_batch(layout, values, kind, seed, *, absent=False):
    """One gradient for each slot, of one dtype or of each in turn; None for the first, where that is absent."""
    dtypes = itertools.cycle(DTYPES.values()) if kind == "mixed" else itertools.repeat(DTYPES[kind])
    arrays = [
        values(seed + i, slot.size).astype(np.float32).reshape(slot.shape).astype(dtype)
        for i, (slot, dtype) in enumerate(zip(layout.slots, dtypes, strict=False))
    ]
    return [None if absent and i == 0 else array for i, array in enumerate(arrays)]


def add(engine, backend, gradients, weight, *, by_parts):
    arrays = put_all(backend, gradients)
    if not by_parts:
        engine.add(arrays, weight)
        return
    of_slot = dict(zip(engine.layout.slots, arrays, strict=True))
    for span in reversed(engine.layout.spans):
        parts = [of_slot[slot] for slot in span.slots]
        if span.slots[0].block is None:
            engine.add_non_block(span.slots[0].name, parts[0], weight)
        else:
            engine.add_block(span.slots[0].block, parts, weight)


def told(result, arrays=None):
    """All of a step that is a matter of bits."""
    found = [result.weight, result.micro_batches, sorted(result.unused), result.step]
    found += [float(np.float32(float(value))).hex() for value in (result.factor, result.scale, result.skipped)]
    arrays = arrays or list((result.sums if result.deferred else result.gradients).values())
    return [*found, *(hashlib.sha256(on_host(array).tobytes()).hexdigest() for array in arrays)]


def norms(result):
    return [float(norm).hex() for norm in (result.norm, *result.component_norms, *result.block_norms)]


def digest(facts):
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def window(engine, backend, values, kind, weights, seed, *, by_parts=False, way="in place"):
    for k, weight in enumerate(weights):
        gradients = micro_batch(engine.layout, values, kind, seed + 100 * k, absent=k == 1)
        add(engine, backend, gradients, weight, by_parts=by_parts)
    out = None
    if way == "out":
        out = put_all(backend, [np.zeros(slot.shape, np.float16) for slot in engine.layout.slots])
    result = engine.step(out, deferred=way == "deferred")
    return told(result, out) + (norms(result) if values is exact else [])


def of_one_worker(backend, layout, kind, weights, **options):
    """Two steps: every way in and out, folded as it comes and held; bounded where the norm is the same everywhere."""
    facts = []
    for way, by_parts in (("in place", False), ("out", True), ("deferred", False)):
        for values, max_norm in ((rough, None), (exact, 0.75)):
            engine = GradientEngine(layout, backend.kernels, max_norm, loss_scale=4.0, **options)
            for step in range(2):
                seed = 1000 * step
                facts.append(window(engine, backend, values, kind, weights, seed, by_parts=by_parts, way=way))
    return digest(facts)


def of_workers(world_size, backend, average, *, empty=None, early=False):
    layout, found = LAYOUTS["transformer"], []

    def work(exchange):
        options = {"micro_batches": 2} if early else {}
        engine = GradientEngine(layout, backend.kernels, exchange=exchange, average=average, **options)
        facts = []
        for step in range(2):
            weights = (1.0 + exchange.rank, 3.0)
            if exchange.rank == empty:
                engine.add(None, weight=0)
                weights = ()
            facts.append(window(engine, backend, rough, "mixed", weights, 10_000 * exchange.rank + 1000 * step))
        return facts

    found = on_ranks(work, world_size, bucket_bytes=256)
    assert all(facts == found[0] for facts in found), found
    return digest(found[0])


LARGE = ("over a chunk", "mixed", WEIGHTS[-1])  # an emulated device takes 2 s for it
WINDOWS = [LARGE, *(case for case in itertools.product(LAYOUTS, KINDS, WEIGHTS) if case[0] != LARGE[0])]
GROUPS = [
    *({"world_size": w, "average": average} for w in (1, 2, 3, 4) for average in ("weighted", "per_worker")),
    *({"world_size": 3, "average": "weighted", "empty": rank} for rank in range(3)),
    {"world_size": 2, "average": "weighted", "early": True},
]


def named(*parts):
    return " ".join(str(part) for part in parts)


def recorded():
    return json.loads(RECORD.read_text())


def record():
    backend = available("host")
    facts = {named(*case): of_one_worker(backend, LAYOUTS[case[0]], *case[1:]) for case in WINDOWS}
    facts |= {named(*options.items()): of_workers(backend=backend, **options) for options in GROUPS}
    RECORD.write_text(json.dumps(facts, indent=1) + "\n")


@pytest.mark.parametrize("hold", [1, 2])
@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: named(*case))
def test_of_one_worker(backend, case, hold):
    name, kind, weights = case
    assert of_one_worker(backend, LAYOUTS[name], kind, weights, hold=hold) == recorded()[named(*case)]


@pytest.mark.parametrize("options", GROUPS, ids=lambda options: named(*options.values()))
def test_of_several_workers(backend, options):
    assert of_workers(backend=backend, **options) == recorded()[named(*options.items())]


if __name__ == "__main__":
    sys.exit(record())
