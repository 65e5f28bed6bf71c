"""Shards of a matrix: cut out and put together again on every backend and in every framework, and what is refused."""

import sys
import types

import numpy as np
import pytest
import strategies as draw
from devices import on_host
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from producers import Producer

from gradengine import ColumnParallelShard, RowParallelShard
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch
from gradengine.layout.shards import Shard

KINDS = {"column": ColumnParallelShard, "row": RowParallelShard}
ROW, COLUMN = RowParallelShard(4, 6, 0, 2), ColumnParallelShard(4, 6, 1, 2)
# A backend is the same for all examples of a test: nothing is left in it that another could find.
on_each_backend = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def cuts(draw_one):
    """The shards of a group of any size, of a component of any shape; and the whole shape."""
    kind, tp_size = draw_one(st.sampled_from(["column", "row", "replicated"])), draw_one(st.integers(1, 9))
    if kind == "replicated":
        shape = draw_one(draw.shapes)
        return [Shard(shape, rank, tp_size) for rank in range(tp_size)], shape
    part, other = draw_one(st.integers(0, 6)), draw_one(st.integers(0, 9))
    shape = (other, part * tp_size) if kind == "column" else (part * tp_size, other)
    return [KINDS[kind](*shape, rank, tp_size) for rank in range(tp_size)], shape


def matrix(rows=4, columns=6, dtype=np.float32):
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


def halves(whole):
    return [whole[:2], whole[2:]]


@given(cut=cuts(), dtype=draw.dtypes, copy=st.booleans(), seed=draw.seeds, into_out=st.booleans())
@on_each_backend
def test_merge_of_extract_is_the_identity(backend, cut, dtype, copy, seed, into_out):
    """Also into memory that is given. The parts are slices of the whole in the order of the ranks."""
    shards, shape = cut
    array = draw.random_array(seed, shape, dtype)
    whole, out = backend.put(array.copy()), None
    with backend.active():  # by CuPy's own operations, which want that
        if into_out:
            out = backend.put(np.zeros(shape, array.dtype))
        parts = [shard.extract_shard(whole, copy=copy) for shard in shards]
        merged = shards[-1].merge_shards(parts, out=out)
    assert merged is out or (out is None and type(merged) is type(whole))
    draw.assert_same_bits(on_host(merged), array)
    assert [tuple(part.shape) for part in parts] == [shard.local_shape for shard in shards]
    axis = {"column": 1, "row": 0}.get(shards[0].partition)
    expected = [array] * len(parts) if axis is None else np.split(array, len(parts), axis)
    for part, values in zip(parts, expected, strict=True):
        draw.assert_same_bits(on_host(part), np.ascontiguousarray(values).reshape(part.shape))


class TestMemory:
    @pytest.mark.parametrize("shard", [ROW, COLUMN, Shard((4, 6), 1, 2)])
    def test_a_shard_is_a_view_until_a_copy_is_asked_for(self, shard):
        whole = matrix()
        part, copy = shard.extract_shard(whole), shard.extract_shard(whole, copy=True)
        assert np.shares_memory(part, whole)
        assert part.strides == (24, 4)
        assert not np.shares_memory(copy, whole)
        assert copy.flags.c_contiguous
        assert copy.tolist() == part.tolist()

    def test_on_a_device_it_stays_there(self, device):
        whole = device.put(matrix())
        part = COLUMN.extract_shard(whole)
        assert part.data.ptr == whole.data.ptr + 12
        assert part.strides == (24, 4)
        assert isinstance(part, device.xp.ndarray)

    def test_of_a_transposed_array_and_of_any_dtype_too(self):
        whole = matrix(6, 4).T
        assert ColumnParallelShard(4, 6, 0, 3).extract_shard(whole).tolist() == whole[:, :2].tolist()
        for dtype in (np.uint8, np.int64, np.float64, np.complex64):
            assert ROW.merge_shards(halves(matrix(dtype=dtype))).dtype == dtype

    def test_merging_leaves_the_parts_as_they_are_and_takes_a_replica_of_rank_0(self):
        parts = halves(matrix())
        ROW.merge_shards(parts)[:] = 7
        assert np.concatenate(parts).tolist() == matrix().tolist()
        first, second = np.ones(4), np.zeros(4)
        replica = Shard((4,), 1, 2).merge_shards([first, second])
        assert replica.tolist() == [1, 1, 1, 1]
        replica[:] = 7
        assert first.tolist() == [1, 1, 1, 1]


