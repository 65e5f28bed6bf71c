"""Every CUDA kernel once, at odd sizes and offsets, against NumPy: small, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python measured/gpu_once.py

CuPy's memory pool is switched off, so that each array is an allocation of its own and an access beyond it is seen;
`--pool` leaves it on, for the captured step whose memory another would be given if it were not kept. `--few` leaves the
many components out, which take thousands of allocations.
"""

import importlib
import itertools
import sys
from collections.abc import Sequence

import numpy as np

from gradengine import GradientEngine, GradientLayout
from gradengine.arrays.buffer import RawBuffer
from gradengine.clip import FusedClipState, clip_gradients_fused
from gradengine.kernels import Contribution, CudaKernels, FoldPass
from gradengine.kernels.cuda import cuda_kernels
from gradengine.layout.slots import Span

DTYPES = ("float32", "bfloat16", "float16")
SIZES = (1, 7, 33, 2049, 5003)
FEW, MANY = 9, 501  # components: beyond 480 addresses the arguments are the large ones
CHURN = 32


def random(size: int, dtype: str, seed: int) -> np.ndarray:
    """Normally distributed values as they are stored; bf16 as its bits."""
    values = np.random.default_rng(seed).standard_normal(size, np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def widened(stored: np.ndarray) -> np.ndarray:
    """The values in fp32."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def on_device(xp, stored: np.ndarray, dtype: str, offset: int):
    """The values as a raw buffer that begins `offset` elements behind an allocation's start and ends with it."""
    memory = xp.empty(offset + stored.size, stored.dtype)
    part = memory[offset:]
    part.set(stored)
    return RawBuffer(int(part.data.ptr), part.size, dtype, "cuda:0", owner=part), part


def sizes_of(components: int) -> list[int]:
    """Sizes of that many components: all of the odd ones, then small ones."""
    return [SIZES[i] if i < len(SIZES) else 1 + i % 5 for i in range(components)]


def accumulates(kernels: CudaKernels, components: int, sources: int) -> None:
    """K1: folds of `sources` micro-batches of mixed dtypes into targets of odd sizes, bit for bit."""
    xp = kernels.xp
    sizes = sizes_of(components)
    targets = [kernels.device.allocate(size) for size in sizes]
    expected, columns = [], []
    weights = [np.float32(weight) for weight in (1, 0.3, 2, 1, 0.7)[:sources]]
    for position, size in enumerate(sizes):
        dtypes = [DTYPES[(position + j) % 3] for j in range(sources)]
        stored = [random(size, dtype, 7 * position + j) for j, dtype in enumerate(dtypes)]
        pairs = zip(stored, dtypes, strict=True)
        views = [
            kernels.device.view(on_device(xp, values, dtype, (position + j) % 8)[0], "w")
            for j, (values, dtype) in enumerate(pairs)
        ]
        columns.append(views)
        terms = [weight * widened(values) for weight, values in zip(weights, stored, strict=True)]
        expected.append(list(itertools.accumulate(terms))[-1])
    arena, slots = kernels.arena(targets), Span.at(range(len(targets)))
    contributions = [Contribution.of(slots, views) for views in zip(*columns, strict=True)]
    kernels.accumulate(arena, FoldPass(slots, np.ones(len(targets), np.bool_), contributions, weights), measure=True)
    for target, values in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(kernels.device.array(target, (target.size,)).get(), values)
    squares = [np.vdot(values.astype(np.float64), values) for values in expected]
    np.testing.assert_allclose(kernels.totals(arena), squares, rtol=1e-6)


def clips(kernels: CudaKernels, components: int) -> None:
    """The norm of buffers as they lie, K2, and K3 in place, in every dtype."""
    xp = kernels.xp
    made = [(DTYPES[i % 3], random(size, DTYPES[i % 3], i)) for i, size in enumerate(sizes_of(components))]
    pairs = [on_device(xp, values, dtype, i % 8) for i, (dtype, values) in enumerate(made)]
    state = FusedClipState([part.size for _, part in pairs], kernels)
    clip_gradients_fused([buffer for buffer, _ in pairs], 0.5, state)
    norm = np.sqrt(sum(np.vdot(widened(values).astype(np.float64), widened(values)) for _, values in made))
    np.testing.assert_allclose(float(state.norm), norm, rtol=1e-6)
    for (_, part), (_, values) in zip(pairs, made, strict=True):
        np.testing.assert_allclose(widened(part.get()), widened(values) * (0.5 / norm), rtol=2.0**-8, atol=1e-6)


def steps(kernels: CudaKernels) -> None:
    """A window and its step: eager and captured give the same bits, twice, with the memory pool churned between."""
    xp = kernels.xp
    sizes = sizes_of(FEW)
    layout = GradientLayout.of([(size,) for size in sizes])
    batches = [
        [
            on_device(xp, random(size, DTYPES[k % 3], 100 * k + i), DTYPES[k % 3], i % 8)[0]
            for i, size in enumerate(sizes)
        ]
        for k in range(3)
    ]

    def window(engine: GradientEngine, out: list) -> None:
        for gradients in batches:
            engine.add(gradients, weight=1.5)
        engine.step(out)

    outs = [[on_device(xp, np.zeros(size, np.uint16), "bfloat16", 3) for size in sizes] for _ in range(2)]
    for hold in (1, 3):
        eager = GradientEngine(layout, kernels, max_norm=0.1, micro_batches=3, hold=hold)
        captured = GradientEngine(layout, kernels, max_norm=0.1, micro_batches=3, hold=hold)
        window(eager, [buffer for buffer, _ in outs[0]])
        with captured.capture() as graph:
            window(captured, [buffer for buffer, _ in outs[1]])
        for _ in range(2):
            for _, part in outs[1]:
                part.fill(0)
            graph.replay()
            churned = [xp.zeros(1000 * (1 + i), np.float32) for i in range(CHURN)]
            for (_, expected), (_, found) in zip(*outs, strict=True):
                np.testing.assert_array_equal(found.get(), expected.get())
            del churned


def names_what_is_not_finite(kernels: CudaKernels) -> None:
    """K2 finds the component and the element, and zeros are handed back."""
    bad = random(5003, "float32", 0)
    bad[4321] = np.nan
    layout = GradientLayout.of([(33,), (5003,)])
    engine = GradientEngine(layout, kernels)
    engine.add([on_device(kernels.xp, values, "float32", 1)[0] for values in (random(33, "float32", 1), bad)])
    result = engine.step()
    found = result.non_finite
    if found is None or (found.component, found.index) != ("1", 4321):
        raise AssertionError(f"a NaN at 4321 of component 1 was not found, but {found}")
    for array in result.gradients.values():
        np.testing.assert_array_equal(array.get(), 0)


def everything(kernels: CudaKernels, sizes: Sequence[int] = (FEW, MANY)) -> list[str]:
    """All of it, with these numbers of components; the names of what was done."""
    done = []
    for components, sources in itertools.product(sizes, (1, 4, 5)):
        accumulates(kernels, components, sources)
        done.append(f"accumulate, {components} components, {sources} micro-batches")
    for components in sizes:
        clips(kernels, components)
        done.append(f"measure, finalise, hand back, {components} components")
    steps(kernels)
    names_what_is_not_finite(kernels)
    kernels.xp.cuda.runtime.deviceSynchronize()
    return [*done, "step, eager and captured", "not finite"]


def main() -> None:
    """On the first GPU."""
    if "--pool" not in sys.argv[1:]:
        importlib.import_module("cupy").cuda.set_allocator(None)
    sizes = (FEW,) if "--few" in sys.argv[1:] else (FEW, MANY)
    print(*everything(cuda_kernels(0), sizes), sep="\n")


if __name__ == "__main__":
    main()
