"""A schedule: a group of ranks with their steps and faults, all drawn from one seed, and what must hold in the end."""

import itertools
import re

import numpy as np
from transports import SlowArena, rank_order_sum

from gradengine.errors import ExchangeError, HandshakeRefused, PeerLost
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.mesh import Meeting
from gradengine.exchange.ordered_all_reduce import SUMMED
from gradengine.layout import GradientLayout
from gradengine.reduction.stats import StepStats, agree
from simulation.clock import Clock, Process
from simulation.network import Network

SECRET = "a secret of all ranks"
PORT = 5000
TIMEOUT, JOIN_TIMEOUT = 1.0, 1.5  # seconds of the virtual clock
LIMIT = 200.0  # a rank that goes on then hangs: each try ends after some seconds
PATIENCE = 7.0  # a rank that has failed and gets no further for so long gives up


class Wrong(AssertionError):
    """A schedule that did not end as it must."""


class Schedule:
    """All that is drawn from a seed, its run and its log."""

    def __init__(self, seed):
        self.seed, self.log = seed, []
        self.clock = Clock(seed, LIMIT)
        self.random = self.clock.random
        self.network = Network(self.clock)
        self.world_size = self.random.choice([2, 2, 2, 2, 3, 3, 3, 4])
        self.steps = self.random.choice([1, 1, 1, 2, 2, 3])
        self.layout = self._layout()
        self.bucket_bytes = self.random.choice([4, 100, 300, 4096])
        self.on_devices = {rank for rank in range(self.world_size) if self.random.random() < 0.15}
        self.windows = [0] * self.world_size  # how many each rank has filled
        self.sums = {}  # by step and rank: the bytes with which the rank went on, and its window
        self.ranks = []  # the newest process of each rank
        self.gone = set()  # ranks that died and do not come back
        self.failures, self.happened, self.happened_at = [], 0, 0.0
        self.first_failures = []  # of each rank that had joined
        self.started, self.holders = set(), set()  # ranks and steps: with a span that was started, and with sums
        self.suspects = set()  # the ranks at the faults of which others hear at once
        self.sleepers = set()  # the ranks that stand still until all others have given up

    def run(self):
        """Run to the end; raises `Wrong` if that is not as it must be."""
        with self.network.installed():
            self.ranks = [Rank(self, number) for number in range(self.world_size)]
            self._draw_faults()
            for rank in self.ranks:
                rank.begin()
            hanging = self.clock.run()
        self._check(hanging)

    @property
    def described(self):
        return (
            f"seed {self.seed}: {self.world_size} ranks, {self.steps} steps, {len(self.layout.slots)} components, "
            f"bucket_bytes={self.bucket_bytes}, on devices: {sorted(self.on_devices)}"
        )

    @property
    def ending(self):
        """How the schedule ended, for a table."""
        if any(rank.ended for rank in self.ranks):
            return "in one error"
        return "in the sums after errors" if self.failures else "in the sums"

    def note(self, who, *what):
        self.log.append(
            f"{self.clock.now * 1e3:10.3f} ms  {self.network.operations:6d}  {who}: {' '.join(map(str, what))}"
        )

    # ---- what is drawn ----

    def _layout(self):
        sizes = [self.random.choice([1, 3, 17, 33, 64, 129]) for _ in range(self.random.randint(1, 4))]
        return GradientLayout.of({f"layers.{n // 2}.{n}": (size,) for n, size in enumerate(sizes)})

    def contribution(self, rank, step, window):
        """What a rank has in a step's arena: zero between components; numbers of several magnitudes."""
        rng = np.random.default_rng([self.seed, rank, step, window])
        arena = np.zeros(self.layout.arena_size, np.float32)
        values = rng.standard_normal(arena.size, np.float32) * np.float32(10) ** rng.integers(-3, 4, arena.size)
        for slot in self.layout.slots:
            arena[slot.offset : slot.stop] = values[slot.offset : slot.stop]
        return arena

    def _draw_faults(self):
        kinds = [self._cut, self._slow, self._sleep, self._die, self._return, self._duplicate, self._flip]
        for rank in self.ranks:
            if self.random.random() < 0.1:
                rank.process.slowness = 30.0
        for _ in range(self.random.choice([0, 1, 1, 1, 2, 3])):
            kind, rank = self.random.choice(kinds), self.random.randrange(self.world_size)
            at = self.random.randrange(8, 28 * self.world_size * (self.steps + 2))
            while at in self.network.faults:
                at += 1
            self.network.faults[at] = lambda kind=kind, rank=rank: self._happen(kind, rank)

    def _happen(self, kind, rank):
        self.happened, self.happened_at = self.happened + 1, self.clock.now
        kind(rank)

    def _cut(self, rank):
        other = (rank + self.random.randrange(1, self.world_size)) % self.world_size
        silent, seconds = self.random.random() < 0.3, self.random.choice([0.0, 0.0, 0.3, 2.0])
        self.note("fault", f"cut between {rank} and {other}", "silent" if silent else "", f"for {seconds} s")
        self.suspects |= set() if silent else {rank, other}
        self.network.cut(host(rank), host(other), seconds, is_silent=silent)

    def _slow(self, rank):
        self.note("fault", f"rank {rank} is slow")
        self.ranks[rank].process.slowness = 100.0

    def _sleep(self, rank):
        seconds = self.random.choice([0.1, 0.5, 2.5, 5.0])
        self.sleepers |= {rank} if seconds == 5.0 else set()  # longer than any rank waits
        self.note("fault", f"rank {rank} sleeps for {seconds} s")
        self.ranks[rank].process.sleeps_until = self.clock.now + seconds

    def _die(self, rank, *, returns=False):
        if self.random.random() < 0.5:
            self._end(rank, returns)
        else:
            self.network.amid[self.ranks[rank].process] = lambda: self._end(rank, returns)

    def _end(self, rank, returns):
        dying = self.ranks[rank]
        if dying.process.is_dead or dying.ended:
            return
        self.happened_at = self.clock.now
        silent = self.random.random() < 0.3
        self.note("fault", f"rank {rank} dies", "silently" if silent else "", "and returns" if returns else "")
        if returns:
            self.clock.after(self.random.choice([0.01, 0.2, 2.0]), self._come_back, rank, dying.step)
        else:
            self.gone.add(rank)
        self.suspects |= set() if silent else {rank}
        self.network.kill(dying.process, is_silent=silent)

    def _return(self, rank):
        self._die(rank, returns=True)

    def _come_back(self, number, step):
        if number in self.gone:
            return
        self.note(f"rank {number}", f"comes back at step {step}")
        self.windows[number] += 1
        self.happened_at = self.clock.now
        self.ranks[number] = Rank(self, number, step)
        self.ranks[number].begin()

    def _duplicate(self, rank):
        if rank == 0:  # could not listen
            return
        self.note("fault", f"a second process is started as rank {rank}")
        process = Process(host(rank))
        self.network.processes.append(process)
        self.clock.spawn(process, self._join_twice, rank, process)

    def _join_twice(self, rank, process):
        try:
            exchange = self.exchange(rank)
            exchange.bind(self.layout, np.zeros(self.layout.arena_size, np.float32))
            exchange.close()
            self.note(f"second rank {rank}", "was let in, and leaves")
        except ExchangeError as error:
            self.note(f"second rank {rank}", f"{type(error).__name__}: {error}")

    def _flip(self, rank):
        self.note("fault", "a bit is flipped")
        self.network.flips += 1

    def exchange(self, rank):
        """An exchange that has not joined."""
        meeting = Meeting((host(0), PORT), rank, self.world_size, secret=SECRET, link="tcp")
        return Exchange(
            meeting, timeout=TIMEOUT, join_timeout=JOIN_TIMEOUT, bucket_bytes=self.bucket_bytes, clock=self.clock
        )

    # ---- what must hold ----

    def _check(self, hanging):
        if self.clock.faults:
            raise self.clock.faults[0]
        if hanging:
            raise Wrong(f"hangs at {self.clock.now:.3f} s: {', '.join(process.name for process in hanging)}")
        for step in range(self.steps):
            self._check_sums(step)
        alive = [rank for rank in self.ranks if not rank.process.is_dead]
        errors = [rank.ended for rank in alive if rank.ended is not None]
        if not self.happened and self.failures:
            raise Wrong(f"without a fault: {self.failures[0]}")
        self._check_names()
        if not errors:
            return
        steps, kinds = {rank.step for rank in alive}, {type(error) for error in errors}
        if len(steps) > 1:  # some ended the step while the last message to another was lost
            refused = [error for error in errors if isinstance(error, HandshakeRefused)]
            is_known = kinds <= {PeerLost, HandshakeRefused} and all("different step" in str(each) for each in refused)
            if max(steps) - min(steps) > 1 or not is_known:
                raise Wrong(f"ranks are at steps {sorted(steps)}: {errors}")
            return
        if not self.gone or len(errors) < len(alive):
            raise Wrong(f"all could go on, and rank {alive[0].number} ended with {errors[0]!r}")
        named = any(re.search(rf"\b{each}\b", str(error)) for error in errors for each in self.gone)
        if not named or kinds != {PeerLost}:
            raise Wrong(f"ranks {sorted(self.gone)} are gone, and the others say: {errors}")

    def _check_names(self):
        """After one fault of which others hear at once, a rank that says why it leaves names who was at fault."""
        if self.happened > 1:
            return
        for rank, error, is_ahead in self.first_failures:
            # Whoever has closed amid a message cannot say for whom. A rank that has begun the next step cannot see that
            # the rank for which it waits is still in the last step's gather.
            is_cut_off = "its connection has ended" in str(error)
            if (
                self.sleepers - {rank}
                and not (is_cut_off or is_ahead)
                and not any(f"rank {each}" in str(error) for each in self.sleepers)
            ):
                raise Wrong(f"ranks {sorted(self.sleepers)} stood still, and rank {rank} says: {error}")
        if not self.suspects:
            return
        for rank, error, _ in self.first_failures:
            is_named = any(re.search(rf"\b{each}\b", str(error)) for each in self.suspects)
            if not is_named and "it has closed its link" in str(error):
                raise Wrong(f"ranks {sorted(self.suspects)} were at fault, and rank {rank} says: {error}")

    def _check_sums(self, step):
        """All that went on did so with the same bytes: the fold in rank order of their own windows."""
        told = {rank: self.sums[step, rank] for rank in range(self.world_size) if (step, rank) in self.sums}
        if not told:
            return
        if len({data for data, _ in told.values()}) > 1:
            raise Wrong(f"ranks {sorted(told)} ended step {step} with different bytes")
        data, _ = next(iter(told.values()))
        if not self.is_sum(step, 0, np.frombuffer(data, np.float32), told):
            raise Wrong(f"step {step} ended with other bytes than the sum in rank order")

    def is_sum(self, step, start, data, told=()):
        """Whether this is the fold in rank order from there on: of these windows, or of any that ranks have filled."""
        windows = [
            [told[rank][1]] if rank in told else range(self.windows[rank], -1, -1) for rank in range(self.world_size)
        ]
        for chosen in itertools.product(*windows):
            parts = [self.contribution(rank, step, window) for rank, window in enumerate(chosen)]
            if rank_order_sum(parts)[start : start + data.size].tobytes() == data.tobytes():
                return True
        return False


