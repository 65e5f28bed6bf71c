"""The ordered all-reduce over a network in memory that delivers in any order, and fails anywhere."""

import random

import numpy as np
import pytest
import strategies as draw
from hypothesis import given, settings
from hypothesis import strategies as st
from transports import rank_order_sum

from gradengine.errors import ProtocolError, WindowError
from gradengine.exchange.links.link import RECEIVE, RELEASE, SEND, Completion
from gradengine.exchange.ordered_all_reduce import RECEIVING, SENT, SUMMED, OrderedAllReduce
from gradengine.exchange.shares import shares_of
from gradengine.kernels import CHUNK, HostKernels
from gradengine.kernels.cuda_device import DeviceArena
from gradengine.layout import GradientLayout

KERNELS = HostKernels(threads=1)
SMALL = GradientLayout.of(
    {"layers.0.w": (7, 5), "none": (0,), "layers.1.w": (33,), "embedding": (3, 11), "head": (40,)}
)
PART, SUM, FACTS = range(3)


def tag(kind, number, step=0):
    return 6 * number + 2 * kind + step % 2


def owned_by(owners, layout, world_size, bucket_bytes=4):
    """Shares whose owners are drawn, by default one for each chunk; `owners` is called with a share's number."""
    cut = shares_of(layout, world_size, bucket_bytes)
    return tuple(share._replace(owner=owners(share.number)) for share in cut)


def random_parts(layout, world_size, seed, magnitude=1.0):
    """What each rank contributes: zero between components, as an arena is."""
    parts = np.zeros((world_size, layout.arena_size), np.float32)
    for slot in layout.slots:
        part = parts[:, slot.offset : slot.stop]
        part[:] = draw.random_array([*seed, slot.offset], part.shape, magnitude=magnitude)
    return parts


def sum_of(parts):
    with np.errstate(all="ignore"):
        return rank_order_sum([*parts])


def squares_of(layout, total):
    """What the host's kernels measure of a whole arena."""
    arena = KERNELS.arena([KERNELS.device.view(total[slot.offset : slot.stop], slot.name) for slot in layout.slots])
    KERNELS.measure(arena)
    return arena.partials.values


class Rows(DeviceArena):
    """A device's arena as the all-reduce sees it: rows, which begin as NaN; the network below makes the copies."""

    is_copying = note = copy = poll = None

    def __init__(self):
        self.given = []

    def rows(self, count, size):
        self.given.append(np.full((count, size), np.nan, np.float32))
        return self.given[-1]


