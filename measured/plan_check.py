"""Is `gradengine plan` right? What it predicts for one machine beside what runs there measure, and the error.

Run: python measured/plan_check.py [--rounds 15] [--json measured/results/cpu-2core-plan.json]

The machine's constants (rate of a link between two processes, of an owner's sum, of a copy) are measured in the same
interleaved rounds as the exchanges that they predict, by the classes that `--one-machine` uses. Every prediction is the
figure that the command prints with `--one-machine`. "backward" is a wait of known length: a GPU that is elsewhere.
Medians; error = predicted / measured - 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plan_workers import Footprint, Stepper, served
from rich.console import Console
from rich.table import Table

from gradengine.bench.machine import load, machine, versions
from gradengine.bench.workers import Crew, ExchangeReduction, ThreadReductions, free_port, span_layout
from gradengine.errors import GradientError
from gradengine.exchange import GradientServer
from gradengine.plan.machine import (
    Rates,
    Sum,
    on_one_machine,
    overlap_on_one_machine,
    pairs,
    rates_of,
)
from gradengine.plan.prediction import row_bytes
from gradengine.plan.traffic import ready_shares, span_bytes

TOLERANCE = 1e-5
REST_SECONDS = 0.03
LINKS = {"tcp://": "tcp", "unix://": "unix", "shared memory": "shared_memory"}  # transports of processes -> `link=`


@dataclass(frozen=True)
class Check:
    """One prediction and what was measured; seconds or bytes."""

    kind: str
    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How far the prediction is off, relative to what was measured."""
        return self.predicted / self.measured - 1


# ---- rounds ----


def timed(run: Callable[[], object], prepare: Callable[[], object]) -> dict[str, float]:
    """One sample: what `run` says that it took, or else how long it took."""
    prepare()
    start = time.perf_counter()
    said = run()
    return said if isinstance(said, dict) else {"seconds": time.perf_counter() - start}


def medians(cases: dict[str, tuple[Callable[[], object], Callable[[], object]]], rounds: int) -> dict[str, Any]:
    """Run all in turn, `rounds` times after one round that is dropped: case -> figure -> median."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (run, prepare) in cases.items():
            time.sleep(REST_SECONDS)
            sample = timed(run, prepare)
            if number:
                samples[name].append(sample)
    return {
        name: {figure: statistics.median(sample[figure] for sample in taken) for figure in taken[0]}
        for name, taken in samples.items()
    }


@contextmanager
def crews(builds: dict[str, Callable[[], Crew]]) -> Iterator[dict[str, Crew]]:
    """The crews, until the context ends."""
    with ExitStack() as stack:
        made = {}
        for name, build in builds.items():
            made[name] = build()
            stack.callback(made[name].close)
        yield made


def rates(found: dict[str, Any], elements: int) -> Rates:
    """The constants that one run measured."""
    links = {name: found[name]["seconds"] for name in LINKS.values() if name in found}
    return rates_of(found["owner"] | links, elements)


# ---- the exchange ----


def exchange_checks(workers: int, elements: int, rounds: int) -> tuple[list[Check], Rates]:
    """Each transport: predicted from the constants of the same rounds. The server is a thread of this process."""
    with TemporaryDirectory(prefix="gradengine-plan-") as name, GradientServer(workers) as server:
        builds: dict[str, Callable[[], Crew]] = pairs(Path(name), elements)
        for transport, link in LINKS.items():
            if link in builds:
                url = f"tcp://127.0.0.1:{free_port()}"  # ranks of one host find each other there too
                build = partial(ExchangeReduction.over, url, link, workers, elements)
                builds[transport] = partial(Crew, build, workers)
        builds["served"] = partial(Crew, partial(served, server.url, workers, elements), workers)
        builds["threads"] = partial(Crew, partial(ThreadReductions, workers, elements), 1)
        with crews(builds) as made:
            for variant, crew in made.items():
                refuse_wrong(variant, crew)
            cases: dict[str, Any] = {variant: (crew.run, crew.prepare) for variant, crew in made.items()}
            found = medians(cases | {"owner": (Sum(elements).run, lambda: None)}, rounds)
    known = rates(found, elements)
    what = f"{workers} workers, {4e-6 * elements:.0f} MB, "
    checks = [
        Check("exchange", what + name, "s", seconds, found[name]["seconds"])
        for name, seconds in predicted_exchanges(known, elements, workers).items()
    ]
    return checks, known


def predicted_exchanges(known: Rates, elements: int, workers: int) -> dict[str, float]:
    """Transport -> its seconds by `--one-machine`."""
    spans = span_bytes(span_layout(elements))
    return {name: on_one_machine(name, spans, workers, known).seconds for name in known.transports("cpu")}


def refuse_wrong(variant: str, crew: Crew) -> None:
    """Nothing is timed that computes something else."""
    crew.prepare()
    crew.run()
    error = crew.error()
    if not error <= TOLERANCE:
        raise GradientError(f"'{variant}' computes something else", got=error, expected=f"at most {TOLERANCE}")


# ---- overlap ----


def overlap_checks(elements: int, backwards: Sequence[float], rounds: int, workers: int = 2) -> list[Check]:
    """What a step waits after backward, for backwards of several lengths."""
    with TemporaryDirectory(prefix="gradengine-plan-") as name:
        folder = Path(name)
        builds: dict[str, Callable[[], Crew]] = pairs(folder, elements)
        for backward in backwards:
            url = f"tcp://127.0.0.1:{free_port()}"
            builds[shown(backward)] = partial(Crew, partial(Stepper, url, workers, elements, backward), workers)
        with crews(builds) as made:
            cases: dict[str, Any] = {n: (made[n].run, made[n].prepare) for n in LINKS.values() if n in made}
            cases |= {n: (partial(slowest, made[n]), lambda: None) for n in map(shown, backwards)}
            found = medians(cases | {"owner": (Sum(elements).run, lambda: None)}, rounds)
    known = rates(found, elements)
    return [
        Check(
            "overlap",
            f"{workers} workers, {4e-6 * elements:.0f} MB, {shown(backward)}: what the step waits",
            "s",
            predicted_wait(known, elements, workers, backward),
            found[shown(backward)]["exposed"],
        )
        for backward in backwards
    ]


def predicted_wait(known: Rates, elements: int, workers: int, backward: float) -> float:
    """What `--one-machine` prints as exposed for tcp://."""
    layout = span_layout(elements)
    spans, shares = span_bytes(layout), ready_shares(layout)
    traffic = on_one_machine("tcp://", spans, workers, known)
    return overlap_on_one_machine(shares, backward, spans, traffic, workers, known).exposed_seconds


