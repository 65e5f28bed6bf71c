"""The sum over workers of one engine's windows, and what all ranks must know alike before they decide on a step.

In: an accumulator and the exchanges it has joined. Out: the sums in its arena, and `StepStats`, the same on all ranks.
Imports `exchange`, `accumulate`, `kernels`, `layout` and `arrays`; decides nothing and hands nothing back.
"""