class Group:
    """All ranks, what each contributes to each step, and messages that are delivered in a random order."""

    def __init__(self, layout, shares, steps, seed=0, in_flight=1 << 20, reads_in_place=False, on_devices=()):
        self.layout, self.steps, self.random = layout, steps, random.Random(seed)
        self.arenas, self.on_devices, self.shares = [part.copy() for part in steps[0]], on_devices, shares
        self.options, self.discards = {"in_flight": in_flight, "reads_in_place": reads_in_place}, 0
        size = len(self.arenas)
        self.buffers, self.stalled, self.waits_for_all, self.reads_in_place = {}, set(), False, reads_in_place
        links = [(a, b) for a in range(size + 1) for b in range(size + 1)]
        self.early = {link for link in links if self.random.random() < 0.3}  # those that buffer what is sent
        self.are_streams = self.random.random() < 0.5
        self.connect()

    def connect(self, step=0):
        """All ranks begin a step over new links."""
        size = len(self.arenas)
        self.rows = {rank: Rows() for rank in self.on_devices}
        is_served = any(share.owner == size for share in self.shares)
        self.ranks = [
            OrderedAllReduce(
                rank, size, self.layout, self.shares, self.rows.get(rank, arena), KERNELS, step=step, **self.options
            )
            for rank, arena in enumerate([*self.arenas, None][: size + is_served])
        ]
        self.unstarted = [self.in_some_order() for _ in self.ranks]
        self.sends, self.receives, self.is_acknowledged, self.lent, self.reports = {}, {}, {}, set(), []
        self.copies = []

    def in_some_order(self):
        spans = [*self.layout.spans]
        self.random.shuffle(spans)
        return spans if self.random.random() < 0.5 else [*reversed(self.layout.spans)]

    def collect(self):
        """New transfers, none of them twice."""
        for rank in self.ranks:
            for transfer in rank.transfers():
                to, kind, number = transfer.peer, transfer.tag % 6 // 2, transfer.tag // 6
                assert 0 <= transfer.tag < 1 << 21
                assert transfer.tag % 2 == rank.step % 2
                if rank.rank in self.rows and transfer.memory is not None and kind != FACTS:
                    self.refuse_used_rows(rank.rank, transfer)
                if to == rank.rank:
                    assert kind == (SUM if transfer.kind == SEND else PART)
                    assert rank.place_of_copy(transfer.tag)[1] not in {span.key for span in self.unstarted[to]}
                    self.copies.append(transfer)
                elif transfer.kind == SEND:
                    assert (rank.rank, to, transfer.tag) not in self.sends
                    self.sends[rank.rank, to, transfer.tag] = transfer.memory, transfer.memory.tobytes()
                elif transfer.kind == RELEASE:
                    self.take_back((to, rank.rank, transfer.tag))
                else:
                    assert (to, rank.rank, transfer.tag) not in self.receives
                    assert (transfer.memory is None) == (self.reads_in_place and kind == PART)
                    place = self.receives[to, rank.rank, transfer.tag] = transfer.memory
                    assert kind != SUM or rank._states[number] == RECEIVING
                    if kind == PART and not self.reads_in_place:
                        self.buffers.setdefault(rank.rank, set()).add(place.ctypes.data)

    def refuse_used_rows(self, rank, transfer):
        """Whatever is written is used by nothing else meanwhile."""
        is_read = transfer.kind == SEND
        read = [memory for key, (memory, _) in self.sends.items() if key[0] == rank and key not in self.is_acknowledged]
        read += [copy.memory for copy in self.copies if copy.peer == rank and copy.kind == SEND]
        written = [place for (_, sink, _), place in self.receives.items() if sink == rank and place is not None]
        written += [copy.memory for copy in self.copies if copy.peer == rank and copy.kind != SEND]
        for other in written if is_read else read + written:
            assert not np.shares_memory(other, transfer.memory)

    def turn(self):
        """One of all things that can happen now; False if nothing can."""
        self.collect()
        happenings = [
            *((self.deliver, key) for key in self.at_hand() if key in self.receives and key[:2] not in self.stalled),
            *(
                (self.take_early, key)
                for key in self.sends
                if key not in self.is_acknowledged and key[:2] in self.early and not self.is_to_be_lent(key)
            ),
            *((self.report, n) for n in range(len(self.reports))),
            *((self.make_copy, copy) for copy in self.copies),
            *((self.start, rank) for rank, spans in enumerate(self.unstarted) if spans),
            *((self.go_on, rank) for rank, each in enumerate(self.ranks) if self.can_go_on(each)),
        ]
        if happenings:
            what, which = self.random.choice(happenings)
            what(which)
        return bool(happenings)

    def at_hand(self):
        """What can be delivered: of a link that is a stream only the first message, as what is behind it waits."""
        first, sends = {}, [key for key in self.sends if key not in self.lent]
        for key in sends:
            first.setdefault(key[:2], key)
        return first.values() if self.are_streams else sends

    def is_to_be_lent(self, key):
        return self.reads_in_place and key[2] % 6 // 2 == PART

    def deliver(self, key):
        source, sink, number = key
        place = self.receives.pop(key)
        data = self.content(key)
        if self.is_to_be_lent(key):
            self.lent.add(key)
            self.reports.append((self.ranks[sink].received, source, number, self.sends[key][0]))
            return
        assert place.nbytes == len(data)
        place[:] = np.frombuffer(data, place.dtype)
        self.reports.append((self.ranks[sink].received, source, number))
        if not self.is_acknowledged.pop(key, False):
            self.reports.append((self.ranks[source].sent, sink, number))
        del self.sends[key]

    def make_copy(self, copy):
        self.copies = [other for other in self.copies if other is not copy]
        rank = self.ranks[copy.peer]
        start, _ = rank.place_of_copy(copy.tag)
        place = self.arenas[copy.peer][start : start + copy.memory.size]
        if copy.kind == SEND:
            place[:] = copy.memory
            rank.sent(copy.peer, copy.tag)
        else:
            copy.memory[:] = place
            rank.received(copy.peer, copy.tag)

    def take_back(self, key):
        """What was lent has been read: the sender is told, who may overwrite it."""
        source, sink, number = key
        self.lent.remove(key)
        self.content(key)
        self.reports.append((self.ranks[source].sent, sink, number))
        del self.sends[key]

    def content(self, key):
        memory, data = self.sends[key]
        assert key in self.is_acknowledged or memory.tobytes() == data, "overwritten while it was sent"
        return data

    def take_early(self, key):
        """The link has a copy of what is sent: the sender may overwrite it, and nothing has arrived."""
        source, sink, number = key
        self.content(key)
        self.is_acknowledged[key] = True
        self.reports.append((self.ranks[source].sent, sink, number))

    def report(self, n):
        told, *what = self.reports.pop(n)
        told(*what)

    def start(self, rank):
        self.ranks[rank].start(self.unstarted[rank].pop())

    def can_go_on(self, rank):
        is_over = all(each.is_done for each in self.ranks) if self.waits_for_all else rank.is_done
        return is_over and not self.unstarted[rank.rank] and rank.step < len(self.steps) - 1

    def go_on(self, number):
        for n in range(len(self.ranks)) if self.waits_for_all else [number]:
            self.check(n)
            self.ranks[n].next_step()
            if n < len(self.arenas):
                self.arenas[n][:] = self.steps[self.ranks[n].step][n]
            self.unstarted[n] = self.in_some_order()

    def lose(self):
        """All links end, some in the middle of a message; the ranks begin again, without their windows if they must."""
        if self.random.random() < 0.5:  # else what was to begin does not
            self.collect()
        unwritten = [[] for _ in self.ranks]
        for key, place in self.receives.items():
            if place is not None and key in self.sends and self.random.random() < 0.5:
                place[: len(place) // 2] = -7
            elif self.random.random() < 0.9:
                unwritten[key[1]].append(Completion(RECEIVE, key[0], key[2]))
        for copy in [*self.copies]:  # those that were begun end
            self.make_copy(copy)
        for rank, receives in zip(self.ranks, unwritten, strict=True):
            rank.end(receives)
        parts, ranks = self.steps[self.ranks[0].step], self.ranks[: len(self.arenas)]
        for arena, part, rank in zip(self.arenas, parts, ranks, strict=True):
            assert rank.holds_sums or arena.tobytes() == part.tobytes()
            may_hold = {SUMMED} if rank.rank in self.rows else {SUMMED, RECEIVING}
            assert not rank.holds_sums or may_hold & {*rank._states}
        if any(rank.holds_sums for rank in ranks):
            self.discards += 1
            for arena, part in zip(self.arenas, parts, strict=True):
                arena[:] = part
        self.connect(self.ranks[0].step)

    def run(self, losses=()):
        """Until nothing can happen; the links are lost after these turns. Returns the turns that it took."""
        turns = 0
        while True:
            if turns in losses:
                self.lose()
            if not self.turn():
                break
            turns += 1
        assert not self.sends
        for number, rank in enumerate(self.ranks):
            assert rank.step == len(self.steps) - 1
            self.check(number)
        return turns

    def settle(self, stalled, early=()):
        """Until nothing can happen, where some links move nothing, and those buffer what is sent."""
        self.stalled, self.early = set(stalled), set(early)
        while self.turn():
            pass
        self.stalled = set()
        return self

    def states(self, rank):
        """Of the shares of SMALL, on one rank."""
        return [*self.ranks[rank]._states]

    def check(self, number):
        """One rank has the sums of its step, and their facts."""
        rank, parts = self.ranks[number], self.steps[self.ranks[number].step]
        assert rank.is_done
        if number < len(self.arenas):
            draw.assert_same_values(self.arenas[number], sum_of(parts))
        expected = squares_of(self.layout, sum_of(parts))
        assert np.array_equal(rank.squares, expected, equal_nan=True)
        found = [
            (index.min(), rank) for rank, part in enumerate(parts) if (index := np.flatnonzero(~np.isfinite(part))).size
        ]
        assert [(index, rank) for rank, index, _ in rank.bad] == found
        assert [repr(value) for _, _, value in rank.bad] == [repr(float(parts[rank, index])) for index, rank in found]


MANY_SPANS = GradientLayout.of({f"layers.{n}.w": (40, 1 + n % 3) for n in range(14)})


@st.composite
def groups(draws):
    """A group of any layout and cut, with some steps, and after which turns it loses its links."""
    layout, world_size = draws(draw.uneven_layouts(CHUNK) | st.just(MANY_SPANS)), draws(st.integers(1, 6))
    bucket_bytes, seed = draws(st.sampled_from([4, 200, 1000, 1 << 22])), draws(draw.seeds)
    kind = draws(st.sampled_from(["mesh", "star", "any", "served"]))
    owner = {"star": world_size - 1, "served": world_size}.get(kind)
    shares = shares_of(layout, world_size, bucket_bytes, owner=owner)
    if kind == "any":
        numbers = random.Random(seed)
        shares = owned_by(lambda _: numbers.randrange(world_size), layout, world_size, bucket_bytes)
    magnitudes = draws(st.lists(st.sampled_from([1.0, 1e-30, 1e38]), min_size=1, max_size=3))
    parts = [random_parts(layout, world_size, [seed, n], magnitude) for n, magnitude in enumerate(magnitudes)]
    elements = [index for slot in layout.slots for index in (slot.offset, slot.stop - 1) if slot.size]
    for _ in range(draws(st.sampled_from([0, 0, 0, 1, 4])) if elements else 0):
        rank, index = draws(st.integers(0, world_size - 1)), draws(st.sampled_from(elements))
        parts[0][rank, index] = draws(st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38]))
    in_flight = draws(st.sampled_from([0, 500, 8 << 20]))  # 0: with one row of each kind nobody waits for ever
    on_devices = draws(st.sets(st.integers(0, world_size - 1)))
    reads_in_place = kind != "served" and draws(st.booleans())
    group = Group(layout, shares, parts, seed, in_flight, reads_in_place=reads_in_place, on_devices=on_devices)
    losses = draws(st.lists(st.integers(0, 150), max_size=4))
    group.waits_for_all = bool(losses)
    return group, losses


