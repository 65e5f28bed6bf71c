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
from gradengine.layout.shards import Replica

KINDS = {"column": ColumnParallelShard, "row": RowParallelShard}
# A backend is the same for all examples of a test: nothing is left in it that another could find.
on_each_backend = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@st.composite
def cut_matrices(draw_one):
    """Any legal shape and group: the kind, the whole shape, the group's size."""
    kind, tp_size = draw_one(st.sampled_from(sorted(KINDS))), draw_one(st.integers(1, 9))
    part, other = draw_one(st.integers(0, 6)), draw_one(st.integers(0, 9))
    shape = (other, part * tp_size) if kind == "column" else (part * tp_size, other)
    return kind, shape, tp_size


def shards_of(kind, shape, tp_size):
    return [KINDS[kind](*shape, rank, tp_size) for rank in range(tp_size)]


def matrix(rows=4, columns=6, dtype=np.float32):
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


class TestThereAndBack:
    @given(cut=cut_matrices(), dtype=draw.dtypes, copy=st.booleans(), seed=draw.seeds)
    @on_each_backend
    def test_merge_of_extract_is_the_identity(self, backend, cut, dtype, copy, seed):
        _, shape, _ = cut
        array = draw.random_array(seed, shape, dtype)
        whole, shards = backend.put(array.copy()), shards_of(*cut)
        with backend.active():  # by CuPy's own operations, which want that
            parts = [shard.extract_shard(whole, copy=copy) for shard in shards]
            merged = shards[-1].merge_shards(parts)
        assert type(merged) is type(whole)
        draw.assert_same_bits(on_host(merged), array)
        assert [tuple(part.shape) for part in parts] == [shard.local_shape for shard in shards]

    @given(cut=cut_matrices(), seed=draw.seeds)
    @on_each_backend
    def test_extract_of_merge_is_the_identity_in_memory_that_is_given(self, backend, cut, seed):
        _, shape, _ = cut
        shards = shards_of(*cut)
        arrays = [draw.random_array([seed, rank], shard.local_shape) for rank, shard in enumerate(shards)]
        out = backend.put(np.full(shape, np.nan, np.float32))
        with backend.active():
            assert shards[0].merge_shards([backend.put(array.copy()) for array in arrays], out=out) is out
        for shard, array in zip(shards, arrays, strict=True):
            draw.assert_same_bits(on_host(shard.extract_shard(out)), array)

    @given(cut=cut_matrices())
    def test_the_parts_are_disjoint_and_complete(self, cut):
        _, shape, _ = cut
        whole = np.arange(np.prod(shape)).reshape(shape)
        parts = [shard.extract_shard(whole) for shard in shards_of(*cut)]
        assert sorted(element for part in parts for element in part.ravel().tolist()) == whole.ravel().tolist()

    @given(shape=draw.shapes, tp_size=st.integers(1, 5))
    def test_a_replica_is_the_whole(self, shape, tp_size):
        whole = np.zeros(shape)
        replica = Replica(shape, tp_size - 1, tp_size)
        assert replica.local_shape == replica.full_shape == shape
        assert replica.extract_shard(whole).shape == shape
        merged = replica.merge_shards([np.full(shape, float(rank)) for rank in range(tp_size)])
        assert merged.tolist() == whole.tolist()  # rank 0's

    def test_which_part_is_whose(self):
        whole = matrix(4, 4)
        assert ColumnParallelShard(4, 4, 1, 2).extract_shard(whole).tolist() == whole[:, 2:].tolist()
        assert RowParallelShard(4, 4, 1, 2).extract_shard(whole).tolist() == whole[2:].tolist()

    def test_of_bytes_and_integers_too(self):
        shard = RowParallelShard(4, 6, 0, 2)
        for dtype in (np.uint8, np.int64, np.float64, np.complex64):
            whole = matrix(dtype=dtype)
            assert shard.merge_shards([whole[:2], whole[2:]]).dtype == dtype


