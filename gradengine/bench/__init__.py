"""Benchmarks: each part of the step beside the same by hand and by PyTorch, in one interleaved run.

One harness for every device. A `Device` (the host, or a GPU) places arrays and times a run. A `Workload` is a step's
micro-batches on a device, and their expected results. A benchmark is a list of `Variant`s over a workload: `measure`
builds each, compares its result with fp64's, times those that are right in turns, beside the memory's bandwidth, and
returns a `Report`, which is shown as a table or JSON.

The files, each using only those before it:

    machine               the machine of a figure
    device  harness       devices that time a case; how variants are checked and timed in turns, and the report
    workload  peers       the gradients, and what is compared with: the same by hand and by torch
    parts  step  workers  the variants of each benchmark, and the bytes that each moves
    table  command        the command line
"""
