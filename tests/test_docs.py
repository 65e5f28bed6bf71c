"""What the documents show is what the code does; a page that asks CuPy for a GPU runs where CuPy is."""

import importlib.util
import re
import signal
from pathlib import Path

import msgpack
import numpy as np
import pytest

from gradengine.exchange.wire import checksum, encoded, head

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
# Optional; a page that imports one is skipped where it is not installed.
OPTIONAL = ("cupy", "torch", "jax", "optax", "flax", "transformers", "peft", "accelerate", "lightning")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def blocks_of(page, language="python"):
    return [code for named, code in FENCE.findall((ROOT / page).read_text()) if named == language]


def needed_by(page):
    """Of the optional packages; `gradengine.torch` needs torch too."""
    names = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", "\n".join(blocks_of(page)), re.MULTILINE)
    return sorted({name.removeprefix("gradengine.").partition(".")[0] for name in names} & set(OPTIONAL))


def run(page, monkeypatch, folder):
    """Block after block in one namespace."""
    for name in needed_by(page):
        if importlib.util.find_spec(name) is None:
            pytest.skip("CuPy is not installed" if name == "cupy" else f"{page} needs {name}, which is not installed")
    monkeypatch.chdir(folder)
    names, handler = {}, signal.getsignal(signal.SIGTERM)
    try:
        for block in blocks_of(page):
            exec(compile(block, page, "exec"), names)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page}-{'-'.join(needed_by(page))}")
def test_python_in_the_pages_runs(page, tmp_path, monkeypatch):
    run(page, monkeypatch, tmp_path)


def test_a_block_that_fails_fails(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```py\nassert x == 3  # not run\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run(page, monkeypatch, tmp_path)


def test_the_quickstart_is_ten_lines_and_learns_and_says_so(tmp_path, monkeypatch, capsys):
    section = (ROOT / "README.md").read_text().partition("## Ten lines")[2]
    assert len([line for line in FENCE.search(section)[2].splitlines() if line.strip()]) == 10
    names = run("README.md", monkeypatch, tmp_path)
    np.testing.assert_allclose(names["w"], np.eye(8, 4), atol=1e-3)
    assert re.fullmatch(r"norm \de-0[5-9], error \de-0[5-9]\n", capsys.readouterr().out)


def test_destinations_of_a_module_are_always_shown_allocated():
    """Else what a window added up for a parameter that its last micro-batch did not use is dropped."""
    texts = [
        *map(ROOT.joinpath, PAGES),
        *(path for name in ("examples", "gradengine") for path in (ROOT / name).rglob("*.py")),
    ]
    shown = [call for path in texts for call in re.findall(r"out=gradients_of\(([^()]*)\)", path.read_text())]
    assert len(shown) >= 5
    assert [call for call in shown if "allocate=True" not in call] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_files_named_in_the_pages_exist(page):
    text, makefile = (ROOT / page).read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"(?:^|`)make\s([\w-]+)", text, re.MULTILINE)
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    links = [(ROOT / page).parent / link for link in re.findall(r"\]\((?!http)([^)#]+)\)", CODE.sub("", text))]
    files = re.findall(r"(?<![\w/.])((?:examples|measured|docs|tests)/[\w./-]+\.\w+)", text)
    files += [f"tests/{name}" for name in re.findall(r"`(test_\w+\.py)", text)]
    assert [path for path in [*links, *map(ROOT.joinpath, files)] if not path.exists()] == []


def test_every_install_line_names_what_there_is():
    """An extra of pyproject.toml; until there is a release, PyPI can only add an extra to what is installed."""
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", table, re.MULTILINE))
    texts = [ROOT / page for page in PAGES]
    texts += [path for folder in ("examples", "gradengine", "measured") for path in (ROOT / folder).rglob("*.py")]
    for path in texts:
        text = path.read_text()
        for named in re.findall(r"(?:gradengine|'\.)\[([a-z0-9,]+)\]'", text):
            assert set(named.split(",")) <= extras, f"{path}: {named}"
        assert not re.search(r"pip install (-\S+ )?gradengine\b", text), path


def test_the_message_in_wire_md_is_what_it_says():
    message = bytes.fromhex(blocks_of("docs/specs/wire.md", "hex")[0])
    assert message == encoded("abort", "PeerLost", "rank 1 left")
    tag, _, payload = msgpack.unpackb(message)
    assert tag == 2**25 + 6
    assert msgpack.unpackb(payload) == ["PeerLost", "rank 1 left"]


def test_the_transfer_in_wire_md_is_what_it_says():
    transfer = bytes.fromhex(blocks_of("docs/specs/wire.md", "hex")[1])
    tag, check, payload = msgpack.unpackb(transfer)
    facts = np.frombuffer(payload, "<f8")
    assert (tag, facts.tolist()) == (6 * 1 + 4, [1.0, 2.0])
    assert transfer == head(tag, checksum(tag, facts), facts.nbytes) + payload
    assert check == checksum(tag, facts)
