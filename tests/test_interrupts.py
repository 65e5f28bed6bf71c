"""Ctrl-C at any line of any call, and at random times: the step is broken, or nothing had begun, or all was over."""

import collections
import contextlib
import linecache
import random
import threading
import time
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from backends import available
from devices import assign, bits_of, current_device_kept, number_of, on_host, put_all, synchronize
from folds import Fold, accumulate
from interrupts import interrupted_at, kept_interrupt, places_of, raised_at, signalled
from ranks import on_ranks
from transports import SOON, Transport, group, on_all

from gradengine import GradientEngine, GradientLayout, local_group
from gradengine.accumulate.state import State
from gradengine.errors import CallerError, ExchangeError, HandshakeRefused, NonFiniteGradient, PeerLost, WindowError
from gradengine.kernels import CHUNK
from gradengine.kernels.decision import clip_scale
from gradengine.kernels.host import HostKernels

ONE = (np.float32(1),)


def timed(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class TestHelpers:
    """The host's helper threads: when a call has ended, however it did, they write nothing of its any more."""

    def setup_method(self):
        self.kernels = HostKernels(3)
        self.targets = [self.kernels.device.allocate(CHUNK) for _ in range(24)]
        source = self.kernels.device.view(np.ones(CHUNK, np.float32), "w")
        self.folds = [Fold(i, True, (source,), ONE) for i in range(24)]

    def accumulate(self):
        accumulate(self.kernels, self.targets, self.folds)

    def assert_nobody_writes(self):
        for target in self.targets:
            target.data[:] = 7
        time.sleep(0.002)
        assert all((target.data == 7).all() for target in self.targets)
        self.accumulate()
        assert all((target.data == 1).all() for target in self.targets)

    def test_a_call_interrupted_at_any_line_or_time(self):
        for at in places_of(self.accumulate):
            interrupted_at(at, self.accumulate)
            self.assert_nobody_writes()
        seeds, interrupts = random.Random(3), 0
        lasts = timed(self.accumulate)
        for _ in range(200):
            try:
                with signalled(seeds.uniform(0, lasts)):
                    self.accumulate()
            except KeyboardInterrupt:
                interrupts += 1
                self.assert_nobody_writes()
            if interrupts == 10:
                break
        assert interrupts > 0

    def test_a_helper_that_begins_when_all_is_over_finds_nothing_to_do(self):
        """It may have been held up by another engine's work; the caller does not wait for it."""
        gate, entered = threading.Event(), threading.Semaphore(0)

        def hold(task):
            entered.release()
            assert gate.wait(SOON)

        busy = threading.Thread(target=self.kernels._run, args=(hold, range(3), 1 << 30))
        busy.start()
        for _ in range(3):
            assert entered.acquire(timeout=SOON)
        self.accumulate()
        assert all((target.data == 1).all() for target in self.targets)
        for target in self.targets:
            target.data[:] = 7
        gate.set()
        busy.join(SOON)
        time.sleep(0.002)
        assert all((target.data == 7).all() for target in self.targets)


LAYOUT = GradientLayout.of({"layers.0.w": (3,), "head": (2,)})
DEADLINE = 20.0  # nobody waits for it unless a rank is not told; then the asserts below say so


def micro_batch(rank, window, k):
    seeds = np.random.default_rng(100 * rank + 10 * window + k)
    return [seeds.standard_normal(slot.shape, np.float32) for slot in LAYOUT.slots]


class User:
    """Two windows of two micro-batches, and what a user does about an interrupt.

    discard(), and the window anew; with other workers all of them do so, in another group.
    """

    def __init__(self, exchange=None, spares=(), way="in place", whole=True, rank=0, backend=None, **options):
        self.backend = backend or available("host")
        self.engine = GradientEngine(LAYOUT, self.backend.kernels, max_norm=0.5, exchange=exchange, **options)
        self.spares, self.way, self.whole = list(spares), way, whole
        self.rank, self.results, self.endings = max(rank, self.engine.rank), [], []

    @property
    def state(self):
        return self.engine.accumulator.state.now

    def add(self, batch, k):
        weight, last = 1.0 + k + self.rank, k == 1
        if self.whole:
            self.engine.add(batch, weight)
            return
        self.engine.add_block(0, batch[:1], weight, last=last)
        self.engine.add_non_block("head", batch[1], weight, last=last)

    def run_window(self):
        window, out = len(self.results), None
        if self.way == "out":
            out = put_all(self.backend, [np.zeros(slot.shape, np.float16) for slot in LAYOUT.slots])
        for k in range(2):
            self.add(put_all(self.backend, micro_batch(self.rank, window, k)), k)
        result = self.engine.step(out, deferred=self.way == "deferred")
        arrays = out or (result.sums if self.way == "deferred" else result.gradients).values()
        numbers = [float(result.norm), float(result.factor)]
        self.results.append([*numbers, *(on_host(array).tobytes() for array in arrays)])

    def train(self, at=None):
        """Both windows, the first one interrupted once; what the engine refuses ends them."""
        interrupted, _ = interrupted_at(at, self.attempt)
        if interrupted:
            self.go_on()
        while len(self.results) < 2:
            self.attempt()
        return self.results

    def attempt(self):
        try:
            self.run_window()
        except HandshakeRefused:
            raise
        except ExchangeError:
            if not self.spares:
                raise
            self.go_on()

    def go_on(self):
        self.endings.append(self.state.name)
        if self.engine.current_step > len(self.results):  # made, and its result was lost on the way to here
            self.results.append(None)
        if self.state is State.BROKEN:
            for call in (lambda: self.engine.add(micro_batch(0, 0, 0)), self.engine.step):
                with pytest.raises(WindowError, match="is broken: a call was interrupted"):
                    call()
        self.engine.discard()
        assert self.state is State.EMPTY
        if self.spares:
            self.engine.exchange.close()
            self.engine.reconnect(self.spares.pop(0))


def same(results, wanted):
    """Whether all that are known are the same bits; of a user that ended early, the first ones."""
    return all(result in (None, other) for result, other in zip(results, wanted, strict=False))


WAYS = [{}, {"way": "deferred", "whole": False, "hold": 3}, {"way": "out", "hold": 2, "micro_batches": 2}]


class TestOneWorker:
    @pytest.mark.parametrize("options", WAYS)
    def test_a_window_interrupted_at_any_line_is_broken_and_the_next_one_has_the_same_bits(self, options):
        wanted, endings = User(**options).train(), collections.Counter()
        for at in places_of(User(**options).run_window):
            user = User(**options)
            assert same(user.train(at), wanted), (at, user.endings)
            endings.update(user.endings)
        # The rest came before a call had begun, or after it was over.
        assert endings["BROKEN"] > 0.8 * sum(endings.values()) > 50, endings
        assert set(endings) <= {"BROKEN", "EMPTY", "OPEN"}

    def test_on_a_device_too(self, emulated):
        """Of its lines an eighth: the launchers are the emulator's to slow down."""
        wanted = User(backend=emulated, **WAYS[2]).train()
        for at in places_of(User(backend=emulated, **WAYS[2]).run_window)[::8]:
            user = User(backend=emulated, **WAYS[2])
            assert same(user.train(at), wanted), (at, user.endings)


TELL = {
    "check": lambda user, _: user.engine.check(),
    "result.check": lambda _, result: result.check(),
    "add": lambda user, _: user.engine.add(put_all(user.backend, micro_batch(0, 0, 0))),
    "step": lambda user, _: user.engine.step(),
}


class TestLateVerdicts:
    """A NaN that a GPU found: whatever call was interrupted before it told, the next one tells."""

    def of_a_bad_step(self, backend):
        """An engine after it, and its result."""
        user = User(backend=backend)
        user.engine.add([backend.put(np.full(slot.shape, np.nan, np.float32)) for slot in LAYOUT.slots])
        result = user.engine.step()
        synchronize(backend)
        return user, result

    def ends(self, call):
        with contextlib.suppress(NonFiniteGradient):
            call()

    def is_told(self, call, at=None):
        """Whether the call told, by an error or, where it was interrupted, by what the interrupt came during."""
        told = None
        try:
            interrupt = kept_interrupt(at, call)
            told = interrupt and interrupt.__context__
        except (NonFiniteGradient, WindowError) as error:
            told = error
        return isinstance(told, NonFiniteGradient) and told.step == 0

    @pytest.mark.parametrize("name", list(TELL))
    def test_are_told_after_a_call_that_was_interrupted_at_any_line(self, emulated, name):
        user, result = self.of_a_bad_step(emulated)
        places = places_of(partial(self.ends, partial(TELL[name], user, result)))
        assert not self.is_told(partial(TELL["add"], user, result)), "once"
        told_later = 0
        for at in places:
            user, result = self.of_a_bad_step(emulated)
            if not self.is_told(partial(TELL[name], user, result), at):
                told_later += 1
                assert self.is_told(partial(TELL["add"], user, result)), at
        assert told_later > 5


class TestGraphs:
    """A window that was captured: a broken replay is dropped, and a capture that broke off records nothing any more."""

    def new(self, device):
        """An engine, its gradients, which are its destinations as well, and the graph of the window."""
        engine = GradientEngine(LAYOUT, device.kernels, loss_scale=1024.0, on_non_finite="skip")
        gradients = [device.put(np.zeros(slot.shape, np.float32)) for slot in LAYOUT.slots]
        return engine, gradients, self.capture(engine, gradients)

    def capture(self, engine, gradients, out=True):
        with engine.capture() as graph:
            engine.add(gradients)
            engine.step(gradients if out else None)
        return graph

    def backward(self, gradients, value):
        for gradient in gradients:
            assign(gradient, np.float32(value))

    def test_after_a_replay_interrupted_at_any_line_the_next_one_is_right_and_its_verdict_its_own(self, emulated):
        endings = collections.Counter()
        for number, at in enumerate(places_of(self.new(emulated)[2].replay)):
            engine, gradients, graph = self.new(emulated)
            self.backward(gradients, np.nan if number % 2 else 2048)
            interrupted, _ = interrupted_at(at, graph.replay)
            if engine.has_open_window:
                with pytest.raises(WindowError, match="is broken"):
                    graph.replay()
                engine.discard()
                endings["broken"] += 1
            for value, wanted in ((1024, 1.0), (np.nan, 0.0), (3072, 3.0)):
                self.backward(gradients, value)
                step = engine.current_step
                result = graph.replay()
                assert (result.step, result.non_finite is not None) == (step, wanted == 0), at
                assert float(on_host(gradients[0]).reshape(-1)[0]) == wanted, at
            endings["interrupted"] += interrupted
        assert endings["interrupted"] > endings["broken"] > 10

    def test_a_capture_interrupted_at_any_line_records_nothing_any_more(self, emulated):
        """Also while the interrupt's traceback is kept, as a REPL does."""
        gradients = put_all(emulated, micro_batch(0, 0, 0))
        engine = GradientEngine(LAYOUT, emulated.kernels)
        engine.add(gradients)
        wanted = bits_of(engine.step())
        for at in places_of(lambda: self.capture(engine, gradients, out=False))[::3]:
            interrupt = kept_interrupt(at, lambda: self.capture(engine, gradients, out=False))
            try:
                engine.add(gradients)
            except (CallerError, WindowError) as refusal:
                assert "discard()" in str(refusal)  # noqa: PT017
                engine.discard()
                engine.add(gradients)
            assert bits_of(engine.step()) == wanted, at
            assert bits_of(self.capture(engine, gradients, out=False).replay()) == wanted, at
            del interrupt


class Pair:
    """Two workers, rank `who` on this thread. After an interrupt both begin the window anew in a new group."""

    def __init__(self, who, **options):
        self.who, self.options = who, options
        times = {"timeout": DEADLINE, "join_timeout": DEADLINE}
        self.groups = [local_group(2, **times) for _ in range(3)]
        self.users, self.ends = [None, None], [None, None]

    def run(self, work):
        """`work(user)` of both, within the deadline; what it ended with is in `ends`."""

        def run(rank):
            try:
                if self.users[rank] is None:
                    spares = [group[rank] for group in self.groups[1:]]
                    self.users[rank] = User(self.groups[0][rank], spares, **self.options)
                self.ends[rank] = work(self.users[rank])
            except (ExchangeError, WindowError) as refusal:
                self.ends[rank] = refusal
                for group in self.groups:
                    group[rank].close()

        other, started = threading.Thread(target=run, args=(1 - self.who,)), time.monotonic()
        other.start()
        run(self.who)
        other.join(4 * DEADLINE)
        assert not other.is_alive(), "the other worker hangs"
        assert time.monotonic() - started < 4 * DEADLINE
        return self

    def train(self, at=None):
        return self.run(lambda user: user.train(at if user.rank == self.who else None))

    def places(self):
        """The lines of a window that this rank runs and that run while it is joined."""
        found = self.run(lambda user: places_of(user.run_window) if user.rank == self.who else user.run_window())
        return found.ends[self.who]


class TestTwoWorkers:
    """A fifth of the lines for each rank and its way to step, the first or the last time they run."""

    @pytest.mark.parametrize(
        ("who", "options"), [(0, {}), (1, {"whole": False, "average": "per_worker", "way": "out"})]
    )
    def test_interrupted_at_any_line_no_bit_is_wrong_and_nobody_hangs(self, who, options):
        wanted = Pair(who, **options).train().ends
        endings = collections.Counter()
        for at in Pair(who, **options).places()[who::5]:
            pair = Pair(who, **options).train(at)
            for rank, (user, end) in enumerate(zip(pair.users, pair.ends, strict=True)):
                # Where the interrupt came after the step, the next window's is of another step than the other rank's.
                assert same(user.results, wanted[rank]), (at, rank, user.endings)
                endings["refused" if isinstance(end, Exception) else tuple(user.endings)] += 1
        assert endings["BROKEN",] > 5, endings
        assert endings["refused"] < sum(endings.values()) / 2, endings

    def test_a_step_interrupted_at_any_time_no_bit_is_wrong_and_nobody_hangs(self):
        wanted, seeds = Pair(0).train().ends, random.Random(0)
        for _ in range(20):
            pair = Pair(0)

            def train(user):
                if user.rank == 0:
                    with contextlib.suppress(KeyboardInterrupt), signalled(seeds.uniform(0, 0.01)):
                        user.attempt()
                    if user.engine.has_open_window:
                        user.go_on()
                    elif user.engine.current_step > len(user.results):
                        user.results.append(None)  # The interrupt came after the step, and its result was lost.
                return user.train()

            pair.run(train)
            for rank, user in enumerate(pair.users):
                assert same(user.results, wanted[rank]), (rank, user.endings, pair.ends)


class Preempted(Exception):
    """A signal handler's, derived from Exception directly."""


class Ended(BaseException):
    """Another one's, which no `except Exception` sees."""


class TestHandlers:
    """What a signal handler raises reaches the caller as it is, and what the call had begun is broken, or over."""

    def place(self, engine):
        state = engine.accumulator.state
        return engine.current_step, state.now, state.changes, engine.accumulator.accumulated_count

    def calls_of(self, engine):
        """A window's calls: the last `add` sends it, where there are other workers."""
        gradients = micro_batch(engine.rank, 0, 0)
        return [
            partial(engine.add, gradients),
            engine.state_dict,
            partial(engine.add, gradients),
            partial(engine.all_gather_object, "loss", 1.0),
            engine.step,
        ]

    def assert_whole(self, engine, at, kind):
        """Make the calls of a window up to the one that the exception ends; whether there was one."""
        fault = kind()
        for number, call in enumerate(self.calls_of(engine)):
            before = self.place(engine)
            end = raised_at(at[number], call, fault) if number in at else call()
            if number in at and fault.__traceback__ is not None:
                assert end is fault, (at, end)
                file, line, event, _ = at[number]
                is_over = event == "return" and "return method(self" in linecache.getline(file, line)
                is_over |= number == 4 and engine.current_step == 1
                assert engine.accumulator.state.now is State.BROKEN or self.place(engine) == before or is_over, at
                return True
        return False

    @pytest.mark.parametrize("kind", [Preempted, Ended])
    def test_alone_at_any_line_of_any_call(self, kind):
        engine, ended = GradientEngine(LAYOUT, micro_batches=2), 0
        places = [places_of(call) for call in self.calls_of(engine)]
        for number, of_call in enumerate(places):
            for at in of_call:
                ended += self.assert_whole(GradientEngine(LAYOUT, micro_batches=2), {number: at}, kind)
        assert ended > 0.9 * sum(map(len, places))

    @pytest.mark.parametrize("kind", [Preempted, Ended])
    @pytest.mark.parametrize("name", ["max_norm", "load_state_dict"])
    def test_a_change_between_windows_at_any_line_is_whole_or_broken(self, backend, name, kind):
        """And the bound that is read is the one that clips, on the device too, after `discard()`."""
        gradients = put_all(backend, micro_batch(0, 0, 0))

        def new_engine(max_norm):
            return GradientEngine(LAYOUT, backend.kernels, max_norm=max_norm)

        saved = new_engine(2.0)
        saved.add(gradients)
        value = {"max_norm": 2.0, "load_state_dict": saved.state_dict()}[name]
        change = setattr if name == "max_norm" else lambda engine, name, value: getattr(engine, name)(value)
        broken, places = 0, places_of(partial(change, new_engine(0.5), name, value))
        for at in places:
            engine = new_engine(0.5)
            # An interrupt where a `with` ends may leave the engine's device current.
            with current_device_kept(backend):
                raised_at(at, partial(change, engine, name, value), kind())
            state = engine.accumulator.state.now
            broken += state is State.BROKEN
            if state is State.BROKEN:
                engine.discard()
            elif name == "load_state_dict":
                assert (state, engine.max_norm) in {(State.EMPTY, 0.5), (State.OPEN, 2.0)}, at
            if state is not State.OPEN:
                engine.add(gradients)
            result = engine.step()
            assert number_of(result.scale) == np.float32(clip_scale(number_of(result.norm), engine.max_norm)), at
        assert broken > 5

    @pytest.mark.parametrize("transport", [Transport.THREADS, Transport.UNIX, Transport.TCP])
    @pytest.mark.parametrize("kind", [Preempted, Ended])
    def test_with_another_worker_that_does_not_wait(self, transport, kind):
        """At each 16th line. The other worker ends its step, or is told that this one has left."""
        times = {"timeout": DEADLINE, "join_timeout": DEADLINE}
        places = self.run(transport, times, None, kind)
        chosen = [(number, at) for number, of_call in enumerate(places) for at in of_call][(kind is Ended) * 8 :: 16]
        ended = [self.run(transport, times, {number: at}, kind) for number, at in chosen]
        assert sum(ended) > 0.8 * len(ended) > 15

    def run(self, transport, times, at, kind):
        """The places of a window's calls; or whether rank 0's call ended with the exception."""

        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange, micro_batches=2)
            if exchange.rank:
                with contextlib.suppress(PeerLost):
                    for call in self.calls_of(engine):
                        call()
                return None
            if at is None:
                return [places_of(call) for call in self.calls_of(engine)]
            started = time.monotonic()
            ended = self.assert_whole(engine, at, kind)
            exchange.close()
            assert time.monotonic() - started < DEADLINE
            return ended

        with group(transport, 2, **times) as exchanges:
            return on_all(work, exchanges)[0]


