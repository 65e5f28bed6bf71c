"""What only a device can answer: `python measured/gpu_settle.py [question ...]`, each in a process of its own.

One that ends badly may lose the device for its process. The answers so far are in the file of --json after each.
`--small` asks those that tests/real_cupy can answer, at sizes for it.
"""

import argparse
import gc
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import gpu_nccl
import gpu_rules
from gpu_results import write_whole

from gradengine import (
    GradientEngine,
    GradientLayout,
    PerBlockGradientAccumulator,
    RawBuffer,
    clip_by_global_norm,
    local_group,
)
from gradengine.errors import DeviceFailed
from gradengine.exchange import Exchange

ROOT = Path(__file__).parent.parent
LIMIT = 60.0  # seconds for one question
PASSED, FAILED, TIMED_OUT, ABSENT = "passed", "failed", "timed out", "absent"
BAD = {FAILED, TIMED_OUT}
NOT_HERE = 3  # exit status of a question that cannot be asked here

ELEMENTS = 5000
BEYOND = 2**31 + 17
BF16_ONE, BF16_TWO = 0x3F80, 0x4000


class NotHere(Exception):
    """This question cannot be asked on this machine."""


class Surprise(Exception):
    """The answer is another one than ours relies on."""


def expect(found: object, expected: object) -> None:
    """Raise `Surprise` unless both are equal."""
    if found != expected:
        raise Surprise(f"got {found}, expected {expected}")


def cupy():
    """CuPy, which the answers are about."""
    return importlib.import_module("cupy")


def engine_of(shapes, **options) -> GradientEngine:
    """An engine on the first GPU."""
    return GradientEngine(GradientLayout.of(shapes), "cuda", **options)


# ---- graphs ----


def first_launch_in_capture() -> None:
    """Kernels whose very first launch in a process is recorded in a graph, as CUDA loads them then, or before."""
    gradients = [cupy().asarray(np.full(size, value, np.float32)) for size, value in ((ELEMENTS, 1), (7, 2))]
    engine = engine_of([(ELEMENTS,), (7,)], max_norm=1.0, micro_batches=2)
    with engine.capture() as graph:
        for _ in range(2):
            engine.add(gradients)
        engine.step()
    norms = {float(graph.replay().norm) for _ in range(2)}
    expect([f"{norm:.4f}" for norm in norms], [f"{math.sqrt(ELEMENTS + 4 * 7):.4f}"])


def large_and_table_arguments(size: int = 33, replays: int = 3) -> None:
    """4,000 addresses as arguments of a kernel, 6,000 in memory: eager, and replayed while the pool is churned."""
    xp = cupy()
    for tensors in (1000, 1500):
        batches = [[xp.full(size, number, np.float32) for _ in range(tensors)] for number in (1, 2, 3, 4)]
        engine = engine_of([(size,)] * tensors, micro_batches=4, hold=4)

        def window(engine=engine, batches=batches) -> object:
            for gradients in batches:
                engine.add(gradients)
            return engine.step()

        def means(result) -> set[float]:
            return set(xp.concatenate(list(result.gradients.values())).get().tolist())

        expect(means(window()), {2.5})
        with engine.capture() as graph:
            window()
        for _ in range(replays):
            churned = [xp.full(10_000 + number, np.nan, np.float32) for number in range(20)]
            expect(means(graph.replay()), {2.5})
            del churned


@contextmanager
def captured_by_another() -> Iterator[None]:
    """A graph that somebody else records, in the mode in which torch does; `Surprise` if that is void at the end."""
    why: list[str] = []
    try:
        with gpu_rules.recorded(cupy()) as (_, why):
            yield
    finally:
        if why:
            raise Surprise(f"the other's capture is void: {why[0]}")


def stepping_beside_a_capture() -> None:
    """One thread steps while another records a graph of its own: that graph is not void, nor is the step refused."""
    gradients, engine = [cupy().ones(ELEMENTS, np.float32)], engine_of([(ELEMENTS,)], max_norm=1.0)
    faults: list[Exception] = []

    def step() -> None:
        try:
            engine.add(gradients)
            engine.step()
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is the answer)
            faults.append(fault)

    step()
    thread = threading.Thread(target=step)
    with captured_by_another():
        thread.start()
        thread.join()
    expect(faults, [])


def collected_in_a_capture() -> None:
    """An engine that garbage collection finds while somebody records a graph does not void that graph."""
    xp = cupy()
    engine, gradients = engine_of([(ELEMENTS,)], max_norm=1.0), [xp.ones(ELEMENTS, np.float32)]
    with xp.cuda.Stream(non_blocking=True):
        engine.add(gradients)
        engine.step()
    cycle: list[object] = [engine]
    cycle.append(cycle)
    del engine, cycle
    with captured_by_another():
        gc.collect()