@given(groups())
@settings(max_examples=120)
def test_every_step_ends_with_the_sums_in_rank_order_and_the_same_facts_also_where_links_are_lost(drawn):
    group, losses = drawn
    group.run(losses)


def small_group(world_size=3, seed=0, owners=None, **options):
    """Four shares, whose owners are the ranks in turn."""
    shares = owned_by(owners or (lambda number: number % world_size), SMALL, world_size)
    return Group(SMALL, shares, [random_parts(SMALL, world_size, [seed])], seed, **options)


@pytest.mark.parametrize(
    ("owners", "reads_in_place", "on_devices"),
    [(None, False, ()), (None, True, (1,)), (None, False, (0, 1, 2)), (lambda _: 3, False, ())],
)
def test_a_step_that_is_lost_at_any_moment_and_lost_again_ends_alike(owners, reads_in_place, on_devices):
    """And not before there was a sum do the ranks need their windows again."""
    options = {"owners": owners, "reads_in_place": reads_in_place, "on_devices": on_devices}
    options["in_flight"] = 200 if on_devices else 1 << 20
    turns, discards = small_group(**options).run(), []
    assert turns > 60
    for turn in range(turns):
        group = small_group(**options)
        group.waits_for_all = True
        group.run([turn, turn + 4] if turn % 2 else [turn])
        discards.append(group.discards)
    assert discards[0] == 0 < discards[-1]


