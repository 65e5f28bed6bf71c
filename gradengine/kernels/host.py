"""The kernels in NumPy: piece by piece through the cache, with a few threads; the definition that the GPU must match.

NumPy releases the GIL inside each of these calls, so plain threads reach the memory's bandwidth. A chunk's result
depends on the chunk alone, so the number of threads and their order change no bit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt

from gradengine.arguments import whole_number
from gradengine.arrays.buffer import Array, Buffer
from gradengine.arrays.dtypes import DTYPES
from gradengine.kernels.arena import CHUNK, Arena, Chunk, PartialSums, chunks_of, pieces_of
from gradengine.kernels.decision import ClipPlan, Decision, Float64, Scalar, decide
from gradengine.kernels.host_device import HostDevice
from gradengine.kernels.host_sums import Product, sum_in_fp64
from gradengine.kernels.host_threads import available_cpus, shared_by_threads
from gradengine.kernels.interface import Kernels
from gradengine.kernels.loss_scale import LossScale
from gradengine.kernels.operands import Destinations, FoldPass
from gradengine.layout.slots import Span
from gradengine.threads import cached_property

Task = TypeVar("Task")
_Conversion: TypeAlias = Callable[[Array, Array], None]
Term: TypeAlias = tuple[Array, str, np.float32]  # a gradient as it is stored, its dtype, its micro-batch's weight

_ELEMENTS_A_THREAD = 524288  # less is done before another thread has woken up: 600,000 take one 270 us, two 330
# Smaller chunks are no reason for a thread: they meet at the GIL between chunks, and who waits there sleeps. Clipping
# 218 of 10,000 takes one 2.4 ms, two 8.3. To measure: NumPy's vecdot keeps the GIL below 500 rows of 256 elements.
_LEAST_FOLDED, _LEAST_MEASURED = 65536, 131072
_LOOKED_UP = 131072  # at once: their indices, of 8 bytes, stay in the cache
_ELEMENTS_A_TABLE, _CHUNKS_A_TABLE = 1 << 19, 16  # of a table of 65,536 values' products, which takes 80 us to make
_BF16_NAN = np.uint16(0x7FC0)
_UPPER_HALF = np.uint32(0xFFFF0000)  # of a word


class _Part(NamedTuple):
    """A chunk of one target."""

    column: int  # of its source in a fold
    target: npt.NDArray[np.float32]
    cut: slice | None  # of the source; None where it is whole
    products: Sequence[Product] = ()  # that measure it


@final
class _Prepared:
    """The operands of a fold into some targets and of their squared sums, in `pieces` as by `pieces_of`."""

    def __init__(self, arena: Arena, slots: Span) -> None:
        self.chunks = arena.partials.chunks(slots.positions)
        self.pieces = [
            [_part(arena.targets[chunk[0]], slots, chunk) for chunk in piece] for piece in pieces_of(self.chunks)
        ]
        self.shared, self.shared_to_measure = (
            _to_share(self.chunks, least) for least in (_LEAST_FOLDED, _LEAST_MEASURED)
        )
        self.indices = _indices_of(self.chunks, arena.partials)
        self._sums = arena.partials.sums

    @cached_property
    def measured_pieces(self) -> list[list[_Part]]:
        """The pieces, with the products that measure their chunks."""
        indices = iter([index for _, index, _, _ in self.chunks])
        return [
            [part._replace(products=self._sums.products(next(indices), part.target)) for part in piece]
            for piece in self.pieces
        ]


@final
class HostKernels(Kernels):
    """NumPy on the CPU.

    Args:
        threads: Threads to work with, the caller's included; by default one for each CPU that its container leaves it.

    Raises:
        CallerError: `threads` is less than one.

    Example:
        >>> kernels = HostKernels()
        >>> arena = kernels.arena([kernels.device.view(np.array([1, 2, 2], np.float32), "w")])
        >>> kernels.measure(arena)
        >>> decide(kernels.totals(arena), ClipPlan((0,), (np.inf,)), divisor=1.0).norm
        3.0
    """

    device = HostDevice()
    measures_in_passing = False  # a pass over what the cache has lost costs as much as a pass of its own

    def __init__(self, threads: int | None = None) -> None:
        self.threads = available_cpus() if threads is None else whole_number("threads", threads, 1)

    def prepare(self, arena: Arena, spans: Sequence[Span], plan: ClipPlan | None = None) -> None:
        for slots in spans:
            _prepared(arena, slots)

    def accumulate(self, arena: Arena, fold: FoldPass, *, measure: bool = False) -> None:
        prepared, fold_piece = _prepared(arena, fold.slots), _fold_piece_of(fold)
        if measure and fold.present.all():
            self._run(fold_piece, prepared.measured_pieces, prepared.shared)
            self._add_up(arena, prepared.chunks, prepared.indices)
            return
        self._run(fold_piece, prepared.pieces, prepared.shared)
        if measure:
            self.measure(arena, fold.slots.places[fold.present].tolist())

    def measure(self, arena: Arena, positions: Sequence[int] | None = None) -> None:
        if positions is not None:
            chunks = arena.partials.chunks(positions)
            self._measure(arena, chunks, pieces_of(chunks))
        elif arena.memory is None:
            partials = arena.partials
            self._measure(arena, partials.all_chunks, partials.pieces)
        else:
            prepared = _prepared(arena, arena.whole)
            self._run(_measure_piece, prepared.measured_pieces, prepared.shared_to_measure)
            self._add_up(arena, prepared.chunks, prepared.indices)

    def _measure(self, arena: Arena, chunks: Sequence[Chunk], pieces: Sequence[Sequence[Chunk]]) -> None:
        targets, products, vecdot = arena.targets, arena.partials.sums.products, np.vecdot

        def measure_piece(piece: Sequence[Chunk]) -> None:
            for position, index, start, stop in piece:
                for values, place in products(index, _to_be_summed(targets[position], start, stop)):
                    vecdot(values, values, place)

        if chunks:
            self._run(measure_piece, pieces, _to_share(chunks, _LEAST_MEASURED))
            self._add_up(arena, chunks, _indices_of(chunks, arena.partials))

    def _add_up(self, arena: Arena, chunks: Sequence[Chunk], indices: npt.NDArray[np.intp] | None) -> None:
        """Make the partial sums of these chunks from their products."""
        totals, doubtful = arena.partials.sums.totals(indices)

        def take_anew(number: int) -> None:
            position, _, start, stop = chunks[number]
            totals[number] = sum_in_fp64(_to_be_summed(arena.targets[position], start, stop))

        if doubtful:
            self._run(take_anew, doubtful, _to_share([chunks[number] for number in doubtful], _LEAST_FOLDED))
        arena.partials.values[slice(None) if indices is None else indices] = totals

    def totals(self, arena: Arena) -> Float64:
        return arena.partials.totals_of(arena.partials.values)

    def zero(self, arena: Arena, slots: Span, chosen: npt.NDArray[np.bool_]) -> None:
        partials, positions = arena.partials, slots.places[chosen].tolist()
        self.fill_zero([arena.targets[position] for position in positions])
        for position in positions:
            first = partials.first[position]
            partials.values[first : first + partials.counts[position]] = 0

    def finalise(
        self,
        arena: Arena,
        plan: ClipPlan,
        divisor: float,
        *,
        zero_if_bad: bool,
        step: int = 0,
        weight: Scalar = None,
        loss_scale: LossScale | None = None,
    ) -> Decision:
        return decide(self.totals(arena), plan, divisor, zero_if_bad=zero_if_bad)

    def hand_back(
        self, arena: Arena, decision: Decision, plan: ClipPlan, destinations: Destinations | None = None
    ) -> None:
        if decision.skipped:
            self.fill_zero(arena.targets if destinations is None else list(destinations.values()))
        elif destinations is not None:
            sources = [arena.targets[position] for position in destinations]
            factors = [decision.factors[plan.groups[position]] for position in destinations]
            self._scale_each(sources, factors, list(destinations.values()))
        elif arena.memory is not None and len(decision.factors) == 1:
            self._scale_in_place(arena.memory.data, decision.factors[0])
        else:
            factors = [decision.factors[group] for group in plan.groups]
            self._scale_pieces(arena.targets, factors, arena.targets, arena.partials.pieces)

    def _scale_in_place(self, memory: npt.NDArray[np.float32], factor: np.float32) -> None:
        """Scale a whole arena in few calls, whatever its targets: the padding between them is zero and stays zero."""

        def scale_chunk(start: int) -> None:
            chunk = memory[start : start + CHUNK]
            np.multiply(chunk, factor, chunk)

        if factor != 1:
            self._run(scale_chunk, range(0, memory.size, CHUNK), memory.size)

    def scale(self, sources: Sequence[Buffer], factor: np.float32, destinations: Sequence[Buffer]) -> None:
        self._scale_each(sources, [factor] * len(sources), destinations)

    def _scale_each(
        self, sources: Sequence[Buffer], factors: Sequence[np.float32], destinations: Sequence[Buffer]
    ) -> None:
        chunks = [(p, *chunk) for p, source in enumerate(sources) for chunk in chunks_of(source.size)]
        self._scale_pieces(sources, factors, destinations, pieces_of(chunks))

    def _scale_pieces(
        self,
        sources: Sequence[Buffer],
        factors: Sequence[np.float32],
        destinations: Sequence[Buffer],
        pieces: Sequence[Sequence[Chunk]],
    ) -> None:
        products = _Products(sum(source.size for source in sources), sum(map(len, pieces)))

        def scale_piece(piece: Sequence[Chunk]) -> None:
            multiply = np.multiply
            for position, _, start, stop in piece:
                source, factor, destination = sources[position], factors[position], destinations[position]
                if factor == 1 and source.pointer == destination.pointer:
                    continue
                here, there = source.data, destination.data
                if stop - start != source.size:
                    here, there = here[start:stop], there[start:stop]
                if source.dtype == "float32" == destination.dtype:
                    multiply(here, factor, there)
                else:
                    products.to(there, destination.dtype, here, source.dtype, factor)

        if factors.count(np.float32(1)) < len(factors) or sources is not destinations:
            self._run(scale_piece, pieces, _to_share(itertools.chain.from_iterable(pieces), _LEAST_FOLDED))

    def fill_zero(self, buffers: Sequence[Buffer]) -> None:
        shared = sum(buffer.size for buffer in buffers if buffer.size >= _LEAST_FOLDED)
        self._run(lambda buffer: buffer.data.fill(0), buffers, shared)

    def first_non_finite(self, buffer: Buffer) -> tuple[int, float] | None:
        for start in range(0, buffer.size, CHUNK):
            found = first_non_finite(_widened(buffer.data[start : start + CHUNK], buffer.dtype))
            if found is not None:
                return start + found[0], found[1]
        return None

    def _run(self, work: Callable[[Task], None], tasks: Sequence[Task], shared: int) -> None:
        """Do `work` on each task, with helper threads if there are enough elements to be shared."""
        helpers = min(self.threads, len(tasks), shared // _ELEMENTS_A_THREAD) - 1
        if helpers > 0:
            shared_by_threads(work, tasks, helpers, self.threads)
            return
        # Overflow and NaN are found by the squared sums and reported by name; NumPy's warnings name nothing.
        with np.errstate(all="ignore"):
            for task in tasks:
                work(task)


def _indices_of(chunks: Sequence[Chunk], partials: PartialSums) -> npt.NDArray[np.intp] | None:
    """The indices of the chunks' partial sums; None for all, in order."""
    if chunks is partials.all_chunks or chunks == partials.all_chunks:
        return None
    return np.array([index for _, index, _, _ in chunks], np.intp)


