"""A served group at its server: all ranks send their parts to it, and it sums each share and sends it to all.

It has one thread, and memory only for the shares in flight. Gathers go through the server too: in the first one the
ranks are compared, as in every group, and rank 0 sends its layout, which the server cuts into shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

from gradengine.errors import (
    DeadlineExceeded,
    NotCopied,
    PeerLost,
    ProtocolError,
)
from gradengine.exchange.comparison import (
    Hello,
    ServerHello,
    behind_of,
    brought_up,
    group_to_resume,
    hellos_of,
    layout_of,
    packed,
    refuse_differing,
    refuse_large,
    refuse_lost_sums,
)
from gradengine.exchange.gather import Gather, is_of_gather
from gradengine.exchange.links.link import Completed, Completion
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.patience import Late, Patience
from gradengine.exchange.shares import shares_of
from gradengine.exchange.transfers import Receive, Send
from gradengine.kernels import HostKernels
from gradengine.layout import GradientLayout, Span

_LOOK_SECONDS = 0.1  # until a server that waits looks at the clock again


@final
class Hub(NotCopied, instead="make one for each group"):
    """Serves one group over a link to all of its ranks.

    Args:
        link: The server's link; closed at the end.
        timeout: Seconds without a finished transfer after which a rank that others wait for is given up.
        bucket_bytes: Bytes of a share.
        most_bytes: The largest arena of a layout.
        clock: The clock of all seconds here.
    """

    def __init__(
        self,
        link: SocketLink,
        *,
        timeout: float,
        bucket_bytes: int,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link, self._timeout, self._clock = link, timeout, clock
        self._bucket_bytes, self._most_bytes = bucket_bytes, most_bytes
        self._hellos: list[Hello] = []
        self._spans: Sequence[Span] = ()
        self._all_reduce: OrderedAllReduce | None = None  # once the ranks have been compared
        self._gather, self._is_gathering = self._next_gather(), False
        self._is_summing = False  # whether a rank has begun the step
        self._moved_at, self._moved_bytes, self._patience = clock(), 0, Patience(clock)

    def serve(self, is_closing: Callable[[], bool] = lambda: False) -> None:
        """Serve until all ranks have left, between two steps; or until `is_closing` returns True: it is called often.

        Raises:
            PeerLost: A rank left that others wait for; names it.
            DeadlineExceeded: A rank that others wait for was too late; names it.
            HandshakeRefused: The ranks differ in a setting that must be the same.
            ProtocolError: A rank sent what it should not, or it was damaged on the way.
        """
        try:
            while not (is_closing() or self._is_over()):
                if not self._turn():
                    self._refuse_late()
                    self._link.bell.wait(min(self._timeout, _LOOK_SECONDS))
        finally:
            self._link.close()

    @property
    def step(self) -> int | None:
        """The number of the open step; None before the ranks have been compared."""
        return None if self._all_reduce is None else self._all_reduce.step

    def _turn(self) -> bool:
        """Handle finished transfers, and begin the next ones; returns whether there were any."""
        over = self._link.poll()
        if self._link.moved_bytes != self._moved_bytes:
            self._moved_at, self._moved_bytes = self._clock(), self._link.moved_bytes
        for completion in over:
            self._moved_at = self._clock()
            try:
                self._report(completion)
            except ProtocolError:
                self._link.lost = completion.peer  # the others are told whose fault it is
                raise
            if self._gather.is_done:
                parts, self._gather, self._is_gathering = self._gather.parts, self._next_gather(), False
                self._look_at(parts[:-1])
            self._begin()
        return self._begin() or bool(over)

    def _report(self, completion: Completion) -> None:
        kind, peer, tag = completion
        if kind is Completed.DAMAGED:
            raise self._link.damaged(peer, self._described(tag))
        if is_of_gather(tag):
            self._gather.over(completion)
            return
        all_reduce = self._sums
        if kind is Completed.SENT:
            all_reduce.sent(peer, tag)
        else:
            all_reduce.received(peer, tag)
        if all_reduce.is_done:
            all_reduce.next_step()
            self._begin_step()

    def _begin(self) -> bool:
        """Begin the transfers that are to be made now; returns whether there were any.

        Nothing is received for a gather or step that no rank has begun, so that a rank may leave before it.
        """
        held = [is_of_gather(tag) for tag in self._link.held()]
        self._is_gathering = self._is_gathering or True in held
        self._is_summing = self._is_summing or (False in held and self._all_reduce is not None)
        transfers = self._gather.transfers() if self._is_gathering else []
        if self._is_summing:
            transfers += self._sums.transfers()
        if transfers:
            self._moved_at = self._clock()
        for transfer in transfers:
            if isinstance(transfer, Send):
                self._link.send(*transfer)
            else:
                assert isinstance(transfer, Receive)  # noqa: S101  (there is no arena, and nothing is read in place)
                self._link.receive(*transfer)
        return bool(transfers)

    # ---- the group ----

    def _next_gather(self) -> Gather:
        own = packed(ServerHello(self._bucket_bytes, self._most_bytes)) if not self._hellos else b""
        return Gather(self._link.rank, self._link.world_size, own, self._link.hub)

    def _look_at(self, parts: list[bytes]) -> None:
        """Compare the ranks by their first gathers, as each of them does; later gathers are not looked at."""
        if self._all_reduce is not None:
            return
        if not self._hellos:
            self._hellos, _ = hellos_of(parts)
            return
        if behind := behind_of(self._hellos)[0]:  # this gather was for them
            self._hellos = brought_up(self._hellos, behind)
            return
        refuse_differing(self._hellos, parts)
        group_to_resume(self._hellos)
        refuse_lost_sums(self._hellos)
        layout = self._layout_of(parts[0])
        ranks = self._link.world_size
        shares = shares_of(layout, ranks, self._bucket_bytes, owner=ranks)
        step, self._spans = self._hellos[0].step, layout.spans
        self._all_reduce = OrderedAllReduce(ranks, ranks, layout, shares, None, HostKernels(), step=step)
        self._begin_step()

    def _layout_of(self, table: bytes) -> GradientLayout:
        layout = layout_of(0, table)
        if layout.fingerprint != self._hellos[0].layout:
            what, expected = "rank 0 sent the table of another layout", self._hellos[0].layout
            raise ProtocolError(what, got=layout.fingerprint, expected=expected)
        refuse_large(layout, self._most_bytes)
        return layout

    def _begin_step(self) -> None:
        self._is_summing = False
        for span in self._spans:
            self._sums.start(span)

    @property
    def _sums(self) -> OrderedAllReduce:
        assert self._all_reduce is not None, "nothing of a step is received before"  # noqa: S101
        return self._all_reduce

    def _is_over(self) -> bool:
        """Whether all ranks have left."""
        if len(self._link.gone()) < self._link.world_size:
            return False
        if self._all_reduce is None:
            raise PeerLost("all ranks left before they had been compared", do="look at the ranks' own errors")
        if self._is_gathering or self._is_summing:
            return False  # as the next turn finds
        self._link.refuse_unsaid()
        return True

    # ---- who is late ----

    def _refuse_late(self) -> None:
        waited, late = self._patience.waited(self._moved_at), self._late()
        if late is None:
            return
        if waited > self._timeout:
            self._link.lost = late.ranks[0]
            do = "check whether the late ranks still run"
            raise DeadlineExceeded(late.error, got=f"nothing for {self._timeout:g} s", do=do)
        self._patience.look(waited, self._link, lambda: late)

    def _late(self) -> Late | None:
        """Whom others wait for; None if nobody waits."""
        late = self._all_reduce.awaited if self._all_reduce is not None and self._is_summing else None
        if late is not None:
            ranks, what = [late[0]], f"{late[1]} in step {self._sums.step}"
        elif self._is_gathering:
            ranks, what = self._gather.awaited, "a gather (end of step or barrier)"
        else:
            return None
        where = "joining" if self._all_reduce is None else f"step {self._sums.step}"
        return Late(ranks, where, f"rank {ranks[0]} is late: others wait for {what}")

    def _described(self, tag: int) -> str:
        return "a gather" if is_of_gather(tag) else f"{self._sums.described(tag)} in step {self._sums.step}"
