"""`gradengine plan`: predicts memory of each rank, bytes and seconds of its exchange, before a training run is started.

In: a question (model, ranks, bandwidths). Out: a table or JSON. It is arithmetic alone: nothing is run or measured. In
the order of imports: `models`, `traffic` (of each transport), `prediction` (the question and its answer), `table`,
`command`.
"""