class TestFrameworks:
    def test_torch(self):
        torch = pytest.importorskip("torch")
        whole = torch.nn.Parameter(torch.arange(24, dtype=torch.bfloat16).reshape(4, 6))
        part = COLUMN.extract_shard(whole)
        assert part.data_ptr() == whole.data_ptr() + 6
        assert part.stride() == (6, 1)
        assert not part.requires_grad
        copy = COLUMN.extract_shard(whole, copy=True)
        assert copy.is_contiguous()
        assert copy.data_ptr() != part.data_ptr()
        assert ROW.extract_shard(whole, copy=True).data_ptr() != whole.data_ptr()
        merged = COLUMN.merge_shards([ColumnParallelShard(4, 6, 0, 2).extract_shard(whole), part])
        assert merged.dtype == torch.bfloat16
        assert torch.equal(merged, whole)
        out = torch.zeros(4, 6, dtype=torch.bfloat16)
        assert COLUMN.merge_shards([merged[:, :3], merged[:, 3:]], out=out) is out
        assert torch.equal(out, whole)

    def test_what_torch_has_and_no_shard_can_be_of(self):
        torch = pytest.importorskip("torch")
        with torch.inference_mode():
            inference = torch.zeros(4, 6)
        for out in (torch.zeros(1, 6).expand(4, 6), inference):
            with pytest.raises(BufferRefused, match="the destination cannot be written to"):
                ROW.merge_shards(halves(torch.ones(4, 6)), out=out)
        whole = torch.zeros(4, 6, dtype=torch.bfloat16)  # a dtype that NumPy does not know
        only_dlpack = types.SimpleNamespace(__dlpack__=whole.__dlpack__, __dlpack_device__=whole.__dlpack_device__)
        for given_, word in ((whole.to_sparse(), "sparse"), (only_dlpack, "DLPack")):
            with pytest.raises(BufferRefused, match=f"the whole component .*{word}"):
                ROW.extract_shard(given_)

    def test_jax_makes_copies_and_cannot_be_written_to(self):
        jax = pytest.importorskip("jax")
        whole = jax.numpy.arange(24, dtype=jax.numpy.bfloat16).reshape(4, 6)
        for kind, size in ((ColumnParallelShard, 3), (RowParallelShard, 2), (lambda *given: Shard((4, 6), 1, 2), 2)):
            shards = [kind(4, 6, rank, size) for rank in range(size)]
            merged = shards[0].merge_shards([shard.extract_shard(whole, copy=True) for shard in shards])
            assert isinstance(merged, jax.Array)
            assert merged.dtype == whole.dtype
            assert (merged == whole).all()
        with pytest.raises(BufferRefused, match="the destination cannot be written to"):
            ROW.merge_shards(halves(whole), out=whole)

    def test_what_offers_dlpack_alone_becomes_numpys_and_on_a_device_cupys(self, monkeypatch):
        whole = matrix()
        versioned = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # NumPy 2.0 knows only the other capsules
        part = COLUMN.extract_shard(Producer(whole, versioned=versioned))
        assert isinstance(part, np.ndarray)
        assert np.shares_memory(part, whole)
        merged = ROW.merge_shards([Producer(half, versioned=versioned) for half in halves(whole)])
        assert merged.tolist() == whole.tolist()
        taken, producer = [], Producer(whole, device=(2, 0))
        cupy = types.SimpleNamespace(from_dlpack=lambda source: taken.append(source) or whole)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        assert ROW.extract_shard(producer).tolist() == whole[:2].tolist()
        assert taken == [producer]
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(BufferRefused, match=r"cannot be read by DLPack .*cupy"):
            ROW.extract_shard(producer)

    def test_parts_and_destinations_may_lie_in_files_and_parts_come_one_by_one(self, tmp_path):
        whole = matrix()
        for rank, half in enumerate(halves(whole)):
            np.save(tmp_path / f"{rank}.npy", half)
        parts = [np.load(tmp_path / f"{rank}.npy", mmap_mode="r") for rank in (0, 1)]
        assert ROW.merge_shards(part for part in parts).tolist() == whole.tolist()
        assert ROW.merge_shards([parts[0], np.array(parts[1])]).tolist() == whole.tolist()
        out = np.lib.format.open_memmap(tmp_path / "whole.npy", "w+", np.float32, (4, 6))
        ROW.merge_shards(parts, out=out)
        out.flush()
        assert np.load(tmp_path / "whole.npy").tolist() == whole.tolist()

    def test_numpys_integers_are_numbers_and_a_shard_may_be_larger_than_any_memory(self):
        shard = RowParallelShard(*map(np.uint8, (100, 2, 3, 4)))
        assert shard == RowParallelShard(100, 2, 3, 4)
        assert shard.extract_shard(np.arange(200).reshape(100, 2))[0].tolist() == [150, 151]
        assert RowParallelShard(2**62, 1, 1, 2).local_shape == (2**61, 1)


