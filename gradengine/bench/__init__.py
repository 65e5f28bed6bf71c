"""Benchmarks: each part of the step beside the same by hand and by PyTorch, in one interleaved run.

One harness for every device. A `Device` (the host, or a GPU) places arrays, times a run, measures what its memory can
do, and says where it is. A `Workload` is a step's micro-batches on a device and what must come out of them. A benchmark
is a list of `Variant`s over a workload: `measure` builds each, compares its result with fp64's, times those that
compute the same in turns, and gives a `Report`, which is a table or JSON.

The files, each using only those before it:

    case  timing  machine  memory        a variant, its check, its samples; where a figure was taken
    device  host  gpu  workload          where the work is done, and on what
    peers                                the same work by hand and by torch
    sums  clipping  step  calls          the variants of each benchmark, and the bytes that each moves
    yardstick  report  launches  table   what is found
    crew  reduction  exchange            workers that sum a gradient set
    benchmarks  options  command         the GPU's by name; the command line
"""
