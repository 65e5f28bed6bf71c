"""Benchmarks of each part of the step, by hand and by PyTorch too, in one interleaved run.

All devices use one harness. A `Device` (the host, or a GPU) places arrays and times a run. A `Workload` is a step's
micro-batches on a device, and their expected results. A benchmark is a list of `Variant`s over a workload. `measure`
builds each variant and compares its result with fp64's. It times the correct variants in turns, together with a copy
that shows the memory bandwidth. It returns a `Report`, which is shown as a table or as JSON.

The files, each of which uses only those before it:

    machine               the machine and the versions of a report
    device  harness       devices that time a case, the check and the timing of variants, and the report
    workload  peers       the gradients, and the same work by hand and by torch
    parts  step  workers  the variants of each benchmark, and the bytes that each moves
    table  command        the command line
"""