class TestOneRankAlone:
    """What one rank does about its interrupt and the others do not."""

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError, TimeoutError])
    def test_what_a_signal_handler_raises_while_a_step_waits_passes_and_the_step_is_broken(self, kind):
        spares, has_ended = local_group(2, join_timeout=DEADLINE), threading.Event()

        def work(exchange):
            user = User(exchange, [spares[exchange.rank]])
            user.add(micro_batch(exchange.rank, 0, 0), 0)
            if exchange.rank == 0:
                with (
                    patch.object(exchange._pump._link.bell, "wait", side_effect=kind("of a handler")),
                    pytest.raises(kind, match="of a handler"),
                ):
                    user.engine.step()
                assert user.state is State.BROKEN
                has_ended.set()
            else:
                has_ended.wait(SOON)
                with pytest.raises(PeerLost):
                    user.engine.step()
            user.go_on()
            return user.train()

        first, second = on_ranks(work, 2)
        assert first == second != []

    def test_a_step_that_it_dropped_is_an_error_of_the_next_one_on_both(self):
        """The others had applied its gradients: their weights would be different from then on, and nobody say so."""
        spares = local_group(2, join_timeout=DEADLINE)

        def work(exchange):
            kernels = HostKernels(1)
            engine = GradientEngine(LAYOUT, kernels, exchange=exchange)
            engine.add(micro_batch(exchange.rank, 0, 0))
            if exchange.rank == 0:
                with (
                    patch.object(kernels, "hand_back", side_effect=KeyboardInterrupt),
                    pytest.raises(KeyboardInterrupt),
                ):
                    engine.step()
                engine.discard()
            else:
                engine.step()
            engine.add(micro_batch(exchange.rank, 1, 0))
            with pytest.raises(PeerLost):
                engine.step()
            engine.reconnect(spares[exchange.rank])

        errors = on_ranks(work, 2)
        assert {type(error) for error in errors} == {HandshakeRefused}
        assert all("is at a different step" in str(error) for error in errors)


