"""measured/gpu_settle.py: what becomes of answers; and the questions that the stand-in driver can answer, put to it."""

import contextlib
import json
import os
import sys

import cuda_emulator
import gpu_nccl
import gpu_rules
import gpu_settle
import pytest
from emulated_process_group import ProcessGroup, torch_with_nccl
from gpu_settle import QUESTIONS, NotHere, Question, Surprise

SCRIPT = """
import os, sys, time
name, small = sys.argv[2], "--small" in sys.argv
print("first line")
print("small" if small else os.environ.get("CUDA_MODULE_LOADING", "not said"))
if name == "bits-of-the-cpu":
    sys.exit("not the CPU's bits")
if name == "same-norm" and "SLEEPS" in os.environ:
    time.sleep(300)
if "FIFO" in os.environ:  # each waits for the other
    open(os.environ["FIFO"], "r" if name == "same-norm" else "w").close()
if name == "jax-in-flight":
    print("no JAX", file=sys.stderr)
    sys.exit(3)
"""


@pytest.fixture
def answered(tmp_path, monkeypatch):
    """The answers to some questions, as a script gives them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(gpu_settle, "__file__", str(script))

    def ask(*names, small=False, jobs=1):
        options = ["--json", str(tmp_path / "settle.json"), "--jobs", str(jobs), *(["--small"] if small else [])]
        code = gpu_settle.main([*names, *options])
        return code, json.loads((tmp_path / "settle.json").read_text())["settled"]

    return ask


def test_each_has_its_outcome_and_last_words_and_one_bad_answer_is_a_failure(answered, capsys):
    code, found = answered("managed-memory", "bits-of-the-cpu", "jax-in-flight", "beyond-2-31")
    assert code == 1
    assert {name: f"{each['outcome']}: {each['said']}" for name, each in found.items()} == {
        "managed-memory": "passed: not said",
        "bits-of-the-cpu": "failed: not the CPU's bits",
        "jax-in-flight": "absent: no JAX",
        "beyond-2-31": "passed: not said",
    }
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: bits-of-the-cpu: failed")]
    assert answered("managed-memory", "jax-in-flight")[0] == 0


def test_one_that_does_not_end_leaves_the_others_theirs(answered, monkeypatch):
    monkeypatch.setattr(gpu_settle, "LIMIT", 0.5)
    monkeypatch.setenv("SLEEPS", "1")
    code, found = answered("same-norm", "managed-memory")
    assert code == 1
    assert (found["same-norm"]["outcome"], found["same-norm"]["said"]) == ("timed out", "no answer within 0.5 s")
    assert "managed-memory" in found


def test_several_are_asked_at_once(answered, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("FIFO", str(tmp_path / "fifo"))
    code, found = answered("same-norm", "managed-memory", jobs=2)
    assert (code, list(found)) == (0, ["same-norm", "managed-memory"])


def test_each_process_has_its_questions_environment(answered):
    names = ("first-launch-in-capture", "first-launch-in-capture-loaded-before")
    assert [each["said"] for each in answered(*names)[1].values()] == ["LAZY", "EAGER"]


def test_all_are_asked_and_small_ones_where_there_is_no_device(answered):
    assert list(answered()[1]) == list(QUESTIONS)
    found = answered(small=True)[1]
    assert list(found) == [name for name, each in QUESTIONS.items() if each.small is not None]
    assert found["managed-memory"]["said"] == "small"


def test_an_unknown_question_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_settle.main(["why"])
    assert "no such question: why; there are first-launch-in-capture" in capsys.readouterr().err


def test_what_cannot_be_asked_here_is_no_failure(monkeypatch, capsys):
    def ask():
        raise NotHere("no memory")

    monkeypatch.setitem(QUESTIONS, "same-norm", Question(ask))
    assert gpu_settle.main(["--one", "same-norm"]) == gpu_settle.NOT_HERE
    assert capsys.readouterr().err == "no memory\n"


# ---- on CuPy over the stand-in driver ----


def test_the_table_of_what_a_capture_allows(emulated, capsys):
    assert gpu_settle.main(["--one", "rules-of-capture", "--small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(gpu_rules.PROBES)
    assert QUESTIONS["rules-of-capture"].lines == len(lines)
    void = "refused (cudaErrorStreamCaptureUnsupported), voids the capture"
    assert {f"malloc: {void}; relaxed: fine", f"eventQuery: {void}; relaxed: fine", "memGetInfo: fine"} <= set(lines)
    assert "isCapturing of it beside a blocking one: refused (cudaErrorStreamCaptureImplicit)" in "\n".join(lines)


def test_a_probe_that_does_not_work_gives_no_table(emulated, monkeypatch):
    monkeypatch.setattr(gpu_rules, "PROBES", {"x": gpu_rules.Probe(lambda xp, name: lambda: 1 / 0)})
    with pytest.raises(gpu_rules.Broken, match="rule_0_default: ZeroDivisionError: division by zero"):
        gpu_settle.main(["--one", "rules-of-capture"])
    stream = emulated.kernels.xp.cuda.Stream
    end_capture = stream.end_capture

    def without_a_word(captured):
        with contextlib.suppress(emulated.kernels.xp.cuda.runtime.CUDARuntimeError):
            return end_capture(captured)

    monkeypatch.setattr(stream, "end_capture", without_a_word)
    with pytest.raises(gpu_rules.Broken, match="whole though its own stream was waited for"):
        gpu_settle.main(["--one", "rules-of-capture"])


@pytest.mark.parametrize("is_moved", [True, False])
def test_what_a_group_of_one_moves(is_moved, emulated, monkeypatch):
    xp = emulated.kernels.xp
    monkeypatch.setitem(sys.modules, "torch", torch_with_nccl(xp))
    alone = ProcessGroup(xp, 1)
    alone.as_rank(0)
    if not is_moved:
        alone.all_to_all = lambda *given: None
    arrived = [{value if is_moved else 0.0} for value in gpu_nccl.SENT]
    assert gpu_nccl.moved_alone(xp, alone) == arrived


def test_each_call_that_does_not_tell_of_a_lost_device_is_named(emulated, monkeypatch):
    """Here the device works, so that each of them does what it should, and tells nothing."""
    monkeypatch.setattr(emulated.kernels.xp, "RawKernel", lambda code, name: lambda *given: None)
    with pytest.raises(Surprise) as told:
        gpu_settle.main(["--one", "lost-device-is-told"])
    names = ("latest_verdict", "add", "step", "replay", "check", "clip_by_global_norm", "discard", "state_dict")
    assert str(told.value) == "; ".join(f"{name}: nothing" for name in names)


@pytest.mark.parametrize("name", ["first-launch-in-capture", "bits-of-the-cpu", "same-norm"])
def test_a_good_answer(name, emulated):
    with cuda_emulator.options(asynchronous=False):  # nobody waits for the other work of one of them
        assert gpu_settle.main(["--one", name, "--small"]) == 0


def test_other_bits_are_a_bad_answer(emulated, monkeypatch):
    accumulated = gpu_settle._accumulated

    def one_bit_off(device, *given):
        sums = accumulated(device, *given)
        if device == "cpu":
            sums["float32"].view("uint32")[7] ^= 1
        return sums

    monkeypatch.setattr(gpu_settle, "_accumulated", one_bit_off)
    with pytest.raises(Surprise, match=r"got \('float32', 1\), expected \('float32', 0\)"):
        gpu_settle.main(["--one", "bits-of-the-cpu"])
