"""What a training run will take before it is started: memory of each rank, bytes and seconds of its exchange.

Read in this order: `models` and `config` (the sizes), `memory` (bytes that a rank keeps), `compute` (how long backward
runs, when each span is ready), `traffic` (what each algorithm sends), `overlap` (what of it backward hides), `question`
and `prediction` (all of it) and `choice` (the transport to take, and what shortens a wait). `machine` is the exchange
within one machine, where copies take the time, by the rates that `measure` finds there: what `bench/plan_check.py`
compares with runs. `quantities`, `table`, `plot` and `command` show it.
"""
