"""The kernels called on buffers and folds that a test writes down target by target."""

import itertools
from dataclasses import dataclass

import numpy as np

from gradengine.arrays.buffer import Buffer
from gradengine.kernels import Arena, ClipPlan, Contribution, Destinations, FoldPass
from gradengine.layout.slots import Span


@dataclass(frozen=True)
class Fold:
    """What K1 does to one target: `target = [target +] w0*s0 + w1*s1 + ...`, rounded after each operation."""

    position: int
    overwrite: bool
    sources: tuple[Buffer, ...]
    weights: tuple[np.float32, ...]


def passes_of(folds):
    """Passes that one launch can take: with the same weights, or with one weight for all that only some lack."""
    groups = {}
    one_weight = len({weight for fold in folds for weight in fold.weights}) <= 1
    for fold in folds:
        groups.setdefault(() if one_weight else fold.weights, []).append(fold)
    return [_pass_of(group) for group in groups.values()]


def _pass_of(folds):
    slots = Span.at([fold.position for fold in folds])
    longest = max((fold.weights for fold in folds), key=len)
    columns = itertools.zip_longest(*(fold.sources for fold in folds))
    overwrite = np.array([fold.overwrite for fold in folds])
    return FoldPass(slots, overwrite, [Contribution.of(slots, column) for column in columns], longest)


def folds_of(fold_pass):
    """The same target by target, without those that get nothing."""
    found = []
    for column, position in enumerate(fold_pass.slots.positions):
        given = [(c.views[column], w) for c, w in zip(fold_pass.contributions, fold_pass.weights, strict=True)]
        given = [(view, weight) for view, weight in given if view is not None]
        if given:
            found.append(Fold(position, bool(fold_pass.overwrite[column]), *zip(*given, strict=True)))
    return found


def arena_of(kernels, targets, partials=None, *, is_ours=True):
    """An arena over these buffers; of our own memory, into which K2 may look, or of somebody's."""
    targets = tuple(targets or ())
    if partials is None:
        partials = kernels.partial_sums([target.size for target in targets])
    memory = Buffer(0, 0, "float32", (0,), True, None) if is_ours else None
    return Arena(targets, partials, memory)


def arena_of_sums(partials):
    """An arena of which the partial sums alone are used: its targets lie nowhere."""
    return Arena(_nowhere(partials.sizes), partials)


def _nowhere(sizes):
    return tuple(Buffer(0, size, "float32", (size,), True, None) for size in sizes)


def accumulate(kernels, targets, folds, partials=None, *, measure=True):
    """K1, which also measures where it is given partial sums."""
    arena = arena_of(kernels, targets, partials)
    for fold in passes_of([fold for fold in folds if targets[fold.position].size]):
        kernels.accumulate(arena, fold, measure=measure and partials is not None)


def zero_sums(kernels, partials, positions):
    """Targets with these partial sums become zero, at some positions."""
    targets = [kernels.device.allocate(size) for size in partials.sizes]
    slots = Span.at(range(len(targets)))
    kernels.zero(Arena(tuple(targets), partials), slots, np.isin(slots.places, positions))


def measure(kernels, buffers, partials, positions=None):
    kernels.measure(arena_of(kernels, buffers, partials), positions)


def totals_of(kernels, partials):
    return kernels.totals(arena_of_sums(partials))


def finalise(kernels, targets, partials, plan, divisor, **options):
    """K2; without targets it does not look for the first bad element."""
    nowhere = _nowhere(partials.sizes) if targets is None else targets
    arena = arena_of(kernels, nowhere, partials, is_ours=targets is not None)
    return kernels.finalise(arena, plan, divisor, **options)


def hand_back(kernels, sources, decision, groups, destinations):
    order = getattr(decision, "order", None)
    partials = None if order is None else _Ordered(order, tuple(source.size for source in sources))
    arena = arena_of(kernels, sources, partials, is_ours=False)
    plan = ClipPlan(tuple(groups), (1.0,) * (1 + max(groups, default=0)))
    kernels.hand_back(arena, decision, plan, None if sources is destinations else Destinations(enumerate(destinations)))


class _Ordered:
    """Partial sums of which K3 needs their order alone."""

    def __init__(self, order, sizes):
        self.order, self.sizes = order, sizes


def status_of(decision):
    """What K2 found, on the host; waits for the device."""
    return decision.read()
