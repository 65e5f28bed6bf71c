"""The same work on each worker of a group, a thread for each."""

import threading

from gradengine import connect, local_group


def on_ranks(work, world_size, **options):
    """Run work(exchange) on a thread for each rank of a local group; its results or errors in rank order."""
    options = {"timeout": 20.0, "join_timeout": 10.0, **options}
    return _on_each(work, local_group(world_size, **options))


def on_tcp(work):
    """The same for two ranks over TCP."""
    first = connect("tcp://127.0.0.1:0", 0, 2, timeout=20.0, join_timeout=10.0)
    exchanges = [first, connect(first.url, 1, 2, timeout=20.0, join_timeout=10.0)]
    outcomes = _on_each(work, exchanges)
    for exchange in reversed(exchanges):
        exchange.close()
    return outcomes


def _on_each(work, exchanges):
    outcomes = [None] * len(exchanges)

    def run(exchange):
        try:
            outcomes[exchange.rank] = work(exchange)
        except Exception as error:
            outcomes[exchange.rank] = error
            exchange.close()

    threads = [threading.Thread(target=run, args=(exchange,)) for exchange in exchanges]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes
