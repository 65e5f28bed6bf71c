"""One rank's side of a step's all-reduce: decides what to transfer and to sum; no I/O, no threads, no clock.

Every rank sends its part of each share to the share's owner. The owner adds the parts in rank order with K1, measures
the sum in the same pass, and sends it back. After its last sum of the step it sends its *facts*, which are the squared
sums of its chunks and the first NaN or Inf of each rank's part. So all ranks get the same sums and facts from one
source.

On the CPU all this happens in the arena itself. Shares of a GPU's arena are copied to rows of host memory and back. A
part is copied from the device before it is sent or summed. A share counts as summed once its sum is on the device. The
end of a copy is reported even if links are lost, so that an owner does not take half a sum for its part.

A rank has a limited number of shares in flight. Shares start in one order, the same on all ranks, so that no rank waits
for ever. The first share that is not summed everywhere has a row on every rank. So its owner receives all parts, and
each rank that has sent a part receives the sum. An owner has separate rows for its own shares, and memory for the parts
of as many shares as a rank sends at a time. So no part ever waits for memory before a sum.

Instead of the ranks, a server may own all shares. Its number is the world size. It contributes nothing and has no
arena. It starts all spans when a step begins, and keeps a sum in a row until all ranks have it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.errors import ProtocolError, WindowError
from gradengine.exchange.links.link import RECEIVE, RELEASE, SEND, Completion, Transfer
from gradengine.exchange.shares import ReadyShares, Share
from gradengine.kernels import Arena, Contribution, FoldPass, Kernels
from gradengine.kernels.cuda_device import DeviceArena
from gradengine.kernels.decision import Float64
from gradengine.kernels.host import first_non_finite
from gradengine.layout import GradientLayout, Span

Float32: TypeAlias = npt.NDArray[np.float32]
IN_FLIGHT = 8 << 20  # bytes of one rank's parts that an owner has memory for
_NOT_FOUND = (-1, 0)  # index and value that mean that a rank has no non-finite element
_PART, _SUM, _FACTS = range(3)  # content of a message
# The content of a share in a rank's arena. LOCAL is this rank's part. SENT is the same while it is sent to the owner,
# or on the owner a part that is ready for the sum. RECEIVING is a part that the sum may have overwritten in places, and
# never occurs on the owner. SUMMED is the sum over all ranks.
LOCAL, SENT, RECEIVING, SUMMED = range(4)
Find: TypeAlias = tuple[int, int, float]  # rank, index in the arena and value of a NaN or Inf in the rank's part


@final
class OrderedAllReduce:
    """Sums one arena over all ranks, step by step and share by share, in rank order from rank 0's value.

    After each call the caller takes `transfers()`, makes them in any order, and reports each by `sent` or `received`.
    Calls must not overlap. A step is not resumed after links were lost. `holds_sums` is False if its parts are intact.

    Args:
        rank: The number of this rank, or the world size for a server.
        world_size: Ranks in the group.
        layout: The layout, the same on all ranks.
        shares: The layout's shares by `shares_of`, the same on all ranks.
        arena: Flat fp32 memory of `layout.arena_size` elements, which is reduced in place. Or a device's arena, which
            is reduced through copies. None on a server.
        kernels: The host's kernels, which sum and measure.
        step: The number of the first step.
        in_flight: Bytes of each other rank's parts that are received at a time, and of this rank's parts that are sent.
            At least one share is, and all shares of a host's arena are if they are read in place.
        reads_in_place: Whether owners read parts in the other ranks' memory through the links, without a copy.

    Attributes:
        step: The number of the open step. It may be set before any span is started.
        reads_in_place: The argument.
        started: The keys of the spans that were started in this step.

    Example:
        >>> from gradengine.kernels import HostKernels
        >>> from gradengine.exchange.shares import shares_of
        >>> layout, arena = GradientLayout.of({"w": (3,)}), np.zeros(32, np.float32)
        >>> arena[:3] = 1, 2, 2
        >>> reduce = OrderedAllReduce(0, 1, layout, shares_of(layout, 1, 1 << 22), arena, HostKernels())
        >>> reduce.start(*layout.spans)
        >>> reduce.transfers()
        []
        >>> reduce.is_done, reduce.squares
        (True, array([9.]))
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        layout: GradientLayout,
        shares: Sequence[Share],
        arena: Float32 | DeviceArena | None,
        kernels: Kernels,
        *,
        step: int = 0,
        in_flight: int = IN_FLIGHT,
        reads_in_place: bool = False,
    ) -> None:
        self.rank, self.world_size, self.step, self.reads_in_place = rank, world_size, step, reads_in_place
        self._shares, self._kernels, self._size = tuple(shares), kernels, layout.arena_size
        self._is_copied = isinstance(arena, DeviceArena)
        self._arena: Float32 | None = None if isinstance(arena, DeviceArena) else arena
        self._others = [other for other in range(world_size) if other != rank]

        # By owner, the indices of its chunks among the partial sums, in the order of its facts.
        self._indices: dict[int, list[int]] = {}
        for share in shares:
            self._indices.setdefault(share.owner, []).extend([index for _, _, index in share.chunks])
        self._facts = {owner: np.zeros(len(indices) + 2 * world_size) for owner, indices in self._indices.items()}
        # The index and value of each rank's first non-finite element in an owner's shares.
        self._finds = {owner: facts[-2 * world_size :].reshape(-1, 2) for owner, facts in self._facts.items()}
        mine = [share for share in shares if share.owner == rank]
        self._make_places_of_sums(mine)
        self._make_room(mine, arena, in_flight)
        self._outbox: list[Transfer] = []
        self._behind: dict[int, int | str] = {}  # key of the span that completed each share, for `place_of_copy`

        self._ready, self._states = ReadyShares(layout, self._shares), bytearray(len(shares))
        self.started = self._ready.started
        self._parity = step % 2
        self._begin()

    def _make_places_of_sums(self, mine: Sequence[Share]) -> None:
        """Set for each own share the scratch arena of its sum, its squares in the facts, and the places of its chunks.

        All shares are summed in one scratch memory.
        """
        scratch, first = self._kernels.device.allocate(_largest(mine)), 0
        self._sums: dict[int, tuple[Arena, Float64, list[slice]]] = {}
        for share in mine:
            pieces = [slice(start - share.start, stop - share.start) for start, stop, _ in share.chunks]
            targets = self._kernels.arena([scratch.part(piece.start, piece.stop) for piece in pieces])
            squares = self._facts[self.rank][first : first + len(pieces)]
            self._sums[share.number] = targets, squares, pieces
            first += len(pieces)

    def _make_room(self, mine: Sequence[Share], arena: Float32 | DeviceArena | None, in_flight: int) -> None:
        """Allocate the memory for received parts, and the rows of a device or server, for the shares in flight."""
        largest_own, largest = _largest(mine), _largest(self._shares)
        received, begun = (max(1, in_flight // max(1, 4 * size)) for size in (largest_own, largest))
        counts = [len(self._shares) - len(mine), len(mine)]  # numbers of other ranks' shares and of own shares
        rows = [min(begun, count) for count in counts]
        # The row of another owner's share is free once the sum is in the arena. The row of an own share is free once
        # all ranks have the sum. One list is for shares of others, one for own shares. On a host each row is the arena.
        if isinstance(arena, DeviceArena):
            self._free_rows: list[list[Float32]] = [[*arena.rows(count, largest)] for count in rows]
        elif arena is None:
            self._free_rows = [[*np.empty((count, largest), np.float32)] for count in rows]
        else:
            self._free_rows = [[arena] * (counts[0] if self.reads_in_place else rows[0]), [arena] * counts[1]]
        self._rows: dict[int, Float32] = {}  # rows of the shares in flight
        # Parts that are read in place need no memory, and all may be in flight.
        received, parts = (len(mine), 0) if self.reads_in_place else (min(received, len(mine)), len(self._others))
        self._free = [np.empty((parts, largest_own), np.float32) for _ in range(received)]
        # The memory for the parts of own shares that are being received, and by rank the parts that have arrived.
        self._room: dict[int, Float32] = {}
        self._parts: dict[int, dict[int, Float32]] = {}

    @property
    def is_done(self) -> bool:
        """Whether all sums and facts were received and all sends are over. Then the arena may be overwritten."""
        is_summed = self._states.count(SUMMED) == len(self._shares)
        return is_summed and not (self._sends or self._receives)

    @property
    def holds_sums(self) -> bool:
        """Whether the arena may hold sums, whole or in part, instead of this rank's own contributions."""
        # A share of a device's arena is received in a row, and then copied to the arena in one go.
        least = SUMMED if self._is_copied else RECEIVING
        return any(state >= least for state in self._states)

    @property
    def squares(self) -> Float64:
        """The squared sum of each chunk in the order of partial sums, the same on all ranks. Valid once `is_done`."""
        squares = np.zeros(sum(map(len, self._indices.values())))
        for owner, indices in self._indices.items():
            squares[indices] = self._facts[owner][: len(indices)]
        return squares

    @property
    def bad(self) -> list[Find]:
        """The first NaN or Inf of each rank's own part, by rank, the same on all ranks. Valid once `is_done`."""
        finds = np.array([*self._finds.values()]).reshape(-1, self.world_size, 2)
        found = []
        for rank in np.flatnonzero((finds[:, :, 0] >= 0).any(axis=0)).tolist():
            index, value = min([(index, value) for index, value in finds[:, rank].tolist() if index >= 0])
            found.append((rank, int(index), value))
        return found

    @property
    def awaited(self) -> tuple[int, str, bool] | None:
        """The rank that this one has waited for longest; None if this rank has to start a span first.

        The tuple has the rank, the name of the message, and whether the message depends on that rank alone. A missing
        part is named first, since it depends on no other rank. Then follow sums, facts, and receipts of sent messages.
        A server waits for a share's parts as soon as it has one of them.
        """
        if self._ready.count < len(self._shares):
            return None
        is_server = self.rank == self.world_size
        untouched = [number for number, parts in self._parts.items() if is_server and not parts]
        missing = {(peer, tag) for peer, tag in self._receives if tag // 6 not in untouched}
        # The owner may read a part in place until the part is summed, so the sum is missing then.
        missing |= {(peer, self._tag(_SUM, tag // 6)) for peer, tag in self._sends if tag % 6 // 2 == _PART}
        for transfers, words in ((missing, ""), (self._sends, "its receipt of ")):
            if transfers:
                peer, tag = min(transfers, key=lambda each: (each[1] % 6, each[1] // 6, each[0]))
                return peer, words + self.described(tag), tag % 6 // 2 == _PART
        return None

    def described(self, tag: int) -> str:
        """Return the name of the message with this tag, such as "the part of share 3"."""
        kind, number = _meaning(tag)
        if kind == _FACTS:
            return f"the facts of {self._named(number)}"
        return f"the {'part' if kind == _PART else 'sum'} of share {number}"

    def place_of_copy(self, tag: int) -> tuple[int, int | str]:
        """Return the start of a copied share in the device's arena, and the key of the span that completed it.

        The copy waits for work that was queued before that span was started.
        """
        _, number = _meaning(tag)
        return self._shares[number].start, self._behind[number]

    def transfers(self) -> list[Transfer]:
        """Return the transfers to make now, each of them once. Transfers with one rank are in the order of the shares.

        Transfers of a rank with itself are copies from the device's arena to memory, or back.
        """
        for waiting, free in zip(self._waiting, self._free_rows, strict=True):
            while waiting and free:
                share = waiting.popleft()
                self._rows[share.number] = free.pop()
                if self._is_copied:
                    self._receive(self.rank, _PART, share.number, self._memory(share))
                else:
                    self._go_on(share)
        given, self._outbox = self._outbox, []
        return given

    def start(self, *spans: Span) -> None:
        """Start spans whose memory holds this rank's complete contribution.

        Raises `WindowError` if one of them was started already, and then starts none. Nothing is sent or summed before
        the next `transfers()`.
        """
        for span in spans:
            if span.key in self.started:
                raise WindowError(f"{span.called} has been started already", do="start each span once in a step")
        for span in spans:
            for share in self._ready.complete(span):
                self._behind[share.number] = span.key
                self._waiting[share.owner == self.rank].append(share)

    def sent(self, peer: int, tag: int) -> None:
        """Report that a send is over."""
        self._sends.remove((peer, tag))
        kind, number = _meaning(tag)
        if kind == _PART:
            self._states[number] = RECEIVING
            self._receive(peer, _SUM, number, self._memory(self._shares[number]))
        elif kind == _SUM and peer == self.rank:
            self._is_summed(self._shares[number])
        elif kind == _SUM and not any((other, tag) in self._sends for other in self._others):
            self._release(self._shares[number])

    def received(self, peer: int, tag: int, borrowed: Float32 | None = None) -> None:
        """Report that a message was received in its memory, or is borrowed from the other rank's memory.

        Raises:
            ProtocolError: A borrowed part has the wrong size, or facts name an element outside of the arena.
        """
        kind, number = _meaning(tag)
        if borrowed is not None and borrowed.size != self._shares[number].size:
            what = f"{self._named(peer)} offers the wrong size for {self.described(tag)}"
            raise ProtocolError(what, got=borrowed.size, expected=self._shares[number].size)
        if kind == _FACTS:
            indices = self._finds[peer][:, 0]
            if not ((indices >= -1) & (indices < self._size)).all():  # written so that NaN is none
                what = f"{self._named(peer)} reports a NaN or Inf outside of the arena"
                raise ProtocolError(what, got=indices.tolist())
        memory = self._receives.pop((peer, tag))
        if kind == _SUM:
            self._land(self._shares[number])
        elif kind == _PART and peer == self.rank:
            self._go_on(self._shares[number])
        elif kind == _PART:
            self._parts[number][peer] = memory if borrowed is None else borrowed
            self._sum_if_complete(self._shares[number])

    def next_step(self) -> None:
        """Begin the next step. Raises `WindowError` before `is_done`.

        After this the last step cannot be repeated, so call it when all ranks have reported that they are done.
        """
        if not self.is_done:
            raise WindowError(f"step {self.step} is not summed on all ranks", do="wait for is_done")
        self.step, self._parity = self.step + 1, 1 - self._parity
        self._begin()

    def end(self, unwritten: Iterable[Completion]) -> None:
        """Report that the links have ended. The shares of the `unwritten` receives still hold parts."""
        for _, peer, tag in unwritten:
            if (peer, tag) in self._receives and tag % 6 // 2 == _SUM:
                self._states[tag // 6] = SENT

    def drop(self) -> None:
        """Drop this rank's part of the step. The links have ended."""
        self._states[:] = bytes(len(self._states))

    # ---- a step ----

    def _begin(self) -> None:
        """Begin a step, and receive the facts and parts that other ranks send without a request."""
        self._ready.restart()
        self._states[:] = bytes(len(self._states))
        self._outbox = []
        self._sends: set[tuple[int, int]] = set()  # sends in flight, as (peer, tag)
        self._receives: dict[tuple[int, int], Any] = {}  # memory of each receive in flight
        self._waiting: tuple[deque[Share], deque[Share]] = deque(), deque()  # others' and own shares that need a row
        self._unsummed = len(self._sums)
        self._unopened = deque([self._shares[number] for number in self._sums])
        for owner, facts in self._facts.items():
            if owner == self.rank:
                self._finds[owner][:] = _NOT_FOUND
            else:
                self._receive(owner, _FACTS, owner, facts)
        self._open_shares()

    def _open_shares(self) -> None:
        """Receive the other ranks' parts of as many shares as there is memory for."""
        while self._unopened and self._free:
            share, memory = self._unopened.popleft(), self._free.pop()
            self._room[share.number], self._parts[share.number] = memory, {}
            for row, other in enumerate(self._others):
                place = None if self.reads_in_place else memory[row, : share.size]
                self._receive(other, _PART, share.number, place)

    def _go_on(self, share: Share) -> None:
        """Send or sum a share whose memory now holds this rank's part."""
        self._states[share.number] = SENT
        if share.owner == self.rank:
            self._sum_if_complete(share)
        else:
            self._send(share.owner, _PART, share.number, self._memory(share))

    def _land(self, share: Share) -> None:
        """Copy a share's sum from its memory to the arena, if they are not the same."""
        if self._is_copied:
            self._send(self.rank, _SUM, share.number, self._memory(share))
        else:
            self._is_summed(share)

    def _is_summed(self, share: Share) -> None:
        """Record that the sum is in the arena. Its owner only sends it now, because before it could still be lost."""
        self._states[share.number] = SUMMED
        if share.owner != self.rank:
            self._release(share)
            return
        self._unsummed -= 1
        for rank in self._others:
            self._send(rank, _SUM, share.number, self._memory(share))
            if not self._unsummed:
                self._send(rank, _FACTS, self.rank, self._facts[self.rank])
        if not self._others:
            self._release(share)

    def _release(self, share: Share) -> None:
        self._free_rows[share.owner == self.rank].append(self._rows.pop(share.number))

    def _sum_if_complete(self, share: Share) -> None:
        parts = self._parts.get(share.number)
        if parts is None or len(parts) < len(self._others) or self._states[share.number] != SENT:
            return
        parts = parts | {self.rank: self._memory(share)}
        self._sum(share, [parts[rank] for rank in range(self.world_size)])
        if self.reads_in_place:
            tag = self._tag(_PART, share.number)
            self._outbox += [Transfer(RELEASE, other, tag) for other in self._others]
        del self._parts[share.number]
        self._free.append(self._room.pop(share.number))
        self._land(share)
        self._open_shares()

    def _sum(self, share: Share, parts: Sequence[Float32]) -> None:
        """Sum these parts in order, write the sum over this rank's own part, and record the facts."""
        arena, squares, pieces = self._sums[share.number]
        sources = [[part[piece] for piece in pieces] for part in parts]
        contributions = [Contribution.of_fp32(arena.whole, arrays) for arrays in sources]
        # The sum goes to a scratch memory. In place, the part of a rank above 1 would be overwritten before it is read.
        # Also, NaN and Inf in the rank's own part could not be found any more.
        fold = FoldPass(arena.whole, arena.whole.all_present, contributions, [np.float32(1)] * self.world_size)
        self._kernels.accumulate(arena, fold, measure=True)
        squares[:] = arena.partials.values
        finds = self._finds[self.rank]
        for column in np.flatnonzero(~np.isfinite(squares)).tolist():
            for rank, arrays in enumerate(sources):
                found = first_non_finite(arrays[column])
                if found is not None:
                    index = share.chunks[column][0] + found[0]
                    if not 0 <= finds[rank, 0] <= index:
                        finds[rank] = index, found[1]
        memory, end = self._memory(share), 0
        for piece, target in zip(pieces, arena.targets, strict=True):
            memory[end : piece.start] = 0  # Clear padding, because a server's row holds an earlier sum.
            memory[piece], end = target.data, piece.stop

    def _memory(self, share: Share) -> Float32:
        """Return the memory of this rank's part of a share and then of its sum, in the arena itself or a row."""
        if self._arena is not None:
            return self._arena[share.start : share.stop]
        return self._rows[share.number][: share.size]

    # ---- messages ----

    def _send(self, peer: int, kind: int, number: int, memory: Float32 | Float64) -> None:
        tag = self._tag(kind, number)
        self._sends.add((peer, tag))
        self._outbox.append(Transfer(SEND, peer, tag, memory))

    def _receive(self, peer: int, kind: int, number: int, memory: Float32 | Float64 | None) -> None:
        tag = self._tag(kind, number)
        self._receives[peer, tag] = memory
        self._outbox.append(Transfer(RECEIVE, peer, tag, memory))

    def _tag(self, kind: int, number: int) -> int:
        # The parity is enough. Each sum needs every rank's part, so no rank is two steps ahead of another. It counts
        # the steps of these links, because ranks load a state with a different step number one after the other.
        return 6 * number + 2 * kind + self._parity

    def _named(self, peer: int) -> str:
        return "the server" if peer == self.world_size else f"rank {peer}"


def _meaning(tag: int) -> tuple[int, int]:
    """Return the kind of a message, and the number of its share or the rank that sent its facts."""
    return tag % 6 // 2, tag // 6


def _largest(shares: Sequence[Share]) -> int:
    return max([share.size for share in shares], default=0)