class Rank:
    """One process of a rank: its steps, and what it does when they fail."""

    def __init__(self, schedule, number, step=0):
        self.schedule, self.number, self.step = schedule, number, step
        self.process = Process(host(number))
        schedule.network.processes.append(self.process)
        self.memory = np.zeros(schedule.layout.arena_size, np.float32)
        self.arena = SlowArena(self.memory) if number in schedule.on_devices else self.memory
        self.exchange = self.bound = self.ended = self.failing_since = None  # `bound`: the last that had joined
        self.has_failed, self.tries, self.refusals = False, 0, 0  # refusals for another step

    def begin(self):
        self.schedule.clock.spawn(self.process, self._live)

    def note(self, *what):
        self.schedule.note(f"rank {self.number}", *what)

    # ---- inside ----

    def _live(self):
        self._fill()
        while self.step < self.schedule.steps and self.ended is None:
            self._try()
        if self.ended is None:
            self._leave()

    def _try(self):
        try:
            if self.exchange is None:
                self._join()
            self._make_step()
        except ExchangeError as error:
            self._fail(error)

    def _leave(self):
        """Leave when all are done, or when that cannot be known."""
        if self.exchange is not None:
            try:
                self.exchange.barrier()
            except ExchangeError as error:
                self.note("after its last step:", error)
            self.exchange.close()
        self.note("is done")

    def _fill(self):
        schedule = self.schedule
        self.memory[:] = schedule.contribution(self.number, self.step, schedule.windows[self.number])

    def _join(self):
        exchange = self.schedule.exchange(self.number)
        self._look_at_memory()
        exchange.bind(self.schedule.layout, self.arena, step=self.step, replaces=self.bound)
        self.exchange = self.bound = exchange
        self.note("has joined")

    def _look_at_memory(self):
        """Refuse other memory than this rank's contribution, or, if the rank says so, sums that all took part in."""
        schedule, is_holder = self.schedule, self.bound is not None and self.bound.holds_sums
        contribution = schedule.contribution(self.number, self.step, schedule.windows[self.number])
        if not is_holder and self.memory.tobytes() != contribution.tobytes():
            raise Wrong(f"the memory of rank {self.number} is not its contribution to step {self.step}")
        if is_holder:
            schedule.holders.add((self.number, self.step))
            self._look_at_sums()

    def _look_at_sums(self):
        schedule, all_reduce = self.schedule, self.bound._all_reduce
        missing = [rank for rank in range(schedule.world_size) if (rank, self.step) not in schedule.started]
        if missing:
            raise Wrong(f"rank {self.number} holds sums of step {self.step}, and ranks {missing} had no part in them")
        for share, state in zip(all_reduce._shares, all_reduce._states, strict=True):
            data = self.memory[share.start : share.stop]
            if state == SUMMED and not schedule.is_sum(self.step, share.start, data):
                raise Wrong(f"share {share.number} of rank {self.number} is not the sum of step {self.step}")

    def _make_step(self):
        schedule, random = self.schedule, self.schedule.random
        spans = [*schedule.layout.spans]
        if random.random() < 0.3:
            random.shuffle(spans)
        for span in spans:
            schedule.started.add((self.number, self.step))
            self.exchange.start(span, in_background=random.random() < 0.4)
            if random.random() < 0.2:
                schedule.clock.pause(random.random() * 5e-3 * self.process.slowness)
        sums = self.exchange.wait()
        data, window = self.memory.tobytes(), schedule.windows[self.number]
        agreed = agree(self.exchange, StepStats(1.0, 1, sums.squares, np.zeros(1, np.bool_)), self.step, {})
        if agreed.weight != schedule.world_size:
            raise Wrong(f"the weights are {agreed.weight}")
        schedule.sums[self.step, self.number] = data, window
        self.note(f"has made step {self.step}")
        self.failing_since, self.tries, self.refusals = None, 0, 0
        self.step += 1
        self.exchange.begin(self.step)
        if self.step < schedule.steps:
            self._fill()

    def _fail(self, error):
        schedule = self.schedule
        self.note(f"{type(error).__name__}: {error}")
        if self.exchange is not None and not self.has_failed:
            is_ahead = self.step > min(rank.step for rank in schedule.ranks)
            schedule.first_failures.append((self.number, error, is_ahead))
            self.has_failed = True
        if self.exchange is not None:
            self.exchange.close()
        self.exchange = None
        schedule.failures.append(error)
        if self.failing_since is None:
            self.failing_since = schedule.clock.now
        self.refusals += isinstance(error, HandshakeRefused) and "is at a different step" in str(error)
        if self.refusals > 2 or schedule.clock.now - max(self.failing_since, schedule.happened_at) > PATIENCE:
            self.ended = error
            return
        if isinstance(error, HandshakeRefused) and "discard() " in str(error):
            self._discard(int(re.search(r"rank (\d+) holds sums of it", str(error))[1]))
        # Longer each time: ranks that try again in step could miss each other for good. Ranks that met are in step.
        self.tries = 1 if isinstance(error, HandshakeRefused) else self.tries + 1
        schedule.clock.pause(schedule.random.random() * 0.05 * self.tries**2)

    def _discard(self, holder):
        """Accumulate the window again, as that rank holds sums of the step."""
        if (holder, self.step) not in self.schedule.holders:
            raise Wrong(f"step {self.step} was to be accumulated again, and rank {holder} has its contribution")
        self.schedule.windows[self.number] += 1
        if self.bound is not None:
            self.bound.begin(self.step)
        self._fill()


def host(rank):
    return f"10.0.0.{rank + 1}"
