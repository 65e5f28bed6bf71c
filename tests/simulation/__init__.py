"""Whole groups of ranks in one process, on a virtual clock and network: all that happens follows from one seed."""
