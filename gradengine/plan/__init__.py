"""The command `gradengine plan`, which predicts memory, bytes and seconds of each rank before a training run.

The input is a question (model, ranks, bandwidths), the output a table or JSON. It is arithmetic, and runs and measures
nothing. The files in the order of imports are `models`, `traffic` (of each transport), `prediction` (the question and
its answer), `table` and `command`.
"""
