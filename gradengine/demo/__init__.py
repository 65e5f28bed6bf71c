"""A small language model that shows the gradient step, without a download and without a framework.

Read in this order: `text` (the data), `model` (forward and backward), `adamw` (the update), `shards` (the model cut for
tensor parallelism), `worker` (a rank and its replay), `run` (all ranks), `proofs` (the checks of a run).
"""
