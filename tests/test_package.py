"""What a user gets (`make test-package`): the sdist, the wheel made of it, and both at work where nothing else is."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.skipif(os.environ.get("TEST_PACKAGE") != "1", reason="set TEST_PACKAGE=1, as make test-package does"),
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parent.parent
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PIP_NO_COMPILE": "1"}
OF_THE_REPOSITORY_ALONE = {".gitignore"}


def run(*command, cwd, **variables):
    line = list(map(str, command))
    done = subprocess.run(
        line, cwd=cwd, env={**ENVIRONMENT, **variables}, capture_output=True, text=True, timeout=600, check=False
    )
    done.seen = f"{line} ended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done


def printed(*command, cwd, **variables):
    done = run(*command, cwd=cwd, **variables)
    assert done.returncode == 0, done.seen
    return done.stdout


@pytest.fixture(scope="module")
def tracked():
    """The files of the repository, those that are to be added to it too."""
    return set(printed("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of this checkout, and the wheel that is made of the sdist alone."""
    folder = tmp_path_factory.mktemp("dist")
    printed(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return SimpleNamespace(sdist=sdist, wheel=wheel)


@pytest.fixture
def empty(tmp_path):
    """An environment where only pip is installed."""
    printed(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    return tmp_path / "venv" / "bin"


def test_the_sdist_has_every_file_of_the_repository(built, tracked):
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    lacks = tracked - names - OF_THE_REPOSITORY_ALONE
    assert not lacks, "name its folder in pyproject.toml, targets.sdist, or the file in OF_THE_REPOSITORY_ALONE above"
    assert names - tracked == {"PKG-INFO"}, "add the file to the repository, or to .gitignore"


def test_the_wheel_has_every_file_of_the_package(built, tracked):
    names = set(zipfile.ZipFile(built.wheel).namelist())
    ours = {name for name in tracked if name.startswith("gradengine/")}
    held = {name for name in names if ".dist-info/" not in name}
    assert held == ours, "the wheel holds gradengine/ as git has it: add the file, or keep it elsewhere"
    assert {Path(name).suffix for name in ours} == {".py", ".cu", ".cuh", ".typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_links_of_the_readme_work_on_an_index(built):
    archive = zipfile.ZipFile(built.wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    targets = re.findall(r"\]\(([^)]+)\)", archive.read(name).decode())
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_the_wheel_at_work_where_nothing_else_is(built, empty, tmp_path):
    printed(empty / "pip", "install", built.wheel, cwd=tmp_path)
    assert installed(empty) == {"gradengine", "msgpack", "numpy", "xxhash"}
    assert learned(printed(empty / "python", "-c", LOOP, cwd=tmp_path))
    version = printed(empty / "gradengine", "--version", cwd=tmp_path)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", version)
    for arguments in ([], ["doctor"]):
        assert "pip install 'gradengine[cli]'" in printed(
            empty / "python", "-m", "gradengine", *arguments, cwd=tmp_path
        )
    without = run(empty / "gradengine", "demo", cwd=tmp_path)
    assert (without.returncode, without.stdout) == (2, "")
    extra = re.fullmatch(r"gradengine: typer is not installed: pip install '(.*)'\n", without.stderr)
    assert extra, without.seen
    printed(empty / "pip", "install", extra.group(1), "pytest", cwd=tmp_path)
    assert not {"matplotlib", "torch", "jax"} & installed(empty)
    assert printed(empty / "gradengine", "--version", cwd=tmp_path) == version
    assert "pip install 'gradengine[plot]'" in printed(empty / "gradengine", "doctor", cwd=tmp_path)
    small = ["--blocks", 1, "--hidden", 64, "--rounds", 2]
    assert "all results within" in printed(empty / "gradengine", "bench", "step", *small, cwd=tmp_path)


def test_the_sdist_at_work(built, empty, tmp_path):
    printed(empty / "pip", "install", built.sdist, cwd=tmp_path)
    assert learned(printed(empty / "python", "-c", LOOP, cwd=tmp_path))


def installed(folder):
    lines = printed(folder / "pip", "list", "--format=freeze", cwd=folder).splitlines()
    return {line.partition("==")[0] for line in lines} - {"pip", "setuptools"}


LOOP = """
import numpy as np
from gradengine import GradientEngine, GradientLayout

w = np.zeros((8, 4), np.float32)  # learns to copy the first 4 of 8 numbers
engine = GradientEngine(GradientLayout.of({"w": w}), max_norm=1.0, micro_batches=4)
for step in range(100):
    for x in np.random.default_rng(step).standard_normal((4, 32, 8), np.float32):
        engine.add({"w": x.T @ (x @ w - x[:, :4]) / len(x)}, weight=len(x))
    result = engine.step()
    w -= 0.2 * result.gradients["w"]
print(f"norm {result.norm:.0e}, error {np.abs(w - np.eye(8, 4)).max():.0e}")
"""


def learned(text):
    return re.fullmatch(r"norm \de-0[5-9], error \de-0[5-9]\n", text)
