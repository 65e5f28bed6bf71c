"""Benchmarks: each part of the step beside the same by hand and by PyTorch, in one interleaved run.

One harness for every device. A `Device` (the host, or a GPU) places arrays and times a run. A `Workload` is a step's
micro-batches on a device, and what must come out of them. A benchmark is a list of `Variant`s over a workload:
`measure` builds each, compares its result with fp64's, times those that compute the same in turns beside what the
memory can do, and gives a `Report`, which is a table or JSON.

The files, each using only those before it:

    machine               where a figure was taken
    device  harness       where a case is timed; how variants are checked and timed in turns, and what is found
    workload  peers       on what, and what is compared with: the same by hand and by torch
    parts  step  workers  the variants of each benchmark, and the bytes that each moves
    benchmarks  __main__  the GPU's by name, several in one process
    table  command        the command line
"""
