"""One rank, or a server, as a process of its own, for the tests that kill or stop it: says what it has done."""

import sys
import threading

from transports import LARGE, Worker, contributions

from gradengine.exchange import GradientServer, WorkerClient


def main(role, address, rank, world_size, spans):
    """Serve; or join, start the first `spans` spans, and stay."""
    host, _, port = address.rpartition(":")
    if role == "server":
        server = GradientServer(world_size, (host, int(port)), bucket_bytes=1000)
        print(server.url.removeprefix("tcp://"), flush=True)
    else:
        exchange = WorkerClient((host, int(port)), rank, world_size)
        worker = Worker(exchange, LARGE, contributions(LARGE, world_size)[rank])
        worker.bind()
        for span in LARGE.spans[:spans]:
            exchange.start(span)
        print("started", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