TWELVE = GradientLayout.of({f"layers.{n}.w": (64,) for n in range(12)})


@pytest.mark.parametrize(("in_flight", "shares"), [(0, 1), (512, 2), (1200, 4), (1 << 30, 12)])
def test_memory_is_that_of_the_shares_in_flight_alone(in_flight, shares):
    """The owner's for the others' parts, a server's for sums too, and rows of arenas on devices."""
    for owner, parts_of_others in ((1, 2), (3, 3)):
        cut, parts = owned_by(lambda _, owner=owner: owner, TWELVE, 3), [random_parts(TWELVE, 3, [n]) for n in range(2)]
        group = Group(TWELVE, cut, parts, 1, in_flight, on_devices=range(3) if owner == 1 else ())
        group.run()
        assert {rank: len(rows) for rank, rows in group.buffers.items()} == {owner: parts_of_others * shares}
        rows = {rank: [len(rows) for rows in each.given] for rank, each in group.rows.items()}
        assert rows == ({0: [shares, 0], 1: [0, shares], 2: [shares, 0]} if owner == 1 else {})
    assert [len(rows) for rows in group.ranks[3]._free_rows] == [0, shares]


def stuck(world_size, stalled, owners=lambda _: 0):
    return small_group(world_size, owners=owners).settle(stalled)


