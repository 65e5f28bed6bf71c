"""The sum over one group, which outlives the exchange that it began with: another of the same ranks takes it up."""

from __future__ import annotations

from typing import Any, final

from gradengine.errors import CallerError, PeerLost
from gradengine.exchange.interface import Arena, Exchange, OnReduced, Progress, closing_if_interrupted
from gradengine.layout import GradientLayout
from gradengine.layout.slots import Span
from gradengine.reduction.all_gather import heard, packed

__all__ = ["AllReduce"]


@final
class AllReduce:
    """One rank's part in a group's sums, step by step.

    Attributes:
        exchange: What carries them; None before a group is joined.
        progress: How far the step has come, whatever exchange carried it there.
        started: Keys of the spans that this rank has contributed to.
    """

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.progress = Progress()
        self.started: set[int | str] = set()
        self._is_summed = self._has_left = False
        self._gathered: dict[str, list[bytes]] = {}  # what was told, kept: the others are past it

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to sum with."""
        return self.exchange is None or self.exchange.world_size == 1

    @closing_if_interrupted
    def join(self, exchange: Exchange, layout: GradientLayout, arena: Arena, on_reduced: OnReduced) -> None:
        """Join the group, and contribute again what had left through another exchange. One that fails is closed.

        Raises:
            HandshakeRefused, PeerLost: The ranks do not come together, or stand at different steps.
        """
        try:
            exchange.bind(layout, arena, self.progress, on_reduced)
            self.exchange, self._is_summed, self._has_left, self._gathered = exchange, False, False, {}
            for span in layout.spans:
                if span.key in self.started:
                    exchange.start(span)
        except CallerError:
            raise  # it is as it was: another engine's, perhaps
        except BaseException:
            exchange.close()  # else it keeps its address, known to nobody, and refuses the others as they come
            raise

    @closing_if_interrupted
    def start(self, span: Span) -> None:
        """This rank's contribution to a span is complete and may travel."""
        self.started.add(span.key)
        if not self._has_left:
            self._joined().start(span)

    @closing_if_interrupted
    def wait(self) -> None:
        """Return when all spans hold their sums.

        Raises:
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed.
        """
        if not self._is_summed:
            self.progress.bad, self._is_summed = [*self._joined().wait()], True

    @closing_if_interrupted
    def tell(self, what: str, facts: object) -> list[Any]:
        """Every rank's facts, in rank order; see `heard`. What is told once in a step is not told again.

        Raises:
            CallerError: The facts cannot be told; nobody has heard of them.
            ExchangeError: A rank tells something else than rank 0.
        """
        mine = packed(what, facts)
        if self.exchange is None:
            return heard([mine])
        if what not in self._gathered:
            self._gathered[what] = self._joined().gather(mine)
        return heard(self._gathered[what])

    def close(self) -> None:
        """Leave the group."""
        if self.exchange is not None:
            self.exchange.close()

    def restart(self) -> None:
        """Nothing of the open step has been contributed, or summed."""
        self.progress.restart()
        self.clear()

    def drop(self) -> None:
        """The step begins anew. What is under way already the exchange cannot take back: it is closed."""
        if self.started and self.exchange is not None:
            self.close()
            self._has_left = True
        self.restart()

    def clear(self) -> None:
        """Nothing has been contributed."""
        self.started, self._is_summed, self._gathered = set(), False, {}

    def _joined(self) -> Exchange:
        if self.exchange is None or self._has_left:
            raise PeerLost(
                "this rank has left the group: it dropped a window that was on its way",
                do="reconnect() on all ranks of the group",
            )
        return self.exchange
