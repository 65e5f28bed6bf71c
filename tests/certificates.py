"""The folders of certificates that docs/how-to/tls.md makes, by the commands that it shows."""

import atexit
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from transports import SOON

PAGE = Path(__file__).parent.parent / "docs/how-to/tls.md"


@functools.cache
def folders():
    """Where they are: "run", of one certificate; "node1" and "node2", of one authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = Path(tempfile.mkdtemp(prefix="ge"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    one, authority = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    again = authority[authority.index("mkdir node1") :].replace("node1", "node2")
    for lines in (one, authority, again):
        shell(lines, folder)
    return folder


def shell(lines, folder):
    """Run lines of a shell in a folder."""
    subprocess.run(["sh", "-e", "-c", lines], cwd=folder, check=True, capture_output=True, timeout=SOON)