def test_done_is_only_who_may_overwrite_the_arena():
    group = stuck(2, {(0, 1)})
    first = group.ranks[0]
    assert {*group.states(0)} == {SUMMED}
    assert np.isfinite(first.squares).all()
    assert not first.is_done
    with pytest.raises(WindowError, match="step 0 is not summed on all ranks"):
        first.next_step()
    group.run()


# ---- a server beside the ranks ----


def test_padding_of_a_servers_sums_is_zero():
    """Whatever its row held before: another share, that has elements there."""
    layout = GradientLayout.of({"layers.0.w": (96,), "a": (1,), "b": (1,), "c": (1,)})
    parts = [random_parts(layout, 2, [n]) for n in range(2)]
    group = Group(layout, shares_of(layout, 2, 400, owner=2), parts, 0, in_flight=0)
    group.ranks[2]._free_rows[1][0][:] = np.nan
    group.run()
    assert {arena.tobytes() for arena in group.arenas} == {sum_of(parts[1]).tobytes()}


def test_a_server_waits_for_a_part_once_another_is_there_and_then_for_who_takes_no_sum():
    group = small_group(2, owners=lambda _: 2)
    first, _, server = group.ranks
    while group.unstarted[2]:
        group.start(2)
    assert server.awaited is None
    group.settle({(1, 2)}, early=group.early)
    assert (server.awaited, first.awaited) == ((1, "the part of share 0", True), (2, "the sum of share 0", False))
    group.settle({(2, 0)})
    assert server.awaited == (0, "its receipt of the sum of share 0", False)
    assert first.described(tag(FACTS, 2)) == "the facts of the server"