class TestMemory:
    def test_a_row_shard_is_a_contiguous_view(self):
        whole = matrix()
        part = RowParallelShard(4, 6, 1, 2).extract_shard(whole)
        assert np.shares_memory(part, whole)
        assert part.flags.c_contiguous

    def test_a_column_shard_is_a_strided_view_until_a_copy_is_asked_for(self):
        whole, shard = matrix(), ColumnParallelShard(4, 6, 1, 2)
        part, copy = shard.extract_shard(whole), shard.extract_shard(whole, copy=True)
        assert np.shares_memory(part, whole)
        assert part.strides == (24, 4)
        assert not np.shares_memory(copy, whole)
        assert copy.flags.c_contiguous
        assert copy.tolist() == part.tolist()

    def test_a_copy_of_a_row_shard_has_memory_of_its_own(self):
        whole = matrix()
        assert not np.shares_memory(RowParallelShard(4, 6, 0, 2).extract_shard(whole, copy=True), whole)

    def test_on_a_device_it_stays_there(self, device):
        xp, whole = device.xp, device.put(matrix())
        part = ColumnParallelShard(4, 6, 1, 2).extract_shard(whole)
        assert part.data.ptr == whole.data.ptr + 12
        assert part.strides == (24, 4)
        assert isinstance(part, xp.ndarray)

    def test_of_a_transposed_array_too(self):
        whole = matrix(6, 4).T
        assert ColumnParallelShard(4, 6, 0, 3).extract_shard(whole).tolist() == whole[:, :2].tolist()

    def test_merging_leaves_the_parts_as_they_are(self):
        parts = [np.ones((2, 6), np.float32), np.full((2, 6), 2, np.float32)]
        merged = RowParallelShard(4, 6, 0, 2).merge_shards(parts)
        merged[:] = 7
        assert [float(part.sum()) for part in parts] == [12, 24]
        replica = Replica((4,), 0, 1).merge_shards([first := np.ones(4)])
        replica[:] = 7
        assert first.tolist() == [1, 1, 1, 1]


