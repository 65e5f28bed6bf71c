"""The GPU's benchmarks, every case at a tiny size: the emulator stands for CuPy, and torch works on the CPU."""

import ctypes
import functools
import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from io import StringIO
from pathlib import Path
from unittest.mock import MagicMock

import cuda_emulator
import gpu_once
import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.bench import command, harness
from gradengine.bench.__main__ import benchmarks_of, parser
from gradengine.bench.benchmarks import NAMES, Benchmarks, Options, run
from gradengine.bench.command import bench
from gradengine.bench.device import Case, Gpu
from gradengine.bench.harness import COUNTED, counts_of, profiled
from gradengine.bench.step import Lent, calls, half_absent, limited, step_calls
from gradengine.bench.table import table_of
from gradengine.bench.workload import Workload, model_layout
from gradengine.engine import GradientEngine
from gradengine.errors import CallerError, DeviceUnavailable
from gradengine.kernels import CudaKernels

pytestmark = pytest.mark.skipif(cuda_emulator.compiler() is None, reason="g++ is not installed")
ROOT = Path(__file__).parent.parent
TORCH = importlib.util.find_spec("torch") is not None
torch = pytest.importorskip("torch") if TORCH else None

BLOCK = 8 * 8 + 2 * 8 * 2 + 8 * 8 + 3 * 8 * 32 + 2 * 8  # elements of a block of hidden size 8
SET = 4 * (BLOCK + 256 * 8 + 8)  # with LM head and final norm, in fp32
COPY_BYTES = 2 * 4 * 4096


def on_host(array):
    """The emulator's memory, which is the host's, as NumPy has it."""
    memory = (ctypes.c_char * array.nbytes).from_address(array.data.ptr)
    memory.owner = array  # kept as long as what looks into it
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def as_tensor(array):
    """The same for torch."""
    seen = on_host(array)
    return (
        torch.from_numpy(seen)
        if seen.dtype == np.float32
        else torch.from_numpy(seen.view(np.int16)).view(torch.bfloat16)
    )


@functools.cache
def kernels():
    return CudaKernels(cuda_emulator)