def test_shares_whose_sum_has_not_begun_to_arrive_hold_parts_when_the_links_end():
    assert not small_group(2, owners=lambda _: 2).ranks[0].holds_sums
    assert not small_group(2, owners=lambda _: 2, on_devices=[0]).settle({(2, 0)}).ranks[0].holds_sums
    group = stuck(2, {(2, 0)}, owners=lambda _: 2)
    rank = group.ranks[0]
    assert group.states(0) == [RECEIVING] * 4
    assert rank.holds_sums
    for unwritten, is_left in (((0, 2, 3), True), ((1,), False)):
        others = [Completion(RECEIVE, 2, (1 << 21) - 2)]
        rank.end([*others, *(Completion(RECEIVE, 2, tag(SUM, number)) for number in unwritten)])
        assert group.states(0) == [SENT, RECEIVING if is_left else SENT, SENT, SENT]
        assert rank.holds_sums is is_left
    group.settle(())
    assert rank.holds_sums
    rank.drop()
    assert not rank.holds_sums


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("reads_in_place", "count"), [(True, 12), (False, 2)])
def test_all_parts_are_on_their_way_where_they_are_read_in_place_and_few_where_not(rank, reads_in_place, count):
    shares, arena = owned_by(lambda _: 1, TWELVE, 2), random_parts(TWELVE, 1, [0])[0]
    all_reduce = OrderedAllReduce(rank, 2, TWELVE, shares, arena, KERNELS, in_flight=512, reads_in_place=reads_in_place)
    all_reduce.start(*TWELVE.spans)
    parts = [transfer for transfer in all_reduce.transfers() if transfer.tag % 6 // 2 == PART]
    expected = SEND if rank == 0 else RECEIVE, rank == 1 and reads_in_place
    assert [(part.kind, part.memory is None) for part in parts] == [expected] * count


def test_a_sum_is_nowhere_else_before_its_owners_device_has_it():
    group = small_group(3, owners=lambda _: 0, on_devices=[0])
    group.early = set()
    while not (first := [copy for copy in group.copies if copy.kind == SEND][:1]):
        assert group.turn()
        group.collect()
    number = first[0].tag // 6
    for state, receivers in ((SENT, set()), (SUMMED, {1, 2})):
        assert {key[1] for key in group.sends if key[0] == 0 and key[2] == tag(SUM, number)} == receivers
        assert group.states(0)[number] == state
        if not receivers:
            group.make_copy(first[0])
            group.collect()
    group.run()


def test_who_has_lent_a_part_receives_no_sum_in_its_place_before_all_parts_were_read():
    group = small_group(3, owners=lambda _: 0, reads_in_place=True)
    group.settle({(2, 0)}, early=group.early)
    assert group.lent == {(1, 0, tag(PART, number)) for number in range(4)} <= {*group.sends}
    assert group.states(1) == [SENT] * 4
    group.run()


# ---- what is refused ----


def refused(rank, call, *arguments, match):
    """And nothing has changed."""

    def state():
        return bytes(rank._states), {*rank._sends}, {*rank._receives}, rank._arena.tobytes()

    before = state()
    with pytest.raises(ProtocolError, match=match):
        call(*arguments)
    assert state() == before
    assert rank.transfers() == []


def started(rank=0, **options):
    """A rank of three that has started all; share n is owned by rank n % 3, the last of four by 0."""
    group = small_group(**options)
    group.ranks[rank].start(*SMALL.spans)
    group.ranks[rank].transfers()
    return group.ranks[rank]


def test_a_part_of_another_size_and_facts_of_no_element_are_refused():
    rank = started(reads_in_place=True)
    refused(rank, rank.received, 1, tag(PART, 0), np.zeros(36, np.float32), match="wrong size")
    for index in (np.nan, np.inf, -2, 1 << 40, SMALL.arena_size):
        rank = started()
        rank._facts[1][-6:] = (-1, 0, index, np.nan, -1, 0)
        refused(rank, rank.received, 1, tag(FACTS, 1), match="rank 1 .* outside of the arena")


def test_a_span_is_started_once_in_a_step():
    rank = small_group().ranks[0]
    rank.start(SMALL.spans[0])
    with pytest.raises(WindowError, match="has been started already"):
        rank.start(SMALL.spans[1], SMALL.spans[0])
    assert rank.started == {SMALL.spans[0].key}