class TestFrameworks:
    def test_torch(self):
        torch = pytest.importorskip("torch")
        whole = torch.nn.Parameter(torch.arange(24, dtype=torch.bfloat16).reshape(4, 6))
        column, row = ColumnParallelShard(4, 6, 1, 2), RowParallelShard(4, 6, 1, 2)
        part = column.extract_shard(whole)
        assert part.data_ptr() == whole.data_ptr() + 6
        assert part.stride() == (6, 1)
        assert not part.requires_grad
        copy = column.extract_shard(whole, copy=True)
        assert copy.is_contiguous()
        assert copy.data_ptr() != part.data_ptr()
        assert row.extract_shard(whole, copy=True).data_ptr() != row.extract_shard(whole).data_ptr()
        merged = column.merge_shards([ColumnParallelShard(4, 6, 0, 2).extract_shard(whole), part])
        assert merged.dtype == torch.bfloat16
        assert torch.equal(merged, whole)
        out = torch.zeros(4, 6, dtype=torch.bfloat16)
        assert column.merge_shards([merged[:, :3], merged[:, 3:]], out=out) is out
        assert torch.equal(out, whole)

    def test_jax_makes_copies_and_cannot_be_written_to(self):
        jax = pytest.importorskip("jax")
        whole = jax.numpy.arange(24, dtype=jax.numpy.bfloat16).reshape(4, 6)
        for shards in (shards_of("column", (4, 6), 3), shards_of("row", (4, 6), 2)):
            merged = shards[0].merge_shards([shard.extract_shard(whole, copy=True) for shard in shards])
            assert isinstance(merged, jax.Array)
            assert merged.dtype == whole.dtype
            assert (merged == whole).all()
        replica = Replica((4, 6), 1, 2)
        assert (replica.merge_shards([replica.extract_shard(whole), whole + 1]) == whole).all()
        with pytest.raises(BufferRefused, match="the destination cannot be written to: got a read-only"):
            RowParallelShard(4, 6, 0, 2).merge_shards([matrix()[:2], matrix()[2:]], out=whole)

    def test_what_offers_dlpack_alone_becomes_numpys(self):
        whole = matrix()
        versioned = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # NumPy 2.0 knows only the other capsules
        part = ColumnParallelShard(4, 6, 1, 2).extract_shard(Producer(whole, versioned=versioned))
        assert isinstance(part, np.ndarray)
        assert np.shares_memory(part, whole)
        halves = [Producer(half, versioned=versioned) for half in (whole[:2], whole[2:])]
        merged = RowParallelShard(4, 6, 0, 2).merge_shards(halves)
        assert merged.tolist() == whole.tolist()

    def test_and_on_a_device_cupys(self, monkeypatch):
        taken = []

        def from_dlpack(source):
            taken.append(source)
            return matrix()

        monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(from_dlpack=from_dlpack))
        producer = Producer(matrix(), device=(2, 0))
        assert RowParallelShard(4, 6, 0, 2).extract_shard(producer).tolist() == matrix()[:2].tolist()
        assert taken == [producer]

    def test_without_cupy_it_is_refused(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(BufferRefused, match=r"the whole component cannot be read by DLPack .*cupy"):
            RowParallelShard(4, 6, 0, 2).extract_shard(Producer(matrix(), device=(2, 0)))

    def test_a_dtype_that_numpy_does_not_know_is_refused(self):
        torch = pytest.importorskip("torch")
        whole = torch.zeros(4, 6, dtype=torch.bfloat16)
        only_dlpack = types.SimpleNamespace(__dlpack__=whole.__dlpack__, __dlpack_device__=whole.__dlpack_device__)
        with pytest.raises(BufferRefused, match="the whole component cannot be read by DLPack"):
            RowParallelShard(4, 6, 0, 2).extract_shard(only_dlpack)

    @pytest.mark.parametrize("thing", [[[1.0, 2.0]], "text", 3, None, memoryview(b"abcd")])
    def test_what_is_no_array_is_refused(self, thing):
        with pytest.raises(BufferRefused, match="the whole component is not an array: got "):
            RowParallelShard(2, 2, 0, 2).extract_shard(thing)
        with pytest.raises(BufferRefused, match="rank 1's part is not an array: got "):
            RowParallelShard(4, 6, 0, 2).merge_shards([matrix()[:2], thing])


class TestNumPysOtherArrays:
    def test_parts_that_lie_in_files_are_merged(self, tmp_path):
        whole = matrix()
        for rank in (0, 1):
            np.save(tmp_path / f"{rank}.npy", whole[:, 3 * rank : 3 * rank + 3])
        parts = [np.load(tmp_path / f"{rank}.npy", mmap_mode="r") for rank in (0, 1)]
        merged = ColumnParallelShard(4, 6, 0, 2).merge_shards(parts)
        assert merged.tolist() == whole.tolist()
        assert ColumnParallelShard(4, 6, 0, 2).merge_shards([parts[0], np.array(parts[1])]).tolist() == whole.tolist()

    def test_into_a_file_too(self, tmp_path):
        out = np.lib.format.open_memmap(tmp_path / "whole.npy", "w+", np.float32, (4, 6))
        RowParallelShard(4, 6, 0, 2).merge_shards([matrix()[:2], matrix()[2:]], out=out)
        out.flush()
        assert np.load(tmp_path / "whole.npy").tolist() == matrix().tolist()

    def test_masked_arrays_would_lose_their_mask(self):
        with pytest.raises(BufferRefused, match=r"the whole component is masked: got MaskedArray; pass \.filled"):
            RowParallelShard(4, 6, 0, 2).extract_shard(np.ma.masked_array(matrix(), mask=True))

    @pytest.mark.parametrize("integer", [np.uint8, np.int32, np.int64])
    def test_numpys_integers_are_numbers(self, integer):
        shard = RowParallelShard(integer(100), integer(2), integer(3), integer(4))
        assert shard == RowParallelShard(100, 2, 3, 4)
        assert shard.extract_shard(np.arange(200).reshape(100, 2))[0].tolist() == [150, 151]

    def test_parts_may_come_one_by_one(self):
        parts = (matrix()[2 * rank : 2 * rank + 2] for rank in (0, 1))
        assert RowParallelShard(4, 6, 0, 2).merge_shards(parts).tolist() == matrix().tolist()

    def test_a_shard_may_be_larger_than_any_memory(self):
        assert RowParallelShard(2**62, 1, 1, 2).local_shape == (2**61, 1)


class TestTorchsOtherTensors:
    def test_sparse_ones_are_refused(self):
        torch = pytest.importorskip("torch")
        with pytest.raises(BufferRefused, match=r"the whole component is sparse: got torch.sparse_coo; pass .to_dense"):
            RowParallelShard(4, 6, 0, 2).extract_shard(torch.zeros(4, 6).to_sparse())

    def test_destinations_that_torch_does_not_write_to_are_refused(self):
        torch = pytest.importorskip("torch")
        parts = [torch.ones(2, 6), torch.ones(2, 6)]
        with torch.inference_mode():
            inference = torch.zeros(4, 6)
        for out in (torch.zeros(1, 6).expand(4, 6), inference):
            with pytest.raises(BufferRefused, match="the destination cannot be written to"):
                RowParallelShard(4, 6, 0, 2).merge_shards(parts, out=out)


class TestRefused:
    @pytest.mark.parametrize("shape", [(4, 7), (6, 4), (24,), (4, 6, 1), ()])
    def test_another_shape_names_both(self, shape):
        message = rf"a column shard is cut from another shape: got {tuple(shape)}, expected \(4, 6\)".replace(
            str(tuple(shape)), str(tuple(shape)).replace("(", r"\(").replace(")", r"\)")
        )
        with pytest.raises(LayoutMismatch, match=message):
            ColumnParallelShard(4, 6, 0, 2).extract_shard(np.zeros(shape))

    def test_a_part_of_another_shape_names_its_rank(self):
        with pytest.raises(LayoutMismatch, match=r"rank 1's part is another shape: got \(4, 4\), expected \(4, 3\)"):
            ColumnParallelShard(4, 6, 0, 2).merge_shards([np.zeros((4, 3)), np.zeros((4, 4))])

    def test_parts_of_two_kinds(self):
        with pytest.raises(
            LayoutMismatch,
            match=r"rank 1's part is of another framework or dtype than rank 0's: got numpy of float64, expected numpy",
        ):
            ColumnParallelShard(4, 6, 0, 2).merge_shards([np.zeros((4, 3), np.float32), np.zeros((4, 3))])

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_not_one_part_for_each_rank(self, count):
        with pytest.raises(LayoutMismatch, match=f"not one shard for each rank: got {count} shards, expected 2"):
            RowParallelShard(4, 6, 0, 2).merge_shards([np.zeros((2, 6))] * count)

    def test_a_destination_of_another_shape_or_read_only(self):
        shard, parts = RowParallelShard(4, 6, 0, 2), [np.ones((2, 6)), np.ones((2, 6))]
        with pytest.raises(LayoutMismatch, match=r"the parts are merged into another shape: got \(6, 4\)"):
            shard.merge_shards(parts, out=np.zeros((6, 4)))
        out = np.zeros((4, 6))
        out.flags.writeable = False
        with pytest.raises(BufferRefused, match="the destination cannot be written to: got a read-only ndarray"):
            shard.merge_shards(parts, out=out)
        assert not out.any()

    def test_a_destination_of_another_dtype(self):
        parts = [np.full((2, 6), 1.5, np.float32)] * 2
        with pytest.raises(
            LayoutMismatch,
            match=r"the destination is of another framework .*got numpy of int64, expected numpy of float32",
        ):
            RowParallelShard(4, 6, 0, 2).merge_shards(parts, out=np.zeros((4, 6), np.int64))

    @pytest.mark.parametrize(("kind", "shape", "name"), [("column", (4, 7), "columns"), ("row", (7, 4), "rows")])
    def test_what_cannot_be_divided_names_both_numbers(self, kind, shape, name):
        with pytest.raises(CallerError, match=f"{name} cannot be divided by tp_size: got 7 / 2, which leaves 1"):
            KINDS[kind](*shape, 0, 2)

    @pytest.mark.parametrize("rank", [-1, 2, 1.0, "0", None, True])
    def test_a_rank_out_of_range_names_both_numbers(self, rank):
        for make in (lambda: RowParallelShard(4, 6, rank, 2), lambda: Replica((4,), rank, 2)):
            with pytest.raises(
                CallerError,
                match=r"tp_rank of tp_size=2 is (out|not) .*: got .*, expected .* in 0\.\.1",
            ):
                make()

    @pytest.mark.parametrize("size", [0, -1, 2.0, None])
    def test_a_group_of_no_size(self, size):
        with pytest.raises(CallerError, match=r"tp_size is (out|not) .*: got .*expected a whole number in 1\.\.65536"):
            RowParallelShard(4, 6, 0, size)

    @pytest.mark.parametrize(("rows", "columns"), [(-2, 6), (4.0, 6), (4, "6")])
    def test_a_matrix_of_no_size(self, rows, columns):
        with pytest.raises(CallerError, match=r"(rows|columns) is (out|not) "):
            RowParallelShard(rows, columns, 0, 2)


def test_shards_are_compared_by_what_they_are():
    assert ColumnParallelShard(4, 6, 0, 2) == ColumnParallelShard(4, 6, 0, 2)
    assert Replica((4,), 0, 2) == Replica((4,), 0, 2) != Replica((4,), 1, 2)
    different = {ColumnParallelShard(4, 6, 0, 2), ColumnParallelShard(4, 6, 1, 2), RowParallelShard(4, 6, 0, 2)}
    assert len(different) == 3
    assert repr(RowParallelShard(4, 6, 0, 2)) == "RowParallelShard(4, 6, 0, 2)"
    assert [kind.partition for kind in (ColumnParallelShard, RowParallelShard, Replica)] == [
        "column",
        "row",
        "replicated",
    ]
