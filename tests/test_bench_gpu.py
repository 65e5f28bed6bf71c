"""measured/gpu_bench.py: every case at a tiny size, on CuPy over the stand-in driver. torch is a few lines of NumPy."""

import ctypes
import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cuda_emulator
import gpu_bench
import gpu_once
import gpu_variants
import ml_dtypes
import numpy as np
import pytest
from gpu_bench import VARIANTS, Benchmarks, Options, benchmarks_of, parser, run
from gpu_variants import COUNTED, Lent, calls, counts_of, limited, profiled, step_calls

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.bench import command
from gradengine.bench.command import bench
from gradengine.bench.device import Case, Gpu
from gradengine.bench.workload import Workload, model_layout
from gradengine.engine import GradientEngine
from gradengine.errors import DeviceUnavailable

ROOT = Path(__file__).parent.parent
BLOCK = 8 * 8 + 2 * 8 * 2 + 8 * 8 + 3 * 8 * 32 + 2 * 8  # elements of a block of hidden size 8
SET = 4 * (BLOCK + 256 * 8 + 8)  # with LM head and final norm, in fp32
COPY_BYTES = 2 * 4 * 4096


def on_host(array):
    """The stand-in's device memory, which is the host's, as NumPy has it."""
    memory = (ctypes.c_char * array.nbytes).from_address(array.data.ptr)
    memory.owner = array  # kept as long as what looks into it
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def as_tensor(array):
    return on_host(array) if array.dtype == np.float32 else on_host(array).view(ml_dtypes.bfloat16)


def total_norm(tensors, **_):
    return np.sqrt(sum(np.sum(tensor.astype(np.float64) ** 2) for tensor in tensors))


def each(work):
    return lambda tensors, *others: [work(*given) for given in zip(tensors, *others, strict=True)]


def multiply(tensors, factor):
    for tensor in tensors:
        tensor[...] = tensor.astype(np.float32) * np.float32(factor)


def assign(target, values):
    target[...] = values


def clip_grad_norm(parameters, max_norm, *, error_if_nonfinite, foreach):
    gradients = [parameter.grad for parameter in parameters]
    multiply(gradients, min(1, max_norm / total_norm(gradients)))


TORCH = SimpleNamespace(  # tensors are NumPy's arrays
    float32=np.float32,
    bfloat16=ml_dtypes.bfloat16,
    full=lambda shape, value, dtype, device: np.full(shape, value, dtype),
    zeros=lambda shape, **_: SimpleNamespace(expand=lambda shape: None),
    _foreach_zero_=each(lambda tensor: tensor.fill(0)),
    _foreach_add_=each(lambda total, other: assign(total, total + other.astype(np.float32))),
    _foreach_mul_=multiply,
    _foreach_copy_=each(assign),
    _foreach_norm=each(np.linalg.norm),
    stack=np.array,
    linalg=SimpleNamespace(vector_norm=np.linalg.norm),
    clamp=lambda value, **bound: np.minimum(value, bound["max"]),
    nn=SimpleNamespace(
        Parameter=lambda weight: SimpleNamespace(),
        utils=SimpleNamespace(get_total_norm=total_norm, clip_grad_norm_=clip_grad_norm),
    ),
)


def ticking(step=0.001):
    ticks = itertools.count()
    return lambda: step * next(ticks)


def counts(*found):
    return Counter(dict(zip(COUNTED, found, strict=True)))


def count_by_record(work):
    with cuda_emulator.recorded() as record:
        work()
    kernels = len(record.launches)
    return counts(kernels, len(record.copies), record.fills, kernels + record.graphs, len(record.waits))


