"""What the tests draw from: sizes at every limit of the kernels, dtypes, magnitudes, weights, layouts."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from gradengine.layout import GradientLayout

ROW = 256  # elements whose squares the host sums in fp32
UNIT = 8  # elements that a GPU's thread takes at a time; an edge of a tensor is up to 7 longer
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SMALL_SIZES = (0, 1, 2, 7, 8, 9, 15, 16, 17, 22, 23, 24, 25, 31, 32, 33, 127, ROW - 1, ROW, ROW + 1, 3 * ROW + 5)
# In chunks of a backend and elements more: every size at which a kernel begins to do something else.
CHUNK_LIMITS = ((1, -9), (1, -1), (1, 0), (1, 1), (1, 7), (1, 8), (1, 15), (1, 16), (2, -1), (2, ROW + 1))
LIMITS = (*((0, size) for size in SMALL_SIZES), *CHUNK_LIMITS)

dtypes = st.sampled_from(list(DTYPES))
weights = st.one_of(st.just(1.0), st.floats(2.0**-20, 2.0**20, width=32))
bad_weights = st.sampled_from([0, -1, float("nan"), float("inf"), 1e-60, 1e60, "x", None])
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
words = st.text("abw_", min_size=1, max_size=3)


@st.composite
def names(draw):
    """Dotted names, with and without a number that makes a block."""
    stem = draw(st.lists(words, max_size=2))
    number = draw(st.one_of(st.none(), st.integers(0, 12).map(str)))
    return ".".join([*stem, *([] if number is None else [number]), *draw(st.lists(words, min_size=1, max_size=2))])


named_shapes = st.dictionaries(names(), shapes, min_size=1, max_size=9)
layouts = named_shapes.map(GradientLayout.of)


FEW_SIZES = (0, 1, 2, 5, 8, 31, 32, 33, 70)


@st.composite
def uneven_layouts(draw, chunk):
    """Blocks unlike each other among other components, in any order, some empty; now and then one of two chunks."""
    blocks = draw(st.lists(st.integers(1, 3), max_size=3))
    names = [f"layers.{block}.{i}" for block, count in enumerate(blocks) for i in range(count)]
    names += [f"other{i}" for i in range(draw(st.integers(0 if names else 1, 3)))]
    sizes = {name: draw(st.sampled_from(FEW_SIZES)) for name in draw(st.permutations(names))}
    if draw(st.integers(0, 9)) == 9:
        sizes[draw(st.sampled_from(names))] = chunk + 5
    return GradientLayout.of({name: draw(st.sampled_from([(size,), (1, size)])) for name, size in sizes.items()})


def random_array(seed, shape, dtype="float32", magnitude=1.0):
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        return np.asarray(np.float32(magnitude) * rng.standard_normal(shape, np.float32)).astype(DTYPES[dtype])


def random_gradients(seed, slots, dtype="float32"):
    """The seed is a number or a flat list of some: NumPy 2.5 takes none within another."""
    seeds = seed if isinstance(seed, list) else [seed]
    return [random_array([*seeds, i], slot.shape, dtype) for i, slot in enumerate(slots)]


def storage_bits(array):
    """The array's bits, flat: what must be equal where bits must be."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def assert_same_bits(got, expected):
    assert got.dtype.itemsize == expected.dtype.itemsize
    np.testing.assert_array_equal(storage_bits(got), storage_bits(expected))


def assert_same_values(got, expected):
    """Equal bits, but any NaN equals any other: a GPU's arithmetic knows only one, a CPU's keeps some of its bits."""
    got, nan = storage_bits(got).view(expected.dtype), np.isnan(expected.reshape(-1).astype(np.float32))
    assert np.isnan(got[nan].astype(np.float32)).all()
    assert_same_bits(got[~nan], expected.reshape(-1)[~nan])


def folded(target, sources, weights, overwrite):
    """The contract of accumulation as it is written: each operation rounded once to fp32."""
    total = None if overwrite else target
    for source, weight in zip(sources, weights, strict=True):
        value = source.reshape(-1).astype(np.float32)
        if weight != 1:
            value = np.float32(weight) * value
        total = value if total is None else total + value
    return total


def scaled(values, factor, dtype):
    """The contract of handing back: one fp32 multiplication, then one rounding to the destination's dtype."""
    with np.errstate(all="ignore"):
        return (values.astype(np.float32) * np.float32(factor)).astype(DTYPES[dtype])


def exact_norm(arrays):
    """The norm of everything in extended precision, rounded to fp64 at the end."""
    squares = [np.sum(np.square(a.astype(np.longdouble)), dtype=np.longdouble) for a in arrays]
    return float(np.sqrt(np.sum(squares, dtype=np.longdouble)))
