"""What the documents show is what the code does."""

import importlib.util
import re
import sys
from pathlib import Path

import cuda_emulator
import msgpack
import numpy as np
import pytest

from gradengine.errors import DeviceUnavailable
from gradengine.exchange.links.sockets import checksum, head
from gradengine.exchange.wire import PREFIX_BYTES, Abort, decode_header, decode_prefix
from gradengine.kernels.cuda import cuda_kernels
from gradengine.kernels.toolchain import load_cupy

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
# The other pages of docs/ answer a question each.
REFERENCES = {
    f"docs/{name}.md"
    for name in ("faults", "gpu-check", "gpu", "measured", "nccl", "numerics", "security", "tls", "wire")
}
ANSWERS = [page for page in PAGES if page.startswith("docs/") and page not in REFERENCES]
# Optional; a page that imports one is skipped where it is not installed.
FRAMEWORKS = ("torch", "jax", "optax", "flax", "transformers", "peft", "accelerate", "lightning")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def blocks_of(text, language="python"):
    return [code for named, code in FENCE.findall(text) if named == language]


def imported_by(blocks):
    """The top of every name that is imported; `gradengine.torch` needs torch too."""
    names = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", "\n".join(blocks), re.MULTILINE)
    return {name.removeprefix("gradengine.").partition(".")[0] for name in names}


def missing_framework(blocks):
    """The first framework that a page's blocks need and that is not installed, if there is one."""
    needed = sorted(imported_by(blocks) & set(FRAMEWORKS))
    return next((name for name in needed if importlib.util.find_spec(name) is None), None)


def run(page, monkeypatch, folder):
    """Block after block in one namespace; where there is no GPU, the emulator stands for CuPy."""
    blocks = blocks_of((ROOT / page).read_text())
    missing = missing_framework(blocks)
    if missing is not None:
        pytest.skip(f"{page} needs {missing}, which is not installed")
    if "cupy" in imported_by(blocks) and without_gpu():
        if cuda_emulator.compiler() is None:
            pytest.skip("g++ is not installed")
        monkeypatch.setitem(sys.modules, "cupy", cuda_emulator)
    monkeypatch.chdir(folder)
    cuda_kernels.cache_clear()
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    cuda_kernels.cache_clear()
    return names


def without_gpu():
    try:
        load_cupy(0)
    except DeviceUnavailable:
        return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_python_in_the_pages_runs(page, tmp_path, monkeypatch):
    run(page, monkeypatch, tmp_path)


def test_the_quickstart_is_ten_lines_and_learns_and_says_so(tmp_path, monkeypatch, capsys):
    section = (ROOT / "README.md").read_text().partition("## Ten lines")[2]
    lines = [line for line in blocks_of(section)[0].splitlines() if line.strip()]
    assert len(lines) == 10
    names = run("README.md", monkeypatch, tmp_path)
    np.testing.assert_allclose(names["w"], np.eye(8, 4), atol=1e-3)
    assert re.fullmatch(r"norm \de-0[5-9], error \de-0[5-9]\n", capsys.readouterr().out)


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_loggers_take_the_metrics(package, tmp_path, monkeypatch):
    pytest.importorskip(package)
    names = run("docs/metrics.md", monkeypatch, tmp_path)
    (block,) = [b for b in blocks_of((ROOT / "docs/metrics.md").read_text(), "py") if package in b]
    exec(compile(block, package, "exec"), names)
    names["engine"].add([np.ones(2, np.float32), None])
    names["engine"].step()
    names["writer" if package == "tensorboard" else "run"].__exit__(None, None, None)
    assert any(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())


class TestRunningThem:
    """The tests above would be worth nothing if this failed."""

    def test_a_block_that_fails_fails(self, tmp_path, monkeypatch):
        page = tmp_path / "page.md"
        page.write_text(
            "```python\nx = 1\n```\n\n```py\nassert x == 3  # not run\n```\n\n```python\nassert x == 2\n```\n"
        )
        with pytest.raises(AssertionError):
            run(page, monkeypatch, tmp_path)

    def test_imports_are_found_wherever_they_stand(self):
        found = imported_by(
            ["import numpy as np\nfrom gradengine.torch import x", "if 1:\n    import jax.numpy as jnp\n"]
        )
        assert {"torch", "jax", "numpy"} <= found
        assert imported_by(["from gradengine import connect  # import torch"]) == {"gradengine"}

    def test_only_a_framework_that_is_missing_is_missed(self):
        for name in FRAMEWORKS:
            missing = missing_framework([f"import {name}"])
            assert missing == (None if importlib.util.find_spec(name) else name)
        assert missing_framework(["import numpy"]) is None


