"""The engine: micro-batches in, one step out, in one process or over an exchange.

In: gradients of each micro-batch. Out: a `StepResult` with the averaged and clipped gradients. `engine.py` has the
calls `add` and `step`, `settings.py` what an engine is made with, `micro_batch.py` gradients that come one by one,
`result.py` what a step answers, `capture.py` a CUDA graph of a window, `checkpoint.py` an open window
on disk, `ranges.py` a profiler's ranges, and `trainer.py` a loop around it all. Imports `reduction`, `exchange` and
`accumulate`.
"""

from gradengine.engine.engine import GradientEngine

__all__ = ["GradientEngine"]
