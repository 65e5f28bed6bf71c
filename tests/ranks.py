"""The same work on each worker of a group, a thread for each."""

import threading

from transports import Failing

from gradengine import connect, local_group
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.links.threads import thread_links

OPTIONS = {"timeout": 60.0, "join_timeout": 60.0}


def on_ranks(work, world_size, **options):
    """Run work(exchange) on a thread for each rank of a local group; its results or errors in rank order."""
    return _on_each(work, local_group(world_size, **OPTIONS | options))


def holds_sums(engine):
    """Whether some of the sum over links may have come into an engine's arena."""
    return engine.exchange.holds_sums


def started(engine):
    """The keys of the spans that an engine has started in this step."""
    return set(engine.exchange.started)


def on_links(work, world_size, *, lost_after=None, **options):
    """The same over links between threads; that of rank 1 closes after so many transfers."""
    links = thread_links(world_size)
    links[1] = Failing(links[1], lost_after)
    return _on_each(work, [Exchange(link, **OPTIONS | options) for link in links])


def on_grid(work, dp_size, tp_size, rows=None):
    """Run work(data_parallel, tensor_parallel) on a thread for each rank of a grid; outcomes[dp_rank][tp_rank].

    Each worker's tensor-parallel group is a row: of threads, if none are given.
    """
    columns = [local_group(dp_size, **OPTIONS) for _ in range(tp_size)]
    rows = rows or [local_group(tp_size, **OPTIONS) for _ in range(dp_size)]
    found = _at_each(work, [(columns[t][d], rows[d][t]) for d in range(dp_size) for t in range(tp_size)])
    return [found[d * tp_size :][:tp_size] for d in range(dp_size)]


def on_tcp(work):
    """The same for two ranks over TCP."""
    first = connect("tcp://127.0.0.1:0", 0, 2, **OPTIONS)
    exchanges = [first, connect(first.url, 1, 2, **OPTIONS)]
    outcomes = _on_each(work, exchanges)
    for exchange in reversed(exchanges):
        exchange.close()
    return outcomes


def _on_each(work, exchanges):
    return _at_each(work, [(exchange,) for exchange in exchanges])


def _at_each(work, places):
    outcomes = [None] * len(places)

    def run(place, exchanges):
        try:
            outcomes[place] = work(*exchanges)
        except Exception as error:
            outcomes[place] = error
            for exchange in exchanges:
                exchange.close()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes
