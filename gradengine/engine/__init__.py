"""The engine, which turns micro-batches into optimizer steps, in one process or over an exchange.

Its input is the gradients of each micro-batch. Its output is a `StepResult` with the averaged and clipped gradients.
`engine.py` has the calls `add` and `step`, and `micro_batch.py` adds gradients one by one. `settings.py` checks
arguments. `result.py` has the result of a step, and `capture.py` a CUDA graph of a window. `checkpoint.py` saves the
state, and `ranges.py` marks a profiler's ranges. `trainer.py` is a training loop. Imports `reduction`, `exchange` and
`accumulate`.
"""

from gradengine.engine.engine import GradientEngine

__all__ = ["GradientEngine"]
