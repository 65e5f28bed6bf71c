"""What the documents show is what the code does."""

import re
import sys
from pathlib import Path

import cuda_emulator
import msgpack
import pytest

from gradengine.errors import DeviceUnavailable
from gradengine.exchange.wire import PREFIX_BYTES, Gradient, decode_header, decode_prefix
from gradengine.kernels.cuda import cuda_kernels
from gradengine.kernels.toolkit import load_cupy

ROOT = Path(__file__).parent.parent


def test_the_message_in_wire_md_is_what_it_says():
    shown = re.search(r"```hex\n(.*?)```", (ROOT / "docs/wire.md").read_text(), re.DOTALL).group(1)
    message = bytes.fromhex(shown)
    header_bytes, payload_bytes = decode_prefix(message[:PREFIX_BYTES])
    header = message[PREFIX_BYTES : PREFIX_BYTES + header_bytes]
    assert decode_header(header, payload_bytes) == Gradient(step=3, key=1, offset=0, dtype="<f4")
    stream = msgpack.Unpacker()
    stream.feed(message)
    prefix, fields = stream
    assert prefix == ["GE", 1, 57, 8]
    assert fields["payload"] == message[-8:]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_python_in_the_pages_runs(page, tmp_path, monkeypatch):
    """Block after block in one namespace; where there is no GPU, the emulator stands for CuPy."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    if any("import cupy" in block for block in blocks) and without_gpu():
        if cuda_emulator.compiler() is None:
            pytest.skip("g++ is not installed")
        monkeypatch.setitem(sys.modules, "cupy", cuda_emulator)
    monkeypatch.chdir(tmp_path)
    cuda_kernels.cache_clear()
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    cuda_kernels.cache_clear()


def without_gpu():
    try:
        load_cupy(0)
    except DeviceUnavailable:
        return True
    return False


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_and_files_named_in_the_pages_exist(page):
    text = (ROOT / page).read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


def test_tests_named_in_numerics_md_exist():
    for named in re.findall(r"`(test_\w+\.py)", (ROOT / "docs/numerics.md").read_text()):
        assert (ROOT / "tests" / named).exists(), named
