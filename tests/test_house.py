"""The house rules that a machine can keep: imports follow the data's way, files stay small, frameworks stay outside."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gradengine"

# Reading down is the data's way; a file imports only what stands above it.
ORDER = [
    "errors",
    "arguments",
    "unpacking",
    "tensor_parallel_cost",
    "dlpack",
    "buffer",
    "frameworks",
    "host_buffer",
    "device_buffer",
    "foreign_arrays",
    "shards",
    "tensor_parallel",
    "slots",
    "components",
    "layout",
    "kernels.contribution",
    "kernels.decision",
    "kernels.verdict",
    "kernels.mirror",
    "kernels.interface",
    "kernels.host",
    "kernels.tables",
    "kernels.toolkit",
    "kernels.device",
    "kernels.loans",
    "kernels.addresses",
    "kernels.launches",
    "kernels.cuda",
    "kernels",
    "elementwise",
    "gradients",
    "arrivals",
    "window",
    "block",
    "accumulate",
    "gpu_accumulate",
    "clip",
    "exchange.wire",
    "exchange.interface",
    "exchange.handshake",
    "exchange.coordinator",
    "exchange.group",
    "exchange.local",
    "exchange.channel",
    "exchange.server",
    "exchange.tcp",
    "exchange",
    "telling",
    "group_sum",
    "agreement",
    "tensor_parallel_group",
    "sharing",
    "destinations",
    "result",
    "late",
    "settings",
    "capture",
    "admission",
    "engine",
    "trainer",
    "",
]
FREE = ("bench", "demo", "plan", "doctor", "cli", "__main__", "torch", "jax")  # they use it; nothing in it uses them
FRAMEWORKS = {"torch", "jax", "cupy", "tensorflow", "mlx"}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


CORE = [(name, path) for name, path in modules() if name.split(".")[0] not in FREE]


def test_every_file_has_its_place():
    assert {name for name, _ in CORE} == set(ORDER)


@pytest.mark.parametrize(("name", "path"), CORE, ids=[name or "gradengine" for name, _ in CORE])
def test_a_file_imports_only_what_stands_before_it(name, path):
    for imported in imports(path):
        if imported.split(".")[0] == "gradengine":
            below = imported.removeprefix("gradengine").lstrip(".")
            assert below in ORDER, f"{name} imports {imported}"
            assert ORDER.index(below) < ORDER.index(name), f"{name} imports {imported}, which stands below it"


@pytest.mark.parametrize(("name", "path"), CORE, ids=[name or "gradengine" for name, _ in CORE])
def test_the_core_imports_no_framework(name, path):
    assert not FRAMEWORKS & {imported.split(".")[0] for imported in imports(path)}


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=[name or "gradengine" for name, _ in modules()])
def test_files_and_functions_stay_small(name, path):
    source = path.read_text()
    assert len(source.splitlines()) <= 600, name
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            length = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
            assert length <= 60, f"{name}.{node.name} has {length} lines"


def test_import_brings_no_framework_and_no_command_line():
    code = "import sys, gradengine; print(sorted({m.split('.')[0] for m in sys.modules}))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(ast.literal_eval(shown))
    assert not loaded & (FRAMEWORKS | {"typer", "rich", "matplotlib", "ml_dtypes"})
