"""Extraction and merging of a component's shards under tensor parallelism, in any framework's arrays.

On each rank a column-parallel layer holds some columns of its matrix, and a row-parallel layer some rows (Shoeybi et
al. 2019, arXiv:1909.08053, section 3). Matrices are stored (in, out) here. torch.nn.Linear stores (out, in), so that
its weight in a column-parallel layer is a `RowParallelShard`, and vice versa.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, final

from gradengine.arguments import checked_rank, listed, truth_value, whole_number
from gradengine.arrays.frameworks import (
    AnyArray,
    as_sliceable,
    assign,
    copied,
    empty_like,
    is_jax,
    joined_by_jax,
    refuse_mixed,
)
from gradengine.errors import CallerError, LayoutMismatch

Partition: TypeAlias = Literal["column", "row", "replicated"]
Shape: TypeAlias = tuple[int, ...]

TENSOR_PARALLEL = ("tp_rank", "tp_size")  # argument names of a rank and the size in a tensor-parallel group


@dataclass(frozen=True)
class Shard:
    """One rank's shard of a component, which is the whole component unless a subclass divides it.

    Attributes:
        partition: "column", "row" or "replicated".
        full_shape: The whole component's shape.
        tp_rank: The shard's rank.
        tp_size: Size of the tensor-parallel group.
    """

    partition: ClassVar[Partition] = "replicated"
    _dimension: ClassVar[int | None] = None  # index of the sharded dimension
    full_shape: Shape
    tp_rank: int
    tp_size: int

    def __post_init__(self) -> None:
        tp_rank, tp_size = checked_rank(self.tp_rank, self.tp_size, TENSOR_PARALLEL)
        shape = tuple(whole_number("a dimension", dimension, 0) for dimension in self.full_shape)
        if self._dimension is not None:
            divided(("rows", "columns")[self._dimension], shape[self._dimension], tp_size)
        for name, value in {"full_shape": shape, "tp_rank": tp_rank, "tp_size": tp_size}.items():
            object.__setattr__(self, name, value)  # NumPy's integers could overflow

    @property
    def local_shape(self) -> Shape:
        """The shard's shape."""
        shape, d = self.full_shape, self._dimension
        return shape if d is None else (*shape[:d], shape[d] // self.tp_size, *shape[d + 1 :])

    def extract_shard(self, array: AnyArray, *, copy: bool = False) -> AnyArray:
        """Return this rank's shard of the whole component.

        Args:
            array: The whole component, of any framework and dtype, on any device.
            copy: Whether to return a contiguous copy.

        Returns:
            The shard, of the array's type, or of NumPy's or CuPy's for an object that has only DLPack. Without `copy`
            it is a view, except for JAX, whose slices are copies. A torch parameter's shard is detached from autograd.

        Raises:
            LayoutMismatch: The array has the wrong shape.
            BufferRefused: `array` is not an array.

        Example:
            >>> ColumnParallelShard(2, 4, tp_rank=1, tp_size=2).extract_shard(np.arange(8).reshape(2, 4))
            array([[2, 3],
                   [6, 7]])
        """
        whole = as_sliceable(array, "the whole component")
        _refuse_other_shape(whole, self.full_shape, f"a {self.partition} shard is cut from")
        part = whole[self._index_of(self.tp_rank)]
        return copied(part) if truth_value("copy", copy) else part

    def merge_shards(self, arrays: Sequence[AnyArray], out: AnyArray | None = None) -> AnyArray:
        """Merge all ranks' shards into the whole component, the inverse of `extract_shard`.

        Args:
            arrays: The shards in rank order, all of one framework, dtype and device.
            out: The destination, which must not overlap the shards. None for a new array.

        Returns:
            The whole component, as a new array of the shards' type or as `out`. A replicated component has rank 0's
            values, which are not compared with the other ranks' values.

        Raises:
            LayoutMismatch: There are not `tp_size` shards, or one has the wrong shape or dtype.
            BufferRefused: A shard is not an array, or `out` cannot be written.

        Example:
            >>> shard = RowParallelShard(4, 1, tp_rank=0, tp_size=2)
            >>> shard.merge_shards([np.array([[1], [2]]), np.array([[3], [4]])])[:, 0]
            array([1, 2, 3, 4])
        """
        parts = [as_sliceable(array, f"rank {rank}'s part") for rank, array in enumerate(listed("arrays", arrays))]
        if len(parts) != self.tp_size:
            raise LayoutMismatch(
                "there is not one shard for each rank", got=f"{len(parts)} shards", expected=self.tp_size
            )
        for rank, part in enumerate(parts):
            _refuse_other_shape(part, self.local_shape, f"rank {rank}'s part is")
            refuse_mixed(part, parts[0], f"rank {rank}'s part")
        if self.partition == "replicated":
            parts = parts[:1]
        if out is None and is_jax(parts[0]):  # JAX arrays are immutable
            return parts[0] if len(parts) == 1 else joined_by_jax(parts, self._dimension or 0)
        whole = empty_like(parts[0], self.full_shape) if out is None else as_sliceable(out, "the destination")
        _refuse_other_shape(whole, self.full_shape, "the parts are merged into")
        refuse_mixed(whole, parts[0], "the destination")
        assign(whole, [(self._index_of(rank), part) for rank, part in enumerate(parts)], "the destination")
        return whole if out is None else out

    def _index_of(self, rank: int) -> tuple[Any, ...]:
        """Return the index of a rank's shard in the whole component."""
        if self._dimension is None:
            return (...,)  # makes a view, even of an array without dimensions
        length = self.local_shape[self._dimension]
        return (*[slice(None)] * self._dimension, slice(rank * length, (rank + 1) * length))


@final
class ColumnParallelShard(Shard):
    """Columns of a matrix (rows, columns), the outputs that one rank computes. A strided view unless it is copied.

    Args:
        rows: Rows of the whole matrix.
        columns: Columns of the whole matrix, a multiple of `tp_size`.
        tp_rank: The rank, whose columns begin at tp_rank * columns / tp_size.
        tp_size: Size of the tensor-parallel group.

    Raises:
        CallerError: The columns cannot be divided, or the rank is out of range.

    Example:
        >>> ColumnParallelShard(1024, 4096, tp_rank=1, tp_size=2).local_shape
        (1024, 2048)
    """

    partition = "column"
    _dimension = 1

    def __init__(self, rows: int, columns: int, tp_rank: int, tp_size: int) -> None:
        super().__init__((rows, columns), tp_rank, tp_size)


@final
class RowParallelShard(Shard):
    """Rows of a matrix (rows, columns), the inputs that one rank multiplies. A contiguous view.

    The ranks' products are partial sums of the layer's output, which an all-reduce adds. Arguments and errors are those
    of `ColumnParallelShard`, except that here the rows must be a multiple of `tp_size`.

    Example:
        >>> RowParallelShard(4096, 1024, tp_rank=1, tp_size=2).local_shape
        (2048, 1024)
    """

    partition = "row"
    _dimension = 0

    def __init__(self, rows: int, columns: int, tp_rank: int, tp_size: int) -> None:
        super().__init__((rows, columns), tp_rank, tp_size)


def divided(name: str, value: int, parts: int, by: str = "tp_size", do: str | None = None) -> int:
    """Return the quotient of two whole numbers, or raise `CallerError` with both if there is a remainder."""
    if value % parts:
        what, got = f"{name} cannot be divided by {by}", f"{value} / {parts}, which leaves {value % parts}"
        raise CallerError(what, got=got, expected=f"a multiple of {parts}", do=do)
    return value // parts


def _refuse_other_shape(array: AnyArray, shape: Shape, what: str) -> None:
    if tuple(array.shape) != shape:
        raise LayoutMismatch(f"{what} the wrong shape", got=tuple(array.shape), expected=shape)
