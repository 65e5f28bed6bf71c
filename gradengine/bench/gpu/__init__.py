"""Benchmarks on a GPU: the same step beside PyTorch and CuPy by hand, on the same memory, beside the GPU's own copy."""
