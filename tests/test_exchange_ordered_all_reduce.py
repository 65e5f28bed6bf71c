"""The ordered all-reduce over a network in memory that delivers in any order, fails anywhere, and is taken up again."""

import dataclasses
import random

import numpy as np
import pytest
import strategies as draw
from hypothesis import given, settings
from hypothesis import strategies as st

from gradengine.errors import CallerError, HandshakeRefused, ProtocolError, WindowError
from gradengine.exchange.frontiers import State
from gradengine.exchange.links.link import Completed, Completion
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.shares import shares_of
from gradengine.exchange.transfers import Borrow, Copy, Receive, Release, Send
from gradengine.kernels import CHUNK, HostKernels
from gradengine.kernels.device import DeviceArena
from gradengine.layout import GradientLayout

KERNELS = HostKernels(threads=1)
SMALL = GradientLayout.of(
    {"layers.0.w": (7, 5), "none": (0,), "layers.1.w": (33,), "embedding": (3, 11), "head": (40,)}
)
PART, SUM, FACTS = range(3)
HEADER, KNOWN = 8, 12  # where in a frontier of SMALL the shares' states begin, and then whose facts are known


def tag(kind, number, step=0):
    return 6 * number + 2 * kind + step % 2


def owned_by(owners, layout, world_size, bucket_bytes=4):
    """Shares whose owners are drawn, by default one for each chunk; `owners` is called with a share's number."""
    cut = shares_of(layout, world_size, bucket_bytes)
    return tuple(dataclasses.replace(share, owner=owners(share.number)) for share in cut)


def random_parts(layout, world_size, seed, magnitude=1.0):
    """What each rank contributes: zero between components, as an arena is."""
    parts = np.zeros((world_size, layout.arena_size), np.float32)
    for slot in layout.slots:
        part = parts[:, slot.offset : slot.stop]
        part[:] = draw.random_array([*seed, slot.offset], part.shape, magnitude=magnitude)
    return parts


