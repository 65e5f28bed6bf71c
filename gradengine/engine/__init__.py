"""The engine, which turns micro-batches into optimizer steps, in one process or over an exchange.

Its input is the gradients of each micro-batch. Its output is a `StepResult` with the averaged and clipped gradients.
`engine.py` has the calls `add` and `step`, `settings.py` the checks of arguments, `micro_batch.py` gradients that are
added one by one, `result.py` the result of a step, `capture.py` a CUDA graph of a window, `checkpoint.py` the saved
state, `ranges.py` a profiler's ranges, and `trainer.py` a training loop. Imports `reduction`, `exchange` and
`accumulate`.
"""

from gradengine.engine.engine import GradientEngine

__all__ = ["GradientEngine"]