def read_only(shape):
    array = np.zeros(shape)
    array.flags.writeable = False
    return array


ONES = [np.ones((2, 6)), np.ones((2, 6))]
NO_ARRAYS = [[[1.0, 2.0]], "text", 3, None, memoryview(b"abcd")]
REFUSED = [
    *((lambda s=s: COLUMN.extract_shard(np.zeros(s)), LayoutMismatch, s, (4, 6)) for s in ((4, 7), (24,), ())),
    *((lambda a=a: ROW.extract_shard(a), BufferRefused, None, "the whole component") for a in NO_ARRAYS),
    *((lambda a=a: ROW.merge_shards([ONES[0], a]), BufferRefused, None, "rank 1's part") for a in NO_ARRAYS),
    (lambda: ROW.extract_shard(np.ma.masked_array(matrix(), mask=True)), BufferRefused, "MaskedArray", "masked"),
    (lambda: ROW.merge_shards([ONES[0], np.zeros((2, 4))]), LayoutMismatch, (2, 4), "rank 1's part"),
    (lambda: ROW.merge_shards([ONES[0], np.float32(ONES[0])]), LayoutMismatch, "numpy of float32", "rank 1's part"),
    *((lambda c=c: ROW.merge_shards(ONES[:1] * c), LayoutMismatch, f"{c} shards", 2) for c in (0, 1, 3)),
    (lambda: ROW.merge_shards(ONES, out=np.zeros((6, 4))), LayoutMismatch, (6, 4), (4, 6)),
    (lambda: ROW.merge_shards(ONES, out=np.zeros((4, 6), int)), LayoutMismatch, "numpy of int64", "the destination"),
    (lambda: ROW.merge_shards(ONES, out=read_only((4, 6))), BufferRefused, None, "the destination"),
    (lambda: ColumnParallelShard(4, 7, 0, 2), CallerError, "7 / 2, which leaves 1", "columns"),
    (lambda: RowParallelShard(7, 4, 0, 2), CallerError, "7 / 2, which leaves 1", "rows"),
    *((lambda r=r: RowParallelShard(4, 6, r, 2), CallerError, None, "tp_rank") for r in (-1, 2, 1.0, "0", None, True)),
    (lambda: Shard((4,), 2, 2), CallerError, "2", "tp_rank"),
    (lambda: Shard((-4,), 0, 2), CallerError, None, "a dimension"),
    *((lambda s=s: RowParallelShard(4, 6, 0, s), CallerError, None, "tp_size") for s in (0, -1, 2.0, None)),
    *(
        (lambda s=s: RowParallelShard(*s, 0, 2), CallerError, None, "a dimension")
        for s in ((-2, 6), (4.0, 6), (4, "6"))
    ),
]


@pytest.mark.parametrize(("call", "kind", "got", "named"), REFUSED)
def test_what_is_refused_names_what_and_both_values(call, kind, got, named):
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert str(named) in str(error)
    assert got is None or str(got) == str(error.got)


def test_shards_are_compared_by_what_they_are():
    assert ColumnParallelShard(4, 6, 1, 2) == COLUMN
    assert Shard((4,), 0, 2) == Shard((4,), 0, 2) != Shard((4,), 1, 2)
    assert len({COLUMN, ColumnParallelShard(4, 6, 1, 2), ColumnParallelShard(4, 6, 0, 2), ROW}) == 3
    assert [kind.partition for kind in (COLUMN, ROW, Shard)] == ["column", "row", "replicated"]