def sum_of(parts):
    total = parts[0]
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = total + part
    return total


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
        self.arenas = [part.copy() for part in steps[0]]
        size = len(self.arenas)
        is_served = any(share.owner == size for share in shares)
        self.rows = {rank: Rows() for rank in on_devices}
        options = {"in_flight": in_flight, "reads_in_place": reads_in_place}
        self.ranks = [
            OrderedAllReduce(rank, size, layout, shares, self.rows.get(rank, arena), KERNELS, **options)
            for rank, arena in enumerate([*self.arenas, None][: size + is_served])
        ]
        self.unstarted = [self.in_some_order() for _ in self.ranks]
        self.buffers, self.stalled, self.waits_for_all, self.reads_in_place = {}, set(), False, reads_in_place
        links = [(a, b) for a in range(size + 1) for b in range(size + 1)]
        self.early = {link for link in links if self.random.random() < 0.3}  # those that buffer what is sent
        self.are_streams = self.random.random() < 0.5
        self.connect()

    def in_some_order(self):
        spans = [*self.layout.spans]
        self.random.shuffle(spans)
        return spans if self.random.random() < 0.5 else [*reversed(self.layout.spans)]

    def connect(self):
        self.sends, self.receives, self.is_acknowledged, self.lent, self.reports = {}, {}, {}, set(), []
        self.copies = []

    def collect(self):
        """New transfers, none of them twice."""
        for rank in self.ranks:
            for transfer in rank.transfers():
                to, kind, number = transfer.peer, transfer.tag % 6 // 2, transfer.tag // 6
                assert 0 <= transfer.tag < 1 << 21
                assert transfer.tag % 2 == rank.step % 2
                if rank.rank in self.rows and not isinstance(transfer, Release | Borrow) and kind != FACTS:
                    self.refuse_used_rows(rank.rank, transfer)
                if isinstance(transfer, Copy):
                    assert to == rank.rank
                    assert kind == (SUM if transfer.is_to_arena else PART)
                    assert transfer.behind not in {span.key for span in self.unstarted[to]}
                    self.copies.append(transfer)
                elif isinstance(transfer, Send):
                    assert (rank.rank, to, transfer.tag) not in self.sends
                    self.sends[rank.rank, to, transfer.tag] = transfer.memory, transfer.memory.tobytes()
                elif isinstance(transfer, Release):
                    self.take_back((to, rank.rank, transfer.tag))
                else:
                    assert (to, rank.rank, transfer.tag) not in self.receives
                    assert isinstance(transfer, Borrow) == (self.reads_in_place and kind == PART)
                    place = self.receives[to, rank.rank, transfer.tag] = getattr(transfer, "memory", None)
                    assert kind != SUM or rank.frontier()[HEADER + number] == State.RECEIVING
                    if kind == PART and not self.reads_in_place:
                        self.buffers.setdefault(rank.rank, set()).add(place.ctypes.data)

    def refuse_used_rows(self, rank, transfer):
        """Whatever is written is used by nothing else meanwhile."""
        is_read = isinstance(transfer, Send) or (isinstance(transfer, Copy) and transfer.is_to_arena)
        read = [memory for key, (memory, _) in self.sends.items() if key[0] == rank and key not in self.is_acknowledged]
        read += [copy.memory for copy in self.copies if copy.peer == rank and copy.is_to_arena]
        written = [place for (_, sink, _), place in self.receives.items() if sink == rank and place is not None]
        written += [copy.memory for copy in self.copies if copy.peer == rank and not copy.is_to_arena]
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
        place = self.arenas[copy.peer][copy.start : copy.start + copy.memory.size]
        rank = self.ranks[copy.peer]
        if copy.is_to_arena:
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
        """All links end, some in the middle of a message; new ones take their place."""
        if self.random.random() < 0.5:  # else what was to begin does not
            self.collect()
        for key, place in self.receives.items():
            if place is not None and key in self.sends and self.random.random() < 0.5:
                place[: len(place) // 2] = -7
        for copy in [*self.copies]:  # those that were begun end
            self.make_copy(copy)
        self.connect()
        frontiers = [rank.frontier() for rank in self.ranks]
        for rank in self.ranks:
            rank.resume(frontiers)

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
        assert [(bad.index, bad.rank) for bad in rank.bad] == found
        assert [repr(bad.value) for bad in rank.bad] == [repr(float(parts[rank, index])) for index, rank in found]


KINDS = ("mesh", "star", "any", "served")


@st.composite
def groups(draws, steps=1, kinds=KINDS):
    layout, world_size = draws(draw.uneven_layouts(CHUNK)), draws(st.integers(1, 6))
    bucket_bytes, seed = draws(st.sampled_from([4, 200, 1000, 1 << 22])), draws(draw.seeds)
    kind = draws(st.sampled_from(kinds))
    owner = {"star": world_size - 1, "served": world_size}.get(kind)
    shares = shares_of(layout, world_size, bucket_bytes, owner=owner)
    if kind == "any":
        numbers = random.Random(seed)
        shares = owned_by(lambda _: numbers.randrange(world_size), layout, world_size, bucket_bytes)
    parts = [
        random_parts(layout, world_size, [seed, n], draws(st.sampled_from([1.0, 1e-30, 1e38]))) for n in range(steps)
    ]
    elements = [index for slot in layout.slots for index in (slot.offset, slot.stop - 1) if slot.size]
    for _ in range(draws(st.sampled_from([0, 0, 0, 1, 4])) if elements else 0):
        rank, index = draws(st.integers(0, world_size - 1)), draws(st.sampled_from(elements))
        parts[0][rank, index] = draws(st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38]))
    in_flight = draws(st.sampled_from([0, 500, 8 << 20]))
    on_devices = draws(st.sets(st.integers(0, world_size - 1)))
    reads_in_place = kind != "served" and draws(st.booleans())
    return Group(layout, shares, parts, seed, in_flight, reads_in_place=reads_in_place, on_devices=on_devices)


