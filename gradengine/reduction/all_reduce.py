"""All-reduce over one group that outlives its exchange: another exchange of the same ranks can resume it.

This keeps which spans were sent and which are summed; `exchange/ordered_all_reduce.py` adds them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, final

from gradengine.errors import CallerError, ExchangeError, PeerLost
from gradengine.exchange.linked import Exchange, Kept, Progress
from gradengine.exchange.links.mpi import MpiLink
from gradengine.exchange.rendezvous import MPI_URL
from gradengine.layout import GradientLayout
from gradengine.layout.slots import Span
from gradengine.reduction.all_gather import gathered, packed


class GroupState(Enum):
    """The state of one rank in a group."""

    SUMMING = "spans may be sent, and their sums received"
    SUMMED = "all spans of the step hold their sums"
    LEFT = "the rank closed the exchange in the middle of a step"


@final
class AllReduce:
    """One rank's part in a group's sums, step by step."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None  # before a group is joined
        self.progress = Progress()  # of the step, whatever exchange carried it there
        self.started: set[int | str] = set()  # keys of the spans that this rank has contributed to
        self.is_alone = True
        self.state = GroupState.SUMMING
        self._gathered: dict[str, list[bytes]] = {}  # answers of this step's gathers: other ranks will not repeat them

    @property
    def is_over_mpi(self) -> bool:
        """Whether MPI sends the bytes: a group that is lost cannot be joined again."""
        return self.exchange is not None and self.exchange.url == MPI_URL

    def join(self, exchange: Exchange, layout: GradientLayout, arena: Any) -> None:
        """Join the group, and contribute again the spans sent through an earlier exchange; closed if that fails.

        `arena` is the argument of the exchange's `bind`.
        """
        try:
            exchange.bind(layout, arena, self.progress)
            is_alone = exchange.world_size == 1
            self.exchange, self.is_alone, self.state, self._gathered = exchange, is_alone, GroupState.SUMMING, {}
            if self.progress.answers is not None:  # the others have ended this step, and told all that it lacks here
                self.state, self._gathered = GroupState.SUMMED, self.progress.answers
                return
            exchange.start(*(span for span in layout.spans if span.key in self.started))
        except CallerError:
            raise  # it is as it was: another engine's, perhaps
        except BaseException:
            exchange.close()  # else it would keep its address and refuse the ranks that still call
            raise

    def start(self, *spans: Span, in_background: bool = True) -> None:
        """Start spans to which this rank's contribution is complete: they are sent from now on, or in `wait`."""
        self.started.update(span.key for span in spans)
        if self.state is not GroupState.LEFT:
            self._joined().start(*spans, in_background=in_background)

    def wait(self) -> None:
        """Return when all spans hold their sums."""
        if self.state is not GroupState.SUMMED:
            self.progress.bad, self.state = [*self._joined().wait()], GroupState.SUMMED

    def tell(self, what: str, facts: object) -> list[Any]:
        """Every rank's facts, in rank order; called again with the same `what` in a step, the first answer."""
        mine = packed(what, facts)
        if self.exchange is None:
            return gathered([mine])
        answers = self.progress.answers
        if answers is not None and (what not in answers or answers[what][self.exchange.rank] != mine):
            text = (
                f"rank {self.exchange.rank} ended step {self.progress.step} otherwise than the others, who have gone on"
            )
            raise ExchangeError(text, got=what, do="restart all from one checkpoint")
        if what not in self._gathered:
            self.progress.has_told = True
            self._gathered[what] = self._joined().all_gather(mine)
        return gathered(self._gathered[what])

    def leave(self) -> None:
        """Close the exchange in the middle of a step; another one must be joined before the next sum."""
        if self.exchange is not None:
            self.state = GroupState.LEFT
            self.exchange.close()

    def restart(self) -> None:
        """Start the open step over: nothing of it was contributed or summed."""
        if self._gathered:
            self.progress.kept = Kept(self.progress.step, self._gathered)
        self.progress.restart()
        self.started, self._gathered = set(), {}
        if self.state is GroupState.SUMMED:
            self.state = GroupState.SUMMING

    def _joined(self) -> Exchange:
        if self.exchange is None or self.state is GroupState.LEFT:
            raise PeerLost(
                "this rank has left the group: a call was interrupted, or it dropped a window that was partly sent",
                do=MpiLink.way_on if self.is_over_mpi else "reconnect() on all ranks of the group",
            )
        return self.exchange
