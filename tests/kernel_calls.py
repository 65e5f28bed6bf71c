"""Calls of the kernels on arrays as NumPy has them, and what a test compares of their results."""

import numpy as np
import strategies as draw
from devices import number_of
from folds import Fold, accumulate, finalise, hand_back, measure, totals_of

from gradengine.kernels import ClipPlan, Contribution, FoldPass
from gradengine.layout.slots import Span

ALL_16_BITS = np.arange(2**16, dtype=np.uint16)
OFFSETS = range(8)  # in elements: every way to lie beside a 16-byte boundary


def size_of(backend, limit):
    """A size of `strategies.LIMITS` in elements of that backend."""
    chunks, more = limit
    return chunks * backend.chunk + more


def fold_of(position, overwrite, views, weights):
    return Fold(position, overwrite, tuple(views), tuple(np.float32(weight) for weight in weights))


def batch_of(positions, views, weights, overwrite):
    """Micro-batches as they are held: a row of views for each, None where it gave nothing."""
    places = Span.at(positions)
    contributions = [Contribution.of(places, row) for row in views]
    return FoldPass(places, np.array(overwrite), contributions, [np.float32(weight) for weight in weights])


def accumulated(backend, target, sources, weights, overwrite, sums=None, offset=0):
    """K1 on one target, which keeps its values; the target afterwards."""
    buffer = backend.buffer(target)
    views = [backend.buffer_at(source, offset) for source in sources]
    accumulate(backend.kernels, [buffer], [fold_of(0, overwrite, views, weights)], sums)
    return backend.get(buffer)


def sums_of(backend, buffers):
    sums = backend.kernels.partial_sums([buffer.size for buffer in buffers])
    measure(backend.kernels, buffers, sums, range(len(buffers)))
    return sums


def measured(backend, *arrays):
    """The squared sum of each array, by a pass of its own."""
    return totals_of(backend.kernels, sums_of(backend, [backend.buffer(array) for array in arrays]))


def scaled(backend, source, factor, dtype, offsets=(0, 0)):
    """K3 from one array to another of that dtype, each at an offset; also what lies on both sides of it is kept."""
    sevens = [np.full(size, 7, draw.DTYPES[dtype]) for size in (5, source.size, 5)]
    whole, (_, destination, _) = backend.buffers_in_one(sevens, offsets[1])
    backend.kernels.scale([backend.buffer_at(source, offsets[0])], np.float32(factor), [destination])
    got, first = backend.get(whole).view(draw.DTYPES[dtype]), offsets[1] + 5
    assert (got[offsets[1] : first] == 7).all()
    assert (got[first + source.size :] == 7).all()
    return got[first : first + source.size]


def numbers(values):
    """Norms, scales or factors on the host, wherever they lie."""
    return [number_of(value) for value in values]


def everything(backend):
    """The bits of a fold, its squared sums and its hand back, over several chunks and dtypes."""
    kernels, chunk = backend.kernels, backend.chunk
    sizes = [3 * chunk + 5, 700, 0, chunk]
    targets, sums = [kernels.device.allocate(size) for size in sizes], kernels.partial_sums(sizes)
    folds = []
    for p, size in enumerate(sizes):
        views = [backend.buffer_at(draw.random_array([p, i], size, d), p + i) for i, d in enumerate(draw.DTYPES)]
        folds.append(fold_of(p, True, views, [1, 0.3, 5]))
    accumulate(kernels, targets, folds, sums)
    totals = totals_of(kernels, sums)
    plan = ClipPlan((0, 0, 1, 1), (1.0, 0.3), (0, 0, None, 1))
    decision = finalise(kernels, targets, sums, plan, 6.3, zero_if_bad=True)
    hand_back(kernels, targets, decision, plan.groups, targets)
    norms = (decision.norm, *decision.group_norms, *decision.block_norms, *decision.component_norms)
    bits = [totals.tobytes(), np.array(numbers((*norms, *decision.factors))).tobytes()]
    return b"".join([*bits, *(backend.get(target).tobytes() for target in targets)])