class TestJoining:
    """A rank that is interrupted while it joins is not waited for: the other hears at once, and both join anew."""

    @pytest.mark.parametrize("who", [0, 1])
    def test_interrupted_at_any_line_nobody_hangs_and_the_next_group_is_joined(self, who):
        wanted, places = self.train(who)
        for at in places[who::4]:
            started = time.monotonic()
            assert self.train(who, at)[0] == wanted, at
            assert time.monotonic() - started < 3 * DEADLINE, at

    def train(self, who, at=None):
        """Both join a group, or the next one where that is interrupted; their results, and the lines of joining."""
        times, places = {"timeout": DEADLINE, "join_timeout": DEADLINE}, []

        def work(rank):
            user = User(rank=rank, spares=[second[rank]])
            if rank == who and at is None:
                places.extend(places_of(lambda: user.engine.reconnect(first[rank])))
                return user.train()
            try:
                is_lost, _ = interrupted_at(at if rank == who else None, lambda: user.engine.reconnect(first[rank]))
            except ExchangeError:
                is_lost = True
            if is_lost:
                first[rank].close()
                user.engine.discard()
                user.engine.reconnect(user.spares.pop(0))
            return user.train()

        with group(Transport.THREADS, 2, **times) as first, group(Transport.THREADS, 2, **times) as second:
            return on_all(work, [0, 1]), places
