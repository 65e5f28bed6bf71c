"""One rank's part of a component under tensor parallelism: cut out and put together again, in any framework's arrays.

A column-parallel layer keeps some columns of its matrix and a row-parallel one some rows (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). Matrices are stored (in, out), as everywhere here. torch.nn.Linear stores (out, in): there
the weight of a column-parallel layer is a `RowParallelShard`, and the other way round.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias, final

import numpy as np

from gradengine.errors import BufferRefused, CallerError, LayoutMismatch
from gradengine.frameworks import is_jax, is_torch

__all__ = [
    "ColumnParallelShard",
    "Partition",
    "Replica",
    "RowParallelShard",
    "Shape",
    "Shard",
    "divided",
    "refuse_bad_tp_rank",
    "whole_number",
]

Partition: TypeAlias = Literal["column", "row", "replicated"]
Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = Any  # of any framework

_DLPACK_CPU = 1


class Shard(ABC):
    """One rank's part of a component, and the way there and back.

    Attributes:
        partition: How the component is cut: "column", "row" or "replicated".
        full_shape: The whole component's.
        tp_rank: Whose part it is.
        tp_size: Ranks of the tensor-parallel group.
    """

    partition: ClassVar[Partition]
    full_shape: Shape
    tp_rank: int
    tp_size: int

    @property
    def local_shape(self) -> Shape:
        """The part's shape."""
        return tuple(
            len(range(*cut.indices(n))) for cut, n in zip(self._cut_of(self.tp_rank), self.full_shape, strict=True)
        )

    def extract_shard(self, array: Array, *, copy: bool = False) -> Array:
        """This rank's part of the whole component.

        Args:
            array: The whole component, of any framework and dtype, on any device.
            copy: Whether the part gets contiguous memory of its own.

        Returns:
            The part, of the array's own kind: a view without `copy` (of JAX, whose slices are copies, a copy); NumPy's
            or CuPy's of what offers DLPack alone. Of a torch parameter it is detached.

        Raises:
            LayoutMismatch: The array has another shape.
            BufferRefused: It is no array.

        Example:
            >>> ColumnParallelShard(2, 4, tp_rank=1, tp_size=2).extract_shard(np.arange(8).reshape(2, 4))
            array([[2, 3],
                   [6, 7]])
        """
        whole = _sliceable(array, "the whole component")
        _refuse_other_shape(whole, self.full_shape, f"a {self.partition} shard is cut from")
        part = whole[self._index_of(self.tp_rank)]
        return _copied(part) if copy else part

    def merge_shards(self, arrays: Sequence[Array], out: Array | None = None) -> Array:
        """The whole component from all ranks' parts: the inverse of `extract_shard`.

        Args:
            arrays: Each rank's part in rank order, all of one framework, dtype and device.
            out: Where to write the whole; memory of its own if not given.

        Returns:
            The whole component, of the parts' own kind; or `out`.

        Raises:
            LayoutMismatch: There are not `tp_size` parts, or one has another shape or dtype.
            BufferRefused: One is no array, or `out` cannot be written.

        Example:
            >>> shard = RowParallelShard(4, 1, tp_rank=0, tp_size=2)
            >>> shard.merge_shards([np.array([[1], [2]]), np.array([[3], [4]])])[:, 0]
            array([1, 2, 3, 4])
        """
        if len(arrays) != self.tp_size:
            raise LayoutMismatch(
                "the parts of a component are not one for each rank", got=f"{len(arrays)} parts", expected=self.tp_size
            )
        parts = [_sliceable(array, f"rank {rank}'s part") for rank, array in enumerate(arrays)]
        for rank, part in enumerate(parts):
            _refuse_other_shape(part, self.local_shape, f"rank {rank}'s part is")
            _refuse_other_kind(part, parts[0], f"rank {rank}'s part")
        if out is None and is_jax(parts[0]):
            return self._joined_by(sys.modules["jax"].numpy, parts)
        whole = _empty_like(parts[0], self.full_shape) if out is None else _writable(out)
        _refuse_other_shape(whole, self.full_shape, "the parts are merged into")
        _refuse_other_kind(whole, parts[0], "the destination")
        for rank in self._distinct_ranks:
            whole[self._index_of(rank)] = parts[rank]
        return whole if out is None else out

    def _index_of(self, rank: int) -> tuple[Any, ...]:
        return (*self._cut_of(rank), ...)  # with the ellipsis, a part of no dimensions is an array too

    @property
    def _distinct_ranks(self) -> range:
        return range(self.tp_size)

    @abstractmethod
    def _cut_of(self, rank: int) -> tuple[slice, ...]:
        """Where a rank's part lies in the whole: a slice for each dimension."""

    @abstractmethod
    def _joined_by(self, module: Any, parts: Sequence[Array]) -> Array:
        """The whole of immutable parts, by their own module."""


