"""The kernels in NumPy, which work on pieces that fit the cache, with a few threads. They define the GPU's results.

NumPy releases the GIL inside each of these calls, so plain threads reach the memory's bandwidth. A chunk's result
depends on the chunk alone, so the number of threads and their order change no bit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from gradengine.arguments import whole_number
from gradengine.arrays.buffer import Array, Buffer
from gradengine.arrays.host import address_of
from gradengine.kernels.arena import CHUNK, Arena, Chunk, PartialSums, chunks_of, pieces_of
from gradengine.kernels.decision import ClipPlan, Decision, Float64, decide
from gradengine.kernels.host_device import HostDevice
from gradengine.kernels.host_sums import Product, Values, sum_in_fp64
from gradengine.kernels.host_threads import available_cpus, shared_by_threads
from gradengine.kernels.interface import Kernels
from gradengine.kernels.kept import Drops
from gradengine.kernels.operands import Contribution, Destinations, FoldPass
from gradengine.kernels.spikes import Spikes
from gradengine.layout.slots import Span

Task = TypeVar("Task")
# The chunks of some targets that a thread takes at a time. The fields are the columns of their sources in a fold, the
# chunks, their slices of the sources (None if all are whole), and the products that measure them.
_Piece: TypeAlias = tuple[slice, list[Values], list[slice] | None, list[Product]]
Term: TypeAlias = tuple[Array, str, np.float32]  # a stored gradient, its dtype, its micro-batch's weight

# Less is done before another thread has woken up. 600,000 elements take 270 us on one thread and 330 us on two.
_ELEMENTS_A_THREAD = 524288
# Threads contend for the GIL between small chunks, so small chunks use one thread. Clipping 218 chunks of 10,000
# elements takes 2.4 ms on one thread and 8.3 ms on two. NumPy's vecdot holds the GIL below 500 rows of 256 elements.
_LEAST_FOLDED, _LEAST_MEASURED = 65536, 131072
_ELEMENTS_A_FACTOR = 1 << 18  # bf16 elements that save the 40 us of `_has_ties`
_ONE = np.float32(1)
_BF16_NAN = np.uint16(0x7FC0)
_UPPER_HALF = np.uint32(0xFFFF0000)  # mask of a word's upper half


class _Prepared(NamedTuple):
    """The operands of a fold into some targets and of their squared sums."""

    chunks: list[Chunk]
    indices: npt.NDArray[np.intp] | None  # indices of their partial sums, None for all in order
    pieces: list[_Piece]
    shared: int  # number of elements that threads can share in a fold
    shared_to_measure: int


@final
class HostKernels(Kernels):
    """The kernels of the CPU.

    Args:
        threads: The number of threads, including the caller's. The default is the number of CPUs in the container.

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
    measures_in_passing = False  # Squared sums of memory that left the cache cost as much as a separate pass.

    def __init__(self, threads: int | None = None) -> None:
        self.threads = available_cpus() if threads is None else whole_number("threads", threads, 1)

    def prepare(self, arena: Arena, spans: Sequence[Span], plan: ClipPlan | None = None) -> None:
        """Do nothing, since the host may allocate in a step."""

    def accumulate(self, arena: Arena, fold: FoldPass, *, measure: bool = False) -> None:
        if fold.dropped:
            self.zero(arena, fold.slots, fold.overwrite & fold.present)
            return
        prepared, fold_piece = _prepared(arena, fold.slots), _fold_piece_of(fold)
        if measure and b"\0" not in fold.present.tobytes():

            def fold_and_measure_piece(piece: _Piece) -> None:
                fold_piece(piece)
                _measure_piece(piece)

            self._run(fold_and_measure_piece, prepared.pieces, prepared.shared)
            self._add_up(arena, prepared.chunks, prepared.indices)
            return
        self._run(fold_piece, prepared.pieces, prepared.shared)
        if measure:
            self.measure(arena, fold.slots.places[fold.present].tolist())

    def judge(
        self, arena: Arena, contribution: Contribution, weight: np.float32, drops: Drops, *, is_first: bool
    ) -> bool:
        given = [(view.data, view.dtype) for view in contribution.views if view is not None]
        if contribution.fp32 is not None:
            given = [(array, "float32") for array in contribution.fp32]
        chunks = [(data[start:stop], dtype) for data, dtype in given for _, start, stop in chunks_of(data.size)]
        bad: list[bool] = []

        def look(chunk: tuple[Array, str]) -> None:
            if not _is_finite(*chunk):
                bad.append(True)

        self._run(look, chunks, sum(data.size for data, _ in chunks if data.size >= _LEAST_FOLDED))
        before, dropped, *_ = (0.0, 0) if is_first else drops.kept.read()
        drops.kept.write(before if bad else before + float(weight), dropped + bool(bad), float(bool(bad)), 0, 0)
        return bool(bad)

    def measure(self, arena: Arena, positions: Sequence[int] | None = None) -> None:
        if positions is None and arena.memory is not None:
            prepared = _prepared(arena, arena.whole)
            self._run(_measure_piece, prepared.pieces, prepared.shared_to_measure)
            self._add_up(arena, prepared.chunks, prepared.indices)
            return
        partials = arena.partials
        chunks = partials.all_chunks if positions is None else partials.chunks(positions)
        pieces = partials.pieces if positions is None else pieces_of(chunks)
        targets, products, vecdot = arena.targets, partials.sums.products, np.vecdot

        def measure_piece(piece: Sequence[Chunk]) -> None:
            for position, index, start, stop in piece:
                for values, place in products(index, _to_be_summed(targets[position], start, stop)):
                    vecdot(values, values, place)

        if chunks:
            self._run(measure_piece, pieces, _to_share(chunks, _LEAST_MEASURED))
            self._add_up(arena, chunks, _indices_of(chunks, partials))

    def _add_up(self, arena: Arena, chunks: Sequence[Chunk], indices: npt.NDArray[np.intp] | None) -> None:
        """Compute the partial sums of these chunks from their products."""
        totals, doubtful = arena.partials.sums.totals(indices)

        def take_anew(number: int) -> None:
            position, _, start, stop = chunks[number]
            totals[number] = sum_in_fp64(_to_be_summed(arena.targets[position], start, stop))

        if doubtful:
            self._run(take_anew, doubtful, _to_share([chunks[number] for number in doubtful], _LEAST_FOLDED))
        arena.partials.values[slice(None) if indices is None else indices] = totals

    def totals(self, arena: Arena, kept: Any = None) -> Float64:
        return arena.partials.totals_of(arena.partials.values if kept is None else kept)

    def keep_sums(self, arena: Arena) -> Any:
        return arena.partials.values.copy()

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
        spikes: Spikes | None = None,
        **on_gpu: Any,
    ) -> Decision:
        judged = None if spikes is None else spikes.judged
        return decide(self.totals(arena), plan, divisor, zero_if_bad=zero_if_bad, judged=judged)

    def hand_back(
        self, arena: Arena, decision: Decision, plan: ClipPlan, destinations: Destinations | None = None
    ) -> None:
        if decision.skipped:
            self.fill_zero(arena.targets if destinations is None else list(destinations.values()))
        elif destinations is not None:
            sources = [arena.targets[position] for position in destinations]
            factors = [decision.factors[plan.groups[position]] for position in destinations]
            self._scale(sources, factors, list(destinations.values()))
        elif arena.memory is not None and len(decision.factors) == 1:
            self._scale_in_place(arena.memory.data, decision.factors[0])
        else:
            factors = [decision.factors[group] for group in plan.groups]
            self._scale(arena.targets, factors, arena.targets, arena.partials.pieces, are_finite=decision.bad == ())

    def _scale_in_place(self, memory: Values, factor: np.float32) -> None:
        """Scale a whole arena in few calls for any targets. The padding between them is zero and stays zero."""

        def scale_chunk(start: int) -> None:
            chunk = memory[start : start + CHUNK]
            np.multiply(chunk, factor, chunk)

        if factor != 1:
            self._run(scale_chunk, range(0, memory.size, CHUNK), memory.size)

    def scale(self, sources: Sequence[Buffer], factor: np.float32, destinations: Sequence[Buffer]) -> None:
        self._scale(sources, [factor] * len(sources), destinations)

    def _scale(
        self,
        sources: Sequence[Buffer],
        factors: Sequence[np.float32],
        destinations: Sequence[Buffer],
        pieces: Sequence[Sequence[Chunk]] | None = None,
        *,
        are_finite: bool = False,
    ) -> None:
        if pieces is None:
            pieces = pieces_of([(n, *chunk) for n, source in enumerate(sources) for chunk in chunks_of(source.size)])
        tieless = _factors_without_ties(sources, factors)

        def scale_piece(piece: Sequence[Chunk]) -> None:
            narrow: dict[np.float32, list[tuple[Array, Array]]] = {}  # bf16 sources and destinations by factor
            for position, _, start, stop in piece:
                source, factor, destination = sources[position], factors[position], destinations[position]
                if factor == 1 and source.pointer == destination.pointer:
                    continue
                here, there = source.data, destination.data
                if stop - start != source.size:
                    here, there = here[start:stop], there[start:stop]
                if source.dtype == "float32" == destination.dtype:
                    np.multiply(here, factor, there)
                elif source.dtype == "bfloat16" == destination.dtype:
                    narrow.setdefault(factor, []).append((here, there))
                else:
                    _scale(_widened(here, source.dtype), factor, there, destination.dtype)
            for factor, pairs in narrow.items():
                _scale_bfloat16(pairs, factor, has_ties=factor not in tieless, is_finite=are_finite)

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
        """Do `work` on each task, with helper threads if there are enough elements to share."""
        helpers = min(self.threads, len(tasks), shared // _ELEMENTS_A_THREAD) - 1
        if helpers > 0:
            shared_by_threads(work, tasks, helpers, self.threads)
            return
        # Overflow and NaN are found by the squared sums and reported by name, unlike in NumPy's warnings.
        with np.errstate(all="ignore"):
            for task in tasks:
                work(task)


def _indices_of(chunks: Sequence[Chunk], partials: PartialSums) -> npt.NDArray[np.intp] | None:
    """Return the indices of the chunks' partial sums, or None for all in order."""
    return None if chunks == partials.all_chunks else np.array([index for _, index, _, _ in chunks], np.intp)


def _to_be_summed(target: Buffer, start: int, stop: int) -> Values:
    """Return the elements of a chunk in fp32, in any order."""
    data = target.data if stop - start == target.size else target.data[start:stop]
    return _widened_in_any_order(data) if target.dtype == "bfloat16" else _widened(data, target.dtype)


def _to_share(chunks: Iterable[Chunk], least: int) -> int:
    """Return the number of elements in chunks so large that threads do not contend for the GIL."""
    return sum(stop - start for _, _, start, stop in chunks if stop - start >= least)


def _prepared(arena: Arena, slots: Span) -> _Prepared:
    """Return the prepared operands of some targets, made at the first call for them."""
    found: _Prepared | None = arena.prepared.get(slots)
    if found is None:
        chunks = arena.partials.chunks(slots.positions)
        pieces = [_piece(arena, slots, piece) for piece in pieces_of(chunks)]
        products = itertools.chain.from_iterable([products for *_, products in pieces])
        found = arena.prepared[slots] = _Prepared(
            chunks,
            _indices_of(chunks, arena.partials),
            pieces,
            _to_share(chunks, _LEAST_FOLDED),
            sum(values.size for values, _ in products if values.size >= _LEAST_MEASURED),
        )
    return found


def _piece(arena: Arena, slots: Span, chunks: Sequence[Chunk]) -> _Piece:
    columns = slice(slots.column[chunks[0][0]], slots.column[chunks[-1][0]] + 1)
    parts = {position: slice(start, stop) for position, _, start, stop in chunks}
    cuts = [parts.get(position, slice(0)) for position in slots.positions[columns]]  # An empty target has no chunk.
    whole = [arena.targets[position].data for position in slots.positions[columns]]
    targets = [target[cut] for target, cut in zip(whole, cuts, strict=True)]
    is_cut = any(part.size < target.size for part, target in zip(targets, whole, strict=True))
    products: list[Product] = []
    for _, run in itertools.groupby(chunks, key=lambda chunk: chunk[3] - chunk[2]):
        each = [arena.partials.sums.products(index, arena.targets[p].data[start:stop]) for p, index, start, stop in run]
        for same in zip(*each, strict=True):
            products += _together(same)
    return columns, targets, cuts if is_cut else None, products


def _together(products: Sequence[Product]) -> Sequence[Product]:
    """Return products of one shape, joined to one if they are at equal distances, as in equal layers."""
    pairs = itertools.pairwise(products)
    distances = {tuple(map(_distance, *pair)) for pair in pairs}
    if len(distances) != 1:
        return products
    arrays = zip(products[0], distances.pop(), strict=True)
    values, place = [as_strided(a, (len(products), *a.shape), (distance, *a.strides)) for a, distance in arrays]
    return [(values, place)]


def _distance(first: Values, second: Values) -> int:
    return address_of(second) - address_of(first)


def _fold_piece_of(fold: FoldPass) -> Callable[[_Piece], None]:
    """Return the function that folds a piece of the targets."""
    # Most gradients are fp32 with weight 1. They take one NumPy call for each target and micro-batch. Flags are
    # searched as bytes, since `any` and `all` take 1 us each, and a micro-batch of small tensors takes 30 us.
    flags, pairs = fold.overwrite.tobytes(), zip(fold.contributions, fold.weights, strict=True)
    plain = [fp32 for contribution, weight in pairs if weight == 1 and (fp32 := contribution.fp32) is not None]
    if len(plain) == len(fold.contributions) and not (b"\0" in flags and b"\1" in flags):
        return partial(_add_piece, plain, b"\1" in flags)
    return partial(_fold_piece, _terms_of(fold), fold.overwrite)


def _add_piece(contributions: Sequence[Sequence[Values]], is_first: bool, piece: _Piece) -> None:
    """Add the contributions to a piece's targets in order. The window's first contribution overwrites them."""
    columns, targets, cuts, _ = piece
    given = [arrays[columns] for arrays in contributions]
    if cuts is not None:
        given = [[array[cut] for array, cut in zip(arrays, cuts, strict=True)] for arrays in given]
    totals, add = given.pop(0) if is_first else targets, np.add
    if not given:
        for total, target in zip(totals, targets, strict=True):
            target[...] = total
    elif len(given) == 1:
        for total, source, target in zip(totals, given[0], targets, strict=True):
            add(total, source, target)
    else:  # Each target is completed while it is in the cache.
        for target, total, *sources in zip(targets, totals, *given, strict=True):
            add(total, sources[0], target)
            for source in sources[1:]:
                add(target, source, target)


def _measure_piece(piece: _Piece) -> None:
    for values, place in piece[-1]:
        np.vecdot(values, values, place)


def _terms_of(fold: FoldPass) -> list[list[Term]]:
    """Return the terms that are added to each target, in order."""
    terms: list[list[Term]] = [[] for _ in fold.slots.positions]
    for contribution, weight in zip(fold.contributions, fold.weights, strict=True):
        if contribution.fp32 is not None:
            for given, array in zip(terms, contribution.fp32, strict=True):
                given.append((array, "float32", weight))
        else:
            for given, view in zip(terms, contribution.views, strict=True):
                if view is not None:
                    given.append((view.data, view.dtype, weight))
    return terms


def _fold_piece(terms: Sequence[list[Term]], overwrite: npt.NDArray[np.bool_], piece: _Piece) -> None:
    columns, targets, cuts, _ = piece
    cuts = cuts or [slice(None)] * len(targets)
    for target, cut, is_first, given in zip(targets, cuts, overwrite[columns], terms[columns], strict=True):
        total = None if is_first else target
        for data, dtype, weight in given:
            if total is None:
                total = _widened(data[cut], dtype, weight, target)
            else:
                total = np.add(total, _widened(data[cut], dtype, weight), out=target)
        if total is not None and total is not target:
            target[...] = total  # a single fp32 term with weight 1


def _is_finite(values: Array, dtype: str) -> bool:
    """Return whether all elements are finite. Without the sign, NaN and Inf have the largest bits of a short dtype."""
    if dtype == "float32":
        return bool(np.isfinite(values.max()) and np.isfinite(values.min()))
    return bool((values.view(np.uint16) & np.uint16(0x7FFF)).max() < (0x7C00 if dtype == "float16" else 0x7F80))


def first_non_finite(values: Values) -> tuple[int, float] | None:
    """Return index and value of the first NaN or Inf, or None."""
    finite = np.isfinite(values)
    if finite.all():
        return None
    index = int(finite.argmin())
    return index, float(values[index])


def _widened(source: Array, dtype: str, weight: np.float32 = _ONE, wide: Values | None = None) -> Values:
    """Return the values in fp32, exactly, times the weight. This is the source if nothing changes, or `wide`.

    By default `wide` is this thread's scratch, which is valid until its next use.
    """
    if dtype == "float32" and weight == 1:
        return source
    if wide is None:
        wide = _scratch()[0][: source.size]
    if dtype == "bfloat16":
        bits = wide.view(np.uint32)
        np.copyto(bits, source)
        np.left_shift(bits, 16, out=bits)
    elif dtype == "float16":
        np.copyto(wide, source)
    return wide if weight == 1 else np.multiply(source if dtype == "float32" else wide, weight, out=wide)


def _widened_in_any_order(source: npt.NDArray[np.uint16]) -> Values:
    """Return bf16 values in fp32 in a different order, for a sum. It has all second values of words, then all first.

    This is half the work of `_widened`.
    """
    words = source[: source.size & ~1].view(np.uint32)  # NumPy reads unaligned words through a buffer.
    wide, count = _scratch()[0][: source.size], words.size
    bits = wide.view(np.uint32)
    np.bitwise_and(words, _UPPER_HALF, out=bits[:count])
    np.left_shift(words, 16, out=bits[count : 2 * count])
    if source.size % 2:
        bits[-1] = int(source[-1]) << 16
    return wide


def _scale(values: Values, factor: np.float32, destination: Array, dtype: str) -> None:
    if dtype == "bfloat16":
        _round_to_bfloat16(destination, np.multiply(values, factor, out=_scratch()[0][: values.size]))
    elif dtype == "float16":
        np.copyto(destination, np.multiply(values, factor, out=_scratch()[0][: values.size]))
    else:
        np.multiply(values, factor, out=destination)


def _scale_bfloat16(pairs: Sequence[tuple[Array, Array]], factor: np.float32, **known: bool) -> None:
    """Scale bf16 sources to bf16 destinations by one factor. Several small ones are joined, which saves calls."""
    sources, destinations = zip(*pairs, strict=True)
    if len(pairs) == 1:
        _scale_words(sources[0], factor, destinations[0], **known)
        return
    ends = list(itertools.accumulate([source.size for source in sources], initial=0))
    joined = np.concatenate(sources, out=_scratch()[1].view(np.uint16)[: ends[-1]])
    _scale_words(joined, factor, joined, **known)
    for destination, start, stop in zip(destinations, ends, ends[1:], strict=False):
        destination[...] = joined[start:stop]


def _scale_words(source: Array, factor: np.float32, destination: Array, *, has_ties: bool, is_finite: bool) -> None:
    """Scale bf16 in words of two values, which is half the work of widening and rounding each value."""
    wide = _widened_in_any_order(source)
    np.multiply(wide, factor, out=wide)
    if not is_finite and np.isnan(wide.max()):
        _scale(_widened(source, "bfloat16"), factor, destination, "bfloat16")
        return
    bits, count = wide.view(np.uint32), source.size // 2
    if has_ties:
        _add_half_an_ulp(bits)
    else:
        np.add(bits, 0x8000, out=bits)
    upper, lower = bits[:count], bits[count:]
    np.bitwise_and(upper, _UPPER_HALF, out=upper)
    np.right_shift(lower, 16, out=lower)
    np.bitwise_or(upper, lower[:count], out=destination[: 2 * count].view(np.uint32))
    destination[2 * count :] = lower[count:]  # the last one of an odd number of elements


def _factors_without_ties(sources: Sequence[Buffer], factors: Sequence[np.float32]) -> set[np.float32]:
    """Return the factors that put no bf16 value halfway between two, so that adding half an ulp rounds to nearest even.

    The result is empty if there are too few elements to make up for the search.
    """
    elements, distinct = sum(source.size for source in sources if source.dtype == "bfloat16"), set(factors)
    return {f for f in distinct if elements >= _ELEMENTS_A_FACTOR * len(distinct) and not _has_ties(f)}


def _has_ties(factor: np.float32) -> bool:
    """Return whether any bf16 value times the factor is halfway between an even value and a larger one."""
    every = np.arange(1 << 16, dtype=np.uint32) << 16
    with np.errstate(all="ignore"):
        products = np.multiply(every.view(np.float32), factor).view(np.uint32)
    return bool(((products & 0x1FFFF) == 0x8000).any())


def _round_to_bfloat16(destination: npt.NDArray[np.uint16], values: Values) -> None:
    nan = np.isnan(values) if np.isnan(values.max()) else None
    bits = values.view(np.uint32)
    _add_half_an_ulp(bits)
    np.copyto(destination, np.right_shift(bits, 16, out=bits), casting="unsafe")
    if nan is not None:
        destination[nan] = _BF16_NAN


def _add_half_an_ulp(bits: npt.NDArray[np.uint32]) -> None:
    """Add half an ulp of bf16 less one, plus the bit that decides a tie. Truncation then rounds to nearest even."""
    half_ulp = _scratch()[1][: bits.size]
    np.bitwise_and(np.right_shift(bits, 16, out=half_ulp), 1, out=half_ulp)
    np.add(half_ulp, 0x7FFF, out=half_ulp)
    np.add(bits, half_ulp, out=bits)


_local = threading.local()


def _scratch() -> tuple[Values, npt.NDArray[np.uint32]]:
    """Return two chunks of this thread, so that no pass allocates. A new megabyte costs 350 us of page faults."""
    if not hasattr(_local, "chunks"):
        _local.chunks = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.uint32)
    chunks: tuple[Values, npt.NDArray[np.uint32]] = _local.chunks
    return chunks
