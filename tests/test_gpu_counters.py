"""measured/gpu_counters.py: a script in ncu's place; and what it is to watch, on CuPy over the stand-in driver."""

import json
import sys

import draw
import gpu_counters
import pytest
from gpu_counters import METRICS, READ, TIME, WRITTEN, Failed

from gradengine.bench.device import Gpu

HEAD = '"ID","Process ID","Kernel Name","Block Size","Section Name","Metric Name","Metric Unit","Metric Value"'
COUNTED = {TIME: ("ns", "1,500,000"), READ: ("byte", "3,000,000,000"), WRITTEN: ("byte", "1,500,000,000.00")}
OTHERS = dict.fromkeys(set(METRICS) - set(COUNTED), ("", "62.5"))


def csv(*kernels, **changed):
    """As ncu writes it, after the lines that it says itself."""
    counted = {**COUNTED, **OTHERS, **changed}
    lines = [
        f'"{number}","9","{kernel}","(512, 1, 1)","Command line profiler metrics","{metric}","{unit}","{value}"'
        for number, kernel in enumerate(kernels)
        for metric, (unit, value) in counted.items()
    ]
    return ["==PROF== Connected to process 9 (/usr/bin/python3)", HEAD, *lines]


def test_each_launch_is_a_row_in_the_order_of_launches():
    first, second = gpu_counters.rows_of(csv("accumulate_1_small(const Row *, u32)", "finalise"))
    assert (first["variant"], second["variant"]) == ("1 accumulate_1_small", "2 finalise")
    assert first["device_s"] == pytest.approx(1.5e-3)
    assert (first["bytes"], first["gb_per_s"]) == (4.5e9, pytest.approx(3000))
    assert first["counters"].keys() == set(METRICS)


@pytest.mark.parametrize("unit", ["us", "usecond"])
def test_a_unit_that_is_not_the_base_is_understood(unit):
    assert gpu_counters.rows_of(csv("finalise", **{TIME: (unit, "12.5")}))[0]["device_s"] == pytest.approx(12.5e-6)


def test_what_cannot_be_understood_or_is_not_counted_is_refused():
    with pytest.raises(Failed, match=r"gpu__time_duration.sum in 'cycle': expected one of ns, us"):
        gpu_counters.rows_of(csv("finalise", **{TIME: ("cycle", "1")}))
    with pytest.raises(Failed, match=f"does not count {READ} in '1 finalise'"):
        gpu_counters.rows_of(line for line in csv("finalise") if READ not in line)


FORBIDDEN = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"


NCU = """#!{python}
import pathlib, sys
assert "--work" in sys.argv
pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1]).write_text({text!r})
sys.exit({status})
"""


@pytest.mark.parametrize(
    ("written", "status", "code", "rows", "said"),
    [
        (csv("accumulate_1_small", "finalise"), 0, 0, 2, "float32 1 accumulate_1_small: 3000 GB/s"),
        ([FORBIDDEN], 1, 0, 0, "absent: ncu: ERR_NVGPUCTRPERM - The user does not have"),
        (["==WARNING== No kernels were profiled."], 0, 1, None, "failed: counters: float32: ncu has seen 0 launches"),
        (csv("finalise"), 9, 1, None, "exit status 9"),
        (None, 0, 0, 0, "absent: ncu: ncu is not on the PATH"),
    ],
)
def test_what_becomes_of_ncus_words(written, status, code, rows, said, tmp_path, monkeypatch, capsys):
    if written is not None:
        ncu, text = tmp_path / "ncu", "\n".join(written)
        ncu.write_text(NCU.format(python=sys.executable, text=text, status=status))
        ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "counters.json"
    assert gpu_counters.main(["--json", str(path)]) == code
    assert said in capsys.readouterr().out
    reports = json.loads(path.read_text())["reports"] if path.exists() else []
    assert [len(each["rows"]) for each in reports] == ([] if rows is None else [rows, rows])
    assert [row for each in reports for row in draw.rows_shown(each)] == []  # the tables are of times
    assert [each["parameters"]["dtype"] for each in reports] == ([] if rows is None else ["float32", "bfloat16"])


@pytest.mark.parametrize("dtype", gpu_counters.DTYPES)
def test_what_ncu_watches_launches_each_kernel(dtype, emulated):
    from real_cupy.running import launches

    before = dict(launches)
    kernels = emulated.kernels
    gpu_counters.work(Gpu(xp=kernels.xp, kernels=kernels, torch_module=None), dtype, gpu_counters.SMALL)
    grown = {name: count - before.get(name, 0) for name, count in launches.items()}
    ours = {"accumulate_1_small": 2, "accumulate_4_small": 1, "measure_small": 1, "finalise": 3, "hand_back_small": 3}
    assert {name: grown.get(name) for name in ours} == ours
