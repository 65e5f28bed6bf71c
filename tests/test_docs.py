"""The pages show what the code does: their blocks run as copied, print what is shown, and links lead somewhere."""

import ast
import contextlib
import doctest
import functools
import importlib.util
import io
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import draw
import msgpack
import numpy as np
import provoked
import pytest

import gradengine
from gradengine import DynamicLossScale, GradientEngine, GradientLayout, SpikePolicy, errors, local_group
from gradengine.exchange.wire import checksum, encoded, head

ROOT = Path(__file__).parent.parent
NOTEBOOKS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.ipynb"))]
PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")))]
COLUMNS = 88  # of code: a site cuts longer lines off
# Optional packages: a block that imports one is skipped if it is not installed.
OPTIONAL = ("cupy", "torch", "jax", "optax", "flax", "transformers", "peft", "accelerate", "lightning")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
# A block of Python, and the block of text after it if that is introduced by "... prints:" or by nothing.
RUN = re.compile(r"^```python\n(.*?)^```$(?:\n+(?:[^\n]* prints:\n+)?^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
CONTINUES = "# Continues"  # how a block begins that needs the names of the block before it
PRINTED = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def blocks_of(page, language="python"):
    return [code for named, code in FENCE.findall((ROOT / page).read_text()) if named == language]


def runs_of(page):
    """The page's blocks, each with what it prints, in lists of those that share their names."""
    runs = []
    for code, printed in RUN.findall((ROOT / page).read_text()):
        runs = [*runs[:-1], [*runs[-1], (code, printed)]] if code.startswith(CONTINUES) else [*runs, [(code, printed)]]
    return runs


def cells_of(notebook, kind):
    """The notebook's cells of this kind: the source, and for code the stored output of its print calls."""
    cells = [cell for cell in json.loads((ROOT / notebook).read_text())["cells"] if cell["cell_type"] == kind]
    stored = [[line for output in cell.get("outputs", ()) for line in output["text"]] for cell in cells]
    return [("".join(cell["source"]), "".join(lines)) for cell, lines in zip(cells, stored, strict=True)]


def needed_by(run):
    """Return the optional packages that the blocks import; `gradengine.torch` needs torch too."""
    code = "\n".join(code for code, _ in run)
    names = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", code, re.MULTILINE)
    return sorted({name.removeprefix("gradengine.").partition(".")[0] for name in names} & set(OPTIONAL))


def skip_without_packages(run, page):
    for name in needed_by(run):
        if importlib.util.find_spec(name) is None:
            pytest.skip("CuPy is not installed" if name == "cupy" else f"{page} needs {name}, which is not installed")


def execute(run, page):
    """Run the blocks in one namespace. Each prints what the page shows."""
    # A script that needs torchrun is defined and not run.
    is_launched = any("LOCAL_RANK" in code for code, _ in run)
    names, handler = {"__name__": "page" if is_launched else "__main__"}, signal.getsignal(signal.SIGTERM)
    try:
        for code, shown in run:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page, "exec"), names)
            assert not shown or doctest.OutputChecker().check_output(shown, printed.getvalue(), PRINTED), (
                f"{page} shows:\n{shown}\nand the block prints:\n{printed.getvalue()}"
            )
    finally:
        signal.signal(signal.SIGTERM, handler)
    return names


RUNS = [
    pytest.param(page, run, id="-".join([page, str(number), *needed_by(run)]))
    for page in PAGES
    for number, run in enumerate(runs_of(page))
]