def slowest(crew: Crew) -> dict[str, float]:
    """The largest figure of any rank."""
    found = crew.tell("run")
    return {name: max(rank[name] for rank in found) for name in found[0]}


def shown(backward: float) -> str:
    """A backward's length."""
    return f"backward {1e3 * backward:.0f} ms"


# ---- memory ----


def memory_checks(elements: int, worlds: Sequence[int]) -> list[Check]:
    """The arena alone; and beside it the rows of rank 0 and of the last rank."""
    layout, megabytes = span_layout(elements), f"{4e-6 * elements:.0f} MB"
    checks = []
    for workers in worlds:
        url = None if workers == 1 else f"tcp://127.0.0.1:{free_port()}"
        with crews({"grown": partial(Crew, partial(Footprint, url, workers, elements), workers)}) as made:
            grown = made["grown"].tell("run")
        places = {0: "rank 0"} if workers == 1 else {0: "rank 0", workers - 1: f"rank {workers - 1}"}
        for rank, name in places.items():
            predicted = layout.nbytes + row_bytes(layout, workers)[0]
            if grown[rank] is not None:
                checks.append(Check("memory", f"{workers} workers, {megabytes}, {name}", "B", predicted, grown[rank]))
    return checks


# ---- the report ----


def medians_of_error(checks: Sequence[Check]) -> dict[str, float]:
    """Kind, or transport of an exchange -> the median of its errors' sizes."""
    kinds: dict[str, list[float]] = {}
    for check in checks:
        transport = check.what.rpartition(", ")[2] if check.kind == "exchange" else ""
        kinds.setdefault(f"{check.kind} {transport}".strip(), []).append(abs(check.error))
    return {kind: statistics.median(errors) for kind, errors in kinds.items()}


def report(checks: Sequence[Check], known: Sequence[Rates], parameters: dict[str, Any]) -> dict[str, Any]:
    """Everything, in plain types."""
    return {
        "benchmark": "plan",
        "parameters": parameters,
        "machine": machine(),
        "versions": versions(),
        "load": parameters.pop("load", None),
        "rates": [asdict(each) for each in known],
        "checks": [asdict(check) | {"error": check.error} for check in checks],
        "median_absolute_error": medians_of_error(checks),
    }


def table_of(checks: Sequence[Check]) -> Table:
    """Predicted, measured, error."""
    table = Table("what", title="gradengine plan, and this machine")
    for header in ("predicted", "measured", "error"):
        table.add_column(header, justify="right")
    for check in checks:
        scale, unit = (1e3, "ms") if check.unit == "s" else (1e-6, "MB")
        figures = (f"{scale * value:.1f} {unit}" for value in (check.predicted, check.measured))
        table.add_row(f"{check.kind}: {check.what}", *figures, f"{check.error:+.0%}")
    for kind, error in medians_of_error(checks).items():
        table.add_row(f"median, {kind}", "", "", f"{error:.0%}")
    return table


def main() -> None:
    """Measure, show, and write where it is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[8, 32, 100])
    parser.add_argument("--backward-ms", type=float, nargs="+", default=[25, 50, 100, 200])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = [max(1, round(megabytes * 1e6 / 128)) * 32 for megabytes in arguments.megabytes]
    before, checks, known = load(), [], []
    for workers in arguments.workers:
        for elements in sizes:
            found, measured = exchange_checks(workers, elements, arguments.rounds)
            checks += found
            known.append(measured)
    checks += overlap_checks(sizes[-1], [1e-3 * b for b in arguments.backward_ms], arguments.rounds)
    checks += memory_checks(sizes[-1], [1, *arguments.workers])
    Console().print(table_of(checks))
    if arguments.json:
        parameters = {name: value for name, value in vars(arguments).items() if name != "json"} | {"load": before}
        arguments.json.write_text(json.dumps(report(checks, known, parameters), indent=1) + "\n")


if __name__ == "__main__":
    main()