class _MatrixShard(Shard):
    """A matrix that is cut along one of its dimensions."""

    _dimension: ClassVar[int]

    def __init__(self, rows: int, columns: int, tp_rank: int, tp_size: int) -> None:
        refuse_bad_tp_rank(tp_rank, tp_size)
        self.full_shape = (whole_number("rows", rows, 0), whole_number("columns", columns, 0))
        self.tp_rank, self.tp_size = tp_rank, tp_size
        divided(("rows", "columns")[self._dimension], self.full_shape[self._dimension], tp_size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.full_shape[0]}, {self.full_shape[1]}, {self.tp_rank}, {self.tp_size})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))

    def _cut_of(self, rank: int) -> tuple[slice, ...]:
        part = self.full_shape[self._dimension] // self.tp_size
        cut = [slice(None), slice(None)]
        cut[self._dimension] = slice(rank * part, (rank + 1) * part)
        return tuple(cut)

    def _joined_by(self, module: Any, parts: Sequence[Array]) -> Array:
        return module.concatenate(parts, axis=self._dimension)


@final
class ColumnParallelShard(_MatrixShard):
    """Some columns of a matrix (rows, columns): the outputs that one rank computes. A strided view until it is copied.

    Args:
        rows: Of the whole matrix.
        columns: Of the whole matrix; a multiple of `tp_size`.
        tp_rank: Whose columns: tp_rank * columns / tp_size and those that follow.
        tp_size: Ranks that share the matrix.

    Raises:
        CallerError: The columns cannot be divided, or the rank is out of range.

    Example:
        >>> ColumnParallelShard(1024, 4096, tp_rank=1, tp_size=2).local_shape
        (1024, 2048)
    """

    partition = "column"
    _dimension = 1


@final
class RowParallelShard(_MatrixShard):
    """Some rows of a matrix (rows, columns): the inputs that one rank multiplies. A contiguous view.

    The ranks' products are partial sums of the layer's output, to be all-reduced.

    Args:
        rows: Of the whole matrix; a multiple of `tp_size`.
        columns: Of the whole matrix.
        tp_rank: Whose rows: tp_rank * rows / tp_size and those that follow.
        tp_size: Ranks that share the matrix.

    Raises:
        CallerError: The rows cannot be divided, or the rank is out of range.

    Example:
        >>> RowParallelShard(4096, 1024, tp_rank=1, tp_size=2).local_shape
        (2048, 1024)
    """

    partition = "row"
    _dimension = 0


@final
class Replica(Shard):
    """A component that every rank holds whole.

    Args:
        shape: The component's.
        tp_rank: Whose copy.
        tp_size: Ranks that hold one.

    Example:
        >>> Replica((1024,), tp_rank=1, tp_size=2).local_shape
        (1024,)
    """

    partition = "replicated"

    def __init__(self, shape: Shape, tp_rank: int, tp_size: int) -> None:
        refuse_bad_tp_rank(tp_rank, tp_size)
        self.full_shape, self.tp_rank, self.tp_size = tuple(shape), tp_rank, tp_size

    def __repr__(self) -> str:
        return f"Replica({self.full_shape}, {self.tp_rank}, {self.tp_size})"

    def merge_shards(self, arrays: Sequence[Array], out: Array | None = None) -> Array:
        """Rank 0's copy of the component; the others must have its shape, their values are not compared."""
        return super().merge_shards(arrays, out)

    @property
    def _distinct_ranks(self) -> range:
        return range(1)

    def _cut_of(self, rank: int) -> tuple[slice, ...]:
        return (slice(None),) * len(self.full_shape)

    def _joined_by(self, module: Any, parts: Sequence[Array]) -> Array:
        return parts[0]


