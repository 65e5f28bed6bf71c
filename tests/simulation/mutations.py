"""Bugs planted in the exchange, each a small change of one function's text; the simulation must find all of them."""

import inspect
import textwrap
from typing import NamedTuple

from gradengine.exchange import comparison, frontiers, linked
from gradengine.exchange.gather import Gather
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.pump import Pump


class Mutation(NamedTuple):
    """A function of an owner (a class or module), what its text says instead, and a schedule that found it."""

    owner: object
    name: str
    old: str
    new: str
    seed: int = 0

    def plant(self, monkeypatch):
        """Replace the function; also where another module has imported it."""
        was = vars(self.owner)[self.name]
        function = was.fget if isinstance(was, property) else was
        text = textwrap.dedent(inspect.getsource(function))
        assert text.count(self.old) == 1, f"{self.name} has changed: {self.old!r}"
        names = {}
        exec("from __future__ import annotations\n" + text.replace(self.old, self.new), function.__globals__, names)
        planted = names[self.name]
        for owner in (self.owner, comparison, linked):
            if vars(owner).get(self.name) is was:
                monkeypatch.setattr(owner, self.name, planted)


MUTATIONS = {
    "parts are added in the order in which they are there": Mutation(
        OrderedAllReduce, "_sum_if_complete", "for rank in range(self.world_size)]", "for rank in parts]"
    ),
    "a share is summed before all parts are there": Mutation(
        OrderedAllReduce, "_sum_if_complete", "or incoming.missing or", "or len(incoming.missing) > 1 or"
    ),
    "a share that is summed counts as a part when the step is resumed": Mutation(
        OrderedAllReduce, "resume", "is_summed = states", "is_summed = 99 * states"
    ),
    "a sum that was lost is not sent again": Mutation(
        OrderedAllReduce, "resume", "np.flatnonzero(states[:, number] != State.SUMMED).tolist()", "[]"
    ),
    "facts that were lost are not sent again": Mutation(
        OrderedAllReduce, "resume", "np.flatnonzero(known[:, self.rank] == 0).tolist()", "[]"
    ),
    "a part that was lost is not sent again": Mutation(
        OrderedAllReduce, "resume", "== State.LOCAL:", "== State.DAMAGED:", seed=122
    ),
    "a part counts as sent, and not as partly overwritten by its sum": Mutation(
        OrderedAllReduce, "sent", "State.RECEIVING", "State.SENT", seed=68
    ),
    "all that was being received counts as not begun": Mutation(
        SocketLink, "_not_begun", " and each not in begun", "", seed=68
    ),
    "a rank that begins anew in the middle of a step is let in": Mutation(
        frontiers,
        "_refuse_lost",
        "is_summed_by_one & (states == State.LOCAL)",
        "is_summed_by_one & (states > 99)",
        seed=75,
    ),
    "each rank has a group of its own": Mutation(
        linked.Exchange, "_join", "group or hellos[0].nonce", "group or hellos[self.rank].nonce"
    ),
    "checksums are not compared": Mutation(SocketLink, "_read", "found != connection.checksum", "found == 1", seed=2),
    "others are not told which rank was lost": Mutation(
        SocketLink, "_leave", "0 if self.lost is None else self.lost + 1", "0", seed=283
    ),
    "a deadline never comes": Mutation(Pump, "_wait_until", "> seconds:", "> 1e9:", seed=8),
    "a thread that rests is not woken for a span": Mutation(
        Pump, "_have_moved", "self._link.bell.ring()", "pass", seed=73
    ),
    "a gather is over before its parts are sent": Mutation(
        Gather, "is_done", "not self._open", "len(self._parts) == self._count", seed=46
    ),
    "what a rank sends at once is not sent after a reconnect": Mutation(
        OrderedAllReduce, "_reconnect", "owner not in self._known", "True"
    ),
    "a step is over before its sums are sent": Mutation(
        OrderedAllReduce, "is_done", "self._sends or self._receives", "self._receives"
    ),
}
