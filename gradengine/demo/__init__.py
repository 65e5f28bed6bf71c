"""A small language model to try the gradient step on: nothing to download, no framework to install.

Read in this order: `text` (what is learned), `model` (forward and backward), `adamw` (the update), `shards` (the model
cut for tensor parallelism), `worker` (a rank and its replay), `run` (all ranks), `proofs` (what the run shows).
"""