@pytest.fixture(scope="module")
def gpu(emulated):
    """Makes the device at small sizes. Work is done at once, because NumPy looks into the same memory."""

    def make(**changes):
        facts = {
            "by_hand": on_host,
            "recorded": lambda work: work,
            "scratch": 4096,
            "copied": 4096,
            "clock": ticking(),
            "warm_up": 0,
        }
        made = Gpu(xp=emulated.kernels.xp, kernels=emulated.kernels, torch_module=TORCH)
        for name, value in {"tensor": as_tensor, **facts, **changes}.items():
            setattr(made, name, value)
        if made.torch_module is None:
            del made.tensor
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated.kernels.xp.cuda, "get_elapsed_time", lambda start, stop: 0.25)
        patch.setattr(gpu_variants, "profiled", lambda gpu: count_by_record)
        patch.setattr(gpu_variants, "torch_tensor", lambda gpu, array: Lent(array))  # no torch that ours would know
        patch.setattr(gpu_variants, "torch_compiled", lambda gpu, function: function)
        with cuda_emulator.options(check=False, asynchronous=False):
            yield make


@pytest.fixture(autouse=True)
def _fast():
    with cuda_emulator.options(check=False, asynchronous=False):
        yield


def benchmarks(gpu, **changes):
    small = {"blocks": 1, "hidden": 8, "k": 2, "rounds": 2, "lora_hidden": 12, "tensors": (3, 5), "elements": 20}
    return Benchmarks(gpu, Options(**{**small, **changes}))


def ran(gpu, names, folder, **changes):
    """The reports as they are kept, and what failed."""
    path = folder / "run.json"
    failed = run(benchmarks(gpu, **changes), names, path)
    reports = json.loads(path.read_text())["reports"] if path.exists() else []
    return {report["benchmark"]: report for report in reports}, failed


def rows_of(report):
    return {row["variant"]: row for row in report["rows"]}


def counted(report):
    return {variant: row["bytes"] for variant, row in rows_of(report).items() if variant != "copy"}