def rules_of_capture() -> None:
    """Which of the calls that ours makes are refused, or void the graph that another thread records: a table."""
    print(*gpu_rules.lines(gpu_rules.table(cupy())), sep="\n")


# ---- faults ----


def lost_device_is_told() -> None:
    """After somebody's illegal access each call that needs the device raises `DeviceFailed`, whichever comes first."""
    xp = cupy()
    calls = _calls_of_engines([xp.ones(ELEMENTS, np.float32)])
    xp.RawKernel('extern "C" __global__ void bad() { *(volatile int*)8 = 1; }', "bad")((1,), (1,), ())
    with suppress(xp.cuda.runtime.CUDARuntimeError):
        xp.cuda.runtime.deviceSynchronize()  # it tells CuPy, and none of ours
    told = {name: _raised_by(call) for name, call in calls.items()}
    said = "; ".join(f"{name}: {what}" for name, what in told.items())
    if set(told.values()) != {DeviceFailed.__name__}:
        raise Surprise(said)
    print(said)


def _calls_of_engines(gradients: list) -> dict[str, Callable[[], object]]:
    """A call of each kind, of an engine of its own that is ready for it: what one engine knows another does not."""

    def made(adds: int = 1, steps: int = 1) -> GradientEngine:
        engine = engine_of([(ELEMENTS,)], max_norm=1.0)
        for _ in range(steps):
            engine.add(gradients)
            engine.step()
        for _ in range(adds - steps):
            engine.add(gradients)
        return engine

    captured = made()
    with captured.capture() as graph:
        captured.add(gradients)
        captured.step()
    graph.replay()
    clip_by_global_norm(gradients, 1.0)
    return {
        "latest_verdict": partial(getattr, made(), "latest_verdict"),
        "add": partial(made().add, gradients),
        "step": made(adds=2).step,
        "replay": graph.replay,
        "check": made().check,
        "clip_by_global_norm": partial(clip_by_global_norm, gradients, 1.0),
        "discard": made(adds=2).discard,
        "state_dict": made().state_dict,
    }


def _raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as fault:  # noqa: BLE001  (whatever it is, it is the answer)
        return type(fault).__name__
    return "nothing"


# ---- numbers ----


def bits_of_the_cpu() -> None:
    """Every fp16 and bf16 pattern, and subnormal sums and products: the CPU's bits."""
    every, tiny = np.arange(1 << 16, dtype=np.uint16), np.arange(1, 1 + (1 << 16), dtype=np.uint32).view(np.float32)
    on_cpu = _accumulated("cpu", np.asarray, lambda array: array.ctypes.data, every, tiny)
    on_gpu = _accumulated("cuda:0", cupy().asarray, lambda array: array.data.ptr, every, tiny)
    for name, expected in on_cpu.items():
        found = on_gpu[name].get().view(np.uint32)
        both_nan = np.isnan(expected) & np.isnan(found.view(np.float32))
        expect((name, int(np.sum((expected.view(np.uint32) != found) & ~both_nan))), (name, 0))


def _accumulated(device: str, put, address, every, tiny):
    """All patterns with weights 1 and 0.3, so that sums and products are rounded."""
    layout = GradientLayout.of({"float16": every.shape, "bfloat16": every.shape, "float32": tiny.shape})
    accumulator = PerBlockGradientAccumulator(layout, device)
    placed = {"float16": put(every), "bfloat16": put(every), "float32": put(tiny)}
    raw = {name: RawBuffer(int(address(each)), each.size, name, device, owner=each) for name, each in placed.items()}
    for weight in (1.0, 0.3):
        accumulator.add(raw, weight=weight)
    accumulator.close()
    return accumulator.views()


def same_norm(size: int = 3_000_001, runs: int = 100) -> None:
    """The norm has the same bits in each of many runs beside other work."""
    xp = cupy()
    gradients = [xp.asarray(np.random.default_rng(0).standard_normal(size, np.float32))]
    engine, other, work = engine_of([(size,)], max_norm=1.0), xp.cuda.Stream(non_blocking=True), xp.zeros(1 << 12)
    norms = set()
    for _ in range(runs):
        with other:
            work.fill(1)
        engine.add(gradients)
        norms.add(float(engine.step().norm).hex())
    other.synchronize()  # it fills `work` until then
    expect(len(norms), 1)


