"""The all-reduce of one engine's step: its sums over the workers, and the counts and norms that all ranks agree on.

In: an accumulator, and the exchanges that the engine was given. Out: the sums in the arena, and `StepStats`, the same
on all ranks. `reducer.py` runs it, `stats.py` has the ranks agree; `exchange` adds the ranks' gradients, or
`device_sums.py` on their GPUs, where a process group of torch can. Imports
`exchange`, `accumulate`, `kernels`, `layout` and `arrays`; decides nothing and hands nothing back.
"""
