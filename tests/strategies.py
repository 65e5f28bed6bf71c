"""What the tests draw from: sizes at every limit of the kernels, dtypes, magnitudes, weights, layouts."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from gradengine.kernels import CHUNK
from gradengine.layout import GradientLayout

ROW = 512  # elements whose squares are summed in fp32
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SMALL_SIZES = (0, 1, 2, 7, 31, 32, 33, 127, ROW - 1, ROW, ROW + 1, 3 * ROW + 5)
CHUNK_SIZES = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + ROW + 1)
SIZES = SMALL_SIZES + CHUNK_SIZES

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


def random_array(seed, shape, dtype="float32", magnitude=1.0):
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        return np.asarray(np.float32(magnitude) * rng.standard_normal(shape, np.float32)).astype(DTYPES[dtype])


def random_gradients(seed, slots, dtype="float32"):
    return [random_array([seed, i], slot.shape, dtype) for i, slot in enumerate(slots)]


def storage_bits(array):
    """The array's bits, flat: what must be equal where bits must be."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def assert_same_bits(got, expected):
    assert got.dtype.itemsize == expected.dtype.itemsize
    np.testing.assert_array_equal(storage_bits(got), storage_bits(expected))


def folded(target, sources, weights, overwrite):
    """The contract of accumulation as it is written: each operation rounded once to fp32."""
    total = None if overwrite else target
    for source, weight in zip(sources, weights, strict=True):
        value = source.reshape(-1).astype(np.float32)
        if weight != 1:
            value = np.float32(weight) * value
        total = value if total is None else total + value
    return total


def exact_norm(arrays):
    """The norm of everything in extended precision, rounded to fp64 at the end."""
    squares = [np.sum(np.square(a.astype(np.longdouble)), dtype=np.longdouble) for a in arrays]
    return float(np.sqrt(np.sum(squares, dtype=np.longdouble)))
