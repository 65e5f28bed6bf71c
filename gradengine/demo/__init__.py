"""A small language model to try the gradient step on: nothing to download, no framework to install.

Read in this order: `text` (what is learned), `model` (forward and backward), `adamw` (the update). All three are plain
array code; `model` and `adamw` run on NumPy and on CuPy, whichever module they are given as `xp`. Then `learner` (all
three as a local trainer), `worker` (a rank), `run` (all ranks, and the replays) and `proofs` (what it shows). A model
cut for tensor parallelism is in `shards`, its all-reduce in `all_reduce`.
"""
