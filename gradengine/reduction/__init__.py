"""The all-reduce of one engine's step, with the counts and norms that all ranks agree on.

The input is an accumulator and the exchanges that the engine was given. The output is the sums in the arena, and
`StepStats` that are the same on all ranks. `reducer.py` runs the all-reduce, and `stats.py` makes the ranks agree.
`exchange` adds the ranks' gradients. With a torch process group on NCCL, `device_sums.py` adds them on the GPUs.
The package imports `exchange`, `accumulate`, `kernels`, `layout` and `arrays`. It neither clips nor writes results.
"""