def beyond_2_31() -> None:
    """More than 2^31 elements in one component: added, measured, handed back at both ends."""
    xp = cupy()
    if xp.cuda.runtime.memGetInfo()[0] < 20 << 30:
        raise NotHere("less than 20 GiB of free memory")
    source, target = xp.full(BEYOND, BF16_ONE, np.uint16), xp.zeros(BEYOND, np.uint16)
    source[-1] = BF16_TWO
    raw, out = (RawBuffer(int(each.data.ptr), BEYOND, "bfloat16", "cuda:0", owner=each) for each in (source, target))
    engine = engine_of([(BEYOND,)])
    engine.add([raw])
    norm = float(engine.step([out]).norm)
    expect(f"{norm:.2f}", f"{math.sqrt(BEYOND + 3):.2f}")
    expect([int(target[place]) for place in (0, 2**31, -1)], [BF16_ONE, BF16_ONE, BF16_TWO])


# ---- memory of others ----


def managed_memory() -> None:
    """Gradients in unified memory, which no device has before it is touched, as raw buffers."""
    xp, size = cupy(), 1024
    gradient = xp.ndarray((size,), np.float32, xp.cuda.malloc_managed(4 * size))
    gradient.fill(2)
    engine = engine_of([(size,)])
    engine.add([RawBuffer(int(gradient.data.ptr), size, "float32", "cuda:0", owner=gradient)])
    expect(float(engine.step().norm), 64.0)


def torch_frees_at_once() -> None:
    """Torch's memory, dropped right after add, given out again and written over: 200 times on each of two streams."""
    torch = _gpu_of("torch", lambda torch: torch.cuda.is_available())
    size = 1 << 22
    engine = engine_of([(size,)])
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for value in range(200):
                gradient = torch.full((size,), float(value), device="cuda")
                engine.add([gradient])
                del gradient
                again = torch.full((size,), math.nan, device="cuda")
                expect(float(engine.step().norm), value * 2048.0)
                del again


def jax_in_flight() -> None:
    """JAX's arrays are added while they are computed, and dropped at once: 50 times."""
    jax = _gpu_of("jax", lambda jax: jax.default_backend() == "gpu")
    side, engine = 1024, engine_of([(1024, 1024)])
    compute = jax.jit(lambda value: jax.numpy.ones((side, side)) @ jax.numpy.full((side, side), value))
    for value in range(50):
        engine.add([compute(float(value))])
        compute(-1.0)  # where the memory was
        norm, expected = float(engine.step().norm), float(value * side * side)
        if not math.isclose(norm, expected, rel_tol=1e-3):
            raise Surprise(f"norm {norm}, expected {expected}")


