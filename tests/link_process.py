"""One rank of a group over MPI: `python link_process.py mpi WHAT [WHO]`; it prints what it finds.

Ranks over torch are forked, so that torch is imported once: `python link_process.py torch` reads lines of JSON, each
with the number of ranks, the file where they meet, for how many of them to wait before the rest is killed, WHAT and
WHO. It answers with their exit statuses. What a rank prints is in a file: the one where they meet, and its number.
"""

import functools
import json
import os
import signal
import sys
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
from ranks import on_grid, on_ranks

from gradengine import GradientEngine, TensorParallelConfig, connect
from gradengine.errors import CallerError, ExchangeError, PeerLost
from gradengine.exchange import addresses, torch_group
from gradengine.exchange.links.link import RECEIVE, SEND
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.pump import Pump
from gradengine.exchange.shares import shares_of
from gradengine.exchange.torch_group import DeviceCalls, device_calls_of
from gradengine.kernels import CHUNK, HostKernels
from gradengine.layout import GradientLayout

SOON, LATE = 60.0, 2.0  # seconds
LAYOUT = GradientLayout.of({f"layers.{n}.w": (CHUNK + 17 * n,) for n in range(4)} | {"head": (3, 5), "none": (0,)})


class OverMpi:
    """All ranks that mpiexec has started."""

    def __init__(self):
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD
        self.rank, self.barrier = self.world.rank, self.world.Barrier

    def link(self, part=None, timeout=SOON):
        from gradengine.exchange.links.mpi import MpiLink

        return MpiLink(part, timeout=timeout)

    def connect(self, part=None, **options):
        return connect("mpi://", **options) if part is None else connect(communicator=part, **options)

    def half(self):
        return self.world.Split(self.rank % 2, self.rank)

    def pair(self):
        return self.world.Split(self.rank // 2, self.rank)


class OverTorch:
    """All ranks of torch's default group."""

    def __init__(self, rank, size, store):
        import torch.distributed

        self.torch, self.rank, self.size = torch, rank, size
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        self.barrier = torch.distributed.barrier

    def link(self, part=None, timeout=SOON):
        part = part or self.torch.distributed.group.WORLD
        return torch_group.meeting_by_torch(part, timeout=timeout).link(timeout)

    def connect(self, part=None, **options):
        with self.torch.device("meta"):  # a user's default device is not gloo's
            return connect(process_group=part or self.torch.distributed.group.WORLD, **options)

    def half(self):
        # In another order than torch's own.
        halves = [self.torch.distributed.new_group([*range(first, self.size, 2)][::-1]) for first in (0, 1)]
        return halves[self.rank % 2]

    def pair(self):
        return [self.torch.distributed.new_group([one, one + 1]) for one in range(0, self.size, 2)][self.rank // 2]


def forked():
    """Start the ranks that are asked for, until there are no more lines; in a rank: its group, what to do, and who."""
    import torch.distributed  # noqa: F401  (once for all)

    for line in sys.stdin:
        size, store, last, what, *who = json.loads(line)
        ranks = []
        for rank in range(size):
            ranks.append(os.fork())
            if not ranks[-1]:
                os.dup2(os.open(f"{store}{rank}", os.O_CREAT | os.O_WRONLY), 1)
                return OverTorch(rank, size, store), what, who
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks[:last]]
        for rank in ranks[last:]:
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
        say(json.dumps(statuses))
    sys.exit()


def say(words):
    os.write(1, f"{words}\n".encode())  # in one write, so that ranks do not come between


def parts_of(layout, world_size, seed):
    parts = np.zeros((world_size, layout.arena_size), np.float32)
    for slot in layout.slots:
        part = parts[:, slot.offset : slot.stop]
        part[:] = np.random.default_rng([seed, slot.offset]).standard_normal(part.shape, np.float32)
    return parts


def reduced(link, parts, owner=None, bucket_bytes=1 << 17):
    """The pump of one rank, which has started nothing."""
    arena = parts[link.rank].copy()
    shares = shares_of(LAYOUT, link.world_size, bucket_bytes, owner=owner)
    all_reduce = OrderedAllReduce(link.rank, link.world_size, LAYOUT, shares, arena, HostKernels(threads=1))
    pump = Pump(link)
    pump.run(all_reduce)

    def start(*spans):
        with pump.lock:
            all_reduce.start(*spans)
            pump.wake(in_background=True)

    return arena, pump, start, all_reduce


def sums(part=None):
    """Steps on a mesh and on a star, with gathers between them, beside messages of the user's own."""
    for is_star in (False, True):
        link = GROUP.link(part)
        owner, bucket_bytes = (link.world_size - 1, 4) if is_star else (None, 1 << 17)
        steps = [parts_of(LAYOUT, link.world_size, seed) for seed in range(3)]
        arena, pump, start, all_reduce = reduced(link, steps[0], owner, bucket_bytes)
        for parts in steps:
            arena[:] = parts[link.rank]
            for span in LAYOUT.spans:
                start(span)
            GROUP.barrier()
            pump.wait(SOON)
            assert arena.tobytes() == functools.reduce(np.add, parts).tobytes()
            told = [bytes([rank]) * 5000 * rank for rank in range(link.world_size)]
            assert pump.gather(told[link.rank], SOON) == told
            with pump.lock:
                all_reduce.next_step()
        pump.close()
    say("the same")


def calls():
    """The calls of the group, on the host's tensors, as on a GPU's; gloo wants all parts to have one size."""
    torch, group = GROUP.torch, GROUP.half()
    moving, ranks = DeviceCalls(group), torch.distributed.get_process_group_ranks(group)
    mine, count, size = torch.distributed.get_rank(group), len(ranks), 5
    tensor, rows = (moving.tensor(np.arange(100, dtype=np.float32) + offset) for offset in (1000 * mine, 0))
    parts = [tensor[7 * rank : 7 * rank + size] for rank in range(count)]
    moving.all_to_all([rows[size * rank : size * (rank + 1)] for rank in range(count)], parts, None)
    wanted = [np.arange(7 * mine, 7 * mine + size, dtype=np.float32) + 1000 * rank for rank in range(count)]
    assert np.array_equal(rows[: size * count].numpy(), np.concatenate(wanted))
    assert device_calls_of(group) is None  # whose backend is gloo
    with pytest.raises(PeerLost, match="the process group failed"):
        moving.all_to_all(parts, [tensor] * count, None)
    say("the same")


def part():
    """Each half of the ranks is a group."""
    sums(GROUP.half())


def gradients_of(layout, *seed):
    return {
        slot.name: np.random.default_rng([*seed, slot.offset]).standard_normal(slot.shape, np.float32)
        for slot in layout.slots
    }


def figures(result):
    """All that a step gives, bit for bit."""
    held = {name: array.tobytes() for name, array in result.gradients.items()}
    return result.norm, result.scale, float(result.factor), result.weight, result.component_norms, held


def steps(exchange, micro_batches=None, before_telling=lambda: None):
    """Steps of an engine, with weights; the last rank has no micro-batch in the second, unless it is alone.

    Before that rank sends anything of this step it tells something, as a trainer its loss: others behind their spans.
    """
    engine, found = GradientEngine(LAYOUT, exchange=exchange, micro_batches=micro_batches, max_norm=1.0), []
    for step in range(3):
        if step == 1 and 0 < exchange.rank == exchange.world_size - 1:
            engine.add(None, weight=0)
        else:
            for k in range(2):
                engine.add(gradients_of(LAYOUT, step, exchange.rank, k), weight=1 + exchange.rank + 2 * k)
        before_telling()
        assert engine.all_gather_object(f"the step of {step}", step) == [step] * exchange.world_size
        found.append(figures(engine.step()))
    return found


def collectives():
    """The same over the all-to-all that the group has; a rank that does not take part is an error on all others."""
    engine(link="collectives")
    with GROUP.connect(GROUP.half(), timeout=SOON, link="collectives") as half:
        assert half.link == "collectives"
        assert steps(half) == on_ranks(steps, half.world_size)[half.rank]


def engine(**options):
    """Engines over this group find what they find over threads, whatever the buckets."""
    for micro_batches in (None, 2):
        expected = None
        for bucket_bytes in (4, 3 << 18, 1 << 21):
            with GROUP.connect(timeout=SOON, bucket_bytes=bucket_bytes, **options) as exchange:
                if expected is None:
                    over_threads = functools.partial(steps, micro_batches=micro_batches)
                    expected = on_ranks(over_threads, exchange.world_size)[exchange.rank]
                assert steps(exchange, micro_batches, GROUP.barrier) == expected
                assert exchange.url == "mpi://" or isinstance(GROUP, OverTorch)
    say("the same")


def grid():
    """Two parts of each of two models: a group over the workers, and one over the parts, at once."""

    def work(workers, parts):
        config = TensorParallelConfig(parts.rank, 2, 16, 24, 4, 4)
        layout = GradientLayout.transformer(2, 16, 16, 24, 12, tensor_parallel=config)
        engine = GradientEngine(layout, exchange=workers, tp_exchange=parts, max_norm=1.0)
        found = []
        for step in range(3):
            mine, alike = (gradients_of(layout, step, workers.rank, part) for part in (parts.rank, 0))
            replicated = {slot.name for slot in layout.slots if slot.partition == "replicated"}
            engine.add({name: (alike if name in replicated else mine)[name] for name in mine})
            found.append(figures(engine.step()))
        return found

    with GROUP.connect(GROUP.half(), timeout=SOON) as workers, GROUP.connect(GROUP.pair(), timeout=SOON) as parts:
        assert (workers.rank, parts.rank) == (divmod(GROUP.rank, 2))
        assert work(workers, parts) == on_grid(work, 2, 2)[workers.rank][parts.rank]
    say("the same")


def reconnects():
    """A rank leaves in the middle of a step; all join again over the same group, and end with the same bytes."""

    def step(exchange, disturb=lambda engine: None):
        engine = GradientEngine(LAYOUT, exchange=exchange, max_norm=1.0)
        for k in range(2):
            engine.add(gradients_of(LAYOUT, exchange.rank, k))
        disturb(engine)
        return figures(engine.step())

    def disturb(engine):
        if engine.rank == 1:
            engine.exchange.close()
        with pytest.raises(ExchangeError):
            engine.step()
        engine.exchange.close()
        engine.reconnect(GROUP.connect(timeout=SOON, join_timeout=SOON))

    expected = on_ranks(step, 3)
    assert step(GROUP.connect(timeout=SOON), disturb) == expected[GROUP.rank]
    say("the same")


def meets(link=None, host=None):
    """How ranks are linked that meet by a process group of torch, and where; with a host as if each were on its own."""
    if host:
        torch_group.this_host = addresses.this_host = lambda: str(GROUP.rank)
        torch_group._host_of_gloo = lambda: host
    with GROUP.connect(link=link) as exchange:
        GradientEngine(LAYOUT, exchange=exchange)
        say(f"{exchange.link} {urlsplit(exchange.url).hostname}")
        exchange.barrier()


def arguments():
    """What contradicts the group, or is no group, is refused on all ranks; then it is as if nothing had been given."""
    size = GROUP.connect().world_size
    parts = [-100, "world", size]
    if isinstance(GROUP, OverTorch):
        parts.append(GROUP.torch.distributed.new_group([0, 1]))
        GROUP.torch.distributed.destroy_process_group(parts[-1])
    wrong = [{"rank": GROUP.rank}, {"rank": str(GROUP.rank)}, {"world_size": size}]
    refused = [(given, "takes no (rank|world_size); leave") for given in wrong]
    bad = {"timeout": 0, "join_timeout": float("nan"), "bucket_bytes": 3}
    refused += [({name: value}, f"{name} is ") for name, value in bad.items()]
    refused += [({"part": part}, "not (a torch process group|an intracommunicator) that contains") for part in parts]
    for given, words in refused:
        with pytest.raises(CallerError, match=words):
            GROUP.connect(**given)
    with GROUP.connect(timeout=SOON, join_timeout=SOON) as exchange:
        assert (exchange.rank, exchange.world_size) == (GROUP.rank, size)
        GradientEngine(LAYOUT, exchange=exchange)
        with pytest.raises(CallerError, match="is bound already"):
            GradientEngine(LAYOUT, exchange=exchange)
        exchange.barrier()
    say("the same")


def step_fails(what, who):
    """One rank does not go on in the middle of an engine's step; the others say what they are told, and raise it."""
    exchange = GROUP.connect(timeout=LATE if what in {"stopped", "late"} else SOON)
    engine = GradientEngine(LAYOUT, exchange=exchange, micro_batches=2)
    for k in range(2):
        engine.add(gradients_of(LAYOUT, exchange.rank, k))
    engine.step()
    engine.add(gradients_of(LAYOUT, exchange.rank, 2))
    GROUP.barrier()
    if exchange.rank == who:
        end(what)
    engine.add(gradients_of(LAYOUT, exchange.rank, 3))
    engine.step()


def end(what):
    """Not go on, in one way or another."""
    if what == "raises":
        raise KeyError("of the rank's own")
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def until(link, count, over=None):
    over = [] if over is None else over
    while len(over) < count:
        over += link.poll()
    return over


def moves():
    """What a link promises, between two ranks."""
    link = GROUP.link()
    other = 1 - link.rank
    for dtype in ("float32", "float64", "uint8"):
        for size in (0, 1, 33, 3_000_000):
            source, sink = np.arange(size).astype(dtype) + link.rank, np.zeros(size, dtype)
            link.send(other, 7, source)
            link.receive(other, 7, sink)
            assert {*until(link, 2)} == {(kind, other, 7) for kind in (SEND, RECEIVE)}
            assert np.array_equal(sink, np.arange(size).astype(dtype) + other)
    assert link.poll() == []
    if link.rank == 0:
        link.send(1, 1, np.ones(2))
        link.send(1, 2, np.ones(1_000_000))
        assert len(until(link, 2)) == 2
        link.close()
    else:
        sinks = np.zeros(2), np.zeros(1_000_000), np.zeros(3)
        for tag, sink in enumerate(sinks, start=1):
            link.receive(0, tag, sink)
        over = []
        with pytest.raises(PeerLost, match="rank 0 is gone: it has closed its link"):
            until(link, 3, over)
        assert {*over} == {(RECEIVE, 0, 1), (RECEIVE, 0, 2)}
        assert sinks[0].all()
        assert sinks[1].all()
    say("the same")


def other_size():
    """A rank that sends less than is received is named."""
    link = GROUP.link()
    if link.rank == 0:
        link.send(1, 4, np.ones(2))
        until(link, 1)
    else:
        link.receive(0, 4, np.zeros(3))
        until(link, 1)


def fails(what, who):
    """One rank does not go on; the others say what they are told, and raise it."""
    if what == "joins-late" and GROUP.rank == who:
        time.sleep(3600)
    link = GROUP.link(timeout=LATE if what == "joins-late" else SOON)
    _, pump, start, _ = reduced(link, parts_of(LAYOUT, link.world_size, 1))
    start(LAYOUT.spans[0])
    if link.rank == who:
        GROUP.barrier()
        end(what)
    for span in LAYOUT.spans[1:]:
        start(span)
    GROUP.barrier()
    try:
        pump.wait(LATE if what in {"stopped", "late"} else SOON)
    finally:
        if what != "late":  # nor is it closed where one forgets to
            pump.close()


if __name__ == "__main__":
    GROUP, what, who = (OverMpi(), sys.argv[2], sys.argv[3:]) if sys.argv[1] == "mpi" else forked()
    works = {"sums": sums, "part": part, "moves": moves, "other-size": other_size, "meets": meets, "calls": calls}
    works |= {
        "engine": engine,
        "grid": grid,
        "arguments": arguments,
        "reconnects": reconnects,
        "collectives": collectives,
    }
    works |= {"meets-afar": lambda host: meets(host=host)}
    try:
        if what in works:
            works[what](*who)
        elif what.startswith("step-"):
            step_fails(what.removeprefix("step-"), int(*who))
        else:
            fails(what, int(*who))
    except Exception as fault:
        say(f"rank {GROUP.rank}: {type(fault).__name__}: {fault}")
        raise
