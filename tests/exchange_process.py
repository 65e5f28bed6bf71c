"""One rank as a process of its own, for the tests that kill or stop it: says what it has done, line by line."""

import sys
import threading

from transports import LARGE, Worker, contributions

from gradengine.exchange import GradientServer, LocalExchange, WorkerClient


def main(role, address, rank, world_size, spans):
    """Join, start the first `spans` spans, and stay."""
    host, _, port = address.rpartition(":")
    if role == "coordinator":
        server = GradientServer(world_size, (host, int(port)), bucket_bytes=1000)
        exchange = LocalExchange(server.group, 0, on_close=server.close)
        print(server.url.removeprefix("tcp://"), flush=True)
    else:
        exchange = WorkerClient((host, int(port)), rank, world_size)
    worker = Worker(exchange, LARGE, contributions(LARGE, world_size)[rank])
    worker.bind()
    print("joined", flush=True)
    for span in LARGE.spans[:spans]:
        exchange.start(span)
    print("started", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