@pytest.mark.parametrize(("page", "run"), RUNS)
def test_python_in_the_pages_runs_as_copied(page, run, tmp_path, monkeypatch):
    skip_without_packages(run, page)
    monkeypatch.chdir(tmp_path)
    execute(run, page)


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_code_in_the_notebooks_prints_what_is_stored(notebook, tmp_path, monkeypatch):
    run = cells_of(notebook, "code")
    assert any(stored for _, stored in run)
    skip_without_packages(run, notebook)
    monkeypatch.chdir(tmp_path)
    execute(run, notebook)


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_code_and_links_in_the_notebooks_fit_the_site(notebook):
    lines = [line for code, stored in cells_of(notebook, "code") for line in (code + "\n" + stored).splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []
    text = CODE.sub("", "".join(source for source, _ in cells_of(notebook, "markdown")))
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert [link for link in links if not (ROOT / notebook).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("printed", ["x 4", "x 5"])
def test_a_block_that_prints_other_lines_than_the_page_fails(printed, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 2\n```\n\n```py\nassert x == 3  # not run\n```\n\n"
        "```python\n# Continues.\nprint('x', x + 3)\n```\n\n"
        f"It prints:\n\n```text\n{printed}\n```\n\n```python\nx\n```\n"
    )
    continued, alone = runs_of(page)
    with pytest.raises(AssertionError) if printed != "x 5" else contextlib.nullcontext():
        execute(continued, page)
    with pytest.raises(NameError):
        execute(alone, page)


@pytest.mark.parametrize("page", PAGES)
def test_code_in_the_pages_fits_the_site(page):
    lines = [line for _, code in FENCE.findall((ROOT / page).read_text()) for line in code.splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []


def test_tables_of_results_are_the_recorded_ones():
    readme, benchmarks = ((ROOT / page).read_text() for page in ("README.md", "docs/project/benchmarks.md"))
    assert readme == draw.put(readme, draw.chosen(draw.RESULTS)), "run measured/draw.py"
    assert benchmarks == draw.drawn(benchmarks, draw.RESULTS), "run measured/draw.py"


def test_the_status_in_the_readme_is_the_project_s():
    readme = (ROOT / "README.md").read_text()
    assert f"version {gradengine.__version__}, not released" in readme
    tested = set(re.findall(r"at commit (\w+)", readme))
    (recorded,) = {json.loads(path.read_text())["versions"]["commit"] for path in draw.RESULTS.glob("gpu-*.json")}
    assert {recorded[: len(commit)] for commit in tested} == tested


def test_the_reference_has_every_public_name():
    """`__all__` is read from the source, since torch and JAX need not be installed."""
    shown = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    automodule = (ROOT / "gradengine/errors.py").read_text()
    shown += "".join(f"gradengine.{name}\n" for name in re.findall(r"^class (\w+)", automodule, re.MULTILINE))
    for module in ("gradengine", "gradengine.torch", "gradengine.jax"):
        source = (ROOT / module.replace(".", "/") / "__init__.py").read_text()
        names = {*re.findall(r'"(\w+)"', re.search(r"__all__ = \[(.*?)\]", source, re.DOTALL)[1])} - {"__version__"}
        assert len(names) > 3
        assert {name for name in names if not re.search(rf"\b{module}\.{name}\b(?!\.)", shown)} == set()


def test_the_reference_has_every_environment_variable():
    variable = re.compile(r"\bGRADENGINE_[A-Z_]+[A-Z]\b")
    source = "".join(path.read_text() for path in (ROOT / "gradengine").rglob("*.py"))
    page = (ROOT / "docs/reference/environment.md").read_text()
    assert {*variable.findall(source)} == {*variable.findall(page)}


# The page on errors: the heading above each message, and the program in provoked.py that raises it.
TROUBLE = "docs/how-to/troubleshooting.md"
MESSAGE = re.compile(r"^### ([^\n]+)\n\n```text\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
MESSAGES = dict(MESSAGE.findall((ROOT / TROUBLE).read_text()))
PROVOKED = {
    "A gradient is missing": provoked.lacking,
    "The engine was built from a different module": provoked.other_module,
    "An array is not contiguous": provoked.not_contiguous,
    "The window is short": provoked.short,
    "`zero_grad()` is missing, with hooks": provoked.old_grad,
    "`zero_grad()` is missing, by hand": provoked.not_cleared,
    "`zero_grad()` runs too early": provoked.cleared_early,
    "`optimizer.step()` runs before `attached.step()`": provoked.optimizer_first,
    "`engine.step()` with hooks": provoked.engine_step,
    "The hooks are gone": provoked.not_kept,
    "A gradient is NaN or Inf": provoked.not_finite,
    "The failed window is still open": provoked.kept,
    "A bf16 parameter does not take an fp32 gradient": provoked.half_precision,
    "No launcher": provoked.no_launcher,
    "A secret is needed": provoked.no_secret,
    "A rank did not join": provoked.missing_rank,
    "The ranks have different settings": provoked.other_setting,
    "The ranks have different weights": provoked.other_weights,
    "A rank is at a different step": provoked.other_step,
    "A rank is gone": provoked.gone,
    "A rank is late": provoked.late,
    "CuPy is missing": provoked.no_cupy,
    "A setting differs from the saved one": provoked.other_micro_batches,
    "The window cannot be saved any more": provoked.sent,
    "The state of a different rank": provoked.other_rank,
}


def without_numbers(text):
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", text).split())


@pytest.mark.parametrize("heading", PROVOKED)
def test_a_message_of_the_page_on_errors_is_raised_now(heading):
    with pytest.raises(errors.GradientError) as raised:
        PROVOKED[heading]()
    assert without_numbers(f"{raised.type.__name__}: {raised.value}") == without_numbers(MESSAGES[heading])


@functools.cache
def texts_of_the_package():
    """All string constants of gradengine, also the parts of f-strings."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "gradengine").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


@pytest.mark.parametrize("heading", sorted(MESSAGES.keys() - PROVOKED))
def test_the_words_of_a_message_that_is_not_provoked_are_the_package_s(heading):
    message = " ".join(MESSAGES[heading].removeprefix("UserWarning: ").split())
    name, _, rest = message.partition(": ")
    if hasattr(errors, name):
        message = re.sub(r"\bgot [^;]+", "", rest)  # the values are examples
    pieces = re.split(r"'[^']*'(?!\w)|(?:rank |step )?\d+|[:;()]|\. ", message)
    words = [piece.strip(" ,") for piece in pieces if len(piece.split()) > 1]
    assert words
    assert [piece for piece in words if piece not in texts_of_the_package()] == []


def test_the_table_of_metrics_has_the_keys_that_a_step_returns():
    layout = GradientLayout.of({"layers.0.w": (2,), "head": (3,)})
    gradients = {slot.name: np.arange(1, slot.size + 1, dtype=np.float32) for slot in layout.slots}
    on, off = (
        {"loss_scale": DynamicLossScale(1.0), "on_spike": SpikePolicy(), "measure_noise": True, "groups": "component"},
        {},
    )

    def keys_of(exchange, options):
        engine = GradientEngine(
            layout, exchange=exchange, micro_batches=2, average="per_worker", on_non_finite="skip", **options
        )
        for weight in (1.0, 2.0):
            engine.add(gradients, weight=weight)
        keys = engine.step().metrics(blocks=bool(options))
        return {re.sub(r"(noise|signal|noise_scale)/\w+", r"\1/<way>", key) for key in keys}

    with ThreadPoolExecutor(2) as pool:
        by_rank = [list(pool.map(keys_of, local_group(2), (options, options))) for options in (on, off)]
    every, always = ({re.sub(r"norm/.+", "norm/<name>", key) for key in one} for one, _ in by_rank)
    table = (ROOT / "docs/reference/metrics.md").read_text().partition("## ")[0]
    rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", table, re.MULTILINE))
    assert rows.keys() == every
    assert {key for key, condition in rows.items() if condition == "always"} == always


def test_destinations_of_a_module_are_always_shown_allocated():
    """Else what a window added up for a parameter that its last micro-batch did not use is dropped."""
    texts = [
        *map(ROOT.joinpath, PAGES),
        *(path for name in ("examples", "gradengine") for path in (ROOT / name).rglob("*.py")),
    ]
    shown = [call for path in texts for call in re.findall(r"out=gradients_of\(([^()]*)\)", path.read_text())]
    assert len(shown) >= 5
    assert [call for call in shown if "allocate=True" not in call] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "yaml")])
def test_yaml_in_the_pages_can_be_read(page):
    yaml = pytest.importorskip("yaml")
    for block in blocks_of(page, "yaml"):
        assert all(isinstance(document, dict) for document in yaml.safe_load_all(block))


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
    message = bytes.fromhex(blocks_of("docs/specs/wire.md", "text")[0])
    assert message == encoded("abort", "PeerLost", "rank 1 left")
    tag, _, payload = msgpack.unpackb(message)
    assert tag == 2**25 + 6
    assert msgpack.unpackb(payload) == ["PeerLost", "rank 1 left"]


def test_the_transfer_in_wire_md_is_what_it_says():
    transfer = bytes.fromhex(blocks_of("docs/specs/wire.md", "text")[1])
    tag, check, payload = msgpack.unpackb(transfer)
    facts = np.frombuffer(payload, "<f8")
    assert (tag, facts.tolist()) == (6 * 1 + 4, [1.0, 2.0])
    assert transfer == head(tag, checksum(tag, facts), facts.nbytes) + payload
    assert check == checksum(tag, facts)
