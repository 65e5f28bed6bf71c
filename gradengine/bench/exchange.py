"""`bench exchange`: W workers on this machine sum one gradient set.

Bytes counted, for every variant alike: 2 (W - 1) sets, what crosses between workers in a star as in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from gradengine.bench.case import Case, Variant
from gradengine.bench.device import Host
from gradengine.bench.workers import (
    Crew,
    ExchangeReduction,
    GlooReduction,
    ProcessCrew,
    Reduction,
    SocketReduction,
    ThreadCrew,
    free_port,
)
from gradengine.exchange import local_group

__all__ = ["exchange_variants"]


@contextmanager
def exchange_variants(host: Host, world_size: int, elements: int) -> Iterator[list[Variant]]:
    """Ours over TCP, over a Unix socket and between threads; a star of sockets by hand; and gloo.

    All but the threads run in processes, which live until the context ends; the set is a multiple of 32 elements.
    """
    size = (world_size, elements)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gradengine-bench-")))

        def variant(name: str, build: Callable[[], Crew]) -> Variant:
            def case() -> Case:
                crew = build()
                stack.callback(crew.close)
                return Case(crew.run, crew.error, crew.prepare)

            return Variant(name, 2 * (world_size - 1) * 4 * elements, case, base=name.startswith("ours"))

        def processes(build: Callable[..., Reduction], *where: object) -> Crew:
            return ProcessCrew(partial(build, *where, *size), world_size)

        def threads() -> Crew:
            exchanges = local_group(world_size)
            return ThreadCrew(lambda rank: ExchangeReduction(exchanges[rank], elements), world_size)

        def gloo() -> Crew:
            assert host.torch  # or it is missing
            return processes(GlooReduction, str(folder / "gloo"))

        yield [
            variant("ours tcp://", lambda: processes(ExchangeReduction.over, f"tcp://127.0.0.1:{free_port()}")),
            variant("ours unix://", partial(processes, ExchangeReduction.over, f"unix://{folder / 'socket'}")),
            variant("ours threads", threads),
            variant("sockets by hand", lambda: processes(SocketReduction, ("127.0.0.1", free_port()))),
            variant("torch gloo", gloo),
        ]