@pytest.fixture(scope="module")
def fp32(gpu, tmp_path_factory):
    """One run of everything, which several tests look at."""
    return ran(gpu(), list(VARIANTS), tmp_path_factory.mktemp("fp32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_case_computes_the_same_and_is_timed(gpu, fp32, dtype, tmp_path):
    odd = dtype == "bfloat16"
    names = [name for name in VARIANTS if not odd or name not in {"hand-back", "hand-back-bf16", "host"}]
    reports, failed = ran(gpu(), names, tmp_path, dtype=dtype, odd=True) if odd else fp32
    assert not failed
    assert list(reports) == names
    for report in reports.values():
        assert report["absent"] == []
        assert (report["parameters"]["odd"], report["parameters"]["dtype"]) == (odd, dtype)


def test_bytes_of_parts_and_their_times(fp32):
    reports = fp32[0]
    assert set(counted(reports["accumulate"]).values()) == {3 * SET}
    window = counted(reports["window"])  # K = 2
    assert (window["ours hold=1"], window["ours hold=2"], window["cupy by hand"]) == (5 * SET, 3 * SET, 7 * SET)
    assert set(counted(reports["norm"]).values()) == {SET}
    assert set(counted(reports["clip"]).values()) == {3 * SET}
    assert set(counted(reports["hand-back"]).values()) == {2 * SET}
    assert counted(reports["hand-back-bf16"])["ours"] == 1.5 * SET
    chunks = {"ours, the model": (11, 11), "ours, 1,000 components": (12_000, 1000), "ours, one component": (16_000, 1)}
    assert counted(reports["finalise"]) == {name: 12 * n + 48 * m for name, (n, m) in chunks.items()}
    assert rows_of(reports["norm"])["copy"]["bytes"] == COPY_BYTES
    row = rows_of(reports["step"])["ours hold=1"]
    assert (row["device_s"], row["median_s"]) == (0.00025, 0.00025)
    assert (row["wall_s"], row["host_s"]) == pytest.approx((0.001, 0.001))  # one tick
    assert row["of_copy"] == pytest.approx(row["bytes"] / COPY_BYTES)
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / 0.00025 / 1e9)
    assert len(row["samples_s"]) == 2
    lora = rows_of(reports["lora"])["ours eager"]
    assert (reports["lora"]["time"], reports["host"]["time"]) == ("wall", "host")
    assert (lora["median_s"], lora["of_copy"]) == (lora["wall_s"], None)
    assert lora["ratios"]["ours replayed"] == pytest.approx(1)


def test_small_models_are_timed_by_the_clock_and_recorded_by_their_tensors(fp32):
    for name, tensors in {"step-few": 3, "step-many": 5, "half-none": 5, "host": 5, "step-call": 5}.items():
        report = fp32[0][name]
        assert report["time"] == ("host" if name in {"host", "step-call"} else "wall")
        assert (report["parameters"]["tensors"], report["parameters"]["elements"]) == (tensors, 20)
    few, many = (rows_of(fp32[0][name])["ours hold=2"]["bytes"] for name in ("step-few", "step-many"))
    assert many / few == 5 / 3
    assert set(counted(fp32[0]["half-none"]).values()) >= {(4 + 3) * 4 * 3 * 20}  # 3 of 5, K = 2: 2 G, 3 A, and 2 A


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_step(gpu, tmp_path, dtype):
    """The table of step.py, an element: K = 4, fp32 and bf16."""
    names = ["step", "compiled"] if dtype == "float32" else ["step"]
    reports = ran(gpu(), names, tmp_path, dtype=dtype, k=4, rounds=1)[0]
    once, four, by_hand = (52, 28, 64) if dtype == "float32" else (44, 20, 56)
    expected = dict.fromkeys(("ours hold=1", "ours hold=1, captured"), once)
    expected |= dict.fromkeys(("ours hold=4", "ours hold=4, captured"), four)
    expected |= dict.fromkeys(("cupy by hand", "torch foreach, sum", "torch foreach, sum, graph"), by_hand)
    expected["torch foreach, mean"] = by_hand + 8
    assert counted(reports["step"]) == {name: each * SET // 4 for name, each in expected.items()}
    if "compiled" in reports:
        rows = counted(reports["compiled"])
        assert rows["torch.compile, by micro-batch"] == 56 * SET // 4
        assert rows["torch.compile, whole window"] == 32 * SET // 4


@pytest.mark.parametrize(
    ("benchmark", "owner", "name"),
    [(calls, PerBlockGradientAccumulator, "add"), (step_calls, GradientEngine, "step")],
    ids=["add", "step"],
)
@pytest.mark.parametrize("is_new", [False, True], ids=["again", "new"])
def test_new_arrays_are_other_objects_at_each_call(gpu, benchmark, owner, name, is_new, monkeypatch):
    taken, call, end = [], getattr(owner, name), ", new cupy arrays" if is_new else ", cupy arrays"
    monkeypatch.setattr(owner, name, lambda self, given: taken.append(given[0]) or call(self, given))
    variants = benchmark(Workload.drawn(gpu(), model_layout(1, 8), 2))
    case = next(variant for variant in variants if variant.name.endswith(end)).build()
    for _ in range(2):
        case.prepare()
        case.run()
    assert (taken[0] is taken[1]) is not is_new


@pytest.mark.parametrize(("variant", "asks_dlpack"), [("arrays by DLPack", True), ("cupy arrays", False)])
def test_what_is_timed_as_dlpack_is_taken_by_dlpack(gpu, variant, asks_dlpack, monkeypatch):
    asked, export = [], Lent.__dlpack__
    monkeypatch.setattr(Lent, "__dlpack__", lambda self, **options: asked.append(self) or export(self, **options))
    workload = Workload.drawn(gpu(), model_layout(1, 8), 2)
    case = next(each for each in calls(workload) if each.name == f"ours add, {variant}").build()
    case.prepare()
    case.run()
    assert len(asked) == (len(workload.layout.slots) if asks_dlpack else 0)


def test_launches_are_counted_and_ours_may_not_wait(gpu, fp32, tmp_path, monkeypatch):
    rows = fp32[0]["launches"]["rows"]
    assert rows["ours hold=1"] == {"kernels": 4, "copies": 1, "fills": 0, "launches": 4, "waits": 0}
    assert rows["ours hold=2"]["kernels"] == 3
    assert rows["ours hold=2, captured"] == {"kernels": 0, "copies": 1, "fills": 0, "launches": 1, "waits": 0}
    waits = itertools.chain([0], itertools.repeat(1))  # the first call is that of nothing
    monkeypatch.setattr(
        gpu_variants, "profiled", lambda gpu: lambda work: (work() and None) or counts(1, 0, 0, 1, next(waits))
    )
    reports, failed = ran(gpu(), ["launches"], tmp_path)
    assert "launches: ours hold=1 waits" in failed
    assert reports["launches"]["failed"]


def test_without_torch_its_variants_are_absent(gpu, tmp_path):
    names = ["hand-back-bf16", "lora", "compiled"]
    reports, failed = ran(gpu(torch_module=None), names, tmp_path)
    assert not failed
    for report in reports.values():
        assert {absent["why"] for absent in report["absent"]} == {"torch not installed, or without CUDA"}
        assert report["rows"]
    assert len(reports["compiled"]["absent"]) == 2


def cannot(function):
    raise RuntimeError("Triton found no compiler\nand a long tale of it")


def for_ever(function):
    def call(*_):
        while True:
            pass

    return call


@pytest.mark.parametrize(
    ("compiler", "why"),
    [(cannot, "RuntimeError: Triton found no compiler"), (for_ever, "TimeoutError: not done within 0.05 s")],
)
def test_a_compiler_that_fails_or_does_not_end_is_absent_by_name(gpu, tmp_path, compiler, why, monkeypatch):
    monkeypatch.setattr(gpu_variants, "torch_compiled", lambda gpu, function: compiler(function))
    before = signal.getsignal(signal.SIGALRM)
    reports, failed = ran(gpu(), ["compiled"], tmp_path, compile_limit=0.05)
    assert not failed
    assert [absent["why"] for absent in reports["compiled"]["absent"]] == [why] * 2
    with limited(60):
        pass
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_benchmark_that_fails_leaves_the_others(gpu, tmp_path):
    """A hand back starts from the sum in fp32, and raw memory is passed as fp32."""
    reports, failed = ran(gpu(), ["hand-back", "host", "norm"], tmp_path, dtype="bfloat16")
    assert list(reports) == ["norm"]
    needs = [re.match(r"(.*): CallerError: .* expected --dtype float32", each)[1] for each in failed]
    assert needs == ["hand-back", "host"]


@pytest.mark.parametrize("name", ["step", "accumulate", "norm", "clip"])
def test_the_command_writes_json_of_the_device(gpu, name, monkeypatch):
    monkeypatch.setattr(command, "open_gpu", gpu)
    small = ["--blocks", "1", "--hidden", "8", "--rounds", "2", "--json", "-"]
    result = CliRunner().invoke(bench, ["gpu", name, *small], catch_exceptions=False)
    report = json.loads(result.stdout)
    assert (report["benchmark"], report["time"], report["failed"]) == (name, "device", [])
    assert ("ours hold=4, captured" in rows_of(report)) is (name == "step")


def test_the_command_needs_a_gpu():
    """It says so, and names what is missing; on a machine with one it would take minutes."""
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    result = CliRunner().invoke(bench, ["gpu", "norm"])
    assert result.exit_code == 1
    assert isinstance(result.exception, DeviceUnavailable)


WITHOUT_THE_COMMAND_LINE = """
import runpy, sys
sys.modules.update(dict.fromkeys(["typer", "rich", "matplotlib"]))
sys.path.insert(0, "measured")
runpy.run_path("measured/gpu_bench.py", run_name="__main__")
"""


def test_it_needs_neither_typer_nor_rich_nor_matplotlib():
    command = [sys.executable, "-c", WITHOUT_THE_COMMAND_LINE, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ",".join(VARIANTS) in "".join(done.stdout.split())


def test_small_sizes_run_everything_quickly(gpu, tmp_path):
    given = parser().parse_args(["host", "--small", "--dtype", "float32"])
    small = benchmarks_of(given, gpu(scratch=1 << 30))
    assert (small.options.blocks, small.gpu.scratch, small.gpu.copied % 32) == (1, 1 << 14, 0)
    assert benchmarks_of(parser().parse_args(["host", "--odd"]), gpu()).options.odd
    assert run(small, given.names, tmp_path / "host.json") == []


def test_wrong_results_of_ours_are_not_timed(gpu, tmp_path):
    class Wrong:
        """Kernels that leave a factor out."""

        def __getattr__(self, name):
            return getattr(gpu().kernels, name)

        def scale(self, sources, factor, destinations):
            gpu().kernels.scale(sources, np.float32(2 * factor), destinations)

    reports, failed = ran(gpu(kernels=Wrong()), ["hand-back"], tmp_path)
    assert failed == ["hand-back: ours"]
    assert "ours" not in rows_of(reports["hand-back"])


# ---- memory and time ----


def test_odd_buffers_lie_at_odd_elements(gpu):
    arrays = gpu(shifts=gpu_bench.ODD).placed([np.ones(5, np.uint16)] * 5)
    assert [array.data.ptr // 2 % 64 for array in arrays] == [1, 3, 5, 7, 1]
    assert [array.data.ptr // 2 % 64 for array in gpu().placed([np.ones(70, np.uint16)] * 2)] == [0, 0]
    layout = benchmarks(gpu(), odd=True).layout
    assert all(slot.size % 8 for slot in layout.slots)


def test_a_sample_prepares_reads_scratch_and_waits(gpu, monkeypatch):
    done = []
    case = Case(lambda: done.append("run"), lambda: 0.0, prepare=lambda: done.append("prepare"))
    small = gpu(clock=ticking(1))
    monkeypatch.setattr(small.xp.cuda, "get_elapsed_time", lambda start, stop: 7.0)
    small.sample(case)
    done.clear()
    with cuda_emulator.recorded() as record:
        sample = small.sample(case)
    assert done == ["prepare", "run"] * 2
    assert sample == (0.007, 1, 1)
    assert record.launches == ["measure_small"] * 2
    assert record.waits == ["event", "device", "device"]


@pytest.mark.filterwarnings("ignore")  # of a torch without CUDA
def test_torch_s_profiler_is_understood():
    torch = pytest.importorskip("torch")
    work = torch.ones(3)
    assert profiled(SimpleNamespace(torch=torch))(lambda: work.add_(1)) == Counter()


def test_events_are_counted_by_their_names():
    host, device = partial(zip, ["DeviceType.CPU"] * 6), partial(zip, ["DeviceType.CUDA"] * 3)
    calls = ["aten::add_", "cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaDeviceSynchronize"]
    work = ["accumulate_1_small", "Memcpy DtoH (Device -> Pinned)", "Memset (Device)"]
    assert counts_of([*host([*calls, "cudaEventQuery"]), *device(work)]) == counts(1, 1, 1, 3, 1)


def test_every_kernel_runs_once(emulated):
    """measured/gpu_once.py"""
    with cuda_emulator.options(check=True, asynchronous=True), cuda_emulator.recorded() as record:
        gpu_once.everything(emulated.kernels)
    kinds = {name.rpartition("_")[0] for name in record.launches}
    assert kinds >= {"accumulate_1", "accumulate_4", "measure", "hand_back"}
    assert {"measure_large", "hand_back_large"} <= set(record.launches)
