"""What the processes of measured/plan_check.py do: step, and be watched."""

from __future__ import annotations

import time

from gradengine import GradientEngine, connect
from gradengine.bench.device import peak_growth
from gradengine.bench.workers import ExchangeReduction, contribution, span_layout
from gradengine.plan.traffic import ready_shares

__all__ = ["Footprint", "Stepper", "served"]

_JOIN_SECONDS = 60.0


def served(url: str, workers: int, elements: int, rank: int) -> ExchangeReduction:
    """The reduction through the server there."""
    return ExchangeReduction(connect(url, rank, workers, join_timeout=_JOIN_SECONDS, served=True), elements)


class Stepper:
    """A rank whose backward is a wait: each block is handed to the engine at its share of it, as its last."""

    def __init__(self, url: str, workers: int, elements: int, backward_seconds: float, rank: int) -> None:
        self._layout, self._backward = span_layout(elements), backward_seconds
        self._exchange = connect(url, rank, workers, link="tcp", join_timeout=_JOIN_SECONDS)
        self._engine = GradientEngine(self._layout, exchange=self._exchange, max_norm=1.0)
        self._gradients = [[contribution(rank, slot.size) for slot in span.slots] for span in self._layout.spans]
        self._shares = ready_shares(self._layout)

    def run(self) -> dict[str, float]:
        """Seconds after backward's end until the step is over."""
        for _ in range(2):  # all ranks begin together: the first brings them near each other
            self._exchange.gather(b"")
        begin = time.perf_counter()
        for share, span, gradients in zip(self._shares, self._layout.spans, self._gradients, strict=True):
            left = begin + share * self._backward - time.perf_counter()
            if left > 0:
                time.sleep(left)
            self._engine.add_block(span.key, gradients, last=True)
        self._engine.step()
        return {"exposed": time.perf_counter() - begin - self._backward}


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
        exchange = None if url is None else connect(url, rank, workers, link="tcp", join_timeout=_JOIN_SECONDS)
        layout = span_layout(self._elements)
        engine = GradientEngine(layout, exchange=exchange, max_norm=1.0)
        for _ in range(2):
            engine.add({s.name: self._gradients[s.offset : s.stop] for s in layout.slots})
            engine.step()
        if exchange is not None:
            exchange.close()