def refuse_bad_tp_rank(tp_rank: int, tp_size: int) -> None:
    """Raise `CallerError` unless 0 <= tp_rank < tp_size.

    >>> refuse_bad_tp_rank(2, 2)
    Traceback (most recent call last):
    gradengine.errors.CallerError: tp_rank is out of range: got 2, expected 0..1 for tp_size=2
    """
    whole_number("tp_size", tp_size, 1)
    if not _is_whole(tp_rank) or not 0 <= tp_rank < tp_size:
        raise CallerError(
            "tp_rank is out of range", got=repr(tp_rank), expected=f"0..{tp_size - 1} for tp_size={tp_size}"
        )


def whole_number(name: str, value: int, least: int) -> int:
    """The value; raises `CallerError` unless it is a whole number of at least `least`."""
    if not _is_whole(value) or value < least:
        raise CallerError(f"{name} is out of range", got=repr(value), expected=f"a whole number >= {least}")
    return int(value)


def _is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, (bool, np.bool_))


def divided(name: str, value: int, parts: int, by: str = "tp_size") -> int:
    """The quotient; raises `CallerError`, naming both numbers, where something is left."""
    if value % parts:
        raise CallerError(
            f"{name} cannot be divided by {by}", got=f"{value} / {parts}, which leaves {value % parts}",
            expected=f"a multiple of {parts}",
        )  # fmt: skip
    return value // parts


# ---- arrays of any framework ----


def _sliceable(array: Array, what: str) -> Array:
    """What `array[...]` cuts views from: the array itself, or NumPy's or CuPy's view of what offers DLPack alone."""
    if is_torch(array):
        return array.detach()
    if is_jax(array) or (hasattr(array, "__getitem__") and hasattr(_module_of(array), "empty")):
        return array
    if not hasattr(array, "__dlpack__"):
        raise BufferRefused(f"{what} is no array", got=type(array).__name__, expected="an array, or DLPack")
    on_host = array.__dlpack_device__()[0] == _DLPACK_CPU
    try:
        return np.from_dlpack(array) if on_host else importlib.import_module("cupy").from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ImportError) as fault:
        raise BufferRefused(f"{what} cannot be taken by DLPack ({fault})", got=type(array).__name__) from None


def _module_of(array: Array) -> Any:
    return sys.modules.get(type(array).__module__.partition(".")[0])


def _copied(array: Array) -> Array:
    if is_torch(array):
        return array.clone(memory_format=sys.modules["torch"].contiguous_format)
    return array.copy()


def _empty_like(array: Array, shape: Shape) -> Array:
    if is_torch(array):
        return array.new_empty(shape)
    return _module_of(array).empty(shape, array.dtype)


def _writable(out: Array) -> Array:
    whole = _sliceable(out, "the destination")
    flags = getattr(whole, "flags", None)
    if is_jax(out) or not getattr(flags, "writeable", True):
        raise BufferRefused("the whole component cannot be written there", got=f"a read-only {type(out).__name__}")
    return whole


def _refuse_other_shape(array: Array, shape: Shape, what: str) -> None:
    if tuple(array.shape) != shape:
        raise LayoutMismatch(f"{what} another shape", got=tuple(array.shape), expected=shape)


def _refuse_other_kind(array: Array, first: Array, what: str) -> None:
    if array.dtype != first.dtype or type(array) is not type(first):
        raise LayoutMismatch(
            f"{what} is of another kind than rank 0's part",
            got=f"{type(array).__name__} of {array.dtype}",
            expected=f"{type(first).__name__} of {first.dtype}",
        )
