"""One rank, or a server, as a process of its own, for the tests that kill or stop it: says what it has done."""

import hashlib
import sys
import threading

from transports import LARGE, Worker, contributions

from gradengine.exchange import GradientServer, connect
from gradengine.exchange.addresses import LINKS


def main(role, address, rank, world_size, spans):
    """Serve; or join, start the first `spans` spans, and stay; sum them, if a rank without a server starts all."""
    part = contributions(LARGE, world_size)[rank]
    if role in LINKS:
        stay(connect(address, rank, world_size, link=role), part, spans)
        return
    host, _, port = address.rpartition(":")
    if role == "server":
        server = GradientServer(world_size, (host, int(port)), bucket_bytes=1000)
        print(server.url.removeprefix("tcp://"), flush=True)
    else:
        stay(connect(f"tcp://{address}", rank, world_size, served=True), part, spans)
    threading.Event().wait()


def stay(exchange, part, spans):
    """Start the first `spans` spans, and stay."""
    worker = Worker(exchange, LARGE, part)
    worker.bind()
    for span in LARGE.spans[:spans]:
        exchange.start(span)
    print("started", flush=True)
    if spans == len(LARGE.spans):
        exchange.wait()
        exchange.barrier()
        print(hashlib.sha256(worker.arena).hexdigest(), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