def _to_be_summed(target: Buffer, start: int, stop: int) -> npt.NDArray[np.float32]:
    data = target.data if stop - start == target.size else target.data[start:stop]
    return _widened_in_any_order(data) if target.dtype == "bfloat16" else _widened(data, target.dtype)


def _to_share(chunks: Iterable[Chunk], least: int) -> int:
    """The number of elements in chunks so large that threads do not wait for each other's GIL."""
    return sum(stop - start for _, _, start, stop in chunks if stop - start >= least)


def _prepared(arena: Arena, slots: Span) -> _Prepared:
    """The prepared operands of some targets, made at the first call for them."""
    found: _Prepared | None = arena.prepared.get(slots)
    if found is None:
        found = arena.prepared[slots] = _Prepared(arena, slots)
    return found


def _part(target: Buffer, slots: Span, chunk: Chunk) -> _Part:
    position, _, start, stop = chunk
    cut = None if stop - start == target.size else slice(start, stop)
    return _Part(slots.column[position], target.data if cut is None else target.data[cut], cut)


def _fold_piece_of(fold: FoldPass) -> Callable[[Sequence[_Part]], None]:
    """The function that folds a piece of the targets."""
    # fp32 of weight 1, as most are, is a NumPy call for each part and micro-batch, and no function of ours: 45 us for
    # 218 tensors of 100 elements.
    overwrite, others = fold.overwrite, []
    for contribution, weight in zip(fold.contributions, fold.weights, strict=True):
        if contribution.fp32 is None or weight != 1:
            break
        others.append(contribution.fp32)
    else:
        if not overwrite.any():
            return partial(_add_piece, None, others)
        if overwrite.all():
            return partial(_add_piece, others[0], others[1:])
    return partial(_fold_piece, _terms_of(fold), overwrite)