def two_ranks_by_nccl() -> None:
    """Two ranks on one GPU, by torch's process group with NCCL: the bits of two threads, eager and captured."""
    torch = _gpu_of("torch", lambda torch: torch.cuda.is_available())
    if not torch.distributed.is_nccl_available():
        raise NotHere("this torch has no NCCL")
    if torch.cuda.nccl.version() < (2, 30):
        raise NotHere("this NCCL gives a GPU to one rank alone: 2.30 is the first that need not")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(  # noqa: S603  (ours)
                [sys.executable, str(ROOT / "measured/gpu_nccl.py"), str(rank), folder],
                env={**os.environ, **gpu_nccl.ENVIRONMENT},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(gpu_nccl.RANKS)
        ]
        try:
            said = [rank.communicate(timeout=LIMIT - 15) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any("Duplicate GPU" in errors for _, errors in said):
        raise NotHere("this NCCL gives a GPU to one rank alone: 2.30 is the first that need not")
    for rank, (_, errors) in zip(ranks, said, strict=True):
        if rank.returncode != 0:
            raise Surprise(errors.strip().rpartition("\n")[2])
    found: list[list[str]] = [[] for _ in ranks]

    def be(exchange: Exchange) -> None:
        found[exchange.rank] = gpu_nccl.found_by(exchange, captures=False)

    threads = [threading.Thread(target=be, args=(exchange,)) for exchange in local_group(gpu_nccl.RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect([json.loads(words.splitlines()[-1]) for words, _ in said], [["nccl", *bits] for bits in found])


def one_rank_by_nccl() -> None:
    """A group of one by torch's NCCL: our memory and streams as torch's, and `all_to_all`, eager and captured."""
    torch = _gpu_of("torch", lambda torch: torch.cuda.is_available())
    if not torch.distributed.is_nccl_available():
        raise NotHere("this torch has no NCCL")
    with tempfile.TemporaryDirectory() as folder, gpu_nccl.group(0, 1, folder) as alone:
        expect(gpu_nccl.moved_alone(cupy(), alone), [{value} for value in gpu_nccl.SENT])


def _gpu_of(framework: str, has_gpu: Callable[[object], bool]):
    try:
        module = importlib.import_module(framework)
    except ImportError:
        raise NotHere(f"{framework} is not installed") from None
    if not has_gpu(module):
        raise NotHere(f"{framework} has no GPU")
    return module


# ---- asking ----


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        ask: Raises where the answer is a bad one.
        small: What to ask it with on tests/real_cupy; None where that cannot answer it.
        environment: Of its process.
        lines: Of its output, from the end, that are kept.
    """

    ask: Callable[..., None]
    small: Mapping[str, int] | None = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    lines: int = 1

    @property
    def about(self) -> str:
        """In a line."""
        return str(self.ask.__doc__).splitlines()[0]


LOADING = "CUDA_MODULE_LOADING"
QUESTIONS = {
    "first-launch-in-capture": Question(first_launch_in_capture, environment={LOADING: "LAZY"}),
    "first-launch-in-capture-loaded-before": Question(first_launch_in_capture, environment={LOADING: "EAGER"}),
    "large-and-table-arguments": Question(large_and_table_arguments, {"size": 2, "replays": 1}),
    "stepping-beside-a-capture": Question(stepping_beside_a_capture),
    "collected-in-a-capture": Question(collected_in_a_capture),
    "rules-of-capture": Question(rules_of_capture, lines=len(gpu_rules.PROBES)),
    "bits-of-the-cpu": Question(bits_of_the_cpu),
    "same-norm": Question(same_norm, {"size": ELEMENTS, "runs": 3}),
    "managed-memory": Question(managed_memory),
    "torch-frees-at-once": Question(torch_frees_at_once),
    "jax-in-flight": Question(jax_in_flight),
    "one-rank-by-nccl": Question(one_rank_by_nccl, small=None),
    "two-ranks-by-nccl": Question(two_ranks_by_nccl, small=None),
    "beyond-2-31": Question(beyond_2_31),
    "lost-device-is-told": Question(lost_device_is_told, small=None),
}


def answer(name: str, *, small: bool) -> dict[str, object]:
    """Ask one question in a process of its own: how it ended, in which time, and its last words."""
    question, began = QUESTIONS[name], time.monotonic()
    command = [sys.executable, __file__, "--one", name, *(["--small"] if small else [])]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **question.environment}
    ended = partial(_ended, question, began)
    try:
        done = subprocess.run(  # noqa: S603  (the questions stand above)
            command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return ended(TIMED_OUT, f"no answer within {LIMIT:g} s")
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    kept = said[-question.lines :] if done.returncode == 0 else said[-1:]
    return ended({0: PASSED, NOT_HERE: ABSENT}.get(done.returncode, FAILED), "\n".join(line[:300] for line in kept))


def _ended(question: Question, began: float, outcome: str, said: str) -> dict[str, object]:
    return {"outcome": outcome, "seconds": round(time.monotonic() - began, 1), "about": question.about, "said": said}


def ask_all(names: Sequence[str], json_file: Path | None, *, small: bool, jobs: int = 1) -> list[str]:
    """Ask so many at once, and write the answers so far; which of them are bad."""
    answers: dict[str, dict[str, object]] = {}
    pool = ThreadPoolExecutor(jobs)
    try:
        asked = {pool.submit(answer, name, small=small): name for name in names}
        for each in as_completed(asked):
            name, found = asked[each], each.result()
            answers[name] = found
            failed = "failed: " if found["outcome"] in BAD else ""
            print(f"{failed}{name}: {found['outcome']}, {found['seconds']} s {found['said']}", flush=True)
            if json_file is not None:
                in_order = {name: answers[name] for name in names if name in answers}
                write_whole(json_file, json.dumps({"settled": in_order}, indent=1) + "\n")
    finally:
        pool.shutdown(cancel_futures=True)
    return [name for name in names if answers[name]["outcome"] in BAD]


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask; 1 if an answer is bad."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", metavar="question", help=f"all by default: {', '.join(QUESTIONS)}")
    made.add_argument("--one", choices=QUESTIONS, help="ask it in this process")
    made.add_argument("--small", action="store_true", help="those that need no GPU, at sizes for that")
    made.add_argument("--json", type=Path)
    made.add_argument("--jobs", type=int, default=1, help="so many questions at once")
    given = made.parse_args(arguments)
    unknown = [name for name in given.names if name not in QUESTIONS]
    if unknown:
        made.error(f"no such question: {unknown[0]}; there are {', '.join(QUESTIONS)}")
    if given.one is None:
        names = given.names or [name for name, each in QUESTIONS.items() if each.small is not None or not given.small]
        return 1 if ask_all(names, given.json, small=given.small, jobs=given.jobs) else 0
    try:
        question = QUESTIONS[given.one]
        question.ask(**((question.small or {}) if given.small else {}))
    except NotHere as why:
        print(why, file=sys.stderr)
        return NOT_HERE
    return 0


if __name__ == "__main__":
    sys.exit(main())