@given(groups())
@settings(max_examples=200)
def test_every_rank_ends_with_the_sums_in_rank_order_and_the_same_facts(group):
    group.run()


@given(groups(steps=3))
@settings(max_examples=100)
def test_a_faster_ranks_next_step_is_not_taken_for_this_one(group):
    group.run()


@given(groups(steps=2, kinds=KINDS[:-1]), st.lists(st.integers(0, 150), max_size=4))
@settings(max_examples=300)
def test_a_step_that_loses_its_links_ends_with_the_same_bytes(group, losses):
    group.waits_for_all = True
    group.run(losses)


def small_group(world_size=3, seed=0, owners=None, **options):
    """Four shares, whose owners are the ranks in turn."""
    shares = owned_by(owners or (lambda number: number % world_size), SMALL, world_size)
    return Group(SMALL, shares, [random_parts(SMALL, world_size, [seed])], seed, **options)


@pytest.mark.parametrize("on_devices", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("reads_in_place", [False, True])
def test_lost_at_any_moment_and_lost_again(reads_in_place, on_devices):
    options = {"reads_in_place": reads_in_place, "on_devices": on_devices, "in_flight": 200 if on_devices else 1 << 20}
    turns = small_group(**options).run()
    assert turns > 60
    for turn in range(turns):
        for losses in ([turn], [turn, turn + 4]):
            small_group(**options).run(losses)


@pytest.mark.parametrize("seed", range(60))
def test_with_one_row_of_each_kind_nobody_waits_for_ever(seed):
    """Links that are streams, on which what cannot be received yet holds up what is behind it; lost now and then."""
    numbers, world_size = random.Random(seed), 2 + seed % 4
    layout = GradientLayout.of({f"layers.{n}.w": (40,) for n in range(14)})
    parts = [random_parts(layout, world_size, [seed, n]) for n in range(2)]
    shares = owned_by(lambda _: numbers.randrange(world_size), layout, world_size)
    on_devices = [rank for rank in range(world_size) if numbers.random() < 0.6]
    group = Group(layout, shares, parts, seed, in_flight=numbers.choice([0, 400]), on_devices=on_devices)
    group.are_streams = group.waits_for_all = True
    group.run({numbers.randrange(600) for _ in range(seed % 3)})


def stuck(world_size, stalled, owners=lambda _: 0):
    """Until nothing can happen, where some links move nothing."""
    group = small_group(world_size, owners=owners)
    group.stalled, group.early = set(stalled), set()
    while group.turn():
        pass
    return group


def test_a_sum_is_sent_again_to_who_lacks_it_alone():
    group = stuck(3, {(0, 2)})
    assert [*map(State, group.ranks[2].frontier()[HEADER:KNOWN])] == [State.RECEIVING] * 4
    group.stalled = set()
    group.lose()
    group.collect()
    assert {*group.sends} == {(0, 2, tag(SUM, n)) for n in range(4)} | {(0, 2, tag(FACTS, 0))}
    assert {*group.sends} == {*group.receives}
    group.run()


def test_a_sum_that_was_damaged_on_the_way_is_sent_again():
    group = stuck(3, {(0, 2)})
    rank, group.stalled = group.ranks[2], set()
    rank.damaged(0, tag(SUM, 1))
    assert State(rank.frontier()[HEADER + 1]) is State.DAMAGED
    assert rank.may_hold_sums
    group.lose()
    group.run()


def test_a_part_that_was_written_over_before_there_was_a_sum_is_lost():
    """By a message whose tag was damaged: what is in the arena is neither this rank's part nor the sum."""
    group = stuck(3, {(2, 0), (0, 2)})
    group.ranks[1].damaged(0, tag(SUM, 1))
    frontiers = [rank.frontier() for rank in group.ranks]
    for rank in group.ranks:
        refused(rank, rank.resume, frontiers, match=r"rank 1 has lost its part of share 1 .*; discard\(\) the")


@pytest.mark.parametrize("lost", [(2, tag(PART, 1)), (2, tag(FACTS, 2)), (2, tag(SUM, 1))])
def test_what_is_damaged_elsewhere_costs_no_part(lost):
    """In what is received besides sums, or in what says that an own sum was read."""
    rank = stuck(3, {(2, 0), (2, 1), (1, 2)}, owners=lambda number: number % 3).ranks[1]
    before = rank.frontier()
    rank.damaged(*lost)
    assert rank.frontier() == before


def test_a_devices_part_is_not_written_over_by_what_was_damaged():
    rank = small_group(3, on_devices=(0, 1, 2), owners=lambda _: 0).ranks[1]
    before = rank.frontier()
    rank.damaged(0, tag(SUM, 1))
    assert rank.frontier() == before


def test_what_was_not_summed_begins_anew():
    group = stuck(3, {(2, 0)})
    group.stalled = set()
    group.lose()
    group.collect()
    assert {*group.sends} == {(rank, 0, tag(PART, n)) for n in range(4) for rank in (1, 2)}
    group.run()


def test_done_is_only_who_may_overwrite_the_arena():
    group = stuck(2, {(0, 1)})
    assert {*group.ranks[0].frontier()[HEADER:KNOWN]} == {State.SUMMED}
    assert np.isfinite(group.ranks[0].squares).all()
    assert not group.ranks[0].is_done
    with pytest.raises(WindowError, match="step 0 is not summed on all ranks"):
        group.ranks[0].next_step()
    with pytest.raises(WindowError, match=r"the facts of step 0 are not here: got none of ranks \[0\]"):
        print(group.ranks[1].bad)
    group.stalled = set()
    group.run()


def test_a_lone_rank_sends_nothing():
    group = small_group(1)
    group.run()
    assert not group.buffers


@pytest.mark.parametrize(("in_flight", "shares"), [(0, 1), (512, 2), (1200, 4), (1 << 30, 12)])
def test_an_owner_receives_into_few_buffers_again_and_again(in_flight, shares):
    layout = GradientLayout.of({f"layers.{n}.w": (64,) for n in range(12)})
    group = Group(
        layout, owned_by(lambda _: 1, layout, 3), [random_parts(layout, 3, [n]) for n in range(2)], 1, in_flight
    )
    group.run()
    assert {rank: len(addresses) for rank, addresses in group.buffers.items()} == {1: 2 * shares}


@pytest.mark.parametrize(("in_flight", "shares"), [(0, 1), (512, 2), (1200, 4), (1 << 30, 12)])
def test_a_devices_arena_has_rows_for_the_shares_that_are_on_their_way(in_flight, shares):
    layout = GradientLayout.of({f"layers.{n}.w": (64,) for n in range(12)})
    parts = [random_parts(layout, 3, [n]) for n in range(2)]
    group = Group(layout, owned_by(lambda _: 1, layout, 3), parts, 1, in_flight, on_devices=range(3))
    group.run()
    rows = {rank: [len(rows) for rows in each.given] for rank, each in group.rows.items()}
    assert rows == {0: [shares, 0], 1: [0, shares], 2: [shares, 0]}


# ---- a server beside the ranks ----


def served(world_size=2, **options):
    return small_group(world_size, owners=lambda _: world_size, **options)


@pytest.mark.parametrize("seed", range(30))
def test_over_streams_to_a_server_nobody_waits_for_ever(seed):
    numbers, world_size = random.Random(seed), 1 + seed % 4
    layout = GradientLayout.of({f"layers.{n}.w": (40, 1 + n % 3) for n in range(14)})
    parts = [random_parts(layout, world_size, [seed, n]) for n in range(3)]
    on_devices = [rank for rank in range(world_size) if numbers.random() < 0.3]
    shares = owned_by(lambda _: world_size, layout, world_size)
    group = Group(layout, shares, parts, seed, in_flight=numbers.choice([0, 400]), on_devices=on_devices)
    group.are_streams = True
    group.run()


@pytest.mark.parametrize(("in_flight", "shares"), [(0, 1), (512, 2), (1200, 4), (1 << 30, 12)])
def test_a_servers_memory_is_that_of_the_shares_in_flight(in_flight, shares):
    layout = GradientLayout.of({f"layers.{n}.w": (64,) for n in range(12)})
    parts = [random_parts(layout, 3, [n]) for n in range(2)]
    group = Group(layout, owned_by(lambda _: 3, layout, 3), parts, 1, in_flight)
    group.run()
    assert {rank: len(addresses) for rank, addresses in group.buffers.items()} == {3: 3 * shares}
    assert [len(rows) for rows in group.ranks[3]._free_rows] == [0, shares]


def test_padding_of_a_servers_sums_is_zero():
    """Whatever its row held before: another share, that has elements there."""
    layout = GradientLayout.of({"layers.0.w": (96,), "a": (1,), "b": (1,), "c": (1,)})
    parts = [random_parts(layout, 2, [n]) for n in range(2)]
    group = Group(layout, shares_of(layout, 2, 400, owner=2), parts, 0, in_flight=0)
    group.ranks[2]._free_rows[1][0][:] = np.nan
    group.run()
    for arena, part in zip(group.arenas, [sum_of(parts[1])] * 2, strict=True):
        assert arena.tobytes() == part.tobytes()


def test_a_server_waits_for_a_part_once_another_is_there_and_then_for_who_takes_no_sum():
    group = served()
    server = group.ranks[2]
    server_starts = group.unstarted[2]
    while server_starts:
        group.start(2)
    assert server.awaited is None
    group.stalled = {(1, 2)}
    while group.turn():
        pass
    assert server.awaited == (1, "the part of share 0")
    assert group.ranks[0].awaited == (2, "the sum of share 0")
    group.stalled = {(2, 0)}
    group.early = set()
    while group.turn():
        pass
    assert server.awaited == (0, "its receipt of the sum of share 0")
    assert group.ranks[0].described(tag(FACTS, 2)) == "the facts of the server"


def test_shares_whose_sum_has_not_begun_to_arrive_hold_parts_when_the_links_end():
    group = served()
    group.stalled, group.early = {(2, 0)}, set()
    while group.turn():
        pass
    rank = group.ranks[0]
    assert [*map(State, rank.frontier()[HEADER:KNOWN])] == [State.RECEIVING] * 4
    assert rank.may_hold_sums
    assert not served().ranks[0].may_hold_sums
    unwritten = [Completion(Completed.RECEIVED, 2, tag(SUM, n)) for n in (0, 2, 3)]
    rank.keep_parts([*unwritten, Completion(Completed.RECEIVED, 2, (1 << 21) - 2)])
    assert [*map(State, rank.frontier()[HEADER:KNOWN])] == [State.SENT, State.RECEIVING, State.SENT, State.SENT]
    assert rank.may_hold_sums
    rank.keep_parts([Completion(Completed.RECEIVED, 2, tag(SUM, 1))])
    assert not rank.may_hold_sums


@pytest.mark.parametrize("rank", [0, 1])
def test_all_parts_are_on_their_way_where_they_are_read_in_place_and_few_where_not(rank):
    """Also if the step goes on over links of the other kind, and back."""
    layout = GradientLayout.of({f"layers.{n}.w": (64,) for n in range(12)})
    shares, arena = owned_by(lambda _: 1, layout, 2), random_parts(layout, 1, [0])[0]
    all_reduce = OrderedAllReduce(rank, 2, layout, shares, arena, KERNELS, in_flight=512, reads_in_place=True)
    for span in layout.spans:
        all_reduce.start(span)
    kinds = [(True, 12), (False, 2), (True, 12), (None, 12), (False, 2), (None, 2)]
    for reads_in_place, count in kinds:
        frontiers = [all_reduce.frontier(), b""]
        all_reduce.resume(frontiers if rank == 0 else frontiers[::-1], reads_in_place=reads_in_place)
        parts = [transfer for transfer in all_reduce.transfers() if transfer.tag % 6 // 2 == PART]
        assert len(parts) == count
        kind = Send if rank == 0 else Borrow if count == 12 else Receive
        assert {*map(type, parts)} == {kind}


def test_a_sum_is_nowhere_else_before_its_owners_device_has_it():
    group = small_group(3, owners=lambda _: 0, on_devices=[0])
    group.early, turns = set(), 0
    while not any(copy.is_to_arena for copy in group.copies):
        assert group.turn()
        group.collect()
        turns += 1
    first = next(copy for copy in group.copies if copy.is_to_arena)
    number = first.tag // 6
    assert not any(key[0] == 0 and key[2] == tag(SUM, number) for key in group.sends)
    assert State(group.ranks[0].frontier()[HEADER + number]) is State.SENT
    group.make_copy(first)
    assert State(group.ranks[0].frontier()[HEADER + number]) is State.SUMMED
    group.collect()
    assert {key for key in group.sends if key[2] == tag(SUM, number)} == {
        (0, rank, tag(SUM, number)) for rank in (1, 2)
    }
    group.run()


def test_who_has_lent_a_part_receives_no_sum_in_its_place_before_all_parts_were_read():
    group = small_group(3, owners=lambda _: 0, reads_in_place=True)
    group.stalled = {(2, 0)}
    while group.turn():
        pass
    lent = {(1, 0, tag(PART, number)) for number in range(4)}
    assert group.lent == lent & {*group.sends} == lent
    assert [*map(State, group.ranks[1].frontier()[HEADER:KNOWN])] == [State.SENT] * 4
    group.stalled = set()
    group.run()


@pytest.mark.parametrize("seed", range(3))
def test_equal_sums_have_the_same_squares_for_any_number_of_ranks_and_any_cut(seed):
    layout = GradientLayout.of({"layers.0.w": (CHUNK + 100,), "layers.1.w": (77,), "head": (300, 100)})
    whole = np.zeros(layout.arena_size, np.float32)
    numbers = np.random.default_rng(seed)
    for slot in layout.slots:
        whole[slot.offset : slot.stop] = numbers.integers(-(1 << 20), 1 << 20, slot.size)
    found = set()
    for world_size in range(1, 7):
        parts = np.zeros((world_size, whole.size), np.float32)
        for part in parts[:-1]:
            part[whole != 0] = numbers.integers(-(1 << 20), 1 << 20, np.count_nonzero(whole))
        parts[-1] = whole - parts[:-1].sum(axis=0)  # exact, as all are whole numbers below 2**24
        for shares in (
            shares_of(layout, world_size, 1 << (16 + world_size)),
            owned_by(lambda n, size=world_size: n * 7 % size, layout, world_size),
        ):
            group = Group(layout, shares, [parts], seed)
            group.run()
            found.add(group.ranks[0].squares.tobytes())
    assert found == {squares_of(layout, whole).tobytes()}


# ---- what is refused ----


def refused(rank, call, *arguments, match):
    """And nothing has changed."""
    before = rank.frontier(), {*rank._sends}, {*rank._receives}, rank._arena.tobytes()
    with pytest.raises((ProtocolError, HandshakeRefused), match=match):
        call(*arguments)
    assert (rank.frontier(), {*rank._sends}, {*rank._receives}, rank._arena.tobytes()) == before
    assert rank.transfers() == []


def started(rank=0, **options):
    """A rank of three that has started all; share n is owned by rank n % 3, the last of four by 0."""
    group = small_group(**options)
    for span in SMALL.spans:
        group.ranks[rank].start(span)
    group.ranks[rank].transfers()
    return group.ranks[rank]


@pytest.mark.parametrize(
    ("peer", "number", "said"),
    [
        (1, tag(SUM, 1), "received from rank 1 out of turn: got the sum of share 1 of an even step"),  # part not gone
        (2, tag(SUM, 0), "received from rank 2 out of turn: got the sum of share 0"),  # which rank 0 owns
        (2, tag(PART, 1), "received from rank 2 out of turn: got the part of share 1"),  # which rank 1 owns
        (1, tag(PART, 0, step=1), "got the part of share 0 of an odd step, expected each transfer of step 0 once"),
        (1, tag(FACTS, 2), "received from rank 1 out of turn: got the facts of rank 2"),
        (0, tag(PART, 0), "received from rank 0 out of turn"),
        (3, tag(PART, 0), "received from rank 3 out of turn"),
        (1, -1, "received from rank 1 out of turn"),
        (1, 1 << 70, "received from rank 1 out of turn"),
    ],
)
def test_what_is_received_out_of_turn_is_refused(peer, number, said):
    rank = started()
    refused(rank, rank.received, peer, number, match=said)


def test_a_part_of_another_size_is_not_read():
    rank = started(reads_in_place=True)
    said = "rank 1 lends another size as the part of share 0: got 36, expected 40"
    refused(rank, rank.received, 1, tag(PART, 0), np.zeros(36, np.float32), match=said)


def test_what_is_reported_twice_is_refused():
    rank = started()
    rank.received(1, tag(PART, 0))
    refused(rank, rank.received, 1, tag(PART, 0), match="received from rank 1 out of turn: got the part of share 0")
    rank.sent(1, tag(PART, 1))
    rank.transfers()
    refused(rank, rank.sent, 1, tag(PART, 1), match="sent to rank 1 out of turn: got the part of share 1")
    rank.received(1, tag(SUM, 1))
    refused(rank, rank.received, 1, tag(SUM, 1), match="received from rank 1 out of turn: got the sum of share 1")


@pytest.mark.parametrize("index", [np.nan, np.inf, -2, 1 << 40, SMALL.arena_size])
def test_facts_of_what_is_outside_of_the_arena_are_refused(index):
    rank = started()
    rank._facts[1][-6:] = (-1, 0, index, np.nan, -1, 0)
    refused(rank, rank.received, 1, tag(FACTS, 1), match="rank 1 reports a NaN or Inf outside of the arena")


def changed(frontier, at, value):
    return frontier[:at] + bytes([value]) + frontier[at + 1 :]


@pytest.mark.parametrize(
    ("rank", "change", "said"),
    [
        (2, lambda told: told[:-1], "rank 2 sent another frontier: got 14 bytes, expected 15 bytes"),
        (1, lambda told: changed(told, 0, 1), "rank 1 is in another step: got 1, expected 0"),
        (0, lambda told: changed(told, HEADER + 3, State.SENT), "the frontier of rank 0 is not its own"),
        (1, lambda told: changed(told, HEADER + 0, State.LOCAL), "rank 1 has not contributed to what step 0 has sum"),
        (
            2,
            lambda told: changed(told, HEADER + 1, State.SUMMED),
            "rank 2 sent an impossible state of share 1.* at its owner, rank 1",
        ),
        (1, lambda told: changed(told, HEADER + 1, State.RECEIVING), "rank 1 sent an impossible state of share 1"),
        (2, lambda told: changed(told, HEADER + 0, 5), "rank 2 sent an impossible state of share 0: got state 5"),
        (2, lambda told: changed(told, HEADER + 1, State.DAMAGED), "rank 2 has lost its part of share 1 in step 0"),
        (2, lambda told: changed(told, KNOWN + 1, 1), "rank 2 sent an impossible state of rank 1's facts"),
        (1, lambda told: changed(told, KNOWN + 1, 1), "rank 1 sent an impossible state of rank 1's facts"),
        (2, lambda told: changed(told, KNOWN + 2, 0), "rank 2 sent an impossible state of rank 2's facts"),
        (2, lambda told: changed(told, KNOWN + 0, 2), "rank 2 sent an impossible state of rank 0's facts"),
    ],
)
def test_frontiers_that_cannot_be_of_one_step_are_refused(rank, change, said):
    group = stuck(3, {(2, 1)}, owners=lambda number: number % 3)
    frontiers = [each.frontier() for each in group.ranks]
    assert frontiers[0][HEADER:] == bytes([3, 2, 3, 3, 1, 0, 1]), "shares 0 and 3 are summed here, share 2 by rank 2"
    frontiers[rank] = change(frontiers[rank])
    refused(group.ranks[0], group.ranks[0].resume, frontiers, match=said)


def test_another_number_of_frontiers_is_refused():
    rank = started()
    refused(rank, rank.resume, [rank.frontier()] * 2, match="another number of frontiers: got 2, expected 3")


def fresh(group, rank, part, step=0):
    """A rank that begins the open step anew: it dropped its window, or is a new process."""
    group.arenas[rank][:] = part
    shares, arena = group.ranks[rank]._shares, group.arenas[rank]
    group.ranks[rank] = OrderedAllReduce(rank, 3, SMALL, shares, arena, KERNELS, step=step)


def test_a_rank_that_has_dropped_what_others_have_summed_cannot_go_on():
    group = stuck(3, {(0, 1)})
    fresh(group, 0, group.steps[0][0])
    frontiers = [b"", *[rank.frontier() for rank in group.ranks[1:]]]
    for rank in group.ranks[1:]:
        refused(rank, rank.resume, frontiers, match=r"rank 0 has not contributed .* new process, or one that dropped")


def test_a_sum_that_is_gone_with_its_owner_is_refused_where_it_was_begun_to_be_written():
    """What it was written over is neither a part nor a sum; where nothing was written the parts travel again."""
    group = stuck(3, {(0, 1), (0, 2)})
    fresh(group, 0, group.steps[0][0])
    frontiers = [b"", *[rank.frontier() for rank in group.ranks[1:]]]
    for rank in group.ranks[1:]:
        said = r"rank 1 has lost its part of share 0 in step 0 to a sum of rank 0 that is gone; discard\(\)"
        refused(rank, rank.resume, frontiers, match=said)
    for rank in group.ranks[1:]:
        rank.keep_parts([Completion(Completed.RECEIVED, 0, tag(SUM, number)) for number in range(4)])
    frontiers = [b"", *[rank.frontier() for rank in group.ranks[1:]]]
    group.unstarted[0], group.stalled = [*SMALL.spans], set()
    group.connect()
    for rank in group.ranks:
        rank.resume(frontiers)
    group.run()


@pytest.mark.parametrize("step", [0, 1])
def test_a_rank_that_has_dropped_what_nobody_has_summed_goes_on_with_another_window(step):
    """Also where the others were at another step when they met, and have loaded one that was saved."""
    group = stuck(3, {(2, rank) for rank in range(3)})
    assert any(rank.may_hold_sums for rank in group.ranks)
    group.steps *= step + 1
    for rank in group.ranks:
        rank.step = step
    group.steps[0][2] = random_parts(SMALL, 1, [99])[0]
    fresh(group, 2, group.steps[0][2], step)
    frontiers = [rank.frontier() for rank in group.ranks[:2]] + [b""]
    group.unstarted[2] = [*SMALL.spans]
    group.connect()
    group.stalled = set()
    for rank in group.ranks:
        rank.resume(frontiers)
    group.run()


def test_bad_arguments():
    parts, shares = random_parts(SMALL, 1, [0])[0], shares_of(SMALL, 1, 4)
    for other in (parts[:-1], parts.astype(np.float64), np.repeat(parts, 2)[::2]):
        with pytest.raises(CallerError, match="arena does not fit the layout"):
            OrderedAllReduce(0, 1, SMALL, shares, other, KERNELS)
    for owners in (lambda _: 2, lambda number: number % 2):  # all or nothing is the server's
        with pytest.raises(CallerError, match=r"a share's owner is outside of the group: got ., expected 0\.\.0"):
            OrderedAllReduce(0, 1, SMALL, owned_by(owners, SMALL, 1), parts, KERNELS)
    with pytest.raises(WindowError, match="has been started already"):
        started().start(SMALL.spans[0])