# A chunk is measured as soon as it is folded: 124 of 75,000 take two threads 2.7 ms so, and 4.3 where a whole piece is
# folded before it is measured, because they meet at the GIL in its many small products.


def _add_piece(
    first: Sequence[npt.NDArray[np.float32]] | None,
    others: Sequence[Sequence[npt.NDArray[np.float32]]],
    piece: Iterable[_Part],
) -> None:
    """Add to a piece's targets, or overwrite them by the first term, and add all other terms in order."""
    add, vecdot, copies = np.add, np.vecdot, first is not None and not others
    for column, target, cut, products in piece:
        total = target if first is None else first[column] if cut is None else first[column][cut]
        if copies:
            target[...] = total
        for sources in others:
            add(total, sources[column] if cut is None else sources[column][cut], target)
            total = target
        for values, place in products:
            vecdot(values, values, place)


_measure_piece = partial(_add_piece, None, ())


def _terms_of(fold: FoldPass) -> list[list[Term]]:
    """For each target the terms that are added to it, in order."""
    terms: list[list[Term]] = [[] for _ in fold.slots.positions]
    for contribution, weight in zip(fold.contributions, fold.weights, strict=True):
        if contribution.fp32 is not None:
            for given, source in zip(terms, contribution.fp32, strict=True):
                given.append((source, "float32", weight))
            continue
        for given, view in zip(terms, contribution.views, strict=True):
            if view is not None:
                given.append((view.data, view.dtype, weight))
    return terms


