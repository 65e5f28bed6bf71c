"""Benchmarks: each case beside what a person would use instead, checked first, then timed in one interleaved run."""
