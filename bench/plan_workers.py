"""What the processes of bench/plan_check.py do: send plainly, sum as a coordinator does, step, and be watched."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import numpy.typing as npt

from gradengine import GradientEngine, connect
from gradengine.bench.memory import peak_growth
from gradengine.bench.reduction import Reduction, contribution, span_layout
from gradengine.exchange.channel import Address, Channel, connect_socket, listen_socket
from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES, find_non_finite
from gradengine.plan.compute import ready_shares

__all__ = ["JOIN_SECONDS", "Duplex", "Footprint", "Stepper", "Sum"]

JOIN_SECONDS = 60.0
PIECE = DEFAULT_BUCKET_BYTES // 4


class Duplex(Reduction):
    """One of two processes that send each other a whole set at once, through one plain socket."""

    def __init__(self, address: Address, elements: int, rank: int) -> None:
        super().__init__(rank, 2, elements)
        if rank:
            self._socket = connect_socket(address, JOIN_SECONDS)
        else:
            with listen_socket(address) as listener:
                self._socket = listener.accept()[0]
        self._socket.settimeout(JOIN_SECONDS)
        Channel(self._socket, "the other process")  # the options that the exchange sets

    def run(self) -> None:
        """Send and receive at once."""
        sender = threading.Thread(target=self._send)
        sender.start()
        receive(self._socket, self.arena)
        sender.join()

    def _send(self) -> None:
        for start in range(0, self._mine.size, PIECE):
            self._socket.sendall(self._mine[start : start + PIECE].data)

    def error(self) -> float:
        """0 where what came is what the other has."""
        return float(np.abs(self.arena - contribution(1 - self.rank, self.arena.size)).max())

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Sum:
    """What one thread of the coordinator does with each bucket: look at it, add it, copy the sum."""

    def __init__(self, elements: int) -> None:
        self._total, self._part = contribution(0, elements), contribution(1, elements)
        self._copy = np.zeros_like(self._part)

    def run(self) -> dict[str, float]:
        """Seconds of each of the three, over the whole set."""
        spent = dict.fromkeys(("check", "add", "copy"), 0.0)
        for start in range(0, self._part.size, PIECE):
            total, part, copy = (array[start : start + PIECE] for array in (self._total, self._part, self._copy))
            ticks = [time.perf_counter()]
            for work in (
                lambda part=part, start=start: find_non_finite(1, part, start),
                lambda total=total, part=part: np.add(total, part, out=total),
                lambda total=total, copy=copy: np.copyto(copy, total),
            ):
                work()
                ticks.append(time.perf_counter())
            for name, begin, end in zip(spent, ticks, ticks[1:], strict=False):
                spent[name] += end - begin
        return spent


class Stepper:
    """A rank whose backward is a wait: each block is handed to the engine at its share of it, as its last."""

    def __init__(self, url: str | None, workers: int, elements: int, backward_seconds: float, rank: int) -> None:
        self._layout, self._backward = span_layout(elements), backward_seconds
        self._exchange = None if url is None else connect(url, rank, workers, join_timeout=JOIN_SECONDS)
        self._engine = GradientEngine(self._layout, exchange=self._exchange)
        self._gradients = [[contribution(rank, slot.size) for slot in span.slots] for span in self._layout.spans]
        self._shares = ready_shares(self._layout)

    def run(self) -> dict[str, float]:
        """Seconds after backward's end until the step is over, of the calls that took gradients, and of a gather."""
        if self._exchange is not None:
            self._exchange.gather(b"")  # all ranks begin together
        before = time.perf_counter()
        if self._exchange is not None:
            self._exchange.gather(b"")
        begin, adding = time.perf_counter(), 0.0
        for share, span, gradients in zip(self._shares, self._layout.spans, self._gradients, strict=True):
            left = begin + share * self._backward - time.perf_counter()
            if left > 0:
                time.sleep(left)
            start = time.perf_counter()
            self._engine.add_block(span.key, gradients, last=True)
            adding += time.perf_counter() - start
        ended = time.perf_counter()
        self._engine.step()
        end = time.perf_counter()
        return {
            "exposed": end - begin - self._backward,
            "adding": adding,
            "step": end - ended,
            "gather": begin - before,
        }

    def close(self) -> None:
        """Leave the group."""
        if self._exchange is not None:
            self._exchange.close()


class Footprint:
    """A rank that is watched while it builds an engine, joins and makes steps."""

    def __init__(self, url: str | None, workers: int, elements: int, rank: int) -> None:
        self._place, self._elements = (url, rank, workers), elements
        self._gradients = contribution(rank, elements)

    def run(self) -> int | None:
        """By how many bytes this process grew at the peak."""
        return peak_growth(self._train)[1]

    def _train(self) -> None:
        url, rank, workers = self._place
        exchange = None if url is None else connect(url, rank, workers, join_timeout=JOIN_SECONDS)
        layout = span_layout(self._elements)
        engine = GradientEngine(layout, exchange=exchange, max_norm=1.0)
        for _ in range(2):
            engine.add({s.name: self._gradients[s.offset : s.stop] for s in layout.slots})
            engine.step()
        if exchange is not None:
            exchange.close()

    def close(self) -> None:
        """Nothing is left."""


def receive(connection: socket.socket, memory: npt.NDArray[np.float32]) -> None:
    """Fill memory from a socket."""
    view, filled = memory.data.cast("B"), 0
    while filled < view.nbytes:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise ConnectionError("the other end closed the connection")
        filled += count