@pytest.fixture(autouse=True, scope="module")
def _events_and_counts():
    """The emulator's, in place of the driver's and of torch's profiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_emulator.cuda, "get_elapsed_time", lambda start, stop: 0.25, raising=False)
        patch.setattr(harness, "profiled", lambda gpu: count_by_emulator)
        yield


@pytest.fixture(autouse=True)
def _fast():
    """Work is done at once, because torch and NumPy look into the same memory; nothing is checked but the results."""
    with cuda_emulator.options(check=False, asynchronous=False):
        yield


def device(**changes):
    """The emulator, at small sizes, with what is asked of torch on a GPU done on the CPU."""
    facts = {
        "torch_device": "cpu",
        "torch_tensor": Lent,  # torch has no GPU here, and ours takes no tensor that lies elsewhere
        "by_hand": on_host,
        "recorded": lambda work: work,
        "compiled": functools.partial(torch.compile, backend="eager", fullgraph=True, dynamic=False) if TORCH else None,
        "scratch": 4096,
        "copied": 4096,
        "clock": ticking(),
        "warm_up": 0,
    }
    made = Gpu(xp=cuda_emulator, kernels=kernels(), torch_module=torch)
    for name, value in {**facts, **changes}.items():
        setattr(made, name, value)
    if made.torch_module is not None:
        made.tensor = as_tensor
    return made


def ticking(step=0.001):
    ticks = itertools.count()
    return lambda: step * next(ticks)


def counts(*found):
    return Counter(dict(zip(COUNTED, found, strict=True)))


def count_by_emulator(work):
    with cuda_emulator.recorded() as record:
        work()
    kernels = len(record.launches)
    return counts(kernels, len(record.copies), record.fills, kernels + record.graphs, len(record.waits))


def benchmarks(**changes):
    given = changes.pop("device", None) or device()
    small = {"blocks": 1, "hidden": 8, "k": 2, "rounds": 2, "lora_hidden": 12, "tensors": (3, 5), "elements": 20}
    return Benchmarks(given, Options(**{**small, **changes}))


def ran(names, tmp_path=None, **changes):
    """The reports as they are kept, and what failed."""
    path = tmp_path / "run.json"
    console = Console(width=200, file=StringIO(), record=True)
    failed = run(benchmarks(**changes), names, path, lambda report: console.print(table_of(report)))
    return (
        {report["benchmark"]: report for report in json.loads(path.read_text())["reports"]},
        failed,
        console.export_text(),
    )


def rows_of(report):
    return {row["variant"]: row for row in report["rows"]}


EVERYTHING = list(NAMES)


@pytest.fixture(scope="module")
def fp32(tmp_path_factory):
    """One run of everything, which several tests look at."""
    with cuda_emulator.options(check=False, asynchronous=False):
        return ran([name for name in EVERYTHING if TORCH or name != "compiled"], tmp_path_factory.mktemp("fp32"))


@pytest.mark.skipif(not TORCH, reason="torch is not installed")
@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_case_computes_the_same_and_is_timed(dtype, odd, tmp_path, request):
    names = [name for name in EVERYTHING if dtype == "float32" or name not in {"hand-back", "hand-back-bf16", "host"}]
    is_shared = (dtype, odd) == ("float32", False)
    run_of_it = request.getfixturevalue("fp32") if is_shared else ran(names, tmp_path, dtype=dtype, odd=odd)
    reports, failed, shown = run_of_it
    assert not failed, shown
    assert list(reports) == names
    for report in reports.values():
        assert report["absent"] == [], report["absent"]
        assert report["machine"]["gpu"] == "CUDA emulator"
        assert report["parameters"]["odd"] is odd
        assert report["parameters"]["dtype"] == dtype


def counted(report):
    return {variant: row["bytes"] for variant, row in rows_of(report).items() if variant not in {"copy", "triad"}}


def test_bytes_of_parts(fp32):
    reports = fp32[0]
    assert set(counted(reports["accumulate"]).values()) == {3 * SET}
    window = counted(reports["window"])  # K = 2
    assert (window["ours hold=1"], window["ours hold=2"], window["cupy by hand"]) == (5 * SET, 3 * SET, 7 * SET)
    assert (window["ours hold=1, whole sectors"], window["ours hold=2, whole sectors"]) == (5 * SET, 3 * SET)
    assert set(counted(reports["norm"]).values()) == {SET}
    assert set(counted(reports["clip"]).values()) == {3 * SET}
    assert set(counted(reports["hand-back"]).values()) == {2 * SET}
    assert counted(reports["hand-back-bf16"])["ours"] == 1.5 * SET
    copy, triad = (rows_of(reports["norm"])[name] for name in ("copy", "triad"))
    assert (copy["bytes"], triad["bytes"]) == (COPY_BYTES, 1.5 * COPY_BYTES)


def test_bytes_of_a_step(tmp_path):
    """The table of step.py, an element: K = 4, fp32 and bf16."""
    for dtype, expected in {"float32": (52, 28, 64), "bfloat16": (44, 20, 56)}.items():
        rows = rows_of(ran(["step"], tmp_path, dtype=dtype, k=4, rounds=1)[0]["step"])
        by_hand, once, four = expected[2], expected[0], expected[1]
        assert rows["ours hold=1"]["bytes"] == rows["ours hold=1, captured"]["bytes"] == once * SET // 4
        assert rows["ours hold=4"]["bytes"] == rows["ours hold=4, captured"]["bytes"] == four * SET // 4
        assert rows["cupy by hand"]["bytes"] == by_hand * SET // 4
        if TORCH:
            assert (
                rows["torch foreach, sum"]["bytes"]
                == rows["torch foreach, sum, graph"]["bytes"]
                == 16 * (by_hand * SET // 64)
            )
            assert rows["torch foreach, mean"]["bytes"] == (by_hand + 8) * SET // 4


@pytest.mark.skipif(not TORCH, reason="torch is not installed")
def test_bytes_of_a_compiled_step(tmp_path):
    rows = rows_of(ran(["compiled"], tmp_path, k=4, rounds=1)[0]["compiled"])
    assert rows["torch.compile, by micro-batch"]["bytes"] == 56 * SET // 4
    assert rows["torch.compile, whole window"]["bytes"] == 32 * SET // 4


def test_a_row_has_all_three_times_and_its_share_of_the_copy(fp32):
    row = rows_of(fp32[0]["step"])["ours hold=1"]
    assert (row["device_s"], row["median_s"]) == (0.00025, 0.00025)
    assert row["wall_s"] == pytest.approx(0.001)  # one tick
    assert row["host_s"] == pytest.approx(0.001)
    assert row["of_copy"] == pytest.approx(row["bytes"] / COPY_BYTES)
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / 0.00025 / 1e9)
    assert len(row["samples_s"]) == 2


def test_what_is_about_launches_is_timed_by_the_clock(fp32):
    assert fp32[0]["lora"]["time"] == "wall"
    assert fp32[0]["host"]["time"] == "host"
    row = rows_of(fp32[0]["lora"])["ours eager"]
    assert row["median_s"] == row["wall_s"]
    assert row["of_copy"] is None
    assert row["ratios"]["ours replayed"] == pytest.approx(1)


def test_small_models_are_timed_by_the_clock_and_recorded_by_their_tensors(fp32):
    for name, tensors in {"step-few": 3, "step-many": 5, "half-none": 5}.items():
        report = fp32[0][name]
        assert report["time"] == "wall"
        assert (report["parameters"]["tensors"], report["parameters"]["elements"]) == (tensors, 20)
        assert "hidden" not in report["parameters"]
    few, many = (rows_of(fp32[0][name])["ours hold=2"]["bytes"] for name in ("step-few", "step-many"))
    assert many / few == 5 / 3
    assert set(counted(fp32[0]["half-none"]).values()) >= {(4 + 3) * 4 * 3 * 20}  # 3 of 5, K = 2: 2 G, 3 A, and 2 A


def test_a_step_whose_gradients_are_half_none_hands_back_zeros_for_them():
    case = half_absent(benchmarks().small("half-none"))[1].build()
    case.run()
    assert case.error() < 1e-6


@pytest.mark.parametrize(
    ("benchmark", "owner", "name"),
    [(calls, PerBlockGradientAccumulator, "add"), (step_calls, GradientEngine, "step")],
    ids=["add", "step"],
)
@pytest.mark.parametrize("is_new", [False, True], ids=["again", "new"])
def test_new_arrays_are_other_objects_at_each_call(benchmark, owner, name, is_new, monkeypatch):
    taken, call = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, given: taken.append(given[0]) or call(self, given))
    variants = benchmark(Workload.drawn(device(), model_layout(1, 8), 2))
    case = next(
        each for each in variants if each.name.endswith(", new cupy arrays" if is_new else ", cupy arrays")
    ).build()
    for _ in range(2):
        case.prepare()
        case.run()
    assert (taken[0] is taken[1]) is not is_new


def test_launches(fp32):
    rows = fp32[0]["launches"]["rows"]
    assert rows["ours hold=1"] == {"kernels": 4, "copies": 1, "fills": 0, "launches": 4, "waits": 0}
    assert rows["ours hold=2"]["kernels"] == 3
    assert rows["ours hold=2, captured"] == {"kernels": 0, "copies": 1, "fills": 0, "launches": 1, "waits": 0}


@pytest.mark.parametrize(("variant", "asks_dlpack"), [("arrays by DLPack", True), ("cupy arrays", False)])
def test_what_is_timed_as_dlpack_is_taken_by_dlpack(variant, asks_dlpack, monkeypatch):
    """Torch's tensors are recognised, and asked by torch's own ways."""
    asked, export = [], Lent.__dlpack__
    monkeypatch.setattr(Lent, "__dlpack__", lambda self, **options: asked.append(self) or export(self, **options))
    workload = Workload.drawn(device(), model_layout(1, 8), 2)
    case = next(each for each in calls(workload) if each.name == f"ours add, {variant}").build()
    case.prepare()
    case.run()
    assert len(asked) == (len(workload.layout.slots) if asks_dlpack else 0)


def test_ours_may_not_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "profiled", lambda gpu: waiting_in_turn())
    reports, failed, _ = ran(["launches"], tmp_path)
    assert "launches: ours hold=1 waits" in failed
    assert reports["launches"]["failed"]


def waiting_in_turn():
    calls = itertools.count()

    def count(work):
        work()
        return counts(1, 0, 0, 1, 1 if next(calls) else 0)  # the first call is that of nothing

    return count


def test_without_torch_its_variants_are_absent(tmp_path):
    names = ["accumulate", "norm", "hand-back", "hand-back-bf16", "step", "lora", "host", "compiled"]
    reports, failed, _ = ran(names, tmp_path, device=device(torch_module=None))
    assert not failed
    for report in reports.values():
        assert {absent["why"] for absent in report["absent"]} == {"torch not installed, or without CUDA"}
        assert report["rows"]
    assert len(reports["compiled"]["absent"]) == 2


@pytest.mark.skipif(not TORCH, reason="torch is not installed")
def test_a_compiler_that_fails_is_absent_by_name(tmp_path, capsys):
    def cannot(function):
        raise RuntimeError("Triton found no compiler\nand a long tale of it")

    reports, failed, _ = ran(["compiled"], tmp_path, device=device(compiled=cannot))
    assert not failed
    assert reports["compiled"]["absent"][1] == {
        "variant": "torch.compile, whole window",
        "why": "RuntimeError: Triton found no compiler",
    }
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.skipif(not TORCH, reason="torch is not installed")
def test_a_compiler_that_does_not_end_is_absent_by_name(tmp_path):
    def for_ever(function):
        def call(*_):
            while True:
                pass

        return call

    case = benchmarks(device=device(compiled=for_ever), compile_limit=0.05)
    failed = run(case, ["compiled"], tmp_path / "run.json", lambda report: None)
    report = json.loads((tmp_path / "run.json").read_text())["reports"][0]
    assert not failed
    assert {absent["why"] for absent in report["absent"]} == {"TimeoutError: not done within 0.05 s"}


def test_the_alarm_is_put_back():
    before = signal.getsignal(signal.SIGALRM)
    with limited(60):
        pass
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_benchmark_that_fails_leaves_the_others(tmp_path):
    """A hand back starts from the sum in fp32, and raw memory is passed as fp32."""
    reports, failed, _ = ran(["hand-back", "host", "norm"], tmp_path, dtype="bfloat16")
    assert list(reports) == ["norm"]
    why = "CallerError: this benchmark needs fp32: got bfloat16, expected --dtype float32"
    assert failed == [f"hand-back: {why}", f"host: {why}"]


def test_the_help_names_every_benchmark(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert f"any of {', '.join(NAMES)}" in parser().format_help()


def test_an_unknown_benchmark_is_refused(tmp_path):
    with pytest.raises(CallerError, match="unknown benchmark: got none, expected accumulate"):
        ran(["none"], tmp_path)


def test_the_commands_json_to_stdout_is_all_that_is_printed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "open_gpu", device)
    small = ["--blocks", "1", "--hidden", "8", "--rounds", "2", "--json", "-"]
    result = CliRunner().invoke(bench, ["gpu", "norm", *small], catch_exceptions=False)
    assert [report["benchmark"] for report in json.loads(result.stdout)["reports"]] == ["norm"]
    assert list(tmp_path.iterdir()) == []


def test_the_command_needs_a_gpu():
    """It says so, and names what is missing; on a machine with one it would take minutes."""
    missing = importlib.util.find_spec("cupy") is None
    if not missing:
        pytest.skip("CuPy is installed")
    result = CliRunner().invoke(bench, ["gpu", "norm"])
    assert result.exit_code == 1
    assert isinstance(result.exception, DeviceUnavailable)


WITHOUT_THE_COMMAND_LINE = """
import runpy, sys
sys.modules.update(dict.fromkeys(["typer", "rich", "matplotlib"]))
sys.argv = ["bench", *sys.argv[1:]]
runpy.run_module("gradengine.bench", run_name="__main__")
"""


def test_it_needs_neither_typer_nor_rich_nor_matplotlib():
    command = [sys.executable, "-c", WITHOUT_THE_COMMAND_LINE, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--compile-limit" in done.stdout


def test_small_sizes_run_everything_quickly(tmp_path):
    given = parser().parse_args(["host", "--small", "--dtype", "float32"])
    small = benchmarks_of(given, device(scratch=1 << 30))
    assert (small.options.blocks, small.gpu.scratch, small.gpu.copied % 32) == (1, 1 << 14, 0)
    assert benchmarks_of(parser().parse_args(["host", "--odd"]), device()).options.odd
    assert run(small, given.names, tmp_path / "host.json", lambda report: None) == []


def test_wrong_results_of_ours_are_not_timed(tmp_path):
    class Wrong:
        """Kernels that leave a factor out."""

        def __getattr__(self, name):
            return getattr(kernels(), name)

        def scale(self, sources, factor, destinations):
            kernels().scale(sources, np.float32(2 * factor), destinations)

    reports, failed, shown = ran(["hand-back"], tmp_path, device=device(kernels=Wrong()))
    assert failed == ["hand-back: ours"]
    assert "ours" not in rows_of(reports["hand-back"])
    assert "absent: ours: ResultsDiffer: hand-back: 'ours' has a wrong result" in re.sub(r"\s+", " ", shown)


# ---- memory and time ----


def test_what_is_asked_of_torch_on_a_gpu():
    fake, calls = MagicMock(), []
    real = Gpu(xp=cuda_emulator, kernels=kernels(), torch_module=fake)
    bits = np.ones(3, np.uint16)
    assert real.tensor(bits) is fake.as_tensor.return_value.view.return_value
    assert fake.as_tensor.call_args.args[0].dtype == np.int16
    assert fake.as_tensor.call_args.kwargs == {"device": "cuda"}
    fake.as_tensor.return_value.view.assert_called_with(fake.bfloat16)
    assert real.tensor(np.ones(3, np.float32)) is fake.as_tensor.return_value
    replay = real.recorded(lambda: calls.append(1))
    assert len(calls) == 3  # two to warm up, one that is recorded
    replay()
    fake.cuda.CUDAGraph.return_value.replay.assert_called_once_with()
    assert len(calls) == 3
    real.compiled(len)
    fake.compile.assert_called_once_with(len, fullgraph=True, dynamic=False)


def test_odd_buffers_lie_at_odd_elements():
    arrays = device().placed([np.ones(5, np.uint16)] * 5, odd=True)
    assert [array.data.ptr // 2 % 64 for array in arrays] == [1, 3, 5, 7, 1]
    assert [array.data.ptr // 2 % 64 for array in device().placed([np.ones(70, np.uint16)] * 2)] == [0, 0]


def test_a_sample_prepares_reads_scratch_and_waits(monkeypatch):
    done = []
    case = Case(lambda: done.append("run"), lambda: 0.0, prepare=lambda: done.append("prepare"))
    monkeypatch.setattr(cuda_emulator.cuda, "get_elapsed_time", lambda start, stop: 7.0)
    gpu = device(clock=ticking(1))
    gpu.sample(case)
    done.clear()
    with cuda_emulator.recorded() as record:
        sample = gpu.sample(case)
    assert done == ["prepare", "run"] * 2
    assert sample == (0.007, 1, 1)
    assert record.launches == ["measure_small"] * 2
    assert record.waits == ["event", "device", "device"]


@pytest.mark.skipif(not TORCH, reason="torch is not installed")
@pytest.mark.filterwarnings("ignore")  # of a torch without CUDA
def test_torch_s_profiler_is_understood():
    count = profiled(device())
    work = torch.ones(3)
    assert count(lambda: work.add_(1)) == Counter()


def test_events_are_counted_by_their_names():
    host, gpu = "DeviceType.CPU", "DeviceType.CUDA"
    events = [
        (host, "aten::add_"),
        (host, "cudaLaunchKernel"),
        (host, "cuLaunchKernelEx"),
        (host, "cudaGraphLaunch"),
        (host, "cudaDeviceSynchronize"),
        (host, "cudaEventQuery"),
        (gpu, "accumulate_1_small"),
        (gpu, "Memcpy DtoH (Device -> Pinned)"),
        (gpu, "Memset (Device)"),
    ]
    assert counts_of(events) == counts(1, 1, 1, 3, 1)


# ---- bench/gpu_once.py ----


def test_every_kernel_once():
    with cuda_emulator.options(check=True, asynchronous=True), cuda_emulator.recorded() as record:
        gpu_once.everything(kernels())
    assert {name.rpartition("_")[0] for name in record.launches} >= {
        "accumulate_1",
        "accumulate_4",
        "measure",
        "hand_back",
    }
    assert {name for name in record.launches if name.endswith("_large")} >= {"measure_large", "hand_back_large"}
