"""Wrong programs, one for each message of docs/how-to/troubleshooting.md that one process can raise."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from gradengine import GradientEngine, GradientLayout, connect, local_group
from gradengine.errors import NonFiniteGradient
from gradengine.kernels import toolchain

LAYOUT = GradientLayout.of({"weight": (2, 3), "bias": (2,)})


def gradients(**others):
    return {slot.name: np.ones(slot.shape, np.float32) for slot in LAYOUT.slots} | others


def engine(*, filled=False, **options):
    made = GradientEngine(LAYOUT, **options)
    if filled:
        made.add(gradients())
    return made


class Loop:
    """A small loop of torch: backward, then what a test does wrongly."""

    def __init__(self, dtype="float32", *, hooks=True):
        self.torch = pytest.importorskip("torch")
        from gradengine import torch as ours

        self.ours = ours
        self.model = self.torch.nn.Linear(3, 2, dtype=getattr(self.torch, dtype))
        self.engine = GradientEngine(ours.layout_of(self.model))
        self.attached = ours.attach(self.model, self.engine) if hooks else None
        self.optimizer = self.torch.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self):
        self.model(self.torch.ones(4, 3, dtype=self.model.weight.dtype)).sum().backward()

    def add(self):
        self.engine.add(self.ours.gradients_of(self.model))


def of_two_ranks(work, **options):
    """Run `work(rank, exchange)` on two ranks over TCP, and raise the first rank's error."""
    first = connect("tcp://127.0.0.1:0", rank=0, world_size=2, **options)
    exchanges = first, connect(first.url, rank=1, world_size=2, **options)

    def run(rank):
        with exchanges[rank]:
            work(rank, exchanges[rank])

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(run, rank) for rank in range(2)]
    ranks[0].result()


def lacking():
    engine().add({"weight": np.ones((2, 3), np.float32)})


def other_module():
    loop = Loop(hooks=False)
    loop.ours.attach(loop.torch.nn.ModuleDict({"module": loop.model}), loop.engine)


def not_contiguous():
    engine().add(gradients(weight=np.ones((3, 2), np.float32).T))


def short():
    short = engine(micro_batches=4)
    short.add(gradients())
    short.add(gradients())
    short.step()


def old_grad():
    loop = Loop()
    for _ in range(2):
        loop.backward()
        loop.attached.step()
        loop.optimizer.step()


def not_cleared():
    loop = Loop(hooks=False)
    for _ in range(2):
        loop.backward()
        loop.add()


def cleared_early():
    loop = Loop(hooks=False)
    loop.backward()
    loop.model.zero_grad()
    loop.add()


def optimizer_first():
    loop = Loop()
    loop.backward()
    loop.optimizer.step()


def engine_step():
    loop = Loop()
    loop.backward()
    loop.engine.step()


def not_kept():
    loop = Loop(hooks=False)
    loop.ours.attach(loop.model, loop.engine)
    loop.backward()
    loop.engine.step()


def not_finite():
    bad = engine()
    bad.add(gradients(bias=np.array([0, np.nan], np.float32)))
    bad.step()


def kept():
    bad = engine()
    bad.add(gradients(bias=np.array([0, np.nan], np.float32)))
    with contextlib.suppress(NonFiniteGradient):
        bad.step()
    bad.add(gradients())


def half_precision():
    loop = Loop("bfloat16", hooks=False)
    loop.backward()
    loop.add()
    loop.ours.give_gradients(loop.model, loop.engine.step())


def no_launcher():
    connect()


def no_secret():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADENGINE_ADDRESS", "tcp://10.0.0.1:7000")
        patch.setenv("GRADENGINE_RANK", "0")
        patch.setenv("GRADENGINE_WORLD_SIZE", "2")
        connect()


def missing_rank():
    engine(exchange=connect("tcp://127.0.0.1:0", rank=0, world_size=2, join_timeout=0.2))


def other_setting():
    of_two_ranks(lambda rank, exchange: engine(exchange=exchange, max_norm=1.0 + rank))


def other_weights():
    loops = Loop(hooks=False), Loop(hooks=False)

    def work(rank, exchange):
        loop = loops[rank]
        loop.engine.reconnect(exchange)
        loop.attached = loop.ours.attach(loop.model, loop.engine)
        loop.backward()
        loop.attached.step()

    of_two_ranks(work)


def other_step():
    def work(rank, exchange):
        late = engine()
        if rank == 0:
            for _ in range(4):
                late.add(gradients())
                late.step()
        late.reconnect(exchange)

    of_two_ranks(work)


def gone():
    def work(rank, exchange):
        joined = engine(exchange=exchange, filled=True)
        if rank == 0:
            joined.step()

    of_two_ranks(work)


def late():
    is_over = threading.Event()

    def work(rank, exchange):
        joined = engine(exchange=exchange, filled=True)
        if rank == 1:
            is_over.wait()
            return
        try:
            joined.step()
        finally:
            is_over.set()

    of_two_ranks(work, timeout=0.2)


def no_cupy():
    def refuse(name):
        raise ModuleNotFoundError(f"No module named '{name}'")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "importlib", SimpleNamespace(import_module=refuse))
        toolchain.load_cupy(0)


def other_micro_batches():
    engine(micro_batches=8).load_state_dict(engine(micro_batches=4).state_dict())


def sent():
    def save(exchange):
        engine(exchange=exchange, micro_batches=1, filled=True).state_dict()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, local_group(2)))


def other_rank():
    def save(exchange):
        return engine(exchange=exchange, filled=True).state_dict()

    with ThreadPoolExecutor(2) as pool:
        states = list(pool.map(save, local_group(2)))
        list(pool.map(lambda exchange: engine(exchange=exchange).load_state_dict(states[1]), local_group(2)))
