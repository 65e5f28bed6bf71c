"""`gradengine plan`: memory of each rank, bytes and seconds of its exchange, said before a training run is started.

A question enters (model, ranks, bandwidths: `prediction`), a table, a plot or JSON leaves. In the order of imports:
`models`, `traffic` (of each algorithm), `machine` (all workers on one: its measured rates), `prediction` (all of it);
`table`, `plot` and `command` show it.
"""
