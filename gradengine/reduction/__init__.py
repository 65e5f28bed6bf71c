"""The all-reduce of one engine's step: its sums over the workers, and the counts and norms that all ranks agree on.

In: an accumulator, and the exchanges that the engine was given. Out: the sums in the arena, and `StepStats`, the same
on all ranks. `reducer.py` runs it, `stats.py` has the ranks agree; the ranks' gradients are added in
`exchange/group.py`. `ordered_all_reduce.py`, which nothing uses yet, adds the shares that `shares.py` cuts, each at its
owner; `pump.py` runs it over a link. Imports `exchange`, `accumulate`, `kernels`, `layout` and `arrays`; decides
nothing and hands nothing back.
"""