def _fold_piece(terms: Sequence[list[Term]], overwrite: npt.NDArray[np.bool_], piece: Iterable[_Part]) -> None:
    vecdot = np.vecdot
    for column, target, cut, products in piece:
        given = [(data if cut is None else data[cut], dtype, weight) for data, dtype, weight in terms[column]]
        if given:
            _fold(target, given, is_first=bool(overwrite[column]))
        for values, place in products:
            vecdot(values, values, place)


def _fold(target: npt.NDArray[np.float32], terms: list[Term], *, is_first: bool) -> None:
    total = target
    if is_first:
        source, dtype, weight = terms.pop(0)
        if terms and dtype == "float32" and weight == 1:
            total = source  # the first addition reads it where it lies: one pass less through the cache
        else:
            _assign(target, source, dtype, weight)
    for source, dtype, weight in terms:
        np.add(total, _weighted(source, dtype, weight), out=target)
        total = target


def first_non_finite(values: npt.NDArray[np.float32]) -> tuple[int, float] | None:
    """Index and value of the first NaN or Inf, or None."""
    finite = np.isfinite(values)
    if finite.all():
        return None
    index = int(finite.argmin())
    return index, float(values[index])


def _assign(target: npt.NDArray[np.float32], source: Array, dtype: str, weight: np.float32) -> None:
    WIDEN[dtype](target, source)
    if weight != 1:
        np.multiply(target, weight, out=target)


def _weighted(source: Array, dtype: str, weight: np.float32) -> npt.NDArray[np.float32]:
    values = _widened(source, dtype)
    if weight == 1:
        return values
    return np.multiply(values, weight, out=_scratch.floats[: values.size])