class TestAnswers:
    """A page that answers a question does so at once."""

    @pytest.fixture(params=ANSWERS)
    def text(self, request):
        return (ROOT / request.param).read_text()

    def test_they_are_found(self):
        assert len(ANSWERS) >= 8

    def test_code_that_runs_begins_in_the_first_five_lines(self, text):
        assert any(line == "```python" for line in text.splitlines()[:5])

    def test_it_is_short(self, text):
        assert len(text.splitlines()) <= 115

    def test_lines_are_no_longer_than_code_is(self, text):
        assert [line for line in text.splitlines() if len(line) > 122 and not line.startswith("|")] == []

    def test_code_that_is_not_run_says_so_by_its_language(self, text):
        assert {language for language, _ in FENCE.findall(text)} <= {"python", "py", "sh", "text"}


def test_destinations_of_a_module_are_always_shown_allocated():
    """Else what a window added up for a parameter that its last micro-batch did not use is dropped."""
    texts = [ROOT / page for page in PAGES]
    texts += [path for folder in ("examples", "gradengine") for path in (ROOT / folder).rglob("*.py")]
    shown = [call for path in texts for call in re.findall(r"out=gradients_of\(([^()]*)\)", path.read_text())]
    assert len(shown) >= 5
    assert [call for call in shown if "allocate=True" not in call] == []


def test_readme_links_every_page_and_every_example():
    text = (ROOT / "README.md").read_text()
    files = [*ANSWERS, *REFERENCES, *(f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.py")))]
    assert [name for name in files if f"]({name})" not in text] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_files_named_in_the_pages_exist(page):
    text = (ROOT / page).read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make\s([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", CODE.sub("", text)):
        assert ((ROOT / page).parent / link).exists(), link
    for named in re.findall(r"(?<![\w/.])((?:examples|bench|docs|tests)/[\w./-]+\.\w+)", text):
        assert (ROOT / named).exists(), named


def test_every_install_line_names_what_there_is():
    """An extra of pyproject.toml; until there is a release, PyPI can only add an extra to what is installed."""
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", table, re.MULTILINE))
    assert {"cuda12", "cli", "plot"} <= extras
    texts = [ROOT / page for page in PAGES]
    texts += [path for folder in ("examples", "gradengine", "bench") for path in (ROOT / folder).rglob("*.py")]
    for path in texts:
        text = path.read_text()
        for named in re.findall(r"(?:gradengine|'\.)\[([a-z0-9,]+)\]'", text):
            assert set(named.split(",")) <= extras, f"{path}: {named}"
        assert not re.search(r"pip install (-\S+ )?gradengine\b", text), path


def test_the_message_in_wire_md_is_what_it_says():
    shown = blocks_of((ROOT / "docs/wire.md").read_text(), "hex")[0]
    message = bytes.fromhex(shown)
    header_bytes, payload_bytes = decode_prefix(message[:PREFIX_BYTES])
    header = message[PREFIX_BYTES : PREFIX_BYTES + header_bytes]
    assert decode_header(header, payload_bytes) == Abort("PeerLost")
    stream = msgpack.Unpacker()
    stream.feed(message)
    prefix, fields = stream
    assert prefix == ["GE", 4, 40, 11]
    assert fields["payload"] == b"rank 1 left"


def test_the_transfer_in_wire_md_is_what_it_says():
    transfer = bytes.fromhex(blocks_of((ROOT / "docs/wire.md").read_text(), "hex")[1])
    tag, check, payload = msgpack.unpackb(transfer)
    facts = np.frombuffer(payload, "<f8")
    assert (tag, facts.tolist()) == (6 * 1 + 4, [1.0, 2.0])
    assert transfer == head(tag, checksum(tag, facts), facts.nbytes) + payload
    assert check == checksum(tag, facts)


def test_tests_named_in_numerics_md_exist():
    for named in re.findall(r"`(test_\w+\.py)", (ROOT / "docs/numerics.md").read_text()):
        assert (ROOT / "tests" / named).exists(), named
