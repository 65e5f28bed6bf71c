"""What a training run will take before it is started: memory of each rank, bytes and seconds of its exchange.

Read in this order: `models` (the sizes), `memory` (bytes that a rank keeps), `compute` (how long backward runs, when
each span is ready), `traffic` (what each algorithm sends), `overlap` (what of it backward hides), `prediction` (all of
it) and `choice` (the transport to take). `machine` is the exchange within one machine, where copies take the time: what
`bench/plan_check.py` compares with measured runs. `table`, `plot` and `command` show it.
"""