def _widened(source: Array, dtype: str) -> npt.NDArray[np.float32]:
    """The values in fp32, exactly: the source itself, or this thread's scratch (good until its next use)."""
    if dtype == "float32":
        return source
    wide = _scratch.floats[: source.size]
    _assign(wide, source, dtype, np.float32(1))
    return wide


def _widened_in_any_order(source: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The values of bf16 in fp32 in another order, for a sum: from words of two, all second values, then all first.

    It is half the work of `_widened`.
    """
    words = source[: source.size & ~1].view(np.uint32)  # NumPy reads unaligned ones by way of a buffer
    wide, count = _scratch.floats[: source.size], words.size
    bits = wide.view(np.uint32)
    np.bitwise_and(words, _UPPER_HALF, out=bits[:count])
    np.left_shift(words, 16, out=bits[count : 2 * count])
    if source.size % 2:
        bits[-1] = int(source[-1]) << 16
    return wide


def _scale(values: npt.NDArray[np.float32], factor: np.float32, destination: Array, dtype: str) -> None:
    if dtype == "float32":
        np.multiply(values, factor, out=destination)
    else:
        ROUND[dtype](destination, np.multiply(values, factor, out=_scratch.floats[: values.size]))


@final
class _Products:
    """Values of any dtype times a factor, in any dtype; between 16-bit dtypes by a table, if there are many."""

    def __init__(self, elements: int, chunks: int) -> None:
        self._is_worth_tables = elements >= _ELEMENTS_A_TABLE or chunks >= _CHUNKS_A_TABLE
        self._tables: dict[tuple[str, str, np.float32], Array] = {}

    def to(self, destination: Array, dtype: str, source: Array, of_dtype: str, factor: np.float32) -> None:
        """Write the products of one chunk."""
        if not self._is_worth_tables or destination.itemsize != 2 or source.itemsize != 2:
            _scale(_widened(source, of_dtype), factor, destination, dtype)
            return
        key = of_dtype, dtype, factor
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _products_of_all(*key)
        # 0.6 ns an element, in one call; by hand bf16 takes 0.95 in 13, in each of which threads can meet at the GIL.
        indices = source.view(np.uint16)
        for start in range(0, indices.size, _LOOKED_UP):
            stop = start + _LOOKED_UP
            table.take(indices[start:stop], None, destination[start:stop], "wrap")  # no index is out of bounds


def _products_of_all(of_dtype: str, dtype: str, factor: np.float32) -> Array:
    """The product of each of the 65,536 values of a 16-bit dtype, at the index of its bits."""
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[of_dtype].storage)
    products = np.empty(every.size, DTYPES[dtype].storage)
    _scale(_widened(every, of_dtype), factor, products, dtype)
    return products


def _widen_bfloat16(target: npt.NDArray[np.float32], source: npt.NDArray[np.uint16]) -> None:
    bits = target.view(np.uint32)
    np.copyto(bits, source)
    np.left_shift(bits, 16, out=bits)


def _round_to_bfloat16(destination: npt.NDArray[np.uint16], values: npt.NDArray[np.float32]) -> None:
    """Round to nearest, ties to even, on the bits: add half an ulp less one, plus the bit that decides a tie."""
    nan = np.isnan(values) if np.isnan(values.max()) else None
    bits, half_ulp = values.view(np.uint32), _scratch.words[: values.size]
    np.bitwise_and(np.right_shift(bits, 16, out=half_ulp), 1, out=half_ulp)
    np.add(half_ulp, 0x7FFF, out=half_ulp)
    np.add(bits, half_ulp, out=bits)
    np.copyto(destination, np.right_shift(bits, 16, out=bits), casting="unsafe")
    if nan is not None:
        destination[nan] = _BF16_NAN


#: How each dtype of the table becomes fp32, exactly, and what fp32 becomes, whose own values may be overwritten.
WIDEN: Mapping[str, _Conversion] = {"float32": np.copyto, "float16": np.copyto, "bfloat16": _widen_bfloat16}
ROUND: Mapping[str, _Conversion] = {"float16": np.copyto, "bfloat16": _round_to_bfloat16}


class _Scratch(threading.local):
    """Two chunks for each thread, so that no pass allocates: a fresh megabyte costs 350 us of page faults."""

    def __init__(self) -> None:
        self.floats, self.words = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.uint32)


_scratch = _Scratch()
