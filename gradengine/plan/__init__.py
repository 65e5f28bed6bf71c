"""`gradengine plan`: predicts memory of each rank, bytes and seconds of its exchange, before a training run is started.

In: a question (model, ranks, bandwidths). Out: a table, a plot or JSON. In the order of imports: `models`, `traffic`
(of each algorithm), `machine` (measured rates, if all workers are on one), `prediction` (the question and its answer);
`table`, `plot` and `command` show it.
"""
