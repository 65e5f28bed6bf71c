"""measured/gpu_loop.py at small sizes on the CPU, which has every loop but the captured one."""

import json

import pytest

torch = pytest.importorskip("torch")

import draw  # noqa: E402
import gpu_loop  # noqa: E402


def run(tmp_path, capsys):
    code = gpu_loop.main(["--small", "--k", "3", "--json", str(tmp_path / "loop.json")])
    (report,) = json.loads((tmp_path / "loop.json").read_text())["reports"]
    return code, report, capsys.readouterr().out.splitlines()


def test_each_loop_hands_its_optimizer_the_same_gradients_and_is_timed(tmp_path, capsys):
    code, report, lines = run(tmp_path, capsys)
    assert (code, report["benchmark"], report["failed"]) == (0, "loop", [])
    assert [row["variant"] for row in report["rows"]] == ["torch", "ours add", "ours attach"]
    assert report["absent"] == [{"variant": "ours captured", "why": "a CPU has no graphs"}]
    assert lines[-1] == "absent: ours captured: a CPU has no graphs"
    theirs, *ours = (row["error"] for row in report["rows"])
    assert 0 < max(ours) < theirs < gpu_loop.TOLERANCE  # theirs is summed in bf16
    table = [draw.gpu_line(report, row) for row in draw.rows_shown(report)]
    assert [line.split(" | ")[3].strip() for line in table] == ["", "", ""]  # no bytes are counted


@pytest.mark.parametrize("factor", [2, float("nan")])
def test_other_gradients_are_a_failure(factor, tmp_path, capsys, monkeypatch):
    def changed(parameters, most):
        next(parameters).grad.mul_(factor)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", changed)
    code, report, lines = run(tmp_path, capsys)
    assert (code, report["failed"]) == (1, ["torch"])
    assert "failed: loop: torch" in lines


def test_its_model_has_the_parameters_that_it_says():
    with torch.device("meta"):
        assert sum(each.numel() for each in gpu_loop.Gpt(gpu_loop.Sizes()).parameters()) == 124_439_808
