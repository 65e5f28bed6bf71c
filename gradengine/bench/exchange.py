"""`bench exchange`: W workers on this machine sum one gradient set.

Bytes counted, for every variant alike: 2 (W - 1) sets, what crosses between workers in a star as in a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from gradengine.bench.case import Absent, Case
from gradengine.bench.crew import Crew, ProcessCrew, ThreadCrew
from gradengine.bench.reduction import ExchangeReduction, GlooReduction, SocketReduction, free_port
from gradengine.bench.torch_peers import without_torch
from gradengine.exchange import local_group

__all__ = ["exchange_cases"]


@contextmanager
def exchange_cases(world_size: int, elements: int) -> Iterator[list[Case | Absent]]:
    """Ours between threads, over TCP and over a Unix socket; a star of sockets by hand; and gloo.

    All but the first run in processes, which live until the context ends.

    Args:
        world_size: Workers.
        elements: fp32 elements of the set, a multiple of 32.

    Raises:
        ExchangeError: A group could not be built.
    """
    size = (world_size, elements)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gradengine-bench-")))

        def case(variant: str, crew: Crew, *, ours: bool = False) -> Case:
            stack.callback(crew.close)
            nbytes = 2 * (world_size - 1) * 4 * elements
            return Case("exchange", variant, nbytes, crew.run, crew.error, crew.prepare, ours=ours)

        def over(url: str) -> Crew:
            return ProcessCrew(partial(ExchangeReduction.over, url, *size), world_size)

        exchanges = local_group(world_size)
        threads = ThreadCrew(lambda rank: ExchangeReduction(exchanges[rank], elements), world_size)
        by_hand = ProcessCrew(partial(SocketReduction, ("127.0.0.1", free_port()), *size), world_size)
        cases: list[Case | Absent] = [
            case("ours tcp://", over(f"tcp://127.0.0.1:{free_port()}"), ours=True),
            case("ours unix://", over(f"unix://{folder / 'socket'}"), ours=True),
            case("ours threads", threads, ours=True),
            case("sockets by hand", by_hand),
        ]
        absent = without_torch("torch gloo")
        if not absent:
            gloo = ProcessCrew(partial(GlooReduction, str(folder / "gloo"), *size), world_size)
            cases.append(case("torch gloo", gloo))
        yield [*cases, *absent]
